"""A real HDFS of one machine: the servers that PySpark 2.4 ships, and the client of Hadoop that PySpark 4 ships.

Hadoop itself is in no package index. PySpark 2.4.8 has the name node and the data node of Hadoop 2.7.3 among its jars,
and the source of Pydoop 2.0.0 has the C library `libhdfs`, which pyarrow loads. Both are downloaded once, 220 MB.
"""

import os
import shutil
import socket
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyspark

PACKAGES = ("pyspark==2.4.8", "pydoop==2.0.0")
BUILD = "setuptools<80\npypandoc<1.8\n"
"""Packages with which the old setup.py of both runs, as pip does to read their metadata."""
OPENED = ("java.lang", "java.util", "java.nio")
"""Packages of Java that Hadoop 2.7 reads by reflection."""
SERVERS = {
    "namenode": ("hdfs", "org.apache.hadoop.hdfs.server.namenode.NameNode"),
    "datanode": ("datanode", "org.apache.hadoop.hdfs.server.datanode.DataNode"),
}
"""The folder of pages of each server, which has to exist, and its class."""
START_SECONDS = 60


class NoHdfsError(Exception):
    """A package, a compiler or Java is missing."""


def build(folder: Path) -> None:
    """Download the packages into a folder, unpack them and compile `libhdfs.so`. Raises NoHdfsError."""
    if (folder / "libhdfs.so").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    for package in PACKAGES:
        _download(folder, package)
        with tarfile.open(folder / f"{package.replace('==', '-')}.tar.gz") as archive:
            wanted = [member for member in archive if "/jars/" in member.name or "/libhdfs/" in member.name]
            archive.extractall(folder, wanted, filter="data")
    home = _java_home()
    source = folder / "pydoop-2.0.0" / "src" / "libhdfs"
    (source / "config.h").write_text("")
    files = [*source.glob("*.c"), source / "common" / "htable.c", *source.glob("os/posix/*.c")]
    folders = [home / "include", home / "include" / "linux", source, source / "os" / "posix", source / "include"]
    libraries = home / "lib" / "server"
    _call(
        *("gcc", "-shared", "-fPIC", "-O1", "-w", *(f"-I{place}" for place in folders), *map(str, files)),
        *("-o", str(folder / "libhdfs.new"), f"-L{libraries}", "-ljvm", f"-Wl,-rpath,{libraries}", "-lpthread"),
    )
    (folder / "libhdfs.new").rename(folder / "libhdfs.so")


def client_variables(folder: Path) -> dict[str, str]:
    """Return the environment with which pyarrow finds `libhdfs` and the client of Hadoop."""
    jars = Path(pyspark.__file__).parent / "jars"
    classes = [
        path for kind in ("hadoop-client-*", "slf4j-api*", "commons-logging*") for path in jars.glob(f"{kind}.jar")
    ]
    return {
        "ARROW_LIBHDFS_DIR": str(folder),
        "CLASSPATH": ":".join(map(str, sorted(classes))),
        "JAVA_HOME": str(_java_home()),
    }


@contextmanager
def serving(built: Path, data: Path) -> Iterator[str]:
    """Start a name node and a data node with their files in `data`, and yield the URI of the empty filesystem."""
    settings = data / "conf"
    address = _write_settings(settings, data)
    classes = f"{settings}:{built}/pyspark-2.4.8/deps/jars/*"
    opened = [word for name in OPENED for word in ("--add-opens", f"java.base/{name}=ALL-UNNAMED")]
    java = [f"{_java_home()}/bin/java", *opened, "-Xmx300m", "-cp", classes]
    _call(*java, SERVERS["namenode"][1], "-format", "-nonInteractive")
    processes = []
    try:
        for name, (_, main) in SERVERS.items():
            with open(data / f"{name}.log", "wb") as log:
                processes.append(subprocess.Popen([*java, main], stdout=log, stderr=subprocess.STDOUT, cwd=data))
            _await(data / f"{name}.log", processes[-1])
        yield address
    finally:
        for process in processes:
            process.kill()
            process.wait()


def _download(folder: Path, package: str) -> None:
    (folder / "build.txt").write_text(BUILD)
    variables = os.environ | {name: str(folder / "build.txt") for name in ("PIP_CONSTRAINT", "PIP_BUILD_CONSTRAINT")}
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:"]
    _call(*pip, "--dest", str(folder), package, variables=variables)


def _call(*command: str, variables: dict[str, str] | None = None) -> None:
    try:
        subprocess.run(command, env=variables, check=True, capture_output=True, text=True, timeout=600)
    except (OSError, subprocess.SubprocessError) as error:
        raise NoHdfsError(f"{command[0]}: {error} {getattr(error, 'stderr', '') or ''}"[:2000]) from error


def _java_home() -> Path:
    """Return the folder of a JDK. Raises NoHdfsError if there is none with the headers that `libhdfs` needs."""
    compiler = shutil.which("javac")
    home = Path(compiler).resolve().parents[1] if compiler else Path("/")
    if not (home / "include" / "jni.h").exists():
        raise NoHdfsError("a JDK with include/jni.h is not installed")
    return home


def _write_settings(folder: Path, data: Path) -> str:
    ports = _free_ports(5)
    address = f"hdfs://127.0.0.1:{ports[0]}"
    values = {
        "dfs.webhdfs.enabled": "false",
        "dfs.replication": "1",
        "dfs.permissions.enabled": "false",
        "dfs.namenode.datanode.registration.ip-hostname-check": "false",
        "dfs.namenode.name.dir": str(data / "names"),
        "dfs.datanode.data.dir": str(data / "blocks"),
        "dfs.namenode.http-address": f"127.0.0.1:{ports[1]}",
        "dfs.datanode.http.address": f"127.0.0.1:{ports[2]}",
        "dfs.datanode.address": f"127.0.0.1:{ports[3]}",
        "dfs.datanode.ipc.address": f"127.0.0.1:{ports[4]}",
    }
    for pages, _ in SERVERS.values():
        (folder / "webapps" / pages / "WEB-INF").mkdir(parents=True)
        (folder / "webapps" / pages / "WEB-INF" / "web.xml").write_text("<web-app/>")
    for name, own in (("core-site", {"fs.defaultFS": address}), ("hdfs-site", values)):
        entries = "".join(
            f"<property><name>{key}</name><value>{value}</value></property>" for key, value in own.items()
        )
        (folder / f"{name}.xml").write_text(f"<configuration>{entries}</configuration>")
    (folder / "log4j.properties").write_text(
        "log4j.rootLogger=INFO, C\n"
        "log4j.appender.C=org.apache.log4j.ConsoleAppender\n"
        "log4j.appender.C.layout=org.apache.log4j.SimpleLayout\n"
    )
    return address


def _await(log: Path, process: "subprocess.Popen[bytes]") -> None:
    ready = ("IPC Server listener", "Successfully sent block report")["datanode" in log.name]
    for _ in range(START_SECONDS * 10):
        if ready in log.read_text(errors="replace"):
            return
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise NoHdfsError(f"{log.name}: {log.read_text(errors='replace')[-1000:]}")


def _free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports
