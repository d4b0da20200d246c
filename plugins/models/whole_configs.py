"""Configurations of multimodal checkpoints whose classes are in code of their own: of the whole,
with that of the text part as `text_config`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from transformers import (
    CLIPVisionConfig,
    DeepseekV3Config,
    Idefics2VisionConfig,
    InternVLVisionConfig,
    Kimi_K25Config,
    LlamaConfig,
    Phi3Config,
    Phi4MultimodalConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.models.whisper.configuration_whisper import WhisperConfig

from ...core.errors import ConfigError
from ...core.protocols.field_kinds import COUNT, INTEGER, OBJECT, POSITIVE, FieldKind
from .configs import wrong

Whole: Any = PreTrainedConfig
"""Of a type that `transformers` does not have: any fields."""
HEAD_DIM = 128
"""Of MiniCPM-V's resampler."""


class MiniCPMVConfig:
    """MiniCPM-V and MiniCPM-o, whose text part's fields stand among those of the whole."""

    config_fields: ClassVar[Mapping[str, FieldKind]] = {
        "hidden_size": COUNT.required(), "query_num": COUNT.required(),
        "vision_config": OBJECT.required(),
    }  # fmt: skip
    text_configs: ClassVar[Mapping[str, type[Any]]] = {
        "2.6": Qwen2Config, "4.0": LlamaConfig, "4.5": Qwen3Config,
    }  # fmt: skip
    """By version. Others have another tower or resampler."""
    of_parts = ("vision_config", "audio_config", "tts_config", "slice_config")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        version = config_dict.get("version")
        if str(version) not in cls.text_configs:
            raise wrong("version", version, f"one of {', '.join(cls.text_configs)} for this model")
        if config_dict["hidden_size"] % HEAD_DIM:
            raise wrong("hidden_size", config_dict["hidden_size"], f"a multiple of {HEAD_DIM}")
        dropped = {*cls.of_parts, "model_type", "architectures", "auto_map"}
        text = {name: value for name, value in config_dict.items() if name not in dropped}
        vision = {k: v for k, v in config_dict["vision_config"].items() if k != "model_type"}
        if config_dict.get("drop_vision_last_layer"):
            vision["num_hidden_layers"] -= 1
        return Whole(
            architectures=config_dict["architectures"],
            text_config=cls.text_configs[str(version)](**text),
            vision_config=Idefics2VisionConfig(**vision),
            query_num=config_dict["query_num"],
            tie_word_embeddings=bool(config_dict.get("tie_word_embeddings")),
        )


class InternVLChatConfig:
    """InternVL 2 to 3.5, as they were published; the text part is read by its own type."""

    config_fields: ClassVar[Mapping[str, FieldKind]] = {
        "downsample_ratio": POSITIVE.not_null(), "vision_config": OBJECT,
    }  # fmt: skip
    vision_names: ClassVar[Mapping[str, str]] = {
        "qkv_bias": "attention_bias", "qk_normalization": "use_qk_norm",
        **{
            name: name
            for name in (
                "hidden_act", "hidden_size", "image_size", "intermediate_size", "layer_norm_eps",
                "norm_type", "num_attention_heads", "num_hidden_layers", "patch_size",
            )
        },
    }  # fmt: skip
    """Field of the tower → its name in `transformers`."""
    of_parts = ("auto_map", "llm_config", "model_type", "vision_config")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        own = {
            "downsample_ratio": 0.5, "ps_version": "v1", "select_layer": -1,
            "tie_word_embeddings": False,
            **{name: value for name, value in config_dict.items() if name not in cls.of_parts},
        }  # fmt: skip
        vision = None
        if (published := config_dict.get("vision_config")) is not None:
            named = cls.vision_names.items()
            fields = {ours: published[theirs] for theirs, ours in named if theirs in published}
            if own["select_layer"] < -1:  # Of the layers behind it nothing is used.
                fields["num_hidden_layers"] += own["select_layer"] + 1
            vision = InternVLVisionConfig(**fields)
        return Whole(**own, vision_config=vision)


