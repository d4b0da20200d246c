"""The kit of speculators: those in the box pass it, and planted bugs do not."""

from __future__ import annotations

import copy
from typing import Any, ClassVar, cast

import torch
from mutants import Mutant, mutant_tests, plugin_of, subclass

from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.core.protocols import (
    Drafts,
    DraftSite,
    KnownTokens,
    Speculator,
    SpeculatorNeeds,
    SpeculatorSetup,
)
from jackfield.plugins.conformance.speculators import SpeculatorKit
from jackfield.plugins.speculators.ngram import Ngram
from jackfield.plugins.speculators.suffix import Suffix


class TestNgram(SpeculatorKit):
    name = "ngram"
    own_options = {"prompt_lookup_max": 3, "prompt_lookup_min": 1}


class TestSuffix(SpeculatorKit):
    name = "suffix"
    own_options = {"suffix_decoding_max_cached_requests": 9}


class Further(Speculator):
    """Reads hidden states: what the target's head finds likeliest now is likely soon, too."""

    @classmethod
    def needs(cls, site: DraftSite) -> SpeculatorNeeds:
        target: Any = site.target
        return SpeculatorNeeds(model=copy.deepcopy(target.output_embeddings), hidden=True)

    def __init__(self, setup: SpeculatorSetup) -> None:
        self.setup, self.head = setup, cast(Any, setup.model)

    def propose(self, tokens: KnownTokens) -> Drafts:
        logits = self.head.logits(tokens.hidden)[:, : self.setup.vocab_size]
        likeliest = logits.topk(self.setup.num_drafts).indices
        return Drafts(likeliest, torch.full_like(tokens.lengths, self.setup.num_drafts))


class TestFurther(SpeculatorKit):
    name = "further"
    plugin = plugin_of("speculator", "further", Further)


class TestDraftModel(SpeculatorKit):
    """The target itself, in an engine."""

    name = "draft_model"
    own_options = {"model": str(EMBEDDED_MODEL)}


class Kit(SpeculatorKit):
    name = "subject"
    own_options: ClassVar[dict[str, Any]] = {}
    plugin = plugin_of("speculator", "subject", Ngram)


VOCABULARY = "test_drafts_are_tokens_of_the_vocabulary"
UNCHANGED = "test_tokens_are_read_and_not_changed"
ALONE = "test_drafts_depend_on_the_tokens_of_their_row_alone"
TENANTS = "test_outputs_of_one_tenant_are_no_drafts_for_another"
RECORDED = "test_recorded_calls_propose_what_plain_ones_do"
ENGINE = "test_an_engine_serves_the_same_tokens_with_it"


def one_more(self: Any, tokens: Any) -> Drafts:
    drafts = Ngram.propose(self, tokens)
    return drafts._replace(counts=drafts.counts + 1)


def beyond(self: Any, tokens: Any) -> Drafts:
    drafts = Ngram.propose(self, tokens)
    return drafts._replace(token_ids=drafts.token_ids + 1_000_000)


def floats(self: Any, tokens: Any) -> Drafts:
    drafts = Ngram.propose(self, tokens)
    return drafts._replace(counts=drafts.counts.float())


def one_column(self: Any, tokens: Any) -> Drafts:
    drafts = Ngram.propose(self, tokens)
    return Drafts(drafts.token_ids[:, :1].repeat(1, 5), drafts.counts)


def written(self: Any, tokens: Any) -> Drafts:
    drafts = Ngram.propose(self, tokens)
    tokens.history[tokens.slots, tokens.lengths] = drafts.token_ids[:, 0].int()
    return drafts


def lengths_counted_up(self: Any, tokens: Any) -> Drafts:
    tokens.lengths.add_(1)
    return Ngram.propose(self, tokens)


def zeroed_states(self: Any, tokens: Any) -> Drafts:
    if tokens.hidden is not None:
        tokens.hidden.zero_()
    return Ngram.propose(self, tokens)


def from_the_first_state(self: Any, tokens: Any) -> Drafts:
    drafts = Ngram.propose(self, tokens)
    if tokens.hidden is None:
        return drafts
    token = (tokens.hidden[:1].abs().sum() * 1000).long() % 40
    return Drafts(token.expand(drafts.token_ids.shape), torch.ones_like(drafts.counts))


def from_behind(self: Any, tokens: Any) -> Drafts:
    drafts = Ngram.propose(self, tokens)
    behind = tokens.history[tokens.slots, tokens.lengths]
    return drafts._replace(token_ids=drafts.token_ids.clone().fill_(0) + behind[:, None])


def from_the_slot(self: Any, tokens: Any) -> Drafts:
    drafts = Ngram.propose(self, tokens)
    return drafts._replace(token_ids=tokens.slots[:, None].expand(drafts.token_ids.shape))


