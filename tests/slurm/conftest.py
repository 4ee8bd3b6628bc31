"""A real Slurm for these tests, started by bin/slurmlab; if that fails, they are skipped with the reason."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

LAB = Path(__file__).parents[2] / "bin" / "slurmlab"
NODES, CPUS = 4, 64  # more than the machine has, as the templates ask for them; only tests of few threads run


@pytest.fixture(scope="session")
def lab() -> Iterator[None]:
    """Start Slurm with four nodes until the end of the session."""
    if os.geteuid() != 0:
        pytest.skip("no Slurm: bin/slurmlab needs root")
    started = subprocess.run([LAB, "up", str(NODES), str(CPUS)], capture_output=True, text=True, timeout=1200, check=False)
    if started.returncode != 0:
        reason = started.stderr.strip().splitlines() or ["no reason given"]
        pytest.skip(f"no Slurm: {reason[-1]}")
    name, _, value = started.stdout.strip().removeprefix("export ").partition("=")
    with pytest.MonkeyPatch.context() as patch:
        for variable in [v for v in os.environ if v.startswith("SLURM_")]:
            patch.delenv(variable)
        patch.setenv(name, value)
        yield
        subprocess.run([LAB, "down"], timeout=600, check=False)
