"""vLLM's routes that pause the engine, change its weights and lend its memory."""

from __future__ import annotations

import asyncio
from base64 import b64decode
from typing import Any, Literal

import msgspec
from aiohttp import web

from ....core.errors import InvalidRequest, RequestFailed, shown
from ....core.live.engine_jobs import (
    LEASE_SECONDS,
    TAGS,
    AskLive,
    BeginUpdate,
    CommitUpdate,
    JoinGroup,
    LeaveGroup,
    NameWeights,
    OpenTensors,
    Pause,
    PutTensors,
    ReceiveTensors,
    ReportMemoryUse,
    Resume,
    RollBack,
    Sleep,
    WakeUp,
    check_mode,
    check_version,
)
from ....core.live.safetensors_bytes import read_header
from ....core.live.torch_pickles import read_vllm_handles
from ...http.context import ENGINE, reply
from ...http.routing import route
from ...openai.common.openapi import documented
from ...openai.common.request_body import decode_body, decode_optional_body
from .surface import (
    LeaseOption,
    LiveState,
    NoOptions,
    ask,
    options_of,
    parts_of,
    seconds_of,
    state,
)

PACKED_BYTES = 1 << 30
"""Bytes of a buffer of tensors that are sent together, as in vLLM."""
UNIQUE_ID_BYTES = 128
"""Bytes of NCCL's id of a group."""


class PauseOptions(LeaseOption):
    mode: str = "abort"
    """abort, wait or keep."""
    clear_cache: bool = True


class SleepOptions(msgspec.Struct):
    level: int = 1
    """1 or 2."""
    mode: str = "abort"
    """As of a pause."""
    tags: tuple[str, ...] = TAGS
    """weights, kv_cache."""


class WakeOptions(msgspec.Struct):
    tags: tuple[str, ...] = TAGS
    """weights, kv_cache."""


class UpdateOptions(LeaseOption):
    is_checkpoint_format: bool = True
    """vLLM's; always so."""


class TransferInfo(msgspec.Struct):
    """The group that weights come from, of which the sender is number 0. None of it for handles of
    shared memory, which need no group."""

    master_address: str | None = None
    master_port: int | None = None
    world_size: int = 0
    """Ranks of the engine, and the sender."""
    rank_offset: int = 1
    nccl_unique_id_b64: str | None = None
    """NCCL's number of the group, in place of an address."""
    backend: Literal["nccl", "gloo", ""] = ""
    """Default: by the device."""
    packed: bool = False
    packed_buffer_size_bytes: int = PACKED_BYTES
    packed_num_buffers: int = 2
    """Ignored: the sender's own."""
    timeout: float = 300.0
    """Seconds to wait for the sender, now and at each tensor."""

    def job(self) -> JoinGroup | None:
        """Return what joins the group; None: there is none. Raises InvalidRequest."""
        if (self.nccl_unique_id_b64, self.master_address, self.master_port) == (None, None, None):
            return None
        if self.world_size <= self.rank_offset:
            raise InvalidRequest(
                f"world_size: {self.world_size} leaves no rank of the engine after rank_offset "
                f"{self.rank_offset}",
                param="world_size",
            )
        unique_id = b""
        if self.nccl_unique_id_b64 is not None:
            unique_id = _unique_id(self)
        elif self.master_address is None or self.master_port is None:
            raise InvalidRequest(
                "master_address: give it and master_port, or nccl_unique_id_b64",
                param="master_address",
            )
        return JoinGroup(
            host=self.master_address or "", port=self.master_port or 0, unique_id=unique_id,
            world_size=self.world_size, rank_offset=self.rank_offset, backend=self.backend,
            timeout=self.timeout, rendezvous="vllm",
            packed_bytes=self.packed_buffer_size_bytes if self.packed else 0,
        )  # fmt: skip


def _unique_id(info: TransferInfo) -> bytes:
    field = "nccl_unique_id_b64"
    if info.master_address is not None or info.master_port is not None:
        raise InvalidRequest(f"{field}: give it or master_address, not both", param=field)
    try:
        number = b64decode(info.nccl_unique_id_b64 or "", validate=True)
    except ValueError:
        number = b""
    if len(number) != UNIQUE_ID_BYTES:
        raise InvalidRequest(f"{field}: must be {UNIQUE_ID_BYTES} bytes in base64", param=field)
    return number


class InitTransfer(msgspec.Struct):
    init_info: TransferInfo


