"""`SpeculatorKit`: whether a speculator proposes tokens, and lets no tenant's become another's.

    class TestMine(SpeculatorKit):
        name = "mine"                               # as registered
        own_options = {"lookback": 3}               # if it needs any

Its target is the embedded model. A speculator that reads last hidden states gets random ones; one
whose model attends, or that reads inputs of layers, is judged by an engine alone. The kit does not
judge how many drafts a model would say.
"""

from __future__ import annotations

import asyncio
import functools
import logging
from typing import Any, ClassVar

import msgspec
import pytest
import torch
from torch import nn

from ...core.config import EngineConfig
from ...core.engine.async_engine import AsyncEngine
from ...core.loading.build import build_model
from ...core.loading.checkpoint_folder import checkpoint_folder
from ...core.loading.json_file import read_object
from ...core.loading.model_config import ModelConfig, resolve_model_config
from ...core.nn.context import ForwardContext
from ...core.nn.operations import Operations
from ...core.protocols.speculators import (
    Drafts,
    DraftSite,
    KnownTokens,
    RequestText,
    Speculator,
    SpeculatorNeeds,
    SpeculatorSetup,
)
from ...core.sampling_params import OutputKind, SamplingParams
from ...core.worker.selection import cache_layers
from .kit import Kit
from .tape import recorded

VOCAB_SIZE = 40
NUM_SLOTS = 6
MAX_MODEL_LEN = 64
HIDDEN_SIZE = 192
"""The embedded model's."""


