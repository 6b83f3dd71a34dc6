"""What do long sequences cost over ranks? Cache bytes, a long prefill by Ring and by Ulysses, and Helix's exchange.

Bytes: of what a rank keeps of 32k tokens, and what a Ring prefill needs besides its own part, by length. Prefill: 8k
tokens through two layers on two ranks against one rank alone; the results are compared. Exchange: a decode step's parts
of attention, combined in shared memory, against the same by the library; two ranks, in turns, the slowest rank's time,
medians, ratios within a round.
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from pathlib import Path
from typing import Any

from jobs import measure, pin, preamble

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "vocab_size": 1024,
    "max_position_embeddings": 65536,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
}
LONG, TOKENS = 32768, 8192
ROWS, HEADS, WIDTH = 8, 32, 128  # of the exchange
FASTER, EXCHANGE = 1.6, 0.5
WAYS = ("ring", "ulysses")


def kept(cp: int, cp_type: str) -> int:
    """Bytes of the largest rank's cache of LONG tokens."""
    import torch

    from spmd import Mapping
    from spmd.models.config import from_hf
    from spmd.nn.attention import Attention

    config, most = from_hf(CONFIG, "the benchmark's model").attention, 0
    for rank in range(cp):
        mapping = Mapping(cp, rank, cp_size=cp, cp_config={"cp_type": cp_type})
        cache = Attention(config, mapping, torch.float32).new_cache(1, LONG, torch.float32)
        rows = cache[0][0] if cp > 1 else cache[0, slice(0, 1)]
        most = max(most, rows.untyped_storage().nbytes())
    return most


def prefill(way: str, tokens: int, turns: int) -> None:
    """Seconds of a prefill on two ranks as a part of one rank's, and how far the last logits are apart."""
    import torch

    from spmd import Distributed, Mapping
    from spmd.control import mpi
    from spmd.models.config import from_hf
    from spmd.models.decoder import Decoder
    from spmd.nn.attention import Chunk

    world = mpi.world()
    pin(world.rank)
    torch.set_num_threads(1)
    config, ids = from_hf(CONFIG, "the benchmark's model"), torch.arange(tokens) * 7 % 1024
    mapping = Mapping(world.size, world.rank, cp_size=world.size, cp_config={"cp_type": way})

    def run(layout: Mapping) -> tuple[float, torch.Tensor]:
        times = []
        with torch.inference_mode():
            decoder = Decoder(config, layout, torch.float32)
            decoder.randomise()
            caches = decoder.new_caches(1, tokens)
            for _ in range(turns):
                if layout.world_size > 1:
                    Distributed.get(layout).barrier()
                begin = time.perf_counter()
                logits = decoder(ids, [Chunk(0, 0, tokens)], caches)
                times.append(time.perf_counter() - begin)
        return statistics.median(times), logits

    took, many = run(mapping)
    slowest = float(Distributed.get(mapping).allgather_int64([int(took * 1e9)]).max()) * 1e-9
    if world.rank == 0:  # one rank alone
        took, one = run(Mapping())
        print(json.dumps({"of one rank": slowest / took, "apart": float((many - one).abs().max())}))
    Distributed.get(mapping).barrier(timeout=300)


def ring_memory(tokens: int) -> None:
    """MiB that attention by Ring adds at its peak, but for the rows that it returns."""
    import torch

    from spmd import Mapping
    from spmd.context.base import Chunk, SequenceCache
    from spmd.context.ring import Ring
    from spmd.control import mpi
    from spmd.nn.attention import GroupedHeads

    world = mpi.world()
    torch.set_num_threads(1)
    ring = Ring(Mapping(world.size, world.rank, cp_size=world.size, cp_config={"cp_type": "ring"}), 8)
    mine = sum(map(len, ring.pieces(tokens) or []))
    queries, rows = torch.ones(mine, 8, 64), torch.ones(mine, 2, 4, 64)
    cache, heads = SequenceCache(1, ring.capacity(tokens), (2, 4, 64), torch.float32), GroupedHeads(8, 64, 0, 2, None)
    cache.append(0, rows, torch.arange(mine), 0)  # its memory is there before
    Path("/proc/self/clear_refs").write_text("5")  # the peak is counted from here
    before = memory("VmRSS")
    out = ring.attend(queries, rows, heads, [Chunk(0, 0, tokens)], cache)
    grown = memory("VmHWM") - before - out.nbytes
    if world.rank == 0:
        print(json.dumps({"MiB": grown / 2**20}))


