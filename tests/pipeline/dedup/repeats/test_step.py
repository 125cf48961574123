"""Tests of the table `repeats`: the cuts of each document and its new verdict, at any partitioning."""

import gzip
import json
from functools import partial
from types import SimpleNamespace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.recipe import recipe_sections
from pipeline.dedup.config import REPEATS, RepeatsConfig
from pipeline.dedup.repeats import keys as parts
from pipeline.dedup.repeats.step import build_repeats, is_enabled, write_repeats
from pipeline.engine.parquet import Part
from pipeline.engine.step import StepContext
from pipeline.perplexity.compile import compile_lm
from pipeline.pii.stage import PII
from pipeline.stages import CHECKED, DOCUMENT_COLUMNS
from pipeline.steps.clean import CleanTask, survivors
from pipeline.steps.verdicts import Reevaluation
from schemas.manifest import part_key
from schemas.overrides import load_recipe
from schemas.storage import Store
from schemas.tables import DEDUP, TEXT, VERDICTS
from schemas.tables import REPEATS as SCHEMA
from tests.support.checked_paths import checked, written_part
from tests.support.repeats_oracle import of_part, total_rows
from tests.support.tiny_arpa import TINY, write_arpa

REEVALUATE = partial(Reevaluation, CHECKED)

SECTIONS = recipe_sections() | {REPEATS.name: RepeatsConfig}
QUIET = ("quality.rules=[]", "toxicity.wordlists={}")
PROSE = "The rain in the north of the country did not stop that night, and with it the river rose to the old bridge."


def recipe(*overrides: str):
    return load_recipe({"source": {"paths": ["x.warc.gz"]}}, overrides, SECTIONS, "test")


def document(number: int, text: str, dropped: str | None = None, **columns: object) -> dict:
    cuts = columns.pop("cuts", [])
    left = "".join(text[a:b] for a, b in zip([0, *(e for _, e in cuts)], [*(s for s, _ in cuts), len(text)]))
    sizes = {"num_chars": len(text), "body_chars": len(left), "num_bytes": len(left.encode("utf-8", "surrogatepass"))}
    row = {"doc_id": bytes([number]) * 16, "source": "web", "language": "en", "text": text, "cuts": cuts} | sizes
    return row | {"snapshot": None, "_dedup": dropped} | columns


class Tables:
    """Hand-made tables of a run whose documents are spread over parts."""

    def __init__(self, folder, rows: list[list[dict]]):
        self.root = folder
        self.count = len(rows)
        for number, documents in enumerate(rows):
            self._write("documents", number, documents, DOCUMENT_COLUMNS)
            self._write("text", number, documents, TEXT)
            measured = [row for row in documents if row.get("drop_stage") is None]
            verdicts = [
                {"doc_id": row["doc_id"], "drop_stage": row["_dedup"], "cluster": row["doc_id"]} for row in measured
            ]
            self._write("dedup", number, verdicts, DEDUP)
            self._write("verdicts", number, verdicts, VERDICTS)
        self.inputs = {name: self._table(name) for name in ("documents", "text", "verdicts", "dedup")}

    def _write(self, name: str, number: int, rows: list[dict], schema: pa.Schema) -> None:
        (self.root / name).mkdir(exist_ok=True, parents=True)
        columns = {column: [row.get(column) for row in rows] for column in schema.names}
        pq.write_table(pa.table(columns, schema=schema), self.root / name / f"{part_key(number)}.parquet")

    def _table(self, name: str) -> SimpleNamespace:
        folder, keys = Store(str(self.root / name)), [part_key(number) for number in range(self.count)]
        paths = {key: checked(folder, f"{key}.parquet") for key in keys}
        content = SimpleNamespace(files=list(paths), figures={"cutoffs": {}})
        manifest = SimpleNamespace(content=content, paths=paths)
        return SimpleNamespace(folder=folder, manifest=manifest)

    def part(self, number: int) -> Part:
        folders = {name: table.folder for name, table in self.inputs.items()}
        return written_part(number, folders, dict.fromkeys(folders, f"{part_key(number)}.parquet"))

    def task(
        self, number: int, *overrides: str, folder: str = "repeats", make_reevaluator=REEVALUATE
    ) -> parts.RepeatsTask:
        store = Store(str(self.root / folder))
        return parts.RepeatsTask(self.part(number), recipe(*overrides), {}, {}, store, make_reevaluator)

    def run(self, *overrides: str, make_reevaluator=REEVALUATE) -> tuple[list[dict], list[dict]]:
        """Return the answers and the rows of the step, with totals computed without Spark."""
        tasks = [self.task(number, *overrides, make_reevaluator=make_reevaluator) for number in range(self.count)]
        config = tasks[0].config
        tallied = [batch for task in tasks for batch in parts.units_of_part(task)]
        known = total_rows(tallied, config.min_count, config.keep_first)
        if "substring" in config.units:
            seeds = total_rows([b for task in tasks for b in parts.seeds_of_part(task)], config.min_count, False)
            windows = [b for n, task in enumerate(tasks) for b in parts.windows_of_part(task, of_part(seeds, n))]
            known += total_rows(windows, config.min_count, config.keep_first)
        answers = [write_repeats(task, of_part(known, number), False) for number, task in enumerate(tasks)]
        return answers, self.rows(answers)

    def rows(self, answers: list[dict]) -> list[dict]:
        paths = [self.root / "repeats" / answer.files["repeats"].path for answer in answers]
        assert all(pq.read_schema(path).equals(SCHEMA) for path in paths)
        return [row for path in paths for row in pq.read_table(path).to_pylist()]


