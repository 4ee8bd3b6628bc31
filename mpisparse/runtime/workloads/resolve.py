"""Build a model, its data and its task from the names a user gives."""

from __future__ import annotations

from pathlib import Path

import torch

from mpisparse.errors import ConfigurationError, suggest
from mpisparse.runtime.workloads import custom
from mpisparse.runtime.workloads.catalogue import DATA, MODELS, ModelEntry
from mpisparse.runtime.workloads.data import files
from mpisparse.runtime.workloads.generators import kept_generators, seed_generators
from mpisparse.runtime.workloads.imports import import_object, is_import_path
from mpisparse.runtime.workloads.records import Data, Task
from mpisparse.runtime.workloads.tasks import TASKS


def build(model: str, data: str | None, seed: int) -> tuple[torch.nn.Module, Data, Task]:
    """Implement `workloads.build`."""
    entry = _find_model(model)
    if data is None:
        if entry is None:
            raise ConfigurationError(f"model {model!r} has no data of its own; {_data_choices('')}")
        data = entry.data
    with kept_generators():
        seed_generators(seed)
        loaded = _load(data, masked=entry is not None and entry.masked)
        task = _find_task(loaded.task)
        seed_generators(seed)
        network = custom.make_model(model, loaded.sizes) if entry is None else _make(model, entry, data, loaded)
    return network, loaded, task


def _find_model(model: str) -> ModelEntry | None:
    """Find a built-in model; None for an import path, which is imported here, before any data is loaded."""
    if model not in MODELS and ":" not in model:
        raise ConfigurationError(f"unknown model {model!r}; {suggest(model, MODELS)}, or give package.module:factory")
    if model not in MODELS:
        custom.import_factory("model", model)
    return MODELS.get(model)


def _make(model: str, entry: ModelEntry, data: str, loaded: Data) -> torch.nn.Module:
    missing = [size for size in entry.needs if size not in loaded.sizes]
    if missing:
        raise ConfigurationError(
            f"model {model!r} needs data with the sizes {', '.join(entry.needs)}, but {data!r} has"
            f" {', '.join(sorted(loaded.sizes)) or 'none'}; choose other data, such as {entry.data!r}, or another model"
        )
    factory = import_object("model", entry.factory)
    network: torch.nn.Module = factory(loaded.sizes, **entry.options)
    return network


def _load(data: str, masked: bool) -> Data:
    if data in DATA:
        entry = DATA[data]
        options = dict(entry.options, masked=masked) if entry.text else entry.options
        loaded: Data = import_object("data", entry.factory)(**options)
        return loaded
    path, unit, windows = files.split_unit(data)
    if path.exists():
        return files.load(path, unit, masked, windows)
    if unit is None and is_import_path(data):
        return custom.make_data(data)
    if unit is not None or "/" in data or Path(data).suffix:
        raise ConfigurationError(f"data: no file or directory {str(path)!r} (looked in {Path.cwd()}); {_data_choices(data)}")
    raise ConfigurationError(f"unknown data {data!r}; {_data_choices(data)}")


def _data_choices(data: str) -> str:
    return f"{suggest(data, DATA)}, or give {files.KINDS}, or package.module:factory"


def _find_task(name: str) -> Task:
    if name in TASKS:
        return TASKS[name]
    if ":" not in name:
        raise ConfigurationError(f"unknown task {name!r}; {suggest(name, TASKS)}, or give package.module:object")
    task = import_object("task", name)
    missing = [part for part in Task.__dataclass_fields__ if not hasattr(task, part)]
    if missing or isinstance(task, type):
        raise ConfigurationError(
            f"task {name!r}: expected an mpisparse.runtime.workloads.Task, got {task!r}"
            + (f" without {', '.join(missing)}" if missing else "; name an object, not a class")
        )
    found: Task = task
    return found
