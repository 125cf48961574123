"""Deduplication measured: growth with size, skew, memory, bytes shuffled, and an estimate for a whole crawl.

    python -m bench.dedup [--documents 25000 50000] [--full] [--skew] [--partitions N] [--keep FOLDER]
    python -m bench.dedup --control RECIPE [--set SETTING=VALUE]

Corpora have known copies (see dedup_corpus); their documents are signed and written directly, so what is measured are
the steps `clusters` and `dedup`. Each run is a process of its own: CPU seconds, memory (proportional set size) and
scratch on disk are those of its whole tree, sampled from /proc: other load on the machine moves the wall clock alone.
`--full` takes 1, 2, 4 and 8 x 10^5 documents. `--control` shows what the settings of a recipe do to near misses and
planted copies (see dedup_control).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jobs.spark_session import SparkConfig, open_session
from pipeline.dedup.config import DedupConfig
from pipeline.dedup.keys import layout
from pipeline.minhash.stage import SignatureConfig
from pipeline.prepare import prepare
from pipeline.run import run_steps
from schemas.config import Recipe
from schemas.storage import Store
from tests.support.dedup_control import recipe_for, run_control
from tests.support.dedup_corpus import Law, Stock, default_stock, documents_of, url_of
from tests.support.dedup_oracle import expected_recall
from tests.support.dedup_tables import Text, columns_of, recipe_of, table_of, write_documents

FULL = (100_000, 200_000, 400_000, 800_000)
STEPS = ("clusters", "dedup")
SAMPLE_SECONDS = 0.25
DISK_SECONDS = 2.0
CRAWL_PAGES = 3e9
PROPORTIONAL = 1.15
SKEWED = 1.5
LEVELS = ((1.0, 2.0), (0.9, 1.0), (0.8, 0.9), (0.7, 0.8), (0.6, 0.7), (0.4, 0.6))
TICKS = os.sysconf("SC_CLK_TCK")
STOCK: list[Stock] = []
"""What corpora are made of, loaded once and inherited by the processes that write."""


@dataclass(frozen=True)
class CorpusTexts:
    """The documents of a corpus, split by split; what is known of them is put beside the run."""

    law: Law
    folder: Path

    def __call__(self, split: int) -> Iterator[Text]:
        """The documents of a split."""
        facts = []
        for copy in documents_of(STOCK[0], self.law, split):
            facts.append((copy.family, copy.operation != "base", copy.similarity))
            yield Text(url_of(copy.number), copy.text)
        np.save(self.folder / f"truth-{split:05d}.npy", np.array(facts, np.float64))


@dataclass
class Sample:
    """The process tree at one moment."""

    at: float
    cpu: float
    jvm: int
    worker: int
    """Largest Python worker [bytes]."""
    total: int
    disk: int


@dataclass
class Figures:
    """What one step took."""

    wall: float
    cpu: float
    jvm: int
    worker: int
    total: int
    disk: int


@dataclass
class Run:
    """One measured run."""

    law: Law
    steps: dict[str, Figures]
    shuffled: int
    """Bytes that Spark shuffled in both steps, as far as their manifests say."""
    stored: dict[str, int]
    """Bytes of each table."""
    signature_seconds: float
    notes: dict[str, Any] = field(default_factory=dict)

    @property
    def cpu(self) -> float:
        """CPU seconds of both steps."""
        return sum(step.cpu for step in self.steps.values())

    @property
    def wall(self) -> float:
        """Seconds of both steps."""
        return sum(step.wall for step in self.steps.values())


@dataclass(frozen=True)
class Process:
    """One process: a number may be used again, with another start."""

    pid: int
    started: int


def tree_of(root: int) -> dict[Process, tuple[str, float]]:
    """Command and own CPU seconds of a process and of all its descendants."""
    children: dict[int, list[int]] = {}
    found: dict[int, tuple[Process, tuple[str, float]]] = {}
    for entry in os.scandir("/proc"):
        if entry.name.isdigit():
            try:
                text = Path(entry.path, "stat").read_text()
            except OSError:
                continue  # it ended
            pid, fields = int(entry.name), text[text.rindex(")") + 2 :].split()
            children.setdefault(int(fields[1]), []).append(pid)
            name = text[text.index("(") + 1 : text.rindex(")")]
            found[pid] = (Process(pid, int(fields[19])), (name, sum(map(int, fields[11:13])) / TICKS))
    tree, queue = {}, [root]
    for pid in queue:
        if pid in found:
            process, facts = found[pid]
            tree[process] = facts
        queue += children.get(pid, [])
    return tree


def memory_of(pid: int) -> int:
    """Proportional set size of a process [bytes]; 0 once it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("Pss:")), 0)