def left(row: dict, text: str) -> str:
    return "".join(char for index, char in enumerate(text) if not inside(index, row["cuts"] or []))


def inside(index: int, cuts: list[dict]) -> bool:
    return any(cut["start"] <= index < cut["end"] for cut in cuts)


LINES = [document(1, "Menu\nalpha one"), document(2, "beta two\nmenu!"), document(3, "MENU\ngamma three\nmenu")]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        # the longest is the first in keep order: 3, then 1 and 2, equally long, by doc_id
        ((), ["alpha one", "beta two", "MENU\ngamma three"]),
        (("repeats.min_count=4",), ["alpha one", "beta two", "MENU\ngamma three"]),
        (("repeats.min_count=5",), ["Menu\nalpha one", "beta two\nmenu!", "MENU\ngamma three\nmenu"]),
        (("repeats.keep_first=false",), ["alpha one", "beta two", "gamma three"]),
        (('dedup.keep=["shortest"]',), ["Menu\nalpha one", "beta two", "gamma three"]),
        (("repeats.min_unit_chars=5",), ["Menu\nalpha one", "beta two\nmenu!", "MENU\ngamma three\nmenu"]),
    ],
)
@pytest.mark.parametrize("spread", [[3], [1, 2], [1, 1, 1]])
def test_repeated_lines_go_but_for_the_first_in_keep_order(tmp_path, settings, expected, spread):
    rest = iter(LINES)
    tables = Tables(tmp_path, [[next(rest) for _ in range(count)] for count in spread])
    _, rows = tables.run('repeats.units=["line"]', *QUIET, *settings)
    assert [left(row, doc["text"]) for row, doc in zip(rows, LINES)] == expected
    assert [row["body_chars"] for row in rows] == [len(text) for text in expected]
    assert {cut["reason"] for row in rows for cut in row["cuts"]} <= {"line"}


def test_what_dedup_dropped_does_not_count_and_is_not_cut(tmp_path):
    rows = [
        document(1, "menu\nalpha"),
        document(2, "menu\nbeta", dropped="dedup"),
        document(3, "x", drop_stage="extract"),
    ]
    answers, written = Tables(tmp_path, [rows]).run('repeats.units=["line"]', *QUIET)
    assert [(row["doc_id"][0], row["drop_stage"], row["drop_rule"], row["cuts"]) for row in written] == [
        (1, None, None, []),
        (2, "repeats", "dropped_before", None),
    ]
    assert (written[0]["body_chars"], written[0]["num_bytes"], written[1]["body_chars"]) == (10, 10, None)
    counts = answers[0].counts.model_dump()
    assert (counts["rows_in"], counts["rows_kept"], counts["dropped"]["repeats/dropped_before"]) == (2, 1, 1)


@pytest.mark.parametrize("column", ["language", "source", "snapshot"])
def test_units_repeat_within_their_scope(tmp_path, column):
    first, second = {column: "de"}, {column: "fr"}
    texts = ["menu\na b c d e f", "menu\na b c d e f", "menu\na b c d e f\nlonger"]
    rows = [document(n, text, **scope) for (n, text), scope in zip(enumerate(texts, 1), [first, second, first])]
    both = ('repeats.units=["line", "substring"]', "repeats.substring_length=5", *QUIET)
    _, written = Tables(tmp_path / "all", [rows]).run(*both)
    assert [left(row, doc["text"]) for row, doc in zip(written, rows)] == ["", "", texts[2]]
    answers, written = Tables(tmp_path / "scope", [rows]).run(*both, f'dedup.scope=["{column}"]')
    assert [left(row, doc["text"]) for row, doc in zip(written, rows)] == ["", texts[1], texts[2]]
    assert [row["drop_rule"] for row in written] == ["nothing_left", None, None]
    assert (written[0]["drop_value"], written[0]["drop_limit"]) == (0, 1)
    assert answers[0].figures["cut_spans"] == {"line": 1}  # the run covers the same span


