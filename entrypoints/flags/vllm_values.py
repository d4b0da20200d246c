"""Values of vLLM's and SGLang's options that become other words here."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .foreign_options import Option, Refused, Unneeded, json_words

Words = Callable[[list[str]], Sequence[str]]


def renamed(flag: str) -> Option:
    return Option("equivalent", flag, 1, lambda values: [f"{flag}={values[0]}"])


def fixed(*words: str) -> Option:
    return Option("equivalent", " ".join(words), 0, lambda _: words)


def chosen(
    text: str,
    words: Mapping[str, Sequence[str]] = {},
    unneeded: Mapping[str, str] = {},
    refused: Mapping[str, str] = {},
    otherwise: Callable[[str], Sequence[str]] | None = None,
    nargs: int | str = 1,
) -> Option:
    """Return an option with words, or reasons, for certain values in lower case."""

    def become(values: list[str]) -> Sequence[str]:
        value = values[0] if values else ""
        key = value.strip().lower()
        if key in words:
            return words[key]
        if key in unneeded:
            raise Unneeded(unneeded[key])
        if key in refused:
            raise Refused(refused[key])
        if otherwise is not None:
            return otherwise(value)
        names = ", ".join(sorted({*words, *unneeded}))
        raise Refused(f"{value} is no value that is known here; these are: {names}")

    return Option("equivalent", text, nargs, become)


def synonyms(
    flag: str, names: Mapping[str, str], unneeded: Mapping[str, str] = {}, text: str = ""
) -> Option:
    """Return an option of the parser with other names of its values; the rest are its own."""
    return chosen(
        text or f"{flag}, with other names of values",
        {name: (f"{flag}={own}",) for name, own in names.items()},
        unneeded,
        otherwise=lambda value: (f"{flag}={value}",),
    )


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise Refused(f"must be a JSON object, got {text}")
    return value


# ---------------------------------------------------------------- vLLM's values

_CHOSEN = "the fastest backend that serves the model is chosen; see --attention-backend"
ATTENTION = synonyms(
    "--attention-backend",
    {},
    dict.fromkeys(
        ("auto", "fa3", "fa4", "flash_attn_diffkv", "flash_attn_vllm_v1", "flashinfer_mla",
         "tokenspeed_mla", "triton_attn_diffkv", "triton_flash_attn", "triton_flashinfer",
         "xformers"),
        _CHOSEN,
    ),
)  # fmt: skip
"""Backends of vLLM 0.33 and SGLang whose names the plugins do not have as other names of theirs."""

_SAME_PRODUCTS = "experts' tokens always travel by the exchange that is here, with equal results"
ALL2ALL = synonyms(
    "--all2all-backend",
    {},
    dict.fromkeys(
        ("naive", "allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency",
         "deepep_v2", "pplx", "flashinfer_all2allv", "flashinfer_nvlink_one_sided",
         "flashinfer_nvlink_two_sided", "mori", "nixl_ep"),
        _SAME_PRODUCTS,
    ),
)  # fmt: skip


def _compilation(values: list[str]) -> Sequence[str]:
    if values[0].strip() in ("0", "1", "2", "3"):
        return _level(values)
    value = _object(values[0])
    mode = str(value.get("cudagraph_mode", "")).upper()
    if mode in ("NONE", "0") or value.get("use_cudagraph") is False:
        return ["--enforce-eager"]
    raise Unneeded(NO_COMPILER)


def _level(values: list[str]) -> Sequence[str]:
    if values and values[0].strip().lower() in ("0", "o0"):
        return ["--enforce-eager"]
    raise Unneeded(NO_COMPILER)


NO_COMPILER = "no graph is compiled for its shapes; --enforce-eager turns CUDA graphs off"
COMPILATION = Option(
    "equivalent", "--enforce-eager if cudagraph_mode is NONE, otherwise nothing", 1, _compilation
)
LEVEL = Option("equivalent", "--enforce-eager for 0, otherwise nothing", "?", _level)


def _attention_config(values: list[str]) -> Sequence[str]:
    value = _object(values[0])
    if value.get("backend") and ATTENTION.words is not None:
        return ATTENTION.words([str(value["backend"])])
    raise Unneeded("attention's kernels have no such switches")


ATTENTION_CONFIG = Option("equivalent", "--attention-backend", 1, _attention_config)

CONNECTORS = {"OffloadingConnector": "cpu_offload", "SimpleCPUOffloadConnector": "cpu_offload",
              "MultiConnector": "multi"}  # fmt: skip
"""vLLM's connectors that are here under other names."""


def _kv_transfer(values: list[str]) -> Sequence[str]:
    try:
        value = _object(values[0])
    except Refused:
        return [f"--kv-transfer-config={values[0]}"]
    name = value.get("kv_connector")
    if name not in CONNECTORS:
        return [f"--kv-transfer-config={values[0]}"]
    extra = dict(value.get("kv_connector_extra_config") or {})
    if (size := extra.pop("cpu_bytes_to_use", None)) is not None:
        extra["kv_offloading_size"] = float(size) / (1 << 30)
    value = {**value, "kv_connector": CONNECTORS[name]}
    if extra:
        value["kv_connector_extra_config"] = extra
    return [f"--kv-transfer-config={json.dumps(value)}"]


KV_TRANSFER = Option(
    "equivalent",
    "--kv-transfer-config; OffloadingConnector is cpu_offload, MultiConnector is multi",
    1,
    _kv_transfer,
)
KV_OFFLOADING = Option(
    "equivalent",
    "--kv-transfer-config with cpu_offload",
    1,
    lambda values: [
        "--kv-transfer-config.kv_connector=cpu_offload",
        f"--kv-transfer-config.kv_connector_extra_config.kv_offloading_size={values[0]}",
    ],
)


