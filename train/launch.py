"""A wrapper of torchrun that returns the exit code of its ranks instead of a traceback.

It accepts torchrun's arguments. Exit code 2 is an error that the user can fix. SIGTERM is forwarded to the ranks, which
write a checkpoint and stop; the exit code is then 0, unless a rank reports an error. With `--standalone`, the ranks of
this machine meet at a port that no other machine can reach.
"""

import logging
import signal
import socket
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import (
    RendezvousHandler,
    RendezvousInfo,
    RendezvousParameters,
    RendezvousStoreInfo,
    rendezvous_handler_registry,
)
from torch.distributed.run import main as torchrun

from schemas.errors import RESUMES
from schemas.logs import LOGGER, format_libraries
from train.parallel.ranks import LOOPBACK, name_launcher

SIGNAL_LOGGERS = ("torch.distributed.elastic.agent.server.api", "torch.distributed.elastic.multiprocessing.api")
"""Loggers that warn about every signal that torchrun receives or forwards."""


class LoopbackRendezvous(RendezvousHandler):
    """The meeting point of the ranks of one machine: a store that listens on the loopback interface only.

    The store of `torchrun --standalone` listens on every interface, and torchrun unpickles what other processes write
    to it.
    """

    backend = "loopback"

    def __init__(self, run_id: str):
        self._run_id, self._round = run_id, 0
        with socket.create_server((LOOPBACK, 0)) as listener:
            port = listener.getsockname()[1]
            # The store owns and closes the duplicate.
            self._store = dist.TCPStore(  # type: ignore[attr-defined]
                LOOPBACK, port, is_master=True, multi_tenant=True, master_listen_fd=listener.dup().detach()
            )

    def get_backend(self) -> str:
        """Return the name that `--rdzv-backend` takes."""
        return self.backend

    @property
    def use_agent_store(self) -> bool:
        """True: the ranks use the store too."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Return the store for one start of the ranks."""
        self._round += 1
        store = dist.PrefixStore(f"{self._run_id}/{self._round}", self._store)  # type: ignore[attr-defined]
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self._store.port))

    def is_closed(self) -> bool:
        """Return False: no other machine waits."""
        return False

    def set_closed(self) -> None:
        """Do nothing."""

    def num_nodes_waiting(self) -> int:
        """Return 0: no other machine joins."""
        return 0

    def get_run_id(self) -> str:
        """Return the id of the run."""
        return self._run_id

    def shutdown(self) -> bool:
        """Return True: the store ends with this process."""
        return True


def _create_loopback(parameters: RendezvousParameters) -> RendezvousHandler:
    return LoopbackRendezvous(parameters.run_id)


def torchrun_words(words: Sequence[str]) -> list[str]:
    """Return torchrun's arguments, with `--standalone` replaced by a rendezvous on the loopback interface."""
    here = ["--nnodes", "1", "--rdzv-backend", LoopbackRendezvous.backend, "--rdzv-endpoint", LOOPBACK]
    return [new for word in words for new in (here if word == "--standalone" else [word])]


def main(argv: Sequence[str] | None = None) -> int:
    """Run torchrun and return the exit code of the first rank that failed; 128 + signal if it was killed."""
    rendezvous_handler_registry.register(LoopbackRendezvous.backend, _create_loopback)
    for name in SIGNAL_LOGGERS:
        logging.getLogger(name).setLevel(logging.ERROR)
    format_libraries()
    name_launcher()
    with tempfile.TemporaryDirectory() as errors:
        try:
            torchrun(["--log-dir", errors, *torchrun_words(sys.argv[1:] if argv is None else argv)])
        except ChildFailedError as error:
            rank, failure = error.get_first_failure()
            code = failure.exitcode if failure.exitcode >= 0 else 128 - failure.exitcode
            if code != 2:  # the rank has already printed an error that the user can fix
                LOGGER.error(f"penstock: rank {rank} ended with exit code {code}")
            return code
        except SignalException as error:
            if error.sigval != signal.SIGTERM:
                if error.sigval == signal.SIGINT:
                    LOGGER.warning(f"penstock: {RESUMES}")
                return 128 + error.sigval
            # Only the last start counts: torchrun recovered from earlier failures by restarting.
            starts = sorted(Path(errors).glob("*/attempt_*"), key=lambda path: int(path.name.partition("_")[2]))
            return 2 if starts and any(starts[-1].rglob("error.json")) else 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
