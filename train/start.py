"""The program `python -m train.start MODULE ARGUMENT…`: runs a module of torch, and handles Ctrl-C from its start on.

Importing torch takes seconds, in which Ctrl-C would print a traceback. Here the program prints one sentence. After
`--quiet`, it ends at once without one: the process that started it, such as torchrun for a rank, prints the sentence.
"""

import runpy
import signal
import sys

from schemas.errors import RESUMES
from schemas.logs import LOGGER, printable_output

QUIET = "--quiet"


@printable_output()
def main() -> int:
    """Run the module that the command line names; return the exit code 130 after Ctrl-C."""
    words = sys.argv[1:]
    is_quiet = words[:1] == [QUIET]
    if is_quiet:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # also ends a rank that waits in a collective
    sys.argv = words[is_quiet:]
    try:
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    except KeyboardInterrupt:
        LOGGER.warning(f"penstock: {RESUMES}")
        return 128 + signal.SIGINT
    return 0


if __name__ == "__main__":
    sys.exit(main())
