"""`QuantizationKit`: a quantization method against dequantised float models.

    class TestMine(QuantizationKit):
        name = "mine"                                  # as registered
        config = {"bits": 4, "group_size": 32}         # the checkpoint's, without quant_method
        mismatched = {"bits": 5}                       # refused, each with the field's name

        def quantize(self, weight):
            "One layer's weight → the checkpoint's tensors for it, and what they stand for."
            return {"qweight": …, "scales": …}, dequantised

With `name` alone a method that rounds plain checkpoints is checked as far as that goes.

The kit writes a tiny Llama, a tiny Qwen3 and one with experts in the format, loads them as a user
would, and compares each layer and the whole engine with the same model built from the dequantised
weights.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

from ...core.config import EngineConfig
from ...core.engine.async_engine import AsyncEngine
from ...core.errors import ConfigError
from ...core.loading.build import build_model
from ...core.loading.model_config import resolve_model_config
from ...core.loading.quantize import quantized_layers
from ...core.nn.norm import RMSNorm
from ...core.nn.operations import Operations
from ...core.nn.quantized import LinearSpec, QuantizedLinear
from ...core.parallel.ranks import ONE_RANK, Ranks
from ...core.sampling_params import SamplingParams
from .kit import Kit
from .quantized_checkpoints import CheckpointChecks
from .rank_threads import thread_ranks

VOCAB = 160
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.2, "tie_word_embeddings": False,
}  # fmt: skip
MIXTURE: dict[str, Any] = {
    "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
    "norm_topk_prob": True,
}  # fmt: skip
BIASED = {"attention_bias": True, "mlp_bias": True}
FAMILIES = {
    "Llama": SIZES | BIASED, "Phi3": SIZES, "Qwen3": SIZES, "Qwen3Moe": SIZES | MIXTURE,
}  # fmt: skip
"""Llama's layers have biases. Phi3's checkpoints fuse into one tensor what others have as two or
three."""
EXPERT = re.compile(r"\.experts(\.|$)")
PROJECTIONS = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "o_proj", "gate_proj", "up_proj", "gate_up_proj",
    "down_proj",
)  # fmt: skip


class QuantizationKit(CheckpointChecks, Kit):
    """Subclass it in your tests, and set the class variables."""

    kind = "quantization"
    config: ClassVar[Mapping[str, Any]] = {}
    """`quantization_config` without its quant_method; empty for a method that rounds plain
    checkpoints as they load."""
    mismatched: ClassVar[Mapping[str, Any]] = {}
    """Field → a value that `from_config` must refuse, naming the field."""
    inert: ClassVar[frozenset[str]] = frozenset()
    """Numbers in `config` (by name or dotted path) without effect on how weights are stored:
    another value may change nothing."""
    ignore_field: ClassVar[str | None] = None
    """The field that lists layers to leave alone, if the format has one."""
    rounding: ClassVar[float] = 0.15
    """Bound of ‖dequantised - original‖ / ‖original‖ for normal random weights."""
    exact: ClassVar[float] = 2e-5
    """Allowed deviation of a layer from its dequantised weight, relative to the largest."""
    product_error: ClassVar[float] = 1e-4
    """Allowed deviation of products, for any inputs: larger if inputs are rounded, too."""
    logprob_error: ClassVar[float] = 1e-3
    """Allowed deviation of log-probabilities from the dequantised model's: float32, on a CPU."""
    half_error: ClassVar[float] = 0.12
    """Allowed deviation of products in bfloat16, relative to the largest: scales may be of that
    dtype, too."""
    experts: ClassVar[bool] = True
    """Whether the method takes the experts of a mixture."""
    prompt_lengths: ClassVar[tuple[int, ...]] = (1, 9, 37)
    max_tokens: ClassVar[int] = 6
    device: ClassVar[str] = "cpu"
    operations: ClassVar[type[Operations]] = Operations

    def quantize(self, weight: torch.Tensor) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """weight: [out_features, in_features] float32 → (the checkpoint's tensors by the name
        behind the layer's, the weight that they stand for, float32).

        The formula must be yours or the format's own tool's, not the plugin's code. Without it, a
        method that rounds plain weights is compared with its own rounding of one layer by itself:
        what then is tested is how layers are joined, applied and served.
        """
        method_class = self.registered()
        if (reason := method_class.supports(torch.device("cpu"), weight.dtype)) is not None:
            pytest.skip(reason)
        try:
            method = method_class.from_config(self.config)
        except ConfigError as error:
            pytest.skip(f"needs `config` and `quantize` of a subclass: {error}")
        rows, size = weight.shape
        source = "model.layers.0.mlp.down_proj"
        spec = LinearSpec(
            prefix=source, role="linear", in_features=size, shards={"": rows},
            sources={"": source}, gated=False, device=weight.device, dtype=weight.dtype,
            operations=Operations(),
        )  # fmt: skip
        layer = method.layer(spec)
        if layer is None or "weight" not in layer.tensors(rows):
            pytest.skip("needs `quantize` of a subclass: the method rounds no plain weight")
        layer.process({"": {"weight": weight}})
        return {"weight": weight}, self.dense(layer)

    def is_quantized(self, layer: str) -> bool:
        """Whether the checkpoint has this layer quantized (and the method takes it)."""
        return layer.rpartition(".")[2] in PROJECTIONS

    # ------------------------------------------------------------ what the tests start from

    @pytest.fixture(scope="class", params=FAMILIES)
    @classmethod
    def family(cls, request: pytest.FixtureRequest) -> str:
        """`transformers` model families; override to test others."""
        if "Moe" in request.param and not cls.experts:
            pytest.skip("the method takes no experts")
        return str(request.param)

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, family: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
        """(folder of a quantized checkpoint, `transformers` model with the dequantised weights)"""
        folder = tmp_path_factory.mktemp(family)
        return folder, cls().write(family, folder)

    def write(self, family: str, folder: Path) -> Any:
        """Write a random model in the format; return the equivalent `transformers` model."""
        config = getattr(transformers, f"{family}Config")(**FAMILIES[family])
        torch.manual_seed(11)
        model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if name.endswith(".bias"):
                    parameter.normal_(std=0.3)
        tensors: dict[str, torch.Tensor] = {}
        written = set()
        for layer, weight in linear_weights(model).items():
            if self.is_quantized(layer):
                stored, dequantised = self.quantize(weight.clone())
                tensors |= {f"{layer}.{leaf}": part.contiguous() for leaf, part in stored.items()}
                weight.copy_(dequantised)
                written.add(f"{layer}.weight")
        model.save_pretrained(folder)
        plain = load_file(folder / "model.safetensors")
        plain = {name: tensor for name, tensor in plain.items() if name not in written}
        save_file({**plain, **tensors}, folder / "model.safetensors", {"format": "pt"})
        if self.config:
            self.set_config(folder)
        return model

    def set_config(self, folder: Path, **changes: Any) -> None:
        """Write the quantization_config, with changes."""
        path = folder / "config.json"
        data = json.loads(path.read_text())
        data["quantization_config"] = {"quant_method": self.name, **self.config, **changes}
        path.write_text(json.dumps(data))

    def engine_config(self, folder: Path, **options: Any) -> EngineConfig:
        """Return the configuration for a checkpoint of this method."""
        settings: dict[str, Any] = {
            "model": str(folder), "device": self.device, "dtype": "float32",
            "quantization": None if self.config else self.name, "skip_tokenizer_init": True,
            "max_model_len": 128, "max_num_seqs": 4, "max_num_batched_tokens": 16,
        }  # fmt: skip
        return EngineConfig(**{**settings, **options})

    def build(self, folder: Path, ranks: Ranks = ONE_RANK, **options: Any) -> nn.Module:
        """Return the loaded model, or this rank's part of it, without an engine."""
        config = self.engine_config(folder, **options)
        model_config = resolve_model_config(config)
        with torch.inference_mode():
            return build_model(
                self.plugins(), config, model_config, torch.device(self.device), self.operations(),
                ranks,
            )  # fmt: skip

    # ------------------------------------------------------------ the tests

    def test_layers_multiply_by_the_dequantised_weights(self, checkpoint: Any) -> None:
        """Check merged layers too: each shard has its own scales."""
        folder, reference = checkpoint
        weights = linear_weights(reference)
        layers = quantized_layers(self.build(folder))
        assert layers, "no layer is quantized"
        for layer in layers.values():
            expected = torch.cat([weights[s] for s in layer.spec.sources.values()])
            actual = self.dense(layer).cpu()
            assert (actual - expected).abs().max() <= self.exact * expected.abs().max(), (
                layer.spec.prefix
            )

    def test_ranks_hold_their_parts_of_the_weights(self, checkpoint: Any) -> None:
        """Ranks that cannot divide the format's tensors are refused by name. Plain weights are
        rounded part by part."""
        folder, reference = checkpoint
        weights = linear_weights(reference)
        stored = load_file(folder / "model.safetensors")
        for ranks in thread_ranks(2):
            try:
                layers = quantized_layers(self.build(folder, ranks))
            except ConfigError as error:
                assert error.param == "tensor_parallel_size"
                pytest.skip(f"refused: {error.message}")
            for layer in layers.values():
                sharding = layer.sharding
                assert sharding is not None or layer.spec.role in ("head", "embedding")
                expected = torch.cat([
                    weights[source] if sharding is None else sharding.part(shard, weights[source])
                    for shard, source in layer.spec.sources.items()
                ])  # fmt: skip
                deviation = self.dense(layer).cpu() - expected
                plain = stored.get(f"{next(iter(layer.spec.sources.values()))}.weight")
                if plain is not None and plain.dtype == torch.float32:
                    assert deviation.norm() <= 2 * self.rounding * expected.norm()
                else:
                    assert deviation.abs().max() <= self.exact * expected.abs().max()

    def dense(self, layer: QuantizedLinear) -> torch.Tensor:
        """Return the matrix by which the layer multiplies, [out_features, in_features], determined
        by products."""
        size, spec = layer.spec.in_features, layer.spec
        inputs = torch.eye(size + 1, size, device=spec.device, dtype=spec.dtype)
        try:
            # Without the activation, as a plain merged layer.
            layer.spec = dataclasses.replace(spec, gated=False)
            product: torch.Tensor = layer(inputs)
        finally:
            layer.spec = spec
        # The last input is all zeros, so its product is the bias.
        return (product[:-1] - product[-1]).t()

    def test_biases_are_added(self, checkpoint: Any) -> None:
        """Check merged and gated layers, too."""
        folder, reference = checkpoint
        layers = quantized_layers(self.build(folder))
        biased = 0
        for layer in layers.values():
            parts = [getattr(reference.get_submodule(source), "bias", None)
                     for source in layer.spec.sources.values()
                     if not EXPERT.search(source)]  # fmt: skip
            if not parts or any(part is None for part in parts):
                continue
            biased += 1
            bias = torch.cat([part.data for part in parts if part is not None])
            if layer.spec.gated:
                gate, up = bias.chunk(2)
                bias = nn.functional.silu(gate) * up
            for rows in (1, 3):
                zeros = torch.zeros(rows, layer.spec.in_features, device=layer.spec.device)
                actual = layer(zeros).cpu()
                worst = (actual - bias).abs().max()
                assert worst <= 1e-5, f"{layer.spec.prefix}: a bias is left out or wrong"
        if not biased:
            pytest.skip("layers of this family have no biases")

    def test_results_are_in_the_models_type(self, checkpoint: Any) -> None:
        """In a bfloat16 model, products are near those of the weights in float32, rounded to
        bfloat16."""
        if (
            reason := self.registered().supports(torch.device(self.device), torch.bfloat16)
        ) is not None:
            pytest.skip(reason)
        folder, _ = checkpoint
        wide = quantized_layers(self.build(folder))
        try:
            narrow = quantized_layers(self.build(folder, dtype="bfloat16"))
        except ConfigError as error:
            pytest.skip(f"not in bfloat16: {error}")
        draw = torch.Generator().manual_seed(5)
        for name, layer in narrow.items():
            if layer.spec.role == "embedding":
                continue
            x = torch.randn(3, layer.spec.in_features, generator=draw)
            x = x.to(layer.spec.device, torch.bfloat16)
            for rows in (1, 3):
                actual, expected = layer(x[:rows]), wide[name](x[:rows].float())
                assert actual.dtype == torch.bfloat16, f"{name} gives {actual.dtype} for bfloat16"
                worst = (actual.float() - expected).abs().max()
                assert worst <= (self.half_error + self.product_error) * expected.abs().max(), name

    def test_norm_before_and_residual_after(self, checkpoint: Any) -> None:
        """Compare with a layer that does each step separately, for one row and for several."""
        layers = quantized_layers(self.build(checkpoint[0]))
        draw = torch.Generator().manual_seed(6)
        for suffix, with_residual in (("o_proj", True), ("gate_up_proj", False)):
            layer = next(m for name, m in layers.items() if name.endswith(suffix))
            dense = self.dense(layer)
            norm = RMSNorm.__new__(RMSNorm)
            nn.Module.__init__(norm)
            norm.eps, norm.operations = 1e-5, layer.spec.operations
            size, device = layer.spec.in_features, layer.spec.device
            norm.weight = nn.Parameter(torch.rand(size, generator=draw).to(device) + 0.5)
            for rows in (1, 3, 40):
                x = torch.randn(rows, size, generator=draw).to(device)
                wide = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-5) * norm.weight
                expected = wide @ dense.t()
                if layer.bias is not None:
                    expected = expected + layer.bias
                if layer.spec.gated:
                    gate, up = expected.chunk(2, dim=-1)
                    expected = nn.functional.silu(gate) * up
                residual = torch.randn_like(expected) if with_residual else None
                added = None if residual is None else residual.clone()
                actual = layer(x, norm=norm, residual=added)
                expected = expected if residual is None else expected + residual
                assert (actual - expected).abs().max() <= self.product_error * expected.abs().max()

    def test_rounding_error_is_bounded(self) -> None:
        """Check normal random weights, and rows of zeros."""
        weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(3))
        _, dequantised = self.quantize(weight.clone())
        assert (dequantised - weight).norm() <= self.rounding * weight.norm()
        weight[5] = 0.0
        _, dequantised = self.quantize(weight)
        assert torch.isfinite(dequantised).all()

    def test_engine_gives_the_dequantised_models_log_probabilities(self, checkpoint: Any) -> None:
        """Run prompts of several lengths at once, chunked, and some more tokens."""
        folder, reference = checkpoint
        prompts = [
            [3 + (7 * i * n) % (VOCAB - 3) for i in range(1, n + 1)] for n in self.prompt_lengths
        ]

        async def serve() -> list[Any]:
            params = SamplingParams(
                temperature=0.0,
                max_tokens=self.max_tokens,
                ignore_eos=True,
                logprobs=2,
                prompt_logprobs=2,
            )
            config = self.engine_config(folder)
            async with AsyncEngine(config, plugins=self.plugins()) as engine:
                return list(await asyncio.gather(*(_last(engine, p, params) for p in prompts)))

        for prompt, output in zip(prompts, asyncio.run(serve()), strict=True):
            tokens = [*prompt, *output.outputs[0].token_ids]
            with torch.no_grad():
                logits = reference(torch.tensor([tokens])).logits[0]
            expected = torch.log_softmax(logits.float(), -1)
            tables = [*output.prompt_logprobs[1:], *output.outputs[0].logprobs]
            for position, table in enumerate(tables):
                for token, logprob in table.items():
                    error = abs(logprob.logprob - float(expected[position, token]))
                    assert error <= self.logprob_error, (len(prompt), position, token, error)


def linear_weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weight of every linear layer of a `transformers` model by its checkpoint name.

    Experts, which share one tensor there, are returned one by one, as views of it.
    """
    weights = {}
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear):
            weights[name] = module.weight.data
        elif name.endswith(".experts"):
            gate_up, down = module.gate_up_proj.data, module.down_proj.data
            for expert, (both, down_weight) in enumerate(zip(gate_up, down, strict=True)):
                gate, up = both.chunk(2)
                parts = {"gate_proj": gate, "up_proj": up, "down_proj": down_weight}
                weights |= {f"{name}.{expert}.{part}": weight for part, weight in parts.items()}
    return weights


async def _last(engine: AsyncEngine, prompt: list[int], params: SamplingParams) -> Any:
    last = None
    async for output in engine.generate(prompt, params):
        last = output
    return last
