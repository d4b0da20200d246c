"""Routed experts in responses: which experts of a mixture computed a choice's tokens."""

from __future__ import annotations

import base64
import io

import numpy as np

from ....core.engine.async_engine import AsyncEngine
from ....core.errors import InvalidRequest
from ....core.outputs import CompletionOutput
from .protocol import SamplingRequest

FIELD = "return_routed_experts"


def check_routed_experts(engine: AsyncEngine, request: SamplingRequest) -> None:
    """Raise InvalidRequest, with the field's name, if they are asked for and not kept."""
    if request.routed_experts_prompt_start < 0:
        raise InvalidRequest(
            "routed_experts_prompt_start: must be 0 or more, got "
            f"{request.routed_experts_prompt_start}",
            param="routed_experts_prompt_start",
        )
    if not request.return_routed_experts:
        return
    if engine.info.routed_experts is None:
        raise InvalidRequest(
            f"{FIELD}: this server keeps none; start it with --enable-return-routed-experts",
            param=FIELD,
        )
    if request.use_beam_search:
        raise InvalidRequest(f"{FIELD}: is not supported with use_beam_search", param=FIELD)


def routed_experts(request: SamplingRequest, completion: CompletionOutput) -> str | None:
    """Return a choice's field `routed_experts`: the array, from token `routed_experts_prompt_start`
    on, as an .npy file in base64; None: it has none, has not ended, or the request wants none."""
    routed = completion.routed_experts
    if routed is None or request.return_routed_experts is False:
        return None
    file = io.BytesIO()
    kept = np.ascontiguousarray(routed[request.routed_experts_prompt_start :])
    np.save(file, kept, allow_pickle=False)
    return base64.b64encode(file.getbuffer()).decode()
