"""Medusa and MLP speculators: heads on the last hidden state, without a cache."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from draft_heads import Random, Tensors, all_states, write
from drafted import HiddenStates, check_drafts, config_of, requests, serve
from torch.nn.functional import gelu, silu

from jackfield.core.errors import ConfigError

from helpers import COMMON, VOCAB, make_checkpoint, reference_model

SIZE = COMMON["hidden_size"]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("target"))


def last_state(target: HiddenStates, known: list[int]) -> torch.Tensor:
    """Of the token before the newest one, after the final norm."""
    return target.of(known[:-1])[-1][-1]


@pytest.mark.parametrize("form", ["own heads", "one head", "few tokens"])
async def test_medusa(form: str, target: Path, tmp_path: Path) -> None:
    draw, count, layers = Random(6), 3, 2
    drafted = 70 if form == "few tokens" else VOCAB
    tensors: Tensors = {
        f"medusa_heads.blocks.{h}.layers.{n}.weight": draw.matrix(SIZE, SIZE)
        for h in range(count) for n in range(layers)
    }  # fmt: skip
    config: dict[str, Any] = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": SIZE,
        "num_heads": count, "num_hidden_layers": layers, "vocab_size": VOCAB,
    }  # fmt: skip
    if form == "one head":
        config["original_lm_head"] = True
        tensors["medusa_heads.lm_head.weight"] = draw.matrix(VOCAB, SIZE)
    else:
        tensors |= {
            f"medusa_heads.lm_heads.{h}.weight": draw.matrix(drafted, SIZE) for h in range(count)
        }
    token_map = torch.arange(VOCAB)
    if form == "few tokens":
        config["truncated_vocab_size"] = drafted
        token_map = torch.randperm(VOCAB, generator=torch.Generator().manual_seed(1))[:drafted]
        tensors["token_map"] = token_map
    head = write(tmp_path / "head", tensors, config)
    states = all_states(reference_model(target))

    def reference(known: list[int], _: int) -> list[int]:
        drafts = []
        for h in range(count):
            x = last_state(states, known)
            for n in range(layers):
                x = x + silu(tensors[f"medusa_heads.blocks.{h}.layers.{n}.weight"] @ x)
            own = f"medusa_heads.lm_heads.{h}.weight"
            logits = tensors.get(own, tensors.get("medusa_heads.lm_head.weight")) @ x
            drafts.append(int(token_map[int(logits.argmax())]))
        return drafts

    await check_drafts(target, {"method": "medusa", "model": str(head)}, reference)


@pytest.mark.parametrize(("tied", "scaled"), [(False, False), (True, True)])
async def test_mlp_speculator(tied: bool, scaled: bool, target: Path, tmp_path: Path) -> None:
    draw, count, inner = Random(7), 3, 48
    tensors: Tensors = {}
    for h in range(count):
        source = 0 if tied and h else None
        for name, made in (
            ("emb", lambda: {"weight": draw.matrix(VOCAB, inner)}),
            ("ln", lambda: {"weight": draw.norm(inner), "bias": draw.norm(inner)}),
            ("head", lambda: {"weight": draw.matrix(VOCAB, inner)}),
        ):
            for leaf, tensor in made().items():
                first = tensors.get(f"speculator.{name}.{source}.{leaf}")
                tensors[f"speculator.{name}.{h}.{leaf}"] = (
                    tensor if first is None else first.clone()
                )
        second = tensors.get("speculator.proj.1.weight") if tied and h > 1 else None
        own = draw.matrix(inner, inner if h else SIZE)
        tensors[f"speculator.proj.{h}.weight"] = own if second is None else second.clone()
    config = {
        "architectures": ["MLPSpeculatorPreTrainedModel"], "model_type": "mlp_speculator",
        "emb_dim": SIZE, "inner_dim": inner, "n_predict": count, "vocab_size": VOCAB,
        "tie_weights": tied, "scale_input": scaled,
    }  # fmt: skip
    head = write(tmp_path / "head", tensors, config)
    states = all_states(reference_model(target))
    weight = 0.5 ** (0.5 / count)
    factor = ((1 - weight**2) * (inner / 2)) ** 0.5 / weight

    def normed(x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean() + 1e-6)

    def reference(known: list[int], _: int) -> list[int]:
        token, drafts, state = known[-1], [], last_state(states, known)
        state = normed(state) / 2**0.5 if scaled else state
        for h in range(count):
            part = {n: tensors[f"speculator.{n}.{h}.weight"] for n in ("emb", "proj", "ln", "head")}
            state = part["proj"] @ state + factor * part["emb"][token]
            state = gelu(normed(state) * part["ln"] + tensors[f"speculator.ln.{h}.bias"])
            token = int((part["head"] @ state).argmax())
            drafts.append(token)
        return drafts

    await check_drafts(target, {"method": "mlp_speculator", "model": str(head)}, reference)
    # The checkpoint says which method it is for, and how many drafts there are.
    config_ = config_of(target, speculative_config={"model": str(head)})
    _, stats = await serve(config_, requests(2))
    assert max(stats.spec_decode_num_accepted_tokens_per_pos) == count - 1
    config_ = config_of(
        target, speculative_config={"model": str(head), "num_speculative_tokens": count + 1}
    )
    with pytest.raises(ConfigError, match=f"has {count} MLPs"):
        await serve(config_, requests(1))


async def test_heads_without_a_cache_go_with_kv_compression(target: Path, tmp_path: Path) -> None:
    """They read states of positions, which stay as they are when tokens leave the cache."""
    draw, count = Random(6), 3
    tensors: Tensors = {
        f"blocks.{h}.layers.0.weight": 0.01 * draw.matrix(SIZE, SIZE) for h in range(count)
    }
    tensors |= {f"lm_heads.{h}.weight": draw.matrix(VOCAB, SIZE) for h in range(count)}
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": SIZE,
        "num_heads": count, "num_hidden_layers": 1, "vocab_size": VOCAB,
    }  # fmt: skip
    head = write(tmp_path / "head", tensors, config)
    options: dict[str, Any] = {
        "kv_compression": "snap_kv", "kv_compression_budget": 16, "kv_compression_interval": 6,
        "enable_prefix_caching": False,
    }  # fmt: skip
    asked, few = requests(), [11, 40, 63]
    asked = [
        (prompt, msgspec.structs.replace(params, allowed_token_ids=few)) for prompt, params in asked
    ]
    speculative = {"method": "medusa", "model": str(head), "adaptive_width": False}
    plain, before = await serve(config_of(target, **options), asked)
    drafted, after = await serve(
        config_of(target, speculative_config=speculative, **options), asked
    )
    assert drafted == plain
    assert after.spec_decode_num_accepted_tokens > 0
    assert before.kv_compactions > 0 and after.kv_compactions > 0
