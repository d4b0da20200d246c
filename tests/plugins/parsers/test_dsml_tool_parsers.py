"""Tool parsers of families that write calls in DeepSeek's markup pass the kit."""

from __future__ import annotations

import re
from typing import Any

from tool_kit import ALL, Kit

from jackfield.plugins.conformance.parsers import Sample

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
