"""docs/reference/models.md: which architectures generate, and what shows that they do."""

from __future__ import annotations

import ast
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from markdown_table import table
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES as WHOLES,
)

from jackfield.core import hooks
from jackfield.core.nn.experts import SparseMLP
from jackfield.core.registry import load_plugins
from jackfield.plugins.models.decoder import CausalLM, HeadlessLM
from jackfield.plugins.models.encoder_decoder import EncoderDecoderLM
from jackfield.plugins.models.mixer import MixerDecoder
from jackfield.plugins.models.parts import OldWeightMap

ROOT = Path(__file__).resolve().parent.parent
TESTS = ROOT / "tests" / "plugins" / "models"
RECORD = ROOT / "docs" / "benchmarks" / "conformance.jsonl"
ABOUT = """\
# Models

Which architectures generate text, by the name in config.json's `architectures`. Each says what its
class in `transformers` says, or, where that has none, what an equal family says by other names, or
what its published formulas say: on a tiny random checkpoint, through the whole engine, prompts in
chunks and prefixes from the cache.
Encoders and decoders for vectors and labels: [Embed, classify, score and
rerank](../how-to/embeddings.md). To add one: [write a plugin](../how-to/write-a-plugin.md).

Weights run in bfloat16, float16 or float32, or [quantized](../how-to/quantize.md). Which models are
there, by kind:

- **Dense**: Llama, Qwen2, Qwen3, Gemma to Gemma 4, Mistral, Ministral 3, Phi-3, GLM-4 (Glm4),
  Granite, OLMo to OLMo 3, Falcon, Cohere 2, EXAONE 4, SmolLM 3, StarCoder 2, Nemotron, InternLM 3,
  MiniCPM, GPT-NeoX and dozens more.
- **Mixtures of experts**: Mixtral, Qwen3-MoE, GPT-OSS, GLM-4.5 (Glm4Moe), Llama 4, MiniMax-M2,
  Ernie 4.5 MoE, dots.llm1 (Dots1), DBRX and more.
- **Latent attention**: DeepSeek V2, DeepSeek V3, R1 and Kimi K2 (DeepseekV3), DeepSeek V3.2, GLM-5
  (GlmMoeDsa), Mistral Large 3, LongCat-Flash, MiniCPM 3.
- **States of sequences**: Mamba, Mamba 2, Jamba, Bamba, Falcon-H1, Nemotron-H, Qwen3-Next, Qwen3.5,
  Kimi Linear, LFM2, MiniMax-Text-01, Zamba 2.
- **Encoder-decoders**: T5, BART, M2M100, Marian, Pegasus.
- **For vectors and labels**: BERT, RoBERTa, XLM-RoBERTa, ModernBERT, NomicBERT, GTE, rewards of
  Qwen (Qwen2ForRewardModel), and of InternLM (InternLM2ForRewardModel): [embed, classify, score
  and rerank](../how-to/embeddings.md).
- **Others**: the text part of multimodal checkpoints; any other causal model of `transformers`
  whose layers are attention alone, [on its own modules](#on-transformers-modules).

In the table:

- **family**: the module in `plugins/models/`.
- **test**: a class of `tests/plugins/models/test_model_kit.py`, or a case of another file there.
- **quantization**: *all*: every method, for stored weights and on loading. *on loading*: rows or
  columns are put in another order on loading, so weights may be stored in 16 or 32 bits and
  rounded on loading; packed ones are refused by name.
  *experts*: all but `bitsandbytes`, which takes no experts; `mxfp4` takes nothing else.
- **ranks**: how several GPUs can share the model ([several GPUs](../how-to/several-gpus.md)):
  *tensor*: each holds a part of every layer; *experts*: also some of the experts whole;
  *stages*: each holds some of the layers.
- **GPU**: the last run of that case there, in float32 and bfloat16, with recorded steps, from
  [conformance.jsonl](../benchmarks/conformance.jsonl), which also says how near it came.

"""

