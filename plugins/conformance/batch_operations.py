"""Checks of operations on the rows of a step, for `OperationsKit`: inputs, books and sampling.

They are what a step needs besides its layers: results must equal the reference's exactly, but for
log-probabilities.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from ...core.nn.operations import Operations
from ...core.nn.step_operations.drafts import DraftTables
from ...core.nn.step_operations.inputs import DecodeTensors
from ...core.sampling_params import SamplingParams
from ...core.step import SlotStart
from ...core.worker.sampling.sampler import Sampler
from ...core.worker.sampling.sampling_state import SamplingState
from .operation_arguments import REFERENCE

SAMPLING: tuple[dict[str, Any], ...] = (
    {}, {"top_k": 5}, {"top_p": 0.7}, {"min_p": 0.2}, {"logprobs": 3},
    {"repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 1.0},
    {"logit_bias": {3: 50.0, 8: -100.0}}, {"allowed_token_ids": (4, 5, 6, 250)},
)  # fmt: skip
"""What requests ask of the sampler besides a temperature."""


class BatchChecks:
    """Part of `OperationsKit`."""

    device: Any
    draw: Any
    make: Any

    @pytest.mark.parametrize("compacted", [False, True])
    def test_decode_inputs(self, compacted: bool) -> None:
        """New blocks are written to the table, and slots are counted on; padding rows share the
        last slot. Caches may have lost tokens."""
        operations = self.make(torch.float32)
        more = self.compacted("decode_inputs", [0, 0, 3, 0, 0, 20, 0], compacted)
        draw = torch.Generator().manual_seed(2)
        history = torch.randint(0, 999, (7, 90), generator=draw, dtype=torch.int32)
        table = torch.randint(1, 99, (7, 40), generator=draw, dtype=torch.int32)
        lengths = torch.tensor([16, 9, 9, 0, 9, 47, 0], dtype=torch.int32)
        # The row of slot 0 has its table already.
        packed = torch.tensor([[3, -1, 5, 6, 6], [0, 77, 0, 0, 0]], dtype=torch.int32)
        row_tables = table[torch.tensor([6, 0, 1, 1, 1])]
        given = [part.to(self.device) for part in (packed, lengths, history, table, row_tables)]
        results = []
        for each in (operations, REFERENCE):
            packed, lengths, history, table, rows = (part.clone() for part in given)
            inputs = DecodeTensors(
                *each.decode_inputs(packed, lengths, history, table, rows, 16, **more)
            )
            results.append((inputs, lengths, table))
        (got, *got_tables), (want, *want_tables) = results
        for name, one, other in zip(want._fields, got, want, strict=True):
            assert one.dtype == other.dtype and torch.equal(one, other), name
        for name, one, other in zip(("lengths", "table"), got_tables, want_tables, strict=True):
            assert torch.equal(one, other), name

    def compacted(self, method: str, dropped: list[int], used: bool) -> dict[str, Any]:
        """Return the option of caches that have lost tokens, if it is used and supported."""
        if used and f"{method}.dropped" not in self.make(torch.float32).features:
            pytest.skip("these operations do not support KV compression")
        lost = torch.tensor(dropped, dtype=torch.int32, device=self.device)
        return {"dropped": lost} if used else {}

    @pytest.mark.parametrize("compacted", [False, True])
    @pytest.mark.parametrize("counts", [[1], [1, 1, 7, 40, 1, 0, 0], [70, 1]], ids=str)
    def test_step_inputs(self, counts: list[int], compacted: bool) -> None:
        """Check ragged rows; those without tokens come last. Caches may have lost tokens."""
        more = self.compacted("step_inputs", [0, 9, 0, 5, 0, 30, 1, 2, 3], compacted)
        draw = torch.Generator().manual_seed(len(counts))
        rows = len(counts)
        history = torch.randint(0, 999, (9, 401), generator=draw, dtype=torch.int32)
        table = torch.randint(0, 99, (9, 27), generator=draw, dtype=torch.int32)
        start = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        slots = torch.randperm(9, generator=draw)[:rows].to(torch.int32)
        lengths = torch.randint(30, 90, (9,), generator=draw, dtype=torch.int32)
        sampled = torch.randint(0, 9, (rows,), generator=draw, dtype=torch.int32)
        start, slots, sampled, lengths, history, table = (
            part.to(self.device) for part in (start, slots, sampled, lengths, history, table)
        )
        inputs: list[Any] = [start, slots, sampled, sum(counts), lengths, history, table, 16]
        want = REFERENCE.step_inputs(*inputs, **more)
        got = self.make(torch.float32).step_inputs(*inputs, **more)
        for name, one, other in zip(want._fields, got, want, strict=True):
            # The place of a row without tokens is not read.
            kept = slice(None) if name in ("input_ids", "positions", "slot_mapping") else slice(
                sum(count > 0 for count in counts)
            )  # fmt: skip
            assert one.dtype == other.dtype and torch.equal(one[kept], other[kept]), name

    @pytest.mark.parametrize("counts", [[1], [1, 1, 7, 40, 1, 0, 0], [70, 1]], ids=str)
    def test_advance(self, counts: list[int]) -> None:
        """Slots are counted on by the tokens of their rows; the last slot, padding's, is not."""
        rows = len(counts)
        slots = torch.arange(rows, 0, -1, dtype=torch.int32)
        start = torch.tensor([0, *counts, 3]).cumsum(0).to(torch.int32)
        lengths = torch.arange(rows + 2, dtype=torch.int32) * 5
        lengths[-1] = 0
        want = lengths.clone()
        want[slots.long()] += torch.tensor(counts, dtype=torch.int32)
        padded = torch.cat([slots, torch.tensor([rows + 1], dtype=torch.int32)])
        got = lengths.to(self.device, copy=True)
        self.make(torch.float32).advance(got, padded.to(self.device), start.to(self.device))
        assert got.tolist() == want.tolist()

    @pytest.mark.parametrize("counts", [[1], [1, 1, 7, 40, 1, 0, 0], [70, 1]], ids=str)
    @pytest.mark.parametrize("tables", [2, 5])
    def test_slot_mappings(self, tables: int, counts: list[int]) -> None:
        """Check all tables but the first; rows without tokens come last."""
        draw = torch.Generator().manual_seed(len(counts))
        rows = len(counts)
        table = torch.randint(0, 99, (rows, tables * 12), generator=draw, dtype=torch.int32)
        start = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        first = torch.randint(0, 90, (rows,), generator=draw)
        positions = torch.cat([torch.arange(n) + at for n, at in zip(counts, first, strict=True)])
        inputs: list[Any] = [
            table.to(self.device), 12, start.to(self.device), positions.to(self.device), 16,
        ]  # fmt: skip
        want = REFERENCE.slot_mappings(*inputs)
        got = self.make(torch.float32).slot_mappings(*inputs)
        assert got.shape == (tables - 1, sum(counts))
        assert got.dtype == want.dtype and torch.equal(got, want)

    def _draft_tables(self, draw: torch.Generator) -> tuple[DraftTables, DraftTables]:
        history = torch.randint(0, 3, (9, 40), generator=draw, dtype=torch.int32)
        lengths = torch.randint(0, 30, (9,), generator=draw, dtype=torch.int32)
        proposed = torch.randint(0, 6, (9,), generator=draw, dtype=torch.int32)
        tables = DraftTables(history, lengths, proposed)
        return DraftTables(*(part.to(self.device, copy=True) for part in tables)), tables

    @pytest.mark.parametrize("counts", [[5], [0], [3, 0, 5, 1, 5, 2, 5, 4]], ids=str)
    def test_verify_drafts(self, counts: list[int]) -> None:
        """Drafts are accepted up to the first that was not chosen or proposed; the others leave
        their slots' lengths."""
        for seed in range(6):
            draw = torch.Generator().manual_seed(seed)
            mine, tables = self._draft_tables(draw)
            starts = torch.tensor([0, *(count + 1 for count in counts)]).cumsum(0).int()
            drafts = torch.randint(0, 3, (int(starts[-1]),), generator=draw, dtype=torch.int32)
            other = torch.rand(len(drafts), generator=draw) < 0.2
            chosen = torch.where(other, -1, drafts)
            slots = torch.randperm(8, generator=draw)[: len(counts)]
            inputs = (chosen, drafts, starts, slots)
            want = REFERENCE.verify_drafts(*inputs, tables, 5)
            on_device = (part.to(self.device) for part in inputs)
            got = self.make(torch.float32).verify_drafts(*on_device, mine, 5)
            assert got.dtype == want.dtype and torch.equal(got.cpu(), want)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(mine, tables, strict=True))

    @pytest.mark.parametrize("integers", [torch.int32, torch.int64], ids=str)
    @pytest.mark.parametrize("num_drafts", [1, 5])
    def test_keep_drafts(self, num_drafts: int, integers: torch.dtype) -> None:
        """Drafts stand behind the known tokens, up to the first that is none of the vocabulary."""
        for seed in range(6):
            draw = torch.Generator().manual_seed(seed)
            mine, tables = self._draft_tables(draw)
            token_ids = torch.randint(0, 50, (num_drafts, 6), generator=draw).T
            strange = torch.rand(token_ids.shape, generator=draw)
            token_ids = torch.where(strange < 0.1, -1, token_ids)
            token_ids = torch.where(strange > 0.9, 50, token_ids).to(integers)
            counts = torch.randint(0, num_drafts + 1, (6,), generator=draw).to(integers)
            inputs = (token_ids, counts, torch.randperm(9, generator=draw)[:6])
            want = REFERENCE.keep_drafts(*inputs, tables, 50)
            on_device = (part.to(self.device) for part in inputs)
            got = self.make(torch.float32).keep_drafts(*on_device, mine, 50)
            assert got.dtype == want.dtype and torch.equal(got.cpu(), want)
            assert all(torch.equal(a.cpu(), b) for a, b in zip(mine, tables, strict=True))

    @pytest.mark.parametrize("count", [0, 1, 60, 100])
    def test_scatter(self, count: int) -> None:
        """Exactly the given number of writes happens; the last place may hold anything."""
        draw = torch.Generator().manual_seed(count)
        places = torch.randperm(300, generator=draw)[:100]
        values = torch.randint(1, 99, (100,), generator=draw)
        writes = torch.stack([places, values], dim=1).to(torch.int32).to(self.device)
        many = torch.tensor([count], dtype=torch.int32, device=self.device)
        storage = torch.zeros(301, dtype=torch.int32, device=self.device)
        self.make(torch.float32).scatter(storage, writes, many)
        want = torch.zeros(300, dtype=torch.int32)
        want[places[:count]] = values[:count].to(torch.int32)
        assert torch.equal(storage[:-1].cpu(), want)

    @pytest.mark.parametrize("asked", SAMPLING, ids=lambda asked: "+".join(asked) or "plain")
    def test_sampling(self, asked: dict[str, Any]) -> None:
        """Tokens and log-probabilities equal those of the sampler in torch with the same noise; a
        row whose logits are all NaN gives -1."""
        operations = self.make(torch.float32)
        if not operations.samples:
            pytest.skip("it leaves sampling to torch")
        vocab, rows = 300, [2, 0, 3, 1]
        logits = self.draw(len(rows), vocab, dtype=torch.float32) * 3
        logits[0, [7, 200]] = 50.0
        logits[3] = float("nan")
        results = [self.sampled(one, asked, rows, logits) for one in (operations, REFERENCE)]
        (got, got_scores), (want, want_scores) = results
        assert got[:3] == want[:3]
        assert got[3] == -1, "no token can be chosen"
        if "logprobs" in asked:
            for name in ("logprob", "rank", "top_ids", "top_logprobs"):
                one, other = (getattr(scores, name)[:3] for scores in (got_scores, want_scores))
                if one.dim() == 2:
                    one, other = one[:, : asked["logprobs"]], other[:, : asked["logprobs"]]
                torch.testing.assert_close(one.double(), other.double(), atol=1e-4, rtol=1e-4)

    def test_write_tokens(self) -> None:
        """Write tokens of more runs than a ring has places, past the last run that is counted."""
        operations, last = self.make(torch.float32), 6
        if not operations.writes_tokens:
            pytest.skip("it leaves tokens to a copy")
        ring = torch.zeros(4, 9, dtype=torch.int32, pin_memory=self.device.type == "cuda")
        runs = torch.tensor([3], dtype=torch.int32, device=self.device)
        for run, rows in ((4, 8), (5, 1), (6, 3), (0, 2), (1, 8)):
            chosen = torch.arange(rows, dtype=torch.int32, device=self.device) * 11 - run
            operations.write_tokens(chosen, runs, ring, last)
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            assert runs.tolist() == [run]
            assert ring[run % 4, : 1 + rows].tolist() == [run, *chosen.tolist()]

    def sampled(
        self, operations: Operations, asked: dict[str, Any], rows: list[int], logits: torch.Tensor
    ) -> tuple[list[int], Any]:
        """Sample one step of started slots → tokens; log-probabilities."""
        prompt = [5, 9, 9, 4]
        history = torch.zeros((6, 50), dtype=torch.int32, device=self.device)
        state = SamplingState(6, logits.shape[1], self.device, history, kernels=operations.samples)
        for slot in sorted(rows):
            history[slot, : len(prompt)] = torch.tensor(prompt, dtype=torch.int32)
            params = SamplingParams(**{"temperature": 0.4 * slot, **asked})
            state.start(
                SlotStart(
                    slot=slot, request_id=str(slot), token_ids=tuple(prompt), num_prompt_tokens=3,
                    num_computed_tokens=0, params=params, seed=slot * 31,
                )
            )  # fmt: skip
        state.upload()
        slots = torch.tensor(rows, device=self.device)
        lengths = torch.full((len(rows),), len(prompt), device=self.device)
        before = logits.clone()
        sampler = Sampler(state, operations=operations)
        chosen, scores = sampler.sample_eagerly(before, slots, rows, lengths)
        assert torch.equal(before.nan_to_num(), logits.nan_to_num()), "logits were changed"
        tokens = [int(token) for token in chosen]
        for slot, token in zip(rows, tokens, strict=True):
            assert int(history[slot, len(prompt)]) == max(token, 0), "not in the slot's history"
        assert int((history != 0).sum()) <= len(rows) * (len(prompt) + 1), "other places, too"
        return tokens, scores

    @pytest.mark.parametrize("vocab", [5, 64, 1001])
    @pytest.mark.parametrize("indexed", [True, False], ids=["some rows", "all rows"])
    def test_mask_tokens(self, indexed: bool, vocab: int, dtype: torch.dtype) -> None:
        draw = torch.Generator().manual_seed(vocab)
        words = -(-vocab // 32)
        bits = torch.randint(-(2**31), 2**31, (3, words), generator=draw, dtype=torch.int64)
        bits = bits.int().to(self.device)
        bits[1] = -1
        rows = torch.tensor([4, 0, 2], device=self.device) if indexed else None
        want = self.draw(5 if indexed else 3, vocab + 3, dtype=dtype)[:, :vocab]
        got = want.clone()
        self.make(dtype).mask_tokens(got, bits, rows)
        REFERENCE.mask_tokens(want, bits, rows)
        assert torch.equal(got, want)
