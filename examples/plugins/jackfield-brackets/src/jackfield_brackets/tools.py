"""Tool calls as `[[weather city="Paris" days=3]]`: a name, then arguments with JSON for values."""

from __future__ import annotations

import json
import re

from jackfield.core.protocols import ArgumentForm, CallForm
from jackfield.plugins.parsing.cursor import SPACES, Marks, Read
from jackfield.plugins.parsing.tool_machine import ToolMachine

OPEN, CLOSE, EQUALS = Marks("[["), Marks("]]"), Marks("=")
WORD = re.compile(r"[\w.-]+")


class BracketsToolParser(ToolMachine):
    """A call needs the name of a tool that the request has: text may hold `[[links]]`, too.

    Arguments are handed on as they come. A call that goes wrong after its first argument has no
    end, and what follows is content; one that goes wrong before is content as it was written.
    """

    markers = ("[[", "]]")
    call_form = CallForm(
        trigger="[[",
        open="[[",
        begin="{name}",
        end="",
        between="]]\n[[",
        close="]]",
        quoted=False,
        arguments=ArgumentForm(begin=" {key}="),
    )
    """So a grammar can hold calls to their schemas. Text has no `[[links]]` then."""

    def read(self) -> Read[None]:
        """Content and calls in turn."""
        while mark := (yield from self.text.until(OPEN, self.answer.emit)):
            yield from self._call(mark)

    def _call(self, mark: str) -> Read[None]:
        text, answer = self.text, self.answer
        name = yield from text.run(WORD)
        source = [mark, name]
        """What was consumed and has not become a part of a call."""
        keys: set[str] = set()
        while name and self.known(name):
            space = yield from text.run(SPACES)
            source.append(space)
            if (yield from text.accept(CLOSE)):
                if not keys:
                    answer.start(name)
                    answer.arguments("{")
                answer.arguments("}")
                answer.end()
                return
            key = yield from text.run(WORD)
            equals = yield from text.accept(EQUALS)
            source += (key, equals)
            if not (space and key and equals) or key in keys:
                break
            if not keys:
                answer.start(name)
            answer.arguments(f"{', ' if keys else '{'}{json.dumps(key, ensure_ascii=False)}: ")
            keys.add(key)
            source.clear()
            if (yield from text.json(lambda part: None, answer.arguments)) != "done":
                return
        answer.emit("".join(source))
