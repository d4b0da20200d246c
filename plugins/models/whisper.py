"""Whisper: an encoder of speech, and a decoder of BART's kind (arXiv 2212.04356)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
from ...core.nn.context import BuildContext
from ...core.parts.encoder_decoder import FeatureShape
from ...core.protocols.audio import SpeechTokens
from .decoder import QKV_SHARDS
from .encoder_decoder import Encoder, EncoderDecoder, EncoderDecoderLM, LearnedPositions

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
    filters: np.ndarray = np.minimum(-ramps[:-2] / widths[:-1], ramps[2:] / widths[1:])
    return np.maximum(0.0, filters)


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

    def read(self, source: torch.Tensor) -> torch.Tensor:
        """[sources, channels, frames] → what positions are added to"""
        encoder: Any = self.model.encoder
        out: torch.Tensor = encoder.read(source.to(encoder.conv1.weight.dtype))
        return out


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
    return SpeechTokens(
        start=generation.get("decoder_start_token_id", hf.decoder_start_token_id),
        end=generation.get("eos_token_id", hf.eos_token_id),
        no_timestamps=no_timestamps,
        first_time=no_timestamps + 1,
        seconds_per_time=SECONDS_PER_TIME,
        languages=names,
        transcribe=tasks.get("transcribe"),
        translate=tasks.get("translate"),
        # These two stand before it in each of Whisper's vocabularies.
        previous=generation.get("prev_sot_token_id", no_timestamps - 2),
        no_speech=no_timestamps - 1,
    )
