"""Tests of the training without Spark: the workers' functions against a plain reference, at any partitioning."""

import itertools
import math
import random
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from pipeline.perplexity.kneser_ney import worker
from pipeline.perplexity.kneser_ney.arpa import write_arpa
from pipeline.perplexity.kneser_ney.config import TrainLmConfig
from pipeline.perplexity.kneser_ney.estimate import EOS, check_sums, make_plan, make_smoothing
from schemas.errors import ContractError
from schemas.storage import Store

Gram = tuple[str, ...]
Entries = dict[Gram, tuple[float, float]]


class Reference:
    """Interpolated modified Kneser-Ney smoothing over tuples of words, directly from the definitions; slow.

    `quirk` repeats a bug of lmplz. In the counts of counts of an order below the highest, the last n-gram by word ids
    (numbered by first occurrence) has its raw count instead of its adjusted count.
    """

    def __init__(
        self, lines: Iterable[str], config: TrainLmConfig, allowed: set[str] | None = None, quirk: bool = False
    ):
        self.config, self.order, self.allowed = config, config.order, allowed
        self.raw: list[Counter[Gram]] = [Counter() for _ in range(self.order)]
        ids = {"<s>": 1, "</s>": 2}
        for line in lines:
            words = ["<s>", *line.split(), "</s>"]
            for end in range(1, len(words)):
                ids.setdefault(words[end], len(ids) + 1)
                for size in range(1, min(self.order, end + 1) + 1):
                    self.raw[size - 1][tuple(words[end + 1 - size : end + 1])] += 1
        self.adjusted = [self._adjusted(size) for size in range(1, self.order + 1)]
        self.keep = [{gram for gram in level if self._is_kept(gram)} for level in self.raw]
        self.quirk = (
            {max(level, key=lambda gram: [ids[word] for word in gram[::-1]]) for level in self.raw} if quirk else set()
        )
        self.discounts = [self._discounts(size) for size in range(1, self.order + 1)]
        self.followers: dict[Gram, list[Gram]] = defaultdict(list)
        for gram in itertools.chain(*self.raw):
            self.followers[gram[:-1]].append(gram)

    def _adjusted(self, size: int) -> Counter[Gram]:
        if size == self.order:
            return self.raw[size - 1]
        before = Counter(gram[1:] for gram in self.raw[size])
        return Counter({gram: raw if gram[0] == "<s>" else before[gram] for gram, raw in self.raw[size - 1].items()})

    def _is_kept(self, gram: Gram) -> bool:
        is_allowed = self.allowed is None or set(gram) <= self.allowed | {"<s>", "</s>"}
        is_frequent = self.raw[len(gram) - 1][gram] > self.config.thresholds()[len(gram) - 1]
        return gram == ("</s>",) or (is_allowed and is_frequent)

    def _discounts(self, size: int) -> list[float]:
        last = self.quirk if size < self.order else set()
        counts = Counter((self.raw if gram in last else self.adjusted)[size - 1][gram] for gram in self.raw[size - 1])
        try:
            share = counts[1] / (counts[1] + 2 * counts[2])
            discounts = [i - (i + 1) * share * counts[i + 1] / counts[i] for i in (1, 2, 3)]
            if all(0 <= value <= i for i, value in enumerate(discounts, 1)):
                return [0.0, *discounts]
        except ZeroDivisionError:
            pass
        fallback = self.config.discount_fallback
        if fallback is None:
            raise ValueError(f"no discounts for order {size}")
        return [0.0, *fallback, *[fallback[-1]] * (3 - len(fallback))]

    def freed(self, context: Gram) -> float:
        """Return the freed share of a context, exactly rounded."""
        size = len(context)
        table = self.adjusted[size]
        followers = self.followers[context]
        discounted = [self.discounts[size][min(3, table[g])] if g in self.keep[size] else table[g] for g in followers]
        return math.fsum(discounted) / sum(table[gram] for gram in followers)

    def probability(self, gram: Gram) -> float:
        """Return p(last word | words before)."""
        if gram == ("<s>",):
            return 1.0
        size, uniform = len(gram), 1 / max(len(self.keep[0]) + 1, self.config.vocab_pad or 0)
        context = gram[:-1]
        if gram == ("<unk>",):
            return self.freed(()) * (uniform if self.config.interpolate_unigrams else 1)
        count = self.adjusted[size - 1][gram]
        discounted = (count - self.discounts[size - 1][min(3, count)]) / sum(
            self.adjusted[size - 1][other] for other in self.followers[context]
        )
        if size == 1:
            return discounted + (self.freed(()) * uniform if self.config.interpolate_unigrams else 0)
        return discounted + self.freed(context) * self.probability(gram[1:])

    def entries(self) -> Entries:
        """Return the log10 probability and back-off weight of every line of the model."""
        grams = [("<unk>",), ("<s>",), *itertools.chain(*self.keep)]
        entries = {}
        for gram in grams:
            weight = self.freed(gram) if len(gram) < self.order and self.followers.get(gram) else 1.0
            entries[gram] = (min(0.0, math.log10(self.probability(gram))), math.log10(weight))
        return entries


