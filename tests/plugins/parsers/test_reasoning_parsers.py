"""Every reasoning parser in the box passes the kit, with outputs as its family writes them."""

from __future__ import annotations

import importlib

import pytest
from reasoning_kit import Kit

from jackfield.core.output_parsing.output_parser import OutputParser, fold
from jackfield.core.output_parsing.reasoning_parser import make_parser
from jackfield.core.registry import load_plugins
from jackfield.plugins.conformance.parsers import Sample, run

OPENED = [
    Sample("We add.\n</think>\n\nIt is 4.", content="It is 4.", reasoning="We add."),
    Sample("<think>\nWe add.\n</think>\n\nIt is 4.", content="It is 4.", reasoning="We add."),
    Sample("Is a < b?\n\nYes, </thin", reasoning="Is a < b?\n\nYes, </thin"),
    Sample("\n\n</think>\n\n4 </think> 5", content="4 </think> 5"),
]
"""The prompt ends with the opening tag, or may."""
TAGGED = [
    Sample("<think>\nWe add.\n</think>\n\nIt is 4.", content="It is 4.", reasoning="We add."),
    Sample("\n<think>We add.</think>\nIt is 4.", content="It is 4.", reasoning="We add."),
    Sample("<think></think>\nIt is 4.", content="It is 4."),
    Sample("<think>\nLet me", reasoning="Let me"),
    Sample("It is 4.", content="It is 4."),
    Sample("It is 4. <think>", content="It is 4. <think>"),
]
"""The model writes the opening tag, if it thinks."""


class TestDeepSeekR1(Kit):
    name, reasoning_end = "deepseek_r1", "</think>"
    samples = OPENED


class TestDeepSeekV3(Kit):
    name, reasoning_end = "deepseek_v3", "</think>"
    samples = [*OPENED, Sample("It is 4.", content="It is 4.", thinking=False)]

    def test_it_is_off_by_default(self) -> None:
        assert self.parser_class.thinking_switch == ("thinking", False)


class TestQwen3(Kit):
    name, reasoning_end = "qwen3", "</think>"
    samples = [
        *OPENED,
        Sample(
            "<think>\nI call it.\n\n<tool_call>\n<function=now>\n</function>\n</tool_call>",
            reasoning="I call it.",
            content="<tool_call>\n<function=now>\n</function>\n</tool_call>",
        ),
        Sample(
            "A <tool_call> and <tool_call>\n<function> are marks.</think>4",
            reasoning="A <tool_call> and <tool_call>\n<function> are marks.",
            content="4",
        ),
        Sample("\n\nIt is 4.", content="\n\nIt is 4.", thinking=False),
        Sample("<think>Hm</think>4", reasoning="Hm", content="4", thinking=False),
    ]


class TestThinkTags(Kit):
    name, reasoning_end = "think_tags", "</think>"
    samples = TAGGED


class TestGlm45(Kit):
    name, reasoning_end = "glm45", "</think>"
    samples = [
        *TAGGED,
        Sample(
            "\n<think>The user wants weather.</think>\n\n<tool_call>get_weather\n"
            "<arg_key>city</arg_key>\n<arg_value>Paris</arg_value>\n</tool_call>",
            reasoning="The user wants weather.",
            content="<tool_call>get_weather\n<arg_key>city</arg_key>\n"
            "<arg_value>Paris</arg_value>\n</tool_call>",
        ),
        Sample("It is 4.", content="It is 4.", thinking=False),
    ]


class TestGlm47(Kit):
    name, reasoning_end = "glm47", "</think>"
    samples = [
        *OPENED,
        Sample(
            "I call it.<tool_call>now</tool_call>",
            reasoning="I call it.",
            content="<tool_call>now</tool_call>",
        ),
    ]


class TestNemotronV3(TestGlm47):
    name = "nemotron_v3"
    examples = 5

    def test_reasoning_alone_is_the_content_too_if_the_request_says_so(self) -> None:
        for option, text, content in (
            (True, "Just this.\n</think>\n \n", "Just this."),
            (True, "Just this.", "Just this."),
            (True, "Hm</think>4", "4"),
            (True, "Hm<tool_call>now", "<tool_call>now"),
            (False, "Just this.\n</think>\n", None),
        ):
            for pieces in ([text], list(text)):
                parser = make_parser(
                    self.parser_class,
                    thinking=True,
                    template_arguments={"force_nonempty_content": option},
                )
                message = fold(run(parser, pieces))
                assert message.reasoning in ("Just this.", "Hm")
                assert (message.content or "").strip() == (content or "")


