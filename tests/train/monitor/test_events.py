"""The event log: events are read back exactly, incomplete lines are ignored, and nothing is ever truncated."""

import math
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest

from schemas.errors import ContractError
from schemas.storage import Store
from tests.support.paths import ROOT
from train.monitor.events import (
    EVENTS_NAME,
    EarlyStop,
    Event,
    EventLog,
    FailedSave,
    Interrupted,
    Resumed,
    Rewound,
    Skipped,
    Spike,
    SpikeDocument,
    Started,
    Stopped,
    Straggler,
    Undone,
    layout_changes,
    read_events,
    rewound_steps,
    skipped_steps,
)
from train.monitor.metrics import StepMetrics
from train.trace import Appearance

METRICS = StepMetrics(
    step=41,
    stage=1,
    loss=1 / 3,
    grad_norm=0.1,
    learning_rate=1e-3,
    tokens=1,
    tokens_per_second=1.0,
    step_seconds=1.0,
    data_seconds=0.0,
)
APPEARANCE = Appearance(
    piece=0,
    step=42,
    row=3,
    sample=1027,
    source="web",
    epoch=0,
    doc_id="ab" * 16,
    url="https://example.org/ü",
    split="a.warc.gz",
    offset=17,
    length=300,
    doc_start=5,
    doc_stop=99,
    row_start=0,
    row_stop=94,
)
FOLDER = "train/checkpoints/step-000040"
EVENTS: list[Event] = [
    Resumed(step=40, checkpoint=FOLDER, layout={"ranks": 2}, layout_before={"ranks": 1}),
    Skipped(step=41, loss=math.nan, grad_norm=math.inf, loss_scale=1024.0),
    Spike(step=42, loss=9.0, mean=2.0, deviation=0.1, limit=2.6, documents=(SpikeDocument.model_validate(APPEARANCE),)),
    Undone(step=41, metrics=METRICS),
    Rewound(step=42, to_step=40, checkpoint=FOLDER, samples=(1024, 1027)),
    FailedSave(step=60, error="[Errno 28] No space left on device"),
    EarlyStop(step=80, heldout_loss=2.5, best=2.4, since_best=3),
    Straggler(step=80, steps=10, rank=3, host="n-1", cause="compute", factor=2.0, share=0.5),
    Interrupted(step=81, signal="SIGTERM", checkpoint=None),
    Stopped(step=82, reason="step 82: expected …"),
    Started(step=0, layout={"ranks": 2}),
]


def write(run: Store, *events: Event) -> None:
    log = EventLog(run)
    log.append(*events)
    log.close()


def test_every_kind_comes_back_as_it_was(tmp_path: Path) -> None:
    run = Store(str(tmp_path))
    assert read_events(run) == []
    write(run, *EVENTS)
    assert read_events(run) == EVENTS
    assert {type(event) for event in EVENTS} == set(get_args(Event))
    assert len((tmp_path / EVENTS_NAME).read_bytes().splitlines()) == len(EVENTS)
    assert read_events(run)[2].documents[0].url == "https://example.org/ü"
    assert (read_events(run)[1].loss, read_events(run)[1].grad_norm) == (None, None)


def test_a_later_process_appends(tmp_path: Path) -> None:
    run = Store(str(tmp_path))
    write(run, EVENTS[0])
    before = (tmp_path / EVENTS_NAME).read_bytes()
    write(run, EVENTS[5])
    assert (tmp_path / EVENTS_NAME).read_bytes().startswith(before)
    assert read_events(run) == [EVENTS[0], EVENTS[5]]


def test_half_a_line_is_passed_over_wherever_it_was_cut(tmp_path: Path) -> None:
    run, line = Store(str(tmp_path)), EVENTS[2].model_dump_json().encode()
    for length in range(1, len(line)):
        run.write_atomic(EVENTS_NAME, EVENTS[0].model_dump_json().encode() + b"\n" + line[:length])
        assert read_events(run) == [EVENTS[0]]
    # The process that comes next leaves it as it is and writes on a line of its own.
    write(run, EVENTS[5])
    assert read_events(run) == [EVENTS[0], EVENTS[5]]
    # An event that lacks only its newline counts, before and after the next event.
    run.write_atomic(EVENTS_NAME, line)
    assert read_events(run) == [EVENTS[2]]
    write(run, EVENTS[5])
    assert read_events(run) == [EVENTS[2], EVENTS[5]]


