"""States that versions before 0.3 saved: their results in flight, as deliveries of today."""

from __future__ import annotations

import numpy as np

from mpisparse.arrays import State


def upgraded(state: State, *, late: bool, keeps: bool) -> State:
    """Translate the results in flight of an earlier version; a current state is returned as it is.

    keeps: the codec's error returns to the accumulator.
    """
    flight = state.get("flight", [])
    if not late or "waiting" in state:
        return state
    return {**state, "flight": [_delivery(result, keeps=keeps) for result in flight], "waiting": None}


def _delivery(result: State, *, keeps: bool) -> State:
    """Earlier versions put the codec's error back when they sent, and stored refusals as fields."""
    size, index = len(result["ks"]), np.asarray(result["index"], dtype=np.int64)
    common = {
        "figures": [result["loss"], result["confidence"], result["seconds"]],
        "used": result["used"],
        "traffic": [result["nbytes_sent"], result["nbytes_received"]],
    }
    refusal = _refusal(result)
    if refusal is not None:
        return refusal
    n = int(index[-1]) + 1 if len(index) else 0
    bounds = np.full(size + 1, n, dtype=np.int64)
    bounds[0] = 0
    agreed = {
        "threshold": 0.0,
        "workloads": np.asarray(result["workloads"], dtype=np.int64),
        "ranks": np.arange(size),
        "bounds": bounds,
        "union": index[:0],
        "k": None,
    }
    nothing = {"sent": index[:0], "left": np.empty(0, dtype=np.float32)}
    mean, kept = (np.asarray(result[key], dtype=np.float32) for key in ("mean", "left"))
    kept_index = np.asarray(result["left_index"], dtype=np.int64)
    if not keeps:
        kept_index, kept = kept_index[:0], kept[:0]
    sums = {"index": index, "mean": mean, "kept_index": kept_index, "kept": kept, "nbytes": result["nbytes"]}
    return {**common, "agreed": agreed, "due": None, **nothing, **sums}


def _refusal(result: State) -> State | None:
    if result["failure"] or result["refused"]:
        statuses = [list(map(int, row)) for row in result["refused"]] or [[4, 0]]
        return {"refusal": "StepRefused", "arguments": [statuses, result["failure"]]}
    if len(set(result.get("frozen", ()))) > 1:
        return {"refusal": "FrozenDiffers", "arguments": []}
    if len(set(result["ks"])) > 1:
        return {"refusal": "DensityDiffers", "arguments": [list(result["ks"])]}
    if result["overflow"] >= 0:
        return {"refusal": "Overflow", "arguments": [int(result["overflow"])]}
    return None
