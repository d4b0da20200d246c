"""`ModelKit`: a model architecture against its `transformers` class, on a tiny random checkpoint.

    class TestMine(ModelKit):
        name = "MineForCausalLM"                     # as registered
        reference = transformers.MineForCausalLM     # default: transformers' own of that name
        config = {"sliding_window": 24}              # where the tiny configuration should differ

On a GPU where there is one, else on the CPU; with whatever attention backend and operations `auto`
takes there.
"""

from __future__ import annotations

import asyncio
import copy
import functools
import json
import re
import tempfile
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ...core.config import EngineConfig
from ...core.engine.async_engine import AsyncEngine
from ...core.errors import ConfigError, LoadError
from ...core.loading.build import build_model
from ...core.loading.model_config import resolve_model_config
from ...core.nn.context import ForwardContext
from ...core.nn.experts import Experts, Router
from ...core.parallel.ranks import ONE_RANK, Pipeline, Ranks
from ...core.registration.architecture import FALLBACK
from ...core.registration.choice import choose
from ...core.registry import Plugins
from ...core.sampling_params import SamplingParams
from ...core.worker.kv_cache.memory import allocate_cache
from ...core.worker.kv_cache.states import NoAttention, make_states
from ...core.worker.selection import attention_refusal, backend_kind, cache_layers
from .kit import Kit
from .paged import make_layout
from .rank_threads import run_ranks, thread_ranks

VOCAB = 151
TINY: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16,
    "max_position_embeddings": 256, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "initializer_range": 0.2,
}  # fmt: skip
"""Configuration fields; a family gets those that its configuration has."""
EPSILONS = ("rms_norm_eps", "layer_norm_eps", "layernorm_epsilon", "layer_norm_epsilon",
            "norm_eps", "norm_epsilon")  # fmt: skip
EPSILON = 0.1
"""Large enough that a norm with another epsilon differs visibly."""
BLOCK = 4
LONGEST = 80
OUTPUT = 8
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
WEIGHTS = "model.safetensors"


def _prompts() -> list[list[int]]:
    """Return prompts of assorted lengths; the last shares 35 tokens with the one before it."""
    draw = np.random.default_rng(3)
    made = [draw.integers(3, VOCAB, size=n).tolist() for n in (1, 5, 17, 63, 40)]
    made.append(made[-1][:35] + draw.integers(3, VOCAB, size=6).tolist())
    return made


