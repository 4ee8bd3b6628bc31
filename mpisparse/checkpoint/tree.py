"""Converts states of torch objects (nested dicts, lists, tensors, scalars) to arrays and JSON and back, without pickle."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
Path = tuple[Any, ...]  # the keys from the outermost container to a value
OF_MODELS = (("model",), ("buffers",))  # outermost keys of a model's tensors
DEEPEST = 100  # nesting of containers
BITS = {torch.bfloat16: np.dtype(np.uint16)}  # types that NumPy lacks are stored as bit patterns


class UnsupportedError(TypeError):
    """A state holds a value that is neither a tensor, an array, a container nor a scalar."""


def flatten(state: Any) -> tuple[str, Arrays]:
    """Split a state into a JSON text and arrays that share the tensors' memory.

    An array is named by its place in the state: the outermost key, then the other keys joined by dots, as in
    `model/conv1.weight`. Scalar tensors go into the text, except those of a model, which h5py alone must find.
    """
    arrays: Arrays = {}
    return json.dumps(_encode(state, arrays, ())), arrays


def unflatten(text: str, arrays: Arrays) -> Any:
    """Rebuild a state from flatten(); tensors own their memory. Raises ValueError for what flatten() does not produce."""
    decoder = _Decoder(arrays)
    try:
        state = decoder.decode(json.loads(text))
    except (LookupError, TypeError, AttributeError, ArithmeticError, RuntimeError) as error:  # includes RecursionError
        raise ValueError(f"a state is malformed: {type(error).__name__}: {error}") from error
    if decoder.left:
        raise ValueError(f"a state does not refer to the array {min(decoder.left)!r}")
    return state


def _encode(value: Any, arrays: Arrays, path: Path) -> Any:
    if len(path) > DEEPEST:
        raise UnsupportedError(f"cannot store containers nested more than {DEEPEST} deep, as at {_place(path)[:60]}...")
    if isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype in SCALARS and path[:1] not in OF_MODELS:
        return {"scalar": [SCALARS[value.dtype], _number(value.item())]}
    if isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo:
        parts = {"indices": value._indices(), "values": value._values()}
        encoded = [_encode(part, arrays, (*path, name)) for name, part in parts.items()]
        return {"sparse": [*encoded, list(value.shape), value.is_coalesced()]}
    if isinstance(value, torch.Tensor | np.ndarray):
        _check_storable(value, path)
        name = _array_name(path, arrays)
        arrays[name] = as_array(value) if isinstance(value, torch.Tensor) else np.asarray(value, order="C")
        kind = str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else f"numpy:{value.dtype}"
        return {"array": [name, kind, list(value.shape)]}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": _number(value)}
    if isinstance(value, dict):
        return {"dict": [[_key(k, path), _encode(v, arrays, (*path, k))] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        items = [_encode(v, arrays, (*path, i)) for i, v in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    raise UnsupportedError(
        f"cannot store {_name(value)} at {_place(path)}: only tensors, arrays, containers, and Python's numbers and texts"
    )


def _name(value: Any) -> str:
    """The name of a value's type, with its module: NumPy has numbers of its own."""
    kind = type(value)
    return kind.__name__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__name__}"


def _place(path: Path) -> str:
    return "".join(f"/{key}" for key in path) or "the top"


def _array_name(path: Path, taken: Arrays) -> str:
    """Name an array by its path, as HDF5 can name it: one group, one data set, and no name twice."""
    group, *keys = path or ("state",)
    name = f"{_quoted(str(group))}/{_quoted('.'.join(map(str, keys)))}"
    numbered = (f"{name}%{number}" for number in range(2, len(taken) + 3))
    return name if name not in taken else next(other for other in numbered if other not in taken)


def _quoted(text: str) -> str:
    """Escape what HDF5 does not take in a name: slashes and NUL, and nothing but a dot or nothing at all."""
    text = text.replace("%", "%25").replace("/", "%2F").replace("\0", "%00")
    return {"": "%", ".": "%2E"}.get(text, text)


SCALARS = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.bool: "bool",
}


def _check_storable(value: torch.Tensor | NDArray[Any], path: Path) -> None:
    """Refuse what has no plain array form: compressed rows, types that only torch has, arrays of objects or texts."""
    if isinstance(value, torch.Tensor):
        plain = value.layout is torch.strided and (
            value.dtype in BITS or hasattr(np, str(value.dtype).removeprefix("torch."))
        )
    else:
        plain = value.dtype.kind in "biufc"
    if not plain:
        raise UnsupportedError(f"cannot store {type(value).__name__} of {value.dtype} at {_place(path)}: only dense numbers")


