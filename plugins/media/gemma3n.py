"""Gemma 3n: recordings, read by a conformer (USM, arXiv 2303.01037). Its pictures take `timm`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np
import torch

from ...core.protocols.audio import SpeechChat
from ...core.protocols.media import MediaProcessor, MediaSetup
from .chunked_audio import LANGUAGES
from .family import Family
from .gemma4 import Gemma4Features
from .recordings import AudioEncoder

PROMPT = "<start_of_turn>user\n{}: <audio_soft_token><end_of_turn>\n<start_of_turn>model\n"


class Gemma3nFeatures(Gemma4Features):
    """The same number of rows, whatever the length; the mark behind them has a row, too, as its
    embedding is not the text part's."""

    around = ("\n\n", "\n\n")

    def count(self, tensors: Mapping[str, np.ndarray]) -> int:
        return int(self.config.audio_soft_tokens_per_image)

    def written(self, count: int) -> tuple[list[int], list[bool]]:
        begin, end = self.config.boa_token_id, self.config.eoa_token_id
        return [begin, *[self.placeholder_id] * count, end], [False, *[True] * (count + 1)]


class Gemma3nEncoder(AudioEncoder):
    @classmethod
    def create(cls, config: Any, dtype: torch.dtype) -> Any:
        from transformers.models.gemma3n import modeling_gemma3n as gemma

        class Ears(gemma.Gemma3nPreTrainedModel):  # type: ignore[no-untyped-call]
            """The parts that read recordings, without those that take other packages."""

            def __init__(self) -> None:
                super().__init__(config)
                self.audio_tower = gemma.Gemma3nAudioEncoder(config.audio_config)
                self.embed_audio = gemma.Gemma3nMultimodalEmbedder(
                    config.audio_config, config.text_config
                )

        return Ears()

    def encode_one(self, item: Mapping[str, torch.Tensor]) -> torch.Tensor:
        config, embed = self.hf.config, self.hf.embed_audio
        features = item["input_features"]
        output = self.hf.audio_tower(features, ~item[self.mask_name].bool(), return_dict=True)
        [rows] = embed(inputs_embeds=output.last_hidden_state)
        marks = torch.tensor(
            [config.text_config.vocab_size - 1, config.eoa_token_id], device=features.device
        )
        silence, end = embed(input_ids=marks)
        rows = torch.where(output.audio_mel_mask[0][:, None], silence, rows)
        missing = silence.expand(config.audio_soft_tokens_per_image - len(rows), -1)
        return torch.cat([rows, missing, end[None]])

    mask_name: ClassVar[str] = Gemma3nFeatures.mask_name


class Gemma3n(Family):
    modalities = ("audio",)
    processors: ClassVar[Mapping[str, Callable[[MediaSetup], MediaProcessor]]] = {
        "audio": Gemma3nFeatures
    }
    encoder_class = Gemma3nEncoder
    speech_chat = SpeechChat(
        prompt=PROMPT.format("Transcribe this audio{}"),
        translation=PROMPT.format("Translate this audio into English"),
        language=" into {}", languages=LANGUAGES,
    )  # fmt: skip
