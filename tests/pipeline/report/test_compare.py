"""Two runs on one page: every difference that is known by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.inspect.diff_training import PairRow
from pipeline.report.compare import write_comparison
from schemas.errors import ContractError
from schemas.ids import canonical_json
from schemas.manifest import open_table
from schemas.storage import Store
from tests.support.lineage_run import edit
from tests.support.report_run import SCRIPT, add_training, crawl, make_run, words_of
from tests.support.tiny_dataset import make_tiny_dataset

SHORT = "quality/gopher_short_doc"


def page_of(folder: Path, a: Store, b: Store) -> str:
    """Return the page that compares two runs."""
    path = write_comparison(("runs/a", a), ("runs/b", b), Store(str(folder)), "both.html")
    assert path == f"{folder}/both.html"
    return Path(path).read_text()


def test_the_page_compares_two_runs(tmp_path: Path) -> None:
    records = [*crawl()[:-4], *(replace(record, outcome=SHORT) for record in crawl()[-4:-2]), *crawl()[-2:]]
    a, b = make_run(tmp_path / "a", "clean"), make_run(tmp_path / "b", "clean", records)
    page = page_of(tmp_path, a, b)
    text = words_of(page)
    for expected in (
        "a and b 0 settings differ. 2 documents are kept only by A, 0 only by B.",
        "Documents kept 20 → 18 −2, −10.0 %",
        "quality/gopher_short_doc web 2",
        "4 (limit 50) https://c.example/kept/",
        "quality texts that pass every quality rule 30 28 −2 −6.7 %",
        "quality/gopher_short_doc too few words 6 8 +2 +33.3 %",
        "ja 5 3 −2 −40.0 %",
        "en 15 15 =",
        "characters A 20 850 850 850 850 characters B 18 850 850 850 850",
        "A run has no token dataset yet.",
    ):
        assert expected in text
    assert "penstock show runs/a --doc " in page
    assert page.lower().count("<script") == 1


def test_input_files_that_only_one_run_read(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a", "clean"), make_run(tmp_path / "b", "clean")
    edit(b, "documents", lambda content: content["inputs"][0].update(name="other.warc.gz"))
    digests = {name: open_table(b, name)[1].digest for name in ("documents",)}
    for table in ("verdicts", "clusters", "dedup", "clean"):

        def reread(content: dict[str, Any]) -> None:
            for entry in content["inputs"]:
                entry["sha256"] = digests.get(entry["name"], entry["sha256"])

        edit(b, table, reread)
        digests[table] = open_table(b, table)[1].digest
    text = words_of(page_of(tmp_path, a, b))
    assert "10 documents are kept only by A, 10 only by B." in text
    for name in "AB":
        assert f"Only {name} read 1 input file: 27 rows, 10 documents kept. They are not in the tables below." in text


def test_tokens_and_losses_of_both_runs(tmp_path: Path) -> None:
    runs = [make_run(tmp_path / name) for name in "ab"]
    for run in runs:
        add_training(run)
    text = words_of(page_of(tmp_path, *runs))
    assert "Both runs have the same digest, so their documents and tokens are equal." in text
    assert "Training loss" in text
    assert "held-out loss nats per token, last measured 4.568 4.568 =" in text
    assert "tokens seen tokens of all trained steps 3,200 3,200 =" in text
    assert "tokens per second median of the steps 9 9 =" in text
    # The last tenth of 40 steps are those of losses 4.3, 4.2, 4.1 and 4.0.
    assert "loss web 4.05 4.05 =" in text
    assert "held-out loss web 4.45 4.45 =" in text
    assert "web/heldout" in text


def test_two_plans_on_a_dataset_without_documents(tmp_path: Path) -> None:
    a, b = make_tiny_dataset(tmp_path / "a", {"web": 20}), make_tiny_dataset(tmp_path / "b", {"web": 20})
    for run, name in ((a, "adamw"), (b, "muon")):
        add_training(run)
        plan = run.read_json("train/plan.json")
        run.write_atomic("train/plan.json", canonical_json(plan | {"settings": {"optim": {"name": name}}}))
    Path(b.path("train/metrics.jsonl")).unlink()
    text = words_of(page_of(tmp_path, a, b))
    for expected in (
        "Both runs have the same digest, so their documents and tokens are equal. 1 setting differs.",
        "A has a dataset without the tables `documents` and `clean`, so documents, rules and lengths are not compared.",
        "B is planned and not trained yet, so it has no losses.",
        'optim.name "adamw" "muon"',
        "steps that were trained 40 – –",
    ):
        assert expected in text
    assert "Documents that only one run keeps" not in text


def test_hostile_text_is_escaped(tmp_path: Path) -> None:
    records = crawl()
    hostile = replace(records[-1], url=f"https://c.example/{SCRIPT}", outcome=SHORT)
    a = make_run(tmp_path / "a", "clean")
    b = make_run(tmp_path / "b", "clean", [*records[:-1], hostile])
    page = page_of(tmp_path, b, a)
    assert page.lower().count("<script") == 1
    assert "&lt;script&gt;document.title" in page


def test_a_run_without_clean_is_refused(tmp_path: Path) -> None:
    a, b = make_run(tmp_path / "a", "clean"), make_run(tmp_path / "b", "verdicts")
    with pytest.raises(ContractError, match="expected a table 'clean', got"):
        page_of(tmp_path, a, b)


@pytest.mark.parametrize(
    ("a", "b", "change", "share"), [(4, 5, 1, 0.25), (0, 5, 5, None), (None, 5, None, None), (5, 5, 0, 0.0)]
)
def test_the_change_of_a_figure(a: float | None, b: float | None, change: float | None, share: float | None) -> None:
    row = PairRow("x", a, b)
    assert (row.change, row.share) == (change, share)
