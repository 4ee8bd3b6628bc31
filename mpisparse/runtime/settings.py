"""The settings of a run: from flags and a TOML file, checked, and written back as a TOML file. No torch, no MPI."""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import tomllib
import types
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Union, get_args, get_origin, get_type_hints

from mpisparse import names
from mpisparse.comm.watchdog import TIMEOUT, check_timeout
from mpisparse.errors import ConfigurationError, check_choice, suggest
from mpisparse.runtime.workloads.catalogue import MODELS
from mpisparse.runtime.workloads.imports import import_module

OPTIMIZERS = ("sgd", "adam", "adamw")
SCHEDULES = ("constant", "cosine", "step")
FIXED = ("seed", "momentum", "weight_decay")  # a checkpoint brings its own: a run goes on with others only by force
ASIDE = (
    "out", "epochs", "steps", "target", "log_every", "checkpoint_every", "background", "driver", "keep", "resume",
    "imports", "wait_for_lock", "timeout", "tensorboard", "record_gradients", "log_ranks", "stop_before",
)  # fmt: skip # how long a run goes on and what it writes, not what its steps compute
MOST = {"lr": 1e6, "weight_decay": 1e6, "stop_before": 1e9}  # beyond that a run cannot go well
LONGEST_NAME, LONGEST_PATH = 255, 3900  # bytes that Linux takes, less what a run adds to its directory
STEERING = ("validation", "test")  # the data that adaptive k, the target and learned importance look at


def _setting(default: Any, text: str) -> Any:
    return field(default=default, metadata={"help": text})


