"""Every model of `transformers` that generates is served by a family or on transformers' modules,
or refused for a reason that it names."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import transformers
from packaging.version import Version
from test_fallback import CASES as FALLBACK
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
)

from jackfield import EngineConfig
from jackfield.core.errors import ConfigError
from jackfield.core.loading.build import load_model
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.nn.operations import Operations
from jackfield.core.parallel.ranks import ONE_RANK
from jackfield.core.registry import Registry, load_plugins
from jackfield.plugins.models import ARCHITECTURES, SAME
from jackfield.plugins.models.refused import ELSEWHERE, REFUSED

LISTED = sorted({
    *MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
    *MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values(),
})  # fmt: skip

OF_VLLM = """
    AfmoeForCausalLM ApertusForCausalLM AquilaForCausalLM AquilaModel ArceeForCausalLM
    ArcticForCausalLM BaiChuanForCausalLM BaichuanForCausalLM BailingMoeForCausalLM
    BailingMoeV2ForCausalLM BambaForCausalLM BloomForCausalLM ChatGLMForConditionalGeneration
    ChatGLMModel Cohere2ForCausalLM CohereForCausalLM CwmForCausalLM DbrxForCausalLM
    DeciLMForCausalLM DeepseekForCausalLM DeepseekV2ForCausalLM DeepseekV32ForCausalLM
    DeepseekV3ForCausalLM Dots1ForCausalLM Ernie4_5ForCausalLM Ernie4_5_ForCausalLM
    Ernie4_5_MoeForCausalLM Exaone4ForCausalLM ExaoneForCausalLM ExaoneMoEForCausalLM
    Fairseq2LlamaForCausalLM FalconForCausalLM FalconH1ForCausalLM FalconMambaForCausalLM
    FlexOlmoForCausalLM GPT2LMHeadModel GPTBigCodeForCausalLM GPTJForCausalLM
    GPTNeoXForCausalLM Gemma2ForCausalLM Gemma3ForCausalLM Gemma3nForCausalLM GemmaForCausalLM
    Glm4ForCausalLM Glm4MoeForCausalLM Glm4MoeLiteForCausalLM GlmForCausalLM
    GlmMoeDsaForCausalLM GptOssForCausalLM GraniteForCausalLM GraniteMoeForCausalLM
    GraniteMoeHybridForCausalLM GraniteMoeSharedForCausalLM GritLM HCXVisionForCausalLM
    HunYuanDenseV1ForCausalLM HunYuanMoEV1ForCausalLM IQuestCoderForCausalLM
    IQuestLoopCoderForCausalLM InternLM2ForCausalLM InternLM3ForCausalLM InternLMForCausalLM
    Jais2ForCausalLM JambaForCausalLM KimiLinearForCausalLM LLaMAForCausalLM Lfm2ForCausalLM
    Lfm2MoeForCausalLM Llama4ForCausalLM LlamaForCausalLM LongcatFlashForCausalLM
    MPTForCausalLM Mamba2ForCausalLM MambaForCausalLM MiMoForCausalLM MiMoV2FlashForCausalLM
    MiniCPM3ForCausalLM MiniCPMForCausalLM MiniMaxForCausalLM MiniMaxM1ForCausalLM
    MiniMaxM2ForCausalLM MiniMaxText01ForCausalLM MistralForCausalLM MistralLarge3ForCausalLM
    MixtralForCausalLM MptForCausalLM NemotronForCausalLM NemotronHForCausalLM
    NemotronHPuzzleForCausalLM OPTForCausalLM Olmo2ForCausalLM Olmo3ForCausalLM
    OlmoForCausalLM OlmoHybridForCausalLM OlmoeForCausalLM OrionForCausalLM OuroForCausalLM
    PanguEmbeddedForCausalLM PanguProMoEV2ForCausalLM PanguUltraMoEForCausalLM
    Param2MoEForCausalLM PersimmonForCausalLM Phi3ForCausalLM PhiForCausalLM PhiMoEForCausalLM
    Plamo2ForCausalLM Plamo3ForCausalLM QWenLMHeadModel Qwen2ForCausalLM Qwen2MoeForCausalLM
    Qwen3ForCausalLM Qwen3MoeForCausalLM Qwen3NextForCausalLM RWForCausalLM
    SarvamMLAForCausalLM SarvamMoEForCausalLM SeedOssForCausalLM SolarForCausalLM
    SolarOpenForCausalLM StableLMEpochForCausalLM StableLmForCausalLM Starcoder2ForCausalLM
    Step1ForCausalLM Step3TextForCausalLM Step3p5ForCausalLM TeleChat2ForCausalLM
    TeleChat3ForCausalLM TeleChatForCausalLM TeleFLMForCausalLM XverseForCausalLM
    Zamba2ForCausalLM
