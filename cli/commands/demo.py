"""`ebbtide demo`: the demo, its surge of demand, and the processes of its service."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cli.output import print_message

DEMO_URL = "http://127.0.0.1:8470"
DAY_S, DAY_S_MIN = 180.0, 60.0
OpenOption = Annotated[bool, typer.Option("--open", help="Open the web console in the browser of this machine.")]
PictureOption = Annotated[
    Path | None, typer.Option("--picture", help="Save the last screen as an SVG picture as well.")
]
DayOption = Annotated[
    float, typer.Option("--day-seconds", min=DAY_S_MIN, max=86_400.0, help="Seconds in which the day passes.")
]
DemoUrlOption = Annotated[
    str, typer.Option("--url", metavar="URL", help="Address of the demo, as its output names it.")
]

app = typer.Typer(name="demo")


@app.callback(invoke_without_command=True)
def demo(
    context: typer.Context, is_opened: OpenOption = False, picture: PictureOption = None, day_s: DayOption = DAY_S
) -> None:
    """Replay a day of inference load in three minutes, with real trainings and a simulated fleet.

    Two elastic PyTorch trainings run on this machine. 24 simulated nodes share their scheduler and console. Press s, or
    the button in the console, for a surge of demand. The exit code is 0 if every claim of the last table holds.
    """
    if context.invoked_subcommand is not None:
        return
    from cli.demo.scenario import DemoOptions, run_demo

    raise typer.Exit(run_demo(DemoOptions(day_s=day_s, opens_browser=is_opened, picture=picture)))


@app.command()
def surge(url: DemoUrlOption = DEMO_URL) -> None:
    """Raise the inference demand of a running demo for 20 s, so that lent nodes are recalled."""
    from cli.connection import resolve_target
    from cli.demo.demo_routes import DemoRoutes

    target = resolve_target(url)
    with DemoRoutes(target.url, target.token) as routes:
        pools = routes.surge()["surge_gpus"]
    demand = ", ".join(f"{gpus:.0f} GPUs in {name}" for name, gpus in pools.items())
    print_message(f"The demand is now {demand}.")


@app.command(hidden=True)
def serve() -> None:
    """Run the service of the demo."""
    from cli.commands.service import run_service

    run_service(process_group=["demo"])


@app.command(hidden=True)
def controller() -> None:
    """Run the controller of the demo."""
    from cli.commands.service import run_controller_process
    from cli.demo.composition import build_demo_controller

    run_controller_process(build_demo_controller)


@app.command(hidden=True)
def api() -> None:
    """Run the API of the demo."""
    from functools import partial

    from api.demo import DemoDay
    from cli.commands.service import run_api_process
    from cli.composition.service import run_api

    run_api_process(partial(run_api, demo=DemoDay()))
