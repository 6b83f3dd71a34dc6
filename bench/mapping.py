"""What does a Mapping cost? Prints time and memory of one Mapping and its rank's groups, for growing worlds."""

import json
import sys
import timeit
import tracemalloc
from functools import partial

from spmd import Mapping
from spmd.topology.mapping import AXES


def build(side: int) -> list:
    mapping = Mapping(side**3, side**3 // 3, tp_size=side, pp_size=side, cp_size=side)
    return [mapping.group(axis) for axis in AXES]


def main() -> None:
    print("# Mapping(...) and this rank's group along each of the 9 axes: best of 5 x 2000, peak memory of one")
    print("#     world    time (us)  memory (B)")
    rows = []
    for side in (2, 10, 100, 1000):
        seconds = min(timeit.repeat(partial(build, side), number=2000, repeat=5)) / 2000
        tracemalloc.start()
        build(side)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        rows.append({"world": side**3, "us": round(seconds * 1e6, 1), "bytes": peak})
        print(f"{side**3:11d} {rows[-1]['us']:12.1f} {peak:11d}")
    verdict = next(row for row in rows if row["world"] == 1_000_000)["us"] < 50
    print(f"# under 50 us at world 1,000,000: {'yes' if verdict else 'NO'}")
    if "--json" in sys.argv:
        print(json.dumps(rows))


if __name__ == "__main__":
    main()