def test_a_killed_process_has_written_its_events(tmp_path: Path) -> None:
    program = (
        "import os, sys\nfrom schemas.storage import Store\nfrom train.monitor.events import *\n"
        f"EventLog(Store({str(tmp_path)!r})).append(FailedSave(step=3, error='full'))\nos.kill(os.getpid(), 9)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False)
    assert done.returncode == -9
    assert [(event.kind, event.step) for event in read_events(Store(str(tmp_path)))] == [("failed_save", 3)]


@pytest.mark.parametrize("line", [b'{"kind": "unknown", "step": 1}', b"12", b'{"kind": "skipped", "step": 1}'])
def test_json_that_is_no_event_is_refused(tmp_path: Path, line: bytes) -> None:
    run = Store(str(tmp_path))
    run.write_atomic(EVENTS_NAME, EVENTS[0].model_dump_json().encode() + b"\n" + line + b"\n")
    with pytest.raises(ContractError, match=r"events.jsonl, line 2: expected an event"):
        read_events(run)


def test_words_that_json_cannot_hold_are_replaced(tmp_path: Path) -> None:
    error = str(OSError(28, "No space left on device", os.fsdecode(b"/data/\xff")))
    write(Store(str(tmp_path)), FailedSave(step=1, error=error))
    assert read_events(Store(str(tmp_path)))[0].error == "[Errno 28] No space left on device: '/data/\\udcff'"
    assert FailedSave(step=1, error="a\udcffb").error == "a?b"


def test_rewinds_are_counted() -> None:
    assert rewound_steps(EVENTS[:-1]) == [event.step for event in EVENTS if event.kind == "rewound"]
    assert rewound_steps([]) == []
    assert rewound_steps([*EVENTS, Started(step=0, layout={})]) == []


def test_a_step_that_was_taken_again_was_not_skipped() -> None:
    def skip(step: int) -> Skipped:
        return Skipped(step=step, loss=None, grad_norm=None)

    resumed = Resumed(step=4, checkpoint="c", layout={}, layout_before={})
    rewound = Rewound(step=8, to_step=5, checkpoint="c", samples=())
    assert skipped_steps([skip(4), skip(5), skip(7)]) == {4, 5, 7}
    assert skipped_steps([skip(4), skip(5), skip(7), rewound]) == {4, 5}
    assert skipped_steps([skip(4), skip(5), skip(7), resumed, skip(6)]) == {4, 6}
    assert skipped_steps([skip(4), Started(step=0, layout={}), skip(1)]) == {1}


BEGUN = Started(step=0, layout={"ranks": 1})
AT_4, AT_8 = (Resumed(step=n, checkpoint="c", layout={"ranks": n}, layout_before={}) for n in (4, 8))
BACK = Rewound(step=7, to_step=3, checkpoint="c", samples=())


@pytest.mark.parametrize(
    ("events", "expected"),
    [
        ([], []),
        ([BEGUN], [(0, BEGUN)]),
        ([BEGUN, AT_4, AT_8], [(0, BEGUN), (4, AT_4), (8, AT_8)]),
        ([BEGUN, AT_8, AT_4], [(0, BEGUN), (4, AT_4)]),  # steps 5 to 8 and later ones were undone
        ([BEGUN, AT_4, AT_4], [(0, BEGUN), (4, AT_4)]),
        ([BEGUN, AT_4, BEGUN], [(0, BEGUN)]),  # another training
        ([BEGUN, AT_4, BACK], [(0, BEGUN), (3, AT_4)]),  # steps 4 to 7 were computed again by the second process
        ([BEGUN, BACK], [(0, BEGUN), (3, BEGUN)]),
        ([AT_8], [(8, AT_8)]),  # the events before are lost
        ([BACK], []),
    ],
)
def test_the_layout_of_each_step_is_that_of_the_last_start_before_it(
    events: list[Event], expected: list[tuple[int, Event]]
) -> None:
    assert layout_changes(events) == expected
