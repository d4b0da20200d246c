"""Resolves an EngineConfig for machine and checkpoint."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from ..config import EngineConfig
from ..config.compatibility import active_capabilities
from ..config.parallel_options import IN_PLACE
from ..errors import ConfigError, PluginError
from ..grammars.store import check_backend
from ..loading.dialects import declared_parser, marks_in, recognized
from ..loading.generation_config import read_generation_config
from ..loading.json_file import object_if_there
from ..loading.model_config import (
    MediaConfig,
    ModelConfig,
    SourceConfig,
    resolve_model_config,
)
from ..loading.resolve_pooling import resolve_pooling
from ..parts import encoder_decoder, input_embeds
from ..parts.exclusions import check_exclusions
from ..protocols.executors import ExecutorInfo
from ..protocols.kv import check_serves_ranks
from ..protocols.media import MediaModel, MediaSetup, present_modalities
from ..registration.architecture import FALLBACK, registered_name
from ..registration.executor_choice import choose_executor
from ..registration.plugin_options import typed_options
from ..registry import Plugins
from ..text.tokenizer_files import template_texts
from .resolve_speculation import resolve_speculation

logger = logging.getLogger("jackfield.engine")
NAMED = {
    "scheduling_policy": "schedule_policy",
    "kv_compression": "kv_compressor",
    "reasoning_parser": "reasoning_parser",
    "tool_call_parser": "tool_parser",
}
"""Options that name a plugin → kind. Others need a device, and are checked by the worker."""
NONE = "none"
"""Parser name for none, even if the checkpoint names one."""
AUTO = "auto"
"""Parser name for the checkpoint's, by its own naming or its chat template."""
PARSERS = ("reasoning_parser", "tool_call_parser")
TOKEN_BUDGET = {"cuda": 8192, "cpu": 2048}


def resolve_device(config: EngineConfig) -> str:
    """Return cuda or cpu. Raises ConfigError for a missing device."""
    device: str = config.device
    if device == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "device: cuda was requested, but torch finds no CUDA device here; use cpu or auto",
            param="device",
        )
    return device


def _check_nvtx(config: EngineConfig, device: str) -> None:
    if config.enable_layerwise_nvtx_tracing and device != "cuda":
        raise ConfigError(
            "enable_layerwise_nvtx_tracing: NVTX ranges need an NVIDIA GPU; a profile of a CPU is "
            "that of profiler_config",
            param="enable_layerwise_nvtx_tracing",
        )


def resolve_config(config: EngineConfig, plugins: Plugins) -> EngineConfig:
    device = resolve_device(config)
    _check_nvtx(config, device)
    budget = config.max_num_batched_tokens or max(TOKEN_BUDGET[device], config.max_num_seqs)
    if budget < config.max_num_seqs:
        config = msgspec.structs.replace(config, max_num_seqs=budget)
    executor = choose_executor(config, plugins["executor"])
    return msgspec.structs.replace(
        config, device=device, max_num_batched_tokens=budget, executor=executor
    )


def resolve_runner(
    requested: EngineConfig, config: EngineConfig, model_config: ModelConfig, plugins: Plugins
) -> tuple[EngineConfig, ModelConfig]:
    """Set `pooling`, `source`, `media`, and a token budget for prompts that cannot be split.
    requested: the options before resolution.

    Raises ConfigError, LoadError.
    """
    registry = plugins["model"]
    name = model_config.architecture
    model_type = getattr(model_config.hf_config, "model_type", None)
    model = registry.load(registered_name(registry, config, name, model_type))
    model_config = resolve_source(config, resolve_pooling(config, model_config, model), model)
    model_config = resolve_media(config, model_config, model, plugins)
    _check_prompt_embeds(config, model_config, model)
    pooling = model_config.pooling
    if pooling is not None and config.kv_transfer_config is not None:
        raise ConfigError(
            f"kv_transfer_config: {name} is pooled to vectors here, and KV connectors serve models "
            "that generate; leave it out",
            param="kv_transfer_config",
        )
    for option in ("kv_compression", "kv_compression_levels"):
        if pooling is not None and getattr(config, option) is not None:
            raise ConfigError(
                f"{option}: {name} is pooled to vectors here, and reads no cache after the "
                "prompt; leave it out",
                param=option,
            )
    if pooling is not None and config.speculative_config is not None:
        raise ConfigError(
            f"speculative_config: {name} is pooled to vectors here, and generates no tokens; leave "
            "it out",
            param="speculative_config",
        )
    config = resolve_speculation(config, model_config, plugins)
    if not model_config.whole_prompts:
        return config, model_config
    if pooling is not None and config.attention_backend != "auto":
        raise ConfigError(
            f"attention_backend: {config.attention_backend!r} is causal attention over a KV cache; "
            f"{name} is an encoder, whose attention is one of the operations; leave it on auto",
            param="attention_backend",
        )
    if requested.max_num_batched_tokens is None:
        assert config.max_num_batched_tokens is not None
        budget = max(config.max_num_batched_tokens, model_config.max_model_len)
        config = msgspec.structs.replace(config, max_num_batched_tokens=budget)
    return config, model_config


