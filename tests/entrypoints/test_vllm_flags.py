"""Command lines written for vLLM and SGLang: each option becomes what it says."""

from __future__ import annotations

import logging
import os
import shlex
from pathlib import Path
from typing import Any

import pytest

from jackfield.core.errors import ConfigError
from jackfield.entrypoints.cli.main import main
from jackfield.entrypoints.flags.config_file import with_config
from jackfield.entrypoints.flags.engine_flags import engine_config, engine_options
from jackfield.entrypoints.flags.foreign_options import option_of, translated
from jackfield.entrypoints.flags.sglang_flags import sglang_options
from jackfield.entrypoints.flags.vllm_environment import environment_lines, variable
from jackfield.entrypoints.flags.vllm_flags import (
    EQUIVALENT,
    MISSING,
    NEUTRAL,
    NO_EFFECT,
    vllm_options,
)
from jackfield.entrypoints.server.serve_settings import (
    make_parser,
    settings,
    whole_command,
    without_effect,
)

HERE = Path(__file__).parent
PARSER = make_parser()
NAMES = [
    name
    for line in (HERE / "vllm_options.txt").read_text().splitlines()
    for name in line.split()[1:]
    if name != "/"
]
"""Options of vLLM 0.33.0 with their opposites, but for those of adapters."""
VARIABLES = (HERE / "vllm_variables.txt").read_text().split()


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)


def values_of(nargs: int | str, value: str = "1") -> list[str]:
    return {0: [], 1: [value], "?": [value], "+": [value, value], "*": [value]}[nargs]


def parsed(*words: str) -> dict[str, Any]:
    return vars(PARSER.parse_args(list(words)))


PLAIN = parsed()


def changed(*words: str) -> dict[str, Any]:
    return {name: value for name, value in parsed(*words).items() if value != PLAIN.get(name)}


# ---------------------------------------------------------------- every option


def test_every_option_of_vllm_is_known() -> None:
    assert len(NAMES) > 450
    assert [name for name in NAMES if option_of(PARSER, name)[0] == "unknown"] == []


def test_no_option_is_in_two_lists() -> None:
    own = PARSER._option_string_actions.keys()
    lists: list[Any] = [NO_EFFECT.keys(), MISSING.keys(), EQUIVALENT.keys()]
    for place, flags in enumerate(lists):
        for others in lists[place + 1 :]:
            assert not flags & others
    assert not (NO_EFFECT.keys() | MISSING.keys()) & own
    assert not sglang_options().keys() & (own | vllm_options().keys())
    assert NEUTRAL.keys() <= MISSING.keys()


def test_reasons_name_options_that_are_there() -> None:
    """A flag that a reason recommends is one of the parser's."""
    options = vllm_options() | sglang_options()
    reasons = [option.text for option in options.values()]
    reasons += [variable(name).text for name in VARIABLES]
    for reason in reasons:
        for word in reason.replace(",", " ").replace(";", " ").replace(")", " ").split():
            flag = word.lstrip("(").rstrip(":.").partition("=")[0]
            if not flag.startswith("--"):
                continue
            known = option_of(PARSER, flag)[0] != "unknown"
            assert known or option_of(PARSER, flag.partition(".")[0])[0] == "same", reason


@pytest.mark.parametrize("flag", NO_EFFECT)
def test_a_flag_without_effect_is_taken_and_changes_nothing(flag: str) -> None:
    words = [flag, *values_of(NO_EFFECT[flag][0])]
    (sentence,) = without_effect(translated(PARSER, words))
    assert sentence == f"{flag} has no effect: {NO_EFFECT[flag][1]}"
    assert changed("model", *words) == {"model": "model"}


@pytest.mark.parametrize("flag", MISSING)
def test_a_missing_feature_is_named(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        PARSER.parse_args(["model", flag, "other"])
    assert raised.value.code == 2
    assert f"{flag}: {MISSING[flag]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flag", "value"), [(flag, value) for flag, values in NEUTRAL.items() for value in values]
)
def test_a_missing_feature_that_is_not_used_is_taken(flag: str, value: str) -> None:
    assert changed(flag, value) == changed(f"{flag}={value}") == {}


