"""Ranks, and the groups in which they compute together."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from ..errors import ConfigError

if TYPE_CHECKING:
    import torch

    from ..protocols.all2all import All2All
    from .round import Round


class Group(Protocol):
    """Ranks that compute each layer together. Every rank calls the same methods in the same order,
    with tensors of the same shape and type."""

    @property
    def rank(self) -> int:
        """Number of this rank, from 0."""

    @property
    def size(self) -> int:
        """Number of ranks."""

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        """Return the sum of `x` over all ranks, plus the residual, which is the same on all: the
        same bits on each, [any] → the same shape. Both may be overwritten."""

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """Return the tensors of all ranks, joined in the last dimension, by rank: [..., n] → [...,
        size * n]"""


class Transfer(Protocol):
    """A tensor on its way to this rank."""

    def wait(self) -> object:
        """Return once it is there. On a device with streams: the current stream waits for it."""


class LinkedGroup(Group, Protocol):
    """A group whose ranks also send tensors to each other: what one rank sends to another arrives
    in that order, and the others take no part in it."""

    def send(self, x: torch.Tensor, to: int) -> None:
        """Send `x`, which is contiguous, without waiting for the receiver. It may be overwritten
        afterwards."""

    def receive(self, into: torch.Tensor, source: int) -> Transfer:
        """Let `into`, which is contiguous, be filled by the next tensor from a rank: one of the
        same shape and type. Does not wait for it."""


@dataclass(frozen=True)
class OneRank:
    rank: int = 0
    size: int = 1

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        return x if residual is None else residual.add_(x)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return x


class PausableGroup:
    """A group whose calls can be skipped, making results meaningless."""

    def __init__(self, group: Group) -> None:
        self.rank, self.size = group.rank, group.size
        self.paused = False
        self._group = group

    def all_reduce(self, x: torch.Tensor, residual: torch.Tensor | None = None) -> torch.Tensor:
        if self.paused:
            return x if residual is None else residual.add_(x)
        return self._group.all_reduce(x, residual)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        """While paused, return `x` as every rank's part."""
        if self.paused:
            return x.repeat(*[1] * (x.dim() - 1), self.size)
        return self._group.all_gather(x)