def resolve_models(config: EngineConfig, info: ExecutorInfo, plugins: Plugins) -> ModelConfig:
    """Return the model's configuration of a started engine in another process, from its resolved
    `config`. Blocks.
    """
    model_config = resolve_model_config(config, plugins)
    bind_parsers(config, model_config, plugins)
    return fitted(resolve_runner(config, config, model_config, plugins)[1], info)


def fitted(model_config: ModelConfig, info: ExecutorInfo) -> ModelConfig:
    """Limit the context to the executor's room."""
    if info.max_model_len is None:
        return model_config
    return dataclasses.replace(model_config, max_model_len=info.max_model_len)


def resolve_source(config: EngineConfig, model_config: ModelConfig, model: Any) -> ModelConfig:
    """Set `source` for a generating model with an encoder.

    `model`: the architecture's class, or None. Raises ConfigError with the field's name.
    """
    if not hasattr(model, "encode") or model_config.pooling is not None:
        return model_config
    name = model_config.architecture
    check_exclusions([*active_capabilities(config), encoder_decoder.NAME])
    if config.kv_cache_dtype not in ("auto", "bfloat16", "float16", "float32"):
        raise ConfigError(
            f"kv_cache_dtype: {name} is an encoder-decoder model, and the keys and values of its "
            "sources are kept in the model's type; leave it on auto",
            param="kv_cache_dtype",
        )
    generation = read_generation_config(model_config.path, config)

    def token(field: str) -> int | None:
        value = generation.get(field, getattr(model_config.hf_config, field, None))
        if value is None:
            return None
        if not isinstance(value, int) or not 0 <= value < model_config.vocab_size:
            raise ConfigError(
                f"model: {field} {value!r} is no token of this model (0 to "
                f"{model_config.vocab_size - 1})",
                param="model",
            )
        return value

    start = token("decoder_start_token_id")
    start = token("bos_token_id") if start is None else start
    if start is None:
        raise ConfigError(
            "model: neither config.json nor generation_config.json has decoder_start_token_id, "
            "which the decoder of an encoder-decoder model begins with",
            param="model",
        )
    bad_words = generation.get("bad_words_ids", getattr(model_config.hf_config, "bad_words_ids", 0))
    barred = generation.get("suppress_tokens") or ()
    if not hasattr(model, "audio_source"):
        audio, barred = None, ()
    else:
        audio = model.audio_source(model_config, generation)
    words = (*_sequences(bad_words), *_sequences([[token] for token in barred]))
    return dataclasses.replace(
        model_config, source=SourceConfig(start, token("forced_bos_token_id"), words, audio)
    )


def _check_prompt_embeds(config: EngineConfig, model_config: ModelConfig, model: Any) -> None:
    """Raise ConfigError where prompts may be embeddings, and this model cannot take them."""
    if not config.enable_prompt_embeds:
        return
    reason = None
    if model_config.pooling is not None:
        reason = "its states are pooled"
    elif model_config.media is not None:
        reason = "it reads pictures, and embeddings do not go beside them yet; language_model_only"
    elif not getattr(model, "takes_embeddings", False):
        reason = "it takes no embeddings in place of tokens"
    if reason is not None:
        raise ConfigError(
            f"enable_prompt_embeds: {model_config.architecture} cannot: {reason}",
            param="enable_prompt_embeds",
        )


PROCESSOR_FILES = ("preprocessor_config.json", "processor_config.json")
"""A checkpoint whose media can be processed has one of them."""


