"""Tool parsers of newer families with objects as arguments, JSON or not, pass the kit."""

from __future__ import annotations

from tool_kit import NESTED, NESTED_JSON, PARIS, TRICKY, TRICKY_JSON, Kit

from jackfield.plugins.conformance.parsers import Sample, tool

FERRY = tool("ferry", quay="string", seats={"type": "array"}, night="boolean", row="integer")
SCALAR = 'say "7", {b}: [\\]\n\u00e9\u4e2d\U0001f600'


class TestGemma4(Kit):
    name = "gemma4"
    examples = 40
    samples = [
        Sample(
            f'<|tool_call>call:ferry{{quay:<|"|>{SCALAR}<|"|>,seats:[2,3,<|"|>x, y<|"|>],'
            'night:true,opts:{night:false,<|"|>deep<|"|>:[{},[],{a:null}]},word:fast lane,'
            "n:-1.5e3}<tool_call|>"
            "<|tool_call>call:now{}<tool_call|>Done.",
            content="Done.",
            tools=[FERRY, tool("now")],
            calls=[
                (
                    "ferry",
                    {
                        "quay": SCALAR,
                        "seats": [2, 3, "x, y"],
                        "night": True,
                        "opts": {"night": False, "deep": [{}, [], {"a": None}]},
                        "word": "fast lane",
                        "n": -1500.0,
                    },
                ),
                ("now", {}),
            ],
        ),
        Sample(
            'One.<|tool_call>:ferry(quay:007,row:<|"|>8<|"|>,night:<|"|>no<|"|>)<tool_call|>',
            content="One.",
            tools=[FERRY],
            calls=[("ferry", {"quay": "007", "row": 8, "night": "no"})],
        ),
        Sample(
            '<|tool_call>call:ferry{quay:"a, b",row:<|"|>2<|"|>}<tool_call|>',
            calls=[("ferry", {"quay": "a, b", "row": "2"})],
        ),
        Sample(
            '<|tool_call>call:ferry{quay:<|"|>north<tool_call|>Done.',
            content="Done.",
            calls=[("ferry", '{"quay": "north')],
        ),
        Sample(
            "<|tool_call>call:a{b:[1,<|tool_call>call:now{}",
            calls=[("a", '{"b": [1, '), ("now", {})],
        ),
        Sample("<|tool_call>call:a{b:1 2", calls=[("a", '{"b": ')]),
        Sample("<|tool_call>call:a{b:1,,}<tool_call|>", calls=[("a", '{"b": 1, ')]),
        Sample("<|tool_call> is a mark.", content="<|tool_call> is a mark."),
    ]


class TestFunctionGemma(Kit):
    name = "functiongemma"
    examples = 25
    samples = [
        Sample(
            "<start_function_call>call:ferry{quay:<escape>2<escape>,row:<escape>2<escape>,"
            'night:<escape>true<escape>,more:<escape>{"a":1}<escape>,word:<escape>a {b}<escape>}'
            "<end_function_call><start_function_call>call:now{}<end_function_call>",
            tools=[FERRY],
            calls=[
                (
                    "ferry",
                    {"quay": "2", "row": 2, "night": True, "more": {"a": 1}, "word": "a {b}"},
                ),
                ("now", {}),
            ],
        ),
        Sample(
            "<start_function_call>call:f{a:<escape>2<escape>,b:<escape>",
            calls=[("f", '{"a": 2, "b": ')],
        ),
        Sample(
            "<start_function_call>call:ferry{quay:<escape>nor",
            tools=[FERRY],
            calls=[("ferry", '{"quay": "nor')],
        ),
        Sample(
            "I go.<start_function_call>call:now{}",
            content="I go.",
            calls=[("now", {})],
        ),
    ]


class TestApertus(Kit):
    name = "apertus"
    close = "<|tools_suffix|>"
    examples = 40
    samples = [
        Sample(
            '<|tools_prefix|>[{"get_weather": {"city": "Paris"}}]<|tools_suffix|>',
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            f'Both.<|tools_prefix|>[{{"say": {TRICKY_JSON}}}, {{"search": {NESTED_JSON}}}]'
            "<|tools_suffix|>",
            content="Both.",
            calls=[("say", TRICKY), ("search", NESTED)],
        ),
        Sample(
            '<|tools_prefix|>{"now": {}, "other": [1, {}]}',
            calls=[("now", {})],
        ),
        Sample('<|tools_prefix|>[{"f": {"a": "b', calls=[("f", '{"a": "b')]),
        Sample('<|tools_prefix|>[{"f": 3}]', content='<|tools_prefix|>[{"f": 3}]'),
        Sample("No tool is needed.", content="No tool is needed."),
    ]


class TestApertus2509(TestApertus):
    name = "apertus2509"
    examples = 5


class TestGigaChat3(Kit):
    name = "gigachat3"
    close = "<|message_sep|>"
    examples = 40
    samples = [
        Sample(
            '<|function_call|>{"name": "get_weather", "arguments": {"city": "Paris"}}'
            "<|message_sep|>",
            calls=[("get_weather", PARIS)],
        ),
        Sample(
            "Checking.<|message_sep|>\n\nfunction call<|role_sep|>\n"
            f'{{"name": "say", "arguments": {TRICKY_JSON}}}</s>',
            content="Checking.",
            calls=[("say", TRICKY)],
        ),
        Sample("A function call is a call.<|message_sep|>", content="A function call is a call."),
        Sample(
            'function call<|role_sep|>{"name": "f", "arguments": {"a": "b',
            calls=[("f", '{"a": "b')],
        ),
    ]


class TestCohereCommand3(Kit):
    name = "cohere_command3"
    close = "<|END_ACTION|>"
    examples = 40
    samples = [
        Sample(
            '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "say", "parameters": '
            f'{TRICKY_JSON}}},\n    {{"tool_call_id": "1", "tool_name": "search", "parameters": '
            f"{NESTED_JSON}}}\n]<|END_ACTION|>",
            calls=[("say", TRICKY), ("search", NESTED)],
            ids=["0", "1"],
        ),
        Sample(
            '<|START_ACTION|>[{"parameters": {}, "tool_name": "now", "tool_call_id": "4"}, '
            '{"tool_call_id": 5, "tool_name": "get_weather", "parameters": {"city": "Paris"}}'
            "]<|END_ACTION|>",
            calls=[("now", {}), ("get_weather", PARIS)],
            ids=["", ""],
        ),
        Sample(
            '<|START_ACTION|>{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1',
            calls=[("f", '{"a": 1')],
            ids=["0"],
        ),
    ]


class TestCohereCommand4(TestCohereCommand3):
    name = "cohere_command4"
    examples = 5