def memory(name: str) -> int:
    found = re.search(rf"{name}:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) * 1024


def helix(turns: int) -> None:
    """us of the exchange in shared memory and by the library, and how far apart the results are."""
    import torch

    from spmd import Distributed, Mapping
    from spmd.context.helix import exchange
    from spmd.control import mpi

    world = mpi.world()
    pin(world.rank)
    torch.set_num_threads(1)
    mapping = Mapping(world.size, world.rank, cp_size=world.size, cp_config={"cp_type": "helix"})
    group = Distributed.get(mapping).group("cp")
    shares = [range(HEADS * r // world.size, HEADS * (r + 1) // world.size) for r in range(world.size)]
    times: dict[bool, list[float]] = {False: [], True: []}
    apart = 0.0
    for turn in range(turns + 5):
        o, stats = torch.randn(ROWS, HEADS, WIDTH), torch.rand(ROWS, HEADS, 2) + 0.5
        made = []
        for by_library in (False, True):
            group.barrier()
            begin = time.perf_counter_ns()
            made.append(exchange(o, stats, shares, group, by_library))
            took = int(group.allgather_int64([time.perf_counter_ns() - begin]).max())
            if turn >= 5:
                times[by_library].append(took * 1e-3)
        apart = max(apart, float((made[0] - made[1]).abs().max()))
    if world.rank == 0:
        us = {"shared memory": statistics.median(times[False]), "library": statistics.median(times[True])}
        print(json.dumps(us | {"apart": apart}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--part", nargs="+", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.part:
        if args.part[0] == "helix":
            helix(200)
        elif args.part[0] == "memory":
            ring_memory(int(args.part[1]))
        else:
            prefill(args.part[0], int(args.part[1]), int(args.part[2]))
        return
    preamble(f"two layers of {CONFIG['hidden_size']}, fp32; exchange of {ROWS} x {HEADS} x {WIDTH}", rounds=args.rounds)
    whole = kept(1, "helix")
    for way in ("helix", "ring"):
        of = ", ".join(f"cp {cp} {kept(cp, way) / whole:.3f}" for cp in (2, 4, 8))
        print(f"# cache of {LONG} tokens, {whole / 2**20:.0f} MiB a layer on one rank; of it by {way}: {of}")
    extra = {n: measure(2, __file__, "--part", "memory", str(n))["MiB"] for n in (TOKENS, 2 * TOKENS, 4 * TOKENS)}
    said = ", ".join(f"{n} tokens {mib:.0f} MiB" for n, mib in extra.items())
    print(f"# attention by ring, memory that it adds at its peak besides what it returns: {said}")
    for way in WAYS:
        rounds = [measure(2, __file__, "--part", way, str(TOKENS), str(args.turns)) for _ in range(args.rounds)]
        faster = statistics.median(1 / row["of one rank"] for row in rounds)
        verdict = "met" if faster >= FASTER else "MISSED"
        print(f"# {TOKENS} tokens by {way} on two ranks: {faster:.2f} times one rank's speed >= {FASTER} {verdict}")
        if (apart := max(row["apart"] for row in rounds)) > 1e-3:
            raise SystemExit(f"{way}: logits differ by {apart}")
    rounds = [measure(2, __file__, "--part", "helix") for _ in range(args.rounds)]
    ratio = statistics.median(row["shared memory"] / row["library"] for row in rounds)
    us = {name: statistics.median(row[name] for row in rounds) for name in ("shared memory", "library")}
    verdict = "met" if ratio <= EXCHANGE else "MISSED"
    print(f"# exchange: {us['shared memory']:.1f} us of {us['library']:.1f}: {ratio:.2f} <= {EXCHANGE} {verdict}")
    if max(row["apart"] for row in rounds) > 1e-4:
        raise SystemExit("the exchanges differ")


if __name__ == "__main__":
    main()
