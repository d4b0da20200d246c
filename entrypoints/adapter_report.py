"""What an adapter has, and whether it can be served."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator

import msgspec
import torch

from ..core.adapters.file import AdapterFile, LowRank, ReadTensor
from ..core.adapters.finding import Finder
from ..core.config import EngineConfig
from ..core.errors import JackfieldError
from ..core.loading.build import construct_model
from ..core.loading.model_config import resolve_model_config
from ..core.local_path import local_path
from ..core.nn.operations import Operations
from ..core.parallel.ranks import ONE_RANK
from ..core.registry import Plugins
from ..core.worker.adapters.sites import Sites

NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)|^\d+(?=\.)")


class Change(msgspec.Struct):
    """What is changed in all layers of one name, their numbers aside."""

    layers: str
    """Such as "model.layers.*.self_attn.q_proj"."""
    kind: str
    """ "low rank", "DoRA", "embedding", "experts", "copy" or "tokens"; "+ bias" for one of B."""
    count: int = 0
    ranks: list[int] = []
    scales: list[float] = []
    shapes: list[str] = []
    """In and out of layers, as "4096 → 1024"; of copies and token rows the shape."""
    dtypes: list[str] = []
    nbytes: int = 0


class AdapterReport(msgspec.Struct, omit_defaults=True):
    """An adapter, or why it is none."""

    path: str
    servable: bool
    """Whether it can be read, and applied to the model if one was given."""
    reason: str = ""
    """Why not."""
    param: str | None = None
    """The field or tensor for which it is refused."""
    format: str = ""
    model: str = ""
    """The checkpoint that it was compared with; "" if none was given."""
    base_model: str = ""
    digest: str = ""
    rank: int = 0
    """The largest."""
    plain: bool = False
    """Whether recorded steps can have it: low-rank changes of linear layers alone."""
    nbytes: int = 0
    nbytes_16_bit: int = 0
    """In bfloat16 or float16."""
    invocation_tokens: list[int] = []
    changes: list[Change] = []
    notes: list[str] = []


def adapter_report(plugins: Plugins, path: str, model: str = "") -> AdapterReport:
    """Read an adapter, and compare it with a checkpoint's configuration if one is given: layers and
    their sizes; no weights are loaded. Raises JackfieldError for what concerns the model alone."""
    report = AdapterReport(path, servable=True, model=model)
    sites = _sites(plugins, model) if model else None
    try:
        report.format = asyncio.run(Finder(EngineConfig(), plugins).format_at(path))
        registry = plugins["adapter_format"]
        with registry.calling(report.format, "read"):
            file: AdapterFile = registry.load(report.format).read(local_path(path))
        _describe(report, file)
        if sites is not None:
            sites.changes(file)
    except JackfieldError as error:
        report.servable, report.reason, report.param = False, error.message, error.param
    return report


def _sites(plugins: Plugins, model: str) -> Sites:
    """Return the layers of a checkpoint's model, without weights."""
    config = EngineConfig(model=model, device="cpu")
    model_config = resolve_model_config(config)
    device = torch.device("meta")
    built = construct_model(
        plugins, config, model_config, device, Operations(), ONE_RANK, None
    )  # fmt: skip
    sites = Sites(built)
    for site in sites.sites.values():
        site.called = True  # Nothing is computed, so none was seen to be.
    return sites


def _describe(report: AdapterReport, file: AdapterFile) -> None:
    changes: dict[tuple[str, str], Change] = {}
    for name, kind, rank, scale, shape, reads in _parts(file):
        layers = NUMBER.sub("*", name)
        change = changes.setdefault((layers, kind), Change(layers, kind))
        change.count += 1
        tensors = [read() for read in reads if read is not None]
        dtypes = [str(tensor.dtype).removeprefix("torch.") for tensor in tensors]
        change.ranks = sorted({*change.ranks, *([rank] if rank else [])})
        change.scales = sorted({*change.scales, *([] if scale is None else [scale])})
        change.shapes = sorted({*change.shapes, shape or str(list(tensors[0].shape))})
        change.dtypes = sorted({*change.dtypes, *dtypes})
        change.nbytes += sum(tensor.nbytes for tensor in tensors)
        report.nbytes_16_bit += sum(2 * tensor.numel() for tensor in tensors)
    report.changes = [changes[key] for key in sorted(changes)]
    report.nbytes = sum(change.nbytes for change in report.changes)
    report.base_model, report.digest = file.base_model, file.digest
    report.rank, report.plain = file.rank, file.plain
    report.invocation_tokens, report.notes = list(file.invocation_tokens), list(file.notes)


def _parts(
    file: AdapterFile,
) -> Iterator[tuple[str, str, int, float | None, str, tuple[ReadTensor | None, ...]]]:
    """Yield what is changed: name, kind, rank, scale, sizes, tensors."""
    for each in file.low_rank:
        sizes = f"{each.in_features} → {each.out_features}"
        reads = (each.a, each.b, each.bias, each.magnitude)
        yield each.name, _kind(each), each.rank, each.scale, sizes, reads
    for experts in file.experts:
        sizes = f"{experts.num_experts} × {experts.in_features} → {experts.out_features}"
        yield experts.name, "experts", experts.rank, experts.scale, sizes, (experts.a, experts.b)
    for name, read in file.replaced.items():
        yield name, "copy", 0, None, "", (read,)
    for rows in file.token_rows:
        yield rows.name, "tokens", 0, None, "", (rows.rows,)


def _kind(each: LowRank) -> str:
    kind = "embedding" if each.embedding else "low rank"
    kind = f"{kind} + DoRA" if each.magnitude is not None else kind
    return f"{kind} + bias" if each.bias is not None else kind
