"""Random kills of the processes of a run, and what the run has to be afterwards.

While a command runs, its processes get SIGKILL at random times: each kind with a mean time between two kills, as in a
Poisson process, so that every moment of every step is hit. When a kill ends the command, it is started again.
"""

import json
import os
import posixpath
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path

from pipeline.engine import finished_parts
from pipeline.engine.part_times import FOLDER
from schemas.manifest import MANIFEST_NAME, open_table, read_manifest, read_run
from schemas.storage import Store

DRIVER, EXECUTOR, WORKER, DAEMON = "driver", "executor", "worker", "daemon"
"""Kinds of processes of a data run: the command, its JVM, a Python worker of Spark, and the process that forks them."""
RANK, LAUNCHER = "rank", "launcher"
"""Kinds of processes of a training: a rank, and the process that starts and watches the ranks."""
DAEMON_MODULES = (b"-m\0jobs.workers\0", b"-m\0jobs.workers.redacting\0", b"-m\0pyspark.daemon\0")
"""A part of the command line of Python workers, and of the process that forks them: in runs, and in plain Spark."""
STARTING = "start"
"""The time before the first step begins."""
SECONDS_AFTER = 60.0
"""Maximum time in which the other processes of a killed command end [s]."""


@dataclass(frozen=True)
class Kill:
    """A kill, and how the command took it."""

    kind: str
    step: str
    outcome: str
    """`survived`, or `ended` with the exit code."""
    had_child: bool = False
    """True if the process had a child, as a worker has its watcher while it reads and measures records."""


# ------------------------------------------------------------------------------------------------- processes of a run


def processes() -> tuple[dict[int, list[int]], dict[int, bytes]]:
    """Return the children and the command line of every process of this machine."""
    tree: dict[int, list[int]] = {}
    names: dict[int, bytes] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rsplit(")", 1)[1].split()
                names[int(entry.name)] = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            tree.setdefault(int(fields[1]), []).append(int(entry.name))
    return tree, names


def below(parent: int, tree: dict[int, list[int]]) -> list[int]:
    """Return every process that descends from one."""
    found, pending = [], [parent]
    while pending:
        children = tree.get(pending.pop(), [])
        found += children
        pending += children
    return found


def python_workers(parent: int) -> list[int]:
    """Return the Python processes that Spark started below a process and that have forked from its daemon."""
    daemons, tree = _daemons(parent)
    return [pid for pid in daemons if any(pid in tree.get(other, []) for other in daemons)]


def _daemons(parent: int) -> tuple[list[int], dict[int, list[int]]]:
    tree, names = processes()
    found = [pid for pid in below(parent, tree) if any(module in names.get(pid, b"") for module in DAEMON_MODULES)]
    return found, tree


def victims(kind: str, process: subprocess.Popen[bytes]) -> list[int]:
    """Return the processes of a kind that belong to a command."""
    if kind in (DRIVER, LAUNCHER):
        return [process.pid]
    if kind == WORKER:
        return python_workers(process.pid)
    if kind == DAEMON:
        workers = python_workers(process.pid)
        return [pid for pid in _daemons(process.pid)[0] if pid not in workers]
    tree, names = processes()
    words = {pid: names.get(pid, b"").split(b"\0") for pid in below(process.pid, tree)}
    if kind == EXECUTOR:
        return [pid for pid, given in words.items() if given[0].endswith(b"java")]
    return [pid for pid, given in words.items() if b"train.pretrain" in given]


def kill_one(kind: str, process: subprocess.Popen[bytes], choose: random.Random) -> int | None:
    """Kill a process of a kind that a command has now. Return its id; None if there is none.

    Of workers, those that process records are chosen if there are any: they have a watcher as a child.
    """
    found = victims(kind, process)
    tree = processes()[0] if kind == WORKER else {}
    found = [pid for pid in found if pid in tree] or found
    with suppress(ProcessLookupError):
        if found and process.poll() is None:
            os.kill(chosen := choose.choice(found), signal.SIGKILL)
            return chosen
    return None


