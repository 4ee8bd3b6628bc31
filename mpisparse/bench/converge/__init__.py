"""bench converge: how much of what dense exchange gains over one worker alone each case keeps, and for how many bytes.

Cases x learning rates x seeds on one workload. Validation data pick each case's learning rate, from a grid that grows until
the best is not at its edge; test data are reported. Every finished run is a file, so a bench that was killed goes on.
"""

from __future__ import annotations

import json

from mpisparse.bench.converge import stability
from mpisparse.bench.converge.plan import ConvergePlan, Record
from mpisparse.bench.converge.store import Store, write_whole
from mpisparse.bench.converge.summary import COLUMNS, markdown, summary
from mpisparse.bench.converge.work import Done, do_here, do_in_processes, do_on_ranks
from mpisparse.comm.exchange import Exchange
from mpisparse.comm.transport import end_job_on_uncaught_exception
from mpisparse.errors import ConfigurationError
from mpisparse.runtime.report import write as write_report
from mpisparse.runtime.table import show

RECORDS = "records.jsonl"
WORKERS = 4


def workers_here() -> int:
    """Return the number of workers unless one is given: the ranks under mpirun, else some virtual ones. Collective."""
    ranks = ranks_here()
    return ranks if ranks > 1 else WORKERS


def ranks_here() -> int:
    """Return the number of ranks of this job; collective."""
    exchange = Exchange()
    exchange.close()
    return exchange.size


def run(plan: ConvergePlan) -> int:
    """Do the runs that are missing, then print and write the table; collective under mpirun."""
    if ranks_here() > 1:
        return _run_on_ranks(plan)
    store = Store(plan)
    done = do_here(plan, store) if plan.jobs == 1 else do_in_processes(plan, store)
    _publish(plan, done)
    return 0


def _run_on_ranks(plan: ConvergePlan) -> int:
    end_job_on_uncaught_exception()
    exchange = Exchange()
    store, error = None, None
    try:
        if plan.workers != exchange.size or plan.jobs > 1:
            raise ConfigurationError(
                f"under mpirun the {exchange.size} ranks are the workers, one run at a time: leave out --workers and --jobs"
            )
        if exchange.rank == 0:
            store = Store(plan)
            store.read()
    except ConfigurationError as caught:
        error = caught
    exchange.raise_together(error)
    done = do_on_ranks(plan, store, exchange)
    if exchange.rank == 0:
        _publish(plan, done)
    exchange.close()
    return 0


def _publish(plan: ConvergePlan, done: Done) -> None:
    """Say what the runs say; write the records and the table, and a page with the pictures."""
    if plan.stability:
        records = stability.summary(plan, done)
        _write(plan, "stability", records, stability.COLUMNS, stability.markdown(records))
        return
    records = summary(plan, done)
    _write(plan, "converge", records, COLUMNS, markdown(records))
    page = write_report([plan.out / RECORDS], None, plan.out / "pictures")
    if not plan.as_json:
        print(f"pictures: {page}, {plan.out / 'pictures'}")


def _write(plan: ConvergePlan, bench: str, records: list[Record], columns: dict[str, str], table: str) -> None:
    """Print the table; write it and the records."""
    show(records, columns, as_json=plan.as_json)
    write_whole(plan.out / RECORDS, "".join(json.dumps({"bench": bench, **record}) + "\n" for record in records))
    write_whole(plan.out / "table.md", table)
    if not plan.as_json:
        settings = plan.settings
        print(
            f"{settings.model}, {plan.workers} workers x {settings.batch_size}, {settings.steps} steps; bytes received per "
            "parameter and step; errors are standard errors over seeds"
        )
        print(f"records: {plan.out / RECORDS}; table: {plan.out / 'table.md'}")
