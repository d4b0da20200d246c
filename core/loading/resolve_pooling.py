"""Decides whether a checkpoint generates or is pooled, and how.

Read from sentence-transformers' files, config.json, and the engine's `runner`, `task` and
`pooler_config`, which take precedence.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import msgspec

from ..config import EngineConfig
from ..errors import ConfigError
from ..pooling_params import PoolingType
from .json_file import object_if_there
from .model_config import ModelConfig
from .pooling_config import Activation, PoolingConfig, TokenClassifier
from .sentence_transformer import SentenceTransformer, read_sentence_transformer

ACTIVATIONS: dict[str, Activation | None] = {
    "Identity": None, "Sigmoid": "sigmoid", "Softmax": "softmax",
}  # fmt: skip
"""torch's class names in cross-encoders' configurations."""
NO_LIMIT = 10**9
"""Tokenizers without a limit state more."""


class PoolerOptions(msgspec.Struct, forbid_unknown_fields=True):
    """`EngineConfig.pooler_config`."""

    pooling_type: PoolingType | Literal["ALL", "STEP"] | None = None
    normalize: bool | None = None
    activation: bool | None = None
    use_activation: bool | None = None
    """vLLM's newer name of `normalize` and `activation`."""
    step_tag_id: int | None = None
    returned_token_ids: list[int] | None = None


def resolve_pooling(
    config: EngineConfig, model_config: ModelConfig, model: type | None
) -> ModelConfig:
    """Set `pooling` and the length, if the model is pooled.

    `model`: the architecture's class, or None. Raises ConfigError, LoadError.
    """
    can_generate = hasattr(model, "compute_logits") and not hasattr(model, "classify")
    can_pool = hasattr(model, "pooling_states")
    files = SentenceTransformer()
    runner = _requested_runner(config)
    field = "runner" if config.task == "auto" else "task"
    if runner == "generate" or (runner == "auto" and not can_pool):
        if model is not None and not can_generate:
            raise ConfigError(
                f"{field}: {model_config.architecture} does not generate text; leave it on auto",
                param=field,
            )
        return model_config
    if runner == "auto":
        if (model_config.path / "modules.json").is_file():
            files = read_sentence_transformer(model_config.path)
        if can_generate and files.pooling_type is None:
            return model_config
    elif model is not None and not can_pool:
        raise ConfigError(
            f"{field}: {model_config.architecture} cannot be pooled (its class has no "
            "pooling_states)",
            param=field,
        )
    else:
        files = read_sentence_transformer(model_config.path)
    pooling = _pooling_config(config, model_config, model, files)
    length = _length(config, model_config, model, files)
    return dataclasses.replace(model_config, pooling=pooling, max_model_len=length)


def _requested_runner(config: EngineConfig) -> str:
    if config.task == "auto":
        return config.runner
    runner = "generate" if config.task == "generate" else "pooling"
    if config.runner not in ("auto", runner):
        raise ConfigError(f"task: {config.task!r} needs runner {runner!r}", param="task")
    return runner


