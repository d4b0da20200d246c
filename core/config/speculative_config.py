"""Options of speculative decoding: `EngineConfig.speculative_config`."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from ..errors import ConfigError
from .annotations import doc

FIELD = "speculative_config"
AUTO = "auto"
"""The method that the served checkpoint has the weights of, or no drafts."""
MOST_DRAFTS = 32


class DraftLoadConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`load_format` and `model_loader_extra_config` of a draft checkpoint."""

    load_format: Annotated[str, doc("Weight loader by name, or auto.")] = "auto"
    model_loader_extra_config: Annotated[dict[str, Any], doc("The loader's options.")] = {}


class SpeculativeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Which speculator proposes drafts, and how many. Names are vLLM's."""

    method: Annotated[
        str | None,
        doc(
            "Speculator by name; auto: the one whose weights the served checkpoint has, or none; "
            "default: the one that the draft checkpoint is for."
        ),
    ] = None
    num_speculative_tokens: Annotated[
        Annotated[int, Meta(ge=1, le=MOST_DRAFTS)] | None,
        doc("Drafts of a request in a step; default: the checkpoint's, if it says."),
    ] = None
    model: Annotated[str | None, doc("Draft checkpoint: folder or hub name.")] = None
    revision: Annotated[str | None, doc("Of the draft checkpoint.")] = None
    quantization: Annotated[
        str | None, doc("Method of the draft checkpoint; default: as its config.json says.")
    ] = None
    draft_tensor_parallel_size: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        doc("Ranks that divide the draft model: the target's (default), or 1: each has it whole."),
    ] = None
    max_model_len: Annotated[
        Annotated[int, Meta(ge=1)] | None,
        doc("Longest sequence that gets drafts of a draft model; default: as long as it reads."),
    ] = None
    draft_load_config: Annotated[
        DraftLoadConfig, doc("How the draft checkpoint is read, where that is not automatic.")
    ] = DraftLoadConfig()
    rejection_sample_method: Annotated[
        Literal["coupled", "standard"],
        doc(
            "Which drafts are accepted: coupled, those that the target samples, so that tokens are "
            "those without drafts; standard, by the quotient of target's and draft's probability, "
            "so that their distribution is."
        ),
    ] = "coupled"
    draft_sample_method: Annotated[
        Literal["probabilistic", "greedy"],
        doc(
            "How speculators with weights choose drafts of sampled requests: by their temperature, "
            "or the most probable."
        ),
    ] = "probabilistic"
    adaptive_width: Annotated[
        bool,
        doc(
            "Give rows fewer drafts, or none, where a wider step costs more than its accepted "
            "drafts are worth."
        ),
    ] = True
    num_speculative_tokens_per_batch_size: Annotated[
        list[tuple[int, int, int]],
        doc("[first, last, most drafts of a row] for steps with so many requests that generate."),
    ] = []
    options: Annotated[dict[str, Any], doc("The speculator's own.")] = {}

    def __post_init__(self) -> None:
        last = 0
        for index, (first, until, most) in enumerate(self.schedule):
            name = "num_speculative_tokens_per_batch_size"
            if first > until or most < 0 or (index == 0 and first != 1):
                raise ValueError(
                    f"{name}: [first, last, drafts] with first <= last and drafts >= 0, the "
                    f"smallest first 1, not {[first, until, most]}"
                )
            if first <= last:
                raise ValueError(f"{name}: {[first, until, most]} overlaps the range before it")
            last = until

    @property
    def schedule(self) -> tuple[tuple[int, int, int], ...]:
        """`num_speculative_tokens_per_batch_size`, ascending."""
        return tuple(sorted(self.num_speculative_tokens_per_batch_size))

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of drafts that all rows of a step may have, ascending: few, as each is
        recorded."""
        most = self.num_drafts
        if not self.adaptive_width:
            scheduled = {min(drafts, most) for _, _, drafts in self.schedule} - {0}
            return tuple(sorted(scheduled or {most}))
        return tuple(sorted({1, *(max(1, most >> halved) for halved in range(3))}))

    @classmethod
    def read(cls, value: dict[str, Any] | SpeculativeConfig) -> SpeculativeConfig:
        """Return the configuration. The speculator's own options stand beside the others, as vLLM
        writes them. Raises ConfigError."""
        options = value if isinstance(value, dict) else msgspec.structs.asdict(value)
        own = set(cls.__struct_fields__)
        fields = {name: options[name] for name in own & options.keys()}
        try:
            if others := {name: options[name] for name in options.keys() - own}:
                fields["options"] = {**fields.get("options", {}), **others}
            config = msgspec.convert(fields, cls, strict=False)  # vLLM takes "65536".
        except (msgspec.ValidationError, TypeError) as error:
            raise ConfigError(f"{FIELD}: {error} (got {options!r})", param=FIELD) from None
        if not config.method and not config.model:
            raise ConfigError(
                f"{FIELD}: name a method, or the model that drafts (got {options!r})", param=FIELD
            )
        return config

    @property
    def speculator(self) -> str:
        """The method, once it is resolved."""
        assert self.method is not None, "resolve_speculation comes first"
        return self.method

    @property
    def num_drafts(self) -> int:
        """Drafts of a row at most, once they are resolved."""
        assert self.num_speculative_tokens is not None, "resolve_speculation comes first"
        return self.num_speculative_tokens
