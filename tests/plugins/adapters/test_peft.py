"""PEFT's adapters as they are read, against PEFT itself: the same logits, in float64."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from adapters_made import (
    LINEAR,
    Q_PROJ,
    adapted_model,
    make_adapter,
    merged_weights,
    q_proj_tensors,
    write_adapter,
)
from hypothesis import HealthCheck, given, reject, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from jackfield.core.adapters.file import AdapterFile, LowRank
from jackfield.core.errors import ConfigError
from jackfield.plugins.adapters import peft_config
from jackfield.plugins.adapters.peft import PeftFormat

from helpers import make_checkpoint, reference_model

PROMPT = [1, 17, 3, 5, 40, 3, 99, 5, 7, 3, 17, 23]
GPT2 = {
    "vocab_size": 199, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
    "bos_token_id": 1, "eos_token_id": 2, "initializer_range": 0.2,
}  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Return the folder of a tiny checkpoint, made once."""
    folder = tmp_path_factory.mktemp("models")

    def of(name: str) -> Path:
        path = folder / name
        if not path.exists():
            if name == "gpt2":
                torch.manual_seed(3)
                config = transformers.GPT2Config(**GPT2)
                transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path)
            else:
                make_checkpoint(name, path)
        return path

    return of


def untied(folder: Path) -> Any:
    """Return a checkpoint's model in float64, its head a layer of its own."""
    model = reference_model(folder).double()
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def weight_of(model: Any, name: str) -> tuple[torch.Tensor, bool]:
    """Return the weight of a layer, and whether it is [in, out]."""
    module = model.get_submodule(name)
    return module.weight, isinstance(module, transformers.pytorch_utils.Conv1D)


def apply(model: Any, file: AdapterFile, *, tied: bool) -> None:
    """Change a model's weights as an adapter says."""
    parameters = dict(model.named_parameters())
    for name, read in file.replaced.items():
        parameters[name].copy_(read())
    names = {rows.name for rows in file.token_rows}
    for rows in file.token_rows:
        head = ["lm_head"] if tied and "lm_head" not in names else []
        for name in (rows.name, *head):
            weight_of(model, name)[0][list(rows.token_ids)] = rows.rows().double()
    for change in file.low_rank:
        assert change.a().shape == (change.rank, change.in_features)
        assert change.b().shape == (change.out_features, change.rank)
        weight, flipped = weight_of(model, change.name)
        changed = weight.T if flipped or change.embedding else weight
        changed = changed + change.scale * change.b().double() @ change.a().double()
        if change.magnitude is not None:
            changed = changed * (change.magnitude().double() / changed.norm(dim=1))[:, None]
        weight.copy_(changed.T if flipped or change.embedding else changed)
        if change.bias is not None:
            module = model.get_submodule(change.name)
            bias = change.scale * change.bias().double()
            module.bias = torch.nn.Parameter(bias + (0 if module.bias is None else module.bias))
    for experts in file.experts:
        a, b = experts.a().double(), experts.b().double()
        assert a.shape == (experts.num_experts, experts.rank, experts.in_features)
        assert b.shape == (experts.num_experts, experts.out_features, experts.rank)
        delta = experts.scale * b @ a
        parameter = parameters[experts.name]
        # GPT-OSS stores [experts, in, out].
        parameter.add_(delta if delta.shape == parameter.shape else delta.transpose(1, 2))


