"""The spark-submit entry point for one step: `spark-submit … jobs/run_stage.py STEP RECIPE --out RUN`.

A complete step is skipped, so a scheduler may repeat the job. Steps that the named one needs are built first if they
are not complete. `jobs/cli.py VERB …` is the same for every other verb that uses Spark.
"""

import sys
from collections.abc import Sequence

from jobs.arguments import add_recipe, add_reuse
from jobs.exit_codes import exit_code_of
from jobs.run_all import options_of, run_recipe
from pipeline.stages import STEPS
from schemas.logs import TEXT, LoggedParser, add_log_option, set_log


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the arguments, run the step and return the exit code: 0, 2 for an explained error, 130 if interrupted."""
    set_log(TEXT)
    parser = LoggedParser(description=__doc__)
    parser.add_argument("step", help=f"the last step to run: {', '.join(step.name for step in STEPS)}")
    add_recipe(parser)
    add_reuse(parser)
    add_log_option(parser)
    given = parser.parse_args(argv)

    def run() -> None:
        summary = run_recipe(given.recipe, given.out, given.overrides, given.step, options_of(given))
        print(summary.text())

    return exit_code_of(run, given)


if __name__ == "__main__":
    sys.exit(main())
