"""Trainings over emulated links that are cut and slowed at random: bin/soak --kind links. The bits must not change."""

from __future__ import annotations

import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from mpisparse.checkpoint import store
from tests.soak.ends import digests
from tests.soak.job import PATIENCE, ROOT, HangError, last_step
from tests.soak.kills import SCHEMES, options_of

NETLAB = str(ROOT / "bin" / "netlab")
STEPS, RATE = 150, "200mbit"
CUT, SLOW = "cut a link", "slow a link"


class Links:
    """Trials on one emulated cluster each."""

    def __init__(self, place: Path, seed: int) -> None:
        self.out, self.log, self.seed = place / "run", place / "log", seed

    def close(self) -> None:
        """Remove what an interrupted trial has left."""
        netlab("down")

    def trial(self, number: int) -> dict[str, Any]:
        """Run one trial; return its record. Its number and the seed decide what it draws."""
        draw = random.Random(f"{self.seed} links {number}")
        scheme, ranks = SCHEMES[number % len(SCHEMES)], draw.choice((2, 3))
        options = [*options_of(scheme, draw, STEPS)[:-2], "--timeout", "120"]
        record: dict[str, Any] = {
            "kind": "links", "seed": self.seed, "trial": number, "scheme": scheme, "ranks": ranks, "faults": Counter(),
            "late": 0, "lost": 0, "differs": [], "hangs": 0, "wrong": [],
        }  # fmt: skip
        started = time.monotonic()
        netlab("up", str(ranks), RATE)
        try:
            expected = self.end(record, self.begin(ranks, options))
            job = self.begin(ranks, options)
            while job.poll() is None:
                self.disturb(record, job, ranks, draw)
            ended = self.end(record, job)
            record["differs"] = sorted(part for part in expected.keys() | ended if expected.get(part) != ended.get(part))
        except HangError as hang:
            record["hangs"], record["wrong"] = 1, [str(hang)]
        finally:
            netlab("down")
        record["seconds"] = round(time.monotonic() - started, 1)
        return record

    def begin(self, ranks: int, options: list[str]) -> subprocess.Popen[bytes]:
        """Start the run anew."""
        shutil.rmtree(self.out, ignore_errors=True)
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests")])
        command = [NETLAB, "run", str(ranks), "-x", f"PYTHONPATH={path}", sys.executable, "-m", "mpisparse", "train"]
        with open(self.log, "w") as sink:
            programs = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # netlab takes mpirun from there
            environment = {**os.environ, "PATH": programs, "MPISPARSE_PROGRESS": "plain"}
            return subprocess.Popen(
                [*command, "--out", str(self.out), *options], stdout=sink, stderr=sink, stdin=subprocess.DEVNULL,
                cwd=ROOT, env=environment,
            )  # fmt: skip

    def disturb(self, record: dict[str, Any], job: subprocess.Popen[bytes], ranks: int, draw: random.Random) -> None:
        """Once the run has done some more steps, cut or slow the link of a host for a while."""
        step, until = last_step(self.out) + draw.randint(1, 20), time.monotonic() + PATIENCE
        while last_step(self.out) < step:
            if job.poll() is not None:
                return
            if time.monotonic() > until:
                job.terminate()
                raise HangError(f"no further step in {PATIENCE:g} s")
            time.sleep(0.005)
        host = f"h{draw.randint(1, ranks)}"
        if draw.random() < 0.5:
            netlab("cut", host, f"{draw.uniform(0.05, 2.0):.2f}")
            record["faults"][CUT] += 1
        else:
            netlab("rate", draw.choice(("500kbit", "2mbit", "20mbit")), host)
            time.sleep(draw.uniform(0.1, 1.0))
            netlab("rate", RATE, host)
            record["faults"][SLOW] += 1

    def end(self, record: dict[str, Any], job: subprocess.Popen[bytes]) -> dict[str, str]:
        """Wait for the end of a run; return the digests of what it has become."""
        try:
            code = job.wait(PATIENCE)
        except subprocess.TimeoutExpired as hang:
            job.terminate()
            raise HangError(f"not ended after {hang.timeout:g} s") from hang
        if code:
            record["wrong"].append(f"exit code {code}: {self.log.read_text()[-600:]}")
        found = store.found(self.out / "checkpoints")
        return digests(found[0]) if found else {}


def netlab(*words: str) -> None:
    """Run a command of bin/netlab; ends bin/soak if that cannot be."""
    done = subprocess.run([NETLAB, *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"bin/soak: {' '.join(words)}: {done.stderr.strip()}")
