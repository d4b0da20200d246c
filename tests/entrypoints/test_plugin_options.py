"""Options, metrics and configuration classes of an installed plugin, as a user has them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import forked
import pytest
import transformers
from installing import Install
from serving import engine_config, save_random
from test_fronts import fronted

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError, PluginError
from jackfield.core.registry import NameConflict, load_plugins
from jackfield.entrypoints.server.serve_settings import settings

MINE = """
import prometheus_client
from aiohttp import web
from mine_options import Options

options = None

@hookimpl
def register_options(registry):
    registry.add("mine", "mine_options:Options")

@hookimpl
def options_ready(options):
    global given
    given = options

@hookimpl
def register_metrics(registry, engine):
    made = prometheus_client.Counter("mine_processes", "Processes.", ["depth"], registry=registry)
    made.labels(str(given.depth)).inc()

@hookimpl
def register_routes(app, engine):
    async def depth(request):
        return web.json_response(engine.plugins.options(Options).depth)
    app.router.add_get("/depth", depth)
"""
OPTIONS = """
from typing import Annotated
import msgspec

class Inner(msgspec.Struct, frozen=True):
    name: str = "none"

class Options(msgspec.Struct):
    depth: Annotated[int, msgspec.Meta(ge=1, description="How deep.")] = 3
    words: list[str] = []
    inner: Inner = Inner()
"""


@pytest.fixture
def mine(install: Install, tmp_path: Path) -> str:
    (tmp_path / "mine_options.py").write_text(OPTIONS)
    return install("mine", MINE)


def given_by(*argv: str) -> Any:
    """The typed options of an engine that this command line makes."""
    options = settings([*argv])
    engine = AsyncEngine(options.config, plugins=options.plugins)
    return engine.plugins.options(options.plugins["options"].load("mine"))


def test_options_come_from_flags_json_and_defaults(mine: str) -> None:
    options = given_by(
        "--plugin-options", '{"mine": {"depth": 9, "words": ["a"]}}',
        "--plugin-option", "mine.depth=4", "--plugin-option", "mine.inner.name=who knows",
    )  # fmt: skip
    assert (options.depth, options.words, options.inner.name) == (4, ["a"], "who knows")
    assert given_by().depth == 3


def test_options_come_from_a_file_and_the_command_line_wins(mine: str, tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("plugin-options: {mine: {depth: 5, words: [b]}}\n")
    assert (given_by("--config", str(file)).depth) == 5
    result = given_by("--config", str(file), "--plugin-option", "mine.depth=6")
    assert (result.depth, result.words) == (6, ["b"])
    file.write_text("plugin-option: [mine.depth=7, mine.inner.name=x]\n")
    assert given_by("--config", str(file)).depth == 7


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("mine.depth=0", "plugin_options.mine: Expected `int` >= 1 - at `$.depth`"),
        ("mine.depth=many", "plugin_options.mine: Expected `int`, got `str` - at `$.depth`"),
        ("mine.dept=4", "plugin_options.mine.dept: no such option; did you mean 'depth'?"),
        ("mins.depth=4", "no plugin takes options under this name; did you mean 'mine'?"),
        ("mine=4", "'mine=4' is not NAME.key=value"),
        ("mine.depth", "'mine.depth' is not NAME.key=value"),
        (".depth=4", "is not NAME.key=value"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(mine: str, flag: str, message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        given_by("--plugin-option", flag)


def test_options_of_a_plugin_that_was_left_out_are_refused_with_its_reason(
    install: Install,
) -> None:
    install("mine", "raise RuntimeError('bang')")
    message = "plugin mine-point of mine 1.0 is left out: RuntimeError: bang"
    with pytest.raises(ConfigError, match=re.escape(message)):
        given_by("--plugin-option", "mine.depth=4")


def test_options_that_no_plugin_registered_are_reported(mine: str) -> None:
    with pytest.raises(PluginError, match="no plugin of this engine has options of the class"):
        AsyncEngine(EngineConfig(), plugins=load_plugins()).plugins.options(SamplingParams)


def test_several_front_ends_have_the_options_and_count_together(
    mine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", forked.python_path(tmp_path))
    with fronted("--plugin-option", "mine.depth=4") as server, server.client() as client:
        assert client.get("/depth").json() == 4
        actual = server.metrics(client)
        assert actual["mine_processes_total", ("depth", "4")] == 3, "the engine and two front ends"
        assert ("jackfield:num_requests_running",) in actual


# ---------------------------------------------------------------- configuration classes

CONFIGS = """
@hookimpl
def register_configs(registry):
    registry.add("{model_type}", "config_of_{model_type}:Config"{override})
"""
CONFIG = """
import transformers

class Config(transformers.Qwen3Config):
    model_type = "{model_type}"

    def __init__(self, width=None, **fields):
        super().__init__(**fields)
        if width is not None:
            self.hidden_size = width
"""


def checkpoint_of(model_type: str, folder: Path) -> Path:
    """One whose config.json has a field that its class alone understands."""
    save_random(folder)
    raw = json.loads((folder / "config.json").read_text())
    raw |= {"model_type": model_type, "width": raw.pop("hidden_size")}
    (folder / "config.json").write_text(json.dumps(raw))
    return folder


async def test_a_configuration_class_is_there_before_the_model_and_lazily(
    install: Install, tmp_path: Path
) -> None:
    install("newer", CONFIGS.format(model_type="newer", override=""))
    (tmp_path / "config_of_newer.py").write_text(CONFIG.format(model_type="newer"))
    plugins = load_plugins()
    entry = plugins["config"].entry("newer")
    assert isinstance(entry.reference, str)
    config = engine_config(checkpoint_of("newer", tmp_path / "model"))
    async with AsyncEngine(config, plugins=plugins) as engine:
        hf_config = engine.model_config.hf_config
        assert (type(hf_config).__name__, hf_config.hidden_size, hf_config.model_type) == (
            "Config",
            64,
            "newer",
        )
        params = SamplingParams(max_tokens=3, ignore_eos=True)
        *_, last = [output async for output in engine.generate([5, 6], params)]
        assert len(last.outputs[0].token_ids) == 3
    assert "newer" not in transformers.CONFIG_MAPPING


@pytest.mark.parametrize("override", ["", ", override=True"])
async def test_a_type_that_jackfield_reads_is_taken_over_on_purpose_alone(
    install: Install, tmp_path: Path, override: str
) -> None:
    install("qwen3", CONFIGS.format(model_type="qwen3", override=override))
    (tmp_path / "config_of_qwen3.py").write_text(CONFIG.format(model_type="qwen3"))
    config = engine_config(checkpoint_of("qwen3", tmp_path / "model"))
    if override:
        async with AsyncEngine(config) as engine:
            assert engine.model_config.hf_config.hidden_size == 64
        return
    with pytest.raises(NameConflict, match=r"'qwen3' is registered twice: .* with override=True"):
        AsyncEngine(config)
