"""A spike taken apart: the documents of its batch with their own losses, and how a run goes on without the culprits."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from schemas.errors import ContractError
from train.data.order import SampleOrder
from train.data.rows import Rows
from train.data.stages import STAGE_BITS, append_to_skip_list
from train.monitor.events import SpikeDocument
from train.monitor.metrics import read_metrics
from train.monitor.quarantine import (
    Attribution,
    Quarantined,
    SourceLevels,
    attribute_spike,
    excess_of,
    merge_parts,
    quarantine,
    read_quarantine,
)
from train.parallel.ranks import Ranks
from train.plan.plan import skip_name, standing_order
from train.pretrain.setup import TrainingSetup
from train.pretrain.step import Learner
from train.trace import Trace

ORIGIN_FIELDS = {"doc_id", "url", "source", "split", "offset", "length"}


@dataclass(frozen=True)
class Exclusion:
    """What training goes on without behind a spike."""

    samples: tuple[int, ...]
    """Global sample indices that entered the skip list."""
    documents: tuple[Quarantined, ...]
    """Documents that are in no batch from now on."""


def _trace(setup: TrainingSetup, order: SampleOrder) -> Trace:
    return Trace(setup.dataset, order, setup.settings.train.objective == "causal")


def source_levels_before(setup: TrainingSetup, step: int) -> SourceLevels:
    """What each source had in the last `guard.spike_window` steps before one."""
    before = [record for record in read_metrics(setup.run) if record.step < step and not record.skipped]
    return SourceLevels(before[-setup.settings.guard.spike_window :])


def measure_documents(
    setup: TrainingSetup, ranks: Ranks, learner: Learner, step: int, rows: Rows
) -> list[SpikeDocument]:
    """Every part of a document in the batch of a step with its own loss under the weights as they are, worst first.

    `rows` are this rank's. One forward pass of all ranks, of which the gradient knows nothing; the same on every rank.
    """
    # A reader and an order of its own: those of the run are being used by the thread that reads ahead.
    batches = setup.open_batches()
    parts = ranks.on_first(lambda: _trace(setup, batches.order).documents_of_step(step))
    levels = ranks.on_first(lambda: source_levels_before(setup, step))
    number = batches.order.stage_of(step - 1).global_batch
    places = [(part.row, part.piece, part.row_start, part.row_stop) for part in parts]
    groups_BT = batches.groups(step - 1, learner.model.rows_here(number), places)
    tally = learner.measure_groups(rows, groups_BT, len(parts) + 1, number)
    found = []
    for part, loss, count in zip(parts, tally.losses_S.tolist(), tally.counts_S.tolist(), strict=False):
        document, targets = SpikeDocument.model_validate(part), round(count)
        if targets:
            excess = excess_of(loss / targets, targets, levels.of(part.source))
            document = document.model_copy(update={"loss": loss / targets, "targets": targets, "excess": excess})
        found.append(document)
    return sorted(found, key=lambda document: -document.excess if document.excess is not None else float("inf"))


def samples_to_skip(trace: Trace, doc_ids: Iterable[str], samples: Sequence[int], after: int) -> list[int]:
    """`samples` and all others behind step `after` that a run has to skip never to see documents again, any epoch.

    Those that move up in their place are looked at again. Raises ContractError if the documents are in most of them.
    """
    found, wanted = list(samples), [bytes.fromhex(doc_id) for doc_id in doc_ids]
    while more := trace.skipping(found).samples_with(wanted, after):
        # What is skipped in a stage moves the stages behind it, so these are looked at once it is done.
        stage = more[0] >> STAGE_BITS
        found += [sample for sample in more if sample >> STAGE_BITS == stage]
        if len(found) > trace.num_samples(after):
            raise ContractError(
                f"guard.quarantine: expected that the run can do without {len(wanted)} document(s), got them in most "
                f"of its {trace.num_samples(after)} samples behind step {after}. Set guard.quarantine = false, or "
                "take the documents out of the dataset with `penstock takedown`."
            )
    return found


def skip_quarantined(setup: TrainingSetup, after: int) -> int:
    """Skip what holds a quarantined document behind step `after` and is not skipped yet; returns how many samples.

    So a list is followed that a killed process had just written, or that another run handed on.
    """
    doc_ids = [document.doc_id for document in read_quarantine(setup.run)]
    order = standing_order(setup.run, setup.dataset, setup.plan)
    samples = samples_to_skip(_trace(setup, order), doc_ids, [], after) if doc_ids else []
    if samples:
        _write(setup, [], samples, "quarantined documents")
    return len(samples)


def exclude_spike(
    setup: TrainingSetup, step: int, after: int, documents: Sequence[SpikeDocument], rewind: int
) -> Exclusion:
    """Skip the samples of the spike in `step`, and quarantine its culprits if the settings want that; for one rank.

    Training goes on from `after`; `rewind`: the number of this one in the run. A process that is killed between the two
    writes has named the culprits, and the next one keeps them out.
    """
    order = standing_order(setup.run, setup.dataset, setup.plan)
    samples, listed = order.samples(step - 1).index.tolist(), list[Quarantined]()
    reason = f"spike in step {step}"
    if setup.settings.guard.quarantine:
        levels = source_levels_before(setup, step)
        own = merge_parts(((one.doc_id, one.source, one.loss, one.targets) for one in documents), levels)
        listed = _lines(attribute_spike(own), documents, step, rewind) if own else []
        # The samples that move up may hold what was quarantined before.
        doc_ids = [line.doc_id for line in (*read_quarantine(setup.run), *listed)]
        more = samples_to_skip(_trace(setup, order), doc_ids, samples, after)[len(samples) :]
        reason += f", with {len(more)} more samples of quarantined documents" if more else ""
        samples += more
    _write(setup, listed, samples, reason)
    return Exclusion(tuple(samples), tuple(listed))


def _lines(found: Attribution, documents: Sequence[SpikeDocument], step: int, rewind: int) -> list[Quarantined]:
    """The lines of the list for the documents that a spike is blamed on."""
    known = {document.doc_id: document for document in documents}
    return [
        Quarantined(
            **known[culprit.doc_id].model_dump(include=ORIGIN_FIELDS),
            step=step,
            rewind=rewind,
            loss=culprit.loss,
            targets=culprit.targets,
            excess=culprit.excess,
            limit=found.limit,
            why=found.why,
        )
        for culprit in found.documents_blamed
    ]


def _write(setup: TrainingSetup, listed: Sequence[Quarantined], samples: list[int], reason: str) -> None:
    name = skip_name(setup.settings)
    try:
        if listed:
            quarantine(setup.run, listed)
        append_to_skip_list(setup.run, name, samples, reason)
    except OSError as error:
        raise ContractError(
            f"{setup.run.uri}/train/{name}: expected room for {len(samples)} samples ({reason}), got {error}. Make "
            "room, and start the run again."
        ) from error
