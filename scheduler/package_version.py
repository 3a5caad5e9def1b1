"""Version of the installed distribution."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

DISTRIBUTION = "ebbtide-server"


def get_package_version() -> str:
    """Return the installed version, or "source" if the package is not installed."""
    try:
        return version(DISTRIBUTION)
    except PackageNotFoundError:
        return "source"