@torch.no_grad()
def check(model: Path, adapter: Path, *, changes: bool = True) -> AdapterFile:
    """Compare the logits of what is read with PEFT's; return what was read. changes: they are
    others than the model's."""
    file = PeftFormat.read(adapter)
    base = reference_model(model)
    ids = torch.tensor([PROMPT])
    ours, theirs = untied(model), adapted_model(model, adapter).double()
    for each in (ours, theirs.get_base_model()):
        each.set_experts_implementation("eager")  # The others know no float64.
    expected = theirs(ids).logits
    plain = ours(ids).logits
    apply(ours, file, tied=bool(base.config.tie_word_embeddings))
    got = ours(ids).logits
    assert not changes or (expected - plain).abs().max() > 0.05, "the adapter changes nothing"
    # DoRA divides a row of zeros by its length, as of a token for padding.
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-4, equal_nan=True)
    return file


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "seven linears": ("llama", {"target_modules": LINEAR}),
    "rank 1": ("llama", {"target_modules": ["q_proj"], "r": 1}),
    "no power of two, rsLoRA": (
        "llama", {"target_modules": ["v_proj", "down_proj"], "r": 12, "use_rslora": True},
    ),
    "rank above the width": ("llama", {"target_modules": ["k_proj"], "r": 320}),
    "fractional alpha": ("llama", {"target_modules": ["q_proj"], "lora_alpha": 1.5}),
    "expression": ("llama", {"target_modules": r".*\.1\..*(q|up)_proj"}),
    "one layer": ("llama", {"target_modules": ["q_proj", "k_proj"], "layers_to_transform": [1]}),
    "excluded": ("llama", {"target_modules": LINEAR, "exclude_modules": ["k_proj"]}),
    "all linear": ("llama", {"target_modules": "all-linear"}),
    "patterns": (
        "llama",
        {
            "target_modules": LINEAR,
            "rank_pattern": {
                "model.layers.1.self_attn.q_proj": 2, "q_proj": 3, r"layers\.[0]\..*k_proj": 5,
                "proj": 7, "^v_proj": 7, "(up|gate)_proj": 6,
            },
            "alpha_pattern": {"q_proj": 1.5, r".*\.2\.mlp\.\w+": 9, "o_proj": 0},
        },
    ),
    "patterns, rsLoRA": (
        "llama",
        {
            "target_modules": ["q_proj", "o_proj"], "use_rslora": True,
            "rank_pattern": {"q_proj": 9}, "alpha_pattern": {"q_proj": 2},
        },
    ),
    "start of MiCA": ("llama", {"target_modules": ["q_proj"], "init_lora_weights": "mica"}),
    "start orthogonal": ("llama", {"target_modules": LINEAR, "init_lora_weights": "orthogonal"}),
    "trained by VeLoRA": (
        "llama", {"target_modules": ["q_proj"], "velora_config": {"num_groups": 4}},
    ),
    "DoRA": ("llama", {"target_modules": LINEAR, "use_dora": True}),
    "bias of B": ("llama", {"target_modules": LINEAR, "lora_bias": True}),
    "all biases": ("qwen2", {"target_modules": ["q_proj", "o_proj"], "bias": "all"}),
    "biases beside": ("qwen2", {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"}),
    "no biases there": ("llama", {"target_modules": ["q_proj"], "bias": "all"}),
    "DoRA with biases": ("qwen2", {"target_modules": ["q_proj", "v_proj"], "use_dora": True}),
    "copies": (
        "llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
    ),
    "copied norms and linears": (
        "llama", {"target_modules": ["q_proj"], "modules_to_save": ["norm", "2.mlp.up_proj"]},
    ),
    "embedding": ("llama", {"target_modules": ["embed_tokens", "q_proj"]}),
    "head": ("llama", {"target_modules": ["lm_head"]}),
    "embedding and head, DoRA": (
        "llama", {"target_modules": ["embed_tokens", "lm_head"], "use_dora": True},
    ),
    "tokens": ("llama", {"target_modules": ["q_proj"], "trainable_token_indices": [17, 3]}),
    "tokens of both": (
        "llama",
        {
            "target_modules": ["q_proj"],
            "trainable_token_indices": {"embed_tokens": [3, 17], "lm_head": [5]},
        },
    ),
    "tied: tokens": ("qwen2", {"target_modules": ["q_proj"], "trainable_token_indices": [17, 3]}),
    "tied: tokens of both": (
        "qwen2",
        {
            "target_modules": ["q_proj"],
            "trainable_token_indices": {"embed_tokens": [3, 17], "lm_head": [3, 17]},
        },
    ),
    "tied: tokens of each": (
        "qwen2",
        {
            "target_modules": ["q_proj"],
            "trainable_token_indices": {"embed_tokens": [3, 17], "lm_head": [5, 40]},
        },
    ),
    "tied: copied embedding": (
        "qwen2", {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    ),
    "tied: copied both": (
        "qwen2",
        {
            "target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"],
            "ensure_weight_tying": True,
        },
    ),
    "tied: embedding": ("qwen2", {"target_modules": ["embed_tokens"]}),
    "tied: embedding and head": (
        "qwen2", {"target_modules": ["embed_tokens"], "ensure_weight_tying": True},
    ),
    "tied: head": ("qwen2", {"target_modules": ["lm_head"]}),
    "packed": ("phi3", {"target_modules": ["qkv_proj", "gate_up_proj"]}),
    "stored [in, out]": (
        "gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True},
    ),
    "stored [in, out], DoRA, biases": (
        "gpt2",
        {"target_modules": ["c_attn"], "fan_in_fan_out": True, "use_dora": True, "bias": "all"},
    ),
    "experts and router": ("qwen3-moe", {"target_modules": "all-linear"}),
    "experts, nested": ("mixtral", {"target_modules": ["q_proj", "w1", "w2", "w3", "gate"]}),
    "experts, rsLoRA": (
        "mixtral",
        {
            "target_modules": [], "target_parameters": ["experts.down_proj"], "use_rslora": True,
            "rank_pattern": {"experts.down_proj": 3},
        },
    ),
    "router alone": ("mixtral", {"target_modules": [], "target_parameters": ["mlp.gate.weight"]}),
    "a linear's parameter": (
        "llama", {"target_modules": ["k_proj"], "target_parameters": ["q_proj.weight"]},
    ),
    "biases of experts": (
        "gpt-oss",
        {
            "target_modules": ["q_proj"], "bias": "all",
            "target_parameters": ["experts.gate_up_proj", "experts.down_proj"],
        },
    ),
    "experts [in, out]": (
        "gpt-oss",
        {
            "target_modules": ["q_proj", "o_proj"],
            "target_parameters": ["1.mlp.experts.gate_up_proj", "1.mlp.experts.down_proj"],
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_logits_are_those_of_peft(case: str, models: Callable[[str], Path], tmp_path: Path) -> None:
    family, settings = CASES[case]
    check(models(family), make_adapter(models(family), tmp_path / "adapter", **settings))


NAMES = st.sampled_from([
    *LINEAR, ".*v_proj", "model.layers.1.mlp.up_proj", r"layers\.[01]\..*", "(?:q|k)_proj", "proj",
    r"self_attn\.\w+", "^model.*proj", r".*\.\d\.mlp\..*",
])  # fmt: skip
SOME = st.sets(st.sampled_from(LINEAR), min_size=1, max_size=3).map(sorted)
COMBINED = st.fixed_dictionaries(
    {
        "r": st.sampled_from([1, 3, 8, 40]),
        "lora_alpha": st.sampled_from([0, 1.5, 8, -4]),
        "target_modules": st.one_of(
            SOME, st.sampled_from(["all-linear", r".*(q|v|o)_proj"]),
            st.tuples(SOME, st.sampled_from(["embed_tokens", "lm_head"])).map(
                lambda both: [*both[0], both[1]]
            ),
        ),
    },
    optional={
        "rank_pattern": st.dictionaries(NAMES, st.sampled_from([2, 5, 16]), max_size=3),
        "alpha_pattern": st.dictionaries(NAMES, st.sampled_from([2, 0.5, 16]), max_size=3),
        "use_rslora": st.booleans(),
        "use_dora": st.booleans(),
        "lora_bias": st.booleans(),
        "ensure_weight_tying": st.booleans(),
        "bias": st.sampled_from(["none", "all", "lora_only"]),
        "modules_to_save": st.sets(
            st.sampled_from(["embed_tokens", "lm_head", "norm", "o_proj", "input_layernorm"]),
            min_size=1, max_size=2,
        ).map(sorted),
        "trainable_token_indices": st.sampled_from(
            [[3], [5, 3, 17], {"embed_tokens": [17], "lm_head": [3]}, {"lm_head": [4]}]
        ),
    },
)  # fmt: skip


@pytest.mark.slow
@settings(
    max_examples=60, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.filter_too_much],
)  # fmt: skip
@given(family=st.sampled_from(["llama", "qwen2"]), fields=COMBINED)
def test_what_peft_accepts_is_equal_or_refused_by_name(
    family: str, fields: dict[str, Any], models: Callable[[str], Path], tmp_path: Path
) -> None:
    try:
        adapter = make_adapter(models(family), tmp_path / "adapter", **fields)
        adapted_model(models(family), adapter)(torch.tensor([PROMPT]))
    except (ValueError, TypeError, RuntimeError, AttributeError):
        reject()  # PEFT does not take the settings together, or not what it saved.
    try:
        check(models(family), adapter, changes=False)
    except ConfigError as error:
        # Of what contradicts itself, alone.
        assert error.param == "modules_to_save" and "trainable_token_indices" in fields


def test_experts_of_their_own_layers(models: Callable[[str], Path], tmp_path: Path) -> None:
    """Files of transformers 4 have each expert's linears; PEFT fuses them as it loads."""
    generator, tensors = torch.Generator().manual_seed(1), {}
    sizes = {"w1": (64, 96), "w3": (64, 96), "w2": (96, 64)}
    for layer in range(3):
        for expert in range(4):
            for leaf, (inputs, outputs) in sizes.items():
                module = f"model.layers.{layer}.block_sparse_moe.experts.{expert}.{leaf}"
                for part, shape in (("A", (2, inputs)), ("B", (outputs, 2))):
                    value = 0.3 * torch.randn(shape, generator=generator)
                    tensors[f"base_model.model.{module}.lora_{part}.weight"] = value
    adapter = write_adapter(tmp_path / "adapter", tensors, r=2, target_modules=["w1", "w2", "w3"])
    file = PeftFormat.read(adapter)
    weights = reference_model(models("mixtral")).state_dict()
    for change in file.low_rank:
        _, _, layer, _, _, expert, leaf = change.name.split(".")
        name = "down_proj" if leaf == "w2" else "gate_up_proj"
        weight = weights[f"model.layers.{layer}.mlp.experts.{name}"][int(expert)]
        rows = slice(96, None) if leaf == "w3" else slice(0, 96)
        weight[rows] += change.scale * change.b() @ change.a()
    assert len(file.low_rank) == 3 * 4 * 3
    for name, expected in merged_weights(models("mixtral"), adapter).items():
        torch.testing.assert_close(weights[name], expected, msg=name)


@pytest.mark.parametrize(
    ("prompt", "start"),
    [
        pytest.param([1, 9, 7, 8, 4, 5], 2, id="once"),
        pytest.param([1, 7, 8, 4, 7, 8, 5, 7], 4, id="twice"),
        pytest.param([1, 9, 8, 7, 4], None, id="not at all"),
    ],
)
@torch.no_grad()
def test_invocation_tokens_are_those_of_peft(
    prompt: list[int], start: int | None, models: Callable[[str], Path], tmp_path: Path
) -> None:
    adapter = make_adapter(
        models("llama"), tmp_path / "adapter", target_modules=LINEAR, alora_invocation_tokens=[7, 8]
    )
    file = PeftFormat.read(adapter)
    assert file.invocation_tokens == (7, 8)
    ids = torch.tensor([prompt])
    ours = untied(models("llama"))
    plain = ours(ids).logits
    for change in file.low_rank:
        ours.get_submodule(change.name).register_forward_hook(later(change, start))
    expected = adapted_model(models("llama"), adapter).double()(input_ids=ids).logits
    torch.testing.assert_close(ours(ids).logits, expected, rtol=1e-4, atol=1e-4)
    assert torch.equal(plain, expected) == (start is None)


def later(change: LowRank, start: int | None) -> Any:
    """Return a hook that adds a change from a position on."""
    a, b = change.a().double(), change.b().double()

    def hook(module: Any, args: tuple[torch.Tensor], result: torch.Tensor) -> torch.Tensor:
        delta = change.scale * (args[0] @ a.T) @ b.T
        delta[:, : result.shape[1] if start is None else start] = 0
        return result + delta

    return hook


def test_head_of_a_classifier(models: Callable[[str], Path], tmp_path: Path) -> None:
    model = transformers.AutoModelForSequenceClassification.from_pretrained(
        models("llama"), num_labels=3
    )
    adapter = make_adapter(
        model, tmp_path / "adapter", target_modules=["q_proj"], task_type="SEQ_CLS"
    )
    file = PeftFormat.read(adapter)
    stored = load_file(adapter / "adapter_model.safetensors")
    assert file.replaced.keys() == {"score.weight"}
    assert torch.equal(file.replaced["score.weight"](), stored["base_model.model.score.weight"])


def test_copies_of_the_base_are_not_changes(models: Callable[[str], Path], tmp_path: Path) -> None:
    file = check(
        models("llama"),
        make_adapter(models("llama"), tmp_path / "adapter", target_modules=["lm_head", "q_proj"]),
    )
    assert not file.replaced and file.plain
    assert any("lm_head.base_layer.weight" in note for note in file.notes)


# Files made by hand.


@pytest.mark.parametrize(
    "rename",
    [
        pytest.param(lambda key: key.removeprefix("base_model.model."), id="without prefix"),
        pytest.param(lambda key: key.replace(".weight", ".default.weight"), id="adapter's name"),
        pytest.param(lambda key: f"module.{key}", id="data parallel"),
        pytest.param(
            lambda key: key.replace("model.layers", "model._orig_mod.layers"), id="compiled"
        ),
        pytest.param(
            lambda key: key.replace("q_proj", "_fsdp_wrapped_module.q_proj"), id="sharded"
        ),
    ],
)
def test_names_of_other_writers_mean_the_same(rename: Callable[[str], str], tmp_path: Path) -> None:
    plain = PeftFormat.read(write_adapter(tmp_path / "plain", q_proj_tensors()))
    renamed = {rename(key): tensor for key, tensor in q_proj_tensors().items()}
    other = PeftFormat.read(write_adapter(tmp_path / "other", renamed))
    assert [each.name for each in other.low_rank] == ["model.layers.0.self_attn.q_proj"]
    assert other.digest == plain.digest


def test_digest_is_of_what_is_computed(tmp_path: Path) -> None:
    def digest(tensors: dict[str, torch.Tensor], **settings: Any) -> str:
        return PeftFormat.read(write_adapter(tmp_path / "adapter", tensors, **settings)).digest

    first = digest(q_proj_tensors())
    assert digest(dict(reversed(q_proj_tensors().items())), base_model_name_or_path="/x") == first
    assert digest(q_proj_tensors(), r=8, rank_pattern={"q_proj": 2}, inference_mode=True) == first
    assert digest(q_proj_tensors(), lora_alpha=6, r=4, rank_pattern={"q_proj": 2}) != first
    assert digest({key: tensor + 1e-6 for key, tensor in q_proj_tensors().items()}) != first
    assert digest({key: tensor.half() for key, tensor in q_proj_tensors().items()}) != first
    assert digest(q_proj_tensors(Q_PROJ.replace("0", "1"))) != first
    assert digest(q_proj_tensors(), alora_invocation_tokens=[5]) != first


def test_scale_of_rank_stabilized_patterns(tmp_path: Path) -> None:
    settings = {
        "use_rslora": True, "r": 64, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"q_proj": 5}
    }  # fmt: skip
    (change,) = PeftFormat.read(write_adapter(tmp_path, q_proj_tensors(), **settings)).low_rank
    assert change.scale == 5 / math.sqrt(2)


@pytest.mark.parametrize("bias", ["all", "none"])
def test_a_trained_bias_of_a_wrapped_module_is_not_lost(bias: str, tmp_path: Path) -> None:
    tensors = q_proj_tensors(**{"base_layer.gate_bias": torch.ones(3)})
    file = PeftFormat.read(write_adapter(tmp_path, tensors, bias=bias))
    name = "model.layers.0.self_attn.q_proj.gate_bias"
    assert file.replaced.keys() == ({name} if bias == "all" else set())
    assert any("base_layer.gate_bias" in note for note in file.notes) == (bias == "none")


def test_every_field_of_peft_is_known() -> None:
    import peft  # Late: every process collects this file.

    fields = {field.name for field in dataclasses.fields(peft.LoraConfig)}
    known = [peft_config.USED, peft_config.METADATA, peft_config.TRAINING, peft_config.REFUSED]
    assert not fields - set().union(*known)
    assert sum(map(len, known)) == len(set().union(*known)), "a field is in two lists"


def test_fields_of_2023_are_read(tmp_path: Path) -> None:
    fields = {"enable_lora": None, "merge_weights": False, "fan_in_fan_out": False, "bias": "none"}
    file = PeftFormat.read(write_adapter(tmp_path, q_proj_tensors(), **fields))
    assert file.plain and not file.notes


def test_what_is_not_used_is_noted(tmp_path: Path) -> None:
    fields = {"lora_dropout": 0.1, "some_new_field": 3, "target_modules": ["k_proj"]}
    notes = "; ".join(PeftFormat.read(write_adapter(tmp_path, q_proj_tensors(), **fields)).notes)
    for part in ("lora_dropout", "some_new_field", "model.layers.0.self_attn.q_proj"):
        assert part in notes
    assert "k_proj" not in notes
