"""A takedown follows a document into the rows that were made from it, in its run and in others."""

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jobs.cli import main
from jobs.recipe import read_recipe
from pipeline.prepare import prepare
from pipeline.run import run_steps
from schemas.errors import ConfigError
from schemas.manifest import open_table
from schemas.storage import Store
from schemas.tables import DERIVED
from tests.integration.test_dedup_run import FIRST, KEEP, RECIPE, SECOND, SETTINGS, text_of
from tests.support.tiny_takedown import certificates, rows_of, take_down

pytestmark = pytest.mark.spark

ORIGINAL, REWRITTEN, TRANSLATED = (f"http://{name}.example/1" for name in ("original", "rewritten", "translated"))
OTHER = "http://other.example/1"
MAPPED = [*SETTINGS, "source.parents_field=parents", "source.meta_fields=[]", "dedup.near=false"]
Rows = Iterable[Mapping[str, Any]]
Build = Callable[..., Path]


@pytest.fixture
def build(spark, tmp_path: Path) -> Build:
    """A function that runs rows, which need no text, into a folder of this name."""

    def run(name: str, rows: Rows, *settings: str) -> Path:
        draw = np.random.default_rng([*name.encode()])
        lines = [json.dumps({"text": " ".join(text_of(draw)), **row}) for row in rows]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
        recipe = read_recipe(str(RECIPE), [f'source.paths="{tmp_path}/{name}.jsonl"', *MAPPED, *settings])
        run_steps(spark, prepare(recipe, "clean"), Store(str(tmp_path / name)), 2)
        return tmp_path / name

    return run


CHAIN = [  # a row may stand before its parent, and a document may name itself over others
    {"url": TRANSLATED, "parents": [REWRITTEN]},
    {"url": REWRITTEN, "parents": [OTHER, ORIGINAL]},
    {"url": ORIGINAL, "parents": TRANSLATED},
    {"url": OTHER},
    {"url": "http://third.example/1", "parents": "http://elsewhere.example/1"},
]


def indexed(snapshot: str) -> tuple[str, ...]:
    """The settings of a run that writes an index of a snapshot."""
    return KEEP, "dedup.write_index=true", f"source.snapshot={snapshot}"


def urls_of(folder: Path) -> set[str]:
    return {row["url"] for row in rows_of(folder, "clean")}


def test_rows_made_from_rows_are_removed_too(build: Build, capsys) -> None:
    folder = build("chain", CHAIN)
    assert {row["url"]: row["parents"] for row in rows_of(folder, "documents")} == {
        TRANSLATED: [REWRITTEN],
        REWRITTEN: [OTHER, ORIGINAL],
        ORIGINAL: [TRANSLATED],
        OTHER: None,
        "http://third.example/1": ["http://elsewhere.example/1"],
    }
    assert open_table(Store(str(folder)), "documents")[1].content.figures[DERIVED] == {"web": 4}
    child = next(row["doc_id"] for row in rows_of(folder, "documents") if row["url"] == TRANSLATED)
    assert main(["show", str(folder), "--doc", child.hex()]) == 0
    assert REWRITTEN in capsys.readouterr().out
    assert take_down(folder, url=[ORIGINAL], dry_run=True) == 0
    shown = capsys.readouterr().out
    assert "3 document(s) to be removed" in shown
    assert "2 document(s) that were made from these are among them; --no-derived keeps them" in shown
    assert f"derived from {REWRITTEN}" in shown
    assert take_down(folder, url=[ORIGINAL]) == 0
    (certificate,) = certificates(folder)
    assert (len(certificate.documents), certificate.derived, certificate.derived_left) == (3, 2, 0)
    assert urls_of(folder) == {OTHER, "http://third.example/1"}
    assert open_table(Store(str(folder)), "documents")[1].content.figures[DERIVED] == {"web": 1}
    capsys.readouterr()
    assert main(["takedown", str(folder), "--check", f"takedowns/{certificate.id}.json"]) == 0
    assert "2 of them were made from others" in capsys.readouterr().out


def test_rows_made_from_others_stay_if_the_request_says_so(build: Build, capsys) -> None:
    folder = build("kept", CHAIN[:2] + CHAIN[3:] + [{"url": ORIGINAL}])
    assert take_down(folder, domain=["original.example"], no_derived=True) == 0
    (certificate,) = certificates(folder)
    assert (len(certificate.documents), certificate.derived_left, certificate.keeps_derived) == (1, 2, True)
    assert TRANSLATED in urls_of(folder)
    capsys.readouterr()
    assert main(["takedown", str(folder), "--check", f"takedowns/{certificate.id}.json"]) == 0
    assert "2 document(s) that were made from removed ones were kept, as certified" in capsys.readouterr().out


