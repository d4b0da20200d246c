"""Adapters by name: what requests say, what an engine is asked about them, and what it answers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, TypeAlias

import msgspec

from .errors import InvalidRequest, ModelNotFound, shown

if TYPE_CHECKING:
    from .config.adapter_options import LoRAModule

MAX_NAME_LENGTH = 256
"""Characters of an adapter's name."""


class LoRARequest(msgspec.Struct, frozen=True):
    """An adapter for a request, as vLLM's users write it: LoRARequest("name", 1, "/path").

    Loaded with the first request that names it. The name is what counts; `lora_int_id` is another
    name for it (`AsyncEngine.remove_lora`).
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    """Folder or file on the engine's machine; "": of an adapter that is loaded already."""
    base_model_name: str | None = None
    load_inplace: bool = False
    """Read it again, in place of what is loaded under its name, if its content has changed."""

    def __post_init__(self) -> None:
        if isinstance(self.lora_int_id, int) and self.lora_int_id < 1:
            raise ValueError(f"lora_int_id: must be at least 1, got {self.lora_int_id}")

    @property
    def name(self) -> str:
        return self.lora_name

    @property
    def adapter_id(self) -> int:
        return self.lora_int_id

    @property
    def path(self) -> str:
        return self.lora_path


class AdapterRef(msgspec.Struct, frozen=True):
    """The adapter that a request asks for."""

    name: str
    path: str = ""
    """Where it is loaded from if it is not yet; "": it is loaded, or a resolver finds it."""
    load_inplace: bool = False
    parent: str | None = None
    int_id: int | None = None
    tenant: str | None = None
    """Who asks (`Tenant.owner`), who may use what everyone may, and what is the tenant's own. None:
    the program that has the engine, which may use all."""
    shared: bool = True
    """Whether it may be one that everyone may use; otherwise it is the tenant's own."""

    @classmethod
    def of(cls, lora_request: LoRARequest) -> AdapterRef:
        """Return what vLLM's form says."""
        return cls(
            lora_request.lora_name,
            lora_request.lora_path,
            lora_request.load_inplace,
            lora_request.base_model_name,
            lora_request.lora_int_id,
        )


class AdapterCard(msgspec.Struct, frozen=True, kw_only=True):
    """An adapter that an engine serves."""

    name: str
    path: str
    format: str
    parent: str
    """Name of its base model."""
    owner: str = ""
    """The only tenant that may use it (`Tenant.owner`); "": everyone may."""
    int_id: int | None = None
    """`LoRARequest.lora_int_id`, if it was loaded with one."""
    pinned: bool = False
    digest: str = ""
    """Digest of its content."""
    rank: int = 0
    nbytes: int = 0
    """In host memory, on each rank; 0: it was moved out, and is read again when it is used."""
    resident: bool = False
    """Whether it is in the device's memory."""
    running: int = 0
    """Requests that run with it."""
    waiting: int = 0
    """Requests that wait with it in the scheduler."""
    notes: tuple[str, ...] = ()
    """What of its files was ignored, as it does not change results."""


class LoadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="load"):
    """Load an adapter. → its card

    Raises InvalidRequest: the name is taken or malformed, nothing is at the path, or it cannot be
    served. Then nothing has changed.
    """

    name: str
    path: str
    load_inplace: bool = False
    """Take the place of what is loaded under this name. Requests that run keep that until they
    end."""
    parent: str | None = None
    owner: str = ""
    int_id: int | None = None
    pinned: bool = False
    most: int | None = None
    """Adapters that the owner may have with it; None: any number."""


def configured_loads(modules: Iterable[LoRAModule]) -> list[LoadAdapter]:
    """Return the loads of the adapters that are there from the start."""
    return [
        LoadAdapter(name=m.name, path=m.path, parent=m.base_model_name, pinned=m.pinned)
        for m in modules
    ]


class UnloadAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="unload"):
    """Forget an adapter, and free its memory once no request uses it. → its card, or nothing if
    there is none that the tenant may unload"""

    name: str = ""
    int_id: int | None = None
    """Instead of the name."""
    tenant: str | None = None
    """None: whoever may unload all."""


class PinAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="pin"):
    """Keep an adapter in the device's memory, or no longer. → its card, or nothing if there is none

    Raises InvalidRequest if there is no room for the largest adapter beside those that are pinned.
    """

    name: str = ""
    int_id: int | None = None
    pinned: bool = True


class FindAdapter(msgspec.Struct, frozen=True, kw_only=True, tag="find"):
    """→ the card of the adapter that a request would use, which a resolver may find first

    Raises ModelNotFound.
    """

    ref: AdapterRef


class ListAdapters(msgspec.Struct, frozen=True, kw_only=True, tag="list"):
    """→ the cards of all adapters, by name"""


AdapterJob: TypeAlias = LoadAdapter | UnloadAdapter | PinAdapter | FindAdapter | ListAdapters
"""What an engine is asked about adapters."""


def check_adapter_name(name: object, base_names: tuple[str, ...]) -> str:
    """Return the name. Raises InvalidRequest for one that no adapter may have."""
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_LENGTH:
        raise InvalidRequest(
            f"lora_name: must be a text of 1 to {MAX_NAME_LENGTH} characters, got {shown(name)}",
            param="lora_name",
        )
    if not name.isprintable():  # Control characters, surrogates, and separators of lines.
        raise InvalidRequest(
            f"lora_name: has characters that are not printable: {shown(name)}", param="lora_name"
        )
    if name in base_names:
        raise InvalidRequest(f"lora_name: {name!r} is the base model's name", param="lora_name")
    return name


def unknown_adapter(name: str, base_names: tuple[str, ...]) -> ModelNotFound:
    """Return the error for a name that is unknown, or that another tenant's adapter has."""
    names = ", ".join(base_names)
    return ModelNotFound(
        f"model: {shown(name)} is not served here (there is: {names})", param="model"
    )
