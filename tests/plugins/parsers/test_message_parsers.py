"""Reasoning parsers of families with messages, blocks or marks by the prompt pass the kit, and hand
calls to their tool parsers."""

from __future__ import annotations

from typing import Any

import pytest
from reasoning_kit import Kit

from jackfield.core.output_parsing.output_parser import OutputParser, ParsedMessage, fold
from jackfield.core.output_parsing.reasoning_parser import make_parser
from jackfield.core.registry import load_plugins
from jackfield.plugins.conformance.parsers import Sample, run, tool

TIDE = tool("tide", port="string", day="integer")
ATEM = (
    '<atem:function_calls>\n<atem:invoke name="tide">\n<atem:parameter name="port">Brest'
    "</atem:parameter>\n</atem:invoke>\n</atem:function_calls>"
)
TO = "<|start|>assistant to={}<|message|>{}"


class TestMuse(Kit):
    name, reasoning_end = "muse", "<|eom|><|start|>assistant to=user<|message|>"
    samples = [
        Sample(" to=self<|message|>We add." + "<|eom|>" + TO.format("user", "It is 4.") + "<|eot|>",
               reasoning="We add.", content="It is 4."),
        Sample(" to=self<|message|>Let me", reasoning="Let me"),
        Sample("<|message|>We add.<|eom|>" + TO.format("user", "4"),
               reasoning="We add.", content="4"),
        Sample(" to=user<|message|>It is 4.", content="It is 4."),
    ]  # fmt: skip

    def unchanged(self, text: str) -> tuple[str, ...]:
        return (text,)

    @pytest.mark.parametrize(
        ("text", "reasoning", "content"),
        [
            (" to=self<|message|>A<|eom|>" + TO.format("commentary", "B<|eom|>")
             + TO.format("user", "C<|eot|>"), "A", "BC"),
            (" to=developer<|message|>A<|eom|>" + TO.format("user", "B"), None, "B"),
            (" to=self<|message|>A" + TO.format("user", "B"), "A", "B"),
            (" to=self<|message|>A<|eom|> to=user<|message|>B", "A", "B"),
            ("<|start|>assistant to=user<|message|>B", None, "B"),
            ("no <|start|> header", None, "no <|start|> header"),
            (" to=self<|message|>A<|eom|>loose", "A", "loose"),
        ],
    )  # fmt: skip
    def test_who_a_message_is_to(
        self, text: str, reasoning: str | None, content: str | None
    ) -> None:
        for pieces in ([text], list(text)):
            message = fold(run(self.parser_class(), pieces))
            assert (message.reasoning, message.content) == (reasoning, content)


class TestMuseGlimmer(Kit):
    name, reasoning_end = "muse_glimmer", "<|eom|><|start|>assistant to=user<|message|>"
    examples = 5
    samples = TestMuse.samples[:2]

    def test_a_message_to_no_one_is_content(self) -> None:
        message = fold(run(self.parser_class(), ["<|message|>4<|eot|>"]))
        assert (message.reasoning, message.content) == (None, "4")


class TestMuseSpark(TestMuse):
    name, examples = "musespark1x", 5


class TestInkling(Kit):
    name, reasoning_end = "inkling", "<|end_message|><|message_model|>user<|content_text|>"
    samples = [
        Sample(
            "<|content_thinking|>We add.<|end_message|><|message_model|>user<|content_text|>"
            "It is 4.<|end_message|><|content_model_end_sampling|>",
            reasoning="We add.", content="It is 4.",
        ),
        Sample("<|content_thinking|>Let me", reasoning="Let me"),
        Sample("<|content_text|>It is 4.", content="It is 4."),
        Sample("<|content_tool_error|>No.<|end_message|>", content="No."),
    ]  # fmt: skip

    def unchanged(self, text: str) -> tuple[str, ...]:
        return (text,)

    def test_the_prompt_may_have_begun_a_block(self) -> None:
        for mark, expected in (
            ("<|content_thinking|>", ("Hi", None)), ("<|content_text|>", (None, "Hi")),
        ):  # fmt: skip
            parser = self.parser_class()
            parser.see_prompt_end(f"a<|message_model|>{mark}")
            message = fold(run(parser, ["Hi<|end_message|>"]))
            assert (message.reasoning, message.content) == expected


BEAM_CALL = (
    " to=tide<|channel|>analysis <|constrain|>xml<|message|>"
    '<rfl:parameter name="port">\nBrest\n</rfl:parameter>'
)


