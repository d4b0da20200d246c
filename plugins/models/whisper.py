"""Whisper: an encoder of speech, and a decoder of BART's kind (arXiv 2212.04356)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ...core.errors import ConfigError
from ...core.loading.model_config import ModelConfig
from ...core.loading.weight_map import Shard, WeightMap
from ...core.nn.context import BuildContext, EncodeContext
from ...core.nn.ragged import RaggedRows
from ...core.nn.sdpa import sdpa
from ...core.parts.encoder_decoder import FeatureShape
from ...core.protocols.audio import SpeechTokens
from .decoder import QKV_SHARDS
from .encoder_decoder import Encoder, EncoderDecoder, EncoderDecoderLM, LearnedPositions
from .timestamp_rules import TIMESTAMP_RULES

SAMPLING_RATE, HOP, WINDOW = 16_000, 160, 400
"""Samples: per second, between frames, in a frame."""
SECONDS_PER_TIME = 0.02
WIDTH = 3
"""Frames that a convolution reads."""


@dataclass(frozen=True)
class LogMel:
    """Audio as the logarithms of energies in mel bands. Source: Whisper's published code."""

    shape: FeatureShape
    speech: SpeechTokens | None
    sampling_rate: int = SAMPLING_RATE

    @property
    def max_samples(self) -> int:
        return self.shape.frames * HOP

    def features(self, samples: np.ndarray) -> np.ndarray:
        """Pad with silence, and return [channels, frames]."""
        padded = np.zeros(self.max_samples, dtype=np.float32)
        padded[: len(samples)] = samples
        window = torch.hann_window(WINDOW)
        spectrum = torch.stft(
            torch.from_numpy(padded), WINDOW, HOP, window=window, return_complex=True
        )
        energies = spectrum[:, :-1].abs().square()
        mel = (mel_filters(self.shape.channels) @ energies).clamp(min=1e-10).log10()
        mel = mel.maximum(mel.max() - 8.0)
        return ((mel + 4.0) / 4.0).numpy()


