"""Routes that pause the engine and change its weights, only with `--enable-admin`.

vLLM's routes and SGLang's, over the same jobs (`core/live/engine_jobs.py`), for those who may
(`TenantLimits.manages_engine`). What changes state is a POST.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec
from aiohttp import web

from ...core.engine.async_engine import AsyncEngine
from ...core.errors import Forbidden, InvalidRequest, JackfieldError, RequestFailed, shown
from ...core.live.engine_jobs import (
    LEASE_SECONDS,
    TAGS,
    AskLive,
    BeginUpdate,
    CommitUpdate,
    JoinGroup,
    LeaveGroup,
    LiveJob,
    NameWeights,
    Pause,
    PutTensors,
    ReadFiles,
    ReceiveTensors,
    ReportMemoryUse,
    ResetPrefixCache,
    Resume,
    RollBack,
    Sleep,
    WakeUp,
    check_mode,
)
from ...core.live.safetensors_bytes import read_header
from ...core.live.worker_jobs import TensorPart
from ..http.auth.tenants import tenant_of
from ..http.context import ENGINE, reply
from ..openai.common.openapi import documented
from ..openai.common.request_body import decode_body

logger = logging.getLogger("jackfield.server")
PACKED_BYTES = 1 << 30
"""Of a buffer of tensors that travel together, as in vLLM."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class GroupInfo(msgspec.Struct):
    """The group that weights come from: the sender is number 0."""

    master_address: str
    master_port: int
    world_size: int
    """Ranks of the engine, and the sender."""
    rank_offset: int = 1
    backend: Literal["nccl", "gloo", ""] = ""
    """Default: by the device."""
    packed: bool = False
    packed_buffer_size_bytes: int = PACKED_BYTES
    timeout: float = 300.0
    """Seconds to wait for the sender, now and at each tensor."""


class InitTransfer(msgspec.Struct):
    init_info: GroupInfo


class TensorNames(msgspec.Struct):
    """Tensors in the order in which they are sent, named as in the checkpoint."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]

    def parts(self) -> tuple[TensorPart, ...]:
        """Return them. Raises InvalidRequest for lists of unlike lengths."""
        return _parts(self.names, self.dtype_names, self.shapes)


class UpdateWeights(msgspec.Struct):
    update_info: TensorNames


class FinishUpdate(msgspec.Struct):
    weight_version: str | None = None


class NewVersion(msgspec.Struct):
    new_version: str


class LiveState(msgspec.Struct):
    """How the engine is doing."""

    status: str
    is_paused: bool
    weights_version: str
    mode: str | None = None
    lease: float | None = None
    """Seconds after which the pause ends by itself; null: it does not."""


class PauseAsSglang(msgspec.Struct):
    mode: Literal["abort", "retract", "in_place"] = "abort"
    lease: float | None = LEASE_SECONDS


class FromDisk(msgspec.Struct):
    """A checkpoint on the server's machine."""

    model_path: str
    load_format: str | None = None
    weight_version: str | None = None
    abort_all_requests: bool = False
    keep_pause: bool = False
    """Leave the engine paused, if it was."""
    flush_cache: bool = True
    """SGLang's; cached prefixes of other weights are never found, whatever it says."""


class SglangGroup(msgspec.Struct):
    master_address: str
    master_port: int
    world_size: int
    rank_offset: int = 1
    group_name: str = "weights"
    backend: Literal["nccl", "gloo", ""] = ""


class GroupName(msgspec.Struct):
    group_name: str = "weights"


class FromGroup(msgspec.Struct):
    names: list[str]
    dtypes: list[str]
    shapes: list[list[int]]
    group_name: str = "weights"
    flush_cache: bool = True
    """As in `FromDisk`."""


class WorkerCall(msgspec.Struct):
    """A method of the workers: of the parts of plugins, those that they list."""

    method: str
    args: list[Any] = []
    kwargs: dict[str, Any] = {}
    timeout: float | None = None


class MemoryTags(msgspec.Struct):
    tags: tuple[str, ...] | None = None
    """weights, kv_cache; null: both."""


class EndUpdate(msgspec.Struct):
    weight_version: str | None = None
    abort_all_requests: bool = False


class SglangReply(msgspec.Struct):
    success: bool
    message: str
    num_paused_requests: int = 0
    weight_version: str = ""


