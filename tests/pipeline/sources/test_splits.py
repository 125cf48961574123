"""Splits: canonical names, their order, and every mistake in `source.paths`, reported before anything runs."""

import os
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.fs as pafs
import pytest

from pipeline.engine.stage import Split
from pipeline.sources import splits
from pipeline.sources.config import SourceConfig
from pipeline.sources.formats import FORMATS
from pipeline.sources.splits import files_by_part, find_splits, part_numbers, splits_of
from schemas.config import build_recipe
from schemas.errors import ConfigError

*FIRST, LAST = FORMATS
KNOWN = f"{', '.join(FIRST)} or {LAST}"


@pytest.fixture
def crawl(tmp_path):
    for name in (
        "b.warc.gz",
        "a.warc.gz",
        "deep/c.warc.gz",
        "deep/er/d.warc",
        "deep/x.jsonl.zst",
        "t.parquet",
        ".e.warc",
    ):
        path = tmp_path / "crawl" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(name.encode())
    return tmp_path / "crawl"


def names(*paths, **settings):
    return [split.name for split in find_splits(SourceConfig(paths=paths, **settings))]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("*.warc.gz", ["a.warc.gz", "b.warc.gz"]),
        ("a.warc.gz", ["a.warc.gz"]),
        ("?.warc.gz", ["a.warc.gz", "b.warc.gz"]),
        ("[!a].warc.gz", ["b.warc.gz"]),
        ("[a-b].*", ["a.warc.gz", "b.warc.gz"]),
        ("*/*.warc.gz", ["deep/c.warc.gz"]),
        ("**/*.warc*", ["a.warc.gz", "b.warc.gz", "deep/c.warc.gz", "deep/er/d.warc"]),
        ("deep/**", ["c.warc.gz", "er/d.warc", "x.jsonl.zst"]),
        ("d*/er/*", ["deep/er/d.warc"]),
        (".e.*", [".e.warc"]),
    ],
)
def test_names_are_relative_to_the_fixed_folder_and_sorted(crawl, pattern, expected):
    assert names(f"{crawl}/{pattern}") == expected
    if "?" not in pattern:  # which begins the options of a URI
        assert names(f"file://{crawl}/{pattern}") == expected


def test_a_split_says_everything_about_its_file(crawl):
    first, second = find_splits(SourceConfig(name="books", paths=(f"{crawl}/deep/*.zst", f"{crawl}/b.warc.gz")))
    path = crawl / "b.warc.gz"
    assert (first.ordinal, first.name, first.uri, first.size) == (0, "b.warc.gz", str(path), 9)
    assert (first.source, first.format) == ("books", "warc")
    assert first.identity == f"9:{path.stat().st_mtime_ns}"
    assert (second.ordinal, second.name, second.format) == (1, "x.jsonl.zst", "jsonl")
    os.utime(path, ns=(0, 5))
    assert find_splits(SourceConfig(paths=(str(path),)))[0].identity == "9:5"


def test_a_crawl_that_moved_keeps_its_names_and_its_fingerprint(crawl):
    here = SourceConfig(paths=(f"{crawl}/**/*.warc",))
    moved = crawl.rename(crawl.parent / "moved")
    there = SourceConfig(paths=(f"{moved}/**/*.warc",))
    assert [split.name for split in find_splits(there)] == ["deep/er/d.warc"]
    assert here.content() == there.content()
    assert "paths" not in here.content()


