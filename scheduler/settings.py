"""Settings of the service: environment variables EBBTIDE_*, each with a default that works on one machine."""

from __future__ import annotations

import ipaddress
import os
import secrets
import ssl
import tempfile
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AfterValidator, Field
from pydantic_settings import BaseSettings, SettingsConfigDict

Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Days = Annotated[int, Field(ge=0, le=36_500)]
SECRET_BYTES = 32


def _check_http_url(text: str) -> str:
    try:
        parts = urlsplit(text)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_url = False
    if not is_url or parts.query or parts.fragment or any(mark.isspace() for mark in text):
        raise ValueError("allowed: http://HOST:PORT or https://HOST:PORT, perhaps with a path")
    return text


OptionalUrl = Annotated[str, AfterValidator(lambda text: text and _check_http_url(text))]


def is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_ca_file(file: Path) -> Path:
    try:
        ssl.create_default_context(cafile=str(file))
    except OSError as wrong:  # a file that holds none is an SSLError, which is one
        raise ValueError(f"must be a readable PEM file of certificates: {wrong}") from None
    return file


CaFile = Annotated[Path, AfterValidator(_check_ca_file)]


class Settings(BaseSettings):
    """Every field is a setting: EBBTIDE_ and its name in capitals."""

    model_config = SettingsConfigDict(env_prefix="EBBTIDE_", frozen=True, extra="ignore")

    database_url: str = Field(
        default="sqlite:///ebbtide.sqlite", description="Where all state is kept (SQLAlchemy URL)."
    )
    host: str = Field(default="127.0.0.1", description="Address that the API listens on, and the operator's probes.")
    port: int = Field(default=8787, ge=0, le=65535, description="Port that the API listens on; 0 takes a free one.")
    api_processes: int = Field(
        default=1, ge=1, le=64, description="Processes that answer on that port, each with an interpreter of its own."
    )
    public_url: str = Field(default="", description="URL of the API as workers reach it; empty: http://host:port.")
    policy: str = Field(default="ebbtide", description="Named policy set that decides.")
    executor: Literal["local"] = Field(default="local", description="What runs the workers: processes of this machine.")
    run_dir: Path = Field(
        default=Path("var/run"), description="Folder for logs, plans and checkpoints of local workers."
    )
    full_pass_period_s: Seconds = Field(default=300.0, description="Longest pause between ticks that consider lending.")
    reconfiguration_s: Seconds = Field(default=30.0, description="What a start or a resize is taken to cost a job.")
    leave_grace_s: Seconds = Field(
        default=60.0, description="How long workers may take to save and leave, without a recall."
    )
    resize_pause_s: Seconds = Field(
        default=120.0, description="Least time between two resizes of a job that nobody was forced into."
    )
    run_time_min_s: float = Field(
        default=600.0,
        ge=0,
        allow_inf_nan=False,
        description="Least time a job runs before it may be preempted for what another queue is guaranteed.",
    )
    undeclared_queues: Literal["allow", "refuse"] = Field(
        default="allow",
        description="What becomes of a job submitted to a queue that nobody declared, once some queue is declared.",
    )
    tick_s_max: Seconds = Field(default=1.0, description="Longest pause of the control loop between two ticks.")
    lease_s: Seconds = Field(default=10.0, description="A leader that is silent for so long is replaced.")
    season_s: Seconds = Field(default=86_400.0, description="Length of one season of the inference demand.")
    solver_processes: int = Field(default=1, ge=1, le=256, description="Processes that solve scaling curves.")
    log_bytes: int = Field(
        default=67_108_864, ge=65_536, description="Bytes that are kept of what each rank prints, the newest."
    )
    log_generations: int = Field(
        default=20, ge=1, description="Generations of a job of which is kept what their ranks have printed."
    )
    streams_max: int = Field(default=1000, ge=1, le=100_000, description="Most event streams that one API holds open.")
    store_host: str = Field(
        default="127.0.0.1",
        description="Where ranks that node agents start over the network find the rendezvous store.",
    )
    store_port: int = Field(default=29400, ge=1, le=65535, description="Port of that rendezvous store.")
    kubeconfig: Path | None = Field(
        default=None,
        description="How the operator reaches Kubernetes; absent: KUBECONFIG, else its own pod.",
    )
    probe_port: int = Field(
        default=0, ge=0, le=65535, description="Port of the operator's /healthz and /readyz; 0 takes a free one."
    )
    job_namespace: str = Field(
        default="default", description="Namespace of jobs that name none, on Kubernetes.", pattern=r"^[a-z0-9-]{1,63}$"
    )
    lease_namespace: str = Field(
        default="default", description="Namespace of the Lease that operators elect their leader by."
    )
    worker_image: str = Field(
        default="ebbtide/worker:latest", description="Image of the pods of jobs that name none, on Kubernetes."
    )
    prometheus_url: OptionalUrl = Field(
        default="", description="Prometheus that Pools with demand.source prometheus are asked of, on Kubernetes."
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Least level that is logged."
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="Log lines for people, or one JSON object a line."
    )
    webhook_hosts: str = Field(
        default="",
        description="Hosts, with commas between, that webhooks may lead to though their addresses are not public.",
    )
    webhook_ca_file: CaFile | None = Field(
        default=None, description="PEM file of authorities that webhooks are trusted by, beside the public ones."
    )
    simulations_at_once: int = Field(
        default=1, ge=0, le=64, description="Simulations that an API process plays at once; 0: none."
    )
    simulation_memory_bytes: int = Field(
        default=4 * 2**30, ge=2**29, description="Most memory of a simulation's process."
    )
    simulation_cpu_s: int = Field(default=3600, ge=1, description="Most processor time of a simulation's process.")
    simulation_body_bytes: int = Field(
        default=16 * 2**20, ge=1024, description="Largest request that hands in a simulation."
    )
    simulation_kept_s: Seconds = Field(
        default=30 * 86_400.0, description="How long an ended simulation is kept, with its report."
    )
    events_kept_days: Days = Field(default=90, description="Days that events and decisions are kept; 0: for ever.")
    audit_kept_days: Days = Field(default=0, description="Days that entries of the audit log are kept; 0: for ever.")
    commands_kept_days: Days = Field(default=30, description="Days that consumed commands are kept; 0: for ever.")
    deliveries_kept_days: Days = Field(
        default=7, description="Days that deliveries to webhooks are kept after their end; 0: for ever."
    )
    logs_kept_days: Days = Field(
        default=90, description="Days that logs of local jobs are kept after their end; 0: for ever."
    )
    token_secret_file: Path | None = Field(
        default=None, description="Secret that worker tokens are signed with; absent: token.secret in the run folder."
    )

    auth: Literal["on", "off", "off-everywhere"] = Field(
        default="on", description="Ask who asks. off: on loopback alone; off-everywhere: on every address."
    )
    allowed_hosts: str = Field(
        default="", description="Host names, with commas, that requests may name while auth is off, besides loopback's."
    )
    metrics_open: bool = Field(default=False, description="Let everybody read /metrics; else viewers of all queues.")
    metrics_by_job: bool = Field(
        default=False, description="Show series of each running job in /metrics, labelled by its id."
    )
    rate_per_s: Seconds = Field(
        default=100.0, description="Requests a second that one token may make, in the long run."
    )
    rate_burst: int = Field(default=200, ge=1, description="Requests that one token may make at once.")
    report_rate_per_s: Seconds = Field(
        default=20.0, description="Reports a second that one worker or agent may make, in the long run."
    )
    report_rate_burst: int = Field(default=100, ge=1, description="Reports that one worker or agent may make at once.")
    body_bytes_max: int = Field(default=1 << 20, ge=1024, description="Largest body of a request.")
    oidc_issuer: OptionalUrl = Field(default="", description="OIDC issuer whose JWTs are taken; empty: none.")
    oidc_audience: str = Field(default="ebbtide", min_length=1, description="Audience that those JWTs must name.")
    oidc_jwks_url: OptionalUrl = Field(default="", description="Where its keys are; empty: found by discovery.")
    oidc_roles_claim: str = Field(default="ebbtide", min_length=1, description="Claim that lists the grants.")
    oidc_name_claim: str = Field(default="sub", min_length=1, description="Claim that names who asks.")

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the API."""
        return is_loopback(self.host)

    @property
    def worker_url(self) -> str:
        """Where workers find the API."""
        return (self.public_url or f"http://{self.host}:{self.port}").rstrip("/")

    @property
    def token_secret_path(self) -> Path:
        return self.token_secret_file or self.run_dir / "token.secret"


def load_token_secret(path: Path) -> bytes:
    """The secret in `path`; a new one is written there, for its owner alone, when there is none.

    Several processes may call this at once: the first one's secret wins.

    Raises:
        ValueError: the file is too short for a secret, or others than its owner may read it.
    """
    if not path.exists():
        _create_secret(path)
    mode = path.stat().st_mode & 0o777
    if mode & 0o077:
        raise ValueError(f"{path} has mode {mode:04o}, a token secret needs 0600: nobody else may read it")
    secret = path.read_bytes()
    if len(secret) < SECRET_BYTES:
        raise ValueError(f"{path} holds {len(secret)} bytes, a token secret needs at least {SECRET_BYTES}")
    return secret


def _create_secret(path: Path) -> None:
    """Writes beside `path` and links, so that nobody ever reads half a secret and no secret is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, draft = tempfile.mkstemp(prefix=path.name, dir=path.parent)  # mkstemp creates with mode 0600
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(secrets.token_bytes(SECRET_BYTES))
        Path(path).hardlink_to(draft)
    except FileExistsError:
        pass  # another process was first: its secret counts
    finally:
        Path(draft).unlink()
