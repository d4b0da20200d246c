"""`jackfield chat`: a conversation with a running server."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

from ...core.local_path import local_path
from ...core.spelling import nearest
from .client import Client, Display, make_parser
from .line_editing import LineEditing

HELP = """\
  /help              this list
  /clear             forget the conversation
  /retry             ask for another answer to the last message
  /set               show the settings
  /set NAME VALUE    change one: {names}
  /set NAME          leave it to the server again
  /system TEXT       set the system prompt; without TEXT: none
  /save FILE         write the conversation to a new file (JSON)
  /load FILE         go on with a conversation from a file
  /exit              end; Ctrl-D, too
A line that ends in \\ goes on in the next one. Ctrl-C ends an answer, not the conversation."""
SETTINGS = (
    "model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop",
    "presence_penalty", "frequency_penalty", "repetition_penalty", "reasoning_effort",
    "chat_template_kwargs",
)  # fmt: skip
"""Request fields for /set."""


class Misused(Exception):
    """A command of the conversation cannot be carried out; the text says why."""


def run(argv: list[str]) -> int:
    """Return the exit status."""
    parser = make_parser(
        "chat", "Talk to a running server. In a conversation, /help lists commands."
    )
    parser.add_argument(
        "-m", "--message", "-q", "--quick", metavar="TEXT", help="send this one message and end"
    )
    parser.add_argument("--system", "--system-prompt", metavar="TEXT", help="system prompt")
    parser.add_argument(
        "--history-file",
        metavar="FILE",
        default=LineEditing.default_file(),
        help="where lines that were typed are kept for the arrow keys, readable by you alone "
        "(default: jackfield/chat_history in the folder for states)",
    )
    parser.add_argument(
        "--no-history", dest="history_file", action="store_const", const=None,
        help="keep none",
    )  # fmt: skip
    args = parser.parse_args(argv)
    conversation = Conversation(Client(args), args.system)
    if args.message is not None:
        return 0 if conversation.say(args.message) else 1
    return converse(conversation, LineEditing(args.history_file))


class Conversation:
    """Messages so far, and the requests' options."""

    def __init__(self, client: Client, system: str | None) -> None:
        self.client = client
        self.system = system
        self.messages: list[dict[str, str]] = []

    def say(self, text: str) -> bool:
        """Send a message and show the response. Return whether there was one; without, the message
        is dropped.
        """
        self.messages.append({"role": "user", "content": text})
        answer = ""

        def parts() -> Iterator[tuple[str, str]]:
            nonlocal answer
            for choice in self.client.choices("/v1/chat/completions", messages=self._sent()):
                delta = choice.get("delta") or {}
                reasoning = delta.get("reasoning_content") or delta.get("reasoning") or ""
                content = delta.get("content") or ""
                answer += content
                yield reasoning, content

        try:
            Display().show(parts())
        except OSError as error:
            self.messages.pop()
            print(f"jackfield: {self.client.explained(error)}", file=sys.stderr)
            return False
        except BaseException:  # Ctrl-C: what has come stays.
            self._keep(answer)
            raise
        self._keep(answer)
        self.client.show_stats()
        return True

    def _sent(self) -> list[dict[str, str]]:
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return system + self.messages

    def _keep(self, answer: str) -> None:
        if answer:
            self.messages.append({"role": "assistant", "content": answer})
        else:
            self.messages.pop()


def converse(conversation: Conversation, lines: LineEditing) -> int:
    """Read messages until the input ends; return the exit status: 1 if the last message had no
    response.
    """
    status = 0
    while True:
        try:
            text = _read(lines)
        except EOFError:
            print()
            return status
        except KeyboardInterrupt:  # What was typed is dropped, as in a shell.
            print("\n(Ctrl-D or /exit ends the conversation)")
            continue
        except UnicodeDecodeError as error:
            print(f"jackfield: the input is no text in UTF-8: {error}", file=sys.stderr)
            return 1
        try:
            if text.startswith("/") and not text.startswith("//"):
                _carry_out(conversation, text)
            elif text.strip():
                status = 0 if conversation.say(text.removeprefix("/")) else 1
        except EOFError:  # /exit
            return status
        except KeyboardInterrupt:
            print("(stopped)")
        except Misused as error:
            print(f"jackfield: {error}", file=sys.stderr)