COLUMNS = ["architecture", "family", "test", "quantization", "ranks", "GPU"]
FALLBACK = "test_fallback"
ON_MODULES = """\
## On transformers' modules

Any other causal model of `transformers` whose layers are attention alone runs on its own modules,
over the cache and the scheduling here: attention, cached prefixes, chunks and preemption are as for
every family, and its products and experts are quantized and divided like theirs. Norms, rotations
and activations are kernels of their own, so steps take longer. They are recorded as CUDA graphs
where modules ask the device for no values; the first recording that fails says so in the log, and
steps are launched from then on. `--model-impl transformers` asks for it where there is a family,
too, and `--model-impl jackfield` refuses it. Refused at the start, with the reason: layers that
keep a state, masks and windows that attention does not get, several attentions in a layer, tokens
that meet outside attention; with several ranks, what transformers has no plan for
(`plugins/models/fallback/modules.py`). These have been compared:

"""


PARTS = """\
## The text part of multimodal checkpoints

Of these checkpoints the part that reads and writes text is loaded, and the parts for images, sound
and video are not; the log says so. Requests with images are refused. A test compares a prompt's
logits with those of the whole in `transformers`.

"""


def models() -> str:
    """The page. Raises SystemExit for an architecture that no test names."""
    registry = load_plugins()["model"]
    rows = []
    tests, runs = dict(_tests()), _runs()
    own = [e for e in registry.entries() if e.provenance.distribution == hooks.PROJECT]
    places: dict[Any, str] = {}
    for entry in own:
        if entry.reference.endswith(f":{entry.name}"):
            places[entry.reference] = entry.name
    wholes = _wholes(registry)
    tested = {of: name for name, of in wholes.items() if of not in tests}
    for entry in sorted(own, key=lambda entry: entry.name.lower()):
        kind = registry.load(entry.name)
        if not issubclass(kind, CausalLM | EncoderDecoderLM):
            continue
        name = entry.name if entry.name in tests else places[entry.reference]
        name = tested.get(name, name)
        if name not in tests:
            raise SystemExit(f"tests/plugins/models names no test of {entry.name}")
        file, test = tests[name]
        case = test.partition("[")[2][:-1]
        ran = runs.get((file, case or test)) or "not yet"
        family = entry.reference.partition(":")[0].rpartition(".")[2]
        equal = "" if name == entry.name else f" (as {name})"
        where = f"{file}: `{case}`" if case else f"`{test}`"
        rows.append([
            f"`{entry.name}`{equal}", f"`{family}`", where, _quantization(kind), _ranks(kind), ran
        ])  # fmt: skip
    other = {name: place for name, place in tests.items() if place[0] == FALLBACK}
    modules = [
        [f"`{name}`", f"{file}: `{test.partition('[')[2][:-1]}`"]
        for name, (file, test) in sorted(other.items(), key=lambda item: item[0].lower())
        if name not in registry
    ]
    parts = [
        [
            f"`{name}`",
            f"`{wholes[name]}`" if name in wholes else "its text configuration says",
            f"{tests[name][0]}: `{name}`" if name in tests else "not compared",
        ]
        for name in registry.text_parts
    ]  # fmt: skip
    reasons: dict[str, list[str]] = {}
    for name in registry.refused:
        reasons.setdefault(registry.refusal(name) or "", []).append(f"`{name}`")
    refused = [[", ".join(names), reason] for reason, names in sorted(reasons.items())]
    return (
        f"{ABOUT}{table(COLUMNS, rows)}\n"
        f"{ON_MODULES}{table(['architecture', 'test'], modules)}\n"
        f"{PARTS}{table(['architecture', 'served as', 'test'], parts)}\n"
        "## Not served\n\nOf what `transformers` lists as models that generate, and other engines "
        f"serve; the error says the same.\n\n{table(['architectures', 'reason'], refused)}"
    )


