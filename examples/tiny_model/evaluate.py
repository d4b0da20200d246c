"""Scores a checkpoint on held-out prompts, kind by kind, with greedy decoding in `transformers`.

    python evaluate.py DIR [--count 200] [--scores scores.json]

talk, facts, copy: the answer is the expected text. arithmetic, reasoning: its last number is right.
json: parsed, it equals the expected object. tools: the call's name and arguments are equal, or the
expected text where none is due.
"""

from __future__ import annotations

import argparse
import itertools
import json
import re
from pathlib import Path

import torch
from generator import KINDS, Example, examples
from text import segments
from tokenizers import Tokenizer
from transformers import Qwen3ForCausalLM

BATCH = 100


def prompt(example: Example) -> str:
    parts = segments(example)
    last = max(index for index, (_, learned) in enumerate(parts) if learned)
    return "".join(text for text, _ in parts[:last])


def correct(example: Example, text: str) -> bool:
    """Judge one answer."""
    text = text.partition("<|im_end|>")[0]
    expected = example.accept[0]
    if example.kind == "reasoning" and not text.startswith("<think>"):
        return False
    if example.kind in ("arithmetic", "reasoning"):
        numbers = re.findall(r"-?\d+", text.rpartition("</think>")[2])
        return bool(numbers) and numbers[-1] == expected
    call = re.search(r"<tool_call>\n(.*)\n</tool_call>", text)
    if example.kind == "json" or (example.kind == "tools" and expected.startswith("{")):
        try:
            value = json.loads(call.group(1) if call else text)
        except ValueError:
            return False
        return value == json.loads(expected) and (example.kind == "json") == (call is None)
    return text.strip() == expected


@torch.inference_mode()
def answer(model: Qwen3ForCausalLM, tokenizer: Tokenizer, prompts: list[str]) -> list[str]:
    """Greedy answers, special tokens shown."""
    encoded = [tokenizer.encode(p, add_special_tokens=False).ids for p in prompts]
    width = max(map(len, encoded))
    pad = model.config.pad_token_id
    ids = torch.tensor([[pad] * (width - len(e)) + e for e in encoded], device=model.device)
    mask = torch.tensor([[0] * (width - len(e)) + [1] * len(e) for e in encoded],
                        device=model.device)  # fmt: skip
    out = model.generate(ids, attention_mask=mask, do_sample=False, max_new_tokens=160)
    return [tokenizer.decode(row[width:].tolist(), skip_special_tokens=False) for row in out]


def evaluate(folder: Path, count: int, seed: int = 99) -> dict[str, float]:
    """Kind → share of held-out prompts answered right."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.to("cuda" if torch.cuda.is_available() else "cpu")
    scores = {}
    for kind in KINDS:
        cases = list(itertools.islice(examples(seed, "held-out", kind), count))
        right = 0
        for start in range(0, count, BATCH):
            part = cases[start : start + BATCH]
            texts = answer(model, tokenizer, [prompt(e) for e in part])
            judged = [correct(e, t) for e, t in zip(part, texts, strict=True)]
            right += sum(judged)
            wrong = [(e, t) for e, t, ok in zip(part, texts, judged, strict=True) if not ok]
            for example, text in wrong[:1]:
                question = example.messages[-2]["content"]
                print(f"  wrong: {question!r} -> {text[:150]!r}, not {example.accept[0]!r}")
        scores[kind] = round(right / count, 4)
        print(f"{kind:12} {scores[kind]:.1%}", flush=True)
    return scores


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--scores", type=Path)
    args = parser.parse_args()
    scores = evaluate(args.folder, args.count)
    if args.scores:
        args.scores.write_text(json.dumps({"count": args.count, **scores}, indent=2) + "\n")


if __name__ == "__main__":
    main()
