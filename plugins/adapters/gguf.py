"""LoRA adapters in GGUF files, as llama.cpp's convert_lora_to_gguf.py writes them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import ClassVar

import torch

from ...core.adapters.file import AdapterFile, LowRank, ReadTensor
from ...core.errors import ConfigError, listed, shown
from .content import check_invocation, with_digest
from .gguf_file import GgufFile

SUFFIX = ".gguf"
BLOCK = re.compile(r"blk\.(0|[1-9][0-9]{0,4})\.(\w+)\.weight", re.ASCII)
A, B = ".lora_a", ".lora_b"
ALPHA, TOKENS = "adapter.lora.alpha", "adapter.alora.invocation_tokens"

ATTENTION = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}  # fmt: skip
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
PACKED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}


@dataclass(frozen=True)
class Family:
    """What the tensors of an architecture are called in checkpoints."""

    layers: Mapping[str, str]
    """GGUF's name of a layer in a block → the checkpoint's."""
    experts: Mapping[str, str] = field(default_factory=dict)
    """The same of layers of all experts, with {} for an expert's number."""
    pairs: bool = False
    """Whether queries and keys have the channels of a rotation side by side."""


MOE = Family(
    {
        **ATTENTION, **MLP, "ffn_gate_inp": "mlp.gate",
        "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
        "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
        "ffn_up_shexp": "mlp.shared_expert.up_proj",
        "ffn_down_shexp": "mlp.shared_expert.down_proj",
    },
    {
        "ffn_gate_exps": "mlp.experts.{}.gate_proj", "ffn_up_exps": "mlp.experts.{}.up_proj",
        "ffn_down_exps": "mlp.experts.{}.down_proj",
    },
)  # fmt: skip
DENSE = Family({**ATTENTION, **MLP})
FAMILIES = {
    "llama": Family(
        # Mixtral is of this architecture, too.
        {**ATTENTION, **MLP, "ffn_gate_inp": "block_sparse_moe.gate"},
        {
            "ffn_gate_exps": "block_sparse_moe.experts.{}.w1",
            "ffn_up_exps": "block_sparse_moe.experts.{}.w3",
            "ffn_down_exps": "block_sparse_moe.experts.{}.w2",
        },
        pairs=True,
    ),
    "granite": Family({**ATTENTION, **MLP}, pairs=True),
    "qwen2": DENSE, "qwen3": DENSE, "gemma": DENSE, "gemma2": DENSE, "gemma3": DENSE,
    "olmo2": DENSE, "qwen2moe": MOE, "qwen3moe": MOE,
    "phi3": Family({**ATTENTION, **MLP, **PACKED}),
    "glm4": Family({**ATTENTION, **MLP, "ffn_up": PACKED["ffn_up"]}),
}  # fmt: skip


class GgufFormat:
    """LoRA adapters of llama.cpp: one GGUF file."""

    name: ClassVar[str] = "gguf"

    @classmethod
    def is_at(cls, path: Path) -> bool:
        if path.is_dir():
            return len(list(path.glob(f"*{SUFFIX}"))) == 1
        return path.suffix == SUFFIX and path.is_file()

    @classmethod
    def read(cls, path: Path) -> AdapterFile:
        """Raises ConfigError with the key or the tensor's name as `param`."""
        if path.is_dir():
            files = sorted(path.glob(f"*{SUFFIX}"))
            if len(files) != 1:
                raise ConfigError(f"an adapter is one *{SUFFIX}, and here are {len(files)}")
            path = files[0]
        return with_digest(_changes(GgufFile(path, path.parent)))


def _changes(file: GgufFile) -> AdapterFile:
    for key, value in (("general.type", "adapter"), ("adapter.type", "lora")):
        if file.fields.get(key) != value:
            raise ConfigError(
                f"{key}: must be {value!r}, and {file.name} has {shown(file.fields.get(key))}",
                param=key,
            )
    architecture = file.fields.get("general.architecture")
    family = FAMILIES.get(architecture) if isinstance(architecture, str) else None
    if family is None:
        raise ConfigError(
            f"general.architecture: GGUF adapters of {', '.join(FAMILIES)} are read, and this one "
            f"is of {shown(architecture)}; give the adapter in PEFT's form",
            param="general.architecture",
        )
    alpha = file.fields.get(ALPHA, 0.0)
    if not isinstance(alpha, float) or not abs(alpha) <= 1e9:
        raise ConfigError(f"{ALPHA}: must be a number, got {shown(alpha)}", param=ALPHA)
    changed: list[LowRank] = []
    for name in _layers(file):
        changed += _of_layer(file, name, family, alpha)
    if not changed:
        raise ConfigError(f"{file.name}: has no tensor of an adapter", param=file.name)
    prefix = file.fields.get("adapter.lora.prompt_prefix")
    base = file.fields.get("general.base_model.0.repo_url") or file.fields.get("general.name")
    adapter = AdapterFile(
        digest="",
        low_rank=tuple(changed),
        invocation_tokens=_invocation(file.fields.get(TOKENS)),
        base_model=str(base or "")[:512],
        notes=(
            f"adapter.lora.prompt_prefix is the client's to write: {shown(prefix)}",
        ) if prefix else (),
    )  # fmt: skip
    check_invocation(adapter, TOKENS)
    return adapter