def _wholes(registry: Any) -> dict[str, str]:
    """Multimodal architecture → that of its text part, if it is one for all its checkpoints."""
    wholes = {
        of_type: of
        for model_type, of in registry.text_types.items()
        if (of_type := WHOLES.get(model_type.removesuffix("_text")))
    }
    wholes |= {name: of for name, of in registry.text_parts.items() if of}
    return {name: of for name, of in wholes.items() if name in registry.text_parts}


def _quantization(kind: type[CausalLM | EncoderDecoderLM]) -> str:
    if issubclass(kind, EncoderDecoderLM):
        return "all"
    weights = kind.weight_map
    moved = kind.row_orders is not HeadlessLM.row_orders or weights.rows
    columns = isinstance(weights, OldWeightMap) and weights.transposed
    if moved or columns:
        return "on loading"
    return "experts" if _has_experts(kind) else "all"


def _ranks(kind: type[CausalLM | EncoderDecoderLM]) -> str:
    ways = []
    if getattr(kind, "tensor_parallel", False):
        ways = ["tensor", "experts"] if _has_experts(kind) else ["tensor"]
    if getattr(kind, "pipeline_parallel", False):
        ways.append("stages")
    return ", ".join(ways) or "no"


def _has_experts(kind: type[CausalLM | EncoderDecoderLM]) -> bool:
    """Whether what makes the class's MLPs or blocks makes a mixture's layer."""
    if issubclass(kind, EncoderDecoderLM):
        return False
    block = kind.decoder.block
    if issubclass(kind.decoder, MixerDecoder):
        block = kind.decoder.mixer_block
    for maker in (kind.mlp, block.__init__, getattr(block, "make_mixer", block.__init__)):
        module = vars(sys.modules[maker.__module__])
        for part in map(module.get, maker.__code__.co_names):
            if isinstance(part, type) and issubclass(part, SparseMLP):
                return True
            if inspect.isfunction(part) and part.__annotations__.get("return") == "SparseMLP":
                return True
    return False


def _tests() -> Iterator[tuple[str, tuple[str, str]]]:
    """Architecture → file and test. What comes last counts: the kit, and of several the first."""
    order = sorted(TESTS.glob("test_*.py"), reverse=True)
    for path in sorted(order, key=lambda path: path.stem != FALLBACK):
        for node in reversed(ast.parse(path.read_text()).body):
            if isinstance(node, ast.ClassDef):
                for part in node.body:
                    if isinstance(part, ast.Assign) and ast.unparse(part.targets[0]) == "name":
                        yield ast.literal_eval(part.value), (path.stem, node.name)
            target = getattr(node, "target", None) or getattr(node, "targets", [None])[0]
            value = getattr(node, "value", None)
            if (
                isinstance(target, ast.Name)
                and target.id == "CASES"
                and isinstance(value, ast.Dict)
            ):
                test = _parametrized(path)
                for key in reversed(value.keys):
                    assert isinstance(key, ast.Constant)
                    yield key.value.partition(":")[0], (path.stem, f"{test}[{key.value}]")


def _parametrized(path: Path) -> str:
    """The test that a module runs with its CASES."""
    match = re.search(r'parametrize\("\w+", CASES\)\n(?:async )?def (\w+)', path.read_text())
    assert match is not None, f"{path} has no test of CASES"
    return match[1]


def _runs() -> dict[tuple[str, str], str]:
    """(file, case or class) → day and device of the last run on a GPU, and whether it failed."""
    runs: dict[tuple[str, str], str] = {}
    for line in RECORD.read_text().splitlines():
        row = json.loads(line)
        if row["device"] == "cpu" or not (row.get("passed") or row["failed"]):
            continue
        if "reference_failed" in row:  # It says why; nothing was learned of the architecture.
            continue
        run = f"{row['date'][:10]}, {row['device'].removeprefix('NVIDIA ')}"
        if row["failed"]:
            run = "failed " + run
        if row["kind"] == "architectures":
            runs[row.get("file", ""), row["name"]] = run
        elif row["kind"] == "models":
            runs["test_model_kit", row["name"]] = run
    return runs