def add_live_routes(app: web.Application) -> None:
    for path, handler in (
        ("/pause", pause),
        ("/resume", resume),
        ("/init_weight_transfer_engine", init_weight_transfer_engine),
        ("/shutdown_weight_transfer_engine", shutdown_weight_transfer_engine),
        ("/start_weight_update", start_weight_update),
        ("/update_weights", update_weights),
        ("/finish_weight_update", finish_weight_update),
        ("/abort_weight_update", abort_weight_update),
        ("/update_weight_version", update_weight_version),
        ("/sleep", sleep),
        ("/wake_up", wake_up),
        ("/release_memory_occupation", release_memory_occupation),
        ("/resume_memory_occupation", resume_memory_occupation),
        ("/collective_rpc", collective_rpc),
        ("/pause_generation", pause_generation),
        ("/continue_generation", continue_generation),
        ("/flush_cache", flush_cache),
        ("/begin_weight_update", begin_weight_update),
        ("/end_weight_update", end_weight_update),
        ("/update_weights_from_disk", update_weights_from_disk),
        ("/init_weights_update_group", init_weights_update_group),
        ("/destroy_weights_update_group", destroy_weights_update_group),
        ("/update_weights_from_distributed", update_weights_from_distributed),
    ):
        app.router.add_post(path, _for_managers(handler))
    for path, handler in (
        ("/is_paused", is_paused),
        ("/weight_info", weight_info),
        ("/get_world_size", get_world_size),
        ("/is_sleeping", is_sleeping),
        ("/memory_report", memory_report),
    ):
        app.router.add_get(path, _for_managers(handler), allow_head=False)


def _for_managers(handler: Handler) -> Handler:
    """Return a handler that refuses others before it reads a body."""

    @functools.wraps(handler)
    async def managed(request: web.Request) -> web.StreamResponse:
        engine_of(request)
        return await handler(request)

    return managed


def engine_of(request: web.Request) -> AsyncEngine:
    """Return the engine, for whoever may change it. Raises Forbidden."""
    tenant = tenant_of(request)
    if not tenant.limits.manages_engine:
        raise Forbidden("this key may not pause the engine or change its weights (manages_engine)")
    return request.app[ENGINE]


async def _ask(request: web.Request, job: LiveJob) -> dict[str, Any]:
    answer = await request.app[ENGINE].ask_live(job)
    if not isinstance(job, AskLive | PutTensors):
        kind = type(job).__name__
        logger.info("%s by %s", kind, tenant_of(request).name or "a request without a key")
    return answer


# ---------------------------------------------------------------- vLLM's


@documented("admin", response=LiveState, errors=(400, 403, 409))
async def pause(request: web.Request) -> web.Response:
    """POST /pause: pause the engine, and answer once it is idle.

    `?mode=abort` ends requests with what they have, `wait` lets them run to their end, `keep` lets
    them go on afterwards; `clear_cache=false` with their caches. `lease`: seconds after which the
    pause ends by itself; `none`: never.
    """
    query = request.query
    job = Pause(
        mode=check_mode(query.get("mode", "abort")),
        clear_cache=_flag(query, "clear_cache", default=True),
        lease=_lease(query),
    )
    return _state("paused", await _ask(request, job))


@documented("admin", response=LiveState, errors=(403,))
async def resume(request: web.Request) -> web.Response:
    """End a pause; harmless without one."""
    return _state("resumed", await _ask(request, Resume()))


@documented("admin", response=dict[str, bool], errors=(403,))
async def is_paused(request: web.Request) -> web.Response:
    """Whether a pause has brought the engine to rest."""
    return reply({"is_paused": (await _ask(request, AskLive()))["is_paused"]})


@documented("admin", response=dict[str, str], errors=(403,))
async def weight_info(request: web.Request) -> web.Response:
    """The version of the weights that serve."""
    return reply({"weight_version": (await _ask(request, AskLive()))["weights_version"]})


@documented("admin", response=dict[str, int], errors=(403,))
async def get_world_size(request: web.Request) -> web.Response:
    """How many ranks join a group that weights come from."""
    return reply({"world_size": (await _ask(request, AskLive()))["world_size"]})


