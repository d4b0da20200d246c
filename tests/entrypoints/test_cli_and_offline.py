"""The command line and the synchronous face, as a user meets them."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import forked
import pytest
import transformers

from jackfield import LLM, SamplingParams
from jackfield.core.errors import ConfigError, InvalidRequest, LoadError
from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.core.metrics.reader import Counter, Gauge, Histogram
from jackfield.entrypoints.cli.main import main
from jackfield.entrypoints.flags.engine_flags import add_engine_options, engine_config
from jackfield.entrypoints.flags.parser import Parser


def jackfield(*argv: str) -> subprocess.CompletedProcess[str]:
    return forked.run(
        [sys.executable, "-m", "jackfield.entrypoints.cli.main", *argv],
        capture_output=True, text=True, timeout=300,
    )  # fmt: skip


def test_the_module_runs_as_a_program() -> None:
    completed = jackfield("--version")
    assert (completed.returncode, completed.stderr) == (0, "") and completed.stdout.startswith(
        "jackfield 0."
    )
    assert jackfield("serv").returncode == 2


@pytest.mark.parametrize(
    ("argv", "status", "says"),
    [
        (["--version"], 0, "jackfield 0."),
        (["--help"], 0, "serve a model"),
        (["help"], 0, "serve a model"),
        (["serv"], 2, "did you mean 'serve'?"),
        (["serve", "--max-num-seq", "4"], 2, "did you mean --max-num-seqs?"),
        (["serve", "--max-num-seqs", "0"], 2, "error: --max-num-seqs: "),
        (["serve", "--max-num-seqs", "many"], 2, "--max-num-seqs"),
        (["serve", "/no/such/folder"], 2, "neither a folder here nor a hub name"),
        (["serve", "--tool-call-parser", "herms"], 2, "did you mean 'hermes'?"),
        (["serve", "--attention-backend", "tritn"], 2, "--attention-backend: "),
        (["serve", "--guided-decoding-backend", "xgrammer"], 2, "did you mean 'xgrammar'?"),
        (["serve", "--tensor-parallel-size", "2"], 2, "--tensor-parallel-size: "),
        (["serve", "--max-model-len", "999999"], 2, "error: --max-model-len: "),
        (["chat", "--url", "http://127.0.0.1:9", "-m", "hi"], 1, "no server at"),
    ],
)
def test_mistakes_are_explained(
    argv: list[str], status: int, says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        returned = main(argv)
    except SystemExit as raised:
        returned = int(raised.code or 0)
    captured = capsys.readouterr()
    assert returned == status, captured.err
    assert says in captured.out + captured.err
    assert "Traceback" not in captured.err


def test_plugins_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "--json", "--check"]) == 0
    rows = json.loads(capsys.readouterr().out)
    by_name = {(row["kind"], row["name"]): row for row in rows}
    assert by_name["tool_parser", "hermes"]["distribution"] == "jackfield"
    assert by_name["attention_backend", "torch"]["status"] == "works here"


@pytest.fixture(scope="module")
def llm() -> Any:
    with LLM(max_num_seqs=16) as item:
        yield item


def test_generate_keeps_the_order(llm: LLM) -> None:
    prompts = [[5, 6, 7 + i] for i in range(10)]
    params = [SamplingParams(max_tokens=1 + i, ignore_eos=True) for i in range(10)]
    outputs = llm.generate(prompts, params, use_tqdm=False)
    assert [len(o.outputs[0].token_ids) for o in outputs] == list(range(1, 11))
    assert [o.prompt_token_ids for o in outputs] == prompts


def test_one_prompt_is_a_list_of_one(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, temperature=0)
    (text,) = llm.generate("Hello", params, use_tqdm=False)
    (ids,) = llm.generate(text.prompt_token_ids, params, use_tqdm=False)
    assert text.outputs[0].token_ids == ids.outputs[0].token_ids


def test_a_prompt_may_be_a_dict(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=0)
    (text,) = llm.generate("Hello", params, use_tqdm=False)
    ids = text.prompt_token_ids
    outputs = llm.generate(
        [{"prompt": "Hello"}, {"prompt_token_ids": ids}, {"prompt_token_ids": ids, "prompt": "Hi"},
         {"prompt": "Hello", "multi_modal_data": None}],
        params, use_tqdm=False,
    )  # fmt: skip
    assert [output.prompt_token_ids for output in outputs] == [ids] * 4
    assert [output.outputs[0].text for output in outputs] == [text.outputs[0].text] * 4
    assert [output.prompt for output in outputs] == ["Hello", None, "Hi", "Hello"]
    long: Any = {"prompt": "Hello " * 60, "cache_salt": "mine"}
    first, again, other = (
        llm.generate({**long, **salt}, params, use_tqdm=False)[0].num_cached_tokens
        for salt in ({}, {}, {"cache_salt": "other"})
    )
    assert first == other == 0 < again
    wrongs: list[tuple[Any, str]] = [
        ({"prompt": 3}, "prompt"), ({"text": "Hello"}, "prompt"),
        ({"prompt": "x", "multi_modal_data": {"a": 1}}, "multi_modal_data"),
        ({"prompt_embeds": [[0.0]]}, "prompt_embeds"),
    ]  # fmt: skip
    for wrong, field in wrongs:
        with pytest.raises(InvalidRequest, match=f"^{field}: "):
            llm.generate(wrong, params, use_tqdm=False)  # type: ignore[arg-type]


def test_the_tokenizer_is_one_of_transformers(llm: LLM) -> None:
    tokenizer = llm.get_tokenizer()
    expected = transformers.AutoTokenizer.from_pretrained(EMBEDDED_MODEL)
    text = "Hello there, wörld"
    assert tokenizer.encode(text) == expected.encode(text)
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert (tokenizer.eos_token_id, len(tokenizer)) == (expected.eos_token_id, len(expected))
    messages = [{"role": "user", "content": "Hi"}]
    prompt = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert prompt == expected.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    tokenizer.add_tokens(["<|mine|>"])
    assert "<|mine|>" not in str(llm.get_tokenizer().get_vocab())


def test_scripts_of_vllm_find_their_names(llm: LLM) -> None:
    params = SamplingParams(max_tokens=2, ignore_eos=True, temperature=0)
    prompt = list(range(5, 45))
    before = {metric.name: metric for metric in llm.get_metrics()}
    outputs = llm.generate([prompt], sampling_params=params, use_tqdm=False)
    assert llm.reset_prefix_cache() is True
    [again] = llm.generate([prompt], sampling_params=params, use_tqdm=False, priority=[0])
    assert again.num_cached_tokens == 0 and again.outputs[0].text == outputs[0].outputs[0].text
    after = {metric.name: metric for metric in llm.get_metrics()}
    name = "jackfield:generation_tokens"
    assert isinstance(after[name], Counter) and after[name].labels["model_name"]
    assert after[name].value - before[name].value == 4  # type: ignore[union-attr]
    waiting = after["jackfield:num_requests_waiting"]
    assert isinstance(waiting, Gauge) and waiting.value == 0
    times = after["jackfield:e2e_request_latency_seconds"]
    assert isinstance(times, Histogram) and times.buckets["+Inf"] == times.count > 0
    assert times.sum > 0 and sorted(times.buckets.values()) == list(times.buckets.values())
    assert llm.llm_engine.model_config is llm.model_config
    assert llm.model_config.max_model_len > 0
    [chat] = llm.chat(
        [{"role": "user", "content": "hi"}], params, False, add_generation_prompt=False,
        chat_template="{{ messages[0].content }}",
    )  # fmt: skip
    assert chat.prompt_token_ids == llm.generate("hi", params, use_tqdm=False)[0].prompt_token_ids
    with pytest.raises(InvalidRequest, match="priority: 2 given for 1"):
        llm.generate([prompt], params, priority=[0, 1])


def test_chat(llm: LLM) -> None:
    (output,) = llm.chat(
        [{"role": "user", "content": "What is 12 + 7?"}],
        SamplingParams(temperature=0, max_tokens=30),
        chat_template_kwargs={"enable_thinking": False},
        use_tqdm=False,
    )
    assert "19" in output.outputs[0].text


def test_an_error_in_one_prompt_leaves_the_engine_usable(llm: LLM) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate([[5], [-1]], use_tqdm=False)
    assert llm.generate([[5]], SamplingParams(max_tokens=1), use_tqdm=False)[0].finished
    assert llm.engine.stats().kv_blocks_used == 0


FORK = """
import os, sys
from jackfield import LLM

