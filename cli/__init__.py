"""The command line: subcommands, the demo, and the composition of the service's processes."""

from __future__ import annotations


def main() -> None:
    """Run `ebbtide` and exit with one of `cli.exit_codes.ExitCode`."""
    from cli.app import app

    app(prog_name="ebbtide")
