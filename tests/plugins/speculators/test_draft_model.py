"""A second model drafts: the served model's tokens, from the drafts of `transformers`' greedy
search."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drafted import check_drafts, config_of, greedy, requests, serve
from nights import some_by_day
from rank_executor import Plugin as Ranks
from test_mtp import LATENT

from jackfield.core.errors import ConfigError
from jackfield.core.registry import Provenance, load_plugins

from helpers import COMMON, greedy_reference, make_checkpoint, reference_model

Folders = Callable[[str], Path]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Folders:
    made: dict[str, Path] = {}

    def folder(name: str) -> Path:
        if name not in made:
            path = tmp_path_factory.mktemp(name)
            made[name] = latents(path) if name == "latents" else make_checkpoint(name, path)
        return made[name]

    return folder


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of other sizes, with as many tokens and a shorter context."""
    torch.manual_seed(3)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_key_value_heads": 1, "head_dim": 8}
    config = transformers.LlamaConfig(**{**COMMON, **sizes, "max_position_embeddings": 40})
    folder = tmp_path_factory.mktemp("small")
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def latents(folder: Path) -> Path:
    torch.manual_seed(4)
    config = transformers.DeepseekV3Config(**{**COMMON, **LATENT, "first_k_dense_replace": 9})
    transformers.DeepseekV3ForCausalLM(config).save_pretrained(folder)
    return folder


def drafting(model: Path, count: int = 3, **more: Any) -> dict[str, Any]:
    return {
        "method": "draft_model", "model": str(model), "num_speculative_tokens": count, **more,
    }  # fmt: skip


@pytest.mark.parametrize("name", ["qwen3", "gemma3", "gpt-oss", "llama4"])
async def test_a_model_that_drafts_for_itself_is_always_right(name: str, folders: Folders) -> None:
    """Greedy and sampled: drafts are sampled with the noise of the target's tokens. Windows and
    chunks give their blocks back meanwhile."""
    stats = await check_drafts(folders(name), drafting(folders(name), 5))
    assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens > 0
    assert stats.prefix_cache_hits > 0


@pytest.mark.parametrize("size", [None, 1])
async def test_ranks_draft_for_themselves(size: int | None, folders: Folders) -> None:
    """Each rank has its part of the draft model, or all of it."""
    plugins = load_plugins()
    plugins.add_plugin(Ranks(), Provenance("tests", "0", "rank_threads"))
    folder, asked = folders("qwen3"), requests()
    shared: dict[str, Any] = {"tensor_parallel_size": 2, "executor": "rank_threads"}
    plain, _ = await serve(config_of(folder, **shared), asked, plugins)
    speculative = drafting(folder, adaptive_width=False, draft_tensor_parallel_size=size)
    config = config_of(folder, speculative_config=speculative, **shared)
    drafted, stats = await serve(config, asked, plugins)
    assert drafted == plain
    assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens > 0


@pytest.mark.parametrize(
    ("name", "ranks"),
    some_by_day([("qwen3", 1), ("gemma3", 1), ("qwen3", 2)], [("gemma3", 1), ("qwen3", 2)]),
)
async def test_the_last_stage_drafts(name: str, ranks: int, folders: Folders) -> None:
    """It has the draft model whole, whose layers join the cache of this stage alone."""
    plugins = load_plugins()
    plugins.add_plugin(Ranks(), Provenance("tests", "0", "rank_threads"))
    folder, asked = folders(name), requests()
    shared: dict[str, Any] = {
        "pipeline_parallel_size": 2, "tensor_parallel_size": ranks, "executor": "rank_threads",
    }  # fmt: skip
    plain, _ = await serve(config_of(folder, **shared), asked, plugins)
    config = config_of(folder, speculative_config=drafting(folder, adaptive_width=False), **shared)
    drafted, stats = await serve(config, asked, plugins)
    assert drafted == plain
    assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens > 0


@pytest.mark.parametrize(("name", "blocks"), [("qwen3", 30), ("gemma3", 50)])
async def test_another_model_drafts_what_it_would_say(
    name: str, blocks: int, folders: Folders, small: Path
) -> None:
    """In caches of other sizes, beside windows and after prefix hits, and with few blocks."""
    model = reference_model(small)

    def reference(known: list[int], count: int) -> list[int] | None:
        if len(known) + count > model.config.max_position_embeddings:
            return None
        return greedy_reference(model, known, count)[0]

    asked = requests(8, max_tokens=24)  # So many that few blocks are too few.
    stats = await check_drafts(
        folders(name), drafting(small), reference, asked=asked, num_gpu_blocks_override=blocks
    )
    assert stats.num_preemptions > 0 or name != "qwen3"


