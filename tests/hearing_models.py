"""Tiny random checkpoints of families that take recordings, with all that they need."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from seeing_models import TEMPLATE, TEXT, randomize, tokenizer_with
from transformers.audio_utils import mel_filter_bank, spectrogram, window_function

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
    same_length: bool = False
    """Of recordings: `transformers` lets the shorter ones of a batch see what fills them up."""
    loud: str = ""
    """Part of the names of weights that are larger, so that recordings differ."""


def by_hand(
    token: str, rows: Callable[[int], int], mask: str, window: int | None, **options: Any
) -> Callable[[Path], Callable[..., dict[str, Any]]]:
    """Return what `Family.reference` is, as the processors of `transformers` are described: they
    differ by version. rows: of a window's frames; mask: what the model calls that of true frames;
    window: samples; options: of the extractor."""

    def reference(folder: Path) -> Callable[..., dict[str, Any]]:
        tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
        extractor: Any = transformers.AutoFeatureExtractor.from_pretrained(folder)

        def process(images: Any, text: str, return_tensors: str) -> dict[str, Any]:
            first, *others = text.split(token)
            data: dict[str, Any] = {}
            if images:
                pieces = [
                    [sound[at : at + (window or len(sound))]
                     for at in range(0, len(sound), window or len(sound))]
                    for sound in images
                ]  # fmt: skip
                made = extractor(
                    [piece for own in pieces for piece in own], sampling_rate=RATE,
                    return_attention_mask=True, return_tensors="pt", **options,
                )  # fmt: skip
                data = {"input_features": made["input_features"], mask: made["attention_mask"]}
                counts = iter([rows(frames) for frames in data[mask].sum(-1).tolist()])
                for words, own in zip(others, pieces, strict=True):
                    first += token * sum(next(counts) for _ in own) + words
            return {**tokenizer(first, return_tensors="pt", add_special_tokens=False), **data}

        return process

    return reference


def means_of_two(frames: int) -> int:
    """Rows of a convolution that skips every other frame, two by two."""
    return (-(-frames // 2)) // 2


def four_by_four(frames: int) -> int:
    return (-(-frames // 2)) // 4


def in_seconds(frames: int) -> int:
    """13 rows per 100 frames; three convolutions skip every other one of the rest."""
    rest = frames % 100
    for _ in range(3):
        rest = -(-rest // 2)
    return frames // 100 * 13 + rest


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


def granite(folder: Path) -> Callable[..., dict[str, Any]]:
    """As `GraniteSpeechProcessor`, whose extractor takes torchaudio: its spectrum by the functions
    of `transformers`."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    filters = mel_filter_bank(257, 16, 0.0, 8000.0, RATE, norm=None, mel_scale="htk")
    window = np.zeros(512)
    window[56:456] = window_function(400, "hann")

    def features(sound: np.ndarray) -> torch.Tensor:
        bands = spectrogram(
            sound.astype(np.float64), window, 512, 160, fft_length=512, power=2.0,
            mel_filters=filters, mel_floor=1e-10, log_mel="log10",
        )  # fmt: skip
        bands = np.maximum(bands, bands.max() - 8.0) / 4 + 1
        return torch.from_numpy(bands.T[: len(bands.T) // 2 * 2].reshape(-1, 32)).float()

    def process(images: Any, text: str, return_tensors: str) -> dict[str, Any]:
        first, *others = text.split("<|audio|>")
        data: dict[str, Any] = {}
        if images:
            sizes = transformers.GraniteSpeechFeatureExtractor._get_num_audio_features(
                SimpleNamespace(
                    melspec_kwargs={"hop_length": 160}, projector_window_size=15,
                    projector_downsample_rate=5,
                ),  # type: ignore[arg-type]
                [len(sound) for sound in images],
            )  # fmt: skip
            data["input_features"] = torch.nn.utils.rnn.pad_sequence(
                [features(sound) for sound in images], batch_first=True
            )
            data["input_features_mask"] = torch.arange(max(sizes)) < torch.tensor(sizes)[:, None]
            for words, count in zip(others, sizes, strict=True):
                first += "<|audio|>" * count + words
        return {**tokenizer(first, return_tensors="pt", add_special_tokens=False), **data}

    return process


FAMILIES: dict[str, Family] = {
    "Qwen2AudioForConditionalGeneration": Family(
        {"text_config": QWEN, "audio_config": BART, "audio_token_index": 300},
        EXTRACTOR, ("<|AUDIO|>", "<|audio_bos|>", "<|audio_eos|>"),
        "<|audio_bos|><|AUDIO|><|audio_eos|>",
        by_hand(
            "<|AUDIO|>", means_of_two, "feature_attention_mask", None, padding="max_length"
        ), most_seconds=1,
    ),
    "VoxtralForConditionalGeneration": Family(
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "audio_config": {**PLAIN, "max_source_positions": 40, "intermediate_size": 128},
            "audio_token_id": 300,
        },
        {**EXTRACTOR, "hop_length": 200},
        ("[AUDIO]", "[BEGIN_AUDIO]", "[INST]", "[/INST]", "[TRANSCRIBE]"), "[BEGIN_AUDIO][AUDIO]",
        voxtral,
    ),
    "AudioFlamingo3ForConditionalGeneration": Family(
        {
            "text_config": QWEN, "audio_config": {**PLAIN, "intermediate_size": 48},
            "audio_token_id": 300,
        },
        EXTRACTOR, ("<sound>",), "<sound>",
        by_hand("<sound>", means_of_two, "input_features_mask", RATE),
    ),
    "GlmAsrForConditionalGeneration": Family(
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "audio_config": {**PLAIN, "intermediate_size": 128, "max_position_embeddings": 40},
            "audio_token_id": 300,
        },
        {**EXTRACTOR, "hop_length": 200}, ("<|pad|>",), "<|pad|>",
        by_hand("<|pad|>", four_by_four, "input_features_mask", RATE),
    ),
    "Qwen3ASRForConditionalGeneration": Family(
        {
            "text_config": {**TEXT, "model_type": "qwen3", "tie_word_embeddings": False},
            "tie_word_embeddings": False,
            "audio_config": {
                "num_mel_bins": 16, "d_model": 32, "encoder_layers": 2, "output_dim": 64,
                "encoder_attention_heads": 4, "encoder_ffn_dim": 48, "n_window_infer": 200,
                "downsample_hidden_size": 8, "initializer_range": 0.2,
            },
            "audio_token_id": 300,
        },
        {"feature_size": 16}, ("<|audio_pad|>",), "<|audio_pad|>",
        by_hand(
            "<|audio_pad|>", in_seconds, "input_features_mask", None, padding=True,
            truncation=False,
        ),
        "Qwen3ASRFeatureExtractor",
    ),
    "GraniteSpeechForConditionalGeneration": Family(
        {
            "text_config": {**TEXT, "model_type": "granite"},
            "encoder_config": {
                "input_dim": 32, "num_layers": 2, "hidden_dim": 32, "feedforward_mult": 2,
                "num_heads": 4, "dim_head": 8, "output_dim": 12, "context_size": 20,
                "max_pos_emb": 24, "conv_kernel_size": 5,
            },
            "projector_config": {
                "model_type": "blip_2_qformer", "hidden_size": 32, "num_hidden_layers": 2,
                "num_attention_heads": 4, "intermediate_size": 48, "encoder_hidden_size": 32,
                "cross_attention_frequency": 1,
            },
            "audio_token_index": 300, "has_lora_adapter": False, "initializer_range": 0.2,
        },
        {"feature_size": 16, "n_fft": 512}, ("<|audio|>",), "<|audio|>", granite,
        same_length=True, loud="crossattention",
    ),
}  # fmt: skip


def save(architecture: str, folder: Path, **changes: Any) -> Any:
    """Save a random model with all that it needs; return the model."""
    family = FAMILIES[architecture]
    kind = getattr(transformers, architecture)
    torch.manual_seed(7)
    model = kind(kind.config_class(**{**copy.deepcopy(family.config), **changes})).float().eval()
    randomize(model)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if family.loud and family.loud in name and parameter.dim() > 1:
                parameter.mul_(6)
    model.save_pretrained(folder)
    template = TEMPLATE.replace("PICTURE", family.written).replace("'image'", "'audio'")
    tokenizer_with(family.specials, template).save_pretrained(folder)
    getattr(transformers, family.extractor)(**family.options).save_pretrained(folder)
    return model


def sound(seed: int, seconds: float = 0.8) -> np.ndarray:
    """A tone in noise, of whole frames (of others, some processors count one less in a batch)."""
    random = np.random.default_rng(seed)
    times = np.arange(int(seconds * 100) * RATE // 100) / RATE
    tone = 0.3 * np.sin(2 * np.pi * random.integers(100, 4000) * times)
    return (tone + random.normal(0, 0.05, len(times))).astype(np.float32)
