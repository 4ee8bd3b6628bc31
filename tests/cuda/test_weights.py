"""Schemes that exchange weights on emulated devices of virtual workers: the bits of the CPU, and what a step takes."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from emulator import available
from emulator.workers import Devices
from test_steps import SPENT, Spent, spent

import mpisparse
from mpisparse.backends.flat import Slot
from mpisparse.comm.virtual import VirtualComm, run_virtual
from mpisparse.schemes.drift.weights import OwnWeights

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler to build the emulator with")

STEPS = 5


def built(comm: VirtualComm, options: dict[str, Any]) -> tuple[torch.nn.ParameterList, Any, torch.optim.Optimizer]:
    """A model of one value and two matrices, what exchanges it, and its optimizer."""
    options = dict(options)
    kinds = (torch.bfloat16 if options.get("remainder") else torch.float32, torch.float32, torch.float32)
    shapes, generator = ((3000,), (50, 6), (3,)), torch.Generator().manual_seed(7)
    model = torch.nn.ParameterList(
        [torch.randn(shape, generator=generator).to(kind) for shape, kind in zip(shapes, kinds, strict=True)]
    )
    sync = mpisparse.GradientSync(model, comm=comm, timeout=0, check_every=2, **options)
    return model, sync, torch.optim.AdamW(model.parameters(), lr=0.05)


def set_gradients(model: torch.nn.ParameterList, step: int, rank: int) -> None:
    """Other ones in each step on each rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    for p in model:
        p.grad = torch.randn(p.shape, generator=generator).pow(3).to(p.dtype)


def bits_of(tensors: Any) -> list[bytes]:
    return [(t.view(torch.int16) if t.dtype is torch.bfloat16 else t).detach().numpy().tobytes() for t in tensors]


def plain(value: Any) -> Any:
    """A state whose vectors are bytes, to compare."""
    if isinstance(value, dict):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(plain, value))
    if isinstance(value, np.ndarray):
        return value.dtype.str, value.tobytes()
    return bits_of([value]) if isinstance(value, torch.Tensor) else value


def trained(devices: Devices, comm: VirtualComm, options: dict[str, Any]) -> list[Any]:
    """Weights and their distance from the shared ones after each step; states; weights after all is exchanged."""
    model, sync, optimizer = built(comm, options)
    attached = mpisparse.attach(optimizer, sync) if "dense_steps" in options else None
    seen: list[Any] = []
    for step in range(STEPS):
        with devices.model_computes():
            set_gradients(model, step, comm.rank)
            optimizer.step()
        if attached is None:
            sync.step()
        devices.mine().flush()
        seen += [bits_of(model), bits_of([sync.residual])]
    with devices.model_computes():
        state = sync.state_dict()
        with sync.global_weights():
            seen.append(bits_of(model))
            sync.load_state_dict(state)
        seen += [bits_of(model), plain(state), plain(sync.state_dict())]
        sync.synchronize()
    seen.append(bits_of(model))
    if devices.on:
        assert devices.mine().launches
        assert devices.mine().damaged == 0
    sync.close()
    return seen


DRIFT: list[dict[str, Any]] = [
    {},
    {"codec": "fp32", "rate": 1.0},
    {"codec": "int8", "every": 2},
    {"codec": "sign", "controller": "paper", "partitioner": "paper"},
    {"scorer": "average"},
    {"scorer": "influence"},
    {"scorer": "predicted", "history": 3, "validate_every": 4, "validation": lambda: torch.ones((), requires_grad=True)},
    {"masks": "own"},
    {"masks": "granular", "density": 0.3},
    {"masks": "granular", "granularity": "coarse", "scorer": "influence", "density": 0.3},
    {"masks": "granular", "granularity": "fine", "scorer": "average"},
    {"masks": "own", "average": "received", "server": "rank0", "codec": "int8"},
    {"by": "groups", "density": 0.4},
    {"density": 1.0},
    {"density": 1.0, "codec": "bf16", "every": "2, 3:3"},
    {"density": 1.0, "codec": "fp32", "every": 2, "spread": False},
    {"remainder": True},
]
LATE: list[dict[str, Any]] = [
    {},
    {"codec": "int8", "every": 2},
    {"scorer": "average"},
    {"masks": "own"},
    {"density": 1.0},
    {"density": 1.0, "every": 2},
]
START: list[dict[str, Any]] = [{"dense_steps": 2}, {"dense_steps": 3, "dense_codec": "int8"}]
CASES = [
    *({"density": 0.05, **case} for case in (*DRIFT, *START)),
    *({"density": 0.05, "staleness": 1, **case} for case in LATE),
]
LOCAL: list[dict[str, Any]] = [
    {"scheme": "diloco", "every": 2},
    {"scheme": "diloco", "every": 2, "codec": "int4"},
    {"scheme": "sparseloco", "every": 2, "chunk": 512, "codec": "fp32"},
    {"scheme": "sparseloco", "every": 1, "chunk": 512},
]
NOT_ORDERED = (
    "remainder",
    "dense_steps",
)  # torch reads and writes in the middle of a step, which no emulator's stream orders


