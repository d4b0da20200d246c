"""Vectors, labels and scores over HTTP, through the real `openai` client, and through `LLM`."""

from __future__ import annotations

import asyncio
import base64
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cohere
import httpx
import numpy as np
import openai
import pytest
import tokenizers
import torch.nn.functional as F
import transformers
from encoders import (
    minilm,
    reference_logits,
    reference_states,
    save_decoder,
    save_encoder,
)
from serving import MODEL, Server, running

from jackfield import LLM, EngineConfig, PoolingParams
from jackfield.core.errors import InvalidRequest
from jackfield.core.text.tokenizer import Tokenizer

from helpers import edit_json

TEXTS = ["That is a happy person", "The weather is lovely today.", "x"]
QUERY = "who is it"
DOCUMENTS = ["the cat sat on the mat", "a dog", "paris is in france", "the dog ran fast"]


def config(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "model": str(folder),
            "served_model_name": (MODEL,),
            "dtype": "float32",
            "device": "cpu",
            "max_num_seqs": 16,
            **options,
        }
    )


@pytest.fixture(scope="module")
def embedder() -> Iterator[Server]:
    with running(config(minilm())) as server:
        yield server


@pytest.fixture(scope="module")
def cross_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cross")
    return save_encoder(folder, "Bert", "ForSequenceClassification", num_labels=1)


@pytest.fixture(scope="module")
def scorer(cross_encoder: Path) -> Iterator[Server]:
    with running(config(cross_encoder)) as server:
        yield server


def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def post(server: Server, path: str, status: int = 200, **body: Any) -> Any:
    response = httpx.post(f"{server.url}{path}", json={"model": MODEL, **body}, timeout=300)
    assert response.status_code == status, response.text
    return response.json()


def refused(server: Server, path: str, status: int = 400, **body: Any) -> dict[str, Any]:
    error: dict[str, Any] = post(server, path, status, **body)["error"]
    return error


def expected(folder: Path, texts: list[str]) -> np.ndarray:
    """MiniLM's vectors by `transformers`."""
    tokenizer = Tokenizer.load(str(folder))
    states = [reference_states(folder, tokenizer.encode(text)) for text in texts]
    return np.stack([F.normalize(state.mean(0), dim=0).numpy() for state in states])


def pair_score(folder: Path, first: str, second: str) -> float:
    ids, types = Tokenizer.load(str(folder)).encode_texts(first, second)
    return float(reference_logits(folder, ids, types).sigmoid())


# ---------------------------------------------------------------- embeddings


def test_minilm_is_served_as_transformers_has_it(embedder: Server) -> None:
    """The client asks for base64 unless told otherwise; both are the same vectors."""
    response = client(embedder).embeddings.create(model=MODEL, input=TEXTS)
    assert [item.index for item in response.data] == [0, 1, 2]
    assert (response.object, response.data[0].object, response.model) == (
        "list",
        "embedding",
        MODEL,
    )
    vectors = np.array([item.embedding for item in response.data])
    np.testing.assert_allclose(vectors, expected(minilm(), TEXTS), atol=1e-5)
    floats = client(embedder).embeddings.create(model=MODEL, input=TEXTS, encoding_format="float")
    np.testing.assert_array_equal(vectors, [item.embedding for item in floats.data])


async def test_the_async_client_gets_the_same(embedder: Server) -> None:
    async with openai.AsyncOpenAI(base_url=f"{embedder.url}/v1", api_key="none") as api:
        responses = await asyncio.gather(
            *(api.embeddings.create(model=MODEL, input=text) for text in TEXTS)
        )
    vectors = np.array([response.data[0].embedding for response in responses])
    np.testing.assert_allclose(vectors, expected(minilm(), TEXTS), atol=1e-5)


