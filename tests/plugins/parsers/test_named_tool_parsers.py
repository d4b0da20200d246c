"""Tool parsers of families that write a call's name in marks pass the kit."""

from __future__ import annotations

from tool_kit import NESTED, NESTED_JSON, PARIS, PARIS_JSON, TRICKY, TRICKY_JSON, WEATHER, Kit

from jackfield.plugins.conformance.parsers import Sample


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
