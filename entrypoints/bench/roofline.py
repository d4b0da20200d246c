"""Lower bounds of a workload's time: the model's bytes and operations over this device's measured
bandwidth and product rate.

A floor counts the weights and every running sequence's KV cache once per step, and every token's
products; not norms, activations, sampling, or the host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from ...core.errors import ConfigError


class Ceilings(msgspec.Struct, frozen=True):
    copy_bytes_per_second: float
    """Read plus written, of a large device-to-device copy."""
    read_bytes_per_second: float
    """Measured with a large sum."""
    matmul_flops: float
    """Measured with a large square product in `dtype`."""
    dtype: str
    device: str


def given_ceilings(text: str) -> Ceilings:
    """Read from an earlier run's JSON. Raises ConfigError."""
    try:
        return msgspec.json.decode(text, type=Ceilings)
    except msgspec.MsgspecError as error:
        raise ConfigError(f"--ceilings: {error}", param="ceilings") from None


def measure_ceilings(device_name: str = "cuda", dtype_name: str = "bfloat16") -> Ceilings:
    """Measure this device: 1 GiB copied and summed, 8192³ multiplied (less on a CPU)."""
    import torch

    from .timing import median_seconds

    device, dtype = torch.device(device_name), getattr(torch, dtype_name)
    big = device.type == "cuda"
    elements = (1 << 28) if big else (1 << 22)
    source = torch.zeros(elements, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    count = 4 * elements
    copy = median_seconds(lambda: target.copy_(source), device, repeats=20 if big else 5)
    read = median_seconds(lambda: torch.sum(source), device, repeats=20 if big else 5)
    size = 8192 if big else 512
    matrix = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    product = median_seconds(lambda: matrix @ right, device, repeats=20 if big else 3)
    if big:
        torch.cuda.empty_cache()
    return Ceilings(
        copy_bytes_per_second=2 * count / copy,
        read_bytes_per_second=count / read,
        matmul_flops=2 * size**3 / product,
        dtype=dtype_name,
        device=torch.cuda.get_device_name(device) if big else "cpu",
    )


class Extent(NamedTuple):
    """A request's sizes in tokens."""

    prompt: int
    output: int
    cached: int = 0
    """Prompt tokens in the KV cache already."""


EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
"""Configuration fields with the number of experts."""
LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
HIDDEN = ("hidden_size", "n_embd", "d_model")
HEADS = ("num_attention_heads", "n_head", "n_heads")
INNER = ("intermediate_size", "ffn_hidden_size", "ffn_dim", "n_inner")
KV_HEADS = ("num_key_value_heads", "num_kv_heads")
PLAIN = frozenset({
    "apertus", "arcee", "bloom", "falcon", "gpt2", "gpt_neox", "gptj", "mpt", "nemotron", "opt",
    "persimmon", "phi", "starcoder2",
})  # fmt: skip
"""Model types with ungated MLPs, four times as wide as hidden states by default."""


def _first(config: Mapping[str, Any], names: Sequence[str]) -> int:
    """Return the first nonzero field, else 0."""
    return int(next(filter(None, map(config.get, names)), 0))


class LatentShape(NamedTuple):
    """Sizes of latent attention (MLA)."""

    latent: int
    rope: int
    nope: int
    value: int
    query: int
    """Query input channels; 0: hidden states."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> LatentShape:
        names = ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
        latent, rope, nope, value = (int(config[name]) for name in names)
        return cls(latent, rope, nope, value, int(config.get("q_lora_rank") or 0))

    @property
    def cached(self) -> int:
        """Numbers cached per token and layer."""
        return self.latent + self.rope

    @property
    def pair_width(self) -> int:
        """Expanded channels of a head's key and value."""
        return self.nope + self.rope + self.value

    def weights(self, hidden: int, heads: int) -> int:
        """Return the weights of one layer's projections."""
        key = heads * (self.nope + self.rope)
        queries = self.query * (hidden + key) if self.query else hidden * key
        up = self.latent * heads * (self.nope + self.value)
        return queries + hidden * self.cached + up + heads * self.value * hidden


class StateShape(NamedTuple):
    """Sizes of state layers: Mamba 2, or the gated delta rule."""

    layers: int
    weights: int
    """Weights of one layer."""
    elements: int
    """Elements of one sequence's state in one layer."""

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> StateShape | None:
        """Return config.json's sizes; None without state layers."""
        hidden, layers = _first(config, HIDDEN), _first(config, LAYERS)
        if config["model_type"] == "qwen3_next":
            names = ("num_key_heads", "key_head_dim", "num_value_heads", "value_head_dim")
            key_heads, key, heads, value = (int(config[f"linear_{name}"]) for name in names)
            keys, values = key_heads * key, heads * value
            weights = hidden * (2 * keys + 2 * values + 2 * heads) + values * hidden
            return cls(
                layers - layers // config["full_attention_interval"],
                weights,
                keys * value * heads // key_heads,
            )
        if config["model_type"] == "mamba2":
            heads, dim, state = (int(config[n]) for n in ("num_heads", "head_dim", "state_size"))
            groups = int(config["n_groups"])
        elif config["model_type"] == "falcon_h1":
            names = ("n_heads", "d_head", "d_state", "n_groups")
            heads, dim, state, groups = (int(config[f"mamba_{name}"]) for name in names)
        else:
            return None
        inner = heads * dim
        weights = hidden * (2 * inner + 2 * groups * state + heads) + inner * hidden
        return cls(layers, weights, inner * state)


class ModelShape(msgspec.Struct, frozen=True, kw_only=True):
    """A decoder's sizes that determine its cost."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocab: int
    weight_bytes: float
    """Bytes per weight."""
    kv_bytes: float
    """Bytes per element of the KV cache."""
    experts: int = 0
    experts_per_token: int = 0
    expert_intermediate: int = 0
    expert_bytes: float = 2
    """Bytes per weight of an expert."""
    shared_experts: int = 0
    """Experts for every token."""
    dense_layers: int = 0
    """Layers of a mixture with an MLP."""
    latent: LatentShape | None = None
    """None: keys and values are cached."""
    state: StateShape | None = None
    attention_layers: int
    windowed_layers: int = 0
    """Layers with a window, if stated per layer."""
    window: int = 0
    """Its tokens."""
    gated_attention: bool = False
    """Whether queries have an equally wide gate."""
    gated_mlp: bool = True
    """Whether MLPs are gated."""

    @classmethod
    def from_config(
        cls, config: Mapping[str, Any], *, weight_bytes: float = 2, kv_bytes: float = 2
    ) -> ModelShape:
        hidden, layers, heads = (_first(config, names) for names in (HIDDEN, LAYERS, HEADS))
        plain = config["model_type"] in PLAIN
        state = StateShape.from_config(config)
        interval = int(config.get("full_attention_interval") or 1)
        method = (config.get("quantization_config") or {}).get("quant_method")
        kinds: Sequence[str] = config.get("layer_types") or ()
        return cls(
            layers=layers,
            state=state,
            attention_layers=layers // interval if heads else 0,
            windowed_layers=kinds.count("sliding_attention"),
            window=int(config.get("sliding_window") or 0),
            gated_attention=interval > 1,
            hidden=hidden,
            heads=heads,
            gated_mlp=not plain,
            kv_heads=_first(config, KV_HEADS) or (1 if config.get("multi_query") else heads),
            head_dim=int(config.get("head_dim") or hidden // max(heads, 1)),
            intermediate=_first(config, INNER) or (4 * hidden if plain else 0),
            vocab=int(config["vocab_size"]),
            weight_bytes=weight_bytes,
            kv_bytes=kv_bytes,
            experts=_first(config, EXPERTS),
            experts_per_token=int(config.get("num_experts_per_tok") or 0),
            expert_intermediate=int(
                config.get("moe_intermediate_size") or config.get("intermediate_size") or 0
            ),
            # mxfp4: 4 bits, and 8 for each 32 weights.
            expert_bytes=17 / 32 if method == "mxfp4" else weight_bytes,
            shared_experts=int(
                config.get("n_shared_experts") or "shared_expert_intermediate_size" in config
            ),
            dense_layers=int(config.get("first_k_dense_replace") or 0),
            latent=LatentShape.from_config(config) if config.get("kv_lora_rank") else None,
        )

    @property
    def head_weights(self) -> int:
        """Weights of the output projection; the input embedding is a lookup."""
        return self.vocab * self.hidden

    @property
    def attention_weights(self) -> int:
        """Weights of one layer's query, key, value and output projections."""
        if self.latent is not None:
            return self.latent.weights(self.hidden, self.heads)
        width = self.head_dim * self.hidden
        queries = self.heads * (2 if self.gated_attention else 1)
        return width * (queries + 2 * self.kv_heads) + width * self.heads

    @property
    def mixer_weights(self) -> int:
        """Weights of all layers' attention and state projections."""
        states = self.state.layers * self.state.weights if self.state else 0
        return self.attention_layers * self.attention_weights + states

    @property
    def active_weights(self) -> float:
        """Weights multiplied per token, without the output projection."""
        return self.mixer_weights + self._mlp_weights(self.experts_per_token)

    def step_weight_bytes(self, tokens: float) -> float:
        """Return the bytes of weights read in a step; of experts, those expected under uniform
        choice.
        """
        num_experts = 0.0
        if self.experts:
            missed = (1 - self.experts_per_token / self.experts) ** tokens
            num_experts = self.experts * (1 - missed)
        of_experts = self._expert_weights(num_experts)
        others = self.mixer_weights + self._mlp_weights(num_experts) - of_experts
        wide = (others + self.head_weights) * self.weight_bytes
        return wide + of_experts * self.expert_bytes

    @property
    def kv_bytes_per_token(self) -> float:
        """Cached bytes per position, in all layers."""
        if self.latent is not None:
            return self.layers * self.latent.cached * self.kv_bytes
        return 2 * self.attention_layers * self.kv_heads * self.head_dim * self.kv_bytes

    def read_kv_bytes(self, rows: float, context: float) -> float:
        """Return the cached bytes that `rows` equally long sequences with `context` tokens in total
        read in a step.
        """
        hidden = max(context - rows * self.window, 0.0) if self.windowed_layers else 0.0
        share = self.windowed_layers / max(self.attention_layers, 1)
        return (context - hidden * share) * self.kv_bytes_per_token

    @property
    def state_bytes(self) -> float:
        """Bytes of a sequence's states, with elements as wide as the cache's."""
        return self.state.layers * self.state.elements * self.kv_bytes if self.state else 0.0

    def state_flops(self, tokens: float) -> float:
        return 4 * self.state.layers * self.state.elements * tokens if self.state else 0.0

    def attention_flops(self, pairs: float) -> float:
        """Return the operations of scores and sums for `pairs` (query, key) pairs, in all
        layers.
        """
        widths = 2 * self.head_dim if self.latent is None else self.latent.pair_width
        return 2 * self.attention_layers * self.heads * widths * pairs

    def _mlp_weights(self, experts: float) -> float:
        """Weights of all layers' MLPs, with `experts` chosen experts."""
        dense = (3 if self.gated_mlp else 2) * self.hidden * self.intermediate
        if not self.experts:
            return self.layers * dense
        mixture = self.hidden * self.experts  # The router's.
        mixtures = (self.layers - self.dense_layers) * mixture
        return self.dense_layers * dense + mixtures + self._expert_weights(experts)

    def _expert_weights(self, experts: float) -> float:
        """Weights of `experts` chosen experts, and those for every token, in all layers."""
        if not self.experts:
            return 0.0
        chosen = 3 * self.expert_intermediate * (experts + self.shared_experts)
        return (self.layers - self.dense_layers) * self.hidden * chosen


def decode_step_floor(shape: ModelShape, ceilings: Ceilings, rows: float, context: float) -> float:
    """Return the seconds of a decode step of `rows` sequences with `context` tokens in total."""
    weights = shape.step_weight_bytes(rows) / ceilings.copy_bytes_per_second
    flops = 2 * (shape.active_weights + shape.head_weights) * rows
    moved = shape.read_kv_bytes(rows, context) + 2 * rows * shape.state_bytes
    cache = moved / ceilings.copy_bytes_per_second
    return max(weights, flops / ceilings.matmul_flops) + cache


def prefill_flops(shape: ModelShape, requests: Sequence[Extent]) -> float:
    """Return the operations of the prompts' uncached tokens, counting causal pairs only."""
    tokens = sum(each.prompt - each.cached for each in requests)
    pairs = sum(
        (each.prompt * (each.prompt + 1) - each.cached * (each.cached + 1)) / 2 for each in requests
    )
    head = 2 * shape.head_weights * len(requests)
    mixing = shape.attention_flops(pairs) + shape.state_flops(tokens)
    return 2 * shape.active_weights * tokens + head + mixing


def prefill_floor(shape: ModelShape, ceilings: Ceilings, requests: Sequence[Extent]) -> float:
    tokens = sum(each.prompt - each.cached for each in requests)
    weights = shape.step_weight_bytes(tokens) / ceilings.copy_bytes_per_second
    return max(weights, prefill_flops(shape, requests) / ceilings.matmul_flops)


def batch_floor(shape: ModelShape, ceilings: Ceilings, requests: Sequence[Extent]) -> float:
    """Return the seconds if all requests start at once and decode together."""
    prompts = np.array([each.prompt for each in requests])
    outputs = np.array([each.output for each in requests])
    total = prefill_floor(shape, ceilings, requests)
    for step in range(1, int(outputs.max())):
        running = outputs > step
        rows = int(running.sum())
        total += decode_step_floor(shape, ceilings, rows, int(prompts[running].sum()) + rows * step)
    return total
