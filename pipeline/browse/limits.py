"""Limits tried at once: a sample of the stored signals in memory, a slider for each limit, and what the limits keep.

The sample is the documents whose id has the smallest hash, so it is the same in every session. If it holds all
documents, counts before deduplication are exact; otherwise they are estimates with a sampling error. Deduplication is
not repeated here: `penstock whatif` predicts it.
"""

import json
import math
import sys
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from pipeline.browse.rows import BrowsedRun
from pipeline.browse.sample import LimitSample, SampleProgress, read_sample
from pipeline.browse.search import describe_field
from pipeline.engine.rules import KEPT, evaluate_checks, is_minimum
from pipeline.engine.stage import Check
from pipeline.inspect.cells import KEPT_VERDICT, PredictionCell, kept_tokens, token_rates
from pipeline.steps.verdicts import checks_of, names_of
from schemas.config import Recipe
from schemas.errors import ConfigError, ContractError

SAMPLE_DOCUMENTS = 50_000
"""Maximum number of documents in the sample."""
NUM_BINS = 48
LOG_RATIO = 30.0
"""Ratio of the largest value to the median of the positive values above which an axis is logarithmic."""
NUM_EXAMPLES = 12
"""Number of documents of each kind that are listed as examples of a changed verdict."""
Z95 = 1.959964
"""Standard errors on each side of a 95 % interval of the normal distribution."""

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class RunLimits:
    """The limits of a run: its recipe, its checks in order, and the sample on which they are tried."""

    run: BrowsedRun
    recipe: Recipe
    checks: tuple[tuple[str, Check], ...]
    sample: LimitSample
    first: npt.NDArray[np.int64]
    """Number of the first check that each sampled document breaks, KEPT if it breaks none; shape (documents,)."""


def open_limits(run: BrowsedRun, size: int, progress: SampleProgress) -> RunLimits:
    """Read the sample of at most `size` documents of a run.

    Raises ConfigError if the run has no recipe or no verdicts, and ContractError if its verdicts were made with other
    limits than its recipe has.
    """
    recipe = run.rules.read([])
    if "verdicts" not in run.tables:
        raise ConfigError(f"{run.address}: expected a run with verdicts, got none. Run `penstock run` to its end.")
    stored = run.tables["verdicts"].manifest.content.config
    if changed := sorted(name for name, values in stored.items() if recipe.section_at(name).decisions() != values):
        raise ContractError(
            f"{run.address}: expected verdicts by the limits of the recipe, got other limits of {', '.join(changed)}. "
            "Run `penstock run` again, or browse the run folder without @<digest>."
        )
    checks = tuple(_checks(run, recipe))
    sample = read_sample(run, [check for _, check in checks], size, progress)
    return RunLimits(run, recipe, checks, sample, evaluate_checks([check for _, check in checks], sample.batch).first)


def _checks(run: BrowsedRun, recipe: Recipe) -> list[tuple[str, Check]]:
    return checks_of(run.rules.stages, recipe, run.rules.models(recipe), run.figures("verdicts").get("cutoffs", {}))


# Sliders: one for each limit that is a setting of the recipe, with the histogram of the compared values.


def sliders_of(limits: RunLimits) -> dict[str, Any]:
    """Return the sample's size and the slider of every limit, as a JSON value; limits that drop most come first."""
    sample = limits.sample
    judged = evaluate_checks([check for _, check in limits.checks], sample.batch)
    names = names_of(limits.checks)
    fixed = _fixed(limits)
    sliders = []
    for row, (stage, check) in enumerate(limits.checks):
        if row not in fixed:
            first, broken = judged.first, judged.broken[row]
            kinds = (first == KEPT, broken, (first != KEPT) & ~broken)
            shown = _slider(limits, names[row], (stage, check), judged.values[row], kinds)
            sliders.append(shown | {"dropped": int((first == row).sum()), "broken": int(broken.sum())})
    return {
        "sample": sample.batch.num_rows,
        "population": sample.population,
        "exact": sample.is_exact,
        "parts_read": sample.parts_read,
        "parts": limits.run.num_parts,
        "repeats": "repeats" in limits.run.tables,
        "sliders": sorted(sliders, key=lambda slider: -slider["dropped"]),
        "fixed": [names[row] for row in sorted(fixed)],
    }


