"""Weights that change while an engine serves: all of them or none, and nothing of the old ones."""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import socket
import sys
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters_made import LINEAR, make_adapter
from rank_executor import Plugin
from safetensors.torch import load_file, save_file

from jackfield import AsyncEngine, EngineConfig, LoRARequest, SamplingParams
from jackfield.core.config import KVTransferConfig
from jackfield.core.errors import Conflict, InvalidRequest, NotFound
from jackfield.core.live.engine_jobs import (
    AskLive,
    CommitUpdate,
    JoinGroup,
    LeaveGroup,
    NameWeights,
    PutTensors,
)
from jackfield.core.live.weight_update import WeightUpdate
from jackfield.core.live.worker_jobs import TensorPart
from jackfield.core.outputs import RequestOutput, WeightSpan
from jackfield.core.parallel.broadcast import BroadcastGroup
from jackfield.core.registry import load_plugins

from helpers import VOCAB, changed_checkpoint, make_checkpoint, reference_model

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "max_model_len": 96,
    "num_gpu_blocks_override": 80, "max_num_batched_tokens": 32, "max_num_seqs": 8,
    "block_size": 8,
}  # fmt: skip
PROMPT = list(range(3, 30))
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint, and one of the same model after some training."""
    root = tmp_path_factory.mktemp("models")
    old = make_checkpoint("llama", root / "old")
    return old, changed_checkpoint(old, root / "new")


@pytest.fixture(scope="module")
def tensors(folders: tuple[Path, Path]) -> Tensors:
    """The new weights, as a trainer has them."""
    return load_file(folders[1] / "model.safetensors")


@pytest.fixture(scope="module")
def references(folders: tuple[Path, Path]) -> tuple[Any, Any]:
    old, new = map(reference_model, folders)
    return old, new


def greedy(model: Any, prompt: list[int], count: int = 12) -> list[int]:
    """The reference's tokens."""
    tokens = list(prompt)
    for _ in range(count):
        with torch.no_grad():
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


async def finish(
    engine: AsyncEngine, prompt: list[int] = PROMPT, params: SamplingParams = GREEDY, **more: Any
) -> RequestOutput:
    async for output in engine.generate(prompt, params, **more):
        last = output
    assert last.error is None, last.error
    return last


async def tokens(engine: AsyncEngine, prompt: list[int] = PROMPT, **more: Any) -> list[int]:
    return list((await finish(engine, prompt, **more)).outputs[0].token_ids)


def engine_of(folder: Path, **options: Any) -> AsyncEngine:
    config = EngineConfig(model=str(folder), **{**SETTINGS, **options})
    return AsyncEngine(config, plugins=load_plugins(extra=[Plugin()]))


@pytest.fixture
async def engine(folders: tuple[Path, Path]) -> AsyncIterator[AsyncEngine]:
    async with engine_of(folders[0]) as started:
        yield started


# ---------------------------------------------------------------- ways to send them


async def by_files(engine: AsyncEngine, folder: Path, _: Tensors) -> Any:
    return await engine.update_weights(folder)


async def by_tensors(engine: AsyncEngine, _: Path, tensors: Tensors) -> Any:
    """In buckets smaller than most tensors, which come in parts."""
    async with await engine.begin_weight_update() as update:
        small = WeightUpdate(engine.core.ask_live, update.name, bucket_bytes=1000)
        await small.put(tensors.items())
        return await small.commit()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


def parts_of(tensors: Tensors) -> list[TensorPart]:
    return [
        TensorPart(name, str(t.dtype).removeprefix("torch."), tuple(t.shape))
        for name, t in tensors.items()
    ]