class TestBeam(Kit):
    name = "beam"
    reasoning_end = "<|end|><|start|>assistant<|channel|>final<|message|>"
    samples = [
        Sample(
            "<|channel|>analysis<|message|>We add.<|end|><|start|>assistant"
            "<|channel|>final<|message|>It is 4.<|return|>",
            reasoning="We add.", content="It is 4.",
        ),
        Sample("<|channel|>analysis<|message|>Let me", reasoning="Let me"),
    ]  # fmt: skip

    def unchanged(self, text: str) -> tuple[str, ...]:
        return (text,)


class TestHy3(Kit):
    name, reasoning_end = "hy_v3", "</think>"
    samples = [
        Sample("<think>We add.</think>It is 4.", content="It is 4.", reasoning="We add."),
        Sample("<think>We<tool_calls>", content="<tool_calls>", reasoning="We"),
        Sample("It is 4.", content="It is 4."),
    ]

    @pytest.mark.parametrize("suffix", ["", ":opensource", ":9f2c"])
    def test_the_prompts_tag_has_the_suffix_of_all(self, suffix: str) -> None:
        parser = self.parser_class()
        parser.see_prompt_end(f"<assistant><think{suffix}>\n")
        message = fold(run(parser, [f"A <think:x> b</think{suffix}>C"]))
        assert (message.reasoning, message.content) == ("A <think:x> b", "C")
        parser = self.parser_class()
        parser.see_prompt_end(f"<think{suffix}>\n</think{suffix}>")
        assert parser.reasoning_ended
        assert fold(run(parser, ["C <think>"])).content == "C <think>"


class TestHy4(TestHy3):
    name, examples = "hy_v4", 5


class TestK2Horizon(Kit):
    name, reasoning_end = "k2_horizon", "</ifm|think>"
    samples = [
        Sample("We add.\n</ifm|think>\nIt is 4.", content="It is 4.", reasoning="We add."),
        Sample("Hm<ifm|tool_calls>", content="<ifm|tool_calls>", reasoning="Hm"),
        Sample("Let me", reasoning="Let me"),
    ]

    @pytest.mark.parametrize("name", ["think", "think_fast", "think_faster"])
    def test_the_prompt_chooses_the_marks(self, name: str) -> None:
        parser = self.parser_class()
        parser.see_prompt_end(f"<ifm|{name}>\n")
        other = "</ifm|think>" if name != "think" else "</ifm|think_fast>"
        message = fold(run(parser, [f"A{other}b</ifm|{name}>C"]))
        assert (message.reasoning, message.content) == (f"A{other}b", "C")


class TestMiniCpmV(Kit):
    name, reasoning_end = "minicpmv", "</think>"
    samples = [
        Sample("one\\ntwo</think>see `a\\nb`\\nend", reasoning="one\ntwo",
               content="see `a\\nb`\nend"),
        Sample("a\\r\\nb", reasoning="a\nb"),
        Sample("<think></think>4", content="4", thinking=False),
        Sample("Hm<tool_call>{\"a\": \"b\\nc\"}</tool_call>\\nd", reasoning="Hm",
               content="<tool_call>{\"a\": \"b\\nc\"}</tool_call>\nd"),
    ]  # fmt: skip

    @pytest.mark.parametrize(
        ("written", "shown"),
        [
            (r"a\\nb", r"a\\nb"), (r"```\n``\n```\n", "```\\n``\\n```\n"),
            (r"$a\nb$\n", "$a\\nb$\n"),
            (r"$$a$\n$$", r"$$a$\n$$"), (r"\(\nu\)", r"\(\nu\)"), (r"\[\nu\]", r"\[\nu\]"),
            ("a<|im_end|>b<reserved_12>c<|reserved_15|>d", "abcd"), ("a\\", "a\\"),
            ("a<|im_e", "a<|im_e"), ("``", "``"), ("a\\r", "a\r"),
        ],
    )  # fmt: skip
    def test_escapes_are_newlines_outside_of_code_and_formulas(
        self, written: str, shown: str
    ) -> None:
        for pieces in ([written], list(written)):
            assert fold(run(self.parser_class(thinking=False), pieces)).content == shown


CALL = ("tide", '{"port": "Brest"}')


