"""The model of docs/extend/model.md, installed in a folder: its package and declaration, as pip leaves them."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.rules.test_extend import TEXTS, blocks_of

PACKAGE, FUNCTION = "short_memory", "short_memory.model:build"


def source_of_page() -> str:
    """Return the model of the page as source text."""
    (block,) = [b for b in blocks_of(TEXTS["model.md"]) if b.attributes.get("new") == f"{PACKAGE}/model.py"]
    return block.text


def install(folder: Path, source: str, declares: bool = True) -> None:
    """Write the package with its declaration into a folder."""
    package, declared = folder / PACKAGE, folder / f"{PACKAGE}-1.0.dist-info"
    package.mkdir(parents=True, exist_ok=True)
    (package / "model.py").write_text(source, encoding="utf-8")
    if declares:
        declared.mkdir(exist_ok=True)
        (declared / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {PACKAGE}\nVersion: 1.0\n", encoding="utf-8")
        (declared / "entry_points.txt").write_text(f"[penstock.models]\n{PACKAGE} = {FUNCTION}\n", encoding="utf-8")


@contextmanager
def importable(folder: str) -> Iterator[None]:
    """Make the packages of a folder importable for this process while the block runs."""
    _forget()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)
        _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == PACKAGE]:
        del sys.modules[name]
