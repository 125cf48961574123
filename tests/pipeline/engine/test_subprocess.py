"""The child process: a record that kills it is named, the next record gets a new child."""

import faulthandler
import os
import signal
import time

import pytest

from pipeline.engine.worker import Crashed, Sandbox


def work(row):
    if row["do"] == "die":
        faulthandler.disable()
        os.kill(os.getpid(), signal.SIGSEGV)
    if row["do"] == "hang":
        time.sleep(60)
    if row["do"] == "raise":
        raise ValueError("bad row")
    return row | {"pid": os.getpid()}


def test_the_culprit_is_named_and_the_rest_goes_on():
    isolated = Sandbox(work, seconds=0.5)
    try:
        first = isolated({"do": "ok"})["pid"]
        assert isolated({"do": "ok"})["pid"] == first != os.getpid()
        with pytest.raises(Crashed):
            isolated({"do": "die"})
        second = isolated({"do": "ok"})["pid"]
        assert second not in (first, os.getpid())
        with pytest.raises(Crashed, match="no answer in 0 s"):
            isolated({"do": "hang"})
        with pytest.raises(ValueError, match="bad row"):
            isolated({"do": "raise"})
        assert isolated({"do": "ok", "blob": b"x" * 3_000_000})["blob"] == b"x" * 3_000_000
    finally:
        isolated.close()