with LLM(device="cpu", num_gpu_blocks_override=64) as llm:
    child = os.fork()
    if child == 0:
        try:
            llm.generate([[5]], use_tqdm=False)
        except RuntimeError as error:
            print(error)
        sys.exit(7)  # Whatever is registered for the end of a program runs.
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_a_fork_of_a_program_with_an_engine_is_refused_and_ends() -> None:
    completed = forked.run(
        [sys.executable, "-c", FORK], capture_output=True, text=True, timeout=120
    )
    message, status = completed.stdout.splitlines()
    assert "belongs to the process that created it" in message and status == "7"
    assert "Traceback" not in completed.stderr


@pytest.mark.parametrize("wrong", [None, 5, {"role": "user"}, b"hi"])
def test_what_is_no_list_is_refused_by_name(llm: LLM, wrong: Any) -> None:
    with pytest.raises(InvalidRequest, match="messages: must be a list, got"):
        llm.chat(wrong, use_tqdm=False)
    with pytest.raises(InvalidRequest, match="messages: must be a non-empty list"):
        llm.chat([wrong] if not isinstance(wrong, dict) else [[]], use_tqdm=False)
    if not isinstance(wrong, dict):
        with pytest.raises(InvalidRequest, match="prompts: must be a list, got"):
            llm.generate(wrong, use_tqdm=False)


