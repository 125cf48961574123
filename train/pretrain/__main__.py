"""`torchrun … -m train.pretrain RUN`: the arguments, and what a failure becomes."""

import argparse
import os
import re
import signal
import sys
from collections.abc import Sequence
from contextlib import ExitStack

from torch.distributed.elastic.multiprocessing.errors import ErrorHandler

from schemas.errors import PenstockError
from schemas.locks import lock_training
from schemas.storage import Store
from train.parallel.ranks import FirstRankFailed, Ranks, open_ranks
from train.pretrain.loop import train

LOST_CONNECTION = re.compile(r"[Cc]onnection (?:closed|reset) by peer|Broken pipe|NCCL communicator was aborted")
"""What a collective says when a rank of it has died."""


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and train; returns the exit code, 2 for an error the user can act on."""
    parser = argparse.ArgumentParser(prog="train.pretrain", description="Train on the token dataset of a run folder.")
    # On Python 3.11 torchrun takes `--run` for its own `--run-path` and refuses it, so the folder may also stand alone.
    folder = parser.add_mutually_exclusive_group(required=True)
    folder.add_argument("run", nargs="?", default=argparse.SUPPRESS, metavar="RUN", help="run folder with the tokens")
    folder.add_argument("--run", dest="run", default=argparse.SUPPRESS, metavar="RUN", help="the same")
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="SECTION.KEY=VALUE")
    arguments = parser.parse_args(argv)
    run = Store(arguments.run)
    ranks: Ranks | None = None
    with ExitStack() as held:
        try:
            ranks = held.enter_context(open_ranks())
            ranks.on_first(lambda: held.enter_context(lock_training(run, "penstock train")))
            return train(run, arguments.overrides, ranks)
        except PenstockError as error:
            if not isinstance(error, FirstRankFailed):
                print(f"penstock: {error}", file=sys.stderr)
            ErrorHandler().record_exception(error)  # where torchrun and `train.launch` look for it
            return 2
        except RuntimeError as error:
            if ranks is None or not LOST_CONNECTION.search(str(error)):
                raise
            # The rank that died has said why, if it could; a page of what met the others would bury it.
            print(
                f"penstock: rank {ranks.rank} has lost another one ({LOST_CONNECTION.findall(str(error))[0]})",
                file=sys.stderr,
            )
            return 1
        except KeyboardInterrupt:
            print("penstock: stopped at once; the last complete checkpoint stands", file=sys.stderr)
            return 128 + signal.SIGINT


if __name__ == "__main__":
    code = main()
    # Without the end of the interpreter: on a busy machine some processes aborted in it ("terminate called without an
    # active exception", exit code 134), behind runs that had long written everything. Presumably a thread of torch's
    # asks for the interpreter then, which Python 3.11 answers by ending the thread; the cause was not proven.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
