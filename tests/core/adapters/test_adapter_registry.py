"""The registry of adapters over a scheduler, with a worker that only says what it read."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from jackfield.core.adapters import names as adapter_names
from jackfield.core.adapters.registry import AdapterRegistry
from jackfield.core.config import EngineConfig
from jackfield.core.errors import ConfigError, InvalidRequest, ModelNotFound, PluginError
from jackfield.core.hooks import hookimpl
from jackfield.core.lora_request import (
    AdapterCard,
    AdapterRef,
    FindAdapter,
    ListAdapters,
    LoadAdapter,
    PinAdapter,
    UnloadAdapter,
)
from jackfield.core.parts.adapters import MAX_LOADS, NAME, AdapterInfo, adapter_room
from jackfield.core.registry import Plugins, load_plugins
from jackfield.core.request import Request, RequestSpec
from jackfield.core.sampling_params import SamplingParams
from jackfield.core.scheduling.parts.adapters import Adapters
from jackfield.core.scheduling.scheduler import Scheduler
from jackfield.core.step import DropAdapter, ReadAdapter, StepResult
from jackfield.plugins.policies.builtin import FirstComeFirstServed

PLUGINS = load_plugins()


class Worker:
    """Reads the digest that stands in an adapter's file; holds what it was not told to drop."""

    def __init__(self) -> None:
        self.held: dict[int, str] = {}
        self.reads: list[str] = []
        self.gate = asyncio.Event()
        self.gate.set()
        self.invocation: tuple[int, ...] = ()

    def ask(self, job: Any) -> asyncio.Future[Any]:
        return asyncio.ensure_future(self.do(job))

    async def do(self, job: Any) -> Any:
        if isinstance(job, DropAdapter):
            del self.held[job.number]
            return None
        assert isinstance(job, ReadAdapter) and job.format == "peft"
        self.reads.append(Path(job.path).name)
        await self.gate.wait()
        digest = (Path(job.path) / "adapter_model.safetensors").read_text()
        if digest == "broken":
            raise ConfigError("adapter_config.json: r: must be positive", param="r")
        self.held[job.number] = digest
        rank = int(digest.split()[1]) if digest.startswith("rank") else 8
        return AdapterInfo(digest, rank, 100, False, invocation_tokens=self.invocation)


class House:
    """A registry, its scheduler, and folders of adapters."""

    def __init__(self, folder: Path, plugins: Plugins = PLUGINS, **options: Any) -> None:
        settings = {"max_loras": 2, "max_lora_rank": 8, "lora_max_wait_steps": 5, **options}
        self.config = EngineConfig(model="base", enable_lora=True, **settings)
        self.folder, self.worker = folder, Worker()
        self.scheduler = Scheduler(
            max_num_seqs=8, max_num_batched_tokens=64, max_model_len=64, num_blocks=100,
            block_size=4, enable_prefix_caching=True, enable_chunked_prefill=True,
            policy=FirstComeFirstServed(),
            parts=[Adapters.maker(adapter_room(self.config), self.config.max_loras, 5)],
        )  # fmt: skip
        part = self.scheduler.part(Adapters)
        assert part is not None
        self.part = part
        self.registry = AdapterRegistry(
            self.config, part, plugins, ask=self.worker.ask, wake=lambda: None
        )

    def put(self, name: str, digest: str = "") -> str:
        """Write an adapter with this digest, and return its path."""
        path = self.folder / name
        path.mkdir(exist_ok=True)
        (path / "adapter_config.json").write_text("{}")
        (path / "adapter_model.safetensors").write_text(digest or f"digest of {name}")
        return str(path)

    async def load(self, name: str, **more: Any) -> AdapterCard:
        path = more.pop("path", None) or str(self.folder / name)
        [card] = await self.registry.do(LoadAdapter(name=name, path=path, **more))
        return card

    async def cards(self) -> dict[str, AdapterCard]:
        return {card.name: card for card in await self.registry.do(ListAdapters())}

    async def begin(self, name: str, max_tokens: int = 4, **ref: Any) -> Request:
        """Add a request, as the core does."""
        spec = RequestSpec(
            request_id="", prompt_token_ids=[1, 2, 3, 4, 5, 6],
            params=SamplingParams(max_tokens=max_tokens), max_tokens=max_tokens,
            adapter=AdapterRef(name, **ref),
        )  # fmt: skip
        [request] = (await self.registry.applied(spec)).requests()
        self.scheduler.add_requests(request)
        return request

    def step(self) -> None:
        plan = self.scheduler.schedule()
        if plan is not None:
            counts = [int(sampled) for sampled in plan.samples]
            self.scheduler.update(plan, StepResult(plan.step, counts, [7] * sum(counts)))
            self.scheduler.check_invariants()

    async def finish(self, *requests: Request) -> None:
        while not all(request.finished for request in requests):
            self.step()
        await settled()


