"""`--url` of `jackfield chat` and `jackfield complete`."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from serving import Server, running, save_random
from serving import engine_config as config

from jackfield.entrypoints.cli.main import main


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with running(config(save_random(tmp_path_factory.mktemp("random")))) as running_server:
        yield running_server


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_the_address_may_be_openai_s_base_url(
    server: Server, end: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status = main(["complete", "x", "--url", server.url + end, "--max-tokens", "2"])
    assert (status, capsys.readouterr().err) == (0, "")


@pytest.mark.parametrize("url", ["nonsense", "localhost:8000", "http://", "http://a:b", "file:///"])
@pytest.mark.parametrize("command", ["chat", "complete"])
def test_what_is_no_address_is_refused_by_the_flag_s_name(
    command: str, url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as raised:
        main([command, "--url", url])
    assert raised.value.code == 2
    assert f"--url: must be like http://127.0.0.1:8000, got '{url}'" in capsys.readouterr().err
