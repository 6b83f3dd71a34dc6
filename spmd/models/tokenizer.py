"""Text to token ids and back, and chat templates, from tokenizer.json or from the metadata of a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Mapping as Dict
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from spmd.errors import InputError
from spmd.models.weights import Checkpoint, GgufCheckpoint, read_json, readable


class Tokenizer:
    """encode / decode / stream / chat around a `tokenizers` object."""

    def __init__(self, backend: Backend, template: str | None, special: Dict[str, str]) -> None:
        self._backend, self._template, self._special = backend, template, special

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """Token ids; `special` adds what the model wants around a text (a begin token, usually).

        InputError for a text that is not Unicode (a lone surrogate, as bytes of another encoding become).
        """
        try:
            return self._backend.encode(text, add_special_tokens=special).ids
        except TypeError as error:
            raise InputError(f"the text {text[:20]!r} ... is not valid Unicode: give it as UTF-8") from error

    def decode(self, ids: list[int]) -> str:
        return self._backend.decode(ids, skip_special_tokens=True)

    def stream(self) -> Stream:
        """A decoder that gets one id at a time."""
        return Stream(self._backend)

    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        """Token ids of a conversation ready for the model's answer. InputError when there is no chat template."""
        if self._template is None:
            raise InputError("the checkpoint has no chat template: leave out --chat")
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals |= {"raise_exception": _refuse, "strftime_now": datetime.now().strftime}
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        try:
            text = environment.from_string(self._template).render(
                messages=messages, add_generation_prompt=True, **self._special
            )
        except Exception as error:  # a template is a program of somebody else's, and may fail in any way
            raise InputError(f"the chat template failed: {_line(error)}") from error
        return self.encode(text, special=False)


class Stream:
    """Text of a growing list of ids: `step(id)` returns what became readable, "" inside a character."""

    def __init__(self, backend: Backend) -> None:
        self._backend, self._state = backend, DecodeStream(skip_special_tokens=True)

    def step(self, token: int) -> str:
        return self._state.step(self._backend, token) or ""


def _line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


def _refuse(message: str) -> NoReturn:
    from jinja2.exceptions import TemplateError

    raise TemplateError(message)


def load(checkpoint: Checkpoint) -> Tokenizer:
    """The checkpoint's tokenizer. InputError when it has none, or one of an unknown kind."""
    if isinstance(checkpoint, GgufCheckpoint):
        with readable(checkpoint.path, "the tokenizer of "):
            return _from_gguf(checkpoint.tokenizer_metadata(), checkpoint.path)
    return _from_directory(checkpoint.path)


