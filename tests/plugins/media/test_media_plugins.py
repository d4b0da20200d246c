"""Media models in the box pass their kit; one that raises is named, and costs its engine alone."""

from __future__ import annotations

import asyncio
import copy
import io
import json
import re
from pathlib import Path
from typing import Any, ClassVar

import hearing_models
import published_models
import pytest
import torch
import transformers
from seeing_models import FAMILIES, NIGHTLY, picture, save

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError, InvalidRequest, JackfieldError
from jackfield.core.hook_versions import API_VERSION
from jackfield.core.hooks import hookimpl
from jackfield.core.protocols.media import MediaSetup, ProcessedMedia
from jackfield.core.registration.architecture import FALLBACK
from jackfield.core.registry import load_plugins
from jackfield.core.text.tokenizer import Tokenizer
from jackfield.plugins.conformance.media import MediaModelKit
from jackfield.plugins.media import MODELS
from jackfield.plugins.media.fallback import Fallback
from jackfield.plugins.media.gemma3 import Gemma3, Gemma3Processor
from jackfield.plugins.media.lfm2_vl import Lfm2VlImages
from jackfield.plugins.media.llava import Llava

LLAMA4 = "Llama4ForConditionalGeneration"
QWEN = "Qwen2VLForConditionalGeneration"
GEMMA = "Gemma3ForConditionalGeneration"
LIGHT_ON = "LightOnOcrForConditionalGeneration"
LLAVA = "LlavaForConditionalGeneration"


class OfFamily(MediaModelKit):
    family: ClassVar[str]

    @classmethod
    def write(cls, folder: Path) -> None:
        for models in (hearing_models, published_models):
            if cls.family in models.FAMILIES:
                models.save(cls.family, folder)
                return
        save(cls.family, folder)


ROWS_ALONE: dict[str, dict[str, str]] = {"image": {}}
RECORDINGS: dict[str, dict[str, str]] = {"audio": {}}
GRIDS = {"image": {"image_grid_thw": "image_grid_thw"}}
GRIDS_OF_VIDEOS = {**GRIDS, "video": {"video_grid_thw": "image_grid_thw"}}
GIVEN_AS_ROWS: dict[str, dict[str, dict[str, str]]] = {
    **dict.fromkeys(
        ("DeepseekVL", "Gemma3For", "Gemma4", "InternVL", "LlavaFor", "LlavaNext", "VipLlava"),
        ROWS_ALONE,
    ),
    **dict.fromkeys(("Glm46V", "Glm4v", "GlmOcr", "Qwen3_5", "Qwen3VL"), GRIDS),
    **dict.fromkeys(("Qwen2VL", "Qwen2_5_VL"), GRIDS_OF_VIDEOS),
    "LlavaOnevision": {"image": {}, "video": {}},
    "Mistral3": {"image": {"image_sizes": "image_sizes"}},
    **dict.fromkeys((*hearing_models.FAMILIES, *published_models.HEARING), RECORDINGS),
}
"""First letters of a family in the box → its `MediaModelKit.given_as_rows`."""


def given_as_rows(name: str) -> dict[str, dict[str, str]]:
    return next((own for begin, own in GIVEN_AS_ROWS.items() if name.startswith(begin)), {})


for _name in (*FAMILIES, *hearing_models.FAMILIES, *published_models.FAMILIES):
    _kit = type(
        f"Test{_name}",
        (OfFamily,),
        {
            "name": _name if _name in MODELS else FALLBACK, "family": _name,
            "given_as_rows": given_as_rows(_name),
        },
    )  # fmt: skip
    globals()[f"Test{_name}"] = pytest.mark.slow(_kit) if _name in NIGHTLY else _kit
del _kit, OfFamily, MediaModelKit


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llava")
    save(LLAVA, folder)
    return folder


def plugin_of(architecture: str, media: type) -> Any:
    class Plugin:
        jackfield_api = API_VERSION

        @hookimpl
        def register_media_models(self, registry: Any) -> None:
            registry.add(architecture, media, override=True)

    return Plugin()


def engine_with(media: type, folder: Path) -> AsyncEngine:
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", num_gpu_blocks_override=100
    )
    return AsyncEngine(config, plugins=load_plugins(extra=(plugin_of(LLAVA, media),)))


