"""Settings of the service, read from `EBBTIDE_*` environment variables.

Every setting has a default that works on one machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from scheduler.domain.program import ARCHIVE_BYTES_MAX
from scheduler.network_addresses import is_loopback, to_local_authority
from scheduler.setting_types import (
    CaFile,
    GrantText,
    Networks,
    OptionalUrl,
    Price,
    Ratio,
    RetentionDays,
    Seconds,
    SecondsOrZero,
)


class Settings(BaseSettings):
    """All settings. The environment variable of a field is `EBBTIDE_` and the field's name in capitals."""

    model_config = SettingsConfigDict(env_prefix="EBBTIDE_", frozen=True, extra="ignore")

    # Storage and processes
    database_url: str = Field(
        default="sqlite:///ebbtide.sqlite",
        description="Database that holds all state, as a SQLAlchemy URL: sqlite:///FILE or postgresql+psycopg://...",
    )
    run_dir: Path = Field(
        default=Path("var/run"),
        description="Directory for logs, and for plans and checkpoints of workers on this machine. API processes on "
        "several machines must share it with the controller, which deletes old logs.",
    )
    profiles_dir: Path | None = Field(
        default=None,
        description="Directory with additional GPU profiles (gpus/*.json or *.yaml, under any name) and model profiles "
        "(models/*.json). A profile in it replaces the built-in profile of the same name, and `ebbtide hardware set` "
        "replaces both.",
    )
    archive_dir: Path | None = Field(
        default=None,
        description="Directory for uploaded working directories. API processes on several machines must share it, and "
        "so must the controller, which deletes old ones. Default: archives in EBBTIDE_RUN_DIR.",
    )
    archive_bytes_max: int = Field(
        default=ARCHIVE_BYTES_MAX,
        ge=1024,
        description="Largest uploaded working directory, compressed, in bytes, 1024 or more.",
    )
    disconnect_s: Seconds = Field(
        default=120.0,
        description="Time without contact to the API after which an agent ends its ranks, in seconds. It asks them "
        "to save in the last quarter of it, at most 20 s before the end. Jobs on machines restart elsewhere "
        "shortly afterwards. The Helm chart sets 600: a job in pods restarts once its agent has reported the end, or "
        "its pod is gone.",
    )
    temporary_machine_s: Seconds = Field(
        default=900.0,
        description="Time without contact to the API after which a machine of a Slurm allocation is removed together "
        "with its node, in seconds.",
    )
    tick_s_max: Seconds = Field(
        default=1.0, description="Longest time between two ticks of the control loop, in seconds."
    )
    lease_s: Seconds = Field(
        default=10.0,
        description="Duration of the leader lease, in seconds. Another controller takes over when it expires.",
    )
    season_s: Seconds = Field(
        default=86_400.0, description="Period after which inference demand repeats, in seconds, for the forecast."
    )
    solver_processes: int = Field(
        default=1, ge=1, le=256, description="Number of processes that solve scaling curves, 1 to 256."
    )

    # Scheduling policy. One field for each field of PolicySettings, with the same name and default.
    policy: str = Field(
        default="ebbtide",
        description="Name of the policy set that makes the decisions. List all with `ebbtide simulate --policy list`.",
    )
    full_pass_period_s: Seconds = Field(
        default=300.0, description="Longest time between two ticks that consider lending and resizing, in seconds."
    )
    reconfiguration_s: SecondsOrZero = Field(
        default=30.0, description="Assumed time that a start or a resize costs a job, in seconds."
    )
    reconfiguration_s_by_model: Mapping[str, SecondsOrZero] = Field(
        default={},
        description="Assumed reconfiguration time by model, in seconds, as a JSON object: "
        '{"gpt2": 12, "llama-2-7b": 45}. Other models use EBBTIDE_RECONFIGURATION_S.',
    )
    leave_grace_s: Seconds = Field(
        default=60.0,
        description="Time that workers have to save a checkpoint and exit, in seconds. "
        "A recall uses the return deadline of its pool instead.",
    )
    resize_pause_s: SecondsOrZero = Field(
        default=120.0,
        description="Shortest time between two voluntary resizes of one job, in seconds. Jobs that take longer than "
        "30 s to reconfigure wait proportionally longer.",
    )
    run_time_min_s: SecondsOrZero = Field(
        default=600.0,
        description="Time that a job runs before another queue's guarantee may preempt it, in seconds. 0 disables it.",
    )
    demand_stale_s: SecondsOrZero = Field(
        default=1800.0,
        description="Age at which a demand reading permits no new loans, in seconds, in pools that set no own value.",
    )
    lending_reserve: Ratio = Field(
        default=0.25,
        description="Free GPUs that lending keeps available for new jobs, as a fraction of the GPUs that training has.",
    )
    ageing_s: Seconds = Field(
        default=3600.0, description="Waiting time after which a job counts as half as long in the order, in seconds."
    )
    patience_ageings: Ratio = Field(
        default=12.0,
        description="Waiting time after which no other job overtakes a job, in multiples of EBBTIDE_AGEING_S.",
    )
    gain_factor: Ratio = Field(
        default=2.0, description="Time that a resize must save, in multiples of the job's reconfiguration time."
    )
    las_promote_ratio: Ratio = Field(
        default=0.0,
        description="With policy `las`: a job returns to the first queue after waiting this multiple of its run time. "
        "0 disables it.",
    )
    linear_scaling: bool = Field(
        default=False, description="Treat every job as if it scaled linearly, for comparison with scaling curves."
    )
    undeclared_queues: Literal["allow", "refuse"] = Field(
        default="refuse",
        description="`refuse` rejects jobs for queues that do not exist. The queue `default` always exists. `allow` "
        "accepts them. All such queues count as one queue without a guarantee, under the limits of `default`.",
    )

    # API
    host: str = Field(default="127.0.0.1", description="Address that the API and the operator's probes listen on.")
    port: int = Field(
        default=8787, ge=0, le=65535, description="Port that the API listens on, 0 to 65535. 0 selects a free port."
    )
    api_processes: int = Field(
        default=1, ge=1, le=64, description="Number of API processes on that port, 1 to 64. 2 or more need PostgreSQL."
    )
    public_url: str = Field(
        default="", description="URL at which workers reach the API. Empty: http://HOST:PORT of this process."
    )
    console_url: OptionalUrl = Field(
        default="",
        description="URL at which browsers reach the console, for login URLs and the return from the OpenID Connect "
        "issuer. Empty: EBBTIDE_PUBLIC_URL, else http://HOST:PORT of this process.",
    )
    streams_max: int = Field(
        default=1000,
        ge=1,
        le=100_000,
        description="Largest number of open event streams per API process, 1 to 100000. One token may open half of "
        "them.",
    )
    connections_max: int = Field(
        default=10_000,
        ge=16,
        le=1_000_000,
        description="Largest number of connections per API process, 16 to 1000000. A quarter of them may be "
        "unauthenticated. A lower limit of open files reduces it.",
    )
    connections_per_address: int = Field(
        default=100,
        ge=1,
        description="Unauthenticated connections of one IPv4 address or IPv6 /64 network, 1 or more. Above it, those "
        "that have waited longest are closed. Trusted proxies have no such limit.",
    )
    header_timeout_s: Seconds = Field(
        default=10.0, description="Time in which a client must send the header of a request, in seconds."
    )
    idle_timeout_s: Seconds = Field(
        default=60.0,
        description="Time without data after which a connection is closed, in seconds: between requests, within a "
        "request body, or while the client does not read a response.",
    )
    trusted_proxies: Networks = Field(
        default="",
        description="Addresses and networks of reverse proxies, comma-separated. Their `Forwarded` and `X-Forwarded-*` "
        "headers name the client's address, scheme and host. Empty: these headers are ignored.",
    )
    body_bytes_max: int = Field(
        default=1 << 20, ge=1024, description="Largest request body, in bytes, 1024 or more. Larger ones receive 413."
    )
    rate_per_s: Seconds = Field(default=100.0, description="Sustained request rate per token, in requests per second.")
    rate_burst: int = Field(
        default=200, ge=1, description="Requests that one token may send at once before the rate limit applies."
    )
    report_rate_per_s: Seconds = Field(
        default=20.0, description="Sustained report rate per worker or node agent, in requests per second."
    )
    report_rate_burst: int = Field(
        default=100,
        ge=1,
        description="Reports that one worker or node agent may send at once before the limit applies.",
    )
    metrics_open: bool = Field(
        default=False, description="Serve /metrics without authentication. Default: viewers of all queues only."
    )
    cluster: str = Field(
        default="",
        pattern=r"^[A-Za-z0-9._-]{0,63}$",
        description="Value of the label `cluster` of all metrics, at most 63 letters, digits, `.`, `_` and `-`. Set it "
        "if one Prometheus scrapes several installations. Empty: no label, so that Prometheus may add its own.",
    )
    metrics_by_job: bool = Field(
        default=False, description="Add one series per running job to /metrics, labelled with the job id."
    )

    # Authentication
    auth: Literal["on", "off", "off-everywhere"] = Field(
        default="on",
        description="Require authentication. `off` is accepted only on a loopback address, `off-everywhere` on any.",
    )
    allowed_hosts: str = Field(
        default="",
        description="Host names accepted in requests while authentication is off, comma-separated. Loopback names are "
        "always accepted.",
    )
    token_secret_file: Path | None = Field(
        default=None,
        description="File with the secret that signs worker tokens and webhooks, 32 bytes or more, mode 0600. "
        "Default: token.secret in EBBTIDE_RUN_DIR, created on first use.",
    )
    secrets_key_file: Path | None = Field(
        default=None,
        description="File with the master keys that encrypt secrets, mode 0600, shared by all API processes, with one "
        "line `<id>:<base64 of 32 random bytes>` per key. Default: secrets.key in EBBTIDE_RUN_DIR, created "
        "on first use.",
    )
    oidc_issuer: OptionalUrl = Field(
        default="", description="OpenID Connect issuer whose tokens are accepted, exactly as in `iss`. Empty: none."
    )
    oidc_audience: str = Field(
        default="ebbtide", min_length=1, description="Audience (`aud`) that OpenID Connect tokens must contain."
    )
    oidc_jwks_url: OptionalUrl = Field(
        default="", description="URL of the issuer's signing keys (JWKS). Empty: found by OpenID Connect discovery."
    )
    oidc_roles_claim: str = Field(
        default="ebbtide",
        min_length=1,
        description="Token claim that lists grants, such as `submitter:research`.",
    )
    oidc_name_claim: str = Field(default="sub", min_length=1, description="Token claim with the caller's name.")
    oidc_groups_claim: str = Field(
        default="groups", min_length=1, description="Token claim that lists the caller's groups."
    )
    oidc_groups: Mapping[str, tuple[GrantText, ...]] = Field(
        default={},
        description='Grants by group, as JSON, such as `{"ml-research": ["submitter:research"], "ops": ["admin"]}`. '
        "Groups that are not listed grant nothing.",
    )

    audit_chain: bool = Field(
        default=False,
        description="Give each audit log entry a digest that covers the entry before it, so that `ebbtide audit "
        "verify` finds changed, removed, inserted and moved entries. Set it for all processes alike.",
    )

    oidc_client_id: str = Field(
        default="",
        description="Client id of the console at the OpenID Connect issuer. Empty: the console accepts tokens only.",
    )
    oidc_client_secret: str = Field(
        default="",
        repr=False,
        description="Client secret of the console at the issuer. Empty: a public client, which PKCE protects.",
    )
    oidc_scopes: str = Field(
        default="openid profile",
        pattern=r"^openid( [!#-\[\]-~]+)*$",
        description="Scopes that the console requests from the issuer, separated by blanks. `openid` comes first.",
    )
    session_s: Seconds = Field(
        default=43_200.0,
        description="Longest duration of a console session, in seconds. A session ends earlier with the token that "
        "opened it.",
    )

    # Logs
    access_log: Literal["off", "changes", "all"] = Field(
        default="changes",
        description="Requests that are logged as one JSON object per line: none, those of users other than GET, or all "
        "of them. Failed authentications are always logged, up to 10 per minute and address.",
    )
    log_level: Literal["DEBUG", "INFO", "WARNING", "ERROR"] = Field(
        default="INFO", description="Lowest level of log records that are written: DEBUG, INFO, WARNING or ERROR."
    )
    log_format: Literal["text", "json"] = Field(
        default="text", description="`text` writes log lines for people, `json` one JSON object per line."
    )
    log_bytes: int = Field(
        default=67_108_864,
        ge=65_536,
        description="Newest output retained per rank, in bytes, 65536 or more. Also applies to each local agent.",
    )
    log_generations: int = Field(
        default=20, ge=1, description="Number of generations of one job whose rank output is retained."
    )

    # Retention
    events_kept_days: RetentionDays = Field(
        default=90, description="Retention of events, decisions and ended allocations, in days. 0 retains them forever."
    )
    audit_kept_days: RetentionDays = Field(
        default=0, description="Retention of audit log entries, in days. 0 retains them forever."
    )
    commands_kept_days: RetentionDays = Field(
        default=30,
        description="Retention of processed commands, in days. 0 retains them forever. Submissions are never deleted.",
    )
    deliveries_kept_days: RetentionDays = Field(
        default=7, description="Retention of completed webhook deliveries, in days. 0 retains them forever."
    )
    logs_kept_days: RetentionDays = Field(
        default=90,
        description="Retention of local jobs' logs after the job ends, in days. 0 retains them forever. "
        "Checkpoints are never deleted.",
    )
    archives_kept_days: RetentionDays = Field(
        default=30,
        description="Retention of uploaded working directories after their last use by a job, in days. 0 retains them "
        "forever.",
    )

    jobs_kept_days: RetentionDays = Field(
        default=365,
        description="Retention of the records of ended jobs, loans and recalls, in days after their end. 0 retains "
        "them forever.",
    )
    readings_kept_days: RetentionDays = Field(
        default=90,
        description="Retention of demand readings, in days, but at least the 14 seasons (EBBTIDE_SEASON_S) that the "
        "forecast uses. 0 retains them forever.",
    )
    usage_kept_days: RetentionDays = Field(
        default=1095,
        description="Retention of hourly usage and of daily comparisons, in days. 0 retains them forever.",
    )
    capacity_kept_days: RetentionDays = Field(
        default=400, description="Retention of the hourly use of pools, in days. 0 retains it forever."
    )
    checkpoints_kept_days: RetentionDays = Field(
        default=30,
        description="Retention of hourly checkpoints of the fleet, and of its changes between them, in days. 0 retains "
        "them forever.",
    )

    # Prices
    gpu_prices: Mapping[str, Price] = Field(
        default={},
        description="Price of a GPU-hour by GPU model, as a JSON object such as "
        '{"h100-80g": 2.5, "a100-80g": 1.2}. The page about savings shows amounts for these models only.',
    )
    currency: str = Field(
        default="USD",
        description="Currency of EBBTIDE_GPU_PRICES, as a code of ISO 4217 such as USD.",
        pattern=r"^[A-Z]{3}$",
    )

    # Webhooks
    webhook_hosts: str = Field(
        default="",
        description="Hosts with private addresses that webhooks may be sent to, comma-separated, as in the URL.",
    )
    webhook_ca_file: CaFile | None = Field(
        default=None,
        description="PEM file of certificate authorities trusted for webhooks, in addition to the public ones.",
    )

    # Simulations
    simulations_at_once: int = Field(
        default=1, ge=0, le=64, description="Simulations that one API process runs at once, 0 to 64. 0 runs none."
    )
    daily_comparison: bool = Field(
        default=True,
        description="Simulate the jobs of the last seven days once a day without lending and without elasticity, for "
        "the page about savings: true or false.",
    )
    simulation_memory_bytes: int = Field(
        default=4 * 2**30, ge=2**29, description="Memory limit of one simulation, in bytes, 512 MiB or more."
    )
    simulation_cpu_s: int = Field(default=3600, ge=1, description="CPU time limit of one simulation, in seconds.")
    simulation_body_bytes: int = Field(
        default=16 * 2**20, ge=1024, description="Largest body of a request that submits a simulation, in bytes."
    )
    demand_body_bytes: int = Field(
        default=4 * 2**20, ge=1024, description="Largest body of a request that reports inference demand, in bytes."
    )
    simulation_kept_s: Seconds = Field(
        default=30 * 86_400.0, description="Retention of completed simulations and their reports, in seconds."
    )

    # Kubernetes
    kubeconfig: Path | None = Field(
        default=None,
        description="Kubeconfig file of the operator. Default: KUBECONFIG, else the pod's service account.",
    )
    kubernetes_qps: float = Field(
        default=200.0,
        gt=0,
        le=10_000,
        description="Requests per second of the operator to the API server on average, above 0 and at most 10000.",
    )
    kubernetes_burst: int = Field(
        default=400,
        ge=1,
        le=20_000,
        description="Requests to the API server that the operator may send at once, 1 to 20000.",
    )
    probe_port: int = Field(
        default=0,
        ge=0,
        le=65535,
        description="Port of the operator's /healthz and /readyz, 0 to 65535. 0 selects a free port.",
    )
    job_namespace: str = Field(
        default="default",
        description="Namespace of jobs that set none, a DNS label of up to 63 characters.",
        pattern=r"^[a-z0-9-]{1,63}$",
    )
    lease_namespace: str = Field(default="default", description="Namespace of the Lease for leader election.")
    worker_image: str = Field(
        default="ebbtide/worker:latest", description="Container image of worker pods whose job sets none."
    )
    agent_image: str = Field(
        default="ebbtide/agent:latest", description="Container image that brings the node agent into worker pods."
    )
    agent_delivery: Literal["init-container", "image-volume"] = Field(
        default="init-container",
        description="`init-container` copies the node agent into each worker pod. `image-volume` mounts its image "
        "instead, which needs Kubernetes 1.33 and a container runtime that mounts image volumes executable.",
    )
    image_pull_secrets: str = Field(
        default="",
        description="Secrets for the images of worker pods, comma-separated, besides those of the job's template. Each "
        "namespace with jobs needs Secrets of these names.",
        pattern=r"^([a-z0-9][a-z0-9.-]{0,251}[a-z0-9](,[a-z0-9][a-z0-9.-]{0,251}[a-z0-9])*)?$",
    )
    pod_start_timeout_s: Seconds = Field(
        default=120.0,
        le=900,
        description="Time in which the image, volumes and network of a worker pod must become ready once its job has "
        "GPUs, in seconds, at most 900. After it, the job gives up its GPUs and avoids the node for a while.",
    )
    prometheus_url: OptionalUrl = Field(
        default="", description="URL of the Prometheus server for pools with a demand source. Empty: none."
    )

    @property
    def is_loopback(self) -> bool:
        """Whether only this machine can reach the API."""
        return is_loopback(self.host)

    @property
    def worker_url(self) -> str:
        """URL at which workers reach the API, without a trailing slash."""
        return (self.public_url or f"http://{self.host}:{self.port}").rstrip("/")

    @property
    def browser_url(self) -> str:
        """URL at which browsers reach the console, without a trailing slash."""
        if given := self.console_url or self.public_url:
            return given.rstrip("/")
        return f"http://{to_local_authority(self.host, self.port)}"

    @property
    def archive_path(self) -> Path:
        return self.archive_dir or self.run_dir / "archives"

    @property
    def token_secret_path(self) -> Path:
        return self.token_secret_file or self.run_dir / "token.secret"

    @property
    def secrets_key_path(self) -> Path:
        return self.secrets_key_file or self.run_dir / "secrets.key"
