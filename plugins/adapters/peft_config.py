"""adapter_config.json: each field of PEFT's LoraConfig is used, has no effect, or is refused.

Fields and defaults are those of PEFT 0.21 (peft/tuners/lora/config.py); one that is absent has its
default.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from ...core.errors import ConfigError, listed, shown
from .patterns import MAX_LENGTH, MAX_STEPS, Pattern, Patterns
from .regular_file import open_regular

FILE = "adapter_config.json"
MAX_BYTES = 8 << 20
MAX_DEPTH = 32
MAX_RANK = 1 << 16
MAX_NAMES = 1024
"""Names in modules_to_save, target_parameters, trainable_token_indices."""

CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of `init_lora_weights`, or what they begin with, that changed the base model's weights."""
PLAIN_INITS = ("gaussian", "eva", "orthogonal", "mica")
"""Values that only set what training started from."""

REFUSED = {
    "layer_replication": "it repeats the base model's layers, which makes another model; merge it "
    "into a checkpoint",
    "use_qalora": "QA-LoRA averages the layers' inputs in groups",
    "use_bdlora": "its matrices are block-diagonal",
    "kasa_config": "KaSA changes the base model's weights",
    "arrow_config": "Arrow mixes several adapters",
    "monteclora_config": "MonteCLoRA samples its weights",
    "invocation_string": "the adapter acts from a text on, and alora_invocation_tokens, the text's "
    "tokens, is missing",
    "use_mora": "MoRA's matrices are square",
    "lora_nums": "several pairs of matrices per layer",
    "expert_num": "several pairs of matrices per layer",
}
"""Fields that change arithmetic in ways that are not computed here, of PEFT and of others, and why.
Their defaults (null, false, empty) are accepted."""

METADATA = frozenset(
    {
        "auto_mapping", "base_model_name_or_path", "inference_mode", "megatron_core",
        "peft_version", "qalora_group_size", "revision", "runtime_config", "task_type",
    }
)  # fmt: skip
TRAINING = frozenset(
    {
        "corda_config", "eva_config", "exclude_modules", "fan_in_fan_out",
        "layers_pattern", "layers_to_transform", "loftq_config", "lora_dropout", "lora_ga_config",
        "megatron_config", "velora_config",
        # Fields of 2023, and of ms-swift.
        "enable_lora", "merge_weights", "lora_dtype", "lorap_lr_ratio", "lorap_emb_lr",
    }
)  # fmt: skip
"""Fields that say how the adapter was trained, or which tensors its file has: the file itself says
that. `fan_in_fan_out` is the layout of the base model's weights; A and B have one layout."""

USED = frozenset(
    {
        "alora_invocation_tokens", "alpha_pattern", "bias", "ensure_weight_tying",
        "init_lora_weights", "lora_alpha", "lora_bias", "modules_to_save", "peft_type", "r",
        "rank_pattern", "target_modules", "target_parameters", "trainable_token_indices",
        "use_dora", "use_rslora",
    }
)  # fmt: skip
SWITCH, SETTINGS = "use_", "_config"
"""How PEFT names what changes arithmetic: a switch, or the settings of a method."""


