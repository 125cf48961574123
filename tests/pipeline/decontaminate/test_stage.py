"""Tests of decontamination: overlaps of an n-gram's length and of one word less, and the decisions on them."""

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pydantic import ValidationError

from pipeline.decontaminate.index import compile_index
from pipeline.decontaminate.stage import (
    DECONTAMINATE,
    DecontaminateConfig,
    contamination_table,
    figures_of,
    make,
    model_files,
    most_ngrams,
    set_sizes,
)
from pipeline.engine.rules import columns_of, evaluate_checks
from pipeline.text.words import normal_words, word_keys
from schemas.entries import to_entries
from schemas.tables import DOCUMENTS

ITEM = [f"word{letter}" for letter in "abcdefghijklmnopqrstuvwxyz"]  # 26 words, letters alone
BEFORE, AFTER = "Something else comes before it", "and something else comes after it as well"
CHINESE = "北京大学的研究人员昨天在会议上宣布他们发现了一种新的材料可以在常温下导电"


def write(path: Path, *items: object) -> str:
    path.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items), encoding="utf-8")
    return str(path)


def row_of(text: str) -> dict:
    body = {"text": text, "_body": text, "_words": word_keys(normal_words(text)), "cuts": []}
    return body | {"num_bytes": len(text.encode("utf-8", "surrogatepass"))}


def measured(config: DecontaminateConfig, folder: Path, *texts: str) -> list[dict]:
    """Return the rows of texts after the stage, which may have to compute the keys of their words."""
    paths = model_files(config)
    function = make(config, paths | compile_index(config, paths, str(folder)))
    rows = [row_of(text) for text in texts]
    for row in rows:
        unread = row | {"_words": None}
        assert function(row) is None
        assert function(unread) is None
        assert np.array_equal(unread.pop("_words"), row["_words"])
        assert unread == {name: value for name, value in row.items() if name != "_words"}
    return rows


def settings(folder: Path, *items: object, **others: object) -> DecontaminateConfig:
    return DecontaminateConfig(evaluation_sets={"exam": write(folder / "exam.jsonl", *items)}, **others)


@pytest.mark.parametrize("ngram", [5, 8, 13, 20])
def test_runs_of_n_words_match_and_shorter_runs_do_not(tmp_path: Path, ngram: int) -> None:
    config = settings(tmp_path, {"question": " ".join(ITEM)}, ngram=ngram, min_item_words=1)
    exact = [(0, ngram), (26 - ngram, 26), (3, 3 + ngram)]
    short = [(0, ngram - 1), (27 - ngram, 26), (3, 2 + ngram)]
    texts = [f"{BEFORE} {' '.join(ITEM[start:end])} {AFTER}" for start, end in exact + short]
    rows = measured(config, tmp_path, *texts)
    assert [row["contamination"] for row in rows] == [{"exam": 1}] * 3 + [{}] * 3
    assert [row["contaminated_share"] for row in rows[:3]] == [float(np.float32(ngram / (ngram + 13)))] * 3
    assert [row["contaminated_share"] for row in rows[3:]] == [0.0] * 3
    longer = measured(config, tmp_path, " ".join(ITEM[: ngram + 2]))[0]
    assert (longer["contamination"], longer["contaminated_share"]) == ({"exam": 3}, 1.0)


@pytest.mark.parametrize(
    ("text", "matches"),
    [
        ("The CAFÉ served 3.5 litres, didn’t it? One two three four five", True),
        ("the cafe — served 1,000\n\tlitres (didn't it): one;two;three;four;five!", True),
        ("the cafe\u0301 served 7 litres didn t it one two three four five", True),
        ("the cafe served seven litres didn t it one two three four five", False),
        ("the cafe served 7 litres didnt it one two three four five", False),
    ],
)
def test_case_numbers_punctuation_and_accents_make_no_difference(tmp_path: Path, text: str, matches: bool) -> None:
    item = "The café served 12 litres; didn't it? ONE two, three four five."
    config = settings(tmp_path, {"question": item})
    assert bool(measured(config, tmp_path, f"{BEFORE}. {text} {AFTER}")[0]["contamination"]) is matches


