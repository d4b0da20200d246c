"""Train the embedded model with the engine in the loop: a policy gradient, in minutes on a CPU.

    python examples/policy_gradient.py --steps 30

Each step the engine samples completions with the weights that it has; a trainer in the same process
rewards them, takes one step of REINFORCE (with a baseline of the group's mean), and sends its
weights to the engine, which goes on with them. The reward is how many of the letters are "e". The
last column compares the log-probabilities of both sides: they differ by rounding alone, unless an
update was lost.
"""

from __future__ import annotations

import argparse
import asyncio
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

import jackfield
from jackfield import AsyncEngine, EngineConfig, RequestOutput, SamplingParams

MODEL = Path(jackfield.__file__).resolve().parent / "plugins/models/embedded"
PROMPTS = ("Once upon a time", "The engine", "A short story:", "In the morning")
LETTER = "e"


class Step(NamedTuple):
    """What one step has shown."""

    reward: float
    """Mean over all completions."""
    difference: float
    """Mean difference of both sides' log-probabilities."""


def reward(text: str) -> float:
    """Return the share of `LETTER` among a text's letters."""
    letters = [each for each in text.lower() if each.isalpha()]
    return letters.count(LETTER) / max(1, len(letters))


class Trainer:
    """A copy of the model that learns."""

    def __init__(self, rate: float) -> None:
        import transformers

        self.model: Any = transformers.AutoModelForCausalLM.from_pretrained(MODEL).float()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=rate)

    def learn(self, outputs: Sequence[RequestOutput]) -> Step:
        """Take one step with groups of completions, one group per prompt."""
        losses, rewards, differences = [], [], []
        for group in outputs:
            scores = torch.tensor([reward(each.text) for each in group.outputs])
            advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
            rewards.append(float(scores.mean()))
            for completion, advantage in zip(group.outputs, advantages, strict=True):
                tokens = list(completion.token_ids)
                own = self.logprobs(group.prompt_token_ids, tokens)
                losses.append(-(advantage * own).sum() / len(tokens))
                sampled = [
                    position[token].logprob
                    for position, token in zip(completion.logprobs or (), tokens, strict=True)
                ]
                differences.append(float((own.detach() - torch.tensor(sampled)).abs().mean()))
        self.optimizer.zero_grad()
        torch.stack(losses).mean().backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return Step(sum(rewards) / len(rewards), sum(differences) / len(differences))

    def logprobs(self, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
        """Return the log-probabilities of the tokens after the prompt: [len(tokens)]."""
        ids = torch.tensor([[*prompt, *tokens]])
        logits = self.model(ids).logits[0, len(prompt) - 1 : -1].float()
        return logits.log_softmax(-1).gather(1, ids[0, len(prompt) :, None]).squeeze(1)


async def train(steps: int, *, group: int = 8, rate: float = 5e-4, seed: int = 1) -> list[Step]:
    """Train for some steps; return what each has shown."""
    torch.manual_seed(seed)
    trainer, shown = Trainer(rate), []
    config = EngineConfig(dtype="float32", device="cpu", max_model_len=256)
    async with AsyncEngine(config) as engine:

        async def sample(prompt: str, number: int) -> RequestOutput:
            params = SamplingParams(
                n=group, temperature=1.0, max_tokens=24, logprobs=0, seed=seed + 1000 * number,
                ignore_eos=True,
            )  # fmt: skip
            async for output in engine.generate(prompt, params):
                last = output
            return last

        for number in range(steps):
            outputs = await asyncio.gather(*(sample(prompt, number) for prompt in PROMPTS))
            step = await asyncio.to_thread(trainer.learn, outputs)
            await engine.update_weights(trainer.model.state_dict().items(), version=str(number + 1))
            shown.append(step)
            print(f"step {number + 1:3d}  reward {step.reward:.3f}  |Δ| {step.difference:.1e}")
            assert not math.isnan(step.difference)
    return shown


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--steps", type=int, default=30)
    asyncio.run(train(parser.parse_args().steps))


if __name__ == "__main__":
    main()
