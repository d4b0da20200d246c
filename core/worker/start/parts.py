"""Selects a worker's parts, by model and configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from ...config.compatibility import active_capabilities
from ...parts import encoder_decoder, input_embeds, kv_compression, speculation, states
from ...parts.exclusions import KV_LEVELS, check_exclusions
from ...protocols.attention import PagedBackend
from ...registration.step_parts import KIND, active_parts, excluded_by
from ..parts.adapters import AdaptersStart
from ..parts.encoder_decoder import EncoderDecoderStart, source_attention
from ..parts.input_embeds import InputEmbedsStart
from ..parts.kv_compression import KVCompressionStart, level_refusal
from ..parts.kv_compression import backend_refusal as compression_refusal
from ..parts.kv_transfer import KVTransferStart
from ..parts.part import PartStart, StartContext
from ..parts.pipeline import PipelineStart
from ..parts.rounds import RoundsStart
from ..parts.routed_experts import RoutedExpertsStart
from ..parts.speculation import SpeculationStart
from ..parts.speculation import backend_refusal as speculation_refusal
from ..parts.states import StatesStart, check_state_options, state_layers

BACKEND_REFUSALS: Mapping[str, Callable[[type[PagedBackend]], str | None]] = {
    speculation.NAME: speculation_refusal,
    kv_compression.NAME: compression_refusal,
    KV_LEVELS: level_refusal,
}
"""Part or mode → reason against an attention backend, or None."""


def start_parts(start: StartContext, notify: Callable[[], None]) -> list[PartStart]:
    """Begin the parts in calling order. Raises ConfigError for incompatible options. notify: KV
    transfers have a report; from any thread.
    """
    config = start.config
    brought = {
        states.NAME: bool(state_layers(start.model)),
        encoder_decoder.NAME: bool(source_attention(start.model)),
        input_embeds.NAME: start.model_config.media is not None or config.enable_prompt_embeds,
    }
    by_model = [name for name, has in brought.items() if has]
    check_exclusions([*active_capabilities(config), *by_model], excluded_by(start.plugins, config))
    parts: list[PartStart] = []
    if brought[states.NAME]:
        parts.append(StatesStart(start))
    else:
        check_state_options(config)
    speculation_start = None
    if config.speculative_config is not None:
        speculation_start = SpeculationStart(start)
    if config.compresses_kv:
        drafting = () if speculation_start is None else speculation_start.layers
        parts.append(KVCompressionStart(start, drafting))
    if brought[encoder_decoder.NAME]:
        parts.append(EncoderDecoderStart(start))
    if brought[input_embeds.NAME]:
        parts.append(InputEmbedsStart(start))
    if speculation_start is not None:
        parts.append(speculation_start)
    if config.enable_return_routed_experts:
        parts.append(RoutedExpertsStart(start))
    if start.ranks.round is not None:
        parts.append(RoundsStart(start))
    if start.ranks.pipeline.size > 1:
        parts.append(PipelineStart(start))
    if config.enable_lora:
        parts.append(AdaptersStart(start))
    for name, (part_class, setup) in active_parts(start.plugins, config).items():
        with start.plugins[KIND].calling(name, "worker_part"):
            part = part_class.worker_part(setup, start)
        if part is not None:
            parts.append(part)
    if config.kv_transfer_config is not None:
        # Last: what it reports is gone once it was read, so no report that fails may follow.
        parts.append(KVTransferStart(start, notify))
    return parts
