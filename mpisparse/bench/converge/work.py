"""Do the runs of a plan: in this process, in several side by side, or on the ranks of an MPI job."""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

import torch

from mpisparse.bench.converge.cases import ALONE
from mpisparse.bench.converge.plan import ConvergePlan, Record, Run
from mpisparse.bench.converge.store import Store
from mpisparse.bench.converge.training import train
from mpisparse.comm.exchange import Exchange
from mpisparse.comm.virtual import run_virtual
from mpisparse.runtime.report.units import seconds
from mpisparse.runtime.settings import import_modules

Done = dict[tuple[str, float, int], Record]


def perform(run: Run) -> Record:
    """Do one run on virtual workers."""
    import_modules(run.settings.imports)
    torch.set_num_threads(1)  # workers take turns, and jobs share the cores
    return run_virtual(run.workers, lambda comm: train(run, comm))[0]


def perform_on_ranks(run: Run, exchange: Exchange) -> Record:
    """Do one run on the ranks of the job; one worker alone is rank 0, while the others wait. Collective."""
    torch.set_num_threads(1)
    if run.case.name != ALONE:
        return train(run, exchange.comm)
    record: Record = of_rank_0(exchange, perform(run) if exchange.rank == 0 else None)
    return record


def of_rank_0(exchange: Exchange, value: Any) -> Any:
    """Return rank 0's plain value on all ranks; collective."""
    return json.loads(exchange.gather_texts(json.dumps(value if exchange.rank == 0 else None))[0])


def do_here(plan: ConvergePlan, store: Store) -> Done:
    """Do what is missing, one run after the other."""
    done, progress = store.read(), Progress(plan)
    while missing := plan.missing(done):
        progress.note(missing[0], perform(missing[0]), done, store)
    return done


def do_on_ranks(plan: ConvergePlan, store: Store | None, exchange: Exchange) -> Done:
    """Do what is missing on the ranks of the job, of which rank 0 has the store; collective."""
    records = of_rank_0(exchange, list(store.read().values()) if store is not None else None)
    done, progress = {(r["case"], r["lr"], r["seed"]): r for r in records}, Progress(plan)
    while missing := plan.missing(done):
        progress.note(missing[0], perform_on_ranks(missing[0], exchange), done, store)
    return done


def do_in_processes(plan: ConvergePlan, store: Store) -> Done:
    """Do what is missing in as many processes as there are jobs."""
    done, progress = store.read(), Progress(plan)
    under_way: dict[Future[Record], Run] = {}
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(plan.jobs, spawn, _end_with, (os.getpid(),)) as pool:
        try:
            while True:
                for run in _free(plan, done, under_way):
                    under_way[pool.submit(perform, run)] = run
                if not under_way:
                    return done
                for future in wait(under_way, return_when=FIRST_COMPLETED).done:
                    progress.note(under_way.pop(future), future.result(), done, store)
        except BaseException:
            for child in multiprocessing.active_children():  # their runs are lost anyway, and may take hours
                child.terminate()
            raise


def _end_with(parent: int) -> None:
    """End this process when the one that started it is gone, however that ended."""

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _free(plan: ConvergePlan, done: Done, under_way: dict[Future[Record], Run]) -> Iterator[Run]:
    """Yield the next missing runs, as many as there are free processes."""
    taken = {run.key for run in under_way.values()}
    free = plan.jobs - len(under_way)
    yield from [run for run in plan.missing(done) if run.key not in taken][:free]


class Progress:
    """Reports each finished run with an estimate of the time that is left."""

    def __init__(self, plan: ConvergePlan) -> None:
        self.plan, self.began, self.finished = plan, time.monotonic(), 0  # in workers: a run takes as long as it has workers

    def note(self, run: Run, record: Record, done: Done, store: Store | None) -> None:
        """Enter a finished run; where there is a store, write it and print a line."""
        done[run.key] = record
        self.finished += run.workers
        if store is None:
            return
        store.add(run, record)
        missing = self.plan.missing(done)  # more may come, if a best learning rate is at the edge of its grid
        left = len(missing)
        estimate = (time.monotonic() - self.began) / self.finished * sum(each.workers for each in missing)
        ending = "diverged" if record["diverged"] else f"validation {record['validation']:.4f}"
        print(
            f"{run}: {ending}, {record['bytes']:.4g} bytes, {seconds(record['seconds'])}; "
            f"{len(done)} runs done, {left} or more to do" + (f", about {seconds(estimate)}" if left else ""),
            file=sys.stderr, flush=True,
        )  # fmt: skip
