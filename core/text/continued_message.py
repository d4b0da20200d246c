"""`continue_final_message`: a rendering that ends where the final message does.

The end is marked in the message, and the rendering cut off there.
"""

from __future__ import annotations

from ..errors import InvalidRequest
from .chat_messages import Message
from .template_fallbacks import joined_parts

_END = "\ufdd2"
"""Marks the final content's end while rendering a continuation."""


def mark_end(message: Message) -> None:
    """Mark the end of a message's content. Raises InvalidRequest if it does not end with text."""
    content = message["content"]
    if not content or (isinstance(content, list) and not joined_parts(content)):
        raise InvalidRequest(
            "continue_final_message: the final message has no content to continue",
            param="continue_final_message",
        )
    if isinstance(content, list):
        if content[-1]["type"] != "text":
            raise InvalidRequest(
                "continue_final_message: the final message does not end with text",
                param="continue_final_message",
            )
        content[-1] = {**content[-1], "text": _ended(content[-1]["text"])}
    else:
        message["content"] = _ended(content)


def _ended(text: str) -> str:
    # The space shows whether the template trims the content.
    return text.replace(_END, "\ufffd") + _END + " "


def cut_at_end(text: str) -> str:
    """Return a rendering up to the mark, trimmed like transformers' if the template trimmed the
    content.
    """
    end = text.rfind(_END)
    if end < 0:
        raise InvalidRequest(
            "continue_final_message: the chat template does not write the final message as it is",
            param="continue_final_message",
        )
    kept = text[:end].replace(_END, "")
    return kept if text[end + 1 : end + 2] == " " else kept.rstrip()
