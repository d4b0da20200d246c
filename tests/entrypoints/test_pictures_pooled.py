"""Vectors and scores of pictures, beside transformers."""

from __future__ import annotations

import base64
import copy
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
import transformers
from seeing_models import FAMILIES, TEXT, picture, randomize, save
from serving import Server, running

from jackfield import AsyncEngine, EngineConfig, PoolingParams
from jackfield.core.errors import InvalidRequest
from jackfield.entrypoints.scoring import score_all, scored_texts

QWEN2, QWEN3 = (f"{name}ForConditionalGeneration" for name in ("Qwen2VL", "Qwen3VL"))
GEMMA = "Gemma3ForConditionalGeneration"
PALI = "PaliGemmaForConditionalGeneration"
SIZES = ((96, 72), (60, 110), (40, 40))


def options_of(folder: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        model=str(folder), device="cpu", dtype="float32", block_size=4, max_model_len=400,
        num_gpu_blocks_override=400,
        **{"max_num_batched_tokens": 20, "runner": "pooling", **options},
    )  # fmt: skip


def inputs_of(architecture: str, folder: Path, text: str, images: list[Any]) -> dict[str, Any]:
    processor = FAMILIES[architecture].reference(folder)
    return dict(processor(images=images or None, text=text, return_tensors="pt"))


@torch.no_grad()
def vector_of(
    architecture: str, folder: Path, model: Any, text: str, images: list[Any]
) -> np.ndarray:
    """Return the last token's state, normalised."""
    states = model.model(**inputs_of(architecture, folder, text, images)).last_hidden_state[0, -1]
    return np.asarray(torch.nn.functional.normalize(states, dim=-1))


@pytest.mark.parametrize("architecture", [QWEN2, QWEN3, GEMMA])
async def test_vectors_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    """In chunks that end inside pictures, with prefix hits, and beside texts."""
    model = save(architecture, tmp_path)
    written = FAMILIES[architecture].written
    images = [picture(seed, *size) for seed, size in enumerate(SIZES)]
    cases: list[tuple[str, list[Any]]] = [
        (f"See {written}.", images[:1]), (f"See {written}.", images[1:2]),
        (f"{written} or {written}?", images[1:]), ("Only words.", []),
        (f"See {written}.", images[:1]),
    ]  # fmt: skip
    async with AsyncEngine(options_of(tmp_path)) as engine:
        for text, own in cases:
            prompt: Any = {"prompt": text, "multi_modal_data": {"image": own}} if own else text
            output = await engine.encode(prompt, PoolingParams(task="embed"))
            want = vector_of(architecture, tmp_path, model, text, own)
            assert np.allclose(output.outputs.data, want, atol=2e-5), text
            assert len(output.prompt_token_ids) == inputs_of(
                architecture, tmp_path, text, own
            )["input_ids"].shape[1]  # fmt: skip


def save_retrieval(folder: Path, base: str) -> Any:
    """Save ColQwen2, ColQwen2.5 or ColPali on a base."""
    save(base, folder)
    inner = {**copy.deepcopy(FAMILIES[base].config), "tie_word_embeddings": False}
    inner["model_type"] = getattr(transformers, base).config_class.model_type
    name = "ColQwen2"
    if base == PALI:
        name = "ColPali"
        inner["text_config"] = {**TEXT, "model_type": "gemma"}
    config = getattr(transformers, f"{name}Config")(vlm_config=inner, embedding_dim=24)
    torch.manual_seed(3)
    model: Any = getattr(transformers, f"{name}ForRetrieval")(config).float().eval()
    randomize(model)
    model.save_pretrained(folder)
    return model


@torch.no_grad()
def token_vectors(base: str, folder: Path, model: Any, text: str, images: list[Any]) -> Any:
    inputs = inputs_of(base, folder, text, images)
    if base == PALI:
        return model(**inputs).embeddings[0]
    kept = {name: inputs[name] for name in ("input_ids", "attention_mask")}
    if images:
        grids = inputs["image_grid_thw"]
        pixels = inputs["pixel_values"].split(grids.prod(-1).tolist())
        padded = torch.nn.utils.rnn.pad_sequence(pixels, batch_first=True)
        kept |= {"pixel_values": padded, "image_grid_thw": grids}
    return model(**kept).embeddings[0]


