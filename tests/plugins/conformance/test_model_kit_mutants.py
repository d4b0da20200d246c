"""The kit of models notices planted bugs, and plants no field that a family has not got."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from mutants import Mutant, kit_of, mutant_tests, plugin_of, run_kit, subclass
from torch import nn

from jackfield.core.loading.weight_map import Shard, WeightMap
from jackfield.plugins.conformance.models import TINY, ModelKit, tiny
from jackfield.plugins.models.decoder import Block, Decoder, SelfAttention
from jackfield.plugins.models.llama import LlamaForCausalLM
from jackfield.plugins.models.mixtral import MixtralForCausalLM


class Kit(ModelKit):
    name = "SubjectForCausalLM"
    reference = transformers.LlamaForCausalLM
    config = {"tie_word_embeddings": False, "attention_bias": True}
    plugin = plugin_of("model", "SubjectForCausalLM", LlamaForCausalLM)


def planted(**changes: Any) -> type:
    return subclass(LlamaForCausalLM, **changes)


def with_attention(**changes: Any) -> type:
    return planted(attention=subclass(SelfAttention, **changes))


def with_decoder(**changes: Any) -> type:
    return planted(decoder=subclass(Decoder, **changes))


class LastNorm(Decoder):
    """With an eps of its own in the last norm alone."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.norm.eps = 1e-6


class OneLayerShort(Decoder):
    def forward(self, input_ids: torch.Tensor, context: Any) -> torch.Tensor:
        hidden = self.embed(input_ids, context.positions)
        for layer, rotary in list(zip(self.layers, self.rotaries, strict=True))[:-1]:
            hidden = layer(hidden, rotary, context)
        return hidden


class SwappedNorms(Block):
    def forward(self, hidden: torch.Tensor, rotary: Any, context: Any) -> torch.Tensor:
        hidden = self.self_attn(hidden, self.post_attention_layernorm, rotary, context)
        out: torch.Tensor = self.mlp(hidden, self.input_layernorm)
        return out


def mean_over_the_step(self: Any, input_ids: torch.Tensor, context: Any) -> torch.Tensor:
    hidden = Decoder.forward(self, input_ids, context)
    return hidden + 0.01 * hidden.mean(0, keepdim=True)


def positions_of_the_step(self: Any, qkv: torch.Tensor, rotary: Any, context: Any) -> torch.Tensor:
    import dataclasses

    own = torch.cat([torch.arange(n) for n in context.layout.query_start.diff().tolist()])
    return SelfAttention.heads(self, qkv, rotary, dataclasses.replace(context, positions=own))


