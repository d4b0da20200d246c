"""Speculative decoding: drafts in plans, and what became of them."""

from __future__ import annotations

import msgspec

from ..step import PartPlan

NAME = "speculation"


class Rejection(msgspec.Struct, frozen=True, gc=False):
    """Drafts of earlier plans that were not accepted: the slot has so many tokens less than these
    plans say. The device knows already; the host's bound of the slot's length falls."""

    slot: int
    num_tokens: int


class DraftStart(msgspec.Struct, frozen=True, gc=False):
    """What the speculator may know of a request that takes a slot."""

    sharing: int
    """As in `RequestText`: requests with the same number may learn from each other's text."""
    prediction: tuple[int, ...] = ()
    """Tokens that the caller expects in the output."""


class DraftPlan(PartPlan, frozen=True):
    """Drafts of a plan's rows."""

    num_drafts: tuple[int, ...] = ()
    """[num_rows] The last so many of a row's tokens are drafts, which the device has after the
    slot's known tokens: the row samples at each of them and before the first, and keeps its tokens
    up to the first that is not the draft. Empty: no row has any."""
    rejections: tuple[Rejection, ...] = ()
    rests: bool | None = None
    """Whether nothing is proposed from this step on, until another plan says so; None: as before.
    Rows of a plan that begins to rest, or ends it, have no drafts."""
    """What earlier plans counted too much; applied before the slots that start."""


class StepCost(msgspec.Struct, frozen=True, gc=False):
    """How long a recorded step takes on the device, measured while nothing ran."""

    rows: int
    drafts: int
    """Drafts of each row."""
    seconds: float


class DraftResult(msgspec.Struct, frozen=True):
    """What a step has verified and proposed."""

    proposed: list[int] = []
    """[num_rows] Drafts that the speculator had for the row's next tokens, once these were
    sampled; -1: the row may have none. Empty if no row may."""
    verified: list[int] = []
    """[num_rows] Of the row's drafts in this step, those that the speculator had proposed; others
    are padding. Empty: no row had any."""
    costs: tuple[StepCost, ...] = ()
    """Those that were measured since the step before."""
