"""`jackfield bench tune`: measure the best tiles for products of few tokens, and write them to a
file.

The file is in `kernels/tuned/` under the device's name, where engines read it. Every candidate's
result is checked.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from ....core.errors import ConfigError
from ...flags.engine_flags import fail
from ...flags.parser import Parser
from ..report import environment, say
from ..workloads import ARCHITECTURES, write_model
from . import tune_gemv, tune_int4
from .token_layer import Extras, Heads, Layer, Product

GEMV = "gemv"
VOCABULARY = "vocabulary"
"""Selects `gemv` for the logits."""
KERNELS = ("small_m_matmul", GEMV, "int4_gemv", "int4_small_m")
ROWS = (8, 16, 32)
"""Rows measured for `small_m_matmul`. With more, the gain is lost within a whole step (64 rows on
an H200)."""
MODELS = ("Qwen3-0.6B", "Qwen3-8B")
SHARED_BYTES = 215_000
"""Shared memory for tiles, less the compiler's."""
MEMORY = 600 << 20
"""Bytes of weights per measurement, beyond the L2 cache."""
LAUNCHES = 24


def make_parser() -> Parser:
    parser = Parser(
        prog="jackfield bench tune",
        description="Measure the best tiles for products of few tokens on this device.",
    )
    parser.add_argument("--models", nargs="+", default=MODELS, choices=sorted(ARCHITECTURES),
                        metavar="MODEL", help="whose layers (default: %(default)s)")  # fmt: skip
    parts = *KERNELS, VOCABULARY
    parser.add_argument("--kernels", nargs="+", default=parts, choices=parts, metavar="KERNEL",
                        help="what is measured; the file's other choices are kept "
                        "(default: %(default)s)")  # fmt: skip
    parser.add_argument("--processes", type=int, default=8, help="that compile (default: 8)")
    parser.add_argument("--output", type=Path, help="default: kernels/tuned/DEVICE.json")
    return parser


def run(argv: list[str]) -> int:
    args = make_parser().parse_args(argv)
    try:
        return _run(args)
    except (ImportError, ConfigError) as error:
        return fail(error)


def _run(args: argparse.Namespace) -> int:
    import torch

    from ....kernels.tuning import chip_of, file_for

    if args.processes < 1:
        raise ConfigError(f"--processes: must be at least 1, got {args.processes}")
    if not torch.cuda.is_available():
        raise ConfigError("bench tune: there is no CUDA device here to measure")
    path = args.output or file_for(torch.cuda.get_device_name())
    previous = known_choices(path)
    jobs = [
        (kernel, product, rows, config)
        for kernel in args.kernels
        if kernel not in (GEMV, VOCABULARY)
        for product in dict.fromkeys(p for model in args.models for p in products(model))
        for rows in tune_int4.ROWS.get(kernel, ROWS)
        for config in _candidates(kernel, product, rows)
    ]
    measured: dict[str, list[dict[str, Any]]] = {
        GEMV if kernel == VOCABULARY else kernel: [] for kernel in args.kernels
    }
    with multiprocessing.get_context("spawn").Pool(args.processes) as pool:
        say(f"compiling {len(jobs)} candidates in {args.processes} processes")
        able = compiled(pool, compile_one, jobs)
        for kernel, product, rows in dict.fromkeys(job[:3] for job in able):
            configs = [job[3] for job in able if job[:3] == (kernel, product, rows)]
            measured[kernel].append(best(kernel, product, rows, configs))
            say(json.dumps({"kernel": kernel, **measured[kernel][-1]}))

        def compile_all(jobs: Iterable[tune_gemv.Job]) -> set[tune_gemv.Job]:
            return set(compiled(pool, tune_gemv.compile_one, list(jobs)))

        for model in args.models if GEMV in measured else ():
            layer = layer_of(model)
            choices: dict[Product, tune_gemv.Choice] = {}
            if GEMV in args.kernels:
                tuned = tune_gemv.tune(layer, compile_all)
                measured[GEMV] += gemv_entries(model, "layer", tuned, measured[GEMV])
                choices = tuned[0]
            if VOCABULARY in args.kernels and layer.vocabulary is not None:
                ending, last = last_products(layer)
                tuned = tune_gemv.tune(ending, compile_all, {last: choices.get(last)})
                measured[GEMV] += gemv_entries(model, VOCABULARY, tuned, measured[GEMV])
    if GEMV in measured:
        measured[GEMV] += others(previous.get(GEMV, []), measured[GEMV])
    facts = {**environment("cuda"), "chip": chip_of(torch.cuda.current_device())._asdict()}
    path.write_text(page(previous, facts, measured))
    print(path)
    return 0