def test_a_relative_path_and_a_name_with_wildcards_in_it(crawl, monkeypatch):
    (crawl / "odd[1].warc").write_bytes(b"")
    monkeypatch.chdir(crawl)
    assert names("odd[1].warc", "*.parquet") == ["odd[1].warc", "t.parquet"]
    assert find_splits(SourceConfig(paths=("deep/../*.parquet",)))[0].uri == str(crawl / "t.parquet")


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        (["{}/*.arc"], r"\*\.arc, got no file that matches this pattern\. Correct the path\."),
        (["{}/none/*.warc"], r"none/\*\.warc, got .*none"),
        (["{}/none.warc"], r"none\.warc, got no such file\. Correct the path\."),
        (["{}/none"], r"none, got no such file\. Correct the path\."),
        (["{}"], r"got a folder\. Name its files, such as FOLDER"),
        (["{}/deep.warc"], r"deep\.warc, got a folder\. Name its files"),
        (["{}/gone.warc"], r"gone\.warc, got no such file"),
        (
            ["{}/note.txt"],
            rf"note\.txt, got a name whose suffix fits no known format\. Set source\.format to {KNOWN}\.",
        ),
        (
            ["{}/a.warc.gz", "{}/two/*.gz"],
            r"'a\.warc\.gz', got \S*/crawl/a\.warc\.gz and \S*/two/a\.warc\.gz\. Rename",
        ),
        (["nope://bucket/*.warc"], r"nope://bucket/\*\.warc, got .*nope"),
        (["{}/[z-a].warc"], r"\[z-a\]\.warc, got bad character range"),
    ],
)
def test_a_wrong_path_is_named(crawl, paths, message):
    (crawl / "deep.warc").mkdir()
    (crawl / "gone.warc").symlink_to(crawl / "nowhere")
    (crawl / "note.txt").write_text("x")
    (crawl / "two").mkdir()
    (crawl / "two" / "a.warc.gz").write_bytes(b"")
    with pytest.raises(ConfigError, match=message):
        names(*(path.format(crawl) for path in paths))


def test_every_problem_is_reported_at_once(crawl):
    with pytest.raises(ConfigError, match=r"3 problem\(s\)") as error:
        names(f"{crawl}/*.arc", f"{crawl}/none.warc", f"{crawl}/a.warc.gz", f"{crawl}/a.warc.gz")
    assert len(str(error.value).splitlines()) == 4


@pytest.mark.parametrize(
    ("paths", "twice"),
    [
        (["{}/**/*.warc.gz", "{}/deep/*.warc.gz"], "{}/deep/c.warc.gz twice (c.warc.gz and deep/c.warc.gz)"),
        (["{}/*/c.warc.gz", "{}/deep/c.warc.gz"], "{}/deep/c.warc.gz twice (c.warc.gz and deep/c.warc.gz)"),
        (["{}/a.*", "{}/a.warc.gz"], "{}/a.warc.gz twice"),
        (["{}/[ah]*.warc.gz"], "{}/a.warc.gz twice ({}/a.warc.gz and {}/hard.warc.gz)"),
        (["{}/[as]*.warc.gz"], "{}/a.warc.gz twice ({}/a.warc.gz and {}/soft.warc.gz)"),
        (["{}/deep/er/d.warc", "{}/*/d.warc"], "{}/deep/er/d.warc twice ({}/deep/er/d.warc and {}/folder/d.warc)"),
        (["{}/hard.*", "file://{}/b*.warc.gz", "file://{}/a.*"], "file://{}/a.warc.gz twice (file://{}/a.warc.gz and "),
    ],
)
def test_a_file_with_two_names_is_read_once_or_not_at_all(crawl, paths, twice):
    """Otherwise all its documents are counted, and without deduplication trained on, twice."""
    (crawl / "hard.warc.gz").hardlink_to(crawl / "a.warc.gz")
    (crawl / "soft.warc.gz").symlink_to(crawl / "a.warc.gz")
    (crawl / "folder").symlink_to(crawl / "deep/er")
    with pytest.raises(ConfigError) as error:
        names(*(path.format(crawl) for path in paths))
    expected = f"  expected each file once, got {twice.format(*[crawl] * 3)}"
    (problem,) = [line for line in str(error.value).splitlines() if line.startswith(expected)]
    assert problem.endswith(". Narrow the patterns.")


def test_files_with_equal_contents_are_two_files(crawl):
    (crawl / "copy.warc.gz").write_bytes((crawl / "a.warc.gz").read_bytes())
    os.utime(crawl / "copy.warc.gz", ns=(0, (crawl / "a.warc.gz").stat().st_mtime_ns))
    assert names(f"{crawl}/[ac]*.warc.gz") == ["a.warc.gz", "copy.warc.gz"]


def test_a_repository_with_two_names_is_read_once_or_not_at_all(crawl):
    with pytest.raises(ConfigError, match=r"each file once, got \S+/deep/er twice \(deep/er and er\)\. Narrow"):
        names(f"{crawl}/*/er", f"{crawl}/deep/er", format="code")


