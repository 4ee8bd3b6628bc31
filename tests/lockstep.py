"""Plugin for `mpirun -n N python -m pytest --with-mpi`: every rank runs every test, and all agree on its outcome.

pytest-mpi has the marks and says which tests run. This adds what it leaves out. A test, its setup or its teardown has failed
if it failed on any rank, so that no rank goes on to the next test alone. Rank 0 reports for all; the other ranks are silent.
Ranks that wait for a rank that failed are ended, and so is a test that hangs.
"""

from __future__ import annotations

import faulthandler
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

TIMEOUT = float(os.environ.get("MPISPARSE_TEST_TIMEOUT", "3600"))  # seconds for a test that takes a few; 424 seen at load 10
PATIENCE = float(os.environ.get("MPISPARSE_TEST_PATIENCE", "60"))  # seconds that a rank that failed waits for the others
OUTCOMES = ("passed", "skipped", "failed")


class Lockstep:
    """Keeps the ranks of one pytest run together."""

    def __init__(self, config: pytest.Config) -> None:
        self.comm = MPI.COMM_WORLD.Dup()  # what a failed test left unreceived stays in its own communicator
        self.stderr = os.fdopen(os.dup(2), "w")  # pytest captures the first one while tests run
        self.chosen: str | None = config.getoption("basetemp")
        self.scratch = Path(self.comm.bcast(self._make_scratch() if self.comm.rank == 0 else None))
        # A directory of its own for each rank: pytest on one rank clears away what another rank has just made.
        config.option.basetemp = str(self.scratch / str(self.comm.rank))
        if self.comm.rank > 0:
            config.pluginmanager.set_blocked("terminalreporter")
            config.workerinput = {"workerid": f"rank{self.comm.rank}"}  # so that pytest writes no cache and no junit.xml

    def _make_scratch(self) -> str:
        if self.chosen is None:
            return tempfile.mkdtemp(prefix="mpisparse-tests-")
        Path(self.chosen).mkdir(exist_ok=True)
        return self.chosen

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        """Go on only with the same tests on all ranks. Collective."""
        found = self.comm.allgather(([item.nodeid for item in session.items], session.testsfailed))
        if any(other != found[0] for other in found):
            counts = ", ".join(f"rank {rank}: {len(ids)} tests, {errors} errors" for rank, (ids, errors) in enumerate(found))
            pytest.exit(f"the ranks collected different tests ({counts})", returncode=pytest.ExitCode.INTERNAL_ERROR)

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self) -> Iterator[None]:
        """End the job if a test hangs, and show where."""
        faulthandler.dump_traceback_later(TIMEOUT, exit=True, file=self.stderr)
        try:
            return (yield)
        finally:
            faulthandler.cancel_dump_traceback_later()

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item) -> Iterator[None]:
        """Agree on the outcome of a setup, a test or a teardown. Collective."""
        report: Any = yield
        mine = OUTCOMES.index(report.outcome)
        worst, best = self._extremes(mine, report)
        if worst == best and report.outcome != "failed":
            return report
        texts = self.comm.allgather((report.outcome, text_of(report)))
        others = [(rank, *told) for rank, told in enumerate(texts) if rank != self.comm.rank]
        if report.outcome != "failed":
            what = ", ".join(f"{outcome} on rank {rank}" for rank, (outcome, _) in enumerate(texts))
            report.outcome, report.longrepr = "failed", f"{report.when}: {what}"
        report.sections += [(f"rank {rank}", text) for rank, outcome, text in others if outcome != "passed"]
        return report

    def _extremes(self, outcome: int, report: pytest.TestReport) -> tuple[int, int]:
        """The worst and the best outcome over ranks. Collective; ends the job if the others do not come after a failure.

        Sleeps between polls: with more ranks than cores, those that still run the test need the cores.
        """
        extremes = np.array([outcome, -outcome], dtype=np.int64)
        request = self.comm.Iallreduce(MPI.IN_PLACE, extremes, MPI.MAX)
        since = time.monotonic()
        while not request.Test():
            if outcome == OUTCOMES.index("failed") and time.monotonic() - since > PATIENCE:
                self._abort(report)
            time.sleep(0.0002)
        return int(extremes[0]), -int(extremes[1])

    def _abort(self, report: pytest.TestReport) -> None:
        """Show what failed here and end all ranks."""
        print(
            f"\nr{self.comm.rank} | {report.nodeid} failed on this rank, and {PATIENCE:g} s later it had not ended on the"
            f" others, which may wait for this one: ending all ranks\n{text_of(report)}",
            file=self.stderr, flush=True,
        )  # fmt: skip
        self.comm.Abort(1)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """All ranks exit alike. Collective."""
        session.exitstatus = self.comm.allreduce(int(session.exitstatus), MPI.MAX)
        if self.comm.rank == 0 and self.chosen is None:
            if session.exitstatus == pytest.ExitCode.OK:
                shutil.rmtree(self.scratch, ignore_errors=True)
            else:
                print(f"\ntemporary directories are kept in {self.scratch}", file=self.stderr, flush=True)


def text_of(report: pytest.TestReport) -> str:
    """What a report has to say, with the output that was captured."""
    return "\n".join([report.longreprtext, *(f"--- {name}\n{text}" for name, text in report.sections)])
