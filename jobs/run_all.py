"""The spark-submit entry point: `spark-submit … jobs/run_all.py RECIPE --out RUN` runs every data step."""

import argparse
import shlex
import sys
import time
from collections.abc import Sequence

from jobs.exit_codes import exit_code_of
from jobs.recipe import read_recipe
from jobs.spark_session import SparkConfig, open_session
from pipeline.run import prepare, run_steps
from pipeline.summary import Summary, closing_summary
from schemas.storage import Store


def run_recipe(recipe_path: str, out: str, overrides: Sequence[str], until: str | None = None) -> Summary:
    """Run the data steps of a recipe into the run folder `out`, up to the step `until` (None: all of them).

    Return the closing summary.
    """
    started = time.monotonic()
    recipe = read_recipe(recipe_path, overrides)
    folder = Store(out)
    folder.check_bucket()
    prepared = prepare(recipe, until)  # every wrong setting is reported before Spark starts
    config = recipe.section("spark", SparkConfig)
    spark = open_session(config)
    try:
        command = "penstock run" if until is None else f"penstock stage {until}"
        run_steps(spark, prepared, folder, config.partitions, command)
    finally:
        spark.stop()
    words = ["penstock", "run", recipe_path, "--out", out, *(word for pair in overrides for word in ("--set", pair))]
    return closing_summary(folder, until, time.monotonic() - started, shlex.join(words) if until else None)


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, run the recipe and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", help="TOML file")
    parser.add_argument("--out", required=True, help="run folder: a local path or s3://, gs://, hdfs://")
    parser.add_argument("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", dest="overrides")
    arguments = parser.parse_args(argv)
    return exit_code_of(lambda: print(run_recipe(arguments.recipe, arguments.out, arguments.overrides).text()))


if __name__ == "__main__":
    sys.exit(main())
