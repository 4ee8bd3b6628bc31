"""Build another commit next to this tree, run steps.py with both, and print where they differ. Called by bin/compare."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

from cases import Case, cases, name_of

ROOT = Path(__file__).resolve().parents[2]
STEPS = Path(__file__).with_name("steps.py")
PLACE = ROOT / "build" / "compare"
LIMIT = 1.05
NODE = 2  # ranks that play a node, so that three ranks are uneven nodes, and four are two nodes
OF_NODES = 4  # ranks, on which cases of nodes alone are compared

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


def run(ranks: int, what: list[str], out: Path, site: Path | None) -> None:
    """Run steps.py on some ranks, with this tree or with the other build."""
    out.parent.mkdir(parents=True, exist_ok=True)
    where = [] if site is None else ["--site", str(site)]
    mpirun = Path(sys.executable).with_name("mpirun")
    subprocess.run([mpirun, "-n", str(ranks), sys.executable, STEPS, *where, *what, out], check=True, cwd=PLACE)


def read(path: Path, names: list[str]) -> tuple[Digests, dict[str, str]]:
    """Read the output of steps.py: digests by case, rank and step, and the cases that were refused, and why."""
    found: Digests = {}
    refused: dict[str, str] = {}
    for line in path.read_text().splitlines():
        row = json.loads(line)
        case = names[row.pop("case")]
        if "refused" in row:
            refused[case] = row["refused"].removeprefix("r0 | ") if case not in refused else refused[case]
        else:
            found[case, row.pop("rank"), row.pop("step")] = row
    return found, refused


def differences(old: Digests, new: Digests) -> dict[str, str]:
    """Return what differs of every case that differs or exists in only one build, and from which step on."""
    here, there = ({case for case, _, _ in digests} for digests in (old, new))
    found = {case: "is only in this tree" if case in there else "is only in the other commit" for case in here ^ there}
    first: dict[str, dict[str, int]] = {}
    for (case, rank, step), before in old.items():
        now = new.get((case, rank, step), before)
        for name in (name for name in before if before[name] != now[name]):
            steps = first.setdefault(case, {})
            steps[name] = min(step, steps.get(name, step))
    for case, steps in first.items():
        found[case] = "differs in " + ", ".join(f"{name} from step {step}" for name, step in steps.items())
    return found


def compare_bits(site: Path, count: int, every: list[Case], expected: list[str], skipped: dict[str, str]) -> bool:
    """Print the differences on some ranks; tell whether all of them were expected. Notes what both builds refuse."""
    fine, names, listed = True, [name_of(case) for case in every], PLACE / f"cases-{count}.json"
    listed.parent.mkdir(parents=True, exist_ok=True)
    listed.write_text(json.dumps(every))
    outs = PLACE / f"bits-{site.name}-{count}.jsonl", PLACE / f"bits-here-{count}.jsonl"
    for out, where in zip(outs, (site, None), strict=True):
        run(count, ["--cases", str(listed), "bits"], out, where)
    (before, refused_before), (now, refused) = (read(out, names) for out in outs)
    found = differences(before, now)
    compared = {case for case, _, _ in now}
    print(f"bits | {count} ranks: {len(compared - found.keys())} of {len(compared)} cases are the same", flush=True)
    for case, what in sorted(found.items()):
        known = any(case.startswith(prefix) for prefix in expected)
        fine &= known
        why = refused.get(case) or refused_before.get(case)
        print(f"bits | {count} ranks: {case} {what}{f': {why}' if why else ''}{' (expected)' if known else ''}", flush=True)
    for case in refused.keys() & refused_before.keys():
        skipped[case] = refused[case]
    return fine


def print_skipped(skipped: dict[str, str]) -> None:
    """Print the cases that both builds refuse, those with the same reason together."""
    groups: dict[str, list[str]] = {}
    for case, why in sorted(skipped.items()):
        codec = case.split()[1]
        words = why.replace(f"'{codec}'", "CODEC").replace(f"'{codec.removeprefix('momentum-')}'", "another")
        groups.setdefault(words, []).append(case)
    for why, cases_of in groups.items():
        print(f"skipped | {len(cases_of)} cases, {', '.join(cases_of)}: {why}", flush=True)


def compare_times(site: Path, rounds: int, elements: int, delay: float) -> bool:
    """Print medians of interleaved rounds and of their ratios; tell whether all ratios are within the limit."""
    every: list[tuple[dict[str, float], dict[str, float]]] = []
    for index in range(rounds):
        both = []
        for name, where in ((site.name, site), ("here", None))[:: 1 if index % 2 else -1]:
            out = PLACE / f"time-{name}.json"
            run(2, ["--elements", str(elements), "--delay", str(delay), "time"], out, where)
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
    parser.add_argument("--ranks", type=lambda text: [int(word) for word in text.split(",")], default=[1, 2, 3, OF_NODES])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--elements", type=int, default=25_000_000)
    parser.add_argument("--delay", type=float, default=0.0, help="time exdyna with each collective so many seconds longer")
    parser.add_argument("--no-bits", action="store_true")
    parser.add_argument("--no-time", action="store_true")
    parser.add_argument("--expect", action="append", default=[], metavar="CASE", help="a case, or how its name begins")
    parser.add_argument("--only", action="append", default=[], metavar="CASE", help="compare these, or those that begin so")
    parser.add_argument("--list", action="store_true", help="print the names of the cases and end")
    args = parser.parse_args()
    every = [case for case in cases() if not args.only or name_of(case).startswith(tuple(args.only))]
    if args.list:
        print("\n".join(map(name_of, every)))
        return 0
    if not every:
        sys.exit(f"bin/compare: no case begins with {' or '.join(args.only)}; --list prints them")
    os.environ.setdefault("PYTHONDONTWRITEBYTECODE", "1")
    os.environ["MPISPARSE_RANKS_PER_NODE"] = str(NODE)
    site, fine = build(args.commit), True
    skipped: dict[str, str] = {}
    for count in [] if args.no_bits else args.ranks:
        by_node = [case for case in every if "hierarchy" in case]
        chosen = by_node if count == OF_NODES else every
        if chosen:
            fine &= compare_bits(site, count, chosen, args.expect, skipped)
    print_skipped(skipped)
    quick = args.no_time or compare_times(site, args.rounds, args.elements, args.delay)
    bits = "not compared" if args.no_bits else "the same" if fine else "different"
    times = "not compared" if args.no_time else "as fast" if quick else "slower"
    print(f"compare | bits: {bits}; times: {times}", flush=True)
    return 0 if fine and quick else 1


if __name__ == "__main__":
    sys.exit(main())