async def settled() -> None:
    """Let callbacks and jobs that need no thread run."""
    for _ in range(8):
        await asyncio.sleep(0)


def number_of(request: Request) -> int:
    number: int = request.parts[NAME].number
    return number


async def test_requests_that_come_together_share_one_read(tmp_path: Path) -> None:
    house = House(tmp_path)
    path = house.put("a")
    requests = await asyncio.gather(*(house.begin("a", path=path) for _ in range(5)))
    assert house.worker.reads == ["a"]
    assert len({number_of(request) for request in requests}) == 1
    assert list(house.worker.held.values()) == ["digest of a"]
    assert all(request.cache_extra == ("digest of a",) for request in requests)
    await house.finish(*requests)
    assert list(house.worker.held.values()) == ["digest of a"], "it stays for the next request"


async def test_a_reload_leaves_running_requests_their_adapter(tmp_path: Path) -> None:
    house = House(tmp_path, max_cpu_loras=2)
    house.put("a")
    await house.load("a")
    before = await house.begin("a")
    house.step()
    house.put("a", "new")
    with pytest.raises(InvalidRequest, match="load_inplace"):
        await house.load("a")
    card = await house.load("a", load_inplace=True)
    assert card.digest == "new"
    after = await house.begin("a")
    assert before.cache_extra == ("digest of a",) and after.cache_extra == ("new",)
    assert set(house.worker.held.values()) == {"digest of a", "new"}
    await house.finish(before, after)
    assert list(house.worker.held.values()) == ["new"]
    assert not house.part.is_resident(number_of(before))


