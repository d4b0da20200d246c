"""The kit of operations: those in the box pass it, and planted bugs do not."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from mutants import Mutant, mutant_tests, plugin_of, subclass
from one_order import OneOrder

from jackfield.core.nn.kv_cache.quantized_cache import QuantizedCache
from jackfield.core.nn.operations import CenteredNorm, Norm, Operations
from jackfield.core.nn.routing import Routing
from jackfield.plugins.conformance.invariance import InvariantOperations
from jackfield.plugins.conformance.operations import OperationsKit

CUDA = torch.cuda.is_available()


class TestTorch(OperationsKit):
    name = "torch"
    dtypes = ("float32", "bfloat16")
    promised = frozenset(dtypes)


INTEGERS = "test_cached_heads_in_integers"
NARROW_STATES = "test_states_of_16_bits_continue"
CUT_OFF = "test_an_fp8_cache_is_cut_off_at_its_largest"


class TestTriton(OperationsKit):
    """Without a GPU in Triton's interpreter, whose products of bfloat16 are wrong, which does not
    cut numbers off that are beyond fp8's largest, and where the kit's products take minutes;
    `tests/kernels` has smaller ones."""

    name = "triton"
    dtypes = ("float32", "float16", "bfloat16") if CUDA else ("float16",)
    promised = frozenset(dtypes)
    test_quantized_linear = OperationsKit.test_quantized_linear if CUDA else None
    test_experts = OperationsKit.test_experts if CUDA else None
    test_an_fp8_cache_is_cut_off_at_its_largest = getattr(OperationsKit, CUT_OFF) if CUDA else None


@pytest.mark.slow
class TestTritonWholly(TestTriton):
    test_quantized_linear = OperationsKit.test_quantized_linear
    test_experts = OperationsKit.test_experts


@pytest.mark.slow
@pytest.mark.skipif(CUDA, reason="it is for the CPU")
class TestTorchInvariantWholly(OperationsKit):
    name = "torch_invariant"
    dtypes = ("float32", "bfloat16")


@pytest.mark.skipif(CUDA, reason="it is for the CPU")
class TestTorchInvariant(OperationsKit):
    """What it has of its own: rows in any batch, and products."""

    name = "torch_invariant"
    dtypes = TestTorchInvariantWholly.dtypes


class TestTritonInvariant(OneOrder, OperationsKit):
    """As above."""

    name = "triton_invariant"
    dtypes = TestTriton.dtypes
    promised = TestTriton.promised


OWN = {name for name in dir(InvariantOperations) if name.startswith("test_")}
for test in set(dir(OperationsKit)) - OWN - {"test_linear", "test_gated_linear", "test_route"}:
    if test.startswith("test_"):
        setattr(TestTorchInvariant, test, None)
        setattr(TestTritonInvariant, test, None)


@pytest.mark.slow
class TestTritonInvariantWholly(OneOrder, TestTritonWholly):
    name = "triton_invariant"


class Sound(Operations):
    """The reference under a name of its own."""

    name = "subject"


class Kit(OperationsKit):
    name = "subject"
    plugin = plugin_of("operations", "subject", Sound)
    dtypes = ("float32",)


def planted(**changes: Any) -> type:
    return subclass(Sound, **changes)


def small_eps(self: Any, x: Any, norm: Norm) -> Any:
    return Operations.rms_norm(self, x, norm._replace(eps=1e-6))


def narrow_squares(self: Any, x: Any, norm: Norm) -> Any:
    mean = x.half().square().mean(-1, keepdim=True)
    return (norm.weight * (x * torch.rsqrt(mean + norm.eps))).to(x.dtype)


def no_bias(self: Any, x: Any, weight: Any, bias: Any = None, **more: Any) -> Any:
    return Operations.linear(self, x, weight, None, **more)


def no_bias_for_one_token(self: Any, x: Any, weight: Any, bias: Any = None, **more: Any) -> Any:
    return Operations.linear(self, x, weight, bias if len(x) > 1 else None, **more)


def accepts_after_a_rejection(self: Any, chosen: Any, drafts: Any, starts: Any, slots: Any,
                              tables: Any, most: int) -> Any:  # fmt: skip
    others = torch.where(chosen < 0, drafts, chosen)
    return Operations.verify_drafts(self, others, drafts, starts, slots, tables, most)


def any_token(self: Any, token_ids: Any, counts: Any, slots: Any, tables: Any, vocab: int) -> Any:
    return Operations.keep_drafts(self, token_ids, counts, slots, tables, vocab + 1)


def up_first(self: Any, x: Any) -> Any:
    up, gate = x.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def in_place(self: Any, x: Any) -> Any:
    return Operations.silu_mul(self, x.mul_(1.0).clamp_(-2.0, 2.0))


def exact_gelu(self: Any, x: Any) -> Any:
    gate, up = x.chunk(2, dim=-1)
    return torch.nn.functional.gelu(gate) * up


def last_of_equal(self: Any, logits: Any, rule: Any) -> Routing:
    made = Operations.route(self, logits.flip(1), rule)
    return Routing(made.weights, logits.shape[1] - 1 - made.experts)


def rounded_codes(self: Any, key: Any, value: Any, cache: Any, slots: Any, *more: Any) -> None:
    """The lowest bit of keys of 8 bits is lost."""
    Operations.write_cache(self, key, value, cache, slots, *more)
    if isinstance(cache, QuantizedCache) and cache.keys.dtype == torch.int8:
        cache.keys.flatten(0, 1)[slots] &= -2


def unscaled(self: Any, *args: Any) -> Any:
    return Operations.cached_heads(self, *args[:8])


def ignores_order(self: Any, x: Any, weight: Any, *args: Any, **more: Any) -> Any:
    return Operations.quantized_linear(self, x, weight._replace(order=None), *args, **more)


def scales_positions(self: Any, token_ids: Any, weight: Any, **more: Any) -> Any:
    factor = more.pop("factor", 1.0)
    return Operations.embed(self, token_ids, weight, **more) * factor


def norm_over_the_batch(self: Any, x: Any, weight: Any, bias: Any = None, **more: Any) -> Any:
    out = Operations.linear(self, x, weight, bias, **more)
    return out + 0 * out.sum()


def sees_later_rows(self: Any, query: Any, key: Any, value: Any, rows: Any, scale: float) -> Any:
    parts = (part.transpose(0, 1)[None] for part in (query, key, value))
    out = torch.nn.functional.scaled_dot_product_attention(*parts, scale=scale)
    return out[0].transpose(0, 1)


def interleaved(self: Any, qkv: Any, layout: Any, positions: Any, cos_sin: Any, *norms: Any) -> Any:
    if cos_sin is not None:
        cos_sin = torch.cat(cos_sin.chunk(2, dim=-1)[::-1], dim=-1)
    return Operations.heads(self, qkv, layout, positions, cos_sin, *norms)


def first_rows_masked(self: Any, logits: Any, bits: Any, rows: Any) -> None:
    Operations.mask_tokens(self, logits[: len(bits)], bits, None)


def writes_one_place(self: Any, chosen: Any, runs: Any, ring: Any, last: int) -> None:
    runs.fill_(0 if int(runs) == last else int(runs) + 1)
    ring[0, : 1 + len(chosen)] = torch.cat([runs, chosen])


def no_new_blocks(
    self: Any, packed: Any, lengths: Any, history: Any, table: Any, *args: Any
) -> Any:
    return Operations.decode_inputs(self, packed, lengths, history, table.clone(), *args)


def forgets_rows(
    self: Any, packed: Any, lengths: Any, history: Any, table: Any, rows: Any, size: int
) -> Any:
    made = Operations.decode_inputs(self, packed, lengths, history, table, rows.clone(), size)
    return made._replace(block_table=rows)


def stays(self: Any, packed: Any, lengths: Any, *args: Any) -> Any:
    return Operations.decode_inputs(self, packed, lengths.clone(), *args)


def counts_padding(self: Any, lengths: Any, slots: Any, query_start: Any) -> None:
    lengths.index_add_(0, slots, query_start.diff())


def first_table_alone(self: Any, table: Any, columns: int, *args: Any) -> Any:
    tables = table.view(len(table), -1, columns)
    return Operations.slot_mappings(self, tables[:, :1].expand_as(tables).reshape_as(table),
                                    columns, *args)  # fmt: skip


def greedy(self: Any, logits: Any, slots: Any, lengths: Any, tables: Any, out: Any,
           **more: Any) -> None:  # fmt: skip
    out.chosen[: len(slots)] = logits.nan_to_num(-1e9).argmax(1).int()
    tables.history[slots, lengths] = out.chosen[: len(slots)]


def rows_of_one_token(self: Any, query_start: Any, slots: Any, *args: Any) -> Any:
    made = Operations.step_inputs(self, query_start, slots, *args)
    return made._replace(positions=made.positions * 0)


def writes_all(self: Any, storage: Any, writes: Any, count: Any) -> None:
    storage[writes[:, 0].long()] = writes[:, 1]


def float64(self: Any, x: Any, weight: Any, bias: Any, eps: float) -> Any:
    return Operations.layer_norm(self, x, weight, bias, eps).double()


def sums_without_offsets(
    self: Any, x: Any, weight: Any, bias: Any = None, *, norm: Any = None, **more: Any
) -> Any:
    """A LayerNorm after the product, as sums of its parameters allow, but for the offsets."""
    if isinstance(norm, CenteredNorm) and norm.sums is not None:
        norm = norm._replace(bias=None)
    return Operations.linear(self, x, weight, bias, norm=norm, **more)


def adds_bias_of_sums(
    self: Any, x: Any, weight: Any, bias: Any = None, *, norm: Any = None, **more: Any
) -> Any:
    """What a LayerNorm's sums contain is added to them."""
    out = Operations.linear(self, x, weight, bias, norm=norm, **more)
    known = isinstance(norm, CenteredNorm) and norm.sums is not None
    return out + bias if known and bias is not None else out


