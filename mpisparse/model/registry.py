"""Count the parameters registered in any torch module, a cheap sign that a model may have changed."""

from __future__ import annotations

from typing import Any

from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

count = 0  # registrations of parameters and of modules since the first call of parameters_registered()
_watching = False


def _note(module: Any, name: str, registered: Any) -> None:
    global count
    count += 1


def parameters_registered() -> int:
    """The number of registrations of parameters and of modules since the first call."""
    global _watching
    if not _watching:
        register_module_parameter_registration_hook(_note)
        register_module_module_registration_hook(_note)
        _watching = True
    return count