def test_kinds_of_units_together_and_their_counts(tmp_path):
    run = "one two three four five six"
    rows = [
        document(1, f"Menu\n\nStart here. {run} end. Fine words all along this way for us."),
        document(2, f"menu\n\nOther. {run} stop.\n\nAbout us\nAll rights"),
        document(3, "ABOUT US\nall rights.\n\nA page of its own, and it is short."),
    ]
    overrides = ('repeats.units=["paragraph", "line", "substring"]', "repeats.substring_length=6", *QUIET)
    answers, written = Tables(tmp_path, [rows[:1], rows[1:]]).run(*overrides)
    assert [left(row, doc["text"]) for row, doc in zip(written, rows)] == [
        rows[0]["text"],
        "Other. stop.\n\nAbout us\nAll rights",
        "A page of its own, and it is short.",
    ]
    assert [[(cut["reason"], cut["end"] - cut["start"]) for cut in row["cuts"]] for row in written] == [
        [],
        [("paragraph", 6), ("substring", 28)],
        [("paragraph", 22)],
    ]
    figures = answers[1].figures
    assert figures["cut_chars"] == {"paragraph": 28, "substring": 28}
    assert figures["cut_spans"] == {"paragraph": 2, "substring": 1}
    assert figures["cut_documents"] == {"paragraph": 2, "substring": 1, "any": 2}
    assert figures["kept_chars"] == written[1]["body_chars"] + written[2]["body_chars"]
    assert not any("repeats/repeats" in name for name in answers[1].counts.dropped)


@pytest.mark.parametrize(
    ("settings", "kept"),
    [
        (("repeats.max_repeated_share=0.49",), False),  # 27 of 54 code points
        (("repeats.max_repeated_share=0.5",), True),
        ((), False),
        (("repeats.max_repeated_share=0.5", "repeats.keep_first=false"), True),
    ],
)
def test_documents_are_dropped_for_their_runs_in_place_of_cut(tmp_path, settings, kept):
    run = "alpha beta gamma delta zeta"
    rows = [
        document(1, f"{run} kappa lambda omega sigma t"),
        document(2, f"{run} a longer text that stays as it is, first"),
    ]
    overrides = ('repeats.units=["substring"]', "repeats.substring_length=5", "repeats.on_substring=drop", *QUIET)
    _, written = Tables(tmp_path, [rows]).run(*overrides, *settings)
    assert (len(run), len(rows[0]["text"])) == (27, 54)
    assert [row["drop_rule"] for row in written] == [None if kept else "repeated_share", None]
    assert written[0]["drop_value"] == (None if kept else 0.5)
    assert [row["cuts"] for row in written] == [[], []]


def test_earlier_cuts_stay_out_and_places_are_those_of_the_text(tmp_path):
    first, second = "alpha [1] beta\nxx\nmenu", "gamma\nme[edit]nu\ndelta and more"
    rows = [document(1, first, cuts=[(5, 9), (14, 17)]), document(2, second, cuts=[(8, 14)])]
    tables = Tables(tmp_path, [rows])
    _, written = tables.run('repeats.units=["line"]', 'dedup.keep=["shortest"]', *QUIET)
    assert [[tuple(cut.values()) for cut in row["cuts"]] for row in written] == [
        [],
        [(6, 8, "line"), (14, 17, "line")],
    ]
    assert [row["body_chars"] for row in written] == [15, 20]
    _, written = Tables(tmp_path / "long", [rows]).run('repeats.units=["line"]', *QUIET)
    assert [[tuple(cut.values()) for cut in row["cuts"]] for row in written] == [[(17, 22, "line")], []]


