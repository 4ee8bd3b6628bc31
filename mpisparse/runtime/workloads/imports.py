"""Objects by import path, `package.module:object`."""

from __future__ import annotations

import importlib
import os
import re
import sys
from typing import Any

from mpisparse.errors import ConfigurationError, suggest

_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*:[^\W\d]\w*(\.[^\W\d]\w*)*")


def is_import_path(text: str) -> bool:
    """Return whether the text has the form of an import path."""
    return _IMPORT_PATH.fullmatch(text) is not None


def import_object(what: str, path: str) -> Any:
    """Import the object at `package.module:object`; modules in the working directory are found too."""
    if not is_import_path(path):
        raise ConfigurationError(f"{what}: expected package.module:object, got {path!r}")
    module_name, _, attributes = path.partition(":")
    found = import_module(what, module_name)
    for name in attributes.split("."):
        if not hasattr(found, name):
            public = (known for known in vars(found) if not known.startswith("_"))
            raise ConfigurationError(
                f"{what} {path!r}: {_describe(found)} was imported but has no {name!r}; {suggest(name, public)}"
            )
        found = getattr(found, name)
    return found


def import_module(what: str, name: str) -> Any:
    """Import a module; those in the working directory are found too. `what` names the setting in errors."""
    # A console script has its own directory on sys.path, not the working directory as with `python -m`.
    here = os.getcwd()
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name == error.name or name.startswith(f"{error.name}.")):
            raise  # the module exists, but something it imports does not
        hint = f"; for the file {name[:-3].replace('.', '/')}.py write {name[:-3]}:…" if name.endswith(".py") else ""
        raise ConfigurationError(
            f"{what}: tried to import {name!r}, but there is no module {error.name!r} in {here} nor among the installed"
            f" packages{hint or '; check the name, run where the file is, or add its directory to PYTHONPATH'}"
        ) from error


def _describe(found: Any) -> str:
    """Name a module with the file it came from, anything else by itself."""
    origin = getattr(found, "__file__", None)
    return f"{found.__name__} ({origin})" if origin else repr(found)
