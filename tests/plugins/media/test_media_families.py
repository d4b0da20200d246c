"""Multimodal families through the whole engine say what `transformers` says: several pictures or
recordings, chunks that end inside one, prefix hits inside and behind one, preemption."""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import hearing_models
import published_models
import pytest
import seeing_models
import torch
from seeing_models import picture

from jackfield import AsyncEngine, EngineConfig, RequestOutput, SamplingParams
from jackfield.core.engine.input_session import StreamingInput
from jackfield.core.errors import InvalidRequest
from jackfield.core.protocols.media import MediaSetup
from jackfield.core.registry import Plugins
from jackfield.entrypoints.beam_search import BeamSearch, BeamSearchParams
from jackfield.plugins.media.llava import Llava

from helpers import at_once

LLAVA = "LlavaForConditionalGeneration"
NEW = 10
SPECIAL = range(300, 320)
"""Tokens that are not generated: `transformers` reads some that are as pictures."""
CHUNK = 7
"""Tokens of a step: fewer than a picture has."""
CHUNKS = {
    "PaliGemmaForConditionalGeneration": 80,
    "Gemma3ForConditionalGeneration": 20,
    "Gemma4ForConditionalGeneration": 80,
}
"""Of models whose pictures, or prompts, are computed in one step, and not two."""

PROMPTS = ("PaliGemmaForConditionalGeneration",)
"""Of models whose prompts are found whole or not at all."""
STATES = (
    "Lfm2VlForConditionalGeneration", "Lfm3VlForConditionalGeneration",
    "MiniCPMV4_6ForConditionalGeneration",
    "Qwen3_5ForConditionalGeneration", "Qwen3_5MoeForConditionalGeneration",
)  # fmt: skip
"""Of models with states, of which a few are kept: a hit ends at one of these."""


FAMILIES: dict[str, Any] = {
    **seeing_models.FAMILIES, **hearing_models.FAMILIES, **published_models.FAMILIES,
}  # fmt: skip


TALLEST = 110
OCR = (seeing_models.OCR, "DeepseekOCRForCausalLM")


class Item(NamedTuple):
    """A picture or recording."""

    seed: int
    width: int = 96
    height: int = 72

    def of(self, architecture: str) -> Any:
        if architecture in OCR:  # Whose tiles are large; the tallest have some.
            return picture(self.seed, 8 * self.width, 8 * self.height)
        family = hearing_models.FAMILIES.get(architecture)
        if family is not None:
            height = TALLEST if family.same_length else self.height
            seconds = family.most_seconds * height / TALLEST
            return hearing_models.sound(self.seed, seconds)
        if architecture in published_models.HEARING:
            return hearing_models.sound(self.seed, 3 * self.height / TALLEST)
        return picture(self.seed, self.width, self.height)


class Case(NamedTuple):
    """A prompt: texts, with items in between."""

    texts: tuple[str, ...]
    items: tuple[Item, ...]


CASES = {
    "one": Case(("What is this? ", " Say it."), (Item(1),)),
    "another": Case(("What is this? ", " Say it."), (Item(2),)),
    "other words": Case(("What is this? ", " Never mind!"), (Item(1),)),
    "two": Case(("See ", " and then ", ", please."), (Item(3, 60, TALLEST), Item(1))),
    "swapped": Case(("See ", " and then ", ", please."), (Item(1), Item(3, 60, TALLEST))),
    "side by side": Case(("", "", " twice the same?"), (Item(4), Item(4))),
    "none": Case(("Only words here.",), ()),
    "last": Case(("What do you see? ", ""), (Item(5, 48, 100),)),
}
FEW = ("two", "last")
"""Of a family whose place among a prompt's tokens is another's, by day."""


class Made(NamedTuple):
    folder: Path
    model: Any
    modality: str

    def items(self, case: Case) -> list[Any]:
        return [item.of(architecture(self)) for item in case.items]


