"""What a run would change in its folder, found before Spark starts, and why.

The identity of a step follows from its settings, models and inputs, so it is known until the first step that must be
built. The steps after that one change too, because they read a table of another version.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from pipeline.engine.code_digest import code_digest
from pipeline.engine.step import Step
from pipeline.run import Prepared, find_version, read_tables, step_content
from pipeline.stages import STEPS
from schemas.config import SEPARATOR, SOURCE, suggest_name
from schemas.errors import ConfigError
from schemas.manifest import FROM_INPUT, MANIFEST_NAME, Content, TableVersion, read_manifest, read_run
from schemas.storage import Store
from schemas.text import format_bytes

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
