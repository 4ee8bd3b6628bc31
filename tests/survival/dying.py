"""Data of a run of `mpisparse train` under ULFM: each rank notes the examples that it uses, and dies when its plan says so.

MPISPARSE_DYING is a directory for the notes. MPISPARSE_DEATHS maps ranks of the start to [what, number]: "example", die when
so many were used; "save", while it writes its so-many-th file of a checkpoint; "evaluation", after so many test examples.
"""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path

import torch

from mpisparse import checkpoint

RANK = os.environ.get("OMPI_COMM_WORLD_RANK", "0")
DIRECTORY = Path(os.environ.get("MPISPARSE_DYING", "."))
WHAT, NUMBER = json.loads(os.environ.get("MPISPARSE_DEATHS", "{}")).get(RANK, ("", 0))
COUNT = 100
_done: Counter[str] = Counter()


def one_more(what: str) -> bool:
    """Count; whether this rank is to die now."""
    _done[what] += 1
    return what == WHAT and _done[what] == NUMBER


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


class Noted(torch.utils.data.Dataset):
    """Examples whose use is noted under a name. The first one that is asked for only shows of what form they are."""

    def __init__(self, name: str, count: int) -> None:
        self.name, self.seen = name, False
        self.inputs = torch.randn(count, 12, generator=torch.Generator().manual_seed(count))
        self.targets = self.inputs[:, :4].argmax(1)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        if self.seen:
            with open(DIRECTORY / f"{self.name}-{RANK}", "a") as file:
                file.write(f"{index}\n")
            if one_more(self.name):
                die()
        self.seen = True
        return self.inputs[index], self.targets[index]


def data() -> tuple[Noted, Noted]:
    write = checkpoint.saving.write_file

    def torn(path: Path, arrays: object, texts: object) -> object:
        if one_more("save"):
            path.write_bytes(b"half")
            die()
        return write(path, arrays, texts)

    checkpoint.saving.write_file = torn
    return Noted("example", COUNT), Noted("evaluation", 10)
