"""A tiny tekken.json of each version, and the texts and chats that tests encode with it."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

PATTERN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""Of all published files: how a text is split first."""
WORDS = (
    "th", "he", "in", "an", " the", "ing", " and", "er", "ation", " weather", "é", "ß", "  ",
    "\n\n", "aa", "aaa", "abab", "ba", "漢", '": "', "arguments", " location", "Paris", "system",
    "ello",
)  # fmt: skip
"""Every beginning of each of these is a token: joining makes them in more than one way."""
PADDING = 8
"""Tokens behind the vocabulary's end, which are not used."""
SPECIALS = 40
VERSIONS = ("v3", "v7", "v11", "v13", "v15")
LISTED = (
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]",
    "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CALLS]", "[IMG]", "<pad>", "[IMG_BREAK]",
    "[IMG_END]", "[PREFIX]", "[MIDDLE]", "[SUFFIX]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]",
    "[TOOL_CONTENT]",
)  # fmt: skip
CALLS, THINKS = ("[ARGS]", "[CALL_ID]"), ("[THINK]", "[/THINK]")
LATER = {
    "v11": CALLS,
    "v13": CALLS + THINKS,
    "v15": (*CALLS, *THINKS, "[MODEL_SETTINGS]", "[/MODEL_SETTINGS]"),
}
SETTINGS = {
    "reasoning_effort": {
        "type": "enum", "accepts_none": True, "values": ["none", "high"], "default": "none",
    },
}  # fmt: skip

TEXTS = (
    "", " ", "Hello, the weather in Paris!", "aaaaaaa ababababa baaab",
    "  two  spaces\n\n\nlines\r\n", "1234 and 5.6e7", "naïve façade, Straße, 漢字",
    "\U0001f469\u200d\U0001f469\u200d\U0001f467", "[INST]typed[/INST]</s>", "\tx = {'a': 1}\n",
    "nothing and anything, information", "'s 'LL it's", "a\u0301 ǅ Ω\u200b",
)  # fmt: skip

CALL = {
    "id": "abcdefghi", "type": "function",
    "function": {"name": "get_weather", "arguments": '{"location":  "Paris", "é": 1}'},
}  # fmt: skip
OTHER_CALL = {
    "id": "123456789", "type": "function", "function": {"name": "now", "arguments": "{}"},
}  # fmt: skip
TOOLS = [
    {"type": "function", "function": {
        "name": "get_weather", "description": "The weather.", "parameters": {
            "type": "object", "properties": {"location": {"type": "string"}},
            "required": ["location"],
        },
    }},
    {"type": "function", "function": {
        "name": "now", "parameters": {"type": "object", "properties": {}},
    }},
]  # fmt: skip


def _user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def _assistant(content: str | None = None, *calls: Any, **more: Any) -> dict[str, Any]:
    message = {"role": "assistant", "content": content, **more}
    return message | ({"tool_calls": list(calls)} if calls else {})


def _system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


def _result(id: str, content: str) -> dict[str, Any]:
    return {"role": "tool", "tool_call_id": id, "content": content}


CALLED = [
    _system("Be brief."), _user("Weather?"), _assistant(None, CALL, OTHER_CALL),
    _result("123456789", '{"hour":12}'), _result("abcdefghi", "sunny, 20°"),
]  # fmt: skip
CHATS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]] = {
    "user": ([_user("Hello")], None),
    "system": ([_system("Be brief."), _user("Hello")], None),
    "turns": ([_user("Hello"), _assistant("Hi there.  "), _user("and again"), _assistant("Yes"),
               _user("the end")], None),
    "systems": ([_system("One."), _system("Two."), _user("Hello"), _assistant("Hi"), _user("More")],
                None),
    "neighbours": ([_user("One"), _user(""), _user("Two"), _assistant("Three"), _assistant("Four"),
                    _user("Five")], None),
    "tools": ([_user("Hello"), _assistant("Hi"), _user("Weather?")], TOOLS),
    "calls": (CALLED, TOOLS),
    "after calls": ([*CALLED, _assistant("Sunny."), _user("Thanks")], TOOLS),
    "one call": (
        [_user("Time?"), _assistant(None, OTHER_CALL), _result("123456789", "12.50")], TOOLS,
    ),
}  # fmt: skip
"""Name → messages, tools."""
ONLY: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None, tuple[str, ...]]] = {
    "content and call": (
        [_user("Weather?"), _assistant("Let me see. ", CALL), _result("abcdefghi", "sunny")],
        TOOLS, VERSIONS[1:],
    ),
    "spaces": ([_user("Hello"), _assistant("  "), _user("Again")], None, VERSIONS),
    "late system": ([_user("Hello"), _system("Be brief."), _user("Again")], None, VERSIONS),
    "reasoning": (
        [_user("Why?"), _assistant("Because. ", reasoning_content="Hm."), _user("Really?")],
        None, ("v13", "v15"),
    ),
    "reasoning and call": (
        [_user("Time?"), _assistant(None, OTHER_CALL, reasoning_content="Look."),
         _result("123456789", "12")], TOOLS, ("v13", "v15"),
    ),
    "joined reasoning": (
        [_user("Why?"), _assistant("One.", reasoning_content="Hm."),
         _assistant("Two.", reasoning_content="So."), _assistant("Three."), _user("Really?")],
        None, ("v13", "v15"),
    ),
}  # fmt: skip
"""Name → messages, tools, and the versions that have such chats."""


def write_tekken(folder: Path, version: str, /, **changes: Any) -> Path:
    """Write tekken.json. changes: fields of its object config that are others."""
    tokens = [bytes([byte]) for byte in range(256)]
    for word in WORDS:
        data = word.encode()
        tokens += [part for end in range(2, len(data) + 1) if (part := data[:end]) not in tokens]
    size = len(tokens)
    tokens += [f"~{number}~".encode() for number in range(PADDING)]
    content: dict[str, Any] = {
        "config": {
            "pattern": PATTERN, "num_vocab_tokens": len(tokens),
            "default_vocab_size": size + SPECIALS, "default_num_special_tokens": SPECIALS,
            "version": version, **changes,
        },
        "vocab": [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ],
    }  # fmt: skip
    if version in LATER:
        content["special_tokens"] = [
            {"rank": rank, "token_str": token, "is_control": True}
            for rank, token in enumerate((*LISTED, *LATER[version]))
        ]
    if version == "v15":
        content["model_settings_builder"] = SETTINGS
    (folder / "tekken.json").write_text(json.dumps(content))
    return folder


def chats(version: str) -> dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]] | None]]:
    """Return the chats that a version has, by name."""
    own = {name: (chat, tools) for name, (chat, tools, of) in ONLY.items() if version in of}
    return CHATS | own
