"""A training with scheme drift, for its parallel tests."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from ranks import bits, seeded, small

import mpisparse


class Training:
    """A small net, its optimizer and the exchange."""

    def __init__(
        self, comm: MPI.Intracomm, kind: Any = torch.optim.AdamW, model: Any = None, scaler: Any = None, **options: Any
    ) -> None:
        self.comm, self.model = comm, small() if model is None else model
        self.sync = mpisparse.GradientSync(self.model, scheme="drift", comm=comm, **{"codec": "int8", **options})
        self.optimizer = kind(self.model.parameters(), lr=0.01)
        mpisparse.attach(self.optimizer, self.sync, scaler)
        self.steps = 0

    def step(self) -> None:
        self.optimizer.zero_grad()
        self.loss().backward()
        self.optimizer.step()
        self.steps += 1

    def loss(self) -> torch.Tensor:
        """The loss of the coming step, in the type of the weights."""
        x = torch.randn(8, 30, generator=seeded(self.comm.rank, self.steps))
        kind = next(self.model.parameters()).dtype
        loss: torch.Tensor = (self.model(x.to(kind)) - x[:, :20].sin().to(kind)).square().mean()
        return loss

    def bits(self) -> bytes:
        """Everything that must be equal after a resume."""
        states = [t for s in self.optimizer.state.values() for t in s.values() if isinstance(t, torch.Tensor)]
        scheme = [t for t in self.sync.state_dict().values() if isinstance(t, torch.Tensor)]
        return bits([*self.model.state_dict().values(), self.shared(), *scheme, *states])

    @property
    def own(self) -> torch.Tensor:
        """W, in the order of the residual."""
        weights: Any = self.sync._gradients
        own: torch.Tensor = weights.flat().double()
        return own

    def shared(self) -> torch.Tensor:
        """G."""
        with self.sync.global_weights():
            return torch.cat([p.detach().reshape(-1) for p in self.model.parameters()]).clone()

    def remembered(self) -> torch.Tensor:
        """e of all owners; collective."""
        reducer: Any = self.sync._aggregator.works.reducer
        every = np.zeros(len(self.own))
        every[reducer.owned(self.comm.rank, self.comm.size)] = reducer.error
        return torch.from_numpy(self.comm.allreduce(every))
