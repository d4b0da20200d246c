"""Chat templates: what they render, what they are refused, and typed control tokens."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jackfield.core.errors import InvalidRequest
from jackfield.core.text import chat_template, template_budget, template_sandbox
from jackfield.core.text.chat_template import ChatTemplate
from jackfield.core.text.tokenizer import Tokenizer
from jackfield.plugins.conformance.clock import growth

CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\n<tools>' }}
    {%- for tool in tools %}{{- '\\n' ~ tool | tojson }}{%- endfor %}
    {{- '\\n</tools><|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content | trim }}
    {%- endif %}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
        {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}
"""
SPECIAL = ["<|im_start|>", "<|im_end|>"]
MARKUP = [
    "<think>",
    "</think>",
    "<tool_call>",
    "</tool_call>",
    "<tool_response>",
    "</tool_response>",
]


def byte_level() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({token: rank for rank, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    backend.add_tokens([AddedToken(t, normalized=False) for t in [*MARKUP, "  ", "<table>"]])
    return Tokenizer(backend, eos_token="<|im_end|>")


def unigram() -> Tokenizer:
    """Control tokens in the model's own vocabulary, which text could reach without care."""
    pieces = [
        ("<unk>", 0.0),
        *((t, 0.0) for t in SPECIAL),
        *((chr(c), -5.0) for c in range(33, 127)),
    ]
    backend = Backend(models.Unigram([*pieces, ("▁", -2.0), ("▁u", -3.0)], 0, False))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse()])
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL])
    return Tokenizer(backend, eos_token="<|im_end|>")


TOKENIZER = byte_level()
TEMPLATE = ChatTemplate(CHATML, TOKENIZER)
END = TOKENIZER.eos_token_id
START = TOKENIZER.backend.token_to_id("<|im_start|>")


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_chatml_with_tools_calls_and_results() -> None:
    messages = [
        {
            "role": "user",
            "content": [{"type": "text", "text": "Hi"}, {"type": "text", "text": "é"}],
        },
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "1",
                    "type": "function",
                    "function": {"name": "f", "arguments": '{"a": "é<"}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "1", "content": "42"},
    ]
    tools = [{"type": "function", "function": {"name": "f", "description": "é & <b>"}}]
    assert TEMPLATE.render(messages, tools=tools, template_kwargs={"enable_thinking": False}) == (
        '<|im_start|>system\n<tools>\n{"type": "function", "function": {"name": "f", '
        '"description": "é & <b>"}}\n</tools><|im_end|>\n'
        "<|im_start|>user\nHi\né<|im_end|>\n"
        '<|im_start|>assistant\n\n<tool_call>\n{"name": "f", "arguments": {"a": "é<"}}\n'
        "</tool_call><|im_end|>\n<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize(
    ("generate", "kwargs"), [(True, {}), (True, {"enable_thinking": False}), (False, {})]
)
def test_rendering_agrees_with_transformers(generate: bool, kwargs: dict[str, Any]) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(tokenizer_object=byte_level().backend)
    messages = [{"role": "system", "content": " Be. "}, *user("Hi <b>"), *user("Bye")]
    tools = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
    expected = theirs.apply_chat_template(
        messages,
        chat_template=CHATML,
        tools=tools,
        tokenize=False,
        add_generation_prompt=generate,
        **kwargs,
    )
    actual = TEMPLATE.render(
        messages, tools=tools, add_generation_prompt=generate, template_kwargs=kwargs
    )
    assert actual == expected


def test_the_fields_extras_work() -> None:
    source = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}{{ m.content }}"
        "{% endfor %}\n{% generation %}g{% endgeneration %} {{ eos_token }} "
        "{{ {'b': 1, 'a': 'é'} | tojson(indent=1, sort_keys=true, separators=(',', ':')) }} "
        "{{ strftime_now('%Y') | length }} {{ x.y.z }}"
    )
    actual = ChatTemplate(source, TOKENIZER).render(
        [*user("1"), *user("2")], template_kwargs={"x": {"y": {"z": 5}}}
    )
    assert actual == '1g <|im_end|> {\n "a":"é",\n "b":1\n} 4 5'


def test_the_form_of_content_is_found_or_stated() -> None:
    """A template that shows what it gets: a text, or how many parts."""
    source = (
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %};{% endfor %}"
    )
    parts = {"role": "user", "content": [{"type": "text", "text": x} for x in ("a", "b")]}
    chat = [*user("x"), parts]
    for content_format, expected in (
        ("auto", "x;[a][b];"),
        ("string", "x;a\nb;"),
        ("openai", "[x];[a][b];"),
    ):
        template = ChatTemplate(source, TOKENIZER, content_format=content_format)  # type: ignore[arg-type]
        assert template.render(chat) == expected


