"""Tiny random checkpoints of multimodal families in the form in which they were published, whose
code `transformers` does not have: its modules where it has the parts, put together by their
definition."""

from __future__ import annotations

import copy
import json
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import seeing_models
import torch
import transformers
from PIL import ImageOps
from safetensors.torch import load_file, save_file
from seeing_models import TEMPLATE, TEXT, TOWER, randomize, tokenizer_with
from torch import nn


class Family(NamedTuple):
    """How a family's checkpoint is made."""

    kind: Callable[[dict[str, Any]], Any]
    """config.json → the model, with `tensors`."""
    config: dict[str, Any]
    """config.json."""
    options: dict[str, Any]
    """preprocessor_config.json."""
    specials: tuple[str, ...]
    """Special tokens: ids from 300 on."""
    written: str
    """What a prompt has for an item."""
    reference: Callable[[Path], Any]
    """Folder → what makes inputs of items and text."""


class Published(nn.Module):
    """A whole model. Its parts have the names of published tensors."""

    text_prefix: str
    """In front of the names of the text part's tensors."""
    placeholder: int = 300

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        self.config = config
        self.text = self.create_text(config)
        self.create(config)

    def create_text(self, config: dict[str, Any]) -> Any:
        raise NotImplementedError

    def create(self, config: dict[str, Any]) -> None:
        """Set the other parts."""
        raise NotImplementedError

    def rows(self, **inputs: Any) -> torch.Tensor:
        """Return all items' rows."""
        raise NotImplementedError

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the checkpoint's."""
        text = {self.text_prefix + name: t for name, t in self.text.state_dict().items()}
        others = self.state_dict().items()
        return text | {name: t for name, t in others if not name.startswith("text.")}

    def generate(self, input_ids: torch.Tensor, **inputs: Any) -> torch.Tensor:
        own = {n: inputs.pop(n) for n in list(inputs) if n in ("max_new_tokens", "do_sample",
               "suppress_tokens", "attention_mask")}  # fmt: skip
        embeds = self.text.get_input_embeddings()(input_ids)
        if inputs:
            rows = self.rows(**inputs)
            places = (input_ids == self.placeholder)[..., None]
            assert int(places.sum()) == len(rows)
            embeds = embeds.masked_scatter(places, rows)
        out = self.text.generate(inputs_embeds=embeds, **own)
        return torch.cat([input_ids, out], dim=1)


# ---------------------------------------------------------------- MiniCPM-V


WIDE: dict[str, Any] = {**TEXT, "hidden_size": 256}
"""The resampler's heads have a width of 128."""


