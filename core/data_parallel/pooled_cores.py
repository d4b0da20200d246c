"""`PooledCores`: several engines with the same model, each in a process of its own, as one core.

This process tokenizes, chooses members, and detokenizes; members are ordinary engines.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import random
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import prometheus_client as prometheus

from ..config import EngineConfig
from ..engine.admission import request_limits
from ..engine.core_client import S
from ..engine.kv_connector import numbered
from ..engine.output_processor import RequestTracker, State
from ..engine.plugin_events import PluginEvents
from ..engine.request_state import RequestState
from ..engine.resolve_config import resolve_models
from ..engine.text_processor import TextProcessor
from ..errors import (
    EngineOverloaded,
    EngineStopped,
    JackfieldError,
    OutOfMemory,
)
from ..live.engine_jobs import (
    CommitUpdate,
    LiveJob,
)
from ..loading.model_config import ModelConfig
from ..lora_request import AdapterCard, AdapterJob
from ..metrics.merge import Family, families, merged, render
from ..outputs import EngineStats
from ..parallel.meeting import MeetingPlace
from ..protocols.executors import EngineHosts, ExecutorInfo
from ..registration.executor_choice import choose_executor
from ..registry import Plugins
from ..remote.frames import Welcome
from ..request import Request, RequestSpec, draw_seed
from .devices import member_environments
from .member import Member, MemberProcess, total
from .member_jobs import MemberJobs
from .metrics import PoolMetrics, of_member
from .restarts import RestartPolicy
from .router import Placement, Router
from .setup import Setup
from .spares import LocalHosts

logger = logging.getLogger("jackfield.member")
REPORT_SECONDS = 2.0
"""Seconds for members' metrics; slower ones are omitted."""
NOTICE_SECONDS = 3.0
"""Until members have noticed that one has ended whose experts they wait for."""
PROFILE_SECONDS = 120.0
"""For a member that writes a trace."""


def common_info(infos: Sequence[ExecutorInfo]) -> ExecutorInfo:
    """Return the common info of executors, with the smallest room."""
    lengths = [info.max_model_len for info in infos if info.max_model_len is not None]
    return msgspec.structs.replace(
        infos[0],
        num_blocks=min(info.num_blocks for info in infos),
        max_model_len=min(lengths, default=None),
    )


