"""docs/reference/combinations.md: which capabilities, modes and attention backends go together."""

from __future__ import annotations

from typing import Any

from markdown_table import table

from jackfield.core.parts import (
    adapters,
    encoder_decoder,
    input_embeds,
    kv_compression,
    kv_transfer,
    speculation,
    states,
)
from jackfield.core.parts.exclusions import (
    CALCULATED_SCALES,
    COMMON_EXPERTS,
    DATA_PARALLEL,
    EXPERT_BALANCE,
    KV_LEVELS,
    MODELS,
    OPTIONS,
    PIPELINE,
    RECORDING,
    TENSOR_PARALLEL,
    reason_against,
)
from jackfield.core.registry import load_plugins
from jackfield.core.worker.parts.compaction import REFUSALS
from jackfield.core.worker.start.parts import BACKEND_REFUSALS

CAPABILITIES = {
    speculation.NAME: "speculative decoding",
    kv_compression.NAME: "KV compression",
    kv_transfer.NAME: "KV connectors",
    states.NAME: "models with states",
    encoder_decoder.NAME: "encoder-decoder models",
    input_embeds.NAME: "pictures",
    adapters.NAME: "adapters",
    RECORDING: "recorded plans",
    CALCULATED_SCALES: "calculated KV scales",
    KV_LEVELS: "KV levels",
}
MODES = {
    TENSOR_PARALLEL: "tensor parallel",
    PIPELINE: "pipeline parallel",
    DATA_PARALLEL: "data parallel",
    COMMON_EXPERTS: "experts common to engines",
    EXPERT_BALANCE: "experts placed by load",
}
ALL = {**CAPABILITIES, **MODES}
EXECUTOR_FLAGS = {
    TENSOR_PARALLEL: "tensor_parallel",
    PIPELINE: "pipeline_parallel",
    DATA_PARALLEL: "data_parallel",
    COMMON_EXPERTS: "joins_engines",
    EXPERT_BALANCE: "moves_experts",
}


class Notes:
    """Numbered reasons, each once."""

    def __init__(self) -> None:
        self._numbers: dict[str, int] = {}

    def cell(self, reason: str | None) -> str:
        """What a cell shows: yes, or no with the number of its reason."""
        if reason is None:
            return "yes"
        return f"no ({self._numbers.setdefault(reason, len(self._numbers) + 1)})"

    @property
    def text(self) -> str:
        """The list of reasons."""
        return "".join(f"{number}. {reason}\n" for reason, number in self._numbers.items())


def combinations() -> str:
    """The page."""
    notes = Notes()
    rows = [
        [f"**{label}**", *(_cell(notes, one, other) for other in ALL)] for one, label in ALL.items()
    ]
    turned_on = [
        [label, f"`{OPTIONS[name]}`" if name in OPTIONS else f"the model: it {MODELS[name]}"]
        for name, label in ALL.items()
    ]
    return (
        "# What goes with what\n\n"
        "Which capabilities, parallel modes and attention backends an engine can have at once. "
        "What does not go together is refused at the start, with the option's name. Source: "
        "[core/parts/exclusions.py](../../core/parts/exclusions.py). A test starts an engine with "
        "each pair (`tests/core/engine/test_combinations.py`). Parts from plugins say in "
        "`StepPart.excludes` what they do not go with; what is not listed there is allowed.\n\n"
        "## Capabilities and modes\n\n"
        + table(["", *ALL.values()], rows)
        + f"\n{notes.text}\n"
        + table(["capability or mode", "turned on by"], turned_on)
        + "\n## Attention backends\n\n"
        "With `attention_backend` auto, one that serves is taken. Where a layer has a feature (a "
        "window, sinks, ALiBi slopes), the backend must have it, too.\n\n"
        + _backends()
        + "\n## Executors\n\n"
        + _executors()
        + "\n## What depends on the model\n\n"
        + _by_model()
    )


def _cell(notes: Notes, one: str, other: str) -> str:
    if one == other or {one, other} <= set(MODELS):
        return ""
    return notes.cell(reason_against(one, other))


def _backends() -> str:
    notes, rows = Notes(), []
    plugins = load_plugins()
    for kind, label in (("attention_backend", ""), ("latent_attention_backend", " (latents)")):
        for name in sorted(plugins[kind]):
            backend: Any = plugins[kind].load(name)
            cells = [notes.cell(refuses(backend)) for refuses in BACKEND_REFUSALS.values()]
            fp8 = None if backend.fp8_cache else "it reads no fp8 cache (kv_cache_dtype)"
            rows.append([f"`{name}`{label}", *cells, notes.cell(fp8)])
    heads = [CAPABILITIES[name] for name in BACKEND_REFUSALS]
    return table(["backend", *heads, CAPABILITIES[CALCULATED_SCALES]], rows) + f"\n{notes.text}"


def _executors() -> str:
    registry = load_plugins()["executor"]
    rows = []
    for name in sorted(registry):
        executor: Any = registry.load(name)
        flags = [
            "yes" if getattr(executor, flag, False) else "no" for flag in EXECUTOR_FLAGS.values()
        ]
        rows.append([f"`{name}`", *flags])
    return table(["executor", *(MODES[mode] for mode in EXECUTOR_FLAGS)], rows)


def _by_model() -> str:
    return (
        f"- KV compression is refused if {'; if '.join(REFUSALS)}; if all layers have a window or "
        "chunks, which bound the cache; and if none keeps something of each token. A compressor "
        "may refuse more (`KVCompressor.refusal`), and one that changes values is refused for "
        "latents.\n"
        "- KV levels are refused for layers with chunks, which begin at multiples of their size, "
        "so that no whole number of blocks may move; for layers with a window that is longer than "
        "the first level's age, since what a window sees is never rounded; and for heads, or "
        "latents, whose channels are no multiple of 8, of which a code of 4 bits is no whole "
        "word.\n"
        "- KV connectors move blocks of one group of layers: prefix caching must be on.\n"
        "- Tensor and pipeline parallel: the architecture's class says whether it can be divided "
        "([models](models.md)); models whose states are pooled run in one stage.\n"
        "- Experts common to engines need `data_parallel_size` and a mixture of experts.\n"
        "- Experts placed by load need `enable_expert_parallel`, tensor parallel, and a mixture of "
        "experts.\n"
        "- Encoders without a cache, whose states are pooled, have none of these capabilities.\n"
    )
