"""Tests of the step `audit` on hand-made tables: same samples, figures and bytes for any distribution over parts."""

import hashlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from pipeline.dedup.audit.losses import ALARM, largest_losses
from pipeline.dedup.audit.sample import (
    ANCHORED,
    JOINED,
    REMOVED,
    UNIFORM,
    ProposeTask,
    TextsTask,
    document_keys,
    propose,
    read_sampled,
    rows_of,
)
from pipeline.dedup.audit.step import build_audit
from pipeline.dedup.config import AUDIT, AuditConfig, DedupConfig, is_enabled
from pipeline.engine.parquet import Part, PartWriter, parts_of
from pipeline.engine.step import StepContext
from pipeline.minhash.stage import SignatureConfig, anchor, shingle_hashes, signature, text_digest
from schemas.config import Recipe
from schemas.errors import ContractError
from schemas.manifest import TableVersion, make_manifest, part_key
from schemas.storage import Store
from schemas.tables import TABLES

SIGNATURE = SignatureConfig()
EARLIER = b"\xff" * 16
CUT_LINE = "Cookies are used on this page. "


@dataclass(frozen=True)
class Page:
    """A document of these tests."""

    number: int
    text: str | None
    cluster: int
    leader: int | None = None
    """Page that it matched, which is also kept in its place; -1 is one of an earlier snapshot."""
    language: str = "en"
    measured: bool = True

    @property
    def is_removed(self) -> bool:
        return self.leader is not None and self.leader < self.number

    @property
    def doc(self) -> bytes:
        """Return its doc_id."""
        return identifier(self.number)


def identifier(number: int) -> bytes:
    return hashlib.sha256(b"page %d" % number).digest()[:16]


def make_pages() -> list[Page]:
    """Return 240 pages, some of them dropped before they were measured.

    40 originals each have an equal copy and a near copy, joined except for every fourth near copy. Of the 120 others,
    one is joined with an earlier snapshot.
    """
    chance = random.Random(3)
    words = ["".join(chance.choices("abcdefghij", k=6)) for _ in range(2000)]
    texts = [" ".join(chance.choices(words, k=150)) for _ in range(160)]
    pages = []
    for n in range(40):
        near = texts[n].split()
        near[70] = "changed"  # 5 of 146 shingles are others: Jaccard similarity 141 / 151
        same = n % 4 != 0
        pages.append(Page(3 * n, texts[n], 3 * n, 3 * n + 1))
        pages.append(Page(3 * n + 1, CUT_LINE + texts[n], 3 * n, 3 * n))
        pages.append(Page(3 * n + 2, " ".join(near), 3 * n if same else 3 * n + 2, 3 * n if same else None))
    pages += [Page(n, texts[n - 80], n, language="de" if n % 2 else "en") for n in range(120, 240)]
    pages[150] = Page(150, pages[150].text, 150, leader=-1)
    pages += [Page(n, None, n, measured=False) for n in range(240, 250)]
    return pages


def row_of(page: Page) -> dict[str, Any]:
    """Return the page's row in every table."""
    cut = len(CUT_LINE) if page.text and page.text.startswith(CUT_LINE) else 0
    row = {"doc_id": page.doc, "source": "web", "language": page.language, "text": page.text}
    row["num_bytes"] = len(page.text or "")
    row |= {"cuts": [{"start": 0, "end": cut}] if cut else None, "drop_stage": None if page.measured else "extract"}
    if page.measured and page.text is not None:
        body = page.text[cut:]
        shingles = shingle_hashes(body, page.language, SIGNATURE)
        row["signature"] = signature(body, page.language, SIGNATURE)
        row["text_digest"] = row["raw_digest"] = text_digest(body)
        row["anchor"] = anchor(shingles, SIGNATURE.seed)
    row["cluster"] = identifier(page.cluster)
    row["leader"] = None if page.leader is None else EARLIER if page.leader < 0 else identifier(page.leader)
    row["survivor"], row["domain"] = row["leader"] or page.doc, f"{page.number % 2}.org"
    row["drop_rule"] = "near_duplicate" if page.is_removed else None
    return row