def test_every_form_of_input_and_its_usage(embedder: Server) -> None:
    tokenizer = Tokenizer.load(str(minilm()))
    ids = [tokenizer.encode(text) for text in TEXTS]
    api = client(embedder)
    by_text = api.embeddings.create(model=MODEL, input=TEXTS)
    for form in (ids, [TEXTS[0], *ids[1:]]):
        response = api.embeddings.create(model=MODEL, input=form)  # type: ignore[arg-type]
        # Another order may batch otherwise, and sum in another order.
        for first, other in zip(response.data, by_text.data, strict=True):
            np.testing.assert_allclose(first.embedding, other.embedding, atol=1e-6)
        assert response.usage.prompt_tokens == response.usage.total_tokens == sum(map(len, ids))
    single = api.embeddings.create(model=MODEL, input=ids[0])
    assert len(single.data) == 1 and single.usage.prompt_tokens == len(ids[0])
    raw = post(embedder, "/v1/embeddings", input="x", encoding_format="base64")
    vector = np.frombuffer(base64.b64decode(raw["data"][0]["embedding"]), dtype="<f4")
    np.testing.assert_allclose(vector, by_text.data[2].embedding, atol=1e-6)
    assert raw["id"].startswith("embd-")


def test_bad_embedding_requests_name_the_field(embedder: Server) -> None:
    for body, param, match in [
        ({}, "input", "empty"),
        ({"input": []}, "input", "empty"),
        ({"input": ""}, "input", "empty"),
        ({"input": [1.5]}, "input", "token ids"),
        ({"input": [[1], []]}, "input", "at least one token"),
        ({"input": [99999]}, "input", "token id 99999"),
        ({"input": 5}, "input", "Expected"),
        ({"input": ["x"] * 2049}, "input", "1 to 2048"),
        ({"input": "word " * 300}, "input", "256 tokens. However, your prompt has 302 tokens"),
        ({"input": "x", "dimensions": 64}, "dimensions", "cannot be cut"),
        ({"input": "x", "dimensions": 0}, "dimensions", "positive"),
        ({"input": "x", "encoding_format": "hex"}, "encoding_format", "hex"),
        ({"input": "x", "priority": 3}, "priority", "--scheduling-policy"),
        ({"input": "x", "truncate_prompt_tokens": 999}, "truncate_prompt_tokens", "256"),
        ({"input": "x", "messages": [{"role": "user", "content": "x"}]}, "messages", "either"),
    ]:
        error = refused(embedder, "/v1/embeddings", **body)
        assert error["param"] == param and match in error["message"], error
    assert refused(embedder, "/v1/embeddings", 404, model="other", input="x")["param"] == "model"
    cut = post(embedder, "/v1/embeddings", input="word " * 300, truncate_prompt_tokens=-1)
    assert cut["usage"]["prompt_tokens"] == 256
    with pytest.raises(openai.BadRequestError) as caught:
        client(embedder).embeddings.create(model=MODEL, input="word " * 300)
    assert caught.value.code == "context_length_exceeded"
    assert embedder.becomes(lambda engine: not engine.core.requests.states)


def test_dimensions_of_a_matryoshka_model(tmp_path: Path) -> None:
    folder = save_encoder(tmp_path, "Roberta")
    edit_json(folder / "config.json", is_matryoshka=True)
    with running(config(folder)) as server:
        response = client(server).embeddings.create(model=MODEL, input="the cat", dimensions=6)
        ids = Tokenizer.load(str(folder)).encode("the cat")
        target = F.normalize(reference_states(folder, ids)[0, :6], dim=0)
        np.testing.assert_allclose(response.data[0].embedding, target, atol=1e-5)


def test_pooling_route_gives_a_vector_a_token(embedder: Server) -> None:
    plain = post(embedder, "/pooling", input="x")
    assert plain["data"][0]["object"] == "pooling" and len(plain["data"][0]["data"]) == 384
    each = post(embedder, "/pooling", input=["x", "x x"], task="token_embed", normalize=False)
    [first, second] = [np.array(item["data"]) for item in each["data"]]
    assert first.shape == (3, 384) and second.shape == (4, 384)
    ids = Tokenizer.load(str(minilm())).encode("x x")
    np.testing.assert_allclose(second, reference_states(minilm(), ids), atol=1e-4)
    assert refused(embedder, "/pooling", input="x", task="classify")["param"] == "task"