LLAVA = (
    "{% for message in messages %}{{ message['role'].upper() }}: "
    "{% for content in message['content'] | selectattr('type', 'equalto', 'image') %}<image>\n"
    "{% endfor %}{% for content in message['content'] | selectattr('type', 'equalto', 'text') %}"
    "{{ content['text'] }} {% endfor %}{% endfor %}"
)
BOTH = (
    "{% for m in messages %}{% set c = m.content %}{% if c is string %}{{ c }}{% else %}"
    "{% for part in c %}{{ part.text }}{% endfor %}{% endif %}{% endfor %}"
)


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (LLAVA, "USER: Hi there "),
        (BOTH, "Hi there"),
        (BOTH.replace("c is string", "false"), "Hi there"),
        ("{% for m in messages %}{% for word in m.content.split(' ') %}{{ word }},{% endfor %}"
         "{% endfor %}", "Hi,there,"),
    ],
)  # fmt: skip
def test_a_template_that_loops_over_content_gets_parts(template: str, text: str) -> None:
    for content in ("Hi there", [{"type": "text", "text": "Hi there"}]):
        assert ChatTemplate(template).render(user(content)) == text


TWO = [{"type": "text", "text": "First."}, {"type": "text", "text": "Second."}]


def test_parts_stay_parts_in_the_roles_in_which_a_template_reads_them() -> None:
    """This one reads a user's parts, and writes a tool's content as JSON."""
    template = ChatTemplate(
        "{% for m in messages %}{% if m.role == 'tool' %}{{ m.content | tojson }}"
        "{% elif m.content is string %}{{ m.content }}"
        "{% else %}{% for part in m.content %}<{{ part.text }}>{% endfor %}{% endif %}{% endfor %}"
    )
    call = {"id": "1", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "system", "content": TWO},
        {"role": "user", "content": TWO},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "1", "content": TWO},
    ]
    assert template.render(messages) == '<First.><Second.><First.><Second.>"First.\\nSecond."'


def test_a_template_for_tools_serves_requests_with_tools() -> None:
    template = ChatTemplate({"default": "plain", "tool_use": "tools"})
    assert template.render(user("x")) == "plain"
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert template.render(user("x"), tools=tools) == "tools"


def test_the_final_message_can_be_continued() -> None:
    messages = [*user("Hi"), {"role": "assistant", "content": "Once upon "}]
    options = {"add_generation_prompt": False, "continue_final_message": True}
    text = TEMPLATE.render(messages, **options)
    # The template trims content; so does transformers where one does.
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nOnce upon"
    kept = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    assert kept.render(messages, **options) == "[Hi][Once upon "
    with pytest.raises(InvalidRequest, match="add_generation_prompt"):
        TEMPLATE.render(messages, continue_final_message=True)


@pytest.mark.parametrize("typed", ["\ufdd2 b", "a \ufdd2 b", "a\ufdd2", "\ufdd2\ufdd2"])
def test_a_noncharacter_typed_in_a_continued_message_does_not_end_it(typed: str) -> None:
    kept = ChatTemplate("{% for m in messages %}[{{ m.content }}]{% endfor %}")
    options = {"add_generation_prompt": False, "continue_final_message": True}
    messages = [*user("Hi"), {"role": "assistant", "content": typed}]
    assert kept.render(messages, **options) == "[Hi][" + typed.replace("\ufdd2", "\ufffd")
    messages[1]["content"] = [{"type": "text", "text": typed}]
    assert kept.render(messages, **options) == "[Hi][" + typed.replace("\ufdd2", "\ufffd")


