"""Passes of speculators with models that are recorded and replayed give what launched ones give."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from draft_heads import LLAMA, Random, write
from drafted import config_of, greedy, serve
from test_eagle import eagle3
from test_mtp import CASES, LATENT, MIXTURE, Deepseek

from jackfield.core.hooks import hookimpl
from jackfield.core.protocols import Drafts, KnownTokens
from jackfield.core.registry import Provenance, load_plugins
from jackfield.core.worker.graphs.pass_graphs import ALONE
from jackfield.core.worker.parts.drafter import Drafter
from jackfield.core.worker.parts.speculation import Speculation
from jackfield.plugins.conformance.tape import recorded
from jackfield.plugins.executors.inprocess import InProcessExecutor
from jackfield.plugins.speculators.medusa import Medusa

from helpers import COMMON, VOCAB, interpreted, make_checkpoint

SIZE = COMMON["hidden_size"]
DRAFTS = 2
"""Of a row. Passes of each number up to it are recorded, in the interpreter."""
ASKED = [
    ([7, 8] * 4, greedy(max_tokens=14)),
    ([30 + n for n in range(31)], greedy(max_tokens=9)),
    ([5] * 6, greedy(temperature=0.9, seed=4, max_tokens=14)),
]


class NotingExecutor(InProcessExecutor):
    """Notes what is proposed after which tokens."""

    proposals: dict[tuple[int, ...], list[int]] = {}

    async def start(self) -> Any:
        self.proposals.clear()
        info = await super().start()
        part = self._worker.runner.parts.find(Speculation)  # type: ignore[union-attr]
        assert part is not None
        table, keep = part._table, part._keep

        def noting(slots: Any, *others: Any) -> Any:
            numbers = keep(slots, *others)
            for slot, number in zip(slots, numbers.tolist(), strict=True):
                end = int(table.lengths[slot]) + 1
                tokens = table.token_history[slot, : end + number].tolist()
                self.proposals[tuple(tokens[:end])] = tokens[end:]
            return numbers

        part._keep = noting  # type: ignore[method-assign]
        await self.prepare(part)
        return info

    async def prepare(self, part: Speculation) -> None:
        pass


class TapedExecutor(NotingExecutor):
    """Steps are launched, but the speculator's passes are recorded."""

    replays: Counter[int] = Counter()
    """By width."""

    async def prepare(self, part: Speculation) -> None:
        self.replays.clear()
        graphs = part.drafter.pass_graphs(recorded, part.widths)
        assert graphs is not None, "the speculator may be recorded"

        @torch.inference_mode()
        def record() -> None:
            graphs._kinds = [kind for kind in graphs._kinds if kind[0] == graphs._kinds[-1][0]]
            while graphs.record_next():
                pass

        assert self._thread is not None
        await self._thread.call(record)
        part.drafter.graphs = graphs
        replay = graphs._replay

        def counted(*arguments: Any) -> Any:
            self.replays[arguments[3]] += 1
            return replay(*arguments)

        graphs._replay = counted  # type: ignore[method-assign]


class RecordedExecutor(NotingExecutor):
    """All is recorded before the first request."""

    replays: Counter[int] = Counter()

    async def prepare(self, part: Speculation) -> None:
        self.replays.clear()
        assert self._thread is not None
        while await self._thread.call(self._worker.prepare_ahead):
            pass
        graphs = part.drafter.graphs
        assert graphs is not None, "the passes are recorded"
        replay = graphs._replay

        def counted(*arguments: Any) -> Any:
            self.replays[arguments[3]] += 1
            return replay(*arguments)

        graphs._replay = counted  # type: ignore[method-assign]


def plugins_with(plugins: Any) -> Any:
    class Plugin:
        jackfield_api = 3

        @hookimpl
        def register_executors(self, registry: Any) -> None:
            registry.add("noting", NotingExecutor)
            registry.add("taped", TapedExecutor)
            registry.add("recorded", RecordedExecutor)

    plugins.add_plugin(Plugin(), Provenance("tests", "0", "graphs"))
    return plugins


def draft_model(folder: Path) -> tuple[Path, dict[str, Any]]:
    target = make_checkpoint("gemma3", folder / "target")
    return target, {"method": "draft_model", "model": str(target)}


def eagle(folder: Path) -> tuple[Path, dict[str, Any]]:
    draw = Random(1)
    tensors = {"fc.weight": draw.matrix(SIZE, 2 * SIZE), **draw.layer("layers.0.", SIZE)}
    config = {**LLAMA, "hidden_size": SIZE, "architectures": ["EagleLlamaForCausalLM"]}
    head = write(folder / "head", tensors, config)
    return make_checkpoint("qwen3", folder / "target"), {"method": "eagle", "model": str(head)}


