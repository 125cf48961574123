"""The handling of a loss spike: the loss of each document in its batch, and the exclusion of samples from training.

A rewind skips the samples of the spike's step. With `guard.quarantine` it also skips every sample with tokens of a
document that the spike is attributed to.
"""

from collections.abc import Iterable, Sequence
from itertools import islice

from schemas.errors import ContractError
from train.data.batches import Batches
from train.data.order import SampleOrder
from train.data.rows import Rows
from train.data.stages import STAGE_BITS, append_to_skip_list
from train.monitor.events import SpikeDocument
from train.monitor.metrics import metrics_backwards
from train.monitor.quarantine import (
    Attribution,
    Exclusion,
    Quarantined,
    SourceLevels,
    attribute_spike,
    excess_of,
    merge_parts,
    quarantine,
    read_quarantine,
)
from train.parallel.ranks import Ranks
from train.plan.plan import open_order, skip_name
from train.pretrain.levels import Reference, measure_levels, reference_documents
from train.pretrain.setup import TrainingSetup
from train.pretrain.step import Learner
from train.trace.trace import Trace

ORIGIN_FIELDS = {"doc_id", "url", "source", "language", "split", "offset", "length"}


def _trace(setup: TrainingSetup, order: SampleOrder) -> Trace:
    return Trace(setup.dataset, order, setup.settings.train.objective == "causal")


def source_levels_before(setup: TrainingSetup, step: int) -> SourceLevels:
    """Return the mean loss of each source over the last `guard.spike_window` steps before `step`."""
    steps = (record for _, record in metrics_backwards(setup.work.local))
    before = (record for record in steps if record.step < step and not record.skipped)
    return SourceLevels(reversed([*islice(before, setup.settings.guard.spike_window)]))


def measure_documents(
    setup: TrainingSetup, ranks: Ranks, learner: Learner, step: int, rows: Rows
) -> list[SpikeDocument]:
    """Return each document span in the batch of a step with its loss under the current weights, worst first.

    `rows`: the rows of this rank. Call it on all ranks; the result is the same on each. The gradient does not change.
    """
    # This needs its own reader and order: those of the run are used by the prefetch thread. The documents to compare
    # with are in shards that no step may read soon, for which a small cache would have no room.
    batches = setup.open_uncached_batches()
    parts = ranks.on_first(lambda: _trace(setup, batches.order).documents_of_step(step))
    stage = batches.order.stage_of(step - 1)
    sources = ranks.on_first(lambda: source_levels_before(setup, step))
    spans, number = [SpikeDocument.model_validate(part) for part in parts], stage.global_batch
    references = ranks.on_first(lambda: _references(setup, batches, step, spans))
    levels = measure_levels(learner.measure, batches, stage.seq_len, references, sources)
    places = [(part.row, part.piece, part.row_start, part.row_stop) for part in parts]
    groups_BT = batches.groups(step - 1, learner.model.rows_here(number), places)
    tally = learner.measure_groups(rows, groups_BT, len(parts) + 1, number)
    measured = []
    for document, loss, count in zip(spans, tally.losses_S.tolist(), tally.counts_S.tolist(), strict=False):
        targets, level = round(count), levels.of(document.source, document.language)
        if targets:
            own = loss / targets
            values = {"loss": own, "targets": targets, "level": level, "excess": excess_of(own, targets, level)}
            measured.append(document.model_copy(update=values))
        else:
            measured.append(document)
    return sorted(measured, key=lambda document: -document.excess if document.excess is not None else float("inf"))


def _references(setup: TrainingSetup, batches: Batches, step: int, parts: Sequence[SpikeDocument]) -> list[Reference]:
    """Return the reference documents of a batch. Spans are cut from whole rows only, so there are none with them."""
    if setup.settings.train.objective == "span":
        return []
    listed = (document.doc_id for document in read_quarantine(setup.run))
    return reference_documents(batches, setup.dataset, step, parts, listed)