@documented("admin", request=InitTransfer, response=dict[str, str], errors=(403,))
async def init_weight_transfer_engine(request: web.Request) -> web.Response:
    """Join the group of a process that sends weights."""
    info = (await decode_body(request, InitTransfer)).init_info
    await _ask(
        request,
        JoinGroup(
            host=info.master_address, port=info.master_port, world_size=info.world_size,
            rank_offset=info.rank_offset, backend=info.backend, timeout=info.timeout,
            packed_bytes=info.packed_buffer_size_bytes if info.packed else 0,
        ),
    )  # fmt: skip
    return reply({"message": "Weight transfer initialized"})


@documented("admin", response=dict[str, str], errors=(400, 403))
async def shutdown_weight_transfer_engine(request: web.Request) -> web.Response:
    """Leave the group of a process that sends weights."""
    await _ask(request, LeaveGroup())
    return reply({"message": "Weight transfer shut down"})


@documented("admin", response=dict[str, str], errors=(400, 403, 409))
async def start_weight_update(request: web.Request) -> web.Response:
    """Begin to take new weights, while the present ones serve.

    `lease`: seconds without a call about it after which it is given up; `none`: never.
    """
    answer = await _ask(request, BeginUpdate(lease=_lease(request.query)))
    return reply({"message": "Weight update started", **answer})


@documented("admin", request=UpdateWeights, response=dict[str, str], errors=(403, 404))
async def update_weights(request: web.Request) -> web.Response:
    """Take tensors: a list of what number 0 of the group sends now; or, as
    `application/octet-stream`, the tensors themselves, in a body like a safetensors file.

    A body is a bucket: any number of them, of any tensors, make an update.
    """
    if request.content_type == "application/octet-stream":
        body = await request.read()
        parts, begin = read_header(body)
        await _ask(request, PutTensors(parts=parts, data=body[begin:]))
    else:
        info = (await decode_body(request, UpdateWeights)).update_info
        await _ask(request, ReceiveTensors(parts=info.parts()))
    return reply({"message": "Weights received"})


@documented("admin", request=FinishUpdate, response=dict[str, Any], errors=(403, 404))
async def finish_weight_update(request: web.Request) -> web.Response:
    """Serve with the new weights from the next step on, if they are whole."""
    body = FinishUpdate()
    if request.can_read_body:
        body = await decode_body(request, FinishUpdate)
    answer = await _ask(request, CommitUpdate(version=body.weight_version))
    return reply({"message": "Weight update finished", **answer})


@documented("admin", response=dict[str, str], errors=(400, 403, 404))
async def abort_weight_update(request: web.Request) -> web.Response:
    """Give an update up: the old weights serve on."""
    await _ask(request, RollBack())
    return reply({"message": "Weight update given up"})


@documented("admin", request=NewVersion, response=dict[str, Any], errors=(403,))
async def update_weight_version(request: web.Request) -> web.Response:
    """Give the weights that serve another name."""
    version = (await decode_body(request, NewVersion)).new_version
    await _ask(request, NameWeights(version=version))
    return reply({"success": True, "new_version": version})


@documented("admin", response=dict[str, Any], errors=(400, 403, 409))
async def sleep(request: web.Request) -> web.Response:
    """POST /sleep: pause the engine, and give the memory of weights and caches back.

    `?level=1` keeps the weights' numbers in host memory, `2` drops them; `mode` as of `/pause`;
    `tags=weights`, `tags=kv_cache`: of these alone.
    """
    query = request.query
    level = query.get("level", "1")
    if level not in ("1", "2"):
        raise InvalidRequest(f"level: must be 1 or 2, got {shown(level)}", param="level")
    mode = check_mode(query.get("mode", "abort"))
    answer = await _ask(request, Sleep(level=int(level), mode=mode, tags=_tags(query)))
    return reply({"status": "sleeping", "level": int(level), **answer})


@documented("admin", response=dict[str, Any], errors=(400, 403, 409))
async def wake_up(request: web.Request) -> web.Response:
    """POST /wake_up: take the memory again; once all is there, requests run.

    `?tags=weights&tags=kv_cache`: of these alone.
    """
    answer = await _ask(request, WakeUp(tags=_tags(request.query)))
    status = "sleeping" if answer["is_sleeping"] else "awake"
    return reply({"status": status, "tags": list(_tags(request.query)), **answer})


