"""Run a model on every rank of the job: mpirun -np N python -m spmd.run --model PATH --prompt TEXT."""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from spmd import plan as spmd_plan
from spmd import report
from spmd.control import job
from spmd.errors import InputError, VerifyError
from spmd.topology.mapping import Mapping
from spmd.topology.split import split

if TYPE_CHECKING:
    from mpi4py import MPI

    from spmd.models.config import ModelConfig
    from spmd.models.decoder import Decoder
    from spmd.models.generate import Generation, Sampling
    from spmd.models.tokenizer import Tokenizer
    from spmd.models.weights import Checkpoint

DTYPES = ("float32", "bfloat16", "float16")
# --verify: largest difference of a logit. For the half types a share of the run's largest logit, since there absolute
# figures mean little: one step of bf16 is 0.25 at SmolLM2's logits of 38
TOLERANCE = {"float32": 2e-4, "bfloat16": 5e-2, "float16": 5e-2}


def options() -> job.Options:
    """The command line; a test freezes its options."""
    parser = job.Options(prog="python -m spmd.run", description=__doc__)
    add = parser.add_argument
    add("--model", metavar="PATH", help="Hugging Face directory or GGUF file (default: a tiny random decoder)")
    add("--tp", type=int, metavar="N", help="tensor-parallel ranks (default: all that pp and cp leave)")
    add("--pp", type=int, metavar="N", help="pipeline stages (default 1)")
    add("--cp", type=int, metavar="N", help="context-parallel ranks (default: 1)")
    add("--cp-type", metavar="T", default="ulysses", help="ulysses (default), ring or helix")
    add("--kv-block", type=int, metavar="B", help="positions that lie together on a rank under helix (default 32)")
    for name in ("attn-dp", "moe-tp", "moe-ep", "moe-cluster"):
        add(f"--{name}", type=int, default=-1, metavar="N", help="see python -m spmd.topo")
    add("--dwdp", type=int, default=0, metavar="N", help="ranks that share their experts' weights")
    spmd_plan.add_choices(parser)
    add("--pp-partition", metavar="N,N,...", help="layers of each stage (default: even)")
    prompts = parser.add_mutually_exclusive_group()
    prompts.add_argument("--prompt", metavar="TEXT")
    prompts.add_argument(
        "--prompts-file",
        metavar="F.jsonl",
        help='lines {"prompt": text} or {"token_ids": [...]}, which need no tokenizer',
    )
    add("--chat", action="store_true", help="wrap each prompt in the checkpoint's chat template")
    add("--max-tokens", type=int, default=32, metavar="N", help="new tokens per prompt (default 32)")
    add("--ignore-eos", action="store_true", help="do not stop at an end-of-text token")
    add("--temperature", type=float, default=0.0, metavar="T", help="0 (default): greedy")
    add("--top-p", type=float, default=1.0, metavar="P")
    add("--seed", type=int, default=0, metavar="N")
    add("--dtype", choices=DTYPES, default="float32")
    add("--microbatches", type=int, metavar="N", help="parts of the batch in the pipeline (default: pp)")
    add("--verify", action="store_true", help="repeat on one rank and compare logits and tokens")
    add("--json", metavar="OUT", help="write what was made and measured")
    add("--trace", metavar="OUT", help="write every collective and send as a Perfetto timeline")
    add("--info", action="store_true", help="show model, layout and parts per rank, and stop")
    add(
        "--costs",
        metavar="FILE",
        help="of the plan's steps, as JSON; or `measure`: between these ranks, before the run",
    )
    add("--plan", action="store_true", help="show what the layers communicate, and stop")
    return parser


@dataclass(frozen=True)
class Prompt:
    """What a line of the prompts file, or --prompt, says: a text or token ids."""

    text: str | None = None
    token_ids: list[int] | None = None