@pytest.mark.parametrize("name", [LLAVA, "LlavaNextForConditionalGeneration", LIGHT_ON])
async def test_the_fallback_says_what_a_class_of_its_own_says(name: str, tmp_path: Path) -> None:
    save(name, tmp_path)
    config = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="float32", num_gpu_blocks_override=100,
        max_num_batched_tokens=16,
    )  # fmt: skip
    written = FAMILIES[name].written
    prompt: Any = {
        "prompt": f"See {written} and {written}?",
        "multi_modal_data": {"image": [picture(1), picture(2, 40, 110)]},
    }
    params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
    said = []
    for plugins in (None, load_plugins(extra=(plugin_of(name, Fallback),))):
        async with AsyncEngine(config, plugins=plugins) as engine:
            output = [each async for each in engine.generate(prompt, params)][-1]
            said.append((output.prompt_token_ids, output.outputs[0].token_ids))
    assert said[0] == said[1]


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("Gemma3ForConditionalGeneration", "its text part gets attention_mask beside embeddings"),
        ("Glm4vForConditionalGeneration", "its tokens turn by their place in a picture"),
        ("Ovis2ForConditionalGeneration", "its forward does more .*visual_indicator_features"),
        ("InternVLForConditionalGeneration", None),
    ],
)
def test_the_fallback_serves_where_rows_are_placed_and_nothing_else(
    name: str, reason: str | None, tmp_path: Path
) -> None:
    config = getattr(transformers, name).config_class(**copy.deepcopy(FAMILIES[name].config))
    refusal = Fallback.refusal(MediaSetup(tmp_path, config))
    assert refusal is None if reason is None else re.match(reason, refusal or "")


def test_a_processor_that_writes_other_tokens_stops_the_start(tmp_path: Path) -> None:
    model = save(LIGHT_ON, tmp_path)
    tokenizer = Tokenizer.load(str(tmp_path))
    model.config.image_token_id = 303
    setup = MediaSetup(
        tmp_path, model.config,
        tokenize=lambda text: tokenizer.encode(text, add_special_tokens=False),
    )  # fmt: skip
    with pytest.raises(ConfigError, match=r"writes no token 303 .* language_model_only"):
        Fallback.processor(setup)


async def test_a_family_that_the_fallback_refuses_is_served_without_pictures(
    tmp_path: Path,
) -> None:
    """With the reason for those who send one."""
    save(GEMMA, tmp_path)
    config = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="float32", num_gpu_blocks_override=100
    )
    params = SamplingParams(max_tokens=1, temperature=0)
    plugins = load_plugins(extra=(plugin_of(GEMMA, Fallback),))
    async with AsyncEngine(config, plugins=plugins) as engine:
        output = [each async for each in engine.generate("words", params)][-1]
        assert output.error is None
        prompt: Any = {"prompt": "<start_of_image>", "multi_modal_data": {"image": picture(1)}}
        with pytest.raises(InvalidRequest, match="gets attention_mask beside embeddings"):
            await anext(engine.generate(prompt, params))


def bang(*arguments: Any) -> Any:
    raise ArithmeticError("bang")


@pytest.mark.parametrize("method", ["refusal", "processor", "encoder"])
async def test_one_that_raises_at_the_start_is_named(method: str, folder: Path) -> None:
    bad = type("Bad", (Llava,), {method: classmethod(bang)})
    with pytest.raises(JackfieldError, match=f"media model .* failed in {method}.*bang"):
        await engine_with(bad, folder).start()


async def test_an_item_that_cannot_be_encoded_costs_its_request_alone(folder: Path) -> None:
    planned: list[bool] = []

    class Fragile(Llava):
        """Its encoder raises for one picture, and returns too few rows for another."""

        @classmethod
        def encoder(cls, setup: Any, build: Any) -> Any:
            made = Llava.encoder(setup, build)
            whole = made.encode_together

            def encode_together(items: Any) -> Any:
                planned.append(torch.backends.cuda.cudnn_sdp_enabled())
                means = [float(item["pixel_values"].float().mean()) for item in items]
                if max(means) > 1.5:
                    raise ArithmeticError("too bright")
                rows = whole(items)
                return [r[1:] if mean < -1.5 else r for r, mean in zip(rows, means, strict=True)]

            made.encode_together = encode_together  # type: ignore[method-assign]
            return made

    from PIL import Image

    def prompt(image: Any) -> Any:
        return {"prompt": "a <image> b", "multi_modal_data": {"image": image}}

    params = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True)
    async with engine_with(Fragile, folder) as engine:
        for color, reason in (("white", "ArithmeticError: too bright"), ("black", "15, 64")):
            for _ in range(2):
                stream = engine.generate(prompt(Image.new("RGB", (32, 32), color)), params)
                failed = [output async for output in stream][-1]
                assert failed.error is not None and reason in failed.error
                assert failed.error.startswith("an item of the prompt could not be encoded")
            outputs = [o async for o in engine.generate(prompt(picture(1)), params)]
            assert len(outputs[-1].outputs[0].token_ids) == 4

            # Encoded with one plan, of which one is at fault.
            async def last(image: Any) -> Any:
                return [output async for output in engine.generate(prompt(image), params)][-1]

            pictures = [picture(7), Image.new("RGB", (32, 32), "white"), picture(8)]
            first, failed, third = await asyncio.gather(*map(last, pictures))
            assert failed.error is not None and "too bright" in failed.error
            assert first.error is None and third.error is None
        assert engine.healthy
    assert planned and not any(planned), "cuDNN would plan for each new shape"
    assert torch.backends.cuda.cudnn_sdp_enabled(), "as the program around the engine has it"


