"""Planted identifiers: functions of key and id, on lines of their own; nothing else of a text changes."""

import hashlib
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.pii.stage import REPLACED_SPANS
from pipeline.plant.stage import KEY, PlantConfig, insert_lines, line_starts, make_plant, model_files
from schemas.errors import ConfigError, ContractError
from schemas.manifest import Content, Counts
from schemas.planted import describe_planted, is_planted, planted_facts, planted_string

SECRET = hashlib.sha512(b"a key").digest()
OTHER = hashlib.sha512(b"another key").digest()
IDS = [number.to_bytes(16, "big") for number in range(4000)]


@pytest.fixture
def key_file(tmp_path: Path) -> str:
    path = tmp_path / "key"
    path.write_bytes(SECRET)
    return str(path)


def test_identifiers_follow_from_key_document_and_number_alone() -> None:
    strings = {
        planted_string(key, own, number, 12) for key in (SECRET, OTHER) for own in IDS[:50] for number in range(20)
    }
    assert len(strings) == 2 * 50 * 20
    assert planted_string(SECRET, IDS[3], 0, 12) == planted_string(SECRET, IDS[3], 0, 12)
    assert all(
        re.fullmatch("([bdfghjklmnprstvz][aeio]){3}( ([bdfghjklmnprstvz][aeio]){3}){11}", own) for own in strings
    )
    counts = [sum(string.count(a + b) for string in strings) for a in "bz" for b in "ao"]
    assert all(900 < count < 1360 for count in counts)  # 72,000 syllables of 64 kinds: 1125 each, 33 is a deviation


def test_a_longer_identifier_is_no_repetition() -> None:
    words = planted_string(SECRET, IDS[0], 0, 100).split()
    assert len({*words}) > 98


def test_the_key_chooses_the_share() -> None:
    chosen = sum(is_planted(SECRET, own, 0.3) for own in IDS)
    assert abs(chosen - 1200) < 4 * 29
    assert [own for own in IDS if is_planted(SECRET, own, 0.3)] != [own for own in IDS if is_planted(OTHER, own, 0.3)]
    assert not any(is_planted(SECRET, own, 0.0) for own in IDS)
    assert all(is_planted(SECRET, own, 0.3) for own in IDS if is_planted(SECRET, own, 0.1))


@pytest.mark.parametrize(
    ("text", "number", "expected"),
    [
        ("", 1, "X"),
        ("", 2, "X\nX"),
        ("a", 2, "a\nX\nX"),
        ("a\n", 1, "a\nX"),
        ("a\nb", 2, "a\nX\nb\nX"),
        ("a\n\nb", 2, "a\n\nX\nb\nX"),
        ("a\nb\nc\nd", 2, "a\nb\nX\nc\nd\nX"),
        ("a\nb", 3, "a\nX\nb\nX\nX"),
    ],
)
def test_copies_are_spread_over_the_lines(text: str, number: int, expected: str) -> None:
    assert insert_lines(text, "X", line_starts(text, number)) == expected


@given(text=st.text(st.sampled_from("ab\n ")), number=st.integers(1, 9))
def test_the_other_lines_stay(text: str, number: int) -> None:
    made = insert_lines(text, "X", line_starts(text, number)).split("\n")
    assert made.count("X") == number
    left = "\n".join(line for line in made if line != "X")
    assert left in (text, text.removesuffix("\n"))


def row_of(doc_id: bytes, **values: Any) -> dict[str, Any]:
    text = "first line\n<EMAIL> writes\nlast"
    return {"doc_id": doc_id, "text": text, "num_chars": len(text), "num_bytes": len(text) + 5, **values}


def test_a_chosen_document_has_its_identifier_and_right_lengths_and_places(key_file: str) -> None:
    plant = make_plant(PlantConfig(share=0.5, repeats=3, key_file=key_file), {KEY: key_file})
    chosen, other = (next(own for own in IDS if is_planted(SECRET, own, 0.5) is state) for state in (True, False))
    place = {"column": "text", "start": 11, "end": 18}
    url = {"column": "url", "start": 11, "end": 18}
    row = row_of(chosen, **{REPLACED_SPANS: [place, url]})
    assert plant(row) is None
    identifier = planted_string(SECRET, chosen, 0, 12)
    assert row["text"] == f"first line\n{identifier}\n<EMAIL> writes\n{identifier}\nlast\n{identifier}"
    assert (row["planted"], row["num_chars"]) == (3, len(row["text"]))
    assert row["num_bytes"] == len(row["text"]) + 5
    assert row["text"][place["start"] : place["end"]] == "<EMAIL>"
    assert url["start"] == 11
    row = row_of(other)
    plant(row)
    assert row == {**row_of(other), "planted": 0}
    row = row_of(chosen, drop_stage="pii")
    plant(row)
    assert row == {**row_of(chosen, drop_stage="pii"), "planted": None}


def test_a_weak_key_is_refused_and_a_share_needs_one(tmp_path: Path, key_file: str) -> None:
    weak = tmp_path / "weak"
    weak.write_bytes(b"secret")
    with pytest.raises(ConfigError, match="expected at least 32"):
        make_plant(PlantConfig(share=0.1, key_file=str(weak)), {KEY: str(weak)})
    with pytest.raises(ValidationError, match=r"plant\.key_file"):
        PlantConfig(share=0.1)
    assert model_files(PlantConfig(key_file=key_file)) == {}
    assert model_files(PlantConfig(share=0.1, key_file=key_file)) == {KEY: key_file}


def content(**changes: Any) -> Content:
    values = {
        "table": "clean",
        "stages": {"pii": 1, "plant": 1},
        "config": {"plant": {"share": 0.3, "repeats": 2, "length": 12}},
        "inputs": [],
        "files": [],
        "counts": Counts(rows_in=0, rows_kept=0),
        "figures": {"planted_key": "ab" * 32, "planted_documents": {"web": 5}, "planted_lines": {"web": 10}},
    }
    return Content.model_validate(values | changes)


def test_a_manifest_states_what_was_planted() -> None:
    assert describe_planted(content()) == (
        "5 documents have a planted identifier: 10 lines of invented words, which no source has, with 830 characters "
        "in all. The column `planted` of `clean` marks the documents."
    )
    assert describe_planted(content(figures={})) == ""
    assert len(planted_string(SECRET, IDS[0], 0, 12)) == 83
    for damaged in ({"figures": {"planted_key": 3}}, {"config": {}}, {"config": {"plant": {"share": "x"}}}):
        with pytest.raises(ContractError, match="planted identifiers in the manifest"):
            planted_facts(content(**damaged))
