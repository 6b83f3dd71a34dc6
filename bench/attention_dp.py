"""Does attention DP pay at decode? A small random Qwen3-MoE on four ranks, a batch of 8: tp alone, and two groups.

Five jobs a round: tp 4; attention DP 2 by the plan that is cheapest by measured costs; the same by SGLang's fixed
choices; and these two with the experts cut 2 x 2 and reached by all-to-all. Time of a token; of it what the slowest
rank spends in communication, which, with two ranks to a core, is mostly waiting for the other's arithmetic; and how
long the communication of a token takes with no arithmetic between. Ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import TYPE_CHECKING, Any, Literal

from jobs import measure, pin, preamble

if TYPE_CHECKING:
    from spmd.models.decoder import Decoder

EXPERTS, TOP = 16, 4
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": EXPERTS,
    "num_experts_per_tok": TOP,
    "norm_topk_prob": True,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
}
BATCH, PROMPT, TOKENS, RANKS = 8, 64, 24, 4
CONTENDERS = {  # attn_dp, moe_tp, all-to-all, policy
    "tp": (1, 1, False, "cost"),
    "attention DP": (2, 1, False, "cost"),
    "attention DP, fixed choices": (2, 1, False, "seed"),
    "all-to-all": (2, 2, True, "cost"),
    "all-to-all, fixed choices": (2, 2, True, "seed"),
}
WHAT = ("ms", "communication", "alone")
SLOWER, COMMUNICATION = 1.15, 0.8  # attention DP over tp; the cheapest plan's communication over the fixed choices'


def alone(decoder: Decoder, counts: tuple[int, ...]) -> float:
    """Milliseconds of a decode step's communication on this rank, its blocks handing on what they get."""
    import torch

    def experts(block: Any, x: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        if not getattr(block, "alltoall", False):
            return x
        ids = (torch.arange(len(x) * TOP).view(-1, TOP) % EXPERTS).int()
        sent = block.exchange.dispatch(x, ids, torch.ones(len(x), TOP), sizes)
        return block.exchange.combine(sent)

    step, times = decoder.communicator.begin(counts, decode=True), []
    for _ in range(2 * TOKENS):
        begin = time.perf_counter_ns()
        x, residual = torch.ones(counts[decoder.mapping.attn_dp_rank], CONFIG["hidden_size"]), None
        for layer, between in zip(decoder.layers, step.layers, strict=True):
            x, residual = between.prepare_attn(x, residual)
            x, residual = between.prepare_mlp(x, residual)
            x, residual = between.postprocess_layer(experts(layer.mlp, x, between.sizes), residual)
        step.finish(x, residual)
        times.append((time.perf_counter_ns() - begin) * 1e-6)
    return statistics.median(times)


def ranks(attn_dp: int, moe_tp: int, a2a: bool, policy: Literal["cost", "seed"]) -> None:
    """One rank: ms of a token, in communication, and the tokens made."""
    import torch

    from spmd import Distributed, Mapping
    from spmd.boundary.plan import Options
    from spmd.collectives.costs import measure as measure_costs
    from spmd.control import job
    from spmd.control.record import recorder
    from spmd.models.config import from_hf
    from spmd.models.decoder import Decoder
    from spmd.models.generate import Sampling, generate

    comm = job.start()
    mapping = Mapping(RANKS, comm.rank, tp_size=RANKS, attn_dp_size=attn_dp, moe_tp_size=moe_tp)
    pin(comm.rank)
    torch.set_num_threads(1)
    costs = measure_costs(mapping)
    with torch.inference_mode():
        decoder = Decoder(
            from_hf(CONFIG, "the benchmark's model"), mapping, torch.float32, Options(a2a=a2a), policy, costs
        )
        decoder.randomise()
    decoder.tune([BATCH // attn_dp])
    prompts = [[(31 * i + 7 * j) % 4096 for j in range(PROMPT)] for i in range(BATCH)]
    generate(decoder, prompts, Sampling(4))
    first = generate(decoder, prompts, Sampling(1))
    recorder.reset()
    made = generate(decoder, prompts, Sampling(1 + TOKENS))
    summary = sum(row["seconds"] for row in recorder.summary())
    recorder.reset()
    generate(decoder, prompts, Sampling(1))
    prefill = sum(row["seconds"] for row in recorder.summary())
    spent = Distributed.get(mapping).allgather_int64([int((summary - prefill) * 1e9)]).max()
    with torch.inference_mode():
        own = int(alone(decoder, (BATCH // attn_dp,) * attn_dp) * 1e6)
    junctions = Distributed.get(mapping).allgather_int64([own]).max()
    if comm.rank == 0:
        ms = {"ms": made.decode_ns * 1e-6 / TOKENS, "communication": float(spent) * 1e-6 / TOKENS}
        ms["alone"] = float(junctions) * 1e-6
        print(json.dumps(ms | {"tokens": [tokens[:3] for tokens in made.tokens], "first": first.tokens}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--part", nargs=1, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        ranks(*CONTENDERS[args.part[0]])
        return
    preamble(f"decode, batch {BATCH}, {RANKS} ranks, a random Qwen3-MoE, fp32", rounds=args.rounds)
    rounds = [{name: measure(RANKS, __file__, "--part", name) for name in CONTENDERS} for _ in range(args.rounds)]
    if any(of["tokens"] != row["tp"]["tokens"] for row in rounds for of in row.values()):
        raise SystemExit("the contenders' tokens differ")
    for name in CONTENDERS:
        ms, spent, own = (statistics.median(row[name][what] for row in rounds) for what in WHAT)
        print(
            f"{name:28s}{ms:8.2f} ms a token, {spent:6.2f} of it in communication; its communication alone {own:6.2f}"
        )
    pairs = [("attention DP", "attention DP, fixed choices"), ("all-to-all", "all-to-all, fixed choices")]
    compared = [(what, *pair, COMMUNICATION) for what in WHAT[1:] for pair in pairs]
    for what, name, other, limit in [("ms", "attention DP", "tp", SLOWER), *compared]:
        ratio = statistics.median(row[name][what] / row[other][what] for row in rounds)
        verdict = "met" if ratio <= limit else "MISSED"
        print(f"# {what}: {name} over {other} {ratio:.2f} <= {limit:.2f} {verdict}")


if __name__ == "__main__":
    main()
