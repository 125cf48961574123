"""The spark-submit entry point: `spark-submit … jobs/run_all.py RECIPE --out RUN` runs every data stage."""

import argparse
import os
import signal
import sys
from collections.abc import Callable, Sequence

from jobs.recipe import read_recipe
from jobs.spark_session import SparkConfig, open_session
from pipeline.run import prepare, run_steps
from schemas.errors import PenstockError, describe_storage_error
from schemas.storage import Store, describe_remote_error


def run_recipe(recipe_path: str, out: str, overrides: Sequence[str], until: str | None = None) -> None:
    """Run the recipe's data stages into the run folder `out`, up to the step `until` (None: all)."""
    recipe = read_recipe(recipe_path, overrides)
    folder = Store(out)
    folder.check_bucket()
    prepared = prepare(recipe, until)  # whatever is wrong is found before Spark starts
    config = recipe.section("spark", SparkConfig)
    spark = open_session(config)
    try:
        run_steps(spark, prepared, folder, config.partitions)
    finally:
        spark.stop()


def explained(call: Callable[[], int | None]) -> int:
    """The exit code of a call: its own, 2 for an explained error, 130 if interrupted, 141 if nobody reads it."""
    try:
        return call() or 0
    except PenstockError as error:
        print(f"penstock: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # Who reads the output has seen enough, as `head` has; else Python would say so when it closes the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except Exception as error:  # Spark wraps in its own what the storage said to a worker
        problem = describe_remote_error(error) or (
            describe_storage_error(error) if isinstance(error, OSError) else None
        )
        if problem is None:
            raise
        print(f"penstock: {problem}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("penstock: interrupted; the same command goes on where it stopped", file=sys.stderr)
        return 130


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments and run; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", help="TOML file")
    parser.add_argument("--out", required=True, help="run folder: a local path or s3://, gs://, hdfs://")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    arguments = parser.parse_args(argv)
    return explained(lambda: run_recipe(arguments.recipe, arguments.out, arguments.overrides))


if __name__ == "__main__":
    sys.exit(main())
