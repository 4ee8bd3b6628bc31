"""Rounds in which ranks die under ULFM and the others go on: bin/soak --kind deaths."""

from __future__ import annotations

import random
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

from mpisparse import names
from tests.soak.job import HERE, Nursery
from tests.survival import oracle

STEPS = 8
SPARSE = {"density": 0.02}
BUCKETS = {"overlap": True, "bucket_mb": 0.004}  # three of them
OPTIONS: dict[str, list[dict[str, Any]]] = {  # of the schemes whose ranks may die
    "exdyna": [SPARSE, {**SPARSE, "codec": "int8"}, {**SPARSE, "accumulate": "backward"}, {**SPARSE, "masks": "own"}],
    "momentum": [SPARSE],
    "dense": [{}, {"codec": "int4"}],
    "drift": [
        {"density": 0.05}, {"density": 0.05, "codec": "fp32"}, {"density": 0.05, "by": "groups"}, {"density": 1.0},
        {"density": 1.0, "every": 2},
    ],
    "diloco": [{"every": 1}, {"every": 1, "codec": "int8"}],
    "sparseloco": [{"every": 1}],
    "demo": [{"density": 0.05}],
    "topk": [SPARSE, {**SPARSE, "codec": "int8"}, {**SPARSE, "masks": "own"}],
    "cltk": [SPARSE],
    "randomk": [SPARSE],
    "threshold": [SPARSE],
    "sidco": [SPARSE],
    "dgc": [SPARSE],
}  # fmt: skip
FLYING: list[tuple[str, dict[str, Any]]] = [  # deliveries in flight, and buckets that set out during backward
    ("exdyna", {**SPARSE, "staleness": 1}), ("exdyna", {**SPARSE, "staleness": 1, "codec": "int8"}),
    ("exdyna", {**SPARSE, "staleness": 1, "codec": "momentum-int8"}),
    ("exdyna", {**SPARSE, "staleness": 1, "scorer": "average"}), ("exdyna", {**SPARSE, "staleness": 2, "masks": "own"}),
    ("exdyna", {**SPARSE, **BUCKETS}), ("exdyna", {**SPARSE, **BUCKETS, "codec": "int8"}), ("dense", BUCKETS),
    ("dense", {**BUCKETS, "codec": "int4"}), ("drift", {"density": 0.05, "staleness": 1}),
    ("drift", {"density": 0.05, "staleness": 1, "every": 2}), ("drift", {"density": 1.0, "staleness": 1}),
    ("drift", {"density": 1.0, "staleness": 1, "every": 2}),
]  # fmt: skip
MIRRORED = [("exdyna", 0), ("topk", 0), ("drift", 1)]  # scheme and which of its options: what is sent is sent in full
FAULT = "die under ULFM"
FAST = {"OMPI_MCA_pml": "ob1", "OMPI_MCA_btl": "self,sm"}  # MPI starts in a tenth of the time


class Deaths:
    """Trials of tests/survival: each has its own directory, which is removed.

    A death that was to come some milliseconds later is late if the rank had done all steps by then.
    """

    def __init__(self, place: Path, seed: int) -> None:
        self.place, self.seed = place, seed
        self.nursery = Nursery(place)
        self.job = ("-I", "-S", HERE / "warm.py", self.nursery.socket, "tests.survival.job")

    def close(self) -> None:
        """End the process that forks ranks."""
        self.nursery.close()

    def trial(self, number: int) -> dict[str, Any]:
        """Run one trial; return its record. Its number and the seed decide what it draws."""
        plan, ranks = drawn(random.Random(f"{self.seed} deaths {number}"), number)
        record: dict[str, Any] = {
            "kind": "deaths", "seed": self.seed, "trial": number, "scheme": plan["scheme"], "ranks": ranks,
            "faults": {FAULT: len(plan["deaths"])}, "late": 0, "lost": 0, "differs": [], "hangs": 0, "wrong": [],
            "plan": plan, "recovery": [],
        }  # fmt: skip
        started, directory, said = time.monotonic(), self.place / "deaths", ""
        directory.mkdir()
        try:
            done = oracle.started(directory, ranks, plan, self.job, **FAST)
            said = done.stderr[-1200:]
            if done.returncode != 0:
                record["wrong"].append(f"exit code {done.returncode}")
            ends = oracle.ends(directory)
            late = [death for death in plan["deaths"] if death["phase"].startswith("moment") and death["rank"] in ends]
            record["late"], record["faults"] = len(late), {FAULT: len(plan["deaths"]) - len(late)}
            oracle.check(directory, ranks, {**plan, "deaths": [death for death in plan["deaths"] if death not in late]})
            told = zip(*(end["told"] for end in ends.values()), strict=True)
            record["recovery"] = [round(max(each["seconds"] for each in one), 4) for one in told]
        except subprocess.TimeoutExpired as hang:
            record["hangs"], record["wrong"] = 1, [f"not ended after {hang.timeout:g} s"]
        except Exception as error:
            record["wrong"].append(f"{type(error).__name__}: {error}")
        finally:
            shutil.rmtree(directory)
        record["wrong"] += [said] if record["wrong"] else []
        record["seconds"] = round(time.monotonic() - started, 1)
        return record


def drawn(draw: random.Random, number: int) -> tuple[dict[str, Any], int]:
    """Draw a plan of tests/survival/job.py and the number of ranks."""
    ranks, steps = draw.choice((3, 4)), range(2, STEPS - 1)
    if number % 5 == 4:
        scheme, which = draw.choice(MIRRORED)
        plan = {"scheme": scheme, "options": OPTIONS[scheme][which], "mirror": draw.choice((1, 2, 3))}
        deaths = [{"rank": draw.randrange(ranks), "step": draw.choice(steps), "phase": phase(draw, at_random=False)}]
    else:
        scheme = [*OPTIONS][number % len(OPTIONS)]
        options = draw.choice(OPTIONS[scheme])
        if number % 5 in (1, 3):
            scheme, options = draw.choice(FLYING)
        plan = {"scheme": scheme, "options": options, "apart": draw.random() < 0.5}
        dying = draw.sample(range(ranks), draw.choice((1, ranks - 1, ranks - 1)))
        deaths = [{"rank": rank, "step": draw.choice(steps), "phase": phase(draw)} for rank in dying]
    assert scheme in names.SCHEMES
    return {**plan, "steps": STEPS, "deaths": deaths}, ranks


def phase(draw: random.Random, *, at_random: bool = True) -> str:
    """Draw when in its step a rank dies: before a call of MPI, at a border of the step, or some milliseconds later."""
    kinds = ["call", "call", "call", "border", *(["moment"] if at_random else [])]
    kind = draw.choice(kinds)
    if kind == "call":
        return f"call {draw.randint(1, 8)}"
    if kind == "moment":
        return f"moment {draw.uniform(0.0, 20.0):.2f}"
    return draw.choice(["roll call", "before commit", "after commit", "backward", "exception"])
