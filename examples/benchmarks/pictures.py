"""Prompts with a picture each, with Jackfield and with vLLM on one GPU: seconds, tokens, first
tokens.

    python examples/benchmarks/pictures.py --engines jackfield vllm --output pictures.jsonl
    python examples/benchmarks/pictures.py --shape tiny --side 64 --requests 4 --tokens 8

The shape of Qwen2.5-VL-7B with made-up weights, and pictures of noise. Engines run one after the
other, each in a process of its own. Each gets other pictures for each measurement: one alone with
one token (`first_ms`, of five the one in the middle), all at once with one token (`prefill_s`), all
at once with all tokens (`seconds`, twice), and the last ones again (`again_s`).
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TEXT: dict[str, Any] = {
    "hidden_size": 3584, "intermediate_size": 18944, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "hidden_act": "silu",
    "max_position_embeddings": 128000, "max_window_layers": 28, "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0, "sliding_window": 32768, "use_sliding_window": False,
    "vocab_size": 152064, "initializer_range": 0.02, "tie_word_embeddings": False,
    "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16, "in_chans": 3,
    "out_hidden_size": 3584, "patch_size": 14, "spatial_merge_size": 2, "spatial_patch_size": 14,
    "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31], "tokens_per_second": 2,
    "temporal_patch_size": 2, "hidden_act": "silu",
}  # fmt: skip
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "Qwen2.5-VL-7B": ({}, {}),
    "tiny": (
        {
            "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2,
            "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]},
        },
        {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 4,
         "out_hidden_size": 64, "fullatt_block_indexes": [1]},
    ),
}  # fmt: skip
"""What differs from Qwen2.5-VL-7B, of its text part and tower."""
FIRST_SPECIAL = 151643
SPECIALS = (
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>",
    "<|box_start|>", "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>",
    "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>",
)  # fmt: skip
PROMPT = (
    "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>What is in picture {number}?"
    "<|im_end|>\n<|im_start|>assistant\n"
)


def write_model(folder: Path, shape: str) -> None:
    """Write all files of a checkpoint but its weights."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    text, vision = SHAPES[shape]
    config = {
        **TEXT, **text, "vision_config": {**VISION, **vision}, "model_type": "qwen2_5_vl",
        "architectures": ["Qwen2_5_VLForConditionalGeneration"], "torch_dtype": "bfloat16",
        "image_token_id": 151655, "video_token_id": 151656, "vision_start_token_id": 151652,
        "vision_end_token_id": 151653, "vision_token_id": 151654, "eos_token_id": 151645,
        "bos_token_id": 151643,
    }  # fmt: skip
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor", "min_pixels": 3136,
        "max_pixels": 12845056, "patch_size": 14, "temporal_patch_size": 2, "merge_size": 2,
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "processor_class": "Qwen2_5_VLProcessor",
    }  # fmt: skip
    video = {**processor, "video_processor_type": "Qwen2VLVideoProcessor"}
    del video["image_processor_type"]
    files = {"config": config, "preprocessor_config": processor, "video_preprocessor_config": video}
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=1))
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    fill = [f"<unused{number}>" for number in range(FIRST_SPECIAL - len(alphabet))]
    vocabulary = {token: number for number, token in enumerate([*alphabet, *fill])}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, normalized=False) for token in SPECIALS])
    create: Any = PreTrainedTokenizerFast
    create(tokenizer_object=backend, eos_token="<|im_end|>").save_pretrained(folder)


class Jackfield:
    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        from jackfield import LLM, SamplingParams

        self.llm: Any = LLM(
            str(folder), load_format="dummy", max_model_len=args.max_model_len, device=args.device,
            limit_mm_per_prompt={"image": 1},
        )  # fmt: skip
        self.params: Any = SamplingParams

    def close(self) -> None:
        self.llm.close()


class VLLM:
    def __init__(self, folder: Path, args: argparse.Namespace) -> None:
        from vllm import LLM, SamplingParams

        self.llm: Any = LLM(
            str(folder), load_format="dummy", max_model_len=args.max_model_len,
            limit_mm_per_prompt={"image": 1, "video": 0}, gpu_memory_utilization=0.9,
        )  # fmt: skip
        self.params: Any = SamplingParams

    def close(self) -> None:
        del self.llm


ENGINES: dict[str, Any] = {"jackfield": Jackfield, "vllm": VLLM}


def measure(args: argparse.Namespace) -> None:
    """Write one engine's numbers as one line of JSON."""
    import numpy as np
    from PIL import Image

    random = np.random.default_rng(0)

    def pictures(count: int) -> list[Any]:
        size = (args.side, args.side, 3)
        return [
            Image.fromarray(random.integers(0, 256, size, dtype=np.uint8)) for _ in range(count)
        ]

    def run(images: list[Any], tokens: int) -> float:
        prompts = [
            {"prompt": PROMPT.format(number=number), "multi_modal_data": {"image": image}}
            for number, image in enumerate(images)
        ]
        params = engine.params(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        start = time.perf_counter()
        outputs = engine.llm.generate(prompts, params, use_tqdm=False)
        seconds = time.perf_counter() - start
        assert all(len(output.outputs[0].token_ids) == tokens for output in outputs)
        return seconds

    begun = time.perf_counter()
    engine = ENGINES[args.measure](args.model, args)
    record: dict[str, Any] = {"engine": args.measure, "start_s": time.perf_counter() - begun}
    run(pictures(min(4, args.requests)), min(16, args.tokens))
    record["first_ms"] = 1e3 * statistics.median(run(pictures(1), 1) for _ in range(5))
    record["prefill_s"] = run(pictures(args.requests), 1)
    record["seconds"] = []
    for _ in range(2):
        last = pictures(args.requests)
        record["seconds"].append(run(last, args.tokens))
    record["tokens_per_s"] = args.requests * args.tokens / min(record["seconds"])
    record["again_s"] = run(last, args.tokens)
    engine.close()
    print(json.dumps(record), flush=True)


def main() -> int:
    """Return the exit status, 1 if an engine failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["jackfield"])
    parser.add_argument("--shape", choices=SHAPES, default="Qwen2.5-VL-7B")
    parser.add_argument("--side", type=int, default=1024, help="pixels")
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--output", type=Path)
    parser.add_argument("--measure", choices=ENGINES, help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.measure:
        measure(args)
        return 0
    status = 0
    with tempfile.TemporaryDirectory() as folder:
        write_model(Path(folder), args.shape)
        for engine in args.engines:
            command = [sys.executable, __file__, *sys.argv[1:]]
            done = subprocess.run(
                [*command, "--measure", engine, "--model", folder], stdout=subprocess.PIPE,
                text=True, check=False,
            )  # fmt: skip
            lines = [line for line in done.stdout.splitlines() if line.startswith('{"engine"')]
            status |= done.returncode != 0
            print(lines[-1] if lines else f"{engine}: exit status {done.returncode}", flush=True)
            if args.output and lines:
                with args.output.open("a") as file:
                    file.write(lines[-1] + "\n")
    return int(status)


if __name__ == "__main__":
    sys.exit(main())
