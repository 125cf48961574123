"""Leases: locks on a run folder on S3, which end by themselves if their holder is killed.

A lease is a small object that is created only if it does not exist (`If-None-Match: *`) and renewed only if no one else
has changed it (`If-Match`). If it was not renewed for LEASE_SECONDS by the clock of the store, another process may take
it over, with an epoch that is higher by one. The first process cannot renew it any more, and stops before its next
commit. Processes that only read a run for a long time have an object each in a folder beside the lease, and commit
nothing either once they have lost it.

A process that stops between the renewal before a commit or a deletion and that itself, for longer than LEASE_SECONDS,
would still make it. Stores other than S3 have no leases, because pyarrow.fs makes no conditional writes.
"""

import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

from schemas.errors import ContractError
from schemas.logs import LOGGER
from schemas.s3_requests import DELETED_AT_ONCE, SCHEME, S3Requests, StoreAccessError, StoredObject
from schemas.storage import Store

LEASE_SECONDS = 60
"""Time after its last renewal at which a lease may be taken over [s]."""
RENEWALS = 4
"""Number of renewals in that time."""
MAX_SECONDS, MAX_EPOCH = 10 * LEASE_SECONDS, 1 << 53
"""Largest time [s] and epoch that are taken from a lease, because the object can have any content."""
CLOCK_SECONDS = 2
"""Added to that time, because the times of a store have whole seconds [s]."""
READERS = "readers"
"""Folder `<lock>.readers/` with an object for each process that reads the tables for a long time."""

_held: list["_Lease"] = []
"""The exclusive leases that this process holds."""
_reading: list["_Lease"] = []
"""The leases of this process on runs whose tables it reads."""


@contextmanager
def hold_lease(run: Store, name: str, what: str) -> Iterator[None]:
    """Hold the exclusive lease `name` of a run on S3, and renew it in a thread.

    `what`: the name of this command in the errors of other processes. Raises ContractError if another process holds
    the lease, or reads the tables.
    """
    requests = S3Requests(run)
    lease = _Lease(run, name, what, requests)
    lease.take()
    if not lease.is_exclusive():
        LOGGER.warning(
            f"penstock: {run.uri}/{name}: the object store ignores `If-None-Match`, so nothing keeps two processes "
            "from writing this run folder. Run one at a time, or use a store with conditional writes."
        )
    try:
        for reader in requests.names(f"{name}.{READERS}/"):
            found = requests.read(reader)
            if found is not None and not _is_expired(found):
                raise _held_by(run, name, what, found)
            requests.delete([reader])
        _held.append(lease)
        with lease.renewed():
            yield
    finally:
        if lease in _held:
            _held.remove(lease)
        lease.release()


@contextmanager
def hold_reader(run: Store, name: str, what: str) -> Iterator[None]:
    """Keep other processes from the exclusive lease `name` of a run, and renew this in a thread.

    Does nothing in a bucket without write permission. Raises ContractError if another process holds the lease.
    """
    requests = S3Requests(run)
    reader = _Lease(run, f"{name}.{READERS}/{uuid.uuid4().hex}.json", what, requests)
    try:
        reader.take()
    except StoreAccessError:
        yield
        return
    try:
        # The holder of the lease looks for readers after it has taken it, so one of two processes sees the other.
        found = requests.read(name)
        if found is not None and not _is_expired(found) and not any(lease.is_of(found) for lease in _held):
            raise _held_by(run, name, what, found)
        _reading.append(reader)
        with reader.renewed():
            yield
    finally:
        if reader in _reading:
            _reading.remove(reader)
        reader.release()


def check_still_held(folder: Store) -> None:
    """Renew the exclusive leases of this process on the run that holds `folder`, before a commit there.

    The leases on runs that it reads are renewed too: what is committed was made from their tables. Raises ContractError
    if another process has taken over a lease, or writes to a run that this one reads.
    """
    for lease in (*_leases_on(folder), *_reading):
        lease.renew()


def check_before_delete(folder: Store) -> None:
    """Renew the exclusive leases on the run that holds `folder` if that was long ago, before a file there is deleted.

    A process that was suspended does not delete what another one has committed meanwhile. Raises ContractError if
    another process has taken over a lease.
    """
    for lease in _leases_on(folder):
        if clock() - lease.renewed_at > LEASE_SECONDS / 2:
            lease.renew()


def delete_files(folder: Store, names: Sequence[str]) -> None:
    """Delete files of a run: on S3 a thousand in a request, elsewhere several at a time. Missing files are no error.

    Raises ContractError if another process has taken over a lease on the run.
    """
    check_still_held(folder)
    for first in range(0, len(names), DELETED_AT_ONCE):
        some = names[first : first + DELETED_AT_ONCE]
        check_before_delete(folder)
        if folder.uri.startswith(SCHEME):
            S3Requests(folder).delete(some)
        else:
            with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
                list(pool.map(folder.delete, some))


