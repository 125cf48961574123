"""Real, broken and damaged archives: known answers, the account of every byte, and what damage costs."""

import gzip
import hashlib
import json
from collections import Counter
from functools import cache

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.sources.config import SourceConfig
from pipeline.sources.crawl.warc import open_warc
from schemas.ids import doc_id
from tests.support.paths import SHARED
from tests.support.tiny_archive import CONFIG, read, split_of, verdicts

DATA = SHARED / "warc"
SMALL = SourceConfig(paths=("x",), max_record_bytes=1 << 16, max_page_bytes=1 << 15)
needs_data = pytest.mark.skipif(not DATA.exists(), reason=f"needs the archives in {DATA}")


@cache
def manifest():
    lines = (DATA / "manifest.jsonl").read_text().splitlines() if DATA.exists() else []
    return {entry["file"]: entry for entry in map(json.loads, lines)}


@needs_data
@pytest.mark.parametrize("name", ["pages-000.warc.gz", "pages-001.warc.gz", "pages-002.warc.gz"])
def test_every_known_page_comes_out_as_it_was_saved(name):
    with gzip.open(DATA / "pages-index.jsonl.gz", "rt") as index:
        known = {entry["offset"]: entry for entry in map(json.loads, index) if entry["warc"] == name}
    with open(DATA / name, "rb") as stream:
        for row, drop in open_warc(split_of(name), stream, CONFIG):
            if row["record_type"] == "warcinfo":
                continue
            entry = known.pop(row["offset"])
            found = (row["url"], hashlib.sha1(row["_payload"]).hexdigest(), row["page_bytes"], row["_http_charset"])
            assert found == (entry["url"], entry["html_sha1"], entry["html_bytes"], entry["http_charset"] or None)
            assert drop is None
            assert row["doc_id"] == doc_id("web", name, row["offset"])
    assert known == {}


@needs_data
@pytest.mark.parametrize("folder", ["real", "broken"])
def test_every_byte_of_real_and_broken_files_is_accounted_for(folder):
    for name in manifest():
        if name.startswith(f"{folder}/"):
            read((DATA / name).read_bytes())


@needs_data
def test_undamaged_archives_hold_the_records_that_fastwarc_counts():
    for name, entry in manifest().items():
        counted = entry["reader"]["fastwarc"]
        if name.startswith("real/") and counted and "unknown" not in counted:
            kinds = Counter(row["record_type"] for row, _ in read((DATA / name).read_bytes()))
            assert kinds == counted, name


MADE = {
    "made-ok.warc.gz": {"kept": 12},
    "made-plain.warc": {"kept": 12},
    "made-gz-name-but-plain.warc.gz": {"kept": 12},
    "made-single-member.warc.gz": {"kept": 12},
    "made-zstd.warc.zst": {"kept": 12},
    "made-truncated-last.warc.gz": {"kept": 11, "truncated_record": 1},
    "made-truncated-first-8-bytes-left.warc.gz": {"kept": 6, "truncated_record": 1},
    "made-bitrot-member6.warc.gz": {"kept": 11, "bad_gzip": 1},
    "made-garbage-between-members.warc.gz": {"kept": 12, "unreadable_gap": 1},
    "made-zero-padding.warc.gz": {"kept": 12, "unreadable_gap": 1},
    "made-content-length-short.warc": {"kept": 11, "lying_length": 1},
    "made-content-length-short.warc.gz": {"kept": 11, "lying_length": 1},
    "made-content-length-long.warc": {"kept": 11, "lying_length": 1},
    "made-content-length-long.warc.gz": {"kept": 11, "lying_length": 1},
    "made-empty-warc-type.warc.gz": {"kept": 11, "not_a_page": 1},
    # Its status line is three bytes longer than the one its length was written for.
    "made-bad-http-status.warc.gz": {"kept": 11, "lying_length": 1},
    "made-bad-digest.warc.gz": {"kept": 11, "digest_mismatch": 1},
    "made-empty.warc.gz": {"empty_file": 1},
    "made-empty-member.warc.gz": {"empty_file": 1},
    "made-not-a-warc.warc.gz": {"unreadable_gap": 1},
    "made-huge-compressible.warc.gz": {"kept": 2, "page_too_large": 1},
}


@needs_data
def test_damage_that_was_made_costs_what_it_must_and_no_more():
    config = SourceConfig(paths=("x",), verify_digests=True)
    made = [name for name, entry in manifest().items() if entry["kind"] == "made"]
    assert sorted(made) == sorted(f"broken/{name}" for name in MADE)
    for name in made:
        found = Counter(rule for _, rule in verdicts((DATA / name).read_bytes(), config))
        assert found == MADE[name.removeprefix("broken/")], name


@needs_data
def test_an_arc_file_gives_the_pages_of_the_same_crawl_in_warc():
    crawls = [read((DATA / "real" / f"IAH-2008-blackbook.{kind}.gz").read_bytes()) for kind in ("arc", "warc")]
    arc, warc = (
        [(row["url"], row["date"], row["mime"], row["_payload"], drop) for row, drop in rows if row["mime"]]
        for rows in crawls
    )
    assert Counter(drop.rule if drop else "kept" for *_, drop in arc)["kept"] == 94
    assert Counter(map(str, arc)) == Counter(map(str, warc))


@needs_data
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["made-ok.warc.gz", "made-single-member.warc.gz", "made-plain.warc", "made-zstd.warc.zst"]),
    st.lists(
        st.tuples(st.integers(0, 60_000), st.sampled_from(["flip", "cut", "insert", "remove"]), st.binary(max_size=40))
    ),
)
def test_no_damage_loses_a_byte_or_raises(name, damages):
    stored = bytearray((DATA / "broken" / name).read_bytes()[:60_000])
    for position, kind, junk in damages:
        if kind == "flip" and position < len(stored):
            stored[position] ^= 0x10
        elif kind == "cut":
            del stored[max(position, 1000) :]
        elif kind == "insert":
            stored[position:position] = junk
        elif kind == "remove":
            del stored[position : position + len(junk)]
    read(bytes(stored), SMALL)


@needs_data
def test_a_wet_file_gives_its_text():
    kept = [row for row, drop in read((DATA / "real" / "whirlwind.warc.wet.gz").read_bytes()) if drop is None]
    (row,) = kept
    assert (row["record_type"], row["mime"], row["_payload"]) == ("conversion", "text/plain", None)
    assert row["url"] == "https://an.wikipedia.org/wiki/Escopete"
    assert row["page_bytes"] == len(row["text"].encode())
    assert row["domain"] == "wikipedia.org"
