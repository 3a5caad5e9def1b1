"""The view of a job's specification: the submitted document with defaults filled in."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired

from pydantic import Field
from typing_extensions import TypedDict

from scheduler.domain.job_account import OnResize
from scheduler.domain.plan_limits import PlanDimension


class GpuRangeView(TypedDict):
    min: Annotated[int, Field(description="Fewest GPUs that the job can run on.")]
    max: Annotated[int, Field(description="Most GPUs that the job can use.")]


class GpuRangeSpecView(GpuRangeView):
    """Range of GPUs as the owner declared it."""

    mix: NotRequired[
        Annotated[
            Literal["never"],
            Field(description="The job never holds GPUs of several models at once. Absent: it may."),
        ]
    ]


class WorkdirView(TypedDict):
    archive: Annotated[str, Field(description="Digest of the archive: `sha256:` and 64 hexadecimal digits.")]


class VolumeClaimView(TypedDict):
    claimName: Annotated[str, Field(description="Name of the persistent volume claim, in the namespace of the job.")]


class VolumeView(TypedDict):
    persistentVolumeClaim: Annotated[VolumeClaimView, Field(description="The claim to mount in all pods of the job.")]
    subPath: NotRequired[Annotated[str, Field(description="Directory in the volume. Absent: the job's id.")]]


class CheckpointSpecView(TypedDict):
    dir: Annotated[
        str,
        Field(description="Directory or object store for checkpoints. Empty: a directory that the executor chooses."),
    ]
    interval: Annotated[float, Field(description="Seconds between two checkpoints.")]
    keep: Annotated[int, Field(description="Number of newest checkpoints that are not deleted.")]
    path: NotRequired[
        Annotated[str, Field(description="Pattern of the checkpoints that a script without a session writes.")]
    ]
    signal: NotRequired[Annotated[str, Field(description="Signal on which such a script saves a checkpoint.")]]
    volume: NotRequired[Annotated[VolumeView, Field(description="Volume mounted at `dir`. Absent: none.")]]


class KubernetesSecretView(TypedDict):
    name: Annotated[str, Field(description="Name of the Secret, in the namespace of the pods.")]
    key: Annotated[str, Field(description="Key of the Secret that holds the value.")]


class JobResourcesView(TypedDict):
    """Memory and cores that a job may use. Absent fields: the job states none."""

    memory: NotRequired[Annotated[int, Field(description="Main memory in bytes.")]]
    cpu: NotRequired[Annotated[float, Field(description="Number of cores.")]]


class PlanLimitsView(TypedDict):
    """Limits of a job's parallel plans. Absent fields set no limit."""

    without: NotRequired[Annotated[list[PlanDimension], Field(description="Dimensions that plans may not use.")]]
    max: NotRequired[Annotated[dict[PlanDimension, int], Field(description="Largest degree by dimension.")]]
    exclusive: NotRequired[
        Annotated[list[list[PlanDimension]], Field(description="Pairs of dimensions that a plan may not use together.")]
    ]
    microBatchesMin: NotRequired[Annotated[int, Field(description="Fewest micro-batches of a step.")]]
    microBatchesMax: NotRequired[Annotated[int, Field(description="Most micro-batches of a step.")]]
    replicaSamplesMax: NotRequired[
        Annotated[int, Field(description="Most samples of a micro-batch on one data-parallel replica.")]
    ]
    fullPipeline: NotRequired[
        Annotated[bool, Field(description="Whether a step needs at least as many micro-batches as pipeline stages.")]
    ]
    wholeRounds: NotRequired[
        Annotated[bool, Field(description="Whether the number of micro-batches is a multiple of the pipeline stages.")]
    ]
    uniform: NotRequired[Annotated[bool, Field(description="Whether all layers have the same strategy.")]]
    equalStages: NotRequired[
        Annotated[bool, Field(description="Whether all pipeline stages have the same number of layers.")]
    ]
    simplicity: NotRequired[
        Annotated[
            float,
            Field(description="Fraction by which a step of the plan with the fewest strategies may take longer."),
        ]
    ]


class SecretReferenceView(TypedDict):
    """A reference to a secret. No response of the service contains a value."""

    name: NotRequired[Annotated[str, Field(description="Secret of the job's queue. Absent: `kubernetesSecret`.")]]
    kubernetesSecret: NotRequired[
        Annotated[KubernetesSecretView, Field(description="Key of a Kubernetes Secret. Absent: `name`.")]
    ]
    env: NotRequired[Annotated[str, Field(description="Variable of each rank with the value. Absent: `file`.")]]
    file: NotRequired[Annotated[str, Field(description="File in EBBTIDE_SECRETS_DIR. Absent: `env`.")]]


