"""Tests of a mix in the pipeline: the documents that it leaves out, the checks of its file, and its shortfalls."""

import itertools
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pydantic import ValidationError

from jobs.recipe import read_recipe
from pipeline.engine.parquet import WrittenFile
from pipeline.engine.part import PartResult
from pipeline.membership.index import TOP, membership_figures
from pipeline.membership.tree import Subtree
from pipeline.prepare import find_models
from pipeline.stages import STEPS
from pipeline.steps.requirements import bucket_tables, check_buckets
from pipeline.tokens.dataset import StreamTotal, clean_rows, collect_results
from pipeline.tokens.streams import (
    TOKENS,
    Sorting,
    TokensConfig,
    check_mix,
    describe_shortfalls,
    mix_figure,
    sorting_of,
)
from schemas.errors import ConfigError, ContractError
from schemas.ids import file_sha256, shuffle_key
from schemas.manifest import Counts, open_table
from schemas.mix import Mix, SourceMix, mix_toml
from schemas.storage import Store
from schemas.tables import CLEAN
from schemas.tokens import name_of_copies, split_copies
from tests.pipeline.tokens.test_buckets import RECIPE, SIGNAL, SPLITS
from tests.support.checked_paths import written_part
from tests.support.lineage_run import edit, join_dataset
from tests.support.report_run import CLEAN_CHARS, crawl, identifier
from tests.support.tiny_dataset import make_tiny_dataset

IDS = [number.to_bytes(16, "little") for number in range(4000)]


def mix(**sources: dict[str, Any]) -> Mix:
    """Return a mix of sources, `web_low` for web+low, with equal shares."""
    mixed = {
        name.replace("_", "+"): SourceMix(**{"share": 1 / len(sources), "repeat": 1.5, "why": "tried"} | values)
        for name, values in sources.items()
    }
    return Mix(dataset="ab" * 32, plan="cd" * 32, reference="a test", sources=mixed)


def written(folder: Path, mix: Mix) -> str:
    """Write a mix to a file; return its path."""
    path = folder / "mix.toml"
    path.write_text(mix_toml(mix), encoding="utf-8")
    return str(path)


def kept(share: float, stream: str = "web/train", seed: int = 0) -> set[bytes]:
    sorting = Sorting(TokensConfig(seed=seed), {"web": share})
    return {doc_id for doc_id in IDS if sorting.drop(stream, doc_id) is None}


def leave_out(run: Store, keep: float) -> dict[bytes, float]:
    """Give the synthetic run's dataset a mix that keeps a share; return the hash (0..1) of documents left out."""
    join_dataset(run)
    clean = [identifier(number) for number, record in enumerate(crawl()) if record.outcome == "kept"]
    dropped = {doc_id: hashed for doc_id in clean if (hashed := shuffle_key(2, doc_id) / 2**63) >= keep}

    def change(content: dict[str, Any]) -> None:
        content["config"] = {"tokens": TokensConfig(heldout_share=0).content()}
        content["figures"]["mix"] = {"web": {"keep": keep, "repeat": 1.0, "wanted_tokens": None, "found_tokens": 9}}
        content["figures"]["dropped_chars"] = {"tokens/mix": CLEAN_CHARS * len(dropped)}
        kept, left = len(clean) - len(dropped), {"tokens/mix": len(dropped)}
        content["counts"] = {"rows_in": len(clean), "rows_kept": kept, "dropped": left}

    edit(run, "tokens", change)
    return dropped


def test_a_document_is_kept_by_its_hash_alone() -> None:
    drop = Sorting(TokensConfig(seed=4), {"web": 0.3}).drop("web/train", IDS[0])
    share = shuffle_key(6, IDS[0]) / 2**63
    assert share > 0.3
    assert (drop.rule, drop.value, drop.limit) == ("mix", share, 0.3)
    assert Sorting(TokensConfig(seed=4), {"web": share + 1e-9}).drop("web/train", IDS[0]) is None


def test_what_a_smaller_share_keeps_a_larger_one_keeps() -> None:
    shares = (0.01, 0.3, 0.5, 0.999, 1.0)
    sets = [kept(share) for share in shares]
    assert all(small < large for small, large in itertools.pairwise(sets))
    assert [len(ids) / len(IDS) for ids in sets] == pytest.approx(shares, abs=0.03)
    assert kept(0.3, seed=1) != kept(0.3)


def test_heldout_documents_and_other_sources_are_all_kept() -> None:
    assert kept(0.01, "web/heldout") == kept(0.01, "books/train") == kept(0.01, "web+low/train") == set(IDS)
    assert not Sorting(TokensConfig(), {"web": 1.0}).may_drop
    assert Sorting(TokensConfig(), {"web": 1.0, "books": 0.99}).may_drop


