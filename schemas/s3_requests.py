"""Requests to S3 that pyarrow.fs does not make: conditional writes, deletion in bulk, and unfinished uploads.

They need boto3, which the extra `penstock[s3]` installs. Endpoint, region and credentials are those of pyarrow.fs: they
come from the environment, and from the options of the URI.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from email.utils import parsedate_to_datetime
from typing import Any
from urllib.parse import parse_qs

from schemas.errors import ConfigError, ContractError
from schemas.storage import Store

SCHEME = "s3://"
DELETED_AT_ONCE = 1000
"""Number of objects that S3 deletes in one request, at most."""
TIMEOUT = 10
"""Maximum time to connect and between two bytes of an answer [s]."""
CONFLICTS = {"PreconditionFailed", "ConditionalRequestConflict", "412", "409"}
"""Error codes of a request whose condition is not met."""


class StoreAccessError(ContractError):
    """The credentials do not allow a request."""


@dataclass(frozen=True)
class StoredObject:
    """The content of a small object, its ETag, and the time since it was written by the clock of the store [s]."""

    data: bytes
    etag: str
    age: float


@dataclass(frozen=True)
class Upload:
    """An unfinished multipart upload: the name of its object, its id, its bytes so far, and its start."""

    name: str
    id: str
    bytes: int
    started: datetime


class S3Requests:
    """A client for the objects below a folder on S3. Names are relative to the folder.

    Raises ConfigError if boto3 is not installed. Each request raises ContractError if the store gives an error.
    """

    def __init__(self, folder: Store):
        try:
            import boto3
            from botocore.config import Config
        except ImportError as error:
            raise ConfigError(
                f"{folder.uri}: expected the package boto3, which locks folders on S3, got none. Install penstock[s3]."
            ) from error
        options = {name: values[-1] for name, values in parse_qs(folder.address.partition("?")[2]).items()}
        endpoint = options.get("endpoint_override")
        if endpoint and "://" not in endpoint:
            endpoint = f"{options.get('scheme', 'https')}://{endpoint}"
        config = Config(
            connect_timeout=TIMEOUT,
            read_timeout=TIMEOUT,
            retries={"mode": "standard", "max_attempts": 4},
            request_checksum_calculation="when_required",  # not every store knows the newer checksums
        )
        self._uri = folder.uri
        self._bucket, _, prefix = folder.root.partition("/")
        self._prefix = f"{prefix}/" if prefix else ""
        with self._explained(""):
            self._client: Any = boto3.client(
                "s3", endpoint_url=endpoint, region_name=options.get("region"), config=config
            )

    def put_if(self, name: str, data: bytes, etag: str | None) -> str | None:
        """Write an object if its ETag is `etag` (None: if it does not exist). Return its new ETag, or None if not."""
        condition = {"IfNoneMatch": "*"} if etag is None else {"IfMatch": etag}
        with self._explained(name):
            try:
                answer = self._client.put_object(**self._named(name), Body=data, **condition)
            except self._client.exceptions.ClientError as error:
                missing = etag is not None and _code(error) in ("NoSuchKey", "404")
                if missing or _code(error) in CONFLICTS:
                    return None
                raise
        return str(answer["ETag"])

    def read(self, name: str) -> StoredObject | None:
        """Return a small object; None if it does not exist."""
        with self._explained(name):
            try:
                answer = self._client.get_object(**self._named(name))
            except self._client.exceptions.NoSuchKey:
                return None
            data = answer["Body"].read()
        now = parsedate_to_datetime(answer["ResponseMetadata"]["HTTPHeaders"]["date"])
        return StoredObject(data, str(answer["ETag"]), (now - answer["LastModified"]).total_seconds())

    def names(self, folder: str) -> list[str]:
        """Return the names of all objects whose name starts with `folder`."""
        with self._explained(folder):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + folder
            )
            return [entry["Key"][len(self._prefix) :] for page in pages for entry in page.get("Contents", ())]

    def delete(self, names: Sequence[str]) -> None:
        """Delete objects, 1000 in a request; a missing object is not an error."""
        for first in range(0, len(names), DELETED_AT_ONCE):
            keys = [{"Key": self._prefix + name} for name in names[first : first + DELETED_AT_ONCE]]
            with self._explained(names[first]):
                answer = self._client.delete_objects(Bucket=self._bucket, Delete={"Objects": keys, "Quiet": True})
            for failed in answer.get("Errors", ()):
                raise ContractError(
                    f"{SCHEME}{self._bucket}/{failed['Key']}: expected an object that can be deleted, got "
                    f"{failed['Code']}. Correct the permissions, then run the same command again."
                )

    def uploads(self) -> list[Upload]:
        """Return the unfinished multipart uploads below the folder, with the bytes that the store keeps for each."""
        found = []
        with self._explained(""):
            pages = self._client.get_paginator("list_multipart_uploads").paginate(
                Bucket=self._bucket, Prefix=self._prefix
            )
            for entry in (entry for page in pages for entry in page.get("Uploads", ())):
                parts = self._client.get_paginator("list_parts").paginate(
                    Bucket=self._bucket, Key=entry["Key"], UploadId=entry["UploadId"]
                )
                size = sum(part["Size"] for page in parts for part in page.get("Parts", ()))
                name = entry["Key"][len(self._prefix) :]
                found.append(Upload(name, entry["UploadId"], size, entry["Initiated"]))
        return found

    def abort(self, upload: Upload) -> None:
        """Abort an unfinished upload, which frees its bytes."""
        with self._explained(upload.name):
            self._client.abort_multipart_upload(**self._named(upload.name), UploadId=upload.id)

    def _named(self, name: str) -> dict[str, str]:
        return {"Bucket": self._bucket, "Key": self._prefix + name}

    @contextmanager
    def _explained(self, name: str) -> Iterator[None]:
        """Raise the errors of boto3 as ContractError."""
        from botocore.exceptions import BotoCoreError, ClientError

        try:
            yield
        except (BotoCoreError, ClientError) as error:
            where = f"{self._uri}/{name}".rstrip("/")
            kind = StoreAccessError if _code(error) in ("AccessDenied", "403") else ContractError
            raise kind(
                f"{where}: expected an object store that answers, got {_code(error) or error}. Check bucket, endpoint "
                "and credentials, then run the same command again."
            ) from error


def _code(error: Exception) -> str:
    """Return the error code that the store gave; empty if it gave none."""
    response = getattr(error, "response", None) or {}  # None: no answer came
    return str(response.get("Error", {}).get("Code", ""))
