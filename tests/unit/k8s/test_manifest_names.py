"""Names of a job's objects fit where Kubernetes wants a label of DNS, whatever the job is called."""

from __future__ import annotations

import re
from dataclasses import replace

from scheduler.documents.job import read_job
from scheduler.domain.allocation import Allocation
from scheduler.k8s.manifests import JobSite, agent_pod, objects_name, service
from scheduler.k8s.pod_changes import pod_changes
from scheduler.k8s.resources.elastic_job import NAME_CHARACTERS
from tests.builders import a_job

DNS_LABEL = re.compile(r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?")
SITE = JobSite("harbour", 1, "http://ebbtide:8787", "ebbtide/worker")
LONGEST = f"a{'-' * (NAME_CHARACTERS - 2)}b-k3f9q1"


def test_a_service_and_a_hostname_of_the_longest_name_are_labels() -> None:
    read_job({"name": LONGEST[:NAME_CHARACTERS], "gpus": {"min": 1, "max": 1}})
    job = a_job(LONGEST, 1, 8)
    job = replace(job, allocation=Allocation(generation=1000, target={"t0": (0,)}))
    (new,) = pod_changes(job, [], 0.0).make
    pod = agent_pod(job, new, SITE)
    assert DNS_LABEL.fullmatch(service(job, SITE)["metadata"]["name"])
    assert DNS_LABEL.fullmatch(pod["spec"]["hostname"])
    assert pod["spec"]["subdomain"] == service(job, SITE)["metadata"]["name"]


def test_names_that_begin_alike_stay_apart() -> None:
    assert objects_name(LONGEST) != objects_name(LONGEST.replace("k3f9q1", "k3f9q2"))


def test_a_name_that_is_short_enough_stays_as_it_is() -> None:
    assert objects_name("llama-k3f9q1") == "ebbtide-llama-k3f9q1"