class TestNemotron3(TestGlm47):
    name = "nemotron_3"
    examples = 5


class TestGraniteThinking(TestGlm47):
    name = "granite_thinking_parser"
    examples = 5


class TestLing3(TestGlm47):
    name = "ling3"
    examples = 5


class TestIQuestQ1(Kit):
    name, reasoning_end = "iquest_q1", "</think>"
    samples = [
        *OPENED,
        Sample(
            "I call it.<iquest_tool_call>now</iquest_tool_call>",
            reasoning="I call it.",
            content="<iquest_tool_call>now</iquest_tool_call>",
        ),
        Sample("It is 4.", content="It is 4.", thinking=False),
    ]


class TestMiMo(TestQwen3):
    name = "mimo"
    examples = 5


class TestInternS1(TestQwen3):
    name = "interns1"
    examples = 5


class TestGigaChat35(Kit):
    name, reasoning_end = "gigachat35", "</think>"
    samples = [*OPENED, Sample("It is 4.", content="It is 4.", thinking=False)]

    def test_it_is_off_by_default(self) -> None:
        assert self.parser_class.thinking_switch == ("reasoning", False)


class TestHolo2(Kit):
    name, reasoning_end = "holo2", "</think>"
    samples = [*OPENED, Sample("It is 4.", content="It is 4.", thinking=False)]


class TestStep5(TestDeepSeekR1):
    name = "step5"
    examples = 5


class TestKimi(Kit):
    name, reasoning_end = "kimi", "◁/think▷"
    samples = [
        Sample("◁think▷We add.◁/think▷It is 4.", content="It is 4.", reasoning="We add."),
        Sample("It is 4. ◁", content="It is 4. ◁"),
        Sample("◁think▷Let", reasoning="Let"),
    ]


class TestErnie45(Kit):
    name, reasoning_end = "ernie45", "</think>"
    samples = [
        *OPENED[:3],
        Sample(
            "Plan\n</think>\n\n<response>\nYes.\n</response>\n", content="Yes.", reasoning="Plan"
        ),
    ]


class TestMiniMaxM2(Kit):
    name, reasoning_end = "minimax_m2", "</think>"
    samples = OPENED


class TestMiniMaxM2AppendThink(Kit):
    name, reasoning_end = "minimax_m2_append_think", "</think>"
    samples = [
        Sample("We add.\n</think>\n\nIt is 4.", content="<think>We add.\n</think>\n\nIt is 4."),
        Sample("<think>Hm</think>4", content="<think>Hm</think>4"),
        Sample("Let me", content="<think>Let me"),
        Sample(""),
    ]

    def unchanged(self, text: str) -> tuple[str, ...]:
        return (text, "<think>" + text)


class TestStep3(Kit):
    name, reasoning_end = "step3", "</think>"
    samples = OPENED


class TestOlmo3(Kit):
    name, reasoning_end = "olmo3", "</think>"
    samples = OPENED


class TestMistral(Kit):
    name, reasoning_end = "mistral", "[/THINK]"
    samples = [
        Sample(
            "[THINK]Let x = [1, 2].[/THINK]\n\nIt is 2.",
            content="It is 2.",
            reasoning="Let x = [1, 2].",
        ),
        Sample("[THINK]Let x", reasoning="Let x"),
        Sample("[1] says so.", content="[1] says so."),
        Sample("Hello.", content="Hello."),
    ]


class TestMistralAnywhere(Kit):
    """The answer has begun where the thought comes."""

    name = "mistral"
    samples = [
        Sample("Before\n[THINK]r[/THINK]\nAfter", content="Before\n\nAfter", reasoning="r"),
        Sample("This[/THINK] that.", content="This that."),
        Sample("[/THINK]\nHi.[THINK]a[/THINK][THINK]\nb", content="\nHi.", reasoning="a\nb"),
    ]


class TestSeedOss(Kit):
    name, reasoning_end = "seed_oss", "</seed:think>"
    samples = [
        Sample(
            "<seed:think>Or <seed:tool_call>?</seed:think>It is 4.",
            content="It is 4.",
            reasoning="Or <seed:tool_call>?",
        ),
        Sample("<seed:think>Let me", reasoning="Let me"),
        Sample("It is 4.", content="It is 4."),
        Sample("It is 4.", content="It is 4.", thinking=False),
    ]