@pytest.mark.parametrize("how", ["id", "url", "domain"])
def test_a_parent_that_no_table_has_is_named_by_its_children(build: Build, how: str) -> None:
    identifier = "0123456789abcdef" * 2
    rows = [{"url": TRANSLATED, "parents": [identifier.upper(), ORIGINAL]}, {"url": OTHER}]
    folder = build("absent", rows)
    request = {"id": {"doc": [identifier]}, "url": {"url": [ORIGINAL]}, "domain": {"domain": ["original.example"]}}
    with pytest.raises(ConfigError, match="expected a document of"):
        take_down(folder, **request[how], no_derived=True)
    assert take_down(folder, **request[how]) == 0
    assert urls_of(folder) == {OTHER}


def test_another_run_of_derived_rows_is_compared_too(build: Build) -> None:
    """The second run has a translation of a page that was taken down from the first."""
    first = build("first", [{"url": ORIGINAL}, {"url": OTHER}], *indexed(FIRST))
    assert take_down(first, url=[ORIGINAL]) == 0
    (removed,) = (row["doc_id"] for row in rows_of(first, "documents") if row["drop_stage"] == "takedown")
    rows = [
        {"url": f"{TRANSLATED}a", "parents": ORIGINAL},
        {"url": f"{TRANSLATED}b", "parents": [removed.hex()]},
        {"url": "http://free.example/2", "parents": [OTHER]},
    ]
    index = [f'dedup.indexes=["{first}"]', *indexed(SECOND)]
    second = build("second", rows, *index)
    assert open_table(Store(str(second)), "dedup")[1].content.counts.dropped["dedup/taken_down"] == 2
    assert urls_of(second) == {"http://free.example/2"}


def test_an_answer_of_a_forum_is_removed_with_the_document_of_its_question(spark, tmp_path: Path) -> None:
    draw = np.random.default_rng(11)
    posts = [
        f'<row Id="{number}" PostTypeId="{1 if number % 2 else 2}" ParentId="{number - 1}" Score="1" Title="Why?" '
        f'CreationDate="2020-01-01" Body="&lt;p&gt;post{number} {" ".join(text_of(draw))}&lt;/p&gt;" />\n'
        for number in range(1, 7)
    ]
    (tmp_path / "Posts.xml").write_text("<posts>\n" + "".join(posts) + "</posts>\n")
    site = "source.stackexchange.site=coffee.stackexchange.com"
    recipe = read_recipe(str(RECIPE), [f'source.paths="{tmp_path}/Posts.xml"', site, *SETTINGS, "dedup.near=false"])
    folder = tmp_path / "forum"
    run_steps(spark, prepare(recipe, "clean"), Store(str(folder)), 2)
    assert DERIVED not in open_table(Store(str(folder)), "documents")[1].content.figures
    address = "https://coffee.stackexchange.com"
    assert urls_of(folder) == {f"{address}/questions/{number}" for number in (1, 3, 5)}
    assert take_down(folder, url=[f"{address}/a/4"]) == 0
    assert urls_of(folder) == {f"{address}/questions/{number}" for number in (1, 5)}
    (certificate,) = certificates(folder)
    assert (len(certificate.documents), certificate.derived) == (2, 1)
    assert main(["takedown", str(folder), "--check", f"takedowns/{certificate.id}.json"]) == 0


def test_bad_parents_are_counted(build: Build) -> None:
    folder = build("bad", [{"url": OTHER}, {"parents": 7}, {"parents": [ORIGINAL] * 10**4}, {"parents": ["no"]}])
    dropped = open_table(Store(str(folder)), "documents")[1].content.counts.dropped
    assert (dropped["source/bad_parents"], dropped["source/too_many_parents"]) == (2, 1)
    assert urls_of(folder) == {OTHER}


def test_figures_are_those_of_a_run_without_the_documents(build: Build) -> None:
    """Toxicity, marks, languages, sources and rows with parents, of rows that have each of them."""
    draw = np.random.default_rng(7)
    rude = " ".join([*text_of(draw), "damn", "bastard", "damn", *text_of(draw)])
    stays = [{"url": OTHER, "text": rude}, {"url": "http://more.example/1", "parents": [OTHER + "2"]}]
    goes = [{"url": ORIGINAL, "text": f"{rude} {rude[:300]}"}, {"url": TRANSLATED, "parents": [ORIGINAL]}]
    toxicity = ["toxicity.action=mark", "toxicity.max_words=0", "toxicity.measures=['obscenity','hate','sexual']"]
    toxicity += ["language.languages=['en']"]
    rows = [row | {"text": row.get("text", " ".join(text_of(draw)))} for row in (*stays, *goes)]
    with_them, without = build("with", rows, *toxicity), build("without", rows[:2], *toxicity)
    names = {"documents": ("toxicity_by", "toxic_documents", "toxic_words", DERIVED), "verdicts": ("marked",)}
    before = figures_of(with_them, names)
    assert take_down(with_them, url=[ORIGINAL]) == 0
    assert figures_of(with_them, names) == (after := figures_of(without, names))
    assert all(before[name] != after[name] for name in before)


def figures_of(folder: Path, names: Mapping[str, Iterable[str]]) -> dict[str, Any]:
    """The figures of these names in the manifests of the tables."""
    manifests = {table: open_table(Store(str(folder)), table)[1].content.figures for table in names}
    return {name: manifests[table].get(name) for table, own in names.items() for name in own}
