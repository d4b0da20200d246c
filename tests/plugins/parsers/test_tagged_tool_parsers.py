"""Tool parsers of newer families with tags for arguments pass the kit."""

from __future__ import annotations

import re
from typing import Any

from tool_kit import Kit

from jackfield.plugins.conformance.parsers import Sample, tool

FERRY = tool("ferry", quay="string", seats={"type": "array"}, night="boolean")
MOON = tool("moon", day="integer", phase={"type": ["string", "null"]})
ALL = [FERRY, MOON, tool("now")]
"""Tools of the samples below."""

DSML = """\
Looking.

<tool_calls>
<invoke name="ferry">
<parameter name="quay" string="true">007 \u00e9\u4e2d\U0001f600
"\\" <b></parameter>
<parameter name="seats" string="false">[2, 3]</parameter>
<parameter name="night" string="false">true</parameter>
<parameter name="other" string="true">7</parameter>
<parameter name="more" string="false">{"a": [null]}</parameter>
<parameter name="odd" string="false">a "b</parameter>
<parameter name="bare">8</parameter>
</invoke>
<invoke name="moon">
<parameter name="day" string="true">3</parameter>
</invoke>
<invoke name="now">
</invoke>
</tool_calls>"""
DSML_CALLS: list[tuple[str, Any]] = [
    (
        "ferry",
        {
            "quay": '007 \u00e9\u4e2d\U0001f600\n"\\" <b>',
            "seats": [2, 3],
            "night": True,
            "other": "7",
            "more": {"a": [None]},
            "odd": 'a "b',
            "bare": 8,
        },
    ),
    ("moon", {"day": 3}),
    ("now", {}),
]


class TestDeepSeekV4(Kit):
    name = "deepseek_v4"
    mark, calls = "｜DSML｜", "tool_calls"
    examples = 25

    @classmethod
    def spelled(cls, text: str) -> str:
        """The text in the family's own spelling."""
        text = text.replace("tool_calls>", f"{cls.calls}>")
        return re.sub(
            r"(</?)(?=invoke|parameter|\W?tool|\W?calls|function_)", rf"\1{cls.mark}", text
        )

    @classmethod
    def make_samples(cls) -> list[Sample]:
        text = cls.spelled(DSML)
        opened = text[: text.index("</")].replace("Looking.\n\n", "")
        wrapped = '<tool_calls>\n<invoke name="moon">\n<parameter name="{}" string="{}">{}'
        end = "</parameter>\n</invoke>\n</tool_calls>"
        spelled = cls.spelled
        return [
            Sample(text, content="Looking.", calls=DSML_CALLS, tools=ALL),
            Sample(f"{text}Never shown.", content="Looking.", calls=DSML_CALLS, tools=ALL),
            Sample(
                opened,
                calls=[("ferry", '{"quay": "007 \u00e9\u4e2d\U0001f600\\n\\"\\\\\\" <b>')],
                tools=ALL,
            ),
            Sample(
                spelled(wrapped.format("arguments", "false", '{"day": 3}') + end),
                calls=[("moon", {"day": 3})],
                tools=ALL,
            ),
            Sample(
                spelled(wrapped.format("input", "true", '{"day": 3, "phase": null}') + end),
                calls=[("moon", {"day": 3, "phase": None})],
                tools=ALL,
            ),
            Sample(
                spelled(wrapped.format("arguments", "false", '{"nights": 3}') + end),
                calls=[("moon", {"arguments": {"nights": 3}})],
                tools=ALL,
            ),
            Sample(
                spelled(wrapped.format("arguments", "true", '{"day": 3')),
                calls=[("moon", '{"arguments": "{\\"day\\": 3')],
                tools=ALL,
            ),
            Sample(
                spelled(
                    '<invoke name="moon"><parameter name="day" string="false">3'
                    '<parameter name="phase" string="true">new</invoke>'
                ),
                calls=[("moon", {"day": 3, "phase": "new"})],
                tools=ALL,
            ),
            Sample(spelled("a <b <tool_ <"), content=spelled("a <b <tool_ <")),
            Sample(
                spelled(wrapped.format("day", "false", "3\n") + "</tool_calls>Never shown."),
                calls=[("moon", {"day": 3})],
                tools=ALL,
            ),
        ]


TestDeepSeekV4.samples = TestDeepSeekV4.make_samples()


TestDeepSeekV4.samples += [
    Sample(
        'A.<｜DSML｜tool>\n<｜DSML｜invoke name="now">\n</｜DSML｜invoke>\n</｜DSML｜tool>'
        "Never shown.",
        content="A.",
        calls=[("now", {})],
    ),
]


class TestDeepSeekV32(TestDeepSeekV4):
    name, calls, examples = "deepseek_v32", "function_calls", 5


class TestDeepSeekV41(TestDeepSeekV4):
    name, mark, calls, examples = "deepseek_v41", "｜DSML｜ ", "calls", 5


class TestGigaChat35(TestDeepSeekV4):
    name, mark, examples = "gigachat35", "｜GCML｜", 5


for kit in (TestDeepSeekV32, TestDeepSeekV41, TestGigaChat35):
    kit.samples = kit.make_samples()[:4]


