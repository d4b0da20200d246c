"""Speculative decoding beside vLLM: texts that can be guessed, and heads of a given acceptance.

    python -m jackfield.examples.benchmarks.drafts --engine jackfield --methods none ngram suffix
    python -m jackfield.examples.benchmarks.drafts --engine vllm --methods none ngram suffix
    python -m jackfield.examples.benchmarks.drafts --methods none given eagle3 --rows 1 8 32 128

The model has the shape of Qwen3-8B and continues every token with one other, so that its text is
known: attention and MLPs compute and add zero. Texts:

`edit`: the prompt has the text that is to come, with one token in twenty another.
`fill`: a record of 48 tokens again and again, as of a table in JSON; the prompt has none.
`agent`: the prompt has three drafts of the text, each with one token in ten another.

Methods: `none`; `ngram`; `suffix`; `eagle3`: a head of EAGLE-3's shape, whose drafts are right as
often as `--acceptance` says, each with that probability if the one before is right (vLLM:
`rejection_sample_method` synthetic); `given`: such drafts without a head, so that the step's
seconds, less these, are what drafting costs.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from jackfield.core.hooks import hookimpl
from jackfield.core.protocols import (
    Drafts,
    DraftSite,
    KnownTokens,
    Speculator,
    SpeculatorNeeds,
    SpeculatorSetup,
)
from jackfield.core.registry import Provenance, load_plugins
from jackfield.entrypoints.bench.report import Emitter, add_output_options, environment, say, table
from jackfield.entrypoints.bench.workloads import ARCHITECTURES
from jackfield.plugins.speculators.eagle3 import Eagle3

TEXTS = ("edit", "fill", "agent")
RECORD, NUM_RECORDS = 48, 512
SEED = 11
DRAFT_VOCABULARY = 32000
COLUMNS = ("rows", "text", "tokens_per_second", "tokens_per_step", "step_ms")


# ---------------------------------------------------------------- the model


class Language:
    """Which token follows each: records of 48 tokens, then one circle of all others."""

    def __init__(self, vocab_size: int) -> None:
        draw = torch.Generator().manual_seed(SEED)
        order = torch.randperm(vocab_size, generator=draw)
        self.record = min(RECORD, vocab_size // 8)
        self.num_records = min(NUM_RECORDS, vocab_size // (2 * self.record))
        self.first = self.record * self.num_records
        self.order = order
        self.following = torch.empty(vocab_size, dtype=torch.int64)
        self.following[order] = order.roll(-1)
        self.following[order[-1]] = order[self.first]
        records = order[: self.first].view(self.num_records, self.record)
        self.following[records[:, -1]] = records[:, 0]

    def path(self, start: int, count: int) -> list[int]:
        """Return tokens that follow each other, from a place of the circle on."""
        places = (torch.arange(count) + start) % (len(self.order) - self.first)
        found: list[int] = self.order[self.first + places].tolist()
        return found

    def changed(self, tokens: list[int], share: float, draw: random.Random) -> list[int]:
        """Return tokens with a share of them replaced."""
        size = len(self.order)
        return [draw.randrange(size) if draw.random() < share else token for token in tokens]

    def prompt(self, text: str, row: int, output: int) -> list[int]:
        draw = random.Random(f"{SEED} {text} {row}")
        noise = [draw.randrange(len(self.order)) for _ in range(64)]
        if text == "fill":
            return [*noise, int(self.order[self.record * (row % self.num_records)])]
        start = draw.randrange(len(self.order))
        last, *tokens = self.path(start, output + 1)
        versions = [0.05] if text == "edit" else [0.1] * 3
        shown = [token for share in versions for token in self.changed(tokens, share, draw)]
        return [*noise, *shown, *noise[:16], last]


def write_tensors(path: Path, shapes: dict[str, Any], dtype: str = "BF16") -> None:
    """Write a file of tensors: a shape stands for zeros, which take no room on a disk."""
    header: dict[str, Any] = {}
    end, filled = 0, []
    for name, value in shapes.items():
        given = isinstance(value, torch.Tensor)
        shape, kind = (tuple(value.shape), value.dtype) if given else (value, torch.bfloat16)
        size = kind.itemsize
        for length in shape:
            size *= length
        names = {torch.bfloat16: dtype, torch.int64: "I64", torch.bool: "BOOL"}
        header[name] = {
            "dtype": names[kind], "shape": list(shape), "data_offsets": [end, end + size],
        }  # fmt: skip
        if given:
            filled.append((end, value))
        end += size
    raw = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    raw += b" " * (-len(raw) % 8)
    with path.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        begin = file.tell()
        file.truncate(begin + end)
        for offset, tensor in filled:
            file.seek(begin + offset)
            file.write(tensor.contiguous().view(torch.uint8).numpy().data)


def layer(prefix: str, config: dict[str, Any], width: int) -> dict[str, tuple[int, ...]]:
    """Return shapes of a layer's products, whose attention reads `width` numbers of a token."""
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head, config["num_key_value_heads"] * head
    return {
        f"{prefix}self_attn.q_proj.weight": (queries, width),
        f"{prefix}self_attn.k_proj.weight": (keys, width),
        f"{prefix}self_attn.v_proj.weight": (keys, width),
        f"{prefix}self_attn.o_proj.weight": (hidden, queries),
        f"{prefix}mlp.gate_proj.weight": (inner, hidden),
        f"{prefix}mlp.up_proj.weight": (inner, hidden),
        f"{prefix}mlp.down_proj.weight": (hidden, inner),
    }


