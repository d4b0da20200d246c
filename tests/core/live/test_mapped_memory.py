"""Weights and caches whose addresses stay over a sleep, with the host's memory as a device's.

Memory that is given back is no memory: whoever touches it meanwhile ends the process.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import nn

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import OutOfMemory
from jackfield.core.live.engine_jobs import WakeUp
from jackfield.core.loading.model_tensors import ModelTensors
from jackfield.core.worker.mapped.driver import AddressSpace
from jackfield.core.worker.mapped.regions import MappedMemory, Region
from jackfield.core.worker.worker import Worker

from helpers import VOCAB, changed_checkpoint, make_checkpoint

PAGE = mmap.PAGESIZE
NOTHING, READ_WRITE = 0, 3
RESERVED = 0x2 | 0x20 | 0x4000
"""Linux's: private, anonymous, and without a reserve of swap."""
FIXED = 0x10
LIBC = ctypes.CDLL(None, use_errno=True)
LIBC.mmap.restype = ctypes.c_void_p
CPU = torch.device("cpu")


class HostAddresses:
    """`AddressSpace` of a CPU."""

    device = CPU
    granularity = PAGE

    def __init__(self) -> None:
        self.reserved: dict[int, int] = {}
        self.mapped: dict[int, int] = {}
        self.room = 1 << 40
        """Bytes that may be mapped."""

    def _mmap(self, address: int, size: int, access: int, flags: int) -> int:
        arguments = ctypes.c_void_p(address), ctypes.c_size_t(size), access, flags, -1
        result = LIBC.mmap(*arguments, ctypes.c_size_t(0))
        assert result not in (None, ctypes.c_void_p(-1).value)
        return int(result)

    def reserve(self, size: int) -> int:
        address = self._mmap(0, size, NOTHING, RESERVED)
        self.reserved[address] = size
        return address

    def free(self, address: int, size: int) -> None:
        assert self.reserved.pop(address) == size
        assert not any(address <= each < address + size for each in self.mapped)
        assert not LIBC.munmap(ctypes.c_void_p(address), ctypes.c_size_t(size))

    def map(self, address: int, size: int) -> int:
        if sum(self.mapped.values()) + size > self.room:
            raise torch.OutOfMemoryError("the test has no more")
        assert address not in self.mapped
        self.mapped[address] = size
        return self._mmap(address, size, READ_WRITE, RESERVED | FIXED)

    def unmap(self, address: int, size: int, handle: int) -> None:
        assert self.mapped.pop(address) == size and handle == address
        self._mmap(address, size, NOTHING, RESERVED | FIXED)

    def tensor(self, address: int, size: int, owner: object) -> torch.Tensor:
        array: Any = (ctypes.c_ubyte * size).from_address(address)
        array.owner = owner
        return torch.frombuffer(array, dtype=torch.uint8)

    def synchronize(self) -> None:
        pass


@pytest.fixture
def space() -> Iterator[HostAddresses]:
    """All of it is given back in the end."""
    made = HostAddresses()
    assert isinstance(made, AddressSpace)
    yield made
    gc.collect()
    assert not made.mapped and not made.reserved


def test_addresses_stay_and_contents_do_not(space: HostAddresses) -> None:
    region = Region(space, 10 * PAGE - 5, chunk=4 * PAGE)
    assert region.size == 10 * PAGE and region.nbytes == 0
    region.map(PAGE)
    assert region.nbytes == 4 * PAGE
    region.map()
    assert region.nbytes == 10 * PAGE
    tensor = region.tensor(PAGE + 8, 5 * PAGE)
    address = tensor.fill_(7).data_ptr()
    assert [len(chunk) for chunk in region.chunks()] == [4 * PAGE, 4 * PAGE, 2 * PAGE]
    assert region.unmap() == 10 * PAGE and region.nbytes == 0 and not space.mapped
    region.map()
    assert tensor.data_ptr() == address and not tensor.any()
    del region
    gc.collect()
    assert int(tensor.fill_(1).sum()) == 5 * PAGE, "a tensor keeps its region"


def test_too_little_memory_leaves_a_region_as_it_was(space: HostAddresses) -> None:
    region = Region(space, 6 * PAGE, chunk=PAGE)
    region.map(2 * PAGE)
    space.room = 4 * PAGE
    with pytest.raises(torch.OutOfMemoryError):
        region.map()
    assert region.nbytes == 2 * PAGE
    space.room = 6 * PAGE
    region.map()
    assert region.nbytes == 6 * PAGE


