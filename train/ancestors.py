"""What the weights that a training began from have read: of the documents of a takedown, and of held-out documents.

A model that began from a checkpoint has read what the training before it has read, whatever its own batches hold. So
the documents are looked up in every run of the line, as far as it can be read as it was then.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from schemas.checkpoints import METADATA_NAME
from schemas.errors import PenstockError
from schemas.origin import CHECKPOINT, ModelOrigin, origin_of
from schemas.storage import Store
from schemas.takedown import Effects, salted_digest
from schemas.tokens import Dataset, open_dataset
from train.checkpoint.folder import CheckpointMetadata, list_checkpoints
from train.dataset_history import (
    digests_at_same_positions,
    read_replays,
    takedowns_at_same_positions,
    takedowns_seen,
)
from train.takedown_replay import Span, find_effects, notes_aside, weights_of

SpansOf = Callable[[Dataset], Sequence[Span]]
"""Returns the spans of the documents in the dataset of another run."""


def with_origins(run: Store, effects: Effects, documents: frozenset[bytes], spans_of: SpansOf) -> Effects:
    """Return the effects of documents on a run, with what the weights before its training have read of them."""
    origin = origin_of(run)
    saw = origins_saw(origin, documents, spans_of)
    names = [own.name for own in origin.line] if origin else []
    began = origin.digest if origin else ""
    effects = effects.model_copy(update={"origins": names, "origins_saw": saw, "began_from": began})
    current = {note.name: note for note in list_checkpoints(run)}
    notes = current | dict(notes_aside(run))

    def before(name: str) -> bool | None:
        weights = weights_of(notes[name])[2] if name in notes else None
        return False if weights == "" else effects.saw_before if weights == began else None

    models = [own.model_copy(update={"saw_before": before(own.checkpoint)}) for own in effects.models]
    clean = [own.step for own in models if own.checkpoint in current and not (own.may_have_seen or own.saw_earlier)]
    return effects.model_copy(update={"models": models, "last_clean": max(clean, default=None)})


def saw_before(origin: ModelOrigin | None, documents: frozenset[bytes], spans_of: SpansOf) -> bool | None:
    """Return True if one of a line of weights had read one of the documents; None = not known."""
    saw = origins_saw(origin, documents, spans_of)
    return True if True in saw else None if None in saw else False


def origins_saw(origin: ModelOrigin | None, documents: frozenset[bytes], spans_of: SpansOf) -> list[bool | None]:
    """Return, for each of a line of weights, True if they had read one of the documents; None = not known."""
    return [] if origin is None else [_saw(own, documents, spans_of) for own in origin.line]


def _saw(origin: ModelOrigin, documents: frozenset[bytes], spans_of: SpansOf) -> bool | None:
    if origin.format != CHECKPOINT:
        return None
    try:
        run = Store(origin.path)
        if (found := _find(run, origin)) is None:
            return None
        (name, note), dataset = found, open_dataset(run, even_replaced=True)
        if note.identity.dataset not in digests_at_same_positions(dataset):
            return None
        # What an earlier takedown removed there is in its certificate alone.
        for certificate in takedowns_seen(weights_of(note), takedowns_at_same_positions(dataset), read_replays(run)):
            removed = {traces.document for traces in certificate.documents}
            if any(salted_digest(certificate.salt, "document", own) in removed for own in documents):
                return True
        models = {model.checkpoint: model for model in find_effects(run, dataset, spans_of(dataset)).models}
        saw = models[name].saw
    except (PenstockError, OSError, KeyError):
        return None
    # Its metadata says that it began from other weights, of which the plan of that run no longer knew.
    return None if weights_of(note)[2] and origin.origin is None and not saw else saw


@dataclass
class EarlierData:
    """The datasets that a line of weights was trained on."""

    opened: list[tuple[Store, Dataset]] = field(default_factory=list)
    """A run of the line, and the dataset that it was trained on, or that takedowns with tombstones made from it."""
    unknown: list[str] = field(default_factory=list)
    """Names of the weights of which it is not known."""

    def removed(self, documents: Iterable[bytes]) -> set[bytes]:
        """Return those of `documents` that a takedown removed from one of the datasets, which has none of them now."""
        found, listed = set[bytes](), list(documents)
        for certificate in (each for _, dataset in self.opened for each in takedowns_at_same_positions(dataset)):
            removed = {traces.document for traces in certificate.documents}
            found |= {own for own in listed if salted_digest(certificate.salt, "document", own) in removed}
        return found


def data_before(run: Store, checkpoint: CheckpointMetadata) -> EarlierData:
    """Return the datasets of the weights from which the training of a checkpoint began, and of those before them."""
    data, began, origin = EarlierData(), weights_of(checkpoint)[2], origin_of(run)
    if began and (origin is None or origin.digest != began):
        data.unknown.append(f"the weights {began[:12]}")
    for own in origin.line if began and origin and not data.unknown else ():
        if (opened := _opened(own)) is None:
            data.unknown.append(own.name)
        else:
            data.opened.append(opened)
    return data


def _opened(origin: ModelOrigin) -> tuple[Store, Dataset] | None:
    """Return the run of an origin with its dataset; None if it is not known what all of its training has read."""
    if origin.format != CHECKPOINT:
        return None
    try:
        run = Store(origin.path)
        dataset, found = open_dataset(run, even_replaced=True), _find(run, origin)
        if origin.dataset not in digests_at_same_positions(dataset):
            return None
    except (PenstockError, OSError):
        return None
    # Its metadata says that it began from other weights, of which the plan of that run no longer knew.
    return None if found and weights_of(found[1])[2] and origin.origin is None else (run, dataset)


def _find(run: Store, origin: ModelOrigin) -> tuple[str, CheckpointMetadata] | None:
    """Return folder and metadata of the checkpoint that an origin names, also if a replay has moved it."""
    notes = [*((note.name, note) for note in list_checkpoints(run)), *notes_aside(run)]
    at_step = [(name, note) for name, note in notes if note.step == origin.step]
    return next((own for own in at_step if run.sha256(f"{own[0]}/{METADATA_NAME}") == origin.digest), None)
