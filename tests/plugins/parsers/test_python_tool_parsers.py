"""Tool parsers of families that write calls as Python pass the kit."""

from __future__ import annotations

from tool_kit import PARIS, WEATHER, Kit

from jackfield.core.output_parsing.output_parser import fold
from jackfield.plugins.conformance.parsers import Sample, run


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


class TestLfm2(Kit):
    name = "lfm2"
    examples = 40
    samples = [
        Sample(
            "Wait. <|tool_call_start|>[ferry(from='Saint-Malo', seats=02, night=true, "
            'note="l\u00e9 \U0001f600", opts={"a": [null]}), now()]<|tool_call_end|>Done.',
            content="Wait. Done.",
            calls=[
                (
                    "ferry",
                    {
                        "from": "Saint-Malo",
                        "seats": 2,
                        "night": True,
                        "note": "l\u00e9 \U0001f600",
                        "opts": {"a": [None]},
                    },
                ),
                ("now", {}),
            ],
        ),
        Sample("<|tool_call_start|>[f(a='x", calls=[("f", '{"a": "x')]),
        Sample(
            "<|tool_call_start|>[f(a='it's late', b=[\"a \" b\", 'c'd'], c={'e'f': 1}, g='x' )]"
            "<|tool_call_end|>",
            calls=[
                ("f", {"a": "it's late", "b": ['a " b', "c'd"], "c": {"e'f": 1}, "g": "x"}),
            ],
        ),
        Sample(
            "<|tool_call_start|>[now()]<|tool_call_end|>[now()]<|tool_call_end|> Done [1].",
            content="Done [1].",
            calls=[("now", {})],
        ),
        Sample(
            "<|tool_call_start|>[now()]<|tool_call_end|>[1] and <b>",
            content="[1] and <b>",
            calls=[("now", {})],
        ),
        Sample(
            '<|tool_call_start|>[{"name": "now", "arguments": {}}, {"name": "f", "arguments": '
            '{"a": "\u00e9"}}]<|tool_call_end|>',
            calls=[("now", {}), ("f", {"a": "\u00e9"})],
        ),
        Sample(
            "<|tool_call_start|>[f(a='x)]<|tool_call_end|>Done.",
            content="Done.",
            calls=[("f", '{"a": "x)]')],
        ),
        Sample(
            "<|tool_call_start|>[f(a='say <|tool_call_end|> so')]<|tool_call_end|>Done.",
            content="Done.",
            calls=[("f", {"a": "say <|tool_call_end|> so"})],
        ),
        Sample(
            "<|tool_call_start|>[f(a=[1})]<|tool_call_end|>Done.",
            content="Done.",
            calls=[("f", '{"a": [1')],
        ),
        Sample("[now()] is Python.", content="[now()] is Python."),
    ]

    def test_the_first_character_of_a_list_is_looked_for_in_64(self) -> None:
        """With the bracket, it decides whether the calls are JSON."""
        for spaces in (0, 62, 63):
            text = "<|tool_call_start|>" + " " * spaces + '[{"name": "now", "arguments": {}}]'
            message = fold(run(self.make(), list(f"{text}<|tool_call_end|>")))
            names = [call.name for call in message.tool_calls]
            assert names == ([] if spaces == 63 else ["now"]), spaces

    def test_a_call_that_breaks_off_shows_no_mark(self) -> None:
        text = "<|tool_call_start|>[f(a='it's \\ \u00e9', b=[1, {'c': None}], d=-2)]"
        whole = fold(run(self.make(), [text])).tool_calls[0].arguments
        for end in range(text.index("a=") + 2, text.index(")]")):
            for after in ("", "\nDone.", text):
                message = fold(run(self.make(), [f"{text[:end]}<|tool_call_end|>{after}"]))
                shown = (message.content or "") + message.tool_calls[0].arguments
                assert not [mark for mark in self.marks() if mark in shown], (end, message)
                assert whole.startswith(message.tool_calls[0].arguments[:-1]), (end, message)
                assert message.content == ("Done." if after == "\nDone." else None), end
                assert len(message.tool_calls) == (2 if after == text else 1), end
