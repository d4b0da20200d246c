"""`KVConnectorKit`: a KV connector under whole engines, on the embedded model and a CPU.

    class TestMine(KVConnectorKit):
        name = "mine"                                   # as registered

        def extra_config(self, folder):                 # kv_connector_extra_config
            return {"url": self.server_for(folder)}

        def break_far_side(self, folder):               # it fails from now on
            self.stop_server()

Engines that are given the same `folder` share a far side. Set `shared = False` where what one
engine saves is for itself alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from ...core.config import EngineConfig, KVTransferConfig
from ...core.engine.async_engine import AsyncEngine
from ...core.errors import ConfigError
from ...core.protocols import KVConnectorSetup, KVLayout
from ...core.registry import Plugins, load_plugins
from ...core.scheduling.request import Request
from ...core.types import KVReport, OutputKind, RequestOutput, SamplingParams
from . import kv_watch
from .kv_watch import Watch

BLOCK = 4
MAX_TOKENS = 6
ENGINE: dict[str, Any] = {
    "device": "cpu",
    "block_size": BLOCK,
    "max_model_len": 96,
    "num_gpu_blocks_override": 33,
    "max_num_seqs": 6,
}
SECONDS = 30.0
"""Longer than anything here takes; what is not through by then is stuck."""
_expected: dict[tuple[int, ...], list[int]] = {}


def prompt(seed: int, length: int = 40) -> list[int]:
    """Token ids, the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(10, 1000) for _ in range(length)]


