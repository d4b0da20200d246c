"""`KVConnectorKit`: a KV connector under whole engines, on the embedded model.

    class TestMine(KVConnectorKit):
        name = "mine"                                   # as registered

        def extra_config(self, folder):                 # kv_connector_extra_config
            return {"url": self.server_for(folder)}

        wrong_options = {"url": 3}                      # each refused by its name

        def damage(self, folder):                       # other bytes than were stored
            self.scramble(folder)

        def break_far_side(self, folder):               # it fails from now on
            self.stop_server()

Engines that are given the same `folder` share a far side. Set `shared = False` where what one
engine saves is for itself alone, and `device = "cuda"` to run on a GPU.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from ...core.config import Device, EngineConfig, KVTransferConfig
from ...core.engine.async_engine import AsyncEngine
from ...core.errors import ConfigError
from ...core.outputs import RequestOutput
from ...core.registry import load_plugins
from ...core.sampling_params import OutputKind, SamplingParams
from . import kv_watch
from .kit import Kit
from .kv_half_checks import HalfChecks, run
from .kv_halves import BLOCK, SECONDS, Halves, make_setup, random_cache, until
from .kv_watch import Watch

MAX_TOKENS = 6
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "block_size": BLOCK,
    "max_model_len": 96,
    "num_gpu_blocks_override": 33,
    "max_num_seqs": 6,
}
_expected: dict[tuple[str, tuple[int, ...]], list[int]] = {}


def prompt(seed: int, length: int = 40) -> list[int]:
    """Token ids, the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(10, 1000) for _ in range(length)]


