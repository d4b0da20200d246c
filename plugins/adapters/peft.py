"""Adapters as PEFT saves them: adapter_config.json and adapter_model.safetensors."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar

from ...core.adapters.file import AdapterFile, ExpertsLowRank, LowRank, ReadTensor, TokenRows
from ...core.errors import ConfigError, listed, shown
from .content import check_invocation, with_digest
from .peft_config import FILE, Settings, read_settings
from .safetensors_file import TensorFile

TENSORS = "adapter_model.safetensors"
PICKLES = ("adapter_model.bin", "adapter_model.pt")
PREFIX = "base_model.model."
WRAPPERS = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Segments that torch's wrappers put into names."""
MAX_NAME = 512
BASE = "base_layer"
"""What an adapted layer calls the layer that it is made of."""
MATRICES = re.compile(r"lora_(embedding_)?(A|B|magnitude_vector)")
TRAINING = frozenset({"lora_velora_embed"})
"""Tensors that only gradients need (VeLoRA)."""
COPIES = frozenset({"original_module", "trainable_tokens_original"})
"""Segments of the names of what was there before training."""
ORDER = (
    "gate_up_proj", "w1", "v1", "gate_proj", "up_proj", "down_proj", "w2",
)  # fmt: skip
"""Parameters of a module in the order in which models define them; in this order PEFT wraps them,
the first innermost."""


class PeftFormat:
    """LoRA adapters of PEFT (github.com/huggingface/peft), and of trainers that write its form."""

    name: ClassVar[str] = "peft"

    @classmethod
    def is_at(cls, path: Path) -> bool:
        return (path / FILE).is_file()

    @classmethod
    def read(cls, path: Path) -> AdapterFile:
        """Raises ConfigError with the field or the tensor's name as `param`."""
        settings = read_settings(path)
        _check_files(path)
        return with_digest(_Reader(settings, TensorFile(path / TENSORS, path)).result())


def _check_files(folder: Path) -> None:
    if (folder / TENSORS).exists():
        return
    if pickle := next((name for name in PICKLES if (folder / name).exists()), None):
        raise ConfigError(
            f"{pickle} is a pickle, which can run code; write its tensors as {TENSORS}, "
            'safetensors.torch.save_file(torch.load(file, weights_only=True), "'
            f'{TENSORS}")',
            param=pickle,
        )
    others = sorted(file.name for file in folder.glob("*.safetensors"))
    have = f"has {listed(others)}; write all tensors into one file" if others else "has none"
    raise ConfigError(
        f"{TENSORS}: an adapter has its tensors there, and this one {have}", param=TENSORS
    )


