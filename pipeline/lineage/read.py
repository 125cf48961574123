"""The lineage of a run folder, from the files of a crawl to the end of training, read from manifests alone."""

from pipeline.lineage.data import TableTraversal
from pipeline.lineage.graph import Lineage, LineageBuilder
from pipeline.lineage.training import add_training
from schemas.errors import ConfigError, ContractError
from schemas.manifest import RUN_NAME
from schemas.storage import Store


def read_lineage(run: Store, verify: bool = False) -> Lineage:
    """Everything that the run's tables, plan and checkpoints were made from; `verify` reads every file again.

    What does not hold is a break of the lineage, not an error. Raises ConfigError if the folder is no run.
    """
    if not run.exists(RUN_NAME):
        raise ConfigError(f"{run.uri}: expected a run folder, got no {RUN_NAME}. Run `penstock run RECIPE --out …`.")
    walk = TableTraversal(run, LineageBuilder(), verify)
    for name, version in walk.standing.items():
        walk.visit(name, version)
    add_training(walk, verify)
    return walk.growing.done()


def check_lineage(lineage: Lineage, where: str) -> None:
    """Raises ContractError that names every link that does not hold."""
    if lineage.breaks:
        message = list(dict.fromkeys(found.message for found in lineage.breaks))
        raise ContractError(f"{where}: expected an unbroken lineage, got\n  " + "\n  ".join(message))
