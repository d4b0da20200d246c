"""Qwen2.5-Omni's and Qwen3-Omni's thinkers, in the form of published checkpoints, say what
`transformers` says: pictures and recordings in one prompt."""

from __future__ import annotations

import functools
import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
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
from jackfield.core.errors import InvalidRequest
from jackfield.core.media import video
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


@torch.no_grad()
def shown(
    made: Made,
    text: str,
    pixels: Any,
    frames: tuple[torch.Tensor, Any],
    seconds: float,
    **more: Any,
) -> tuple[int, list[int]]:
    """The number of tokens of a prompt with a picture and a video, and what follows.

    text: with the video's tokens; frames: patches and their grid; seconds: from one pair of frames
    to the next.
    """
    count = int(pixels["image_grid_thw"].prod()) // 4
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(made.folder)
    inputs = tokenizer(
        text.replace("<|image_pad|>", "<|image_pad|>" * count), return_tensors="pt",
        add_special_tokens=False,
    )  # fmt: skip
    out = made.model.generate(
        **inputs, pixel_values=pixels["pixel_values"], pixel_values_videos=frames[0],
        image_grid_thw=pixels["image_grid_thw"], video_grid_thw=torch.tensor([frames[1]]),
        video_second_per_grid=torch.tensor([seconds]), max_new_tokens=10, do_sample=False, **more,
    )  # fmt: skip
    size = inputs["input_ids"].shape[1]
    return size, out[0, size:].tolist()


