"""A complete facts file for a run with the sources `web` and `books`, as a person would fill in the template."""

from collections.abc import Mapping

import pyarrow as pa

from schemas.spilled_sums import SCHEMA, SpilledSums


def rows_of(counts: Mapping[tuple[str, str], int]) -> pa.Table:
    """Return tokens by (source, value) as rows of sums."""
    rows = [{"source": source, "value": value, "tokens": tokens} for (source, value), tokens in counts.items()]
    return pa.Table.from_pylist(rows, SCHEMA)


def sums_of(counts: Mapping[tuple[str, str], int]) -> SpilledSums:
    """Return sums of tokens by (source, value)."""
    sums = SpilledSums()
    sums.add(rows_of(counts))
    return sums


COMPLETE = """
[document]
updated = 2026-11-20
previous = "not applicable"
location = "https://example.org/summary"
notices = "https://example.org/news"
[provider]
name = "Example Models Ltd"
contact = "summary@example.org"
[representative]
name = "not applicable"
contact = "not applicable"
[model]
names = ["Example 1.0"]
links = ["https://example.org/model"]
base_models = "not applicable"
base_summaries = "not applicable"
placed_on_market = "2026-11-25"
licence = "apache-2.0"
uses = "to continue text, not to give advice"
limits = "English only"
[content]
types = "web pages and books"
continuous_training = false
regions = "no region was preferred"
demography = "not known"
[licensed]
agreements = "no"
[private]
obtained = "no"
[crawler]
names = ["examplebot"]
purposes = "to collect pages for training"
captchas = "not solved"
passwords = "not entered"
paywalls = "not passed"
robots_txt = "obeyed"
protocols = "none"
regions = "world"
demography = "not known"
site_types = "news and manuals"
[user]
interactions = "no"
other_services = "no"
[synthetic]
created = "no"
[other]
used = "no"
[rights]
code_of_practice = "yes"
robots_txt = "the crawler reads it before each page"
datasets = "only books without reservations"
requests = "answered in a month"
[illegal]
measures = "list of sites"
[dataset]
name = "Example text"
licence = "CC-BY-4.0"
link = "https://example.org/data"
[ab2013]
owners = "their authors"
purpose = "language"
protected = "yes"
licensed = "no"
personal = "replaced"
aggregate = "no"
first_used = 2026-10-01
[sources.web]
kind = "crawled"
[sources.books]
kind = "public"
title = "Books"
link = "https://example.org/books"
version = "3"
selection = "all"
content = "novels"
"""