def byte_level() -> Tokenizer:
    """256 bytes and nothing else, for models without a checkpoint."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend, None, {})


def _from_directory(path: Path) -> Tokenizer:
    file = path / "tokenizer.json"
    if not file.exists():
        raise InputError(f"{path} has no tokenizer.json: give prompts as token_ids in a --prompts-file")
    settings_file, template_file = path / "tokenizer_config.json", path / "chat_template.jinja"
    with readable(file):
        backend = Backend.from_file(str(file))
    settings = read_json(settings_file) if settings_file.exists() else {}
    template = settings.get("chat_template")
    if template_file.exists():
        with readable(template_file):
            template = template_file.read_text()
    with readable(settings_file):
        if isinstance(template, list):  # several named templates
            template = {item["name"]: item["template"] for item in template}.get("default")
        if template is not None and not isinstance(template, str):
            raise ValueError(f"chat_template is {str(template)[:40]!r}, not a text")
        special = {}
        for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
            value = settings.get(name)
            if isinstance(value, dict):
                value = value.get("content", value)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"{name} is {str(value)[:40]!r}, not a text")
            if value is not None:
                special[name] = value
    return Tokenizer(backend, template, special)


# how GGUF's `tokenizer.ggml.pre` names cut a text before byte-pair merging
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")


def _split(pattern: str) -> Any:
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )


def _plain() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _digits() -> Any:
    return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _plain()])


_PRE = {
    "default": _plain,
    "gpt-2": _plain,
    "smollm": _digits,
    "llama-bpe": lambda: _split(_LLAMA3),
    "llama3": lambda: _split(_LLAMA3),
    "qwen2": lambda: _split(_QWEN2),
}
_CONTROL, _USER_DEFINED = 3, 4  # token types of GGUF


def _from_gguf(metadata: Dict[str, Any], path: Path) -> Tokenizer:
    def get(name: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}", default)

    kind, tokens = get("model"), get("tokens")
    if tokens is not None and not all(isinstance(token, str) for token in tokens):
        raise InputError(f"{path}: tokenizer.ggml.tokens must be texts")
    if tokens is None:
        raise InputError(f"{path} has no tokenizer: give prompts as token_ids in a --prompts-file")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if kind == "gpt2":
        backend = _byte_level_bpe(vocabulary, get("merges", []), get("pre", "default"), path)
    elif kind == "llama":
        scores = get("scores")
        if not isinstance(scores, list) or len(scores) != len(tokens):
            raise InputError(f"{path}: tokenizer.ggml.scores must be {len(tokens)} numbers, one for each token")
        backend = _sentencepiece(vocabulary, scores, get("add_space_prefix", True))
    else:
        raise InputError(f"{path}: tokenizer {kind!r} is not supported, only gpt2 and llama")
    for token, token_type in zip(tokens, get("token_type", []), strict=False):
        if token_type == _CONTROL:
            backend.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_type == _USER_DEFINED:
            backend.add_tokens([AddedToken(token, normalized=False)])
    special = {}
    for name, key in (("bos_token", "bos_token_id"), ("eos_token", "eos_token_id"), ("unk_token", "unknown_token_id")):
        if get(key) is not None:
            if not (type(get(key)) is int and 0 <= get(key) < len(tokens)):
                raise InputError(f"{path}: tokenizer.ggml.{key} is {get(key)!r}, but there are {len(tokens)} tokens")
            special[name] = tokens[get(key)]
    if get("add_bos_token", kind == "llama") and "bos_token" in special:
        bos = special["bos_token"]
        backend.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, vocabulary[bos])]
        )
    return Tokenizer(backend, metadata.get("tokenizer.chat_template"), special)


def _byte_level_bpe(vocabulary: dict[str, int], merges: list[str], pre: str, path: Path) -> Backend:
    if pre not in _PRE:
        raise InputError(f"{path}: pre-tokenizer {pre!r} is not supported, only {', '.join(_PRE)}")
    pairs = [(left, right) for left, _, right in (str(merge).partition(" ") for merge in merges)]
    if not isinstance(merges, list) or any(half not in vocabulary for pair in pairs for half in pair):
        raise InputError(f"{path}: tokenizer.ggml.merges must be pairs of tokens of its vocabulary")
    backend = Backend(models.BPE(vocabulary, pairs, ignore_merges=pre in ("llama-bpe", "llama3")))
    if pre == "qwen2":
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = _PRE[pre]()
    backend.decoder = decoders.ByteLevel()
    return backend


def _sentencepiece(vocabulary: dict[str, int], scores: list[float], prefix: bool) -> Backend:
    """SentencePiece BPE: merges follow from the scores, best piece first; unknown characters fall back to bytes."""
    merges = []
    for piece, index in vocabulary.items():
        halves = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        known = [(left, right) for left, right in halves if left in vocabulary and right in vocabulary]
        known.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges += [(scores[index], pair) for pair in known]
    merges.sort(key=lambda entry: -entry[0])
    backend = Backend(
        models.BPE(vocabulary, [pair for _, pair in merges], unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    steps = [normalizers.Prepend("▁")] if prefix else []
    backend.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", "▁")])
    tail = [decoders.Strip(" ", 1, 0)] if prefix else []
    backend.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), *tail])
    return backend
