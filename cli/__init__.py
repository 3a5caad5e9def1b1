"""The command line. Each module holds a group of verbs; `app` puts them together."""

from __future__ import annotations


def main() -> None:
    """Run `ebbtide` on this process's arguments; ends the process with 0 (done), 1 (failed) or 2 (bad input)."""
    from cli.app import app

    app(prog_name="ebbtide")