def test_the_choice_is_neither_that_of_held_out_documents_nor_their_order() -> None:
    """Its hash has a separate salt, so it is independent of the held-out hash and of the shuffle order."""
    chosen = kept(0.5)
    for seed in (0, 1):
        early = {doc_id for doc_id in IDS if shuffle_key(seed, doc_id) < 1 << 62}
        assert abs(len(chosen & early) / len(early) - 0.5) < 0.05


@pytest.mark.parametrize(
    ("bucket", "stream"), [(None, "web/train"), ("low", "web+low/train"), ("none", "web+none/train")]
)
def test_a_bucket_is_part_of_the_name(bucket: str | None, stream: str) -> None:
    assert Sorting(TokensConfig(heldout_share=0)).stream("web", bucket, IDS[0]) == stream
    held = Sorting(TokensConfig(heldout_share=0.999999)).stream("web", bucket, IDS[0])
    assert held == stream.replace("train", "heldout")


@pytest.mark.parametrize(
    ("bucket", "weight", "stream"),
    [(None, 1, "web/train"), (None, None, "web/train"), (None, 3, "web+x3/train"), ("low", 8, "web+low+x8/train")],
)
def test_documents_that_are_read_equally_often_have_a_stream(
    bucket: str | None, weight: int | None, stream: str
) -> None:
    assert Sorting(TokensConfig(heldout_share=0)).stream("web", bucket, IDS[0], weight) == stream
    source = stream.removesuffix("/train")
    assert name_of_copies(*split_copies(source)) == source
    assert split_copies(source)[1] == (weight or 1)
    # A cluster is held out or trained on, whatever its weight.
    halves = [Sorting(TokensConfig(heldout_share=0.5)).stream("web", bucket, doc_id, weight) for doc_id in IDS[:50]]
    plain = [Sorting(TokensConfig(heldout_share=0.5)).stream("web", bucket, doc_id) for doc_id in IDS[:50]]
    assert [name.rpartition("/")[2] for name in halves] == [name.rpartition("/")[2] for name in plain]


@pytest.mark.parametrize("name", ["web", "web+low", "web+xl", "a+x", "b+x2c"])
def test_other_names_have_no_copies(name: str) -> None:
    assert split_copies(name) == (name, 1)


def test_the_weight_of_clean_decides_the_stream(tmp_path: Path) -> None:
    rows = [
        {"doc_id": IDS[number], "source": "web", "cluster": IDS[number], "weight": weight, "text": "a", "num_bytes": 1}
        | ({"drop_stage": "pii"} if weight is None else {})
        for number, weight in enumerate((1, 5, None, 2))
    ]
    columns = {field.name: [row.get(field.name) for row in rows] for field in CLEAN}
    pq.write_table(pa.table(columns, schema=CLEAN), tmp_path / "part.parquet")
    part = written_part(0, {"clean": Store(str(tmp_path))}, {"clean": "part.parquet"})
    (batch,) = clean_rows(part, Sorting(TokensConfig(heldout_share=0)))
    assert [(row["doc_id"], row["stream"]) for row in batch] == [
        (IDS[0], "web/train"),
        (IDS[1], "web+x5/train"),
        (IDS[3], "web+x2/train"),
    ]


@pytest.mark.parametrize(
    ("overrides", "tables"),
    [
        ((), ()),
        (('dedup.scope=["snapshot"]',), ("documents", "templates")),
        (('dedup.scope=["snapshot"]', "tokens.heldout_share=0"), ()),
        (("tokens.heldout_by=text",), ("documents", "templates")),
    ],
)
def test_texts_decide_where_copies_are_kept(overrides: tuple[str, ...], tables: tuple[str, ...]) -> None:
    plain = ('tokens.buckets_by=""', "tokens.bucket_cuts=[]")
    assert bucket_tables(read_recipe(str(RECIPE), [*plain, *overrides])) == tables


def test_the_setting_of_held_out_texts() -> None:
    assert "heldout_by" not in TokensConfig().content()
    assert TokensConfig(heldout_by="text").content()["heldout_by"] == "text"
    with pytest.raises(ValidationError, match=r"heldout_by would be ignored: heldout_share is 0"):
        TokensConfig(heldout_by="text", heldout_share=0)


