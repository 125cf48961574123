"""What a run consumed: the tokens of each document that the steps up to the newest checkpoint read, summed by property.

Nothing is iterated by step. The samples of a source are the first positions of its order, so the spans of a shard that
they read are computed from the order, and the documents of the shard are cut by them. One index file of a shard is in
memory at a time; sums by domain are written to disk when they are many.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from schemas.checkpoints import METADATA_NAME
from schemas.consumption import CheckpointTraining, Consumption
from schemas.errors import ContractError, reading
from schemas.storage import Store
from schemas.takedown import REMOVED_ID
from schemas.tokens import TRAIN, Dataset
from train.checkpoint.folder import CheckpointMetadata, list_checkpoints, open_trained_order
from train.data.document_index import read_table
from train.data.order import SampleOrder
from train.data.permutation import Ints
from train.data.stages import STAGE_BITS, SkipList, StagePlan
from train.dataset_history import digests_at_same_positions
from train.model.shape import num_parameters, shape_in
from train.plan.plan import stored_plan

COLUMNS = ("doc_id", "source", "domain", "language", "date", "token_offset", "num_tokens")


@dataclass(frozen=True)
class Spans:
    """Spans of a stream, with the number of times that each was read; spans may overlap."""

    start: Ints
    """Position in the stream of the first token of each span."""
    length: Ints
    """Number of tokens of each span."""
    times: Ints
    """Number of times; -1 for a skipped sample, whose tokens other spans count."""

    def tokens_between(self, begin: Ints, end: Ints) -> Ints:
        """Return, for each range [begin, end) of positions, the sum over its tokens of the times that each was read."""
        return self._tokens_before(end) - self._tokens_before(begin)

    def _tokens_before(self, position: Ints) -> Ints:
        """Return the sum for all tokens before each position."""
        total = np.zeros(len(position), np.int64)
        for edge, sign in ((self.start, 1), (self.start + self.length, -1)):
            # sum over edges e before x of times · (x - e): two prefix sums
            by_place = np.argsort(edge, kind="stable")
            number = np.searchsorted(edge[by_place], position)
            times = np.concatenate([[0], np.cumsum(self.times[by_place])])
            weighted = np.concatenate([[0], np.cumsum(self.times[by_place] * edge[by_place])])
            total += sign * (times[number] * position - weighted[number])
        return total

    def plus(self, other: "Spans") -> "Spans":
        """Return the spans of both."""
        pairs = ((self.start, other.start), (self.length, other.length), (self.times, other.times))
        return Spans(*(np.concatenate(pair) for pair in pairs))


def consumption_of(run: Store, dataset: Dataset, step: int | None = None) -> Consumption:
    """Return what a checkpoint of a run has read of its dataset; `step`: its step, None = the newest.

    Without a checkpoint, each document of the training streams counts once. Raises ContractError if the checkpoint
    was trained on another dataset, or with another order than the plan of the run has, or if there is none of `step`.
    """
    consumed, order = _open(run, dataset, step)
    count_tokens(consumed, dataset, order)
    return consumed


def count_tokens(consumed: Consumption, dataset: Dataset, order: SampleOrder | None) -> None:
    """Add what the samples of an order read; None: each training document once."""
    skipped = {} if order is None else _skipped(order)
    for stream in sorted(dataset.streams):
        source, _, split = stream.rpartition("/")
        if split != TRAIN or (order is not None and source not in order.sources):
            continue
        begin = 0
        for shard in dataset.streams[stream]:
            end = begin + shard.num_tokens
            table = read_table(dataset.folder, shard.docs_path, COLUMNS)
            spans = _whole(shard.num_tokens) if order is None else read_spans(order, source, begin, end)
            if source in skipped:
                spans = spans.plus(_inside(skipped[source], begin, end))
            _add(consumed, table, spans)
            begin = end
    if order is None:  # no step has read what was removed
        consumed.removed = 0


def _open(run: Store, dataset: Dataset, step: int | None) -> tuple[Consumption, SampleOrder | None]:
    """Return a consumption without tokens, and the order up to a checkpoint; None without one."""
    checkpoints = list_checkpoints(run)
    chosen = next((own for own in reversed(checkpoints) if step in (None, own.step)), None)
    if chosen is None:
        if step is not None:
            steps = ", ".join(str(own.step) for own in checkpoints) or "none"
            raise ContractError(
                f"{run.uri}: expected a checkpoint of step {step}, got checkpoints of steps {steps}. Correct --step."
            )
        return Consumption(None, dataset.digest), None
    plan = stored_plan(run)
    if plan is None or plan.dataset not in digests_at_same_positions(dataset):
        raise ContractError(
            f"{run.uri}: expected a plan for dataset {dataset.digest[:12]}, on which {chosen.name} was trained, got "
            f"{'none' if plan is None else f'one for {plan.dataset[:12]}'}. Name the dataset of the plan as RUN@digest."
        )
    order = open_trained_order(run, dataset, plan.model_copy(update={"dataset": dataset.digest}))
    sha256 = run.sha256(f"{chosen.name}/checkpoint.json")
    consumed = Consumption(chosen.step, dataset.digest, order.digest, sha256, training_of(chosen))
    return consumed, order_until(order, chosen.step)


def training_of(checkpoint: CheckpointMetadata) -> CheckpointTraining:
    """Return how a checkpoint was trained. Raises ContractError if its metadata has no valid shape or stages."""
    settings, layout = checkpoint.identity.settings, checkpoint.layout
    prefix = "shape."
    shape = {name.removeprefix(prefix): value for name, value in settings.items() if name.startswith(prefix)}
    with reading(f"{checkpoint.name}/{METADATA_NAME}", "a model shape and stages that this version knows"):
        num_params = num_parameters(shape_in(settings))
        for stage in settings.get("train.stages", ()):
            StagePlan.model_validate(stage)
    return CheckpointTraining(
        shape,
        num_params,
        {name: value for name, value in settings.items() if not name.startswith(prefix)},
        {"device": layout.device, "ranks": layout.ranks, "kernels": layout.kernels},
        checkpoint.progress.heldout,
        {name: file.sha256 for name, file in checkpoint.files.items()},
        checkpoint.identity.code_version,
    )


def order_until(order: SampleOrder, step: int) -> SampleOrder:
    """Return the order of the samples of the first `step` steps (at least 1)."""
    stages = [
        stage.model_copy(update={"num_steps": min(stage.num_steps, step - stage.first_step)})
        for stage in order.stages
        if stage.first_step < step
    ]
    skip = SkipList(tuple(index for index in order.skip.indices if index >> STAGE_BITS < len(stages)))
    return SampleOrder(dict(zip(order.sources, order.streams, strict=True)), stages, skip, order.seed)


def read_spans(order: SampleOrder, source: str, begin: int, end: int) -> Spans:
    """Return the spans in [begin, end) of a source's stream that the samples of an order read as inputs.

    Skipped samples count too: `SampleOrder.skipped` has them.
    """
    stream = order.streams[order.sources.index(source)]
    full, rest = divmod(order.end_of(source), stream.num_units)
    parts = [(full - 1, stream.num_units, full)] if full else []
    parts += [(full, rest, 1)] if rest else []
    spans = _whole(0)
    for epoch, units, times in parts:
        start, length = stream.read_before(epoch, units, begin, end)
        spans = spans.plus(Spans(start - begin, length, np.full(len(start), times, np.int64)))
    return spans


def _whole(num_tokens: int) -> Spans:
    """Return one span over a shard, read once; none for an empty shard."""
    one = np.ones(min(num_tokens, 1), np.int64)
    return Spans(one - 1, one * num_tokens, one)


def _skipped(order: SampleOrder) -> dict[str, Spans]:
    """Return the spans of skipped samples by source, as positions in the streams, each -1 times."""
    found: dict[str, Spans] = {}
    for samples in order.skipped():
        pieces = samples.pieces
        for number in np.unique(samples.source).tolist():
            own = samples.source[pieces.row] == number
            spans = Spans(pieces.start[own], pieces.length[own], np.full(int(own.sum()), -1, np.int64))
            source = order.sources[number]
            found[source] = found[source].plus(spans) if source in found else spans
    return found


def _inside(spans: Spans, begin: int, end: int) -> Spans:
    """Return the parts of spans in [begin, end), as positions from `begin`."""
    start = np.maximum(spans.start, begin)
    length = np.minimum(spans.start + spans.length, end) - start
    some = length > 0
    return Spans(start[some] - begin, length[some], spans.times[some])


def _add(consumed: Consumption, table: pa.Table, spans: Spans) -> None:
    """Add the documents of a shard's index, of which `spans` were read."""
    offset, number = (table.column(name).to_numpy().astype(np.int64) for name in ("token_offset", "num_tokens"))
    tokens = pa.array(spans.tokens_between(offset, offset + number))
    is_removed = pc.equal(table.column("doc_id"), pa.scalar(REMOVED_ID, table.column("doc_id").type))
    month = pc.strftime(pc.cast(table.column("date"), pa.timestamp("ms")), format="%Y-%m")
    rows = pa.table(
        {
            "source": table.column("source"),
            "domain": table.column("domain"),
            "language": table.column("language"),
            "month": month,
            "tokens": tokens,
            "is_removed": is_removed,
        }
    )
    rows = rows.filter(pc.greater(rows.column("tokens"), 0))
    consumed.removed += pc.sum(rows.filter(rows.column("is_removed")).column("tokens")).as_py() or 0
    rows = rows.filter(pc.invert(rows.column("is_removed")))
    domains = rows.select(["source", "domain", "tokens"])
    consumed.domains.add(domains.rename_columns(["source", "value", "tokens"]))
    for counts, name in ((consumed.languages, "language"), (consumed.months, "month")):
        counts.update(Counter(dict(_sums(rows, name))))
    for row in pc.value_counts(rows.column("source")).to_pylist():
        consumed.documents[row["values"]] += row["counts"]


def _sums(rows: pa.Table, name: str) -> Iterator[tuple[tuple[str, str], int]]:
    grouped = rows.group_by(["source", name]).aggregate([("tokens", "sum")])
    for row in grouped.to_pylist():
        yield (row["source"] or "", row[name] or ""), row["tokens_sum"]