@dataclass(frozen=True)
class Settings:
    """All that decides how a run goes. Every field is a flag and a key of the file."""

    model: str = _setting("digits-cnn", "a built-in model, or package.module:factory")
    data: str | None = _setting(None, "a built-in data set, a path, or package.module:factory (default: the model's own)")
    out: str = _setting("runs/run", "the run's directory")
    epochs: int | None = _setting(None, "passes over the data (default 5, unless --steps is given)")
    steps: int | None = _setting(None, "optimizer steps, instead of epochs")
    batch_size: int = _setting(32, "examples a rank and backward")
    accumulation: int = _setting(1, "backwards a step")
    seed: int = _setting(0, "of weights, order and augmentation")
    optimizer: str = _setting("sgd", f"one of {', '.join(OPTIMIZERS)}")
    lr: float = _setting(0.05, "peak learning rate")
    momentum: float = _setting(0.9, "of sgd (Nesterov)")
    weight_decay: float = _setting(0.0, "of the optimizer")
    schedule: str = _setting("constant", f"of the learning rate: one of {', '.join(SCHEDULES)}")
    warmup: int = _setting(0, "steps over which the learning rate rises to its peak")
    drop_at: tuple[float, ...] = _setting((0.5, 0.75), "schedule step: where in the run the rate falls to a tenth")
    clip: float | None = _setting(None, "largest norm of a rank's gradient")
    bf16: bool = _setting(False, "compute in bfloat16 (autocast)")
    device: str = _setting("cpu", "cpu, or cuda: of a host's GPUs the one of the rank's place among its ranks")
    scheme: str = _setting("exdyna", "how gradients are exchanged")
    density: float | None = _setting(None, "share of the gradient that is sent (default: the scheme's)")
    density_from: float = _setting(1.0, "where density warm-up begins")
    density_warmup: int = _setting(0, "steps over which density falls to the set one")
    codec: str | None = _setting(None, "how finely values are sent (default: the scheme's)")
    options: dict[str, Any] = field(default_factory=dict, metadata={"help": "NAME=VALUE for the scheme; may be repeated"})
    imports: tuple[str, ...] = _setting((), "modules that register schemes or codecs of your own, imported first")
    validation: float = _setting(0.1, "share of the training data held out to steer by, unless the data has validation data")
    evaluate_on: str = _setting("validation", "validation, or test: let the test data steer, not just judge the end")
    eval_every: int | None = _setting(None, "steps between evaluations (default: an epoch)")
    target: float | None = _setting(None, "stop when the metric on validation data reaches this")
    log_every: int = _setting(1, "steps between lines of metrics.jsonl")
    checkpoint_every: int | None = _setting(None, "steps between checkpoints (one is always written at the end)")
    background: bool = _setting(False, "write checkpoints while training goes on")
    driver: str | None = _setting(None, "mpio: checkpoints of one file, by parallel HDF5 (default: two files a rank)")
    keep: int = _setting(2, "checkpoints to keep")
    resume: str = _setting("auto", "auto, force (as auto, with other settings than before), never, or a directory")
    wait_for_lock: bool = _setting(False, "wait until a run that has the directory ends, instead of refusing to start")
    tensorboard: bool = _setting(False, "write TensorBoard events to the run's directory")
    record_gradients: int | None = _setting(None, "write the gradients of so many steps, the first or next, for bench")
    log_ranks: bool = _setting(False, "a log for each rank in the run's directory")
    stop_before: float = _setting(60.0, "in a Slurm job: seconds before its limit at which to checkpoint and stop")
    timeout: float = _setting(TIMEOUT, "seconds that a rank waits for others before the job ends with a report; 0: for ever")

    def __post_init__(self) -> None:
        import_modules(self.imports)
        check_choice("optimizer", self.optimizer, OPTIMIZERS)
        check_choice("device", self.device, ("cpu", "cuda"))
        if self.scheme not in names.SCHEMES:
            check_choice("scheme", self.scheme, names.SCHEMES)
        if self.codec is not None and self.codec not in names.CODECS:
            check_choice("codec", self.codec, names.SCHEMES[self.scheme]().codecs())
        if self.driver is not None:
            check_choice("driver", self.driver, names.DRIVERS)
            if self.background:
                raise ConfigurationError(f"driver {self.driver} does not write in the background: leave one of them out")
        if self.model not in MODELS and ":" not in self.model:
            raise ConfigurationError(
                f"unknown model {self.model!r}; {suggest(self.model, MODELS)}, or give package.module:factory"
            )
        for name in ("scheme", "density", "codec", "comm", "timeout", "run_directory"):
            if name in self.options:
                hint = "" if name in ("comm", "run_directory") else f"pass --{name}"
                raise ConfigurationError(f"{name} is no option of a scheme; {hint}")
        check_timeout(self.timeout)
        check_choice("schedule", self.schedule, SCHEDULES)
        check_choice("evaluate_on", self.evaluate_on, STEERING)
        if not 0.0 <= self.validation < 1.0:
            hint = f"; for {self.validation:g} % pass {self.validation / 100:g}" if 1.0 <= self.validation < 100.0 else ""
            raise ConfigurationError(f"validation must be a share in [0, 1), got {self.validation!r}{hint}")
        for name in (
            "epochs",
            "steps",
            "batch_size",
            "accumulation",
            "eval_every",
            "log_every",
            "checkpoint_every",
            "keep",
            "record_gradients",
        ):
            self._at_least(name, 1)
        for name in ("warmup", "density_warmup", "seed", "lr", "momentum", "weight_decay", "stop_before"):
            self._at_least(name, 0)
        self._check_sensible()
        for name in ("model", "data", "out", "resume"):
            check_path(name, getattr(self, name))
        if self.seed >= 2**40:
            raise ConfigurationError(f"seed must be below 2^40, got {self.seed}")
        if self.epochs is not None and self.steps is not None:
            raise ConfigurationError("give epochs or steps, not both")
        for name in ("density", "density_from"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int | float) or not 0.0 < value <= 1.0):
                raise ConfigurationError(f"{name} must be in (0, 1], got {value!r}")
        if self.clip is not None and not self.clip > 0:
            raise ConfigurationError(f"clip must be above 0, got {self.clip!r}")
        if self.clip is not None and self.options.get("accumulate") == "backward":
            raise ConfigurationError('clip has no effect with accumulate="backward": leave one of them out')
        if self.record_gradients is not None and self.options.get("accumulate") == "backward":
            raise ConfigurationError(
                'record_gradients needs accumulate="step": in path "backward" no gradient is ever whole'
            )

    def _check_sensible(self) -> None:
        """Raise ConfigurationError for numbers with which no run can go well."""
        for name, most in MOST.items():
            if not getattr(self, name) <= most:
                raise ConfigurationError(f"{name} must be at most {most:g}, got {getattr(self, name)!r}")
        if self.momentum >= 1.0:
            raise ConfigurationError(f"momentum must be below 1, got {self.momentum!r}: nothing would ever be forgotten")
        if self.target is not None and not math.isfinite(self.target):
            raise ConfigurationError(f"target must be a finite number, got {self.target!r}; leave it out to train on")
        for share in self.drop_at:
            if not 0.0 <= share <= 1.0:
                raise ConfigurationError(f"drop_at must be shares of the run in [0, 1], got {share!r}; for half pass 0.5")

    def _at_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and not value >= least:
            raise ConfigurationError(f"{name} must be at least {least}, got {value!r}")
        if isinstance(value, int) and value >= 2**53 and name != "seed":
            raise ConfigurationError(f"{name} must be below 2^53, got {value if value < 10**30 else 'far more'}")


