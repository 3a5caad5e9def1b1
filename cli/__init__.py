"""The command line: subcommands, the demo, and the composition of the service's processes."""

from __future__ import annotations


def main() -> None:
    """Run `ebbtide` and exit: code 0 for success, 1 for failure, 2 for invalid input."""
    from cli.app import app

    app(prog_name="ebbtide")
