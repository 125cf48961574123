"""Copies of whole files from and to an object store, each compared with its SHA-256.

A store that fails or is overloaded is tried again, with a growing pause between. A copy from it continues where it
stopped. If the store gives nothing for GIVE_UP_SECONDS, the copy fails.
"""

import hashlib
import os
import re
import time
from collections.abc import Callable
from pathlib import Path

from schemas.errors import UNWRITABLE, ContractError
from schemas.storage import CheckedPath, Store

BLOCK_BYTES = 8 << 20
"""Number of bytes that are copied at a time, in one request to the store."""
GIVE_UP_SECONDS = 300.0
"""Time from the first of several failures, without a byte between them, after which a copy fails [s]."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Time between two attempts [s]: it doubles from the first to the longest."""
PERMANENT = re.compile(r"ACCESS_DENIED|NO_SUCH_BUCKET|INVALID_ACCESS_KEY_ID|SIGNATURE_DOES_NOT_MATCH")
"""Errors of S3 that another attempt would not change."""


def download(origin: Store, path: CheckedPath, out: int) -> None:
    """Copy a file of a table to an open local file, given by its descriptor.

    Raises ContractError if the store does not answer, or if the file is not the one that its manifest names. Raises
    OSError if the local disk rejects the bytes.
    """
    digest, done = hashlib.sha256(), 0

    def attempt() -> None:
        nonlocal done
        with origin.fs.open_input_file(origin.path(path)) as file:
            file.seek(done)
            while block := file.read(BLOCK_BYTES):
                _write(out, block, done)
                digest.update(block)
                done += len(block)

    where = f"{origin.uri}/{path}"
    try:
        retried(where, attempt, lambda: done)
    except FileNotFoundError as error:
        raise _other_file(origin, path, "no such file") from error
    if (done, digest.hexdigest()) != (path.num_bytes, path.sha256):
        raise _other_file(origin, path, f"a file of {done} bytes with SHA-256 {digest.hexdigest()}")


def upload(source: Path, target: Store, name: str, sha256: str | None = None) -> None:
    """Copy a local file to an object store, in several parts if it is large.

    Raises ContractError if the store does not answer, or if the local file does not have this SHA-256 (None = any).
    """

    def attempt() -> None:
        digest = hashlib.sha256()
        with source.open("rb") as file, target.open_output(name) as stream:
            while block := file.read(BLOCK_BYTES):
                digest.update(block)
                stream.write(block)
        if sha256 not in (None, digest.hexdigest()):
            raise ContractError(
                f"{source}: expected SHA-256 {sha256}, as it was written, got {digest.hexdigest()}. Check the disk."
            )

    retried(f"{target.uri}/{name}", attempt, lambda: 0)


def retried(where: str, attempt: Callable[[], None], done: Callable[[], int]) -> None:
    """Call `attempt` until it succeeds. `done` returns a number that grows with each byte that need not come again.

    Raises ContractError if all attempts since a byte came have failed for GIVE_UP_SECONDS. An error of the local disk,
    and one that another attempt would not change, is raised at once.
    """
    pause, reached, since = FIRST_PAUSE, -1, 0.0
    while True:
        try:
            return attempt()
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in UNWRITABLE or PERMANENT.search(str(error)):
                raise
            now = time.monotonic()
            if done() != reached:
                pause, reached, since = FIRST_PAUSE, done(), now
            if now - since >= GIVE_UP_SECONDS:
                raise ContractError(
                    f"{where}: expected an object store that answers, got only errors for {now - since:.0f} s, such as "
                    f"{str(error).splitlines()[0]:.200}. Check the store, then run the same command again."
                ) from error
        time.sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE)


def _write(out: int, block: bytes, offset: int) -> None:
    view = memoryview(block)
    while view:
        written = os.pwrite(out, view, offset)
        view, offset = view[written:], offset + written


def _other_file(origin: Store, path: CheckedPath, found: str) -> ContractError:
    return ContractError(
        f"{origin.uri}/{path}: expected a file of {path.num_bytes} bytes with SHA-256 {path.sha256} as the manifest "
        f"names it, got {found}. {origin.repair_fix}"
    )