class KVConnectorKit(Kit, HalfChecks):
    """Subclass it, and set what only the author knows."""

    kind = "kv_connector"
    wrong_options: ClassVar[Mapping[str, Any]] = {}
    """Option → a value that is refused with the option's name."""
    shared: ClassVar[bool | None] = None
    """Whether another engine, also in another process, finds blocks saved by one. None: the
    attribute `shared` of the registered object, else True."""

    device: ClassVar[Device] = "cpu"
    """Device of the engines: `cpu` or `cuda`."""

    def extra_config(self, folder: Path) -> dict[str, Any]:
        """Return `kv_connector_extra_config` of an engine; each test has its own `folder`."""
        return {}

    def break_far_side(self, folder: Path) -> None:
        """Make the far side fail while engines use it."""
        pytest.skip("the kit was not told how to break this far side: give it break_far_side")

    def damage(self, folder: Path) -> None:
        """Change everything that is stored; the far side keeps working."""
        pytest.skip("the kit was not told how to damage what is stored: give it damage")

    @pytest.fixture(autouse=True)
    def _can_start(self, tmp_path: Path) -> None:
        connector = self.registered()
        self.is_shared = getattr(connector, "shared", True) if self.shared is None else self.shared
        if type(self).extra_config is not KVConnectorKit.extra_config:
            return
        try:
            self.halves(tmp_path, [random_cache(2, BLOCK, 1, 8, torch.float32)]).close()
        except ConfigError as error:
            pytest.skip(f"{self.name} needs options, give the kit an extra_config: {error}")

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

        run(scenario())

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
                # After blocks that the engine still has.
                await self._forget(engine)
                await self._check(engine, prompt(1)[:12])
                output = await self._check(engine, prompt(1))
                assert output.num_cached_tokens == 36

        run(scenario())

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

        run(scenario())

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

        run(scenario())

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

        run(scenario())

    def test_a_far_side_that_breaks_costs_a_recompute(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with self._engine(tmp_path) as (engine, _):
                await self._check(engine, prompt(1))
                await self._forget(engine)
                self.break_far_side(tmp_path)
                for seed in (1, 2, 1):
                    await self._check(engine, prompt(seed))
                    await self._forget(engine)

        run(scenario())

    def test_what_is_damaged_is_never_used(self, tmp_path: Path) -> None:
        """Blocks may be damaged in any way before the next engine loads them."""

        async def scenario() -> None:
            async with self._engine(tmp_path) as (engine, _):
                await self._check(engine, prompt(1))
                await self._settled(engine)
            self.break_far_side(tmp_path)
            try:
                async with self._engine(tmp_path) as (engine, _):
                    await self._check(engine, prompt(1))
            except ConfigError:
                return  # Refusing to start is valid, too.

        run(scenario())

    def test_what_is_damaged_is_replaced(self, tmp_path: Path) -> None:
        """Damage is detected once, and the block is stored anew and usable again."""

        async def scenario() -> None:
            async with self._engine(tmp_path) as (engine, _):
                await self._check(engine, prompt(1))
                await self._settled(engine)
                self.damage(tmp_path)
                # A load ends at the first damaged block, so they may be removed one by one.
                for _ in range(12):
                    await self._forget(engine)
                    output = await self._check(engine, prompt(1))
                    if output.num_cached_tokens == 36:
                        return
                assert output.num_cached_tokens == 36, "damaged blocks stay, and stand in the way"

        run(scenario())

    # ------------------------------------------------------------ options

    def test_wrong_options_are_refused_by_name(self, tmp_path: Path) -> None:
        """Both halves refuse wrong options; an unknown option is also wrong."""
        good = self.extra_config(tmp_path)
        cache = [random_cache(2, BLOCK, 1, 8, torch.float32).to(self.device)]
        for option, value in {"no_such_option": 1, **self.wrong_options}.items():
            setup = make_setup(self.name, {**good, option: value}, self.plugins(), cache)
            for half in ("make_scheduler", "make_worker"):
                half_object: Any = None
                with pytest.raises(ConfigError) as caught:
                    half_object = getattr(self.registered(), half)(setup)
                if half_object is not None:
                    half_object.close()
                assert option in str(caught.value), f"{half}: {option} is not named"

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
                # As many as fit beside the load.
                await asyncio.gather(*(self._check(engine, prompt(n, 20)) for n in (2, 3, 4)))
                watch.let_reports_go()
                await self._settled(engine)
                assert (await self._check(engine, prompt(1))).num_cached_tokens in (0, 36)

        run(scenario())

    def test_blocks_are_not_reused_while_a_save_reads_them(self, tmp_path: Path) -> None:
        async def scenario() -> None:
            async with self._engine(tmp_path) as (engine, watch):
                watch.hold_reports()
                await self._check(engine, prompt(1))
                await until(lambda: watch.num_saves > 0)
                used = engine.stats().kv_blocks_used
                assert used > 0, "blocks of a save are not held"
                assert not await engine.reset_prefix_cache()
                rest = [asyncio.create_task(self._check(engine, prompt(n))) for n in range(2, 6)]
                await until(lambda: watch.num_saves > 1 or rest[0].done())
                watch.let_reports_go()
                await asyncio.gather(*rest)
                await self._settled(engine)

        run(scenario())

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
                assert output.num_cached_tokens == (36 if self.is_shared else 0)

        run(scenario())

    # ------------------------------------------------------------ many

    def test_engines_at_once_on_one_store(self, tmp_path: Path) -> None:
        prompts = [prompt(n % 2, 24) + prompt(n, 12) for n in range(4)]

        async def traffic(engine: AsyncEngine, order: Sequence[int]) -> None:
            for _ in range(2):
                await asyncio.gather(*(self._check(engine, prompts[n]) for n in order))
                await self._forget(engine)

        async def scenario() -> None:
            async with self._engine(tmp_path) as (first, _), self._engine(tmp_path) as (two, _):
                await asyncio.gather(traffic(first, (0, 1, 2, 3)), traffic(two, (3, 2, 1, 0)))
                assert first.stats().external_prefix_cache_hits > 0
                assert two.stats().external_prefix_cache_hits > 0
            async with self._engine(tmp_path) as (engine, _):
                output = await self._check(engine, prompts[0])
                assert output.num_cached_tokens == (32 if self.is_shared else 0)

        run(scenario())

    @pytest.mark.parametrize("seed", [0, 1])
    def test_random_traffic_gives_the_tokens_of_an_engine_without(
        self, seed: int, tmp_path: Path
    ) -> None:
        """Run with a small cache, shared prefixes, aborts, slow and failing loads."""
        rng = random.Random(seed)
        bases = [prompt(n, 40) for n in range(3)]

        async def run_one(engine: AsyncEngine, watch: Watch) -> None:
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
                    tasks = [asyncio.create_task(run_one(engine, watch)) for _ in range(6)]
                    for _ in range(50):
                        await asyncio.sleep(0)
                    watch.let_reports_go()
                    await asyncio.gather(*tasks)
                    await self._forget(engine)
                assert watch.num_loads > 0

        run(scenario())

    # ------------------------------------------------------------ how

    @contextlib.asynccontextmanager
    async def _engine(self, folder: Path) -> AsyncIterator[tuple[AsyncEngine, Watch]]:
        watch = Watch(self.name, self.extra_config(folder))
        config = EngineConfig(
            **ENGINE,
            device=self.device,
            kv_transfer_config=KVTransferConfig(kv_connector=kv_watch.NAME),
        )
        extra = [plugin for plugin in (self.plugin, watch) if plugin is not None]
        async with AsyncEngine(config, plugins=load_plugins(extra=extra)) as engine:
            try:
                yield engine, watch
            finally:
                watch.let_reports_go()
        assert not watch.violations

    async def _learn(self, prompts: Sequence[list[int]]) -> None:
        unknown = [p for p in prompts if (self.device, tuple(p)) not in _expected]
        if not unknown:
            return
        options = {**ENGINE, "device": self.device, "num_gpu_blocks_override": 1000}
        config = EngineConfig(**options)
        async with AsyncEngine(config, plugins=self.plugins()) as engine:
            for tokens in unknown:
                output = await finish(engine, tokens)
                _expected[self.device, tuple(tokens)] = output.outputs[0].token_ids

    async def _check(self, engine: AsyncEngine, tokens: list[int], **options: Any) -> RequestOutput:
        """Generate, and compare with an engine without a connector."""
        await self._learn([tokens])
        output = await asyncio.wait_for(finish(engine, tokens, **options), SECONDS)
        assert output.error is None
        assert output.outputs[0].token_ids == _expected[self.device, tuple(tokens)]
        return output

    async def _settled(self, engine: AsyncEngine) -> None:
        """Check that no block is in use."""
        await until(lambda: engine.stats().kv_blocks_used == 0)

    async def _forget(self, engine: AsyncEngine) -> None:
        await self._settled(engine)
        assert await engine.reset_prefix_cache()

    def halves(self, folder: Path, caches: list[torch.Tensor]) -> Halves:
        return Halves(self.name, self.extra_config(folder), self.plugins(), caches)


PARAMS = SamplingParams(
    temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY
)


async def finish(engine: AsyncEngine, tokens: list[int], **options: Any) -> RequestOutput:
    """Return the last output."""
    async for output in engine.generate(tokens, PARAMS, **options):
        last = output
    return last
