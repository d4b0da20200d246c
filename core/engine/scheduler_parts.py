"""Selects an engine's scheduler parts, by configuration and worker."""

from __future__ import annotations

from ..config import EngineConfig
from ..config.compatibility import active_capabilities
from ..config.speculative_config import SpeculativeConfig
from ..errors import ConfigError, PluginError
from ..loading.model_config import MediaConfig
from ..parts import (
    adapters,
    encoder_decoder,
    input_embeds,
    kv_compression,
    rounds,
    routed_experts,
    speculation,
)
from ..parts.exclusions import check_exclusions
from ..protocols.executors import ExecutorInfo
from ..protocols.media import Spans
from ..protocols.parts import PartSetup, StepPart
from ..registration.step_parts import KIND, active_parts, excluded_by
from ..registry import Plugins
from ..scheduling.parts.adapters import Adapters
from ..scheduling.parts.draft_widths import DraftWidths
from ..scheduling.parts.encoder_decoder import EncoderDecoder
from ..scheduling.parts.guarded_connector import GuardedConnector
from ..scheduling.parts.input_embeds import InputEmbeds
from ..scheduling.parts.kv_compression import CompressionRule, KVCompression
from ..scheduling.parts.kv_transfer import KVTransfer
from ..scheduling.parts.part import PartMaker, PartServices, SchedulerPart
from ..scheduling.parts.pipeline import Pipeline
from ..scheduling.parts.rounds import Rounds
from ..scheduling.parts.routed_experts import RoutedExperts
from ..scheduling.parts.speculation import Speculation
from ..scheduling.parts.states import States
from .other_engines import OtherEngines

LEVEL_INTERVAL = 256
"""Generated tokens between moves to other levels, unless an option says otherwise: few moves, and
few tokens that wait for one."""


def scheduler_parts(
    config: EngineConfig,
    info: ExecutorInfo,
    max_model_len: int,
    connector: GuardedConnector | None,
    plugins: Plugins,
    media_config: MediaConfig | None = None,
    engines: OtherEngines | None = None,
) -> list[PartMaker]:
    """Return the parts' makers in calling order. engines: with which this one has rounds. Raises
    ConfigError for an option without its part in the worker.
    """
    parts: list[PartMaker] = []
    if engines is not None:
        _check(config, info, rounds.NAME, "enable_expert_parallel", "joins no other engines")
        parts.append(Rounds.maker(info.steps_in_flight, engines.announce))
    if config.enable_lora:
        _check(config, info, adapters.NAME, "enable_lora", "serves no adapters")
        room, longest = adapters.adapter_room(config), config.lora_max_wait_steps
        parts.append(Adapters.maker(room, config.max_loras, longest))
    if connector is not None:
        parts.append(KVTransfer.maker(connector, config.kv_transfer_config))
    if info.num_stages > 1:
        parts.append(Pipeline.maker(info.num_stages))
    if config.speculative_config is not None:
        _check(config, info, speculation.NAME, "speculative_config", "verifies no drafts")
        parts.append(_speculation(config.speculative_config, max_model_len))
    if config.compresses_kv:
        option = "kv_compression" if config.kv_compression else "kv_compression_levels"
        _check(config, info, kv_compression.NAME, option, "does not compact caches")
        if all(group.reach is not None for group in info.cache_groups):
            raise ConfigError(
                f"{option}: all layers of this model have a sliding window or chunks, which "
                "bound its cache, so that there is nothing to compact",
                param=option,
            )
        rule = _compression_rule(config, info)
        parts.append(KVCompression.maker(rule, info.block_bytes))
    if info.num_snapshots and info.num_blocks:
        parts.append(States)
    if config.enable_return_routed_experts:
        _check(
            config, info, routed_experts.NAME, "enable_return_routed_experts", "reads no routers"
        )
        assert info.routed_experts is not None, "its part says what it keeps"
        parts.append(RoutedExperts.maker(info.routed_experts, info.num_blocks))
    if encoder_decoder.NAME in info.parts:
        parts.append(EncoderDecoder.maker(max_model_len))
    if media_config is not None or config.enable_prompt_embeds:
        if input_embeds.NAME not in info.parts:
            raise ConfigError(
                f"executor: {config.executor!r} takes no rows in the place of embeddings; serve "
                "text alone with language_model_only, and without enable_prompt_embeds",
                param="executor",
            )
        assert config.max_num_batched_tokens is not None
        spans = None if media_config is None else media_config.spans
        parts.append(
            InputEmbeds.maker(
                config.max_num_batched_tokens,
                whole_items=spans is not None,
                whole_prompts=spans is Spans.PROMPT,
            )
        )
    check_exclusions(active_capabilities(config), excluded_by(plugins, config))
    for name, (part_class, setup) in active_parts(plugins, config).items():
        if _has_scheduler_half(part_class):
            parts.append(_maker(plugins, name, part_class, setup))
    return parts


def _speculation(config: SpeculativeConfig, max_model_len: int) -> PartMaker:
    most = config.num_drafts
    choices = config.widths if config.adaptive_width else ()
    widths = DraftWidths(most, choices, schedule=config.schedule)
    return Speculation.maker(most, widths, max_model_len)


def _has_scheduler_half(part_class: type[StepPart]) -> bool:
    return part_class.scheduler_part.__func__ is not StepPart.scheduler_part.__func__  # type: ignore[attr-defined]


def _maker(plugins: Plugins, name: str, part_class: type[StepPart], setup: PartSetup) -> PartMaker:
    def make(services: PartServices) -> SchedulerPart:
        with plugins[KIND].calling(name, "scheduler_part"):
            part = part_class.scheduler_part(setup, services)
        if part.name != name:
            raise PluginError(
                f"{plugins[KIND].described(name)}: its scheduler half is named {part.name!r}"
            )
        return part

    return make


def _check(config: EngineConfig, info: ExecutorInfo, name: str, option: str, lack: str) -> None:
    if name not in info.parts:
        raise ConfigError(f"{option}: executor {config.executor!r} {lack}", param=option)


def _compression_rule(config: EngineConfig, info: ExecutorInfo) -> CompressionRule:
    levels, interval = config.cache_levels, config.kv_compression_interval
    return CompressionRule(
        levels=levels,
        formats=info.level_formats,
        ratio=config.kv_compression_ratio,
        budget=config.kv_compression_budget,
        interval=interval or (LEVEL_INTERVAL if levels else 0),
        prompt_interval=config.kv_compression_prompt_interval,
        on_pressure=config.kv_compression_on_pressure,
        threshold=config.kv_compression_threshold,
    )
