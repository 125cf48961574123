"""What a snapshot costs: CPU time, shuffle and storage of 8 times the input, predicted from 1, 2 and 4 times.

    python -m tests.bench_snapshot --archives 'crawl/*.warc.gz' [--recipe web] [--requests] [--save]

Beside it is what 1 time gives, as `penstock run --dry-run` estimates: the fixed part is then multiplied too.
Each size is a run of its own over altered pages (`bench.inputs`), and each cost of each step is a line through the
costs of 1, 2 and 4 times: a fixed part and a part for each page. The command prints by how much the line misses 8
times, and what it gives for one snapshot of Common Crawl on 1,000 cores. The audit reads a sample of bounded size and
is left out. With `--requests`, the inputs and the run are on a server of S3 on this machine, with one small archive
a part, and the requests are counted in place of the costs. Run it on an idle machine: task time includes waiting.
"""

import argparse
import glob
import logging
import os
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.fs as pafs

from bench.figures import measured_now
from bench.inputs import write_altered
from bench.pipeline import machine_cpu
from pipeline.demo_crawl.build import build_demo_crawl
from pipeline.forecast import BuildCost, earlier_run
from schemas.storage import Store
from tests.support.s3_server import environment

ROOT = Path(__file__).parents[1]
SIZES = (1, 2, 4, 8)
PAGES, ARCHIVES = 2.7e9, 90_000
"""Pages and archives of one snapshot, as of CC-MAIN-2024-10."""
CORES, CORE_HOUR, GB_MONTH = 1_000, 0.04, 0.023
"""Cores of the cluster, and prices [US$]: of a core for an hour, and of 10^9 bytes of storage for a month."""
SMALL_PAGES = 40
"""Pages of the archives of which the requests are counted."""
FEW_PIECES = "tokenizer.vocab_size=4096"
"""Their texts have too few words for more."""
SAMPLED = ("audit",)
"""Steps whose costs do not grow with the input beyond a sample."""
KINDS = {"reading": ("GET", "HEAD"), "writing": ("PUT", "POST", "DELETE")}
COSTS = ("cpu_seconds", "task_seconds", "shuffled_bytes", "written_bytes")
MEASURES = ("pipeline", "schemas", "jobs/recipes/web.toml", "jobs/spark_session.py")
Costs = Mapping[str, float]


def run_chain(paths: Sequence[str], out: str, recipe: str, *settings: str) -> float:
    """Build all tables of a run in a process of its own; return the CPU seconds that the machine spent."""
    command = [sys.executable, "-m", "jobs.run_all", recipe, "--out", out, "--set", f"source.paths={[*paths]}"]
    for setting in settings:
        command += ["--set", setting]
    before = machine_cpu()
    done = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT)
    if done.returncode:
        sys.exit(f"bench_snapshot: expected a complete run, got exit code {done.returncode}:\n{done.stderr[-2000:]}")
    return machine_cpu() - before


def costs_of(out: str) -> tuple[Costs, float]:
    """Return the costs of a run, without those of a sample, and its number of pages."""
    steps = earlier_run(Store(out)).steps
    total = BuildCost()
    for name, cost in steps.items():
        total = total if name in SAMPLED else total.plus(cost)
    return {name: getattr(total, name) for name in COSTS}, steps["documents"].rows


