"""Users' own models and data, by import path."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import TensorDataset, default_collate

from mpisparse.errors import ConfigurationError, suggest
from mpisparse.runtime.workloads.data.draws import draw
from mpisparse.runtime.workloads.generators import kept_generators, seed_generators
from mpisparse.runtime.workloads.imports import import_object
from mpisparse.runtime.workloads.records import Data

_EXPECTED = (
    "Data, or (train, test) or (train, test, task name), or a dict with train, test and optionally validation and task, "
    "with map-style datasets whose items are (input, target)"
)
_NAMES = ("train", "test", "validation", "task")


def make_model(path: str, sizes: Mapping[str, int]) -> torch.nn.Module:
    """Call the factory, with the sizes if it takes one argument."""
    factory = import_factory("model", path)
    required = _required_arguments(factory)
    if required > 1:
        raise ConfigurationError(
            f"model {path!r}: expected a factory with one argument, sizes, or none; this one requires {required};"
            " name a function that fills in the others"
        )
    model = factory(dict(sizes)) if required else factory()
    if not isinstance(model, torch.nn.Module):
        raise ConfigurationError(f"model {path!r}: the factory must return a torch.nn.Module, got {type(model).__name__}")
    return model


def make_data(path: str) -> Data:
    """Call the factory; wrap its result if it returns torch datasets."""
    made = import_factory("data", path)()
    if isinstance(made, Data):
        return made
    if isinstance(made, tuple) and len(made) in (2, 3):
        if len(made) == 3 and hasattr(made[2], "__getitem__") and not isinstance(made[2], str):
            raise ConfigurationError(
                f"data {path!r}: a tuple of three datasets does not say which is which;"
                ' return {"train": …, "validation": …, "test": …}'
            )
        made = dict(zip(("train", "test", "task"), made, strict=False))
    if not isinstance(made, dict) or not {"train", "test"} <= set(made):
        raise ConfigurationError(f"data {path!r}: the factory must return {_EXPECTED}; got {_name_type(made)}")
    for name in made:
        if name not in _NAMES:
            raise ConfigurationError(
                f"data {path!r}: the factory's dict has an unknown key {name!r}; {suggest(str(name), _NAMES)}"
            )
    train, test = (DatasetExamples(made[name], path) for name in ("train", "test"))
    task = made.get("task", getattr(made["train"], "task", "classes"))
    if not isinstance(task, str):
        raise ConfigurationError(f"data {path!r}: the task must be a name or package.module:object, got {task!r}")
    validation = DatasetExamples(made["validation"], path) if made.get("validation") is not None else None
    return Data(train, test, task, _infer_sizes(made["train"], train), validation)


class DatasetExamples:
    """A map-style torch dataset of (input, target).

    While it is read, the global generators are seeded by (seed, epoch, index); afterwards they are restored.
    """

    def __init__(self, dataset: Any, path: str) -> None:
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            raise ConfigurationError(f"data {path!r}: the factory must return {_EXPECTED}; got a {_name_type(dataset)}")
        if len(dataset) == 0:
            raise ConfigurationError(f"data {path!r}: a dataset is empty; every dataset needs at least one example")
        self._dataset = dataset
        with kept_generators():
            item = dataset[0]
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise ConfigurationError(f"data {path!r}: items must be (input, target), but the first is {_name_type(item)}")
        self.first_input: Any = item[0]

    def __len__(self) -> int:
        return len(self._dataset)

    def batch(self, indices: NDArray[Any], *, seed: int, epoch: int, train: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Collate these examples."""
        if isinstance(self._dataset, TensorDataset):
            inputs, targets = self._dataset[torch.from_numpy(indices)]
            return inputs, targets
        if not train:
            seed = epoch = 0
        items = []
        with kept_generators():
            for index, word in zip(indices.tolist(), draw(indices, 1, seed=seed, epoch=epoch)[:, 0].tolist(), strict=True):
                seed_generators(word)
                items.append(self._dataset[index])
        inputs, targets = default_collate(items)
        return inputs, targets


def import_factory(what: str, path: str) -> Callable[..., Any]:
    """Import a function or class."""
    factory = import_object(what, path)
    if not callable(factory) or isinstance(factory, torch.nn.Module):
        raise ConfigurationError(
            f"{what} {path!r}: expected a function or class to call, got an object of {_name_type(factory)};"
            " name a function that returns it"
        )
    checked: Callable[..., Any] = factory
    return checked


def _required_arguments(factory: Callable[..., Any]) -> int:
    """Count the arguments without a default; one named `sizes` always counts."""
    try:
        parameters = inspect.signature(factory).parameters.values()
    except ValueError:  # written in C, without a signature
        return 0
    variadic = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return sum(p.name == "sizes" or (p.default is p.empty and p.kind not in variadic) for p in parameters)


def _infer_sizes(dataset: Any, examples: DatasetExamples) -> dict[str, int]:
    """Return the dataset's `sizes`, or infer them from its `classes` and the shape of its first input."""
    if hasattr(dataset, "sizes"):
        return dict(dataset.sizes)
    sizes = {}
    if hasattr(dataset, "classes"):
        sizes["classes"] = dataset.classes if isinstance(dataset.classes, int) else len(dataset.classes)
    shape = np.shape(examples.first_input)
    if len(shape) == 3:
        sizes.update(zip(("channels", "height", "width"), shape, strict=True))
    return sizes


def _name_type(value: Any) -> str:
    name = type(value).__name__
    return f"{name} of {len(value)}" if isinstance(value, (tuple, list, dict)) else name
