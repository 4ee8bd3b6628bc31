"""Run fixed steps with an installed mpisparse and write down the results; bin/compare runs it with two.

    mpirun -n N python tests/compare/steps.py [--site DIR] bits OUT      a line of digests for each case, rank and step
    mpirun -n N python tests/compare/steps.py [--site DIR] time OUT      seconds of steps of 25 M elements
    mpirun -n 2 python tests/compare/steps.py [--site DIR] golden DIR    a checkpoint of every scheme

It must run with commits of any age, so it uses only what has always been public.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STEPS = 30
WARM_UP, TIMED = 6, 7
NOTED = ("step", "density", "selected", "threshold", "bytes_sent", "bytes_received", "workloads", "borders")
OF_SCHEME: dict[str, dict[str, Any]] = {
    "predictive": {"history": 3, "validate_every": 6, "publish_after": 2},
    "threshold": {"threshold": 0.01},
    "dgc": {"warm_up": 5},
}
TIMES: dict[str, dict[str, Any]] = {
    "exdyna": {"scheme": "exdyna"},
    "exdyna backward": {"scheme": "exdyna", "accumulate": "backward"},
    "momentum": {"scheme": "momentum", "density": 0.001},
    "predictive": {"scheme": "predictive"},
}


def use(site: Path) -> None:
    """Import mpisparse from a directory, not from the editable installation."""
    sys.meta_path[:] = [finder for finder in sys.meta_path if "editable" not in type(finder).__module__]
    sys.path.insert(0, str(site))


def cases() -> Iterator[dict[str, Any]]:
    """List every scheme with every codec that it supports, on both accumulation paths."""
    from mpisparse.errors import ConfigurationError
    from mpisparse.schemes import SCHEMES, configure

    for scheme in SCHEMES:
        for codec in ("fp32", "fp16", "bf16", "int8", "momentum-int8"):
            for path in ("step", "backward"):
                case = {"scheme": scheme, "codec": codec, "accumulate": path, "density": 0.05, **OF_SCHEME.get(scheme, {})}
                if scheme in ("dense", "threshold"):
                    case.pop("density")
                try:
                    configure(**case)
                except ConfigurationError:
                    continue
                yield case


class Training:
    """A small net, trained on batches that depend only on rank and step."""

    def __init__(self, case: dict[str, Any]) -> None:
        import torch

        import mpisparse

        torch.manual_seed(5)
        self.model = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Tanh(), torch.nn.Linear(50, 20))
        extra = {"validation": lambda: self.loss(99, 0)} if case["scheme"] == "predictive" else {}
        self.sync = mpisparse.GradientSync(self.model, **case, **extra)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.05, momentum=0.9)
        mpisparse.attach(self.optimizer, self.sync)

    def loss(self, rank: int, step: int) -> Any:
        import torch

        x = torch.randn(8, 30, generator=torch.Generator().manual_seed(1000 * step + rank))
        return (self.model(x) - x[:, :20].sin()).square().mean()

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        self.loss(self.sync.rank, step).backward()
        self.optimizer.step()

    def weights_and_residual(self) -> dict[str, str]:
        """Return digests of what a checkpoint must restore."""
        weights = b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())
        return {"parameters": digest(weights), "residual": digest(self.sync.residual.numpy().tobytes())}

    def digests(self) -> dict[str, str]:
        """Return digests of everything that must be equal after a step."""
        noted = repr([getattr(self.sync.stats, name) for name in NOTED]).encode()
        return {**self.weights_and_residual(), "stats": digest(noted)}


def digest(value: bytes) -> str:
    """Return a digest of 16 characters."""
    return hashlib.sha256(value).hexdigest()[:16]


def note_bits(out: Path) -> None:
    """Write the digests of every step of every case; collective."""
    from mpi4py import MPI

    comm, lines = MPI.COMM_WORLD, []
    for case in cases():
        training = Training(case)
        for step in range(STEPS):
            training.step(step)
            lines.append({"case": case, "rank": comm.rank, "step": step, **training.digests()})
        training.sync.close()
    rows = comm.gather(lines)
    if rows is not None:
        out.write_text("".join(json.dumps(line) + "\n" for row in rows for line in row))


def save_golden(directory: Path) -> None:
    """Save a checkpoint of every scheme after 20 steps, and digests of its contents; collective."""
    import mpisparse
    from mpisparse import checkpoint

    codecs = {"dense": "fp32", "momentum": "momentum-int8", "predictive": "int8"}
    for case in cases():
        if case["accumulate"] != "step" or case["codec"] != codecs.get(case["scheme"], "fp32"):
            continue
        training = Training(case)
        for step in range(20):
            training.step(step)
        place = directory / case["scheme"]
        parts = {"model": training.model, "optimizer": training.optimizer, "sync": training.sync}
        checkpoint.save(place, step=20, **parts)
        row = {"case": case, "version": mpisparse.__version__, **training.digests()}
        (place / f"digests-{training.sync.rank}.json").write_text(json.dumps(row, indent=1) + "\n")
        training.sync.close()


def layers(elements: int) -> list[int]:
    """Return layer sizes that differ by orders of magnitude, as in real networks."""
    import numpy as np

    weights = 64 + np.random.default_rng(0).pareto(0.7, 160) * 10_000
    sizes = [max(1, int(elements * weight / weights.sum())) for weight in weights]
    sizes[-1] += elements - sum(sizes)
    return sizes


def note_times(out: Path, elements: int) -> None:
    """Write the median seconds of each case and of a plain in-place add of the same elements; collective."""
    import numpy as np
    import torch
    from mpi4py import MPI

    import mpisparse

    comm = MPI.COMM_WORLD
    model = torch.nn.ParameterList(torch.zeros(size) for size in layers(elements))
    params = list(model.parameters())
    draw = torch.Generator().manual_seed(comm.rank)
    scale = [float(np.exp(np.random.default_rng(i).normal())) for i in range(len(params))]
    sets = [[s * torch.randn(p.shape, generator=draw) ** 3 for p, s in zip(params, scale, strict=True)] for _ in range(2)]
    flat, term = torch.zeros(elements), torch.ones(elements)
    seconds: dict[str, float] = {
        "add": median_over_ranks(comm, [timed(comm, lambda: flat.add_(term)) for _ in range(TIMED)])
    }
    for name, options in TIMES.items():
        extra = {"validation": lambda: sum(p[0] ** 2 for p in params)} if options["scheme"] == "predictive" else {}
        sync = mpisparse.GradientSync(model, **{"density": 0.001, **options, **extra})
        every = []
        for step in range(WARM_UP + TIMED):
            for p in params:
                p.grad = None
            gradients = [g.clone() for g in sets[step % 2]]
            if options.get("accumulate") == "backward":
                every.append(timed(comm, lambda sync=sync, g=gradients: (torch.autograd.backward(params, g), sync.step())))
            else:
                torch.autograd.backward(params, gradients)
                every.append(timed(comm, sync.step))
        seconds[name] = median_over_ranks(comm, every[WARM_UP:])
        sync.close()
    if comm.rank == 0:
        out.write_text(json.dumps(seconds) + "\n")


def timed(comm: Any, call: Any) -> float:
    """Return the seconds of a call that all ranks start together; collective."""
    comm.Barrier()
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def median_over_ranks(comm: Any, seconds: list[float]) -> float:
    """Return the median over rounds of the slowest rank's time; collective."""
    import numpy as np

    return float(np.median(np.max(comm.allgather(seconds), axis=0)))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--site", type=Path)
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("what", choices=["bits", "time", "golden"])
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    if args.site:
        use(args.site)
    import torch

    torch.set_num_threads(1)
    if args.what == "time":
        note_times(args.out, args.elements)
    else:
        (note_bits if args.what == "bits" else save_golden)(args.out)


if __name__ == "__main__":
    main()
