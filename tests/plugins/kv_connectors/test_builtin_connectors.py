"""What the kit cannot know of the built-in connectors: files, limits, order, options."""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import safetensors.torch
import torch
from rounded_cache import FORMATS, rounded
from test_kv_connector_kits import TestCpuOffload as CpuOffload

from jackfield import AsyncEngine, EngineConfig, OutputKind, SamplingParams, hookimpl
from jackfield.core.cache.groups import CachePart
from jackfield.core.config import KVTransferConfig
from jackfield.core.errors import ConfigError
from jackfield.core.parts.kv_transfer import KVReport
from jackfield.core.protocols.kv import KVConnectorSetup, KVLayout
from jackfield.core.registry import load_plugins
from jackfield.plugins.conformance.kv_halves import Halves, bits, random_cache
from jackfield.plugins.kv_connectors import copying
from jackfield.plugins.kv_connectors import store as store_module
from jackfield.plugins.kv_connectors.block_file import BlockFormat
from jackfield.plugins.kv_connectors.copying import BlockCopier
from jackfield.plugins.kv_connectors.device_offload import DeviceOffloadOptions
from jackfield.plugins.kv_connectors.file_store import FileStore
from jackfield.plugins.kv_connectors.multi import MultiMetadata, MultiWorker
from jackfield.plugins.kv_connectors.reduced_blocks import ReducedType, ReducingCopier
from jackfield.plugins.kv_connectors.store import StoreConnector

LAYOUT = KVLayout(
    num_blocks=4,
    block_size=4,
    layers=(
        (CachePart("kv", (2, 8), "bfloat16", count=2),),
        (CachePart("kv", (1, 4), "bfloat16", count=2), CachePart("scale", (1,), "float32")),
    ),
    block_bytes=2 * 4 * (16 + 4) * 2 + 4 * 4,
    fingerprint=b"f" * 32,
)

SMALL: dict[str, Any] = {
    "device": "cpu",
    "block_size": 4,
    "max_model_len": 96,
    "num_gpu_blocks_override": 33,
}
TOKENS = list(range(20, 60))
GREEDY = SamplingParams(temperature=0, max_tokens=4, output_kind=OutputKind.FINAL_ONLY)


def setup_with(**extra: Any) -> KVConnectorSetup:
    transfer = KVTransferConfig(kv_connector="file_store", kv_connector_extra_config=extra)
    return KVConnectorSetup(
        transfer=transfer, layout=LAYOUT, plugins=load_plugins(), notify=lambda: None
    )


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def files_in(folder: Path) -> list[Path]:
    return list(folder.rglob("*.safetensors"))


# ---------------------------------------------------------------- blocks in fewer bits


def check_reduced(name: ReducedType, device: str) -> None:
    """Some blocks, in chunks, against what a reference rounds in float64."""
    shapes = (2, 16), (1, 10)
    draw = torch.Generator().manual_seed(0)
    before = [torch.randn(2, 20, 4, *each, generator=draw) for each in shapes]
    with torch.inference_mode():
        caches = [cache.to(device).clone() for cache in before]
    copier = ReducingCopier(caches, name)
    pool = torch.zeros(12, copier.block_bytes, dtype=torch.uint8, device=device)
    blocks, places = [3, 19, 1, 8, 7, 6, 12], [4, 5, 6, 0, 11, 10, 2]
    copier.read(blocks, pool, places)
    with torch.inference_mode():
        for cache in caches:
            cache.zero_()
    copier.write(blocks, pool, places)
    others = [n for n in range(20) if n not in blocks]
    for cache, was in zip(caches, before, strict=True):
        for side, bits_of_side in enumerate(FORMATS[name]):
            expected = rounded(was[side, blocks], bits_of_side)
            found = cache[side, blocks].cpu()
            # In float32, a few in the middle between two steps go to the other one.
            assert torch.isclose(found, expected, atol=1e-5).float().mean() > 0.99
            assert (found - expected).abs().max() < 0.5
        assert not cache[:, others].any()


@pytest.mark.parametrize("name", ["int8", "int8_int4", "int4"])
def test_blocks_are_kept_in_fewer_bits(name: ReducedType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copying, "CHUNK_BYTES", 1)
    check_reduced(name, "cpu")


