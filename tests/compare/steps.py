"""Run fixed steps with an installed mpisparse and write down the results; bin/compare runs it with two.

    mpirun -n N python tests/compare/steps.py [--site DIR] --cases FILE bits OUT   a line for each case, rank and step
    mpirun -n N python tests/compare/steps.py [--site DIR] [--delay S] time OUT    seconds of steps of 25 M elements
    mpirun -n 2 python tests/compare/steps.py [--site DIR] golden DIR              checkpoints, for tests/golden

It must run with commits of any age, so it uses only what has always been public. FILE has the cases as a list in JSON.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

STEPS = 30
WARM_UP, TIMED = 6, 7
NOTED = ("step", "density", "selected", "threshold", "workloads", "borders")
TRAFFIC = ("bytes_sent", "bytes_received")
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


class Training:
    """A small net, trained on batches that depend only on rank and step."""

    def __init__(self, case: dict[str, Any]) -> None:
        import torch
        from mpi4py import MPI

        import mpisparse

        torch.manual_seed(5)
        self.rank = MPI.COMM_WORLD.rank
        self.model = torch.nn.Sequential(torch.nn.Linear(30, 50), torch.nn.Tanh(), torch.nn.Linear(50, 20))
        self.sync: Any = None
        self.optimizer: Any
        if "optimizer" in case:
            from mpisparse.optim import OneBitAdamW

            options = {key: value for key, value in case.items() if key != "optimizer"}
            self.optimizer = OneBitAdamW(self.model.parameters(), lr=0.01, **options)
            return
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
        self.loss(self.rank, step).backward()
        self.optimizer.step()
        if self.sync is not None and self.sync.scheme == "predictive" and step % 7 == 6:
            self.sync.observe(float(step % 4))  # moves k

    def parts(self) -> dict[str, Any]:
        """Return what a checkpoint is made of."""
        return {"model": self.model, "optimizer": self.optimizer, "sync": self.sync}

    def weights_and_residual(self) -> dict[str, str]:
        """Return digests of what a checkpoint must restore."""
        weights = b"".join(p.detach().numpy().tobytes() for p in self.model.parameters())
        if self.sync is not None:
            residual = self.sync.residual.numpy().tobytes()
        else:
            residual = b"".join(self.optimizer.state[p]["residual"].numpy().tobytes() for p in self.model.parameters())
        return {"parameters": digest(weights), "residual": digest(residual)}

    def digests(self) -> dict[str, str]:
        """Return digests of everything that must be equal after a step."""
        stats = (self.sync or self.optimizer).stats
        noted, traffic = (repr([getattr(stats, name) for name in names]).encode() for names in (NOTED, TRAFFIC))
        return {**self.weights_and_residual(), "stats": digest(noted), "bytes": digest(traffic)}

    def synchronize(self) -> None:
        """Make the replicas equal; collective."""
        if self.sync is not None:
            self.sync.synchronize()

    def close(self) -> None:
        """Give communicators back; collective."""
        (self.sync or self.optimizer).close()


def digest(value: bytes) -> str:
    """Return a digest of 16 characters."""
    return hashlib.sha256(value).hexdigest()[:16]


def note_bits(cases: list[dict[str, Any]], out: Path) -> None:
    """Write the digests of every step of every case, or why there are none; collective."""
    import warnings

    from mpi4py import MPI

    from mpisparse.errors import ConfigurationError

    warnings.simplefilter("ignore")  # a density of 1, options without effect
    comm, lines = MPI.COMM_WORLD, []
    for number, case in enumerate(cases):
        try:
            training = Training(case)
        except (ConfigurationError, TypeError, ImportError) as error:  # the last two of commits that lack it
            lines.append({"case": number, "refused": str(error)})
            continue
        for step in range(STEPS):
            training.step(step)
            lines.append({"case": number, "rank": comm.rank, "step": step, **training.digests()})
        training.synchronize()
        lines.append({"case": number, "rank": comm.rank, "step": STEPS, **training.weights_and_residual()})
        training.close()
    rows = comm.gather(lines)
    if rows is not None:
        out.write_text("".join(json.dumps(line) + "\n" for row in rows for line in row))


def save_golden(cases: dict[str, dict[str, Any]], directory: Path) -> None:
    """Save a checkpoint of each case after 20 steps, and digests of its contents; collective."""
    import mpisparse
    from mpisparse import checkpoint

    for name, case in cases.items():
        training = Training(case)
        for step in range(20):
            training.step(step)
        checkpoint.save(directory / name, step=20, **training.parts())
        row = {"case": case, "version": mpisparse.__version__, **training.digests()}
        (directory / name / f"digests-{training.rank}.json").write_text(json.dumps(row, indent=1) + "\n")
        training.close()


def layers(elements: int) -> list[int]:
    """Return layer sizes that differ by orders of magnitude, as in real networks."""
    import numpy as np

    weights = 64 + np.random.default_rng(0).pareto(0.7, 160) * 10_000
    sizes = [max(1, int(elements * weight / weights.sum())) for weight in weights]
    sizes[-1] += elements - sum(sizes)
    return sizes


def note_times(out: Path, elements: int, delay: float) -> None:
    """Write the median seconds of each case and of a plain in-place add of the same elements; collective.

    delay: seconds that each collective takes longer; then only exdyna is measured, in more steps.
    """
    import numpy as np
    import torch
    from mpi4py import MPI
    from slow_link import SlowTransport

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
    first, count = (WARM_UP, TIMED) if not delay else (4 * WARM_UP, 4 * TIMED)  # borders take some steps to settle
    for name, options in TIMES.items() if not delay else [("exdyna", TIMES["exdyna"])]:
        extra = {"validation": lambda: sum(p[0] ** 2 for p in params)} if options["scheme"] == "predictive" else {}
        sync = mpisparse.GradientSync(model, **{"density": 0.001, **options, **extra})
        every = []
        if delay:
            sync._exchange.comm = SlowTransport(sync._exchange.comm, delay)
        for step in range(first + count):
            for p in params:
                p.grad = None
            gradients = [g.clone() for g in sets[step % 2]]
            if options.get("accumulate") == "backward":
                every.append(timed(comm, lambda sync=sync, g=gradients: (torch.autograd.backward(params, g), sync.step())))
            else:
                torch.autograd.backward(params, gradients)
                every.append(timed(comm, sync.step))
        seconds[name] = median_over_ranks(comm, every[first:])
        if delay:
            sync._exchange.comm = sync._exchange.comm.transport
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
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--cases", type=Path)
    parser.add_argument("what", choices=["bits", "time", "golden"])
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    if args.site:
        use(args.site)
    import torch

    torch.set_num_threads(1)
    if args.what == "time":
        note_times(args.out, args.elements, args.delay)
    elif args.what == "bits":
        note_bits(json.loads(args.cases.read_text()), args.out)
    else:
        from cases import GOLDEN

        save_golden(GOLDEN, args.out)


if __name__ == "__main__":
    main()
