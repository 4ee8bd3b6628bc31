"""Marks of all suites: slow tests run only with --all, those marked cuda only if torch finds a GPU."""

from __future__ import annotations

import os

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # see docs/sharp-bits.md
os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks and workers share the cores

import pytest
import torch


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests too")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--with-mpi") or config.getoption("--only-mpi"):
        from lockstep import Lockstep

        config.pluginmanager.register(Lockstep(config), "lockstep")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = pytest.mark.skip(reason="slow: run bin/test --all")
    no_gpu = pytest.mark.skip(reason="cuda: torch finds no GPU here")
    for item in items:
        if not item.get_closest_marker("mpi"):
            if item.path.parent.name == "parallel":
                raise pytest.UsageError(f"{item.nodeid} has no mark mpi; write pytestmark = pytest.mark.mpi in its file")
            item.add_marker("mpi_skip")  # a test of one process, which may start mpirun itself
        if item.get_closest_marker("slow") and not config.getoption("--all"):
            item.add_marker(slow)
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
