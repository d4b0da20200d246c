"""`AdapterFormatKit`: whether an adapter format reads what it says; `AdapterResolverKit`: whether a
resolver finds nothing for names that are none.

    class TestMine(AdapterFormatKit):
        name = "mine"                                 # as registered

        def write(self, folder):                      # a small adapter in your form
            (folder / "mine.bin").write_bytes(...)
"""

from __future__ import annotations

import asyncio
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from ...core.adapters.file import AdapterFile
from ...core.config import EngineConfig
from ...core.errors import JackfieldError
from ...core.lora_request import MAX_NAME_LENGTH
from .kit import Kit

HOSTILE = (
    "..", ".", "/", "~", "../..", "/etc/passwd", "a/../../..", "a" * MAX_NAME_LENGTH,
    "a/" * (MAX_NAME_LENGTH // 2), "%2e%2e%2f", "a b", "漢字", "'; drop table", "file:///etc",
    "no such adapter",
)  # fmt: skip
"""Names that a client may send."""


class AdapterFormatKit(Kit):
    """Subclass it, and implement how an adapter is written."""

    kind = "adapter_format"

    def write(self, folder: Path) -> None:
        """Write a small adapter into an empty folder, always the same one."""
        pytest.skip("the kit was not told how to write an adapter: give it write")

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """An adapter."""
        folder = tmp_path / "adapter"
        folder.mkdir()
        self.write(folder)
        return folder

    def place(self, folder: Path) -> Path:
        """Return the path of the adapter in a folder: its only file where the form is a file."""
        return folder if self.registered().is_at(folder) else next(folder.iterdir())

    def read(self, folder: Path) -> AdapterFile:
        """Read an adapter."""
        file: AdapterFile = self.registered().read(self.place(folder))
        return file

    # -------------------------------------------------------------- tests

    def test_it_knows_its_own_by_names_of_files(self, folder: Path, tmp_path: Path) -> None:
        registered = self.registered()
        assert registered.is_at(self.place(folder)) is True
        (tmp_path / "empty").mkdir()
        (tmp_path / "other").mkdir()
        (tmp_path / "other" / "config.json").write_text("{}")
        for name in ("empty", "other", "other/config.json", "no such folder"):
            assert registered.is_at(tmp_path / name) is False, name

    def test_tensors_have_the_shapes_that_are_stated(self, folder: Path) -> None:
        """Tensors may be read again, and are finite."""
        file = self.read(folder)
        assert file.low_rank or file.experts or file.replaced or file.token_rows
        for low in file.low_rank:
            for _ in range(2):
                a, b = low.a(), low.b()
                assert a.shape == (low.rank, low.in_features), low.name
                assert b.shape == (low.out_features, low.rank), low.name
                assert torch.isfinite(a).all() and torch.isfinite(b).all()
        for experts in file.experts:
            assert experts.a().shape[:2] == (experts.num_experts, experts.rank), experts.name
            assert experts.b().shape[::2] == (experts.num_experts, experts.rank), experts.name
        for rows in file.token_rows:
            assert len(rows.rows()) == len(rows.token_ids), rows.name

    def test_the_digest_is_that_of_the_content(self, folder: Path, tmp_path: Path) -> None:
        """Not of the path."""
        copy = tmp_path / "copy"
        shutil.copytree(folder, copy)
        digest = self.read(folder).digest
        assert digest and digest == self.read(copy).digest == self.read(folder).digest

    def test_an_adapter_is_only_read(self, folder: Path) -> None:
        before = {file.name: file.read_bytes() for file in folder.iterdir()}
        for low in self.read(folder).low_rank:
            low.a(), low.b()
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before

    def test_damaged_files_are_refused(self, folder: Path) -> None:
        """A file that ends too early is an error that a request can have."""
        for file in list(folder.iterdir()):
            whole = file.read_bytes()
            for part in (whole[: len(whole) // 2], b""):
                file.write_bytes(part)
                with pytest.raises(JackfieldError):
                    for low in self.read(folder).low_rank:
                        low.a(), low.b()
            file.write_bytes(whole)


class AdapterResolverKit(Kit):
    """Whether a resolver can be asked for anything."""

    kind = "adapter_resolver"
    options: ClassVar[dict[str, Any]] = {}
    """Fields of EngineConfig that it reads."""

    def resolver(self, **more: Any) -> Any:
        """Create it as an engine does."""
        return self.registered()(EngineConfig(**{**self.options, **more}))

    def test_names_that_are_none_are_unknown(self) -> None:
        """Not an error, and nothing outside."""
        resolver = self.resolver()
        for name in HOSTILE:
            assert asyncio.run(resolver.resolve(name, "base")) is None, name
