"""The demo crawl: planted pages are at the offset and of the kind in the truth file, and their rule drops them."""

import gzip
import hashlib
import itertools
import json
import os
import random
import re
import string
import subprocess
import sys
import zlib
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest

from pipeline.demo_crawl import hostile_pages as unsafe
from pipeline.demo_crawl import text as harvest
from pipeline.demo_crawl import write as capture
from pipeline.demo_crawl.bad_pages import LOW_QUALITY
from pipeline.demo_crawl.build import (
    CHARSETS,
    DROPPED_LANGUAGE,
    LEVELS,
    Encoding,
    build_demo_crawl,
    compose,
    templates_of,
)
from pipeline.demo_crawl.hostile_pages import DEMO_TOXIC_WORDS, FAKE_VALUES, FAULTS
from pipeline.demo_crawl.html import jaccard
from pipeline.demo_crawl.text import Passage, Stock
from pipeline.demo_crawl.write import Truth
from pipeline.engine.rules import evaluate_row
from pipeline.engine.stage import Drop, Row, Split
from pipeline.extract.extract import EXTRACT
from pipeline.quality.stage import QUALITY
from pipeline.sources.source import SOURCE
from schemas.errors import ConfigError
from tests.support.paths import ROOT

PAGES = 300
CASES = 4
NO_RECORD = {"record_garbage", "record_corrupt", "record_truncated"}
Position = tuple[str, int]


@pytest.fixture(scope="module")
def crawl(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Truth]:
    folder = tmp_path_factory.mktemp("crawl")
    return folder, build_demo_crawl(folder, PAGES, seed=1)


@pytest.fixture(scope="module")
def planted(crawl: tuple[Path, Truth]) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (crawl[0] / "truth.jsonl").read_text("utf-8").splitlines()]


@pytest.fixture(scope="module")
def rows(crawl: tuple[Path, Truth]) -> dict[Position, tuple[Row, Drop | None]]:
    """Return every row of the crawl with its text, or the drop without text, by file and offset."""
    extract = EXTRACT.make(EXTRACT.config(), {})
    rows = {}
    for path in sorted(crawl[0].glob("*.warc.gz")):
        split = Split(0, path.name, str(path), path.stat().st_size, "", "web", "warc")
        with path.open("rb") as stream:
            lengths = 0
            for row, drop in SOURCE.open(split, stream, SOURCE.config(paths=("crawl.warc.gz",))):
                rows[path.name, row["offset"]] = row, drop or extract(row)
                lengths += row["length"]
        assert lengths == path.stat().st_size
    return rows


def record(folder: Path, line: dict[str, Any]) -> bytes:
    """Return the decompressed record of a truth line."""
    with (folder / line["file"]).open("rb") as file:
        file.seek(line["offset"])
        return gzip.decompress(file.read(line["length"]))


def body(folder: Path, line: dict[str, Any]) -> bytes:
    """Return the HTTP body of the record of a truth line."""
    return record(folder, line).split(b"\r\n\r\n", 2)[2].removesuffix(b"\r\n\r\n")


def digests(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(folder.iterdir())}


def similarity(a: str, b: str) -> float:
    """Return the Jaccard similarity by an independent implementation: sets of 5 consecutive lower-cased words."""
    first, second = (
        {" ".join(words[i : i + 5]) for i in range(len(words) - 4)}
        for words in (re.findall(r"\w+", text.lower()) for text in (a, b))
    )
    return len(first & second) / len(first | second)


def test_every_kind_is_planted_in_its_number(crawl: tuple[Path, Truth], planted: list[dict[str, Any]]) -> None:
    folder, truth = crawl
    counts = Counter(line["kind"] for line in planted)
    assert truth.counts == dict(counts)
    for kind in [
        *LOW_QUALITY,
        *(f"pii_{kind}" for kind in FAKE_VALUES),
        *(f"near_{round(100 * x)}" for x in LEVELS),
        "toxic",
    ]:
        assert counts[kind] == (2 if kind == "gopher_long_doc" else CASES), kind
    assert counts["language"] + counts["wrong_charset"] == CASES * len(CHARSETS) // 2
    assert counts["exact_bytes"] == counts["exact_text"] == 7
    assert counts["original"] == CASES * (2 + len(LEVELS))
    encodings = {kind: number for kind, number in counts.items() if kind.removeprefix("encoding_") in capture.ENCODINGS}
    assert encodings == {f"encoding_{name}": 5 for name in capture.ENCODINGS if name != "identity"}
    assert all(counts[f"record_{fault}"] == 1 for fault in FAULTS)
    assert truth.num_pages == PAGES - sum(encodings.values())
    assert truth.num_responses == truth.num_pages + len(planted) - counts["record_garbage"]
    assert json.loads((folder / "truth.json").read_text("utf-8")) == truth.to_json()


