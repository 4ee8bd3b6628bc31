"""Marks shared by all suites: slow tests run only with --all."""

from __future__ import annotations

import os

import pytest

os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")  # see docs/sharp-bits.md


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--all", action="store_true", help="run the slow tests too")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--all"):
        return
    skip = pytest.mark.skip(reason="slow: run bin/test --all")
    for item in items:
        if item.get_closest_marker("slow"):
            item.add_marker(skip)
