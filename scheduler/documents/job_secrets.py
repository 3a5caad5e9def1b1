"""The secrets of a job document: references by name, never values."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, Self

from pydantic import AfterValidator, Field, model_validator
from pydantic_core import PydanticCustomError

from scheduler.documents.document import CAMEL_CASE, Document, Label, Text, invalid_field
from scheduler.domain.job_spec import JobSpec
from scheduler.domain.secret_reference import FILE_FORM, KubernetesSecretKey, SecretReference, find_file_problem

_KUBERNETES_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?", re.ASCII)
_KUBERNETES_KEY = re.compile(r"[-._a-zA-Z0-9]{1,253}", re.ASCII)


def _check_file(name: str) -> str:
    if name and find_file_problem(name):
        raise PydanticCustomError("file", "Input should be {form}", {"form": FILE_FORM})
    return name


def _check_kubernetes_name(name: str) -> str:
    if not _KUBERNETES_NAME.fullmatch(name):
        raise PydanticCustomError("name", "Input should be the name of a Kubernetes Secret: a-z, 0-9, '-' and '.'")
    return name


def _check_key(key: str) -> str:
    if not _KUBERNETES_KEY.fullmatch(key):
        raise PydanticCustomError("key", "Input should be a key of a Kubernetes Secret: letters, digits, '-', '_', '.'")
    return key


class KubernetesSecretDocument(Document):
    """A key of a Kubernetes Secret. The kubelet reads it; Ebbtide never does."""

    name: Annotated[str, AfterValidator(_check_kubernetes_name)] = Field(
        description="Name of the Secret, in the namespace of the job's pods."
    )
    key: Annotated[str, AfterValidator(_check_key)] = Field(description="Key of the Secret that holds the value.")


class SecretDocument(Document):
    """A secret that each rank gets, as an environment variable or as a file."""

    model_config = CAMEL_CASE
    name: Label | None = Field(
        default=None, description="Name of a secret of the job's queue (`ebbtide secrets set`). Null: kubernetesSecret."
    )
    kubernetes_secret: KubernetesSecretDocument | None = Field(
        default=None, description="Key of a Kubernetes Secret, for jobs in pods, instead of `name`. Null: none."
    )
    env: Text = Field(default="", description="Environment variable of each rank that holds the value. Empty: `file`.")
    file: Annotated[str, AfterValidator(_check_file)] = Field(
        default="",
        description="Name of a file with the value, in the folder EBBTIDE_SECRETS_DIR of each rank. Empty: `env`.",
    )

    @model_validator(mode="after")
    def _check_alternatives(self) -> Self:
        if (self.name is None) == (self.kubernetes_secret is None):
            raise invalid_field("name", self.name, "either name or kubernetesSecret")
        if bool(self.env) == bool(self.file):
            raise invalid_field("env", self.env, "either env or file")
        return self


def check_secrets(secrets: Iterable[SecretDocument], env: Mapping[str, str]) -> None:
    """Check that no two values have the same variable or file.

    Raises:
        PydanticCustomError: two have.
    """
    variables, files = set(env), set[str]()
    for number, secret in enumerate(secrets):
        if secret.env and secret.env in variables:
            raise invalid_field(f"secrets.{number}.env", secret.env, "a variable that nothing else sets")
        if secret.file and secret.file in files:
            raise invalid_field(f"secrets.{number}.file", secret.file, "a file that no other secret has")
        variables.add(secret.env)
        files.add(secret.file)


def to_secret_references(secrets: Iterable[SecretDocument]) -> tuple[SecretReference, ...]:
    return tuple(
        SecretReference(
            each.name or "",
            None
            if each.kubernetes_secret is None
            else KubernetesSecretKey(each.kubernetes_secret.name, each.kubernetes_secret.key),
            each.env,
            each.file,
        )
        for each in secrets
    )


def to_secret_documents(references: Iterable[SecretReference]) -> list[dict[str, Any]]:
    """Return the document form of references, without unset options."""
    return [
        {
            **({"name": each.name} if each.name else {}),
            **(
                {"kubernetesSecret": {"name": each.kubernetes.name, "key": each.kubernetes.key}}
                if each.kubernetes is not None
                else {}
            ),
            **({"env": each.env} if each.env else {"file": each.file}),
        }
        for each in references
    ]


_CREDENTIAL_NAME = re.compile(
    r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?|APIKEY|PAT)(?:_|$)", re.IGNORECASE
)
_PUBLIC_NAME = re.compile(r"(?:^|_)(?:PUBLIC|FILE|PATH|DIR|NAME|ID|URL|PATTERN|SORT|PRIMARY)(?:_|$)", re.IGNORECASE)
_CREDENTIAL_VALUE = re.compile(
    r"(?:AKIA|ASIA)[A-Z0-9]{16}|gh[pousr]_[A-Za-z0-9]{30,}|github_pat_\w{22,}|hf_[A-Za-z0-9]{20,}|sk-[A-Za-z0-9_-]{20,}"
    r"|glpat-[A-Za-z0-9_-]{20,}|xox[abprs]-[A-Za-z0-9-]{10,}|AIza[A-Za-z0-9_-]{35}|eb[ktma]_[A-Za-z0-9_-]{20,}"
    r"|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.|-----BEGIN [A-Z ]*PRIVATE KEY-----|\w+://[^/\s:@]+:[^/\s:@]{3,}@",
    re.ASCII,
)
_VALUE_LENGTH_MIN = 6


def find_credential_warnings(spec: JobSpec) -> list[str]:
    """Return one warning for each variable in `env` or the pod template whose value looks like a credential."""
    variables = [*((f"env.{name}", name, value) for name, value in spec.env.items()), *_list_template_variables(spec)]
    return [
        f"`{place}` looks like a credential. Everybody who may read the job can read it. Run `ebbtide secrets set` and "
        "name the secret in `secrets`."
        for place, name, value in variables
        if _looks_like_credential(name, value)
    ]


def _looks_like_credential(name: str, value: str) -> bool:
    if _CREDENTIAL_VALUE.search(value):
        return True
    is_named = bool(_CREDENTIAL_NAME.search(name)) and not _PUBLIC_NAME.search(name)
    is_word = value.startswith(("/", "$")) or value.lower() in ("true", "false", "none", "null") or value.isdecimal()
    return is_named and len(value) >= _VALUE_LENGTH_MIN and not is_word


def _list_template_variables(spec: JobSpec) -> Iterator[tuple[str, str, str]]:
    template = json.loads(spec.template_json) if spec.template_json else {}
    pod = template.get("spec", {})
    for field in ("initContainers", "containers"):
        for number, container in enumerate(pod.get(field) or ()):
            for variable in container.get("env") or ():
                name, value = str(variable.get("name", "")), str(variable.get("value") or "")
                yield f"template.spec.{field}[{number}].env[{name}]", name, value
