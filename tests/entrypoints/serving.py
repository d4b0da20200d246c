"""Checkpoints with a tokenizer, and a real server in a thread, for the entry points' tests."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import threading
from collections.abc import Callable, Coroutine, Iterator, Sequence
from pathlib import Path
from typing import Any

import tokenizers
import torch
import transformers

from jackfield import AsyncEngine, EngineConfig
from jackfield.core.registry import Plugins
from jackfield.entrypoints.http.options import ServerOptions
from jackfield.entrypoints.server.listen import Listen
from jackfield.entrypoints.server.server import listening

MODEL = "tiny"
SPECIAL = ("<|pad|>", "<|im_start|>", "<|im_end|>")
SCRIPT = (
    "<think>", "two and", " two", "</think>", "Let me look.", "<tool_call>",
    '\n{"name": "get_wea', 'ther", "argu', 'ments": {"city"', ': "Lis', 'bon"}}\n', "</tool_call>",
)  # fmt: skip
"""What the scripted model says after the generation prompt, a token each, before it ends."""
CORPUS = (
    "The quick brown fox jumps over the lazy dog. Ça coûte 3 €, n'est-ce pas? 日本語 🙂\n",
    "<|im_start|>user\nHello there, how are you today?\nassistant\n",
)
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def save_tokenizer(
    folder: Path, script: Sequence[str] = SCRIPT, special: Sequence[str] = ()
) -> tokenizers.Tokenizer:
    """A byte-level BPE with a few merges, chat marks, and the script's tokens, some special."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=list(SPECIAL),
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    for text in script:
        token = tokenizers.AddedToken(text, normalized=False, special=text in special)
        (tokenizer.add_special_tokens if text in special else tokenizer.add_tokens)([token])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"eos_token": "<|im_end|>", "pad_token": "<|pad|>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return tokenizer


def _config(tokenizer: tokenizers.Tokenizer, **changes: Any) -> transformers.Qwen3Config:
    return transformers.Qwen3Config(
        **{
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 1024,
            "initializer_range": 0.2,
            "tie_word_embeddings": False,
            "eos_token_id": tokenizer.token_to_id("<|im_end|>"),
            "pad_token_id": tokenizer.token_to_id("<|pad|>"),
            "bos_token_id": None,
            **changes,
        }
    )


def save_random(folder: Path) -> Path:
    """A random model: its words mean nothing, its bytes are often half a character."""
    tokenizer = save_tokenizer(folder)
    torch.manual_seed(3)
    transformers.Qwen3ForCausalLM(_config(tokenizer)).save_pretrained(folder)
    return folder


def save_scripted(
    folder: Path,
    script: Sequence[str] = SCRIPT,
    special: Sequence[str] = (),
    last: str = "<|im_start|>assistant\n",
) -> Path:
    """A model whose weights are a table of what follows what: it says the script, then ends.
    `last`: what a prompt ends with.

    Attention and MLP add nothing; the embedding is the identity and the head a permutation.
    """
    tokenizer = save_tokenizer(folder, script, special)
    last_of_prompt = tokenizer.encode(last, add_special_tokens=False).ids[-1]
    _save_chains(folder, tokenizer, [[last_of_prompt, *map(tokenizer.token_to_id, script)]])
    return folder


def save_turns(folder: Path, turns: Sequence[str], context: int) -> Path:
    """A model that says the first of `turns`, after the first result of a tool the second, and so
    on; each is one token. `context`: its longest prompt."""
    marks = [f"<|turn{index}|>" for index in range(len(turns))]
    tokenizer = save_tokenizer(folder, [*marks, *turns], special=marks)
    path = folder / "tokenizer_config.json"
    facts = json.loads(path.read_text())
    results = "messages | selectattr('role', 'eq', 'tool') | list | length"
    number = f"[{results}, {len(turns) - 1}] | min"
    generation = "<|im_start|>assistant\n"
    facts["chat_template"] = TEMPLATE.replace(generation, f"{generation}<|turn{{{{ {number} }}}}|>")
    path.write_text(json.dumps(facts))
    chains = [
        [tokenizer.token_to_id(mark), tokenizer.token_to_id(turn)]
        for mark, turn in zip(marks, turns, strict=True)
    ]
    _save_chains(folder, tokenizer, chains, max_position_embeddings=context)
    return folder


