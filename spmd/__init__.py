"""spmd: who am I, what must move, and how does it move fastest, for the multi-rank forward pass of transformers.

Importing this package initialises nothing: a public name is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spmd.boundary.communicator import LayerCommunicator
    from spmd.boundary.layout import ScatterMode
    from spmd.collectives.allreduce import AllReduce
    from spmd.collectives.epilogue import AllReduceParams
    from spmd.collectives.exchange import exchange
    from spmd.collectives.fusion import AllReduceFusionOp
    from spmd.collectives.gather import allgather, alltoall, cp_allgather, reducescatter
    from spmd.collectives.moe import MoEAllReduce, MoEAllReduceParams
    from spmd.collectives.strategy import AllReduceStrategy
    from spmd.context.helix import alltoall_helix
    from spmd.control.distributed import Distributed
    from spmd.memory.symmetric import symmetric_empty
    from spmd.nn.linear import Linear, TensorParallelMode
    from spmd.topology.mapping import CpType, Mapping

_HOME = {
    "AllReduce": "spmd.collectives.allreduce",
    "AllReduceFusionOp": "spmd.collectives.fusion",
    "AllReduceParams": "spmd.collectives.epilogue",
    "AllReduceStrategy": "spmd.collectives.strategy",
    "CpType": "spmd.topology.mapping",
    "Distributed": "spmd.control.distributed",
    "LayerCommunicator": "spmd.boundary.communicator",
    "Linear": "spmd.nn.linear",
    "Mapping": "spmd.topology.mapping",
    "MoEAllReduce": "spmd.collectives.moe",
    "MoEAllReduceParams": "spmd.collectives.moe",
    "ScatterMode": "spmd.boundary.layout",
    "TensorParallelMode": "spmd.nn.linear",
    "allgather": "spmd.collectives.gather",
    "alltoall": "spmd.collectives.gather",
    "alltoall_helix": "spmd.context.helix",
    "cp_allgather": "spmd.collectives.gather",
    "exchange": "spmd.collectives.exchange",
    "reducescatter": "spmd.collectives.gather",
    "symmetric_empty": "spmd.memory.symmetric",
}

__all__ = [
    "AllReduce",
    "AllReduceFusionOp",
    "AllReduceParams",
    "AllReduceStrategy",
    "CpType",
    "Distributed",
    "LayerCommunicator",
    "Linear",
    "Mapping",
    "MoEAllReduce",
    "MoEAllReduceParams",
    "ScatterMode",
    "TensorParallelMode",
    "allgather",
    "alltoall",
    "alltoall_helix",
    "cp_allgather",
    "exchange",
    "reducescatter",
    "symmetric_empty",
]
__version__ = "0.1.0"


def __getattr__(name: str) -> object:
    if name not in _HOME:
        raise AttributeError(f"module 'spmd' has no attribute {name!r}")
    return getattr(import_module(_HOME[name]), name)