def layout(args: argparse.Namespace, world: int, rank: int) -> Mapping:
    """The mapping of this rank; sizes not given are derived. Errors: InputError with the numbers."""
    pp, cp = args.pp or 1, args.cp or 1
    for name, value in (("--tp", args.tp), ("--pp", args.pp), ("--cp", args.cp)):
        if value is not None and value < 1:
            raise InputError(f"{name} must be at least 1, but got {value}")
    cp_config: dict[str, Any] = {"cp_type": args.cp_type}
    if args.kv_block is not None:
        if args.cp_type.lower() != "helix":
            raise InputError(f"--kv-block {args.kv_block} is of --cp-type helix, but got {args.cp_type}")
        if args.kv_block < 1:
            raise InputError(f"--kv-block must be at least 1, but got {args.kv_block}")
        cp_config["tokens_per_block"] = args.kv_block
    tp = args.tp or max(world // (pp * cp), 1)
    if tp * pp * cp != world:
        raise InputError(
            f"tp {tp} * pp {pp} * cp {cp} = {tp * pp * cp} ranks in the layout, but {world} launched: "
            f"use mpirun -np {tp * pp * cp}, or other sizes"
        )
    partition = None
    if args.pp_partition is not None:
        try:
            partition = [int(count) for count in args.pp_partition.split(",")]
        except ValueError:
            raise InputError(f"--pp-partition {args.pp_partition!r} must be counts like 10,12,8") from None
    sizes = {f"{axis}_size": getattr(args, axis) for axis in ("attn_dp", "moe_tp", "moe_ep", "moe_cluster")}
    sizes |= {"dwdp_size": args.dwdp, "dwdp_rank": rank % args.dwdp if args.dwdp > 1 else 0}
    return Mapping(
        world, rank, tp_size=tp, pp_size=pp, cp_size=cp, cp_config=cp_config, pp_partition=partition, **sizes
    )


def check(args: argparse.Namespace) -> None:
    """Option values that no type can refuse."""
    if args.max_tokens < 1:
        raise InputError(f"--max-tokens must be at least 1, but got {args.max_tokens}")
    if not 0 <= args.temperature < float("inf"):
        raise InputError(f"--temperature must be at least 0, but got {args.temperature}")
    if not 0 < args.top_p <= 1:
        raise InputError(f"--top-p must be above 0 and at most 1, but got {args.top_p}")
    if args.microbatches is not None and args.microbatches < 1:
        raise InputError(f"--microbatches must be at least 1, but got {args.microbatches}")
    for name, path in (("--json", args.json), ("--trace", args.trace)):
        if path is not None and not Path(path).absolute().parent.is_dir():
            raise InputError(f"cannot write {path} ({name}): its folder does not exist")


def read_prompts(args: argparse.Namespace) -> list[Prompt]:
    """The prompts of the options. InputError, naming the line, for a file that is not what the help says."""
    if args.prompts_file is None:
        return [Prompt(text=args.prompt if args.prompt is not None else "Hello")]
    path, prompts = Path(args.prompts_file), []
    try:
        lines = path.read_text().split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"cannot read {path}: {error}") from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path} line {number} is not JSON: {error}") from error
        text, ids = (value.get(key) if isinstance(value, dict) else None for key in ("prompt", "token_ids"))
        right = isinstance(text, str) if ids is None else isinstance(ids, list) and all(type(i) is int for i in ids)
        if not right:
            raise InputError(f'{path} line {number} must be {{"prompt": text}} or {{"token_ids": [numbers]}}')
        prompts.append(Prompt(text, ids))
    if not prompts:
        raise InputError(f"there is no prompt in {path}")
    return prompts


def encode(prompts: list[Prompt], tokenizer: Tokenizer | None, chat: bool) -> list[list[int]]:
    """Token ids of every prompt. InputError, naming the prompt, for an empty text or one the tokenizer refuses."""
    ids = []
    for index, prompt in enumerate(prompts):
        if prompt.token_ids is not None:
            ids.append(prompt.token_ids)
            continue
        if not prompt.text:
            raise InputError(f"prompt {index} is empty: it needs at least one token")
        assert tokenizer is not None, "texts come with a tokenizer"
        talk = [{"role": "user", "content": prompt.text}]
        try:
            ids.append(tokenizer.chat(talk) if chat else tokenizer.encode(prompt.text))
        except InputError as error:
            raise InputError(f"prompt {index}: {error}") from error
    return ids