def _save_chains(
    folder: Path, tokenizer: tokenizers.Tokenizer, chains: list[list[int]], **changes: Any
) -> None:
    """A model after whose tokens the next of their chain comes, and after the last the end."""
    size = tokenizer.get_vocab_size()
    model = transformers.Qwen3ForCausalLM(_config(tokenizer, hidden_size=size, **changes))
    end = tokenizer.token_to_id("<|im_end|>")
    with torch.no_grad():
        layer = model.model.layers[0]
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(size))
        model.lm_head.weight.zero_()
        for chain in chains:
            for token, follower in itertools.pairwise([*chain, end]):
                model.lm_head.weight[follower, token] = 1.0
    model.save_pretrained(folder)


def engine_config(checkpoint: Path, **options: Any) -> EngineConfig:
    return EngineConfig(
        **{
            "model": str(checkpoint),
            "served_model_name": (MODEL,),
            "dtype": "float32",
            "max_model_len": 512,
            "max_num_seqs": 8,
            "num_gpu_blocks_override": 200,
            "attention_backend": "torch",
            **options,
        }
    )


class Server:
    """A server on its own event loop and thread."""

    def __init__(self, url: str, engine: AsyncEngine, loop: asyncio.AbstractEventLoop) -> None:
        self.url = url
        self.engine = engine
        self._loop = loop

    def call(self, function: Callable[[AsyncEngine], Any]) -> Any:
        """Run `function(engine)` on the server's loop, awaiting what it returns if need be."""

        async def run() -> Any:
            result = function(self.engine)
            return await result if asyncio.iscoroutine(result) else result

        return asyncio.run_coroutine_threadsafe(run(), self._loop).result(300)

    def becomes(self, condition: Callable[[AsyncEngine], bool], seconds: float = 240) -> bool:
        """Whether `condition` comes true in time; looked at every millisecond."""

        async def watch(engine: AsyncEngine) -> bool:
            deadline = self._loop.time() + seconds
            while not condition(engine):
                if self._loop.time() > deadline:
                    return False
                await asyncio.sleep(0.001)
            return True

        return bool(self.call(watch))


@contextlib.contextmanager
def running(
    config: EngineConfig,
    options: ServerOptions | None = None,
    *,
    plugins: Plugins | None = None,
    run: Callable[[Coroutine[Any, Any, None]], Any] = asyncio.run,
) -> Iterator[Server]:
    """A server on a free port of 127.0.0.1. `run`: runs its event loop; uvloop.run does what
    `jackfield serve` does.

    Its worker computes with one thread: two that spin at barriers while the client and the event
    loop want the same cores make a step take a hundred times as long.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ready: asyncio.Future[Server] | None = None
    started = threading.Event()
    parts: list[Any] = []

    async def main() -> None:
        nonlocal ready
        try:
            async with AsyncEngine(config, plugins=plugins) as engine:
                async with listening(engine, Listen(port=0), options) as url:
                    ready = asyncio.get_running_loop().create_future()
                    parts.append(Server(url, engine, asyncio.get_running_loop()))
                    started.set()
                    await ready
        except BaseException as error:
            parts.append(error)
            raise
        finally:
            started.set()

    thread = threading.Thread(target=run, args=(main(),), daemon=True)
    thread.start()
    started.wait(120)
    server = parts[0]
    if isinstance(server, BaseException):
        raise server
    try:
        yield server
    finally:
        torch.set_num_threads(threads)
        assert ready is not None
        server._loop.call_soon_threadsafe(ready.set_result, None)
        thread.join(300)
