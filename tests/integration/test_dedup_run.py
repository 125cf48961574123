"""Deduplication in whole runs: at any partitioning, with other methods and scopes, and snapshot after snapshot."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from jobs.cli import main
from jobs.recipe import read_recipe, stored_recipe
from pipeline.dedup.config import DedupConfig
from pipeline.dedup.decide import URL
from pipeline.inspect.whatif import predict
from pipeline.minhash.stage import SignatureConfig, as_matrix, similarity, value_type
from pipeline.prepare import prepare
from pipeline.run import run_steps
from schemas.errors import ConfigError
from schemas.ids import doc_id
from schemas.manifest import open_table, read_run
from schemas.storage import Store
from schemas.tokens import open_dataset
from schemas.union import write_union
from tests.support.dedup_oracle import survivors_by_rounds
from tests.support.paths import ROOT
from tests.support.table_readers import by_every_reader, check_reader
from train.data.document_index import DocumentIndex

pytestmark = pytest.mark.spark

RECIPE = ROOT / "jobs" / "recipes" / "demo.toml"
WORDS = [
    "the",
    "of",
    "and",
    "to",
    "with",
    "that",
    "have",
    "be",
    *(a + b + c for a in "bdfgklmn" for b in "aeiou" for c in ("rin", "tal", "mos", "vek")),
]
FIRST, SECOND, THIRD = "CC-MAIN-2024-10", "CC-MAIN-2024-18", "CC-MAIN-2024-22"
SETTINGS = [
    "language.languages=[]",
    "language.min_score=0.0",
    "quality.rules=['gopher_quality']",
    "quality.min_stop_words=0",
]
KEEP = 'dedup.keep=["snapshot","longest","earliest"]'


def text_of(draw: np.random.Generator, words: int = 120) -> list[str]:
    weights = 1 / np.arange(1, len(WORDS) + 1)
    return draw.choice(WORDS, words, p=weights / weights.sum()).tolist()


def altered(draw: np.random.Generator, words: list[str], share: float) -> list[str]:
    places = draw.random(len(words)) < share
    return [str(draw.choice(WORDS)) if place else word for word, place in zip(words, places)]


def families(seed: int, number: int) -> list[dict[str, str]]:
    """Rows of families of copies: equal, nearly equal, equal to others but for marks that a rule drops them for."""
    draw = np.random.default_rng(seed)
    rows = []
    for family in range(number):
        base = text_of(draw)
        for member in range(int(draw.integers(1, 6))):
            words = altered(draw, base, float(draw.choice([0.0, 0.01, 0.02, 0.05])))
            text = " ".join(words)
            if draw.random() < 0.25:
                text += " #" * 30
            site = int(draw.integers(0, 3))
            rows.append({"text": text, "url": f"https://www.site{site}.org/page/{family % 17}?utm_source=x#{member}"})
    draw.shuffle(rows)
    return rows


@pytest.fixture(scope="module")
def inputs(tmp_path_factory) -> Path:
    """Three snapshots; a third of the rows of each family lies in each."""
    folder = tmp_path_factory.mktemp("inputs")
    rows = families(7, 120)
    for number, snapshot in enumerate((FIRST, SECOND, THIRD)):
        part = rows[number::3]
        for half in range(2):
            lines = [json.dumps(row) for row in part[half::2]]
            (folder / f"{snapshot}-{half}.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def run_of(spark, inputs, tmp_path_factory):
    """A function that deduplicates some snapshots with some settings, in a folder of its own or a given one."""

    def run(snapshots, *overrides, folder=None, until="dedup") -> Store:
        store = Store(str(folder or tmp_path_factory.mktemp("run")))
        paths = json.dumps([f"{inputs}/{snapshot}-*.jsonl" for snapshot in snapshots])
        recipe = read_recipe(str(RECIPE), [f"source.paths={paths}", *SETTINGS, KEEP, *overrides])
        run_steps(spark, prepare(recipe, until), store, 2)
        return store

    return run


ALL = (FIRST, SECOND, THIRD)


@pytest.fixture(scope="module")
def whole(run_of) -> Store:
    return run_of(ALL)


def rows_of(run: Store, table: str) -> list[dict]:
    folder, manifest = open_table(run, table)
    return [row for path in manifest.paths_of("part-") for row in pq.read_table(folder.path(path)).to_pylist()]


def digests(run: Store, *names: str) -> dict[str, str]:
    return {name: open_table(run, name)[1].digest for name in names}


def survivors(run: Store, *snapshots: str) -> set[bytes]:
    of = {row["doc_id"]: row["snapshot"] for row in rows_of(run, "documents")}
    return {
        row["doc_id"] for row in rows_of(run, "dedup") if row["drop_stage"] is None and of[row["doc_id"]] in snapshots
    }


@pytest.mark.parametrize(
    "partitions", [1, pytest.param(3, marks=pytest.mark.slow), pytest.param(16, marks=pytest.mark.slow)]
)
def test_the_same_tables_at_any_partitioning(run_of, whole, partitions):
    run = run_of(ALL, f"dedup.partitions={partitions}", "dedup.finish_edges=0")
    names = ("clusters", "index", "dedup", "representatives")
    assert digests(run, *names) == digests(whole, *names)
    assert len(survivors(whole, *ALL)) < 0.6 * len(rows_of(whole, "dedup"))


def test_clusters_are_what_the_documents_say(whole):
    rows = rows_of(whole, "clusters")
    dropped = {row["doc_id"]: row["drop_stage"] is not None for row in rows_of(whole, "verdicts")}
    sizes: dict[bytes, int] = {}
    for row in rows:
        assert (row["similarity"] is None) == (row["leader"] is None)
        sizes[row["cluster"]] = sizes.get(row["cluster"], 0) + 1
    cluster_of = {row["doc_id"]: row["cluster"] for row in rows}
    assert {cluster_of[cluster] for cluster in sizes} == set(sizes)  # the smallest id is one of its own
    assert all(row["leader"] is None or cluster_of[row["leader"]] == row["cluster"] for row in rows)
    found = {row["doc_id"]: row for row in rows_of(whole, "dedup")}
    for row in found.values():
        assert row["cluster_size"] == sizes[row["cluster"]]
        assert (row["weight"] is None) == (row["drop_stage"] is not None)
    documents = {row["doc_id"]: row for row in rows_of(whole, "documents") if row["doc_id"] in cluster_of}
    members: dict[bytes, list[bytes]] = {}
    for doc in sorted(documents, key=lambda doc: keep_order(documents[doc])):
        if not dropped[doc]:
            members.setdefault(cluster_of[doc], []).append(doc)
    chains = 0
    for own in members.values():
        expected = survivors_by_rounds(own, lambda a, b: is_copy(documents[a], documents[b]), DedupConfig().rounds)
        assert {doc: found[doc]["survivor"] for doc in own} == expected
        assert all((found[doc]["drop_stage"] is None) == (kept == doc) for doc, kept in expected.items())
        chains += len({*expected.values()}) > 1
    assert chains >= 3  # clusters that a chain links, of which more than one document is kept


def keep_order(row: dict) -> tuple:
    """The order of `KEEP`; no document has a date."""
    assert row["date"] is None
    return row["snapshot"], -row["num_bytes"], row["doc_id"]


def estimate(one: dict, other: dict) -> np.float32:
    """The similarity of two documents by their whole signatures; 1 for equal texts."""
    if one["text_digest"] == other["text_digest"]:
        return np.float32(1)
    signed = (as_matrix([row["signature"]], value_type(SignatureConfig())) for row in (one, other))
    return np.float32(similarity(*signed)[0])


def is_copy(one: dict, other: dict) -> bool:
    return bool(estimate(one, other) >= np.float32(DedupConfig().min_similarity))


def test_copies_of_an_earlier_snapshot_are_compared_with_the_document_kept(run_of, indexed):
    second = run_of([SECOND], f'dedup.indexes=["{indexed.uri}"]')
    documents = {row["doc_id"]: row for run in (indexed, second) for row in rows_of(run, "documents")}
    kept = survivors(indexed, FIRST) | survivors(second, SECOND)
    removed = [row for row in rows_of(second, "dedup") if row["drop_rule"] in ("near_duplicate", "exact_duplicate")]
    earlier = [row for row in removed if documents[row["survivor"]]["snapshot"] == FIRST]
    assert len(earlier) > 10
    assert sum(row["drop_rule"] == "near_duplicate" for row in earlier) > 10
    assert {row["survivor"] for row in removed} <= kept
    for row in removed:
        value = estimate(documents[row["doc_id"]], documents[row["survivor"]])
        assert value == pytest.approx(row["drop_value"])
        assert value >= np.float32(0.7)


@pytest.mark.slow
@pytest.mark.parametrize("by_url", ["off", "first"])
def test_one_snapshot_after_the_other_keeps_what_all_at_once_keeps(run_of, by_url):
    # survivors of chains that only a whole run sees would be other documents
    settings = ["dedup.write_index=true", f"dedup.by_url={by_url}", "dedup.compare_survivor=off"]
    first = run_of([FIRST], *settings)
    second = run_of([SECOND], *settings, f'dedup.indexes=["{first.uri}"]')
    third = run_of([THIRD], *settings, f'dedup.indexes=["{first.uri}","{second.uri}"]')
    both, whole = run_of([FIRST, SECOND], *settings), run_of(ALL, *settings)
    for run, at_once, snapshot in ((second, both, SECOND), (third, whole, THIRD)):
        assert survivors(run, snapshot) == survivors(at_once, snapshot)
        assert 1 < len(survivors(run, snapshot)) < len(rows_of(run, "dedup"))
    sizes = {row["doc_id"]: row["cluster_size"] for row in rows_of(whole, "dedup")}
    assert {row["doc_id"]: row["cluster_size"] for row in rows_of(third, "dedup")} == {
        row["doc_id"]: sizes[row["doc_id"]] for row in rows_of(third, "dedup")
    }
    assert [entry.name for entry in open_table(third, "clusters")[1].content.inputs if "earlier" in entry.name] == [
        "earlier-0/index",
        "earlier-1/index",
    ]


def test_a_later_snapshot_is_trained_on_with_the_earlier_one(run_of, tmp_path):
    """The union of both has what stays of both at once; nothing that an earlier snapshot has is in it twice."""
    settings = [
        "dedup.write_index=true",
        "tokenizer.vocab_size=420",
        "tokens.chunk_tokens=64",
        "tokens.heldout_share=0.1",
    ]
    first = run_of([FIRST], *settings, until="tokens")
    second = run_of(
        [SECOND],
        *settings[2:],
        f'dedup.indexes=["{first.uri}"]',
        f'tokenizer.model="{first.uri}"',
        until="tokens",
    )
    union = Store(str(tmp_path / "union"))
    manifest = write_union(union, [first, second])
    assert manifest.content.figures["repeated"]["documents"] == 0
    index, both = DocumentIndex(open_dataset(union)), run_of([FIRST, SECOND])
    kept = survivors(both, FIRST) | survivors(both, SECOND)
    assert index.num_documents == len(kept) == len(survivors(first, FIRST)) + len(survivors(second, SECOND))
    assert all(index.of_id(doc_id) for doc_id in kept)
    found = [index.of_id(min(survivors(run, name))) for run, name in ((first, FIRST), (second, SECOND))]
    assert [row["split"].startswith(name) for (_, row, _), name in zip(found, (FIRST, SECOND), strict=True)] == [
        True
    ] * 2


def test_an_index_needs_no_text_of_its_snapshot(run_of, indexed, tmp_path):
    narrow = tmp_path / "narrow"
    shutil.copytree(indexed.uri, narrow)
    for table in ("documents", "text", "verdicts", "clusters", "dedup"):
        shutil.rmtree(narrow / table)
    both = [run_of([SECOND], "dedup.write_index=true", f'dedup.indexes=["{place}"]') for place in (indexed.uri, narrow)]
    assert digests(both[0], "clusters", "dedup") == digests(both[1], "clusters", "dedup")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (['dedup.keep=["longest"]'], "dedup.keep: expected to begin with 'snapshot'"),
        (["dedup.min_similarity=0.8"], "dedup.min_similarity: expected 0.7, with which the index was made, got 0.8"),
        (["signature.seed=5"], "signature.seed: expected 1, with which the index was made, got 5"),
        (
            ['source.snapshot="CC-MAIN-2024-01"'],
            "come after 'CC-MAIN-2024-10', the last of the index, got 'CC-MAIN-2024-01'",
        ),
        (["dedup.by_url=first"], "dedup.by_url: expected 'off', as in the run at .*, got 'first'"),
        (["dedup.scope=['snapshot']"], "scope keeps snapshots apart"),
        (["dedup.verify=jaccard"], "dedup.verify: expected 'estimate', with which the index was made, got 'jaccard'"),
    ],
)
def test_what_an_index_cannot_answer_is_refused(run_of, indexed, tmp_path, settings, message):
    with pytest.raises(ConfigError, match=message):
        run_of([SECOND], f'dedup.indexes=["{indexed.uri}"]', *settings, folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.fixture(scope="module")
def indexed(run_of) -> Store:
    return run_of([FIRST], "dedup.write_index=true")


@by_every_reader
def test_others_read_the_index_as_it_is(reader, indexed, tmp_path):
    assert check_reader(reader, indexed, tmp_path) >= {"index", "representatives"}


@pytest.mark.slow
def test_a_run_without_an_index_and_a_missing_link_are_refused(run_of, whole, indexed, tmp_path):
    with pytest.raises(ConfigError, match=r"got a run without one\. Run it with dedup\.write_index=true"):
        run_of([THIRD], f'dedup.indexes=["{whole.uri}"]', folder=tmp_path / "run")
    second = run_of([SECOND], "dedup.write_index=true", f'dedup.indexes=["{indexed.uri}"]')
    alone = run_of([SECOND], "dedup.write_index=true", until="clusters")
    with pytest.raises(ConfigError, match="every index that this one was compared with, got none"):
        run_of([THIRD], f'dedup.indexes=["{second.uri}"]', folder=tmp_path / "run")
    with pytest.raises(ConfigError, match="expected every index once, got it listed before"):
        run_of([THIRD], f'dedup.indexes=["{indexed.uri}","{indexed.uri}"]', folder=tmp_path / "run")
    with pytest.raises(ConfigError, match="expected indexes in the order of their snapshots"):
        run_of([THIRD], f'dedup.indexes=["{alone.uri}","{indexed.uri}"]', folder=tmp_path / "run")
    with pytest.raises(ConfigError, match=r"expected a finished run at .*nowhere"):
        run_of([THIRD], f'dedup.indexes=["{tmp_path}/nowhere"]', folder=tmp_path / "run")


@pytest.mark.slow
def test_texts_that_share_nothing_all_stay(spark, tmp_path):
    draw = np.random.default_rng(3)
    for place in range(3):
        row = {"text": " ".join(text_of(draw, 60)), "url": f"https://site.org/{place}"}
        (tmp_path / f"{place}.jsonl").write_text(json.dumps(row) + "\n")
    settings = [f'source.paths="{tmp_path}/*.jsonl"', "repeats.units=['substring']", *SETTINGS]
    run = Store(str(tmp_path / "run"))
    run_steps(spark, prepare(read_recipe(str(RECIPE), settings), "clean"), run, 2)
    for table in ("clusters", "dedup", "repeats", "clean"):
        content = open_table(run, table)[1].content
        assert (len(content.files), content.counts.rows_in, content.counts.rows_kept) == (3, 3, 3)


def test_an_index_of_which_nothing_is_found_joins_nothing(spark, tmp_path):
    draw, before = np.random.default_rng(4), "[]"
    for snapshot in (FIRST, SECOND):
        row = {"text": " ".join(text_of(draw, 60)), "url": "https://site.org/"}
        (tmp_path / f"{snapshot}.jsonl").write_text(json.dumps(row) + "\n")
        settings = [f'source.paths="{tmp_path}/{snapshot}.jsonl"', "dedup.write_index=true", f"dedup.indexes={before}"]
        run = Store(str(tmp_path / snapshot))
        run_steps(spark, prepare(read_recipe(str(RECIPE), [*settings, *SETTINGS, KEEP]), "dedup"), run, 2)
        before = f'["{run.uri}"]'
        assert [row["cluster_size"] for row in rows_of(run, "dedup") if row["drop_stage"] is None] == [1]
        assert open_table(run, "index")[1].paths_of("merged/") == []


def test_the_rows_of_an_index_are_not_shuffled(spark, tmp_path):
    """One document shuffles as much beside an index of 500 as alone, but for the copy that it finds there."""
    draw, shuffled = np.random.default_rng(6), {}
    pages = [{"text": " ".join(text_of(draw, 60)), "url": f"https://site.org/{at}"} for at in range(500)]
    for name, rows, before in (("first", pages, "[]"), ("alone", pages[7:8], "[]"), ("second", pages[7:8], "first")):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        indexes = f'["{tmp_path}/{before}"]' if before == "first" else before
        settings = [f'source.paths="{tmp_path}/{name}.jsonl"', "dedup.write_index=true", f"dedup.indexes={indexes}"]
        settings += [f"source.snapshot={FIRST if name == 'first' else SECOND}", "dedup.compare_survivor=off"]
        run = Store(str(tmp_path / name))
        run_steps(spark, prepare(read_recipe(str(RECIPE), [*settings, *SETTINGS, KEEP]), "dedup"), run, 2)
        shuffled[name] = open_table(run, "clusters")[1].run.notes["shuffled_bytes"]
        assert next(row["cluster_size"] for row in rows_of(run, "dedup")) == (2 if name == "second" else 1)
    assert shuffled["first"] > 200_000
    assert shuffled["second"] - shuffled["alone"] < 20_000


@pytest.mark.parametrize("by_url", ["off", "first"])
def test_what_was_taken_down_does_not_return_with_the_next_snapshot(spark, tmp_path, by_url):
    """The index of the first snapshot no longer has the page, so its copy would count as new."""
    draw, before = np.random.default_rng(5), "[]"
    pages = [{"text": " ".join(text_of(draw)), "url": f"https://{at % 2}.site.org/{at}"} for at in range(8)]
    for snapshot in (FIRST, SECOND):
        lines = [*pages, {"text": pages[3]["text"], "url": f"https://{snapshot}.org/"}]
        (tmp_path / f"{snapshot}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        settings = [f'source.paths="{tmp_path}/{snapshot}.jsonl"', "dedup.write_index=true", f"dedup.indexes={before}"]
        run = Store(str(tmp_path / snapshot))
        recipe = read_recipe(str(RECIPE), [*settings, *SETTINGS, KEEP, f"dedup.by_url={by_url}"])
        run_steps(spark, prepare(recipe, "clean"), run, 2)
        if snapshot == FIRST:
            assert "taken_down" not in str(open_table(run, "dedup")[1].content.counts.dropped)
            options = ["--url", pages[1]["url"], "--url", pages[4]["url"], "--with-copies"]
            assert main(["takedown", run.root, *options]) == 0
            before = f'["{run.uri}"]'
    urls = {row["doc_id"]: row["url"] for row in rows_of(run, "documents")}
    dropped = {urls[row["doc_id"]]: row["drop_rule"] for row in rows_of(run, "dedup")}
    taken = {url for url, rule in dropped.items() if rule == "taken_down"}
    assert taken == {pages[1]["url"], pages[4]["url"]}
    assert dropped[pages[0]["url"]] == ("same_url" if by_url == "first" else "exact_duplicate")
    assert not taken & {urls[row["doc_id"]] for row in rows_of(run, "clean") if row["drop_stage"] is None}
    assert open_table(run, "dedup")[1].content.counts.dropped["dedup/taken_down"] == 2
    same = predict(spark, run, stored_recipe(run, []), {})
    assert all(cell.before == cell.after for cell in same.cells)


def test_two_indexes_are_used_after_a_takedown_in_the_first(run_of, inputs, indexed, tmp_path):
    """The second index was made with the first as it was before."""
    first = Store(str(shutil.copytree(indexed.uri, tmp_path / "first")))
    second = run_of([SECOND], "dedup.write_index=true", f'dedup.indexes=["{first.uri}"]')
    for doc in sorted(survivors(first, FIRST))[:2]:  # one after the other
        assert main(["takedown", first.root, "--doc", doc.hex()]) == 0
    indexes = f'dedup.indexes=["{first.uri}","{second.uri}"]'
    recipe = read_recipe(str(RECIPE), [f'source.paths=["{inputs}/{THIRD}-*.jsonl"]', *SETTINGS, KEEP, indexes])
    assert prepare(recipe, "dedup").splits


def name_of_file(snapshot: str, starts: Callable[[int], bool]) -> str:
    """A name of a file of a snapshot such that `starts` is true of the first byte of the id of its first row."""
    names = (f"{snapshot}-{number}.jsonl" for number in range(10_000))
    return next(name for name in names if starts(doc_id("web", name, 0)[0]))


@pytest.mark.parametrize(("comparison", "start"), [("require", URL[0]), ("off", 1)])
def test_a_what_if_compares_with_clusters_of_any_id(spark, tmp_path, comparison, start):
    """Of clusters, ids may begin with the byte that marks URLs elsewhere."""
    names = [name_of_file(FIRST, lambda byte: byte == start), name_of_file(SECOND, lambda byte: byte > start)]
    words, before = text_of(np.random.default_rng(8)), "[]"
    for name, snapshot in zip(names, (FIRST, SECOND)):
        row = {"text": " ".join([*words[:60], snapshot, *words[60:]]), "url": f"https://{snapshot}.org/"}
        (tmp_path / name).write_text(json.dumps(row) + "\n")
        settings = [f'source.paths="{tmp_path}/{name}"', "dedup.write_index=true", f"dedup.indexes={before}"]
        run = Store(str(tmp_path / snapshot))
        recipe = read_recipe(str(RECIPE), [*settings, *SETTINGS, KEEP, f"dedup.compare_survivor={comparison}"])
        run_steps(spark, prepare(recipe, "dedup"), run, 2)
        before = f'["{run.uri}"]'
    (row,) = rows_of(run, "dedup")
    assert (row["drop_rule"], row["cluster"][0]) == ("near_duplicate", start)
    cells = predict(spark, run, stored_recipe(run, []), {}).cells
    assert [(cell.before, cell.after) for cell in cells] == [("dedup/near_duplicate",) * 2]


def test_files_of_one_name_in_two_snapshots_have_other_ids(spark, inputs, tmp_path):
    ids = []
    for snapshot in ("2024-10", "2024-18"):
        folder = tmp_path / snapshot
        folder.mkdir()
        shutil.copy(inputs / f"{FIRST}-0.jsonl", folder / "part.jsonl")
        paths = [f'source.paths="{folder}/part.jsonl"', f"source.snapshot={snapshot}"]
        run = Store(str(tmp_path / f"run-{snapshot}"))
        run_steps(spark, prepare(read_recipe(str(RECIPE), [*paths, *SETTINGS]), "documents"), run, 2)
        ids += [row["doc_id"] for row in rows_of(run, "documents")]
    assert len(set(ids)) == len(ids)


@pytest.mark.parametrize(
    "settings",
    [
        ["dedup.verify=jaccard"],
        pytest.param(["signature.family=datatrove", "dedup.threshold=0.8"], marks=pytest.mark.slow),
        ["signature.family=simhash", "dedup.max_distance=6", "dedup.blocks=9"],
        pytest.param(["dedup.exact=raw", "dedup.near=false"], marks=pytest.mark.slow),
    ],
)
def test_other_methods_find_the_equal_ones_too(run_of, whole, settings):
    run = run_of(ALL, *settings)
    cluster = {row["doc_id"]: row["cluster"] for row in rows_of(run, "clusters")}
    column = "raw_digest" if "dedup.exact=raw" in settings else "text_digest"
    groups: dict[bytes, set[bytes]] = {}
    for row in rows_of(run, "documents"):
        groups.setdefault(row[column], set()).add(cluster[row["doc_id"]])
    assert {len(found) for found in groups.values()} == {1}
    rules = [row["drop_rule"] for row in rows_of(run, "dedup")]
    assert ("near_duplicate" in rules) == ("dedup.near=false" not in settings)
    assert "exact_duplicate" in rules


@pytest.mark.slow
def test_copies_of_two_scopes_never_meet(run_of, whole):
    run = run_of(ALL, "dedup.scope=['snapshot','source']")
    scopes = {row["doc_id"]: row["snapshot"] for row in rows_of(run, "documents")}
    found: dict[bytes, set[str]] = {}
    for row in rows_of(run, "clusters"):
        found.setdefault(row["cluster"], set()).add(scopes[row["doc_id"]])
    assert {len(values) for values in found.values()} == {1}
    across = len({row["cluster"] for row in rows_of(whole, "clusters")})
    assert len(found) - across > 50


def test_of_one_url_the_longest_stays(run_of, whole):
    run = run_of(ALL, "dedup.by_url=longest")
    assert read_run(run).tables["documents"] == read_run(whole).tables["documents"]
    alive = {row["doc_id"] for row in rows_of(run, "verdicts") if row["drop_stage"] is None}
    best: dict[str, tuple[int, bytes]] = {}
    for row in rows_of(run, "documents"):
        if row["doc_id"] in alive:
            site = row["url"].split("?")[0]
            best[site] = min(best.get(site, (0, b"")), (-row["num_bytes"], row["doc_id"]))
    lost = {row["doc_id"] for row in rows_of(run, "dedup") if row["drop_rule"] == "same_url"}
    assert lost == alive - {doc for _, doc in best.values()}
    assert len(lost) > 50


@pytest.mark.slow
def test_other_verdicts_and_url_rules_leave_the_clusters_standing(run_of, tmp_path, spark):
    folder = tmp_path / "run"
    run = run_of(ALL, folder=folder)
    before = read_run(run).tables
    wanted = ["dedup.by_url=newest", "quality.min_words=118"]
    cells = predict(spark, run, stored_recipe(run, wanted), {}).cells
    predicted: dict[str, int] = {}
    for cell in cells:
        predicted[cell.after] = predicted.get(cell.after, 0) + cell.documents
    run_of(ALL, *wanted, folder=folder)
    after = read_run(run).tables
    assert {name for name in after if after[name] != before[name]} == {"verdicts", "dedup", "representatives"}
    counts = open_table(run, "dedup")[1].content.counts
    assert predicted["kept"] == counts.rows_kept
    assert predicted["dedup/same_url"] == counts.dropped["dedup/same_url"] > 0
    assert predicted.get("dedup/near_duplicate", 0) == counts.dropped["dedup/near_duplicate"]
