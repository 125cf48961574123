"""The kind of the settings that only one format uses, such as `[source.csv]`."""

from schemas.config import Section


class FormatConfig(Section):
    """The settings of one format, such as `[source.csv]`; only files of this format use them."""
