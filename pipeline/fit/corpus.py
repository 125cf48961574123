"""Texts that models learn from: files and samples of runs, by class, without repeats and without contradictions.

A sample is the bottom k by a hash, so it does not depend on parts, order or partitioning. Texts are told apart by their
SHA-256, which also says which part of the split a text belongs to: equal texts never lie on both sides.
"""

import hashlib
import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from pydantic import Field, model_validator

from pipeline.fit.run_sample import sample_run
from pipeline.fit.text_files import Reading, TextFiles
from schemas.config import Section, location
from schemas.ids import shuffle_key

GOOD, BAD = "good", "bad"
ID_BYTES = 16


class Corpus(Section):
    """Texts of one kind: files, or the kept documents of a run, or both."""

    files: tuple[str, ...] = location(())
    """JSON lines and Parquet files, whose `text_field` is read, and text files, each one document; `*`, `?`, `[…]` and
    `**` are patterns."""
    run: str | None = location(None)
    """Run folder whose clean documents are sampled."""
    sources: tuple[str, ...] = ()
    """Sources of that run; empty: all."""
    languages: tuple[str, ...] = ()
    """Languages of that run; empty: all."""
    max_documents: int = Field(50_000, ge=1)
    """Largest number of documents; of more, those with the lowest hashes. A linear classifier takes 28 kB of memory for
    each of 4 kB (measured on 16,000): 3 GB for two corpora of this size."""

    @model_validator(mode="after")
    def _used(self) -> "Corpus":
        if (self.sources or self.languages) and self.run is None:
            raise ValueError(
                "sources and languages choose documents of a run and would be ignored without one; set run"
            )
        return self

    @property
    def given(self) -> bool:
        """Whether it names any text."""
        return bool(self.files) or self.run is not None


class Text(NamedTuple):
    """One document to learn from."""

    key: int
    """Its place in the order that samples are taken in."""
    digest: bytes
    """First 16 bytes of the SHA-256 of its UTF-8."""
    text: str


@dataclass
class Gathered:
    """Texts by class, what they were read from, and how many were left out and why."""

    texts: dict[str, list[Text]]
    inputs: list[dict[str, Any]] = field(default_factory=list)
    """Class, name, size [bytes] and SHA-256 of every file; of a run, of its clean table."""
    left_out: Counter[str] = field(default_factory=Counter)


def digest_of_text(text: str) -> bytes:
    """The first 16 bytes of the SHA-256 of the text's UTF-8."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:ID_BYTES]


class Sample:
    """The texts of the lowest keys among all that are offered, each text once."""

    def __init__(self, size: int, left_out: Counter[str]):
        self._size, self._left_out = size, left_out
        self._heap: list[tuple[int, bytes, str]] = []
        self._held: set[bytes] = set()

    def offer(self, key: int, text: str) -> None:
        """Take a text in if it is new and among the lowest so far."""
        digest = digest_of_text(text)
        if digest in self._held:
            self._left_out["repeated"] += 1
            return
        self._held.add(digest)
        heapq.heappush(self._heap, (-key, digest, text))
        if len(self._heap) > self._size:
            self._held.discard(heapq.heappop(self._heap)[1])
            self._left_out["beyond_sample"] += 1

    def offer_by_hash(self, text: str, seed: int) -> None:
        """Offer a text whose key is a hash of itself; one without words is left out."""
        if text.split():
            self.offer(shuffle_key(seed, digest_of_text(text)), text)
        else:
            self._left_out["empty"] += 1

    def texts(self) -> list[Text]:
        """The texts in the order of their keys."""
        return [Text(-key, digest, text) for key, digest, text in sorted(self._heap, key=lambda t: (-t[0], t[1]))]


def gather(
    corpora: Mapping[str, Corpus], labelled: tuple[str, ...], reading: Reading, seed: int, spark: Any = None
) -> Gathered:
    """The texts of every corpus, by its name; those of labelled files go to GOOD and BAD.

    Texts that two corpora have are in none of them. Raises ConfigError if files are not found or not of a kind that can
    be read, ContractError if they break off or a run has no such documents.
    """
    found = Gathered({})
    samples = {name: Sample(corpus.max_documents, found.left_out) for name, corpus in corpora.items()}
    for name, corpus in corpora.items():
        files = TextFiles(reading, f"{name}.files")
        for text, _ in files.texts(corpus.files):
            samples[name].offer_by_hash(text, seed)
        _account(found, name, files)
        if corpus.run is not None:
            taken = sample_run(spark, corpus.run, (corpus.sources, corpus.languages, seed), corpus.max_documents)
            for key, text in taken.texts:
                samples[name].offer(key, text)
            found.inputs.append({"class": name, "name": "clean", **taken.identity})
    files = TextFiles(reading, "labelled")
    for text, label in files.texts(labelled, labelled=True):
        samples[GOOD if label in reading.good_labels else BAD].offer_by_hash(text, seed)
    _account(found, "labelled", files)
    found.texts = {name: sample.texts() for name, sample in samples.items()}
    _leave_out_contradictions(found)
    return found


def _account(found: Gathered, name: str, files: TextFiles) -> None:
    found.inputs += [{"class": name, **entry} for entry in files.inputs]
    found.left_out += files.left_out


def _leave_out_contradictions(found: Gathered) -> None:
    counts = Counter(text.digest for texts in found.texts.values() for text in texts)
    shared = {digest for digest, count in counts.items() if count > 1}
    for name, texts in found.texts.items():
        found.texts[name] = [text for text in texts if text.digest not in shared]
        found.left_out["contradictory"] += len(texts) - len(found.texts[name])
