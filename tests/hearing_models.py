"""Tiny random checkpoints of families that take recordings, with all that they need."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from seeing_models import TEMPLATE, TEXT, randomize, tokenizer_with

RATE = 16_000
TOWER: dict[str, Any] = {
    "num_mel_bins": 16, "max_source_positions": 50, "initializer_range": 0.2, "init_std": 0.2,
}  # fmt: skip
BART: dict[str, Any] = {
    **TOWER, "d_model": 32, "encoder_layers": 2, "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
}  # fmt: skip
PLAIN: dict[str, Any] = {
    **TOWER, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
}  # fmt: skip
QWEN: dict[str, Any] = {**TEXT, "model_type": "qwen2"}
EXTRACTOR: dict[str, Any] = {"feature_size": 16, "chunk_length": 1}


class Family(NamedTuple):
    """How a family's checkpoint is made."""

    config: dict[str, Any]
    """Arguments of its configuration."""
    options: dict[str, Any]
    """Of its feature extractor."""
    specials: tuple[str, ...]
    """Special tokens: ids from 300 on."""
    written: str
    """What a prompt has for a recording."""
    reference: Callable[[Path], Any]
    """Folder → what processes recordings and text as `transformers` does."""
    extractor: str = "WhisperFeatureExtractor"
    most_seconds: float = 3
    """Of the longest recording that tests send."""


def by_processor(
    kind: str, token: str, **attributes: Any
) -> Callable[[Path], Callable[..., dict[str, Any]]]:
    """Return what `Family.reference` is: by what a processor of `transformers` writes for each
    recording, also where it takes one per text."""

    def reference(folder: Path) -> Callable[..., dict[str, Any]]:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        extractor: Any = transformers.AutoFeatureExtractor.from_pretrained(folder)
        own = SimpleNamespace(
            feature_extractor=extractor, tokenizer=tokenizer, audio_token=token, **attributes
        )
        processor: Any = getattr(transformers, kind)
        for name in ("_process_audio", "_get_audio_token_length", "replace_audio_token"):
            if hasattr(processor, name):
                setattr(own, name, MethodType(getattr(processor, name), own))

        def process(images: Any, text: str, return_tensors: str) -> dict[str, Any]:
            first, *others = text.split(token)
            data: dict[str, Any] = {}
            if images:
                data, replaced = own._process_audio(
                    list(images), sampling_rate=RATE, return_attention_mask=True,
                    return_tensors="pt",
                )  # fmt: skip
                for words, sound in zip(others, replaced, strict=True):
                    first += sound + words
            inputs = tokenizer(first, return_tensors="pt", add_special_tokens=False)
            kept = {name: value for name, value in data.items() if name != "num_audio_tokens"}
            return {**inputs, **kept}

        return process

    return reference


def voxtral(folder: Path) -> Callable[..., dict[str, Any]]:
    """As `VoxtralProcessor`, whose tokens come from a package of Mistral's: 10 rows of a window of
    80 frames."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    extractor: Any = transformers.AutoFeatureExtractor.from_pretrained(folder)

    def process(images: Any, text: str, return_tensors: str) -> dict[str, Any]:
        first, *others = text.split("[AUDIO]")
        data = {}
        if images:
            retrieve: Any = transformers.VoxtralProcessor._retrieve_input_features
            data["input_features"] = retrieve(
                SimpleNamespace(feature_extractor=extractor), images, 80, sampling_rate=RATE,
                padding=True, truncation=False, pad_to_multiple_of=RATE, return_tensors="pt",
            )  # fmt: skip
            for words, sound in zip(others, images, strict=True):
                first += "[AUDIO]" * (10 * -(-len(sound) // RATE)) + words
        return {**tokenizer(first, return_tensors="pt", add_special_tokens=False), **data}

    return process


FAMILIES: dict[str, Family] = {
    "Qwen2AudioForConditionalGeneration": Family(
        {"text_config": QWEN, "audio_config": BART, "audio_token_index": 300},
        EXTRACTOR, ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        "<|audio_bos|><|AUDIO|><|audio_eos|>",
        by_processor("Qwen2AudioProcessor", "<|AUDIO|>"), most_seconds=1,
    ),
    "VoxtralForConditionalGeneration": Family(
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "audio_config": {**PLAIN, "max_source_positions": 40, "intermediate_size": 128},
            "audio_token_id": 300,
        },
        {**EXTRACTOR, "hop_length": 200}, ("[AUDIO]", "[BEGIN_AUDIO]"), "[BEGIN_AUDIO][AUDIO]",
        voxtral,
    ),
    "AudioFlamingo3ForConditionalGeneration": Family(
        {
            "text_config": QWEN, "audio_config": {**PLAIN, "intermediate_size": 48},
            "audio_token_id": 300,
        },
        EXTRACTOR, ("<sound>",), "<sound>",
        by_processor("AudioFlamingo3Processor", "<sound>", max_audio_len=600),
    ),
    "GlmAsrForConditionalGeneration": Family(
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "audio_config": {**PLAIN, "intermediate_size": 128, "max_position_embeddings": 40},
            "audio_token_id": 300,
        },
        {**EXTRACTOR, "hop_length": 200}, ("<|pad|>",), "<|pad|>",
        by_processor("GlmAsrProcessor", "<|pad|>", max_audio_len=655),
    ),
}  # fmt: skip


def save(architecture: str, folder: Path, **changes: Any) -> Any:
    """Save a random model with all that it needs; return the model."""
    family = FAMILIES[architecture]
    kind = getattr(transformers, architecture)
    torch.manual_seed(7)
    model = kind(kind.config_class(**{**copy.deepcopy(family.config), **changes})).float().eval()
    randomize(model)
    model.save_pretrained(folder)
    template = TEMPLATE.replace("PICTURE", family.written).replace("'image'", "'audio'")
    tokenizer_with(family.specials, template).save_pretrained(folder)
    getattr(transformers, family.extractor)(**family.options).save_pretrained(folder)
    return model


def sound(seed: int, seconds: float = 0.8) -> np.ndarray:
    """A tone in noise."""
    random = np.random.default_rng(seed)
    times = np.arange(int(seconds * RATE)) / RATE
    tone = 0.3 * np.sin(2 * np.pi * random.integers(100, 4000) * times)
    return (tone + random.normal(0, 0.05, len(times))).astype(np.float32)