def line(sizes: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Return the part for each unit and the fixed part of the line with the least squared relative errors."""
    weights = 1 / np.maximum(np.array(values, float), 1e-9)
    matrix = np.stack([np.array(sizes, float) * weights, weights], axis=1)
    (slope, fixed), *_ = np.linalg.lstsq(matrix, np.ones(len(sizes)), rcond=None)
    return float(slope), float(fixed)


def predict(sizes: Sequence[float], measured: Sequence[Costs]) -> dict[str, tuple[float, float]]:
    """Print what 1, 2 and 4 times predict for 8 times and what was measured; return each line through all sizes."""
    lines = {}
    print(f"{'':16s} {'predicted':>14s} {'measured':>14s} {'error':>8s} {'8 x 1':>8s} {'a unit':>12s} {'fixed':>12s}")
    for name in measured[0]:
        values = [costs[name] for costs in measured]
        slope, fixed = line(sizes[:-1], values[:-1])
        predicted = slope * sizes[-1] + fixed
        error = predicted / values[-1] - 1 if values[-1] else 0.0
        lines[name] = line(sizes, values)
        times = values[0] * sizes[-1] / sizes[0] / values[-1] - 1 if values[-1] else 0.0
        print(
            f"{name:16s} {predicted:14,.1f} {values[-1]:14,.1f} {error:+8.1%} {times:+8.1%} {slope:12.6g} {fixed:12.6g}"
        )
    return lines


def bench_costs(archives: Sequence[Path], folder: Path, recipe: str) -> dict[str, float]:
    """Measure runs of 1, 2, 4 and 8 times the pages; print and return what a snapshot costs."""
    copies = write_altered(list(archives), folder / "altered", max(SIZES))
    pages, measured = [], []
    for size in SIZES:
        out = str(folder / f"run{size}")
        cpu = run_chain([str(path) for files in copies[:size] for path in files], out, recipe)
        costs, rows = costs_of(out)
        pages.append(rows)
        measured.append(dict(costs) | {"machine_cpu": cpu})
    lines = predict(pages, measured)
    hours = PAGES * lines["task_seconds"][0] / 3600
    figures = {
        "core_hours": hours,
        "hours": hours / CORES,
        "shuffled_tb": PAGES * lines["shuffled_bytes"][0] / 1e12,
        "written_tb": PAGES * lines["written_bytes"][0] / 1e12,
        "usd": hours * CORE_HOUR,
        "usd_billion": hours * CORE_HOUR / (PAGES / 1e9),
        "usd_month": PAGES * lines["written_bytes"][0] / 1e9 * GB_MONTH,
        "ms": 1000 * lines["machine_cpu"][0],
        "task_ms": 1000 * lines["task_seconds"][0],
    }
    print(f"one snapshot of {PAGES:.2g} pages on {CORES:,} cores, at US$ {CORE_HOUR} a core hour:")
    for name, value in figures.items():
        print(f"  {name:12s} {value:14,.2f}")
    return figures


@contextmanager
def counting_server() -> Iterator[tuple[int, Counter[str]]]:
    """A server of S3 on this machine: its port, and the number of requests so far by method."""
    from moto.moto_server.werkzeug_app import DomainDispatcherApplication, MotoRequestHandler, create_backend_app
    from werkzeug.serving import make_server

    served, requests = DomainDispatcherApplication(create_backend_app), Counter[str]()

    def count(environ: dict[str, Any], start_response: Any) -> Any:
        requests[environ["REQUEST_METHOD"]] += 1
        return served(environ, start_response)

    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = make_server("127.0.0.1", 0, count, threaded=True, request_handler=MotoRequestHandler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_port, requests
    finally:
        server.shutdown()
        thread.join()


def bench_requests(folder: Path, recipe: str) -> dict[str, float]:
    """Count the requests of runs with 4, 8, 16 and 32 parts; print and return those of a snapshot."""
    parts, measured = [4 * size for size in SIZES], []
    with counting_server() as (port, requests):
        os.environ |= environment(port)
        store, _ = pafs.FileSystem.from_uri("s3://bucket?allow_bucket_creation=true")
        store.create_dir("bucket")
        build_demo_crawl(folder / "crawl", 1000)
        first = sorted((folder / "crawl").glob("*.warc.gz"))[:1]
        files = [path for (path,) in write_altered(first, folder / "altered", max(parts), SMALL_PAGES)]
        for path in files:
            with store.open_output_stream(f"bucket/crawl/{path.name}", compression=None) as stream:
                stream.write(path.read_bytes())
        for count in parts:
            requests.clear()
            paths = [f"s3://bucket/crawl/{path.name}" for path in files[:count]]
            run_chain(paths, f"s3://bucket/run{count}", recipe, FEW_PIECES)
            measured.append({kind: float(sum(requests[name] for name in names)) for kind, names in KINDS.items()})
    lines = predict(parts, measured)
    total = {f"requests_{name}": ARCHIVES * slope for name, (slope, _) in lines.items()}
    print(f"one snapshot of {ARCHIVES:,} archives: {sum(total.values()):,.0f} requests")
    return total


def main() -> None:
    """Parse the arguments, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archives", help="glob of WARC files; default: a demo crawl")
    parser.add_argument("--recipe", default=str(ROOT / "jobs" / "recipes" / "web.toml"))
    parser.add_argument("--requests", action="store_true", help="count requests to a server of S3 on this machine")
    parser.add_argument("--save", action="store_true", help="store the figures for the documentation")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="penstock-bench-") as name:
        folder = Path(name)
        if arguments.requests:
            kind, figures = "requests", bench_requests(folder, arguments.recipe)
        else:
            archives = [Path(path) for path in sorted(glob.glob(arguments.archives or ""))]
            if not archives:
                build_demo_crawl(folder / "crawl", 1000, 1)
                archives = sorted((folder / "crawl").glob("*.warc.gz"))
            kind, figures = "snapshot", bench_costs(archives, folder, arguments.recipe)
    if arguments.save:
        option = " --requests" if arguments.requests else ""
        measured_now(f"python -m tests.bench_snapshot{option}", MEASURES, figures).save(kind)


if __name__ == "__main__":
    main()
