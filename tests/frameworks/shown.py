"""What the scripts share: data, comparisons between ranks, and errors that all ranks must raise."""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist


def data(count: int = 48) -> torch.utils.data.TensorDataset:
    inputs = torch.randn(count, 12, generator=torch.Generator().manual_seed(count))
    return torch.utils.data.TensorDataset(inputs, inputs[:, :1] * 2 - inputs[:, 1:2])


def net() -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.Sequential(
        torch.nn.Linear(12, 40), torch.nn.Tanh(), torch.nn.Dropout(0.1), torch.nn.Linear(40, 1)
    )  # fmt: skip


def digest(tensors: Iterable[torch.Tensor]) -> str:
    return hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in tensors)).hexdigest()


def gathered(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def alike(value: Any, what: str) -> None:
    values = gathered(value)
    assert all(v == values[0] for v in values), f"{what} differ between ranks: {values}"


def apart(value: Any, what: str) -> None:
    values = gathered(value)
    assert len(values) == 1 or len(set(map(str, values))) > 1, f"{what} are the same on all ranks: {values[0]}"


@contextlib.contextmanager
def refused(words: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """All ranks raise `kind` with these words."""
    message = "nothing was raised"
    try:
        yield
    except kind as error:
        message = str(error)
    assert all(words in text for text in gathered(message)), f"expected {words!r}, got {message!r}"


def told(run: Callable[[], Any]) -> str:
    """Return the warnings of a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return "\n".join(str(w.message) for w in caught)