class TensorNames(msgspec.Struct):
    """Tensors in the order in which they are sent, named as in the checkpoint."""

    names: list[str] = []
    """None: the tensors of the last time."""
    dtype_names: list[str] = []
    shapes: list[list[int]] = []
    ipc_handles_pickled: str | None = None
    """In place of sending: handles of the sender's device memory, as vLLM has them (base64)."""
    tensor_sizes: list[int] | None = None
    """In bytes, if all tensors are in the memory of one handle."""

    def job(self) -> ReceiveTensors | OpenTensors:
        """Return what takes them. Raises InvalidRequest."""
        parts = parts_of(self.names, self.dtype_names, self.shapes)
        if self.ipc_handles_pickled is None:
            return ReceiveTensors(parts=parts)
        handles = self.ipc_handles_pickled
        return OpenTensors(buckets=read_vllm_handles(handles, parts, self.tensor_sizes))


class UpdateWeights(msgspec.Struct):
    update_info: TensorNames


class FinishUpdate(msgspec.Struct):
    weight_version: str | None = None


class NewVersion(msgspec.Struct):
    new_version: str


class WorkerCall(msgspec.Struct):
    """A method of the workers: of the parts of plugins, those that they list."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


@route("POST /pause", manages_engine=True)
@documented("admin", request=PauseOptions, response=LiveState, errors=(400, 409))
async def pause(request: web.Request) -> web.Response:
    """POST /pause: pause the engine, and answer once it is idle.

    Options are in the query or a JSON body. `mode=abort` ends requests with what they have,
    `wait` lets them run to their end, `keep` lets them go on afterwards; `clear_cache=false` with
    their caches. `lease`: seconds after which the pause ends by itself; `none`: never.
    """
    options = await options_of(request, PauseOptions)
    job = Pause(
        mode=check_mode(options.mode),
        clear_cache=options.clear_cache,
        lease=seconds_of(options.lease, LEASE_SECONDS),
    )
    return state("paused", await ask(request, job))


@route("POST /resume", manages_engine=True)
@documented("admin", response=LiveState)
async def resume(request: web.Request) -> web.Response:
    """End a pause; harmless without one."""
    await options_of(request, NoOptions)
    return state("resumed", await ask(request, Resume()))


@route("GET /is_paused", manages_engine=True, allow_head=False)
@documented("admin", response=dict[str, bool])
async def is_paused(request: web.Request) -> web.Response:
    """Whether a pause has brought the engine to rest."""
    return reply({"is_paused": (await ask(request, AskLive()))["is_paused"]})


@route("GET /weight_info", manages_engine=True, allow_head=False)
@documented("admin", response=dict[str, str])
async def weight_info(request: web.Request) -> web.Response:
    """The version of the weights that serve."""
    return reply({"weight_version": (await ask(request, AskLive()))["weights_version"]})


@route("GET /get_world_size", manages_engine=True, allow_head=False)
@documented("admin", response=dict[str, int])
async def get_world_size(request: web.Request) -> web.Response:
    """How many ranks join a group that weights come from."""
    return reply({"world_size": (await ask(request, AskLive()))["world_size"]})


@route("POST /init_weight_transfer_engine", manages_engine=True)
@documented("admin", request=InitTransfer, response=dict[str, str])
async def init_weight_transfer_engine(request: web.Request) -> web.Response:
    """Join the group of a process that sends weights; nothing for handles of shared memory."""
    info = (await decode_body(request, InitTransfer)).init_info
    if (job := info.job()) is not None:
        await ask(request, job)
    return reply({"message": "Weight transfer initialized"})


@route("POST /shutdown_weight_transfer_engine", manages_engine=True)
@documented("admin", response=dict[str, str], errors=(400,))
async def shutdown_weight_transfer_engine(request: web.Request) -> web.Response:
    """Leave the group of a process that sends weights."""
    await options_of(request, NoOptions)
    await ask(request, LeaveGroup())
    return reply({"message": "Weight transfer shut down"})


@route("POST /start_weight_update", manages_engine=True)
@documented("admin", request=UpdateOptions, response=dict[str, str], errors=(400, 409))
async def start_weight_update(request: web.Request) -> web.Response:
    """Begin to take new weights, while the present ones serve.

    `lease`: seconds without a call about it after which it is given up; `none`: never.
    """
    options = await options_of(request, UpdateOptions)
    if not options.is_checkpoint_format:
        raise InvalidRequest(
            "is_checkpoint_format: weights are taken as they are in checkpoints",
            param="is_checkpoint_format",
        )
    answer = await ask(request, BeginUpdate(lease=seconds_of(options.lease, LEASE_SECONDS)))
    return reply({"message": "Weight update started", **answer})


@route("POST /update_weights", manages_engine=True)
@documented("admin", request=UpdateWeights, response=dict[str, str], errors=(404,))
async def update_weights(request: web.Request) -> web.Response:
    """Take tensors that the group sends, that handles name, or that are in the body.

    A list of what number 0 of the group sends now; handles of device memory, for a sender on the
    same devices; or, as `application/octet-stream`, the tensors themselves, in a body like a
    safetensors file. A body is a bucket: any number of them, of any tensors, make an update.
    """
    if request.content_type == "application/octet-stream":
        body = await request.read()
        parts, begin = await asyncio.to_thread(read_header, body)
        await ask(request, PutTensors(parts=parts, data=body[begin:]))
    else:
        info = (await decode_body(request, UpdateWeights)).update_info
        await ask(request, await asyncio.to_thread(info.job))
    return reply({"message": "Weights received"})


@route("POST /finish_weight_update", manages_engine=True)
@documented("admin", request=FinishUpdate, response=dict[str, Any], errors=(404,))
async def finish_weight_update(request: web.Request) -> web.Response:
    """Serve with the new weights from the next step on, if they are whole."""
    body = await decode_optional_body(request, FinishUpdate)
    answer = await ask(request, CommitUpdate(version=body.weight_version))
    return reply({"message": "Weight update finished", **answer})


@route("POST /abort_weight_update", manages_engine=True)
@documented("admin", response=dict[str, str], errors=(400, 404))
async def abort_weight_update(request: web.Request) -> web.Response:
    """Give an update up: the old weights serve on."""
    await options_of(request, NoOptions)
    await ask(request, RollBack())
    return reply({"message": "Weight update given up"})


@route("POST /update_weight_version", manages_engine=True)
@documented("admin", request=NewVersion, response=dict[str, Any])
async def update_weight_version(request: web.Request) -> web.Response:
    """Give the weights that serve another name."""
    version = (await decode_body(request, NewVersion)).new_version
    check_version(version, "new_version")
    await ask(request, NameWeights(version=version))
    return reply({"success": True, "new_version": version})


@route("POST /sleep", manages_engine=True)
@documented("admin", request=SleepOptions, response=dict[str, Any], errors=(400, 409))
async def sleep(request: web.Request) -> web.Response:
    """POST /sleep: pause the engine, and give the memory of weights and caches back.

    Options are in the query or a JSON body. `level=1` keeps the weights' numbers in host memory,
    `2` drops them; `mode` as of `/pause`; `tags=weights`, `tags=kv_cache`: of these alone.
    """
    options = await options_of(request, SleepOptions)
    level = options.level
    if level not in (1, 2):
        raise InvalidRequest(f"level: must be 1 or 2, got {shown(level)}", param="level")
    job = Sleep(level=level, mode=check_mode(options.mode), tags=options.tags)
    return reply({"status": "sleeping", "level": level, **await ask(request, job)})


@route("POST /wake_up", manages_engine=True)
@documented("admin", request=WakeOptions, response=dict[str, Any], errors=(400, 409))
async def wake_up(request: web.Request) -> web.Response:
    """POST /wake_up: take the memory again; once all is there, requests run.

    `?tags=weights&tags=kv_cache`, or a list in a JSON body: of these alone.
    """
    tags = (await options_of(request, WakeOptions)).tags
    answer = await ask(request, WakeUp(tags=tags))
    status = "sleeping" if answer["is_sleeping"] else "awake"
    return reply({"status": status, "tags": list(tags), **answer})


@route("GET /is_sleeping", manages_engine=True, allow_head=False)
@documented("admin", response=dict[str, bool])
async def is_sleeping(request: web.Request) -> web.Response:
    """Whether memory of weights or caches is given back."""
    return reply({"is_sleeping": (await ask(request, AskLive()))["is_sleeping"]})


@route("POST /collective_rpc", manages_engine=True)
@documented("admin", request=WorkerCall, response=dict[str, Any])
async def collective_rpc(request: web.Request) -> web.Response:
    """Call a method that a part of a plugin offers, on each rank."""
    body = await decode_body(request, WorkerCall)
    engine = request.app[ENGINE]
    if body.timeout is not None and body.timeout <= 0:
        raise InvalidRequest(
            f"timeout: must be more than 0 seconds, got {body.timeout:g}", param="timeout"
        )
    try:
        results = await engine.collective_rpc(body.method, body.timeout, body.args, body.kwargs)
    except TimeoutError:
        raise RequestFailed(f"{body.method} has not returned in {body.timeout:g} seconds") from None
    return reply({"results": results})


@route("GET /memory_report", manages_engine=True, allow_head=False)
@documented("admin", response=dict[str, Any])
async def memory_report(request: web.Request) -> web.Response:
    """How much memory each use takes, on the first rank."""
    return reply(await ask(request, ReportMemoryUse()))


ROUTES = (
    pause,
    resume,
    init_weight_transfer_engine,
    shutdown_weight_transfer_engine,
    start_weight_update,
    update_weights,
    finish_weight_update,
    abort_weight_update,
    update_weight_version,
    sleep,
    wake_up,
    collective_rpc,
    is_paused,
    weight_info,
    get_world_size,
    is_sleeping,
    memory_report,
)
