"""The errors a user can act on: wrong settings, and data that breaks its promise.

Every message has the form *where: expected X, got Y. <one fix>*.
"""

import errno

UNWRITABLE = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up", errno.EROFS: "it is read-only"}


class PenstockError(Exception):
    """An error whose message tells the user what to do; shown without a traceback by the command line."""


class ConfigError(PenstockError):
    """The recipe or an argument is wrong; nothing has run yet."""


class ContractError(PenstockError):
    """Data disagrees with what its manifest, schema or digest states; the run stops."""


def describe_storage_error(error: OSError) -> str | None:
    """What the user can do about an error of the storage; None if it is another kind of error."""
    if error.errno not in UNWRITABLE:
        return None
    where = error.filename or "the run folder"
    return f"{where}: cannot be written, {UNWRITABLE[error.errno]}; free it and run the same command again"
