"""Whole steps on emulated devices of virtual workers: their bits, what they launch, and what waits."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from emulator import available
from emulator.workers import Devices

import mpisparse
from mpisparse.comm.virtual import VirtualComm, run_virtual
from mpisparse.schemes import SCHEMES

pytestmark = pytest.mark.skipif(not available(), reason="no C++ compiler to build the emulator with")

OWN = [name for name in SCHEMES if SCHEMES[name].__module__.startswith("mpisparse.")]


class Spent(NamedTuple):
    """What a step took: launches, waits of the host, copies between host and device, new vectors."""

    launches: int
    waits: int
    copies: int
    vectors: int


def spent(devices: Devices) -> Spent:
    """What was spent on this worker's device so far."""
    device = devices.mine()
    return Spent(len(device.launches), device.stops, device.copies, device.allocations)


def steady(devices: Devices, comm: VirtualComm, **options: Any) -> list[Spent]:
    """What steps took in which borders stay: where gradients are much the same in each."""
    model = torch.nn.ParameterList([torch.zeros(30_000), torch.zeros(10_000)])
    sync = mpisparse.GradientSync(model, comm=comm, timeout=0, check_every=0, **options)
    found = []
    for step in range(36):
        selector = sync._aggregator.works.selection.selector
        before, stays = spent(devices), selector.keeps or not selector.draws
        model.zero_grad()
        for i, p in enumerate(model):
            generator = torch.Generator().manual_seed(100 * step + 10 * i + comm.rank)
            p.backward(torch.empty(len(p)).cauchy_(generator=generator))
        sync.step()
        took = Spent(*(b - a for a, b in zip(before, spent(devices), strict=True)))
        if step >= 24 and stays and sync.stats is not None and sync.stats.refined == sync.stats.reselected == 0:
            found.append(took)
    assert devices.mine().damaged == 0
    sync.close()
    return found


SPENT: dict[
    tuple[str, str, bool], Spent
] = {  # scheme, path, whether MPI takes device buffers; docs/explanation/gpu.md quotes it
    ("exdyna", "step", False): Spent(24, 6, 11, 0),
    ("exdyna", "step", True): Spent(24, 6, 5, 0),
    ("exdyna", "backward", False): Spent(27, 8, 13, 0),
    ("momentum", "step", False): Spent(42, 13, 19, 0),
    ("drift", "step", False): Spent(35, 8, 12, 0),
    ("drift, in flight", "step", False): Spent(6, 8, 17, 0),
}


@pytest.mark.parametrize(("scheme", "accumulate", "aware"), [key for key in SPENT if not key[0].startswith("drift")])
def test_what_a_steady_step_takes(monkeypatch: pytest.MonkeyPatch, scheme: str, accumulate: str, aware: bool) -> None:
    """The most of each; nothing is allocated."""
    devices = Devices(monkeypatch, block=64, scan=64)
    if aware:
        devices.aware(monkeypatch)
    options = {"scheme": scheme, "density": 0.01, "accumulate": accumulate}
    for found in run_virtual(2, lambda comm: steady(devices, comm, **options)):
        assert len(found) >= 6
        assert Spent(*map(max, zip(*found, strict=True))) == SPENT[scheme, accumulate, aware]


def test_a_step_of_exdyna_waits_at_most_ten_times() -> None:
    of_exdyna = [took for (scheme, *_), took in SPENT.items() if scheme == "exdyna"]
    assert max(took.waits for took in of_exdyna) <= 10
    text = (Path(__file__).parents[2] / "docs" / "explanation" / "gpu.md").read_text()
    for took in SPENT.values():
        assert f"{took.launches} launches and {took.waits} waits" in " ".join(text.split())


def waits_of_dense(devices: Devices, comm: VirtualComm, codec: str, n: int) -> int:
    """How often the host waits in a later step of scheme dense."""
    model = torch.nn.ParameterList([torch.zeros(n)])
    sync = mpisparse.GradientSync(model, scheme="dense", codec=codec, comm=comm, timeout=0, check_every=0)
    for _ in range(4):
        before = spent(devices)
        model[0].grad = None
        model[0].backward(torch.ones(n))
        sync.step()
    sync.close()
    return spent(devices).waits - before.waits


