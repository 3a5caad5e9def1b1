"""`python -m scheduler.telemetry.exporter --folder PATH --port PORT`: serves the metric files of a folder over HTTP.

Runs next to a process that serves no HTTP, such as the operator, on the folder of its PROMETHEUS_MULTIPROC_DIR.
This module must not import `metrics`, which would open files of its own in the folder: in another container of the same
pod it may have the same process id.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
from pathlib import Path

from prometheus_client import CollectorRegistry, start_http_server

from scheduler.telemetry.exposition import ClusterCollector
from scheduler.telemetry.multiprocess_files import MetricFilesCollector

logger = logging.getLogger(__name__)

_STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s exporter %(levelname)s %(message)s")
    arguments = _arguments()
    signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)  # in all threads, for sigwait
    registry = CollectorRegistry()
    registry.register(ClusterCollector((MetricFilesCollector(str(arguments.folder)),), arguments.cluster))
    server, thread = start_http_server(arguments.port, arguments.host, registry)
    logger.info("serving %s on %s:%d", arguments.folder, arguments.host, server.server_port)
    signal.sigwait(_STOP_SIGNALS)
    server.shutdown()
    server.server_close()
    thread.join()


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m scheduler.telemetry.exporter", description="Serve /metrics.")
    parser.add_argument("--folder", type=_folder, required=True, help="folder with the metric files")
    parser.add_argument("--port", type=int, required=True, help="port to listen on; 0 picks a free port")
    parser.add_argument(
        "--cluster",
        default=os.environ.get("EBBTIDE_CLUSTER", ""),
        help="value of the label `cluster`; default: the environment variable EBBTIDE_CLUSTER",
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on")
    return parser.parse_args()


def _folder(text: str) -> Path:
    if not Path(text).is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a folder")
    return Path(text)


if __name__ == "__main__":
    main()
