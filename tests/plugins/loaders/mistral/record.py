"""Writes mistral_common.json: what the package mistral-common makes of the texts and chats of
`tekken_files`. Run where it is installed; tests read the file.

    python tests/plugins/loaders/mistral/record.py
"""

from __future__ import annotations

import json
import tempfile
from importlib.metadata import version as version_of
from pathlib import Path
from typing import Any

from mistral_common.protocol.instruct.request import ChatCompletionRequest
from mistral_common.tokens.tokenizers.mistral import MistralTokenizer
from tekken_files import TEXTS, VERSIONS, chats, write_tekken

RECORDED = Path(__file__).with_name("mistral_common.json")


def recorded(version: str) -> dict[str, Any]:
    """Return token ids of texts and chats."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer = MistralTokenizer.from_file(write_tekken(Path(folder), version) / "tekken.json")
    tekken: Any = tokenizer.instruct_tokenizer.tokenizer
    requests = {
        name: ChatCompletionRequest.from_openai(messages=chat, tools=tools)
        for name, (chat, tools) in chats(version).items()
    }
    return {
        "texts": [tekken.encode(text, bos=True, eos=False) for text in TEXTS],
        "chats": {
            name: tokenizer.encode_chat_completion(request).tokens
            for name, request in requests.items()
        },
    }


if __name__ == "__main__":
    content = {"mistral_common": version_of("mistral-common")}
    content |= {version: recorded(version) for version in VERSIONS}
    RECORDED.write_text(json.dumps(content, separators=(",", ":")) + "\n")