def forgets_residual(self: Any, x: Any, routing: Any, gate_up: Any, down: Any, **more: Any) -> Any:
    return Operations.experts(self, x, routing, gate_up, down, **more) - more["residual"]


def begins_from_leftovers(self: Any, *args: Any) -> Any:
    rows = args[-1]
    continued = dataclasses.replace(rows, seq_lens=rows.seq_lens + 1)
    return Operations.ssd_scan(self, *args[:-1], continued)


def forgets_state(self: Any, *args: Any) -> Any:
    *inputs, state, rows = args
    return Operations.delta_rule(self, *inputs, state.clone(), rows)


def decays_heads(self: Any, *args: Any) -> Any:
    *inputs, weights, state, rows = args
    alike = weights._replace(dt_bias=weights.dt_bias[:, :1].expand_as(weights.dt_bias))
    return Operations.channel_delta_rule(self, *inputs, alike, state, rows)


def gates_by_silu(self: Any, *args: Any, sigmoid: bool = False, **more: Any) -> Any:
    return Operations.gated_rms_norm(self, *args, **more)


def acts_at_once(
    self: Any, slots: Any, starts: Any, positions: Any, tables: Any, *more: Any
) -> Any:
    tables = tables._replace(slot_starts=torch.zeros_like(tables.slot_starts))
    return Operations.adapter_chunks(self, slots, starts, positions, tables, *more)


