"""The settings of a run and their checks. No torch, no MPI."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mpisparse import names
from mpisparse.comm.watchdog import TIMEOUT, check_timeout
from mpisparse.errors import ConfigurationError, check_choice, suggest
from mpisparse.names import NODE
from mpisparse.runtime.workloads.catalogue import MODELS
from mpisparse.runtime.workloads.imports import import_module

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "cosine", "step")
FROM_CHECKPOINT = ("seed", "momentum", "beta2", "weight_decay")  # a resumed run keeps these unless forced
NO_EFFECT_ON_STEPS = (
    "out", "epochs", "steps", "target", "log_every", "checkpoint_every", "background", "driver", "keep", "resume",
    "imports", "wait_for_lock", "timeout", "tensorboard", "record_gradients", "log_ranks", "stop_before", "on_failure",
    "mirror",
)  # fmt: skip # how long a run lasts and what it writes
AT_LEAST_ONE = (
    "epochs", "steps", "batch_size", "accumulation", "eval_every", "log_every", "checkpoint_every", "keep",
    "record_gradients", "mirror",
)  # fmt: skip
AT_LEAST_ZERO = ("warmup", "density_warmup", "seed", "lr", "momentum", "beta2", "weight_decay", "stop_before")
UPPER_LIMITS = {"lr": 1e6, "weight_decay": 1e6, "stop_before": 1e9}
LONGEST_NAME, LONGEST_PATH = 255, 3900  # bytes: limits of Linux, minus what a run appends to its directory
ON_FAILURE = ("abort", "shrink")
AUTO, EXDYNA = "auto", "exdyna"
FOR_AUTO = (  # options
    "weights", "slowdown", "every", "log", "deterministic", "accumulate", "nonfinite", "segment_nbytes", "buffers",
    "hierarchy",
)  # fmt: skip
STEERING = ("validation", "test")  # data for adaptive k, the target and learned importance


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Settings:
    """The settings of a run. Every field is a flag and a key of the file."""

    model: str = _setting("digits-cnn", "a built-in model, or package.module:factory")
    data: str | None = _setting(None, "a built-in dataset, a path, or package.module:factory (default: the model's own)")
    out: str = _setting("runs/run", "the run's directory")
    epochs: int | None = _setting(None, "passes over the data (default 5, unless --steps is given)")
    steps: int | None = _setting(None, "optimizer steps, instead of epochs")
    batch_size: int = _setting(32, "examples per rank and backward pass")
    accumulation: int = _setting(1, "backward passes per step")
    seed: int = _setting(0, "seed of weights, data order and augmentation")
    optimizer: str = _setting("sgd", "the optimizer")
    lr: float = _setting(0.05, "peak learning rate")
    momentum: float = _setting(0.9, "Nesterov momentum of sgd")
    beta2: float = _setting(0.999, "decay of the second moment of adam and adamw")
    weight_decay: float = _setting(0.0, "weight decay of the optimizer; gpt models exempt biases and normalizations")
    schedule: str = _setting("constant", "learning rate schedule")
    warmup: int = _setting(0, "steps over which the learning rate rises to its peak")
    drop_at: tuple[float, ...] = _setting((0.5, 0.75), "schedule step: fractions of the run where the rate drops to a tenth")
    clip: float | None = _setting(None, "clip each rank's gradient to this norm")
    bf16: bool = _setting(False, "compute in bfloat16 (autocast)")
    device: str = _setting("cpu", "where to compute; with cuda the ranks of a host use its GPUs in turn")
    scheme: str = _setting(
        None, "what is exchanged (default auto; exdyna with a density, codec or option, a device or deaths not for auto)"
    )
    density: float | None = _setting(None, "share of the gradient to send (default: the scheme's)")
    density_from: float = _setting(1.0, "density at the start of density warm-up")
    density_warmup: int = _setting(0, "steps over which the density falls to --density")
    codec: str | None = _setting(None, "encoding of the values sent (default: the scheme's)")
    options: dict[str, Any] = field(default_factory=dict, metadata={"help": "an option of the scheme; may be repeated"})
    imports: tuple[str, ...] = _setting((), "modules to import first, which register your schemes or codecs")
    validation: float = _setting(0.1, "share of the training data to hold out, unless the data has validation data")
    evaluate_on: str = _setting("validation", "data for the target and adaptive k")
    eval_every: int | None = _setting(None, "steps between evaluations (default: one epoch)")
    target: float | None = _setting(None, "stop when the evaluated metric reaches this value")
    log_every: int = _setting(1, "steps between lines of metrics.jsonl")
    checkpoint_every: int | None = _setting(None, "steps between checkpoints (one is always written at the end)")
    background: bool = _setting(False, "write checkpoints while training continues")
    driver: str | None = _setting(None, "mpio: one file per checkpoint, by parallel HDF5 (default: two files per rank)")
    keep: int = _setting(2, "checkpoints to keep")
    resume: str = _setting("auto", "auto, never, DIR, or force or force:DIR to change settings")
    wait_for_lock: bool = _setting(False, "if another run uses the directory, wait for it to end")
    tensorboard: bool = _setting(False, "write TensorBoard events to the run's directory")
    record_gradients: int | None = _setting(None, "write the gradients of this many steps, for bench")
    log_ranks: bool = _setting(False, "write one log per rank to the run's directory")
    stop_before: float = _setting(60.0, "in a Slurm job: checkpoint and stop this many seconds before its limit")
    timeout: float = _setting(TIMEOUT, "seconds to wait for other ranks before the job ends with a report; 0: no limit")
    on_failure: str = _setting("abort", "if a rank dies: abort the job, or shrink: the others go on (mpirun --with-ft ulfm)")
    mirror: int | None = _setting(None, "with shrink: steps in which a copy of what a rank has not sent is renewed")

    def __post_init__(self) -> None:
        import_modules(self.imports)
        given: Any = self.scheme
        if given is None:
            object.__setattr__(self, "scheme", self.default_scheme())
        self._check_choices()
        self._check_numbers()
        for name in ("model", "data", "out", "resume"):
            check_path(name, getattr(self, name))
        self._check_combinations()

    def default_scheme(self) -> str:
        """The scheme that chooses, unless something is set that it would choose, or does not take."""
        chosen = self.density is not None or self.density_warmup > 0 or self.codec is not None
        elsewhere = self.device != "cpu" or self.on_failure != "abort" or self.options.get("hierarchy") == NODE
        return EXDYNA if chosen or elsewhere or not set(self.options) <= set(FOR_AUTO) else AUTO

    def _check_choices(self) -> None:
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_choice("device", self.device, ("cpu", "cuda"))
        if self.scheme not in names.SCHEMES:
            check_choice("scheme", self.scheme, names.SCHEMES)
        if self.codec is not None and self.codec not in names.CODECS:
            check_choice("codec", self.codec, names.SCHEMES[self.scheme]().codecs())
        if self.driver is not None:
            check_choice("driver", self.driver, names.DRIVERS)
        if self.model not in MODELS and ":" not in self.model:
            raise ConfigurationError(
                f"unknown model {self.model!r}; {suggest(self.model, MODELS)}, or give package.module:factory"
            )
        for name in ("density_from", "density_warmup"):
            if name in self.options:
                raise ConfigurationError(f"{name} is a flag here: pass --{name.replace('_', '-')}, not --option {name}")
        for name in ("scheme", "density", "codec", "comm", "timeout", "run_directory", "on_failure", "mirror"):
            if name in self.options:
                hint = "" if name in ("comm", "run_directory") else f"; pass --{name.replace('_', '-')}"
                raise ConfigurationError(f"{name} is not an option of a scheme{hint}")
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("evaluate_on", self.evaluate_on, STEERING)
        check_choice("on_failure", self.on_failure, ON_FAILURE)

    def _check_numbers(self) -> None:
        check_timeout(self.timeout)
        if not 0.0 <= self.validation < 1.0:
            hint = f"; for {self.validation:g} % pass {self.validation / 100:g}" if 1.0 <= self.validation < 100.0 else ""
            raise ConfigurationError(f"validation must be a share in [0, 1), got {self.validation!r}{hint}")
        for name in AT_LEAST_ONE:
            self._at_least(name, 1)
        for name in AT_LEAST_ZERO:
            self._at_least(name, 0)
        self._check_sensible()
        if self.seed >= 2**40:
            raise ConfigurationError(f"seed must be below 2^40, got {self.seed}")
        for name in ("density", "density_from"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | float) or not 0.0 < value <= 1.0):
                raise ConfigurationError(f"{name} must be in (0, 1], got {value!r}")
        if self.clip is not None and not self.clip > 0:
            raise ConfigurationError(f"clip must be above 0, got {self.clip!r}")

    def _check_combinations(self) -> None:
        if self.driver is not None and self.background:
            raise ConfigurationError(f"driver {self.driver} does not write in the background; leave out one of them")
        if self.epochs is not None and self.steps is not None:
            raise ConfigurationError("got both epochs and steps; pass one of them")
        if self.clip is not None and self.options.get("accumulate") == "backward":
            raise ConfigurationError('clip has no effect with accumulate="backward"; leave one of them out')
        if self.record_gradients is not None and self.clip is not None and self.options.get("overlap"):
            raise ConfigurationError(
                "record_gradients cannot see gradients that are clipped after overlap=True; leave one out"
            )
        if self.record_gradients is not None and self.options.get("accumulate") == "backward":
            raise ConfigurationError(
                'record_gradients needs accumulate="step": with "backward" there is never a complete gradient'
            )

        self._check_shrinks()

    def _check_shrinks(self) -> None:
        """Raise ConfigurationError for settings that do not go with ranks that die, or that need such."""
        if self.on_failure != "shrink":
            if self.mirror is not None:
                raise ConfigurationError("mirror copies for ranks that go on; pass --on-failure shrink, or leave it out")
            return
        refused = {
            "background": (self.background, "what a dead rank had not written yet could not be written by others"),
            "driver": (self.driver is not None, "all ranks write into one file"),
            "record_gradients": (self.record_gradients is not None, "a recording has the same ranks in all steps"),
        }
        for name, (given, why) in refused.items():
            if given:
                raise ConfigurationError(f"{name} does not go with on_failure shrink: {why}; leave out one of them")

    def _check_sensible(self) -> None:
        """Raise ConfigurationError for numbers with which no run can succeed."""
        for name, most in UPPER_LIMITS.items():
            if not getattr(self, name) <= most:
                raise ConfigurationError(f"{name} must be at most {most:g}, got {getattr(self, name)!r}")
        if self.momentum >= 1.0:
            raise ConfigurationError(f"momentum must be below 1, or updates grow without limit; got {self.momentum!r}")
        if self.beta2 >= 1.0:
            raise ConfigurationError(f"beta2 must be below 1, or the second moment never changes; got {self.beta2!r}")
        if self.target is not None and not math.isfinite(self.target):
            raise ConfigurationError(f"target must be finite, got {self.target!r}; leave it out to train to the end")
        for share in self.drop_at:
            if not 0.0 <= share <= 1.0:
                raise ConfigurationError(f"drop_at must be fractions of the run in [0, 1], got {share!r}; for half pass 0.5")

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and not value >= least:
            raise ConfigurationError(f"{name} must be at least {least}, got {value!r}")
        if isinstance(value, int) and value >= 2**53 and name != "seed":
            raise ConfigurationError(f"{name} must be below 2^53, got {value if value < 10**30 else 'far more'}")


def import_modules(modules: Sequence[str]) -> None:
    """Import users' modules, which register schemes and codecs; raise ConfigurationError if one does not exist."""
    for module in modules:
        if not module or not all(part.isidentifier() for part in module.split(".")):
            raise ConfigurationError(f"imports: expected the name of a module, package.module, got {module!r}")
        import_module("imports", module)


