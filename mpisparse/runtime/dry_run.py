"""mpisparse train --dry-run: what a run would do. Settings, memory per rank, and bytes per step, measured, not assumed.

The model trains for a few steps on virtual ranks: threads of this process that exchange as real ranks would, in the same
messages. Nothing is written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import mpisparse
from mpisparse.comm.virtual import run_virtual
from mpisparse.comm.world import started_by
from mpisparse.errors import ConfigurationError
from mpisparse.runtime.evaluate import check_steering
from mpisparse.runtime.progress import compared_with_dense, human_bytes
from mpisparse.runtime.run_state import RunState
from mpisparse.runtime.schedule import Order, Position
from mpisparse.runtime.scheme_losses import SchemeLosses
from mpisparse.runtime.settings import AUTO, Settings
from mpisparse.runtime.settings_file import to_toml
from mpisparse.runtime.setup import make_optimizer, seed_rank
from mpisparse.runtime.workloads import build, hold_out

WARM, STEPS = 4, 8  # steps that are not counted, and those that are
RANKS = 2  # if nothing says how many
COPIES = 6  # of the weights that a rank holds, at most, beside its activations
CHOSEN = "# auto chooses by times, here of these threads: see mpisparse plan for real links, or set --scheme"
SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "WORLD_SIZE", "SLURM_NTASKS")
NUMBERS = ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "SLURM_PROCID", "RANK")


@dataclass
class Measured:
    """What was measured on rank 0: elements, bytes held by kind, and bytes received per step, means over counted steps."""

    elements: int = 0
    memory: dict[str, int] = field(default_factory=dict)
    received: float = 0.0
    indices: float = 0.0
    control: float = 0.0


def run(settings: Settings, ranks: int | None) -> int:
    """Print the resolved settings, the memory per rank and the bytes per step; return the exit code. No MPI."""
    if started_by() != "none" and next((os.environ[name] for name in NUMBERS if name in os.environ), "0") != "0":
        return 0  # the first process prints for all
    ranks = ranks or next((int(os.environ[name]) for name in SIZES if os.environ.get(name, "").isdigit()), RANKS)
    measured = measure(settings, ranks)
    print(to_toml(settings, ["resolved settings"]))
    print("\n".join(page(settings, ranks, measured)))
    return 0


def page(settings: Settings, ranks: int, measured: Measured) -> list[str]:
    """Return the lines that say what was measured."""
    dense = 2 * 4 * measured.elements * (ranks - 1) / ranks
    values = measured.received - measured.indices - measured.control
    parts = {"values": values, "indices": measured.indices, "control messages": measured.control}
    return [
        f"# {ranks} ranks, {measured.elements:,} parameters, scheme {settings.scheme}",
        "# memory per rank, without activations and data:",
        *(f"#   {what:<18} {human_bytes(nbytes):>10}" for what, nbytes in measured.memory.items()),
        f"#   {'total':<18} {human_bytes(sum(measured.memory.values())):>10}",
        "# received per rank and step:",
        *(f"#   {what:<18} {human_bytes(nbytes):>10}" for what, nbytes in parts.items()),
        f"#   {'total':<18} {human_bytes(measured.received):>10}"
        + (f"  {compared_with_dense(measured.received, dense)}" if dense else ""),
        f"#   {'dense all-reduce':<18} {human_bytes(dense):>10}",
        f"# measured in {STEPS} steps or more on {ranks} virtual ranks, threads of this process; nothing was written",
        *([CHOSEN] if settings.scheme == AUTO else []),
    ]


def measure(settings: Settings, ranks: int) -> Measured:
    """Train for a few steps on virtual ranks; return what rank 0 measured."""
    model, data, task = build(settings.model, settings.data, seed=settings.seed)
    data = hold_out(data, settings.validation, seed=settings.seed)
    check_steering(settings, data)
    _check_memory(sum(p.numel() * p.element_size() for p in model.parameters()), ranks)
    if len(data.train) < settings.batch_size * ranks:
        raise ConfigurationError(f"a step needs {settings.batch_size * ranks} examples; lower --batch-size")

    def work(comm: Any) -> Measured:
        own = model if comm.Get_rank() == 0 else build(settings.model, settings.data, seed=settings.seed)[0]
        return _train(settings, own, data, task, comm)

    threads = torch.get_num_threads()
    try:
        return run_virtual(ranks, work)[0]
    finally:
        torch.set_num_threads(threads)


def _check_memory(nbytes: int, ranks: int) -> None:
    """Raise ConfigurationError if the virtual ranks would not fit into this machine's memory."""
    needed, free = COPIES * nbytes * ranks, os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if needed > free:
        raise ConfigurationError(
            f"a dry run of {ranks} ranks in one process needs about {human_bytes(needed)}, {human_bytes(free)} are free; "
            "pass fewer: --dry-run RANKS"
        )


