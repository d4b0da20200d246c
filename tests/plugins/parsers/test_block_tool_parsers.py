"""Tool parsers that read whole blocks, or the calls inside of messages, pass the kit."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tool_kit import ALL, NESTED, NESTED_JSON, PARIS, TRICKY, TRICKY_JSON, BlockKit, Kit

from jackfield.core.output_parsing.output_parser import fold
from jackfield.plugins.conformance.parsers import Sample, run, tool
from jackfield.plugins.parsing.element_tree import MAX_DEPTH, arguments_of


class TestSpark25(BlockKit):
    name = "spark25"
    samples = [
        Sample(
            "Yes.<tool_call>ferry\n<arg_key>quay</arg_key>\n<arg_value> 7 \u00e9\n</arg_value>\n"
            "<arg_key>seats</arg_key><arg_value>[2, 3]</arg_value>\n</tool_call>\n"
            "<tool_call>now\n</tool_call>Done.",
            content="Yes.\nDone.",
            calls=[("ferry", {"quay": " 7 \u00e9\n", "seats": [2, 3]}), ("now", {})],
            tools=ALL,
        ),
        Sample(
            "<tool_call>ferry\n<arg_key>quay</arg_key><arg_value>null</arg_value>\n</tool_call>",
            calls=[("ferry", {"quay": None})],
            tools=ALL,
        ),
        Sample(
            "<tool_call>moon<arg_key>day</arg_key><arg_value>soon</arg_value>"
            "<arg_key>more</arg_key><arg_value>3</arg_value></tool_call>",
            calls=[("moon", {"day": "soon", "more": "3"})],
            tools=ALL,
        ),
        Sample("<tool_call>nope</tool_call>", content="<tool_call>nope</tool_call>", tools=ALL),
        Sample(
            "<tool_call>now<arg_key>a</arg_key></tool_call>",
            content="<tool_call>now<arg_key>a</arg_key></tool_call>",
            tools=ALL,
        ),
        Sample("<tool_call>now<tool_call>now</tool_call>", content="<tool_call>now",
               calls=[("now", {})], tools=ALL),
        Sample("<tool_call>now\n<arg_", content="<tool_call>now\n<arg_", tools=ALL),
    ]  # fmt: skip


def k2(*calls: str) -> str:
    inner = "".join(f"<ifm|tool_call>{call}</ifm|tool_call>\n" for call in calls)
    return f"<ifm|tool_calls>\n{inner}</ifm|tool_calls>"


def k2_argument(key: str, value: str, kind: str = "") -> str:
    kind = f"<ifm|arg_type>{kind}</ifm|arg_type>" if kind else ""
    return f"<ifm|arg_key>{key}</ifm|arg_key>{kind}<ifm|arg_value>{value}</ifm|arg_value>"


class TestK2Horizon(BlockKit):
    name = "k2_horizon"
    samples = [
        Sample(
            "A" + k2("ferry" + k2_argument("quay", "7") + "\n" + k2_argument("night", "true"),
                     "now") + "B",
            content="AB",
            calls=[("ferry", {"quay": "7", "night": True}), ("now", {})],
            tools=ALL,
        ),
        Sample(
            k2("ferry" + k2_argument("seats", " [2, 3] ", "array[integer]")
               + k2_argument("more", "5", "integer") + k2_argument("any", "5", "any")),
            calls=[("ferry", {"seats": [2, 3], "more": 5, "any": "5"})],
            tools=ALL,
        ),
        Sample(k2("moon" + k2_argument("phase", "null", "string")),
               calls=[("moon", {"phase": "null"})], tools=ALL),
        Sample(k2('{"name": "moon", "arguments": {"day": 3, "x": [1e2, "\u00e9"]}}'),
               calls=[("moon", {"day": 3, "x": [1e2, "\u00e9"]})], tools=ALL),
        Sample(k2("now", "nope"), content=k2("now", "nope"), tools=ALL),
    ]  # fmt: skip

    @pytest.mark.parametrize(
        "wrong",
        [
            k2("now", "nope"),
            k2("moon" + k2_argument("day", "3") + k2_argument("day", "4")),
            k2("moon" + k2_argument("day", "3", "integer") + k2_argument("phase", "4")),
            k2('{"name": "moon", "arguments": 3}'),
            k2('{"name": "moon", "arguments": {"day": NaN}}'),
            k2('{"name": "moon", "arguments": {"day": 1e999}}'),
            k2("now").replace("</ifm|tool_call>", "</ifm|tool_call>words"),
            k2("now")[:-3],
        ],
    )
    def test_one_wrong_call_makes_all_content(self, wrong: str) -> None:
        message = fold(run(self.parser_class(tools=ALL), [wrong]))
        assert message.content == wrong and not message.tool_calls


class TestDots(BlockKit):
    name = "dots"
    samples = [
        Sample(
            'Go.<dots_function_call><invoke name="ferry"><parameter name="quay"> 7 </parameter>'
            '<parameter name="night">1</parameter><parameter name="seats">null</parameter>'
            '</invoke><invoke name="nope"></invoke><invoke name="now"></invoke>'
            "</dots_function_call>Never shown."
            '<dots_function_call>{"name": "moon", "parameters": {"day": 3}}</dots_function_call>',
            content="Go.",
            calls=[
                ("ferry", {"quay": "7", "night": True, "seats": None}), ("now", {}),
                ("moon", {"day": 3}),
            ],
            tools=ALL,
        ),
        Sample(
            '<dots_function_call><invoke name="now"></invoke>',
            calls=[("now", {})], tools=ALL,
        ),
        Sample("a<dots_function_call>b</dots_function_call>c",
               content="a<dots_function_call>b</dots_function_call>c"),
    ]  # fmt: skip


class TestMiniCpm5(BlockKit):
    name = "minicpm5"
    samples = [
        Sample(
            'Yes. <function name="ferry"><param name="quay"><![CDATA[a < b </param></function>]]>'
            '</param><param name="seats">[2]</param><param name="x">1</param></function>'
            "<function name='moon'><arguments><param name='day'> 3 </param></arguments></function>"
            "<functionname=\"now\"></function>",
            content="Yes.",
            calls=[
                ("ferry", {"quay": "a < b </param></function>", "seats": [2]}),
                ("moon", {"day": 3}), ("now", {}),
            ],
            tools=ALL,
        ),
        Sample(
            '<function name="ferry"><param name="quay">a &lt; b</param>'
            '<param name="seats">(1, 2)</param></function>',
            calls=[("ferry", {"quay": "a < b", "seats": [1, 2]})],
            tools=ALL,
        ),
        Sample(
            '<function name="moon"><param name="arguments">{"day": 3}</param></function>',
            calls=[("moon", {"day": 3})], tools=ALL,
        ),
        Sample('<function name="nope"></function>', content='<function name="nope"></function>',
               tools=ALL),
        Sample('<function name="now"><param name="', content='<function name="now"><param name="'),
    ]  # fmt: skip

    def test_a_call_without_a_required_argument_is_content(self) -> None:
        needy = tool("moon", day="integer")
        needy["function"]["parameters"]["required"] = ["day"]
        text = '<function name="moon"><param name="phase">new</param></function>'
        message = fold(run(self.parser_class(tools=[needy]), [text]))
        assert message.content == text and not message.tool_calls
        text = '<function name="moon"><param name="day">3</param></function>'
        (call,) = fold(run(self.parser_class(tools=[needy]), [text])).tool_calls
        assert json.loads(call.arguments) == {"day": 3}


def m3(text: str) -> str:
    """Give every tag the family's prefix."""
    return text.replace("<", "]<]minimax[>[<").replace("LT", "<")