def known_choices(path: Path) -> dict[str, Any]:
    """Return the existing file's content, or {}. Raises ConfigError before any measurement if it is
    damaged or not writable.
    """
    from ....kernels.tuning import read

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for kernel in KERNELS if path.exists() else ():
            read(path, kernel)
        records: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
        if not isinstance(records.get("measured", {}), dict):
            raise ValueError(f"{path} is damaged: measured is no object")
    except (OSError, ValueError) as error:
        raise ConfigError(f"--output: {error}; give another file") from error
    if not os.access(path if path.exists() else path.parent, os.W_OK):
        raise ConfigError(f"--output: {path} cannot be written; give another file")
    return records


def others(entries: list[dict[str, Any]], records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the entries of products that `known` lacks."""

    def product(entry: dict[str, Any]) -> tuple[int, int, bool]:
        return entry["outputs"], entry["inputs"], entry["gated"]

    taken = set(map(product, records))
    return [entry for entry in entries if product(entry) not in taken]


def compiled(pool: Any, compile_one: Callable[[Any], bool], jobs: list[Any]) -> list[Any]:
    done = pool.map(compile_one, jobs, chunksize=8 if len(jobs) > 256 else 1)
    return [job for job, able in zip(jobs, done, strict=True) if able]


def last_products(layer: Layer) -> tuple[Layer, Product]:
    """Return a layer's last product with the vocabulary's, and the former."""
    assert layer.vocabulary is not None
    last, (vocabulary, extras) = list(layer.products)[-1], layer.vocabulary
    return Layer({last: layer.products[last], vocabulary: extras}), last


def gemv_entries(
    model: str,
    part: str,
    tuned: tuple[dict[Product, tune_gemv.Choice], float, float],
    records: list[dict[str, Any]],
) -> list[dict[str, Any]]:
    """Return entries for products that no earlier model has. part: "layer" or "vocabulary"; tuned:
    result of `tune`.
    """
    from ....kernels.linear.gemv import GemvConfig

    chosen, before, after = tuned
    say(f"{GEMV}: {part} of {model}: {before:.1f} us by the rule, {after:.1f} us")
    entries = [
        {
            "outputs": outputs, "inputs": inputs, "gated": gated, "rows": 1,
            "config": GemvConfig(*choice)._asdict(),
            "model": model, f"{part}_us": round(after, 2), "rule_us": round(before, 2),
        }
        for (outputs, inputs, gated), choice in chosen.items()
    ]  # fmt: skip
    return others(entries, records)


def products(model: str) -> list[tuple[int, int, bool]]:
    """Return the (outputs, inputs, gated) of a model's dense layers without experts."""
    return list(layer_of(model).products)


def layer_of(model: str) -> Layer:
    """Return the dense products of a model's layers, each kind once, without experts."""
    import torch

    from ....core.config import EngineConfig
    from ....core.loading.build import construct_model
    from ....core.loading.model_config import resolve_model_config
    from ....core.nn.attention import Attention
    from ....core.nn.experts import ExpertLinear
    from ....core.nn.linear import GatedLinear, Linear
    from ....core.nn.mlp import PlainMLP
    from ....core.nn.norm import LayerNorm
    from ....core.nn.operations import Operations
    from ....core.parallel.ranks import Ranks
    from ....core.registry import load_plugins

    plugins, meta = load_plugins(), torch.device("meta")
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(model=str(write_model(model, Path(folder))), load_format="dummy")
        model_config = resolve_model_config(config, plugins)
        layers = construct_model(plugins, config, model_config, meta, Operations(), Ranks(), None)
    centered = any(isinstance(module, LayerNorm) for module in layers.modules())
    activations = {
        module.up_proj: module.fused_activation or ""
        for module in layers.modules()
        if isinstance(module, PlainMLP)
    }
    shapes: dict[Product, Extras] = {}
    for layer in layers.modules():
        if isinstance(layer, Linear) and not isinstance(layer, ExpertLinear):
            rows, inputs = layer.weight.shape
            gated = isinstance(layer, GatedLinear)
            extras = Extras(centered, layer.bias is not None, activations.get(layer, ""))
            shapes.setdefault((rows // 2 if gated else rows, inputs, gated), extras)
    layouts = (module.layout for module in layers.modules() if isinstance(module, Attention))
    heads = next((Heads(*layout) for layout in layouts), None)
    if heads is not None and next(iter(shapes))[0] != (heads[0] + 2 * heads[1]) * heads[2]:
        heads = None
    return Layer(shapes, heads, vocabulary_of(layers, centered))


def vocabulary_of(model: Any, centered: bool) -> tuple[Product, Extras] | None:
    """Return the product for logits; None: of another kind."""
    head = getattr(model, "output_embeddings", None)
    if head is None:
        return None
    rows, inputs = head.weight.shape
    return (rows, inputs, False), Extras(centered, head.bias is not None, summed=False)


def candidates(product: tuple[int, int, bool], rows: int) -> Iterator[tuple[Any, ...]]:
    """Yield `SmallMConfig` tuples."""
    outputs, inputs, gated = product
    block_m = max(16, rows)
    for block_n, block_k, warps, stages in (
        (64, 64, 4, 6), (64, 128, 4, 4), (64, 256, 4, 3), (128, 64, 4, 4), (128, 128, 8, 3),
    ):  # fmt: skip
        if ((2 if gated else 1) * block_n + block_m) * block_k * 2 * stages > SHARED_BYTES:
            continue
        for split_k in (1, 2, 4):
            programs = -(-outputs // block_n) * split_k
            if split_k > 1 and (programs > 600 or inputs < 2 * block_k * split_k):
                continue
            for prefetch, early in ((0, True), (0, False), (1024, True), (16384, True)):
                if prefetch <= 1024 or outputs * inputs < 8 << 20:
                    yield block_m, block_n, block_k, split_k, warps, stages, prefetch, early


def _candidates(
    kernel: str, product: tuple[int, int, bool], rows: int
) -> Iterator[tuple[Any, ...]]:
    if kernel == "small_m_matmul":
        return candidates(product, rows)
    return tune_int4.candidates(kernel, product, rows)


def _layer(kernel: str, product: tuple[int, int, bool], rows: int, copies: int) -> Any:
    if kernel == "small_m_matmul":
        return _Product(product, rows, copies)
    return tune_int4.Int4Product(product, rows, copies)


def compile_one(job: tuple[str, tuple[int, int, bool], int, tuple[Any, ...]]) -> bool:
    """Compile in a child process, into Triton's cache. Return False if the device cannot run it."""
    import torch

    kernel, product, rows, config = job
    try:
        _layer(kernel, product, rows, copies=1).multiply(config, 0)
        torch.cuda.synchronize()
    except Exception as error:
        say(f"{job}: {error!r:.200}")
        return False
    return True


def best(
    kernel: str, product: tuple[int, int, bool], rows: int, configs: list[tuple[Any, ...]]
) -> dict[str, Any]:
    """Return the file's entry: the fastest candidate, or none if the library is faster."""
    import torch

    from ....kernels.tuning import CONFIGS
    from ..timing import graph_seconds

    outputs, inputs, gated = product
    size = outputs * inputs * (2 if gated else 1) * (4 if kernel == "small_m_matmul" else 1) // 2
    layer = _layer(kernel, product, rows, copies=max(2, min(LAUNCHES, MEMORY // size)))
    device = torch.device("cuda")

    def time(call: Any) -> float:
        works = [lambda i=i: call(i) for i in range(LAUNCHES)]
        return 1e6 * graph_seconds(works, device, repeats=5, warmup=1)

    library = time(layer.library)
    expected = layer.library(0).float()
    timed: list[tuple[float, tuple[Any, ...]]] = []
    for config in configs:
        error = (layer.multiply(config, 0).float() - expected).abs().max() / expected.abs().max()
        if not error < 0.02:
            say(f"{kernel} {product} {rows} {config}: wrong by {float(error):.3f} of the largest")
            continue
        timed.append((time(lambda i, config=config: layer.multiply(config, i)), config))
    us, chosen = min(timed) if timed else (library, None)
    return {
        "outputs": outputs, "inputs": inputs, "gated": gated, "rows": rows,
        "config": CONFIGS[kernel](*chosen)._asdict() if chosen and us < library else None,
        "us": round(us, 2), "library_us": round(library, 2),
    }  # fmt: skip


class _Product:
    """Copies of a layer's weights, and both products."""

    def __init__(self, product: tuple[int, int, bool], rows: int, copies: int) -> None:
        import torch

        from ....kernels.linear.small_m_matmul import MAX_TILES, SplitKWorkspace

        self.outputs, self.inputs, self.gated = product

        def random(*size: int) -> Any:
            return torch.randn(size, device="cuda", dtype=torch.bfloat16)

        self.x = random(rows, self.inputs)
        stacked = self.outputs * (2 if self.gated else 1)
        self.weights = [random(stacked, self.inputs) * 0.02 for _ in range(copies)]
        self.residual = None if self.gated else random(rows, self.outputs)
        self.workspace = SplitKWorkspace(
            torch.empty(8 * rows * stacked, device="cuda"),
            torch.zeros(MAX_TILES, dtype=torch.int32, device="cuda"),
        )

    def multiply(self, config: tuple[Any, ...], i: int) -> Any:
        from ....kernels.linear.small_m_matmul import SmallMConfig, small_m_matmul

        return small_m_matmul(
            self.x, self.weights[i % len(self.weights)], residual=self.residual, gated=self.gated,
            config=SmallMConfig(*config), workspace=self.workspace,
        )  # fmt: skip

    def library(self, i: int) -> Any:
        import torch

        from ....kernels.activations import silu_mul

        weight = self.weights[i % len(self.weights)].t()
        if self.residual is None:
            return silu_mul(torch.mm(self.x, weight))
        return torch.addmm(self.residual, self.x, weight)


def page(
    previous: dict[str, Any], facts: dict[str, Any], measured: dict[str, list[dict[str, Any]]]
) -> str:
    """Return the file's text, with one line of JSON per entry: `known`, updated."""
    about = {key: facts[key] for key in ("date", "commit", "torch", "triton")}
    when = {**previous.get("measured", {}), **dict.fromkeys(measured, about)}
    parts = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in facts.items()]
    rows = ",\n  ".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in when.items())
    parts.append(f'"measured": {{\n  {rows}\n }}')
    for kernel in KERNELS:
        rows = ",\n  ".join(map(json.dumps, measured.get(kernel, previous.get(kernel, []))))
        parts.append(f"{json.dumps(kernel)}: [\n  {rows}\n ]")
    return "{\n " + ",\n ".join(parts) + "\n}\n"
