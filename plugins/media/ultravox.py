"""Ultravox: recordings read by Whisper's encoder, of whose rows several are a text part's one.

Sources: the published code of Ultravox 0.5 (its processor, stacking and projector).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import nn

from ...core.errors import ConfigError
from ...core.protocols.media import MediaSetup
from .family import Family
from .recordings import AudioEncoder, FeatureExtractor
from .whisper_like import conv_rows

FEATURES, FRAMES = "input_features", "frames"
"""Names of [windows, bands, frames] and of the number of true frames of each window."""
EPSILON = 1e-6
PLACEHOLDERS = ("<|audio|>", "<|reserved_special_token_0|>")
"""Of published checkpoints some have no embedding of the first, and some not even the token."""


class UltravoxFeatures(FeatureExtractor):
    """As many windows as the recording fills, of which a single one is not filled up."""

    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        self._window = 2 * setup.config.audio_config.max_source_positions

    def find_placeholder(self, setup: MediaSetup) -> int:
        config = setup.config
        named = [] if setup.tokenize is None else map(setup.tokenize, PLACEHOLDERS)
        for own in (*named, [config.audio_token_index]):
            if len(own) == 1 and own[0] is not None and own[0] < config.text_config.vocab_size:
                return int(own[0])
        raise ConfigError(
            f"model: its tokenizer has none of {', '.join(PLACEHOLDERS)} in the vocabulary of "
            f"{config.text_config.vocab_size}, of which one would stand for a recording",
            param="model",
        )

    def tensors(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        hop = self.extractor.hop_length
        out = self.extractor(
            np.pad(samples, (0, max(0, 2 * hop - len(samples)))),
            sampling_rate=self.sampling_rate, padding="longest", pad_to_multiple_of=hop,
            truncation=False, return_attention_mask=True, return_tensors="np",
        )  # fmt: skip
        [features], total = np.asarray(out[FEATURES]), int(np.sum(out["attention_mask"]))
        starts = range(0, total, self._window)
        if len(starts) > 1:
            filled = len(starts) * self._window
            features = np.pad(features[:, :total], ((0, 0), (0, filled - total)))
        windows = np.stack(np.split(features, len(starts), axis=1))
        return {FEATURES: windows, FRAMES: np.minimum(total - np.array(starts), self._window)}

    def count(self, tensors: Mapping[str, np.ndarray]) -> int:
        stacked = self.config.stack_factor
        return sum(-(-conv_rows(int(frames)) // stacked) for frames in tensors[FRAMES])


class Projector(nn.Module):
    """Joins rows that follow each other, and makes one of the text part's of them."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self._stacked = config.stack_factor
        width = config.audio_config.d_model * self._stacked
        middle, out = config.hidden_size // 2, config.text_config.hidden_size
        self.ln_pre = nn.RMSNorm(width, EPSILON)
        self.linear_1 = nn.Linear(width, 2 * middle, bias=False)
        self.linear_2 = nn.Linear(middle, out, bias=False)
        if config.projector_ln_mid:
            self.ln_mid = nn.RMSNorm(middle, EPSILON)
        else:
            self.ln_post = nn.RMSNorm(out, EPSILON)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """[windows, rows, width] → [windows, rows / stack_factor (up), hidden size]"""
        rows = F.pad(rows, (0, 0, 0, -rows.shape[1] % self._stacked))
        stacks = rows.reshape(len(rows), -1, rows.shape[2] * self._stacked)
        values, gate = self.linear_1(self.ln_pre(stacks)).chunk(2, dim=-1)
        hidden = F.silu(gate) * values
        if hasattr(self, "ln_mid"):
            out: torch.Tensor = self.linear_2(self.ln_mid(hidden))
            return out
        out = self.ln_post(self.linear_2(hidden))
        return out


class UltravoxParts(nn.Module):
    """What reads recordings, under the names that checkpoints have."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        self.audio_tower = WhisperEncoder(config.audio_config)
        self.multi_modal_projector = Projector(config)

    def forward(self, features: torch.Tensor, frames: int) -> torch.Tensor:
        """[1, bands, frames], of which so many are true → [1, rows, hidden size]; theirs takes
        windows of one length alone."""
        tower = self.audio_tower
        rows = F.gelu(tower.conv2(F.gelu(tower.conv1(features)))).transpose(1, 2)
        count = rows.shape[1]
        states = rows + tower.embed_positions.weight[:count]
        mask = states.new_zeros(1, 1, count, count)
        mask[..., conv_rows(frames) :] = torch.finfo(mask.dtype).min
        for layer in tower.layers:
            out = layer(states, mask)
            states = out[0] if isinstance(out, tuple) else out
        projected: torch.Tensor = self.multi_modal_projector(tower.layer_norm(states))
        return projected


class UltravoxEncoder(AudioEncoder):
    def encode_one(self, item: Mapping[str, torch.Tensor]) -> torch.Tensor:
        stacked = self.hf.multi_modal_projector._stacked
        parts = [
            self.hf(window[None], frames)[0, : -(-conv_rows(frames) // stacked)]
            for window, frames in zip(item[FEATURES], item[FRAMES].tolist(), strict=True)
        ]
        return torch.cat(parts)

    @classmethod
    def create(cls, config: Any, dtype: torch.dtype) -> Any:
        return UltravoxParts(config).to(dtype)


class Ultravox(Family):
    modalities = ("audio",)
    processors = {"audio": UltravoxFeatures}
    encoder_class = UltravoxEncoder

    @classmethod
    def refusal(cls, setup: MediaSetup) -> str | None:
        config = setup.config
        if config.audio_config.model_type != "whisper":
            return f"its encoder is of type {config.audio_config.model_type}, and not Whisper's"
        if config.projector_act != "swiglu":
            return f"projector_act is {config.projector_act!r}, and not 'swiglu'"
        for name in ("num_projector_layers", "audio_latency_block_size"):
            if getattr(config, name, None):
                return f"{name} is {getattr(config, name)!r}, and only 0 is served"
        return None
