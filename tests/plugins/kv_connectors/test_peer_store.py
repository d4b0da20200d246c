"""Prompts computed by one engine and outputs by another, over the connector `peer_store`."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import forked
import msgspec
import pytest
from kv_peers import (
    SECRET,
    RecordedPeers,
    be_patient,
    false_peer,
    reserved_address,
    reserved_neighbours,
    secret_in,
)
from test_builtin_connectors import GREEDY, LAYOUT, SMALL, TOKENS, key, settled

from jackfield import AsyncEngine, EngineConfig, RequestOutput, SamplingParams
from jackfield.core.config import KVTransferConfig
from jackfield.core.errors import ConfigError
from jackfield.core.parts.kv_transfer import KVReport
from jackfield.core.protocols.kv import KVConnectorSetup
from jackfield.core.registry import load_plugins
from jackfield.core.remote import processes
from jackfield.core.request import Request
from jackfield.plugins.kv_connectors import peer_server, peer_store, peer_wire
from jackfield.plugins.kv_connectors.multi import MultiConnector
from jackfield.plugins.kv_connectors.peer_store import (
    Handover,
    PeerScheduler,
    PeerSettings,
    PeerWorker,
)
from jackfield.plugins.kv_connectors.peer_wire import Address, Ask

PREFILL = msgspec.structs.replace(
    GREEDY, max_tokens=1, kv_transfer_params={"do_remote_decode": True}
)
NOWHERE = {"kv_connector": "cpu_offload"}
NUM_LOADED = 36
"""Tokens of TOKENS whose blocks can be loaded."""


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    be_patient(monkeypatch)


class HeldBack(PeerWorker):
    """Saves nothing until it is told to."""

    def __init__(self, *setup: Any) -> None:
        super().__init__(*setup)
        self.may_save = threading.Event()
        self.awaited = threading.Event()
        """A peer waits for a save."""
        await_save = self._memory.await_save

        def await_and_tell(transfer: int, seconds: float) -> None:
            self.awaited.set()
            await_save(transfer, seconds)

        self._memory.await_save = await_and_tell  # type: ignore[method-assign]

    def save(self, *job: Any) -> Any:
        assert self.may_save.wait(300)
        return super().save(*job)


def peer_config(folder: Path, **options: Any) -> dict[str, Any]:
    return {"secret_file": secret_in(folder), "size_gib": 0.01, **options}


@contextlib.asynccontextmanager
async def engine_with(
    peers: RecordedPeers, extra: dict[str, Any], role: str = "kv_both", **options: Any
) -> AsyncIterator[AsyncEngine]:
    transfer = {"kv_connector": peers.name, "kv_role": role, "kv_connector_extra_config": extra}
    config = EngineConfig(**SMALL, **options, kv_transfer_config=transfer)
    async with AsyncEngine(config, plugins=load_plugins(extra=[peers])) as engine:
        yield engine


async def finish(
    engine: AsyncEngine,
    params: SamplingParams = GREEDY,
    tokens: list[int] = TOKENS,
    **options: Any,
) -> RequestOutput:
    async for output in engine.generate(tokens, params, **options):
        assert output.error is None
        last = output
    return last


def following(output: RequestOutput, **changes: Any) -> SamplingParams:
    """What goes to the engine that computes the outputs."""
    assert output.kv_transfer_params is not None
    params = {**output.kv_transfer_params, **changes}
    return msgspec.structs.replace(GREEDY, kv_transfer_params=params)


async def alone() -> list[int]:
    """The tokens of an engine without a connector."""
    async with AsyncEngine(EngineConfig(**SMALL)) as engine:
        return (await finish(engine)).outputs[0].token_ids


# ---------------------------------------------------------------- prompts computed elsewhere


async def test_a_prompt_is_computed_by_one_engine_and_its_outputs_by_another(
    tmp_path: Path,
) -> None:
    where = reserved_address()
    peers = RecordedPeers()
    producer = engine_with(peers, peer_config(tmp_path, listen=where), "kv_producer")
    consumer = engine_with(peers, peer_config(tmp_path, peers=[where]), "kv_consumer")
    async with producer as prefill, consumer as decode:
        prompt = await finish(prefill, PREFILL)
        host, port = where.split(":")
        assert prompt.kv_transfer_params is not None
        assert prompt.kv_transfer_params["do_remote_prefill"] is True
        assert prompt.kv_transfer_params["remote_host"] == host
        assert prompt.kv_transfer_params["remote_port"] == int(port)
        output = await finish(decode, following(prompt))
        assert output.outputs[0].token_ids == await alone()
        assert output.num_cached_tokens == NUM_LOADED
        assert decode.stats().external_prefix_cache_hits == NUM_LOADED
        assert output.kv_transfer_params is None
        await settled(prefill)
        assert (await finish(prefill)).kv_transfer_params is None


async def test_each_of_several_engines_serves_at_a_port_of_its_own(tmp_path: Path) -> None:
    where = reserved_neighbours()
    extra = peer_config(tmp_path, listen=where[0])
    transfer = {"kv_connector": "peer_store", "kv_connector_extra_config": extra}
    config = EngineConfig(**SMALL, data_parallel_size=2, kv_transfer_config=transfer)
    consumer = engine_with(RecordedPeers(), peer_config(tmp_path, peers=where), "kv_consumer")
    with forked.processes_of(processes):
        async with AsyncEngine(config) as prefill, consumer as decode:
            for rank in range(2):
                tokens = [5 + rank] * len(TOKENS)
                prompt = await finish(prefill, PREFILL, tokens, data_parallel_rank=rank)
                params = prompt.kv_transfer_params
                assert params is not None
                assert f"{params['remote_host']}:{params['remote_port']}" == where[rank]
                output = await finish(decode, following(prompt), tokens)
                assert output.num_cached_tokens == NUM_LOADED


async def test_blocks_that_are_still_being_saved_are_awaited(tmp_path: Path) -> None:
    where = reserved_address()
    peers = RecordedPeers(HeldBack)
    producer = engine_with(peers, peer_config(tmp_path, listen=where))
    consumer = engine_with(RecordedPeers(), peer_config(tmp_path, peers=[where]))
    async with producer as prefill, consumer as decode:
        prompt = await finish(prefill, PREFILL)
        (worker,) = peers.workers
        # Whoever was not told that they come does not wait.
        assert (await finish(decode)).num_cached_tokens == 0
        assert not worker.awaited.is_set()
        await settled(decode)
        outputs = asyncio.create_task(finish(decode, following(prompt)))
        await asyncio.to_thread(worker.awaited.wait, 300)
        other = await finish(decode, tokens=TOKENS[::-1])
        assert other.num_cached_tokens == 0 and not outputs.done(), "others wait, too"
        assert prefill.stats().kv_blocks_used >= NUM_LOADED // 4, "its blocks are not held"
        worker.may_save.set()
        assert (await outputs).num_cached_tokens == NUM_LOADED
        await settled(prefill)


async def test_what_host_memory_has_lost_is_handed_over_from_the_gpu(tmp_path: Path) -> None:
    """The second prompt is all hits in the first engine's cache, of which saves are not offered."""
    where = reserved_address()
    peers = RecordedPeers()
    producer = engine_with(peers, peer_config(tmp_path, listen=where))
    consumer = engine_with(RecordedPeers(), peer_config(tmp_path, peers=[where]))
    async with producer as prefill, consumer as decode:
        await finish(prefill, PREFILL)
        await drained(prefill)
        (worker,) = peers.workers
        for item in list(worker._memory._blocks):
            worker._memory.remove(item)
        prompt = await finish(prefill, PREFILL)
        assert prompt.num_cached_tokens == NUM_LOADED
        assert (await finish(decode, following(prompt))).num_cached_tokens == NUM_LOADED
        await drained(prefill)


