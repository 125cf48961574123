"""The exit codes of the commands, and the one line that an error prints."""

import os
import signal
import sys
from collections.abc import Callable

from schemas.errors import PenstockError, storage_problem
from schemas.storage import remote_problem


def explained(call: Callable[[], int | None]) -> int:
    """The exit code of a call: its own, 2 for an explained error, 130 if interrupted, 141 if nobody reads it."""
    try:
        return call() or 0
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Who reads the output has seen enough, as `head` has; else Python would say so when it closes the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:  # Spark wraps in its own what the storage said to a worker
        problem = remote_problem(error) or (storage_problem(error) if isinstance(error, OSError) else None)
        if problem is None:
            raise
        print(f"penstock: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("penstock: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130
