"""A wrapper of torchrun that returns the exit code of its ranks instead of a traceback.

It accepts torchrun's arguments. Exit code 2 is an error that the user can fix. SIGTERM is forwarded to the ranks, which
write a checkpoint and stop; the exit code is then 0, unless a rank reports an error.
"""

import logging
import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

from schemas.errors import RESUMES

SIGNAL_LOGGERS = ("torch.distributed.elastic.agent.server.api", "torch.distributed.elastic.multiprocessing.api")
"""Loggers that warn about every signal that torchrun receives or forwards."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun and return the exit code of the first rank that failed; 128 + signal if it was killed."""
    for name in SIGNAL_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as errors:
        try:
            torchrun(["--log-dir", errors, *(sys.argv[1:] if argv is None else argv)])
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
            if code != 2:  # the rank has already printed an error that the user can fix
                print(f"penstock: rank {rank} ended with exit code {code}", file=sys.stderr)
            return code
        except SignalException as error:
            if error.sigval != signal.SIGTERM:
                if error.sigval == signal.SIGINT:
                    print(f"penstock: {RESUMES}", file=sys.stderr)
                return 128 + error.sigval
            # Only the last start counts: torchrun recovered from earlier failures by restarting.
            starts = sorted(Path(errors).glob("*/attempt_*"), key=lambda path: int(path.name.partition("_")[2]))
            return 2 if starts and any(starts[-1].rglob("error.json")) else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
