"""The fused pass: a row runs through consecutive per-document stages in one worker and gets its verdict.

A stage that raises on a row drops that row as `failed`; the kind and place of the error are counted, never its text.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pipeline.engine.stage import Drop, PerDocument, Row
from schemas.config import Recipe
from schemas.errors import ContractError, PenstockError

FAILED = "failed"
CRASHED = "crashed"
EVERY_STAGE = {
    FAILED: "the stage raised an error on this record",
    CRASHED: "the worker died on this record, as a retry in a child process showed",
}


def reason_names(stage: str, reasons: Mapping[str, str], raises: bool = True) -> list[str]:
    """All `stage/reason` names of a stage in declared order, those of every stage that may raise included."""
    return [f"{stage}/{reason}" for reason in (*reasons, *(EVERY_STAGE if raises else ()))]


def set_verdict(row: Row, stage: str, drop: Drop) -> None:
    """Write the first verdict into the row; a later one does not replace it."""
    if row.get("drop_stage") is None:
        row["drop_stage"], row["drop_rule"] = stage, drop.rule
        row["drop_value"], row["drop_limit"] = drop.value, drop.limit


class Fused:
    """Consecutive per-document stages as one function of a row; built once per worker."""

    def __init__(self, stages: Sequence[PerDocument], recipe: Recipe, models: Mapping[str, Mapping[str, str]]):
        self._steps: list[tuple[PerDocument, Callable[[Row], Drop | None], frozenset[str]]] = [
            (stage, stage.make(recipe[stage.name], models.get(stage.name, {})), frozenset(stage.reasons))
            for stage in stages
        ]
        self.errors: Counter[str] = Counter()

    def __call__(self, row: Row) -> Row:
        """The row with the columns of every stage that saw it, and its verdict if one of them had one."""
        for stage, function, reasons in self._steps:
            try:
                drop = function(row)
            except PenstockError:
                raise  # a broken promise, such as a model that is no model of its kind: no fault of this record
            except Exception as error:
                self.errors[f"{stage.name}: {_place(error)}"] += 1
                set_verdict(row, stage.name, Drop(FAILED))
                break
            if drop is None:
                continue
            if drop.rule not in reasons:
                raise ContractError(
                    f"stage {stage.name}: promised a reason of {sorted(reasons)}, found {drop.rule!r}; declare it"
                )
            set_verdict(row, stage.name, drop)
            if stage.ends:
                break
        return row


def _place(error: BaseException) -> str:
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    where = f"{trace.tb_frame.f_code.co_filename.rsplit('/', 1)[-1]}:{trace.tb_lineno}" if trace else "?"
    return f"{type(error).__name__} at {where}"


class Books:
    """Counts rows, drops by name, and what the report shows, while a part is written."""

    def __init__(self, stages: Sequence[tuple[str, Mapping[str, str]]], raises: bool = True):
        """Books for the reasons of these stages; and for their failures, where they run (`raises`)."""
        names = [name for stage, reasons in stages for name in reason_names(stage, reasons, raises)]
        self.dropped: dict[str, int] = dict.fromkeys(names, 0)
        self.dropped_chars: Counter[str] = Counter()
        self.rows_in = self.rows_kept = self.kept_chars = 0
        self.figures: dict[str, Counter[str]] = {}

    def enter(self, row: Row, chars: int) -> None:
        """Count one finished row by its verdict; `chars` is the length of its text [code points]."""
        self.rows_in += 1
        if row.get("drop_stage") is None:
            self.rows_kept += 1
            self.kept_chars += chars
            return
        name = f"{row['drop_stage']}/{row['drop_rule']}"
        if name not in self.dropped:
            raise ContractError(f"books: promised a declared reason, found {name!r}; declare it in its stage")
        self.dropped[name] += 1
        self.dropped_chars[name] += chars

    def tally(self, figure: str, name: str, amount: int = 1) -> None:
        """Add to one named count of a figure."""
        self.figures.setdefault(figure, Counter())[name] += amount

    def to_json(self) -> dict[str, Any]:
        """Counts and figures of this part."""
        return {
            "counts": {"rows_in": self.rows_in, "rows_kept": self.rows_kept, "dropped": self.dropped},
            "figures": {
                "kept_chars": self.kept_chars,
                "dropped_chars": dict(self.dropped_chars),
                **{name: dict(counter) for name, counter in self.figures.items()},
            },
        }
