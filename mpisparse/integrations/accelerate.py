"""Hugging Face Accelerate: `sync, model, optimizer, ... = prepare(accelerator, model, optimizer, ...)`, without DDP."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpisparse.attachment import attach
from mpisparse.errors import ConfigurationError
from mpisparse.integrations import beside
from mpisparse.integrations.launch import communicator, missing
from mpisparse.sync import GradientSync

try:
    from accelerate import Accelerator, DistributedType
except ImportError as error:
    raise ImportError(missing("Accelerate", "huggingface")) from error

__all__ = ["prepare"]

OTHERS = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)


def prepare(accelerator: Accelerator, model: Any, optimizer: Any, *others: Any, **options: Any) -> tuple[Any, ...]:
    """Do what accelerator.prepare() does, with a GradientSync in place of DDP; collective.

    Returns the GradientSync, then model, optimizer and the others (loaders, schedulers) as Accelerate prepares them. The
    optimizer is attached: optimizer.step() exchanges, unless gradients are being accumulated. accelerator.save_state() and
    load_state() include every rank's state, in the directory `mpisparse` of the checkpoint, `mpisparse-2` for the second
    model of an accelerator, and so on. `options`: of GradientSync.
    """
    if not isinstance(model, torch.nn.Module) or not isinstance(optimizer, torch.optim.Optimizer):
        kinds = ", ".join(type(given).__name__ for given in (model, optimizer))
        raise ConfigurationError(f"prepare expects the accelerator, a model, an optimizer, then all else; got {kinds}")
    model = bare(accelerator).prepare_model(model)
    sync = GradientSync(model, comm=communicator(), **options)
    sync.check_together(refusal(accelerator, sync))
    optimizer, *rest = accelerator.prepare(optimizer, *others) if others else (accelerator.prepare(optimizer),)
    attach(optimizer, sync)
    Checkpoints(accelerator, model, optimizer, sync)
    return sync, model, optimizer, *rest


def bare(accelerator: Accelerator) -> Accelerator:
    """Let an accelerator place models and cast their types, but not wrap them in DDP; returns it."""
    if "prepare_model" not in vars(accelerator):
        accelerator.prepare_model = functools.partial(accelerator.prepare_model, evaluation_mode=True)
    return accelerator


def refusal(accelerator: Accelerator, sync: GradientSync) -> ConfigurationError | None:
    """Return why an accelerator cannot train with this exchange."""
    if accelerator.distributed_type in OTHERS:
        return ConfigurationError(
            f"Accelerate is configured for {accelerator.distributed_type.value}, which has an exchange of its own; launch "
            "with mpirun, or with torchrun and no such configuration"
        )
    if accelerator.num_processes != sync.size:
        return ConfigurationError(
            f"ranks that Accelerate sees: {accelerator.num_processes}; ranks that exchange: {sync.size}; call "
            "mpisparse.init_torch_distributed() before Accelerator(...) or TrainingArguments(...)"
        )
    return None


class Checkpoints:
    """Adds every rank's state to what an accelerator saves and loads."""

    def __init__(self, accelerator: Accelerator, model: Any, optimizer: Any, sync: GradientSync) -> None:
        self._accelerator = accelerator
        self._sync = sync
        self._subjects = {"model": model, "optimizer": optimizer, "sync": sync}
        self._loaded_from = Path()
        before = accelerator._save_model_state_pre_hook.values()
        number = sum(isinstance(getattr(hook, "__self__", None), Checkpoints) for hook in before) + 1
        self._name = "mpisparse" if number == 1 else f"mpisparse-{number}"
        self._load_state = accelerator.load_state
        accelerator.register_save_state_pre_hook(self._save)
        accelerator.register_load_state_pre_hook(self._note)
        accelerator.load_state = self.load_state

    def _save(self, models: list[Any], weights: list[Any], output_dir: str) -> None:
        """Write every rank's state, and let Accelerate write the shared weights; collective."""
        place, step = Path(output_dir) / self._name, self._accelerator.step
        beside.save(place, step, **self._subjects)
        if self._sync.rank == 0:
            beside.remove_others(place, step)
        for number, model in enumerate(models):
            if model is self._subjects["model"]:
                weights[number] = beside.shared_weights(model.state_dict, self._sync)

    def _note(self, models: list[Any], input_dir: str) -> None:
        self._loaded_from = Path(input_dir) / self._name

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Load as Accelerate does, then everything of this rank; collective.

        A rank that was not there when the state was saved has no file of Accelerate's that tells the step: rank 0 has.
        """
        self._load_state(*args, **kwargs)
        steps = self._sync.gather_floats(np.array([self._accelerator.step], dtype=np.float64))
        self._accelerator.step = int(steps[0, 0])
        beside.load(self._loaded_from, self._accelerator.step, **self._subjects)
