"""Counts for the bias audit: how many documents of each group reached a filter, and how many of them it dropped.

A filter is a rule, `stage/rule`, or a whole stage that has several. Documents are counted by stratum: documents of
different strata are not compared. A document whose groups were not measured is not counted.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.bias.stage import GROUPS

COUNTS = "groups"
"""Figure of the counts of a part, and of the table `documents`."""
REACHED, DROPPED = "reached", "dropped"
EVERYONE = "*"
"""Name under which all documents are counted."""
COLUMNS = (GROUPS, "source", "language", "num_chars")
"""Columns of `documents` by which documents are counted."""
LENGTHS = (500, 1_000, 2_000, 4_000, 8_000, 16_000)
"""Lengths of texts [code points] at which a class begins: long texts have more terms and other drop rates."""
UNKNOWN = "?"
DECLARED = frozenset(
    (
        *(
            "ar",
            "bg",
            "cs",
            "da",
            "de",
            "el",
            "en",
            "es",
            "et",
            "fa",
            "fi",
            "fr",
            "he",
            "hi",
            "hr",
            "hu",
            "id",
            "it",
            "ja",
        ),
        *("ko", "lt", "lv", "nl", "no", "pl", "pt", "ro", "ru", "sk", "sl", "sr", "sv", "th", "tr", "uk", "vi", "zh"),
    )
)
"""Languages that are strata if a page declares them. A page declares what it likes, so that others are not counted."""
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Filter:
    """Which documents of a batch reached a filter, and which of these it drops; both have the shape (documents,)."""

    name: str
    """`stage/rule`, or `stage`."""
    reached: Mask
    dropped: Mask


def stage_of(name: str) -> str:
    """Return the stage of a filter."""
    return name.partition("/")[0]


def stratum_of(source: str, language: str | None, num_chars: int | None) -> str:
    """Return the name of the stratum of a document: its source, language, and class of lengths."""
    return f"{source} {language or UNKNOWN} {sum((num_chars or 0) >= length for length in LENGTHS)}"


class GroupCounter:
    """Counts the documents of a part by group, filter and stratum."""

    def __init__(self) -> None:
        self._counts: dict[str, Counter[tuple[str, str, str]]] = {REACHED: Counter(), DROPPED: Counter()}

    def add(self, batch: pa.RecordBatch, filters: Iterable[Filter]) -> None:
        """Count the documents of a batch, which has the COLUMNS. Filters of one stage are reached by the same ones."""
        strata = [stratum_of(*row) for row in zip(*(batch.column(name).to_pylist() for name in COLUMNS[1:]))]
        memberships = _Memberships(batch.column(GROUPS), strata)
        stages: set[str] = set()
        for each in filters:
            if stage_of(each.name) not in stages:
                stages.add(stage_of(each.name))
                self._count(REACHED, stage_of(each.name), memberships.counts(each.reached))
            self._count(DROPPED, each.name, memberships.counts(each.reached & each.dropped))

    def add_row(self, groups: Iterable[str] | None, stratum: str, stage: str, dropped_by: Iterable[str]) -> None:
        """Count one document that reached a stage; `dropped_by` are the names of the filters that drop it."""
        if groups is None:
            return
        for group in (EVERYONE, *groups):
            self._counts[REACHED][stage, group, stratum] += 1
            for name in dropped_by:
                self._counts[DROPPED][name, group, stratum] += 1

    def _count(self, kind: str, name: str, counts: Mapping[tuple[str, str], int]) -> None:
        counter = self._counts[kind]
        for (group, stratum), number in counts.items():
            counter[name, group, stratum] += number

    @property
    def figures(self) -> dict[str, Any]:
        """The counts as nested names: REACHED by stage, or DROPPED by filter, then group, then stratum."""
        found: dict[str, Any] = {}
        for kind, counter in self._counts.items():
            named: dict[str, Any] = defaultdict(lambda: defaultdict(dict))
            for (name, group, stratum), number in sorted(counter.items()):
                named[name][group][stratum] = number
            found[kind] = {name: dict(groups) for name, groups in named.items()}
        return found


class _Memberships:
    """The groups of the documents of a batch as pairs of a document and a group, EVERYONE included."""

    def __init__(self, groups: pa.ListArray, strata: Sequence[str]):
        measured = groups.is_valid().to_numpy(zero_copy_only=False)
        lengths = pc.fill_null(pc.list_value_length(groups), 0).to_numpy(zero_copy_only=False)
        encoded = pc.dictionary_encode(groups.flatten())
        self._groups = [EVERYONE, *encoded.dictionary.to_pylist()]
        self._strata, of_document = np.unique(np.array(strata, object), return_inverse=True)
        every = np.arange(len(strata))[measured]
        self._documents = np.concatenate([every, np.repeat(np.arange(len(strata)), lengths)])
        numbers = np.concatenate([np.zeros(len(every), np.int64), encoded.indices.to_numpy(zero_copy_only=False) + 1])
        self._pairs = numbers * len(self._strata) + of_document[self._documents]

    def counts(self, chosen: Mask) -> dict[tuple[str, str], int]:
        """Return the number of chosen documents by group and stratum; numbers of 0 are left out."""
        counts = np.bincount(self._pairs[chosen[self._documents]])
        return {
            (self._groups[at // len(self._strata)], self._strata[at % len(self._strata)]): int(counts[at])
            for at in np.flatnonzero(counts).tolist()
        }


def rule_filters(stage: str, reached: Mask, dropped: Mapping[str, Mask]) -> list[Filter]:
    """Return the filters of a stage: each rule by its name, and the stage if it has several rules.

    A rule is judged on every document that reached its stage, whether or not another rule of the stage drops it too.
    """
    filters = [Filter(f"{stage}/{rule}", reached, mask) for rule, mask in dropped.items()]
    if len(filters) > 1:
        filters.append(Filter(stage, reached, np.logical_or.reduce([*dropped.values()])))
    return filters