def make_tables(folder: Path, pages: Sequence[Page], parts: int) -> dict[str, TableVersion]:
    """Return the tables `documents`, `text`, `clusters` and `dedup` with these pages, divided into so many parts."""
    tables = {}
    for name in ("documents", "text", "clusters", "dedup"):
        store, files, paths = Store(str(folder / name)), [], {}
        held = [page for page in pages if page.measured or name not in ("clusters", "dedup")]
        schema = TABLES[name].schema
        for part in range(parts):
            with PartWriter(store, part_key(part), schema) as writer:
                for place, page in enumerate(pages):
                    if place % parts == part and page in held:
                        row = row_of(page)
                        if name != "dedup":
                            del row["drop_rule"]
                        writer.add({key: value for key, value in row.items() if key in schema.names})
            entry = writer.written.to_json()
            paths[entry["key"]] = entry.pop("path")
            files.append(entry)
        rows = sum(entry["rows"] for entry in files)
        kept = sum(page.measured for page in held)
        counts = {"rows_in": rows, "rows_kept": kept, "dropped": {"extract/no_text": rows - kept}}
        if name == "dedup":
            removed = sum(page.is_removed for page in held)
            dropped = {"dedup/near_duplicate": removed, "dedup/exact_duplicate": 0}
            counts = {"rows_in": rows, "rows_kept": rows - removed, "dropped": dropped}
        figures = {"joined_documents": sum(page.leader is not None for page in held)} if name == "clusters" else {}
        content = {"table": name, "stages": {}, "config": {}, "inputs": [], "files": files, "counts": counts}
        how = {"paths": paths, "started": "", "wall_seconds": 0.0, "cpu_seconds": 0.0, "code_version": "0"}
        tables[name] = TableVersion(store, make_manifest(content | {"figures": figures}, how, name))
    return tables


def recipe_of(dedup: DedupConfig, **audit: Any) -> Recipe:
    return Recipe({"audit": AuditConfig(**audit), "dedup": dedup, "signature": SIGNATURE})


def audited(
    spark: Any, folder: Path, tables: dict[str, TableVersion], recipe: Recipe
) -> tuple[dict[str, Any], pa.Table, str]:
    """Return figures, rows and digest of the audit of these tables."""
    build = StepContext(spark, recipe, (), {"audit": Store(str(folder / "audit"))}, tables, (), {}, None)
    built = build_audit(build)["audit"]
    (entry,) = built.files
    rows = pq.read_table(folder / "audit" / built.paths[entry.key])
    assert built.counts.rows_kept == rows.num_rows == entry.rows
    return built.figures, rows, entry.sha256


@pytest.mark.spark
def test_the_audit_does_not_depend_on_the_distribution_over_parts(spark: Any, tmp_path: Path) -> None:
    pages = make_pages()
    recipe = recipe_of(DedupConfig(), documents=1000, alarm_share=0.29)
    audits = [
        audited(spark, tmp_path / name, make_tables(tmp_path / name, order, parts), recipe)
        for name, order, parts in (("one", pages, 1), ("three", pages[::-1], 3))
    ]
    assert audits[0][0] == audits[1][0]
    assert audits[0][2] == audits[1][2]
    figures, rows, _ = audits[0]
    # 40 equal pairs and 80 near ones of 141/151, of which a quarter is not joined; all pairs are compared
    uniform = figures["recall"][UNIFORM]
    assert (uniform["documents"], uniform["is_all"], uniform["pairs"]) == (240, True, 120)
    by_jaccard = {row["jaccard"]: row for row in uniform["by_jaccard"]}
    assert by_jaccard[0.7]["pairs"] == by_jaccard[0.9]["pairs"] == 120
    assert by_jaccard[0.7]["joined"] == {"value": 0.833333, "low": 0.833333, "high": 0.833333, "pairs": 120}
    assert by_jaccard[0.95]["joined"]["value"] == by_jaccard[1.0]["candidates"]["value"] == 1
    (near,) = (point for point in uniform["curve"] if point["lower"] == 0.9)
    assert (near["jaccard"], near["pairs"], near["joined"]) == (round(141 / 151, 6), 80, 60)
    assert near["expected"] == pytest.approx(1, abs=1e-4)
    assert near["candidates"] >= 78
    # a pair of 141/151 shares its anchor with that probability: 80 of them give 75 groups, more or less
    anchored = figures["recall"][ANCHORED]
    assert anchored["by_jaccard"][-1]["joined"]["value"] == 1
    assert anchored["by_jaccard"][-1]["pairs"] == 40
    assert 65 <= anchored["pairs"] - 40 <= 80
    # joined: 110 pages with a page of this run, one with an earlier snapshot
    precision = figures["precision"]
    assert (precision[JOINED]["documents"], precision[JOINED]["earlier_snapshots"]) == (111, 1)
    assert (precision[JOINED]["all"]["value"], precision[JOINED]["all"]["pairs"]) == (1, 110)
    # removed: 40 equal pages and 30 near ones, and the page with a copy in the earlier snapshot
    removed = precision[REMOVED]
    assert (removed["documents"], removed["earlier_snapshots"], removed["all"]["pairs"]) == (71, 1, 70)
    assert (precision[JOINED]["near"]["pairs"], removed["near"]["pairs"]) == (30, 30)
    assert removed["false_positives"] == {"value": 0.0, "low": 0.0, "high": 0.113513, "pairs": 30}
    assert set(rows.column("sample").to_pylist()) == {JOINED, REMOVED, UNIFORM, ANCHORED, ALARM}
    assert figures["losses"] == expected_losses(pages, 0.29)
    assert [loss["name"] for loss in figures["losses"]] == ["web", "1.org"]  # 71 of 240, 36 of 120; 0.org has 35


