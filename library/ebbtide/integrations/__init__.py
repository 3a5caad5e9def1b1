"""Integrations with training frameworks, one module each: `transformers`, `accelerate`, `lightning`, `torchtitan`.

Each module needs its framework, and nothing here imports one before it is used. The how-to `use-your-framework` has a
complete example for each.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

__all__ = ["accelerate", "lightning", "torchtitan", "transformers"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def require_framework(package: str) -> None:
    """Check that a framework is installed.

    Raises:
        ModuleNotFoundError: it is not; the message says what to install.
    """
    if find_spec(package) is None:
        raise ModuleNotFoundError(
            f"`ebbtide.integrations.{package}` needs the package `{package}`, which is not installed in this "
            f"environment. Install it with `pip install {package}`, or use `ebbtide.Session` in a training loop of "
            "your own.",
            name=package,
        )
