"""The example for Kubernetes from its command to its last pod, by Spark's own scheduler and a tiny server of its API.

`examples/kubernetes/submit.sh` is submitted by spark-submit, and the pods that Spark asks for run by the entry point of
the image. One executor is decommissioned in the middle of the step, as on a spot machine. Only sizes are changed.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pyspark
import pytest
import yaml

from pipeline.demo_crawl.build import build_demo_crawl
from tests.integration.test_cluster import digest, first_step, free_port
from tests.support.paths import ROOT
from tests.support.tiny_kubernetes import Item, TinyKubernetes, tiny_kubernetes

pytestmark = [pytest.mark.spark, pytest.mark.slow]

SPARK_HOME = Path(pyspark.__file__).parent
EXAMPLE = ROOT / "examples" / "kubernetes"
IMAGE = "registry.example.com/penstock-spark:0.1.0"
SECRETS = {"penstock-s3": {"AWS_ACCESS_KEY_ID": "the-key-id", "AWS_SECRET_ACCESS_KEY": "the-secret-key"}}
SECONDS = 120


def submission(folder: Path, server: str, arguments: list[str]) -> list[str]:
    """Return the words of spark-submit in the example's command."""
    programs = folder / "programs"
    programs.mkdir()
    (programs / "spark-submit").write_text(
        f'#!{sys.executable}\nimport json, sys\nprint(json.dumps(["{SPARK_HOME}/bin/spark-submit", *sys.argv[1:]]))\n'
    )
    (programs / "spark-submit").chmod(0o755)
    command = [EXAMPLE / "submit.sh", server, IMAGE, "CC-MAIN-2024-10", folder / "run", *arguments]
    environment = os.environ | {"PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return list(json.loads(done.stdout))


def smaller(words: list[str], kubernetes: TinyKubernetes, server: str) -> list[str]:
    """Return the words with the sizes and addresses of this machine, and with the job of the first step."""
    (kubernetes.folder / "token").write_text("driver")
    names = f"-Djdk.net.hosts.file={kubernetes.hosts}"
    settings = {
        "spark.executor.instances": 1,
        "spark.executor.cores": 1,
        "spark.executor.memory": "1g",
        "spark.driver.memory": "1g",
        "spark.kubernetes.driver.master": server,
        "spark.kubernetes.authenticate.submission.oauthToken": "submitter",
        "spark.kubernetes.authenticate.driver.mounted.oauthTokenFile": kubernetes.folder / "token",
        "spark.kubernetes.submission.waitAppCompletion": "false",
        "spark.kubernetes.executor.apiPollingInterval": "1s",
        # Names of services are known to no resolver here, and all pods share the ports of one address.
        "spark.driver.extraJavaOptions": names,
        "spark.executor.extraJavaOptions": names,
        "spark.driver.port": free_port(),
        "spark.driver.blockManager.port": free_port(),
        "spark.blockManager.port": 0,
        "spark.ui.port": free_port(),
    }
    job = words.index("local:///app/jobs/run_all.py")
    changed = [word for name, value in settings.items() for word in ("--conf", f"{name}={value}")]
    return [*words[:job], *changed, "local:///app/jobs/run_stage.py", "documents", *words[job + 1 :]]


def pods(kubernetes: TinyKubernetes, role: str) -> list[Item]:
    """Return the pods of a role as Spark posted them."""
    posted = [item for kind, item in kubernetes.posted if kind == "pods"]
    return [item for item in posted if item["metadata"]["labels"]["spark-role"] == role]


def check_pods(kubernetes: TinyKubernetes) -> None:
    """Check that the pods have what the example asks for."""
    (driver,), executors = pods(kubernetes, "driver"), pods(kubernetes, "executor")
    assert driver["spec"]["serviceAccountName"] == "penstock"
    spot = yaml.safe_load((EXAMPLE / "executor_pod.yaml").read_text())["spec"]["tolerations"]
    assert "tolerations" not in driver["spec"]
    for pod in executors:
        (container,) = pod["spec"]["containers"]
        values = {each["name"]: each.get("value") for each in container["env"]}
        assert container["image"] == IMAGE
        assert container["args"] == ["executor"]
        assert values["SPARK_LOCAL_DIRS"] == values["TMPDIR"] == "/local/1"
        assert pod["spec"]["terminationGracePeriodSeconds"] == 110
        assert [each for each in pod["spec"]["tolerations"] if each in spot] == spot
    assert "the-secret-key" not in json.dumps(kubernetes.posted)


def check_rights(kubernetes: TinyKubernetes) -> None:
    """Check that the role of the example permits what the driver did."""
    documents = yaml.safe_load_all((EXAMPLE / "rbac.yaml").read_text())
    (role,) = (each for each in documents if each["kind"] == "Role")
    permitted = {(kind, verb) for rule in role["rules"] for kind in rule["resources"] for verb in rule["verbs"]}
    used = {(kind, verb) for sender, verb, kind in kubernetes.requests if sender == "driver"}
    assert {("pods", "create"), ("pods", "list"), ("pods", "watch"), ("configmaps", "create")} <= used
    assert used <= permitted


def wait_for_driver(kubernetes: TinyKubernetes, run: Path) -> str:
    """Wait until the driver has ended; decommission the first executor when it has completed a part. Return the log."""
    end, (name,) = time.monotonic() + SECONDS, (pod["metadata"]["name"] for pod in pods(kubernetes, "driver"))
    driver, is_decommissioned = kubernetes.containers[name], False
    while driver.process.poll() is None:
        assert time.monotonic() < end, driver.log.read_text()
        time.sleep(0.1)
        if not is_decommissioned and list(run.glob("finished_parts/documents/*.json")):
            executor = pods(kubernetes, "executor")[0]["metadata"]["name"]
            assert kubernetes.decommission(executor) == 0
            assert kubernetes.containers[executor].process.wait(5) == 0
            is_decommissioned = True
    assert is_decommissioned
    return driver.log.read_text()


def test_the_example_runs_on_pods_and_survives_the_loss_of_one(tmp_path: Path) -> None:
    build_demo_crawl(tmp_path / "crawl", pages=100, seed=3)
    inputs = ["--unset", "source.crawl", "--set", f'source.paths=["{tmp_path}/crawl/*.warc.gz"]']
    image = {name: os.environ[name] for name in ("PATH", "JDK_JAVA_OPTIONS")}
    image |= {"PYTHONPATH": str(ROOT), "PYSPARK_PYTHON": sys.executable}
    kubernetes = TinyKubernetes(tmp_path / "pods", image, {"/app": str(ROOT)}, SECRETS)
    kubernetes.folder.mkdir()
    with tiny_kubernetes(kubernetes) as server:
        command = smaller(submission(tmp_path, server, inputs), kubernetes, server)
        environment = os.environ | {"SPARK_HOME": str(SPARK_HOME), "KUBECONFIG": str(tmp_path / "no-file")}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False)
        assert done.returncode == 0, done.stderr
        log = wait_for_driver(kubernetes, tmp_path / "run")
    assert "stage documents complete" in log
    assert "Received executor 1 decommissioned message" in log
    assert len(pods(kubernetes, "executor")) == 2, "the second one is in place of the first"
    check_pods(kubernetes)
    check_rights(kubernetes)
    arguments = [str(ROOT / "jobs/recipes/web.toml"), "--out", str(tmp_path / "embedded"), *inputs[2:]]
    subprocess.run(first_step(arguments), cwd=ROOT, check=True, timeout=SECONDS)
    assert digest(tmp_path / "run", "documents") == digest(tmp_path / "embedded", "documents")
