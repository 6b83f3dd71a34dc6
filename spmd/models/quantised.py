"""FP8 checkpoints: which weights have scales, and slices of them times the scales that exactly those slices touch.

Two forms are understood: Hugging Face `fp8` (a scale per block, `weight_scale_inv`) and `compressed-tensors` in format
`float-quantized` (a scale per tensor, output channel or block, `weight_scale`). The arithmetic is weight-only: a slice
is F8_E4M3 * scale in fp32, rounded once when the layer stores it in its own type, and products are those of that type.
Scales of activations and of the KV cache (input_scale, activation_scheme "static", kv_cache_scheme) are accepted and
not used.
"""

from __future__ import annotations

import re
from collections.abc import Mapping as Dict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from spmd.errors import InputError
from spmd.models.config import Reader
from spmd.nn.linear import Source

Block = tuple[int | None, int | None]  # rows and columns under one scale, None: the whole dimension
FP8 = ("F8_E4M3",)  # the safetensors type of a quantised weight
_LINEAR = re.compile(r".*_proj$|lm_head$")  # the modules that are linear layers: no others are ever quantised
_STRATEGIES: dict[str, Block | None] = {"tensor": (None, None), "channel": (1, None), "block": None}  # None: the file's


@dataclass(frozen=True)
class Scheme:
    """How the scales of a weight [out, in] are stored: one per block, in the tensor of this name beside it."""

    name: str
    block: Block

    def scale_name(self, weight: str) -> str:
        return weight.removesuffix("weight") + self.name

    def block_of(self, shape: Sequence[int]) -> tuple[int, int]:
        """Rows and columns under one scale."""
        return self.block[0] or shape[0], self.block[1] or shape[1]

    def scale_shapes(self, shape: Sequence[int]) -> list[tuple[int, ...]]:
        """The shapes that the scale tensor may have: a single scale is a vector or a scalar, others are a grid."""
        if self.block == (None, None):
            return [(1,), ()]
        return [tuple(-(-size // block) for size, block in zip(shape, self.block_of(shape), strict=True))]


@dataclass(frozen=True)
class Quantisation:
    """rules: a scheme for the modules that match; plain: the modules that are left as they are whatever the rules."""

    rules: Sequence[tuple[re.Pattern[str], Scheme]]
    plain: Sequence[re.Pattern[str]]

    def scheme(self, name: str) -> Scheme | None:
        """The scheme of a tensor by its name, None for one that is stored plainly."""
        module, _, kind = name.rpartition(".")
        if kind != "weight" or not _LINEAR.match(module) or any(pattern.match(module) for pattern in self.plain):
            return None
        return next((scheme for pattern, scheme in self.rules if pattern.match(module)), None)


class ScaledSource:
    """A stored FP8 matrix [out, in] and its scales, a grid of one per block or a single one."""

    def __init__(self, weight: Source, scale: Any, block: tuple[int, int]) -> None:
        self._weight, self._scale, self._block = weight, scale, block

    def __getitem__(self, index: tuple[slice, ...]) -> torch.Tensor:
        """fp32 of [rows, columns]. Only these are read, and the scales of the blocks they touch, which they may cut."""
        rows, cols = index
        height, width = self._block
        values = self._weight[rows, cols].float()
        grid = tuple(slice(at.start // n, -(-at.stop // n)) for at, n in zip(index, self._block, strict=True))
        single = len(self._scale.get_shape()) < 2
        scales = (self._scale[...].reshape(1, 1) if single else self._scale[grid]).float()
        block_of_row = torch.arange(rows.start, rows.stop) // height - grid[0].start
        for number, column in enumerate(scales[block_of_row].split(1, dim=1), grid[1].start):
            start, stop = max(number * width, cols.start), min((number + 1) * width, cols.stop)
            values[:, start - cols.start : stop - cols.start] *= column
        return values


def parse(values: Dict[str, Any], where: str) -> Quantisation | None:
    """What the quantization_config of a config.json says, None without one.

    Errors: InputError that names what is missing, absurd or not supported.
    """
    section = Reader(values, where).mapping("quantization_config")
    if not section:
        return None
    read = Reader(section, f"{where}: quantization_config")
    method = _only(read, "quant_method", "fp8", "compressed-tensors")
    read.where += f" {method!r}"
    return _fp8(read) if method == "fp8" else _compressed_tensors(read)


def _only(read: Reader, key: str, *supported: Any) -> Any:
    value = read.values.get(key)
    if value not in supported:
        known = " or ".join(repr(item) for item in supported if item is not None)
        raise InputError(f"{read.where}: {key} {repr(value)[:60]} is not supported, only {known}")
    return value


def _pattern(read: Reader, entry: str, expression: str) -> re.Pattern[str]:
    """The expression made of an entry of the file."""
    try:
        return re.compile(expression)
    except (re.error, OverflowError, RecursionError) as error:
        raise InputError(f"{read.where}: {entry[:60]!r} is no regular expression: {error}") from error


def _fp8(read: Reader) -> Quantisation:
    """Hugging Face `fp8`: every linear layer but those listed; without a list the head alone is left as it is.

    An entry is an expression that a module's name begins with, up to a dot or all of it, or what the name ends with.
    """
    scheme = Scheme("weight_scale_inv", read.pair("weight_block_size"))
    listed = read.texts("modules_to_not_convert", None)
    entries = ["lm_head"] if listed is None else listed
    plain = [_pattern(read, entry, rf"(?:{entry})(?:(?<=\.)|(?=\.)|$)|.*{re.escape(entry)}$") for entry in entries]
    return Quantisation([(_LINEAR, scheme)], plain)


def _compressed_tensors(read: Reader) -> Quantisation:
    """`compressed-tensors`: each group has a scheme for its targets. A target by name goes before a class of modules.

    An entry of `targets` and `ignore` is a module's whole name, "re:" and an expression that its name begins with, or
    "Linear".
    """
    _only(read, "format", "float-quantized")
    _only(read, "transform_config", None, {})
    groups, rules = Reader(read.mapping("config_groups") or {}, f"{read.where}: config_groups"), []
    for name in groups.values:
        group = Reader(groups.mapping(name) or {}, f"{groups.where}: {name}")
        _only(group, "format", None, "float-quantized")
        weights = Reader(group.mapping("weights") or {}, f"{group.where}: weights")
        _only(weights, "type", "float")
        _only(weights, "num_bits", 8)
        _only(weights, "symmetric", None, True)
        strategy = _only(weights, "strategy", *_STRATEGIES)
        scheme = Scheme("weight_scale", _STRATEGIES[strategy] or weights.pair("block_structure"))
        rules += [(_named(group, target), scheme) for target in group.texts("targets")]
    rules.sort(key=lambda rule: rule[0] is _LINEAR)
    return Quantisation(rules, [_named(read, entry) for entry in read.texts("ignore", [])])


def _named(read: Reader, entry: str) -> re.Pattern[str]:
    if entry == "Linear":
        return _LINEAR
    return _pattern(read, entry, entry[len("re:") :] if entry.startswith("re:") else f"{re.escape(entry)}$")
