# Default image of agent pods, and of the agent in compose.yaml: the reference trainer, and torch with CUDA. Build it from
# the repository root:
#     docker build -f deploy/worker.Dockerfile -t ebbtide/worker:0.1.0 .
# Images of your own need nothing of it: agent pods bring the agent along (deploy/agent.Dockerfile).
# deploy/README.md says where the digest comes from.
FROM python:3.11-slim@sha256:90744cff8f32887f075c47d747a173ff333e9e98801667af93c357fa9f5e28ff
# torch.compile calls gcc. NCCL loads libibverbs and the drivers of InfiniBand and RoCE adapters when it finds them.
# Versions are not pinned: Debian deletes old ones, and the base image pins the release that they come from.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libibverbs1 ibverbs-providers librdmacm1 \
    && rm -rf /var/lib/apt/lists/*
RUN python -m venv /opt/ebbtide
ENV PATH=/opt/ebbtide/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp USER=ebbtide \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility
# torch from the Python index is the CUDA build. A layer of its own survives changes of Ebbtide.
RUN pip install --no-cache-dir torch==2.13.0
WORKDIR /src
COPY pyproject.toml setup.py README.md LICENSE ./
COPY library library
COPY scheduler scheduler
COPY api api
COPY baselines baselines
COPY cli cli
COPY helm/ebbtide helm/ebbtide
COPY deploy/*.service deploy/
# The worker image serves no console, so it needs no libraries from npm.
RUN EBBTIDE_BUILD_WITHOUT_CONSOLE=1 pip install --no-cache-dir ./library .
WORKDIR /tmp
# The user has no entry in /etc/passwd, so torch.compile reads its name from USER.
# Checkpoint volumes must be writable by this user: set securityContext.fsGroup in the job's template.
USER 65532:65532