QUOTED = "The old 'well-known' sign said: no-one, not even dogs, may enter here after nine o'clock"
WRITINGS = {
    "quotes": QUOTED.replace("'", "\u2018"),
    "primes": QUOTED.replace("'", "\u2032"),
    "low quotes": QUOTED.replace("'", "\u201a"),
    "angles": QUOTED.replace("'well", "\u2039well").replace("known'", "known\u203a"),
    **{f"dash {code:x}": QUOTED.replace("-", chr(code)) for code in (0x2010, 0x2011, 0x2012, 0x2015, 0x2212, 0xFE63)},
    **{f"bullet {code:x}": QUOTED.replace(", ", f" {chr(code)} ") for code in (0x2022, 0x25E6, 0xB7, 0x2192, 0x1F600)},
    "emoji at a word": QUOTED.replace(",", "\U0001f44d\U0001f3fd\ufe0f"),
    "trade mark": QUOTED.replace("sign", "sign\u2122"),
    **{f"inside {code:x}": QUOTED.replace("ld", f"l{chr(code)}d") for code in (0xAD, 0x200B, 0x200C, 0x2060, 0xFEFF)},
    "between": QUOTED.replace(" ", "\u200b \u200b"),
    "danda": QUOTED + "\u0964",
}


@pytest.mark.parametrize("writing", WRITINGS.values(), ids=WRITINGS)
def test_a_short_text_is_found_whole_with_other_signs(tmp_path: Path, writing: str) -> None:
    plain = {"question": QUOTED}, QUOTED
    for (item, _), text in (((plain[0], 0), writing), (({"question": writing}, 0), QUOTED)):
        config = settings(tmp_path, item, ngram=18, min_item_words=18)
        row = measured(config, tmp_path, f"{BEFORE}. {text} {AFTER}")[0]
        assert row["contamination"] == {"exam": 1}, text


@pytest.mark.parametrize("sign", ["\u2018", "\u2011", "\u200b", "\U0001f600"])
def test_text_with_other_signs_is_cut(tmp_path: Path, sign: str) -> None:
    config = settings(tmp_path, {"question": QUOTED}, ngram=18, action="cut", cut_margin=0, min_piece_chars=0)
    text = QUOTED.replace(" dogs", f"{sign} dogs")
    row = measured(config, tmp_path, f"{BEFORE}.\n{text}\n{AFTER}")[0]
    assert row["_body"] == f"{BEFORE}.\n{AFTER}"


@pytest.mark.parametrize("words", [7, 8, 12])
def test_a_short_text_is_matched_whole_if_it_has_the_words(tmp_path: Path, words: int) -> None:
    config = settings(tmp_path, {"question": " ".join(ITEM[:words])}, {"question": " ".join(ITEM)})
    texts = (f"{BEFORE} {' '.join(ITEM[:words])} {AFTER}", f"{BEFORE} {' '.join(ITEM[1:words])} {AFTER}")
    contamination = [row["contamination"] for row in measured(config, tmp_path, *texts)]
    assert contamination == [{"exam": 1} if words >= 8 else {}, {}]


def test_characters_are_the_units_where_words_are_not_spaced(tmp_path: Path) -> None:
    config = settings(tmp_path, {"question": CHINESE + "？"}, {"question": "短的问题没有足够的字符"})
    texts = [
        f"今天的新闻：{CHINESE[3:23]}。",
        f"今天的新闻：{CHINESE[3:22]}。",
        f"News: {' '.join(CHINESE[3:13])},\n{CHINESE[13:23]}.",
        "短的问题没有足够的字符",  # 11 characters; 8/13 of 20 are 13
    ]
    rows = measured(config, tmp_path, *texts)
    assert [row["contamination"] for row in rows] == [{"exam": 1}, {}, {"exam": 1}, {}]
    assert rows[0]["contaminated_share"] == float(np.float32(20 / 25))
    thai = "กระทรวงศึกษาธิการประกาศผลการสอบประจำปีในวันพรุ่งนี้เช้า"
    config = settings(tmp_path, {"question": thai})
    assert measured(config, tmp_path, f"ข่าว {thai}")[0]["contamination"]["exam"] > 1
    japanese = "次の文章を読んで、後の問いに答えなさい。ただし句読点も一字と数える。"
    config = settings(tmp_path, {"question": japanese})
    assert measured(config, tmp_path, f"問題　{japanese}")[0]["contaminated_share"] > 0.9


