"""Recall and precision of our deduplication, of datasketch and of rensa, against exact all-pairs similarities.

    python -m tests.support.dedup_reference [--only sets|operations|real|urls] [--thresholds 0.5 0.7] [--no-spark]

Sets: Reuters newswire, altered texts, pairs under one canonical link, main texts of pages, fixtures of peers; the real
data together are the brute force. Every method signs with 112 permutations and takes bands that are optimal for the
threshold; a pair is found if it is a candidate and its estimate reaches the threshold. `ours` does that by functions
alone, `kept` the same with `signature.numbers = "kept"`; `own`: judged by shingles as ours are made, with datatrove's
normalisation, where numbers are one word. `clusters` are a run's tables, where a pair is found if both are in one
cluster, and wrong if a document and the one that it was joined with are below the threshold. `theory`: the recall of
values that agree independently. rensa is no dependency: install it beside the project, or it is left out.
"""

import argparse
import gzip
import importlib
import json
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from datasketch import MinHash, MinHashLSH

from jobs.spark_session import SparkConfig, open_session
from pipeline.dedup.config import DedupConfig
from pipeline.dedup.keys import layout
from pipeline.engine.worker import FusedStages
from pipeline.extract.extract import EXTRACT
from pipeline.minhash.stage import SignatureConfig, as_matrix, band_keys, signature, similarity, value_type
from pipeline.prepare import prepare
from pipeline.run import run_steps
from pipeline.sources.config import SourceConfig
from pipeline.sources.source import SOURCE
from pipeline.sources.splits import find_splits, open_stream
from pipeline.text.words import normal_words
from schemas.storage import Store
from schemas.urls import canonical_url
from tests.support.dedup_oracle import Ints, Pairs, all_pairs, expected_recall, runs_of, shingles_of
from tests.support.dedup_tables import Text, columns_of, recipe_of, write_documents
from tests.support.paths import SHARED

DATA = SHARED
THRESHOLDS = (0.5, 0.6, 0.7, 0.8, 0.9)
SIGNED, KEPT = SignatureConfig(), SignatureConfig(numbers="kept")
CHAR_LANGUAGES = ("zh", "ja")
Finder = Callable[["KnownSet", float], Pairs]


@dataclass(frozen=True)
class Document:
    """A text, and the unit of its shingles."""

    name: str
    text: str
    unit: str = "word"

    @property
    def language(self) -> str:
        """A language of this kind of shingle."""
        return "zh" if self.unit == "char" else "en"


class KnownSet:
    """Texts with all their similar pairs."""

    def __init__(self, name: str, documents: Sequence[Document]):
        self.name, self.documents = name, documents
        self.shingles = [shingles_of(document.text, document.unit) for document in documents]
        self.truth = Truth(all_pairs(self.shingles))
        self.places = {document.name: place for place, document in enumerate(documents)}

    @cached_property
    def normal(self) -> "Truth":
        """The same for shingles as ours are made: numbers are one word, accents and most punctuation none."""
        words = [(normal_words(document.text), document.unit) for document in self.documents]
        return Truth(all_pairs([runs_of("".join(w), "") if unit == "char" else runs_of(w, " ") for w, unit in words]))


class Truth:
    """All similar pairs of some texts, the truth for the pairs that a method finds."""

    def __init__(self, pairs: Pairs):
        self.pairs = pairs
        self.similarities = dict(zip(keys_of(pairs), pairs.similarity.tolist()))

    def recall(self, found: Pairs, threshold: float) -> float:
        """Return the found share of the pairs that are at least this similar; NaN if there are none."""
        similar = keys_of(self.pairs.least(threshold))
        return len(set(similar) & set(keys_of(found))) / len(similar) if similar else float("nan")

    def precision(self, found: Pairs, threshold: float) -> float:
        """Return the share of the found pairs that are at least this similar; NaN if none was found."""
        right = [self.similarities.get(key, 0.0) >= threshold - 1e-9 for key in keys_of(found)]
        return sum(right) / len(right) if right else float("nan")

    def figures(self, found: Pairs, threshold: float, precision_of: Pairs | None = None) -> str:
        """`recall /precision` as a cell of a table."""
        precision = self.precision(found if precision_of is None else precision_of, threshold)
        return f"{self.recall(found, threshold):>10.3f} /{precision:>6.3f}"


def keys_of(pairs: Pairs) -> list[tuple[int, int]]:
    """The pairs as tuples, smaller place first."""
    return list(zip(np.minimum(pairs.a, pairs.b).tolist(), np.maximum(pairs.a, pairs.b).tolist()))


