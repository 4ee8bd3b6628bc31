"""transformers.TrainerCallback that exchanges through the hook of DDP: `Trainer(..., callbacks=[MPISparseCallback()])`."""

from __future__ import annotations

import gc
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
from torch.nn.parallel import DistributedDataParallel

from mpisparse.checkpoint import h5file, tree
from mpisparse.comm.agreement import on_all
from mpisparse.errors import ConfigurationError
from mpisparse.integrations import ddp
from mpisparse.integrations.launch import missing

try:
    from transformers import TrainerCallback, TrainerState, TrainingArguments
except ImportError as error:
    raise ImportError(missing("transformers", "huggingface")) from error

__all__: list[str] = []  # its name is in huggingface


class MPISparseCallback(TrainerCallback):
    """Averages the gradients of any Trainer in DDP's communication hook: `callbacks=[MPISparseCallback(density=0.01)]`.

    Options are those of ddp.State; schemes that move weights, such as drift, need MPISparseTrainer. The Trainer's
    checkpoints hold every rank's state, and a resumed run takes it back. resume_from: the checkpoint to resume from, if it
    lies neither in output_dir nor where TrainingArguments.resume_from_checkpoint says. `state` is the ddp.State.
    """

    def __init__(self, *, resume_from: str | Path | None = None, **exchange: Any) -> None:
        self.state: ddp.State | None = None
        self._exchange_options = exchange
        self._resume_from = resume_from
        self._wrapped: DistributedDataParallel | None = None

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: Any, model: Any = None, **_: Any
    ) -> None:
        """Register the hook on the model that the Trainer has wrapped, and take back what was saved; collective."""
        if args.fp16:
            raise ConfigurationError("fp16 skips steps by a scaler that no callback sees: use bf16, or MPISparseTrainer")
        wrapped = _wrapped(model, args.world_size)
        if wrapped is None:
            return
        if wrapped is not self._wrapped:
            if self.state is not None:
                self.state.close()
            self.state = ddp.State(wrapped, **self._exchange_options)
            wrapped.register_comm_hook(self.state, ddp.hook)
            self._wrapped = wrapped
        if state.global_step > 0:
            self._resume(self._found(args, state))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **_: Any) -> None:
        """Write this rank's state into the checkpoint that the Trainer has written; local."""
        if self.state is None or args.save_only_model:
            return
        place = _checkpoint(args, state)
        place.mkdir(parents=True, exist_ok=True)
        kept = self.state.state_dict()
        file = place / _name(kept["rank"], kept["size"])
        text, arrays = tree.flatten(kept)
        draft = file.with_suffix(".part")
        h5file.write_file(draft, arrays, {"state": text})
        os.replace(draft, file)
        if kept["rank"] == 0:
            for other in set(place.glob(_name("*", "*"))) - set(place.glob(_name("*", kept["size"]))):
                other.unlink(missing_ok=True)  # of an earlier run on another number of ranks

    def _found(self, args: TrainingArguments, state: TrainerState) -> Path:
        """The checkpoint that the Trainer has resumed from, which it does not tell."""
        given = self._resume_from or args.resume_from_checkpoint
        place = Path(given) if isinstance(given, str | Path) else _checkpoint(args, state)
        file = place / "trainer_state.json"
        there = TrainerState.load_from_json(str(file)) if file.is_file() else None
        if there is None or (there.global_step, there.log_history) != (state.global_step, state.log_history):
            raise ConfigurationError(
                f"the Trainer has resumed at step {state.global_step} from another place than {place}: pass "
                "MPISparseCallback(resume_from=DIRECTORY) the checkpoint, too"
            )
        return place

    def _resume(self, place: Path) -> None:
        """Take this rank's state, or those of all ranks if they were not as many; collective."""
        assert self.state is not None
        exchange = self.state._exchange
        states = on_all(exchange, lambda: _states(place, exchange.rank, exchange.size))
        counts = exchange.allgather(np.array([len(states)]))[:, 0]
        if counts.all():
            self.state.load_state_dict(states)
        elif counts.any():
            raise ConfigurationError(
                f"r{exchange.rank} | some ranks find their state of mpisparse in {place}, and others do not: "
                f"{counts.tolist()}; use another checkpoint"
            )
        elif exchange.rank == 0:
            warnings.warn(f"{place} holds no state of mpisparse: training goes on with empty residuals", stacklevel=3)


def _states(place: Path, rank: int, size: int) -> list[dict[str, Any]]:
    """Read this rank's state, or those of all ranks that saved if it has none; empty: nobody has. Local."""
    own = place / _name(rank, size)
    files = [own] if own.is_file() else sorted(place.glob(_name("*", "*")))
    try:
        states = [_state(file) for file in files]
        if own not in files:
            states = sorted(states, key=lambda state: int(state["rank"]))
            whole = not states or [state["rank"] for state in states] == list(range(states[0]["size"]))
        else:
            whole = True
    except Exception as error:  # a damaged file raises errors of many kinds
        raise ConfigurationError(
            f"a state of mpisparse in {place} cannot be read: {error}; use another checkpoint"
        ) from error
    if not whole:
        raise ConfigurationError(
            f"the states of mpisparse in {place} are not those of all ranks: {[file.name for file in files]}; use another "
            f"checkpoint, or remove {_name('*', '*')} there to go on with empty residuals"
        )
    return states


def _state(file: Path) -> dict[str, Any]:
    """Read a rank's state; its checksums are verified. Raises Damaged, ValueError or KeyError if it is not one."""
    arrays, texts = h5file.read_file(file)
    state: dict[str, Any] = tree.unflatten(texts["state"], arrays)
    return state


def _wrapped(model: Any, ranks: int) -> DistributedDataParallel | None:
    """The DDP around a model, which callbacks are not given; None: one rank trains alone."""
    gc.collect()
    found = [each for each in gc.get_objects() if issubclass(type(each), DistributedDataParallel) and each.module is model]
    if len(found) == 1:
        wrapped: DistributedDataParallel = found[0]
        return wrapped
    if found or ranks > 1:
        raise ConfigurationError(
            f"MPISparseCallback expects a model that Accelerate has wrapped in DistributedDataParallel once, found "
            f"{len(found)} such wrappers; DeepSpeed and FSDP have an exchange of their own, MPISparseTrainer needs no "
            "callback"
        )
    warnings.warn("one rank trains alone: start the script with torchrun or mpirun", stacklevel=3)
    return None


def _checkpoint(args: TrainingArguments, state: TrainerState) -> Path:
    return Path(str(args.output_dir)) / f"checkpoint-{state.global_step}"


def _name(rank: int | str, size: int | str) -> str:
    return f"mpisparse-{rank}-of-{size}.h5"
