"""bench memory: what each scheme keeps beside the model and its gradient, by part, and what a step takes for a while.

What is kept is counted in arrays: each piece of memory once, for the first part that holds it. Candidates and messages are
the largest of a step. `peak` is what the operating system says that the process needed beyond the model and its gradient.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

import mpisparse
from mpisparse.bench.given import GivenModel
from mpisparse.bench.holding import held
from mpisparse.bench.sync import open_source
from mpisparse.bench.train import Case
from mpisparse.comm.transport import end_job_on_uncaught_exception
from mpisparse.core import step
from mpisparse.core.records import Outgoing, Works
from mpisparse.runtime.table import save, show

STATUS, REFERENCES = Path("/proc/self/status"), Path("/proc/self/clear_refs")
THRESHOLD, LEAST = -3, 1 << 20  # mallopt's M_MMAP_THRESHOLD: what is freed of at least so many bytes goes back at once
VECTORS = ("residual", "published", "scorer", "owners", "more")  # in bytes per element
SMALL = ("blocks", "ladder", "candidates", "messages")
COLUMNS = {"case": "", **dict.fromkeys(VECTORS, ".3f"), **{f"{name}_kB": ".1f" for name in SMALL}, "peak": ".3f"}
HEADER = (
    "vectors in bytes per element: residual; published mean; what the scorer remembers; what owners and codecs remember; "
    "all else, such as second weights"
)


@dataclass(frozen=True)
class MemoryPlan:
    """Which cases to measure, on how many elements."""

    elements: int
    density: float
    cases: list[str]
    steps: int
    as_json: bool = False
    out: Path | None = None


def run(plan: MemoryPlan) -> int:
    """Measure every case and print on rank 0 the largest of each figure over ranks; collective."""
    end_job_on_uncaught_exception()
    comm = MPI.COMM_WORLD
    if hasattr(libc := ctypes.CDLL(None), "mallopt"):
        libc.mallopt(THRESHOLD, LEAST)
    source = open_source(comm, None, plan.elements)
    model = GivenModel.of(source, comm.rank)
    Measured(model.twin(), plan.cases[0], plan, comm)  # kernels and libraries load what they need
    records = []
    for case in plan.cases:
        own = Measured(model.twin(), case, plan, comm).record()
        rows = comm.allgather(own)
        records.append({"case": case, **{key: max(row[key] for row in rows) for key in own if own[key] is not None}})
    if comm.rank == 0:
        for record in records:
            record.update(elements=plan.elements, ranks=comm.size, set_density=plan.density, steps=plan.steps)
        if not plan.as_json:
            print(f"{plan.elements:,} float32, {comm.size} ranks, density {plan.density:g}, {plan.steps} steps")
        show(records, COLUMNS, as_json=plan.as_json)
        if not plan.as_json:
            print(HEADER)
        save("memory", records, plan.out)
    return 0


class Measured:
    """One case: some steps of it, and what they took."""

    def __init__(self, model: GivenModel, text: str, plan: MemoryPlan, comm: MPI.Intracomm) -> None:
        case = Case.parse(text)
        values = {} if case.scheme in ("dense", "diloco", "auto") else {"density": plan.density}
        self.elements, self.candidates, self.ladder, self.messages = plan.elements, 0, 0, 0
        for _ in range(2):
            backward(model)
        forget_peak()
        backward(model)
        before = peak()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=r"scheme .predictive. without validation")
            self.sync = mpisparse.GradientSync(model, scheme=case.scheme, comm=comm, **{**values, **case.values})
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, foreach=False)
        mpisparse.attach(optimizer, self.sync)
        self._watch()
        for _ in range(plan.steps):
            backward(model)
            optimizer.step()
        self.peak = None if before is None else peak() - before
        optimizer.zero_grad()
        self.kept = self._parts(model)
        self.sync.close()

    def _watch(self) -> None:
        """Look at the candidates of each delivery and at the buffers of each collective."""
        aggregator = self.sync._aggregator
        works = aggregator.works
        if works.flight is None:
            works.carry = self._deliver
        else:
            works.flight.carry = functools.partial(self._carry, works.flight.carry)
        for exchange in (self.sync._exchange, *aggregator.carriers):
            exchange._call = functools.partial(self._call, exchange._call)  # type: ignore[method-assign]

    def _call(self, call: Any, name: str, *buffers: Any, **options: Any) -> None:
        arrays = (each[0] if isinstance(each, list) else each for each in buffers)
        self.messages = max(self.messages, sum(getattr(array, "nbytes", 0) for array in arrays))
        call(name, *buffers, **options)

    def _carry(self, carry: Any, out: Outgoing) -> Any:
        self._look(out)
        return carry(out)

    def _deliver(self, exchange: Any, backend: Any, out: Any, clock: Any) -> Any:
        self._look(out)
        return step.deliver(exchange, backend, out, clock)

    def _look(self, out: Outgoing) -> None:
        """Note the bytes of a step's candidates and of its ladder of thresholds."""
        found = out.view.found
        self.candidates = max(self.candidates, found.index.nbytes + found.magnitude.nbytes)
        self.ladder = max(self.ladder, getattr(getattr(out.plan, "rungs", None), "nbytes", 0))

    def _parts(self, model: GivenModel) -> dict[str, int]:
        """Bytes of each part; memory of the model and of the given gradients is nobody's."""
        works: Works = self.sync._aggregator.works
        seen: set[int] = set()
        held([*model.parameters(), model.sets], seen)
        selector = getattr(works.selection, "selector", None)
        parts = {
            "residual": works.acc,
            "published": works.sink,
            "scorer": works.scorer,
            "controller": getattr(selector, "controller", None),
            "blocks": works.selection,
            "owners": [works.reducer, works.stages],
            "more": self.sync,
        }
        return {name: held(part, seen) for name, part in parts.items()}

    def record(self) -> dict[str, float | None]:
        """Vectors in bytes per element, the rest in kB."""
        vectors = {name: self.kept[name] / self.elements for name in VECTORS}
        ladder = self.ladder + self.kept["controller"]
        small = {**self.kept, "ladder": ladder, "candidates": self.candidates, "messages": self.messages}
        whole = None if self.peak is None else self.peak / self.elements
        return {**vectors, **{f"{name}_kB": small[name] / 1e3 for name in SMALL}, "peak": whole}


def backward(model: GivenModel) -> None:
    """Make a gradient, as a training loop does."""
    model.zero_grad()
    model.backward()


def forget_peak() -> None:
    """Count the peak of resident memory from now on, where Linux allows that."""
    gc.collect()
    if REFERENCES.exists():
        REFERENCES.write_text("5")


def peak() -> Any:
    """The peak of resident memory in bytes, or None where it cannot be read."""
    if not REFERENCES.exists():
        return None
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return 1024 * int(line.split()[1])
