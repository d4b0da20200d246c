"""What a caller says of a request besides its prompt and its parameters."""

from __future__ import annotations

from typing import Any, NamedTuple, TypedDict, cast

from ..errors import InvalidRequest
from ..lora_request import AdapterRef, LoRARequest
from .text_processor import ChatOptions


class RequestOptions(TypedDict, total=False):
    """Options of `AsyncEngine.generate`, `session`, `chat` and `encode`."""

    request_id: str | None
    """Unique among live requests; None: a random one."""
    priority: int
    """0 by default; a lower number goes first (`scheduling_policy`)."""
    cache_salt: str | None
    """Cached blocks are shared among requests with the same one."""
    data_parallel_rank: int | None
    """The member that runs it, of several (`data_parallel_size`); None: the one that knows most of
    the prompt, or has least to do."""
    lora_request: LoRARequest | None
    """The adapter that the request uses, loaded if need be."""
    adapter: str | AdapterRef | None
    """The same, by the name of one."""


class ChatRequestOptions(RequestOptions, ChatOptions, total=False):
    """Options of `AsyncEngine.chat`."""


class Envelope(NamedTuple):
    """`RequestOptions` under the names that `RequestSpec` has."""

    request_id: str
    """The caller's id; "": random."""
    priority: int
    cache_salt: str | None
    data_parallel_rank: int | None
    adapter: AdapterRef | None

    @classmethod
    def of(
        cls,
        *,
        request_id: str | None = None,
        priority: int = 0,
        cache_salt: str | None = None,
        data_parallel_rank: int | None = None,
        lora_request: LoRARequest | None = None,
        adapter: str | AdapterRef | None = None,
    ) -> Envelope:
        """Return the envelope of these `RequestOptions`. Raises InvalidRequest for the adapter, and
        TypeError for other options."""
        ref = adapter if isinstance(adapter, AdapterRef | None) else AdapterRef(adapter)
        if lora_request is not None:
            ref = _of_lora_request(lora_request, ref)
        return cls(request_id or "", priority, cache_salt, data_parallel_rank, ref)

    @classmethod
    def split(cls, options: ChatRequestOptions) -> tuple[Envelope, ChatOptions]:
        """Return the envelope of a chat request, and how its messages become a prompt. Raises as
        `of`."""
        own = cast(dict[str, Any], options).copy()
        names = ChatOptions.__annotations__.keys() & own.keys()
        rendering = {name: own.pop(name) for name in names}
        envelope = cls.of(**own)
        return envelope, cast(ChatOptions, rendering)


def _of_lora_request(lora_request: LoRARequest, adapter: AdapterRef | None) -> AdapterRef:
    if adapter is not None:
        raise InvalidRequest(
            "adapter: a request has one adapter, and lora_request names one; leave one of them out",
            param="adapter",
        )
    if not isinstance(lora_request, LoRARequest):
        kind = type(lora_request).__name__
        raise InvalidRequest(
            f"lora_request: must be a LoRARequest, got {kind}", param="lora_request"
        )
    return AdapterRef.of(lora_request)
