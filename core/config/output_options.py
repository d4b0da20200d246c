"""What requests get: how outputs are sampled, constrained, parsed and scored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypeAlias

from .annotations import Name, doc
from .parallel_options import ParallelOptions
from .structured_outputs_config import StructuredOutputsConfig

LogprobsMode: TypeAlias = Literal[
    "raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"
]


class OutputOptions(ParallelOptions, frozen=True, kw_only=True):
    """What requests get: how outputs are sampled, constrained, parsed and scored."""

    generation_config: Annotated[
        str,
        doc(
            "Where requests get what they leave open (temperature, top_p, top_k, min_p, "
            "repetition_penalty; max_new_tokens limits all): auto (the model's "
            "generation_config.json), vllm (from nowhere), or a folder with such a file."
        ),
    ] = "auto"
    override_generation_config: Annotated[
        dict[str, Any] | None, doc("Values that replace those of generation_config.json.")
    ] = None
    stream_interval: Annotated[
        int,
        doc(
            "Tokens of each event of a stream, for fewer events; a request's first token comes at "
            "once. Requests may have their own.",
            ge=1,
        ),
    ] = 1
    max_logprobs: Annotated[
        int, doc("Largest logprobs that a request may have; -1: no limit.", ge=-1)
    ] = 20
    max_logprobs_per_request: Annotated[
        int,
        doc(
            "Log-probabilities that one request may get in all: n x max_tokens x (logprobs + 1) "
            "and the prompts' tokens x (prompt_logprobs + 1); a request without max_tokens ends "
            "there; -1: no limit.",
            ge=-1,
        ),
    ] = 1 << 20
    logprobs_mode: Annotated[
        LogprobsMode,
        doc(
            "What log-probabilities are: raw_logprobs (the model's, before any processor), "
            "processed_logprobs (those sampled from: after processors, penalties, temperature, "
            "top_k, top_p and min_p, where a token that is left out has -9999), or raw_logits, "
            "processed_logits (the same without normalization). Others than raw_logprobs need "
            "operations=torch."
        ),
    ] = "raw_logprobs"
    enable_return_routed_experts: Annotated[
        bool,
        doc(
            "Return with each output which experts the routers of a mixture chose for its tokens, "
            "for trainers that replay them. They are kept in host memory for all cached tokens."
        ),
    ] = False
    logits_processors: Annotated[
        tuple[Name, ...] | None,
        doc(
            "Plugged-in logits processors that requests may use, by name, in the order they "
            "are applied; default: all that are registered."
        ),
    ] = None
    parts: Annotated[
        dict[str, dict[str, Any]],
        doc(
            "Capabilities of a step from plugins (register_parts), each with its options: "
            '{"my_part": {}}; they are called in this order.'
        ),
    ] = {}
    reasoning_parser: Annotated[
        str | None,
        doc(
            "Reasoning parser by name, none, or auto (by the checkpoint's chat template and model "
            "type); default: by its jackfield.json."
        ),
    ] = None
    tool_call_parser: Annotated[
        str | None,
        doc(
            "Tool-call parser by name, none, or auto (by the checkpoint's chat template and model "
            "type); default: by its jackfield.json."
        ),
    ] = None
    structured_outputs_config: Annotated[
        StructuredOutputsConfig,
        doc("How outputs are constrained by grammars: JSON, or one flag per field."),
    ] = StructuredOutputsConfig()
