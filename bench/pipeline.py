"""Speed, as ratios taken in one run: against the bare native calls, and against a peer where one is installed.

    python -m bench.pipeline [--archives 'crawl/*.warc.gz'] [--peer PYTHON SCRIPT] [--only pass|chain|signature]
                             [--save]

Marginal cost is the slope between 1 and N times the input (altered texts, see bench_inputs); the fixed cost is printed
beside it. CPU seconds are those of the whole machine, because Spark's workers are nobody's waited-for children: run it
on an idle one. Without --archives the demo crawl is built and used. With --save, the figures are stored for the
documentation; see `bench.figures`.
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
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import fasttext
from fastwarc.warc import ArchiveIterator, WarcRecordType
from resiliparse.extract.html2text import extract_plain_text
from resiliparse.parse.encoding import detect_encoding
from resiliparse.parse.html import HTMLTree

from bench.figures import measured_now
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
MEASURES = ("pipeline", "schemas", "jobs/recipes/web.toml", "jobs/spark_session.py", "bench/pipeline.py")
"""What the figures depend on."""
CODINGS = ("Content-Encoding", "Transfer-Encoding")
Figures = dict[str, float]
AS_NATIVE = ('extract.extractor="resiliparse"', "extract.metadata=false")
"""Settings with which the pass extracts as the bare calls do, and as the peer does."""
AS_PEER = (LANGUAGES, *AS_NATIVE, "audit.documents=0")
PASSES = {
    "same_extractor": (LANGUAGES, *AS_NATIVE),
    "recipe": (),
    "english": (LANGUAGES,),
    "english_early": (LANGUAGES, "language.early=true"),
}
"""The settings of each documents pass that is measured."""
NOT_OF_PEER = ("templates.min_share", "classifier.models", "classifier.min_score")
"""Settings of the recipe without which the chain has the steps that the peer has."""


def machine_cpu() -> float:
    """CPU seconds that this machine has spent since it started."""
    values = [int(value) for value in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
    return (sum(values[:3]) + sum(values[5:7])) / os.sysconf("SC_CLK_TCK")


def native_calls(paths: list[Path], model_path: str) -> tuple[float, int]:
    """CPU seconds and pages of the bare calls: iterate, parse and extract main text, predict the language.

    Pages with a content or transfer coding are read and left out: the calls decode none, and would parse their bytes.
    """
    model = fasttext.load_model(model_path)
    started, pages = time.process_time(), 0
    for path in paths:
        with open(path, "rb") as stream:
            for record in ArchiveIterator(stream, record_types=WarcRecordType.response):
                page = record.reader.read()
                if any(name in record.http_headers for name in CODINGS):
                    continue
                tree = HTMLTree.parse_from_bytes(page, record.http_charset or detect_encoding(page))
                text = extract_plain_text(tree, main_content=True, alt_texts=False, links=False)
                model.predict([text.replace("\n", " ")])
                pages += 1
    return time.process_time() - started, pages


def fused_pass(paths: list[Path], folder: Path, *settings: str) -> tuple[float, int]:
    """CPU seconds and rows of the documents pass in this process, without Spark, with further settings."""
    recipe = read_recipe(str(RECIPE), [f"source.paths={[str(path) for path in paths]}", *settings])
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


def bench_pass(one: list[Path], many: list[Path], folder: Path) -> Figures:
    """Print the fused pass against the bare native calls, and return the figures."""
    model = str(ensure_model("lid.176.ftz", ModelsConfig()).path)
    native = slope(native_calls(one, model), native_calls(many, model))
    print(f"native calls        {native[0]:7.2f} ms/page   fixed {native[1]:6.2f} s")
    figures = {"native_ms": native[0], "native_rate": 1000 / native[0]}
    for name, settings in PASSES.items():
        # Folders of their own: a part that is complete is not written again.
        small, large = (folder / f"{name}-{size}" for size in ("one", "many"))
        ours = slope(fused_pass(one, small, *settings), fused_pass(many, large, *settings))
        print(f"documents pass      {ours[0]:7.2f} ms/page   fixed {ours[1]:6.2f} s   {1000 / ours[0]:.0f} pages/CPU s")
        print(f"documents pass / native calls = {ours[0] / native[0]:.2f}, {name}")
        figures |= {f"pass_{name}_ms": ours[0], f"pass_{name}_rate": 1000 / ours[0]}
        figures[f"pass_{name}_ratio"] = ours[0] / native[0]
    return figures


def chain(
    paths: list[Path], out: Path, tokenizer: str | None, settings: Sequence[str], unset: Sequence[str]
) -> tuple[float, int, str]:
    """CPU seconds of the machine and rows of a whole run in a process of its own, and its tokenizer's path."""
    overrides = [f"source.paths={[str(path) for path in paths]}", *settings]
    if tokenizer:
        overrides.append(f"tokenizer.model={tokenizer}")
    command = [sys.executable, "-m", "jobs.run_all", str(RECIPE), "--out", str(out)]
    for override in overrides:
        command += ["--set", override]
    for setting in unset:
        command += ["--unset", setting]
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