async def test_a_reload_of_equal_content_changes_nothing(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.put("a")
    await house.load("a")
    before = await house.begin("a")
    await house.load("a", load_inplace=True)
    await settled()
    assert number_of(await house.begin("a")) == number_of(before)
    assert len(house.worker.held) == 1


async def test_unloading_frees_once_the_last_request_ends(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.put("a")
    await house.load("a", int_id=7)
    request = await house.begin("a")
    [card] = await house.registry.do(UnloadAdapter(int_id=7))
    assert (card.name, card.waiting) == ("a", 1)
    assert not await house.cards()
    with pytest.raises(ModelNotFound):
        await house.begin("a")
    assert house.worker.held
    await house.finish(request)
    assert not house.worker.held and not house.part.num_residents
    assert await house.registry.do(UnloadAdapter(name="a")) == []


async def test_what_was_moved_out_of_host_memory_is_read_again(tmp_path: Path) -> None:
    house = House(tmp_path)
    for name in "abc":
        house.put(name)
        await house.load(name)
    await settled()
    assert sorted(house.worker.held.values()) == ["digest of b", "digest of c"]
    assert (await house.cards())["a"].nbytes == 0
    first = await house.begin("a")
    await house.finish(first)
    assert sorted(house.worker.held.values()) == ["digest of a", "digest of c"]
    house.put("b", "changed on disk")
    second = await house.begin("b")
    assert second.cache_extra == ("changed on disk",)
    assert (await house.cards())["b"].digest == "changed on disk"


async def test_a_tenant_s_folder_that_became_a_link_is_not_read_again(tmp_path: Path) -> None:
    """What the path leads to was checked when the adapter was loaded."""
    house = House(tmp_path)
    for name in ("mine", "b", "c", "secret"):
        house.put(name)
    await house.load("mine", owner="one")
    for name in "bc":
        await house.load(name)
    await settled()
    (tmp_path / "mine").rename(tmp_path / "old")
    (tmp_path / "mine").symlink_to(tmp_path / "secret")
    house.worker.reads.clear()
    with pytest.raises(InvalidRequest, match="another than when it was loaded"):
        await house.begin("mine", tenant="one")
    assert not house.worker.reads


async def test_requests_that_come_together_share_a_second_read(tmp_path: Path) -> None:
    house = House(tmp_path)
    for name in "abc":
        house.put(name)
        await house.load(name)
    await settled()
    house.worker.reads.clear()
    await asyncio.gather(*(house.begin("a") for _ in range(6)))
    assert house.worker.reads == ["a"]


async def test_a_read_waits_while_requests_use_all_of_host_memory(tmp_path: Path) -> None:
    house = House(tmp_path)
    for name in "abc":
        house.put(name)
        await house.load(name)
    b, c = await house.begin("b"), await house.begin("c")
    cold = asyncio.ensure_future(house.begin("a"))
    given_up = asyncio.ensure_future(house.begin("a"))
    await settled()
    given_up.cancel()
    assert not cold.done() and house.registry.counts().requests_waiting == 2
    await house.finish(b)
    await house.finish(await cold, c)
    assert len(house.worker.held) == 2 and house.registry.counts().requests_waiting == 0


async def test_hot_adapters_do_not_keep_a_cold_one_out_of_host_memory(tmp_path: Path) -> None:
    """Each hot one always has a request; after 5 steps the one with fewer gets no new ones."""
    house = House(tmp_path)
    for name in "abc":
        house.put(name)
        await house.load(name)
    hot: list[asyncio.Future[Request]] = []
    cold: asyncio.Future[Request] | None = None
    for number in range(60):
        hot += [asyncio.ensure_future(house.begin(name, 3)) for name in "bc"]
        if number == 3:
            cold = asyncio.ensure_future(house.begin("a"))
        await settled()
        house.step()
        await settled()
        if cold is not None and cold.done():
            break
    assert cold is not None and cold.done() and number < 3 + 5 + 20
    requests = [await cold]
    house.step()
    await house.finish(*requests)
    while not all(task.done() for task in hot):
        house.step()
        await asyncio.sleep(0.001)  # Files are looked at on a thread.
    await house.finish(*[task.result() for task in hot])


async def test_one_that_cannot_be_served_fails_its_request_alone(tmp_path: Path) -> None:
    house = House(tmp_path)
    path = house.put("bad", "broken")
    with pytest.raises(InvalidRequest, match="r: must be positive"):
        await house.begin("bad", path=path)
    with pytest.raises(InvalidRequest, match="no adapter is at"):
        await house.begin("bad", path=str(tmp_path / "none"))
    with pytest.raises(InvalidRequest, match="rank is 9, more than max_lora_rank"):
        await house.load("large", path=house.put("large", "rank 9"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(InvalidRequest, match=r"in a form that is known \(.*peft"):
        await house.load("empty")
    await settled()
    assert not await house.cards() and not house.worker.held
    # And one that was there before stays what it was.
    house.put("a")
    await house.load("a")
    house.put("a", "broken")
    with pytest.raises(InvalidRequest):
        await house.load("a", load_inplace=True)
    assert (await house.begin("a")).cache_extra == ("digest of a",)


@pytest.mark.parametrize(
    "name", ["", "base", "a\nb", "a\x00", "\ud800", "a" * 257, "a\u2028b", "\x1b[2J"]
)
async def test_names_that_no_adapter_may_have_are_refused(name: str, tmp_path: Path) -> None:
    house = House(tmp_path)
    with pytest.raises(InvalidRequest, match="lora_name"):
        await house.load(name, path=house.put("a"))
    with pytest.raises(ModelNotFound):
        await house.begin(name)
    assert not house.worker.held


async def test_an_adapter_of_another_tenant_is_as_unknown_as_none(tmp_path: Path) -> None:
    house = House(tmp_path, max_cpu_loras=3)
    house.put("a")
    house.put("b")
    await house.load("a", owner="one")
    await house.load("b")
    messages = []
    for name in ("a", "z"):
        with pytest.raises(ModelNotFound) as caught:
            await house.begin(name, tenant="two")
        messages.append(caught.value.message.replace(repr(name), "NAME"))
    assert messages[0] == messages[1]
    for name, tenant in (("a", "one"), ("a", None), ("b", "one"), ("b", "two"), ("b", "")):
        await house.begin(name, tenant=tenant)
    # The name is the tenant's own: another one may have the same.
    house.put("other", "another's")
    await house.load("a", owner="two", path=str(tmp_path / "other"))
    assert (await house.begin("a", tenant="two")).cache_extra == ("another's",)
    assert (await house.begin("a", tenant="one")).cache_extra == ("digest of a",)
    assert await house.registry.do(UnloadAdapter(name="b", tenant="two")) == []
    assert len(await house.registry.do(UnloadAdapter(name="a", tenant="two"))) == 1


async def test_unknown_names_leave_nothing_behind(tmp_path: Path) -> None:
    house = House(tmp_path, lora_resolver_cache_dir=str(tmp_path / "served"))
    results = await asyncio.gather(
        *(house.begin(f"name {n}") for n in range(200)), return_exceptions=True
    )
    assert all(isinstance(result, ModelNotFound) for result in results)
    assert not house.registry._tasks
    assert not await house.cards() and house.registry.counts().requests_waiting == 0


async def test_a_folder_is_searched_by_name_and_never_left(tmp_path: Path) -> None:
    served = tmp_path / "served"
    served.mkdir()
    house = House(served, lora_resolver_cache_dir=str(served))
    house.put("a")
    house.put("deep")
    outside = House(tmp_path).put("outside")
    (served / "link").symlink_to(outside)
    (served / "circle").symlink_to(served / "circle")
    (served / "deep" / "up").symlink_to("..")
    names = (
        "../outside", "link", outside, "deep/../../outside", ".", "..", "", "circle", "deep/up",
        "deep/up/../../outside", "/", "~", "a" * 250 + "/b", "./../served",
    )  # fmt: skip
    for name in (*names, "./a", "a/", "a/.", "deep/../a", "deep//up", str(served / "a")):
        with pytest.raises(ModelNotFound):
            await house.begin(name)
    assert not await house.cards()
    first, second = await asyncio.gather(house.begin("a"), house.begin("a"))
    assert number_of(first) == number_of(second) and house.worker.reads == ["a"]
    assert (await house.cards())["a"].path == str(served / "a")


class BadFormat:
    @classmethod
    def is_at(cls, path: Path) -> bool:
        if path.name == "fatal":
            raise RuntimeError("bang")
        return False

    @classmethod
    def read(cls, path: Path) -> Any:
        raise AssertionError("it is at no path")


class BadResolver:
    def __init__(self, config: EngineConfig) -> None: ...

    async def resolve(self, name: str, base_model: str) -> Any:
        if name == "fatal":
            raise RuntimeError("bang")
        return 5 if name == "five" else None


class Bad:
    @hookimpl
    def register_adapter_formats(self, registry: Any) -> None:
        registry.add("bad", BadFormat, priority=9)

    @hookimpl
    def register_adapter_resolvers(self, registry: Any) -> None:
        registry.add("bad", BadResolver, priority=9)


async def test_a_plugin_that_raises_fails_its_request_alone_and_is_named(tmp_path: Path) -> None:
    house = House(tmp_path, load_plugins(extra=[Bad()]), lora_resolver_cache_dir=str(tmp_path))
    with pytest.raises(PluginError, match=r"adapter format 'bad' of .* failed in is_at.*bang"):
        await house.load("fatal", path=house.put("fatal"))
    with pytest.raises(PluginError, match=r"adapter resolver 'bad' of .* failed in resolve.*bang"):
        await house.begin("fatal")
    with pytest.raises(PluginError, match=r"adapter resolver 'bad' of .* returned 5, not a path"):
        await house.begin("five")
    house.put("a")
    await house.begin("a")


async def test_a_pinned_adapter_stays_and_leaves_others_room(tmp_path: Path) -> None:
    house = House(tmp_path, max_cpu_loras=3)
    for name in "abcd":
        house.put(name)
    await house.load("a", pinned=True)
    for name in "bcd":
        await house.load(name)
    await settled()
    assert "digest of a" in house.worker.held.values()
    house.step()
    assert (await house.cards())["a"].resident
    with pytest.raises(InvalidRequest, match="raise max_loras"):
        await house.registry.do(PinAdapter(name="b"))
    house.put("a", "new")
    card = await house.load("a", load_inplace=True)
    assert card.pinned
    house.step()
    assert (await house.cards())["a"].resident
    await house.registry.do(PinAdapter(name="a", pinned=False))
    [card] = await house.registry.do(PinAdapter(name="b"))
    assert card.pinned and await house.registry.do(PinAdapter(name="z")) == []
    # A load that cannot be pinned is none.
    with pytest.raises(InvalidRequest, match="cannot be pinned"):
        await house.load("e", path=house.put("e"), pinned=True)
    assert "e" not in await house.cards()
    with pytest.raises(InvalidRequest, match="cannot be pinned"):
        await house.load("c", load_inplace=True, pinned=True)
    assert "c" in await house.cards()


async def test_an_activated_adapter_acts_from_the_last_invocation_on(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.worker.invocation = (3, 4)
    house.put("a")
    await house.load("a")
    request = await house.begin("a")  # [1, 2, 3, 4, 5, 6]
    assert request.parts[NAME].first_position == 2
    assert request.late_extra == ((2, "digest of a"),) and request.cache_extra == ()
    house.worker.invocation = (4, 3)
    house.put("b")
    await house.load("b")
    base = await house.begin("b")
    assert NAME not in base.parts and base.late_extra == () and base.cache_extra == ()


async def test_the_end_of_the_engine_ends_reads(tmp_path: Path) -> None:
    house = House(tmp_path)
    for name in "abc":
        house.put(name)
        await house.load(name)
    house.worker.gate.clear()
    waiting = asyncio.ensure_future(house.begin("a"))
    await settled()
    await house.registry.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting


async def test_who_made_way_goes_on_when_no_read_waits_any_more(tmp_path: Path) -> None:
    """A hot adapter gets no new requests for the sake of a read that then fails."""
    house = House(tmp_path)
    for name in "abc":
        house.put(name)
        await house.load(name)
    running = [await house.begin(name, 50 if name == "b" else 20) for name in "bc"]
    house.put("a", "broken")
    cold = asyncio.ensure_future(house.begin("a"))
    await settled()
    for _ in range(6):
        house.step()
    new = [asyncio.ensure_future(house.begin(name)) for name in "bc"]
    await settled()
    assert sorted(task.done() for task in new) == [False, True], "one makes way"
    await house.finish(running[1])
    with pytest.raises(InvalidRequest, match="r: must be positive"):
        await cold
    requests = await asyncio.gather(*new)
    await house.finish(*running, *requests)
    assert len(house.worker.held) <= 2


async def test_a_load_whose_caller_leaves_is_finished(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.put("a")
    house.worker.gate.clear()
    loading = asyncio.ensure_future(house.load("a"))
    while not house.worker.reads:
        await asyncio.sleep(0.001)
    loading.cancel()
    house.worker.gate.set()
    while not await house.cards():
        await asyncio.sleep(0.001)
    await house.registry.do(UnloadAdapter(name="a"))
    await settled()
    assert not house.worker.held


async def test_a_reload_while_the_old_content_is_read_again(tmp_path: Path) -> None:
    """Whichever read ends first, one content is left, and it is the one that was asked for."""
    house = House(tmp_path)
    for name in "abc":
        house.put(name)
        await house.load(name)
    await settled()
    house.put("elsewhere", "new")
    house.worker.gate.clear()
    reads = len(house.worker.reads)
    waiting = asyncio.ensure_future(house.begin("a"))
    reload = asyncio.ensure_future(
        house.load("a", path=str(tmp_path / "elsewhere"), load_inplace=True)
    )
    while len(house.worker.reads) < reads + 2:
        await asyncio.sleep(0.001)
    house.worker.gate.set()
    card = await reload
    request = await waiting
    assert card.digest == "new"
    await house.finish(request)
    assert (await house.begin("a")).cache_extra == ("new",)
    assert "digest of a" not in house.worker.held.values()
    assert len(house.worker.held) == len(house.registry._host) <= 2


async def test_names_are_found_without_being_read(tmp_path: Path) -> None:
    served = tmp_path / "served"
    served.mkdir()
    (served / "empty").mkdir()
    house = House(served, lora_resolver_cache_dir=str(served))
    house.put("a")

    async def find(name: str, **ref: Any) -> str:
        [card] = await house.registry.do(FindAdapter(ref=AdapterRef(name, **ref)))
        return card.owner

    await house.load("mine", path=house.put("b"), owner="one")
    assert await find("a", tenant="one") == "" and await find("mine", tenant="one") == "one"
    assert house.worker.reads == ["b"]
    for name, ref in (
        ("mine", {"tenant": "two"}),
        ("a", {"tenant": "one", "shared": False}),
        ("empty", {"tenant": "one"}),  # A resolver's path where no adapter is.
        ("nobody", {"tenant": "one"}),
    ):
        with pytest.raises(ModelNotFound, match="is not served here") as caught:
            await find(name, **ref)
        assert str(tmp_path) not in caught.value.message
        with pytest.raises(ModelNotFound):
            await house.begin(name, **ref)
    assert await find("mine", tenant="one", shared=False) == "one"


async def test_an_owner_has_so_many_adapters_and_no_more(tmp_path: Path) -> None:
    house = House(tmp_path, max_cpu_loras=8)
    for name in "abcd":
        house.put(name)
    await house.load("a", owner="one", most=2)
    results = await asyncio.gather(
        *(house.load(name, owner="one", most=2) for name in "bcd"), return_exceptions=True
    )
    refused = [result for result in results if isinstance(result, InvalidRequest)]
    assert len(refused) == 2 and "2 may be" in refused[0].message
    await house.load("a", owner="one", most=2, load_inplace=True)  # No further one.
    await house.load("c", owner="two", most=2)
    await house.registry.do(UnloadAdapter(name="a", tenant="one"))
    await house.load("a", owner="one", most=2)


async def test_resolvers_names_make_room_for_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_names, "MAX_NAMES", 3)
    served = tmp_path / "served"
    served.mkdir()
    house = House(served, lora_resolver_cache_dir=str(served))
    for name in "abcde":
        house.put(name)
        await house.registry.do(FindAdapter(ref=AdapterRef(name, tenant="")))
        assert len(await house.cards()) <= 3
    for name in "xyz":
        await house.load(name, path=house.put(name))
    with pytest.raises(InvalidRequest, match="3 adapters are loaded"):
        await house.load("w", path=house.put("w"))
    with pytest.raises(InvalidRequest, match="3 adapters are loaded"):
        await house.begin("a")
    assert set(await house.cards()) == set("xyz")


async def test_a_load_goes_on_without_who_asked_for_it(tmp_path: Path) -> None:
    house = House(tmp_path)
    house.put("a")
    house.worker.gate.clear()
    task = asyncio.create_task(house.load("a"))
    while not house.worker.reads:
        await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    house.worker.gate.set()
    while "a" not in await house.cards():
        await asyncio.sleep(0)
    assert (await house.cards())["a"].nbytes == 100


async def test_several_are_read_at_once_and_those_of_a_name_one_after_another(
    tmp_path: Path,
) -> None:
    house = House(tmp_path, max_cpu_loras=16)
    house.worker.gate.clear()
    for number in range(MAX_LOADS + 2):
        house.put(f"a{number}")
    loads = [asyncio.ensure_future(house.load("a0")), asyncio.ensure_future(house.load("a0"))]
    loads += [asyncio.ensure_future(house.load(f"a{number}")) for number in range(1, MAX_LOADS + 2)]
    while len(house.worker.reads) < MAX_LOADS:
        await asyncio.sleep(0.01)
    await settled()
    assert sorted(house.worker.reads) == [f"a{number}" for number in range(MAX_LOADS)]
    house.worker.gate.set()
    results = await asyncio.gather(*loads, return_exceptions=True)
    refused = [result for result in results if isinstance(result, InvalidRequest)]
    assert len(refused) == 1 and "loaded already" in str(refused[0])
    assert len(await house.cards()) == MAX_LOADS + 2
    await house.registry.close()


async def test_those_that_are_read_together_are_no_more_than_may_be_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adapter_names, "MAX_NAMES", 3)
    house = House(tmp_path, max_cpu_loras=16)
    names = [f"a{number}" for number in range(5)]
    for name in names:
        house.put(name)
    results = await asyncio.gather(*map(house.load, names), return_exceptions=True)
    assert sum(isinstance(result, InvalidRequest) for result in results) == 2
    assert len(house.worker.held) == 3, "what found no room was dropped"
    await house.registry.close()