def import_modules(modules: Sequence[str]) -> None:
    """Import modules of users, which register schemes and codecs; raises ConfigurationError where one is not there."""
    for module in modules:
        if not module or not all(part.isidentifier() for part in module.split(".")):
            raise ConfigurationError(f"imports: expected the name of a module, package.module, got {module!r}")
        import_module("imports", module)


def check_path(name: str, text: str | None) -> None:
    """Raise ConfigurationError unless a text can be the name of a file or directory; None is none."""
    if text is None:
        return
    if not text:
        raise ConfigurationError(f"{name} must not be empty; leave --{name} out, or name what is meant")
    if "\0" in text:
        raise ConfigurationError(f"{name} must not have NUL characters, got {text[:60]!r}")
    try:
        whole = text.encode()
    except UnicodeEncodeError:
        raise ConfigurationError(f"{name} must be text in UTF-8, got {text[:60]!r}") from None
    longest = max(map(len, whole.split(b"/")))
    if longest > LONGEST_NAME or len(whole) > LONGEST_PATH:
        raise ConfigurationError(
            f"{name} is too long: {len(whole)} bytes, its longest part {longest}; "
            f"file systems take {LONGEST_PATH} and {LONGEST_NAME}, got {text[:40]!r}..."
        )


TYPES: dict[str, Any] = get_type_hints(Settings)


def add_arguments(
    command: argparse.ArgumentParser, leave_out: Sequence[str] = (), keep: Sequence[str] | None = None
) -> None:
    """Add a flag for every setting, or for those to keep; one that is not given leaves no trace, so that the file counts."""
    command.add_argument("--config", type=Path, metavar="FILE.toml", help="settings from a file; flags override it")
    for entry in dataclasses.fields(Settings):
        if entry.name in leave_out or (keep is not None and entry.name not in keep):
            continue
        flag, text = f"--{entry.name.replace('_', '-')}", entry.metadata["help"]
        kind = _plain(TYPES[entry.name])
        if kind is bool:
            command.add_argument(flag, action=argparse.BooleanOptionalAction, default=argparse.SUPPRESS, help=text)
        elif kind is dict:
            command.add_argument(
                "--option", dest="options", action="append", default=argparse.SUPPRESS, metavar="NAME=VALUE", help=text
            )
        elif kind is tuple:
            add_list(command, entry.name, text)
        else:
            default = "" if entry.default is None else f" (default {entry.default})"
            command.add_argument(
                flag, type=kind, default=argparse.SUPPRESS, help=text + default, metavar=kind.__name__.upper()
            )


def add_list(command: argparse.ArgumentParser, name: str, text: str = "") -> None:
    """Add the flag of a setting that is a list."""
    flag = "--import" if name == "imports" else f"--{name.replace('_', '-')}"
    kind, text = _element(name), text or Settings.__dataclass_fields__[name].metadata["help"]
    metavar = "MODULE" if name == "imports" else None
    command.add_argument(flag, dest=name, nargs="+", type=kind, default=argparse.SUPPRESS, metavar=metavar, help=text)


def _element(name: str) -> Any:
    """The type of the elements of a setting that is a list."""
    return get_args(TYPES[name])[0]


