"""What a run would change in its folder, found before Spark starts, why, and at what cost.

The identity of a step follows from its settings, models and inputs, so it is known until the first step that must be
built. The steps after that one change too, because they read a table of another version.
"""

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any

from pipeline.engine.code_digest import code_digest
from pipeline.engine.part import part_results, stored_result
from pipeline.engine.stage import Split
from pipeline.engine.step import Step
from pipeline.prepare import Prepared, find_version, finished_parts, read_tables, step_content
from pipeline.sources.splits import files_by_part
from pipeline.stages import STEPS
from pipeline.steps.documents import has_parents, identity_of_part
from pipeline.steps.file_ranges import known_ranges
from schemas.config import SEPARATOR, SOURCE, suggest_name
from schemas.errors import ConfigError
from schemas.manifest import (
    FROM_INPUT,
    MANIFEST_NAME,
    Content,
    Manifest,
    TableVersion,
    current_tables,
    read_manifest,
    read_run,
)
from schemas.storage import Store
from schemas.text import format_bytes, format_duration, text_table

COMPLETE, TO_BUILD = "complete", "to build"
REBUILD_ROWS = 1_000_000
REBUILD_BYTES = 10**10
"""A step with more input rows, or with more bytes of inputs, is built again by another version of penstock only with
`--rebuild`."""


@dataclass(frozen=True)
class StepChange:
    """A step that would replace the current version of its tables."""

    step: str
    reasons: tuple[str, ...]
    """The settings, stages, models and inputs that differ from those of the current version, as lines of text. Empty if
    the step only follows a changed one."""
    is_upgrade: bool = False
    """True if nothing that the user chose differs: other code has another version, default or column of a stage."""


@dataclass(frozen=True)
class Forecast:
    """What a run would do in its folder."""

    changes: tuple[StepChange, ...]
    """The steps that would replace a current version, in order."""
    complete: Mapping[str, TableVersion]
    """The versions that the run would use as they are, by table."""


def forecast(prepared: Prepared, folder: Store) -> Forecast:
    """Return what a run would change in its folder, of the tables that its token dataset is made from.

    A step whose current version is damaged would build the same version again, which is no change.
    """
    current = {name: folder.child(f"{name}/{version}") for name, version in read_run(folder).tables.items()}
    complete: dict[str, TableVersion] = {}
    replaced: set[str] = set()
    changes = []
    recorded = read_run(folder).recipe
    for step in dataset_steps(prepared):
        reads = step.inputs(prepared.recipe)
        reasons = _differences(prepared, step, current.get(step.name))
        follows = not replaced.isdisjoint(reads)
        if follows:
            is_changed = True
        elif all(name in complete for name in reads if name in _written(prepared)):
            inputs = {name: complete[name] for name in reads if name in complete}
            inputs |= step.external_inputs(prepared.recipe, prepared.splits)
            folders, owner = find_version(prepared, step, inputs, folder)
            complete |= read_tables(folders) if owner is not None else {}
            is_changed = any(name in current and current[name].root != made.root for name, made in folders.items())
            is_changed |= step.name not in current and step.name not in complete
        else:  # an input would be built again with the same content
            is_changed = bool(reasons)
        if is_changed:
            replaced |= {*step.writes} - complete.keys()
            own = bool(reasons) or not follows
            is_upgrade = own and _is_upgrade(prepared, reasons, current.get(step.name), recorded)
            changes.append(StepChange(step.name, tuple(reason.text for reason in reasons), is_upgrade))
    return Forecast(tuple(changes), complete)


def is_complete(prepared: Prepared, folder: Store) -> bool:
    """Return True if a run would build no table: those of every step exist in its folder or in a run that it uses."""
    complete: dict[str, TableVersion] = {}
    for step in prepared.steps:
        inputs = {name: complete[name] for name in step.inputs(prepared.recipe) if name in complete}
        inputs |= step.external_inputs(prepared.recipe, prepared.splits)
        folders, owner = find_version(prepared, step, inputs, folder)
        if owner is None:
            return False
        complete |= read_tables(folders)
    return True


