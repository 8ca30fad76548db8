"""`examples/deploy/`: manifests that Kubernetes' own schemas accept, and the settings that kvflow needs in them.

Schemas of custom resources are in no package: of custom resources only the pod templates are checked, and the fields
that are named here.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

import kvflow
from kvflow import Config

ROOT = Path(__file__).parents[3]
DEPLOY = ROOT / "examples" / "deploy"
VERSION = "1.33"
"""A version of Kubernetes in use; `preStop.sleep` is on by default since 1.30."""

Manifest = dict[str, Any]
FILES = sorted(DEPLOY.rglob("*.yaml"))
MANIFESTS = [
    pytest.param(one, id=f"{path.stem} {one['kind']} {one['metadata']['name']}")
    for path in FILES
    for one in yaml.safe_load_all(path.read_text("utf-8"))
]
CUSTOM = ("leaderworkerset.x-k8s.io/v1", "ray.io/v1")
SERVICE = ROOT / "examples" / "ray_server" / "service.yaml"


def docker_error() -> str:
    """Return why no image can be built here; empty if one can."""
    if not shutil.which("docker"):
        return "not installed"
    done = subprocess.run(["docker", "info"], capture_output=True, text=True, timeout=240, check=False)
    return done.stderr.strip() if done.returncode else ""


def check(manifest: Manifest) -> None:
    kubernetes_validate.validate(manifest, VERSION, strict=True)


def templates(value: Any) -> Iterator[Manifest]:
    """Pod templates anywhere in a manifest."""
    if isinstance(value, dict):
        for key, inner in value.items():
            if key.lower().endswith("template") and isinstance(inner, dict) and "spec" in inner:
                yield inner
            else:
                yield from templates(inner)
    elif isinstance(value, list):
        for inner in value:
            yield from templates(inner)


def as_pod(template: Manifest) -> Manifest:
    metadata = {"name": "any", **template.get("metadata", {})}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]}


ALL = [template for one in MANIFESTS for template in templates(one.values[0])]
VLLM = [template for template in ALL if "vllm" in template["spec"]["containers"][0]["name"]]


@pytest.mark.parametrize("manifest", MANIFESTS)
def test_kubernetes_takes_it(manifest: Manifest) -> None:
    if manifest["apiVersion"] in CUSTOM:
        assert {"apiVersion", "kind", "metadata", "spec"} == manifest.keys()
        assert list(templates(manifest))
    else:
        check(manifest)
    for template in templates(manifest):
        check(as_pod(template))


def test_what_is_wrong_is_found() -> None:
    pod = as_pod(ALL[0])
    for spec in ({**pod["spec"], "terminationGracePeriodSeconds": "long"}, {**pod["spec"], "containrs": []}):
        with pytest.raises(kubernetes_validate.ValidationError):
            check({**pod, "spec": spec})


def test_every_pod_has_room_for_shared_memory_and_time_to_drain() -> None:
    assert len(ALL) == 6
    for template in ALL:
        spec = template["spec"]
        (memory,) = (one for one in spec["volumes"] if one["name"] == "shared-memory")
        assert memory["emptyDir"]["medium"] == "Memory"
        (container,) = spec["containers"]
        assert {"name": "shared-memory", "mountPath": "/dev/shm"} in container["volumeMounts"]


@pytest.mark.parametrize("template", VLLM, ids=lambda one: one["metadata"]["labels"]["role"])
def test_vllm_gets_a_configuration_that_kvflow_takes(template: Manifest) -> None:
    """The pod's address is what tickets name; a pod ends after its requests and its leases."""
    spec = template["spec"]
    (container,) = spec["containers"]
    given = json.loads(container["args"][container["args"].index("--kv-transfer-config") + 1])
    assert given["kv_connector"] == "KVFlowConnector"
    assert given["kv_role"] in ("kv_producer", "kv_consumer")
    extra = given["kv_connector_extra_config"]
    assert extra["advertise_host"] == "$(POD_IP)"
    config = Config(engine_id="any", **{**extra, "advertise_host": "10.0.0.7"})
    assert {"name": "POD_IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}} in container["env"]
    stop_s = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    ending_s = sum(int(arg.split("=")[1]) for arg in container["args"] if arg.startswith("--shutdown-timeout="))
    assert stop_s + ending_s + config.drain_timeout_s < spec["terminationGracePeriodSeconds"]
    if "--headless" not in container["args"]:
        probes = [container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "readiness", "liveness")]
        assert probes == ["/health"] * 3
    assert container["securityContext"]["capabilities"]["drop"] == ["ALL"]


def test_a_service_finds_the_pods_of_its_deployment() -> None:
    found = {(one.values[0]["kind"], one.values[0]["metadata"]["name"]): one.values[0] for one in MANIFESTS}
    for name in ("vllm-prefill", "vllm-decode"):
        service, deployment = found["Service", name], found["Deployment", name]
        labels = deployment["spec"]["template"]["metadata"]["labels"]
        assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"]
        assert service["spec"]["selector"].items() <= labels.items()


def test_the_ray_service_deploys_what_the_example_deploys() -> None:
    (manifest,) = yaml.safe_load_all((DEPLOY / "kuberay" / "rayservice.yaml").read_text("utf-8"))
    config = manifest["spec"]["serveConfigV2"]
    assert config == SERVICE.read_text("utf-8"), "put examples/ray_server/service.yaml there"
    deployments = yaml.safe_load(config)["applications"][0]["deployments"]
    longest_s = max(one.get("graceful_shutdown_timeout_s", 20) for one in deployments)
    (workers,) = manifest["spec"]["rayClusterConfig"]["workerGroupSpecs"]
    assert workers["template"]["spec"]["terminationGracePeriodSeconds"] > longest_s


def test_the_dockerfile_copies_what_a_checkout_has() -> None:
    """Its instructions are known ones; it copies files of a checkout or of an earlier stage; it names one version."""
    text = (DEPLOY / "Dockerfile").read_text("utf-8")
    lines = [line for line in re.sub(r"\\\n", " ", text).splitlines() if line and not line.startswith("#")]
    instructions = [line.split(maxsplit=1) for line in lines]
    assert {name for name, _ in instructions} <= {"ARG", "FROM", "COPY", "RUN", "ENV", "ENTRYPOINT"}
    stages = [value.split(" AS ") for name, value in instructions if name == "FROM"]
    assert [stage for _, stage in stages] == ["wheel", "vllm", "ray"]
    declared = {value.split("=")[0] for name, value in instructions if name == "ARG"}
    assert {used for image, _ in stages for used in re.findall(r"\$\{(\w+)\}", image)} == declared
    for name, value in instructions:
        if name == "COPY":
            *sources, _ = value.split()
            assert sources[0] == "--from=wheel" or all((ROOT / source).exists() for source in sources), value
        if name == "ENTRYPOINT":
            assert all(isinstance(word, str) for word in json.loads(value))
    assert set(re.findall(r"kvflow(?:\[[\w,]+\])?==([\d.]+)", text)) == {kvflow.__version__}
    groups = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["dependency-groups"]
    assert set(re.findall(r"pyproject\.toml:(\w+)", text)) <= groups.keys()


@pytest.mark.thorough
@pytest.mark.timeout(1200)
@pytest.mark.skipif(bool(docker_error()), reason=f"docker: {docker_error()}")
def test_the_image_for_ray_is_built() -> None:
    """Thorough: see `test_the_dockerfile_copies_what_a_checkout_has` of this file."""
    file = str(DEPLOY / "Dockerfile")
    subprocess.run(["docker", "build", "--file", file, "--target", "ray", str(ROOT)], check=True, timeout=1100)
