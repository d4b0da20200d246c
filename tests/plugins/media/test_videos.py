"""Families that take videos say what `transformers` says of the same frames; frames are chosen as
its processors choose them, and times are those of the frames."""

from __future__ import annotations

import ast
import importlib
import io
import json
from fractions import Fraction
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from seeing_models import FAMILIES, TEMPLATE, picture, save, tokenizer_with
from transformers.video_utils import VideoMetadata

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.protocols.media import MediaSetup, Sampling, Video
from jackfield.core.text.tokenizer import Tokenizer as TextTokenizer
from jackfield.plugins.media.internvl import InternVLVideo
from jackfield.plugins.media.qwen_video import Glm46Sampling, GlmSampling
from jackfield.plugins.media.smolvlm import SmolVLM, SmolVLMSampling, SmolVLMVideo, in_words

KINDS = (
    "Qwen2VLForConditionalGeneration", "Qwen2_5_VLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration", "Glm4vForConditionalGeneration",
    "Glm46VForConditionalGeneration",
)  # fmt: skip
NEW = 8


class Made(NamedTuple):
    folder: Path
    model: Any

    @property
    def side(self) -> int:
        """Pixels of a unit."""
        return 2 * int(self.model.config.vision_config.patch_size)

    @property
    def times(self) -> bool:
        return type(self.model).__name__.startswith("Qwen3")

    @property
    def glm(self) -> bool:
        return type(self.model).__name__.startswith("Glm")

    def time(self, seconds: float) -> str:
        """Return what GLM's processors write for the time of a pair's first frame."""
        glm46 = type(self.model).__name__.startswith("Glm46V")
        return f"{seconds:.1f} seconds" if glm46 else str(int(seconds))

    @property
    def written(self) -> str:
        return "<|video|>" if self.glm else "<|vision_start|><|video_pad|><|vision_end|>"


@pytest.fixture(scope="module", params=KINDS)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("videos")
    model = save(request.param, folder)
    own = {
        "size": {"shortest_edge": 1024, "longest_edge": 1 << 20},
        "patch_size": model.config.vision_config.patch_size,
    }  # fmt: skip
    (folder / "video_preprocessor_config.json").write_text(json.dumps(own))
    return Made(folder, model)


def film(made: Made, seed: int, count: int, rows: int, columns: int) -> np.ndarray:
    side = made.side
    frames = [
        np.asarray(picture(seed * 100 + number, columns * side, rows * side))
        for number in range(count)
    ]
    return np.stack(frames)


def patches(made: Made, frames: np.ndarray) -> tuple[torch.Tensor, list[int]]:
    """Return the patches of pairs of frames, by `transformers`' processor of pictures, which writes
    each frame twice."""
    if len(frames) % 2:
        frames = np.concatenate([frames, frames[-1:]])
    family = FAMILIES[type(made.model).__name__]
    size = {"shortest_edge": 1024, "longest_edge": 1 << 20}
    pixels = {"size": size} if made.glm else {"min_pixels": 1024, "max_pixels": 1 << 20}
    mean = {"image_mean": MEAN, "image_std": STD} if not made.times else {
        "image_mean": [0.5] * 3, "image_std": [0.5] * 3,
    }  # fmt: skip
    kind = getattr(transformers, family.processor)
    return pairs(kind(**{**family.options, **pixels, **mean}), frames)