def _pooling_config(
    config: EngineConfig, model_config: ModelConfig, model: Any, files: SentenceTransformer
) -> PoolingConfig:
    hf = model_config.hf_config
    causal = bool(getattr(model, "causal", True))
    if causal and getattr(hf, "is_causal", True) is False:
        raise ConfigError(
            f"model: {model_config.path}/config.json says is_causal false: a decoder that looks "
            "both ways is not supported",
            param="model",
        )
    try:
        options = msgspec.convert(config.pooler_config or {}, PoolerOptions)
    except msgspec.ValidationError as error:
        raise ConfigError(f"pooler_config: {error}", param="pooler_config") from None
    own: PoolingType = getattr(model, "pooling_type", "LAST")
    if hasattr(model, "pooling_type_of"):
        own = model.pooling_type_of(hf)
    classifies = hasattr(model, "classify")
    per_token = classifies and bool(getattr(model, "classifies_tokens", False))
    embeds = not classifies or bool(getattr(model, "embeds", False))
    tokens = _token_classifier(hf, model) if classifies and causal and not per_token else None
    labels = _labels(hf, tokens, model) if classifies else ()
    task: Any = "embed" if embeds else "token_classify" if per_token else "classify"
    if getattr(model, "embeds_tokens", False):
        task = "token_embed"
    _check_task(config.task, task, labels)
    activation, activates = _activation(hf, len(labels))
    activates = bool(getattr(model, "activates", activates))
    normalize = files.pooling_type is None or files.normalize
    each_token = options.pooling_type in ("ALL", "STEP")
    _check_steps(options, task, labels)
    if options.use_activation is not None:
        options.normalize = options.activation = options.use_activation
    projections = files.projections if embeds else ()
    size = model_config.hidden_size
    for projection in projections:
        if projection.in_features != size:
            raise ConfigError(
                f"model: {projection.folder}/config.json takes {projection.in_features} numbers, "
                f"there are {size}",
                param="model",
            )
        size = projection.out_features
    return PoolingConfig(
        task=task,
        causal=causal,
        pooling_type=_kind(options) or (embeds and files.pooling_type) or own,
        size=size,
        projections=projections,
        normalize=normalize if options.normalize is None else options.normalize,
        lower_case=files.lower_case,
        prompts=files.prompts,
        num_token_types=0 if causal else _num_token_types(model_config),
        matryoshka=_matryoshka(hf),
        labels=labels,
        each_token=each_token,
        classifies_tokens=per_token,
        step_token_id=options.step_tag_id,
        returned_labels=(
            None if options.returned_token_ids is None else tuple(options.returned_token_ids)
        ),
        activation=activation,
        activates=activates if options.activation is None else options.activation,
        tokens=tokens,
        joins_pairs=not getattr(hf, "use_pad_token", tokens is None),
    )


def _kind(options: PoolerOptions) -> PoolingType | None:
    kind = options.pooling_type
    return None if kind in ("ALL", "STEP") else kind  # type: ignore[return-value]


def _check_task(task: str, own: str, labels: tuple[str, ...]) -> None:
    wrong = None
    if task == "embed" and own != "embed":
        only = "this model has vectors of tokens alone"
        wrong = only if own == "token_embed" else "this model classifies"
    elif task == "classify" and own != "classify":
        wrong = "this model has no classifier of whole prompts"
    elif task in ("reward", "token_classify") and own != "token_classify":
        wrong = "this model has no reward, and no classifier of tokens"
    elif task == "score" and own not in ("embed", "token_embed") and len(labels) != 1:
        wrong = f"a classifier with {len(labels)} labels gives no score"
    elif task == "score" and own == "token_classify":
        wrong = "a classifier of tokens gives no score"
    if wrong is not None:
        raise ConfigError(f"task: {task!r} does not fit, {wrong}", param="task")


def _check_steps(options: PoolerOptions, task: str, labels: tuple[str, ...]) -> None:
    """Raise ConfigError for options of results per token that this model has not."""
    kind, wrong = options.pooling_type, None
    if kind in ("ALL", "STEP") and task == "classify":
        wrong = f"pooling_type {kind!r}: this model classifies whole prompts"
    elif kind is not None and kind not in ("ALL", "STEP") and task == "token_classify":
        wrong = f"pooling_type {kind!r}: this model classifies each token; leave it out, or ALL"
    elif (options.step_tag_id, options.returned_token_ids) != (None, None):
        if kind != "STEP" and (kind is not None or task != "token_classify"):
            wrong = "step_tag_id and returned_token_ids need pooling_type STEP"
        elif not all(0 <= label < len(labels) for label in options.returned_token_ids or ()):
            wrong = f"returned_token_ids: there are logits 0 to {len(labels) - 1}"
    if wrong is not None:
        raise ConfigError(f"pooler_config: {wrong}", param="pooler_config")


