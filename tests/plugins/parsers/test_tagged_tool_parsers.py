"""Tool parsers of families that write a call's arguments in tags of their own pass the kit."""

from __future__ import annotations

import re

from tool_kit import ALL, PARIS, WEATHER, Kit

from jackfield.plugins.conformance.parsers import Sample, tool


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


QWEN_TOOLS = [
    tool(
        "write",
        path="string",
        content="string",
        lines={"type": "array"},
        options={"anyOf": [{"type": "object"}, {"type": "null"}]},
        count="integer",
        ratio="number",
        force="boolean",
        either={"type": ["integer", "string"]},
        mode={"$ref": "#/$defs/Mode"},
        scale={"type": "float"},
    )
]


QWEN_TOOLS[0]["function"]["parameters"]["$defs"] = {"Mode": {"enum": [1, 2]}}


class TestQwen3Coder(Kit):
    name = "qwen3_coder"
    samples = [
        Sample(
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n</parameter>\n"
            "</function>\n</tool_call>",
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            "I write it.\n<tool_call>\n<function=write>\n<parameter=path>\na.py\n</parameter>\n"
            '<parameter=content>\ndef f():\n    return {"a": "<b>"}\n\n</parameter>\n'
            '<parameter=lines>\n[1, "x", null]\n</parameter>\n'
            "<parameter=options>\n{'k': True}\n</parameter>\n"
            "<parameter=count>\n3\n</parameter>\n<parameter=ratio>\n-0.5\n</parameter>\n"
            "<parameter=force>\nTrue\n</parameter>\n<parameter=either>\n7\n</parameter>\n"
            "<parameter=mode>\n2\n</parameter>\n<parameter=scale>\n2.5\n</parameter>\n<parameter=unknown>\n12\n</parameter>\n"
            "</function>\n</tool_call>\n<tool_call>\n<function=write>\n"
            "<parameter=options>\nnull\n</parameter>\n<parameter=count>\nmany\n</parameter>\n"
            "<parameter=either>\nseven\n</parameter>\n</function>\n</tool_call>"
            "<tool_call>\n<function=write>\n<parameter=content>\nnull\n</parameter>\n"
            "<parameter=count>\nnull\n</parameter>\n<parameter=either>\nnull\n</parameter>\n"
            "</function>\n</tool_call>",
            content="I write it.",
            tools=QWEN_TOOLS,
            calls=[
                (
                    "write",
                    {
                        "path": "a.py",
                        "content": 'def f():\n    return {"a": "<b>"}\n',
                        "lines": [1, "x", None],
                        "options": {"k": True},
                        "count": 3,
                        "ratio": -0.5,
                        "force": True,
                        "either": 7,
                        "mode": 2,
                        "scale": 2.5,
                        "unknown": "12",
                    },
                ),
                ("write", {"options": None, "count": "many", "either": "seven"}),
                ("write", {"content": "null", "count": None, "either": "null"}),
            ],
        ),
        Sample(
            "<function=now>\n</function>\n</tool_call>",
            calls=[("now", {})],
        ),
        Sample(
            "<tool_call>\n<function=write>\n<parameter=path>\na.py\n<parameter=count>\n3\n"
            "</function>\n</tool_call>",
            tools=QWEN_TOOLS,
            calls=[("write", {"path": "a.py", "count": 3})],
        ),
        Sample(
            "<tool_call>\n<function=f>\n<parameter=a>\nx\n</parameter>\n"
            f"{'This is no argument. ' * 9}</tool_call>\n<tool_call>\n<function=g>\n</function>\n"
            "</tool_call>",
            calls=[("f", {"a": "x"}), ("g", {})],
        ),
        Sample(
            "<tool_call>\n<function=write>\n<parameter=content>\nprint('h",
            tools=QWEN_TOOLS,
            calls=[("write", '{"content": "print(\'h')],
        ),
        Sample("if a <function b", content="if a <function b"),
    ]


class TestQwen3Xml(TestQwen3Coder):
    name = "qwen3_xml"
    examples = 5


class TestSeedOss(Kit):
    name = "seed_oss"
    samples = [
        Sample(
            "<seed:think>I may write <seed:tool_call>\n<function=no>\n</function>\n"
            "</seed:tool_call>.</seed:think>Well.<seed:tool_call>\n<function=now>\n</function>\n"
            "</seed:tool_call>",
            content="<seed:think>I may write <seed:tool_call>\n<function=no>\n</function>\n"
            "</seed:tool_call>.</seed:think>Well.",
            calls=[("now", {})],
        ),
        Sample(
            "<seed:tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n"
            "<parameter=days>2</parameter>\n</function>\n</seed:tool_call>",
            tools=[WEATHER],
            calls=[("get_weather", {"city": "Paris", "days": 2})],
        ),
    ]


