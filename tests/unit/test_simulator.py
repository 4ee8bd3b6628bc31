"""Simulated workers, more than can really run, against plain NumPy; and the bytes of messages."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import Oracle, Settings

from mpisparse.bench.costs import Log, Machine, between
from mpisparse.bench.simulator import Accumulators, simulator
from mpisparse.bench.synthetic import Synthetic, worker_gradient
from mpisparse.select import selector

WORKERS = 20


def test_more_than_sixteen_workers_against_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selector, "SWEEP", 16)
    source = Synthetic(20_011, 3)
    virtual = simulator("exdyna", source, WORKERS, 0.02, accumulate="backward")
    oracle = Oracle(20_011, WORKERS, Settings(density=0.02, accumulate="backward"))
    for step in range(18):  # the 16th has held partitions
        expected = oracle.step([worker_gradient(source, worker, step) for worker in range(WORKERS)])
        done = virtual.step()
        assert np.array_equal(done.union, np.flatnonzero(expected.published)), step
        assert (done.threshold, done.borders) == (expected.threshold, expected.borders), step
        assert [done.workloads[r.rank] for r in done.regions] == list(expected.workloads), step


def test_thousands_of_workers_hold_the_density() -> None:
    virtual = simulator("exdyna", Synthetic(60_000, 4), 2048, 0.1)
    steps = [virtual.step() for _ in range(4)]
    assert all(abs(len(s.union) / s.k - 1) < 0.02 for s in steps[1:])
    assert all(np.array_equal(s.union, np.unique(s.union)) for s in steps), "exclusive"
    assert all(s.workloads.sum() == len(s.union) for s in steps)


def test_top_k_builds_up_with_the_workers() -> None:
    ratios = [len(simulator("topk", Synthetic(5_000, 8), size, 0.01).step().union) / 50 for size in (1, 2, 8)]
    assert ratios[0] == 1.0
    assert 1.5 < ratios[1] <= 2.0
    assert 4.0 < ratios[2] <= 8.0


def test_accumulators_read_again_are_those_kept() -> None:
    source = Synthetic(3_000, 2)
    read, kept = Accumulators(source, 5), Accumulators(source, 5)
    kept.keep()
    for step in range(5):
        for acc in (read, kept):
            acc.begin()
        for worker in range(5):
            assert np.array_equal(read.read(worker, 700, 2_500), kept.read(worker, 700, 2_500))
        for acc in (read, kept):
            acc.sent(np.arange(step, 3_000, 7))


def test_bytes_of_messages() -> None:
    log = Log(3)
    log.add("allgather", 10)
    log.add("allreduce", 30)
    log.add("allgatherv", [1, 2, 4])
    log.add("alltoallv", [100, 200, 400])
    assert log.sent().tolist() == [20 + 40 + 2 + 600, 20 + 40 + 4 + 500, 20 + 40 + 8 + 300]
    assert log.received().tolist() == [20 + 40 + 6 + 200, 20 + 40 + 5 + 400, 20 + 40 + 3 + 800]


def test_what_a_machine_takes() -> None:
    machine = Machine({2: 1.0}, {2: 10.0}, {2: 5.0})
    log = Log(4)
    log.add("allgather", 10)
    assert machine.seconds(log, 14.0) == pytest.approx(14 + 2 * 1.0 + 30 / 10)
    log.add("allreduce", 40)
    assert machine.seconds(log, 14.0) == pytest.approx(19 + 4 * 1.0 + 60 / 5)
    crowded = Machine({2: 1.0}, {2: 10.0}, {2: 5.0}, cores=2)
    assert crowded.seconds(log, 14.0) == pytest.approx(35 + 14)
    assert Machine({1: 1.0}, {1: 1.0}, {1: 1.0}).seconds(Log(1), 2.0) == 2.0
    assert between({2: 1.0, 8: 4.0}, 4) == pytest.approx(2.0)
    assert between({2: 1.0, 8: 4.0}, 100) == 4.0
