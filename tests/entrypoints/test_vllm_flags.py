"""Command lines written for vLLM: what has no effect is taken, what is missing is named."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from jackfield.core.errors import ConfigError
from jackfield.entrypoints.flags.config_file import with_config
from jackfield.entrypoints.flags.vllm_flags import MISSING, NO_EFFECT, without_effect
from jackfield.entrypoints.server.serve_settings import make_parser, settings

VALUES = {0: [], 1: ["1"], "?": ["3"], "+": ["1", "2"]}


def test_no_flag_is_in_two_lists() -> None:
    own = make_parser()._option_string_actions
    assert not MISSING.keys() & own.keys()
    assert not MISSING.keys() & NO_EFFECT.keys()


@pytest.mark.parametrize("flag", NO_EFFECT)
def test_a_flag_without_effect_is_taken_and_changes_nothing(flag: str) -> None:
    plain = vars(make_parser().parse_args(["model"]))
    args = make_parser().parse_args(["model", flag, *VALUES[NO_EFFECT[flag][0]]])
    (sentence,) = without_effect(args)
    assert sentence.startswith(f"{flag} has no effect: ")
    assert {name: value for name, value in vars(args).items() if name != "no_effect"} == plain


@pytest.mark.parametrize("flag", MISSING)
def test_a_missing_feature_is_named(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        make_parser().parse_args(["model", flag, "1"])
    assert raised.value.code == 2
    assert f"{flag}: {MISSING[flag]}" in capsys.readouterr().err


def test_in_a_file_too(tmp_path: Path) -> None:
    parser, file = make_parser(), tmp_path / "flags.yaml"
    file.write_text("enable_lora: true\n")
    args = parser.parse_args(["--config", str(file)])
    with pytest.raises(ConfigError, match="enable_lora: adapters"):
        with_config(parser, [], args)
    file.write_text("swap-space: 4\ndisable-log-stats: true\n")
    argv = with_config(parser, ["model"], args)
    assert len(list(without_effect(parser.parse_args(argv)))) == 2


def test_the_log_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "jackfield.serve"):
        options = settings(
            ["-O3", "-O2", "--enable_prefix_caching", "-tp", "1", "--swap-space", "8"]
        )
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "-O has no effect", "--swap-space has no effect",
    ]  # fmt: skip
    assert options.config.enable_prefix_caching and options.config.tensor_parallel_size == 1
