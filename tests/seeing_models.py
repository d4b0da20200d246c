"""Tiny random checkpoints of multimodal families, with tokenizer and image processor."""

from __future__ import annotations

import copy
import importlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.image_processing_auto import AutoImageProcessor

TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8, "initializer_range": 0.2,
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}PICTURE"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Family(NamedTuple):
    """How a family's checkpoint is made."""

    config: dict[str, Any]
    """Arguments of its configuration."""
    processor: str
    """Image processor of `transformers`."""
    options: dict[str, Any]
    specials: tuple[str, ...]
    """Special tokens: ids from 300 on."""
    written: str
    """What a prompt has for a picture."""
    reference: Callable[[Path], Any]
    """Folder → the processor of `transformers`."""
    names: Mapping[str, str] = {}
    """Names by which the tokenizer knows special tokens."""


def own(name: str, **options: Any) -> Callable[[Path], Any]:
    """Return what `Family.reference` is, of a processor of `transformers` that can be made here."""
    return lambda folder: getattr(transformers, name)(*parts_of(folder), **options)


def parts_of(folder: Path) -> tuple[Any, Any]:
    """Return the image processor and the tokenizer there."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    return AutoImageProcessor.from_pretrained(folder, backend="pil"), tokenizer


class Pixtral:
    """What `PixtralProcessor` writes, whose module needs torchvision: a token after each line of
    units."""

    @staticmethod
    def replace_image_token(own: Any, data: Any, number: int) -> str:
        height, width = (int(size) // 16 for size in data["image_sizes"][number])
        lines = ["[IMG]" * width] * height
        return "[IMG_BREAK]".join(lines) + "[IMG_END]"


class Gemma3:
    """What `Gemma3Processor` writes, which takes the classes of Gemma's own tokenizers."""

    @staticmethod
    def replace_image_token(own: Any, data: Any, number: int) -> str:
        return f"\n\n<start_of_image>{'<image_soft_token>' * 16}<end_of_image>\n\n"