def test_a_document_is_judged_again_without_its_repeats(tmp_path):
    menu = "Home and all the news that we have to offer to you with care, each day of the week.\n"
    texts = [
        f"{menu}{PROSE} One.\n" + f"{PROSE} Two, three, four, five, six, seven, eight, nine. " * 3,
        f"{menu}{PROSE} B.",
    ]
    rows = [document(n, text, gopher_num_words=-1) for n, text in enumerate(texts, 1)]
    limit = ('quality.rules=["gopher_quality"]', "toxicity.wordlists={}", 'repeats.units=["line"]')
    for min_words, rule in [(25, "gopher_short_doc"), (24, None)]:
        answers, written = Tables(tmp_path / str(min_words), [rows]).run(*limit, f"quality.min_words={min_words}")
        assert [row["drop_rule"] for row in written] == [None, rule]
        assert written[0]["gopher_num_words"] is None
        assert written[1]["gopher_num_words"] == 24
        assert left(written[1], texts[1]) == f"{PROSE} B."
        dropped = answers[0].counts.dropped
        assert dropped["quality/gopher_short_doc"] == (rule is not None)
        assert {"repeats/nothing_left", "quality/failed", "toxicity/crashed", "language/language_mixed"} <= set(dropped)
    assert (written[1]["drop_stage"], written[1]["drop_value"]) == (None, None)


def test_stored_measurements_that_are_not_taken_again_are_judged_as_they_are(tmp_path):
    texts = ["menu\nalpha alpha alpha", "menu\nbeta"]
    rows = [document(n, text, language_share=0.3) for n, text in enumerate(texts, 1)]
    _, written = Tables(tmp_path, [rows]).run('repeats.units=["line"]', *QUIET, "language.min_language_share=0.5")
    assert [(row["drop_stage"], row["drop_rule"]) for row in written] == [(None, None), ("language", "language_mixed")]
    assert written[1]["drop_value"] == pytest.approx(0.3)


def test_what_the_line_rules_cut_is_still_measured_as_it_was(tmp_path):
    # the cut that quality made counts for its signals again, as in the documents pass
    texts = [f"menu of ours\n{PROSE}\ntwo words", f"menu of ours\n{PROSE} And a line that makes it the first."]
    rows = [document(1, texts[0], cuts=[(len(texts[0]) - 10, len(texts[0]))]), document(2, texts[1])]
    _, written = Tables(tmp_path, [rows]).run('repeats.units=["line"]', *QUIET, 'quality.families=["c4"]')
    assert left(written[0], texts[0]) == f"{PROSE}\ntwo words"
    assert (written[0]["c4_lines_cut"], written[0]["body_chars"]) == (1, len(PROSE))


class Failing(Reevaluation):
    """A judge whose stages fail."""

    def _measured(self, row):
        del row["language"]
        return super()._measured(row)


def test_a_stage_that_fails_on_the_rest_drops_it_by_name(tmp_path):
    texts = ["menu\nalpha alpha alpha", "menu\nbeta"]
    rows = [document(n, text) for n, text in enumerate(texts, 1)]
    answers, written = Tables(tmp_path, [rows]).run(
        'repeats.units=["line"]', *QUIET, make_reevaluator=partial(Failing, CHECKED)
    )
    assert [(row["drop_stage"], row["drop_rule"]) for row in written] == [(None, None), ("quality", "failed")]
    (place,) = answers[0].failures.errors
    assert place.startswith("quality: KeyError at ")


def test_a_finished_part_is_not_done_again(tmp_path):
    tables = Tables(tmp_path, [LINES])
    answers, rows = tables.run('repeats.units=["line"]', *QUIET)
    again, _ = tables.run('repeats.units=["line"]', *QUIET, make_reevaluator=None)
    assert again == answers
    assert tables.rows(again) == rows


def test_a_retried_part_gives_the_same_rows(tmp_path):
    tables = Tables(tmp_path, [LINES])
    _, rows = tables.run('repeats.units=["line"]', *QUIET)
    task = tables.task(0, 'repeats.units=["line"]', *QUIET, folder="again")
    known = total_rows(list(parts.units_of_part(task)), 2, True)
    answer = write_repeats(task, known, True)
    assert pq.read_table(tmp_path / "again" / answer.files["repeats"].path).to_pylist() == rows