async def test_texts_longer_than_the_draft_model_reads_get_no_drafts(
    folders: Folders, small: Path
) -> None:
    """Those that grow beyond it are served to their end."""
    asked = [([5, 6, 7], greedy(max_tokens=60)), ([9] * 50, greedy(max_tokens=20))]
    stats = await check_drafts(folders("qwen3"), drafting(small, 2), asked=asked)
    assert 0 < stats.spec_decode_num_draft_tokens <= 2 * (40 - 3)
    await check_drafts(folders("qwen3"), drafting(small, 2, max_model_len=8), asked=asked)


async def test_the_method_is_that_of_the_checkpoint(folders: Folders, small: Path) -> None:
    config = config_of(
        folders("qwen3"), speculative_config={"model": str(small), "num_speculative_tokens": 2}
    )
    _, stats = await serve(config, requests(2))
    assert stats.spec_decode_num_draft_tokens > 0


COMPRESSIONS: dict[str, dict[str, Any]] = {
    "dropped": {"kv_compression": "window"},
    "levels": {"kv_compression": "window", "kv_compression_levels": "8@24,4:0.5@40"},
    "rounded": {"kv_compression_levels": "8@24"},
}


@pytest.mark.parametrize(
    ("name", "compression"),
    some_by_day(
        itertools.product(("qwen3", "gemma3", "latents"), COMPRESSIONS),
        [("gemma3", "rounded"), ("latents", "dropped"), ("qwen3", "levels")],
    ),
)
async def test_a_draft_model_keeps_a_window_when_caches_are_compacted(
    name: str, compression: str, folders: Folders
) -> None:
    """A model that drafts for itself is right as before, where the target keeps one, too: in the
    cache of either are the same tokens, in the same levels. Drafts from before may be wrong."""
    options: dict[str, Any] = {
        "enable_prefix_caching": False, "max_num_batched_tokens": 160, **COMPRESSIONS[compression],
    }  # fmt: skip
    asked = [([5 + n] * 9 + list(range(20, 60 + n)), greedy(max_tokens=36)) for n in range(3)]
    speculative = drafting(folders(name), 3)
    stats = await check_drafts(folders(name), speculative, asked=asked, **options)
    wrong = stats.spec_decode_num_draft_tokens - stats.spec_decode_num_accepted_tokens
    assert stats.kv_compactions == len(asked)
    assert wrong <= 3 * len(asked) < stats.spec_decode_num_accepted_tokens / 5


@pytest.mark.parametrize(
    ("speculative", "reason"),
    [
        ({"method": "draft_model", "num_speculative_tokens": 2}, "as model"),
        ({"num_speculative_tokens": 2}, "name a method, or the model"),
        ({"method": "ngram", "model": "x", "num_speculative_tokens": 2}, "leave model"),
        ({"method": "draft_model", "model": "small"}, "set num_speculative_tokens"),
        (
            {"model": "small", "num_speculative_tokens": 2, "draft_tensor_parallel_size": 2},
            "must be 1, or the target's",
        ),
        ({"model": "/nowhere", "num_speculative_tokens": 2}, "neither a folder"),
        ({"model": "nameless", "num_speculative_tokens": 2}, "name the method"),
        ({"model": "wide", "num_speculative_tokens": 2}, "one vocabulary"),
    ],
)
async def test_what_is_missing_is_named(
    speculative: dict[str, Any], reason: str, folders: Folders, small: Path, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text("{}")
    others: dict[str, Path] = {"small": small, "nameless": tmp_path}
    if speculative.get("model") == "wide":
        config = transformers.LlamaConfig(**{**COMMON, "vocab_size": COMMON["vocab_size"] + 8})
        transformers.LlamaForCausalLM(config).save_pretrained(tmp_path / "wide")
        others["wide"] = tmp_path / "wide"
    if (model := speculative.get("model")) in others:
        speculative = {**speculative, "model": str(others[model])}
    with pytest.raises(ConfigError, match=reason) as error:
        await serve(config_of(folders("qwen3"), speculative_config=speculative), requests(1))
    assert error.value.param == "speculative_config"
