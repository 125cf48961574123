"""Requests for the bytes of a file by HTTP or S3: an answer, or an error that says whether to ask again.

A request asks for a range with the ETag that the first answer had, so that no file is put together from two versions.
"""

import os
import ssl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import lru_cache
from http.client import HTTPConnection, HTTPException, HTTPMessage, HTTPResponse
from re import compile as pattern
from typing import Any, Protocol
from urllib.error import HTTPError, URLError
from urllib.parse import urlsplit
from urllib.request import (
    AbstractHTTPHandler,
    HTTPDefaultErrorHandler,
    HTTPErrorProcessor,
    HTTPHandler,
    HTTPRedirectHandler,
    HTTPSHandler,
    OpenerDirector,
    ProxyHandler,
    Request,
)

from schemas.errors import ConfigError, ContractError

STALL_SECONDS = 20.0
"""Time without a byte after which a request is made again, and maximum time to connect [s]."""
MAX_REDIRECTS = 5
BLOCK_BYTES = 256 << 10
"""Maximum number of bytes that are read of an answer at once."""
BUSY = frozenset((408, 425, 429, 500, 502, 503, 504, 509))
"""HTTP statuses after which a request is made again later."""
GONE = 412
"""HTTP status of a file that has another ETag than the one asked for."""
HEAD_SECONDS = 60.0
"""Maximum time that the head of an answer takes, interim answers included; each byte has STALL_SECONDS [s]."""
LENGTH, CONTENT_RANGE = pattern(r"[0-9]{1,18}"), pattern(r"bytes ([0-9]{1,18})-([0-9]{1,18})/([0-9]{1,18})")
S3_BUSY = frozenset(("SlowDown", "RequestTimeout", "InternalError", "ServiceUnavailable", "Throttling"))


class UnreachableFileError(ContractError):
    """A file cannot be read: it does not exist, may not be read, or the server has given no answer for too long."""

    def __init__(self, uri: str, cause: str, status: int | None = None):
        super().__init__(
            f"{uri}: expected a file that can be read, got {cause}. Run the same command again later, or allow such "
            "files with source.max_unreadable."
        )
        self.uri, self.cause, self.status = uri, cause, status


class ChangedFileError(ContractError):
    """A file has changed since its first bytes were read."""

    def __init__(self, uri: str, got: str):
        super().__init__(
            f"{uri}: expected the file whose first bytes were read, got {got}. Run the same command again when the "
            "file no longer changes."
        )


class BusyError(Exception):
    """A request failed for now: its cause, the name under which it is counted, and the wait that the server asks."""

    def __init__(self, cause: str, count: str, wait: float | None = None):
        super().__init__(cause)
        self.cause, self.count, self.wait = cause, count, wait


class Answer(Protocol):
    """The answer to a request: a part of the file, which is read once and in order; `close` after use."""

    @property
    def start(self) -> int:
        """Offset of its first byte in the file."""

    @property
    def end(self) -> int:
        """Offset after its last byte in the file."""

    @property
    def size(self) -> int:
        """Size of the whole file [bytes]."""

    @property
    def etag(self) -> str:
        """The version of the file; empty if the server names none."""

    def read(self) -> bytes:
        """Return the next bytes, none at the end. Raises BusyError if none come."""

    def close(self) -> None:
        """Close the connection."""


class RemoteFile(Protocol):
    """A file on a server."""

    @property
    def uri(self) -> str:
        """Its address."""

    def get(self, first: int, end: int | None, etag: str) -> Answer:
        """Ask for the bytes from `first` up to `end` (None: the last), of the version `etag` (empty: any).

        The answer may be another part of the file. Raises BusyError, UnreachableFileError or ChangedFileError.
        """


def remote_file(uri: str) -> RemoteFile | None:
    """Return the file at an address of http://, https:// or s3://; None for any other place."""
    scheme = urlsplit(uri).scheme if "://" in uri else ""
    if scheme == "s3":
        bucket, _, key = uri.removeprefix("s3://").partition("/")
        return S3File(uri, bucket, key)
    return HttpFile(uri) if scheme in ("http", "https") else None


@dataclass(frozen=True)
class _OpenAnswer:
    """An answer whose body is read by a function; a body that goes beyond `end` is cut there."""

    start: int
    end: int
    size: int
    etag: str
    body: Callable[[int], bytes]
    closed: Callable[[], None]
    errors: Callable[[], Any]

    def read(self) -> bytes:
        with self.errors():
            return self.body(BLOCK_BYTES)

    def close(self) -> None:
        self.closed()


