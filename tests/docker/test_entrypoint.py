"""The entry point of the Spark image: the commands that it executes, and a driver that it really starts."""

import importlib.util
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pyspark
import pytest

from tests.rules.test_docker import final_stage
from tests.support.paths import ROOT

PROGRAM = ROOT / "docker" / "entrypoint.py"
SPEC = importlib.util.spec_from_file_location("entrypoint", PROGRAM)
assert SPEC is not None
assert SPEC.loader is not None
entrypoint = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(entrypoint)
DECOMMISSION = ROOT / "docker" / "decommission.sh"
EXECUTOR = {
    "SPARK_HOME": "/spark",
    "SPARK_DRIVER_URL": "spark://CoarseGrainedScheduler@driver-svc.penstock.svc:7078",
    "SPARK_EXECUTOR_ID": "3",
    "SPARK_EXECUTOR_CORES": "4",
    "SPARK_EXECUTOR_MEMORY": "6144m",
    "SPARK_APPLICATION_ID": "spark-1",
    "SPARK_EXECUTOR_POD_IP": "10.0.0.7",
    "SPARK_EXECUTOR_POD_NAME": "penstock-exec-3",
    "SPARK_RESOURCE_PROFILE_ID": "0",
}


def test_a_driver_is_spark_submit_in_client_mode_on_the_address_of_its_container() -> None:
    words = ["driver", "--properties-file", "/opt/spark/conf/spark.properties", "local:///app/jobs/run_all.py", "web"]
    environment = {"SPARK_HOME": "/spark", "SPARK_DRIVER_BIND_ADDRESS": "10.0.0.5"}
    bound = ["--conf", "spark.driver.bindAddress=10.0.0.5", "--conf", "spark.executorEnv.SPARK_DRIVER_POD_IP=10.0.0.5"]
    submit = ["/spark/bin/spark-submit", "--deploy-mode", "client"]
    assert entrypoint.command_of(words, environment) == [*submit, *bound, *words[1:]]
    assert entrypoint.command_of(words, {"SPARK_HOME": "/spark"}) == [*submit, *words[1:]]


def test_an_executor_has_the_values_of_its_variables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    options = {f"SPARK_JAVA_OPT_{number}": f"-Dnumber={number}" for number in (10, 9, 0)}
    places = {"SPARK_CONF_DIR": "/opt/spark/conf", "SPARK_CLASSPATH": "/own.jar", "JAVA_HOME": "/java"}
    assert entrypoint.command_of(["executor"], EXECUTOR | options | places) == [
        *["/java/bin/java", "-Dnumber=0", "-Dnumber=9", "-Dnumber=10", "-Xms6144m", "-Xmx6144m"],
        *["-cp", f"/opt/spark/conf:/own.jar:/spark/jars/*:{tmp_path}"],
        "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend",
        *["--driver-url", "spark://CoarseGrainedScheduler@driver-svc.penstock.svc:7078", "--executor-id", "3"],
        *["--cores", "4", "--app-id", "spark-1", "--hostname", "10.0.0.7", "--resourceProfileId", "0"],
        *["--podName", "penstock-exec-3"],
    ]
    assert entrypoint.command_of(["executor"], EXECUTOR)[0] == "java"


@pytest.mark.parametrize("words", [["penstock", "--help"], ["spark-submit", "driver"], ["python", "-c", "1"]])
def test_other_words_are_the_command(words: list[str]) -> None:
    assert entrypoint.command_of(words, {"SPARK_HOME": "/spark"}) == words


def started(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run the entry point as a process, with no variables of Spark but these."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("SPARK")} | variables
    command = [sys.executable, str(PROGRAM), *words]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=False)


def test_a_command_gets_its_words_and_returns_its_exit_code() -> None:
    done = started(sys.executable, "-c", "import sys; print(sys.argv[1:]); sys.exit(7)", "a b", "$HOME")
    assert (done.stdout, done.returncode) == ("['a b', '$HOME']\n", 7)


def test_a_process_of_the_image_finds_spark_and_an_executor_its_native_libraries() -> None:
    script = "import os; print(os.environ['SPARK_HOME'], os.environ['LD_LIBRARY_PATH'])"
    paths = {"SPARK_EXECUTOR_LIBRARY_PATH": "/own", "LD_LIBRARY_PATH": "/system"}
    done = started(sys.executable, "-c", script, **paths)
    assert done.stdout == f"{Path(pyspark.__file__).parent} /own:/system\n"


def test_an_executor_without_its_variables_is_an_error() -> None:
    done = started("executor", **{name: value for name, value in EXECUTOR.items() if "POD" not in name})
    assert done.returncode == 2
    assert "got none named SPARK_EXECUTOR_POD_IP, SPARK_EXECUTOR_POD_NAME. Start executors by a driver" in done.stderr


def test_no_words_and_unknown_commands_are_errors() -> None:
    assert (started().returncode, started("penstok").returncode) == (2, 127)
    assert "got ['penstok']: No such file or directory." in started("penstok").stderr


def test_the_script_before_the_end_of_a_container_without_an_executor_returns_at_once() -> None:
    variables = os.environ | {"SPARK_EXECUTOR_POD_NAME": "no-such-pod"}
    assert subprocess.run([str(DECOMMISSION)], env=variables, timeout=10, check=False).returncode == 0


def test_both_programs_can_be_executed_and_are_where_the_image_and_spark_look_for_them() -> None:
    assert all(path.stat().st_mode & stat.S_IXOTH for path in (PROGRAM, DECOMMISSION))
    copied = {item.words[0]: item.words[1] for item in final_stage("spark") if item.name == "COPY"}
    (entry,) = (item.rest for item in final_stage("spark") if item.name == "ENTRYPOINT")
    assert entry.endswith(f'"{copied["docker/entrypoint.py"]}"]')
    assert copied["docker/decommission.sh"] == "/opt/decom.sh"
    classes = Path(pyspark.__file__).parent / "jars"
    assert list(classes.glob("spark-kubernetes_*.jar"))
    assert list(classes.glob("kubernetes-client-*.jar"))


def test_the_image_has_the_version_of_spark_that_the_example_names() -> None:
    pinned = re.search(r"^pyspark==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned is not None
    assert f"sparkVersion: {pinned[1]}\n" in (ROOT / "examples/kubernetes/spark_application.yaml").read_text()


@pytest.mark.spark
def test_a_driver_runs_a_job_by_a_properties_file(tmp_path: Path) -> None:
    (tmp_path / "spark.properties").write_text("spark.master local[2]\nspark.ui.enabled false\n")
    job = tmp_path / "job.py"
    job.write_text(
        "import sys\n"
        "from pyspark.sql import SparkSession\n"
        "spark = SparkSession.builder.getOrCreate()\n"
        "print(spark.sparkContext.master, spark.sparkContext.getConf().get('spark.driver.bindAddress'), sys.argv[1:])\n"
        "print(spark.sparkContext.range(4, numSlices=2).map(lambda number: number * 2).collect())\n"
        "sys.exit(2)\n"
    )
    form = ["--properties-file", str(tmp_path / "spark.properties"), "--class", "org.apache.spark.deploy.PythonRunner"]
    variables = {"SPARK_DRIVER_BIND_ADDRESS": "127.0.0.1", "PYSPARK_PYTHON": sys.executable}
    done = started("driver", *form, f"local://{job}", "--out", "x", **variables)
    assert done.stdout.splitlines() == ["local[2] 127.0.0.1 ['--out', 'x']", "[0, 2, 4, 6]"], done.stderr
    assert done.returncode == 2  # the code of an error that a retry does not repair
