"""What files of a rank's weights say about themselves, and whether it fits an engine."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from ...errors import ConfigError, LoadError
from ...parallel.ranks import Ranks
from ..model_config import ModelConfig

VERSION = 1
"""Version of the names in the files."""


class StateRecord(msgspec.Struct, frozen=True, kw_only=True):
    """How the weights of one rank were made; each of its files has it."""

    architecture: str
    quantization: str | None
    """Name of the quantization method that took the layers; None: none did."""
    tensor_parallel_size: Annotated[int, Meta(ge=1)]
    pipeline_parallel_size: Annotated[int, Meta(ge=1)] = 1
    pipeline_layer_partition: tuple[int, ...] | None = None
    """Layers of each stage; None: as even as possible."""
    rank: Annotated[int, Meta(ge=0)]
    """Number of the rank among all of all stages."""
    expert_parallel: bool = False
    """Whether the rank has some experts of each mixture whole, instead of a part of each."""
    num_parts: Annotated[int, Meta(ge=1)] = 1
    """Files of this rank."""
    version: int = VERSION

    @classmethod
    def read(cls, file: str, text: str | None) -> StateRecord:
        """Return the record of a file. Raises LoadError if it has none, or one that cannot be
        read."""
        if text is None:
            raise LoadError(
                f"{file} has no record of how it was divided; write it with `jackfield convert`"
            )
        try:
            record = msgspec.json.decode(text, type=cls)
        except (msgspec.DecodeError, UnicodeEncodeError) as error:
            raise LoadError(f"{file}: its record cannot be read: {error}") from error
        if record.version != VERSION:
            raise LoadError(
                f"{file} has version {record.version} of the names of weights, and this release "
                f"reads {VERSION}; convert the checkpoint again"
            )
        return record

    def encode(self) -> str:
        """Return it as text."""
        return msgspec.json.encode(self).decode()

    def check(self, file: str, architecture: str, quantization: str | None, ranks: Ranks) -> None:
        """Raise ConfigError, with the option's name, if the file was made for another engine, and
        LoadError if it is another rank's."""
        for field, own, size in (
            ("tensor_parallel_size", self.tensor_parallel_size, ranks.tensor.size),
            ("pipeline_parallel_size", self.pipeline_parallel_size, ranks.pipeline.size),
        ):
            if own != size:
                raise ConfigError(
                    f"{field}: {file} was written for {own}, and this engine has {size}; convert "
                    f"the checkpoint for {size}, or set it to {own}",
                    param=field,
                )
        if self.expert_parallel != (ranks.experts.size > 1):
            there, here = ("whole", "divided") if self.expert_parallel else ("divided", "whole")
            raise ConfigError(
                f"enable_expert_parallel: in {file} experts are {there}, and in this engine {here}"
                "; convert the checkpoint with the same option",
                param="enable_expert_parallel",
            )
        if ranks.experts.size > ranks.tensor.size:
            raise ConfigError(
                f"data_parallel_size: {file} has the experts of one engine's ranks, and here those "
                "of several divide them (enable_expert_parallel); serve the checkpoint that was "
                "converted",
                param="data_parallel_size",
            )
        if self.pipeline_layer_partition != ranks.pipeline.partition:
            raise ConfigError(
                f"pipeline_layer_partition: {file} was made with another one; convert the "
                "checkpoint with the same option",
                param="pipeline_layer_partition",
            )
        if self.quantization != quantization:
            raise ConfigError(
                f"quantization: {file} was made for {self.quantization or 'no method'}, and this "
                f"engine has {quantization or 'none'}; convert the checkpoint with the same "
                "--quantization",
                param="quantization",
            )
        if self.architecture != architecture:
            raise ConfigError(
                f"model: {file} has the weights of {self.architecture}, and config.json names "
                f"{architecture}",
                param="model",
            )
        if self.rank != (rank := number(ranks)):
            raise LoadError(f"{file} has the weights of rank {self.rank}, not of rank {rank}")


def number(ranks: Ranks) -> int:
    """Return a rank's number over all stages."""
    stages_after = ranks.pipeline.size - 1 - ranks.pipeline.stage
    return stages_after * ranks.tensor.size + ranks.tensor.rank


def method_name(requested: str | None, model_config: ModelConfig) -> str | None:
    """Return the quantization method (`EngineConfig.quantization`, else the checkpoint's), or
    None.
    """
    own = (model_config.quantization_config or {}).get("quant_method")
    return requested or (own if isinstance(own, str) else None)
