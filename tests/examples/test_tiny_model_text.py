"""The embedded model's training text is what its chat template writes."""

from __future__ import annotations

import itertools
import json
import sys
from pathlib import Path
from typing import Any

import pytest

import jackfield
from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.core.text.chat_template import ChatTemplate
from jackfield.core.text.tokenizer import Tokenizer

FOLDER = Path(jackfield.__file__).resolve().parent / "examples" / "tiny_model"


@pytest.fixture(scope="module")
def chat() -> ChatTemplate:
    tokenizer = Tokenizer.load(str(EMBEDDED_MODEL))
    return ChatTemplate(tokenizer.chat_templates, tokenizer)


@pytest.fixture()
def made(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(FOLDER)
    import generator
    import text

    yield generator, text
    for name in ("generator", "text"):
        del sys.modules[name]


def as_openai(message: dict[str, Any]) -> dict[str, Any]:
    """Clients send arguments as JSON text."""
    calls = [
        {**call, "id": "c", "function": {**call["function"],
                                         "arguments": json.dumps(call["function"]["arguments"])}}
        for call in message.get("tool_calls", ())
    ]  # fmt: skip
    return {**message, "tool_calls": calls} if calls else message


@pytest.mark.parametrize(
    "kind", ["talk", "facts", "arithmetic", "json", "copy", "tools", "reasoning"]
)
def test_prompts_are_what_the_template_writes(chat: ChatTemplate, made: Any, kind: str) -> None:
    generator, text = made
    for example in itertools.islice(generator.examples(3, "held-out", kind), 25):
        parts = text.segments(example)
        last = max(index for index, (_, learned) in enumerate(parts) if learned)
        kwargs = {} if example.thinking is None else {"enable_thinking": example.thinking}
        rendered = chat.render(
            [as_openai(message) for message in example.messages[:-1]],
            tools=example.tools,
            add_generation_prompt=True,
            template_kwargs=kwargs,
        )
        assert rendered == "".join(part for part, _ in parts[:last])


def test_held_out_questions_are_never_trained_on(made: Any) -> None:
    generator, _ = made

    def questions(split: str, count: int) -> set[str]:
        values = itertools.islice(generator.examples(5, split, "arithmetic"), count)
        return {example.messages[-2]["content"] for example in values}

    assert not questions("held-out", 300) & questions("train", 20000)