@dataclass(frozen=True)
class StepPlan:
    """What a run would do for one step."""

    step: str
    tables: tuple[str, ...]
    state: str
    """Such as `complete`, `to build`, or `to build, 12 of 90 parts are written`."""
    reasons: tuple[str, ...] = ()
    """Why it would be built in place of the current version, as lines of text."""
    share_written: float = 0.0
    """Share of its input whose parts are written already, so that they cost nothing [0, 1]."""

    @property
    def is_complete(self) -> bool:
        """True if the tables exist."""
        return self.state.startswith(COMPLETE)


def plan_steps(prepared: Prepared, folder: Store) -> list[StepPlan]:
    """Return what a run would do for each of its steps, in order, and why; nothing is built or changed."""
    current = {name: folder.child(f"{name}/{version}") for name, version in read_run(folder).tables.items()}
    complete: dict[str, TableVersion] = {}
    built: list[str] = []
    plans = []
    for step in prepared.steps:
        reads = step.inputs(prepared.recipe)
        follows = [name for name in built if name in reads]
        reasons = [reason.text for reason in _differences(prepared, step, current.get(step.name))]
        state, share = TO_BUILD, 0.0
        if not follows:
            inputs = {name: complete[name] for name in reads if name in complete}
            inputs |= step.external_inputs(prepared.recipe, prepared.splits)
            folders, owner = find_version(prepared, step, inputs, folder)
            if owner is not None:
                complete |= read_tables(folders)
                state = COMPLETE if owner.uri == folder.uri else f"{COMPLETE} in {owner.uri}"
            elif not step.reads:
                written = _written_inputs(prepared, step, folder, folders[step.name])
                last = prepared.splits[-1]
                number = last.ordinal + last.num_ranges
                state += f", {len(written):,} of {number:,} parts are written" if written else ""
                share = sum(map(_bytes_of, itertools.chain(*written))) / max(1, prepared.input_bytes)
            elif results := len(part_results(folders[step.name])):
                state += f", {results:,} part(s) are written"
        elif current.get(step.name) is not None:
            # Its tables stay, if what it reads is built again with equal content, as from a copied input file.
            state += ", unless its inputs stay equal"
            reasons.append(f"it reads {', '.join(follows)}")
        built += step.writes if state.startswith(TO_BUILD) else ()
        is_built = state.startswith(TO_BUILD)
        plans.append(StepPlan(step.name, step.writes, state, tuple(reasons) if is_built else (), share))
    return plans


def _written_inputs(prepared: Prepared, step: Step, folder: Store, documents: Store) -> list[tuple[Split, ...]]:
    """Return the files of each part that a run would take over from earlier versions or an interrupted run.

    Ranges of large files are left out if it is not known where they begin. `documents`: the folder of the version.
    """
    finished = finished_parts(prepared, step, folder)
    stored, with_parents = {*finished.folder.names()}, has_parents(prepared.recipe, prepared.splits)
    found = [
        (files, place)
        for files in files_by_part(known_ranges(prepared.splits, documents))
        if (place := finished.part(identity_of_part(files, with_parents), files[0].source)).name in stored
    ]
    # One of them shows which code wrote them, unless it changed in between.
    return [files for files, _ in found] if found and stored_result(found[0][1]) is not None else []


def _bytes_of(split: Split) -> int:
    return split.size if split.span is None else split.span.end - split.span.begin


def reuse_rows(prepared: Prepared, folder: Store) -> list[tuple[str, str]]:
    """Return what a finished run used of the runs of `reuse` and what it built, with the reasons, as (label, text)."""
    tables, rows = read_run(folder).tables, []
    steps = [step.name for step in prepared.steps]
    for other in prepared.reuse:
        theirs = {name: other.child(f"{name}/{version}") for name, version in read_run(other).tables.items()}
        used = [name for name in steps if folder.child(f"{name}/{tables[name]}").root == _root_of(theirs, name)]
        rows.append(("reused", f"{', '.join(used) or 'nothing'} of {other.uri}"))
        for step in (step for step in prepared.steps if step.name not in used):
            reasons = _differences(prepared, step, theirs.get(step.name))
            missing = "" if step.name in theirs else f"{other.uri} has no such table"
            rows.append(
                ("built", f"{step.name}: {'; '.join(map(str, reasons)) or missing or 'it reads a table that differs'}")
            )
    return rows