class PooledCores:
    """Runs requests on `data_parallel_size` engines. A `CoreClient`.

    Plugins get `request_finished` here, other events in members.
    """

    in_process = False
    model_config: ModelConfig
    info: ExecutorInfo
    events: PluginEvents
    router: Router
    metrics: PoolMetrics

    def __init__(self, config: EngineConfig, plugins: Plugins) -> None:
        self.config = numbered(config, 0)
        self.plugins = plugins
        self.requests = RequestTracker()
        self.members: list[Member] = []
        self._unresolved_config = config
        """Unresolved: members resolve it."""
        self._environments: list[dict[str, str]] = []
        """[num_members], if they are local: variables of their processes; else empty."""
        self._hosts: EngineHosts = LocalHosts()
        self._meeting: MeetingPlace | None = None
        """Where members meet that divide a mixture's experts; None: they divide none."""
        self._ending: asyncio.Task[None] | None = None
        """Ends all of them, since one has ended."""
        self._placements: dict[str, Placement] = {}
        """Request id → its placement."""
        self._seeds = random.Random(config.seed)
        self._keepers: list[asyncio.Task[None]] = []
        self._loads: list[Callable[[], int]] = []
        self._jobs = MemberJobs(self._serving, config)

    @property
    def registry(self) -> prometheus.CollectorRegistry:
        return self.metrics.registry

    # ------------------------------------------------------------ start and stop

    async def start(self, texts: TextProcessor, events: PluginEvents) -> None:
        config = self.config
        self.events = events
        executors = self.plugins["executor"]
        executor = executors.load(choose_executor(config, executors))
        hosts = executor.engine_hosts(config)
        self.metrics = PoolMetrics(config.served_names[0], config.data_parallel_size)
        self.router = Router(
            config.data_parallel_size,
            config.block_size,
            finds_prefixes=config.enable_prefix_caching,
        )
        if hosts is None:
            self._environments = await asyncio.to_thread(member_environments, config)
        self._hosts = hosts or LocalHosts()
        if config.divides_experts_among_engines:
            meeting = self._meeting = await asyncio.to_thread(MeetingPlace)
            self._environments = [
                {**own, **meeting.environment(number)}
                for number, own in enumerate(self._environments)
            ]
        self.members = [self._member(number) for number in range(config.data_parallel_size)]
        self._keepers = [asyncio.create_task(member.run()) for member in self.members]
        # As of one engine in another process: a member reports errors of the checkpoint.
        loading = asyncio.create_task(asyncio.to_thread(texts.load_alone, config, self.plugins))
        try:
            starts = [member.first for member in self.members]
            done, _ = await asyncio.wait(starts, return_when=asyncio.FIRST_EXCEPTION)
            for start in done:
                start.result()
            await loading
            welcomes = [start.result() for start in starts]
            self.config = msgspec.structs.replace(
                welcomes[0].config, record_steps=config.record_steps
            )
            self.info = common_info([welcome.info for welcome in welcomes])
            self.model_config = await asyncio.to_thread(
                resolve_models, self.config, self.info, self.plugins
            )
        except BaseException:
            await asyncio.gather(loading, return_exceptions=True)
            await self.stop()
            raise

    def _member(self, number: int) -> Member:
        name = f"member {number} of {self.config.data_parallel_size}"
        return Member(
            number,
            lambda: MemberProcess(
                name,
                self.requests,
                self.events,
                launch=lambda: self._hosts.start(number),
                begun=self._begun,
                ended=self._ended,
                orphaned=self._move,
            ),
            lambda attempt: self._setup(number, attempt),
            fits=self._check_fits,
            prepare=self._jobs.prepare_again,
            served=self._member_serves,
            lost=self._member_lost,
            watched=self.config.rank_timeout > 0,
            # With common experts, the others could not join another process in its place.
            restarts=RestartPolicy() if self._meeting is None else RestartPolicy(0),
        )

    def _setup(self, number: int, attempt: int) -> Setup:
        """Return the setup of a member's start number `attempt`."""
        config = self._unresolved_config
        if config.record_steps is not None:
            again = f"-{attempt}" if attempt else ""
            path = f"{config.record_steps}.{number}{again}"
            config = msgspec.structs.replace(config, record_steps=path)
        if attempt:  # What was loaded since the first start, and not unloaded: `_load_adapters`.
            config = msgspec.structs.replace(config, lora_modules=())
        return Setup(
            config=config,
            member=number,
            environment=self._environments[number] if self._environments else {},
            plugins=self.plugins.outside,
            log_level=logging.getLogger("jackfield").getEffectiveLevel(),
        )

    def _check_fits(self, welcome: Welcome) -> None:
        """Raise OutOfMemory if a restarted member has too little room, perhaps as its predecessor's
        memory is not free yet.
        """
        if not hasattr(self, "model_config"):
            return
        limits = [
            request_limits(welcome.config, self.model_config, info)
            for info in (welcome.info, self.info)
        ]
        has, needs = (limit.longest_sequence() for limit in limits)
        if has < needs:
            raise OutOfMemory(f"has room for {has} tokens of a request, and {needs} are accepted")

    def _member_serves(self, member: Member, welcome: Welcome) -> None:
        self.router.begin_member(member.number, welcome.info.num_blocks * welcome.config.block_size)
        self.metrics.up[member.number].set(1)
        if member.num_starts > 1:
            self.metrics.restarts[member.number].inc()
            logger.warning("member %d serves again", member.number)

    def _member_lost(self, member: Member) -> None:
        self.metrics.up[member.number].set(0)
        if member.process is not None:
            self.metrics.lost_requests[member.number].inc(member.process.num_lost)
        if self._meeting is not None and self._ending is None:
            self.requests.accepting = False
            self._ending = asyncio.create_task(self._end_others())
        if all(each.given_up for each in self.members):
            self.requests.dead_reason = f"no member is left: {self._failures()}"
            self.requests.accepting = False

    async def _end_others(self) -> None:
        """End the members that wait for experts of one that has ended, unless they notice."""
        processes = [each.process for each in self.members if each.process is not None]
        await asyncio.wait([process.ended for process in processes], timeout=NOTICE_SECONDS)
        for process in processes:
            if process.process is not None and not process.ended.done():
                process.process.kill()

    async def stop(self) -> None:
        self.requests.accepting = False
        if self._ending is not None:
            self._ending.cancel()
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        self._meeting = None
        for member in self.members:
            if member.first.done():
                member.first.exception()  # One of them was raised; the others are known with it.

    # ------------------------------------------------------------ requests

    def check_open(self) -> None:
        """As the protocol; members check their own limits."""
        self.requests.check_accepting()
        self._serving()

    async def add_request(self, spec: RequestSpec, make_state: Callable[[list[Request]], S]) -> S:
        if spec.params.seed is None:
            # In the order of one engine, so that a request has the same seed on any member.
            spec = msgspec.structs.replace(spec, drawn_seed=draw_seed(self._seeds))
        refused: dict[int, JackfieldError] = {}
        moved = False
        while True:
            self.check_open()
            self.requests.check_free(spec.request_id)  # Whose placement is a live request's own.
            candidates = self._candidates(spec, refused)
            if not candidates:
                raise list(refused.values())[-1]
            process, placement = self._place(spec, candidates)
            placement.moved = moved
            try:
                return await process.requests.add(spec, make_state)
            except (EngineOverloaded, EngineStopped) as error:
                refused[placement.member] = error
                if process.ended.done():
                    if moved or not self._candidates(spec, refused):
                        raise  # It may be this request that ends them: no third one gets it.
                    moved = True
                    self.metrics.moved_requests[placement.member].inc()

    def _place(self, spec: RequestSpec, candidates: list[int]) -> tuple[MemberProcess, Placement]:
        """Choose a member for a request, and count it."""
        placement = self.router.place(spec, candidates)
        process = self.members[placement.member].process
        assert process is not None
        self._placements[spec.request_id] = placement
        self.metrics.requests[placement.member].inc()
        self.metrics.known_tokens[placement.member].inc(placement.num_known_tokens)
        return process, placement

    def _move(self, dead: MemberProcess, state: State, spec: RequestSpec) -> bool:
        """Resend a dead member's request without output; False if it must end: its caller chose the
        member, or it was moved before, and may cause the deaths.
        """
        placement = self._placements[spec.request_id]
        if placement.moved or spec.data_parallel_rank is not None or self._meeting is not None:
            return False
        error = EngineStopped(dead.ended.result())
        if not self._send_again(state, spec, {placement.member: error}):
            return False
        self.metrics.moved_requests[placement.member].inc()
        return True

    def _send_again(
        self, state: State, spec: RequestSpec, refused: dict[int, JackfieldError]
    ) -> bool:
        """Send a request to a member that has not refused it; False if none is left."""
        before = self._placements[spec.request_id]
        while candidates := self._candidates(spec, refused):
            process, placement = self._place(spec, candidates)
            placement.moved = True
            try:
                reply = process.requests.adopt(spec, state)
            except EngineStopped as error:
                self.router.release(placement)
                refused[placement.member] = error
                continue
            self.router.release(before)
            reply.add_done_callback(
                functools.partial(self._take_reply, process, state, spec, refused)
            )
            return True
        self._placements[spec.request_id] = before
        return False

    def _take_reply(
        self,
        process: MemberProcess,
        state: State,
        spec: RequestSpec,
        refused: dict[int, JackfieldError],
        reply: asyncio.Future[None],
    ) -> None:
        """Process the reply to a moved request."""
        error = reply.exception()
        if error is None or state.finished:
            return
        if isinstance(error, EngineOverloaded | EngineStopped) and not process.ended.done():
            refused[self._placements[spec.request_id].member] = error
            if self._send_again(state, spec, refused):
                process.requests.release(state)
                return
        process.requests.fail_request(state, str(error))

    def _candidates(self, spec: RequestSpec, refused: dict[int, JackfieldError]) -> list[int]:
        """Return the members for a request. Raises EngineStopped if the caller's choice does not
        serve.
        """
        rank = spec.data_parallel_rank
        if rank is not None and not self.members[rank].serves:
            raise EngineStopped(f"data_parallel_rank: {self.members[rank].trouble}")
        return [
            member.number
            for member in self.members
            if member.serves
            and member.process is not None
            and not member.process.ended.done()
            and member.number not in refused
            and rank in (None, member.number)
        ]

    def abort_request(self, state: State) -> None:
        if (process := self._process_of(state)) is not None:
            process.requests.abort(state)

    def finish_completion(self, state: RequestState, index: int, stop: str) -> None:
        if (process := self._process_of(state)) is not None:
            process.requests.finish_completion(state, index, stop)

    def _process_of(self, state: State) -> MemberProcess | None:
        placement = self._placements.get(state.request_id)
        return None if placement is None else self.members[placement.member].process

    def _begun(self, state: State) -> None:
        self.router.begin(self._placements[state.request_id])

    def _ended(self, state: State) -> None:
        self.router.release(self._placements.pop(state.request_id))

    # ------------------------------------------------------------ jobs of all members

    async def ask_adapters(self, job: AdapterJob) -> list[AdapterCard]:
        return await self._jobs.ask_adapters(job)

    async def ask_live(self, job: LiveJob) -> dict[str, Any]:
        """Let all members do what a job says; return what they are together."""
        together = await self._jobs.ask_live(job, self.info.num_ranks)
        if isinstance(job, CommitUpdate):
            self.router.forget_prefixes()
        return together

    def _serving(self) -> list[Member]:
        """Return the members that serve. Raises EngineStopped if none does."""
        if serving := [member for member in self.members if member.serves]:
            return serving
        raise EngineStopped(f"no member serves now: {self._failures()}")

    # ------------------------------------------------------------ state

    def _failures(self) -> str:
        return "; ".join(member.trouble for member in self.members if not member.serves)

    async def check_health(self, timeout: float) -> dict[str, str]:
        """Raise EngineStopped unless a member lives; return others' problems."""
        if not self.requests.healthy:
            raise EngineStopped(self.requests.dead_reason or "the engine is not running")
        replies = await asyncio.gather(
            *(member.query("health", timeout) for member in self.members), return_exceptions=True
        )
        failing = {
            f"member {number}": str(reply)
            for number, reply in enumerate(replies)
            if isinstance(reply, JackfieldError)
        }
        if len(failing) == len(self.members):
            raise EngineStopped(f"no member serves: {'; '.join(failing.values())}")
        return failing

    async def reset_prefix_cache(self) -> bool:
        if self.requests.states:
            return False
        serving = [member for member in self.members if member.serves]
        self.router.forget_prefixes()
        done = await asyncio.gather(
            *(member.query("reset_prefix_cache", REPORT_SECONDS) for member in serving)
        )
        return all(done)

    async def compact_kv_cache(self) -> int:
        return sum(map(int, await self._each("compact_kv_cache")))

    async def start_profile(self) -> None:
        await self._each("start_profile")

    async def stop_profile(self) -> list[str]:
        replies = await self._each("stop_profile")
        paths = [msgspec.msgpack.decode(reply, type=list[str]) for reply in replies]
        return [path for member_paths in paths for path in member_paths]

    async def _each(self, name: str) -> list[Any]:
        """Return the replies of the members that serve. Raises what the first to fail does."""
        serving = [member for member in self.members if member.serves]
        return await asyncio.gather(*(member.query(name, PROFILE_SECONDS) for member in serving))

    def stats(self) -> EngineStats:
        return total(
            [member.process.stats for member in self.members if member.process is not None]
        )

    async def metric_families(self) -> list[Family]:
        async def of(member: Member) -> list[Family]:
            try:
                reply = await member.query("families", REPORT_SECONDS)
            except EngineStopped:
                return []
            return of_member(msgspec.msgpack.decode(reply, type=list[Family]), member.number)

        return merged([*await asyncio.gather(*map(of, self.members)), families(self.registry)])

    async def render_metrics(self) -> bytes:
        return render(await self.metric_families())

    def report_load(self, count: Callable[[], int]) -> None:
        self._loads.append(count)

    async def server_load(self) -> int:
        return sum(count() for count in self._loads)

    def check_idle(self) -> None:
        assert not self.requests.states and not self._placements
        assert not any(self.router.loads) and not any(self.router.num_requests)
        for member in self.members:
            if member.process is not None:
                member.process.requests.check_idle()
