"""The kit of KV connectors notices planted bugs."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from mutants import Mutant, mutant_tests, plugin_of, subclass

from jackfield.core.parts.kv_transfer import KVReport
from jackfield.core.protocols.kv import KVConnectorSetup
from jackfield.plugins.conformance.kv_connectors import KVConnectorKit
from jackfield.plugins.kv_connectors.file_store import FileStore
from jackfield.plugins.kv_connectors.store import StoreConnector, StoreScheduler, StoreWorker


class Sound(StoreConnector):
    """Blocks in files."""

    store_class = FileStore
    scheduler_class = StoreScheduler
    worker_class = StoreWorker

    @classmethod
    def make_scheduler(cls, setup: KVConnectorSetup) -> StoreScheduler:
        return cls.scheduler_class(setup, cls.store_class(setup))

    @classmethod
    def make_worker(cls, setup: KVConnectorSetup) -> StoreWorker:
        return cls.worker_class(setup, cls.store_class(setup))


class Kit(KVConnectorKit):
    name = "subject"
    plugin = plugin_of("kv_connector", "subject", Sound)
    wrong_options = {"path": 3, "max_gib": 0}

    def extra_config(self, folder: Path) -> dict[str, Any]:
        return {"path": str(folder / "store")}

    def damage(self, folder: Path) -> None:
        for file in (folder / "store").rglob("*.safetensors"):
            data = file.read_bytes()
            file.write_bytes(data[: len(data) // 2] + b"\x45" * (len(data) - len(data) // 2))

    def break_far_side(self, folder: Path) -> None:
        shutil.rmtree(folder / "store")
        (folder / "store").write_text("no folder any more")


def store(**changes: Any) -> type:
    return subclass(Sound, store_class=subclass(FileStore, **changes))


def scheduler(**changes: Any) -> type:
    return subclass(Sound, scheduler_class=subclass(StoreScheduler, **changes))


def worker(**changes: Any) -> type:
    return subclass(Sound, worker_class=subclass(StoreWorker, **changes))


def lenient_options(cls: Any, setup: KVConnectorSetup) -> Any:
    import dataclasses

    known = {
        key: value
        for key, value in setup.transfer.kv_connector_extra_config.items()
        if key in ("path", "max_gib")
    }
    transfer = setup.transfer
    import msgspec

    transfer = msgspec.structs.replace(transfer, kv_connector_extra_config=known)
    setup = dataclasses.replace(setup, transfer=transfer)
    return cls.scheduler_class(setup, cls.store_class(setup))


def one_key_for_all(self: Any, key: bytes) -> Path:
    return FileStore._path(self, b"the same".ljust(32, b"."))


def counts_gaps(self: Any, keys: Sequence[bytes]) -> int:
    return sum(self._path(key).is_file() for key in keys)


def unchecked(self: Any, keys: Sequence[bytes]) -> Any:
    (key,) = keys
    data = self._store.get(key)
    size = sum(cache[:, 0].nbytes for cache in self._caches_of_mutant)
    return () if data is None else (memoryview(data)[-size:],)


def kept_caches(self: Any, caches: Any) -> None:
    self._caches_of_mutant = caches
    StoreWorker.bind(self, caches)


def says_all_came(self: Any) -> KVReport | None:
    report = StoreWorker.poll(self)
    if report is None:
        return None
    return KVReport(finished=(*report.finished, *report.failed), failed={})


def never_removes(self: Any, key: bytes) -> None:
    """Damaged or not."""


def holds_nothing(self: Any, transfer: int, request: Any, keys: Any, block_ids: Any) -> Any:
    StoreScheduler.start_save(self, transfer, request, keys, block_ids)
    return ()


def raises_at_failures(self: Any, report: KVReport) -> None:
    if report.failed:
        raise KeyError("on purpose")
    StoreScheduler.update(self, report)


def marks_its_neighbour(self: Any, job: Any, copier: Any, after: Any) -> Any:
    lost = StoreWorker.load(self, job, copier, after)
    with torch.inference_mode():
        for cache in self._caches_of_mutant:
            cache[:, 0] = 1
            cache[:, (max(job.block_ids) + 1) % cache.shape[1]] = 1
    return lost


def starts_no_loads(self: Any, metadata: Any) -> None:
    StoreWorker.start(self, metadata)
    if metadata.loads:
        raise KeyError("on purpose")


def reads_late(self: Any, job: Any, copier: Any, after: Any) -> Any:
    time.sleep(0.1)
    return StoreWorker.load(self, job, copier, after)


def just_returns(self: Any) -> None:
    """Its threads go on."""


BITS = "test_what_is_saved_comes_back_bit_equal"
CLOSED = "test_a_worker_half_that_is_closed_leaves_the_cache_alone"
GONE = "test_blocks_that_are_not_there_are_reported_and_the_transfer_ends"
BACK, PARTIAL = (
    "test_an_engine_gets_back_what_it_has_lost",
    "test_partial_hits_end_at_block_borders",
)
SALT, SLOW = "test_another_salt_finds_nothing", "test_others_go_on_while_a_load_takes_its_time"
FAILS, BREAKS = (
    "test_a_load_that_fails_costs_a_recompute", "test_a_far_side_that_breaks_costs_a_recompute",
)  # fmt: skip
DAMAGED, REPLACED = (
    "test_what_is_damaged_is_never_used", "test_what_is_damaged_is_replaced",
)  # fmt: skip
OPTIONS = "test_wrong_options_are_refused_by_name"
ABORT = "test_an_abort_during_a_load_leaves_its_blocks_alone_until_it_ends"
REUSE, STOPS = (
    "test_blocks_are_not_reused_while_a_save_reads_them",
    "test_an_engine_stops_in_the_middle_of_transfers",
)
TWO = "test_engines_at_once_on_one_store"
RANDOM = "test_random_traffic_gives_the_tokens_of_an_engine_without"

MUTANTS = {
    "damaged blocks stay": Mutant(store(remove=never_removes), (REPLACED,)),
    "unknown options pass": Mutant(
        subclass(Sound, make_scheduler=classmethod(lenient_options)), (OPTIONS,)
    ),
    "one place for all keys": Mutant(
        store(_path=one_key_for_all),
        (BITS, FAILS, BACK, STOPS, SALT, GONE, TWO, SLOW, PARTIAL, REPLACED),
        perhaps=(ABORT, RANDOM, REUSE),
    ),
    "counts across gaps": Mutant(store(count_present=counts_gaps), (BITS,)),
    "nothing is checked": Mutant(worker(read=unchecked, bind=kept_caches), (REPLACED,)),
    "missing blocks are said to have come": Mutant(worker(poll=says_all_came), (GONE, REPLACED)),
    "blocks of a save are not held": Mutant(
        scheduler(start_save=holds_nothing),
        (
            BITS,
            BREAKS,
            CLOSED,
            FAILS,
            ABORT,
            BACK,
            STOPS,
            SALT,
            REUSE,
            GONE,
            TWO,
            SLOW,
            PARTIAL,
            RANDOM,
            DAMAGED,
            REPLACED,
        ),
    ),
    "raises where a load has failed": Mutant(
        scheduler(update=raises_at_failures),
        (FAILS, GONE, REPLACED, RANDOM),
        perhaps=(BREAKS, DAMAGED),
    ),
    "raises where a load starts": Mutant(
        worker(start=starts_no_loads),
        (BITS, GONE, CLOSED, BACK, PARTIAL, SALT, SLOW, FAILS, REPLACED, ABORT, TWO, RANDOM, STOPS),
        perhaps=(BREAKS, DAMAGED, REUSE),
    ),
    "its threads outlive it": Mutant(
        worker(load=reads_late, close=just_returns), (CLOSED,), perhaps=(STOPS,)
    ),
    "writes into other blocks": Mutant(
        worker(load=marks_its_neighbour, bind=kept_caches),
        (BITS,),
        perhaps=(BACK, PARTIAL, SALT, SLOW, FAILS, BREAKS, ABORT, REUSE, STOPS, TWO, RANDOM),
    ),
}

TestMutants = mutant_tests(Kit, MUTANTS)
