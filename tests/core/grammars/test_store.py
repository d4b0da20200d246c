"""Compiling: once for equal grammars, off the event loop, within bounds; who compiles, and why."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

import jackfield
from jackfield.core.config import StructuredOutputsConfig
from jackfield.core.errors import ConfigError, EngineStopped
from jackfield.core.grammars.sandbox import sandbox_process
from jackfield.core.grammars.store import GrammarStore, check_backend
from jackfield.core.grammars.vocabulary import make_vocabulary
from jackfield.core.protocols.grammars import GrammarSpec, Vocabulary
from jackfield.core.registry import Registry, load_plugins
from jackfield.core.text.tokenizer import Tokenizer
from jackfield.plugins.grammar_backends.llguidance import LLGuidance

TESTS = os.getpid()
MODEL = Path(jackfield.__file__).parent / "plugins/models/embedded"
PLAIN = GrammarSpec("json", '{"type":"object","properties":{"a":{"type":"integer"}}}')
REGEX = GrammarSpec("regex", "[a-c]{3}")


class Counting(LLGuidance):
    """Real, and counts."""

    compiled: ClassVar[list[tuple[str, str]]] = []

    def compile(self, spec: GrammarSpec) -> Any:
        self.compiled.append((spec.text, threading.current_thread().name))
        time.sleep(0.05)
        return super().compile(spec)


class Hostile(LLGuidance):
    """Does to its process what native code can."""

    bounded: ClassVar[bool] = False
    compiled: ClassVar[int] = 0

    def compile(self, spec: GrammarSpec) -> Any:
        Hostile.compiled += 1
        match spec.text:
            case "segfault":
                os.kill(os.getpid(), signal.SIGSEGV)
            case "first alone" if Hostile.compiled > 1 and os.getpid() != TESTS:
                os._exit(1)
            case "hang":
                while True:
                    pass
            case "crash":
                os._exit(11)
            case "eat":
                return bytearray(1 << 34)
            case text if text.startswith("meet "):
                folder, until = Path(text.removeprefix("meet ")), time.monotonic() + 60
                (folder / "begun").touch()
                while not (folder / "go").exists():
                    assert time.monotonic() < until, "no other came"
                    time.sleep(0.001)
                return super().compile(REGEX)
        return super().compile(spec)


def vocabulary() -> Vocabulary:
    tokenizer = Tokenizer.load(str(MODEL))
    assert tokenizer.eos_token_id is not None
    return make_vocabulary(tokenizer, 1536, [tokenizer.eos_token_id], compact_json=False)


def store(**backends: Any) -> GrammarStore:
    """With these backends, first by priority, or those in the box."""
    options = backends.pop("options", {})
    registry: Registry[Any] = Registry("structured_backend")
    for number, (name, backend) in enumerate(backends.items()):
        registry.add(name, backend, priority=-number)
    return GrammarStore(
        registry if backends else load_plugins()["structured_backend"],
        StructuredOutputsConfig(**options),
        vocabulary,
    )


async def test_equal_grammars_are_compiled_once_and_on_other_threads() -> None:
    Counting.compiled.clear()
    grammars = store(counting=Counting)
    results = await asyncio.gather(*(grammars.compile(REGEX) for _ in range(5)))
    assert len({id(grammar) for grammar in results}) == 1
    assert await grammars.compile(GrammarSpec("regex", "[a-c]{3}")) is results[0]
    ((_, thread),) = Counting.compiled
    assert thread != threading.current_thread().name
    await grammars.close()


async def test_one_impatient_caller_does_not_spoil_it_for_the_others() -> None:
    Counting.compiled.clear()
    grammars = store(counting=Counting)
    first = asyncio.create_task(grammars.compile(REGEX))
    await asyncio.sleep(0)
    second = asyncio.create_task(grammars.compile(REGEX))
    await asyncio.sleep(0)
    first.cancel()
    assert (await second).matcher() is not None
    assert len(Counting.compiled) == 1
    await grammars.close()


async def test_closing_tells_those_who_wait() -> None:
    grammars = store(hostile=Hostile)
    waiting = asyncio.create_task(grammars.compile(GrammarSpec("regex", "hang")))
    await asyncio.sleep(0.2)
    await grammars.close()
    with pytest.raises(EngineStopped):
        await waiting


async def test_the_cache_drops_what_was_used_longest_ago() -> None:
    Counting.compiled.clear()
    grammars = store(counting=Counting, options={"cache_size": 2})
    for text in ("a", "b", "a", "c", "a", "b"):
        await grammars.compile(GrammarSpec("regex", text))
    assert [text for text, _ in Counting.compiled] == ["a", "b", "c", "b"]
    await grammars.close()


async def test_a_wrong_grammar_is_not_kept() -> None:
    grammars = store()
    for _ in range(2):
        with pytest.raises(ValueError, match="regex"):
            await grammars.compile(GrammarSpec("regex", "(a"))
    with pytest.raises(ValueError, match="no output"):
        await grammars.compile(GrammarSpec("json", '{"$ref":"#"}'))
    await grammars.close()


async def test_a_number_that_crashes_a_backend_costs_its_grammar_alone() -> None:
    """llguidance 1.9.1 recurses without end where it makes a range of such a number."""
    grammars = store(options={"backend": "llguidance"})
    for schema in ({"type": "integer", "const": -1e19}, {"type": "integer", "enum": [-1e300]}):
        with pytest.raises(ValueError, match="crashes the backend"):
            await grammars.compile(GrammarSpec("json", json.dumps(schema)))
    await grammars.close()


class Panicking(Counting):
    """Fails as a panic of Rust does, with what is no `Exception`."""

    class Panic(BaseException):
        pass

    def compile(self, spec: GrammarSpec) -> Any:
        raise self.Panic("a panic")


async def test_a_panic_of_a_backend_is_a_reason_like_others() -> None:
    grammars = store(panicking=Panicking)
    with pytest.raises(ValueError, match="Panic: a panic"):
        await grammars.compile(PLAIN)
    await grammars.close()


@pytest.mark.parametrize(
    ("spec", "first", "reason"),
    [
        (PLAIN, "llguidance", ""),
        (REGEX, "llguidance", "could take long"),
        (GrammarSpec("grammar", 'root ::= "a"'), "xgrammar", "GBNF"),
        (GrammarSpec("json", '{"allOf":[{"type":"string"},{"maxLength":3}]}'), "llguidance",
         "allOf"),
    ],
)  # fmt: skip
def test_auto_chooses_by_grammar_and_says_why(spec: GrammarSpec, first: str, reason: str) -> None:
    names, reasons = store().candidates(spec)
    assert names[0] == first and reason in " ".join(reasons)


def test_a_named_backend_is_the_only_one() -> None:
    only = store(options={"backend": "llguidance"})
    assert only.candidates(PLAIN) == (["llguidance"], [])
    names, (reason,) = only.candidates(GrammarSpec("grammar", 'root ::= "a"'))
    assert not names and reason.startswith("llguidance: ")


def test_a_backend_that_cannot_be_used_is_a_configuration_error() -> None:
    registry: Registry[Any] = Registry("structured_backend")

    class Absent(LLGuidance):
        @classmethod
        def unavailable(cls) -> str | None:
            return "it is not installed"

    registry.add("absent", Absent)
    check_backend(registry, "auto")
    for name, word in (("absent", "not installed"), ("nobody", "nobody")):
        with pytest.raises(ConfigError, match=word) as caught:
            check_backend(registry, name)
        assert caught.value.param == "structured_outputs_config.backend"


async def test_what_crashes_or_eats_memory_costs_one_grammar_alone() -> None:
    """In the child: the next grammar gets a new one."""
    options = {"compile_timeout": 300.0, "compile_memory": 0.5}
    grammars = store(hostile=Hostile, options=options)
    for text, word in (
        ("crash", "crashes.*exit status 11"),
        ("segfault", "crashes.*SIGSEGV"),
        ("eat", "Memory"),
    ):
        with pytest.raises(ValueError, match=word):
            await grammars.compile(GrammarSpec("regex", text))
        grammar = await grammars.compile(GrammarSpec("regex", f"{text}[ab]"))
        assert grammar.matcher().accept(vocabulary().encode(text))
    await grammars.close()


async def test_what_hangs_costs_one_grammar_alone() -> None:
    grammars = store(hostile=Hostile, options={"compile_timeout": 1.0})
    with pytest.raises(ValueError, match="compile_timeout"):
        await grammars.compile(GrammarSpec("regex", "hang"))
    for number in itertools.count():  # A busy machine may need more than a second, too.
        with contextlib.suppress(ValueError):
            grammar = await grammars.compile(GrammarSpec("regex", f"a|{number}"))
            break
    assert grammar.matcher().accept(vocabulary().encode("a"))
    await grammars.close()


async def test_the_loop_goes_on_while_a_grammar_is_compiled(tmp_path: Path) -> None:
    """It has to: the compiler waits for it."""
    grammars = store(hostile=Hostile, options={"compile_timeout": 300.0})
    compiling = asyncio.create_task(grammars.compile(GrammarSpec("regex", f"meet {tmp_path}")))
    while not (tmp_path / "begun").exists():
        await asyncio.sleep(0.001)
    (tmp_path / "go").touch()
    assert (await compiling).matcher() is not None
    await grammars.close()


async def test_a_grammar_is_not_blamed_for_what_others_left_in_the_sandbox() -> None:
    """Its crash in a process that had another grammar before is no proof."""
    grammars = store(hostile=Hostile)
    await grammars.compile(GrammarSpec("regex", "ab"))
    assert grammars._sandboxes
    await grammars.compile(GrammarSpec("regex", "first alone"))
    await grammars.close()


async def test_a_sandbox_that_was_killed_while_idle_is_started_again() -> None:
    grammars = store(hostile=Hostile)
    await grammars.compile(GrammarSpec("regex", "ab"))
    (process,) = grammars._sandboxes["hostile"]._idle
    process.kill()
    await process.wait()
    await grammars.compile(GrammarSpec("regex", "abc"))
    await grammars.close()


async def test_a_backend_that_bounds_itself_is_not_trusted_with_more_than_short_grammars() -> None:
    grammars = store(options={"backend": "llguidance"})
    await grammars.compile(REGEX)
    await grammars.compile(PLAIN)
    assert not grammars._sandboxes
    await grammars.compile(GrammarSpec("regex", "(ab|c)" * 100))
    assert grammars._sandboxes
    await grammars.close()


async def test_plain_schemas_need_no_other_process() -> None:
    grammars = store(options={"backend": "xgrammar"})
    await grammars.compile(PLAIN)
    assert not grammars._sandboxes
    hard = {"type": "string", "pattern": "^(a{1,40}){1,40}$"}
    await grammars.compile(GrammarSpec("json", json.dumps(hard)))
    assert grammars._sandboxes
    await grammars.close()


@pytest.mark.parametrize(("probed", "walked"), [(3.0, 2.0), (2.0, 3.0)])
def test_a_grammar_is_as_slow_as_the_slower_of_its_trials(
    probed: float, walked: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_process, "probe", lambda grammar, vocabulary: probed)
    monkeypatch.setattr(sandbox_process, "walk", lambda grammar, vocabulary: walked)
    vocabulary = Vocabulary(token_bytes=[b"a"], size=1, eos_token_ids=(0,), encode=list)
    assert sandbox_process._walk([object()], vocabulary) == 3.0