class PagedModel:
    """A built model over a small paged cache, run row by row as the worker would.

    kernels: the name of both the attention backend and the operations; ranks: whose part of the
    model it is; options: more of the engine's.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str,
        *,
        kernels: str = "auto",
        plugins: Plugins | None = None,
        ranks: Ranks = ONE_RANK,
        **options: Any,
    ) -> None:
        plugins = Kit.plugins() if plugins is None else plugins
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config = EngineConfig(model=str(folder), device=device.type, dtype=dtype, **options)  # type: ignore[arg-type]
        model_config = resolve_model_config(config, plugins)
        kind = model_config.dtype
        _, operations, _ = choose(
            plugins["operations"], "operations", kernels, lambda o: o.supports(device, kind)
        )
        self.device = device
        self.model = build_model(plugins, config, model_config, device, operations(), ranks)
        layers = cache_layers(self.model)

        def refusal(backend: Any) -> str | None:
            reasons = [attention_refusal(backend, layer.spec, device, kind) for layer in layers]
            return next((reason for reason in reasons if reason is not None), None)

        backend: Any = NoAttention
        if layers:
            registry = plugins[backend_kind(layers)]
            _, backend, _ = choose(registry, "attention_backend", kernels, refusal)
        self.backend = backend(
            device=device, dtype=kind, block_size=BLOCK, max_num_seqs=8,
            max_num_batched_tokens=512, max_model_len=LONGEST,
        )  # fmt: skip
        self.blocks_per_row = -(-LONGEST // BLOCK)
        for layer in layers:
            spec, num_blocks = layer.cache_spec(kind), 1 + 8 * self.blocks_per_row
            layer.bind(allocate_cache(spec, num_blocks, BLOCK, device))
        self.keeps_states = make_states(self.model, config, device) is not None
        self.computed = [0] * 8

    def run(self, rows: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Run one step of slot → its next tokens; return slot → logits [tokens, vocab] float32."""
        every = self.logits(self.hidden(rows))
        parts = torch.split(every, [len(tokens) for tokens in rows.values()])
        return dict(zip(rows, parts, strict=True))

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Compute logits: [rows, hidden_size] → [rows, vocab_size] float32."""
        model: Any = self.model
        logits: torch.Tensor = model.compute_logits(hidden.clone()).float()
        return logits

    @torch.inference_mode()
    def hidden(
        self, rows: Mapping[int, Sequence[int]], incoming: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Run a step as `run` does, up to the input of `compute_logits`, or of the next stage:
        [tokens of all rows, hidden_size]. incoming: what the stage before has returned."""
        slots = list(rows)
        sizes = [(self.computed[s] + len(rows[s]), len(rows[s])) for s in slots]
        width = self.blocks_per_row
        # Blocks of a slot in descending order, so that their order matters.
        table = torch.stack(
            [torch.arange((s + 1) * width, s * width, -1, dtype=torch.int32) for s in slots]
        )
        positions = [torch.arange(length - queries, length) for length, queries in sizes]
        slot_mapping = [
            table[row, at // BLOCK].long() * BLOCK + at % BLOCK for row, at in enumerate(positions)
        ]
        layout = make_layout(sizes, table, torch.cat(slot_mapping), self.device, slots)
        context = ForwardContext(
            backend=self.backend,
            metadata=self.backend.build_metadata(layout),
            layout=layout,
            positions=torch.cat(positions).to(self.device),
            incoming=None if incoming is None else incoming.clone(),
        )
        tokens = torch.tensor([t for s in slots for t in rows[s]], device=self.device)
        for slot, (length, _) in zip(slots, sizes, strict=True):
            self.computed[slot] = length
        hidden: torch.Tensor = self.model(tokens, context)
        return hidden


def check_ranks(
    folder: Path,
    name: str,
    size: int,
    plugins: Plugins,
    bound: float,
    ways: Collection[Literal["tensor", "experts"]] = ("tensor", "experts"),
) -> None:
    """Check that `size` ranks compute together what one does, mixtures also with expert
    parallelism; a class that does not say `tensor_parallel` must be refused. `bound`: allowed
    deviation of float32 log-probabilities; `ways`: how experts are divided."""
    registered = name if name in plugins["model"] else FALLBACK
    if not vars(plugins["model"].load(registered)).get("tensor_parallel", False):
        with pytest.raises(ConfigError, match="tensor_parallel_size"):
            PagedModel(folder, "float32", plugins=plugins, ranks=thread_ranks(size)[0])
        return
    one = PagedModel(folder, "float32", plugins=plugins)
    has_experts = any(isinstance(module, Experts) for module in one.model.modules())
    models = [
        [
            PagedModel(folder, "float32", plugins=plugins, ranks=rank)
            for rank in thread_ranks(size, expert_parallel=way == "experts")
        ]
        for way in ways
        if way == "tensor" or has_experts
    ]
    for step in (dict(enumerate(_prompts()[1:4])), {0: [7], 2: [9]}):
        want = one.run(step)
        for way in models:
            results = run_ranks([functools.partial(model.run, step) for model in way])
            for slot, logits in want.items():
                ModelKit.near(results[0][slot], logits, bound)
                for result in results[1:]:
                    assert torch.equal(result[slot], results[0][slot]), "ranks have unlike logits"
    for way in models:
        sizes = [sum(p.numel() for p in m.model.parameters()) for m in (one, *way)]
        assert max(sizes[1:]) < sizes[0], "a rank holds all weights"


def check_stages(folder: Path, count: int, plugins: Plugins) -> None:
    """Check that `count` stages compute one after another what one rank does, bit for bit, and that
    none has the others' weights; a class that does not say `pipeline_parallel` must be refused."""
    ranks = [Ranks(pipeline=Pipeline(stage, count)) for stage in range(count)]
    one = PagedModel(folder, "float32", plugins=plugins)
    if not getattr(one.model, "pipeline_parallel", False):
        with pytest.raises(ConfigError, match="pipeline_parallel_size"):
            PagedModel(folder, "float32", plugins=plugins, ranks=ranks[0])
        return
    stages = [PagedModel(folder, "float32", plugins=plugins, ranks=each) for each in ranks]
    for step in (dict(enumerate(_prompts()[1:4])), {0: [7], 2: [9]}):
        want, hidden = one.run(step), None
        for stage in stages:
            hidden = stage.hidden(step, hidden)
        assert hidden is not None
        assert torch.equal(stages[-1].logits(hidden), torch.cat(list(want.values())))
    names = [{name for name, _ in model.model.named_parameters()} for model in (one, *stages)]
    assert set.union(*names[1:]) == names[0], "no stage has a weight, or one that is none"
    shared = {name for name in names[0] if sum(name in each for each in names[1:]) > 1}
    tied = set(one.model.weight_map.tied.values())  # type: ignore[union-attr, operator]
    assert shared <= tied, f"several stages have {sorted(shared)}"


class ModelKit(Kit):
    """Subclass it in your tests, and set what is yours. `name` is the architecture as registered,
    and as config.json's `architectures` says."""

    kind = "model"
    reference: ClassVar[Any] = None
    """A `transformers` causal model's class; None: the one that transformers has under `name`."""
    config: ClassVar[Mapping[str, Any]] = {}
    """Differences of the tiny configuration from `TINY`, and from an epsilon of `EPSILON`."""
    tolerance: ClassVar[float] = 1e-3
    """Allowed deviation of float32 log-probabilities from the reference's."""
    invariance: ClassVar[float] = 2e-4
    """Allowed difference of float32 log-probabilities between two ways to batch the same tokens."""

    # -------------------------------------------------------------- what tests are made of

    @classmethod
    def make_reference(cls) -> Any:
        """Create a random reference model: float32, eager attention, norms and biases not
        trivial."""
        import transformers

        kind = cls.reference or getattr(transformers, cls.name, None)
        if kind is None:
            pytest.skip(f"transformers has no {cls.name}: subclass ModelKit and set reference")
        config = kind.config_class(**{**tiny(kind.config_class), **cls.config})
        config._attn_implementation = "eager"
        torch.manual_seed(7)
        model = kind(config).float().eval()
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.add_((0.3 if "bias" in name else 0.1) * torch.randn_like(parameter))
        return model

    @pytest.fixture
    def reference_model(self) -> Any:
        """The reference model, one per class; tests change a copy."""
        kit: Any = type(self)
        return _reference(kit)

    @pytest.fixture
    def folder(self) -> Path:
        """The checkpoint, as `transformers` writes it; one per class, so only to be read."""
        kit: Any = type(self)
        return Path(_checkpoint(kit).name)

    @pytest.fixture
    def expected(self, reference_model: Any) -> Callable[[Sequence[int]], torch.Tensor]:
        """Return a function: tokens → the reference's log-probabilities, [tokens, vocab]
        float32."""
        return functools.partial(_score, reference_model)

    @staticmethod
    def near(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
        """got: logits; want: logits or log-probabilities, [tokens, vocab]"""
        torch.testing.assert_close(
            got.log_softmax(-1).cpu(), want.log_softmax(-1).cpu(), atol=bound, rtol=0
        )

    def engine(self, folder: Path, **options: Any) -> AsyncEngine:
        settings: dict[str, Any] = {
            "dtype": "float32",
            "skip_tokenizer_init": True,
            "max_model_len": LONGEST,
            "max_num_seqs": 8,
            "num_gpu_blocks_override": 256,
            **options,
        }
        return AsyncEngine(EngineConfig(model=str(folder), **settings), plugins=self.plugins())

    def paged(self, folder: Path, dtype: str = "float32") -> PagedModel:
        """Return the checkpoint's model without an engine."""
        return PagedModel(folder, dtype, plugins=self.plugins())

    def parameters(self, folder: Path) -> dict[str, torch.Tensor]:
        """Return a built model's parameters by name; raises LoadError."""
        model: nn.Module = self.paged(folder).model
        return {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}

    # -------------------------------------------------------------- logits

    def test_logits_equal_the_reference(self, folder: Path, expected: Any) -> None:
        model = self.paged(folder)
        for slot, prompt in enumerate(_prompts()):
            self.near(model.run({slot: prompt})[slot], expected(prompt), self.tolerance)

    @pytest.mark.parametrize(
        "sizes",
        [[1] * 63, [62, 1], [1, 62], [7] * 9, [4, 4, 1, 30, 2, 16, 6]],
        ids=lambda sizes: "-".join(map(str, sizes[:7])),
    )
    def test_any_split_of_the_prompt_gives_the_same_logits(
        self, folder: Path, sizes: list[int]
    ) -> None:
        prompt = _prompts()[3]
        assert sum(sizes) == len(prompt)
        model = self.paged(folder)
        whole = model.run({0: prompt})[0]
        parts, first = [], 0
        for size in sizes:
            parts.append(model.run({1: prompt[first : first + size]})[1])
            first += size
        self.near(torch.cat(parts), whole, self.invariance)

    def test_what_else_is_in_the_batch_changes_nothing(self, folder: Path) -> None:
        """Rows start beside others, and beside rows that continue by one token."""
        prompts = _prompts()
        model = self.paged(folder)
        alone = [(model.run({s: p})[s], model.run({s: [5]})[s]) for s, p in enumerate(prompts)]
        model = self.paged(folder)
        begun = model.run(dict(enumerate(prompts[:4])))
        mixed = model.run({0: [5], 1: [5], 2: [5], 3: [5], 4: prompts[4], 5: prompts[5]})
        ended = model.run({4: [5], 5: [5]})
        for slot, want in enumerate(alone):
            got = (begun, mixed) if slot < 4 else (mixed, ended)
            for have, wanted in zip(got, want, strict=True):
                self.near(have[slot], wanted, self.invariance)

    def test_logits_of_some_rows_need_no_others(self, folder: Path) -> None:
        """`compute_logits` gets only the rows that sample, in any number."""
        model = self.paged(folder)
        hidden = model.hidden({0: _prompts()[2]})
        with torch.inference_mode():
            every = model.logits(hidden)
            for rows in ([16], [3, 9], [9, 3, 3]):
                self.near(model.logits(hidden[rows]), every[rows], self.invariance)

    # -------------------------------------------------------------- dtypes

    @pytest.mark.parametrize("size", [2, 4])
    def test_ranks_compute_together_what_one_does(self, folder: Path, size: int) -> None:
        """A class that does not say `tensor_parallel` is refused with several ranks."""
        check_ranks(folder, self.name, size, self.plugins(), self.invariance)

    @pytest.mark.parametrize("count", [2, 3])
    def test_stages_compute_one_after_another_what_one_rank_does(
        self, folder: Path, count: int
    ) -> None:
        """A class that does not say `pipeline_parallel` is refused with several stages."""
        check_stages(folder, count, self.plugins())

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_builds_and_runs_in_every_dtype(
        self, folder: Path, reference_model: Any, expected: Any, dtype: str
    ) -> None:
        """Deviation from float32 is as small as that of the reference in the same dtype."""
        try:
            model = self.paged(folder, dtype)
        except ConfigError as error:
            pytest.skip(f"{dtype} cannot be served here: {error}")
        # Routers may compute logits in float32.
        modules = (m for m in model.model.modules() if not isinstance(m, Router))
        kinds = {p.dtype for m in modules for p in m.parameters(recurse=False)}
        assert kinds == {DTYPES[dtype]}, "parameters are made in BuildContext.dtype"
        prompt = _prompts()[4]
        want = expected(prompt)
        got = model.run({0: prompt})[0].log_softmax(-1).cpu()
        own_error = 0.0
        if dtype != "float32":
            half = copy.deepcopy(reference_model).to(DTYPES[dtype])
            own_error = float((_score(half, prompt) - want).abs().max())
        bound = self.tolerance + 3 * own_error
        assert float((got - want).abs().max()) <= bound

    # -------------------------------------------------------------- the whole engine

    @pytest.mark.parametrize(
        "options",
        [{}, {"max_num_batched_tokens": 16, "block_size": 4}],
        ids=["whole-prompts", "in-chunks"],
    )
    def test_greedy_tokens_equal_the_reference(
        self, folder: Path, expected: Any, options: dict[str, Any]
    ) -> None:
        """Run all prompts at once; teacher-forced, so that a near tie does not matter."""
        prompts = _prompts()

        async def ask() -> list[Any]:
            async with self.engine(folder, **options) as engine:
                return list(await asyncio.gather(*(_answer(engine, p) for p in prompts)))

        for prompt, answer in zip(prompts, asyncio.run(ask()), strict=True):
            self.check_answer(prompt, answer, expected)

    def check_answer(self, prompt: list[int], answer: Any, expected: Any) -> None:
        """Check that each token is the reference's best, and has its log-probability, within
        tolerance."""
        chosen = answer.outputs[0]
        scores = expected(prompt + chosen.token_ids)[len(prompt) - 1 : -1]
        assert len(chosen.token_ids) == OUTPUT
        for step, token in enumerate(chosen.token_ids):
            assert float(scores[step].max() - scores[step, token]) <= self.tolerance
            got = chosen.logprobs[step][token].logprob
            assert got == pytest.approx(float(scores[step, token]), abs=self.tolerance)

    def test_a_prefix_hit_gives_the_same_answer(self, folder: Path, expected: Any) -> None:
        first, second = _prompts()[4:]

        async def ask() -> list[Any]:
            async with self.engine(folder, block_size=4) as engine:
                answers = [await _answer(engine, p) for p in (first, second, first)]
                return [*answers, engine.core.info.keeps_states]

        fresh, shared, again, keeps_states = asyncio.run(ask())
        assert fresh.num_cached_tokens == 0
        # The first prompt to share a beginning with another keeps the states after it.
        assert shared.num_cached_tokens >= 32 or keeps_states, "35 tokens were computed before"
        assert again.num_cached_tokens >= 36, "all of its prompt was computed before"
        assert again.outputs[0].token_ids == fresh.outputs[0].token_ids
        for prompt, answer in ((first, fresh), (second, shared), (first, again)):
            self.check_answer(prompt, answer, expected)

    # -------------------------------------------------------------- weights

    def test_every_tensor_of_the_checkpoint_reaches_a_parameter(
        self, folder: Path, tmp_path: Path
    ) -> None:
        tensors = load_file(folder / WEIGHTS)
        before = self.parameters(_changed(folder, tmp_path, tensors))
        for name in _one_of_each_layer(tensors):
            changed = {**tensors, name: tensors[name] + 1.0}
            after = self.parameters(_changed(folder, tmp_path, changed))
            moved = [key for key, value in after.items() if not torch.equal(value, before[key])]
            assert moved, f"{name} is read, and changes nothing"

    def test_a_missing_tensor_is_refused_by_name(self, folder: Path, tmp_path: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        for name in _one_of_each_layer(tensors):
            left = {key: value for key, value in tensors.items() if key != name}
            with pytest.raises(LoadError) as caught:
                self.parameters(_changed(folder, tmp_path, left))
            assert name in str(caught.value)

    def test_a_tensor_that_nothing_uses_is_refused_by_name(
        self, folder: Path, tmp_path: Path
    ) -> None:
        tensors = load_file(folder / WEIGHTS)
        layered = next(name for name in sorted(tensors) if re.search(r"\.0\.", name))
        for name in ("nobody.weight", re.sub(r"\.0\.", ".77.", layered, count=1)):
            with pytest.raises(LoadError) as caught:
                self.parameters(_changed(folder, tmp_path, {**tensors, name: torch.ones(3)}))
            assert name in str(caught.value)


def tiny(config_class: Any) -> dict[str, Any]:
    """Return the fields of a family's tiny configuration: those of `TINY` that it has, and epsilons
    that affect results. A field that it lacks would be stored and read back."""
    known = config_class()
    known.allow_global_per_layer_attribute_access = True
    fields = {name: value for name, value in TINY.items() if hasattr(known, name)}
    return fields | {name: EPSILON for name in EPSILONS if hasattr(known, name)}


@functools.cache
def _reference(kit: Any) -> Any:
    return kit.make_reference()


@functools.cache
def _checkpoint(kit: Any) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory(prefix="jackfield-conformance-")
    _reference(kit).save_pretrained(folder.name)
    # The class registered under the kit's name is checked, whatever the origin of the reference.
    config = Path(folder.name) / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": [kit.name]}))
    return folder


@torch.no_grad()
def _score(model: Any, tokens: Sequence[int]) -> torch.Tensor:
    """Return a `transformers` model's log-probabilities, [tokens, vocab] float32."""
    logits = model(torch.tensor([list(tokens)]), use_cache=False).logits
    scores: torch.Tensor = logits[0].float().log_softmax(-1)
    return scores


async def _answer(engine: AsyncEngine, prompt: list[int]) -> Any:
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, logprobs=1)
    async for output in engine.generate(prompt, params):
        last = output
    return last


def _one_of_each_layer(names: Iterable[str]) -> list[str]:
    """Return the first of the names that differ only in their numbers."""
    first: dict[str, str] = {}
    for name in sorted(names):
        first.setdefault(re.sub(r"\d+", "#", name), name)
    return list(first.values())


def _changed(folder: Path, into: Path, tensors: dict[str, torch.Tensor]) -> Path:
    """Write the checkpoint with other tensors to a folder that is reused."""
    (into / "config.json").write_bytes((folder / "config.json").read_bytes())
    save_file(tensors, into / WEIGHTS, metadata={"format": "pt"})
    return into