def pairs(images: Any, frames: np.ndarray) -> tuple[torch.Tensor, list[int]]:
    """Return the patches of pairs of frames by a processor of pictures, and their grid."""
    made_of = images(images=[Image.fromarray(frame) for frame in frames], return_tensors="pt")
    _, rows, columns = made_of["image_grid_thw"][0].tolist()
    twice = made_of["pixel_values"].view(len(frames) // 2, 2, rows * columns, 3, 2, -1)
    both = torch.stack([twice[:, 0, :, :, 0], twice[:, 1, :, :, 0]], dim=3)
    return both.reshape(len(frames) // 2 * rows * columns, -1), [len(frames) // 2, rows, columns]


MEAN = [0.48145466, 0.4578275, 0.40821073]
STD = [0.26862954, 0.26130258, 0.27577711]


def expected(
    made: Made, texts: list[str], films: list[np.ndarray], indices: list[int], fps: float,
    total: int,
) -> tuple[int, list[int]]:  # fmt: skip
    """Return the number of tokens of the prompt and the output, by `transformers` alone."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(made.folder)
    text, pixels, grids = texts[0], [], []
    for frames, words in zip(films, texts[1:], strict=True):
        own, grid = patches(made, frames)
        pixels.append(own)
        grids.append(grid)
        count = grid[1] * grid[2] // 4
        inner = "<|video_pad|>" * (count * grid[0])
        if made.times or made.glm:
            padded = indices + indices[-1:] * (len(indices) % 2)
            at = [(a + b) / 2 / fps for a, b in zip(padded[::2], padded[1::2], strict=True)]
            inner = "".join(
                f"<{t:.1f} seconds><|vision_start|>{'<|video_pad|>' * count}<|vision_end|>"
                for t in at
            )
        if made.glm:
            inner = "".join(
                f"<|begin_of_image|>{'<|image|>' * count}<|end_of_image|>{made.time(index / fps)}"
                for index in padded[::2]
            )
        text += inner if made.glm else f"<|vision_start|>{inner}<|vision_end|>"
        text += words
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    ids = inputs["input_ids"]
    inputs = {
        **inputs, "pixel_values_videos": torch.cat(pixels), "video_grid_thw": torch.tensor(grids),
        "mm_token_type_ids": (ids == (300 if made.glm else 303)).int() * 2,
    }  # fmt: skip
    if "Qwen2_5" in type(made.model).__name__:
        seconds = 2 / (len(indices) / total * fps)
        inputs["second_per_grid_ts"] = torch.tensor([seconds] * len(films))
    with torch.no_grad():
        out = made.model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    return ids.shape[1], out[0, ids.shape[1] :].tolist()


def engine_of(made: Made, **options: Any) -> AsyncEngine:
    return AsyncEngine(
        EngineConfig(
            model=str(made.folder), device="cpu", dtype="float32", block_size=4, max_model_len=500,
            max_num_seqs=4, num_gpu_blocks_override=500,
            **{"max_num_batched_tokens": 13, **options},
        )
    )  # fmt: skip


async def said(
    made: Made, engine: AsyncEngine, texts: list[str], videos: Any
) -> tuple[int, list[int]]:
    prompt: Any = {"prompt": made.written.join(texts), "multi_modal_data": {"video": videos}}
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    output = [each async for each in engine.generate(prompt, params)][-1]
    assert output.error is None
    return len(output.prompt_token_ids), list(output.outputs[0].token_ids)


def animated(frames: np.ndarray, milliseconds: int) -> bytes:
    """A WebP without loss."""
    file = io.BytesIO()
    first, *others = map(Image.fromarray, frames)
    first.save(
        file, "WEBP", save_all=True, append_images=others, duration=milliseconds, lossless=True,
        minimize_size=False,
    )  # fmt: skip
    return file.getvalue()


async def test_frames_that_callers_give_are_all_read(made: Made) -> None:
    """Of two videos, one with an odd number of frames, and a picture's tokens between them."""
    one, two = film(made, 1, 4, 2, 3), film(made, 2, 4, 3, 2)
    odd = film(made, 3, 3, 2, 2)
    async with engine_of(made) as engine:
        texts = ["See ", " then ", "?"]
        want = expected(made, texts, [one, two], [0, 1, 2, 3], 8.0, 4)
        assert await said(made, engine, texts, [(one, 8.0), (two, 8.0)]) == want
        want = expected(made, ["", "!"], [odd], [0, 1, 2], 24.0, 3)
        assert await said(made, engine, ["", "!"], odd) == want
        assert (
            await said(made, engine, ["", "!"], [Image.fromarray(frame) for frame in odd]) == want
        )


async def test_frames_of_a_file_are_chosen_and_decoded_in_a_process(made: Made) -> None:
    frames = film(made, 4, 20, 2, 2)
    data = animated(frames, 100)  # Ten per second.
    texts = ["What happens? ", " Say it."]
    if made.times:  # From the first to the last.
        chosen = np.linspace(0, 19, 4).round().astype(int).tolist()
    elif made.time(1) == "1.0 seconds":
        chosen = chosen_by_glm46(20, 10.0)
    else:
        chosen = torch.arange(0, 20, 20 / 4).int().tolist()
    async with engine_of(made) as engine:
        want = expected(made, texts, [frames[chosen]], chosen, 10.0, 20)
        assert await said(made, engine, texts, data) == want
    async with engine_of(made, media_io_kwargs={"video": {"num_frames": 2}}) as engine:
        chosen = [0, 19] if made.times or made.glm else [0, 10]
        want = expected(made, texts, [frames[chosen]], chosen, 10.0, 20)
        assert await said(made, engine, texts, data) == want


@pytest.mark.parametrize("total", [1, 2, 5, 31, 240, 5000])
@pytest.mark.parametrize("fps", [1.0, 24.0, 29.97])
def test_frames_are_chosen_as_processors_of_transformers_choose_them(
    total: int, fps: float
) -> None:
    count = min(max(int(total / fps * 2), 4), 768, total)  # Of Qwen3-VL.
    expected = np.linspace(0, total - 1, count).round().astype(int).tolist()
    assert Sampling(fps=2.0, least=4, most=768).indices(total, fps, 768) == expected
    if total >= 4:
        count = min(max(total / fps * 2, 4), min(768, total) // 2 * 2, total) // 2 * 2
        expected = torch.arange(0, total, total / count).int().tolist()[: int(count)]
        own = Sampling(fps=2.0, least=4, most=768, multiple=2, place=Fraction(0))
        assert own.indices(total, fps, 768) == expected


async def test_videos_of_codecs_are_read_with_av(made: Made) -> None:
    av = pytest.importorskip("av")
    frames = film(made, 5, 8, 2, 2)
    file = io.BytesIO()
    with av.open(file, "w", format="matroska") as container:
        stream: Any = container.add_stream("ffv1", rate=4)
        stream.width, stream.height, stream.pix_fmt = frames.shape[2], frames.shape[1], "bgr0"
        for frame in frames:
            for packet in stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")):
                container.mux(packet)
        for packet in stream.encode():
            container.mux(packet)
    texts = ["", " what?"]
    chosen = [0, 2, 5, 7] if made.times else [0, 2, 4, 6]
    if made.time(1) == "1.0 seconds":
        chosen = chosen_by_glm46(8, 4.0)
    async with engine_of(made) as engine:
        want = expected(made, texts, [frames[chosen]], chosen, 4.0, 8)
        assert await said(made, engine, texts, file.getvalue()) == want


@pytest.mark.parametrize("name", ["InternVL", "LlavaNextVideo"])
async def test_frames_of_one_size(name: str, tmp_path: Path) -> None:
    """Of two videos, in chunks that end inside one; the middle of frames that are not square."""
    model = save(f"{name}ForConditionalGeneration", tmp_path)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path)
    own = {
        "size": {"height": 32, "width": 32} if name == "InternVL" else {"shortest_edge": 32},
        "crop_size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.25] * 3,
    }  # fmt: skip
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(own))
    wide = 32 if name == "InternVL" else 48
    films = [
        np.stack([np.asarray(picture(seed + number, wide, 32)) for number in range(3)])
        for seed in (10, 20)
    ]
    begin = (wide - 32) // 2
    frames = torch.from_numpy(np.stack(films)[..., begin : begin + 32, :]).permute(0, 1, 4, 2, 3)
    pixels = (frames.float() / 255 - 0.5) / 0.25
    if name == "InternVL":
        written = "\n".join(f"Frame{n}: <img>{'<IMG_CONTEXT>' * 4}</img>" for n in (1, 2, 3))
        inputs = {"pixel_values": pixels.flatten(0, 1)}
    else:
        written, inputs = "<video>" * 12, {"pixel_values_videos": pixels}
    text = f"See {written} or {written}?"
    inputs |= tokenizer(text, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False)
    count = inputs["input_ids"].shape[1]
    prompt: Any = {"prompt": "See <video> or <video>?", "multi_modal_data": {"video": films}}
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    async with engine_of(Made(tmp_path, model)) as engine:
        output = [each async for each in engine.generate(prompt, params)][-1]
    assert output.error is None and len(output.prompt_token_ids) == count
    assert list(output.outputs[0].token_ids) == out[0, count:].tolist()


def chosen_by_glm46(total: int, fps: float) -> list[int]:
    """By the function of a module of `transformers` that takes torchvision."""
    folder = Path(transformers.__file__).parent / "models" / "glm46v"
    module = ast.parse((folder / "video_processing_glm46v.py").read_text())
    nodes = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef)]
    [function] = [node for node in nodes if node.name == "sample_frames"]
    names: dict[str, Any] = {"np": np, "VideoMetadata": object}
    exec(compile(ast.Module([function], []), "<glm46v>", "exec"), names)
    metadata = SimpleNamespace(total_num_frames=total, fps=fps, duration=total / fps)
    chosen = names["sample_frames"](SimpleNamespace(temporal_patch_size=2), metadata)
    return list(dict.fromkeys(chosen.tolist()))


