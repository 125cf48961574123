"""The files of a crawl by its name: the list, the choice, the settings, and what is wrong with them."""

import gzip
import itertools
from pathlib import Path
from typing import Any

import pytest

from jobs.recipe import recipe_sections
from pipeline.sources.common_crawl import listing
from pipeline.sources.common_crawl.download import Patience
from pipeline.sources.common_crawl.listing import choose, crawl_root, list_path, read_list
from pipeline.sources.config import SourceConfig
from pipeline.sources.splits import find_splits, part_numbers
from schemas.config import build_recipe
from schemas.errors import ConfigError
from schemas.overrides import load_recipe
from tests.support.crawl_server import serving

CRAWL = "CC-MAIN-2024-10"
FOLDER = f"crawl-data/{CRAWL}"
PATHS = [f"{FOLDER}/segments/{number % 7}/warc/{number:05}.warc.gz" for number in range(1000)]


def write_list(root: Path, path: str, lines: list[str]) -> None:
    (root / path).parent.mkdir(parents=True, exist_ok=True)
    (root / path).write_bytes(gzip.compress("".join(f"{line}\n" for line in lines).encode(), mtime=0))


def config_of(**settings: Any) -> SourceConfig:
    return SourceConfig.model_validate({"crawl": CRAWL, **settings})


@pytest.fixture
def mirror(tmp_path: Path) -> Path:
    write_list(tmp_path, f"{FOLDER}/warc.paths.gz", PATHS)
    write_list(tmp_path, f"{FOLDER}/wet.paths.gz", [path.replace("warc.gz", "warc.wet.gz") for path in PATHS[:3]])
    write_list(tmp_path, "crawl-data/CC-NEWS/2024/10/warc.paths.gz", ["crawl-data/CC-NEWS/2024/10/CC-NEWS-1.warc.gz"])
    return tmp_path


def test_files_are_named_by_their_paths_in_the_bucket(mirror: Path) -> None:
    (split, *_), by_name = find_splits(config_of(mirror=str(mirror), files=2)), {}
    for split in find_splits(config_of(mirror=f"{mirror}/", files=2)):
        by_name[split.name] = split
        assert split.uri == f"{mirror}/{split.name}"
        assert split.name in PATHS
        assert (split.snapshot, split.format, split.key, split.is_crawl) == (CRAWL, "warc", split.name, True)
        assert split.identity == split.name
    assert len(by_name) == 2
    (news,) = find_splits(config_of(crawl="CC-NEWS-2024-10", mirror=str(mirror)))
    assert (news.name, news.snapshot) == ("crawl-data/CC-NEWS/2024/10/CC-NEWS-1.warc.gz", "CC-NEWS-2024-10")
    wet = find_splits(config_of(kind="wet", mirror=str(mirror)))
    assert [split.name.endswith(".warc.wet.gz") for split in wet] == [True] * 3


def test_a_split_is_the_same_by_every_way_but_for_its_address(mirror: Path) -> None:
    with serving(mirror) as server:
        there = find_splits(config_of(mirror=server.uri, files=5))
        assert [path for path, _ in server.requests] == [f"{FOLDER}/warc.paths.gz"]
    here = find_splits(config_of(mirror=str(mirror), files=5))
    for one, two in zip(here, there, strict=True):
        assert {**vars(one), "uri": ""} == {**vars(two), "uri": ""}
    every = find_splits(config_of(mirror=str(mirror)))
    assert part_numbers(every) == [*range(1000)]  # no file shares a part


def test_a_condition_changes_the_identity_of_the_files(mirror: Path) -> None:
    where = "fetch_status = 200"
    plain, chosen = (find_splits(config_of(mirror=str(mirror), files=1, **more)) for more in ({}, {"where": where}))
    assert plain[0].identity != chosen[0].identity
    assert plain[0].name == chosen[0].name


def test_choices_are_nested_and_deterministic() -> None:
    by_number = [set(choose(PATHS, config_of(files=number))) for number in (1, 10, 100, 5000)]
    by_share = [set(choose(PATHS, config_of(share=share))) for share in (0.01, 0.1, 0.5, 1)]
    for sets in (by_number, by_share):
        assert all(small < large for small, large in itertools.pairwise(sets))
    assert [len(chosen) for chosen in by_number] == [1, 10, 100, 1000]
    assert abs(len(by_share[1]) - 100) < 40
    assert by_share[3] == set(PATHS)
    assert set(choose(PATHS, config_of(files=len(by_share[1])))) == by_share[1]  # both by the same hash
    assert choose(PATHS[::-1], config_of(files=10)) == choose(PATHS, config_of(files=10))
    assert len({path.split("/")[3] for path in by_number[2]}) == 7  # from all segments
    with pytest.raises(ConfigError, match="expected at least one file of CC-MAIN-2024-10, got none of its files below"):
        _splits_of(PATHS[:1], share=1e-9)


