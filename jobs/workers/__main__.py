"""The process that Spark forks its Python workers from, `python -m jobs.workers`; it has imported the pipeline already.

Else every worker imports the pipeline itself: a demo run of 100 pages takes 33 s with this process and 37 s without, on
two cores. It ends when Spark closes its standard input.
"""

import gc
from functools import partial
from types import SimpleNamespace

import pyspark.daemon
import pyspark.worker

import pipeline.stages  # noqa: F401


def start() -> None:
    """Fork workers for Spark until it closes the standard input of this process."""
    gc.collect()
    gc.freeze()
    # Spark collects all garbage after each task, which takes 0.1 s where it has to look at all that was imported.
    vars(pyspark.daemon)["gc"] = SimpleNamespace(collect=partial(gc.collect, 0))
    pyspark.daemon.manager()


if __name__ == "__main__":
    start()
