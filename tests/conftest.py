"""Marks of all suites: slow tests run only with --all, those marked cuda only if torch finds a GPU."""

from __future__ import annotations

import os

import pytest
import torch

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # see docs/sharp-bits.md


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    slow = pytest.mark.skip(reason="slow: run bin/test --all")
    no_gpu = pytest.mark.skip(reason="cuda: torch finds no GPU here")
    for item in items:
        if item.get_closest_marker("slow") and not config.getoption("--all"):
            item.add_marker(slow)
        if item.get_closest_marker("cuda") and not torch.cuda.is_available():
            item.add_marker(no_gpu)
