"""From conversations to tokens: the chat format in Python, and the tokenizer.

`segments` writes what the chat template writes, but says which parts the model learns; a test holds
the two together.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from generator import Example
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB_SIZE = 1536
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
MARKUP = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
          "</tool_response>"]  # fmt: skip
NO_THOUGHT = "<think>\n\n</think>\n\n"


def segments(example: Example) -> list[tuple[str, bool]]:
    """(text, learned) parts of the whole conversation; the last learned part is the answer."""
    parts: list[tuple[str, bool]] = []
    messages = list(example.messages)
    system = messages.pop(0)["content"] if messages[0]["role"] == "system" else None
    if example.tools:
        tools = "".join("\n" + json.dumps(tool, ensure_ascii=False) for tool in example.tools)
        head = f"{system}\n\n" if system is not None else ""
        parts.append(
            (f"<|im_start|>system\n{head}# Tools\n<tools>{tools}\n</tools><|im_end|>\n", False)
        )
    elif system is not None:
        parts.append((f"<|im_start|>system\n{system}<|im_end|>\n", False))
    for index, message in enumerate(messages):
        last = index == len(messages) - 1
        if message["role"] == "assistant":
            prompt = "<|im_start|>assistant\n"
            if last and example.thinking is False:
                prompt += NO_THOUGHT
            parts.append((prompt, False))
            parts.append((answer_text(message) + "<|im_end|>", True))
            parts.append(("\n", False))
        elif message["role"] == "tool":
            response = f"<tool_response>\n{message['content']}\n</tool_response>"
            parts.append((f"<|im_start|>user\n{response}<|im_end|>\n", False))
        else:
            parts.append(
                (f"<|im_start|>{message['role']}\n{message['content']}<|im_end|>\n", False)
            )
    return parts


def answer_text(message: dict) -> str:
    """An assistant message as the model writes it."""
    text = message["content"]
    for call in message.get("tool_calls") or []:
        function = call["function"]
        arguments = json.dumps(function["arguments"], ensure_ascii=False)
        name = json.dumps(function["name"], ensure_ascii=False)
        text += "\n" if text else ""
        text += f'<tool_call>\n{{"name": {name}, "arguments": {arguments}}}\n</tool_call>'
    return text


def train_tokenizer(texts: Iterable[str]) -> Tokenizer:
    """Byte-level BPE; every digit is a token of its own, so that sums can be learnt."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\d"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(SPECIAL) - len(MARKUP),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True) for text in SPECIAL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in MARKUP])
    return tokenizer


def encode(tokenizer: Tokenizer, example: Example) -> tuple[list[int], list[bool]]:
    """→ token ids, and which of them are learned."""
    token_ids: list[int] = []
    learned: list[bool] = []
    for text, learn in segments(example):
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        token_ids += ids
        learned += [learn] * len(ids)
    return token_ids, learned


def save_tokenizer(tokenizer: Tokenizer, folder: Path, max_length: int) -> None:
    """tokenizer.json and tokenizer_config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
        "bos_token": None,
        "model_max_length": max_length,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
