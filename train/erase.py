"""The erasure of weights that have read documents of a takedown.

After a replay, the checkpoints that it replaced are in `train/replaced`. All of them are deleted, and so is every
current checkpoint that was trained on a removed document. What has read documents of a takedown is recorded first,
beside the certificate of that takedown, so that a process that is killed leaves a record that the check refutes, and no
deletion without one.
"""

import shutil
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from itertools import takewhile
from pathlib import Path

from schemas.checkpoints import CHECKPOINTS
from schemas.erasure import ErasedCheckpoint, ErasedFile, Erasure, write_erasure
from schemas.leases import check_still_held, delete_files
from schemas.paths import check_own_folders
from schemas.storage import Store
from schemas.takedown import Certificate, TrainedCheckpoint, read_certificate, takedown_ancestry
from schemas.tokens import Dataset, open_dataset
from train.checkpoint.folder import CheckpointMetadata, list_checkpoints, remove_checkpoint, remove_incomplete
from train.dataset_history import read_replays, takedowns_at_same_positions, takedowns_seen, takedowns_since
from train.takedown_replay import REPLACED, notes_aside, weights_of

NONE = ""
"""Key of replaced checkpoints that have read documents of no takedown."""


def find_replaced(run: Store) -> dict[str, list[ErasedCheckpoint]]:
    """Return what `erase_replaced` would delete, by the id of each takedown whose documents it has, or may have, read.

    Replaced checkpoints that have read none of them are at the key NONE. Empty without takedowns.
    """
    dataset = open_dataset(run)
    line = takedown_ancestry(run, dataset.manifest)
    if not line:
        return {}
    found: dict[str, list[ErasedCheckpoint]] = {}
    aside = dict(notes_aside(run))
    for name, note in aside.items():
        checkpoint, seen = _described(name, note), _seen_aside(run, dataset, name, note)
        _add(found, seen, checkpoint)
        if not seen:
            found.setdefault(NONE, []).append(checkpoint)
    for checkpoint in _incomplete(run, [*aside]):
        _add(found, line, checkpoint)
    for note in list_checkpoints(run):
        _add(found, _seen(run, dataset, note), _described(note.name, note))
    return found


def erase_replaced(run: Store, found: dict[str, list[ErasedCheckpoint]]) -> list[str]:
    """Delete what `find_replaced` has returned; return the paths of the records, relative to the run.

    The caller holds the locks on the tables and on training.
    """
    check_own_folders(run, "train")
    at = datetime.now(UTC).isoformat(timespec="seconds")
    records = [
        write_erasure(
            run,
            Erasure(takedown=own, certificate=read_certificate(run, own).seal, at=at, checkpoints=checkpoints),
        )
        for own, checkpoints in found.items()
        if own != NONE
    ]
    deleted = {own.checkpoint: own for checkpoints in found.values() for own in checkpoints}
    for name, checkpoint in deleted.items():
        if not name.startswith(f"{REPLACED}/") and checkpoint.step is not None:
            remove_checkpoint(run, checkpoint.step)
    remove_incomplete(run)
    _delete_aside(run)
    return records


def _seen(run: Store, dataset: Dataset, note: CheckpointMetadata) -> list[Certificate]:
    """Return the takedowns whose documents a current checkpoint has read, or may have read."""
    since = takedowns_since(dataset, note.identity.dataset)
    if any(certificate.mode == "compact" for certificate in since):
        return since  # positions have moved, so the documents cannot be looked up
    known = takedowns_at_same_positions(dataset)
    return takedowns_seen(weights_of(note), known, read_replays(run))


def _seen_aside(run: Store, dataset: Dataset, name: str, note: CheckpointMetadata) -> list[Certificate]:
    """Return the takedowns whose documents a replaced checkpoint has read, or may have read; `name`: its folder.

    One that has read none is not named in a record: training again on the new dataset writes the same bytes once more.
    """
    line, digest = takedown_ancestry(run, dataset.manifest), note.identity.dataset
    since, replays = takedowns_since(dataset, digest), read_replays(run)
    folder, _, file = name.rpartition("/")
    moved = f"{CHECKPOINTS}/{file.partition('.')[0]}"
    # A replay that was repeated from the same dataset has moved a checkpoint of the same name, so each is considered.
    moves = [i for i, replay in enumerate(replays) if folder.endswith(replay.before[:12]) and moved in replay.set_aside]
    if not moves or not (since or digest == dataset.digest):
        return line
    certified = [
        certificate
        for certificate in since
        if any(model.may_have_seen for model in _models_like(certificate, note)) or not _models_like(certificate, note)
    ]
    # Documents of takedowns before its dataset, if a replay resumed from a checkpoint that had read them.
    before = [*takewhile(lambda certificate: certificate.mode != "compact", line[len(since) :])]
    earlier = [own.id for i in moves for own in takedowns_seen(weights_of(note), before, replays[:i])]
    return [*certified, *(certificate for certificate in before if certificate.id in earlier)]


def _models_like(certificate: Certificate, note: CheckpointMetadata) -> list[TrainedCheckpoint]:
    """Return the checkpoints in a certificate with the step and dataset of a checkpoint, wherever it has been moved."""
    key = (note.step, note.identity.dataset)
    return [model for model in certificate.effects.models if (model.step, model.dataset) == key]


def _add(found: dict[str, list[ErasedCheckpoint]], takedowns: Sequence[Certificate], own: ErasedCheckpoint) -> None:
    for certificate in takedowns:
        found.setdefault(certificate.id, []).append(own)


def _described(name: str, note: CheckpointMetadata) -> ErasedCheckpoint:
    files = [ErasedFile(path=f"{name}/{file}", size=own.size, sha256=own.sha256) for file, own in note.files.items()]
    return ErasedCheckpoint(checkpoint=name, step=note.step, dataset=note.identity.dataset, files=files)


def _incomplete(run: Store, complete: Sequence[str]) -> Iterator[ErasedCheckpoint]:
    """Yield the files in `train/replaced` of no complete checkpoint, such as those of an interrupted move."""
    folders = tuple(f"{name}/" for name in complete)
    names = [f"{REPLACED}/{name}" for name in sorted(run.child(REPLACED).walk())]
    left = [name for name in names if not name.startswith(folders)]
    for folder in dict.fromkeys(name.rpartition("/")[0] for name in left):
        own = [name for name in left if name.rpartition("/")[0] == folder]
        files = [ErasedFile(path=name, size=run.size(name), sha256=run.sha256(name)) for name in own]
        yield ErasedCheckpoint(checkpoint=folder, step=None, dataset="", files=files)


def _delete_aside(run: Store) -> None:
    check_still_held(run)
    if run.is_local:
        if Path(run.path(REPLACED)).exists():
            shutil.rmtree(run.path(REPLACED))
            run.sync("train")
        return
    folder = run.child(REPLACED)
    delete_files(folder, sorted(folder.walk()))
    if run.exists(REPLACED):
        run.delete_folder(REPLACED)
