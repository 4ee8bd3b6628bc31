"""Build another commit next to this tree, run steps.py with both, and print where they differ. Called by bin/compare."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STEPS = Path(__file__).with_name("steps.py")
PLACE = ROOT / "build" / "compare"
LIMIT = 1.05

Digests = dict[tuple[str, int, int], dict[str, str]]


def build(commit: str) -> Path:
    """Install a commit into its own directory, with compiled kernels; once per commit."""
    name = subprocess.run(
        ["git", "rev-parse", "--verify", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    if name.returncode:
        sys.exit(f"bin/compare: {commit!r} is no commit of this repository: {name.stderr.strip()}")
    site = PLACE / name.stdout.strip()[:12]
    if not (site / "whole").exists():
        tree = PLACE / f"{site.name}-tree"
        print(f"compare | building {site.name}", flush=True)
        subprocess.run(["rm", "-rf", site, tree], check=True)
        tree.mkdir(parents=True)
        archive = subprocess.run(["git", "archive", site.name], cwd=ROOT, stdout=subprocess.PIPE, check=True)
        subprocess.run(["tar", "-x", "-C", tree], input=archive.stdout, check=True)
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
        subprocess.run([*pip, "--target", site, tree], check=True)
        (site / "whole").touch()
    return site


def run(ranks: int, what: str, out: Path, site: Path | None, elements: int | None = None) -> None:
    """Run steps.py on some ranks, with this tree or with the other build."""
    out.parent.mkdir(parents=True, exist_ok=True)
    where = [] if site is None else ["--site", str(site)]
    size = [] if elements is None else ["--elements", str(elements)]
    mpirun = Path(sys.executable).with_name("mpirun")
    subprocess.run([mpirun, "-n", str(ranks), sys.executable, STEPS, *where, *size, what, out], check=True, cwd=PLACE)


def read(path: Path) -> Digests:
    """Read the output of steps.py, by case, rank and step."""
    found: Digests = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        case = " ".join(str(value) for value in row.pop("case").values())
        found[case, row.pop("rank"), row.pop("step")] = row
    return found


def differences(old: Digests, new: Digests) -> dict[str, str]:
    """Return the first difference of every case that differs or exists in only one build."""
    known = ({case for case, _, _ in digests} for digests in (old, new))
    here, there = known
    found = {case: "is only in this tree" if case in there else "is only in the other commit" for case in here ^ there}
    for key in sorted(old.keys() & new.keys(), key=lambda key: (key[0], key[2], key[1])):
        case, rank, step = key
        wrong = [name for name in old[key] if old[key][name] != new[key][name]]
        if wrong:
            found.setdefault(case, f"differs first in {', '.join(wrong)} at step {step} on rank {rank}")
    return found


def compare_bits(site: Path, ranks: Iterable[int], expected: list[str]) -> bool:
    """Print the differences; tell whether all of them were expected."""
    fine = True
    for count in ranks:
        old, new = PLACE / f"bits-{site.name}-{count}.jsonl", PLACE / f"bits-here-{count}.jsonl"
        run(count, "bits", old, site)
        run(count, "bits", new, None)
        before, now = read(old), read(new)
        found = differences(before, now)
        cases = {case for case, _, _ in now}
        print(f"bits | {count} ranks: {len(cases - found.keys())} of {len(cases)} cases are the same", flush=True)
        for case, what in sorted(found.items()):
            known = any(case.startswith(prefix) for prefix in expected)
            fine &= known
            print(f"bits | {count} ranks: {case} {what}{' (expected)' if known else ''}", flush=True)
    return fine


def compare_times(site: Path, rounds: int, elements: int) -> bool:
    """Print medians of interleaved rounds and of their ratios; tell whether all ratios are within the limit."""
    every: list[tuple[dict[str, float], dict[str, float]]] = []
    for index in range(rounds):
        both = []
        for name, where in ((site.name, site), ("here", None))[:: 1 if index % 2 else -1]:
            out = PLACE / f"time-{name}.json"
            run(2, "time", out, where, elements)
            both.append((name, json.loads(out.read_text())))
        pair = dict(both)
        every.append((pair[site.name], pair["here"]))
        print(f"time | round {index + 1} of {rounds}", flush=True)
    fine = True
    for case in every[0][1]:
        ratios = [new[case] / old[case] for old, new in every]
        to_add = statistics.median(new[case] / new["add"] for _, new in every)
        middle = statistics.median(ratios)
        fine &= case == "add" or middle <= LIMIT
        seconds = [1e3 * statistics.median(pair[i][case] for pair in every) for i in (0, 1)]
        print(
            f"time | {case}: {seconds[0]:.1f} ms before, {seconds[1]:.1f} ms now; ratio {middle:.3f} "
            f"({min(ratios):.2f} to {max(ratios):.2f}); {to_add:.2f} times a plain add",
            flush=True,
        )
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(prog="bin/compare", description="Compare this tree with another commit.")
    parser.add_argument("commit")
    parser.add_argument("--ranks", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--no-bits", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--expect", action="append", default=[], metavar="CASE", help="a case, or how its name begins")
    args = parser.parse_args()
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    site = build(args.commit)
    fine = args.no_bits or compare_bits(site, args.ranks, args.expect)
    quick = args.no_time or compare_times(site, args.rounds, args.elements)
    bits = "not compared" if args.no_bits else "the same" if fine else "different"
    times = "not compared" if args.no_time else "as fast" if quick else "slower"
    print(f"compare | bits: {bits}; times: {times}", flush=True)
    return 0 if fine and quick else 1


if __name__ == "__main__":
    sys.exit(main())