async def by_group(
    engine: AsyncEngine,
    _: Path,
    tensors: Tensors,
    packed_bytes: int = 0,
    buffers: list[torch.Tensor] | None = None,
) -> Any:
    """From another member of a group, as a trainer would be; here it is a thread. buffers: what it
    sends in place of the tensors."""
    port, failed = free_port(), []
    size = 1 + engine.info.num_ranks
    parts = parts_of(tensors)

    def send() -> None:
        try:
            packed = 0 if buffers else packed_bytes
            group = BroadcastGroup(
                "127.0.0.1", port, 0, size, torch.device("cpu"), packed_bytes=packed
            )
            group.send((("", each) for each in buffers) if buffers else tensors.items())
            ready.wait(60)
            group.close()
        except Exception as error:
            failed.append(error)

    ready = threading.Event()
    trainer = threading.Thread(target=send)
    trainer.start()
    join = JoinGroup(host="127.0.0.1", port=port, world_size=size, packed_bytes=packed_bytes)
    assert (await engine.ask_live(join))["world_size"] == size - 1
    async with await engine.begin_weight_update() as update:
        await update.receive(parts)
        answer = await update.commit()
    await engine.ask_live(LeaveGroup())
    ready.set()
    await asyncio.to_thread(trainer.join)
    assert not failed
    return answer


async def by_packed_group(engine: AsyncEngine, folder: Path, tensors: Tensors) -> Any:
    return await by_group(engine, folder, tensors, packed_bytes=20_000)


TORCH_GROUP = """
import sys
from datetime import timedelta
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from safetensors.torch import load_file

port, size, file = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
limit = timedelta(seconds=60)
store, rank, _ = next(dist.rendezvous(f"tcp://127.0.0.1:{port}", 0, size, timeout=limit))
store = c10d.PrefixStore("weights", store)
group, _ = c10d._new_process_group_helper(
    size, rank, [], "gloo", store, group_name="weights", timeout=limit
)
c10d._world.pg_group_ranks[group] = {member: member for member in range(size)}
for tensor in load_file(file).values():
    dist.broadcast(tensor, src=0, group=group)
sys.stdin.read()
"""
"""A trainer as those of SGLang's servers are: its group is one of torch's own."""


async def by_torch_group(engine: AsyncEngine, folder: Path, tensors: Tensors) -> Any:
    port, size, file = free_port(), 1 + engine.info.num_ranks, folder / "model.safetensors"
    trainer = await asyncio.create_subprocess_exec(
        sys.executable, "-c", TORCH_GROUP, str(port), str(size), str(file),
        stdin=asyncio.subprocess.PIPE, env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
    )  # fmt: skip
    try:
        await engine.ask_live(JoinGroup(host="127.0.0.1", port=port, world_size=size, timeout=60))
        async with await engine.begin_weight_update() as update:
            await update.receive(parts_of(load_file(file)))
            answer = await update.commit()
        await engine.ask_live(LeaveGroup())
    finally:
        await trainer.communicate(b"")
    assert trainer.returncode == 0
    return answer


async def by_buffers_of_vllm(engine: AsyncEngine, folder: Path, tensors: Tensors) -> Any:
    """Joined as vLLM 0.33 joins them: a buffer ends once it is longer than the bound."""
    buffers, together = [], b""
    for tensor in tensors.values():
        together += tensor.numpy().tobytes()
        if len(together) > 20_000:
            buffers.append(torch.frombuffer(bytearray(together), dtype=torch.uint8))
            together = b""
    if together:
        buffers.append(torch.frombuffer(bytearray(together), dtype=torch.uint8))
    assert 2 < len(buffers) < len(tensors) - 2
    return await by_group(engine, folder, tensors, packed_bytes=20_000, buffers=buffers)


WAYS: list[Callable[..., Any]] = [
    by_files, by_tensors, by_group, by_packed_group, by_buffers_of_vllm, by_torch_group,
]  # fmt: skip
RANKS: list[dict[str, Any]] = [
    {},
    {"tensor_parallel_size": 2, "executor": "rank_threads"},
    {"tensor_parallel_size": 2},
]


