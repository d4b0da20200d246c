"""A plugin that raises, in any hook, is named with its distribution and costs nobody else.

Each hook has a case here, or a test that ELSEWHERE names.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import prometheus_client
import pytest
import torch
from installing import Install
from serving import engine_config, running, save_random

from jackfield import AsyncEngine, EngineConfig, SamplingParams, hookimpl
from jackfield.core.config import KVTransferConfig, StructuredOutputsConfig
from jackfield.core.config.speculative_config import SpeculativeConfig
from jackfield.core.errors import JackfieldError, RequestFailed
from jackfield.core.hooks import API_VERSION
from jackfield.core.nn.operations import Operations
from jackfield.core.nn.quantized import PRODUCTS
from jackfield.core.registration.failing_plugin import failing_plugin
from jackfield.core.registration.plugin_checks import HOOKS
from jackfield.core.registry import KINDS, Plugins, Provenance, load_plugins
from jackfield.core.sampling_params import StructuredOutputsParams
from jackfield.core.step import KVReport
from jackfield.plugins.attention.torch import TorchAttention
from jackfield.plugins.executors.inprocess import InProcessExecutor
from jackfield.plugins.kv_compressors.by_keys import Window
from jackfield.plugins.kv_connectors.cpu_offload import CpuOffloadConnector
from jackfield.plugins.models.qwen3 import Qwen3ForCausalLM
from jackfield.plugins.operations.triton import TritonOperations
from jackfield.plugins.quantization.fp8 import Fp8, Fp8Linear
from jackfield.plugins.speculators.ngram import Ngram

BAD = Provenance("bad-dist", "2.0", "bad")
ELSEWHERE = {
    "register_routes": "tests/entrypoints/test_plugin_routes.py",
    "register_commands": "tests/entrypoints/test_plugins_command.py",
    "authenticate": "tests/entrypoints/test_request_hooks.py",
    "request_received": "tests/entrypoints/test_request_hooks.py",
    "register_logits_processors": "tests/core/worker/test_processors.py",
    "register_latent_attention_backends": "tests/plugins/attention/test_latent_attention_choice.py",
    "register_collectives": "tests/core/parallel/test_collectives.py",
    "register_all2all_backends": "tests/core/parallel/test_expert_parallel.py",
}
"""Where what is called later is tested."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("failures"))


def bang(*_: Any, **__: Any) -> Any:
    raise RuntimeError("bang")


def plugin_with(**hooks: Callable[..., Any]) -> object:
    marked = {name: staticmethod(hookimpl(function)) for name, function in hooks.items()}
    return type("Bad", (), {"jackfield_api": API_VERSION, **marked})()


def plugins_with(**hooks: Callable[..., Any]) -> Plugins:
    plugins = load_plugins()
    plugins.add_plugin(plugin_with(**hooks), BAD)
    return plugins


def registering(kind: str, reference: object, **more: Any) -> Plugins:
    """Plugins of which one registers `reference` as "bad"."""

    def register(registry: Any) -> None:
        registry.add(more.pop("name", "bad"), reference, **more)

    return plugins_with(**{KINDS[kind]: register})


def test_every_hook_has_a_case() -> None:
    root = Path(__file__).resolve().parents[2]
    for hook in HOOKS:
        assert hook in ELSEWHERE or hook in STARTS or hook in REQUESTS or hook in EVENTS, hook
        if hook in ELSEWHERE:
            assert (root / ELSEWHERE[hook]).is_file()


# ---------------------------------------------------------------- while plugins are loaded


@pytest.mark.parametrize("hook", sorted(KINDS.values()))
def test_a_registration_that_raises_leaves_out_its_plugin_alone(
    install: Install, hook: str, caplog: pytest.LogCaptureFixture
) -> None:
    argument = "commands" if hook == "register_commands" else "registry"
    good = f"jackfield_api = {API_VERSION}\n@hookimpl\n"
    good += f"def {hook}({argument}):\n    {argument}.add('%s', 'a:b')\n"
    install("good", good % "good")
    install("bad", good % "half" + "    raise RuntimeError('bang')\n")
    install("late", good % "late")
    plugins = load_plugins()
    (kind,) = (kind for kind, name in KINDS.items() if name == hook)
    assert {"good", "late"} <= set(plugins[kind]) and "half" not in plugins[kind]
    assert [failed.provenance.distribution for failed in plugins.failed] == ["bad"]
    assert "plugin bad-point of bad 1.0 is left out: RuntimeError: bang" in caplog.text


