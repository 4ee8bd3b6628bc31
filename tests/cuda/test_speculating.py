"""Scheme speculative on emulated devices of virtual workers: both sets of weights have the bits of the CPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from emulator import available
from emulator.workers import Devices, differing
from test_steps import spent
from test_weights import Elsewhere, bits_of, plain

import mpisparse
from mpisparse.backends.flat import Slot
from mpisparse.comm.virtual import VirtualComm, run_virtual
from mpisparse.schemes.speculative.influence import Influence
from mpisparse.schemes.speculative.local import LocalUpdate
from mpisparse.schemes.speculative.weights import Tolerance, TwoSets

pytestmark = [
    pytest.mark.skipif(not available(), reason="no C++ compiler to build the emulator with"),
    pytest.mark.filterwarnings("ignore:an adaptive optimizer"),
]

STEPS = 6


def begun(comm: VirtualComm, options: dict[str, Any]) -> tuple[torch.nn.ParameterList, Any, torch.optim.Optimizer]:
    """A model of a vector, a matrix in another memory order, and two small layers; what exchanges it; its optimizer."""
    options, generator = dict(options), torch.Generator().manual_seed(7)
    layers = [torch.randn(shape, generator=generator) for shape in ((3000,), (50, 6), (3,), (40,))]
    layers[1] = layers[1].t().contiguous().t()
    model = torch.nn.ParameterList(layers)
    if options.pop("probed", False):
        options |= {"probe": lambda: sum((p * p * p).sum() for p in model), "probe_every": 2}
    sync = mpisparse.GradientSync(model, scheme="speculative", comm=comm, timeout=0, **{"density": 0.05, **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    mpisparse.attach(optimizer, sync)
    return model, sync, optimizer


def computes(model: torch.nn.ParameterList, step: int, rank: int) -> None:
    """Other gradients in each step on each rank."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    model.zero_grad()
    torch.autograd.backward(list(model), [torch.randn(p.shape, generator=generator).pow(3) for p in model])


def trained(devices: Devices, comm: VirtualComm, options: dict[str, Any]) -> list[Any]:
    """Own weights and residuals after each step, states, and the weights after all is exchanged."""
    model, sync, optimizer = begun(comm, options)
    optimizer.register_step_pre_hook(lambda *_: devices.mine().flush())  # torch reads what was published in the same stream
    seen: list[Any] = []
    for step in range(STEPS):
        with devices.model_computes():
            computes(model, step, comm.rank)
        sync.note_loss(1.0 / (step + 1 + comm.rank))
        optimizer.step()
        devices.mine().flush()
        seen += [bits_of(model), bits_of([sync.residual])]
        if step in (1, 3):
            with devices.model_computes(), sync.global_weights():
                state = sync.state_dict()
                seen += [bits_of(model), plain(state)]
                sync.load_state_dict(state)
            seen.append(bits_of(model))
    with devices.model_computes():
        sync.synchronize()
    seen += [bits_of(model), repr(sync.stats.speculation)]
    if devices.on:
        assert devices.mine().launches
        assert devices.mine().damaged == 0
    sync.close()
    return seen


CASES: list[dict[str, Any]] = [
    {},
    {"granularity": "fine", "codec": "int8", "staleness": 2},
    {"granularity": "coarse", "probed": True, "scored": "after", "density": 0.2},
    {"granularity": "hybrid", "threshold": 1e-4, "measure": "relative", "codec": "momentum-int8"},
    {"granularity": "hybrid", "influence": "update", "probed": True, "largest": 400, "density": 0.2, "codec": "int4"},
    {"compensate": False, "average": "received", "server": "rank0", "per": "layer", "tolerance": 0.1},
    {"scorer": "average", "granularity": "rule", "horizon": 6, "tolerance": 0.0},
    {"scorer": "magnitude", "granularity": "learned", "tolerance": float("inf"), "codec": "fp16"},
]


@pytest.mark.parametrize("size", [2, 3])
def test_speculative_has_the_bits_of_the_cpu(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """On a stream that does nothing until someone waits."""
    assert not differing(monkeypatch, size, CASES if size == 2 else CASES[1::2], trained)


def steady(devices: Devices, comm: VirtualComm, options: dict[str, Any]) -> tuple[int, int]:
    """The most waits and new vectors of later steps."""
    model, sync, optimizer = begun(comm, {"codec": "int8", **options})
    found = []
    for step in range(30):
        computes(model, step, comm.rank)
        before = spent(devices)
        optimizer.step()
        after = spent(devices)
        found.append((after.waits - before.waits, after.vectors - before.vectors))
    sync.close()
    return max(waits for waits, _ in found[20:]), max(vectors for _, vectors in found[20:])


@pytest.mark.parametrize("granularity", ["fine", "hybrid"])
def test_what_a_steady_step_takes(monkeypatch: pytest.MonkeyPatch, granularity: str) -> None:
    """As many waits for some layers as for all; nothing is allocated."""
    devices = Devices(monkeypatch, block=64, scan=64)
    waits = {"fine": 7, "hybrid": 8}[granularity]
    assert run_virtual(2, lambda comm: steady(devices, comm, {"granularity": granularity})) == [(waits, 0)] * 2


def test_what_torch_does_with_two_sets_mixes_no_devices() -> None:
    """Torch would refuse it: here the model is on a device that is not the host's."""
    params = [torch.nn.Parameter(torch.zeros(shape, device="meta")) for shape in ((4,), (2, 3))]
    slots = [Slot("a", 0, 4, (4,), (1,), torch.float32), Slot("b", 4, 10, (2, 3), (3, 1), torch.float32)]
    places: Any = Elsewhere(params, slots)  # type: ignore[arg-type]
    optimizer = torch.optim.Adam(params)
    local, sets = LocalUpdate(places, optimizer), TwoSets(places, optimizer)
    sets.swap()
    for p in params:
        p.grad = torch.ones_like(p)
    optimizer.step()
    sets.swap()
    local.apply(np.array([0, 3, 5]), np.ones(3, dtype=np.float32))
    for each in [*sets.weights, *(v for s in sets.state for n, v in s.items() if n != "step")]:
        assert each.device.type == "meta"
    far = sets._correct_weights((1, 0, 6), Tolerance(0.1, relative=True, by_layer=False))
    assert [each.device.type for each in far] == ["meta", "meta"]
    assert local.preview(torch.ones(10, device="meta")).device.type == "meta"
    sets.synchronize()
    sets.load({"weights": [torch.ones(4), torch.ones(6)], "state": [{"exp_avg": torch.ones(4)}, {}]})  # from the host
    assert optimizer.state[params[0]]["exp_avg"].device.type == "meta"
    influence = Influence(10, rate=0.5, epsilon=1e-3, device=torch.device("meta"))
    influence.learn(torch.ones(10, device="meta"))
    influence.update(torch.ones(10, device="meta"), torch.ones(10, device="meta"))
    influence.load({"mean.influence": np.ones(10), "mean.curvature": np.ones(10), "probes": 1})
    assert influence.scores.device.type == influence.curvature.device.type == "meta"
