"""Marks of all suites: what only --all runs (slow; singles, pairs and ranks in part), and cuda, which needs a GPU."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # see docs/howto/sharp-bits.md
os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks and workers share the cores

import pytest
import torch
from fewer import left_out


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests too")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    for mark in (
        "singles: of a product of parameters only cases that have every value once; all with --all",
        "pairs: of a product of parameters only cases that have every pair of values; all with --all",
        "ranks(*numbers): under mpirun only on these numbers of ranks; on all with --all",
    ):
        config.addinivalue_line("markers", mark)
    if config.getoption("--with-mpi") or config.getoption("--only-mpi"):
        from lockstep import Lockstep

        config.pluginmanager.register(Lockstep(config), "lockstep")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = pytest.mark.skip(reason="slow: run bin/test --all")
    no_gpu = pytest.mark.skip(reason="cuda: torch finds no GPU here")
    if not config.getoption("--all"):
        for item in [*(i for i in items if i.get_closest_marker("slow")), *left_out(items, ranks_of(config))]:
            item.add_marker(slow)
    for item in items:
        if not item.get_closest_marker("mpi"):
            if item.path.parent.name == "parallel":
                raise pytest.UsageError(f"{item.nodeid} has no mark mpi; write pytestmark = pytest.mark.mpi in its file")
            item.add_marker("mpi_skip")  # a test of one process, which may start mpirun itself
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(no_gpu)


@pytest.fixture(scope="session", autouse=True)
def _where_mpirun_works() -> Iterator[None]:
    yield from _place_of_mpirun()


@pytest.fixture(autouse=True)
def _where_mpirun_works_now(_where_mpirun_works: None) -> Iterator[None]:
    """Open MPI's mpirun fails to start where one of the same process number was killed: it finds that one's directory."""
    yield from _place_of_mpirun()


def _place_of_mpirun() -> Iterator[None]:
    name = "PRTE_MCA_prte_tmpdir_base"
    if "OMPI_COMM_WORLD_SIZE" in os.environ:  # this is a rank, and starts none
        yield
        return
    before, os.environ[name] = os.environ.get(name), tempfile.mkdtemp(prefix="mpirun-")
    yield
    shutil.rmtree(os.environ.pop(name), ignore_errors=True)
    if before is not None:
        os.environ[name] = before


def ranks_of(config: pytest.Config) -> int:
    """The number of ranks; 0 if these are tests of one process."""
    lockstep = config.pluginmanager.get_plugin("lockstep")
    return lockstep.comm.size if lockstep else 0