def test_a_decoder_embeds_over_chunks_and_conversations(tmp_path: Path) -> None:
    folder = save_decoder(tmp_path, "Qwen3", "ForCausalLM")
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    template += "{% if add_generation_prompt %}sat {% endif %}"
    options = {
        "runner": "pooling", "attention_backend": "torch", "max_num_batched_tokens": 16,
        "num_gpu_blocks_override": 60, "max_model_len": 300, "chat_template": template,
    }  # fmt: skip
    with running(config(folder, **options)) as server:
        text = "the cat sat on the mat " * 20
        response = client(server).embeddings.create(model=MODEL, input=text)
        ids = Tokenizer.load(str(folder)).encode(text)
        target = F.normalize(reference_states(folder, ids)[-1], dim=0)
        np.testing.assert_allclose(response.data[0].embedding, target, atol=1e-4)
        messages = [{"role": "user", "content": "the cat"}]
        for body, count in (({}, 2), ({"add_generation_prompt": True}, 3)):
            embedded = post(server, "/v1/embeddings", messages=messages, **body)
            assert embedded["usage"]["prompt_tokens"] == count
        with pytest.raises(openai.APITimeoutError):
            client(server).with_options(timeout=0.05).embeddings.create(
                model=MODEL, input=[[5 + i % 100] * 250 for i in range(200)]
            )
        assert server.becomes(lambda engine: not engine.core.requests.states), "a client that left"
        server.call(lambda engine: engine.core.scheduler.check_invariants())


# ---------------------------------------------------------------- labels and scores


def test_classify_gives_labels_and_probabilities(tmp_path: Path) -> None:
    folder = save_encoder(
        tmp_path,
        "XLMRoberta",
        "ForSequenceClassification",
        id2label={0: "bad", 1: "good", 2: "neither"},
        label2id={"bad": 0, "good": 1, "neither": 2},
    )
    tokenizer = Tokenizer.load(str(folder))
    template = "{% for m in messages %}{{ m.content }} {% endfor %}"
    with running(config(folder, chat_template=template)) as server:
        response = post(server, "/classify", input=DOCUMENTS)
        for item, text in zip(response["data"], DOCUMENTS, strict=True):
            target = reference_logits(folder, tokenizer.encode(text)).softmax(0)
            np.testing.assert_allclose(item["probs"], target, atol=1e-5)
            assert item["label"] == ["bad", "good", "neither"][int(target.argmax())]
            assert item["num_classes"] == 3
        raw = post(server, "/classify", input="a dog", use_activation=False)
        target = reference_logits(folder, tokenizer.encode("a dog"))
        np.testing.assert_allclose(raw["data"][0]["probs"], target, atol=1e-4)
        messages = [{"role": "user", "content": "a dog"}]
        chat = post(server, "/classify", messages=messages)
        rendered = tokenizer.encode("a dog ", add_special_tokens=False)
        target = reference_logits(folder, rendered).softmax(0)
        np.testing.assert_allclose(chat["data"][0]["probs"], target, atol=1e-5)
        assert post(server, "/invocations", messages=messages)["data"] == chat["data"]
        assert refused(server, "/classify", messages=messages, input="x")["param"] == "messages"
        assert refused(server, "/classify", messages=[{}])["param"] == "messages[0].role"
        error = refused(server, "/score", text_1="a", text_2="b")
        assert "it does classify" in error["message"]
        assert "it does classify" in refused(server, "/v1/embeddings", input="a")["message"]