# ---------------------------------------------------------------- while an engine starts


class BadConfig:
    from_dict = staticmethod(bang)


class BadMethod:
    name = "bad"
    supports = staticmethod(lambda device, dtype: None)
    from_config = staticmethod(bang)
    layer = bang


class BadLoader:
    __init__ = bang
    load = bang


class BadConnector:
    metadata_type = None
    make_scheduler = staticmethod(bang)
    make_worker = staticmethod(bang)


class BadModel:
    weight_map = None
    forward = compute_logits = __init__ = bang


class Options(msgspec.Struct):
    depth: int = 3


BadAttention = type("BadAttention", (TorchAttention,), {"supports": staticmethod(bang)})
BadOperations = type("BadOperations", (TritonOperations,), {"supports": staticmethod(bang)})
BadExecutor = type("BadExecutor", (InProcessExecutor,), {"start": bang})
BadCompressor = type("BadCompressor", (Window,), {"__init__": bang})
BadSpeculator = type("BadSpeculator", (Ngram,), {"__init__": bang})
BadPolicy = type("BadPolicy", (), {"__init__": bang, "key": bang})

STARTS: dict[str, tuple[str, object, dict[str, Any]]] = {
    "register_models": ("model", BadModel, {"name": "BadForCausalLM"}),
    "register_configs": ("config", BadConfig, {"name": "bad_type"}),
    "register_attention_backends": (
        "attention_backend",
        BadAttention,
        {"attention_backend": "bad"},
    ),
    "register_operations": ("operations", BadOperations, {"operations": "bad"}),
    "register_quantization": ("quantization", BadMethod, {"quantization": "bad"}),
    "register_weight_loaders": ("weight_loader", BadLoader, {"load_format": "bad"}),
    "register_executors": ("executor", BadExecutor, {"executor": "bad"}),
    "register_schedule_policies": ("schedule_policy", BadPolicy, {"scheduling_policy": "bad"}),
    "register_kv_compressors": ("kv_compressor", BadCompressor, {"kv_compression": "bad"}),
    "register_speculators": (
        "speculator",
        BadSpeculator,
        {"speculative_config": SpeculativeConfig(method="bad", num_speculative_tokens=2)},
    ),
    "register_kv_connectors": (
        "kv_connector",
        BadConnector,
        {"kv_transfer_config": KVTransferConfig(kv_connector="bad")},
    ),
}
"""Hook → what it registers, and the options that choose it."""


def with_field(checkpoint: Path, folder: Path, field: str, value: object) -> Path:
    """The same checkpoint, with another value in its config.json."""
    for file in checkpoint.iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**raw, field: value}))
    return folder


@pytest.mark.parametrize("hook", STARTS)
async def test_what_raises_at_the_start_is_named(
    hook: str, checkpoint: Path, tmp_path: Path
) -> None:
    kind, reference, settings = STARTS[hook]
    options = dict(settings)
    more = {}
    if "name" in options:  # What config.json names, and no option does.
        more["name"] = options.pop("name")
        field = "architectures" if kind == "model" else "model_type"
        value = [more["name"]] if kind == "model" else more["name"]
        checkpoint = with_field(checkpoint, tmp_path, field, value)
    engine = AsyncEngine(
        engine_config(checkpoint, **options), plugins=registering(kind, reference, **more)
    )
    with pytest.raises(JackfieldError, match=r" of bad-dist 2\.0 .*RuntimeError: bang"):
        await engine.start()
    await engine.stop()


@pytest.mark.parametrize(
    ("kind", "reference"), [("attention_backend", BadAttention), ("operations", BadOperations)]
)
async def test_auto_passes_over_what_raises(
    kind: str, reference: object, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plugins = registering(kind, reference, priority=99)
    config = engine_config(checkpoint, attention_backend="auto")
    with caplog.at_level(logging.INFO, "jackfield.worker"):
        async with AsyncEngine(config, plugins=plugins) as engine:
            assert await texts(engine) == 4
    assert "of bad-dist 2.0 failed in supports: RuntimeError: bang" in caplog.text


# ---------------------------------------------------------------- while requests are served


async def texts(engine: AsyncEngine, **options: Any) -> int:
    """Tokens of a request."""
    params = SamplingParams(max_tokens=4, ignore_eos=True, **options)
    *_, last = [output async for output in engine.generate([5, 6, 7], params)]
    return len(last.outputs[0].token_ids)


class BadParser:
    """Fails on texts, once it was made."""

    markers = ()
    reasoning_ended = False

    def __init__(self, **_: Any) -> None:
        pass

    feed = finish = bang


class BadGrammars:
    bounded = True
    unavailable = staticmethod(lambda: None)
    refusal = staticmethod(lambda spec: None)

    def __init__(self, vocabulary: Any) -> None:
        pass

    compile = bang


TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]


