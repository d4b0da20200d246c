"""How many snapshots of states there are, where ranks have unlike memory."""

from __future__ import annotations

import functools

import torch
from torch import nn

from jackfield.core.config import EngineConfig
from jackfield.core.nn.state.layer import StateLayer
from jackfield.core.parallel.ranks import Ranks
from jackfield.core.worker.parts.states import make_states
from jackfield.plugins.conformance.rank_threads import run_ranks, thread_ranks

SLOTS = 3
BYTES = 4096 * 4
"""Of a slot's state."""
CPU = torch.device("cpu")


def test_ranks_have_as_many_snapshots_as_the_one_with_the_least_memory() -> None:
    def snapshots(ranks: Ranks) -> int:
        gib = (SLOTS + 1 + 10 * (7 + 3 * ranks.tensor.rank)) * BYTES / (1 << 30)
        config = EngineConfig(
            max_num_seqs=SLOTS, cpu_kvcache_space=gib, enable_prefix_caching=True, device="cpu"
        )
        model = nn.ModuleList([StateLayer(state=((4096,), torch.float32))])
        states = make_states(model, config, CPU, ranks)
        assert states is not None
        return states.num_snapshots

    calls = [functools.partial(snapshots, ranks) for ranks in thread_ranks(2)]
    assert run_ranks(calls) == [7, 7]
