"""Trainings that are killed and disturbed at random, started again after each end, and compared with undisturbed ones."""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from mpisparse import names
from mpisparse.checkpoint import store
from tests.soak.ends import digests
from tests.soak.faults import FAULTS, KILLS, MissedError, mounted
from tests.soak.job import ROOT, HangError, Job, Nursery

STEPS = 36
SCHEMES = [name for name in names.SCHEMES if name != "auto"]  # which chooses by times: no two runs need be alike
RANKS = (1, 2, 3, 4)
OF_SCHEME = {
    "predictive": ("--option", "history=3", "--option", "validate_every=6", "--option", "publish_after=2"),
    "threshold": ("--option", "threshold=0.01"),
    "dgc": ("--option", "warm_up=5"),
    "diloco": ("--option", "every=4"),
    "sparseloco": ("--option", "every=4"),
}
NO_DENSITY = ("dense", "threshold", "diloco")


class Kills:
    """Trials with one nursery, on a file system of their own that can be filled."""

    def __init__(self, place: Path, seed: int) -> None:
        self.place, self.seed = place, seed
        self.disk = place / "disk"
        self.small = mounted(self.disk, "48m")
        if not self.small:
            print("soak | cannot mount a small tmpfs here: the disk is never filled", file=sys.stderr)
        self.nursery = Nursery(place)
        self.references = ROOT / "build" / "soak" / source_digest()
        self.references.mkdir(parents=True, exist_ok=True)

    def close(self) -> None:
        """End all processes and unmount."""
        self.nursery.close()
        if self.small:
            subprocess.run(["umount", "--lazy", self.disk], check=True)

    def trial(self, number: int) -> dict[str, Any]:
        """Run one trial; return its record. Its number and the seed decide what it draws."""
        draw = random.Random(f"{self.seed} {number}")
        scheme = SCHEMES[number % len(SCHEMES)]
        ranks = draw.choice(RANKS)
        options = options_of(scheme, draw)
        expected = self.reference(ranks, options)
        record: dict[str, Any] = {
            "kind": "kills", "seed": self.seed, "trial": number, "scheme": scheme, "ranks": ranks, "faults": Counter(),
            "late": 0, "lost": 0, "differs": [], "hangs": 0, "wrong": [],
        }  # fmt: skip
        started = time.monotonic()
        out = self.fresh()
        options = [*options, *(["--background"] if draw.random() < 0.5 else [])]
        try:
            for _ in range(draw.randint(4, 9)):
                if newest_step(out) == STEPS:
                    break
                self.disturb(record, out, ranks, options, draw)
            self.end(record, Job(self.nursery, out, ranks, options))
            ended = digests(store.found(out / "checkpoints")[0])
            record["differs"] = sorted(part for part in expected.keys() | ended if expected.get(part) != ended.get(part))
        except HangError as hang:
            record["hangs"], record["wrong"] = 1, [str(hang)]
        except Exception as error:
            record["wrong"].append(f"{type(error).__name__}: {error}")
        record["seconds"] = round(time.monotonic() - started, 1)
        return record

    def disturb(self, record: dict[str, Any], out: Path, ranks: int, options: list[str], draw: random.Random) -> None:
        """Start the run, disturb it once, wait for its end, and look whether a checkpoint was lost."""
        weights = {name: weight for name, (_, weight) in FAULTS.items() if self.small or name != "fill the disk"}
        (name,) = draw.choices([*weights], [*weights.values()])
        job = Job(self.nursery, out, ranks, options)
        try:
            fault, _ = FAULTS[name]
            ends = fault(job, draw)
        except (MissedError, ProcessLookupError):
            record["late"] += 1
            self.end(record, job)
            return
        before = newest_whole(out) if not job.damaged else 0
        code = job.wait()
        if code == 0 and name in KILLS:
            record["late"] += 1  # the ranks had finished and were about to end
            return
        record["faults"][name] += 1
        if newest_step(out) == STEPS and code == 0:
            return
        if not ends(code):
            record["wrong"].append(f"{name}: exit code {code}: {job.log.read_text()[-600:]}")
        whole = newest_whole(out)
        if whole < before or (job.damaged and not whole):
            record["lost"] += 1

    def end(self, record: dict[str, Any], job: Job) -> None:
        code = job.wait()
        if code:
            record["wrong"].append(f"undisturbed, exit code {code}: {job.log.read_text()[-600:]}")

    def fresh(self) -> Path:
        for path in self.disk.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        return self.disk / "run"

    def reference(self, ranks: int, options: list[str]) -> dict[str, str]:
        """Return the digests of an undisturbed run that writes only its last checkpoint, computed once."""
        kept = self.references / hashlib.sha256(repr((ranks, options)).encode()).hexdigest()[:20]
        if not kept.exists():
            out = self.fresh()
            plain = options[: options.index("--checkpoint-every")]
            job = Job(self.nursery, out, ranks, plain)
            if job.wait():
                sys.exit(f"bin/soak: an undisturbed run failed: {' '.join(plain)}\n{job.log.read_text()}")
            kept.write_text(json.dumps(digests(store.found(out / "checkpoints")[0])))
        found: dict[str, str] = json.loads(kept.read_text())
        return found


def options_of(scheme: str, draw: random.Random, steps: int = STEPS) -> list[str]:
    """Return the settings of a trial; those of its checkpoints come last."""
    options = ["--model", "tiny:model", "--data", "tiny:data", "--batch-size", "4", "--scheme", scheme]
    options += ["--steps", str(steps), "--seed", str(draw.randrange(2)), *OF_SCHEME.get(scheme, ())]
    if scheme not in NO_DENSITY:
        options += ["--density", "0.05"]
    codecs = names.SCHEMES[scheme]().codecs()
    if codecs:
        options += ["--codec", draw.choice(sorted(set(codecs) & {"fp32", "int8", "int4", "momentum-int8"}) or [*codecs])]
    return [*options, "--checkpoint-every", str(draw.choice([1, 1, 3]))]


def newest_step(out: Path) -> int:
    """Return the step of the newest checkpoint, whole or not; 0 if there is none."""
    found = store.found(out / "checkpoints")
    return int(found[0].name.removeprefix("step-")) if found else 0


def newest_whole(out: Path) -> int:
    """Return the step of the newest whole checkpoint, 0 if there is none; damaged ones do not count."""
    for path in store.found(out / "checkpoints"):
        with contextlib.suppress(OSError):  # a run that goes on deletes old ones
            if store.is_whole(path):
                return store.read_manifest(path).step
    return 0


def source_digest() -> str:
    """Return a digest of what a run computes with."""
    whole = hashlib.sha256()
    for path in sorted([*(ROOT / "mpisparse").rglob("*.py"), *(ROOT / "kernels").iterdir(), ROOT / "tests" / "tiny.py"]):
        whole.update(path.read_bytes())
    return whole.hexdigest()[:12]