@cache
def mel_filters(bands: int) -> torch.Tensor:
    """Return triangular filters of equal area on Slaney's mel scale: [bands, WINDOW // 2 + 1]."""
    linear_end, step, log_step = 1000.0, 200.0 / 3, np.log(6.4) / 27  # Linear below, then log.
    first_log = linear_end / step
    top = first_log + np.log(SAMPLING_RATE / 2 / linear_end) / log_step
    mels = np.linspace(0.0, top, bands + 2)
    edges = np.where(
        mels < first_log, mels * step, linear_end * np.exp(log_step * (mels - first_log))
    )
    filters = triangles(edges, np.linspace(0.0, SAMPLING_RATE / 2, WINDOW // 2 + 1))
    filters *= 2.0 / (edges[2:] - edges[:-2])[:, None]
    return torch.from_numpy(filters.astype(np.float32))


def triangles(edges: np.ndarray, bins: np.ndarray) -> np.ndarray:
    """Return filters that rise from an edge to the next, and fall to the one after it: [number of
    edges - 2, bins]."""
    ramps = edges[:, None] - bins[None, :]
    widths = np.diff(edges)[:, None]
    rising, falling = -ramps[:-2] / widths[:-1], ramps[2:] / widths[1:]
    filters: np.ndarray = np.maximum(0.0, np.minimum(rising, falling))
    return filters


class DecoderPositions(LearnedPositions):
    length = "max_target_positions"


class WhisperEncoder(Encoder):
    """Two convolutions in the place of embeddings."""

    def __init__(
        self, owner: type[EncoderDecoderLM], hf: Any, layers: int, build: BuildContext
    ) -> None:
        super().__init__(owner, hf, layers, build)
        self.embed_positions = SourcePositions(hf, build)
        self.conv1 = Convolution(hf.num_mel_bins, hf.d_model, build)
        self.conv2 = Convolution(hf.d_model, hf.d_model, build)

    def read(self, features: torch.Tensor) -> torch.Tensor:
        """[sources, channels, frames] → [sources * frames / 2, hidden_size]"""
        hidden: torch.Tensor = self.conv2(self.conv1(features), stride=2)
        return hidden.transpose(1, 2).flatten(0, 1)


class SourcePositions(LearnedPositions):
    length = "max_source_positions"


class Convolution(nn.Module):
    def __init__(self, channels: int, size: int, build: BuildContext) -> None:
        super().__init__()
        self.weight = nn.Parameter(build.empty(size, channels, WIDTH))
        self.bias = nn.Parameter(build.empty(size))

    def forward(self, x: torch.Tensor, stride: int = 1) -> torch.Tensor:
        """[sources, channels, frames] → [sources, size, frames / stride]"""
        return F.gelu(F.conv1d(x, self.weight, self.bias, stride=stride, padding=WIDTH // 2))


class WhisperModel(EncoderDecoder):
    encoder_class = WhisperEncoder

    def __init__(self, owner: type[EncoderDecoderLM], hf: Any, build: BuildContext) -> None:
        super().__init__(owner, hf, build)
        # Configurations have `scale_embedding`, which published code does not read.
        self.encoder.scale = self.decoder.scale = None


class WhisperMap(WeightMap):
    """Keys have no bias in checkpoints, and one of zeros here, beside queries' and values'."""

    def pieces(
        self, name: str, tensor: torch.Tensor
    ) -> Iterator[tuple[str, str | None, torch.Tensor]]:
        yield from super().pieces(name, tensor)
        if name.endswith("k_proj.weight"):
            bias = f"{name.removesuffix('weight')}bias"
            yield from super().pieces(bias, tensor.new_zeros(len(tensor)))


class WhisperForConditionalGeneration(EncoderDecoderLM):
    """Norms first; keys without biases; positions of both halves are in the checkpoint."""

    norm_first = True
    norms_embeddings = False
    positions = DecoderPositions
    model_class: ClassVar[type[EncoderDecoder]] = WhisperModel
    weight_map = WhisperMap(
        stacked={
            **QKV_SHARDS, "source_k": Shard("kv_proj", "k"), "source_v": Shard("kv_proj", "v"),
        },
        prefixes={"proj_out.": "model.shared.", "model.decoder.embed_tokens.": "model.shared."},
        parts=EncoderDecoderLM.weight_map.parts,
        names=EncoderDecoderLM.weight_map.names,
        zeros=("model.shared.bias",),
    )  # fmt: skip

    def __init__(self, config: ModelConfig, build: BuildContext) -> None:
        super().__init__(config, build)
        self.source_shape = feature_shape(config.hf_config)

    @classmethod
    def check(cls, hf: Any) -> None:
        super().check(hf)
        feature_shape(hf)

    @classmethod
    def context_length(cls, hf_config: Any) -> int:
        """Return the most tokens of the decoder."""
        return int(hf_config.max_target_positions)

    @classmethod
    def audio_source(cls, config: ModelConfig, generation: Mapping[str, Any]) -> LogMel:
        """Return the spectrogram that the checkpoint was trained with."""
        return LogMel(feature_shape(config.hf_config), speech_tokens(config, generation))

    def source_weights(
        self, source: torch.Tensor, token_ids: torch.Tensor, heads: Sequence[tuple[int, int]]
    ) -> torch.Tensor:
        """Return how heads (layer, head) attend to a source [1, channels, frames] while they read
        tokens: [heads, tokens, rows] float32. Computed beside the caches, on one rank."""
        model: Any = self.model
        encoder, decoder = model.encoder, model.decoder
        rows = encoder.embed_positions.weight.shape[0]
        positions = torch.arange(rows, device=source.device)
        ragged = RaggedRows.of(np.asarray([0, rows], dtype=np.int32), source.device)
        context = EncodeContext(positions, ragged, positions)
        states = encoder.normed(encoder(self.read(source), context))
        places = torch.arange(len(token_ids), device=source.device)
        hidden = decoder.add_positions(model.shared(token_ids), decoder.embed_positions(places))
        weights: dict[int, torch.Tensor] = {}
        for number, layer in enumerate(decoder.layers):
            own, norm = layer.self_attn, layer.self_attn_layer_norm
            query, key, value = _heads(own.qkv_proj(hidden, norm=norm), 3, own.head_dim)
            read = sdpa(query, key, value, is_causal=True)
            hidden = own.project(hidden, read.transpose(0, 1).flatten(1))
            cross, norm = layer.encoder_attn, layer.encoder_attn_layer_norm
            [query] = _heads(cross.query(hidden, norm=norm), 1, cross.head_dim)
            key, value = _heads(cross.kv_proj(states), 2, cross.head_dim)
            scores = (query @ key.transpose(1, 2)).float() * cross.head_dim**-0.5
            weights[number] = scores.softmax(dim=-1)
            read = weights[number].to(value.dtype) @ value
            hidden = cross.project(hidden, read.transpose(0, 1).flatten(1))
            hidden = layer.add(hidden, layer.mlp, layer.final_layer_norm)
        return torch.stack([weights[layer][head] for layer, head in heads])

    def read(self, source: torch.Tensor) -> torch.Tensor:
        """[sources, channels, frames] → what positions are added to"""
        encoder: Any = self.model.encoder
        out: torch.Tensor = encoder.read(source.to(encoder.conv1.weight.dtype))
        return out


def _heads(merged: torch.Tensor, count: int, head_dim: int) -> tuple[torch.Tensor, ...]:
    """[tokens, count * heads * head_dim] → so many of [heads, tokens, head_dim]"""
    parts = merged.view(len(merged), count, -1, head_dim).permute(1, 2, 0, 3)
    return parts.unbind(0)


def feature_shape(hf: Any) -> FeatureShape:
    """Return the size of a source. Raises ConfigError."""
    rows = hf.max_source_positions
    for name, value in (("max_source_positions", rows), ("num_mel_bins", hf.num_mel_bins)):
        if not 0 < value < 1 << 16:
            raise ConfigError(f"{name}: {value} is no size of a source", param=name)
    return FeatureShape(hf.num_mel_bins, 2 * rows, rows)


def speech_tokens(config: ModelConfig, generation: Mapping[str, Any]) -> SpeechTokens | None:
    """Return the special tokens that generation_config.json names; None: it names none."""
    hf, no_timestamps = config.hf_config, generation.get("no_timestamps_token_id")
    if not isinstance(no_timestamps, int) or no_timestamps < 2:
        return None
    names = {name.strip("<|>"): token for name, token in generation.get("lang_to_id", {}).items()}
    tasks = generation.get("task_to_id", {})
    end = generation.get("eos_token_id", hf.eos_token_id)
    rules = {
        "no_timestamps": no_timestamps, "end": end,
        "max_initial": generation.get("max_initial_timestamp_index"),
    }  # fmt: skip
    return SpeechTokens(
        start=generation.get("decoder_start_token_id", hf.decoder_start_token_id),
        end=end,
        no_timestamps=no_timestamps,
        first_time=no_timestamps + 1,
        seconds_per_time=SECONDS_PER_TIME,
        languages=names,
        transcribe=tasks.get("transcribe"),
        translate=tasks.get("translate"),
        # These two stand before it in each of Whisper's vocabularies.
        previous=generation.get("prev_sot_token_id", no_timestamps - 2),
        no_speech=no_timestamps - 1,
        alignment_heads=_alignment_heads(hf, generation.get("alignment_heads")),
        median_width=int(getattr(hf, "median_filter_width", 7)),
        extra_args={TIMESTAMP_RULES: rules},
    )


def _alignment_heads(hf: Any, given: Any) -> tuple[tuple[int, int], ...]:
    """Return the pairs that generation_config.json names, without any that are not there."""
    pairs = given if isinstance(given, list) else []
    return tuple(
        (pair[0], pair[1])
        for pair in pairs
        if isinstance(pair, list)
        and len(pair) == 2
        and all(type(number) is int and number >= 0 for number in pair)
        and pair[0] < hf.decoder_layers
        and pair[1] < hf.decoder_attention_heads
    )
