"""Training under mpirun in which ranks die at chosen moments; each rank records what a step did, for an oracle.

Usage: job.py DIRECTORY JSON. The JSON has scheme, options, steps, and deaths: rank (of the start), step and phase of each.
With "device" the model is on an emulated device.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI

import mpisparse
from mpisparse import checkpoint
from mpisparse.backends.cuda.backend import CudaBackend
from mpisparse.backends.device import load_backend
from mpisparse.comm import device_memory
from mpisparse.model import construction

SIZES = (1500, 1000, 3)
RATE = 0.01
CALLS = {  # the collective call that a rank dies before, the how-manieth of its name in a step
    "agree": ("Allgather", 1), "unite": ("Allgatherv", 1), "reduce": ("Alltoallv", 1), "return": ("Allgatherv", 2),
    "allreduce": ("Allreduce", 1),
}  # fmt: skip


def use_device() -> None:
    """Have every exchange work on an emulated device."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from emulator import Emulator

    emulator = Emulator(block=64, scan=64)
    backend = CudaBackend(emulator, load_backend(), pooled=True)
    construction.load_backend = lambda device: backend
    device_memory.synchronize, device_memory.mpi_view = emulator.synchronize, emulator.mpi_view


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.ParameterList([torch.nn.Parameter(torch.zeros(n)) for n in SIZES])


def gradient(name: int, step: int) -> torch.Tensor:
    """The gradient of a rank (by its number at the start) in a step."""
    generator = torch.Generator().manual_seed(1000 * name + step)
    return torch.randn(sum(SIZES), generator=generator) ** 3


def owed(sync: mpisparse.GradientSync) -> np.ndarray:
    """What this rank has not sent, wherever it waits: in the residual, at an owner, or where momentum goes on sending it."""
    flight, waiting = sync._aggregator.works.flight, sync.residual.numpy().copy()
    if sync.options.of_weights:
        return waiting
    if flight is not None:
        works = sync._aggregator.works
        for one in flight.departed:
            waiting[one.index] += one.values
        for stage in (*works.stages, *(stage for one in flight.departed for stage in one.stages)):
            stage.at_rest(stage.state(), waiting)
        return waiting
    buckets = getattr(sync._aggregator, "buckets", ())
    for part, aggregator in [(waiting[b.lo : b.hi], b.aggregator) for b in buckets] or [(waiting, sync._aggregator)]:
        state = {key: sync._backend.to_host(value) for key, value in aggregator.state().items()}
        state = aggregator.works.reducer.at_rest(state, part, sync.rank, sync.size)
        for stage in aggregator.works.stages:
            state = stage.at_rest(state, part)
    return waiting


def error(sync: mpisparse.GradientSync) -> np.ndarray:
    """What this rank still owes to the shared weights as an owner, as a vector of all elements; zeros with gradients."""
    vector, reducer = np.zeros(sum(SIZES), dtype=np.float32), sync._aggregator.works.reducer
    if hasattr(reducer, "error") and sync.options.of_weights:
        vector[reducer.owned(sync.rank, sync.size)] = sync._backend.to_host(reducer.error)
    return vector


def weights_of(sync: mpisparse.GradientSync) -> np.ndarray:
    """This rank's own weights, where the residual is their distance from the shared ones; else zeros."""
    return sync._companion.weights.flat().numpy() if sync.options.of_weights else np.zeros(sum(SIZES), dtype=np.float32)


def weight(sync: mpisparse.GradientSync) -> float:
    """What the mean that a step returns is multiplied by to give the sum of what was sent."""
    return sync.size / sync.options.factor(sync.size) if sync.scheme == "drift" else sync.size


def published(model: torch.nn.Module) -> torch.Tensor:
    """The mean that the optimizer was given; in flight there is none in the first steps."""
    return torch.cat([torch.zeros_like(p) if p.grad is None else p.grad for p in model.parameters()])


def replicas(sync: mpisparse.GradientSync, model: torch.nn.Module) -> torch.Tensor:
    """The weights that all ranks share, as a copy."""
    shared = sync._companion.replicated() or list(model.parameters())
    return torch.cat([p.detach() for p in shared])


def added(sync: mpisparse.GradientSync, grad: torch.Tensor) -> np.ndarray:
    """What a step adds to the residual: the gradient, in scheme dgc its momentum, in drift what the optimizer does."""
    if sync.options.of_weights:
        return grad.numpy() * np.float32(-RATE)
    scorer = sync._aggregator.works.scorer
    return grad.numpy() + (scorer.factor * scorer.memory if getattr(scorer, "remembers", "") == "momentum" else 0.0)


