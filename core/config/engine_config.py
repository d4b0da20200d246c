"""`EngineConfig`: every engine option, from the groups of this folder.

Field names are vLLM's wherever the meaning is the same.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

from ..cache.level_options import CacheLevel, parse_levels
from ..errors import ConfigError
from ..spelling import nearest
from .adapter_options import lora_modules
from .annotations import DTYPE_SYNONYMS, doc
from .compatibility import check_compatible
from .kv_transfer_config import KVTransferConfig
from .media_options import media_io_options, media_limits
from .model_names import HubName, local_or_hub_name
from .output_options import OutputOptions
from .parallel_options import IN_PLACE, layer_partition
from .profiler_config import ProfilerConfig
from .speculative_config import SpeculativeConfig

SYNONYMS = {"distributed_executor_backend": "executor"}
"""vLLM's names of options that have another one here."""


class EngineConfig(OutputOptions, frozen=True, kw_only=True):
    """All options of an engine. Frozen; checked on creation.

    Raises `ConfigError` with the field's name.
    """

    disable_plugins: Annotated[
        tuple[str, ...], doc("Entry points or distributions not to load.")
    ] = ()
    plugin_options: Annotated[
        dict[str, dict[str, Any]],
        doc(
            "Options of plugins: name → its options. `jackfield plugins NAME` lists them; "
            "--plugin-option NAME.KEY=VALUE gives one."
        ),
    ] = {}
    record_steps: Annotated[
        str | None,
        doc(
            "Write every plan and result to this new file, for `jackfield debug replay`. It holds "
            "prompts and outputs as token ids."
        ),
    ] = None
    record_steps_max_gb: Annotated[
        float, doc("GB (1e9 bytes) after which the recording ends; the engine goes on.", gt=0)
    ] = 1.0

    profiler_config: Annotated[
        ProfilerConfig, doc("Profiles of the engine: JSON, or one flag per field.")
    ] = ProfilerConfig()

    def __post_init__(self) -> None:
        convert = functools.partial(msgspec.structs.force_setattr, self)
        for name in (
            "served_model_name", "disable_plugins", "kv_cache_dtype_skip_layers",
            "allowed_media_domains",
        ):  # fmt: skip
            convert(name, _as_tuple(getattr(self, name)))
        if isinstance(layers := self.kv_cache_dtype_skip_layers, tuple):
            words = tuple(str(word) if isinstance(word, int) else word for word in layers)
            convert("kv_cache_dtype_skip_layers", words)
        if self.max_model_len == -1:  # Another name of it in vLLM.
            convert("max_model_len", "auto")
        if isinstance(self.dtype, str) and self.dtype in DTYPE_SYNONYMS:
            convert("dtype", DTYPE_SYNONYMS[self.dtype])
        convert("lora_modules", lora_modules(self.lora_modules))
        convert("limit_mm_per_prompt", media_limits(self.limit_mm_per_prompt))
        convert("media_io_kwargs", media_io_options(self.media_io_kwargs))
        self._resolve_hub_names(convert)
        convert("pipeline_layer_partition", layer_partition(self.pipeline_layer_partition))
        if isinstance(self.kv_transfer_config, dict | KVTransferConfig):
            convert("kv_transfer_config", KVTransferConfig.read(self.kv_transfer_config))
        if isinstance(self.speculative_config, dict | SpeculativeConfig):
            convert("speculative_config", SpeculativeConfig.read(self.speculative_config))
        self._check_fields()
        check_compatible(self)

    def _resolve_hub_names(self, convert: Callable[[str, Any], None]) -> None:
        """Resolve hub names (hf://owner/name@revision) to name and revision. Raises ConfigError."""
        for option, revision in (("model", "revision"), ("tokenizer", "tokenizer_revision")):
            value, pinned = getattr(self, option), getattr(self, revision)
            name = local_or_hub_name(value, option) if isinstance(value, str) else value
            if not isinstance(name, HubName):
                convert(option, name)
                continue
            if name.revision is not None and pinned not in (None, name.revision):
                raise ConfigError(
                    f"{revision}: {option} {value!r} names another revision than {pinned!r}; leave "
                    "one of them out",
                    param=revision,
                )
            convert(option, name.repo)
            convert(revision, name.revision or pinned)

    def _check_fields(self) -> None:
        """Check values against annotations; structs may be dicts."""
        for name, hint in _field_types(type(self)).items():
            value = getattr(self, name)
            try:
                if isinstance(value, msgspec.Struct):
                    value = msgspec.structs.asdict(value)
                converted = msgspec.convert(value, hint)
            except msgspec.ValidationError as error:
                words = ", ".join(_words_of(hint)) if isinstance(value, str) else ""
                choices = f"; words that it takes: {words}" if words else ""
                raise ConfigError(
                    f"{name}: {error} (got {getattr(self, name)!r}){choices}", param=name
                ) from None
            if isinstance(converted, msgspec.Struct):
                msgspec.structs.force_setattr(self, name, converted)

    @property
    def served_names(self) -> tuple[str, ...]:
        """The model's names for requests; responses have the first one."""
        return self.served_model_name or (self.model or "jackfield-tiny",)

    @property
    def given_model_len(self) -> int | None:
        """`max_model_len` as a number; None: the model's own, or auto."""
        return None if self.max_model_len == "auto" else self.max_model_len

    @property
    def compresses_kv(self) -> bool:
        """Whether caches of running requests are compressed."""
        return self.kv_compression is not None or self.kv_compression_levels is not None

    @property
    def cache_levels(self) -> tuple[CacheLevel, ...]:
        """Return `kv_compression_levels`, parsed; empty: none. Raises ConfigError."""
        if self.kv_compression_levels is None:
            return ()
        try:
            return parse_levels(self.kv_compression_levels)
        except ValueError as error:
            raise ConfigError(
                f"kv_compression_levels: {error}", param="kv_compression_levels"
            ) from None

    @property
    def num_ranks(self) -> int:
        """Number of ranks that compute the model together."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def divides_experts_among_engines(self) -> bool:
        """Whether the ranks of all engines hold some of a mixture's experts each."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def exchanges_tokens(self) -> bool:
        """Whether tokens are sent to the ranks that hold their experts."""
        if self.divides_experts_among_engines:
            return True
        divided = self.enable_expert_parallel and self.tensor_parallel_size > 1
        return divided and self.all2all_backend not in IN_PLACE

    @classmethod
    def from_options(cls, options: dict[str, Any]) -> EngineConfig:
        """Build from a plain dict. The error for an unknown name suggests the nearest valid one."""
        field_names = set(cls.__struct_fields__)
        options = {SYNONYMS.get(name, name): value for name, value in options.items()}
        for name in options:
            if name not in field_names:
                near = nearest(name, field_names)
                hint = f"; did you mean {near}?" if near else ""
                raise ConfigError(f"{name}: no such engine option{hint}", param=name)
        return cls(**options)


def _as_tuple(value: Any) -> Any:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    return tuple(value) if isinstance(value, list) else value


def _words_of(hint: Any) -> list[str]:
    """Return an option's words by its annotation: Literal["a", "b"] | None → a, b."""
    if get_origin(hint) is Literal:
        return list(map(str, get_args(hint)))
    return [word for part in get_args(hint) for word in _words_of(part)]


@functools.cache
def _field_types(cls: type) -> dict[str, Any]:
    hints: dict[str, Any] = get_type_hints(cls, include_extras=True)
    return {name: hints[name] for name in cls.__struct_fields__}  # type: ignore[attr-defined]
