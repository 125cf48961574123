"""Spark's Python workers as forks of a process that has imported the pipeline already.

After every task a worker collects garbage, which takes a tenth of a second where it has to look at all that the
pipeline has imported and loaded. Here it looks at the youngest objects only, and leaves the rest to the interpreter.
"""

import gc
from functools import partial
from types import SimpleNamespace

import pyspark.daemon
import pyspark.worker

import pipeline.stages  # noqa: F401

if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    pyspark.daemon.gc = SimpleNamespace(collect=partial(gc.collect, 0))
    pyspark.daemon.manager()
