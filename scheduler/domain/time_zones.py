"""Time zones by IANA name, and local times in them."""

from __future__ import annotations

from datetime import UTC, datetime
from functools import lru_cache
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError, available_timezones

from scheduler.domain.suggestions import suggest


@lru_cache(maxsize=1_024)
def is_zone(name: str) -> bool:
    """Return whether an IANA time zone has this name. UTC exists on hosts without a database of zones, too."""
    if name == "UTC":
        return True
    try:
        ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):  # OSError: a folder of the database, such as Europe
        return False
    return True


def describe_zone_form(name: str) -> str:
    """Return the accepted form of a zone's name, with the zone that an unknown `name` may stand for."""
    return f"an IANA time zone such as Europe/Berlin{suggest(name, _list_zones())}"


@lru_cache(maxsize=1)
def _list_zones() -> tuple[str, ...]:
    return tuple(sorted(available_timezones()))


@lru_cache(maxsize=65_536)
def find_utc_offset_s(zone: str, hour: int) -> float:
    """Return by how many seconds a zone is ahead of UTC in an hour, counted from 1970."""
    offset = to_local(zone, hour * 3_600.0).utcoffset()
    assert offset is not None
    return offset.total_seconds()


def to_local(zone: str, at_s: float) -> datetime:
    """Return an instant, in seconds since 1970, as a local time that knows its zone."""
    return datetime.fromtimestamp(at_s, UTC).astimezone(ZoneInfo(zone))


def to_instant_s(local: datetime, zone: str) -> float:
    """Return a time as seconds since 1970. A time without an offset is local to `zone`.

    Of two instants with the same local time, the first one counts. A local time that daylight saving skips is read with
    the offset before the change.
    """
    return (local if local.utcoffset() is not None else local.replace(tzinfo=ZoneInfo(zone), fold=0)).timestamp()