def write_target(folder: Path, config: dict[str, Any], language: Language) -> None:
    """Write a model that continues each token as the language does."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    size, head = config["hidden_size"], config["head_dim"]
    # On the host: vLLM starts processes, and asks that the device is not in use.
    draw = torch.Generator().manual_seed(SEED)
    embedded = torch.randn((config["vocab_size"], size), generator=draw).bfloat16()
    heads = torch.empty_like(embedded)
    heads[language.following] = embedded
    ones = torch.ones(size, dtype=torch.bfloat16)
    tensors: dict[str, Any] = {
        "model.embed_tokens.weight": embedded, "lm_head.weight": heads, "model.norm.weight": ones,
    }  # fmt: skip
    for number in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{number}."
        tensors |= layer(prefix, config, size)
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = ones
        for name in ("q_norm", "k_norm"):
            tensors[f"{prefix}self_attn.{name}.weight"] = torch.ones(head, dtype=torch.bfloat16)
    write_tensors(folder / "model.safetensors", tensors)


def write_head(folder: Path, config: dict[str, Any]) -> None:
    """Write a head of EAGLE-3's shape for a model of this configuration."""
    folder.mkdir()
    drafted = min(DRAFT_VOCABULARY, config["vocab_size"])
    own = {
        **config, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama",
        "num_hidden_layers": 1, "draft_vocab_size": drafted, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(own))
    size = config["hidden_size"]
    ones = torch.ones(size, dtype=torch.bfloat16)
    kept = torch.zeros(config["vocab_size"], dtype=torch.bool)
    kept[:drafted] = True
    write_tensors(folder / "model.safetensors", {
        "fc.weight": (size, 3 * size), "norm.weight": ones, "lm_head.weight": (drafted, size),
        "d2t": torch.zeros(drafted, dtype=torch.int64), "t2d": kept,
        **layer("midlayer.", config, 2 * size),
        **{f"midlayer.{name}.weight": ones
           for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")},
    })  # fmt: skip


# ---------------------------------------------------------------- drafts of a given acceptance


class GivenDrafts:
    """Drafts that are right with a probability, if those before are."""

    acceptance: ClassVar[float] = 0.0
    following: ClassVar[torch.Tensor] = torch.empty(0)

    def given(self, tokens: KnownTokens, num_drafts: int) -> Drafts:
        table = GivenDrafts.following
        token = tokens.history[tokens.slots, tokens.lengths - 1].long()
        drafts = []
        for number in range(num_drafts):
            token = table[token]
            place = (tokens.slots * 7919 + tokens.lengths + number).double()
            right = (place * 0.6180339887498949).sin().mul(43758.5453).frac().abs()
            wrong = (token + 1) % len(table)
            drafts.append(torch.where(right < GivenDrafts.acceptance, token, wrong))
        counts = torch.full_like(tokens.lengths, num_drafts)
        return Drafts(torch.stack(drafts, dim=1), counts)


class Given(GivenDrafts, Speculator):
    @classmethod
    def needs(cls, site: DraftSite) -> SpeculatorNeeds:
        """Return something, so that it is recorded as the head is."""
        return SpeculatorNeeds(hidden=True)

    def __init__(self, setup: SpeculatorSetup) -> None:
        self._num_drafts = setup.num_drafts

    def propose(self, tokens: KnownTokens) -> Drafts:
        return self.given(tokens, self._num_drafts)


class GivenEagle3(GivenDrafts, Eagle3):
    checkpoint: ClassVar[Literal["draft"]] = "draft"

    @classmethod
    def recognizes(cls, config: Any) -> int:
        return 0

    def propose(self, tokens: KnownTokens) -> Drafts:
        super().propose(tokens)
        return self.given(tokens, self._num_drafts)


class Plugin:
    jackfield_api = 3

    @hookimpl
    def register_speculators(self, registry: Any) -> None:
        registry.add("given", Given)
        registry.add("given_eagle3", GivenEagle3)


# ---------------------------------------------------------------- engines


class Ours:
    """This engine."""

    def __init__(self, options: dict[str, Any]) -> None:
        import jackfield
        from jackfield.core.step import PrepareAhead

        plugins = load_plugins()
        plugins.add_plugin(Plugin(), Provenance("benchmark", "1", "speculators"))
        self.version, self._jackfield, self._ahead = jackfield.__version__, jackfield, PrepareAhead
        self._runner = asyncio.Runner()
        self._engine = jackfield.AsyncEngine(
            jackfield.EngineConfig.from_options(options), plugins=plugins
        )
        if torch.cuda.is_available():
            GivenDrafts.following = GivenDrafts.following.cuda()
        self._runner.run(self._start())

    async def _start(self) -> None:
        engine: Any = self._engine
        await engine.__aenter__()
        while await engine.core.executor.ask(self._ahead()):
            pass

    def run(self, prompts: list[list[int]], output: int) -> list[list[int]]:
        params = self._jackfield.SamplingParams(
            temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False,
            output_kind=self._jackfield.OutputKind.FINAL_ONLY,
        )  # fmt: skip

        async def generate(prompt: list[int]) -> list[int]:
            async for out in self._engine.generate(prompt, params):
                last = out
            assert last.error is None, last.error
            return list(last.outputs[0].token_ids)

        async def gather() -> list[list[int]]:
            found = await asyncio.gather(*map(generate, prompts))
            await self._engine.reset_prefix_cache()
            return list(found)

        return self._runner.run(gather())

    def counts(self) -> tuple[int, int]:
        """Return steps of requests with drafts, and accepted drafts, so far."""
        stats = self._engine.stats()
        return stats.spec_decode_num_drafts, stats.spec_decode_num_accepted_tokens

    def close(self) -> None:
        self._runner.run(self._engine.__aexit__(None, None, None))
        self._runner.close()


class Peer:
    """vLLM."""

    def __init__(self, options: dict[str, Any]) -> None:
        import vllm

        self.version, self._vllm = vllm.__version__, vllm
        self._llm = vllm.LLM(**options, disable_log_stats=False)

    def run(self, prompts: list[list[int]], output: int) -> list[list[int]]:
        params = self._vllm.SamplingParams(
            temperature=0.0, max_tokens=output, ignore_eos=True, detokenize=False
        )
        requests = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = self._llm.generate(requests, params, use_tqdm=False)
        self._llm.reset_prefix_cache()
        return [list(each.outputs[0].token_ids) for each in outputs]

    def counts(self) -> tuple[int, int]:
        found = {metric.name: getattr(metric, "value", 0) for metric in self._llm.get_metrics()}
        drafts = found.get("vllm:spec_decode_num_drafts", 0)
        return int(drafts), int(found.get("vllm:spec_decode_num_accepted_tokens", 0))

    def close(self) -> None:
        with contextlib.suppress(AttributeError):
            self._llm.llm_engine.engine_core.shutdown()


def speculative(method: str, args: argparse.Namespace, head: Path) -> dict[str, Any] | None:
    """Return an engine's `speculative_config`; None: without drafts."""
    if method == "none":
        return None
    config: dict[str, Any] = {"method": method, "num_speculative_tokens": args.drafts}
    if method == "ngram":
        config |= {"prompt_lookup_max": 4, "prompt_lookup_min": 2}
    if method == "eagle3":
        config["model"] = str(head)
        if args.engine == "vllm":
            rates = [args.acceptance ** (1 + place) for place in range(args.drafts)]
            config |= {
                "rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates,
            }  # fmt: skip
        else:
            config["method"] = "given_eagle3"
    return {**config, **args.speculative}


def measure(
    method: str, args: argparse.Namespace, folder: Path, language: Language, emitter: Emitter
) -> list[list[Any]]:
    """Serve each text with each number of rows; return rows of a table."""
    options: dict[str, Any] = {
        "model": str(folder / "target"), "dtype": args.dtype, "skip_tokenizer_init": True,
        "max_model_len": 256 + 4 * args.output_tokens + args.drafts, "max_num_seqs": max(args.rows),
        **args.options,
    }  # fmt: skip
    if (config := speculative(method, args, folder / "head")) is not None:
        options["speculative_config"] = config
    began = time.perf_counter()
    engine = Peer(options) if args.engine == "vllm" else Ours(options)
    say(f"{args.engine}, {method}: ready in {time.perf_counter() - began:.1f} s")
    given, lines = method in ("given", "eagle3"), []
    for text in ("fill",) if given else args.texts:
        for rows in args.rows:
            prompts = [language.prompt(text, row, args.output_tokens) for row in range(rows)]
            engine.run(prompts, args.output_tokens)
            seconds, before = [], engine.counts()
            for _ in range(args.repeats):
                began = time.perf_counter()
                outputs = engine.run(prompts, args.output_tokens)
                seconds.append(time.perf_counter() - began)
            drafted, accepted = (
                after - first for after, first in zip(engine.counts(), before, strict=True)
            )
            if not (given and args.engine == "vllm"):  # Its tokens are the drafts.
                check(outputs, prompts, language)
            generated = rows * args.output_tokens
            median = statistics.median(seconds)
            # Steps of a request: each has one token besides accepted drafts.
            steps = args.output_tokens - accepted / (rows * args.repeats)
            measured = {
                "tokens_per_second": round(generated / median, 1),
                "tokens_per_step": round(args.output_tokens / steps, 3),
                "step_ms": round(1000 * median / steps, 3),
                "drafted_steps": drafted, "seconds": [round(each, 4) for each in seconds],
            }  # fmt: skip
            at = {"rows": rows, "text": text, "drafts": args.drafts, "output": args.output_tokens}
            emitter.emit({
                "workload": "drafts", "engine": args.engine, "version": engine.version,
                "model": args.model, "method": method, "acceptance": args.acceptance, "at": at,
                "measured": measured,
            })  # fmt: skip
            cells = {**at, **measured}
            lines.append([method, *(cells[name] for name in COLUMNS)])
    engine.close()
    return lines


def check(outputs: Sequence[list[int]], prompts: Sequence[list[int]], language: Language) -> None:
    """Raise unless each token follows the one before."""
    for output, prompt in zip(outputs, prompts, strict=True):
        before = torch.tensor([prompt[-1], *output[:-1]])
        assert language.following[before].tolist() == output, "other tokens than the language's"


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", choices=["jackfield", "vllm"], default="jackfield")
    parser.add_argument("--model", default="Qwen3-8B", choices=["Qwen3-0.6B", "Qwen3-8B"])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--texts", nargs="+", default=list(TEXTS), choices=TEXTS)
    parser.add_argument("--methods", nargs="+", default=["none", "ngram", "suffix"],
                        choices=["none", "ngram", "suffix", "eagle3", "given"])  # fmt: skip
    parser.add_argument("--rows", nargs="+", type=int, default=[1])
    parser.add_argument("--drafts", type=int, default=4)
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--output-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0: all")
    parser.add_argument(
        "--options", type=json.loads, default={}, metavar="JSON", help="more engine options"
    )
    parser.add_argument(
        "--speculative", type=json.loads, default={}, metavar="JSON",
        help="more keys of speculative_config",
    )  # fmt: skip
    add_output_options(parser)
    args = parser.parse_args()
    emitter = Emitter(args.output, environment("cuda" if torch.cuda.is_available() else "cpu"))
    config = {**ARCHITECTURES[args.model], "tie_word_embeddings": False}
    if args.layers:
        config |= {"num_hidden_layers": args.layers, "max_window_layers": args.layers}
    language = Language(config["vocab_size"])
    GivenDrafts.following, GivenDrafts.acceptance = language.following, args.acceptance
    lines = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_target(folder / "target", config, language)
        write_head(folder / "head", config)
        for method in args.methods:
            lines += measure(method, args, folder, language, emitter)
    say(table(lines, ["method", *COLUMNS]))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
