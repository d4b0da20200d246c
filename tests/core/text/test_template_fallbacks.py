"""What is tried when a template refuses a conversation, in which order; nothing is lost."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest

from jackfield.core.errors import InvalidRequest
from jackfield.core.text.chat_template import ChatTemplate
from jackfield.core.text.template_fallbacks import attempts

FIRST_ONLY = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('System message must be at the beginning.') }}{% endif %}"
    "[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
ALTERNATING = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system') }}"
    "{% elif (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('alternate') }}"
    "{% endif %}"
    "[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
LEAVES_OUT = (
    "{% if messages[0].role == 'system' %}[S:{{ messages[0].content }}]{% endif %}"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
LAST_WINS = (
    "{% set ns = namespace(s='') %}{% for m in messages if m.role == 'system' %}"
    "{% set ns.s = m.content %}{% endfor %}{{ ns.s }}|"
    "{% for m in messages if m.role != 'system' %}[{{ m.role }}:{{ m.content }}]{% endfor %}"
)
PLAIN = "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}"


def chat(*turns: str) -> list[dict[str, Any]]:
    roles = {"s": "system", "d": "developer", "u": "user", "a": "assistant"}
    return [{"role": roles[turn[0]], "content": turn} for turn in turns]


@pytest.mark.parametrize(
    ("template", "turns", "text"),
    [
        (PLAIN, ["s1", "s2", "u1", "s3"], "[system:s1][system:s2][user:u1][system:s3]"),
        (FIRST_ONLY, ["s1", "d2", "u1"], "[system:s1\n\nd2][user:u1]"),
        (FIRST_ONLY, ["s1", "s2", "u1"], "[system:s1\n\ns2][user:u1]"),
        (FIRST_ONLY, ["u1", "s1", "u2"], "[system:s1][user:u1][user:u2]"),
        (FIRST_ONLY, ["s1", "u1", "a1", "s2", "u2"],
         "[system:s1\n\ns2][user:u1][assistant:a1][user:u2]"),
        (ALTERNATING, ["s1", "u1"], "[user:s1\n\nu1]"),
        (ALTERNATING, ["u1", "a1", "s1"], "[user:u1][assistant:a1][user:s1]"),
        (ALTERNATING, ["u1", "s1", "u2", "a1", "u3"],
         "[user:u1\n\ns1\n\nu2][assistant:a1][user:u3]"),
        (ALTERNATING, ["u1", "u2", "a1", "a2", "u3"],
         "[user:u1\n\nu2][assistant:a1\n\na2][user:u3]"),
        (ALTERNATING, ["s1", "u1", "a1", "u2", "u3"],
         "[user:s1\n\nu1][assistant:a1][user:u2\n\nu3]"),
        # What a template takes, it gets as it is, also where it leaves something out.
        (LEAVES_OUT, ["s1", "u1", "a1", "s2", "u2"], "[S:s1][user:u1][assistant:a1][user:u2]"),
        (LAST_WINS, ["s1", "s2", "u1"], "s2|[user:u1]"),
    ],
)  # fmt: skip
def test_system_messages_and_turns_take_the_first_form_that_is_taken(
    template: str, turns: list[str], text: str
) -> None:
    messages = chat(*turns)
    before = copy.deepcopy(messages)
    assert ChatTemplate(template).render(messages) == text
    assert messages == before


def calls(arguments: Any, id: str = "call_1", content: Any = None) -> list[dict[str, Any]]:
    function = {"name": "f", "arguments": arguments}
    return [
        *chat("u1"),
        {
            "role": "assistant",
            "content": content,
            "tool_calls": [{"id": id, "type": "function", "function": function}],
        },
        {"role": "tool", "tool_call_id": id, "content": "7"},
    ]


def written(arguments: str) -> str:
    """Return a template that writes a call's arguments this way."""
    return (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}"
        f"{{% set args = c.function.arguments %}}{arguments}{{% endfor %}}{{% endfor %}}"
    )


TO_JSON = written("{{ args | tojson }}")
IF_TEXT = written("{{ args if args is string else args | tojson }}")
ITEMS = written("{% for k, v in args.items() %}{{ k }}={{ v }};{% endfor %}")
CONCATENATED = written("{{ 'json ' + args + '.' }}")


@pytest.mark.parametrize("broken", ["[1]", "5", "not json", '{"a": "b', "[" * 100_000])
@pytest.mark.parametrize(
    ("template", "text"),
    [
        (TO_JSON, json.dumps),
        (IF_TEXT, str),
        (ITEMS, "arguments={};".format),
        (CONCATENATED, "json {}.".format),
    ],
)
def test_broken_arguments_reach_the_template_as_they_are(
    template: str, text: Any, broken: str
) -> None:
    assert ChatTemplate(template).render(calls(broken)) == text(broken)


