"""Adapters over HTTP: as models of every route, loaded and unloaded, and whose they are."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers
from adapters_made import LINEAR, adapted_model, make_adapter
from serving import MODEL, Server, engine_config, running, save_random

from jackfield.entrypoints.http.options import BatchOptions, ServerOptions

NAMES = ("first", "second", "third")
PROMPT = "The quick brown fox"
GREEDY: dict[str, Any] = {"temperature": 0, "max_tokens": 8, "extra_body": {"ignore_eos": True}}
ENGINE: dict[str, Any] = {
    "dtype": "float32", "enable_lora": True, "max_loras": 2, "max_cpu_loras": 4,
}  # fmt: skip


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def folder(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of adapters by NAMES."""
    folder = tmp_path_factory.mktemp("adapters")
    model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    for seed, name in enumerate(NAMES):
        make_adapter(model, folder / name, seed=seed, target_modules=LINEAR)
    return folder


@pytest.fixture(scope="module")
def server(checkpoint: Path, folder: Path, tmp_path_factory: Any) -> Iterator[Server]:
    """Without keys: `first` is there from the start, `third` is found by its name."""
    found = tmp_path_factory.mktemp("found")
    make_adapter(
        transformers.AutoModelForCausalLM.from_pretrained(checkpoint), found / "found", seed=9,
        target_modules=["q_proj"],
    )  # fmt: skip
    config = engine_config(
        checkpoint,
        lora_modules=(f"first={folder / 'first'}",),
        lora_resolver_cache_dir=str(found),
        **ENGINE,
    )
    batches = BatchOptions(tmp_path_factory.mktemp("batches"))
    with running(config, ServerOptions(enable_admin=True, batches=batches)) as running_server:
        yield running_server


def client(server: Server, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=server.url + "/v1", api_key=key, max_retries=0)


def load(server: Server, name: str, path: Path | str, key: str = "none", **body: Any) -> Any:
    return httpx.post(
        server.url + "/v1/load_lora_adapter",
        json={"lora_name": name, "lora_path": str(path), **body},
        headers={"Authorization": f"Bearer {key}"},
        timeout=60,
    )


def unload(server: Server, name: str, key: str = "none") -> Any:
    return httpx.post(
        server.url + "/v1/unload_lora_adapter",
        json={"lora_name": name},
        headers={"Authorization": f"Bearer {key}"},
        timeout=60,
    )


def greedy(checkpoint: Path, adapter: Path | None, prompt: list[int], number: int) -> list[int]:
    """Return PEFT's tokens."""
    if adapter is None:
        model = transformers.AutoModelForCausalLM.from_pretrained(checkpoint)
    else:
        model = adapted_model(checkpoint, adapter)
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(number):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def test_an_adapter_s_name_as_the_model_gives_pefts_tokens(
    server: Server, checkpoint: Path, folder: Path
) -> None:
    for model, adapter in ((MODEL, None), ("first", folder / "first")):
        completion = client(server).completions.create(
            model=model, prompt=PROMPT, temperature=0, max_tokens=8,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        choice: Any = completion.choices[0]
        assert completion.model == model
        assert choice.token_ids == greedy(checkpoint, adapter, choice.prompt_token_ids, 8)


def test_adapters_are_loaded_used_replaced_and_unloaded(
    server: Server, checkpoint: Path, folder: Path
) -> None:
    answer = load(server, "second", folder / "second")
    assert (answer.status_code, answer.text) == (
        200, "Success: LoRA adapter 'second' added successfully.",
    )  # fmt: skip
    assert "text/plain" in answer.headers["Content-Type"]
    models = {model.id: model for model in client(server).models.list()}
    assert set(models) == {MODEL, "first", "second"}
    card = models["second"].to_dict()
    assert card["parent"] == MODEL and card["root"] == str(folder / "second")

    def tokens() -> Any:
        completion = client(server).completions.create(
            model="second", prompt=PROMPT, temperature=0, max_tokens=8,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )  # fmt: skip
        return completion.choices[0].to_dict()

    choice = tokens()
    prompt = choice["prompt_token_ids"]
    assert choice["token_ids"] == greedy(checkpoint, folder / "second", prompt, 8)
    twice = load(server, "second", folder / "third")
    assert twice.status_code == 400 and "load_inplace" in twice.json()["error"]["message"]
    assert load(server, "second", folder / "third", load_inplace=True).status_code == 200
    assert tokens()["token_ids"] == greedy(checkpoint, folder / "third", prompt, 8)
    gone = unload(server, "second")
    assert gone.text == "Success: LoRA adapter 'second' removed successfully."
    with pytest.raises(openai.NotFoundError):
        tokens()
    assert unload(server, "second").json()["error"]["type"] == "NotFoundError"