@dataclass(frozen=True)
class Settings:
    """What adapter_config.json says, checked."""

    r: int
    lora_alpha: float
    use_rslora: bool
    rank_pattern: Mapping[str, int]
    alpha_pattern: Mapping[str, float]
    bias: str
    lora_bias: bool
    use_dora: bool
    target_modules: tuple[str, ...] | str | None
    target_parameters: tuple[str, ...]
    modules_to_save: tuple[str, ...]
    trainable_tokens: tuple[int, ...] | Mapping[str, tuple[int, ...]] | None
    """New rows of the model's input embeddings, or of embeddings by name."""
    invocation_tokens: tuple[int, ...]
    ties_weights: bool
    """Whether a tied head was changed with the embeddings: the file has both changes."""
    base_model: str
    notes: tuple[str, ...]

    @cached_property
    def _rank_keys(self) -> Patterns:
        return Patterns(self.rank_pattern, "rank_pattern")

    @cached_property
    def _alpha_keys(self) -> Patterns:
        return Patterns(self.alpha_pattern, "alpha_pattern")

    def rank_of(self, name: str) -> tuple[int, str]:
        """Return the rank of a layer or parameter, and the field that says it."""
        key = self._rank_keys.key_of(name)
        return (self.r, "r") if key is None else (self.rank_pattern[key], "rank_pattern")

    def scale_of(self, name: str) -> float:
        """Return by what B A x is multiplied, of a layer or parameter."""
        rank, _ = self.rank_of(name)
        key = self._alpha_keys.key_of(name)
        alpha = self.lora_alpha if key is None else self.alpha_pattern[key]
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)

    @cached_property
    def _target_pattern(self) -> Pattern | None:
        text = self.target_modules
        if not isinstance(text, str) or len(text) > MAX_LENGTH:
            return None
        try:
            return Pattern(text)
        except (ValueError, RecursionError):
            return None

    @cached_property
    def _target_names(self) -> frozenset[str]:
        return frozenset(() if isinstance(self.target_modules, str) else self.target_modules or ())

    def targets(self, name: str) -> bool | None:
        """Return whether `target_modules` names a layer; None if that cannot be said."""
        if self.target_modules is None or self.target_modules == "all-linear":
            return None
        if isinstance(self.target_modules, str):
            pattern = self._target_pattern
            if pattern is None or pattern.steps > MAX_STEPS:
                return None
            return pattern.matches(name, whole=True)
        return not self._target_names.isdisjoint(tails(name))

    @cached_property
    def _parameters(self) -> dict[str, set[str]]:
        """The modules that `target_parameters` names, or "", with their parameters."""
        parameters: dict[str, set[str]] = {}
        for each in self.target_parameters:
            module, _, leaf = each.rpartition(".")
            parameters.setdefault(module, set()).add(leaf)
        return parameters

    def parameters_of(self, module: str, count: int) -> list[str]:
        """Return the parameters of a module that `target_parameters` names; those that it names
        with the module, if these are `count`. A bare name may be another module's."""
        found = self._parameters
        named = {leaf for tail in tails(module) for leaf in found.get(tail, ())}
        return sorted(named if len(named) == count else named | found.get("", set()))


def tails(name: str) -> list[str]:
    """Return a dotted name and what remains of it after each dot."""
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]


def read_settings(folder: Path) -> Settings:
    """Read adapter_config.json. Raises ConfigError with the field as `param`."""
    fields = _read_object(folder)
    _check_method(fields)
    notes = _check_fields(fields)
    rank_pattern = {
        key: _rank(value, "rank_pattern") for key, value in _object(fields, "rank_pattern").items()
    }
    alpha_pattern = {
        key: _number(value, "alpha_pattern")
        for key, value in _object(fields, "alpha_pattern").items()
    }
    bias = fields.get("bias") or "none"
    if bias not in ("none", "all", "lora_only"):
        raise _wrong("bias", "none, all or lora_only", bias)
    targets = fields.get("target_modules")
    settings = Settings(
        r=_rank(fields.get("r", 8), "r"),
        lora_alpha=_number(fields.get("lora_alpha", 8), "lora_alpha"),
        use_rslora=_switch(fields, "use_rslora"),
        rank_pattern=rank_pattern,
        alpha_pattern=alpha_pattern,
        bias=bias,
        lora_bias=_switch(fields, "lora_bias"),
        use_dora=_switch(fields, "use_dora"),
        target_modules=targets if isinstance(targets, str) else _names(fields, "target_modules"),
        target_parameters=_names(fields, "target_parameters") or (),
        modules_to_save=_names(fields, "modules_to_save") or (),
        trainable_tokens=_trainable_tokens(fields.get("trainable_token_indices")),
        invocation_tokens=_invocation(fields),
        ties_weights=_switch(fields, "ensure_weight_tying"),
        base_model=str(fields.get("base_model_name_or_path") or "")[:MAX_LENGTH],
        notes=notes,
    )
    if settings.use_dora and settings.lora_bias:
        raise ConfigError("lora_bias: does not go with use_dora", param="lora_bias")
    if settings.use_dora and settings.invocation_tokens:
        raise ConfigError(
            "alora_invocation_tokens: does not go with use_dora", param="alora_invocation_tokens"
        )
    return settings


def _invocation(fields: Mapping[str, Any]) -> tuple[int, ...]:
    value = fields.get("alora_invocation_tokens")
    if value is None:
        return ()
    tokens = _token_ids(value, "alora_invocation_tokens")
    if not tokens:
        raise _wrong("alora_invocation_tokens", "a list of at least one token id", value)
    return tokens


def _trainable_tokens(value: Any) -> tuple[int, ...] | dict[str, tuple[int, ...]] | None:
    field = "trainable_token_indices"
    if value is None:
        return None
    if isinstance(value, dict) and len(value) <= MAX_NAMES:
        return {name: _token_ids(ids, field, once=True) for name, ids in value.items()}
    return _token_ids(value, field, once=True)