def third(folder: Path) -> tuple[Path, dict[str, Any]]:
    tensors, config = eagle3(Random(2), 80, prefix="midlayer.")
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": [-1, 0, 1]}
    head = write(folder / "head", tensors, config)
    return make_checkpoint("qwen3", folder / "target"), {"method": "eagle3", "model": str(head)}


def mtp(folder: Path) -> tuple[Path, dict[str, Any]]:
    sizes = {**MIXTURE, **LATENT, "first_k_dense_replace": 9}  # Torch's mixtures read numbers.
    case = Deepseek(folder / "target", "DeepseekV3", "DeepseekV3ForCausalLM", sizes)
    return case.folder, {"method": "mtp"}


def medusa(folder: Path) -> tuple[Path, dict[str, Any]]:
    draw = Random(6)
    tensors = {f"blocks.{h}.layers.0.weight": draw.matrix(SIZE, SIZE) for h in range(3)}
    tensors |= {f"lm_heads.{h}.weight": draw.matrix(VOCAB, SIZE) for h in range(3)}
    config = {
        "architectures": ["MedusaModel"], "model_type": "medusa", "hidden_size": SIZE,
        "num_heads": 3, "num_hidden_layers": 1, "vocab_size": VOCAB,
    }  # fmt: skip
    head = write(folder / "head", tensors, config)
    return make_checkpoint("qwen3", folder / "target"), {"method": "medusa", "model": str(head)}


def mixture(folder: Path) -> tuple[Path, dict[str, Any]]:
    return CASES["DeepseekV3ForCausalLM"](folder / "target").folder, {"method": "mtp"}


MADE: dict[str, Callable[[Path], tuple[Path, dict[str, Any]]]] = {
    "draft_model": draft_model, "eagle": eagle, "eagle3": third, "mtp": mtp, "medusa": medusa,
}  # fmt: skip


def settings(target: Path, speculative: dict[str, Any], **more: Any) -> Any:
    speculative = {"num_speculative_tokens": DRAFTS, "adaptive_width": False, **speculative}
    sizes: dict[str, Any] = {
        "attention_backend": "triton", "max_model_len": 48, "max_num_seqs": 3,
        "max_num_batched_tokens": 16, "block_size": 8, "num_gpu_blocks_override": 40, **more,
    }  # fmt: skip
    return config_of(target, speculative_config=speculative, **sizes)


BY_DAY = ("eagle3", "medusa")
"""With a cache and without; a model beside it is recorded in caches that are compacted."""
COMPACTED: dict[str, Any] = {
    "kv_compression": "window", "kv_compression_budget": 16, "kv_compression_interval": 4,
    "enable_prefix_caching": False, "block_size": 4,
}  # fmt: skip


@interpreted
@pytest.mark.parametrize(
    ("method", "compression"),
    [
        *(
            pytest.param(method, {}, marks=[pytest.mark.slow] * (method not in BY_DAY))
            for method in MADE
        ),
        ("draft_model", COMPACTED),
        pytest.param(
            "mtp",
            {**COMPACTED, "kv_compression_budget": None, "kv_compression_levels": "8:0.5@8"},
            marks=pytest.mark.slow,
        ),
    ],
)
async def test_recorded_passes_propose_what_launched_ones_do(
    method: str, compression: dict[str, Any], tmp_path: Path
) -> None:
    """Rows that end leave others, which are padded; prompts come in parts beside drafts."""
    target, speculative = MADE[method](tmp_path)
    plugins = plugins_with(load_plugins())
    tokens, proposals = [], []
    for executor in ("noting", "taped"):
        config = settings(target, speculative, executor=executor, **compression)
        served, stats = await serve(config, ASKED, plugins)
        assert (stats.kv_compactions > 1) == bool(compression)
        tokens.append(served)
        proposals.append(NotingExecutor.proposals.copy())
    assert tokens[0] == tokens[1]
    launched, replayed = proposals
    common = launched.keys() & replayed.keys()
    assert len(common) > 12
    assert all(launched[known] == replayed[known] for known in common)
    widths = TapedExecutor.replays
    assert widths[0] > 0, "beside prompts"
    assert method == "medusa" or widths[DRAFTS + 1] > 1, "rows with as many drafts"


@interpreted
async def test_a_model_whose_drafts_rest_reads_on(tmp_path: Path) -> None:
    """With two rows drafts are not wanted: its pass over the tokens is one graph then, so that its
    cache is whole, and all its drafts are right, once one row is left."""
    target, speculative = draft_model(tmp_path)
    speculative["num_speculative_tokens_per_batch_size"] = [[1, 1, DRAFTS], [2, 9, 0]]
    asked = [([7, 8, 9], greedy(max_tokens=40)), ([5] * 6, greedy(max_tokens=26))]
    config = settings(target, speculative, executor="taped")
    served, stats = await serve(config, asked, plugins_with(load_plugins()))
    plain, _ = await serve(config_of(target, max_model_len=48), asked)
    assert served == plain
    assert TapedExecutor.replays[ALONE] >= 4
    assert stats.spec_decode_num_draft_tokens > 2
    assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens


