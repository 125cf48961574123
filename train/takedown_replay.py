"""Replay training after a takedown: find the steps and checkpoints that saw the documents, and resume without them.

The plan is changed to name the new dataset, which has the token positions of the old one. Checkpoints after the chosen
one are moved to another folder; then training resumes as usual.
"""

import math
from collections.abc import Iterable, Iterator, Sequence

from schemas.checkpoints import CHECKPOINTS, METADATA_NAME
from schemas.errors import ConfigError, ContractError
from schemas.locks import lock_training
from schemas.paths import PLAN_NAME, check_own_folders
from schemas.storage import Store
from schemas.takedown import Certificate, Effects, TrainedCheckpoint
from schemas.tokens import TRAIN, Dataset, open_dataset
from train.checkpoint.folder import (
    INIT_FROM,
    CheckpointMetadata,
    deciding_settings,
    list_checkpoints,
    move_checkpoint,
    open_trained_order,
    parse_metadata,
)
from train.data.order import SampleOrder
from train.data.stages import SkipList
from train.dataset_history import (
    CLEAN,
    Replay,
    digests_at_same_positions,
    now,
    read_replays,
    saw_before,
    takedowns_at_same_positions,
    takedowns_seen,
    takedowns_since,
    write_replays,
)
from train.plan.plan import Plan, stored_plan, write_plan

REPLACED = "train/replaced"
"""Folder to which a replay moves the checkpoints after the chosen one."""
Span = tuple[str, int, int]
"""The stream of a document, its first token in the stream, and its number of tokens."""


# Steps and checkpoints that were trained on the removed documents.


def find_effects(run: Store, dataset: Dataset, documents: Iterable[Span]) -> Effects:
    """Return the steps whose batches hold tokens of the documents, and which checkpoints were trained on them.

    Raises ContractError if the plan or its skip list does not continue the newest checkpoint.
    """
    plan, same = stored_plan(run), digests_at_same_positions(dataset)
    spans, order, steps, next_tokens = [*documents], None, list[int](), 1
    # A plan for the dataset before a takedown is still the one that made the checkpoints.
    if plan is not None and plan.dataset in same:
        train = plan.settings.train
        # Packed rows hold whole spans of documents, so a first token is never the last target of another row.
        next_tokens = int(train.objective == "causal" and train.packing == "stream")
        plan = plan.model_copy(update={"dataset": dataset.digest})
        order = open_trained_order(run, dataset, plan)
        steps = steps_with_documents(order, spans, next_tokens)

    def model(name: str, note: CheckpointMetadata, read: Sequence[int] | None, earlier: bool) -> TrainedCheckpoint:
        known = read is not None and note.identity.dataset in same
        saw = note.step >= (next(iter(read or ()), math.inf) if known else 1)
        return TrainedCheckpoint(
            checkpoint=name, step=note.step, dataset=note.identity.dataset, saw=saw, saw_earlier=earlier
        )

    takedowns, replays = takedowns_at_same_positions(dataset), read_replays(run)
    own = None if order is None else steps
    current = [
        model(note.name, note, own, bool(takedowns_seen(weights_of(note), takedowns, replays)))
        for note in list_checkpoints(run)
    ]
    clean = [checkpoint.step for checkpoint in current if not (checkpoint.saw or checkpoint.saw_earlier)]
    aside = []
    for name, note in notes_aside(run):
        then = None if plan is None or order is None else order_of_checkpoint(order, plan, note)
        read = None if then is None else steps_with_documents(then, spans, next_tokens)
        # Why a replay set a checkpoint aside is recorded in the certificate of the takedown before that replay.
        aside.append(model(name, note, read, False))
    return Effects(steps=steps, models=[*current, *aside], last_clean=max(clean, default=None))


def weights_of(note: CheckpointMetadata) -> tuple[int, str, str]:
    """Return step, digest of the dataset, and digest of the weights that training began from, of a checkpoint."""
    return note.step, note.identity.dataset, str(note.identity.settings.get(INIT_FROM, ""))


def order_of_checkpoint(order: SampleOrder, plan: Plan, note: CheckpointMetadata) -> SampleOrder | None:
    """Return the order of the samples that a checkpoint was trained on; None if it is not that of the run's plan.

    `order`: that of the plan, with the current skip list. A replay keeps the order, but the skip list may grow later,
    and the run may be planned again.
    """
    stored, planned = note.identity, deciding_settings(plan)
    skip = SkipList(order.skip.indices[: stored.skip_length])
    names = ("train.stages", "train.objective", "train.packing")
    if any(stored.settings.get(name) != planned.get(name) for name in names):
        return None
    if (stored.order, stored.skip_list) != (order.digest, skip.digest):
        return None
    return SampleOrder(dict(zip(order.sources, order.streams, strict=True)), order.stages, skip, order.seed)


