"""transformers.Trainer: a callback for the hook of DDP, or a subclass with a GradientSync in place of DDP.

Trainer(..., callbacks=[MPISparseCallback(scheme="dense", codec="int4")])
MPISparseTrainer(..., exchange={"scheme": "drift"})
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from mpisparse.attachment import Attachment, attach
from mpisparse.errors import ConfigurationError
from mpisparse.integrations import beside
from mpisparse.integrations.accelerate import bare, refusal
from mpisparse.integrations.callback import MPISparseCallback
from mpisparse.integrations.launch import communicator, missing
from mpisparse.sync import GradientSync

try:
    from transformers import Trainer, TrainerCallback
except ImportError as error:
    raise ImportError(missing("transformers", "huggingface")) from error

__all__ = ["MPISparseCallback", "MPISparseTrainer"]


class MPISparseTrainer(Trainer):
    """A Trainer that exchanges through GradientSync; for others: `class MyTrainer(MPISparseTrainer, SFTTrainer): ...`.

    exchange: the options of GradientSync. `sync` is the GradientSync of the last train(). Call
    mpisparse.init_torch_distributed() before TrainingArguments(...). It has what no callback can: schemes that move weights,
    whose shared weights it evaluates and saves; mixed precision with a scaler; one directory for all of a rank's state.
    """

    def __init__(self, *args: Any, exchange: dict[str, Any] | None = None, **kwargs: Any) -> None:
        if not isinstance(exchange, dict | None):
            raise ConfigurationError(
                f"exchange must be a dict with options of GradientSync, such as {{'scheme': 'drift'}}, got {exchange!r}"
            )
        self.sync: GradientSync | None = None
        self._exchange_options = exchange or {}
        self._attachment: Attachment | None = None
        self._training = False
        self._resumed_from: Path | None = None
        super().__init__(*args, **kwargs)
        self.add_callback(Connection(self))

    def create_accelerator_and_postprocess(self) -> None:
        """Create an accelerator that does not wrap models in DDP."""
        super().create_accelerator_and_postprocess()
        bare(self.accelerator)

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """Train; collective. A checkpoint to resume from restores every rank's state."""
        found: Any = resume_from_checkpoint
        if found is True:
            found = last_whole(Path(str(self.args.output_dir))) or True
        self._resumed_from = Path(found) if isinstance(found, str) else None
        return super().train(found, *args, **kwargs)

    def connect(self) -> None:
        """Construct the exchange and attach the optimizer; then restore the state to resume from. Collective."""
        if self.sync is not None and self._attachment is not None:
            self._attachment.remove()  # the Trainer may keep its optimizer
            self.sync.close()
        assert self.model is not None
        assert self.optimizer is not None
        self.sync = GradientSync(self.model, comm=communicator(), **self._exchange_options)
        self.sync.check_together(self._refusal())
        self._attachment = attach(self.optimizer, self.sync)
        if self._resumed_from is not None:
            beside.load(self._resumed_from / "mpisparse", self.state.global_step, **self._subjects())
        self._training = True

    def _refusal(self) -> ConfigurationError | None:
        """Return what cannot be trained."""
        assert self.sync is not None
        if self.args.max_grad_norm > 0 and (self.sync.options.accumulate == "backward" or self.sync.overlaps):
            return ConfigurationError(
                'max_grad_norm needs accumulate="step" without overlap: otherwise gradients are exchanged before they are '
                "clipped; pass max_grad_norm=0 to train without clipping"
            )
        return refusal(self.accelerator, self.sync)

    def disconnect(self) -> None:
        """Make the replicas equal where ranks have weights of their own; collective. Further calls do nothing."""
        if self._training:
            assert self.sync is not None
            self._training = False
            self.sync.synchronize()

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate the shared weights."""
        with self._shared():
            return super().evaluation_loop(*args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any, *args: Any) -> None:
        """Write every rank's state into checkpoint-STEP/mpisparse, then what the Trainer writes; collective."""
        step = self.state.global_step
        if not self.args.save_only_model:
            folder = Path(self._get_output_dir(trial)) / f"checkpoint-{step}" / "mpisparse"
            beside.save(folder, step, **self._subjects())
        with self._shared():
            super()._save_checkpoint(model, trial, *args)

    def _load_best_model(self) -> None:
        """Load the best model when no exchange will follow that could move it."""
        self.disconnect()
        super()._load_best_model()

    def _shared(self) -> AbstractContextManager[None]:
        """Have the weights that all ranks share in the model."""
        return self.sync.global_weights() if self._training and self.sync is not None else nullcontext()

    def _subjects(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "sync": self.sync}


def last_whole(directory: Path) -> str | None:
    """Return the last checkpoint that was written to its end: the Trainer's own state is the last file of one."""
    whole = {path.parent for path in directory.glob("checkpoint-*/trainer_state.json")}
    numbered = [(int(number), path) for path in whole if (number := path.name.rpartition("-")[2]).isdecimal()]
    return str(max(numbered)[1]) if numbered else None


class Connection(TrainerCallback):
    """Tells a trainer when its training begins and ends."""

    def __init__(self, trainer: MPISparseTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, *_: Any, **__: Any) -> None:
        """Model, optimizer and scheduler are ready, the Trainer's own checkpoint is loaded."""
        self._trainer.connect()

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """All steps are done."""
        self._trainer.disconnect()
