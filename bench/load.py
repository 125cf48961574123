"""Load: many small files, one large file, many short documents, many runs at once; throughput and memory over time.

    python -m bench.load files [--size 200000] [--keep FOLDER]
    python -m bench.load lines [--size 5000000]
    python -m bench.load archive [--size 2000]
    python -m bench.load runs [--size 24]

`--size` is the number of files, of lines, the size of the archive [MB], or the number of runs. Each case runs the
command line in processes of its own. The memory of the driver, of the JVM and of the largest Python worker is the
proportional set size, sampled each second; the columns are its maxima in each quarter of the time. Throughput is a
second of CPU time of all processes, so that other load on the machine does not change it.
"""

import argparse
import gzip
import json
import os
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

from pipeline.demo_crawl.build import build_demo_crawl
from schemas.manifest import open_table
from schemas.storage import Store

SECONDS = 1.0
TICKS = os.sysconf("SC_CLK_TCK")
KINDS = ("driver", "JVM", "worker")
SENTENCE = "The gate of penstock {0} in valley {1} was closed on day {0}, and the water of lake {1} rose by {2} cm. "


class Sample(NamedTuple):
    """Memory of the processes of a case at a moment: the sum of each kind, of workers the largest [MB]."""

    seconds: float
    driver: float
    jvm: float
    worker: float
    all: float


def processes() -> dict[int, tuple[int, str, float]]:
    """Return parent, command line and CPU time [s] of every process."""
    found = {}
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit():
            continue
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace")
        except OSError:
            continue  # it has ended
        found[int(folder.name)] = (int(fields[1]), command, sum(map(int, fields[11:13])) / TICKS)
    return found


