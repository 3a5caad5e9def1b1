# What agent pods run of jobs that name no image of their own: the node agent, the reference trainer, torch with CUDA.
#     docker build -f deploy/worker.Dockerfile -t ebbtide/worker:0.1.0 .
# An image of your own needs this package beside your code: agent pods start `python -m scheduler.worker.pod_agent`.
FROM python:3.11-slim
RUN python -m venv /opt/ebbtide
ENV PATH=/opt/ebbtide/bin:$PATH PYTHONUNBUFFERED=1 PYTHONDONTWRITEBYTECODE=1 HOME=/tmp USER=ebbtide
RUN pip install --no-cache-dir torch==2.13.0
WORKDIR /src
COPY pyproject.toml README.md LICENSE ./
COPY scheduler scheduler
COPY api api
COPY baselines baselines
COPY cli cli
RUN pip install --no-cache-dir .
WORKDIR /tmp
# This user has no entry in /etc/passwd: torch.compile finds its name in USER.
# Checkpoint volumes have to be writable for it: set securityContext.fsGroup in the job's template.
USER 65532:65532
