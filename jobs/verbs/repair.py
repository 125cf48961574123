"""`penstock repair`: damaged and missing files of the tables of a run are built again, with the same digests."""

import argparse
from shlex import quote

from jobs.arguments import Command, add_run, add_trust, add_verbose
from jobs.recipe import check_addresses, check_functions, stored_recipe, warn_of_spark
from jobs.spark_session import SparkConfig, spark_session
from pipeline.prepare import prepare
from pipeline.repair import DamagedFile, find_damage, own_tables, owners_of, repair, steps_to_repair
from schemas.locks import lock_tables
from schemas.logs import LOGGER
from schemas.manifest import check_folder
from schemas.storage import Store

GROUP = "data"
VERBS = {
    "repair": "Build damaged files of a run again. Every file of its tables is compared with its manifest.",
}
MAX_SHOWN = 10


def add_repair_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the argument of `repair` that changes nothing."""
    parser.add_argument("--dry-run", action="store_true", help="list the damaged files and change nothing; exit code 2")


def repair_command(arguments: argparse.Namespace) -> int:
    """Compare every file of a run's tables with its manifest, and build the damaged ones again."""
    run = Store(arguments.run)
    check_folder(run)
    with lock_tables(run, "penstock repair"):
        tables = own_tables(run)
        damage = find_damage(tables)
        number = sum(len(table.manifest.paths) for table in tables.values())
        print(f"{run.uri}: {number - len(damage)} of {number} files match their manifests")
        for other in owners_of(run):
            LOGGER.warning(f"{run.uri} uses tables of {other}; `penstock repair {quote(other)}` checks them")
        if not damage:
            return 0
        _list(damage)
        if arguments.dry_run:
            return 2
        recipe = stored_recipe(run, [], trust=arguments.trust_run)
        warn_of_spark(run, arguments.trust_run)
        check_functions(run, recipe, "repair", arguments.trust_run)
        check_addresses(run, recipe, trust=arguments.trust_run)
        prepared = prepare(recipe, None)
        steps = steps_to_repair(prepared, run, damage)
        config = recipe.section("spark", SparkConfig)
        with spark_session(config, verbose=arguments.verbose, input_bytes=prepared.jvm_bytes) as spark:
            repaired = repair(spark, prepared, run, steps)
    print(f"{len(repaired)} files were built again; all {number} files match their manifests")
    return 0


def _list(damage: list[DamagedFile]) -> None:
    for file in damage[:MAX_SHOWN]:
        print(f"  {file.text}")
    if len(damage) > MAX_SHOWN:
        print(f"  and {len(damage) - MAX_SHOWN} more")


COMMANDS = {
    "repair": Command((add_run, add_repair_arguments, add_trust, add_verbose), repair_command, "repair run --dry-run"),
}
