"""What stands in a run beside its plan and has a say in the order of its samples: the skip list, the packed rows."""

from schemas.storage import Store
from schemas.tokens import Dataset
from train.config.settings import Settings
from train.data.order import Order, make_order
from train.data.packing import open_packings
from train.data.skips import NO_SKIPS, SkipList, read_skip_list
from train.plan.plan import Plan

SKIPS_OF_REWINDS = "skips.txt"
"""The skip list of a run that rewinds and names no other."""


def skip_name(settings: Settings) -> str:
    """The skip list of a run, relative to its train folder; empty = none."""
    return settings.train.skip_file or (SKIPS_OF_REWINDS if settings.guard.rewinds else "")


def standing_skips(run: Store, settings: Settings) -> SkipList:
    """The skip list of a run as it stands; a run that rewinds begins without one."""
    name = skip_name(settings)
    if name == SKIPS_OF_REWINDS and not run.exists(f"train/{name}"):
        return NO_SKIPS
    return read_skip_list(run, name)


def standing_order(run: Store, dataset: Dataset, plan: Plan) -> Order:
    """The order of a plan's samples, under the skip list and over the packed rows that stand."""
    train = plan.settings.train
    skip, packings = standing_skips(run, plan.settings), open_packings(run, dataset, train)
    return make_order(dataset, train, plan.stages, skip, packings)
