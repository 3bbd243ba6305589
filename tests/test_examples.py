"""docs/examples: as far as one can tell without the cluster that they are for. Their schemas, and what their commands start."""

from __future__ import annotations

import os
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest

yaml = pytest.importorskip("yaml")
ROOT = Path(__file__).resolve().parent.parent
EXAMPLES = ROOT / "docs/examples"


def object_of(required: str = "", **properties: Any) -> dict[str, Any]:
    """A JSON schema that knows no other keys: a misspelled one is a fault, where Kubernetes would drop it."""
    return {"type": "object", "required": required.split(), "properties": properties, "additionalProperties": False}


TEXT, COUNT, LABELS = {"type": "string"}, {"type": "integer"}, {"type": "object"}
CONTAINER = object_of(
    "name image", name={"enum": ["pytorch"]}, image=TEXT, workingDir=TEXT, command={"type": "array", "items": TEXT},
    args={"type": "array", "items": TEXT}, env={"type": "array", "items": object_of("name value", name=TEXT, value=TEXT)},
    ports={"type": "array", "items": object_of("containerPort", name={"enum": ["pytorchjob-port"]}, containerPort=COUNT)},
    resources=object_of(limits=LABELS, requests=LABELS),
    volumeMounts={"type": "array", "items": object_of("name mountPath", name=TEXT, mountPath=TEXT, readOnly={"type": "boolean"})},
)  # fmt: skip
VOLUME = object_of(
    "name", name=TEXT, persistentVolumeClaim=object_of("claimName", claimName=TEXT),
    emptyDir=object_of(medium=TEXT, sizeLimit=TEXT),
)  # fmt: skip
REPLICA = object_of(
    "template", replicas=COUNT, restartPolicy={"enum": ["Always", "OnFailure", "Never", "ExitCode"]},
    template=object_of("spec", metadata=LABELS, spec=object_of(
        "containers", terminationGracePeriodSeconds=COUNT, containers={"type": "array", "items": CONTAINER},
        volumes={"type": "array", "items": VOLUME}, nodeSelector=LABELS,
    )),
)  # fmt: skip
# The parts of kubeflow.org_pytorchjobs.yaml and of the pod's schema that the example uses.
PYTORCHJOB = object_of(
    "apiVersion kind metadata spec", apiVersion={"enum": ["kubeflow.org/v1"]}, kind={"enum": ["PyTorchJob"]},
    metadata=object_of("name", name=TEXT, namespace=TEXT, labels=LABELS),
    spec=object_of(
        "pytorchReplicaSpecs", pytorchReplicaSpecs=object_of("Master", Master=REPLICA, Worker=REPLICA),
        runPolicy=object_of(backoffLimit=COUNT, cleanPodPolicy={"enum": ["All", "Running", "None"]},
                            activeDeadlineSeconds=COUNT, ttlSecondsAfterFinished=COUNT),
    ),
)  # fmt: skip
SKYPILOT = object_of(
    "run", name=TEXT, num_nodes=COUNT, workdir=TEXT, setup=TEXT, run=TEXT, envs=LABELS,
    resources=object_of(accelerators=TEXT, use_spot={"type": "boolean"}, infra=TEXT, disk_size=COUNT, memory=TEXT, cpus=TEXT),
)  # fmt: skip
TYPES = {"object": dict, "array": list, "string": str, "integer": int, "boolean": bool}


def faults(value: Any, schema: dict[str, Any], where: str = "") -> list[str]:
    """The part of JSON Schema that is used above."""
    if "enum" in schema:
        return [] if value in schema["enum"] else [f"{where}: {value!r} is none of {schema['enum']}"]
    kind: Any = TYPES[schema["type"]]
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        return [f"{where}: {value!r} is not of type {schema['type']}"]
    found = []
    if kind is list and "items" in schema:
        found = [f for i, item in enumerate(value) for f in faults(item, schema["items"], f"{where}[{i}]")]
    if kind is dict and "properties" in schema:
        found = [f"{where}.{key} is missing" for key in schema["required"] if key not in value]
        for key, item in value.items():
            known = schema["properties"].get(key)
            found += [f"{where}.{key} is not known"] if known is None else faults(item, known, f"{where}.{key}")
    return found


def load(name: str) -> dict[str, Any]:
    return yaml.safe_load((EXAMPLES / name).read_text(encoding="utf-8"))


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project whose launch/node.sh tells how it was called; the real one's checks of that are in test_launch.py."""
    (tmp_path / "launch").mkdir()
    (tmp_path / "launch/node.sh").write_text('#!/bin/bash\nenv\necho "ARGS $*"\n')
    (tmp_path / "launch/node.sh").chmod(0o755)
    return tmp_path


def told(project: Path, command: list[str], **env: str) -> dict[str, str]:
    clean = {"PATH": os.environ["PATH"], "HOME": str(project)}
    done = subprocess.run(command, cwd=project, env=clean | env, capture_output=True, text=True, check=True)
    *variables, last = done.stdout.splitlines()
    assert last.startswith("ARGS configs/")
    config = ROOT / shlex.split(last)[1]
    assert config.is_file()
    return dict(line.split("=", 1) for line in variables if "=" in line)


def test_kubernetes(project: Path) -> None:
    job = load("pytorchjob.yaml")
    assert faults(job, PYTORCHJOB) == []
    replicas = job["spec"]["pytorchReplicaSpecs"]
    for kind, rank in (("Master", "0"), ("Worker", "1")):
        [container] = replicas[kind]["template"]["spec"]["containers"]
        given = {e["name"]: e["value"] for e in container["env"]}
        assert given["NNODES"] == str(sum(r["replicas"] for r in replicas.values()))
        # What the operator adds, in the version that counts processes in WORLD_SIZE, and 0 for the buffering.
        operator = {
            "RANK": rank,
            "WORLD_SIZE": "16",
            "MASTER_ADDR": "gpt2-master-0",
            "MASTER_PORT": "23456",
            "PYTHONUNBUFFERED": "0",
        }
        env = told(project, container["command"] + container["args"], **given, **operator)
        assert (env["NODE_RANK"], env["NNODES"], env["MASTER_ADDR"], env["MASTER_PORT"]) == (
            rank,
            "2",
            "gpt2-master-0",
            "23456",
        )
        assert not {"RANK", "WORLD_SIZE"} & env.keys()
        mounted = {m["name"] for m in container["volumeMounts"]}
        assert mounted == {v["name"] for v in replicas[kind]["template"]["spec"]["volumes"]}


def test_cloud(project: Path) -> None:
    task = load("skypilot.yaml")
    assert faults(task, SKYPILOT) == []
    subprocess.run(["bash", "-n"], input=task["setup"], text=True, check=True)
    env = told(
        project, ["bash", "-c", task["run"]], **task["envs"], SKYPILOT_NUM_NODES="2", SKYPILOT_NODE_RANK="1",
        SKYPILOT_NUM_GPUS_PER_NODE="8", SKYPILOT_NODE_IPS="10.0.0.4\n10.0.0.7",
    )  # fmt: skip
    assert (env["NNODES"], env["NODE_RANK"], env["NPROC"], env["MASTER_ADDR"]) == ("2", "1", "8", "10.0.0.4")


def test_the_schema_finds_faults() -> None:
    job = load("pytorchjob.yaml")
    job["spec"]["runPolicy"]["backofLimit"] = 3
    job["spec"]["pytorchReplicaSpecs"]["Worker"]["replicas"] = "1"
    assert len(faults(job, PYTORCHJOB)) == 2
