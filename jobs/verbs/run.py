"""`penstock run` and `penstock stage`: the data steps of a recipe, and the plan of the training run."""

import argparse

from jobs.arguments import Command, add_recipe
from jobs.run_all import run_recipe
from jobs.verbs.plan import plan_command
from pipeline.stages import STEPS

VERBS = {
    "run": "Run every data step, then plan the training run.",
    "stage": "Run the data steps up to one step.",
}


def add_stage_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the last step that `stage` runs."""
    parser.add_argument("step", help=f"the last step to run: {', '.join(step.name for step in STEPS)}")


def run_command(arguments: argparse.Namespace) -> int:
    """Run every data step, then plan the training run."""
    run_recipe(arguments.recipe, arguments.out, arguments.overrides)
    return plan_command(argparse.Namespace(run=arguments.out, overrides=[], quiet=True, dry_run=False))


def stage_command(arguments: argparse.Namespace) -> int:
    """Run the data steps up to one step."""
    run_recipe(arguments.recipe, arguments.out, arguments.overrides, until=arguments.step)
    return 0


COMMANDS = {
    "run": Command(
        (add_recipe,), run_command, "run jobs/recipes/web.toml --out run --set source.paths='[\"crawl/*.warc.gz\"]'"
    ),
    "stage": Command(
        (add_stage_arguments, add_recipe),
        stage_command,
        "stage dedup jobs/recipes/web.toml --out run",
    ),
}
