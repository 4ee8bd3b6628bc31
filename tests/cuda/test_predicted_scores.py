"""Predicted importance on emulated devices of virtual workers: the bits of the CPU, and a thread that launches nothing."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from emulator import Emulator, available
from emulator.workers import Devices, differing
from samples import assert_same
from test_speculating import computes
from test_steps import Spent, spent
from test_weights import bits_of, plain

import mpisparse
from mpisparse.backends.cuda.backend import CudaBackend
from mpisparse.backends.device import load_backend
from mpisparse.backends.keys import PRODUCTS, SCORES, keys_of
from mpisparse.comm.virtual import VirtualComm, run_virtual
from mpisparse.schemes.predictive import scorer

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler to build the emulator with")

STEPS = 16
QUICK: dict[str, Any] = {"history": 3, "validate_every": 6, "validation": True}


def begun(comm: VirtualComm, options: dict[str, Any]) -> tuple[torch.nn.ParameterList, Any]:
    """A model and what exchanges it; with validation=True its held-out loss is a cubic of the weights."""
    generator = torch.Generator().manual_seed(7)
    model = torch.nn.ParameterList([torch.randn(shape, generator=generator) for shape in ((700,), (50, 6), (3,))])
    options = {"density": 0.05, **QUICK, **options}
    if options.pop("validation"):
        options["validation"] = lambda: sum((p * p * p).sum() for p in model)
    return model, mpisparse.GradientSync(model, comm=comm, timeout=0, **options)


def trained(devices: Devices, comm: VirtualComm, options: dict[str, Any]) -> list[Any]:
    """What is published, residuals and states; and whether nets have learnt."""
    model, sync = begun(comm, options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    if sync.scheme == "speculative":
        mpisparse.attach(optimizer, sync)
        optimizer.register_step_pre_hook(lambda *_: devices.mine().flush())
    if devices.on:
        devices.mine().thread = threading.get_ident()
    seen: list[Any] = []
    for step in range(STEPS):
        with devices.model_computes():
            computes(model, step, comm.rank)
        sync.note_loss(1.0 / (step + 1))
        if sync.scheme != "speculative":
            sync.step()
        with devices.model_computes():
            optimizer.step()
            seen += [bits_of(model), bits_of([sync.residual])]
        if step in (5, 9, 13):
            with devices.model_computes(), sync.global_weights():
                state = sync.state_dict()
                seen.append(plain(state))
                sync.load_state_dict(state)
    seen.append({name: sync.stats.details[name] for name in ("ranking", "ranking_by_magnitude")})
    assert seen[-1]["ranking"] >= 0.0, "nothing was learnt"
    if devices.on:
        assert "record" in devices.mine().launches
        devices.mine().flush()
        assert devices.mine().damaged == 0
    sync.close()
    return seen


PREDICTIVE: list[dict[str, Any]] = [
    {"publish_after": 2},
    {"publish_after": 2, "accumulate": "backward", "codec": "fp32"},
    {"rule": "importance", "publish_after": 1, "nets": "shared"},
    {"validation": False, "compensate": False, "rescale": True, "accumulate": "backward"},
    {"masks": "own", "codec": "int4"},
    {"percentile": "exact", "adapt_k": False, "codec": "momentum-int8"},
]
CASES = [
    *({"scheme": "predictive", **case} for case in PREDICTIVE),
    {"scheme": "exdyna", "scorer": "predicted"},
    {"scheme": "exdyna", "scorer": "predicted", "staleness": 1},
    {"scheme": "speculative", "scorer": "predicted", "granularity": "hybrid", "density": 0.2, "codec": "int8"},
]


@pytest.mark.filterwarnings("ignore:scheme .predictive. without validation")
@pytest.mark.parametrize("size", [2, 3])
def test_predicted_importance_has_the_bits_of_the_cpu(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    """On a stream that does nothing until someone waits, and with several slices of the vector."""
    monkeypatch.setattr(scorer, "LEAST", 300)
    assert not differing(monkeypatch, size, CASES if size == 2 else CASES[1::2], trained)


def steady(devices: Devices, comm: VirtualComm) -> list[Spent]:
    """What later steps take, lessons and slices among them; borders are drawn in each."""
    model = torch.nn.ParameterList([torch.zeros(30_000), torch.zeros(10_000)])
    loss = {"validation": lambda: sum((p - 1).square().sum() for p in model), "validate_every": 8, "adapt_k": False}
    sync = mpisparse.GradientSync(model, scheme="predictive", comm=comm, timeout=0, check_every=0, density=0.01, **loss)
    found = []
    for step in range(64):
        before = spent(devices)
        model.zero_grad()
        for i, p in enumerate(model):
            generator = torch.Generator().manual_seed(100 * step + 10 * i + comm.rank)
            p.backward(torch.empty(len(p)).cauchy_(generator=generator))
        sync.step()
        if step >= 32 and sync.stats.refined == sync.stats.reselected == 0:
            found.append(Spent(*(b - a for a, b in zip(before, spent(devices), strict=True))))
    assert devices.mine().damaged == 0
    sync.close()
    return found


def test_what_a_steady_step_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The most of each, which docs/explanation/gpu.md quotes. Nobody waits for the thread's copies; memory is used again."""
    devices = Devices(monkeypatch, block=64, scan=64)
    text = (Path(__file__).parents[2] / "docs" / "explanation" / "gpu.md").read_text()
    for found in run_virtual(2, lambda comm: steady(devices, comm)):
        assert len(found) >= 6
        launches, waits = max(took.launches for took in found), max(took.waits for took in found)
        assert f"`predictive` | at most {launches} launches and {waits} waits" in text
        grown = sum(took.vectors > 0 for took in found)  # steps that select more than any before
        assert grown <= len(found) / 4


@pytest.mark.parametrize("rule", [PRODUCTS, SCORES])
def test_all_keys_of_a_device_have_the_bits_of_the_host(rule: int) -> None:
    backend = CudaBackend(Emulator(block=64, scan=64, lazy=True), load_backend(), pooled=True)
    acc = np.array([0.0, -0.0, 1e-40, -3.5, 3e38, 0.02], dtype=np.float32).repeat(255)
    scores = np.resize(np.arange(255, dtype=np.uint8), len(acc))
    assert_same(
        backend.to_host(keys_of(backend.from_host(acc), backend.from_host(scores), rule)), keys_of(acc, scores, rule)
    )
