"""KV blocks from the host memory of other engines, over TCP; for prompts computed elsewhere."""

from __future__ import annotations

import hmac
import logging
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Annotated, Any, ClassVar, NamedTuple

import msgspec
from msgspec import Meta

from ...core.errors import ConfigError
from ...core.protocols.kv import KVConnectorSetup
from ...core.request import Request
from ...core.secret_file import read_secret
from .block_file import BlockFormat
from .block_memory import BlockMemory
from .copying import BlockCopier
from .options import read_options
from .peer_client import Peers, blocks_per_answer
from .peer_server import BlockServer
from .peer_wire import MAX_PORT, Address, mac
from .store import StoreConnector, StoreScheduler, StoreWorker
from .threads import Job

logger = logging.getLogger("jackfield.kv")

ANY_HOST = ("0.0.0.0", "::")
MAX_WAITING = 16
"""Lookups that wait at once for blocks that a peer is still saving; further ones do not wait."""


class PeerStoreOptions(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`kv_connector_extra_config` of peer_store."""

    secret_file: Annotated[str, Meta(min_length=1)]
    """File with a secret that all peers share, of 16 bytes at least."""
    listen: str | None = None
    """HOST:PORT where this engine serves what it has computed; without it, it serves nothing. Of
    several engines (`data_parallel_size`), each adds its number to this port and `advertise`'s."""
    advertise: str | None = None
    """HOST:PORT by which the others' `peers` name this engine, if that is not `listen`, such as for
    0.0.0.0."""
    peers: tuple[str, ...] = ()
    """HOST:PORT of each engine that is asked for blocks."""
    size_gib: Annotated[float, Meta(gt=0)] = 4.0
    """GiB of host memory for what is served. Above it, the least recently used go."""


class PeerSettings(NamedTuple):
    """Options of one half, checked."""

    secret: bytes
    listen: Address | None
    advertised: Address | None
    peers: tuple[Address, ...]
    memory_bytes: int
    form: BlockFormat

    @classmethod
    def of(cls, setup: KVConnectorSetup) -> PeerSettings:
        """Raises ConfigError with the name of an invalid option."""
        options = read_options(setup.transfer.kv_connector_extra_config, PeerStoreOptions)
        role, form = setup.transfer.kv_role, BlockFormat(setup.layout)
        listen = advertised = None
        if options.listen is not None:
            listen = advertised = _own_address("listen", options.listen, setup.member)
        if options.advertise is not None:
            advertised = _own_address("advertise", options.advertise, setup.member)
        peers = tuple(_address("peers", peer) for peer in options.peers)
        serves, asks = role != "kv_consumer", role != "kv_producer"
        if listen is None and (role == "kv_producer" or options.advertise is not None):
            raise _wrong("listen", "give the HOST:PORT where this engine serves its blocks")
        if advertised is not None and advertised.host in ANY_HOST:
            raise _wrong("advertise", f"give the HOST:PORT by which peers name this {listen}")
        if not peers and (role == "kv_consumer" or listen is None):
            raise _wrong("peers", "give the HOST:PORT of each engine to ask")
        memory_bytes = int(options.size_gib * (1 << 30))
        if memory_bytes < form.encoded_bytes:
            raise _wrong(
                "size_gib",
                f"{options.size_gib} GiB do not hold one block of {form.encoded_bytes} bytes",
            )
        return cls(
            secret=_read_secret(options.secret_file),
            listen=listen if serves else None,
            advertised=advertised if serves else None,
            peers=peers if asks else (),
            memory_bytes=memory_bytes,
            form=form,
        )


def _wrong(option: str, reason: str) -> ConfigError:
    return ConfigError(f"kv_connector_extra_config.{option}: {reason}", param="kv_transfer_config")


def _address(option: str, text: str) -> Address:
    try:
        return Address.read(text)
    except ValueError as error:
        raise _wrong(option, str(error)) from None


def _own_address(option: str, text: str, member: int) -> Address:
    """Return that of an engine, of several: each has a port of its own."""
    host, port = _address(option, text)
    if port + member > MAX_PORT:
        raise _wrong(option, f"{text} leaves no port to engine {member} (data_parallel_size)")
    return Address(host, port + member)


def _read_secret(path: str) -> bytes:
    try:
        return read_secret(path)
    except ValueError as error:
        raise _wrong("secret_file", str(error)) from error


# ---------------------------------------------------------------- handing a prompt over


class Handover(msgspec.Struct, frozen=True):
    """`kv_transfer_params` of a prompt whose blocks a peer has, or is saving. vLLM's names, but for
    the ticket: they come back from an HTTP client, so only what a peer has made is believed."""

    remote_host: str
    remote_port: int
    remote_transfer: int
    """With the end of this transfer at that peer, the blocks are there."""
    remote_ticket: str
    do_remote_prefill: bool = True
    do_remote_decode: bool = False

    @classmethod
    def make(cls, secret: bytes, address: Address, transfer: int) -> Handover:
        return cls(*address, transfer, _ticket(secret, address, transfer))

    @classmethod
    def read(cls, params: dict[str, Any] | None, secret: bytes) -> Handover | None:
        """Return what a request carries; None: nothing that a peer has made."""
        if not params or params.get("do_remote_prefill") is not True:
            return None
        try:
            handover = msgspec.convert(params, cls)
        except msgspec.ValidationError:
            return None
        ticket = _ticket(secret, handover.address, handover.remote_transfer)
        same = hmac.compare_digest(ticket.encode(), handover.remote_ticket.encode())
        return handover if same else None

    @property
    def address(self) -> Address:
        return Address(self.remote_host, self.remote_port)


def _ticket(secret: bytes, address: Address, transfer: int) -> str:
    return mac(secret, f"handover {address} {transfer}".encode()).hex()


# ---------------------------------------------------------------- the halves


class PeerScheduler(StoreScheduler):
    """Asks peers for keys; saves to this engine's own memory, which peers read."""

    def __init__(self, setup: KVConnectorSetup, settings: PeerSettings) -> None:
        self._settings = settings
        self._peers = Peers(settings.peers, settings.secret, settings.form)
        super().__init__(setup, self._peers)
        self._waiters = ThreadPoolExecutor(MAX_WAITING, "jackfield-kv-handover")
        self._may_wait = threading.Semaphore(MAX_WAITING)
        self._last_save = -1
        self._warned = False

    def submit_lookup(self, request: Request, keys: Sequence[bytes]) -> Future[int]:
        """Count what the peers have; of a prompt that was handed over, once it is saved."""
        handover = Handover.read(request.params.kv_transfer_params, self._settings.secret)
        if handover is None or not self._is_peer(handover.address):
            return super().submit_lookup(request, keys)
        if not self._may_wait.acquire(blocking=False):
            return super().submit_lookup(request, keys)
        future = self._waiters.submit(
            self._peers.count_handed_over, keys, handover.address, handover.remote_transfer
        )
        future.add_done_callback(lambda _: self._may_wait.release())
        return future

    def _is_peer(self, address: Address) -> bool:
        if address in self._settings.peers:
            return True
        if not self._warned:
            self._warned = True
            logger.warning(
                "prompts are handed over by %s, which is none of this engine's peers: what is "
                "still being saved there is not awaited (peers of one, advertise of the other)",
                address,
            )
        return False

    def start_save(
        self, transfer: int, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> Sequence[int]:
        if self._settings.listen is None:
            return ()
        return super().start_save(transfer, request, keys, block_ids)

    def queue_save(self, job: Job) -> None:
        """As of any store; a prompt is handed over with its last save."""
        self._last_save = job.transfer
        super().queue_save(job)

    def request_finished(
        self, transfer: int, request: Request
    ) -> tuple[bool, dict[str, Any] | None]:
        """Hand a prompt over, if asked to: retain its blocks until memory has all of them."""
        super().request_finished(transfer, request)
        params, address = request.params.kv_transfer_params, self._settings.advertised
        if not params or params.get("do_remote_decode") is not True or address is None:
            return False, None
        if request.finish_reason not in ("length", "stop") or not request.is_named:
            return False, None
        num_blocks = request.num_prompt_tokens // self._setup.layout.block_size
        keys, block_ids = request.block_hashes[:num_blocks], request.block_ids
        is_retained = self.has_room and bool(keys)
        if is_retained:
            self.queue_save(Job(transfer, tuple(block_ids[: len(keys)]), tuple(keys)))
        handover = Handover.make(self._settings.secret, address, self._last_save)
        return is_retained, msgspec.to_builtins(handover)

    def close(self) -> None:
        self._waiters.shutdown(wait=False, cancel_futures=True)
        super().close()


class PeerWorker(StoreWorker):
    """Saves blocks to host memory that it serves; loads those of peers."""

    def __init__(self, setup: KVConnectorSetup, settings: PeerSettings) -> None:
        self._memory = BlockMemory(settings.memory_bytes)
        self._capacity = settings.memory_bytes // settings.form.encoded_bytes
        """Blocks that memory holds."""
        super().__init__(setup, self._memory)
        self.blocks_per_read = blocks_per_answer(settings.form)
        self._server: BlockServer | None = None
        if settings.listen is not None:
            try:
                self._server = BlockServer(
                    settings.listen, settings.secret, self._memory, settings.form
                )
            except OSError as error:
                raise _wrong("listen", f"{settings.listen} cannot be had: {error}") from error
        self._peers = Peers(settings.peers, settings.secret, settings.form)

    def bind(self, kv_caches: Sequence[Any]) -> None:
        super().bind(kv_caches)
        if self._server is not None:
            self._server.start()

    def read(self, keys: Sequence[bytes]) -> Sequence[memoryview]:
        return self._peers.get(keys)

    def save(self, job: Job, copier: BlockCopier) -> Sequence[int]:
        """Save new blocks, then tell those who wait for them.

        Those that memory cannot hold beside the ones before them are left out, and the last is
        saved first: the tail of a prefix goes first, not what it builds on.
        """
        ids, keys, count = job.block_ids, job.places, self._capacity
        head = Job(job.transfer, ids[:count][::-1], keys[:count][::-1])
        try:
            return [*super().save(head, copier), *ids[count:]]
        finally:
            self._memory.save_ended(job.transfer)

    def finish(self) -> None:
        super().finish()
        self._peers.close()
        if self._server is not None:
            self._server.close()


class PeerConnector(StoreConnector):
    shared = False
    worker_class: ClassVar[type[PeerWorker]] = PeerWorker

    @classmethod
    def make_scheduler(cls, setup: KVConnectorSetup) -> PeerScheduler:
        return PeerScheduler(setup, PeerSettings.of(setup))

    @classmethod
    def make_worker(cls, setup: KVConnectorSetup) -> PeerWorker:
        return cls.worker_class(setup, PeerSettings.of(setup))
