"""Other weights, and none for a while, under an engine that drafts."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import LLAMA, Random, write
from drafted import Proposals, config_of, greedy
from safetensors.torch import load_file, save_file
from test_mtp import CASES, LAYERS

from jackfield import AsyncEngine
from jackfield.core.errors import InvalidRequest

from helpers import COMMON, make_checkpoint

Known = dict[tuple[int, ...], list[int]]
PROMPT = [5, 6, 7, 8, 9]
LAYER = f"model.layers.{LAYERS}."


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint with a drafting layer, and the same after some training."""
    old, new = tmp_path_factory.mktemp("old"), tmp_path_factory.mktemp("new")
    CASES["Glm4MoeForCausalLM"](old)
    shutil.copytree(old, new, dirs_exist_ok=True)
    torch.manual_seed(7)
    tensors = load_file(old / "model.safetensors")
    changed = {
        name: t + 0.3 * t.std().nan_to_num(0.0) * torch.randn_like(t)
        if t.is_floating_point()
        else t
        for name, t in tensors.items()
    }
    save_file(changed, new / "model.safetensors", metadata={"format": "pt"})
    return old, new


@asynccontextmanager
async def drafting(
    folder: Path, method: str = "mtp", **more: Any
) -> AsyncIterator[tuple[AsyncEngine, Callable[[], Any]]]:
    """An engine, and what serves a prompt: → its tokens, and the drafts after each prefix."""
    proposals = Proposals(method)
    speculative = {"num_speculative_tokens": 2, "adaptive_width": False, **more}
    config = config_of(folder, speculative_config={**speculative, "method": "captured"})

    async def serve() -> tuple[list[int], Known]:
        proposals.noted.clear()
        async for out in engine.generate(PROMPT, greedy()):
            last = out
        assert last.error is None, last.error
        known = {tuple(before): drafts for before, drafts in proposals.noted}
        return list(last.outputs[0].token_ids), known

    async with AsyncEngine(config, plugins=proposals.plugins) as engine:
        yield engine, serve


def compared(one: Known, other: Known) -> int:
    """The same drafts after the same tokens, of which there are so many. Steps that found no drafts
    in time begin elsewhere."""
    both = one.keys() & other.keys()
    assert {known: one[known] for known in both} == {known: other[known] for known in both}
    return len(both)


async def by_files(engine: AsyncEngine, folder: Path) -> None:
    await engine.update_weights(folder)


async def by_tensors(engine: AsyncEngine, folder: Path) -> None:
    await engine.update_weights(load_file(folder / "model.safetensors").items())


@pytest.mark.parametrize("way", [by_files, by_tensors])
async def test_drafting_layers_of_the_checkpoint_are_updated(
    way: Callable[..., Any], folders: tuple[Path, Path]
) -> None:
    """Tokens and drafts are those of an engine that was started with the new weights."""
    async with drafting(folders[1]) as (_, serve):
        want, drafts = await serve()
    async with drafting(folders[0]) as (engine, serve):
        old, of_old = await serve()
        await way(engine, folders[1])
        tokens, known = await serve()
    assert tokens == want != old
    assert compared(known, drafts) > 5
    assert known != of_old


async def test_an_update_without_the_layers_leaves_them_as_they_are(
    folders: tuple[Path, Path], caplog: pytest.LogCaptureFixture
) -> None:
    """Some of them alone are refused by name, and nothing is changed."""
    tensors = load_file(folders[1] / "model.safetensors")
    model = {name: each for name, each in tensors.items() if not name.startswith(LAYER)}
    async with drafting(folders[1]) as (_, serve):
        want, _ = await serve()
    async with drafting(folders[0]) as (engine, serve):
        old, _ = await serve()
        some = {**model, f"{LAYER}enorm.weight": tensors[f"{LAYER}enorm.weight"]}
        with pytest.raises(InvalidRequest, match="missing tensors: block"):
            await engine.update_weights(some.items())
        assert (await serve())[0] == old
        await engine.update_weights(model.items())
        assert (await serve())[0] == want
    assert "no tensors of the drafting layers" in caplog.text


