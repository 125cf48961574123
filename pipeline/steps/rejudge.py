"""Judging again: documents from which passages were cut are measured anew and compared with the same limits.

A document is measured as if the passages had never been there: what read the whole text reads it without them, what
read the text after cuts reads what is left. Cut-offs that the data decided stay as they were.
"""

from collections.abc import Mapping, Sequence

import pyarrow as pa

from pipeline.engine.isolate import Crashed, Isolated
from pipeline.engine.rules import KEPT, columns_of, judge
from pipeline.engine.stage import Cutoffs, Drop, PerDocument, Row
from pipeline.engine.worker import CRASHED, EVERY_STAGE, Fused, set_verdict
from pipeline.quality.decide import QUALITY
from pipeline.steps import scores
from pipeline.steps.verdicts import JUDGED, Paths, checks_of, local_models, split_columns
from pipeline.toxicity import TOXICITY
from schemas.config import Recipe
from schemas.entries import to_entries
from schemas.tables import DOCUMENTS, SCORES

KINDS = {field.name: field.type for schema in (SCORES, DOCUMENTS) for field in schema}
OF_TEXT: tuple[PerDocument, ...] = (QUALITY,)
OF_REST: tuple[PerDocument, ...] = (TOXICITY,)
CONTEXT = ("source", "language")
"""Columns that stages read of a document."""


class Rejudge:
    """Measures and judges documents after their cuts; built once for a part."""

    def __init__(self, recipe: Recipe, models: Paths, cutoffs: Cutoffs, scored: bool, isolated: bool):
        """`scored`: the run has scores of models; `isolated`: records are measured in a child process."""
        local = local_models(models)
        of_rest = (*OF_REST, *scores.STAGES) if scored else OF_REST
        self._of_text, self._of_rest = Fused(OF_TEXT, recipe, local), Fused(of_rest, recipe, local)
        self._measure = Isolated(self._measured) if isolated else self._measured
        self._named = checks_of(recipe, local, cutoffs)
        self._checks = [check for _, check in self._named]
        names = list(dict.fromkeys([*columns_of(self._checks), *CONTEXT]))
        self.columns: Mapping[str, Sequence[str]] = split_columns(names, {"scores": None} if scored else {})
        again = {stage.name for stage in (*OF_TEXT, *of_rest)}
        self.reasons: Sequence[tuple[str, Mapping[str, str]]] = [
            (stage.name, {**stage.verdicts, **(EVERY_STAGE if stage.name in again else {})}) for stage in JUDGED
        ]

    @property
    def errors(self) -> dict[str, int]:
        """Kinds and places of the errors met."""
        return dict(self._of_text.errors + self._of_rest.errors)

    def __call__(self, rows: list[Row]) -> None:
        """Add the signals of each row's `text`, those of its `_rest`, and the verdict if a check is broken."""
        for row in rows:
            try:
                row.update(self._measure(row))
            except Crashed:
                set_verdict(row, QUALITY.name, Drop(CRASHED))
        names = columns_of(self._checks)
        columns = [pa.array([_stored(row.get(name)) for row in rows], KINDS[name]) for name in names]
        judgement = judge(self._checks, pa.RecordBatch.from_arrays(columns, names))
        for number, (row, first) in enumerate(zip(rows, judgement.first.tolist())):
            if first != KEPT:
                stage, check = self._named[first]
                value, limit = float(judgement.values[first, number]), float(judgement.limits[first, number])
                set_verdict(row, stage, Drop(check.reason, value, limit))

    def _measured(self, row: Row) -> Row:
        row = self._of_text(row)
        if row.get("drop_stage") is None:
            row["_body"] = row["_rest"]
            row = self._of_rest(row)
        return row

    def close(self) -> None:
        """End the child process, if there is one."""
        if isinstance(self._measure, Isolated):
            self._measure.close()


def _stored(value: object) -> object:
    """A value as Arrow takes it, measured anew (a mapping) or read from the table (entries)."""
    return to_entries(value) if isinstance(value, dict) else value
