"""What a user sets for all of torch changes no bit: the default type, and the default device.

Many scripts set the default type to float64 at their beginning. Memory that mpisparse allocates must not depend on it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from ranks import bits, everywhere, loss_of, seeded, small
from torch import nn

import mpisparse
from mpisparse.names import SCHEMES

pytestmark = [pytest.mark.mpi, pytest.mark.filterwarnings("ignore")]

MORE: list[dict[str, Any]] = [
    {"scheme": "drift", "codec": "int2", "by": "groups"}, {"scheme": "drift", "dense_steps": 2},
    {"scheme": "drift", "masks": "own"}, {"scheme": "drift", "staleness": 1}, {"scheme": "exdyna", "staleness": 1},
    {"scheme": "exdyna", "overlap": True, "bucket_mb": 0.001}, {"scheme": "dense", "codec": "int4"},
    {"scheme": "dense", "hierarchy": "node"}, {"scheme": "exdyna", "hierarchy": "node"},
    {"scheme": "drift", "hierarchy": "node"}, {"scheme": "exdyna", "accumulate": "backward"},
    {"scheme": "exdyna", "scorer": "influence"}, {"scheme": "exdyna", "codec": "momentum-int8"},
]  # fmt: skip
CASES = [{"scheme": name} for name in SCHEMES if name != "auto"] + MORE  # auto goes by measured times


@contextlib.contextmanager
def float64_by_default() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def trained(comm: MPI.Intracomm, options: dict[str, Any], half: bool, around: Any, directory: Path) -> list[bytes]:
    """Train, save and load; return the bits of weights, gradients and state."""
    model: nn.Module = small()
    if half:
        model[2].bfloat16()  # type: ignore[index]
        model.insert(2, Cast())  # type: ignore[operator]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    with around():
        sync = mpisparse.GradientSync(model, **({"density": 0.1} if options["scheme"] in DENSITY else {}), **options)
        mpisparse.attach(optimizer, sync)
    subjects: dict[str, Any] = {"model": model, "optimizer": optimizer, "sync": sync}
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, seeded(comm.rank, step)).backward()
        with around():
            optimizer.step()
        if step == 3:
            with around():
                mpisparse.checkpoint.save(directory, step=step, **subjects)
                assert mpisparse.checkpoint.load(directory, **subjects) == step
    with around():
        sync.synchronize()
        state = [value for value in sync.state_dict().values() if isinstance(value, torch.Tensor)]
        sync.close()
    return [bits([p.grad for p in model.parameters()]), bits(model.parameters()), bits(state)]


class Cast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.bfloat16()


DENSITY = {name for name in SCHEMES if name not in ("dense", "diloco", "demo")}


@pytest.mark.parametrize("options", CASES, ids=lambda options: "-".join(map(str, options.values())))
@pytest.mark.parametrize("half", [False, True], ids=["float32", "some bfloat16"])
@pytest.mark.singles
def test_the_default_type_changes_no_bit(
    comm: MPI.Intracomm, directory: Path, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any], half: bool
) -> None:
    monkeypatch.setenv("MPISPARSE_RANKS_PER_NODE", "2")
    if half and options["scheme"] in ("drift", "diloco", "sparseloco", "speculative", "demo"):
        pytest.skip("refused, or other options are needed")
    usual = trained(comm, options, half, contextlib.nullcontext, directory / "usual")
    wide = trained(comm, options, half, float64_by_default, directory / "wide")
    assert everywhere(comm, usual == wide), [a == b for a, b in zip(usual, wide, strict=True)]