@pytest.mark.parametrize("codec", ["int8", "int4"])
def test_dense_waits_no_more_for_longer_vectors(monkeypatch: pytest.MonkeyPatch, codec: str) -> None:
    """Though these travel in chunks."""
    devices = Devices(monkeypatch)
    counts = [run_virtual(2, lambda comm, n=n: waits_of_dense(devices, comm, codec, n)) for n in (1000, 5 * 65_536)]
    assert counts[0] == counts[1]


def published(devices: Devices, comm: VirtualComm, **options: Any) -> list[bytes]:
    """Published gradients and residuals of some steps."""
    model = torch.nn.ParameterList([torch.zeros(700), torch.zeros(50, 6), torch.zeros(3)])
    sync = mpisparse.GradientSync(model, comm=comm, timeout=0, **options)
    seen = []
    for step in range(3):
        with devices.model_computes():
            model.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + comm.rank)
            torch.autograd.backward(list(model), [torch.randn(p.shape, generator=generator).pow(3) for p in model])
        sync.step()
        devices.mine().flush()
        seen += [p.grad.numpy().tobytes() for p in model] + [sync.residual.numpy().tobytes()]
    if devices.on:
        assert devices.mine().launches
        assert devices.mine().damaged == 0
    sync.close()
    return seen


def overflowing(comm: VirtualComm, options: dict[str, Any]) -> str:
    """What is said of a sum beyond float32."""
    model = torch.nn.ParameterList([torch.zeros(3000), torch.zeros(2000)])
    sync = mpisparse.GradientSync(model, comm=comm, timeout=0, **options)
    gradient = torch.linspace(-1, 1, 5000)
    gradient[[1557, 1559, 4321]] = 3e38
    torch.autograd.backward(list(model), list(gradient.split([3000, 2000])))
    with pytest.raises(mpisparse.NonFiniteGradientError) as caught:
        sync.step()
    if options.get("overlap"):
        assert torch.equal(sync.residual, torch.zeros(5000)), "a refused step changes nothing"
    sync.close()
    return str(caught.value)


BUCKETS = {"overlap": True, "bucket_mb": 0.001}


@pytest.mark.filterwarnings("ignore:overlap=True.* exchanged in step")  # virtual workers have no thread for it
@pytest.mark.parametrize("buckets", [{}, BUCKETS], ids=["whole", "buckets"])
@pytest.mark.parametrize(
    ("scheme", "codec"), [("exdyna", "fp32"), ("exdyna", "int8"), ("exdyna", "int4"), ("dense", "int8"), ("dense", "int4")]
)
def test_a_sum_beyond_float32_is_told_as_on_the_cpu(
    monkeypatch: pytest.MonkeyPatch, scheme: str, codec: str, buckets: dict[str, Any]
) -> None:
    """Though the device says only at the end of a step that it is."""
    devices = Devices(monkeypatch, block=64, scan=64, lazy=True)
    options: dict[str, Any] = {"scheme": scheme, "codec": codec, **buckets}
    options |= {"density": 0.05} if scheme == "exdyna" else {}
    said = []
    for devices.on in (True, False):
        said.append(run_virtual(2, lambda comm: overflowing(comm, options)))
    assert said[0] == said[1]
    assert "beyond what float32 holds" in said[0][0]


EARLY: list[dict[str, Any]] = [
    {},
    {"codec": "int8", "controller": "paper"},
    {"codec": "momentum-int8", "compensate": False},
    {"masks": "own", "codec": "momentum-int4"},
    {"masks": "own"},
    {"density": 1.0},
]


