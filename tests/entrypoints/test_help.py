"""What the command line says of a mistake and of itself: one line; help by groups and words."""

from __future__ import annotations

import argparse
import subprocess
import sys

import pytest

from jackfield.core.config import EngineConfig
from jackfield.core.errors import ConfigError
from jackfield.core.spelling import nearest
from jackfield.entrypoints.cli.main import main
from jackfield.entrypoints.flags.engine_flags import with_flags
from jackfield.entrypoints.server.serve_settings import make_parser


def run(argv: list[str]) -> int:
    try:
        return main(argv)
    except SystemExit as raised:
        return int(raised.code or 0)


def output(argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """What a help option prints on standard output."""
    status = run(argv)
    captured = capsys.readouterr()
    assert (status, captured.err) == (0, "")
    return captured.out


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["serve", "--max-modle-len", "8"],
         "unrecognized argument: --max-modle-len; did you mean --max-model-len?"),
        (["serve", "--max_modle_len=8"],
         "unrecognized argument: --max_modle_len=8; did you mean --max-model-len?"),
        (["serve", "--nonsense"],
         "unrecognized argument: --nonsense; `jackfield serve --help` lists the options"),
        (["serve", "-x"],
         "unrecognized argument: -x; `jackfield serve --help` lists the options"),
        (["serve", "--port", "80000"], "argument --port: must be at most 65535, got 80000"),
        (["serve", "--max-num-seqs"], "argument --max-num-seqs: expected one argument"),
        (["serve", "--tensor_parallel_size", "x"],
         "argument --tensor-parallel-size: must be a whole number, got 'x'"),
        (["serve", "--device", "gpu"], "argument --device: invalid choice: 'gpu' (choose from "
         "'auto', 'cuda', 'cpu')"),
        (["serve", "--enable-scale-out"], "--enable-scale-out: prompts are rendered and computed "
         "by one server"),
        (["chat", "--mesage", "hi"],
         "unrecognized argument: --mesage; did you mean --message?"),
        (["keys", "new", "ann", "--fiel", "x"],
         "unrecognized argument: --fiel; `jackfield keys --help` lists the options"),
        (["bench", "latncy"], "no such benchmark: latncy; did you mean latency?"),
        (["bench", "serve", "--nope"],
         "unrecognized argument: --nope; `jackfield bench serve --help` lists the options"),
        (["run-batch", "-i", "x"], "the following arguments are required: -o/--output-file"),
        (["bench", "latency", "--repeats", "x"], "argument --repeats: invalid int value: 'x'"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_line_with_what_helps(
    argv: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (error,) = captured.err.splitlines()
    assert error.endswith(f": {line}")


@pytest.mark.parametrize(
    "flag",
    ["--enable-dbo", "--tool-strict-level", "--nope", "--ssl-crlfile", "--ec-transfer-config",
     "--max-len", "-ex"],
)  # fmt: skip
def test_what_only_resembles_a_flag_is_no_hint(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["serve", flag, "1"]) == 2
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("slip", "name"),
    [
        ("max_num_seq", "max-num-seqs"),
        ("tensor-paralel-size", "tensor-parallel-size"),
        ("gpu-memory-utilisation", "gpu-memory-utilization"),
        ("tensor-parallel", "tensor-parallel-size"),
        ("prefix-caching", "enable-prefix-caching"),
        ("maxmodel-len", "max-model-len"),
        ("hots", "host"),
        ("quant", "quantization"),
    ],
)
def test_a_slip_finds_the_flag(slip: str, name: str) -> None:
    flags = [flag for flag in make_parser()._option_string_actions if flag.startswith("--")]
    assert nearest(f"--{slip}", flags) == f"--{name}"


def test_the_api_gives_no_wrong_hint_either() -> None:
    with pytest.raises(ConfigError, match=r"^grpc: no such engine option$"):
        EngineConfig.from_options({"grpc": 1})
    with pytest.raises(ConfigError, match="did you mean max_num_seqs"):
        EngineConfig.from_options({"max_num_seq": 1})


@pytest.mark.parametrize(
    ("options", "on_the_command_line"),
    [
        ({"max_num_seqs": 0}, "--max-num-seqs: "),
        ({"enable_eplb": True}, "it needs --enable-expert-parallel and a --tensor-parallel-size"),
        ({"kv_compression_ratio": 0.3}, "name one with --kv-compression"),
        ({"max_model_len": 9, "max_num_batched_tokens": 8, "enable_chunked_prefill": False},
         "8 is below --max-model-len (9), and --enable-chunked-prefill is off"),
    ],
)  # fmt: skip
def test_options_are_flags_on_the_command_line_and_fields_in_the_api(
    options: dict[str, object], on_the_command_line: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(options)
    assert "--" not in caught.value.message
    assert caught.value.message.startswith(f"{caught.value.param}: ")
    assert on_the_command_line in with_flags(caught.value.message)


@pytest.mark.parametrize(
    "message",
    [
        "model: /data/max_num_seqs/x is neither a folder here nor a hub name",
        "plugin_options.mine.dept: no such option",
        "--config: serve.yaml: max_modle_len: no such flag",
        "'max_model_len' is no name",
    ],
)
def test_what_is_no_option_of_the_engine_stays(message: str) -> None:
    assert with_flags(message) == message


# ---------------------------------------------------------------- help


def test_the_short_help_lists_groups_and_how_to_ask(capsys: pytest.CaptureFixture[str]) -> None:
    short = output(["serve", "--help"], capsys)
    assert short.startswith("usage: jackfield serve [MODEL] [options]\n")
    assert len(short.splitlines()) < 75
    assert "scheduling" in short and "structured outputs" in short
    for way in ("--help=port", "--help=server", "--help=all"):
        assert f"jackfield serve {way}" in short
    assert "hermes" not in short


def test_the_whole_help_has_each_flag_and_choice_once(capsys: pytest.CaptureFixture[str]) -> None:
    whole = output(["serve", "--help=all"], capsys)
    assert "(default: None)" not in whole and "(default: ())" not in whole
    assert whole.count("{auto,bfloat16,float16,float32,half,float}") == 1
    assert "--max_model_len" not in whole
    for action in make_parser()._actions:
        if action.option_strings and action.help != argparse.SUPPRESS:
            assert f"\n  {action.option_strings[0]}" in whole


@pytest.mark.parametrize(
    ("command", "own"),
    [(["run-batch"], "--input-file"), (["bench", "latency"], "--repeats"), (["serve"], "--port")],
)
def test_every_command_with_many_options_has_a_short_help(
    command: list[str], own: str, capsys: pytest.CaptureFixture[str]
) -> None:
    short = output([*command, "--help"], capsys)
    assert len(short.splitlines()) < 95 and own in short and "--help=all" in short
    assert "--kv-compression-interval" not in short
    assert "--kv-compression-interval" in output([*command, "--help=all"], capsys)


def test_no_group_is_shown_empty(capsys: pytest.CaptureFixture[str]) -> None:
    """`convert` takes some of the engine's options."""
    lines = output(["convert", "--help"], capsys).splitlines()
    assert "model:" in lines and "scheduling:" not in lines and "engine:" in lines


@pytest.mark.parametrize("word", ["max-num-seqs", "max_num_seqs", "--max-num-seqs", "MAX-NUM-SEQS"])
def test_help_for_one_flag(word: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(["serve", f"--help={word}"], capsys)
    assert text.count("  --") == 1 and "--max-num-seqs N" in text and "(default: 256)" in text


@pytest.mark.parametrize(
    ("word", "flag", "not_there"),
    [
        ("scheduling", "--max-num-seqs", "--block-size"),
        ("SchedulerConfig", "--max-num-seqs", "--block-size"),
        ("ModelConfig", "--dtype", "--max-num-seqs"),
        ("CacheConfig", "--block-size", "--max-num-seqs"),
        ("ParallelConfig", "--tensor-parallel-size", "--dtype"),
        ("StructuredOutputsConfig", "--structured-outputs-config.backend", "--dtype"),
        ("structured outputs", "--structured-outputs-config.backend", "--dtype"),
        ("Frontend", "--port", "--dtype"),
        ("tls", "--ssl-keyfile", "--port"),
        ("ssl-cert", "--ssl-certfile", "--ssl-keyfile"),
    ],
)
def test_help_for_a_group_or_a_word(
    word: str, flag: str, not_there: str, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = output(["serve", f"--help={word}"], capsys).splitlines()
    begins = [line.strip().split()[0].rstrip(",") for line in lines if line.startswith("  -")]
    assert flag in begins and not_there not in begins


def test_groups_are_those_of_the_engine_s_options(capsys: pytest.CaptureFixture[str]) -> None:
    groups = output(["serve", "--help=listgroup"], capsys)
    for kind in EngineConfig.__mro__:
        if kind.__name__.endswith("Options"):
            assert f"\n  {kind.__name__.removesuffix('Options').lower()} " in groups


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("--enable-scale-out", "rendered and computed by one server"),
        ("swap-space", "has no effect: preempted requests"),
    ],
)
def test_help_for_what_vllm_has(word: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in output(["serve", f"--help={word}"], capsys)


def test_help_for_nothing_that_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["serve", "--help=modle"]) == 2
    assert capsys.readouterr().err.endswith("called modle; did you mean --model?\n")
    assert run(["serve", "--help=zzz"]) == 2
    assert "--help=listgroup lists the groups" in capsys.readouterr().err


def test_names_are_listed_without_torch() -> None:
    code = (
        "import sys\nfrom jackfield.entrypoints.cli.main import main\n"
        "try: main(['serve', '--help=' + sys.argv[1]])\n"
        "except SystemExit: sys.exit('torch' in sys.modules)"
    )
    wanted = {
        "tool-call-parser": "hermes",
        "reasoning-parser": "think_tags",
        "attention-backend": "triton",
    }
    for flag, name in wanted.items():
        completed = subprocess.run(
            [sys.executable, "-c", code, flag], capture_output=True, text=True
        )
        assert completed.returncode == 0, completed.stderr
        names = completed.stdout.partition("Names:")[2].replace("\n", " ")
        assert f" {name}," in names.replace(".", ",")