def padding_is_of_the_last_row(self: Any, slots: Any, starts: Any, *more: Any) -> Any:
    starts = starts.clone()
    starts[-1] += 9
    return Operations.adapter_chunks(self, slots, starts, *more)


def first_chunk_alone(self: Any, *args: Any) -> Any:
    made = Operations.adapter_chunks(self, *args)
    again = (made.places[1:] == made.places[:-1]).nonzero() + 1
    made.places[again] = -1
    return made


def unscaled_adapters(self: Any, out: Any, x: Any, chunks: Any, site: Any, **more: Any) -> None:
    site = site._replace(scales=torch.ones_like(site.scales))
    Operations.add_adapters(self, out, x, chunks, site, **more)


def ranks_of_the_first_part(
    self: Any, out: Any, x: Any, chunks: Any, site: Any, **more: Any
) -> None:
    site = site._replace(ranks=site.ranks[:, :1].expand_as(site.ranks))
    Operations.add_adapters(self, out, x, chunks, site, **more)


def adapters_by_masks(self: Any, out: Any, x: Any, chunks: Any, site: Any, **more: Any) -> None:
    tokens = torch.arange(len(x), dtype=torch.int32, device=x.device)[None]
    for place in range(len(site.ranks)):
        added, one = torch.zeros_like(out), chunks.places.new_tensor([place])
        Operations.add_adapters(
            self, added, x, chunks._replace(places=one, tokens=tokens), site, **more
        )
        mine = torch.isin(tokens[0], chunks.tokens[chunks.places == place])
        out += added * mine[:, None]