def samples_to_skip(trace: Trace, doc_ids: Iterable[str], samples: Sequence[int], after: int) -> list[int]:
    """Return `samples`, then the samples of the steps after `after` that hold tokens of the documents.

    Raises ContractError if the result has more samples than the steps after `after`.
    """
    skipped, documents = list(samples), [bytes.fromhex(doc_id) for doc_id in doc_ids]
    # Repeated, because the samples that take the place of skipped ones may hold tokens of the documents too.
    while more := trace.skipping(skipped).samples_with(documents, after):
        # Skipping samples of a stage changes which samples later stages use, so each stage is completed first.
        stage = more[0] >> STAGE_BITS
        skipped += [sample for sample in more if sample >> STAGE_BITS == stage]
        if len(skipped) > trace.num_samples(after):
            raise ContractError(
                f"guard.quarantine: expected {len(documents)} quarantined document(s) in a minority of the samples, "
                f"got them in most of the {trace.num_samples(after)} samples after step {after}. Set guard.quarantine "
                "= false, or remove the documents from the dataset with `penstock takedown`."
            )
    return skipped


def skip_quarantined(setup: TrainingSetup, after: int) -> int:
    """Add the samples after step `after` that hold a quarantined document to the skip list; return their number."""
    # The list may come from a killed process or another run, so its samples may not be skipped yet.
    doc_ids = [document.doc_id for document in read_quarantine(setup.run)]
    order = open_order(setup.run, setup.dataset, setup.plan)
    samples = samples_to_skip(_trace(setup, order), doc_ids, [], after) if doc_ids else []
    if samples:
        _write(setup, [], samples, "quarantined documents")
    return len(samples)


def exclude_spike(
    setup: TrainingSetup, step: int, after: int, documents: Sequence[SpikeDocument], rewind: int
) -> Exclusion:
    """Add the samples of the spike in `step` to the skip list, and quarantine its worst documents if that is enabled.

    Call it on one rank. `documents`: the document spans in the batch of `step`. `after`: the step from which training
    resumes. `rewind`: the number of this rewind in the run (1 = first).
    """
    order = open_order(setup.run, setup.dataset, setup.plan)
    samples, listed = order.samples(step - 1).index.tolist(), list[Quarantined]()
    reason = f"spike in step {step}"
    if setup.settings.guard.quarantine:
        losses = merge_parts((part.doc_id, part.source, part.loss, part.targets, part.level) for part in documents)
        listed = _lines(attribute_spike(losses), documents, step, rewind) if losses else []
        # The samples that are used instead of the skipped ones may hold documents that were quarantined earlier.
        doc_ids = [line.doc_id for line in (*read_quarantine(setup.run), *listed)]
        more = samples_to_skip(_trace(setup, order), doc_ids, samples, after)[len(samples) :]
        reason += f", with {len(more)} more samples of quarantined documents" if more else ""
        samples += more
    _write(setup, listed, samples, reason)
    return Exclusion(tuple(samples), tuple(listed))


def _lines(chosen: Attribution, documents: Sequence[SpikeDocument], step: int, rewind: int) -> list[Quarantined]:
    """Return the entries of the quarantine list for the documents that a spike is attributed to."""
    known = {document.doc_id: document for document in documents}
    return [
        Quarantined(
            **known[document.doc_id].model_dump(include=ORIGIN_FIELDS),
            step=step,
            rewind=rewind,
            loss=document.loss,
            targets=document.targets,
            excess=document.excess,
            limit=chosen.limit,
            why=chosen.why,
        )
        for document in chosen.documents_blamed
    ]


def _write(setup: TrainingSetup, listed: Sequence[Quarantined], samples: list[int], reason: str) -> None:
    name = skip_name(setup.settings)
    try:
        if listed:
            quarantine(setup.run, listed)
        # If the process is killed before this, the next start applies the quarantine list.
        append_to_skip_list(setup.run, name, samples, reason)
    except OSError as error:
        raise ContractError(
            f"{setup.run.uri}/train/{name}: expected disk space to add {len(samples)} samples ({reason}), got the "
            f"error: {error}. Free disk space and start the run again."
        ) from error
