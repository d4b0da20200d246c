"""Every tool parser in the box passes the kit, with outputs as its model family writes them."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
from tool_kit import (
    NESTED,
    NESTED_JSON,
    PARIS,
    PARIS_JSON,
    TRICKY,
    TRICKY_JSON,
    WEATHER,
    Kit,
)

from jackfield.core.registry import load_plugins
from jackfield.plugins.conformance.parsers import Sample, tool


class TestHermes(Kit):
    name = "hermes"
    close = "</tool_call>"
    markers = ("<tool_call>", "</tool_call>")
    samples = [
        Sample(
            '<tool_call>{"name": "f", "arguments": {"a": "b</tool_call>\n'
            '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
            calls=[("f", '{"a": "b'), ("g", {})],
        ),
        Sample(
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": [1]}"}</tool_call>',
            calls=[("f", {"a": [1]})],
        ),
        Sample(
            '<tool_call>{"arguments": "{\\"a\\": \\"\\ud83d\\ude00',
            content='<tool_call>{"arguments": "{\\"a\\": \\"\\ud83d\\ude00',
        ),
        Sample(
            '<tool_call>{"name": "f", "arguments": "{\\"a\\": \\"b',
            calls=[("f", '{"a": "b')],
        ),
        Sample(
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>',
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            "I will look that up.\n"
            f'<tool_call>\n{{"name": "say", "arguments": {TRICKY_JSON}}}\n</tool_call>\n'
            f'<tool_call>\n{{"arguments": {NESTED_JSON}, "name": "search"}}\n</tool_call>\nDone.',
            content="I will look that up.\n\n\nDone.",
            calls=[("say", TRICKY), ("search", NESTED)],
        ),
        Sample(
            '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Par',
            calls=[("get_weather", '{"city": "Par')],
        ),
        Sample(
            '<tool_call>{"name": "now", "arguments": {}}</tool_call>\n\nDone.\n',
            content="Done.",
            calls=[("now", {})],
        ),
        Sample(
            '<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>',
            content='<tool_call>{"name": "f", "name": "g", "arguments": {}}</tool_call>',
        ),
        Sample("Use `<tool_call>` to call.", content="Use `<tool_call>` to call."),
        Sample("a < b and {x}", content="a < b and {x}"),
    ]


class TestQwen3Json(TestHermes):
    name = "qwen3_json"
    examples = 5


class TestGranite4(Kit):
    name = "granite4"
    examples = 5
    samples = [
        Sample(
            'Right.<tool_call>{"name": "moon", "arguments": "{\\"day\\": 3}"}</tool_call>\n'
            '<tool_call>{"name": "now", "arguments": {}}</tool_call>Done.',
            content="Right.\nDone.",
            calls=[("moon", {"day": 3}), ("now", {})],
        ),
    ]


class TestTrinity(Kit):
    name = "trinity"
    close = "</tool_call>"
    markers = ("<think>", "</think>")
    examples = 25
    samples = [
        Sample(
            '<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>',
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            f'<think>Two: <tool_call>\n{{"name": "say", "arguments": {TRICKY_JSON}}}\n</tool_call>'
            '</think><tool_call>{"name": "now", "arguments": {}}</tool_call>',
            content="Two:",
            calls=[("say", TRICKY), ("now", {})],
        ),
    ]


class TestErnie45(Kit):
    """Hermes' marks on lines."""

    name = "ernie45"
    examples = 5
    samples = [
        Sample(
            '\n<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>\n',
            calls=[("get_weather", PARIS), ("now", {})],
        ),
    ]


