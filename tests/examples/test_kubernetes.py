"""The examples for Kubernetes: their resources, paths and settings are those of the image, the jobs and conf/.

tests/docker/test_kubernetes.py submits the command of `submit.sh`. The operator of `spark_application.yaml` is not run:
its fields are compared with those that its version v1beta2 declares.
"""

import re
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

from jobs import run_all
from schemas.leases import CLOCK_SECONDS, LEASE_SECONDS
from tests.examples.test_schedulers import snapshot_settings
from tests.rules.test_docker import SECRET, compose, final_stage
from tests.support.paths import ROOT

FOLDER = ROOT / "examples" / "kubernetes"
WORKER_BYTES = 450e6
"""Memory of a Python worker; `conf/snapshot.conf` has how it was measured."""
UNITS = {"k": 2**10, "m": 2**20, "g": 2**30}
SPEC_FIELDS = {
    *("type", "pythonVersion", "sparkVersion", "mode", "image", "mainApplicationFile", "arguments", "restartPolicy"),
    *("volumes", "driver", "executor", "sparkConf"),
}
POD_FIELDS = {
    *("cores", "memory", "memoryOverhead", "serviceAccount", "env", "instances", "volumeMounts", "tolerations"),
    "terminationGracePeriodSeconds",
}
RESTART_FIELDS = {
    *("type", "onFailureRetries", "onFailureRetryInterval"),
    *("onSubmissionFailureRetries", "onSubmissionFailureRetryInterval"),
}
"""Fields in use of those that the types SparkApplicationSpec, SparkPodSpec and RestartPolicy of v1beta2 declare."""
OWN_FIELDS = {
    "spark.executor.cores": ("executor", "cores"),
    "spark.executor.memory": ("executor", "memory"),
    "spark.executor.memoryOverhead": ("executor", "memoryOverhead"),
    "spark.driver.memory": ("driver", "memory"),
}
"""Properties of Spark for which the operator has fields."""


def spec() -> dict[str, Any]:
    """Return the specification of the SparkApplication."""
    application = yaml.safe_load((FOLDER / "spark_application.yaml").read_text())
    assert (application["apiVersion"], application["kind"]) == ("sparkoperator.k8s.io/v1beta2", "SparkApplication")
    return dict(application["spec"])


def submitted() -> dict[str, str]:
    """Return the properties of Spark in submit.sh by name."""
    lines = re.findall(r"^    (spark\.[\w.-]+)=(\S+)$", (FOLDER / "submit.sh").read_text(), re.MULTILINE)
    assert len(dict(lines)) == len(lines) > 10
    return dict(lines)


def size(text: str) -> int:
    """Return a size such as 4g in bytes."""
    return int(text[:-1]) * UNITS[text[-1]]


def test_the_fields_are_those_of_the_operator() -> None:
    assert set(spec()) <= SPEC_FIELDS
    assert set(spec()["driver"]) | set(spec()["executor"]) <= POD_FIELDS
    assert set(spec()["restartPolicy"]) <= RESTART_FIELDS
    assert all(isinstance(value, str) for value in spec()["sparkConf"].values())  # kubectl rejects other types


def test_the_job_and_the_image_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    copied = {item.words[-1] for item in final_stage("spark") if item.name == "COPY"}
    job = spec()["mainApplicationFile"].removeprefix("local://")
    assert job in copied
    assert job in (FOLDER / "submit.sh").read_text()
    assert spec()["image"].rpartition("/")[2] == compose()["services"]["stages"]["image"]
    seen: list[tuple[Any, ...]] = []

    def run(*values: Any, **options: Any) -> Any:
        seen.append(values)
        return types.SimpleNamespace(text=lambda: "")

    monkeypatch.setattr(run_all, "run_recipe", run)
    assert run_all.main(spec()["arguments"]) == 0
    assert seen == [("web", "s3://corpus/run", ["source.crawl=CC-MAIN-2024-10"])]