def read_arpa(path: Path) -> Entries:
    """Read the lines of an ARPA file in order, and check the counts in its header."""
    entries: Entries = {}
    expected, num_lines, size = {}, Counter(), 0
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line.startswith("ngram "):
            order, count = line.removeprefix("ngram ").split("=")
            expected[int(order)] = int(count)
        elif line.endswith("-grams:"):
            size = int(line[1:].split("-")[0])
        elif "\t" in line:
            value, gram, *weight = line.split("\t")
            words = tuple(gram.split(" "))
            assert len(words) == size
            assert bool(weight) == (size < max(expected))
            entries[words] = (float(value), float(weight[0]) if weight else 0.0)
            num_lines[size] += 1
    assert {order: num_lines[order] for order in expected} == expected
    return entries


def assert_equal(actual: Entries, expected: Entries, tolerance: float = 1e-6) -> None:
    """Assert that two models have the same n-grams, probabilities and back-off weights."""
    assert actual.keys() == expected.keys()
    largest = max(abs(actual[gram][side] - expected[gram][side]) for gram in actual for side in (0, 1))
    assert largest < tolerance, largest


class Shuffle:
    """A stand-in for Spark's shuffle: messages by target, their rows in a random order."""

    def __init__(self, batches: Iterable[pa.RecordBatch], seed: int):
        self._targets: dict[int, list[pa.RecordBatch]] = defaultdict(list)
        for batch in batches:
            self._targets[batch.column("target")[0].as_py()].append(batch)
        self._random = random.Random(seed)

    def to(self, target: int) -> Iterator[pa.RecordBatch]:
        """Return the rows of all messages to a target."""
        rows = self._targets[target]
        self._random.shuffle(rows)
        return iter(rows)


def train(
    folder: Path, lines: list[bytes], config: TrainLmConfig, bounds: list[int], allowed: set[str] | None = None
) -> Path:
    """Run the phases of the training without Spark; a part starts at each bound. Return the path of the ARPA file."""
    scratch = Store(str(folder / "scratch"))
    chunks = worker.write_chunks([pa.array(lines, pa.binary())], scratch, config)["chunks"]
    rows = [
        row
        for number, chunk in enumerate(chunks)
        for batch in worker.chunk_words(scratch, number, chunk["words"])
        for row in batch.to_pylist()
    ]
    outside = {row["word"]: allowed is not None and row["word"].decode() not in allowed for row in rows}
    listed = sorted(outside, key=lambda word: (outside[word], word))
    frame = pa.RecordBatch.from_pydict(
        {"outside": pa.array([outside[word] for word in listed], pa.bool_()), "word": pa.array(listed, pa.binary())}
    )
    half = len(listed) // 2
    entries = [
        worker.write_vocabulary(scratch, iter([frame[:half]])),
        worker.write_vocabulary(scratch, iter([frame[half:]])),
    ]
    number = len(bounds) + 1
    plan = make_plan(config, scratch, entries, number)
    batches = (batch for file in plan.vocabulary for batch in worker.word_ids(scratch, *file))
    ids = {row["word"]: row["id"] for batch in batches for row in batch.to_pylist()}
    encoded = []
    for index, chunk in enumerate(chunks):
        chunk_rows = [row for row in rows if row["chunk"] == index]
        columns = {
            "number": pa.array([0, *(row["number"] for row in chunk_rows)], pa.int32()),
            "id": pa.array([EOS, *(ids[row["word"]] for row in chunk_rows)], pa.int64()),
        }
        encoded.append(worker.encode_chunk(plan, chunk["line"], iter([pa.RecordBatch.from_pydict(columns)])))
    plan = replace(plan, bounds=np.array(bounds, np.uint64))
    counts = Shuffle(
        (b for index, line in enumerate(encoded) for b in worker.count_chunk(plan, index, line["path"])), 1
    )
    merged = [worker.merge_counts(plan, counts.to(part)) for part in range(number)]
    smoothing = make_smoothing(config, plan, merged)
    contexts = Shuffle((b for part in range(number) for b in worker.send_contexts(plan, part, merged[part]["path"])), 2)
    buckets = range(number * (config.order - 1))
    sums = Shuffle(
        (b for bucket in buckets for b in worker.sum_bucket_contexts(plan, smoothing, bucket, contexts.to(bucket))), 3
    )
    sections = [
        worker.write_part_sections(plan, smoothing, merged[part]["path"], part, sums.to(part))["sections"]
        for part in range(number)
    ]
    num_lines = [sum(section[order]["lines"] for section in sections) for order in range(config.order)]
    assert num_lines == smoothing.lines()
    paths = [[section[order]["path"] for section in sections] for order in range(config.order)]
    write_arpa(scratch, paths, num_lines, Store(str(folder)), "model.arpa")
    return folder / "model.arpa"


