"""The kit of checkpoint formats: Mistral's passes it, and planted bugs do not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mutants import Mutant, mutant_tests, subclass
from tekken_files import write_tekken

from jackfield.core.text.tokenizer import Tokenizer
from jackfield.plugins.conformance.checkpoint_formats import CheckpointFormatKit
from jackfield.plugins.loaders.mistral.format import MistralFormat

PARAMS = {
    "dim": 64, "n_layers": 2, "n_heads": 4, "n_kv_heads": 2, "head_dim": 16, "hidden_dim": 96,
    "norm_eps": 1e-5, "vocab_size": 400, "max_seq_len": 128,
}  # fmt: skip


class TestMistral(CheckpointFormatKit):
    name = "mistral"

    def write(self, folder: Path) -> None:
        (folder / "params.json").write_text(json.dumps(PARAMS))
        write_tekken(folder, "v13")


def changed(**fields: Any) -> staticmethod[[Path], dict[str, Any]]:
    """Return a `read_config` that says something else."""
    return staticmethod(lambda folder: MistralFormat.read_config(folder) | fields)


def forgets_the_template(folder: Path, chat_templates: Any) -> Tokenizer:
    return MistralFormat.read_tokenizer(folder, {"default": "{{ messages[0].content }}"})


def writes(folder: Path) -> dict[str, Any]:
    (folder / "cache").write_text("")
    return MistralFormat.read_config(folder)


def unnamed(folder: Path) -> dict[str, Any]:
    """Errors of JSON are left as they are."""
    json.loads((folder / "params.json").read_text())
    return MistralFormat.read_config(folder)


def stripped(folder: Path, chat_templates: Any) -> Tokenizer:
    """White space around a text is lost."""
    tokenizer = MistralFormat.read_tokenizer(folder, chat_templates)
    decode = tokenizer.decode
    tokenizer.decode = lambda ids, **more: decode(ids, **more).strip()  # type: ignore[method-assign]
    return tokenizer


AUTO = "test_auto_knows_the_files"
CONFIG = "test_the_configuration_is_that_of_a_config_json"
LOADER, TEXTS = "test_the_weight_loader_is_registered", "test_texts_come_back"
CHATS, READ = "test_chat_templates_are_rendered", "test_a_checkpoint_is_only_read"
DAMAGED = "test_damaged_files_are_named"
MUTANTS = {
    "texts are stripped": Mutant(
        subclass(MistralFormat, read_tokenizer=staticmethod(stripped)), (TEXTS,)
    ),
    "heads that are not there": Mutant(
        subclass(MistralFormat, read_config=changed(num_attention_heads=0)),
        (CONFIG,),
        perhaps=(LOADER, TEXTS, READ),
    ),
    "an unknown loader": Mutant(subclass(MistralFormat, load_format="mine"), (LOADER,)),
    "another file": Mutant(
        subclass(MistralFormat, config_file="other.json"),
        (AUTO, CONFIG, LOADER, TEXTS, READ, DAMAGED),
    ),
    "a small vocabulary": Mutant(
        subclass(MistralFormat, read_config=changed(vocab_size=60)), (TEXTS,)
    ),
    "an unknown model": Mutant(
        subclass(MistralFormat, read_config=changed(architectures=["NoModel"])), (CONFIG,)
    ),
    "no end": Mutant(
        subclass(MistralFormat, read_config=changed(eos_token_id=None)), (CONFIG, TEXTS)
    ),
    "its own template": Mutant(
        subclass(MistralFormat, read_tokenizer=staticmethod(forgets_the_template)), (CHATS,)
    ),
    "writes": Mutant(subclass(MistralFormat, read_config=staticmethod(writes)), (READ,)),
    "no name": Mutant(subclass(MistralFormat, read_config=staticmethod(unnamed)), (DAMAGED,)),
}


TestMutants = mutant_tests(TestMistral, MUTANTS, cheap=True)
