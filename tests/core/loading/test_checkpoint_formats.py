"""What a checkpoint format of a plugin returns is checked where it is called."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from jackfield import hookimpl
from jackfield.core.config import EngineConfig
from jackfield.core.errors import PluginError
from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.registry import Plugins, load_plugins
from jackfield.core.text.tokenizer import Tokenizer


class Embedded:
    """The embedded model's configuration and tokenizer for any folder with mine.json."""

    config_file: ClassVar[Any] = "mine.json"
    tokenizer_file: ClassVar[Any] = "mine.json"
    load_format: ClassVar[Any] = "dummy"

    @staticmethod
    def read_config(folder: Path) -> Any:
        config = EngineConfig(model=str(EMBEDDED_MODEL), device="cpu")
        return resolve_model_config(config).hf_config.to_dict()

    @staticmethod
    def read_chat_templates(folder: Path) -> Any:
        return {"default": "{{ messages }}"}

    @staticmethod
    def read_tokenizer(folder: Path, chat_templates: Mapping[str, str]) -> Any:
        return Tokenizer.load(str(EMBEDDED_MODEL))


def plugins_with(**changes: Any) -> Plugins:
    changed = type("Changed", (Embedded,), changes)

    class Plugin:
        jackfield_api = 3

        @hookimpl
        def register_checkpoint_formats(self, registry: Any) -> None:
            registry.add("mine", changed)

    return load_plugins(extra=[Plugin()])


def read(folder: Path, plugins: Plugins) -> None:
    (folder / "mine.json").touch()
    resolve_model_config(EngineConfig(model=str(folder), device="cpu"), plugins)
    Tokenizer.load(str(folder), formats=plugins["checkpoint_format"])


def test_a_format_is_read(tmp_path: Path) -> None:
    read(tmp_path, plugins_with())


@pytest.mark.parametrize(
    ("method", "result", "message"),
    [
        ("read_config", None, "None, which is no dict"),
        ("read_chat_templates", ["{{ messages }}"], "no mapping of texts"),
        ("read_chat_templates", {"default": None}, "no mapping of texts"),
        ("read_tokenizer", "tokenizer.json", "no Tokenizer"),
    ],
)
def test_another_result_than_the_contract_has_names_the_method(
    method: str, result: Any, message: str, tmp_path: Path
) -> None:
    plugins = plugins_with(**{method: staticmethod(lambda *_: result)})
    with pytest.raises(PluginError, match=rf"'mine' of .* failed in {method}: .*{message}"):
        read(tmp_path, plugins)


@pytest.mark.parametrize("field", ["config_file", "tokenizer_file", "load_format"])
@pytest.mark.parametrize("value", [None, 3, "", "../params.json"])
def test_a_name_that_is_none_is_refused(field: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=f"'mine' of .*its {field} is no name"):
        read(tmp_path, plugins_with(**{field: value}))