def test_the_settings_are_those_of_the_file_for_a_snapshot() -> None:
    stated = spec()["sparkConf"] | {name: str(spec()[pod][field]) for name, (pod, field) in OWN_FIELDS.items()}
    snapshot = dict(snapshot_settings())
    assert {name: stated.get(name) for name in snapshot} == snapshot
    assert stated.keys() - snapshot.keys() == {"spark.executorEnv.TMPDIR"}


def test_the_memory_beside_the_heap_has_room_for_a_python_worker_on_every_core() -> None:
    executor, snapshot = spec()["executor"], dict(snapshot_settings())
    for cores, overhead in (
        (executor["cores"], executor["memoryOverhead"]),
        (snapshot["spark.executor.cores"], snapshot["spark.executor.memoryOverhead"]),
    ):
        assert size(overhead) >= int(cores) * WORKER_BYTES


def test_only_executors_may_run_on_spot_machines_and_have_time_to_hand_over_blocks() -> None:
    template = yaml.safe_load((FOLDER / "executor_pod.yaml").read_text())
    assert spec()["executor"]["tolerations"] == template["spec"]["tolerations"]
    assert "tolerations" not in spec()["driver"]
    seconds = spec()["executor"]["terminationGracePeriodSeconds"]
    assert submitted()["spark.kubernetes.executor.terminationGracePeriodSeconds"] == f"{seconds}s"
    assert spec()["sparkConf"]["spark.decommission.enabled"] == "true"


def test_a_new_driver_starts_after_the_lease_of_a_lost_one() -> None:
    assert spec()["restartPolicy"]["onFailureRetryInterval"] > LEASE_SECONDS + CLOCK_SECONDS


def test_temporary_files_are_on_a_volume_that_spark_uses_for_shuffles() -> None:
    (volume,), (mount,) = spec()["volumes"], spec()["executor"]["volumeMounts"]
    assert mount["name"] == volume["name"]
    assert volume["name"].startswith("spark-local-dir-")  # the prefix by which Spark knows them
    stem = f"spark.kubernetes.executor.volumes.emptyDir.{volume['name']}.mount"
    assert submitted()[f"{stem}.path"] == mount["mountPath"] == spec()["sparkConf"]["spark.executorEnv.TMPDIR"]
    assert submitted()["spark.executorEnv.TMPDIR"] == mount["mountPath"]


def test_secrets_are_named_and_in_no_setting() -> None:
    names = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
    for role in ("driver", "executor"):
        values = {each["name"]: each.get("value") for each in spec()[role]["env"]}
        references = {each["name"]: each.get("valueFrom") for each in spec()[role]["env"]}
        for name in names:
            assert values[name] is None
            assert references[name] == {"secretKeyRef": {"name": "penstock-s3", "key": name}}
            assert submitted()[f"spark.kubernetes.{role}.secretKeyRef.{name}"] == f"penstock-s3:{name}"
    stated = [*spec()["sparkConf"], *spec()["arguments"], *(name for name in submitted() if "secretKeyRef" not in name)]
    assert [name for name in stated if SECRET.search(name)] == []


def test_the_role_is_bound_to_the_account_of_the_driver() -> None:
    account, role, binding = yaml.safe_load_all((FOLDER / "rbac.yaml").read_text())
    assert (account["kind"], role["kind"], binding["kind"]) == ("ServiceAccount", "Role", "RoleBinding")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [subject["name"] for subject in binding["subjects"]] == [account["metadata"]["name"]]
    name = account["metadata"]["name"]
    assert spec()["driver"]["serviceAccount"] == name
    assert submitted()["spark.kubernetes.authenticate.driver.serviceAccountName"] == name
    assert "serviceAccount" not in spec()["executor"]


@pytest.mark.parametrize("name", ["submit.sh", "spark_application.yaml", "executor_pod.yaml", "rbac.yaml"])
def test_the_page_names_every_file(name: str) -> None:
    assert name in Path(FOLDER, "README.md").read_text()
