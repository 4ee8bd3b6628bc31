"""Unit tests: one process, no MPI. Hypothesis draws the same examples in every run."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("unit", derandomize=True, deadline=None, database=None)
settings.load_profile("unit")
