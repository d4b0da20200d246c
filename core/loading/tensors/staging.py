"""Collects and validates a quantized layer's tensors, then processes it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch

from ...errors import LoadError
from ...nn.quantized import QuantizedLinear, TensorSpec
from ...parallel.sharding import FEATURES, Sharding


class Staging:
    """One layer's tensors so far."""

    def __init__(self, module: QuantizedLinear) -> None:
        self.module = module
        spec = module.spec
        self._specs = {shard: module.tensors(rows) for shard, rows in spec.shards.items()}
        self._got: dict[str, dict[str, torch.Tensor]] = {shard: {} for shard in spec.shards}
        self._needed = {
            (shard, leaf)
            for shard, specs in self._specs.items()
            for leaf, tensor in specs.items()
            if not tensor.optional
        }
        """Missing required tensors."""

    @property
    def places(self) -> Iterable[tuple[str, str]]:
        """Tensors of the layer: (shard name, name after the prefix)."""
        for shard, specs in self._specs.items():
            for leaf in specs:
                yield shard, leaf

    def add(
        self,
        name: str,
        leaf: str,
        shard: str | None,
        tensor: torch.Tensor,
        *,
        divided: bool = False,
    ) -> None:
        """Add a tensor; process the layer after the last. `divided`: already this rank's part.
        Raises LoadError.
        """
        spec = self._specs.get(shard or "", {}).get(leaf)
        if spec is None:
            raise LoadError(
                f"unexpected tensor {name!r}: its layer is quantized and takes "
                f"{', '.join(sorted(self._specs[next(iter(self._specs))]))}"
            )
        if not divided:
            tensor = _own_part(self.module.sharding, name, shard, tensor, spec)
        self._got[shard or ""][leaf] = _checked(name, tensor, spec)
        self._needed.discard((shard or "", leaf))
        if not self._needed and not self.module.processed and self.module.ready(self._got):
            self._process()

    @property
    def missing(self) -> Iterable[tuple[str, str]]:
        """Missing tensors: (shard name, name after the prefix)."""
        return (place for place in self.places if place in self._needed)

    def finish(self) -> None:
        """Process a layer without its optional tensors."""
        if not self.module.processed:
            self._process()

    def fill_dummy(self, generator: torch.Generator) -> None:
        """Fill in random tensors."""
        for shard, specs in self._specs.items():
            for leaf, spec in specs.items():
                if not spec.optional or spec.dummy is not None:
                    self._got[shard][leaf] = _random(self.module, leaf, spec, generator)
        self._process()

    def _process(self) -> None:
        try:
            self.module.process(self._got)
        except LoadError as error:
            raise LoadError(f"{self.module.spec.prefix}: {error.message}") from error
        self.module.processed = True
        self._got = {shard: {} for shard in self._got}


def divided_axes(sharding: Sharding, spec: TensorSpec) -> Iterator[Sharding]:
    """Yield the ranks' sharding of each dimension. Raises ConfigError."""
    for dim, axis in enumerate(spec.axes or ()):
        if axis is not None and axis[0] == FEATURES[sharding.dim]:
            yield sharding.over(dim, axis[1])


def _own_part(
    sharding: Sharding | None,
    name: str,
    shard: str | None,
    tensor: torch.Tensor,
    spec: TensorSpec,
) -> torch.Tensor:
    """Return this rank's part. Raises LoadError."""
    if sharding is None or tensor.numel() == 1:
        return tensor
    try:
        for divided in divided_axes(sharding, spec):
            tensor = divided.part(shard, tensor)
    except LoadError as error:
        raise LoadError(f"tensor {name!r} {error.message}") from error
    return tensor


def _checked(name: str, tensor: torch.Tensor, spec: TensorSpec) -> torch.Tensor:
    if spec.alternative is not None and tensor.dtype in spec.alternative.dtypes:
        spec = spec.alternative
    if spec.shape is not None:
        if _squeezed(tensor.shape) != _squeezed(spec.shape):
            raise LoadError(
                f"tensor {name!r} has shape {tuple(tensor.shape)}, the quantized layer's is "
                f"{spec.shape}"
            )
        tensor = tensor.reshape(spec.shape)
    allowed = tensor.dtype in spec.dtypes if spec.dtypes else tensor.is_floating_point()
    if not allowed:
        dtypes = " or ".join(str(dtype) for dtype in spec.dtypes) or "a floating-point type"
        raise LoadError(f"tensor {name!r} holds {tensor.dtype}, the quantized layer wants {dtypes}")
    return tensor


def _squeezed(shape: Iterable[int]) -> tuple[int, ...]:
    return tuple(size for size in shape if size != 1)


def _random(
    module: QuantizedLinear, leaf: str, spec: TensorSpec, generator: torch.Generator
) -> torch.Tensor:
    device, shape = module.spec.device, spec.shape
    if shape is None and spec.dummy is not None:
        shape = (1,)
    if shape is None:
        raise LoadError(f"{leaf} of {module.spec.prefix} has no shape of its own to make up")
    dtype = spec.dtypes[0] if spec.dtypes else module.spec.dtype
    if spec.dummy is None and not dtype.is_floating_point:
        info = torch.iinfo(dtype)
        return torch.randint(
            info.min, info.max, shape, generator=generator, dtype=dtype, device=device
        )
    if spec.dummy is not None:
        return torch.full(shape, spec.dummy, dtype=torch.float32, device=device).to(dtype)
    bound = (3.0 / shape[-1]) ** 0.5 if shape else 1.0
    tensor = torch.empty(shape, dtype=module.spec.dtype, device=device)
    return tensor.uniform_(-bound, bound, generator=generator).to(dtype)
