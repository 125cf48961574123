#!/usr/bin/env python
"""The entry point of the Spark image: starts the driver or executor of Spark on Kubernetes, or any other command.

The Kubernetes scheduler of Spark starts a container with the words `driver …` or with `executor`, and states the rest
in environment variables. A container with other words, such as `penstock run …`, executes them as a command.
"""

import importlib.util
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

EXECUTOR_CLASS = "org.apache.spark.scheduler.cluster.k8s.KubernetesExecutorBackend"
EXECUTOR_OPTIONS = {
    "--driver-url": "SPARK_DRIVER_URL",
    "--executor-id": "SPARK_EXECUTOR_ID",
    "--cores": "SPARK_EXECUTOR_CORES",
    "--app-id": "SPARK_APPLICATION_ID",
    "--hostname": "SPARK_EXECUTOR_POD_IP",
    "--resourceProfileId": "SPARK_RESOURCE_PROFILE_ID",
    "--podName": "SPARK_EXECUTOR_POD_NAME",
}
"""Options of the executor's class, and the variables with their values."""
MEMORY = "SPARK_EXECUTOR_MEMORY"
"""Variable with the size of the executor's heap, in the form of the JVM's option -Xmx."""
LIBRARIES = "SPARK_EXECUTOR_LIBRARY_PATH"
"""Variable with the folders of `spark.executor.extraLibraryPath`."""
JAVA_OPTION = re.compile(r"SPARK_JAVA_OPT_(\d+)")
"""Pattern of the variables with the options of the executor's JVM, one option in each."""
EXPLAINED_ERROR = 2
NO_SUCH_COMMAND = 127


def main(words: Sequence[str]) -> int:
    """Replace this process by what the words of the container name. Return an exit code only if that fails."""
    environment = os.environ | {"SPARK_HOME": spark_home(os.environ)}
    if LIBRARIES in environment:
        paths = (environment[LIBRARIES], environment.get("LD_LIBRARY_PATH"))
        environment["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, paths))
    try:
        command = command_of(words, environment)
        os.execvpe(command[0], command, environment)
    except ValueError as error:
        print(f"entrypoint: {error}", file=sys.stderr)
        return EXPLAINED_ERROR
    except OSError as error:
        print(f"entrypoint: expected a command that can be executed, got {words}: {error.strerror}.", file=sys.stderr)
        return NO_SUCH_COMMAND


def spark_home(environment: Mapping[str, str]) -> str:
    """Return the folder of Spark: SPARK_HOME, or else that of the installed pyspark."""
    if "SPARK_HOME" in environment:
        return environment["SPARK_HOME"]
    spec = importlib.util.find_spec("pyspark")  # does not import it, which takes a second
    return "" if spec is None or spec.origin is None else str(Path(spec.origin).parent)


def command_of(words: Sequence[str], environment: Mapping[str, str]) -> list[str]:
    """Return the command that a container with these words and variables executes.

    Raises ValueError if an executor lacks a variable.
    """
    match list(words):
        case ["driver", *rest]:
            return [f"{environment['SPARK_HOME']}/bin/spark-submit", *driver_options(environment), *rest]
        case ["executor", *_]:
            return executor_command(environment)
        case []:
            raise ValueError("expected driver, executor or a command, got no words. Add one, such as penstock --help.")
        case command:
            return command


def driver_options(environment: Mapping[str, str]) -> list[str]:
    """Return the options of spark-submit for a driver that listens on the address of its container."""
    options = ["--deploy-mode", "client"]  # spark-submit in the container is the driver itself
    address = environment.get("SPARK_DRIVER_BIND_ADDRESS")
    if address is None:
        return options
    addresses = {"spark.driver.bindAddress": address, "spark.executorEnv.SPARK_DRIVER_POD_IP": address}
    return [*options, *(word for item in addresses.items() for word in ("--conf", "=".join(item)))]


def executor_command(environment: Mapping[str, str]) -> list[str]:
    """Return the command of an executor. Raises ValueError if a variable is missing."""
    if missing := [name for name in (*EXECUTOR_OPTIONS.values(), MEMORY) if not environment.get(name)]:
        raise ValueError(
            f"executor: expected the variables of Spark's Kubernetes scheduler, got none named {', '.join(missing)}. "
            "Start executors by a driver with --master k8s://..., in the version of Spark of this image."
        )
    numbered = {int(hit[1]): value for name, value in environment.items() if (hit := JAVA_OPTION.fullmatch(name))}
    java = f"{environment['JAVA_HOME']}/bin/java" if "JAVA_HOME" in environment else "java"
    memory = [f"-Xms{environment[MEMORY]}", f"-Xmx{environment[MEMORY]}"]
    options = [word for option, name in EXECUTOR_OPTIONS.items() for word in (option, environment[name])]
    java_options = [numbered[number] for number in sorted(numbered)]
    return [java, *java_options, *memory, "-cp", class_path(environment), EXECUTOR_CLASS, *options]


def class_path(environment: Mapping[str, str]) -> str:
    """Return the class path of an executor: settings first, then the user's classes, then Spark's."""
    places = [environment.get(name) for name in ("SPARK_CONF_DIR", "HADOOP_CONF_DIR", "SPARK_CLASSPATH")]
    places += [f"{environment['SPARK_HOME']}/jars/*", environment.get("SPARK_DIST_CLASSPATH"), os.getcwd()]
    return os.pathsep.join(place for place in places if place)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
