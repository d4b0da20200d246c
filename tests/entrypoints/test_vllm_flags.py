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
    file.write_text("enable_sleep_mode: true\n")
    args = parser.parse_args(["--config", str(file)])
    with pytest.raises(ConfigError, match="enable_sleep_mode: an engine"):
        with_config(parser, [], args)
    file.write_text("swap-space: 4\nenable-reasoning: true\n")
    argv = with_config(parser, ["model"], args)
    assert len(list(without_effect(parser.parse_args(argv)))) == 2


@pytest.mark.parametrize(
    ("text", "value"),
    [("2k", 2000), ("1.5k", 1500), ("32K", 32768), ("1M", 2**20), ("0.001k", 1), ("7", 7),
     ("auto", "auto"), ("-1", -1)],
)  # fmt: skip
def test_whole_numbers_may_end_in_a_letter(text: str, value: object, tmp_path: Path) -> None:
    parser, file = make_parser(), tmp_path / "flags.yaml"
    assert parser.parse_args(["--max-model-len", text]).max_model_len == value
    file.write_text(f"max-model-len: {text}\n")
    argv = with_config(parser, [], parser.parse_args(["--config", str(file)]))
    assert parser.parse_args(argv).max_model_len == value


@pytest.mark.parametrize("text", ["k", "1.0001k", "1.5", "2kk", "2 k", "1e3", "-1k", "2b", "1_0k"])
def test_other_letters_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        make_parser().parse_args([f"--max-model-len={text}"])
    assert raised.value.code == 2
    error = capsys.readouterr().err
    assert f"--max-model-len: must be a whole number, got '{text}', or auto" in error


@pytest.mark.parametrize("second", ["max-model-len", "max_model_len"])
def test_a_file_with_a_flag_twice_is_refused(second: str, tmp_path: Path) -> None:
    parser, file = make_parser(), tmp_path / "flags.yaml"
    file.write_text(f"max-model-len: 5\nport: 1\n{second}: 6\n")
    with pytest.raises(ConfigError, match=f"line 3: {second} is there twice"):
        with_config(parser, [], parser.parse_args(["--config", str(file)]))


def test_the_log_says_it_once(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "jackfield.serve"):
        options = settings(
            ["-O3", "-O2", "--enable_prefix_caching", "-tp", "1", "--swap-space", "8"]
        )
    assert [record.message.split(":")[0] for record in caplog.records] == [
        "-O has no effect", "--swap-space has no effect",
    ]  # fmt: skip
    assert options.config.enable_prefix_caching and options.config.tensor_parallel_size == 1


def test_expert_parallelism_has_vllms_short_name() -> None:
    assert make_parser().parse_args(["-ep"]).enable_expert_parallel is True
