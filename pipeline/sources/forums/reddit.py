"""Reader of Reddit submissions as Pushshift publishes them: JSON lines, with the comments on each if they are joined.

A document is the title and text of a submission, followed by its comments: the best first, each with its replies.
Comments are in other files, in any order. Those on the submissions of a file are grouped on disk.
"""

import re
import sqlite3
from collections.abc import Iterator
from contextlib import closing, nullcontext
from typing import Any, NamedTuple

from pipeline.engine.stage import Drop, Row, Split
from pipeline.sources.blocks import ByteStream
from pipeline.sources.compression import FrameReader
from pipeline.sources.config import SourceConfig
from pipeline.sources.forums.temporary_rows import RowBatch, temporary_database
from pipeline.sources.lines import BOM, LineReader, SourceRows, lines_of, parse_object
from pipeline.sources.provenance import SourceItem, account_bytes, encodable, new_row, set_text, set_title
from pipeline.sources.rows import MAX_URL_CHARS, date_of, meta_of
from schemas.storage import resolve_uri

SITE = "https://www.reddit.com"
DELETED = frozenset(("[deleted]", "[removed]", "[deleted by user]", "[removed by reddit]", "[ removed by reddit ]"))
META = ("id", "subreddit", "score", "num_comments", "over_18")
MAX_THREAD = 200_000
"""Maximum number of comments on a submission that are read, those with the highest scores."""
LINK_ID = re.compile(rb'"link_id"\s*:\s*"t3_([0-9a-zA-Z]{1,12})"')
ID = re.compile(r"[0-9a-zA-Z]{1,12}")
_MONTH = re.compile(r"(?:^|/)R[SC]_(\d{4})-(\d{2})(?!\d)[^/]*\Z", re.IGNORECASE)
ENTITIES = (("&lt;", "<"), ("&gt;", ">"), ("&amp;", "&"))
"""The characters that Reddit escapes in texts."""
SPACES = (("&#x200B;", ""), ("&nbsp;", " "))
"""What the editor of Reddit writes for empty lines and no-break spaces; a reader sees none of it."""
TITLE_ONLY, LINK_POST = Drop("title_only"), Drop("link_post")
"""The most frequent reasons, made once."""


def may_have_comments(submissions: str, comments: str, config: SourceConfig) -> bool:
    """Return True if a file of comments may hold some on a file of submissions, by the months in their names."""
    months = [_MONTH.search(name) for name in (submissions, comments)]
    first, other = (12 * int(month[1]) + int(month[2]) if month else None for month in months)
    if first is None or other is None:
        return True
    most = config.reddit.comment_months
    return other >= first and (most is None or other <= first + most)


class Submission(NamedTuple):
    """A submission, and the reason why it is dropped before its comments are considered."""

    number: int
    """Its id in base 36."""
    row: Row
    """The row of `documents`, without a text."""
    value: dict[str, Any]
    text: str
    """Title and text of the submission."""
    drop: Drop | None


class SubmissionRules:
    """The conditions for a submission, by the settings of the source."""

    def __init__(self, config: SourceConfig):
        self.settings = settings = config.reddit
        self._kept = {name.lower() for name in settings.subreddits}
        self._dropped = {name.lower() for name in settings.excluded_subreddits}
        self.bots = {name.lower() for name in settings.bots}

    def drop(self, value: dict[str, Any], text: str) -> Drop | None:
        """Return the Drop of a submission; `text` is its own text without the title."""
        settings, score = self.settings, score_of(value)
        if self._kept or self._dropped:
            subreddit = str(value.get("subreddit")).lower()
            if (self._kept and subreddit not in self._kept) or subreddit in self._dropped:
                return Drop("subreddit_not_kept")
        if str(value.get("author")).lower() in self.bots:
            return Drop("bot_author")
        if is_deleted(text) or is_deleted(value["title"]):
            return Drop("deleted_post")
        if value.get("over_18") is True and not settings.keep_over_18:
            return Drop("adult_content")
        if settings.min_score is not None and score < settings.min_score:
            return Drop("low_score", float(score), float(settings.min_score))
        if (not text or text.isspace()) and not settings.keep_title_only:
            return TITLE_ONLY if value.get("is_self") is True else LINK_POST
        return None