def expected_losses(pages: Sequence[Page], share: float) -> list[dict[str, Any]]:
    """Return the figures of losses, by one loop over all pages."""
    losses = []
    for kind, name in (("source", "web"), ("domain", "0.org"), ("domain", "1.org")):
        own = [page for page in pages if page.measured and (kind == "source" or page.number % 2 == int(name[0]))]
        removed = [page for page in own if page.is_removed]
        if len(removed) <= share * len(own):
            continue
        keys = document_keys(pa.array([page.doc for page in removed], pa.binary(16)), 0, ALARM).tolist()
        shown = [removed[place] for place in np.argsort(keys)[:3]]
        pairs = []
        for page in shown:
            kept = EARLIER if page.leader == -1 else identifier(page.leader or 0)
            value = None if page.leader == -1 else round(141 / 151, 6) if page.number % 3 == 2 else 1.0
            pairs.append({"removed": page.doc.hex(), "kept": kept.hex(), "jaccard": value})
        counts = {"documents": len(own), "removed": len(removed)}
        losses.append({"kind": kind, "name": name, **counts, "pairs": pairs})
    return losses


@pytest.mark.spark
def test_few_documents_and_shares_at_the_limit_raise_no_alarm(spark: Any, tmp_path: Path) -> None:
    parts = parts_of(make_tables(tmp_path, make_pages(), 2))
    for share, least, names in (
        (71 / 240, 50, ["1.org"]),  # the whole source is at the limit, not above it
        (0.2, 121, ["web"]),
        (0.2, 241, []),
        (1.0, 1, []),
    ):
        audit = AuditConfig(alarm_share=share, alarm_documents=least)
        assert [loss.name for loss in largest_losses(spark, parts, audit)] == names


@pytest.mark.spark
def test_small_samples_are_the_lowest_hashes_and_pairs_of_two_scopes_are_left_out(spark: Any, tmp_path: Path) -> None:
    pages = [
        Page(page.number, page.text, page.cluster, page.leader, "de" if page.number % 3 == 2 else "en", page.measured)
        for page in make_pages()
    ]
    tables = make_tables(tmp_path, pages, 2)
    figures, rows, _ = audited(
        spark, tmp_path, tables, recipe_of(DedupConfig(scope=("language",)), documents=100, group=2)
    )
    ids = pa.array([page.doc for page in pages if page.measured], pa.binary(16))
    order = np.argsort(document_keys(ids, 0, UNIFORM))[:100]
    chosen = {ids[place].as_py() for place in order.tolist()}
    uniform = figures["recall"][UNIFORM]
    together = [n for n in range(40) if {identifier(3 * n), identifier(3 * n + 1)} <= chosen]
    assert (uniform["documents"], uniform["pairs"], uniform["is_all"]) == (100, len(together), False)
    assert figures["recall"][ANCHORED]["pairs"] == 40  # equal pages only: the near copies are of another language
    assert figures["precision"][JOINED]["documents"] == 100
    assert {row["jaccard"] for row in rows.to_pylist() if row["sample"] in (UNIFORM, ANCHORED)} == {1.0}


@pytest.mark.spark
def test_a_run_without_documents_is_audited(spark: Any, tmp_path: Path) -> None:
    figures, rows, _ = audited(spark, tmp_path, make_tables(tmp_path, [], 1), recipe_of(DedupConfig()))
    assert rows.num_rows == 0
    assert figures["recall"][ANCHORED]["documents"] == figures["precision"][REMOVED]["documents"] == 0


def test_the_step_runs_if_near_copies_are_joined() -> None:
    assert AUDIT.config is AuditConfig
    assert is_enabled(recipe_of(DedupConfig()))
    assert not is_enabled(recipe_of(DedupConfig(near=False)))
    assert not is_enabled(recipe_of(DedupConfig(), documents=0))


# ----------------------------------------------------------------------------------------------------------- one part