@pytest.mark.parametrize(
    ("name", "text", "reasoning", "content", "calls"),
    [
        ("muse", " to=self<|message|>Tide first.<|eom|>" + TO.format("tide", ATEM) + "<|eot|>",
         "Tide first.", None, [CALL]),
        ("muse", " to=user<|message|>One moment.<|eom|>" + TO.format("tide", ATEM + "<|eom|>")
         + TO.format("tide", ATEM + "<|eot|>"), None, "One moment.", [CALL, CALL]),
        ("muse_glimmer", " to=commentary<|message|>" + ATEM, None, None, [CALL]),
        ("beam", f"<|channel|>analysis<|message|>Tide first.<|end|><|start|>assistant{BEAM_CALL}"
         f"<|end|><|start|>assistant{BEAM_CALL}<|call|>", "Tide first.", None, [CALL, CALL]),
        ("beam", BEAM_CALL, None, None, [CALL]),
        ("inkling", "<|content_thinking|>Tide first.<|end_message|><|message_model|>tide"
         '<|content_invoke_tool_json|>{"name":"tide","args":{"port": "Brest"}}<|end_message|>'
         "<|content_model_end_sampling|>", "Tide first.", None, [CALL]),
        ("inkling", "<|content_text|>Hi<|end_message|><|message_model|>tide"
         '<|content_invoke_tool_json|>{"name":"tide","args":{"port": "Brest"}}',
         None, "Hi", [CALL]),
        ("k2_horizon", "Hm.</ifm|think>A<ifm|tool_calls><ifm|tool_call>tide<ifm|arg_key>port"
         "</ifm|arg_key><ifm|arg_value>Brest</ifm|arg_value></ifm|tool_call></ifm|tool_calls>",
         "Hm.", "A", [CALL]),
        ("hy_v3", "<think>Hm</think><tool_calls>\n<tool_call>tide<tool_sep>\n<arg_key>port"
         "</arg_key>\n<arg_value>Brest</arg_value>\n</tool_call>\n</tool_calls>",
         "Hm", None, [CALL]),
    ],
)  # fmt: skip
def test_a_familys_parsers_work_together(
    name: str, text: str, reasoning: str | None, content: str | None, calls: list[Any]
) -> None:
    plugins = load_plugins()
    for pieces in ([text], list(text)):
        parser = OutputParser(
            plugins["reasoning_parser"].load(name)(),
            plugins["tool_parser"].load(name)(tools=[TIDE]),
        )
        events = [event for piece in pieces for event in parser.feed(piece)]
        message = fold([*events, *parser.finish()])
        assert (message.reasoning, message.content) == (reasoning, content)
        assert [(call.name, call.arguments) for call in message.tool_calls] == calls


def through_both(name: str, tools: str, text: str, prompt_end: str = "") -> ParsedMessage:
    plugins = load_plugins()
    reasoning = make_parser(
        plugins["reasoning_parser"].load(name), thinking=True, prompt_end=prompt_end
    )
    events = run(OutputParser(reasoning, plugins["tool_parser"].load(tools)()), list(text))
    return fold(events)


@pytest.mark.parametrize(
    ("name", "tools", "begin", "call", "prompt_end"),
    [
        ("muse", "muse", " to=user<|message|>", '<atem:invoke name="f"></atem:invoke>', ""),
        ("inkling", "inkling", "<|content_text|>",
         '<|content_invoke_tool_json|>{"name": "f", "args": {}}', "<|message_model|>"),
        ("gptoss", "openai", "<|channel|>final<|message|>",
         "<|channel|>commentary to=functions.f<|message|>{}", "<|start|>assistant"),
        ("beam", "beam", "<|channel|>final<|message|>",
         "<|channel|>analysis to=f <|constrain|>xml<|message|>", "<|start|>assistant"),
    ],
)  # fmt: skip
def test_a_call_that_a_message_to_the_user_quotes_is_text(
    name: str, tools: str, begin: str, call: str, prompt_end: str
) -> None:
    answer = f"Write {call} so"
    assert through_both(name, tools, begin + answer, prompt_end) == ParsedMessage(content=answer)


def test_a_message_of_muse_may_lack_its_end() -> None:
    text = ' to=user<|message|>Go to=x, to=f<|message|><atem:invoke name="f"></atem:invoke><|eot|>'
    found = through_both("muse", "muse", text)
    assert [call.name for call in found.tool_calls] == ["f"] and found.content == "Go to=x,"


def test_calls_are_found_where_no_message_frames_them() -> None:
    found = through_both("muse", "muse", 'Hm <atem:invoke name="f"></atem:invoke>')
    assert [call.name for call in found.tool_calls] == ["f"] and found.content == "Hm"
