"""The same archives through Penstock, datatrove, dolma and Data-Juicer, one after the other, in one table.

    python -m tests.bench_race --archives 'crawl/*.warc.gz' [--datatrove PYTHON SCRIPT] [--dolma PYTHON]
                               [--data-juicer PYTHON] [--save]

Each peer runs in an environment of its own, named by its Python; without one it is left out. SCRIPT runs datatrove's
FineWeb recipe and prints its report as a line of JSON. The tools do not all do the same: the column `does` says what
each did. Data-Juicer reads no archives, so it has the texts that dolma extracted. A page is lost without a reason if
nothing that the tool wrote says what became of it. CPU seconds are those of the whole machine: run it on an idle one.
"""

import argparse
import glob
import gzip
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pyarrow.compute as pc
import pyarrow.parquet as pq
from fastwarc.warc import ArchiveIterator, WarcRecordType

from bench.figures import measured_now
from bench.pipeline import machine_cpu
from pipeline.models import ModelsConfig, ensure_model
from schemas.manifest import open_table
from schemas.storage import Store

ROOT = Path(__file__).parents[1]
MEASURES = ("pipeline", "schemas", "jobs/recipes", "jobs/spark_session.py")
RULES = ("alphanumeric", "character_repetition", "word_repetition", "words_num", "special_characters")
LINE_RULES = ("average_line_length", "maximum_line_length")
SAMPLE_SECONDS = 0.25


@dataclass(frozen=True)
class Result:
    """What one tool did with the archives."""

    tool: str
    does: str
    pages: int = 0
    """Pages that it was given."""
    kept: int = 0
    lost: int = 0
    """Pages of which nothing that it wrote says what became of them."""
    cpu: float = 0.0
    """CPU time of the machine [s]."""
    wall: float = 0.0
    peak_mb: float = 0.0
    """Most memory of all its processes together, shared pages counted once [MB]."""

    @property
    def rate(self) -> float:
        """Return the pages per CPU second, the fixed cost of a start included."""
        return self.pages / self.cpu if self.cpu else 0.0