@pytest.mark.parametrize("base", [QWEN2, "Qwen2_5_VLForConditionalGeneration", PALI])
async def test_tokens_of_texts_and_pictures_have_vectors_that_are_compared(
    base: str, tmp_path: Path
) -> None:
    """ColQwen2, in chunks that end inside pictures, and ColPali; scores as their processors compute
    them."""
    model = save_retrieval(tmp_path, base)
    written = FAMILIES[base].written
    images = [picture(seed, *size) for seed, size in enumerate(SIZES)]
    cases: list[tuple[str, list[Any]]] = [
        ("Query: a cat?", []), (f"See {written}.", images[:1]), (f"See {written}.", images[1:2]),
        (f"{written} or {written}?", images[1:]),
    ]  # fmt: skip
    want = [token_vectors(base, tmp_path, model, *case) for case in cases]
    step = {"max_num_batched_tokens": 100} if base == PALI else {}  # It takes prompts whole.
    config = options_of(tmp_path, runner="auto", **step)
    async with AsyncEngine(config) as engine:
        assert engine.supported_tasks == ("token_embed",)
        for (text, own), vectors in zip(cases, want, strict=True):
            prompt: Any = {"prompt": text, "multi_modal_data": {"image": own}} if own else text
            output = await engine.encode(prompt, PoolingParams())
            assert np.allclose(output.outputs.data, vectors, atol=2e-5), text
        shown = [{"content": [{"type": "image", "image": image}]} for image in images[:2]]
        documents = scored_texts([*shown, "a dog"], "documents")
        [query] = scored_texts(["Query: a cat?"], "query")
        outputs = await score_all(engine, [(query, document) for document in documents])
        texts = [*[(f"user: {written}", [image]) for image in images[:2]], ("a dog", [])]
        for output, case in zip(outputs, texts, strict=True):
            vectors = token_vectors(base, tmp_path, model, *case)
            score = (want[0] @ vectors.T).max(dim=1).values.sum().item()
            assert output.outputs.score == pytest.approx(score, abs=1e-4)
        with pytest.raises(InvalidRequest, match="'embed' is not what this model does"):
            await engine.encode("x", PoolingParams(task="embed"))


# ---------------------------------------------------------------- over HTTP


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("qwen")


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return save(QWEN2, folder)


@pytest.fixture(scope="module")
def server(model: Any, folder: Path) -> Iterator[Server]:
    with running(options_of(folder, limit_mm_per_prompt={"image": 2})) as server:
        yield server


