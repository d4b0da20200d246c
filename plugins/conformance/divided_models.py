"""Checks that ranks and stages compute together what one rank does."""

from __future__ import annotations

import functools
from collections.abc import Collection
from pathlib import Path
from typing import Literal

import pytest
import torch

from ...core.errors import ConfigError
from ...core.loading.build import is_tensor_parallel
from ...core.nn.experts import Experts
from ...core.parallel.ranks import Pipeline, Ranks
from ...core.registration.architecture import FALLBACK
from ...core.registry import Plugins
from .paged_model import PagedModel, assert_near, example_prompts
from .rank_threads import run_ranks, thread_ranks


def check_ranks(
    folder: Path,
    name: str,
    size: int,
    plugins: Plugins,
    bound: float,
    ways: Collection[Literal["tensor", "experts"]] = ("tensor", "experts"),
) -> None:
    """Check that `size` ranks compute together what one does, mixtures also with expert
    parallelism; a class that does not say `tensor_parallel` must be refused. `bound`: allowed
    deviation of float32 log-probabilities; `ways`: how experts are divided."""
    registered = name if name in plugins["model"] else FALLBACK
    if not is_tensor_parallel(plugins["model"], registered):
        with pytest.raises(ConfigError, match="tensor_parallel_size"):
            PagedModel(folder, "float32", plugins=plugins, ranks=thread_ranks(size)[0])
        return
    one = PagedModel(folder, "float32", plugins=plugins)
    has_experts = any(isinstance(module, Experts) for module in one.model.modules())
    models = [
        [
            PagedModel(folder, "float32", plugins=plugins, ranks=rank)
            for rank in thread_ranks(size, expert_parallel=way == "experts")
        ]
        for way in ways
        if way == "tensor" or has_experts
    ]
    for step in (dict(enumerate(example_prompts()[1:4])), {0: [7], 2: [9]}):
        want = one.run(step)
        for way in models:
            results = run_ranks([functools.partial(model.run, step) for model in way])
            for slot, logits in want.items():
                assert_near(results[0][slot], logits, bound)
                for result in results[1:]:
                    assert torch.equal(result[slot], results[0][slot]), "ranks have unlike logits"
    for way in models:
        sizes = [sum(p.numel() for p in m.model.parameters()) for m in (one, *way)]
        assert max(sizes[1:]) < sizes[0], "a rank holds all weights"


def check_stages(folder: Path, count: int, plugins: Plugins) -> None:
    """Check that `count` stages compute one after another what one rank does, bit for bit, and that
    none has the others' weights; a class that does not say `pipeline_parallel` must be refused."""
    ranks = [Ranks(pipeline=Pipeline(stage, count)) for stage in range(count)]
    one = PagedModel(folder, "float32", plugins=plugins)
    if not getattr(one.model, "pipeline_parallel", False):
        with pytest.raises(ConfigError, match="pipeline_parallel_size"):
            PagedModel(folder, "float32", plugins=plugins, ranks=ranks[0])
        return
    stages = [PagedModel(folder, "float32", plugins=plugins, ranks=each) for each in ranks]
    for step in (dict(enumerate(example_prompts()[1:4])), {0: [7], 2: [9]}):
        want = one.run(step)
        hidden = stages[0].hidden(step)
        for stage in stages[1:]:
            assert isinstance(hidden, torch.Tensor), "the last stage alone leaves layers unfinished"
            hidden = stage.hidden(step, hidden)
        assert torch.equal(stages[-1].logits(hidden), torch.cat(list(want.values())))
    names = [{name for name, _ in model.model.named_parameters()} for model in (one, *stages)]
    assert set.union(*names[1:]) == names[0], "no stage has a weight, or one that is none"
    shared = {name for name in names[0] if sum(name in each for each in names[1:]) > 1}
    tied = set(one.model.weight_map.tied.values())  # type: ignore[union-attr, operator]
    assert shared <= tied, f"several stages have {sorted(shared)}"