UNITS: dict[str, dict[tuple[int, int], int]] = {
    "Cohere2VisionForConditionalGeneration": {
        (224, 224): 259, (640, 480): 773, (1280, 720): 1801, (1920, 1080): 3343, (400, 3000): 1801,
    },
    "Kimi_K25ForConditionalGeneration": {
        (224, 224): 64, (640, 480): 414, (1280, 720): 1196, (1920, 1080): 2691, (400, 3000): 1620,
    },
    "Lfm2VlForConditionalGeneration": {
        (224, 224): 66, (640, 480): 236, (1280, 720): 769, (1920, 1080): 2311,
    },
    "Phi4MultimodalForCausalLM": {
        (224, 224): 545, (640, 480): 1065, (1280, 720): 1596, (400, 3000): 2065,
    },
    LLAMA4: {
        (224, 224): 147, (640, 480): 727, (1280, 720): 1887, (1920, 1080): 2322, (400, 3000): 2467,
    },
}  # fmt: skip
"""Tokens by a picture's width and height, as measured with torchvision, by default options."""


@pytest.mark.parametrize("architecture", UNITS)
def test_own_image_processors_cut_pictures_as_those_of_transformers(
    architecture: str, tmp_path: Path
) -> None:
    config = save(architecture, tmp_path).config
    if architecture == LLAMA4:
        config.vision_config.image_size, config.vision_config.patch_size = 336, 14
    (tmp_path / "preprocessor_config.json").write_text("{}")
    tokenizer = Tokenizer.load(str(tmp_path))
    setup = MediaSetup(
        tmp_path, config, tokenize=lambda text: tokenizer.encode(text, add_special_tokens=False)
    )
    processor = load_plugins()["media_model"].load(architecture).processor(setup, "image")
    for (width, height), count in UNITS[architecture].items():
        assert len(processor.image(picture(1, width, height)).token_ids) == count


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"max_tiles": "many"}, "max_tiles must be like 10, got 'many'"),
        ({"tile_size": 0}, "tile_size must be like 512"),
        ({"use_thumbnail": 1}, "use_thumbnail must be like true"),
        ({"max_pixels_tolerance": True}, "max_pixels_tolerance must be like 2.0"),
        ({"image_mean": [0.5]}, "image_mean must be like"),
        ({"max_tile": 4}, "has no option max_tile"),
    ],
)
def test_own_image_processors_refuse_options_of_other_kinds(
    options: Any, reason: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        Lfm2VlImages(MediaSetup(tmp_path, None, options))
    assert caught.value.param == "mm_processor_kwargs"


async def test_a_request_may_lower_options_of_the_processor(tmp_path: Path) -> None:
    save(QWEN, tmp_path)
    config = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="float32", num_gpu_blocks_override=100
    )
    params = SamplingParams(max_tokens=1, temperature=0)
    data = io.BytesIO()
    picture(3, 200, 150).save(data, "PNG")

    async with AsyncEngine(config) as engine:

        async def units(options: Any) -> int:
            prompt: Any = {
                "prompt": "<|image_pad|>", "multi_modal_data": {"image": data.getvalue()},
                "mm_processor_kwargs": options,
            }  # fmt: skip
            outputs = [output async for output in engine.generate(prompt, params)]
            return len(outputs[-1].prompt_token_ids or ())

        whole = await units(None)
        assert whole == 12  # 84 x 112 pixels, in units of 28.
        assert await units({"max_pixels": 28 * 28 * 4}) == 2  # 28 x 56
        assert await units({}) == whole
        for options, reason in (
            ({"max_pixels": 28 * 28 * 13}, "max_pixels: must be a whole number from 1 to 9408"),
            ({"max_pixels": "many"}, "max_pixels: must be a whole number"),
            ({"min_pixels": 1 << 40}, "min_pixels: is no option .* may lower"),
            ([1], "must be an object"),
            ({"a": "b" * 2000}, "more than 1000 characters"),
        ):
            with pytest.raises(InvalidRequest, match=reason):
                await units(options)


