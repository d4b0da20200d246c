"""The contract of KV connectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import msgspec

from ..cache.groups import CachePart
from ..errors import ConfigError
from ..parts.kv_transfer import KVReport

if TYPE_CHECKING:
    import torch

    from ..config import KVTransferConfig
    from ..registry import Plugins
    from ..request import Request


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """Layout of the KV cache, for a connector."""

    num_blocks: int
    """Number of blocks, the null block (0) included."""
    block_size: int
    """Tokens in a block."""
    layers: tuple[tuple[CachePart, ...], ...]
    """[num_layers] The parts of each layer's cache."""
    block_bytes: int
    """Bytes of one block: all parts of all layers."""
    bytes_elsewhere: int = 0
    """Bytes of the same block on other ranks, each of which has some layers, or heads of them."""
    fingerprint: bytes
    """[32] Digest of everything besides tokens that KV content depends on: the model's
    configuration and weights, dtype and layout. Engines with equal fingerprints may read each
    other's blocks. Block keys include it, so equal keys mean equal content."""


@dataclass(frozen=True)
class KVConnectorSetup:
    """Constructor argument of both halves of a connector."""

    transfer: KVTransferConfig
    """The user's configuration; a connector's own options in `kv_connector_extra_config`."""
    layout: KVLayout
    plugins: Plugins
    """All registries, for connectors that use other connectors."""
    notify: Callable[[], None]
    """Call it after an event outside a step: a result of `num_external_tokens` that was None is now
    known (scheduler half), `poll` has something to report (worker half). From any thread; make the
    result visible first. Without the call it is seen at the next step, and an idle engine runs no
    steps."""
    compacts: bool = False
    """Whether caches of requests are compacted (`EngineConfig.kv_compression`)."""
    member: int = 0
    """The engine's number, of several (`EngineConfig.data_parallel_size`); 0: the first, or the
    only one."""


