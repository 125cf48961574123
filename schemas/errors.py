"""The errors that a user can act on: wrong settings, and data that disagrees with its manifest.

Every message has the form `<where>: expected X, got Y. <One fix that names a setting, a flag or a command.>`
It contains the values, and one message lists every field that fails.
"""

import errno

UNWRITABLE = {errno.ENOSPC: "the disk is full", errno.EDQUOT: "the quota is used up", errno.EROFS: "it is read-only"}
"""Error codes of storage that cannot be written to, with their descriptions."""


RESUMES = "interrupted; the same command resumes where it stopped"
"""Message of an interrupted command that resumes."""


class PenstockError(Exception):
    """An error whose message contains the fix; the command line prints it without a traceback."""


class ConfigError(PenstockError):
    """The recipe or an argument is wrong; nothing has run yet."""


class ContractError(PenstockError):
    """Data disagrees with its manifest, schema or digest; the run stops."""


def describe_storage_error(error: OSError) -> str | None:
    """Return the message for an error of full or read-only storage; None for any other error."""
    if error.errno not in UNWRITABLE:
        return None
    where = error.filename or "the run folder"
    reason = UNWRITABLE[error.errno]
    return f"{where}: expected writable storage, got an error: {reason}. Resolve it and run the same command again."
