"""Documents as `penstock show` prints them: the verdict of the last table that has one, and columns of later tables."""

import json
from pathlib import Path

import numpy as np
import pyarrow.compute as pc

from pipeline.inspect.show import column_equals, find_documents, format_document, parse_where
from schemas.manifest import current_tables
from tests.pipeline.tokens.test_streams import leave_out
from tests.support.lineage_run import edit
from tests.support.report_repeats import add_repeats
from tests.support.report_run import make_run


def test_cuts_and_verdicts_of_repeats_are_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "audit")
    add_repeats(run)
    assert [*current_tables(run)] == ["documents", "text", "verdicts", "clusters", "dedup", "audit", "repeats"]
    dropped = list(find_documents(run, parse_where("drop_rule = nothing_left"), 5))
    assert [row["drop_stage"] for row in dropped] == ["repeats"]
    (again,) = [
        row for row in find_documents(run, parse_where("drop_rule = gopher_short_doc"), 99) if row.get("repeats.cuts")
    ]
    text = format_document(again, False)
    assert "dropped by quality/gopher_short_doc" in text
    assert "repeats.cuts               3-9 line" in text
    assert "repeats.body_chars         894 code points" in text
    assert "repeats.gopher_num_words   8" in text
    assert f"clusters.cluster           {again['doc_id'].hex()}" in text
    copies = list(find_documents(run, pc.field("drop_rule") == "near_duplicate", 99))
    assert len(copies) == 3  # a document that `repeats` does not drop keeps its verdict


def test_an_index_of_another_run_does_not_hide_a_table(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "dedup")
    path = Path(run.uri) / "dedup/v-tiny/manifest.json"
    manifest = json.loads(path.read_text())
    outside = {"name": "earlier-0/representatives", "bytes": 1, "sha256": "0" * 64}
    manifest["content"]["inputs"].append(outside)
    path.write_text(json.dumps(manifest))
    assert "dedup" in current_tables(run)
    manifest["content"]["inputs"].append(outside | {"name": "index"})
    path.write_text(json.dumps(manifest))
    assert "dedup" not in current_tables(run)


def test_documents_left_out_by_the_mix_are_not_kept(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    assert len(list(find_documents(run, parse_where("drop_stage is null"), 99))) == 20
    shares = leave_out(run, 0.5)
    assert 0 < len(shares) < 20
    left = list(find_documents(run, parse_where("drop_rule = mix"), 99))
    assert {row["doc_id"] for row in left} == {*shares}
    for row in left:
        assert (row["drop_stage"], row["drop_limit"]) == ("tokens", 0.5)
        assert row["clean.text"] == "…"  # it is in `clean`, but in no shard
        value = np.float32(shares[row["doc_id"]])
        assert format_document(row, False).splitlines()[0].endswith(f"  dropped by tokens/mix ({value:g}, limit 0.5)")
        (same,) = find_documents(run, column_equals("doc_id", row["doc_id"].hex()), 5)
        assert same == row
    kept = list(find_documents(run, parse_where("drop_stage is null"), 99))
    assert len(kept) == 20 - len(shares)
    assert {format_document(row, False).splitlines()[0].partition("  ")[2] for row in kept} == {"kept"}
    assert len(list(find_documents(run, parse_where("drop_stage = tokens and drop_value >= 0.5"), 99))) == len(shares)
    assert not any(find_documents(run, parse_where("drop_stage = tokens and drop_limit > 0.5"), 9))


def test_a_dataset_of_other_documents_leaves_nothing_out(tmp_path: Path) -> None:
    """The clean documents were rebuilt and the dataset was not, so its mix does not apply to them."""
    run = make_run(tmp_path / "run")
    assert leave_out(run, 0.5)
    edit(run, "clean", lambda content: content["figures"].update(made="again"))
    assert not any(find_documents(run, parse_where("drop_rule = mix"), 9))
    assert len(list(find_documents(run, parse_where("drop_stage is null"), 99))) == 20


def test_values_by_name_are_shown_by_name(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", "clean")
    rows = list(find_documents(run, parse_where("drop_stage is null"), 99))
    lines = [line for row in rows for line in format_document(row, False).splitlines() if "pii_counts" in line]
    assert lines.count("  clean.pii_counts           email 2, phone 1 occurrences") == 3
    assert lines.count("  clean.pii_counts           none occurrences") == 17
