"""Fixtures of the parallel tests. tests/lockstep.py keeps the ranks together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

import mpisparse


@pytest.fixture(scope="session")
def comm() -> MPI.Intracomm:
    return MPI.COMM_WORLD


@pytest.fixture(scope="module")
def group(comm: MPI.Intracomm) -> Iterator[dist.ProcessGroup]:
    """All ranks as a process group of torch.distributed; given back, because benchmarks make their own."""
    mpisparse.init_torch_distributed()
    made = dist.group.WORLD
    assert made is not None
    yield made
    comm.Barrier()
    dist.destroy_process_group()


@pytest.fixture
def directory(mpi_tmp_path: Path) -> Path:
    """One directory for all ranks."""
    return mpi_tmp_path


@pytest.fixture(autouse=True)
def _same_start() -> None:
    """The same generators and one thread for every test."""
    torch.manual_seed(1234)
    np.random.seed(1234)
    torch.set_num_threads(1)