def _root_of(folders: Mapping[str, Store], name: str) -> str:
    return folders[name].root if name in folders else ""


def dataset_steps(prepared: Prepared) -> list[Step]:
    """Return the steps of a run that its token dataset depends on, in order."""
    used = [step for step in STEPS if step.is_used(prepared.recipe)]
    tables = {"tokens"}
    for step in reversed(used):
        if not tables.isdisjoint(step.writes):
            tables |= {*step.inputs(prepared.recipe)}
    return [step for step in prepared.steps if not tables.isdisjoint(step.writes)]


def _written(prepared: Prepared) -> set[str]:
    return {name for step in prepared.steps for name in step.writes}


def check_rebuild(prepared: Prepared, folder: Store, allowed: Collection[str]) -> None:
    """Raise ConfigError if a run would build a large step again only because other code made its current version.

    `allowed`: the steps that may be built again. A change of the user's settings or inputs is no such case.
    """
    known = [step.name for step in prepared.steps]
    if unknown := sorted({*allowed} - {*known}):
        raise ConfigError(
            f"--rebuild: expected a step of this run, got {unknown[0]!r}{suggest_name(unknown[0], known)}. "
            "Correct the name."
        )
    lines, steps = [], []
    for change in forecast(prepared, folder).changes:
        if not change.is_upgrade or change.step in allowed:
            continue
        manifest = read_manifest(folder.child(f"{change.step}/{read_run(folder).tables[change.step]}"))
        rows, size = manifest.content.counts.rows_in, sum(entry.bytes for entry in manifest.content.inputs)
        if rows > REBUILD_ROWS or size > REBUILD_BYTES:
            why = "; ".join(change.reasons) or "other columns of its stages"
            lines.append(f"\n  {change.step}: {rows:,} rows from {format_bytes(size)}; {why}")
            steps.append(change.step)
    if lines:
        flags = " ".join(f"--rebuild {step}" for step in steps)
        raise ConfigError(
            f"{folder.uri}: expected tables of this version of penstock, got older ones, which it would build "
            f"again{''.join(lines)}\nNothing was started. Add {flags} to the command, or use the "
            "version that built them."
        )


# Reasons.

ANY = "*"


@dataclass(frozen=True)
class Reason:
    """A difference between the current version of a step's tables and the one that a run would build."""

    text: str
    section: str
    """The section of the recipe that the difference is about."""
    setting: str | None = None
    """The setting that differs; None = the version of the stage; ANY = the recipe uses the stage now, or no longer."""
    by_user: bool = False
    """True if the difference is in a model or in the input files."""

    def __str__(self) -> str:
        return self.text


def _is_upgrade(prepared: Prepared, reasons: list[Reason], current: Store | None, recorded: Mapping[str, Any]) -> bool:
    """Return True if other code made the current version, and the user set none of what differs.

    `recorded`: the recipe in `run.json`, which the user may have changed since.
    """
    if current is None or not current.exists(MANIFEST_NAME):
        return False
    if read_manifest(current).run.notes.get("code") == code_digest():
        return False
    recipes = (prepared.recipe.to_json(), recorded)
    return not any(reason.by_user or any(_sets(recipe, reason) for recipe in recipes) for reason in reasons)


def _sets(recipe: Mapping[str, Any], reason: Reason) -> bool:
    """Return True if a recipe sets the setting of a reason, for the run or for a source. No recipe sets a version."""
    if reason.setting is None:
        return False
    values, sources = recipe.get(reason.section, {}), recipe.get(SOURCE, {})
    tables = values if isinstance(values, list) else [values]
    own = [each.get(reason.section) for each in sources if isinstance(sources, list)]
    places = [each for each in (*tables, *own) if isinstance(each, Mapping)]
    return any(bool(each) if reason.setting == ANY else reason.setting in each for each in places)


