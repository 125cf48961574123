"""Text that needs no extraction: conversion records, JSON lines and Parquet rows."""

from pipeline.engine.stage import Drop, Row
from pipeline.sources.config import SourceConfig


def encodable(text: str) -> str:
    """The text as UTF-8 can hold it: lone surrogates become U+FFFD, and so does NUL, as it does in HTML."""
    if "\0" in text:
        text = text.replace("\0", "\ufffd")
    if text.isascii():
        return text
    try:
        text.encode()
    except UnicodeEncodeError:
        # Through UTF-16, so that the two halves of a pair that were escaped one by one are joined.
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def set_text(row: Row, text: str, config: SourceConfig) -> Drop | None:
    """Set the row's text and its size [bytes of UTF-8], or return why it cannot be used."""
    text = encodable(text)
    size = len(text.encode())
    row["page_bytes"] = size
    if size > config.max_page_bytes:
        return Drop("page_too_large", float(size), float(config.max_page_bytes))
    if not text or text.isspace():
        return Drop("empty_page")
    row["text"] = text
    return None
