"""spmd: who am I, what must move, and how does it move fastest, for the multi-rank forward pass of transformers.

Importing this package initialises nothing: a public name is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spmd.collectives.allreduce import AllReduceParams
    from spmd.collectives.gather import allgather, alltoall, cp_allgather, reducescatter
    from spmd.control.distributed import Distributed
    from spmd.nn.linear import Linear, TensorParallelMode
    from spmd.topology.mapping import CpType, Mapping

_HOME = {
    "AllReduceParams": "spmd.collectives.allreduce",
    "CpType": "spmd.topology.mapping",
    "Distributed": "spmd.control.distributed",
    "Linear": "spmd.nn.linear",
    "Mapping": "spmd.topology.mapping",
    "TensorParallelMode": "spmd.nn.linear",
    "allgather": "spmd.collectives.gather",
    "alltoall": "spmd.collectives.gather",
    "cp_allgather": "spmd.collectives.gather",
    "reducescatter": "spmd.collectives.gather",
}

__all__ = [
    "AllReduceParams",
    "CpType",
    "Distributed",
    "Linear",
    "Mapping",
    "TensorParallelMode",
    "allgather",
    "alltoall",
    "cp_allgather",
    "reducescatter",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'spmd' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
