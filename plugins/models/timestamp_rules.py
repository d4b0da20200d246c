"""Rules of the times that Whisper's decoder writes (arXiv 2212.04356, section 2.3, and the
published code)."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...core.errors import InvalidRequest, shown
from ...core.protocols.logits_processors import (
    LogitsProcessor,
    LogitsProcessorSetup,
    ProcessedRows,
)
from ...core.sampling_params import SamplingParams
from ...core.step import SlotStart

TIMESTAMP_RULES = "timestamp_rules"
FIELDS = ("no_timestamps", "end", "max_initial")
NO_LIMIT = 1 << 30
MINUS_INFINITY = float("-inf")


class _Rules(NamedTuple):
    begin: int
    """Tokens of the prompt."""
    first_time: int
    end: int
    last_initial: int
    """The latest time that an output may begin with."""


class TimestampRules(LogitsProcessor):
    """An output begins with a time; times come in pairs, around text, or before the end; none is
    earlier than the one before it; and if all times together are more probable than any other
    token, a time is chosen."""

    parameters = frozenset({TIMESTAMP_RULES})
    examples = (
        {TIMESTAMP_RULES: {"no_timestamps": 150, "end": 140, "max_initial": 9}},
        {TIMESTAMP_RULES: {"no_timestamps": 99, "end": 90}},
    )
    stateless = True

    @classmethod
    def check(cls, params: SamplingParams) -> None:
        rules = (params.extra_args or {})[TIMESTAMP_RULES]
        sound = isinstance(rules, dict) and {"no_timestamps", "end"} <= set(rules) <= set(FIELDS)
        if sound:
            numbers = [number for number in rules.values() if number is not None]
            sound = all(type(number) is int and 0 <= number < NO_LIMIT for number in numbers)
            sound = sound and None not in (rules["no_timestamps"], rules["end"])
        if not sound:
            raise InvalidRequest(
                f"vllm_xargs.{TIMESTAMP_RULES}: must be token ids "
                '{"no_timestamps": …, "end": …}, and may have "max_initial", the number of the '
                f"latest first time; got {shown(rules)}",
                param=f"vllm_xargs.{TIMESTAMP_RULES}",
            )

    def __init__(self, setup: LogitsProcessorSetup) -> None:
        self._history, self._device = setup.history, setup.device
        self._rules: dict[int, _Rules] = {}
        self._sent: tuple[tuple[int, ...], torch.Tensor] | None = None
        """Slots, and their rules on the device: [slots, fields of `_Rules`] int64"""

    def start(self, slot: int, request: SlotStart) -> bool:
        self._sent = None
        rules = (request.params.extra_args or {}).get(TIMESTAMP_RULES)
        if rules is None:
            return False
        first, latest = rules["no_timestamps"] + 1, rules.get("max_initial")
        self._rules[slot] = _Rules(
            request.num_prompt_tokens, first, rules["end"],
            NO_LIMIT if latest is None else first + latest,
        )  # fmt: skip
        return True

    def end(self, slot: int) -> None:
        self._rules.pop(slot, None)

    def _uploaded(self, slots: tuple[int, ...]) -> torch.Tensor:
        if self._sent is None or self._sent[0] != slots:
            rules = torch.tensor([self._rules[slot] for slot in slots], dtype=torch.int64)
            if self._device.type == "cuda":
                rules = rules.pin_memory().to(self._device, non_blocking=True)
            self._sent = slots, rules
        return self._sent[1]

    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        begin, first_time, end, last_initial = self._uploaded(rows.slots).T[:, :, None]
        length = rows.lengths[:, None]
        history = self._history.index_select(0, rows.device_slots)
        last = history.gather(1, (length - 1).clamp_(min=0))
        before_last = history.gather(1, (length - 2).clamp_(min=0))
        after_time = (length > begin) & (last >= first_time)
        after_pair = after_time & ((length < begin + 2) | (before_last >= first_time))
        opened = after_time & ~after_pair

        place = _counted(history)
        times = (place >= begin) & (place < length) & (history >= first_time)
        latest = history.masked_fill(~times, -1).amax(1, keepdim=True)
        # The time after a text may be that before the next one, and others are later.
        earliest = (latest + (~opened).long()).maximum(first_time)

        token = _counted(logits)
        is_time = token >= first_time
        barred = (token == first_time - 1) | (is_time & (after_pair | (token < earliest)))
        barred |= opened & (token < end)
        barred |= (length == begin) & (~is_time | (token > last_initial))
        logits.masked_fill_(barred, MINUS_INFINITY)

        all_times = logits.masked_fill(~is_time, MINUS_INFINITY).logsumexp(1, keepdim=True)
        best_other = logits.masked_fill(is_time, MINUS_INFINITY).amax(1, keepdim=True)
        return logits.masked_fill_(~is_time & (all_times > best_other), MINUS_INFINITY)


def _counted(rows: torch.Tensor) -> torch.Tensor:
    """[rows, columns] → the numbers of the columns, [1, columns] int64"""
    return torch.arange(rows.shape[1], device=rows.device)[None]
