"""Adapters (LoRA): which, how many, and how large."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from ..errors import ConfigError
from .annotations import AtLeastOne, doc
from .cache_options import CacheOptions

FIELD = "lora_modules"


class LoRAModule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """An adapter that is there from the start."""

    name: str
    path: str
    base_model_name: str | None = None
    """The name of the base model that `/v1/models` gives as its parent; None: the served one."""
    pinned: bool = False
    """Never moved out of the device's memory."""


class AdapterOptions(CacheOptions, frozen=True, kw_only=True):
    """Adapters (LoRA): which, how many, and how large."""

    enable_lora: Annotated[bool, doc("Serve adapters (LoRA) of the model.")] = False
    lora_modules: Annotated[
        tuple[LoRAModule, ...],
        doc('Adapters to load at the start: NAME=PATH, or {"name": ..., "path": ...}.'),
    ] = ()
    max_loras: Annotated[AtLeastOne, doc("Adapters that running requests use at once.")] = 1
    max_lora_rank: Annotated[int, doc("Largest rank of an adapter.", ge=1, le=1024)] = 16
    max_cpu_loras: Annotated[
        AtLeastOne | None,
        doc("Adapters kept in host memory, at least max_loras; default: max_loras."),
    ] = None
    lora_dtype: Annotated[
        Literal["auto", "float16", "bfloat16", "float32"],
        doc("Type of adapters' matrices on the device; auto: the model's."),
    ] = "auto"
    lora_resolver_cache_dir: Annotated[
        str | None,
        doc("Folder whose subfolders are adapters that requests may name."),
    ] = None
    lora_max_wait_steps: Annotated[
        int,
        doc(
            "Steps after which a request whose adapter finds no room stops new requests of the "
            "adapter that will end first, until it runs.",
            ge=0,
        ),
    ] = 200
    lora_target_modules: Annotated[
        tuple[str, ...] | None,
        doc(
            "Layers that adapters may change, by the last part of their names; an adapter that "
            "changes others is refused. Default: all."
        ),
    ] = None


def lora_modules(value: Any) -> tuple[LoRAModule, ...]:
    """Read `lora_modules`: NAME=PATH, objects, or `LoRAModule`s. Raises ConfigError."""
    items = value if isinstance(value, list | tuple) else [value]
    modules = []
    for number, item in enumerate(items):
        where = f"{FIELD}[{number}]"
        if isinstance(item, str) and item.lstrip().startswith("{"):
            try:
                item = msgspec.json.decode(item)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{where}: {error}", param=FIELD) from error
        if isinstance(item, str):
            name, equals, path = item.partition("=")
            if not equals or not name or not path:
                raise ConfigError(f"{where}: {item!r} is not NAME=PATH", param=FIELD)
            item = {"name": name, "path": path}
        try:
            modules.append(
                item if isinstance(item, LoRAModule) else msgspec.convert(item, LoRAModule)
            )
        except msgspec.ValidationError as error:
            raise ConfigError(f"{where}: {error}", param=FIELD) from error
    names = [module.name for module in modules]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{FIELD}: {twice[0]!r} is there twice", param=FIELD)
    return tuple(modules)