def by_replacing(
    kind: str, module: str, given: dict[str, Any] | None = None, **attributes: Any
) -> Callable[[Path], Any]:
    """Return what `Family.reference` is, of a processor of `transformers` that cannot be made here
    (it would process video, too): what it writes for each picture, in the text."""

    def reference(folder: Path) -> Any:
        images, tokenizer = parts_of(folder)
        ids = tokenizer.convert_tokens_to_ids
        own = SimpleNamespace(image_processor=images, tokenizer=tokenizer, **attributes)
        processor: Any = {"Pixtral": Pixtral, "Gemma3": Gemma3}.get(kind)
        if module:
            processor = getattr(
                importlib.import_module(f"transformers.models.{module}.processing_{module}"), kind
            )
        for name in ("_get_number_of_features", "_get_unpadded_features"):
            if hasattr(processor, name):
                setattr(own, name, MethodType(getattr(processor, name), own))

        soft = attributes.get("soft_token", attributes["image_token"])

        def process(images: Any, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
            if not images:
                return dict(tokenizer(text, return_tensors="pt", add_special_tokens=False))
            data = own.image_processor(images=images, return_tensors="pt", **(given or {}))
            first, *others = text.split(attributes["image_token"])
            for number, words in enumerate(others):
                first += processor.replace_image_token(own, data, number) + words
            inputs = tokenizer(first, return_tensors="pt", add_special_tokens=False)
            tokens = inputs["input_ids"]
            kinds = (tokens == ids(soft)).int()
            kept = {name: value for name, value in data.items() if name not in UNUSED}
            turns = "image_grid_thw" in kept and kind not in PLAIN_POSITIONS
            if turns or "image_position_ids" in kept:
                kept["mm_token_type_ids"] = kinds
            if kind == "Gemma3":
                kept["token_type_ids"] = kinds
            return {**inputs, **kept}

        return process

    return reference


def by_ours(folder: Path) -> Any:
    """What a prompt has by our processor, with pixels as the image processor would normalise them:
    that of `transformers` takes torchvision. Other tests compare the two."""
    from jackfield.core.protocols.media import MediaSetup
    from jackfield.core.registry import load_plugins
    from jackfield.plugins.media.processor import NORMALISATION

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder)

    def tokenize(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    kind: Any = load_plugins()["media_model"].load(config.architectures[0])
    ours = kind.processor(MediaSetup(folder, config, tokenize=tokenize), "image")

    def process(images: Any, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        first, *others = text.split(tokenizer.decode([ours.placeholder_id]))
        tokens, made = tokenize(first), []
        for image, words in zip(images or (), others, strict=True):
            item = ours.image(image)
            tensors = {name: torch.from_numpy(value) for name, value in item.tensors.items()}
            factor, mean, deviation = tensors.pop(NORMALISATION)
            pixels = tensors["pixel_values"]
            last = pixels.movedim(1, -1) if pixels.dim() == 4 else pixels.unflatten(-1, (-1, 3))
            last = (last * factor - mean) / deviation
            first = last.movedim(-1, 1) if pixels.dim() == 4 else last.flatten(-2)
            tensors["pixel_values"] = first
            made.append(tensors)
            tokens += [*item.token_ids, *tokenize(words)]
        ids = torch.tensor([tokens])
        return {
            "input_ids": ids, "attention_mask": torch.ones_like(ids),
            **{name: joined([each[name] for each in made]) for name in (made[0] if made else ())},
        }  # fmt: skip

    return process


def phi4_reference(folder: Path, config: Any = None) -> Any:
    """As `by_ours`, with all that the whole model takes. config: the model's, if `transformers`
    does not read the folder's."""
    from jackfield.core.protocols.media import MediaSetup
    from jackfield.plugins.media.phi4_multimodal import MASK, Phi4MultimodalProcessor

    tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    config = config or transformers.AutoConfig.from_pretrained(folder)
    ours = Phi4MultimodalProcessor(MediaSetup(folder, config))

    def process(images: Any, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        first, *others = text.split("<|endoftext10|>")
        tokens = list(tokenizer(first)["input_ids"])
        pixels, masks, sizes = [], [], []
        for image, words in zip(images or (), others, strict=True):
            item = ours.image(image)
            tiles = torch.from_numpy(item.tensors["pixel_values"]) / 255 * 2 - 1
            assert len(tiles) == 1, "the tile is the canvas"
            pixels.append(torch.cat([tiles, tiles]))
            mask = torch.from_numpy(item.tensors[MASK])[None]
            masks.append(torch.cat([torch.ones_like(mask), mask]))
            sizes.append([448, 448])
            tokens += [*item.token_ids, *tokenizer(words)["input_ids"]]
        ids = torch.tensor([tokens])
        inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if not pixels:
            return inputs
        return {
            **inputs, "image_pixel_values": torch.stack(pixels),
            "image_attention_mask": torch.stack(masks), "image_sizes": torch.tensor(sizes),
        }  # fmt: skip

    return process


def joined(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Join along the first dimension what may differ in the second."""
    if tensors[0].dim() < 2:
        return torch.cat(tensors)
    return torch.nn.utils.rnn.pad_sequence(
        [row for tensor in tensors for row in tensor], batch_first=True
    )


def llama4_reference(folder: Path) -> Any:
    """What `Llama4Processor` writes, with the pixels of ours: its own take torchvision."""
    from transformers.models.llama4.processing_llama4 import Llama4Processor

    from jackfield.core.protocols.media import MediaSetup
    from jackfield.plugins.media import llama4

    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    config = transformers.AutoConfig.from_pretrained(folder)
    setup = MediaSetup(folder, config, tokenize=lambda text: list(tokenizer(text)["input_ids"]))
    ours = llama4.Llama4Processor(setup)
    own: Any = Llama4Processor.__new__(Llama4Processor)
    own.patch_size, own.downsample_ratio = 8, 4
    encoder: Any = SimpleNamespace(channels=(3, 1, 1), dtype=torch.float32)

    def process(images: Any, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        first, *others = text.split("<|image|>")
        pixels = []
        for image, words in zip(images or (), others, strict=True):
            tiles, parameters = (torch.from_numpy(t) for t in ours.image(image).tensors.values())
            pixels.append(llama4.Llama4Encoder.normalised(encoder, tiles, parameters))
            canvas = llama4.best_canvas((image.height, image.width), llama4.canvases(4) * 32, False)
            inputs = {"pixel_values": [tiles], "aspect_ratios": [[side // 32 for side in canvas]]}
            first += own.replace_image_token(inputs, 0) + words
        inputs = tokenizer(first, return_tensors="pt", add_special_tokens=False)
        return {**inputs, **({"pixel_values": torch.cat(pixels)} if pixels else {})}

    return process


def llama4_generate(own: Any, **inputs: Any) -> torch.Tensor:
    """Generate with Llama 4, whose `forward` stumbles over the text part's output."""
    ids, pixels = inputs.pop("input_ids"), inputs.pop("pixel_values", None)
    embeds = own.get_input_embeddings()(ids)
    if pixels is not None:
        states = own.vision_model(pixels).last_hidden_state
        rows = own.multi_modal_projector(states.flatten(0, 1))
        embeds = embeds.masked_scatter((ids == own.config.image_token_id)[..., None], rows)
    out = own.language_model.generate(inputs_embeds=embeds, **inputs)
    return torch.cat([ids, out], dim=1)


def minicpmv_reference(folder: Path) -> Any:
    """`MiniCPMV4_6Processor`, of which the part for videos takes torchvision."""
    images, tokenizer = parts_of(folder)
    videos = SimpleNamespace(slice_mode=False, downsample_mode="16x")

    class Processor(transformers.MiniCPMV4_6Processor):
        def check_argument_for_proper_class(self, name: str, argument: Any) -> None: ...

    processor: Any = Processor(images, videos, tokenizer)

    def process(images: Any, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        made = processor(images=images, text=text, return_tensors=return_tensors)
        return {name: value for name, value in made.items() if name not in (*UNUSED, "grids")}

    return process


def ocr_reference(folder: Path) -> Any:
    """`DeepseekOcr2Processor`, which leaves out tiles where no picture has any."""
    processor: Any = transformers.DeepseekOcr2Processor(*parts_of(folder))

    def process(images: Any, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        made = dict(processor(images=images, text=text, return_tensors=return_tensors))
        if "pixel_values_local" not in made:
            made.pop("num_local_patches", None)
        return made

    return process


def paligemma_reference(folder: Path) -> Any:
    """`PaliGemmaProcessor`, and for texts alone what it says of their tokens."""
    processor: Any = transformers.PaliGemmaProcessor(*parts_of(folder))

    def process(images: Any, text: str, return_tensors: str) -> dict[str, torch.Tensor]:
        if images:
            made = processor(images=[images], text=[text], return_tensors="pt")
            return {name: value for name, value in made.items() if name != "labels"}
        inputs = processor.tokenizer(text, return_tensors="pt")
        return {**inputs, "token_type_ids": torch.zeros_like(inputs["input_ids"])}

    return process


OCR = "DeepseekOcr2ForConditionalGeneration"
PHI = "Phi4MultimodalForCausalLM"
NIGHTLY = (
    "DeepseekVLForConditionalGeneration", "Exaone4_5_ForConditionalGeneration",
    "VipLlavaForConditionalGeneration",
)  # fmt: skip
"""Which the fallback serves; one more of these is tested by day."""
PLAIN_POSITIONS = ("Exaone4_5_Processor", "Lfm3VlProcessor")
UNUSED = (
    "num_patches", "rows", "cols", "batch_num_images", "num_crops", "num_soft_tokens_per_image",
)  # fmt: skip
MROPE = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
QWEN_TOKENS = ("<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>")
QWEN_IDS = {
    "image_token_id": 300, "vision_start_token_id": 301, "vision_end_token_id": 302,
    "video_token_id": 303,
}  # fmt: skip
QWEN_WRITTEN = "<|vision_start|><|image_pad|><|vision_end|>"
QWEN_OPTIONS = {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 12}
TILES = (
    "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 5)),
)  # fmt: skip
TILED: dict[str, Any] = {
    "text_config": {**TEXT, "model_type": "llama"},
    "vision_config": {**TOWER, "image_size": 32, "patch_size": 8},
    "image_token_id": 300, "scale_factor": 2, "pad_token_id": 0,
}  # fmt: skip
FILM_OPTIONS = {
    "video_sampling": {"fps": 1, "max_frames": 8, "video_size": {"longest_edge": 32}},
    "max_image_size": {"longest_edge": 32},
}  # fmt: skip
TILED_OPTIONS = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
WINDOWS = {
    "sliding_window": 12,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
QWEN3_OPTIONS = {"min_pixels": 32 * 32, "max_pixels": 32 * 32 * 12, "patch_size": 16}
GLM4V = Family(
    {
        "text_config": {
            **TEXT,
            "rope_parameters": {
                **MROPE,
                "partial_rotary_factor": 0.5,
                "mrope_section": [1, 1, 2],
            },
        },
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 4,
            "out_hidden_size": 64,
            "image_size": 112,
        },
        "image_token_id": 300,
        "image_start_token_id": 301,
        "image_end_token_id": 302,
        "video_token_id": 303,
        "video_start_token_id": 304,
        "video_end_token_id": 305,
        "tie_word_embeddings": False,
    },
    "Glm4vImageProcessorPil",
    {"size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 24}},
    ("<|image|>", "<|begin_of_image|>", "<|end_of_image|>", "<|video|>"),
    "<|begin_of_image|><|image|><|end_of_image|>",
    by_replacing("Glm4vProcessor", "glm4v", image_token="<|image|>"),
)
LLAVA_NEXT = Family(
    {
        "text_config": {**TEXT, "model_type": "mistral"},
        "vision_config": {**TOWER, "model_type": "clip_vision_model", "projection_dim": 32},
        "image_token_id": 300,
        "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
    },
    "LlavaNextImageProcessorPil",
    {
        "size": {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32},
        "image_grid_pinpoints": [[32, 64], [64, 32], [64, 64]],
    },
    ("<image>",),
    "<image>",
    own(
        "LlavaNextProcessor",
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    ),
)
FAMILIES: dict[str, Family] = {
    "Gemma3ForConditionalGeneration": Family(
        {
            "text_config": {
                **TEXT, "sliding_window": 12,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
            },
            "vision_config": {**TOWER, "image_size": 64},
            "tie_word_embeddings": False, "mm_tokens_per_image": 16, "boi_token_index": 300,
            "eoi_token_index": 301, "image_token_index": 302,
        },
        "Gemma3ImageProcessorPil", {"size": {"height": 64, "width": 64}},
        ("<start_of_image>", "<end_of_image>", "<image_soft_token>"), "<start_of_image>",
        by_replacing(
            "Gemma3", "", image_token="<start_of_image>", soft_token="<image_soft_token>"
        ),
    ),
    "Qwen2VLForConditionalGeneration": Family(
        {
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {
                "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 4, "mlp_ratio": 2,
            },
            **QWEN_IDS,
        },
        "Qwen2VLImageProcessorPil", QWEN_OPTIONS, QWEN_TOKENS, QWEN_WRITTEN,
        by_replacing("Qwen2VLProcessor", "qwen2_vl", image_token="<|image_pad|>"),
    ),
    "Qwen2_5_VLForConditionalGeneration": Family(
        {
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "vision_config": {
                "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4,
                "out_hidden_size": 64, "window_size": 56, "fullatt_block_indexes": [1],
            },
            **QWEN_IDS,
        },
        "Qwen2VLImageProcessorPil", QWEN_OPTIONS, QWEN_TOKENS, QWEN_WRITTEN,
        by_replacing("Qwen2_5_VLProcessor", "qwen2_5_vl", image_token="<|image_pad|>"),
    ),
    "Qwen3VLForConditionalGeneration": Family(
        {
            "text_config": {
                **TEXT, "rope_parameters": {
                    **MROPE, "mrope_section": [3, 3, 2], "mrope_interleaved": True,
                },
            },
            "vision_config": {
                "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4,
                "out_hidden_size": 64, "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1], "patch_size": 16,
            },
            **QWEN_IDS,
        },
        "Qwen2VLImageProcessorPil",
        {"min_pixels": 32 * 32, "max_pixels": 32 * 32 * 12, "patch_size": 16},
        QWEN_TOKENS, QWEN_WRITTEN,
        by_replacing("Qwen3VLProcessor", "qwen3_vl", image_token="<|image_pad|>"),
    ),
    "Gemma4ForConditionalGeneration": Family(
        {
            "text_config": {
                **TEXT, **WINDOWS, "global_head_dim": 32, "num_hidden_layers": 4,
                "layer_types": [*WINDOWS["layer_types"], "full_attention"],
                "num_kv_shared_layers": 2, "hidden_size_per_layer_input": 8,
                "vocab_size_per_layer_input": 320, "use_bidirectional_attention": "vision",
            },
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 8,
                "patch_size": 4, "pooling_kernel_size": 2, "position_embedding_size": 64,
                "initializer_range": 0.2,
            },
            "audio_config": None, "tie_word_embeddings": False,
            "boi_token_id": 301, "eoi_token_id": 302, "image_token_id": 300,
            "video_token_id": 303, "audio_token_id": 304,
        },
        "Gemma4ImageProcessorPil",
        {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70},
        ("<image_soft_token>", "<start_of_image>", "<end_of_image>", "<video>"),
        "<image_soft_token>",
        by_replacing(
            "Gemma4Processor", "gemma4", image_token="<image_soft_token>",
            boi_token="<start_of_image>", eoi_token="<end_of_image>",
        ),
    ),
    **dict.fromkeys(
        ("Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration"),
        Family(
            {
                "text_config": {
                    **TEXT, "num_hidden_layers": 4, "head_dim": 32, "linear_num_key_heads": 2,
                    "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                    "linear_value_head_dim": 16, "rope_parameters": {
                        **MROPE, "partial_rotary_factor": 0.25, "mrope_section": [2, 1, 1],
                        "mrope_interleaved": True,
                    },
                    **EXPERTS, "shared_expert_intermediate_size": 32,
                },
                "vision_config": {
                    "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4,
                    "out_hidden_size": 64, "num_position_embeddings": 64, "patch_size": 16,
                    "initializer_range": 0.2,
                },
                "tie_word_embeddings": False, **QWEN_IDS,
            },
            "Qwen2VLImageProcessorPil", QWEN3_OPTIONS, QWEN_TOKENS, QWEN_WRITTEN,
            by_replacing("Qwen3VLProcessor", "qwen3_vl", image_token="<|image_pad|>"),
        ),
    ),
    "Qwen3VLMoeForConditionalGeneration": Family(
        {
            "text_config": {
                **TEXT, **EXPERTS, "rope_parameters": {
                    **MROPE, "mrope_section": [3, 3, 2], "mrope_interleaved": True,
                },
            },
            "vision_config": {
                "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4,
                "out_hidden_size": 64, "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1], "patch_size": 16,
            },
            **QWEN_IDS,
        },
        "Qwen2VLImageProcessorPil", QWEN3_OPTIONS, QWEN_TOKENS, QWEN_WRITTEN,
        by_replacing("Qwen3VLProcessor", "qwen3_vl", image_token="<|image_pad|>"),
    ),
    "Glm4vForConditionalGeneration": GLM4V,
    "Glm46VForConditionalGeneration": GLM4V._replace(
        config=GLM4V.config | {
            "text_config": {
                **GLM4V.config["text_config"], **EXPERTS, "model_type": "glm4v_moe_text",
                "n_routed_experts": 4, "n_shared_experts": 1, "first_k_dense_replace": 1,
                "n_group": 1, "topk_group": 1,
            },
        },
        processor="Glm46VImageProcessorPil",
        reference=by_replacing("Glm46VProcessor", "glm46v", image_token="<|image|>"),
    ),
    "PaliGemmaForConditionalGeneration": Family(
        {
            "text_config": {
                **TEXT, **WINDOWS, "model_type": "gemma2", "query_pre_attn_scalar": 16,
                "attn_logit_softcapping": 2.0, "sliding_window": 72,
            },
            "vision_config": {
                **TOWER, "model_type": "siglip_vision_model", "vision_use_head": False,
            },
            "image_token_index": 300, "projection_dim": 64, "hidden_size": 64, "vocab_size": 320,
        },
        "SiglipImageProcessorPil",
        {"size": {"height": 32, "width": 32}, "image_seq_length": 16},
        ("<image>", "<bos>"), "<image>", paligemma_reference,
        {"image_token": "<image>", "bos_token": "<bos>"},
    ),
    "GlmOcrForConditionalGeneration": GLM4V._replace(
        config=GLM4V.config | {
            "vision_config": {
                "depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4,
                "out_hidden_size": 64, "initializer_range": 0.2,
            },
        }
    ),
    "Ovis2ForConditionalGeneration": Family(
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**TOWER, "vocab_size": 48, "hidden_stride": 2},
            "image_token_id": 301, "visual_indicator_token_ids": [302, 303, 304, 305, 306],
            "hidden_size": 64, "vocab_size": 320,
        },
        "Ovis2ImageProcessorPil",
        {
            "size": {"height": 32, "width": 32}, "crop_to_patches": True, "min_patches": 1,
            "max_patches": 4,
        },
        (
            "<image>", "<IMG_ATOM>", "<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>",
            "<IMG_END>",
        ),
        "<image>", own("Ovis2Processor", image_seq_length=4),
    ),
    "Glm4vMoeForConditionalGeneration": GLM4V._replace(
        config=GLM4V.config | {
            "text_config": {
                **GLM4V.config["text_config"], **EXPERTS, "n_routed_experts": 4,
                "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
            },
        }
    ),
    "Llama4ForConditionalGeneration": Family(
        {
            "text_config": {
                **TEXT, "num_local_experts": 2, "intermediate_size_mlp": 96,
                "attention_chunk_size": 512, "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0],
                "interleave_moe_layer_step": 2,
            },
            "vision_config": {
                "hidden_size": 32, "num_hidden_layers": 2,
                "num_attention_heads": 4, "image_size": 32, "patch_size": 8,
                "vision_output_dim": 24, "projector_input_dim": 24, "projector_output_dim": 24,
                "pixel_shuffle_ratio": 0.5, "initializer_range": 0.2, "intermediate_size": 128,
            },
            "boi_token_index": 301, "eoi_token_index": 302, "image_token_index": 305,
        },
        "", {"size": {"height": 32, "width": 32}, "max_patches": 4},
        (
            "<|image|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>",
            "<|tile_y_separator|>", "<|patch|>",
        ),
        "<|image|>", llama4_reference,
    ),
    "LlavaNextForConditionalGeneration": LLAVA_NEXT,
    "LlavaNextVideoForConditionalGeneration": LLAVA_NEXT._replace(
        config=LLAVA_NEXT.config | {"video_token_id": 301}, specials=("<image>", "<video>")
    ),
    "AyaVisionForConditionalGeneration": Family(
        {
            "text_config": {**TEXT, **WINDOWS, "model_type": "cohere2"},
            "vision_config": {**TOWER, "model_type": "siglip_vision_model"},
            "image_token_index": 301, "downsample_factor": 2,
        },
        "GotOcr2ImageProcessorPil",
        {"size": {"height": 32, "width": 32}, "min_patches": 1, "max_patches": 4},
        (
            "<image>", "<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE_GLOBAL",
            *(f"TILE_{number}" for number in range(1, 5)),
        ),
        "<image>", own("AyaVisionProcessor", patch_size=8, img_size=32, downsample_factor=2),
    ),
    "Cohere2VisionForConditionalGeneration": Family(
        {
            "text_config": {**TEXT, **WINDOWS, "model_type": "cohere2"},
            "vision_config": {**TOWER, "model_type": "siglip_vision_model"},
            "image_token_id": 300, "downsample_factor": 2, "alignment_intermediate_size": 48,
        },
        "", {"size": {"height": 32, "width": 32}, "max_patches": 4, "patch_size": 2},
        ("<|IMG_PATCH|>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_LINE_BREAK|>"),
        "<|IMG_PATCH|>", by_ours,
        {
            "image_token": "<|IMG_PATCH|>", "boi_token": "<|START_OF_IMG|>",
            "eoi_token": "<|END_OF_IMG|>", "img_line_break_token": "<|IMG_LINE_BREAK|>",
        },
    ),
    "Lfm2VlForConditionalGeneration": Family(
        {
            "text_config": {
                **TEXT, "model_type": "lfm2", "block_auto_adjust_ff_dim": False,
                "full_attn_idxs": [1], "layer_types": ["conv", "full_attention", "conv"],
            },
            "vision_config": {
                **{name: size for name, size in TOWER.items() if name != "image_size"},
                "model_type": "siglip2_vision_model", "num_patches": 16,
            },
            "image_token_id": 300, "projector_hidden_size": 48,
        },
        "",
        {
            "encoder_patch_size": 8, "tile_size": 32, "max_image_tokens": 6,
            "min_image_tokens": 2, "max_tiles": 4,
        },
        (
            "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
            *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 5) for column in range(1, 5)),
        ),
        "<image>", by_ours,
    ),
    OCR: Family(
        {
            "text_config": {
                **TEXT, "model_type": "deepseek_ocr2_text", "n_routed_experts": 4,
                "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32,
                "mlp_layer_types": ["dense", "sparse", "sparse"], "max_position_embeddings": 2048,
            },
            "vision_config": {
                "sam_config": {
                    "hidden_size": 16, "output_channels": 16, "num_hidden_layers": 1,
                    "num_attention_heads": 2, "global_attn_indexes": [],
                    "downsample_channels": [16, 32], "initializer_range": 0.2,
                },
                "encoder_config": {
                    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                    "num_attention_heads": 4, "num_key_value_heads": 2, "initializer_range": 0.2,
                },
            },
            "image_token_id": 300,
        },
        "DeepseekOcr2ImageProcessorPil", {}, ("<image>",), "<image>", ocr_reference,
        {"image_token": "<image>"},
    ),
    PHI: Family(
        {
            **{name: size for name, size in TEXT.items() if name != "head_dim"},
            "max_position_embeddings": 2048, "original_max_position_embeddings": 2048,
            "vision_config": {
                **TOWER, "image_size": 448, "patch_size": 14, "num_hidden_layers": 3,
                "image_token_id": 300,
            },
            "audio_config": {
                "hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48,
                "num_blocks": 1, "ext_pw_out_channel": 32, "audio_token_id": 301,
                "depthwise_separable_out_channel": 32, "nemo_conv_channels": 8,
                "bias_max_distance": 20, "initializer_range": 0.2,
            },
        },
        "", {}, ("<|endoftext10|>", "<|endoftext11|>"), "<|endoftext10|>", phi4_reference,
    ),
    "Kimi_K25ForConditionalGeneration": Family(
        {
            "text_config": {
                **TEXT, "model_type": "deepseek_v3", "q_lora_rank": 24, "kv_lora_rank": 16,
                "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16,
                "num_key_value_heads": 4, "first_k_dense_replace": 1, "n_routed_experts": 4,
                "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1,
                "moe_intermediate_size": 32, "head_dim": 8,
            },
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                "num_attention_heads": 4, "patch_size": 8, "pos_emb_height": 8, "pos_emb_width": 8,
            },
            "image_token_id": 300, "video_token_id": 301, "vision_start_token_id": 302,
            "vision_end_token_id": 303, "projection_hidden_size": 32,
        },
        "", {"patch_size": 8, "max_patches": 40},
        ("<|media_pad|>", "<|kimi_k25_video_placeholder|>", "<|media_begin|>", "<|media_end|>"),
        "<|media_pad|>", by_ours,
    ),
    "MiniCPMV4_6ForConditionalGeneration": Family(
        {
            "text_config": {
                **TEXT, "model_type": "qwen3_5_text", "num_hidden_layers": 4, "head_dim": 32,
                "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
            },
            "vision_config": {
                **TOWER, "num_hidden_layers": 3, "insert_layer_id": 1, "image_size": 64,
            },
            "insert_layer_id": 1, "image_token_id": 300, "video_token_id": 301, "image_size": 64,
        },
        "MiniCPMV4_6ImageProcessorPil",
        {"patch_size": 8, "scale_resolution": 64, "max_slice_nums": 4},
        (
            "<image_pad>", "<video_pad>", "<image>", "</image>", "<slice>", "</slice>",
            "<image_id>", "</image_id>",
        ),
        "<image_pad>", minicpmv_reference,
        {
            "image_token": "<image_pad>", "video_token": "<video_pad>",
            "image_start_token": "<image>", "image_end_token": "</image>",
            "slice_start_token": "<slice>", "slice_end_token": "</slice>",
            "image_id_start_token": "<image_id>", "image_id_end_token": "</image_id>",
        },
    ),
    "LightOnOcrForConditionalGeneration": Family(
        {
            "text_config": {**TEXT, "model_type": "qwen3"},
            "vision_config": {**TOWER, "model_type": "pixtral", "image_size": 64, "head_dim": 8},
            "image_token_id": 300, "spatial_merge_size": 2,
        },
        "PixtralImageProcessorPil", {"size": {"longest_edge": 64}, "patch_size": 16},
        ("<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"), "<|image_pad|>",
        own("LightOnOcrProcessor", patch_size=8, spatial_merge_size=2),
        {
            "image_token": "<|image_pad|>", "image_break_token": "<|vision_pad|>",
            "image_end_token": "<|vision_end|>",
        },
    ),
    "Mistral3ForConditionalGeneration": Family(
        {
            "text_config": {**TEXT, "model_type": "mistral"},
            "vision_config": {**TOWER, "model_type": "pixtral", "image_size": 64, "head_dim": 8},
            "image_token_id": 300, "spatial_merge_size": 2, "vision_feature_layer": -1,
        },
        "PixtralImageProcessorPil", {"size": {"longest_edge": 64}, "patch_size": 8},
        ("[IMG]", "[IMG_BREAK]", "[IMG_END]"), "[IMG]",
        by_replacing(
            "Pixtral", "", {"patch_size": 16}, image_token="[IMG]"
        ),
    ),
    "InternVLForConditionalGeneration": Family(
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**TOWER, "image_size": [32, 32], "patch_size": [8, 8]},
            "image_token_id": 300, "downsample_ratio": 0.5, "image_seq_length": 4,
        },
        "GotOcr2ImageProcessorPil",
        {"size": {"height": 32, "width": 32}, "min_patches": 1, "max_patches": 4},
        ("<IMG_CONTEXT>", "<img>", "</img>", "<video>"), "<IMG_CONTEXT>",
        by_replacing(
            "InternVLProcessor", "internvl", {"crop_to_patches": True}, image_token="<IMG_CONTEXT>",
            start_image_token="<img>", end_image_token="</img>", image_seq_length=4,
        ),
    ),
    "LlavaOnevisionForConditionalGeneration": Family(
        {
            "text_config": {**TEXT, "model_type": "qwen2"},
            "vision_config": {**TOWER, "model_type": "siglip_vision_model"},
            "image_token_id": 300, "video_token_id": 301,
            "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32]],
            "vision_feature_layer": -1,
        },
        "LlavaOnevisionImageProcessorPil",
        {
            "size": {"height": 32, "width": 32},
            "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32]],
        },
        ("<image>", "<video>"), "<image>",
        by_replacing(
            "LlavaOnevisionProcessor", "llava_onevision", image_token="<image>",
            num_image_tokens=16,
            vision_feature_select_strategy="full", vision_aspect_ratio="anyres_max_9",
        ),
    ),
    "Idefics2ForConditionalGeneration": Family(
        {
            "text_config": {**TEXT, "model_type": "mistral"}, "vision_config": TOWER,
            "perceiver_config": {
                "hidden_size": 64, "resampler_n_latents": 4, "resampler_depth": 2,
                "resampler_n_heads": 4, "resampler_head_dim": 8, "num_key_value_heads": 2,
            },
            "image_token_id": 300,
        },
        "Idefics2ImageProcessorPil",
        {"size": {"shortest_edge": 20, "longest_edge": 45}, "do_image_splitting": True},
        ("<image>", "<fake_token_around_image>", "<end_of_utterance>"), "<image>",
        own("Idefics2Processor", image_seq_len=4),
    ),
    "Idefics3ForConditionalGeneration": Family(
        TILED, "Idefics3ImageProcessorPil", TILED_OPTIONS, TILES, "<image>",
        by_replacing(
            "Idefics3Processor", "idefics3", {"return_row_col_info": True}, image_token="<image>",
            fake_image_token="<fake_token_around_image>", global_image_tag="<global-img>",
            image_seq_len=4,
        ),
    ),
    "SmolVLMForConditionalGeneration": Family(
        TILED, "SmolVLMImageProcessorPil", TILED_OPTIONS, (*TILES, "<video>"), "<image>",
        by_replacing(
            "SmolVLMProcessor", "smolvlm", {"return_row_col_info": True}, image_token="<image>",
            fake_image_token="<fake_token_around_image>", global_image_token="<global-img>",
            image_seq_len=4,
        ),
    ),
    "VipLlavaForConditionalGeneration": Family(
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**TOWER, "model_type": "clip_vision_model", "projection_dim": 32},
            "image_token_id": 300, "vision_feature_layer": [-2, -1],
        },
        "CLIPImageProcessorPil",
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
        ("<image>",), "<image>",
        own(
            "LlavaProcessor", patch_size=8, vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
    ),
    "DeepseekVLForConditionalGeneration": Family(
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**TOWER, "model_type": "siglip_vision_model"},
            "image_token_id": 300,
        },
        "DeepseekVLImageProcessorPil", {"size": {"height": 32, "width": 32}, "min_size": 14},
        ("<image_placeholder>",), "<image_placeholder>",
        own("DeepseekVLProcessor", num_image_tokens=16), {"image_token": "<image_placeholder>"},
    ),
    "PaddleOCRVLForConditionalGeneration": Family(
        {
            "text_config": {**TEXT, "use_bias": True, "rope_parameters": MROPE},
            "vision_config": {**TOWER, "image_size": 56, "patch_size": 14},
            **QWEN_IDS,
        },
        "PaddleOCRVLImageProcessorPil", QWEN_OPTIONS, QWEN_TOKENS, QWEN_WRITTEN,
        by_replacing("PaddleOCRVLProcessor", "paddleocr_vl", image_token="<|image_pad|>"),
    ),
    "Lfm3VlForConditionalGeneration": Family(
        {
            "text_config": {
                **TEXT, "model_type": "lfm3", "conv_L_cache": 3, "sliding_window": 12,
                "layer_types": ["conv", "sliding_attention", "full_attention"],
                "rope_parameters": {
                    "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                    "full_attention": {"rope_type": "default", "rope_theta": 500.0},
                },
            },
            "vision_config": {
                "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                "num_attention_heads": 4, "num_key_value_heads": 2,
            },
            "image_token_id": 300, "video_token_id": 303, "vision_start_token_id": 301,
            "vision_end_token_id": 302, "projector_hidden_size": 48,
        },
        "Qwen2VLImageProcessorPil", QWEN3_OPTIONS, QWEN_TOKENS, QWEN_WRITTEN,
        by_replacing("Lfm3VlProcessor", "lfm3_vl", image_token="<|image_pad|>"),
    ),
    "Exaone4_5_ForConditionalGeneration": Family(
        {
            "text_config": {**TEXT, **WINDOWS, "model_type": "exaone4"},
            "vision_config": {
                "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4,
                "num_key_value_heads": 2, "out_hidden_size": 64, "window_size": 56,
                "fullatt_block_indexes": [1],
            },
            "image_token_id": 300, "video_token_id": 303,
        },
        "Qwen2VLImageProcessorPil", QWEN_OPTIONS, QWEN_TOKENS, QWEN_WRITTEN,
        by_replacing("Exaone4_5_Processor", "exaone4_5", image_token="<|image_pad|>"),
    ),
    "LlavaForConditionalGeneration": Family(
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**TOWER, "model_type": "clip_vision_model", "projection_dim": 32},
            "image_token_id": 300, "vision_feature_layer": -2,
        },
        "CLIPImageProcessorPil",
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
        ("<image>",),
        "<image>",
        lambda folder: transformers.LlavaProcessor(
            *parts_of(folder), patch_size=8, vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
    ),
}  # fmt: skip


