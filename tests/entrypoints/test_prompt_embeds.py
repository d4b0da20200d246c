"""Prompts given as embeddings, offline and over HTTP, beside transformers and token ids."""

from __future__ import annotations

import base64
import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers
from serving import MODEL, Server, engine_config, running, save_random

from jackfield import AsyncEngine, SamplingParams
from jackfield.core.errors import ConfigError, InvalidRequest
from jackfield.core.media.prompt_embeds import embeds_items
from jackfield.entrypoints.http.options import ServerOptions

from helpers import at_once

SIZE = 64
"""Of the model's states."""
LENGTHS = (1, 2, 16, 25, 63, 64, 65, 66, 128, 129, 200)
PARAMS = SamplingParams(max_tokens=4, temperature=0, ignore_eos=True, logprobs=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_random(tmp_path_factory.mktemp("random"))


@pytest.fixture(scope="module")
def model(checkpoint: Path) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32).eval()


def config(checkpoint: Path, **options: Any) -> Any:
    return engine_config(
        checkpoint, device="cpu", enable_prompt_embeds=True, max_model_len=256,
        **{"max_num_batched_tokens": 32, **options},
    )  # fmt: skip


def embeds(seed: int, length: int) -> torch.Tensor:
    return torch.randn(length, SIZE, generator=torch.Generator().manual_seed(seed))


def saved(value: Any, **options: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer, **options)
    return buffer.getvalue()


def text_of(value: Any) -> str:
    return base64.b64encode(saved(value)).decode()


async def generated(engine: AsyncEngine, prompts: list[Any]) -> list[Any]:
    async def last(prompt: Any) -> Any:
        outputs = [output async for output in engine.generate(prompt, PARAMS)]
        return outputs[-1]

    return await at_once(engine, *map(last, prompts))


def by_transformers(model: Any, rows: torch.Tensor) -> tuple[list[int], list[float]]:
    """Greedy tokens and their log-probabilities."""
    tokens, logprobs, states = [], [], rows[None]
    for _ in range(4):
        with torch.no_grad():
            scores = model(inputs_embeds=states).logits[0, -1].log_softmax(0)
        tokens.append(int(scores.argmax()))
        logprobs.append(float(scores.max()))
        states = torch.cat([states, model.get_input_embeddings()(torch.tensor([[tokens[-1]]]))], 1)
    return tokens, logprobs


async def test_embeddings_say_what_transformers_says(checkpoint: Path, model: Any) -> None:
    """Beside prompts of tokens, over chunks, the second time from the prefix cache; and those of
    token ids say what these say.
    """
    rows = [embeds(number, length) for number, length in enumerate(LENGTHS)]
    tokens = [[40 + n % 200 for n in range(length)] for length in (3, 70)]
    table = model.get_input_embeddings().weight.detach()
    given = [{"prompt_embeds": one} for one in rows]
    same = [{"prompt_embeds": saved(table[torch.tensor(ids)].clone())} for ids in tokens]
    async with AsyncEngine(config(checkpoint)) as engine:
        for again in (False, True):
            outputs = await generated(engine, [*given, *tokens, *same])
            for one, output in zip(rows, outputs, strict=False):
                want, logprobs = by_transformers(model, one)
                completion = output.outputs[0]
                assert completion.token_ids == want
                got = [p[t].logprob for p, t in zip(completion.logprobs, want, strict=True)]
                assert got == pytest.approx(logprobs, abs=2e-3)
                assert output.num_prompt_tokens == len(one)
                assert (output.num_cached_tokens > 0) == (again and len(one) > 16)
            texts = [output.outputs[0].token_ids for output in outputs[len(rows) :]]
            assert texts[:2] == texts[2:]
        other = rows[-1].clone()
        other[100] += 1
        [changed] = await generated(engine, [{"prompt_embeds": other}])
        assert changed.outputs[0].token_ids == by_transformers(model, other)[0]
        assert changed.num_cached_tokens == 64  # Rows up to those of the item that has changed.
        engine.core.scheduler.check_invariants()
        assert engine.stats().kv_blocks_used == 0