@pytest.mark.parametrize("count", [18, 19, 20])
async def test_an_item_of_a_whole_step_before_an_item_that_is_the_last_token(
    count: int, tmp_path: Path
) -> None:
    """A step has 19 tokens: both are computed with one, or the prompt is refused."""

    class RowsAlone(Gemma3Processor):
        def of_count(self, count: int) -> ProcessedMedia:
            return ProcessedMedia({}, [self.config.image_token_id] * count)

    save(GEMMA, tmp_path)
    media = type("Alone", (Gemma3,), {"processor_class": RowsAlone})
    config = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="float32", num_gpu_blocks_override=100,
        max_num_batched_tokens=19, enable_mm_embeds=True,
    )  # fmt: skip
    rows = [torch.ones(size, 64) for size in (count, 1)]
    placeholders = [300, 300]
    prompt: Any = {"prompt_token_ids": placeholders, "multi_modal_data": {"image": rows}}
    async with AsyncEngine(config, plugins=load_plugins(extra=(plugin_of(GEMMA, media),))) as own:
        outputs = own.generate(prompt, SamplingParams(max_tokens=2, ignore_eos=True))
        if count < 19:
            assert len([each async for each in outputs][-1].outputs[0].token_ids) == 2
            return
        with pytest.raises(InvalidRequest, match=f"take {count + 1} tokens|takes 20 tokens"):
            await anext(outputs)


MARK = "<fake_token_around_image>"
TEXTS = (
    "one <image>", "<image> one", "<image>one two", "a<image><image>b <image>\nc", "<image><b",
    f"<image>{MARK} one", f"a {MARK}<image>{MARK}two", "<image><end_of_utterance>one",
)  # fmt: skip


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("words", ["bytes", "sentencepiece"])
def test_idefics2_puts_marks_and_spaces_around_pictures_as_its_processor_does(
    words: str, split: bool, tmp_path: Path
) -> None:
    name = "Idefics2ForConditionalGeneration"
    config = save(name, tmp_path).config
    images = transformers.Idefics2ImageProcessorPil(
        size={"shortest_edge": 20, "longest_edge": 45}, do_image_splitting=split
    )
    images.save_pretrained(tmp_path)
    if words == "sentencepiece":
        write_sentencepiece(tmp_path)
    theirs = FAMILIES[name].reference(tmp_path)
    tokenizer = Tokenizer.load(str(tmp_path))

    def tokenize(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    config.image_token_id = tokenize("<image>")[0]
    ours = load_plugins()["media_model"].load(name).processor(
        MediaSetup(tmp_path, config, tokenize=tokenize), "image"
    )  # fmt: skip
    for text in TEXTS:
        if tokenize(text) != theirs.tokenizer(text, add_special_tokens=False)["input_ids"]:
            assert words == "sentencepiece" and "> " in text  # A space is one more token in files.
            continue
        pictures = [picture(n, 96, 40 + 20 * n) for n in range(text.count("<image>"))]
        want = theirs(images=pictures, text=text, add_special_tokens=False)["input_ids"][0]
        arranged = ours.arranged(tokenize(text))
        assert ours.arranged(arranged) == arranged
        left, got = iter(pictures), list[int]()
        for token in arranged:
            here = token == ours.placeholder_id
            got += ours.image(next(left)).token_ids if here else [token]
        assert got == want, text


def write_sentencepiece(folder: Path) -> None:
    """A tokenizer in the form in which the published ones of Llama's and Mistral's were written:
    the normalizer puts a space before each text."""
    from tokenizers import AddedToken, decoders, models, normalizers
    from tokenizers import Tokenizer as Backend

    characters = ["<unk>", "<s>", "</s>", "▁", "\n", *"abcdenotw<"]
    merges = [("▁", character) for character in characters[5:]]
    vocabulary = {t: n for n, t in enumerate([*characters, *map("".join, merges)])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    specials = ("<image>", MARK, "<end_of_utterance>")
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    backend.save(str(folder / "tokenizer.json"))
    config = {"tokenizer_class": "LlamaTokenizer", "legacy": True, "unk_token": "<unk>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
