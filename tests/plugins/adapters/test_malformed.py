"""Adapters that are refused, each with the field or the tensor's name; nothing in them is run."""

from __future__ import annotations

import json
import os
import pickle
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from adapters_made import Q_PROJ, q_proj_tensors, write_adapter

from jackfield.core.errors import ConfigError
from jackfield.plugins.adapters import peft_config
from jackfield.plugins.adapters.peft import PeftFormat
from jackfield.plugins.adapters.peft_config import MAX_BYTES
from jackfield.plugins.adapters.safetensors_file import MAX_HEADER, TensorFile

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
A, B = f"{Q_PROJ}.lora_A.weight", f"{Q_PROJ}.lora_B.weight"
EXPERTS = "base_model.model.model.layers.0.mlp.experts"


def refused(folder: Path) -> str | None:
    """Return the field for which an adapter is refused."""
    with pytest.raises(ConfigError) as caught:
        PeftFormat.read(folder)
    return caught.value.param


FIELDS: list[tuple[str, Any]] = [
    ("peft_type", None), ("peft_type", "IA3"), ("peft_type", "ADALORA"), ("peft_type", ["LORA"]),
    ("r", 0), ("r", -2), ("r", 2.0), ("r", "2"), ("r", True), ("r", 1 << 40), ("r", 4),
    ("lora_alpha", "16"), ("lora_alpha", None), ("lora_alpha", 10**400), ("lora_alpha", [1]),
    ("rank_pattern", {"q_proj": 3}), ("rank_pattern", {"q_proj": "2"}), ("rank_pattern", ["q"]),
    ("rank_pattern", {"(": 2}), ("rank_pattern", {"(?=a)a*": 2}),
    ("rank_pattern", {f"k{number}": 2 for number in range(5000)}),
    ("alpha_pattern", {"q_proj": None}), ("alpha_pattern", {"(a+)+$": 1, "x": {}}),
    ("use_rslora", "yes"), ("bias", "some"), ("use_dora", True), ("lora_bias", True),
    ("init_lora_weights", "pissa"), ("init_lora_weights", "pissa_niter_4"),
    ("init_lora_weights", "olora"), ("init_lora_weights", "corda"), ("init_lora_weights", "loftq"),
    ("init_lora_weights", "lora_ga"), ("init_lora_weights", "newest"), ("init_lora_weights", 3),
    ("layer_replication", [[0, 2], [1, 3]]), ("use_qalora", True), ("use_bdlora", {"nblocks": 2}),
    ("kasa_config", {"beta": 1e-4}), ("arrow_config", {"top_k": 2}),
    ("monteclora_config", {"num_samples": 2}), ("use_mora", True), ("use_something", True),
    ("something_config", {"a": 1}), ("modules_to_save", "lm_head"),
    ("modules_to_save", ["lm_head"]), ("target_modules", 7), ("target_modules", [7]),
    ("target_parameters", "experts.down_proj"),
    ("trainable_token_indices", [3]), ("trainable_token_indices", {"embed_tokens": [3]}),
    ("trainable_token_indices", [-1]), ("trainable_token_indices", [3, 3]),
    ("trainable_token_indices", "3"), ("alora_invocation_tokens", []),
    ("invocation_string", "<|end|>"),
    ("modules_to_save", ["norm"] * 1025), ("target_parameters", ["gate.weight"] * 1025),
    ("alora_invocation_tokens", ["a"]), ("alora_invocation_tokens", 5),
]  # fmt: skip


@pytest.mark.parametrize(
    ("field", "value"), FIELDS, ids=lambda value: str(value)[:30].replace("/", "")
)
def test_a_field_that_is_not_served_is_named(field: str, value: Any, tmp_path: Path) -> None:
    assert refused(write_adapter(tmp_path, q_proj_tensors(), **{field: value})) == field


def experts(*, base: bool = True, **sizes: int) -> dict[str, torch.Tensor]:
    """Return tensors of two nested parameters of 3 experts, of rank 2."""
    width = {"inner_in": 6, "inner_out": 8, "outer_in": 4, "outer_out": 6, **sizes}
    tensors = {
        f"{EXPERTS}.lora_A.weight": torch.ones(6, width["outer_in"]),
        f"{EXPERTS}.lora_B.weight": torch.ones(width["outer_out"], 6),
    }
    if base:
        tensors[f"{EXPERTS}.base_layer.lora_A.weight"] = torch.ones(6, width["inner_in"])
        tensors[f"{EXPERTS}.base_layer.lora_B.weight"] = torch.ones(width["inner_out"], 6)
    return tensors


