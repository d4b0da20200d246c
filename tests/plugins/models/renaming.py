"""Tensors of families that `transformers` has, by the names that equal families give them."""

from __future__ import annotations

import re
from collections.abc import Callable

import torch

from jackfield.plugins.conformance.paged_model import VOCAB

HIDDEN, KV_HEADS, SIZE = 64, 2, 16
Tensors = dict[str, torch.Tensor]


def renamed(*names: tuple[str, str]) -> Callable[[Tensors], Tensors]:
    """`(pattern, replacement)`, one after the other."""

    def write(tensors: Tensors) -> Tensors:
        found = {}
        for name, tensor in tensors.items():
            for pattern, new in names:
                name = re.sub(pattern, new, name)
            found[name] = tensor
        return found

    return write


def together(tensors: Tensors, into: str, *, grouped: bool = False) -> Tensors:
    """Queries, keys and values as one tensor; `grouped`: the queries of a key beside it."""
    found = {name: t for name, t in tensors.items() if not re.search(r"\.[qkv]_proj\.", name)}
    for name in tensors:
        if ".q_proj." not in name:
            continue
        query, key, value = (tensors[name.replace(".q_proj.", f".{p}_proj.")] for p in "qkv")
        rest = query.shape[1:]
        if grouped:
            parts = [t.reshape(KV_HEADS, -1, SIZE, *rest) for t in (query, key, value)]
            whole = torch.cat(parts, dim=1).reshape(-1, *rest)
        else:
            whole = torch.cat([query, key, value])
        found[name.replace("q_proj", into)] = whole
    return found


def internlm2(tensors: Tensors) -> Tensors:
    return renamed(
        ("lm_head", "output"), ("embed_tokens", "tok_embeddings"), ("self_attn", "attention"),
        ("o_proj", "wo"), ("mlp.gate_proj", "feed_forward.w1"), ("mlp.up_proj", "feed_forward.w3"),
        ("mlp.down_proj", "feed_forward.w2"), ("input_layernorm", "attention_norm"),
        ("post_attention_layernorm", "ffn_norm"),
    )(together(tensors, "wqkv", grouped=True))  # fmt: skip


def qwen(tensors: Tensors) -> Tensors:
    return renamed(
        (r"model\.", "transformer."), ("embed_tokens", "wte"), (r"layers\.", "h."),
        (r"transformer\.norm", "transformer.ln_f"), (r"self_attn\.o_proj", "attn.c_proj"),
        ("self_attn", "attn"), ("gate_proj", "w2"), ("up_proj", "w1"), ("down_proj", "c_proj"),
        ("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2"),
    )(together(tensors, "c_attn"))  # fmt: skip


EXAONE = renamed(
    (r"model\.", "transformer."), ("embed_tokens", "wte"), (r"layers\.", "h."),
    (r"transformer\.norm", "transformer.ln_f"), ("self_attn", "attn.attention"),
    ("o_proj", "out_proj"), ("gate_proj", "c_fc_0"), ("up_proj", "c_fc_1"),
    ("down_proj", "c_proj"), ("input_layernorm", "ln_1"), ("post_attention_layernorm", "ln_2"),
)  # fmt: skip


def chatglm(tensors: Tensors) -> Tensors:
    found = renamed(
        (r"model\.embed_tokens", "transformer.embedding.word_embeddings"),
        ("lm_head", "transformer.output_layer"), (r"model\.", "transformer.encoder."),
        (r"encoder\.norm", "encoder.final_layernorm"), ("self_attn", "self_attention"),
        ("o_proj", "dense"), ("gate_up_proj", "dense_h_to_4h"), ("down_proj", "dense_4h_to_h"),
    )(together(tensors, "query_key_value"))  # fmt: skip
    return found | {"transformer.rotary_pos_emb.inv_freq": torch.ones(4)}


def bailing(tensors: Tensors) -> Tensors:
    found = {}
    for name, tensor in together(tensors, "query_key_value").items():
        if ".mlp.experts." in name:
            layers = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
            stem = name.rpartition(".")[0]
            for expert, parts in enumerate(tensor):
                for layer, part in zip(layers, parts.chunk(len(layers)), strict=True):
                    found[f"{stem}.{expert}.{layer}.weight"] = part
        else:
            found[name] = tensor
    return renamed(
        ("embed_tokens", "word_embeddings"), ("self_attn", "attention"), ("o_proj", "dense"),
        ("q_norm", "query_layernorm"), ("k_norm", "key_layernorm"),
        ("e_score_correction_bias", "expert_bias"),
    )(found)  # fmt: skip


def split_experts(tensors: Tensors) -> Tensors:
    """A tensor of all experts as those of each."""
    found = {name: tensor for name, tensor in tensors.items() if ".mlp.experts." not in name}
    for name in tensors.keys() - found.keys():
        parts = ("gate_proj", "up_proj") if "gate_up" in name else ("down_proj",)
        for expert, rows in enumerate(tensors[name]):
            for part, own in zip(parts, rows.chunk(len(parts)), strict=True):
                found[f"{name.rpartition('.')[0]}.{expert}.{part}.weight"] = own
    return found


def longer_rows(tensors: Tensors) -> Tensors:
    """A head whose rows have length 1, as Baichuan 2 stores it: before the division."""
    lengths = torch.linspace(0.5, 2.0, VOCAB)[:, None]
    return together(tensors, "W_pack") | {"lm_head.weight": tensors["lm_head.weight"] * lengths}


def telechat(tensors: Tensors) -> Tensors:
    """Only projections back to hidden states have biases: so has the reference from now on."""
    found = {}
    for name, tensor in tensors.items():
        if re.search(r"(q|k|v|gate|up)_proj\.bias", name):
            tensor.zero_()
        elif ".k_proj." in name:
            both = (tensor, tensors[name.replace("k_proj", "v_proj")])
            heads = [part.view(KV_HEADS, 1, SIZE, HIDDEN) for part in both]
            found[name.replace("k_proj", "key_value")] = torch.cat(heads, 1).view(-1, HIDDEN)
        elif ".v_proj." not in name:
            found[name] = tensor
    return renamed(
        (r"model\.", "transformer."), ("embed_tokens", "word_embeddings"), (r"layers\.", "h."),
        (r"transformer\.norm", "transformer.ln_f"), ("self_attn", "self_attention"),
        ("q_proj", "query"), ("o_proj", "dense"),
    )(found)  # fmt: skip


def decilm(tensors: Tensors) -> Tensors:
    """The second layer does not attend, and the third has one key for all queries and no MLP: so
    does the reference from now on."""
    left_out = ("layers.1.self_attn", "layers.1.input_layernorm",
                "layers.2.mlp", "layers.2.post_attention_layernorm")  # fmt: skip
    for name in ("layers.1.self_attn.o_proj", "layers.2.mlp.down_proj"):
        tensors[f"model.{name}.weight"].zero_()
    found = {name: t for name, t in tensors.items() if not any(part in name for part in left_out)}
    for part in ("k_proj", "v_proj"):
        rows = tensors[f"model.layers.2.self_attn.{part}.weight"]
        rows[SIZE:] = rows[:SIZE]
        found[f"model.layers.2.self_attn.{part}.weight"] = rows[:SIZE]
    return found


def mimo_v2(tensors: Tensors) -> Tensors:
    """With a layer that predicts further tokens, and another part."""
    found = together(split_experts(tensors), "qkv_proj")
    more = {"model.mtp.layers.0.x.weight": torch.ones(4), "visual.merger.weight": torch.ones(4)}
    return renamed((r"\.sinks", ".attention_sink_bias"))(found) | more
