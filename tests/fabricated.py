"""Fabricated runs: directories with settings and metrics, as mpisparse train leaves them."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

ELEMENTS = 1_146_890
EXCHANGE = {"accumulate": 2.1, "agree": 0.6, "unite": 0.8, "reduce": 1.4, "feedback": 0.1, "publish": 0.3, "adapt": 0.2}


def spread(value: float, width: float = 0.1) -> dict[str, float]:
    """Return minimum, mean and maximum over ranks."""
    return {"min": round(value * (1 - width), 7), "mean": round(value, 7), "max": round(value * (1 + width), 7)}


def steps(count: int, *, ranks: int = 4, density: float = 0.001, seed: int = 0, every: int = 1) -> list[dict[str, Any]]:
    """Fabricate plausible steps."""
    rng = np.random.default_rng(seed)
    noise = rng.standard_normal((count, 4))
    wobble = rng.standard_normal((count, ranks)) * 0.04
    drift = np.cumsum(rng.standard_normal((count, ranks)) * 0.3 / math.sqrt(count), axis=0) * 0.5
    dense = ELEMENTS * 8 * (ranks - 1) // ranks
    records = []
    for i in range(count):
        done = i / max(1, count - 1)
        loss = 2.3 * math.exp(-4 * done) + 0.05 + 0.12 * abs(noise[i, 0]) * (1 - 0.6 * done)
        chosen = max(density, 0.25 * math.exp(-done * 60)) if density < 0.25 else density
        actual = chosen * (1 + 0.03 * noise[i, 1]) if density < 1 else 1.0
        shares = np.maximum(1 + wobble[i], 0.2)
        sizes = np.exp(drift[i])
        received = ELEMENTS * actual * 6.5 if density < 1 else dense
        slow = 20 if i == 0 else 1 + 0.1 * abs(noise[i, 2])
        seconds = {phase: spread(ms * slow * 1e-3) for phase, ms in EXCHANGE.items()}
        seconds |= {"compute": spread(0.018 * slow), "data": spread(0.0012 * slow)}
        record = {
            "kind": "step", "step": (i + 1) * every, "epoch": i * every // 100, "time": round((i + 1) * every * 0.026, 3),
            "loss": spread(loss, 0.15), "lr": round(0.05 * (0.5 + 0.5 * math.cos(math.pi * done)), 6),
            "density": actual, "set_density": chosen, "threshold": 0.03 * math.exp(-2 * done) * (1 + 0.05 * noise[i, 3]),
            "selected": round(ELEMENTS * actual), "bytes_sent": spread(received), "bytes_received": spread(received, 0.03),
            "bytes_dense": dense, "imbalance": float(shares.max() / shares.mean() - 1), "reselected": 0, "refined": 0,
            "skipped": False, "seconds": seconds,
            "workloads": np.round(ELEMENTS * actual * shares / ranks).astype(int).tolist(),
            "borders": [0, *np.round(ELEMENTS * np.cumsum(sizes) / sizes.sum()).astype(int).tolist()],
        }  # fmt: skip
        records.append(record | {"every": every} if every > 1 else record)
    return records


def evals(records: list[dict[str, Any]], *, points: int = 25, top: float = 0.97) -> list[dict[str, Any]]:
    """Fabricate evaluations."""
    chosen = records[:: max(1, len(records) // points)]
    return [
        {
            "kind": "eval", "step": r["step"], "time": r["time"] + 0.01, "loss": r["loss"]["mean"] * 1.1,
            "metric": top * (1 - math.exp(-6 * (i + 1) / len(chosen))), "metric_name": "accuracy", "higher_is_better": True,
        }
        for i, r in enumerate(chosen)
    ]  # fmt: skip


def events(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Fabricate events: start, checkpoint, kill and resume, end."""
    chosen = {0: "start", len(records) // 2: "signal", len(records) // 2 + 1: "resume", len(records) - 1: "end"}
    chosen |= {i: "checkpoint" for i in range(0, len(records), max(1, len(records) // 12)) if i not in chosen}
    return [
        {
            "kind": "event",
            "step": records[i]["step"],
            "time": records[i]["time"],
            "event": event,
            "text": f"{event} of the run",
        }
        for i, event in sorted(chosen.items())
        if i < len(records)
    ]


def make_run(path: Path, records: list[dict[str, Any]], **settings: Any) -> Path:
    """Write a run directory."""
    path.mkdir(parents=True)
    known = {"model": "digits-cnn", "data": "digits", "scheme": "exdyna", "density": 0.001, "codec": "fp32", "ranks": 4,
             "seed": 1, "batch_size": 64, "optimizer": "sgd", "lr": 0.05, "checkpoint_every": 100} | settings  # fmt: skip
    (path / "config.toml").write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in known.items()))
    (path / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def whole_run(path: Path, count: int, **options: Any) -> Path:
    """Write a run with steps, evaluations and events."""
    settings = {key: options.pop(key) for key in ("scheme", "codec") if key in options}
    records = steps(count, **options)
    shown = {key: options[key] for key in ("ranks", "density", "seed") if key in options}
    return make_run(path, [*records, *evals(records), *events(records)], **settings, **shown)


def by_hand(step: int, **changes: Any) -> dict[str, Any]:
    """Return a step with round numbers."""
    ranks = {"min": 900, "mean": 1000, "max": 1100}
    return {
        "kind": "step", "step": step, "time": step * 0.5, "loss": {"min": 0.5, "mean": 1.0, "max": 1.5}, "lr": 0.1,
        "density": 0.011, "set_density": 0.01, "threshold": 0.5, "selected": 110, "bytes_sent": ranks,
        "bytes_received": ranks, "bytes_dense": 40_000, "imbalance": 0.1, "skipped": False,
        "seconds": {"reduce": {"min": 0, "mean": 0.001, "max": 1}}, "workloads": [50, 60], "borders": [0, 4000, 10_000],
    } | changes  # fmt: skip


def evaluation(step: int, metric: float, **changes: Any) -> dict[str, Any]:
    record = {"kind": "eval", "step": step, "time": step * 0.5, "loss": 0.75, "metric": metric, "metric_name": "accuracy"}
    return record | {"higher_is_better": True} | changes
