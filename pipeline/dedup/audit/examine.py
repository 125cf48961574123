"""The audit itself, in one task over the samples: figures for the manifest, and the pairs they rest on.

Precision: of the pairs that deduplication joined, how many are as similar as it promises. Recall: of all pairs that
are, how many it joined; a pair of documents with one anchor was met with probability s, so it weighs 1/s (Horvitz and
Thompson 1952). Rows are sorted by doc_id and summed in one place, so the figures are the same at any partitioning.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from pipeline.dedup.audit.config import AuditConfig
from pipeline.dedup.audit.estimate import PairTally, bin_edges, simple_share
from pipeline.dedup.audit.pairs import (
    AuditSample,
    Pairs,
    Rows,
    all_pairs,
    concatenate_pairs,
    estimates,
    jaccard_of,
    read_sample,
    share_a_key,
)
from pipeline.dedup.audit.sample import ANCHORED, JOINED, SAMPLED, UNIFORM, AuditSamples
from pipeline.dedup.config import DedupConfig
from pipeline.dedup.keys import layout
from pipeline.engine.part import PartOutput, PartResult, PartTarget, TableTarget, write_part
from pipeline.engine.stage import Row
from pipeline.minhash.fast import mix_bits
from pipeline.minhash.stage import SignatureConfig
from schemas.manifest import Counts
from schemas.storage import Store
from schemas.tables import AUDIT

MAX_LISTED = 50_000
"""Pairs of a sample that are listed; of more, those with the lowest hashes."""
CLUSTER = "cluster"
"""The sample of joined documents, each with the first document of its cluster: what joining step by step led to."""


@dataclass(frozen=True)
class ExamineTask:
    """The samples, how deduplication ran, and where the pairs go."""

    chosen: AuditSamples
    audit: AuditConfig
    dedup: DedupConfig
    signature: SignatureConfig
    folder: Store

    @property
    def min_jaccard(self) -> float:
        """Least true similarity of a pair that should be joined."""
        return self.dedup.min_similarity if self.audit.min_jaccard is None else self.audit.min_jaccard

    @property
    def layout(self) -> tuple[int, int] | None:
        """Bands and rows; None for SimHash, whose curve has another form."""
        return None if self.signature.family == "simhash" else layout(self.dedup, self.signature)


@dataclass
class ListedPairs:
    """The pairs of one sample with the lowest hashes."""

    kind: str
    pairs: Pairs

    def add(self, sample: AuditSample, found: Pairs) -> None:
        """Take pairs in, and forget those of the highest hashes where there are too many."""
        self.pairs = concatenate_pairs([self.pairs, found])
        if len(self.pairs.a) > MAX_LISTED:
            a, b = self.pairs.a, self.pairs.b
            heads = np.frombuffer(b"".join(doc[:8] for doc in sample.docs), "<u8")
            keys = mix_bits(mix_bits(heads[a]) * np.uint64(3) ^ heads[b])
            self.pairs = self.pairs.take(np.lexsort((b, a, keys))[:MAX_LISTED])


def examine(task: ExamineTask, batches: Iterator[pa.RecordBatch]) -> PartResult:
    """Write the table from the rows SAMPLED of every wanted document; its figures are those of the manifest."""

    def fill(output: PartOutput) -> None:
        sample = read_sample(pa.Table.from_batches(batches, SAMPLED), task.signature)
        listed: list[ListedPairs] = []
        output.figures |= {
            "min_jaccard": task.min_jaccard,
            "bands_rows": None if task.layout is None else list(task.layout),
            "not_compared": {"without_text": len(sample.without_text), "too_long": len(sample.too_long)},
            "precision": precision(task, sample, listed),
            "recall": {UNIFORM: recall_uniform(task, sample, listed), ANCHORED: recall_anchored(task, sample, listed)},
        }
        rows = 0
        for found in listed:
            for row in rows_of(task, sample, found):
                output.write(row)
                rows += 1
        output.counts = Counts(rows_in=rows, rows_kept=rows)

    return write_part(PartTarget(0, {"audit": TableTarget(task.folder, AUDIT)}), fill)


def precision(task: ExamineTask, sample: AuditSample, listed: list[ListedPairs]) -> dict[str, Any]:
    """How similar the joined documents are to the one they were joined with, and to the first of their cluster."""
    chosen = task.chosen
    gone = sample.without_text | sample.too_long
    found: dict[str, Any] = {"documents": len(chosen.joined)}
    for kind, place in ((JOINED, 1), (CLUSTER, 2)):
        wanted = [(row[0], row[place]) for row in chosen.joined if row[0] != row[place]]
        here = [pair for pair in wanted if pair[0] in sample.row and pair[1] in sample.row]
        missing = [pair for pair in wanted if pair[0] in gone or pair[1] in gone]
        ends = np.array([sorted((sample.row[a], sample.row[b])) for a, b in here], np.int64).reshape(-1, 2)
        a, b = ends[:, 0], ends[:, 1]
        pairs = Pairs(a, b, jaccard_of(sample, a, b))
        hits, near = pairs.jaccard >= task.min_jaccard, sample.digest[a] != sample.digest[b]
        is_all = chosen.every_joined and len(here) == len(wanted)
        steps = np.floor(np.minimum(pairs.jaccard * 20 + 1e-9, 20)).astype(int)
        found[kind] = {
            "all": simple_share(int(hits.sum()), len(a), is_all).to_json(),
            "near": simple_share(int(hits[near].sum()), int(near.sum()), is_all).to_json(),
            "not_compared": len(missing),
            "earlier_snapshots": len(wanted) - len(here) - len(missing),
            "jaccard": {f"{step / 20:.2f}": int(count) for step, count in enumerate(np.bincount(steps)) if count},
        }
        listed.append(ListedPairs(kind, pairs))
    return found


def recall_uniform(task: ExamineTask, sample: AuditSample, listed: list[ListedPairs]) -> dict[str, Any]:
    """Recall on all pairs of documents that were drawn alike: without bias, but with few pairs in a large run."""
    rows = np.array(sorted(sample.row[doc] for doc in task.chosen.uniform if doc in sample.row), np.int64)
    tally = PairTally(np.arange(len(sample.docs)), bin_edges(task.min_jaccard), task.layout)
    kept = ListedPairs(UNIFORM, concatenate_pairs([]))
    for pairs in all_pairs(sample, rows):
        tally.add(pairs, np.ones(len(pairs.a)), share_a_key(sample, pairs.a, pairs.b), _joined(sample, pairs))
        kept.add(sample, pairs)
    listed.append(kept)
    is_all = task.chosen.every_document and len(rows) == len(task.chosen.uniform)
    return {"documents": len(rows), "is_all": is_all, **_said(task, tally, is_all)}


def recall_anchored(task: ExamineTask, sample: AuditSample, listed: list[ListedPairs]) -> dict[str, Any]:
    """Recall on the pairs that a second hash family finds: many pairs in a run of any size."""
    groups: Rows = np.arange(len(sample.docs))
    here = [
        np.array(sorted(sample.row[doc] for doc in group if doc in sample.row), np.int64)
        for group in task.chosen.anchored
    ]
    for rows in here:
        groups[rows] = rows[:1].sum()
    tally = PairTally(groups, bin_edges(task.min_jaccard), task.layout)
    found = [pairs for rows in here for pairs in all_pairs(sample, rows)]
    pairs = concatenate_pairs(found)
    tally.add(pairs, 1 / pairs.jaccard, share_a_key(sample, pairs.a, pairs.b), _joined(sample, pairs))
    kept = ListedPairs(ANCHORED, concatenate_pairs([]))
    kept.add(sample, pairs)
    listed.append(kept)
    return {
        "documents": sum(len(rows) for rows in here),
        "groups": len(here),
        "capped_groups": len(task.chosen.capped),
        "left_out": sum(total - task.audit.group for total in task.chosen.capped),
        **_said(task, tally, False),
    }


def _joined(sample: AuditSample, pairs: Pairs) -> npt.NDArray[np.bool_]:
    found: npt.NDArray[np.bool_] = sample.cluster[pairs.a] == sample.cluster[pairs.b]
    return found


def _said(task: ExamineTask, tally: PairTally, is_all: bool) -> dict[str, Any]:
    return {
        "pairs": tally.pairs_from(0.0),
        "copies": tally.pairs_from(task.min_jaccard),
        "by_jaccard": tally.recall(task.min_jaccard, is_all),
        "curve": tally.curve(is_all),
    }


def rows_of(task: ExamineTask, sample: AuditSample, listed: ListedPairs) -> Iterator[Row]:
    """The rows AUDIT of the listed pairs, sorted, each pair once."""
    pairs = listed.pairs.take(np.unique(np.stack([listed.pairs.a, listed.pairs.b]), axis=1, return_index=True)[1])
    a, b = pairs.a, pairs.b
    estimated = estimates(sample, a, b, task.signature.family == "simhash")
    columns = (a, b, pairs.jaccard, estimated, share_a_key(sample, a, b), _joined(sample, pairs))
    for one, other, true, estimate, candidate, together in zip(*(column.tolist() for column in columns)):
        yield {
            "sample": listed.kind,
            "a": sample.docs[one],
            "b": sample.docs[other],
            "jaccard": true,
            "estimate": estimate,
            "candidate": candidate,
            "same_cluster": together,
            "weight": 1 / true if listed.kind == ANCHORED else 1.0,
        }