@pytest.mark.parametrize(
    ("words", "becomes"),
    [
        ("--all2all-backend deepep_low_latency", ""),
        ("--attention-backend FLASH_ATTN", "--attention-backend FLASH_ATTN"),
        ("--attention-backend FLASHINFER_MLA", ""),
        ("-ac.backend FLASH_ATTN", "--attention-backend FLASH_ATTN"),
        ("-O3", ""),
        ("-O 0", "--enforce-eager"),
        ("-O0", "--enforce-eager"),
        ("--optimization-level 2", ""),
        ("-cc.mode=3", ""),
        ("--compilation-config 3", ""),
        ("--compilation-config.level 3 --compilation-config.cudagraph_mode NONE",
         "--enforce-eager"),
        ("--convert embed", "--task embed"),
        ("--convert none", ""),
        ("-dpb mp", ""),
        ("--data-parallel-backend ray", "--executor ray"),
        ("--device-memory-utilization 0.5", "--gpu-memory-utilization 0.5"),
        ("--disable-uvicorn-access-log", "--access-log off"),
        ("--disable-log-requests", "--no-enable-log-requests"),
        ("--disable-prefix-caching", "--no-enable-prefix-caching"),
        ("--no-async-scheduling", ""),
        ("--enable-memory-saver", "--enable-sleep-mode"),
        ("--guided-decoding-backend guidance", "--structured-outputs-config.backend llguidance"),
        ("--structured-outputs-config.backend guidance",
         "--structured-outputs-config.backend llguidance"),
        ("--structured-outputs-config.disable_fallback true", ""),
        ("--kv-offloading-size 4 --kv-offloading-backend native",
         '--kv-transfer-config {"kv_connector":"cpu_offload",'
         '"kv_connector_extra_config":{"kv_offloading_size":4}}'),
        ('--kv-transfer-config {"kv_connector":"OffloadingConnector","kv_role":"kv_both",'
         '"kv_connector_extra_config":{"cpu_bytes_to_use":2147483648}}',
         '--kv-transfer-config {"kv_connector":"cpu_offload","kv_role":"kv_both",'
         '"kv_connector_extra_config":{"kv_offloading_size":2}}'),
        ('--kv-events-config {"enable_kv_cache_events":true,"endpoint":"tcp://*:5557",'
         '"max_queue_size":5,"publisher":null}',
         "--plugin-option kv_events.enable_kv_cache_events=true "
         '--plugin-option kv_events.endpoint="tcp://*:5557"'),
        ("--kv-events-config.topic kv@here", '--plugin-option kv_events.topic="kv@here"'),
        ("--load-format fastsafetensors", "--load-format safetensors"),
        ("--log-level INFO", "--log-level info"),
        ("--uvicorn-log-level trace", "--log-level debug"),
        ("--logging-config.log_level DEBUG", "--log-level debug"),
        ("--logging-config.formatter json", "--log-format json"),
        ("--mamba-cache-mode align", ""),
        ("--max-num-queued-reqs 5", "--limit-concurrency 5"),
        ("-sc.method ngram --spec-tokens 3",
         '--speculative-config {"method":"ngram","num_speculative_tokens":3}'),
        ("--spec-method ngram --spec-model x",
         '--speculative-config {"method":"ngram","model":"x"}'),
        ("--hf-overrides.rope_theta 1e6 --hf_overrides.a.b+ 1,2 --hf-overrides.a.b+ 3",
         '--hf-overrides {"rope_theta":1000000.0,"a":{"b":[1,2,3]}}'),
        ("--rope-theta 1e6", '--hf-overrides {"rope_theta":1000000.0}'),
        ('--rope-scaling {"rope_type":"linear","factor":2}',
         '--hf-overrides {"rope_scaling":{"rope_type":"linear","factor":2}}'),
        ("--disable-sliding-window", '--hf-overrides {"sliding_window":null}'),
        ('--override-pooler-config {"pooling_type":"CLS"}',
         '--pooler-config {"pooling_type":"CLS"}'),
        ("--eplb-window-size 5 --eplb-step-interval 9",
         "--eplb-config.window-size 5 --eplb-config.step-interval 9"),
        ("--override-generation-config.temperature 0.5",
         '--override-generation-config {"temperature":0.5}'),
        ("--task embedding", "--task embed"),
        ("--tokenizer-mode slow", "--tokenizer-mode hf"),
        # SGLang's.
        ("--model-path m --tokenizer-path t", "--model m --tokenizer t"),
        ("--tp 2 --dp-size 2 --pp-size 2", "-tp 2 -dp 2 -pp 2"),
        ("--mem-fraction-static 0.8", "--gpu-memory-utilization 0.8"),
        ("--context-length 4096", "--max-model-len 4096"),
        ("--chunked-prefill-size -1", "--no-enable-chunked-prefill"),
        ("--chunked-prefill-size 512", "--max-num-batched-tokens 512"),
        ("--disable-radix-cache --disable-cuda-graph",
         "--no-enable-prefix-caching --enforce-eager"),
        ("--is-embedding", "--runner pooling"),
        ("--schedule-policy lpm", ""),
        ("--speculative-algorithm EAGLE3 --speculative-draft-model-path x",
         '--speculative-config {"method":"eagle3","model":"x"}'),
        ("--speculative-algorithm NGRAM --speculative-num-draft-tokens 4",
         '--speculative-config {"method":"ngram","num_speculative_tokens":3}'),
        ("--limit-mm-per-prompt image=10,video=0",
         '--limit-mm-per-prompt {"image":10,"video":0}'),
        ("--json-model-override-args {}", "--hf-overrides {}"),
        ("--ep-size 2", "-ep"),
        ("--page-size 32", "--block-size 32"),
        ("--page-size 1", ""),
        ("--max-running-requests 8", "--max-num-seqs 8"),
        ("--enable-metrics --enable-mixed-chunk", ""),
    ],
)  # fmt: skip
def test_an_option_has_the_effect_of_its_equivalent(words: str, becomes: str) -> None:
    assert changed(*words.split()) == changed(*becomes.split())


