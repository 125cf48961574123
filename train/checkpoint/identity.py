"""What decides the weights of a run: the digests that a checkpoint carries, and that a plan must keep to go on."""

from importlib.metadata import version

from schemas.ids import digest_of
from schemas.storage import Store
from schemas.tokens import Dataset
from train.checkpoint.folder import standing_notes
from train.checkpoint.metadata import Identity, check_identity
from train.config.settings import Settings
from train.data.skips import SkipList
from train.data.stages import MASKS_VERSION
from train.dataset_history import as_before
from train.plan.checks import listeners
from train.plan.plan import Plan
from train.plan.standing import standing_skips


def identify(dataset: Dataset, plan: Plan, skip: SkipList) -> Identity:
    """What decides the weights of this run."""
    filled = {
        "train.stages": [stage.model_dump(mode="json") for stage in plan.stages],
        "optim.warmup_steps": plan.warmup_steps,
        "optim.learning_rate": plan.learning_rate,
    }
    # Steps and batch stand in the stages, with what the plan filled in.
    given = {name: value for name, value in plan.settings.content().items() if name not in RESOLVED}
    if listeners(plan.settings):
        train = plan.settings.train
        filled |= {"train.eval_every": train.eval_every, "train.eval_sequences": train.eval_sequences}
    if plan.settings.train.objective != "causal":
        filled["train.masks_version"] = MASKS_VERSION
    shape = {f"shape.{name}": value for name, value in plan.shape.model_dump(mode="json").items()}
    return Identity(
        dataset=dataset.digest,
        tokenizer=digest_of(dataset.tokenizer.model_dump(mode="json")),
        order=plan.order,
        settings=shape | given | courses(plan) | filled,
        skip_list=skip.digest,
        skip_length=len(skip.indices),
        code_version=version("penstock"),
    )


RESOLVED = ("train.steps", "train.global_batch", "train.stages")


def courses(plan: Plan) -> dict[str, object]:
    """The learning rates that stages have of their own."""
    own = [stage.model_dump(mode="json") for stage in plan.settings.train.stages]
    names = ("learning_rate", "schedule", "final_lr_share")
    return {"train.rates": [{name: stage[name] for name in names} for stage in own]} if own else {}


def as_begun(run: Store, settings: Settings) -> Settings:
    """Settings with automatic number formats as the newest checkpoint of a run has them, if there is one."""
    notes = standing_notes(run) if run.is_local else []
    return settings.with_formats_of(notes[-1].identity.settings) if notes else settings


def check_goes_on(run: Store, dataset: Dataset, plan: Plan) -> None:
    """Raises ContractError if a checkpoint stands that could not go on under a plan, naming all that differs."""
    if run.is_local and (notes := standing_notes(run)):
        found = identify(dataset, plan, standing_skips(run, plan.settings))
        note = notes[-1]
        seen = as_before(run, dataset, (note.name, note.step), note.identity.dataset)
        check_identity(note, found.model_copy(update={"dataset": seen}))
