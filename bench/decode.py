"""How fast is decoding? SmolLM2, fp32, one thread a rank: ours at tp 1 and 2, transformers, and the products alone.

Each round runs all of them one after the other; ratios are made within a round and the median round is shown. Every
contender's greedy tokens are compared with the others'.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

from jobs import measure, pin, preamble

TOKENS = 48
PROMPT = "Tell me about the history of France."


def ours(path: str) -> None:
    import torch

    from spmd import Distributed, Mapping
    from spmd.control import job
    from spmd.models import tokenizer
    from spmd.models.decoder import Decoder
    from spmd.models.generate import Sampling, generate
    from spmd.models.weights import open_checkpoint

    comm = job.start()
    world, rank = (comm.size, comm.rank) if comm is not None else (1, 0)
    mapping = Mapping(world, rank, tp_size=world)
    pin(Distributed.get(mapping).local_rank)
    torch.set_num_threads(1)
    checkpoint = open_checkpoint(path)
    with torch.inference_mode():
        decoder = Decoder(checkpoint.config, mapping, torch.float32)
        decoder.load(checkpoint)
    prompt = tokenizer.load(checkpoint).chat([{"role": "user", "content": PROMPT}])
    generate(decoder, [prompt], Sampling(8))
    made = generate(decoder, [prompt], Sampling(TOKENS))
    if rank == 0:
        print(json.dumps({"ms": made.decode_ns * 1e-6 / (TOKENS - 1), "tokens": made.tokens[0]}))


def transformers(path: str) -> None:
    from pathlib import Path

    import torch
    from transformers import AutoModelForCausalLM

    from spmd.models import tokenizer
    from spmd.models.weights import open_checkpoint

    pin(0)
    torch.set_num_threads(1)
    file = Path(path)
    model = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()
    prompt = tokenizer.load(open_checkpoint(path)).chat([{"role": "user", "content": PROMPT}])
    with torch.inference_mode():
        for tokens in (8, TOKENS):
            out = model(torch.tensor([prompt]), use_cache=True)
            made = [int(out.logits[0, -1].argmax())]
            begin = time.perf_counter()
            while len(made) < tokens:
                out = model(torch.tensor([made[-1:]]), past_key_values=out.past_key_values, use_cache=True)
                made.append(int(out.logits[0, -1].argmax()))
            seconds = time.perf_counter() - begin
    print(json.dumps({"ms": seconds * 1e3 / (TOKENS - 1), "tokens": made}))


def floor(path: str) -> None:
    """Every matrix of this rank's part of a token's forward once, as products of one row and nothing else."""
    import torch

    from spmd import Distributed, Mapping
    from spmd.control import job
    from spmd.models.decoder import Decoder
    from spmd.models.weights import open_checkpoint

    comm = job.start()
    world, rank = (comm.size, comm.rank) if comm is not None else (1, 0)
    mapping = Mapping(world, rank, tp_size=world)
    pin(rank)
    torch.set_num_threads(1)
    decoder, group = Decoder(open_checkpoint(path).config, mapping, torch.float32), Distributed.get(mapping).group("tp")
    with torch.inference_mode():
        decoder.randomise()
        matrices = [
            linear.weight.t()
            for layer in decoder.layers
            for linear in (
                layer.attention.qkv_proj,
                layer.attention.o_proj,
                layer.mlp.gate_up_proj,
                layer.mlp.down_proj,
            )
        ]
        matrices.append(decoder.head.weight.t())
        rows = {matrix.shape[0]: torch.randn(1, matrix.shape[0]) for matrix in matrices}
        times = []
        for _ in range(12):
            group.barrier()
            begin = time.perf_counter_ns()
            for matrix in matrices:
                torch.mm(rows[matrix.shape[0]], matrix)
            times.append(int(group.allgather_int64([time.perf_counter_ns() - begin]).max()))
    size = sum(matrix.nbytes for matrix in matrices)
    ms = statistics.median(times) * 1e-6
    if rank == 0:
        print(json.dumps({"ms": ms, "gb_per_s": size / ms * 1e-6}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", required=True)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="print the rounds as well")
    parser.add_argument("--part", choices=("ours", "transformers", "floor"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        {"ours": ours, "transformers": transformers, "floor": floor}[args.part](args.model)
        return
    preamble("decode, fp32, batch 1, one thread a rank", model=args.model, rounds=args.rounds, tokens=TOKENS)
    contenders = {
        "floor": (1, "floor"),
        "floor of two": (2, "floor"),
        "transformers": (1, "transformers"),
        "tp=1": (1, "ours"),
        "tp=2": (2, "ours"),
    }
    rounds = []
    for _ in range(args.rounds):
        rounds.append(
            {
                name: measure(n, __file__, "--model", args.model, "--part", part)
                for name, (n, part) in contenders.items()
            }
        )
        tokens = [row["tokens"] for row in rounds[-1].values() if "tokens" in row]
        if any(other != tokens[0] for other in tokens):
            raise SystemExit(f"the contenders' greedy tokens differ: {tokens}")
    print("# contender     ms/token  tokens/s   of the floor's rate")

    def median(value):
        return statistics.median(value(row) for row in rounds)

    for name in contenders:
        ms = median(lambda row, name=name: row[name]["ms"])
        share = median(lambda row, name=name: row["floor"]["ms"] / row[name]["ms"])
        print(f"{name:14s} {ms:9.2f} {1e3 / ms:9.1f} {share:14.2f}")
    print(f"# floor: {median(lambda row: row['floor']['gb_per_s']):.1f} GB/s of weights; all greedy tokens equal")
    first = median(lambda row: row["transformers"]["ms"] / row["tp=1"]["ms"])
    second = median(lambda row: row["tp=1"]["ms"] / row["tp=2"]["ms"])
    bound = median(lambda row: row["floor"]["ms"] / row["floor of two"]["ms"])
    print(f"# tp=1 over transformers: {first:.2f}x (target 1.3)")
    print(f"# tp=2 over tp=1: {second:.2f}x (target 1.7); of the products alone, two ranks over one: {bound:.2f}x")
    if args.json:
        print(json.dumps(rounds))


if __name__ == "__main__":
    main()
