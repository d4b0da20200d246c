"""A plugin that raises, in any hook, is named with its distribution and costs nobody else.

Each hook has a case here, or a test that ELSEWHERE names; of steps and of KV connectors more
is in test_failing_steps.py and test_failing_connectors.py.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import prometheus_client
import pytest
import torch
from failing_plugins import bang, plugin_with, plugins_with, registering, settled, texts, with_field
from installing import Install
from serving import engine_config, running, save_random

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.config import KVTransferConfig, StructuredOutputsConfig
from jackfield.core.config.speculative_config import SpeculativeConfig
from jackfield.core.errors import JackfieldError, RequestFailed
from jackfield.core.hook_versions import API_VERSION
from jackfield.core.registration.plugin_checks import HOOKS
from jackfield.core.registry import KINDS, Plugins, Provenance, load_plugins
from jackfield.core.sampling_params import StructuredOutputsParams
from jackfield.plugins.attention.torch import TorchAttention
from jackfield.plugins.executors.inprocess import InProcessExecutor
from jackfield.plugins.kv_compressors.by_keys import Window
from jackfield.plugins.operations.triton import TritonOperations
from jackfield.plugins.speculators.ngram import Ngram

ELSEWHERE = {
    "register_routes": "tests/entrypoints/test_plugin_routes.py",
    "register_commands": "tests/entrypoints/test_plugins_command.py",
    "authenticate": "tests/entrypoints/test_request_hooks.py",
    "request_received": "tests/entrypoints/test_request_hooks.py",
    "register_logits_processors": "tests/core/worker/test_processors.py",
    "register_latent_attention_backends": "tests/plugins/attention/test_latent_attention_choice.py",
    "register_adapter_formats": "tests/core/adapters/test_adapter_registry.py",
    "register_adapter_resolvers": "tests/core/adapters/test_adapter_registry.py",
    "register_media_models": "tests/plugins/media/test_media_plugins.py",
    "register_parts": "tests/core/engine/test_failing_parts.py",
    "kv_cache_started": "tests/core/engine/test_cache_hooks.py",
    "kv_cache_changed": "tests/core/engine/test_cache_hooks.py",
    "register_collectives": "tests/core/parallel/test_collectives.py",
    "register_all2all_backends": "tests/core/parallel/test_expert_parallel.py",
}
"""Where what is called later is tested."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("failures"))


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


class BadFormat:
    config_file = tokenizer_file = load_format = "bad"
    read_config = read_chat_templates = read_tokenizer = staticmethod(bang)


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
    "register_checkpoint_formats": ("checkpoint_format", BadFormat, {"config_format": "bad"}),
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