class KimiVLConfig:
    """Kimi-VL, as Kimi K2.5 of `transformers`."""

    config_fields: ClassVar[Mapping[str, FieldKind]] = {
        "media_placeholder_token_id": INTEGER.required(), "text_config": OBJECT.required(),
        "vision_config": OBJECT.required(),
    }  # fmt: skip
    vision_names: ClassVar[Mapping[str, str]] = {
        "init_pos_emb_height": "pos_emb_height", "init_pos_emb_width": "pos_emb_width",
        **{
            name: name
            for name in (
                "hidden_size", "intermediate_size", "merge_kernel_size", "num_attention_heads",
                "num_hidden_layers", "patch_size",
            )
        },
    }  # fmt: skip

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        published, text = config_dict["vision_config"], config_dict["text_config"]
        named = cls.vision_names.items()
        vision = {ours: published[theirs] for theirs, ours in named if theirs in published}
        dropped = {"auto_map", "model_type"}
        return Kimi_K25Config(
            architectures=config_dict["architectures"],
            text_config=DeepseekV3Config(**{k: v for k, v in text.items() if k not in dropped}),
            vision_config=vision, projection_hidden_size=published["hidden_size"],
            image_token_id=config_dict["media_placeholder_token_id"],
            tie_word_embeddings=bool(config_dict.get("tie_word_embeddings")),
        )  # fmt: skip


class DeepseekVlV2Config:
    """DeepSeek-OCR, under the type that it shares with DeepSeek-VL2."""

    config_fields: ClassVar[Mapping[str, FieldKind]] = {
        "language_config": OBJECT.required(), "vision_config": OBJECT.required(),
    }  # fmt: skip

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        try:
            from transformers import DeepseekOcr2TextConfig, UnlimitedOcrVisionConfig
        except ImportError as error:
            raise ConfigError(
                f"model: DeepSeek-OCR takes transformers 5.24 or newer ({error})", param="model"
            ) from error
        text = config_dict["language_config"]
        if text.get("use_mla"):
            raise wrong("language_config.use_mla", True, "false for this model")
        sizes = config_dict["vision_config"]["width"]
        sam, clip = sizes["sam_vit_b"], sizes["clip-l-14-224"]
        vision: dict[str, Any] = {
            "sam_config": {
                "hidden_size": sam["width"], "num_hidden_layers": sam["layers"],
                "num_attention_heads": sam["heads"], "mlp_dim": 4 * sam["width"],
                "global_attn_indexes": sam["global_attn_indexes"],
                "downsample_channels": sam["downsample_channels"],
            },
            "encoder_config": {
                "hidden_size": clip["width"], "num_hidden_layers": clip["layers"],
                "num_attention_heads": clip["heads"], "intermediate_size": 4 * clip["width"],
                "image_size": clip["image_size"], "patch_size": clip["patch_size"],
            },
        }  # fmt: skip
        dropped = {"architectures", "auto_map", "model_type"}
        return Whole(
            architectures=config_dict["architectures"],
            text_config=DeepseekOcr2TextConfig(
                **{name: value for name, value in text.items() if name not in dropped}
            ),
            vision_config=UnlimitedOcrVisionConfig(**vision),
            tie_word_embeddings=bool(config_dict.get("tie_word_embeddings")),
        )


class Phi3VConfig:
    """Phi-3-vision and Phi-3.5-vision, whose text part's fields stand among those of the whole. The
    tower is not described, and always the same, but that `vision_config` may say otherwise."""

    config_fields: ClassVar[Mapping[str, FieldKind]] = {
        "img_processor": OBJECT.required(), "vision_config": OBJECT,
    }  # fmt: skip
    tower: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "quick_gelu", "hidden_size": 1024, "image_size": 336,
        "intermediate_size": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
        "patch_size": 14,
    }  # fmt: skip
    """CLIP's large one."""
    of_parts = ("embd_layer", "img_processor", "vision_config")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        dropped = {*cls.of_parts, "auto_map", "model_type"}
        text = {name: value for name, value in config_dict.items() if name not in dropped}
        if (scaling := text.pop("rope_scaling", None)) is not None:
            text["rope_parameters"] = {
                "rope_type": "longrope", "rope_theta": text.get("rope_theta", 10000.0),
                "original_max_position_embeddings": text["original_max_position_embeddings"],
                **{name: scaling[name] for name in ("long_factor", "short_factor")},
            }  # fmt: skip
        vision = {**cls.tower, **(config_dict.get("vision_config") or {})}
        vision["num_hidden_layers"] += config_dict["img_processor"].get("layer_idx", -2) + 1
        return Whole(
            architectures=config_dict["architectures"], text_config=Phi3Config(**text),
            vision_config=CLIPVisionConfig(**vision),
            tie_word_embeddings=bool(config_dict.get("tie_word_embeddings")),
        )  # fmt: skip


