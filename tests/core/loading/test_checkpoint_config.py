"""config.json without `transformers`: the same answers, the same errors, and no import."""

from __future__ import annotations

import copy
import itertools
import json
import pickle
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from nights import some_by_day

import jackfield
from jackfield.core.config import EngineConfig
from jackfield.core.errors import ConfigError
from jackfield.core.loading import checkpoint_config as module
from jackfield.core.loading.checkpoint_config import Configuration
from jackfield.core.loading.checkpoint_folder import EMBEDDED_MODEL
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.registry import load_plugins
from jackfield.plugins.models import PLAIN as PLAIN_TYPES

pytestmark = pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")
ROOT = Path(jackfield.__file__).resolve().parent
ASKED = re.compile(r'\bhf(?:_config)?\.([a-z]\w*)|getattr\(\s*(?:\w+\.)?hf(?:_config)?,\s*"(\w+)"')
FILE = Path("checkpoint/config.json")
NOTHING = object()
ODD: list[Any] = [None, "odd", -1, 0, 3, 2.5, True, [], ["a"], {}, {"a": 1}]


FAMILY_FILES = ("decoder", *(name for name in PLAIN_TYPES if name != "xlm-roberta"))
PLUGINS = load_plugins()


def checkpoint_config(file: Path, raw: dict[str, Any]) -> Any:
    """As the engine reads it: by what is registered for the model type."""
    model_type = raw.get("model_type")
    known = isinstance(model_type, str) and model_type in PLUGINS["config"]
    plain = PLUGINS["config"].load(model_type) if known else None
    return module.checkpoint_config(file, raw, plain)


def asked_for() -> list[str]:
    """Every attribute of a configuration that the package's code names; of model families, only
    those whose config.json is answered here."""
    names = {"num_labels", "id2label", "pad_token_id", "bos_token_id"}
    paths = [ROOT / "plugins" / "models" / f"{name}.py" for name in FAMILY_FILES]
    for folder in ("core", "plugins/quantization", "plugins/attention"):
        paths += (ROOT / folder).rglob("*.py")
    for path in paths:
        for groups in ASKED.findall(path.read_text()):
            names |= {name for name in groups if name}
    return sorted(names - {"to_dict", "pop"})


