"""Errors that stages raise on documents: what is kept of each, their counts, and the limit above which a step stops.

An error drops its document as `failed`. Errors are counted by stage, type and line of code. For each, the document with
the smallest id is the example, so that the counts and examples do not depend on the order in which parts are read.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from schemas.errors import ConfigError

MIN_DOCUMENTS = 100
"""Number of documents from which on the share of failed ones is compared with its limit."""
MAX_KINDS = 5
"""Maximum number of kinds of errors that are kept for each stage of a part or a step: of a part, the first ones in it;
of a step, the most frequent. The others are counted together."""
OTHERS = "other errors"
FAILURE, CALLS = "_failure", "_calls"
"""Fields of a row: the Failure of the stage that raised an error, and the stages whose calls are counted."""


@dataclass(frozen=True)
class Failure:
    """An error that a stage raised on a document."""

    stage: str
    error: str
    """The type of the exception."""
    place: str
    """The file and line of code, such as `measure.py:3`."""
    message: str = ""
    """The text of the exception, for stages of a recipe; without words that are quoted from the document."""

    @property
    def kind(self) -> str:
        """The text under which errors are counted."""
        return f"{self.stage}: {self.error} at {self.place}"


def place_of(error: BaseException) -> str:
    """Return the file and line of code at which an error was raised, such as `measure.py:3`."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return f"{trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno}" if trace else "?"


@dataclass
class FailureCounts:
    """The errors of a part or a step, and on how many documents the stages of the recipe were called."""

    errors: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By kind: `count`, and `document` (id) and `message` of the example."""
    calls: dict[str, int] = field(default_factory=dict)
    """Number of documents by stage."""

    def see(self, row: Mapping[str, Any]) -> None:
        """Count a row that has passed through the stages."""
        for stage in row.get(CALLS, ()):
            self.calls[stage] = self.calls.get(stage, 0) + 1
        failure: Failure | None = row.get(FAILURE)
        if failure is None:
            return
        kind = failure.kind
        of_stage = [name for name in self.errors if name.startswith(f"{failure.stage}: ")]
        if kind not in self.errors and len(of_stage) >= MAX_KINDS:
            kind = f"{failure.stage}: {OTHERS}"
        document = row["doc_id"].hex() if row.get("doc_id") is not None else ""
        _add(self.errors, kind, {"count": 1, "document": document, "message": failure.message})

    def add(self, other: "FailureCounts") -> None:
        """Add the counts of other documents."""
        for kind, entry in other.errors.items():
            _add(self.errors, kind, entry)
        for stage, number in other.calls.items():
            self.calls[stage] = self.calls.get(stage, 0) + number

    def failed(self, stage: str) -> int:
        """Return the number of documents on which a stage raised an error."""
        return sum(entry["count"] for kind, entry in self.errors.items() if kind.startswith(f"{stage}: "))

    def stages(self) -> list[str]:
        """Return the names of the stages that raised errors."""
        return list(dict.fromkeys(kind.partition(": ")[0] for kind in sorted(self.errors)))

    def describe(self, stage: str, shown: int = MAX_KINDS) -> str:
        """Return the most frequent errors of a stage as `ValueError: boom (my.py:3), 9 documents, such as 0a1b…`."""
        own = {kind: entry for kind, entry in self.errors.items() if kind.startswith(f"{stage}: ")}
        texts = [_error_text(kind.partition(": ")[2], own[kind]) for kind in _ranked(own)[:shown]]
        if len(own) > shown:
            texts.append(f"{len(own) - shown} other kinds of errors")
        return "; ".join(texts)

    def warnings(self) -> list[str]:
        """Return a sentence about each stage that raised errors."""
        lines = []
        for stage in self.stages():
            of_all = f" of {self.calls[stage]:,}" if stage in self.calls else ""
            lines.append(f"stage {stage} failed on {self.failed(stage):,}{of_all} document(s): {self.describe(stage)}")
        return lines

    def most_frequent(self) -> dict[str, dict[str, Any]]:
        """Return the MAX_KINDS most frequent errors of each stage, and the sum of the others, sorted by kind."""
        kept: dict[str, dict[str, Any]] = {}
        for stage in self.stages():
            own = {kind: entry for kind, entry in self.errors.items() if kind.startswith(f"{stage}: ")}
            for number, kind in enumerate(_ranked(own)):
                _add(kept, kind if number < MAX_KINDS else f"{stage}: {OTHERS}", own[kind])
        return dict(sorted(kept.items()))

    def check(self, limits: Mapping[str, float], is_complete: bool) -> None:
        """Raise ConfigError if a stage failed on more documents than its limit, a share from 0 to 1, allows.

        With `is_complete` False, for documents of an incomplete part, only if it failed on every one of the first
        MIN_DOCUMENTS.
        """
        for stage, limit in limits.items():
            failed, calls = self.failed(stage), self.calls.get(stage, 0)
            is_above = failed > limit * calls if is_complete else failed == calls == MIN_DOCUMENTS and limit < 1
            if calls >= MIN_DOCUMENTS and is_above:
                raise ConfigError(
                    f"[[stage]] {stage}: expected the function to fail on at most {100 * limit:g} % of the documents, "
                    f"got errors on {failed:,} of {calls:,}: {self.describe(stage)}. Correct the function, or raise "
                    "`max_failed_share` of the stage."
                )


def failures_of(blocks: Iterable[Mapping[str, Any]]) -> FailureCounts:
    """Return the errors that the `notes` of manifests or results of parts list under `errors` and `calls`."""
    counts = FailureCounts()
    for notes in blocks:
        counts.add(FailureCounts(copy.deepcopy(dict(notes.get("errors", {}))), dict(notes.get("calls", {}))))
    return counts


def _add(errors: dict[str, dict[str, Any]], kind: str, entry: Mapping[str, Any]) -> None:
    known = errors.get(kind)
    if known is None:
        errors[kind] = dict(entry)
        return
    examples = [each for each in (known, entry) if each["document"]] or [known]
    example = min(examples, key=lambda each: each["document"])
    errors[kind] = {**example, "count": known["count"] + entry["count"]}


def _ranked(errors: Mapping[str, Mapping[str, Any]]) -> Sequence[str]:
    return sorted(errors, key=lambda kind: (kind.endswith(OTHERS), -errors[kind]["count"], kind))


def _error_text(error: str, entry: Mapping[str, Any]) -> str:
    name, _, place = error.partition(" at ")
    text = f"{name}: {entry['message']}" if entry["message"] else name
    text += f" ({place})" if place else ""
    example = f", such as {entry['document']}" if entry["document"] else ""
    return f"{text}, {entry['count']:,} document(s){example}"
