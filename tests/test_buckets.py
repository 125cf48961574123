"""Buckets of quality: which settings cut, where a value falls, and what is read of which table."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.recipe import read_recipe, recipe_sections
from pipeline import perplexity
from pipeline.buckets import bucket_numbers, bucket_of, buckets_of_part
from pipeline.parts import Part
from pipeline.stage import Split
from pipeline.stages import checked_streams
from pipeline.streams import FAMILY_OF, OF_PERPLEXITY, TokensConfig
from schemas.config import load_recipe
from schemas.errors import ConfigError, ContractError
from schemas.storage import Store
from schemas.tables import DOCUMENTS

RECIPE = Path(__file__).parents[1] / "jobs" / "recipes" / "demo.toml"
SIGNAL = "fineweb_terminal_lines"
SPLITS = [
    Split(ordinal, f"{source}.warc.gz", "", 1, "", source, "warc") for ordinal, source in enumerate(("web", "books"))
]


def config(by: str, *cuts: float) -> TokensConfig:
    return TokensConfig(buckets_by=by, bucket_cuts=cuts)


@pytest.mark.parametrize(
    ("by", "cuts", "names"),
    [
        ("", (), ()),
        ("perplexity", (), ("head", "middle", "tail", "all")),
        (SIGNAL, (0.5,), ("low", "high", "none")),
        (SIGNAL, (0.5, 0.75), ("low", "middle", "high", "none")),
        (SIGNAL, (-1.0, 0.0, 1.0), ("b0", "b1", "b2", "b3", "none")),
    ],
)
def test_names_of_buckets(by: str, cuts: tuple[float, ...], names: tuple[str, ...]) -> None:
    assert config(by, *cuts).bucket_names == names


def test_buckets_of_perplexity_are_those_of_the_verdicts() -> None:
    assert (*perplexity.BUCKETS, perplexity.ALL) == OF_PERPLEXITY


def test_every_signal_that_may_cut_is_a_numeric_column() -> None:
    assert len(FAMILY_OF) > 60
    assert all(pa.types.is_floating(kind) or pa.types.is_integer(kind) for kind in map(_kind, FAMILY_OF))


def _kind(name: str) -> pa.DataType:
    return DOCUMENTS.field(name).type


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"buckets_by": "fineweb_terminal_line"}, r"no such signal 'fineweb_terminal_line' \(did you mean 'fineweb_t"),
        ({"buckets_by": "perplexty"}, r"did you mean 'perplexity'"),
        ({"buckets_by": "url"}, r"no such signal 'url' \(valid: "),
        ({"bucket_cuts": [0.5]}, "bucket_cuts would be ignored: buckets_by names no signal"),
        ({"buckets_by": "perplexity", "bucket_cuts": [0.5]}, r"would be ignored: the shares of \[perplexity\] cut"),
        ({"buckets_by": SIGNAL}, "buckets_by = 'fineweb_terminal_lines' needs bucket_cuts"),
        ({"buckets_by": SIGNAL, "bucket_cuts": [0.5, 0.5]}, r"promised ascending values, .* found \[0.5, 0.5\]"),
        ({"buckets_by": SIGNAL, "bucket_cuts": [0.7, 0.5]}, r"found \[0.7, 0.5\]"),
        ({"buckets_by": SIGNAL, "bucket_cuts": [0.1, 0.1 + 1e-12]}, "apart in single precision"),
        ({"buckets_by": SIGNAL, "bucket_cuts": [float("nan")]}, "finite number"),
        ({"mix": 3}, "tokens.mix: Input should be a valid string"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_recipe({"tokens": settings}, [], recipe_sections(), "test")


def test_what_is_not_measured_cuts_nothing() -> None:
    """Before anything starts: a recipe without a scorer has no perplexity, and families that are not asked are null."""

    def checked(*overrides: str) -> None:
        whole = ['tokens.buckets_by=""', "tokens.bucket_cuts=[]"]
        recipe = read_recipe(str(RECIPE), [*whole, *overrides])
        assert checked_streams(recipe, SPLITS) == {}

    checked()
    checked(f"tokens.buckets_by={SIGNAL}", "tokens.bucket_cuts=[0.5]")
    with pytest.raises(ConfigError, match=r"buckets of perplexity, found no perplexity\.scorer"):
        checked("tokens.buckets_by=perplexity")
    checked("tokens.buckets_by=perplexity", "perplexity.scorer=ngram", 'perplexity.models={en="en.lm"}')
    dclm = ["tokens.buckets_by=dclm_stop_words", "tokens.bucket_cuts=[3]"]
    with pytest.raises(ConfigError, match=r"found 'dclm_stop_words' of the family 'dclm', but quality\.families has"):
        checked(*dclm)
    families = '["gopher_repetition","gopher_quality","c4","fineweb","dclm"]'
    checked(*dclm, f"quality.families={families}")


def test_a_cut_belongs_to_the_bucket_above_it() -> None:
    floats = pa.array([None, -1.0, 0.29999998, 0.3, 0.30000001, 0.5, 7.0, float("nan")], pa.float32())
    assert bucket_numbers(floats, (0.3, 0.5)).tolist() == [3, 0, 0, 1, 1, 2, 2, 3]
    counts = pa.array([2, 3, 4, None, 2**31 - 1], pa.int32())
    assert bucket_numbers(counts, (3.0,)).tolist() == [0, 1, 1, 2, 1]
    assert bucket_numbers(pa.array([], pa.int32()), (3.0,)).tolist() == []


def test_both_sides_are_single_precision() -> None:
    """0.1 as a float32 is a little more than 0.1: compared as doubles a stored 0.1 would lie above its own cut."""
    assert bucket_numbers(pa.array([0.1, 0.7], pa.float32()), (0.1, 0.7)).tolist() == [1, 2]


DROPPED = 3
"""The document that was never measured."""


def part_of(folder: Path, **columns: dict[str, list[Any]]) -> Part:
    """A part of tables of five documents; `documents` has one more, which was dropped before it was measured."""
    ids = [bytes([number]) * 16 for number in range(6)]
    store, paths = Store(str(folder)), {}
    for name, values in columns.items():
        every = name == "documents"
        own = [one for number, one in enumerate(ids) if every or number != DROPPED]
        rows: dict[str, Any] = {"doc_id": pa.array(own, pa.binary(16))} | values
        if every:
            rows["drop_stage"] = pa.array([None] * DROPPED + ["source"] + [None] * 2, pa.string())
        paths[name] = f"{name}.parquet"
        pq.write_table(pa.table(rows), folder / paths[name])
    return Part(0, dict.fromkeys(paths, store), paths)


def found(part: Part, given: TokensConfig) -> dict[int, str]:
    pairs = buckets_of_part(part, given.signal, given.bucket_cuts, given.bucket_names)
    return {identifier[0]: bucket for identifier, bucket in pairs}


def test_buckets_of_a_signal(tmp_path: Path) -> None:
    part = part_of(tmp_path, documents={SIGNAL: pa.array([0.1, 0.5, None, None, 0.9, 0.4], pa.float32())})
    assert found(part, config(SIGNAL, 0.5)) == {0: "low", 1: "high", 2: "none", 4: "high", 5: "low"}


def test_documents_that_were_cut_count_by_what_is_left(tmp_path: Path) -> None:
    """Also where the rest could not be measured; of the others the table of cuts says nothing."""
    span = {"start": 0, "end": 3, "reason": "sentence"}
    kind = pa.list_(pa.struct([("start", pa.int32()), ("end", pa.int32()), ("reason", pa.string())]))
    part = part_of(
        tmp_path,
        documents={SIGNAL: pa.array([0.1, 0.1, 0.1, None, 0.9, 0.9], pa.float32())},
        repeats={
            "cuts": pa.array([[span], [], None, [span], [span, span]], kind),
            SIGNAL: pa.array([0.9, None, 0.9, None, 0.2], pa.float32()),
        },
    )
    assert found(part, config(SIGNAL, 0.5)) == {0: "high", 1: "low", 2: "low", 4: "none", 5: "low"}


def test_buckets_of_perplexity(tmp_path: Path) -> None:
    named = ["head", "all", "tail", "middle", "head"]
    part = part_of(tmp_path, documents={}, verdicts={"perplexity_bucket": pa.array(named, pa.string())})
    assert found(part, config("perplexity")) == {0: "head", 1: "all", 2: "tail", 4: "middle", 5: "head"}


def test_clean_documents_find_their_bucket_in_order_only() -> None:
    ids = [bytes([number]) * 16 for number in range(4)]
    pairs = list(zip(ids, ["low", "high", "none", "low"]))
    buckets = iter(pairs)
    assert [bucket_of(buckets, ids[1]), bucket_of(buckets, ids[3])] == ["high", "low"]
    for asked in ((ids[1], ids[0]), (ids[2], ids[2])):
        buckets = iter(pairs)
        bucket_of(buckets, asked[0])
        with pytest.raises(ContractError, match=f"{asked[1].hex()}: promised the documents of `clean` in the order"):
            bucket_of(buckets, asked[1])
