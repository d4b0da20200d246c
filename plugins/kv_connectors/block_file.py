"""A KV block as a safetensors file with key and checksum in its metadata."""

from __future__ import annotations

import json
import math
from hashlib import sha256

from ...core.protocols.kv import KVLayout

DTYPES = {
    "float32": "F32", "float16": "F16", "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "uint8": "U8", "int8": "I8",
    "int32": "I32",
}  # fmt: skip
"""torch's names → safetensors'."""
ITEM_BYTES = {"F32": 4, "I32": 4, "F16": 2, "BF16": 2}
MAX_HEADER = 1 << 20


class BlockFormat:
    """Encodes and checks blocks of one layout.

    One tensor per layer and part of its cache, such as `layer.0.kv`: [count, block_size, *shape];
    the metadata hold the block's key, the fingerprint and a SHA-256 digest of the tensors.
    """

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self._tensors = {}
        end = 0
        for number, parts in enumerate(layout.layers):
            for part in parts:
                dtype = DTYPES[part.dtype]
                shape = [part.count, layout.block_size, *part.shape]
                start = end
                end += math.prod(shape) * ITEM_BYTES.get(dtype, 1)
                self._tensors[f"layer.{number}.{part.name}"] = {
                    "dtype": dtype,
                    "shape": shape,
                    "data_offsets": [start, end],
                }

        # Keys and digests are equally long.
        header = self.encode(bytes(32), memoryview(b""))
        self.encoded_bytes = len(header) + layout.block_bytes
        """Bytes of any block, encoded."""

    def encode(self, key: bytes, block: memoryview) -> bytes:
        """block: [block_bytes], layer by layer, part by part."""
        header = json.dumps({"__metadata__": self._metadata(key, block), **self._tensors})
        padded = header.encode() + b" " * (-len(header) % 8)
        return b"".join([len(padded).to_bytes(8, "little"), padded, block])

    def decode(self, key: bytes, data: bytes | memoryview) -> memoryview:
        """Return [block_bytes]. Raises ValueError with the fault."""
        length = int.from_bytes(data[:8], "little")
        if len(data) < 8 or length > min(MAX_HEADER, len(data) - 8):
            raise ValueError("it is cut off in its header")
        try:
            header = json.loads(bytes(data[8 : 8 + length]))
            metadata = header.pop("__metadata__")
        except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
            raise ValueError("its header is not a block's") from None
        if header != self._tensors:
            raise ValueError("its tensors have other names, shapes or dtypes")
        block = memoryview(data)[8 + length :]
        if len(block) != self.layout.block_bytes:
            raise ValueError(f"it has {len(block)} of {self.layout.block_bytes} bytes")
        if metadata != self._metadata(key, block):
            raise ValueError("its key, model or checksum is another")
        return block

    def _metadata(self, key: bytes, block: memoryview) -> dict[str, str]:
        return {
            "key": key.hex(),
            "fingerprint": self.layout.fingerprint.hex(),
            "sha256": sha256(block).hexdigest(),
        }
