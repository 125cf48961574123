"""The command `torchrun … $(command -v penstock-rank) RUN`: its arguments and exit codes.

`-m train.pretrain` is the same, but Python then searches the current folder first, and a `train.py` there hides ours.
"""

import os
import re
import signal
import sys
import time
from argparse import SUPPRESS
from collections.abc import Sequence
from contextlib import ExitStack

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from schemas.errors import RESUMES, ContractError, PenstockError
from schemas.leases import LEASE_SECONDS
from schemas.locks import lock_training
from schemas.logs import (
    LOGGER,
    LoggedParser,
    add_log_option,
    add_log_settings,
    format_libraries,
    print_error,
    printable_output,
    uri_of,
)
from schemas.overrides import add_override_options
from schemas.storage import Store, describe_error_of_storage
from train.parallel.ranks import FirstRankFailed, Ranks, is_restarted, open_ranks, torchrun_placement
from train.pretrain.loop import train

LOST_CONNECTION = re.compile(r"[Cc]onnection (?:closed|reset) by peer|Broken pipe|NCCL communicator was aborted")
"""Pattern of the errors that a collective raises after one of its ranks has died."""


RETRY_SECONDS = 5.0
"""Time between two attempts to take the lease of a killed rank [s]."""


def hold_lock(held: ExitStack, run: Store) -> None:
    """Hold the lock on training until `held` is closed. Raises ContractError if another process holds it.

    On an object store, the lease of a rank that was killed ends later, so a restarted rank waits for that.
    """
    waits = 1.5 * LEASE_SECONDS if is_restarted() and not run.is_local else 0.0
    deadline = time.monotonic() + waits
    while True:
        try:
            held.enter_context(lock_training(run, "penstock train"))
            return
        except ContractError:
            if time.monotonic() >= deadline:
                raise
        time.sleep(RETRY_SECONDS)


@printable_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and train; return the exit code, which is 2 for an error that the user can fix."""
    parser = LoggedParser(prog="train.pretrain", description="Train on the token dataset of a run folder.")
    # On Python 3.11 torchrun rejects `--run` as an abbreviation of its `--run-path`, so the folder may be positional.
    folder = parser.add_mutually_exclusive_group(required=True)
    folder.add_argument("run", nargs="?", default=SUPPRESS, metavar="RUN", help="run folder with the tokens")
    folder.add_argument("--run", dest="run", default=SUPPRESS, metavar="RUN", help="the same")
    add_override_options(parser)
    add_log_option(parser)
    arguments = parser.parse_args(argv)
    run = Store(arguments.run)
    add_log_settings(run=uri_of(arguments.run), step="train")
    format_libraries()
    ranks: Ranks | None = None
    with ExitStack() as held:
        try:
            ranks = held.enter_context(open_ranks())
            add_log_settings(run=uri_of(arguments.run), step="train", rank=ranks.rank)
            ranks.on_first(lambda: hold_lock(held, run))
            code = train(run, arguments.overrides, ranks)
        except PenstockError as error:
            if not isinstance(error, FirstRankFailed):
                print_error(error)
            ErrorHandler().record_exception(error)  # torchrun and `train.launch` read it from there
            return 2
        except RuntimeError as error:
            if ranks is None or not LOST_CONNECTION.search(str(error)):
                raise
            # The rank that died has printed the reason, if it could; tracebacks of the other ranks would bury it.
            lost = LOST_CONNECTION.findall(str(error))[0]
            LOGGER.warning(f"penstock: rank {ranks.rank} lost its connection to another rank ({lost})")
            return 1
        except Exception as error:
            problem = describe_error_of_storage(error)
            if problem is None:
                raise
            print_error(problem)
            ErrorHandler().record_exception(error)
            return 2
        except KeyboardInterrupt:
            code = 128 + signal.SIGINT
    if code == 128 + signal.SIGINT and torchrun_placement() is None:  # else `train.launch` prints it once
        LOGGER.warning(f"penstock: {RESUMES}")
    return code


def run_rank() -> None:
    """Run one rank and end the process. It is the command `penstock-rank`, which torchrun starts as a script."""
    code = main()
    # Skip the shutdown of the interpreter: on a busy machine some processes aborted in it ("terminate called without an
    # active exception", exit code 134), although their runs had written everything. Presumably a thread of torch
    # requests the interpreter lock then, and Python 3.11 ends that thread; the cause was not proven.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    run_rank()
