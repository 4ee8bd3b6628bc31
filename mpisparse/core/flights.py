"""Deliveries in flight as plain values and arrays, for checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from mpisparse.arrays import Ints, State
from mpisparse.comm.agreement import DensityDiffers, FrozenDiffers, Overflow, Refusal, StepRefused
from mpisparse.comm.regions import Part, shared_out, spans_of
from mpisparse.core.records import Arrived, Delivered, Refused
from mpisparse.core.stages import LOST, Sent
from mpisparse.errors import ConfigurationError
from mpisparse.wire.reduction import NO_INDEX, NO_VALUES

if TYPE_CHECKING:
    from mpisparse.select.plans import Agreed, Selection
    from mpisparse.wire.reduction import Reducer

REFUSALS: dict[str, type[Refusal]] = {kind.__name__: kind for kind in (StepRefused, DensityDiffers, FrozenDiffers, Overflow)}


def pack(selection: Selection, reducer: Reducer, arrived: Arrived) -> State:
    """Pack a delivery that has arrived and is not applied yet."""
    if isinstance(arrived, Refused):
        return {"refusal": type(arrived.refusal).__name__, "arguments": _plain(arrived.refusal.args)}
    agreed, due, sent, reduced, _, used, figures, *traffic, form, differ = arrived
    if sent.note is LOST:  # nothing returns to the accumulator
        sent, reduced = Sent(NO_INDEX, NO_VALUES), reduced._replace(left=NO_VALUES, kept_index=NO_INDEX, kept=NO_VALUES)
    return {
        "agreed": selection.packed(agreed),
        "due": None if due is agreed else selection.packed(due),
        "sent": sent.index if reduced.left is not None else NO_INDEX,
        "note": None if sent.note is None else list(sent.note),
        **reducer.packed(reduced),
        "used": used,
        "figures": list(figures),
        "traffic": traffic,
        "index_form": form,
        "differ": differ,
    }


def unpack(selection: Selection, reducer: Reducer, state: State, n: int, size: int) -> Arrived:
    """Return the delivery that pack() packed, of n elements on `size` ranks."""
    if "refusal" in state:
        return Refused(REFUSALS[state["refusal"]](*state["arguments"]))
    agreed = unpack_agreed(selection, state["agreed"], n, size)
    due = agreed if state["due"] is None else selection.unpacked(state["due"])
    sent, reduced = np.asarray(state["sent"], dtype=np.int64), reducer.unpacked(state, size)
    used = None if state["used"] is None else np.asarray(state["used"], dtype=bool)
    figures = tuple(float(figure) for figure in state["figures"])
    sent_bytes, received, control, indices, calls = [*map(int, state["traffic"]), 0, 0, 0][:5]  # earlier ones counted fewer
    note = None if state.get("note") is None else _note(state["note"], len(sent))
    traffic, form = (sent_bytes, received, control, indices, calls), str(state.get("index_form", ""))
    rest = used, figures, *traffic, form, bool(state.get("differ", False))
    return Delivered(agreed, due, Sent(sent, reduced.left, note), reduced, None, *rest)


def _note(saved: Any, count: int) -> tuple[Any, ...]:
    """A stage's note about the elements that were sent. Raises ValueError if it is invalid."""
    note = tuple(np.array(values) for values in saved)
    if any(values.shape != (count,) or not np.isfinite(values).all() for values in note):
        raise ValueError(f"the note about {count} elements must be as many finite numbers")
    return note


def unpack_agreed(selection: Selection, state: State, n: int, size: int) -> Agreed:
    """Return the agreement that Selection.packed() packed.

    Its values may still have to be sent (`Ahead`), so on another number of ranks its regions are divided anew.
    """
    return reshared(selection.unpacked(state), n, size)


def reshared(agreed: Agreed, n: int, size: int) -> Agreed:
    """Return an agreement with regions for `size` ranks."""
    if agreed.own or len(agreed.regions) in (0, size):
        return agreed
    regions = shared_out(agreed.union, n, size)
    loads = [stop - start for start, stop in spans_of(np.searchsorted, agreed.union, regions)]
    return agreed._replace(regions=regions, workloads=np.array(loads, dtype=np.int64))


def check_agreed(selection: Selection, state: State, n: int, size: int) -> None:
    """Raise ConfigurationError unless a packed agreement is one of a vector of n elements."""
    try:
        agreed = unpack_agreed(selection, state, n, size)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigurationError(f"an agreement in flight in the state is malformed: {error}") from error
    bounds = [0, *(bound for region in agreed.regions for bound in (region.lo, region.hi)), n]
    whole = not agreed.regions or (bounds[1] == 0 and bounds[-2] == n and bounds == sorted(bounds))
    if not _inside(agreed.union, n) or not whole:
        raise ConfigurationError("an agreement in flight in the state is not of this model")


def _inside(index: Ints | range | Part, n: int) -> bool:
    """Tell whether an index is ascending and lies in n elements."""
    if isinstance(index, range):
        return index == range(n)
    if isinstance(index, Part):
        return index.n == n
    return not len(index) or (int(index[0]) >= 0 and int(index[-1]) < n and bool((np.diff(index) > 0).all()))


def check(selection: Selection, reducer: Reducer, state: State, n: int, size: int) -> None:
    """Raise ConfigurationError unless a packed delivery is one of a vector of n elements."""
    try:
        arrived = unpack(selection, reducer, state, n, size)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ConfigurationError(f"a delivery in flight in the state is malformed: {error}") from error
    if isinstance(arrived, Refused):
        return
    if not arrived.agreed.own:
        check_agreed(selection, state["agreed"], n, size)
    reduced = arrived.reduced
    pairs = ((arrived.sent.index, reduced.left), (reduced.index, reduced.mean), (reduced.kept_index, reduced.kept))
    for index, values in pairs:
        if not _inside(index, n) or (isinstance(values, np.ndarray) and index.shape != values.shape):
            raise ConfigurationError("a delivery in flight in the state is not of this model")


def bring_home(state: State, reducer: Reducer, residual: Any) -> State:
    """Move what deliveries in flight hold of this rank alone to its residual, in place; return the saved state.

    Of a recalled delivery only the agreement stays; its values are sent next.
    """
    flight, waiting = list[State](), state.get("waiting")
    for packed in state["flight"]:
        kept = packed if "refusal" in packed else reducer.recalled(packed, residual)
        if kept is None:
            waiting = packed["agreed"]
        else:
            flight.append(kept)
    return {**state, "flight": flight, "waiting": waiting}


def _plain(arguments: tuple[Any, ...]) -> list[Any]:
    return [[list(row) if isinstance(row, tuple) else row for row in a] if isinstance(a, list) else a for a in arguments]
