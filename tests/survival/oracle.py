"""What must hold of the records that tests/survival/job.py has written: no rank that lives has lost anything."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mpisparse.checkpoint import store

Rows = dict[str, np.ndarray]
HERE = Path(__file__).parent
UNLAWFUL = ("diloco", "sparseloco", "demo")  # outer steps and signs: only replicas are compared
LIMIT = 300  # seconds for a job of a few steps on a busy machine; more is a hang


def started(
    directory: Path, ranks: int, plan: dict[str, Any], job: Sequence[object] = (HERE / "job.py",), **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run the job under ULFM to its end; raises TimeoutExpired if it hangs. job: what Python is to run."""
    return under_ulfm(ranks, *job, directory, json.dumps(plan), **variables)


def under_ulfm(ranks: int, *words: object, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run Python under ULFM to its end; raises TimeoutExpired if it hangs."""
    environment = {**os.environ, "OMPI_MCA_coll": "^han,hcoll,portals4", **variables}
    mpirun = Path(sys.executable).parent / "mpirun"
    command = [mpirun, "--with-ft", "ulfm", "-n", ranks, sys.executable, *words]
    done = subprocess.Popen(
        list(map(str, command)), env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        out, err = done.communicate(timeout=LIMIT)
    except subprocess.TimeoutExpired:
        done.terminate()  # it ends the ranks first
        done.communicate(timeout=60)
        raise
    return subprocess.CompletedProcess(done.args, done.returncode, out, err)


def ends(directory: Path) -> dict[int, dict[str, Any]]:
    """What each rank that lived to the end has written there."""
    return {int(path.stem.split("-")[1]): json.loads(path.read_text()) for path in directory.glob("end-*.json")}


def check(directory: Path, ranks: int, plan: dict[str, Any]) -> None:
    """Check every step against what its ranks had to send."""
    dead = {death["rank"] for death in plan["deaths"]}
    found = ends(directory)
    assert set(found) == set(range(ranks)) - dead, found
    for end in found.values():
        assert sorted(rank for told in end["told"] for rank in told["died"]) == sorted(dead), found
    before: dict[int, Rows] = {}
    since, living = 0, list[int]()  # steps since a rank has died
    for step in range(plan["steps"]):
        rows = {rank: read(directory / f"step-{step}-{rank}.npz") for rank in found}
        first = next(iter(rows.values()))
        group = first["group"].tolist()
        for row in rows.values():
            assert (row["group"] == first["group"]).all(), (step, group)
            assert (row["mean"].view(np.uint32) == first["mean"].view(np.uint32)).all(), step
            assert (row["weights"].view(np.uint32) == first["weights"].view(np.uint32)).all(), step
        for rank in set(group) - set(found):  # died later, or in this step when it was committed
            with contextlib.suppress(FileNotFoundError, EOFError, ValueError, zipfile.BadZipFile):  # it died writing it
                rows[rank] = read(directory / f"step-{step}-{rank}.npz")
        had = {rank: read(directory / f"had-{step}-{rank}.npz") for rank in group}
        since, living = (since + 1 if group == living else 0), group
        assert (first["mean"] != 0).any() or not is_due(plan, since), step
        holder, copies = inherited(directory, plan, step, before, group)
        if any(unchanged(before[holder]["owed"] + copy, had[holder]) for copy in copies):
            before[holder]["owed"], copies = had[holder]["owed"], []  # the death was noticed before this step
        possible = [with_copy(had, holder, copy) for copy in copies] or [had]
        assert any(follows(plan, first["mean"], had, rows) for had in possible), step
        for rank in set(before) & set(had):
            assert plan["scheme"] in UNLAWFUL or unchanged(before[rank]["owed"], had[rank]), step
        before = rows
    if plan.get("save"):
        check_checkpoints(directory / "checkpoints", ranks, plan)


def check_checkpoints(directory: Path, ranks: int, plan: dict[str, Any]) -> None:
    """Every checkpoint is whole, and of the ranks that lived when it was agreed on; there are no others."""
    found = {path.name: path for path in store.found(directory)}
    assert set(found) == {store.name_of(step) for step in range(2, plan["steps"], 3)}
    for path in found.values():
        assert store.is_whole(path), path
        manifest = store.read_manifest(path)
        assert manifest.ranks == ranks - sum(death["step"] <= manifest.step for death in plan["deaths"]), path


def late(plan: dict[str, Any]) -> int:
    """How many steps late a mean arrives; so many have none at the start, and after a death."""
    staleness: int = plan["options"].get("staleness", 0)
    return staleness


def is_due(plan: dict[str, Any], since: int) -> bool:
    """Whether a step must have a mean, so many steps after the start or the last death."""
    return not late(plan) or (since > late(plan) and plan["options"].get("every", 1) == 1)


def codec_of(plan: dict[str, Any]) -> str:
    """The codec that a plan's values travel in."""
    codec: str = plan["options"].get("codec", "momentum-int8" if plan["scheme"] == "momentum" else "fp32")
    return codec


def inherited(
    directory: Path, plan: dict[str, Any], step: int, before: dict[int, Rows], group: list[int]
) -> tuple[int, list[np.ndarray]]:
    """Who goes on with a copy of a rank that died by this step, and what may be in it: the last part may not have come.

    Nothing is in it where ranks keep no copies. Of plans with copies one rank may die, and what is sent is sent in full.
    """
    every, old = plan.get("mirror"), next(iter(before.values()))["group"].tolist() if before else []
    dead = sorted(set(old) - set(group))
    if every is None or not dead:
        return -1, []
    copy, last = np.zeros_like(next(iter(before.values()))["mean"]), slice(0, 0)
    without = copy
    for done in range(step):
        row, part = directory / f"step-{done}-{dead[0]}.npz", done % every
        living = read(directory / f"step-{done}-{group[0]}.npz")
        copy[living["mean"] != 0] = 0.0
        without = copy.copy()
        if row.exists():
            last = slice(part * len(copy) // every, (part + 1) * len(copy) // every)
            copy[last] = read(row)["after"][last]
    assert without.any()
    return old[(old.index(dead[0]) + 1) % len(old)], [without, copy]


def unchanged(owed: np.ndarray, row: Rows) -> bool:
    """Whether a rank owes as much; weights round to their own size."""
    return near(owed, row["owed"], np.abs(row["owed"]) + np.abs(row.get("weights", 0.0)))


def with_copy(had: dict[int, Rows], holder: int, copy: np.ndarray) -> dict[int, Rows]:
    """What ranks had when one of them had taken over a copy."""
    row = had[holder]
    return {**had, holder: {**row, "copy": copy, "owed": row["owed"] + copy}}


def follows(plan: dict[str, Any], mean: np.ndarray, had: dict[int, Rows], rows: dict[int, Rows]) -> bool:
    """Whether the mean and what the ranks have afterwards follow from what they had."""
    if plan["scheme"] in UNLAWFUL:
        return True
    keeps, sound = plan["options"].get("compensate", True), True
    if keeps and set(rows) == set(had):
        sound = conserves(mean, had, rows)
    if codec_of(plan) == "fp32" and not late(plan) and plan["options"].get("masks") != "own" and plan["scheme"] != "drift":
        sound = sound and is_exact(mean, had, rows, keeps=keeps)
    return sound


def conserves(mean: np.ndarray, had: dict[int, Rows], rows: dict[int, Rows]) -> bool:
    """What all ranks received and what they still owe is what they owed before and what they added, whatever the codec."""
    times = float(next(iter(rows.values())).get("weight", len(had)))
    nothing = np.zeros_like(mean)

    def in_all(row: Rows) -> np.ndarray:
        return row["owed"].astype(np.float64) + row.get("added", nothing) + times * row.get("error", nothing)

    owed = sum(map(in_all, had.values()))
    rounded = sum(np.abs(row.get("weights", nothing)) for row in had.values())
    scale = sum(np.abs(row["owed"]) + np.abs(row["added"]) for row in had.values()) + rounded
    return near(times * mean.astype(np.float64) + sum(map(in_all, rows.values())), owed, scale)


def is_exact(mean: np.ndarray, had: dict[int, Rows], rows: dict[int, Rows], *, keeps: bool) -> bool:
    """Without a codec what is sent is gone, and all else stays bit by bit, or is dropped."""
    waiting = {rank: row["residual"] + row["added"] + row.get("copy", np.float32(0.0)) for rank, row in had.items()}
    sent = mean != 0
    total = sum(acc.astype(np.float64) for acc in waiting.values())
    scale = sum(np.abs(acc) for acc in waiting.values())
    if not near(len(had) * mean[sent], total[sent], scale[sent]):
        return False
    left = {rank: np.where(sent | (not keeps), 0, waiting[rank]) for rank in rows}
    whole = [rank for rank in rows if "copy" not in had[rank]]  # a copy may have been added before the gradient, or after it
    return all((rows[rank]["after"] == left[rank]).all() for rank in whole) and all(
        near(rows[rank]["after"], left[rank], scale) for rank in set(rows) - set(whole)
    )


def near(found: np.ndarray, wanted: np.ndarray, scale: np.ndarray) -> bool:
    """Whether no more than rounding differs: of the terms, and of the largest one, which codecs take steps of."""
    return bool((np.abs(found - wanted) <= 1e-6 * scale + 2e-7 * scale.max()).all())


def read(path: Path) -> Rows:
    """The arrays in a file."""
    with np.load(path) as arrays:
        return dict(arrays)