class KVConnectorKit:
    """Subclass it, and say what only the author knows."""

    name: ClassVar[str]
    """As registered."""
    shared: ClassVar[bool] = True
    """Whether another engine, in another process too, finds what one has saved."""

    def extra_config(self, folder: Path) -> dict[str, Any]:
        """`kv_connector_extra_config` of an engine; `folder` is one for each test."""
        return {}

    def break_far_side(self, folder: Path) -> None:
        """Whatever can go wrong there goes wrong now, while engines use it."""
        pytest.skip("the kit was not told how to break this far side: give it break_far_side")

    # ------------------------------------------------------------ content

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_what_is_saved_comes_back_bit_equal(self, dtype: torch.dtype, tmp_path: Path) -> None:
        shapes = ((2, 8), (1, 4))
        saved = [random_cache(14, BLOCK, heads, dim, dtype) for heads, dim in shapes]

        async def scenario() -> None:
            keys = [bytes([n]) * 32 for n in (7, 8, 9)]
            halves = self._halves(tmp_path, saved)
            assert await halves.found(keys) == 0
            await halves.save(keys, [3, 12, 1])
            caches = saved
            if self.shared:
                halves.close()
                caches = [torch.zeros_like(cache) for cache in saved]
                halves = self._halves(tmp_path, caches)
            assert await halves.found(keys) == 3 * BLOCK
            assert await halves.found([keys[0], b"other" * 6 + b"!!", keys[2]]) == BLOCK
            before = [cache.clone() for cache in caches]
            wanted = [cache[:, [3, 12, 1]].clone() for cache in saved]
            assert await halves.load(keys, [5, 6, 11]) == ()
            halves.close()
            for cache, old, new in zip(caches, before, wanted, strict=True):
                assert torch.equal(bits(cache[:, [5, 6, 11]]), bits(new))
                others = [n for n in range(14) if n not in (5, 6, 11)]
                assert torch.equal(bits(cache[:, others]), bits(old[:, others]))

        self._run(scenario())

    def test_blocks_that_are_not_there_are_reported_and_the_transfer_ends(
        self, tmp_path: Path
    ) -> None:
        caches = [random_cache(8, BLOCK, 2, 8, torch.float32)]

        async def scenario() -> None:
            halves = self._halves(tmp_path, caches)
            keys = [b"a" * 32, b"b" * 32]
            await halves.save(keys[:1], [1])
            assert await halves.found(keys) == BLOCK
            assert set(await halves.load(keys, [2, 3])) == {3}
            halves.close()

        self._run(scenario())

    # ------------------------------------------------------------ engines

    def test_an_engine_gets_back_what_it_has_lost(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with self._engine(tmp_path) as (engine, watch):
                first = await self._check(engine, prompt(1))
                assert first.num_cached_tokens == 0
                await self._forget(engine)
                again = await self._check(engine, prompt(1))
                assert again.num_cached_tokens == 36
                stats = engine.stats()
                assert stats.external_prefix_cache_hits == 36
                assert stats.external_prefix_cache_queries == 72
                assert stats.prefix_cache_hits == 0
                assert watch.num_loads == 1

        self._run(scenario())

    def test_partial_hits_end_at_block_borders(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            prompts = {
                same: prompt(1)[:same] + prompt(100 + same, 41 - same)
                for same in (3, 4, 5, 8, 35, 36, 37, 39)
            }
            await self._learn([*prompts.values(), *(prompt(n) for n in range(6))])
            async with self._engine(tmp_path) as (engine, _):
                await self._check(engine, prompt(1))
                for same, tokens in prompts.items():
                    await self._forget(engine)
                    output = await self._check(engine, tokens)
                    assert output.num_cached_tokens == same // BLOCK * BLOCK, same
                # Behind blocks that the engine still has.
                await self._forget(engine)
                await self._check(engine, prompt(1)[:12])
                output = await self._check(engine, prompt(1))
                assert output.num_cached_tokens == 36

        self._run(scenario())

    def test_another_salt_finds_nothing(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with self._engine(tmp_path) as (engine, _):
                await self._check(engine, prompt(1))
                await self._forget(engine)
                output = await self._check(engine, prompt(1), cache_salt="tenant")
                assert output.num_cached_tokens == 0
                await self._forget(engine)
                output = await self._check(engine, prompt(1), cache_salt="tenant")
                assert output.num_cached_tokens == 36

        self._run(scenario())

    def test_others_go_on_while_a_load_takes_its_time(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with self._engine(tmp_path) as (engine, watch):
                await self._check(engine, prompt(1))
                await self._forget(engine)
                watch.hold_reports()
                slow = asyncio.create_task(self._check(engine, prompt(1)))
                await until(lambda: watch.num_loads > 0)
                await self._check(engine, prompt(2))
                assert not slow.done()
                watch.let_reports_go()
                assert (await slow).num_cached_tokens == 36

        self._run(scenario())

    # ------------------------------------------------------------ failures

    @pytest.mark.parametrize("share", [0.0, 0.5])
    def test_a_load_that_fails_costs_a_recompute(self, share: float, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with self._engine(tmp_path) as (engine, watch):
                await self._check(engine, prompt(1))
                await self._forget(engine)
                watch.spoil = lambda transfer: share
                outputs = await asyncio.gather(
                    *(self._check(engine, prompt(1) + prompt(n, 3)) for n in range(3))
                )
                fewest = min(output.num_cached_tokens for output in outputs)
                assert fewest == int(share * 10) * BLOCK
                assert engine.stats().num_kv_load_failures >= 1

        self._run(scenario())

    def test_a_far_side_that_breaks_costs_a_recompute(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with self._engine(tmp_path) as (engine, _):
                await self._check(engine, prompt(1))
                await self._forget(engine)
                self.break_far_side(tmp_path)
                for seed in (1, 2, 1):
                    await self._check(engine, prompt(seed))
                    await self._forget(engine)

        self._run(scenario())

    def test_what_is_damaged_is_never_used(self, tmp_path: Path) -> None:
        """Whatever the far side has become by the time the next engine asks."""

        async def scenario() -> None:
            async with self._engine(tmp_path) as (engine, _):
                await self._check(engine, prompt(1))
                await self._settled(engine)
            self.break_far_side(tmp_path)
            try:
                async with self._engine(tmp_path) as (engine, _):
                    await self._check(engine, prompt(1))
            except ConfigError:
                return  # Refusing to start is an answer too.

        self._run(scenario())

    # ------------------------------------------------------------ aborts

    def test_an_abort_during_a_load_leaves_its_blocks_alone_until_it_ends(
        self, tmp_path: Path
    ) -> None:
        async def scenario() -> None:
            async with self._engine(tmp_path) as (engine, watch):
                await self._check(engine, prompt(1))
                await self._forget(engine)
                watch.hold_reports()
                stream = engine.generate(prompt(1), PARAMS)
                waiting = asyncio.ensure_future(anext(stream))
                await until(lambda: watch.num_loads > 0)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                assert engine.stats().kv_blocks_used == 9
                # As many as there is room for beside the load.
                await asyncio.gather(*(self._check(engine, prompt(n, 20)) for n in (2, 3, 4)))
                watch.let_reports_go()
                await self._settled(engine)
                assert (await self._check(engine, prompt(1))).num_cached_tokens in (0, 36)

        self._run(scenario())

    def test_blocks_are_not_reused_while_a_save_reads_them(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with self._engine(tmp_path) as (engine, watch):
                watch.hold_reports()
                await self._check(engine, prompt(1))
                await until(lambda: watch.num_saves > 0)
                held = engine.stats().kv_blocks_used
                assert held > 0, "blocks of a save are not held"
                assert not await engine.reset_prefix_cache()
                rest = [asyncio.create_task(self._check(engine, prompt(n))) for n in range(2, 6)]
                await until(lambda: watch.num_saves > 1 or rest[0].done())
                watch.let_reports_go()
                await asyncio.gather(*rest)
                await self._settled(engine)

        self._run(scenario())

    def test_an_engine_stops_in_the_middle_of_transfers(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with self._engine(tmp_path) as (engine, _):
                await self._check(engine, prompt(1))
            async with self._engine(tmp_path) as (engine, _):
                stream = engine.generate(prompt(1), PARAMS)
                waiting = asyncio.ensure_future(anext(stream))
                await asyncio.sleep(0)
            await asyncio.gather(waiting, return_exceptions=True)
            async with self._engine(tmp_path) as (engine, _):
                output = await self._check(engine, prompt(1))
                assert output.num_cached_tokens == (36 if self.shared else 0)

        self._run(scenario())

    # ------------------------------------------------------------ many

    def test_engines_at_once_on_one_store(self, tmp_path: Path) -> None:
        prompts = [prompt(n % 2, 24) + prompt(n, 12) for n in range(4)]

        async def traffic(engine: AsyncEngine, order: Sequence[int]) -> None:
            for _ in range(2):
                await asyncio.gather(*(self._check(engine, prompts[n]) for n in order))
                await self._forget(engine)

        async def scenario() -> None:
            async with self._engine(tmp_path) as (one, _), self._engine(tmp_path) as (two, _):
                await asyncio.gather(traffic(one, (0, 1, 2, 3)), traffic(two, (3, 2, 1, 0)))
                assert one.stats().external_prefix_cache_hits > 0
                assert two.stats().external_prefix_cache_hits > 0
            async with self._engine(tmp_path) as (engine, _):
                output = await self._check(engine, prompts[0])
                assert output.num_cached_tokens == (32 if self.shared else 0)

        self._run(scenario())

    @pytest.mark.parametrize("seed", [0, 1])
    def test_random_traffic_gives_the_tokens_of_an_engine_without(
        self, seed: int, tmp_path: Path
    ) -> None:
        """Small cache, shared prefixes, aborts, slow and failing loads."""
        rng = random.Random(seed)
        bases = [prompt(n, 40) for n in range(3)]

        async def one(engine: AsyncEngine, watch: Watch) -> None:
            tokens = rng.choice(bases)[: rng.choice((8, 17, 32, 40))] + prompt(rng.randrange(4), 5)
            if rng.random() < 0.2:
                stream = engine.generate(tokens, PARAMS)
                waiting = asyncio.ensure_future(anext(stream))
                for _ in range(rng.randrange(30)):
                    await asyncio.sleep(0)
                waiting.cancel()
                await asyncio.gather(waiting, return_exceptions=True)
                return
            await self._check(engine, tokens)

        async def scenario() -> None:
            await self._learn([b[:n] + prompt(t, 5) for b in bases for n in (8, 17, 32, 40)
                               for t in range(4)])  # fmt: skip
            async with self._engine(tmp_path) as (engine, watch):
                watch.spoil = lambda transfer: (None, 0.5, None, 0.0)[transfer % 4]
                for _ in range(4):
                    if rng.random() < 0.5:
                        watch.hold_reports()
                    tasks = [asyncio.create_task(one(engine, watch)) for _ in range(6)]
                    for _ in range(50):
                        await asyncio.sleep(0)
                    watch.let_reports_go()
                    await asyncio.gather(*tasks)
                    await self._forget(engine)
                assert watch.num_loads > 0

        self._run(scenario())

    # ------------------------------------------------------------ how

    def _run(self, scenario: Coroutine[Any, Any, None]) -> None:
        asyncio.run(asyncio.wait_for(scenario, 3 * SECONDS))

    @contextlib.asynccontextmanager
    async def _engine(self, folder: Path) -> AsyncIterator[tuple[AsyncEngine, Watch]]:
        watch = Watch(self.name, self.extra_config(folder))
        config = EngineConfig(
            **ENGINE, kv_transfer_config=KVTransferConfig(kv_connector=kv_watch.NAME)
        )
        async with AsyncEngine(config, plugins=load_plugins(extra=[watch])) as engine:
            try:
                yield engine, watch
            finally:
                watch.let_reports_go()
        assert not watch.violations

    async def _learn(self, prompts: Sequence[list[int]]) -> None:
        """What an engine without a connector answers."""
        unknown = [p for p in prompts if tuple(p) not in _expected]
        if not unknown:
            return
        config = EngineConfig(**{**ENGINE, "num_gpu_blocks_override": 1000})
        async with AsyncEngine(config, plugins=load_plugins()) as engine:
            for tokens in unknown:
                output = await finish(engine, tokens)
                _expected[tuple(tokens)] = output.outputs[0].token_ids

    async def _check(self, engine: AsyncEngine, tokens: list[int], **options: Any) -> RequestOutput:
        """Generate, in time, the tokens of an engine without a connector."""
        await self._learn([tokens])
        output = await asyncio.wait_for(finish(engine, tokens, **options), SECONDS)
        assert output.error is None
        assert output.outputs[0].token_ids == _expected[tuple(tokens)]
        return output

    async def _settled(self, engine: AsyncEngine) -> None:
        """Nobody uses a block any more."""
        await until(lambda: engine.stats().kv_blocks_used == 0)

    async def _forget(self, engine: AsyncEngine) -> None:
        await self._settled(engine)
        assert await engine.reset_prefix_cache()

    def _halves(self, folder: Path, caches: list[torch.Tensor]) -> Halves:
        return Halves(self.name, self.extra_config(folder), load_plugins(), caches)


PARAMS = SamplingParams(
    temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY
)


async def finish(engine: AsyncEngine, tokens: list[int], **options: Any) -> RequestOutput:
    """The last output."""
    async for output in engine.generate(tokens, PARAMS, **options):
        last = output
    return last


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what no event tells of. Fails when it takes `SECONDS`."""
    deadline = asyncio.get_running_loop().time() + SECONDS
    while not condition():
        assert asyncio.get_running_loop().time() < deadline, "it never came about"
        await asyncio.sleep(0.001)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes, so that NaNs compare too."""
    return tensor.contiguous().view(torch.uint8)


def random_cache(blocks: int, size: int, heads: int, dim: int, dtype: torch.dtype) -> torch.Tensor:
    """[2, blocks, size, heads, dim] of any bit patterns."""
    shape = (2, blocks, size, heads, dim * dtype.itemsize)
    with torch.inference_mode():
        return torch.randint(0, 256, shape, dtype=torch.uint8).view(dtype)


class Halves:
    """Both halves of a connector without an engine between them."""

    def __init__(
        self, name: str, extra: dict[str, Any], plugins: Plugins, caches: list[torch.Tensor]
    ) -> None:
        dtype = str(caches[0].dtype).removeprefix("torch.")
        layout = KVLayout(
            num_blocks=caches[0].shape[1],
            block_size=BLOCK,
            dtype=dtype,
            layers=tuple((cache.shape[3], cache.shape[4]) for cache in caches),
            block_bytes=sum(cache[:, 0].nbytes for cache in caches),
            fingerprint=f"the kit's own {dtype}".encode().ljust(32, b"."),
        )
        setup = KVConnectorSetup(
            transfer=KVTransferConfig(kv_connector=name, kv_connector_extra_config=extra),
            layout=layout,
            plugins=plugins,
            notify=lambda: None,
        )
        connector = plugins["kv_connector"].load(name)
        self.scheduler = connector.make_scheduler(setup)
        self.worker = connector.make_worker(setup)
        self.worker.bind(caches)
        self._number = 0

    def _request(self, keys: Sequence[bytes]) -> Request:
        self._number += 1
        request = Request(
            request_id=f"request-{self._number}",
            prompt_token_ids=[5] * (len(keys) * BLOCK + 1),
            params=SamplingParams(),
            max_tokens=1,
            seed=0,
        )
        request.block_hashes = list(keys)
        return request

    async def found(self, keys: Sequence[bytes]) -> int:
        """What the scheduler half answers, once it does."""
        request = self._request(keys)
        answer: int | None = None

        def answered() -> bool:
            nonlocal answer
            answer = self.scheduler.num_external_tokens(request, 0)
            return answer is not None

        await until(answered)
        self.scheduler.request_finished(1_000_000 + self._number, request)
        assert answer is not None
        return answer // BLOCK * BLOCK

    async def save(self, keys: Sequence[bytes], block_ids: list[int]) -> None:
        """Until it has ended."""
        request = self._request(keys)
        wanted = self.scheduler.start_save(self._number, request, keys, block_ids)
        assert list(wanted) == block_ids, "it saves none, or not all, of three blocks"
        assert self._number in (await self._ended()).finished

    async def load(self, keys: Sequence[bytes], block_ids: list[int]) -> tuple[int, ...]:
        """→ the blocks that were not filled."""
        request = self._request(keys)
        promised = None
        while promised is None:
            promised = self.scheduler.num_external_tokens(request, 0)
            await asyncio.sleep(0.001)
        self.scheduler.start_load(self._number, request, keys, block_ids)
        return tuple((await self._ended()).failed.get(self._number, ()))

    async def _ended(self) -> KVReport:
        metadata = self.scheduler.build_metadata()
        assert metadata is not None, "nothing is sent to the worker half"
        assert self.scheduler.build_metadata() is None, "the same is sent twice"
        self.worker.start(metadata)
        reports: list[KVReport] = []

        def told() -> bool:
            report = self.worker.poll()
            reports.extend([report] if report is not None else [])
            return any(self._number in (*r.finished, *r.failed) for r in reports)

        await until(told)
        for report in reports:
            self.scheduler.update(report)
        return next(r for r in reports if self._number in (*r.finished, *r.failed))

    def close(self) -> None:
        """As an engine does."""
        self.scheduler.close()
        self.worker.close()
