"""How much private memory does loading add to a rank? Peak RssAnon over what it was before, at tp 1, 2 and 4."""

from __future__ import annotations

import argparse
import json
import threading
import time
from pathlib import Path

from jobs import measure, preamble


def private_kib() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise RuntimeError("no RssAnon in /proc/self/status")


def one_rank(path: str) -> None:
    """On every rank: load its part; rank 0 prints the largest growth and the slowest load."""
    import torch

    from spmd import Distributed, Mapping
    from spmd.control import job
    from spmd.models.decoder import Decoder
    from spmd.models.weights import open_checkpoint

    comm = job.start()
    world, rank = (comm.size, comm.rank) if comm is not None else (1, 0)
    mapping = Mapping(world, rank, tp_size=world)
    dist = Distributed.get(mapping)
    before, peak, running = private_kib(), 0, True

    def watch() -> None:
        nonlocal peak
        while running:
            peak = max(peak, private_kib())
            time.sleep(0.0005)

    watcher = threading.Thread(target=watch)
    watcher.start()
    begin = time.perf_counter()
    with torch.inference_mode():
        checkpoint = open_checkpoint(path)
        decoder = Decoder(checkpoint.config, mapping, torch.float32)
        decoder.load(checkpoint)
    seconds = time.perf_counter() - begin
    running = False
    watcher.join()
    grown = dist.allgather((max(peak, private_kib()) - before, seconds))
    if rank == 0:
        print(json.dumps({"kib": max(kib for kib, _ in grown), "seconds": max(s for _, s in grown)}))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rank:
        one_rank(args.model)
        return
    preamble("private memory (RssAnon) that loading adds to a rank, largest rank", model=args.model, dtype="float32")
    print("#  tp  peak (MiB)   of tp=1  load (s)")
    whole = 0
    for tp in (1, 2, 4):
        row = measure(tp, __file__, "--model", args.model, "--rank")
        whole = whole or row["kib"]
        share = row["kib"] / whole
        print(f"{tp:5d} {row['kib'] / 1024:11.1f} {share:9.2f} {row['seconds']:9.2f}")
    print(f"# tp=4 under 0.40 of tp=1: {'yes' if share < 0.4 else 'NO'}")


if __name__ == "__main__":
    main()