def test_a_cross_encoder_scores_pairs(scorer: Server, cross_encoder: Path) -> None:
    target = [pair_score(cross_encoder, QUERY, document) for document in DOCUMENTS]
    for path in ("/score", "/v1/score"):
        response = post(scorer, path, text_1=QUERY, text_2=DOCUMENTS)
        assert response["data"][0]["object"] == "score"
        np.testing.assert_allclose([i["score"] for i in response["data"]], target, atol=1e-5)
    many = post(scorer, "/score", text_1=DOCUMENTS[:2], text_2=DOCUMENTS[2:])
    target = [pair_score(cross_encoder, *pair) for pair in zip(DOCUMENTS, DOCUMENTS[2:])]  # noqa: B905
    np.testing.assert_allclose([i["score"] for i in many["data"]], target, atol=1e-5)
    error = refused(scorer, "/score", text_1=DOCUMENTS[:3], text_2=DOCUMENTS[:2])
    assert error["param"] == "text_2" and "2 texts for 3" in error["message"]
    assert refused(scorer, "/score", text_1=[], text_2="a")["param"] == "text_1"
    assert refused(scorer, "/score", text_1="a")["param"] == "text_2"
    cut = post(scorer, "/score", text_1=QUERY, text_2="the " * 200, truncate_prompt_tokens=10)
    assert cut["usage"]["prompt_tokens"] == 10
    error = refused(scorer, "/score", text_1=QUERY, text_2="the " * 200)
    assert error["param"] == "text_2" and error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_sorts_documents(scorer: Server, cross_encoder: Path, path: str) -> None:
    scores = [pair_score(cross_encoder, QUERY, document) for document in DOCUMENTS]
    order = sorted(range(len(scores)), key=lambda index: -scores[index])
    documents = [{"text": DOCUMENTS[0]}, *DOCUMENTS[1:]]
    results = post(scorer, path, query=QUERY, documents=documents)["results"]
    assert [result["index"] for result in results] == order
    assert [result["document"]["text"] for result in results] == [DOCUMENTS[i] for i in order]
    relevance = [result["relevance_score"] for result in results]
    np.testing.assert_allclose(relevance, [scores[i] for i in order], atol=1e-5)
    short = post(scorer, path, query=QUERY, documents=DOCUMENTS, top_n=2, return_documents=False)
    assert [set(result) for result in short["results"]] == [{"index", "relevance_score"}] * 2
    assert len(post(scorer, path, query=QUERY, documents=DOCUMENTS, top_n=99)["results"]) == 4


def test_bad_rerank_requests_name_the_field(scorer: Server) -> None:
    for body, param in [
        ({"documents": []}, "documents"),
        ({"documents": [{"title": "x"}]}, "documents"),
        ({"documents": ["x"], "top_n": -1}, "top_n"),
        ({"documents": ["x"], "priority": 3}, "priority"),
        ({"documents": ["x"], "max_tokens_per_doc": 0}, "max_tokens_per_doc"),
        ({"documents": ["x"], "max_tokens_per_query": -1}, "max_tokens_per_query"),
        ({"documents": ["x"], "rank_fields": ["a"]}, "rank_fields"),
        ({"documents": ["x"], "instruction": "Be kind"}, "instruction"),
        ({"documents": ["x"], "chat_template_kwargs": {"a": 1}}, "chat_template_kwargs"),
        ({}, "documents"),
    ]:
        assert refused(scorer, "/rerank", query=QUERY, **body)["param"] == param


def test_texts_are_cut_after_the_tokens_that_are_asked_for(
    scorer: Server, cross_encoder: Path
) -> None:
    tokenizer = transformers.AutoTokenizer.from_pretrained(cross_encoder)

    def cut(text: str, count: int) -> str:
        return tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)[:count])

    query, documents = QUERY + " " + DOCUMENTS[0], ["the dog " * 100, *DOCUMENTS]
    shortest = {"max_tokens_per_doc": 1, "max_tokens_per_query": 1}
    (score,) = post(scorer, "/score", text_1=query, text_2=documents[0], **shortest)["data"]
    least = pair_score(cross_encoder, cut(query, 1), cut(documents[0], 1))
    assert score["score"] == pytest.approx(least, abs=1e-5)
    limits = {"max_tokens_per_doc": 3, "max_tokens_per_query": 4}
    target = [pair_score(cross_encoder, cut(query, 4), cut(text, 3)) for text in documents]
    ranked = post(scorer, "/rerank", query=query, documents=documents, **limits)["results"]
    assert {r["index"]: pytest.approx(r["relevance_score"], abs=1e-5) for r in ranked} == dict(
        enumerate(target)
    )
    assert {r["document"]["text"] for r in ranked} == set(documents)
    scores = post(scorer, "/score", text_1=query, text_2=documents, **limits)["data"]
    np.testing.assert_allclose([item["score"] for item in scores], target, atol=1e-5)


def test_a_text_that_is_short_enough_is_not_cut() -> None:
    """Not even to what its tokens decode to, which is lower case here."""
    tokenizer = Tokenizer.load(str(minilm()))
    assert tokenizer.first_tokens("The Cat", 2) == "The Cat"
    assert tokenizer.first_tokens("The Cat", 1) == "the"


