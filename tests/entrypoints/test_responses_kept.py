"""/v1/responses that are kept, that run in the background, that are cut short, and that fail."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import torch
import transformers
from responding import CONFIG, TERMINAL, Folded, folded, polled
from serving import MODEL, Server, engine_config, running, save_scripted

from jackfield.core.engine.request_state import RequestState
from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.entrypoints.http.options import ServerOptions
from jackfield.entrypoints.openai.chat.job import ChatJob
from jackfield.entrypoints.openai.responses.request import ResponseCompletion
from jackfield.entrypoints.openai.responses.store import ResponseStore

LONG: Any = {"model": MODEL, "input": "Hello", "extra_body": {"ignore_eos": True}}


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(CONFIG) as running_server:
        yield running_server


# ---------------------------------------------------------------- kept ones


def test_what_is_kept_is_retrieved_listed_and_deleted(client: openai.OpenAI) -> None:
    response = client.responses.create(model=MODEL, input="Hello", max_output_tokens=5)
    assert client.responses.retrieve(response.id) == response
    (item,) = client.responses.input_items.list(response.id)
    assert item.type == "message" and item.to_dict()["content"][0]["text"] == "Hello"  # type: ignore[index]
    client.responses.delete(response.id)
    for gone in (client.responses.retrieve, client.responses.delete, client.responses.cancel,
                 client.responses.input_items.list):  # fmt: skip
        with pytest.raises(openai.NotFoundError):
            gone(response.id)
    with pytest.raises(openai.BadRequestError) as caught:
        client.responses.create(model=MODEL, input="x", previous_response_id=response.id)
    assert caught.value.code == "previous_response_not_found"
    unkept = client.responses.create(model=MODEL, input="Hello", max_output_tokens=2, store=False)
    assert unkept.to_dict()["store"] is False
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(unkept.id)
    second = client.responses.create(model=MODEL, input="Hello", max_output_tokens=2)
    with pytest.raises(openai.BadRequestError):
        client.responses.cancel(second.id)


def test_a_response_has_the_id_of_its_request(server: Server, client: openai.OpenAI) -> None:
    for own, id in (("mine-1", "resp_mine-1"), ("resp_mine.2", "resp_mine.2")):
        body: Any = {"model": MODEL, "input": "Hello", "max_output_tokens": 2}
        response = client.responses.create(**body, extra_body={"request_id": own})
        assert response.id == id
        assert client.responses.retrieve(id) == response
        with pytest.raises(openai.BadRequestError, match="already") as refused:
            client.responses.create(**body, extra_body={"request_id": own})
        assert refused.value.param == "request_id"
        client.responses.delete(id)
    for wrong in ("", "a/b", "x" * 257, "a b"):
        with pytest.raises(openai.BadRequestError, match="letters, digits") as refused:
            client.responses.create(**body, extra_body={"request_id": wrong})
        assert refused.value.param == "request_id"
    with pytest.raises(openai.BadRequestError, match="begins with 'resp_'") as refused:
        client.responses.retrieve("chatcmpl-1")
    assert refused.value.param == "response_id"
    assert client.responses.create(**body).id.startswith("resp_")


def test_owners_may_choose_the_same_id() -> None:
    store = ResponseStore(4, 1 << 20)
    for owner in ("a", "b"):
        store.put({"id": "resp_1", "output": [], "of": owner}, [], [], owner=owner)
    found = [store.get("resp_1", owner) for owner in ("a", "b", "c")]
    assert [each and each.response()["of"] for each in found] == ["a", "b", None]
    assert store.delete("resp_1", "a") and not store.delete("resp_1", "a")
    assert store.get("resp_1", "b") is not None and len(store) == 1


def test_input_items_come_in_pages(client: openai.OpenAI) -> None:
    items: Any = [{"role": "user", "content": str(n)} for n in range(7)]
    response = client.responses.create(model=MODEL, input=items, max_output_tokens=2)
    for order, numbers in (("asc", list("0123456")), ("desc", list("6543210"))):
        pages = client.responses.input_items.list(response.id, limit=3, order=order)  # type: ignore[arg-type]
        assert len(pages.data) == 3 and pages.has_more
        shown = [item.to_dict()["content"][0]["text"] for item in pages]  # type: ignore[index]
        assert shown == numbers


async def test_a_streamed_response_is_kept_when_its_last_event_comes(asynchronous: Any) -> None:
    stream = await asynchronous.responses.create(
        model=MODEL, input="Hello", max_output_tokens=5, stream=True
    )
    async for event in stream:
        if event.type in TERMINAL:
            original = await asynchronous.responses.retrieve(event.response.id)
            assert original.to_dict() == event.response.to_dict()
            break
    else:
        raise AssertionError("no terminal event")


def test_the_oldest_are_dropped_for_the_newest() -> None:
    config = engine_config(EMBEDDED_MODEL)
    small = ServerOptions(max_stored_responses=2, max_stored_response_bytes=16_000)
    with running(config, small) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

        def create(text: str) -> str:
            return client.responses.create(model=MODEL, input=text, max_output_tokens=2).id

        def kept(ids: list[str]) -> list[bool]:
            return [httpx.get(f"{server.url}/v1/responses/{id}").status_code == 200 for id in ids]

        ids = [create("a"), create("b"), create("c")]
        assert kept(ids) == [False, True, True]
        ids.append(create("d " * 500))
        assert kept(ids) == [False, False, True, True]
        long = {"model": MODEL, "input": "e", "max_output_tokens": 2, "metadata": {
            str(n): "x" * 500 for n in range(16)}}  # fmt: skip
        ids.append(httpx.post(f"{server.url}/v1/responses", json=long).json()["id"])
        ids.append(httpx.post(f"{server.url}/v1/responses", json=long).json()["id"])
        assert kept(ids[2:]) == [False, False, False, True]


def test_a_server_may_keep_nothing() -> None:
    with running(engine_config(EMBEDDED_MODEL), ServerOptions(max_stored_responses=0)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        response = client.responses.create(model=MODEL, input="a", max_output_tokens=2, store=True)
        assert response.to_dict()["store"] is False
        with pytest.raises(openai.BadRequestError, match="background"):
            client.responses.create(model=MODEL, input="a", background=True)


# ---------------------------------------------------------------- in the background


async def test_a_background_response_is_polled_to_its_end(asynchronous: Any) -> None:
    begun = await asynchronous.responses.create(**LONG, background=True, max_output_tokens=30)
    assert begun.status == "queued" and begun.background and begun.usage is None
    with pytest.raises(openai.BadRequestError, match="still running"):
        await asynchronous.responses.create(model=MODEL, input="x", previous_response_id=begun.id)
    final = await polled(asynchronous, begun.id)
    assert final.status == "incomplete" and final.usage.output_tokens == 30
    assert (await asynchronous.responses.cancel(begun.id)).status == "incomplete"


async def test_a_background_response_is_cancelled(server: Server, asynchronous: Any) -> None:
    begun = await asynchronous.responses.create(**LONG, background=True, max_output_tokens=1900)
    cancelled = await asynchronous.responses.cancel(begun.id)
    assert cancelled.status == "cancelled"
    assert (await asynchronous.responses.cancel(begun.id)).to_dict() == cancelled.to_dict()
    assert (await asynchronous.responses.retrieve(begun.id)).to_dict() == cancelled.to_dict()
    other = await asynchronous.responses.create(**LONG, background=True, max_output_tokens=1900)
    await asynchronous.responses.delete(other.id)
    with pytest.raises(openai.NotFoundError):
        await asynchronous.responses.retrieve(other.id)
    assert server.becomes(lambda engine: engine.stats().num_requests_running == 0)


async def test_a_stream_that_is_left_goes_on_only_in_the_background(
    server: Server, asynchronous: Any
) -> None:
    ids = []
    for background in (False, True):
        stream = await asynchronous.responses.create(
            **LONG, background=background, stream=True, max_output_tokens=40 if background else 200
        )
        async for event in stream:
            if event.type == "response.created":
                ids.append(event.response.id)
            if event.type == "response.output_text.delta":
                break
        await stream.close()
    with pytest.raises(openai.NotFoundError):
        await asynchronous.responses.retrieve(ids[0])
    final = await polled(asynchronous, ids[1])
    assert final.usage.output_tokens == 40
    assert server.becomes(lambda engine: engine.stats().num_requests_running == 0)
    assert server.call(lambda engine: engine.stats().requests_finished.get("abort", 0)) > 0

    again = await folded(await asynchronous.responses.retrieve(ids[1], stream=True))
    assert again.types[:3] == ["response.created", "response.queued", "response.in_progress"]
    assert again.final == final.to_dict()
    rest = await asynchronous.responses.retrieve(ids[1], stream=True, starting_after=4)
    numbers = [event.sequence_number async for event in rest]
    assert numbers == list(range(5, len(again.types)))


async def test_several_follow_one_response(asynchronous: Any) -> None:
    stream = await asynchronous.responses.create(
        **LONG, background=True, stream=True, max_output_tokens=60
    )
    first = await anext(stream)

    async def follow() -> Folded:
        return await folded(await asynchronous.responses.retrieve(first.response.id, stream=True))

    left, other = await asyncio.gather(follow(), follow())
    assert left.final == other.final and left.types == other.types
    assert first.response.id == left.final["id"]
    await stream.close()
    unstreamed = await asynchronous.responses.create(**LONG, background=True, max_output_tokens=2)
    with pytest.raises(openai.BadRequestError):
        await asynchronous.responses.retrieve(unstreamed.id, stream=True)


async def test_a_server_that_stops_leaves_no_background_work() -> None:
    with running(engine_config(EMBEDDED_MODEL)) as item:
        async with openai.AsyncOpenAI(base_url=f"{item.url}/v1", api_key="none") as client:
            await client.responses.create(**LONG, background=True, max_output_tokens=400)
        engine = item.engine
    assert engine.stats().num_requests_running == 0
    assert engine.stats().requests_finished.get("abort") == 1


def test_a_stream_that_is_followed_ends_with_the_server() -> None:
    body = {"model": MODEL, "input": "Hello", "background": True, "stream": True,
            "ignore_eos": True, "max_output_tokens": 400}  # fmt: skip
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(running(engine_config(EMBEDDED_MODEL)))
        url = f"{server.url}/v1/responses"
        with httpx.stream("POST", url, json=body, timeout=300) as response:
            lines = response.iter_lines()
            assert next(lines) == "event: response.created"
            stack.close()
            assert not any(line == "event: response.completed" for line in lines)


# ---------------------------------------------------------------- limits


async def test_a_full_response_that_no_client_waits_for_is_aborted(
    server: Server, asynchronous: Any
) -> None:
    before = server.call(lambda engine: engine.stats().requests_finished.get("abort", 0))
    waiting = asyncio.create_task(asynchronous.responses.create(**LONG, max_output_tokens=1900))
    assert await asyncio.to_thread(
        server.becomes, lambda engine: engine.stats().num_requests_running == 1
    )
    waiting.cancel()
    assert await asyncio.to_thread(
        server.becomes,
        lambda engine: engine.stats().requests_finished.get("abort", 0) == before + 1,
    )
    assert server.becomes(lambda engine: engine.stats().num_requests_running == 0)


async def test_a_kept_response_holds_no_job_and_no_engine_request(
    server: Server, asynchronous: Any
) -> None:
    def jobs(_: Any) -> int:
        gc.collect()
        kinds = (ResponseCompletion, ChatJob, RequestState)
        return sum(type(item) in kinds for item in gc.get_objects())

    assert server.becomes(lambda engine: engine.stats().num_requests_running == 0)
    before = server.call(jobs)
    for way in ({}, {"background": True}):
        response = await asynchronous.responses.create(
            model=MODEL, input="Hello", max_output_tokens=3, **way
        )
        await polled(asynchronous, response.id)
    assert server.call(jobs) <= before


async def test_a_response_that_fails_says_so(tmp_path: Path) -> None:
    """Its logits are no numbers."""
    checkpoint = save_scripted(tmp_path / "broken")
    model = transformers.Qwen3ForCausalLM.from_pretrained(checkpoint)
    with torch.no_grad():
        model.lm_head.weight.fill_(float("nan"))
    model.save_pretrained(checkpoint)
    with running(engine_config(checkpoint)) as server:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key="none", max_retries=0
        ) as client:
            with pytest.raises(openai.InternalServerError):
                await client.responses.create(model=MODEL, input="Hi")
            response = await folded(
                await client.responses.create(model=MODEL, input="Hi", stream=True)
            )
            assert response.types[-1] == "response.failed" and response.final["status"] == "failed"
            assert response.final["error"]["code"] == "server_error"
            assert response.final["error"]["message"]
            begun = await client.responses.create(model=MODEL, input="Hi", background=True)
            final = await polled(client, begun.id)
            assert final.status == "failed" and final.error is not None


def test_truncation_drops_the_oldest_turns() -> None:
    with running(engine_config(EMBEDDED_MODEL, max_model_len=128)) as server:
        client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
        turns: Any = []
        for number in range(6):
            turns += [{"role": "user", "content": f"{number} " + "word " * 20},
                      {"role": "assistant", "content": "Yes."}]  # fmt: skip
        turns.append({"role": "user", "content": "So?"})
        options: Any = {"model": MODEL, "temperature": 0, "max_output_tokens": 8,
                        "instructions": "Be brief."}  # fmt: skip
        with pytest.raises(openai.BadRequestError) as caught:
            client.responses.create(input=turns, **options)
        assert caught.value.code == "context_length_exceeded" and caught.value.param == "input"
        cut = client.responses.create(input=turns, truncation="auto", **options)
        assert cut.truncation == "auto" and cut.usage and cut.usage.input_tokens <= 120
        fitting = []
        for start in range(0, len(turns), 2):
            try:
                fitting.append(client.responses.create(input=turns[start:], **options))
            except openai.BadRequestError:
                continue
        within = [item for item in fitting if item.usage and item.usage.input_tokens <= 120]
        assert within[0].usage and within[0].usage.input_tokens == cut.usage.input_tokens
        assert within[0].output_text == cut.output_text
        short = client.responses.create(input="So?", truncation="auto", **options)
        plain = client.responses.create(input="So?", **options)
        assert short.output_text == plain.output_text