@pytest.mark.parametrize(
    ("way", "options"),
    [(way, {}) for way in WAYS]
    + [
        pytest.param(by_files, RANKS[1], marks=pytest.mark.slow),
        (by_tensors, RANKS[1]),
        (by_packed_group, RANKS[2]),
    ],
)
async def test_after_an_update_an_engine_says_what_a_fresh_one_does(
    way: Callable[..., Any],
    options: dict[str, Any],
    folders: tuple[Path, Path],
    tensors: Tensors,
    references: tuple[Any, Any],
) -> None:
    async with engine_of(folders[0], **options) as engine:
        assert await tokens(engine) == greedy(references[0], PROMPT)
        answer = await way(engine, folders[1], tensors)
        assert answer["weights_version"] == await engine.weights_version() == "1"
        assert answer["num_tensors"] == (0 if way is by_files else len(tensors))
        last = await finish(engine)
        assert list(last.outputs[0].token_ids) == greedy(references[1], PROMPT)
        assert last.num_cached_tokens == 0, "it found what the old weights computed"
        assert last.outputs[0].weight_versions == [WeightSpan("1", 0, 12)]
        assert (await finish(engine)).num_cached_tokens == 24, "the new cache is found"


# ---------------------------------------------------------------- what is refused


def without(tensors: Tensors, name: str) -> Any:
    return [(key, value) for key, value in tensors.items() if key != name]


NORM = "model.norm.weight"
BAD: dict[str, tuple[Callable[[Tensors], Any], str]] = {
    "missing": (lambda t: without(t, NORM), rf"missing tensors: {NORM}"),
    "nothing": (lambda t: [], "no tensors"),
    "extra": (lambda t: [*t.items(), ("model.other.weight", t[NORM])], r"model\.other\.weight"),
    "twice": (lambda t: [*t.items(), (NORM, t[NORM])], rf"'{NORM}' came twice"),
    "shape": (lambda t: [*without(t, NORM), (NORM, t[NORM][1:])], rf"'{NORM}' has shape \(63,\)"),
    "type": (lambda t: [*without(t, NORM), (NORM, t[NORM].int())], rf"'{NORM}' holds .*int32"),
    "no number": (
        lambda t: [*without(t, NORM), (NORM, t[NORM] / 0)],
        rf"'{NORM}' has values that are no numbers",
    ),
}


@pytest.mark.parametrize("case", BAD)
async def test_what_is_not_whole_changes_nothing(
    case: str, engine: AsyncEngine, tensors: Tensors, references: tuple[Any, Any]
) -> None:
    make, message = BAD[case]
    with pytest.raises(InvalidRequest, match=message) as caught:
        await engine.update_weights(make(tensors))
    assert "the old weights serve on" in caught.value.message
    assert await engine.weights_version() == "default"
    assert await tokens(engine) == greedy(references[0], PROMPT)
    await engine.update_weights(tensors.items())
    assert await tokens(engine) == greedy(references[1], PROMPT)


@pytest.mark.parametrize(
    ("parts", "size", "message"),
    [
        ([(NORM, "float32", (64,), 0, None)], 255, "the bucket ends within tensor"),
        ([(NORM, "float32", (64,), 0, None)], 257, "1 bytes more"),
        ([(NORM, "float32", (64,), 0, 300)], 300, "has 256 bytes"),
        ([(NORM, "float32", (64,), 8, 8)], 8, "up to byte 0"),
        ([(NORM, "float32", (64,), 0, 8), (NORM, "float32", (64,), 16, 8)], 16, "up to byte 8"),
        ([(NORM, "float33", (64,), 0, None)], 256, "unknown type: 'float33'"),
        ([(NORM, "float32", (-64,), 0, None)], 256, "negative size"),
    ],
)
async def test_a_damaged_bucket_is_refused(
    parts: list[Any], size: int, message: str, engine: AsyncEngine
) -> None:
    update = await engine.begin_weight_update()
    job = PutTensors(
        update=update.name, parts=tuple(TensorPart(*part) for part in parts), data=bytes(size)
    )
    with pytest.raises(InvalidRequest, match=message):
        await engine.ask_live(job)
    with pytest.raises(NotFound, match="given up after an error"):
        await engine.ask_live(CommitUpdate(update=update.name))


