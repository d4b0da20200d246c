"""The arithmetic of a layer outside attention, in plain torch: the reference, for any device.

Blocks call these through `BuildContext.operations`; what a step needs besides its layers is in
`core/nn/step_operations/`. A plugin that registers a subclass
(`register_operations`) replaces as many as it has better code for; the others stay as here.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, ClassVar, NamedTuple, Protocol, TypeAlias

import torch
import torch.nn.functional as F

from ..old_names import RenamedMethod, adopt_overrides
from .activations import ACTIVATIONS, ExpertActivation
from .kv_cache.quantized_cache import QuantizedCache, write_blocks
from .latent.index_operations import IndexOperations
from .latent.operations import LatentOperations
from .quantized_weight import QuantizedWeight, dequantize
from .ragged import RaggedRows
from .routing import Routing, RoutingRule, choose_experts
from .sdpa import sdpa
from .state.operations import StateOperations
from .step_operations.adapters import AdapterOperations
from .step_operations.compaction import CompactionOperations
from .step_operations.drafts import DraftOperations
from .step_operations.inputs import InputOperations
from .step_operations.sampling import SamplingOperations


class Norm(NamedTuple):
    """An RMSNorm's parameters, for operations that apply it to their input."""

    weight: torch.Tensor
    """[size], of x's type or float32"""
    eps: float


class NormSums(NamedTuple):
    """What a LayerNorm's parameters come to after a product with W, both [out_features] float32:
    norm(x) Wᵀ + b = ((x * weight) Wᵀ - mean * factors) / deviation + offsets."""

    factors: torch.Tensor
    """W times the norm's weight."""
    offsets: torch.Tensor | None
    """W times its bias, and the product's bias b; None: there is neither."""


class CenteredNorm(NamedTuple):
    """A LayerNorm's parameters, likewise."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    eps: float
    sums: NormSums | None = None
    """Of the product that gets the norm, which may take the mean of x while it multiplies; None:
    they are not known. Operations get them that have the feature `linear.norm_sums`."""


AnyNorm: TypeAlias = Norm | CenteredNorm
"""Of operations with the feature `layer_norm`; others get a `Norm`."""


class PositionRows(NamedTuple):
    """Vectors of positions, learned or computed, for `Operations.embed` to add."""

    positions: torch.Tensor
    """[T] int64"""
    weight: torch.Tensor
    """[num_positions, hidden_size]"""


def with_positions(
    rows: torch.Tensor, factor: float, positions: PositionRows | None
) -> torch.Tensor:
    """factor * rows, rounded, plus the rows of the positions: [T, hidden_size] → the same shape."""
    if factor != 1.0:
        rows = rows * factor
    return rows if positions is None else rows + F.embedding(*positions)


class HeadLayout(NamedTuple):
    """Split of a projection's last dimension: queries, then keys, then values."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


class DenseRows(NamedTuple):
    """A weight that only its layer can read."""

    out_features: int
    rows: Callable[[torch.Tensor], torch.Tensor]
    """Indices [num_rows] int64 → those rows, dequantised, [num_rows, in_features]"""


ExpertWeight: TypeAlias = torch.Tensor | QuantizedWeight | DenseRows
"""One linear layer of E experts, stacked: a weight of [E * out_features, in_features]."""


class Precompiler(Protocol):
    """A period in which kernels are compiled and not launched."""

    def compiles(self) -> bool:
        """Whether any kernel requested so far has to be compiled."""