@pytest.mark.parametrize("size", [2, 3])
def test_drift_has_the_bits_of_the_cpu(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """At once and in flight; also its states, and what is left when all is exchanged."""
    wrong = []
    for case in CASES if size == 2 else CASES[1::2]:
        if differs(monkeypatch, size, {"scheme": "drift", **case}, lazy=not set(case) & set(NOT_ORDERED)):
            wrong.append(case)
    assert not wrong


def differs(monkeypatch: pytest.MonkeyPatch, size: int, case: dict[str, Any], *, lazy: bool) -> bool:
    """Whether a training has other bits on devices than on the CPU."""
    devices, runs = Devices(monkeypatch, block=64, scan=64, lazy=lazy), list[Any]()
    for devices.on in (True, False):
        runs.append(run_virtual(size, lambda comm: trained(devices, comm, case)))
    return bool(runs[0] != runs[1])


def test_local_steps_have_the_bits_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """diloco and sparseloco; torch's outer steps lie between launches, and so are not in a stream."""
    assert not [case for case in LOCAL if differs(monkeypatch, 2, case, lazy=True)]


def moved(devices: Devices, comm: VirtualComm, codec: str) -> list[Any]:
    """Weights and states of OneBitAdamW: a warm-up, steps by signs, a renewal of the variance."""
    generator = torch.Generator().manual_seed(7)
    model = torch.nn.ParameterList([torch.randn(shape, generator=generator) for shape in ((300,), (50, 6), (3,))])
    optimizer, seen = mpisparse.optim.OneBitAdamW(model.parameters(), comm=comm, warmup=2, codec=codec), list[Any]()
    for step in range(7):
        set_gradients(model, step, comm.rank)
        if step == 1:
            model[1].grad = None
        optimizer.step()
        seen += [bits_of(model), optimizer.stats.bytes_received]
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    optimizer.step()
    seen += [bits_of(model), bits_of([state["onebit"]["error"]])]
    if devices.on:
        assert devices.mine().launches
        assert devices.mine().damaged == 0
    optimizer.close()
    return seen


@pytest.mark.parametrize("codec", ["sign", "int8"])
def test_onebit_has_the_bits_of_the_cpu(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    devices = Devices(monkeypatch, block=64, scan=64)
    runs = []
    for devices.on in (True, False):
        runs.append(run_virtual(2, lambda comm: moved(devices, comm, codec)))
    assert runs[0] == runs[1]


class Elsewhere(NamedTuple):
    """Parameters on torch's device without memory, which stands for another one than the host, and their places."""

    params: list[torch.Tensor]
    slots: list[Slot]

    @property
    def ends(self) -> Any:
        return np.array([slot.end for slot in self.slots])

    @property
    def size(self) -> int:
        return self.slots[-1].end

    @property
    def device(self) -> torch.device:
        return self.params[0].device

    def misfit(self, grads: Any) -> str | None:
        return None


def test_weights_stay_where_they_are() -> None:
    """What torch does with weights and remainders mixes no devices: torch would refuse it."""
    params = [torch.zeros(4, dtype=torch.bfloat16, device="meta"), torch.zeros(2, 3, device="meta")]
    slots = [
        Slot("a", 0, 4, (4,), (1,), torch.bfloat16),
        Slot("b", 4, 10, (2, 3), (3, 1), torch.float32),
    ]
    weights = OwnWeights(Elsewhere(params, slots), remainder=True)  # type: ignore[arg-type]
    shared = torch.zeros(10, device="meta")
    assert {piece.device.type for piece in weights.pieces().alive} == {"meta"}
    for vector in (weights.flat(), weights.rounded(in_model=True), weights.remainder(), weights.remainder_of(shared)):
        assert vector.device.type == "meta"
    assert weights.flat().sub_(shared).device.type == "meta"
    weights.publish(None)
    for kept in (shared, torch.ones(10)):  # a state is on the host
        weights.set_flat(kept, torch.zeros(4))
        assert weights.with_remainder(shared, torch.zeros(4)).device.type == "meta"
    assert {left.device.type for left in weights.remainders.values()} == {"meta"}


def steady(devices: Devices, comm: VirtualComm, **options: Any) -> list[Spent]:
    """What exchanges took in which borders stay."""
    model = torch.nn.ParameterList([torch.zeros(30_000), torch.zeros(10_000)])
    sync = mpisparse.GradientSync(model, comm=comm, timeout=0, check_every=0, **options)
    found = []
    for step in range(36):
        with torch.no_grad(), devices.model_computes():
            for i, p in enumerate(model):
                generator = torch.Generator().manual_seed(100 * step + 10 * i + comm.rank)
                p += torch.empty(len(p)).cauchy_(generator=generator)
        selector = sync._aggregator.works.selection.selector
        before, stays = spent(devices), selector.keeps or not selector.draws
        sync.step()
        took = Spent(*(b - a for a, b in zip(before, spent(devices), strict=True)))
        if step >= 24 and stays and sync.stats.refined == sync.stats.reselected == 0:
            found.append(took)
    assert devices.mine().damaged == 0
    sync.close()
    return found


@pytest.mark.parametrize(("name", "options"), [("drift", {}), ("drift, in flight", {"staleness": 1})], ids=["now", "late"])
def test_what_a_steady_exchange_takes(monkeypatch: pytest.MonkeyPatch, name: str, options: dict[str, Any]) -> None:
    """The most of each; nothing is allocated."""
    devices = Devices(monkeypatch, block=64, scan=64)
    for found in run_virtual(2, lambda comm: steady(devices, comm, scheme="drift", density=0.01, **options)):
        assert len(found) >= 2
        assert Spent(*map(max, zip(*found, strict=True))) == SPENT[name, "step", False]
