"""mpisparse train: trains, reports, checkpoints, survives being killed."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import torch

import mpisparse
from mpisparse import checkpoint
from mpisparse.backends.device import local_device
from mpisparse.bench.recording import Recorder
from mpisparse.checkpoint import onefile, store
from mpisparse.comm.exchange import Exchange, end_job_on_uncaught_exception, library, local_rank
from mpisparse.core.step import Clock
from mpisparse.errors import CheckpointError, ConfigurationError, LockError
from mpisparse.runtime import slurm
from mpisparse.runtime.board import Board
from mpisparse.runtime.evaluate import check_steering, evaluate, reached, steering
from mpisparse.runtime.lock import RunLock, take
from mpisparse.runtime.metrics import MetricsFile, StepRows, step_fields, write_whole
from mpisparse.runtime.output import RankOutput
from mpisparse.runtime.place import TRAINED, check_place
from mpisparse.runtime.progress import Progress, Silent, facts_of, human_bytes, make_progress, own_facts
from mpisparse.runtime.schedule import Order, Position, density_at, lr_factor
from mpisparse.runtime.settings import FIXED, Settings, differences, read_file, to_toml
from mpisparse.runtime.signals import INTERRUPTED, StopRequest
from mpisparse.runtime.workloads import Data, Examples, Task, build, hold_out
from mpisparse.runtime.workloads.split import difference, split_of
from mpisparse.schemes import takes

DEFAULT_EPOCHS = 5
HELD_OUT = 2**40  # added to the seed: an order of the validation data, for the scheme that learns from it


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
        self.lock = lock_together(settings, stop)  # first of all: nothing is read or written beside another run
        self.metrics: MetricsFile | None = None
        self.progress: Progress = Silent()
        self.writer: Board | None = None
        self.saving: checkpoint.Saving | None = None
        try:
            self._set_up(settings, stop)
        except BaseException:
            self.close()
            raise

    # Setting up

    def _set_up(self, settings: Settings, stop: StopRequest) -> None:
        self.settings = settings
        self.stop = stop
        self.model, self.data, self.task = build_together(settings)
        self.steering = steering(settings, self.data)
        self.batch: tuple[Any, Any] = (None, None)  # the last one, for schemes that probe the loss
        self.sync = self.make_sync()
        self.rows = StepRows(self.sync.gather_floats, self.sync._exchange.gather_texts)
        self.device = self.sync.residual.device
        self.density = self.sync.density
        self.optimizer = make_optimizer(self.model, settings)
        mpisparse.attach(self.optimizer, self.sync)
        self.order = Order(len(self.data.train), settings.seed)
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
        self.changes: list[str] = []  # of settings, each with the step from which on it holds
        self.changed_now: list[str] = []
        self.resumed = self._resume()
        self.total = self._total_steps()
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
            there = name == "probe" or self.steering is not None
            if takes(self.settings.scheme, name) and options.setdefault(name, there) in (True, False):
                options[name] = loss if options[name] else None
        return options

    def _probe(self) -> torch.Tensor:
        """The loss of the last batch."""
        inputs, targets = self.batch
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=self.settings.bf16):
            return self.task.loss(self.model(inputs), targets)

    def _held_out(self) -> torch.Tensor:
        """The loss of a batch of validation data, which no rank trains on; a rank's own, where there are enough."""
        assert self.steering is not None
        examples, rank, size = self.steering, self.sync.rank, self.sync.size
        order = Order(len(examples), self.settings.seed + HELD_OUT)
        share = min(2 * self.settings.batch_size, len(examples) // size)
        if share == 0:  # fewer examples than ranks
            share, rank, size = 1, self.sync.rank % len(examples), len(examples)
        epoch, place = divmod(self.step, order.steps_an_epoch(share, size))
        indices, _ = order.take(Position(epoch, place * share * size), share, rank, size)
        inputs, targets = examples.batch(indices, seed=order.seed, epoch=epoch, train=False)
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
        held = len(self.data.validation) if self.data.validation is not None and self.data.held_out else 0
        told = f", of which --validation holds out {held}" if held else ""
        count = self.order.count + held
        return ConfigurationError(f"a step takes {needed} examples, the data has {count}{told}; lower --batch-size")

    @property
    def checkpoints(self) -> Path:
        """Where this run's checkpoints are."""
        return self.out / "checkpoints"

    def _resume(self) -> bool:
        """Take up where a checkpoint left off, as --resume says; collective."""
        mode, forced = self.settings.resume, False
        if mode == "force" or mode.startswith("force:"):
            mode, forced = mode.removeprefix("force").removeprefix(":") or "auto", True
        named = None if mode in ("auto", "never") else Path(mode)
        if named is not None and (named / "checkpoints").is_dir():
            named = named / "checkpoints"
        error: ConfigurationError | None = None
        if mode == "never" and ((self.out / "metrics.jsonl").exists() or store.found(self.checkpoints)):
            error = ConfigurationError(
                f"{self.out} holds a run already; choose another --out, or resume it with --resume auto"
            )
        elif named is not None and not named.is_dir():
            error = ConfigurationError(f"there is no directory {named} to resume from")
        self.sync.check_together(error)
        if mode == "never":
            return False
        if self.lock is not None:
            with contextlib.suppress(OSError):  # what killed runs left; should it stay, the next checkpoint tells
                store.sweep(self.checkpoints)
        begun = self.sync.agree_any(bool(store.found(self.checkpoints)))  # then it goes on from its own
        source = self.checkpoints if named is None or begun else named
        extra: dict[str, Any] = {}
        set_here = [{key: group[key] for key in self.optimizer.defaults} for group in self.optimizer.param_groups]
        step = checkpoint.load(
            source, model=self.model, optimizer=self.optimizer, sync=self.sync, extra=extra, check_extra=check_place
        )
        if step is None:
            missing = None if mode == "auto" else ConfigurationError(f"{source} has no whole checkpoint to resume from")
            self.sync.check_together(missing)
            return False
        foreign = None if set(extra) >= TRAINED else ConfigurationError(f"{source} was not written by mpisparse train")
        self.sync.check_together(foreign)
        self.step, self.seconds = step, float(extra["seconds"])
        self.received, self.dense = float(extra["received"]), float(extra["dense"])
        self.position = Position(int(extra["epoch"]), int(extra["offset"]))
        self.metric = None if extra["metric"] is None else float(extra["metric"])
        self.done = self.metric is not None and reached(self.metric, self.settings.target, self.task)
        self.sync.density = self.density
        changed = self._changed_settings(source, extra, forced=forced)
        other = difference(extra.get("split"), split_of(self.data, self.settings.seed))
        refused = other is not None and not forced
        self.sync.check_together(ConfigurationError(f"the run in {source} {other}") if refused else None)
        if other is not None:
            note = f"from step {self.step} on: other validation data, of which some was trained on before"
            self.changed_now.append(note)
            self.changes.append(note)
        if forced:
            for group, own in zip(self.optimizer.param_groups, set_here, strict=True):
                group.update(own)
            if "seed" in changed:
                self._seed(self.settings.seed * 1_000_003 + self.sync.rank + 1)
        return True

    def _changed_settings(self, source: Path, extra: dict[str, Any], *, forced: bool) -> dict[str, tuple[Any, Any]]:
        """Compare the settings with those of the checkpoint and note what has changed; collective.

        Raises on all ranks for those that the checkpoint would override, unless forced.
        """
        saved = extra.get("settings")
        changed = differences(saved if isinstance(saved, dict) else self._guessed_settings(source), self.settings)
        error: ConfigurationError | None = None
        for name, (before, now) in changed.items():
            if name in FIXED and not forced and error is None:
                error = ConfigurationError(
                    f"{source} was written with {name} {before}, this run has {now}; pass "
                    f"--{name.replace('_', '-')} {before}, or --resume {self._force()} to go on with {now}"
                )
        self.sync.check_together(error)
        self.changed_now = [
            f"from step {self.step} on: {name} {json.dumps(now)}, before {json.dumps(before, default=str)}"
            for name, (before, now) in changed.items()
        ]
        self.changes = [*map(str, extra.get("changes") or ()), *self.changed_now]
        return changed

    def _force(self) -> str:
        return "force" if self.settings.resume == "auto" else f"force:{self.settings.resume}"

    def _guessed_settings(self, source: Path) -> dict[str, Any]:
        """Settings of a checkpoint that tells none: those in the restored optimizer, and a seed in the run's config.toml."""
        group = self.optimizer.param_groups[0]
        known: dict[str, Any] = {name: group[name] for name in ("momentum", "weight_decay") if name in group}
        with contextlib.suppress(ConfigurationError):
            config = read_file(source.parent / "config.toml")
            known |= {"seed": config["seed"]} if "seed" in config else {}
        return known

    def _open_metrics(self) -> MetricsFile | None:
        error: ConfigurationError | None = None
        metrics = None
        if self.sync.rank == 0:
            try:
                self.out.mkdir(parents=True, exist_ok=True)
                if not self.resumed or self._goes_on():  # a run that has ended uses no new settings
                    write_whole(self.out / "config.toml", to_toml(self.settings, self.changes))
                metrics = MetricsFile(self.out / "metrics.jsonl")
            except OSError as caught:
                error = ConfigurationError(f"cannot write to {self.out}: {caught.strerror}")
        self.sync.check_together(error)
        return metrics

    def _open_tensorboard(self) -> Board | None:
        if not self.settings.tensorboard:
            return None
        error, writer = None, None
        if self.sync.rank == 0:
            try:
                writer = Board(self.out / "tensorboard")
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
        for change in self.changed_now if self._goes_on() else ():
            self._event("settings", change)
        if self.lock is not None and self.lock.taken_from:
            self._event("lock", f"taken over from {self.lock.taken_from}, which no longer runs")
        self.model.train()
        while self._goes_on():
            asked = self._one_step()
            done = self.step % self._eval_every() == 0 or self.step == self.total
            self.done = hit = self._evaluate() if done else False
            if hit or self.step == self.total:
                self._evaluate_at_the_end()
            due = self.settings.checkpoint_every is not None and self.step % self.settings.checkpoint_every == 0
            if asked or hit or due or self.step == self.total:
                self._checkpoint(wait=asked or hit or self.step == self.total)
            if asked:
                why = "the job's time limit is near" if self.deadline.reached else "asked to stop"
                again = "the same command" if self.settings.resume != "never" else "it without --resume never"
                where = "the last checkpoint that was written" if self.failed else f"step {self.step}"
                self._event("signal", f"{why}; start {again} again to go on from {where}")
                return 1 if self.failed else INTERRUPTED
            if hit:
                self._event("stop", f"target {self.settings.target:g} reached")
        self._finish()
        return int(self.failed)

    def _goes_on(self) -> bool:
        return self.step < self.total and not self.done

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
        lost = self.lock is not None and self.lock.lost
        flags = (2 if lost else self.deadline.near() or self.stop.asked, self.saving is None or self.saving.written)
        rows = self.rows.gather([*flags, loss, stats.bytes_sent, stats.bytes_received], seconds)
        if bool((rows[:, 0] > 1).any()):
            self._check_lock()
        self.seconds += float(rows[:, 5:].sum(axis=1).max())
        dense = 2 * 4 * self.sync.residual.numel() * (self.sync.size - 1) // self.sync.size
        self.received += float(rows[:, 4].mean())
        self.dense += dense
        if self.metrics is not None:
            fields = step_fields(stats, self.rows.phases, rows[:, 2:])
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
            self.progress.step(
                self.step, facts_of(fields, dense, f"{self.settings.evaluate_on} {self.task.metric}", self.metric)
            )
        else:
            self.progress.step(self.step, own_facts(loss, seconds))
        if self.saving is not None and bool(rows[:, 1].all()):
            self._finish_saving()
        return bool(rows[:, 0].any())

    def _evaluate(self) -> bool:
        """Measure on the data that steers and tell the scheme; collective. Returns whether the target is reached."""
        if self.steering is None:
            return False
        self.metric = self._measure(self.settings.evaluate_on, self.steering)
        self._observe(self.metric)
        return reached(self.metric, self.settings.target, self.task)

    def _evaluate_at_the_end(self) -> None:
        """Measure on the data that has not steered; collective."""
        for name, examples in (("validation", self.data.validation), ("test", self.data.test)):
            if name != self.settings.evaluate_on and examples is not None:
                self._measure(name, examples)

    def _measure(self, name: str, examples: Examples) -> float:
        """Report loss and metric on these examples; returns the metric. Collective."""
        with self.sync.global_weights():
            loss, metric = evaluate(self.model, examples, self.task, self.sync, self.settings.seed)
        if self.metrics is not None:
            names = {"metric_name": self.task.metric, "higher_is_better": self.task.higher_is_better}
            self.metrics.write("eval", step=self.step, time=self.seconds, data=name, loss=loss, metric=metric, **names)
            self._tensorboard({f"{name} loss": loss, f"{name} {self.task.metric}": metric})
        self.progress.say(f"step {self.step}/{self.total}  {name} loss {loss:.4f}  {self.task.metric} {metric:.4f}")
        return metric

    def _observe(self, metric: float) -> None:
        """Tell the scheme if it listens, and say what it changes; collective."""
        if not self.sync.observes:
            return
        before = self.sync.k
        self.sync.observe(metric, higher_is_better=self.task.higher_is_better)
        if self.sync.k != before:
            self._event("k", f"{'raised' if self.sync.k > before else 'lowered'} from {before:,} to {self.sync.k:,}")

    def _checkpoint(self, *, wait: bool) -> None:
        """Begin a checkpoint, and finish it unless it may be written in the background; collective."""
        self._finish_saving()
        self._check_lock()
        extra: dict[str, Any] = {"epoch": self.position.epoch, "offset": self.position.offset, "seconds": self.seconds}
        extra |= {"received": self.received, "dense": self.dense, "metric": self.metric}
        extra |= {"settings": dataclasses.asdict(self.settings), "changes": self.changes}
        extra["split"] = split_of(self.data, self.settings.seed)
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
        self._check_lock()
        saving, self.saving = self.saving, None
        try:
            self._event("checkpoint", str(saving.finish()))
            self.failed, self.saved = False, saving
        except CheckpointError as error:
            self.failed = True
            self._event("checkpoint failed", str(error))

    def _check_lock(self) -> None:
        """Raise LockError on all ranks if another run has taken the directory over; collective."""
        self.sync._exchange.raise_together(self.lock.loss() if self.lock is not None else None, LockError)

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
            self.writer.add(values, self.step)

    def close(self) -> None:
        """Close files and the bar, and give the directory free; local."""
        self.progress.close()
        if self.saving is not None:  # there was an error
            self.saving.abandon()
        if self.metrics is not None:
            self.metrics.close()
        if self.writer is not None:
            self.writer.close()
        if self.lock is not None:
            self.lock.release()


def lock_together(settings: Settings, stop: StopRequest) -> RunLock | None:
    """Take the lock of the run's directory, which rank 0 holds for all; collective."""
    exchange = Exchange()
    try:
        return take(Path(settings.out), exchange, stop, wait=settings.wait_for_lock)
    finally:
        exchange.close()


def build_together(settings: Settings) -> tuple[torch.nn.Module, Data, Task]:
    """Build model, data and task on every rank; an error on one is raised on all. Collective."""
    exchange, here = Exchange(), local_rank()
    error: ConfigurationError | None = None
    try:
        model, data, task = build(settings.model, settings.data, seed=settings.seed)
        data = hold_out(data, settings.validation, seed=settings.seed)
        check_steering(settings, data)
        sizes = [len(part) for part in (data.train, data.validation, data.test) if part is not None]
        built = model.to(local_device(here)) if settings.device == "cuda" else model, data, task
    except ConfigurationError as caught:
        error = caught
    exchange.raise_together(error)
    told = exchange.gather_texts(", ".join(map(str, sizes)))
    if told[exchange.rank] != told[0]:
        error = ConfigurationError(
            f"every rank must see the same data, which the runtime shares out: rank 0 has {told[0]} examples, this one "
            f"{told[exchange.rank]}; let the factory return all of it on every rank"
        )
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
