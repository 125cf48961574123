"""`penstock verify`: a check of the files of a dataset against the digests of its manifest, before training."""

import argparse
from collections.abc import Iterator

from jobs.arguments import Command, add_run
from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from schemas.versions import open_run
from train.data.packing import packed_files
from train.data.verify import ExpectedFile, verify_dataset
from train.plan.plan import PLAN_NAME, read_plan

GROUP = "inspect"
VERBS = {
    "verify": "Compare the files of a dataset with its manifest. Files that have not changed since the last time are "
    "not read again.",
}

Arguments = argparse.Namespace


def verify_command(arguments: Arguments) -> int:
    """Compare every shard, index and tokenizer file with the manifest; print how many files were read."""
    version = open_run(arguments.run)
    run, dataset = Store(version.uri), open_dataset(version)  # the list of verified files is stored in the run itself
    others = list(_packed(run, dataset))
    read = verify_dataset(run, dataset, others, arguments.paranoid)
    number = len(dataset.manifest.content.files) + len(others) + 1
    print(
        f"dataset {dataset.digest[:12]}: all {number} files match the manifest. {read} were read now, "
        f"{number - read} were verified before and have not changed."
    )
    return 0


def _packed(run: Store, dataset: Dataset) -> Iterator[ExpectedFile]:
    """Yield the files of packed rows of a run; none if its plan is for another dataset."""
    stored = run.read_json(PLAN_NAME) if run.exists(PLAN_NAME) else {}
    if not isinstance(stored, dict) or stored.get("dataset") == dataset.digest:
        yield from packed_files(run, dataset, read_plan(run, dataset).settings.train)


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `verify` except the run."""
    parser.add_argument("--paranoid", action="store_true", help="read every file, even if it was verified before")


COMMANDS = {
    "verify": Command(
        (add_run, add_verify_arguments),
        verify_command,
        "verify run --paranoid",
    ),
}