PARAMETERS = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
NAN = {A: torch.tensor([[0.0] * 5 + [float("nan")], [0.0] * 6])}
FILES: dict[str, tuple[dict[str, torch.Tensor], dict[str, Any], str]] = {
    "nothing": ({}, {}, TENSORS),
    "no B": ({A: torch.ones(2, 6)}, {}, A),
    "1-D": ({A: torch.ones(12)}, {}, A),
    "no rows": ({B: torch.ones(0, 2)}, {}, B),
    "convolution": ({A: torch.ones(2, 6, 1, 1)}, {}, A),
    "rank of B": ({B: torch.ones(10, 3)}, {}, "r"),
    "whole numbers": ({A: torch.ones(2, 6, dtype=torch.int32)}, {}, A),
    "NaN": (NAN, {}, "model.layers.0.self_attn.q_proj: A"),
    "infinite": (
        {B: torch.full((10, 2), -torch.inf)}, {}, "model.layers.0.self_attn.q_proj: B",
    ),
    "NaN in a copy": (
        {"base_model.model.lm_head.weight": torch.full((3, 6), torch.nan)},
        {"modules_to_save": ["lm_head"]}, "lm_head.weight",
    ),
    "bias of A": ({f"{Q_PROJ}.lora_A.bias": torch.ones(2)}, {}, f"{Q_PROJ}.lora_A.bias"),
    "bias of B, not said": ({f"{Q_PROJ}.lora_B.bias": torch.ones(10)}, {}, "lora_bias"),
    "size of a bias": (
        {f"{Q_PROJ}.lora_B.bias": torch.ones(9)}, {"lora_bias": True}, f"{Q_PROJ}.lora_B.bias",
    ),
    "magnitude, not said": ({f"{Q_PROJ}.lora_magnitude_vector": torch.ones(10)}, {}, "use_dora"),
    "size of a magnitude": (
        {f"{Q_PROJ}.lora_magnitude_vector": torch.ones(1, 10)}, {"use_dora": True},
        f"{Q_PROJ}.lora_magnitude_vector",
    ),
    "DoRA and bias": ({}, {"use_dora": True, "lora_bias": True}, "lora_bias"),
    "DoRA and invocation": (
        {}, {"use_dora": True, "alora_invocation_tokens": [3]}, "alora_invocation_tokens",
    ),
    "KaSA": ({f"{Q_PROJ}.lora_diag": torch.ones(2)}, {}, f"{Q_PROJ}.lora_diag"),
    "two adapters": (
        {f"{Q_PROJ}.lora_A.one.weight": torch.ones(2, 6),
         f"{Q_PROJ}.lora_B.two.weight": torch.ones(10, 2)}, {}, TENSORS,
    ),
    "one tensor twice": (
        {A.removeprefix("base_model.model."): torch.ones(2, 6)}, {},
        A.removeprefix("base_model.model."),
    ),
    "name that does not print": ({"lm_head\n.weight": torch.ones(1)}, {}, "lm_head\n.weight"),
    "copy and change": (
        {"base_model.model.model.layers.0.self_attn.q_proj.weight": torch.ones(10, 6)},
        {"modules_to_save": ["q_proj"]}, "modules_to_save",
    ),
    "copy and invocation": (
        {"base_model.model.lm_head.weight": torch.ones(3, 6)},
        {"modules_to_save": ["lm_head"], "alora_invocation_tokens": [3]},
        "alora_invocation_tokens",
    ),
    "rows of other tokens": (
        {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta":
         torch.ones(2, 6)}, {"trainable_token_indices": [1, 2, 3]}, "trainable_token_indices",
    ),
    "rows without tokens": (
        {"base_model.model.model.embed_tokens.token_adapter.trainable_tokens_delta":
         torch.ones(2, 6)}, {}, "trainable_token_indices",
    ),
    "parameters too many": (experts(base=False), PARAMETERS, "target_parameters"),
    "parameters not said": (experts(), {}, "target_parameters"),
    "parameters of unknown order": (
        experts(), {"target_parameters": ["experts.in", "experts.out"]}, "target_parameters",
    ),
    "parameters that do not fit": (experts(outer_out=5), PARAMETERS, "target_parameters"),
    "rank of parameters": (experts(), {**PARAMETERS, "r": 4}, "r"),
    "bias of experts": (
        experts(base=False), {"target_parameters": ["experts.down_proj_bias"]}, "target_parameters",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", FILES)
def test_a_tensor_that_is_not_served_is_named(case: str, tmp_path: Path) -> None:
    tensors, settings, param = FILES[case]
    without = case in ("nothing", "no B", "two adapters") or EXPERTS in next(iter(tensors), "")
    all_tensors = tensors if without else {**q_proj_tensors(), **tensors}
    assert refused(write_adapter(tmp_path, all_tensors, **settings)) == param


# Files that are no files of an adapter.


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"[]", id="list"),
        pytest.param(b'{"r": NaN, "peft_type": "LORA"}', id="NaN"),
        pytest.param(b'{"a":' * 100_000, id="deep and open"),
        pytest.param(b'{"a":' * 200 + b"1" + b"}" * 200, id="deep"),
        pytest.param(b'{"r": ' + b"9" * 10_000 + b"}", id="many digits"),
        pytest.param(b"\xff\xfe{}", id="no UTF-8"),
        pytest.param(b" " * (MAX_BYTES + 1), id="long"),
    ],
)
def test_settings_that_cannot_be_read_name_their_file(content: bytes, tmp_path: Path) -> None:
    write_adapter(tmp_path, q_proj_tensors())
    (tmp_path / CONFIG).write_bytes(content)
    assert refused(tmp_path) == CONFIG


