"""What several tokens that come together make of a completion."""

from __future__ import annotations

import pytest

from jackfield import OutputKind, SamplingParams
from jackfield.core.engine.output_processor import RequestTracker
from jackfield.core.engine.request_state import Completion, RequestState
from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.core.request import Request, Update
from jackfield.core.text.tokenizer import Tokenizer


@pytest.mark.parametrize("logprobs", [None, 1])
@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_ends_before_the_token_behind_it(logprobs: int | None, include: bool) -> None:
    """The engine went on to its end token before it heard of the string."""
    tokenizer = Tokenizer.load(str(EMBEDDED_MODEL))
    params = SamplingParams(stop=("= 5",), include_stop_str_in_output=include, logprobs=logprobs)
    request = Request("one", [1], params, max_tokens=20, seed=0, eos_token_ids=frozenset({7}))
    request.finish_reason = "stop"
    text = tokenizer.encode("2 + 3 = 5", add_special_tokens=False)
    completion = Completion(0, request, tokenizer)
    stop = completion.apply(Update(request, [*text, 7], finished=True))
    assert stop == "= 5"
    completion.set_finished("stop", stop)
    output = completion.take_output(delta=False)
    assert output.token_ids == text and output.stop_reason == "= 5"
    assert output.text == ("2 + 3 = 5" if include else "2 + 3 ")


@pytest.mark.parametrize("kind", list(OutputKind))
async def test_who_gets_nothing_before_the_end_is_not_woken_before(kind: OutputKind) -> None:
    params = SamplingParams(output_kind=kind, n=2)
    requests = [
        Request(f"{number}", [1], params, max_tokens=20, seed=0, eos_token_ids=frozenset({7}))
        for number in range(2)
    ]
    state, tracker, woken = RequestState(None, requests, None), RequestTracker(), []
    for completion in state.completions:
        completion.apply_tokens([5])
        tracker.notify(state)
        woken.append(state.changed.is_set())
        state.changed.clear()
    for completion in state.completions:
        completion.set_finished("stop", None)
        tracker.notify(state)
        woken.append(state.changed.is_set() and state.take_output() is not None)
        state.changed.clear()
    only_final = kind is OutputKind.FINAL_ONLY
    assert woken == ([False, False, False, True] if only_final else [True] * 4)
