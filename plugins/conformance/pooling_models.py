"""`PoolingModelKit`: a pooled architecture against its `transformers` class.

    class TestMine(PoolingModelKit):
        name = "MineModel"                          # as registered
        reference = transformers.MineModel          # default: transformers' own of that name

An encoder or decoder whose states become vectors, or a classifier with `classify`; on a tiny random
checkpoint, through the whole engine.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file

from ...core.config import EngineConfig
from ...core.engine.async_engine import AsyncEngine
from ...core.errors import ConfigError, LoadError
from ...core.pooling_params import PoolingParams
from .models import DTYPES, WEIGHTS, ModelFolder
from .paged_model import LONGEST, example_prompts

NUM_LABELS = 3


class PoolingModelKit(ModelFolder):
    """Subclass it in your tests, and set what is yours. `name` is the architecture as registered,
    and as config.json's `architectures` says."""

    config: ClassVar[Mapping[str, Any]] = {}
    """Differences of the tiny configuration from `TINY`, and from an epsilon of `EPSILON`."""
    tolerance: ClassVar[float] = 2e-4
    """Allowed deviation of float32 numbers from the reference's, beside the largest of them."""

    @property
    def classifies(self) -> bool:
        """Whether it is a classifier."""
        return hasattr(self.registered(), "classify")

    @classmethod
    def reference_config(cls, kind: Any) -> Any:
        """Create the tiny configuration: with labels for a classifier."""
        config = super().reference_config(kind)
        if hasattr(cls.registered(), "classify"):
            config.num_labels = NUM_LABELS
        return config

    def numbers(self, model: Any, tokens: Sequence[int]) -> torch.Tensor:
        """Return what a `transformers` model makes of a prompt, float32: a classifier's logits
        [num_labels], of one of tokens [num_tokens, num_labels], else the states of all tokens
        [num_tokens, hidden_size]."""
        with torch.no_grad():
            output = model(torch.tensor([list(tokens)]))
        states = output.logits if self.classifies else output.last_hidden_state
        numbers: torch.Tensor = states[0].float()
        return numbers

    def encode(
        self, folder: Path, rounds: Sequence[Sequence[list[int]]], **options: Any
    ) -> list[list[torch.Tensor]]:
        """Return what one engine makes of each prompt, those of a round at once: as `numbers`."""
        per_token = getattr(self.registered(), "classifies_tokens", False)
        task: Any = "token_classify" if per_token else "classify"
        task = task if self.classifies else "token_embed"
        params = PoolingParams(task=task, normalize=None if self.classifies else False,
                               activation=False if self.classifies else None)  # fmt: skip
        settings: dict[str, Any] = {
            "dtype": "float32", "skip_tokenizer_init": True, "runner": "pooling",
            "max_model_len": LONGEST, "max_num_seqs": 8, "num_gpu_blocks_override": 256, **options,
        }  # fmt: skip

        async def run() -> list[list[torch.Tensor]]:
            config = EngineConfig(model=str(folder), **settings)
            async with AsyncEngine(config, plugins=self.plugins()) as engine:
                return [
                    [
                        torch.from_numpy(output.outputs.data.copy())
                        for output in await asyncio.gather(
                            *(engine.encode(prompt, params) for prompt in prompts)
                        )
                    ]
                    for prompts in rounds
                ]

        return asyncio.run(run())

    def check(self, got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
        """Check a deviation, relative to the largest number."""
        assert got.shape == want.shape
        assert float((got - want).abs().max()) <= bound * max(1.0, float(want.abs().max()))

    # -------------------------------------------------------------- numbers

    def test_numbers_equal_the_reference(self, folder: Path, reference_model: Any) -> None:
        """All prompts in one batch."""
        prompts = example_prompts()
        (got,) = self.encode(folder, [prompts])
        for prompt, numbers in zip(prompts, got, strict=True):
            self.check(numbers, self.numbers(reference_model, prompt), self.tolerance)

    def test_what_else_is_in_the_batch_changes_nothing(self, folder: Path) -> None:
        """Nor what was there before: alone, all at once in another order, and alone again."""
        prompts = example_prompts()
        alone = [[prompt] for prompt in prompts]
        rounds = self.encode(folder, [*alone, prompts[::-1], *alone])
        first, together = [r[0] for r in rounds[: len(prompts)]], rounds[len(prompts)][::-1]
        again = [r[0] for r in rounds[len(prompts) + 1 :]]
        for want, beside, after in zip(first, together, again, strict=True):
            self.check(beside, want, self.tolerance)
            self.check(after, want, self.tolerance)

    def test_prompts_in_chunks_give_the_same(self, folder: Path) -> None:
        """Of a decoder, whose prompts may be computed in several steps."""
        if not getattr(self.registered(), "causal", True):
            pytest.skip("an encoder: each prompt runs whole")
        prompts = example_prompts()
        (whole,) = self.encode(folder, [prompts])
        (parts,) = self.encode(folder, [prompts], max_num_batched_tokens=16, block_size=4)
        for got, want in zip(parts, whole, strict=True):
            self.check(got, want, self.tolerance)

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_every_dtype_is_as_near_as_the_reference(
        self, folder: Path, reference_model: Any, dtype: str
    ) -> None:
        prompts = example_prompts()[2:5]
        try:
            (got,) = self.encode(folder, [prompts], dtype=dtype)
        except ConfigError as error:
            pytest.skip(f"{dtype} cannot be served here: {error}")
        half = copy.deepcopy(reference_model).to(DTYPES[dtype])
        wants = [self.numbers(reference_model, prompt) for prompt in prompts]
        pairs = zip(prompts, wants, strict=True)
        own = max(float((self.numbers(half, prompt) - want).abs().max()) for prompt, want in pairs)
        for numbers, want in zip(got, wants, strict=True):
            assert float((numbers - want).abs().max()) <= self.tolerance + 3 * own

    def test_a_whole_vector_is_pooled_from_the_states(self, folder: Path) -> None:
        """By the type that is asked for, at the length 1."""
        if self.classifies:
            pytest.skip("a classifier")
        prompts = example_prompts()
        (states,) = self.encode(folder, [prompts])
        pools: dict[Any, Any] = {"CLS": lambda s: s[0], "LAST": lambda s: s[-1],
                                 "MEAN": lambda s: s.mean(0)}  # fmt: skip
        for kind, pool in pools.items():
            config = EngineConfig(
                model=str(folder), dtype="float32", skip_tokenizer_init=True, runner="pooling",
                max_model_len=LONGEST, max_num_seqs=8, num_gpu_blocks_override=256,
                pooler_config={"pooling_type": kind},
            )  # fmt: skip

            async def run(config: EngineConfig = config) -> list[Any]:
                async with AsyncEngine(config, plugins=self.plugins()) as engine:
                    params = PoolingParams(task="embed", normalize=True)
                    return [(await engine.encode(prompt, params)).outputs for prompt in prompts]

            for output, own in zip(asyncio.run(run()), states, strict=True):
                want = torch.nn.functional.normalize(pool(own), dim=0)
                self.check(torch.from_numpy(output.data.copy()), want, self.tolerance)

    # -------------------------------------------------------------- weights

    def test_tensors_that_are_missing_or_unknown_are_refused(
        self, folder: Path, tmp_path: Path
    ) -> None:
        """By name; a missing one by its parameter's, which the family may have renamed."""
        tensors = load_file(folder / WEIGHTS)
        layered = [name for name in sorted(tensors) if ".0." in name]
        assert layered, "no name of a tensor has a layer's number"
        missing = {name: value for name, value in tensors.items() if name != layered[-1]}
        unknown = {**tensors, "nobody.weight": torch.ones(3)}
        for name, changed in (("missing", missing), ("nobody.weight", unknown)):
            with pytest.raises(LoadError) as caught:
                self.encode(self.changed(folder, tmp_path, changed), [[[5, 6]]])
            assert name in str(caught.value)