def size_of(folders: Sequence[Path]) -> int:
    """Bytes of the files below some folders."""
    total = 0
    for folder in folders:
        for where, _, names in os.walk(folder):
            for name in names:
                try:
                    total += os.stat(f"{where}/{name}").st_size
                except OSError:
                    continue  # it was removed
    return total


class Watch:
    """Samples a process tree until it is stopped."""

    def __init__(self, root: int, scratch: Sequence[Path]):
        self.samples: list[Sample] = []
        self._root, self._scratch = root, scratch
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End sampling."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        disk, looked = 0, 0.0
        spent: dict[Process, float] = {}  # of those that have ended too: Spark's daemon waits for none of its workers
        while not self._ended.wait(SAMPLE_SECONDS):
            now = time.time()
            if now - looked > DISK_SECONDS:
                disk, looked = size_of(self._scratch), now
            tree = tree_of(self._root)
            spent |= {process: seconds for process, (_, seconds) in tree.items()}
            memory = {process: memory_of(process.pid) for process in tree}
            jvm = sum(memory[process] for process, (name, _) in tree.items() if name == "java")
            workers = [
                memory[process] for process, (name, _) in tree.items() if name != "java" and process.pid != self._root
            ]
            sample = Sample(now, sum(spent.values()), jvm, max(workers, default=0), sum(memory.values()), disk)
            self.samples.append(sample)

    def between(self, start: float, end: float) -> Figures:
        """What was spent between two moments, and the peaks."""
        times = [sample.at for sample in self.samples]
        cpu = np.interp([start, end], times, [sample.cpu for sample in self.samples])
        inside = [sample for sample in self.samples if start <= sample.at <= end] or self.samples[-1:]
        peaks = (max(getattr(sample, name) for sample in inside) for name in ("jvm", "worker", "total", "disk"))
        return Figures(end - start, float(cpu[1] - cpu[0]), *peaks)


def child(folder: Path, settings: dict[str, Any], num_splits: int) -> None:
    """Run the steps in this process and print when each began and ended."""
    recipe = recipe_of(folder, num_splits, settings)
    local = {"spark.local.dir": str(folder / "spark")}
    spark = open_session(SparkConfig(settings=local), "bench_dedup")
    try:
        for step in ("verdicts", *STEPS):
            started = time.time()
            run_steps(spark, prepare(recipe, step), Store(str(folder)), None)
            print(json.dumps({step: [started, time.time()]}), flush=True)
    finally:
        spark.stop()


