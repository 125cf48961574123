"""`penstock verify`: the bytes of a dataset compared with its manifest, before anything is trained on them."""

import argparse
from collections.abc import Iterator

from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from schemas.versions import open_run
from train.data.packing import packed_files
from train.data.verify import ExpectedFile, verify_dataset
from train.plan.plan import PLAN_NAME, read_plan

Arguments = argparse.Namespace


def verify_command(arguments: Arguments) -> int:
    """Compare every shard, index and tokenizer file with the manifest; what was right before is not read again."""
    version = open_run(arguments.run)
    run, dataset = Store(version.uri), open_dataset(version)  # what was found right is kept in the run itself
    others = list(_packed(run, dataset))
    read = verify_dataset(run, dataset, others, arguments.paranoid)
    number = len(dataset.manifest.content.files) + len(others) + 1
    print(
        f"dataset {dataset.digest[:12]}: all {number} files are what the manifest expected. {read} were read now, "
        f"{number - read} have not changed since they were."
    )
    return 0


def _packed(run: Store, dataset: Dataset) -> Iterator[ExpectedFile]:
    """The packed rows of the plan that stands, if it is one of this dataset."""
    if run.exists(PLAN_NAME) and run.read_json(PLAN_NAME).get("dataset") == dataset.digest:
        yield from packed_files(run, dataset, read_plan(run, dataset).settings.train)


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `verify` but for the run."""
    parser.add_argument("--paranoid", action="store_true", help="read every file, whatever was verified before")
