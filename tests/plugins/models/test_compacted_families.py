"""A compacted cache of each kind, through the whole engine: log-probabilities are those of
`transformers` models whose attention is masked to the tokens that were kept."""

from __future__ import annotations

import random
import re
from pathlib import Path
from typing import Any

import pytest
import test_latent_families
import test_state_families
import torch
from test_families import checkpoint, make_reference, score

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.hooks import hookimpl
from jackfield.core.registry import Plugins, load_plugins
from jackfield.core.worker.parts.compaction import Compactor
from jackfield.plugins.attention.torch import TorchAttention

from helpers import VOCAB, make_checkpoint, reference_model

OUTPUT = 12


class WholeTorch(TorchAttention):
    """A backend that knows of no groups: all layers share one block table."""

    cache_groups = False


class Outside:
    jackfield_api = 3

    @hookimpl
    def register_attention_backends(self, registry: Any) -> None:
        registry.add("whole", WholeTorch)


class Watch:
    """Notes which tokens every compaction keeps of every layer, by their places in the cache."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.kept: list[dict[int, torch.Tensor]] = []
        """Of each compaction: number of a layer with a paged cache → [num_kept, num_kv_heads]"""
        self.num_tokens: list[int] = []
        self.num_kept: list[int] = []
        self.readers: dict[int, int] = {}
        """Number of a layer → that of the layer whose cache it reads."""
        run, move = Compactor.run, Compactor._move

        def watched_run(compactor: Any, compactions: Any) -> Any:
            if compactions[0].slot != compactor._table.scratch_slot:
                (compaction,) = compactions
                self.num_tokens.append(compaction.num_tokens)
                self.num_kept.append(compaction.kept)
                self.kept.append({})
            return run(compactor, compactions)

        def watched_move(compactor: Any, numbers: Any, moves: Any) -> None:
            if self.kept:
                for place, number in enumerate(numbers):
                    if not compactor._layers[number].recent:
                        self.kept[-1][number] = moves.chosen[place].clone().long()
            move(compactor, numbers, moves)

        monkeypatch.setattr(Compactor, "run", watched_run)
        monkeypatch.setattr(Compactor, "_move", watched_move)

    def hidden(self, number: int, num_heads: int, length: int) -> torch.Tensor | None:
        """Which keys each query of a layer does not see, [num_heads, length, length] bool; None:
        the layer was never compacted."""
        number = self.readers.get(number, number)
        if not any(number in kept for kept in self.kept):
            return None
        first = next(kept[number] for kept in self.kept if number in kept)
        num_kv_heads = first.shape[1]
        hidden = torch.zeros(num_kv_heads, length, length, dtype=torch.bool)
        for head in range(num_kv_heads):
            held: list[int] = []
            computed = 0
            for kept, num_tokens in zip(self.kept, self.num_tokens, strict=True):
                new = num_tokens - len(held)
                held += range(computed, computed + new)
                computed += new
                held = [held[place] for place in kept[number][:, head].tolist()]
                left = torch.zeros(length, dtype=torch.bool)
                left[held] = True
                left[computed:] = True
                hidden[head, computed:] |= ~left
        return hidden.repeat_interleave(num_heads // num_kv_heads, dim=0)


@torch.no_grad()
def masked_logprobs(model: Any, tokens: list[int], watch: Watch, num_heads: int) -> torch.Tensor:
    """[tokens, vocab] of the whole sequence at once."""
    attention = [
        module for name, module in model.named_modules()
        if re.search(r"self_attn(\.\d)?$", name)
        and not isinstance(module, torch.nn.ModuleList) and "Delta" not in type(module).__name__
    ]  # fmt: skip
    hooks = []
    for number, module in enumerate(attention):
        hidden = watch.hidden(number, num_heads, len(tokens))
        if hidden is None:
            continue

        def mask(module: Any, args: Any, kwargs: Any, hidden: torch.Tensor = hidden) -> Any:
            given = kwargs["attention_mask"]
            assert given.shape[-2:] == hidden.shape[-2:] and given.is_floating_point()
            least = torch.finfo(given.dtype).min
            return args, {**kwargs, "attention_mask": given.masked_fill(hidden[None], least)}

        hooks.append(module.register_forward_pre_hook(mask, with_kwargs=True))
    logits = model(torch.tensor([tokens]), use_cache=False).logits[0]
    for hook in hooks:
        hook.remove()
    return logits.float().log_softmax(-1)


async def check(
    folder: Path, model: Any, watch: Watch, *, prompt: int = 45, count: int = OUTPUT,
    plugins: Plugins | None = None, **options: Any,
) -> Any:  # fmt: skip
    """Serve a prompt in chunks, and compare each token's log-probability → the statistics."""
    draw = random.Random(1)
    tokens = [draw.randrange(3, min(VOCAB, model.config.vocab_size)) for _ in range(prompt)]
    config = EngineConfig(**{
        "model": str(folder), "device": "cpu", "dtype": "float32", "skip_tokenizer_init": True,
        "max_model_len": 96, "max_num_seqs": 4, "max_num_batched_tokens": 16, "block_size": 4,
        "num_gpu_blocks_override": 200, "kv_compression": "key_norm",
        "kv_compression_ratio": 0.4, **options,
    })  # fmt: skip
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=1)
    async with AsyncEngine(config, plugins=plugins) as engine:
        *_, last = [output async for output in engine.generate(tokens, params)]
        stats = engine.stats()
        engine.core.scheduler.check_invariants()
    assert stats.kv_blocks_used == 0 and stats.kv_compactions == len(watch.kept) > 0
    (chosen,) = last.outputs
    sequence = tokens + chosen.token_ids
    found = torch.tensor(
        [told[token].logprob
         for told, token in zip(chosen.logprobs, chosen.token_ids, strict=True)]
    )  # fmt: skip
    heads = model.config.num_attention_heads
    rows = masked_logprobs(model, sequence, watch, heads)[prompt - 1 : -1]
    expected = rows[range(count), chosen.token_ids]
    torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)
    watch.kept, seen = [], watch.kept
    whole = masked_logprobs(model, sequence, watch, heads)[prompt - 1 : -1]
    watch.kept = seen
    apart = (whole[range(count), chosen.token_ids] - expected).abs()
    assert float(apart.max()) > 2e-3, "nothing of importance was dropped"
    return stats