def test_keys_given_one_by_one_add_to_a_whole_value() -> None:
    words = ["--hf-overrides.b", "2", "--hf-overrides", '{"a": 1, "b": 1}', "--hf-overrides.c=x"]
    assert parsed(*words)["hf_overrides"] == {"a": 1, "b": 2, "c": "x"}
    with_flag = ["--eplb-config.window-size", "5", "--eplb-config.log_balancedness", "true"]
    options = engine_options(PARSER.parse_args(with_flag))
    assert options["eplb_config"] == {"window_size": 5, "log_balancedness": True}


@pytest.mark.parametrize(
    "words",
    [
        ["--convert", "reward"],
        ["--kv-offloading-backend", "lmcache"],
        ["--logging-config", '{"formatter": "xml"}'],
        ["--compilation-config", "{"],
        ["--spec-tokens"],
        ["--ubatch-size", "2"],
        ["--speculative-algorithm", "DFLASH"],
    ],
)
def test_a_value_that_nothing_is_equal_to_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        PARSER.parse_args(words)
    assert raised.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"jackfield serve: error: {words[0]}: ")


# ---------------------------------------------------------------- files, variables, logs


def test_in_a_file_too(tmp_path: Path) -> None:
    parser, file = make_parser(), tmp_path / "flags.yaml"
    file.write_text("enable_scale_out: true\n")
    args = parser.parse_args(["--config", str(file)])
    with pytest.raises(ConfigError, match="enable_scale_out: prompts are rendered"):
        with_config(parser, [], args)
    file.write_text(
        "swap-space: 4\nenable-reasoning: true\ncompilation_config: {level: 3}\nworker-cls: auto\n"
        "async-scheduling: false\n"
        "spec-tokens: 3\nspec-method: ngram\nmax-num-queued-reqs: 5\nmax-running-requests: 4\n"
    )
    argv = with_config(parser, ["model", "--limit-concurrency", "7"], args)
    assert len(list(without_effect(translated(parser, argv)))) == 5
    assert changed(*argv) == {
        "model": "model", "limit_concurrency": 7, "max_num_seqs": 4,
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 3},
    }  # fmt: skip


def test_every_variable_of_vllm_is_an_equivalent_or_has_a_reason() -> None:
    assert len(VARIABLES) > 300
    assert all(variable(name).text for name in VARIABLES)


