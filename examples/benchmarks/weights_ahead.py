"""What attention adds to a layer of one token, and what asking for the next weights saves.

    python examples/benchmarks/weights_ahead.py --models SmolLM3-3B GPT-2-XL Qwen3-8B

A layer of one token waits for its attention, which reads a few kilobytes where contexts are short.
Meanwhile the weights of the next products can come to the L2 cache (`next_weights` of
`fused_decode_attention`). This times layers as a step has them (projection, attention, output, MLP;
recorded, each with weights of its own): without attention, with it, and by how much is asked for.
"""

from __future__ import annotations

import sys

from jackfield.entrypoints.bench.kernels.layer_sweep import changed_rules, sweep, sweep_parser
from jackfield.entrypoints.bench.kernels.token_layer import TokenLayer
from jackfield.kernels.attention import fused_decode_attention as attention_kernel

MODELS = ("SmolLM3-3B", "GPT-2-XL", "Qwen3-8B")
MEGABYTES = (None, 0, 4, 8, 16, 24)
"""Asked for; None: without attention."""


def facts(megabytes: int | None) -> dict[str, object]:
    return {"attention": megabytes is not None, "megabytes": megabytes or 0}


def seconds(layer: TokenLayer, megabytes: int | None) -> float:
    """Return the time of one layer."""
    with changed_rules(attention_kernel, AHEAD_BYTES=(megabytes or 0) << 20):
        return layer.seconds(
            layer.engine_configs(), attends=megabytes is not None, reads_ahead=bool(megabytes)
        )


def main() -> int:
    return sweep(sweep_parser(__doc__, MODELS), "weights ahead", MEGABYTES, facts, seconds)


if __name__ == "__main__":
    sys.exit(main())
