"""Videos in prompts over HTTP: counts, and errors that name the part."""

from __future__ import annotations

import base64
import io
import re
import struct
from collections.abc import Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from PIL import Image
from seeing_models import picture, save
from serving import Server, running

from jackfield import EngineConfig
from jackfield.core.errors import ConfigError, InvalidRequest
from jackfield.core.media import video
from jackfield.core.protocols.media import Sampling

ASKED = {"type": "text", "text": "What happens?"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("videos")
    save("Qwen2VLForConditionalGeneration", folder)
    with running(
        EngineConfig(
            model=str(folder), device="cpu", dtype="float32", num_gpu_blocks_override=200,
            max_num_seqs=4, served_model_name=("seeing",), limit_mm_per_prompt={"video": 1},
        )
    ) as server:  # fmt: skip
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as client:
        yield client


def animated(count: int, width: int = 56, height: int = 56, kind: str = "GIF") -> bytes:
    file = io.BytesIO()
    first, *others = [picture(number, width, height) for number in range(count)]
    first.save(file, kind, save_all=True, append_images=others, duration=100)
    return file.getvalue()


def part(data: bytes | str, kind: str = "gif") -> dict[str, Any]:
    encoded = data if isinstance(data, str) else base64.b64encode(data).decode()
    return {"type": "video_url", "video_url": {"url": f"data:video/{kind};base64,{encoded}"}}


def chat(client: httpx.Client, content: Any, **fields: Any) -> httpx.Response:
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 4, "temperature": 0}
    return client.post("/v1/chat/completions", json=body | fields)


def test_a_video_is_counted(client: httpx.Client) -> None:
    answer = chat(client, [part(animated(20)), ASKED]).json()
    # Of 2 s, 2 frames per second are two pairs of 2 by 2 units.
    assert answer["usage"]["prompt_tokens_details"]["video_tokens"] == 8
    other = chat(client, [part(animated(19)), ASKED]).json()
    assert other["usage"]["prompt_tokens_details"]["video_tokens"] == 8


def gif_of_a_size(width: int, height: int) -> bytes:
    """One whose header says so."""
    data = bytearray(animated(2))
    data[6:10] = struct.pack("<HH", width, height)
    return bytes(data)


PLAYLIST = b"ffconcat version 1.0\nfile /etc/passwd\n"
WRONG = {
    "!!!": "is not base64",
    b"AAAA": "is no MP4|needs the package av",
    b"\x1aE\xdf\xa3" + bytes(100): "cannot be decoded|needs the package av",
    PLAYLIST: "is no MP4|needs the package av",
    b"GIF89a": "cannot be decoded",
    animated(3)[:-4000]: "cannot be decoded|ends after",
    gif_of_a_size(60000, 60000): "60000 x 60000 pixels|too much memory|cannot be decoded",
}


@pytest.mark.parametrize("data", WRONG, ids=range(len(WRONG)))
def test_a_broken_video_costs_its_request_with_the_name_of_its_part(
    data: bytes | str, client: httpx.Client
) -> None:
    answer = chat(client, [ASKED, part(data)])
    error = answer.json()["error"]
    assert answer.status_code == 400, error
    assert error["param"] == "messages[0].content[1].video_url.url"
    assert re.search(WRONG[data], error["message"]), error["message"]
    assert chat(client, "Still there?").status_code == 200


def test_what_is_not_taken_is_refused_by_name(client: httpx.Client) -> None:
    answer = chat(client, [part(animated(2)), part(animated(3))])
    assert answer.status_code == 400 and "limit_mm_per_prompt" in answer.json()["error"]["message"]
    url = {"type": "video_url", "video_url": {"url": "https://example.com/a.mp4"}}
    answer = chat(client, [url])
    assert "--allowed-media-domains" in answer.json()["error"]["message"]


def test_sound_that_the_model_does_not_hear_is_refused_by_name(client: httpx.Client) -> None:
    heard = {"use_audio_in_video": True}
    answer = chat(client, [part(animated(2)), ASKED], mm_processor_kwargs=heard)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "mm_processor_kwargs"
    assert "use_audio_in_video: is no option of this model's videos" in answer.text
    assert chat(client, "No video.", mm_processor_kwargs=heard).status_code == 200


def decode(data: Any) -> video.Video:
    return video.decode_video(data, Sampling(fps=None), "field")


def test_bounds_of_a_process(monkeypatch: pytest.MonkeyPatch) -> None:
    data = animated(40)
    assert len(decode(data).frames) == 40
    with monkeypatch.context() as changed:
        changed.setattr(video, "MAX_SOURCE_FRAMES", 39)
        with pytest.raises(InvalidRequest, match="more than 39 frames"):
            decode(data)
    with monkeypatch.context() as changed:
        changed.setattr(video, "MAX_FRAMES", 7)
        assert len(decode(data).frames) == 7
    with monkeypatch.context() as changed:
        changed.setattr(video, "MAX_VIDEO_PIXELS", 40 * 56 * 56 - 1)
        with pytest.raises(InvalidRequest, match="40 frames of 56 x 56 pixels"):
            decode(data)
    with monkeypatch.context() as changed:
        changed.setattr(video, "DECODE_MEMORY", 1 << 20)
        with pytest.raises(InvalidRequest, match="cannot be used"):
            decode(data)
    with monkeypatch.context() as changed:
        changed.setattr(video, "DECODE_SECONDS", 0)
        with pytest.raises(InvalidRequest, match="takes more than 0 seconds"):
            decode(data)


@pytest.mark.parametrize(
    "value", [3, np.zeros((2, 4, 4, 3)), np.zeros((0, 4, 4, 3), np.uint8), [1, 2], ([], 3.0)]
)
def test_what_is_no_video(value: Any) -> None:
    with pytest.raises(InvalidRequest, match="must be a URL"):
        decode(value)


def test_a_file_is_read_where_the_caller_gives_a_path(tmp_path: Any) -> None:
    file = tmp_path / "a.gif"
    file.write_bytes(animated(3))
    assert decode(file).indices == (0, 1, 2)
    with pytest.raises(InvalidRequest, match="No such file"):
        decode(tmp_path / "none.gif")
    frames = [Image.new("RGB", (8, 8)), Image.new("RGB", (8, 9))]
    with pytest.raises(InvalidRequest, match="of one size"):
        decode(frames)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"video": {"num_frames": 0}}, "num_frames"), ({"video": {"fps": -1}}, "fps"),
        ({"video": {"fps": 1, "num_frames": 3}}, "not both"), ({"image": {"a": 1}}, "video"),
        ([], "object"), ({"video": {"codec": "x"}}, "codec"),
    ],
)  # fmt: skip
def test_options_of_videos(options: Any, named: str) -> None:
    with pytest.raises(ConfigError, match=named) as raised:
        EngineConfig(model="m", media_io_kwargs=options)
    assert raised.value.param == "media_io_kwargs"