def clock() -> float:
    """Return a time that does not go back, and on Linux also counts while the machine is suspended [s]."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _leases_on(folder: Store) -> list["_Lease"]:
    return [
        lease for lease in _held if f"{folder.root}/".startswith(f"{lease.run.root}/") and folder.fs == lease.run.fs
    ]


class _Lease:
    """A lease of this process: an object with the holder, an epoch, and the number of renewals."""

    def __init__(self, run: Store, name: str, what: str, requests: S3Requests):
        self.run = run
        self._name, self._what, self._requests = name, what, requests
        self._token = uuid.uuid4().hex
        self._since = datetime.now(UTC).isoformat(timespec="seconds")
        self._epoch, self._renewals = 1, 0
        self._etag: str | None = None
        self.renewed_at = 0.0
        """Time of the last renewal, by `clock`: that at which its request was sent [s]."""
        self._mutex = threading.Lock()
        self._ended = threading.Event()

    def take(self) -> None:
        """Create the lease, or take over an expired one. Raises ContractError if another process holds it."""
        found = self._requests.read(self._name)
        if found is not None:
            if not _is_expired(found):
                raise _held_by(self.run, self._name, self._what, found)
            self._epoch = int(_number(found, "epoch", 0, MAX_EPOCH)) + 1
        if not self._write(None if found is None else found.etag):
            now = self._requests.read(self._name)
            raise _held_by(self.run, self._name, self._what, now)

    def is_exclusive(self) -> bool:
        """Return False if the store creates the lease a second time, because it ignores the condition of a write."""
        with self._mutex:
            written = self._requests.put_if(self._name, self._content(), None)
            self._etag = written or self._etag
        return written is None

    def renew(self) -> None:
        """Renew the lease. Raises ContractError if another process has taken it over."""
        with self._mutex:
            self._renewals += 1
            if self._etag is None or not self._write(self._etag):
                raise ContractError(
                    f"{self.run.uri}/{self._name}: expected epoch {self._epoch} of this process, got the lease "
                    f"of {_describe(self._requests.read(self._name))}. This process did not renew it "
                    f"for {LEASE_SECONDS} s, and has committed nothing since. Run the same command again when the "
                    "other process has ended."
                )

    @contextmanager
    def renewed(self) -> Iterator[None]:
        """Renew the lease in a thread while the `with` block runs."""
        thread = threading.Thread(target=self._renew_often, name=f"lease {self._name}", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self._ended.set()
            thread.join()

    def release(self) -> None:
        """Delete the lease if this process still holds it.

        A store that does not answer is no error of the command, which has ended, and must not hide the one that it has.
        """
        try:
            found = self._requests.read(self._name)
            if found is not None and self.is_of(found):
                self._requests.delete([self._name])
        except ContractError as error:
            LOGGER.warning(f"penstock: the lock is not released, and ends by itself after {LEASE_SECONDS} s: {error}")

    def is_of(self, found: StoredObject) -> bool:
        """Return True if an object is this lease of this process."""
        return _content(found).get("token") == self._token

    def _renew_often(self) -> None:
        while not self._ended.wait(LEASE_SECONDS / RENEWALS):
            try:
                self.renew()
            except ContractError as error:
                # A store that does not answer may answer next time. A lost lease stops the process at its next commit.
                LOGGER.warning(f"penstock: {error}")
                if self._etag is None:
                    return

    def _write(self, etag: str | None) -> bool:
        """Write the lease if its ETag is `etag` (None: if there is none). Return False if this process lost it."""
        started = clock()
        written = self._requests.put_if(self._name, self._content(), etag)
        if written is None:
            # The answer to an earlier try of this request, which may be long ago, may have been lost.
            found = self._requests.read(self._name)
            if found is not None and self.is_of(found):
                written = self._requests.put_if(self._name, self._content(), found.etag)
        self._etag = written
        if written is not None:
            self.renewed_at = started
        return written is not None

    def _content(self) -> bytes:
        content = {
            "what": self._what,
            "pid": os.getpid(),
            "host": socket.gethostname(),
            "since": self._since,
            "seconds": LEASE_SECONDS,
            "epoch": self._epoch,
            "token": self._token,
            "renewals": self._renewals,  # gives each renewal an ETag of its own
        }
        return json.dumps(content).encode()


def _content(found: StoredObject) -> dict[str, Any]:
    try:
        value = json.loads(found.data)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}


def _number(found: StoredObject, name: str, default: float, most: float) -> float:
    """Return a number of a lease, at most `most`; `default` if the object, whose content can be any, has none."""
    value = _content(found).get(name, default)
    return min(value, most) if isinstance(value, int | float) and value >= 0 else default


def _is_expired(found: StoredObject) -> bool:
    return found.age > _number(found, "seconds", LEASE_SECONDS, MAX_SECONDS) + CLOCK_SECONDS


def _describe(found: StoredObject | None) -> str:
    holder = {} if found is None else _content(found)
    if not holder.keys() >= {"what", "pid", "host", "since"}:
        return "a process that has ended meanwhile"
    return f"`{holder['what']}` (process {holder['pid']} on {holder['host']}, since {holder['since']})"


def _held_by(run: Store, name: str, what: str, found: StoredObject | None) -> ContractError:
    lock = name.partition(f".{READERS}/")[0]
    return ContractError(
        f"{run.uri}/{lock}: expected a free lock for `{what}`, got one held by {_describe(found)}. "
        f"Wait until that process ends, or stop it; the lock of a killed process ends after {LEASE_SECONDS} s."
    )
