"""The kit of attention backends notices planted bugs."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec
import numpy as np
import torch
from mutants import Mutant, mutant_tests, plugin_of, subclass

from jackfield.core.cache.formats import QUANTIZED_FORMATS
from jackfield.core.nn.kv_cache.quantized_cache import QuantizedCache
from jackfield.core.protocols.attention import AttentionSpec
from jackfield.plugins.attention.torch import TorchAttention
from jackfield.plugins.conformance.attention import AttentionBackendKit


class Sound(TorchAttention):
    name = "subject"
    cache_formats = frozenset()
    leveled_cache = False


class Kit(AttentionBackendKit):
    name = "subject"
    plugin = plugin_of("attention_backend", "subject", Sound)
    promised = frozenset(
        {
            "sliding_window", "attention_chunk_size", "chunk_lookback", "soft_cap", "alibi_slopes",
            "sinks", "float32", "bfloat16",
        }
    )  # fmt: skip


def planted(**changes: Any) -> type:
    return subclass(Sound, **changes)


def with_spec(**changes: Any) -> type:
    """It serves a layer as if some fields were others."""

    def forward(self: Any, spec: AttentionSpec, *args: Any, **more: Any) -> torch.Tensor:
        new_fields = {
            name: change(getattr(spec, name)) if callable(change) else change
            for name, change in changes.items()
            if getattr(spec, name) is not None
        }
        return TorchAttention.forward(
            self, msgspec.structs.replace(spec, **new_fields), *args, **more
        )

    return planted(forward=forward)


def no_sinks(self: Any, *args: Any, sinks: Any = None, **more: Any) -> torch.Tensor:
    return TorchAttention.forward(self, *args, **more)


def no_lookback(self: Any, spec: AttentionSpec, *args: Any, **more: Any) -> torch.Tensor:
    spec = msgspec.structs.replace(spec, chunk_lookback=0)
    return TorchAttention.forward(self, spec, *args, **more)


def no_bias(self: Any, *args: Any, distance_bias: Any = None, **more: Any) -> torch.Tensor:
    return TorchAttention.forward(self, *args, **more)


def host_lengths(self: Any, layout: Any) -> Any:
    return TorchAttention.build_metadata(self, replace(layout, bounded=False))


def wide(self: Any, *args: Any, **more: Any) -> torch.Tensor:
    return TorchAttention.forward(self, *args, **more).float()


def writes_its_neighbour(self: Any, spec: Any, query: Any, key: Any, value: Any, cache: Any,
                         metadata: Any, **more: Any) -> torch.Tensor:  # fmt: skip
    out = TorchAttention.forward(self, spec, query, key, value, cache, metadata, **more)
    cache[:, -1, 0] = 0.0
    return out


def keeps_the_first_metadata(self: Any, layout: Any) -> Any:
    if not hasattr(self, "kept"):
        self.kept = TorchAttention.build_metadata(self, layout)
    return self.kept


def narrow(self: Any, spec: Any, query: Any, key: Any, value: Any, cache: Any, *args: Any,
           **more: Any) -> torch.Tensor:  # fmt: skip
    rounded = query.to(torch.bfloat16).to(query.dtype)
    return TorchAttention.forward(self, spec, rounded, key, value, cache, *args, **more)


def serves_anything(cls: Any, spec: Any, device: Any, dtype: Any) -> str | None:
    return "no values" if device.type == "meta" else None


def integers_too(cls: Any, spec: Any, device: Any, dtype: Any) -> str | None:
    computed_dtype = torch.float32 if dtype == torch.int8 else dtype
    return TorchAttention.supports.__func__(cls, spec, device, computed_dtype)


def refuses_caps(cls: Any, spec: Any, device: Any, dtype: Any) -> str | None:
    if spec.soft_cap is not None:
        return "no soft caps"
    return TorchAttention.supports.__func__(cls, spec, device, dtype)


def without_words(cls: Any, spec: Any, device: Any, dtype: Any) -> str | None:
    reason = TorchAttention.supports.__func__(cls, spec, device, dtype)
    return None if reason is None else ""


def one_value_head(self: Any, spec: Any, query: Any, key: Any, value: Any, cache: Any, *args: Any,
                   **more: Any) -> torch.Tensor:  # fmt: skip
    shared = cache.clone()
    shared[1] = cache[1][:, :, :1]
    return TorchAttention.forward(self, spec, query, key, value, shared, *args, **more)


def sees_ahead(self: Any, layout: Any) -> Any:
    import dataclasses

    if layout.max_query_len > 1:
        lengths = layout.seq_lens_cpu + np.int32(0)
        layout = dataclasses.replace(layout, seq_lens_cpu=np.maximum(lengths - 1, 1),
                                     seq_lens=(layout.seq_lens - 1).clamp(min=1))  # fmt: skip
    return TorchAttention.build_metadata(self, layout)


def reads_all_blocks(self: Any, spec: Any, query: Any, key: Any, value: Any, cache: Any,
                     metadata: Any, **more: Any) -> torch.Tensor:  # fmt: skip
    out = TorchAttention.forward(self, spec, query, key, value, cache, metadata, **more)
    longest = int(metadata.layout.seq_lens.argmax())
    if spec.sliding_window is not None:
        out = out + 0 * cache[:, metadata.layout.block_table[longest, 0].long(), 0, 0, 0].sum()
    return out


def keeps_the_last_metadata(self: Any, layout: Any) -> Any:
    self.kept = TorchAttention.build_metadata(self, layout)
    return self.kept


def reads_the_last_metadata(self: Any, spec: Any, query: Any, key: Any, value: Any, cache: Any,
                            metadata: Any, **more: Any) -> torch.Tensor:  # fmt: skip
    return TorchAttention.forward(self, spec, query, key, value, cache, self.kept, **more)


def words_of_keys_alone(self: Any, spec: Any, query: Any, key: Any, value: Any, cache: Any,
                        *args: Any, **more: Any) -> torch.Tensor:  # fmt: skip
    if isinstance(cache, QuantizedCache):
        cache = cache._replace(scales=cache.scales[[0, 0]])
    return TorchAttention.forward(self, spec, query, key, value, cache, *args, **more)


def no_zeros(self: Any, spec: Any, query: Any, key: Any, value: Any, cache: Any, *args: Any,
             **more: Any) -> torch.Tensor:  # fmt: skip
    if isinstance(cache, QuantizedCache):
        cache = cache._replace(scales=cache.scales & 0xFFFF)
    return TorchAttention.forward(self, spec, query, key, value, cache, *args, **more)


def writes_weights(self: Any, layer: Any) -> None:
    for weight in layer.next_weights:
        weight.fill_(1.0)


def no_levels(self: Any, layout: Any) -> Any:
    return TorchAttention.build_metadata(self, replace(layout, levels=None))


def levels_of_the_first_slot(self: Any, layout: Any) -> Any:
    if layout.slots is not None:
        layout = replace(layout, slots=torch.zeros_like(layout.slots))
    return TorchAttention.build_metadata(self, layout)


def levels_in_windows(self: Any, spec: Any, *args: Any, **more: Any) -> torch.Tensor:
    if args[4].layout.levels is not None:
        spec = msgspec.structs.replace(spec, sliding_window=None)
    return TorchAttention.forward(self, spec, *args, **more)


def takes_steps(self: Any, layer: Any) -> Any:
    """Computes no step, and says that it did."""
    return lambda layer, qkv, *arguments: torch.zeros(len(qkv), 4, 64, dtype=qkv.dtype)


DENSE, RANDOM = "test_equals_dense_attention", "test_equals_dense_attention_on_random_layouts"
LONG, LARGE = "test_long_and_short_rows_together", "test_large_logits_do_not_overflow"
FEATURES, FRESH = "test_features", "test_fresh_prompts_with_features"
FP8, LAYER = "test_fp8_cache", "test_through_a_layer"
QUANTIZED, FORMATS = "test_quantized_cache", frozenset(QUANTIZED_FORMATS)
LAYER_FEATURES = "test_features_through_a_layer"
MANY = "test_one_instance_serves_many_steps_and_layers"
BEHIND, GROUPS = "test_nothing_is_read_out_of_reach", "test_groups_of_a_step_are_kept_apart"
BOUNDED = "test_lengths_that_only_the_device_knows"
LEVELS, LEVELS_IN_WINDOWS = "test_tokens_in_levels", "test_a_window_has_no_levels"
PADDING, WARM = (
    "test_padding_rows_touch_the_null_block_alone", "test_warm_up_on_the_null_block",
)  # fmt: skip
REACH = "test_prompts_about_as_long_as_the_reach"
REFUSALS, UNKNOWN = "test_refusals_are_stated", "test_what_it_does_not_know_of_is_refused"

DOWN_THE_LINE = (
    DENSE, RANDOM, FEATURES, LAYER_FEATURES, FP8, FRESH, LARGE, LONG, MANY, LAYER, BEHIND, GROUPS,
    BOUNDED, REACH,
)  # fmt: skip
WRONG = (*DOWN_THE_LINE, PADDING)
MUTANTS: dict[str, Mutant] = {
    "claims fixed orders of sums": Mutant(
        planted(batch_invariant=True), ("test_a_query_has_the_same_bits_in_any_step",)
    ),
    "another scale": Mutant(with_spec(scale=lambda scale: scale * 1.1), WRONG),
    "believes the host's bounds": Mutant(planted(build_metadata=host_lengths), (BOUNDED,)),
    "the cap is left out": Mutant(with_spec(soft_cap=None), (FEATURES, FRESH)),
    "a window one too wide": Mutant(
        with_spec(sliding_window=lambda window: window + 1),
        (FEATURES, FRESH, MANY, BEHIND, GROUPS, BOUNDED, REACH),
    ),
    "a chunk one too long": Mutant(
        with_spec(attention_chunk_size=lambda size: size + 1),
        (FEATURES, FRESH, MANY, BEHIND, BOUNDED, REACH),
    ),
    "chunks before are left out": Mutant(planted(forward=no_lookback), (FEATURES, BEHIND, BOUNDED)),
    "slopes are left out": Mutant(with_spec(alibi_slopes=None), (FEATURES, LAYER_FEATURES, FRESH)),
    "sinks are left out": Mutant(planted(forward=no_sinks), (FEATURES, LAYER_FEATURES, FRESH)),
    "biases by distance are left out": Mutant(planted(forward=no_bias), (FEATURES,)),
    "values of the first head alone": Mutant(
        planted(forward=one_value_head),
        (
            DENSE,
            RANDOM,
            FEATURES,
            LAYER_FEATURES,
            FP8,
            FRESH,
            MANY,
            PADDING,
            LAYER,
            BEHIND,
            GROUPS,
            BOUNDED,
            REACH,
        ),
    ),
    "float32 for bfloat16": Mutant(planted(forward=wide), (DENSE, FEATURES, LONG, BEHIND, REACH)),
    "queries are rounded": Mutant(planted(forward=narrow), WRONG),
    "another block is written": Mutant(
        planted(forward=writes_its_neighbour),
        (DENSE, RANDOM, FEATURES, FP8, FRESH, LONG, PADDING, LAYER, WARM, BEHIND, GROUPS, REACH),
    ),
    "the first step's metadata": Mutant(
        planted(build_metadata=keeps_the_first_metadata), (MANY, WARM, GROUPS)
    ),
    "scales of keys for values": Mutant(
        planted(forward=words_of_keys_alone, cache_formats=FORMATS), (QUANTIZED,)
    ),
    "zeros are left out": Mutant(planted(forward=no_zeros, cache_formats=FORMATS), (QUANTIZED,)),
    "levels are left out": Mutant(planted(build_metadata=no_levels, leveled_cache=True), (LEVELS,)),
    "levels of another row": Mutant(
        planted(build_metadata=levels_of_the_first_slot, leveled_cache=True), (LEVELS,)
    ),
    "levels in a window": Mutant(
        planted(forward=levels_in_windows, leveled_cache=True), (LEVELS_IN_WINDOWS,)
    ),
    "a block behind the window": Mutant(
        planted(forward=reads_all_blocks), (BEHIND, FEATURES, BOUNDED)
    ),
    "one group's metadata for all": Mutant(
        planted(build_metadata=keeps_the_last_metadata, forward=reads_the_last_metadata), (GROUPS,)
    ),
    "a chunk one token short": Mutant(planted(build_metadata=sees_ahead), DOWN_THE_LINE),
    "projects to zeros": Mutant(planted(plan_projection=takes_steps), (LAYER, LAYER_FEATURES, FP8)),
    "writes to weights": Mutant(
        planted(plan_projection=writes_weights), (LAYER, LAYER_FEATURES, FP8)
    ),
    "serves 3 heads over 2": Mutant(planted(supports=classmethod(serves_anything)), (REFUSALS,)),
    "serves int8 queries": Mutant(planted(supports=classmethod(integers_too)), (REFUSALS,)),
    "refuses what is promised": Mutant(planted(supports=classmethod(refuses_caps)), (FEATURES,)),
    "refuses without words": Mutant(planted(supports=classmethod(without_words)), (REFUSALS,)),
    "lists what no layer has": Mutant(
        planted(features=TorchAttention.features | {"invented_later"}), (UNKNOWN,)
    ),
}

TestMutants = mutant_tests(Kit, MUTANTS)
