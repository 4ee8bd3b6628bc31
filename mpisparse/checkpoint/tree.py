"""States of torch objects as arrays and JSON: nested dicts, lists, tensors and scalars, and back, without pickle."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]
BITS = {torch.bfloat16: np.dtype(np.uint16)}  # types that NumPy lacks, stored as bit patterns


class UnsupportedError(TypeError):
    """A state holds something that is neither a tensor, an array, a container nor a scalar."""


def flatten(state: Any, prefix: str) -> tuple[str, Arrays]:
    """Split a state into a JSON text and arrays named `prefix/0`, `prefix/1`, ...; arrays share the tensors' memory."""
    arrays: Arrays = {}
    return json.dumps(_encode(state, prefix, arrays, "")), arrays


def unflatten(text: str, arrays: Arrays) -> Any:
    """Rebuild what flatten() split; tensors own their memory."""
    return _decode(json.loads(text), arrays)


def _encode(value: Any, prefix: str, arrays: Arrays, where: str) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() == 0 and value.dtype in SCALARS:
        return {"scalar": [SCALARS[value.dtype], _number(value.item())]}
    if isinstance(value, torch.Tensor | np.ndarray):
        _check_storable(value, where)
        name = f"{prefix}/{len(arrays)}"
        arrays[name] = as_array(value) if isinstance(value, torch.Tensor) else np.ascontiguousarray(value).reshape(-1)
        kind = str(value.dtype).removeprefix("torch.") if isinstance(value, torch.Tensor) else f"numpy:{value.dtype}"
        return {"array": [name, kind, list(value.shape)]}
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return {"float": _number(value)}
    if isinstance(value, dict):
        return {"dict": [[_key(k, where), _encode(v, prefix, arrays, f"{where}/{k}")] for k, v in value.items()]}
    if isinstance(value, list | tuple):
        items = [_encode(v, prefix, arrays, f"{where}/{i}") for i, v in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    raise UnsupportedError(
        f"cannot store {type(value).__name__} at {where or 'the top'}: only tensors, arrays, containers, scalars"
    )


SCALARS = {
    torch.float32: "float32",
    torch.float64: "float64",
    torch.int64: "int64",
    torch.int32: "int32",
    torch.bool: "bool",
}


def _check_storable(value: torch.Tensor | NDArray[Any], where: str) -> None:
    """Refuse what has no plain array form: sparse tensors, types of torch alone, arrays of objects or texts."""
    if isinstance(value, torch.Tensor):
        plain = value.layout is torch.strided and (
            value.dtype in BITS or hasattr(np, str(value.dtype).removeprefix("torch."))
        )
    else:
        plain = value.dtype.kind in "biufc"
    if not plain:
        raise UnsupportedError(
            f"cannot store {type(value).__name__} of {value.dtype} at {where or 'the top'}: only dense numbers"
        )


def _number(value: Any) -> Any:
    return value.hex() if isinstance(value, float) else value


def _key(key: Any, where: str) -> Any:
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise UnsupportedError(f"cannot store the key {key!r} at {where or 'the top'}: only whole numbers and texts")
    return key


def _decode(node: Any, arrays: Arrays) -> Any:
    if not isinstance(node, dict):
        return node
    ((kind, content),) = node.items()
    if kind == "scalar":
        dtype, number = content
        return torch.tensor(float.fromhex(number) if isinstance(number, str) else number, dtype=getattr(torch, dtype))
    if kind == "array":
        return _restore(arrays[content[0]], content[1], content[2])
    if kind == "float":
        return float.fromhex(content)
    if kind == "dict":
        return {key: _decode(value, arrays) for key, value in content}
    items = [_decode(value, arrays) for value in content]
    return items if kind == "list" else tuple(items)


def as_array(tensor: torch.Tensor) -> NDArray[Any]:
    """A tensor's elements in row-major order as a flat array, on its own memory where that is the host's and contiguous."""
    dense = tensor.detach().cpu().contiguous().reshape(-1)
    if tensor.dtype in BITS:
        return dense.view(torch.uint16).numpy()
    array: NDArray[Any] = dense.numpy()
    return array


def _restore(array: NDArray[Any], kind: str, shape: list[int]) -> Any:
    if kind.startswith("numpy:"):
        return array.reshape(shape).astype(kind.removeprefix("numpy:"), copy=False)
    tensor = torch.from_numpy(array.reshape(-1))
    dtype = getattr(torch, kind)
    return (tensor.view(dtype) if dtype in BITS else tensor).reshape(shape)