def test_scores_take_every_name_of_the_texts(scorer: Server) -> None:
    first = post(scorer, "/score", text_1=QUERY, text_2=DOCUMENTS)["data"]
    for names in (("queries", "documents"), ("queries", "items"), ("data_1", "data_2")):
        body = dict(zip(names, (QUERY, DOCUMENTS), strict=True))
        assert post(scorer, "/score", **body)["data"] == first
        assert refused(scorer, "/score", **{names[0]: QUERY})["param"] in ("documents", "data_2")
        many = {names[0]: [QUERY] * 3, names[1]: DOCUMENTS[:2]}
        assert refused(scorer, "/score", **many)["param"] == names[1]
    assert refused(scorer, "/score", text_1="a", queries="b", text_2="c")["param"] == "queries"
    assert refused(scorer, "/score")["param"] == "text_1"


PAIR_TEMPLATE = (
    "{{ instruction | default('find what fits') }} who "
    "{{ (messages | selectattr('role', 'eq', 'query') | first).content }} is "
    "{{ (messages | selectattr('role', 'eq', 'document') | first).content }} fast"
)


@pytest.fixture(scope="module")
def instructed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, Path]]:
    """A reranker that is a decoder: it reads both texts in the form that a template writes."""
    folder = tmp_path_factory.mktemp("reranker")
    kind = {"num_labels": 1, "pad_token_id": 0, "hidden_act": "silu"}
    save_decoder(folder, "Qwen3", "ForSequenceClassification", **kind)
    with running(config(folder, chat_template=PAIR_TEMPLATE)) as server:
        yield server, folder


def template_score(folder: Path, query: str, document: str, instruction: str) -> float:
    text = f"{instruction} who {query} is {document} fast"
    words = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = words.encode(text, add_special_tokens=False).ids
    return float(reference_logits(folder, ids)[0].sigmoid())


def test_a_template_joins_texts_with_an_instruction(instructed: tuple[Server, Path]) -> None:
    server, folder = instructed
    target = [template_score(folder, QUERY, text, "find what fits") for text in DOCUMENTS]
    found = post(server, "/score", text_1=QUERY, text_2=DOCUMENTS)["data"]
    np.testing.assert_allclose([item["score"] for item in found], target, atol=1e-5)
    asked = "the cat ran"
    target = [template_score(folder, QUERY, text, asked) for text in DOCUMENTS]
    ranked = post(server, "/rerank", query=QUERY, documents=DOCUMENTS, instruction=asked)["results"]
    by_index = {one["index"]: one["relevance_score"] for one in ranked}
    np.testing.assert_allclose([by_index[i] for i in range(len(DOCUMENTS))], target, atol=1e-5)
    same = {"chat_template_kwargs": {"instruction": asked}}
    (score,) = post(server, "/score", text_1=QUERY, text_2=DOCUMENTS[0], **same)["data"]
    assert score["score"] == pytest.approx(target[0], abs=1e-5)
    for more, param in (
        ({"chat_template_kwargs": {"tone": "kind"}}, "chat_template_kwargs"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"text_2": "the " * 3000}, "text_2"),
    ):
        body = {"text_1": QUERY, "text_2": "a", **more}
        assert refused(server, "/score", **body)["param"] == param


def test_an_instruction_that_nothing_reads_is_refused(scorer: Server, embedder: Server) -> None:
    for server in (scorer, embedder):
        error = refused(server, "/score", text_1="a", text_2="b", instruction="c")
        assert error["param"] == "instruction"


# ---------------------------------------------------------------- Cohere's form


@pytest.fixture(scope="module")
def prompted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """An embedding model that wants a prompt before queries."""
    folder = tmp_path_factory.mktemp("prompted") / "model"
    shutil.copytree(minilm(), folder)
    prompts = {"prompts": {"query": "the query is ", "document": ""}}
    (folder / "config_sentence_transformers.json").write_text(json.dumps(prompts))
    with running(config(folder)) as server:
        yield server