"""
"""Names that vLLM's registry has for families that are served here, or refused."""


def refusal_of(architecture: str) -> ConfigError:
    model_config = cast(Any, SimpleNamespace(architecture=architecture, hf_config=None))
    with pytest.raises(ConfigError) as caught:
        load_model(
            load_plugins(), EngineConfig(), model_config, torch.device("cpu"), Operations(),
            ONE_RANK, None,
        )  # fmt: skip
    return caught.value


def test_each_model_of_transformers_is_served_or_refused_with_a_reason() -> None:
    registry = load_plugins()["model"]
    own = {name for names in ARCHITECTURES.values() for name in names} | set(SAME)
    refused = {name: reason for reason, names in REFUSED.items() for name in names}
    assert not (own | set(registry.text_parts)) & set(refused), "what is served is not refused"
    assert sum(len(names) for names in REFUSED.values()) == len(refused), "one reason for each"
    assert not set(FALLBACK) & set(refused), "what runs on transformers' modules is not refused"
    for name in LISTED:
        if name not in registry and name not in FALLBACK and registry.text_part(name) is None:
            assert registry.refusal(name) == refused[name]
    if Version(transformers.__version__) >= Version("5.24"):  # Older ones lack some.
        assert set(refused) <= set(LISTED) | set(ELSEWHERE)
        assert set(ELSEWHERE) <= set(refused) - set(LISTED)


def test_families_have_the_names_that_vllm_has() -> None:
    registry = load_plugins()["model"]
    for name in OF_VLLM.split():
        served = name in registry or registry.text_part(name) is not None
        assert served or registry.refusal(name) is not None, name


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("DeepseekVLV2ForCausalLM", "by code that only its checkpoint has"),
        ("Ernie4_5_VLMoeForConditionalGeneration", "whether a token is text or a picture's"),
        ("KeyeForConditionalGeneration", "transformers has no causal model"),
    ],
)
def test_a_refusal_is_said_before_what_a_configuration_lacks(
    name: str, reason: str, tmp_path: Path
) -> None:
    """Sizes of such models are in a part of it."""
    raw = {"architectures": [name], "model_type": "its_own", "language_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    with pytest.raises(ConfigError, match=f"{name}.* is not supported.*{reason}"):
        resolve_model_config(EngineConfig(model=str(tmp_path)), load_plugins())


@pytest.mark.parametrize("reason", REFUSED)
def test_a_refusal_names_the_architecture_and_the_reason(reason: str) -> None:
    for name in REFUSED[reason][:1]:
        error = refusal_of(name)
        assert repr(name) in error.message
        assert reason in error.message
        assert error.param == "model"


def test_an_unknown_architecture_is_refused_with_what_there_is() -> None:
    error = refusal_of("NobodyForCausalLM")
    assert "LlamaForCausalLM, " in error.message


def test_a_plugin_may_serve_what_was_refused() -> None:
    registry: Registry[Any] = Registry("model")
    registry.refuse("MineForCausalLM", "nobody wrote it")
    assert registry.refusal("MineForCausalLM") == "nobody wrote it"
    assert registry.refused == ("MineForCausalLM",)
    registry.add("MineForCausalLM", "mine:MineForCausalLM")
    assert registry.refusal("MineForCausalLM") is None
    assert not registry.refused
