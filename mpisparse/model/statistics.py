"""Statistics of steps that exchanged nothing, or that had frozen parameters."""

from __future__ import annotations

import dataclasses

from mpisparse.core.records import Stats


def of_idle_step(step: int, set_density: float, threshold: float, sent: int, received: int, *, skipped: bool) -> Stats:
    """Return the statistics of a step in which nothing was exchanged. sent, received: bytes moved nevertheless."""
    return Stats(
        step=step, density=0.0, set_density=set_density, selected=0, threshold=threshold, bytes_sent=sent,
        bytes_received=received, control_bytes=received, imbalance=0.0, seconds={}, skipped=skipped,
    )  # fmt: skip


def of_the_rest(stats: Stats, size: int, remaining: int) -> Stats:
    """Return densities as shares of what is not frozen."""
    names = ("density", "set_density", "sent_density")
    shares = {name: min(1.0, getattr(stats, name) * size / max(1, remaining)) for name in names}
    return dataclasses.replace(stats, **shares)
