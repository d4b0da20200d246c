"""`rejection_sample_method: standard`, served: tokens are distributed as the model says."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from drafted import config_of, greedy, serve
from rank_executor import Plugin as Ranks

from jackfield.core.registry import Provenance, load_plugins

from helpers import VOCAB, make_checkpoint, reference_model

BINS = 20
Folders = tuple[Path, Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    """A model, and one that says nearly the same."""
    target = make_checkpoint("qwen3", tmp_path_factory.mktemp("target"))
    model = reference_model(target)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "layers.2" in name:
                weight.add_(0.6 * weight.std().nan_to_num(0.1) * torch.randn_like(weight))
    draft = tmp_path_factory.mktemp("draft")
    model.save_pretrained(draft)
    return target, draft


def speculative(folders: Folders, **more: Any) -> dict[str, Any]:
    return {
        "method": "draft_model", "model": str(folders[1]), "num_speculative_tokens": 3,
        "rejection_sample_method": "standard", "adaptive_width": False, **more,
    }  # fmt: skip


def distance(model: Any, asked: list[Any], served: list[list[int]], temperature: float) -> float:
    """Chi-square of where tokens lie in the model's distribution, tokens in order of probability:
    uniform if they are drawn from it."""
    draw = random.Random(3)
    seen = torch.zeros(BINS)
    for (prompt, _), tokens in zip(asked, served, strict=True):
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens[:-1]])).logits[0, len(prompt) - 1 :]
        probs, order = (logits.double() / temperature).softmax(-1).sort(descending=True)
        above = probs.cumsum(-1) - probs
        places = (order == torch.tensor(tokens)[:, None]).int().argmax(-1, keepdim=True)
        shares = above.gather(1, places) + probs.gather(1, places) * draw.random()
        seen += torch.histc(shares.float(), BINS, 0.0, 1.0)
    expected = seen.sum() / BINS
    return float(((seen - expected) ** 2 / expected).sum())


async def test_tokens_have_the_models_distribution(folders: Folders) -> None:
    """Beside greedy rows, which stay as they are, and penalized ones. Chi-square at 1e-5 over 19
    degrees of freedom is 58.6."""
    draw = random.Random(1)
    prompts = [[draw.randrange(3, VOCAB) for _ in range(draw.randrange(2, 9))] for _ in range(240)]
    sampled = [
        (prompt, greedy(temperature=0.9, seed=number, max_tokens=8))
        for number, prompt in enumerate(prompts)
    ]
    others = [(prompt, greedy(max_tokens=8)) for prompt in prompts[:20]]
    penalized = [
        (prompt, greedy(max_tokens=8, presence_penalty=1.0, seed=7, top_k=1, temperature=0.5))
        for prompt in prompts[:20]
    ]
    asked = [*sampled, *others, *penalized]
    wide = {"max_num_seqs": 40, "max_num_batched_tokens": 256, "num_gpu_blocks_override": 300}
    config = config_of(folders[0], speculative_config=speculative(folders), **wide)
    served, stats = await serve(config, asked)
    plain, _ = await serve(config_of(folders[0], **wide), asked[240:])
    assert served[240:] == plain
    assert distance(reference_model(folders[0]), sampled, served[:240], 0.9) < 58.6
    accepted, drafted = stats.spec_decode_num_accepted_tokens, stats.spec_decode_num_draft_tokens
    assert 0.2 * drafted < accepted < 0.95 * drafted


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("options", [{}, {"top_k": VOCAB - 1}, {"presence_penalty": 1e-6}])
async def test_kernels_and_recorded_steps_on_a_gpu(
    options: dict[str, Any], folders: Folders
) -> None:
    """Options that change nothing, but are not recorded, or are sampled place by place."""
    draw = random.Random(1)
    asked = [
        (
            [draw.randrange(3, VOCAB) for _ in range(draw.randrange(2, 9))],
            greedy(temperature=0.9, seed=number, max_tokens=12, **options),
        )
        for number in range(600)
    ]
    kernels = {"operations": "triton", "attention_backend": "triton", "device": "cuda"}
    wide = {
        "max_num_seqs": 64, "max_num_batched_tokens": 512, "num_gpu_blocks_override": 300,
        "block_size": 16,
    }  # fmt: skip
    config = config_of(folders[0], speculative_config=speculative(folders), **wide, **kernels)
    served, stats = await serve(config, asked)
    assert distance(reference_model(folders[0]), asked, served, 0.9) < 58.6
    accepted, drafted = stats.spec_decode_num_accepted_tokens, stats.spec_decode_num_draft_tokens
    assert 0.2 * drafted < accepted < 0.95 * drafted


async def test_a_wrong_distribution_is_found(folders: Folders) -> None:
    """The test above can fail: here drafts' own distribution is served."""
    draw = random.Random(1)
    asked = [
        ([draw.randrange(3, VOCAB) for _ in range(5)], greedy(temperature=0.9, seed=n))
        for n in range(80)
    ]
    served, _ = await serve(config_of(folders[1]), asked)
    assert distance(reference_model(folders[0]), asked, served, 0.9) > 58.6


async def test_the_most_probable_drafts(folders: Folders) -> None:
    """With draft_sample_method greedy, tokens are those without drafts, under both methods."""
    asked = [([5 + n, 6, 7], greedy(temperature=0.7, seed=n)) for n in range(4)]
    plain, _ = await serve(config_of(folders[0]), asked)
    for method in ("coupled", "standard"):
        own = speculative(folders, draft_sample_method="greedy", rejection_sample_method=method)
        served, stats = await serve(config_of(folders[0], speculative_config=own), asked)
        assert served == plain
        assert stats.spec_decode_num_accepted_tokens > 0


@pytest.mark.parametrize("size", [None, pytest.param(1, marks=pytest.mark.slow)])
async def test_ranks_decide_alike(size: int | None, folders: Folders) -> None:
    """Each rank has the whole distributions. If one kept another number of drafts, their halves of
    the model would read different tokens."""
    plugins = load_plugins()
    plugins.add_plugin(Ranks(), Provenance("tests", "0", "rank_threads"))
    own = speculative(folders, draft_tensor_parallel_size=size)
    draw = random.Random(2)
    asked = [
        (
            [draw.randrange(3, VOCAB) for _ in range(5)],
            greedy(temperature=0.9, seed=n, max_tokens=8),
        )
        for n in range(90)
    ]
    shared: dict[str, Any] = {"tensor_parallel_size": 2, "executor": "rank_threads"}
    config = config_of(folders[0], speculative_config=own, max_num_seqs=16, **shared)
    served, stats = await serve(config, asked, plugins)
    assert distance(reference_model(folders[0]), asked, served, 0.9) < 58.6
    assert stats.spec_decode_num_accepted_tokens > 0


async def test_without_weights_both_methods_are_one(folders: Folders) -> None:
    """Text that repeats itself has no distribution of its own: a token is kept while it is sampled
    under either method."""
    asked = [([5, 6] * 5, greedy(temperature=0.3, seed=n)) for n in range(4)]
    plain, _ = await serve(config_of(folders[0]), asked)
    own = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}
    own |= {"rejection_sample_method": "standard", "adaptive_width": False}
    served, stats = await serve(config_of(folders[0], speculative_config=own), asked)
    assert served == plain
    assert stats.spec_decode_num_draft_tokens > 0
