"""A model's layer for one token: dense products, and attention to a short context.

With dependent launches kernels overlap, so products are timed within layers, not alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

EPS = 1e-6
BYTES = 1 << 31
"""Bytes of weights per measurement: with a quarter of it, the L2 cache distorted the choice."""
CONTEXT = 256
MAX_MODEL_LEN = 4096
Product = tuple[int, int, bool]
"""(outputs, inputs, gated)"""


class Heads(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Extras(NamedTuple):
    """Fused extras of a product's kernel."""

    centered: bool = False
    """Whether the norm before it is a LayerNorm."""
    biased: bool = False
    activation: str = ""
    """As for `gemv`."""
    summed: bool = True
    """Whether the sums of weight times LayerNorm parameters are known."""


class Layer(NamedTuple):
    """A model's products for one token, in layer order."""

    products: Mapping[Product, Extras]
    heads: Heads | None = None
    """Attention after the first product; None: of another kind."""
    vocabulary: tuple[Product, Extras] | None = None
    """Product that computes logits after the last layer."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the weights in 16 bits."""
        sizes = ((2 if gated else 1) * outputs * inputs for outputs, inputs, gated in self.products)
        return 2 * sum(sizes)


class GemvProduct:
    """Copies of a product's weights. A widening product includes the norm before it; others add to
    the residual.
    """

    def __init__(self, product: Product, extras: Extras, copies: int) -> None:
        import torch

        outputs, inputs, self.gated = product
        stacked = outputs * (2 if self.gated else 1)

        def random(*size: int) -> Any:
            return torch.randn(size, device="cuda", dtype=torch.bfloat16)

        self.x = random(1, inputs)
        self.activation = extras.activation
        self.weights = [random(stacked, inputs) * 0.02 for _ in range(copies)]
        self.options: list[dict[str, Any]] = [{"residual": random(1, outputs)}] * copies
        if self.gated or outputs > inputs:
            self.options = [
                _centered(weight, random(inputs).abs() + 0.5, random(inputs), extras.summed)
                if extras.centered
                else {"norm": (random(inputs).abs() + 0.5, EPS)}
                for weight in self.weights
            ]
        if extras.biased and "norm_sums" not in self.options[0]:  # Sums contain it.
            self.options = [{**each, "bias": random(stacked)} for each in self.options]

    def multiply(self, config: Any, i: int = 0, x: Any = None) -> Any:
        """config: a `GemvConfig`; x: [1, at least inputs], None: a constant."""
        from ....kernels.linear.gemv import gemv

        x = self.x if x is None else x[:, : self.x.shape[1]]
        return gemv(
            x, self.weights[i], gated=self.gated, activation=self.activation, config=config,
            **self.options[i],
        )  # fmt: skip


def _centered(weight: Any, factors: Any, offsets: Any, summed: bool) -> dict[str, Any]:
    import torch

    options: dict[str, Any] = {"layer_norm": (factors, offsets, EPS)}
    if summed:
        sums = weight.float() @ torch.stack([factors, offsets], dim=1).float()
        options["norm_sums"] = tuple(sums.t().contiguous())
    return options


class TokenLayer:
    """Layers with random weights, and one sequence."""

    def __init__(
        self,
        layer: Layer,
        *,
        context: int = CONTEXT,
        max_model_len: int = MAX_MODEL_LEN,
        num_bytes: int = BYTES,
    ) -> None:
        """max_model_len: decides attention's splits. num_bytes: of weights; at least two layers."""
        self.copies = max(2, num_bytes // layer.num_bytes)
        self.products = {
            product: GemvProduct(product, extras, self.copies)
            for product, extras in layer.products.items()
        }
        self._attention = (
            None
            if layer.heads is None
            else _Attention(layer.heads, context, max_model_len, self.copies)
        )

    def engine_configs(self) -> dict[Product, Any]:
        """Return an engine's `GemvConfig` for each product."""
        from ....kernels.tuning import gemv_tiles

        return {
            product: gemv_tiles(each.weights[0], each.gated)
            for product, each in self.products.items()
        }

    def run(
        self,
        configs: Mapping[Product, Any],
        *,
        attends: bool = True,
        reads_ahead: bool = True,
        attention: Any = None,
    ) -> list[Any]:
        """Run one step through all copies, each kernel on the previous one's result.

        configs: a `GemvConfig` per product; attends: include attention; reads_ahead: let it
        prefetch weights; attention: its `DecodeConfig`, None: the rule's. Return the results, which
        must outlive a graph.
        """
        results: list[Any] = []
        for copy in range(self.copies):
            for number, (product, each) in enumerate(self.products.items()):
                fits = bool(results) and results[-1].shape[1] >= product[1]
                x = results[-1] if fits else None
                results.append(each.multiply(configs[product], copy, x))
                if number == 0 and attends and self._attention is not None:
                    later = list(self.products.values())[1:] if reads_ahead else []
                    weights = [each.weights[copy] for each in later]
                    heads = self._attention(results[-1], copy, weights, attention)
                    results.append(heads.flatten(1))
        return results

    def seconds(
        self, configs: Mapping[Product, Any], *, repeats: int = 20, **options: Any
    ) -> float:
        """Return the time of one layer. options: as of `run`."""
        import torch

        from ..timing import graph_seconds

        work = [lambda: self.run(configs, **options)]
        device = torch.device("cuda", torch.cuda.current_device())
        return graph_seconds(work, device, repeats=repeats, warmup=1) / self.copies


class _Attention:
    def __init__(self, heads: Heads, context: int, max_model_len: int, copies: int) -> None:
        import torch

        from ....kernels.attention.decode_splits import choose_num_splits, workspace_elements

        self._heads = heads
        device = torch.device("cuda", torch.cuda.current_device())
        num_heads, num_kv_heads, head_dim = heads
        self._splits = choose_num_splits(
            1, num_kv_heads, head_dim, torch.bfloat16, max_model_len,
            torch.cuda.get_device_properties(device).multi_processor_count,
        )  # fmt: skip

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device, dtype=torch.bfloat16)

        blocks = -(-context // 16)
        self._caches = random(copies, 2, blocks + 1, 16, num_kv_heads, head_dim)
        self._table = torch.arange(blocks, dtype=torch.int32, device=device)[None]
        self._lengths = torch.tensor([context], dtype=torch.int32, device=device)
        self._slots = torch.tensor([context - 1], device=device)
        self._cos_sin = torch.randn(context, head_dim, device=device)
        self._counters = torch.zeros(num_kv_heads, dtype=torch.int32, device=device)
        floats = workspace_elements(1, num_heads, head_dim, self._splits)
        self._workspace = torch.empty(floats, device=device)

    def __call__(self, qkv: Any, copy: int, next_weights: list[Any], config: Any) -> Any:
        from ....kernels.attention.fused_decode_attention import fused_decode_attention

        num_heads, num_kv_heads, head_dim = self._heads
        return fused_decode_attention(
            qkv, num_heads, num_kv_heads, self._caches[copy], self._table, self._lengths,
            self._slots, scale=head_dim**-0.5, counters=self._counters, workspace=self._workspace,
            num_splits=self._splits, cos_sin=self._cos_sin, next_weights=next_weights,
            config=config,
        )  # fmt: skip
