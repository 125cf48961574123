"""Settings of link evidence."""

from pydantic import model_validator

from schemas.config import Section, location


class LinksConfig(Section):
    """The section `[links]` of a recipe: which links to the documents count as evidence. Without tables, none do.

    A link from a page of the document's own domain never counts.
    """

    tables: tuple[str, ...] = location(())
    """Paths of Parquet files that `penstock links` wrote."""
    min_score: int | None = None
    """Least score of a submission whose link counts [votes]; links that have no score count too. None: no limit. 3 is
    that of WebText (Radford et al. 2019, 2.1)."""
    nofollow: bool = False
    """True if links also count that their page marks with `rel` as nofollow, ugc or sponsored."""

    @model_validator(mode="after")
    def _used(self) -> "LinksConfig":
        ignored = sorted(self.model_fields_set - {"tables"}) if not self.tables else []
        if ignored:
            raise ValueError(
                f"{', '.join(ignored)}: expected links.tables to be set, got none. Set links.tables, or remove "
                f"{', '.join(f'links.{name}' for name in ignored)}."
            )
        return self