NAMES = asked_for()
NOT_OF = {
    "decoder": {"bos_token_id", "is_decoder", "layer_norm_eps", "pad_token_id"},
    "encoder": {"bos_token_id", "rms_norm_eps", "tie_word_embeddings"},
}
EXPERTS = {
    "decoder_sparse_step", "mlp_only_layers", "moe_intermediate_size", "norm_topk_prob",
    "num_experts", "num_experts_per_tok", "num_local_experts",
}  # fmt: skip
MULTIPLIERS = {
    "attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier",
}  # fmt: skip
NOT_OF_FAMILY = {
    "qwen3_moe": MULTIPLIERS,
    "mixtral": MULTIPLIERS | EXPERTS - {"num_local_experts", "num_experts_per_tok"},
    "granite": EXPERTS,
}
"""What no code for decoders, or for encoders, asks."""
RERANKER = {"is_original_qwen3_reranker"}
"""Asked only where `hf_overrides` make a classifier from tokens, and do not say how."""
LLAMA3 = {
    "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
    "original_max_position_embeddings": 8192, "rope_type": "llama3",
}  # fmt: skip
DECODER: dict[str, Any] = {
    "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": 2, "hidden_act": "silu",
    "hidden_size": 4096, "initializer_range": 0.02, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
    "tie_word_embeddings": False, "torch_dtype": "bfloat16", "transformers_version": "4.40.0",
    "use_cache": True, "vocab_size": 32000,
}  # fmt: skip
LLAMA = DECODER | {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "attention_bias": False,
    "mlp_bias": False, "pretraining_tp": 1, "rope_scaling": None,
}  # fmt: skip
LLAMA31 = LLAMA | {
    "bos_token_id": 128000, "eos_token_id": [128001, 128008, 128009], "rope_theta": 500000.0,
    "max_position_embeddings": 131072, "rope_scaling": LLAMA3, "vocab_size": 128256,
}  # fmt: skip
MISTRAL = DECODER | {
    "model_type": "mistral", "architectures": ["MistralForCausalLM"], "sliding_window": 4096,
}  # fmt: skip
QWEN25 = DECODER | {
    "model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643,
    "eos_token_id": 151645, "max_window_layers": 28, "rope_theta": 1000000.0,
    "sliding_window": 131072, "use_sliding_window": False, "vocab_size": 152064,
}  # fmt: skip
QWEN3 = QWEN25 | {
    "model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "attention_bias": False,
    "head_dim": 128, "max_position_embeddings": 40960, "num_hidden_layers": 36,
    "max_window_layers": 36, "rms_norm_eps": 1e-6, "rope_scaling": None, "rope_theta": 1000000,
    "sliding_window": None, "vocab_size": 151936,
}  # fmt: skip
QWEN3_MOE = QWEN3 | {
    "model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "decoder_sparse_step": 1,
    "hidden_size": 2048, "intermediate_size": 6144, "max_window_layers": 48, "mlp_only_layers": [],
    "moe_intermediate_size": 768, "norm_topk_prob": True, "num_attention_heads": 32,
    "num_experts": 128, "num_experts_per_tok": 8, "num_hidden_layers": 48,
    "num_key_value_heads": 4, "output_router_logits": False, "router_aux_loss_coef": 0.001,
}  # fmt: skip
MIXTRAL = DECODER | {
    "model_type": "mixtral", "architectures": ["MixtralForCausalLM"], "num_experts_per_tok": 2,
    "num_local_experts": 8, "output_router_logits": False, "rope_theta": 1000000.0,
    "router_aux_loss_coef": 0.02, "sliding_window": None,
}  # fmt: skip
GRANITE = DECODER | {
    "model_type": "granite", "architectures": ["GraniteForCausalLM"], "attention_bias": False,
    "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "logits_scaling": 8,
    "mlp_bias": False, "residual_multiplier": 0.22, "rope_scaling": None,
}  # fmt: skip
OLMO2 = DECODER | {
    "model_type": "olmo2", "architectures": ["Olmo2ForCausalLM"], "attention_bias": False,
    "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_scaling": None,
    "rope_theta": 500000, "eos_token_id": 100257, "pad_token_id": 100277, "vocab_size": 100352,
}  # fmt: skip
BERT: dict[str, Any] = {
    "_name_or_path": "nreimers/MiniLM-L6-H384-uncased", "architectures": ["BertModel"],
    "attention_probs_dropout_prob": 0.1, "gradient_checkpointing": False, "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1, "hidden_size": 384, "initializer_range": 0.02,
    "intermediate_size": 1536, "layer_norm_eps": 1e-12, "max_position_embeddings": 512,
    "model_type": "bert", "num_attention_heads": 12, "num_hidden_layers": 6, "pad_token_id": 0,
    "position_embedding_type": "absolute", "transformers_version": "4.8.2", "type_vocab_size": 2,
    "use_cache": True, "vocab_size": 30522,
}  # fmt: skip
XLMR = BERT | {
    "architectures": ["XLMRobertaForSequenceClassification"], "model_type": "xlm-roberta",
    "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1, "classifier_dropout": None,
    "id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0}, "layer_norm_eps": 1e-5,
    "max_position_embeddings": 514, "output_past": True, "torch_dtype": "float32",
    "type_vocab_size": 1, "vocab_size": 250002,
}  # fmt: skip
SMALL = {
    "vocab_size": 199, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3,
    "num_attention_heads": 4, "max_position_embeddings": 512, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip


def without(raw: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if name not in names}


def saved(family: str, **changes: Any) -> dict[str, Any]:
    """As `transformers` writes it, in full."""
    hf_config = getattr(transformers, f"{family}Config")(**{**SMALL, **changes})
    written: dict[str, Any] = json.loads(hf_config.to_json_string(use_diff=False))
    return written


PLAIN: dict[str, dict[str, Any]] = {
    "embedded": json.loads((EMBEDDED_MODEL / "config.json").read_text()),
    "qwen3-8b": QWEN3,
    "qwen3-0.6b": QWEN3 | {"hidden_size": 1024, "num_attention_heads": 16, "num_hidden_layers": 28,
                           "intermediate_size": 3072, "tie_word_embeddings": True},
    "qwen3 new": without(QWEN3, "torch_dtype", "rope_theta", "rope_scaling")
    | {"dtype": "bfloat16", "rope_parameters": {"rope_theta": 1000000, "rope_type": "default"}},
    "qwen3 windows": QWEN3
    | {"use_sliding_window": True, "sliding_window": 4096, "max_window_layers": 20},
    "qwen3 types": QWEN3 | {"num_hidden_layers": 2, "sliding_window": 512,
                            "use_sliding_window": True,
                            "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3 yarn": QWEN3 | {"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                                            "original_max_position_embeddings": 10240}},
    "qwen3 reranker": QWEN3 | {"architectures": ["Qwen3ForSequenceClassification"],
                               "classifier_from_token": ["no", "yes"],
                               "is_original_qwen3_reranker": True},
    "qwen2.5": QWEN25,
    "qwen2.5 labels": QWEN25 | {"id2label": {"0": "a", "1": "b", "2": "c"},
                                "problem_type": "regression"},
    "qwen2 yarn": QWEN25 | {"rope_scaling": {"type": "yarn", "factor": 4.0}},
    "llama-3.1": LLAMA31,
    "llama-3.1 new": without(LLAMA31, "rope_scaling", "rope_theta", "torch_dtype")
    | {"dtype": "float16", "rope_parameters": LLAMA3 | {"rope_theta": 500000.0}, "head_dim": 128},
    "llama-2": without(LLAMA, "attention_bias", "mlp_bias", "num_key_value_heads", "rope_theta"),
    "llama linear": LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.0}},
    "llama dynamic": LLAMA | {"rope_scaling": {"type": "dynamic", "factor": 2}},
    "llama both": LLAMA | {"rope_scaling": {"rope_type": "linear", "type": "linear", "factor": 2.0},
                           "rope_parameters": {"rope_type": "dynamic", "factor": 3.0}},
    "llama both dtypes": LLAMA | {"dtype": "float16"},
    "llama no dtype": without(LLAMA, "torch_dtype"),
    "llama quantized": LLAMA | {"quantization_config": {"quant_method": "fp8", "bits": [8]}},
    "mistral-7b": MISTRAL,
    "mistral-7b v0.3": MISTRAL | {"sliding_window": None, "head_dim": None},
    "qwen3-30b-a3b": QWEN3_MOE,
    "qwen3 experts, windows": QWEN3_MOE | {"use_sliding_window": True, "sliding_window": 4096},
    "qwen3 experts, few": without(QWEN3_MOE, "mlp_only_layers", "num_experts", "norm_topk_prob")
    | {"num_local_experts": 16},
    "qwen3 experts, null": QWEN3_MOE | {"mlp_only_layers": None, "decoder_sparse_step": 2},
    "mixtral-8x7b": MIXTRAL,
    "mixtral, defaults": without(MIXTRAL, "rope_theta", "sliding_window"),
    "mixtral head": MIXTRAL | {"head_dim": 96, "sliding_window": 4096},
    "granite": GRANITE,
    "granite, defaults": without(GRANITE, "num_key_value_heads", *MULTIPLIERS),
    "olmo2": without(OLMO2, "bos_token_id"),
    "olmo2, defaults": without(OLMO2, "num_key_value_heads", "attention_bias", "rope_theta"),
    "mistral head": MISTRAL | {"head_dim": 160},
    "minilm": BERT,
    "bert two labels": without(BERT, "position_embedding_type")
    | {"architectures": ["BertForSequenceClassification"],
       "problem_type": "single_label_classification"},
    "cross-encoder": BERT | {"id2label": {"0": "LABEL_0"}, "label2id": {"LABEL_0": 0},
                             "sentence_transformers": {"activation_fn": "torch.nn.Identity"}},
    "reranker": XLMR,
    "roberta": XLMR | {"model_type": "roberta", "architectures": ["RobertaModel"]},
    "matryoshka": XLMR | {"is_matryoshka": True, "matryoshka_dimensions": [64, 128]},
}  # fmt: skip
"""Read without an import, to the last attribute."""
SAVED = {
    "Llama": {}, "Mistral": {"sliding_window": 24}, "Qwen2": {}, "Qwen3": {"head_dim": 32},
    "Qwen3Moe": {"head_dim": 32, "num_experts": 4}, "Mixtral": {"num_local_experts": 4},
    "Granite": {"logits_scaling": 3.0}, "Olmo2": {}, "Bert": {},
    "Roberta": {"pad_token_id": 1}, "XLMRoberta": {"id2label": {0: "x"}},
}  # fmt: skip
DOUBTFUL: dict[str, dict[str, Any]] = {
    "unstated sizes": {"model_type": "llama", "architectures": ["LlamaForCausalLM"]},
    "unstated heads": without(QWEN3, "num_key_value_heads", "head_dim"),
    "unstated window": without(MISTRAL, "sliding_window", "num_key_value_heads"),
    "unstated types": without(XLMR, "pad_token_id", "type_vocab_size", "hidden_act"),
    "generation": LLAMA | {"temperature": 0.7, "max_length": 20},
    "num_labels": BERT | {"num_labels": 5},
    "odd mixture": MIXTRAL | {"num_attention_heads": 4096, "num_key_value_heads": 4096},
    "experts twice": QWEN3_MOE | {"num_local_experts": 64},
    "unstated experts": without(QWEN3_MOE, "num_experts"),
    "odd layers of experts": QWEN3_MOE | {"layer_types": ["full_attention"] * 48},
    "theta null": LLAMA | {"rope_theta": None},
    "longrope": LLAMA | {"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 64,
                                          "long_factor": [1.0] * 64, "factor": 2.0}},
    "yarn betas": LLAMA | {"rope_scaling": {"type": "yarn", "factor": 4.0, "beta_fast": 32,
                                            "original_max_position_embeddings": 8192}},
    "yarn of another length": QWEN3 | {"rope_scaling": {"type": "yarn", "factor": 4.0,
                                       "original_max_position_embeddings": 32768}},
    "partial": LLAMA | {"partial_rotary_factor": 0.5},
    "old types": QWEN3 | {"num_hidden_layers": 1, "layer_types": ["attention"]},
    "token out of range": LLAMA | {"pad_token_id": -1},
    "biased qwen2": QWEN25 | {"attention_bias": True},
    "windowed llama": LLAMA | {"sliding_window": 7},
    "decoding bert": BERT | {"rope_theta": 5.0, "output_attentions": True},
    "an unknown name": LLAMA | {"surprise": {"deep": [1]}},
    "float32 by class": LLAMA | {"torch_dtype": "float64"},
    "an unknown problem": BERT | {"problem_type": "chess"},
    "another family": {"model_type": "gpt2", "n_embd": 64, "n_head": 4},
    "an unknown family": LLAMA | {"model_type": "nobody-knows"},
    "no family": without(LLAMA, "model_type"),
    "odd head": MISTRAL | {"head_dim": 33},
}  # fmt: skip
WRONG: dict[str, dict[str, Any]] = {
    "text size": LLAMA | {"hidden_size": "4096"},
    "float size": LLAMA | {"num_hidden_layers": 2.0},
    "true size": QWEN3 | {"vocab_size": [1]},
    "null size": BERT | {"hidden_size": None},
    "no multiple": LLAMA | {"num_attention_heads": 7},
    "no heads": LLAMA | {"num_attention_heads": 0},
    "eps": QWEN3 | {"rms_norm_eps": "1e-6"},
    "dtype": LLAMA | {"torch_dtype": "bfloat17"},
    "rope": LLAMA | {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
    "rope text": LLAMA | {"rope_scaling": "linear"},
    "types": QWEN3 | {"layer_types": ["full_attention"]},
    "unknown types": QWEN3 | {"num_hidden_layers": 1, "layer_types": ["none"]},
    "labels": BERT | {"id2label": {"zero": "a"}},
    "one label": XLMR | {"problem_type": "single_label_classification"},
    "tokens": LLAMA | {"eos_token_id": [None]},
    "null head": QWEN3 | {"head_dim": None},
    "text of experts": QWEN3_MOE | {"mlp_only_layers": ["1"]},
}


def answers(config: Any) -> dict[str, Any]:
    return {name: getattr(config, name, NOTHING) for name in NAMES}


def by_transformers(raw: dict[str, Any]) -> dict[str, Any]:
    """As it was read before: `transformers`' own object, made with the whole of config.json."""
    raw = copy.deepcopy(raw)
    model_type = raw.pop("model_type", None)
    known = model_type in transformers.CONFIG_MAPPING
    kind = transformers.CONFIG_MAPPING[model_type] if known else transformers.PreTrainedConfig
    config = kind(**raw)
    config.model_type = model_type
    return answers(config)


def test_the_scan_finds_what_models_ask() -> None:
    assert {"rope_parameters", "rms_norm_eps", "num_labels", "layer_types", "dtype"} <= set(NAMES)
    assert len(NAMES) > 35


def assert_plain(raw: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    raw_copy = copy.deepcopy(raw)
    kind = "decoder" if "rms_norm_eps" in raw else "encoder"
    expected = by_transformers(raw)
    with monkeypatch.context() as patch:
        patch.delattr(module, "_whole")
        config = checkpoint_config(FILE, raw_copy)
        field_names = set(NAMES) - NOT_OF[kind] - (RERANKER - raw.keys())
        for name in field_names - NOT_OF_FAMILY.get(raw["model_type"], EXPERTS | MULTIPLIERS):
            actual = getattr(config, name, NOTHING)
            assert (name, actual, type(actual)) == (name, expected[name], type(expected[name]))
    assert answers(config) == expected
    assert config.to_dict() == checkpoint_config(FILE, raw_copy).to_dict()
    assert raw_copy == raw, "the caller's own is left as it is"


@pytest.mark.parametrize("name", PLAIN)
def test_a_plain_config_is_answered_without_transformers(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert_plain(PLAIN[name], monkeypatch)


@pytest.mark.parametrize("family", SAVED)
def test_what_transformers_saves_is_plain(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hf_config = getattr(transformers, f"{family}Config")(**{**SMALL, **SAVED[family]})
    hf_config.architectures, hf_config.dtype = [f"{family}Model"], "float32"
    hf_config.save_pretrained(tmp_path)
    assert_plain(json.loads((tmp_path / "config.json").read_text()), monkeypatch)
    full = hf_config.to_dict()
    assert answers(checkpoint_config(FILE, full)) == by_transformers(full)


def assert_same(raw: dict[str, Any]) -> None:
    """`transformers`' answers, or its words."""
    try:
        expected = by_transformers(raw)
    except Exception as error:  # of many kinds
        with pytest.raises(ConfigError) as caught:
            checkpoint_config(FILE, raw)
        assert str(caught.value).endswith(" ".join(str(error).split()))
    else:
        assert answers(checkpoint_config(FILE, raw)) == expected


@pytest.mark.parametrize("name", PLAIN)
def test_without_any_one_name_the_outcome_stays_that_of_transformers(name: str) -> None:
    for left_out in PLAIN[name]:
        assert_same(without(PLAIN[name], left_out))


def odd_values(name: str) -> list[tuple[str, Any]]:
    """Fields of a configuration, and what each is set to: all odd values in the first configuration
    of its type that has the field, and a third of them, in turn, in its other ones."""
    earlier: set[str] = set()
    others = 0
    for other in itertools.takewhile(lambda other: other != name, PLAIN):
        if PLAIN[other].get("model_type") == PLAIN[name].get("model_type"):
            earlier |= PLAIN[other].keys()
            others += 1
    return [
        (field, odd)
        for number, field in enumerate(PLAIN[name])
        for odd in (ODD[(number + others) % 3 :: 3] if field in earlier else ODD)
    ]


VARIANTS = [name for name in PLAIN if " " in name and name.partition(" ")[0] in PLAIN]
"""Of others, with some fields more; each is tried without each of its fields by day, too."""


@pytest.mark.parametrize("name", some_by_day(PLAIN, PLAIN.keys() - VARIANTS))
def test_with_any_one_value_odd_the_outcome_stays_that_of_transformers(name: str) -> None:
    for changed, odd in odd_values(name):
        assert_same(PLAIN[name] | {changed: odd})


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from(list(PLAIN.values())),
    st.sets(st.sampled_from(NAMES), max_size=3),
    st.dictionaries(st.sampled_from(NAMES), st.sampled_from(ODD), max_size=3),
)
def test_of_any_mixture_the_outcome_stays_that_of_transformers(
    raw: dict[str, Any], left_out: set[str], changes: dict[str, Any]
) -> None:
    # Apart, as values of a file are: `transformers` writes into some of them.
    assert_same(without(raw, *left_out) | {name: copy.deepcopy(changes[name]) for name in changes})


@settings(max_examples=300, deadline=None)
@given(
    st.sampled_from([LLAMA31, MISTRAL, QWEN25, QWEN3, QWEN3_MOE, MIXTRAL]),
    st.dictionaries(
        st.sampled_from([*LLAMA3, "type", "rope_theta", "beta_fast", "partial_rotary_factor"]),
        st.sampled_from(
            [1, 2.0, 4, 8192, 16384, None, "yarn", "linear", "dynamic", "llama3", "default", True]
        ),
    ),
    st.sampled_from(["rope_scaling", "rope_parameters"]),
)
def test_of_any_rope_the_outcome_stays_that_of_transformers(
    raw: dict[str, Any], rope: dict[str, Any], name: str
) -> None:
    assert_same(without(raw, "rope_scaling") | {name: rope})


@pytest.mark.parametrize("name", DOUBTFUL)
def test_a_doubtful_config_has_the_outcome_of_transformers(name: str) -> None:
    """Whether it refuses old types, unknown problems and odd heads depends on its release."""
    assert_same(DOUBTFUL[name])


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_config_is_refused_at_once_in_the_words_of_transformers(name: str) -> None:
    with pytest.raises(Exception) as raised:
        by_transformers(WRONG[name])
    with pytest.raises(ConfigError) as caught:
        checkpoint_config(FILE, WRONG[name])
    family = WRONG[name]["model_type"]
    text = " ".join(str(raised.value).split())
    assert str(caught.value) == (f"model: {FILE} is not a valid {family!r} configuration: {text}")


@pytest.mark.parametrize(
    "overrides",
    [
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0,
                          "original_max_position_embeddings": 10240}},
        {"max_position_embeddings": 777, "rope_theta": 5e5},
        {"head_dim": 64, "surprise": 1},
    ],
)  # fmt: skip
def test_overrides_come_first(overrides: dict[str, Any], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    options = EngineConfig(model=str(tmp_path), hf_overrides=overrides, device="cpu")
    actual = resolve_model_config(options).hf_config
    assert answers(actual) == by_transformers(QWEN3 | overrides)


def test_it_passes_for_the_object_of_transformers() -> None:
    def fresh() -> Any:
        return checkpoint_config(FILE, QWEN3)

    real = module._whole(FILE, QWEN3)
    assert type(fresh()) is Configuration
    assert isinstance(fresh(), transformers.Qwen3Config) and not isinstance(fresh(), dict)
    assert fresh() == real and real == fresh() and fresh() == fresh()
    assert repr(fresh()) == repr(real) and list(fresh()) == list(real)
    assert vars(fresh()) == vars(real)
    assert fresh().to_dict() == real.to_dict()
    assert transformers.AutoModel.from_config(checkpoint_config(FILE, saved("Qwen3"))) is not None
    for copied in (pickle.loads(pickle.dumps(fresh())), copy.deepcopy(fresh()), copy.copy(fresh())):
        assert answers(copied) == answers(real)
    changed = fresh()
    changed.hidden_size = 64
    assert changed.hidden_size == 64 == pickle.loads(pickle.dumps(changed)).hidden_size
    with pytest.raises(AttributeError, match="surprise"):
        _ = fresh().surprise


START = """
import sys
from jackfield import SamplingParams
from jackfield.entrypoints.offline import LLM

options = {"device": "cpu", "max_model_len": 64, "num_gpu_blocks_override": 16}
for model, more in ("", {}), (sys.argv[1], {"load_format": "dummy"}):
    with LLM(model, **options, **more) as llm:
        [output] = llm.generate("Hello", SamplingParams(max_tokens=1, ignore_eos=True))
        assert len(output.outputs[0].token_ids) == 1
print("transformers" in sys.modules)
"""


@pytest.mark.slow
def test_a_start_and_a_first_token_import_no_transformers(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4,
             "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 1536,
             "bos_token_id": None, "eos_token_id": 2}  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | sizes))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((EMBEDDED_MODEL / name).read_bytes())
    completed = subprocess.run(
        [sys.executable, "-c", START, str(tmp_path)], capture_output=True, text=True
    )
    assert completed.returncode == 0, completed.stderr
    assert completed.stdout == "False\n"


SERVE = """
import sys
from jackfield.entrypoints.cli.main import main

main(["serve", "--port", "0", "--device", "cpu", "--max-model-len", "64",
      "--num-gpu-blocks-override", "16"])
print("transformers" in sys.modules)
"""


def test_a_server_and_its_first_token_import_no_transformers() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", SERVE], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        match = re.search(r"http://127\.0\.0\.1:\d+", process.stdout.readline())
        try:
            assert match is not None
            body = {"prompt": "Hello", "max_tokens": 1, "ignore_eos": True}
            response = httpx.post(f"{match[0]}/v1/completions", json=body, timeout=300)
            assert response.json()["usage"]["completion_tokens"] == 1
        finally:
            process.send_signal(signal.SIGINT)
            stdout, complained = process.communicate(timeout=300)
        assert stdout.splitlines()[-1] == "False", complained