@pytest.mark.parametrize(
    ("uri", "path", "is_same"),
    [
        ("s3://b/x/sub/a.jsonl?region=eu-central-1", "b/x/sub/a.jsonl", True),
        ("s3://b/x/a.jsonl", "b/x/a.jsonl", False),
        ("gs://b/x/sub/a.jsonl", "b/x/sub/a.jsonl", False),
    ],
)
def test_an_object_has_one_place_whatever_the_options(uri, path, is_same):
    first = splits._InputFile("sub/a.jsonl", "s3://b/x/sub/a.jsonl", pafs.FileInfo("b/x/sub/a.jsonl"))
    second = splits._InputFile("a.jsonl", uri, pafs.FileInfo(path))
    assert (splits._place(first, "1:2") == splits._place(second, "1:2")) == is_same


def test_no_path_is_looked_up_a_second_time(crawl):
    """With 200,000 files on a network disk, each lookup costs minutes; an open file has its inode."""
    with mock.patch("pipeline.sources.splits.os.stat", wraps=os.stat) as stat:
        assert len(names(f"{crawl}/**/*.warc*")) == 4
    looked_up = [call.args[0] for call in stat.call_args_list]
    assert len([opened for opened in looked_up if isinstance(opened, int)]) == 4
    assert [path for path in looked_up if str(path).endswith((".gz", ".warc"))] == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
def test_an_unreadable_file_is_named(crawl):
    (crawl / "a.warc.gz").chmod(0)
    with pytest.raises(ConfigError, match=r"a\.warc\.gz, got .*Permission"):
        names(f"{crawl}/*.gz")


def test_format_by_setting_wins_over_the_suffix(crawl):
    (crawl / "note.txt").write_text("{}")
    assert find_splits(SourceConfig(paths=(f"{crawl}/note.txt",), format="jsonl"))[0].format == "jsonl"
    (crawl / "UPPER.WARC.GZ").write_bytes(b"")
    assert find_splits(SourceConfig(paths=(f"{crawl}/UPPER*",)))[0].format == "warc"


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"paths": "x", "max_page_bytes": 0}, r"source\.max_page_bytes: .*greater than or equal to 1, got 0"),
        (
            {"paths": "x", "max_record_bytes": 1 << 56},
            r"source\.max_record_bytes: .*less than or equal to 1099511627776",
        ),
        ({"paths": "x", "name": "a/b"}, r"source\.name: .*got 'a/b'"),
        ({"paths": "x", "http_status": [200]}, r"source\.http_status: no such key \(did you mean 'http_statuses'\?\)"),
    ],
)
def test_a_wrong_setting_is_named(section, message):
    with pytest.raises(ConfigError, match=message):
        build_recipe({"source": section}, {"source": SourceConfig}, "test.toml")


def test_one_path_needs_no_list():
    assert build_recipe({"source": {"paths": "x.warc"}}, {"source": SourceConfig}, "t")["source"].paths == ("x.warc",)


def _splits(sizes: list[int], formats: str = "") -> list[Split]:
    return [
        Split(n, f"{n:04}", f"/{n}", size, "", "web", (formats or "j" * len(sizes))[n]) for n, size in enumerate(sizes)
    ]


def test_small_files_share_a_part_only_if_there_are_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "MAX_OWN_PARTS", 3)
    monkeypatch.setattr(splits, "SHARED_FILES", 3)
    monkeypatch.setattr(splits, "SHARED_BYTES", 10)
    assert part_numbers(_splits([1, 1, 1])) == [0, 1, 2]
    assert part_numbers(_splits([1] * 7)) == [0, 0, 0, 1, 1, 1, 2]
    assert part_numbers(_splits([6, 4, 1, 20, 1, 9])) == [0, 0, 1, 2, 3, 3]
    assert part_numbers(_splits([1] * 5, "jjwwj")) == [0, 0, 1, 1, 2]
    grouped = [replace(split, ordinal=number) for split, number in zip(_splits([1] * 7), [0, 0, 0, 1, 1, 1, 2])]
    assert [len(files) for files in files_by_part(grouped)] == [3, 3, 1]


def test_large_files_have_a_part_for_each_range(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splits, "MAX_OWN_PARTS", 3)
    monkeypatch.setattr(splits, "SHARED_FILES", 3)
    files = [replace(split, num_ranges=split.size) for split in _splits([1, 4, 1, 1, 2])]
    assert part_numbers(files[:3]) == [0, 1, 5]
    assert part_numbers(files) == [0, 1, 5, 5, 6]
    assert part_numbers([files[1], *files[2:]]) == [0, 4, 4, 5]


