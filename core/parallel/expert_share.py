"""Which experts of a mixture a rank holds, where ranks divide them whole (expert parallelism)."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import ConfigError
from .ranks import Group


class ExpertShare(NamedTuple):
    """A rank's experts of one layer."""

    own: range
    """Numbers of the experts that this rank holds."""
    num_experts: int
    """Of all ranks."""

    @classmethod
    def of(cls, num_experts: int, group: Group) -> ExpertShare:
        """Divide a layer's experts: neighbours stay together, and the first ranks hold one more
        where the number cannot be divided. Raises ConfigError if a rank would have none."""
        if num_experts < group.size:
            raise ConfigError(
                f"enable_expert_parallel: a layer of this model has {num_experts} experts, fewer "
                f"than tensor_parallel_size {group.size}",
                param="enable_expert_parallel",
            )
        each, more = divmod(num_experts, group.size)
        first = group.rank * each + min(group.rank, more)
        return cls(range(first, first + each + (group.rank < more)), num_experts)

    def is_elsewhere(self, shard: str) -> bool:
        """Return whether another rank holds a shard of the layer: "3.gate" is the fourth
        expert's."""
        number = shard.partition(".")[0]
        expert = int(number) if number.isdecimal() else -1
        return 0 <= expert < self.num_experts and expert not in self.own