def bench_chain(one: list[Path], many: list[Path], folder: Path, peer: list[str] | None) -> Figures:
    """Print the whole chain, archives to tokens, against the peer's, and return the figures."""
    figures: Figures = {}
    for name, settings, unset in (("same_extractor", AS_PEER, NOT_OF_PEER), ("recipe", (), ())):
        *_, tokenizer = chain(one, folder / f"{name}0", None, settings, unset)
        small, large = (
            chain(paths, folder / f"{name}{len(paths)}", tokenizer, settings, unset)[:2] for paths in (one, many)
        )
        ours = slope(small, large)
        print(f"chain               {ours[0]:7.2f} ms/page   fixed {ours[1]:6.2f} s   {1000 / ours[0]:.0f} pages/CPU s")
        figures |= {f"chain_{name}_ms": ours[0], f"chain_{name}_rate": 1000 / ours[0], f"chain_{name}_fixed": ours[1]}
    if peer is None:
        print("peer                not measured: give --peer PYTHON SCRIPT")
        return figures
    model = str(ensure_model("lid.176.ftz", ModelsConfig()).path)
    peer_chain(one[:1], folder / "peer0", peer, model)
    theirs = slope(peer_chain(one, folder / "peer1", peer, model), peer_chain(many, folder / "peer8", peer, model))
    print(
        f"peer                {theirs[0]:7.2f} ms/page   fixed {theirs[1]:6.2f} s   {1000 / theirs[0]:.0f} pages/CPU s"
    )
    ratio = theirs[0] / figures["chain_same_extractor_ms"]
    print(f"chain, pages per CPU second / peer's = {ratio:.2f} (asked: at least 8)")
    figures |= {"peer_ms": theirs[0], "peer_rate": 1000 / theirs[0], "peer_fixed": theirs[1], "peer_ratio": ratio}
    more_fixed = figures["chain_same_extractor_fixed"] - theirs[1]
    figures["peer_faster_below"] = 1000 * more_fixed / (theirs[0] - figures["chain_same_extractor_ms"])
    return figures


def main() -> None:
    """Parse the arguments, prepare the inputs and print every figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--archives", help="glob of WARC files")
    parser.add_argument("--times", type=int, default=8, help="how many times the input the large run has")
    parser.add_argument("--peer", nargs=2, metavar=("PYTHON", "SCRIPT"))
    parser.add_argument("--only", choices=("pass", "chain", "signature"))
    parser.add_argument("--save", action="store_true", help="store the figures for the documentation")
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
        benches = {"pass": bench_pass, "chain": partial(bench_chain, peer=arguments.peer)}
        for name, bench in benches.items():
            if arguments.only in (None, name):
                figures = bench(archives, many, folder)
                if arguments.save:
                    measured_now(f"python -m bench.pipeline --only {name}", MEASURES, figures).save(name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