def _differences(prepared: Prepared, step: Step, current: Store | None) -> list[Reason]:
    """Return how a step's settings, stages, models and files differ from those of the current version."""
    if current is None or not current.exists(MANIFEST_NAME):
        return []
    manifest = read_manifest(current)
    now = step_content(prepared, step)
    lines = _settings(manifest.content, now["config"])
    for kind, old, new in (
        ("stage", manifest.content.stages, now["stages"]),
        ("model", manifest.content.models, now["models"]),
    ):
        names = [name for name in {**old, **new} if old.get(name) != new.get(name)]
        lines += [
            Reason(
                f"{kind} {name}: {_short(old.get(name))} → {_short(new.get(name))}",
                name,
                None if name in old and name in new else ANY,
                by_user=kind == "model",
            )
            for name in names
        ]
    if not step.reads:
        recorded = {name: at for name, at in manifest.run.lineage.items() if name.startswith(FROM_INPUT)}
        changed = _files(recorded, {f"{FROM_INPUT}{split.key}": split.identity for split in prepared.splits})
        lines += [Reason(text, SOURCE, by_user=True) for text in changed]
        old = {entry.name: entry.num_parts for entry in manifest.content.inputs}
        divided = [split for split in prepared.splits if old.get(split.key, split.num_ranges) != split.num_ranges]
        if divided:
            text = f"source.part_bytes: {len(divided):,} large file(s) are read in other ranges, or as a whole"
            lines.append(Reason(text, SOURCE, "part_bytes"))
    return lines


def _settings(content: Content, now: Mapping[str, Mapping[str, Any]]) -> list[Reason]:
    """Return the settings that differ, as `section.key: old → new`."""
    lines = list[Reason]()
    for section, settings in now.items():
        old = content.config.get(section, {})
        names = [name for name in {**old, **settings} if old.get(name) != settings.get(name)]
        lines += [
            Reason(
                f"{section}.{name}: {_short(old.get(name))} → {_short(settings.get(name))}",
                section.rpartition(SEPARATOR)[2],
                name,
            )
            for name in names
        ]
    return lines


def _files(old: Mapping[str, str], new: Mapping[str, str]) -> list[str]:
    """Return a line about the input files that were added, removed or changed; empty if there are none."""
    changed = sum(old[name] != new[name] for name in old.keys() & new.keys())
    counts = {"added": len(new.keys() - old.keys()), "removed": len(old.keys() - new.keys()), "changed": changed}
    words = [f"{number} {what}" for what, number in counts.items() if number]
    return [f"input files: {', '.join(words)}"] if words else []


SHOWN_CHARS = 60
"""Maximum length of a value in a reason."""


def _short(value: object) -> str:
    text = "nothing" if value is None else str(value)
    return text if len(text) <= SHOWN_CHARS else f"{text[: SHOWN_CHARS - 1]}…"


# Cost: every step takes time, shuffles and writes in proportion to its input; the documents that lead a search for
# copies, and the rounds of comparison, follow the number of documents. So a step costs what it did in an earlier run,
# times the ratio of the inputs of both runs. Two earlier runs also show the part that does not grow with the input:
# the start of workers, models that are loaded, the optimizing compiler.

HOUR = 3600
CRAWL_FOLDER = "crawl-data/"
"""Part of the names of all files of Common Crawl."""


@dataclass(frozen=True)
class Prices:
    """Prices of machines and storage."""

    core_hour: float
    """Price of a core for an hour [US$]."""
    gb_month: float
    """Price of 10^9 bytes of storage for a month [US$]."""