def _splits_of(paths: list[str], **settings: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(listing, "read_list", lambda *arguments: paths)
        find_splits(config_of(**settings))


def test_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    assert list_path(CRAWL, "wet") == "crawl-data/CC-MAIN-2024-10/wet.paths.gz"
    assert list_path("CC-NEWS-2024-10", "warc") == "crawl-data/CC-NEWS/2024/10/warc.paths.gz"
    for near, expected in ((True, "s3://commoncrawl"), (False, "https://data.commoncrawl.org")):
        monkeypatch.setattr(listing, "is_near", lambda region, near=near: near and region == "us-east-1")
        assert crawl_root(config_of()) == expected
    assert crawl_root(config_of(access="s3")) == "s3://commoncrawl"
    assert crawl_root(config_of(access="https")) == "https://data.commoncrawl.org"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {},
            "source.paths: expected at least one file, got none. Set source.paths, for example to crawl/*.warc.gz",
        ),
        ({"crawl": CRAWL, "paths": ["a"]}, "source.paths: expected either source.paths or source.crawl, got both."),
        (
            {"crawl": "2024-10"},
            "source.crawl: expected the name of a crawl, such as CC-MAIN-2024-10 (year and week)",
        ),
        ({"crawl": "CC-MAIN-2024-60"}, "got 'CC-MAIN-2024-60'. Correct source.crawl."),
        ({"crawl": "CC-NEWS-2024-13"}, "got 'CC-NEWS-2024-13'. Correct source.crawl."),
        ({"paths": ["a"], "files": 3}, "files: expected source.crawl with it, got none. Remove source.files."),
        ({"crawl": CRAWL, "files": 0}, "source.files: Input should be greater than or equal to 1, got 0"),
        ({"crawl": CRAWL, "files": 3, "share": 0.1}, "share: expected either files or share, got both."),
        ({"crawl": CRAWL, "snapshot": "x"}, "snapshot: expected none, because it is the name of the crawl, got 'x'."),
        ({"crawl": CRAWL, "format": "jsonl"}, "format: expected warc with source.crawl, got 'jsonl'."),
        ({"crawl": CRAWL, "mirror": "a", "access": "s3"}, "access: expected none with source.mirror, got 's3'."),
        ({"crawl": "CC-NEWS-2024-10", "kind": "wet"}, 'kind: expected "warc" for a crawl CC-NEWS'),
        ({"crawl": "CC-NEWS-2024-10", "where": "url = 'a'"}, "where: expected WARC files of a crawl CC-MAIN"),
        ({"crawl": CRAWL, "where": "statuss = 200"}, "source.where: expected the name of a column at character 1 of"),
        ({"crawl": CRAWL, "where": "fetch_status = 'a'"}, "source.where: expected a number at character 16 of"),
    ],
)
def test_wrong_settings(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as raised:
        build_recipe({"source": settings}, recipe_sections(), "test")
    assert message in str(raised.value)
    assert "got 1 wrong" in str(raised.value)


def test_an_override_replaces_the_files_of_a_recipe() -> None:
    values = {"source": {"paths": ["a.warc.gz"], "snapshot": "a"}}
    recipe = load_recipe(values, [f"source.crawl={CRAWL}", "source.files=1"], recipe_sections(), "test")
    assert (recipe.section("source", SourceConfig).paths, recipe.section("source", SourceConfig).crawl) == ((), CRAWL)
    values = {"source": {"crawl": CRAWL, "files": 3, "mirror": "m"}}
    recipe = load_recipe(values, ['source.paths=["a"]'], recipe_sections(), "test")
    assert recipe.section("source", SourceConfig).crawl is None


def test_only_the_condition_is_content() -> None:
    plain = SourceConfig(paths=("a",)).content()
    assert config_of(files=3, mirror="m", connections=2, max_unreadable=0.1).content() == plain
    assert config_of(where="fetch_status==200 and url  like 'a%'").content() == plain | {
        "where": "fetch_status = 200 and url like 'a%'"
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"no gzip", "expected a compressed list of paths, got"),
        (gzip.compress(b"a\n")[:-9], "expected a compressed list of paths, got a list that is cut or too long"),
        (gzip.compress(b""), "expected a list of paths, got none"),
        (gzip.compress(b"crawl-data/a\ncrawl-data/../../etc/passwd\n"), "got 'crawl-data/../../etc/passwd'"),
        (gzip.compress(b"/etc/passwd\n"), "expected paths such as crawl-data/…, got '/etc/passwd'"),
        (gzip.compress(b"https://a.example/x\n"), "got 'https://a.example/x'"),
        (gzip.compress(b"crawl-data//a\n"), "got 'crawl-data//a'"),
        (gzip.compress(b"\xff\xfe\n"), "expected a compressed list of paths, got"),
    ],
    ids=["no gzip", "cut", "empty", "parent", "absolute", "uri", "no name", "no UTF-8"],
)
def test_lists_that_are_none(tmp_path: Path, content: bytes, message: str) -> None:
    (tmp_path / "warc.paths.gz").write_bytes(content)
    with pytest.raises(ConfigError) as raised:
        read_list(str(tmp_path), "warc.paths.gz", CRAWL)
    assert message in str(raised.value)


def test_a_crawl_that_is_not_published_is_one_sentence(mirror: Path) -> None:
    with serving(mirror) as server:
        for root in (server.uri, str(mirror)):
            with pytest.raises(ConfigError) as raised:
                find_splits(config_of(crawl="CC-MAIN-2031-10", mirror=root))
            assert str(raised.value).startswith(
                "source.crawl: expected the name of a crawl that is published, got 'CC-MAIN-2031-10', which has no "
                f"{root}/crawl-data/CC-MAIN-2031-10/warc.paths.gz ("
            )
            assert "Choose one of https://index.commoncrawl.org/collinfo.json" in str(raised.value)


def test_no_network_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "IMPATIENCE", Patience(seconds=0.1))
    with pytest.raises(ConfigError) as raised:
        find_splits(config_of(mirror="http://127.0.0.1:9"))
    assert "\n" not in str(raised.value)
    assert str(raised.value).startswith("source.crawl: expected an answer from http://127.0.0.1:9, got no connection (")
    assert str(raised.value).endswith("Check the network, or name a copy with source.mirror.")


def test_a_list_has_a_maximum_size_as_stored(mirror: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listing, "MAX_LIST_BYTES", 1000)
    with serving(mirror) as server, pytest.raises(ConfigError, match="got a list that is too long"):
        read_list(server.uri, f"{FOLDER}/warc.paths.gz", CRAWL)