async def test_short_memory_keeps_the_head_of_a_prompt(tmp_path: Path) -> None:
    where = reserved_address()
    peers = RecordedPeers()
    small = peer_config(tmp_path, listen=where, size_gib=5.5 * 19_500 / (1 << 30))
    consumer = engine_with(RecordedPeers(), peer_config(tmp_path, peers=[where]))
    async with engine_with(peers, small) as prefill, consumer as decode:
        prompt = await finish(prefill, PREFILL)
        output = await finish(decode, following(prompt))
        (worker,) = peers.workers
        assert len(worker._memory._blocks) == 5
        assert output.num_cached_tokens == 5 * 4
        await drained(prefill)


@pytest.mark.parametrize("change", ["ticket", "transfer", "port", "type", "address"])
async def test_what_no_peer_has_promised_is_not_awaited(
    change: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Also what a peer has promised, if this engine is not told to ask it."""
    where, elsewhere = reserved_address(), reserved_address()
    changes: dict[str, Any] = {
        "ticket": {"remote_ticket": "00" * 32},
        "transfer": {"remote_transfer": 1 << 60},
        "port": {"remote_port": 1},
        "type": {"remote_host": ["a"]},
        "address": {},
    }[change]
    peers = RecordedPeers(HeldBack)
    extra = {"advertise": elsewhere} if change == "address" else {}
    producer = engine_with(peers, peer_config(tmp_path, listen=where, **extra))
    consumer = engine_with(RecordedPeers(), peer_config(tmp_path, peers=[where]))
    async with producer as prefill, consumer as decode:
        prompt = await finish(prefill, PREFILL)
        (worker,) = peers.workers
        output = await finish(decode, following(prompt, **changes))
        assert output.num_cached_tokens == 0 and not worker.awaited.is_set()
        warned = f"handed over by {elsewhere}, which is none" in caplog.text
        assert warned == (change == "address"), "a client can fill the log, or an error is hidden"
        worker.may_save.set()
        await drained(prefill)


async def test_blocks_that_are_never_saved_are_not_awaited_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    where = reserved_address()
    peers = RecordedPeers(HeldBack)
    producer = engine_with(peers, peer_config(tmp_path, listen=where))
    consumer = engine_with(RecordedPeers(), peer_config(tmp_path, peers=[where]))
    async with producer as prefill, consumer as decode:
        prompt = await finish(prefill, PREFILL)
        (worker,) = peers.workers
        monkeypatch.setattr(peer_server, "HANDOVER_SECONDS", 0.1)
        output = await finish(decode, following(prompt))
        assert output.num_cached_tokens == 0 and worker.awaited.is_set()
        worker.may_save.set()


async def test_lookups_that_wait_are_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peer_store, "MAX_WAITING", 1)
    where = reserved_address()
    peers = RecordedPeers(HeldBack)
    producer = engine_with(peers, peer_config(tmp_path, listen=where))
    consumer = engine_with(RecordedPeers(), peer_config(tmp_path, peers=[where]))
    async with producer as prefill, consumer as decode:
        first = await finish(prefill, PREFILL)
        second = await finish(prefill, PREFILL, TOKENS[::-1])
        (worker,) = peers.workers
        waiting = asyncio.create_task(finish(decode, following(first)))
        await asyncio.to_thread(worker.awaited.wait, 300)
        output = await finish(decode, following(second), TOKENS[::-1])
        assert output.num_cached_tokens == 0 and not waiting.done()
        worker.may_save.set()
        assert (await waiting).num_cached_tokens == NUM_LOADED


def finished(reason: Any = "length", asked: Any = True, **state: Any) -> Request:
    """A request of 10 blocks that has ended."""
    request = Request(
        request_id="one",
        prompt_token_ids=TOKENS,
        params=SamplingParams(kv_transfer_params={"do_remote_decode": asked}),
        max_tokens=1,
        seed=0,
    )
    request.block_hashes = [key(number) for number in range(len(TOKENS) // 4)]
    request.tables = [list(range(1, 12))]
    request.finish_reason = reason
    for name, value in state.items():
        setattr(request, name, value)
    return request


def scheduler_with(role: Any, extra: dict[str, Any]) -> PeerScheduler:
    setup = setup_with(role, extra)
    return PeerScheduler(setup, PeerSettings.of(setup))


def test_only_a_prompt_that_was_computed_is_handed_over(tmp_path: Path) -> None:
    extra = peer_config(tmp_path, listen="10.0.0.5:7100", peers=["10.0.0.6:7100"])
    scheduler = scheduler_with("kv_both", extra)
    for request in (
        finished("abort"),
        finished("error"),
        finished(None),
        finished(asked=False),
        finished(asked="yes"),
        finished(compacted=True),
        finished(stale=True),
    ):
        assert scheduler.request_finished(7, request) == (False, None)
    assert scheduler.build_metadata() is None
    is_retained, params = scheduler.request_finished(7, finished())
    made = Handover.make(SECRET, Address("10.0.0.5", 7100), 7)
    assert is_retained and params == msgspec.to_builtins(made)
    (job,) = scheduler.build_metadata().saves  # type: ignore[union-attr]
    assert job.block_ids == tuple(range(1, 11)) and job.places == tuple(finished().block_hashes)
    scheduler.close()
    for role, other in (
        ("kv_consumer", extra),
        ("kv_both", peer_config(tmp_path, peers=["10.0.0.6:7100"])),
    ):
        scheduler = scheduler_with(role, other)
        assert scheduler.request_finished(7, finished()) == (False, None)
        assert scheduler.start_save(8, finished(), [key(1)], [1]) == () or role == "kv_consumer"
        scheduler.close()


def test_prompts_are_retained_while_there_is_room(tmp_path: Path) -> None:
    """Then those that follow are told the last save, before which theirs were queued."""
    extra = peer_config(tmp_path, listen="0.0.0.0:7100", advertise="node-1:7100")
    scheduler = scheduler_with("kv_producer", extra)
    results = [scheduler.request_finished(number, finished()) for number in range(9)]
    num_retained = sum(is_retained for is_retained, _ in results)
    assert num_retained == 7, "of 10 blocks each, with room for 64"
    transfers = [params["remote_transfer"] for _, params in results if params]
    assert transfers == [0, 1, 2, 3, 4, 5, 6, 6, 6]
    assert results[8][1]["remote_host"] == "node-1"  # type: ignore[index]
    assert scheduler.start_save(9, finished(), [key(n) for n in range(9)], list(range(9))) == ()
    scheduler.update(KVReport(finished=(0, 1)))
    assert scheduler.request_finished(9, finished())[0]
    scheduler.close()


async def drained(engine: AsyncEngine) -> None:
    """Wait until no transfer holds a block."""
    async with asyncio.timeout(300):
        while engine.stats().kv_blocks_used:
            await asyncio.sleep(0.001)


async def test_an_engine_computes_what_a_peer_promises_and_does_not_send(tmp_path: Path) -> None:
    def promise(connection: socket.socket, ask: Ask) -> None:
        if ask.content:
            connection.sendall(peer_wire.encode_count(len(ask.keys)) + bytes(100))
            raise OSError("it dies")
        connection.sendall(peer_wire.encode_count(len(ask.keys)))

    expected = await alone()
    async with AsyncEngine(EngineConfig(**SMALL, kv_transfer_config=NOWHERE)) as engine:
        assert engine.info.kv_layout is not None
        fingerprint = engine.info.kv_layout.fingerprint
    with false_peer(promise, fingerprint) as peer:
        extra = peer_config(tmp_path, peers=[str(peer)])
        async with engine_with(RecordedPeers(), extra) as engine:
            output = await finish(engine)
            assert output.outputs[0].token_ids == expected
            assert output.num_cached_tokens == 0
            assert engine.stats().num_kv_load_failures == 1


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("role", "extra", "word"),
    [
        ("kv_both", {}, "peers"),
        ("kv_producer", {"peers": ["a:1"]}, "listen"),
        ("kv_consumer", {"listen": "127.0.0.1:1"}, "peers"),
        ("kv_both", {"peers": ["a:1"], "advertise": "b:1"}, "listen"),
        ("kv_both", {"peers": ["a"]}, "peers: 'a' is not HOST:PORT"),
        ("kv_both", {"peers": ["a:65536"]}, "peers"),
        ("kv_both", {"peers": ["::1:5"]}, "peers"),
        ("kv_both", {"listen": ":5"}, "listen"),
        ("kv_producer", {"listen": "0.0.0.0:7100"}, "advertise"),
        ("kv_producer", {"listen": "[::]:7100"}, "advertise"),
        ("kv_both", {"listen": "127.0.0.1:0"}, "listen"),
        ("kv_both", {"listen": "256.0.0.1:7100"}, "listen"),
        ("kv_both", {"peers": ["a:1"], "size_gib": 0}, "size_gib"),
        ("kv_both", {"peers": ["a:1"], "size_gib": 1e-9}, "size_gib"),
        ("kv_both", {"peers": ["a:1"], "secret_file": "/nowhere"}, "secret_file"),
        ("kv_both", {"peers": ["a:1"], "secret": "x"}, "secret"),
    ],
)
def test_wrong_options_are_refused_by_name(
    role: Any, extra: dict[str, Any], word: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        worker_with(role, {"secret_file": secret_in(tmp_path), **extra})
    assert caught.value.param == "kv_transfer_config"


def setup_with(role: Any, extra: dict[str, Any]) -> KVConnectorSetup:
    transfer = KVTransferConfig(
        kv_connector="peer_store", kv_role=role, kv_connector_extra_config=extra
    )
    return KVConnectorSetup(
        transfer=transfer, layout=LAYOUT, plugins=load_plugins(), notify=lambda: None
    )


def worker_with(role: Any, extra: dict[str, Any]) -> PeerWorker:
    setup = setup_with(role, extra)
    return PeerWorker(setup, PeerSettings.of(setup))


def test_a_short_secret_and_an_address_in_use_are_refused(tmp_path: Path) -> None:
    extra = {"secret_file": secret_in(tmp_path, b"short"), "peers": ["a:1"]}
    with pytest.raises(ConfigError, match=r"secret_file.*5 bytes, of at least 16"):
        worker_with("kv_both", extra)
    with socket.create_server(("127.0.0.1", 0)) as other:
        address = Address(*other.getsockname())
        extra = {"secret_file": secret_in(tmp_path), "listen": str(address)}
        with pytest.raises(ConfigError, match=r"listen: .* cannot be had"):
            worker_with("kv_producer", extra)


def test_every_engine_needs_a_port(tmp_path: Path) -> None:
    extra = peer_config(tmp_path, listen="127.0.0.1:65534", advertise="[fd00::5]:65000")
    setup = setup_with("kv_producer", extra)
    settings = PeerSettings.of(replace(setup, member=1))
    assert settings.listen == ("127.0.0.1", 65535)
    assert settings.advertised == ("fd00::5", 65001)
    with pytest.raises(ConfigError, match=r"listen: .* no port to engine 2 .data_parallel_size"):
        PeerSettings.of(replace(setup, member=2))


def test_a_connector_among_others_knows_its_engine(tmp_path: Path) -> None:
    extra = peer_config(tmp_path, listen="10.0.0.5:7100")
    parts = [{"kv_connector": "peer_store", "kv_connector_extra_config": extra}]
    transfer = KVTransferConfig(
        kv_connector="multi", kv_connector_extra_config={"connectors": parts}
    )
    setup = replace(setup_with("kv_both", {}), transfer=transfer, member=3)
    scheduler = MultiConnector.make_scheduler(setup)
    _, params = scheduler.request_finished(7, finished())
    assert params is not None and params["remote_port"] == 7103
    scheduler.close()


def test_addresses_of_both_families() -> None:
    for text in ("10.0.0.5:7100", "[fd00::5]:7100", "node-3.example:1"):
        assert str(Address.read(text)) == text
    assert Address.read("[fd00::5]:7100").host == "fd00::5"


def test_a_handover_is_read_as_it_was_made() -> None:
    made = Handover.make(SECRET, Address("10.0.0.5", 7100), 17)
    params = msgspec.to_builtins(made)
    assert Handover.read(params, SECRET) == made
    assert Handover.read(params, b"another of sixteen") is None
    assert Handover.read({**params, "do_remote_prefill": False}, SECRET) is None
    assert Handover.read({**params, "remote_ticket": "é"}, SECRET) is None
    assert Handover.read(None, SECRET) is None
