"""Where a rank runs: host, cores, NUMA node and device, and how close two such places are."""

from __future__ import annotations

import hashlib
import os
import re
import socket
from dataclasses import dataclass
from pathlib import Path

NEARNESS = {"=": "same rank", "c": "same core", "n": "same NUMA node", "h": "same host", "-": "network"}


@dataclass(frozen=True)
class Place:
    """Where one rank runs. `cores` are those it may use; `device` is "" without an NVIDIA GPU."""

    host: str
    cores: tuple[int, ...]
    numa: tuple[int, ...]
    device: str

    @classmethod
    def here(cls, local_rank: int = 0) -> Place:
        """This process's place; it takes GPU number local_rank of those the driver shows."""
        cores = tuple(sorted(os.sched_getaffinity(0)))
        return cls(socket.gethostname(), cores, _numa_nodes(cores), _device(local_rank))

    def core_list(self) -> str:
        """The cores as the kernel writes them: 0-3,8."""
        runs: list[list[int]] = []
        for core in self.cores:
            if runs and core == runs[-1][1] + 1:
                runs[-1][1] = core
            else:
                runs.append([core, core])
        return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def parse_cores(text: str) -> set[int]:
    """The inverse of `Place.core_list`, as found in /sys."""
    cores: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        cores.update(range(int(first), int(last or first) + 1))
    return cores


def host_number(rank: int) -> int:
    """A number for the host of this process, which has this rank in the world.

    SPMD_NODES=2x2 (nodes x ranks per node): as if every two ranks had a host of their own; -1 when it makes no sense.
    """
    node = 0
    if nodes := os.environ.get("SPMD_NODES", ""):
        parts = re.fullmatch(r"([1-9][0-9]*)x([1-9][0-9]*)", nodes)
        if parts is None or rank >= int(parts[1]) * int(parts[2]):
            return -1
        node = rank // int(parts[2])
    boot = Path("/proc/sys/kernel/random/boot_id")  # two hosts may have one name
    return text_number(f"{socket.gethostname()} {boot.read_text() if boot.exists() else ''} {node}")


def text_number(text: str) -> int:
    """63 bits that differ where texts do."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


def _numa_nodes(cores: tuple[int, ...], root: Path = Path("/sys/devices/system/node")) -> tuple[int, ...]:
    nodes = {}
    for path in root.glob("node[0-9]*/cpulist"):
        nodes[int(path.parent.name[4:])] = parse_cores(path.read_text())
    return tuple(sorted(node for node, members in nodes.items() if members & set(cores)))


def _device(local_rank: int) -> str:
    """Name of the GPU of a local rank, or "". NVML is initialised and shut down here: nobody else's business."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:  # no package, no driver, no device: all mean "no GPU here"
        return ""
    try:
        if local_rank >= pynvml.nvmlDeviceGetCount():
            return ""
        name = pynvml.nvmlDeviceGetName(pynvml.nvmlDeviceGetHandleByIndex(local_rank))
        return f"{local_rank}: {name}"
    except pynvml.NVMLError:  # a driver that answers to nvmlInit may still refuse the device
        return ""
    finally:
        pynvml.nvmlShutdown()


def nearness(places: list[Place], a: int, b: int) -> str:
    """One character of NEARNESS: how close ranks a and b are."""
    x, y = places[a], places[b]
    if a == b:
        return "="
    if x.host != y.host:
        return "-"
    if len(x.cores) == 1 and x.cores == y.cores:
        return "c"
    return "n" if x.numa == y.numa and len(x.numa) <= 1 else "h"
