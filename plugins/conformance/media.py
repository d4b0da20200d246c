"""`MediaModelKit`: whether a media model's processors and encoder agree with each other.

class TestMine(MediaModelKit):
    name = "MineForConditionalGeneration"         # as registered

    @classmethod
    def write(cls, folder):                      # a small checkpoint, with its processor
        model.save_pretrained(folder)
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from ...core.config import EngineConfig
from ...core.engine.resolve_config import resolve_config, resolve_runner
from ...core.loading.build import build_model
from ...core.loading.model_config import ModelConfig, resolve_model_config
from ...core.media.readers import content_of
from ...core.nn.operations import Operations
from ...core.parts.media import MediaTensor, PlacedItem
from ...core.protocols.media import MediaSetup, ProcessedMedia, Video, present_modalities
from ...core.worker.graphs.encoder_graphs import EncoderGraphs, Kind, uploaded
from .kit import Kit
from .tape import recorded

SIZES = ((40, 32), (32, 40), (64, 64), (200, 24), (17, 90))
"""Widths and heights of pictures; recordings have as many hundredths of the longest."""
SECONDS = 2.0
"""Of the longest recording, if the model takes it."""


def process(processor: Any, modality: str, size: tuple[int, int], seed: int = 0) -> ProcessedMedia:
    """Return an item of a size as a processor of a modality makes it."""
    processed: ProcessedMedia
    if modality == "audio":
        processed = processor.audio(recording(processor, size[1], seed))
    elif modality == "video":
        processed = processor.video(film(*size, seed))
    else:
        processed = processor.image(picture(*size, seed))
    return processed


def recording(processor: Any, hundredths: int, seed: int) -> Any:
    most = int(SECONDS * processor.sampling_rate)
    count = min(most, processor.max_samples or most) * hundredths // 100
    return np.random.default_rng(seed).normal(0, 0.1, count).astype(np.float32)


def film(width: int, height: int, seed: int) -> Video:
    shape = (3, height, width, 3)
    frames = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return Video(frames, (0, 3, 7), 4.0, 9)


def picture(width: int, height: int, seed: int = 0) -> Any:
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


class MediaModelKit(Kit):
    """Subclass it, and implement how a checkpoint is written."""

    kind = "media_model"
    given_as_rows: ClassVar[Mapping[str, Mapping[str, str]]] = {}
    """Modalities whose processor has `of_rows` → its fields, and the tensors of an item that have
    the same."""
    launched: ClassVar[frozenset[str]] = frozenset()
    """Modalities whose encodings cannot be recorded, as launches depend on pixels or samples."""

    @classmethod
    def write(cls, folder: Path) -> None:
        """Write a small checkpoint into an empty folder, with random weights and the files of its
        processors and tokenizer."""
        pytest.skip("the kit was not told how to write a checkpoint: give it write")

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineConfig, Any]:
        folder = tmp_path_factory.mktemp("checkpoint")
        cls.write(folder)
        given = EngineConfig(model=str(folder), device="cpu", dtype="float32")
        plugins = cls.plugins()
        config = resolve_config(given, plugins)
        return resolve_runner(given, config, resolve_model_config(config, plugins), plugins)

    @pytest.fixture(scope="class")
    @classmethod
    def model_config(cls, checkpoint: tuple[EngineConfig, ModelConfig]) -> ModelConfig:
        return checkpoint[1]

    @pytest.fixture(scope="class")
    @classmethod
    def processors(cls, model_config: ModelConfig) -> dict[str, Any]:
        """Return the processor of each modality."""
        media, setup = cls.registered(), cls.setup_of(model_config)
        return {each: media.processor(setup, each) for each in present_modalities(media, setup)}

    @pytest.fixture(scope="class")
    @classmethod
    def encoder(cls, checkpoint: tuple[EngineConfig, ModelConfig]) -> Any:
        """The encoder, with its weights."""
        config, model_config = checkpoint
        device = torch.device("cpu")
        with torch.inference_mode():
            model: Any = build_model(cls.plugins(), config, model_config, device, Operations())
        return model.media

    @staticmethod
    def setup_of(model_config: ModelConfig) -> MediaSetup:
        from ...core.text.tokenizer import Tokenizer

        tokenizer = Tokenizer.load(str(model_config.path))
        return MediaSetup(
            model_config.path, model_config.whole_config,
            tokenize=lambda text: tokenizer.encode(text, add_special_tokens=False),
        )  # fmt: skip

    @staticmethod
    @torch.inference_mode()
    def encode(encoder: Any, *items: ProcessedMedia) -> list[torch.Tensor]:
        tensors = [
            {name: torch.from_numpy(np.ascontiguousarray(v)) for name, v in item.tensors.items()}
            for item in items
        ]
        return list(encoder.encode(tensors))

    # -------------------------------------------------------------- tests

    def test_the_checkpoint_is_served_with_media(self, model_config: ModelConfig) -> None:
        assert model_config.text_alone == "" and model_config.media is not None
        media, setup = self.registered(), self.setup_of(model_config)
        present = present_modalities(media, setup)
        assert set(present) <= set(media.modalities)
        assert model_config.media.modalities == present

    def test_each_embedded_token_has_a_row(
        self, processors: dict[str, Any], encoder: Any, model_config: ModelConfig
    ) -> None:
        width = (1 + encoder.num_levels) * model_config.hidden_size
        for modality, size in itertools.product(processors, SIZES):
            item = process(processors[modality], modality, size)
            embedded = [True] * len(item.token_ids) if item.embedded is None else item.embedded
            assert len(embedded) == len(item.token_ids) > 0
            assert all(0 <= token < model_config.vocab_size for token in item.token_ids)
            [rows] = self.encode(encoder, item)
            assert rows.shape == (sum(embedded), width), (modality, size)
            assert torch.isfinite(rows).all()

    def test_rows_that_are_given_stand_where_an_item_stands(
        self, processors: dict[str, Any]
    ) -> None:
        for modality, size in itertools.product(self.given_as_rows, SIZES):
            item = process(processors[modality], modality, size)
            fields = {
                name: np.asarray(item.tensors[tensor])
                for name, tensor in self.given_as_rows[modality].items()
            }
            content = content_of(item, modality, "")
            [given] = processors[modality].of_rows(content.num_rows, fields)
            assert not given.tensors and given.grid == item.grid
            again = content_of(given, modality, "")
            assert (again.token_ids, again.runs) == (content.token_ids, content.runs)

    def test_tensors_depend_on_the_item_alone(self, processors: dict[str, Any]) -> None:
        for modality, processor in processors.items():
            first, again, other = (process(processor, modality, (48, 48), s) for s in (1, 1, 2))
            assert list(first.token_ids) == list(again.token_ids) and first.grid == again.grid
            for name, value in first.tensors.items():
                assert np.array_equal(value, again.tensors[name]), name
            assert any(not np.array_equal(v, other.tensors[n]) for n, v in first.tensors.items())

    def test_items_together_are_encoded_as_alone(
        self, processors: dict[str, Any], encoder: Any
    ) -> None:
        items = [
            process(processor, modality, size, seed)
            for modality, processor in processors.items()
            for seed, size in enumerate(SIZES)
        ]
        for item, rows in zip(items, self.encode(encoder, *items), strict=True):
            [alone] = self.encode(encoder, item)
            assert torch.allclose(rows, alone, atol=1e-5)

    def test_recorded_encodings_give_what_launched_ones_give(
        self, processors: dict[str, Any], encoder: Any
    ) -> None:
        """Alone and two together, with others' contents."""
        for modality in processors.keys() - self.launched:
            processor = processors[modality]
            items = [process(processor, modality, (48, 48), seed) for seed in range(3)]
            tensors = [
                {name: MediaTensor.of(np.asarray(value)) for name, value in item.tensors.items()}
                for item in items
            ]
            num_rows = content_of(items[0], modality, "").num_rows
            kinds = [Kind.of(own, num_rows) for own in tensors]
            assert len(set(kinds)) == 1, "items of one size launch the same"
            device = torch.device("cpu")
            given = [{name: uploaded(t, device) for name, t in own.items()} for own in tensors]
            with torch.inference_mode():
                graphs = EncoderGraphs(encoder.encode, recorded, device, 2 * num_rows)
                for number in (1, 2):
                    assert graphs.record(kinds[0], number), f"{modality} cannot be recorded"
                replayed = graphs.encode(given, kinds)
                for rows, own in zip(replayed, given, strict=True):
                    [alone] = encoder.encode([own])
                    assert torch.allclose(rows, alone, atol=1e-5), modality

    def test_positions_of_a_prompt(self, processors: dict[str, Any], encoder: Any) -> None:
        """Words before, between and after items turn by positions that go on by one."""
        if encoder.rope is None:
            pytest.skip("it turns by positions in the sequence")
        items, start = [], 3
        for seed, (modality, size) in enumerate(itertools.product(processors, SIZES[:2])):
            made = process(processors[modality], modality, size, seed)
            content = content_of(made, modality, f"{seed}")
            count = len(content.token_ids)
            items.append(
                PlacedItem(
                    start, count, content.digest, content.runs, content.grid,
                    content.frame_positions,
                )
            )  # fmt: skip
            start = items[-1].end + 4
        positions, delta = encoder.positions(items, start)
        assert positions.shape == (3, start)
        assert (positions[:, :3] == np.arange(3)).all()
        assert (np.diff(positions[:, -4:]) == 1).all()
        assert positions.max() + 1 == start + delta
