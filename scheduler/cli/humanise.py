"""Numbers as people say them."""

from __future__ import annotations

from datetime import UTC, datetime

MINUTE_S = 60
HOUR_S = 3_600
DAY_S = 86_400


def span(seconds: float | None) -> str:
    """A length of time, two units at most: `34 ms`, `12.5 s`, `4m05s`, `2h13m`, `3d04h`."""
    if seconds is None or seconds != seconds or seconds == float("inf"):
        return "-"
    if seconds < 0:
        return f"-{span(-seconds)}"
    if 0 < seconds < 0.9995:
        return f"{1000 * seconds:.3g} ms"
    if seconds < 10:
        return f"{seconds:.3g} s"
    if seconds < 99.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < HOUR_S:
        return f"{whole // MINUTE_S}m{whole % MINUTE_S:02d}s"
    if whole < DAY_S:
        return f"{whole // HOUR_S}h{whole % HOUR_S // MINUTE_S:02d}m"
    return f"{whole // DAY_S}d{whole % DAY_S // HOUR_S:02d}h"


def clock(at_s: float | None) -> str:
    """A time of day with its date, UTC."""
    if at_s is None:
        return "-"
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M:%S")


def size(count: float) -> str:
    """Bytes in decimal units: `61.3 GB`."""
    value = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(value) < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"


def gpus(count: float) -> str:
    """`1 GPU`, `4 GPUs`, `2.5 GPUs`."""
    return counted(count, "GPU")


def counted(count: float, what: str) -> str:
    """`1 resize`, `2 resizes`."""
    shown = number(count)
    return f"{shown} {what}" if shown == "1" else f"{shown} {what}s"


def share(ratio: float | None) -> str:
    """A ratio as per cent."""
    return "-" if ratio is None else f"{100 * ratio:.1f}%"


def number(value: float | None, digits: int = 3) -> str:
    """A figure with at most `digits` significant digits after the point and no exponent."""
    if value is None:
        return "-"
    return f"{value:,.{digits}f}".rstrip("0").rstrip(".") if digits and value % 1 else f"{value:,.0f}"