def cases() -> list[dict[str, Any]]:
    """Every scheme that runs on a device with every codec that it has; path "backward" for every other one."""
    all_of_them: list[dict[str, Any]] = []
    for scheme in (name for name in OWN if SCHEMES[name].on_device and not SCHEMES[name].of_weights):
        for codec in SCHEMES[scheme]().codecs():
            density: dict[str, Any] = {} if scheme == "dense" else {"density": 0.05}
            density |= {"staleness": 0} if scheme == "speculative" else {}  # else test_speculating.py
            accumulate = "backward" if len(all_of_them) % 2 else "step"
            all_of_them.append({"scheme": scheme, "codec": codec, "accumulate": accumulate, **density})
    all_of_them += [{"scorer": "influence", "density": 0.05, "accumulate": path} for path in ("step", "backward")]
    own = {"masks": "own", "density": 0.05, "codec": "int8"}
    early = {"scheme": "dense", **BUCKETS}
    more = (
        *({**early, "codec": codec} for codec in ("fp32", "int8", "int4")),
        *({**early, "scheme": "exdyna", "density": 0.05, **more} for more in EARLY),
        {"codec": "momentum-int4"},
        {"scheme": "momentum"},
        {"scheme": "dgc"},
        {"scheme": "dgc", "clip": 1.0, "masks": "union"},
        {"scheme": "threshold"},
        {"scheme": "sidco"},
        {"scheme": "topk"},
    )
    return [*all_of_them, *(case if "overlap" in case else {**own, **case} for case in more)]


@pytest.mark.filterwarnings("ignore:overlap=True.* exchanged in step")  # virtual workers have no thread for it
@pytest.mark.filterwarnings("ignore:scheme .predictive. without validation")  # too few steps to learn
def test_every_scheme_with_every_codec_has_the_bits_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = Devices(monkeypatch, block=64, scan=64, lazy=True)
    wrong = []
    for case in cases():
        runs = []
        for devices.on in (True, False):
            runs.append(run_virtual(2, lambda comm, case=case: published(devices, comm, **case)))
        if runs[0] != runs[1]:
            wrong.append(case)
    assert not wrong


def in_flight(devices: Devices, comm: VirtualComm, **options: Any) -> list[Any]:
    """Published means and residuals of some steps with deliveries in flight, a state among them, and all that arrives."""
    model = torch.nn.ParameterList([torch.zeros(700), torch.zeros(50, 6), torch.zeros(3)])
    sync = mpisparse.GradientSync(model, comm=comm, timeout=0, **{"density": 0.05, **options})
    seen: list[Any] = []

    def look() -> None:
        devices.mine().flush()
        seen.append([None if p.grad is None else p.grad.numpy().tobytes() for p in model])
        seen.append(sync.residual.numpy().tobytes())

    for step in range(6):
        with devices.model_computes():
            model[2].requires_grad_(step != 3)
            model.zero_grad()
            generator = torch.Generator().manual_seed(10 * step + comm.rank)
            moving = [p for p in model if p.requires_grad]
            torch.autograd.backward(moving, [torch.randn(p.shape, generator=generator).pow(3) for p in moving])
        sync.step()
        look()
        if step == 2:
            devices.mine().flush()
            state = sync.state_dict()
            seen.append({k: v.numpy().tobytes() for k, v in state.items() if isinstance(v, torch.Tensor)})
            with devices.model_computes():
                sync.load_state_dict(state)
    sync.synchronize()
    look()
    if devices.on:
        assert devices.mine().launches
        assert devices.mine().damaged == 0
    sync.close()
    return seen


LATE: list[dict[str, Any]] = [
    {},
    {"codec": "int8", "controller": "paper"},
    {"scorer": "average", "codec": "int4"},
    {"scorer": "influence"},
    {"codec": "momentum-int8"},
    {"masks": "own", "codec": "fp16"},
    {"masks": "own", "codec": "momentum-int8", "compensate": False},
    {"masks": "own", "staleness": 2, "compensate": False},
    {"density": 1.0},
]