class SpeculatorKit(Kit):
    """Subclass it, and set the name."""

    kind = "speculator"
    own_options: ClassVar[dict[str, Any]] = {}
    """Keys of `speculative_config` besides `method` and `num_speculative_tokens`; with `model`, the
    folder of its checkpoint."""

    @classmethod
    @functools.cache
    def site(cls, num_drafts: int) -> DraftSite:
        """Return what the speculator's needs may depend on."""
        speculator_class, plugins = cls.registered(), cls.plugins()
        config, operations = EngineConfig(device="cpu", dtype="float32"), Operations()
        target_config = resolve_model_config(config, plugins)

        def load(model_config: ModelConfig, architecture: Any = None) -> nn.Module:
            return build_model(
                plugins, config, model_config, torch.device("cpu"), operations,
                architecture=architecture,
            )  # fmt: skip

        options = dict(cls.own_options)
        draft_config = None if speculator_class.checkpoint == "none" else target_config
        if (model := options.pop("model", None)) is not None:
            raw = read_object(checkpoint_folder(str(model)) / "config.json")
            overrides = dict(speculator_class.overrides(raw))
            own = msgspec.structs.replace(config, model=str(model), hf_overrides=overrides)
            draft_config = resolve_model_config(own, plugins)
        return DraftSite(
            options=msgspec.convert(options, speculator_class.options),
            num_drafts=num_drafts,
            target=load(target_config),
            target_config=target_config,
            draft_config=draft_config,
            load=load,
        )

    def make(self, num_drafts: int = 4) -> Speculator:
        """Create the speculator as the worker does. Skips the test if it cannot be called alone."""
        speculator_class = self.registered()
        options = {name: value for name, value in self.own_options.items() if name != "model"}
        needs = SpeculatorNeeds()
        if speculator_class.needs.__func__ is not Speculator.needs.__func__:  # type: ignore[attr-defined]
            needs = speculator_class.needs(self.site(num_drafts))
        if needs.taps or (needs.model is not None and cache_layers(needs.model)):
            pytest.skip("it is called by an engine alone")
        setup = SpeculatorSetup(
            num_drafts=num_drafts,
            options=msgspec.convert(options, speculator_class.options),
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            num_slots=NUM_SLOTS,
            device=torch.device("cpu"),
            hidden_size=HIDDEN_SIZE,
            model=needs.model,
        )
        speculator: Speculator = speculator_class(setup)
        return speculator

    def tokens(self, seed: int, slots: list[int], lengths: list[int]) -> KnownTokens:
        """Return rows of few different tokens, so that they repeat themselves, each with a hidden
        state."""
        draw = torch.Generator().manual_seed(seed)
        kinds = 2 + seed % 4
        shape = (NUM_SLOTS + 1, MAX_MODEL_LEN + 9)
        history = torch.randint(0, kinds, shape, generator=draw, dtype=torch.int32)
        hidden = torch.randn(len(slots), HIDDEN_SIZE, generator=draw)
        return KnownTokens(
            history * (VOCAB_SIZE // kinds), torch.tensor(slots), torch.tensor(lengths), hidden,
            LikeliestRows(torch.tensor(lengths)),
        )  # fmt: skip

    @staticmethod
    def begin(speculator: Speculator, tokens: KnownTokens, sharing: int = 1) -> None:
        """Start a request for each row, whose text is its prompt."""
        for slot, length in zip(tokens.slots.tolist(), tokens.lengths.tolist(), strict=True):
            speculator.start(RequestText(slot, length, length, sharing))

    @staticmethod
    def end(speculator: Speculator, tokens: KnownTokens) -> None:
        """Release each row's slot; the host's bound of its tokens may be too high."""
        for row, (slot, length) in enumerate(
            zip(tokens.slots.tolist(), tokens.lengths.tolist(), strict=True)
        ):
            own = KnownTokens(tokens.history, tokens.slots[row:][:1], tokens.lengths[row:][:1])
            speculator.release(own, slot, length + row % 2)

    def asked(self, speculator: Speculator, tokens: KnownTokens, sharing: int = 1) -> Drafts:
        """Return drafts for requests that have just begun."""
        self.begin(speculator, tokens, sharing)
        return speculator.propose(tokens)

    @staticmethod
    def kept(drafts: Drafts) -> list[list[int]]:
        """Return the drafts of each row."""
        rows = zip(drafts.token_ids.tolist(), drafts.counts.tolist(), strict=True)
        return [ids[:count] for ids, count in rows]

    @pytest.mark.parametrize("num_drafts", [1, 3, 8])
    def test_drafts_are_tokens_of_the_vocabulary(self, num_drafts: int) -> None:
        """Of rows of any length, from one token to as many as there may be."""
        speculator = self.make(num_drafts)
        for seed in range(6):
            lengths = [1, MAX_MODEL_LEN, 2, 17 + seed, 40]
            drafts = self.asked(speculator, self.tokens(seed, [3, 0, 5, 1, 2], lengths))
            assert drafts.token_ids.shape == (5, num_drafts)
            assert drafts.counts.shape == (5,)
            for part in drafts:
                assert part.dtype in (torch.int32, torch.int64)
            assert all(0 <= count <= num_drafts for count in drafts.counts.tolist())
            for row in self.kept(drafts):
                assert all(0 <= token < VOCAB_SIZE for token in row)

    def test_tokens_are_read_and_not_changed(self) -> None:
        speculator = self.make()
        tokens = self.tokens(1, [0, 2, 4], [30, 12, MAX_MODEL_LEN])
        parts = [part for part in tokens if isinstance(part, torch.Tensor)]
        before = [part.clone() for part in parts]
        self.asked(speculator, tokens)
        self.end(speculator, tokens)
        assert all(map(torch.equal, parts, before))

    def test_drafts_depend_on_the_tokens_of_their_row_alone(self) -> None:
        """And on its hidden state; not on what is behind them in the history, on other rows, the
        slot, or earlier calls for requests without an output."""
        speculator = self.make()
        for seed in range(8):
            lengths = [9 + seed, 50, 33, 20]
            tokens = self.tokens(seed, [0, 1, 4, 2], lengths)
            together = self.kept(self.asked(speculator, tokens))
            self.end(speculator, tokens)
            for row, length in enumerate(lengths):
                own = tokens.history[tokens.slots[row], :length]
                history = (tokens.history + 1) % VOCAB_SIZE
                slot = (int(tokens.slots[row]) + 3) % NUM_SLOTS
                history[slot, :length] = own
                assert tokens.hidden is not None, "rows have a state each"
                alone = KnownTokens(
                    history, torch.tensor([slot]), torch.tensor([length]),
                    tokens.hidden[row : row + 1], LikeliestRows(torch.tensor([length])),
                )  # fmt: skip
                assert self.kept(self.asked(speculator, alone)) == [together[row]]
                self.end(speculator, alone)
                # Some speculators hand out a buffer, which the call before has filled.
                assert self.kept(self.asked(self.make(), alone)) == [together[row]]

    def test_outputs_of_one_tenant_are_no_drafts_for_another(self) -> None:
        """Whatever was served before, another tenant gets the drafts that it would get first."""
        speculator = self.make()
        for seed in range(4):
            ours = self.tokens(seed, [0, 1, 4], [40, 50, 33])
            self.begin(speculator, ours._replace(lengths=torch.tensor([9, 2, 20])), sharing=7)
            speculator.propose(ours)
            self.end(speculator, ours)
            theirs = self.tokens(seed, [2, 4, 0], [40, 50, 33])
            theirs.history[theirs.slots] = ours.history[ours.slots]
            theirs = theirs._replace(lengths=theirs.lengths - 4)
            known = self.kept(self.asked(speculator, theirs, sharing=8))
            assert known == self.kept(self.asked(self.make(), theirs, sharing=8))
            self.end(speculator, theirs)

    def test_recorded_calls_propose_what_plain_ones_do(self) -> None:
        """A call that is noted once, and done again on other tokens of the same rows."""
        speculator = self.make()
        if not self.recorded(speculator):
            pytest.skip("it is not recorded")
        tokens, others = (self.tokens(seed, [0, 1, 4], [40, 50, 33]) for seed in (1, 2))
        assert tokens.hidden is not None and others.hidden is not None, "rows have a state each"
        drafts: list[Drafts] = []
        replay = recorded(lambda: drafts.append(speculator.propose(tokens)))
        tokens.history.copy_(others.history)
        tokens.hidden.copy_(others.hidden)
        replay()
        assert self.kept(drafts[0]) == self.kept(self.make().propose(others))

    @staticmethod
    def recorded(speculator: Speculator) -> bool:
        """Return whether the engine records its calls on a GPU."""
        needs = type(speculator).needs.__func__ is not Speculator.needs.__func__  # type: ignore[attr-defined]
        return speculator.recordable and needs

    def test_an_engine_serves_the_same_tokens_with_it(self) -> None:
        """Greedy and sampled; and it does not fail, which an engine would outlive."""
        prompts = [[7, 8, 9, 10] * 4, [30 + number for number in range(21)], [5] * 9]
        params = SamplingParams(
            temperature=0.0, max_tokens=24, ignore_eos=True, output_kind=OutputKind.FINAL_ONLY
        )
        sampled = msgspec.structs.replace(params, temperature=0.8, seed=3)

        async def serve(config: dict[str, Any] | None) -> list[list[int]]:
            async def generate(prompt: list[int], params: SamplingParams) -> list[int]:
                outputs = [output async for output in engine.generate(prompt, params)]
                assert outputs[-1].error is None, outputs[-1].error
                return outputs[-1].outputs[0].token_ids

            engine_config = EngineConfig(
                device="cpu", dtype="float32", speculative_config=config,  # type: ignore[arg-type]
                block_size=4, max_model_len=64, max_num_seqs=4, num_gpu_blocks_override=80,
            )  # fmt: skip
            async with AsyncEngine(engine_config, plugins=self.plugins()) as engine:
                calls = [generate(prompt, each) for prompt in prompts for each in (params, sampled)]
                return list(await asyncio.gather(*calls))

        async def compare() -> None:
            method = {"method": self.name, "num_speculative_tokens": 4, **self.own_options}
            assert await serve(method) == await serve(None)

        errors = _Errors(logging.ERROR)
        logger = logging.getLogger("jackfield.worker")
        logger.addHandler(errors)
        try:
            asyncio.run(compare())
        finally:
            logger.removeHandler(errors)
        assert not errors.messages, errors.messages


class LikeliestRows:
    """`DraftRows` of speculators whose model does not attend; the likeliest token is chosen."""

    def __init__(self, lengths: torch.Tensor) -> None:
        self._lengths = lengths

    def positions(self, number: int) -> torch.Tensor:
        return self._lengths - 1 + number

    def context(self, number: int) -> ForwardContext:
        raise NotImplementedError("no layer of its model attends")

    def choose(self, logits: torch.Tensor, number: int) -> torch.Tensor:
        return logits.argmax(dim=-1)


class _Errors(logging.Handler):
    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(self.format(record))
