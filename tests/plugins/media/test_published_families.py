"""Processors of families whose own code is not run take as many tokens and pixels as that does, by
the definition, computed by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from published_models import save
from seeing_models import TOWER, picture

from jackfield import EngineConfig
from jackfield.core.errors import ConfigError
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.registry import load_plugins
from jackfield.plugins.conformance.media import MediaModelKit

COUNTS: dict[str, dict[tuple[int, int], int]] = {
    "InternVLChatModel": {
        (224, 224): 258, (640, 480): 2 + 13 * 256, (1280, 720): 2 + 9 * 256,
        (1920, 1080): 2 + 9 * 256,
    },
    "DeepseekOCRForCausalLM": {
        (640, 480): 273, (768, 576): 273 + 20 * 31, (1280, 720): 273 + 10 * 21,
        (400, 3000): 273 + 60 * 11, (700, 700): 273 + 20 * 21,
    },
    "KimiVLForConditionalGeneration": {
        (224, 224): 8 * 8, (640, 480): 23 * 18, (1280, 720): 43 * 25, (400, 3000): 12 * 89,
    },
    "Phi3VForCausalLM": {
        (224, 224): 17 * 144 + 1 + 5 * 12, (640, 480): 13 * 144 + 1 + 4 * 12,
        (400, 3000): 17 * 144 + 1 + 9 * 12,
    },
    "MiniCPMV": {
        (224, 224): 66, (640, 480): 3 * 66, (1280, 720): 7 * 66 + 1, (1920, 1080): 9 * 66 + 1,
        (400, 3000): 8 * 66 + 6,
    },
}  # fmt: skip
"""Tokens by a picture's width and height, by default options."""
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {
    "Phi3VForCausalLM": {"pixel_values": (12, 3, 336, 336)},
    "KimiVLForConditionalGeneration": {"pixel_values": (46 * 36, 3, 14, 14)},
    "InternVLChatModel": {"pixel_values": (13, 3, 448, 448)},
    "DeepseekOCRForCausalLM": {"pixel_values": (1, 3, 1024, 1024)},
    "MiniCPMV": {"pixel_values": (1, 3, 392, 518), "slices": (2, 3, 546, 364)},
}
"""Of the tensors of a picture of 640 x 480."""
CHANGES: dict[str, dict[str, Any]] = {
    "Phi3VForCausalLM": {"vision_config": {"image_size": 336, "patch_size": 14}},
    "InternVLChatModel": {
        "max_dynamic_patch": 12, "vision_config": {**TOWER, "image_size": 448, "patch_size": 14},
    },
    "MiniCPMV": {"query_num": 64},
}  # fmt: skip


@pytest.mark.parametrize("architecture", COUNTS)
def test_pictures_take_what_they_take_in_their_own_code(architecture: str, tmp_path: Path) -> None:
    save(architecture, tmp_path, **CHANGES.get(architecture, {}))
    (tmp_path / "preprocessor_config.json").write_text("{}")
    plugins = load_plugins()
    model_config = resolve_model_config(EngineConfig(model=str(tmp_path)), plugins)
    media: Any = plugins["media_model"].load(architecture)
    processor = media.processor(MediaModelKit.setup_of(model_config), "image")
    for (width, height), count in COUNTS[architecture].items():
        made = processor.image(picture(1, width, height))
        assert len(made.token_ids) == count, (width, height)
        if (width, height) == (640, 480):
            shapes = SHAPES[architecture]
            assert {name: made.tensors[name].shape for name in shapes} == shapes


@pytest.mark.parametrize(
    ("architecture", "changes", "reason"),
    [
        ("MiniCPMV", {"version": 2.5}, r"version must be one of 2\.6, 4\.0, 4\.5 .*, got 2\.5"),
        ("MiniCPMV", {"version": None}, "version must be one of"),
        ("MiniCPMV", {"hidden_size": 200}, "hidden_size must be a multiple of 128, got 200"),
        ("MiniCPMV", {"query_num": 0}, "query_num must be an integer of at least 1"),
        ("MiniCPMV", {"vision_config": []}, "vision_config must be an object"),
    ],
)
def test_other_checkpoints_are_refused_with_the_field(
    architecture: str, changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    save(architecture, tmp_path)
    config = EngineConfig(model=str(tmp_path), hf_overrides=changes)
    with pytest.raises(ConfigError, match=reason):
        resolve_model_config(config, load_plugins())


@pytest.mark.parametrize(
    ("version", "architecture"),
    [(2.6, "Qwen2ForCausalLM"), ("4.0", "LlamaForCausalLM"), (4.5, "Qwen3ForCausalLM")],
)
def test_the_version_of_minicpm_v_says_which_text_part_it_has(
    version: Any, architecture: str, tmp_path: Path
) -> None:
    save("MiniCPMV", tmp_path, version=version)
    config = EngineConfig(model=str(tmp_path))
    assert resolve_model_config(config, load_plugins()).architecture == architecture
