"""Show a layout: python -m spmd.topo --tp 4 --cp 2; under mpirun also where ranks run and how close any two are."""

from __future__ import annotations

import argparse
import io
import sys

from spmd.control import job
from spmd.errors import InputError
from spmd.topology.mapping import AXES, Mapping
from spmd.topology.node import NEARNESS, Place, nearness
from spmd.topology.radix import Group

_SHOWN = 64  # groups of an axis and ranks of a table that are shown before "..."


def options() -> job.Options:
    parser = job.Options(prog="python -m spmd.topo", description=__doc__)
    add = parser.add_argument
    for name in ("tp", "pp", "cp"):
        add(f"--{name}", type=int, default=1, metavar="N")
    for name in ("moe-tp", "moe-ep", "moe-cluster", "attn-tp", "attn-cp", "attn-dp"):
        add(f"--{name}", type=int, default=-1, metavar="N")
    add("--cp-type", metavar="T", help="ulysses (default), ring or helix")
    add("--attention-dp", action="store_true", help="attention data parallelism: every tp rank owns its own requests")
    add("--dwdp", type=int, default=0, metavar="N", help="ranks that share their experts' weights")
    add("--gpus-per-node", type=int, default=8, metavar="N")
    add("--all", action="store_true", help=f"show more than {_SHOWN} ranks and groups")
    return parser


def mapping(args: argparse.Namespace, rank: int = 0) -> Mapping:
    """The layout that the options describe; its world is the product of tp, pp and cp."""
    return Mapping(
        args.tp * args.pp * args.cp,
        rank,
        args.gpus_per_node,
        tp_size=args.tp,
        pp_size=args.pp,
        cp_size=args.cp,
        cp_config={"cp_type": args.cp_type} if args.cp_type else None,
        moe_tp_size=args.moe_tp,
        moe_ep_size=args.moe_ep,
        moe_cluster_size=args.moe_cluster,
        attn_tp_size=args.attn_tp,
        attn_cp_size=args.attn_cp,
        attn_dp_size=args.attn_dp,
        enable_attention_dp=args.attention_dp,
        dwdp_size=args.dwdp,
        dwdp_rank=rank % args.dwdp if args.dwdp > 1 else 0,
    )


def render(layout: Mapping, places: list[Place] | None, limit: int) -> str:
    """The whole output. places: where each rank runs, when the ranks are really there."""
    from rich.console import Console
    from rich.table import Table

    out = io.StringIO()
    console = Console(file=out, width=160, force_terminal=False, no_color=True)
    shown = range(min(layout.world_size, limit))
    axes = [axis for axis in AXES if axis in ("pp", "tp", "cp") or getattr(layout, f"{axis}_size") > 1]
    console.print(f"{layout.world_size} ranks, slowest axis first; cp type {layout.cp_type}", highlight=False)
    table = Table(box=None, padding=(0, 2, 0, 0))
    for column in ("rank", *axes, "node", "local", *(("host", "cores", "numa", "device") if places else ())):
        table.add_column(column, justify="right")
    for rank in shown:
        here = layout.with_rank(rank)
        cells = [rank, *(getattr(here, f"{axis}_rank") for axis in axes), here.node_rank, here.local_rank]
        if places:
            place = places[rank]
            cells += [place.host, place.core_list(), ",".join(map(str, place.numa)), place.device or "-"]
        table.add_row(*map(str, cells))
    console.print(table)
    if len(shown) < layout.world_size:
        console.print(f"... {layout.world_size - len(shown)} more ranks (--all)", highlight=False)
    groups = Table(box=None, padding=(0, 2, 0, 0), title="groups", title_justify="left")
    for axis in axes:
        all_groups = layout.groups(axis)
        texts = [_ranks(all_groups[i], limit) for i in range(min(len(all_groups), limit))]
        more = f" ... {len(all_groups) - len(texts)} more" if len(texts) < len(all_groups) else ""
        groups.add_row(axis, str(getattr(layout, f"{axis}_size")), " ".join(texts) + more)
    console.print(groups)
    if places:
        console.print(_matrix(places[:limit]))
    return out.getvalue()


def _ranks(group: Group, limit: int) -> str:
    if len(group) <= limit:
        return str(list(group))
    return f"[{group[0]}, {group[1]}, ..., {group[-1]}]"


def _matrix(places: list[Place]) -> str:
    """rank x rank: one character each, and what it means."""
    width = len(str(len(places) - 1))
    lines = [" " * width + " " + " ".join(f"{rank:>{width}}" for rank in range(len(places)))]
    for a in range(len(places)):
        row = " ".join(f"{nearness(places, a, b):>{width}}" for b in range(len(places)))
        lines.append(f"{a:>{width}} {row}")
    legend = ", ".join(f"{sign} {meaning}" for sign, meaning in NEARNESS.items())
    return "\n".join([*lines, legend])


def main() -> None:
    comm = job.start()
    args = job.parse(options(), comm)
    layout = mapping(args)
    places = None
    if comm is not None:
        if comm.size != layout.world_size:
            raise InputError(
                f"the layout has {layout.world_size} ranks (tp {args.tp} * pp {args.pp} * cp {args.cp}), but "
                f"{comm.size} were launched: use mpirun -np {layout.world_size}"
            )
        from spmd.control.distributed import Distributed

        dist = Distributed.get(mapping(args, comm.rank))
        places = dist.allgather(Place.here(dist.local_rank))
    if comm is None or comm.rank == 0:
        sys.stdout.write(render(layout, places, layout.world_size if args.all else _SHOWN))


if __name__ == "__main__":
    job.run(main)
