"""The files that `penstock summary` wrote into a run or into runs in its subfolders; a takedown deletes them.

They name domains, sources and files, so they may name what was taken down. Each has the versions of the tables that it
was made from.
"""

from collections.abc import Iterator

from schemas.leases import check_before_delete
from schemas.paths import check_deletable
from schemas.storage import Store
from schemas.takedown import CROISSANT, SUMMARIES, Certificate
from schemas.versions import attached_runs


def papers_of(run: Store) -> list[str]:
    """Return the files that `penstock summary` wrote, relative to the run: of it, and of runs on its tables."""
    return [f"{folder}{name}" for folder in _folders(run) for name in _papers_in(run.child(folder) if folder else run)]


def _folders(run: Store) -> list[str]:
    """Return the folders, with a slash at the end, of a run and of the runs in its subfolders."""
    return ["", *(f"{folder}/" for folder in attached_runs(run))]


def _papers_in(run: Store) -> list[str]:
    names = [f"{SUMMARIES}/{name}" for name in run.child(SUMMARIES).walk()] if run.exists(SUMMARIES) else []
    return [*names, *([CROISSANT] if run.exists(CROISSANT) else [])]


def delete_papers(run: Store) -> None:
    """Delete what `penstock summary` wrote. A symbolic link in the place of its folder is refused."""
    names = papers_of(run)
    for name in names:
        check_deletable(run, name)
    for name in names:
        check_before_delete(run)
        run.delete(name)


def check_papers(run: Store, certificate: Certificate) -> Iterator[str]:
    """Yield a problem for each file of `penstock summary` that was made from tables with removed documents."""
    old = {f"{name}/{change.version_before}": name for name, change in certificate.tables.items()}
    for name in papers_of(run):
        content = run.read_bytes(name)
        if named := sorted(version for version in old if version.encode() in content):
            yield (
                f"{name}: expected no summary of tables with removed documents, got one of {', '.join(named)}. Delete "
                "it, and write it again with `penstock summary`."
            )
