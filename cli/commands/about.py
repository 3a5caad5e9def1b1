"""`ebbtide version`."""

from __future__ import annotations

from cli.output import OutputFormat, OutputOption, print_document, render_facts


def version(output: OutputOption = OutputFormat.TABLE) -> None:
    """Print the version of Ebbtide and of Python."""
    import platform

    from scheduler.package_version import get_package_version

    document = {"ebbtide": get_package_version(), "python": platform.python_version(), "platform": platform.platform()}
    print_document(document, output, lambda: render_facts(document))