@documented("admin", response=dict[str, bool], errors=(403,))
async def is_sleeping(request: web.Request) -> web.Response:
    """Whether memory of weights or caches is given back."""
    return reply({"is_sleeping": (await _ask(request, AskLive()))["is_sleeping"]})


@documented("admin", request=WorkerCall, response=dict[str, Any], errors=(403,))
async def collective_rpc(request: web.Request) -> web.Response:
    """Call a method that a part of a plugin offers, on each rank."""
    body = await decode_body(request, WorkerCall)
    engine = request.app[ENGINE]
    try:
        results = await engine.collective_rpc(body.method, body.timeout, body.args, body.kwargs)
    except TimeoutError:
        raise RequestFailed(f"{body.method} has not returned in {body.timeout:g} seconds") from None
    return reply({"results": results})


@documented("admin", response=dict[str, Any], errors=(403,))
async def memory_report(request: web.Request) -> web.Response:
    """Who has how much memory, on the first rank."""
    return reply(await _ask(request, ReportMemoryUse()))


# ---------------------------------------------------------------- SGLang's


@documented("admin", request=PauseAsSglang, response=LiveState, errors=(403, 409))
async def pause_generation(request: web.Request) -> web.Response:
    """Pause the engine: `abort`; `retract`, and requests are computed again afterwards; or
    `in_place`, and they go on with their caches."""
    body = PauseAsSglang()
    if request.can_read_body:
        body = await decode_body(request, PauseAsSglang)
    job = Pause(
        mode="abort" if body.mode == "abort" else "keep",
        clear_cache=body.mode != "in_place",
        lease=body.lease,
    )
    return _state("ok", await _ask(request, job))


@documented("admin", response=LiveState, errors=(403,))
async def continue_generation(request: web.Request) -> web.Response:
    """End a pause; harmless without one."""
    return _state("ok", await _ask(request, Resume()))


@documented("admin", request=MemoryTags, response=dict[str, Any], errors=(403, 409))
async def release_memory_occupation(request: web.Request) -> web.Response:
    """Give memory back, of weights or caches; weights are read again, or sent."""
    tags = await _memory_tags(request)
    return reply(await _ask(request, Sleep(level=2, tags=tags)))


@documented("admin", request=MemoryTags, response=dict[str, Any], errors=(403, 409))
async def resume_memory_occupation(request: web.Request) -> web.Response:
    """Take memory again, of weights or caches."""
    return reply(await _ask(request, WakeUp(tags=await _memory_tags(request))))


async def _memory_tags(request: web.Request) -> tuple[str, ...]:
    tags: tuple[str, ...] = TAGS
    if request.can_read_body:
        tags = (await decode_body(request, MemoryTags)).tags or TAGS
    return tags


@documented("admin", response=str, content_type="text/plain", errors=(400, 403))
async def flush_cache(request: web.Request) -> web.Response:
    """Forget cached prefixes, unless requests run."""
    if (await _ask(request, ResetPrefixCache()))["success"]:
        return web.Response(text="Cache flushed.\n")
    return web.Response(text="Flush cache failed: requests are running.\n", status=400)


@documented("admin", response=SglangReply, errors=(403,))
async def begin_weight_update(request: web.Request) -> web.Response:
    """Begin to take new weights, with SGLang's answer."""

    async def work() -> str:
        await _ask(request, BeginUpdate(lease=_lease(request.query)))
        return "The update has begun."

    return await _as_sglang(request, work)


@documented("admin", request=EndUpdate, response=SglangReply, errors=(403,))
async def end_weight_update(request: web.Request) -> web.Response:
    """Serve with the new weights from the next step on, with SGLang's answer."""

    async def work() -> str:
        body = EndUpdate()
        if request.can_read_body:
            body = await decode_body(request, EndUpdate)
        return await _commit(request, body.weight_version, abort=body.abort_all_requests)

    return await _as_sglang(request, work)


@documented("admin", request=FromDisk, response=SglangReply, errors=(403,))
async def update_weights_from_disk(request: web.Request) -> web.Response:
    """Serve with the weights of a checkpoint on the server's machine, once they are read."""

    async def work() -> str:
        body = await decode_body(request, FromDisk)
        update = (await _ask(request, BeginUpdate()))["update"]
        load_format = body.load_format or ""
        await _ask(request, ReadFiles(update=update, path=body.model_path, load_format=load_format))
        message = await _commit(
            request, body.weight_version, abort=body.abort_all_requests, update=update
        )
        if not body.keep_pause:
            await _ask(request, Resume())
        return message

    return await _as_sglang(request, work)


