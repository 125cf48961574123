"""Spark's Python workers as forks of a process that has imported the pipeline already.

A worker collects garbage after every task, which takes a tenth of a second where it has to look at all that the
pipeline imports: what is frozen before the fork is not looked at.
"""

import gc

import pyspark.daemon
import pyspark.worker

import pipeline.stages  # noqa: F401

if __name__ == "__main__":
    gc.collect()
    gc.freeze()
    pyspark.daemon.manager()
