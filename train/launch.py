"""torchrun with the exit code of its ranks, in place of a traceback: 2 for an error that the user can act on.

Takes torchrun's arguments. SIGTERM is handed to the ranks, which write a checkpoint; that they stopped then is no
failure, unless one of them says that it failed.
"""

import signal
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun; returns the exit code of the rank that failed first, 128 + signal for one that was killed."""
    with tempfile.TemporaryDirectory() as errors:
        try:
            torchrun(["--log-dir", errors, *(sys.argv[1:] if argv is None else argv)])
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
            if code != 2:  # what the user can act on has been said
                print(f"penstock: rank {rank} ended with exit code {code}", file=sys.stderr)
            return code
        except SignalException as error:
            if error.sigval != signal.SIGTERM:
                return 128 + error.sigval
            # Those of the last start: what ended an earlier one was made good by starting again.
            starts = sorted(Path(errors).glob("*/attempt_*"), key=lambda path: int(path.name.partition("_")[2]))
            return 2 if starts and any(starts[-1].rglob("error.json")) else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
