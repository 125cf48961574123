"""Paths of files that a test wrote, as the manifest of a table would name them."""

from collections.abc import Mapping

from pipeline.engine.parquet import Part
from schemas.storage import CheckedPath, Store


def checked(folder: Store, path: str) -> CheckedPath:
    """Return the path of a file with its present size and SHA-256."""
    return CheckedPath(path, folder.size(path), folder.sha256(path))


def written_part(ordinal: int, folders: Mapping[str, Store], paths: Mapping[str, str]) -> Part:
    """Return a part of several tables whose files a test wrote."""
    return Part(ordinal, folders, {name: checked(folders[name], path) for name, path in paths.items()})
