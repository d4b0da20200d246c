"""Classic rejection sampling: tokens are distributed as the target says, whatever drafts were drawn
from, and as many are accepted as both distributions share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from jackfield.core.sampling_params import SamplingParams
from jackfield.core.step import SlotStart
from jackfield.core.worker.sampling import row_chunks
from jackfield.core.worker.sampling.gumbel import TokenNoise
from jackfield.core.worker.sampling.rejection import DraftDistributions
from jackfield.core.worker.sampling.sampler import Sampler
from jackfield.core.worker.sampling.sampling_state import SamplingState

from sampling_bench import no_sync, oracle_filter, oracle_processed

VOCAB, ROWS, LENGTH = 13, 20_000, 5
PROMPT = [3, 4, 4, 7, 4]
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "top_k": {"top_k": 4},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.15},
    "bias": {"logit_bias": {2: 3.0, 5: -1.0}, "temperature": 1.3},
    "penalties": {"presence_penalty": 1.5, "repetition_penalty": 1.7},
    "all": {
        "top_k": 9,
        "top_p": 0.9,
        "frequency_penalty": 0.5,
        "allowed_token_ids": list(range(9)),
    },
}


def critical(freedom: int) -> float:
    """Chi-square that is exceeded once in a million, by Wilson and Hilferty."""
    share = 2 / (9 * freedom)
    return float(freedom * (1 - share + 4.753 * math.sqrt(share)) ** 3)


class Trial:
    """Many requests, alike but for their seeds, with one draft each."""

    def __init__(self, options: dict[str, Any]) -> None:
        torch.manual_seed(2)
        device = torch.device("cpu")
        history = torch.zeros(ROWS, 12, dtype=torch.int32)
        state = SamplingState(ROWS, VOCAB, device, history)
        self.params = SamplingParams(**{"temperature": 0.8, **options})
        for slot in range(ROWS):
            self.start = SlotStart(
                slot=slot, request_id=str(slot), token_ids=tuple(PROMPT), num_prompt_tokens=LENGTH,
                num_computed_tokens=0, params=self.params, seed=slot * 7919,
            )  # fmt: skip
            state.start(self.start)
        state.upload()
        self.state, self.sampler = state, Sampler(state)
        self.slots, self.lengths = torch.arange(ROWS), torch.full((ROWS,), LENGTH)
        self.target, self.draft = torch.randn(VOCAB), torch.randn(VOCAB)
        noise = TokenNoise(VOCAB, device)
        self.tables = DraftDistributions(ROWS, 2, noise, VOCAB, torch.float32, device)

    def probabilities(self) -> np.ndarray:
        """What the target samples from, in float64."""
        x = oracle_processed(self.target.double().numpy(), self.start, PROMPT)
        x = x / self.params.temperature
        x = np.where(oracle_filter(x, self.params)[0], x, -np.inf)
        weights: np.ndarray = np.exp(x - x.max())
        return weights / weights.sum()

    def draft_probabilities(self) -> np.ndarray:
        probs: np.ndarray = (self.draft.double() / self.params.temperature).softmax(-1).numpy()
        return probs

    def draw(self, drawn: bool = True) -> torch.Tensor:
        """Draw each row's draft; `drawn`: it stands."""
        logits = self.draft.expand(ROWS, -1)
        packed = self.state.packed.index_select(0, self.slots)
        tokens = self.tables.draw(logits, 1, self.slots, packed, self.lengths)
        drafts = torch.stack((torch.full_like(tokens, -1), tokens), dim=1)
        self.tables.keep(drafts, torch.full((ROWS,), 2 * drawn), self.slots)
        return tokens

    def sample(self, drafts: torch.Tensor) -> torch.Tensor:
        logits = self.target.expand(ROWS, -1).contiguous()
        given = self.tables.of(drafts.int(), self.slots, torch.ones_like(self.slots))
        with no_sync("cpu"):
            chosen, _ = self.sampler.sample_eagerly(
                logits, self.slots, self.slots.tolist(), self.lengths, None, given
            )
        assert torch.equal(self.state.token_history[:, LENGTH], chosen.clamp(min=0))
        return chosen

    def distance(self, chosen: torch.Tensor) -> tuple[float, float]:
        """Chi-square of the tokens, and what chance hardly exceeds."""
        probs = self.probabilities()
        seen = torch.bincount(chosen, minlength=VOCAB).numpy()
        assert not seen[probs == 0].any()
        expected = ROWS * probs[probs > 0]
        distance = float(((seen[probs > 0] - expected) ** 2 / expected).sum())
        return distance, critical(int((probs > 0).sum()) - 1)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_tokens_have_the_targets_distribution(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(row_chunks, "CHUNK_ELEMENTS", VOCAB * 6007)
    trial = Trial(options)
    drafts = trial.draw()
    drafted = torch.bincount(drafts, minlength=VOCAB).numpy() / ROWS
    assert np.abs(drafted - trial.draft_probabilities()).max() < 0.02
    chosen = trial.sample(drafts)
    distance, most = trial.distance(chosen)
    assert distance < most
    # As often as both agree: more often than a token that is sampled without regard to the draft.
    shared = float(np.minimum(trial.probabilities(), trial.draft_probabilities()).sum())
    assert float((chosen == drafts).float().mean()) == pytest.approx(shared, abs=0.02)
    if trial.params.has_penalties:
        counted = trial.state.counts[trial.slots, chosen.long()] & 0x7FFF
        assert bool((counted == 1).all())


def test_drafts_that_were_not_drawn_are_sampled_beside() -> None:
    """Such as those of a grammar, in whose place others were drawn."""
    trial = Trial({})
    drafts = trial.draw(drawn=False)
    chosen = trial.sample(drafts)
    distance, most = trial.distance(chosen)
    assert distance < most
    both = float((trial.probabilities() * trial.draft_probabilities()).sum())
    assert float((chosen == drafts).float().mean()) == pytest.approx(both, abs=0.02)


def test_greedy_rows_keep_the_most_probable_token() -> None:
    trial = Trial({"temperature": 0.0})
    drafts = trial.draw()
    assert bool((drafts == trial.draft.argmax()).all())
    assert bool((trial.sample(drafts) == trial.target.argmax()).all())


def test_rows_without_numbers_are_found() -> None:
    """NaN in a target's logits ends the request, whatever the draft was."""
    trial = Trial({})
    drafts = trial.draw()
    trial.target[5] = math.nan
    assert bool((trial.sample(drafts) == -1).all())


def _shared_noise(tables: DraftDistributions) -> None:
    noise = tables.noise
    tables.noise = lambda _, *more, **options: noise(None, *more, **options)  # type: ignore


def _other_drafts_distribution(tables: DraftDistributions) -> None:
    of = tables.of
    tables.of = lambda ids, slots, places: replace(  # type: ignore[method-assign]
        of(ids, slots, places), places=places - 1
    )


@pytest.mark.parametrize("plant", [_shared_noise, _other_drafts_distribution])
def test_a_planted_bug_is_found(plant: Callable[..., None]) -> None:
    """The test above can fail. Other engines have had both."""
    trial = Trial({})
    plant(trial.tables)
    distance, most = trial.distance(trial.sample(trial.draw()))
    assert distance > 1.5 * most
