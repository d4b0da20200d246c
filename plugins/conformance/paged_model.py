"""A model on its own, over a paged cache, without an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ...core.config import EngineConfig
from ...core.loading.build import build_model
from ...core.loading.model_config import resolve_model_config
from ...core.loading.model_tensors import ModelTensors
from ...core.nn.context import ForwardContext
from ...core.parallel.ranks import ONE_RANK, Ranks
from ...core.protocols.attention import BackendSetup
from ...core.protocols.models import HiddenStates
from ...core.registration.choice import choose
from ...core.registry import Plugins
from ...core.worker.hidden_states import each
from ...core.worker.kv_cache.memory import allocate_cache
from ...core.worker.parts.states import make_states, state_layers
from ...core.worker.selection import attention_refusal, backend_kind, cache_layers
from ...core.worker.start.attention import NoAttention
from .kit import Kit
from .paged import make_layout

VOCAB = 151
LONGEST = 80
BLOCK = 4


def example_prompts() -> list[list[int]]:
    """Return prompts of assorted lengths; the last shares 35 tokens with the one before it."""
    draw = np.random.default_rng(3)
    prompts = [draw.integers(3, VOCAB, size=n).tolist() for n in (1, 5, 17, 63, 40)]
    prompts.append(prompts[-1][:35] + draw.integers(3, VOCAB, size=6).tolist())
    return prompts


def assert_near(got: torch.Tensor, want: torch.Tensor, bound: float) -> None:
    """got: logits; want: logits or log-probabilities, [tokens, vocab]"""
    torch.testing.assert_close(
        got.log_softmax(-1).cpu(), want.log_softmax(-1).cpu(), atol=bound, rtol=0
    )


class PagedModel:
    """A built model over a small paged cache, run row by row as the worker would.

    kernels: the name of both the attention backend and the operations; ranks: whose part of the
    model it is; options: more of the engine's.
    """

    def __init__(
        self,
        folder: Path,
        dtype: str,
        *,
        kernels: str = "auto",
        plugins: Plugins | None = None,
        ranks: Ranks = ONE_RANK,
        **options: Any,
    ) -> None:
        plugins = Kit.plugins() if plugins is None else plugins
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        config = EngineConfig(model=str(folder), device=device.type, dtype=dtype, **options)  # type: ignore[arg-type]
        model_config = resolve_model_config(config, plugins)
        kind = model_config.dtype
        _, operations, _ = choose(
            plugins["operations"], "operations", kernels, lambda o: o.supports(device, kind)
        )
        self.device = device
        self.operations = operations()
        self.model = build_model(plugins, config, model_config, device, self.operations, ranks)
        self.tensors = ModelTensors.of(self.model)
        """As it was built."""
        layers = cache_layers(self.model)

        def refusal(backend: Any) -> str | None:
            reasons = [attention_refusal(backend, layer.spec, device, kind) for layer in layers]
            return next((reason for reason in reasons if reason is not None), None)

        backend: Any = NoAttention
        if layers:
            registry = plugins[backend_kind(layers)]
            _, backend, _ = choose(registry, "attention_backend", kernels, refusal)
        setup = BackendSetup(
            device=device, dtype=kind, block_size=BLOCK, max_num_seqs=8,
            max_num_batched_tokens=512, max_model_len=LONGEST,
        )  # fmt: skip
        self.backend = backend.create(setup)
        self.blocks_per_row = -(-LONGEST // BLOCK)
        for layer in layers:
            spec, num_blocks = layer.cache_spec(kind), 1 + 8 * self.blocks_per_row
            layer.bind(allocate_cache(spec, num_blocks, BLOCK, device))
        self.keeps_states = bool(state_layers(self.model))
        if self.keeps_states:
            make_states(self.model, config, device)
        self.computed = [0] * 8

    def run(self, rows: Mapping[int, Sequence[int]]) -> dict[int, torch.Tensor]:
        """Run one step of slot → its next tokens; return slot → logits [tokens, vocab] float32."""
        every = self.logits(self.hidden(rows))
        parts = torch.split(every, [len(tokens) for tokens in rows.values()])
        return dict(zip(rows, parts, strict=True))

    @torch.inference_mode()
    def logits(self, hidden: HiddenStates) -> torch.Tensor:
        """Compute logits: hidden states of some rows → [rows, vocab_size] float32."""
        model: Any = self.model
        logits: torch.Tensor = model.compute_logits(each(hidden, torch.clone)).float()
        return logits

    @torch.inference_mode()
    def hidden(
        self, rows: Mapping[int, Sequence[int]], incoming: torch.Tensor | None = None
    ) -> HiddenStates:
        """Run a step as `run` does, up to the input of `compute_logits`, or of the next stage: of
        the tokens of all rows. incoming: what the stage before has returned."""
        slots = list(rows)
        sizes = [(self.computed[s] + len(rows[s]), len(rows[s])) for s in slots]
        width = self.blocks_per_row
        # Blocks of a slot in descending order, so that their order matters.
        table = torch.stack(
            [torch.arange((s + 1) * width, s * width, -1, dtype=torch.int32) for s in slots]
        )
        positions = [torch.arange(length - queries, length) for length, queries in sizes]
        slot_mapping = [
            table[row, at // BLOCK].long() * BLOCK + at % BLOCK for row, at in enumerate(positions)
        ]
        layout = make_layout(sizes, table, torch.cat(slot_mapping), self.device, slots)
        context = ForwardContext(
            backend=self.backend,
            metadata=self.backend.build_metadata(layout),
            layout=layout,
            positions=torch.cat(positions).to(self.device),
        )
        if incoming is not None:
            context = context.with_incoming(incoming.clone())
        tokens = torch.tensor([t for s in slots for t in rows[s]], device=self.device)
        for slot, (length, _) in zip(slots, sizes, strict=True):
            self.computed[slot] = length
        hidden: HiddenStates = self.model(tokens, context)
        return hidden