def some_text(seed: int, lines: int = 120, words: int = 60) -> list[str]:
    """Return lines of words with a skewed distribution, some lines empty, some repeated.

    The last word is new, so the bug of lmplz changes nothing.
    """
    chosen = random.Random(seed)
    weights = [1 / (rank + 1) for rank in range(words)]
    names = [f"w{rank}" if rank % 7 else f"ä{rank}" for rank in range(words)]
    text = [" ".join(chosen.choices(names, weights, k=chosen.randrange(0, 9))) for _ in range(lines)]
    return [*text, *text[:15], "the end zzz"]


SETTINGS = [
    {"order": 1},
    {"order": 2},
    {"order": 3, "discount_fallback": [0.5, 1, 1.5]},
    {"order": 4, "prune": [0, 0, 1]},
    {"order": 5, "prune": [0, 1, 1, 2, 3]},
    {"order": 3, "prune": [1]},
    {"order": 3, "interpolate_unigrams": False},
    {"order": 3, "vocab_pad": 500},
]


def bounds_for(number: int) -> list[int]:
    """Return bounds inside words, between words, and around special words: (last word, word before)."""
    pairs = [(2, 1), (2, 9), (3, 0), (7, 0), (7, 12), (7, 30), (20, 5), (21, 0), (63, 1)]
    return [(last << 32) | before for last, before in pairs[:number]]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_any_partitioning_gives_the_bytes_of_the_reference(tmp_path: Path, settings: dict[str, object]) -> None:
    text = some_text(len(str(settings)))
    config = TrainLmConfig(**{"discount_fallback": [0.5, 1, 1.5], **settings})
    models = set()
    for number, tokens in ((0, 10**6), (3, 50), (9, 7)):
        folder = tmp_path / str(number)
        model = train(
            folder,
            [line.encode() for line in text],
            config.model_copy(update={"chunk_tokens": tokens}),
            bounds_for(number),
        )
        models.add(model.read_bytes())
    assert len(models) == 1
    entries = read_arpa(model)
    assert_equal(entries, Reference(text, config).entries())
    # Suffix order, words by their bytes, <unk>, <s> and </s> first.
    rank = {"<unk>": b"", "<s>": b"\0", "</s>": b"\1"}
    keys = [(len(gram), [rank.get(word, word.encode()) for word in gram[::-1]]) for gram in entries]
    assert keys == sorted(keys)


def test_every_context_sums_to_one(tmp_path: Path) -> None:
    text = some_text(3)
    config = TrainLmConfig(order=3, prune=[0, 0, 1], discount_fallback=[0.5, 1, 1.5])
    entries = read_arpa(train(tmp_path, [line.encode() for line in text], config, bounds_for(5)))
    words = [gram[0] for gram in entries if len(gram) == 1 and gram != ("<s>",)]

    def log_probability(gram: Gram) -> float:
        if gram in entries:
            return entries[gram][0]
        return entries.get(gram[:-1], (0.0, 0.0))[1] + log_probability(gram[1:])

    for context in [(), ("w1",), ("<s>",), ("<s>", "w1"), ("w2", "w1"), ("w5", "<unk>")]:
        assert math.fsum(10 ** log_probability((*context, word)) for word in words) == pytest.approx(1, abs=1e-5)


def test_words_outside_the_list_are_left_out(tmp_path: Path) -> None:
    text = some_text(4)
    config = TrainLmConfig(order=3, prune=[0, 0, 1], discount_fallback=[0.5, 1, 1.5])
    allowed = {"w1", "w2", "w3", "w5", "ä7", "zzz", "never"}
    entries = read_arpa(train(tmp_path, [line.encode() for line in text], config, bounds_for(4), allowed))
    assert {gram[0] for gram in entries if len(gram) == 1} == {*(allowed - {"never"}), "<s>", "</s>", "<unk>"}
    assert_equal(entries, Reference(text, config, allowed).entries())


def test_one_word_and_no_word(tmp_path: Path) -> None:
    config = TrainLmConfig(order=4, discount_fallback=[0.5, 1, 1.5])
    for name, text in {"word": ["a"], "empty": ["", ""], "mixed": ["", "a a a a a a"]}.items():
        entries = read_arpa(train(tmp_path / name, [line.encode() for line in text], config, bounds_for(3)))
        assert_equal(entries, Reference(text, config).entries())


def test_degenerate_text_is_rejected_with_its_counts(tmp_path: Path) -> None:
    message = r"got no 1-gram with an adjusted count of 2 \(numbers of 1-grams with adjusted counts 1 to 4: \["
    with pytest.raises(ContractError, match=message):
        train(tmp_path, [b"a b c"], TrainLmConfig(order=2), [])


def test_sums_that_do_not_match_stop_the_run() -> None:
    check_sums(3, 3, 2)
    with pytest.raises(ContractError, match=r"expected 4 sums for the 2-grams of one part, got 3 sums\. Run `penstock"):
        check_sums(4, 3, 2)
