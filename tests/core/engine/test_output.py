"""What several tokens that come together make of a completion."""

from __future__ import annotations

import pytest

from jackfield import SamplingParams
from jackfield.core.engine.request_state import Completion
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
