"""KV events over ZeroMQ, as a router reads them, in the types of vLLM 0.33."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError
from jackfield.core.registry import load_plugins

pytest.importorskip("zmq")
import zmq
import zmq.asyncio

from jackfield.plugins.kv_events import cache_publisher, endpoints
from jackfield.plugins.kv_events.options import KVEventsOptions

SIZE = 16
Hash = int | bytes


class BlockStored(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[list[Any] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, forbid_unknown_fields=True):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class Reader:
    """Knows the blocks of an engine."""

    def __init__(self) -> None:
        self.blocks: dict[Hash, BlockStored] = {}

    def apply(self, payload: bytes) -> Batch:
        batch = msgspec.msgpack.decode(payload, type=Batch)
        for event in batch.events:
            if isinstance(event, BlockStored):
                assert len(event.token_ids) == SIZE * len(event.block_hashes)
                self.blocks.update(dict.fromkeys(event.block_hashes, event))
            elif isinstance(event, BlockRemoved):
                for each in event.block_hashes:
                    del self.blocks[each]
            else:
                self.blocks.clear()
        return batch

    def tokens(self, last: Hash) -> list[int]:
        """Tokens up to the end of a block."""
        event: BlockStored | None = self.blocks[last]
        tokens: list[int] = []
        while event is not None:
            end = event.block_hashes.index(last) + 1
            tokens = event.token_ids[: end * SIZE] + tokens
            last = event.parent_block_hash  # type: ignore[assignment]
            event = None if last is None else self.blocks[last]
        return tokens


@pytest.fixture
def folder() -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name:  # A socket's path has at most 107 letters.
        yield Path(name)


@pytest.fixture
async def context() -> AsyncIterator[Any]:
    context = zmq.asyncio.Context()
    yield context
    context.destroy(linger=0)


def config(**events: Any) -> EngineConfig:
    return EngineConfig(
        device="cpu", block_size=SIZE, max_model_len=256, num_gpu_blocks_override=24,
        plugin_options={"kv_events": {"enable_kv_cache_events": True, **events}},
    )  # fmt: skip


async def generate(engine: AsyncEngine, prompt: list[int], count: int = 40) -> list[int]:
    params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0.0)
    async for output in engine.generate(prompt, params):
        tokens = output.outputs[0].token_ids
    return list(tokens)


async def replayed(context: Any, endpoint: str, first: int = 0) -> list[list[bytes]]:
    """Topic, number and payload of the batches from a number on."""
    socket = context.socket(zmq.DEALER)
    socket.connect(endpoint)
    await socket.send_multipart([b"", first.to_bytes(8, "big")])
    messages = []
    while (message := await socket.recv_multipart())[2] != b"\xff" * 8:
        messages.append(message[1:])
    socket.close(linger=0)
    return messages


async def test_a_reader_knows_what_hits_find(folder: Path, context: Any) -> None:
    live, again = f"ipc://{folder}/live", f"ipc://{folder}/again"
    reader = context.socket(zmq.SUB)
    reader.connect(live)
    reader.subscribe(b"kv@")
    options = config(endpoint=live, replay_endpoint=again, topic="kv@here")
    async with AsyncEngine(options) as engine:
        prompt = list(range(10, 60))
        tokens = prompt + await generate(engine, prompt)
        for number in range(60):  # Until the reader is connected; and blocks are reused.
            await generate(engine, [number + 100] * 40, count=1)
            if number >= 20 and await reader.poll(0):
                break
        _, begin, payload = await reader.recv_multipart()
        messages = await replayed(context, again)
        assert [int.from_bytes(each[1], "big") for each in messages] == [*range(len(messages))]
        assert messages[int.from_bytes(begin, "big")] == [b"kv@here", begin, payload]

        known, longest = Reader(), []
        for _, _, payload in messages:
            batch = known.apply(payload)
            assert batch.data_parallel_rank == 0
            longest = max([longest, *map(known.tokens, known.blocks)], key=len)
        assert longest == tokens[: len(longest)] and len(longest) == (len(tokens) - 1) // 16 * 16
        found = engine.core.scheduler.kv.pool._cached
        assert known.blocks.keys() == {int.from_bytes(each[-8:], "big") for each in found}
        assert {event.medium for event in known.blocks.values()} == {"GPU"}
        assert {event.kv_cache_spec_kind for event in known.blocks.values()} == {"full_attention"}

        assert await engine.reset_prefix_cache()
        while len(later := await replayed(context, again, len(messages))) == 0:
            pass
        known.apply(later[0][2])
        assert not known.blocks


async def test_whole_hashes_and_a_bound_on_what_is_kept(folder: Path, context: Any) -> None:
    again = f"ipc://{folder}/again"
    options = config(
        endpoint=f"ipc://{folder}/live", replay_endpoint=again, int_block_hashes=False,
        buffer_steps=3,
    )  # fmt: skip
    async with AsyncEngine(options) as engine:
        for number in range(6):
            await generate(engine, [number + 10] * 40, count=1)
        messages = await replayed(context, again)
        assert [int.from_bytes(each[1], "big") for each in messages] == [3, 4, 5]
        hashes = Reader().apply(messages[-1][2]).events[0].block_hashes
        assert set(hashes) <= engine.core.scheduler.kv.pool._cached.keys()


async def test_who_asks_for_nonsense_harms_no_other(
    folder: Path, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    again = f"ipc://{folder}/again"
    options = config(endpoint=f"ipc://{folder}/live", replay_endpoint=again)
    async with AsyncEngine(options) as engine:
        await generate(engine, [10] * 40, count=1)
        socket = context.socket(zmq.DEALER)
        socket.connect(again)
        for nonsense in ([b""], [b"", b"1"], [b"a", b"b", b"c", b"d"], [b"", bytes(5000)]):
            await socket.send_multipart(nonsense)
        assert len(await replayed(context, again)) == 1
        assert not await socket.poll(0)
        socket.close(linger=0)


async def test_bytes_of_what_is_kept_are_bounded(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_publisher, "MAX_REPLAY_BYTES", 500)
    options = KVEventsOptions(
        endpoint=f"ipc://{folder}/live", replay_endpoint=f"ipc://{folder}/again"
    )
    socket = cache_publisher.EventSocket(options, member=0)
    for number in range(10):
        socket.send((number, "x" * 100))
    assert 300 < sum(len(payload) for _, payload in socket._kept) <= 500
    assert socket._kept[-1][0] == (9).to_bytes(8, "big")
    await socket.close()


@pytest.mark.parametrize(
    ("endpoint", "member", "becomes"),
    [
        ("tcp://*:5557", 0, "tcp://*:5557"),
        ("tcp://*:5557", 2, "tcp://*:5559"),
        ("tcp://[::]:5557", 1, "tcp://[::]:5558"),
        ("tcp://collector.example:80", 0, "tcp://collector.example:80"),
        ("tcp://*:0", 3, "tcp://*:0"),
        ("ipc:///run/events", 0, "ipc:///run/events"),
        ("ipc:///run/events", 1, "ipc:///run/events_dp1"),
    ],
)
def test_each_engine_has_its_own_address(endpoint: str, member: int, becomes: str) -> None:
    assert endpoints.of_member(endpoint, member, "endpoint") == becomes
    assert endpoints.is_bound(becomes) == ("collector" not in endpoint)


@pytest.mark.parametrize(
    "endpoint", ["5557", "tcp://*", "tcp://*:99999", "inproc://here", "udp://*:1"]
)
@pytest.mark.parametrize("field", ["endpoint", "replay_endpoint"])
def test_what_is_no_address_is_refused_before_the_start(endpoint: str, field: str) -> None:
    with pytest.raises(ConfigError, match=r"must be an address such as") as raised:
        AsyncEngine(config(**{field: endpoint}))
    assert raised.value.param == f"plugin_options.kv_events.{field}"


async def test_an_address_in_use_stops_the_start(folder: Path) -> None:
    options = config(endpoint=f"ipc://{folder}/live", replay_endpoint=f"ipc://{folder}/none/again")
    with pytest.raises(ConfigError, match=r"replay_endpoint: ipc:.*/none/again cannot be bound"):
        await AsyncEngine(options).start()
    taken = config(endpoint="tcp://*:0")
    async with AsyncEngine(taken) as engine:
        (hooks,) = [p for p in engine.plugins.manager.get_plugins() if hasattr(p, "_socket")]
        port = hooks._socket._pub.getsockopt_string(zmq.LAST_ENDPOINT).rpartition(":")[2]
        with pytest.raises(ConfigError, match=r"endpoint: .* cannot be bound: Address already"):
            await AsyncEngine(config(endpoint=f"tcp://*:{port}")).start()


async def test_without_prefix_caching_there_is_nothing_to_publish(folder: Path) -> None:
    options = msgspec.structs.replace(
        config(endpoint=f"ipc://{folder}/live"), enable_prefix_caching=False
    )
    with pytest.raises(ConfigError, match="without enable_prefix_caching"):
        await AsyncEngine(options).start()


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zmq", None)
    monkeypatch.delitem(sys.modules, "jackfield.plugins.kv_events.cache_publisher")
    with pytest.raises(ConfigError, match=r"not installed \(zmq\); install jackfield\[kv-events\]"):
        AsyncEngine(config())


@pytest.mark.parametrize("events", [{"enable_kv_cache_events": False}, {"publisher": "null"}])
def test_off_it_costs_nothing(events: dict[str, Any]) -> None:
    plugins = load_plugins()
    AsyncEngine(config(**events), plugins=plugins)
    assert not plugins.has_listeners("kv_cache_changed")


@pytest.mark.slow
async def test_each_of_several_engines_publishes_its_own_cache(folder: Path, context: Any) -> None:
    again = f"ipc://{folder}/again"
    options = msgspec.structs.replace(
        config(endpoint=f"ipc://{folder}/live", replay_endpoint=again), data_parallel_size=2
    )
    async with AsyncEngine(options) as engine:
        for rank in range(2):
            params = SamplingParams(max_tokens=2, ignore_eos=True)
            prompt = [10 + rank] * 40
            async for _ in engine.generate(prompt, params, data_parallel_rank=rank):
                pass
        for rank, endpoint in enumerate((again, f"{again}_dp1")):
            (message,) = await replayed(context, endpoint)
            batch = Reader().apply(message[2])
            assert batch.data_parallel_rank == rank
            assert set(batch.events[0].token_ids) == {10 + rank}
