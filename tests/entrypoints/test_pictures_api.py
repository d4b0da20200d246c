"""Pictures over every route: the same prompt, the same counts, and errors that name the part."""

from __future__ import annotations

import base64
import io
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from PIL import Image
from seeing_models import picture, save
from serving import Server, running

from jackfield import EngineConfig

LIMIT = 3


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("llava")
    save("LlavaForConditionalGeneration", folder)
    with running(
        EngineConfig(
            model=str(folder), device="cpu", dtype="float32", num_gpu_blocks_override=200,
            max_num_seqs=4, served_model_name=("seeing",), limit_mm_per_prompt={"image": LIMIT},
        )
    ) as server:  # fmt: skip
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return base64.b64encode(file.getvalue()).decode()


def url_of(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    return f"data:image/{kind.lower()};base64,{encoded(image, kind, **options)}"


PICTURE = picture(1)
URL = url_of(PICTURE)
ASKED = "What is this?"
SAID = {"max_tokens": 6, "temperature": 0}


def chat_content(url: str = URL) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": ASKED}]


def chat(client: httpx.Client, content: Any, **fields: Any) -> httpx.Response:
    messages = [{"role": "user", "content": content}]
    return client.post("/v1/chat/completions", json={"messages": messages, **SAID, **fields})


def test_every_route_computes_the_same_prompt(client: httpx.Client) -> None:
    answer = chat(client, chat_content()).json()
    text, count = answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens"]
    assert count > 16 + len(ASKED)
    messages = [{"role": "user", "content": chat_content()}]
    counted = client.post("/tokenize", json={"messages": messages}).json()
    assert counted["count"] == len(counted["tokens"]) == count
    assert counted["tokens"].count(300) == 16

    parts = [{"type": "input_image", "image_url": URL}, {"type": "input_text", "text": ASKED}]
    response = client.post("/v1/responses", json={
        "input": [{"role": "user", "content": parts}], "temperature": 0, "max_output_tokens": 6,
    }).json()  # fmt: skip
    assert response["usage"]["input_tokens"] == count
    assert response["output"][-1]["content"][0]["text"] == text
    again = client.post("/v1/responses", json={
        "input": "And now?", "previous_response_id": response["id"], "temperature": 0,
        "max_output_tokens": 6, "truncation": "auto",
    }).json()  # fmt: skip
    assert again["usage"]["input_tokens"] > count

    source = {"type": "base64", "media_type": "image/png", "data": encoded(PICTURE)}
    blocks = [{"type": "image", "source": source}, {"type": "text", "text": ASKED}]
    body = {"model": "seeing", "messages": [{"role": "user", "content": blocks}]}
    message = client.post("/v1/messages", json={**body, **SAID}).json()
    used = message["usage"]
    assert used["input_tokens"] + used["cache_read_input_tokens"] == count
    assert message["content"][0]["text"] == text
    tokens = client.post("/v1/messages/count_tokens", json=body).json()
    assert tokens["input_tokens"] == count

    options = {"num_predict": 6, "temperature": 0}
    common = {"model": "seeing", "options": options, "stream": False}
    said = {"role": "user", "content": ASKED, "images": [encoded(PICTURE)]}
    answer = client.post("/api/chat", json={**common, "messages": [said]}).json()
    assert (answer["message"]["content"], answer["prompt_eval_count"]) == (text, count)
    asked = {"prompt": ASKED, "images": [encoded(PICTURE)]}
    answer = client.post("/api/generate", json={**common, **asked}).json()
    assert (answer["response"], answer["prompt_eval_count"]) == (text, count)
    shown = client.post("/api/show", json={"model": "seeing"}).json()
    assert "vision" in shown["capabilities"]


def test_other_pictures_say_other_things_and_the_same_in_another_file_does_not(
    client: httpx.Client,
) -> None:
    def said(url: str) -> str:
        return str(chat(client, chat_content(url)).json()["choices"][0]["message"]["content"])

    assert said(url_of(picture(2))) != said(URL) == said(url_of(PICTURE, "BMP"))
    turned = picture(1).transpose(Image.Transpose.ROTATE_90)
    exif = Image.Exif()
    exif[0x112] = 6  # To be turned by 90 degrees clockwise.
    assert said(url_of(turned, "PNG", exif=exif)) == said(URL)


def test_the_text_that_a_user_types_is_no_placeholder(client: httpx.Client) -> None:
    content = [*chat_content(), {"type": "text", "text": "<image> and <image>"}]
    answer = chat(client, content).json()
    assert "error" not in answer
    plain = chat(client, "<image>").json()
    assert plain["usage"]["prompt_tokens"] >= len("user: <image>\n")


def bomb(side: int = 30000) -> str:
    """A PNG of a few bytes whose header says that it has many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        crc = zlib.crc32(kind + data)
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", crc)

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    data = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0"))
    return "data:image/png;base64," + base64.b64encode(data + chunk(b"IEND", b"")).decode()


def animated() -> str:
    file = io.BytesIO()
    frames = [picture(seed, 8, 8) for seed in range(3)]
    frames[0].save(file, "GIF", save_all=True, append_images=frames[1:])
    return "data:image/gif;base64," + base64.b64encode(file.getvalue()).decode()


BROKEN = {
    "data:image/png;base64,!!!": "is not base64",
    "data:image/png;base64,AAAA": "is no picture",
    "data:text/plain,hello": "must be data:image/",
    URL[: len(URL) // 2 // 4 * 4 + 2]: "cannot be decoded|not base64",
    bomb(): "more pixels than the 67108864",
    bomb(9000): "9000 x 9000 pixels",
    animated(): "animated",
    url_of(Image.new("RGB", (402, 2))): "too narrow",
    "https://example.com/a.png": "--allowed-media-domains",
    "http://127.0.0.1/a.png": "--allowed-media-domains",
    "file:///etc/passwd": "--allowed-local-media-path",
    "gopher://example.com/": "must be a URL that begins with",
    "cat.png": "must be a URL that begins with",
}


@pytest.mark.parametrize("url", BROKEN, ids=range(len(BROKEN)))
def test_a_broken_picture_costs_its_request_with_the_name_of_its_part(
    url: str, client: httpx.Client
) -> None:
    import re

    content = [{"type": "text", "text": ASKED}, chat_content(url)[0]]
    answer = chat(client, content)
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == "messages[0].content[1].image_url.url"
    assert re.search(BROKEN[url], error["message"]), error["message"]
    assert str(url)[-40:] not in error["message"] or len(url) < 60
    assert chat(client, "Still there?").status_code == 200


def test_errors_of_other_routes_name_their_own_fields(client: httpx.Client) -> None:
    bad = "data:image/png;base64,AAAA"
    parts = [{"type": "input_text", "text": ASKED}, {"type": "input_image", "image_url": bad}]
    answer = client.post("/v1/responses", json={"input": [{"role": "user", "content": parts}]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input[0].content[1].image_url"
    source = {"type": "base64", "media_type": "image/png", "data": "AAAA"}
    body = {"model": "seeing", "max_tokens": 3, "messages": [
        {"role": "user", "content": [{"type": "image", "source": source}]},
    ]}  # fmt: skip
    answer = client.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert "messages[0].content[0].source.data" in answer.json()["error"]["message"]
    said = {"role": "user", "content": "", "images": ["AAAA"]}
    answer = client.post("/api/chat", json={"model": "seeing", "messages": [said]})
    assert answer.status_code == 400 and answer.json()["error"].startswith("messages[0].images[0]")
    body = {"model": "seeing", "prompt": "x", "images": ["AAAA"]}
    answer = client.post("/api/generate", json=body)
    assert answer.status_code == 400 and answer.json()["error"].startswith("images[0]")


def test_what_is_not_taken_is_refused_by_name(client: httpx.Client) -> None:
    sound = {"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}
    answer = chat(client, [sound])
    assert answer.status_code == 400
    assert "takes text and image" in answer.json()["error"]["message"]
    answer = chat(client, [*[chat_content()[0]] * (LIMIT + 1)])
    assert answer.status_code == 400 and "limit_mm_per_prompt" in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == f"messages[0].content[{LIMIT}].image_url.url"
    answer = chat(client, chat_content(), truncate_prompt_tokens=5)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "truncate_prompt_tokens"


def test_files_are_what_their_type_or_name_says(client: httpx.Client) -> None:
    expected = chat(client, chat_content()).json()
    text = chat_content()[1]
    for file in ({"file_data": URL}, {"file_data": encoded(PICTURE), "filename": "a.b.PNG"}):
        answer = chat(client, [{"type": "file", "file": file}, text])
        assert answer.json()["choices"][0]["message"] == expected["choices"][0]["message"]
        assert answer.json()["usage"]["prompt_tokens"] == expected["usage"]["prompt_tokens"]
        parts = [{"type": "input_file", **file}, {"type": "input_text", "text": ASKED}]
        body = {
            "model": "seeing", "input": [{"role": "user", "content": parts}], "temperature": 0,
            "max_output_tokens": 6,
        }  # fmt: skip
        response = client.post("/v1/responses", json=body).json()
        said = response["output"][0]["content"][0]["text"]
        assert said == expected["choices"][0]["message"]["content"]
        # Sent once more with the items that are kept.
        again = client.get(f"/v1/responses/{response['id']}/input_items").json()
        assert again["data"][0]["content"][0]["file_data"] == file["file_data"]


@pytest.mark.parametrize(
    ("file", "reason"),
    [
        ({"file_data": "data:application/pdf;base64,AAAA"}, "is application/pdf; a file must be"),
        ({"file_data": "data:;base64,AAAA"}, "is without a type"),
        ({"file_data": "AAAA"}, "without a filename"),
        ({"file_data": "AAAA", "filename": "a.txt"}, "is text/plain"),
        ({"file_data": "data:image/png;base64,AAAA"}, "is no picture"),
        ({"file_id": "file-1"}, "must be a data: URL or base64; files are not kept here"),
        ({"file_data": "data:video/mp4;base64,AAAA"}, "takes text and image"),
    ],
)
def test_files_that_are_no_pictures_are_named(
    file: dict[str, Any], reason: str, client: httpx.Client
) -> None:
    answer = chat(client, [{"type": "file", "file": file}])
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "messages[0].content[0].file.file_data"
    content = [{"role": "user", "content": [{"type": "input_file", **file}]}]
    answer = client.post("/v1/responses", json={"model": "seeing", "input": content})
    assert answer.status_code == 400 and reason in answer.json()["error"]["message"]
    assert answer.json()["error"]["param"] == "input[0].content[0].file_data"


async def test_a_text_only_server_says_why(tmp_path: Path) -> None:
    from jackfield import AsyncEngine
    from jackfield.core.errors import InvalidRequest

    save("LlavaForConditionalGeneration", tmp_path)
    config = EngineConfig(
        model=str(tmp_path), device="cpu", dtype="float32", num_gpu_blocks_override=50,
        language_model_only=True,
    )  # fmt: skip
    async with AsyncEngine(config) as engine:
        assert not any("vision" in name for name in engine.model_config.hf_config.to_dict())
        with pytest.raises(InvalidRequest, match="language_model_only"):
            await anext(engine.chat([{"role": "user", "content": chat_content()}]))
        with pytest.raises(InvalidRequest, match="language_model_only"):
            await anext(engine.generate({"prompt": "a", "multi_modal_data": {"image": PICTURE}}))


def test_detail_low_makes_a_picture_smaller(client: httpx.Client) -> None:
    """The cache finds the smaller picture, by either route, and nothing else."""
    for seed, route in enumerate(("chat", "responses"), 77):
        whole, smaller = picture(seed, 1024, 700), picture(seed, 1024, 700)
        smaller.thumbnail((512, 512))

        def cached(image: Image.Image, detail: str | None, route: str = route) -> int:
            more = {} if detail is None else {"detail": detail}
            if route == "chat":
                content = [
                    {"type": "image_url", "image_url": {"url": url_of(image), **more}},
                    {"type": "text", "text": ASKED},
                ]
                usage = chat(client, content).json()["usage"]
                return usage["prompt_tokens_details"]["cached_tokens"]
            part = {"type": "input_image", "image_url": url_of(image), **more}
            text = {"type": "input_text", "text": ASKED}
            usage = client.post("/v1/responses", json={
                "input": [{"role": "user", "content": [part, text]}], "max_output_tokens": 16,
            }).json()["usage"]  # fmt: skip
            return usage["input_tokens_details"]["cached_tokens"]

        cached(whole, "low")
        assert cached(smaller, None) > 16
        assert cached(whole, None) < 16
        assert cached(whole, "high") > 16


def test_a_wrong_detail_is_named(client: httpx.Client) -> None:
    content = [{"type": "image_url", "image_url": {"url": URL, "detail": "medium"}}]
    error = chat(client, content).json()["error"]
    assert error["param"] == "messages[0].content[0].image_url.detail"
    assert "auto, low, high, original" in error["message"]


@pytest.mark.parametrize("route", ["/v1/chat/completions", "/tokenize"])
def test_options_that_a_request_may_not_lower_are_named(client: httpx.Client, route: str) -> None:
    messages = [{"role": "user", "content": chat_content()}]
    body = {"messages": messages, "mm_processor_kwargs": {"size": {"shortest_edge": 9999}}}
    error = client.post(route, json=body).json()["error"]
    assert error["param"] == "mm_processor_kwargs"
    assert error["message"].startswith("mm_processor_kwargs.size: is no option")
