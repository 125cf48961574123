"""A filesystem that forgets: what a command made durable is recorded, and the states that a power loss may leave.

`recorder.c` is loaded into the processes of the command, the JVM included, and logs each change of a name, each fsync
of a folder, and each fsync of a file with the content of the file. POSIX promises after a power loss no more than this:
a file has the content of its last fsync, and a folder the names of its last fsync. Names that changed later may be
there or not. The changes of one folder are kept in their order, as journals of filesystems keep them.
"""

import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pytest

from tests.support.paths import ROOT

SOURCE = Path(__file__).with_name("recorder.c")
FORGETFUL, NAMES, MIXED = "forgetful", "names", "mixed"
KINDS = (FORGETFUL, NAMES, MIXED)
"""What is left of the changes that no fsync has made durable: nothing; every name, without content; some names."""


@dataclass
class Folder:
    """A folder: the names at its last fsync, and the changes since, as (name, node or None) in their order."""

    durable: dict[str, "Node"] = field(default_factory=dict)
    pending: list[tuple[tuple[str, "Node | None"], ...]] = field(default_factory=list)
    names: dict[str, "Node"] = field(default_factory=dict)
    """The names that a process sees."""

    def change(self, *entries: tuple[str, "Node | None"]) -> None:
        """Add, replace or remove (None) names, in one step."""
        apply(self.names, entries)
        self.pending.append(entries)

    def sync(self) -> None:
        """Make the names durable."""
        self.durable, self.pending = dict(self.names), []

    def after(self, changes: int) -> dict[str, "Node"]:
        """Return the durable names with the first so many of the changes since."""
        names = dict(self.durable)
        for entries in self.pending[:changes]:
            apply(names, entries)
        return names


@dataclass
class File:
    """A file: the path of a copy of its content at its last fsync; None = it was never synced."""

    content: Path | None = None
    truncated: bool = False
    """Whether it was truncated after that."""


Node = Folder | File


def apply(names: dict[str, Node], entries: tuple[tuple[str, Node | None], ...]) -> None:
    """Add, replace or remove (None) names."""
    for name, node in entries:
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


@dataclass(frozen=True)
class Recording:
    """The changes below a folder that a command has made, in order."""

    root: Path
    to: Path
    """The folder of the log and of the copies."""

    @property
    def lines(self) -> list[list[str]]:
        """The fields of each change."""
        return [line.split("\t") for line in (self.to / "log").read_text().splitlines()]

    def replay(self) -> Iterator[tuple[int, list[str], Folder]]:
        """Yield the number of changes so far, the last change, and the root, after each change."""
        top = Folder()
        for number, line in enumerate(self.lines, 1):
            self._replay(top, line)
            yield number, line, top

    def at(self, number: int) -> Folder:
        """Return the root after so many changes."""
        return next(root for count, _, root in self.replay() if count == number)

    def _replay(self, top: Folder, line: list[str]) -> None:
        kind, path, second = line
        if Path(path) == self.root:
            if kind == "D":
                top.sync()
            return
        parent, name = self._parent(top, path), Path(path).name
        node = parent.names.get(name)
        if kind == "M":
            parent.change((name, Folder()))
        elif kind == "C" or (node is None and kind == "T"):
            parent.change((name, File()))
        elif kind == "U":
            parent.change((name, None))
        elif kind == "R":
            goal, new = self._parent(top, second), Path(second).name
            assert node is not None, line
            if goal is parent:
                parent.change((name, None), (new, node))
            else:
                goal.change((new, node))
                parent.change((name, None))
        elif kind == "D":
            assert isinstance(node, Folder), line
            node.sync()
        elif isinstance(node, File):  # a file that was removed meanwhile may still be synced
            node.truncated = kind == "T"
            node.content = self.to / second if kind == "S" else node.content

    def _parent(self, top: Folder, path: str) -> Folder:
        folder = top
        for name in Path(path).relative_to(self.root).parent.parts:
            node = folder.names[name]
            assert isinstance(node, Folder), path
            folder = node
        return folder


def write_state(root: Folder, to: Path, kind: str, choose: random.Random) -> None:
    """Write a state that a power loss may leave into a new folder."""
    to.mkdir()
    changes = {FORGETFUL: 0, NAMES: len(root.pending)}.get(kind, choose.randint(0, len(root.pending)))
    for name, node in root.after(changes).items():
        if isinstance(node, Folder):
            write_state(node, to / name, kind, choose)
        elif node.content is None or (node.truncated and kind != FORGETFUL and choose.random() < 0.5):
            (to / name).touch()
        else:
            shutil.copyfile(node.content, to / name)


def durable(root: Folder) -> dict[str, Path | None]:
    """Return path → content of each file that is durable, relative to the root; None = without content."""
    found: dict[str, Path | None] = {}
    for name, node in root.durable.items():
        if isinstance(node, Folder):
            found |= {f"{name}/{path}": content for path, content in durable(node).items()}
        else:
            found[name] = node.content
    return found


@cache
def library(folder: Path) -> Path:
    """Return the compiled recorder; the test is skipped where there is no C compiler."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("the recorder of fsync needs a C compiler")
    path = folder / "recorder.so"
    subprocess.run([compiler, "-shared", "-fPIC", "-O1", "-o", str(path), str(SOURCE), "-ldl"], check=True)
    return path


def recorded(root: Path, to: Path) -> dict[str, str]:
    """Return the environment of a command whose changes below `root` are recorded in the new folder `to`."""
    to.mkdir()
    return os.environ | {"LD_PRELOAD": str(library(to)), "RECORD_ROOT": str(root), "RECORD_TO": str(to)}


def record_script(script: str, root: Path) -> Recording:
    """Run a Python script in the project's folder with its changes below the new folder `root` recorded.

    The script finds the folder in `sys.argv[1]`.
    """
    root.mkdir()
    recording = Recording(root, root.with_name(f"{root.name}-record"))
    words = [sys.executable, "-c", script, str(root)]
    subprocess.run(words, cwd=ROOT, env=recorded(root, recording.to), check=True)
    return recording
