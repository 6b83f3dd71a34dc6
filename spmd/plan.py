"""Show what a model's layers communicate: python -m spmd.plan --model PATH --tp 8 --attn-dp 4; needs no ranks."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from spmd import topo
from spmd.boundary import plan as planner
from spmd.boundary.explain import text
from spmd.collectives import costs
from spmd.control import job
from spmd.errors import InputError
from spmd.models.kinds import layer_kinds
from spmd.topology.mapping import Mapping

DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}


def add_choices(parser: argparse.ArgumentParser) -> None:
    """The options of a plan, as the run command has them."""
    parser.add_argument("--policy", choices=("cost", "seed"), default="cost", help="cheapest, or SGLang's choices")
    parser.add_argument("--a2a", action="store_true", help="experts get their rows by dispatch and combine")
    parser.add_argument("--dense-dp", action="store_true", help="dense MLPs are whole on every rank")
    parser.add_argument("--defer-mlp-sum", choices=("on", "off"), default="on", help="an MLP's sum, to the next norm")
    parser.add_argument(
        "--padding", choices=("none", "auto", "max_len", "sum_len"), default="none", help="of uneven rows that move"
    )
    parser.add_argument("--input-scattered", action="store_true", help="the embedding's sum is finished by the plan")


def choices(args: argparse.Namespace) -> planner.Options:
    """What those options say."""
    given = {field.name: getattr(args, field.name) for field in fields(planner.Options) if hasattr(args, field.name)}
    return planner.Options(**given | {"defer_mlp_sum": args.defer_mlp_sum == "on"})


def options() -> job.Options:
    parser = topo.options()
    parser.prog, parser.description = "python -m spmd.plan", __doc__
    parser.add_argument("--model", required=True, metavar="PATH", help="a folder with config.json, or that file")
    parser.add_argument("--world", type=int, metavar="N", help="ranks; default: the product of tp, pp and cp")
    parser.add_argument("--rows", type=int, action="append", metavar="N", help="of the batch; default: 8 and 4096")
    parser.add_argument("--dtype", choices=DTYPES, default="bfloat16")
    parser.add_argument("--stage", type=int, default=-1, metavar="N", help="pipeline stage; default: the last")
    parser.add_argument(
        "--costs", metavar="FILE", help="JSON object with some of the costs: see spmd.collectives.costs.Costs"
    )
    add_choices(parser)
    return parser


def main() -> None:
    args = job.parse(options(), None)
    path = Path(args.model)
    path = path / "config.json" if path.is_dir() else path
    try:
        values = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise InputError(f"{path} cannot be read as JSON: {error}") from None
    mapping = topo.mapping(args)
    if args.world not in (None, mapping.world_size):
        raise InputError(f"--world {args.world} is not tp {args.tp} * pp {args.pp} * cp {args.cp}")
    kinds, stage = layer_kinds(values), args.stage % mapping.pp_size
    hidden = values.get("hidden_size")
    if type(hidden) is not int or hidden < 1:
        raise InputError(f"{path}: hidden_size must be a whole number above 0, but is {hidden!r}")
    here = mapping.with_rank(stage * mapping.tp_size * mapping.cp_size)
    own = here.pp_layers(len(kinds))
    sizes = args.rows or (8, 4096)
    row_bytes = hidden * DTYPES[args.dtype]
    table = costs.read(args.costs) if args.costs else None
    sys.stdout.write(shown(here, kinds[own.start : own.stop], own.start, row_bytes, args, sizes, table))


def shown(
    mapping: Mapping,
    kinds: Sequence[str],
    first: int,
    row_bytes: int,
    args: argparse.Namespace,
    sizes: Sequence[int],
    table: costs.Costs | None = None,
) -> str:
    """The plans of a stage whose first layer has the number `first`, for batches of these sizes."""
    last = mapping.is_last_pp_rank()
    made = (
        planner.plan(mapping, kinds, planner.Batch(rows, row_bytes), table, choices(args), args.policy, last=last)
        for rows in sizes
    )
    return "\n".join(text(one, first) for one in made)


if __name__ == "__main__":
    job.run(main)