def test_in_flight_has_the_bits_of_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deliveries are carried in the memory of the host, in which the device sees nothing but copies."""
    devices = Devices(monkeypatch, block=64, scan=64, lazy=True)
    wrong = []
    for case in LATE:
        runs = []
        for devices.on in (True, False):
            options = {"staleness": 1, **case}
            runs.append(run_virtual(2, lambda comm, options=options: in_flight(devices, comm, **options)))
        if runs[0] != runs[1]:
            wrong.append(case)
    assert not wrong


@pytest.mark.parametrize("scheme", [name for name in OWN if not SCHEMES[name].on_device])
def test_other_schemes_are_refused(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    Devices(monkeypatch, block=64, scan=64)
    with pytest.raises(mpisparse.ConfigurationError, match=f'r0 | scheme "{scheme}" runs on the host only'):
        run_virtual(2, lambda comm: mpisparse.GradientSync(torch.nn.Linear(3, 3), scheme=scheme, comm=comm, timeout=0))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {  # as docs/howto/gpu.md names them
    'hierarchy="node"': ({"hierarchy": "node"}, "hierarchy=.*the model is on a CUDA device"),
    'refresh="step"': ({"scheme": "predictive", "refresh": "step"}, 'refresh="step".*on a GPU choose'),
    'features="all"': ({"scheme": "exdyna", "scorer": "predicted", "features": "all"}, 'features="all".*on a GPU choose'),
}


@pytest.mark.parametrize("name", REFUSED)
def test_options_that_need_the_host_are_refused(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    options, why = REFUSED[name]
    Devices(monkeypatch, block=64, scan=64)
    monkeypatch.setenv("MPISPARSE_RANKS_PER_NODE", "2")
    with pytest.raises(mpisparse.ConfigurationError, match=why):
        run_virtual(4, lambda comm: mpisparse.GradientSync(torch.nn.Linear(3, 3), comm=comm, timeout=0, **options))


def test_the_documented_list_of_refused_options_is_this_one() -> None:
    text = (Path(__file__).parents[2] / "docs" / "howto" / "gpu.md").read_text()
    named = re.findall(r"^- `([^`]+)`", text.split("Also refused on a device:")[1].split("\n## ")[0], re.MULTILINE)
    assert set(named) == set(REFUSED)


def test_a_graph_cannot_hold_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks learn it, and nothing has happened."""
    devices = Devices(monkeypatch, block=64, scan=64)

    def work(comm: VirtualComm) -> None:
        model = torch.nn.Linear(30, 30)
        sync = mpisparse.GradientSync(model, comm=comm, timeout=0)
        before = len(devices.mine().launches)
        for capturing in (True, False):
            model(torch.ones(2, 30)).sum().backward()
            devices.mine().capturing = capturing
            if not capturing:
                sync.step()
                break
            with pytest.raises(
                mpisparse.GradientError, match=r"a CUDA graph cannot hold an exchange: .* call step\(\) outside"
            ):
                sync.step()
            assert len(devices.mine().launches) == before
        sync.close()

    run_virtual(2, work)


def test_small_gradients_are_added_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """During backward, and all of them by its end: one launch for about a tile, and one for each large parameter."""
    devices = Devices(monkeypatch, block=64, scan=64)
    tile = 32 * 64

    def work(comm: VirtualComm) -> None:
        sizes = [*([100] * 60), 3 * tile, *([3] * 40), 2 * tile]
        model = torch.nn.ParameterList([torch.zeros(size) for size in sizes])
        sync = mpisparse.GradientSync(model, comm=comm, timeout=0, density=0.05, accumulate="backward")
        emulator = devices.mine()
        for step in range(2):
            gradients = [torch.randn(size, generator=torch.Generator().manual_seed(step)) for size in sizes]
            before, expected = emulator.launches.count("accumulate"), sync.residual.clone()
            model.zero_grad()
            torch.autograd.backward(list(model), gradients)
            assert torch.equal(sync.residual, expected + torch.cat(gradients))
            assert emulator.launches.count("accumulate") - before <= 2 + 1 + sum(sizes) // tile
            sync.step()
        assert emulator.damaged == 0
        sync.close()

    run_virtual(2, work)
