"""Levels of a KV cache as options: bits, shares of tokens, and ages."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import msgspec

WHOLE = 16
"""Bits that stand for the type in which the model computes."""
BITS = (WHOLE, 8, 4)
MOST_LEVELS = 3
"""Besides the newest tokens: attention kernels have as many loops."""
WORD_BYTES = 4
"""Bytes of the scale and zero of a token and head, where codes are stored."""
GRAMMAR = re.compile(r"(\d{1,2})(?::(\d+(?:\.\d*)?|\.\d+))?@(\d{1,9})")
SAYS = "BITS:SHARE@AGE, as 8@1024 or 4:0.5@8192"


class CacheLevel(msgspec.Struct, frozen=True):
    bits: int
    """Bits per channel: 16 (as computed), 8 or 4."""
    share: float
    """Share, in (0, 1], of the sequence's tokens of this age that is kept here."""
    age: int
    """Newer tokens in the sequence from which a token belongs here; 1 or more."""

    @property
    def name(self) -> str:
        """Return it as in `EngineConfig.kv_compression_levels`."""
        return f"{self.bits}:{self.share:g}@{self.age}"


class LevelFormat(NamedTuple):
    """How a level's blocks are filled."""

    bits: int
    tokens: int
    """Tokens of a block."""


def parse_levels(text: str) -> tuple[CacheLevel, ...]:
    """Return the levels besides the newest tokens. Raises ValueError, with what is wrong."""
    words = [word.strip() for word in text.split(",")]
    levels = []
    for number, word in enumerate(words):
        match = GRAMMAR.fullmatch(word)
        if match is None:
            raise ValueError(f"{word!r} is not {SAYS}")
        level = CacheLevel(int(match[1]), float(match[2] or 1), int(match[3]))
        if level.bits not in BITS:
            raise ValueError(f"{word!r} has {level.bits} bits; there are 16, 8 and 4")
        if not 0 < level.share <= 1:
            raise ValueError(f"{word!r} keeps a share of {level.share:g}, which is not in (0, 1]")
        if not level.age:
            if number or (level.bits, level.share) != (WHOLE, 1):
                raise ValueError(
                    f"{word!r} begins at age 0, where all tokens are as they were computed "
                    "(16:1@0); begin it at 1 or more"
                )
            continue
        levels.append(level)
    _check_levels(levels)
    return tuple(levels)


def _check_levels(levels: Sequence[CacheLevel]) -> None:
    if not levels:
        raise ValueError("no level is older than the newest tokens: add one such as 8@1024")
    if len(levels) > MOST_LEVELS:
        raise ValueError(f"{len(levels)} levels after the newest tokens, of at most {MOST_LEVELS}")
    source = CacheLevel(WHOLE, 1.0, 0)
    groups = [list(group) for _, group in groupby(levels, key=lambda level: level.age)]
    for number, group in enumerate(groups):
        age, share = group[0].age, sum(level.share for level in group)
        if age <= source.age:
            raise ValueError(f"age {age} follows age {source.age}; ages rise from level to level")
        if len(group) > 1 and number < len(groups) - 1:
            raise ValueError(
                f"{len(group)} levels begin at age {age}, and others later; several share the last "
                "age alone"
            )
        if share > source.share + 1e-9:
            raise ValueError(
                f"from age {age} a share of {share:g} is kept, and {source.share:g} before; what "
                "was dropped does not come back"
            )
        if any(later.bits >= level.bits for level, later in pairwise(group)):
            raise ValueError(
                f"levels from age {age} have {' and '.join(str(each.bits) for each in group)} "
                "bits; the most important tokens come first, with the most bits"
            )
        if any(level.bits > source.bits for level in group):
            raise ValueError(
                f"from age {age} tokens have {group[0].bits} bits, and {source.bits} before; what "
                "was rounded does not come back"
            )
        if len(group) == 1 and (group[0].bits, share) == (source.bits, source.share):
            raise ValueError(f"from age {age} nothing changes: fewer bits or a smaller share")
        source = group[0]


def chooses(levels: Sequence[CacheLevel]) -> bool:
    """Return whether tokens are chosen, by a KV compressor: dropped, or put into several levels."""
    ages = {level.age for level in levels}
    return len(ages) < len(levels) or any(level.share < 1 for level in levels)


def level_format(bits: int, block_size: int, head_dim: int, itemsize: int) -> LevelFormat:
    """Return how many tokens of a level fit into the bytes of `block_size` whole ones. itemsize:
    bytes of a whole channel
    """
    if bits == WHOLE:
        return LevelFormat(bits, block_size)
    token = head_dim * bits // 8 + WORD_BYTES
    return LevelFormat(bits, block_size * head_dim * itemsize // token)