def test_a_moved_model_is_the_same(space: HostAddresses) -> None:
    torch.manual_seed(1)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(7, 5)
            self.tied = self.first.weight
            self.scale = nn.Parameter(torch.randn(3).half(), requires_grad=False)
            self.rows = [self.first.weight.data[2:4], torch.arange(3), torch.empty(0)]
            self.register_buffer("turned", torch.randn(4, 6).t()[1:])

    model = Model().requires_grad_(False)
    before = ModelTensors.of(model)
    values = {path: tensor.clone() for path, tensor in before.tensors.items()}
    parameter = model.first.weight
    memory = MappedMemory(space)
    with torch.inference_mode():
        memory.move(model)
    after = ModelTensors.of(model)
    after.check_like(before)
    assert after.tensors.keys() == values.keys()
    for path, tensor in after.tensors.items():
        assert torch.equal(tensor, values[path]), path
    [region] = memory.regions("weights")
    assert memory.nbytes == region.size
    inside = [tensor.data_ptr() for tensor in after.tensors.values() if tensor.numel()]
    assert all(any(a <= each < a + n for a, n in space.reserved.items()) for each in inside)
    assert model.first.weight is parameter
    with torch.inference_mode():
        model.first.weight[2, 0] = 9.0
    assert model.tied[2, 0] == model.rows[0][0, 0] == 9.0


# ---------------------------------------------------------------- in an engine

SETTINGS: dict[str, Any] = {
    "dtype": "float32", "device": "cpu", "skip_tokenizer_init": True, "max_model_len": 96,
    "max_num_batched_tokens": 32, "max_num_seqs": 4, "block_size": 8,
    "num_gpu_blocks_override": 64, "enable_sleep_mode": True,
}  # fmt: skip
PROMPT = list(range(3, 30))


@pytest.fixture(autouse=True)
def in_mapped_memory(space: HostAddresses, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Worker, "_mapped", lambda self: MappedMemory(space))


async def said(engine: AsyncEngine) -> list[int]:
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    async for output in engine.generate(PROMPT, params):
        last = output
    assert last.error is None
    return list(last.outputs[0].token_ids)


def with_states(folder: Path) -> Path:
    """A model with a state per sequence, and no cache of tokens."""
    config = transformers.Mamba2Config(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, num_heads=2, head_dim=16,
        state_size=8, n_groups=1, chunk_size=8, initializer_range=0.4, eos_token_id=2,
    )  # fmt: skip
    torch.manual_seed(5)
    transformers.Mamba2ForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["llama", "mamba2"])
async def test_an_engine_says_the_same_after_each_sleep(
    family: str, space: HostAddresses, tmp_path: Path
) -> None:
    if family == "llama":
        folder = make_checkpoint(family, tmp_path / "old")
    else:
        folder = with_states(tmp_path / "old")
    new = changed_checkpoint(folder, tmp_path / "new")
    async with AsyncEngine(EngineConfig(model=str(new), **SETTINGS)) as fresh:
        after = await said(fresh)
    gc.collect()
    async with AsyncEngine(EngineConfig(model=str(folder), **SETTINGS)) as engine:
        want = await said(engine)
        size, places = sum(space.mapped.values()), set(space.mapped)
        weights = load_file(folder / "model.safetensors")
        assert size > sum(tensor.nbytes for tensor in weights.values())
        for level in (1, 2, 1):
            answer = await engine.sleep(level)
            assert answer["freed_bytes"] == size and not space.mapped
            memory = {each["owner"]: each["where"] for each in answer["memory"]}
            assert memory["weights"] == memory["kv_cache"] == "released"
            assert ("weights_copy" in memory) == (level == 1)
            await engine.wake_up(["weights"])
            assert 0 < sum(space.mapped.values()) < size
            await engine.wake_up()
            assert set(space.mapped) == places and await said(engine) == want
        # A copy of weights that have changed is not what comes back.
        await engine.update_weights(new)
        assert await said(engine) == after != want
        await engine.sleep(1)
        await engine.wake_up()
        assert await said(engine) == after
        await engine.sleep(2)
        await engine.wake_up()
        assert await said(engine) == after


async def test_weights_are_read_before_the_cache_takes_the_rest(
    space: HostAddresses, tmp_path: Path
) -> None:
    """An update's second model needs room, which a whole cache leaves none of."""
    folder = make_checkpoint("llama", tmp_path)
    async with AsyncEngine(EngineConfig(model=str(folder), **SETTINGS)) as engine:
        want = await said(engine)
        await engine.sleep(2)
        order = []
        taken = engine.core.executor.ask  # type: ignore[attr-defined]

        async def ask(job: Any) -> Any:
            order.append(getattr(job, "owners", type(job).__name__))
            return await taken(job)

        engine.core.executor.ask = ask  # type: ignore[attr-defined]
        await engine.wake_up()
        assert order.index("ApplyWeights") < order.index(("kv_cache",))
        assert await said(engine) == want


async def test_a_device_that_is_full_leaves_the_engine_asleep(
    space: HostAddresses, tmp_path: Path
) -> None:
    folder = make_checkpoint("llama", tmp_path)
    async with AsyncEngine(EngineConfig(model=str(folder), **SETTINGS)) as engine:
        want = await said(engine)
        size = sum(space.mapped.values())
        await engine.sleep(1)
        space.room = size - PAGE
        with pytest.raises(OutOfMemory):
            await engine.ask_live(WakeUp())
        assert await engine.is_sleeping()
        space.room = size
        await engine.wake_up()
        assert await said(engine) == want
