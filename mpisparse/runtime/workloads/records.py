"""What a workload is made of: examples, data, a task."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray


class Examples(Protocol):
    """Numbered examples, handed out in batches."""

    def __len__(self) -> int: ...

    def batch(self, indices: NDArray[Any], *, seed: int, epoch: int, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the inputs and targets of these examples.

        Randomness in an example depends only on (seed, epoch, index), so a batch does not depend on the rank or the
        batch size. With train=False nothing is augmented, and masks and negative samples are the same for every seed
        and epoch.
        """
        ...


@dataclass(frozen=True)
class Data:
    """Examples to train and test on, the name of their task, and the sizes a model needs.

    validation: examples that steer training and are not trained on; None: part of `train` is held out for that.
    held_out: the share of the training data that was held out.
    """

    train: Examples
    test: Examples
    task: str
    sizes: dict[str, int]
    validation: Examples | None = None
    held_out: float = 0.0


@dataclass(frozen=True)
class Task:
    """A loss, and a metric that adds up over batches: finish(sum of sums / sum of counts)."""

    metric: str
    higher_is_better: bool
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    measure: Callable[[torch.Tensor, torch.Tensor], tuple[float, float]]
    finish: Callable[[float], float] = float
