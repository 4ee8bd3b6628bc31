"""How many bytes of arrays an object holds: each piece of memory once, wherever it is reached from."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

PLAIN = (int, float, str, bytes, bool, type(None), type, np.generic, torch.dtype, torch.device)


def held(thing: Any, seen: set[int]) -> int:
    """Bytes of the arrays that can be reached from a thing and were not seen before; they are seen then."""
    total, ahead = 0, [thing]
    while ahead:
        each = ahead.pop()
        memory = _memory(each)
        if memory is not None:
            place, nbytes = memory
            if place not in seen:
                seen.add(place)
                total += nbytes
        elif not isinstance(each, PLAIN) and id(each) not in seen:
            seen.add(id(each))
            ahead += _inside(each)
    return total


def _memory(thing: Any) -> tuple[int, int] | None:
    """Where the memory lies that an array is a view of, and its bytes; None for what is no array."""
    if isinstance(thing, torch.Tensor):
        storage = thing.untyped_storage()
        return storage.data_ptr(), storage.nbytes()
    if not isinstance(thing, np.ndarray):
        return None
    while isinstance(thing.base, np.ndarray):
        thing = thing.base
    return (thing.ctypes.data, thing.nbytes)


def _inside(thing: Any) -> Iterable[Any]:
    """What a container or an object of ours holds."""
    if isinstance(thing, dict):
        return [*thing.keys(), *thing.values()]
    if isinstance(thing, list | tuple | set | frozenset):
        return list(thing)
    if isinstance(thing, functools.partial):
        return [*thing.args, *thing.keywords.values()]
    if isinstance(thing, torch.nn.Module):
        return [*thing.parameters(), *thing.buffers()]
    if isinstance(thing, torch.optim.Optimizer):
        return list(thing.state.values())
    if callable(thing) and hasattr(thing, "__self__"):
        return [thing.__self__]
    if not type(thing).__module__.startswith("mpisparse."):
        return []
    fields = [getattr(thing, field.name, None) for field in dataclasses.fields(thing)] if _is_record(thing) else []
    return [*fields, *vars(thing).values()] if hasattr(thing, "__dict__") else fields


def _is_record(thing: Any) -> bool:
    return dataclasses.is_dataclass(thing) and not isinstance(thing, type)