class TestLongCat(Kit):
    name = "longcat"
    close = "</longcat_tool_call>"
    samples = [
        Sample(
            '<longcat_tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
            "</longcat_tool_call>",
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            "A.<longcat_tool_call>get_weather\n<longcat_arg_key>city</longcat_arg_key>\n"
            "<longcat_arg_value>Paris {</longcat_arg_value>\n<longcat_arg_key>days"
            "</longcat_arg_key><longcat_arg_value>3</longcat_arg_value>\n</longcat_tool_call>\n"
            '<longcat_tool_call>now</longcat_tool_call><longcat_tool_call>{"name": "g"}'
            "</longcat_tool_call>B.",
            content="A.\nB.",
            calls=[("get_weather", {"city": "Paris {", "days": 3}), ("now", {}), ("g", {})],
            tools=[WEATHER, tool("now")],
        ),
    ]


class TestLlama3Json(Kit):
    name = "llama3_json"
    samples = [
        Sample(
            '{"name": "get_weather", "parameters": {"city": "Paris"}}',
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            f'<|python_tag|>{{"name": "say", "parameters": {TRICKY_JSON}}}; '
            f'{{"name": "search", "parameters": {NESTED_JSON}}}',
            calls=[("say", TRICKY), ("search", NESTED)],
        ),
        Sample(
            '{"type": "function", "name": "get_weather", "parameters": {"city": "Paris"}}',
            calls=[("get_weather", PARIS)],
        ),
        Sample('{"answer": 42}', content='{"answer": 42}'),
        Sample(
            '{"name": "Ada", "parameters": {"of": "a person"}}',
            content='{"name": "Ada", "parameters": {"of": "a person"}}',
            tools=[WEATHER],
        ),
        Sample(
            '{"name": "get_weather", "parameters": {"city": "Pa',
            calls=[("get_weather", '{"city": "Pa')],
        ),
        Sample("The set {1, 2}.", content="The set {1, 2}."),
        Sample(
            'I look: {"name": "get_weather", "parameters": {"city": "Paris"}}\n'
            '{"name": "now", "parameters": {}} for {"city": "Paris"}',
            content='I look:  for {"city": "Paris"}',
            calls=[("get_weather", PARIS), ("now", {})],
        ),
        Sample('{"name": "f", "parameters": "x"}', content='{"name": "f", "parameters": "x"}'),
    ]


class TestLlama4Json(TestLlama3Json):
    name = "llama4_json"
    examples = 5


class TestLlama4Pythonic(Kit):
    name = "llama4_pythonic"
    samples = [
        Sample(
            "<|python_start|>[get_weather(city=Paris)]<|python_end|>Done.",
            content="Done.",
            calls=[("get_weather", '{"city": ')],
        ),
        Sample(
            "[get_weather(city='Paris', days=2, hourly=False), now()]",
            calls=[("get_weather", {"city": "Paris", "days": 2, "hourly": False}), ("now", {})],
        ),
        Sample(
            '<|python_start|>[get_weather(city="Paris")]<|python_end|>',
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            'Let me see.\n<|python_start|>[get_weather(city="Paris")]<|python_end|>',
            content="Let me see.",
            calls=[("get_weather", PARIS)],
        ),
    ]


class TestPythonic(Kit):
    name = "pythonic"
    samples = [
        Sample(
            "[get_weather(city='San Francisco', metric=\"celsius\"), "
            "get_time(zone='Europe/Paris')]",
            calls=[
                ("get_weather", {"city": "San Francisco", "metric": "celsius"}),
                ("get_time", {"zone": "Europe/Paris"}),
            ],
        ),
        Sample(
            "[say(text='it\\'s a \"}\" and ] \\u00e9\\n\\x41\\101 \\q', where=('a', 1.5, None,),"
            " how={'k': [True, {}], 2: -3e2}, n=1_000, f=.5, s='''two\nlines''', e='', l=[])]",
            calls=[
                (
                    "say",
                    {
                        "text": 'it\'s a "}" and ] é\nAA \\q',
                        "where": ["a", 1.5, None],
                        "how": {"k": [True, {}], "2": -300.0},
                        "n": 1000,
                        "f": 0.5,
                        "s": "two\nlines",
                        "e": "",
                        "l": [],
                    },
                )
            ],
        ),
        Sample("[get_weather(city='Par", calls=[("get_weather", '{"city": "Par')]),
        Sample("[f(a=[1})]", content="})]", calls=[("f", '{"a": [1')]),
        Sample("[1] is a reference.", content="[1] is a reference."),
        Sample("[f(x)] is applied.", content="[f(x)] is applied."),
        Sample(
            "[note(text='x')] is no tool.", content="[note(text='x')] is no tool.", tools=[WEATHER]
        ),
        Sample(
            "[get_weather(city=Paris)]", content="Paris)]", calls=[("get_weather", '{"city": ')]
        ),
        Sample("No tool is needed.", content="No tool is needed."),
    ]


