"""The repair of a run: damaged and missing files of its tables are built again from the inputs of their step.

A rebuilt file replaces a damaged one only if it has the SHA-256 that the manifest names, so that manifests and digests
stay as they are. Of tables whose parts are built one by one, only the damaged parts are built. Tables that need all
rows, such as those of deduplication, are built as a whole in a scratch folder, and only the damaged files are taken.
"""

import os
import posixpath
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from shlex import quote
from typing import Any

from pipeline.engine.spark import ship_models, show_progress
from pipeline.engine.step import Step, TableResult
from pipeline.garbage import REPAIR, REPAIR_FILE
from pipeline.prepare import Prepared, find_version, run_of, shipped_models
from pipeline.run import Run, context_of
from schemas.errors import ConfigError, ContractError
from schemas.long_work import LongWork
from schemas.manifest import MEMBER_INPUT, RUN_NAME, TableVersion, open_table, part_key, read_run
from schemas.paths import check_deletable, check_unlinked_tables
from schemas.storage import CheckedPath, Store
from schemas.tables import TABLES
from schemas.takedown import takedown_ancestry
from schemas.versions import source_runs

Keys = Mapping[str, frozenset[str]]
"""Keys of files by table."""


@dataclass(frozen=True)
class DamagedFile:
    """A file of a table that is missing, or that differs from the manifest."""

    table: str
    key: str
    path: CheckedPath
    found: str
    """Its SHA-256, or why it could not be read."""

    @property
    def text(self) -> str:
        """A line on the file: its name, and what was expected and found."""
        return f"{self.table}/{self.path}: expected SHA-256 {self.path.sha256}, got {self.found}"


def own_tables(run: Store) -> dict[str, TableVersion]:
    """Return the tables of a run that its `run.json` names in its own folder, in order.

    They need not be up to date: a dataset that was made with other settings is still trained on.
    """
    tables = read_run(run).tables
    own = [name for name in TABLES if name in tables and "/" not in tables[name]]
    return {name: TableVersion(*open_table(run, name, even_replaced=True)) for name in own}


def find_damage(tables: Mapping[str, TableVersion]) -> list[DamagedFile]:
    """Return the files of tables that are missing or differ from their manifests, in order. Every file is read."""
    files = [
        (name, table.folder, key, path) for name, table in tables.items() for key, path in table.manifest.paths.items()
    ]
    with LongWork("check files", sum(file[3].num_bytes for file in files), "bytes") as work:

        def check(file: tuple[str, Store, str, CheckedPath]) -> DamagedFile | None:
            name, folder, key, path = file
            try:
                found = folder.sha256(path)
            except FileNotFoundError:
                found = "no such file"
            except ContractError:
                found = "a folder, pipe or device"
            except OSError as error:
                found = f"an error: {error}"
            work.add(path.num_bytes)
            return None if found == path.sha256 else DamagedFile(name, key, path, found)

        with ThreadPoolExecutor(max_workers=os.cpu_count()) as pool:
            return [damage for damage in pool.map(check, files) if damage is not None]


def steps_to_repair(prepared: Prepared, run: Store, damage: Sequence[DamagedFile]) -> list[tuple[Step, Keys]]:
    """Return the steps that wrote the damaged files, in order, each with the keys of the files by table.

    Raises ContractError, before Spark starts, if such a step would now write another version, since its settings,
    models, inputs or stages have changed, if a takedown has rewritten a damaged file, or if the file is that of a
    member of a union. Raises ConfigError if the folder `repair` of the run belongs to somebody else.
    """
    check_scratch(run)
    check_unlinked_tables(run, {file.table for file in damage})
    tables = own_tables(run)
    if members := sorted({member for file in damage if (member := member_with(tables[file.table], file.path))}):
        raise ContractError(
            f"{run.uri}: expected damaged files of this run, got files of {' and '.join(members)}, whose datasets it "
            f"joins. Run `penstock repair {quote(members[0])}`."
        )
    keys: dict[str, set[str]] = {}
    for file in damage:
        check_not_rewritten(tables[file.table], file)
        keys.setdefault(file.table, set()).add(file.key)
    found: list[tuple[Step, Keys]] = []
    for step in prepared.steps:
        damaged = {name: frozenset(keys[name]) for name in step.writes if name in keys}
        if not damaged:
            continue
        folders, _ = find_version(prepared, step, inputs_of(prepared, step, tables), run)
        changed = [name for name in step.writes if name in tables and folders[name].root != tables[name].folder.root]
        if changed:
            raise ContractError(
                f"{run.uri}: expected the settings, models and inputs that {', '.join(changed)} was built from, got "
                f"others, so that the step {step.name} would write another version. Restore the damaged files from a "
                "backup, or undo the change."
            )
        found.append((step, damaged))
    if lost := sorted(keys.keys() - {name for _, damaged in found for name in damaged}):
        raise ContractError(
            f"{run.uri}: expected a recipe with the step that writes {', '.join(lost)}, got one that does not use it. "
            "Restore the damaged files from a backup."
        )
    return found