def _train(settings: Settings, model: torch.nn.Module, data: Any, task: Any, comm: Any) -> Measured:
    """Train one virtual rank, with a batch of each step's real size."""
    state = RunState()
    losses = SchemeLosses(settings, model, data, task, state)
    sync = mpisparse.GradientSync(
        model, scheme=settings.scheme, density=settings.density, codec=settings.codec, comm=comm, timeout=0,
        **losses.options(),
    )  # fmt: skip
    losses.rank, losses.size = sync.rank, sync.size
    optimizer = make_optimizer(model, settings)
    mpisparse.attach(optimizer, sync)
    order, position = Order(len(data.train), settings.seed), Position()
    seed_rank(settings.seed, sync.rank)
    every = getattr(sync.options, "every", 1)
    count = STEPS if not isinstance(every, int) else every * -(-STEPS // every)
    rows = []
    for _ in range(WARM + count):
        indices, epoch = order.take(position, settings.batch_size, sync.rank, sync.size)
        inputs, targets = data.train.batch(indices, seed=settings.seed, epoch=epoch, train=True)
        losses.batch = inputs, targets
        optimizer.zero_grad()
        loss = task.loss(model(inputs), targets)
        loss.backward()
        sync.note_loss(loss.item())
        optimizer.step()
        state.step += 1
        rows.append((sync.stats.bytes_received, sync.stats.index_bytes, sync.stats.control_bytes))
    received, in_indices, control = np.array(rows[WARM:], dtype=np.float64).mean(axis=0).tolist()
    elements, memory = sync._layout.size, _memory(model, optimizer, sync)
    sync.close()
    return Measured(elements, memory, received, in_indices, control)


# Memory


def _memory(model: torch.nn.Module, optimizer: torch.optim.Optimizer, sync: Any) -> dict[str, int]:
    """Return the bytes that a rank holds, each piece of memory counted once."""
    seen: set[int] = set()
    return {
        "parameters": _count(model.parameters(), seen),
        "buffers": _count(model.buffers(), seen),
        "optimizer": _count(optimizer.state.values(), seen),
        "gradients": _count((p.grad for p in model.parameters()), seen),
        "exchange": _count([vars(sync)], seen),
    }


def _count(things: Any, seen: set[int]) -> int:
    return sum(_held(thing, seen) for thing in things)


def _held(thing: Any, seen: set[int]) -> int:
    """Return the bytes of all arrays and tensors that are reached from an object and were not seen before."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        storage = thing.untyped_storage()
        return 0 if _known(storage.data_ptr(), seen) else storage.nbytes()
    if isinstance(thing, np.ndarray):
        base = thing
        while isinstance(base.base, np.ndarray):
            base = base.base
        return 0 if _known(base.__array_interface__["data"][0], seen) else base.nbytes
    return _count(_inside(thing), seen)


def _known(address: int, seen: set[int]) -> bool:
    """Tell whether memory at an address was counted; notes it. Addresses are kept as negative numbers, apart from ids."""
    known = -address in seen
    seen.add(-address)
    return known


def _inside(thing: Any) -> Iterator[Any]:
    """Yield what an object of this package, or a container, holds."""
    if isinstance(thing, dict):
        yield from thing.values()
    elif isinstance(thing, list | tuple | set):
        yield from thing
    elif type(thing).__module__.startswith("mpisparse."):
        yield from getattr(thing, "__dict__", {}).values()
        yield from (getattr(thing, name) for name in getattr(type(thing), "__slots__", ()) if hasattr(thing, name))