def test_arguments_are_objects_and_text_where_a_template_joins_them_to_others() -> None:
    arguments = '{"a":  1}'
    for template, text in (
        (TO_JSON, '{"a": 1}'),
        (ITEMS, "a=1;"),
        (CONCATENATED, 'json {"a":  1}.'),
    ):
        assert ChatTemplate(template).render(calls(arguments)) == text
    assert ChatTemplate(CONCATENATED).render(calls({"a": "é"})) == 'json {"a": "é"}.'
    for nothing in ("", " ", "null", None, {}):
        assert ChatTemplate(ITEMS + "|").render(calls(nothing)) == "|"


def test_arguments_nested_deeper_than_an_object_may_be_are_text() -> None:
    deep = '{"a":' * 70 + "1" + "}" * 70
    assert ChatTemplate(IF_TEXT).render(calls(deep)) == deep


NINE = (
    "{% for m in messages %}{% for c in m.tool_calls or [] %}"
    "{% if c.id | length != 9 %}{{ raise_exception('ids of 9 letters') }}{% endif %}{{ c.id }}"
    "{% endfor %}{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}"
    "{{ raise_exception('ids of 9 letters') }}{% endif %}={{ m.tool_call_id }}{% endif %}"
    "{% endfor %}"
)


def test_foreign_ids_of_calls_become_nine_letters_that_still_belong_together() -> None:
    template = ChatTemplate(NINE)
    ids = []
    for id in ("call_abc-123", "toolu_01", "fc"):
        call, _, result = template.render(calls("{}", id)).partition("=")
        assert call == result and len(call) == 9 and call.isalnum() and call.isascii()
        assert template.render(calls("{}", id)) == f"{call}={call}"
        ids.append(call)
    assert len(set(ids)) == 3
    assert template.render(calls("{}", "a1B2c3D4e")) == "a1B2c3D4e=a1B2c3D4e"
    kept = ChatTemplate("{{ messages[1].tool_calls[0].id }}")
    assert kept.render(calls("{}", "call_abc-123")) == "call_abc-123"


ASKS = (
    "{% for m in messages %}{% set content = m['content'] %}{% if content is none %}"
    "call {{ m.tool_calls[0].function.name }}{% elif m.role == 'assistant' %}{{ m.content }}"
    "{% endif %}{% endfor %}"
)
COMPARES = ASKS.replace("content is none", "m.content == None")
WRITES = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
RAISES = "{% for m in messages %}{{ '[' + m.content + ']' }}{% endfor %}"
ASKS_AND_RAISES = (
    "{% if messages[-1].content is none %}x{% endif %}" + RAISES
)  # of the last message alone


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (ASKS, "call f"),
        (COMPARES, "call f"),
        (WRITES, "[u1][][7]"),
        (RAISES, "[u1][][7]"),
        (ASKS_AND_RAISES, "[u1][][7]"),
        (WRITES + "{% if content is none %}{% endif %}", "[u1][][7]"),
    ],
)
def test_null_content_is_null_where_a_template_asks_and_empty_where_it_would_write_it(
    template: str, text: str
) -> None:
    assert ChatTemplate(template).render(calls("{}")) == text
    absent = calls("{}")
    del absent[1]["content"]
    assert ChatTemplate(template).render(absent) == text


def test_null_fields_are_left_out() -> None:
    template = ChatTemplate(
        "{% for m in messages %}{{ m.keys() | list | sort | join(',') }};{% endfor %}"
    )
    messages = [
        {"role": "assistant", "content": "x", "refusal": None, "tool_calls": None, "name": None}
    ]
    assert template.render(messages) == "content,role;"


def test_a_template_that_takes_no_form_refuses_with_its_reason_for_the_first() -> None:
    source = (
        "{% if messages | length > 2 %}{{ raise_exception('first') }}{% endif %}"
        "{{ raise_exception('other') }}"
    )
    with pytest.raises(InvalidRequest, match="first"):
        ChatTemplate(source).render(chat("s1", "s2", "u1"))


def test_the_fewest_changes_come_first_and_there_are_not_many() -> None:
    messages = [*chat("s1", "u1", "d1", "u2", "u3"), *calls("cut", content=None), *chat("s2", "u4")]
    forms = list(attempts(messages))
    assert forms[0] is messages
    assert len(forms) == len({json.dumps(form) + str(i) for i, form in enumerate(forms)}) <= 64
    texts = ["s1", "u1", "d1", "u2", "u3", "cut", "s2", "u4"]
    assert all(text in json.dumps(form) for form in forms for text in texts)


def test_more_than_one_trait_can_be_changed() -> None:
    source = FIRST_ONLY + NINE + CONCATENATED
    messages = [*chat("s1", "s2"), *calls("{}", "call_1")]
    text = ChatTemplate(source.replace("m.content", "(m.content + '')")).render(messages)
    assert "[system:s1\n\ns2]" in text and text.endswith("json {}.")
