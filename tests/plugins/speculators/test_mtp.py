"""Layers of the served checkpoint that predict further tokens, beside blocks of `transformers`."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from drafted import HiddenStates, check_drafts, config_of, requests, serve
from nights import some_by_day
from safetensors.torch import load_file, save_file

from jackfield.core.errors import ConfigError

from helpers import COMMON

LATENT = {
    "kv_lora_rank": 24, "q_lora_rank": 20, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8,
    "v_head_dim": 10, "head_dim": 8, "num_key_value_heads": 4,
}  # fmt: skip
MIXTURE = {
    "n_routed_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "n_shared_experts": 1, "first_k_dense_replace": 1, "n_group": 2, "topk_group": 1,
    "norm_topk_prob": True, "routed_scaling_factor": 1.5,
}  # fmt: skip
ERNIE = {
    "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 32, "moe_num_shared_experts": 1,
    "moe_layer_start_index": 1, "moe_layer_end_index": 2, "moe_layer_interval": 1,
    "use_bias": False,
}  # fmt: skip
LAYERS = 2
NEXT = {
    "head_dim": 16, "linear_num_value_heads": 4, "linear_num_key_heads": 2,
    "linear_key_head_dim": 8, "linear_value_head_dim": 8, "linear_conv_kernel_dim": 4,
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32, "partial_rotary_factor": 0.5,
    "layer_types": ["linear_attention", "full_attention", "full_attention"],
}  # fmt: skip


class Case:
    """A checkpoint with such a layer, and what `transformers` computes with it."""

    hidden_first, zero_first, normed = False, True, True
    recycles = "normed"
    seed = 5
    depth = "num_hidden_layers"
    window: int | None = None
    rope_type: tuple[str, ...] = ()
    axes: int | None = None

    def __init__(self, folder: Path, family: str, architecture: str, sizes: dict[str, Any]) -> None:
        """The layer is one more of the model's, renamed."""
        torch.manual_seed(self.seed)
        config = getattr(transformers, f"{family}Config")(
            **{**COMMON, "tie_word_embeddings": False, **sizes, self.depth: LAYERS + 1,
               "initializer_range": 0.3}
        )  # fmt: skip
        self.model = transformers.AutoModelForCausalLM.from_config(config).eval()
        for name, each in (*self.model.named_parameters(), *self.model.named_buffers()):
            if "norm" in name or name.endswith("e_score_correction_bias"):
                each.data.add_(0.2 * torch.randn_like(each))
        self.model.save_pretrained(folder)
        size = config.hidden_size
        self.extra = {
            "enorm": 1 + 0.3 * torch.randn(size), "hnorm": 1 + 0.3 * torch.randn(size),
            "eh_proj": torch.randn(size, 2 * size) / size**0.5,
            "norm": 1 + 0.3 * torch.randn(size),
        }  # fmt: skip
        self.layer = self.model.model.layers[LAYERS]
        self.eps = config.rms_norm_eps
        tensors = load_file(folder / "model.safetensors")
        block = f"model.layers.{LAYERS}."
        own = {name: tensors.pop(name) for name in list(tensors) if name.startswith(block)}
        tensors |= self.named({name.removeprefix(block): each for name, each in own.items()})
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        raw = json.loads((folder / "config.json").read_text())
        raw |= {
            "architectures": [architecture], self.depth: LAYERS,
            "num_nextn_predict_layers": 1,
        }  # fmt: skip
        if self.depth != "num_hidden_layers":
            raw.pop("num_hidden_layers", None)
        for name in ("layer_types", "mlp_layer_types"):
            if isinstance(raw.get(name), list):
                raw[name] = raw[name][:LAYERS]
        (folder / "config.json").write_text(json.dumps(raw))
        self.folder = folder
        self.model.model.layers = self.model.model.layers[:LAYERS]
        self.states = HiddenStates(self.last_states)

    def named(self, block: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The layer's tensors by their names in the checkpoint."""
        raise NotImplementedError

    def rms(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.extra[name]

    def last_states(self, tokens: list[int]) -> torch.Tensor:
        output = self.model.model(torch.tensor([tokens]), use_cache=False)
        states: torch.Tensor = output.last_hidden_state
        return states

    @torch.no_grad()
    def drafts(self, known: list[int], count: int) -> list[int]:
        model = self.model
        (states,) = self.states.of(known[:-1])
        following, drafts = torch.tensor(known[1:]), []
        for _ in range(count):
            out = self.block(following, states)
            normed = self.rms(out, "norm") if self.normed else out
            drafts.append(int((normed[-1:] @ model.lm_head.weight.T).argmax()))
            following = torch.cat((following, torch.tensor(drafts[-1:])))
            recycled = out if self.recycles == "block" else normed
            states = torch.cat((states, recycled[-1:]))
        return drafts

    def block(self, following: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
        embedded = self.model.model.embed_tokens(following).clone()
        if self.zero_first:
            embedded[0] = 0.0
        halves = [self.rms(embedded, "enorm"), self.rms(states, "hnorm")]
        x = torch.cat(halves[::-1] if self.hidden_first else halves, -1) @ self.extra["eh_proj"].T
        count = len(x)
        places = torch.arange(count)[None]
        mask = torch.full((1, 1, count, count), float("-inf")).triu(1)
        if self.window is not None:
            mask += torch.full_like(mask, float("-inf")).tril(-self.window)
        out = self.run_layer(
            x[None], attention_mask=mask, position_ids=places,
            position_embeddings=self.model.model.rotary_emb(
                x[None], places if self.axes is None else places.expand(self.axes, 1, -1),
                *self.rope_type,
            ),
        )  # fmt: skip
        return (out[0] if isinstance(out, tuple) else out)[0]

    def run_layer(self, x: torch.Tensor, **given: Any) -> Any:
        return self.layer(x, **given)


class Deepseek(Case):
    def named(self, block: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = {
            "enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "norm": "shared_head.norm",
        }  # fmt: skip
        own = {f"{names[name]}.weight": each for name, each in self.extra.items()}
        weights = self.model.state_dict()
        copies = {
            "shared_head.head.weight": weights["lm_head.weight"].clone(),
            "embed_tokens.weight": weights["model.embed_tokens.weight"].clone(),
        }
        return {f"model.layers.{LAYERS}.{n}": t for n, t in (own | copies | block).items()}


class Glm(Deepseek):
    recycles = "block"


class MiMo(Case):
    hidden_first = True

    def named(self, block: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = {
            "enorm": "token_layernorm", "hnorm": "hidden_layernorm", "eh_proj": "input_proj",
            "norm": "final_layernorm",
        }  # fmt: skip
        own = {f"{names[name]}.weight": each for name, each in self.extra.items()}
        return {f"model.mtp_layers.0.{n}": t for n, t in (own | block).items()}


class Ernie(Case):
    normed = False

    def named(self, block: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        own = {
            "model.mtp_emb_norm.0.weight": self.extra["enorm"],
            "model.mtp_hidden_norm.0.weight": self.extra["hnorm"],
            "model.mtp_linear_proj.0.weight": self.extra["eh_proj"],
        }
        return own | {f"model.mtp_block.0.{name}": tensor for name, tensor in block.items()}


class Qwen(Case):
    """Norms' weights are stored less one, and the first embedding is read."""

    zero_first = False

    def named(self, block: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        names = {
            "enorm": "pre_fc_norm_embedding", "hnorm": "pre_fc_norm_hidden", "eh_proj": "fc",
            "norm": "norm",
        }  # fmt: skip
        own = {
            f"mtp.{names[name]}.weight": each - float(each.dim() == 1)
            for name, each in self.extra.items()
        }
        return own | {f"mtp.layers.0.{name}": tensor for name, tensor in block.items()}


class Qwen35(Qwen):
    axes = 3


class DenseQwen(Qwen35):
    seed = 6
    """With 5 two tokens are as likely."""


class Hunyuan(Deepseek):
    """The last norm has another name."""

    def named(self, block: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        return {
            name.replace("shared_head.norm", "final_layernorm"): tensor
            for name, tensor in super().named(block).items()
        }


class Exaone(Qwen):
    """Norms' weights are stored as they are."""

    window = 12

    def named(self, block: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        self.extra, plain = (
            {name: each + float(each.dim() == 1) for name, each in self.extra.items()},
            self.extra,
        )
        found = super().named(block)
        self.extra = plain
        return found


class MiMoV2(Case):
    zero_first = False
    window, rope_type = 12, ("sliding_attention",)

    def named(self, block: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        own = {
            f"{'final_layernorm' if name == 'norm' else name}.weight": each
            for name, each in self.extra.items()
        }
        named = {
            name.replace("post_attention_layernorm", "pre_mlp_layernorm")
            .replace("self_attn.sinks", "self_attn.attention_sink_bias"): each
            for name, each in block.items()
        }  # fmt: skip
        return {f"model.mtp.layers.0.{name}": each for name, each in (own | named).items()}


class Longcat(Case):
    """The first half of a layer, without its mixture."""

    zero_first = False
    depth = "num_layers"

    def named(self, block: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        own = {
            "model.mtp.layers.0.enorm.m.weight": self.extra["enorm"],
            "model.mtp.layers.0.hnorm.m.weight": self.extra["hnorm"],
            "model.mtp.layers.0.eh_proj.weight": self.extra["eh_proj"],
            "model.mtp.norm.weight": self.extra["norm"],
            "model.mtp.embed_tokens.weight": self.model.model.embed_tokens.weight.clone(),
        }
        for name, each in block.items():
            first, _, rest = name.partition(".0.")
            if rest and not first.startswith("mlp."):
                part = "transformer_layer.mlp" if first == "mlps" else first
                own[f"model.mtp.layers.0.{part}.{rest}"] = each
        return own

    def run_layer(self, x: torch.Tensor, **given: Any) -> Any:
        layer = self.layer
        normed = layer.input_layernorm[0](x)
        x = x + layer.self_attn[0](hidden_states=normed, **given)[0]
        return x + layer.mlps[0](layer.post_attention_layernorm[0](x))


INDEXED = {**MIXTURE, **LATENT, "index_topk": 12, "index_head_dim": 16, "index_n_heads": 64}
"""With fewer heads some keys have a score of 0, and which of equal ones is chosen is undefined."""
EXPERTS = {
    "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
    "num_shared_experts": 1, "head_dim": 16,
}  # fmt: skip
WINDOWS = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 12, "mlp_layer_types": ["dense", "sparse", "dense"],
}  # fmt: skip
CASES: dict[str, Callable[[Path], Case]] = {
    "DeepseekV3ForCausalLM": lambda folder: Deepseek(
        folder, "DeepseekV3", "DeepseekV3ForCausalLM", {**MIXTURE, **LATENT}
    ),
    "Glm4MoeForCausalLM": lambda folder: Glm(
        folder, "Glm4Moe", "Glm4MoeForCausalLM",
        {**MIXTURE, "head_dim": 16, "use_qk_norm": True, "attention_bias": True,
         "partial_rotary_factor": 0.5},
    ),
    "MiMoForCausalLM": lambda folder: MiMo(folder, "Qwen2", "MiMoForCausalLM", {}),
    "Qwen3NextForCausalLM": lambda folder: Qwen(
        folder, "Qwen3Next", "Qwen3NextForCausalLM", NEXT
    ),
    # The last of its layers has no experts.
    "Ernie4_5_MoeForCausalLM": lambda folder: Ernie(
        folder, "Ernie4_5_Moe", "Ernie4_5_MoeForCausalLM",
        {**ERNIE, "moe_layer_end_index": LAYERS - 1, "head_dim": 16},
    ),
    "DeepseekV32ForCausalLM": lambda folder: Deepseek(
        folder, "DeepseekV32", "DeepseekV32ForCausalLM", INDEXED
    ),
    # Its own has an indexer, though the model's last layer shares one.
    "GlmMoeDsaForCausalLM": lambda folder: Deepseek(
        folder, "GlmMoeDsa", "GlmMoeDsaForCausalLM",
        {**INDEXED, "indexer_types": ["full", "shared", "full"]},
    ),
    "Glm4MoeLiteForCausalLM": lambda folder: Glm(
        folder, "Glm4MoeLite", "Glm4MoeLiteForCausalLM", {**MIXTURE, **LATENT}
    ),
    "HYV3ForCausalLM": lambda folder: Hunyuan(folder, "HYV3", "HYV3ForCausalLM", EXPERTS),
    "ExaoneMoeForCausalLM": lambda folder: Exaone(
        folder, "ExaoneMoe", "ExaoneMoeForCausalLM",
        {**EXPERTS, **WINDOWS, "n_group": 2, "topk_group": 1},
    ),
    "MiMoV2FlashForCausalLM": lambda folder: MiMoV2(
        folder, "MiMoV2Flash", "MiMoV2FlashForCausalLM",
        {**MIXTURE, **WINDOWS, "n_shared_experts": None, "head_dim": 16, "v_head_dim": 12,
         "num_key_value_heads": 1, "rope_parameters": {
             kind: {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": 0.5}
             for kind, base in (("full_attention", 500.0), ("sliding_attention", 100.0))
         }},
    ),
    "LongcatFlashForCausalLM": lambda folder: Longcat(
        folder, "LongcatFlash", "LongcatFlashForCausalLM",
        {**LATENT, "num_hidden_layers": 2 * (LAYERS + 1), "ffn_hidden_size": 48,
         "expert_ffn_hidden_size": 32, "n_routed_experts": 6, "moe_topk": 2, "zero_expert_num": 2,
         "routed_scaling_factor": 1.5},
    ),
    "Qwen3_5ForCausalLM": lambda folder: DenseQwen(
        folder, "Qwen3_5Text", "Qwen3_5ForCausalLM", NEXT
    ),
    "Qwen3_5MoeForCausalLM": lambda folder: Qwen35(
        folder, "Qwen3_5MoeText", "Qwen3_5MoeForCausalLM", NEXT
    ),
}  # fmt: skip


BY_NIGHT = (
    "DeepseekV32ForCausalLM", "Glm4MoeLiteForCausalLM", "GlmMoeDsaForCausalLM",
    "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM",
)  # fmt: skip
"""Whose layer is that of another family, before a block that is tested as part of the model."""


@pytest.mark.parametrize("name", some_by_day(CASES, CASES.keys() - BY_NIGHT))
async def test_the_layer_drafts_what_transformers_computes(name: str, tmp_path: Path) -> None:
    case = CASES[name](tmp_path)
    count = 1 if name.startswith(("MiMo", "Ernie")) else 3
    speculative: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": count}
    stats = await check_drafts(case.folder, speculative, case.drafts, asked=requests(7))
    assert stats.spec_decode_num_draft_tokens > 0


@pytest.mark.parametrize("name", ["MiMoForCausalLM", "DeepseekV3ForCausalLM"])
async def test_the_last_stage_has_the_layer_and_embeddings(name: str, tmp_path: Path) -> None:
    case = CASES[name](tmp_path)
    speculative: dict[str, Any] = {"method": "mtp", "num_speculative_tokens": 1}
    await check_drafts(case.folder, speculative, case.drafts, stages=2)


async def test_old_names_and_the_checkpoints_number_of_drafts(tmp_path: Path) -> None:
    case = CASES["MiMoForCausalLM"](tmp_path)
    config = config_of(case.folder, speculative_config={"method": "mimo_mtp"})
    _, stats = await serve(config, requests(2))
    assert set(stats.spec_decode_num_accepted_tokens_per_pos) == {0}


async def test_auto_drafts_with_what_the_checkpoint_carries(tmp_path: Path) -> None:
    """Or without drafts: no layers, or ones that are not served."""
    case = CASES["MiMoForCausalLM"](tmp_path)
    options: dict[str, Any] = {"speculative_config": {"method": "auto"}}
    _, stats = await serve(config_of(case.folder, **options), requests(2))
    assert set(stats.spec_decode_num_accepted_tokens_per_pos) == {0}
    raw = json.loads((tmp_path / "config.json").read_text())
    for change in ({"num_nextn_predict_layers": 0}, {"architectures": ["Qwen2ForCausalLM"]}):
        (tmp_path / "config.json").write_text(json.dumps({**raw, **change}))
        config = config_of(case.folder, load_format="dummy", **options)
        _, stats = await serve(config, requests(2))
        assert not stats.spec_decode_num_accepted_tokens_per_pos


async def test_what_mtp_does_not_serve_is_said(tmp_path: Path) -> None:
    case = CASES["MiMoForCausalLM"](tmp_path)

    async def refused(**speculative: Any) -> str:
        config = config_of(case.folder, speculative_config={"method": "mtp", **speculative})
        with pytest.raises(ConfigError) as error:
            await serve(config, requests(1))
        return error.value.message

    assert "num_speculative_tokens to 1" in await refused(num_speculative_tokens=2)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.mtp_layers.0.input_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(Exception, match=r"missing tensors: .*eh_proj"):
        await refused()
    raw = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(
        json.dumps({**raw, "architectures": ["Qwen2ForCausalLM"]})
    )
    case.folder.joinpath("model.safetensors").unlink()
    config = config_of(case.folder, load_format="dummy", speculative_config={"method": "mtp"})
    with pytest.raises(ConfigError, match="mtp serves no Qwen2ForCausalLM"):
        await serve(config, requests(1))
