"""Speed, as ratios taken in one run: against the bare native calls, and against a peer where one is installed.

    python -m bench.pipeline [--archives 'crawl/*.warc.gz'] [--peer PYTHON SCRIPT] [--only pass|chain|signature]

Marginal cost is the slope between 1 and N times the input (altered texts, see bench_inputs); the fixed cost is printed
beside it. CPU seconds are those of the whole machine, because Spark's workers are nobody's waited-for children: run it
on an idle one. Without --archives the demo crawl is built and used.
"""

import argparse
import glob
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import fasttext
from fastwarc.warc import ArchiveIterator, WarcRecordType
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import detect_encoding
from resiliparse.parse.html import HTMLTree

from bench.inputs import write_altered
from bench.signatures import bench_signatures
from jobs.recipe import read_recipe
from pipeline.demo_crawl.build import build_demo_crawl
from pipeline.models import ModelsConfig, ensure_model
from pipeline.sources.config import SourceConfig
from pipeline.sources.splits import find_splits
from pipeline.stages import MEASURED, SOURCE
from pipeline.steps.documents import DocumentsTask, documents_part
from schemas.storage import Store

ROOT = Path(__file__).parents[1]
RECIPE = ROOT / "jobs" / "recipes" / "web.toml"
LANGUAGES = 'language.languages=["en"]'
AS_NATIVE = ('extract.extractor="resiliparse"', "extract.metadata=false")
"""Settings with which the pass extracts as the bare calls do, and as the peer does."""


def machine_cpu() -> float:
    """CPU seconds that this machine has spent since it started."""
    values = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(values[:3]) + sum(values[5:7])) / os.sysconf("SC_CLK_TCK")


def native_calls(paths: list[Path], model_path: str) -> tuple[float, int]:
    """CPU seconds and pages of the bare calls: iterate, parse and extract main text, predict the language."""
    model = fasttext.load_model(model_path)
    started, pages = time.process_time(), 0
    for path in paths:
        with open(path, "rb") as stream:
            for record in ArchiveIterator(stream, record_types=WarcRecordType.response):
                page = record.reader.read()
                tree = HTMLTree.parse_from_bytes(page, record.http_charset or detect_encoding(page))
                text = extract_plain_text(tree, main_content=True, alt_texts=False, links=False)
                model.predict([text.replace("\n", " ")])
                pages += 1
    return time.process_time() - started, pages


def fused_pass(paths: list[Path], folder: Path, *settings: str) -> tuple[float, int]:
    """CPU seconds and rows of the documents pass in this process, without Spark, with further settings."""
    recipe = read_recipe(str(RECIPE), [f"source.paths={[str(path) for path in paths]}", LANGUAGES, *settings])
    models = {
        stage.name: {
            name: str(ensure_model(p, ModelsConfig()).path) for name, p in stage.models(recipe[stage.name]).items()
        }
        for stage in MEASURED
    }
    rows, store = 0, Store(str(folder))
    started = time.process_time()
    for split in find_splits(recipe.section("source", SourceConfig)):
        task = DocumentsTask((split,), SOURCE, MEASURED, recipe, models, store.child("documents"), store.child("text"))
        rows += documents_part(task, False).counts.rows_in
    return time.process_time() - started, rows


def slope(small: tuple[float, int], large: tuple[float, int]) -> tuple[float, float]:
    """Marginal milliseconds a page and fixed seconds, from two (seconds, pages)."""
    per_page = (large[0] - small[0]) / (large[1] - small[1])
    return per_page * 1000, small[0] - per_page * small[1]


def bench_pass(one: list[Path], many: list[Path], folder: Path) -> None:
    """Print the fused pass against the bare native calls."""
    model = str(ensure_model("lid.176.ftz", ModelsConfig()).path)
    native = slope(native_calls(one, model), native_calls(many, model))
    print(f"native calls        {native[0]:7.2f} ms/page   fixed {native[1]:6.2f} s")
    for name, settings in (("with the same extractor", AS_NATIVE), ("as the recipe has it", ())):
        ours = slope(fused_pass(one, folder / "pass1", *settings), fused_pass(many, folder / "pass8", *settings))
        print(f"documents pass      {ours[0]:7.2f} ms/page   fixed {ours[1]:6.2f} s   {1000 / ours[0]:.0f} pages/CPU s")
        print(f"documents pass / native calls = {ours[0] / native[0]:.2f}, {name}")


