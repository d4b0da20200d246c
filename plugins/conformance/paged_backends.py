"""What the kits of paged attention backends share: whom they test, where, and in which types."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from ...core.nn.context import BatchLayout
from ...core.protocols.attention import BackendSetup
from ...core.worker.selection import attention_refusal
from .attention_cases import MAX_MODEL_LEN
from .kit import DeviceKit

DRAFT_SIZES = [(90, 1), (200, 6), (33, 1), (17, 4), (64, 2), (40, 40)]
"""Rows for `with_bounds`: (sequence length, tokens of this step)."""


class PagedBackendKit(DeviceKit):
    """Subclass one of the kits, not this."""

    promised: ClassVar[frozenset[str]] = frozenset()
    """Dtypes such as "bfloat16", and features, that it must serve on this machine: a refusal
    fails."""
    tolerance: ClassVar[Mapping[torch.dtype, float]]
    """Absolute and relative tolerance."""

    @property
    def backend_class(self) -> Any:
        """The class registered under `name`."""
        return self.registered()

    def plain_spec(self) -> Any:
        """Return the spec of a layer without features."""
        raise NotImplementedError

    @pytest.fixture(params=["float32", "half"])
    def dtype(self, request: pytest.FixtureRequest) -> torch.dtype:
        """float32, and bfloat16 or, if that is refused, float16."""
        if request.param == "float32":
            return torch.float32
        spec = self.plain_spec()
        reason = attention_refusal(self.backend_class, spec, self.device, torch.bfloat16)
        return torch.bfloat16 if reason is None else torch.float16

    def is_promised(self, spec: Any, dtype: torch.dtype) -> bool:
        """Return whether it must serve a layer in a type."""
        return str(dtype).removeprefix("torch.") in self.promised

    def make(self, spec: Any, dtype: torch.dtype, block_size: int = 16) -> Any:
        """Create an instance that serves `spec`; the test is skipped if it is refused."""
        reason = attention_refusal(self.backend_class, spec, self.device, dtype)
        if reason is not None:
            assert reason.strip(), "a refusal says why"
            if self.is_promised(spec, dtype):
                pytest.fail(f"{self.name} promises this, and refuses it: {reason}")
            pytest.skip(f"{self.name}: {reason}")
        setup = BackendSetup(
            device=self.device, dtype=dtype, block_size=block_size, max_num_seqs=16,
            max_num_batched_tokens=512, max_model_len=MAX_MODEL_LEN,
        )  # fmt: skip
        return self.backend_class.create(setup)


def with_bounds(layout: BatchLayout) -> BatchLayout:
    """Return the layout of rows of DRAFT_SIZES of which the host has upper bounds alone: block
    tables are as wide, and rows of a few tokens are drafts."""
    bounds = layout.seq_lens_cpu + np.array([12, 6, 0, 9, 3, 0], dtype=np.int32)
    table = torch.nn.functional.pad(layout.block_table, (0, 2))
    return replace(
        layout, seq_lens_cpu=bounds, max_seq_len=int(bounds.max()), block_table=table, bounded=True
    )
