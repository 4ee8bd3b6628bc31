"""A run of scheme speculative for its tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from ranks import bits, carried, loss_of, seeded, small

import mpisparse

Floats = NDArray[np.float32]

OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
}


class Run:
    """A small net with its optimizer and a learning-rate schedule."""

    def __init__(self, comm: MPI.Intracomm, optimizer: str = "sgd", **options: Any) -> None:
        self.comm = comm
        self.model = small()
        defaults = {"density": 0.1, "granularity": "fine"}
        self.sync = mpisparse.GradientSync(self.model, scheme="speculative", comm=comm, **{**defaults, **options})
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters())
        mpisparse.attach(self.optimizer, self.sync)
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=3, gamma=0.7)
        self.noting = True
        self.gradient: Floats = np.empty(0, np.float32)
        self.published: torch.Tensor = torch.empty(0)

    def step(self, step: int) -> None:
        self.optimizer.zero_grad()
        loss = loss_of(self.model, seeded(self.comm.rank, step))
        loss.backward()
        self.gradient = torch.cat([p.grad.reshape(-1) for p in self.model.parameters()]).numpy().copy()
        if self.noting:
            self.sync.note_loss(loss.item())
        self.optimizer.step()
        self.published = torch.cat(
            [torch.zeros(p.numel()) if p.grad is None else p.grad.reshape(-1).clone() for p in self.model.parameters()]
        )
        self.scheduler.step()

    def train(self, first: int, last: int) -> Run:
        for step in range(first, last):
            self.step(step)
        return self

    def tensors(self) -> list[torch.Tensor]:
        """Return the weights and optimizer state that the model currently uses."""
        states = [self.optimizer.state[p] for p in self.model.parameters() if p in self.optimizer.state]
        return [*self.model.parameters(), *(v for s in states for _, v in sorted(s.items()) if isinstance(v, torch.Tensor))]

    def bits(self) -> bytes:
        """Return the bits of both sets of weights, the residual, and the scheme's state."""
        own = bits(self.tensors())
        with self.sync.global_weights():
            shared = bits(self.tensors())
        state = self.sync.state_dict()
        arrays = ("index", "mean", "sent", "left", "kept_index", "kept")
        flight = [torch.as_tensor(r[key]) for r in state.get("step.flight", ()) for key in arrays]
        return b"#".join([own, shared, bits([self.sync.residual, state["step.mean.influence"], *flight])])

    def close(self) -> None:
        self.sync.close()


def leftovers(state: dict[str, Any]) -> torch.Tensor:
    """What this rank keeps of deliveries in flight: the codec's errors, as sender and as owner, and what it blends."""
    left = carried(state, len(state["residual"]))
    for result in state["step.flight"]:
        for index, values in (("sent", "left"), ("kept_index", "kept")):
            left[torch.as_tensor(result[index])] += torch.as_tensor(result[values]).double()
    return left