async def test_half_a_tensor_is_missing(engine: AsyncEngine, tensors: Tensors) -> None:
    update = await engine.begin_weight_update()
    await update.put(without(tensors, NORM))
    data = tensors[NORM].numpy().tobytes()
    part = TensorPart(NORM, "float32", (64,), 0, 128)
    await engine.ask_live(PutTensors(parts=(part,), data=data[:128]))
    with pytest.raises(InvalidRequest, match=f"a part is missing: {NORM}"):
        await update.commit()


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [("num_hidden_layers", 2, "unexpected tensor"), (None, None, "no folder")],
)
async def test_files_of_another_model_change_nothing(
    field: str | None,
    value: Any,
    message: str,
    engine: AsyncEngine,
    references: tuple[Any, Any],
    tmp_path: Path,
) -> None:
    folder = tmp_path / "other"
    if field is not None:
        from transformers import LlamaForCausalLM

        other = reference_model(Path(engine.config.model)).config
        other.num_hidden_layers = 4
        LlamaForCausalLM(other).save_pretrained(folder)
    with pytest.raises(InvalidRequest, match=message):
        await engine.update_weights(folder)
    assert await tokens(engine) == greedy(references[0], PROMPT)


async def test_one_update_at_a_time_until_it_ends(engine: AsyncEngine, tensors: Tensors) -> None:
    update = await engine.begin_weight_update()
    assert (await engine.ask_live(AskLive()))["updating"]
    with pytest.raises(Conflict, match="in progress"):
        await engine.begin_weight_update()
    await update.put(tensors.items())
    await update.roll_back()
    await update.roll_back()
    with pytest.raises(NotFound, match="rolled back"):
        await update.commit()
    assert await engine.weights_version() == "default"
    await engine.update_weights(tensors.items(), version="trained")
    assert await engine.weights_version() == "trained"


async def test_an_update_whose_owner_is_gone_is_given_up(
    engine: AsyncEngine, tensors: Tensors
) -> None:
    update = await engine.begin_weight_update(lease=0.2)
    with contextlib.suppress(NotFound):  # It may end on the way.
        await update.put(tensors.items())
    while (await engine.ask_live(AskLive()))["updating"]:
        await asyncio.sleep(0.02)
    with pytest.raises(NotFound, match="end of its lease"):
        await update.commit()
    await engine.update_weights(tensors.items())


async def test_a_sender_that_goes_away_changes_nothing(
    engine: AsyncEngine, tensors: Tensors, references: tuple[Any, Any]
) -> None:
    """It sends half of what it has announced."""
    port = free_port()

    def send() -> None:
        group = BroadcastGroup("127.0.0.1", port, 0, 2, torch.device("cpu"), timeout=60)
        group.send(list(tensors.items())[:5])
        group.close()

    trainer = threading.Thread(target=send)
    trainer.start()
    await engine.ask_live(JoinGroup(host="127.0.0.1", port=port, world_size=2, timeout=60))
    update = await engine.begin_weight_update()
    parts = [TensorPart(name, "float32", tuple(t.shape)) for name, t in tensors.items()]
    with pytest.raises(InvalidRequest, match="sender of weights in group 'weights' has gone"):
        await update.receive(parts)
    await asyncio.to_thread(trainer.join)
    with pytest.raises(InvalidRequest, match="no group 'weights'"):
        await engine.ask_live(LeaveGroup())
    assert await tokens(engine) == greedy(references[0], PROMPT)


# ---------------------------------------------------------------- requests on their way


