"""Errors of a chat request, in the field names of another protocol."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

from ....core.errors import JackfieldError

E = TypeVar("E", bound=JackfieldError)


def rename_field(error: E, names: Mapping[str, str]) -> E:
    """Return the error with its field renamed, in the message too.

    names: field of a chat request → own field; longer names of one beginning first.
    """
    for chat, own in names.items():
        param = error.param
        if param is not None and (param == chat or param.startswith((f"{chat}.", f"{chat}["))):
            error.param = own + param[len(chat) :]
            error.message = error.message.replace(param, error.param, 1)
            break
    error.args = (error.message,)
    return error