def open_reddit(split: Split, stream: ByteStream, config: SourceConfig) -> SourceRows:
    """Yield the rows of a file of submissions. `split.companions` are the files of comments.

    Parts of these files that cannot be read are gaps of length 0 at the end.
    """
    rules, max_bytes = SubmissionRules(config), config.max_record_bytes
    lines = lines_of(split, stream, max_bytes)

    def items() -> Iterator[SourceItem]:
        faults: list[Drop] = []
        with temporary_database() if split.companions else nullcontext() as database:
            if database is not None:
                faults = _collect(database, split, stream, config)
                stream.seek(0)
            for start, line in lines:
                if isinstance(line, Drop):
                    yield SourceItem(start, new_row("row" if line.rule == "record_too_large" else "gap"), line)
                elif (line := line.removeprefix(BOM)).strip():
                    found = parse_submission(line, rules)
                    if isinstance(found, Drop):
                        yield SourceItem(start, new_row("row"), found)
                    else:
                        yield SourceItem(start, found.row, _finish(found, database, config))
        for fault in faults:
            yield SourceItem(lines.position, new_row("gap"), fault)

    return account_bytes(items(), split, lambda: lines.position)


def parse_submission(line: bytes, rules: SubmissionRules) -> Submission | Drop:
    """Return the submission on a line; a Drop if there is none."""
    value = parse_object(line)
    if value is None:
        return Drop("bad_line")
    number = id_of(value.get("id"))
    if number is None or not isinstance(value.get("title"), str):
        return Drop("bad_row")
    own = value.get("selftext")
    own = unescape(own) if isinstance(own, str) else ""
    path = value.get("permalink")
    if not isinstance(path, str) or not path.startswith("/"):
        path = f"/r/{value.get('subreddit')}/comments/{value['id']}/"
    if len(path) > MAX_URL_CHARS:
        path = f"/comments/{value['id']}/"
    created = value.get("created_utc")
    if isinstance(created, str) and re.fullmatch("[0-9]{1,12}", created):
        created = int(created)
    row = new_row("row", encodable(SITE + path), date_of(created))
    title = unescape(value["title"]).strip()
    set_title(row, title)
    if not own or own.isspace():
        text = title
    else:
        text = f"{title}\n\n{own}" if title else own
    text = encodable(text)
    row["page_bytes"] = len(text) if text.isascii() else len(text.encode())
    return Submission(number, row, value, text, rules.drop(value, own))


def _finish(found: Submission, database: sqlite3.Connection | None, config: SourceConfig) -> Drop | None:
    """Set text and metadata of a submission's row, with its comments. Return a Drop if it is no document."""
    row, value, size = found.row, found.value, found.row["page_bytes"]
    comments: list[tuple[int, str]] = []
    too_large = None
    if found.drop is None and database is not None:
        comments, too_large = _thread(database, found.number, size, config)
    if config.meta_fields is None:
        value = {name: value[name] for name in META if name in value}
        if value.get("over_18") is False:
            del value["over_18"]
        if comments:
            value |= {"comments": len(comments), "comment_ids": [base_36(number) for number, _ in comments]}
    row["meta"], row["_meta"] = meta_of(value, set(), config)
    drop = found.drop or too_large
    if drop is None:
        text = "\n\n".join([found.text, *(text for _, text in comments)]) if comments else found.text
        drop = set_text(row, text, config)
        row["page_bytes"] = size  # Of the submission alone, so that it can be compared when it is read again.
    return drop


# Comments


class _Comments:
    """An open file of comments. Reading it counts as progress of the file of submissions.

    Otherwise the limit of CPU time on the reading of a record would end the reader of a large file of comments.
    """

    def __init__(self, file: Any, stream: ByteStream):
        """`stream`: the file of submissions; its `on_read` is called if it has one."""
        self._file, self._stream = file, stream

    def read(self, size: int = -1, /) -> bytes:
        """Return at most `size` bytes, or all bytes up to the end if `size` is negative."""
        data: bytes = self._file.read(size) if size >= 0 else self._file.read()
        on_read = getattr(self._stream, "on_read", None)
        if data and on_read is not None:
            on_read()
        return data

    def seek(self, offset: int, whence: int = 0, /) -> int:
        """Move to another position and return it."""
        return int(self._file.seek(offset, whence))

    def tell(self) -> int:
        """Return the position of the next byte to read."""
        return int(self._file.tell())


