"""What on_failure="shrink" costs while nobody dies: steps with it and without it, interleaved in the same run.

    . bin/mpi-env
    OMPI_MCA_coll=^han,hcoll,portals4 .venv/bin/mpirun --with-ft ulfm -n 2 .venv/bin/python -m tests.survival.cost

Prints the median step of each kind, and the median over rounds of its ratio to the step without. Kinds take turns at being
the first. Run it on a machine with nothing else to do.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

from mpi4py import MPI

import mpisparse
from mpisparse.bench.given import GivenModel
from mpisparse.bench.sync import open_source, timed

WARM_UP = 8  # rounds, after which the threshold has settled
KINDS: dict[str, dict[str, Any]] = {
    "abort": {}, "shrink": {"on_failure": "shrink"}, "shrink, mirror=50": {"on_failure": "shrink", "mirror": 50},
}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.survival.cost", description=__doc__.partition("\n")[0])
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--density", type=float, default=0.001)
    parser.add_argument("--scheme", default="exdyna")
    parser.add_argument("--rounds", type=int, default=60)
    args = parser.parse_args()
    comm = MPI.COMM_WORLD
    model = GivenModel.of(open_source(comm, None, args.elements), comm.rank)
    share = None if args.scheme == "dense" else args.density
    models = {kind: model.twin() for kind in KINDS}
    syncs = {
        kind: mpisparse.GradientSync(models[kind], scheme=args.scheme, density=share, **options)
        for kind, options in KINDS.items()
    }
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    order = [*KINDS]
    for turn in range(WARM_UP + args.rounds):
        order.append(order.pop(0))
        for kind in order:
            models[kind].zero_grad()
            models[kind].backward()
            seconds = timed(comm, syncs[kind].step)
            if turn >= WARM_UP:
                times[kind].append(seconds)
    for kind, seconds in times.items():
        ratio = statistics.median(here / plain for here, plain in zip(seconds, times["abort"], strict=True))
        if comm.rank == 0:
            print(f"{kind:20} {1e3 * statistics.median(seconds):8.2f} ms   {ratio:.4f} times the step without", flush=True)
    for sync in syncs.values():
        sync.close()


if __name__ == "__main__":
    main()