def _fixed(limits: RunLimits) -> set[int]:
    """Return the numbers of the checks whose limit is a quantile of all documents, and not a setting."""
    plain = checks_of(limits.run.rules.stages, limits.recipe, limits.run.rules.models(limits.recipe), {})
    return {
        row
        for row, ((_, check), (_, other)) in enumerate(zip(limits.checks, plain, strict=True))
        if dict(check.limits) != dict(other.limits) or not check.limits
    }


def _slider(
    limits: RunLimits, name: str, named: tuple[str, Check], values: npt.NDArray[np.float64], kinds: tuple[Bools, ...]
) -> dict[str, Any]:
    """Return one slider: its setting and limits, the axis, and the histogram of kept and dropped documents."""
    stage, check = named
    compared = ~np.isnan(values)
    spread = sorted(set(map(float, check.limits.values())))
    axis = _axis(values[compared], spread)
    edges = axis.edges(NUM_BINS)
    bins = [
        np.histogram(axis.positions(values[kind & compared]), bins=np.linspace(0, 1, NUM_BINS + 1))[0] for kind in kinds
    ]
    described = limits.run.columns.field(check.column) if check.column in limits.run.columns.names else None
    languages = limits.sample.batch.column("language").fill_null("?").value_counts()
    most = max(languages.to_pylist(), key=lambda entry: (entry["counts"], entry["values"]), default=None)
    language = most["values"] if most else ""
    return {
        "id": f"{stage}.{check.setting} {check.label}".strip(),
        "setting": f"{stage}.{check.setting}",
        "label": check.label,
        "rule": name,
        "meaning": limits.run.rules.meanings.get(name.partition(" ")[0], ""),
        "column": check.column,
        **({} if described is None else {f"column_{key}": text for key, text in describe_field(described).items()}),
        "side": "min" if is_minimum(check) else "max",
        "whole": check.value is None and described is not None and pa.types.is_integer(described.type),
        "limit": float(check.limits.get(language, check.limits.get("*", spread[0]))),
        "limit_language": language if language in check.limits and len(spread) > 1 else "",
        "limits": [spread[0], spread[-1]],
        "axis": {"low": axis.low, "high": axis.high, "knee": axis.knee},
        "bins": [
            {"low": edges[at], "high": edges[at + 1], "kept": int(kept), "here": int(here), "other": int(other)}
            for at, (kept, here, other) in enumerate(zip(*bins))
        ],
        "compared": int(compared.sum()),
    }