def _collect(database: sqlite3.Connection, split: Split, stream: ByteStream, config: SourceConfig) -> list[Drop]:
    """Store the comments on the submissions of a file that are kept; return what cannot be read of their files."""
    rules, max_bytes = SubmissionRules(config), config.max_record_bytes
    database.execute("CREATE TABLE post (id INTEGER PRIMARY KEY) WITHOUT ROWID")
    database.execute("CREATE TABLE comment (post INTEGER, id INTEGER, parent INTEGER, score INTEGER, body TEXT)")
    for _, line in LineReader(FrameReader(stream, None), max_bytes):
        if not isinstance(line, Drop) and line.strip():
            found = parse_submission(line.removeprefix(BOM), rules)
            if isinstance(found, Submission) and found.drop is None:
                database.execute("INSERT OR IGNORE INTO post VALUES (?)", (found.number,))
    faults: list[Drop] = []
    batch = RowBatch(database, "INSERT INTO comment VALUES (?, ?, ?, ?, ?)")
    for uri in split.companions:
        fs, path = resolve_uri(uri)
        with closing(fs.open_input_file(path)) as file:
            for _, line in LineReader(FrameReader(_Comments(file, stream), None), max_bytes):
                if isinstance(line, Drop):
                    faults.append(line)
                elif (comment := _comment(line, database, rules)) is not None:
                    batch.add(comment, len(comment[-1]))
            batch.flush()
    database.execute("CREATE INDEX by_post ON comment (post, score DESC, id, parent)")
    return faults


def _comment(
    line: bytes, database: sqlite3.Connection, rules: SubmissionRules
) -> tuple[int, int, int, int, str] | None:
    """Return (submission, id, parent, score, text) of a comment to store; the parent 0 is the submission."""
    link = LINK_ID.search(line)
    if link is None or not database.execute("SELECT 1 FROM post WHERE id = ?", (int(link[1], 36),)).fetchone():
        return None
    value = parse_object(line)
    if value is None or not isinstance(body := value.get("body"), str) or is_deleted(body):
        return None
    number, parent, score = id_of(value.get("id")), str(value.get("parent_id")), score_of(value)
    above = id_of(parent[3:]) if parent.startswith("t1_") else 0
    least = rules.settings.min_comment_score
    if number is None or above is None or not body.strip() or (least is not None and score < least):
        return None
    if str(value.get("author")).lower() in rules.bots:
        return None
    return int(link[1], 36), number, above, score, encodable(unescape(body)).strip()


def _thread(
    database: sqlite3.Connection, post: int, size: int, config: SourceConfig
) -> tuple[list[tuple[int, str]], Drop | None]:
    """Return (id, text) of the comments on a submission in the order of the document.

    A Drop is returned if the document, which has `size` bytes without them, becomes too large.
    """
    settings = config.reddit
    replies: dict[int, list[tuple[int, int]]] = {}
    query = "SELECT id, parent, rowid FROM comment WHERE post = ? ORDER BY score DESC, id, rowid LIMIT ?"
    known: set[int] = set()
    for number, parent, place in database.execute(query, (post, MAX_THREAD)):
        if number not in known:  # The same comment can be in two files.
            known.add(number)
            replies.setdefault(parent, []).append((number, place))
    comments: list[tuple[int, str]] = []
    stack = [(entry, 1) for entry in reversed(replies.pop(0, []))]
    while stack and (settings.max_comments is None or len(comments) < settings.max_comments):
        (number, place), depth = stack.pop()
        (text,) = database.execute("SELECT body FROM comment WHERE rowid = ?", (place,)).fetchone()
        size += len(text.encode()) + 2
        if size > config.max_page_bytes:
            return [], Drop("page_too_large", float(size), float(config.max_page_bytes))
        comments.append((number, text))
        if depth < settings.max_comment_depth:
            # Removed from the table, so that comments that name each other as parents end.
            stack += [(entry, depth + 1) for entry in reversed(replies.pop(number, []))]
    return comments, None


# Fields


def id_of(value: Any) -> int | None:
    """Return the number of an id in base 36; None if it is none."""
    return int(value, 36) if isinstance(value, str) and ID.fullmatch(value) else None


def base_36(number: int) -> str:
    """Return a number as an id."""
    digits = "0123456789abcdefghijklmnopqrstuvwxyz"
    text = ""
    while number or not text:
        number, digit = divmod(number, 36)
        text = digits[digit] + text
    return text


def score_of(value: dict[str, Any]) -> int:
    """Return the score of a submission or comment; 0 if it has none."""
    score = value.get("score")
    if type(score) is int:
        return max(-(1 << 62), min(score, 1 << 62))
    return int(max(-(1 << 62), min(score, 1 << 62))) if isinstance(score, int | float) and score == score else 0


def is_deleted(text: str) -> bool:
    """Return True if Reddit has replaced a text by a note that it was deleted or removed."""
    return len(text) < 32 and text.strip().lower() in DELETED


def unescape(text: str) -> str:
    """Return a text with the characters that Reddit escapes, and its entities of spaces as spaces."""
    if "&" in text:
        for entity, character in (*ENTITIES, *SPACES):
            text = text.replace(entity, character)
    return text
