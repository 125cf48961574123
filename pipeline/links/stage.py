"""The stage `links`: adds how many other pages and domains link to a document, and the highest score of such a link.

It drops no document: rules of a recipe use its columns, such as `when = "linked_from < 1"`.
"""

from collections.abc import Mapping

import pyarrow as pa

from pipeline.engine.stage import PerDocument, Row, RowFunction
from pipeline.links.config import LinksConfig
from pipeline.links.evidence import FILE, EvidenceIndex, build_evidence
from schemas.tables import field as column

OF_URL, OF_DOMAIN = ("linked_from", "link_score"), ("domain_linked_from", "domain_link_score")


def make_links(config: LinksConfig, models: Mapping[str, str]) -> RowFunction:
    """Open the index of evidence, and return the function that adds the columns to a row."""
    index = EvidenceIndex(models[FILE]) if config.tables else None

    def links(row: Row) -> None:
        url, domain = row["url"], row["domain"]
        row.update(dict.fromkeys((*OF_URL, *OF_DOMAIN)))
        if index is None:
            return
        if url is not None:
            row.update(zip(OF_URL, index.of_url(url)))
        if domain is not None:
            row.update(zip(OF_DOMAIN, index.of_domain(domain)))

    return links


def model_files(config: LinksConfig) -> dict[str, str]:
    """Return the paths of the tables of links."""
    return {f"table_{number}": path for number, path in enumerate(config.tables)}


LINKS = PerDocument(
    name="links",
    version=1,
    config=LinksConfig,
    reads=("url", "domain"),
    adds=(*OF_URL, *OF_DOMAIN),
    reasons={},
    make=make_links,
    models=model_files,
    compile=build_evidence,
    columns=(
        column("linked_from", pa.int32(), "pages of other domains, and submissions, that link to its URL", "pages"),
        column("link_score", pa.int32(), "highest score of a submission that links to its URL; null: none", "votes"),
        column("domain_linked_from", pa.int32(), "other domains that link to a page of its domain", "domains"),
        column("domain_link_score", pa.int32(), "highest score of a submission that links to its domain", "votes"),
    ),
)
"""The stage of link evidence."""