class TestMiniMaxM3(BlockKit):
    name = "minimax_m3"
    samples = [
        Sample(
            "Looking. \n"
            + m3('<tool_call>\n<invoke name="ferry"><from><quay>7</quay></from><seats>'
                 "<item>2</item><item>x</item></seats><night>true</night><quay>LTb>\u00e9</quay></invoke>\n"
                 "<invoke name=now></invoke></tool_call>Never shown."),
            content="Looking.",
            calls=[
                ("ferry", {"from": {"quay": "7"}, "seats": ["2", "x"], "night": True,
                           "quay": "<b>\u00e9"}),
                ("now", {}),
            ],
            tools=ALL,
        ),
        Sample(
            m3("<tool_call><invoke name='moon'><day>3</day><day>4</day><a>t<b>1</b></a></invoke>"),
            calls=[("moon", {"day": [3, 4], "a": {"b": "1", "$text": "t"}})],
            tools=ALL,
        ),
        Sample(m3("<tool_call>words</tool_call>"), content=m3("<tool_call>words</tool_call>")),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "schema", "expected"),
    [
        ("<a></a><b></b><c></c>",
         {"a": {"type": "array"}, "b": {"type": "object"}, "c": {"type": "string"}},
         {"a": [], "b": {}, "c": ""}),
        ("<a><x>1</x><x>2</x></a>", {"a": {"type": "array", "items": {"type": "integer"}}},
         {"a": [1, 2]}),
        ("<a><n>1</n></a>", {"a": {"type": "object", "properties": {"n": {"type": "number"}}}},
         {"a": {"n": 1}}),
        ("<a>1</a><b>2</c>", {}, {"a": "1"}),
        ("<a>1</a> words <b>2</b>", {}, {"a": "1"}),
        ("<a>1</a><b>2", {}, {"a": "1"}),
        ("<a><item>1</item></a>", {}, {"a": ["1"]}),
        ("<a>x<$text>1</$text></a>", {}, {"a": {"$text": "1", "$$text": "x"}}),
    ],
)  # fmt: skip
def test_elements_are_objects_and_lists_by_the_schema(
    text: str, schema: Any, expected: dict[str, Any]
) -> None:
    parameters = {"type": "object", "properties": schema}
    assert json.loads(arguments_of(m3(text), "]<]minimax[>[", parameters)) == expected