def test_equal_texts_are_on_one_side_of_a_dataset(tmp_path: Path) -> None:
    """Two copies of each of 50 texts, each in a cluster of its own, as two snapshots have them."""
    folder, numbers = Store(str(tmp_path)), range(100)
    clean = [
        {"doc_id": IDS[number], "source": "web", "cluster": IDS[number], "weight": 1, "text": "a", "num_bytes": 1}
        for number in numbers
    ]
    digests = [IDS[1000 + number % 50] for number in numbers]
    documents = {"doc_id": IDS[:100], "drop_stage": pa.nulls(100, pa.string()), "text_digest": digests}
    columns = {field.name: [row.get(field.name) for row in clean] for field in CLEAN}
    pq.write_table(pa.table(columns, schema=CLEAN), tmp_path / "clean.parquet")
    pq.write_table(pa.table(documents), tmp_path / "documents.parquet")
    names = ("documents", "clean")
    part = written_part(0, dict.fromkeys(names, folder), {name: f"{name}.parquet" for name in names})
    for by_text in (False, True):
        (batch,) = clean_rows(part, Sorting(TokensConfig(heldout_share=0.5), by_text=by_text))
        streams = [row["stream"] for row in batch]
        assert {*streams} == {"web/train", "web/heldout"}
        assert (streams[:50] == streams[50:]) is by_text


def test_a_dataset_of_the_first_version_ignores_weights(tmp_path: Path) -> None:
    run = make_tiny_dataset(tmp_path)
    edit(run, "tokens", lambda content: content.update(stages={"tokens": 1}))
    assert sorting_of(open_table(run, "tokens")[1]).stream("web", None, IDS[0], 3).startswith("web/")
    edit(run, "tokens", lambda content: content.update(stages={"tokens": 2}))
    assert sorting_of(open_table(run, "tokens")[1]).stream("web", None, IDS[0], 3).startswith("web+x3/")


def recipe_with(folder: Path, mix: Mix, *overrides: str) -> Any:
    return read_recipe(str(RECIPE), [f'tokens.mix="{written(folder, mix)}"', *overrides])


WHOLE = ('tokens.buckets_by=""', "tokens.bucket_cuts=[]")


def test_sources_that_the_recipe_does_not_make_are_rejected_before_anything_runs(tmp_path: Path) -> None:
    two = ("tokens.bucket_cuts=[0.5]",)
    check_buckets(recipe_with(tmp_path, mix(web={}, books={}), *WHOLE), SPLITS)
    check_buckets(recipe_with(tmp_path, mix(web_low={}, books_high={}, web_none={}), *two), SPLITS)
    check_buckets(recipe_with(tmp_path, mix(web={}), *WHOLE, "dedup.rehydration={1=1, 2=3}"), SPLITS)
    for invalid, overrides, message in (
        (mix(wbe={}, books={}), WHOLE, r"'wbe' \(did you mean 'web'\?\)"),
        (mix(web_low={}), WHOLE, r"expected sources of this recipe, .* got 'web\+low'.*tokens.buckets_by"),
        (mix(web={}, web_low={}), two, r"got 'web' \(did you mean 'web\+"),
        (mix(web_middle={}), two, r"got 'web\+middle'"),
        (mix(web_tail={}), (), r"got 'web\+tail'"),
        (
            mix(web={}, web_x3={}),
            (*WHOLE, "dedup.rehydration={1=1, 2=3}"),
            r"got 'web\+x3'",
        ),
    ):
        with pytest.raises(ConfigError, match=message):
            check_buckets(recipe_with(tmp_path, invalid, *overrides), SPLITS)


def test_a_mix_that_cannot_be_read_is_rejected_before_anything_runs(tmp_path: Path) -> None:
    recipe = read_recipe(str(RECIPE), [f'tokens.mix="{tmp_path}/none.toml"'])
    with pytest.raises(ConfigError, match=r"none\.toml: .*No such file"):
        check_buckets(recipe, SPLITS)


def test_sources_that_the_dataset_has_and_the_mix_lacks() -> None:
    counts = {"web+low/train": (10, 0), "web+high/train": (10, 0), "web+high+x3/train": (1, 0), "web/heldout": (1, 0)}
    check_mix(mix(web_low={}, web_high={}), "mix.toml", counts)
    with pytest.raises(ConfigError, match=r"tokens\.mix mix\.toml: .* got no web\+high\. "):
        check_mix(mix(web_low={}), "mix.toml", counts)
    with pytest.raises(ConfigError, match=r"expected sources of the dataset, got 'web\+none'"):
        check_mix(mix(web_low={}, web_high={}, web_none={}), "mix.toml", counts)


def test_a_share_that_keeps_nothing_is_rejected() -> None:
    message = r"got keep = 0\.01, which leaves out all 3 training documents\. Increase keep of web in that file\."
    with pytest.raises(ConfigError, match=message):
        check_mix(
            mix(web={"keep": 0.01}), "mix.toml", {"web/train": (0, 2), "web+x2/train": (0, 1), "web/heldout": (4, 0)}
        )


TOP_OF_ALL = Subtree(bytes([1]) * 32)


def indexes(rows: int, by_id: int | None = None) -> list[PartResult]:
    """The results of a part of the URL index, and of a part of the index by id."""
    parts = []
    for key, number in (("by_url", rows), ("by_id", rows if by_id is None else by_id)):
        written = WrittenFile(f"{key}/00000", f"{key}/00000-x.arrow", number, 1, "")
        parts.append(PartResult({key: written}, Counts(rows_in=number, rows_kept=number), {TOP: TOP_OF_ALL.to_json()}))
    return parts


