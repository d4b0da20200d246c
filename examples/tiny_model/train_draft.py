"""Trains the embedded model's EAGLE-3 head from the same generated text, on a CPU, in minutes.

    python train_draft.py --out DIR

Writes a draft checkpoint as SpecForge does: `jackfield serve MODEL --speculative-config
'{"model": "DIR", "num_speculative_tokens": 3}'`. It learns as it is used (Li, Wei, Zhang, Zhang
2025, arXiv 2503.01840): a second and third pass go on from the head's own states, and what they
predict is compared with the model's own distributions.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import random
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from generator import examples
from safetensors.torch import load_file, save_file
from text import encode
from tokenizers import Tokenizer
from torch import nn
from transformers import Qwen3ForCausalLM

EMBEDDED = Path(__file__).resolve().parents[2] / "plugins/models/embedded"
LAYERS = (1, 3, 5)
"""Of the target, whose inputs the head reads."""
HEADS, KV_HEADS, HEAD_DIM, INNER = 6, 3, 32, 512
LONGEST = 256
DECAY = 0.8
"""Weight of each pass's loss, relative to the one before."""


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(size)), eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


class Attention(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.q_proj = nn.Linear(2 * size, HEADS * HEAD_DIM, bias=False)
        self.k_proj = nn.Linear(2 * size, KV_HEADS * HEAD_DIM, bias=False)
        self.v_proj = nn.Linear(2 * size, KV_HEADS * HEAD_DIM, bias=False)
        self.o_proj = nn.Linear(HEADS * HEAD_DIM, size, bias=False)

    def forward(
        self, x: torch.Tensor, shift: int, earlier: list[tuple[torch.Tensor, torch.Tensor]]
    ) -> torch.Tensor:
        """Pass `shift`, whose row p is at position p + shift: it sees the first pass up to p, and
        each later one at p. earlier: keys and values of the passes so far; this one's is added."""
        batch, count, _ = x.shape

        def heads(projected: torch.Tensor) -> torch.Tensor:
            return projected.view(batch, count, -1, HEAD_DIM).transpose(1, 2)

        query = rotated(heads(self.q_proj(x)), shift)
        key, value = rotated(heads(self.k_proj(x)), shift), heads(self.v_proj(x))
        groups = HEADS // KV_HEADS
        earlier.append((key.repeat_interleave(groups, 1), value.repeat_interleave(groups, 1)))
        keys, values = earlier[0]
        mask = torch.full((count, count), float("-inf")).triu(1)
        scores = [query @ keys.transpose(2, 3) + mask]
        scores += [(query * key).sum(-1, keepdim=True) for key, _ in earlier[1:]]
        weights = (torch.cat(scores, -1) * HEAD_DIM**-0.5).softmax(-1)
        out = weights[..., :count] @ values
        for number, (_, value) in enumerate(earlier[1:]):
            out = out + weights[..., count + number, None] * value
        projected: torch.Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, count, -1))
        return projected


def rotated(heads: torch.Tensor, shift: int) -> torch.Tensor:
    places = torch.arange(heads.shape[2]) + shift
    angles = torch.outer(places.float(), 10000.0 ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM))
    first, second = heads.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