def test_cohere_s_client_gets_embeddings(prompted: Server) -> None:
    asked = cohere.ClientV2(api_key="none", base_url=prompted.url)
    plain = np.asarray(
        [item["embedding"] for item in post(prompted, "/v1/embeddings", input=TEXTS)["data"]]
    )
    options: Any = {"model": MODEL, "texts": TEXTS, "input_type": "search_document"}
    response = asked.embed(**options)
    np.testing.assert_allclose(response.embeddings.float_, plain, atol=1e-6)
    assert response.texts == TEXTS and response.meta.api_version.version == "2"
    assert response.meta.billed_units.input_tokens > len(TEXTS)
    options["input_type"] = "search_query"
    queries = [f"the query is {text}" for text in TEXTS]
    target = [item["embedding"] for item in post(prompted, "/v1/embeddings", input=queries)["data"]]
    np.testing.assert_allclose(asked.embed(**options).embeddings.float_, target, atol=1e-6)
    bits = np.packbits(plain > 0, axis=1)
    options |= {"input_type": "classification", "embedding_types": ["binary", "ubinary", "base64"]}
    packed = asked.embed(**options).embeddings
    assert packed.float_ is None
    assert packed.ubinary == bits.tolist()
    assert packed.binary == (bits.astype(int) - 128).tolist()
    decoded = [np.frombuffer(base64.b64decode(text), "<f4") for text in packed.base64]
    np.testing.assert_allclose(decoded, plain, atol=1e-6)


def test_bad_requests_for_cohere_s_embeddings_name_the_field(prompted: Server) -> None:
    texts = {"texts": ["a"]}
    for more, param in (
        ({}, "texts"),
        ({**texts, "inputs": [{"content": [{"type": "text", "text": "b"}]}]}, "texts"),
        ({"texts": []}, "texts"),
        ({**texts, "truncate": "START"}, "truncate"),
        ({**texts, "max_tokens": 0}, "max_tokens"),
        ({**texts, "max_tokens": 2**40}, "max_tokens"),
        ({**texts, "max_tokens": 3, "truncate": "NONE"}, "max_tokens"),
        ({"texts": ["the " * 600], "truncate": "NONE"}, "texts"),
        ({**texts, "images": ["data:image/png;base64,xx"]}, "images"),
        ({**texts, "output_dimension": 3}, "output_dimension"),
        ({**texts, "priority": 3}, "priority"),
    ):
        assert refused(prompted, "/v2/embed", **more)["param"] == param, more
    assert "int8" in refused(prompted, "/v2/embed", **texts, embedding_types=["int8"])["message"]
    parts = [{"content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]
    joined = post(prompted, "/v2/embed", inputs=parts)
    assert joined["texts"] == ["a\nb"]
    long = post(prompted, "/v2/embed", texts=["the " * 600], max_tokens=5)
    assert long["meta"]["billed_units"]["input_tokens"] == 5


def test_rerank_returns_logits_on_request(scorer: Server) -> None:
    plain = post(scorer, "/rerank", query=QUERY, documents=DOCUMENTS[:1])["results"][0]
    raw = post(scorer, "/rerank", query=QUERY, documents=DOCUMENTS[:1], use_activation=False)
    logit = raw["results"][0]["relevance_score"]
    assert plain["relevance_score"] == pytest.approx(1 / (1 + np.exp(-logit)), abs=1e-5)


def test_vllms_names_for_vectors_are_taken_or_refused(embedder: Server) -> None:
    usual = {"truncation_side": "right", "padding": "do_not_pad", "endianness": "native"}
    body = {"input": TEXTS[0], "embed_dtype": "float32", **usual}
    [scaled] = post(embedder, "/v1/embeddings", **body)["data"]
    np.testing.assert_allclose(scaled["embedding"], expected(minilm(), TEXTS[:1])[0], atol=1e-4)
    [raw] = post(embedder, "/pooling", input=TEXTS[0], normalize=False)["data"]
    [same] = post(embedder, "/v1/embeddings", use_activation=False, **body)["data"]
    np.testing.assert_allclose(same["embedding"], raw["data"], atol=1e-6)
    for name, value in [
        ("truncation_side", "left"),
        ("padding", "max_length"),
        ("endianness", "big"),
        ("embed_dtype", "float16"),
    ]:
        error = refused(embedder, "/v1/embeddings", **{**body, name: value})
        assert error["param"] == name


def test_an_embedder_scores_by_cosine(embedder: Server) -> None:
    vectors = expected(minilm(), TEXTS)
    response = post(embedder, "/score", text_1=TEXTS[0], text_2=TEXTS)
    scores = [item["score"] for item in response["data"]]
    np.testing.assert_allclose(scores, vectors @ vectors[0], atol=1e-5)
    ranked = post(embedder, "/rerank", query="How is the weather?", documents=TEXTS)
    assert ranked["results"][0]["index"] == 1


def test_of_two_texts_the_one_at_fault_is_named(embedder: Server) -> None:
    long = "x " * 5000
    for path, body, field in (
        ("/score", {"text_1": long, "text_2": "b"}, "text_1"),
        ("/score", {"text_1": ["a", long], "text_2": ["b", "c"]}, "text_1"),
        ("/score", {"queries": "a", "documents": ["b", long]}, "documents"),
        ("/rerank", {"query": long, "documents": ["b"]}, "query"),
        ("/rerank", {"query": "a", "documents": ["b", long]}, "documents"),
    ):
        assert refused(embedder, path, **body)["param"] == field


def test_documents_of_parts_need_a_chat_template(embedder: Server) -> None:
    parts = [{"content": [{"type": "text", "text": "x"}]}]
    for path, body in (
        ("/rerank", {"query": "x", "documents": parts}),
        ("/score", {"text_1": "x", "text_2": parts[0]}),
    ):
        error = refused(embedder, path, **body)
        field = "documents" if path == "/rerank" else "text_2"
        assert error["param"] == field and error["message"].startswith(f"{field}: ")


# ---------------------------------------------------------------- the wrong kind


def test_a_model_of_vectors_generates_no_text(embedder: Server) -> None:
    for path, body in [
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}),
    ]:
        assert "gives vectors (embed, token_embed)" in refused(embedder, path, **body)["message"]


