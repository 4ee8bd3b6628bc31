"""Check whether an exchange of the same scheme can go on from a saved state. No MPI."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch

from mpisparse.arrays import Floats, State
from mpisparse.core.aggregator import Aggregator
from mpisparse.core.state import share_in_shift, sources
from mpisparse.errors import ConfigurationError
from mpisparse.names import FREE_OPTIONS
from mpisparse.schemes.companion import Companion
from mpisparse.schemes.options import Options, check_density
from mpisparse.wire.feedback import AtFixedOwners

STATE_FORMAT = 1


def check_state(state: Any, here: dict[str, Any], options: Options, aggregator: Aggregator, companion: Companion) -> None:
    """Raise ConfigurationError unless an exchange whose state is `here` could take the state; local."""
    if not isinstance(state, dict):
        raise ConfigurationError(f"a state is a dict that state_dict() gave, got {type(state).__name__}")
    _check_all_there((key for key in here if not key.startswith("step.")), state)
    for key in ("format", "scheme", "size", "rank"):
        if state[key] != here[key]:
            raise ConfigurationError(f"the state was saved with {key} {state[key]!r}, this is {key} {here[key]!r}")
    if "step.nodes" in state and "step.nodes" not in here:
        raise ConfigurationError(
            'the state is of hierarchy="node", whose residual is shared out in nodes; load it with mpisparse.checkpoint.load'
        )
    check_density(state["density"])
    check_options(state["options"], options)
    parts = aggregator.upgraded(companion.upgraded(step_state(state)))
    _check_all_there(here, {**state, **{f"step.{key}": value for key, value in parts.items()}})
    residual, size = state["residual"], len(here["residual"])
    if not isinstance(residual, torch.Tensor) or residual.dim() != 1:
        raise ConfigurationError("the residual in the state must be a flat tensor")
    if not bool(torch.isfinite(residual).all()):
        raise ConfigurationError("the residual in the state is not finite everywhere")
    if len(residual) != size:
        raise ConfigurationError(f"the state is of a model with {len(residual)} trainable elements, this one has {size}")
    check_kinds(parts, step_state(here))
    aggregator.check(parts)
    companion.check(parts)


def _check_all_there(keys: Iterable[str], state: Mapping[str, Any]) -> None:
    missing = sorted(set(keys) - set(state))
    if missing:
        raise ConfigurationError(f"the state has no {missing[0]!r}")


def step_state(state: dict[str, Any]) -> dict[str, Any]:
    """The parts' state, as arrays and scalars. A rank's own weights, and what an optimizer keeps of them, stay tensors."""
    step = {key.removeprefix("step."): value for key, value in state.items() if key.startswith("step.")}
    return {key: value if key == "own" else _as_arrays(value) for key, value in step.items()}


def _as_arrays(value: Any) -> Any:
    """A value with arrays for tensors, also within lists and dicts."""
    if isinstance(value, torch.Tensor):
        return value.cpu().numpy()
    if isinstance(value, dict):
        return {key: _as_arrays(each) for key, each in value.items()}
    return [_as_arrays(each) for each in value] if isinstance(value, list) else value


def resize_states(
    states: Mapping[int, dict[str, Any]], old: int, new: int, rank: int, aggregator: Aggregator, companion: Companion
) -> dict[str, Any]:
    """A rank's state among `new` ranks, from the `old` ranks in sources(), or from all of them if weights are exchanged.

    Every part knows its own keys. Each state is looked up only once, so a mapping may read it on demand.
    """
    taken = {source: states[source] for source in sources(old, new, rank)}
    first = next(iter(taken.values()))
    parts = {source: companion.upgraded(step_state(state)) for source, state in taken.items()}
    companion = companion.of(next(iter(parts.values())))
    residuals = {source: state["residual"].cpu().numpy().copy() for source, state in taken.items()}
    merged, residual = aggregator.resize(parts, residuals, old, new, rank)
    merged |= companion.resize(parts, old, new, rank)
    if companion.subject is not None:
        every = (taken[source] if source in taken else states[source] for source in range(old))
        error, residual = _from_all(every, old, new, rank, aggregator, companion)
        merged = aggregator.with_own(merged, error)
    step = {
        f"step.{key}": torch.from_numpy(value) if isinstance(value, np.ndarray) else value for key, value in merged.items()
    }
    return {**first, **step, "residual": torch.from_numpy(residual), "rank": rank, "size": new}


def _from_all(
    states: Iterable[dict[str, Any]], old: int, new: int, rank: int, aggregator: Aggregator, companion: Companion
) -> tuple[State, Floats]:
    """A rank's e, if it has one, and its own weights among `new` ranks: its source's, shifted so that the mean stays."""
    reducer = aggregator.works.reducer
    source, errors = sources(old, new, rank)[0], dict[int, Floats]()
    weights = np.zeros(len(aggregator.residual), dtype=np.float64)
    for other, state in enumerate(states):
        parts = step_state(state)
        if isinstance(reducer, AtFixedOwners):
            errors[other] = np.asarray(aggregator.own(parts)["error"])
        share = float(other == source) + share_in_shift(old, new, other)
        if share:
            weights += share * companion.whole(state["residual"].cpu().numpy(), parts).astype(np.float64)
    error = {"error": reducer.regrouped(errors, rank, new)} if isinstance(reducer, AtFixedOwners) else {}
    return error, weights.astype(np.float32)


def check_options(text: Any, options: Options) -> None:
    """Raise ConfigurationError unless options saved as JSON equal those here, apart from those that may differ."""
    try:
        saved, here = options.upgraded(dict(json.loads(text))), options.values()
    except (TypeError, ValueError, RecursionError) as error:
        raise ConfigurationError(f"the options in the state cannot be read: {error}") from error
    free = {*FREE_OPTIONS, *options.without_effect()}
    for key in here:
        if key not in free and saved.get(key) != here[key]:
            raise ConfigurationError(f"the state was saved with {key}={saved.get(key)!r}, this is {key}={here[key]!r}")
    options.check_saved(saved)


def check_kinds(state: dict[str, Any], here: dict[str, Any]) -> None:
    """Raise ConfigurationError unless the scheme's values have its types; None stands for any value but a number."""
    for key, now in here.items():
        value = state[key]
        if isinstance(now, np.ndarray):
            fits = isinstance(value, np.ndarray) and value.dtype == now.dtype and value.ndim == now.ndim
        elif isinstance(now, bool | str | list | tuple | dict):
            fits = value is None or isinstance(value, type(now))
        elif isinstance(now, int):
            fits = isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63
        else:
            fits = now is None or (isinstance(value, int | float) and not isinstance(value, bool))
        if not fits:
            raise ConfigurationError(f"the scheme's {key} in the state is malformed")
