"""Makes the speculator that the configuration names."""

from __future__ import annotations

from ...config.speculative_config import FIELD, SpeculativeConfig
from ...nn.operations import Operations
from ...protocols.speculators import Speculator, SpeculatorSetup
from ...registration.plugin_options import typed_options
from ...registry import Plugins
from ..sampling.sampling_state import SamplingState
from ..slot_table import SlotTable
from .drafting import Drafting


def load_drafting(
    plugins: Plugins,
    config: SpeculativeConfig | None,
    table: SlotTable,
    sampling: SamplingState,
    operations: Operations,
    max_model_len: int,
) -> Drafting | None:
    """Return the configured speculator with its books; None: none is configured."""
    if config is None:
        return None
    registry = plugins["speculator"]
    speculator_class = registry.load(config.method)
    setup = SpeculatorSetup(
        num_drafts=config.num_speculative_tokens,
        options=typed_options("", speculator_class.options, config.options, field=FIELD),
        vocab_size=sampling.vocab_size,
        max_model_len=max_model_len,
        num_slots=table.num_slots,
        device=table.storage.device,
    )
    with registry.calling(config.method, "its constructor"):
        speculator: Speculator = speculator_class(setup)
    return Drafting(
        speculator,
        registry.described(config.method),
        table=table,
        sampling=sampling,
        operations=operations,
        num_drafts=setup.num_drafts,
    )
