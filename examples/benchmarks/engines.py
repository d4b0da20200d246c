"""The workloads of `jackfield bench` through other engines, where they are installed.

    python -m jackfield.examples.benchmarks.engines run W1 decode --engine vllm --model Qwen3-8B
    python -m jackfield.examples.benchmarks.engines compare W1 W2 --model Qwen3-8B
    python -m jackfield.examples.benchmarks.engines startup --engine vllm --model Qwen3-8B

`run` and `startup` are those of `jackfield bench` with one more option, --engine. `compare` runs
the same workloads on every engine, one after another, each in a process of its own on the same
device; compare ratios within one such run only. Each engine takes token ids, ignores EOS and
detokenizes nothing.
"""

from __future__ import annotations

import argparse
import gc
import importlib.metadata
import importlib.util
import json
import time
from collections.abc import Sequence
from typing import Any

from jackfield.core.loading.checkpoint_folder import checkpoint_folder
from jackfield.entrypoints.bench.comparison import Comparison
from jackfield.entrypoints.bench.engine import session, startup
from jackfield.entrypoints.bench.engine.backends import check_lengths
from jackfield.entrypoints.bench.engine.session import Peer, Start
from jackfield.entrypoints.bench.engine.subprocess_run import run_process
from jackfield.entrypoints.bench.report import Emitter, add_output_options, say
from jackfield.entrypoints.bench.types import Outcome
from jackfield.entrypoints.bench.workloads import BenchRequest
from jackfield.entrypoints.flags.parser import Parser

COMMAND = ("jackfield.examples.benchmarks.engines", "run")
"""What starts one engine in a process of its own."""


class VLLMBackend:
    """vLLM's Python API, with its defaults."""

    def __init__(self, start: Start) -> None:
        import vllm

        self.version = vllm.__version__
        arguments: dict[str, Any] = {
            "model": start.model, "skip_tokenizer_init": True,
            "max_model_len": start.max_model_len, "gpu_memory_utilization": 0.9,
            **start.peer_options,
        }  # fmt: skip
        if start.dummy:
            arguments |= {"load_format": "dummy", "dtype": "bfloat16"}
        self._vllm = vllm
        self._llm = vllm.LLM(**arguments)
        self.details: dict[str, Any] = {}

    def run(self, requests: Sequence[BenchRequest]) -> Outcome:
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        params = [
            self._vllm.SamplingParams(
                max_tokens=request.output,
                temperature=request.temperature,
                ignore_eos=True,
                detokenize=False,
            )
            for request in requests
        ]
        start = time.perf_counter()
        outputs = self._llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        check_lengths(requests, tokens)
        cached = sum(getattr(output, "num_cached_tokens", None) or 0 for output in outputs)
        return Outcome(seconds, tokens, cached)

    def forget(self) -> None:
        self._llm.reset_prefix_cache()

    def close(self) -> None:
        del self._llm
        gc.collect()


class TransformersBackend:
    """`transformers`' own `generate`, in static batches of similar output lengths.

    A batch generates as many tokens as its longest request; tokens beyond a request's own length
    are dropped and not counted, but their time is.
    """

    BATCH = 32

    def __init__(self, start: Start) -> None:
        import torch
        import transformers

        self.version = importlib.metadata.version("transformers")
        self._torch = torch
        self._device = torch.device(start.device)
        model, torch_dtype = str(checkpoint_folder(start.model)), getattr(torch, start.dtype)
        if start.dummy:
            config = transformers.AutoConfig.from_pretrained(model)
            with self._device:
                loaded_model = transformers.AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                    config, dtype=torch_dtype
                )
        else:
            loaded_model = transformers.AutoModelForCausalLM.from_pretrained(
                model, dtype=torch_dtype
            )
        self._model = loaded_model.to(self._device).eval()
        self.details = {"attention": self._model.config._attn_implementation, "dtype": start.dtype}

    def run(self, requests: Sequence[BenchRequest]) -> Outcome:
        tokens: list[list[int]] = [[] for _ in requests]
        order = sorted(range(len(requests)), key=lambda index: requests[index].output)
        start = time.perf_counter()
        for first in range(0, len(order), self.BATCH):
            indices = order[first : first + self.BATCH]
            rows = self._generate([requests[index] for index in indices])
            for index, row in zip(indices, rows, strict=True):
                tokens[index] = row[: requests[index].output]
        seconds = time.perf_counter() - start
        check_lengths(requests, tokens)
        return Outcome(seconds, tokens, 0)

    def _generate(self, requests: list[BenchRequest]) -> list[list[int]]:
        torch = self._torch
        width, longest = max(len(a.prompt) for a in requests), max(a.output for a in requests)
        ids = torch.zeros(len(requests), width, dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for row, request in enumerate(requests):
            ids[row, width - len(request.prompt) :] = torch.tensor(request.prompt)
            mask[row, width - len(request.prompt) :] = 1
        sampling: dict[str, Any] = {"do_sample": False}
        if requests[0].temperature > 0:
            sampling = {"do_sample": True, "temperature": requests[0].temperature, "top_k": 0}
        out = self._model.generate(
            input_ids=ids.to(self._device),
            attention_mask=mask.to(self._device),
            max_new_tokens=longest,
            min_new_tokens=longest,
            eos_token_id=None,
            pad_token_id=0,
            **sampling,
        )
        rows: list[list[int]] = out[:, width:].tolist()
        return rows

    def forget(self) -> None:
        """Do nothing: no cache outlives a call."""

    def close(self) -> None:
        del self._model
        gc.collect()


PEERS = {"vllm": Peer(VLLMBackend, owns_device=True), "transformers": Peer(TransformersBackend)}
ENGINES = ("jackfield", *PEERS)


def compare(argv: list[str]) -> int:
    """Return the exit status, 1 if an engine failed."""
    parser = Parser(
        prog="engines compare",
        description="Run workloads through each engine that is installed, and compare them.",
        epilog="Other options go to `run` as they are (--model, --scale, …).",
    )
    parser.add_argument("workloads", nargs="+", metavar="WORKLOAD")
    parser.add_argument(
        "--engines", nargs="+", choices=ENGINES, help="default: those that are installed"
    )
    parser.add_argument("--budget-s", type=float, default=900.0, help="seconds for one engine")
    add_output_options(parser)
    args, rest = parser.parse_known_args(argv)
    emitter = Emitter(args.output, {})
    status = 0
    ceilings = "measure"
    for engine in args.engines or installed():
        arguments = [*args.workloads, "--engine", engine, "--ceilings", ceilings, *rest]
        records, exit_status = run_process(arguments, command=COMMAND, timeout=args.budget_s)
        for record in records:
            emitter.emit(record)
            if "ceilings" in record:
                ceilings = json.dumps(record["ceilings"])
        if exit_status:
            say(f"{engine}: {'out of time' if exit_status < 0 else f'exit status {exit_status}'}")
            status = 1
    print(Comparison(emitter.records).text())
    return status


def installed() -> list[str]:
    """Return the engines that can be imported here."""
    return [name for name in ENGINES if importlib.util.find_spec(name) is not None]


def run(argv: list[str]) -> int:
    """Return the exit status."""
    return session.run(argv, peers=PEERS)


def main(argv: Sequence[str] | None = None) -> int:
    """Return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], add_help=False)
    parser.add_argument("what", choices=("run", "compare", "startup"))
    args, rest = parser.parse_known_args(argv)
    if args.what == "compare":
        return compare(rest)
    return run(rest) if args.what == "run" else startup.run(rest, command=COMMAND)


if __name__ == "__main__":
    raise SystemExit(main())