def _invocation(value: object) -> tuple[int, ...]:
    if value is None:
        return ()
    if not isinstance(value, list) or not value or not all(
        type(token) is int and 0 <= token < 1 << 31 for token in value
    ):  # fmt: skip
        raise ConfigError(f"{TOKENS}: must be a list of tokens, got {shown(value)}", param=TOKENS)
    return tuple(value)


def _layers(file: GgufFile) -> list[str]:
    """Return the names of what has both A and B."""
    names: dict[str, set[str]] = {}
    for name in file.tensors:
        stem, part = name[: -len(A)], name[-len(A) :]
        if part not in (A, B):
            norm = "; norms are not served" if name.endswith("_norm.weight") else ""
            raise ConfigError(
                f"the tensor {shown(name)} is no part of a low-rank change{norm}", param=name[:512]
            )
        names.setdefault(stem, set()).add(part)
    for stem, parts in names.items():
        if len(parts) < 2:
            raise ConfigError(
                f"the tensor {shown(stem)} has {listed(parts)} alone", param=f"{stem}{min(parts)}"
            )
    return sorted(names)


def _of_layer(file: GgufFile, name: str, family: Family, alpha: float) -> list[LowRank]:
    """Return the changes of a layer, or of all experts."""
    a, b = file.tensors[name + A].shape, file.tensors[name + B].shape
    read_a, read_b = partial(file.read, name + A), partial(file.read, name + B)
    layer, match = "", BLOCK.fullmatch(name)
    if name == "token_embd.weight":
        layer, a, read_a = "model.embed_tokens", a[::-1], partial(_transposed, read_a)
    elif name == "output.weight":
        layer = "lm_head"
    elif match is not None:
        number, leaf = match.groups()
        if leaf in family.layers:
            layer = f"model.layers.{number}.{family.layers[leaf]}"
        elif leaf in family.experts:
            return _of_experts(
                file, name, f"model.layers.{number}.{family.experts[leaf]}", alpha
            )  # fmt: skip
    if not layer:
        raise ConfigError(
            f"the tensor {shown(name)} is none that is known of this architecture",
            param=name[:512],
        )
    pairs = family.pairs and layer.endswith(("q_proj", "k_proj"))
    return [
        _low_rank(
            name, layer, alpha, (a, b), (read_a, read_b), pairs=pairs,
            embedding=name == "token_embd.weight",
        )
    ]  # fmt: skip


def _of_experts(file: GgufFile, name: str, layers: str, alpha: float) -> list[LowRank]:
    """Return the changes of each expert's layer: the tensors are [experts, rank, in] and
    [experts, out, rank]."""
    a, b = file.tensors[name + A].shape, file.tensors[name + B].shape
    if len(a) != 3 or len(b) != 3 or a[0] != b[0]:
        raise _wrong_shapes(name, a, b)
    return [
        _low_rank(
            name, layers.format(expert), alpha, (a[1:], b[1:]),
            (partial(file.read, name + A, expert), partial(file.read, name + B, expert)),
        )
        for expert in range(a[0])
    ]  # fmt: skip


def _low_rank(
    name: str,
    layer: str,
    alpha: float,
    shapes: tuple[tuple[int, ...], tuple[int, ...]],
    reads: tuple[ReadTensor, ReadTensor],
    *,
    pairs: bool = False,
    embedding: bool = False,
) -> LowRank:
    a, b = shapes
    if len(a) != 2 or len(b) != 2 or a[0] != b[1]:
        raise _wrong_shapes(name, a, b)
    return LowRank(
        name=layer,
        rank=a[0],
        in_features=a[1],
        out_features=b[0],
        # llama.cpp: an alpha of 0 is none.
        scale=alpha / a[0] if alpha else 1.0,
        a=reads[0],
        b=reads[1],
        embedding=embedding,
        pairs=pairs,
    )


def _wrong_shapes(name: str, a: tuple[int, ...], b: tuple[int, ...]) -> ConfigError:
    return ConfigError(
        f"the tensors of {shown(name)} do not fit each other: A {list(a)}, B {list(b)}",
        param=name[:512],
    )


def _transposed(read: Callable[[], torch.Tensor]) -> torch.Tensor:
    return read().t()