def rounds_every_row(self: Any, out: Any, x: Any, chunks: Any, site: Any, **more: Any) -> None:
    Operations.add_adapters(self, out, x, chunks, site, **more)
    out.copy_(out.bfloat16())


def adapters_before_the_norm(self: Any, *args: Any, norm: Any = None) -> None:
    Operations.add_adapters(self, *args)


NORMS = ("test_rms_norm", "test_rms_norm_of_part_of_a_tensor")
NORMED = ("test_add_rms_norm", "test_linear", "test_activated_linear", "test_gated_linear",
          "test_quantized_linear", "test_normed_linear", "test_heads",
          "test_cached_heads")  # fmt: skip
BIASED = ("test_linear", "test_activated_linear", "test_gated_linear", "test_quantized_linear",
          "test_normed_linear", "test_experts", "test_products_of_experts")  # fmt: skip
GATED = ("test_gated_activations", "test_gated_linear", "test_quantized_linear", "test_experts")
MUTANTS = {
    "claims fixed orders of sums": Mutant(
        planted(batch_invariant=True), ("test_a_row_has_the_same_bits_in_any_batch",)
    ),
    "an eps of its own": Mutant(planted(rms_norm=small_eps), (*NORMS, *NORMED, INTEGERS)),
    "squares in float16": Mutant(
        planted(rms_norm=narrow_squares),
        ("test_large_numbers_before_a_norm_stay_finite", *NORMS, *NORMED[:-1]),
        # Near the tolerance: it fails on a CPU, and not on a GPU, which adds in another order.
        perhaps=NORMED[-1:],
    ),
    "the residual is left out": Mutant(
        planted(add_rms_norm=lambda self, x, norm, residual: self.rms_norm(x, norm)),
        ("test_add_rms_norm",),
    ),
    "bias dropped": Mutant(planted(linear=no_bias), BIASED),
    "bias dropped for one token": Mutant(planted(linear=no_bias_for_one_token), BIASED),
    "a row poisons the others": Mutant(
        planted(linear=norm_over_the_batch), ("test_rows_do_not_depend_on_those_beside_them",)
    ),
    "up before gate": Mutant(planted(silu_mul=up_first), GATED),
    "positions are scaled, too": Mutant(planted(embed=scales_positions), ("test_embed",)),
    "the argument is overwritten": Mutant(planted(silu_mul=in_place), GATED),
    "another gelu": Mutant(
        planted(gelu_mul=exact_gelu), ("test_gated_activations", "test_experts")
    ),
    "the last of equal experts": Mutant(planted(route=last_of_equal), ("test_route",)),
    "the cache's scales are left out": Mutant(
        planted(cached_heads=unscaled), ("test_cached_heads_in_fp8", CUT_OFF)
    ),
    "columns in another order": Mutant(
        planted(quantized_linear=ignores_order), ("test_quantized_linear",)
    ),
    "rows of a step see each other": Mutant(
        planted(bidirectional_attention=sees_later_rows), ("test_bidirectional_attention",)
    ),
    "codes lose a bit": Mutant(
        planted(write_cache=rounded_codes, features=Operations.features), (INTEGERS,)
    ),
    "sines before cosines": Mutant(
        planted(heads=interleaved), ("test_heads", "test_cached_heads", INTEGERS)
    ),
    "the first rows are masked": Mutant(
        planted(mask_tokens=first_rows_masked), ("test_mask_tokens",)
    ),
    "new blocks are forgotten": Mutant(
        planted(decode_inputs=no_new_blocks), ("test_decode_inputs",)
    ),
    "decode rows stay where they are": Mutant(
        planted(decode_inputs=stays), ("test_decode_inputs",)
    ),
    "rows keep the tables of others": Mutant(
        planted(decode_inputs=forgets_rows), ("test_decode_inputs",)
    ),
    "padding is counted": Mutant(planted(advance=counts_padding), ("test_advance",)),
    "a ring of which one place is used": Mutant(
        planted(writes_tokens=True, write_tokens=writes_one_place), ("test_write_tokens",)
    ),
    "greedy whatever was asked": Mutant(planted(samples=True, sample=greedy), ("test_sampling",)),
    "all tables are the first": Mutant(
        planted(slot_mappings=first_table_alone), ("test_slot_mappings",)
    ),
    "rows of one token": Mutant(planted(step_inputs=rows_of_one_token), ("test_step_inputs",)),
    "drafts after a rejected one": Mutant(
        planted(verify_drafts=accepts_after_a_rejection), ("test_verify_drafts",)
    ),
    "drafts outside the vocabulary": Mutant(planted(keep_drafts=any_token), ("test_keep_drafts",)),
    "all writes, however many count": Mutant(planted(scatter=writes_all), ("test_scatter",)),
    "another type comes out": Mutant(
        planted(layer_norm=float64),
        ("test_layer_norm", "test_linear", "test_activated_linear", "test_gated_linear"),
    ),
    "sums of a norm without its offsets": Mutant(
        planted(linear=sums_without_offsets, features=Operations.features | {"linear.norm_sums"}),
        ("test_linear", "test_activated_linear", "test_gated_linear"),
    ),
    "a bias besides the sums that have it": Mutant(
        planted(linear=adds_bias_of_sums, features=Operations.features | {"linear.norm_sums"}),
        ("test_linear", "test_activated_linear", "test_gated_linear"),
    ),
    "experts without the residual": Mutant(planted(experts=forgets_residual), ("test_experts",)),
    "a sequence begins from what is left": Mutant(
        planted(ssd_scan=begins_from_leftovers),
        ("test_ssd_scans_continue_states", "test_layers_of_mamba_2_continue_states", NARROW_STATES),
    ),
    "states are forgotten": Mutant(
        planted(delta_rule=forgets_state),
        (
            "test_delta_rules_continue_states",
            "test_gated_delta_nets_continue_states",
            NARROW_STATES,
        ),
    ),
    "channels of a head decay alike": Mutant(
        planted(channel_delta_rule=decays_heads), ("test_channel_delta_rules_continue_states",)
    ),
    "one gate for another": Mutant(
        planted(gated_rms_norm=gates_by_silu, features=Operations.features),
        ("test_norms_gated_by_sigmoids",),
    ),
    "an adapter acts before its start": Mutant(
        planted(adapter_chunks=acts_at_once), ("test_adapter_chunks",)
    ),
    "padding has an adapter": Mutant(
        planted(adapter_chunks=padding_is_of_the_last_row), ("test_adapter_chunks",)
    ),
    "one chunk of each adapter": Mutant(
        planted(adapter_chunks=first_chunk_alone), ("test_adapter_chunks",)
    ),
    "adapters without their scales": Mutant(
        planted(add_adapters=unscaled_adapters), ("test_add_adapters",)
    ),
    "all parts have the first one's ranks": Mutant(
        planted(add_adapters=ranks_of_the_first_part), ("test_add_adapters",)
    ),
    "adapters of others, times zero": Mutant(
        planted(add_adapters=adapters_by_masks), ("test_add_adapters",)
    ),
    "adapters of what is not normed": Mutant(
        planted(add_adapters=adapters_before_the_norm), ("test_add_adapters",)
    ),
    "rows without an adapter are rounded": Mutant(
        planted(add_adapters=rounds_every_row), ("test_add_adapters",)
    ),
    "a refusal without words": Mutant(
        planted(
            supports=classmethod(lambda cls, device, dtype: "" if device.type == "meta" else None)
        ),
        ("test_refusals_are_stated",),
    ),
}

TestMutants = mutant_tests(Kit, MUTANTS)


def test_a_refused_dtype_is_a_failure_where_it_is_promised() -> None:
    class Refuses(Sound):
        @classmethod
        def supports(cls, device: torch.device, dtype: torch.dtype) -> str | None:
            return "no floats here"

    class Promises(Kit):
        plugin = plugin_of("operations", "subject", Refuses)
        promised = frozenset({"float32"})

    with pytest.raises(AssertionError, match="promises float32, and says: no floats here"):
        Promises().make(torch.float32)
    with pytest.raises(pytest.skip.Exception, match="no floats here"):
        Promises().make(torch.float16)