def with_header(header: Any, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def entry(shape: list[int], begin: int, end: int, dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.mark.parametrize(
    "content",
    [
        pytest.param(b"", id="empty"),
        pytest.param(b"\x01", id="short"),
        pytest.param(with_header({}, length=1 << 62), id="header beyond the file"),
        pytest.param(struct.pack("<Q", MAX_HEADER + 1), id="header too long"),
        pytest.param(with_header(b"[]"), id="no object"),
        pytest.param(with_header(b"{" * 1000), id="no JSON"),
        pytest.param(with_header(b'{"a":' + b"[" * 100_000), id="deep"),
        pytest.param(with_header({"a": {"dtype": "F32"}}), id="no shape"),
        pytest.param(with_header({"a": entry([2], 0, 8)}), id="data missing"),
        pytest.param(with_header({"a": entry([1], 0, 4)}, bytes(8)), id="data left over"),
        pytest.param(with_header({"a": entry([2], 0, 4)}, bytes(4)), id="shape and size"),
        pytest.param(with_header({"a": entry([-1], 0, 4)}, bytes(4)), id="negative"),
        pytest.param(with_header({"a": entry([1 << 40] * 8, 0, 4)}, bytes(4)), id="giant"),
        pytest.param(with_header({"a": entry([1], 4, 8)}, bytes(8)), id="hole"),
        pytest.param(
            with_header({"a": entry([1], 0, 4), "b": entry([1], 0, 4)}, bytes(4)), id="shared"
        ),
        pytest.param(with_header({"a": entry([1], 0, 4, "F33")}, bytes(4)), id="unknown type"),
        pytest.param(with_header({"a": entry([1.5], 0, 4)}, bytes(4)), id="fraction"),  # type: ignore[list-item]
    ],
)  # fmt: skip
def test_tensors_that_cannot_be_read_name_their_file(content: bytes, tmp_path: Path) -> None:
    write_adapter(tmp_path, q_proj_tensors())
    (tmp_path / TENSORS).write_bytes(content)
    assert refused(tmp_path) == TENSORS


@pytest.mark.parametrize("name", [CONFIG, TENSORS])
@pytest.mark.parametrize("kind", ["pipe", "device", "folder", "outside", "loop", "missing"])
def test_only_regular_files_of_the_folder_are_opened(name: str, kind: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "adapter", q_proj_tensors())
    file = folder / name
    (tmp_path / "outside").write_bytes(file.read_bytes())
    file.unlink()
    make: dict[str, Callable[[], object]] = {
        "pipe": lambda: os.mkfifo(file),
        "device": lambda: file.symlink_to("/dev/zero"),
        "folder": file.mkdir,
        "outside": lambda: file.symlink_to(tmp_path / "outside"),
        "loop": lambda: file.symlink_to(file),
        "missing": lambda: None,
    }
    make[kind]()
    assert refused(folder) == name


def test_links_of_the_folder_and_of_the_hubs_cache_are_followed(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "models--a--b" / "snapshots" / "1", q_proj_tensors())
    digest = PeftFormat.read(folder).digest
    blobs = tmp_path / "models--a--b" / "blobs"
    blobs.mkdir()
    (folder / TENSORS).rename(blobs / "0a1b")
    (folder / TENSORS).symlink_to("../../blobs/0a1b")
    (folder / CONFIG).rename(folder / "other.json")
    (folder / CONFIG).symlink_to("other.json")
    assert PeftFormat.read(folder).digest == digest


class Bomb:
    def __reduce__(self) -> Any:
        return os.mkdir, ("exploded",)


def test_pickles_are_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write_adapter(tmp_path / "adapter", q_proj_tensors())
    (tmp_path / "adapter" / TENSORS).unlink()
    (tmp_path / "adapter" / "adapter_model.bin").write_bytes(pickle.dumps(Bomb()))
    assert refused(tmp_path / "adapter") == "adapter_model.bin"
    assert not (tmp_path / "exploded").exists()


def test_several_files_are_refused(tmp_path: Path) -> None:
    write_adapter(tmp_path, q_proj_tensors())
    (tmp_path / TENSORS).rename(tmp_path / "adapter_model-00001-of-00002.safetensors")
    assert refused(tmp_path) == TENSORS


def test_a_file_that_is_replaced_changes_nothing(tmp_path: Path) -> None:
    (change,) = PeftFormat.read(write_adapter(tmp_path, q_proj_tensors())).low_rank
    first = change.a()
    (tmp_path / TENSORS).unlink()
    write_adapter(tmp_path, {key: tensor + 1 for key, tensor in q_proj_tensors().items()})
    assert torch.equal(change.a(), first)


def write_to(path: Path, how: str) -> None:
    with path.open("r+b") as file:
        if how == "written":
            file.seek(-4, os.SEEK_END)
            file.write(bytes(4))
        else:
            file.truncate(100)
    os.utime(path, ns=(1, 1))


@pytest.mark.parametrize("how", ["written", "cut off"])
def test_a_file_that_is_written_to_before_it_is_read_is_refused(how: str, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, q_proj_tensors())
    file = TensorFile(folder / TENSORS, folder)
    write_to(folder / TENSORS, how)
    with pytest.raises(ConfigError) as caught:
        file.read(next(iter(file.entries)))
    assert caught.value.param == TENSORS


@pytest.mark.parametrize("how", ["written", "cut off"])
def test_what_is_computed_with_is_what_the_digest_is_of(how: str, tmp_path: Path) -> None:
    (change,) = PeftFormat.read(write_adapter(tmp_path, q_proj_tensors())).low_rank
    first = change.b().clone()
    write_to(tmp_path / TENSORS, how)
    assert torch.equal(change.b(), first)


def test_an_invocation_string_with_its_tokens_is_one_of_both(tmp_path: Path) -> None:
    fields = {"invocation_string": "<|end|>", "alora_invocation_tokens": [4, 5]}
    assert PeftFormat.read(write_adapter(tmp_path, q_proj_tensors(), **fields)).invocation_tokens


def test_an_expression_of_targets_takes_no_longer_than_its_share(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peft_config, "MAX_STEPS", 10_000)
    tensors: dict[str, torch.Tensor] = {}
    for layer in range(50):
        tensors |= q_proj_tensors(Q_PROJ.replace("0", str(layer)))
    write_adapter(tmp_path, tensors, target_modules="(.*)*" * 40 + "q_proj")
    settings = peft_config.read_settings(tmp_path)
    assert len(PeftFormat.read(tmp_path).low_rank) == 50
    answers = [settings.targets(f"model.layers.{layer}.q_proj") for layer in range(50)]
    assert answers[0] is True and answers[-1] is None
