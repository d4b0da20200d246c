"""Flags of `jackfield serve` for /v1/files and /v1/batches."""

from __future__ import annotations

import argparse
from pathlib import Path

from ...core.errors import ConfigError
from ..batch.objects import BatchOptions


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("batches")
    group.add_argument(
        "--batch-dir",
        metavar="FOLDER",
        help="serve /v1/files and /v1/batches, and keep both in this folder",
    )
    group.add_argument(
        "--batch-max-file-bytes",
        type=int,
        default=BatchOptions.max_file_bytes,
        metavar="BYTES",
        help="refuse larger files",
    )
    group.add_argument(
        "--batch-max-store-bytes",
        type=int,
        default=BatchOptions.max_store_bytes,
        metavar="BYTES",
        help="refuse files when all together are larger",
    )
    group.add_argument(
        "--batch-max-concurrency",
        type=int,
        metavar="N",
        help="requests of batches under way at once; default: half of max_num_seqs",
    )


def batch_options(args: argparse.Namespace) -> BatchOptions | None:
    """None: no batches. Raises ConfigError."""
    if args.batch_dir is None:
        return None
    if not args.batch_dir:
        raise ConfigError("batch_dir: must not be empty", param="batch_dir")
    for name in ("batch_max_file_bytes", "batch_max_store_bytes", "batch_max_concurrency"):
        value = getattr(args, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}: must be at least 1, got {value}")
    return BatchOptions(
        folder=Path(args.batch_dir),
        max_file_bytes=args.batch_max_file_bytes,
        max_store_bytes=args.batch_max_store_bytes,
        max_concurrency=args.batch_max_concurrency,
    )
