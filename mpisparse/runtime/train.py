"""mpisparse train: trains, reports, checkpoints, survives being killed."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mpisparse
from mpisparse import checkpoint
from mpisparse.checkpoint import onefile, store
from mpisparse.device import local_device
from mpisparse.errors import CheckpointError, ConfigurationError
from mpisparse.exchange import Exchange, end_job_on_uncaught_exception, library, local_rank
from mpisparse.parts import Clock
from mpisparse.runtime import slurm
from mpisparse.runtime.evaluate import evaluate, reached
from mpisparse.runtime.metrics import MetricsFile, step_fields
from mpisparse.runtime.output import RankOutput
from mpisparse.runtime.progress import facts_of, human_bytes, make_progress, own_facts
from mpisparse.runtime.recording import Recorder
from mpisparse.runtime.schedule import Order, Position, density_at, lr_factor
from mpisparse.runtime.settings import Settings, to_toml
from mpisparse.runtime.signals import INTERRUPTED, StopRequest
from mpisparse.runtime.workloads import Data, Task, build
from mpisparse.schemes import takes

EXCHANGE = (
    "wait", "predictor", "validate", "accumulate", "agree", "probe", "select", "unite", "reduce", "feedback", "publish",
    "adapt", "correct", "speculate",
)  # fmt: skip
PHASES = ("data", "compute", *EXCHANGE, "optimizer")
DEFAULT_EPOCHS = 5
HELD_OUT = 2**40  # added to the seed: an order of the training data beside the one that is trained on


def run(settings: Settings, stop: StopRequest) -> int:
    """Train as the settings say; collective. Returns the exit code: 0 when done, 85 when stopped by signal or clock."""
    end_job_on_uncaught_exception()
    with open_output(settings):
        trainer = Trainer(settings, stop)
        try:
            code = trainer.train()
        finally:
            trainer.close()
        trainer.sync.close()
        return code


def open_output(settings: Settings) -> RankOutput:
    """Check that the ranks see each other, and prepare where their output goes; collective."""
    exchange = Exchange()
    slurm.check_world(exchange.size, library()["name"])
    error: ConfigurationError | None = None
    try:
        output = RankOutput(exchange.rank, Path(settings.out) / "logs" if settings.log_ranks else None)
    except OSError as caught:
        error = ConfigurationError(f"cannot write to {settings.out}: {caught.strerror}")
    exchange.raise_together(error)
    exchange.close()
    return output


class Trainer:
    """One run: its objects, where it is, and what it writes."""

    def __init__(self, settings: Settings, stop: StopRequest) -> None:
        self.settings = settings
        self.stop = stop
        self.model, self.data, self.task = build_together(settings)
        self.batch: tuple[Any, Any] = (None, None)  # the last one, for schemes that probe the loss
        self.sync = self.make_sync()
        self.device = self.sync.residual.device
        self.density = self.sync.density
        self.optimizer = make_optimizer(self.model, settings)
        mpisparse.attach(self.optimizer, self.sync)
        self.order = Order(len(self.data.train), settings.seed)
        self.held_out = Order(len(self.data.train), settings.seed + HELD_OUT)
        self.position = Position()
        self.received = self.dense = 0.0
        self.step = 0
        self.done = False  # the target was reached
        self.metric: float | None = None  # of the last evaluation
        self.failed = False  # the last checkpoint could not be written
        self.seconds = 0.0
        self.sync.check_together(self._too_few_examples())
        self.sync.check_together(onefile.lacking() if settings.driver is not None else None)
        self._seed(settings.seed * 1_000_003 + self.sync.rank + 1)
        self.out = Path(settings.out)
        self.resumed = self._resume()
        self.total = self._total_steps()
        self.saving: checkpoint.Saving | None = None
        self.saved: checkpoint.Saving | None = None
        self.metrics = self._open_metrics()
        self.progress = make_progress(self.sync.rank, self.total, self.step, log_ranks=settings.log_ranks)
        self.writer = self._open_tensorboard()
        count = settings.record_gradients
        self.recorder: Recorder | None = None
        if count is not None:
            self.recorder = Recorder(self.out, self.model, count=count, scheme=settings.scheme)
            self.recorder.exchange.share_place(self.sync._exchange)
        watches = self.sync.rank == 0 and settings.stop_before > 0
        self.deadline = slurm.Deadline(slurm.end_time() if watches else None, settings.stop_before)

    # Setting up

    def make_sync(self) -> mpisparse.GradientSync:
        """The exchange that the settings name; collective."""
        settings = self.settings
        return mpisparse.GradientSync(
            self.model, scheme=settings.scheme, density=settings.density, codec=settings.codec, timeout=settings.timeout,
            run_directory=settings.out, **self._options(),
        )  # fmt: skip

    def _seed(self, seed: int) -> None:
        """Seed the global generators, which dropout and users' own code draw from, differently on every rank."""
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)

    def _options(self) -> dict[str, Any]:
        """The scheme's options, with the losses that it can look at unless told not to."""
        options = dict(self.settings.options)
        for name, loss in (("probe", self._probe), ("validation", self._held_out)):
            if takes(self.settings.scheme, name) and options.setdefault(name, True) in (True, False):
                options[name] = loss if options[name] else None
        return options

    def _probe(self) -> torch.Tensor:
        """The loss of the last batch."""
        inputs, targets = self.batch
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.settings.bf16):
            return self.task.loss(self.model(inputs), targets)

    def _held_out(self) -> torch.Tensor:
        """The loss of a batch of training data in an order of its own, so that it is not the one trained on."""
        share, size = min(2 * self.settings.batch_size, len(self.data.train) // self.sync.size), self.sync.size
        epoch, place = divmod(self.step, self.held_out.steps_an_epoch(share, size))
        indices, _ = self.held_out.take(Position(epoch, place * share * size), share, self.sync.rank, size)
        inputs, targets = self.data.train.batch(indices, seed=self.held_out.seed, epoch=epoch, train=False)
        return self.task.loss(self.model(inputs), targets)

    def _total_steps(self) -> int:
        """Where the run ends; epochs that are left count in steps of this number of ranks."""
        if self.settings.steps is not None:
            return self.settings.steps
        left = (self.settings.epochs or DEFAULT_EPOCHS) - self.position.epoch
        return self.step + max(0, left * self._steps_an_epoch() - self.position.offset // self._examples_a_step())

    def _examples_a_step(self) -> int:
        return self.settings.batch_size * self.settings.accumulation * self.sync.size

    def _steps_an_epoch(self) -> int:
        return self.order.steps_an_epoch(self.settings.batch_size * self.settings.accumulation, self.sync.size)

    def _too_few_examples(self) -> ConfigurationError | None:
        if self._steps_an_epoch() > 0:
            return None
        needed = self._examples_a_step()
        return ConfigurationError(f"a step takes {needed} examples, the data has {self.order.count}; lower --batch-size")

    @property
    def checkpoints(self) -> Path:
        """Where this run's checkpoints are."""
        return self.out / "checkpoints"

    def _resume(self) -> bool:
        """Take up where a checkpoint left off, as --resume says; collective."""
        mode = self.settings.resume
        named = None if mode in ("auto", "never") else Path(mode)
        if named is not None and (named / "checkpoints").is_dir():
            named = named / "checkpoints"
        error: ConfigurationError | None = None
        if mode == "never" and (self.out / "metrics.jsonl").exists():
            error = ConfigurationError(
                f"{self.out} holds a run already; choose another --out, or resume it with --resume auto"
            )
        elif named is not None and not named.is_dir():
            error = ConfigurationError(f"there is no directory {named} to resume from")
        self.sync.check_together(error)
        if mode == "never":
            return False
        begun = self.sync.agree_any(bool(store.found(self.checkpoints)))  # then it goes on from its own
        source = self.checkpoints if named is None or begun else named
        extra: dict[str, Any] = {}
        step = checkpoint.load(source, model=self.model, optimizer=self.optimizer, sync=self.sync, extra=extra)
        if step is None:
            missing = None if mode == "auto" else ConfigurationError(f"{source} has no whole checkpoint to resume from")
            self.sync.check_together(missing)
            return False
        known = {"seconds", "received", "dense", "epoch", "offset", "metric"}
        foreign = None if known <= set(extra) else ConfigurationError(f"{source} was not written by mpisparse train")
        self.sync.check_together(foreign)
        self.step, self.seconds = step, float(extra["seconds"])
        self.received, self.dense = float(extra["received"]), float(extra["dense"])
        self.position = Position(int(extra["epoch"]), int(extra["offset"]))
        self.metric = None if extra["metric"] is None else float(extra["metric"])
        self.done = self.metric is not None and reached(self.metric, self.settings.target, self.task)
        self.sync.density = self.density
        return True

    def _open_metrics(self) -> MetricsFile | None:
        error: ConfigurationError | None = None
        metrics = None
        if self.sync.rank == 0:
            try:
                self.out.mkdir(parents=True, exist_ok=True)
                (self.out / "config.toml").write_text(to_toml(self.settings), encoding="utf-8")
                metrics = MetricsFile(self.out / "metrics.jsonl")
            except OSError as caught:
                error = ConfigurationError(f"cannot write to {self.out}: {caught.strerror}")
        self.sync.check_together(error)
        return metrics

    def _open_tensorboard(self) -> Any:
        if not self.settings.tensorboard:
            return None
        error, writer = None, None
        if self.sync.rank == 0:
            try:
                from torch.utils.tensorboard import SummaryWriter

                writer = SummaryWriter(str(self.out / "tensorboard"))
            except ImportError:
                error = ConfigurationError("--tensorboard needs the extra: pip install 'mpisparse[tensorboard]'")
        self.sync.check_together(error)
        return writer

    # Training

    def train(self) -> int:
        """Run to the end, to the target, or to a signal."""
        self._event(
            "resume" if self.resumed else "start", f"{self.sync.size} ranks, {self.sync.residual.numel():,} parameters"
        )
        self.model.train()
        while self.step < self.total and not self.done:
            asked = self._one_step()
            done = self.step % self._eval_every() == 0 or self.step == self.total
            self.done = hit = self._evaluate() if done else False
            due = self.settings.checkpoint_every is not None and self.step % self.settings.checkpoint_every == 0
            if asked or hit or due or self.step == self.total:
                self._checkpoint(wait=asked or hit or self.step == self.total)
            if asked:
                why = "the job's time limit is near" if self.deadline.reached else "asked to stop"
                again = "the same command" if self.settings.resume != "never" else "it without --resume never"
                self._event("signal", f"{why}; start {again} again to go on from step {self.step}")
                return 1 if self.failed else INTERRUPTED
            if hit:
                self._event("stop", f"target {self.settings.target:g} reached")
        self._finish()
        return int(self.failed)

    def _eval_every(self) -> int:
        return self.settings.eval_every or self._steps_an_epoch()

    def _one_step(self) -> bool:
        """Do one optimizer step and report it; collective. Returns whether a rank was asked to stop, or time is short."""
        settings = self.settings
        factor = lr_factor(self.step, self.total, settings.schedule, settings.warmup, settings.drop_at)
        for group in self.optimizer.param_groups:
            group["lr"] = settings.lr * factor
        if settings.density_warmup:
            self.sync.density = density_at(self.step, self.density, settings.density_from, settings.density_warmup)
        clock = Clock()
        loss = self._accumulate(clock)
        self._record()
        self.sync.note_loss(loss)
        self.optimizer.step()  # exchanges first
        clock.lap("optimizer")
        self.step += 1
        exchange = self.sync.stats.seconds
        clock.seconds["optimizer"] -= sum(exchange.values())
        seconds = {**clock.seconds, **exchange}
        return self._report(loss, settings.lr * factor, seconds)

    def _accumulate(self, clock: Clock) -> float:
        """Forward and backward over this step's micro-batches; returns their mean loss."""
        settings, sync = self.settings, self.sync
        self.optimizer.zero_grad()
        total = 0.0
        examples, epoch = self.order.take(self.position, settings.batch_size * settings.accumulation, sync.rank, sync.size)
        for indices in np.split(examples, settings.accumulation):
            inputs, targets = self.data.train.batch(indices, seed=settings.seed, epoch=epoch, train=True)
            inputs, targets = inputs.to(self.device), targets.to(self.device)
            clock.lap("data")
            with torch.autocast(self.device.type, dtype=torch.bfloat16, enabled=settings.bf16):
                loss = self.task.loss(self.model(inputs), targets) / settings.accumulation
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            self.batch = inputs, targets
            clock.lap("compute")
        if settings.clip is not None:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
            clock.lap("compute")
        return total

    def _record(self) -> None:
        """Write this step's gradients if they are asked for; collective. A full disk does not end the run."""
        recorder = self.recorder
        if recorder is None:
            return
        try:
            if recorder.left:
                with self.sync.unwatched("recording gradients"):
                    recorder.record(self.step + 1)
            if recorder.left:
                return
            self._event("recorded", f"gradients of {recorder.count} steps, in {recorder.directory}")
        except CheckpointError as error:
            self._event("recording failed", str(error))
        recorder.close()
        self.recorder = None

    def _report(self, loss: float, lr: float, seconds: dict[str, float]) -> bool:
        """Gather what ranks have to say of a step, write it on rank 0, finish a checkpoint that is written; collective."""
        stats = self.sync.stats
        flags = (self.deadline.near() or self.stop.asked, self.saving is None or self.saving.written)
        row = [*flags, loss, stats.bytes_sent, stats.bytes_received, *(seconds.get(phase, 0.0) for phase in PHASES)]
        rows = self.sync.gather_floats(np.array(row, dtype=np.float64))
        self.seconds += float(rows[:, 5:].sum(axis=1).max())
        dense = 2 * 4 * self.sync.residual.numel() * (self.sync.size - 1) // self.sync.size
        self.received += float(rows[:, 4].mean())
        self.dense += dense
        if self.metrics is not None:
            fields = step_fields(stats, list(PHASES), rows[:, 2:])
            if self.step % self.settings.log_every == 0:
                every = {"every": self.settings.log_every} if self.settings.log_every > 1 else {}
                place = {
                    "step": self.step,
                    "epoch": self.position.epoch,
                    "time": self.seconds,
                    "lr": lr,
                    "bytes_dense": dense,
                }
                self.metrics.write("step", **place, **fields, **every)
                self._tensorboard({"loss": fields["loss"]["mean"], "density": stats.density, "lr": lr})
            self.progress.step(self.step, facts_of(fields, dense, self.task.metric, self.metric))
        else:
            self.progress.step(self.step, own_facts(loss, seconds))
        if self.saving is not None and bool(rows[:, 1].all()):
            self._finish_saving()
        return bool(rows[:, 0].any())

    def _evaluate(self) -> bool:
        """Measure on the test data and tell the scheme; collective. Returns whether the target is reached."""
        with self.sync.global_weights():
            loss, metric = evaluate(self.model, self.data, self.task, self.sync, self.settings.seed)
        self.metric = metric
        self._observe(metric)
        if self.metrics is not None:
            names = {"metric_name": self.task.metric, "higher_is_better": self.task.higher_is_better}
            self.metrics.write("eval", step=self.step, time=self.seconds, loss=loss, metric=metric, **names)
            self._tensorboard({"test loss": loss, self.task.metric: metric})
        self.progress.say(f"step {self.step}/{self.total}  test loss {loss:.4f}  {self.task.metric} {metric:.4f}")
        return reached(metric, self.settings.target, self.task)

    def _observe(self, metric: float) -> None:
        """Tell the scheme, and say what it changes; collective."""
        before = self.sync.k
        self.sync.observe(metric, higher_is_better=self.task.higher_is_better)
        if self.sync.k != before:
            self._event("k", f"{'raised' if self.sync.k > before else 'lowered'} from {before:,} to {self.sync.k:,}")

    def _checkpoint(self, *, wait: bool) -> None:
        """Begin a checkpoint, and finish it unless it may be written in the background; collective."""
        self._finish_saving()
        extra: dict[str, Any] = {"epoch": self.position.epoch, "offset": self.position.offset, "seconds": self.seconds}
        extra |= {"received": self.received, "dense": self.dense, "metric": self.metric}
        background = self.settings.background and not wait
        try:
            self.saving = checkpoint.begin_save(
                self.checkpoints, step=self.step, model=self.model, optimizer=self.optimizer, sync=self.sync,
                extra=extra, keep=self.settings.keep, background=background, last=self.saved,
                driver=self.settings.driver,
            )  # fmt: skip
        except CheckpointError as error:
            self.failed = True
            self._event("checkpoint failed", str(error))
            return
        if not background:
            self._finish_saving()

    def _finish_saving(self) -> None:
        """Make the checkpoint that is being written whole, if there is one; collective. A full disk does not end the run."""
        if self.saving is None:
            return
        saving, self.saving = self.saving, None
        try:
            self._event("checkpoint", str(saving.finish()))
            self.failed, self.saved = False, saving
        except CheckpointError as error:
            self.failed = True
            self._event("checkpoint failed", str(error))

    def _finish(self) -> None:
        saved = f"{human_bytes(self.received)} received a rank"
        if self.dense:
            saved += f", {100 * (1 - self.received / self.dense):.1f} % fewer than dense"
        self._event("end", f"{self.step} steps in {self.seconds:.1f} s; {saved}")

    def _event(self, event: str, text: str) -> None:
        if self.metrics is not None:
            self.metrics.write("event", step=self.step, time=self.seconds, event=event, text=text)
        self.progress.say(f"{event}: {text}")

    def _tensorboard(self, values: dict[str, float]) -> None:
        if self.writer is not None:
            for name, value in values.items():
                self.writer.add_scalar(name, value, self.step)

    def close(self) -> None:
        """Close files and the bar; local."""
        self.progress.close()
        if self.metrics is not None:
            self.metrics.close()
        if self.writer is not None:
            self.writer.close()


def build_together(settings: Settings) -> tuple[torch.nn.Module, Data, Task]:
    """Build model, data and task on every rank; an error on one is raised on all. Collective."""
    exchange, here = Exchange(), local_rank()
    error: ConfigurationError | None = None
    try:
        model, data, task = build(settings.model, settings.data, seed=settings.seed)
        built = model.to(local_device(here)) if settings.device == "cuda" else model, data, task
    except ConfigurationError as caught:
        error = caught
    exchange.raise_together(error)
    exchange.close()
    return built


def make_optimizer(model: torch.nn.Module, settings: Settings) -> torch.optim.Optimizer:
    """The optimizer that the settings name."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if settings.optimizer == "sgd":
        nesterov = settings.momentum > 0
        return torch.optim.SGD(
            parameters, lr=settings.lr, momentum=settings.momentum, weight_decay=settings.weight_decay, nesterov=nesterov,
            foreach=False,
        )  # fmt: skip
    kind = torch.optim.Adam if settings.optimizer == "adam" else torch.optim.AdamW
    return kind(parameters, lr=settings.lr, weight_decay=settings.weight_decay)
