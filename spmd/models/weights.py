"""A checkpoint on disk: names to slices. A rank reads the slices it owns and nothing else.

`open_checkpoint(path)` understands a Hugging Face directory (safetensors, sharded or not, plain or FP8: see
`spmd.models.quantised`) and a GGUF file. Pickled checkpoints are refused: loading one can run any code.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from spmd.errors import InputError
from spmd.models import config as model_config
from spmd.models import quantised
from spmd.models.config import ModelConfig
from spmd.nn.linear import Source

_PLAIN = ("F64", "F32", "F16", "BF16")  # safetensors types that are the weights themselves
_PICKLED = (".bin", ".pt", ".pth", ".pkl", ".ckpt")


class Checkpoint:
    """Weights by Hugging Face names. `interleaved`: query and key rows are stored with adjacent rotary pairs."""

    path: Path
    config: ModelConfig
    interleaved = False

    def read(self, name: str, shape: tuple[int, ...]) -> Source:
        """A stored tensor of the expected shape, to be sliced. InputError naming it when it is missing or differs."""
        raise NotImplementedError

    def _check(self, name: str, shape: tuple[int, ...], found: tuple[int, ...] | None) -> None:
        if found is None:
            raise InputError(f"{self.path} has no tensor {name!r}")
        if found != shape:
            raise InputError(f"{self.path}: tensor {name!r} has shape {list(found)}, expected {list(shape)}")


@contextmanager
def readable(path: Path, part: str = "") -> Iterator[None]:
    """Whatever a library raises while reading a file is one line that names the file."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:  # OSError, UnicodeDecodeError, SafetensorError, gguf's ValueError, ...
        why = str(error).splitlines()[0] if str(error) else "no more is known"
        raise InputError(f"cannot read {part}{path}: {type(error).__name__}: {why}") from error


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object. InputError when it is missing, unreadable or something else."""
    with readable(path):
        value = json.loads(path.read_text())
    if not isinstance(value, dict):
        raise InputError(f"cannot read {path}: not a JSON object")
    return value


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Errors: InputError for anything that is not a readable checkpoint of a known architecture."""
    path = Path(path)
    if path.is_dir():
        return SafetensorsCheckpoint(path)
    if path.suffix in _PICKLED:
        raise InputError(f"{path} is a pickled checkpoint, which can run code: convert it to safetensors")
    if not path.exists():
        raise InputError(f"{path} does not exist: give a Hugging Face directory or a GGUF file")
    return GgufCheckpoint(path)


class SafetensorsCheckpoint(Checkpoint):
    """A directory with config.json and model.safetensors or its shards with an index.

    FP8 weights become fp32 as they are read, each slice with the scales it touches. InputError names the tensor when
    one has no scale, a scale of another shape, or another type than the configuration says.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        generation = path / "generation_config.json"
        values, where = read_json(path / "config.json"), str(path / "config.json")
        self.config = model_config.from_hf(values, where, read_json(generation) if generation.exists() else None)
        self._quantisation = quantised.parse(values, where)
        self._home = self._index()
        self._open: dict[Path, Any] = {}

    def _index(self) -> dict[str, Path]:
        index = self.path / "model.safetensors.index.json"
        if index.exists():
            names = read_json(index).get("weight_map")
            if not isinstance(names, dict) or not all(isinstance(file, str) for file in names.values()):
                raise InputError(f"{index} lacks a 'weight_map' from tensor names to file names")
            home = {name: self.path / file for name, file in names.items()}
        else:
            files = sorted(self.path.glob("*.safetensors"))
            if not files:
                pickled = [file.name for file in self.path.iterdir() if file.suffix in _PICKLED]
                hint = f"only {pickled[0]}, a pickled checkpoint, which can run code: convert it" if pickled else "none"
                raise InputError(f"{self.path} needs a .safetensors file, but has {hint}")
            home = {name: file for file in files for name in self._file(file, {}).keys()}  # noqa: SIM118
        for file in sorted(set(home.values())):
            if not file.exists():
                raise InputError(f"{file} does not exist, but the index of {self.path} names it")
        return home

    def _file(self, file: Path, opened: dict[Path, Any]) -> Any:
        if file not in opened:
            from safetensors import safe_open

            with readable(file):
                opened[file] = safe_open(os.fspath(file), framework="pt")
        return opened[file]

    def read(self, name: str, shape: tuple[int, ...]) -> Source:
        scheme = self._quantisation.scheme(name) if self._quantisation is not None else None
        if scheme is None:
            return self._stored(name, [shape], _PLAIN)
        weight = self._stored(name, [shape], quantised.FP8)
        scale = self._stored(scheme.scale_name(name), scheme.scale_shapes(shape), _PLAIN)
        return quantised.ScaledSource(weight, scale, scheme.block_of(shape))

    def _stored(self, name: str, shapes: Sequence[tuple[int, ...]], kinds: tuple[str, ...]) -> Any:
        """A tensor of one of these shapes (the first is the usual one) and of one of these safetensors types."""
        file = self._home.get(name)
        if file is None:
            self._check(name, shapes[0], None)
        assert file is not None
        stored = self._file(file, self._open)
        with readable(file):
            source = stored.get_slice(name)
        found, kind = tuple(source.get_shape()), source.get_dtype()
        self._check(name, found if found in shapes else shapes[0], found)
        if kind not in kinds:
            raise InputError(f"{file}: tensor {name!r} is stored as {kind}, expected {' or '.join(kinds)}")
        return source


_GGUF_NAMES = {
    "model.embed_tokens.weight": "token_embd.weight",
    "model.norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """GGUF's name of a Hugging Face tensor: model.layers.3.mlp.up_proj.weight -> blk.3.ffn_up.weight."""
    if name in _GGUF_NAMES:
        return _GGUF_NAMES[name]
    layer, rest = name.removeprefix("model.layers.").split(".", 1)
    stem, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{_GGUF_NAMES[stem]}.{kind}"