def first_rows_only(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    logits = LlamaForCausalLM.compute_logits(self, hidden)
    return logits + 0.02 * logits[:1]


def sums_by_itself(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    logits = LlamaForCausalLM.compute_logits(self, hidden)
    return logits - logits.mean(-1, keepdim=True)


def other_scale(self: Any, hf: Any, layer: int) -> Any:
    import msgspec

    return msgspec.structs.replace(SelfAttention.spec(self, hf, layer), scale=0.3)


def windowed(hf: Any, layer: int) -> int:
    return 16


def wide_layers(self: Any, config: Any, build: Any) -> None:
    LlamaForCausalLM.__init__(self, config, build)
    self.model.norm.weight = nn.Parameter(self.model.norm.weight.float())


class LosesABias(LlamaForCausalLM):
    def after_loading(self) -> None:
        with torch.no_grad():
            self.model.layers[0].self_attn.o_proj.bias.zero_()


LLAMA = LlamaForCausalLM.weight_map
SWAPPED = WeightMap(
    stacked={**LLAMA.stacked, "gate_proj": Shard("gate_up_proj", "up"),
             "up_proj": Shard("gate_up_proj", "gate")},
    tied=LLAMA.tied, prefixes=LLAMA.prefixes,
)  # fmt: skip
LENIENT = WeightMap(
    stacked=LLAMA.stacked, tied=LLAMA.tied, prefixes=LLAMA.prefixes, ignored=("nobody",)
)

LOGITS, SPLIT = (
    "test_logits_equal_the_reference", "test_any_split_of_the_prompt_gives_the_same_logits",
)  # fmt: skip
BESIDE = "test_what_else_is_in_the_batch_changes_nothing"
ADAPTERS = "test_adapters_change_layers_as_in_the_reference"
BITS = "test_the_batch_changes_no_bit"
SOME = "test_logits_of_some_rows_need_no_others"
# The planted code touches a layer or norm that some stages have not got.
STAGES = "test_stages_compute_one_after_another_what_one_rank_does"
DTYPES = "test_builds_and_runs_in_every_dtype"
GREEDY, PREFIX = (
    "test_greedy_tokens_equal_the_reference", "test_a_prefix_hit_gives_the_same_answer",
)  # fmt: skip
REACHES = "test_every_tensor_of_the_checkpoint_reaches_a_parameter"
UNKNOWN = "test_a_tensor_that_nothing_uses_is_refused_by_name"
WRONG_FROM_16_TOKENS = (LOGITS, DTYPES, GREEDY, PREFIX)
"""Texts that adapters are checked with are shorter than the window."""
WRONG = (*WRONG_FROM_16_TOKENS, ADAPTERS)


class HeedsNoRange(transformers.LlamaForCausalLM):
    """Of a family whose class has a size of its own for random weights."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(std=0.006)


SMALL = {"reference": HeedsNoRange, "config": {"tie_word_embeddings": False}}


def lost_in_half(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    logits = LlamaForCausalLM.compute_logits(self, hidden)
    return logits if logits.dtype == torch.float32 else logits * 1.05


def one_bias(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    logits = LlamaForCausalLM.compute_logits(self, hidden)
    return torch.cat([logits[:, :-1], logits[:, -1:] + 0.01], -1)


MUTANTS = {
    "a window in a small model": Mutant(
        with_attention(sliding_window=staticmethod(windowed)), WRONG_FROM_16_TOKENS, changes=SMALL
    ),
    "another scale in a small model": Mutant(
        with_attention(spec=other_scale), WRONG, changes=SMALL
    ),
    "norms change places in a small model": Mutant(
        with_decoder(block=SwappedNorms), WRONG, changes=SMALL
    ),
    "wrong in half precision alone": Mutant(planted(compute_logits=lost_in_half), (DTYPES,)),
    "a bias of one token": Mutant(planted(compute_logits=one_bias), (LOGITS, DTYPES, ADAPTERS)),
    "another eps in the last norm": Mutant(planted(decoder=LastNorm), WRONG),
    "a layer is left out": Mutant(planted(decoder=OneLayerShort), WRONG),
    "norms change places": Mutant(with_decoder(block=SwappedNorms), WRONG),
    "gate and up change places": Mutant(planted(weight_map=SWAPPED), WRONG),
    "another scale": Mutant(with_attention(spec=other_scale), WRONG),
    "a window that is not there": Mutant(
        with_attention(sliding_window=staticmethod(windowed)), WRONG_FROM_16_TOKENS
    ),
    "rows of a step mix": Mutant(
        with_decoder(forward=mean_over_the_step), (BESIDE, SPLIT, BITS, *WRONG)
    ),
    "positions begin anew each step": Mutant(
        with_attention(heads=positions_of_the_step), (SPLIT, BITS, GREEDY, PREFIX)
    ),
    "logits depend on the first row": Mutant(
        planted(compute_logits=first_rows_only), (SOME, SPLIT, BESIDE, BITS, *WRONG)
    ),
    "a parameter in another type": Mutant(planted(__init__=wide_layers), (DTYPES, STAGES)),
    "a bias that is lost": Mutant(LosesABias, (REACHES, STAGES, *WRONG)),
    "a sum of its own": Mutant(planted(compute_logits=sums_by_itself), (BITS,)),
    "a name that passes": Mutant(planted(weight_map=LENIENT), (UNKNOWN,)),
}

TestMutants = mutant_tests(Kit, MUTANTS)


class Mixture(ModelKit):
    """Of so many experts that float16 chooses another one for a token here and there."""

    name = "SubjectForCausalLM"
    reference = transformers.MixtralForCausalLM
    config = {"num_local_experts": 32, "num_experts_per_tok": 4}
    plugin = plugin_of("model", "SubjectForCausalLM", MixtralForCausalLM)


def lost_in_a_half(self: Any, hidden: torch.Tensor) -> torch.Tensor:
    logits = MixtralForCausalLM.compute_logits(self, hidden)
    return logits if logits.dtype == torch.float32 else logits * 1.05


def test_a_right_mixture_passes_in_every_dtype_and_a_wrong_one_does_not() -> None:
    assert not run_kit(type("TestRight", (Mixture,), {}), {DTYPES}).by_outcome["failed"]
    wrong = subclass(MixtralForCausalLM, compute_logits=lost_in_a_half)
    assert run_kit(kit_of(Mixture, wrong), {DTYPES}).by_outcome["failed"] == {DTYPES}


def test_no_field_is_planted_into_a_family_that_has_not_got_it() -> None:
    fields = tiny(transformers.GPTNeoXConfig)
    assert "num_key_value_heads" not in fields and "rms_norm_eps" not in fields
    assert fields["layer_norm_eps"] > 0.01 and fields["hidden_size"] == TINY["hidden_size"]
    assert tiny(transformers.LlamaConfig)["num_key_value_heads"] == 2

    class Plain(ModelKit):
        name = "GPTNeoXForCausalLM"

    written = Plain.make_reference().config.to_dict()
    assert "num_key_value_heads" not in written and "head_dim" not in written
