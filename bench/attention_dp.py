"""Does attention DP pay at decode? A small random Qwen3-MoE on four ranks, a batch of 8: tp alone, and two groups.

Three jobs a round: tp 4; attention DP 2 by the cheapest plan; the same by SGLang's fixed choices. Time of a token, and
of it what this rank spends in communication (the slowest rank's, waiting included); ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import statistics

from jobs import measure, pin, preamble

CONFIG = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "moe_intermediate_size": 256,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "num_experts": 16,
    "num_experts_per_tok": 4,
    "norm_topk_prob": True,
    "vocab_size": 4096,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
}
BATCH, PROMPT, TOKENS, RANKS = 8, 64, 24, 4
CONTENDERS = {"tp": (1, "cost"), "attention DP": (2, "cost"), "attention DP, fixed choices": (2, "seed")}
SLOWER, COMMUNICATION = 1.15, 0.8  # attention DP over tp; the cheapest plan's communication over the fixed choices'


def ranks(attn_dp: int, policy: str) -> None:
    """One rank: ms of a token, in communication, and the tokens made."""
    import torch

    from spmd import Distributed, Mapping
    from spmd.control import job
    from spmd.control.record import recorder
    from spmd.models.config import from_hf
    from spmd.models.decoder import Decoder
    from spmd.models.generate import Sampling, generate

    comm = job.start()
    mapping = Mapping(RANKS, comm.rank, tp_size=RANKS, attn_dp_size=attn_dp, moe_ep_size=RANKS)
    pin(comm.rank)
    torch.set_num_threads(1)
    with torch.inference_mode():
        decoder = Decoder(from_hf(CONFIG, "the benchmark's model"), mapping, torch.float32, policy=policy)
        decoder.randomise()
    decoder.tune([BATCH // attn_dp])
    prompts = [[(31 * i + 7 * j) % 4096 for j in range(PROMPT)] for i in range(BATCH)]
    generate(decoder, prompts, Sampling(4))
    alone = generate(decoder, prompts, Sampling(1))
    recorder.reset()
    made = generate(decoder, prompts, Sampling(1 + TOKENS))
    summary = sum(row["seconds"] for row in recorder.summary())
    recorder.reset()
    generate(decoder, prompts, Sampling(1))
    prefill = sum(row["seconds"] for row in recorder.summary())
    spent = Distributed.get(mapping).allgather_int64([int((summary - prefill) * 1e9)]).max()
    if comm.rank == 0:
        ms = {"ms": made.decode_ns * 1e-6 / TOKENS, "communication": float(spent) * 1e-6 / TOKENS}
        print(json.dumps(ms | {"tokens": [tokens[:3] for tokens in made.tokens], "first": alone.tokens}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--part", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        ranks(int(args.part[0]), args.part[1])
        return
    preamble(f"decode, batch {BATCH}, {RANKS} ranks, a random Qwen3-MoE, fp32", rounds=args.rounds)
    rounds = [
        {name: measure(RANKS, __file__, "--part", str(dp), policy) for name, (dp, policy) in CONTENDERS.items()}
        for _ in range(args.rounds)
    ]
    if any(of["tokens"] != row["tp"]["tokens"] for row in rounds for of in row.values()):
        raise SystemExit("the contenders' tokens differ")
    for name in CONTENDERS:
        ms, spent = (statistics.median(row[name][what] for row in rounds) for what in ("ms", "communication"))
        print(f"{name:28s}{ms:8.2f} ms a token, {spent:6.2f} ms of it in communication")
    for what, name, other, limit in (
        ("ms", "attention DP", "tp", SLOWER),
        ("communication", "attention DP", "attention DP, fixed choices", COMMUNICATION),
    ):
        ratio = statistics.median(row[name][what] / row[other][what] for row in rounds)
        verdict = "met" if ratio <= limit else "MISSED"
        print(f"# {what}: {name} over {other} {ratio:.2f} <= {limit:.2f} {verdict}")


if __name__ == "__main__":
    main()