def notes_aside(run: Store) -> Iterator[tuple[str, CheckpointMetadata]]:
    """Yield folder and metadata of every checkpoint that a replay has set aside."""
    for path in sorted(run.child(REPLACED).walk()):
        folder, _, file = f"{REPLACED}/{path}".rpartition("/")
        if file == METADATA_NAME:
            step = folder.rpartition("/")[2].partition(".")[0]
            origin = f"{folder}, once {CHECKPOINTS}/{step}/{METADATA_NAME}"
            yield folder, parse_metadata(run.read_bytes(f"{folder}/{file}"), origin)


def steps_with_documents(order: SampleOrder, documents: Iterable[Span], next_tokens: int = 1) -> list[int]:
    """Return the steps (1 = first) whose batch contains a token of the documents.

    `next_tokens`: 1 = the token after the last input of a row counts, as a target; 0 = it does not.
    """
    steps: set[int] = set()
    for stream, start, num_tokens in documents:
        source, _, split = stream.rpartition("/")
        if split != TRAIN or source not in order.sources or not num_tokens:
            continue
        for stage, numbers in order.find(source, max(0, start - next_tokens), start + num_tokens):
            plan = order.stages[stage]
            steps.update((plan.first_step + numbers // plan.global_batch + 1).tolist())
    return sorted(steps)


# The start of a replay.


def plan_replay(run: Store, choice: str) -> Replay:
    """Return the replay that `begin_replay` would prepare. Raises the same errors, and changes nothing."""
    return _planned(run, choice)[0]


def begin_replay(run: Store, choice: str) -> Replay:
    """Prepare a run to train again on its dataset without the removed documents.

    `choice`: where to resume: `clean`, 0, or the step of an existing checkpoint. The plan gets the new dataset.
    Later checkpoints move to REPLACED. A second call completes an interrupted one. Raises ConfigError or ContractError
    before anything is written.
    """
    check_own_folders(run, "train")
    with lock_training(run, "penstock train --replay-from"):
        (replay, bound), plan = _planned(run, choice), stored_plan(run)
        stored = read_replays(run)
        earlier = [own for own in stored if own.after == replay.after]
        if plan is not None and plan.dataset != replay.after and not _has_checkpoint_on(run, replay.after):
            # A kill before the plan was written: nothing was trained after these choices, which this one replaces.
            kept, names = [own for own in stored if own not in earlier], {note.name for note in list_checkpoints(run)}
            moved = [name for own in earlier for name in own.set_aside if name not in names]
            everything = sorted({*moved, *replay.set_aside})
            write_replays(run, [*kept, replay.model_copy(update={"set_aside": everything})])
        elif not earlier or earlier[-1].from_step != replay.from_step or replay.set_aside:
            write_replays(run, [*stored, replay])
        _set_aside(run, replay.set_aside, replay.before)
        write_plan(run, bound)
        return replay


def _has_checkpoint_on(run: Store, digest: str) -> bool:
    """Return True if a checkpoint was trained on a dataset, also one that was set aside."""
    notes = [*list_checkpoints(run), *(note for _, note in notes_aside(run))]
    return any(note.identity.dataset == digest for note in notes)


def record_restart(run: Store, plan: Plan) -> None:
    """Record that training begins at step 0, if the latest replay on the plan's dataset resumed from a checkpoint.

    Else the new checkpoints would count as trained on the documents that this checkpoint had read.
    """
    replays = read_replays(run)
    chosen = [replay for replay in replays if replay.after == plan.dataset]
    if not chosen or not chosen[-1].from_step:
        return
    saw = _before_run(plan, takedowns_at_same_positions(open_dataset(run)), "0")
    clean = True not in saw
    changes = {"at": now(), "from_step": 0, "clean": clean, "unknown_before": clean and None in saw, "set_aside": []}
    write_replays(run, [*replays, chosen[-1].model_copy(update=changes)])


def _planned(run: Store, choice: str) -> tuple[Replay, Plan]:
    """Return the replay that the user chose, and the run's plan on the dataset without the removed documents."""
    dataset, plan = open_dataset(run), stored_plan(run)
    if plan is None:
        raise ConfigError(
            f"train --replay-from: expected a run that has been trained, got {run.uri} without {PLAN_NAME}. "
            "Run `penstock train` on it without --replay-from."
        )
    earlier = [replay for replay in read_replays(run) if replay.after == dataset.digest]
    before = earlier[-1].before if earlier and plan.dataset == dataset.digest else plan.dataset
    if before == dataset.digest:
        raise ConfigError(
            f"train --replay-from: expected a dataset that a takedown has changed since the plan was made, got dataset "
            f"{before[:12]}, which no takedown has changed. Train without --replay-from."
        )
    since = takedowns_since(dataset, before)
    if not since:
        raise ConfigError(
            f"train --replay-from: expected a dataset that takedowns have made from the plan's dataset {before}, got "
            f"{dataset.digest}. If this is another dataset, run `penstock plan`; then train without --replay-from."
        )
    if not dataset.manifest.content.counts.rows_kept:
        raise ConfigError(
            f"train --replay-from: expected at least one document to train on, got 0: all documents of dataset "
            f"{dataset.digest} were taken down. Run the recipe on other inputs, in another run folder."
        )
    if moved := [certificate.id for certificate in since if certificate.mode == "compact"]:
        raise ConfigError(
            f"train --replay-from: expected takedowns that keep every token position, got takedown {moved[-1]} with "
            f"--compact. Remove {CHECKPOINTS} and run `penstock plan` again."
        )
    bound = plan.model_copy(update={"dataset": dataset.digest})
    order = open_trained_order(run, dataset, bound).digest
    if order != plan.order:
        raise ContractError(
            f"{run.uri}/{PLAN_NAME}: expected the plan's sample order {plan.order}, got {order} for the current "
            "dataset. Run `penstock plan` again."
        )
    notes = list_checkpoints(run)
    certified = takedowns_at_same_positions(dataset)
    before_run = _before_run(plan, certified, choice)
    step, clean = _chosen(run, choice, notes, certified)
    later = [note.name for note in notes if note.step > step]
    replay = Replay(
        at=now(),
        from_step=step,
        clean=clean and True not in before_run,
        before=before,
        after=dataset.digest,
        takedowns=[certificate.id for certificate in since],
        order=order,
        set_aside=later,
        unknown_before=clean and None in before_run,
    )
    return replay, bound


def _before_run(plan: Plan, takedowns: Sequence[Certificate], choice: str) -> list[bool | None]:
    """Return, for each takedown, True if the weights that the run began from had read its documents; None = not known.

    Raises ConfigError if a clean checkpoint was chosen and there can be none.
    """
    saw = [saw_before(plan.origin.digest if plan.origin else "", certificate) for certificate in takedowns]
    if choice == CLEAN and True in saw and plan.origin:
        raise ConfigError(
            f"train --replay-from: expected weights that saw none of the removed documents, got {plan.origin.name}, "
            "from which this training began and which saw some. Plan a new run that begins from other weights "
            "(train.init_from)."
        )
    return saw


def _chosen(run: Store, choice: str, notes: list[CheckpointMetadata], takedowns: list[Certificate]) -> tuple[int, bool]:
    """Return the step to resume from, and True if its checkpoint was trained on none of the removed documents."""
    replays = read_replays(run)
    clean = [note.step for note in notes if not takedowns_seen(weights_of(note), takedowns, replays)]
    if choice == CLEAN:
        return max(clean, default=0), True
    steps = [note.step for note in notes]
    if not choice.isdigit() or int(choice) not in {0, *steps}:
        raise ConfigError(
            f"train --replay-from: expected {CLEAN}, 0 or the step of a checkpoint "
            f"({', '.join(map(str, steps)) or 'none exists'}), got {choice!r}. Set --replay-from to one of these."
        )
    return int(choice), int(choice) == 0 or int(choice) in clean


def _set_aside(run: Store, later: list[str], before: str) -> None:
    """Move the checkpoints `later` to REPLACED."""
    # The newest first, so that a kill leaves no gap in the series.
    for name in sorted(later, reverse=True):
        target = f"{REPLACED}/{before[:12]}/{name.rpartition('/')[2]}"
        number = 0
        while run.exists(goal := f"{target}{f'.{number}' if number else ''}"):
            number += 1
        move_checkpoint(run, name, goal)


def describe_replay(replay: Replay) -> str:
    """Return a description of a replay in one line."""
    where = f"checkpoint of step {replay.from_step}" if replay.from_step else "the beginning"
    seen = "which saw none of the removed documents" if replay.clean else "which HAS SEEN removed documents"
    if replay.unknown_before:
        seen = f"{seen} itself (it is NOT KNOWN whether the weights that it began from did)"
    aside = f"; {len(replay.set_aside)} later checkpoint(s) set aside in {REPLACED}" if replay.set_aside else ""
    return (
        f"training again from {where}, {seen}, on dataset {replay.after[:12]} in place of {replay.before[:12]} "
        f"(takedown {', '.join(replay.takedowns)}){aside}"
    )
