"""Which experts of a mixture a rank holds, where ranks divide them whole (expert parallelism)."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from ..errors import ConfigError
from .ranks import Group

if TYPE_CHECKING:
    import torch


class ExpertShare(NamedTuple):
    """A rank's experts of one layer, each in a place of its weights."""

    own: tuple[int, ...]
    """Numbers of the experts that this rank loads, by place; neighbours, unless some have
    copies."""
    num_experts: int
    """Experts of all ranks, without copies."""
    first: int
    """Number of this rank's first place among those of all ranks."""
    num_places: int
    """Experts of all ranks, copies included."""
    num_ranks: int

    @classmethod
    def of(cls, num_experts: int, group: Group, num_copies: int | None = None) -> ExpertShare:
        """Divide a layer's experts: neighbours stay together, and the first ranks hold one more
        where the number cannot be divided. `num_copies`: of experts that move, from the first on,
        in places behind all others; None: they stay. Raises ConfigError if a rank would have none;
        of experts that move, also if it would have one twice, or other places than another rank."""
        places = num_experts + (num_copies or 0)
        if num_experts < group.size:
            raise ConfigError(
                f"enable_expert_parallel: a layer of this model has {num_experts} experts, fewer "
                f"than the {group.size} ranks that would divide them (tensor_parallel_size times "
                "data_parallel_size)",
                param="enable_expert_parallel",
            )
        each, more = divmod(places, group.size)
        if num_copies is not None and (more or each > num_experts):
            most = num_experts * (group.size - 1)
            fits = f"their sum must be a multiple of {group.size}" if more else f"at most {most} do"
            raise ConfigError(
                f"eplb_config.num_redundant_experts: {num_experts} experts and {num_copies} more "
                f"do not fit {group.size} ranks; {fits}",
                param="eplb_config",
            )
        first = group.rank * each + min(group.rank, more)
        numbers = range(first, first + each + (group.rank < more))
        own = tuple(number % num_experts for number in numbers)
        return cls(own, num_experts, first, places, group.size)

    @property
    def most(self) -> int:
        """Places of the ranks that have most."""
        return -(-self.num_places // self.num_ranks)

    def spread(self, places: torch.Tensor) -> torch.Tensor:
        """Number places, [any] int32, counted from this rank's first one, so that rank r's begin at
        r * `most`."""
        each, more = divmod(self.num_places, self.num_ranks)
        places = places + self.first
        if more == 0:
            return places
        behind = places - more * self.most
        return places + behind.clamp(min=0) // each

    def is_elsewhere(self, shard: str) -> bool:
        """Return whether another rank alone holds a shard of the layer: "3.gate" is the fourth
        expert's."""
        number = shard.partition(".")[0]
        expert = int(number) if number.isdecimal() else -1
        return 0 <= expert < self.num_experts and expert not in self.own