class Job:
    """One run, step by step. Steps that may fail on one rank alone run under `together`."""

    def __init__(self, args: argparse.Namespace, comm: MPI.Comm | None) -> None:
        self.args, self.comm = args, comm
        self.world, self.rank = (comm.size, comm.rank) if comm is not None else (1, 0)
        self.tokenizer: Tokenizer | None = None
        self.checkpoint: Checkpoint | None = None

    def load(self) -> None:
        """Layout, model, weights, prompts. Collective; an InputError of any rank is raised on all."""
        import torch

        from spmd.collectives import costs
        from spmd.control.distributed import Distributed
        from spmd.control.pipeline import init_pp_comm
        from spmd.models import config, tokenizer, weights

        args, begin = self.args, report.now()
        with job.together(self.comm):
            check(args)
            self.mapping = layout(args, self.world, self.rank)
            if args.model is None:
                self.config: ModelConfig = config.tiny(max(8, self.mapping.tp_size))
            else:
                self.checkpoint = weights.open_checkpoint(args.model)
                self.config = self.checkpoint.config
            self.mapping.pp_layers(self.config.num_layers)
            self.shown = self.plans() if args.plan else ""
        if args.info or args.plan:
            return
        self.dist = Distributed.get(self.mapping)
        if "OMP_NUM_THREADS" not in os.environ:  # ranks share the cores of a host
            torch.set_num_threads(self.dist.cores_per_rank)
        self.costs = None
        if args.costs == "measure":
            self.costs = costs.measure(self.mapping)
        elif args.costs:
            with job.together(self.comm):
                self.costs = costs.read(args.costs)
        with job.together(self.comm):
            self.dtype = getattr(torch, args.dtype)
            with torch.inference_mode():
                self.decoder = self.build(self.mapping)
        load_s = report.seconds_since(begin)
        self.pipeline = init_pp_comm(self.mapping) if self.mapping.has_pp() else None
        ids: list[list[int]] = []
        with job.together(self.comm):
            if self.rank == 0:
                prompts = read_prompts(args)
                if self.checkpoint is None:
                    self.tokenizer = tokenizer.byte_level()
                elif any(prompt.token_ids is None for prompt in prompts):
                    self.tokenizer = tokenizer.load(self.checkpoint)
                ids = encode(prompts, self.tokenizer, args.chat)
        self.prompts: list[list[int]] = self.dist.broadcast(ids)
        self.load_s = load_s

    def build(self, mapping: Mapping) -> Decoder:
        from spmd.models.decoder import Decoder

        decoder = Decoder(self.config, mapping, self.dtype, spmd_plan.choices(self.args), self.args.policy, self.costs)
        if self.checkpoint is None:
            decoder.randomise()
        else:
            decoder.load(self.checkpoint)
        return decoder

    def plans(self) -> str:
        """The plans of this rank's stage, for a token of each of a few prompts and for a long prefill."""
        own, width = self.mapping.pp_layers(self.config.num_layers), spmd_plan.DTYPES[self.args.dtype]
        kinds = [self.config.kind(layer) for layer in own]
        return spmd_plan.shown(self.mapping, kinds, own.start, self.config.hidden * width, self.args, (8, 4096))

    def sampling(self) -> Sampling:
        from spmd.models.generate import Sampling

        args = self.args
        eos = () if args.ignore_eos else self.config.eos
        return Sampling(args.max_tokens, args.temperature, args.top_p, args.seed, eos)

    def rows(self) -> list[int]:
        """How many rows the forwards to come have: prompts of a microbatch at once, then a token of each."""
        microbatches = min(self.args.microbatches or self.mapping.pp_size, len(self.prompts))
        parts, groups = (
            [split(len(self.prompts), microbatches, i) for i in range(microbatches)],
            self.mapping.attn_dp_size,
        )
        shares = [[[i for i in part if i % groups == group] for group in range(groups)] for part in parts]
        prefills = [max(sum(len(self.prompts[i]) for i in share) for share in of_part) for of_part in shares]
        return [*prefills, *range(1, max(len(share) for of_part in shares for share in of_part) + 1)]

    def generate(self) -> Generation:
        """The forward on all ranks; rank 0 shows tokens as they come."""
        from spmd.control.record import recorder
        from spmd.models.generate import generate

        self.tune_s = self.decoder.tune(self.rows())
        show = report.Progress(self.tokenizer, len(self.prompts), self.args.max_tokens) if self.rank == 0 else None
        self.dist.barrier()
        recorder.reset()
        recorder.timeline = self.args.trace is not None
        try:
            made = generate(
                self.decoder,
                self.prompts,
                self.sampling(),
                pipeline=self.pipeline,
                microbatches=self.args.microbatches or self.mapping.pp_size,
                keep_logits=self.args.verify,
                on_token=show.token if show else None,
            )
        finally:
            if show:
                show.stop()
        recorder.timeline, self.communication = False, recorder.summary()
        if show:
            show.texts(made.tokens)
        return made

    def verify(self, made: Generation) -> tuple[str, bool]:
        """On rank 0: the same forward on one rank alone. Returns a line for the report, and whether it agrees."""
        import torch

        from spmd.models.generate import generate, leads

        here = self.mapping.is_last_pp_rank() and leads(self.mapping)
        own = {prompt: torch.stack(rows).numpy() for prompt, rows in enumerate(made.logits) if here and rows}
        everyone = self.dist.gather(own)
        line, agrees = "", True
        if everyone is not None:
            logits = [rows for _, rows in sorted((item for part in everyone for item in part.items()), key=_prompt)]
            with torch.inference_mode():
                alone = self.build(Mapping())
            again = generate(alone, self.prompts, self.sampling(), keep_logits=True, forced=made.tokens)
            line, agrees = self.compare(logits, again)
        return self.dist.broadcast((line, agrees), timeout=float("inf"))

    def compare(self, logits: list[Any], again: Generation) -> tuple[str, bool]:
        """Logits of both forwards, and the tokens made (and forced again) with those the one rank would make."""
        import torch

        from spmd.models.generate import sample

        worst, largest, differ = 0.0, 1.0, 0
        how = self.sampling()
        for prompt, (many, one, made) in enumerate(zip(logits, again.logits, again.tokens, strict=True)):
            a, b = torch.from_numpy(many), torch.stack(one)
            worst, largest = (
                max(worst, float((a - b).abs().nan_to_num(nan=float("inf")).max())),
                max(largest, float(b.abs().max())),
            )
            differ += sum(
                sample(row, how, prompt, i) != token for i, (row, token) in enumerate(zip(b, made, strict=True))
            )
        exact = self.args.dtype == "float32"
        limit = TOLERANCE[self.args.dtype] * (1 if exact else largest)
        agrees = worst <= limit < float("inf") and (differ == 0 or not exact)
        return f"largest logit difference {worst:.2g} (limit {limit:g}), {differ} tokens differ", agrees


