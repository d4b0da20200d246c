"""Clients of a module's own fixture `server`."""

from __future__ import annotations

from collections.abc import AsyncIterator

import openai
import pytest
from serving import Server


@pytest.fixture(scope="module")
def client(server: Server) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


@pytest.fixture
async def asynchronous(server: Server) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0
    ) as api_client:
        yield api_client