def resolve_media(
    config: EngineConfig, model_config: ModelConfig, model: Any, plugins: Plugins
) -> ModelConfig:
    """Set `media` for a checkpoint whose media can be served, or `text_alone`.

    `model`: the class of the text part. Raises ConfigError with the field's name.
    """
    architecture, registry = model_config.text_part_of, plugins["media_model"]
    if architecture is None:
        return model_config

    def text_alone(reason: str) -> ModelConfig:
        return dataclasses.replace(model_config, text_alone=reason)

    if architecture not in registry:
        refusal = registry.refusal(architecture)
        if refusal is not None or FALLBACK not in registry or model_config.whole_config is None:
            return text_alone(refusal or f"the encoder of {architecture} is not supported yet")
        architecture = FALLBACK
    if model_config.pooling is not None and not model_config.pooling.causal:
        return text_alone("its states are pooled by an encoder, which is done with texts alone")
    media: type[MediaModel] = registry.load(architecture)
    setup = MediaSetup(model_config.path, model_config.whole_config)
    with registry.calling(architecture, "present"):
        present = present_modalities(media, setup)
    if not present:
        return text_alone("it has no tower")
    modalities = tuple(each for each in present if config.media_limit(each))
    if not modalities:
        return text_alone("limit_mm_per_prompt or language_model_only turns them off")
    if not any((model_config.path / name).is_file() for name in PROCESSOR_FILES):
        return text_alone(f"the checkpoint has no {' or '.join(PROCESSOR_FILES)}")
    if not getattr(model, "takes_media", False):
        return text_alone(f"{model_config.architecture} takes no embeddings in place of tokens")
    with registry.calling(architecture, "refusal"):
        refusal = media.refusal(setup)
    if refusal is not None:
        return text_alone(refusal)
    check_exclusions([*active_capabilities(config), input_embeds.NAME])
    with registry.calling(architecture, "spans"):
        spans = media.spans(setup)
    speech = None
    if "audio" in modalities and hasattr(media, "speech"):
        with registry.calling(architecture, "speech"):
            speech = media.speech(setup)
    return dataclasses.replace(
        model_config, media=MediaConfig(architecture, modalities, spans, speech)
    )


def _sequences(value: Any) -> tuple[tuple[int, ...], ...]:
    """Return a configuration's lists of token ids, ignoring others."""
    lists = value if isinstance(value, list) else []
    return tuple(
        tuple(item)
        for item in lists
        if isinstance(item, list) and item and all(isinstance(token, int) for token in item)
    )


def resolve_parsers(
    config: EngineConfig, model_config: ModelConfig, plugins: Plugins
) -> EngineConfig:
    """Fill in the parsers: the options', else the checkpoint's; "none" becomes None, and "auto"
    what the checkpoint names, else the parser that knows its chat template, else its declaration's.

    Raises ConfigError for a missing or unusable parser.
    """
    parsers: dict[str, str | None] = {}
    for option, declared in (
        ("tool_call_parser", model_config.dialects.tool_call_parser),
        ("reasoning_parser", model_config.dialects.reasoning_parser),
    ):
        option_value = getattr(config, option)
        asks = option_value in (None, AUTO)
        registry = plugins[NAMED[option]]
        name = declared if asks else _parser_name(option_value)
        parsers[option] = None if name is None else registry.canonical(name)
        if option_value == AUTO and declared is None:
            parsers[option] = _recognize(option, config, model_config, plugins)
        if asks and declared is not None:
            try:
                plugins[NAMED[option]].load(declared)
            except PluginError as error:
                raise ConfigError(
                    f"{option}: the checkpoint names one that is not here: {error}; "
                    f"name another, or {NONE!r}",
                    param=option,
                ) from error
    auto_options = [
        option for option in PARSERS
        if getattr(config, option) == AUTO and getattr(model_config.dialects, option) is None
    ]  # fmt: skip
    if any(parsers[option] is None for option in auto_options):
        parsers |= _by_declaration(auto_options, parsers, model_config, plugins)
    for option in auto_options:
        if parsers[option] is None:
            logger.warning(
                "%s: auto finds no marks of any parser in the chat template (model_type %r): there "
                "is none; name one",
                option, getattr(model_config.hf_config, "model_type", None),
            )  # fmt: skip
    config = msgspec.structs.replace(config, **parsers)
    bind_parsers(config, model_config, plugins)
    return config