async def test_videos_beside_pictures(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions go on behind the frames, which are seconds apart."""
    monkeypatch.setattr(OmniVideo, "least_pixels", 1024)
    monkeypatch.setattr(Qwen3OmniVideo, "least_pixels", 1024)
    side = 2 * made.model.config.vision_config.patch_size
    frames = np.stack([np.asarray(picture(seed, 2 * side, side)) for seed in range(5)])
    images: Any = AutoImageProcessor.from_pretrained(made.folder, backend="pil")
    pixels = images(images=[picture(9)], return_tensors="pt")
    patches, grid = pairs(images, np.concatenate([frames, frames[-1:]]))
    prompt = f"Watch <|vision_start|><|video_pad|><|vision_end|>, {SEEN}!"
    text = prompt.replace("<|video_pad|>", "<|video_pad|>" * (grid[0] * 2))
    theirs = shown(made, text, pixels, (patches, grid), 0.4)
    media = {"video": (frames, 5.0), "image": picture(9)}
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    async with AsyncEngine(config_of(made)) as engine:
        asked: Any = {"prompt": prompt, "multi_modal_data": media}
        output = [each async for each in engine.generate(asked, params)][-1]
    assert output.error is None
    assert (len(output.prompt_token_ids), list(output.outputs[0].token_ids)) == theirs


def movie(frames: np.ndarray, samples: np.ndarray | None) -> bytes:
    """Return a video of one frame per second, and its sound, as they are."""
    av = pytest.importorskip("av")
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream: Any = container.add_stream("ffv1", rate=1)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "bgr0"
        if samples is not None:
            track: Any = container.add_stream("pcm_f32le", rate=RATE, layout="mono")
            own = av.AudioFrame.from_ndarray(samples[None], format="flt", layout="mono")
            own.sample_rate = RATE
            container.mux([*track.encode(own), *track.encode()])
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode())
    return file.getvalue()


def written(made: Made, grid: Any, rows: int) -> str:
    """Return what a video and its sound are in a prompt, by the processor of `transformers`."""
    kind = getattr(transformers, f"{made.omni.kind}Processor")
    own = SimpleNamespace(
        audio_bos_token="<|audio_start|>", audio_eos_token="<|audio_end|>",
        audio_token="<|audio_pad|>", video_token="<|video_pad|>",
        video_processor=SimpleNamespace(merge_size=2),
        get_chunked_index=functools.partial(kind.get_chunked_index, None),
    )  # fmt: skip
    seen = {"video_grid_thw": np.asarray([grid]), "video_second_per_grid": [2.0]}
    text: str = kind.replace_video_with_audio_token(
        own, seen, 0, {"num_audio_tokens": [rows]}, 0,
        position_id_per_seconds=25, seconds_per_chunk=2.0,
    )  # fmt: skip
    return text


async def test_the_sound_of_a_video(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Longer and shorter than the frames, beside a picture; only where it is asked for."""
    monkeypatch.setattr(OmniVideo, "least_pixels", 1024)
    monkeypatch.setattr(Qwen3OmniVideo, "least_pixels", 1024)
    side = 2 * made.model.config.vision_config.patch_size
    images: Any = AutoImageProcessor.from_pretrained(made.folder, backend="pil")
    pixels = images(images=[picture(9)], return_tensors="pt")
    extractor = transformers.AutoFeatureExtractor.from_pretrained(made.folder)
    rows_of = means_of_two if made.omni.kind == "Qwen2_5Omni" else in_seconds
    prompt = f"Watch <|vision_start|><|video_pad|><|vision_end|>, {SEEN}!"
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    config = msgspec.structs.replace(config_of(made), media_io_kwargs={"video": {"num_frames": -1}})
    async with AsyncEngine(config) as engine:

        async def said(data: Any, **options: Any) -> tuple[int, list[int]]:
            asked: Any = {
                "prompt": prompt, "multi_modal_data": {"video": data, "image": picture(9)},
                **options,
            }  # fmt: skip
            output = [each async for each in engine.generate(asked, params)][-1]
            assert output.error is None
            return len(output.prompt_token_ids), list(output.outputs[0].token_ids)

        for number, seconds in ((6, 2.4), (2, 3.0)):
            frames = np.stack([np.asarray(picture(n, 2 * side, side)) for n in range(number)])
            samples = sound(7, seconds).astype(np.float32)
            features = extractor(
                samples, sampling_rate=RATE, return_tensors="pt", padding="max_length",
                return_attention_mask=True,
            )  # fmt: skip
            mask = features["attention_mask"]
            patches, grid = pairs(images, frames)
            text = prompt.replace("<|video_pad|>", written(made, grid, rows_of(int(mask.sum()))))
            theirs = shown(
                made, text, pixels, (patches, grid), 2.0, use_audio_in_video=True,
                input_features=features["input_features"], feature_attention_mask=mask,
            )  # fmt: skip
            heard = {"mm_processor_kwargs": {"use_audio_in_video": True}}
            data = movie(frames, samples)
            assert await said(data, **heard) == theirs
            silent = await said(movie(frames, None))
            assert silent[0] < theirs[0]
            assert await said(data) == silent == await said(movie(frames, None), **heard)
        with pytest.raises(InvalidRequest, match="use_audio_in_video: must be true or false"):
            await said(data, mm_processor_kwargs={"use_audio_in_video": 1})
        monkeypatch.setattr(video, "MAX_SECONDS", 2)
        with pytest.raises(InvalidRequest, match="its sound has more than 2 seconds"):
            await said(movie(frames, sound(8, 2.5).astype(np.float32)), **heard)


async def test_a_picture_and_a_recording_are_encoded_with_one_plan(
    made: Made, caplog: pytest.LogCaptureFixture
) -> None:
    pieces, seeds, lengths = PROMPTS["a picture, then a recording"]
    media = {"audio": [(sound(7, lengths[0]), RATE)], "image": [picture(seeds[0])]}
    prompt: Any = {"prompt": "".join(pieces), "multi_modal_data": media}
    params = SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)
    config = msgspec.structs.replace(config_of(made), max_num_batched_tokens=200)
    with caplog.at_level("INFO", "jackfield.worker"):
        async with AsyncEngine(config) as engine:
            output = [each async for each in engine.generate(prompt, params)][-1]
    assert list(output.outputs[0].token_ids) == expected(made, "a picture, then a recording")[1]
    assert "one by one" not in caplog.text


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