class TestKimiK2(Kit):
    name, reasoning_end = "kimi_k2", "</think>"
    samples = [
        *OPENED,
        Sample(
            "I call it.<|tool_calls_section_begin|>",
            reasoning="I call it.",
            content="<|tool_calls_section_begin|>",
        ),
    ]


class TestKimiK3(Kit):
    name, reasoning_end = "kimi_k3", "<|close|>think<|sep|>"
    samples = [
        Sample(
            "We add.<|close|>think<|sep|><|open|>response<|sep|>It is 4.<|close|>response<|sep|>"
            "<|open|>tools<|sep|>calls<|close|>tools<|sep|><|close|>message<|sep|><|end_of_msg|>",
            content="It is 4.<|open|>tools<|sep|>calls<|close|>tools<|sep|>",
            reasoning="We add.",
        ),
        Sample("We add.<|open|>response<|sep|>4", content="4", reasoning="We add."),
        Sample("We <|close|>thi", reasoning="We <|close|>thi"),
        Sample("Hi<|close|>response<|sep|>", content="Hi", thinking=False),
    ]

    def test_the_prompt_says_which_channel_is_open(self) -> None:
        for end, expected in (("think", ("Hi", None)), ("response", (None, "Hi"))):
            parser = self.parser_class(thinking=end != "think")
            parser.see_prompt_end(f"a<|open|>{end}<|sep|>")
            assert parser.reasoning_ended is (end == "response")
            message = fold(run(parser, ["Hi"]))
            assert (message.reasoning, message.content) == expected


class TestDeepSeekV4(Kit):
    name, reasoning_end = "deepseek_v4", "</think>"
    samples = [
        *OPENED,
        Sample(
            "I call it.\n\n<｜DSML｜tool_calls>",
            reasoning="I call it.",
            content="<｜DSML｜tool_calls>",
        ),
        Sample("It is 4.", content="It is 4.", thinking=False),
    ]


class TestDeepSeekV41(TestDeepSeekV4):
    name = "deepseek_v41"
    examples = 5


class TestStep3p5(Kit):
    name, reasoning_end = "step3p5", "</think>"
    samples = [
        *OPENED,
        Sample("I call it.\n<tool_call>", reasoning="I call it.", content="<tool_call>"),
    ]


class TestPoolsideV1(Kit):
    name, reasoning_end = "poolside_v1", "</think>"
    samples = [*TAGGED, Sample("It is 4.", content="It is 4.", thinking=False)]

    def test_it_is_off_by_default(self) -> None:
        assert self.parser_class.thinking_switch == ("enable_thinking", False)


class TestPlamo3(Kit):
    name, reasoning_end = "plamo3", "<|plamo:end_think:plamo|>"
    samples = [
        Sample(
            "<|plamo:begin_think:plamo|>We add.\n<|plamo:end_think:plamo|>\nIt is 4.",
            content="It is 4.",
            reasoning="We add.",
        ),
        Sample(
            "We ask.<|plamo:begin_tool_requests:plamo|>",
            content="<|plamo:begin_tool_requests:plamo|>",
            reasoning="We ask.",
        ),
        Sample("We <|plamo:end", reasoning="We <|plamo:end"),
    ]


class TestGemma4(Kit):
    name, reasoning_end = "gemma4", "<channel|>"
    samples = [
        Sample(
            "<|channel>thought\nWe add.\n<channel|>It is 4.",
            content="It is 4.",
            reasoning="We add.",
        ),
        Sample(
            "<|channel>thought\n<channel|>thought is hard.",
            content="thought is hard.",
            thinking=False,
        ),
        Sample(
            "<|channel>thought\nNight?<|tool_call>call:now{}",
            content="<|tool_call>call:now{}",
            reasoning="Night?",
        ),
        Sample("<|channel>thou", content="<|channel>thou"),
        Sample("thought\nNight?<channel|>No.", content="No.", reasoning="Night?"),
        Sample("thoughts\nare free", content="thoughts\nare free"),
        Sample("No thought\n", content="No thought\n"),
        Sample("It is<channel|> 4.", content="It is 4.", thinking=False),
    ]

    def test_it_is_off_by_default(self) -> None:
        assert self.parser_class.thinking_switch == ("enable_thinking", False)

    def test_it_reasons_again_after_content(self) -> None:
        text = "A<|channel>thought\nb<|tool_call>c<channel|>d"
        for pieces in ([text], list(text)):
            message = fold(run(self.make(), pieces))
            assert (message.reasoning, message.content) == ("b", "A<|tool_call>cd")