def check_path(name: str, text: str | None) -> None:
    """Raise ConfigurationError if a text cannot be a path; None is allowed."""
    if text is None:
        return
    if not text:
        raise ConfigurationError(f"{name} must not be empty; leave out --{name}, or give it a value")
    if "\0" in text:
        raise ConfigurationError(f"{name} must not contain NUL characters, got {text[:60]!r}")
    try:
        whole = text.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"{name} must be text in UTF-8, got {text[:60]!r}") from None
    longest = max(map(len, whole.split(b"/")))
    if longest > LONGEST_NAME or len(whole) > LONGEST_PATH:
        raise ConfigurationError(
            f"{name} is too long: {len(whole)} bytes, longest part {longest}; "
            f"the limits are {LONGEST_PATH} and {LONGEST_NAME}, got {text[:40]!r}..."
        )


def differences(saved: dict[str, Any], settings: Settings) -> dict[str, tuple[Any, Any]]:
    """Return the settings that affect what steps compute and have changed, each as (saved value, value now)."""
    found = {}
    for name, now in dataclasses.asdict(settings).items():
        unused = name == ("beta2" if settings.optimizer == "sgd" else "momentum")
        if name in saved and name not in NO_EFFECT_ON_STEPS and not unused and saved[name] != now:
            found[name] = (saved[name], now)
    return found
