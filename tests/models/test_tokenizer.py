"""Do tokenizers rebuilt from GGUF metadata cut texts as transformers does, and do streams and templates hold?"""

import pytest
from transformers import AutoTokenizer

from spmd.errors import InputError
from spmd.models import tokenizer
from spmd.models.weights import open_checkpoint
from tests.launch import SMOLLM

TEXTS = [
    "Hello world 12345, it's  fine\n\n\tnaïve 日本 🎉",
    "def f(x):\n    return x**2  # trailing ",
    "<|im_start|>user\nhi<|im_end|>",
    "",
    " leading",
]
CHAT = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def smollm():
    return tokenizer.load(open_checkpoint(SMOLLM))


@pytest.fixture(scope="module")
def reference():
    return AutoTokenizer.from_pretrained(SMOLLM.parent, gguf_file=SMOLLM.name)


def test_byte_level_bpe_equals_transformers(smollm, reference):
    for text in TEXTS:
        ids = smollm.encode(text)
        assert ids == reference(text).input_ids
        assert smollm.decode(ids) == reference.decode(ids, skip_special_tokens=True)


def test_chat_template_equals_transformers(smollm, reference):
    text = reference.apply_chat_template(CHAT, tokenize=False, add_generation_prompt=True)
    assert smollm.chat(CHAT) == reference(text, add_special_tokens=False).input_ids


def test_a_stream_says_what_decode_says(smollm):
    for text in TEXTS[:2]:
        ids, stream = smollm.encode(text), smollm.stream()
        assert "".join(stream.step(token) for token in ids) == smollm.decode(ids)


def sentencepiece(**more):
    """Metadata of a small SentencePiece vocabulary: specials, bytes, characters, a few pieces."""
    characters = ["▁", "h", "e", "l", "o", "w", "r", "d"]
    pieces = ["▁h", "el", "lo", "ell", "▁hel", "▁hello", "▁w", "or", "▁wor", "ld", "▁world"]
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + characters + pieces
    scores = [0.0] * 259 + [-100.0] * len(characters) + [-float(i + 1) for i in range(len(pieces))]
    types = [2, 3, 3] + [6] * 256 + [1] * (len(characters) + len(pieces))
    facts = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}
    facts |= {"bos_token_id": 1, "eos_token_id": 2, "unknown_token_id": 0} | more
    return {f"tokenizer.ggml.{name}": value for name, value in facts.items()}


def test_sentencepiece_merges_best_piece_first_and_falls_back_to_bytes():
    metadata = sentencepiece()
    made = tokenizer._from_gguf(metadata, "file")
    tokens = metadata["tokenizer.ggml.tokens"]

    def pieces(text):
        return [tokens[i] for i in made.encode(text)]

    assert pieces("hello world") == ["<s>", "▁hello", "▁world"]
    assert pieces("hello") == ["<s>", "▁hello"]
    assert pieces("héllo") == ["<s>", "▁h", "<0xC3>", "<0xA9>", "l", "lo"]
    for text in ("hello world", "héllo wörld 日本"):
        assert made.decode(made.encode(text)) == text


def test_begin_token_is_added_only_when_the_file_says_so():
    assert tokenizer._from_gguf(sentencepiece(add_bos_token=False), "file").encode("hello")[0] != 1


def test_unknown_kinds_are_refused_by_name():
    with pytest.raises(InputError, match="tokenizer 'bert' is not supported"):
        tokenizer._from_gguf(sentencepiece(model="bert"), "file")
    with pytest.raises(InputError, match="pre-tokenizer 'tekken' is not supported"):
        tokenizer._from_gguf(sentencepiece(model="gpt2", pre="tekken"), "file")
    with pytest.raises(InputError, match="has no tokenizer"):
        tokenizer._from_gguf({}, "file")


def test_a_template_that_raises_is_one_line():
    made = tokenizer.Tokenizer(tokenizer.byte_level()._backend, "{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(InputError, match="the chat template failed: roles must alternate"):
        made.chat(CHAT)


def test_bytes_round_trip():
    made = tokenizer.byte_level()
    assert made.decode(made.encode("héllo 日本\n")) == "héllo 日本\n"
