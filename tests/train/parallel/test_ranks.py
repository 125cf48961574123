"""The agreement of ranks on a start name, and stop signals."""

import os
import signal
import threading
import time

import pytest
import torch.distributed as dist

from train.parallel.ranks import Interruption, agreed_start


def start(store: dist.Store, delays: tuple[float, ...]) -> list[str]:
    """Return the names that ranks agree on if they start after these delays [s]."""
    actual = [""] * len(delays)

    def begin(rank: int) -> None:
        time.sleep(delays[rank])
        actual[rank] = agreed_start(store, rank, len(delays))

    threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(len(delays))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return actual


def test_ranks_agree_on_their_own_start_whoever_is_first() -> None:
    store = dist.HashStore()
    starts = [start(store, delays) for delays in ((0, 0, 0), (0.1, 0, 0), (0, 0.1, 0.05), (0.05, 0.1, 0))]
    assert [len(set(names)) for names in starts] == [1] * 4
    assert len({names[0] for names in starts}) == 4


def test_a_scheduler_may_send_sigterm_twice() -> None:
    before = signal.getsignal(signal.SIGTERM)
    with Interruption() as interruption:
        assert interruption.received == (False, False)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
        assert interruption.received == (True, False)
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_second_interrupt_of_a_user_acts_at_once() -> None:
    # A process that a shell starts in the background ignores interrupts; here they act as in a terminal.
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    with Interruption() as interruption:
        os.kill(os.getpid(), signal.SIGINT)
        assert interruption.received == (False, True)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)
    signal.signal(signal.SIGINT, before)
