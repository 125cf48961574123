"""Links that people found worth a vote: the pages that Reddit submissions with enough points link to, as a table.

Pages are counted on disk, so that dumps of any size need little memory. Source: Radford et al. 2019, "Language Models
are Unsupervised Multitask Learners", section 2.1 (WebText: submissions with at least 3 points).
"""

import sqlite3
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa

from pipeline.engine.stage import Drop
from pipeline.sources.compression import FrameReader
from pipeline.sources.config import SourceConfig
from pipeline.sources.lines import BOM, LineReader
from pipeline.sources.provenance import domain_of, encodable
from pipeline.sources.reddit import Submission, SubmissionRules, parse_submission, score_of
from pipeline.sources.splits import find_splits, open_stream
from pipeline.sources.temporary_rows import BATCH_ROWS, temporary_database
from schemas.urls import canonical_url, web_host

LINKS = pa.schema(
    [
        pa.field("url", pa.string(), False, {"meaning": "canonical form of the URL of a page"}),
        pa.field("domain", pa.string(), False, {"meaning": "registrable domain of the page"}),
        pa.field("links", pa.int64(), False, {"meaning": "number of submissions that link to the page"}),
        pa.field("score", pa.int64(), False, {"meaning": "points of these submissions together"}),
    ]
)
"""The table of links, sorted by URL."""
OWN_DOMAINS = frozenset(("reddit.com", "redd.it", "redditmedia.com", "redditstatic.com"))
GROUP_ROWS = 1 << 16
ADD = (
    "INSERT INTO link VALUES (?, ?, 1, ?) "
    "ON CONFLICT (url) DO UPDATE SET links = links + 1, score = score + excluded.score"
)


class LinkCounts:
    """The links of a set of dumps, and how many submissions have one."""

    def __init__(self, database: sqlite3.Connection):
        self._database = database
        database.execute(
            "CREATE TABLE link (url TEXT PRIMARY KEY, domain TEXT, links INTEGER, score INTEGER) WITHOUT ROWID"
        )
        self.submissions: Counter[str] = Counter()
        """Number of rows of the dumps: `linked`, or by the reason for which they do not count."""

    def read(self, paths: Sequence[str], min_score: int) -> None:
        """Add the links of the submissions with at least this score in these files, in any order.

        Raises ConfigError if a file cannot be found.
        """
        settings = {"min_score": min_score, "keep_title_only": True}
        config = SourceConfig.model_validate({"paths": list(paths), "format": "reddit", "reddit": settings})
        rules = SubmissionRules(config)
        for split in find_splits(config):
            batch: list[tuple[str, str, int]] = []
            with closing(open_stream(split)) as stream:
                for _, line in LineReader(FrameReader(stream, None), config.max_record_bytes):
                    if not isinstance(line, Drop) and not line.strip():
                        continue
                    found = line if isinstance(line, Drop) else link_of(line.removeprefix(BOM), rules)
                    self.submissions[found.rule if isinstance(found, Drop) else "linked"] += 1
                    if not isinstance(found, Drop):
                        batch.append(found)
                    if len(batch) == BATCH_ROWS:
                        self._database.executemany(ADD, batch)
                        batch = []
            self._database.executemany(ADD, batch)

    def batches(self) -> Iterator[pa.RecordBatch]:
        """Yield the table LINKS in batches."""
        rows = self._database.execute("SELECT url, domain, links, score FROM link ORDER BY url")
        while values := rows.fetchmany(GROUP_ROWS):
            columns: list[Any] = [list(column) for column in zip(*values, strict=True)]
            yield pa.record_batch(columns, schema=LINKS)


def link_of(line: bytes, rules: SubmissionRules) -> tuple[str, str, int] | Drop:
    """Return (canonical URL, domain, score) of the page that a submission links to, or why it does not count."""
    found = parse_submission(line, rules)
    if not isinstance(found, Submission):
        return found
    if found.drop is not None:
        return found.drop
    url = found.value.get("url")
    if not isinstance(url, str) or web_host(url) is None:
        return Drop("no_link")
    domain = domain_of(url)
    if domain is None or domain in OWN_DOMAINS:
        return Drop("no_link")
    return encodable(canonical_url(url)), domain, score_of(found.value)


def count_links(paths: Sequence[str], min_score: int, write: Any) -> Counter[str]:
    """Pass each batch of the table LINKS of these dumps to `write`; return the number of submissions by outcome."""
    with temporary_database() as database:
        counts = LinkCounts(database)
        counts.read(paths, min_score)
        for batch in counts.batches():
            write(batch)
        return counts.submissions