def test_another_process_writes_the_same_bytes_and_another_seed_does_not(
    crawl: tuple[Path, Truth], tmp_path: Path
) -> None:
    code = (
        "from pathlib import Path\nfrom pipeline.demo_crawl.build import build_demo_crawl\n"
        f"build_demo_crawl(Path({str(tmp_path / 'same')!r}), {PAGES}, 1)\n"
        f"build_demo_crawl(Path({str(tmp_path / 'other')!r}), 100, 2)\n"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "TZ": "Asia/Tokyo"}
    subprocess.run([sys.executable, "-c", code], check=True, env=environment, cwd=ROOT)
    first, same, other = digests(crawl[0]), digests(tmp_path / "same"), digests(tmp_path / "other")
    assert list(first) == [*(f"demo-00{n}.warc.gz" for n in range(4)), "truth.json", "truth.jsonl"]
    assert first == same
    assert set(first.values()).isdisjoint(other.values())


def test_every_gzip_member_is_whole_but_the_broken_ones(
    crawl: tuple[Path, Truth], planted: list[dict[str, Any]]
) -> None:
    folder, truth = crawl
    broken = {(line["file"], line["offset"]): line for line in planted if line["kind"] in NO_RECORD}
    assert len(broken) == 3
    kinds: Counter[str] = Counter()
    for name in truth.files:
        data, position = (folder / name).read_bytes(), 0
        while position < len(data):
            if line := broken.pop((name, position), None):
                with pytest.raises((OSError, EOFError, zlib.error)):
                    gzip.decompress(data[position : position + line["length"]])
                position += line["length"]
                continue
            decoder = zlib.decompressobj(31)
            kind = re.match(rb"WARC/1\.0\r\nWARC-Type: (\w+)\r\n", decoder.decompress(data[position:]))
            assert kind, (name, position)
            assert decoder.eof
            assert position or kind[1] == b"warcinfo"
            kinds[kind[1].decode()] += 1
            position = len(data) - len(decoder.unused_data)
    assert not broken
    assert kinds["warcinfo"] == 4
    assert kinds["response"] == truth.num_responses - 2
    assert kinds["request"] == truth.num_requests > 20
    assert truth.num_records == kinds.total() + 3  # a corrupt, a truncated and an unreadable member