class TestPoolsideV1(Kit):
    name = "poolside_v1"
    examples = 25
    samples = [
        Sample(
            "<tool_call>ferry\n<arg_key>quay</arg_key>\n<arg_value>12</arg_value>\n"
            "<arg_key>quay</arg_key><arg_value>9</arg_value>"
            "<arg_key>night</arg_key><arg_value>True</arg_value></tool_call>",
            tools=ALL,
            calls=[("ferry", {"quay": "12", "night": True})],
        ),
        Sample(
            "Two.<tool_call>now</tool_call>\n<tool_call>moon<arg_key>day</arg_key>\n"
            "<arg_value>3</arg_value></tool_call>",
            tools=ALL,
            content="Two.",
            calls=[("now", {}), ("moon", {"day": 3})],
        ),
    ]


class TestIQuestQ1(Kit):
    name = "iquest_q1"
    examples = 25
    samples = [
        Sample(
            'Two.<iquest_tool_call>ferry\n<arg_key>quay</arg_key><arg_value>  "12" <tool_call>\n'
            "</arg_value><arg_key>seats</arg_key> <arg_value>[2, 3]</arg_value>\n"
            "<arg_key>night</arg_key><arg_value>true</arg_value></iquest_tool_call>and"
            "<iquest_tool_call>now</iquest_tool_call>.",
            tools=ALL,
            content="Two.and.",
            calls=[
                ("ferry", {"quay": '  "12" <tool_call>\n', "seats": [2, 3], "night": True}),
                ("now", {}),
            ],
        ),
        Sample(
            "<iquest_tool_call>moon<arg_key>day</arg_key><arg_value>3</arg_value>"
            "<arg_key>more</arg_key><arg_value>\u00e9\U0001f600",
            tools=ALL,
            calls=[("moon", '{"day": 3, "more": ')],
        ),
        Sample("<tool_call>now</tool_call>", content="<tool_call>now</tool_call>", tools=ALL),
    ]


HY3 = (
    "Well.<tool_calls>\n<tool_call>ferry<tool_sep>\n<arg_key>quay</arg_key>\n<arg_value> 7 "
    "\u00e9\U0001f600\n</arg_value>\n<arg_key>seats</arg_key>\n<arg_value>[2]</arg_value>\n"
    "</tool_call>\n<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>rest"
)
HY_CALLS = [("ferry", {"quay": " 7 \u00e9\U0001f600\n", "seats": [2]}), ("now", {})]


def suffixed(text: str, suffix: str) -> str:
    return re.sub(r"(</?\w+)>", rf"\1{suffix}>", text)


class TestHyV3(Kit):
    name = "hy_v3"
    examples = 40
    markers = ("<tool_calls>", "<tool_call>", "</tool_call>", "<arg_key>", "<tool_calls:")
    samples = [
        Sample(HY3.removeprefix("Well."), calls=HY_CALLS, tools=ALL),
        Sample(suffixed(HY3, ":opensource"), content="Well.", calls=HY_CALLS, tools=ALL),
        Sample(
            "<tool_calls>\n<tool_call>ferry<tool_sep>\n<arg_key>quay</arg_key>\n<arg_value>nor",
            calls=[("ferry", '{"quay": "nor')],
            tools=ALL,
        ),
        Sample("<tool_call>now</tool_call>", content="<tool_call>now</tool_call>"),
        Sample("<tool_calls a>", content="<tool_calls a>"),
    ]


class TestHyV4(Kit):
    name = "hy_v4"
    examples = 5
    samples = [
        Sample(
            "<tool_calls:9f2c><tool_call:9f2c>log<arg_key:9f2c>text</arg_key:9f2c>"
            "<arg_value:9f2c>see <tool_call></arg_value:9f2c></tool_call:9f2c></tool_calls:9f2c>",
            calls=[("log", {"text": "see <tool_call>"})],
        ),
    ]


def k3_call(name: str, *arguments: tuple[str, str, str]) -> str:
    elements = (
        f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
        for key, kind, value in arguments
    )
    body = "".join(elements)
    return f'<|open|>call tool="{name}" index="1"<|sep|>{body}<|close|>call<|sep|>'


class TestKimiK3(Kit):
    name = "kimi_k3"
    examples = 40
    samples = [
        Sample(
            "<|open|>tools<|sep|>"
            + k3_call(
                "ferry", ("quay", "string", "007 \u00e9\n\U0001f600"), ("row", "number", "-1.5")
            )
            + k3_call("moon", ("day", "string", "3"), ("a&quot;b", "array", "[null]"))
            + k3_call("now")
            + "<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>",
            calls=[
                ("ferry", {"quay": "007 \u00e9\n\U0001f600", "row": -1.5}),
                ("moon", {"day": "3", 'a"b': [None]}),
                ("now", {}),
            ],
            tools=ALL,
        ),
        Sample(
            "Hi<|close|>response<|sep|><|open|>tools<|sep|>"
            + k3_call("ferry", ("seats", "array", "[1, x"))
            + '<|open|>call tool="moon" index="2"<|sep|><|open|>json type="object"<|sep|>{"day": 3}'
            "<|close|>json<|sep|><|close|>call<|sep|><|close|>tools<|sep|>",
            content="Hi",
            calls=[("ferry", {"seats": "[1, x"}), ("moon", {"day": 3})],
        ),
        Sample(
            '<|open|>call tool="f" index="1"<|sep|><|open|>json type="object"<|sep|>{"a": "b',
            calls=[("f", '{"a": "b')],
        ),
        Sample(
            k3_call("f", ("a", "string", "b")).split("<|close|>")[0],
            calls=[("f", '{"a": "b')],
        ),
        Sample("<|open|>call f<|sep|>", content="<|open|>call f<|sep|>"),
    ]