def tokenizer_with(
    specials: tuple[str, ...], template: str, names: Mapping[str, str] = {}
) -> PreTrainedTokenizerFast:
    """One token per byte, and special tokens from 300 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fill = [f"<unused{number}>" for number in range(300 - len(alphabet))]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *fill])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    create: Any = PreTrainedTokenizerFast
    made: PreTrainedTokenizerFast = create(
        tokenizer_object=backend,
        chat_template=template,
        extra_special_tokens=dict(names),
        pad_token="<unused0>",
    )
    return made


def save(architecture: str, folder: Path, **changes: Any) -> Any:
    """Save a random model with all that it needs; return the model."""
    family = FAMILIES[architecture]
    kind = getattr(transformers, architecture)
    torch.manual_seed(7)
    config = {**copy.deepcopy(family.config), **changes}
    model = kind(kind.config_class(**config)).float().eval()
    if config.get("text_config", {}).get("attn_logit_softcapping"):
        model.set_attn_implementation("eager")  # Others ignore soft caps.
    randomize(model)
    model.save_pretrained(folder)
    if architecture == "Kimi_K25ForConditionalGeneration":
        respell(folder / "model.safetensors")
    if architecture == "Glm46VForConditionalGeneration":
        unstack(folder / "model.safetensors")
    template = TEMPLATE.replace("PICTURE", family.written)
    tokenizer_with(family.specials, template, family.names).save_pretrained(folder)
    if architecture == "Llama4ForConditionalGeneration":
        model.generate = MethodType(llama4_generate, model)
    if family.processor:
        getattr(transformers, family.processor)(**family.options).save_pretrained(folder)
    else:
        (folder / "preprocessor_config.json").write_text(json.dumps(family.options))
    if architecture == "SmolVLMForConditionalGeneration":
        (folder / "video_preprocessor_config.json").write_text(json.dumps(FILM_OPTIONS))
    if hasattr(processor := family.reference(folder), "save_pretrained"):
        processor.save_pretrained(folder)
    return model


def respell(file: Path) -> None:
    """Give a text part's layers the name that published checkpoints have: `transformers` writes
    that of the tower's."""
    tensors = {
        name.replace("language_model.model.blocks.", "language_model.model.layers."): tensor
        for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, {"format": "pt"})


def unstack(file: Path) -> None:
    """Give each expert tensors of its own, as published checkpoints have them: of this type's
    experts `transformers` writes those of all together."""
    tensors = {}
    for name, tensor in load_file(file).items():
        layer, _, weight = name.rpartition(".experts.")
        if not layer:
            tensors[name] = tensor
            continue
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[weight]
        for number, expert in enumerate(tensor):
            for part, own in zip(parts, expert.chunk(len(parts)), strict=True):
                tensors[f"{layer}.experts.{number}.{part}.weight"] = own.clone()
    save_file(tensors, file, {"format": "pt"})


def randomize(model: Any) -> None:
    """Change what is alike in a new model."""
    with torch.no_grad():
        for _name, parameter in model.named_parameters():
            # Gains and biases that are all alike would hide faults of scale; so would queries.
            if parameter.dim() > 1 and (parameter == parameter.flatten()[0]).all():
                parameter.normal_(0, 0.2)
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def picture(seed: int, width: int = 96, height: int = 72) -> Image.Image:
    """Noise around a colour."""
    random = np.random.default_rng(seed)
    pixels = random.integers(0, 200, 3) + random.integers(0, 56, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8))
