"""What a step's result brings one request: its tokens, and log-probabilities of its prompt."""

from __future__ import annotations

from ..request import Request
from ..step import TokenLogprobs


def append_all_but_last(request: Request, new: list[int]) -> int:
    """Append a row's tokens up to the one before the last, and return the last.

    A token that ends the request is the last: those after it are removed from `new`.
    """
    outputs = request.output_token_ids
    for number, token_id in enumerate(new):
        outputs.append(token_id)
        if number == len(new) - 1 or request.stop_on(token_id) is not None:
            break
    del new[number + 1 :]
    return outputs.pop()


def new_prompt_logprobs(
    request: Request, first_position: int, positions: list[TokenLogprobs] | None
) -> list[TokenLogprobs] | None:
    """Return the positions not published yet: a preempted prompt is computed more than once.

    Position p is about prompt token p + 1. The first `num_prompt_logprobs` have been published.
    """
    if positions is None:
        return None
    new = positions[max(0, request.num_prompt_logprobs - first_position) :]
    request.num_prompt_logprobs += len(new)
    return new or None
