"""Phi-4-multimodal: a picture in tiles, on white where its shape is another, then the whole; and
recordings, of which a conformer makes a row per 80 ms."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import torch.nn.functional as F

from ...core.protocols.audio import SpeechChat
from ...core.protocols.media import MediaSetup, ProcessedMedia
from .encoder import TransformersEncoder
from .family import Family
from .pillow import PillowImages, PillowProcessor, closest_grid, cut, grids
from .processor import NORMALISATION
from .recordings import FeatureExtractor

if TYPE_CHECKING:
    from PIL.Image import Image

LEAST = 10
"""Pixels that a side must have on the canvas."""
MASK = "mask"
"""Name of what says which patches of the canvas are the picture's, [rows, columns]."""


COUNT = "count"
"""Name of the number of a picture's rows."""


class Phi4MultimodalImages(PillowImages):
    defaults = {"size": {"height": 448, "width": 448}, "patch_size": 14, "dynamic_hd": 36}

    def tensors(self, image: Image) -> dict[str, Any]:
        """Raises ValueError for a picture that would be too narrow."""
        side, patch = self.options["size"]["height"], self.options["patch_size"]
        columns, rows = self._grid(image)
        canvas = np.full((rows * side, columns * side, 3), 255, dtype=np.uint8)
        by_width, by_height = canvas.shape[1] / image.width, canvas.shape[0] / image.height
        if by_width < by_height:
            height, width = int(image.height * by_width), canvas.shape[1]
        else:
            height, width = canvas.shape[0], int(image.width * by_height)
        if min(height, width) < LEAST:
            raise ValueError(f"is too narrow: {image.width} x {image.height} pixels")
        canvas[:height, :width] = self.resized(image, height, width)
        mask = np.zeros((rows * (side // patch), columns * (side // patch)), dtype=np.bool_)
        empty = [
            (whole - own) // patch
            for whole, own in zip(canvas.shape[:2], (height, width), strict=True)
        ]
        mask[: mask.shape[0] - empty[0], : mask.shape[1] - empty[1]] = True
        return {"pixel_values": cut(canvas, side).transpose(0, 3, 1, 2), MASK: mask}

    def _grid(self, image: Image) -> tuple[int, int]:
        side, most = self.options["size"]["height"], self.options["dynamic_hd"]
        columns, rows = (math.ceil(own / side) for own in image.size)
        if columns * rows <= most:
            return columns, rows
        return closest_grid(grids(1, most), *image.size, side)


class Phi4MultimodalProcessor(PillowProcessor):
    images_class = Phi4MultimodalImages

    def find_placeholder(self, setup: MediaSetup) -> int:
        return int(setup.config.vision_config.image_token_id)

    def processed(self, tensors: Mapping[str, np.ndarray]) -> ProcessedMedia:
        vision = self.config.vision_config
        whole = math.ceil(vision.image_size / vision.patch_size / 2)
        rows, columns = (int(tensors[MASK][::2, ::2].any(axis).sum()) for axis in (1, 0))
        # Each line ends with a row of its own, and one is between the tiles and the whole.
        count = rows * (columns + 1) + 1 + whole * (whole + 1)
        return ProcessedMedia({**tensors, COUNT: np.array(count)}, self.repeated(count))


FEATURES = "audio_input_features"
"""Name of a recording's mel bands, [1, frames, bands]."""


class Phi4MultimodalFeatures(FeatureExtractor):
    def load(self, setup: MediaSetup) -> Any:
        from transformers import Phi4MultimodalFeatureExtractor

        create: Any = Phi4MultimodalFeatureExtractor.from_pretrained  # Untyped.
        return create(setup.folder)

    def find_placeholder(self, setup: MediaSetup) -> int:
        return int(setup.config.audio_config.audio_token_id)

    def tensors(self, samples: np.ndarray) -> dict[str, np.ndarray]:
        """Raises ValueError for a recording that is shorter than a frame."""
        if len(samples) < self.extractor.win_length:
            raise ValueError("it is too short")
        return {FEATURES: self.extracted(samples)[FEATURES]}

    def count(self, tensors: Mapping[str, np.ndarray]) -> int:
        frames_per_row: int = self.config.audio_config.time_reduction
        frames: int = tensors[FEATURES].shape[1]
        return -(-frames // frames_per_row)

    def arranged(self, token_ids: Sequence[int]) -> list[int]:
        """Raises ValueError for pictures beside recordings, which would project these otherwise."""
        if {self.placeholder_id, self.config.vision_config.image_token_id} <= set(token_ids):
            raise ValueError("this model takes pictures or recordings in a prompt, and not both")
        return list(token_ids)


class Phi4MultimodalEncoder(TransformersEncoder):
    text_modules = ("embed_tokens", "embed_dropout", "layers", "norm", "rotary_emb")
    original_names = (
        (r"\.img_projection\.0\.", ".img_projection_up."),
        (r"\.img_projection\.2\.", ".img_projection_down."),
        (r"\.glb_GN$", ".global_img_feature_extensor"),
        (r"\.sub_GN$", ".sub_img_feature_extensor"),
        (r"\.audio_projection\.speech\.0\.", ".up_proj_for_speech."),
        (r"\.audio_projection\.speech\.2\.", ".down_proj_for_speech."),
        (r"\.net\.0\.linear\.", ".gate_up_proj."), (r"\.net\.2\.", ".down_proj."),
        (r"\.self_attn\.linear_(q|k|v)\.", r".self_attn.\1_proj."),
        (r"\.self_attn\.linear_out\.", ".self_attn.o_proj."),
    )  # fmt: skip

    @classmethod
    def create(cls, config: Any, dtype: torch.dtype) -> Any:
        whole = super().create(config, dtype)
        audio = whole.embed_tokens_extend.audio_embed
        del audio.up_proj_for_vision_speech, audio.down_proj_for_vision_speech
        return whole

    def prepared(self, item: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return the whole and the tiles, with their masks, and the canvas's size; of a recording
        what there is."""
        if FEATURES in item:
            return super().prepared(item)
        factor, mean, deviation = item[NORMALISATION].view(3, 3, 1, 1)
        tiles = (item["pixel_values"].float() * factor - mean) / deviation
        side, mask = tiles.shape[-1], item[MASK]
        patches = side // self.hf.config.vision_config.patch_size
        rows, columns = (size // patches for size in mask.shape)
        canvas = tiles.view(rows, columns, 3, side, side).permute(2, 0, 3, 1, 4)
        canvas = canvas.reshape(1, 3, rows * side, columns * side)
        # As theirs, without smoothing.
        whole = F.interpolate(canvas, (side, side), mode="bicubic")
        masks = mask.view(rows, patches, columns, patches).transpose(1, 2)
        masks = torch.cat([masks.new_ones(1, patches, patches), masks.flatten(0, 1)])
        return {
            "image_pixel_values": torch.cat([whole, tiles])[None].to(self.dtype),
            "image_attention_mask": masks[None],
            "image_sizes": torch.tensor([canvas.shape[2:]], device=masks.device),
            COUNT: item[COUNT],
        }

    def encode_together(
        self, items: Sequence[Mapping[str, torch.Tensor]]
    ) -> Sequence[torch.Tensor]:
        if FEATURES in items[0]:
            return list(self._heard(torch.cat([item[FEATURES] for item in items])))
        return [self._rows(item) for item in items]

    def _heard(self, features: torch.Tensor) -> torch.Tensor:
        """Return the rows of recordings of one length."""
        audio = self.hf.embed_tokens_extend.audio_embed
        states = F.gelu(audio.up_proj_for_speech(audio.encoder(features, None)))
        rows: torch.Tensor = audio.down_proj_for_speech(states)
        return rows

    def _rows(self, item: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return a picture's rows: the module puts them in the place of embeddings."""
        count, config, device = int(item[COUNT]), self.hf.config, item[COUNT].device
        tokens = torch.full((1, count), config.vision_config.image_token_id, device=device)
        embeds = torch.zeros((1, count, config.hidden_size), dtype=self.dtype, device=device)
        tensors = {name: tensor for name, tensor in item.items() if name != COUNT}
        rows: torch.Tensor
        [rows] = self.hf.embed_tokens_extend.image_embed(tokens, embeds, **tensors)
        return rows


class Phi4Multimodal(Family):
    modalities = ("image", "audio")
    processors = {"image": Phi4MultimodalProcessor, "audio": Phi4MultimodalFeatures}
    encoder_class = Phi4MultimodalEncoder
    speech_chat = SpeechChat("Transcribe the audio clip into text.")