class MiniCPMV(Published):
    """Version 4.5, of Qwen3; others differ in the text part alone."""

    text_prefix = "llm."
    text_class = transformers.Qwen3ForCausalLM

    def create_text(self, config: dict[str, Any]) -> Any:
        return self.text_class(self.text_class.config_class(**WIDE))

    def create(self, config: dict[str, Any]) -> None:
        from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

        vision = transformers.Idefics2VisionConfig(**config["vision_config"])
        self.vpm = Idefics2VisionTransformer(vision)
        width, kv_width = WIDE["hidden_size"], vision.hidden_size
        tensors = {
            "query": (config["query_num"], width), "proj": (width, width),
            "kv_proj.weight": (width, kv_width), "attn.in_proj_weight": (3 * width, width),
            "attn.in_proj_bias": (3 * width,), "attn.out_proj.weight": (width, width),
            "attn.out_proj.bias": (width,),
            **{f"ln_{part}.{of}": (width,) for part in ("q", "kv", "post")
               for of in ("weight", "bias")},
        }  # fmt: skip
        self.resampler = {name: torch.randn(shape) * 0.2 for name, shape in tensors.items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        own = {f"resampler.{name}": tensor for name, tensor in self.resampler.items()}
        return super().tensors() | own

    def rows(self, parts: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([self.resampled(part) for part in parts])

    def resampled(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return the rows of a picture or slice, [3, height, width]."""
        own, patch = self.resampler, self.config["vision_config"]["patch_size"]
        height, width = (side // patch for side in pixels.shape[1:])
        mask = torch.ones(1, height, width, dtype=torch.bool)
        [patches] = self.vpm(pixels[None], patch_attention_mask=mask).last_hidden_state
        values = self.normed(patches @ own["kv_proj.weight"].T, "kv")
        quarter, places = values.shape[-1] // 4, torch.arange(height * width)
        turns = 10000 ** (torch.arange(quarter) / quarter)
        angles = [along[:, None] / turns for along in (places % width, places // width)]
        keys = values + torch.cat([part for each in angles for part in (each.sin(), each.cos())], 1)
        queries = self.normed(own["query"], "q")
        made = []
        for weight, bias, states in zip(
            own["attn.in_proj_weight"].chunk(3), own["attn.in_proj_bias"].chunk(3),
            (queries, keys, values), strict=True,
        ):  # fmt: skip
            made.append((states @ weight.T + bias).unflatten(-1, (-1, 128)).transpose(0, 1))
        weights = (made[0] @ made[1].transpose(1, 2) / 128**0.5).softmax(-1)
        read = (weights @ made[2]).transpose(0, 1).flatten(1)
        read = read @ own["attn.out_proj.weight"].T + own["attn.out_proj.bias"]
        return self.normed(read, "post") @ own["proj"]

    def normed(self, states: torch.Tensor, part: str) -> torch.Tensor:
        weight, bias = (self.resampler[f"ln_{part}.{name}"] for name in ("weight", "bias"))
        return torch.nn.functional.layer_norm(states, weight.shape, weight, bias, 1e-6)


class MiniCPMO(MiniCPMV):
    """Version 2.6, of Qwen2."""

    text_class = transformers.Qwen2ForCausalLM


def minicpmv_reference(folder: Path) -> Any:
    """By the image processor of 4.6, whose sizes are multiples of two patches there."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)

    class Images(transformers.MiniCPMV4_6ImageProcessorPil):
        def reshape_by_patch(self, image: Any, patch_size: int) -> Any:
            return super().reshape_by_patch(image, 2 * patch_size)

    images_of = Images(
        patch_size=4, downsample_mode="4x", scale_resolution=64, max_slice_nums=4,
    )  # fmt: skip

    def process(images: Any, text: str, return_tensors: str) -> dict[str, Any]:
        first, *others = text.split("<unk>")
        unks = 6 * "<unk>"
        parts: list[torch.Tensor] = []
        for number, (image, words) in enumerate(zip(images or (), others, strict=True)):
            made = images_of(images=[image], return_tensors="pt")
            sizes = [(int(h) // 2, int(w) // 2) for h, w in made["target_sizes"]]
            lengths = [h * w * 8 for h, w in sizes]
            for (h, w), patches in zip(
                sizes, made["pixel_values"][0].split(lengths, dim=-1), strict=True
            ):
                grid = patches.unflatten(-1, (h, w, 8)).permute(0, 2, 1, 3, 4)
                parts.append(grid.reshape(3, h * 8, w * 8))
            rows, columns = made["grids"][0]
            lines = "\n".join([f"<slice>{unks}</slice>" * columns] * rows)
            first += f"<image_id>{number}</image_id><image>{unks}</image>{lines}{words}"
        inputs = dict(tokenizer(first, return_tensors="pt", add_special_tokens=False))
        return {**inputs, **({"parts": parts} if parts else {})}

    return process


MINICPMV = Family(
    MiniCPMV,
    {
        **WIDE, "architectures": ["MiniCPMV"], "model_type": "minicpmv", "version": 4.5,
        "auto_map": {"AutoConfig": "configuration_minicpm.MiniCPMVConfig"}, "query_num": 6,
        "drop_vision_last_layer": False, "slice_mode": True, "use_image_id": True,
        "slice_config": {"max_slice_nums": 4, "model_type": "minicpmv"}, "patch_size": 8,
        "vision_config": {
            "model_type": "siglip_vision_model", "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 80, "patch_size": 8,
        },
    },
    {
        "image_processor_type": "MiniCPMVImageProcessor", "max_slice_nums": 4,
        "scale_resolution": 64, "patch_size": 8, "use_image_id": True, "slice_mode": True,
        "image_feature_size": 6, "norm_mean": [0.5] * 3, "norm_std": [0.5] * 3, "version": 4.5,
    },
    ("<unk>", "<image>", "</image>", "<slice>", "</slice>", "<image_id>", "</image_id>"),
    "<unk>", minicpmv_reference,
)  # fmt: skip
# ---------------------------------------------------------------- Phi-4-multimodal

FACTORS = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5]
PHI_TEXT: dict[str, Any] = {
    **{name: size for name, size in TEXT.items() if name != "head_dim"},
    "max_position_embeddings": 2048, "original_max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}  # fmt: skip
PHI_PARTS = seeing_models.FAMILIES[seeing_models.PHI].config
PHI_NAMES = {
    "img_projection_up": "img_projection.0", "img_projection_down": "img_projection.2",
    "global_img_feature_extensor": "glb_GN", "sub_img_feature_extensor": "sub_GN",
    "up_proj_for_speech": "audio_projection.speech.0",
    "down_proj_for_speech": "audio_projection.speech.2",
    "up_proj_for_vision_speech": "audio_projection.vision.0",
    "down_proj_for_vision_speech": "audio_projection.vision.2",
    "audio_embed.encoder.encoders.0.self_attn.o_proj":
        "audio_embed.encoder.encoders.0.self_attn.linear_out",
    **{
        f"encoders.0.self_attn.{part}_proj": f"encoders.0.self_attn.linear_{part}"
        for part in ("q", "k", "v")
    },
    **{
        f"feed_forward_{place}.{ours}": f"feed_forward_{place}.{theirs}"
        for place in ("in", "out")
        for ours, theirs in (("gate_up_proj", "net.0.linear"), ("down_proj", "net.2"))
    },
}  # fmt: skip
"""Part of a name in `transformers` → in the published checkpoint."""


class Phi4MMForCausalLM(transformers.Phi4MultimodalForCausalLM):  # type: ignore[misc]
    """The model of `transformers`, under its published names, with adapters in it."""

    def __init__(self, config: dict[str, Any]) -> None:
        rope = {
            "rope_type": "longrope", "long_factor": FACTORS, "short_factor": FACTORS,
            "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
        }  # fmt: skip
        parts = {name: PHI_PARTS[name] for name in ("vision_config", "audio_config")}
        super().__init__(
            transformers.Phi4MultimodalConfig(**PHI_TEXT, rope_parameters=rope, **parts)
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        published = {}
        for name, tensor in self.state_dict().items():
            for ours, theirs in PHI_NAMES.items():
                if "embed_tokens_extend" in name:
                    name = name.replace(ours, theirs)
            layer, _, leaf = name.rpartition(".")
            if ".layers." in name and "_proj." in name and "extend" not in name:
                name = f"{layer}.base_layer.{leaf}"
                for kind in ("vision", "speech"):
                    published[f"{layer}.lora_A.{kind}.weight"] = torch.ones(4, tensor.shape[1])
                    published[f"{layer}.lora_B.{kind}.weight"] = torch.ones(tensor.shape[0], 4)
            published[name] = tensor
        del published["lm_head.weight"]
        return published


def phi4mm_reference(folder: Path) -> Any:
    config = json.loads((folder / "config.json").read_text())
    return seeing_models.phi4_reference(folder, Phi4MMForCausalLM(config).config)


PHI = Family(
    Phi4MMForCausalLM,
    {
        **PHI_TEXT, "architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm",
        "audio_processor": {
            "name": "cascades",
            "config": {
                "attention_dim": 32, "attention_heads": 4, "linear_units": 48, "num_blocks": 1,
                "ext_pw_out_channel": 32, "depthwise_seperable_out_channel": 32, "input_size": 80,
                "activation": "swish", "kernel_size": 3, "chunk_size": -1, "left_chunk": 18,
                "nemo_conv_settings": {"conv_channels": 8}, "time_reduction": 8,
                "relative_attention_bias_args": {"t5_bias_max_distance": 20, "type": "t5"},
                "input_layer": "nemo_conv", "audio_token_id": 301,
            },
        },
        "embd_layer": {
            "embedding_cls": "image_audio",
            "audio_embd_layer": {"downsample_rate": 1, "compression_rate": 8},
            "image_embd_layer": {
                "crop_size": 448, "hd_transform_order": "sub_glb", "use_hd_transform": True,
            },
        },
        "img_processor": None, "partial_rotary_factor": 0.75, "rope_theta": 10000.0,
        "rope_scaling": {"type": "longrope", "long_factor": FACTORS, "short_factor": FACTORS},
        "vision_lora": {"r": 4, "lora_alpha": 8}, "speech_lora": {"r": 4, "lora_alpha": 8},
        "vision_config": PHI_PARTS["vision_config"],
    },
    {
        "image_processor_type": "Phi4MMImageProcessor", "dynamic_hd": 36,
        "feature_extractor_type": "Phi4MMAudioFeatureExtractor", "audio_compression_rate": 8,
        "audio_downsample_rate": 1, "audio_feat_stride": 1,
    },
    ("<|endoftext10|>", "<|endoftext11|>"), "<|endoftext10|>", phi4mm_reference,
)  # fmt: skip
# ---------------------------------------------------------------- DeepSeek-OCR

OCR_TEXT: dict[str, Any] = {
    **{name: size for name, size in TEXT.items() if name != "initializer_range"},
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1,
    "moe_intermediate_size": 32, "first_k_dense_replace": 1, "topk_method": "greedy",
    "n_group": 1, "topk_group": 1, "max_position_embeddings": 2048,
}  # fmt: skip


UNLIMITED: Any = getattr(transformers, "UnlimitedOcrForConditionalGeneration", nn.Module)


class DeepseekOCRForCausalLM(UNLIMITED):  # type: ignore[misc]
    """Unlimited-OCR of `transformers` with a window for all. Its checkpoints have equal names."""

    def __init__(self, config: dict[str, Any]) -> None:
        sam = {
            "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "mlp_dim": 64,
            "global_attn_indexes": [1], "downsample_channels": [16, 32], "initializer_range": 0.2,
        }  # fmt: skip
        clip = {
            "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
            "intermediate_size": 128, "initializer_range": 0.2,
        }  # fmt: skip
        text = {**OCR_TEXT, "sliding_window": 4096, "initializer_range": 0.2}
        super().__init__(
            transformers.UnlimitedOcrConfig(
                text_config=text, vision_config={"sam_config": sam, "encoder_config": clip},
                image_token_id=300,
            )
        )  # fmt: skip

    def tensors(self) -> dict[str, torch.Tensor]:
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder)
            return load_file(Path(folder) / "model.safetensors")


def ocr_reference(folder: Path) -> Any:
    """What its processor writes, with Pillow as its published code uses it."""
    tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(folder)

    def normalised(image: Any) -> torch.Tensor:
        return torch.from_numpy(np.array(image)).permute(2, 0, 1) / 255 * 2 - 1

    def process(images: Any, text: str, return_tensors: str) -> dict[str, Any]:
        first, *others = text.split("<image>")
        wholes, tiles, counts, places = [], [], [], []
        for image, words in zip(images or (), others, strict=True):
            square = ImageOps.pad(image, (1024, 1024), color=(127, 127, 127))
            wholes.append(normalised(square))
            columns, rows = OCR_GRIDS[image.size]
            count = 16 * 17 + 1
            if columns * rows:
                large = image.resize((640 * columns, 640 * rows))
                for place in range(columns * rows):
                    left, top = 640 * (place % columns), 640 * (place // columns)
                    tiles.append(normalised(large.crop((left, top, left + 640, top + 640))))
                count += 10 * rows * (10 * columns + 1)
            counts.append(columns * rows)
            places.append([columns, rows])
            first += "<image>" * count + words
        inputs = dict(tokenizer(first, return_tensors="pt", add_special_tokens=False))
        if wholes:
            inputs["pixel_values"] = torch.stack(wholes)
        if tiles:
            inputs |= {
                "pixel_values_local": torch.stack(tiles), "num_local_patches": counts,
                "patches_grid": places,
            }  # fmt: skip
        return inputs

    return process


OCR_GRIDS = {(768, 576): (3, 2), (480, 880): (1, 2), (384, 800): (1, 2)}
"""(width, height) of a picture → (columns, rows) of tiles."""
OCR = Family(
    DeepseekOCRForCausalLM,
    {
        "architectures": ["DeepseekOCRForCausalLM"], "model_type": "deepseek_vl_v2",
        "candidate_resolutions": [[1024, 1024]], "global_view_pos": "head", "tile_tag": "2D",
        "language_config": {
            **OCR_TEXT, "architectures": ["DeepseekV2ForCausalLM"], "use_mla": False,
            "kv_lora_rank": None, "q_lora_rank": None, "qk_nope_head_dim": 0,
            "qk_rope_head_dim": 0, "v_head_dim": 0, "lm_head": True, "rm_head": False,
        },
        "projector_config": {
            "input_dim": 64, "model_type": "mlp_projector", "n_embed": 64,
            "projector_type": "linear",
        },
        "vision_config": {
            "image_size": 1024, "mlp_ratio": 3.7362, "model_name": "deeplip_b_l",
            "model_type": "vision",
            "width": {
                "clip-l-14-224": {
                    "heads": 4, "image_size": 224, "layers": 2, "patch_size": 14, "width": 32,
                },
                "sam_vit_b": {
                    "downsample_channels": [16, 32], "global_attn_indexes": [1], "heads": 2,
                    "layers": 2, "width": 16,
                },
            },
        },
    },
    {
        "candidate_resolutions": [[1024, 1024]], "downsample_ratio": 4, "patch_size": 16,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "image_token": "<image>",
        "processor_class": "DeepseekVLV2Processor",
    },
    ("<image>",), "<image>", ocr_reference,
)  # fmt: skip
# ---------------------------------------------------------------- InternVL

INTERN_NAMES = (
    (r"^model\.language_model\.", "language_model.model."),
    (r"^lm_head\.", "language_model.lm_head."),
    (r"^model\.vision_tower\.", "vision_model."), (r"\.encoder\.layer\.", ".encoder.layers."),
    (r"\.cls_token$", ".class_embedding"), (r"\.position_embeddings$", ".position_embedding"),
    (r"\.patch_embeddings\.projection\.", ".patch_embedding."),
    (r"\.attention\.projection_layer\.", ".attn.proj."), (r"\.attention\.", ".attn."),
    (r"\.layernorm_before\.", ".norm1."), (r"\.layernorm_after\.", ".norm2."),
    (r"\.lambda_(\d)$", r".ls\1"), (r"^model\.multi_modal_projector\.layer_norm\.", "mlp1.0."),
    (r"^model\.multi_modal_projector\.linear_1\.", "mlp1.1."),
    (r"^model\.multi_modal_projector\.linear_2\.", "mlp1.3."),
)  # fmt: skip
"""Names in `transformers` → published ones."""


class InternVLChatModel(transformers.InternVLForConditionalGeneration):  # type: ignore[misc]
    """The model of `transformers`, under its published names."""

    def __init__(self, config: dict[str, Any]) -> None:
        vision = {
            **TOWER, "image_size": [32, 32], "patch_size": [8, 8], "attention_bias": True,
            "use_qk_norm": True, "norm_type": "rms_norm",
        }  # fmt: skip
        super().__init__(
            transformers.InternVLConfig(
                text_config={**TEXT, "model_type": "qwen2"}, vision_config=vision,
                image_token_id=300, tie_word_embeddings=False,
            )
        )  # fmt: skip

    def tensors(self) -> dict[str, torch.Tensor]:
        own, published = self.state_dict(), {}
        for name, tensor in own.items():
            if ".attention.k_proj." in name or ".attention.v_proj." in name:
                continue
            if ".attention.q_proj." in name:
                parts = [own[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
                name, tensor = name.replace("q_proj", "qkv"), torch.cat(parts)
            for pattern, replacement in INTERN_NAMES:
                name = re.sub(pattern, replacement, name)
            published[name] = tensor
        return published


def intern_reference(folder: Path) -> Any:
    """By the image processor that `transformers` has for the family."""
    tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    images_of = transformers.GotOcr2ImageProcessorPil(
        size={"height": 32, "width": 32}, min_patches=1, max_patches=4,
        image_mean=[0.485, 0.456, 0.406], image_std=[0.229, 0.224, 0.225],
    )  # fmt: skip

    def process(images: Any, text: str, return_tensors: str) -> dict[str, Any]:
        first, *others = text.split("<IMG_CONTEXT>")
        pixels = []
        for image, words in zip(images or (), others, strict=True):
            made = images_of(images=[image], crop_to_patches=True, return_tensors="pt")
            pixels.append(made["pixel_values"])
            first += f"<img>{'<IMG_CONTEXT>' * (4 * len(pixels[-1]))}</img>{words}"
        inputs = dict(tokenizer(first, return_tensors="pt", add_special_tokens=False))
        return {**inputs, **({"pixel_values": torch.cat(pixels)} if pixels else {})}

    return process


INTERN = Family(
    InternVLChatModel,
    {
        "architectures": ["InternVLChatModel"], "model_type": "internvl_chat",
        "downsample_ratio": 0.5, "dynamic_image_size": True, "force_image_size": 32,
        "llm_config": {**TEXT, "architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"},
        "max_dynamic_patch": 4, "min_dynamic_patch": 1, "ps_version": "v2", "select_layer": -1,
        "template": "internvl2_5", "use_thumbnail": True, "tie_word_embeddings": False,
        "vision_config": {
            **TOWER, "architectures": ["InternVisionModel"], "model_type": "intern_vit_6b",
            "norm_type": "rms_norm", "qk_normalization": True, "qkv_bias": True,
            "use_flash_attn": True, "drop_path_rate": 0.0, "initializer_factor": 1.0,
        },
    },
    {
        "crop_size": 448, "do_center_crop": True, "size": 448, "resample": 3,
        "feature_extractor_type": "CLIPFeatureExtractor", "image_mean": [0.485, 0.456, 0.406],
        "image_std": [0.229, 0.224, 0.225],
    },
    ("<IMG_CONTEXT>", "<img>", "</img>"), "<IMG_CONTEXT>", intern_reference,
)  # fmt: skip
# ---------------------------------------------------------------- Kimi-VL

KIMI_PARTS = seeing_models.FAMILIES["Kimi_K25ForConditionalGeneration"].config
KIMI_NAMES = {
    "mm_projector.proj.0.": "multi_modal_projector.linear_1.",
    "mm_projector.proj.2.": "multi_modal_projector.linear_2.",
    "mm_projector.": "multi_modal_projector.",
}


class KimiVLForConditionalGeneration(transformers.Kimi_K25ForConditionalGeneration):  # type: ignore[misc]
    """Kimi K2.5 of `transformers`, with the projector under Kimi-VL's names."""

    def __init__(self, config: dict[str, Any]) -> None:
        parts = copy.deepcopy(KIMI_PARTS) | {"tie_word_embeddings": False}
        parts["text_config"]["tie_word_embeddings"] = False
        super().__init__(transformers.Kimi_K25Config(**parts))

    def tensors(self) -> dict[str, torch.Tensor]:
        plain = transformers.Kimi_K25ForConditionalGeneration(self.config)
        plain.load_state_dict(self.state_dict())
        with tempfile.TemporaryDirectory() as folder:
            plain.save_pretrained(folder)
            seeing_models.respell(Path(folder) / "model.safetensors")
            own = load_file(Path(folder) / "model.safetensors")
        published = {}
        for name, tensor in own.items():
            for theirs, ours in KIMI_NAMES.items():
                name = name.replace(theirs, ours) if "multi_modal" not in name else name
            published[name] = tensor
        return published


def kimi_reference(folder: Path) -> Any:
    """Of 40 patches of 8 pixels at most, in whole squares of 16, on black."""
    tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(folder)

    def process(images: Any, text: str, return_tensors: str) -> dict[str, Any]:
        first, *others = text.split("<|media_pad|>")
        pixels, places = [], []
        for image, words in zip(images or (), others, strict=True):
            count = (image.width // 8) * (image.height // 8)
            scale = min(1.0, (40 / count) ** 0.5)
            width, height = int(image.width * scale), int(image.height * scale)
            columns, rows = -(-width // 16) * 2, -(-height // 16) * 2
            canvas = torch.zeros(3, rows * 8, columns * 8)
            small = np.array(image.resize((width, height), 3))
            canvas[:, :height, :width] = torch.from_numpy(small).permute(2, 0, 1) / 255
            patches = (canvas * 2 - 1).unflatten(2, (columns, 8)).unflatten(1, (rows, 8))
            pixels.append(patches.permute(1, 3, 0, 2, 4).flatten(0, 1))
            places.append([1, rows, columns])
            first += "<|media_pad|>" * (rows * columns // 4) + words
        inputs = dict(tokenizer(first, return_tensors="pt", add_special_tokens=False))
        if pixels:
            inputs |= {"pixel_values": torch.cat(pixels), "image_grid_thw": torch.tensor(places)}
        return inputs

    return process


KIMI = Family(
    KimiVLForConditionalGeneration,
    {
        "architectures": ["KimiVLForConditionalGeneration"], "model_type": "kimi_vl",
        "ignore_index": -100, "media_placeholder_token_id": 300, "pad_token_id": 0,
        "text_config": KIMI_PARTS["text_config"],
        "vision_config": {
            "model_type": "moonvit", "hidden_size": 32, "intermediate_size": 48,
            "num_hidden_layers": 2, "num_attention_heads": 4, "patch_size": 8,
            "init_pos_emb_height": 8, "init_pos_emb_width": 8, "merge_kernel_size": [2, 2],
        },
    },
    {
        "image_processor_type": "KimiVLImageProcessor", "in_token_limit": 40, "patch_size": 8,
        "merge_kernel_size": [2, 2], "pad_input": True, "num_pooled_tokens": 1024,
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    },
    ("<|media_pad|>", "<|media_start|>", "<|media_content|>", "<|media_end|>"), "<|media_pad|>",
    kimi_reference,
)  # fmt: skip
# ---------------------------------------------------------------- Phi-3-vision

PHI3_TEXT: dict[str, Any] = {
    **PHI_TEXT, "max_position_embeddings": 512, "original_max_position_embeddings": 512,
    "tie_word_embeddings": False,
}  # fmt: skip
PHI3_FACTORS = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5, 1.6, 1.7]


class Phi3VForCausalLM(Published):
    text_prefix = ""
    part = "model.vision_embed_tokens."

    def create_text(self, config: dict[str, Any]) -> Any:
        rope = {
            "rope_type": "longrope", "long_factor": PHI3_FACTORS, "short_factor": PHI3_FACTORS,
            "rope_theta": 10000.0, "original_max_position_embeddings": 512,
        }  # fmt: skip
        return transformers.Phi3ForCausalLM(
            transformers.Phi3Config(**PHI3_TEXT, rope_parameters=rope)
        )

    def create(self, config: dict[str, Any]) -> None:
        vision = transformers.CLIPVisionConfig(**config["vision_config"])
        self.img_processor = transformers.CLIPVisionModel(vision)
        wide, width = 4 * vision.hidden_size, PHI3_TEXT["hidden_size"]
        self.glb_GN = nn.Parameter(torch.randn(1, 1, wide))
        self.sub_GN = nn.Parameter(torch.randn(1, 1, 1, wide))
        self.img_projection = nn.Sequential(
            nn.Linear(wide, width), nn.GELU(), nn.Linear(width, width)
        )

    def tensors(self) -> dict[str, torch.Tensor]:
        published = {}
        for name, tensor in self.state_dict().items():
            if name.startswith("text."):
                published[name.removeprefix("text.")] = tensor
                continue
            if name.startswith("img_processor.") and ".vision_model." not in name:
                name = name.replace("img_processor.", "img_processor.vision_model.")
            published[self.part + name] = tensor
        return published

    def rows(self, canvases: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat([self.of_canvas(canvas) for canvas in canvases])

    def of_canvas(self, canvas: torch.Tensor) -> torch.Tensor:
        """Return the rows of a picture, [3, height, width] of whole tiles of 32 pixels."""
        whole = nn.functional.interpolate(canvas[None], size=(32, 32), mode="bicubic")
        lines = [*self.lines(canvas), self.glb_GN[0], *self.lines(whole[0])]
        return self.img_projection(torch.cat(lines))

    def lines(self, canvas: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows of each line of squares of 16 pixels."""
        height, width = (side // 32 for side in canvas.shape[1:])
        features = {}
        for row in range(height):
            for column in range(width):
                tile = canvas[None, :, 32 * row : 32 * row + 32, 32 * column : 32 * column + 32]
                states = self.img_processor(tile, output_hidden_states=True).hidden_states[-2]
                features[row, column] = states[0, 1:].view(4, 4, -1)
        made = []
        for y in range(2 * height):
            for x in range(2 * width):
                own = features[y // 2, x // 2][2 * (y % 2) :, 2 * (x % 2) :]
                made.append(torch.cat([own[0, 0], own[0, 1], own[1, 0], own[1, 1]])[None])
            made.append(self.sub_GN[0, 0])
        return made


def phi3_reference(folder: Path) -> Any:
    """At most 4 tiles, of which as many stand side by side as the picture's shape allows."""
    tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    mean = torch.tensor([0.48145466, 0.4578275, 0.40821073])[:, None, None]
    deviation = torch.tensor([0.26862954, 0.26130258, 0.27577711])[:, None, None]

    def process(images: Any, text: str, return_tensors: str) -> dict[str, Any]:
        first, *others = text.split("<|image|>")
        canvases = []
        for image, words in zip(images or (), others, strict=True):
            width, height, top, size, turned = PHI3_SIZES[image.size]
            own = image.transpose(5) if turned else image
            small = torch.from_numpy(np.array(own.resize((width, height), 2)))
            canvas = torch.full((size, width, 3), 255, dtype=torch.uint8)
            canvas[top : top + height] = small
            canvas = canvas.transpose(0, 1) if turned else canvas
            canvases.append((canvas.permute(2, 0, 1) / 255 - mean) / deviation)
            rows, columns = (side // 16 for side in canvas.shape[:2])
            first += "<|image|>" * (rows * (columns + 1) + 1 + 2 * 3) + words
        inputs = dict(tokenizer(first, return_tensors="pt", add_special_tokens=False))
        return {**inputs, **({"canvases": canvases} if canvases else {})}

    return process


PHI3_SIZES = {
    (96, 72): (64, 48, 8, 64, False), (60, 110): (64, 34, 15, 64, True),
    (48, 100): (64, 30, 1, 32, True),
}  # fmt: skip
"""A picture's size → width, height, place from above, and canvas of the picture with the longer
side lying."""
PHI3 = Family(
    Phi3VForCausalLM,
    {
        **PHI3_TEXT, "architectures": ["Phi3VForCausalLM"], "model_type": "phi3_v",
        "embd_layer": {
            "embedding_cls": "image", "hd_transform_order": "sub_glb", "projection_cls": "mlp",
            "use_hd_transform": True, "with_learnable_separator": True,
        },
        "img_processor": {
            "image_dim_out": 32, "model_name": "openai/clip-vit-large-patch14-336",
            "name": "clip_vision_model", "num_img_tokens": 4,
        },
        "rope_theta": 10000.0,
        "rope_scaling": {
            "type": "su", "long_factor": PHI3_FACTORS, "short_factor": PHI3_FACTORS,
        },
        "vision_config": {**TOWER, "num_hidden_layers": 3, "hidden_act": "quick_gelu"},
    },
    {
        "image_processor_type": "Phi3VImageProcessor", "num_crops": 4, "num_img_tokens": 4,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
    ("<|image|>",), "<|image|>", phi3_reference,
)  # fmt: skip
# ---------------------------------------------------------------- Ultravox

WHISPER: dict[str, Any] = {
    "num_mel_bins": 16, "max_source_positions": 50, "d_model": 32, "encoder_layers": 2,
    "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "init_std": 0.2,
}  # fmt: skip


class UltravoxModel(Published):
    text_prefix = "language_model."

    def create_text(self, config: dict[str, Any]) -> Any:
        return transformers.LlamaForCausalLM(transformers.LlamaConfig(**TEXT))

    def create(self, config: dict[str, Any]) -> None:
        from transformers.models.whisper.modeling_whisper import WhisperEncoder

        self.audio_tower = WhisperEncoder(transformers.WhisperConfig(**WHISPER))
        parts: dict[str, nn.Module] = {
            "ln_pre": nn.RMSNorm(32 * 3, 1e-6), "linear_1": nn.Linear(32 * 3, 40, bias=False),
            "linear_2": nn.Linear(20, 64, bias=False),
        }  # fmt: skip
        self.middle = config["projector_ln_mid"]
        parts |= {"ln_mid": nn.RMSNorm(20, 1e-6)} if self.middle else {}
        parts |= {} if self.middle else {"ln_post": nn.RMSNorm(64, 1e-6)}
        self.multi_modal_projector = nn.ModuleDict(parts)

    def rows(self, windows: list[tuple[torch.Tensor, int]]) -> torch.Tensor:
        return torch.cat([self.of_window(window, frames) for window, frames in windows])

    def of_window(self, window: torch.Tensor, frames: int) -> torch.Tensor:
        """window: [bands, frames], of which so many are not fill."""
        tower, parts = self.audio_tower, self.multi_modal_projector
        states = gelu(tower.conv2(gelu(tower.conv1(window)))).T
        states = states + tower.embed_positions.weight[: len(states)]
        true = (frames + 1) // 2
        for layer in tower.layers:
            own = layer.self_attn
            normed = layer.self_attn_layer_norm(states)
            query, key, value = (
                project(rows).unflatten(-1, (4, 8)).transpose(0, 1)
                for project, rows in (
                    (own.q_proj, normed), (own.k_proj, normed[:true]), (own.v_proj, normed[:true]),
                )
            )  # fmt: skip
            read = (query @ key.mT / 8**0.5).softmax(-1) @ value
            states = states + own.out_proj(read.transpose(0, 1).flatten(1))
            states = states + layer.fc2(gelu(layer.fc1(layer.final_layer_norm(states))))
        states = tower.layer_norm(states)
        fill = states.new_zeros(-len(states) % 3, 32)
        stacks = torch.cat([states, fill]).view(-1, 3 * 32)
        values, gate = parts["linear_1"](parts["ln_pre"](stacks)).split(20, dim=-1)
        hidden = values * gate * gate.sigmoid()
        hidden = parts["linear_2"](parts["ln_mid"](hidden) if self.middle else hidden)
        return (hidden if self.middle else parts["ln_post"](hidden))[: -(-frames // 6)]


gelu = nn.functional.gelu


RESERVED = "<|reserved_special_token_0|>"
"""Stands for a recording where `<|audio|>` has no embedding."""


def ultravox_reference(folder: Path) -> Any:
    """Each recording alone: in a batch, the published code fills shorter ones up."""
    tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    extractor = transformers.WhisperFeatureExtractor(feature_size=16)

    def process(images: Any, text: str, return_tensors: str) -> dict[str, Any]:
        first, *others = text.split(RESERVED)
        windows: list[tuple[torch.Tensor, int]] = []
        for sound, words in zip(images or (), others, strict=True):
            made = extractor(
                sound, sampling_rate=16_000, padding="longest", pad_to_multiple_of=160,
                truncation=False, return_attention_mask=True, return_tensors="pt",
            )  # fmt: skip
            total = int(made["attention_mask"].sum())
            for start in range(0, total, 100):
                window = made["input_features"][0, :, start : start + 100]
                frames = window.shape[1]
                fill = 100 - frames if start else 0
                windows.append((nn.functional.pad(window, (0, fill)), frames))
                first += RESERVED * -(-frames // 6)
            first += words
        inputs = dict(tokenizer(first, return_tensors="pt", add_special_tokens=False))
        return {**inputs, **({"windows": windows} if windows else {})}

    return process


ULTRAVOX = Family(
    UltravoxModel,
    {
        "architectures": ["UltravoxModel"], "model_type": "ultravox", "audio_model_id": None,
        "audio_config": {**WHISPER, "model_type": "whisper"}, "audio_token_index": 320,
        "hidden_size": 40, "projector_act": "swiglu", "projector_ln_mid": True, "stack_factor": 3,
        "text_config": {**TEXT, "model_type": "llama"}, "text_model_id": None, "vocab_size": 320,
    },
    {"feature_extractor_type": "WhisperFeatureExtractor", "feature_size": 16},
    (RESERVED, *(f"<|reserved_special_token_{number}|>" for number in range(1, 20)), "<|audio|>"),
    RESERVED, ultravox_reference,
)  # fmt: skip
FAMILIES = {
    "UltravoxModel": ULTRAVOX,
    "Phi3VForCausalLM": PHI3,
    "KimiVLForConditionalGeneration": KIMI,
    "InternVLChatModel": INTERN,
    "DeepseekOCRForCausalLM": OCR,
    "Phi4MMForCausalLM": PHI,
    "MiniCPMV": MINICPMV,
    "MiniCPMO": MINICPMV._replace(
        kind=MiniCPMO,
        config=MINICPMV.config
        | {"architectures": ["MiniCPMO"], "model_type": "minicpmo", "version": "2.6"},
    ),
}
HEARING = ("UltravoxModel",)
"""Those that take recordings."""


def save(architecture: str, folder: Path, **changes: Any) -> Any:
    """Save a random model with all that it needs; return the model."""
    family = FAMILIES[architecture]
    torch.manual_seed(7)
    config = {**copy.deepcopy(family.config), **changes}
    model = family.kind(config).float().eval()
    randomize(model)
    tensors = {name: tensor.contiguous() for name, tensor in model.tensors().items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    template = TEMPLATE.replace("PICTURE", family.written)
    template = template.replace("'image'", "'audio'") if architecture in HEARING else template
    tokenizer_with(family.specials, template).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(family.options))
    return model