class _Reader:
    """Sorts the tensors of a file by what they are."""

    def __init__(self, settings: Settings, file: TensorFile) -> None:
        self._settings, self._file = settings, file
        self._layers: dict[str, dict[int, dict[str, str]]] = {}
        """Module → number of `base_layer` after it → kind of tensor → key of the file."""
        self._replaced: dict[str, str] = {}
        self._rows: dict[str, str] = {}
        self._copies: list[str] = []
        self._unused: list[str] = []
        self._adapter_names: set[str] = set()
        self._notes = list(settings.notes)

    def result(self) -> AdapterFile:
        for key in self._file.entries:
            self._sort(key)
        if len(self._adapter_names) > 1:
            raise ConfigError(
                f"{TENSORS}: has several adapters: {listed(sorted(self._adapter_names))}",
                param=TENSORS,
            )
        low_rank, experts = self._changes()
        token_rows = self._token_rows()
        names = [each.name for each in low_rank]
        if not (low_rank or experts or token_rows or self._replaced):
            raise ConfigError(f"{TENSORS}: has no tensor of an adapter", param=TENSORS)
        self._check_replaced(names)
        file = AdapterFile(
            digest="",
            low_rank=tuple(low_rank),
            experts=tuple(experts),
            replaced={name: self._tensor(key) for name, key in self._replaced.items()},
            token_rows=token_rows,
            invocation_tokens=self._settings.invocation_tokens,
            base_model=self._settings.base_model,
            notes=self._note(names),
        )
        check_invocation(file, "alora_invocation_tokens")
        return file

    # Names.

    def _sort(self, key: str) -> None:
        """Put a tensor where it belongs."""
        if len(key) > MAX_NAME or not key.isprintable():
            raise self._unknown(key, "its name is too long, or has characters that do not print")
        parts = [part for part in key.split(".") if part not in WRAPPERS]
        name = ".".join(parts).removeprefix("module.").removeprefix(PREFIX)
        parts = name.split(".")
        if matrix := next((part for part in parts if part.startswith("lora_")), None):
            place = parts.index(matrix)
            self._sort_matrix(key, parts[:place], matrix, parts[place + 1 :])
        elif COPIES & set(parts):
            self._copies.append(name)
        elif "token_adapter" in parts:
            self._sort_rows(key, parts)
        elif "modules_to_save" in parts[:-2]:
            place = parts.index("modules_to_save")
            self._adapter_names.update(parts[place + 1 : place + 2])
            self._put(self._replaced, ".".join(parts[:place] + parts[place + 2 :]), key)
        elif BASE not in parts:
            self._put(self._replaced, name, key)
        elif "bias" in parts[-1] and self._settings.bias != "none":
            self._put(self._replaced, ".".join(_without_base(parts)), key)
        else:
            self._copies.append(name)

    def _sort_matrix(self, key: str, module: list[str], kind: str, rest: list[str]) -> None:
        if kind in TRAINING:
            self._unused.append(key)
            return
        if not MATRICES.fullmatch(kind):
            raise self._unknown(key, "is none of plain LoRA or DoRA")
        leaf = rest.pop() if rest and rest[-1] in ("weight", "bias") else "weight"
        if leaf == "bias":
            if kind != "lora_B":
                raise self._unknown(key, "only B can have a bias")
            kind = "bias"
        if len(rest) > 1:
            raise self._unknown(key, "is none of plain LoRA or DoRA")
        self._adapter_names.update(rest)
        depth = 0
        while module[-1:] == [BASE]:
            module, depth = module[:-1], depth + 1
        name = ".".join(_without_base(module))
        self._put(self._layers.setdefault(name, {}).setdefault(depth, {}), kind, key)

    def _sort_rows(self, key: str, parts: list[str]) -> None:
        place = parts.index("token_adapter")
        kind, *rest = parts[place + 1 :] or [""]
        if kind == BASE:
            self._copies.append(".".join(parts))
        elif kind == "trainable_tokens_delta" and len(rest) < 2:
            self._adapter_names.update(rest)
            self._put(self._rows, ".".join(_without_base(parts[:place])), key)
        else:
            raise self._unknown(key, "is none of trained token rows")

    def _put(self, into: dict[str, str], name: str, key: str) -> None:
        if name in into:
            raise self._unknown(key, f"is the same tensor as {shown(into[name])}")
        into[name] = key

    def _unknown(self, key: str, reason: str) -> ConfigError:
        return ConfigError(f"the tensor {shown(key)}: {reason}", param=key[:MAX_NAME])

    def _shape(self, key: str) -> tuple[int, int]:
        """Return the shape of a matrix."""
        shape = self._file.entries[key].shape
        if len(shape) < 2 or 0 in shape:
            raise self._unknown(
                key,
                f"has shape {list(shape)}: a trainer with sharded weights (ZeRO-3, FSDP) saved its "
                "own part; gather them before saving",
            )
        if len(shape) > 2:
            raise self._unknown(key, f"has shape {list(shape)}; of convolutions none is served")
        return shape[0], shape[1]

    def _tensor(self, key: str) -> ReadTensor:
        return partial(self._file.read, key)

    # Low-rank changes.

    def _changes(self) -> tuple[list[LowRank], list[ExpertsLowRank]]:
        low_rank: list[LowRank] = []
        experts: list[ExpertsLowRank] = []
        for module, levels in self._layers.items():
            wrapped: dict[str, ExpertsLowRank] = {}
            for parameter, keys in self._wrappings(module, levels):
                name = module if parameter is None else f"{module}.{parameter}"
                change = (
                    self._layer_change(module, name, keys) if parameter in (None, "weight")
                    else self._experts_change(name, keys)
                )  # fmt: skip
                if isinstance(change, LowRank):
                    low_rank.append(change)
                else:
                    wrapped[change.name.rpartition(".")[2]] = change
            _check_order(module, wrapped)
            experts.extend(wrapped.values())
        return low_rank, experts

    def _wrappings(
        self, module: str, levels: Mapping[int, dict[str, str]]
    ) -> list[tuple[str | None, dict[str, str]]]:
        """Return what of a module is changed, a parameter or the layer as such (None), each with
        its tensors."""
        named = self._settings.parameters_of(module, len(levels))
        targeted = self._settings.targets(module)
        is_layer = not named or targeted or (targeted is None and len(named) > 1)
        if levels.keys() == {0} and is_layer:
            return [(None, levels[0])]
        if levels.keys() != set(range(len(named))):
            raise ConfigError(
                f"target_parameters: names {listed(named) or 'no parameter'} of {module}, and the "
                f"file has tensors of {len(levels)}",
                param="target_parameters",
            )
        if len(named) > 1 and not set(named) <= set(ORDER):
            raise ConfigError(
                f"target_parameters: which tensors of {module} are whose cannot be said of "
                f"{listed(named)}",
                param="target_parameters",
            )
        if len(named) > 1:
            named.sort(key=ORDER.index, reverse=True)
        return [(parameter, levels[depth]) for depth, parameter in enumerate(named)]

    def _layer_change(
        self, module: str, name: str, keys: Mapping[str, str]
    ) -> LowRank | ExpertsLowRank:
        """Return the change of a layer. name: what patterns match."""
        settings = self._settings
        embedding = "lora_embedding_A" in keys
        a, b = self._pair(module, keys, "lora_embedding_" if embedding else "lora_")
        (rank, in_features), (out_features, columns) = self._shape(a), self._shape(b)
        wanted, field = settings.rank_of(name)
        if name != module and rank == columns > wanted:
            return self._experts_change(name, keys)
        if not rank == columns == wanted:
            raise _wrong_rank(module, wanted, field, rank, columns)
        return LowRank(
            name=module,
            rank=rank,
            in_features=in_features,
            out_features=out_features,
            scale=settings.scale_of(name),
            a=self._tensor(a),
            b=self._tensor(b),
            bias=self._vector(
                "lora_bias", settings.lora_bias and not embedding, keys, "bias", module,
                out_features,
            ),
            magnitude=self._vector(
                "use_dora", settings.use_dora, keys, "lora_magnitude_vector", module, out_features
            ),
            embedding=embedding,
        )  # fmt: skip

    def _pair(self, module: str, keys: Mapping[str, str], begin: str) -> tuple[str, str]:
        """Return the keys of A and B."""
        pair = {f"{begin}A", f"{begin}B"}
        if keys.keys() - {"bias", "lora_magnitude_vector"} != pair:
            raise self._unknown(
                next(iter(keys.values())),
                f"{module} has {listed(sorted(keys))}, and needs {listed(sorted(pair))}",
            )
        return keys[f"{begin}A"], keys[f"{begin}B"]

    def _vector(
        self, field: str, expected: bool, keys: Mapping[str, str], kind: str, module: str, size: int
    ) -> ReadTensor | None:
        """Return a vector that the file has if a field says so."""
        key = keys.get(kind)
        if (key is not None) != expected:
            there = "no" if key is None else "a"
            raise ConfigError(
                f"{field}: is {str(expected).lower()}, and the file has {there} {kind} of {module}",
                param=field,
            )
        if key is None:
            return None
        if (shape := self._file.entries[key].shape) != (size,):
            raise self._unknown(key, f"has shape {list(shape)}, and its layer {size} rows")
        return self._tensor(key)

    def _experts_change(self, name: str, keys: Mapping[str, str]) -> ExpertsLowRank:
        """Return the change of a parameter that has all experts of a mixture."""
        settings = self._settings
        module = name.rpartition(".")[0]
        a, b = self._pair(module, keys, "lora_")
        (rows, in_features), (out_features, columns) = self._shape(a), self._shape(b)
        rank, field = settings.rank_of(name)
        if rows != columns or rows % rank:
            raise _wrong_rank(name, rank, field, rows, columns)
        refused = {
            "target_parameters": name.endswith("bias"),
            "use_dora": settings.use_dora or "lora_magnitude_vector" in keys,
            "lora_bias": settings.lora_bias or "bias" in keys,
        }
        if wrong := next((field for field, is_so in refused.items() if is_so), None):
            raise ConfigError(f"{wrong}: is not served for the parameter {name}", param=wrong)
        count = rows // rank
        return ExpertsLowRank(
            name=name,
            num_experts=count,
            rank=rank,
            in_features=in_features,
            out_features=out_features,
            scale=settings.scale_of(name),
            # An expert's rows of A are beside each other, its columns of B are not.
            a=lambda: self._file.read(a).reshape(count, rank, in_features),
            b=lambda: self._file.read(b).reshape(out_features, rank, count).permute(2, 0, 1),
        )

    # All else.

    def _token_rows(self) -> tuple[TokenRows, ...]:
        field = "trainable_token_indices"
        indices = self._settings.trainable_tokens
        token_rows: list[TokenRows] = []
        for name, key in sorted(self._rows.items()):
            if isinstance(indices, Mapping):
                ids = next((ids for each, ids in indices.items() if name.endswith(each)), None)
            else:
                ids = indices if len(self._rows) == 1 else None
            shape = self._file.entries[key].shape
            if ids is None or len(shape) != 2 or shape[0] != len(ids):
                count = "none" if ids is None else str(len(ids))
                raise ConfigError(
                    f"{field}: has {count} tokens of {name}, and the file rows {list(shape)}",
                    param=field,
                )
            token_rows.append(TokenRows(name=name, token_ids=ids, rows=self._tensor(key)))
        # Of embeddings and a head that are tied, and have the same tokens, one is saved.
        wanted = indices.values() if isinstance(indices, Mapping) else [indices or ()]
        if missing := {ids for ids in wanted if ids} - {rows.token_ids for rows in token_rows}:
            raise ConfigError(
                f"{field}: the file has no rows of the tokens {shown(min(missing))}", param=field
            )
        return tuple(token_rows)

    def _check_replaced(self, names: Iterable[str]) -> None:
        """Refuse what is changed in two ways; note what no setting names."""
        rows = set(self._rows)
        for name in (*names, *rows):
            if f"{name}.weight" in self._replaced or (name in rows and name in self._layers):
                raise ConfigError(
                    f"modules_to_save: the file changes {name} in two ways", param="modules_to_save"
                )
        named = self._settings.modules_to_save
        unnamed = {
            name for name in self._replaced
            if not any(part.endswith(named) for part in _containers(name))
        }  # fmt: skip
        if named and len(unnamed) == len(self._replaced):
            raise ConfigError(
                f"modules_to_save: the file has no tensor of {listed(named)}",
                param="modules_to_save",
            )
        if self._settings.bias != "none":
            unnamed = {name for name in unnamed if "bias" not in name}
        if unnamed:
            self._notes.append(
                "takes the place of the base model's, though modules_to_save does not name it: "
                f"{listed(sorted(unnamed))}"
            )

    def _note(self, names: Iterable[str]) -> tuple[str, ...]:
        """Return the notes of what was read."""
        settings = self._settings
        untargeted = sorted(
            name for name in names
            if settings.targets(name) is False and not settings.parameters_of(name, 1)
        )  # fmt: skip
        if untargeted and not settings.ties_weights:
            self._notes.append(
                f"adapted, though target_modules does not name it: {listed(untargeted)}"
            )
        if self._copies:
            self._notes.append(
                f"copies of the base model's tensors, not used: {listed(sorted(self._copies))}"
            )
        if self._unused:
            self._notes.append(f"tensors of the training, not used: {listed(sorted(self._unused))}")
        return tuple(self._notes)


def _check_order(module: str, wrapped: Mapping[str, ExpertsLowRank]) -> None:
    """Refuse parameters of a module that do not fit each other: what comes out of the last one has
    the width of what goes into the others."""
    last = wrapped.get("down_proj") or wrapped.get("w2")
    for name, change in wrapped.items():
        if last is not None and change is not last and change.in_features != last.out_features:
            raise ConfigError(
                f"target_parameters: the tensors of {module}.{name} have {change.in_features} "
                f"inputs, and those of its last parameter {last.out_features} outputs",
                param="target_parameters",
            )


def _wrong_rank(name: str, wanted: int, field: str, rows: int, columns: int) -> ConfigError:
    return ConfigError(
        f"{field}: {name} has rank {wanted} by the settings, and A has {rows} rows, B {columns} "
        "columns",
        param=field,
    )


def _without_base(parts: list[str]) -> list[str]:
    return [part for part in parts if part != BASE]


def _containers(name: str) -> list[str]:
    """Return the modules that a tensor is in."""
    parts = name.split(".")
    return [".".join(parts[:end]) for end in range(1, len(parts))]