def tree_memory(root: int) -> float:
    """Return the memory of a process and all that it started, in MB; a process that has ended counts as 0."""
    parents: dict[int, int] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                parents[int(entry)] = int(Path(f"/proc/{entry}/stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue  # it has just ended
    own, total = {root}, 0
    for process in sorted(parents):
        while process in parents and process not in own and parents[process] in own:
            own.add(process)
    for process in own:
        try:
            rollup = Path(f"/proc/{process}/smaps_rollup").read_text()
        except OSError:
            continue
        total += next((int(line.split()[1]) for line in rollup.splitlines() if line.startswith("Pss:")), 0)
    return total / 1024


@contextmanager
def measured(costs: dict[str, float]) -> Iterator[None]:
    """Add the CPU time of the machine and the wall time of a block to `costs`."""
    cpu, started = machine_cpu(), time.monotonic()
    yield
    costs["cpu"] = costs.get("cpu", 0.0) + machine_cpu() - cpu
    costs["wall"] = costs.get("wall", 0.0) + time.monotonic() - started


def run(command: Sequence[str], costs: dict[str, float], **environment: str) -> str:
    """Run a command, add its costs, and return its output. Exits with its errors if it fails."""
    with measured(costs), tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=errors, text=True, env=os.environ | environment, cwd=ROOT
        )
        stop = threading.Event()

        def watch() -> None:
            while not stop.wait(SAMPLE_SECONDS):
                costs["peak_mb"] = max(costs.get("peak_mb", 0.0), tree_memory(process.pid))

        watcher = threading.Thread(target=watch)
        watcher.start()
        output, _ = process.communicate()
        stop.set()
        watcher.join()
        if process.returncode:
            errors.seek(0)
            sys.exit(f"{command[0]}: expected exit code 0, got {process.returncode}:\n{errors.read()[-3000:]}")
    return output


def pages_of(paths: Sequence[str]) -> int:
    """Return the number of responses in archives, read by another reader than ours."""
    count = 0
    for path in paths:
        with open(path, "rb") as stream:
            count += sum(1 for _ in ArchiveIterator(stream, record_types=WarcRecordType.response))
    return count


def race_penstock(paths: Sequence[str], folder: Path, recipe: str, does: str) -> Result:
    """Run one of the recipes from archives to tokens."""
    out, costs = str(folder / recipe), dict[str, float]()
    file = str(ROOT / "jobs" / "recipes" / f"{recipe}.toml")
    settings = ("--set", f"source.paths={[*paths]}")
    run([sys.executable, "-m", "jobs.run_all", file, "--out", out, *settings], costs)
    (place, documents), (_, clean) = (open_table(Store(out), name) for name in ("documents", "clean"))
    known = 0
    for path in documents.paths.values():
        with place.open_input(path) as stream:
            kinds = pq.read_table(stream, columns=["record_type"]).column("record_type")
            known += pc.sum(pc.equal(kinds, "response")).as_py() or 0
    pages = pages_of(paths)
    kept = clean.content.counts.rows_kept
    return replace(Result(f"penstock {recipe}", does), pages=pages, kept=kept, lost=pages - known, **costs)


def race_datatrove(paths: Sequence[str], folder: Path, python: str, script: str) -> Result:
    """Run datatrove's FineWeb recipe from archives to tokens."""
    costs = dict[str, float]()
    names = folder / "archives"
    names.mkdir()
    for path in paths:
        (names / Path(path).name).symlink_to(Path(path).resolve())
    model = str(ensure_model("lid.176.ftz", ModelsConfig()).path)
    command = [python, script, "--warcs", f"{names}/*.warc.gz", "--out", str(folder / "datatrove"), "--no-url-filter"]
    command += ["--extractor", "trafilatura", "--quiet", "--tokenizer", str(folder / "tokenizer.json")]
    report = json.loads(run(command, costs, LID_FTZ=model).strip().splitlines()[-1])
    extractor = next(step for step in report["steps"]["main"] if "EXTRAC" in step["step"])
    pages = pages_of(paths)
    lost = pages - report["docs_in"] + extractor["in"] - extractor["out"]
    does = "trafilatura, language, 4 filters, MinHash, addresses, tokens"
    return replace(Result("datatrove", does), pages=pages, kept=report["docs_out"], lost=lost, **costs)


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a compressed text file."""
    with gzip.open(path, "rt", encoding="utf-8") as stream:
        yield from stream


def race_dolma(paths: Sequence[str], folder: Path, python: str) -> Result:
    """Run dolma's extraction of archives and its taggers of Gopher's and C4's rules; it keeps what is mixed later."""
    costs, texts = dict[str, float](), folder / "dolma" / "documents"
    tool = str(Path(python).with_name("dolma"))
    texts.mkdir(parents=True)
    names = ("--documents", *paths)
    run([tool, "warc", *names, "--destination", str(texts), "--processes", "2", "--source_name", "race"], costs)
    taggers = ("--taggers", "gopher_v1", "c4_v2", "--experiment", "race", "--processes", "2")
    run([tool, "tag", "--documents", f"{texts}/*.gz", *taggers], costs)
    kept = sum(1 for path in texts.glob("*.gz") for _ in lines_of(path))
    pages = pages_of(paths)
    does = "resiliparse, signals of Gopher and C4"
    return replace(Result("dolma", does), pages=pages, kept=kept, lost=pages - kept, **costs)


def race_data_juicer(folder: Path, python: str) -> Result:
    """Run seven of Data-Juicer's rules on the texts that dolma extracted."""
    costs, source, pages = dict[str, float](), folder / "texts.jsonl", 0
    with source.open("w") as out:
        for path in sorted((folder / "dolma" / "documents").glob("*.gz")):
            for line in lines_of(path):
                out.write(json.dumps({"text": json.loads(line)["text"]}) + "\n")
                pages += 1
    target = folder / "juicer" / "out.jsonl"
    lines = ["project_name: race", f"dataset_path: {source}", f"export_path: {target}", "np: 2", "process:"]
    config = folder / "juicer.yaml"
    config.write_text("\n".join([*lines, *(f"  - {name}_filter:" for name in (*RULES, *LINE_RULES))]) + "\n")
    run([str(Path(python).with_name("dj-process")), "--config", str(config)], costs)
    kept = len(target.read_text().splitlines())
    does = "7 rules on texts, no extraction"
    return replace(Result("data-juicer", does), pages=pages, kept=kept, lost=pages - kept, **costs)


def main() -> None:
    """Parse the arguments, run every tool, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archives", required=True, help="glob of WARC files")
    parser.add_argument("--datatrove", nargs=2, metavar=("PYTHON", "SCRIPT"))
    parser.add_argument("--dolma", metavar="PYTHON")
    parser.add_argument("--data-juicer", metavar="PYTHON", help="needs --dolma")
    parser.add_argument("--save", action="store_true", help="store the figures for the documentation")
    arguments = parser.parse_args()
    paths = sorted(glob.glob(arguments.archives))
    every = "language, rules, templates, classifier, toxicity, MinHash, audit, PII, tokens"
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        racers: list[Callable[[], Result]] = [
            lambda: race_penstock(paths, folder, "web", f"own extractor, {every}"),
            lambda: race_penstock(
                paths, folder, "fineweb", "trafilatura, language, rules, MinHash, audit, PII, tokens"
            ),
        ]
        if arguments.datatrove:
            racers.append(lambda: race_datatrove(paths, folder, *arguments.datatrove))
        if arguments.dolma:
            racers.append(lambda: race_dolma(paths, folder, arguments.dolma))
        if arguments.data_juicer:
            racers.append(lambda: race_data_juicer(folder, arguments.data_juicer))
        names = ("pages", "a CPU s", "CPU s", "wall s", "peak MB", "kept", "lost")
        print(" " * 18, *(f"{name:>8s}" for name in names))
        figures = {}
        for race in racers:
            result = race()
            print(
                f"{result.tool:18s} {result.pages:8,d} {result.rate:8.1f} {result.cpu:8.1f} {result.wall:8.1f} "
                f"{result.peak_mb:8,.0f} {result.kept:8,d} {result.lost:8,d}  {result.does}",
                flush=True,
            )
            key = result.tool.replace(" ", "_").replace("-", "_")
            for figure in ("pages", "rate", "cpu", "wall", "peak_mb", "kept", "lost"):
                figures[f"{key}_{figure}"] = getattr(result, figure)
    if arguments.save:
        measured_now("python -m tests.bench_race", MEASURES, figures).save("race")


if __name__ == "__main__":
    main()
