"""`penstock run`, `stage` and `demo-crawl`: the data steps of a recipe, the plan, and a crawl to try them on."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from jobs.arguments import Command, add_recipe, add_reuse, number, whole
from jobs.recipe import read_recipe
from jobs.run_all import DryRunOptions, dry_run, options_of, run_recipe
from jobs.verbs.plan import plan_command
from pipeline.demo_crawl.build import build_demo_crawl
from pipeline.forecast import Prices
from pipeline.stages import STEPS
from pipeline.summary import Summary
from pipeline.tokens.streams import TOKENS, TokensConfig
from schemas.config import Recipe, suggest_name
from schemas.errors import ConfigError
from schemas.paths import PLAN_NAME
from schemas.storage import Store
from schemas.tokens import split_copies
from train.checkpoint.folder import list_checkpoints
from train.config.recipe import with_recipe
from train.config.settings import Settings, settings_of
from train.data.stages import chosen_sources
from train.plan.make_plan import problems_without_data

GROUP = "data"
VERBS = {
    "run": "Run every data step, then plan the training run.",
    "stage": "Run the data steps up to one step.",
    "demo-crawl": "Build a small crawl with planted duplicates and defects. truth.jsonl lists what is planted in the "
    "WARC files.",
}
CORE_HOUR_USD, GB_MONTH_USD = 0.05, 0.023
"""Default prices of an estimate: a core for an hour, and 10^9 bytes for a month [US$]."""


def add_stage_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument for the last step that `stage` runs."""
    parser.add_argument("step", help=f"the last step to run: {', '.join(step.name for step in STEPS)}")


def add_dry_run(parser: argparse.ArgumentParser) -> None:
    """Add the option `--dry-run`, and those of its estimate."""
    group = parser.add_argument_group("what a run would do")
    group.add_argument(
        "--dry-run", action="store_true", help="print which steps would be built, why, and at what cost; run nothing"
    )
    group.add_argument(
        "--like",
        metavar="RUN",
        action="append",
        default=[],
        help="run of the same steps on less input, to estimate the cost from; a second one, on input of another size, "
        "shows the part of the cost that does not grow",
    )
    group.add_argument(
        "--core-hour-usd", type=number, metavar="US$", help=f"price of a core for an hour; default {CORE_HOUR_USD}"
    )
    group.add_argument(
        "--gb-month-usd", type=number, metavar="US$", help=f"price of 10^9 bytes a month; default {GB_MONTH_USD}"
    )


def _dry_run(arguments: argparse.Namespace, until: str | None = None) -> int:
    prices = Prices(
        CORE_HOUR_USD if arguments.core_hour_usd is None else arguments.core_hour_usd,
        GB_MONTH_USD if arguments.gb_month_usd is None else arguments.gb_month_usd,
    )
    if len(arguments.like) > 2:
        raise ConfigError(f"--like: expected one run or two, got {len(arguments.like)}. Name the two largest.")
    options = DryRunOptions(arguments.reuse, arguments.like, prices)
    print(dry_run(arguments.recipe, arguments.out, arguments.overrides, until, options))
    return 0


def check_training(recipe: Recipe, path: str) -> None:
    """Raise ConfigError if the training sections of a recipe suit no dataset, or not the one that it makes.

    Without this, the plan would find it after all data steps.
    """
    settings = with_recipe(settings_of(recipe))
    wrong = (*_wrong_lengths(recipe, settings), *_unknown_sources(recipe, settings))
    if problems := [*wrong, *problems_without_data(settings)]:
        raise ConfigError("\n  ".join([f"{path}: {len(problems)} problem(s); nothing was started", *problems]))


def _wrong_lengths(recipe: Recipe, settings: Settings) -> Iterator[str]:
    """Yield a text about each sequence length, also the default one, that divides no chunk."""
    chunk, train = recipe.section(TOKENS.name, TokensConfig).chunk_tokens, settings.train
    lengths = {f"train.stages[{number}]": stage.seq_len for number, stage in enumerate(train.stages)}
    if not train.stages or "seq_len" in train.model_fields_set:
        lengths = {"train": train.seq_len, **lengths}
    for where, length in lengths.items():
        if length and chunk % length:
            yield (
                f"{where}.seq_len: expected a divisor of tokens.chunk_tokens = {chunk}, got {length}. Correct one of "
                "them."
            )


