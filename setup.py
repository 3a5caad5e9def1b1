"""Build of the server's wheel, which needs the console's libraries from npm. Everything else is in pyproject.toml."""

from __future__ import annotations

import os
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.errors import SetupError

MODULES = Path(__file__).parent / "api" / "console" / "node_modules"
LIBRARIES = ("uplot/dist/uPlot.iife.min.js", "uplot/dist/uPlot.min.css", "swagger-ui-dist/swagger-ui-bundle.js")
WITHOUT_CONSOLE = "EBBTIDE_BUILD_WITHOUT_CONSOLE"


class BuildWithConsole(build_py):
    """Build that fails without the console's libraries. An editable installation finds them once they are there."""

    def run(self) -> None:
        missing = [name for name in LIBRARIES if not (MODULES / name).is_file()]
        if missing and not self.editable_mode and not os.environ.get(WITHOUT_CONSOLE):
            raise SetupError(
                f"{MODULES / missing[0]} is missing: the console would have no charts. Run `make console`, which needs "
                f"npm, and build again. Set {WITHOUT_CONSOLE}=1 for an installation that serves no console."
            )
        super().run()


setup(cmdclass={"build_py": BuildWithConsole})