REPEATED = {"kv_compression_interval": 5, "kv_compression_prompt_interval": 20}


@pytest.mark.parametrize("name", ["gemma3", "gpt-oss", "llama4"])
@pytest.mark.parametrize(
    ("backend", "policy"),
    [
        ("torch", "snap_kv"), ("whole", "key_norm"),
        pytest.param("torch", "key_norm", marks=pytest.mark.slow),
        pytest.param("whole", "snap_kv", marks=pytest.mark.slow),
    ],
)  # fmt: skip
async def test_layers_that_see_all_are_compacted_beside_windows(
    name: str, backend: str, policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In groups of their own, windows and chunks keep their blocks; otherwise their layers keep the
    most recent tokens, which are all that they see."""
    folder = make_checkpoint(name, tmp_path)
    stats = await check(
        folder, reference_model(folder), Watch(monkeypatch), prompt=60, count=OUTPUT,
        attention_backend=backend, kv_compression=policy,
        plugins=load_plugins(extra=[Outside()]),
    )  # fmt: skip
    assert stats.kv_blocks_returned > 0


@pytest.mark.parametrize("name", ["gemma3", "llama4"])
async def test_windows_go_on_after_many_compactions(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a prompt in stretches, and of what is generated; each stretch in chunks."""
    folder = make_checkpoint(name, tmp_path)
    watch = Watch(monkeypatch)
    await check(
        folder, reference_model(folder), watch, prompt=60, count=30, kv_compression_ratio=0.3,
        **REPEATED,
    )  # fmt: skip
    assert len(watch.kept) >= 2


LATENTS = ("DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "LongcatFlashForCausalLM")


ROWS = [("key_diff", {}), ("snap_kv", {}), ("expected_attention", REPEATED), ("window", REPEATED)]


@pytest.mark.parametrize(
    ("case", "policy", "more"),
    [
        # By day all policies of one family, and one policy of all.
        pytest.param(
            case, *row,
            marks=[pytest.mark.slow] * (case != "DeepseekV3ForCausalLM" and row[0] != "window"),
        )
        for case in LATENTS
        for row in ROWS
    ],
)  # fmt: skip
async def test_rows_of_latents_are_kept(
    case: str, policy: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reference = make_reference(case, test_latent_families.CASES[case])
    folder = checkpoint(reference, case, tmp_path)
    await check(folder, reference, Watch(monkeypatch), kv_compression=policy, **more)


HYBRIDS = {
    "FalconH1ForCausalLM": {}, "Qwen3NextForCausalLM": {}, "Lfm3ForCausalLM": {},
    "KimiLinearForCausalLM": {},
}  # fmt: skip


@pytest.mark.parametrize(
    ("case", "policy", "more"),
    [
        *((case, "snap_kv", REPEATED) for case in HYBRIDS),
        *(pytest.param(case, "key_norm", {}, marks=pytest.mark.slow) for case in HYBRIDS),
    ],
)
async def test_attention_layers_are_compacted_beside_states(
    case: str, policy: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Falcon-H1 has both in each layer, Lfm3 windows besides, Kimi Linear latents."""
    reference = make_reference(case, test_state_families.CASES[case])
    folder = checkpoint(reference, case, tmp_path)
    await check(folder, reference, Watch(monkeypatch), kv_compression=policy, **more)


@pytest.mark.parametrize("name", ["gemma4", "gemma3n"])
@pytest.mark.parametrize("more", [pytest.param({}, marks=pytest.mark.slow), REPEATED])
async def test_layers_of_different_sizes_are_compacted_in_one_table(
    name: str, more: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma 4's heads are wider where layers see all tokens, so that all layers share a table;
    layers that read an earlier one's cache read what is left of it."""
    folder, watch = make_checkpoint(name, tmp_path), Watch(monkeypatch)
    if name == "gemma4":
        watch.readers = {4: 3}
    await check(folder, reference_model(folder), watch, prompt=60, **more)


@pytest.mark.parametrize("policy", ["key_norm", "snap_kv"])
async def test_windows_are_compacted_with_a_connector(
    policy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks are moved as a whole, so all layers share a table; what is saved is the whole prompt:
    an equal one loads it when its blocks are gone."""
    folder = make_checkpoint("gemma3", tmp_path)
    connector = {
        "kv_connector": "cpu_offload", "kv_connector_extra_config": {"kv_offloading_size": 0.01},
    }  # fmt: skip
    stats = await check(
        folder, reference_model(folder), Watch(monkeypatch), prompt=60, kv_compression=policy,
        kv_transfer_config=connector,
    )  # fmt: skip
    assert stats.kv_blocks_returned > 0


def kinds(folder: Path, name: str) -> tuple[Path, Any]:
    if name == "gemma3":
        made = make_checkpoint(name, folder)
        return made, reference_model(made)
    cases = {**test_latent_families.CASES, **test_state_families.CASES}
    reference = make_reference(name, cases[name])
    return checkpoint(reference, name, folder), reference


@pytest.mark.parametrize("name", ["gemma3", "DeepseekV3ForCausalLM", "FalconH1ForCausalLM"])
async def test_a_prefix_stays_whole_while_its_reader_compacts(name: str, tmp_path: Path) -> None:
    """What a compacted request read is a hit for another, which is not compacted, bit for bit as
    the model says; what it computed afterwards is none."""
    folder, model = kinds(tmp_path, name)
    draw = random.Random(3)
    tokens = [draw.randrange(3, 140) for _ in range(44)]
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", skip_tokenizer_init=True, block_size=4,
        max_model_len=96, max_num_seqs=4, num_gpu_blocks_override=300, kv_compression="key_norm",
        kv_compression_ratio=0.4,
    )  # fmt: skip
    off: Any = "off"
    plain = SamplingParams(
        temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=1, kv_compression=off
    )
    short = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    async with AsyncEngine(config) as engine:

        async def serve(prompt: list[int], params: SamplingParams) -> Any:
            return [output async for output in engine.generate(prompt, params)][-1]

        compacted = await serve(tokens, short)
        assert engine.stats().kv_compactions == 1
        longer = await serve(tokens + compacted.outputs[0].token_ids, plain)
        again = await serve(tokens, plain)
        engine.core.scheduler.check_invariants()
    assert again.num_cached_tokens == 40 and 36 <= longer.num_cached_tokens <= 44
    for prompt, output in (
        (tokens, again), (tokens + compacted.outputs[0].token_ids, longer),
    ):  # fmt: skip
        (chosen,) = output.outputs
        rows = score(model, prompt + chosen.token_ids)[len(prompt) - 1 : -1]
        for row, token, told in zip(rows, chosen.token_ids, chosen.logprobs, strict=True):
            assert told[token].logprob == pytest.approx(float(row[token]), abs=1e-3)
