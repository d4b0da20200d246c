"""Checkpoints with tiktoken.model: tokens are those of tiktoken itself with their pattern."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import tiktoken
from hypothesis import given, settings
from hypothesis import strategies as st

from jackfield.core.errors import LoadError
from jackfield.core.registry import load_plugins
from jackfield.core.text.tokenizer import Tokenizer
from jackfield.plugins.conformance.checkpoint_formats import TEXTS, CheckpointFormatKit

FORMATS = load_plugins()["checkpoint_format"]
WORDS = ("the", " weather", "ing", "漢字", "你好", "ß", "  ", "aaaa", "abab", "'ll", "123", "HTTP")
"""Every beginning of each is a token."""
PATTERN = (
    r"[\p{Han}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+"
    r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""As Kimi's checkpoints have it."""
TOKENS = [bytes([byte]) for byte in range(256)] + list(
    dict.fromkeys(word.encode()[:end] for word in WORDS for end in range(2, len(word.encode()) + 1))
)
FIRST = len(TOKENS)
SIZE = FIRST + 12
DECLARED = {
    FIRST: ("[BOS]", True), FIRST + 1: ("[EOS]", True), FIRST + 2: ("<|im_end|>", True),
    FIRST + 5: ("<|tool_call_begin|>", False), SIZE - 1: ("[PAD]", True),
}  # fmt: skip
LINES = b"".join(
    base64.b64encode(token) + f" {rank}\n".encode() for rank, token in enumerate(TOKENS)
)


def write(folder: Path, lines: bytes = LINES, **changes: Any) -> Path:
    config = {
        "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "vocab_size": SIZE,
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
        "max_position_embeddings": 128, "eos_token_id": FIRST + 1,
    }  # fmt: skip
    tokens = {
        "tokenizer_class": "TikTokenTokenizer", "bos_token": "[BOS]", "eos_token": "[EOS]",
        "pad_token": "[PAD]", "chat_template": "{{ messages[0].content }}<|im_end|>",
        "added_tokens_decoder": {
            str(number): {"content": text, "special": special}
            for number, (text, special) in DECLARED.items()
        },
        **changes,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokens))
    (folder / "tiktoken.model").write_bytes(lines)
    return folder


class TestTiktoken(CheckpointFormatKit):
    name = "tiktoken"

    def write(self, folder: Path) -> None:
        write(folder)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.load(str(write(tmp_path_factory.mktemp("kimi"))), formats=FORMATS)


@pytest.fixture(scope="module")
def reference() -> tiktoken.Encoding:
    names = {number: text for number, (text, _) in DECLARED.items()}
    return tiktoken.Encoding(
        name="kimi",
        pat_str=PATTERN,
        mergeable_ranks={token: rank for rank, token in enumerate(TOKENS)},
        special_tokens={
            names.get(number, f"<|reserved_token_{number}|>"): number
            for number in range(FIRST, SIZE)
        },
    )


PIECES = st.one_of(
    st.sampled_from([*WORDS, *TEXTS, "The", "'LL", "\r\n", "한글", "é", "<|im_end|>", "１２3"]),
    st.text(max_size=6),
)


@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(PIECES, max_size=8))
def test_tokens_are_those_of_tiktoken(
    pieces: list[str], tokenizer: Tokenizer, reference: tiktoken.Encoding
) -> None:
    text = "".join(pieces).encode("utf-8", "ignore").decode()
    assert tokenizer.encode(text) == reference.encode(text, allowed_special="all")
    plain = tokenizer.encode(text, allow_special=False)
    assert plain == reference.encode(text, disallowed_special=())
    assert tokenizer.decode(plain) == text


def test_all_ids_of_the_model_have_a_token(tokenizer: Tokenizer) -> None:
    ids = [FIRST + 5, FIRST + 3, FIRST + 2]
    assert tokenizer.decode(ids, skip_special_tokens=False) == (
        f"<|tool_call_begin|><|reserved_token_{FIRST + 3}|><|im_end|>"
    )
    assert "<|im_end|>" not in tokenizer.decode(ids)
    assert tokenizer.decode(ids).startswith("<|tool_call_begin|>"), "parsers read it"


@pytest.mark.parametrize(
    ("lines", "changes", "told"),
    [
        (LINES, {"tokenizer_class": "OtherTokenizer"}, "tokenizer_class 'OtherTokenizer'"),
        (LINES[:-12], {}, "tiktoken.model"),
        (LINES.replace(b"AA== 0\n", b""), {}, "tiktoken.model: its ranks"),
        (LINES, {"added_tokens_decoder": {"3": {"content": "[BOS]"}}}, f"ids from {FIRST}"),
        (LINES, {"added_tokens_decoder": {str(1 << 30): {"content": "x"}}}, f"ids from {FIRST}"),
        (LINES, {"added_tokens_decoder": {"x": {"content": "y"}}}, "cannot be read"),
        (
            LINES,
            {"added_tokens_decoder": {str(FIRST + n): {"content": "twice"} for n in (0, 1)}},
            "names a token twice",
        ),
    ],
    ids=["class", "damaged", "a byte is missing", "low id", "high id", "no id", "twice"],
)
def test_what_cannot_be_read_is_named(
    lines: bytes, changes: dict[str, Any], told: str, tmp_path: Path
) -> None:
    with pytest.raises(LoadError, match=told):
        Tokenizer.load(str(write(tmp_path, lines, **changes)), formats=FORMATS)
