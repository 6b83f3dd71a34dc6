"""Which layers of a model have a dense MLP and which have experts, by its config.json alone."""

from __future__ import annotations

from collections.abc import Mapping as Dict
from typing import Any

from spmd.errors import InputError

EXPERTS = ("num_local_experts", "num_experts", "n_routed_experts")  # Mixtral; Qwen; DeepSeek


def num_experts(values: Dict[str, Any]) -> int:
    """Routed experts of a sparse layer, 0 for a dense model."""
    return next((int(values[key]) for key in EXPERTS if values.get(key)), 0)


def layer_kinds(values: Dict[str, Any]) -> list[str]:
    """ "dense" or "moe" for every layer, in the order of the model. values: what config.json says.

    Qwen: layers of mlp_only_layers are dense, of the others every decoder_sparse_step-th is sparse. DeepSeek: the first
    first_k_dense_replace are dense, then every moe_layer_freq-th is sparse. Errors: InputError without a layer count.
    """
    layers, experts = values.get("num_hidden_layers"), num_experts(values)
    if type(layers) is not int or layers < 1:
        raise InputError(f"num_hidden_layers must be a whole number above 0, but is {layers!r}")
    alone = set(values.get("mlp_only_layers") or ())
    first, every = values.get("first_k_dense_replace") or 0, values.get("moe_layer_freq") or 1
    step = values.get("decoder_sparse_step") or 1

    def sparse(layer: int) -> bool:
        if not experts or layer in alone or (layer + 1) % step:
            return False
        return layer >= first and layer % every == 0

    return ["moe" if sparse(layer) else "dense" for layer in range(layers)]
