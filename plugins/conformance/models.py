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
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ...core.config import EngineConfig
from ...core.engine.async_engine import AsyncEngine
from ...core.errors import ConfigError, LoadError
from ...core.nn.experts import Router
from ...core.sampling_params import SamplingParams
from ...core.worker.hidden_states import take
from .adapted_model import check_adapters
from .divided_models import check_ranks, check_stages
from .invariant_model import check_batch_invariance
from .kit import Kit
from .paged_model import LONGEST, VOCAB, PagedModel, assert_near, example_prompts
from .updated_model import check_update

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
OUTPUT = 8
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
WEIGHTS = "model.safetensors"


class ModelFolder(Kit):
    """A random model of `transformers`, and its checkpoint: what kits of models share."""

    kind = "model"
    reference: ClassVar[Any] = None
    """A `transformers` model's class; None: the one that transformers has under `name`."""
    config: ClassVar[Mapping[str, Any]] = {}
    """Differences of the tiny configuration from `TINY`, and from an epsilon of `EPSILON`."""

    @classmethod
    def make_reference(cls) -> Any:
        """Create a random reference model: float32, eager attention, norms and biases not trivial,
        and matrices as large as `initializer_range` says, whether the class heeds it or not: where
        they are small, a model says nearly the same about all tokens, whatever its layers do."""
        import transformers

        kind = cls.reference or getattr(transformers, cls.name, None)
        if kind is None:
            pytest.skip(f"transformers has no {cls.name}: subclass the kit and set reference")
        config = cls.reference_config(kind)
        config._attn_implementation = "eager"
        torch.manual_seed(7)
        model = kind(config).float().eval()
        size = getattr(config, "initializer_range", None) or TINY["initializer_range"]
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dim() == 1:
                    parameter.add_((0.3 if "bias" in name else 0.1) * torch.randn_like(parameter))
                elif 0 < (own := float(parameter.std())) < size / 2:
                    parameter.mul_(size / own)
        return model

    @classmethod
    def reference_config(cls, kind: Any) -> Any:
        """Create the tiny configuration of a `transformers` class."""
        return kind.config_class(**{**tiny(kind.config_class), **cls.config})

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

    def changed(self, folder: Path, into: Path, tensors: dict[str, torch.Tensor]) -> Path:
        """Write the checkpoint with other tensors to a folder that is reused."""
        (into / "config.json").write_bytes((folder / "config.json").read_bytes())
        save_file(tensors, into / WEIGHTS, metadata={"format": "pt"})
        return into


