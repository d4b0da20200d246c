"""What the sampler remembers of each slot, on the device, sent there only when it changes.

Scalars of all slots live in two small tensors. Token counts, bias rows, stop ids and bad words take
memory only once a request that needs them comes.
"""

from __future__ import annotations

from enum import IntFlag

import numpy as np
import torch

from ..types import SlotStart


class Stage(IntFlag):
    """What a row needs from the sampler."""

    NONE = 0
    RANDOM = 1
    TOP_K = 2
    TOP_P = 4
    MIN_P = 8
    PENALTIES = 16
    BIAS = 32
    BAD_WORDS = 64
    MIN_TOKENS = 128


_FLOATS = ("temperature", "top_p", "min_p", "presence", "frequency", "repetition")
_INTS = ("top_k", "seed", "min_length", "bias_row", "stages")


class SamplingState:
    """Per-slot sampling parameters. S = max_num_seqs, V = vocab_size."""

    def __init__(
        self,
        max_num_seqs: int,
        vocab_size: int,
        device: torch.device,
        token_history: torch.Tensor,
    ) -> None:
        """token_history: [S, max_model_len + 1] int32, kept by the persistent batch."""
        self.vocab_size = vocab_size
        self.max_num_seqs = max_num_seqs
        self.device = device
        self.token_history = token_history
        self._floats = np.zeros((max_num_seqs, len(_FLOATS)), dtype=np.float32)
        self._ints = np.zeros((max_num_seqs, len(_INTS)), dtype=np.int64)
        self.floats = torch.zeros(max_num_seqs, len(_FLOATS), device=device)
        self.ints = torch.zeros(max_num_seqs, len(_INTS), dtype=torch.int64, device=device)
        self.stages = np.zeros(max_num_seqs, dtype=np.int64)
        self.top_k = np.zeros(max_num_seqs, dtype=np.int64)
        self.num_logprobs = np.full(max_num_seqs, -1, dtype=np.int64)
        """-1: none wanted."""
        self._dirty: set[int] = set()
        self.output_counts: torch.Tensor | None = None
        """[S, V] int32"""
        self.in_prompt: torch.Tensor | None = None
        """[S, V] bool"""
        self.bias: torch.Tensor | None = None
        """[rows, V] float32; a slot's `bias_row` says which."""
        self._free_bias_rows: list[int] = []
        self.stop_ids: torch.Tensor | None = None
        """[S, K] int64, padded with a slot's first one."""
        self.bad_words: torch.Tensor | None = None
        """[S, W, L] int64: right-aligned words; -1 pads words, -2 pads the list of words."""

    def column(self, name: str, slots: torch.Tensor) -> torch.Tensor:
        """One parameter of each row: [R]."""
        if name in _FLOATS:
            return self.floats[slots, _FLOATS.index(name)]
        return self.ints[slots, _INTS.index(name)]

    def start(self, start: SlotStart) -> None:
        """A request takes its slot."""
        slot, params = start.slot, start.params
        self.release(slot)
        stages = Stage.NONE
        if not params.greedy:
            stages |= Stage.RANDOM
            if 0 < params.top_k < self.vocab_size:
                stages |= Stage.TOP_K
            if params.top_p < 1.0:
                stages |= Stage.TOP_P
            if params.min_p > 0.0:
                stages |= Stage.MIN_P
        bias_row = 0
        if params.has_penalties:
            stages |= Stage.PENALTIES
            self._count_tokens(start)
        if params.logit_bias or params.allowed_token_ids is not None:
            stages |= Stage.BIAS
            bias_row = self._add_bias(start)
        if params.min_tokens > 0 and start.stop_token_ids:
            stages |= Stage.MIN_TOKENS
            self._set_stop_ids(start)
        if start.bad_words_token_ids:
            stages |= Stage.BAD_WORDS
            self._set_bad_words(start)
        self._floats[slot] = (
            1.0 if params.greedy else params.temperature,
            params.top_p,
            params.min_p,
            params.presence_penalty,
            params.frequency_penalty,
            params.repetition_penalty,
        )
        top_k = params.top_k if stages & Stage.TOP_K else 0
        seed = (start.seed + (1 << 63)) % (1 << 64) - (1 << 63)
        self._ints[slot] = (
            top_k,
            seed,
            start.num_prompt_tokens + params.min_tokens if stages & Stage.MIN_TOKENS else 0,
            bias_row,
            int(stages),
        )
        self.top_k[slot] = top_k
        self.stages[slot] = int(stages)
        self.num_logprobs[slot] = (
            -1
            if params.logprobs is None
            else self.vocab_size
            if params.logprobs == -1
            else min(params.logprobs, self.vocab_size)
        )
        self._dirty.add(slot)

    def release(self, slot: int) -> None:
        """The slot's request ended."""
        if self.stages[slot] & Stage.BIAS:
            self._free_bias_rows.append(int(self._ints[slot, _INTS.index("bias_row")]))
        self.stages[slot] = 0
        self.num_logprobs[slot] = -1
        self._dirty.discard(slot)

    def upload(self) -> None:
        """Send what changed since the last call. No synchronisation."""
        if not self._dirty:
            return
        rows = np.fromiter(self._dirty, dtype=np.int64)
        self._dirty.clear()
        index = self._send(torch.from_numpy(rows))
        self.floats[index] = self._send(torch.from_numpy(self._floats[rows]))
        self.ints[index] = self._send(torch.from_numpy(self._ints[rows]))

    def stages_of(self, rows: list[int]) -> Stage:
        """What any of these slots needs."""
        return Stage(int(np.bitwise_or.reduce(self.stages[rows])))

    def _send(self, tensor: torch.Tensor) -> torch.Tensor:
        """Through pinned memory of its own, which torch keeps until the copy is done."""
        if self.device.type == "cpu":
            return tensor
        return tensor.pin_memory().to(self.device, non_blocking=True)

    def _count_tokens(self, start: SlotStart) -> None:
        shape = (self.max_num_seqs, self.vocab_size)
        if self.output_counts is None or self.in_prompt is None:
            self.output_counts = torch.zeros(shape, dtype=torch.int32, device=self.device)
            self.in_prompt = torch.zeros(shape, dtype=torch.bool, device=self.device)
        tokens = self._send(torch.tensor(start.token_ids, dtype=torch.int64))
        prompt, output = tokens[: start.num_prompt_tokens], tokens[start.num_prompt_tokens :]
        counts = self.output_counts[start.slot]
        counts.zero_()
        counts.scatter_add_(0, output, torch.ones_like(output, dtype=torch.int32))
        seen = self.in_prompt[start.slot]
        seen.zero_()
        seen.index_fill_(0, prompt, True)

    def _add_bias(self, start: SlotStart) -> int:
        if self.bias is None:
            self.bias = torch.zeros(1, self.vocab_size, device=self.device)
        if not self._free_bias_rows:
            rows = len(self.bias)
            self.bias = torch.cat([self.bias, torch.zeros_like(self.bias)])
            self._free_bias_rows.extend(range(rows, 2 * rows))
        number = self._free_bias_rows.pop()
        row = self.bias[number]
        row.zero_()
        allowed = start.params.allowed_token_ids
        if allowed is not None:
            row.fill_(float("-inf"))
            row.index_fill_(0, self._send(torch.tensor(allowed, dtype=torch.int64)), 0.0)
        if start.params.logit_bias:
            ids = torch.tensor(list(start.params.logit_bias), dtype=torch.int64)
            values = torch.tensor(list(start.params.logit_bias.values()), dtype=torch.float32)
            row.index_add_(0, self._send(ids), self._send(values))
        return number

    def _set_stop_ids(self, start: SlotStart) -> None:
        ids = list(start.stop_token_ids)
        width = 0 if self.stop_ids is None else self.stop_ids.shape[1]
        if len(ids) > width:
            wider = torch.zeros(
                self.max_num_seqs, max(len(ids), 2 * width), dtype=torch.int64, device=self.device
            )
            if self.stop_ids is not None:
                wider[:, :width] = self.stop_ids
                wider[:, width:] = self.stop_ids[:, :1]
            self.stop_ids = wider
        assert self.stop_ids is not None
        ids += ids[:1] * (self.stop_ids.shape[1] - len(ids))
        self.stop_ids[start.slot] = self._send(torch.tensor(ids, dtype=torch.int64))

    def _set_bad_words(self, start: SlotStart) -> None:
        words = start.bad_words_token_ids
        old = self.bad_words
        count, length = (0, 0) if old is None else (old.shape[1], old.shape[2])
        need_count, need_length = len(words), max(len(word) for word in words)
        if need_count > count or need_length > length:
            new = torch.full(
                (self.max_num_seqs, max(need_count, count), max(need_length, length)),
                -2,
                dtype=torch.int64,
                device=self.device,
            )
            if old is not None:
                new[:, :count, new.shape[2] - length :] = old
                new[:, :count, : new.shape[2] - length] = torch.where(old[:, :, :1] == -2, -2, -1)
            self.bad_words = new
        assert self.bad_words is not None
        table = np.full(self.bad_words.shape[1:], -2, dtype=np.int64)
        for number, word in enumerate(words):
            table[number] = -1
            table[number, table.shape[1] - len(word) :] = word
        self.bad_words[start.slot] = self._send(torch.from_numpy(table))
