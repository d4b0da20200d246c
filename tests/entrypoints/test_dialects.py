"""Which parsers a server uses: by its options, by what the checkpoint says, and by its template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import TEMPLATE, Server, running, save_scripted
from serving import engine_config as config

from jackfield import EngineConfig
from jackfield.core.engine.resolve_config import resolve_parsers
from jackfield.core.errors import ConfigError
from jackfield.core.grammars.reasoning_gate import gate_parser, make_reasoning_gate
from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.registry import load_plugins
from jackfield.core.text.tokenizer import Tokenizer

QUESTION = {
    "messages": [{"role": "user", "content": "What is the weather in Lisbon?"}],
    "temperature": 0,
    "max_tokens": 60,
}
CALL = ["<tool_call>", '{"name": "f", "arguments": {}}', "</tool_call>"]


def message(server: Server, body: dict[str, Any] | None = None) -> dict[str, Any]:
    response = httpx.post(f"{server.url}/v1/chat/completions", json=body or QUESTION)
    assert response.status_code == 200, response.text
    reply: dict[str, Any] = response.json()["choices"][0]["message"]
    return reply


def streamed(server: Server) -> list[dict[str, Any]]:
    """The deltas."""
    url, body = f"{server.url}/v1/chat/completions", {**QUESTION, "stream": True}
    with httpx.stream("POST", url, json=body) as response:
        lines = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]
    return [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]


def test_the_embedded_model_as_it_comes_makes_calls_and_shows_no_markup() -> None:
    with running(EngineConfig(device="cpu")) as server:
        reply = message(server)
        (call,) = reply["tool_calls"]
        assert "weather" in call["function"]["name"]
        assert json.loads(call["function"]["arguments"])["city"] == "Lisbon"
        assert "<" not in (reply["content"] or "")
        deltas = streamed(server)
        assert any("tool_calls" in delta for delta in deltas)
        assert not any("<" in (delta.get("content") or "") for delta in deltas)
        text = message(server, {**QUESTION, "tool_choice": "none"})
        assert "<tool_call>" in text["content"] and not text.get("tool_calls")


def test_none_switches_the_checkpoint_s_parsers_off() -> None:
    options = {"tool_call_parser": "none", "reasoning_parser": "none"}
    with running(EngineConfig(device="cpu", **options)) as server:
        assert "<tool_call>" in message(server)["content"]


@pytest.fixture
def speaker(tmp_path: Path) -> Path:
    """A model that makes a call whatever it is asked."""
    return save_scripted(tmp_path, CALL)


def test_a_checkpoint_names_its_parsers(speaker: Path) -> None:
    (speaker / "jackfield.json").write_text('{"tool_call_parser": "hermes"}')
    tools = [{"type": "function", "function": {"name": "f"}}]
    with running(config(speaker)) as server:
        (call,) = message(server, {**QUESTION, "tools": tools})["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": "{}"}
        assert message(server)["content"] == "".join(CALL), "no tools, and nothing said of that"


def test_options_count_more_than_the_checkpoint(speaker: Path) -> None:
    (speaker / "jackfield.json").write_text(
        '{"tool_call_parser": "hermes", "reasoning_parser": "qwen3"}'
    )
    options: dict[str, Any]
    for options, tools, reasoning in (
        ({}, "hermes", "qwen3"),
        ({"tool_call_parser": "none"}, None, "qwen3"),
        ({"tool_call_parser": "jamba", "reasoning_parser": "none"}, "jamba", None),
    ):
        engine_config = config(speaker, **options)
        actual = resolve_parsers(engine_config, resolve_model_config(engine_config), load_plugins())
        assert (actual.tool_call_parser, actual.reasoning_parser) == (tools, reasoning)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ('{"tool_call_parser": 3}', r"jackfield\.json: .*tool_call_parser"),
        ('{"tools": "hermes"}', r"jackfield\.json: .*`tools`"),
        ('{"reasoning_parser": "telepathy"}', "reasoning_parser: the checkpoint names one .*none"),
    ],
)
def test_what_a_checkpoint_says_wrongly_is_refused(speaker: Path, text: str, reason: str) -> None:
    (speaker / "jackfield.json").write_text(text)
    engine_config = config(speaker)
    with pytest.raises(ConfigError, match=reason):
        resolve_parsers(engine_config, resolve_model_config(engine_config), load_plugins())


RESPONSE_TEMPLATE = {
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {
        "thinking": {"open": "<hm>", "close_pattern": r"</hm>\s*"},
        "content": {"close": "<|im_end|>"},
        "tool_calls": {
            "open_pattern": r"\s*<do>(?P<name>\w+)=",
            "close": "</do>",
            "content": "json",
            "repeats": True,
            "transform": {"function": {"name": "{name}", "arguments": "{content}"}},
        },
    },
}


def test_a_checkpoint_s_response_template_is_served(tmp_path: Path) -> None:
    script = ["A section", "</hm>", "The rest ", "<do>f=", '{"a": 1}', "</do>"]
    folder = save_scripted(tmp_path, script, special=["</hm>"], last="<hm>")
    facts = json.loads((folder / "tokenizer_config.json").read_text())
    facts |= {"chat_template": f"{TEMPLATE}<hm>", "response_template": RESPONSE_TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    tools = [{"type": "function", "function": {"name": "f"}}]
    body = {**QUESTION, "tools": tools}
    auto = {"tool_call_parser": "auto", "reasoning_parser": "auto"}
    with running(config(folder, **auto)) as server:
        reply = message(server, body)
        assert (reply["reasoning_content"], reply["content"]) == ("A section", "The rest")
        (call,) = reply["tool_calls"]
        assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}
        forced = {**body, "tool_choice": "required", "max_tokens": 120}
        (call,) = message(server, forced)["tool_calls"]
        assert call["function"]["name"] == "f"


def test_a_request_may_have_reasoning_alone_as_its_content(tmp_path: Path) -> None:
    folder = save_scripted(tmp_path, ["Just this", "</think>"], last="<think>")
    facts = json.loads((folder / "tokenizer_config.json").read_text())
    facts["chat_template"] = f"{TEMPLATE}<think>"
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    with running(config(folder, reasoning_parser="nemotron_v3")) as server:
        assert not message(server)["content"]
        kwargs = {"chat_template_kwargs": {"force_nonempty_content": True}}
        reply = message(server, {**QUESTION, **kwargs})
        assert (reply["reasoning_content"], reply["content"]) == ("Just this", "Just this")


OPENING = """{% if enable_thinking is defined and not enable_thinking %}<think></think>
{% else %}<think>{% endif %}"""


def test_reasoning_that_the_template_opens_is_reasoning(tmp_path: Path) -> None:
    script = ["A section", "</think>", "The rest"]
    folder = save_scripted(tmp_path, script, last="<think>")
    facts = json.loads((folder / "tokenizer_config.json").read_text())
    facts["chat_template"] = TEMPLATE + OPENING
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    with running(config(folder, reasoning_parser="glm45")) as server:
        reply = message(server)
        assert (reply["reasoning_content"], reply["content"]) == ("A section", "The rest")
        server.call(check_prompt_ends)


def check_prompt_ends(engine: Any) -> None:
    assert engine.prompt_end().endswith("<think>")
    assert engine.prompt_end({"enable_thinking": False}).rstrip().endswith("</think>")
    assert engine.prompt_end({"enable_thinking": [1] * 9}) == engine.prompt_end()


def test_a_grammar_waits_for_the_end_of_reasoning_that_the_prompt_opened() -> None:
    parser = load_plugins()["reasoning_parser"].load("glm45")
    tokenizer = Tokenizer.load(str(EMBEDDED_MODEL))
    gate = make_reasoning_gate(parser, {}, tokenizer, prompt_end="<|assistant|><think>")
    assert gate is not None and gate.opening_ids is None
    assert not gate_parser(parser, gate)().reasoning_ended
    assert make_reasoning_gate(parser, {}, tokenizer, prompt_end="<|assistant|></think>") is None
