"""Levels of caches of each kind, through the whole engine: log-probabilities are those of
`transformers` models whose cached tokens are rounded by hand."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import test_latent_families
import test_state_families
import torch
from rounded_cache import rounded
from test_families import checkpoint, make_reference

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.cache.level_options import CacheLevel, parse_levels
from jackfield.core.nn.kv_cache.level_cache import latent_group
from jackfield.core.worker.parts.level_moves import LevelMover

from helpers import VOCAB, interpreted, make_checkpoint, reference_model

COUNT = 20


class Watch:
    """Notes the moves of the one request, and which tokens each layer keeps of them."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.moves: list[tuple[int, list[Any], list[Any]]] = []
        """Computed tokens, moves in order, and each one's chosen tokens by target, [layers, kept,
        heads]; None: all."""
        run, choose = LevelMover.run, LevelMover._choose

        def watched_run(mover: Any, requests: Any) -> Any:
            for moves in requests:
                self.moves.append((moves.num_computed, list(moves.moves), []))
            return run(mover, requests)

        def watched_choose(mover: Any, kind: Any, moves: Any, move: Any) -> Any:
            chosen = choose(mover, kind, moves, move)
            self.moves[-1][2].append((move, [each.clone().long() for each in chosen]))
            return chosen

        monkeypatch.setattr(LevelMover, "run", watched_run)
        monkeypatch.setattr(LevelMover, "_choose", watched_choose)


class Reference:
    """A model with a cache, whose layers that see all tokens have some of them rounded."""

    def __init__(self, model: Any, levels: tuple[CacheLevel, ...]) -> None:
        self.model, self.levels = model, levels
        self.cache: Any = None
        self.computed = 0
        self.places: list[list[list[int]]] = []
        """Layer → level → places in the cache of its tokens, oldest first."""

    @torch.no_grad()
    def feed(self, tokens: list[int]) -> torch.Tensor:
        """Compute tokens → the log-probabilities of the next one."""
        positions = torch.arange(self.computed, self.computed + len(tokens))[None]
        output = self.model(
            torch.tensor([tokens]), past_key_values=self.cache, position_ids=positions,
            use_cache=True,
        )  # fmt: skip
        self.cache = output.past_key_values
        self.computed += len(tokens)
        whole = [
            layer for layer in self.cache.layers
            if getattr(layer, "keys", None) is not None and not hasattr(layer, "sliding_window")
        ]  # fmt: skip
        if not self.places:
            self.places = [[[] for _ in range(1 + len(self.levels))] for _ in whole]
        for layer, places in zip(whole, self.places, strict=True):
            length = layer.keys.shape[2]
            places[0] += range(length - len(tokens), length)
        self.whole = whole
        return output.logits[0, -1].float().log_softmax(-1)

    def move(self, moves: list[Any], chosen: list[Any]) -> None:
        for number, (layer, places) in enumerate(zip(self.whole, self.places, strict=True)):
            dropped: list[int] = []
            for move in moves:
                own = places[move.source][: move.num_tokens]
                del places[move.source][: move.num_tokens]
                index = next((each for of, each in chosen if of is move), None)
                left = set(own)
                for place, target in enumerate(move.targets):
                    kept = own
                    if index is not None:
                        assert index[place].shape[2] == 1, "heads that choose alike"
                        kept = [own[at] for at in index[place][number, :, 0].tolist()]
                    assert len(kept) == target.kept
                    left -= set(kept)
                    places[target.level] += kept
                    self._round(layer, kept, self.levels[target.level - 1].bits)
                dropped += left
            if dropped:
                length = layer.keys.shape[2]
                stay = [place for place in range(length) if place not in set(dropped)]
                layer.keys, layer.values = layer.keys[:, :, stay], layer.values[:, :, stay]
                after = {place: number for number, place in enumerate(stay)}
                for level in places:
                    level[:] = [after[place] for place in level]

    @staticmethod
    def _round(layer: Any, places: list[int], bits: int) -> None:
        """Latents are cached as keys of one head, and the channels that follow them as values."""
        if bits == 16 or not places:
            return
        parts = layer.keys[:, :, places], layer.values[:, :, places]
        if parts[0].shape[3] == parts[1].shape[3]:
            new = [rounded(part, bits) for part in parts]
        else:
            sizes = [part.shape[3] for part in parts]
            groups = torch.cat(parts, dim=3).unflatten(3, (-1, latent_group(*sizes)))
            new = [*rounded(groups, bits).flatten(3).split(sizes, dim=3)]
        layer.keys[:, :, places], layer.values[:, :, places] = new