REFUSED: list[tuple[Any, str]] = [
    ([], "messages"),
    ("hello", "messages"),
    (["hello"], "messages[0]"),
    ([{"role": "robot", "content": "x"}], "messages[0].role"),
    ([{"role": "user"}], "messages[0].content"),
    ([*user("a"), {"role": "user", "content": None}], "messages[1].content"),
    (user(5), "messages[0].content"),
    (user([{"type": "image_url", "image_url": {}}]), "messages[0].content[0]"),
    (
        [{"role": "assistant", "tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}],
        "messages[0].tool_calls[0].type",
    ),
    (
        [{"role": "assistant", "tool_calls": [{"function": {}}]}],
        "messages[0].tool_calls[0].function.name",
    ),
    ([{"role": "user", "content": "x", "tool_calls": [1]}], "messages[0].tool_calls"),
    (
        [{"role": "assistant", "tool_calls": [{"id": 5, "function": {"name": "f"}}]}],
        "messages[0].tool_calls[0].id",
    ),
    ([{"role": "tool", "content": "x", "tool_call_id": {}}], "messages[0].tool_call_id"),
    ([{"role": "user", "content": "x", "name": 5}], "messages[0].name"),
    (
        [{"role": "assistant", "content": "x", "reasoning_content": ["y"]}],
        "messages[0].reasoning_content",
    ),
]


@pytest.mark.parametrize(("messages", "param"), REFUSED)
def test_malformed_messages_are_refused_with_their_path(messages: Any, param: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        TEMPLATE.render(messages)
    assert refused.value.param == param


@pytest.mark.parametrize(
    "key", ["tokenize", "chat_template", "raise_exception", "_x", "eos_token", "a b"]
)
def test_reserved_template_variables_are_refused(key: str) -> None:
    with pytest.raises(InvalidRequest) as refused:
        TEMPLATE.render(user("x"), template_kwargs={key: "y"})
    assert refused.value.param == f"chat_template_kwargs.{key}"


def test_a_model_without_a_template_refuses_chats() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        ChatTemplate(None, TOKENIZER).render(user("x"))


def test_a_template_that_is_no_jinja_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="line 2") as refused:
        ChatTemplate("a\n{% if %}")
    assert refused.value.param == "chat_template"


def test_a_templates_own_refusal_reaches_the_caller() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate") as refused:
        ChatTemplate("{{ raise_exception('roles must alternate') }}").render(user("x"))
    assert refused.value.param == "messages"


ESCAPES = [
    "{{ ''.__class__.__mro__ }}",
    "{{ ''['__class__']['__mro__'] }}",
    "{{ (''|attr('__class__')).__mro__ }}",
    "{{ messages.append(1) }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ raise_exception.__globals__['json'] }}",
    "{{ '{0.__class__.__mro__}'.format(1) }}",
    "{{ '{a.__class__.__mro__[1]}'.format_map({'a': 1}) }}",
    "{{ self.__init__.__globals__ }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_templates_cannot_leave_the_sandbox(source: str) -> None:
    try:
        text = ChatTemplate(source).render(user("x"))
    except InvalidRequest:
        return
    assert "class" not in text and "object" not in text


COSTLY = [
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{% macro f() %}{% for i in range(9) %}{{ f() }}{% endfor %}{% endmacro %}{{ f() }}",
    "{{ range(10000000) | list }}",
    "{{ 'a' * 1000000000 }}",
    "{{ ['a'] * 100000000 }}",
    "{{ ['a' * 10000000] * 1000 }}",
    "{{ (['a' * 10000000] * 1000) | tojson }}",
    "{{ (['a' * 10000000] * 1000) | join }}",
    "{{ (['a' * 10000000] * 1000) | string }}",
    "{{ ''.join(['a' * 10000000] * 1000) }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ '%999999999d' % 1 }}",
    "{{ '{:999999999}'.format(1) }}",
    "{{ '{:{}}'.format(1, 999999999) }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a' | indent(1000000000, true) }}",
    "{{ ('a' * 9999).replace('a', 'b' * 9999) }}",
    "{{ ('a' * 9999) | replace('a', 'b' * 9999) }}",
    "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{% set n = namespace(s='aa') %}{% for i in range(60) %}{% set n.s = n.s + n.s %}{% endfor %}",
    "{{ 'a\"' " + "| tojson" * 40 + " }}",
    "{{ ([['a']] * 100000) | sum(start=[]) }}",
    "{{ (['a' * 10000] * 100000) | sum(start='') }}",
    "{{ ('a' * 999).translate({97: 'b' * 99999}) }}",
    "{{ '%s%s' | format('a' * 9999999, 'a' * 9999999) }}",
    "{{ ['a' * 9999999] * 999 | map('string') | join }}",
    "{{ (['a' * 9999999] * 999) | map('string') | join }}",
    "{{ dict(a='a' * 9999999, b='b' * 9999999).values() | join }}",
    "{{ ('<!---->' * 99999) | striptags }}",
    "{{ (['a' * 9999999, 'a' * 9999998 + 'b'] * 9999) | sort }}",
    "{{ ['a' * 9999999 + 'c'] * 9999 == ['a' * 9999999 + 'b'] * 9999 }}",
    "{{ ('a' * 9999999 + 'c') in ['a' * 9999999 + 'b'] * 9999 }}",
    "{{ ('a' * 9999999 + 'c') is in (['a' * 9999999 + 'b'] * 9999) }}",
    "{{ ([[1]] * 99999) | tojson(indent=100, separators=(',' * 99, ':')) }}",
]
# Values that hold themselves many times, and all that looks into values.
GROWN = "{% set n = namespace(a=[], b=[]) %}{% for i in range(60) %}{% set n.a = [n.a, n.a] %}"
GROWN += "{% set n.b = [n.b, n.b] %}{% endfor %}"
DEEP = [
    GROWN + what
    for what in (
        "{{ n.a == n.b }}",
        "{{ n.a < n.b }}",
        "{{ n.a is eq(n.b) }}",
        "{{ [n.a] is in([n.b]) }}",
        "{{ n.a in [n.b] }}",
        "{{ [n.a, n.b] | sort }}",
        "{{ [[n.a], [n.b]] | max }}",
        "{{ n.a | tojson }}",
        "{{ n.a | pprint }}",
        "{{ n.a | upper }}",
        "{{ n.a is upper }}",
        "{{ n.a }}",
        "{{ n }}",
        "{{ n.a ~ '' }}",
        "{{ '%s' % n.a }}",
        "{{ '{}'.format(n.a) }}",
        "{{ [n.a].count(n.b) }}",
        "{% for i in [n.a, n.b] %}{{ loop.changed(i) }}{% endfor %}",
        "{{ dict(x=n.a).values() }}",
    )
]
TUPLES = (
    "{% set n = namespace(a=()) %}{% for i in range(60) %}{% set n.a = (n.a, n.a) %}{% endfor %}"
)
DEEP += [
    "{% for i in range(99999) if false %}{% endfor %}",
    "{{ range(99999) | select('odd') | list | length }}",
    "{% for i in range(999) %}{{ range(99) | map('string') | join }}{% endfor %}",
]
DEEP += [
    TUPLES + what
    for what in (
        "{{ {n.a: 1} }}",
        "{{ {1: 2}[n.a] }}",
        "{{ n.a in {1: 2} }}",
        "{{ [n.a] | unique | list }}",
    )
]


@pytest.mark.parametrize("source", COSTLY)
def test_costly_templates_are_stopped(source: str) -> None:
    """None takes much longer than as many steps of a plain loop as a template may take."""

    def loop() -> None:
        ChatTemplate("{% for i in range(9000) %}{% endfor %}").render(user("x"))

    def render() -> None:
        with pytest.raises(InvalidRequest):
            ChatTemplate(source).render(user("x"))

    assert growth(loop, render, bar=400) < 400


@pytest.mark.parametrize("source", DEEP)
def test_what_looks_into_values_counts_all_that_it_meets(
    source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_budget, "MAX_STEPS", 2_000)
    monkeypatch.setattr(chat_template, "_TRIAL_STEPS", 2_000)
    with pytest.raises(InvalidRequest, match="more than 2000 steps"):
        ChatTemplate(source).render(user("x"))


@pytest.mark.parametrize(
    "build",
    ["'a' * 9999", "s[1:]", "s | upper", "s.title()", "s + 'b'", "s ~ 'b'", "f()", "s.split('a')"],
)
def test_what_is_built_is_counted_by_bytes(build: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """However little of it is kept: 100 times 10,000 bytes are more than 2,000 times 256."""
    monkeypatch.setattr(template_budget, "MAX_STEPS", 2_000)
    source = (
        "{% set s = 'a' * 9999 %}{% macro f() %}{{ s }}{% endmacro %}"
        f"{{% for i in range(100) %}}{{% set x = {build} %}}{{% endfor %}}"
    )
    with pytest.raises(InvalidRequest, match="more than 2000 steps"):
        ChatTemplate(source).render(user("x"))


def test_no_filter_and_no_test_goes_uncounted() -> None:
    environment = template_sandbox.TemplateEnvironment()
    for call in (*environment.filters.values(), *environment.tests.values()):
        with pytest.raises(LookupError, match="template_budget"):
            call("a", "b")


def test_a_chained_comparison_is_what_it_is_in_python() -> None:
    source = (
        "{{ 1 < 2 < 3 }}{{ 1 < 3 < 2 }}{{ 'a' not in 'b' }}{{ [1] == [1] != [2] }}{{ 'abc'[1:] }}"
    )
    assert ChatTemplate(source).render(user("x")) == "TrueFalseTrueTruebc"


# ---------------------------------------------------------------- typed control tokens

TYPED = st.lists(
    st.sampled_from(
        [*SPECIAL, *MARKUP, "<", "|", "im_end|>", "<|im_", "a", " ", "  ", "\n", "é", "<table>"]
    ),
    max_size=8,
).map("".join)
PLAIN = st.text(st.sampled_from([*"ab <|>é\n", "_"]), max_size=20)


@settings(max_examples=200, deadline=None)
@given(texts=st.lists(PLAIN, min_size=1, max_size=3))
def test_without_typed_control_tokens_the_tokens_are_those_of_the_text(texts: list[str]) -> None:
    for tokenizer in (TOKENIZER, UNIGRAM):
        template = ChatTemplate(CHATML, tokenizer)
        messages = [message for text in texts for message in user(text)]
        expected = tokenizer.encode(template.render(messages), add_special_tokens=False)
        assert template.render_tokens(messages) == expected


@settings(max_examples=200, deadline=None)
@given(typed=TYPED, role=st.sampled_from(["user", "system", "tool"]), more=TYPED)
def test_typed_control_tokens_stay_text(typed: str, role: str, more: str) -> None:
    messages = [{"role": role, "content": typed}, *user(more)]
    controls = [i for i, t in TOKENIZER.added_tokens.items() if t.content in SPECIAL + MARKUP]

    def control_tokens(messages: list[dict[str, Any]]) -> list[int]:
        return [token for token in TEMPLATE.render_tokens(messages) if token in controls]

    harmless = [{"role": role, "content": "x"}, *user("x")]
    assert control_tokens(messages) == control_tokens(harmless)
    text = TOKENIZER.decode(TEMPLATE.render_tokens(messages), skip_special_tokens=False)
    assert text == TEMPLATE.render(messages)


UNIGRAM = unigram()


def test_typed_control_tokens_stay_text_where_the_model_vocabulary_has_them() -> None:
    template = ChatTemplate("{{ messages[0].content }}<|im_end|>", UNIGRAM)
    ids = template.render_tokens(user("u<|im_end|>"))
    assert ids.count(UNIGRAM.eos_token_id) == 1 and ids[-1] == UNIGRAM.eos_token_id
    assert UNIGRAM.decode(ids, skip_special_tokens=False) == " u<|im_end|><|im_end|>"


def test_tool_definitions_and_template_variables_are_guarded() -> None:
    template = ChatTemplate("{{ tools | tojson }}{{ note }}{{ messages[0].content }}", TOKENIZER)
    tools = [{"type": "function", "function": {"name": "f", "description": "<|im_end|>"}}]
    ids = template.render_tokens(
        user("<|im_end|>"), tools=tools, template_kwargs={"note": "<|im_end|>"}
    )
    assert END not in ids


CALL = {"function": {"name": "<tool_call>", "arguments": {"<think>": "</tool_call><|im_end|>"}}}
SAID = [
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "a<think>b</think><|im_end|>c", "tool_calls": [CALL]},
]


def test_text_of_assistant_messages_never_becomes_a_control_token() -> None:
    bare = [{**SAID[0]}, {"role": "assistant", "content": "abc"}]
    call = {"function": {"name": "f", "arguments": {"a": "b"}}}
    own = TEMPLATE.render_tokens([bare[0], {**bare[1], "tool_calls": [call]}])
    ids = TEMPLATE.render_tokens(SAID)
    added = TOKENIZER.added_tokens.keys()
    assert [id for id in ids if id in added] == [id for id in own if id in added]
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == TEMPLATE.render(SAID)


def test_with_the_switch_markup_of_assistants_reads_as_tokens_and_others_text_does_not() -> None:
    trusting = ChatTemplate(CHATML, TOKENIZER, assistant_control_tokens=True)
    ids = trusting.render_tokens(SAID)
    assert ids == TOKENIZER.encode(TEMPLATE.render(SAID), add_special_tokens=False)
    assert trusting.render_tokens(user("<|im_end|>")).count(END) == 1


READS_THOUGHTS = (
    "{% for m in messages %}{% set content = m.content %}"
    "{% if m.reasoning_content is string %}{% set thought = m.reasoning_content %}"
    "{% else %}{% set thought = '' %}{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}{% endif %}"
    "<|im_start|>{{ m.role }}\n{% if not loop.last %}<think>{{ thought }}</think>{% endif %}"
    "{{ content }}<|im_end|>{% endfor %}"
)


KEEPS_SPACE = READS_THOUGHTS.replace(".strip('\n')", "").replace(".lstrip('\n')", "")
KEEPS_REASONING = (
    "{%- set reasoning_mode = '/think' -%}{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content }}<|im_end|>{% endfor %}<|im_start|>assistant\n<think>\n\n</think>\n"
)


@pytest.mark.parametrize("source", [READS_THOUGHTS, KEEPS_SPACE, KEEPS_REASONING])
@pytest.mark.parametrize("thought", ["<think>\nhm\n</think>\n\n", "hm</think>", "<think></think>"])
def test_reasoning_in_the_content_is_what_the_template_takes_it_for(
    thought: str, source: str
) -> None:
    template = ChatTemplate(source, TOKENIZER)
    for chat in (
        [{"role": "assistant", "content": thought + "Yes."}, *user("Why?")],
        [*user("Why?"), {"role": "assistant", "content": thought + "Yes."}],
    ):
        ids = template.render_tokens(chat)
        assert TOKENIZER.decode(ids, skip_special_tokens=False) == template.render(chat)
        if source is READS_THOUGHTS:
            assert ids == TOKENIZER.encode(template.render(chat), add_special_tokens=False)


def test_a_template_without_reasoning_gets_the_content_unchanged() -> None:
    ids = TEMPLATE.render_tokens([{"role": "assistant", "content": "<think>a</think>b"}])
    text = TOKENIZER.decode(ids, skip_special_tokens=False)
    assert text.startswith("<|im_start|>assistant\n<think>a</think>b<|im_end|>\n")


@pytest.mark.parametrize("before", [0, 1, 65520, 65530, 65535, 65536, 65540, 200_000])
def test_control_tokens_are_found_wherever_long_texts_are_searched_in_slices(before: int) -> None:
    text = "x" * before + "<|im_end|><|im_end|>" + "y" * 70_000 + "<|im_start|>"
    ids = TEMPLATE.render_tokens(user(text))
    assert [id for id in ids if id in TOKENIZER.special_ids] == [START, END, START]
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == TEMPLATE.render(user(text))


def test_ascii_json_does_not_show_the_mark() -> None:
    template = ChatTemplate("{{ messages | tojson(ensure_ascii=true) }}", TOKENIZER)
    ids = template.render_tokens(user("<|im_end|>"))
    assert END not in ids
    assert TOKENIZER.decode(ids) == template.render(user("<|im_end|>"))


def test_a_megabyte_of_typed_control_tokens_takes_linear_time() -> None:
    mark = TEMPLATE._control.mark
    for text in ("<" * 1_000_000, "<|im_" * 200_000):
        part = text[:100_000]
        ratio = growth(lambda part=part: mark(part), lambda text=text: mark(text), bar=30)
        assert ratio < 30, text[:5]


# ---------------------------------------------------------------- developers, documents, variables


def test_a_developer_is_the_system_unless_the_template_knows_developers() -> None:
    messages = [{"role": "developer", "content": "Be brief."}]
    roles = "{% for m in messages %}{{ m.role }}{% endfor %}"
    assert ChatTemplate(roles).render(messages) == "system"
    knows = ChatTemplate(roles + "{# developer #}")
    assert knows.render(messages) == "developer"


def test_documents_reach_the_templates_that_write_them() -> None:
    template = ChatTemplate("{% for d in documents %}[{{ d.title }}]{% endfor %}")
    assert template.render(user("x"), documents=[{"title": "a"}, {"title": "b"}]) == "[a][b]"
    with pytest.raises(InvalidRequest) as refused:
        template.render(user("x"), documents=["a"])
    assert refused.value.param == "documents[0]"
    with pytest.raises(InvalidRequest) as refused:
        ChatTemplate("{{ messages }}").render(user("x"), documents=[{"title": "a"}])
    assert refused.value.param == "documents"


def test_the_variables_are_those_that_a_request_may_set() -> None:
    template = ChatTemplate(
        "{% set ns = namespace(a=1) %}{% macro m(y) %}{{ y + depth }}{% endmacro %}"
        "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}"
        "{% if enable_thinking is defined and enable_thinking %}{{ bos_token }}{% endif %}"
        "{% if add_generation_prompt %}{{ raise_exception(m(effort)) }}{% endif %}"
    )
    assert template.variables - {"bos_token"} == {"enable_thinking", "depth", "effort"}