@pytest.mark.parametrize(
    ("name", "value", "becomes"),
    [
        (
            "VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES",
            "0",
            "--plugin-option kv_events.int_block_hashes=false",
        ),
        ("VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES", "1", ""),
        ("VLLM_LOGGING_LEVEL", "DEBUG", "--log-level debug"),
        ("VLLM_CPU_KVCACHE_SPACE", "2", "--cpu-kvcache-space 2"),
        ("VLLM_CPU_KVCACHE_SPACE", "0", ""),
        ("VLLM_PP_LAYER_PARTITION", "1,2", "--pipeline-layer-partition=1,2"),
        ("VLLM_ATTENTION_BACKEND", "FLASH_ATTN", "--attention-backend FLASH_ATTN"),
        ("VLLM_SERVER_DEV_MODE", "1", "--enable-admin"),
        ("VLLM_SERVER_DEV_MODE", "0", ""),
        ("VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "9", "--timeout-keep-alive 9"),
        ("VLLM_USE_MODELSCOPE", "False", ""),
        ("VLLM_USE_V1", "1", ""),
    ],
)
def test_a_variable_has_the_effect_of_its_equivalent(
    name: str, value: str, becomes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(name, value)
    _, argv = whole_command(make_parser(), ["model"])
    assert changed(*argv) == changed("model", *becomes.split())


def test_the_command_line_goes_before_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    _, argv = whole_command(make_parser(), ["--log-level", "debug"])
    assert parsed(*argv)["log_level"] == "debug"


def test_a_file_goes_before_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "ERROR")
    (tmp_path / "flags.yaml").write_text("log-level: debug\n")
    _, argv = whole_command(make_parser(), ["--config", str(tmp_path / "flags.yaml")])
    assert parsed(*argv)["log_level"] == "debug"


def test_a_variable_that_changes_results_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_USE_MODELSCOPE", "True")
    with pytest.raises(ConfigError, match="VLLM_USE_MODELSCOPE=True: name the model modelscope:"):
        whole_command(make_parser(), [])


def test_a_key_in_a_variable_is_not_shown() -> None:
    (line,) = environment_lines({"VLLM_API_KEY": "secret", "HOME": "/"})
    assert "secret" not in str(line)


# ---------------------------------------------------------------- --explain


def test_explain_prints_what_a_command_line_becomes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "INFO")
    (tmp_path / "flags.yaml").write_text("swap-space: 4\nmax-num-seqs: 9\n")
    argv = [
        "model", "--explain", "--dtype", "half", "-O3", "--spec-method", "ngram",
        "--spec-tokens", "3", "--worker-cls", "auto", "--config", str(tmp_path / "flags.yaml"),
    ]  # fmt: skip
    assert main(["serve", *argv]) == 0
    *lines, empty, command = capsys.readouterr().out.splitlines()
    assert [line.partition(":")[0] for line in lines] == [
        "VLLM_LOGGING_LEVEL=INFO", "model", "--dtype half", "-O3", "--spec-method ngram",
        "--spec-tokens 3", "--worker-cls auto", f"--config {tmp_path / 'flags.yaml'}",
        "--swap-space=4", "--max-num-seqs=9",
    ]  # fmt: skip
    assert lines[0].endswith(": becomes --log-level=info")
    assert lines[2] == "--dtype half: the same"
    assert lines[3].startswith("-O3: has no effect: no graph is compiled")
    assert empty == ""
    assert command == (
        "jackfield serve --log-level=info model --dtype half "
        '\'--speculative-config={"method": "ngram", "num_speculative_tokens": 3}\' '
        "--max-num-seqs=9"
    )