@pytest.fixture
def part(tmp_path: Path) -> Part:
    """Return one part with all pages."""
    return parts_of(make_tables(tmp_path, make_pages(), 1))[0]


def rows(batches: Any) -> list[dict[str, Any]]:
    return [row for batch in batches for row in batch.to_pylist()]


def test_a_part_proposes_groups_with_their_sizes(part: Part) -> None:
    task = ProposeTask(part, AuditConfig(documents=100, group=2), DedupConfig(), 240, 111, 71)
    proposals = rows(propose(task))
    by_sample = {name: [row for row in proposals if row["sample"] == name] for name in (JOINED, UNIFORM, ANCHORED)}
    assert {row["doc"] for row in by_sample[JOINED]} == {page.doc for page in make_pages() if page.leader is not None}
    removed = {row["doc"]: row["other"] for row in proposals if row["sample"] == REMOVED}
    assert len(removed) == 71
    assert removed[identifier(4)] == removed[identifier(5)] == identifier(3)
    groups: dict[bytes, list[dict[str, Any]]] = {}
    for row in by_sample[ANCHORED]:
        groups.setdefault(row["group"], []).append(row)
    assert sum(row["count"] for row in by_sample[ANCHORED]) == 240
    assert max(len(members) for members in groups.values()) == 2
    triples = [members for members in groups.values() if members[0]["count"] == 3]
    assert len(triples) > 25
    assert all([row["count"] for row in members][1:] == [0] for members in triples)
    assert all(members == sorted(members, key=lambda row: row["key"]) for members in groups.values())


def test_shingles_are_those_of_the_text_after_cuts(part: Part) -> None:
    task = TextsTask(part, sorted([identifier(0), identifier(1), EARLIER]), DedupConfig(scope=("language",)), SIGNATURE)
    documents = {row["doc"]: row for row in rows(read_sampled(task))}
    assert set(documents) == {identifier(0), identifier(1)}
    first, second = documents[identifier(0)], documents[identifier(1)]
    assert first["shingles"] == second["shingles"]  # the line that was cut is not there
    assert first["keys"] == second["keys"]
    assert len(first["keys"]) == 14 * 8
    assert (first["num_shingles"], len(first["shingles"])) == (146, 146 * 8)
    assert first["cluster"] == identifier(0)
    assert rows(read_sampled(TextsTask(part, [EARLIER], DedupConfig(), SIGNATURE))) == []


def test_a_document_without_text_or_with_too_much_is_known_but_not_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = make_pages()[:3]
    tables = make_tables(tmp_path, pages, 1)
    withheld = [Page(page.number, None if page.number == 1 else page.text, page.cluster) for page in pages]
    tables["text"] = make_tables(tmp_path / "withheld", withheld, 1)["text"]
    part = parts_of(tables)[0]
    monkeypatch.setattr("pipeline.dedup.audit.sample.MAX_SHINGLES", 145)
    found = rows(read_sampled(TextsTask(part, [page.doc for page in pages], DedupConfig(), SIGNATURE)))
    assert [(row["num_shingles"], row["shingles"]) for row in found] == [(146, None), (None, None), (146, None)]


def test_tables_of_two_runs_are_refused(tmp_path: Path) -> None:
    pages = make_pages()[:6]
    tables = make_tables(tmp_path, pages, 1)
    for name in ("clusters", "text"):
        part = parts_of(tables | {name: make_tables(tmp_path / name, pages[:4], 1)[name]})[0]
        with pytest.raises(ContractError, match=r"expected [16] sampled documents in `clusters` and `text`, got [04]"):
            rows(read_sampled(TextsTask(part, [pages[5].doc], DedupConfig(), SIGNATURE)))


def test_only_row_groups_with_a_wanted_document_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.engine.parquet.GROUP_ROWS", 10)
    pages = make_pages()
    part = parts_of(make_tables(tmp_path, pages, 1))[0]
    read: list[tuple[int, bool]] = []
    original = pq.ParquetFile.read_row_group

    def counted(self: pq.ParquetFile, group: int, columns: list[str]) -> pa.Table:
        read.append((group, "text" in columns))
        return original(self, group, columns=columns)

    monkeypatch.setattr(pq.ParquetFile, "read_row_group", counted)
    wanted_ids = pa.array([pages[12].doc, pages[18].doc, pages[200].doc], pa.binary(16))
    batches = list(rows_of(part, "text", ["doc_id", "text"], wanted_ids))
    assert [batch.num_rows for batch in batches] == [2, 1]
    assert [group for group, with_text in read if with_text] == [1, 20]
    assert len(read) == 25 + 2