class TestGlm45(Kit):
    name = "glm45"
    samples = [
        Sample(
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n"
            "<arg_key>days</arg_key>\n<arg_value>2</arg_value>\n</tool_call>",
            tools=[WEATHER],
            calls=[("get_weather", {"city": "Paris", "days": 2})],
        ),
        Sample(
            "\nI look.\n<tool_call>search\n<arg_key>filter</arg_key>\n"
            '<arg_value>{"and": [1, "}"]}</arg_value>\n<arg_key>text</arg_key>\n'
            '<arg_value>a "b" \\ c\n</arg_value>\n</tool_call>\n<tool_call>now\n</tool_call>',
            content="\nI look.",
            calls=[
                ("search", {"filter": {"and": [1, "}"]}, "text": 'a "b" \\ c\n'}),
                ("now", {}),
            ],
        ),
        Sample(
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>12345</arg_value></tool_call>",
            tools=[WEATHER],
            calls=[("get_weather", {"city": "12345"})],
        ),
        Sample(
            "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x</arg_value>\n<arg_key>b\n"
            "<arg_value>y</arg_value>\n</tool_call>Done.",
            content="Done.",
            calls=[("f", {"a": "x", "b": "y"})],
        ),
        Sample(
            "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>x\n<arg_key>b</arg_key>\n"
            "<arg_value>y\n</tool_call>\n<tool_call>f\n<arg_key>a\n</tool_call>",
            calls=[("f", {"a": "x", "b": "y"}), ("f", {})],
        ),
        Sample(
            "<tool_call>get_weather\n<arg_key>city</arg_key>\n<arg_value>Par",
            tools=[WEATHER],
            calls=[("get_weather", '{"city": "Par')],
        ),
    ]


class TestGlm47(TestGlm45):
    name = "glm47"
    samples = [
        *TestGlm45.samples,
        Sample(
            "Well.<tool_call>get_weather<arg_key>city</arg_key><arg_value>Rome</arg_value>"
            "</tool_call><tool_call>now</tool_call>",
            tools=[WEATHER],
            content="Well.",
            calls=[("get_weather", {"city": "Rome"}), ("now", {})],
        ),
    ]


class TestLing3(TestGlm47):
    name = "ling3"
    examples = 5


class TestMiMo(Kit):
    name = "mimo"
    samples = [
        Sample(
            "<tool_call><function=log><parameter=text>  two\nlines\n</parameter>"
            "<parameter=n>3</parameter></function></tool_call>Done.",
            tools=[tool("log", text="string", n="integer")],
            content="Done.",
            calls=[("log", {"text": "  two\nlines\n", "n": 3})],
        ),
    ]


class TestStep3p5(TestQwen3Coder):
    name = "step3p5"
    examples = 5


class TestStep5(TestQwen3Coder):
    name = "step5"
    examples = 5


class TestMiniMaxM2(Kit):
    name = "minimax_m2"
    samples = [
        Sample(
            '<minimax:tool_call>\n<invoke name="get_weather">\n'
            '<parameter name="city">Paris</parameter>\n<parameter name="hourly">true</parameter>\n'
            "</invoke>\n</minimax:tool_call>",
            tools=[WEATHER],
            calls=[("get_weather", {"city": "Paris", "hourly": True})],
        ),
        Sample(
            'Both.\n<minimax:tool_call>\n<invoke name="search">\n'
            '<parameter name="tags">["a", "b"]</parameter>\n</invoke>\n'
            '<invoke name="now">\n</invoke>\n</minimax:tool_call>',
            content="Both.",
            tools=[tool("search", tags="array"), tool("now")],
            calls=[("search", {"tags": ["a", "b"]}), ("now", {})],
        ),
        Sample(
            '<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Pa',
            calls=[("get_weather", '{"city": "Pa')],
        ),
    ]


class TestStep3(Kit):
    name = "step3"
    samples = [
        Sample(
            "<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>"
            '<steptml:invoke name="get_weather"><steptml:parameter name="city">Paris'
            '</steptml:parameter><steptml:parameter name="days">2</steptml:parameter>'
            "</steptml:invoke><｜tool_call_end｜><｜tool_calls_end｜>",
            tools=[WEATHER],
            calls=[("get_weather", {"city": "Paris", "days": 2})],
        ),
        Sample(
            "Both.\n<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜>edit\n"
            '<steptml:invoke name="edit"><steptml:parameter name="old">    if x:\n'
            "</steptml:parameter></steptml:invoke><｜tool_call_end｜><｜tool_sep｜>"
            '<｜tool_call_begin｜><steptml:invoke name="now"></steptml:invoke>'
            "<｜tool_call_end｜><｜tool_calls_end｜>",
            content="Both.",
            calls=[("edit", {"old": "    if x:\n"}), ("now", {})],
        ),
    ]
