"""Gemma 3n and Gemma 4 with recordings say what `transformers` says."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hearing_models import RATE, sound
from seeing_models import FAMILIES, TEMPLATE, TEXT, picture, randomize, tokenizer_with
from transformers.models.auto.image_processing_auto import AutoImageProcessor

from jackfield import AsyncEngine, EngineConfig, SamplingParams

from helpers import LAYER_INPUTS

SPECIALS = (
    "<image_soft_token>", "<start_of_image>", "<end_of_image>", "<video>", "<audio_soft_token>",
    "<start_of_audio>", "<end_of_audio>",
)  # fmt: skip
AUDIO = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "output_proj_dims": 48,
    "subsampling_conv_channels": [16, 4], "attention_chunk_size": 4, "attention_context_left": 5,
    "initializer_range": 0.2,
}  # fmt: skip
NEW = 10
NOT_WRITTEN = range(300, 307)
"""`transformers` reads some of these as media."""


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Path]:
    folder = tmp_path_factory.mktemp("gemma")
    config = copy.deepcopy(FAMILIES["Gemma4ForConditionalGeneration"].config)
    config["text_config"].pop("use_bidirectional_attention")
    config |= {"audio_config": AUDIO, "boa_token_id": 305, "eoa_token_index": 306}
    kind = transformers.Gemma4ForConditionalGeneration
    torch.manual_seed(7)
    model: Any = kind(kind.config_class(**config)).float().eval()
    randomize(model)
    with torch.no_grad():
        for name, buffer in model.named_buffers():  # Numbers beyond these are cut.
            if name.endswith(("_min", "_max")):
                buffer.fill_(-1.5 if name.endswith("_min") else 1.5)
    model.save_pretrained(folder)
    tokenizer_with(SPECIALS, TEMPLATE).save_pretrained(folder)
    images = transformers.Gemma4ImageProcessorPil(
        **FAMILIES["Gemma4ForConditionalGeneration"].options
    )
    images.save_pretrained(folder)
    own = json.loads((folder / "preprocessor_config.json").read_text())
    sounds = transformers.Gemma4AudioFeatureExtractor(feature_size=16)
    sounds.save_pretrained(folder)
    heard = json.loads((folder / "preprocessor_config.json").read_text())
    (folder / "preprocessor_config.json").unlink()
    both = {"image_processor": own, "feature_extractor": heard}
    (folder / "processor_config.json").write_text(json.dumps(both))
    return model, folder


def expected(
    made: tuple[Any, Path], text: str, sounds: list[np.ndarray], pictures: list[Any]
) -> tuple[int, list[int]]:
    """Return the number of tokens of the prompt and the output, by `transformers` alone."""
    model, folder = made
    inputs: dict[str, Any] = {}
    if sounds:
        extractor = transformers.Gemma4AudioFeatureExtractor(feature_size=16)
        inputs |= extractor(sounds, sampling_rate=RATE, return_tensors="pt")
        for mask in inputs["input_features_mask"]:
            count = int(mask[::2][::2].sum())
            run = f"<start_of_audio>{'<AUDIO>' * count}<end_of_audio>"
            text = text.replace("<audio_soft_token>", run, 1)
        text = text.replace("<AUDIO>", "<audio_soft_token>")
    if pictures:
        images: Any = AutoImageProcessor.from_pretrained(folder, backend="pil")
        pixels = dict(images(images=pictures, return_tensors="pt"))
        [count] = pixels.pop("num_soft_tokens_per_image")
        run = f"<start_of_image>{'<image_soft_token>' * int(count)}<end_of_image>"
        text = text.replace("<image_soft_token>", run)
        inputs |= pixels
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    inputs |= tokenizer(text, return_tensors="pt", add_special_tokens=False)
    ids = inputs["input_ids"]
    inputs["mm_token_type_ids"] = (ids == 300).int() + 3 * (ids == 304).int()
    with torch.no_grad():
        out = model.generate(
            **inputs, max_new_tokens=NEW, do_sample=False, suppress_tokens=list(NOT_WRITTEN)
        )
    return ids.shape[1], out[0, ids.shape[1] :].tolist()


async def test_recordings_and_pictures(made: tuple[Any, Path]) -> None:
    """In chunks that end inside items; recordings of several lengths, one of them twice."""
    one, two = sound(1, 0.9), sound(2, 1.53)
    cases: list[tuple[str, list[np.ndarray], list[Any]]] = [
        ("Hear <audio_soft_token> and <audio_soft_token>.", [two, one], []),
        ("<audio_soft_token>?", [one], []),
        ("See <image_soft_token>, hear <audio_soft_token>!", [two], [picture(3)]),
        ("No more.", [], []),
    ]
    config = EngineConfig(
        model=str(made[1]), device="cpu", dtype="float32", max_num_batched_tokens=9, block_size=4,
        max_model_len=300, max_num_seqs=4, num_gpu_blocks_override=400,
    )  # fmt: skip
    barred = dict.fromkeys(NOT_WRITTEN, -100.0)
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, logit_bias=barred)
    answers = []
    async with AsyncEngine(config) as engine:
        for text, sounds, pictures in cases:
            media = {"audio": [(each, RATE) for each in sounds], "image": pictures}
            prompt: Any = {"prompt": text, "multi_modal_data": media}
            output = [each async for each in engine.generate(prompt, params)][-1]
            assert output.error is None, output.error
            answers.append((len(output.prompt_token_ids), list(output.outputs[0].token_ids)))
        engine.core.check_idle()
    assert answers == [expected(made, *case) for case in cases]
    assert len({tuple(tokens) for _, tokens in answers}) == len(cases)


class Models:
    """Makes the parts of a model, but for the tower that takes `timm`."""

    @staticmethod
    def from_config(config: Any, **options: Any) -> Any:
        if "vision" in type(config).__name__.lower():
            return torch.nn.Identity()
        create: Any = transformers.AutoModel.from_config
        return create(config, **options)


async def test_gemma_3n_hears(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With as many tokens for any length."""
    from transformers.models.gemma3n import modeling_gemma3n

    monkeypatch.setattr(modeling_gemma3n, "AutoModel", Models)
    _, layers = LAYER_INPUTS["gemma3n"]
    audio = {
        "vocab_size": 4, "vocab_offset": 304, "input_feat_size": 16, "hidden_size": 32,
        "conf_attention_chunk_size": 4, "conf_attention_context_left": 5,
        "conf_num_attention_heads": 4, "conf_num_hidden_layers": 2,
        "sscp_conv_channel_size": [8, 4], "initializer_range": 0.2,
    }  # fmt: skip
    text = {**TEXT, **layers, "vocab_size": 308, "intermediate_size": [96] * 5}
    text |= {"vocab_size_per_layer_input": 300}
    ids = {"boa_token_id": 300, "eoa_token_id": 304, "audio_token_id": 305, "image_token_id": 301}
    kind = transformers.Gemma3nForConditionalGeneration
    torch.manual_seed(7)
    vision = {"vocab_size": 2, "vocab_offset": 302, "hidden_size": 32}
    model: Any = kind(
        kind.config_class(
            text_config=text, audio_config=audio, vision_config=vision,
            audio_soft_tokens_per_image=60, **ids,
        )
    ).float().eval()  # fmt: skip
    randomize(model)
    model.save_pretrained(tmp_path)
    names = ("<start_of_audio>", "<image>", "<a>", "<b>", "<end_of_audio>", "<audio_soft_token>")
    tokenizer_with(names, TEMPLATE).save_pretrained(tmp_path)
    extractor = transformers.Gemma3nAudioFeatureExtractor(feature_size=16)
    extractor.save_pretrained(tmp_path)
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(tmp_path)
    config = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="float32", max_num_batched_tokens=9,
        block_size=4, max_model_len=300, max_num_seqs=4, num_gpu_blocks_override=400,
    )  # fmt: skip
    barred = dict.fromkeys(range(300, 308), -100.0)
    params = SamplingParams(max_tokens=NEW, temperature=0, ignore_eos=True, logit_bias=barred)
    async with AsyncEngine(config) as engine:
        for seconds in (0.7, 1.9):
            heard = sound(4, seconds)
            data: Any = {"prompt": "Hear <audio_soft_token>!", "multi_modal_data": {"audio": heard}}
            output = [each async for each in engine.generate(data, params)][-1]
            run = f"<start_of_audio>{'<audio_soft_token>' * 60}<end_of_audio>"
            inputs = tokenizer(
                f"Hear \n\n{run}\n\n!", return_tensors="pt", add_special_tokens=False
            )
            inputs |= extractor([heard], sampling_rate=RATE, return_tensors="pt")
            with torch.no_grad():
                out = model.generate(
                    **inputs, max_new_tokens=NEW, do_sample=False,
                    suppress_tokens=list(range(300, 308)),
                )  # fmt: skip
            count = inputs["input_ids"].shape[1]
            assert output.error is None and len(output.prompt_token_ids) == count
            assert list(output.outputs[0].token_ids) == out[0, count:].tolist()