@dataclass(frozen=True)
class BuildCost:
    """What a step costs."""

    rows: float = 0.0
    """Rows of its first table."""
    cpu_seconds: float = 0.0
    """CPU time of the Python workers [s]."""
    task_seconds: float = 0.0
    """Time for which its tasks hold a core [s]: the CPU time of workers and JVM, and waiting."""
    shuffled_bytes: float = 0.0
    written_bytes: float = 0.0
    """Size of its tables [bytes]."""

    def times(self, factor: float) -> "BuildCost":
        """Return the cost of as many times the input."""
        return BuildCost(*(factor * value for value in vars(self).values()))

    def plus(self, other: "BuildCost") -> "BuildCost":
        """Return the cost of both."""
        return BuildCost(*(own + value for own, value in zip(vars(self).values(), vars(other).values(), strict=True)))


@dataclass(frozen=True)
class EarlierRun:
    """The costs of the steps of an earlier run, and the size of its input."""

    uri: str
    steps: Mapping[str, BuildCost]
    input_files: int
    input_bytes: int
    is_crawl: bool
    """True if it read files of a crawl of Common Crawl."""

    def factor(self, prepared: Prepared) -> float:
        """Return how many times the input of this run that of another one is.

        If both read files of a crawl, these count by their number: their sizes are not known before they are read.
        """
        if self.is_crawl and all(split.is_crawl for split in prepared.splits):
            return len(prepared.splits) / self.input_files
        return prepared.input_bytes / self.input_bytes


def earlier_run(run: Store) -> EarlierRun:
    """Return what a complete run has cost. Raises ConfigError if it has no table `documents`, or one without input."""
    manifests = {name: table.manifest for name, table in current_tables(run).items()}
    inputs = manifests["documents"].content.inputs if "documents" in manifests else []
    size = sum(entry.bytes for entry in inputs)
    if not size:
        raise ConfigError(
            f"--like {run.uri}: expected a run with a table documents that was made from files, got none. Name "
            "another run, such as one on a few files of the same source."
        )
    steps = {name: _cost_of(manifest) for name, manifest in manifests.items()}
    return EarlierRun(run.uri, steps, len(inputs), size, all(CRAWL_FOLDER in entry.name for entry in inputs))


def _cost_of(manifest: Manifest) -> BuildCost:
    notes = manifest.run.notes
    return BuildCost(
        manifest.content.counts.rows_in,
        manifest.run.cpu_seconds,
        # Tables of earlier versions have no time of their tasks.
        max(float(notes.get("task_seconds", 0.0)), manifest.run.cpu_seconds),
        int(notes.get("shuffled_bytes", 0)),
        sum(entry.bytes for entry in manifest.content.files),
    )


def step_costs(
    plans: Sequence[StepPlan], measured: Sequence[EarlierRun], factors: Sequence[float]
) -> dict[str, BuildCost]:
    """Return the estimated costs of the steps that a run would build, by name; of those that the earlier runs have.

    `measured`: one run, or two; `factors`: how many times their inputs the input is.
    """
    costs: dict[str, BuildCost] = {}
    for plan in plans:
        known = [cost for run in measured if (cost := _cost_of_step(plan, run)) is not None]
        if not plan.is_complete and len(known) == len(measured):
            whole = known[0].times(factors[0]) if len(known) == 1 else _on_line(known, factors)
            costs[plan.step] = replace(whole.times(1 - plan.share_written), rows=whole.rows)
    return costs


def _cost_of_step(plan: StepPlan, run: EarlierRun) -> BuildCost | None:
    tables = [run.steps[table] for table in plan.tables if table in run.steps]
    if not tables:
        return None
    cost = tables[0]
    for other in tables[1:]:
        cost = replace(cost.plus(other), rows=cost.rows)
    return cost


def _on_line(costs: Sequence[BuildCost], factors: Sequence[float]) -> BuildCost:
    """Return the costs on the lines through those of two runs, by the share of the input that each run had."""
    (small, less), (large, more) = sorted(zip((1 / factor for factor in factors), map(vars, costs)), key=itemgetter(0))
    values = {}
    for name, value in more.items():
        growth = (value - less[name]) / (large - small)
        fixed = value - growth * large
        # Times vary: a cost that shrinks, or that grows faster than its input, is taken in proportion.
        values[name] = fixed + growth if growth >= 0 and fixed >= 0 else value / large
    return BuildCost(**values)