def records(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a compressed file of JSON lines."""
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8") as stream:
            yield from map(json.loads, stream)
        return
    with pa.CompressedInputStream(str(path), "zstd") as stream:
        yield from map(json.loads, stream.read().splitlines())


def reuters() -> list[Document]:
    """Newswire, with real re-sent and updated stories."""
    return [Document(entry["id"], entry["text"]) for entry in records(DATA / "sources" / "news" / "reuters.jsonl.gz")]


def mutations() -> list[Document]:
    """Pages and twelve altered copies of each."""
    entries = records(DATA / "dedup" / "mutations.jsonl.zst")
    return [Document(entry["id"], entry["text"], entry["unit"]) for entry in entries]


def canonical_pairs() -> list[Document]:
    """Pairs of pages with one canonical link."""
    entries = list(records(DATA / "dedup" / "commoncrawl_canonical_pairs.jsonl.gz"))
    return [Document(f"{entry['id']}/{side}", entry[side]) for entry in entries for side in "ab"]


def peer_fixtures() -> list[Document]:
    """Small texts of two other projects' tests."""
    entries = [entry for entry in records(DATA / "dedup" / "peer_fixtures.jsonl.gz") if entry["text"].strip()]
    return [Document(f"{entry['origin']}/{entry['path']}", entry["text"], unit_of(entry["text"])) for entry in entries]


def gold_texts() -> list[Document]:
    """The main texts of annotated pages."""
    found = {}
    for path in sorted((DATA / "html_gold").glob("*.jsonl.gz")):
        for entry in records(path):
            if entry.get("text"):
                name = f"{path.name}/{entry['record_id']}"
                found[name] = Document(name, entry["text"], unit_of(entry["text"]))
    return list(found.values())


def pages() -> list[Document]:
    """The extracted text of every page of the archives, by record id."""
    index = records(DATA / "warc" / "pages-index.jsonl.gz")
    names = {(entry["warc"], entry["offset"]): entry["record_id"] for entry in index}
    config = SourceConfig(paths=(str(DATA / "warc" / "pages-*.warc.gz"),))
    extract = FusedStages((EXTRACT,), {EXTRACT.name: EXTRACT.config()}, {})
    found = []
    for split in find_splits(config):
        with closing(open_stream(split)) as stream:
            for row, drop in SOURCE.open(split, stream, config):
                name = names.get((split.name, row["offset"]))
                text = extract(row).get("text") if drop is None else None
                if name and text:
                    found.append(Document(name, text, unit_of(text)))
    return found


def english() -> list[Document]:
    """Documents of clean text."""
    names = ("brown", "speeches", "ud_english_docs")
    entries = (entry for name in names for entry in records(DATA / "text" / f"{name}.jsonl.gz"))
    return [Document(entry["id"], entry["text"]) for entry in entries]


def unit_of(text: str) -> str:
    """`char` for text that is mostly Chinese or Japanese."""
    own = sum("\u3040" <= char <= "\u30ff" or "\u4e00" <= char <= "\u9fff" for char in text)
    return "char" if own > 0.3 * max(1, sum(map(str.isalpha, text))) else "word"


class Ours:
    """Our signatures and bands, by the functions that a run calls."""

    def __init__(self, config: SignatureConfig = SIGNED) -> None:
        self._config = config
        self._signed: dict[str, Any] = {}

    def __call__(self, known: KnownSet, threshold: float) -> Pairs:
        """Candidate pairs of equal bands whose estimate reaches the threshold."""
        if known.name not in self._signed:
            signed = [signature(d.text, d.language, self._config) for d in known.documents]
            self._signed[known.name] = as_matrix(signed, value_type(self._config))
        matrix = self._signed[known.name]
        bands, rows = layout(DedupConfig(threshold=threshold), SIGNED)
        a, b = equal_keys(band_keys(matrix[:, : bands * rows], bands, rows))
        estimate = similarity(matrix[a], matrix[b])
        chosen = estimate >= threshold
        return Pairs(a[chosen], b[chosen], estimate[chosen])


def equal_keys(keys: Any) -> tuple[Ints, Ints]:
    """Every pair of rows that shares a key of a column, once."""
    found: set[tuple[int, int]] = set()
    for column in keys.T:
        order = np.argsort(column, kind="stable")
        ends = np.flatnonzero(np.diff(column[order])) + 1
        for bucket in np.split(order, ends):
            members = sorted(bucket.tolist()) if len(bucket) > 1 else []
            found.update((a, b) for place, a in enumerate(members) for b in members[place + 1 :])
    both = np.array(sorted(found), np.int64).reshape(-1, 2)
    return both[:, 0], both[:, 1]


class Datasketch:
    """`datasketch.MinHashLSH`, its candidates held against the threshold by `MinHash.jaccard`."""

    def __init__(self) -> None:
        self._signed: dict[str, list[MinHash]] = {}

    def __call__(self, known: KnownSet, threshold: float) -> Pairs:
        """Pairs whose estimate reaches the threshold."""
        if known.name not in self._signed:
            data = [[shingle.encode(errors="surrogatepass") for shingle in found] for found in known.shingles]
            self._signed[known.name] = MinHash.bulk(data, num_perm=SIGNED.permutations)
        signed = self._signed[known.name]
        index = MinHashLSH(threshold=threshold, num_perm=SIGNED.permutations)
        for row, signature_of_row in enumerate(signed):
            index.insert(row, signature_of_row)
        pairs = [(a, b) for a, values in enumerate(signed) for b in index.query(values) if a < b and known.shingles[a]]
        estimates = [signed[a].jaccard(signed[b]) for a, b in pairs]
        return pairs_of(pairs, estimates, threshold)


class Rensa:
    """`rensa.RMinHashLSH`, its candidates held against the threshold by `RMinHash.jaccard`."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self._signed: dict[str, list[Any]] = {}

    def __call__(self, known: KnownSet, threshold: float) -> Pairs:
        """Pairs whose estimate reaches the threshold."""
        if known.name not in self._signed:
            self._signed[known.name] = [self._sign(found) for found in known.shingles]
        signed = self._signed[known.name]
        wanted = middle(*layout(DedupConfig(threshold=threshold), SIGNED))
        # its bands must divide the permutations
        counts = [number for number in range(1, SIGNED.permutations + 1) if SIGNED.permutations % number == 0]
        count = min(counts, key=lambda number: abs(middle(number, SIGNED.permutations // number) - wanted))
        index = self._library.RMinHashLSH(threshold, SIGNED.permutations, count)
        for row, signature_of_row in enumerate(signed):
            index.insert(row, signature_of_row)
        pairs = [(a, b) for a, values in enumerate(signed) for b in index.query(values) if a < b and known.shingles[a]]
        estimates = [signed[a].jaccard(signed[b]) for a, b in pairs]
        return pairs_of(pairs, estimates, threshold)

    def _sign(self, shingles: set[str]) -> Any:
        made = self._library.RMinHash(SIGNED.permutations, 42)
        made.update(list(shingles))
        return made


def middle(bands: int, rows: int) -> float:
    """The similarity at which half of all pairs become candidates."""
    return float((1 - 0.5 ** (1 / bands)) ** (1 / rows))


def pairs_of(pairs: list[tuple[int, int]], estimates: list[float], threshold: float) -> Pairs:
    """The pairs whose estimate reaches the threshold."""
    both, values = np.array(pairs, np.int64).reshape(-1, 2), np.array(estimates, np.float64)
    chosen = values >= threshold
    return Pairs(both[chosen, 0], both[chosen, 1], values[chosen])


def methods() -> dict[str, Finder]:
    """The methods by name; prints what is left out."""
    found: dict[str, Finder] = {"ours": Ours(), "kept": Ours(KEPT), "datasketch": Datasketch()}
    try:
        found["rensa"] = Rensa(importlib.import_module("rensa"))
    except ImportError as error:
        print(f"rensa is left out: {error}")
    return found


def theory(pairs: Pairs, threshold: float) -> float:
    """The recall to expect of our bands on these pairs."""
    optimal = layout(DedupConfig(threshold=threshold), SIGNED)
    return expected_recall(pairs.similarity, threshold, optimal, SIGNED.permutations)


class Clusters:
    """The tables of runs over all sets at once, one run a threshold; `clusters` and `dedup` are all they build."""

    def __init__(self, sets: Sequence[KnownSet], thresholds: Sequence[float], folder: Path, verify: str):
        self.seconds: dict[float, float] = {}
        self._found: dict[tuple[str, float], tuple[Pairs, Pairs]] = {}
        spark = open_session(SparkConfig(driver_memory="2g", shuffle_partitions=4), "dedup_reference")
        try:
            for threshold in thresholds:
                settings = {"dedup": {"threshold": threshold, "min_similarity": threshold, "verify": verify}}
                recipe = recipe_of(folder, len(sets), settings)
                write_documents(folder, recipe, lambda split: texts_of(sets[split]))
                started = time.monotonic()
                run_steps(spark, prepare(recipe, "dedup"), Store(str(folder)), None)
                self.seconds[threshold] = time.monotonic() - started
                table = columns_of(folder, "clusters", ["doc_id", "cluster", "leader", "similarity"])
                self._take(sets, threshold, table)
        finally:
            spark.stop()

    def _take(self, sets: Sequence[KnownSet], threshold: float, table: pa.Table) -> None:
        ids = {name: place for place, name in enumerate(table.column("doc_id").to_pylist())}
        leaders = [ids.get(name, -1) for name in table.column("leader").to_pylist()]
        clusters = [ids[name] for name in table.column("cluster").to_pylist()]
        first = 0
        for known in sets:
            members: defaultdict[int, list[int]] = defaultdict(list)
            count = len(known.documents)
            for place, cluster in enumerate(clusters[first : first + count]):
                members[cluster].append(place)
            joined = [(a, b) for found in members.values() for n, a in enumerate(found) for b in found[n + 1 :]]
            own = enumerate(leaders[first : first + count])
            edges = [(place, leader - first) for place, leader in own if first <= leader < first + count]
            self._found[known.name, threshold] = tuple(
                pairs_of([(min(p), max(p)) for p in pairs], [1.0] * len(pairs), 0) for pairs in (joined, edges)
            )
            first += count

    def found(self, known: KnownSet, threshold: float) -> tuple[Pairs, Pairs]:
        """(pairs in one cluster, pairs that were joined directly)."""
        return self._found[known.name, threshold]


def texts_of(known: KnownSet) -> Iterator[Text]:
    """The documents of a set, as a run has them."""
    for document in known.documents:
        yield Text(f"https://{known.name}.example/{document.name}", document.text, document.language)


def check_given(sets: dict[str, KnownSet]) -> None:
    """Print the number of listed pairs that have the same similarity here."""
    known, given = sets["reuters"], list(records(DATA / "dedup" / "reuters_pairs.jsonl.gz"))
    keys = [tuple(sorted((known.places[e["a"]], known.places[e["b"]]))) for e in given]
    same = sum(abs(known.truth.similarities.get(key, 0) - e["jaccard5w"]) < 1e-3 for key, e in zip(keys, given))
    print(
        f"reuters: {len(given)} listed pairs, {same} of the same similarity here, {len(known.truth.pairs)} found in all"
    )
    known = sets["mutations"]
    entries = [e for e in records(DATA / "dedup" / "mutations.jsonl.zst") if e["op"] != "original"]
    keys = [tuple(sorted((known.places[f"{e['base']}-original"], known.places[e["id"]]))) for e in entries]
    found = [known.truth.similarities.get(key, 0.0) for key in keys]
    same = sum(abs(max(here, 0.3) - max(e["jaccard5"], 0.3)) < 1e-3 for here, e in zip(found, entries))
    print(f"mutations: {len(entries)} listed similarities, {same} the same here (all below 0.3 as one)")


def print_sets(sets: Sequence[KnownSet], thresholds: Sequence[float], clusters: Clusters | None) -> None:
    """Recall and precision of every method on every set."""
    found, spent = methods(), Counter[str]()
    head = "".join(f"{name:>18}" for name in (*found, *(["clusters"] if clusters else [])))
    head += "   | own: pairs  theory" + "".join(f"{name:>18}" for name in ("ours", *(["clusters"] if clusters else [])))
    print(f"\nrecall / precision of pairs\n{'set':<10} {'texts':>6} {'least':>5} {'pairs':>6} {'theory':>7}{head}")
    for known in sets:
        for threshold in thresholds:
            wanted = known.truth.pairs.least(threshold)
            line = f"{known.name:<10} {len(known.documents):>6} {threshold:>5} {len(wanted):>6} "
            line += f"{theory(wanted, threshold):>7.3f}"
            pairs = {}
            for name, find in found.items():
                started = time.process_time()
                pairs[name] = find(known, threshold)
                spent[name] += time.process_time() - started
                line += known.truth.figures(pairs[name], threshold)
            own = known.normal.pairs.least(threshold)
            after = f"{len(own):>14} {theory(own, threshold):>7.3f}"
            after += known.normal.figures(pairs["ours"], threshold)
            if clusters:
                joined, edges = clusters.found(known, threshold)
                line += known.truth.figures(joined, threshold, edges)
                after += known.normal.figures(joined, threshold, edges)
            print(line + after, flush=True)
    print("CPU seconds, all of it: " + ", ".join(f"{name} {seconds:.1f}" for name, seconds in spent.items()))
    if clusters:
        print("wall seconds of a run: " + ", ".join(f"{t}: {seconds:.0f}" for t, seconds in clusters.seconds.items()))


def print_operations(known: KnownSet, threshold: float, clusters: Clusters | None) -> None:
    """Of the altered copies, how many each method joins with their original, by operation."""
    found = {name: find(known, threshold) for name, find in methods().items()}
    if clusters:
        found["clusters"] = clusters.found(known, threshold)[0]
    keys = {name: set(zip(pairs.a.tolist(), pairs.b.tolist())) for name, pairs in found.items()}
    groups: dict[str, list[tuple[float, tuple[int, int]]]] = defaultdict(list)
    for entry in records(DATA / "dedup" / "mutations.jsonl.zst"):
        if entry["op"] != "original":
            a, b = known.places[f"{entry['base']}-original"], known.places[entry["id"]]
            label = f"{entry['op']} {entry['param'] if entry['param'] is not None else ''}".strip()
            groups[label].append((entry["jaccard5"], (min(a, b), max(a, b))))
    print(f"\naltered copies joined with their original at {threshold}")
    print(f"{'operation':<22} {'copies':>6} {'median':>7} {'above':>6}" + "".join(f"{name:>12}" for name in keys))
    for label, copies in sorted(groups.items()):
        values = sorted(value for value, _ in copies)
        line = f"{label:<22} {len(copies):>6} {values[len(values) // 2]:>7.3f} {sum(v >= threshold for v in values):>6}"
        print(line + "".join(f"{sum(key in found for _, key in copies):>12}" for found in keys.values()))


def print_urls() -> None:
    """Pages known to be the same: groups of one URL, of one canonical URL, and of similar texts."""
    groups = list(records(DATA / "dedup" / "page_groups.jsonl.gz"))
    texts = {document.name: document for document in pages()}
    least = (0.5, 0.7, 0.9)
    head = "".join(f"{f'>= {value}':>8}" for value in least)
    print(f"\n{'groups of pages':<24} {'groups':>6} {'one URL':>8} {'canonical':>10} {'texts':>6}{head}")
    for relation in ("same-bytes", "same-page-other-bytes"):
        chosen = [group["records"] for group in groups if group["relation"] == relation]
        same, folded = (
            sum(len({form(r["url"]) for r in found}) == 1 for found in chosen) for form in (str, canonical_url)
        )
        values = []
        for found in chosen:
            both = [texts[r["record_id"]] for r in found if r["record_id"] in texts]
            if len(both) == 2:
                first, second = (shingles_of(d.text, d.unit) for d in both)
                values.append(len(first & second) / max(1, len(first | second)))
        shares = "".join(f"{sum(value >= limit for value in values):>8}" for limit in least)
        print(f"{relation:<24} {len(chosen):>6} {same:>8} {folded:>10} {len(values):>6}{shares}")


def main() -> None:
    """Print the tables that the arguments select."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("sets", "operations", "real", "urls"))
    parser.add_argument("--thresholds", type=float, nargs="+", default=THRESHOLDS)
    parser.add_argument("--no-spark", action="store_true")
    parser.add_argument("--verify", choices=("estimate", "jaccard"), default="estimate")
    arguments = parser.parse_args()
    wanted = (arguments.only,) if arguments.only else ("sets", "operations", "real", "urls")
    sets: dict[str, KnownSet] = {}
    if {"sets", "operations"} & set(wanted):
        makers = {"reuters": reuters, "mutations": mutations, "canonical": canonical_pairs, "gold": gold_texts}
        sets = {name: KnownSet(name, make()) for name, make in (makers | {"fixtures": peer_fixtures}).items()}
        check_given(sets)
    if "real" in wanted:
        documents = {d.name: d for make in (reuters, gold_texts, pages, english) for d in make()}
        sets["real"] = KnownSet("real", list(documents.values()))
    with tempfile.TemporaryDirectory(prefix="penstock-reference-") as name:
        clusters = None
        if sets and not arguments.no_spark:
            clusters = Clusters(list(sets.values()), arguments.thresholds, Path(name), arguments.verify)
        if "sets" in wanted or "real" in wanted:
            print_sets(list(sets.values()), arguments.thresholds, clusters)
        if "operations" in wanted:
            middle = min(arguments.thresholds, key=lambda threshold: abs(threshold - 0.7))
            print_operations(sets["mutations"], middle, clusters)
    if "urls" in wanted:
        print_urls()


if __name__ == "__main__":
    main()
