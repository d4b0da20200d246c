"""`auto` chooses parsers by a checkpoint's chat template and model type, and says so."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from jackfield import EngineConfig
from jackfield.core.engine.resolve_config import check_names, resolve_parsers
from jackfield.core.loading.dialects import recognized
from jackfield.core.loading.model_config import EMBEDDED_MODEL, resolve_model_config
from jackfield.core.registry import load_plugins

HERMES = 'return <tool_call>\n{"name": <function-name>}\n</tool_call> within'
CODER = "<tool_call>\n<function=example>\n<parameter=a>\n1\n</parameter>\n</function>\n</tool_call>"
THOUGHT = "{%- if enable_thinking is false %}<think>\n\n</think>{%- endif %}"
GLM45 = "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key></tool_call><think></think>"
GLM47 = "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key></tool_call><think></think>"


@pytest.mark.parametrize(
    ("model_type", "template", "tools", "reasoning"),
    [
        ("qwen2", HERMES, "hermes", None),
        ("qwen3", HERMES + THOUGHT, "hermes", "qwen3"),
        ("qwen3_moe", CODER, "qwen3_coder", None),
        ("mimo_v2_flash", CODER + THOUGHT, "mimo", "mimo"),
        ("glm4_moe", GLM45 + THOUGHT, "glm45", "glm45"),
        ("glm4_moe", GLM47 + THOUGHT, "glm47", "glm47"),
        ("llama", "{{ '<|python_tag|>' }}", "llama3_json", None),
        ("granite", "<|tool_call|>", "granite", None),
        ("granitemoehybrid", HERMES, "granite4", None),
        ("gemma4_text", "<|tool_call>call:f{a:<|\"|>b<|\"|>}<|channel>thought\n<channel|>",
         "gemma4", "gemma4"),
        ("cohere2", "<|START_THINKING|><|START_ACTION|><|START_RESPONSE|>",
         "cohere_command3", "cohere_command3"),
        ("apertus", "<|inner_prefix|><|tools_prefix|>", "apertus", "apertus2509"),
        ("lfm2", "<|tool_call_start|>", "lfm2", None),
        ("deepseek_v4", "<｜DSML｜tool_calls>", "deepseek_v4", None),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|><|tool_call_argument_begin|>"
         "</think>", "kimi_k2", "kimi_k2"),
        ("phi3", "<|tool_call|>", "phi4_mini_json", None),
        ("gpt_oss", "<|start|>assistant<|channel|>final<|message|>", "openai", "gptoss"),
        ("ernie4_5_moe", HERMES + "<think>\n</think>\n<response>", "ernie45", "ernie45"),
        ("mistral", "[TOOL_CALLS][THINK]", "mistral", "mistral"),
        ("deepseek_v3", "<｜Assistant｜><think>\n' }}<｜tool▁call▁begin｜>f\n```json",
         "deepseek_v3", "deepseek_r1"),
        ("deepseek_v3", "{% if thinking %}<｜Assistant｜>{% endif %}</think><｜tool▁call▁begin｜>",
         "deepseek_v31", "deepseek_v3"),
        ("minimax_m3", "]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=<mm:think>",
         "minimax_m3", "minimax_m3"),
        ("dots1", "<dots_function_call>", "dots", None),
        ("minicpm5", '<function name="f"><param name="a">', "minicpm5", None),
        ("k2_v3", "<ifm|think>' if effort == 'high'<ifm|tool_calls><ifm|tool_call>",
         "k2_horizon", "k2_horizon"),
        ("muse", "<|start|>assistant<|message|><atem:function_calls>", "muse", "muse"),
        ("inkling", "<|message_model|><|content_thinking|><|content_invoke_tool_json|>",
         "inkling", "inkling"),
        ("beam", "<|start|>assistant<|channel|>analysis <|constrain|>xml<|message|>"
         "<rfl:parameter name=", "beam", "beam"),
        ("llama", "{{ messages }}", None, None),
    ],
)  # fmt: skip
def test_marks_of_a_template_name_its_parsers(
    model_type: str, template: str, tools: str | None, reasoning: str | None
) -> None:
    plugins = load_plugins()
    assert recognized(plugins["tool_parser"], model_type, template) == tools
    assert recognized(plugins["reasoning_parser"], model_type, template) == reasoning


def checkpoint(folder: Path, template: str) -> Path:
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def parsers(folder: Path, **options: str) -> tuple[str | None, str | None]:
    config, plugins = EngineConfig(model=str(folder), **options), load_plugins()  # type: ignore[arg-type]
    check_names(config, plugins)
    chosen = resolve_parsers(config, resolve_model_config(config), plugins)
    return chosen.tool_call_parser, chosen.reasoning_parser


def test_auto_says_what_it_chose(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = checkpoint(tmp_path, HERMES + THOUGHT)
    with caplog.at_level(logging.INFO, logger="jackfield.engine"):
        found = parsers(folder, tool_call_parser="auto", reasoning_parser="auto")
    assert found == ("hermes", "qwen3")
    assert "tool_call_parser: auto chose 'hermes': the chat template has '<tool_call>'" in (
        caplog.text
    )
    assert "reasoning_parser: auto chose 'qwen3'" in caplog.text
    assert parsers(folder) == (None, None), "nothing is guessed unless it is asked for"


def test_a_name_and_the_checkpoints_own_count_more(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, HERMES + THOUGHT)
    assert parsers(folder, tool_call_parser="xlam", reasoning_parser="none") == ("xlam", None)
    (folder / "jackfield.json").write_text('{"tool_call_parser": "jamba"}')
    assert parsers(folder, tool_call_parser="auto", reasoning_parser="auto") == ("jamba", "qwen3")


def test_a_given_template_is_the_one_that_is_read(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, HERMES)
    given = CODER + "{{ messages }}"
    assert parsers(folder, tool_call_parser="auto", chat_template=given)[0] == "qwen3_coder"


def test_auto_without_marks_is_no_parser(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = checkpoint(tmp_path, "{{ messages }}")
    assert parsers(folder, tool_call_parser="auto") == (None, None)
    assert "tool_call_parser: auto finds no marks" in caplog.text
