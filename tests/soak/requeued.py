"""Jobs of a real Slurm that are requeued and preempted at random moments: bin/soak --kind requeued."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from tests.slurm import test_slurm_jobs as jobs
from tests.soak.job import ROOT
from tests.soak.kills import NO_DENSITY, OF_SCHEME, SCHEMES

LAB = str(ROOT / "bin" / "slurmlab")
FAULTS = {
    "requeue": jobs.requeue, "preempt": jobs.preempt, "signal before the limit": jobs.usr1,
    "take a node down": jobs.node_down,
}  # fmt: skip


class Requeued:
    """Trials on one Slurm of virtual nodes."""

    def __init__(self, place: Path, seed: int) -> None:
        self.place, self.seed = place, seed
        started = subprocess.run([LAB, "up", "4", "64"], capture_output=True, text=True)
        if started.returncode:
            sys.exit(f"bin/soak: {started.stderr.strip()}")
        name, _, value = started.stdout.strip().removeprefix("export ").partition("=")
        os.environ[name] = value

    def close(self) -> None:
        """Stop the Slurm and its jobs."""
        subprocess.run([LAB, "down"])

    def trial(self, number: int) -> dict[str, Any]:
        """Run one trial; return its record. Its number and the seed decide what it draws."""
        draw = random.Random(f"{self.seed} requeued {number}")
        schemes = [name for name in SCHEMES if name not in NO_DENSITY]  # the script has a density
        scheme, ranks = schemes[number % len(schemes)], draw.choice((1, 2))
        record: dict[str, Any] = {
            "kind": "requeued", "seed": self.seed, "trial": number, "scheme": scheme, "ranks": 2 * ranks,
            "faults": Counter(), "late": 0, "lost": 0, "differs": [], "hangs": 0, "wrong": [],
        }  # fmt: skip
        started, home = time.monotonic(), self.place / str(number)
        home.mkdir()
        try:
            site = jobs.make_site(home, "openmpi")
            script, settings = site.fill_in("cpu-openmpi"), ("--scheme", scheme, *OF_SCHEME.get(scheme, ()))
            plain = site.submit(script, *settings, nodes=2, ranks=ranks, out="plain")
            assert plain.wait() == ("COMPLETED", 0), plain.told()
            job = site.submit(script, *settings, nodes=2, ranks=ranks, out="disturbed", TINY_SLOW="0.08")
            job.wait_for_step(draw.randint(2, jobs.STEPS - 15))
            name = draw.choice([*FAULTS])
            FAULTS[name](job)
            record["faults"][name] += 1
            assert job.wait() == ("COMPLETED", 0), job.told()
            assert job.restarts == 1, job.told()
            ended, expected = jobs.arrays(job.out), jobs.arrays(plain.out)
            record["differs"] = sorted(part for part in expected.keys() | ended if expected.get(part) != ended.get(part))
        except Exception as error:
            record["wrong"].append(f"{type(error).__name__}: {error}"[-1200:])
            record["hangs"] = int(str(error).startswith("waited for"))
            jobs.slurm("scancel", "--user=root")
        record["seconds"] = round(time.monotonic() - started, 1)
        return record
