"""Cost of the quality signals, family by family, and against datatrove's four filters on the same texts in one run.

    python -m bench.signals INPUTS.jsonl[.gz] [PEER_PYTHON PEER_SCRIPT]

Each line of the inputs has `id` and English `text`. The peer's script is called with inputs and outputs and prints
its seconds as its last line. Times are CPU time of one core, a fresh vocabulary included, best of three.
"""

import gzip
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pyarrow as pa

from pipeline.engine.rules import KEPT, evaluate_checks
from pipeline.quality.config import QualityConfig
from pipeline.quality.stage import QualityMeasures, Vocabularies, checks, measure
from pipeline.quality.text import native_pieces
from pipeline.text import native, native_words
from schemas.signals import FAMILIES
from schemas.tables import DOCUMENTS

FOUR = ("gopher_repetition", "gopher_quality", "c4", "fineweb")
DOCUMENT = 4_300  # [bytes] the length that costs are given for
ROUNDS = 3


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file of JSON lines, compressed or not."""
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [json.loads(line) for line in lines]


def seconds(texts: list[str], measures: QualityMeasures) -> float:
    """CPU seconds that a fresh worker needs for the texts."""
    best = float("inf")
    for _ in range(ROUNDS):
        vocabulary = Vocabularies()["en"]
        native_words.forget()
        native_pieces.cache_clear()
        started = time.process_time()
        for text in texts:
            measure(text, "en", measures, vocabulary)
        best = min(best, time.process_time() - started)
    return best


def decisions(texts: list[str]) -> list[bool]:
    """Which texts the four rule sets keep, one after the other, as FineWeb's recipe has them."""
    rules = checks(QualityConfig(), {}, {})
    vocabulary = Vocabularies()["en"]
    rows = [measure(text, "en", QualityMeasures(), vocabulary) for text in texts]
    columns = {name: pa.array([row[name] for row in rows], DOCUMENTS.field(name).type) for name in _columns(rules)}
    batch = pa.RecordBatch.from_pydict(columns | {"language": pa.array(["en"] * len(rows))})
    return [number == KEPT for number in evaluate_checks(rules, batch).first.tolist()]


def _columns(rules: Any) -> list[str]:
    return [rule.column for rule in rules]


def run_peer(inputs: Path, python: str, script: str) -> tuple[dict[str, float], list[bool]]:
    """The peer's CPU seconds by filter and which texts it keeps."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.jsonl"
        done = subprocess.run([python, script, str(inputs), str(out)], capture_output=True, text=True, check=True)
        figures = json.loads(done.stdout.splitlines()[-1])
        # it times its filters by the wall clock: on a busy machine that is more than they cost
        busy = figures["cpu_s"] / figures["wall_s"]
        spent = {name: busy * seconds for name, seconds in figures["seconds"].items()}
        return spent, [row["chained"] is None for row in read_lines(out)]


def main(inputs: str, *peer: str) -> None:
    """Print milliseconds a document and for DOCUMENT bytes by family, and the ratio to the peer if it is given."""
    texts = [line["text"] for line in read_lines(Path(inputs))]
    size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
    print(f"{len(texts)} documents, {size / len(texts):.0f} bytes on average, words by: {native.implementation()}")
    everything = frozenset((*FAMILIES, "lines"))
    variants = {"four filters": QualityMeasures(frozenset(FOUR)), "all families": QualityMeasures(everything)}
    variants |= {name: QualityMeasures(frozenset((name,)), frozenset()) for name in sorted(everything)}
    variants["no family"] = QualityMeasures(frozenset(), frozenset())
    spent = {}
    for name, measures in variants.items():
        spent[name] = seconds(texts, measures)
        print(
            f"{name:18} {1e3 * spent[name] / len(texts):7.3f} ms {1e3 * spent[name] / size * DOCUMENT:7.3f} ms/4.3 kB"
        )
    if peer:
        theirs, kept = run_peer(Path(inputs), *peer)
        same = sum(ours == other for ours, other in zip(decisions(texts), kept))
        for name, total in (("each alone", sum(theirs[part] for part in FOUR)), ("chained", theirs["chained"])):
            cost = 1e3 * total / len(texts)
            print(f"peer, {name:12} {cost:7.1f} ms, {total / spent['four filters']:.1f} times the four filters")
        print(f"same decisions: {same} of {len(texts)}")


if __name__ == "__main__":
    main(*sys.argv[1:])