def from_the_first_row(self: Any, tokens: Any) -> Drafts:
    drafts = Ngram.propose(self, tokens)
    return drafts._replace(token_ids=drafts.token_ids[:1].expand(drafts.token_ids.shape))


class Remembers(Ngram):
    calls = 0

    def propose(self, tokens: Any) -> Drafts:
        self.calls += 1
        drafts = super().propose(tokens)
        return drafts._replace(counts=drafts.counts.clamp(max=self.calls % 4))


class FailsInAnEngine(Ngram):
    """At the first request with a long output."""

    def propose(self, tokens: Any) -> Drafts:
        if tokens.history.shape[1] == 64 + 1 + 4 and int(tokens.lengths.max()) > 30:
            raise RuntimeError("on purpose")
        return super().propose(tokens)


def unbounded(self: Any, tokens: Any) -> Drafts:
    shape = (len(tokens.slots), self._num_drafts)
    return Drafts(torch.full(shape, 39), torch.full(shape[:1], 9))


class KeepsTheFirst(Ngram):
    """Proposes for all what it proposed for the first step's rows."""

    first: Drafts | None = None

    def propose(self, tokens: Any) -> Drafts:
        drafts = super().propose(tokens)
        if self.first is None:
            self.first = Drafts(drafts.token_ids.clone(), drafts.counts.clone())
        alike = self.first.token_ids.shape == drafts.token_ids.shape
        return self.first if alike else drafts


def rows_for_slots(self: Any, tokens: Any) -> Drafts:
    """Its rows are read where the row is, not where the slot is."""
    rows = torch.arange(len(tokens.slots))
    return Ngram.propose(self, tokens._replace(slots=rows))


class ReadsNumbers(Further):
    """Waits for the device."""

    def propose(self, tokens: Any) -> Drafts:
        drafts = super().propose(tokens)
        return drafts._replace(counts=drafts.counts.clamp(max=int(tokens.lengths.max())))


class ReadsTheHost(Further):
    """Notes one call's numbers, which graphs do not see."""

    def propose(self, tokens: Any) -> Drafts:
        first = tokens.history.numpy()[tokens.slots.numpy(), 0]
        counts = torch.from_numpy(first % 3).clamp(max=self.setup.num_drafts)
        return Drafts(super().propose(tokens).token_ids, counts)


class Shares(Suffix):
    """All requests alike."""

    def start(self, request: Any) -> None:
        super().start(request._replace(sharing=0))


MUTANTS = {
    "shares what it must not": Mutant(Shares, (TENANTS,)),
    "keeps the first rows": Mutant(KeepsTheFirst, (ALONE, TENANTS)),
    "rows for slots": Mutant(subclass(Ngram, propose=rows_for_slots), (ALONE,)),
    "a count above the number of drafts": Mutant(subclass(Ngram, propose=unbounded), (VOCABULARY,)),
    "counts the newest token": Mutant(subclass(Ngram, propose=one_more), (VOCABULARY, ALONE)),
    "ids outside the vocabulary": Mutant(subclass(Ngram, propose=beyond), (VOCABULARY,)),
    "counts are floats": Mutant(subclass(Ngram, propose=floats), (VOCABULARY, ALONE, TENANTS)),
    "a wrong number of columns": Mutant(subclass(Ngram, propose=one_column), (VOCABULARY, ENGINE)),
    "writes into the history": Mutant(
        subclass(Ngram, propose=written), (UNCHANGED,), perhaps=(ALONE,)
    ),
    "changes the hidden states": Mutant(
        subclass(Ngram, propose=zeroed_states), (UNCHANGED,), perhaps=(ALONE,)
    ),
    "depends on another row's hidden state": Mutant(
        subclass(Ngram, propose=from_the_first_state), (ALONE,)
    ),
    "changes the lengths": Mutant(
        subclass(Ngram, propose=lengths_counted_up),
        (UNCHANGED, ALONE, TENANTS),
        perhaps=(VOCABULARY,),
    ),
    "reads what is behind the tokens": Mutant(subclass(Ngram, propose=from_behind), (ALONE,)),
    "depends on the slot": Mutant(subclass(Ngram, propose=from_the_slot), (ALONE,)),
    "depends on another row": Mutant(subclass(Ngram, propose=from_the_first_row), (ALONE,)),
    "depends on calls before": Mutant(Remembers, (ALONE, TENANTS)),
    "waits for the device": Mutant(ReadsNumbers, (RECORDED,)),
    "reads the host": Mutant(ReadsTheHost, (RECORDED,)),
    "fails while it serves": Mutant(FailsInAnEngine, (ENGINE,)),
}

TestMutants = mutant_tests(Kit, MUTANTS)