class TestOlmo3(Kit):
    name = "olmo3"
    samples = [
        Sample(
            '<function_calls>\nget_weather(city="Paris", hourly=true)\n'
            "search(filter=None)\n</function_calls>",
            calls=[
                ("get_weather", {"city": "Paris", "hourly": True}),
                ("search", {"filter": None}),
            ],
        ),
        Sample(
            'I look.<function_calls>get_weather(city="Paris")</function_calls>',
            content="I look.",
            calls=[("get_weather", PARIS)],
        ),
        Sample('<function_calls>\nf(a="x', calls=[("f", '{"a": "x')]),
    ]


class TestMistral(Kit):
    name = "mistral"
    samples = [
        Sample(
            '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]',
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            f'[TOOL_CALLS] [{{"name": "say", "arguments": {TRICKY_JSON}}}, '
            f'{{"arguments": {NESTED_JSON}, "name": "search"}}]',
            calls=[("say", TRICKY), ("search", NESTED)],
        ),
        Sample(
            f"One moment.[TOOL_CALLS]say[ARGS]{TRICKY_JSON}[TOOL_CALLS]search{NESTED_JSON}",
            content="One moment.",
            calls=[("say", TRICKY), ("search", NESTED)],
        ),
        Sample(
            r'[TOOL_CALLS][{"name": "f", "arguments": "{\"a\": \"x\\ny\"}"}, '
            '{"name": "g", "arguments": {}}]',
            calls=[("f", {"a": "x\ny"}), ("g", {})],
        ),
        Sample(
            '[TOOL_CALLS] [TOOL_CALLS] [{"name": "f", "arguments": {"a": 1}}]',
            calls=[("f", {"a": 1})],
        ),
        Sample("[TOOL_CALLS]toolname_no_args", calls=[("toolname_no_args", {})]),
        Sample(
            '[TOOL_CALLS]now[TOOL_CALLS]get_weather[ARGS]{"city": "Paris"}',
            calls=[("now", {}), ("get_weather", PARIS)],
        ),
        Sample("[TOOL_CALLS]get_wea", content="[TOOL_CALLS]get_wea", tools=[WEATHER]),
        Sample('[TOOL_CALLS][{"name": "f", "arguments": {"a": 1]', calls=[("f", '{"a": 1')]),
        Sample(
            '[TOOL_CALLS]f[ARGS]{"a": "b[TOOL_CALLS]g[ARGS]{}',
            calls=[("f", '{"a": "b'), ("g", {})],
        ),
        Sample("[TOOL_CALLS]f[ARGS]none", calls=[("f", "")]),
        Sample(
            '[TOOL_CALLS]get_weather[CALL_ID]abcDEF123[ARGS]{"city": "Paris"}',
            calls=[("get_weather", PARIS)],
            ids=["abcDEF123"],
        ),
        Sample('[TOOL_CALLS]get_weather[ARGS]{"city', calls=[("get_weather", '{"city')]),
        Sample("Nothing [to call].", content="Nothing [to call]."),
    ]

    def test_its_own_ids_have_nine_letters(self) -> None:
        id = self.parser_class.new_id()
        assert len(id) == 9 and id.isalnum() and id != self.parser_class.new_id()