def parse(kind: str, option: str, checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    plugins = registering(kind, BadParser)
    with running(engine_config(checkpoint, **{option: "bad"}), plugins=plugins) as server:
        chat = {
            "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4,
            "ignore_eos": True, **({"tools": TOOLS} if kind == "tool_parser" else {}),
        }  # fmt: skip
        url = f"{server.url}/v1/chat/completions"
        response = httpx.post(url, json=chat, timeout=60)
        assert response.status_code == 500
        named = f"{kind.replace('_', ' ')} 'bad' of bad-dist 2.0 failed on this output"
        assert response.json()["error"]["message"] == named
        streamed = httpx.post(url, json=chat | {"stream": True}, timeout=60).text
        assert named in streamed
        other = {"prompt": "Hello", "max_tokens": 4, "ignore_eos": True, "model": "tiny"}
        reply = httpx.post(f"{server.url}/v1/completions", json=other, timeout=60)
        assert reply.json()["usage"]["completion_tokens"] == 4
        assert server.becomes(lambda engine: engine.stats().num_requests_running == 0)
    assert "RuntimeError: bang" in caplog.text


def reasoning(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    parse("reasoning_parser", "reasoning_parser", checkpoint, caplog)


def tools(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    parse("tool_parser", "tool_call_parser", checkpoint, caplog)


async def grammars(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    backend = StructuredOutputsConfig(backend="bad")
    config = engine_config(checkpoint, structured_outputs_config=backend)
    async with AsyncEngine(
        config, plugins=registering("structured_backend", BadGrammars)
    ) as api_client:
        with pytest.raises(JackfieldError, match="bad: RuntimeError: bang"):
            await texts(api_client, structured_outputs=StructuredOutputsParams(regex="a+"))
        assert await texts(api_client) == 4
    assert "structured backend 'bad' of bad-dist 2.0 failed" in caplog.text


async def options(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Left out whole; where the user gave it options, the start ends."""

    def both() -> Plugins:
        return plugins_with(
            options_ready=bang_with_options,
            register_options=lambda registry: registry.add("bad", Options),
            register_tool_parsers=lambda registry: registry.add("bad", BadParser),
        )

    def bang_with_options(options: Any) -> None:
        raise RuntimeError("bang")

    plugins = both()
    async with AsyncEngine(engine_config(checkpoint), plugins=plugins) as engine:
        assert await texts(engine) == 4
    assert "bad" not in plugins["tool_parser"] and "bad" not in plugins["options"]
    assert "plugin bad of bad-dist 2.0 failed in options_ready, and is left out" in caplog.text
    with pytest.raises(JackfieldError, match=r"bad of bad-dist 2\.0 failed in options_ready"):
        AsyncEngine(engine_config(checkpoint, plugin_options={"bad": {"depth": 4}}), plugins=both())


async def metrics(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    """None of its metrics are there; all others are."""

    def raising(registry: Any) -> None:
        prometheus_client.Gauge("mine_half", "Half.", registry=registry)
        raise RuntimeError("bang")

    plugins = plugins_with(register_metrics=raising)

    def taking(registry: Any) -> None:
        prometheus_client.Gauge("jackfield:num_requests_running", "Mine.", registry=registry)

    started = []

    def late(registry: Any) -> None:
        gauge = prometheus_client.Gauge("mine_late", "Late.", registry=registry)
        gauge.set_function(lambda: bang() if started else 0.0)

    def good(registry: Any) -> None:
        prometheus_client.Gauge("good", "Good.", registry=registry).set(7)

    for name, hook in (("taking", taking), ("late", late), ("good", good)):
        plugins.add_plugin(plugin_with(register_metrics=hook), Provenance(name, "1.0", name))
    async with AsyncEngine(engine_config(checkpoint), plugins=plugins) as engine:
        assert "mine_late 0.0" in (await engine.render_metrics()).decode()
        started.append(True)
        for _ in range(2):
            text = (await engine.render_metrics()).decode()
            assert "good 7.0" in text and "jackfield:num_requests_running{" in text
            assert "mine_half" not in text and "mine_late" not in text and "Mine." not in text
    assert "plugin bad of bad-dist 2.0 failed in register_metrics, which is left out" in caplog.text
    assert "'jackfield:num_requests_running' is there already, of jackfield" in caplog.text
    assert caplog.text.count("plugin late of late 1.0 failed in its metrics") == 1


async def policy_key(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Picky:
        def key(self, request: Any) -> tuple[int]:
            if request.priority:
                raise RuntimeError("bang")
            return (0,)

    config = engine_config(checkpoint, scheduling_policy="bad")
    async with AsyncEngine(config, plugins=registering("schedule_policy", Picky)) as engine:
        with pytest.raises(RequestFailed, match="bad-dist"):
            async for _ in engine.generate([5, 6], SamplingParams(max_tokens=4), priority=1):
                pass
        assert await texts(engine) == 4


Case = Callable[[Path, pytest.LogCaptureFixture], Awaitable[None] | None]
REQUESTS: dict[str, Case] = {
    "register_reasoning_parsers": reasoning,
    "register_tool_parsers": tools,
    "register_structured_backends": grammars,
    "register_options": options,
    "options_ready": options,
    "register_metrics": metrics,
    "schedule policies": policy_key,
}


@pytest.mark.parametrize("hook", REQUESTS)
async def test_what_raises_later_is_named_and_costs_its_request_or_itself(
    hook: str, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    done = REQUESTS[hook](checkpoint, caplog)
    if done is not None:
        await done


# ---------------------------------------------------------------- while a step is computed


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


# ---------------------------------------------------------------- KV connectors


CONNECTOR_METHODS = (
    "num_external_tokens", "start_load", "start_save", "request_finished", "build_metadata",
    "update",
)  # fmt: skip


class FailingScheduler:
    """Passes calls on to a connector that works, until it raises in `method`."""

    def __init__(self, inner: Any, method: str) -> None:
        self.inner = inner
        self.method = method
        self.after: list[str] = []
        """What was called after it had raised."""
        self.raised = False

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if self.raised:
                self.after.append(name)
            result = getattr(self.inner, name)(*args)
            if name == self.method:
                self.raised = True
                raise RuntimeError("bang")
            return result

        return call


class FailingConnector:
    """`cpu_offload`, whose scheduler half is a FailingScheduler."""

    metadata_type = CpuOffloadConnector.metadata_type

    def __init__(self, method: str) -> None:
        self.method = method

    def make_scheduler(self, setup: Any) -> Any:
        self.half = FailingScheduler(CpuOffloadConnector.make_scheduler(setup), self.method)
        return self.half

    def make_worker(self, setup: Any) -> Any:
        return CpuOffloadConnector.make_worker(setup)


def connected(checkpoint: Path, connector: object, **transfer: Any) -> AsyncEngine:
    transfer_config = KVTransferConfig(**{"kv_connector": "bad", **transfer})
    config = engine_config(checkpoint, kv_transfer_config=transfer_config, block_size=4)
    return AsyncEngine(config, plugins=registering("kv_connector", connector))


async def tokens_of(engine: AsyncEngine, prompt: list[int]) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    async with asyncio.timeout(300):
        *_, last = [output async for output in engine.generate(prompt, params)]
    assert last.error is None, last.error
    return last.outputs[0].token_ids


async def settled(engine: AsyncEngine) -> None:
    """No transfer holds a block any more."""
    async with asyncio.timeout(300):
        while engine.stats().kv_blocks_used:
            await asyncio.sleep(0.001)
    engine.core.scheduler.check_invariants()


@pytest.mark.parametrize("method", CONNECTOR_METHODS)
async def test_a_connector_that_raises_is_detached_and_requests_go_on_without_it(
    method: str, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [[5 + (i * step) % 90 for i in range(40)] for step in (1, 3, 7)]
    async with AsyncEngine(engine_config(checkpoint)) as engine:
        alone = [await tokens_of(engine, prompt) for prompt in prompts]
    connector = FailingConnector(method)
    async with connected(checkpoint, connector) as engine:
        for _ in range(2):  # What the first round has saved, the second loads.
            actual = await asyncio.gather(*(tokens_of(engine, prompt) for prompt in prompts))
            assert actual == alone
            await settled(engine)
            assert await engine.reset_prefix_cache()
        assert connector.half.raised and engine.healthy
        assert await tokens_of(engine, prompts[0]) == alone[0]
        await settled(engine)
    message = (
        f"kv connector 'bad' of bad-dist 2.0 failed in {method}: RuntimeError: bang; it is detached"
    )
    assert caplog.text.count(message) == 1
    assert connector.half.after == ["close"]


async def test_a_request_whose_load_cannot_begin_fails_by_name_where_loads_may_not(
    checkpoint: Path,
) -> None:
    connector = FailingConnector("start_load")
    prompt = list(range(5, 45))
    async with connected(checkpoint, connector, kv_load_failure_policy="fail") as engine:
        alone = await tokens_of(engine, prompt)
        await settled(engine)
        assert await engine.reset_prefix_cache()
        *_, last = [output async for output in engine.generate(prompt)]
        assert last.error is not None and "kv connector 'bad' of bad-dist 2.0" in last.error
        assert await tokens_of(engine, prompt) == alone
        await settled(engine)


async def test_a_request_that_waits_for_the_answer_of_a_connector_that_raises_goes_on(
    checkpoint: Path,
) -> None:
    """Nothing else is there to be computed, and nobody will wake the engine."""
    connector = FailingConnector("build_metadata")
    async with connected(checkpoint, connector) as engine:
        connector.half.inner.num_external_tokens = lambda *_: None
        assert len(await tokens_of(engine, list(range(5, 45)))) == 6


@pytest.mark.parametrize(
    ("method", "result"),
    [
        ("num_external_tokens", "many"), ("start_save", None), ("start_save", [10_000]),
        ("request_finished", None), ("request_finished", (False, "far away")),
    ],
)  # fmt: skip
async def test_a_connector_whose_results_are_none_is_detached(
    method: str, result: object, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with connected(checkpoint, FailingConnector("no method")) as engine:
        half = engine.core._connector
        assert half is not None
        setattr(half._connector.inner, method, lambda *_: result)
        assert len(await tokens_of(engine, list(range(5, 45)))) == 6
        await settled(engine)
    assert f"kv connector 'bad' of bad-dist 2.0 failed in {method}" in caplog.text


async def test_the_connector_among_several_that_raises_is_the_one_that_is_named(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = {"connectors": [{"kv_connector": "cpu_offload"}, {"kv_connector": "bad"}]}
    connector = FailingConnector("start_save")
    options_ = {"kv_connector": "multi", "kv_connector_extra_config": parts}
    async with connected(checkpoint, connector, **options_) as engine:
        assert len(await tokens_of(engine, list(range(5, 45)))) == 6
        await settled(engine)
    assert "kv connector 'bad' of bad-dist 2.0 failed in start_save" in caplog.text


class FailingWorker:
    """Passes calls on to a worker half that works, until it raises after a call that `fails`
    chooses: (method, its arguments, what it returned)."""

    def __init__(self, inner: Any, fails: Callable[[str, Any, Any], bool]) -> None:
        self.inner = inner
        self.fails = fails
        self.after: list[str] = []
        self.raised = False
        self.may_close = threading.Event()
        self.may_close.set()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            if self.raised:
                self.after.append(name)
            if name == "close":
                assert self.may_close.wait(300)
            result = getattr(self.inner, name)(*args)
            if self.fails(name, args, result):
                self.raised = True
                raise RuntimeError("bang")
            return result

        return call


class HalfConnector:
    """`cpu_offload`, whose worker half is a FailingWorker."""

    metadata_type = CpuOffloadConnector.metadata_type

    def __init__(self, fails: Callable[[str, Any, Any], bool]) -> None:
        self.fails = fails

    def make_scheduler(self, setup: Any) -> Any:
        self.scheduler = FailingScheduler(CpuOffloadConnector.make_scheduler(setup), "no method")
        return self.scheduler

    def make_worker(self, setup: Any) -> Any:
        self.half = FailingWorker(CpuOffloadConnector.make_worker(setup), self.fails)
        return self.half


def in_the_first_load(method: str, args: Any, result: Any) -> bool:
    return method == "start" and bool(args[0].loads)


CHOSEN: dict[str, Callable[[str, Any, Any], bool]] = {
    "start, with the first save": lambda method, args, result: method == "start",
    "start, with the first load": in_the_first_load,
    "poll, at once": lambda method, args, result: method == "poll",
    "poll, with its first report": lambda method, args, result: (
        method == "poll" and result is not None
    ),
}


@pytest.mark.parametrize("selection", CHOSEN)
async def test_a_worker_half_that_raises_is_detached_and_requests_go_on_without_it(
    selection: str, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    prompts = [[5 + (i * step) % 90 for i in range(40)] for step in (1, 3, 7)]
    async with AsyncEngine(engine_config(checkpoint)) as engine:
        alone = [await tokens_of(engine, prompt) for prompt in prompts]
    connector = HalfConnector(CHOSEN[selection])
    async with connected(checkpoint, connector) as engine:
        for _ in range(2):  # What the first round has saved, the second loads.
            actual = await asyncio.gather(*(tokens_of(engine, prompt) for prompt in prompts))
            assert actual == alone
            await settled(engine)
            assert await engine.reset_prefix_cache()
        assert connector.half.raised and engine.healthy
        request = len(connector.scheduler.after)
        connector.scheduler.raised = True  # Notes what is called from now on.
        assert await tokens_of(engine, prompts[0]) == alone[0]
        await settled(engine)
        assert len(connector.scheduler.after) == request
    method = selection.partition(",")[0]
    message = (
        f"kv connector 'bad' of bad-dist 2.0 failed in {method}: RuntimeError: bang; it is det"
    )
    assert caplog.text.count(message) == caplog.text.count("is detached") == 1
    assert connector.half.after == ["close"]
    assert connector.scheduler.after == ["close"]


async def test_blocks_are_retained_until_a_worker_half_that_raised_has_closed(
    checkpoint: Path,
) -> None:
    """It may write to them until then; the request that waits for its load does not wait."""
    connector = HalfConnector(in_the_first_load)
    prompt = list(range(5, 45))
    async with connected(checkpoint, connector) as engine:
        alone = await tokens_of(engine, prompt)
        await settled(engine)
        assert await engine.reset_prefix_cache()
        connector.half.may_close.clear()
        assert await tokens_of(engine, prompt) == alone
        assert await tokens_of(engine, prompt) == alone
        assert connector.half.raised and engine.stats().kv_blocks_used == 9
        assert engine.stats().num_kv_load_failures == 1
        engine.core.scheduler.check_invariants()
        connector.half.may_close.set()
        await settled(engine)


async def test_a_request_whose_load_is_cut_short_fails_by_name_where_loads_may_not(
    checkpoint: Path,
) -> None:
    connector = HalfConnector(in_the_first_load)
    prompt = list(range(5, 45))
    async with connected(checkpoint, connector, kv_load_failure_policy="fail") as engine:
        alone = await tokens_of(engine, prompt)
        await settled(engine)
        assert await engine.reset_prefix_cache()
        *_, last = [output async for output in engine.generate(prompt)]
        assert last.error is not None and "kv connector 'bad' of bad-dist 2.0" in last.error
        assert await tokens_of(engine, prompt) == alone
        await settled(engine)


async def test_a_worker_half_that_cannot_even_close_costs_the_blocks_of_its_transfers(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    connector = HalfConnector(
        lambda method, args, result: method == "close" or in_the_first_load(method, args, result)
    )
    prompt = list(range(5, 45))
    async with connected(checkpoint, connector) as engine:
        alone = await tokens_of(engine, prompt)
        await settled(engine)
        assert await engine.reset_prefix_cache()
        assert await tokens_of(engine, prompt) == alone
        async with asyncio.timeout(300):
            while "9 KV blocks are out of use" not in caplog.text:
                await asyncio.sleep(0.001)
        assert await tokens_of(engine, prompt) == alone
        assert engine.healthy and engine.stats().kv_blocks_used == 9
        engine.core.scheduler.check_invariants()
    assert "kv connector 'bad' of bad-dist 2.0 failed in close: RuntimeError: bang" in caplog.text


@pytest.mark.parametrize(
    "report", [17, KVReport(finished=("one",)), KVReport(failed={1: None})]  # type: ignore[dict-item,arg-type]
)  # fmt: skip
async def test_a_worker_half_whose_report_is_none_is_detached(
    report: object, checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    connector = HalfConnector(lambda *_: False)
    async with connected(checkpoint, connector) as engine:
        connector.half.inner.poll = lambda: report
        assert len(await tokens_of(engine, list(range(5, 45)))) == 6
        await settled(engine)
    assert "kv connector 'bad' of bad-dist 2.0 failed in poll: TypeError" in caplog.text


async def test_a_worker_half_that_raises_while_the_engine_stops_is_named(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    connector = HalfConnector(lambda method, args, result: method == "close")
    async with connected(checkpoint, connector) as engine:
        assert len(await tokens_of(engine, list(range(5, 45)))) == 6
    assert "kv connector 'bad' of bad-dist 2.0 failed in close: RuntimeError: bang" in caplog.text
    assert "stopping the executor" not in caplog.text


async def test_the_worker_half_among_several_that_raises_is_the_one_that_is_named(
    checkpoint: Path, caplog: pytest.LogCaptureFixture
) -> None:
    parts = {"connectors": [{"kv_connector": "bad"}, {"kv_connector": "cpu_offload"}]}
    connector = HalfConnector(lambda method, args, result: method in ("poll", "close"))
    options_ = {"kv_connector": "multi", "kv_connector_extra_config": parts}
    before = set(threading.enumerate())
    async with connected(checkpoint, connector, **options_) as engine:
        assert len(await tokens_of(engine, list(range(5, 45)))) == 6
    assert "kv connector 'bad' of bad-dist 2.0 failed in poll" in caplog.text
    assert "kv connector 'bad' of bad-dist 2.0 failed in close" in caplog.text
    remaining = {thread.name for thread in set(threading.enumerate()) - before}
    assert not remaining & {"jackfield-kv-load", "jackfield-kv-save"}, "the other one is not closed"


# ---------------------------------------------------------------- compression


async def test_a_compressor_that_raises_costs_the_request_that_it_was_to_score(
    checkpoint: Path,
) -> None:
    class Scores(Window):
        def scores(self, spec: Any, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
            if len(keys) == 50:
                bang()
            scores = super().scores(spec, keys, values)
            return scores[1:] if len(keys) == 60 else scores

    config = engine_config(checkpoint, kv_compression="bad", kv_compression_ratio=0.5)
    async with AsyncEngine(config, plugins=registering("kv_compressor", Scores)) as engine:

        async def error_of(length: int) -> str | None:
            params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
            prompt = list(range(length, 2 * length))
            *_, last = [output async for output in engine.generate(prompt, params)]
            return last.error

        first, second, *others = await asyncio.gather(*map(error_of, (50, 60, 52, 70, 8)))
        named = "kv compressor 'bad' of bad-dist 2.0 failed: "
        assert first == f"{named}RuntimeError: bang"
        assert second is not None and second.startswith(f"{named}ValueError: its scores are [59, ")
        assert others == [None, None, None]
        assert engine.stats().kv_compactions >= 2
        await settled(engine)


# ---------------------------------------------------------------- events

EVENTS = ("engine_started", "engine_stopping", "request_finished", "step_finished")


@pytest.mark.parametrize("is_async", [False, True])
@pytest.mark.parametrize("raised", [RuntimeError, SystemExit])
@pytest.mark.parametrize("event", EVENTS)
async def test_a_listener_that_raises_is_named_and_changes_nothing(
    event: str, raised: type[BaseException], is_async: bool, checkpoint: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    def bad() -> None:
        raise raised("bang")

    async def bad_later() -> None:
        raise raised("bang")

    heard = []
    plugins = plugins_with(**{event: bad_later if is_async else bad})
    good = plugin_with(**{event: lambda: heard.append(event)})
    plugins.add_plugin(good, Provenance("good", "1.0", "good"))
    async with AsyncEngine(engine_config(checkpoint), plugins=plugins) as engine:
        assert await texts(engine) == 4
        assert await texts(engine) == 4
    assert f"plugin bad-dist:bad failed in {event}" in caplog.text
    assert "bang" in caplog.text
    assert heard


def test_the_engines_configuration_is_refused_by_the_options_name() -> None:
    plugins = registering("options", Options)
    for value, message in [
        ({"bd": {}}, "plugin_options.bd: no plugin takes options under this name; did you mean"),
        ({"bad": {"dept": 1}}, "plugin_options.bad.dept: no such option; did you mean 'depth'?"),
        ({"bad": {"depth": "x"}}, "plugin_options.bad: Expected `int`, got `str`"),
    ]:
        with pytest.raises(JackfieldError, match=message.replace("?", r"\?")) as caught:
            AsyncEngine(EngineConfig(plugin_options=value), plugins=plugins)
        assert str(caught.value.param).startswith("plugin_options.b")
