"""Tokenizer and incremental detokenizer over four kinds of vocabulary, against `tokenizers`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from jackfield.core.config import EngineConfig
from jackfield.core.engine.text_processor import TextProcessor
from jackfield.core.errors import ConfigError, InvalidRequest, LoadError
from jackfield.core.loading.model_config import resolve_model_config
from jackfield.core.registry import load_plugins
from jackfield.core.text.detokenizer import IncrementalDetokenizer
from jackfield.core.text.tokenizer import Tokenizer
from jackfield.plugins.conformance.clock import growth

CORPUS = [
    "The quick brown fox jumps over the lazy dog. ",
    "naïve café 你好 世界 🙂🙃 👩‍👩‍👧 x = y + 1\n",
] * 8
SPECIAL = ["<s>", "<|im_start|>", "<|im_end|>"]


def byte_level() -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_tokens([AddedToken("<think>", normalized=False), AddedToken("｜é▁｜")])
    return backend


def byte_fallback() -> Backend:
    letters = [*sorted(set("".join(CORPUS[0])) - {" "}), "é", "▁", "▁the", "▁qu", "ick"]
    tokens = ["<unk>", *SPECIAL, *(f"<0x{b:02X}>" for b in range(256)), *letters]
    vocab = {token: rank for rank, token in enumerate(dict.fromkeys(tokens))}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    backend.add_special_tokens(SPECIAL)
    return backend


def metaspace() -> Backend:
    pieces = [("<unk>", 0.0), ("▁", -2.0), ("▁the", -3.0), ("▁▁", -4.0)]
    pieces += [(c, -5.0) for c in "abcdefghijklmnopqrstuvwxyz"]
    backend = Backend(models.Unigram(pieces, 0, False))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Metaspace()
    backend.add_special_tokens(SPECIAL)
    return backend


def word_level() -> Backend:
    words = ["[UNK]", "hello", "world", "the", "a"]
    backend = Backend(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.add_special_tokens(SPECIAL)
    return backend


KINDS = {
    build.__name__: Tokenizer(build(), bos_token="<s>", eos_token="<|im_end|>")
    for build in (byte_level, byte_fallback, metaspace, word_level)
}
kinds = pytest.mark.parametrize("tokenizer", KINDS.values(), ids=list(KINDS))


def streamed(tokenizer: Tokenizer, prompt: list[int], ids: list[int], **options: bool) -> list[str]:
    detokenizer = IncrementalDetokenizer(tokenizer, prompt, **options)
    return [*(detokenizer.push([id]) for id in ids), detokenizer.finish()]


@kinds
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_ids_streamed_equal_decoding_at_once(tokenizer: Tokenizer, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, tokenizer.max_token_id), max_size=40))
    options = {
        "skip_special_tokens": data.draw(st.booleans()),
        "spaces_between_special_tokens": data.draw(st.booleans()),
    }
    assert "".join(streamed(tokenizer, [], ids, **options)) == tokenizer.decode(ids, **options)
    cut = data.draw(st.integers(0, len(ids)))
    detokenizer = IncrementalDetokenizer(tokenizer, **options)
    pieces = [detokenizer.push(ids[:cut]), detokenizer.push(ids[cut:]), detokenizer.finish()]
    assert "".join(pieces) == tokenizer.decode(ids, **options)


def test_a_character_of_four_bytes_comes_whole_without_a_table_of_bytes() -> None:
    backend = byte_fallback()
    parts = [decoders.ByteFallback(), decoders.Fuse(), decoders.Replace("▁", " ")]
    backend.decoder = decoders.Sequence(parts)
    tokenizer = Tokenizer(backend)
    assert tokenizer.pieces is None
    ids = [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in "🙂".encode()]
    assert streamed(tokenizer, [], ids) == ["", "", "", "🙂", ""]
    # A byte that begins nothing is not waited for longer than a character can be.
    assert streamed(tokenizer, [], [ids[1]] * 5)[:4] == ["", "", "", "\ufffd" * 4]


def test_hidden_tokens_are_no_context() -> None:
    """After a prompt of special tokens alone, a text begins as it does without them."""
    tokenizer = KINDS["byte_fallback"]
    the, begin = (tokenizer.backend.token_to_id(token) for token in ("▁the", "<s>"))
    assert streamed(tokenizer, [begin] * 5, [the]) == ["the", ""]
    assert streamed(tokenizer, [begin] * 5, [the], skip_special_tokens=False) == [" the", ""]
    assert streamed(tokenizer, [the, *[begin] * 5], [the]) == [" the", ""]


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_byte_level_decoding_equals_the_library_for_any_ids(data: st.DataObject) -> None:
    tokenizer = KINDS["byte_level"]
    ids = data.draw(st.lists(st.integers(0, tokenizer.max_token_id), max_size=30))
    for skip in (True, False):
        theirs = tokenizer.backend.decode(ids, skip_special_tokens=skip)
        assert tokenizer.decode(ids, skip_special_tokens=skip) == theirs


CHUNKS = [*"abc é你🙂\n \u200d", "<|im_end|>", "the ", "👩‍👩‍👧"]
TEXTS = st.lists(st.sampled_from(CHUNKS), max_size=30).map("".join)


@pytest.mark.parametrize("kind", ["byte_level", "byte_fallback"])
@settings(max_examples=100, deadline=None)
@given(text=TEXTS, prompt=TEXTS)
def test_text_comes_back_and_no_delta_holds_half_a_character(
    kind: str, text: str, prompt: str
) -> None:
    tokenizer = KINDS[kind]
    ids = tokenizer.encode(text)
    theirs = tokenizer.backend.decode(ids, skip_special_tokens=False)
    assert tokenizer.decode(ids, skip_special_tokens=False) == theirs
    if kind == "byte_level":  # The other kind's own rules put a space after special tokens.
        assert theirs == text
    deltas = streamed(tokenizer, [], ids, skip_special_tokens=False)
    assert "".join(deltas) == theirs and not any("\ufffd" in delta for delta in deltas)
    before = tokenizer.encode(prompt)
    after = "".join(streamed(tokenizer, before, ids, skip_special_tokens=False))
    expected = tokenizer.decode(before + ids, skip_special_tokens=False)
    assert tokenizer.decode(before, skip_special_tokens=False) + after == expected


def test_a_leading_space_is_kept_after_a_prompt_and_stripped_without_one() -> None:
    tokenizer = KINDS["byte_fallback"]
    word = [tokenizer.backend.token_to_id("▁the")]
    assert "".join(streamed(tokenizer, word, word)) == " the"
    assert "".join(streamed(tokenizer, [], word)) == "the"
    assert tokenizer.decode(word) == "the"
    assert tokenizer.token_text(word[0]) == " the"


def test_an_incomplete_character_is_held_back_and_flushed() -> None:
    for kind in ("byte_level", "byte_fallback"):
        tokenizer = KINDS[kind]
        bytes_of = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
        ids = [bytes_of[bytes([b])] for b in "鼠".encode()]
        assert streamed(tokenizer, [], ids) == ["", "", "鼠", ""]
        assert streamed(tokenizer, [], ids[:2]) == ["", "", "\ufffd"]
        assert tokenizer.token_text(ids[0]) == "\ufffd"


@kinds
def test_ids_without_a_token_add_nothing_to_a_stream(tokenizer: Tokenizer) -> None:
    known = tokenizer.encode("the the")
    padded = [id for known_id in known for id in (known_id, tokenizer.max_token_id + 7)]
    assert streamed(tokenizer, [], padded)[::2] == streamed(tokenizer, [], known)
    assert tokenizer.token_text(10**6) == ""


@kinds
@pytest.mark.parametrize("bad", [-1, 10**6, True, "1"])
def test_decoding_an_id_out_of_range_is_refused(tokenizer: Tokenizer, bad: object) -> None:
    with pytest.raises(InvalidRequest, match="not in the vocabulary"):
        tokenizer.decode([bad])  # type: ignore[list-item]


def test_spaces_between_special_tokens_matter_where_tokens_are_joined_with_spaces() -> None:
    tokenizer = KINDS["word_level"]
    ids = tokenizer.encode("hello <|im_start|><|im_end|> world the")
    show = {"skip_special_tokens": False}
    assert tokenizer.decode(ids, **show) == "hello <|im_start|> <|im_end|> world the"
    tight = tokenizer.decode(ids, spaces_between_special_tokens=False, **show)
    assert tight == "hello<|im_start|><|im_end|>world the"


def test_special_tokens_in_a_prompt_are_recognised_unless_refused() -> None:
    for tokenizer in KINDS.values():
        ids = tokenizer.encode("the<|im_end|>the")
        assert tokenizer.eos_token_id in ids
        plain = tokenizer.encode("the<|im_end|>the", allow_special=False)
        assert not tokenizer.special_ids & set(plain)
        assert tokenizer.encode("the dog", allow_special=False) == tokenizer.encode("the dog")
    tokenizer = KINDS["byte_level"]
    plain = tokenizer.encode("a<|im_end|>b", allow_special=False)
    assert tokenizer.decode(plain) == "a<|im_end|>b"


def test_lone_surrogates_do_not_break_encoding() -> None:
    tokenizer = KINDS["byte_level"]
    assert tokenizer.decode(tokenizer.encode("a\ud83d b")) == "a\ufffd b"


def test_bad_words_with_and_without_a_leading_space() -> None:
    tokenizer = KINDS["byte_level"]
    actual = tokenizer.bad_words_ids(["fox", " fox", "fox"])
    assert len(actual) == len(set(actual)) >= 1
    assert tuple(tokenizer.encode("fox")) in actual
    spaced = tuple(tokenizer.encode(" fox"))
    fits = len(spaced) == len(actual[0]) and spaced[0] != actual[0][0]
    assert (spaced in actual) == fits


def test_streaming_is_linear_even_for_bytes_that_never_form_a_character() -> None:
    tokenizer = KINDS["byte_level"]
    bytes_of = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}

    def stream(count: int) -> None:
        text = "".join(streamed(tokenizer, [], [bytes_of[b"\x80"]] * count))
        assert text == "\ufffd" * count

    # Ten times the bytes; quadratic work would be a hundred times as long.
    assert growth(lambda: stream(10_000), lambda: stream(100_000), bar=30) < 30


def save(folder: Path, backend: Backend, **config: object) -> str:
    backend.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def test_loading_reads_tokens_and_templates(tmp_path: Path) -> None:
    path = save(
        tmp_path,
        byte_level(),
        bos_token={"content": "<s>"},
        eos_token="<|im_end|>",
        chat_template=[{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}],
    )
    tokenizer = Tokenizer.load(path)
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 2)
    assert tokenizer.chat_templates == {"default": "d", "tool_use": "t"}
    (tmp_path / "chat_template.jinja").write_text("{{ file }}")
    assert Tokenizer.load(path).chat_template == "{{ file }}"
    input_path = tmp_path / "mine.jinja"
    input_path.write_text("{{ mine }}")
    assert Tokenizer.load(path, chat_template=str(input_path)).chat_template == "{{ mine }}"
    assert Tokenizer.load(path, chat_template="{{ x }}").chat_templates == {"default": "{{ x }}"}


@pytest.mark.parametrize("content", [None, b"\xff\xfe{{ x }}"])
def test_a_template_option_that_cannot_be_read_is_a_wrong_configuration(
    tmp_path: Path, content: bytes | None
) -> None:
    file = tmp_path / "mine.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="chat_template: ") as caught:
        Tokenizer.load(save(tmp_path, byte_level()), chat_template=str(file))
    assert caught.value.param == "chat_template"


def test_a_template_option_that_is_no_jinja_is_a_wrong_configuration(tmp_path: Path) -> None:
    texts, model = TextProcessor(), resolve_model_config(EngineConfig())
    plugins = load_plugins()
    with pytest.raises(ConfigError, match="chat_template: line 1"):
        texts.load(EngineConfig(chat_template="{{ oops"), model, plugins)
    path = save(tmp_path, byte_level(), chat_template="{{ oops")
    with pytest.raises(LoadError, match="chat_template: line 1"):
        texts.load(EngineConfig(tokenizer=path), model, plugins)
    texts.close()


@pytest.mark.parametrize(
    "file, content",
    [
        ("chat_template.jinja", b"\xff\xfe"),
        ("additional_chat_templates/rag.jinja", b"\xff\xfe"),
        ("chat_template.json", b'{"chat_template": ["a"]}'),
        ("chat_template.json", b'{"chat_template": [{"template": "a"}]}'),
        ("chat_template.json", b'{"chat_template": [{"name": 3, "template": 4}]}'),
        ("chat_template.json", b"\xff"),
        ("tokenizer_config.json", b'{"chat_template": [["default", "a"]]}'),
        ("tokenizer_config.json", b"[" * 100_000),
    ],
)
def test_damaged_templates_and_settings_are_refused_by_their_files_names(
    tmp_path: Path, file: str, content: bytes
) -> None:
    path = save(tmp_path, byte_level())
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).write_bytes(content)
    with pytest.raises(LoadError, match=file):
        Tokenizer.load(path)


def test_declared_tokens_that_are_none_are_left_out(tmp_path: Path) -> None:
    declared = {"x": {"content": "<a>"}, "900": {"content": 5}, "901": {"content": "<b>"}}
    tokenizer = Tokenizer.load(save(tmp_path, byte_level(), added_tokens_decoder=declared))
    assert [token.content for token in tokenizer.added_tokens.values()][-1] == "<b>"
    assert len(tokenizer.encode("<a>")) > 1 == len(tokenizer.encode("<b>"))


def test_loading_agrees_with_transformers(tmp_path: Path) -> None:
    from transformers import PreTrainedTokenizerFast

    theirs = PreTrainedTokenizerFast(
        tokenizer_object=byte_level(), bos_token="<s>", eos_token="<|im_end|>", pad_token="[PAD]"
    )
    theirs.save_pretrained(tmp_path)
    ours = Tokenizer.load(str(tmp_path))
    assert ours.vocab_size == len(theirs)
    assert ours.special_ids >= set(theirs.all_special_ids)
    for text in ["<|im_start|>user\nhi 🙂[PAD]<|im_end|>", "  spaces  ", ""]:
        assert ours.encode(text) == theirs.encode(text)
        ids = theirs.encode(text)
        for skip in (True, False):
            assert ours.decode(ids, skip_special_tokens=skip) == theirs.decode(
                ids, skip_special_tokens=skip
            )


TOKEN = {"content": "<new>", "lstrip": False, "rstrip": False, "normalized": False,
         "single_word": False, "special": True}  # fmt: skip
MAP, ADDED = "special_tokens_map.json", "added_tokens.json"
BESIDE: dict[str, dict[str, dict[str, Any]]] = {
    "added_tokens.json": {ADDED: {"<b>": 403, "<a>": 402}},
    "added_tokens.json, one of them an end": {
        "tokenizer_config.json": {"eos_token": "<a>"}, ADDED: {"<a>": 402, "<b>": 403},
    },
    "added_tokens.json beside a list": {
        "tokenizer_config.json": {"additional_special_tokens": ["<b>", "<c>"]},
        ADDED: {"<a>": 402, "<b>": 403},
    },
    "additional_special_tokens": {
        "tokenizer_config.json": {"additional_special_tokens": ["<|im_start|>", "<x>", "the"]},
    },
    "extra_special_tokens": {"tokenizer_config.json": {"extra_special_tokens": ["<x>", "<y>"]}},
    "named extra_special_tokens": {
        "tokenizer_config.json": {"extra_special_tokens": {"image_token": "<image>"}},
    },
    "both lists": {
        "tokenizer_config.json": {
            "extra_special_tokens": ["<x>"], "additional_special_tokens": ["<y>"],
        },
    },
    "a new end": {"tokenizer_config.json": {"eos_token": "<|end|>", "pad_token": "<|pad|>"}},
    "the token with id 0": {"tokenizer_config.json": {"eos_token": "!"}},
    "a token of a name of its own": {"tokenizer_config.json": {"video_token": "<video>"}},
    "special_tokens_map.json": {
        "tokenizer_config.json": {"eos_token": "<one>"},
        MAP: {
            "eos_token": "<two>", "bos_token": {**TOKEN, "lstrip": True},
            "additional_special_tokens": ["<x>"],
        },
    },
    "special_tokens_map.json with another list": {
        "tokenizer_config.json": {"additional_special_tokens": ["<x>"]},
        MAP: {"extra_special_tokens": ["<y>", "<x>"]},
    },
    "added_tokens_decoder, before which the map counts for nothing": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {"403": TOKEN, "402": {**TOKEN, "content": "<other>"}},
            "additional_special_tokens": ["<x>"],
        },
        MAP: {"additional_special_tokens": ["<y>"]}, ADDED: {"<z>": 404},
    },
    "added_tokens_decoder with other flags": {
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "1": {**TOKEN, "content": "<|im_start|>", "rstrip": True},
                "402": {**TOKEN, "special": False, "normalized": True},
            },
            "eos_token": "<new>",
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("case", BESIDE)
def test_tokens_that_are_declared_beside_tokenizer_json(case: str, tmp_path: Path) -> None:
    """Those that transformers adds, with their ids and flags, and no others."""
    from transformers import AutoTokenizer

    path = save(tmp_path, byte_level())
    for name, content in BESIDE[case].items():
        own = {"tokenizer_class": "PreTrainedTokenizerFast"} if "config" in name else {}
        (tmp_path / name).write_text(json.dumps(content | own))
    theirs, ours = AutoTokenizer.from_pretrained(path), Tokenizer.load(path)
    added = {id: repr(token) for id, token in theirs.added_tokens_decoder.items()}
    assert {id: repr(token) for id, token in ours.added_tokens.items()} == added
    assert ours.eos_token == theirs.eos_token and ours.vocab_size == len(theirs)
    text = "the" + " x ".join(token.content for token in ours.added_tokens.values()) + "! the"
    ids = theirs.encode(text)
    assert ours.encode(text) == ids
    for skip in (True, False):
        theirs_text = theirs.decode(ids, skip_special_tokens=skip)
        assert ours.decode(ids, skip_special_tokens=skip) == theirs_text


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="tokenizer"):
        Tokenizer.load(str(tmp_path))


@pytest.mark.parametrize("model_type", ["qwen3", "gpt2", "gemma2", "t5", "mbart"])
def test_a_folder_without_a_vocabulary_is_refused(tmp_path: Path, model_type: str) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(LoadError, match="no file with a vocabulary"):
        Tokenizer.load(str(tmp_path))


def test_loading_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    path = save(tmp_path, byte_level(), chat_template="{{ messages[0].content }}")
    code = (
        "import sys; from jackfield.core.text.tokenizer import Tokenizer;"
        "from jackfield.core.text.chat_template import ChatTemplate;"
        f"t = Tokenizer.load({path!r}); ChatTemplate(t.chat_templates, t);"
        "sys.exit(any(m in sys.modules for m in ('torch', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=300).returncode == 0
