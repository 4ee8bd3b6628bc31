"""A Lightning strategy: `Trainer(strategy=MPISparseStrategy(density=0.01))` under mpirun, srun or torchrun."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from mpisparse.attachment import attach
from mpisparse.comm.rendezvous import init_torch_distributed
from mpisparse.comm.world import started_by
from mpisparse.errors import ConfigurationError
from mpisparse.integrations import beside
from mpisparse.integrations.launch import communicator, missing
from mpisparse.sync import GradientSync

try:
    from lightning.fabric.plugins.environments.mpi import MPIEnvironment
    from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import DDPStrategy
    from lightning.pytorch.utilities import rank_zero_warn
except ImportError as error:
    raise ImportError(missing("Lightning", "lightning")) from error

__all__ = ["MPISparseStrategy"]


class MPISparseStrategy(DDPStrategy):
    """Exchanges through GradientSync instead of DDP; the launcher starts the ranks, one device each.

    Takes all options of GradientSync. `sync` is the GradientSync of the last fit(). torch.distributed runs beside MPI, for
    Lightning's own messages and for torchmetrics. Checkpoints hold the shared weights; every rank's own state is in a
    directory beside them, `NAME.ckpt.mpisparse`.
    """

    strategy_name = "mpisparse"

    def __init__(
        self, *, scheme: str = "exdyna", density: float | None = None, codec: str | None = None, **options: Any
    ) -> None:  # fmt: skip
        environment = TorchElasticEnvironment() if started_by() == "torchrun" else MPIEnvironment()
        super().__init__(cluster_environment=environment)
        self.sync: GradientSync | None = None
        self._options = {"scheme": scheme, "density": density, "codec": codec, **options}
        self._fitting = False
        self._evaluation = ExitStack()  # holds the shared weights in the model
        self._evaluates = False
        self._loaded_from = Path()

    # Ranks

    def _configure_launcher(self) -> None:
        """Launch nothing: mpirun, srun or torchrun has."""

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Which part of the data is this rank's."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}

    @property
    def root_device(self) -> torch.device:
        """This rank's device."""
        devices = self.parallel_devices or [torch.device("cpu")]
        if devices[0].type == "cpu":
            return devices[0]
        if self.local_rank >= len(devices):
            raise ConfigurationError(
                f"r{self.global_rank} | rank {self.local_rank} of this host has no device of its own, there are "
                f"{len(devices)}; start as many ranks per host"
            )
        return devices[self.local_rank]

    def setup_environment(self) -> None:
        """Check how many ranks there are, and start torch.distributed; collective."""
        asked, ranks = self.num_processes * self.num_nodes, self.world_size
        if asked not in (1, ranks) and self.root_device.type == "cpu":
            raise ConfigurationError(
                f"r{self.global_rank} | the Trainer asks for {asked} processes (devices={self.num_processes}, "
                f"num_nodes={self.num_nodes}), and there are {ranks}: start it as `mpirun -n {asked} python ...`, or leave "
                "devices and num_nodes out"
            )
        if started_by() == "none":
            rank_zero_warn("one rank trains alone: start the script with `mpirun -n 2 python ...`, or with torchrun")
        if not torch.distributed.is_initialized():
            init_torch_distributed(self._get_process_group_backend())
        super().setup_environment()

    # Training

    def configure_ddp(self) -> None:
        """Construct the exchange, in place of DDP's wrapper; collective."""
        if self.sync is not None:
            self.sync.close()
        assert self.lightning_module is not None
        self.sync = GradientSync(self.lightning_module, comm=communicator(), **self._options)
        self._fitting = True

    def setup_optimizers(self, trainer: Trainer) -> None:
        """Create the optimizer and attach it to the exchange; collective."""
        super().setup_optimizers(trainer)
        assert self.sync is not None
        self.sync.check_together(self._refusal(trainer))
        attach(self.optimizers[0], self.sync, getattr(self.precision_plugin, "scaler", None)).trust_scaler()

    def _refusal(self, trainer: Trainer) -> ConfigurationError | None:
        """Return what cannot be trained."""
        assert self.sync is not None
        if len(self.optimizers) != 1:
            return ConfigurationError(
                f"configure_optimizers() returned {len(self.optimizers)} optimizers, but an exchange belongs to the step of "
                "one optimizer: give it several parameter groups instead"
            )
        if trainer.gradient_clip_val and (self.sync.options.accumulate == "backward" or self.sync.overlaps):
            return ConfigurationError(
                'gradient_clip_val needs accumulate="step" without overlap: otherwise gradients are exchanged before they '
                "are clipped"
            )
        return None

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients only."""
        assert self.sync is not None
        with self.sync.no_sync():
            yield

    def on_train_end(self) -> None:
        """Make the replicas equal where ranks have weights of their own; collective."""
        assert self.sync is not None
        self._fitting = False
        self.sync.synchronize()

    # Evaluation

    def on_validation_start(self) -> None:
        """Have the shared weights in the model."""
        if self._fitting and self.sync is not None:
            self._evaluation.enter_context(self.sync.global_weights())
            self._evaluates = True

    def on_validation_end(self) -> None:
        """Give the model the rank's own weights back."""
        self._evaluation.close()
        self._evaluates = False

    @contextmanager
    def _own_weights(self) -> Iterator[None]:
        """Have the rank's own weights in the model for a while, during an evaluation too."""
        evaluates = self._evaluates
        self.on_validation_end()
        yield
        if evaluates:
            self.on_validation_start()

    # Checkpoints

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the shared weights; collective where ranks have their own."""
        state_dict = super().lightning_module_state_dict
        return beside.shared_weights(state_dict, self.sync) if self._fitting and self.sync is not None else state_dict()

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any | None = None) -> None:
        """Write every rank's state, then Lightning's file on rank 0; collective."""
        step = checkpoint["global_step"]
        if self.sync is not None and "optimizer_states" in checkpoint:
            with self._own_weights():
                beside.save(
                    _beside(filepath), step, model=self.lightning_module, optimizer=self.optimizers[0], sync=self.sync
                )  # fmt: skip
        super().save_checkpoint(checkpoint, filepath, storage_options)
        if self.is_global_zero:
            beside.remove_others(_beside(filepath), step)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Read Lightning's file; every rank's state follows in load_optimizer_state_dict()."""
        self._loaded_from = _beside(checkpoint_path)
        return super().load_checkpoint(checkpoint_path, weights_only)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Restore the optimizer, then everything of this rank; collective."""
        super().load_optimizer_state_dict(checkpoint)
        assert self.sync is not None
        beside.load(
            self._loaded_from, checkpoint["global_step"], model=self.lightning_module, optimizer=self.optimizers[0],
            sync=self.sync,
        )  # fmt: skip

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove Lightning's file and every rank's state."""
        super().remove_checkpoint(filepath)
        if self.is_global_zero:
            shutil.rmtree(_beside(filepath), ignore_errors=True)


def _beside(filepath: Any) -> Path:
    """Return the directory of the ranks' states; a link's are beside the file that it points to."""
    if "://" in str(filepath):
        raise ConfigurationError(
            f"checkpoints must be on a file system that all ranks see, got {filepath}; save to a directory, and copy "
            "from there"
        )
    return Path(f"{os.path.realpath(filepath)}.mpisparse")