def chain(paths: list[Path], out: Path, tokenizer: str | None) -> tuple[float, int, str]:
    """CPU seconds of the machine and rows of a whole run in a process of its own, and its tokenizer's path."""
    overrides = [f"source.paths={[str(path) for path in paths]}", LANGUAGES, *AS_NATIVE]
    if tokenizer:
        overrides.append(f"tokenizer.model={tokenizer}")
    command = [sys.executable, "-m", "jobs.run_all", str(RECIPE), "--out", str(out)]
    for override in overrides:
        command += ["--set", override]
    started = machine_cpu()
    subprocess.run(command, check=True, stderr=subprocess.DEVNULL, cwd=ROOT)
    spent = machine_cpu() - started
    tables = json.loads((out / "run.json").read_text())["tables"]
    documents = json.loads((out / "documents" / tables["documents"] / "manifest.json").read_text())
    model = next((out / "tokenizer" / tables["tokenizer"]).glob("*.model"))
    return spent, documents["content"]["counts"]["rows_in"], str(model)


def peer_chain(paths: list[Path], out: Path, peer: list[str], model: str) -> tuple[float, int]:
    """CPU seconds of the machine and pages of the peer's whole chain with the same extractor."""
    folder = out.parent / f"{out.name}-in"
    folder.mkdir(parents=True, exist_ok=True)
    for path in paths:
        (folder / path.name).unlink(missing_ok=True)
        (folder / path.name).symlink_to(path.resolve())
    command = [*peer, "--warcs", f"{folder}/*.warc.gz", "--out", str(out), "--extractor", "resiliparse-inproc"]
    command += ["--no-url-filter", "--quiet", "--workers", "2", "--tokenizer", str(out.parent / "peer-tokenizer.json")]
    output = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"LID_FTZ": model})
    report = json.loads(output.stdout.strip().splitlines()[-1])
    return report["machine_cpu_s"]["total"], report["docs_in"]


def bench_chain(one: list[Path], many: list[Path], folder: Path, peer: list[str] | None) -> None:
    """Print the whole chain, archives to tokens, against the peer's."""
    _, _, tokenizer = chain(one, folder / "chain0", None)
    small, large = chain(one, folder / "chain1", tokenizer), chain(many, folder / "chain8", tokenizer)
    ours = slope(small[:2], large[:2])
    print(f"chain               {ours[0]:7.2f} ms/page   fixed {ours[1]:6.2f} s   {1000 / ours[0]:.0f} pages/CPU s")
    if peer is None:
        print("peer                not measured: give --peer PYTHON SCRIPT")
        return
    model = str(ensure_model("lid.176.ftz", ModelsConfig()).path)
    peer_chain(one[:1], folder / "peer0", peer, model)
    theirs = slope(peer_chain(one, folder / "peer1", peer, model), peer_chain(many, folder / "peer8", peer, model))
    print(
        f"peer                {theirs[0]:7.2f} ms/page   fixed {theirs[1]:6.2f} s   {1000 / theirs[0]:.0f} pages/CPU s"
    )
    print(f"chain, pages per CPU second / peer's = {theirs[0] / ours[0]:.2f} (asked: at least 4)")


def main() -> None:
    """Parse the arguments, prepare the inputs and print every figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archives", help="glob of WARC files")
    parser.add_argument("--times", type=int, default=8, help="how many times the input the large run has")
    parser.add_argument("--peer", nargs=2, metavar=("PYTHON", "SCRIPT"))
    parser.add_argument("--only", choices=("pass", "chain", "signature"))
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="penstock-bench-"))
    try:
        if arguments.archives:
            archives = [Path(path) for path in sorted(glob.glob(arguments.archives))]
        else:
            build_demo_crawl(folder / "crawl", 1000, 1)
            archives = sorted((folder / "crawl").glob("*.warc.gz"))
        copies = write_altered(archives, folder / "altered", arguments.times)
        archives, many = copies[0], [path for files in copies for path in files]
        if arguments.only in (None, "signature"):
            bench_signatures()
        if arguments.only in (None, "pass"):
            bench_pass(archives, many, folder)
        if arguments.only in (None, "chain"):
            bench_chain(archives, many, folder, arguments.peer)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