class Operations(
    LatentOperations,
    IndexOperations,
    StateOperations,
    InputOperations,
    SamplingOperations,
    CompactionOperations,
    DraftOperations,
    AdapterOperations,
):
    """T = num_tokens. Weights are [out_features, in_features].

    Results are of the input's type. An argument is overwritten only if its method says so, and a
    row of a result does not depend on the other rows. Conformance tests for subclasses:
    `jackfield.plugins.conformance.operations`.
    """

    name: ClassVar[str] = "torch"
    features: ClassVar[frozenset[str]] = frozenset({
        "cached_heads.quantized", "write_cache.quantized",
        "decode_inputs.dropped", "step_inputs.dropped",
        "linear.factor", "linear.layer_norm", "activated_linear.layer_norm",
        "gated_linear.layer_norm",
        "bidirectional_attention.distance_bias", "experts.activation", "experts.bias",
        "experts.foreign", "experts.gelu", "experts.limit", "experts.no_residual", "experts.relu2",
        "gated_rms_norm.sigmoid",
        "route.bias", "route.factor", "route.first", "route.groups", "route.sigmoid",
    })  # fmt: skip
    """Options of methods that these operations support, as "method.option"; a model or an engine
    that needs another one is refused. A subclass that overrides such a method sets it; without
    that, it supports none of the method's options, so that an override never ignores one that is
    newer."""

    batch_invariant: ClassVar[bool] = False
    """Whether a row of each result has the same bits whatever the other rows, and however many they
    are (`EngineConfig.batch_invariant`): of layers that attend to keys and values, of mixtures of
    experts, and of sampling."""

    def __init_subclass__(cls, **more: Any) -> None:
        super().__init_subclass__(**more)
        adopt_overrides(cls)
        if "features" not in vars(cls):
            cls.features = frozenset(
                name for name in cls.features if name.partition(".")[0] not in vars(cls)
            )

    @classmethod
    def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return None if the operations run on this device, else the reason, in one clause."""
        return None

    @classmethod
    def initialize_device(cls, device: torch.device) -> None:
        """Do slow initialisation that needs no model: called at start, on any thread, before others
        use the device. A step that fails here is repeated when it is needed."""

    def precompile(self, device: torch.device) -> AbstractContextManager[Precompiler] | None:
        """Return a context in which this thread's kernel launches only request compilation, and
        whose exit waits for all compilations; None: these operations compile nothing.

        Tensors that kernels would have written have the right shape and undefined contents. Other
        kernels (torch's) run as usual, on such contents.
        """
        return None

    def num_loaded(self) -> int:
        """Return the number of kernels compiled or loaded in this process so far; a step that
        increases it was delayed by that."""
        return 0

    def embed(
        self,
        token_ids: torch.Tensor,
        weight: torch.Tensor,
        *,
        factor: float = 1.0,
        positions: PositionRows | None = None,
    ) -> torch.Tensor:
        """factor * weight[token_ids], rounded, plus the rows of the positions: [T] int64 → [T,
        hidden_size], of the weight's type."""
        return with_positions(F.embedding(token_ids, weight), factor, positions)

    def rms_norm(self, x: torch.Tensor, norm: Norm) -> torch.Tensor:
        """[..., size] → x / rms(x), rounded to the weight's type, times the weight; of x's type."""
        wide = x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + norm.eps)
        return (norm.weight * wide.to(norm.weight.dtype)).to(x.dtype)

    def add_rms_norm(self, x: torch.Tensor, norm: Norm, residual: torch.Tensor) -> torch.Tensor:
        """residual + norm(x): [T, size] → the same shape. `residual` may be overwritten."""
        return residual + self.rms_norm(x, norm)

    def layer_norm(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float
    ) -> torch.Tensor:
        """(x - mean) / deviation * weight + bias over the last dimension, [..., size]."""
        return F.layer_norm(x, weight.shape, weight, bias, eps)

    def bidirectional_attention(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rows: RaggedRows,
        scale: float,
        distance_bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention in which each token sees all tokens of its row; nothing is cached.

        query, key, value: [T, num_heads, head_dim] → the same shape. distance_bias: [num_heads,
        2 * n + 1], added to logits: n + (key's position - query's) of at most n either way. Only
        models that have it pass it (`features`).
        """
        out = torch.empty_like(query)
        for group in rows.groups:
            shaped = [part[group.tokens].transpose(1, 2) for part in (query, key, value)]
            mask = group.visible
            if distance_bias is not None:
                mask = _biased(distance_bias.to(query.dtype), group.tokens.shape[1], mask)
            attended = sdpa(shaped[0], shaped[1], shaped[2], mask=mask, scale=scale)
            flat = attended.transpose(1, 2).reshape(-1, *query.shape[1:])
            out[group.source] = flat if group.visible is None else flat[group.place]
        return out

    def normed(self, x: torch.Tensor, norm: AnyNorm) -> torch.Tensor:
        """Apply either norm: [..., size] → the same shape."""
        if isinstance(norm, CenteredNorm):
            return self.layer_norm(x, norm.weight, norm.bias, norm.eps)
        return self.rms_norm(x, norm)

    def product(
        self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x Wᵀ + bias, of which the other products are made: [T, in_features] → [T, out_features],
        in memory of its own."""
        return F.linear(x, weight, bias)

    def linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm: AnyNorm | None = None,
        residual: torch.Tensor | None = None,
        factor: float = 1.0,
    ) -> torch.Tensor:
        """residual + factor * (norm(x) Wᵀ + bias): [T, in_features] → [T, out_features].

        `residual` may be overwritten: use the returned tensor. Only models that have a factor pass
        it (`features`).
        """
        if norm is not None:
            x = self.normed(x, norm)
        out = self.product(x, weight, bias)
        if residual is not None:
            return torch.add(residual, out, alpha=factor)
        return out if factor == 1.0 else out.mul_(factor)

    def normed_linear(
        self, x: torch.Tensor, norm: Norm, weight: torch.Tensor, bias: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return norm(x), [T, in_features], which others read, too, and norm(x) Wᵀ + bias, [T,
        out_features], in the weight's type, which may be float32 where x is not."""
        x = self.rms_norm(x, norm)
        return x, self.linear(x.to(weight.dtype), weight, bias)

    def activated_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        activation: str,
        norm: AnyNorm | None = None,
    ) -> torch.Tensor:
        """activation(norm(x) Wᵀ + bias), by its name in `ACTIVATIONS`: [T, in_features] → [T,
        out_features]."""
        return self.pointwise(ACTIVATIONS[activation], self.linear(x, weight, bias, norm=norm))

    def gated_linear(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None = None,
        *,
        norm: AnyNorm | None = None,
    ) -> torch.Tensor:
        """silu(gate) * up of one product, gate's rows first: [T, in_features] → [T, out / 2]."""
        return self.silu_mul(self.linear(x, weight, bias, norm=norm))

    def silu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """[T, 2 * size], gate then up → [T, size]"""
        gate, up = x.chunk(2, dim=-1)
        return self.pointwise(F.silu, gate) * up

    def gelu_mul(self, x: torch.Tensor) -> torch.Tensor:
        """As `silu_mul`, with gelu by its tanh approximation (arXiv 1606.08415)."""
        gate, up = x.chunk(2, dim=-1)
        return self.pointwise(ACTIVATIONS["gelu_pytorch_tanh"], gate) * up

    def sigmoid_gate(
        self, x: torch.Tensor, gate: torch.Tensor, weight: torch.Tensor | None = None
    ) -> torch.Tensor:
        """x * sigmoid(gate), both [T, size]; with weight, [1, width], the gate, [T, width], times
        it is the logit of a whole row."""
        logits = gate if weight is None else self.product(gate, weight)
        return x * self.pointwise(torch.sigmoid, logits)

    def pointwise(
        self, function: Callable[..., torch.Tensor], *parts: torch.Tensor
    ) -> torch.Tensor:
        """`function`, of torch, which computes each number by itself: parts [T, any], which it may
        overwrite → [T, any]. For functions whose last bits depend on a number's place in memory, as
        exponentials' do on a CPU."""
        return function(*parts)

    def xielu(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Apply xIELU (arXiv 2411.13010): [any] → the same shape. weights: [4] float32: of x² above
        0, of expm1(min(x, eps)) - x elsewhere, of x everywhere, and eps."""
        above, below, beta, eps = weights.unbind()
        wide = x.float()
        low = self.pointwise(torch.expm1, torch.minimum(wide, eps)) - wide
        return (beta * wide + torch.where(wide > 0, above * wide * wide, below * low)).to(x.dtype)

    def quantized_linear(
        self,
        x: torch.Tensor,
        weight: QuantizedWeight,
        bias: torch.Tensor | None = None,
        *,
        norm: Norm | None = None,
        residual: torch.Tensor | None = None,
        gated: bool = False,
    ) -> torch.Tensor:
        """`linear`, or with `gated` `gated_linear`, with a quantized weight.

        The reference dequantises the weight each time, and never rounds inputs.
        """
        dense = dequantize(weight, x.dtype)
        if gated:
            assert residual is None, "a gate has no residual"
            return self.gated_linear(x, dense, bias, norm=norm)
        return self.linear(x, dense, bias, norm=norm, residual=residual)

    packed_linear = RenamedMethod("quantized_linear")

    def route(self, logits: torch.Tensor, rule: RoutingRule) -> Routing:
        """Choose each token's experts. logits: [T, num_experts]; of equal scores, the lower number
        is chosen."""
        return choose_experts(logits, rule)

    def experts(
        self,
        x: torch.Tensor,
        routing: Routing,
        gate_up: ExpertWeight,
        down: ExpertWeight,
        *,
        residual: torch.Tensor | None,
        gate_up_bias: torch.Tensor | None = None,
        down_bias: torch.Tensor | None = None,
        activation: ExpertActivation | None = None,
    ) -> torch.Tensor:
        """residual + Σ weight * down_e(silu(gate_e(x)) * up_e(x)) over each token's experts e.

        x, residual: [T, hidden_size]; gate_up: E experts' [2 * inner, hidden_size], gate first;
        down: E experts' [hidden_size, inner] → [T, hidden_size]. `residual` may be overwritten.
        Biases: [E * 2 * inner] and [E * hidden_size], added to the products of each expert's
        layers; `activation`: in place of silu(gate) * up. Only models that have these three pass
        them (`features`). Without a residual, which only operations with the feature `no_residual`
        get: the sum alone. With "relu2", gate_up has E experts' [inner, hidden_size]: up alone.
        With `Routing.num_experts`, experts below 0 or from E on are other ranks', and add nothing;
        only operations with the feature `foreign` get that.

        The reference computes one expert at a time. On a device that runs asynchronously to the
        host, each expert computes all tokens: the launches then do not depend on the routing, and a
        graph can contain them.
        """
        num_experts = num_rows(down) // x.shape[1]
        rows_up, rows_down = num_rows(gate_up) // num_experts, x.shape[1]
        out = torch.zeros_like(x)
        for expert in range(num_experts):
            chosen = routing.experts == expert
            tokens: slice | torch.Tensor = slice(None)
            if x.device.type == "cpu":
                tokens = chosen.any(dim=1).nonzero()[:, 0]
                if not len(tokens):
                    continue
            first = dense_rows(gate_up, expert * rows_up, rows_up, x)
            second = dense_rows(down, expert * rows_down, rows_down, x)
            biases = [
                None if bias is None else bias[expert * rows : (expert + 1) * rows]
                for bias, rows in ((gate_up_bias, rows_up), (down_bias, rows_down))
            ]
            if activation is None:
                inner = self.gated_linear(x[tokens], first, biases[0])
            else:
                inner = self.activated(self.linear(x[tokens], first, biases[0]), activation)
            output = self.linear(inner, second, biases[1])
            weight = (routing.weights * chosen).sum(dim=1, keepdim=True).to(x.dtype)
            out[tokens] += output * weight[tokens]
        return out if residual is None else residual + out

    def activated(
        self, products: torch.Tensor, activation: ExpertActivation | None
    ) -> torch.Tensor:
        """Return inner values of experts from their first layer's products: [N, 2 * inner], gate
        first, or with "relu2", [N, inner] → [N, inner]."""
        if activation is None:
            return self.silu_mul(products)
        if activation == "relu2":
            return F.relu(products).square()
        if activation == "gelu":
            return self.gelu_mul(products)
        return self.pointwise(activation.__call__, *products.chunk(2, dim=-1))

    def expert_products(
        self,
        x: torch.Tensor,
        experts: torch.Tensor,
        weight: ExpertWeight,
        num_experts: int,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """W_e x + bias_e, of one expert e per row.

        x: [N, in_features]; experts: [N] int32; weight: E experts' [out_features, in_features];
        bias: [E * out_features] → [N, out_features]. Rows of experts below 0 or from E on, which
        other ranks have, are 0.

        The reference computes one expert at a time, and waits for the routing.
        """
        size = num_rows(weight) // num_experts
        out = x.new_zeros(len(x), size)
        for expert in experts.unique().tolist():
            if not 0 <= expert < num_experts:
                continue
            rows = (experts == expert).nonzero()[:, 0]
            own = dense_rows(weight, expert * size, size, x)
            out[rows] = self.linear(
                x[rows], own, None if bias is None else bias[expert * size : (expert + 1) * size]
            )
        return out

    def norm_heads(
        self,
        qkv: torch.Tensor,
        layout: HeadLayout,
        query_norm: CenteredNorm,
        key_norm: CenteredNorm,
    ) -> None:
        """Norm queries and keys in place, each head by itself, in float32.

        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim]; norms: weights [head_dim], or of each
        head [heads, head_dim] without biases.
        """
        query, key, _ = split_heads(qkv, layout)
        for part, norm in ((query, query_norm), (key, key_norm)):
            normed = F.layer_norm(part.float(), part.shape[-1:], eps=norm.eps)
            normed *= norm.weight.float()
            part.copy_(normed if norm.bias is None else normed + norm.bias.float())

    def heads(
        self,
        qkv: torch.Tensor,
        layout: HeadLayout,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        query_norm: Norm | None,
        key_norm: Norm | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split a projection into heads, norm and rotate them.

        qkv: [T, (num_heads + 2 * num_kv_heads) * head_dim], may be overwritten; positions: [T];
        cos_sin: [max_positions, rotary_dim] float32, cosines then sines, None without rotation.
        → query [T, num_heads, head_dim], key and value [T, num_kv_heads, head_dim]
        """
        query, key, value = split_heads(qkv, layout)
        if query_norm is not None:
            query = self.rms_norm(query, query_norm)
        if key_norm is not None:
            key = self.rms_norm(key, key_norm)
        if cos_sin is not None:
            rotation = cos_sin[positions][:, None].to(qkv.dtype)
            query, key = rotate(query, rotation), rotate(key, rotation)
        return query, key, value

    def cached_heads(
        self,
        qkv: torch.Tensor,
        layout: HeadLayout,
        positions: torch.Tensor,
        cos_sin: torch.Tensor | None,
        query_norm: Norm | None,
        key_norm: Norm | None,
        kv_cache: Any,
        slot_mapping: torch.Tensor,
        cache_scales: tuple[float, float] = (1.0, 1.0),
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Do as `heads`, and then as `write_cache`."""
        query, key, value = self.heads(qkv, layout, positions, cos_sin, query_norm, key_norm)
        self.write_cache(key, value, kv_cache, slot_mapping, cache_scales)
        return query, key, value

    def write_cache(
        self,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: Any,
        slot_mapping: torch.Tensor,
        cache_scales: tuple[float, float] = (1.0, 1.0),
    ) -> None:
        """Write keys and values, [T, num_kv_heads, head_dim] each, to the cache.

        kv_cache: [2, num_blocks, block_size, num_kv_heads, head_dim]; slot_mapping: [T] int64. An
        fp8 cache gets keys and values divided by `cache_scales`, and clamped to the type's range; a
        quantized one computes scales of its own. Only operations with the feature `quantized` get
        one.
        """
        if isinstance(kv_cache, QuantizedCache):
            return write_blocks(key, value, kv_cache, slot_mapping)
        for cache, part, scale in zip(kv_cache, (key, value), cache_scales, strict=True):
            if cache.dtype.itemsize == 1:
                largest = torch.finfo(cache.dtype).max
                part = (part.float() / scale).clamp_(-largest, largest).to(cache.dtype)
                # As bytes: torch has no indexed copy for fp8.
                cache, part = cache.view(torch.uint8), part.view(torch.uint8)
            cache.flatten(0, 1).index_copy_(0, slot_mapping, part.to(cache.dtype))


def _biased(distance_bias: torch.Tensor, length: int, visible: torch.Tensor | None) -> torch.Tensor:
    """Return the addition to logits: [rows or 1, num_heads, length, length]

    distance_bias: [num_heads, 2 * n + 1]; visible: [rows, 1, 1, length] bool, None: all.
    """
    most = distance_bias.shape[1] // 2
    places = torch.arange(length, device=distance_bias.device)
    distance = (places - places[:, None]).clamp_(-most, most) + most
    bias = distance_bias[:, distance][None]
    return bias if visible is None else bias.masked_fill(~visible, float("-inf"))


def num_rows(weight: ExpertWeight) -> int:
    """Return the rows of a weight, of all experts."""
    return int(weight.shape[0]) if isinstance(weight, torch.Tensor) else weight.out_features


def dense_rows(weight: ExpertWeight, start: int, count: int, x: torch.Tensor) -> torch.Tensor:
    """Return rows `start` .. `start + count` of a weight, dense, for products with inputs `x`."""
    if isinstance(weight, torch.Tensor):
        return weight[start : start + count]
    indices = torch.arange(start, start + count, device=x.device)
    if isinstance(weight, DenseRows):
        return weight.rows(indices)
    return dequantize(weight.rows(indices), x.dtype)


def split_heads(
    qkv: torch.Tensor, layout: HeadLayout
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return views of a projection: query, key, value, each [T, heads, head_dim]."""
    heads = qkv.view(qkv.shape[0], -1, layout.head_dim)
    query, key, value = heads.split(
        [layout.num_heads, layout.num_kv_heads, layout.num_kv_heads], dim=1
    )
    return query, key, value


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotate the first rotary_dim channels, half against half (NeoX style).

    x: [T, heads, head_dim]; cos_sin: [T, 1, rotary_dim]. Source: RoFormer (arXiv 2104.09864).
    """
    cos, sin = cos_sin.chunk(2, dim=-1)
    rotary_dim = cos_sin.shape[-1]
    first, second = x[..., :rotary_dim].chunk(2, dim=-1)
    rotated = [first * cos - second * sin, second * cos + first * sin]
    if rotary_dim < x.shape[-1]:
        rotated.append(x[..., rotary_dim:])
    return torch.cat(rotated, dim=-1)
