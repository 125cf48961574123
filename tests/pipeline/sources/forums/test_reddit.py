"""Reddit: every submission has one reason or is a document, and comments follow it in the order of a thread."""

import io
import json
from collections import Counter
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import zstandard
from pydantic import ValidationError

from pipeline.engine.stage import Drop, Split
from pipeline.sources.config import SourceConfig
from pipeline.sources.forums.reddit import base_36, id_of
from pipeline.sources.rows import MAX_URL_CHARS
from pipeline.sources.source import open_split, refetch
from pipeline.sources.splits import HashedStream, find_splits, open_stream
from schemas.errors import ConfigError
from tests.support.paths import SHARED

SAMPLE = SHARED / "sources" / "reddit" / "submissions.jsonl.zst"
POST = {
    "id": "16o21a",
    "subreddit": "htpc",
    "title": "A &amp; B",
    "selftext": "1 &lt; 2",
    "score": 5,
    "over_18": False,
    "is_self": True,
    "author": "someone",
    "created_utc": 1358312426,
    "permalink": "/r/htpc/comments/16o21a/a_b/",
    "num_comments": 9,
}


def post(**values: Any) -> dict[str, Any]:
    return POST | values


def comment(number: str, parent: str, body: str, **values: Any) -> dict[str, Any]:
    """A comment on the first post; its parent is a post `t3_…` or a comment `t1_…`."""
    return {"id": number, "link_id": "t3_16o21a", "parent_id": parent, "body": body, "score": 1} | values


def lines(*values: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(value).encode() + b"\n" for value in values)


def read(stored: bytes, companions: tuple[str, ...] = (), **settings: Any) -> list[tuple[dict[str, Any], Drop | None]]:
    """The rows of a file, after checking that they follow each other without a hole."""
    config = SourceConfig.model_validate({"paths": "x", "reddit": settings})
    split = Split(0, "RS", "RS", len(stored), "", "s", "reddit", companions=companions)
    rows = list(open_split(split, HashedStream(io.BytesIO(stored)), config))
    position = 0
    for row, _ in rows:
        assert row["offset"] == position
        position += row["length"]
    return rows


def test_a_submission() -> None:
    ((row, drop),) = read(lines(post()))
    assert (drop, row["text"], row["title"]) == (None, "A & B\n\n1 < 2", "A & B")
    assert row["url"] == "https://www.reddit.com/r/htpc/comments/16o21a/a_b/"
    assert (row["domain"], row["date"]) == ("reddit.com", datetime(2013, 1, 16, 5, 0, 26, tzinfo=UTC))
    assert json.loads(row["meta"]) == {"id": "16o21a", "subreddit": "htpc", "score": 5, "num_comments": 9}


def test_an_address_that_is_too_long_is_that_of_the_id() -> None:
    for values in ({"permalink": f"/{'x' * MAX_URL_CHARS}"}, {"permalink": None, "subreddit": "x" * MAX_URL_CHARS}):
        ((row, drop),) = read(lines(post(**values)))
        assert (drop, row["url"]) == (None, "https://www.reddit.com/comments/16o21a/")


@pytest.mark.parametrize(
    ("values", "settings", "found"),
    [
        ({"score": 2}, {"min_score": 3}, Drop("low_score", 2, 3)),
        ({"score": 3}, {"min_score": 3}, None),
        ({}, {"subreddits": ["r/HTPC"]}, None),
        ({}, {"subreddits": ["php"]}, Drop("subreddit_not_kept")),
        ({}, {"excluded_subreddits": ["Htpc"]}, Drop("subreddit_not_kept")),
        ({"selftext": "[removed]"}, {}, Drop("deleted_post")),
        ({"title": "[deleted by user]"}, {}, Drop("deleted_post")),
        ({"author": "automoderator"}, {}, Drop("bot_author")),
        ({"author": "someone"}, {"bots": ["Someone"]}, Drop("bot_author")),
        ({"over_18": True}, {}, Drop("adult_content")),
        ({"over_18": True}, {"keep_over_18": True}, None),
        ({"selftext": "", "is_self": False}, {}, Drop("link_post")),
        ({"selftext": None}, {}, Drop("title_only")),
        ({"selftext": ""}, {"keep_title_only": True}, None),
        ({"title": " ", "selftext": ""}, {"keep_title_only": True}, Drop("empty_page")),
        ({"title": None}, {}, Drop("bad_row")),
        ({"id": "!"}, {}, Drop("bad_row")),
        ({"created_utc": "1358312426", "permalink": None, "score": None}, {}, None),
    ],
)
def test_every_reason_on_both_sides(values: Any, settings: Any, found: Drop | None) -> None:
    ((_, drop),) = read(lines(post(**values)), **settings)
    assert drop == found


