"""torchrun with the exit code of its ranks, in place of a traceback: 2 for an error that the user can act on.

Takes torchrun's arguments. SIGTERM is handed to the ranks, which write a checkpoint; that they stopped then is no
failure.
"""

import signal
import sys
from collections.abc import Sequence

from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun; returns the exit code of the rank that failed first, 128 + signal for one that was killed."""
    try:
        torchrun(None if argv is None else list(argv))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
        print(f"penstock: rank {rank} ended with exit code {code}", file=sys.stderr)
        return code
    except SignalException as error:
        return 0 if error.sigval == signal.SIGTERM else 128 + error.sigval
    return 0


if __name__ == "__main__":
    sys.exit(main())