async def check(
    folder: Path, model: Any, levels: str, monkeypatch: pytest.MonkeyPatch, *, prompt: int = 70,
    count: int = COUNT, **options: Any,
) -> None:  # fmt: skip
    draw, watch = random.Random(1), Watch(monkeypatch)
    tokens = [draw.randrange(3, min(VOCAB, model.config.vocab_size)) for _ in range(prompt)]
    config = EngineConfig(**{
        "model": str(folder), "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True,
        "max_model_len": 128, "max_num_seqs": 4, "block_size": 4, "num_gpu_blocks_override": 200,
        "kv_compression_levels": levels, "kv_compression_interval": 8, **options,
    })  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=1)
    async with AsyncEngine(config) as engine:
        watch.moves.clear()
        *_, last = [output async for output in engine.generate(tokens, params)]
        stats = engine.stats()
        engine.core.scheduler.check_invariants()
    assert last.error is None, last.error
    assert stats.kv_blocks_used == 0 and stats.kv_compactions == len(watch.moves) > 1
    (chosen,) = last.outputs

    def logprobs(moves: list[Any]) -> torch.Tensor:
        reference, rows = Reference(model, parse_levels(levels)), []
        for number in range(count):
            for computed, own, kept in moves:
                if computed == reference.computed:
                    reference.move(own, kept)
            rows.append(reference.feed(tokens if not number else [chosen.token_ids[number - 1]]))
            assert reference.computed == len(tokens) + number
        return torch.stack(rows)[range(count), chosen.token_ids]

    found = torch.tensor(
        [told[token].logprob
         for told, token in zip(chosen.logprobs, chosen.token_ids, strict=True)]
    )  # fmt: skip
    expected = logprobs(watch.moves)
    # By a machine's sums a number in the middle of two codes may get the other one.
    torch.testing.assert_close(found, expected, atol=5e-3, rtol=0.0)
    assert torch.isclose(found, expected, atol=1e-3, rtol=1e-3).sum() >= 0.9 * count
    apart = (logprobs([]) - expected).abs()
    assert float(apart.max()) > 5e-3, "nothing of importance was rounded"


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "gemma4"])
async def test_layers_that_see_all_have_levels_beside_windows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GPT-OSS has sinks; Gemma 4's heads are wider where layers see all tokens, so that all layers
    share a table, and a block has as many tokens as the narrowest one's."""
    folder = make_checkpoint(name, tmp_path)
    levels = "4@24" if name == "gemma3" else "8@24,4@40"
    await check(folder, reference_model(folder), levels, monkeypatch)


@pytest.mark.parametrize(
    "case", ["Qwen3NextForCausalLM", "Lfm3ForCausalLM", "KimiLinearForCausalLM"]
)
async def test_attention_layers_have_levels_beside_states(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lfm3 has windows besides, Kimi Linear latents."""
    reference = make_reference(case, test_state_families.CASES[case])
    folder = checkpoint(reference, case, tmp_path)
    await check(folder, reference, "8@24,4@40", monkeypatch)


@pytest.mark.parametrize("case", ["DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM"])
@pytest.mark.parametrize(
    ("backend", "levels", "policy", "count"),
    [
        ("torch", "8@16,4@40", None, COUNT),
        ("torch", "8:0.7@12,4:0.4@30", "key_norm", COUNT),
        pytest.param("triton", "8:0.7@12,4:0.4@30", "snap_kv", 4, marks=interpreted),
    ],
)
async def test_latents_have_levels(
    case: str, backend: str, levels: str, policy: str | None, count: int, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """Rounded in groups of channels, and rows of them dropped."""
    reference = make_reference(case, test_latent_families.CASES[case])
    folder = checkpoint(reference, case, tmp_path)
    await check(
        folder, reference, levels, monkeypatch, kv_compression=policy, attention_backend=backend,
        count=count, kv_compression_interval=2 if count == 4 else 8,
    )  # fmt: skip
