"""Parallel tests: every rank runs every test; a test fails if it fails on any rank."""

from __future__ import annotations

import faulthandler
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

TIMEOUT = float(os.environ.get("MPISPARSE_TEST_TIMEOUT", "120"))


@pytest.fixture(scope="session")
def comm() -> MPI.Intracomm:
    return MPI.COMM_WORLD


@pytest.fixture
def directory(comm: MPI.Intracomm) -> Iterator[Path]:
    """Return one directory for all ranks."""
    path = comm.bcast(tempfile.mkdtemp(prefix="mpisparse-") if comm.rank == 0 else None)
    yield Path(path)
    comm.Barrier()
    if comm.rank == 0:
        shutil.rmtree(path)


@pytest.fixture(autouse=True)
def _clean_slate() -> Iterator[None]:
    """Start every test in the same state, and end the job if a test hangs."""
    faulthandler.dump_traceback_later(TIMEOUT, exit=True)
    torch.manual_seed(1234)
    np.random.seed(1234)
    torch.set_num_threads(1)
    yield
    faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> Any:
    """Agree on the verdict, so that no rank starts the next test alone."""
    error: BaseException | None = None
    result = None
    try:
        result = yield
    except pytest.skip.Exception:
        raise
    except Exception as caught:
        error = caught
    failed = MPI.COMM_WORLD.allgather(error is not None)
    if error is not None:
        raise error
    if any(failed):
        pytest.fail(f"failed on rank {[rank for rank, bad in enumerate(failed) if bad]}", pytrace=False)
    return result