class JobSpecView(TypedDict):
    """The job document with defaults filled in. Durations are in seconds."""

    name: Annotated[str, Field(description="Display name, from which the id is made.")]
    gpus: Annotated[GpuRangeSpecView, Field(description="Range of GPUs that the job accepts.")]
    queue: Annotated[str, Field(description="Queue whose GPU quota the job uses.")]
    priority: Annotated[int, Field(description="-1000 to 1000. Higher values are scheduled first.")]
    gpu: NotRequired[Annotated[str, Field(description="Profile name of the required GPU model. Absent: any.")]]
    model: NotRequired[Annotated[str, Field(description="Built-in model profile. Absent: none, or `profile`.")]]
    profile: NotRequired[
        Annotated[dict[str, Any], Field(description="The job's own model profile. Absent: none, or `model`.")]
    ]
    globalBatch: NotRequired[Annotated[int, Field(description="Samples per optimizer step. Absent: unknown.")]]
    sequenceLength: NotRequired[Annotated[int, Field(description="Tokens per sample. Absent: that of the model.")]]
    framework: NotRequired[
        Annotated[str, Field(description="Training framework in whose words the command gets each plan. Absent: none.")]
    ]
    steps: NotRequired[Annotated[int, Field(description="Declared number of optimizer steps. Absent: unknown.")]]
    durationEstimate: NotRequired[
        Annotated[float, Field(description="Expected run time on `gpus.min` GPUs, in seconds. Absent: none.")]
    ]
    deadline: NotRequired[
        Annotated[float, Field(description="Seconds from submission within which the job must end. Absent: none.")]
    ]
    maxRunTime: NotRequired[
        Annotated[
            float, Field(description="Seconds from the first start after which the job is ended. Absent: no limit.")
        ]
    ]
    retries: Annotated[int, Field(description="Failed runs that are retried. Runs lost with their node do not count.")]
    hangTimeout: Annotated[
        float | Literal["never"],
        Field(description="Seconds without progress after which a run is restarted, or `never`."),
    ]
    command: Annotated[list[str], Field(description="Command of each rank, with its arguments.")]
    launch: NotRequired[
        Annotated[Literal["node"], Field(description="The command starts once per node. Absent: once per GPU.")]
    ]
    workdir: NotRequired[
        Annotated[WorkdirView, Field(description="Folder in which every rank starts. Absent: chosen by the executor.")]
    ]
    setup: NotRequired[
        Annotated[list[str], Field(description="Command that runs once per machine in `workdir`. Absent: none.")]
    ]
    venv: NotRequired[
        Annotated[str, Field(description="Virtual environment of the command. Absent: the PATH of the machine.")]
    ]
    image: NotRequired[
        Annotated[str, Field(description="Container image of the pods. Absent: the setting `worker_image`.")]
    ]
    env: Annotated[dict[str, str], Field(description="Environment variables that each rank gets, by name.")]
    labels: NotRequired[Annotated[dict[str, str], Field(description="Keys and values of the labels. Absent: none.")]]
    secrets: NotRequired[
        Annotated[
            list[SecretReferenceView], Field(description="Secrets that each rank gets, by reference. Absent: none.")
        ]
    ]
    checkpoint: Annotated[CheckpointSpecView, Field(description="Location, interval and number of checkpoints.")]
    onResize: NotRequired[
        Annotated[OnResize, Field(description="What a resize does to the job. Absent: see `resize_mode` of the job.")]
    ]
    fungible: Annotated[bool, Field(description="Whether the job can run on nodes on loan from inference pools.")]
    speeds: NotRequired[
        Annotated[
            dict[str, float],
            Field(description="Declared relative speed of a GPU by model. Absent: as measured, else by GPU profiles."),
        ]
    ]
    lengths: NotRequired[
        Annotated[
            dict[str, int],
            Field(description="Number of samples by their length in tokens. Absent: all samples are equally long."),
        ]
    ]
    plan: NotRequired[Annotated[PlanLimitsView, Field(description="Limits of the job's parallel plans. Absent: none.")]]
    namespace: NotRequired[
        Annotated[str, Field(description="Kubernetes namespace of the pods. Absent: the setting `job_namespace`.")]
    ]
    template: NotRequired[
        Annotated[
            dict[str, Any], Field(description="Kubernetes pod template. Absent: a pod that runs `command` in `image`.")
        ]
    ]
    resources: NotRequired[
        Annotated[JobResourcesView, Field(description="Memory and cores that the job may use. Absent: none stated.")]
    ]
    resourcesPer: NotRequired[
        Annotated[
            Literal["gpu"],
            Field(description="`gpu`: resources are those for one GPU. Absent: they are for all GPUs on a node."),
        ]
    ]