async def test_a_head_of_its_own_checkpoint_goes_on(
    folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """It reads the new states, with the embeddings and the head that it shares with the model."""
    draw, size = Random(1), COMMON["hidden_size"]
    tensors = {"fc.weight": draw.matrix(size, 2 * size), **draw.layer("layers.0.", size)}
    config = {**LLAMA, "hidden_size": size, "architectures": ["EagleLlamaForCausalLM"]}
    head = write(tmp_path / "head", tensors, config)
    async with drafting(folders[1], "eagle", model=str(head)) as (_, serve):
        want, drafts = await serve()
    async with drafting(folders[0], "eagle", model=str(head)) as (engine, serve):
        await engine.update_weights(folders[1])
        tokens, known = await serve()
        with pytest.raises(InvalidRequest, match=r"fc\.weight"):
            await engine.update_weights({"fc.weight": torch.zeros(2, 2)}.items())
    assert tokens == want
    assert compared(known, drafts) > 5


@pytest.mark.parametrize("method", ["eagle", "draft_model"])
async def test_a_draft_model_is_updated_beside_the_model_or_alone(
    method: str, folders: tuple[Path, Path], tmp_path: Path
) -> None:
    """Drafts are those of an engine that was started with the new ones; a part of them is refused,
    and so are they where none has a checkpoint of its own."""
    size, heads = COMMON["hidden_size"], [tmp_path / "old", tmp_path / "new"]
    if method == "eagle":
        config = {**LLAMA, "hidden_size": size, "architectures": ["EagleLlamaForCausalLM"]}
        for seed, head in enumerate(heads):
            draw = Random(seed)
            tensors = {"fc.weight": draw.matrix(size, 2 * size), **draw.layer("layers.0.", size)}
            write(head, tensors, config)
    else:
        for head in heads:
            make_checkpoint("qwen3", head)
        tensors = load_file(heads[1] / "model.safetensors")
        tensors = {name: t + 0.5 * t.std() * torch.randn_like(t) for name, t in tensors.items()}
        save_file(tensors, heads[1] / "model.safetensors", metadata={"format": "pt"})
    new = {
        f"draft_model.{name}": tensor
        for name, tensor in load_file(heads[1] / "model.safetensors").items()
    }
    async with drafting(folders[1], method, model=str(heads[1])) as (_, serve):
        want, drafts = await serve()
    async with drafting(folders[0], method, model=str(heads[0])) as (engine, serve):
        with pytest.raises(InvalidRequest, match="missing tensors"):
            await engine.update_weights(dict(list(new.items())[:1]).items())
        model = load_file(folders[1] / "model.safetensors")
        await engine.update_weights({**model, **new}.items())
        tokens, known = await serve()
        old = {name: torch.zeros_like(tensor) for name, tensor in new.items()}
        await engine.update_weights(old.items())
        same, others = await serve()
        await engine.update_weights(new.items())
        again, alike = await serve()
    assert tokens == same == again == want
    assert compared(known, drafts) > 5 and compared(alike, drafts) > 5
    assert others != drafts
    if method == "eagle":
        async with drafting(folders[0]) as (engine, serve):
            with pytest.raises(InvalidRequest, match="no draft model with a checkpoint of its own"):
                await engine.update_weights(new.items())


@pytest.mark.parametrize("level", [1, 2])
async def test_drafts_are_the_same_after_sleep(level: int, folders: tuple[Path, Path]) -> None:
    async with drafting(folders[0]) as (engine, serve):
        want, drafts = await serve()
        answer = await engine.sleep(level)
        sizes = {each["owner"]: each["nbytes"] for each in answer["memory"]}
        assert 0 < sizes["draft_weights"] < sizes["weights"]
        await engine.wake_up()
        tokens, known = await serve()
    assert tokens == want
    assert compared(known, drafts) > 5