@dataclass(frozen=True)
class Pipeline:
    """The stages of a model, as one rank sees them. Stage 0 has the embedding, the last one the
    head.

    Numbers of ranks count the stages backwards: rank 0, whose process has the requests, belongs to
    the last stage, which samples. So results and grammars stay in that process, and sampled tokens
    alone go back to the first stage.
    """

    stage: int = 0
    size: int = 1
    """Number of stages."""
    tensor_size: int = 1
    """Number of ranks of a stage."""
    world: LinkedGroup | None = None
    """All ranks of all stages; None: there is one stage."""
    partition: tuple[int, ...] | None = None
    """Number of layers of each stage; None: as even as possible."""

    @classmethod
    def of(
        cls, world: LinkedGroup, size: int, partition: tuple[int, ...] | None = None
    ) -> Pipeline:
        """Return the place of this rank in `size` stages that `world` is divided into."""
        tensor_size = world.size // size
        return cls(size - 1 - world.rank // tensor_size, size, tensor_size, world, partition)

    @property
    def first(self) -> bool:
        """Whether this stage has the embedding."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Whether this stage has the head."""
        return self.stage == self.size - 1

    def layers(self, count: int) -> range:
        """Return this stage's of `count` layers, by `partition`, or else evenly: those that are
        left over go to the stages in the middle, from the back, then to the last: it has the head
        beside them, and the first has the embedding. Raises ConfigError if `partition` is of
        another number of layers, or there are fewer layers than stages."""
        if self.partition is not None:
            if sum(self.partition) != count:
                listed = ",".join(map(str, self.partition))
                raise ConfigError(
                    f"pipeline_layer_partition: {listed} are {sum(self.partition)} layers, and "
                    f"this model has {count}",
                    param="pipeline_layer_partition",
                )
            start = sum(self.partition[: self.stage])
            return range(start, start + self.partition[self.stage])
        if count < self.size:
            raise ConfigError(
                f"pipeline_parallel_size: {self.size} stages cannot share the {count} layers of "
                "this model",
                param="pipeline_parallel_size",
            )
        each, more = divmod(count, self.size)
        larger = [*range(self.size - 2, 0, -1), self.size - 1][:more]
        start = self.stage * each + sum(stage < self.stage for stage in larger)
        return range(start, start + each + (self.stage in larger))

    def connect(self, device: torch.device) -> None:
        """Exchange a number over each link that steps use. Connections are made by the first call,
        which may wait for the other side: all ranks go through the links in one order."""
        import torch

        number = torch.zeros(1, device=device)
        for stage in range(self.size - 1):
            if self.stage == stage:
                self.send_hidden(number)
            elif self.stage == stage + 1:
                self.receive_hidden(number).wait()
        for stage in range(self.size - 1):
            if self.last:
                self.send_tokens(number, stage)
            elif self.stage == stage:
                self.receive_tokens(number).wait()

    def send_hidden(self, hidden: torch.Tensor) -> None:
        """Send what this stage has computed to the next one: [num_tokens, width]."""
        assert self.world is not None and not self.last, "there is a next stage"
        self.world.send(hidden, self.world.rank - self.tensor_size)

    def receive_hidden(self, into: torch.Tensor) -> Transfer:
        """Receive what the stage before has computed: [num_tokens, width]."""
        assert self.world is not None and not self.first, "there is a stage before"
        return self.world.receive(into, self.world.rank + self.tensor_size)

    def send_tokens(self, tokens: torch.Tensor, stage: int = 0) -> None:
        """Send the tokens that the last stage has sampled to another, the first by default: [any
        shape]."""
        assert self.world is not None and self.last, "the last stage samples"
        self.world.send(tokens, self.world.rank + (self.stage - stage) * self.tensor_size)

    def receive_tokens(self, into: torch.Tensor) -> Transfer:
        """Receive what the last stage has sampled."""
        assert self.world is not None and not self.last, "the last stage samples"
        last = self.size - 1 - self.stage
        return self.world.receive(into, self.world.rank - last * self.tensor_size)


ONE_STAGE = Pipeline()


class Product(Protocol):
    """A layer that is divided by its input features, so that each rank computes one term."""

    def __call__(
        self, x: torch.Tensor, *, residual: torch.Tensor | None = None
    ) -> torch.Tensor: ...


@dataclass(frozen=True)
class Ranks:
    """The groups that this rank belongs to."""

    tensor: Group = OneRank()
    """Ranks that each hold a part of every layer (tensor parallelism)."""
    pipeline: Pipeline = ONE_STAGE
    """Stages that each hold some of the layers (pipeline parallelism)."""
    experts: Group = OneRank()
    """Ranks that each hold some of a mixture's experts whole (expert parallelism): those of
    `tensor`, or of all engines, or with one rank, each expert is divided like other layers. Its
    methods are not called: what experts compute is a term of `add`'s sum."""
    all2all: All2All | None = None
    """How tokens come to the ranks of `experts`; None: each has all tokens."""
    round: Round | None = None
    """The step of all engines, if `experts` are ranks of several; they take part in each other's
    steps."""
    local_rank: int = 0
    """Number of this rank among those of its host, and of its device."""

    @property
    def size(self) -> int:
        """Number of ranks that compute the model."""
        return self.tensor.size * self.pipeline.size

    def pausable(self) -> Ranks:
        """Return the same ranks, whose calls `pause` leaves out."""
        return self if self.tensor.size == 1 else replace(self, tensor=PausableGroup(self.tensor))

    @property
    def paused(self) -> bool:
        """Whether this rank computes without the others."""
        return isinstance(self.tensor, PausableGroup) and self.tensor.paused

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """Context in which this rank computes without the others, and may do so more or less often
        than they."""
        group = self.tensor
        if isinstance(group, PausableGroup):
            group.paused = True
        try:
            yield
        finally:
            if isinstance(group, PausableGroup):
                group.paused = False

    def all(self, done: bool, device: torch.device) -> bool:
        """Return whether `done` is true on all ranks of this stage. `device`: that of their
        tensors."""
        return bool(self.minimum(int(done), device))

    def minimum(self, value: int, device: torch.device) -> int:
        """Return the smallest `value` of all ranks of this stage. `device`: that of their
        tensors."""
        return _minimum(self.tensor, value, device)

    def minimum_of_stages(self, value: int, device: torch.device) -> int:
        """Return the smallest `value` of all ranks of all stages."""
        return _minimum(self.pipeline.world or self.tensor, value, device)

    def add(
        self, residual: torch.Tensor | None, *products: tuple[Product, torch.Tensor]
    ) -> torch.Tensor:
        """Return residual + the sum of all products, each (layer, its input), over all ranks.

        The residual is added once, after the sum, and may be overwritten. One rank passes it
        through the layers, which may add it in their own kernels.
        """
        alone = self.tensor.size == 1
        total = residual if alone else None
        for layer, x in products:
            total = layer(x, residual=total)
        assert total is not None, "there is at least one product"
        if alone:
            return total
        return self.tensor.all_reduce(total, residual)


def _minimum(group: Group, value: int, device: torch.device) -> int:
    if group.size == 1:
        return value
    import torch

    return int(group.all_gather(torch.tensor([value], device=device)).min())


ONE_RANK = Ranks()