def wait_for_end(pids: Sequence[int]) -> None:
    """Wait until processes have ended. Raises TimeoutError if one still runs after SECONDS_AFTER."""
    end = time.monotonic() + SECONDS_AFTER
    while alive := [pid for pid in pids if _is_alive(pid)]:
        if time.monotonic() > end:
            raise TimeoutError(f"processes {alive} still run {SECONDS_AFTER:.0f} s after their command was killed")
        time.sleep(0.05)


def _is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


# ------------------------------------------------------------------------------------------------------- a killed run


def step_of(run: Path, pid: int) -> str:
    """Return the step that a run of a process is in, by its progress file, which is a second old at most."""
    try:
        progress = json.loads((run / "progress.json").read_text())
    except FileNotFoundError:
        return STARTING
    running = [step["name"] for step in progress["steps"] if step["state"] == "running"]
    return running[0] if running and progress["pid"] == pid else STARTING


@dataclass
class Series:
    """A command whose processes are killed at random times until it completes."""

    words: Sequence[str]
    folder: Path
    """Where it runs."""
    means: Mapping[str, float]
    """Mean time between two kills of each kind of process [s]."""
    step: Callable[[int], str]
    """Return the step that the command with a process id is in."""
    choose: random.Random
    environment: dict[str, str] = field(default_factory=lambda: dict(os.environ))
    kills: list[Kill] = field(default_factory=list)
    log: Path | None = None
    """The file that the output of the command is appended to."""
    max_starts: int = 200

    def run(self, number: int) -> None:
        """Run the command with up to this number of kills, and start it again until it completes.

        Raises AssertionError if an undisturbed start does not complete, or if processes outlive a killed command.
        """
        last = len(self.kills) + number
        for _ in range(self.max_starts):
            process = self._start()
            children: list[int] = []
            disturbed = False
            while len(self.kills) < last and self._wait(process):
                tree = processes()[0]
                children = below(process.pid, tree)
                kind = self.choose.choices([*self.means], [1 / mean for mean in self.means.values()])[0]
                step = self.step(process.pid)
                if (killed := kill_one(kind, process, self.choose)) is not None:
                    disturbed = True
                    self.kills.append(Kill(kind, step, self._outcome(kind, process), killed in tree))
            code = process.wait()
            wait_for_end(children)
            if code == 0:
                return
            assert disturbed, f"exit code {code} without a kill: {' '.join(self.words)}\n{self._tail()}"
            if self.kills[-1].outcome == "survived":  # a later task was out of attempts
                self.kills[-1] = replace(self.kills[-1], outcome=f"ended, code {code}")
        raise AssertionError(f"{self.max_starts} starts did not complete: {' '.join(self.words)}")

    def _start(self) -> subprocess.Popen[bytes]:
        with open(self.log or os.devnull, "ab") as output:
            return subprocess.Popen(
                self.words,
                cwd=self.folder,
                env=self.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )

    def _wait(self, process: subprocess.Popen[bytes]) -> bool:
        """Wait until the time of the next kill. Return False if the command ends first."""
        with suppress(subprocess.TimeoutExpired):
            process.wait(self.choose.expovariate(sum(1 / mean for mean in self.means.values())))
        return process.poll() is None

    def _outcome(self, kind: str, process: subprocess.Popen[bytes]) -> str:
        if kind in (WORKER, DAEMON):
            return "survived"
        with suppress(subprocess.TimeoutExpired):
            return f"ended, code {process.wait(SECONDS_AFTER)}"
        raise AssertionError(f"a {kind} was killed: the command runs {SECONDS_AFTER:.0f} s later")

    def _tail(self) -> str:
        return "" if self.log is None else self.log.read_text(errors="replace")[-3000:]