class KVConnectorScheduler(Protocol):
    """The half on the event loop, which makes the decisions. No method may block or raise: I/O
    belongs on a thread, and if the far side fails, there is nothing to load and nothing is saved. A
    half that raises nevertheless, or returns a value that this contract does not allow, is
    detached: its error is logged with its distribution, only `close` is called from then on, and
    requests continue without it.

    A transfer is a number that the engine gives to one load, one save or one hold of blocks. From
    the call that names it until the worker half reports its end (`KVReport`), the engine neither
    frees nor reuses its blocks, whatever becomes of the request. So each transfer must end exactly
    once, and the load of an aborted request ends like any other.
    """

    def num_external_tokens(self, request: Request, num_computed_tokens: int) -> int | None:
        """Return the number of tokens past `num_computed_tokens` (a multiple of the block size,
        found in the engine's own prefix cache) that can be loaded.

        None: not known yet; the request is skipped, others continue, and the method is called again
        after `notify`. After a number it is not called again, unless the request is preempted.
        `request.block_hashes[i]` is the key of the prompt's block i, for all full blocks, except
        one that would leave nothing to compute; the result counts from block num_computed_tokens /
        block_size on, and is rounded down to whole blocks. `request.params.kv_transfer_params` has
        the caller's parameters.
        """

    def start_load(
        self, transfer: int, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> None:
        """Start a load into the blocks allocated after `num_external_tokens`: fill `block_ids[i]`
        with the content that `keys[i]` names. There may be fewer blocks than promised, if some were
        found elsewhere meanwhile.

        The request waits; once the load has ended, filled blocks are in the prefix cache, and the
        rest is computed.
        """

    def start_save(
        self, transfer: int, request: Request, keys: Sequence[bytes], block_ids: Sequence[int]
    ) -> Sequence[int]:
        """Offer full blocks whose content is final: → those of `block_ids` that this connector will
        read, which the engine then holds; empty: none, no transfer.

        They are those that steps have computed for a request, and those that it found in the
        engine's prefix cache from the first one on that was never saved or loaded: it was not
        offered before, or not read, or its save has failed. The connector may have some of them.
        """

    def request_finished(
        self, transfer: int, request: Request
    ) -> tuple[bool, dict[str, Any] | None]:
        """Handle the end of a request (`request.finish_reason`); return (whether to retain its
        blocks, kv_transfer_params). After "error", the content of its blocks is undefined.

        If True, `request.block_ids` are retained under `transfer` until the worker half reports its
        end, for a remote side that fetches them. The dictionary goes into the response. A request
        that never ran has no block ids, and nothing is retained.
        """

    def build_metadata(self) -> Any:
        """Return data on the calls above for the worker half, of the connector's `metadata_type`;
        None: nothing. Called once for each planned step, and when there is something to send but
        nothing to compute: return each piece of data once. It is encoded at once, because a plan
        may be sent to another process.
        """

    def update(self, report: KVReport) -> None:
        """Receive the worker half's report, which the engine has already processed."""

    def close(self) -> None:
        """Close; the engine stops. The worker half is closed later."""


class KVConnectorWorker(Protocol):
    """The half beside the device, which moves blocks. Its methods run on the launch thread, and
    must not wait for a transfer: use a separate thread or stream.

    No method may raise: a failure of the far side is reported by `poll`. A half that raises
    nevertheless, or returns a value that this contract does not allow, is detached together with
    its scheduler half. Requests that wait for a load continue at once; the blocks of all transfers
    stay held until `close` has returned, as they may be read and written until then.

    On a GPU, transfers run on the connector's own streams. A save needs no ordering: the blocks
    that it reads were final before `start` was called. A load must wait for an event that `start`
    records on the current stream, since steps in progress may still use the blocks' former content;
    its end is reported after the device has finished it.
    """

    def bind(self, kv_caches: Sequence[torch.Tensor]) -> None:
        """Receive the caches; called once, before the first step. One tensor for each part of each
        layer, in the order of `KVLayout.layers`: [count, num_blocks, block_size, *shape], with the
        part's count and shape. They are inference tensors: write to them within
        `torch.inference_mode()`."""

    def start(self, metadata: Any) -> None:
        """Start transfers; gets what `build_metadata` returned, decoded as `metadata_type`, before
        its step is launched. Also called if the step then fails, or is not run because an earlier
        one has failed."""

    def poll(self) -> KVReport | None:
        """Return the transfers that ended since the last call. Called with every step, so it must
        be cheap."""

    def close(self) -> None:
        """Finish pending saves, drop pending loads, and end all threads that access the cache:
        the engine stops, or a method has raised. Called once; after a method has raised, on a
        different thread, while steps continue. If it raises then, the blocks of all transfers are
        out of use until the engine is started anew."""


class KVConnector(Protocol):
    """KV blocks from and to elsewhere: disaggregated prefill, offloading, shared stores.

    The registered object is a class (or any object) that creates both halves. They share no state
    except the data that they exchange: metadata with the step plan, reports with the step result.
    Damaged blocks of the far side are never used, and are replaced when they are computed again.
    """

    metadata_type: ClassVar[Any]
    """Type of what `build_metadata` returns, as msgspec takes it: a Struct, `dict[int, int]`, …; or
    None, if it always returns None. What the worker half gets is decoded as this type, so a value
    of another one detaches that half with an error that names the field."""
    payload_type: ClassVar[Any]
    """The same for `KVReport.payload`. Optional: without it, no report has a payload."""
    per_rank: ClassVar[bool]
    """Whether it serves engines of several ranks: each has a worker half, for its own layers and
    heads, and all get the same metadata; the scheduler half is one, with rank 0's layout. A
    transfer ends when it has ended on all ranks, and fails with all blocks that any did not fill;
    payloads are those of rank 0. What is stored elsewhere must be kept apart by rank:
    `KVLayout.fingerprint` differs. If a half raises, no block of its transfers is used again.
    Optional; without it, such an engine refuses the connector."""
    compacted_caches: ClassVar[bool]
    """Whether it serves engines whose caches are compacted (`EngineConfig.kv_compression`).
    Optional; without it, such an engine refuses the connector. Blocks of a request with
    `Request.compacted` hold other tokens than its first ones: they are not offered, and
    `request_finished` must not retain them."""

    @classmethod
    def make_scheduler(cls, setup: KVConnectorSetup) -> KVConnectorScheduler:
        """Raises ConfigError with the name of an invalid or unknown option."""

    @classmethod
    def make_worker(cls, setup: KVConnectorSetup) -> KVConnectorWorker:
        """As `make_scheduler`."""


def check_serves_compacted(name: str, connector: KVConnector) -> None:
    """Raise ConfigError if a connector does not serve engines whose caches are compacted."""
    if not getattr(connector, "compacted_caches", False):
        raise ConfigError(
            f"kv_compression: the KV connector {name!r} (kv_transfer_config) does not serve "
            "engines whose caches are compacted",
            param="kv_compression",
        )


def check_serves_ranks(name: str, connector: KVConnector) -> None:
    """Raise ConfigError if a connector does not serve engines of several ranks."""
    if not getattr(connector, "per_rank", False):
        raise ConfigError(
            f"kv_transfer_config: the KV connector {name!r} serves one rank (tensor_parallel_size "
            "1, pipeline_parallel_size 1)",
            param="kv_transfer_config",
        )


class KVCodec:
    """Encodes what the two halves of a connector send each other, by the types that it declares."""

    def __init__(self, connector: KVConnector) -> None:
        """Raises TypeError or AttributeError for a type that is missing or cannot be decoded."""
        self._encoder = msgspec.msgpack.Encoder()
        self._metadata = msgspec.msgpack.Decoder(connector.metadata_type)
        self._payload = msgspec.msgpack.Decoder(getattr(connector, "payload_type", None))

    def encode_metadata(self, metadata: Any) -> bytes | None:
        """Return what a plan carries; None for None. Raises TypeError, or what msgspec raises."""
        return None if metadata is None else self._encoder.encode(metadata)

    def decode_metadata(self, metadata: bytes) -> Any:
        """Return the connector's own object. Raises msgspec.ValidationError, with the field."""
        return self._metadata.decode(metadata)

    def encode_report(self, report: KVReport) -> KVReport:
        """Return the report with its payload encoded."""
        if report.payload is None:
            return report
        return msgspec.structs.replace(report, payload=self._encoder.encode(report.payload))

    def decode_report(self, report: KVReport) -> KVReport:
        """Return the report with its payload decoded. Raises msgspec.ValidationError."""
        if report.payload is None:
            return report
        return msgspec.structs.replace(report, payload=self._payload.decode(report.payload))
