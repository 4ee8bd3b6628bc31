"""Continue a run from a checkpoint, and compare its settings with those of the checkpoint."""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from mpisparse import checkpoint
from mpisparse.checkpoint import store
from mpisparse.errors import ConfigurationError
from mpisparse.runtime.parts import RunParts
from mpisparse.runtime.run_state import KEYS, RunState, check_run_state
from mpisparse.runtime.settings import FROM_CHECKPOINT, Settings, differences
from mpisparse.runtime.settings_file import read_file
from mpisparse.runtime.workloads.split import difference, split_of
from mpisparse.sync import GradientSync

OF_A_RUN = ("model", "scheme", "codec", "optimizer")  # settings with which a checkpoint fits or does not


@dataclass(frozen=True)
class Resumed:
    """Where a resumed run continues. `changes`: settings changed since the run began, the latest of them in `new_changes`.

    `path`: the checkpoint. `reseed`: --resume force changed the seed, so the restored generators are not to be used.
    """

    path: Path
    state: RunState
    changes: list[str]
    new_changes: list[str]
    reseed: bool


def resume(parts: RunParts) -> Resumed | None:
    """Load the checkpoint that --resume asks for; None if the run starts from scratch. Collective."""
    settings, optimizer, sync = parts.settings, parts.optimizer, parts.sync
    mode, forced = _parse(settings.resume)
    _check(mode, settings, sync)
    if mode == "never":
        return None
    source = _source(mode, settings, sync)
    chosen = [{key: group[key] for key in optimizer.defaults} for group in optimizer.param_groups]
    density = sync.density
    extra: dict[str, Any] = {}
    try:
        step = checkpoint.load(
            source, model=parts.model, optimizer=optimizer, sync=sync, extra=extra, check_extra=check_run_state
        )
    except ConfigurationError as refused:
        raise _explained(refused, source, settings) from refused
    error: ConfigurationError | None = None
    if step is None and mode != "auto":
        error = ConfigurationError(f"{source} has no complete checkpoint to resume from")
    elif step is not None and not set(extra) >= KEYS:
        error = ConfigurationError(f"{source} was not written by mpisparse train")
    sync.check_together(error)
    if step is None:
        return None
    sync.density = density
    changed = _changed_settings(parts, source, extra)
    notes = _compare(parts, source, changed, forced=forced)
    notes += _compare_split(parts, source, extra, forced=forced)
    notes = [f"from step {step} on: {note}" for note in notes]
    if forced:
        for group, values in zip(optimizer.param_groups, chosen, strict=True):
            group.update(values)
    earlier = [str(change) for change in extra.get("changes") or ()]
    state = RunState.from_extra(step, extra)
    return Resumed(source / store.name_of(step), state, [*earlier, *notes], notes, forced and "seed" in changed)


def _explained(refused: ConfigurationError, source: Path, settings: Settings) -> ConfigurationError:
    """Add to a refusal, which all ranks raise, which run wrote the checkpoint, and what to do. Local."""
    config, flag = source.parent / "config.toml", "--out" if source == Path(settings.out) / "checkpoints" else "--resume"
    try:
        written = read_file(config)
    except ConfigurationError:
        return refused
    here, why = asdict(settings), str(refused).split(" | ", 1)[-1]
    names = [name for name in OF_A_RUN if written.get(name) != here[name]]
    before, now = (" and ".join(f"{name} {run.get(name) or 'by default'}" for name in names) for run in (written, here))
    told = f"{source.parent} holds a run with {before}, and this one has {now}" if names else why
    error = ConfigurationError(
        f"{told}; choose another {flag}, or continue that run with --config {config}" + (f" ({why})" if names else "")
    )
    error.repeated = refused.repeated
    return error


def _parse(text: str) -> tuple[str, bool]:
    """Split --resume into auto, never or a directory, and whether changed settings are forced."""
    if text == "force" or text.startswith("force:"):
        return text.removeprefix("force").removeprefix(":") or "auto", True
    return text, False


def _named(mode: str) -> Path | None:
    """Return the directory of checkpoints that --resume names, which may be a run's directory; None for auto and never."""
    if mode in ("auto", "never"):
        return None
    named = Path(mode)
    return named / "checkpoints" if (named / "checkpoints").is_dir() else named


def _check(mode: str, settings: Settings, sync: GradientSync) -> None:
    """Raise on all ranks if --resume and the directories contradict each other. Collective."""
    out, named = Path(settings.out), _named(mode)
    error: ConfigurationError | None = None
    if mode == "never" and ((out / "metrics.jsonl").exists() or store.found(out / "checkpoints")):
        error = ConfigurationError(f"{out} already contains a run; choose another --out, or resume it with --resume auto")
    elif named is not None and not named.is_dir():
        error = ConfigurationError(f"there is no directory {named} to resume from")
    sync.check_together(error)


def _source(mode: str, settings: Settings, sync: GradientSync) -> Path:
    """Return where to load from: the run's own checkpoints if it has any, else those that --resume names. Collective."""
    own, named = Path(settings.out) / "checkpoints", _named(mode)
    if sync.rank == 0:  # the rank that holds the lock
        with contextlib.suppress(OSError):  # remove what killed runs left; if it cannot go, the next checkpoint says so
            store.sweep(own)
    begun = sync.agree_any(bool(store.found(own)))
    return own if named is None or begun else named


def _changed_settings(parts: RunParts, source: Path, extra: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ from those of the checkpoint, each with its old and new value."""
    saved = extra.get("settings")
    saved = saved if isinstance(saved, dict) else _guessed_settings(source, parts.optimizer)
    return differences(saved, parts.settings)


def _guessed_settings(source: Path, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Settings of a checkpoint that stores none: from the restored optimizer, and the seed from the run's config.toml."""
    group = optimizer.param_groups[0]
    known: dict[str, Any] = {name: group[name] for name in ("momentum", "weight_decay") if name in group}
    with contextlib.suppress(ConfigurationError):
        config = read_file(source.parent / "config.toml")
        known |= {"seed": config["seed"]} if "seed" in config else {}
    return known


def _compare(parts: RunParts, source: Path, changed: dict[str, tuple[Any, Any]], *, forced: bool) -> list[str]:
    """Describe the changed settings; raise on all ranks if the checkpoint would override one, unless forced. Collective."""
    mode = parts.settings.resume
    force = "force" if mode == "auto" else f"force:{mode}"
    errors = [
        ConfigurationError(
            f"{source} was written with {name} {before}, this run has {now}; pass "
            f"--{name.replace('_', '-')} {before}, or --resume {force} to continue with {now}"
        )
        for name, (before, now) in changed.items()
        if name in FROM_CHECKPOINT and not forced
    ]
    parts.sync.check_together(errors[0] if errors else None)
    return [f"{name} {_shown(now)}, before {_shown(before)}" for name, (before, now) in changed.items()]


def _shown(value: Any) -> str:
    return "the default" if value is None else json.dumps(value, default=str)


def _compare_split(parts: RunParts, source: Path, extra: dict[str, Any], *, forced: bool) -> list[str]:
    """Describe a change of the validation data; raise on all ranks if there is one, unless forced. Collective."""
    other = difference(extra.get("split"), split_of(parts.data, parts.settings.seed))
    refused = other is not None and not forced
    parts.sync.check_together(ConfigurationError(f"the run in {source} {other}") if refused else None)
    return [] if other is None else ["different validation data, some of which was trained on before"]
