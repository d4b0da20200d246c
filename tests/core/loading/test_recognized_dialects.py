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
        ("nemotron_h", CODER + THOUGHT, "qwen3_coder", "nemotron_v3"),
        ("laguna", GLM45, "poolside_v1", "poolside_v1"),
        ("bailing_hybrid", GLM47, "ling3", "ling3"),
        ("step3p5", CODER + "<think>", "step3p5", "step3p5"),
        ("deepseek_v4", "<｜DSML｜tool_calls></think>", "deepseek_v4", "deepseek_v4"),
        ("hy_v3", "<tool_calls><tool_call>{name}<tool_sep><arg_key></think>", "hy_v3", "hy_v3"),
        ("kimi_k3", "<|open|>think<|sep|><|close|>think<|sep|>", "kimi_k3", "kimi_k3"),
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


VLLM = {
    "tool_parser": (
        "apertus cohere_command3 cohere_command4 deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 "
        "ernie45 functiongemma gemma4 gigachat3 glm45 glm47 granite granite-20b-fc granite4 hermes "
        "hunyuan_a13b hy_v3 inkling internlm jamba kimi_k2 lfm2 llama3_json llama4_json "
        "llama4_pythonic longcat mimo minicpm5 minimax_m2 minimax_m3 mistral olmo3 openai "
        "phi4_mini_json poolside_v1 pythonic qwen3_coder qwen3_xml seed_oss step3 step3p5 xlam"
    ),
    "reasoning_parser": (
        "cohere_command3 cohere_command4 deepseek_r1 deepseek_v3 deepseek_v4 ernie45 gemma4 glm45 "
        "glm47 granite holo2 hunyuan_a13b hy_v3 inkling kimi_k2 mimo minimax_m2 "
        "minimax_m2_append_think minimax_m3 mistral nemotron_v3 olmo3 openai_gptoss poolside_v1 "
        "qwen3 seed_oss step3 step3p5"
    ),
}
"""Names of vLLM 0.26.0."""
SGLANG = {
    "tool_parser": (
        "apertus2509 beam cohere_command4 deepseekv3 deepseekv31 deepseekv32 deepseekv4 "
        "deepseekv41 dots glm glm45 glm47 gpt-oss k2_horizon kimi_k2 kimi_k3 lfm2 ling3 llama3 "
        "mimo minicpm5 mistral muse poolside_v1 pythonic qwen qwen25 qwen3_coder spark25 step3 "
        "step3p5 minimax-m2 minimax-m3 nanbeige trinity interns1 hermes hunyuan gigachat3 "
        "gigachat35 gemma4 inkling"
    ),
    "reasoning_parser": (
        "apertus2509 beam deepseek-r1 deepseek-v3 deepseek-v4 deepseek-v41 dots glm45 ling3 "
        "hunyuan gpt-oss k2_horizon kimi kimi_k2 kimi_k3 mimo muse poolside_v1 qwen3 "
        "qwen3-thinking minimax minimax-append-think minimax-m3 nanbeige step3 step3p5 mistral "
        "nemotron_3 granite_thinking_parser interns1 gemma4 gigachat35 inkling cohere_command4"
    ),
}
"""Names of SGLang 0.5.23, but for `iquest_q1` and `response_template`."""


@pytest.mark.parametrize("kind", VLLM)
def test_names_of_other_engines_are_known(kind: str) -> None:
    registry = load_plugins()[kind]
    aliases = [alias for entry in registry.entries() for alias in entry.aliases]
    assert len(set(aliases)) == len(aliases) and not set(aliases) & set(registry)
    assert set(VLLM[kind].split()) <= set(registry)
    assert set(SGLANG[kind].split()) <= set(registry) | set(aliases)


def test_another_engines_name_stands_for_ours(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, HERMES)
    found = parsers(folder, tool_call_parser="qwen25", reasoning_parser="deepseek-r1")
    assert found == ("hermes", "deepseek_r1")