def test_the_truth_points_at_the_records(crawl: tuple[Path, Truth], planted: list[dict[str, Any]]) -> None:
    for line in planted:
        if line["kind"] in NO_RECORD:
            continue
        head, _, rest = record(crawl[0], line).partition(b"\r\n\r\n")
        fields = dict(field.split(": ", 1) for field in head.decode().splitlines()[1:])
        assert fields["WARC-Target-URI"] == line["url"]
        assert fields["WARC-Record-ID"] == f"<{line['record_id']}>"
        size = len(rest) - 4
        stated = fields.get("Content-Length")
        expected = {"record_length_too_small": str(size // 2), "record_length_too_large": str(size + 5000)}
        assert stated == (None if line["kind"] == "record_no_length" else expected.get(line["kind"], str(size)))
    urls = [line["url"] for line in planted]
    assert len(set(urls)) == len(urls)
    assert {url.split("/")[2].rpartition(".")[2] for url in urls} <= {"example", "com", "org", "net", "invalid", "test"}


def test_near_copies_have_the_stored_similarity(
    planted: list[dict[str, Any]], rows: dict[Position, tuple[Row, Drop | None]]
) -> None:
    texts = {line["url"]: rows[line["file"], line["offset"]][0].get("text") for line in planted}
    expected = {95: "drop", 90: "drop", 80: "drop", 70: "either", 50: "keep", 30: "keep"}
    exact: list[bool] = []
    for line in planted:
        if line["kind"].startswith("near_"):
            level = int(line["kind"].removeprefix("near_"))
            assert line["jaccard"] == pytest.approx(level / 100, abs=0.02)
            # Of a few pages, the extractor leaves out a line.
            alike = similarity(texts[line["url"]], texts[line["group"]])
            assert alike == pytest.approx(line["jaccard"], abs=0.02)
            exact.append(alike == pytest.approx(line["jaccard"], abs=1e-6))
            assert line["expected"] == expected[level]
        elif line["kind"].startswith("exact_"):
            assert texts[line["url"]].split() == texts[line["group"]].split()
            assert line["rules"] == ["exact_duplicate", "near_duplicate"]
    assert sum(exact) >= 0.9 * len(exact) > 0


def test_exact_copies_differ_in_bytes_unless_they_have_the_same_layout(
    crawl: tuple[Path, Truth], planted: list[dict[str, Any]]
) -> None:
    by_url = {line["url"]: line for line in planted}
    for line in planted:
        if line["kind"].startswith("exact_"):
            same = body(crawl[0], line) == body(crawl[0], by_url[line["group"]])
            assert same == (line["kind"] == "exact_bytes")


MEASURE_QUALITY = QUALITY.make(QUALITY.config(), {})
QUALITY_CHECKS = QUALITY.checks(QUALITY.config(), {}, {})


def quality_verdict(row: Row) -> tuple[str, float, float] | None:
    measured = row | {"language": "en"}
    MEASURE_QUALITY(measured)
    return evaluate_row(QUALITY_CHECKS, measured)


def test_each_bad_page_is_dropped_by_its_own_rule_first(
    planted: list[dict[str, Any]], rows: dict[Position, tuple[Row, Drop | None]]
) -> None:
    rules: dict[str, list[str | None]] = defaultdict(list)
    for line in planted:
        if line["kind"] in LOW_QUALITY:
            row, drop = rows[line["file"], line["offset"]]
            assert drop is None
            verdict = quality_verdict(row)
            rules[line["kind"]].append(verdict[0] if verdict else None)
    assert rules == {kind: [rule] * len(rules[kind]) for kind, (_, rule) in LOW_QUALITY.items()}


def test_ordinary_pages_pass_and_are_no_copies_of_each_other(
    planted: list[dict[str, Any]], rows: dict[Position, tuple[Row, Drop | None]]
) -> None:
    positions = {(line["file"], line["offset"]) for line in planted}
    pages = [row for key, (row, drop) in rows.items() if key not in positions and row["record_type"] == "response"]
    assert len(pages) == 275
    verdicts = [quality_verdict(row) for row in pages]
    assert sum(verdict is None for verdict in verdicts) >= 0.98 * len(pages)
    assert sum(len(row["text"]) for row in pages) / len(pages) > 1000
    holders: dict[str, list[int]] = defaultdict(list)
    sizes = []
    for number, row in enumerate(pages):
        words = re.findall(r"\w+", row["text"].lower())
        grams = {" ".join(words[i : i + 5]) for i in range(len(words) - 4)}
        sizes.append(len(grams))
        for gram in grams:
            holders[gram].append(number)
    shared = Counter(pair for numbers in holders.values() for pair in itertools.combinations(numbers, 2))
    assert max(count / (sizes[a] + sizes[b] - count) for (a, b), count in shared.items()) < 0.25


def test_broken_captures_are_dropped_for_their_reason_or_kept(
    planted: list[dict[str, Any]], rows: dict[Position, tuple[Row, Drop | None]]
) -> None:
    in_rows = Counter((line["file"], line["offset"]) in rows for line in planted)
    assert in_rows == {True: len(planted)}
    dropped = set()
    for line in planted:
        row, drop = rows[line["file"], line["offset"]]
        reasons = set(line["rules"]) & (SOURCE.reasons.keys() | EXTRACT.reasons.keys())
        if reasons:
            assert drop is not None, line
            assert drop.rule in reasons, line
            dropped.add(drop.rule)
        else:
            assert drop is None, (line, drop)
            assert row["text"]
    sources = {"http_status", "not_html", "no_http_header", "bad_encoding", "page_too_large", "empty_page"}
    damage = {"truncated_record", "lying_length", "bad_header", "bad_gzip", "unreadable_gap"}
    assert dropped == sources | damage | {"no_text", "too_deep"}


def test_foreign_pages_have_the_charset_and_declarations_of_the_truth(
    crawl: tuple[Path, Truth], planted: list[dict[str, Any]], rows: dict[Position, tuple[Row, Drop | None]]
) -> None:
    seen = set()
    for line in planted:
        if line["kind"] not in ("language", "wrong_charset"):
            continue
        html = body(crawl[0], line).decode(line["charset"])
        head = record(crawl[0], line).split(b"\r\n\r\n")[1].decode()
        stated = re.search(r"Content-Type: text/html(?:; charset=(\S+))?\r\n", head)
        assert stated
        assert stated[1] == line["http_charset"]
        meta = re.search(r"<meta [^>]*charset=\"?([\w-]+)", html)
        assert (meta[1] if meta else None) == line["meta_charset"]
        right = {line["http_charset"], line["meta_charset"]} - {None} == {line["charset"]}
        assert line["kind"] == ("language" if right else "wrong_charset")
        assert line["expected"] == ("drop" if line["language"] == DROPPED_LANGUAGE else "keep")
        text = rows[line["file"], line["offset"]][0]["text"]
        assert " ".join(text.split()[:5]) in " ".join(re.sub(r"<[^>]*>", " ", html).replace("&#x27;", "'").split())
        seen.add((line["language"], line["charset"]))
    assert {("zh", "gb18030"), ("ja", "shift_jis"), ("ru", "windows-1251"), ("de", "iso-8859-1")} < seen


def test_planted_values_are_in_the_text_and_have_valid_checksums(
    planted: list[dict[str, Any]], rows: dict[Position, tuple[Row, Drop | None]]
) -> None:
    seen: Counter[str] = Counter()
    for line in planted:
        if "pii" not in line:
            continue
        text = rows[line["file"], line["offset"]][0]["text"]
        assert Counter(name for name, _ in line["values"]) == line["pii"]
        assert line["pii"][line["kind"].removeprefix("pii_")] >= 1
        for name, value in line["values"]:
            assert value in text
            assert CHECKS[name](value), (name, value)
            seen[name] += 1
    assert set(seen) == set(FAKE_VALUES)


def luhn(value: str) -> bool:
    digits = [int(digit) for digit in re.sub(r"[ -]", "", value)][::-1]
    return (sum(digits[::2]) + sum(sum(divmod(2 * digit, 10)) for digit in digits[1::2])) % 10 == 0


def mod_97(value: str) -> bool:
    compact = value.replace(" ", "")
    return int("".join(str(int(sign, 36)) for sign in compact[4:] + compact[:4])) % 97 == 1


def base58check(value: str) -> bool:
    number = 0
    for sign in value:
        number = 58 * number + unsafe.BASE58.index(sign)
    payload = number.to_bytes(25, "big")
    digest = hashlib.sha256(hashlib.sha256(payload[:-4]).digest()).digest()
    zeros = len(payload) - len(payload.lstrip(b"\0"))
    return payload[-4:] == digest[:4] and len(value) - len(value.lstrip("1")) == zeros


CHECKS = {
    "email": re.compile(r"[a-z]+\.[a-z]+\d\d@example\.(com|org|net)").fullmatch,
    "phone": re.compile(r"(\(\d{3}\) |\+1 \d{3}-)555-01\d\d|\+44 20 7946 0\d{3}").fullmatch,
    "credit_card": luhn,
    "iban": mod_97,
    "ip": re.compile(r"(192\.0\.2|198\.51\.100|203\.0\.113)\.\d+|8\.8\.4\.4|208\.67\.222\.222").fullmatch,
    "us_ssn": re.compile(r"9\d\d-[1-4]\d-\d{4}").fullmatch,
    "crypto": base58check,
}


@pytest.mark.parametrize("kind", sorted(FAKE_VALUES))
def test_a_thousand_fake_values_are_valid(kind: str) -> None:
    rng = random.Random(0)
    assert all(CHECKS[kind](FAKE_VALUES[kind](rng)) for _ in range(1000))


def test_the_checks_reject_invalid_values() -> None:
    assert luhn("4111 1111 1111 1111")
    assert not luhn("4111 1111 1111 1112")
    assert mod_97("GB82 WEST 1234 5698 7654 32")
    assert not mod_97("GB83 WEST 1234 5698 7654 32")
    assert base58check("1BoatSLRHtKNngkdXEeobR76b53LETtpyT")
    assert not base58check("1BoatSLRHtKNngkdXEeobR76b53LETtpyU")


def test_toxic_pages_contain_enough_words_of_the_list(
    planted: list[dict[str, Any]], rows: dict[Position, tuple[Row, Drop | None]]
) -> None:
    wordlist = (ROOT / "pipeline" / "toxicity" / "lists" / "en.txt").read_text("utf-8").split("\n")
    assert set(DEMO_TOXIC_WORDS) <= set(wordlist)
    for line in planted:
        if line["kind"] == "toxic":
            words = rows[line["file"], line["offset"]][0]["text"].split()
            share = sum(word in DEMO_TOXIC_WORDS for word in words) / len(words)
            assert share >= 0.05
            assert share == pytest.approx(line["toxic_word_share"], abs=0.005)


@pytest.mark.parametrize("encoding", CHARSETS, ids=lambda e: f"{e.language}-{e.charset}")
def test_every_sentence_can_be_generated_and_encoded(encoding: Encoding) -> None:
    language = templates_of(encoding.language)
    gaps = {
        gap
        for text in (*language.templates, *language.titles)
        for _, gap, _, _ in string.Formatter().parse(text)
        if gap
    }
    assert gaps == set(language.phrases)
    for name, phrases in language.phrases.items():
        assert len(set(phrases)) == len(phrases) >= 7, name
    text = " ".join(
        [*language.templates, *language.titles, *itertools.chain(*language.phrases.values()), *language.menu]
    )
    assert text.encode(encoding.charset).decode(encoding.charset) == text


def test_texts_of_one_language_are_far_apart() -> None:
    for language in {encoding.language for encoding in CHARSETS}:
        texts = [" ".join(compose(templates_of(language), random.Random(number), 20)[1]) for number in range(12)]
        assert max(jaccard(a, b) for a, b in itertools.combinations(texts, 2)) < 0.1


def test_jaccard_of_small_texts() -> None:
    assert jaccard("a b c d e f", "A, b; c d e!") == 1 / 2  # {abcde, bcdef} and {abcde}
    assert jaccard("a b c d e", "a b c d x") == 0
    assert jaccard("a b c d", "a b") == 1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "Compute the mean of the values along the given axis.\n\n    Parameters\n    ----------\n"
            "    a : array_like\n        The ``array`` of values to average or a :class:`~numpy.matrix` that holds\n"
            "        them in rows.\n",
            [
                "Compute the mean of the values along the given axis.",
                "The array of values to average or a numpy.matrix that holds them in rows.",
            ],
        ),
        (
            "Some words that precede the example and are long enough to be kept here:\n\n>>> mean([1, 2])\n"
            "This is the output of the example and it must not be taken.\n",
            ["Some words that precede the example and are long enough to be kept here."],
        ),
        (
            "- The first item of this list continues\n  in the second line of it, as lists often do.\n"
            "- Too short.\n:param rate: The rate at which the value of the counter is decreased every time.\n",
            [
                "The first item of this list continues in the second line of it, as lists often do.",
                "The rate at which the value of the counter is decreased every time.",
            ],
        ),
    ],
)
def test_markup_becomes_prose(text: str, expected: list[str]) -> None:
    assert list(harvest.paragraphs(text)) == expected


