"""The step `audit`: samples of documents are chosen, read from their parts, and compared pair by pair in one task.

Each part proposes documents for the samples, and the driver chooses among them. Only samples are shuffled:
`audit.documents` bounds the data on the driver and in that task, for a run of any size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

from pipeline.dedup.audit.estimate import (
    DIGITS,
    FLOOR,
    AuditSample,
    Pairs,
    PairTally,
    RecallBySource,
    Rows,
    all_pairs,
    bin_edges,
    concatenate_pairs,
    estimates,
    jaccard_of,
    jaccard_with_numbers,
    precision_by_source,
    read_sample,
    share_a_key,
    simple_share,
)
from pipeline.dedup.audit.losses import ALARM, Loss, largest_losses
from pipeline.dedup.audit.sample import (
    ANCHORED,
    JOINED,
    PROPOSALS_DDL,
    REMOVED,
    SAMPLED,
    SAMPLED_DDL,
    UNIFORM,
    AuditSamples,
    ProposeTask,
    TextsTask,
    choose,
    propose,
    read_sampled,
)
from pipeline.dedup.config import DEDUP, EXACT, NEAR, AuditConfig, DedupConfig
from pipeline.dedup.keep_order import order_columns
from pipeline.dedup.keys import layout
from pipeline.engine.parquet import parts_of
from pipeline.engine.part import PartOutput, PartResult, PartTarget, TableTarget, write_part
from pipeline.engine.progress import doing
from pipeline.engine.results import results_of_one
from pipeline.engine.spark import dataframe_from_tasks, persist_on_disk, run_partitions
from pipeline.engine.stage import Row
from pipeline.engine.step import BY_SOURCE, StepContext, TableResult, combine_parts
from pipeline.minhash.permutations import mix_bits
from pipeline.minhash.stage import SignatureConfig
from schemas.config import Recipe
from schemas.manifest import Counts
from schemas.storage import Store
from schemas.tables import AUDIT

# The comparison of the sampled documents in one task: figures for the manifest, and the pairs they are based on.
#
# Precision is the share of joined pairs that are at least as similar as `min_jaccard`; recall is the share of all such
# pairs that are joined. A pair of documents shares an anchor with probability s, so its weight is 1/s (Horvitz and
# Thompson 1952). Rows are sorted by doc_id and summed in one task, so the figures are the same at any partitioning.

OF_SOURCES = ("a_source", "b_source", "a_first")
"""Columns of the table `audit` that only runs with several sources have."""
MAX_LISTED = 50_000
"""Most pairs that the table lists for one sample. If the sample has more, those with the lowest hashes are listed."""


@dataclass(frozen=True)
class ExamineTask:
    """Input of `examine`: the sampled documents, settings, and the folder of the table `audit`."""

    chosen: AuditSamples
    audit: AuditConfig
    dedup: DedupConfig
    signature: SignatureConfig
    folder: Store
    has_several_sources: bool = False
    losses: Sequence[Loss] = ()
    """Sources and domains that lost a large share of their documents."""

    @property
    def schema(self) -> pa.Schema:
        """Return the columns of the table `audit`; those of sources are left out if there is one source."""
        return AUDIT if self.has_several_sources else pa.schema([each for each in AUDIT if each.name not in OF_SOURCES])

    @property
    def limit(self) -> float:
        """Return the minimum similarity of the pairs of which recall by source is measured."""
        return max(self.min_jaccard, FLOOR)

    @property
    def min_jaccard(self) -> float:
        """Return the minimum true Jaccard similarity at which two documents should be joined."""
        return self.dedup.min_similarity if self.audit.min_jaccard is None else self.audit.min_jaccard

    @property
    def layout(self) -> tuple[int, int] | None:
        """Return the numbers of bands and rows of a MinHash signature; None for SimHash, which has no bands."""
        return None if self.signature.family == "simhash" else layout(self.dedup, self.signature)


@dataclass
class ListedPairs:
    """The pairs of one sample that the table `audit` lists: at most MAX_LISTED."""

    kind: str
    pairs: Pairs

    def add(self, sample: AuditSample, pairs: Pairs) -> None:
        """Add pairs. If there are then more than MAX_LISTED, keep those with the lowest hashes."""
        self.pairs = concatenate_pairs([self.pairs, pairs])
        if len(self.pairs.a) > MAX_LISTED:
            a, b = self.pairs.a, self.pairs.b
            heads = np.frombuffer(b"".join(doc[:8] for doc in sample.docs), "<u8")
            keys = mix_bits(mix_bits(heads[a]) * np.uint64(3) ^ heads[b])
            self.pairs = self.pairs.take(np.lexsort((b, a, keys))[:MAX_LISTED])


def examine(task: ExamineTask, batches: Iterator[pa.RecordBatch]) -> PartResult:
    """Write the table `audit` from all sampled documents, `batches` (SAMPLED); measure precision and recall."""

    def fill(output: PartOutput) -> None:
        sample = read_sample(pa.Table.from_batches(batches, SAMPLED), task.signature)
        listed: list[ListedPairs] = []
        output.figures |= {
            "min_jaccard": task.min_jaccard,
            "bands_rows": None if task.layout is None else list(task.layout),
            "not_compared": {"without_text": len(sample.without_text), "too_long": len(sample.too_long)},
            "precision": precision(task, sample, listed),
            "losses": losses_figures(task, sample, listed),
            "recall": {UNIFORM: recall_uniform(task, sample, listed), ANCHORED: recall_anchored(task, sample, listed)},
        }
        rows = 0
        for pairs in listed:
            for row in rows_of(task, sample, pairs):
                output.write(row)
                rows += 1
        output.counts = Counts(rows_in=rows, rows_kept=rows)

    return write_part(PartTarget(0, {"audit": TableTarget(task.folder, task.schema)}), fill)


def precision(task: ExamineTask, sample: AuditSample, listed: list[ListedPairs]) -> dict[str, Any]:
    """Return precision, as figures of the manifest, and append the compared pairs to `listed`.

    Each sampled joined document is compared with the document that it matched (JOINED). Each sampled document that was
    dropped as a copy is compared with the document that is kept in its place (REMOVED). Both are simple random samples
    without replacement: the documents with the lowest hashes of doc_id.
    """
    chosen = task.chosen
    excluded = sample.without_text | sample.too_long
    figures: dict[str, Any] = {}
    for kind, sampled, every in (
        (JOINED, chosen.joined, chosen.every_joined),
        (REMOVED, chosen.removed, chosen.every_removed),
    ):
        here = [pair for pair in sampled if pair[0] in sample.row and pair[1] in sample.row]
        missing = [pair for pair in sampled if pair[0] in excluded or pair[1] in excluded]
        ends = np.array([sorted((sample.row[a], sample.row[b])) for a, b in here], np.int64).reshape(-1, 2)
        a, b = ends[:, 0], ends[:, 1]
        pairs = Pairs(a, b, jaccard_of(sample, a, b))
        hits, near = pairs.jaccard >= task.min_jaccard, sample.digest[a] != sample.digest[b]
        is_all = every and len(here) == len(sampled)
        by_source = precision_by_source(sample, pairs, hits, is_all)
        steps = np.floor(np.minimum(pairs.jaccard * 20 + 1e-9, 20)).astype(int)
        figures[kind] = {
            "documents": len(sampled),
            "all": simple_share(int(hits.sum()), len(a), is_all).to_json(),
            "near": simple_share(int(hits[near].sum()), int(near.sum()), is_all).to_json(),
            "not_compared": len(missing),
            "earlier_snapshots": len(sampled) - len(here) - len(missing),
            "jaccard": {f"{step / 20:.2f}": int(count) for step, count in enumerate(np.bincount(steps)) if count},
            **({BY_SOURCE: by_source} if task.has_several_sources else {}),
        }
        if kind == REMOVED:
            numbered = hits[near] & (jaccard_with_numbers(sample, a[near], b[near]) >= task.min_jaccard)
            for name, right in (("false_positives", hits[near]), ("false_positives_with_numbers", numbered)):
                figures[kind][name] = simple_share(int((~right).sum()), len(right), is_all).to_json()
        listed.append(ListedPairs(kind, pairs))
    return figures


def losses_figures(task: ExamineTask, sample: AuditSample, listed: list[ListedPairs]) -> list[dict[str, Any]]:
    """Return the losses of sources and domains as figures of the manifest, and append their pairs to `listed`.

    The similarity of a pair is null if a text is missing or too long, or if the copy that is kept is of an earlier
    snapshot.
    """
    shown = sorted({pair for loss in task.losses for pair in loss.pairs})
    here = [pair for pair in shown if pair[0] in sample.row and pair[1] in sample.row]
    a, b = np.array([sorted(sample.row[doc] for doc in pair) for pair in here], np.int64).reshape(-1, 2).T
    pairs = Pairs(a, b, jaccard_of(sample, a, b))
    listed.append(ListedPairs(ALARM, pairs))
    similarities = {pair: round(value, DIGITS) for pair, value in zip(here, pairs.jaccard.tolist())}
    return [
        {
            "kind": loss.kind,
            "name": loss.name,
            "documents": loss.documents,
            "removed": loss.removed,
            "pairs": [
                {"removed": pair[0].hex(), "kept": pair[1].hex(), "jaccard": similarities.get(pair)}
                for pair in loss.pairs
            ],
        }
        for loss in task.losses
    ]


def recall_uniform(task: ExamineTask, sample: AuditSample, listed: list[ListedPairs]) -> dict[str, Any]:
    """Return recall over all pairs of uniformly drawn documents; append at most MAX_LISTED of these pairs to `listed`.

    The estimate is unbiased, but in a large run few of these pairs are copies.
    """
    rows = np.array(sorted(sample.row[doc] for doc in task.chosen.uniform if doc in sample.row), np.int64)
    tally = PairTally(np.arange(len(sample.docs)), bin_edges(task.min_jaccard), task.layout)
    kept = ListedPairs(UNIFORM, concatenate_pairs([]))
    sources = RecallBySource(sample, np.arange(len(sample.docs)), task.limit)
    for pairs in all_pairs(sample, rows):
        weights = np.ones(len(pairs.a))
        tally.add(pairs, weights, share_a_key(sample, pairs.a, pairs.b), _joined(sample, pairs))
        sources.add(pairs, weights, _joined(sample, pairs))
        kept.add(sample, pairs)
    listed.append(kept)
    is_all = task.chosen.every_document and len(rows) == len(task.chosen.uniform)
    return {"documents": len(rows), "is_all": is_all, **_figures_of(task, (tally, sources), is_all)}


def recall_anchored(task: ExamineTask, sample: AuditSample, listed: list[ListedPairs]) -> dict[str, Any]:
    """Return recall over pairs of documents with an equal anchor; append at most MAX_LISTED of these pairs to `listed`.

    Similar documents often have an equal anchor, so even a large run has many such pairs.
    """
    groups: Rows = np.arange(len(sample.docs))
    here = [
        np.array(sorted(sample.row[doc] for doc in group if doc in sample.row), np.int64)
        for group in task.chosen.anchored
    ]
    for rows in here:
        groups[rows] = rows[:1].sum()
    tally = PairTally(groups, bin_edges(task.min_jaccard), task.layout)
    pairs = concatenate_pairs([block for rows in here for block in all_pairs(sample, rows)])
    tally.add(pairs, 1 / pairs.jaccard, share_a_key(sample, pairs.a, pairs.b), _joined(sample, pairs))
    sources = RecallBySource(sample, groups, task.limit)
    sources.add(pairs, 1 / pairs.jaccard, _joined(sample, pairs))
    kept = ListedPairs(ANCHORED, concatenate_pairs([]))
    kept.add(sample, pairs)
    listed.append(kept)
    return {
        "documents": sum(len(rows) for rows in here),
        "groups": len(here),
        "capped_groups": len(task.chosen.capped),
        "left_out": sum(total - task.audit.group for total in task.chosen.capped),
        **_figures_of(task, (tally, sources), False),
    }


def _joined(sample: AuditSample, pairs: Pairs) -> npt.NDArray[np.bool_]:
    joined: npt.NDArray[np.bool_] = sample.cluster[pairs.a] == sample.cluster[pairs.b]
    return joined


def _figures_of(task: ExamineTask, sums: tuple[PairTally, RecallBySource], is_all: bool) -> dict[str, Any]:
    tally, sources = sums
    return {
        "pairs": tally.pairs_from(0.0),
        "copies": tally.pairs_from(task.min_jaccard),
        "by_jaccard": tally.recall(task.min_jaccard, is_all),
        "curve": tally.curve(is_all),
        **({BY_SOURCE: sources.figures(is_all)} if task.has_several_sources else {}),
    }


def rows_of(task: ExamineTask, sample: AuditSample, listed: ListedPairs) -> Iterator[Row]:
    """Yield the rows of the table `audit` for the listed pairs, sorted, each pair once."""
    pairs = listed.pairs.take(np.unique(np.stack([listed.pairs.a, listed.pairs.b]), axis=1, return_index=True)[1])
    a, b = pairs.a, pairs.b
    estimated = estimates(sample, a, b, task.signature.family == "simhash")
    columns = (a, b, pairs.jaccard, estimated, share_a_key(sample, a, b), _joined(sample, pairs))
    for first, second, true, estimate, candidate, together in zip(*(column.tolist() for column in columns)):
        row = {
            "sample": listed.kind,
            "a": sample.docs[first],
            "b": sample.docs[second],
            "jaccard": true,
            "estimate": estimate,
            "candidate": candidate,
            "same_cluster": together,
            "weight": 1 / true if listed.kind == ANCHORED else 1.0,
        }
        if task.has_several_sources:
            row["a_source"], row["b_source"] = (sample.sources[sample.source[place]] for place in (first, second))
            row["a_first"] = bool(sample.place[first] < sample.place[second])
        yield row


def audit_inputs(recipe: Recipe) -> tuple[str, ...]:
    """Return the further tables that the audit reads: `scores`, if the keep order of several sources needs it."""
    needed = order_columns(recipe.section("dedup", DedupConfig)).keys() if recipe.has_several_sources else ()
    return tuple(name for name in needed if name != "documents")


def build_audit(build: StepContext) -> dict[str, TableResult]:
    """Build the table `audit`: one part with the compared pairs. Its manifest has the measured precision and recall."""
    audit, dedup = build.recipe.section("audit", AuditConfig), build.recipe.section("dedup", DedupConfig)
    signature = build.recipe.section("signature", SignatureConfig)
    parts = parts_of(build.inputs)
    clusters = build.inputs["clusters"].manifest.content
    dropped = build.inputs["dedup"].manifest.content.counts.dropped
    removed = sum(dropped[f"{DEDUP.name}/{rule}"] for rule in (EXACT, NEAR))
    sizes = clusters.counts.rows_in, int(clusters.figures["joined_documents"]), removed
    tasks = [ProposeTask(part, audit, dedup, *sizes) for part in parts]
    proposals = persist_on_disk(dataframe_from_tasks(build.spark, propose, tasks, PROPOSALS_DDL))
    doing("draw samples")
    chosen = choose(lowest_proposals(proposals, audit), audit, *sizes)
    proposals.unpersist()
    losses = largest_losses(build.spark, parts, audit)
    shown = {doc for loss in losses for pair in loss.pairs for doc in pair}
    documents, several = sorted({*chosen.wanted(), *shown}), build.recipe.has_several_sources
    pairs = frozenset(doc for row in chosen.removed for doc in row)
    fetches = [
        TextsTask(part, documents, dedup, own.recipe.section("signature", SignatureConfig), several, pairs)
        for part, own in build.by_part(parts)
    ]
    texts = dataframe_from_tasks(build.spark, read_sampled, fetches, SAMPLED_DDL)
    task = ExamineTask(chosen, audit, dedup, signature, build.folders["audit"], several, losses)
    one = texts.repartitionById(1, F.lit(0))
    answers = run_partitions(one, lambda number, batches: examine(task, batches).to_json(), "compare the samples")
    return combine_parts(results_of_one(PartResult.from_json(answers[0])), ("audit",))


def lowest_proposals(proposals: DataFrame, audit: AuditConfig) -> Any:
    """Return the proposals from which `choose` selects the samples, as an Arrow table (PROPOSALS).

    The samples `joined`, `removed` and `uniform` have at most `audit.documents` rows each, and `anchored` at most
    `audit.group` more. In `anchored`, `count` is the number of the group's documents in the whole run.
    """
    of_anchor = proposals.where(F.col("sample") == ANCHORED)
    group = Window.partitionBy("group")
    ranked = of_anchor.withColumns(
        {"count": F.sum("count").over(group), "place": F.row_number().over(group.orderBy("key", "doc"))}
    )
    chosen = ranked.where((F.col("count") > 1) & (F.col("place") <= audit.group)).drop("place")
    chosen = chosen.orderBy("rank", "group", "key", "doc").limit(audit.documents + audit.group)
    for sample in (JOINED, REMOVED, UNIFORM):
        sampled_rows = proposals.where(F.col("sample") == sample).orderBy("key", "doc").limit(audit.documents)
        chosen = chosen.union(sampled_rows)
    table: pa.Table = chosen.toArrow()
    return table