def test_clean_applies_the_cuts_and_skips_what_was_dropped(tmp_path):
    rows = [
        document(1, "menu\nalpha one [1] two", cuts=[(14, 18)], url="u", title="t"),
        document(2, "menu\nbeta is a longer text"),
        document(3, "menu"),
    ]
    tables = Tables(tmp_path, [rows])
    answers, _ = tables.run('repeats.units=["line"]', *QUIET)
    names = ("documents", "text", "dedup")
    folders = {name: tables.inputs[name].folder for name in names}
    paths = {name: checked(folders[name], f"{part_key(0)}.parquet") for name in names}
    task = CleanTask(0, (PII,), recipe(), {}, folders, paths, Store(str(tmp_path / "clean")))
    assert [row["text"] for row in survivors(task)] == ["menu\nalpha one two", "menu\nbeta is a longer text", "menu"]
    folders["repeats"] = Store(str(tmp_path / "repeats"))
    paths["repeats"] = answers[0].files["repeats"].checked_path
    written = list(survivors(CleanTask(0, (PII,), recipe(), {}, folders, paths, Store(str(tmp_path / "clean")))))
    assert [row["text"] for row in written] == ["alpha one two", "menu\nbeta is a longer text"]
    assert (written[0]["title"], written[0]["cluster"]) == ("t", rows[0]["doc_id"])


def test_scores_of_models_are_taken_again_and_judged(tmp_path):
    compile_lm(write_arpa(tmp_path / "en.arpa", TINY), str(tmp_path / "en.lm"), None, "en")
    models = {"perplexity": {"lm_en": str(tmp_path / "en.lm")}}
    settings = ("perplexity.scorer=ngram", 'perplexity.models={en="en.lm"}', "perplexity.max_perplexity=5", *QUIET)
    judge = Reevaluation(CHECKED, recipe(*settings), models, {}, True, lambda function: function)
    assert {"perplexity", "language"} <= {name for names in judge.columns.values() for name in names}
    # `a b` has 10^(0.53125 / 3) = 1.5, words that the model does not know 46 and more
    rows = [
        {"doc_id": bytes(16), "language": "en", "source": "web", "perplexity": stored, "text": "x", "_rest": rest}
        for stored, rest in [(9.0, "a b"), (1.0, "x y z")]
    ]
    judge(rows)
    assert [row.get("drop_rule") for row in rows] == [None, "perplexity_high"]
    assert rows[1]["drop_value"] > 5


def test_the_step_is_wanted_with_units():
    assert not is_enabled(recipe())
    assert is_enabled(recipe('repeats.units=["line"]'))


@pytest.mark.spark
def test_the_step_on_spark_is_the_step_without(spark, tmp_path):
    run = "one two three four five six seven"
    texts = [f"Menu\nPage {n}\n\n{PROSE} {n % 3} {run} {n}. Same again. And again. Once more.\nFoot" for n in range(12)]
    rows = [document(n, text) for n, text in enumerate(texts, 1)]
    overrides = (
        'repeats.units=["line", "sentences", "substring"]',
        *(
            "repeats.substring_length=5",
            "repeats.min_count=3",
            "quality.min_words=3",
            "quality.rules=['gopher_quality']",
            "toxicity.wordlists={}",
        ),
    )
    tables = Tables(tmp_path / "a", [rows[:5], [], rows[5:]])
    answers, expected = tables.run(*overrides)
    whole = Tables(tmp_path / "b", [rows])
    _, same = whole.run(*overrides)
    assert same == expected
    tables.root = tmp_path / "c"
    folders = {"repeats": Store(str(tables.root / "repeats"))}
    context = StepContext(spark, recipe(*overrides), CHECKED, folders, tables.inputs, (), {}, None)
    built = build_repeats(context, Reevaluation)["repeats"]
    paths = [tables.root / "repeats" / built.paths[key] for key in sorted(built.paths)]
    assert [row for path in paths for row in pq.read_table(path).to_pylist()] == expected
    assert [entry.sha256 for entry in built.files] == [answer.files["repeats"].sha256 for answer in answers]
    assert built.counts.rows_in == 12
    assert set(built.figures["cut_documents"]) == {"line", "sentences", "substring", "any"}


def test_lines_of_a_peer_go_as_there_but_for_digits(shared_data, tmp_path):
    case = "tests/fixtures/documents_with_line_duplicates/"
    with gzip.open(shared_data / "dedup" / "peer_fixtures.jsonl.gz") as file:
        texts = [row["text"] for row in map(json.loads, file) if row["path"].startswith(case)]
    rows = [document(number, text) for number, text in enumerate(texts, 1)]
    _, written = Tables(tmp_path, [rows]).run('repeats.units=["line"]', "repeats.keep_first=false", *QUIET)
    # "… for doc3.txt" and "… for doc4.txt" stay there; in CCNet's normal form they are equal
    assert [left(row, text) for row, text in zip(written, texts)] == ["", "", "- back", "", texts[4]]
    assert [row["drop_rule"] for row in written] == ["nothing_left", "nothing_left", None, "nothing_left", None]
