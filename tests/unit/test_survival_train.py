"""mpisparse train --on-failure shrink: ranks die, and the others go on with the data, checkpoints and metrics."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from mpisparse.checkpoint import store
from mpisparse.comm import mpi
from mpisparse.errors import ConfigurationError
from mpisparse.runtime.schedule import Order, Position
from mpisparse.runtime.settings import Settings
from tests.survival import oracle
from tests.survival.dying import COUNT

TESTS = Path(__file__).parents[1]
SHARE = 4  # examples per rank and step
needs_ulfm = pytest.mark.skipif(not mpi.knows_ulfm(), reason="ULFM NOT TESTED: this MPI is not Open MPI, or lacks it")


def trained(place: Path, ranks: int, deaths: dict[str, Any], *words: str) -> str:
    """Run a training to its end; returns what it printed."""
    place.mkdir(exist_ok=True)
    command = (
        "-m", "mpisparse", "train", "--model", "tiny:model", "--data", "tests.survival.dying:data", "--validation", "0",
        "--batch-size", str(SHARE), "--density", "0.1", "--out", place / "run", "--checkpoint-every", "3",
        "--on-failure", "shrink", *words,
    )  # fmt: skip
    path = os.pathsep.join([str(TESTS.parent), str(TESTS)])
    notes = {"MPISPARSE_DYING": str(place), "MPISPARSE_DEATHS": json.dumps(deaths), "PYTHONPATH": path}
    done = oracle.under_ulfm(ranks, *command, **notes)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def used(place: Path, rank: int) -> list[list[int]]:
    """The examples that a rank of the start has used, batch by batch."""
    lines = [int(line) for line in (place / f"example-{rank}").read_text().split()]
    assert len(lines) % SHARE == 0
    return [lines[i : i + SHARE] for i in range(0, len(lines), SHARE)]


def check_data(place: Path, ranks: Sequence[int], epochs: int) -> None:
    """In each epoch each example is used once, but for an end that is too short for a step of the ranks that live then."""
    batches, step = [used(place, rank) for rank in ranks], 0
    for _ in range(epochs):
        seen: list[int] = []
        living = 0
        while step < max(map(len, batches)):
            now = [batch[step] for batch in batches if step < len(batch)]
            if len(seen) + SHARE * len(now) > COUNT:
                break
            living = len(now)
            seen += [index for batch in now for index in batch]
            step += 1
        assert len(set(seen)) == len(seen)
        assert COUNT - len(seen) < SHARE * living, (len(seen), living)
    assert step == max(map(len, batches))


@needs_ulfm
@pytest.mark.parametrize(
    ("scheme", "ranks", "deaths"),
    [
        ("exdyna", 3, {"0": ["example", 5 * SHARE], "2": ["save", 3]}),
        pytest.param("drift", 4, {"1": ["example", 2 * SHARE], "0": ["evaluation", 2]}, marks=pytest.mark.slow),
        pytest.param("topk", 3, {"0": ["save", 2], "1": ["evaluation", 1]}, marks=pytest.mark.slow),
    ],
)
def test_the_living_train_on(scheme: str, ranks: int, deaths: dict[str, Any], tmp_path: Path) -> None:
    place = tmp_path / "dying"
    words = ("--scheme", scheme, "--epochs", "2", "--mirror", "2")
    said = trained(place, ranks, deaths, *words)
    check_data(place, range(ranks), 2)
    assert "shrink: rank" in said
    lines = [json.loads(line) for line in (place / "run" / "metrics.jsonl").read_text().splitlines()]
    shrunk = [line for line in lines if line.get("event") == "shrink"]
    steps = [line["step"] for line in lines if line["kind"] == "step"]
    assert 1 <= len(shrunk) <= len(deaths)
    assert steps == sorted(set(steps))
    assert steps[-1] - len(steps) <= 1  # a line that rank 0 has not written when it dies is missing
    newest = store.found(place / "run" / "checkpoints")[0]
    assert store.is_whole(newest)
    manifest = store.read_manifest(newest)
    assert (manifest.step, manifest.ranks) == (steps[-1], ranks - len(deaths))
    assert not (place / "run" / "lock").exists()
    for note in place.glob("example-*"):
        note.unlink()
    again = trained(place, ranks, {}, *words[:3], "3", "--mirror", "2")
    assert "resume" in again
    check_data(place, range(ranks), 1)


def test_what_is_left_of_an_epoch_is_counted_in_steps_of_the_ranks_that_live() -> None:
    order = Order(COUNT, 0)
    for offset in range(COUNT + 1):
        position, steps = Position(1, offset), order.steps_left(Position(1, offset), 3, SHARE, 3)
        for _ in range(steps):
            order.take(position, SHARE, 0, 3)
        assert position.epoch == 2
        assert COUNT - position.offset < 3 * SHARE


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"on_failure": "shrink", "background": True}, "background does not go with on_failure shrink"),
        ({"on_failure": "shrink", "record_gradients": 3}, "record_gradients does not go"),
        ({"on_failure": "shrink", "driver": "mpio"}, "driver does not go"),
        ({"on_failure": "continue"}, "on_failure"),
        ({"mirror": 3}, "pass --on-failure shrink"),
        ({"on_failure": "shrink", "mirror": 0}, "mirror must be at least 1"),
        ({"options": {"on_failure": "shrink"}}, "pass --on-failure"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        Settings(**settings)
