"""A run made ready to train: settings, plan, data and checkpoint found and checked before anything is changed.

Rank 0 checks for all, so that an error is said once and no rank waits for another.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import version

from schemas.ids import digest_of
from schemas.storage import Store
from schemas.tokens import Dataset, open_dataset
from train.checkpoint.folder import local_path, remove_halves, standing_notes
from train.checkpoint.note import Identity, Layout, Note, check_identity, layout_of
from train.config.settings import Settings
from train.data.batches import Batches
from train.data.skips import SkipList
from train.data.stages import StagePlan
from train.data.verify import verify_dataset
from train.model.fp8 import check_fp8
from train.plan.axes import axes_of
from train.plan.checks import check_ranks, check_used, listeners
from train.plan.planned import Plan, read_settings, write_plan
from train.plan.sizing import make_plan
from train.plan.standing import standing_order, standing_skips
from train.ranks import Ranks, default_threads
from train.watch.metrics import MANIFEST_NAME, TrainManifest
from train.watch.profiling import Window, parse_window


@dataclass(frozen=True)
class Setup:
    """A run that is ready to train: everything checked, nothing changed."""

    run: Store
    plan: Plan
    dataset: Dataset
    layout: Layout
    note: Note | None
    """The checkpoint to go on from; None = begin."""
    done: bool
    """Whether the run has reached its end, and its manifest stands."""
    window: Window | None
    """The steps to profile on this rank."""

    @property
    def settings(self) -> Settings:
        """The settings of the plan."""
        return self.plan.settings

    def open_batches(self) -> Batches:
        """The batches under the skip list as it stands."""
        return Batches(self.dataset, self.settings.train, standing_order(self.run, self.dataset, self.plan))


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


def check_run(run: Store, overrides: Sequence[str], ranks: Ranks) -> tuple[Plan, Note | None, bool]:
    """The plan, the checkpoint to go on from and whether all is done, after every check; for rank 0."""
    local_path(run, "train")
    dataset = open_dataset(run)
    settings = read_settings(run, dataset, overrides)
    check_used(settings, dataset)
    plan = make_plan(run, dataset, settings)
    check_ranks(plan, ranks.world_size)
    if settings.train.precision == "fp8":
        check_fp8(ranks.device)
    parse_window(settings.train.profile, plan.steps)
    skip = standing_skips(run, settings)
    notes = standing_notes(run)
    note = notes[-1] if notes else None
    identity = identify(dataset, plan, skip)
    if note is not None:
        check_identity(note, identity)
        stage, used = place_of(plan.stages, note.step)
        skip.check_continues(note.identity.skip_length, note.identity.skip_list, used, stage)
    verify_dataset(run, dataset)
    done = note is not None and _is_done(run, note, identity)
    if not done:
        run.delete(MANIFEST_NAME)
    remove_halves(run)
    write_plan(run, plan)
    return plan, note, done


def place_of(stages: Sequence[StagePlan], step: int) -> tuple[int, int]:
    """The stage that goes on behind `step` updates, from 0, and the samples that it has used by then."""
    number = max(i for i, stage in enumerate(stages) if stage.first_step <= step)
    return number, (step - stages[number].first_step) * stages[number].global_batch


def _is_done(run: Store, note: Note, identity: Identity) -> bool:
    if not run.exists(MANIFEST_NAME):
        return False
    manifest = TrainManifest.model_validate(run.read_json(MANIFEST_NAME))
    return (manifest.steps, manifest.plan, manifest.skip_list) == (note.step, identity.plan, identity.skip_list)


def prepare(run: Store, overrides: Sequence[str], ranks: Ranks) -> Setup:
    """The run opened on every rank, once rank 0 has checked it for all. Raises ConfigError or ContractError."""
    plan, note, done = ranks.on_first(lambda: check_run(run, overrides, ranks))
    layout = plan.settings.layout
    found = layout_of(layout, axes_of(layout, ranks.world_size), default_threads(ranks), ranks.device.type)
    # The number of threads shows in the last bits, so a run that goes on with as many ranks keeps it.
    if note is not None and note.layout.ranks == ranks.world_size:
        found = found.model_copy(update={"threads": note.layout.threads})
    window = parse_window(plan.settings.train.profile, plan.steps) if ranks.rank == 0 else None
    return Setup(run, plan, open_dataset(run), found, note, done, window)


def describe(setup: Setup) -> str:
    """What is about to be trained, in one line."""
    plan, layout, note = setup.plan, setup.layout, setup.note
    axes = " x ".join(f"{axis} {size}" for axis, size in layout.axes.items() if size > 1)
    parts = [
        f"{plan.num_params:,} parameters on {layout.ranks} x {layout.device} ({layout.threads} threads each)"
        + (f", {axes}, {plan.settings.layout.data}" if axes else ""),
        f"{plan.steps:,} steps of {plan.global_batch} x {plan.seq_len} tokens in {plan.settings.train.precision}",
    ]
    if len(plan.stages) > 1:
        parts.append(f"{len(plan.stages)} stages")
    if note is not None:
        changes = note.layout.differences(layout)
        exact = "exactly" if layout.device == "cpu" else "in the same layout"
        compressed = plan.settings.layout.compress != "none"
        equal = "so gradients are compressed otherwise" if compressed else "so equal up to rounding"
        rounded = f"in another layout, {equal} ({'; '.join(changes)})"
        parts.append(f"going on from step {note.step}, {rounded if changes else exact}")
    return "; ".join(parts)
