"""SGLang's routes that pause the engine, change its weights and lend its memory."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Awaitable, Callable
from typing import Any, Literal

import msgspec
from aiohttp import web

from ....core.errors import JackfieldError
from ....core.live.engine_jobs import (
    LEASE_SECONDS,
    TAGS,
    AskLive,
    BeginUpdate,
    CommitUpdate,
    JoinGroup,
    LeaveGroup,
    OpenTensors,
    Pause,
    ReadFiles,
    ReceiveTensors,
    ResetPrefixCache,
    Resume,
    Sleep,
    WakeUp,
    check_version,
)
from ....core.live.torch_pickles import read_sglang_tensors
from ...http.context import reply
from ...http.routing import route
from ...openai.common.openapi import documented
from ...openai.common.request_body import decode_body, decode_optional_body
from .surface import (
    Lease,
    LeaseOption,
    LiveState,
    NoOptions,
    ask,
    options_of,
    parts_of,
    seconds_of,
    state,
)


class PauseAsSglang(msgspec.Struct):
    mode: Literal["abort", "retract", "in_place"] = "abort"
    lease: Lease = LEASE_SECONDS


class ContinueOptions(msgspec.Struct):
    torch_empty_cache: bool = True
    """SGLang's; what it frees there, nothing keeps here."""


class BeginOptions(LeaseOption):
    selector: Literal["target", "all"] = "target"
    """SGLang's."""


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


class FromTensors(msgspec.Struct):
    """Tensors in the sender's device memory, on the same devices."""

    serialized_named_tensors: list[str]
    """One text per rank, as SGLang has them: pickled handles in base64."""
    load_format: Literal["flattened_bucket", "direct"] | None = None
    """flattened_bucket: each text is of one tensor with all others in it."""
    flush_cache: bool = True
    """As in `FromDisk`."""


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


def _sglang_reply(
    handler: Callable[[web.Request], Awaitable[str]],
) -> Callable[[web.Request], Awaitable[web.Response]]:
    """Reply as SGLang does with the message that a handler returns, or that of its error."""

    @functools.wraps(handler)
    async def respond(request: web.Request) -> web.Response:
        try:
            message = await handler(request)
        except JackfieldError as error:
            status = 400 if error.status < 500 else error.status
            return reply(SglangReply(False, error.message), status)
        state = await ask(request, AskLive())
        waiting = state["num_requests"] if state["is_paused"] else 0
        return reply(SglangReply(True, message, waiting, state["weights_version"]))

    return respond


@route("POST /pause_generation", manages_engine=True)
@documented("admin", request=PauseAsSglang, response=LiveState, errors=(409,))
async def pause_generation(request: web.Request) -> web.Response:
    """Pause the engine: `abort`; `retract`, and requests are computed again afterwards; or
    `in_place`, and they go on with their caches."""
    body = await decode_optional_body(request, PauseAsSglang)
    job = Pause(
        mode="abort" if body.mode == "abort" else "keep",
        clear_cache=body.mode != "in_place",
        lease=seconds_of(body.lease, LEASE_SECONDS),
    )
    return state("ok", await ask(request, job))


@route("POST /continue_generation", manages_engine=True)
@documented("admin", request=ContinueOptions, response=LiveState)
async def continue_generation(request: web.Request) -> web.Response:
    """End a pause; harmless without one."""
    await options_of(request, ContinueOptions)
    return state("ok", await ask(request, Resume()))


@route("POST /release_memory_occupation", manages_engine=True)
@documented("admin", request=MemoryTags, response=dict[str, Any], errors=(409,))
async def release_memory_occupation(request: web.Request) -> web.Response:
    """Give memory back, of weights or caches; weights are read again, or sent."""
    tags = await _memory_tags(request)
    return reply(await ask(request, Sleep(level=2, tags=tags)))


@route("POST /resume_memory_occupation", manages_engine=True)
@documented("admin", request=MemoryTags, response=dict[str, Any], errors=(409,))
async def resume_memory_occupation(request: web.Request) -> web.Response:
    """Take memory again, of weights or caches."""
    return reply(await ask(request, WakeUp(tags=await _memory_tags(request))))


async def _memory_tags(request: web.Request) -> tuple[str, ...]:
    return (await decode_optional_body(request, MemoryTags)).tags or TAGS


@route("POST /flush_cache", manages_engine=True)
@documented("admin", response=str, content_type="text/plain", errors=(400,))
async def flush_cache(request: web.Request) -> web.Response:
    """Forget cached prefixes, unless requests run."""
    await options_of(request, NoOptions)
    if (await ask(request, ResetPrefixCache()))["success"]:
        return web.Response(text="Cache flushed.\n")
    return web.Response(text="Flush cache failed: requests are running.\n", status=400)