@pytest.mark.parametrize("count", [20, pytest.param(256, marks=pytest.mark.slow)])
async def test_streams_go_on_with_the_new_weights(
    count: int, engine: AsyncEngine, tensors: Tensors, references: tuple[Any, Any]
) -> None:
    """More than there are slots: none is lost, and each token is of the weights that its span
    says."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    prompts = [[3 + (7 * i + j) % (VOCAB - 3) for j in range(5 + i % 30)] for i in range(count)]
    begun = asyncio.Event()

    async def stream(prompt: list[int]) -> RequestOutput:
        async for output in engine.generate(prompt, params):
            if len(output.outputs[0].token_ids) >= 3:
                begun.set()
            last = output
        assert last.error is None
        return last

    streams = [asyncio.ensure_future(stream(prompt)) for prompt in prompts]
    await begun.wait()
    answer = await engine.update_weights(tensors.items(), version="new")
    assert answer["num_recomputed"] > 0 and not answer["num_kept"]
    both = 0
    for prompt, last in zip(prompts, await asyncio.gather(*streams), strict=True):
        output = last.outputs[0]
        assert output.finish_reason == "length" and len(output.token_ids) == 40
        said = torch.tensor([prompt + list(output.token_ids)])
        end = 0
        for span in output.weight_versions:
            assert span.start == end
            with torch.no_grad():
                best = references[span.version == "new"](said).logits[0].argmax(-1)
            end = span.end
            first, last_one = len(prompt) + span.start, len(prompt) + end
            assert best[first - 1 : last_one - 1].tolist() == said[0, first:last_one].tolist()
        assert end == 40
        both += len(output.weight_versions) == 2
    assert both, "no stream was under way"
    engine.core.check_idle()  # type: ignore[attr-defined]


async def test_streams_may_go_on_with_their_caches(
    engine: AsyncEngine, tensors: Tensors, references: tuple[Any, Any]
) -> None:
    """What they compute from then on is theirs alone: no other request finds it."""
    params = SamplingParams(temperature=0.0, max_tokens=40, ignore_eos=True)
    stream = engine.generate(PROMPT, params)
    await anext(stream)
    await engine.pause_generation("keep", clear_cache=False)
    answer = await engine.update_weights(tensors.items(), version="new")
    assert (answer["num_kept"], answer["num_recomputed"]) == (1, 0)
    await engine.resume_generation()
    async for output in stream:
        last = output
    sampled = list(last.outputs[0].token_ids)
    assert [span.version for span in last.outputs[0].weight_versions] == ["default", "new"]
    again = await finish(engine, PROMPT + sampled)
    assert again.num_cached_tokens == 0
    assert list(again.outputs[0].token_ids) == greedy(references[1], PROMPT + sampled)
    engine.core.check_idle()  # type: ignore[attr-defined]


async def test_a_name_given_again_finds_nothing_of_the_first(
    engine: AsyncEngine, folders: tuple[Path, Path], references: tuple[Any, Any]
) -> None:
    for folder, reference in zip((*folders, folders[0]), (*references, references[0]), strict=True):
        await engine.update_weights(folder, version="same")
        last = await finish(engine)
        assert last.num_cached_tokens == 0
        assert list(last.outputs[0].token_ids) == greedy(reference, PROMPT)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("qwen2", {}),  # Its head is its embeddings.
        ("qwen3-moe", {"tensor_parallel_size": 2, "executor": "rank_threads"}),
        ("qwen3-moe", {"tensor_parallel_size": 2, "executor": "rank_threads",
                       "enable_expert_parallel": True}),
        ("llama", {"quantization": "fp8"}),  # Rounded when they arrive.
        ("llama", {"pipeline_parallel_size": 2, "executor": "rank_threads"}),
    ],
)  # fmt: skip
async def test_every_layout_is_that_of_a_fresh_engine(
    family: str, options: dict[str, Any], tmp_path: Path
) -> None:
    old = make_checkpoint(family, tmp_path / "old")
    shutil.copytree(old, new := tmp_path / "new")
    weights = load_file(old / "model.safetensors")
    changed = {name: t * (1 + 0.3 * torch.rand_like(t)) for name, t in weights.items()}
    save_file(changed, new / "model.safetensors", metadata={"format": "pt"})
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=2)

    async def said(engine: AsyncEngine) -> Any:
        output = (await finish(engine, PROMPT, params)).outputs[0]
        return list(output.token_ids), output.logprobs

    async with engine_of(new, **options) as fresh:
        want = await said(fresh)
    async with engine_of(old, **options) as engine:
        assert await said(engine) != want
        await engine.update_weights(changed.items())
        assert await said(engine) == want


async def test_experts_that_moved_are_not_updated(tmp_path: Path) -> None:
    folder = make_checkpoint("qwen3-moe", tmp_path / "moe")
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": True, "enable_eplb": True}
    async with engine_of(folder, executor="rank_threads", **options) as engine:
        with pytest.raises(InvalidRequest, match="enable_eplb: experts have moved"):
            await engine.update_weights(folder)
        await tokens(engine)


async def test_what_a_connector_keeps_of_old_weights_is_not_found(
    folders: tuple[Path, Path], tensors: Tensors, references: tuple[Any, Any]
) -> None:
    """Both versions' blocks are in the store; a request gets those of the weights that serve."""
    transfer = KVTransferConfig(
        kv_connector="cpu_offload", kv_connector_extra_config={"kv_offloading_size": 0.01}
    )
    async with engine_of(folders[0], kv_transfer_config=transfer) as engine:

        def hits() -> int:
            return engine.stats().external_prefix_cache_hits

        async def again() -> list[int]:
            """What is said once the engine's own cache has been forgotten."""
            while not await engine.reset_prefix_cache():  # Saves hold blocks for a moment.
                await asyncio.sleep(0.01)
            return await tokens(engine)

        assert await tokens(engine) == await again() == greedy(references[0], PROMPT)
        assert (before := hits()) > 0, "the store has the first weights' blocks"
        update = await engine.begin_weight_update()
        await update.put(tensors.items())
        with pytest.raises(InvalidRequest, match=r"^recompute: with a KV connector"):
            await update.commit(recompute=False)
        await update.commit("new")
        assert await again() == greedy(references[1], PROMPT)
        assert hits() == before, "a block of the old weights was loaded"
        assert await again() == greedy(references[1], PROMPT)
        assert hits() > before, "the store has the new weights' blocks, too"
        engine.core.check_idle()  # type: ignore[attr-defined]