@dataclass(frozen=True)
class SliderAxis:
    """The axis of a slider from `low` to `high`: linear, or logarithmic above `knee` if that is not None."""

    low: float
    high: float
    knee: float | None

    def positions(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return the positions of values on the axis, 0..1."""
        span = self._scaled(np.array([self.high]))[0] or 1.0
        placed: npt.NDArray[np.float64] = np.clip(self._scaled(values) / span, 0, 1)
        return placed

    def _scaled(self, values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        shifted = values - self.low
        return shifted if self.knee is None else np.log1p(shifted / self.knee)

    def edges(self, number: int) -> list[float]:
        """Return the values at the edges of `number` equal parts of the axis."""
        shares = np.linspace(0, 1, number + 1)
        span = self.high - self.low
        values = shares * span if self.knee is None else self.knee * np.expm1(shares * math.log1p(span / self.knee))
        return [float(value) for value in self.low + values]


def _axis(values: npt.NDArray[np.float64], spread: Sequence[float]) -> SliderAxis:
    """Return an axis that holds the compared values and the limits."""
    finite = values[np.isfinite(values)]
    ends = [*(float(end) for end in (finite.min(), finite.max()) if len(finite)), *spread] if len(finite) else [*spread]
    low, high = min(ends), max(ends)
    if 0 < low <= high / 2:
        low = 0.0  # so that a minimum can be moved below every value
    positive = finite[finite > low] - low
    middle = float(np.median(positive)) if len(positive) else 0.0
    knee = middle / 4 if middle > 0 and (high - low) / middle > LOG_RATIO else None
    return SliderAxis(low, high if high > low else low + 1.0, knee)


# The answer: documents, characters and tokens kept with other limits.


def parse_settings(limits: RunLimits, settings: Any) -> list[str]:
    """Return the overrides `section.key=value` of moved sliders, given as {slider id: limit}.

    Raises ConfigError for an unknown slider or a limit that is not a finite number.
    """
    fixed = _fixed(limits)
    known = {
        f"{stage}.{check.setting} {check.label}".strip(): (stage, check)
        for row, (stage, check) in enumerate(limits.checks)
        if row not in fixed
    }
    if not isinstance(settings, Mapping):
        raise ConfigError(f"settings: expected an object of limits, got {type(settings).__name__}. Send an object.")
    changed: dict[tuple[str, str], Any] = {}
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(f"settings: expected limits of this run, got {name[:80]!r}. Reload the page.")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= sys.float_info.max:
            raise ConfigError(f"{name}: expected a finite number, got {str(value)[:80]!r}. Correct the limit.")
        stage, check = known[name]
        number = int(value) if float(value).is_integer() else value
        stored = getattr(limits.recipe[stage], check.setting)
        if isinstance(stored, Mapping):
            changed[stage, check.setting] = {**changed.get((stage, check.setting), stored), check.label: number}
        else:
            changed[stage, check.setting] = number
    return [f"{stage}.{setting}={_toml(value)}" for (stage, setting), value in changed.items()]


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(name)} = {_toml(item)}" for name, item in value.items()) + "}"
    return repr(value)


def try_limits(limits: RunLimits, overrides: Sequence[str]) -> list[PredictionCell]:
    """Return the counts of the sampled documents by verdict before and after, language and source.

    `before` and `after` are verdicts of the checks alone, without deduplication. Raises ConfigError if a what-if cannot
    change one of the settings.
    """
    return _tried(limits, overrides)[0]


def _tried(
    limits: RunLimits, overrides: Sequence[str]
) -> tuple[list[PredictionCell], npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Return the cells of `try_limits`, and the number of the verdict of each document before and after."""
    proposed = limits.run.rules.read(overrides)
    limits.run.rules.check_change(limits.recipe, proposed)
    sample = limits.sample
    verdicts: list[str] = [KEPT_VERDICT]
    numbers = []
    new_checks = _checks(limits.run, proposed)
    new_first = evaluate_checks([check for _, check in new_checks], sample.batch).first
    for checks, first in ((limits.checks, limits.first), (new_checks, new_first)):
        names = [f"{stage}/{check.reason}" for stage, check in checks]
        verdicts += [name for name in dict.fromkeys(names) if name not in verdicts]
        numbers.append(np.array([*(verdicts.index(name) for name in names), 0])[first])
    groups = {name: _codes(sample.batch.column(name)) for name in ("language", "source")}
    keys = np.stack([*numbers, *(codes for codes, _ in groups.values())], axis=1)
    unique, inverse = np.unique(keys, axis=0, return_inverse=True)
    inverse = inverse.reshape(-1)
    chars = pc.fill_null(sample.batch.column("body_chars"), 0).to_numpy(zero_copy_only=False)
    uncounted = np.isnan(sample.tokens)
    sums = [
        np.bincount(inverse, weights, len(unique)).astype(np.int64).tolist()
        for weights in (
            np.ones(len(inverse)),
            chars,
            np.where(uncounted, 0, sample.tokens),
            np.where(uncounted, chars, 0),
        )
    ]
    languages, sources = (names for _, names in groups.values())
    cells = [
        PredictionCell(verdicts[before], verdicts[after], languages[language], sources[source], *counts)
        for (before, after, language, source), *counts in zip(unique.tolist(), *sums)
    ]
    return cells, numbers[0], numbers[1]


def _codes(column: pa.Array) -> tuple[npt.NDArray[np.int64], list[str]]:
    encoded = pc.dictionary_encode(pc.fill_null(column, "?"))
    return encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64), encoded.dictionary.to_pylist()


