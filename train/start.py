"""The program `python -m train.start MODULE ARGUMENT…`: runs a module of torch, and handles Ctrl-C from its start on.

Importing torch takes seconds, in which Ctrl-C would print a traceback. Here the program prints one sentence. After
`--quiet`, it ends at once without one: the process that started it, such as torchrun for a rank, prints the sentence.
After `--log-format=json`, the module logs JSON lines. An error of a disk or of an object store is explained.
"""

import runpy
import signal
import sys
from itertools import takewhile

from schemas.errors import RESUMES
from schemas.logs import JSON, JSON_WORDS, LOGGER, TEXT, print_error, printable_output, set_log
from schemas.storage import describe_error_of_storage

QUIET = "--quiet"


@printable_output()
def main() -> int:
    """Run the module that the command line names; return the exit code 130 after Ctrl-C."""
    words = sys.argv[1:]
    own = [*takewhile(lambda word: word in (QUIET, *JSON_WORDS), words)]
    if QUIET in own:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # also ends a rank that waits in a collective
    set_log(JSON if {*JSON_WORDS} & {*own} else TEXT)
    sys.argv = words[len(own) :]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        LOGGER.warning(f"penstock: {RESUMES}")
        return 128 + signal.SIGINT
    except Exception as error:
        problem = describe_error_of_storage(error)
        if problem is None:
            raise
        print_error(problem)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