async def test_what_is_recorded_is_not_updated(folders: tuple[Path, Path], tmp_path: Path) -> None:
    """A replay has the weights of the start."""
    async with engine_of(folders[0], record_steps=str(tmp_path / "steps")) as engine:
        with pytest.raises(InvalidRequest, match="record_steps: a recording"):
            await engine.update_weights(folders[1])
        await tokens(engine)


async def test_weights_get_another_name(engine: AsyncEngine) -> None:
    stream = engine.generate(PROMPT, GREEDY)
    await anext(stream)
    await engine.ask_live(NameWeights(version="step 7"))
    async for output in stream:
        last = output
    versions = [span.version for span in last.outputs[0].weight_versions]
    assert versions == ["default", "step 7"]
    assert (await finish(engine)).num_cached_tokens > 0, "they are the same weights"
    with pytest.raises(InvalidRequest, match="weight_version: must be 1 to 256"):
        await engine.ask_live(NameWeights(version=""))


async def test_adapters_are_kept(
    folders: tuple[Path, Path], tensors: Tensors, tmp_path: Path
) -> None:
    """Those of DoRA depend on the weights that they change."""
    options: dict[str, Any] = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
    loras = [
        LoRARequest(name, number, str(make_adapter(
            folders[0], tmp_path / name, seed=number, target_modules=LINEAR, use_dora=dora
        )))
        for number, (name, dora) in enumerate({"plain": False, "dora": True}.items(), 1)
    ]  # fmt: skip

    async def said(engine: AsyncEngine) -> list[list[int]]:
        return [await tokens(engine, lora_request=lora) for lora in loras]

    async with engine_of(folders[1], **options) as fresh:
        want = await said(fresh)
    async with engine_of(folders[0], **options) as engine:
        before = await said(engine)
        await engine.update_weights(tensors.items())
        assert await said(engine) == want != before