def limits_answer(limits: RunLimits, overrides: Sequence[str]) -> dict[str, Any]:
    """Return what other limits keep, compared with the run, as a JSON value: totals, by rule, by language, examples.

    Counts are estimates for the whole run; `error` is half of a 95 % interval, 0 if the sample holds all documents.
    """
    cells, before, after = _tried(limits, overrides)
    sample = limits.sample
    rates = token_rates(cells)
    errors = _errors(sample, before == 0, after == 0)
    by_rule: dict[str, list[int]] = {}
    by_language: dict[str, list[PredictionCell]] = {}
    for cell in cells:
        for column, verdict in enumerate((cell.before, cell.after)):
            by_rule.setdefault(verdict, [0, 0])[column] += cell.documents
        by_language.setdefault(cell.language, []).append(cell)
    by_rule.pop(KEPT_VERDICT, None)
    return {
        "totals": _totals(limits, cells, rates) | {"error": errors},
        "by_rule": [
            {"name": name, "before": _scaled(limits, pair[0]), "after": _scaled(limits, pair[1])}
            for name, pair in sorted(by_rule.items(), key=lambda item: (-max(item[1]), item[0]))
        ],
        "by_language": [
            {"name": name, **_totals(limits, group, rates)}
            for name, group in sorted(
                by_language.items(), key=lambda item: (-sum(c.documents for c in item[1]), item[0])
            )
        ],
        "newly_kept": _examples(sample, (before != 0) & (after == 0)),
        "newly_dropped": _examples(sample, (before == 0) & (after != 0)),
        "command": limits.run.command("whatif", *(word for item in overrides for word in ("--set", item))),
    }


def _scaled(limits: RunLimits, number: float) -> int:
    return round(number * limits.sample.factor)


def _totals(
    limits: RunLimits, cells: Sequence[PredictionCell], rates: Mapping[tuple[str, str], float]
) -> dict[str, Any]:
    """Return documents, characters and tokens that are kept before and after, scaled to the whole run."""
    totals: dict[str, Any] = {}
    for name, is_after in (("before", False), ("after", True)):
        kept = [cell for cell in cells if (cell.after if is_after else cell.before) == KEPT_VERDICT]
        tokens, is_estimate = kept_tokens(cells, is_after, rates)
        totals[name] = {
            "documents": _scaled(limits, sum(cell.documents for cell in kept)),
            "chars": _scaled(limits, sum(cell.chars for cell in kept)),
            "tokens": _scaled(limits, tokens) if limits.sample.has_tokens else None,
            "tokens_estimated": is_estimate or not limits.sample.is_exact,
        }
    return totals


def _errors(sample: LimitSample, before: Bools, after: Bools) -> dict[str, int]:
    """Return half of the 95 % intervals of documents and characters kept after, and of their changes.

    The intervals are those of a simple random sample without replacement.
    """
    size, population = len(before), sample.population
    if size < 2 or sample.is_exact:
        return dict.fromkeys(("documents", "chars", "documents_change", "chars_change"), 0)
    chars = pc.fill_null(sample.batch.column("body_chars"), 0).to_numpy(zero_copy_only=False).astype(np.float64)
    change = after.astype(np.float64) - before
    scale = Z95 * population * math.sqrt((1 - size / population) / size)
    values = {"documents": after.astype(np.float64), "chars": after * chars}
    values |= {"documents_change": change, "chars_change": change * chars}
    return {name: math.ceil(scale * float(np.std(value, ddof=1))) for name, value in values.items()}


def _examples(sample: LimitSample, chosen: Bools) -> list[dict[str, str]]:
    """Return the first documents of the sample with this change, as links; the sample has a random order."""
    rows = np.flatnonzero(chosen)[:NUM_EXAMPLES].tolist()
    ids = sample.batch.column("doc_id")
    return [{"doc": ids[row].as_py().hex(), "at": str(sample.positions[row])} for row in rows]


@dataclass
class LimitsLoader:
    """Reads the sample of a run in a thread of its own when it is first asked for."""

    run: BrowsedRun
    size: int = SAMPLE_DOCUMENTS
    progress: SampleProgress = field(default_factory=SampleProgress)
    _limits: RunLimits | None = None
    _error: Exception | None = None
    _thread: threading.Thread | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def get(self) -> RunLimits | None:
        """Return the limits; None while the sample is read. Raises the error of the reading; the next call retries."""
        with self._lock:
            if self._limits is None and self._thread is None:
                self._thread = threading.Thread(target=self._load, daemon=True)
                self._thread.start()
            thread = self._thread
        if thread is not None:
            thread.join(0.5)
        with self._lock:
            if thread is not None and not thread.is_alive():
                self._thread = None
            error, self._error = self._error, None
            if error is not None:
                raise error
            return self._limits

    def _load(self) -> None:
        try:
            self._limits = open_limits(self.run, self.size, self.progress)
        except Exception as error:  # raised to the request that waits for the sample
            self._error = error