def test_spaced_words_match_in_an_unspaced_page_and_conversely(tmp_path: Path) -> None:
    config = settings(tmp_path, {"question": " ".join(ITEM)}, {"question": CHINESE})
    mixed = f"{CHINESE[:5]} {' '.join(ITEM[:13])} {CHINESE}"
    row = measured(config, tmp_path, mixed)[0]
    assert row["contamination"] == {"exam": 1 + len(CHINESE) - 19}
    assert row["_hits"] == [("exam:1", False), ("exam:2", True)]


def test_hits_name_the_items_and_mark_whole_items(tmp_path: Path) -> None:
    items = [{"question": " ".join(words)} for words in (ITEM, ITEM[:13], ITEM[6:19], reversed(ITEM))]
    config = settings(tmp_path, *items)
    rows = measured(config, tmp_path, " ".join(ITEM[:13]), " ".join(ITEM[:22]), " ".join(ITEM[:21]), BEFORE)
    assert rows[0]["_hits"] == [("exam:1", False), ("exam:2", True)]
    assert rows[1]["_hits"] == [("exam:1", True), ("exam:2", True), ("exam:3", True)]  # 10 of 14 n-grams
    assert rows[2]["_hits"] == [("exam:1", False), ("exam:2", True), ("exam:3", True)]  # 9 of 14
    assert "_hits" not in rows[3]


def test_several_sets_are_counted_apart_and_an_ngram_counts_once(tmp_path: Path) -> None:
    paths = {
        "b": write(tmp_path / "b.jsonl", {"question": " ".join(ITEM[:14])}, {"question": " ".join(ITEM[:13])}),
        "a": write(tmp_path / "a.jsonl", {"own": {"part": [{"text": " ".join(ITEM[1:16])}]}, "question": "x " * 20}),
        "c": write(tmp_path / "c.jsonl", {"question": " ".join(reversed(ITEM))}),
    }
    config = DecontaminateConfig(evaluation_sets=paths, fields={"a": ("own.part.text",)})
    text = f"{BEFORE} {' '.join(ITEM)} {AFTER} {' '.join(ITEM)}"
    row = measured(config, tmp_path, text)[0]
    assert row["contamination"] == {"a": 3, "b": 2}
    assert list(row["contamination"]) == ["a", "b"]
    assert row["contaminated_share"] == float(np.float32(32 / 65))  # words a to p, twice, of 5 + 26 + 8 + 26


def test_ignored_text_does_not_count(tmp_path: Path) -> None:
    ignored = write(tmp_path / "ignored.jsonl", {"text": " ".join(ITEM[:14])})
    config = settings(tmp_path, {"question": " ".join(ITEM[:20])}, ignored=ignored)
    rows = measured(config, tmp_path, " ".join(ITEM[:14]), " ".join(ITEM[:15]))
    assert [row["contamination"] for row in rows] == [{}, {"exam": 1}]


@pytest.mark.parametrize("text", ["", " ", "?!", "one", "\ud800 " * 20, "字", "\x00" * 30])
def test_odd_texts_share_nothing(tmp_path: Path, text: str) -> None:
    config = settings(tmp_path, {"question": " ".join(ITEM)}, {"question": CHINESE}, action="cut")
    row = measured(config, tmp_path, text)[0]
    assert (row["contamination"], row["contaminated_share"], row["contaminated_pieces"]) == ({}, 0.0, None)
    assert row["_body"] == text


def test_canaries_are_counted_in_the_raw_text() -> None:
    canary = "canary GUID 26b5c67b"
    rows = [
        {"text": f"{canary} {canary}", "_body": ""},
        {"text": canary.upper(), "_body": ""},
        {"text": "", "_body": ""},
    ]
    exact, either = (DecontaminateConfig(canaries=(canary, "x" * 9), canary_ignore_case=i) for i in (False, True))
    for config, expected in ((exact, [2, 0, 0]), (either, [2, 1, 0])):
        for row in rows:
            make(config, {})(row)
        assert [row["canaries"] for row in rows] == expected
        assert [row["contamination"] for row in rows] == [None] * 3


