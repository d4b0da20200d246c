"""Compiles grammars off the event loop, once, in bounded time, cached."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from ..config import StructuredOutputsConfig
from ..errors import ConfigError, EngineStopped, PluginError
from ..protocols.grammars import Grammar, GrammarBackend, GrammarSpec, Vocabulary
from ..registry import Registry
from .reference_depth import check_chains
from .sandbox.compile_sandbox import CompileSandbox
from .sandbox.probe import check_mask_time, probe
from .sandbox.stacks import ENGINE_STACK, call_with_stack
from .schemas.cost import is_plain, is_tiny

logger = logging.getLogger("jackfield.structured")


class GrammarStore:
    """Compiles and caches grammars, on the event loop unless stated."""

    def __init__(
        self,
        backends: Registry[type[GrammarBackend]],
        config: StructuredOutputsConfig,
        vocabulary: Callable[[], Vocabulary],
    ) -> None:
        """vocabulary: called once, on a thread."""
        self._backends = backends
        self._config = config
        self._make_vocabulary = vocabulary
        self._vocabulary: Vocabulary | None = None
        self._instances: dict[str, GrammarBackend] = {}
        self._cache: OrderedDict[GrammarSpec, Grammar] = OrderedDict()
        self._compiling: dict[GrammarSpec, asyncio.Task[Grammar]] = {}
        self._sandboxes: dict[str, CompileSandbox] = {}
        self._logged: set[str] = set()
        self._pool = ThreadPoolExecutor(config.compile_threads, "jackfield-grammar")

    async def compile(self, spec: GrammarSpec) -> Grammar:
        """Return a cached or compiled grammar; concurrent equal specs compile once.

        Raises ValueError with the grammar's fault, EngineStopped after `close`.
        """
        grammar = self._cache.get(spec)
        if grammar is not None:
            self._cache.move_to_end(spec)
            return grammar
        task = self._compiling.get(spec)
        if task is None:
            task = asyncio.create_task(self._compile(spec))
            self._compiling[spec] = task
            task.add_done_callback(lambda done: self._compiled(spec, done))
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # by `close`, and not the caller
                raise EngineStopped("the engine is stopping") from None
            raise

    async def close(self) -> None:
        compiling = list(self._compiling.values())
        for task in compiling:
            task.cancel()
        await asyncio.gather(*compiling, return_exceptions=True)
        for sandbox in self._sandboxes.values():
            await sandbox.close()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _compiled(self, spec: GrammarSpec, task: asyncio.Task[Grammar]) -> None:
        del self._compiling[spec]
        if task.cancelled() or task.exception() is not None:
            return
        self._cache[spec] = task.result()
        while len(self._cache) > self._config.cache_size:
            self._cache.popitem(last=False)

    async def _compile(self, spec: GrammarSpec) -> Grammar:
        loop = asyncio.get_running_loop()
        limit = self._config.max_grammar_references
        await loop.run_in_executor(self._pool, check_chains, spec, limit)
        names, reasons = await loop.run_in_executor(self._pool, self.candidates, spec)
        for name in names:
            if reasons:
                self._tell(spec, name, reasons)
            try:
                return await self._bounded(name, spec)
            except ValueError as error:
                reasons.append(f"{name}: {error}")
            except TimeoutError:
                reasons.append(
                    f"{name}: takes longer to compile than {self._config.compile_timeout} s "
                    "(compile_timeout)"
                )
            except (asyncio.CancelledError, KeyboardInterrupt):
                raise
            except BaseException as error:  # Panics of Rust are no `Exception`.
                logger.exception("%s failed", self._backends.described(name))
                reasons.append(f"{name}: {type(error).__name__}: {error}")
        raise ValueError("; ".join(reasons))

    def candidates(self, spec: GrammarSpec) -> tuple[list[str], list[str]]:
        """Return backends to try in order, and reasons against others. Thread-safe."""
        backend_name = self._config.backend
        names: list[str] = []
        costly: list[str] = []
        reasons: list[str] = []
        for entry in self._backends.entries():
            if backend_name not in ("auto", entry.name):
                continue
            reason = self._refusal(entry.name, spec)
            if reason is not None:
                reasons.append(f"{entry.name}: {reason}")
            elif self._backends.load(entry.name).bounded or is_plain(spec):
                names.append(entry.name)
            else:
                costly.append(entry.name)
        if not names:
            return costly, reasons
        return names, reasons + [f"{name}: could take long to compile this" for name in costly]

    def _refusal(self, name: str, spec: GrammarSpec) -> str | None:
        try:
            backend = self._backends.load(name)
            return backend.unavailable() or backend.refusal(spec)
        except Exception as error:
            return f"{type(error).__name__}: {error}"

    async def _bounded(self, name: str, spec: GrammarSpec) -> Grammar:
        """Compile with one backend. Raises ValueError, or TimeoutError."""
        loop = asyncio.get_running_loop()
        backend = await loop.run_in_executor(self._pool, self._backend, name)
        if not await loop.run_in_executor(self._pool, _is_small, backend, spec):
            await self._sandbox(name).check(spec)
        future = loop.run_in_executor(self._pool, self._run, backend, spec)
        return await asyncio.wait_for(future, self._config.compile_timeout)

    def _run(self, backend: GrammarBackend, spec: GrammarSpec) -> Grammar:
        assert self._vocabulary is not None
        grammar = call_with_stack(ENGINE_STACK, backend.compile, spec)
        check_mask_time(probe(grammar, self._vocabulary), self._config.mask_timeout)
        return grammar

    def _sandbox(self, name: str) -> CompileSandbox:
        if name not in self._sandboxes:
            assert self._vocabulary is not None
            self._sandboxes[name] = CompileSandbox(
                type(self._instances[name]),
                self._vocabulary,
                compile_timeout=self._config.compile_timeout,
                mask_timeout=self._config.mask_timeout,
                memory_bytes=int(self._config.compile_memory * (1 << 30)),
                processes=self._config.compile_threads,
            )
        return self._sandboxes[name]

    def _backend(self, name: str) -> GrammarBackend:
        """Return a backend, on a pool thread; of two created at once one is kept."""
        backend = self._instances.get(name)
        if backend is None:
            if self._vocabulary is None:
                self._vocabulary = self._make_vocabulary()
            backend = self._backends.load(name)(self._vocabulary)
            self._instances[name] = backend
        return backend

    def _tell(self, spec: GrammarSpec, name: str, reasons: list[str]) -> None:
        """Log the choice, once per reason."""
        why = f"{name} for {spec.kind}, because {'; '.join(reasons)}"
        if why not in self._logged and len(self._logged) < 100:
            self._logged.add(why)
            logger.info("structured outputs: %s", why)


def _is_small(backend: GrammarBackend, spec: GrammarSpec) -> bool:
    """Return whether to compile without a sandbox."""
    return is_plain(spec) or (backend.bounded and is_tiny(spec))


def check_backend(backends: Registry[type[GrammarBackend]], name: str) -> None:
    if name == "auto":
        return
    try:
        reason = backends.load(name).unavailable()
    except PluginError as error:
        reason = str(error)
    if reason is not None:
        raise ConfigError(
            f"structured_outputs_config.backend: {name!r}: {reason}",
            param="structured_outputs_config.backend",
        )
