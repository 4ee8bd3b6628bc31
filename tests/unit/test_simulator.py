"""Simulated workers, more than can really run, against plain NumPy; and the bytes of messages."""

from __future__ import annotations

import numpy as np
import pytest
from oracle import Oracle, Settings

from mpisparse.comm.regions import Region, even_spans
from mpisparse.plan.costs import Log, Machine, Nodes, between, overlapped
from mpisparse.plan.simulator import simulator
from mpisparse.plan.synthetic import Synthetic, worker_gradient
from mpisparse.plan.virtual_search import Accumulators
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


def test_buckets_wait_for_each_other_and_for_their_gradients() -> None:
    assert overlapped([1.0, 2.0, 3.0], [0.5, 0.5, 0.5], 3.0) == 3.5, "the last bucket sticks out"
    assert overlapped([1.0, 2.0, 3.0], [2.0, 2.0, 2.0], 3.0) == 7.0, "the wire is the bound"
    assert overlapped([], [], 3.0) == 3.0
    log = Log(2)
    log.add_reduction([100, 200])
    assert log.sent().tolist() == [200 + 100, 100 + 200]
    nodes = Nodes(2, Machine({2: 1.0}, {2: 100.0}, {2: 1.0}), inside=0.5)
    assert nodes.seconds(log, 10, 3.0) == pytest.approx(3 + 2 + 2 + 2 + 5)


def test_a_thousand_ranks_sum_and_receive_as_much_as_each_other() -> None:
    """Of 100 elements a rank, the busiest has at most 1.3 times the mean, although it selects more than that."""
    size, n = 1024, 204_800
    virtual = simulator("exdyna", Synthetic(n, 4), size, 100 * size / n)
    steps = [virtual.step() for _ in range(2)]
    assert max(step.workloads.max() / step.workloads.mean() for step in steps) > 1.3, "nothing to balance"
    for step in steps:
        assert len(step.union) >= 99 * size
        sums = next(message.nbytes for message in step.log.messages if message.kind == "alltoallv")
        for load in (sums, step.log.received()):
            assert load.max() <= 1.3 * load.mean()


def test_sums_are_balanced_where_selection_is_not() -> None:
    regions = [Region((p + 5) % 1024, 0, 0) for p in range(1024)]
    sums = sorted(even_spans(100 * 1024 + 7, regions))
    assert [b for _, b in sums[:-1]] == [a for a, _ in sums[1:]]
    assert (sums[0][0], sums[-1][1]) == (0, 100 * 1024 + 7)
    assert {b - a for a, b in sums} == {100, 101}
    virtual = simulator("exdyna", Synthetic(20_000, 4), 64, 0.32)
    for step in [virtual.step() for _ in range(3)]:
        received = step.log.received() - step.log.received().min()
        assert received.max() <= 0.3 * 4 * 63 * len(step.union) / 64, "bytes beyond those of the idlest owner"
