"""Phi-4-multimodal with recordings says what `transformers` says, in both forms of checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hearing_models import RATE, sound
from published_models import save as save_published
from seeing_models import PHI, picture, save

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import InvalidRequest

NEW = 10
NOT_WRITTEN = (300, 301)
HEARD = "<|endoftext11|>"


def expected(model: Any, folder: Path, text: str, sounds: list[Any]) -> tuple[int, list[int]]:
    """Return the number of tokens of the prompt and the output, by `transformers` alone."""
    tokenizer: Any = transformers.PreTrainedTokenizerFast.from_pretrained(folder)
    inputs: dict[str, Any] = {}
    if sounds:
        extractor = transformers.Phi4MultimodalFeatureExtractor()
        inputs = dict(extractor(sounds, sampling_rate=RATE, return_tensors="pt"))
        for count in inputs["audio_embed_sizes"].tolist():
            text = text.replace(HEARD, "<RUN>" * count, 1)
        text = text.replace("<RUN>", HEARD)
    inputs |= tokenizer(text, return_tensors="pt", add_special_tokens=False)
    with torch.no_grad():
        out = model.generate(
            **inputs, max_new_tokens=NEW, do_sample=False, suppress_tokens=list(NOT_WRITTEN)
        )
    count = inputs["input_ids"].shape[1]
    return count, out[0, count:].tolist()


@pytest.mark.parametrize(
    ("make", "name"), [(save, PHI), (save_published, "Phi4MMForCausalLM")], ids=["hf", "published"]
)
async def test_recordings(make: Any, name: str, tmp_path: Path) -> None:
    """In chunks that end inside them. Those of a prompt are of one length: `transformers` lets the
    shorter ones see what fills them up."""
    model = make(name, tmp_path)
    cases = [
        (f"Hear {HEARD} and {HEARD}.", [sound(1, 1.5), sound(2, 1.5)]),
        (f"{HEARD}?", [sound(3, 0.9)]),
        ("No more.", []),
    ]
    config = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="float32", max_num_batched_tokens=9, block_size=4,
        max_model_len=1000, max_num_seqs=4, num_gpu_blocks_override=400,
    )  # fmt: skip
    barred = dict.fromkeys(NOT_WRITTEN, -100.0)
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, logit_bias=barred)
    answers = []
    async with AsyncEngine(config) as engine:
        for text, sounds in cases:
            data: Any = {"prompt": text, "multi_modal_data": {"audio": [(s, RATE) for s in sounds]}}
            output = [each async for each in engine.generate(data, params)][-1]
            assert output.error is None, output.error
            answers.append((len(output.prompt_token_ids or ()), list(output.outputs[0].token_ids)))
        both: Any = {
            "prompt": f"<|endoftext10|>{HEARD}",
            "multi_modal_data": {"audio": [(sound(1, 0.5), RATE)], "image": picture(1)},
        }
        with pytest.raises(InvalidRequest, match="pictures or recordings in a prompt, and not"):
            await anext(engine.generate(both, params))
        short: Any = {"prompt": HEARD, "multi_modal_data": {"audio": (sound(1, 0.02), RATE)}}
        with pytest.raises(InvalidRequest, match="too short"):
            await anext(engine.generate(short, params))
        engine.core.check_idle()
    assert answers == [expected(model, tmp_path, *case) for case in cases]
    assert len({tuple(tokens) for _, tokens in answers}) == len(cases)