def _kv_events(values: list[str]) -> Sequence[str]:
    value = _object(values[0])
    value.pop("max_queue_size", None)  # Batches are handed to ZeroMQ at once.
    if value.get("publisher", "") is None:
        del value["publisher"]
    return [f"--plugin-option=kv_events.{key}={json.dumps(each)}" for key, each in value.items()]


KV_EVENTS = Option("equivalent", "--plugin-option kv_events.KEY=...", 1, _kv_events)


def part_of(flag: str, key: str) -> Option:
    """Return an option that is a key of a JSON option."""
    return Option("equivalent", f"{flag}.{key}", 1, lambda values: [f"{flag}.{key}={values[0]}"])


def plugin_option(name: str) -> Option:
    """Return an option that is a plugin's: its value is a text."""
    return Option(
        "equivalent",
        f"--plugin-option {name}=...",
        1,
        lambda values: [f"--plugin-option={name}={json.dumps(values[0])}"],
    )


_GRAMMARS = {"guidance": "llguidance"}
GRAMMARS = synonyms("--structured-outputs-config.backend", _GRAMMARS)
_UNNEEDED_GRAMMAR_KEYS = {
    "disable_fallback",
    "disable_additional_properties",
    "enable_in_reasoning",
}


def _structured(values: list[str]) -> Sequence[str]:
    try:
        value = _object(values[0])
    except Refused:
        return [f"--structured-outputs-config={values[0]}"]
    words = []
    if parser := value.pop("reasoning_parser", None):
        words.append(f"--reasoning-parser={parser}")
    for key in _UNNEEDED_GRAMMAR_KEYS & value.keys():
        del value[key]
    if value.get("backend") in _GRAMMARS:
        value["backend"] = _GRAMMARS[value["backend"]]
    return [f"--structured-outputs-config={json.dumps(value)}", *words] if value else words


STRUCTURED = Option(
    "equivalent",
    "--structured-outputs-config, without keys that change nothing here; its reasoning_parser is "
    "--reasoning-parser",
    1,
    _structured,
)


def _logging(values: list[str]) -> Sequence[str]:
    value = _object(values[0])
    words: list[str] = []
    if (kind := str(value.get("formatter", "text"))) == "json":
        words.append("--log-format=json")
    elif kind != "text":
        raise Refused("the log is text or json: --log-format")
    if (level := value.get("log_level")) is not None and LOG_LEVEL.words is not None:
        words += LOG_LEVEL.words([str(level)])
    if words:
        return words
    raise Unneeded("the log goes to standard error, from --log-level on")


BUILT_IN = {
    "nano_v3_reasoning_parser.py": "nemotron_v3",
    "nemotron_toolcall_parser_no_streaming.py": "nemotron_json",
}
"""Files of parsers that come with checkpoints → the parser that is here."""


def parser_file(kind: str) -> Option:
    """Return an option that names a file with a parser for vLLM."""

    def become(values: list[str]) -> Sequence[str]:
        if (own := BUILT_IN.get(values[0].rpartition("/")[2])) is not None:
            raise Unneeded(f"{own} is built in")
        raise Refused(f"install it as a package: jackfield plugins new {kind}")

    text = (
        f"nothing, for a parser that is built in; others are packages: jackfield plugins new {kind}"
    )
    return Option("equivalent", text, 1, become)


def _media_limits(values: list[str]) -> Sequence[str]:
    """Read the form of earlier versions, `image=4,video=1`."""
    pairs = [pair.partition("=") for pair in values[0].split(",")]
    if not all(name.isalpha() and equals and count.isdecimal() for name, equals, count in pairs):
        return [f"--limit-mm-per-prompt={values[0]}"]
    return json_words("--limit-mm-per-prompt", {name: int(count) for name, _, count in pairs})


MEDIA_LIMITS = Option(
    "equivalent", "--limit-mm-per-prompt, with image=4,video=1 for a JSON object", 1, _media_limits
)


def _reasoning(values: list[str]) -> Sequence[str]:
    """The marks of the reasoning, which vLLM reads beside its parser, are the parser's here."""
    if parser := _object(values[0]).get("reasoning_parser"):
        return [f"--reasoning-parser={parser}"]
    raise Unneeded("the marks of the reasoning are those of --reasoning-parser")


REASONING = Option(
    "equivalent", "--reasoning-parser, whose marks are the parser's own", 1, _reasoning
)
_LEVELS = ("debug", "info", "warning", "error", "critical")
LOG_LEVEL = synonyms(
    "--log-level", {**{level: level for level in _LEVELS}, "notset": "debug", "trace": "debug"}
)
LOGGING = Option("equivalent", "--log-level, --log-format", 1, _logging)
CONVERT = chosen(
    "--task embed, --task classify",
    {"embed": ("--task=embed",), "classify": ("--task=classify",)},
    {"auto": "--runner and the checkpoint decide", "none": "--runner and the checkpoint decide"},
    {"reward": "no model is made a reward model of; one that is needs no option"},
)
DP_BACKEND = chosen(
    "--executor ray", {"ray": ("--executor=ray",)}, {"mp": "engines are processes anyhow"}
)
LOAD_FORMAT = synonyms(
    "--load-format",
    dict.fromkeys(("fastsafetensors", "instanttensor", "hf"), "safetensors"),
    {"bitsandbytes": "quantized weights are known by the checkpoint; see --quantization"},
)
TOKENIZER_MODE = synonyms("--tokenizer-mode", {"slow": "hf"})
CACHE_MODE = chosen(
    "nothing",
    unneeded=dict.fromkeys(
        ("none", "align", "all"), "states are kept at the blocks that prefix caching needs"
    ),
)