def _check_method(fields: Mapping[str, Any]) -> None:
    method = fields.get("peft_type")
    if method is None:
        raise ConfigError(f"peft_type: {FILE} has none, and LORA is served", param="peft_type")
    if method != "LORA":
        raise ConfigError(
            f"peft_type: adapters of type LORA are served, and this one is {shown(method)}",
            param="peft_type",
        )
    init = fields.get("init_lora_weights", True)
    if init is None or isinstance(init, bool):
        return
    if isinstance(init, str) and init.lower().startswith(CHANGED_BASE):
        raise ConfigError(
            f"init_lora_weights: {shown(init)} changed the base model's weights when training "
            "began, so the adapter is wrong on the original ones; save it again as a difference to "
            "them (save_pretrained with path_initial_model_for_weight_conversion)",
            param="init_lora_weights",
        )
    if not isinstance(init, str) or init.lower() not in PLAIN_INITS:
        raise _wrong("init_lora_weights", f"true, false, {', '.join(PLAIN_INITS)}", init)


def _check_fields(fields: Mapping[str, Any]) -> tuple[str, ...]:
    """Refuse fields that change arithmetic in ways not computed here; return notes on the rest."""
    for name, value in fields.items():
        if not value or name in USED | METADATA | TRAINING:
            continue
        if name == "invocation_string" and fields.get("alora_invocation_tokens"):
            continue  # The same, as tokens.
        if name in REFUSED:
            raise ConfigError(f"{name}: is not served: {REFUSED[name]}", param=name)
        if (name.startswith(SWITCH) and value is True) or name.endswith(SETTINGS):
            raise ConfigError(
                f"{name}: is not known, and its name says that it changes what the adapter "
                "computes; set it to null if it does not",
                param=name[:MAX_LENGTH],
            )
    known = USED | METADATA | TRAINING | REFUSED.keys()
    training = sorted(name for name in TRAINING & fields.keys() if fields[name])
    unknown = sorted(name[:80] for name in fields if name not in known)
    notes = []
    if training:
        notes.append(f"settings of the training, without effect: {listed(training)}")
    if unknown:
        notes.append(f"fields that are not known, ignored: {listed(unknown)}")
    return tuple(notes)


def _read_object(folder: Path) -> dict[str, Any]:
    descriptor = open_regular(folder / FILE, folder)
    with open(descriptor, "rb") as file:
        size = os.fstat(descriptor).st_size
        if size > MAX_BYTES:
            raise ConfigError(f"{FILE}: has {size} bytes; at most {MAX_BYTES} are read", param=FILE)
        content = file.read(MAX_BYTES)
    try:
        value = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        reason = "too many levels" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{FILE}: is not JSON: {reason}", param=FILE) from error
    if not isinstance(value, dict):
        raise ConfigError(f"{FILE}: is not a JSON object", param=FILE)
    _check_depth(value)
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [
            item for each in level
            for item in (each.values() if isinstance(each, dict) else each)
            if isinstance(item, dict | list)
        ]  # fmt: skip
        if not level:
            return
    raise ConfigError(f"{FILE}: has more than {MAX_DEPTH} levels", param=FILE)


def _wrong(field: str, wanted: str, value: Any) -> ConfigError:
    return ConfigError(f"{field}: must be {wanted}, got {shown(value)}", param=field)


def _rank(value: Any, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 < value <= MAX_RANK:
        raise _wrong(field, f"a whole number from 1 to {MAX_RANK}", value)
    return value


def _number(value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise _wrong(field, "a number", value)
    # A whole number of many digits is no float.
    if abs(value) > 1e9 or not math.isfinite(value):
        raise _wrong(field, "a number of at most 1e9", value)
    return float(value)


def _switch(fields: Mapping[str, Any], field: str) -> bool:
    value = fields.get(field)
    if value is not None and not isinstance(value, bool):
        raise _wrong(field, "true or false", value)
    return bool(value)


def _object(fields: Mapping[str, Any], field: str) -> dict[str, Any]:
    value = fields.get(field)
    if value is not None and not isinstance(value, dict):
        raise _wrong(field, "an object", value)
    return value or {}


def _names(fields: Mapping[str, Any], field: str) -> tuple[str, ...] | None:
    value = fields.get(field)
    if value is None:
        return None
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _wrong(field, "a list of names", value)
    if field != "target_modules" and len(value) > MAX_NAMES:
        raise ConfigError(
            f"{field}: at most {MAX_NAMES} names are read, got {len(value)}", param=field
        )
    return tuple(value)


def _token_ids(value: Any, field: str, *, once: bool = False) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(
        isinstance(token, int) and not isinstance(token, bool) and 0 <= token < 1 << 31
        for token in value
    ):
        raise _wrong(field, "a list of token ids", value)
    if once and len(set(value)) < len(value):
        raise ConfigError(f"{field}: has a token id twice", param=field)
    return tuple(value)