def test_nesting_that_is_too_deep_ends_the_arguments() -> None:
    deep = "<a>" * (MAX_DEPTH + 1)
    text = m3(f"<b>1</b>{deep}" + deep.replace("<", "</"))
    assert json.loads(arguments_of(text, "]<]minimax[>[", None)) == {"b": "1"}


ATEM = """\
<atem:function_calls>
<atem:invoke name="ferry">
<atem:parameter name="quay"> 7 \u00e9
</atem:parameter>
<atem:parameter name="seats">[2]</atem:parameter>
<atem:parameter name="other">5</atem:parameter>
</atem:invoke>
<atem:invoke name="now.now">
</atem:invoke>
</atem:function_calls>"""


class TestMuse(Kit):
    name = "muse"
    samples = [
        Sample(
            f"Yes.{ATEM}",
            content="Yes.",
            calls=[("ferry", {"quay": " 7 \u00e9\n", "seats": [2], "other": 5}), ("now", {})],
            tools=ALL,
        ),
        Sample("a <atem:", content="a <atem:"),
    ]


class TestMuseGlimmer(Kit):
    name = "muse_glimmer"
    examples = 5
    samples = [
        Sample(
            ATEM.replace(" 7 \u00e9\n", "7"),
            calls=[("ferry", {"quay": 7, "seats": [2], "other": 5}), ("now", {})],
            tools=ALL,
        ),
    ]


class TestMuseSpark(TestMuse):
    name, examples = "musespark1x", 5


class TestInkling(Kit):
    name = "inkling"
    samples = [
        Sample(
            'Yes.<|content_invoke_tool_json|>{"name": "moon", "args": {"day": 3}}<|end_message|>'
            '<|content_invoke_tool_json|>{"name": "now", "args": {}}<|end_message|>',
            content="Yes.",
            calls=[("moon", {"day": 3}), ("now", {})],
            tools=ALL,
        ),
        Sample("words", content="words"),
    ]


class TestBeam(BlockKit):
    name = "beam"
    call = "<|channel|>analysis <|constrain|>xml<|message|>"
    samples = [
        Sample(
            f' to=ferry{call}<rfl:parameter name="quay">\n7 \u00e9\n</rfl:parameter>\n'
            '<rfl:parameter name="seats">\n[2]\n</rfl:parameter><|end|>'
            f"<|start|>assistant to=now{call}<|call|>",
            calls=[("ferry", {"quay": "7 \u00e9", "seats": [2]}), ("now", {})],
            tools=ALL,
        ),
        Sample(
            f'A.<|start|>assistant to=moon{call}<rfl:parameter name="day">\n3\n</rfl:parameter>',
            content="A.", calls=[("moon", {"day": 3})], tools=ALL,
        ),
        Sample(
            f'<|start|>assistant to=moon{call}<rfl:parameter name="day">\n3\n</rfl:parameter>'
            '<rfl:parameter name="ph<|call|>',
            calls=[("moon", '{"day": 3')], tools=ALL,
        ),
        Sample(f" to=nope{call}<|call|>", tools=ALL),
        Sample(" to=x is a word", content=" to=x is a word"),
    ]  # fmt: skip


class TestOpenAI(Kit):
    name = "openai"
    close = "<|call|>"
    samples = [
        Sample(
            "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
            '{"city": "Paris"}<|call|>',
            calls=[("get_weather", PARIS)],
        ),
        Sample("<|channel|>commentary to=browser<|message|>Ignore this<|call|>"),
        Sample(
            '<|channel|>commentary to=browser<|message|>{"q": 1}<|call|>',
            calls=[("browser", {"q": 1})],
            tools=[tool("browser", q="integer")],
        ),
        Sample(
            "<|channel|>commentary to=functions.f<|message|>not JSON<|call|><|start|>assistant"
            "<|channel|>final<|message|>Hello.",
            content="Hello.",
            calls=[("f", "")],
        ),
        Sample(
            "<|channel|>commentary<|message|>I check.<|end|><|start|>assistant<|channel|>final"
            "<|message|>It is 4.<|return|>",
            content="I check.\nIt is 4.",
        ),
        Sample(
            "<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>"
            '{"city": "Paris"}',
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            "<|channel|>commentary<|message|>I check.<|end|><|start|>assistant<|channel|>commentary"
            f" to=functions.say <|constrain|>json<|message|>{TRICKY_JSON}<|call|>"
            "<|start|>assistant to=functions.search<|channel|>commentary json<|message|>"
            f"{NESTED_JSON}<|call|>",
            content="I check.",
            calls=[("say", TRICKY), ("search", NESTED)],
        ),
        Sample(
            '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": "b',
            calls=[("f", '{"a": "b')],
        ),
        Sample("Plain text, from the reasoning parser.", "Plain text, from the reasoning parser."),
        Sample("<|channel|>final<|message|>Hello.", content="Hello."),
        Sample(
            "<|channel|>commentary to=functions.now <|constrain|>json<|message|><|call|>",
            calls=[("now", {})],
        ),
    ]
