"""Conformance of logits processors: what `protocols.LogitsProcessor` promises, tried out.

    class TestMine(LogitsProcessorKit):
        processor_class = MyProcessor

or `pytest --pyargs jackfield.plugins.conformance --logits-processor my_processor`. The processor is
given slots, tokens and random logits as the engine gives them; what its `examples` ask for may
depend on the request, its tokens and its logits, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest
import torch

from ...core.errors import InvalidRequest
from ...core.protocols import LogitsProcessor, LogitsProcessorSetup, ProcessedRows
from ...core.registry import load_plugins
from ...core.types import SamplingParams, SlotStart

SLOTS = 70
POSITIONS = 48


class Bench:
    """A processor, and the slots it is given."""

    def __init__(self, processor_class: type[LogitsProcessor], vocab_size: int) -> None:
        self.vocab_size = vocab_size
        # Behind each sequence stands what no request has.
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
        """Of which all but the first three are output."""
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
                block_ids=(),
                params=SamplingParams(extra_args=args),
                seed=slot,
            ),
        )

    def append(self, slot: int, token: int) -> None:
        """What was sampled."""
        self.history[slot, len(self.tokens[slot])] = token
        self.tokens[slot].append(token)

    def end(self, slot: int) -> None:
        """Of the slot's request; others' tokens may stand there from now on."""
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
        made = self.processor.apply(logits.clone(), ProcessedRows(self._rows, index, lengths))
        assert isinstance(made, torch.Tensor), "apply must give a tensor"
        assert made.shape == logits.shape, f"apply gave {tuple(made.shape)}"
        assert made.dtype == torch.float32, f"apply gave {made.dtype}"
        return made.clone()


def same(got: torch.Tensor, want: torch.Tensor) -> bool:
    """But for rounding."""
    finite = want.isfinite()
    if not torch.equal(got.isfinite(), finite):
        return False
    return torch.allclose(got[finite], want[finite], rtol=1e-5, atol=1e-5)


class LogitsProcessorKit:
    """Subclass it in your tests, and set what is yours."""

    name: ClassVar[str]
    processor_class: ClassVar[type[LogitsProcessor] | None] = None
    """Default: what is registered under `name`."""
    refused: ClassVar[tuple[dict[str, Any], ...]] = ()
    """`extra_args` that `check` must refuse."""
    vocab_size: ClassVar[int] = 199

    @pytest.fixture
    def kind(self) -> type[LogitsProcessor]:
        """The class to try. One without examples is told so."""
        kind = self.processor_class or load_plugins()["logits_processor"].load(self.name)
        if not kind.examples:
            pytest.fail(f"{kind.__name__}.examples is empty: which extra_args ask for it?")
        return kind

    def bench(self, kind: type[LogitsProcessor]) -> Bench:
        """A new one."""
        return Bench(kind, self.vocab_size)

    def logits(self, rows: int, seed: int = 0) -> torch.Tensor:
        """[rows, vocab_size] float32"""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn((rows, self.vocab_size), generator=generator) * 4

    def crowd(self, bench: Bench, kind: type[LogitsProcessor], slots: Sequence[int]) -> None:
        """A request in each slot, of all examples, with tokens of its own."""
        for place, slot in enumerate(slots):
            args = kind.examples[place % len(kind.examples)]
            tokens = [(7 * slot + 11 * at) % (self.vocab_size - 1) for at in range(4 + slot % 9)]
            assert bench.start(slot, args, tokens) is True, f"{args} must ask for it"

    # ------------------------------------------------------------ asking

    def test_examples_are_taken_and_name_parameters(self, kind: type[LogitsProcessor]) -> None:
        """Every key is one of `parameters`, and `check` has nothing against the values."""
        for args in kind.examples:
            assert args, "an example asks for something"
            assert set(args) <= kind.parameters, f"{args}: not all keys are in `parameters`"
            kind.check(SamplingParams(extra_args=args))
        for args in self.refused:
            with pytest.raises(InvalidRequest):
                kind.check(SamplingParams(extra_args=args))

    def test_who_does_not_ask_is_not_served(self, kind: type[LogitsProcessor]) -> None:
        """`start` is False for requests without its parameters."""
        bench = self.bench(kind)
        assert bench.start(0, None, [1, 2, 3, 4]) is False
        assert bench.start(1, {}, [1, 2, 3, 4]) is False
        assert bench.start(2, {"of_another_processor": 1}, [1, 2, 3, 4]) is False

    # ------------------------------------------------------------ what comes out

    def test_logits_stay_numbers(self, kind: type[LogitsProcessor]) -> None:
        """Of the same shape and type, none of them NaN or +inf, one at least finite; -inf that
        came in are no trouble."""
        bench = self.bench(kind)
        slots = list(range(2 * len(kind.examples) + 1))
        self.crowd(bench, kind, slots)
        for seed in range(4):
            logits = self.logits(len(slots), seed)
            if seed % 2:
                logits[:, seed::3] = -torch.inf
            made = bench.apply(slots, logits)
            assert not made.isnan().any(), "NaN"
            assert not made.isposinf().any(), "+inf"
            if not seed % 2:
                assert made.isfinite().any(dim=1).all(), "a row has no token left"

    def test_it_does_something(self, kind: type[LogitsProcessor]) -> None:
        """Each example changes some logits, some time."""
        bench = self.bench(kind)
        slots = list(range(len(kind.examples)))
        self.crowd(bench, kind, slots)
        changed = torch.zeros(len(slots), dtype=torch.bool)
        for seed in range(8):
            logits = self.logits(len(slots), seed)
            changed |= (bench.apply(slots, logits) != logits).any(dim=1)
            for slot in slots:
                bench.append(slot, (seed * 31 + slot) % (self.vocab_size - 1))
        idle = [kind.examples[slot] for slot in slots if not changed[slot]]
        assert not idle, f"nothing changes with {idle}"

    def test_the_argmax_is_kept_where_it_says_so(self, kind: type[LogitsProcessor]) -> None:
        """`argmax_invariant`: greedy requests get the same without it."""
        if not kind.argmax_invariant:
            pytest.skip("it may change the argmax")
        bench = self.bench(kind)
        slots = list(range(2 * len(kind.examples)))
        self.crowd(bench, kind, slots)
        for seed in range(20):
            logits = self.logits(len(slots), seed)
            logits[:, seed] = logits.max(dim=1).values + 1e-3
            got = bench.apply(slots, logits).argmax(dim=1)
            assert torch.equal(got, logits.argmax(dim=1)), "the largest logit is another one"

    # ------------------------------------------------------------ what it may depend on

    def test_rows_do_not_know_of_each_other(self, kind: type[LogitsProcessor]) -> None:
        """In any company and order, a row gives what it gives alone."""
        bench = self.bench(kind)
        slots = [5, 0, 64, 31, 2, 17, 40][: max(3, len(kind.examples) + 2)]
        self.crowd(bench, kind, slots)
        logits = self.logits(len(slots))
        together = bench.apply(slots, logits)
        for row, slot in enumerate(slots):
            alone = bench.apply([slot], logits[row : row + 1])
            assert same(alone, together[row : row + 1]), "it depends on the other rows"
        order = list(reversed(range(len(slots))))
        turned = bench.apply([slots[row] for row in order], logits[order])
        assert same(turned, together[order]), "it depends on the order of rows"

    def test_the_same_again_is_the_same(self, kind: type[LogitsProcessor]) -> None:
        """Steps may be repeated for nobody's request; a slot's tokens say where it is."""
        bench = self.bench(kind)
        slots = [3, 1]
        self.crowd(bench, kind, slots)
        logits = self.logits(2)
        first = bench.apply(slots, logits)
        for _ in range(3):
            assert same(bench.apply(slots, logits), first), "it counts how often it is called"

    def test_a_slot_begins_anew(self, kind: type[LogitsProcessor]) -> None:
        """What the request before had asked for, or written, is gone."""
        bench = self.bench(kind)
        tokens = [9, 8, 7, 6, 5]
        slots = [4, *range(5, 5 + len(kind.examples))]
        for place, args in enumerate(kind.examples):
            fresh = self.bench(kind)
            # Each example in the slot in turn, another one than is asked for next.
            self.crowd(bench, kind, slots[place:] + slots[:place])
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

    def test_a_preempted_request_goes_on(self, kind: type[LogitsProcessor]) -> None:
        """Started again in another slot with the tokens there are, it gives the same."""
        for args in kind.examples:
            whole, torn = self.bench(kind), self.bench(kind)
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
                made = whole.apply([2], logits)
                assert same(torn.apply([slot], logits), made), f"{args}, step {step}"
                whole.append(2, int(made.argmax()))
                torn.append(slot, int(made.argmax()))

    def test_what_is_the_engines_stays(self, kind: type[LogitsProcessor]) -> None:
        """Tokens of slots are only read, and only those of requests."""
        bench = self.bench(kind)
        slots = [7, 3, 9]
        self.crowd(bench, kind, slots)
        before = bench.history.clone()
        logits = self.logits(3)
        made = bench.apply(slots, logits)
        assert torch.equal(bench.history, before), "it wrote to `history`"
        for slot in range(SLOTS + 1):
            bench.history[slot, len(bench.tokens.get(slot, [])) :] = 0
        assert same(bench.apply(slots, logits), made), "it reads behind `lengths`"

    def test_a_full_batch_is_served(self, kind: type[LogitsProcessor]) -> None:
        """As many rows as there are slots, then few again."""
        bench = self.bench(kind)
        slots = list(range(SLOTS))
        self.crowd(bench, kind, slots)
        logits = self.logits(SLOTS)
        whole = bench.apply(slots, logits)
        some = [SLOTS - 1, 0]
        assert same(bench.apply(some, logits[some]), whole[some])