@documented("admin", request=SglangGroup, response=SglangReply, errors=(403,))
async def init_weights_update_group(request: web.Request) -> web.Response:
    """Join the group of a process that sends weights, with SGLang's answer."""

    async def work() -> str:
        body = await decode_body(request, SglangGroup)
        job = JoinGroup(
            group=body.group_name, host=body.master_address, port=body.master_port,
            world_size=body.world_size, rank_offset=body.rank_offset, backend=body.backend,
        )  # fmt: skip
        await _ask(request, job)
        return "Succeeded to initialize custom process group."

    return await _as_sglang(request, work)


@documented("admin", request=GroupName, response=SglangReply, errors=(403,))
async def destroy_weights_update_group(request: web.Request) -> web.Response:
    """Leave a group, with SGLang's answer."""

    async def work() -> str:
        await _ask(request, LeaveGroup(group=(await decode_body(request, GroupName)).group_name))
        return "Succeeded to destroy custom process group."

    return await _as_sglang(request, work)


@documented("admin", request=FromGroup, response=SglangReply, errors=(403,))
async def update_weights_from_distributed(request: web.Request) -> web.Response:
    """Take the tensors that number 0 of a group sends now, with SGLang's answer."""

    async def work() -> str:
        body = await decode_body(request, FromGroup)
        parts = _parts(body.names, body.dtypes, body.shapes)
        await _ask(request, ReceiveTensors(parts=parts, group=body.group_name))
        return "Succeeded to update parameter online."

    return await _as_sglang(request, work)


async def _commit(
    request: web.Request, version: str | None, *, abort: bool, update: str = ""
) -> str:
    if abort:
        paused = await _ask(request, AskLive())
        await _ask(request, Pause(mode="abort"))
        try:
            answer = await _ask(request, CommitUpdate(update=update, version=version))
        finally:
            if not paused["is_paused"]:
                await _ask(request, Resume())
    else:
        answer = await _ask(request, CommitUpdate(update=update, version=version))
    return f"Succeeded to update model weights: version {answer['weights_version']}."


async def _as_sglang(request: web.Request, work: Callable[[], Awaitable[str]]) -> web.Response:
    try:
        message = await work()
    except JackfieldError as error:
        return reply(SglangReply(False, error.message), 400 if error.status < 500 else error.status)
    state = await _ask(request, AskLive())
    waiting = state["num_requests"] if state["is_paused"] else 0
    return reply(SglangReply(True, message, waiting, state["weights_version"]))


# ---------------------------------------------------------------- fields


def _state(status: str, answer: dict[str, Any]) -> web.Response:
    return reply(
        LiveState(
            status, answer["is_paused"], answer["weights_version"], answer["mode"], answer["lease"]
        )
    )


def _parts(names: list[str], dtypes: list[str], shapes: list[list[int]]) -> tuple[TensorPart, ...]:
    """Return tensors from lists. Raises InvalidRequest for unlike lengths."""
    if not len(names) == len(dtypes) == len(shapes):
        raise InvalidRequest(
            f"names: {len(names)} names, {len(dtypes)} types and {len(shapes)} shapes; each tensor "
            "has one of each",
            param="names",
        )
    return tuple(
        TensorPart(name, dtype, tuple(shape))
        for name, dtype, shape in zip(names, dtypes, shapes, strict=True)
    )


def _flag(query: Any, name: str, *, default: bool) -> bool:
    text = query.get(name)
    if text is None:
        return default
    if text.lower() not in ("true", "false", "1", "0"):
        raise InvalidRequest(f"{name}: must be true or false, got {shown(text)}", param=name)
    return text.lower() in ("true", "1")


def _tags(query: Any) -> tuple[str, ...]:
    return tuple(query.getall("tags", TAGS))


def _lease(query: Any) -> float | None:
    text = query.get("lease")
    if text is None or text == "none":
        return LEASE_SECONDS if text is None else None
    try:
        return float(text)
    except ValueError:
        raise InvalidRequest(
            f"lease: must be a number of seconds or none, got {shown(text)}", param="lease"
        ) from None
