"""The kit of latent attention backends notices planted bugs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch
from mutants import Mutant, mutant_tests, plugin_of, subclass

from jackfield.plugins.attention.torch_latent import LatentMetadata, TorchLatentAttention
from jackfield.plugins.conformance.latent_attention import LatentAttentionBackendKit


class Sound(TorchLatentAttention):
    """Reads on the device what the host may not know."""

    name = "subject"
    graph_safe = mixed_graph_safe = True

    def build_metadata(self, layout: Any) -> LatentMetadata:
        return LatentMetadata(layout, layout.query_start.tolist(), layout.seq_lens.tolist())


class Kit(LatentAttentionBackendKit):
    name = "subject"
    plugin = plugin_of("latent_attention_backend", "subject", Sound)
    promised = frozenset({"float32", "bfloat16"})


def planted(**changes: Any) -> type:
    return subclass(Sound, **changes)


def with_arguments(change: Any) -> type:
    """It computes with other arguments: change(spec, query, latent, up, cache, metadata) → those"""

    def forward(self: Any, *args: Any, **more: Any) -> torch.Tensor:
        return Sound.forward(self, *change(*args), **more)

    return planted(forward=forward)


def another_scale(spec: Any, *args: Any) -> Any:
    return msgspec.structs.replace(spec, scale=spec.scale * 1.1), *args


def no_shared_key(spec: Any, query: Any, *args: Any) -> Any:
    query = query.clone()
    query[..., spec.nope_dim :] = 0.0
    return spec, query, *args


def values_first(spec: Any, query: Any, latent: Any, up: Any, *args: Any) -> Any:
    key, value = up.split_with_sizes([spec.nope_dim, spec.value_dim], dim=1)
    rolled = torch.cat([value, key], dim=1)
    return spec, query, latent, rolled, *args


def one_head(spec: Any, query: Any, latent: Any, up: Any, *args: Any) -> Any:
    return spec, query, latent, up[:1].expand_as(up), *args


def narrow(spec: Any, query: Any, *args: Any) -> Any:
    return spec, query.to(torch.bfloat16).to(query.dtype), *args


def one_token_less(self: Any, layout: Any) -> LatentMetadata:
    sound = Sound.build_metadata(self, layout)
    rows = zip(sound.starts, sound.starts[1:], sound.seq_lens, strict=False)
    fewer = [length - (length > end - start > 0) for start, end, length in rows]
    return LatentMetadata(replace(layout, seq_lens=torch.tensor(fewer)), sound.starts, fewer)


def without_levels(self: Any, layout: Any) -> LatentMetadata:
    return Sound.build_metadata(self, replace(layout, levels=None))


def host_bounds(self: Any, layout: Any) -> LatentMetadata:
    lengths = np.asarray(layout.seq_lens_cpu).tolist()
    return LatentMetadata(layout, layout.query_start.tolist(), lengths)


def host_starts(self: Any, layout: Any) -> LatentMetadata:
    starts = np.asarray(layout.query_start_cpu).tolist()
    return LatentMetadata(layout, starts, layout.seq_lens.tolist())


def keeps_the_first_metadata(self: Any, layout: Any) -> LatentMetadata:
    if not hasattr(self, "kept"):
        self.kept = Sound.build_metadata(self, layout)
    return self.kept


def reads_all(self: Any, *args: Any, chosen: Any = None) -> torch.Tensor:
    return Sound.forward(self, *args)


def reads_too_few(self: Any, *args: Any, chosen: Any = None) -> torch.Tensor:
    if chosen is not None:
        chosen = chosen._replace(counts=(chosen.counts - 1).clamp(min=1))
    return Sound.forward(self, *args, chosen=chosen)


def wide(self: Any, *args: Any, **more: Any) -> torch.Tensor:
    return Sound.forward(self, *args, **more).float()


def writes_its_neighbour(self: Any, *args: Any, **more: Any) -> torch.Tensor:
    out = Sound.forward(self, *args, **more)
    args[4][-1, 0] = 0.0
    return out


def serves_anything(cls: Any, spec: Any, device: Any, dtype: Any) -> str | None:
    return None if device.type == "cpu" else "only a CPU"


EXPANDED, SHAPES = "test_equals_expanded_attention", "test_shapes"
LONG, LARGE = "test_long_and_short_rows_together", "test_large_logits_do_not_overflow"
MANY = "test_one_instance_serves_many_steps_and_layers"
WARM = "test_warm_up_on_the_null_block"
BOUNDED = "test_lengths_that_only_the_device_knows"
GRAPH, MIXED = (
    "test_decode_reads_lengths_on_the_device", "test_mixed_steps_read_rows_on_the_device",
)  # fmt: skip
REFUSALS, UNKNOWN = "test_refusals_are_stated", "test_what_it_does_not_know_of_is_refused"
CHOSEN = "test_chosen_tokens_alone_are_read"
LEVELS = "test_tokens_in_levels"
WRONG = (EXPANDED, SHAPES, LONG, LARGE, MANY, BOUNDED, GRAPH, MIXED, LEVELS)
MUTANTS: dict[str, Mutant] = {
    "another scale": Mutant(with_arguments(another_scale), (*WRONG, CHOSEN)),
    "the shared part of keys is left out": Mutant(with_arguments(no_shared_key), (*WRONG, CHOSEN)),
    "values before keys": Mutant(with_arguments(values_first), (*WRONG, CHOSEN)),
    "keys and values of one head": Mutant(with_arguments(one_head), (*WRONG, CHOSEN)),
    "queries are rounded": Mutant(with_arguments(narrow), (*WRONG, CHOSEN)),
    "a token less": Mutant(planted(build_metadata=one_token_less), WRONG),
    "levels are tokens as computed": Mutant(planted(build_metadata=without_levels), (LEVELS,)),
    "believes the host's lengths": Mutant(planted(build_metadata=host_bounds), (BOUNDED, MIXED)),
    "believes the host's rows": Mutant(planted(build_metadata=host_starts), (MIXED,)),
    "the first step's metadata": Mutant(
        planted(build_metadata=keeps_the_first_metadata), (MANY, WARM, GRAPH)
    ),
    "float32 for bfloat16": Mutant(planted(forward=wide), (EXPANDED, LONG, MIXED, CHOSEN, LEVELS)),
    "all tokens are read": Mutant(planted(forward=reads_all), (CHOSEN,)),
    "a chosen token less": Mutant(planted(forward=reads_too_few), (CHOSEN,)),
    "another block is written": Mutant(
        planted(forward=writes_its_neighbour),
        (EXPANDED, SHAPES, LONG, MANY, BOUNDED, GRAPH, MIXED, LEVELS),
    ),
    "dtypes that are no floats": Mutant(
        planted(supports=classmethod(serves_anything)), (REFUSALS,)
    ),
    "what it does not know": Mutant(planted(features=frozenset({"invented_later"})), (UNKNOWN,)),
}


TestMutants = mutant_tests(Kit, MUTANTS, cheap=True)
