"""The closing summary: counts, shares, tokens by source and the next commands, computed by hand from manifests."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.run import check_some_kept
from pipeline.summary import closing_summary, drops_of_run
from schemas.errors import ContractError
from schemas.manifest import Counts, RunFile, current_tables, make_manifest, write_manifest, write_run
from schemas.storage import Store

COUNTS = {
    "documents": (1000, 700, {"source/not_a_page": 200, "extract/no_text": 60, "language/not_wanted": 40}),
    "verdicts": (700, 500, {"quality/min_words": 150, "quality/max_words": 50, "quality/unused": 0}),
    "dedup": (700, 450, {"dedup/dropped_before": 200, "dedup/exact_duplicate": 50}),
    "clean": (450, 450, {"pii/failed": 0}),
    "tokens": (450, 450, {}),
}
STREAMS = {"web/train": [1000, 500], "web/heldout": [20], "books/train": [300]}


@pytest.fixture
def run(tmp_path: Path) -> Store:
    """A run with the manifests of the tables in COUNTS, without files."""
    store = Store(str(tmp_path / "a run"))
    for name, (rows_in, kept, dropped) in COUNTS.items():
        content: dict[str, Any] = {
            **{"table": name, "stages": {}, "config": {}, "inputs": [], "files": []},
            "counts": {"rows_in": rows_in, "rows_kept": kept, "dropped": dropped},
            "figures": {"streams": STREAMS} if name == "tokens" else {},
        }
        block = {"paths": {}, "started": "", "wall_seconds": 1.0, "cpu_seconds": 1.0, "code_version": "0"}
        folder = store.child(f"{name}/v-1")
        write_manifest(folder, make_manifest(content, block, folder.uri))
    write_run(store, RunFile(tables=dict.fromkeys(COUNTS, "v-1"), recipe={}))
    return store


def test_summary_of_a_run(run: Store) -> None:
    summary = closing_summary(run, None, 75.0)
    assert summary.text().splitlines() == [
        "run complete in 75.0 s",
        "  documents  1,000 rows read, 450 documents kept (45.0 %)",
        "  dropped    source/not_a_page 200 (20.0 %), quality/min_words 150 (15.0 %), extract/no_text 60 (6.0 %) "
        "and 3 other reasons 140 (14.0 %)",
        "  tokens     books: 300 in 1 shard, 0 held out",
        "  tokens     web: 1,500 in 2 shards, 20 held out",
        f"  written    {run.uri} (5 tables, 0 bytes)",
        f"  dataset    {run.uri}/tokens/v-1",
    ]
    assert [command for command, _ in summary.next] == [
        f"penstock show '{run.uri}' --where 'drop_rule = min_words' --limit 5 --text",
        f"penstock report '{run.uri}'",
        f"penstock train '{run.uri}'",
    ]
    assert summary.next_text().startswith("next:\n  penstock show ")


def test_summary_of_a_stage_ends_at_that_stage(run: Store) -> None:
    summary = closing_summary(run, "verdicts", 3.0, "penstock run r.toml --out run")
    assert summary.text().splitlines()[:3] == [
        "stage verdicts complete in 3.0 s",
        "  documents  1,000 rows read, 500 documents kept (50.0 %)",
        "  dropped    source/not_a_page 200 (20.0 %), quality/min_words 150 (15.0 %), extract/no_text 60 (6.0 %) "
        "and 2 other reasons 90 (9.0 %)",
    ]
    assert summary.next[-1][0] == "penstock run r.toml --out run"


def test_own_rules_and_failed_documents_are_always_named(run: Store) -> None:
    edit(run, "verdicts", lambda m: m["content"]["counts"].update(rows_kept=498))
    edit(run, "verdicts", lambda m: m["content"]["counts"]["dropped"].update({"quality/mine": 2}))
    rule = {"name": "mine", "when": "num_chars > 9", "reason": "It is long."}
    edit(run, "verdicts", lambda m: m["content"]["config"].update(quality={"rule": [rule]}))
    entry = {"count": 3, "document": "0a", "message": "boom"}
    notes = {"errors": {"long: ValueError at my.py:3": entry}, "calls": {"long": 13}}
    edit(run, "documents", lambda m: m["run"].update(notes=notes))
    lines = closing_summary(run, None, 1.0, None, [("reused", "documents of other")]).text().splitlines()
    assert lines[2] == (
        "  dropped    source/not_a_page 200 (20.0 %), quality/min_words 150 (15.0 %), extract/no_text 60 (6.0 %), "
        "quality/mine 2 (0.2 %) and 3 other reasons 140 (14.0 %)"
    )
    assert lines[-2:] == [
        "  reused     documents of other",
        "  warning    stage long failed on 3 of 13 document(s): ValueError: boom (my.py:3), 3 document(s), such as 0a",
    ]
    edit(run, "verdicts", lambda m: m["content"]["counts"]["dropped"].update({"quality/min_words": 1}))
    edit(run, "verdicts", lambda m: m["content"]["counts"]["dropped"].update({"quality/max_words": 1}))
    edit(run, "verdicts", lambda m: m["content"]["counts"].update(rows_kept=696))
    assert "drop_rule = mine" in closing_summary(run, None, 1.0).next[0][0]  # although language/not_wanted has 40


def test_false_positives_and_losses_of_the_audit(run: Store) -> None:
    def audited(losses: int, with_numbers: float, pairs: int = 612, low: float = 0.01) -> list[str]:
        figures = {
            "min_jaccard": 0.7,
            "precision": {
                "removed": {
                    "false_positives": {"value": 0.0125, "low": low, "high": 0.03, "pairs": pairs},
                    "false_positives_with_numbers": {"value": with_numbers, "low": low, "high": 0.03, "pairs": pairs},
                }
            },
            "losses": [
                {
                    **{"kind": "domain", "name": f"lost{n}.org\x1b", "documents": 1000, "removed": 812},
                    "pairs": [{"removed": "a1" * 16, "kept": "b2" * 16, "jaccard": 0.8}],
                }
                for n in range(losses)
            ],
        }
        content = {"table": "audit", "stages": {}, "config": {}, "inputs": [], "files": [], "figures": figures}
        block = {"paths": {}, "started": "", "wall_seconds": 1.0, "cpu_seconds": 1.0, "code_version": "0"}
        content["counts"] = {"rows_in": 0, "rows_kept": 0}
        folder = run.child("audit/v-1")
        Path(folder.path("manifest.json")).unlink(missing_ok=True)
        write_manifest(folder, make_manifest(content, block, folder.uri))
        write_run(run, RunFile(tables=dict.fromkeys([*COUNTS, "audit"], "v-1"), recipe={}))
        lines = closing_summary(run, None, 1.0).text().splitlines()
        return [line.split(maxsplit=1)[1] for line in lines if line.split()[0] in ("copies", "warning")]

    assert audited(0, 0.25) == [
        "of 612 removed near copies, 1.2 % (1.0 to 3.0 %) are less similar than 0.7 to the document kept; "
        "25.0 % (1.0 to 3.0 %) if numbers count"
    ]
    assert audited(0, 0.0125, low=0.03) == [
        "of 612 removed near copies, 1.2 % are less similar than 0.7 to the document kept"
    ]
    assert audited(0, 0.25, pairs=0) == []
    assert audited(5, 0.25)[1:] == [
        *(
            f"domain lost{n}.org\\x1b: 812 of 1,000 documents (81 %) are dropped as copies, such as a1a1a1a1a1a1 of "
            "b2b2b2b2b2b2"
            for n in range(3)
        ),
        "2 other sources and domains lost as much; the report lists them",
    ]
    commands = [command for command, _ in closing_summary(run, None, 1.0).next]
    assert f"penstock show '{run.uri}' --doc a1a1a1a1a1a1 --text" in commands


def edit(run: Store, table: str, change: Callable[[dict[str, Any]], object]) -> None:
    """Change the manifest of a table."""
    path = Path(run.path(f"{table}/v-1/manifest.json"))
    manifest = json.loads(path.read_text())
    change(manifest)
    path.write_text(json.dumps(manifest))


def test_drops_and_kept_rows_add_up(run: Store) -> None:
    manifests = {name: table.manifest for name, table in current_tables(run).items()}
    assert 1000 - sum(drops_of_run(manifests).values()) == 450


def test_a_run_that_keeps_nothing_names_the_reasons() -> None:
    counts = {
        "documents": Counts(rows_in=1300, rows_kept=10, dropped={"source/no_text_field": 1290}),
        "verdicts": Counts(rows_in=10, rows_kept=0, dropped={"quality/min_words": 7, "quality/max_words": 3}),
    }
    check_some_kept("documents", counts)
    check_some_kept("clusters", counts)
    with pytest.raises(ContractError) as caught:
        check_some_kept("verdicts", counts)
    assert str(caught.value) == (
        "verdicts: expected at least one document to be left, got none of 1,300 rows. Dropped: source/no_text_field "
        "1,290, quality/min_words 7, quality/max_words 3. Correct the settings of these stages, or source.paths; "
        "`penstock show RUN --where 'drop_rule = NAME'` prints dropped documents."
    )


def test_a_vocabulary_that_is_too_small_is_reported(run: Store) -> None:
    figures = {"lowered_coverage": 0.98, "characters_as_bytes": 1203, "ids_needed": 2042}
    content = {"table": "tokenizer", "stages": {}, "config": {}, "inputs": [], "files": [], "figures": figures}
    block = {"paths": {}, "started": "", "wall_seconds": 1.0, "cpu_seconds": 1.0, "code_version": "0"}
    content["counts"] = {"rows_in": 450, "rows_kept": 450}
    write_manifest(run.child("tokenizer/v-1"), make_manifest(content, block, "tokenizer"))
    write_run(run, RunFile(tables=dict.fromkeys([*COUNTS, "tokenizer"], "v-1"), recipe={}))
    line = "  tokenizer  1,203 rare characters are encoded as bytes, because tokenizer.vocab_size is below 2,042"
    assert line in closing_summary(run, None, 75.0).text().splitlines()
