"""The exit codes of the commands, and the message that an error prints."""

import argparse
import os
import signal
import sys
from collections.abc import Callable

from schemas.errors import RESUMES, PenstockError
from schemas.logs import (
    LOGGER,
    PREFIX,
    add_log_settings,
    log_traceback,
    logs_json,
    print_error,
    printable_output,
    uri_of,
)
from schemas.storage import describe_error_of_storage


@printable_output()
def exit_code_of(call: Callable[[], int | None], arguments: argparse.Namespace | None = None) -> int:
    """Call a function and return the exit code of the command.

    `arguments`: those of the command, which the log names the run of. The code is the result of the function
    (None = 0), 2 for an explained error, 130 if interrupted, or 141 on a closed pipe.
    """
    if arguments is not None:
        run = run_of(arguments)
        add_log_settings(getattr(arguments, "verbose", False), **({} if run is None else {"run": uri_of(run)}))
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
        problem = describe_error_of_storage(error)
        if problem is None:
            if not logs_json():
                raise
            log_traceback(error)
            return 1
        print_error(problem)
        return 2
    except KeyboardInterrupt:
        return report_interrupt()


def run_of(arguments: argparse.Namespace) -> str | None:
    """Return the run folder that the arguments of a command name; None if they name none."""
    run = getattr(arguments, "out", None) if hasattr(arguments, "recipe") else getattr(arguments, "run", None)
    return run if isinstance(run, str) else None


def report_interrupt() -> int:
    """Print that the command was interrupted, and return its exit code."""
    LOGGER.warning(f"{PREFIX}{RESUMES}")
    return 128 + signal.SIGINT
