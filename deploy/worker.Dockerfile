# Default image of agent pods: the node agent, the reference trainer, and torch with CUDA. Build it from the repository root:
#     docker build -f deploy/worker.Dockerfile -t ebbtide/worker:0.1.0 .
# Your own image must contain these two packages besides your code: agent pods run `python -P -m scheduler.agent.pod`.
FROM python:3.11-slim
RUN python -m venv /opt/ebbtide
ENV PATH=/opt/ebbtide/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp USER=ebbtide
RUN pip install --no-cache-dir torch==2.13.0
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY library library
COPY scheduler scheduler
COPY api api
COPY baselines baselines
COPY cli cli
RUN pip install --no-cache-dir ./library .
WORKDIR /tmp
# The user has no entry in /etc/passwd, so torch.compile reads its name from USER.
# Checkpoint volumes must be writable by this user: set securityContext.fsGroup in the job's template.
USER 65532:65532