class Phi4MMConfig:
    """Phi-4-multimodal, as it was published: its tower is not described, and always the same, but
    that `vision_config` may say otherwise."""

    config_fields: ClassVar[Mapping[str, FieldKind]] = {
        "audio_processor": OBJECT.required(), "embd_layer": OBJECT.required(),
        "vision_config": OBJECT,
    }  # fmt: skip
    audio_names: ClassVar[Mapping[str, str]] = {
        "attention_dim": "hidden_size", "attention_heads": "num_attention_heads",
        "linear_units": "intermediate_size",
        "depthwise_seperable_out_channel": "depthwise_separable_out_channel",
        **{
            name: name
            for name in (
                "activation", "audio_token_id", "chunk_size", "conv_activation", "conv_glu_type",
                "depthwise_multiplier", "ext_pw_out_channel", "input_size", "kernel_size",
                "left_chunk", "num_blocks", "time_reduction",
            )
        },
    }  # fmt: skip
    """Field of the audio encoder → its name in `transformers`."""
    of_parts = ("audio_processor", "embd_layer", "img_processor", "vision_lora", "speech_lora")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        published = config_dict["audio_processor"]["config"]
        layers = config_dict["embd_layer"]
        audio = {new: published[old] for old, new in cls.audio_names.items() if old in published}
        if (conv := published.get("nemo_conv_settings")) is not None:
            audio["nemo_conv_channels"] = conv["conv_channels"]
        if (bias := published.get("relative_attention_bias_args")) is not None:
            audio["bias_max_distance"] = bias["t5_bias_max_distance"]
        vision = {"crop_size": layers["image_embd_layer"]["crop_size"]}
        vision |= config_dict.get("vision_config") or {}
        dropped = {*cls.of_parts, "model_type", "auto_map", "vision_config"}
        own = {name: value for name, value in config_dict.items() if name not in dropped}
        return Phi4MultimodalConfig(**own, vision_config=vision, audio_config=audio)


class UltravoxConfig:
    """Ultravox, with all of its parts in one folder; the text part is read by its own type."""

    config_fields: ClassVar[Mapping[str, FieldKind]] = {
        "audio_config": OBJECT, "hidden_size": COUNT, "stack_factor": COUNT, "text_config": OBJECT,
    }  # fmt: skip
    defaults: ClassVar[Mapping[str, Any]] = {
        "audio_token_index": None, "hidden_size": 4096, "projector_act": "swiglu",
        "projector_ln_mid": False, "stack_factor": 8, "tie_word_embeddings": False,
    }  # fmt: skip
    of_parts = ("audio_config", "auto_map", "model_type", "text_config", "vocab_size")

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any]) -> Any:
        for part in ("text", "audio"):
            name = f"{part}_model_id"
            if config_dict.get(name) is not None and not config_dict.get(f"{part}_config"):
                raise wrong(
                    name, config_dict[name],
                    f"null, with that model's config.json as {part}_config and its weights in the "
                    "folder: other repositories are not read",
                )  # fmt: skip
        own = {name: value for name, value in config_dict.items() if name not in cls.of_parts}
        audio = dict(config_dict.get("audio_config") or {})
        kind = audio.pop("model_type", "whisper")
        encoder = WhisperConfig(**audio) if kind == "whisper" else Whole(**audio, model_type=kind)
        return Whole(**{**cls.defaults, **own}, audio_config=encoder)