def pss(pid: int) -> float:
    """Return the proportional set size of a process [MB]; 0 if it has ended."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return next((int(line.split()[1]) / 1024 for line in lines if line.startswith("Pss:")), 0.0)


def watch(children: list[subprocess.Popen[bytes]]) -> tuple[list[Sample], float]:
    """Wait for processes; return samples of the memory of their trees, and the CPU time of all of them [s]."""
    started, samples, spent = time.monotonic(), [], dict[int, float]()
    while any(child.poll() is None for child in children):
        table, tree = processes(), {child.pid for child in children}
        for _ in range(6):
            tree |= {pid for pid, (parent, _, _) in table.items() if parent in tree}
        memory = {kind: [0.0] for kind in KINDS}
        for pid in tree & table.keys():
            spent[pid] = max(spent.get(pid, 0.0), table[pid][2])
            kind = "JVM" if "java" in table[pid][1][:40] else "worker" if "worker" in table[pid][1] else "driver"
            memory[kind].append(pss(pid))
        driver, jvm, worker = (memory[kind] for kind in KINDS)
        total = sum(map(sum, memory.values()))
        samples.append(Sample(time.monotonic() - started, max(driver), max(jvm), max(worker), total))
        time.sleep(SECONDS)
    return samples, sum(spent.values())


def many_files(folder: Path, size: int) -> str:
    """Write files of one document each; return the pattern of their names."""
    for number in range(size):
        if number % 1000 == 0:
            (folder / f"{number // 1000:05}").mkdir()
        (folder / f"{number // 1000:05}" / f"{number:07}.jsonl").write_text(line_of(number))
    return f"{folder}/*/*.jsonl"


def many_lines(folder: Path, size: int) -> str:
    """Write one file of documents of one line; return its name."""
    with gzip.open(folder / "lines.jsonl.gz", "wt", compresslevel=1) as stream:
        stream.writelines(line_of(number) for number in range(size))
    return f"{folder}/lines.jsonl.gz"


def line_of(number: int) -> str:
    text = SENTENCE.format(number, number * 7919 % 100_003, number % 97)
    return json.dumps({"url": f"https://h{number % 5000}.example.org/{number}", "text": text}) + "\n"


def large_archive(folder: Path, size: int) -> str:
    """Write one WARC file without compression of `size` MB; return its name."""
    name = folder / "large.warc"
    with name.open("wb") as out:
        number = 0
        while out.tell() < size << 20:
            out.write(page_record(number))
            number += 1
    return str(name)


def page_record(number: int) -> bytes:
    """Return the WARC record of a page of 100 paragraphs, as large as a usual one."""
    sentences = [SENTENCE.format(number * 300 + place, place, number % 97) for place in range(300)]
    paragraphs = "".join(f"<p class='text'>{''.join(sentences[at : at + 3])}</p>" for at in range(0, 300, 3))
    html = f"<html><head><title>Page {number}</title></head><body><main>{paragraphs}</main></body></html>".encode()
    block = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=utf-8\r\n\r\n" + html
    head = (
        "WARC/1.0\r\nWARC-Type: response\r\nContent-Type: application/http; msgtype=response\r\n"
        f"WARC-Target-URI: https://h{number % 5000}.example.org/{number}\r\nWARC-Date: 2026-01-01T00:00:00Z\r\n"
        f"WARC-Record-ID: <urn:uuid:{uuid.UUID(int=number)}>\r\nContent-Length: {len(block)}\r\n\r\n"
    )
    return head.encode() + block + b"\r\n\r\n"


def commands(case: str, size: int, folder: Path) -> tuple[list[list[str]], list[Path]]:
    """Write the inputs of a case; return its commands and the run folders that they write."""
    penstock = [f"{os.path.dirname(sys.executable)}/penstock"]
    if case == "runs":
        build_demo_crawl(folder / "crawl", pages=100, seed=1)
        runs = [folder / f"run-{number:02}" for number in range(size)]
        paths = f'source.paths=["{folder}/crawl/*.warc.gz"]'
        small = ["--set", "spark.master=local[1]", "--set", "spark.driver_memory=512m"]
        return [[*penstock, "stage", "clean", "demo", "--out", str(run), "--set", paths, *small] for run in runs], runs
    make: Callable[[Path, int], str] = {"files": many_files, "lines": many_lines, "archive": large_archive}[case]
    inputs = folder / "inputs"
    inputs.mkdir()
    recipe = ["web", "--out", str(folder / "run"), "--set", f'source.paths=["{make(inputs, size)}"]']
    return [[*penstock, "stage", "documents", *recipe]], [folder / "run"]


def table_of(case: str, size: int, folder: Path) -> Iterator[str]:
    """Run a case; yield the lines of its table."""
    calls, runs = commands(case, size, folder)
    started = time.monotonic()
    children = [subprocess.Popen(call, stdout=subprocess.DEVNULL) for call in calls]
    samples, cpu = watch(children)
    wall = time.monotonic() - started
    failed = sum(child.returncode != 0 for child in children)
    rows = parts = 0
    for run in runs:
        manifest = open_table(Store(str(run)), "documents")[1]
        rows, parts = rows + manifest.content.counts.rows_in, parts + len(manifest.content.files)
    yield f"{case} {size:,}: {failed} of {len(children)} failed; {rows:,} rows in {parts:,} parts"
    yield f"  wall {wall:,.0f} s, CPU {cpu:,.0f} s, {rows / cpu:,.0f} rows a CPU second"
    for name in ("driver", "jvm", "worker", "all"):
        quarters = [
            max((getattr(sample, name) for sample in samples if low <= sample.seconds / wall < low + 0.25), default=0)
            for low in (0, 0.25, 0.5, 0.75)
        ]
        yield f"  {name:<7}" + "".join(f"{value:>9,.0f} MB" for value in quarters)


def main() -> None:
    """Run one case and print its table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sizes = {"files": 200_000, "lines": 5_000_000, "archive": 2_000, "runs": 24}
    parser.add_argument("case", choices=sizes)
    parser.add_argument("--size", type=int, help="number of files, lines, runs, or MB of the archive")
    parser.add_argument("--keep", type=Path, help="folder to work in, which stays; default: a temporary one")
    arguments = parser.parse_args()
    size = arguments.size or sizes[arguments.case]
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True)
        print(*table_of(arguments.case, size, arguments.keep), sep="\n")
        return
    with tempfile.TemporaryDirectory(prefix="penstock-load-") as folder:
        print(*table_of(arguments.case, size, Path(folder)), sep="\n")


if __name__ == "__main__":
    main()
