"""The errors a user can act on: wrong settings, and data that breaks its promise.

Every message has the form *where: promised X, found Y; do Z*.
"""


class PenstockError(Exception):
    """An error whose message tells the user what to do; shown without a traceback by the command line."""


class ConfigError(PenstockError):
    """The recipe or an argument is wrong; nothing has run yet."""


class ContractError(PenstockError):
    """Data disagrees with what its manifest, schema or digest promised; the run stops."""