def _unknown_sources(recipe: Recipe, settings: Settings) -> Iterator[str]:
    """Yield a text about each source that `[train]` names and that the recipe does not have."""
    named = {(setting, name) for setting, values in chosen_sources(settings.train) for name in values}
    for setting, name in sorted(named):
        if split_copies(name)[0] not in recipe.sources:
            near = suggest_name(name, recipe.sources)
            yield f"{setting}: expected sources of the recipe, got {name!r}{near}. Correct or remove it."


def run_command(arguments: argparse.Namespace) -> int:
    """Run every data step, then plan the training run. The plan of a run that has checkpoints is kept."""
    check_training(read_recipe(arguments.recipe, arguments.overrides), arguments.recipe)
    if arguments.dry_run:
        return _dry_run(arguments)
    summary = _run(arguments)
    print(summary.text())
    run, code = Store(arguments.out), 0
    checkpoints = list_checkpoints(run) if run.exists(PLAN_NAME) else []
    if checkpoints:
        print(
            f"{run.uri}/{PLAN_NAME} is kept, because {checkpoints[-1].name} was trained with it; `penstock plan` would "
            "change it"
        )
    else:
        code = plan_command(argparse.Namespace(run=arguments.out, overrides=[], quiet=True, dry_run=False))
    print(summary.next_text())
    return code


def stage_command(arguments: argparse.Namespace) -> int:
    """Run the data steps up to one step."""
    if arguments.dry_run:
        return _dry_run(arguments, arguments.step)
    summary = _run(arguments, until=arguments.step)
    print(f"{summary.text()}\n{summary.next_text()}")
    return 0


def _run(arguments: argparse.Namespace, until: str | None = None) -> Summary:
    prices = {"--core-hour-usd": arguments.core_hour_usd, "--gb-month-usd": arguments.gb_month_usd}
    for flag, given in {"--like": arguments.like or None, **prices}.items():
        if given is not None:
            raise ConfigError(f"{flag}: expected --dry-run with it, got none. Nothing was started. Add --dry-run.")
    return run_recipe(arguments.recipe, arguments.out, arguments.overrides, until, options_of(arguments))


def add_demo_crawl_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `demo-crawl`."""
    parser.add_argument("out", help="folder for the WARC files and truth.jsonl")
    parser.add_argument(
        "--pages", type=whole, default=3000, help="base pages; planted duplicates and defects are added to them"
    )
    parser.add_argument("--seed", type=whole, default=1, help="seed of the random content; default 1")


def demo_crawl_command(arguments: argparse.Namespace) -> int:
    """Build a demo crawl: WARC files, and truth.jsonl, which lists their planted duplicates and defects."""
    truth = build_demo_crawl(Path(arguments.out), arguments.pages, arguments.seed)
    print(
        f"{arguments.out}: {truth.num_records:,} records in {len(truth.files)} files. They are {truth.num_pages:,} "
        f"ordinary pages, {len(truth.planted):,} planted ones (copies, defects and encodings, listed in truth.jsonl), "
        f"{truth.num_requests:,} requests and {len(truth.files)} warcinfo records. A run reads each as a row."
    )
    return 0


ADD_RUN = (add_recipe, add_reuse, add_dry_run)
COMMANDS = {
    "run": Command(
        ADD_RUN,
        run_command,
        "run web --out run --set source.paths='[\"crawl/*.warc.gz\"]'",
    ),
    "stage": Command((add_stage_arguments, *ADD_RUN), stage_command, "stage dedup web --out run"),
    "demo-crawl": Command((add_demo_crawl_arguments,), demo_crawl_command, "demo-crawl demo/crawl --pages 3000"),
}
