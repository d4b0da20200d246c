"""Conformance of logits processors: tests of the contract of `protocols.LogitsProcessor`.

    class TestMine(LogitsProcessorKit):
        processor_class = MyProcessor

or `pytest --pyargs jackfield.plugins.conformance --logits-processor my_processor`. The processor
gets slots, tokens and random logits as from the engine; the effect of its `examples` may depend
only on the request, its tokens and its logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from ...core.errors import InvalidRequest
from ...core.protocols.logits_processors import LogitsProcessor, LogitsProcessorSetup, ProcessedRows
from ...core.sampling_params import SamplingParams
from ...core.step import SlotStart
from .kit import Kit

SLOTS = 70
POSITIONS = 48


class Bench:
    """A processor, and its slots."""

    def __init__(self, processor_class: type[LogitsProcessor], vocab_size: int) -> None:
        self.vocab_size = vocab_size
        # Numbers after each sequence belong to no request.
        self.history = torch.full((SLOTS + 1, POSITIONS), vocab_size - 1, dtype=torch.int32)
        self.processor = processor_class(
            LogitsProcessorSetup(
                vocab_size=vocab_size,
                num_slots=SLOTS,
                max_model_len=POSITIONS,
                device=torch.device("cpu"),
                history=self.history,
            )
        )
        self.tokens: dict[int, list[int]] = {}
        self._rows: tuple[int, ...] = ()

    def start(self, slot: int, args: dict[str, Any] | None, tokens: Sequence[int]) -> bool:
        """Start a request; all tokens but the first three are output."""
        self.tokens[slot] = list(tokens)
        self.history[slot] = self.vocab_size - 1
        self.history[slot, : len(tokens)] = torch.tensor(tokens, dtype=torch.int32)
        return self.processor.start(
            slot,
            SlotStart(
                slot=slot,
                request_id=f"request-{slot}",
                token_ids=tuple(tokens),
                num_prompt_tokens=3,
                num_computed_tokens=0,
                params=SamplingParams(extra_args=args),
                seed=slot,
            ),
        )

    def append(self, slot: int, token: int) -> None:
        """Append a sampled token."""
        self.history[slot, len(self.tokens[slot])] = token
        self.tokens[slot].append(token)

    def end(self, slot: int) -> None:
        """End the slot's request; afterwards another request's tokens may be there."""
        self.processor.end(slot)
        del self.tokens[slot]
        self.history[slot] = 0

    def apply(self, slots: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
        """logits: [len(slots), vocab_size], left as they are"""
        if tuple(slots) != self._rows:
            self._rows = tuple(slots)
            self.processor.batch_changed(self._rows)
        index = torch.tensor(slots, dtype=torch.int64)
        lengths = torch.tensor([len(self.tokens[slot]) for slot in slots])
        result = self.processor.apply(logits.clone(), ProcessedRows(self._rows, index, lengths))
        assert isinstance(result, torch.Tensor), "apply must give a tensor"
        assert result.shape == logits.shape, f"apply gave {tuple(result.shape)}"
        assert result.dtype == torch.float32, f"apply gave {result.dtype}"
        return result.clone()


def same(actual: torch.Tensor, expected: torch.Tensor) -> bool:
    """Compare, except for rounding."""
    finite = expected.isfinite()
    if not torch.equal(actual.isfinite(), finite):
        return False
    return torch.allclose(actual[finite], expected[finite], rtol=1e-5, atol=1e-5)


class LogitsProcessorKit(Kit):
    """Subclass it in your tests, and set the class variables."""

    kind = "logits_processor"
    processor_class: ClassVar[type[LogitsProcessor] | None] = None
    """Class under test; None: the one registered under `name`."""
    refused: ClassVar[tuple[dict[str, Any], ...]] = ()
    """`extra_args` that `check` must refuse."""
    vocab_size: ClassVar[int] = 199

    @pytest.fixture
    def processor_type(self) -> type[LogitsProcessor]:
        """The class under test. Fails if it has no examples."""
        processor_type = self.processor_class or self.registered()
        if not processor_type.examples:
            pytest.fail(
                f"{processor_type.__name__}.examples is empty: which extra_args ask for it?"
            )
        return processor_type

    def bench(self, processor_type: type[LogitsProcessor]) -> Bench:
        """Return a new bench."""
        return Bench(processor_type, self.vocab_size)

    def logits(self, rows: int, seed: int = 0) -> torch.Tensor:
        """Return random logits, [rows, vocab_size] float32."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn((rows, self.vocab_size), generator=generator) * 4

    def crowd(
        self, bench: Bench, processor_type: type[LogitsProcessor], slots: Sequence[int]
    ) -> None:
        """Start a request in each slot, from all examples, with different tokens."""
        for place, slot in enumerate(slots):
            args = processor_type.examples[place % len(processor_type.examples)]
            tokens = [(7 * slot + 11 * at) % (self.vocab_size - 1) for at in range(4 + slot % 9)]
            assert bench.start(slot, args, tokens) is True, f"{args} must ask for it"

    # ------------------------------------------------------------ asking

    def test_examples_are_taken_and_name_parameters(
        self, processor_type: type[LogitsProcessor]
    ) -> None:
        """Every key is one of `parameters`, and `check` accepts the values."""
        for args in processor_type.examples:
            assert args, "an example asks for something"
            assert set(args) <= processor_type.parameters, (
                f"{args}: not all keys are in `parameters`"
            )
            processor_type.check(SamplingParams(extra_args=args))
        for args in self.refused:
            with pytest.raises(InvalidRequest):
                processor_type.check(SamplingParams(extra_args=args))

    def test_who_does_not_ask_is_not_served(self, processor_type: type[LogitsProcessor]) -> None:
        """`start` is False for requests without its parameters."""
        bench = self.bench(processor_type)
        assert bench.start(0, None, [1, 2, 3, 4]) is False
        assert bench.start(1, {}, [1, 2, 3, 4]) is False
        assert bench.start(2, {"of_another_processor": 1}, [1, 2, 3, 4]) is False

    # ------------------------------------------------------------ what comes out

    def test_logits_stay_numbers(self, processor_type: type[LogitsProcessor]) -> None:
        """Logits keep shape and dtype, none is NaN or +inf, at least one per row is finite; -inf in
        the input is allowed."""
        bench = self.bench(processor_type)
        slots = list(range(2 * len(processor_type.examples) + 1))
        self.crowd(bench, processor_type, slots)
        for seed in range(4):
            logits = self.logits(len(slots), seed)
            if seed % 2:
                logits[:, seed::3] = -torch.inf
            result = bench.apply(slots, logits)
            assert not result.isnan().any(), "NaN"
            assert not result.isposinf().any(), "+inf"
            if not seed % 2:
                assert result.isfinite().any(dim=1).all(), "a row has no token left"

    def test_it_does_something(self, processor_type: type[LogitsProcessor]) -> None:
        """Each example changes some logits at some step."""
        bench = self.bench(processor_type)
        slots = list(range(len(processor_type.examples)))
        self.crowd(bench, processor_type, slots)
        changed = torch.zeros(len(slots), dtype=torch.bool)
        for seed in range(8):
            logits = self.logits(len(slots), seed)
            changed |= (bench.apply(slots, logits) != logits).any(dim=1)
            for slot in slots:
                bench.append(slot, (seed * 31 + slot) % (self.vocab_size - 1))
        idle = [processor_type.examples[slot] for slot in slots if not changed[slot]]
        assert not idle, f"nothing changes with {idle}"

    def test_the_argmax_is_kept_where_it_says_so(
        self, processor_type: type[LogitsProcessor]
    ) -> None:
        """`argmax_invariant`: greedy requests get the same tokens without it."""
        if not processor_type.argmax_invariant:
            pytest.skip("it may change the argmax")
        bench = self.bench(processor_type)
        slots = list(range(2 * len(processor_type.examples)))
        self.crowd(bench, processor_type, slots)
        for seed in range(20):
            logits = self.logits(len(slots), seed)
            logits[:, seed] = logits.max(dim=1).values + 1e-3
            actual = bench.apply(slots, logits).argmax(dim=1)
            assert torch.equal(actual, logits.argmax(dim=1)), "the largest logit is another one"

    # ------------------------------------------------------------ what it may depend on

    def test_rows_do_not_know_of_each_other(self, processor_type: type[LogitsProcessor]) -> None:
        """A row gives the same result in any batch and order as alone."""
        bench = self.bench(processor_type)
        slots = [5, 0, 64, 31, 2, 17, 40][: max(3, len(processor_type.examples) + 2)]
        self.crowd(bench, processor_type, slots)
        logits = self.logits(len(slots))
        together = bench.apply(slots, logits)
        for row, slot in enumerate(slots):
            alone = bench.apply([slot], logits[row : row + 1])
            assert same(alone, together[row : row + 1]), "it depends on the other rows"
        order = list(reversed(range(len(slots))))
        turned = bench.apply([slots[row] for row in order], logits[order])
        assert same(turned, together[order]), "it depends on the order of rows"

    def test_the_same_again_is_the_same(self, processor_type: type[LogitsProcessor]) -> None:
        """A repeated step gives the same logits; the tokens of a slot define its state."""
        bench = self.bench(processor_type)
        slots = [3, 1]
        self.crowd(bench, processor_type, slots)
        logits = self.logits(2)
        first = bench.apply(slots, logits)
        for _ in range(3):
            assert same(bench.apply(slots, logits), first), "it counts how often it is called"

    def test_places_of_a_row_are_served_together_where_it_says_so(
        self, processor_type: type[LogitsProcessor]
    ) -> None:
        """`stateless`: several lengths of a sequence in one call, in any order, give what each does
        alone; tokens that were dropped since are forgotten."""
        if not processor_type.stateless:
            pytest.skip("it may count calls")
        bench = self.bench(processor_type)
        slots = [2, 0, 5][: max(2, len(processor_type.examples))]
        self.crowd(bench, processor_type, slots)
        lengths = {slot: len(bench.tokens[slot]) for slot in slots}
        places, alone = [], []
        logits = self.logits(4 * len(slots), 3)
        for draft in range(4):
            for row, slot in enumerate(slots):
                number = draft * len(slots) + row
                places.append((slot, len(bench.tokens[slot])))
                alone.append(bench.apply([slot], logits[number : number + 1]))
                bench.append(slot, (13 * draft + slot) % (self.vocab_size - 1))
        order = list(reversed(range(len(places))))
        rows = ProcessedRows(
            tuple(places[at][0] for at in order),
            torch.tensor([places[at][0] for at in order]),
            torch.tensor([places[at][1] for at in order]),
        )
        bench.processor.batch_changed(rows.slots)
        together = bench.processor.apply(logits[order].clone(), rows)
        assert same(together, torch.cat([alone[at] for at in order])), "places differ together"
        fresh = self.bench(processor_type)
        self.crowd(fresh, processor_type, slots)
        for slot in slots:  # All drafts are rejected, and another token comes.
            bench.tokens[slot] = bench.tokens[slot][: lengths[slot]]
            bench.append(slot, 1)
            fresh.append(slot, 1)
        logits = self.logits(len(slots), 4)
        assert same(bench.apply(slots, logits), fresh.apply(slots, logits)), "it keeps drafts"

    def test_a_slot_begins_anew(self, processor_type: type[LogitsProcessor]) -> None:
        """Parameters and tokens of the previous request are gone."""
        bench = self.bench(processor_type)
        tokens = [9, 8, 7, 6, 5]
        slots = [4, *range(5, 5 + len(processor_type.examples))]
        for place, args in enumerate(processor_type.examples):
            fresh = self.bench(processor_type)
            # Each example in the slot in turn, followed by a different one.
            self.crowd(bench, processor_type, slots[place:] + slots[:place])
            bench.apply(slots, self.logits(len(slots), 5))
            bench.end(4)
            assert bench.start(4, args, tokens)
            assert fresh.start(4, args, tokens)
            logits = self.logits(1, 6)
            assert same(bench.apply([4], logits), fresh.apply([4], logits)), args
            for used in (bench, fresh):
                for slot in list(used.tokens):
                    used.end(slot)
            assert bench.start(4, None, tokens) is False, "who does not ask is served"

    def test_a_preempted_request_goes_on(self, processor_type: type[LogitsProcessor]) -> None:
        """Started again in another slot with the tokens so far, it gives the same result."""
        for args in processor_type.examples:
            whole, torn = self.bench(processor_type), self.bench(processor_type)
            slot = 2
            for used in (whole, torn):
                assert used.start(2, args, [3, 1, 4])
            for step in range(7):
                if step in (2, 5):
                    tokens = torn.tokens[slot]
                    torn.end(slot)
                    slot = 10 + step
                    assert torn.start(slot, args, tokens)
                logits = self.logits(1, step)
                result = whole.apply([2], logits)
                assert same(torn.apply([slot], logits), result), f"{args}, step {step}"
                whole.append(2, int(result.argmax()))
                torn.append(slot, int(result.argmax()))

    def test_what_is_the_engines_stays(self, processor_type: type[LogitsProcessor]) -> None:
        """Tokens of slots are only read, and only those of requests."""
        bench = self.bench(processor_type)
        slots = [7, 3, 9]
        self.crowd(bench, processor_type, slots)
        before = bench.history.clone()
        logits = self.logits(3)
        result = bench.apply(slots, logits)
        assert torch.equal(bench.history, before), "it wrote to `history`"
        for slot in range(SLOTS + 1):
            bench.history[slot, len(bench.tokens.get(slot, [])) :] = 0
        assert same(bench.apply(slots, logits), result), "it reads behind `lengths`"

    def test_a_full_batch_is_served(self, processor_type: type[LogitsProcessor]) -> None:
        """Serve as many rows as there are slots, then few again."""
        bench = self.bench(processor_type)
        slots = list(range(SLOTS))
        self.crowd(bench, processor_type, slots)
        logits = self.logits(SLOTS)
        whole = bench.apply(slots, logits)
        some = [SLOTS - 1, 0]
        assert same(bench.apply(some, logits[some]), whole[some])
