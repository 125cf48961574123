"""`penstock verify`: a check of the files of all tables of a run against the digests of their manifests."""

import argparse
from collections.abc import Iterator

from jobs.arguments import Command, add_run
from pipeline.membership.dataset import check_index, tables_of
from schemas.blocks import has_blocks, parse_blocks
from schemas.errors import ContractError
from schemas.manifest import MANIFEST_NAME, TableVersion, open_table, read_run
from schemas.paths import PLAN_NAME
from schemas.storage import Store
from schemas.tables import TABLES
from schemas.tokens import Dataset, open_dataset
from schemas.versions import DATASET, open_run
from train.data.packing import packed_files
from train.data.verify import ExpectedFile, verify_files
from train.plan.plan import read_plan

GROUP = "inspect"
VERBS = {
    "verify": "Compare the files of a run with their manifests. Files that have not changed since the last time are "
    "not read again.",
}

Arguments = argparse.Namespace


def verify_command(arguments: Arguments) -> int:
    """Compare the files of every table with the manifests, and those of packed rows; print how many files were read.

    The tables of a run are those that its `run.json` names, also if they lie in another run.
    """
    version = open_run(arguments.run)
    run = Store(version.address)  # the list of verified files is stored in the run itself
    current = read_run(version).tables
    tables = {name: TableVersion(*open_table(version, name, even_replaced=True)) for name in TABLES if name in current}
    if not tables:
        open_table(version, DATASET)  # raises an error that says what the folder is
    expected: list[ExpectedFile] = [
        (table.folder, path, path.sha256) for table in tables.values() for path in table.manifest.paths.values()
    ]
    name = run.uri
    if DATASET in tables:
        dataset = open_dataset(version, even_replaced=True)
        expected += _packed(run, dataset)
        name = f"dataset {dataset.digest[:12]}"
    read = verify_files(run, run.uri, expected, arguments.paranoid)
    for table in tables.values():
        check_blocks(table, arguments.paranoid)
    if DATASET in tables and arguments.paranoid:
        for table in tables_of(dataset):
            check_index(table)
    owners = {table.folder.child("../..").uri: None for table in tables.values()}
    where = "" if [*owners] == [run.uri] else f" in {' and '.join(owners)}"
    print(
        f"{name}: all {len(expected)} files match the manifests of {', '.join(tables)}{where}. {read} were read now, "
        f"{len(expected) - read} were verified before and have not changed."
    )
    return 0


def check_blocks(table: TableVersion, with_checksums: bool) -> None:
    """Raise ContractError if the manifest of a table whose files are verified has other blocks than the files have.

    Training reads the files block by block. `with_checksums`: compare the checksums too, for which the files are read.
    """
    manifest, folder = table.manifest, table.folder
    for key, text in manifest.run.blocks.items():
        path = manifest.paths.get(key)
        blocks = parse_blocks(text, f"{folder.uri}/{MANIFEST_NAME}: run.blocks of {key!r:.200}")
        is_whole = path is not None and sum(size for size, _ in blocks) == path.num_bytes
        if path is not None and is_whole and with_checksums:
            with folder.open_unchecked(path) as file:
                is_whole = has_blocks(file, blocks)
        if not is_whole:
            raise ContractError(
                f"{folder.uri}/{MANIFEST_NAME}: expected the blocks of the file {key!r:.200} in run.blocks, got "
                "others, although its SHA-256 is that of the manifest. Restore the manifest from a backup."
            )


def _packed(run: Store, dataset: Dataset) -> Iterator[ExpectedFile]:
    """Yield the files of packed rows of a run; none if its plan is for another dataset."""
    stored = run.read_json(PLAN_NAME) if run.exists(PLAN_NAME) else {}
    if not isinstance(stored, dict) or stored.get("dataset") == dataset.digest:
        yield from packed_files(run, dataset, read_plan(run, dataset).settings.train)


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `verify` except the run."""
    parser.add_argument(
        "--paranoid",
        action="store_true",
        help="read every file, even if it was verified before, and compare the checksums of blocks and the index by "
        "id of the dataset with the shards",
    )


COMMANDS = {
    "verify": Command(
        (add_run, add_verify_arguments),
        verify_command,
        "verify run --paranoid",
    ),
}