def test_nothing_is_measured_without_sets_and_canaries() -> None:
    row = row_of("text")
    assert (model_files(DecontaminateConfig()), compile_index(DecontaminateConfig(), {}, "nowhere")) == ({}, {})
    make(DecontaminateConfig(), {})(row)
    assert {row[name] for name in DECONTAMINATE.adds} == {None}
    assert DECONTAMINATE.checks(DecontaminateConfig(), {}, {}) == []


def batch_of(rows: list[dict]) -> pa.RecordBatch:
    schema = pa.schema([*(field for field in DOCUMENTS if field.name in {*DECONTAMINATE.adds, "language"})])
    if "contaminated_pieces" not in schema.names:
        schema = schema.append(pa.field("contaminated_pieces", pa.int32()))
    rows = [row | {"contamination": to_entries(row.get("contamination"))} for row in rows]
    arrays = [pa.array([row.get(field.name) for row in rows], field.type) for field in schema]
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def verdicts(config: DecontaminateConfig, *rows: dict) -> list[tuple[str, float, float] | None]:
    """Return reason, value and limit for each row."""
    checks = DECONTAMINATE.checks(config, {}, {})
    batch = batch_of([{"language": "en"} | row for row in rows])
    assert set(columns_of(checks)) <= set(batch.schema.names)
    judged = evaluate_checks(checks, batch)
    return [
        None if number < 0 else (checks[number].reason, judged.values[number, at], judged.limits[number, at])
        for at, number in enumerate(judged.first)
    ]


def test_verdicts_on_both_sides_of_every_limit() -> None:
    def shared(counts: dict[str, int] | None, share: float = 0.0) -> dict:
        return {"contamination": counts, "contaminated_share": share}

    sets = {"evaluation_sets": {"exam": "exam.jsonl"}}
    default = DecontaminateConfig(**sets)
    assert verdicts(default, shared({}), shared({"a": 1, "b": 3}), shared(None)) == [None, ("contaminated", 3, 0), None]
    some = DecontaminateConfig(**sets, max_ngrams=2)
    assert verdicts(some, shared({"a": 2, "b": 2}), shared({"a": 3}, 0.9)) == [None, ("contaminated", 3, 2)]
    share = DecontaminateConfig(**sets, max_contaminated_share=0.5)
    assert verdicts(share, shared({"a": 99}, 0.5), shared({"a": 1}, 0.75)) == [None, ("contaminated_share", 0.75, 0.5)]
    both = DecontaminateConfig(**sets, max_contaminated_share=0.5, max_ngrams=5)
    assert [v and v[0] for v in verdicts(both, shared({"a": 6}, 0.1), shared({"a": 5}, 0.6))] == [
        "contaminated",
        "contaminated_share",
    ]
    cut = DecontaminateConfig(**sets, action="cut", max_pieces=3)
    pieces = [{"contaminated_pieces": number} for number in (None, 0, 1, 3, 4)]
    expected = [None, ("contaminated_whole", 0, 1), None, None, ("contaminated_pieces", 4, 3)]
    assert verdicts(cut, *pieces) == expected
    assert verdicts(DecontaminateConfig(**sets, action="measure"), shared({"a": 9}, 1.0)) == [None]
    canary = DecontaminateConfig(canaries=("mark",), max_canaries=1)
    assert verdicts(canary, {"canaries": 1}, {"canaries": 2}, {"canaries": None}) == [None, ("canary", 2, 1), None]
    assert verdicts(DecontaminateConfig(canaries=("mark",)), {"canaries": 1}) == [("canary", 1, 0)]
    reached = {check.reason for c in (default, share, cut, canary) for check in DECONTAMINATE.checks(c, {}, {})}
    assert reached == set(DECONTAMINATE.verdicts)


