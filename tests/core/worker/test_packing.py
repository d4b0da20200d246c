"""Small arrays travel together: to the device, and back."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from jackfield.core.worker.packing import PackedUpload, to_host
from jackfield.core.worker.sampling.sampler import sample_outputs


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    return torch.device(request.param)


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


class Copies(TorchDispatchMode):
    """Counts copies, and all operations."""

    def __init__(self) -> None:
        super().__init__()
        self.copies = self.operations = 0

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        self.operations += function is not torch.ops.aten.detach.default  # Changes of the type.
        self.copies += function is torch.ops.aten.copy_.default
        return function(*args, **(kwargs or {}))


def test_a_samplers_outputs_come_back_in_one_copy(device: torch.device) -> None:
    outputs = sample_outputs(7, device)
    for number, part in enumerate(outputs):
        part.copy_(torch.arange(part.numel(), device=device).view(part.shape) + 1000 * number)
        assert part.data_ptr() % 16 == 0
    tensors = outputs._asdict()
    with Copies() as counted:
        copies = to_host(tensors)
    wait(device)
    assert counted.copies == 1
    for name, tensor in tensors.items():
        assert copies[name].dtype == tensor.cpu().numpy().dtype
        np.testing.assert_array_equal(copies[name], tensor.cpu().numpy())
    before = copies["rank"].tolist()
    outputs.rank.zero_()
    wait(device)
    assert copies["rank"].tolist() == before, "the next step overwrites the outputs"


def test_parts_of_shared_memory_come_back_as_they_are(device: torch.device) -> None:
    outputs = sample_outputs(6, device)
    for part in outputs:
        part.copy_(torch.arange(part.numel(), device=device).view(part.shape))
    tensors = {
        "none": outputs.top_ids[:, :0], "few": outputs.top_ids[:, :3], "rank": outputs.rank[2:5],
        "logprob": outputs.logprob[:4], "long": torch.arange(3, device=device),
        "empty": torch.zeros(5, 0, device=device),
    }  # fmt: skip
    copies = to_host(tensors)
    wait(device)
    assert sorted(copies) == sorted(tensors)
    for name, tensor in tensors.items():
        assert copies[name].shape == tensor.shape
        np.testing.assert_array_equal(copies[name], tensor.cpu().numpy())


def test_arrays_of_a_type_are_divided_together(device: torch.device) -> None:
    draw = np.random.default_rng(0)
    arrays = [
        draw.integers(0, 99, shape).astype(dtype)
        for shape, dtype in (
            (3, np.int64), ((3, 5), np.int32), (1, np.int64), (7, np.float32), (0, np.int32),
            ((2, 3, 1), np.int64), ((1, 9), np.int32),
        )
    ]  # fmt: skip
    pack = PackedUpload(device)
    for array in arrays:
        pack.add(array)
    with Copies() as counted:
        tensors = pack.send()
    for array, tensor in zip(arrays, tensors, strict=True):
        found = tensor.cpu().numpy()
        assert found.shape == array.shape and found.dtype == array.dtype
        np.testing.assert_array_equal(found, array)
        assert tensor.data_ptr() % 16 == 0 or not array.size
    # The buffer and its copy to a GPU, three for each of three types, and one for each array that
    # is not flat.
    assert counted.operations <= 1 + (device.type == "cuda") + 3 * 3 + 3
