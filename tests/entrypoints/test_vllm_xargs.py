"""Parameters of logits processors over HTTP: handed on, refused by name, told when they fail."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
import torch
from serving import running, save_random

from jackfield import EngineConfig, hookimpl
from jackfield.core.errors import InvalidRequest
from jackfield.core.protocols.logits_processors import (
    LogitsProcessor,
    LogitsProcessorSetup,
    ProcessedRows,
)
from jackfield.core.registry import Provenance, load_plugins
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.step import SlotStart


class Only(LogitsProcessor):
    parameters = frozenset({"only"})
    examples = ({"only": 70},)

    @classmethod
    def check(cls, params: SamplingParams) -> None:
        token = (params.extra_args or {})["only"]
        if not isinstance(token, int):
            raise InvalidRequest("vllm_xargs.only: must be a token id", param="vllm_xargs.only")

    def __init__(self, setup: LogitsProcessorSetup) -> None:
        self.tokens: dict[int, int] = {}

    def start(self, slot: int, request: SlotStart) -> bool:
        self.tokens[slot] = (request.params.extra_args or {}).get("only", -1)
        return self.tokens[slot] != -1

    def apply(self, logits: torch.Tensor, rows: ProcessedRows) -> torch.Tensor:
        expected = [self.tokens[slot] for slot in rows.slots]
        if 71 in expected:
            raise RuntimeError("boom")
        masked = torch.full_like(logits, -torch.inf)
        masked[range(len(expected)), expected] = 0.0
        return masked


class Plugin:
    @hookimpl
    def register_logits_processors(self, registry: Any) -> None:
        registry.add("only", Only)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("my-processors", "1.0", "mine"))
    folder = save_random(tmp_path_factory.mktemp("xargs"))
    config = EngineConfig(
        model=str(folder), device="cpu", dtype="float32", max_model_len=128,
        max_num_batched_tokens=64, max_num_seqs=4,
    )  # fmt: skip
    with running(config, plugins=plugins) as server:
        with httpx.Client(base_url=server.url, timeout=60) as client:
            yield client


def ask(client: httpx.Client, **more: Any) -> httpx.Response:
    body = {"model": client.get("/v1/models").json()["data"][0]["id"], "max_tokens": 3, **more}
    return client.post("/v1/completions", json={"prompt": "Hello", "ignore_eos": True, **body})


def test_parameters_reach_the_processor(client: httpx.Client) -> None:
    body = ask(client, vllm_xargs={"only": 70}, return_token_ids=True).json()
    assert body["choices"][0]["token_ids"] == [70, 70, 70]


def test_wrong_ones_are_refused_by_name(client: httpx.Client) -> None:
    for xargs, named in (
        ({"other": 1}, "'other'"),
        ({"only": "x"}, "vllm_xargs.only"),
        (3, "xargs"),
    ):
        response = ask(client, vllm_xargs=xargs)
        assert response.status_code == 400, response.text
        assert named in response.json()["error"]["message"]
        assert response.json()["error"]["param"].startswith("vllm_xargs")


def test_a_failure_is_reported_and_affects_no_other_request(client: httpx.Client) -> None:
    failed = ask(client, vllm_xargs={"only": 71})
    assert failed.status_code == 500
    assert "my-processors" in failed.text and "boom" in failed.text
    assert ask(client).status_code == 200