@pytest.mark.parametrize(
    ("total", "fps"), [(7, 3.0), (20, 10.0), (301, 29.97), (1500, 30.0), (9100, 30.0), (90_000, 30)]
)
def test_frames_are_chosen_as_glm46_does(total: int, fps: float) -> None:
    assert Glm46Sampling().indices(total, fps, 768) == chosen_by_glm46(total, fps)


@pytest.mark.parametrize(("total", "fps"), [(1, 4.0), (7, 3.0), (300, 29.97), (9100, 30.0)])
def test_frames_are_chosen_as_glm_and_internvl_do(total: int, fps: float) -> None:
    kind: Any = importlib.import_module("transformers.models.glm4v.video_processing_glm4v")
    own = SimpleNamespace(fps=2, max_duration=300)
    metadata = SimpleNamespace(total_num_frames=total, fps=fps, duration=total / fps)
    chosen = kind.Glm4vVideoProcessor.sample_frames(own, metadata).tolist()
    assert GlmSampling().indices(total, fps, 768) == list(dict.fromkeys(chosen))
    if total > 8:  # As InternVL's video processor does, which takes torchvision.
        shift = total / 8 / 2
        middles = torch.arange(shift, total, total / 8).int().tolist()
        assert InternVLVideo.sampling.indices(total, fps, 8) == middles