class ModelKit(ModelFolder):
    """Subclass it in your tests, and set what is yours. `name` is the architecture as registered,
    and as config.json's `architectures` says."""

    tolerance: ClassVar[float] = 1e-3
    """Allowed deviation of float32 log-probabilities from the reference's."""
    invariance: ClassVar[float] = 2e-4
    """Allowed difference of float32 log-probabilities between two ways to batch the same tokens."""

    # -------------------------------------------------------------- what tests are made of

    @pytest.fixture
    def expected(self, reference_model: Any) -> Callable[[Sequence[int]], torch.Tensor]:
        """Return a function: tokens → the reference's log-probabilities, [tokens, vocab]
        float32."""
        return functools.partial(_score, reference_model)

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
        for slot, prompt in enumerate(example_prompts()):
            assert_near(model.run({slot: prompt})[slot], expected(prompt), self.tolerance)

    @pytest.mark.parametrize(
        "sizes",
        [[1] * 63, [62, 1], [1, 62], [7] * 9, [4, 4, 1, 30, 2, 16, 6]],
        ids=lambda sizes: "-".join(map(str, sizes[:7])),
    )
    def test_any_split_of_the_prompt_gives_the_same_logits(
        self, folder: Path, sizes: list[int]
    ) -> None:
        prompt = example_prompts()[3]
        assert sum(sizes) == len(prompt)
        model = self.paged(folder)
        whole = model.run({0: prompt})[0]
        parts, first = [], 0
        for size in sizes:
            parts.append(model.run({1: prompt[first : first + size]})[1])
            first += size
        assert_near(torch.cat(parts), whole, self.invariance)

    def test_what_else_is_in_the_batch_changes_nothing(self, folder: Path) -> None:
        """Rows start beside others, and beside rows that continue by one token."""
        prompts = example_prompts()
        model = self.paged(folder)
        alone = [(model.run({s: p})[s], model.run({s: [5]})[s]) for s, p in enumerate(prompts)]
        model = self.paged(folder)
        begun = model.run(dict(enumerate(prompts[:4])))
        mixed = model.run({0: [5], 1: [5], 2: [5], 3: [5], 4: prompts[4], 5: prompts[5]})
        ended = model.run({4: [5], 5: [5]})
        for slot, want in enumerate(alone):
            got = (begun, mixed) if slot < 4 else (mixed, ended)
            for have, wanted in zip(got, want, strict=True):
                assert_near(have[slot], wanted, self.invariance)

    def test_logits_of_some_rows_need_no_others(self, folder: Path) -> None:
        """`compute_logits` gets only the rows that sample, in any number."""
        model = self.paged(folder)
        hidden = model.hidden({0: example_prompts()[2]})
        with torch.inference_mode():
            every = model.logits(hidden)
            for rows in ([16], [3, 9], [9, 3, 3]):
                some = take(hidden, torch.tensor(rows, device=every.device))
                assert_near(model.logits(some), every[rows], self.invariance)

    # -------------------------------------------------------------- dtypes

    # -------------------------------------------------------------- adapters

    def test_adapters_change_layers_as_in_the_reference(
        self, folder: Path, reference_model: Any
    ) -> None:
        """Of all linear layers and experts, or they are refused by name; rows without an adapter in
        the same step are not changed."""
        check_adapters(self.paged(folder), reference_model, _score, self.tolerance)

    def test_other_weights_take_the_place_of_the_first(self, folder: Path) -> None:
        """In place, so that nothing which a layer derives of the old ones is left."""
        check_update(folder, self.plugins())

    def test_the_batch_changes_no_bit(self, folder: Path) -> None:
        """With operations and attention that are batch-invariant, unless the class says that it is
        not."""
        check_batch_invariance(folder, self.plugins())

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
        """Deviation from float32 is as small as that of the reference in the same dtype: of every
        token, or with experts of the nearest quarter of them. Where two experts are nearly equal,
        either may be chosen, and the token, and those that attend to it, come out otherwise."""
        try:
            model = self.paged(folder, dtype)
        except ConfigError as error:
            pytest.skip(f"{dtype} cannot be served here: {error}")
        # Routers may compute logits in float32.
        modules = (m for m in model.model.modules() if not isinstance(m, Router))
        kinds = {p.dtype for m in modules for p in m.parameters(recurse=False)}
        assert kinds == {DTYPES[dtype]}, "parameters are made in BuildContext.dtype"
        routed = any(isinstance(module, Router) for module in model.model.modules())
        prompt = example_prompts()[4]
        want = expected(prompt)

        def deviation(scores: torch.Tensor) -> float:
            by_token = (scores - want).abs().amax(-1)
            assert by_token.isfinite().all()
            return float(by_token.quantile(0.25) if routed else by_token.max())

        own_error = 0.0
        if dtype != "float32":
            own_error = deviation(_score(copy.deepcopy(reference_model).to(DTYPES[dtype]), prompt))
        got = model.run({0: prompt})[0].log_softmax(-1).cpu()
        assert deviation(got) <= self.tolerance + 3 * own_error

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
        prompts = example_prompts()

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
        first, second = example_prompts()[4:]

        async def ask() -> list[Any]:
            async with self.engine(folder, block_size=4) as engine:
                answers = [await _answer(engine, p) for p in (first, second, first)]
                return [*answers, engine.core.info.num_snapshots is not None]

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
        before = self.parameters(self.changed(folder, tmp_path, tensors))
        for name in _one_of_each_layer(tensors):
            changed = {**tensors, name: tensors[name] + 1.0}
            after = self.parameters(self.changed(folder, tmp_path, changed))
            moved = [key for key, value in after.items() if not torch.equal(value, before[key])]
            assert moved, f"{name} is read, and changes nothing"

    def test_a_missing_tensor_is_refused_by_name(self, folder: Path, tmp_path: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        for name in _one_of_each_layer(tensors):
            left = {key: value for key, value in tensors.items() if key != name}
            with pytest.raises(LoadError) as caught:
                self.parameters(self.changed(folder, tmp_path, left))
            assert name in str(caught.value)

    def test_a_tensor_that_nothing_uses_is_refused_by_name(
        self, folder: Path, tmp_path: Path
    ) -> None:
        tensors = load_file(folder / WEIGHTS)
        layered = next(name for name in sorted(tensors) if re.search(r"\.0\.", name))
        for name in ("nobody.weight", re.sub(r"\.0\.", ".77.", layered, count=1)):
            with pytest.raises(LoadError) as caught:
                self.parameters(self.changed(folder, tmp_path, {**tensors, name: torch.ones(3)}))
            assert name in str(caught.value)


def tiny(config_class: Any) -> dict[str, Any]:
    """Return the fields of a family's tiny configuration: those of `TINY` that it has, and epsilons
    that affect results. A field that it lacks would be stored and read back."""
    defaults = config_class()
    defaults.allow_global_per_layer_attribute_access = True
    fields = {name: value for name, value in TINY.items() if hasattr(defaults, name)}
    return fields | {name: EPSILON for name in EPSILONS if hasattr(defaults, name)}


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
    logits = model(torch.tensor([list(tokens)]), use_cache=False).logits
    scores: torch.Tensor = logits[0].float().log_softmax(-1)
    return scores


async def _answer(engine: AsyncEngine, prompt: list[int]) -> Any:
    params = SamplingParams(temperature=0.0, max_tokens=OUTPUT, ignore_eos=True, logprobs=1)
    async for output in engine.generate(prompt, params):
        last = output
    return last


def _one_of_each_layer(names: Iterable[str]) -> list[str]:
    """Return the first of the names that differ only in numbers."""
    first: dict[str, str] = {}
    for name in sorted(names):
        first.setdefault(re.sub(r"\d+", "#", name), name)
    return list(first.values())