def arm(sync: mpisparse.GradientSync, phase: str) -> None:
    """Have this rank die in a phase of the coming step, once it is there."""
    exchange, survival = sync._exchange, sync._survivors.survival
    if sync._aggregator.staleness:
        sync._aggregator.quiet()  # else the call may be one of the delivery before
    if phase in CALLS:
        name, left = CALLS[phase]
        exchange = carrier(sync)
        call = exchange._call

        def counted(called: str, *buffers: object, **options: object) -> None:
            nonlocal left
            left -= called == name
            if left == 0:
                die()
            call(called, *buffers, **options)

        exchange._call = counted
    elif phase.startswith("call "):
        die_before_call(sync, int(phase.removeprefix("call ")))
    elif phase.startswith("moment "):
        threading.Timer(float(phase.removeprefix("moment ")) / 1e3, die).start()
    elif phase == "roll call":
        begin = exchange.begin_allgather

        def begun(row: object) -> None:
            begin(row)
            die()

        exchange.begin_allgather = begun
    elif phase == "before commit":
        survival._agreed = lambda fine: die()
    elif phase == "after commit":
        agreed = survival._agreed

        def committed(fine: bool) -> bool:
            agreed(fine)
            die()

        survival._agreed = committed
    elif phase == "backward":
        time.sleep(0.2)
        die()
    elif phase == "exception":
        raise KeyError("a rank's own trouble")
    elif phase == "order":
        sync._aggregator._share_order = die
    elif phase == "exit":
        sys.exit(3)
    elif phase == "interrupt":
        raise KeyboardInterrupt
    elif phase == "save":
        checkpoint.saving.write_file = torn
    elif phase == "saved":
        finish = checkpoint.Saving._finish
        checkpoint.Saving._finish = lambda saving: (finish(saving), die())


def carrier(sync: mpisparse.GradientSync) -> Any:
    """The exchange that deliveries go over: that of a thread, if there is one."""
    return [*sync._aggregator.carriers, sync._exchange][0]


def die_before_call(sync: mpisparse.GradientSync, left: int) -> None:
    """Have this rank die before its so-manieth collective call from now on, or when it is to agree on what came of it."""
    exchange, survival = carrier(sync), sync._survivors.survival
    call, agreed = exchange._call, survival._agreed
    before = int(sync._aggregator.works.flight is not None)  # in flight, it agrees on the last delivery first

    def counted(*words: object, **options: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            die()
        call(*words, **options)

    def asked(fine: bool) -> bool:
        nonlocal before
        before -= 1
        return agreed(fine) if before >= 0 else die()

    exchange._call = counted
    survival._agreed = asked


def torn(path: Path, arrays: object, texts: object) -> None:
    """Write half of a checkpoint's file."""
    path.write_bytes(b"half")
    die()


def main() -> None:
    directory, plan = Path(sys.argv[1]), json.loads(sys.argv[2])
    name = MPI.COMM_WORLD.rank
    mine = {death["step"]: death["phase"] for death in plan["deaths"] if death["rank"] == name}
    if mine.get(-1) == "start":
        mpisparse.GradientSync.broadcast_ = lambda *_: die()
    if plan.get("device"):
        use_device()
    model = Model()
    sync = mpisparse.GradientSync(
        model, scheme=plan["scheme"], on_failure="shrink", timeout=120, check_every=7, mirror=plan.get("mirror"),
        **plan["options"],
    )  # fmt: skip
    if plan.get("apart"):  # as if each rank had a host of its own
        for exchange in (sync._exchange, *sync._aggregator.carriers):
            exchange.comm.one_host, exchange.comm.over_tcp = False, True  # type: ignore[misc]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    mpisparse.attach(optimizer, sync)
    living, told = list(range(sync.size)), []

    def listen(shrunk: object) -> None:
        died = [living[rank] for rank in shrunk.died]
        told.append({"died": died, "norm": shrunk.norm, "kept": shrunk.kept, "seconds": shrunk.seconds})
        for rank in sorted(shrunk.died, reverse=True):
            del living[rank]

    sync.on_shrink(listen)
    for step in range(plan["steps"]):
        sync.average(float(step))
        grad = gradient(name, step)
        np.savez(
            directory / f"had-{step}-{name}.npz", residual=sync.residual.numpy(), owed=owed(sync), added=added(sync, grad),
            error=error(sync), weights=weights_of(sync),
        )  # fmt: skip
        shared = replicas(sync, model)
        phase = mine.get(step, "")
        if phase:
            arm(sync, phase)
        optimizer.zero_grad()
        sum((p * part).sum() for p, part in zip(model.parameters(), grad.split(SIZES), strict=True)).backward()
        optimizer.step()
        weights = replicas(sync, model)
        mean = weights - shared if sync.options.of_weights else published(model)
        np.savez(
            directory / f"step-{step}-{name}.npz", mean=mean.numpy(), after=sync.residual.numpy(), owed=owed(sync),
            group=np.array(living), weights=weights.numpy(), error=error(sync), weight=weight(sync),
            mirrored=sync.stats.details.get("mirror_bytes", 0.0),
        )  # fmt: skip
        if plan.get("save") and step % 3 == 2:
            checkpoint.save(directory / "checkpoints", step=step, model=model, optimizer=optimizer, sync=sync)
    written = directory / f"unfinished-{name}.json"  # a rank may die while it writes
    written.write_text(json.dumps({"living": living, "told": told, "rank": sync.rank}))
    written.rename(directory / f"end-{name}.json")
    sync.close()


if __name__ == "__main__":
    main()
