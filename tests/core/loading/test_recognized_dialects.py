"""`auto` chooses parsers by a checkpoint's chat template and model type, and says so."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest

from jackfield import EngineConfig
from jackfield.core.engine.resolve_config import check_names, resolve_models, resolve_parsers
from jackfield.core.errors import ConfigError
from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.core.loading.dialects import declared_parser, recognized
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.protocols.executors import ExecutorInfo
from jackfield.core.registry import ParserMarks, Registry, load_plugins

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
        ("iquest_q1", "<iquest_tool_call>{{ name }}<arg_key>" + THOUGHT, "iquest_q1", "iquest_q1"),
        ("llama", "{{ messages }}", None, None),
        ("llama", '{{- \'Respond in the format {"name": function name, "parameters": dict}\'',
         "llama3_json", None),
        ("llama4", "<|python_tag|>{{ '<|python_start|>' }}", "llama4_pythonic", None),
        ("lfm2", "List of tools: <|tool_list_start|>[", "lfm2", None),
        ("lfm2_moe", "<|tool_call_start|>[' ~ calls ~ ']<|tool_call_end|><think>", "lfm2",
         "think_tags"),
        ("llava", "a list of json objects within <tool_call></tool_call>:\n<tool_calls>[{",
         "jamba", None),
        ("jamba", "<tool_calls>\n[", "jamba", None),
        ("hunyuan_v1_moe", "<tool_calls>[{" + THOUGHT, "hunyuan_a13b", "hunyuan_a13b"),
        ("internlm2", "<|action_start|><|plugin|>", "internlm", None),
        ("olmo3", "<function_calls>" + THOUGHT, "olmo3", "olmo3"),
        ("granite", "<|tool_call|>Here is my thought process:", "granite", "granite"),
        ("nemotron_h", "<TOOLCALL>[{<think></think>", "nemotron_json", "nemotron_v3"),
        ("gigachat3", "{'role': 'function call'}<|role_sep|>\n<|message_sep|>", "gigachat3", None),
        ("gigachat3", "function call<|role_sep|>\n{", "gigachat3", None),
        ("gigachat35", "role in ['function call']<|role_sep|><｜GCML｜tool_calls>\n"
         '<｜GCML｜invoke name="<think>', "gigachat35", "gigachat35"),
        ("cohere2", "<|START_THINKING|><|START_ACTION|><|START_TEXT|>",
         "cohere_command4", "cohere_command4"),
        ("deepseek_v32", "<｜DSML｜function_calls>", "deepseek_v32", None),
        ("deepseek_v41", "<｜DSML｜ calls></think>", "deepseek_v41", "deepseek_v41"),
        ("gemma3_text", "<start_function_call>call:f{a:<escape>b<escape>}", "functiongemma", None),
        ("longcat", "<longcat_tool_call>", "longcat", None),
        ("minimax_m2", '<minimax:tool_call><invoke name="f"><think>', "minimax_m2", "minimax_m2"),
        ("seed_oss", "<seed:tool_call>\n<function=f><seed:think>", "seed_oss", "seed_oss"),
        ("step3_vl", '<steptml:invoke name="f"><think>', "step3", "step3"),
        ("plamo3", "<|plamo:begin_tool_request:plamo|><|plamo:begin_think:plamo|>",
         "plamo3", "plamo3"),
        ("kimi_vl", "◁think▷", None, "kimi"),
        ("muse_glimmer", "raise('MuseGlimmer')<atem:function_calls>",
         "muse_glimmer", "muse_glimmer"),
        ("qwen3_5", CODER + THOUGHT, "qwen3_coder", "qwen3"),
        ("smollm3", HERMES + THOUGHT, "hermes", "qwen3"),
    ],
)  # fmt: skip
def test_marks_of_a_template_name_its_parsers(
    model_type: str, template: str, tools: str | None, reasoning: str | None
) -> None:
    plugins = load_plugins()
    assert recognized(plugins["tool_parser"], model_type, template) == tools
    assert recognized(plugins["reasoning_parser"], model_type, template) == reasoning


def test_each_parser_with_marks_is_chosen_for_some_template() -> None:
    cases = test_marks_of_a_template_name_its_parsers.pytestmark[0].args[1]
    for kind, column in (("tool_parser", 2), ("reasoning_parser", 3)):
        entries = load_plugins()[kind].entries()
        with_marks = {entry.name for entry in entries if entry.parser_marks.marks}
        assert with_marks <= {case[column] for case in cases}


def checkpoint(folder: Path, template: str) -> Path:
    config = json.loads((EMBEDDED_MODEL / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(template)
    return folder


def parsers(folder: Path, **options: str | None) -> tuple[str | None, str | None]:
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


RESPONSE_TEMPLATE = {
    "start_anchor": "assistant",
    "fields": {
        "content": {},
        "tool_calls": {"open": "<do>", "close": "</do>", "content": "json"},
    },
}
AUTO = {"tool_call_parser": "auto", "reasoning_parser": "auto"}
HF = {"tool_call_parser": "hf", "reasoning_parser": "hf"}


def declare(folder: Path, template: object) -> None:
    config = {"response_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def test_auto_goes_by_a_response_template_where_it_knows_no_marks(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint(tmp_path, "{{ messages }}")
    declare(folder, RESPONSE_TEMPLATE)
    with caplog.at_level(logging.INFO, logger="jackfield.engine"):
        assert parsers(folder, **AUTO) == ("hf", "hf")
    assert "tool_call_parser: auto chose 'hf': the checkpoint has a response_template" in (
        caplog.text
    )
    assert parsers(folder, tool_call_parser="auto") == (None, None), "it needs the other one"
    assert parsers(folder, tool_call_parser="auto", reasoning_parser="hf") == ("hf", "hf")
    assert parsers(folder, reasoning_parser="auto") == (None, "hf")
    assert parsers(folder, tool_call_parser="hermes", reasoning_parser="auto") == ("hermes", "hf")
    assert parsers(folder) == (None, None)
    checkpoint(tmp_path, THOUGHT)
    assert parsers(folder, **AUTO) == ("hf", "hf"), "calls need both"
    checkpoint(tmp_path, HERMES + THOUGHT)
    assert parsers(folder, **AUTO) == ("hermes", "qwen3")


def test_auto_does_without_a_response_template_that_cannot_be_served(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = checkpoint(tmp_path, "{{ messages }}")
    declare(folder, {**RESPONSE_TEMPLATE, "version": 2})
    assert parsers(folder, **AUTO) == (None, None)
    assert "auto cannot choose 'hf': response_template.version: 2" in caplog.text
    declare(folder, {**RESPONSE_TEMPLATE, "fields": {"content": {}}})
    assert parsers(folder, **AUTO) == (None, "hf"), "it has no calls"


def test_hf_is_refused_with_the_name_of_the_field(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, HERMES)
    with pytest.raises(ConfigError, match=r"^reasoning_parser: hf: .* has no response_template"):
        parsers(folder, **HF)
    fields = {"content": {}, "thinking": {"open_pattern": "(?<=a)b"}}
    declare(folder, {**RESPONSE_TEMPLATE, "fields": fields})
    with pytest.raises(ConfigError, match=r"fields\.thinking\.open_pattern: .*; name another"):
        parsers(folder, **HF)
    declare(folder, RESPONSE_TEMPLATE)
    assert parsers(folder, **HF) == ("hf", "hf")
    assert parsers(folder, **dict.fromkeys(HF, "response_template")) == ("hf", "hf")
    for other in (None, "none", "qwen3"):
        with pytest.raises(ConfigError, match="set reasoning_parser to 'hf', too"):
            parsers(folder, tool_call_parser="hf", reasoning_parser=other)


def test_each_engine_has_the_parsers_of_its_own_checkpoint(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "{{ messages }}")
    declare(folder, RESPONSE_TEMPLATE)
    config, plugins = EngineConfig(model=str(folder), **HF), load_plugins()
    info = ExecutorInfo(
        num_blocks=9, device="cpu", dtype="float32", attention_backend="torch",
        attention_reason="it is there", weight_bytes=1, kv_cache_bytes=1, load_seconds=1.0,
    )  # fmt: skip
    resolve_models(resolve_parsers(config, resolve_model_config(config), plugins), info, plugins)
    assert "<do>" in plugins["tool_parser"].load("hf").markers
    assert not load_plugins()["tool_parser"].load("hf").markers


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
        "gigachat35 gemma4 inkling iquest_q1 response_template"
    ),
    "reasoning_parser": (
        "apertus2509 beam deepseek-r1 deepseek-v3 deepseek-v4 deepseek-v41 dots glm45 ling3 "
        "hunyuan gpt-oss k2_horizon kimi kimi_k2 kimi_k3 mimo muse poolside_v1 qwen3 "
        "qwen3-thinking minimax minimax-append-think minimax-m3 nanbeige step3 step3p5 mistral "
        "nemotron_3 granite_thinking_parser interns1 gemma4 gigachat35 inkling cohere_command4 "
        "iquest_q1 response_template"
    ),
}
"""Names of SGLang 0.5.23."""
LATER_VLLM = {
    "tool_parser": (
        "apertus apertus2509 beam cohere_command3 cohere_command4 deepseek_v32 deepseek_v4 "
        "deepseek_v41 dots ernie45 functiongemma gemma4 gigachat3 gigachat35 glm47 granite4 hf "
        "hy_v3 hy_v4 inkling k2_horizon kimi_k3 lfm2 ling3 longcat mimo minicpm5 minimax_m3 muse "
        "muse_glimmer musespark1x plamo3 poolside_v1 qwen3_json spark25 step3p5 step5 trinity"
    ),
    "reasoning_parser": (
        "apertus2509 beam cohere_command3 cohere_command4 deepseek_v4 deepseek_v41 ernie45 gemma4 "
        "glm47 granite_thinking_parser hf holo2 hy_v3 hy_v4 inkling interns1 k2_horizon kimi "
        "kimi_k2 kimi_k3 ling3 mimo minicpmv minimax_m3 muse muse_glimmer musespark1x nemotron_3 "
        "nemotron_v3 plamo3 poolside_v1 seed_oss step3p5 step5"
    ),
}
"""Names of vLLM 0.33.0, with SGLang's, that came after those."""