class MLP(nn.Module):
    def __init__(self, size: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(size, INNER, bias=False)
        self.up_proj = nn.Linear(size, INNER, bias=False)
        self.down_proj = nn.Linear(INNER, size, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Layer(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm, self.hidden_norm = RMSNorm(size, eps), RMSNorm(size, eps)
        self.post_attention_layernorm = RMSNorm(size, eps)
        self.self_attn, self.mlp = Attention(size), MLP(size)

    def forward(
        self, embedded: torch.Tensor, hidden: torch.Tensor, shift: int,
        earlier: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:  # fmt: skip
        both = torch.cat((self.input_layernorm(embedded), self.hidden_norm(hidden)), -1)
        hidden = hidden + self.self_attn(both, shift, earlier)
        out: torch.Tensor = hidden + self.mlp(self.post_attention_layernorm(hidden))
        return out


class Head(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.fc = nn.Linear(len(LAYERS) * size, size, bias=False)
        self.midlayer = Layer(size, eps)
        self.norm = RMSNorm(size, eps)


def batches(tokenizer: Tokenizer, count: int, tokens: int) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield token ids [B, T] and which of them are answers, of conversations of similar lengths."""
    rows = []
    for example in itertools.islice(examples(3, "train"), count):
        token_ids, learned = encode(tokenizer, example)
        if len(token_ids) <= LONGEST:
            rows.append((token_ids, learned))
    rows.sort(key=lambda row: len(row[0]))
    together: list[list[tuple[list[int], list[bool]]]] = [[]]
    for row in rows:
        if (len(together[-1]) + 1) * len(row[0]) > tokens:
            together.append([])
        together[-1].append(row)
    draw = random.Random(1)
    while True:
        draw.shuffle(together)
        for batch in together:
            length = max(len(token_ids) for token_ids, _ in batch)
            ids = torch.zeros(len(batch), length, dtype=torch.int64)
            answers = torch.zeros(len(batch), length, dtype=torch.bool)
            for number, (token_ids, learned) in enumerate(batch):
                ids[number, : len(token_ids)] = torch.tensor(token_ids)
                answers[number, : len(learned)] = torch.tensor(learned)
            yield ids, answers


def train(args: argparse.Namespace) -> None:
    start = time.monotonic()
    torch.manual_seed(0)
    target = Qwen3ForCausalLM.from_pretrained(EMBEDDED, dtype=torch.float32).eval()
    target.requires_grad_(False)
    size, eps = target.config.hidden_size, target.config.rms_norm_eps
    head = Head(size, eps)
    if args.start is not None:
        head.load_state_dict(load_file(args.start / "model.safetensors"))
    optimizer = torch.optim.AdamW(head.parameters(), lr=args.rate, betas=(0.9, 0.98))
    tokenizer = Tokenizer.from_file(str(EMBEDDED / "tokenizer.json"))
    made = batches(tokenizer, args.examples, args.batch_tokens)
    right = torch.zeros(args.passes)
    for step, (ids, answers) in enumerate(made):
        progress = max(step / args.steps, (time.monotonic() - start) / args.max_seconds)
        if progress >= 1:
            break
        for group in optimizer.param_groups:
            group["lr"] = args.rate * min(1, (step + 1) / 50) * math.cos(math.pi / 2 * progress)
        with torch.no_grad():
            out = target(ids, output_hidden_states=True, use_cache=False)
            states = torch.cat([out.hidden_states[layer] for layer in LAYERS], -1)
            wanted = out.logits.log_softmax(-1)
        hidden, earlier, loss = head.fc(states), [], torch.zeros(())
        for shift in range(args.passes):
            # Row p has read token p + 1 + shift, and predicts the one after it.
            last = ids.shape[1] - 2 - shift
            embedded = target.model.embed_tokens(F.pad(ids[:, 1 + shift :], (0, 1 + shift)))
            hidden = head.midlayer(embedded, hidden, shift, earlier)
            counted = answers[:, 2 + shift :]
            found = F.linear(head.norm(hidden[:, :last][counted]), target.lm_head.weight)
            teacher = wanted[:, 1 + shift : 1 + shift + last][counted]
            loss = loss + DECAY**shift * F.kl_div(
                found.log_softmax(-1), teacher, log_target=True, reduction="batchmean"
            )
            agree = (found.argmax(-1) == teacher.argmax(-1)).float().mean()
            right[shift] += 0.02 * (agree.detach() - right[shift])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if step % 100 == 0:
            rates = " ".join(f"{rate:.2f}" for rate in right.tolist())
            print(f"{time.monotonic() - start:.0f} s: step {step}, loss {loss.item():.3f}, "
                  f"agreement per pass {rates}", flush=True)  # fmt: skip
        if step % 500 == 499:
            export(head, target, args.out)
    export(head, target, args.out)
    print(f"{time.monotonic() - start:.0f} s: done after {step} steps", flush=True)


def export(head: Head, target: Qwen3ForCausalLM, folder: Path) -> None:
    """bfloat16 safetensors and config.json; embeddings and head are the target's."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: tensor.to(torch.bfloat16) for name, tensor in head.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    config = target.config
    facts = {
        "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "dtype": "bfloat16",
        "hidden_size": config.hidden_size, "intermediate_size": INNER, "num_hidden_layers": 1,
        "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
        "hidden_act": "silu", "rms_norm_eps": config.rms_norm_eps, "rope_theta": 10000.0,
        "max_position_embeddings": config.max_position_embeddings, "tie_word_embeddings": False,
        "vocab_size": config.vocab_size, "draft_vocab_size": config.vocab_size,
        "eagle_aux_hidden_state_layer_ids": list(LAYERS),
        "speculators_config": {"proposal_methods": [{"speculative_tokens": 3}]},
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(facts, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--start", type=Path, help="go on from this head")
    parser.add_argument("--examples", type=int, default=40_000)
    parser.add_argument("--batch-tokens", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=4_000)
    parser.add_argument("--max-seconds", type=float, default=1e9)
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--rate", type=float, default=2e-3)
    train(parser.parse_args())


if __name__ == "__main__":
    main()