def measure(law: Law, folder: Path, settings: dict[str, Any]) -> Run:
    """Write the corpus and run the steps over it, watched."""
    folder.mkdir(parents=True, exist_ok=True)
    recipe: Recipe = recipe_of(folder, law.splits, settings)
    signed = write_documents(folder, recipe, CorpusTexts(law, folder), os.cpu_count() or 1)
    command = [sys.executable, "-m", "bench.dedup", "--child", str(folder), json.dumps([settings, law.splits])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        watch = Watch(process.pid, [folder / "spark", folder / "clusters", folder / "dedup"])
        output, errors = process.communicate()
        watch.stop()
    if process.returncode:
        raise RuntimeError(f"bench_dedup: the run over {law.documents} documents failed:\n{errors[-3000:]}")
    marks: dict[str, list[float]] = {}
    for line in output.splitlines():
        if line.startswith("{"):
            marks |= json.loads(line)
    tables = {name: table_of(folder, name).manifest for name in ("documents", *STEPS)}
    notes = {name: tables[name].run.notes for name in STEPS}
    return Run(
        law,
        {step: watch.between(*marks[step]) for step in STEPS},
        sum(int(note.get("shuffled_bytes", 0)) for note in notes.values()),
        {name: sum(entry.bytes for entry in manifest.content.files) for name, manifest in tables.items()},
        signed,
        notes,
    )


def print_run(run: Run, before: Run | None) -> None:
    """One line a step, and one for both against the run before it."""
    count = run.law.documents
    for name, step in run.steps.items():
        megabytes = [f"{value / 1e6:>8.0f}" for value in (step.jvm, step.worker, step.total, step.disk)]
        line = f"{count:>9} {name:<9} {step.wall:>8.1f} {step.cpu:>8.1f} {step.cpu / count * 1e3:>8.3f}"
        print(f"{line} {' '.join(megabytes)}")
    line = f"{count:>9} {'both':<9} {run.wall:>8.1f} {run.cpu:>8.1f} {run.cpu / count * 1e3:>8.3f}"
    if before is not None:
        more = run.law.documents / before.law.documents
        line += f"  {more:.2f} x the documents: CPU {run.cpu / before.cpu / more:.3f}, "
        line += f"wall {run.wall / before.wall / more:.3f} x proportional (asked: at most {PROPORTIONAL})"
    print(line)
    print(
        f"{'':>9} shuffled {run.shuffled / count:.0f} bytes a document; {json.dumps(run.notes['clusters'])}", flush=True
    )


def print_truth(law: Law, folder: Path, config: DedupConfig) -> None:
    """Recall and precision against the families of the corpus."""
    facts = np.concatenate([np.load(path) for path in sorted(folder.glob("truth-*.npy"))])
    families, copied, similarity = facts[:, 0].astype(np.int64), facts[:, 1] > 0, facts[:, 2]
    table = columns_of(folder, "clusters", ["doc_id", "cluster", "leader"])
    ids = {name: place for place, name in enumerate(table.column("doc_id").to_pylist())}
    clusters = np.array([ids[name] for name in table.column("cluster").to_pylist()])
    leaders = np.array([ids.get(name, -1) for name in table.column("leader").to_pylist()])
    base = np.zeros(families.max() + 1, np.int64)
    base[families[~copied]] = np.flatnonzero(~copied)
    together = clusters == clusters[base[families]]
    signed = SignatureConfig()
    bands = layout(config, signed)
    print(f"{'':>9} copies in one cluster with their base, by exact similarity (expected: base and copy alone)")
    for low, high in LEVELS:
        chosen = copied & (similarity >= low) & (similarity < high)
        expected = expected_recall(similarity[chosen], config.min_similarity, bands, signed.permutations)
        if chosen.any():
            found = f"{int(chosen.sum()):>8} copies {together[chosen].mean():.4f}, expected {expected:.4f}"
            print(f"{'':>9} {low:.1f} to {min(high, 1):.1f} {found}")
    joined = leaders >= 0
    wrong = int((families[joined] != families[leaders[joined]]).sum())
    mixed = len(set(zip(clusters.tolist(), families.tolist()))) - len(set(clusters.tolist()))
    print(
        f"{'':>9} joined with a document of another family: {wrong} of {int(joined.sum())}; families in excess: {mixed}"
    )


def print_estimate(runs: Sequence[Run]) -> None:
    """What a whole crawl would take, by the slope between the two largest runs."""
    small, large = runs[-2:]
    more = large.law.documents - small.law.documents
    cpu = (large.cpu - small.cpu) / more
    shuffled = (large.shuffled - small.shuffled) / more
    scratch = max(step.disk for step in large.steps.values()) / large.law.documents
    stored = {name: size / large.law.documents for name, size in large.stored.items()}
    signed = large.signature_seconds / large.law.documents
    lines = [
        ("clusters + dedup", cpu / 3600, "core-hours", f"{cpu * 1e3:.3f} ms"),
        ("signatures", signed / 3600, "core-hours", f"(in the documents pass) {signed * 1e3:.3f} ms"),
        ("shuffled", shuffled / 1e12, "TB", f"{shuffled:.0f} bytes"),
        ("scratch, at its peak", scratch / 1e12, "TB", f"{scratch:.0f} bytes"),
        *((f"table {name}", size / 1e12, "TB", f"{size:.0f} bytes") for name, size in stored.items()),
    ]
    print(f"\nOne Common Crawl snapshot: {CRAWL_PAGES:.0e} pages")
    for name, value, unit, each in lines:
        print(f"  {name:<22} {value * CRAWL_PAGES:>9.1f} {unit:<11} {each} a document")
    law = large.law
    sizes = f"between {small.law.documents} and {law.documents}"
    families = (
        f"{law.duplicated:.0%} belong to a family, and families of k fall as k^-{law.exponent}, up to {law.largest}"
    )
    print(
        f"  Assumed: what another document costs {sizes} is what it costs at any size (parts, and so\n"
        "  sorted runs, are of a fixed size, and partitions grow with the crawl); of all pages\n"
        f"  {families}; 14 bands of 8; signatures of 500 words;\n"
        "  cores like this one; no task fails, and none waits for the network or for the storage."
    )


def control(recipe: str, overrides: Sequence[str]) -> None:
    """Print what the settings of a recipe do to near misses and planted copies."""
    spark = open_session(SparkConfig(), "bench_dedup")
    try:
        with tempfile.TemporaryDirectory(prefix="penstock-bench-dedup-") as name:
            folder = Path(name)
            print("\n".join(run_control(spark, folder, recipe_for(folder, recipe, overrides)).lines()))
    finally:
        spark.stop()


def main() -> None:
    """Measure what is asked for and print it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, nargs="+", default=(25_000, 50_000))
    parser.add_argument("--full", action="store_true", help="1, 2, 4 and 8 x 10^5 documents")
    parser.add_argument("--skew", action="store_true", help="the largest size again, half of all documents identical")
    parser.add_argument("--partitions", type=int, help="dedup.partitions")
    parser.add_argument("--keep", type=Path, help="folder for the runs, kept")
    parser.add_argument("--control", metavar="RECIPE", help="a recipe whose settings the control is run with")
    parser.add_argument("--set", action="append", default=[], metavar="SETTING=VALUE", help="a setting of --control")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        settings, num_splits = json.loads(arguments.child[1])
        child(Path(arguments.child[0]), settings, num_splits)
        return
    if arguments.control:
        control(arguments.control, arguments.set)
        return
    settings = {"dedup": {"partitions": arguments.partitions}} if arguments.partitions else {}
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="penstock-bench-dedup-"))
    STOCK.append(default_stock())
    laws = [Law(documents) for documents in (FULL if arguments.full else arguments.documents)]
    print(f"documents of {STOCK[0].origin}; memory and disk at their peaks [MB], CPU a document [ms]")
    head = "".join(f"{name:>9}" for name in ("wall s", "CPU s", "CPU ms", "JVM", "worker", "all", "disk"))
    print(f"{'documents':>9} {'step':<8}{head}", flush=True)
    runs: list[Run] = []
    try:
        for law in laws + ([Law(laws[-1].documents, skew=0.5)] if arguments.skew else []):
            own = folder / f"{law.documents}-{law.skew}"
            runs.append(measure(law, own, settings))
            if law.skew:
                print(f"half of all documents are one text ({law.documents}):")
            print_run(runs[-1], runs[-2] if len(runs) > 1 and not law.skew else None)
            print_truth(law, own, DedupConfig(**settings.get("dedup", {})))
            if arguments.keep is None:
                shutil.rmtree(own, ignore_errors=True)
    finally:
        if arguments.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    plain = [run for run in runs if not run.law.skew]
    for run in runs[len(plain) :]:
        ratio = [getattr(run, name) / getattr(plain[-1], name) for name in ("cpu", "wall")]
        print(f"\nskewed / unskewed: CPU {ratio[0]:.2f}, wall {ratio[1]:.2f} (asked: at most {SKEWED})")
    if len(plain) > 1:
        print_estimate(plain)


if __name__ == "__main__":
    main()