def test_most_ngrams_of_a_slice() -> None:
    rows = [{"contamination": counts} for counts in ({"a": 9}, None, {}, {"a": 2, "b": 5}, {"c": 1}, {"a": 7})]
    values = most_ngrams(batch_of(rows).slice(1, 4))
    assert np.array_equal(values, [np.nan, 0, 5, 1], equal_nan=True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ngram": 8}, r"got ngram \(ignored without evaluation_sets\)\. Remove"),
        ({"action": "cut"}, r"got action \(ignored without evaluation_sets\)\. Remove"),
        ({"max_canaries": 1}, r"got max_canaries \(ignored without canaries\)\. Remove"),
        ({"canary_ignore_case": True}, r"got canary_ignore_case \(ignored without canaries\)\. Remove"),
        ({"canaries": ("  ",)}, "canaries: expected text, got blank '  '"),
        (
            {"canary_ignore_case": True, "fields": {"a": ("b",)}},
            r"canary_ignore_case .*Remove them from \[decontaminate\]\. fields: .*got 'a'",
        ),
        ({"sets": True, "cut_margin": 1}, r"got cut_margin \(ignored with action 'drop'\)"),
        ({"sets": True, "action": "cut", "max_ngrams": 1}, r"got max_ngrams \(ignored with action 'cut'\)"),
        ({"sets": True, "action": "measure", "max_pieces": 9}, r"got max_pieces \(ignored with action 'measure'\)"),
        ({"sets": True, "ngram": 8, "min_item_words": 9}, r"min_item_words = 9 \(ignored: a text of 8 words"),
        ({"sets": True, "fields": {"exams": ("x",)}}, r"names of evaluation sets, got 'exams' \(did you mean 'exam'"),
        ({"sets": True, "fields": {"exam": ()}}, r"fields\.exam: expected at least one field, got none"),
        ({"sets": True, "ngram": 4}, "greater than or equal to 5"),
        ({"sets": True, "ngram": 21}, "less than or equal to 20"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(given: dict, message: str) -> None:
    sets = {"evaluation_sets": {"exam": "exam.jsonl"}} if given.get("sets") else {}
    with pytest.raises(ValidationError, match=message):
        DecontaminateConfig(**sets, **{name: value for name, value in given.items() if name != "sets"})


def test_only_cutting_changes_what_is_measured() -> None:
    sets = {"evaluation_sets": {"exam": "exam.jsonl"}}
    drop, measure, cut = (DecontaminateConfig(**sets, action=action) for action in ("drop", "measure", "cut"))
    assert drop.content() == measure.content() != cut.content()
    assert drop.decisions() != measure.decisions()
    assert DecontaminateConfig(**sets, max_ngrams=7).content() == drop.content()
    assert "evaluation_sets" not in drop.content()


def test_figures_and_their_table(tmp_path: Path) -> None:
    items = [{"question": " ".join(ITEM)}, {"question": " ".join(ITEM[:14])}, {"question": "too short"}]
    paths = {"exam": write(tmp_path / "exam.jsonl", *items), "quiz": write(tmp_path / "quiz.jsonl", items[0])}
    config = DecontaminateConfig(evaluation_sets=paths, canaries=("GUID",))
    rows = measured(config, tmp_path, " ".join(ITEM[:14]), f"GUID {' '.join(ITEM[:13])} GUID", BEFORE)
    figures: dict[str, dict[str, int]] = {}
    for row in rows:
        for figure, name, amount in figures_of(row):
            counter = figures.setdefault(figure, {})
            counter[name] = counter.get(name, 0) + amount
    assert figures == {
        "contaminated_documents": {"exam": 2, "quiz": 2},
        "contaminated_ngrams": {"exam": 3, "quiz": 3},
        "contaminated_items": {"exam:1": 2, "exam:2": 2, "quiz:1": 2},
        "contaminated_items_whole": {"exam:2": 1},
        "canaries": {"documents": 1, "occurrences": 2},
    }
    index = compile_index(config, model_files(config), str(tmp_path))["index"]
    sizes = {"exam": {"items": 3, "indexed": 2, "ngrams": 14}, "quiz": {"items": 1, "indexed": 1, "ngrams": 14}}
    assert set_sizes(index) == sizes
    lines = contamination_table({**figures, "evaluation_sets": sizes}).splitlines()
    assert " ".join(lines[0].split()) == "evaluation set items looked for seen share seen 70% documents n-grams"
    assert lines[1].split() == ["exam", "3", "2", "2", "66.67%", "1", "2", "3"]
    assert lines[2].split() == ["quiz", "1", "1", "1", "100.00%", "0", "2", "3"]
    assert lines[3] == "canary strings: 2 in 1 documents"
    assert contamination_table({}) == ""
    assert contamination_table({"canaries": figures["canaries"]}) == lines[3]