def _span(uri: str, status: int, headers: Any) -> tuple[int, int, int]:
    """Return start, end and size of the file by the headers of an answer. Raises BusyError if they do not fit."""
    length = str(headers.get("Content-Length", ""))
    if status == 206:
        match = CONTENT_RANGE.fullmatch(str(headers.get("Content-Range", "")).strip())
        start, last, size = (int(group) for group in match.groups()) if match else (0, -1, 0)
        if match is None or not start <= last < size or (LENGTH.fullmatch(length) and int(length) != last + 1 - start):
            raise BusyError(f"a wrong Content-Range ({headers.get('Content-Range')!r:.80})", "wrong_ranges")
        return start, last + 1, size
    if LENGTH.fullmatch(length) is None:
        raise BusyError(f"an answer without Content-Length, or a wrong one ({length!r:.80})", "wrong_answers")
    return 0, int(length), int(length)


def _range(first: int, end: int | None) -> str:
    return f"bytes={first}-{'' if end is None else end - 1}"


def _is_strong(etag: str) -> bool:
    return etag.startswith('"')


def seconds_to_wait(text: str | None, now: datetime | None = None) -> float | None:
    """Return the time that a header `Retry-After` names, in seconds or as a date [s]; None if there is none."""
    if text is None or not text.strip():
        return None
    if text.isascii() and text.strip().isdigit():
        return float(text.strip()[:9])
    try:
        when = parsedate_to_datetime(text)
    except (ValueError, TypeError):
        return None
    when = when if when.tzinfo else when.replace(tzinfo=UTC)
    return max(0.0, (when - (now or datetime.now(UTC))).total_seconds())


# HTTP: the standard library, with the proxies of the environment.


class _SafeRedirects(HTTPRedirectHandler):
    """Follows a few redirects, and none that leaves HTTP or drops its encryption."""

    max_redirections = MAX_REDIRECTS

    def redirect_request(
        self, req: Request, fp: Any, code: int, msg: str, headers: HTTPMessage, newurl: str
    ) -> Request | None:
        fp.close()  # its body would be read to the end
        allowed = ("https",) if urlsplit(req.full_url).scheme == "https" else ("http", "https")
        if urlsplit(newurl).scheme not in allowed:
            raise UnreachableFileError(req.full_url, f"a redirect to {newurl:.100}, which is not {allowed[-1]}://")
        return super().redirect_request(req, fp, code, msg, headers, newurl)


class _TimedLines:
    """The lines of the head of an answer. Raises BusyError if they are not complete after HEAD_SECONDS."""

    def __init__(self, file: Any):
        self._file, self._deadline = file, time.monotonic() + HEAD_SECONDS

    def readline(self, limit: int) -> bytes:
        """Return the next line with its end, or its first `limit` bytes."""
        line = b""
        while len(line) < limit and not line.endswith(b"\n"):
            if time.monotonic() > self._deadline:
                raise BusyError(f"no whole head of an answer for {HEAD_SECONDS:g} s", "stalls")
            there = self._file.peek(1)[: limit - len(line)]  # at most one wait for the server
            if not there:
                break
            line += self._file.read(there.find(b"\n") + 1 or len(there))
        return line


class _TimedAnswer(HTTPResponse):
    """An answer whose head has a limit of time."""

    def begin(self) -> None:
        """Read the head."""
        file: Any = self.fp
        lines: Any = _TimedLines(file)
        self.fp = lines
        try:
            super().begin()
        finally:
            self.fp = file


class _Timed(AbstractHTTPHandler):
    def do_open(self, http_class: Any, req: Request, **http_conn_args: Any) -> HTTPResponse:
        """Send a request."""

        def connect(host: str, **settings: Any) -> HTTPConnection:
            connection: HTTPConnection = http_class(host, **settings)
            connection.response_class = _TimedAnswer
            return connection

        connector: Any = connect
        return super().do_open(connector, req, **http_conn_args)


class _Http(_Timed, HTTPHandler):
    """Requests by http://."""


class _Https(_Timed, HTTPSHandler):
    """Requests by https://."""


def _opener() -> OpenerDirector:
    opener = OpenerDirector()
    for handler in (ProxyHandler, _Http, _Https, HTTPDefaultErrorHandler, _SafeRedirects):
        opener.add_handler(handler())
    opener.add_handler(HTTPErrorProcessor())
    return opener


@dataclass(frozen=True)
class HttpFile:
    """A file on a web server."""

    uri: str

    def get(self, first: int, end: int | None, etag: str) -> Answer:
        headers = {"Accept-Encoding": "identity", "User-Agent": "penstock"}
        if first or end is not None:
            headers["Range"] = _range(first, end)
        if _is_strong(etag):
            headers["If-Match"] = etag
        with _http_errors(self.uri):
            response: Any = _opener().open(Request(self.uri, headers=headers), timeout=STALL_SECONDS)
        try:
            start, stop, size = _span(self.uri, response.status, response.headers)
        except BusyError:
            response.close()
            raise
        version = response.headers.get("ETag") or response.headers.get("Last-Modified") or ""
        return _OpenAnswer(
            start, stop, size, version.strip(), response.read1, response.close, lambda: _http_errors(self.uri)
        )


