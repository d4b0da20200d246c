"""Of multimodal checkpoints the text part says what `transformers` says of the whole without
images."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file, save_file

from jackfield import EngineConfig
from jackfield.core.errors import ConfigError
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.loading.text_part import inner_name
from jackfield.core.registry import load_plugins
from jackfield.plugins.conformance.paged_model import PagedModel
from jackfield.plugins.models.text_parts import TEXT_PARTS

TEXT = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
    "max_position_embeddings": 128, "initializer_range": 0.3,
}  # fmt: skip
VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
QWEN_VISION = {
    "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
    "embed_dim": 16,
}  # fmt: skip
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}}
GLM_ROPE = {
    "rope_parameters": {
        "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1],
        "partial_rotary_factor": 0.5,
    }
}  # fmt: skip
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (TEXT, VISION),
    "Gemma4ForConditionalGeneration": (
        TEXT
        | {
            "global_head_dim": 32, "layer_types": ["sliding_attention", "full_attention"],
            "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96,
        },
        VISION,
    ),
    "DeepseekOcr2ForConditionalGeneration": (
        TEXT | EXPERTS | {
            "n_routed_experts": 4, "n_shared_experts": 1, "mlp_layer_types": ["dense", "sparse"],
            "topk_method": "group_limited_greedy", "n_group": 2, "topk_group": 1,
            "routed_scaling_factor": 1.5,
        },
        {
            "sam_config": {
                "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
                "output_channels": 16, "downsample_channels": [16, 32],
            },
            "encoder_config": VISION | {"hidden_size": 32, "num_key_value_heads": 2},
        },
    ),
    "Glm4vForConditionalGeneration": (TEXT | GLM_ROPE, QWEN_VISION),
    "Glm4vMoeForConditionalGeneration": (
        TEXT | GLM_ROPE | EXPERTS | {"n_routed_experts": 4, "first_k_dense_replace": 1}, QWEN_VISION
    ),
    "GlmOcrForConditionalGeneration": (TEXT | GLM_ROPE, QWEN_VISION),
    "Idefics3ForConditionalGeneration": (TEXT | {"model_type": "llama"}, VISION),
    "InternVLForConditionalGeneration": (TEXT | {"model_type": "qwen2"}, VISION),
    "Llama4ForConditionalGeneration": (
        TEXT | {"num_local_experts": 2, "intermediate_size_mlp": 48},
        VISION | {"vision_output_dim": 16, "projector_input_dim": 16, "projector_output_dim": 16},
    ),
    "LlavaForConditionalGeneration": (
        TEXT | {"model_type": "llama"}, VISION | {"model_type": "clip_vision_model"}
    ),
    "MiniMaxM3SparseForConditionalGeneration": (
        TEXT
        | {
            "vocab_size": 151, "num_hidden_layers": 3,
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "layer_types": ["full_attention", "minimax_m3_sparse", "minimax_m3_sparse"],
            "num_local_experts": 4, "num_experts_per_tok": 2, "dense_intermediate_size": 40,
            "shared_intermediate_size": 24, "swiglu_limit": 0.5, "rotary_dim": 8,
            "index_n_heads": 1, "index_head_dim": 8, "index_block_size": 8,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5,
            },
        },
        VISION | {"spatial_merge_size": 2},
    ),
    "AriaForConditionalGeneration": (TEXT | {"moe_num_experts": 4, "moe_topk": 2}, VISION),
    "DeepseekVLForConditionalGeneration": (TEXT | {"model_type": "llama"}, VISION),
    "HyperCLOVAXVisionV2ForConditionalGeneration": (
        TEXT | {"model_type": "hyperclovax"}, QWEN_VISION
    ),
    "Idefics2ForConditionalGeneration": (TEXT | {"model_type": "mistral"}, VISION),
    "LightOnOcrForConditionalGeneration": (
        TEXT | {"model_type": "qwen3"}, VISION | {"model_type": "pixtral"}
    ),
    "LlavaNextVideoForConditionalGeneration": (
        TEXT | {"model_type": "llama"}, VISION | {"model_type": "clip_vision_model"}
    ),
    "MiniCPMV4_6ForConditionalGeneration": (
        TEXT
        | {
            "model_type": "qwen3_5_text", "linear_num_key_heads": 2, "linear_num_value_heads": 2,
            "linear_key_head_dim": 8, "linear_value_head_dim": 8,
            "layer_types": ["linear_attention", "full_attention"],
        },
        VISION,
    ),
    "Ovis2ForConditionalGeneration": (
        TEXT | {"model_type": "qwen2"},
        VISION | {"vocab_size": 32, "num_visual_indicator_tokens": 5},
    ),
    "VideoLlama3ForConditionalGeneration": (TEXT | {"model_type": "qwen2"}, VISION),
    "VideoLlavaForConditionalGeneration": (
        TEXT | {"model_type": "llama"}, VISION | {"model_type": "clip_vision_model"}
    ),
    "VipLlavaForConditionalGeneration": (
        TEXT | {"model_type": "llama"}, VISION | {"model_type": "clip_vision_model"}
    ),
    "Mistral3ForConditionalGeneration": (
        TEXT | {"model_type": "mistral"}, VISION | {"model_type": "pixtral"}
    ),
    "PaddleOCRVLForConditionalGeneration": (TEXT | MROPE | {"use_bias": True}, VISION),
    "Qwen2VLForConditionalGeneration": (TEXT | MROPE, QWEN_VISION),
    "Qwen2_5_VLForConditionalGeneration": (TEXT | MROPE, QWEN_VISION),
    "Qwen3VLForConditionalGeneration": (TEXT | MROPE, QWEN_VISION),
    "Qwen3VLMoeForConditionalGeneration": (TEXT | MROPE | EXPERTS, QWEN_VISION),
    "Qwen3_5ForConditionalGeneration": (
        TEXT
        | {
            "linear_num_key_heads": 2, "linear_num_value_heads": 2, "linear_key_head_dim": 8,
            "linear_value_head_dim": 8, "layer_types": ["linear_attention", "full_attention"],
        },
        QWEN_VISION,
    ),
}  # fmt: skip
HYPERCLOVA = {
    "HCXVisionForCausalLM": "language_model.", "HCXVisionV2ForCausalLM": "model.language_model.",
}  # fmt: skip
"""Architecture → what stands before the names of its text part."""
OLD = Version(transformers.__version__) < Version("5.24")
PROMPT = [3 + 7 * i % 89 for i in range(20)]


def save(architecture: str, folder: Path) -> Any:
    """Save and return a random model."""
    if not hasattr(transformers, architecture):
        pytest.skip(f"transformers {transformers.__version__} has no {architecture}")
    if architecture == "AriaForConditionalGeneration" and OLD:
        pytest.skip("AriaConfig of transformers 5.17 takes no dicts")
    kind = getattr(transformers, architecture)
    text, vision = copy.deepcopy(CASES[architecture])
    torch.manual_seed(5)
    model = kind(kind.config_class(text_config=text, vision_config=vision)).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return model


@torch.no_grad()
@pytest.mark.parametrize("architecture", CASES)
def test_a_text_part_equals_the_whole_without_images(architecture: str, tmp_path: Path) -> None:
    model = save(architecture, tmp_path)
    if architecture == "Llama4ForConditionalGeneration":
        # Without images, the whole fails in transformers 5.24: it reads `image_outputs` of its text
        # part's output, which has none.
        model = model.language_model
    want = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    paged = PagedModel(tmp_path, "float32")
    got = torch.cat([paged.run({0: part})[0] for part in (PROMPT[:7], PROMPT[7:])])
    torch.testing.assert_close(got.cpu(), want, atol=1e-3, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize(
    "architecture",
    [
        "Glm4vForConditionalGeneration", "Glm4vMoeForConditionalGeneration",
        "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
    ],
)  # fmt: skip
def test_heads_share_the_hidden_size_where_nothing_says_more(
    architecture: str, tmp_path: Path
) -> None:
    """Classes of the text part alone have other defaults."""
    model = save(architecture, tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    raw["text_config"].pop("head_dim", None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    want = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    got = PagedModel(tmp_path, "float32").run({0: PROMPT})[0]
    torch.testing.assert_close(got.cpu(), want, atol=1e-3, rtol=0)


@torch.no_grad()
def test_a_whole_may_tie_what_its_text_part_does_not(tmp_path: Path) -> None:
    """InternVL's class ties by default, and Qwen 2's does not: a file need not say so."""
    kind = transformers.InternVLForConditionalGeneration
    torch.manual_seed(5)
    parts = {"text_config": TEXT | {"model_type": "qwen2"}, "vision_config": VISION}
    model = kind(kind.config_class(**parts)).float().eval()
    model.save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    for part in (raw, raw["text_config"]):
        part.pop("tie_word_embeddings", None)
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert not [name for name in load_file(tmp_path / "model.safetensors") if "lm_head" in name]
    want = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    got = PagedModel(tmp_path, "float32").run({0: PROMPT})[0]
    torch.testing.assert_close(got.cpu(), want, atol=1e-3, rtol=0)


@torch.no_grad()
@pytest.mark.parametrize("architecture", HYPERCLOVA)
def test_a_text_part_of_a_type_that_transformers_lacks(architecture: str, tmp_path: Path) -> None:
    if not hasattr(transformers, "HyperCLOVAXForCausalLM"):
        pytest.skip(f"transformers {transformers.__version__} has no HyperCLOVAXForCausalLM")
    kind: Any = transformers.HyperCLOVAXForCausalLM
    torch.manual_seed(5)
    fields = TEXT | {"logits_scaling": 2.0, "use_post_norm": True, "tie_word_embeddings": False}
    model = kind(kind.config_class(**fields)).float().eval()
    prefix = HYPERCLOVA[architecture]
    tensors = {f"{prefix}{name}": tensor.clone() for name, tensor in model.state_dict().items()}
    tensors |= {"vision_model.x.weight": torch.ones(4), "model.mm_projector.bias": torch.ones(4)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    inner = fields | {"architectures": ["HyperCLOVAXForCausalLM"], "model_type": "hyperclovax"}
    config = {"model_type": "vlm", "text_config": inner, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [architecture]}))
    want = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    got = PagedModel(tmp_path, "float32").run({0: PROMPT})[0]
    torch.testing.assert_close(got.cpu(), want, atol=1e-3, rtol=0)


@torch.no_grad()
def test_the_part_of_qwen3_omni_that_writes_text(tmp_path: Path) -> None:
    """`thinker` beside a `talker`, which is not loaded."""
    name = "Qwen3OmniMoeThinkerForConditionalGeneration"
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    kind: Any = getattr(transformers, name)
    torch.manual_seed(5)
    audio = {
        "d_model": 16, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 16,
        "output_dim": 32, "num_mel_bins": 8,
    }  # fmt: skip
    parts = {"text_config": TEXT | MROPE | EXPERTS, "vision_config": QWEN_VISION}
    model = kind(kind.config_class(**copy.deepcopy(parts), audio_config=audio)).float().eval()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors = {f"thinker.{name}": tensor for name, tensor in tensors.items()}
    tensors["talker.model.norm.weight"] = torch.ones(3)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    path = tmp_path / "config.json"
    whole = {"thinker_config": json.loads(path.read_text()), "model_type": "qwen3_omni_moe"}
    names = {"architectures": ["Qwen3OmniMoeForConditionalGeneration"]}
    path.write_text(json.dumps(whole | names))
    want = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    got = PagedModel(tmp_path, "float32").run({0: PROMPT})[0]
    torch.testing.assert_close(got.cpu(), want, atol=1e-4, rtol=0)


@torch.no_grad()
def test_a_text_part_whose_head_has_rows_for_text_alone(tmp_path: Path) -> None:
    """Apertus 1.5: images and sound are tokens, too, behind those of text."""
    name = "Apertus1p5ForConditionalGeneration"
    if not hasattr(transformers, name):
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    kind: Any = getattr(transformers, name)
    torch.manual_seed(5)
    config = kind.config_class(
        text_config=TEXT | {"vocab_size": 120, "output_vocab_size": 96},
        vision_config={
            "codebook_size": 8, "embed_dim": 4, "latent_channels": 4, "base_channels": 32,
            "channel_multiplier": [1, 1], "num_res_blocks": 1, "resolution": 16,
        },
        audio_config={"model_type": "wavtokenizer_encoder", "codebook_size": 8},
        image_token_id=90, audio_token_id=91, image_token_offset=96, audio_token_offset=104,
    )  # fmt: skip
    model = kind(config).float().eval()
    model.save_pretrained(tmp_path)
    want = model(torch.tensor([PROMPT]), use_cache=False).logits[0]
    got = PagedModel(tmp_path, "float32").run({0: PROMPT})[0]
    assert got.shape == (len(PROMPT), 96)
    torch.testing.assert_close(got.cpu(), want, atol=1e-3, rtol=0)


def test_published_experts_of_qwen3_vl_are_stored_by_columns(tmp_path: Path) -> None:
    save("Qwen3VLMoeForConditionalGeneration", tmp_path)
    logits = PagedModel(tmp_path, "float32").run({0: PROMPT})[0]
    tensors = load_file(tmp_path / "model.safetensors")
    for name, tensor in tensors.items():
        if ".experts." in name:
            tensors[name] = tensor.transpose(1, 2).contiguous()
    save_file(tensors, tmp_path / "model.safetensors")
    torch.testing.assert_close(PagedModel(tmp_path, "float32").run({0: PROMPT})[0], logits)


def test_names_of_a_text_part() -> None:
    names = {
        "model.language_model.layers.0.mlp.up_proj.weight": "model.layers.0.mlp.up_proj.weight",
        "language_model.model.norm.weight": "model.norm.weight",
        "language_model.lm_head.weight": "lm_head.weight",
        "model.language_model.lm_head.weight": "lm_head.weight",
        "model.language_model.model.norm.weight": "model.norm.weight",
        "model.layers.1.self_attn.q_proj.weight": "model.layers.1.self_attn.q_proj.weight",
        "model.visual.blocks.0.attn.qkv.weight": None,
        "multi_modal_projector.linear_1.weight": None,
        "mtp.layers.0.mlp.up_proj.weight": None,
    }
    assert {name: inner_name(name) for name in names} == names


def test_the_whole_configuration_counts_for_the_text_part(tmp_path: Path) -> None:
    """As a published file has it: sizes at the top, and a type that `transformers` lacks."""
    qwen = TEXT | {
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "model_type": "qwen2_5_vl",
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 2, 2]}, "eos_token_id": 7,
        "tie_word_embeddings": True, "torch_dtype": "bfloat16",
        "quantization_config": {
            "quant_method": "fp8", "modules_to_not_convert": ["visual", "language_model.lm_head"]
        },
        "vision_config": QWEN_VISION,
    }  # fmt: skip
    chat = {
        "architectures": ["InternVLChatModel"], "model_type": "internvl_chat", "eos_token_id": 7,
        "llm_config": TEXT | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3"},
    }  # fmt: skip

    def resolve(raw: dict[str, Any]) -> Any:
        (tmp_path / "config.json").write_text(json.dumps(raw))
        return resolve_model_config(EngineConfig(model=str(tmp_path)), load_plugins())

    config = resolve(qwen)
    assert (config.architecture, config.text_part_of) == (
        "Qwen2ForCausalLM",
        qwen["architectures"][0],
    )
    assert config.hf_config.tie_word_embeddings is True
    assert config.eos_token_ids == {7} and config.max_model_len == 128
    assert config.rope_parameters["rope_type"] == "default"
    assert config.quantization_config["modules_to_not_convert"] == ["visual", "lm_head"]
    config = resolve(chat)
    assert (config.architecture, config.text_part_of) == ("Qwen3ForCausalLM", "InternVLChatModel")
    assert config.eos_token_ids == {7} and config.hf_config.tie_word_embeddings is False
    with pytest.raises(ConfigError, match="text_config or llm_config"):
        resolve({k: v for k, v in chat.items() if k != "llm_config"})


def test_each_architecture_of_a_text_part_is_there() -> None:
    registry = load_plugins()["model"]
    assert {of for of in TEXT_PARTS.values() if of} <= set(registry)
    assert not set(TEXT_PARTS) & (set(registry) | set(registry.refused))
