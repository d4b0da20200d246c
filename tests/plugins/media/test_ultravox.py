"""Forms of Ultravox's checkpoints; others than those that are served are refused with the field."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hearing_models import RATE, sound
from published_models import RESERVED, ULTRAVOX, save, ultravox_reference
from safetensors.torch import load_file, save_file

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.errors import ConfigError
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.protocols.media import MediaSetup
from jackfield.core.registry import load_plugins
from jackfield.plugins.media.ultravox import Ultravox, UltravoxFeatures

NAME = "UltravoxModel"
NEW = 10


def with_text_of_its_own(folder: Path) -> None:
    """As one puts a text model's repository beside Ultravox's."""
    whole = folder / "model.safetensors"
    tensors = load_file(whole)
    text = {n.removeprefix("language_model."): t for n, t in tensors.items() if "language" in n}
    save_file(text, folder / "model-00001-of-00001.safetensors")
    others = {name: tensor for name, tensor in tensors.items() if "language" not in name}
    save_file(others, folder / "ultravox.safetensors")
    whole.unlink()


@pytest.mark.parametrize("form", ["old projector", "text of its own"])
async def test_forms_of_checkpoints(form: str, tmp_path: Path) -> None:
    """Ultravox 0.4 has its second norm behind the projector."""
    model = save(NAME, tmp_path, projector_ln_mid=form != "old projector")
    if form == "text of its own":
        with_text_of_its_own(tmp_path)
    sounds = [sound(1, 0.8), sound(2, 2.31)]
    text = f"Hear {RESERVED} and {RESERVED}."
    inputs = ultravox_reference(tmp_path)(sounds, text, "pt")
    barred = list(range(300, 320))
    with torch.no_grad():
        out = model.generate(**inputs, max_new_tokens=NEW, do_sample=False, suppress_tokens=barred)
    count = inputs["input_ids"].shape[1]
    config = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="float32", max_num_batched_tokens=9,
        num_gpu_blocks_override=100,
    )  # fmt: skip
    prompt: Any = {"prompt": text, "multi_modal_data": {"audio": [(s, RATE) for s in sounds]}}
    params = SamplingParams(
        max_tokens=NEW, temperature=0, ignore_eos=True, logit_bias=dict.fromkeys(barred, -100.0)
    )
    async with AsyncEngine(config) as engine:
        output = [each async for each in engine.generate(prompt, params)][-1]
    assert output.error is None and len(output.prompt_token_ids or ()) == count
    assert list(output.outputs[0].token_ids) == out[0, count:].tolist()


def setup_of(folder: Path, tokens: dict[str, list[int]], **changes: Any) -> MediaSetup:
    save(NAME, folder, **changes)
    config = resolve_model_config(EngineConfig(model=str(folder)), load_plugins()).whole_config
    return MediaSetup(folder, config, tokenize=lambda text: tokens.get(text, [1, 2, 3]))


def test_a_recording_takes_what_it_takes_in_the_published_code(tmp_path: Path) -> None:
    """By its windows of 30 s: 1,500 rows, of which 8 are one."""
    audio = {**ULTRAVOX.config["audio_config"], "max_source_positions": 1500}
    (folder := tmp_path / "made").mkdir()
    setup = setup_of(folder, {"<|audio|>": [300]}, audio_config=audio, stack_factor=8)
    features = UltravoxFeatures(setup)
    counts = {0.001: 1, 0.5: 4, 1: 7, 29.99: 188, 30: 188, 30.01: 189, 61: 188 + 188 + 7}
    for seconds, count in counts.items():
        made = features.audio(np.zeros(int(seconds * RATE), dtype=np.float32))
        assert list(made.token_ids) == [300] * count, seconds
        assert len(made.tensors["frames"]) == -(-seconds // 30)


@pytest.mark.parametrize(
    ("tokens", "index", "placeholder"),
    [
        ({"<|audio|>": [310], RESERVED: [300]}, None, 310),
        ({"<|audio|>": [320], RESERVED: [300]}, 320, 300),
        ({RESERVED: [300]}, None, 300),
        ({}, 305, 305),
        ({"<|audio|>": [320]}, 320, None),
    ],
)
def test_a_token_with_an_embedding_stands_for_a_recording(
    tokens: dict[str, list[int]], index: int | None, placeholder: int | None, tmp_path: Path
) -> None:
    setup = setup_of(tmp_path, tokens, audio_token_index=index)
    if placeholder is not None:
        assert UltravoxFeatures(setup).placeholder_id == placeholder
        return
    with pytest.raises(ConfigError, match=r"none of <\|audio\|>, .* in the vocabulary of 320"):
        UltravoxFeatures(setup)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"projector_act": "gelu"}, "projector_act is 'gelu', and not 'swiglu'"),
        ({"num_projector_layers": 2}, "num_projector_layers is 2, and only 0 is served"),
        ({"audio_latency_block_size": 50}, "audio_latency_block_size is 50"),
        ({"audio_config": {"model_type": "wav2vec2-bert"}}, "of type wav2vec2-bert, and not"),
        ({}, None),
    ],
)
def test_other_parts_are_refused(
    changes: dict[str, Any], reason: str | None, tmp_path: Path
) -> None:
    refusal = Ultravox.refusal(setup_of(tmp_path, {}, **changes))
    assert refusal is None if reason is None else reason in (refusal or "")


@pytest.mark.parametrize("part", ["text", "audio"])
def test_parts_in_other_repositories_are_refused_with_the_field(part: str, tmp_path: Path) -> None:
    save(NAME, tmp_path, **{f"{part}_model_id": "owner/name", f"{part}_config": None})
    with pytest.raises(ConfigError, match=rf"{part}_model_id must be null, with .*'owner/name'"):
        resolve_model_config(EngineConfig(model=str(tmp_path)), load_plugins())
