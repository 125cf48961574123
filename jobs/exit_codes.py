"""The exit codes of the commands, and the message that an error prints."""

import os
import signal
import sys
from collections.abc import Callable

from schemas.errors import RESUMES, PenstockError, describe_storage_error
from schemas.logs import print_error, printable_output
from schemas.storage import describe_remote_error


@printable_output()
def exit_code_of(call: Callable[[], int | None]) -> int:
    """Call a function and return the exit code of the command.

    The code is the result of the function (None = 0), 2 for an explained error, 130 if interrupted, or 141 on a closed
    pipe.
    """
    try:
        return call() or 0
    except PenstockError as error:
        print_error(error)
        return 2
    except BrokenPipeError:
        # The reader of the output has closed it, as `head` does; without this, Python prints an error at its exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:
        problem = describe_remote_error(error) or (
            describe_storage_error(error) if isinstance(error, OSError) else None
        )
        if problem is None:
            raise
        print_error(problem)
        return 2
    except KeyboardInterrupt:
        return report_interrupt()


def report_interrupt() -> int:
    """Print that the command was interrupted, and return its exit code."""
    print_error(RESUMES)
    return 128 + signal.SIGINT