async def test_embeddings_survive_preemption(checkpoint: Path, model: Any) -> None:
    rows = [embeds(number, 70 + number) for number in range(4)]
    params = SamplingParams(max_tokens=60, temperature=0, ignore_eos=True)
    options = {"num_gpu_blocks_override": 24, "enable_prefix_caching": False}

    async def last(engine: AsyncEngine, one: torch.Tensor) -> Any:
        return [o async for o in engine.generate({"prompt_embeds": one}, params)][-1]

    async with AsyncEngine(config(checkpoint, **options)) as engine:
        outputs = await at_once(engine, *(last(engine, one) for one in rows))
        assert sum(output.timings.num_preemptions for output in outputs) > 0
        alone = [(await last(engine, one)).outputs[0].token_ids for one in rows]
    assert [output.outputs[0].token_ids for output in outputs] == alone
    assert [ids[:4] for ids in alone] == [by_transformers(model, one)[0] for one in rows]


# ---------------------------------------------------------------- what is refused


class Trap:
    """What a pickle may call."""

    def __reduce__(self) -> Any:
        return print, ("called",)


def deflated() -> bytes:
    """A file whose entries are compressed: small here, large once read."""
    whole, packed = io.BytesIO(saved(torch.zeros(4096, SIZE))), io.BytesIO()
    with zipfile.ZipFile(whole) as old, zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as new:
        for entry in old.infolist():
            new.writestr(entry.filename, old.read(entry.filename))
    return packed.getvalue()


BAD: list[tuple[Any, str]] = [
    (b"x", "is no tensor that torch.save, numpy.save or safetensors wrote"),
    ("no base64!", "must be base64"),
    (saved(Trap()), "is no tensor that torch.save wrote"),
    (saved({"a": torch.zeros(2, SIZE)}), "must be one tensor, not dict"),
    (saved(torch.zeros(2, SIZE), _use_new_zipfile_serialization=False), "is no tensor"),
    (deflated(), "must not be compressed"),
    (saved(torch.zeros(2, SIZE + 1)), r"must have the shape \[num_tokens, 64\]"),
    (saved(torch.zeros(0, SIZE)), "must have the shape"),
    (saved(torch.zeros(SIZE)), "must have the shape"),
    (saved(torch.zeros(2, SIZE, dtype=torch.int64)), "must be of one of the types"),
    (saved(torch.zeros(2, SIZE, dtype=torch.float64)), "must be of one of the types"),
    (saved(torch.zeros(2, SIZE).to_sparse()), "must be a dense tensor"),
    (saved(torch.zeros(2, SIZE).to_sparse_csr()), "must be a dense tensor"),
    (saved(torch.zeros(2, SIZE, device="meta")), "must be a dense tensor|is no tensor"),
    (saved(torch.zeros(2, SIZE).fill_(torch.nan)), "row 0 has numbers that are not finite"),
    (saved([0] * 100_000), "must be one tensor"),
    (3, "must be a tensor, bytes or base64, not int"),
]


@pytest.mark.parametrize(("value", "words"), BAD, ids=range(len(BAD)))
def test_what_is_no_table_of_embeddings_is_refused(
    value: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InvalidRequest, match=f"prompt_embeds: .*({words})") as refused:
        embeds_items(value, SIZE, 100)
    assert refused.value.param == "prompt_embeds"
    assert "called" not in capsys.readouterr().out


