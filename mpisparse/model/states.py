"""The state of an exchange: everything that the next step depends on, saved as tensors and loaded."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mpisparse.errors import ConfigurationError
from mpisparse.model.steps import Steps
from mpisparse.schemes.state import STATE_FORMAT, check_state, step_state

if TYPE_CHECKING:
    from mpisparse.model.buffers import SharedBuffers


class States(Steps):
    """Saves and loads what the next step depends on."""

    _buffers: SharedBuffers

    def state_dict(self, *, copy: bool = True) -> dict[str, Any]:
        """Everything that the next step depends on, as tensors and scalars; local. copy=False: live where possible."""
        parts = {**self._aggregator.state(), **self._companion.state()}
        state = {key: self._saved(value, copy) for key, value in parts.items()}
        return {
            "format": STATE_FORMAT,
            "scheme": self.scheme,
            "options": json.dumps(self._options.values(), sort_keys=True),
            "rank": self._exchange.rank,
            "size": self._exchange.size,
            "density": self._density,
            "residual": self._kept(copy),
            **{f"step.{key}": value for key, value in state.items()},
        }

    @property
    def ranks_a_node(self) -> int:
        """The number of ranks whose gradients are summed before the exchange; 1 if all ranks exchange with each other.

        Also 1 with scheme auto, whichever way it exchanges now: that may change in any step.
        """
        return 1 if self._nodes is None else self._nodes.ranks

    @property
    def first_of_node(self) -> int:
        """The first rank of those whose gradients are summed with this one's; this one itself with scheme auto."""
        return self._exchange.rank if self._nodes is None else self._nodes.first

    def _kept(self, copy: bool) -> torch.Tensor:
        """The vector of this rank that a state stores: the residual, or the rank's own weights."""
        kept = self._companion.kept()
        if kept is not None:
            return kept
        return self._aggregator.kept(copy=copy)

    def _saved(self, value: Any, copy: bool) -> Any:
        """A part's value as a torch value, on the host: tensors, not arrays."""
        if isinstance(value, str | int | float | list | dict | None):
            return _with_tensors(value, copy)
        array: np.ndarray[Any, Any] = self._backend.to_host(value)
        return torch.from_numpy(array.copy() if copy and array is value else array)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that state_dict() returned on the same rank of as many ranks; collective, all ranks or none."""
        self._together(lambda: self._load(state))
        if self._survivors is not None:
            self._survivors.restart()

    def _load(self, state: dict[str, Any]) -> None:
        self._meet("load_state_dict")
        error: Exception | None = None
        try:
            self.check_state(state)
        except ConfigurationError as caught:
            error = caught
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as caught:
            error = ConfigurationError(f"the state is not one that state_dict() gave: {type(caught).__name__}: {caught}")
        self._exchange.raise_together(error)
        parts = self._aggregator.upgraded(self._companion.upgraded(step_state(state)))
        parts, residual = self._aggregator.fitted(parts, torch.as_tensor(state["residual"]))
        self._companion = self._companion.of(parts)
        self._companion.load(parts)
        self._aggregator.load(parts)
        if self._companion.subject is not None:
            self._companion.restore(residual)
        else:
            self._aggregator.restore(residual)
        self._density = float(state["density"])
        self._damaged = None
        self._before.waiting = []
        self._buffers.forget()
        self._gradients.restart()
        self._exchange.place.steps = int(state["step.step"])
        self._equality.release()
        self._equality.done(self._companion.counted(self._aggregator.number))

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise ConfigurationError unless load_state_dict could take the state; local."""
        check_state(state, self.state_dict(copy=False), self._options, self._aggregator, self._companion)


def _with_tensors(value: Any, copy: bool) -> Any:
    """A plain value with tensors for arrays, also within lists and dicts."""
    if isinstance(value, dict):
        return {key: _with_tensors(each, copy) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_with_tensors(each, copy) for each in value]
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy() if copy else value)
    return value.clone() if copy and isinstance(value, torch.Tensor) else value
