"""A server that speaks the protocol of Azure's blob storage: Azurite, Microsoft's own, by npm."""

import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow.fs as pafs

ACCOUNT = "devstoreaccount1"
KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
"""The account of every such server, and its key, which Microsoft publishes."""
PACKAGE = "azurite@3"
START_SECONDS = 60


class NoAzuriteError(Exception):
    """Node or the package is missing."""


def install(folder: Path) -> Path:
    """Install the server into a folder, and return its program. Raises NoAzuriteError."""
    program = folder / "node_modules" / ".bin" / "azurite-blob"
    if program.exists():
        return program
    npm = shutil.which("npm")
    if npm is None:
        raise NoAzuriteError("npm is not installed")
    folder.mkdir(parents=True, exist_ok=True)
    try:
        command = [npm, "install", "--silent", "--no-save", "--prefix", str(folder), PACKAGE]
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=300)
    except subprocess.SubprocessError as error:
        raise NoAzuriteError(f"npm: {error} {getattr(error, 'stderr', '') or ''}"[:1000]) from error
    return program


@contextmanager
def serving(program: Path, data: Path) -> Iterator[str]:
    """Start a server with an empty container `bucket`, and yield its host and port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    words = ["--silent", "--skipApiVersionCheck", "--loose", "--disableTelemetry"]
    server = subprocess.Popen([str(program), "--location", str(data), "--blobPort", str(port), *words])
    try:
        _await(port, server)
        address = f"127.0.0.1:{port}"
        places = {f"{kind}_storage_authority": address for kind in ("blob", "dfs")}
        schemes = {f"{kind}_storage_scheme": "http" for kind in ("blob", "dfs")}
        pafs.AzureFileSystem(ACCOUNT, account_key=KEY, **places, **schemes).create_dir("bucket")
        yield address
    finally:
        server.kill()
        server.wait()


def _await(port: int, server: "subprocess.Popen[bytes]") -> None:
    for _ in range(START_SECONDS * 10):
        with socket.socket() as client:
            if client.connect_ex(("127.0.0.1", port)) == 0:
                return
        if server.poll() is not None:
            break
        time.sleep(0.1)
    raise NoAzuriteError("the server does not listen")
