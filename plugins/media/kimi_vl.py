"""Kimi-VL: Kimi K2.5's tower, under other names."""

from __future__ import annotations

from ...core.protocols.media import MediaSetup
from .family import Pictures
from .kimi_k25 import KimiK25Encoder, KimiK25Images, KimiK25Processor

MOST = 512
"""Patches of a side for which there are positions."""


class KimiVLImages(KimiK25Images):
    defaults = {
        "in_token_limit": 4096, "patch_size": 14, "merge_kernel_size": [2, 2], "resample": 3,
    }  # fmt: skip

    def __init__(self, setup: MediaSetup) -> None:
        super().__init__(setup)
        self.options |= {
            "max_patches": self.options["in_token_limit"],
            "merge_size": self.options["merge_kernel_size"][0],
            "size": {"max_height": MOST, "max_width": MOST},
        }


class KimiVLProcessor(KimiK25Processor):
    images_class = KimiVLImages


class KimiVLEncoder(KimiK25Encoder):
    original_names = (
        *KimiK25Encoder.original_names,
        (r"^multi_modal_projector\.linear_1\.", "mm_projector.in_proj."),
        (r"^multi_modal_projector\.linear_2\.", "mm_projector.out_proj."),
        (r"^multi_modal_projector\.", "mm_projector."),
    )


class KimiVL(Pictures):
    processor_class = KimiVLProcessor
    encoder_class = KimiVLEncoder