@pytest.mark.parametrize(
    ("name", "part_bytes", "number"),
    [
        ("a.jsonl", (1 << 20) + 1, 2),
        ("a.jsonl", (2 << 20) + 1, 1),
        ("a.jsonl", 2 << 20, 1),
        ("a.jsonl", 1 << 20, 2),
        ("a.jsonl", 0, 1),
        ("a.warc.gz", 1 << 20, 2),
        ("a.parquet", 1 << 20, 2),
        ("a.csv", 1 << 20, 1),
        ("a.arrow", 1 << 20, 1),
        ("a-pages-articles.xml.bz2", 1 << 20, 1),
    ],
)
def test_the_number_of_ranges_of_a_file(tmp_path: Path, name: str, part_bytes: int, number: int) -> None:
    (tmp_path / name).write_bytes(bytes(2 << 20))
    (found,) = find_splits(SourceConfig(paths=(str(tmp_path / name),), part_bytes=part_bytes))
    assert found.num_ranges == number


def test_a_file_with_companions_is_not_divided(tmp_path: Path) -> None:
    for name in ("RS_2015-01", "RC_2015-01"):
        (tmp_path / name).write_bytes(b"{}\n" * (1 << 20))
    for comments, number in (((), 3), ((f"{tmp_path}/RC_2015-01",), 1)):
        paths, reddit = (f"{tmp_path}/RS_2015-01",), {"comments": comments} if comments else {}
        (found,) = find_splits(SourceConfig.model_validate({"paths": paths, "part_bytes": 1 << 20, "reddit": reddit}))
        assert found.num_ranges == number


def test_the_parts_of_sources_follow_each_other(tmp_path: Path) -> None:
    (tmp_path / "large.jsonl").write_bytes(b"{}\n" * (1 << 20))
    (tmp_path / "small.jsonl").write_bytes(b"{}\n")
    large, small = ({"name": name, "paths": [f"{tmp_path}/{name}.jsonl"]} for name in ("large", "small"))
    large["part_bytes"] = 1 << 20
    recipe = build_recipe({"source": [large, small]}, {"source": SourceConfig}, "t")
    assert [(split.key, split.ordinal) for split in splits_of(recipe)] == [
        ("large/large.jsonl", 0),
        ("small/small.jsonl", 3),
    ]


def test_the_content_of_a_source_does_not_have_the_size_of_parts() -> None:
    """A run on files that are not divided stays as it is, whatever the size."""
    sizes = [SourceConfig(paths=("x",), part_bytes=size).content() for size in (0, 1 << 20, 512 << 20)]
    assert sizes[0] == sizes[1] == sizes[2]
    with pytest.raises(ValueError, match="expected 0 or at least 1048576 bytes, got 1000"):
        SourceConfig(paths=("x",), part_bytes=1000)


@pytest.mark.parametrize(
    ("name", "settings", "problem"),
    [
        ("a.jsonl", {"mime_types": ["text/plain"]}, r"reads source\.mime_types \(warc\), got none\. Remove"),
        (
            "a.warc",
            {"parents_field": "from"},
            r"reads source\.parents_field \(jsonl, arrow, csv, hf, parquet\)",
        ),
        ("a.warc", {"meta_fields": ["a"]}, r"reads source\.meta_fields"),
        ("a.tar", {"format": "code", "parents_field": "from"}, r"reads source\.parents_field"),
        (
            "a.jsonl",
            {"format": "unarxive", "licence_field": "license"},
            r"reads source\.licence_field \(.*code\)",
        ),
        ("RS_2015-01", {"text": ["title", "selftext"]}, r"reads source\.text "),
    ],
)
def test_settings_that_no_file_reads_are_refused(
    tmp_path: Path, name: str, settings: dict[str, Any], problem: str
) -> None:
    (tmp_path / name).write_bytes(b"x")
    with pytest.raises(ConfigError, match=problem):
        find_splits(SourceConfig.model_validate({"paths": [f"{tmp_path}/{name}"]} | settings))
    if name == "a.warc":
        (tmp_path / "b.jsonl").write_bytes(b"x")
        assert len(find_splits(SourceConfig.model_validate({"paths": [f"{tmp_path}/*"]} | settings))) == 2


def test_settings_that_no_file_of_a_crawl_reads_are_refused() -> None:
    config = SourceConfig.model_validate({"crawl": "CC-MAIN-2024-10", "files": 1, "text_field": "body"})
    with pytest.raises(ConfigError, match=r"source\.crawl: expected a file of a format that reads source\.text_field"):
        find_splits(config)
