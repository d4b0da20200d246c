"""Tiny random checkpoints of multimodal families, with tokenizer and image processor."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

TEXT: dict[str, Any] = {
    "vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 512, "initializer_range": 0.2, "bos_token_id": None,
    "eos_token_id": None, "pad_token_id": 0,
}  # fmt: skip
TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "image_size": 32, "patch_size": 8, "initializer_range": 0.2,
}  # fmt: skip
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% elif part['type'] == 'image' %}PICTURE"
    "{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


class Family(NamedTuple):
    """How a family's checkpoint is made."""

    config: dict[str, Any]
    """Arguments of its configuration."""
    processor: str
    """Image processor of `transformers`."""
    options: dict[str, Any]
    specials: tuple[str, ...]
    """Special tokens: ids from 300 on."""
    written: str
    """What a prompt has for a picture."""
    reference: Callable[[Path], Any]
    """Folder → the processor of `transformers`."""


def parts_of(folder: Path) -> tuple[Any, Any]:
    """Return the image processor and the tokenizer there."""
    tokenizer: Any = transformers.AutoTokenizer.from_pretrained(folder)
    return transformers.AutoImageProcessor.from_pretrained(folder, backend="pil"), tokenizer


FAMILIES: dict[str, Family] = {
    "LlavaForConditionalGeneration": Family(
        {
            "text_config": {**TEXT, "model_type": "llama"},
            "vision_config": {**TOWER, "model_type": "clip_vision_model", "projection_dim": 32},
            "image_token_id": 300, "vision_feature_layer": -2,
        },
        "CLIPImageProcessorPil",
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}},
        ("<image>",),
        "<image>",
        lambda folder: transformers.LlavaProcessor(
            *parts_of(folder), patch_size=8, vision_feature_select_strategy="default",
            num_additional_image_tokens=1,
        ),
    ),
}  # fmt: skip


def tokenizer_with(specials: tuple[str, ...], template: str) -> PreTrainedTokenizerFast:
    """One token per byte, and special tokens from 300 on."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fill = [f"<unused{number}>" for number in range(300 - len(alphabet))]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *fill])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    create: Any = PreTrainedTokenizerFast
    made: PreTrainedTokenizerFast = create(tokenizer_object=backend, chat_template=template)
    return made


def save(architecture: str, folder: Path, **changes: Any) -> Any:
    """Save a random model with all that it needs; return the model."""
    family = FAMILIES[architecture]
    kind = getattr(transformers, architecture)
    torch.manual_seed(7)
    config = {**copy.deepcopy(family.config), **changes}
    model = kind(kind.config_class(**config)).float().eval()
    with torch.no_grad():
        for _name, parameter in model.named_parameters():
            # Gains and biases that are all alike would hide faults of scale.
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    tokenizer_with(family.specials, TEMPLATE.replace("PICTURE", family.written)).save_pretrained(
        folder
    )
    getattr(transformers, family.processor)(**family.options).save_pretrained(folder)
    return model


def picture(seed: int, width: int = 40, height: int = 32) -> Image.Image:
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)
