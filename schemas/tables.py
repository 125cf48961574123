"""The Arrow schemas of every table a run writes; each field says what it means and in which unit.

A column that is null was not measured (the document was dropped before), never "zero".
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from schemas.signals import LINE_SIGNALS, SIGNALS

# Columns that hold a value for each of some names: lists of entries (name, value), sorted by name.
#
# In memory such values are a mapping. Arrow's own map type says the same, but not every reader of Parquet knows it
# (Hugging Face `datasets` refuses such a table whole), and its order is left to the writer. DuckDB makes a map of
# such a column with `map_from_entries`.

NAME, VALUE = "name", "value"


class FlatEntries(NamedTuple):
    """All entries of a column one behind the other."""

    rows: npt.NDArray[np.int64]
    """(entries,) the row that each stands in."""
    names: pa.Array
    values: pa.Array


def entries_of(kind: pa.DataType) -> pa.ListType:
    """The type of a column with a value of this type for each name."""
    return pa.list_(pa.field("element", pa.struct([(NAME, pa.string()), (VALUE, kind)])))


def value_type(kind: pa.DataType) -> pa.DataType | None:
    """The type of the values if a column of this type holds entries; None if it does not."""
    if not pa.types.is_list(kind) or not pa.types.is_struct(kind.value_type):
        return None
    fields = list(kind.value_type)
    return fields[1].type if [field.name for field in fields] == [NAME, VALUE] else None


def to_entries(values: Mapping[str, Any] | None) -> list[tuple[str, Any]] | None:
    """A mapping as Arrow takes it for such a column: equal mappings give equal entries."""
    return None if values is None else sorted(values.items(), key=lambda entry: entry[0])


def to_mapping(entries: Iterable[Mapping[str, Any]] | None) -> dict[str, Any] | None:
    """Entries as they are read, as a mapping."""
    return None if entries is None else {entry[NAME]: entry[VALUE] for entry in entries}


def flatten_entries(column: pa.ListArray) -> FlatEntries:
    """The entries of a column, which may be a slice; rows that are null or empty have none."""
    lengths = pc.fill_null(pc.list_value_length(column), 0).to_numpy()
    entries = column.flatten()
    return FlatEntries(
        np.repeat(np.arange(len(column)), lengths), *(pc.struct_field(entries, name) for name in (NAME, VALUE))
    )


def lookup_entry(column: pa.ListArray, name: str) -> pa.Array:
    """(rows,) the value of the entry of this name; null where there is none."""
    flat = flatten_entries(column)
    found = pc.fill_null(pc.equal(flat.names, name), False).to_numpy(zero_copy_only=False)
    places = np.full(len(column), -1, np.int64)
    places[flat.rows[found]] = np.flatnonzero(found)
    return flat.values.take(pa.array(places, mask=places < 0))


def field(name: str, kind: pa.DataType, meaning: str, unit: str = "") -> pa.Field:
    """An Arrow field that carries its meaning and unit as metadata."""
    return pa.field(name, kind, metadata={"meaning": meaning} | ({"unit": unit} if unit else {}))


DOC_ID = field(
    "doc_id", pa.binary(16), "SHA-256 of (source, split name, offset or record number, part), first 16 bytes"
)

PROVENANCE = [
    DOC_ID,
    field("source", pa.string(), "source of the document as the recipe names it, such as web"),
    field("split", pa.string(), "input file, by its canonical name without location"),
    field(
        "offset",
        pa.int64(),
        "start of the record in the archive as stored; of a line in the decompressed file; or the row number",
        "bytes",
    ),
    field(
        "length", pa.int64(), "length in the same unit; in an archive records and gaps add up to the file size", "bytes"
    ),
    field("url", pa.string(), "target URI of the record"),
    field("domain", pa.string(), "registrable domain of the URL, by the bundled public suffix snapshot"),
    field("date", pa.timestamp("ms", tz="UTC"), "capture date (WARC-Date)"),
    field("snapshot", pa.string(), "crawl it belongs to, by the recipe or the name of its split; null: unnamed"),
]

VERDICT = [
    field("drop_stage", pa.string(), "stage that dropped the row; null when it was kept"),
    field("drop_rule", pa.string(), "rule that dropped it, one of the stage's declared reasons"),
    field("drop_value", pa.float64(), "measured value the rule looked at, where it has one"),
    field("drop_limit", pa.float64(), "limit the value was compared with"),
]

DOCUMENTS = pa.schema(
    [
        *PROVENANCE,
        field(
            "record_type", pa.string(), "WARC record type, `row` for JSONL and Parquet, `gap` for bytes of no record"
        ),
        field("http_status", pa.int16(), "HTTP status code"),
        field("mime", pa.string(), "media type as declared"),
        field("page_bytes", pa.int64(), "size of the page after HTTP decoding", "bytes"),
        field("charset", pa.string(), "encoding the page was decoded with, WHATWG name"),
        field("charset_from", pa.string(), "what named the encoding: bom, http, meta, utf-8, detector"),
        field("num_chars", pa.int64(), "length of the extracted text before cuts", "code points"),
        field("body_chars", pa.int64(), "length of the text after cuts", "code points"),
        field("num_bytes", pa.int64(), "length of the text after cuts", "bytes of UTF-8"),
        field("language", pa.string(), "most probable language, ISO 639 code as the model names it"),
        field("language_score", pa.float32(), "its probability", "0..1"),
        field(
            "language_share",
            pa.float32(),
            "excerpts of the text in this language over all that are sure",
            "0..1",
        ),
        field("second_language", pa.string(), "language of most other excerpts; null where the page is not mixed"),
        *(field(s.name, s.kind, s.meaning, s.unit) for s in SIGNALS),
        field("toxic_words", pa.int32(), "occurrences of words on the language's list", "words"),
        field("toxic_word_share", pa.float32(), "share of words that are on the list", "0..1"),
        field(
            "toxicity_score", pa.float32(), "probability of the toxic label by the classifier; null without one", "0..1"
        ),
        field("contamination", entries_of(pa.int32()), "n-grams shared with each evaluation set", "n-grams"),
        field(
            "contaminated_share",
            pa.float32(),
            "words in such n-grams over words, or characters over characters if that is more",
            "0..1",
        ),
        field(
            "contaminated_pieces",
            pa.int32(),
            "pieces that cutting such n-grams leaves of the text; null where nothing was cut",
            "pieces",
        ),
        field("canaries", pa.int32(), "occurrences of canary strings", "occurrences"),
        field("raw_digest", pa.binary(16), "first 16 bytes of SHA-256 of the text after cuts, as it is"),
        field("text_digest", pa.binary(16), "first 16 bytes of SHA-256 of the normalised text: equal means exact copy"),
        field(
            "signature",
            pa.binary(),
            "MinHash: little-endian uint32 per permutation, uint64 with the family datatrove; SimHash: 8 bytes",
        ),
        field("anchor", pa.int64(), "smallest shingle under a hash of its own; near copies mostly share it (audits)"),
        *VERDICT,
    ]
)
"""One row for every record that came in, kept or dropped, and one for every gap; sorted by (split, offset, part)."""

TEXT = pa.schema(
    [
        DOC_ID,
        field("title", pa.string(), "title of the page, raw"),
        field(
            "text",
            pa.string(),
            "extracted text, RAW: may hold personal data; null where there is none or it is withheld",
        ),
        field(
            "cuts",
            pa.list_(pa.field("element", pa.struct([("start", pa.int32()), ("end", pa.int32())]))),
            "spans [start, end) of the text that line rules cut, sorted, disjoint",
            "code points",
        ),
        field(
            "lines",
            pa.list_(pa.field("element", pa.struct([("start", pa.int32()), ("end", pa.int32())]))),
            "spans [start, end) of the lines that the line signals measure; null where they were not asked for",
            "code points",
        ),
        *(field(s.name, pa.list_(pa.float32()), f"of each line: {s.meaning}", s.unit) for s in LINE_SIGNALS),
    ],
    metadata={"privacy": "raw text, not redacted"},
)
"""The text of the same rows in the same order as `documents`."""

SCORES = pa.schema(
    [
        DOC_ID,
        field("perplexity", pa.float32(), "perplexity under the language's model, line ends counted", "per token"),
        field("perplexity_tokens", pa.int32(), "tokens it was taken over, line ends included", "tokens"),
        field(
            "paragraphs",
            pa.list_(pa.field("element", pa.struct([("start", pa.int32()), ("end", pa.int32())]))),
            "spans [start, end) of the paragraphs of the text after cuts that were scored",
            "code points",
        ),
        field("paragraph_perplexity", pa.list_(pa.float32()), "perplexity of each of them", "per token"),
        field("classifier_scores", entries_of(pa.float32()), "probability of the good class, by classifier"),
        field(
            "importance",
            entries_of(pa.float32()),
            "log of the likelihood under each target over that under its raw sample, per word",
            "nats per word",
        ),
        field("importance_words", pa.int32(), "words that it was taken over", "words"),
    ]
)
"""What models say of the text after cuts: one row for every document that ran through the documents pass."""

VERDICTS = pa.schema(
    [
        DOC_ID,
        field("perplexity_bucket", pa.string(), "head, middle or tail of its language; `all` without a model"),
        *VERDICT,
    ]
)
"""What the thresholds decide: one row for every document that ran through the documents pass."""

CLUSTERS = pa.schema(
    [
        DOC_ID,
        field(
            "cluster",
            pa.binary(16),
            "smallest doc_id of the documents joined with this one; its own if it stands alone",
        ),
        field(
            "similarity",
            pa.float32(),
            "highest estimated (or true) Jaccard similarity, or share of equal bits, to a document it was joined with",
            "0..1",
        ),
        field("leader", pa.binary(16), "the document it was joined with at that similarity; null if it joined none"),
    ]
)
"""Which documents are copies of each other, whatever their verdicts: one row for every measured document."""

DEDUP = pa.schema(
    [
        DOC_ID,
        field("cluster", pa.binary(16), "as in `clusters`"),
        field(
            "cluster_size", pa.int64(), "number of documents in the cluster, earlier snapshots included", "documents"
        ),
        field("survivor", pa.binary(16), "the copy of the cluster that stays; null when every copy was dropped before"),
        field("similarity", pa.float32(), "as in `clusters`", "0..1"),
        field("weight", pa.int32(), "how often the document may be repeated for the size of its cluster", "copies"),
        *VERDICT,
    ]
)
"""One row for every measured document, part by part as `documents`."""

AUDIT = pa.schema(
    [
        field(
            "sample",
            pa.string(),
            "joined: a document and the one it was joined with; cluster: and the first of its cluster; uniform: drawn "
            "alike; anchored: of one anchor",
        ),
        field("a", pa.binary(16), "doc_id of one document"),
        field("b", pa.binary(16), "doc_id of the other, the larger"),
        field("jaccard", pa.float32(), "true Jaccard similarity of their shingles", "0..1"),
        field("estimate", pa.float32(), "what their signatures say: share of equal values or bits", "0..1"),
        field("candidate", pa.bool_(), "whether they share a key, so that deduplication could compare them"),
        field("same_cluster", pa.bool_(), "whether they ended in one cluster"),
        field("weight", pa.float32(), "pairs of the run that it stands for, up to a factor", "pairs"),
    ]
)
"""The pairs that the audit of deduplication looked at, sorted by sample and documents; of `uniform` and `anchored` at
most 50,000 each, from a similarity of 0.2 on."""

REPEATS = pa.schema(
    [
        DOC_ID,
        field(
            "cuts",
            pa.list_(
                pa.field(
                    "element",
                    pa.struct([("start", pa.int32()), ("end", pa.int32()), ("reason", pa.string())]),
                )
            ),
            "spans [start, end) of the text that repeat what stands elsewhere, sorted, disjoint, with the kind of unit",
            "code points",
        ),
        field("body_chars", pa.int64(), "length of the text after all cuts", "code points"),
        field("num_bytes", pa.int64(), "length of the text after all cuts", "bytes of UTF-8"),
        *(field(s.name, s.kind, f"after the cuts: {s.meaning}; null where nothing was cut", s.unit) for s in SIGNALS),
        *VERDICT,
    ]
)
"""What is cut because it stands elsewhere, and whether the rest still passes: one row for every measured document."""

CLEAN = pa.schema(
    [
        *PROVENANCE,
        field("language", pa.string(), "most probable language"),
        field("cluster", pa.binary(16), "duplicate cluster, decides between train and held-out"),
        field("cluster_size", pa.int64(), "number of copies found", "documents"),
        field("weight", pa.int32(), "how often it may be repeated for the size of its cluster", "copies"),
        field("title", pa.string(), "title, personal data replaced"),
        field("text", pa.string(), "text after cuts, personal data replaced; null when dropped"),
        field("num_chars", pa.int64(), "length of this text", "code points"),
        field("num_bytes", pa.int64(), "length of this text", "bytes of UTF-8"),
        field("pii_counts", entries_of(pa.int32()), "replaced values by type", "occurrences"),
        *VERDICT,
    ]
)
"""One row for every survivor of deduplication; provenance keeps the record, url and title are redacted."""

TABLES = {
    "documents": DOCUMENTS,
    "text": TEXT,
    "scores": SCORES,
    "verdicts": VERDICTS,
    "clusters": CLUSTERS,
    "dedup": DEDUP,
    "audit": AUDIT,
    "repeats": REPEATS,
    "clean": CLEAN,
}
