"""What a run reports: metrics.jsonl, TensorBoard events and progress. Only rank 0 writes files."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpisparse.arrays import Doubles
from mpisparse.errors import ConfigurationError
from mpisparse.runtime.board import Board
from mpisparse.runtime.metrics import MetricsFile, step_fields, write_whole
from mpisparse.runtime.parts import RunParts
from mpisparse.runtime.progress import Progress, Silent, make_progress, own_facts, step_facts
from mpisparse.runtime.run_state import RunState


class Journal:
    """Reports the steps, evaluations and events of a run. Opening it is collective, all else local."""

    def __init__(self, parts: RunParts, state: RunState, total: int, config: str | None) -> None:
        """`total`: the last step of the run. `config`: what to write to config.toml, if anything."""
        self.settings, self.task, self.sync = parts.settings, parts.task, parts.sync
        self.state, self.total = state, total
        self.out = Path(self.settings.out)
        self.progress: Progress = Silent()
        self.metrics: MetricsFile | None = None
        self.board: Board | None = None
        try:
            self._open_metrics(config)
            self._open_board()
            self.progress = make_progress(self.sync.rank, total, state.step, log_ranks=self.settings.log_ranks)
        except BaseException:
            self.close()
            raise

    def _open_metrics(self, config: str | None) -> None:
        error: ConfigurationError | None = None
        if self.sync.rank == 0:
            try:
                self.out.mkdir(parents=True, exist_ok=True)
                if config is not None:
                    write_whole(self.out / "config.toml", config)
                self.metrics = MetricsFile(self.out / "metrics.jsonl")
            except OSError as caught:
                error = ConfigurationError(f"cannot write to {self.out}: {caught.strerror}")
        self.sync.check_together(error)

    def _open_board(self) -> None:
        error: ConfigurationError | None = None
        if self.sync.rank == 0 and self.settings.tensorboard:
            try:
                self.board = Board(self.out / "tensorboard")
            except ImportError:
                error = ConfigurationError("--tensorboard needs the extra: pip install 'mpisparse[tensorboard]'")
        self.sync.check_together(error)

    def take_over(self) -> None:
        """Report from now on what rank 0 has reported, which is dead; local. Without files if they cannot be opened."""
        if self.metrics is not None:
            return
        try:
            self.metrics = MetricsFile(self.out / "metrics.jsonl")
            if self.settings.tensorboard:
                self.board = Board(self.out / "tensorboard")
        except (OSError, ImportError) as error:
            warnings.warn(f"{self.out}: {error}; this run's metrics end here", stacklevel=2)
        self.progress.close()
        self.progress = make_progress(0, self.total, self.state.step, log_ranks=self.settings.log_ranks)

    def event(self, event: str, text: str) -> None:
        """Report an event."""
        if self.metrics is not None:
            self.metrics.write("event", step=self.state.step, time=self.state.seconds, event=event, text=text)
        self.progress.say(f"{event}: {text}")

    def step(self, lr: float, dense: int, phases: Sequence[str], by_rank: Doubles) -> None:
        """Report a step on rank 0; `by_rank` as `step_fields` takes it, `dense` bytes in a dense all-reduce."""
        if self.metrics is None:
            return
        settings, state, stats = self.settings, self.state, self.sync.stats
        fields = step_fields(stats, list(phases), by_rank)
        if state.step % settings.log_every == 0:
            every = {"every": settings.log_every} if settings.log_every > 1 else {}
            when: dict[str, Any] = {"step": state.step, "epoch": state.position.epoch, "time": state.seconds}
            self.metrics.write("step", **when, lr=lr, bytes_dense=dense, **fields, **every)
            self._add_to_board({"loss": fields["loss"]["mean"], "density": stats.density, "lr": lr})
        metric = f"{settings.evaluate_on} {self.task.metric}"
        self.progress.step(state.step, step_facts(fields, dense, metric, state.metric))

    def own_step(self, loss: float, seconds: dict[str, float]) -> None:
        """Report a step in the log of a rank other than 0."""
        if self.metrics is None:
            self.progress.step(self.state.step, own_facts(loss, seconds))

    def evaluation(self, data: str, loss: float, metric: float) -> None:
        """Report an evaluation."""
        state, task = self.state, self.task
        if self.metrics is not None:
            names = {"metric_name": task.metric, "higher_is_better": task.higher_is_better}
            self.metrics.write("eval", step=state.step, time=state.seconds, data=data, loss=loss, metric=metric, **names)
            self._add_to_board({f"{data} loss": loss, f"{data} {task.metric}": metric})
        self.progress.say(f"step {state.step}/{self.total}  {data} loss {loss:.4f}  {task.metric} {metric:.4f}")

    def _add_to_board(self, values: dict[str, float]) -> None:
        if self.board is not None:
            self.board.add(values, self.state.step)

    def close(self) -> None:
        """Close the files and the progress bar."""
        self.progress.close()
        if self.metrics is not None:
            self.metrics.close()
        if self.board is not None:
            self.board.close()