def table(kills: Sequence[Kill]) -> str:
    """Return the kills as a table: the number and the outcomes by kind and step."""
    counts = Counter((kill.kind, kill.step) for kill in kills)
    lines = [f"{'kind':<10}{'step':<18}{'kills':>6}  outcomes"]
    for (kind, step), number in sorted(counts.items()):
        outcomes = Counter(kill.outcome for kill in kills if (kill.kind, kill.step) == (kind, step))
        text = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items()))
        lines.append(f"{kind:<10}{step:<18}{number:>6}  {text}")
    return "\n".join([*lines, f"{'all':<28}{len(kills):>6}"])


# --------------------------------------------------------------------------------------------------- what a run leaves


def digests(run: Path) -> dict[str, str]:
    """Return the digest of each current table of a run, after a comparison of every file with its manifest."""
    store = Store(str(run))
    found = {}
    for name in read_run(store).tables:
        folder, manifest = open_table(store, name)
        found[name] = manifest.digest
        for entry in manifest.content.files:
            content = (Path(folder.root) / manifest.run.paths[entry.key]).read_bytes()
            assert sha256(content).hexdigest() == entry.sha256, (name, entry.key)
    return found


def named_files(run: Path) -> set[str]:
    """Return the files of tables that manifests name, and those of completed parts and their results."""
    names: set[str] = set()
    for path in run.glob(f"*/v-*/{MANIFEST_NAME}"):
        folder = path.parent.relative_to(run).as_posix()
        named = read_manifest(Store(str(path.parent))).run.paths.values()
        names |= {f"{folder}/{MANIFEST_NAME}", *(posixpath.normpath(f"{folder}/{name}") for name in named)}
    for path in run.glob(f"{finished_parts.FOLDER}/*/*.json"):
        files = json.loads(path.read_text())["files"]
        names |= {f"{table}/{written['path']}" for table, written in files.items()}
    for path in run.glob("*/v-*/parts/part-*.json"):
        names.add(path.relative_to(run).as_posix())
        version = path.parent.parent.name
        files = json.loads(path.read_text())["files"]
        names |= {f"{table}/{version}/{written['path']}" for table, written in files.items()}
    return names


def files_of(run: Path) -> set[str]:
    """Return the path of every file of a run, without those of the times and results of parts, which have times."""
    found = {path.relative_to(run).as_posix() for path in run.rglob("*") if path.is_file()}
    return {name for name in found if not name.startswith((f"{FOLDER}/", f"{finished_parts.FOLDER}/"))}


# --------------------------------------------------------------------------------------------------------- small input

WORDS = """
the of and to a in that is was he for it with as his on be at by had not are but from or have an they which
one you were her all she there would their we him been has when who will more no if out so said what up its about into
than them can only other new some could time these two may then do first any my now such like our over man me even most
made after also did many before must through back years where much your way well down should because each just those
people how too little state good very make world still own see men work long get here between both life being under
never day same another know while last might us great old year off come since against go came right used take three
house water river stone garden window winter letter teacher village bread market captain island silver mountain
"""


def various_pages(number: int, seed: int) -> str:
    """Return JSON lines of pages of common English words in random order, which the rules for web pages keep.

    A page has an exact copy, and another one a copy with one word more.
    """
    choose, words = random.Random(seed), WORDS.split()
    lines = []
    for page in range(number):
        sentences = [" ".join(choose.choices(words, k=choose.randint(8, 14))).capitalize() + "." for _ in range(24)]
        text = "\n\n".join(" ".join(sentences[first : first + 4]) for first in range(0, len(sentences), 4))
        lines.append({"url": f"http://site{page % 5}.example.com/{seed}/{page}", "text": text})
    exact, near = choose.sample(lines, 2)
    lines.append({**exact, "url": exact["url"] + "/copy"})
    lines.append({"url": near["url"] + "/near", "text": near["text"] + " Read more."})
    return "".join(f"{json.dumps(line)}\n" for line in lines)
