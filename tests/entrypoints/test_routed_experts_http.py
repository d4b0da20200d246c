"""`routed_experts` over HTTP, as vLLM's clients read them."""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from serving import Server, engine_config, running, save_random, save_tokenizer

PROMPT = [5, 6, 7, 8, 9]
COMPLETION = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
CHAT = {
    "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "temperature": 0,
    "ignore_eos": True, "return_token_ids": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("mixture")
    tokenizer = save_tokenizer(folder)
    torch.manual_seed(3)
    config = transformers.Qwen3MoeConfig(
        vocab_size=tokenizer.get_vocab_size(), hidden_size=32, intermediate_size=32,
        moe_intermediate_size=32, num_hidden_layers=3, num_attention_heads=4, head_dim=16,
        num_key_value_heads=2, num_experts=5, num_experts_per_tok=2, mlp_only_layers=[1],
        eos_token_id=2, bos_token_id=1, pad_token_id=0, initializer_range=0.2,
    )  # fmt: skip
    transformers.Qwen3MoeForCausalLM(config).save_pretrained(folder)
    options = {"device": "cpu", "enable_return_routed_experts": True}
    with running(engine_config(folder, **options)) as started:
        yield started


def post(server: Server, path: str, body: Any, status: int = 200) -> Any:
    response = httpx.post(server.url + path, json=body, timeout=60)
    assert response.status_code == status, response.text
    return response.json()


def read(text: str) -> np.ndarray:
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


def test_choices_have_them_unless_a_request_says_no(server: Server) -> None:
    [choice] = post(server, "/v1/completions", COMPLETION)["choices"]
    routed = read(choice["routed_experts"])
    assert routed.shape == (len(PROMPT) + 5, 2, 2) and routed.dtype == np.uint8
    assert routed.max() < 5 and (routed[..., 0] != routed[..., 1]).all()
    later = {**COMPLETION, "routed_experts_prompt_start": 3, "return_routed_experts": True}
    [choice] = post(server, "/v1/completions", later)["choices"]
    assert np.array_equal(read(choice["routed_experts"]), routed[3:])
    without = {**COMPLETION, "return_routed_experts": False}
    [choice] = post(server, "/v1/completions", without)["choices"]
    assert "routed_experts" not in choice
    body = post(server, "/v1/chat/completions", {**CHAT, "n": 2})
    for choice in body["choices"]:
        count = len(body["prompt_token_ids"]) + 5
        assert read(choice["routed_experts"]).shape == (count, 2, 2)


@pytest.mark.parametrize(
    ("path", "body"), [("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)]
)
def test_the_last_event_of_a_stream_has_them(server: Server, path: str, body: Any) -> None:
    [whole] = post(server, path, body)["choices"]
    with httpx.stream("POST", server.url + path, json={**body, "stream": True}) as stream:
        lines = [line[6:] for line in stream.iter_lines() if line.startswith("data: {")]
    *others, last = [json.loads(line)["choices"][0] for line in lines]
    assert not any("routed_experts" in choice for choice in others)
    assert np.array_equal(read(last["routed_experts"]), read(whole["routed_experts"]))


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"return_routed_experts": True, "use_beam_search": True}, "return_routed_experts"),
        ({"routed_experts_prompt_start": -1}, "routed_experts_prompt_start"),
        ({"return_routed_experts": "yes"}, "return_routed_experts"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    server: Server, more: dict[str, Any], param: str
) -> None:
    for path, body in (("/v1/completions", COMPLETION), ("/v1/chat/completions", CHAT)):
        error = post(server, path, {**body, **more}, 400)["error"]
        assert error["param"] == param


def test_a_server_that_keeps_none_says_so(tmp_path: Path) -> None:
    """By the option that it lacks."""
    with running(engine_config(save_random(tmp_path), device="cpu")) as other:
        body = {**COMPLETION, "return_routed_experts": True}
        error = post(other, "/v1/completions", body, 400)["error"]
        assert error["param"] == "return_routed_experts"
        assert "--enable-return-routed-experts" in error["message"]
        assert "routed_experts" not in post(other, "/v1/completions", COMPLETION)["choices"][0]
