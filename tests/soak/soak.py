"""Disturb trainings at random; bin/soak runs it.

A trial is a training of some steps by a scheme on some ranks, disturbed several times and compared with an undisturbed one,
or with what an oracle says. Each is a line of the records, which add up over runs. Kinds of trials have modules of
their own; each has trials of its own numbers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from tests.soak import page
from tests.soak.deaths import Deaths
from tests.soak.job import ROOT
from tests.soak.kills import Kills
from tests.soak.links import Links
from tests.soak.requeued import Requeued

REPORT = ROOT / "docs" / "results" / "reliability.md"
RECORDS = REPORT.parent / "soak" / "records.jsonl"


class Kind(Protocol):
    """One kind of trials. The number of a trial and the seed decide what it draws."""

    def trial(self, number: int) -> dict[str, Any]: ...
    def close(self) -> None: ...


KINDS: dict[str, Callable[[Path, int], Kind]] = {
    "kills": Kills, "deaths": Deaths, "links": Links, "requeued": Requeued,
}  # fmt: skip


def main() -> int:
    parser = argparse.ArgumentParser(prog="bin/soak", description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=5.0, help="start no trial after so many minutes (default 5)")
    parser.add_argument("--seed", type=int, default=0, help="what is drawn; a seed goes on where its records end")
    parser.add_argument(
        "--kind", choices=[*KINDS], default="kills",
        help="kills: ranks, jobs and disks (default); deaths: of ranks under ULFM; links: cut and slowed (bin/netlab); "
        "requeued: jobs of a Slurm (bin/slurmlab)",
    )  # fmt: skip
    parser.add_argument(
        "--records", type=Path, default=RECORDS, help="JSON lines to add to (default: those of docs/results)"
    )
    parser.add_argument("--table", action="store_true", help="run nothing: print the table of the records")
    parser.add_argument("--page", action="store_true", help="run nothing: write docs/results/reliability.md")
    args = parser.parse_args()
    if args.page:
        page.write(args.records, REPORT if args.records == RECORDS else args.records.with_suffix(".md"))
    failed = 0 if args.table or args.page else run(args)
    print(page.table(page.read(args.records)))
    return int(failed > 0)


def run(args: argparse.Namespace) -> int:
    """Run trials and add their records; return how many failed."""
    found = page.read(args.records)
    done = [record["trial"] for record in found if (record["seed"], page.kind(record)) == (args.seed, args.kind)]
    number, failed = max(done, default=-1) + 1, 0
    with tempfile.TemporaryDirectory(prefix="mpisparse-soak-") as place:
        soak = KINDS[args.kind](Path(place), args.seed)
        until = time.monotonic() + 60 * args.minutes
        try:
            while time.monotonic() < until:
                record = soak.trial(number)
                with open(args.records, "a") as file:
                    file.write(json.dumps(record) + "\n")
                if page.failed(record):
                    failed += 1
                    print(f"soak | FAILED {json.dumps(record)}", flush=True)
                number += 1
        finally:
            soak.close()
    return failed


if __name__ == "__main__":
    sys.exit(main())