@dataclass(frozen=True)
class _GgufTensor:
    shape: tuple[int, ...]
    kind: Any  # gguf.GGMLQuantizationType
    data: np.ndarray  # bytes or plain numbers, mapped from the file


class GgufCheckpoint(Checkpoint):
    """One GGUF file; quantised blocks become fp32 as they are read."""

    _SMALL = 64  # longest array that is configuration; longer ones are the tokenizer's

    def __init__(self, path: Path) -> None:
        self.path = path
        reader = self._reader()
        self._tensors = {
            tensor.name: _GgufTensor(tuple(int(n) for n in reversed(tensor.shape)), tensor.tensor_type, tensor.data)
            for tensor in reader.tensors
        }
        with readable(path):
            small = {name: field.contents() for name, field in reader.fields.items() if len(field.data) <= self._SMALL}
        del reader  # holds an object per word of the vocabulary (bench/load.py shows the memory)
        embedding = self._tensors.get("token_embd.weight")
        if embedding is None:
            raise InputError(f"{path} has no tensor 'token_embd.weight'")
        factors = self._tensors.get("rope_freqs.weight")
        self.config = model_config.from_gguf(
            small,
            str(path),
            set(self._tensors),
            embedding.shape[0],
            None if factors is None else [float(factor) for factor in factors.data],
        )
        self.interleaved = self.config.family in ("llama", "mistral")  # the converter reorders these and no others

    def _reader(self) -> Any:
        try:
            import gguf
        except ImportError:
            raise InputError(f"reading {self.path} needs the gguf package: pip install 'spmd[gguf]'") from None
        with readable(self.path):
            return gguf.GGUFReader(self.path)

    def tokenizer_metadata(self) -> dict[str, Any]:
        """The key-value pairs that describe the tokenizer, decoded from the file."""
        fields = self._reader().fields
        with readable(self.path):
            return {name: field.contents() for name, field in fields.items() if name.startswith("tokenizer.")}

    def read(self, name: str, shape: tuple[int, ...]) -> Source:
        tensor = self._tensors.get(gguf_name(name))
        self._check(name, shape, None if tensor is None else tensor.shape)
        assert tensor is not None, "checked"
        return _GgufSource(self.path, tensor)


class _GgufSource:
    """One tensor of a GGUF file, dequantised slice by slice: whole blocks are read and the ends trimmed."""

    _STEP = 1 << 22  # elements dequantised at a time, so that temporaries stay small

    def __init__(self, path: Path, tensor: _GgufTensor) -> None:
        self._path, self._tensor = path, tensor

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """fp32 of [rows, columns] of a matrix, or of [elements] of a vector."""
        import gguf

        if len(index) == 1:
            index = (slice(0, 1), index[0])
            return self._matrix(gguf, self._tensor.data.reshape(1, -1), *index)[0]
        return self._matrix(gguf, self._tensor.data, *index)

    def _matrix(self, gguf: Any, data: np.ndarray, rows: slice, cols: slice) -> torch.Tensor:
        block, nbytes = gguf.GGML_QUANT_SIZES[self._tensor.kind]
        first, last = cols.start // block, -(-cols.stop // block)
        per_block = nbytes // data.itemsize
        data = data[rows.start : rows.stop, first * per_block : last * per_block]
        out = torch.empty(rows.stop - rows.start, cols.stop - cols.start)
        step = max(self._STEP // max((last - first) * block, 1), 1)
        trim = slice(cols.start - first * block, cols.stop - first * block)
        for at in range(0, len(out), step):
            with readable(self._path):
                values = gguf.quants.dequantize(data[at : at + step], self._tensor.kind)
            out.numpy()[at : at + step] = values[:, trim]
        return out
