"""mpisparse train: the training loop, with evaluation and checkpoints."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

import mpisparse
from mpisparse.checkpoint import onefile, store
from mpisparse.comm.survival import Shrunk, in_words
from mpisparse.comm.transport import end_job_on_uncaught_exception
from mpisparse.core.step import Clock
from mpisparse.errors import CheckpointError, ConfigurationError
from mpisparse.plan.candidates import named
from mpisparse.runtime.evaluate import Evaluations, reached
from mpisparse.runtime.journal import Journal
from mpisparse.runtime.lock import inherit
from mpisparse.runtime.metrics import BYTES, StepRows
from mpisparse.runtime.output import RankOutput
from mpisparse.runtime.parts import RunParts
from mpisparse.runtime.progress import compared_with_dense, human_bytes
from mpisparse.runtime.recording import Recorder
from mpisparse.runtime.resume import Resumed, resume
from mpisparse.runtime.run_checkpoints import RunCheckpoints
from mpisparse.runtime.run_state import RunState
from mpisparse.runtime.schedule import Order, lr_factor
from mpisparse.runtime.scheme_losses import SchemeLosses
from mpisparse.runtime.settings import Settings
from mpisparse.runtime.settings_file import to_toml
from mpisparse.runtime.setup import build_together, lock_together, make_optimizer, open_output, seed_rank
from mpisparse.schemes import takes
from mpisparse.schemes.falling import density_at
from mpisparse.stopping import INTERRUPTED, Deadline, StopRequest, end_time

DEFAULT_EPOCHS = 5
CHOICES = "choices.jsonl"  # in the run's directory: what a scheme that chooses has chosen


def run(settings: Settings, stop: StopRequest) -> int:
    """Train with these settings; return the exit code: 0 when done, 85 when stopped by a signal or the clock. Collective."""
    end_job_on_uncaught_exception()
    with open_output(settings) as output:
        trainer = Trainer(settings, stop, output)
        try:
            code = trainer.train()
        finally:
            trainer.close()
        trainer.sync.close()
        return code


class Trainer:
    """One run: its parts, its state, and the loop over its steps."""

    def __init__(self, settings: Settings, stop: StopRequest, output: RankOutput | None = None) -> None:
        self.output = output
        self.lock = lock_together(settings, stop)  # before anything is read or written: another run may be active
        self.journal: Journal | None = None
        self.checkpoints: RunCheckpoints | None = None
        try:
            self._set_up(settings, stop)
        except BaseException:
            self.close()
            raise

    # Set-up

    def _set_up(self, settings: Settings, stop: StopRequest) -> None:
        self.settings, self.stop, self.out = settings, stop, Path(settings.out)
        self.state = RunState()
        self.model, self.data, self.task = build_together(settings)
        self.losses = SchemeLosses(settings, self.model, self.data, self.task, self.state)
        self.sync = self.make_sync()
        self.losses.rank, self.losses.size = self.sync.rank, self.sync.size
        self.underway, self.ready = 0, False  # steps begun and not counted yet; whether all is set up
        if settings.on_failure != "abort":
            self.sync.on_shrink(self._shrunk)
            self.token = max(self.sync.gather_texts("" if self.lock is None else self.lock.token))
        self.rows = StepRows(self.sync.gather_floats, self.sync.gather_texts)
        self.density = self.sync.density  # the final one, after density warm-up
        self.device, self.elements = self.sync._layout.device, self.sync._layout.size  # drift computes sync.residual
        self.optimizer = make_optimizer(self.model, settings)
        mpisparse.attach(self.optimizer, self.sync)
        self.order = Order(len(self.data.train), settings.seed)
        self.sync.check_together(self._too_few_examples())
        self.sync.check_together(onefile.lacking() if settings.driver is not None else None)
        seed_rank(settings.seed, self.sync.rank)
        parts = RunParts(settings, self.model, self.data, self.task, self.sync, self.optimizer)
        self.resumed = self._resume(parts)
        self.done = reached(self.state.metric, settings.target, self.task)
        self.total = self._total_steps()
        # A run that has already ended uses no new settings, so its config.toml stays.
        config = to_toml(settings, self.changes) if self.resumed is None or self._unfinished() else None
        self.journal = Journal(parts, self.state, self.total, config)
        self.checkpoints = RunCheckpoints(parts, self.journal, self.lock)
        self.evaluations = Evaluations(parts, self.journal, self.state)
        self.recorder = self._make_recorder()
        self.choice = ""  # of scheme auto, in the last step
        self.deadline = self._make_deadline()
        self.ready = True
        if settings.on_failure != "abort":
            self._take_over()

    def make_sync(self) -> mpisparse.GradientSync:
        """Create the gradient exchange that the settings name. Collective."""
        if not takes(self.settings.scheme, "log"):
            return self._sync_with()
        log = self.out / CHOICES
        if mpisparse.rank() == 0 and not store.found(self.out / "checkpoints"):
            log.unlink(missing_ok=True)  # of a run that has nothing to go on with
        try:
            return self._sync_with(log=str(log))
        except ConfigurationError as error:
            if f"log: {log}" not in str(error):
                raise
            return self._sync_with()  # resume() says whose run it is, or goes on without a log

    def _sync_with(self, **options: str) -> mpisparse.GradientSync:
        settings = self.settings
        return mpisparse.GradientSync(
            self.model, scheme=settings.scheme, density=settings.density, codec=settings.codec, timeout=settings.timeout,
            run_directory=settings.out, on_failure=settings.on_failure, mirror=settings.mirror,
            **{**options, **self.losses.options()},
        )  # fmt: skip

    def _resume(self, parts: RunParts) -> Resumed | None:
        resumed = resume(parts)
        if resumed is not None:
            self.state = self.losses.state = resumed.state
            if resumed.reseed:
                seed_rank(self.settings.seed, self.sync.rank)
        return resumed

    def _make_recorder(self) -> Recorder | None:
        count = self.settings.record_gradients
        if count is None:
            return None
        recorder = Recorder(self.out, self.model, count=count, scheme=self.settings.scheme)
        recorder.exchange.share_place(self.sync._exchange)
        return recorder

    def _make_deadline(self) -> Deadline:
        """Rank 0 watches the time limit of the Slurm job."""
        watches = self.sync.rank == 0 and self.settings.stop_before > 0
        return Deadline(end_time() if watches else None, self.settings.stop_before)

    def _too_few_examples(self) -> ConfigurationError | None:
        if self._steps_per_epoch() > 0:
            return None
        needed = self._share * self.sync.size
        held = len(self.data.validation) if self.data.validation is not None and self.data.held_out else 0
        note = f", {held} of them held out by --validation" if held else ""
        count = self.order.count + held
        return ConfigurationError(f"a step needs {needed} examples, the data has {count}{note}; lower --batch-size")

    def _total_steps(self) -> int:
        """Return the step at which the run ends; remaining epochs are counted in steps of this number of ranks."""
        if self.settings.steps is not None:
            return self.settings.steps
        epochs, position = self.settings.epochs or DEFAULT_EPOCHS, self.state.position
        return self.state.step + self.underway + self.order.steps_left(position, epochs, self._share, self.sync.size)

    @property
    def _share(self) -> int:
        """Examples per rank and step."""
        return self.settings.batch_size * self.settings.accumulation

    def _steps_per_epoch(self) -> int:
        return self.order.steps_per_epoch(self._share, self.sync.size)

    @property
    def changes(self) -> list[str]:
        """Settings that changed since the run began, each with the step from which it holds."""
        return [] if self.resumed is None else self.resumed.changes

    # After a death

    def _shrunk(self, shrunk: Shrunk) -> None:
        """Ranks have died: the others share the coming examples, which follow those of the last batch. Local."""
        if self.ready:
            self._take_over()
            self._event("shrink", in_words(shrunk))

    def _take_over(self) -> None:
        """Count the steps that are left to the ranks that live, and do what rank 0 did, if that is this rank now. Local."""
        assert self.journal is not None
        assert self.checkpoints is not None
        self.total = self.journal.total = self._total_steps()
        if self.sync.rank != 0 or self.lock is not None:
            return
        self.lock = self.checkpoints.lock = inherit(self.out, self.token)
        self.deadline = self._make_deadline()
        if self.output is not None:
            self.output.show()
        self.journal.take_over()

    # Training

    def train(self) -> int:
        """Train to the end, to the target, or until asked to stop; return the exit code. Collective."""
        assert self.checkpoints is not None
        self._announce()
        self.model.train()
        while self._unfinished():
            asked = self._one_step()
            step, last = self.state.step, self.state.step == self.total
            evaluates = last or step % (self.settings.eval_every or self._steps_per_epoch()) == 0
            self.done = evaluates and self.evaluations.steer()
            if self.done or last:
                self.evaluations.judge()
            every = self.settings.checkpoint_every
            if asked or self.done or last or (every is not None and step % every == 0):
                self.checkpoints.save(self.state, self.changes, wait=asked or self.done or last)
            if asked:
                return self._interrupted(failed=self.checkpoints.failed)
            if self.done:
                self._event("stop", f"target {self.settings.target:g} reached")
        self._summarize()
        return int(self.checkpoints.failed)

    def _unfinished(self) -> bool:
        return self.state.step < self.total and not self.done

    def _announce(self) -> None:
        what = f"{self.sync.size} ranks, {self.elements:,} parameters"
        if self.resumed is None:
            self._event("start", what)
        elif self._unfinished():
            self._event("resume", f"{what}, from step {self.state.step}, {self.resumed.path}")
        else:
            why = f"target {self.settings.target:g} is reached" if self.done else "to train on, raise --epochs or --steps"
            self._event("finished", f"this run is complete at step {self.state.step}, {self.resumed.path}; {why}")
        if self.resumed is not None and self._unfinished():
            for change in self.resumed.new_changes:
                self._event("settings", change)
        if self.lock is not None and self.lock.taken_from:
            self._event("lock", f"taken over from {self.lock.taken_from}, which no longer runs")

    def _interrupted(self, *, failed: bool) -> int:
        why = "the job's time limit is near" if self.deadline.reached else "asked to stop"
        again = "the same command" if self.settings.resume != "never" else "it without --resume never"
        where = "the last checkpoint that was written" if failed else f"step {self.state.step}"
        self._event("signal", f"{why}; start {again} again to continue from {where}")
        return 1 if failed else INTERRUPTED

    def _summarize(self) -> None:
        state = self.state
        text = f"{state.step} steps in {state.seconds:.1f} s; {human_bytes(state.received)} received per rank"
        if state.dense:
            text += f", {compared_with_dense(state.received, state.dense)}"
        if self.sync.exchanges_weights:
            text += "; the result is the global weights, which were evaluated and which mpisparse export writes"
        self._event("end", text)

    def _one_step(self) -> bool:
        """Do one optimizer step and report it; return whether to stop, by a signal or the time limit. Collective."""
        settings, state = self.settings, self.state
        lr = settings.lr * lr_factor(state.step, self.total, settings.schedule, settings.warmup, settings.drop_at)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        if settings.density_warmup:
            self.sync.density = density_at(state.step, self.density, settings.density_from, settings.density_warmup)
        clock, self.underway = Clock(), 1
        loss = self._accumulate(clock)
        self._record()
        self.sync.note_loss(loss)
        self.optimizer.step()  # exchanges gradients first
        clock.lap("optimizer")
        self._note_choice()
        state.step, self.underway = state.step + 1, 0
        exchange = self.sync.stats.seconds
        clock.seconds["optimizer"] -= sum(exchange.values())
        return self._report(loss, lr, {**clock.seconds, **exchange})

    def _accumulate(self, clock: Clock) -> float:
        """Run forward and backward over this step's micro-batches; return their mean loss."""
        settings, sync, device = self.settings, self.sync, self.device
        self.optimizer.zero_grad()
        total = 0.0
        examples, epoch = self.order.take(self.state.position, self._share, sync.rank, sync.size)
        for number, indices in enumerate(np.split(examples, settings.accumulation), 1):
            inputs, targets = self.data.train.batch(indices, seed=settings.seed, epoch=epoch, train=True)
            inputs, targets = inputs.to(device), targets.to(device)
            clock.lap("data")
            with torch.autocast(device.type, dtype=torch.bfloat16, enabled=settings.bf16):
                loss = self.task.loss(self.model(inputs), targets) / settings.accumulation
            with sync.no_sync() if sync.overlaps and number < settings.accumulation else nullcontext():
                loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
            self.losses.batch = inputs, targets
            clock.lap("compute")
        if settings.clip is not None:
            if sync.overlaps:
                sync.step()  # its mean is clipped; the optimizer's step exchanges nothing then
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.clip)
            clock.lap("compute")
        return total

    def _record(self) -> None:
        """Write this step's gradients if --record-gradients asks for them. Collective. A full disk does not end the run."""
        recorder = self.recorder
        if recorder is None:
            return
        try:
            if recorder.left:
                with self.sync.unwatched("recording gradients"):
                    recorder.record(self.state.step + 1)
            if recorder.left:
                return
            self._event("recorded", f"gradients of {recorder.count} steps, in {recorder.directory}")
        except CheckpointError as error:
            self._event("recording failed", str(error))
        recorder.close()
        self.recorder = None

    def _note_choice(self) -> None:
        """Report that scheme auto has changed the exchange."""
        before, self.choice = self.choice, named(self.sync.stats.details)
        if before and self.choice and before != self.choice:
            self._event("exchange", f"{self.choice} instead of {before}")

    def _report(self, loss: float, lr: float, seconds: dict[str, float]) -> bool:
        """Gather every rank's numbers of a step, report them, and finish a background checkpoint once it is written.

        Returns whether any rank was asked to stop. Collective.
        """
        assert self.journal is not None
        assert self.checkpoints is not None
        state, stats = self.state, self.sync.stats
        lost = self.lock is not None and self.lock.lost
        stop = 2 if lost else self.deadline.near() or self.stop.asked
        numbers = [stop, self.checkpoints.written, loss, *(getattr(stats, name) for name in BYTES)]
        by_rank = self.rows.gather(numbers, seconds)
        if bool((by_rank[:, 0] > 1).any()):
            self.checkpoints.check_lock()
        dense = 2 * 4 * self.elements * (self.sync.size - 1) // self.sync.size
        state.seconds += float(by_rank[:, len(numbers) :].sum(axis=1).max())
        state.received += float(by_rank[:, 4].mean())
        state.dense += dense
        self.journal.step(lr, dense, self.rows.phases, by_rank[:, 2:])
        self.journal.own_step(loss, seconds)
        if bool(by_rank[:, 1].all()):
            self.checkpoints.finish()
        return bool(by_rank[:, 0].any())

    def _event(self, event: str, text: str) -> None:
        assert self.journal is not None
        self.journal.event(event, text)

    def close(self) -> None:
        """Close the files and release the directory. Local."""
        if self.journal is not None:
            self.journal.close()
        if self.checkpoints is not None:
            self.checkpoints.abandon()
        if self.lock is not None:
            self.lock.release()
