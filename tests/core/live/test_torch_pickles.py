"""Handles in pickles are read as data; a pickle that does anything else is refused."""

from __future__ import annotations

import os
import pickle
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
import torch

from jackfield.core.errors import InvalidRequest
from jackfield.core.live.torch_pickles import read_sglang_tensors, read_vllm_handles
from jackfield.core.live.worker_jobs import TensorPart
from jackfield.core.nn.operations import Operations

PARTS = (TensorPart("a", "bfloat16", (2, 3)),)
HANDLE = (
    torch.nn.Parameter, torch.Size([2, 3]), (3, 1), 4, torch.storage.TypedStorage, torch.bfloat16,
    0, b"h" * 64, 1024, 256, True, b"/torch_1", 7, b"e" * 64, True,
)  # fmt: skip


def text(data: bytes) -> str:
    return b64encode(data).decode()


@pytest.mark.parametrize("protocol", range(3, pickle.HIGHEST_PROTOCOL + 1))
def test_a_handle_of_torch_is_read(protocol: int) -> None:
    sent = text(pickle.dumps([{"GPU-7": HANDLE}], protocol=protocol))
    [bucket] = read_vllm_handles(sent, PARTS, None)
    place = bucket.places["GPU-7"]
    assert bucket.parts == PARTS and place.dtype == "bfloat16" and place.shape == (2, 3)
    assert (place.strides, place.offset, place.handle) == ((3, 1), 4, b"h" * 64)
    assert (place.storage_bytes, place.storage_begin) == (1024, 256)
    assert (place.counter, place.counter_place, place.event) == (b"/torch_1", 7, b"e" * 64)
    assert place.waits


def test_each_rank_has_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    second = (*HANDLE[:7], b"i" * 64, *HANDLE[8:])
    sent = [text(pickle.dumps([("a", handle)])) for handle in (HANDLE, second)]
    [bucket] = read_sglang_tensors(sent, flattened=False)
    assert bucket.parts == PARTS
    assert {name: place.handle[:1] for name, place in bucket.places.items()} == {
        "rank 0": b"h", "rank 1": b"i",
    }  # fmt: skip
    other = text(pickle.dumps([("b", HANDLE)]))
    with pytest.raises(InvalidRequest, match="ranks are sent different tensors"):
        read_sglang_tensors([sent[0], other], flattened=False)


class Runs:
    """Becomes a call of a function when it is read."""

    def __init__(self, function: Any, *args: Any) -> None:
        self._call = function, args

    def __reduce__(self) -> Any:
        return self._call


@pytest.mark.parametrize(
    "make",
    [
        lambda mark: pickle.dumps(Runs(os.mkdir, mark)),
        lambda mark: pickle.dumps(Runs(eval, f"__import__('os').mkdir({mark!r})")),
        lambda mark: pickle.dumps(Runs(getattr, "text", "upper")),
        lambda mark: pickle.dumps(torch.load),
        lambda mark: pickle.dumps([{"GPU-1": torch.ones(2)}]),
        lambda mark: pickle.dumps(Operations),
        lambda mark: b"ctorch\nbfloat16\n(tR.",  # A call of a type.
        lambda mark: b"ctorch\nSize\n}\x8c\x04nameK\x01sb.",  # An attribute is set.
        lambda mark: b"ctorch\nSize\n(N}\x8c\x05_makeK\x01stb.",  # In a slot.
        lambda mark: b"\x80\x04P1\n.",  # A persistent id.
        lambda mark: b"\x80\x04\x82\x01.",  # An extension of the registry.
        lambda mark: b"]" * 10 + b"a" * 9,
        lambda mark: b"",
    ],
)  # fmt: skip
def test_whatever_else_is_refused(make: Any, tmp_path: Path) -> None:
    mark = str(tmp_path / "ran")
    data = make(mark)
    for read in (
        lambda: read_vllm_handles(text(data), PARTS, None),
        lambda: read_sglang_tensors([text(data)], flattened=False),
        lambda: read_sglang_tensors([text(data)], flattened=True),
    ):
        with pytest.raises(InvalidRequest) as refused:
            read()
        assert refused.value.param in ("ipc_handles_pickled", "serialized_named_tensors")
    assert not Path(mark).exists()


NESTED = b"K\x01\x94" + b"".join(b"h%ch%c\x86\x94" % (level, level) for level in range(20))
"""A tuple of tuples, of which level n has 2 ** n numbers, and as many hashes."""


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (NESTED + b"}h\x14K\x01s.", "other keys than texts"),
        (NESTED + b"}(h\x14K\x01u.", "other keys than texts"),
        (NESTED + b"h\x14\x8c\x04Size\x93.", "by what is no text"),
        (b"N" * (1 << 20) + b".", "more than 1048576 instructions"),
    ],
)
def test_what_takes_forever_to_read_is_refused(data: bytes, reason: str) -> None:
    with pytest.raises(InvalidRequest, match=reason):
        read_vllm_handles(text(data), PARTS, None)


@pytest.mark.parametrize(
    ("place", "value"),
    [(1, torch.Size([2] * 17)), (1, (1 << 61, 1 << 61)), (2, (3,)), (3, -1), (5, "bfloat16"),
     (7, "text"), (7, b"h" * 5000), (8, True), (9, 1.5), (12, None)],
)  # fmt: skip
def test_values_of_other_kinds_are_refused(place: int, value: Any) -> None:
    handle = (*HANDLE[:place], value, *HANDLE[place + 1 :])
    with pytest.raises(InvalidRequest, match=r"^ipc_handles_pickled: "):
        read_vllm_handles(text(pickle.dumps([{"GPU-7": handle}])), PARTS, None)