@pytest.mark.parametrize(
    "end",
    [
        "raise SystemExit(3)",
        *(pytest.param(end, marks=pytest.mark.slow)
          for end in ("", "del llm; import gc; gc.collect()")),
    ],
)  # fmt: skip
def test_a_script_need_not_close_it(end: str) -> None:
    script = (
        "from jackfield import LLM, SamplingParams; llm = LLM(max_num_seqs=4); "
        "print(len(llm.generate('Hello', SamplingParams(max_tokens=2), use_tqdm=False))); " + end
    )
    completed = forked.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert completed.returncode == (3 if "3" in end else 0)
    assert completed.stdout == "1\n"
    assert not any(word in completed.stderr for word in ("Traceback", "Error", "pending", "died"))


def test_a_part_of_a_structured_option_has_a_flag() -> None:
    parser = Parser()
    add_engine_options(parser)

    def made(*flags: str) -> Any:
        return engine_config(parser.parse_args(list(flags)), "m").structured_outputs_config

    assert made().backend == "auto"
    assert made("--guided-decoding-backend", "xgrammar").backend == "xgrammar"
    whole = made(
        "--structured-outputs-config", '{"backend": "llguidance", "cache_size": 3}',
        "--structured-outputs-config.cache-size", "4",
        "--structured-outputs-config.disable-any-whitespace",
    )  # fmt: skip
    assert (whole.backend, whole.cache_size, whole.disable_any_whitespace) == (
        "llguidance",
        4,
        True,
    )
    with pytest.raises(ConfigError, match="structured_outputs_config"):
        made("--structured-outputs-config", '{"backends": 1}')


def test_wrong_options_raise(tmp_path: Any) -> None:
    with pytest.raises(ConfigError, match="max_num_seqs"):
        LLM(max_num_seq=3)
    with pytest.raises(LoadError, match=r"config\.json"):
        LLM(str(tmp_path))
