"""Format numbers for people: units, few digits, thousands separators."""

from __future__ import annotations

import math

BYTES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B"))
SECONDS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
COUNTS = ((1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))
POWERS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def number(value: float, digits: int = 4) -> str:
    """Format a number with this many significant digits: 1,234,567 or 0.9722 or 3.2×10⁻⁷."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else ("∞" if value > 0 else "−∞")
    value = value if abs(value) >= 10**digits else float(f"{value:.{digits}g}")
    size = abs(value)
    if value == 0 or (1e-4 <= size < 10**digits and value != int(value)):
        return f"{value:.{digits}g}".replace("-", "−")
    if 1 <= size < 1e15:
        return f"{value:,.0f}".replace("-", "−")
    return power(value, digits)


def power(value: float, digits: int = 4) -> str:
    """Format a number as a multiple of a power of ten: 2×10⁻⁷, 10⁶."""
    mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
    mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
    tens = "10" + str(int(exponent)).translate(POWERS)
    return tens if mantissa == "1" else f"{mantissa}×{tens}".replace("-", "−")


def nbytes(value: float) -> str:
    """Format a number of bytes in decimal units: 2.29 MB."""
    return _with_unit(value, *pick("bytes", float(f"{value:.3g}")))


def seconds(value: float) -> str:
    """Format a duration: 8.2 ms, 34.5 s, 12 min 5 s, 3 h 12 min."""
    if not math.isfinite(value) or value < 120:
        factor, unit = (1.0, "s") if 1 <= value < 120 else pick("seconds", value)
        return _with_unit(value, factor, unit)
    minutes, rest = divmod(round(value), 60)
    if minutes < 60:
        return f"{minutes} min {rest} s" if rest else f"{minutes} min"
    return f"{minutes // 60:,} h {minutes % 60} min"


def percent(value: float, *, signed: bool = False) -> str:
    """Format a ratio as percent: 4.2 %, or with its sign: +1.05 %."""
    text = number(value * 100, 3)
    return f"+{text} %" if signed and value > 0 else f"{text} %"


def pick(kind: str, size: float) -> tuple[float, str]:
    """Choose factor and name of the unit for a value of this kind and size."""
    if kind == "percent":
        return 0.01, "%"
    if kind == "count":
        return next((unit for unit in COUNTS if size >= unit[0] and size >= 5000), COUNTS[-1])
    scale = {"bytes": BYTES, "seconds": SECONDS}.get(kind)
    if scale is None:
        return 1.0, ""
    if not math.isfinite(size) or size == 0:
        return 1.0, "B" if kind == "bytes" else "s"
    return next((unit for unit in scale if size >= unit[0]), scale[-1])


def say(kind: str, value: float) -> str:
    """Format a value of this kind: bytes, seconds, percent, or a plain number."""
    says = {"bytes": nbytes, "seconds": seconds, "percent": percent}
    return says.get(kind, number)(value)


def _with_unit(value: float, factor: float, unit: str) -> str:
    return f"{number(value / factor, 3)} {unit}"
