"""NCCL's number of a group, as vLLM's members send it to each other."""

from __future__ import annotations

import ctypes
import os
import pickle
import sys
import types
from typing import Any

import pytest
import torch

from jackfield.core.parallel.nccl import (
    STRUCTURE,
    NcclGroup,
    new_unique_id,
    pickled_id,
    read_id,
)

MODULE, NAME = STRUCTURE
NUMBER = bytes(range(128))


@pytest.fixture
def structure(monkeypatch: pytest.MonkeyPatch) -> Any:
    """vLLM's class, where it has it."""
    fields = [("internal", ctypes.c_byte * 128)]
    kind = type(NAME, (ctypes.Structure,), {"_fields_": fields, "__module__": MODULE})
    path = MODULE.split(".")
    for end in range(1, len(path) + 1):
        name = ".".join(path[:end])
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    sys.modules[MODULE].ncclUniqueId = kind  # type: ignore[attr-defined]
    return kind


def test_the_number_is_read_as_vllm_pickles_it(structure: Any) -> None:
    for protocol in range(3, pickle.HIGHEST_PROTOCOL + 1):
        data = pickle.dumps(structure.from_buffer_copy(NUMBER), protocol=protocol)
        assert read_id(data) == NUMBER


def test_vllm_reads_the_number_as_it_is_pickled_here(structure: Any) -> None:
    read = pickle.loads(pickled_id(NUMBER))
    assert type(read) is structure and bytes(read) == NUMBER


@pytest.mark.parametrize("content", [os.getcwd, print, NUMBER[:5], [NUMBER], None])
def test_no_other_pickle_is_read(content: Any) -> None:
    with pytest.raises(RuntimeError, match="sends no number of NCCL"):
        read_id(pickle.dumps(content))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_group_of_one_broadcasts() -> None:
    device = torch.device("cuda", 0)
    group = NcclGroup(new_unique_id(), 0, 1, device, 60.0)
    tensor = torch.arange(1000, device=device)
    group.broadcast(tensor)
    assert torch.equal(tensor.cpu(), torch.arange(1000))
    group.close()
    group.close()