async def test_llava_onevision_reads_frames_of_one_size(tmp_path: Path) -> None:
    """Of two videos, in chunks that end inside one."""
    model = save("LlavaOnevisionForConditionalGeneration", tmp_path)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path)
    own = {"size": {"height": 32, "width": 32}, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(own))
    films = [
        np.stack([np.asarray(picture(seed + number, 32, 32)) for number in range(3)])
        for seed in (10, 20)
    ]
    pixels = torch.from_numpy(np.stack(films)).permute(0, 1, 4, 2, 3).float() / 255
    text = f"See {'<video>' * 13} or {'<video>' * 13}?"  # Three times 2 by 2, and one.
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        out = model.generate(
            **inputs, pixel_values_videos=(pixels - 0.5) / 0.25, max_new_tokens=NEW,
            do_sample=False,
        )  # fmt: skip
    count = inputs["input_ids"].shape[1]
    prompt: Any = {"prompt": "See <video> or <video>?", "multi_modal_data": {"video": films}}
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    async with engine_of(Made(tmp_path, model)) as engine:
        output = [each async for each in engine.generate(prompt, params)][-1]
    assert output.error is None and len(output.prompt_token_ids) == count
    assert list(output.outputs[0].token_ids) == out[0, count:].tolist()


@pytest.mark.parametrize("bidirectional", [None, "vision"])
async def test_gemma4_reads_frames_as_small_pictures(
    bidirectional: str | None, tmp_path: Path
) -> None:
    """Of two videos, with and without layers where the tokens of a frame see each other."""
    name = "Gemma4ForConditionalGeneration"
    text_config = {
        **FAMILIES[name].config["text_config"],
        "use_bidirectional_attention": bidirectional,
    }
    model = save(name, tmp_path, text_config=text_config)
    own = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(own))
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path)
    films = [
        np.stack([np.asarray(picture(seed + number, 24, size)) for number in range(2)])
        for seed, size in ((10, 24), (20, 40))
    ]
    images, text = transformers.Gemma4ImageProcessorPil(**own), "See"
    pixels, places, words = [], [], ("", " or ", "?")
    for film_frames, after in zip(films, words[1:], strict=True):
        made = images(images=[Image.fromarray(f) for f in film_frames], return_tensors="pt")
        pixels.append(made["pixel_values"])
        places.append(made["image_position_ids"])
        count = int(made["num_soft_tokens_per_image"][0])
        runs = [
            f"00:{second:02d} <start_of_image>{'<video>' * count}<end_of_image>"
            for second in (0, 2)
        ]
        text += " ".join(runs) + after
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    kinds = (inputs["input_ids"] == 303).int() * 2
    with torch.no_grad():
        out = model.generate(
            **inputs, pixel_values_videos=torch.cat(pixels), video_position_ids=torch.cat(places),
            num_frames_per_video=torch.tensor([2, 2]), mm_token_type_ids=kinds,
            max_new_tokens=NEW, do_sample=False,
        )  # fmt: skip
    count = inputs["input_ids"].shape[1]
    videos = [(frames, 0.5) for frames in films]
    prompt: Any = {"prompt": "See<video> or <video>?", "multi_modal_data": {"video": videos}}
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    steps = {"max_num_batched_tokens": 13 if bidirectional is None else 200}
    async with engine_of(Made(tmp_path, model), **steps) as engine:
        output = [each async for each in engine.generate(prompt, params)][-1]
    assert output.error is None and len(output.prompt_token_ids) == count
    assert list(output.outputs[0].token_ids) == out[0, count:].tolist()