def test_lines_that_are_no_submission_and_damage() -> None:
    assert [drop and drop.rule for _, drop in read(b"{\n[]\n\n" + lines(post()))] == ["bad_line", "bad_line", None]
    stored = zstandard.compress(lines(*[post(id=f"{number}a", title="x" * 500) for number in range(2000)]))
    rows = read(stored[:-10])
    assert rows[-1][1] is not None
    assert (rows[-1][0]["record_type"], rows[-1][1].rule) == ("gap", "truncated_record")


def comments_file(folder: Path, *comments: dict[str, Any]) -> tuple[str, ...]:
    path = folder / "RC_2013-01.zst"
    path.write_bytes(zstandard.compress(lines(*comments)))
    return (str(path),)


def test_comments_follow_by_score_with_their_replies(tmp_path: Path) -> None:
    files = comments_file(
        tmp_path,
        comment("c4", "t1_c2", "reply to two", score=1),
        comment("c1", "t3_16o21a", "one", score=2),
        comment("c2", "t3_16o21a", "two &gt;", score=7),
        comment("c3", "t1_c4", "deep", score=50),
        comment("c5", "t1_c2", "best reply", score=3),
        comment("c6", "t3_16o21a", "[removed]", score=90),
        comment("c7", "t1_c6", "reply to a removed one", score=90),
        comment("c8", "t3_16o21a", "beep", score=90, author="AutoModerator"),
        comment("c9", "t1_c9", "its own parent"),
        comment("d1", "t3_zz", "of another post", link_id="t3_zz"),
        comment("c1", "t3_16o21a", "one", score=2),
        {"id": "d2", "link_id": "t3_16o21a", "parent_id": None, "body": "without a parent"},
    )
    (first, second) = read(lines(post(), post(id="zz", score=1)), files, min_score=2, comments=["x"])
    text = "A & B\n\n1 < 2\n\ntwo >\n\nbest reply\n\nreply to two\n\ndeep\n\none"
    assert (first[0]["text"], second[1]) == (text + "\n\nwithout a parent", Drop("low_score", 1, 2))
    meta = json.loads(first[0]["meta"])
    assert (meta["comments"], meta["comment_ids"]) == (6, ["c2", "c5", "c4", "c3", "c1", "d2"])
    shorter = read(lines(post()), files, comments=["x"], max_comment_depth=2, max_comments=4)[0][0]["text"]
    assert shorter == "A & B\n\n1 < 2\n\ntwo >\n\nbest reply\n\nreply to two\n\none"
    scored = read(lines(post()), files, comments=["x"], min_comment_score=7)[0][0]["text"]
    assert scored == "A & B\n\n1 < 2\n\ntwo >"


def test_a_thread_that_is_too_large_and_a_damaged_file_of_comments(tmp_path: Path) -> None:
    many = [comment(f"{number}b", "t3_16o21a", "x" * 100) for number in range(1000)]
    files = comments_file(tmp_path, *many)
    config = SourceConfig.model_validate({"paths": "x", "max_page_bytes": 5000, "reddit": {"comments": ["x"]}})
    stored = lines(post())
    split = Split(0, "RS", "RS", len(stored), "", "s", "reddit", companions=files)
    ((_, drop),) = open_split(split, HashedStream(io.BytesIO(stored)), config)
    assert drop == Drop("page_too_large", 5010, 5000)
    path = Path(files[0])
    path.write_bytes(path.read_bytes()[:-5])
    (_, gap) = read(stored, files, comments=["x"])
    assert (gap[0]["record_type"], gap[0]["length"]) == ("gap", 0)
    assert gap[1] is not None
    assert gap[1].rule == "truncated_record"


