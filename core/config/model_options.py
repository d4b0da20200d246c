"""Which model is loaded, from where, and what it is used for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

import msgspec

from .annotations import Bits64, Device, ModelDType, Name, doc


class ModelOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Which model is loaded, from where, and what it is used for."""

    model: Annotated[
        str,
        doc(
            "Path of a checkpoint folder, or a hub name: owner/name, owner/name@revision, "
            "hf://owner/name or its page's address. Empty: the embedded tiny model."
        ),
    ] = ""
    tokenizer: Annotated[str | None, doc("Tokenizer path or name; default: the model's.")] = None
    revision: Annotated[str | None, doc("Hub revision of the checkpoint.")] = None
    tokenizer_revision: Annotated[str | None, doc("Hub revision of the tokenizer.")] = None
    download_dir: Annotated[
        str | None,
        doc("Folder of what is fetched by name, instead of the hub's cache (HF_HUB_CACHE)."),
    ] = None
    served_model_name: Annotated[
        tuple[Name, ...], doc("Names the server answers to; default: the value of model.")
    ] = ()
    trust_remote_code: Annotated[
        bool,
        doc(
            "Taken without effect, for vLLM's users: a checkpoint's code is never imported. A "
            "model that needs its own comes as a plugin."
        ),
    ] = False
    skip_tokenizer_init: Annotated[
        bool, doc("Load no tokenizer: prompts are token ids and outputs have no text.")
    ] = False
    chat_template: Annotated[
        str | None,
        doc("Chat template (Jinja text or a file's path) instead of the tokenizer's."),
    ] = None
    chat_template_content_format: Annotated[
        Literal["auto", "string", "openai"],
        doc(
            "How the chat template gets content: string (a text), openai (a list of parts), or "
            "auto: parts where it writes all of them, else a text."
        ),
    ] = "auto"
    default_chat_template_kwargs: Annotated[
        dict[str, Any] | None,
        doc(
            "Arguments of the chat template where a request has none of that name, such as "
            '{"enable_thinking": false}.'
        ),
    ] = None
    exclude_tools_when_tool_choice_none: Annotated[
        bool,
        doc(
            "Leave tools out of the prompt of a request that may not call them (tool_choice none). "
            "Off: the prompt has them, and so the same cached prefix as with auto."
        ),
    ] = True
    assistant_control_tokens: Annotated[
        bool,
        doc(
            "Let control tokens in the text of assistant messages be tokens, for clients that send "
            "back tool-call markup or reasoning as the model wrote it; off, no message's text "
            "becomes a control token."
        ),
    ] = False
    device: Annotated[Device, doc("Where the model runs; auto: cuda if there is one.")] = "auto"
    dtype: Annotated[
        ModelDType,
        doc(
            "Type of weights and activations; auto: the checkpoint's, float32 on a CPU; half is "
            "float16, float is float32."
        ),
    ] = "auto"
    runner: Annotated[
        Literal["auto", "generate", "pooling"],
        doc("Generate text, or pool hidden states to vectors; auto: what the checkpoint is for."),
    ] = "auto"
    task: Annotated[
        Literal["auto", "generate", "embed", "classify", "score", "token_classify", "reward"],
        doc("What the model is used for, as in older vLLM: sets runner, and is validated."),
    ] = "auto"
    pooler_config: Annotated[
        dict[str, Any] | None,
        doc(
            "What to change in how states are pooled: pooling_type (CLS, LAST, MEAN; ALL: a result "
            "for each token; STEP: for each step_tag_id), normalize, activation (use_activation: "
            "either), step_tag_id (token of the prompt), returned_token_ids (labels)."
        ),
    ] = None
    seed: Annotated[Bits64, doc("Seeds the requests that bring no seed, and dummy weights.")] = 0
    config_format: Annotated[
        str,
        doc(
            "What reads the configuration: hf (config.json), the name of a checkpoint format, or "
            "auto: config.json, else the format whose file the checkpoint has."
        ),
    ] = "auto"
    tokenizer_mode: Annotated[
        str,
        doc(
            "What reads the tokenizer: hf (tokenizer.json, or what transformers makes one from), "
            "the name of a checkpoint format, or auto: tokenizer.json, else the format whose file "
            "the checkpoint has."
        ),
    ] = "auto"
    load_format: Annotated[
        str,
        doc(
            "Weight loader: auto (safetensors, or that of the checkpoint format), runai_streamer "
            "(safetensors, by its package), pt (torch's files, as tensors alone), gguf, "
            "sharded_state (a file for each rank, by jackfield convert), tensorizer (*.tensors, by "
            "its package), dummy (random), that of a checkpoint format, or a plugin's."
        ),
    ] = "auto"
    model_loader_extra_config: Annotated[
        dict[str, Any] | None,
        doc(
            "The weight loader's own options; sharded_state: pattern, of its files' names; "
            "tensorizer: tensorizer_uri, a path; num_readers; verify_hash (true)."
        ),
    ] = None
    model_impl: Annotated[
        Literal["auto", "jackfield", "vllm", "transformers"],
        doc(
            "Whose model code runs: jackfield (or vllm: the engine's own), transformers (its "
            "modules; slower), or auto: the engine's own where there is one."
        ),
    ] = "auto"
    hf_overrides: Annotated[
        dict[str, Any] | None,
        doc("Values that replace those of the checkpoint's config.json."),
    ] = None

    def template_kwargs(self, request_kwargs: Mapping[str, Any] | None) -> dict[str, Any]:
        """Return the arguments that a request gives to the chat template, over the defaults."""
        return {**(self.default_chat_template_kwargs or {}), **(request_kwargs or {})}