SLOW = (seeing_models.OCR, seeing_models.PHI, "Phi4MMForCausalLM", "DeepseekOCRForCausalLM")
"""Whose pictures are long: the kit alone tests them by day."""
NIGHTLY = (
    *SLOW, "AudioFlamingo3ForConditionalGeneration", "AyaVisionForConditionalGeneration",
    "Glm46VForConditionalGeneration", "Glm4vMoeForConditionalGeneration",
    "GlmAsrForConditionalGeneration", "GlmOcrForConditionalGeneration",
    "KimiVLForConditionalGeneration", "Lfm3VlForConditionalGeneration",
    "LightOnOcrForConditionalGeneration", "LlavaNextVideoForConditionalGeneration",
    "LlavaOnevisionForConditionalGeneration", "MiniCPMO", "Qwen3VLMoeForConditionalGeneration",
    "Qwen3_5MoeForConditionalGeneration", "SmolVLMForConditionalGeneration",
    *seeing_models.NIGHTLY,
)  # fmt: skip
"""And those that differ from another by their text part or by little of their tower, which the kit
tests by day, or that the fallback serves."""


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(name, marks=[pytest.mark.slow] if name in NIGHTLY else [])
        for name in sorted(FAMILIES)
    ],
)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("family")
    name = request.param
    models = next(
        each for each in (seeing_models, hearing_models, published_models) if name in each.FAMILIES
    )
    hears = models is hearing_models or name in published_models.HEARING
    return Made(folder, models.save(name, folder), "audio" if hears else "image")


def architecture(made: Made) -> str:
    return type(made.model).__name__


def text_of(made: Made, case: Case) -> str:
    return FAMILIES[architecture(made)].written.join(case.texts)


@functools.lru_cache(maxsize=16)
def expected(made: Made, case: Case, new: int = NEW) -> tuple[int, list[int]]:
    """Return the number of tokens of the prompt and the output, by `transformers` alone."""
    processor = FAMILIES[architecture(made)].reference(made.folder)
    inputs = processor(
        images=made.items(case) or None, text=text_of(made, case), return_tensors="pt"
    )
    with torch.no_grad():
        out = made.model.generate(
            **inputs, max_new_tokens=new, do_sample=False, suppress_tokens=list(SPECIAL)
        )
    count = inputs["input_ids"].shape[1]
    return count, out[0, count:].tolist()


def engine_of(made: Made, plugins: Plugins | None = None, **options: Any) -> AsyncEngine:
    defaults: dict[str, Any] = {
        "max_num_batched_tokens": CHUNKS.get(architecture(made), CHUNK),
        "block_size": 4, "max_model_len": 400, "max_num_seqs": 4,
        "num_gpu_blocks_override": 400,
    }  # fmt: skip
    if architecture(made) in SLOW:
        defaults |= {
            "max_num_batched_tokens": 100, "max_model_len": 2000, "num_gpu_blocks_override": 900,
        }  # fmt: skip
    return AsyncEngine(
        EngineConfig(
            model=str(made.folder), dtype="float32", **{"device": "cpu", **defaults, **options}
        ),
        plugins=plugins,
    )


def sent(made: Made, case: Case) -> list[Any]:
    """Return a case's items as callers send them."""
    items = made.items(case)
    return items if made.modality == "image" else [(item, hearing_models.RATE) for item in items]


async def run(engine: AsyncEngine, made: Made, case: Case, new: int = NEW) -> RequestOutput:
    prompt: Any = {
        "prompt": text_of(made, case), "multi_modal_data": {made.modality: sent(made, case)},
    }  # fmt: skip
    params = SamplingParams(
        max_tokens=new, temperature=0, ignore_eos=True, logit_bias=dict.fromkeys(SPECIAL, -100.0)
    )
    outputs = [output async for output in engine.generate(prompt, params)]
    return outputs[-1]


def check(made: Made, case: Case, output: RequestOutput, new: int = NEW) -> None:
    count, tokens = expected(made, case, new)
    assert output.error is None
    assert len(output.prompt_token_ids or ()) == count
    assert list(output.outputs[0].token_ids) == tokens