@route("POST /begin_weight_update", manages_engine=True)
@documented("admin", request=BeginOptions, response=SglangReply)
@_sglang_reply
async def begin_weight_update(request: web.Request) -> str:
    """Begin to take new weights, with SGLang's answer."""
    options = await options_of(request, BeginOptions)
    await ask(request, BeginUpdate(lease=seconds_of(options.lease, LEASE_SECONDS)))
    return "The update has begun."


@route("POST /end_weight_update", manages_engine=True)
@documented("admin", request=EndUpdate, response=SglangReply)
@_sglang_reply
async def end_weight_update(request: web.Request) -> str:
    """Serve with the new weights from the next step on, with SGLang's answer."""
    body = await decode_optional_body(request, EndUpdate)
    return await _commit(request, body.weight_version, abort=body.abort_all_requests)


@route("POST /update_weights_from_disk", manages_engine=True)
@documented("admin", request=FromDisk, response=SglangReply)
@_sglang_reply
async def update_weights_from_disk(request: web.Request) -> str:
    """Serve with the weights of a checkpoint on the server's machine, once they are read."""
    body = await decode_body(request, FromDisk)
    if body.weight_version is not None:
        check_version(body.weight_version)  # Before the weights are read.
    update = (await ask(request, BeginUpdate()))["update"]
    load_format = body.load_format or ""
    await ask(request, ReadFiles(update=update, path=body.model_path, load_format=load_format))
    message = await _commit(
        request, body.weight_version, abort=body.abort_all_requests, update=update
    )
    if not body.keep_pause:
        await ask(request, Resume())
    return message


@route("POST /init_weights_update_group", manages_engine=True)
@documented("admin", request=SglangGroup, response=SglangReply)
@_sglang_reply
async def init_weights_update_group(request: web.Request) -> str:
    """Join the group of a process that sends weights, with SGLang's answer."""
    body = await decode_body(request, SglangGroup)
    job = JoinGroup(
        group=body.group_name, host=body.master_address, port=body.master_port,
        world_size=body.world_size, rank_offset=body.rank_offset, backend=body.backend,
    )  # fmt: skip
    await ask(request, job)
    return "Succeeded to initialize custom process group."


@route("POST /destroy_weights_update_group", manages_engine=True)
@documented("admin", request=GroupName, response=SglangReply)
@_sglang_reply
async def destroy_weights_update_group(request: web.Request) -> str:
    """Leave a group, with SGLang's answer."""
    await ask(request, LeaveGroup(group=(await decode_body(request, GroupName)).group_name))
    return "Succeeded to destroy custom process group."


@route("POST /update_weights_from_distributed", manages_engine=True)
@documented("admin", request=FromGroup, response=SglangReply)
@_sglang_reply
async def update_weights_from_distributed(request: web.Request) -> str:
    """Take the tensors that number 0 of a group sends now, with SGLang's answer."""
    body = await decode_body(request, FromGroup)
    parts = parts_of(body.names, body.dtypes, body.shapes)
    await ask(request, ReceiveTensors(parts=parts, group=body.group_name))
    return "Succeeded to update parameter online."


@route("POST /update_weights_from_tensor", manages_engine=True)
@documented("admin", request=FromTensors, response=SglangReply)
@_sglang_reply
async def update_weights_from_tensor(request: web.Request) -> str:
    """Take tensors in the sender's device memory, with SGLang's answer."""
    body = await decode_body(request, FromTensors)
    flattened = body.load_format == "flattened_bucket"
    buckets = await asyncio.to_thread(
        read_sglang_tensors, body.serialized_named_tensors, flattened=flattened
    )
    await ask(request, OpenTensors(buckets=buckets))
    return "Success"


async def _commit(
    request: web.Request, version: str | None, *, abort: bool, update: str = ""
) -> str:
    if abort:
        paused = await ask(request, AskLive())
        await ask(request, Pause(mode="abort"))
        try:
            answer = await ask(request, CommitUpdate(update=update, version=version))
        finally:
            if not paused["is_paused"]:
                await ask(request, Resume())
    else:
        answer = await ask(request, CommitUpdate(update=update, version=version))
    return f"Succeeded to update model weights: version {answer['weights_version']}."


ROUTES = (
    release_memory_occupation,
    resume_memory_occupation,
    pause_generation,
    continue_generation,
    flush_cache,
    begin_weight_update,
    end_weight_update,
    update_weights_from_disk,
    init_weights_update_group,
    destroy_weights_update_group,
    update_weights_from_distributed,
    update_weights_from_tensor,
)
