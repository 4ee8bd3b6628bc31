"""Recorded gradients are those of backward, on every rank; a step is recorded atomically."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI
from ranks import everywhere, in_memory_order, raised, seeded
from torch import nn

from mpisparse.errors import CheckpointError, ConfigurationError
from mpisparse.plan.synthetic import worker_gradient
from mpisparse.runtime import recording
from mpisparse.runtime.recording import Recorder, Recording

pytestmark = pytest.mark.mpi


class Odd(nn.Module):
    """Parameters with an unusual memory order, with sparse gradients, and without gradients."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv = nn.Conv2d(3, 5, 2).to(memory_format=torch.channels_last)
        self.embed = nn.Embedding(7, 4, sparse=True)
        self.idle = nn.Parameter(torch.ones(6))

    def forward(self, generator: torch.Generator) -> torch.Tensor:
        seen = self.conv(torch.randn(2, 3, 4, 4, generator=generator))
        return seen.square().sum() + self.embed(torch.tensor([1, 5, 1])).sin().sum()


@pytest.fixture
def shared(mpi_tmp_path: Path) -> Path:
    return mpi_tmp_path


def backward(comm: MPI.Intracomm, model: nn.Module, step: int) -> np.ndarray:
    model.zero_grad()
    model(seeded(comm.rank, step)).backward()
    return torch.cat([in_memory_order(p, p.grad) for p in model.parameters()]).float().numpy()


def test_what_is_read_is_what_backward_gave(comm: MPI.Intracomm, shared: Path) -> None:
    model = Odd()
    recorder = Recorder(shared, model, count=2, scheme="exdyna")
    given = []
    for step in (4, 5):
        assert recorder.left == 6 - step
        given.append(comm.allgather(backward(comm, model, step)))
        recorder.record(step)
    assert recorder.left == 0
    read = Recording(shared)
    assert (read.ranks, read.steps) == (comm.size, 2)
    assert read.sizes == [p.numel() for p in model.parameters()]
    same = [np.array_equal(read.gradient(r, s), given[s][r]) for s in range(2) for r in range(comm.size)]
    assert everywhere(comm, all(same))
    assert np.array_equal(worker_gradient(read, comm.size, 0), given[1][0]), "a worker more is one of some steps later"
    again = Recorder(shared, model, count=3, scheme="exdyna")
    assert again.left == 1, "what is there counts"
    again.close()
    recorder.close()


def test_one_file_is_a_recording(comm: MPI.Intracomm, shared: Path) -> None:
    model = Odd()
    recorder = Recorder(shared, model, count=1, scheme="exdyna")
    given = backward(comm, model, 1)
    place = recorder.record(1)
    one = Recording(place / f"rank-{comm.rank:04d}.h5")
    assert everywhere(comm, (one.ranks, one.steps) == (1, 1) and np.array_equal(one.gradient(0, 0), given))
    recorder.close()


def test_a_step_is_whole_or_not_there(comm: MPI.Intracomm, shared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Odd()
    recorder = Recorder(shared, model, count=3, scheme="exdyna")
    backward(comm, model, 1)
    recorder.record(1)
    if comm.rank == comm.size - 1:
        monkeypatch.setattr(recording, "write_file", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left")))
    assert "No space left" in raised(comm, CheckpointError, lambda: recorder.record(2))
    monkeypatch.undo()
    assert sorted(p.name for p in (shared / "gradients").iterdir()) == ["step-00000001"]
    comm.Barrier()
    recorder.record(2)
    assert Recording(shared).steps == 2
    recorder.close()


def test_damage_is_noticed(comm: MPI.Intracomm, shared: Path) -> None:
    recorder = Recorder(shared, model := Odd(), count=1, scheme="exdyna")
    backward(comm, model, 1)
    file = recorder.record(1) / "rank-0000.h5"
    comm.Barrier()
    if comm.rank == 0:
        data = bytearray(file.read_bytes())
        data[data.index(np.float32(0.0).tobytes() * 6)] ^= 1  # inside the gradient of what has none
        file.write_bytes(data)
    comm.Barrier()
    with pytest.raises(ConfigurationError, match=r"rank-0000\.h5.*record the gradients again"):
        Recording(shared).gradient(0, 0)
    with pytest.raises(ConfigurationError, match="expected gradients of mpisparse train --record-gradients"):
        Recording(shared / "elsewhere")
    recorder.close()