# ---------------------------------------------------------------- block files


def test_a_block_file_is_safetensors() -> None:
    caches = [random_cache(4, 4, heads, dim, torch.bfloat16) for heads, dim in ((2, 8), (1, 4))]
    with torch.inference_mode():
        caches.append(torch.randn(1, 4, 4, 1))
    copier = BlockCopier(caches)
    rows = copier.new_rows(1)
    copier.read([2], rows, [0])
    data = BlockFormat(LAYOUT).encode(key(1), memoryview(rows[0].numpy()))
    read = safetensors.torch.load(data)
    assert sorted(read) == ["layer.0.kv", "layer.1.kv", "layer.1.scale"]
    for stored, cache in zip((read[name] for name in sorted(read)), caches, strict=True):
        assert stored.dtype == cache.dtype
        assert torch.equal(stored.view(torch.uint8), cache[:, 2].contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("heads_and_dim", [(2, 8), (1, 10), (3, 5)])
def test_blocks_are_copied_in_chunks_whatever_their_width(
    dtype: torch.dtype, heads_and_dim: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    caches = [random_cache(20, 4, *shape, dtype) for shape in ((2, 16), heads_and_dim)]
    before = [cache.clone() for cache in caches]
    block_bytes = sum(cache[:, 0].nbytes for cache in caches)
    monkeypatch.setattr(copying, "CHUNK_BYTES", 3 * block_bytes)
    copier = BlockCopier(caches)
    assert copier.block_bytes == block_bytes
    rows = copier.new_rows(12)
    blocks, places = [3, 19, 1, 8, 7, 6, 12], [4, 5, 6, 0, 11, 10, 2]
    copier.read(blocks, rows, places)
    with torch.inference_mode():
        for cache in caches:
            cache.view(torch.uint8).zero_()
    copier.write(blocks, rows, places)
    others = [n for n in range(20) if n not in blocks]
    for cache, was in zip(caches, before, strict=True):
        assert torch.equal(bits(cache[:, blocks]), bits(was[:, blocks]))
        assert not bits(cache[:, others]).any()


def test_a_block_of_another_key_model_or_layout_is_refused() -> None:
    block = memoryview(bytes(range(256)) * 2)[: LAYOUT.block_bytes]
    data = BlockFormat(LAYOUT).encode(key(1), block)
    assert bytes(BlockFormat(LAYOUT).decode(key(1), data)) == bytes(block)
    changes: list[tuple[KVLayout, bytes, bytes]] = [
        (LAYOUT, key(2), data),
        (layout_with(fingerprint=b"g" * 32), key(1), data),
        (first_part(dtype="float16"), key(1), data),
        (first_part(shape=(1, 16)), key(1), data),
        (first_part(name="latent"), key(1), data),
    ]
    changes += [(LAYOUT, key(1), data[:cut]) for cut in (0, 7, 8, 60, len(data) - 1)]
    changes += [(LAYOUT, key(1), data + b"x"), (LAYOUT, key(1), b"\xff" * 300)]
    for position in (*range(0, 16), len(data) - 1, len(data) - 200):
        flipped = bytearray(data)
        flipped[position] ^= 64
        changes.append((LAYOUT, key(1), bytes(flipped)))
    for layout, name, changed in changes:
        with pytest.raises(ValueError, match="it"):
            BlockFormat(layout).decode(name, changed)


def layout_with(**changes: Any) -> KVLayout:
    return msgspec.structs.replace(LAYOUT, **changes)


def first_part(**changes: Any) -> KVLayout:
    (part,), *others = LAYOUT.layers
    return layout_with(layers=((msgspec.structs.replace(part, **changes),), *others))


# ---------------------------------------------------------------- file_store


def test_file_store_keeps_its_limit_and_drops_what_was_not_read_for_longest(
    tmp_path: Path,
) -> None:
    store = FileStore(setup_with(path=str(tmp_path), max_gib=10_000 / (1 << 30)))
    for number in range(9):
        store.put(key(number), bytes(1000))
        os.utime(store._path(key(number)), (number, number))
    assert store.get(key(0)) is not None  # Read: the youngest now.
    store.put(key(9), bytes(1000))
    store.put(key(10), bytes(1000))
    files = files_in(tmp_path)
    assert sum(file.stat().st_size for file in files) <= 10_000
    assert store.get(key(0)) is not None and store.get(key(10)) is not None
    assert store.get(key(1)) is None
    store.put(key(11), bytes(9500))
    assert store.get(key(11)) is None, "more than the limit leaves room for"


def test_file_store_is_for_its_owner_alone(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        setup = setup_with(path=str(tmp_path / "store"))
        FileStore(setup).put(key(1), b"x")
        paths = [tmp_path / "store", *(tmp_path / "store").rglob("*")]
        assert len(paths) == 4
        for path in paths:
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path
        fingerprint = paths[1]
        fingerprint.chmod(0o755)
        assert FileStore(setup).get(key(1)) == b"x"
        assert fingerprint.stat().st_mode & 0o777 == 0o700, "that of an earlier version"
    finally:
        os.umask(before)


def test_file_store_counts_what_other_engines_have_written(tmp_path: Path) -> None:
    limit = 100_000 / (1 << 30)
    first, two = (FileStore(setup_with(path=str(tmp_path), max_gib=limit)) for _ in range(2))
    for number in range(400):
        (first if number % 2 else two).put(key(number), bytes(1000))
        size = sum(f.stat().st_size for f in files_in(tmp_path))
        assert size <= 100_000 * 1.1


def test_many_writers_and_readers_never_see_half_a_file(tmp_path: Path) -> None:
    limit = 30_000 / (1 << 30)
    wrong: list[str] = []

    def work(seed: int) -> None:
        try:
            store = FileStore(setup_with(path=str(tmp_path), max_gib=limit))
            for step in range(150):
                number = (step * 7 + seed) % 40
                store.put(key(number), bytes([number]) * 1000)
                match = store.get(key((number * 3) % 40))
                if match is not None and match != bytes([(number * 3) % 40]) * 1000:
                    wrong.append(f"{number}: {len(match)}")
        except Exception as error:
            wrong.append(repr(error))

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert not list(tmp_path.rglob("*.unfinished"))


def test_a_file_that_was_never_finished_is_removed_after_a_while(tmp_path: Path) -> None:
    store = FileStore(setup_with(path=str(tmp_path), max_gib=1))
    store.put(key(1), b"x")
    fresh, old = (store._path(key(1)).parent / f"{n}.unfinished" for n in "ab")
    fresh.write_bytes(b"half")
    old.write_bytes(b"half")
    os.utime(old, (1, 1))
    FileStore(setup_with(path=str(tmp_path), max_gib=1)).put(key(2), b"y")
    assert fresh.exists() and not old.exists()


# ---------------------------------------------------------------- a store that fails


class Shelf:
    """A store in this process that can be told to hang or to raise."""

    def __init__(self) -> None:
        self.content: dict[bytes, bytes] = {}
        self.hangs_in: set[str] = set()
        self.raises = False
        self.go_on = threading.Event()
        self.calls: Counter[str] = Counter()

    def _visit(self, method: str) -> None:
        self.calls[method] += 1
        if self.raises:
            raise OSError("on purpose")
        if method in self.hangs_in:
            self.go_on.wait(300)

    def count_present(self, keys: Sequence[bytes]) -> int:
        self._visit("count_present")
        return next((n for n, item in enumerate(keys) if item not in self.content), len(keys))

    def get(self, item: bytes) -> bytes | None:
        self._visit("get")
        return self.content.get(item)

    def put(self, item: bytes, data: bytes) -> None:
        self._visit("put")
        self.content[item] = data

    def remove(self, item: bytes) -> None:
        self.content.pop(item, None)

    def close(self) -> None:
        pass

    jackfield_api = 3

    @hookimpl
    def register_kv_connectors(self, registry: Any) -> None:
        class Connector(StoreConnector):
            store_class = staticmethod(lambda setup: self)

        registry.add("shelf", Connector)


async def generate(engine: AsyncEngine, tokens: list[int]) -> Any:
    async for output in engine.generate(tokens, GREEDY):
        assert output.error is None
        last = output
    return last


async def settled(engine: AsyncEngine) -> None:
    async with asyncio.timeout(300):
        while engine.stats().kv_blocks_used:
            await asyncio.sleep(0.001)
    assert await engine.reset_prefix_cache()


@pytest.mark.parametrize("method", ["count_present", "get"])
async def test_a_store_that_hangs_costs_a_recompute(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "PAUSE_SECONDS", 3600.0)
    shelf = Shelf()
    config = EngineConfig(**SMALL, kv_transfer_config={"kv_connector": "shelf"})
    async with AsyncEngine(config, plugins=load_plugins(extra=[shelf])) as engine:
        first = await generate(engine, TOKENS)
        await settled(engine)
        assert len(shelf.content) >= 10
        shelf.hangs_in = {method}
        monkeypatch.setattr(store_module, "ANSWER_SECONDS", 0.3)
        again = await asyncio.wait_for(generate(engine, TOKENS), 100)
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        assert again.num_cached_tokens == 0
        # Left alone: the next one does not wait at all.
        calls = shelf.calls[method]
        await asyncio.wait_for(generate(engine, TOKENS[::-1]), 100)
        assert shelf.calls[method] == calls
        shelf.go_on.set()


async def test_a_timer_that_is_early_leaves_no_request_waiting(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As timers are: loops round their times, and keep them a while."""
    monkeypatch.setattr(store_module, "ANSWER_SECONDS", 0.3)
    loop = asyncio.get_running_loop()
    exact: Any = loop.call_later
    early = lambda delay, *rest, **more: exact(max(0.0, delay - 0.05), *rest, **more)  # noqa: E731
    shelf = Shelf()
    shelf.hangs_in = {"count_present"}
    config = EngineConfig(**SMALL, kv_transfer_config={"kv_connector": "shelf"})
    async with AsyncEngine(config, plugins=load_plugins(extra=[shelf])) as engine:
        monkeypatch.setattr(loop, "call_later", early)
        await asyncio.wait_for(generate(engine, TOKENS), 100)
        monkeypatch.undo()
        shelf.go_on.set()


async def test_a_store_that_raises_is_left_alone_for_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "PAUSE_SECONDS", 3600.0)
    shelf = Shelf()
    shelf.raises = True
    config = EngineConfig(**SMALL, kv_transfer_config={"kv_connector": "shelf"})
    async with AsyncEngine(config, plugins=load_plugins(extra=[shelf])) as engine:
        for start in range(4):
            await generate(engine, [t + start for t in TOKENS])
        await settled(engine)
    assert shelf.calls["count_present"] <= 2 and not shelf.content


async def test_blocks_are_stored_by_several_threads() -> None:
    """As their digests take longer than their copies."""

    class Meeting(Shelf):
        """The first block is stored when the second has come."""

        def put(self, item: bytes, data: bytes) -> None:
            super().put(item, data)
            if self.calls["put"] > 1:
                self.go_on.set()
            assert self.go_on.wait(300), "it is stored alone"

    shelf = Meeting()
    config = EngineConfig(**SMALL, kv_transfer_config={"kv_connector": "shelf"})
    async with AsyncEngine(config, plugins=load_plugins(extra=[shelf])) as engine:
        await generate(engine, TOKENS)
        await settled(engine)
        assert len(shelf.content) >= 10 and shelf.go_on.is_set()


async def test_a_store_that_is_too_slow_holds_no_more_than_its_share(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "MIN_BLOCKS_BEING_SAVED", 6)
    shelf = Shelf()
    shelf.hangs_in = {"put"}
    config = EngineConfig(**SMALL, kv_transfer_config={"kv_connector": "shelf"})
    async with AsyncEngine(config, plugins=load_plugins(extra=[shelf])) as engine:
        for start in range(4):
            await generate(engine, [t + start for t in TOKENS])
        assert engine.stats().kv_blocks_used <= 33 // 4
        shelf.go_on.set()
        await settled(engine)
        assert 0 < len(shelf.content) <= 33 // 4


# ---------------------------------------------------------------- options


@pytest.mark.parametrize(
    ("name", "extra", "word"),
    [
        ("file_store", {}, "path"),
        ("file_store", {"path": "/dev/null/x"}, "path"),
        ("file_store", {"path": "x", "max_gib": 0}, "max_gib"),
        ("file_store", {"path": "x", "max_gb": 1}, "max_gb"),
        ("cpu_offload", {"kv_offloading_size": -1}, "kv_offloading_size"),
        ("cpu_offload", {"kv_offloading_size": 1e-9}, "kv_offloading_size"),
        ("cpu_offload", {"kv_offloading_dtype": "int3"}, "kv_offloading_dtype"),
        ("device_offload", {"kv_offloading_dtype": "auto"}, "kv_offloading_dtype"),
        ("device_offload", {"kv_offloading_size": 1e-9}, "kv_offloading_size"),
        ("multi", {}, "connectors"),
        ("multi", {"connectors": []}, "connectors"),
        ("multi", {"connectors": [{"kv_connector": "nobody"}]}, "nobody"),
        ("multi", {"connectors": [{"kv_connector": "file_store", "kv_rol": 1}]}, "kv_rol"),
    ],
)
def test_wrong_options_are_refused_by_name(name: str, extra: dict[str, Any], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        Halves(name, extra, load_plugins(), [random_cache(4, 4, 1, 8, torch.float32)])


@pytest.mark.parametrize(
    ("dtype", "head_dim", "reason"),
    [
        (torch.float8_e4m3fn, 8, "kv_offloading_dtype: int4 is for .* caches kv in float8_e4m3fn"),
        (torch.bfloat16, 7, "kv_offloading_dtype: int4: two channels share a byte"),
    ],
)
def test_what_cannot_be_kept_in_fewer_bits_is_refused(
    dtype: torch.dtype, head_dim: int, reason: str
) -> None:
    caches = [random_cache(4, 4, 1, head_dim, dtype)]
    with pytest.raises(ConfigError, match=reason):
        Halves("device_offload", {"kv_offloading_dtype": "int4"}, load_plugins(), caches)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"kv_connector": "nobody"}, "nobody"),
        ({}, "kv_connector"),
        ({"kv_connector": "file_store", "kv_role": "kv_all"}, "kv_role"),
        ({"kv_connector": "file_store", "kv_port": 1}, "kv_port"),
        ("file_store", "kv_transfer_config"),
        (KVTransferConfig(kv_connector="file_store", kv_role="all"), "kv_role"),  # type: ignore
        ({"kv_connector": "file_store", "member": 1}, "member: the engine sets it"),
    ],
)
async def test_a_wrong_kv_transfer_config_stops_the_start(options: Any, word: str) -> None:
    with pytest.raises(ConfigError, match=word) as caught:
        async with AsyncEngine(EngineConfig(device="cpu", kv_transfer_config=options)):
            pass
    assert caught.value.param == "kv_transfer_config"


def test_a_connector_without_prefix_caching_is_refused() -> None:
    with pytest.raises(ConfigError, match="enable_prefix_caching"):
        EngineConfig(
            kv_transfer_config={"kv_connector": "cpu_offload"}, enable_prefix_caching=False
        )


# ---------------------------------------------------------------- cpu_offload, multi, roles


def test_cpu_offload_with_hardly_any_memory(tmp_path: Path) -> None:
    class Tight(CpuOffload):
        def extra_config(self, folder: Path) -> dict[str, Any]:
            return {"kv_offloading_size": 15.5 * 18432 / (1 << 30)}

    Tight().test_random_traffic_gives_the_tokens_of_an_engine_without(3, tmp_path)


async def external_hits(config: dict[str, Any]) -> int:
    """Tokens that a fresh engine loads for TOKENS."""
    async with AsyncEngine(EngineConfig(**SMALL, kv_transfer_config=config)) as engine:
        async for output in engine.generate(TOKENS, GREEDY):
            assert output.finished and output.error is None
        return engine.stats().external_prefix_cache_hits


def transfer(name: str, role: str = "kv_both", **extra: Any) -> dict[str, Any]:
    return {"kv_connector": name, "kv_role": role, "kv_connector_extra_config": extra}


async def test_a_consumer_saves_nothing_and_a_producer_loads_nothing(tmp_path: Path) -> None:
    path = str(tmp_path)
    assert await external_hits(transfer("file_store", "kv_consumer", path=path)) == 0
    assert not files_in(tmp_path)
    assert await external_hits(transfer("file_store", "kv_producer", path=path)) == 0
    assert files_in(tmp_path)
    assert await external_hits(transfer("file_store", "kv_producer", path=path)) == 0
    assert await external_hits(transfer("file_store", "kv_consumer", path=path)) == 36


async def test_multi_loads_from_the_first_that_has_it_and_saves_to_all(tmp_path: Path) -> None:
    first, second = str(tmp_path / "1"), str(tmp_path / "2")
    both = [transfer("file_store", path=first), transfer("file_store", path=second)]
    assert await external_hits(transfer("multi", connectors=both)) == 0
    written = [len(files_in(Path(p))) for p in (first, second)]
    assert written[0] == written[1] >= 10
    for file in files_in(Path(first)):
        file.unlink()
    assert await external_hits(transfer("multi", connectors=both)) == 36
    unread = [transfer("file_store", "kv_producer", path=second)]
    assert await external_hits(transfer("multi", connectors=unread)) == 0


async def test_the_failure_policy_fail_ends_the_request(tmp_path: Path) -> None:
    config = transfer("file_store", path=str(tmp_path))
    assert await external_hits(config) == 0
    for file in files_in(tmp_path):
        file.write_bytes(b"")
    engine_config = EngineConfig(
        **SMALL, kv_transfer_config={**config, "kv_load_failure_policy": "fail"}
    )
    async with AsyncEngine(engine_config) as engine:
        async for output in engine.generate(TOKENS, GREEDY):
            last = output
        assert last.outputs[0].finish_reason == "error"
        assert last.error is not None and "KV" in last.error


async def test_another_model_finds_nothing(tmp_path: Path) -> None:
    config = transfer("file_store", path=str(tmp_path))
    fingerprints = set()
    for options in ({}, {"load_format": "dummy"}, {"load_format": "dummy", "seed": 1},
                    {"dtype": "bfloat16"}, {"block_size": 8}, {"kv_cache_dtype": "int8"},
                    {"kv_cache_dtype": "int4"}, {"kv_cache_dtype": "int8_int4"}):  # fmt: skip
        engine_config = EngineConfig(
            device="cpu", max_model_len=96, num_gpu_blocks_override=33,
            kv_transfer_config=config, **options,
        )  # fmt: skip
        async with AsyncEngine(engine_config) as engine:
            assert engine.info.kv_layout is not None
            fingerprints.add(engine.info.kv_layout.fingerprint)
    assert len(fingerprints) == 8


class Ending:
    """A worker half of which a test says what has ended."""

    def __init__(self) -> None:
        self.reports: list[KVReport] = []

    def poll(self) -> KVReport | None:
        return self.reports.pop(0) if self.reports else None

    def start(self, metadata: Any) -> None:
        pass


@pytest.mark.parametrize(
    ("failures", "together"),
    [(((7,), (9, 7)), (7, 9)), (((), (7,)), ()), (((7,), ()), ()), ((None, ()), ())],
)
def test_multi_reports_what_any_connector_did_not_move(
    failures: tuple[tuple[int, ...] | None, ...], together: tuple[int, ...]
) -> None:
    """None: it has succeeded; (): it failed, and moved nothing."""
    halves = [Ending(), Ending()]
    codec: Any = SimpleNamespace(encode_report=lambda report: b"")
    worker = MultiWorker([(half, codec) for half in halves])  # type: ignore[misc]
    worker.start(MultiMetadata(parts=(None, None), shares={3: 2}))
    for half, failed in zip(halves, failures, strict=True):
        half.reports.append(
            KVReport(finished=(3,)) if failed is None else KVReport(failed={3: failed})
        )
    report = worker.poll()
    assert report is not None and report.failed == {3: together} and report.finished == ()


@pytest.mark.parametrize(("extra", "size"), [({}, 1.0), ({"kv_offloading_size": 0.5}, 0.5)])
def test_a_device_keeps_a_gibibyte_unless_it_is_told(extra: dict[str, Any], size: float) -> None:
    assert msgspec.convert(extra, DeviceOffloadOptions).kv_offloading_size == size