@pytest.mark.parametrize("rows", [50, 1 << 30])
def test_a_small_file_of_many_rows_is_refused_before_it_is_written_out(rows: int) -> None:
    """Of one stored row that stands for many, also for fewer than a prompt may have."""
    value = saved(torch.zeros(1, SIZE).expand(rows, SIZE))
    assert len(value) < 1 << 12
    with pytest.raises(InvalidRequest, match="in the file") as refused:
        embeds_items(value, SIZE, 100)
    assert refused.value.param == "prompt_embeds"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_every_type_keeps_its_numbers(dtype: torch.dtype) -> None:
    rows = embeds(1, 130).to(dtype)
    token_ids, items = embeds_items(saved(rows[None]), SIZE, 130)
    assert len(token_ids) == 130 and [item.start for item in items] == [0, 64, 128]
    tensors = [item.content.tensors["rows"] for item in items]
    read = [
        torch.frombuffer(bytearray(t.data), dtype=getattr(torch, t.dtype)).view(t.shape)
        for t in tensors
    ]
    assert torch.equal(torch.cat(read), rows)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"runner": "pooling"}, "its states are pooled"),
        ({"record_steps": "steps"}, "does not go with record_steps"),
    ],
)
async def test_what_does_not_go_with_it_is_refused_at_the_start(
    checkpoint: Path, options: dict[str, Any], words: str, tmp_path: Path
) -> None:
    options = {key: str(tmp_path / value) if key == "record_steps" else value
               for key, value in options.items()}  # fmt: skip
    with pytest.raises(ConfigError, match=words) as refused:
        await AsyncEngine(config(checkpoint, **options)).start()
    assert refused.value.param == "enable_prompt_embeds"


# ---------------------------------------------------------------- HTTP


@pytest.fixture(scope="module")
def server(checkpoint: Path) -> Iterator[Server]:
    with running(config(checkpoint)) as running_server:
        yield running_server


def test_completions_take_embeddings_before_prompts(server: Server, model: Any) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    rows = [embeds(1, 5), embeds(2, 70)]
    extra = {"ignore_eos": True, "return_token_ids": True}
    body: Any = {"model": MODEL, "max_tokens": 4, "temperature": 0}
    answer: Any = client.completions.create(
        **body, prompt=[40, 41], extra_body={**extra, "prompt_embeds": list(map(text_of, rows))}
    )
    want = [by_transformers(model, one)[0] for one in rows]
    assert [choice.token_ids for choice in answer.choices[:2]] == want
    assert len(answer.choices) == 3 and answer.usage.prompt_tokens == 5 + 70 + 2
    extra["prompt_embeds"] = text_of(rows[0])
    alone: Any = client.completions.create(**body, prompt="", extra_body=extra)
    assert [choice.token_ids for choice in alone.choices] == want[:1]
    chunks: Any = client.completions.create(**body, prompt="", stream=True, extra_body=extra)
    assert [id for chunk in chunks for id in chunk.choices[0].token_ids] == want[0]
    sent = {**body, **extra}
    invoked = httpx.post(f"{server.url}/invocations", json=sent).json()
    assert invoked["choices"][0]["token_ids"] == want[0]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"prompt_embeds": "x"}, "prompt_embeds"), ({"prompt_embeds": [3]}, "prompt_embeds"),
        ({"echo": True}, "echo"), ({"prompt_logprobs": 1}, "prompt_logprobs"),
        ({"use_beam_search": True}, "use_beam_search"),
        ({"prompt_embeds": text_of(torch.zeros(300, SIZE))}, "prompt_embeds"),
    ],
    ids=range(6),
)  # fmt: skip
def test_bad_fields_are_named(server: Server, changes: dict[str, Any], field: str) -> None:
    body = {"prompt_embeds": text_of(embeds(1, 3)), "max_tokens": 2, **changes}
    response = httpx.post(f"{server.url}/v1/completions", json=body)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(field)


def test_it_is_refused_where_it_is_not_enabled(checkpoint: Path) -> None:
    with running(engine_config(checkpoint, device="cpu"), ServerOptions()) as plain:
        body = {"prompt_embeds": text_of(embeds(1, 3)), "max_tokens": 2}
        for path in ("/v1/completions", "/v1/chat/completions"):
            body["messages"] = [{"role": "user", "content": "x"}]
            response = httpx.post(f"{plain.url}{path}", json=body)
            assert response.status_code == 400
            assert response.json()["error"]["param"] == "prompt_embeds"
