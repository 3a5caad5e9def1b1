"""`ebbtide console`: a URL that opens the web console, signed in."""

from __future__ import annotations

from typing import Annotated

import typer

from cli.connection import DEFAULT_URL, UrlOption, resolve_target, service_client
from cli.exit_codes import CommandError
from cli.output import OutputFormat, OutputOption, format_time, print_document, print_message

OpenOption = Annotated[bool, typer.Option("--open", help="Open the URL in the browser of this machine.")]


def console(
    url: UrlOption = DEFAULT_URL, is_opened: OpenOption = False, output: OutputOption = OutputFormat.TABLE
) -> None:
    """Print a URL that opens the web console, signed in as you. It works once."""
    with service_client(url) as client:
        created = client.create_login_code()
    address = format_login_url(resolve_target(url).url, created["code"])
    print_message(f"The URL works once, until {format_time(created['expires_at_s'])} UTC.")
    print_document({"url": address, "expires_at_s": created["expires_at_s"]}, output, lambda: address)
    if is_opened:
        import webbrowser

        if not webbrowser.open(address):
            raise CommandError("no browser was found. Open the URL yourself.")


def format_login_url(service_url: str, code: str) -> str:
    """Return the URL of the console with a login code. Browsers keep its fragment to themselves."""
    return f"{service_url.rstrip('/')}/#/login?code={code}"