def _by_declaration(
    auto_options: Sequence[str],
    parsers: Mapping[str, str | None],
    model_config: ModelConfig,
    plugins: Plugins,
) -> dict[str, str | None]:
    """Return and log the undecided `auto_options` that the checkpoint's declaration decides, and
    the reasoning parser along with a tool parser. parsers: decided ones.
    """
    config = object_if_there(model_config.path / "tokenizer_config.json")
    names = {option: declared_parser(plugins[NAMED[option]], config) for option in PARSERS}
    reasoning, tools = PARSERS
    chosen: dict[str, str | None] = {}
    for option in (tools, reasoning):
        possible = option in auto_options and parsers[option] is None
        if option == tools:
            possible = possible and (
                reasoning in auto_options or parsers[reasoning] == names[reasoning]
            )
        if not possible and not (tools in chosen and reasoning in auto_options):
            continue
        registry, name = plugins[NAMED[option]], names[option]
        if name is None:
            continue
        try:
            registry.load(name).for_checkpoint(model_config.path)
        except ValueError as error:
            logger.warning("%s: auto cannot choose %r: %s", option, name, error)
            continue
        chosen[option] = name
        logger.info(
            "%s: auto chose %r: the checkpoint has a %s",
            option, name, registry.entry(name).parser_marks.declaration,
        )  # fmt: skip
    return chosen


def bind_parsers(config: EngineConfig, model_config: ModelConfig, plugins: Plugins) -> None:
    """Let parsers read the checkpoint's declaration of their format.

    Raises ConfigError if one cannot, or a tool parser lacks its reasoning parser.
    """
    for option in PARSERS:
        name = getattr(config, option)
        if name is None:
            continue
        registry = plugins[NAMED[option]]
        parser = registry.load(name)
        needed = getattr(parser, "needs_reasoning_parser", None)
        if needed is not None and config.reasoning_parser != needed:
            raise ConfigError(
                f"{option}: {name!r} reads what the reasoning parser {needed!r} passes on; set "
                f"reasoning_parser to {needed!r}, too",
                param=option,
            )
        if not hasattr(parser, "for_checkpoint"):
            continue
        try:
            registry.bind(name, parser.for_checkpoint(model_config.path))
        except ValueError as error:
            raise ConfigError(
                f"{option}: {name}: {error}; name another, or {NONE!r}", param=option
            ) from error


def _recognize(
    option: str, config: EngineConfig, model_config: ModelConfig, plugins: Plugins
) -> str | None:
    """Return, and log, the parser that knows the chat template."""
    model_type = getattr(model_config.hf_config, "model_type", None)
    template = template_texts(
        model_config.path,
        config.chat_template,
        plugins["checkpoint_format"],
        config.tokenizer_mode,
    )
    registry = plugins[NAMED[option]]
    name = recognized(registry, model_type, template)
    if name is None:
        return None
    logger.info(
        "%s: auto chose %r: the chat template has %s", option, name,
        " and ".join(map(repr, marks_in(registry.entry(name), model_type, template))),
    )  # fmt: skip
    return name


def _parser_name(name: str) -> str | None:
    return None if name == NONE else name


def check_names(config: EngineConfig, plugins: Plugins) -> None:
    options = [(option, kind, getattr(config, option)) for option, kind in NAMED.items()]
    if config.kv_transfer_config is not None:
        options.append(
            ("kv_transfer_config", "kv_connector", config.kv_transfer_config.kv_connector)
        )
    if (speculative := config.speculative_config) is not None and speculative.method != AUTO:
        options.append(("speculative_config", "speculator", speculative.method))
    if config.all2all_backend not in IN_PLACE:
        options.append(("all2all_backend", "all2all_backend", config.all2all_backend))
    for option, kind, name in options:
        if name is None or (name in (NONE, AUTO) and option in PARSERS):
            continue
        try:
            plugins[kind].load(name)
        except PluginError as error:
            raise ConfigError(f"{option}: {error}", param=option) from error
    if config.kv_transfer_config is not None and config.num_ranks > 1:
        name = config.kv_transfer_config.kv_connector
        check_serves_ranks(name, plugins["kv_connector"].load(name))
    if speculative is not None and speculative.method and speculative.method != AUTO:
        schema = plugins["speculator"].load(speculative.method).options
        typed_options("", schema, speculative.options, field="speculative_config")
    choose_executor(config, plugins["executor"])
    check_backend(plugins["structured_backend"], config.structured_outputs_config.backend)