def test_a_model_of_text_gives_no_vectors() -> None:
    config = EngineConfig(
        served_model_name=(MODEL,), num_gpu_blocks_override=40, attention_backend="torch"
    )
    with running(config) as server:
        for path, body in [
            ("/v1/embeddings", {"input": "x"}),
            ("/pooling", {"input": "x"}),
            ("/classify", {"input": "x"}),
            ("/score", {"text_1": "x", "text_2": "y"}),
            ("/v2/rerank", {"query": "x", "documents": ["y"]}),
        ]:
            message = refused(server, path, **body)["message"]
            assert path in message and "it does generate" in message, message
            assert "--runner pooling" in message


# ---------------------------------------------------------------- LLM


def test_the_synchronous_face_embeds_and_scores() -> None:
    with LLM(str(minilm()), dtype="float32", device="cpu") as llm:
        outputs = llm.embed(TEXTS, use_tqdm=False)
        vectors = expected(minilm(), TEXTS)
        np.testing.assert_allclose([o.outputs.embedding for o in outputs], vectors, atol=1e-5)
        [raw] = llm.encode(TEXTS[0], PoolingParams(normalize=False), use_tqdm=False)
        assert np.linalg.norm(raw.outputs.data) > 1.1
        [cut] = llm.embed(TEXTS[0], truncate_prompt_tokens=3, use_tqdm=False)
        [same] = llm.encode(
            cut.prompt_token_ids, pooling_params=PoolingParams(), pooling_task="embed"
        )
        assert len(cut.prompt_token_ids) == 3
        np.testing.assert_allclose(cut.outputs.data, same.outputs.data, atol=1e-6)
        scores = llm.score(TEXTS[0], TEXTS)
        np.testing.assert_allclose(
            [o.outputs.score for o in scores], vectors @ vectors[0], atol=1e-5
        )
        with pytest.raises(InvalidRequest, match="params: 1 given for 3"):
            llm.encode(TEXTS, [PoolingParams()])
        with pytest.raises(InvalidRequest, match="not what this model does"):
            llm.classify("x")


def test_the_synchronous_face_classifies(cross_encoder: Path) -> None:
    with LLM(str(cross_encoder), dtype="float32", device="cpu") as llm:
        [output] = llm.classify("the cat", use_tqdm=False)
        assert len(output.outputs.probs) == 1
        [score] = llm.score("who", "the cat")
        assert score.outputs.score == pytest.approx(
            pair_score(cross_encoder, "who", "the cat"), abs=1e-5
        )
