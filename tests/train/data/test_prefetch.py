"""Prefetching: the same rows from any start, errors at their own step, and the waiting time."""

import threading
import time

import pytest
import torch

from train.data.batches import Prefetch
from train.data.rows import Rows


def rows_of(step: int) -> Rows:
    ids = torch.full((1, 2), step)
    return Rows(ids, ids, None, torch.zeros(1, dtype=torch.int64))


class Reader:
    """Records the steps that were read, and by which threads."""

    def __init__(self, seconds: float = 0.0, broken: int = -1):
        self.seconds, self.broken = seconds, broken
        self.steps: list[int] = []
        self.threads: set[str] = set()

    def __call__(self, step: int) -> Rows:
        time.sleep(self.seconds)
        self.steps.append(step)
        self.threads.add(threading.current_thread().name)
        if step == self.broken:
            raise OSError(f"step {step} is lost")
        return rows_of(step)


def step_of(rows: Rows) -> int:
    return int(rows.inputs_BT[0, 0])


@pytest.mark.parametrize("first", [0, 5])
def test_every_step_is_read_once_in_one_thread_and_none_after_the_last(first: int) -> None:
    reader = Reader()
    with Prefetch(reader, stop=8) as prefetch:
        assert [step_of(prefetch.take(step)[0]) for step in range(first, 8)] == list(range(first, 8))
    assert reader.steps == list(range(first, 8))
    assert reader.threads == {"rows_0"}


def test_a_run_may_go_back() -> None:
    with Prefetch(Reader(), stop=10) as prefetch:
        assert [step_of(prefetch.take(step)[0]) for step in (3, 4, 1, 2, 9, 0)] == [3, 4, 1, 2, 9, 0]


def test_an_error_is_raised_for_its_own_step_only() -> None:
    with Prefetch(Reader(broken=2), stop=10) as prefetch:
        assert step_of(prefetch.take(1)[0]) == 1
        with pytest.raises(OSError, match="step 2 is lost"):
            prefetch.take(2)
        assert step_of(prefetch.take(3)[0]) == 3


def test_the_waiting_time_is_the_rest_of_the_reading_time() -> None:
    with Prefetch(Reader(seconds=0.2), stop=3) as prefetch:
        first = prefetch.take(0)[1]
        time.sleep(0.3)
        second = prefetch.take(1)[1]
        third = prefetch.take(2)[1]
    assert first >= 0.2
    assert second < 0.1
    assert third >= 0.1


def test_closing_leaves_no_thread() -> None:
    prefetch = Prefetch(Reader(), stop=10)
    prefetch.take(0)
    prefetch.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("rows")]
    with pytest.raises(RuntimeError):
        prefetch.take(1)


@pytest.mark.parametrize(("device", "pinned"), [("cpu", []), ("cuda", [3, 4])])
def test_rows_are_pinned_for_cuda_alone(device: str, pinned: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Pinned in the reading thread, before the step; without a device here, so that pinning is only recorded."""
    seen: list[tuple[int, str]] = []

    def pin(rows: Rows) -> Rows:
        seen.append((step_of(rows), threading.current_thread().name))
        return rows

    monkeypatch.setattr(Rows, "pinned", pin)
    with Prefetch(Reader(), 5, device) as prefetch:
        actual = [prefetch.take(step)[0] for step in (3, 4)]
    assert seen == [(step, "rows_0") for step in pinned]
    assert not any(rows.inputs_BT.is_pinned() for rows in actual)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_pinned_rows_are_the_same_rows() -> None:
    rows = rows_of(7)
    with Prefetch(lambda step: rows, 1, "cuda") as prefetch:
        actual = prefetch.take(0)[0]
    assert actual.inputs_BT.is_pinned()
    assert actual.part(0, 1).targets_BT.is_pinned()
    assert actual.documents_BT is None
    assert torch.equal(actual.to(torch.device("cuda")).inputs_BT.cpu(), rows.inputs_BT)
