"""The errors that a user can act on: wrong settings, and data that disagrees with its manifest.

Every message has the form `<where>: expected X, got Y. <One fix that names a setting, a flag or a command.>`
It contains the values, and one message lists every field that fails.
"""

import errno
from collections.abc import Iterator
from contextlib import contextmanager

from pydantic import ValidationError

UNWRITABLE = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up", errno.EROFS: "it is read-only"}
"""Error codes of storage that cannot be written to, with their descriptions."""
REFUSED = {
    errno.EACCES: "permission is denied",
    errno.EPERM: "the operation is not permitted",
    errno.EFBIG: "the file is larger than this filesystem or process allows",
}
"""Error codes of storage that this process may not use so, with their descriptions."""

RESUMES = "interrupted; the same command resumes where it stopped"
"""Message of an interrupted command that resumes."""


class PenstockError(Exception):
    """An error whose message contains the fix; the command line prints it without a traceback."""


class ConfigError(PenstockError):
    """The recipe or an argument is wrong; nothing has run yet."""


class ContractError(PenstockError):
    """Data disagrees with its manifest, schema or digest; the run stops."""


REMOVE_CHECKPOINT = "Remove this checkpoint's folder to use the one before it."
MAX_PROBLEMS = 5
"""Maximum number of wrong fields that an error lists."""
MAX_SHOWN = 200
"""Maximum length of a value in an error [characters]."""


@contextmanager
def reading(where: str, what: str, fix: str = "Restore it from a backup.") -> Iterator[None]:
    """Turn an error from reading JSON or its values into a ContractError: `where: expected what, got …. fix`.

    Such errors are missing keys, values of another type, values that a model refuses, and text that is nested too deep.
    """
    try:
        yield
    except (AttributeError, IndexError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
        raise ContractError(f"{where}: expected {what}, got {describe_problems(error)}. {fix}") from error


def describe_problems(error: Exception) -> str:
    """Return what is wrong with a value in one line: the wrong fields if a model refused it."""
    if not isinstance(error, ValidationError):
        return f"a missing or wrong value ({error!r:.{MAX_SHOWN}})"
    found = [f"{'.'.join(map(str, item['loc'])) or 'value'}: {item['msg']}" for item in error.errors()]
    more = f" and {len(found) - MAX_PROBLEMS} more" if len(found) > MAX_PROBLEMS else ""
    return "; ".join(text.replace("\n", " ")[:MAX_SHOWN] for text in found[:MAX_PROBLEMS]) + more


def describe_storage_error(error: OSError) -> str | None:
    """Return the message for an error of storage that is full, read-only or of others; None for any other error."""
    where = error.filename or "the run folder"
    if error.errno in UNWRITABLE:
        reason = UNWRITABLE[error.errno]
        return f"{where}: expected writable storage, got an error: {reason}. Resolve it and run the same command again."
    if error.errno in REFUSED:
        reason = REFUSED[error.errno]
        return f"{where}: expected storage that this user may use, got an error: {reason}. Name another place."
    return None