@pytest.mark.slow
@interpreted
async def test_kernels_choose_drafts_as_they_choose_tokens(tmp_path: Path) -> None:
    """A model that drafts for itself is always right, greedy and with a temperature."""
    target = make_checkpoint("qwen3", tmp_path)
    speculative = {"method": "draft_model", "model": str(target)}
    asked = [([7, 8] * 3, greedy(max_tokens=9)),
             ([5, 9], greedy(temperature=0.9, seed=4, max_tokens=9))]  # fmt: skip
    _, stats = await serve(settings(target, speculative, operations="triton"), asked)
    assert stats.spec_decode_num_accepted_tokens == stats.spec_decode_num_draft_tokens > 4


class Reading(Medusa):
    """Waits for the device in each call."""

    def propose(self, tokens: KnownTokens) -> Drafts:
        drafts = super().propose(tokens)
        return drafts._replace(counts=drafts.counts.clamp(max=int(tokens.lengths.max())))


class Unrecordable(Reading):
    recordable = False


class GraphsExecutor(InProcessExecutor):
    def __init__(self, config: Any, model_config: Any, plugins: Any) -> None:
        super().__init__(config, model_config, plugins)
        # Of the engine's own steps, calls are replays.
        self._worker._recorder = lambda: recorded_passes  # type: ignore[method-assign]


def recorded_passes(function: Callable[[], None]) -> Callable[[], None]:
    return recorded(function) if function.__qualname__.startswith("PassGraphs") else function


@interpreted
@pytest.mark.parametrize("speculator", [Medusa, Reading, Unrecordable])
async def test_calls_go_on_where_they_cannot_be_recorded(
    speculator: type[Medusa], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    target, speculative = medusa(tmp_path)

    class Plugin:
        jackfield_api = 3

        @hookimpl
        def register_executors(self, registry: Any) -> None:
            registry.add("graphs", GraphsExecutor)

        @hookimpl
        def register_speculators(self, registry: Any) -> None:
            registry.add("subject", type("Subject", (speculator,), {"recognizes": lambda c: 0}))

    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("tests", "0", "graphs"))
    plain, stats = await serve(settings(target, speculative), ASKED[:1])
    speculative = {**speculative, "method": "subject"}
    config = settings(target, speculative, executor="graphs")
    served, others = await serve(config, ASKED[:1], plugins)
    assert served == plain
    # How many depends on measured times.
    assert others.spec_decode_num_draft_tokens > 0 < stats.spec_decode_num_draft_tokens
    told = [each.getMessage() for each in caplog.records if "launched kernel" in each.getMessage()]
    assert bool(told) == (speculator is Reading)
    assert not told or ("subject" in told[-1] and "waits for the device" in told[-1])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("method", [*MADE, "mixture"])
async def test_graphs_propose_what_launched_passes_do(
    method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many rows, that begin and end at different steps. Near ties may fall otherwise."""
    target, speculative = {**MADE, "mixture": mixture}[method](tmp_path)
    draw = random.Random(3)
    asked = [
        ([draw.randrange(3, VOCAB) for _ in range(1 + 5 * number)],
         greedy(max_tokens=30 + 3 * number, temperature=0.9 * (number % 2), seed=number))
        for number in range(14)
    ]  # fmt: skip
    plugins = plugins_with(load_plugins())
    shared: dict[str, Any] = {
        "device": "cuda", "operations": "auto", "attention_backend": "auto", "max_num_seqs": 6,
        "max_model_len": 160, "max_num_batched_tokens": 64, "block_size": 16,
        "num_gpu_blocks_override": 200,
    }  # fmt: skip
    proposals = []
    for executor in ("noting", "recorded"):
        with monkeypatch.context() as patched:
            if executor == "noting":
                patched.setattr(Drafter, "pass_graphs", lambda drafter, record, widths: None)
            config = settings(target, speculative, executor=executor, **shared)
            await serve(config, asked, plugins)
        proposals.append(NotingExecutor.proposals.copy())
    launched, replayed = proposals
    common = launched.keys() & replayed.keys()
    alike = sum(launched[known] == replayed[known] for known in common)
    assert alike >= 0.97 * len(common) > 100, (alike, len(common))
    widths = RecordedExecutor.replays
    assert widths[0] > 0, "beside prompts"
    assert method == "medusa" or widths[DRAFTS + 1] > 1, "rows with as many drafts"
