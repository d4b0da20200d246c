"""Qwen2.5-Omni's and Qwen3-Omni's thinkers, in the form of published checkpoints, say what
`transformers` says: pictures and recordings in one prompt."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from hearing_models import RATE, in_seconds, means_of_two, sound
from safetensors.torch import save_file
from seeing_models import MROPE, TEMPLATE, TEXT, picture, randomize, tokenizer_with
from test_videos import pairs
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.plugins.media.omni import OmniVideo, Qwen3OmniVideo

SPECIALS = (
    "<|image_pad|>", "<|vision_start|>", "<|vision_end|>", "<|video_pad|>", "<|audio_pad|>",
    "<|audio_start|>", "<|audio_end|>",
)  # fmt: skip
IDS = {
    "image_token_id": 300, "vision_start_token_id": 301, "vision_end_token_id": 302,
    "video_token_id": 303, "audio_token_id": 304, "audio_start_token_id": 305,
    "audio_end_token_id": 306,
}  # fmt: skip
AUDIO: dict[str, Any] = {
    "num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48, "output_dim": 64, "max_source_positions": 150, "initializer_range": 0.2,
}  # fmt: skip
VISION = {
    "depth": 3, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4, "out_hidden_size": 64,
    "initializer_range": 0.2,
}  # fmt: skip
SEEN = "<|vision_start|><|image_pad|><|vision_end|>"
HEARD = "<|audio_start|><|audio_pad|><|audio_end|>"
EXTRACTOR = {"feature_size": 16, "chunk_length": 3}


class Omni(NamedTuple):
    kind: str
    """Beginning of the names of its classes."""
    architecture: str
    """As published checkpoints call it."""
    thinker: dict[str, Any]
    pixels: dict[str, Any]
    """Options of its image processor."""


OMNIS = [
    Omni(
        "Qwen2_5Omni", "Qwen2_5OmniModel",
        {
            "text_config": {**TEXT, "rope_parameters": MROPE},
            "audio_config": {**AUDIO, "n_window": 25},
            "vision_config": {**VISION, "window_size": 56, "fullatt_block_indexes": [1]},
            "audio_token_index": 304, "image_token_index": 300, "video_token_index": 303,
        },
        {"min_pixels": 28 * 28, "max_pixels": 28 * 28 * 12},
    ),
    Omni(
        "Qwen3OmniMoe", "Qwen3OmniMoeForConditionalGeneration",
        {
            "text_config": {
                **TEXT, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
                "rope_parameters": {
                    **MROPE, "mrope_section": [3, 3, 2], "mrope_interleaved": True,
                },
            },
            "audio_config": {**AUDIO, "n_window": 50, "n_window_infer": 200,
                             "downsample_hidden_size": 8},
            "vision_config": {
                **VISION, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1],
                "patch_size": 16,
            },
        },
        {"min_pixels": 32 * 32, "max_pixels": 32 * 32 * 12, "patch_size": 16},
    ),
]  # fmt: skip


class Made(NamedTuple):
    omni: Omni
    folder: Path
    model: Any


@pytest.fixture(scope="module", params=OMNIS, ids=[omni.kind for omni in OMNIS])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    omni: Omni = request.param
    folder = tmp_path_factory.mktemp("omni")
    kind = getattr(transformers, f"{omni.kind}ThinkerForConditionalGeneration")
    torch.manual_seed(7)
    model = kind(kind.config_class(**omni.thinker, **IDS)).float().eval()
    randomize(model)
    model.save_pretrained(folder)
    # Its weights as checkpoints of the whole have them.
    from safetensors.torch import load_file

    weights = load_file(folder / "model.safetensors")
    save_file(
        {
            (name if name.startswith("thinker.") else f"thinker.{name}"): tensor
            for name, tensor in weights.items()
        },
        folder / "model.safetensors",
        {"format": "pt"},
    )
    whole = getattr(transformers, f"{omni.kind}Config")()
    config = {
        "architectures": [omni.architecture], "model_type": whole.model_type,
        "thinker_config": model.config.to_dict(), "enable_audio_output": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    tokenizer_with(SPECIALS, TEMPLATE.replace("PICTURE", SEEN)).save_pretrained(folder)
    images = transformers.Qwen2VLImageProcessorPil(**omni.pixels).to_dict()
    sounds = transformers.WhisperFeatureExtractor(**EXTRACTOR).to_dict()
    both = {**images, **sounds}
    both.pop("processor_class", None)
    (folder / "preprocessor_config.json").write_text(json.dumps(both))
    return Made(omni, folder, model)


def config_of(made: Made) -> EngineConfig:
    return EngineConfig(
        model=str(made.folder), device="cpu", dtype="float32", max_num_batched_tokens=7,
        block_size=4, max_model_len=400, max_num_seqs=4, num_gpu_blocks_override=400,
    )  # fmt: skip


PROMPTS: dict[str, tuple[tuple[str, ...], tuple[int, ...], tuple[float, ...]]] = {
    "a picture, then a recording": (("See", SEEN, " and hear ", HEARD, "."), (1,), (1.5,)),
    "recordings around a picture": ((HEARD, "?", SEEN, HEARD, "what?"), (2,), (0.5, 2.3)),
    "a recording": (("Hear ", HEARD, " well."), (), (1.1,)),
    "a picture": (("See ", SEEN, " well."), (3,), ()),
}
"""Name → pieces, seeds of pictures, seconds of recordings."""


def expected(made: Made, name: str) -> tuple[int, list[int]]:
    """Return the number of tokens of the prompt and the output, by `transformers` alone."""
    pieces, seeds, lengths = PROMPTS[name]
    extractor = transformers.AutoFeatureExtractor.from_pretrained(made.folder)
    images = AutoImageProcessor.from_pretrained(made.folder, backend="pil")
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(made.folder)
    inputs: dict[str, Any] = {}
    units: list[int] = []
    rows: list[int] = []
    if seeds:
        pixels = images(images=[picture(seed) for seed in seeds], return_tensors="pt")
        inputs |= {name: pixels[name] for name in ("pixel_values", "image_grid_thw")}
        units = (inputs["image_grid_thw"].prod(-1) // 4).tolist()
    if lengths:
        features = extractor(
            [sound(7, seconds) for seconds in lengths], sampling_rate=RATE, return_tensors="pt",
            padding="max_length", return_attention_mask=True,
        )  # fmt: skip
        inputs["input_features"] = features["input_features"]
        inputs["feature_attention_mask"] = features["attention_mask"]
        lens = features["attention_mask"].sum(-1)
        count = means_of_two if made.omni.kind == "Qwen2_5Omni" else in_seconds
        rows = [count(frames) for frames in lens.tolist()]
    text = ""
    for piece in pieces:
        if piece == SEEN:
            piece = piece.replace("<|image_pad|>", "<|image_pad|>" * units.pop(0))
        if piece == HEARD:
            piece = piece.replace("<|audio_pad|>", "<|audio_pad|>" * rows.pop(0))
        text += piece
    inputs |= tokenizer(text, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        out = made.model.generate(**inputs, max_new_tokens=10, do_sample=False)
    count = inputs["input_ids"].shape[1]
    return count, out[0, count:].tolist()


async def test_videos_beside_pictures(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions go on behind the frames, which are seconds apart."""
    monkeypatch.setattr(OmniVideo, "least_pixels", 1024)
    monkeypatch.setattr(Qwen3OmniVideo, "least_pixels", 1024)
    side = 2 * made.model.config.vision_config.patch_size
    frames = np.stack([np.asarray(picture(seed, 2 * side, side)) for seed in range(5)])
    images: Any = AutoImageProcessor.from_pretrained(made.folder, backend="pil")
    pixels = images(images=[picture(9)], return_tensors="pt")
    patches, grid = pairs(images, np.concatenate([frames, frames[-1:]]))
    count = int(pixels["image_grid_thw"].prod()) // 4
    prompt = f"Watch <|vision_start|><|video_pad|><|vision_end|>, {SEEN}!"
    text = prompt.replace("<|video_pad|>", "<|video_pad|>" * (grid[0] * 2))
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(made.folder)
    inputs = tokenizer(
        text.replace("<|image_pad|>", "<|image_pad|>" * count), return_tensors="pt",
        add_special_tokens=False,
    )  # fmt: skip
    with torch.no_grad():
        out = made.model.generate(
            **inputs, pixel_values=pixels["pixel_values"], pixel_values_videos=patches,
            image_grid_thw=pixels["image_grid_thw"], video_grid_thw=torch.tensor([grid]),
            video_second_per_grid=torch.tensor([0.4]), max_new_tokens=10, do_sample=False,
        )  # fmt: skip
    media = {"video": (frames, 5.0), "image": picture(9)}
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    async with AsyncEngine(config_of(made)) as engine:
        asked: Any = {"prompt": prompt, "multi_modal_data": media}
        output = [each async for each in engine.generate(asked, params)][-1]
    assert output.error is None
    assert len(output.prompt_token_ids) == inputs["input_ids"].shape[1]
    assert list(output.outputs[0].token_ids) == out[0, inputs["input_ids"].shape[1] :].tolist()


async def test_pictures_and_recordings_in_one_prompt(made: Made) -> None:
    """In chunks that end inside items."""
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    async with AsyncEngine(config_of(made)) as engine:
        for name, (pieces, seeds, lengths) in PROMPTS.items():
            media: dict[str, Any] = {
                "audio": [(sound(7, seconds), RATE) for seconds in lengths],
                "image": [picture(seed) for seed in seeds],
            }
            prompt: Any = {"prompt": "".join(pieces), "multi_modal_data": media}
            output = [each async for each in engine.generate(prompt, params)][-1]
            count, tokens = expected(made, name)
            assert output.error is None
            assert len(output.prompt_token_ids) == count, name
            assert list(output.outputs[0].token_ids) == tokens, name
            assert set(output.media_tokens) == {m for m, items in media.items() if items}
