"""Types of command-line arguments, with errors that say what was expected."""

from __future__ import annotations

import argparse
import re


def count(text: str) -> int:
    """Parse a whole number of at least 1, also as 1e6 or 1_000_000."""
    try:
        value = int(float(text)) if "e" in text.lower() else int(text.replace("_", ""))
    except (ValueError, OverflowError):
        value = 0
    if not 1 <= value < 2**53:
        raise argparse.ArgumentTypeError(f"expected a whole number >= 1 and below 2^53, got {text[:40]!r}")
    return value


def elements(text: str) -> int:
    """Parse a number of elements, at most 2^36."""
    value = count(text)
    if value > 2**36:
        raise argparse.ArgumentTypeError(f"expected at most 2^36 elements, 256 GiB, got {text!r}")
    return value


def steps(text: str) -> int:
    """Parse a number of steps, at least 4."""
    value = count(text)
    if value < 4:
        raise argparse.ArgumentTypeError(f"expected at least 4 steps, because the first two are not measured, got {text!r}")
    return value


def positive(text: str) -> float:
    """Parse a number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"expected a number above 0, got {text!r}")
    return value


def above_one(text: str) -> float:
    """Parse a factor above 1."""
    value = positive(text)
    if value <= 1.0:
        raise argparse.ArgumentTypeError(f"expected a factor above 1, got {text!r}")
    return value


def rate(text: str) -> float:
    """Parse a link's rate, such as 1gbit, into bytes per second."""
    found = re.fullmatch(r"([0-9.]+)([kmg])bit", text.lower())
    try:
        bits = float(found[1]) * {"k": 1e3, "m": 1e6, "g": 1e9}[found[2]] if found else 0.0
    except ValueError:
        bits = 0.0
    if bits <= 0:
        raise argparse.ArgumentTypeError(f"expected a rate such as 1gbit, 100mbit or 64kbit, got {text!r}")
    return bits / 8


def delay(text: str) -> float:
    """Parse a time such as 50us, 2ms or 1s into seconds."""
    found = re.fullmatch(r"([0-9.]+)(us|ms|s)", text.lower())
    try:
        return float(found[1]) * {"us": 1e-6, "ms": 1e-3, "s": 1.0}[found[2]] if found else _refused(text)
    except ValueError:
        return _refused(text)


def _refused(text: str) -> float:
    raise argparse.ArgumentTypeError(f"expected a time such as 50us, 2ms or 1s, got {text!r}")


def slowdown(text: str) -> float:
    """Parse a factor of at least 1."""
    value = positive(text)
    if value < 1.0:
        raise argparse.ArgumentTypeError(f"expected a factor >= 1, how long a step may take with its exchange, got {text!r}")
    return value


def density(text: str) -> float:
    """Parse a density in (0, 1]."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0.0 < value <= 1.0:
        raise argparse.ArgumentTypeError(f"expected a number in (0, 1], got {text!r}")
    return value