def _number(value: Any) -> Any:
    return value.hex() if isinstance(value, float) else value


def _key(key: Any, path: Path) -> Any:
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise UnsupportedError(f"cannot store the key {key!r} at {_place(path)}: only whole numbers and texts")
    return key


class _Decoder:
    """Rebuilds a state from untrusted input: raises ValueError for anything flatten() does not produce."""

    def __init__(self, arrays: Arrays) -> None:
        self.left = dict(arrays)

    def decode(self, node: Any, depth: int = 0) -> Any:
        if node is None or isinstance(node, bool | int | str):
            return node
        if not isinstance(node, dict) or len(node) != 1 or depth > DEEPEST:
            raise ValueError(f"a state has {_shown(node)} where a value should be")
        ((kind, content),) = node.items()
        if kind == "float":
            return float.fromhex(content)
        if not isinstance(content, list):
            raise ValueError(f"a state has {_shown(node)} where a value should be")
        if kind == "scalar":
            return _scalar(*content)
        if kind == "array":
            name, dtype, shape = content
            return _restore(self.left.pop(name), dtype, shape)  # each array belongs to exactly one value
        if kind == "sparse":
            indices, values, shape, coalesced = content
            return _sparse(self.decode(indices, depth + 1), self.decode(values, depth + 1), shape, coalesced)
        if kind == "dict":
            if not all(isinstance(pair, list) for pair in content):
                raise ValueError("a dict in a state is not made of pairs")
            pairs = [(key, self.decode(value, depth + 1)) for key, value in content]
            if len(dict(pairs)) != len(pairs) or not all(type(key) in (int, str) for key, _ in pairs):
                raise ValueError("a dict in a state has a key twice, or one that is neither a whole number nor a text")
            return dict(pairs)
        if kind not in ("list", "tuple"):
            raise ValueError(f"a state has {kind!r} where a kind of value should be")
        items = [self.decode(value, depth + 1) for value in content]
        return items if kind == "list" else tuple(items)


def _sparse(indices: Any, values: Any, shape: Any, coalesced: Any) -> torch.Tensor:
    """A sparse tensor such as an optimizer's memory of an embedding; raises if an index is outside of it."""
    if type(coalesced) is not bool:
        raise ValueError(f"a state has {_shown(coalesced)} where a flag should be")
    return torch.sparse_coo_tensor(indices, values, shape, check_invariants=True, is_coalesced=coalesced)


def _shown(node: Any) -> str:
    text = str(node) if not isinstance(node, dict | list) else type(node).__name__
    return repr(text[:60])


def _scalar(dtype: str, number: Any) -> torch.Tensor:
    kind = next((known for known, name in SCALARS.items() if name == dtype), None)
    if kind is None:
        raise ValueError(f"a state has a scalar of type {dtype!r}")
    expected = str if kind.is_floating_point else bool if kind is torch.bool else int
    if type(number) is not expected:
        raise ValueError(f"a state has {_shown(number)} where a scalar of {dtype} should be")
    return torch.tensor(float.fromhex(number) if isinstance(number, str) else number, dtype=kind)


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """Return a tensor as an array in row-major order; shares the memory of a contiguous tensor on the host."""
    dense = tensor.detach().cpu().contiguous()
    if tensor.dtype in BITS:
        return dense.view(torch.uint16).numpy()
    array: NDArray[Any] = dense.numpy()
    return array


def _restore(array: NDArray[Any], kind: str, shape: list[int]) -> Any:
    """Give an array its type and shape; raises ValueError if its type or size do not match."""
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape) or math.prod(shape) != array.size:
        raise ValueError(f"an array of {array.size} elements cannot have the shape {shape!r}")
    if kind.startswith("numpy:"):
        if np.dtype(kind.removeprefix("numpy:")) != array.dtype:
            raise ValueError(f"an array is of {array.dtype}, not of {kind!r}")
        return array.reshape(shape)
    tensor = torch.from_numpy(array.reshape(-1))
    dtype = getattr(torch, kind)
    if not isinstance(dtype, torch.dtype) or BITS.get(dtype, array.dtype) != array.dtype:
        raise ValueError(f"an array is of {array.dtype}, not of {kind!r}")
    tensor = tensor.view(dtype) if dtype in BITS else tensor
    if tensor.dtype != dtype:
        raise ValueError(f"an array is of {array.dtype}, not of {kind!r}")
    return tensor.reshape(shape)