class TestDeepSeekV3(Kit):
    name = "deepseek_v3"
    close = "\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    samples = [
        Sample(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
            "```json\n"
            f"{PARIS_JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            "I check.\n"
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>say\n"
            f"```json\n{TRICKY_JSON}\n```<｜tool▁call▁end｜>\n"
            "<｜tool▁call▁begin｜>function<｜tool▁sep｜>search\n"
            f"```json\n{NESTED_JSON}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            content="I check.",
            calls=[("say", TRICKY), ("search", NESTED)],
        ),
        Sample(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n"
            '```json\n{"city": "P',
            calls=[("get_weather", '{"city": "P')],
        ),
    ]


class TestDeepSeekV31(Kit):
    name = "deepseek_v31"
    close = "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"
    samples = [
        Sample(
            "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>"
            f"{PARIS_JSON}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            "I check.<｜tool▁calls▁begin｜>"
            f"<｜tool▁call▁begin｜>say<｜tool▁sep｜>{TRICKY_JSON}<｜tool▁call▁end｜>"
            f"<｜tool▁call▁begin｜>search<｜tool▁sep｜>{NESTED_JSON}<｜tool▁call▁end｜>"
            "<｜tool▁calls▁end｜>",
            content="I check.",
            calls=[("say", TRICKY), ("search", NESTED)],
        ),
        Sample(
            '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": [1, ',
            calls=[("f", '{"a": [1, ')],
        ),
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


class TestXlam(Kit):
    name = "xlam"
    samples = [
        Sample(
            '[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            f'<think>Two.</think>[{{"name": "say", "arguments": {TRICKY_JSON}}}, '
            f'{{"name": "search", "arguments": {NESTED_JSON}}}]',
            content="<think>Two.</think>",
            calls=[("say", TRICKY), ("search", NESTED)],
        ),
        Sample(
            'Here:\n```json\n[{"name": "get_weather", "arguments": {"city": "Paris"}}]\n```',
            content="Here:",
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            '[TOOL_CALLS][{"name": "get_weather", "arguments": {"city": "Paris"}}]',
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            '<tool_call>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_call>',
            calls=[("get_weather", PARIS)],
        ),
        Sample("```json\n[1, 2]\n```", content="```json\n[1, 2]\n```"),
        Sample('[{"name": "f", "arguments": {"a": "b', calls=[("f", '{"a": "b')]),
    ]


class TestMiniMax(Kit):
    name = "minimax"
    close = "</tool_calls>"
    markers = ("<tool_calls>", "</tool_calls>")
    samples = [
        Sample(
            '<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n'
            f'{{"name": "search", "arguments": {NESTED_JSON}}}\n</tool_calls>',
            calls=[("get_weather", PARIS), ("search", NESTED)],
        ),
        Sample(
            '<think>Maybe <tool_calls>\n{"name": "no", "arguments": {}}\n</tool_calls></think>'
            'Yes.\n<tool_calls>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n',
            content='<think>Maybe <tool_calls>\n{"name": "no", "arguments": {}}\n</tool_calls>'
            "</think>Yes.",
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            '<tool_calls>\n{"name": "a", "arguments": {}}\n{"name": 5}\n'
            '{"name": "b", "arguments": {}}\n</tool_calls>',
            content='{"name": 5}',
            calls=[("a", {}), ("b", {})],
        ),
        Sample('<tool_calls>\n{"name": "a", "arguments": {"x"', calls=[("a", '{"x"')]),
    ]


class TestGranite(Kit):
    name = "granite"
    samples = [
        Sample(
            '<|tool_call|>[{"name": "get_weather", "arguments": {"city": "Paris"}}]',
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            f'<tool_call>[{{"name": "say", "arguments": {TRICKY_JSON}}}, '
            f'{{"name": "search", "arguments": {NESTED_JSON}}}]',
            calls=[("say", TRICKY), ("search", NESTED)],
        ),
        Sample('[{"name": "get_weather", "arguments": {"ci', calls=[("get_weather", '{"ci')]),
        Sample("[Note] no call.", content="[Note] no call."),
    ]


class TestGranite20bFc(Kit):
    name = "granite-20b-fc"
    samples = [
        Sample(
            '<function_call> {"name": "get_weather", "arguments": {"city": "Paris"}} '
            f'<function_call> {{"name": "search", "arguments": {NESTED_JSON}}}',
            calls=[("get_weather", PARIS), ("search", NESTED)],
        ),
    ]


class TestInternLm(Kit):
    name = "internlm"
    close = "<|action_end|>"
    samples = [
        Sample(
            '<|action_start|><|plugin|>{"name": "get_weather", '
            '"parameters": {"city": "Paris"}}<|action_end|>',
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            'I look.<|action_start|><|plugin|>\n{"name": "get_weather", '
            '"parameters": {"city": "Paris"}}<|action_end|>\n',
            content="I look.",
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            f'<|action_start|> <|plugin|>{{"name": "say", "parameters": {TRICKY_JSON}}}',
            calls=[("say", TRICKY)],
        ),
        Sample(
            '<|action_start|><|plugin|>{"name": "f", "parameters": {"a": t',
            calls=[("f", '{"a": t')],
        ),
    ]


class TestNemotronJson(Kit):
    name = "nemotron_json"
    close = "</TOOLCALL>"
    samples = [
        Sample(
            '<TOOLCALL>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</TOOLCALL>',
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            f'Sure.\n\n<TOOLCALL>[{{"name": "say", "arguments": {TRICKY_JSON}}}, '
            '{"name": "now", "arguments": {}}]</TOOLCALL>\n',
            content="Sure.",
            calls=[("say", TRICKY), ("now", {})],
        ),
    ]


class TestJamba(Kit):
    name = "jamba"
    close = "</tool_calls>"
    samples = [
        Sample(
            '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_calls>',
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            ' <tool_calls>[\n    {"name": "get_weather", "arguments": {"city": "Paris"}},\n'
            f'    {{"name": "search", "arguments": {NESTED_JSON}}}\n]</tool_calls>',
            calls=[("get_weather", PARIS), ("search", NESTED)],
        ),
        Sample(
            f'Sure. <tool_calls>[{{"name": "say", "arguments": {TRICKY_JSON}}}]</tool_calls>',
            content="Sure.",
            calls=[("say", TRICKY)],
        ),
        Sample('<tool_calls>[{"name": "f", "arguments": {"a', calls=[("f", '{"a')]),
    ]


class TestPhi4MiniJson(Kit):
    name = "phi4_mini_json"
    samples = [
        Sample(
            'functools[{"name": "get_weather", "arguments": {"city": "Paris"}}, '
            f'{{"name": "say", "arguments": {TRICKY_JSON}}}]',
            calls=[("get_weather", PARIS), ("say", TRICKY)],
        ),
        Sample(
            f'<|tool_call|>[{{"name": "search", "arguments": {NESTED_JSON}}}]<|/tool_call|>',
            calls=[("search", NESTED)],
        ),
        Sample("Use functools.partial.", content="Use functools.partial."),
        Sample('functools[{"name": "f", "arguments": {"a', calls=[("f", '{"a')]),
    ]


class TestKimiK2(Kit):
    name = "kimi_k2"
    close = "<|tool_call_end|>"
    samples = [
        Sample(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.now:0"
            "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>Never shown."
            "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>{}<|tool_call_end|>",
            calls=[("now", {}), ("now", {})],
        ),
        Sample(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0"
            '<|tool_call_argument_begin|>{"city": "Paris"}<|tool_call_end|>'
            "<|tool_calls_section_end|>",
            calls=[("get_weather", PARIS)],
            ids=["functions.get_weather:0"],
        ),
        Sample(
            "I check both. <|tool_calls_section_begin|><|tool_call_begin|>functions.say:0"
            f"<|tool_call_argument_begin|>{TRICKY_JSON}<|tool_call_end|>"
            f"<|tool_call_begin|>functions.search:1<|tool_call_argument_begin|>{NESTED_JSON}"
            "<|tool_call_end|><|tool_calls_section_end|>",
            content="I check both.",
            calls=[("say", TRICKY), ("search", NESTED)],
            ids=["functions.say:0", "functions.search:1"],
        ),
        Sample(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0"
            '<|tool_call_argument_begin|>{"a": 1',
            calls=[("f", '{"a": 1')],
        ),
    ]


PLAMO = "<|plamo:{}:plamo|>".format


def plamo_call(name: str, arguments: str) -> str:
    return (
        f"{PLAMO('begin_tool_request')}{PLAMO('begin_tool_name')}{name}{PLAMO('end_tool_name')}"
        f"{PLAMO('begin_tool_arguments')}<|plamo:constrain|>json<|plamo:msg|>{arguments}"
        f"{PLAMO('end_tool_arguments')}{PLAMO('end_tool_request')}"
    )


class TestPlamo3(Kit):
    name = "plamo3"
    close = PLAMO("end_tool_arguments") + PLAMO("end_tool_request")
    samples = [
        Sample(
            PLAMO("begin_tool_requests")
            + plamo_call("get_weather", PARIS_JSON)
            + PLAMO("end_tool_requests")
            + "Never shown.",
            calls=[("get_weather", PARIS)],
        ),
        Sample("A<|plamo:tag|>", content="A"),
        Sample(
            PLAMO("begin_tool_requests")
            + plamo_call("get_weather", PARIS_JSON)
            + PLAMO("end_tool_requests"),
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            PLAMO("begin_tool_requests")
            + plamo_call("now", "").replace("<|plamo:constrain|>json<|plamo:msg|>", ""),
            calls=[("now", {})],
        ),
        Sample(
            "Both."
            + PLAMO("begin_tool_requests")
            + plamo_call("say", TRICKY_JSON)
            + plamo_call("search", NESTED_JSON)
            + PLAMO("end_tool_requests"),
            content="Both.",
            calls=[("say", TRICKY), ("search", NESTED)],
        ),
    ]


class TestHunyuanA13b(Kit):
    name = "hunyuan_a13b"
    close = "</tool_calls>"
    markers = ("<tool_calls>", "</tool_calls>")
    samples = [
        Sample(
            '<tool_calls>[{"name": "get_weather", "arguments": {"city": "Paris"}}]</tool_calls>',
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            'Two. <tool_calls>[{"name": "say", "arguments": '
            f'{TRICKY_JSON}}}, {{"name": "search", "arguments": {NESTED_JSON}}}]</tool_calls>',
            content="Two.",
            calls=[("say", TRICKY), ("search", NESTED)],
        ),
        Sample('<tool_calls>[{"name": "f", "arguments": {"a', calls=[("f", '{"a')]),
    ]


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


def test_every_tool_parser_in_the_box_is_here() -> None:
    here = {
        kit.name
        for file in Path(__file__).parent.glob("test_*_parsers.py")
        for kit in vars(importlib.import_module(file.stem)).values()
        if isinstance(kit, type) and issubclass(kit, Kit) and "name" in vars(kit)
    }
    plugins = load_plugins()
    built_in = {
        entry.name
        for entry in plugins["tool_parser"].entries()
        if entry.provenance.distribution == "jackfield"
    }
    assert here == built_in


@pytest.mark.parametrize("tools", [[], [{}], [{"function": None}], [{"function": {"name": "f"}}],
                                   [{"function": {"name": "f", "parameters": "odd"}}]])  # fmt: skip
@pytest.mark.parametrize("name", ["qwen3_coder", "glm45", "xlam"])
def test_odd_tools_do_not_break_a_parser(name: str, tools: list[dict[str, object]]) -> None:
    parser = load_plugins()["tool_parser"].load(name)(tools=tools)
    text = "<tool_call>f\n<arg_key>a</arg_key><arg_value>1</arg_value></tool_call><function=f>\n"
    parser.feed(text + "<parameter=a>1</parameter></function>")
    parser.finish()