WORDS = {2: "two", 3: "three"}
SMOLVLM = "SmolVLMForConditionalGeneration"
RESERVED = "<|reserved_special_token_0|>"


def save_smolvlm(folder: Path) -> Any:
    """Save a model that has `<|reserved_special_token_0|>` and no `<video>`, as published."""
    model = save(SMOLVLM, folder)
    specials = (*FAMILIES[SMOLVLM].specials[:-1], RESERVED)
    tokenizer_with(specials, TEMPLATE).save_pretrained(folder)
    return model


async def test_smolvlm_reads_frames_with_their_times(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two videos, in chunks that end inside them."""
    kind: Any = importlib.import_module("transformers.models.smolvlm.processing_smolvlm")
    monkeypatch.setattr(kind, "num2words", WORDS.__getitem__)
    model = save_smolvlm(tmp_path)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path)
    films = [
        np.stack([np.asarray(picture(seed + number, 32, 32)) for number in range(count)])
        for seed, count in ((10, 3), (20, 2))
    ]
    own = SimpleNamespace(
        fake_image_token="<fake_token_around_image>", image_token="<image>", image_seq_len=4,
        global_image_token="<global-img>",
    )  # fmt: skip
    texts, frames = ["See ", " or", "?"], []
    text = texts[0]
    for film_frames, words in zip(films, texts[1:], strict=True):
        count = len(film_frames)
        pixels = (torch.from_numpy(film_frames).permute(0, 3, 1, 2).float() / 255 - 0.5) / 0.5
        metadata = VideoMetadata(count, 0.04, duration=count / 0.04, frames_indices=[*range(count)])
        video = {"pixel_values": pixels[None], "video_metadata": [metadata]}
        text += kind.SmolVLMProcessor.replace_video_token(own, video, 0) + words
        frames.append(pixels)
    inputs = tokenizer(text, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        out = model.generate(
            **inputs, pixel_values=torch.cat(frames)[None], max_new_tokens=NEW, do_sample=False
        )
    count = inputs["input_ids"].shape[1]
    prompt: Any = {
        "prompt": RESERVED.join(texts),
        "multi_modal_data": {"video": [(frames, 0.04) for frames in films]},
    }
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True)
    async with engine_of(Made(tmp_path, model)) as engine:
        output = [each async for each in engine.generate(prompt, params)][-1]
    assert output.error is None
    assert list(output.prompt_token_ids) == inputs["input_ids"][0].tolist()
    assert list(output.outputs[0].token_ids) == out[0, count:].tolist()


@pytest.mark.parametrize(
    ("total", "fps"), [(1, 4.0), (7, 3.0), (90, 29.97), (1979, 30.0), (2100, 30.0), (90_000, 25.0)]
)
def test_frames_are_chosen_as_smolvlm_does(total: int, fps: float) -> None:
    kind: Any = importlib.import_module("transformers.models.smolvlm.video_processing_smolvlm")
    metadata = VideoMetadata(total, fps, duration=total / fps)
    own = SimpleNamespace(fps=1, num_frames=64)
    chosen = kind.SmolVLMVideoProcessor.sample_frames(own, metadata).tolist()
    assert SmolVLMSampling().indices(total, fps, 768) == chosen


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (1, "one"), (13, "thirteen"), (20, "twenty"), (64, "sixty-four"), (100, "one hundred"),
        (101, "one hundred and one"), (768, "seven hundred and sixty-eight"),
    ],
)  # fmt: skip
def test_numbers_of_frames_are_words(number: int, words: str) -> None:
    assert in_words(number) == words


def test_what_stands_for_a_smolvlm_video_becomes_one_text_with_what_is_beside_it(
    tmp_path: Path,
) -> None:
    """With a tokenizer that joins line ends, and spaces with words."""
    model = save_smolvlm(tmp_path)
    written = json.loads((tmp_path / "tokenizer.json").read_text())
    written["model"]["merges"] = [["Ċ", "Ċ"], ["Ġ", "Y"], ["Ġ", "t"]]
    for number, token in enumerate(("ĊĊ", "ĠY", "Ġt"), 290):
        del written["model"]["vocab"][f"<unused{number - 256}>"]
        written["model"]["vocab"][token] = number
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    own = TextTokenizer.load(str(tmp_path))
    setup = MediaSetup(
        tmp_path, model.config, tokenize=lambda text: own.encode(text, add_special_tokens=False)
    )
    ours = SmolVLM.processor(setup, "video")
    assert isinstance(ours, SmolVLMVideo)
    video = Video(np.zeros((2, 40, 60, 3), dtype=np.uint8), (0, 30), 24.0, 48)
    item = ours.video(video)
    assert item.tensors["pixel_values"].shape == (2, 3, 32, 32)
    frame = f"<fake_token_around_image><global-img>{'<image>' * 4}<fake_token_around_image>"
    whole = (
        "You are provided the following series of two frames from a 0:00:02 [H:MM:SS] video.\n"
        f"\nFrame from 00:00:{frame}\nFrame from 00:01:{frame}\n\n"
    )
    place = ours.placeholder_id
    for text in ("@", "User: @", "User: @What?", "@@", "a@ b@\nc", "<end_of_utterance>@<image>"):
        tokens = setup.tokenize(text.replace("@", RESERVED))  # type: ignore[misc]
        arranged = ours.arranged(tokens)
        assert ours.arranged(arranged) == arranged
        got = [t for token in arranged for t in (item.token_ids if token == place else [token])]
        assert got == setup.tokenize(text.replace("@", whole)), text  # type: ignore[misc]