def member_with(table: TableVersion, path: str) -> str | None:
    """Return the URI of the member of a union that has one of the union's files; None = the file is the run's own."""
    lineage = table.manifest.run.lineage
    for member in (version for name, version in lineage.items() if name.startswith(MEMBER_INPUT)):
        if path.startswith(f"{posixpath.normpath(f'../{member}/..')}/"):
            return table.folder.child(f"../{member}/../..").uri
    return None


def check_not_rewritten(table: TableVersion, file: DamagedFile) -> None:
    """Raise ContractError if a takedown has rewritten a damaged file: its step would write the removed documents."""
    for certificate in takedown_ancestry(run_of(table), table.manifest):
        rewritten = certificate.tables[file.table].rewritten
        if any((change.key, change.after) == (file.key, file.path.sha256) for change in rewritten):
            raise ContractError(
                f"{table.folder.uri}/{file.path}: expected a file that its step can build again, got one from which "
                f"takedown {certificate.id} has removed documents. Restore it from a backup that is newer than the "
                "takedown."
            )


def repair(spark: Any, prepared: Prepared, run: Store, steps: Sequence[tuple[Step, Keys]]) -> list[str]:
    """Build damaged files of a run again and put them in place. Return the names of the files, `table/path`.

    The caller holds the lock on the tables. `steps` is what `steps_to_repair` returned. Raises ContractError if a file
    that was built again does not have the SHA-256 that its manifest names; the files before it are repaired then.
    """
    delete_scratch(run)  # of a killed repair
    try:
        return _repair(Run(**vars(prepared), spark=spark, folder=run, partitions=None), steps)
    finally:
        delete_scratch(run)


def _repair(session: Run, steps: Sequence[tuple[Step, Keys]]) -> list[str]:
    run, repaired = session.folder, list[str]()
    with show_progress(session.spark, "penstock repair", [step.name for step, _ in steps], run) as progress:
        if session.spark is not None:
            ship_models(session.spark, [model.file for model in shipped_models(session.models)])
        for step, keys in steps:
            tables = own_tables(run)
            folders = {name: run.child(f"{REPAIR}/{name}") for name in step.writes}
            with progress.step(step.name):
                context = context_of(session, step, inputs_of(session, step, tables), folders)
                built = step.build(replace(context, only=part_numbers(set().union(*keys.values()))))
                for name, damaged in keys.items():
                    repaired += put_in_place(run, tables[name], damaged, (name, built[name]))
    return repaired


def inputs_of(prepared: Prepared, step: Step, tables: Mapping[str, TableVersion]) -> dict[str, TableVersion]:
    """Return the tables that a step reads, those of other runs included."""
    own = {name: tables[name] for name in step.inputs(prepared.recipe) if name in tables}
    return own | step.external_inputs(prepared.recipe, prepared.splits)


def part_numbers(keys: Iterable[str]) -> frozenset[int] | None:
    """Return the numbers of the parts with these keys; None if a key is not that of a part, such as `model`."""
    numbers = {key: int(key.rpartition("-")[2]) for key in keys if key.rpartition("-")[2].isdigit()}
    is_part = all(key in numbers and part_key(numbers[key]) == key for key in keys)
    return frozenset(numbers.values()) if is_part else None


def put_in_place(run: Store, table: TableVersion, keys: Iterable[str], made: tuple[str, TableResult]) -> list[str]:
    """Move the rebuilt files of one table to the paths of the damaged ones, and return their names.

    `made` is (table, what its step built). Raises ContractError if a rebuilt file differs from the manifest.
    """
    name, built = made
    names: list[str] = []
    files = {entry.key: entry for entry in built.files}
    for key in sorted(keys):
        path = table.manifest.paths[key]
        digest = files[key].sha256 if key in files else "no such file"
        if digest != path.sha256:
            raise ContractError(
                f"{table.folder.uri}/{path}: expected a file with SHA-256 {path.sha256} from building it again, got "
                f"{digest}: inputs, libraries or code differ from those of {table.manifest.run.started}. Restore the "
                "file from a backup, or build a new run."
            )
        run.move(f"{REPAIR}/{name}/{built.paths[key]}", f"{name}/{table.folder.root.rpartition('/')[2]}/{path}")
        names.append(f"{name}/{path}")
    return names


def check_scratch(run: Store) -> None:
    """Raise ConfigError if the folder in which tables are built again has other files, such as those of another run."""
    for name in run.child(REPAIR).walk():
        if not REPAIR_FILE.fullmatch(f"{REPAIR}/{name}") or posixpath.basename(name) == RUN_NAME:
            raise ConfigError(
                f"{run.uri}/{REPAIR}: expected files of a killed `penstock repair` or no such folder, got {name}. Move "
                "the folder to another place."
            )


def delete_scratch(run: Store) -> None:
    """Delete the folder in which tables are built again. Raises ConfigError if it has files of somebody else."""
    check_scratch(run)
    if run.exists(REPAIR):
        check_deletable(run, f"{REPAIR}/x")
        run.delete_folder(REPAIR)


def owners_of(run: Store) -> list[str]:
    """Return the URIs of other runs whose tables this run uses, which must be repaired in their own folders."""
    return [folder.uri for folder in source_runs(run)]
