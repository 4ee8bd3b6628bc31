"""The records of bin/soak as a table, and the page docs/results/reliability.md."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any

from tests.soak.deaths import FAULT
from tests.soak.faults import FAULTS, KILLS

Record = dict[str, Any]
PAGE = """# Reliability

<!-- written by bin/soak --page -->

`bin/soak` trains a small net with every scheme on 1 to 4 ranks, disturbs it at random, starts it again after each end,
and compares the last checkpoint bit by bit with that of an undisturbed run. It does so on one machine, over emulated
links that are cut and slowed (`--kind links`), and as jobs of a Slurm that are requeued (`--kind requeued`). The table
adds up the records in [soak/records.jsonl](soak/records.jsonl): {trials} trainings with {kills} kills in
{minutes:.0f} minutes.

{table}

{deaths}A checkpoint is lost if the newest one that was complete before a fault cannot be read after it. A training hangs if
it has not ended after five minutes. `late` faults came after the training had ended and are not counted.

The goal is 1,000 kills and two hours.

{failures}
"""
DEATHS = """Under ULFM {count} ranks were killed, and the others went on (`bin/soak --kind deaths`). Each of their steps is
compared with an oracle that loses the rank in that step. {flying} of them died while deliveries were in flight, or in
a run whose buckets set out during backward. From noticing a death to going on it took {median:.3g} s in the median,
{most:.3g} s at most, in {timed} trials; {timed_flying} of these had deliveries in flight or buckets.

"""


def read(records: Path) -> list[Record]:
    """Read the records; a last line that was cut off by a kill is skipped."""
    lines = records.read_text().splitlines(keepends=True) if records.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def kind(record: Record) -> str:
    """Which kind of trial a record is of; the first records do not say."""
    return str(record.get("kind", "kills"))


def failed(record: Record) -> bool:
    return bool(record["lost"] or record["differs"] or record["hangs"] or record["wrong"])


def why(record: Record) -> str:
    """Say in a line what was wrong with a record that failed."""
    seen = [
        *record["wrong"][:1],
        *(["other bits at its end"] if record["differs"] else []),
        *(["a checkpoint was lost"] if record["lost"] else []),
    ]
    return "; ".join(text.splitlines()[0][:70] for text in seen if text)


def table(records: list[Record]) -> str:
    """Return the records as a Markdown table: a row for each scheme and one for all."""
    faults = [*dict.fromkeys([*FAULTS, *total(records)])]
    head = ["scheme", "trainings", *faults, "late", "checkpoints lost", "ends that differ", "hangs", "other failures"]
    schemes = list(dict.fromkeys(record["scheme"] for record in records))
    rows = [row(scheme, [r for r in records if r["scheme"] == scheme], faults) for scheme in schemes]
    rows.append(row("all", records, faults))
    return "\n".join("| " + " | ".join(map(str, cells)) + " |" for cells in [head, ["---"] * len(head), *rows])


def row(name: str, records: list[Record], names: list[str]) -> list[str | int]:
    faults = total(records)
    differ, wrong = (sum(bool(r[key]) and not r["hangs"] for r in records) for key in ("differs", "wrong"))
    counts = [sum(r[key] for r in records) for key in ("late", "lost", "hangs")]
    return [name, len(records), *(faults[name] for name in names), counts[0], counts[1], differ, counts[2], wrong]


def total(records: Iterable[Record]) -> Counter[str]:
    return sum((Counter(record["faults"]) for record in records), Counter())


def deaths(records: list[Record]) -> str:
    """Say what became of ranks that died under ULFM; empty if none did."""
    seconds = [each for record in records for each in record.get("recovery", ())]
    if not seconds:
        return ""
    sound = [record for record in records if kind(record) == "deaths" and not failed(record)]
    flying = [record for record in sound if {"staleness", "overlap"} & set(record["plan"]["options"])]
    count, late = total(sound)[FAULT], total(flying)[FAULT]
    timed = [sum(bool(record["recovery"]) for record in some) for some in (sound, flying)]
    return DEATHS.format(
        count=count, flying=late, median=median(seconds), most=max(seconds), timed=timed[0], timed_flying=timed[1]
    )


def write(records: Path, target: Path) -> None:
    """Write the page."""
    found = read(records)
    faults, bad = total(found), [record for record in found if failed(record)]
    said = "\n".join(
        f"- {kind(r)}, seed {r['seed']}, trial {r['trial']}, {r['scheme']} on {r['ranks']} ranks: {why(r)}" for r in bad
    )
    text = PAGE.format(
        trials=len(found), kills=sum(faults[name] for name in KILLS), minutes=sum(r["seconds"] for r in found) / 60,
        table=table(found), deaths=deaths(found),
        failures=f"Trainings that failed:\n\n{said}" if bad else "No training failed.",
    )  # fmt: skip
    target.write_text(text)