@pytest.mark.parametrize(
    ("text", "is_prose"),
    [
        ("The quick brown fox jumps over a very lazy dog in the park.", True),
        ("the quick brown fox jumps over a very lazy dog in the park.", False),
        ("The quick brown fox jumps over a very lazy dog in the park", False),
        ("The quick brown fox jumped over the lazy dog.", True),
        ("Quick brown foxes jumped over lazy sleeping dogs yesterday.", False),
        ("The foxes are jumping considerably further nowadays.", False),
        ("The quick brown fox {jumps} over a very lazy dog in the park.", False),
        ("The quick brown fox writes to joe@example.com about a lazy dog.", False),
        ("The 1 quick 2 brown 3 fox 4 jumps 5 over 6 a 7 very 8 lazy dog.", False),
        ("THE QUICK BROWN FOX jumps over a very lazy dog in the park.", False),
    ],
)
def test_prose_is_recognized(text: str, is_prose: bool) -> None:
    assert harvest.is_prose(text) is is_prose


def test_a_paragraph_is_used_once() -> None:
    texts = [p for passage in harvest.collect_passages(200_000) for p in passage.paragraphs]
    assert len(set(texts)) == len(texts)
    assert sum(map(len, texts)) >= 200_000


def test_an_empty_stock_and_too_few_pages_are_rejected(tmp_path: Path) -> None:
    stock = Stock([Passage("numpy", ("One paragraph that is all there is in this stock of text.",))])
    assert stock.paragraphs(20) == ("numpy", ["One paragraph that is all there is in this stock of text."])
    with pytest.raises(ConfigError, match=r"got too little\. Lower --pages\."):
        stock.paragraphs(1)
    with pytest.raises(ConfigError, match=r"expected at least 100 pages, got 99\. Set --pages to at least 100\."):
        build_demo_crawl(tmp_path, pages=99)