@pytest.mark.parametrize(
    ("shards", "by_url", "by_id"),
    [(2, 1, 2), (2, 3, 2), (2, None, None), (1, 2, 2), (3, 2, 2), (2, 2, 1), (2, 2, 3)],
)
def test_the_indexes_and_the_shards_have_every_document(shards: int, by_url: int | None, by_id: int | None) -> None:
    totals = {"web/train": StreamTotal(2, 7, 0, 0)}
    written = PartResult({}, Counts(rows_in=shards, rows_kept=shards), {"tokens": {"web/train": 7}})
    message = f"in the index by id, got {shards}, {by_url or 0} and {by_id or 0}. Run `penstock"
    with pytest.raises(ContractError, match=message):
        collect_results([written, *(indexes(by_url, by_id) if by_url else [])], totals, 2)
    two = PartResult({}, Counts(rows_in=2, rows_kept=2), {"tokens": {"web/train": 7}})
    assert collect_results([two, *indexes(2)], totals, 2).counts.rows_kept == 2


def test_a_mix_may_leave_out_all_documents_that_are_read_several_times() -> None:
    totals = {"web+x3/train": StreamTotal(0, 0, 2, 20), "web/train": StreamTotal(1, 7, 1, 10)}
    written = PartResult({}, Counts(rows_in=1, rows_kept=1), {"tokens": {"web/train": 7}})
    built = collect_results([written, *indexes(1)], totals, 4)
    assert built.figures == {
        "streams": {"web/train": [7]},
        "documents": {"web/train": 1},
        **membership_figures([TOP_OF_ALL]),
    }
    assert built.counts == Counts(rows_in=4, rows_kept=1, dropped={"tokens/mix": 3})
    with pytest.raises(ContractError, match=r"expected 7 tokens in the shards of web/train, got 0\."):
        collect_results([], totals, 4)


def test_the_mix_enters_the_fingerprint_by_its_digest(tmp_path: Path) -> None:
    tokens = STEPS[-1]
    recipe = recipe_with(tmp_path, mix(web={}), *WHOLE)
    (file,) = find_models(recipe, [tokens])[TOKENS.name].values()
    assert file.sha256 == file_sha256(tmp_path / "mix.toml")
    assert "mix" not in recipe["tokens"].content()
    assert find_models(read_recipe(str(RECIPE), []), [tokens]) == {}


def test_recommended_and_available_tokens_by_source() -> None:
    suggested = mix(web={"keep": 0.5}, books={"wanted_tokens": 500, "repeat": 4.0})
    tokens = {"web/train": 40, "web+x3/train": 10, "web/heldout": 7, "books/train": 205}
    assert mix_figure(suggested, tokens) == {
        "web": {
            "keep": 0.5,
            "repeat": 1.5,
            "wanted_tokens": None,
            "found_tokens": 70,
        },  # an epoch reads 10 of them 3 times
        "books": {"keep": 1.0, "repeat": 4.0, "wanted_tokens": 500, "found_tokens": 205},
    }


@pytest.mark.parametrize(
    ("required", "available", "line"),
    [
        (2_000_000_000, 820_000_000, "web: 0.41 of the 2.0e9 tokens that mix.toml asks for; 2.4 x as much crawl"),
        (12_345_678_901, 12_345_678, "web: 0.001 of the 1.2e10 tokens that mix.toml asks for; 1000.0 x as much crawl"),
        (1000, 999, "web: 0.99 of the 1.0e3 tokens that mix.toml asks for; 1.1 x as much crawl"),
        (5, 2, "web: 0.4 of the 5.0e0 tokens that mix.toml asks for; 2.5 x as much crawl"),
        (1000, 1000, None),
        (1000, 1001, None),
        (None, 1, None),
    ],
)
def test_a_line_for_each_source_with_too_few_tokens(required: int | None, available: int, line: str | None) -> None:
    figure = mix_figure(mix(web={"wanted_tokens": required}), {"web/train": available})
    assert list(describe_shortfalls(figure, "a/folder/mix.toml")) == ([line] if line else [])


def test_the_demo_is_divided_by_a_signal() -> None:
    config = read_recipe(str(RECIPE), []).section("tokens", TokensConfig)
    assert (config.buckets_by, config.bucket_names) == (SIGNAL, ("low", "middle", "high", "none"))


def test_the_largest_seed_can_be_used_and_no_larger_one_is_accepted() -> None:
    Sorting(TokensConfig(seed=(1 << 63) - 1), {"web": 0.5}).drop("web/train", IDS[0])
    with pytest.raises(ValueError, match="seed"):
        TokensConfig(seed=1 << 63)