@contextmanager
def _http_errors(uri: str) -> Iterator[None]:
    """Raise the errors of a request as those of `RemoteFile.get`."""
    try:
        yield
    except HTTPError as error:
        error.close()
        _raise_status(uri, error.code, error.reason, error.headers)
    except (OSError, HTTPException) as error:
        reason = error.reason if isinstance(error, URLError) else error
        if isinstance(reason, ssl.SSLCertVerificationError):
            raise UnreachableFileError(uri, f"a certificate that is not valid ({reason.verify_message})") from error
        if isinstance(reason, TimeoutError):
            raise BusyError(f"no byte for {STALL_SECONDS:g} s", "stalls") from error
        raise BusyError(f"no connection ({reason or type(reason).__name__})", "broken_connections") from error
    except ValueError as error:  # urllib raises it for an address to which it cannot redirect
        raise BusyError(f"an answer that cannot be read ({error!s:.80})", "wrong_answers") from error


def _raise_status(uri: str, status: int, reason: str, headers: Any) -> None:
    """Raise the error for an HTTP status other than 200 and 206."""
    shown = f"{status} {reason}".strip()
    if status == GONE:
        raise ChangedFileError(uri, "another version of it (another ETag)")
    if status in BUSY or status >= 500:
        raise BusyError(shown, f"status_{status}", seconds_to_wait(headers.get("Retry-After") if headers else None))
    if status == 416:
        raise BusyError(shown, "wrong_ranges")
    raise UnreachableFileError(uri, shown, status)


# S3: one signed request of boto3, with the endpoint, region and credentials of the environment.


def s3_client() -> Any:
    """Return the client of this process. Raises ConfigError if boto3 is not installed."""
    return _s3_client(os.getpid())  # the connections of a client are not those of a forked process


@lru_cache(maxsize=1)
def _s3_client(process: int) -> Any:
    try:
        import boto3
        from botocore.config import Config
    except ImportError as error:
        raise ConfigError(
            "source.access: expected the package boto3, which reads s3://, got none. Install penstock[s3], or set "
            'source.access to "https".'
        ) from error
    config = Config(
        connect_timeout=STALL_SECONDS, read_timeout=STALL_SECONDS, retries={"total_max_attempts": 1, "mode": "standard"}
    )
    return boto3.client("s3", config=config)


def is_near(region: str) -> bool:
    """Return True if this process has credentials of AWS, and `region` is its region; False without boto3."""
    try:
        import boto3
    except ImportError:
        return False
    session = boto3.Session()
    return session.region_name == region and session.get_credentials() is not None


@dataclass(frozen=True)
class S3File:
    """An object on S3."""

    uri: str
    bucket: str
    key: str

    def get(self, first: int, end: int | None, etag: str) -> Answer:
        asked = {"Range": _range(first, end)} if first or end is not None else {}
        if _is_strong(etag):
            asked["IfMatch"] = etag
        with self._errors():
            answer = s3_client().get_object(Bucket=self.bucket, Key=self.key, **asked)
        body, metadata = answer["Body"], answer["ResponseMetadata"]
        headers = {"Content-Length": answer.get("ContentLength", ""), "Content-Range": answer.get("ContentRange", "")}
        try:
            start, stop, size = _span(self.uri, metadata["HTTPStatusCode"], headers)
        except BusyError:
            body.close()
            raise
        return _OpenAnswer(start, stop, size, str(answer.get("ETag", "")), body.read, body.close, self._errors)

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise the errors of boto3 as those of `RemoteFile.get`."""
        from botocore import exceptions as errors

        try:
            yield
        except errors.ClientError as error:
            answer = error.response
            code, metadata = str(answer.get("Error", {}).get("Code", "")), answer.get("ResponseMetadata", {})
            if code in S3_BUSY:
                raise BusyError(code, "status_503") from error
            status = int(metadata.get("HTTPStatusCode", 0))
            _raise_status(self.uri, status, code, metadata.get("HTTPHeaders", {}))
        except (errors.NoCredentialsError, errors.PartialCredentialsError, errors.TokenRetrievalError) as error:
            raise ConfigError(
                f"{self.uri}: expected credentials for S3 in the environment, got none ({error}). Set "
                'AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or source.access = "https".'
            ) from error
        except (errors.ReadTimeoutError, errors.ConnectTimeoutError) as error:
            raise BusyError(f"no byte for {STALL_SECONDS:g} s", "stalls") from error
        except (errors.BotoCoreError, OSError, HTTPException) as error:
            raise BusyError(f"no connection ({error})", "broken_connections") from error