def describe_run(prepared: Prepared, folder: Store, like: Sequence[Store], prices: Prices) -> str:
    """Return what `penstock run --dry-run` prints: each step, why it would be built, and its estimated cost.

    `like`: one or two runs to estimate from; empty: the runs of `--reuse`, or the folder itself. Raises ConfigError if
    one of them is no complete run, or if both have inputs of one size.
    """
    plans = plan_steps(prepared, folder)
    measured = _known_runs(prepared, folder, like)
    factors = [run.factor(prepared) for run in measured]
    if len(factors) == 2 and factors[0] == factors[1]:
        raise ConfigError(
            f"--like: expected two runs on inputs of different sizes, got {measured[0].uri} and {measured[1].uri} on "
            "inputs of one size. Leave one of them out, or name a run on more files."
        )
    costs = step_costs(plans, measured, factors) if measured else {}
    head = ("step", "state", "rows", "core time", "shuffle", "tables")
    rows = [head, *((plan.step, plan.state, *_cells(costs.get(plan.step))) for plan in plans)]
    lines = text_table(rows, align="<<>")
    reasons = [(plan.step, reason) for plan in plans for reason in plan.reasons]
    if reasons:
        lines += ["", "why:", *text_table(reasons, indent="  ")]
    size = sum(split.size for split in prepared.splits)
    lines += ["", f"input: {len(prepared.splits):,} file(s), {format_bytes(size)}"]
    if large := [split.num_ranges for split in prepared.splits if split.num_ranges > 1]:
        lines[-1] += f"; {len(large):,} large file(s) are read in {sum(large):,} ranges"
    if not measured:
        lines += ["cost: not known. Build a part of the input, such as one file, and name that run with --like."]
        return "\n".join(lines)
    total = BuildCost()
    for cost in costs.values():
        total = total.plus(cost)
    money = total.task_seconds / HOUR * prices.core_hour
    month = total.written_bytes / 1e9 * prices.gb_month
    lines += [
        f"cost: {total.task_seconds / HOUR:,.2f} core hours (CPU of the workers {total.cpu_seconds / HOUR:,.2f}), "
        f"{format_bytes(total.shuffled_bytes)} shuffled, {format_bytes(total.written_bytes)} written",
        f"      US$ {money:,.2f} at US$ {prices.core_hour:g} for a core hour, and US$ {month:,.2f} a month at "
        f"US$ {prices.gb_month:g} for a GB of storage",
        f"estimated from {_described_runs(measured, factors)}",
    ]
    if lacking := [plan.step for plan in plans if not plan.is_complete and plan.step not in costs]:
        lines += [f"not included, because {' or '.join(run.uri for run in measured)} lacks them: {', '.join(lacking)}"]
    return "\n".join(lines)


def _described_runs(measured: Sequence[EarlierRun], factors: Sequence[float]) -> str:
    if len(measured) == 1:
        return f"{measured[0].uri}, times {factors[0]:.4g}"
    shares = " and ".join(f"{run.uri} (1/{factor:.4g} of the input)" for run, factor in zip(measured, factors))
    return f"the line through {shares}"


def _known_runs(prepared: Prepared, folder: Store, like: Sequence[Store]) -> list[EarlierRun]:
    if like:
        return [earlier_run(run) for run in like]
    known = [run for run in (*prepared.reuse, folder) if "documents" in current_tables(run)]
    return [earlier_run(run) for run in known[:1]]


def _cells(cost: BuildCost | None) -> tuple[str, ...]:
    if cost is None:
        return ("", "", "", "")
    return (
        f"{cost.rows:,.0f}",
        format_duration(cost.task_seconds),
        format_bytes(cost.shuffled_bytes),
        format_bytes(cost.written_bytes),
    )
