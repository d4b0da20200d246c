"""A plugin that raises in a step is named with its distribution, and costs that step alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from failing_plugins import bang, registering, texts, with_field
from installing import Install
from serving import engine_config, save_random

from jackfield import AsyncEngine, hookimpl
from jackfield.core.hook_versions import API_VERSION
from jackfield.core.nn.operations import Operations
from jackfield.core.nn.quantized import PRODUCTS
from jackfield.core.registration.failing_plugin import failing_plugin
from jackfield.core.registry import Provenance, load_plugins
from jackfield.plugins.attention.torch import TorchAttention
from jackfield.plugins.models.qwen3 import Qwen3ForCausalLM
from jackfield.plugins.quantization.fp8 import Fp8, Fp8Linear


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("steps"))


class Trap:
    """Raises while it is set."""

    def __init__(self) -> None:
        self.set = False

    def spring(self) -> None:
        if self.set:
            raise RuntimeError("bang")


TRAP = Trap()


class TrappedAttention(TorchAttention):
    def forward(self, *args: Any, **options: Any) -> Any:
        TRAP.spring()
        return super().forward(*args, **options)


class TrappedModel(Qwen3ForCausalLM):
    def forward(self, *args: Any, **options: Any) -> Any:
        TRAP.spring()
        return super().forward(*args, **options)


class TrappedOperations(Operations):
    def cached_heads(self, *args: Any, **options: Any) -> Any:
        TRAP.spring()
        return super().cached_heads(*args, **options)


class TrappedLinear(Fp8Linear):
    def forward(self, *args: Any, **options: Any) -> Any:
        TRAP.spring()
        return super().forward(*args, **options)


class TrappedMethod(Fp8):
    def layer(self, spec: Any) -> Any:
        return TrappedLinear(spec) if spec.role in PRODUCTS else None


STEPS: dict[str, tuple[str, object, dict[str, Any]]] = {
    "register_models": ("model", TrappedModel, {}),
    "register_attention_backends": (
        "attention_backend",
        TrappedAttention,
        {"attention_backend": "bad"},
    ),
    "register_operations": ("operations", TrappedOperations, {"operations": "bad"}),
    "register_quantization": ("quantization", TrappedMethod, {"quantization": "bad"}),
}


@pytest.mark.parametrize("hook", STEPS)
async def test_what_raises_in_a_step_is_named_and_costs_that_step(
    hook: str, checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kind, reference, settings = STEPS[hook]
    name = "bad"
    if kind == "model":
        name = "BadForCausalLM"
        checkpoint = with_field(checkpoint, tmp_path, "architectures", [name])
    plugins = registering(kind, reference, name=name)
    failed = (
        f"{kind.replace('_', ' ')} '{name}' of bad-dist 2.0 failed in a step: RuntimeError: bang"
    )
    async with AsyncEngine(engine_config(checkpoint, **settings), plugins=plugins) as engine:
        TRAP.set = True
        try:
            *_, last = [output async for output in engine.generate([5, 6, 7])]
        finally:
            TRAP.set = False
        assert last.error == f"the step failed: {failed}"
        assert failed in caplog.text
        assert await texts(engine) == 4


async def test_what_is_ours_is_not_said_to_be_a_plugins(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plugins = registering("attention_backend", TrappedAttention)
    plugins["attention_backend"].load("bad")
    async with AsyncEngine(engine_config(checkpoint), plugins=plugins) as engine:
        monkeypatch.setattr(TorchAttention, "forward", None)
        *_, last = [output async for output in engine.generate([5, 6, 7])]
        assert last.error == "the step failed: TypeError: 'NoneType' object is not callable"


def test_the_plugin_that_was_called_last_is_named(install: Install) -> None:
    for name, kind in (("one", "models"), ("two", "attention_backends"), ("three", "operations")):
        code = f"""
            jackfield_api = {API_VERSION}

            @hookimpl
            def register_{kind}(registry):
                registry.add("{name}", Call)

            class Call:
                weight_map = forward = compute_logits = build_metadata = supports = None

            def call(inner):
                inner()
            """
        install(name, code)
    plugins = load_plugins()
    import one_plugin  # type: ignore[import-not-found]
    import two_plugin  # type: ignore[import-not-found]

    def named(function: Callable[[], object]) -> str | None:
        try:
            function()
        except RuntimeError as error:
            return failing_plugin(plugins, error)
        raise AssertionError("nothing was raised")

    def both() -> None:
        one_plugin.call(lambda: two_plugin.call(bang))

    assert named(both) is None, "none of them is in use"
    for kind, name in (("model", "one"), ("attention_backend", "two"), ("operations", "three")):
        plugins[kind]._loaded[name] = plugins[kind].entry(name).reference
    assert named(both) == "attention backend 'two' of two 1.0"
    assert named(lambda: one_plugin.call(bang)) == "model 'one' of one 1.0"
    assert named(bang) is None


def test_of_two_names_of_one_plugin_the_one_whose_module_failed_is_named() -> None:
    suite, attention, operations = map(ModuleType, ("suite", "suite.attention", "suite.operations"))
    for module in (attention, operations):
        exec("class Kind: ...\n\ndef call(inner): inner()", vars(module))

    def add_attention(registry: Any) -> None:
        registry.add("one", attention.Kind)

    def add_operations(registry: Any) -> None:
        registry.add("two", operations.Kind)

    suite.__dict__.update(
        jackfield_api=API_VERSION,
        register_attention_backends=hookimpl(add_attention),
        register_operations=hookimpl(add_operations),
    )
    plugins = load_plugins()
    plugins.add_plugin(suite, Provenance("suite", "1.0", "suite"))
    for kind, name in (("attention_backend", "one"), ("operations", "two")):
        plugins[kind]._loaded[name] = plugins[kind].entry(name).reference
    for module, expected in (
        (attention, "attention backend 'one'"),
        (operations, "operations 'two'"),
    ):
        with pytest.raises(RuntimeError) as raised:
            module.call(bang)
        assert failing_plugin(plugins, raised.value) == f"{expected} of suite 1.0"