def _plain(kind: Any) -> Any:
    """The type behind `X | None` and behind containers' parameters."""
    if get_origin(kind) in (Union, types.UnionType):
        kind = next(k for k in get_args(kind) if k is not type(None))
    return get_origin(kind) or kind


def resolve(given: dict[str, Any], **usual: Any) -> Settings:
    """Settings from parsed flags, on top of the file that --config names, on top of what is usual for a command."""
    given = dict(given)
    config = given.pop("config", None)
    values = read_file(config) if config is not None else {}
    flags = {key: value for key, value in given.items() if key in TYPES}
    if "options" in flags:
        flags["options"] = {**values.get("options", {}), **parse_options(flags["options"])}
    if "steps" in flags or "epochs" in flags:
        values.pop("steps", None)
        values.pop("epochs", None)
    flags |= {key: tuple(value) for key, value in flags.items() if _plain(TYPES[key]) is tuple}
    if "epochs" in values or "epochs" in flags:
        usual.pop("steps", None)
    return Settings(**{**usual, **values, **flags})


def parse_options(pairs: list[str]) -> dict[str, Any]:
    """Options of a scheme from NAME=VALUE texts."""
    options = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not equals or not name:
            raise ConfigurationError(f"an option of the scheme is NAME=VALUE, got {pair!r}")
        try:
            options[name] = json.loads(text)
        except RecursionError:
            raise ConfigurationError(f"option {name} is nested too deep: {text[:40]!r}...") from None
        except ValueError:
            options[name] = text
    return options


def read_file(path: Path) -> dict[str, Any]:
    """Read settings from a TOML file, checked for unknown names and wrong types."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"cannot read the settings in {path}: {error.strerror}") from error
    except RecursionError:
        raise ConfigurationError(f"{path} is not a file of settings: its values are nested too deep") from None
    except ValueError as error:  # of TOML, of UTF-8, or of a number with thousands of digits
        raise ConfigurationError(f"{path} is not a TOML file: {error}") from error
    for name, value in values.items():
        if name not in TYPES:
            raise ConfigurationError(f"{path}: unknown setting {name!r}; {suggest(name, TYPES)}")
        values[name] = _typed(path, name, value)
    return values


def _typed(path: Path, name: str, value: Any) -> Any:
    kind = _plain(TYPES[name])
    try:
        if kind is float and isinstance(value, int) and not isinstance(value, bool):
            return float(value)
        if kind is tuple and isinstance(value, list):
            element = _element(name)
            if all(type(each) in ((int, float) if element is float else (element,)) for each in value):
                return tuple(element(each) for each in value)
    except OverflowError as error:
        raise ConfigurationError(f"{path}: {name} is too large: {error}") from error
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        shown = repr(value) if not isinstance(value, dict | list) else f"{type(value).__name__} of {len(value)}"
        raise ConfigurationError(f"{path}: {name} must be of type {kind.__name__}, got {shown}")
    return value


def differences(saved: dict[str, Any], settings: Settings) -> dict[str, tuple[Any, Any]]:
    """The settings that decide what steps compute and had another value in a checkpoint, with that and the present one."""
    found = {}
    for name, now in dataclasses.asdict(settings).items():
        unused = name == "momentum" and settings.optimizer != "sgd"
        if name in saved and name not in ASIDE and not unused and saved[name] != now:
            found[name] = (saved[name], now)
    return found


def to_toml(settings: Settings, notes: Sequence[str] = ()) -> str:
    """The settings as a TOML file that gives the same settings, below notes as comments."""
    lines, tables = [f"# {' '.join(note.split())}" for note in notes], []
    for name, value in dataclasses.asdict(settings).items():
        if isinstance(value, dict):
            tables += [f"\n[{name}]", *(f"{_toml(k)} = {_toml(v)}" for k, v in value.items() if v is not None)]
        elif value is not None:
            lines.append(f"{name} = {_toml(value)}")
    return "\n".join([*lines, *(tables if len(tables) > 1 else []), ""])


def _toml(value: Any) -> str:
    if isinstance(value, list | tuple):
        return f"[{', '.join(_toml(v) for v in value)}]"
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