@pytest.mark.parametrize("cases", [CASES, {name: CASES[name] for name in FEW}], ids=["all", "few"])
async def test_each_prompt_says_what_transformers_says(cases: dict[str, Case], made: Made) -> None:
    """One after the other, in chunks that end inside pictures, with what earlier ones cached."""
    async with engine_of(made) as engine:
        for name, case in cases.items():
            check(made, case, await run(engine, made, case))
            assert engine.healthy, name


async def test_preempted_prompts_are_encoded_and_placed_again(made: Made) -> None:
    """Without a prefix cache, all of a prompt is computed again, up to the output behind it."""
    together: Sequence[Case] = [CASES[name] for name in ("one", "two", "none")]
    new = 40
    counts = [expected(made, case, new)[0] for case in together]
    windows = architecture(made) in CHUNKS  # Which give blocks back.
    async with engine_of(
        made, num_gpu_blocks_override=(sum(counts) // 4 + 12) * (1 + windows),
        max_model_len=max(counts) + new + 2,
        enable_prefix_caching=False,
    ) as engine:  # fmt: skip
        outputs = await at_once(engine, *(run(engine, made, case, new) for case in together))
        for case, output in zip(together, outputs, strict=True):
            check(made, case, output, new)
        assert windows or engine.stats().num_preemptions > 0


async def test_the_prefix_cache_knows_pictures_by_content(made: Made) -> None:
    async with engine_of(made, max_num_batched_tokens=80) as engine:
        first = await run(engine, made, CASES["one"])
        count = len(first.prompt_token_ids or ())
        again = await run(engine, made, CASES["one"])
        assert again.num_cached_tokens == (count - 1) // 4 * 4
        assert again.outputs[0].token_ids == first.outputs[0].token_ids
        # Behind the picture the words differ: hits end there.
        words = await run(engine, made, CASES["other words"])
        before = len(CASES["one"].texts[0])
        assert words.num_cached_tokens is not None
        least = -1 if architecture(made) in (*STATES, *PROMPTS) else before + 4
        assert least < words.num_cached_tokens < count - 3
        check(made, CASES["other words"], words)
        # Another picture shares the words before it, and nothing more.
        other = await run(engine, made, CASES["another"])
        assert other.num_cached_tokens is not None
        assert other.num_cached_tokens <= before + 2
        check(made, CASES["another"], other)
        assert again.outputs[0].token_ids != other.outputs[0].token_ids


async def test_outputs_join_no_prompt_whose_tokens_see_each_other(tmp_path: Path) -> None:
    seeing_models.save(PROMPTS[0], tmp_path)
    config = EngineConfig(model=str(tmp_path), device="cpu", max_model_len=400, max_num_seqs=4)

    async def inputs() -> AsyncIterator[StreamingInput]:
        yield StreamingInput([1, 2, 3])

    async with AsyncEngine(config) as engine:
        search = BeamSearch(engine, None, [1, 2], BeamSearchParams(beam_width=2, max_tokens=2))
        for outputs in (engine.session(inputs()), search.outputs()):
            with pytest.raises(InvalidRequest, match="see each other"):
                await anext(outputs)


@pytest.mark.parametrize("tower", ["clip_vision_model", "siglip_vision_model"])
@pytest.mark.parametrize("strategy", ["full", "default"])
def test_llava_has_a_token_for_each_row_of_its_tower(
    tower: str, strategy: str, tmp_path: Path
) -> None:
    vision = {**FAMILIES[LLAVA].config["vision_config"], "model_type": tower}
    model = seeing_models.save(
        LLAVA, tmp_path, vision_config=vision, vision_feature_select_strategy=strategy
    )
    processor = Llava.processor(MediaSetup(tmp_path, model.config))
    made = processor.image(picture(1))
    pixels = torch.from_numpy(made.tensors["pixel_values"])
    rows = model.model.get_image_features(pixel_values=pixels).pooler_output[0]
    assert len(made.token_ids) == len(rows)