class TestMiniMaxM3(Kit):
    name, reasoning_end = "minimax_m3", "</mm:think>"
    samples = [
        Sample("<mm:think>We add.</mm:think>4", content="4", reasoning="We add."),
        Sample("It is 4.", content="It is 4."),
    ]

    def test_reasoning_may_stand_in_the_content(self) -> None:
        text = "Hi <mm:think>wait</mm:think>there"
        for pieces in ([text], list(text)):
            message = fold(run(self.make(), pieces))
            assert (message.reasoning, message.content) == ("wait", "Hi there")


class TestApertus2509(Kit):
    name, reasoning_end = "apertus2509", "<|inner_suffix|>"
    samples = [
        Sample(
            "<|inner_prefix|>A<|inner_suffix|>B<|inner_prefix|>C<|inner_suffix|>"
            '<|tools_prefix|>[{"now": {}}]',
            content='B<|tools_prefix|>[{"now": {}}]',
            reasoning="AC",
        ),
        Sample("<|inner_prefix|>We add", reasoning="We add"),
        Sample("It is 4.<|inner_suffix|>", content="It is 4."),
    ]

    def test_calls_inside_go_to_the_tool_parser(self) -> None:
        text = '<|inner_prefix|>A<|tools_prefix|>[{"f": {}}]<|tools_suffix|>B<|inner_suffix|>C'
        tools = self.plugins()["tool_parser"].load("apertus2509")
        for pieces in ([text], list(text)):
            message = fold(run(OutputParser(self.make(), tools()), pieces))
            assert (message.reasoning, message.content) == ("AB", "C")
            assert [call.name for call in message.tool_calls] == ["f"]


class TestCohereCommand3(Kit):
    name, reasoning_end = "cohere_command3", "<|END_THINKING|>"
    samples = [
        Sample(
            "<|START_THINKING|>We <co>add</co: 0:[1,2],1:[0]>.<|END_THINKING|>"
            "<|START_RESPONSE|>It is <co>4</co: 0:[1]>: <c</co.<|END_RESPONSE|>",
            content="It is 4: <c</co.",
            reasoning="We add.",
        ),
        Sample(
            "<|START_THINKING|>I call.<|END_THINKING|><|START_ACTION|>[\n<co>]<|END_ACTION|>",
            content="<|START_ACTION|>[\n<co>]<|END_ACTION|>",
            reasoning="I call.",
        ),
        Sample("It is <c<co>o>4.", content="It is <co>4."),
        Sample("<|START_RESPONSE|>It is", content="It is", thinking=False),
    ]


class TestCohereCommand4(Kit):
    name, reasoning_end = "cohere_command4", "<|END_THINKING|>"
    samples = [
        Sample(
            "Plan <|END_THINKING|><|START_TEXT|>At <co>noon</co: 0:[0]>.<|END_TEXT|>",
            content="At noon.",
            reasoning="Plan",
        ),
        Sample("Plan", reasoning="Plan"),
        Sample(
            "Plan<|END_THINKING|><|START_TEXT|>At noon. <|END_TEXT|> more",
            content="At noon.",
            reasoning="Plan",
        ),
    ]


class TestGranite(Kit):
    name, reasoning_end = "granite", "Here is my response:"
    samples = [
        Sample(
            "Here is my thought process: We add.\n\nHere is my response: It is 4.",
            content="It is 4.",
            reasoning="We add.",
        ),
        Sample("Here is my thought process:\nWe", reasoning="We"),
        Sample("Here is my answer: 4.", content="Here is my answer: 4."),
        Sample("Here is 4.", content="Here is 4.", thinking=False),
    ]

    def test_it_may_be_short_of_a_word(self) -> None:
        parser = self.make()
        events = parser.feed("Here's my thought process: a Here's my response: b")
        assert [event.text for event in events + parser.finish()] == ["a", "b"]