def _read(lines: LineEditing) -> str:
    """Return a message of one or more lines. Raises EOFError."""
    text = lines.read("> ")
    while text.endswith("\\"):
        text = text[:-1] + "\n" + lines.read("… ")
    return text


# ---------------------------------------------------------------- commands


def _carry_out(conversation: Conversation, line: str) -> None:
    """Run a command. Raises Misused; EOFError to end the conversation."""
    name, _, rest = line.partition(" ")
    if name not in COMMANDS:
        near = nearest(name, COMMANDS)
        hint = f"did you mean {near}?" if near else "/help lists the commands"
        raise Misused(f"{name} is no command; {hint} (a text that begins so is sent with //)")
    COMMANDS[name](conversation, rest.strip())


def _exit(conversation: Conversation, rest: str) -> None:
    raise EOFError


def _help(conversation: Conversation, rest: str) -> None:
    print(HELP.format(names=", ".join(SETTINGS)))


def _clear(conversation: Conversation, rest: str) -> None:
    conversation.messages.clear()
    print("(the conversation is forgotten)")


def _retry(conversation: Conversation, rest: str) -> None:
    users = [m["content"] for m in conversation.messages if m["role"] == "user"]
    if not users:
        raise Misused("there is no message yet")
    while conversation.messages.pop()["role"] != "user":
        pass
    conversation.say(users[-1])


def _set(conversation: Conversation, rest: str) -> None:
    fields = conversation.client.fields
    name, _, value = rest.partition(" ")
    name = name.replace("-", "_")
    if not name:
        listed = {"system": conversation.system, **fields}
        print("\n".join(f"{key}: {json.dumps(v)}" for key, v in listed.items() if v is not None))
    elif name in ("system", "system_prompt"):
        _system(conversation, value)
    elif name not in SETTINGS:
        near = nearest(name, SETTINGS)
        hint = f"did you mean {near}?" if near else f"there are: {', '.join(SETTINGS)}"
        raise Misused(f"{name} is no setting; {hint}")
    elif not value.strip():
        fields.pop(name, None)
    else:
        try:
            fields[name] = json.loads(value)
        except ValueError:
            fields[name] = value.strip()


def _system(conversation: Conversation, rest: str) -> None:
    conversation.system = rest.strip() or None


def _save(conversation: Conversation, rest: str) -> None:
    path = _path(rest)
    content = {"system": conversation.system, "messages": conversation.messages}
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with open(descriptor, "w", encoding="utf-8") as file:
            json.dump(content, file, ensure_ascii=False, indent=2)
    except FileExistsError:
        raise Misused(f"{path} is there already; give another name") from None
    except OSError as error:
        raise Misused(f"{path} cannot be written: {error.strerror}") from None
    print(f"({len(conversation.messages)} messages in {path})")


def _load(conversation: Conversation, rest: str) -> None:
    path = _path(rest)
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        system, messages = content["system"], content["messages"]
        texts = [system or "", *(m[key] for m in messages for key in ("role", "content"))]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a text is none")
    except OSError as error:
        raise Misused(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError):
        raise Misused(f"{path} holds no conversation that /save wrote") from None
    conversation.system = system
    conversation.messages[:] = [{"role": m["role"], "content": m["content"]} for m in messages]
    print(f"({len(messages)} messages from {path})")


def _path(rest: str) -> Path:
    words: list[str] = []
    with contextlib.suppress(ValueError):  # A quote without its other half.
        words = shlex.split(rest)
    if len(words) != 1:
        raise Misused("give one FILE, in quotes if its name has spaces")
    return local_path(words[0])


COMMANDS: dict[str, Callable[[Conversation, str], None]] = {
    "/help": _help, "/clear": _clear, "/retry": _retry, "/set": _set, "/system": _system,
    "/save": _save, "/load": _load, "/exit": _exit, "/quit": _exit,
}  # fmt: skip
"""First word of a line → command."""
