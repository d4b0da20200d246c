"""A speculator that knows most of what comes, and engines without drafts and with them."""

from __future__ import annotations

import asyncio
import random
from typing import Any, ClassVar

import pytest
import torch
from rank_executor import Plugin as Ranks

from jackfield import AsyncEngine, EngineConfig, SamplingParams
from jackfield.core.hooks import hookimpl
from jackfield.core.protocols import Drafts, KnownTokens, LogitsProcessor, Speculator
from jackfield.core.registry import Provenance, load_plugins

from helpers import at_once

Asked = list[tuple[list[int], SamplingParams]]


class Knowing(Speculator):
    """Proposes what the engine without drafts gave, with a wrong token now and then, and fewer
    drafts than asked for."""

    sequences: ClassVar[list[list[int]]] = []
    """Prompts and outputs to come."""

    def __init__(self, setup: Any) -> None:
        self.setup = setup
        self.draw = random.Random(5)

    def propose(self, tokens: KnownTokens) -> Drafts:
        most, rows = self.setup.num_drafts, len(tokens.slots)
        token_ids = torch.zeros((rows, most), dtype=torch.int32)
        counts = torch.zeros(rows, dtype=torch.int32)
        for row, (slot, length) in enumerate(
            zip(tokens.slots.tolist(), tokens.lengths.tolist(), strict=True)
        ):
            known = tokens.history[slot, :length].tolist()
            fitting = [each for each in self.sequences if each[:length] == known]
            if not fitting:
                continue
            drafts = self.draw.choice(fitting)[length : length + most]
            if drafts and self.draw.random() < 0.4:
                wrong = self.draw.randrange(len(drafts))
                drafts[wrong] = self.draw.randrange(self.setup.vocab_size)
            if self.draw.random() < 0.3:
                drafts = drafts[: self.draw.randrange(len(drafts) + 1)]
            counts[row] = len(drafts)
            token_ids[row, : len(drafts)] = torch.tensor(drafts, dtype=torch.int32)
        return Drafts(token_ids, counts)


class Silent(Speculator):
    """Proposes nothing."""

    def __init__(self, setup: Any) -> None:
        self.num_drafts = setup.num_drafts

    def propose(self, tokens: KnownTokens) -> Drafts:
        rows = len(tokens.slots)
        return Drafts(
            torch.zeros((rows, self.num_drafts), dtype=torch.int32),
            torch.zeros(rows, dtype=torch.int32),
        )


class Steered(LogitsProcessor):
    """Adds to the tokens that follow the last one in order: by its request and tokens alone."""

    parameters = frozenset({"steered"})
    stateless = True

    def __init__(self, setup: Any) -> None:
        self.history, self.amounts = setup.history, torch.zeros(setup.num_slots)

    def start(self, slot: int, request: Any) -> bool:
        amount = (request.params.extra_args or {}).get(next(iter(self.parameters)))
        self.amounts[slot] = amount or 0.0
        return amount is not None

    def apply(self, logits: torch.Tensor, rows: Any) -> torch.Tensor:
        last = self.history[rows.device_slots, rows.lengths - 1].long()
        follows = (last[:, None] + torch.arange(1, 4)) % logits.shape[1]
        amounts = self.amounts[rows.device_slots]
        return logits.scatter_add(1, follows, amounts[:, None].expand(-1, 3).contiguous())


class Fading(Steered):
    """Adds less at each call."""

    parameters = frozenset({"fading"})
    stateless = False

    def apply(self, logits: torch.Tensor, rows: Any) -> torch.Tensor:
        assert len(set(rows.slots)) == len(rows.slots)
        self.amounts[rows.device_slots] *= 0.9
        return super().apply(logits, rows)


class Late(Steered):
    """Changes no greedy token."""

    parameters = frozenset({"late"})
    argmax_invariant = True

    def apply(self, logits: torch.Tensor, rows: Any) -> torch.Tensor:
        best = logits.amax(dim=1, keepdim=True)
        return torch.minimum(super().apply(logits, rows), best)


class Plugin:
    jackfield_api = 3

    @hookimpl
    def register_logits_processors(self, registry: Any) -> None:
        registry.add("steered", Steered)
        registry.add("fading", Fading)
        registry.add("late", Late)

    @hookimpl
    def register_speculators(self, registry: Any) -> None:
        registry.add("knowing", Knowing)
        registry.add("silent", Silent)


def knowing_plugins() -> Any:
    plugins = load_plugins()
    plugins.add_plugin(Plugin(), Provenance("tests", "0", "speculators"))
    return plugins


async def answers(engine: AsyncEngine, asked: Asked) -> list[list[Any]]:
    """Each request's completions: tokens, text, why they ended, log-probabilities of the tokens and
    of the prompt; or its error."""

    async def run_one(prompt: list[int], params: SamplingParams) -> Any:
        async for out in engine.generate(prompt, params):
            last = out
        if last.error is not None:
            return str(last.error)
        return [
            (list(c.token_ids), c.text, c.finish_reason, c.stop_reason, scores(c.logprobs))
            for c in last.outputs
        ] + [scores(last.prompt_logprobs)]

    return await at_once(engine, *(run_one(*each) for each in asked))


def scores(positions: Any) -> Any:
    """Sums of several positions at once may differ in the last bits."""
    return [
        {token: pytest.approx(p.logprob, abs=1e-3) for token, p in (position or {}).items()}
        for position in positions or []
    ]


class Pair:
    """One engine without drafts and one with them, which stay open."""

    def __init__(
        self,
        config: dict[str, Any],
        num_drafts: int = 4,
        decoder_prompt: list[int] | None = None,
        method: str = "knowing",
    ) -> None:
        """decoder_prompt: of a model with an encoder."""
        self._decoder_prompt = decoder_prompt
        speculative = {
            "method": method, "num_speculative_tokens": num_drafts, "adaptive_width": False,
        }  # fmt: skip
        plugins = knowing_plugins()
        plugins.add_plugin(Ranks(), Provenance("tests", "0", "rank_threads"))
        self.plain = AsyncEngine(EngineConfig(**config), plugins=plugins)
        self.drafted = AsyncEngine(
            EngineConfig(**config, speculative_config=speculative), plugins=plugins
        )

    async def __aenter__(self) -> Pair:
        await self.plain.__aenter__()
        await self.drafted.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self.drafted.__aexit__(*error)
        await self.plain.__aexit__(*error)

    async def compare(self, asked: Asked) -> None:
        """Serve all requests at once, without drafts and with them: the answers are the same."""
        plain = await answers(self.plain, asked)
        Knowing.sequences = [
            (self._decoder_prompt or prompt) + choice[0]
            for (prompt, _), choices in zip(asked, plain, strict=True)
            if isinstance(choices, list)
            for choice in choices[:-1]
        ]
        drafted = await answers(self.drafted, asked)
        for (_, params), one, other in zip(asked, plain, drafted, strict=True):
            assert other == one, f"{params}\n{other}\n{one}"
        await asyncio.sleep(0)
        self.drafted.core.check_idle()  # type: ignore[attr-defined]