def _prompt(item: tuple[int, Any]) -> int:
    return item[0]


def main() -> None:
    comm = job.start()
    args = job.parse(options(), comm)
    this = Job(args, comm)
    this.load()
    if args.info or args.plan:
        if this.rank == 0:
            sys.stdout.write(this.shown or report.info(this.config, this.mapping, args.model))
        return
    if this.rank == 0 and args.model is None:
        sys.stderr.write("spmd: no --model: a tiny decoder with random weights (its text means nothing)\n")
    made = this.generate()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    verdict = this.verify(made) if args.verify else ("", True)
    facts = report.gather(this.dist, made, this.prompts, this.communication, this.load_s, this.tune_s, peak)
    if this.rank == 0:
        texts = [this.tokenizer.decode(tokens) for tokens in made.tokens] if this.tokenizer else None
        facts.update(text=texts, tokens=made.tokens, verify=verdict[0] or None)
        sys.stdout.write(report.table(facts, this.mapping, args))
    with job.together(comm):
        if this.rank == 0 and args.json:
            report.write(args.json, report.document(facts, this.mapping, args))
    if args.trace:
        timeline = report.timeline(this.dist)
        with job.together(comm):
            if timeline is not None:
                report.write(args.trace, timeline)
    if not verdict[1]:
        raise VerifyError(f"--verify: {verdict[0]}")


if __name__ == "__main__":
    job.run(main)
