"""Tool parsers of families that write calls as JSON objects pass the kit."""

from __future__ import annotations

from tool_kit import NESTED, NESTED_JSON, PARIS, TRICKY, TRICKY_JSON, WEATHER, Kit

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