@pytest.mark.parametrize("kind", VLLM)
def test_names_of_other_engines_are_known(kind: str) -> None:
    registry = load_plugins()[kind]
    aliases = [alias for entry in registry.entries() for alias in entry.aliases]
    assert len(set(aliases)) == len(aliases) and not set(aliases) & set(registry)
    assert set(VLLM[kind].split()) | set(LATER_VLLM[kind].split()) <= set(registry)
    assert set(SGLANG[kind].split()) <= set(registry) | set(aliases)


@pytest.mark.parametrize("option", AUTO)
def test_a_name_that_no_one_has_is_refused(tmp_path: Path, option: str) -> None:
    with pytest.raises(ConfigError, match=rf"^{option}: no \w+ parser named 'telepathy'"):
        parsers(checkpoint(tmp_path, HERMES), **{option: "telepathy"})


def test_another_engines_name_stands_for_ours(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, HERMES)
    found = parsers(folder, tool_call_parser="qwen25", reasoning_parser="deepseek-r1")
    assert found == ("hermes", "deepseek_r1")


def test_a_parser_says_which_field_declares_what_it_reads() -> None:
    """Whatever its name: nothing else chooses it by a field."""
    registry: Registry[Any] = Registry("tool_parser")
    registry.add("plain", "some.module:Parser")
    registry.add("spoken", "some.module:Parser", extra=ParserMarks(declaration="spoken_calls"))
    assert declared_parser(registry, {"spoken_calls": {}}) == "spoken"
    assert declared_parser(registry, {"spoken_calls": None, "": "no field"}) is None
    assert declared_parser(registry, {"response_template": {}}) is None