def test_explain_names_each_refusal(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--explain", "--enable-scale-out", "--max-num-seqs", "many", "--bogus", "--port", "1"]
    assert main(["serve", *argv]) == 2
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("--enable-scale-out: refused: prompts are rendered")
    assert lines[1].startswith("--max-num-seqs many: refused: ")
    assert lines[2].startswith("--bogus: unknown; ")
    assert lines[3] == "--port 1: the same"


def test_explain_shows_no_secret(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("VLLM_API_KEY", "s3cret")
    monkeypatch.setenv("VLLM_S3_SECRET_ACCESS_KEY", "s3cret")
    (tmp_path / "flags.yaml").write_text("api-key: s3cret\n")
    argv = [
        "model", "--explain", "--api-key", "s3cret", "--api-key=s3cret", "--api-key-file", "keys",
        "--model-loader-extra-config", '{"s3_secret_access_key": "s3cret", "num_readers": 2}',
        "--model-loader-extra-config.session_token", "s3cret", "--max-num-batched-tokens", "64",
        "--kv-transfer-config", '{"kv_connector": "file_store", "kv_connector_extra_config": '
        '{"url": "http://me:s3cret@host/x"}}', "--plugin-option", 'traces.headers="a=s3cret"',
        "--otlp-traces-endpoint", "http://me:s3cret@host", "--config", str(tmp_path / "flags.yaml"),
    ]  # fmt: skip
    main(["serve", *argv])
    printed = capsys.readouterr()
    assert "s3cret" not in printed.out + printed.err
    for shown in (
        "--api-key '(hidden)': the same", "--api-key-file keys", "--max-num-batched-tokens 64",
        '"num_readers": 2', "file_store", "http://(hidden)@host",
    ):  # fmt: skip
        assert shown in printed.out


def test_explain_checks_the_options_together(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--explain", "--kv-cache-memory-bytes", "1G", "--num-gpu-blocks-override", "9"]
    assert main(["serve", *argv]) == 2
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("refused: --kv-cache-memory-bytes: ")


def test_explain_starts_the_embedded_model_with_what_it_prints() -> None:
    """The words that it prints are a command line of this server."""
    argv = ["--disable-prefix-caching", "--guided-decoding-backend", "guidance", "--tp", "1"]
    config = settings([*argv, "--dtype", "float"], remarks=False).config
    assert config.enable_prefix_caching is False
    assert config.structured_outputs_config.backend == "llguidance"
    assert config.dtype in ("float", "float32")


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
        PARSER.parse_args([f"--max-model-len={text}"])
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
    assert PARSER.parse_args(["-ep"]).enable_expert_parallel is True


# ---------------------------------------------------------------- --device-ids


def test_device_ids_are_those_that_cuda_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    """Put into the environment as given, and never in place of what is there."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")  # Restored at the end, whatever is set below.
    args = PARSER.parse_args(["--device-ids", "1, 0"])
    engine_config(args, "")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1,0"
    engine_config(args, "")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES says '1,0'"):
        engine_config(PARSER.parse_args(["--device-ids", "2"]), "")


@pytest.mark.parametrize("text", ["", "0,,1", "0,0", "gpu", "-1"])
def test_other_device_ids_are_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        PARSER.parse_args([f"--device-ids={text}"])
    assert "--device-ids" in capsys.readouterr().err


# ---------------------------------------------------------------- whole command lines

RECIPES = """
Qwen/Qwen3-235B-A22B-FP8 --trust-remote-code -tp 4 --disable-log-requests --swap-space 16 --distributed-executor-backend mp --max-num-batched-tokens 32768 --max-model-len 32768 --no-enable-prefix-caching
Qwen/Qwen3-Next-80B-A3B-Instruct --tensor-parallel-size 4 --tokenizer-mode auto --speculative-config '{"method": "qwen3_next_mtp", "num_speculative_tokens": 2}' --no-enable-chunked-prefill
Qwen/Qwen3-VL-235B-A22B-Instruct --tensor-parallel-size 8 --mm-encoder-tp-mode data --enable-expert-parallel --async-scheduling --limit-mm-per-prompt.video 0 --max-num-seqs 1024 --attention-backend FLASHINFER
Qwen/Qwen3-8B --reasoning-parser qwen3 --enable-auto-tool-choice --tool-call-parser hermes --hf-overrides '{"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}}' --max-model-len 131072 --default-chat-template-kwargs '{"enable_thinking": false}'
openai/gpt-oss-120b --tensor-parallel-size 2 --max-num-batched-tokens 16384 --gpu-memory-utilization 0.86 --kv-cache-dtype fp8 --no-enable-prefix-caching --async-scheduling --compilation-config '{"pass_config": {"fuse_allreduce_rms": true}}' --stream-interval 20 --tool-call-parser openai --enable-auto-tool-choice
deepseek-ai/DeepSeek-R1-0528 --trust-remote-code --tensor-parallel-size 8 --enable-expert-parallel --reasoning-parser deepseek_r1
deepseek-ai/DeepSeek-V3.2 --tensor-parallel-size 8 --kernel-config.enable_flashinfer_autotune=False --tokenizer-mode deepseek_v32 --tool-call-parser deepseek_v32 --enable-auto-tool-choice --reasoning-parser deepseek_v3
meta-llama/Llama-4-Scout-17B-16E-Instruct --tensor-parallel-size 8 --max-model-len 1000000 --limit-mm-per-prompt image=10 --override-generation-config '{"temperature": 0.6}' --kv-cache-dtype fp8
meta-llama/Llama-3.1-8B-Instruct --speculative-config '{"model":"RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3","method":"eagle3","num_speculative_tokens":3}' --chat-template-content-format auto
google/gemma-4-31B-it --tensor-parallel-size 2 --max-model-len 16384 --enable-auto-tool-choice --reasoning-parser gemma4 --tool-call-parser gemma4 --limit-mm-per-prompt '{"image": 4, "audio": 1}' --mm-processor-kwargs '{"max_soft_tokens": 280}' --async-scheduling --host 0.0.0.0
zai-org/GLM-4.5-FP8 --tensor-parallel-size 4 --speculative-config.method mtp --speculative-config.num_speculative_tokens 1 --tool-call-parser glm45 --reasoning-parser glm45 --enable-auto-tool-choice
zai-org/GLM-4.5V-FP8 --tensor-parallel-size 4 --tool-call-parser glm45 --reasoning-parser glm45 --enable-auto-tool-choice --allowed-local-media-path / --mm-encoder-tp-mode data --mm-processor-cache-type shm
moonshotai/Kimi-K2-Instruct --trust-remote-code --tokenizer-mode auto --tensor-parallel-size 8 --pipeline-parallel-size 2 --dtype bfloat16 --quantization fp8 --max-model-len 2048 --max-num-seqs 1 --enable-auto-tool-choice --tool-call-parser kimi_k2 --distributed-executor-backend ray
mistralai/Mistral-Medium-3.5-128B --tensor-parallel-size 8 --tool-call-parser mistral --enable-auto-tool-choice --reasoning-parser mistral --config-format mistral --load-format mistral --tokenizer-mode mistral --speculative-config '{"model":"mistralai/Mistral-Medium-3.5-128B-EAGLE","num_speculative_tokens":3,"method":"eagle","max_model_len":"65536"}'
nvidia/NVIDIA-Nemotron-3-Nano-30B-A3B-BF16 --max-num-seqs 8 --max-model-len 262144 --trust-remote-code --enable-auto-tool-choice --tool-call-parser qwen3_coder --reasoning-parser-plugin nano_v3_reasoning_parser.py --reasoning-parser nano_v3
MiniMaxAI/MiniMax-M2.5 --tensor-parallel-size 4 --kv-cache-dtype fp8 --moe-backend triton --attention-backend FLASHINFER --enable-flashinfer-autotune --tool-call-parser minimax_m2 --reasoning-parser minimax_m2 --compilation-config '{"cudagraph_mode":"PIECEWISE"}' --enable-auto-tool-choice
deepseek-ai/DeepSeek-V4-Flash --reasoning-config '{"reasoning_parser":"deepseek_v3","reasoning_start_str":"","reasoning_end_str":""}'
--model-path deepseek-ai/DeepSeek-V3-0324 --tp 8 --trust-remote-code --speculative-algorithm EAGLE --speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --mem-fraction-static 0.8 --cuda-graph-max-bs 16
"""  # noqa: E501
"""Command lines as public recipes of vLLM's have them (the last is one of SGLang's)."""


@pytest.mark.parametrize("line", RECIPES.strip().splitlines())
def test_a_command_line_of_a_recipe_is_taken(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["serve", "--explain", *shlex.split(line)])
    printed = capsys.readouterr().out
    assert status == 0, printed
    assert ("num_speculative_tokens" in line or "num-steps" in line) == (
        "num_speculative_tokens" in printed.splitlines()[-1]
    )


def test_sglangs_numbers_of_drafts_agree() -> None:
    """Three steps of a chain give three drafts; SGLang counts the token before them, too."""
    for words in (["--speculative-num-steps", "3"], ["--speculative-num-draft-tokens", "4"]):
        assert words_of(*words) == ["--speculative-config.num_speculative_tokens=3"]
    assert translated(PARSER, ["--speculative-eagle-topk", "4"])[0].state == "refused"


def words_of(*given: str) -> list[str]:
    return [word for line in translated(PARSER, list(given)) for word in line.words]
