"""Reading and checking the lineage of a run folder, from the files of a crawl to the end of training.

Only manifests and the JSON files of training are read, unless every file is verified.
"""

from pipeline.lineage.data import TableTraversal
from pipeline.lineage.graph import Lineage, LineageBuilder
from pipeline.lineage.training import add_training
from schemas.errors import ConfigError, ContractError
from schemas.manifest import RUN_NAME
from schemas.storage import Store


def read_lineage(run: Store, verify: bool = False) -> Lineage:
    """Return the lineage of the run's tables, plan and checkpoints; `verify` also checks the digest of every file.

    A link that cannot be confirmed is a break of the lineage, not an error. Raises ConfigError if the folder is not a
    run.
    """
    if not run.exists(RUN_NAME):
        raise ConfigError(f"{run.uri}: expected a run folder, got no {RUN_NAME}. Name the folder of a `penstock run`.")
    walk = TableTraversal(run, LineageBuilder(), verify)
    for name, version in walk.current.items():
        walk.visit(name, version)
    add_training(walk, verify)
    return walk.builder.done()


def check_lineage(lineage: Lineage, where: str) -> None:
    """Raise ContractError, listing every break, if the lineage has breaks."""
    if lineage.breaks:
        messages = list(dict.fromkeys(entry.message for entry in lineage.breaks))
        raise ContractError(f"{where}: expected an unbroken lineage, got\n  " + "\n  ".join(messages))