def _token_classifier(hf: Any, model: Any) -> TokenClassifier | None:
    """Return the classifier of vLLM's hf_overrides, or None. `model`: the architecture's class."""
    tokens = getattr(hf, "classifier_from_token", None)
    if tokens is None:
        return None
    method = getattr(hf, "method", None)
    if method is None and hasattr(model, "classifier_method"):
        method = model.classifier_method(hf)
    if not isinstance(tokens, list) or not all(isinstance(token, str) for token in tokens):
        problem = f"classifier_from_token {tokens!r}, which is no list of tokens"
    elif method == "from_2_way_softmax":
        if len(tokens) == 2:
            return TokenClassifier(tuple(tokens), difference=True)
        problem = f"{len(tokens)} tokens in classifier_from_token, from_2_way_softmax needs two"
    elif method == "no_post_processing" and tokens:
        return TokenClassifier(tuple(tokens), difference=False)
    else:
        problem = f"the method {method!r} (there are: from_2_way_softmax, no_post_processing)"
    raise ConfigError(f"hf_overrides: config.json has {problem}", param="hf_overrides")


def _labels(hf: Any, tokens: TokenClassifier | None, model: Any) -> tuple[str, ...]:
    if tokens is not None:
        return tokens.tokens[-1:] if tokens.difference else tokens.tokens
    labels: Mapping[Any, Any] = getattr(hf, "id2label", None) or {}
    count = int(getattr(model, "num_labels", None) or hf.num_labels)
    return tuple(str(labels.get(i, f"LABEL_{i}")) for i in range(count))


def _activation(hf: Any, num_labels: int) -> tuple[Activation, bool]:
    """Return the activation function, and whether it is the default."""
    by_size: Activation = "sigmoid" if num_labels == 1 else "softmax"
    settings = getattr(hf, "sentence_transformers", None)
    named = (settings or {}).get("activation_fn") if isinstance(settings, dict | None) else None
    named = named or getattr(hf, "sbert_ce_default_activation_function", None)
    if named:
        name = str(named).rpartition(".")[2]
        if name not in ACTIVATIONS:
            raise ConfigError(
                f"model: config.json names the activation {named!r}, which is not supported "
                f"(there are: {', '.join(ACTIVATIONS)})",
                param="model",
            )
        return ACTIVATIONS[name] or by_size, ACTIVATIONS[name] is not None
    problem = getattr(hf, "problem_type", None)
    if problem == "multi_label_classification":
        return "sigmoid", True
    return by_size, problem != "regression"


def _num_token_types(model_config: ModelConfig) -> int:
    """Return the number of token types; 0 if the tokenizer gives none."""
    names = object_if_there(model_config.path / "tokenizer_config.json").get("model_input_names")
    if isinstance(names, list) and "token_type_ids" not in names:
        return 0
    return int(getattr(model_config.hf_config, "type_vocab_size", None) or 0)


def _matryoshka(hf: Any) -> tuple[int, ...] | None:
    sizes = getattr(hf, "matryoshka_dimensions", None)
    if sizes:
        if not isinstance(sizes, list) or not all(type(size) is int for size in sizes):
            raise ConfigError(
                f"model: config.json has matryoshka_dimensions {sizes!r}, which is no list of "
                "integers",
                param="model",
            )
        return tuple(sizes)
    return () if getattr(hf, "is_matryoshka", False) else None


def _length(
    config: EngineConfig, model_config: ModelConfig, model: Any, files: SentenceTransformer
) -> int:
    """Return the context length: trained by default, up to the model's positions with
    `max_model_len`.
    """
    context_length = getattr(model, "context_length", None)
    reach = model_config.max_model_len
    if context_length is not None:
        reach = int(context_length(model_config.hf_config))
    if (length := config.given_model_len) is not None:
        if length > reach:
            raise ConfigError(
                f"max_model_len: {length} is more than this model's {reach}", param="max_model_len"
            )
        return length
    tokenizer = object_if_there(model_config.path / "tokenizer_config.json").get("model_max_length")
    limits = [reach]
    for limit in (files.max_length, tokenizer):
        if isinstance(limit, int | float) and 0 < limit < NO_LIMIT:
            limits.append(int(limit))
    return min(limits)