def part_of(image: Any) -> dict[str, Any]:
    file = io.BytesIO()
    image.save(file, "PNG")
    data = base64.b64encode(file.getvalue()).decode()
    return {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{data}"}}


BROKEN = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


def post(server: Server, route: str, **body: Any) -> Any:
    return httpx.post(f"{server.url}{route}", json=body, timeout=60)


def chat_vector(folder: Path, model: Any, content: list[Any]) -> np.ndarray:
    """Return the vector of a user's message, of pictures and texts."""
    written, images = "", []
    for each in content:
        written += each if isinstance(each, str) else FAMILIES[QWEN2].written
        images += [] if isinstance(each, str) else [each]
    return vector_of(QWEN2, folder, model, f"user: {written}", images)


def test_messages_with_pictures_are_embedded(server: Server, model: Any, folder: Path) -> None:
    content = [part_of(picture(1)), {"type": "text", "text": "a cat?"}]
    messages = [{"role": "user", "content": content}]
    want = chat_vector(folder, model, [picture(1), "a cat?"])
    for route, name in (("/v1/embeddings", "embedding"), ("/pooling", "data")):
        answer = post(server, route, messages=messages).json()
        assert np.allclose(answer["data"][0][name], want, atol=2e-5)
        assert answer["usage"]["prompt_tokens"] > len("user: a cat?") + 4
    messages[0]["content"] = [{"type": "text", "text": "?"}, BROKEN]
    error = post(server, "/v1/embeddings", messages=messages).json()["error"]
    assert error["param"] == "messages[0].content[1].image_url.url"


def test_pictures_are_scored_and_ranked_by_cosine(server: Server, model: Any, folder: Path) -> None:
    images = [picture(seed, *size) for seed, size in enumerate(SIZES)]
    parts = [part_of(image) for image in images]
    vectors = [chat_vector(folder, model, [image]) for image in images]
    query = vector_of(QWEN2, folder, model, "a cat", [])
    want = [float(query @ vector) for vector in vectors]
    alone = {"content": parts}
    listed = [{"content": [part]} for part in parts]
    for documents in (alone, listed):
        answer = post(server, "/score", text_1="a cat", text_2=documents).json()
        assert np.allclose([each["score"] for each in answer["data"]], want, atol=2e-5)
        ranked = post(server, "/rerank", query="a cat", documents=documents).json()["results"]
        order = sorted(range(3), key=lambda number: -want[number])
        assert [each["index"] for each in ranked] == order
        assert ranked[0]["document"] == {"multi_modal": [parts[order[0]]]}
    mixed: list[Any] = ["a dog", {"content": [*parts[:1], {"type": "text", "text": "!"}]}]
    answer = post(server, "/score", data_1={"content": parts[1:2]}, data_2=mixed).json()
    others = [
        vector_of(QWEN2, folder, model, "a dog", []), chat_vector(folder, model, [images[0], "!"])
    ]  # fmt: skip
    scores = [float(vectors[1] @ other) for other in others]
    assert np.allclose([each["score"] for each in answer["data"]], scores, atol=2e-5)


@pytest.mark.parametrize(
    ("documents", "field"),
    [
        ([{"content": [{"type": "text", "text": "?"}, BROKEN]}], "documents[0].content[1]"),
        ({"content": [BROKEN]}, "documents.content[0]"),
        ([{"content": []}], "documents"), ({"content": "x"}, "documents"),
        ([{"content": ["x"]}], "documents[0].content[0]"), ([{"image": "x"}], "documents"),
    ],
    ids=range(6),
)  # fmt: skip
def test_documents_that_are_none_are_named(server: Server, documents: Any, field: str) -> None:
    response = post(server, "/rerank", query="x", documents=documents)
    assert response.status_code == 400
    assert response.json()["error"]["param"].startswith(field)


TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% if message['content'] is string %}"
    "{{ message['content'] }}{% else %}{% for part in message['content'] %}"
    "{% if part['type'] == 'text' %}{{ part['text'] }}{% else %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}{% endfor %}"
    "{% if messages[0]['role'] == 'query' or messages[0]['role'] == 'document' %}?{% endif %}"
)


async def test_a_cross_encoder_reads_a_picture_beside_its_query(tmp_path: Path) -> None:
    """As vLLM's users start a reranker of Qwen3-VL, whose logits of two words are compared."""
    model = save(QWEN3, tmp_path)
    template = tmp_path / "reranker.jinja"
    template.write_text(TEMPLATE)
    config = options_of(
        tmp_path, chat_template=str(template),
        hf_overrides={
            "architectures": ["Qwen3VLForSequenceClassification"],
            "classifier_from_token": ["n", "y"], "is_original_qwen3_reranker": True,
        },
    )  # fmt: skip
    text = f"query: a catdocument: {FAMILIES[QWEN3].written} or a dog?"
    inputs = inputs_of(QWEN3, tmp_path, text, [picture(3)])
    processor: Any = FAMILIES[QWEN3].reference(tmp_path)
    no, yes = (processor(images=None, text=word, return_tensors="pt")["input_ids"][0, 0]
               for word in ("n", "y"))  # fmt: skip
    with torch.no_grad():
        logits = model(**inputs).logits[0, -1]
    want = torch.softmax(logits[[int(no), int(yes)]], dim=0)[1].item()
    image = {"type": "image", "image": picture(3)}
    document = {"content": [image, {"type": "text", "text": " or a dog"}]}
    async with AsyncEngine(config) as engine:
        pairs = [("a cat", *scored_texts([document], "documents"))]
        [output] = await score_all(engine, pairs)  # type: ignore[arg-type]
        assert output.outputs.score == pytest.approx(want, abs=2e-5)
        assert len(output.prompt_token_ids) == inputs["input_ids"].shape[1]
        with pytest.raises(InvalidRequest, match="is no picture"):
            await score_all(engine, [("a", *scored_texts([{"content": [BROKEN]}], "x"))])
