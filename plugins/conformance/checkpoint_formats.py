"""`CheckpointFormatKit`: whether a checkpoint format reads a configuration and a tokenizer.

    class TestMine(CheckpointFormatKit):
        name = "mine"                                 # as registered: `--config-format mine`

        def write(self, folder):                      # a tiny checkpoint in your format
            (folder / "mine.cfg").write_text(...)
            (folder / "mine.tok").write_bytes(...)

The weights are the loader's, which `WeightLoaderKit` is for.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from ...core.config import EngineConfig
from ...core.errors import JackfieldError
from ...core.loading.model_config import ModelConfig, resolve_model_config
from ...core.registration.checkpoint_formats import config_format, tokenizer_format
from ...core.text.chat_template import ChatTemplate
from ...core.text.tokenizer import Tokenizer
from .kit import Kit

TEXTS = ("Hello, world!", "  two  spaces\n\n", "naïve façade 漢字 🙂", "x = {'a': 1}\t# 12.5%")


class CheckpointFormatKit(Kit):
    """Subclass it, and implement how a checkpoint is written."""

    kind = "checkpoint_format"

    def write(self, folder: Path) -> None:
        """Write the files of the configuration and of the tokenizer."""
        pytest.skip("the kit was not told how to write a checkpoint: give it write")

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        """A checkpoint without tokenizer.json; without config.json if the format has another."""
        self.write(tmp_path)
        return tmp_path

    def resolve(self, folder: Path) -> ModelConfig:
        """Read the configuration as an engine does."""
        return resolve_model_config(EngineConfig(model=str(folder), device="cpu"), self.plugins())

    def tokenizer(self, folder: Path, **options: Any) -> Tokenizer:
        """Read the tokenizer as an engine does."""
        return Tokenizer.load(str(folder), formats=self.plugins()[self.kind], **options)

    # -------------------------------------------------------------- tests

    def test_auto_knows_the_files(self, folder: Path) -> None:
        """The usual files come first where they are."""
        formats = self.plugins()[self.kind]
        if self.registered().config_file != "config.json":
            assert config_format(formats, "auto", folder) == self.name
        assert tokenizer_format(formats, "auto", folder) == self.name
        for file in ("config.json", "tokenizer.json"):
            (folder / file).write_text("{}")
        assert config_format(formats, "auto", folder) is None
        assert tokenizer_format(formats, "auto", folder) is None

    def test_the_configuration_is_that_of_a_config_json(
        self, folder: Path, tmp_path_factory: pytest.TempPathFactory
    ) -> None:
        """What is returned, written as config.json, is read as the same model."""
        content = self.registered().read_config(folder)
        other = tmp_path_factory.mktemp("usual")
        (other / "config.json").write_text(json.dumps(content))
        ours, usual = self.resolve(folder), self.resolve(other)
        for name in (
            "architecture", "vocab_size", "max_model_len", "eos_token_ids", "quantization_config",
            "num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim",
        ):  # fmt: skip
            assert getattr(ours, name) == getattr(usual, name), name
        assert ours.eos_token_ids, "it names no token that ends a text"
        assert ours.architecture in self.plugins()["model"]

    def test_the_weight_loader_is_registered(self, folder: Path) -> None:
        assert self.resolve(folder).load_format in self.plugins()["weight_loader"]

    def test_texts_come_back(self, folder: Path) -> None:
        tokenizer, config = self.tokenizer(folder), self.resolve(folder)
        for text in TEXTS:
            tokens = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
            assert tokenizer.decode(tokens) == text
            assert max(tokens) < config.vocab_size, "a token that the model does not have"
        assert tokenizer.eos_token_id in config.eos_token_ids

    def test_chat_templates_are_rendered(self, folder: Path) -> None:
        """A given template is taken instead."""
        tokenizer = self.tokenizer(folder)
        if tokenizer.chat_templates:
            template = ChatTemplate(tokenizer.chat_templates, tokenizer)
            chat = [{"role": "user", "content": TEXTS[0]}]
            assert TEXTS[0] in template.render(chat)
            assert TEXTS[0] in tokenizer.decode(template.render_tokens(chat))
        given = self.tokenizer(folder, chat_template="{{ mine }}")
        assert given.chat_templates == {"default": "{{ mine }}"}

    def test_a_checkpoint_is_only_read(self, folder: Path) -> None:
        before = {file.name: file.read_bytes() for file in folder.iterdir()}
        self.resolve(folder)
        self.tokenizer(folder)
        assert {file.name: file.read_bytes() for file in folder.iterdir()} == before

    @pytest.mark.parametrize("which", ["config_file", "tokenizer_file"])
    def test_damaged_files_are_named(self, folder: Path, which: str) -> None:
        """A file that ends too early, or is empty, is an error of the checkpoint."""
        file = folder / getattr(self.registered(), which)
        whole = file.read_bytes()
        read = self.resolve if which == "config_file" else self.tokenizer
        for part in (whole[: len(whole) // 2], b""):
            file.write_bytes(part)
            with pytest.raises(JackfieldError) as caught:
                read(folder)
            assert file.name in str(caught.value)