def test_files_from_disk_and_a_submission_read_again(tmp_path: Path) -> None:
    (tmp_path / "RS_2013-01.zst").write_bytes(zstandard.compress(lines(post(id="z1"), post())))
    comments_file(tmp_path, comment("c1", "t3_16o21a", "one"))
    settings = {"paths": f"{tmp_path}/RS*", "reddit": {"comments": [f"{tmp_path}/RC_*"]}}
    config = SourceConfig.model_validate(settings)
    (split,) = find_splits(config)
    assert (split.format, split.companions) == ("reddit", (f"{tmp_path}/RC_2013-01.zst",))
    _, second = [row for row, _ in open_split(split, open_stream(split), config)]
    assert second["text"].endswith("\n\none")
    assert refetch(split, second, config).changes == ()
    comments_file(tmp_path, comment("c1", "t3_16o21a", "another"))
    assert find_splits(config)[0].identity != split.identity
    (tmp_path / "RC_2013-01.zst").unlink()
    with pytest.raises(ConfigError, match=r"RC_\*, got no file that matches this pattern\. Correct the path\."):
        find_splits(config)


def test_comments_of_earlier_months_are_not_read(tmp_path: Path) -> None:
    for name in ("RS_2013-01.zst", "RS_2013-11.zst", "php_submissions.jsonl.zst"):
        (tmp_path / name).write_bytes(zstandard.compress(lines(post())))
    months = ("2012-12", "2013-01", "2013-12", "2014-01")
    for name in (*(f"RC_{month}.zst" for month in months), "php_comments.zst"):
        (tmp_path / name).write_bytes(zstandard.compress(lines(comment("c1", "t3_16o21a", "one"))))

    def read_by(**settings: Any) -> list[list[str]]:
        reddit = {"comments": [f"{tmp_path}/RC_*", f"{tmp_path}/php_comments.zst"]} | settings
        paths = [f"{tmp_path}/RS_*", f"{tmp_path}/php_sub*"]
        splits = find_splits(SourceConfig.model_validate({"paths": paths, "format": "reddit", "reddit": reddit}))
        return [[Path(uri).stem for uri in split.companions] for split in splits]

    every = ["RC_2012-12", "RC_2013-01", "RC_2013-12", "RC_2014-01", "php_comments"]
    assert read_by() == [every[1:], every[2:], every]
    assert read_by(comment_months=1) == [["RC_2013-01", "php_comments"], ["RC_2013-12", "php_comments"], every]
    assert read_by(comment_months=2)[1] == every[2:]
    assert read_by(comment_months=0)[1] == ["php_comments"]


def test_settings_of_comments_need_comments() -> None:
    with pytest.raises(ValidationError, match="max_comments: expected the files of comments"):
        SourceConfig.model_validate({"paths": "x", "reddit": {"max_comments": 3}})


def test_ids() -> None:
    assert [base_36(number) for number in (0, 35, 36)] == ["0", "z", "10"]
    assert (id_of("10"), id_of("1-0"), id_of(5)) == (36, None, None)


@pytest.mark.skipif(not SAMPLE.exists(), reason=f"needs the sample {SAMPLE}")
def test_every_real_submission_has_one_reason() -> None:
    counts = Counter(drop.rule if drop else "kept" for _, drop in read(SAMPLE.read_bytes()))
    assert sum(counts.values()) == 5599
    assert counts == {"kept": 3556, "link_post": 1783, "title_only": 200, "adult_content": 60}


def test_reading_comments_is_progress_of_the_submissions(tmp_path: Path) -> None:
    """The limit of CPU time is counted anew with each read, or else a month of comments would end its worker."""
    comments = tmp_path / "RC"
    comments.write_bytes(lines(comment("c1", "t3_a", "first"), comment("c2", "t3_a", "second")))
    stored, reads = lines(post(id="a")), []
    stream = HashedStream(io.BytesIO(stored))
    stream.on_read = lambda: reads.append(stream.tell())
    split = Split(0, "RS", "RS", len(stored), "", "s", "reddit", companions=(str(comments),))
    assert len([*open_split(split, stream, SourceConfig(paths=("x",)))]) == 1
    alone = HashedStream(io.BytesIO(stored))
    without: list[int] = []
    alone.on_read = lambda: without.append(alone.tell())
    assert len([*open_split(replace(split, companions=()), alone, SourceConfig(paths=("x",)))]) == 1
    # The submissions are read a second time, and the comments once.
    assert len(reads) > 2 * len(without)


def test_the_entities_of_spaces_are_not_shown() -> None:
    own = "a\n\n&amp;#x200B;\n\nb&amp;nbsp;c &amp;amp; d"
    ((row, _),) = read(lines(post(title="t", selftext=own)))
    assert row["text"] == "t\n\na\n\n\n\nb c &amp; d"