class TestHunyuanA13b(Kit):
    name, reasoning_end = "hunyuan_a13b", "</think>"
    samples = [
        Sample(
            "<think>\nWe add.\n</think>\n<answer>\nIt is 4.\n</answer>",
            content="It is 4.",
            reasoning="We add.",
        ),
        Sample("<think>\n\n</think>\n<answer>\nIt is 4.\n</answer>", content="It is 4."),
        Sample("<think>\nWe add.\n</think>\n<answer>\nIt", content="It", reasoning="We add."),
        Sample("<think>\nWe add", reasoning="We add"),
        Sample("<answer>\nIt is 4.\n</answer>", content="It is 4.", thinking=False),
        Sample("It is 4.", content="It is 4.", thinking=False),
    ]


HARMONY = [
    Sample(
        "<|channel|>analysis<|message|>We add.<|end|><|start|>assistant"
        "<|channel|>final<|message|>It is 4.",
        content="It is 4.",
        reasoning="We add.",
    ),
    Sample(
        "<|channel|>analysis<|message|>One.<|end|><|start|>assistant<|channel|>analysis<|message|>"
        "Two.<|end|><|start|>assistant<|channel|>commentary<|message|>I check.<|end|>"
        "<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json<|message|>"
        '{"a": 1}<|call|>',
        reasoning="One.\nTwo.",
        content="I check.<|start|>assistant<|channel|>commentary to=functions.f <|constrain|>json"
        '<|message|>{"a": 1}<|call|>',
    ),
    Sample("<|channel|>analysis<|message|>We ad", reasoning="We ad"),
    Sample(
        "<|channel|>commentary<|message|>I check.<|end|><|start|>assistant<|channel|>final"
        "<|message|>It is 4.<|return|>",
        content="I check.\nIt is 4.",
    ),
    Sample("<|channel|>final<|message|>It is 4.<|return|>", content="It is 4."),
    Sample("It is 4.", content="It is 4."),
]


class TestGptoss(Kit):
    name, reasoning_end = "gptoss", "final<|message|>"
    samples = HARMONY


class TestOpenaiGptoss(TestGptoss):
    name = "openai_gptoss"
    examples = 5


class TestIdentity(Kit):
    name = "identity"
    samples = [
        Sample("<think>a</think>b\n", content="<think>a</think>b\n"),
        Sample("It is 4.", content="It is 4.", thinking=False),
    ]


@pytest.mark.parametrize("name", ["glm45", "qwen3", "deepseek_r1", "think_tags", "seed_oss"])
def test_the_prompt_s_end_decides_whether_reasoning_is_open(name: str) -> None:
    reasoning = load_plugins()["reasoning_parser"].load(name)
    (begin,), (end,) = reasoning.open, reasoning.close
    text = f"This is a reasoning section{end}This is the rest"
    for pieces in ([text], list(text)):
        parser = make_parser(reasoning, thinking=True, prompt_end=f"<|assistant|>{begin}\n")
        assert not parser.reasoning_ended
        message = fold(run(parser, pieces))
        assert message.reasoning == "This is a reasoning section"
        assert message.content == "This is the rest"
        closed = make_parser(reasoning, thinking=True, prompt_end=f"{begin}\n\n{end}\n\n")
        assert closed.reasoning_ended
        assert fold(run(closed, ["It is 4."])).content == "It is 4."


def test_calls_of_gpt_oss_are_not_shown_where_nothing_reads_them() -> None:
    text = HARMONY[1].text + "<|start|>assistant<|channel|>final<|message|>It is 4."
    reasoning = load_plugins()["reasoning_parser"].load("gptoss")
    for pieces in ([text], list(text)):
        message = fold(run(OutputParser(reasoning(), None), pieces))
        assert (message.reasoning, message.content) == ("One.\nTwo.", "I check.\nIt is 4.")


def test_every_reasoning_parser_in_the_box_is_here() -> None:
    others = [vars(importlib.import_module(f"test_{file}_parsers")) for file in ("message", "hf")]
    values = [value for places in (globals(), *others) for value in places.values()]
    names = {getattr(value, "name", None) for value in values if isinstance(value, type)}
    built_in = {
        entry.name
        for entry in load_plugins()["reasoning_parser"].entries()
        if entry.provenance.distribution == "jackfield"
    }
    assert {name for name in names if isinstance(name, str)} == built_in
