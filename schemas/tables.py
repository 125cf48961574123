"""The tables of a run: `TABLES` and their Arrow schemas, whose fields carry meaning and unit as metadata.

A null value was not measured, because the document was dropped before; it never means zero. A column that holds a value
for each of several names is a list of entries (name, value), sorted by name: see `schemas/entries.py`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import pyarrow as pa

from schemas.entries import entries_of
from schemas.signals import LINE_SIGNALS, SIGNALS


def with_hex_ids(table: pa.Table) -> pa.Table:
    """Return the table with hexadecimal texts in place of its columns of bytes, such as ids and digests."""
    for number, column in enumerate(table.schema):
        if pa.types.is_fixed_size_binary(column.type) or pa.types.is_binary(column.type):
            values = [None if value is None else value.hex() for value in table.column(number).to_pylist()]
            texts = pa.field(column.name, pa.string(), metadata=column.metadata)
            table = table.set_column(number, texts, pa.array(values, pa.string()))
    return table


def field(name: str, kind: pa.DataType, meaning: str, unit: str = "") -> pa.Field:
    """Return an Arrow field that carries its meaning and unit as metadata."""
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
    field("date", pa.timestamp("ms", tz="UTC"), "capture date (WARC-Date), or the value of source.date_field"),
    field("snapshot", pa.string(), "crawl it belongs to, by the recipe or the name of its split; null: unnamed"),
]

LICENCE = field("licence", pa.string(), "licence of the document, as source.licence_field states it; null: unknown")
META = field(
    "meta",
    pa.string(),
    "other fields of a JSON line or Parquet row, as a JSON object; null: none. RAW in `documents`: may hold personal "
    "data; replaced in `clean`",
)
PARENTS = field(
    "parents",
    pa.list_(pa.string()),
    "documents that the text was made from, by id (hexadecimal) or URL, as `source.parents_field` names them; "
    "of a question of Stack Exchange, its answers; null: none",
)
META_PREFIX = "meta."
"""Prefix of the names of fields in the column `meta` where a condition names them, such as `meta.score`."""
META_FIELDS, META_NUMBERS, META_CUT = "meta_fields", "meta_numbers", "meta_cut"
"""Figures of `documents`: rows by field of `meta`, rows in which the field is a number, and rows whose fields were not
all stored by cause."""

DERIVED = "derived"
"""Figure of `documents`: kept rows with parents, by source that has `parents_field`."""

VERDICT = [
    field("drop_stage", pa.string(), "stage that dropped the row; null when it was kept"),
    field("drop_rule", pa.string(), "rule that dropped it, one of the stage's declared reasons"),
    field("drop_value", pa.float64(), "measured value the rule looked at, where it has one"),
    field("drop_limit", pa.float64(), "limit the value was compared with"),
]
VERDICT_COLUMNS = tuple(column.name for column in VERDICT)
DROPPED_BEFORE = "dropped_before"
"""The rule in the row of a document that an earlier step dropped; the drop is counted in that step."""

DOCUMENTS = pa.schema(
    [
        *PROVENANCE,
        field(
            "record_type", pa.string(), "WARC record type, `row` for JSONL and Parquet, `gap` for bytes of no record"
        ),
        LICENCE,
        META,
        PARENTS,
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
        field("toxic_words", pa.int32(), "occurrences of words on the language's list, of toxicity.measures", "words"),
        field("toxic_word_share", pa.float32(), "share of words that are in these occurrences", "0..1"),
        field("toxic_word_counts", entries_of(pa.int32()), "occurrences of listed words by what they measure", "words"),
        field("toxicity_score", pa.float32(), "probability of the toxic label by a fastText model", "0..1"),
        field("toxic_sentences", pa.int32(), "sentences that the classifier takes for toxic or hateful", "sentences"),
        field("toxic_share", pa.float32(), "share of the text in sentences taken for toxic", "0..1"),
        field("hateful_share", pa.float32(), "share of the text in sentences taken for hateful", "0..1"),
        field("toxic_cut_share", pa.float32(), "share of the text that was cut as toxic sentences", "0..1"),
        field("toxicity_by", pa.string(), "what measured toxicity: words, model, words and model, or none"),
        field(
            "groups", pa.list_(pa.string()), "its groups in the bias audit, such as dialect/scots; null: not measured"
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
"""One row for every record, kept or dropped, and one for every gap; sorted by (split, offset, part)."""

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

COMPARISONS = pa.schema(
    [
        DOC_ID,
        field("language", pa.string(), "most probable language of the first text; null where it was not measured"),
        field("first", pa.string(), "extractor of the recipe"),
        field("second", pa.string(), "extractor that it is compared with"),
        field("word_f1", pa.float32(), "F1 of the words of the two texts, as multisets; 1 if both are empty", "0..1"),
        field("first_chars", pa.int64(), "length of the text by the first", "code points"),
        field("second_chars", pa.int64(), "length of the text by the second", "code points"),
        field("first_rule", pa.string(), "stage/rule that the text by the first fails; null: it passes"),
        field("second_rule", pa.string(), "stage/rule that the text by the second fails; null: it passes"),
        field("first_text", pa.string(), "text by the first, RAW, at most 100,000 characters of it"),
        field("second_text", pa.string(), "text by the second, RAW, at most 100,000 characters of it"),
    ],
    metadata={"privacy": "raw text, not redacted"},
)
"""The texts of a sample of the pages by two extractors, in the order of `documents`."""

MEASURED_AGAIN = (
    *("num_chars", "body_chars", "num_bytes"),
    *(s.name for s in SIGNALS),
    *("toxic_words", "toxic_word_share", "toxic_word_counts", "toxicity_score"),
    *("toxic_sentences", "toxic_share", "hateful_share", "toxic_cut_share", "toxicity_by"),
    *("contamination", "contaminated_share", "contaminated_pieces", "canaries"),
    *("raw_digest", "text_digest", "signature", "anchor"),
)
"""Columns of `documents` that the step `templates` measures again."""


def _spans(*more: pa.Field) -> pa.ListType:
    """Return the type of a column of spans [start, end) with further values of each."""
    ends = [pa.field("start", pa.int32()), pa.field("end", pa.int32())]
    return pa.list_(pa.field("element", pa.struct([*ends, *more])))


def _without_templates(own: pa.Field) -> pa.Field:
    """Return the column with the value of a document without its templates."""
    metadata = {key.decode(): value.decode() for key, value in (own.metadata or {}).items()}
    meaning = f"without the templates: {metadata.get('meaning', '')}; null where nothing was cut"
    return field(own.name, own.type, meaning, metadata.get("unit", ""))


TEMPLATES = pa.schema(
    [
        DOC_ID,
        field("host_pages", pa.int64(), "pages of the document's host; null for a host with few pages", "pages"),
        field(
            "blocks",
            _spans(pa.field("pages", pa.int64())),
            "spans [start, end) of the text with lines that many pages of the host have, and the number of these pages",
            "code points",
        ),
        field(
            "cuts",
            _spans(pa.field("reason", pa.string())),
            "spans [start, end) of the text that were cut as templates of the host, sorted, disjoint",
            "code points",
        ),
        field("template_chars", pa.int64(), "length of these cuts", "code points"),
        field(
            "remainder_drop",
            pa.string(),
            "`stage/reason` with which a stage dropped the text without the templates; nothing was cut then",
        ),
        field(
            "text_cuts",
            _spans(),
            "spans [start, end) of the text that were cut as templates, or then by line rules, sorted, disjoint; null "
            "where nothing was cut",
            "code points",
        ),
        *(_without_templates(DOCUMENTS.field(name)) for name in MEASURED_AGAIN),
        *(_without_templates(own) for own in TEXT if own.name == "lines" or own.name in {s.name for s in LINE_SIGNALS}),
    ]
)
"""Templates of hosts: one row for every measured document. A row with cuts has the values of `documents` and `text`
measured again on the text without the templates; later steps read them in place of the first ones."""
TEMPLATE_COLUMNS = frozenset(("host_pages", "blocks", "template_chars", "remainder_drop"))
"""Columns that only `templates` has."""
REPLACED: Mapping[str, Mapping[str, str]] = {"text": {"cuts": "text_cuts"}}
"""Column of a table → the column of `templates` that replaces it, where their names differ."""

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
"""Scores of models on the text after cuts: one row for every document that the documents step processed."""

VERDICTS = pa.schema(
    [
        DOC_ID,
        field("perplexity_bucket", pa.string(), "head, middle or tail of its language; `all` without a model"),
        field("marked_by", pa.list_(pa.string()), "`stage/reason` of each limit that only marks; null: none"),
        *VERDICT,
    ]
)
"""Verdicts by the thresholds: one row for every document that the documents step processed."""

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
"""Clusters of copies, independent of verdicts: one row for every measured document."""

DEDUP = pa.schema(
    [
        DOC_ID,
        field("cluster", pa.binary(16), "as in `clusters`"),
        field(
            "cluster_size", pa.int64(), "number of documents in the cluster, earlier snapshots included", "documents"
        ),
        field("survivor", pa.binary(16), "the copy of the cluster that stays; null when every copy was dropped before"),
        field("similarity", pa.float32(), "as in `clusters`", "0..1"),
        field("weight", pa.int32(), "how often an epoch of training reads the document", "copies"),
        *VERDICT,
    ]
)
"""Survivors of the clusters: one row for every measured document, in the parts of `documents`."""

AUDIT = pa.schema(
    [
        field(
            "sample",
            pa.string(),
            "joined: a document and the one it was joined with; removed: a copy and the document kept in its place; "
            "uniform: drawn alike; anchored: of one anchor; alarm: copies of a source or a domain that lost many",
        ),
        field("a", pa.binary(16), "doc_id of one document"),
        field("b", pa.binary(16), "doc_id of the other, the larger"),
        field("jaccard", pa.float32(), "true Jaccard similarity of their shingles", "0..1"),
        field("estimate", pa.float32(), "what their signatures say: share of equal values or bits", "0..1"),
        field("candidate", pa.bool_(), "whether they share a key, so that deduplication could compare them"),
        field("same_cluster", pa.bool_(), "whether they ended in one cluster"),
        field("weight", pa.float32(), "pairs of the run that it stands for, up to a factor", "pairs"),
        field("a_source", pa.string(), "source of `a`; this and the next two: only in runs with several sources"),
        field("b_source", pa.string(), "source of `b`"),
        field("a_first", pa.bool_(), "whether `a` precedes `b` in keep order, so that `b` is removed of the two"),
    ]
)
"""The pairs that the audit of deduplication examined, sorted by sample and documents. The samples `uniform` and
`anchored` have at most 50,000 pairs each, with a similarity of at least 0.2."""

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
"""Cuts of repeated text, and the verdict on the remaining text: one row for every measured document."""

PARAGRAPHS = pa.schema(
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
            "spans [start, end) of the text with paragraphs that are out of range, sorted, disjoint, with the cause; "
            "null for a document that was dropped before",
            "code points",
        ),
        field("body_chars", pa.int64(), "length of the text without these cuts and those of line rules", "code points"),
    ]
)
"""Cuts of paragraphs by their perplexity and length: one row for every measured document."""

CLEAN = pa.schema(
    [
        *PROVENANCE,
        LICENCE,
        META,
        field("language", pa.string(), "most probable language"),
        field("cluster", pa.binary(16), "duplicate cluster, decides between train and held-out"),
        field("cluster_size", pa.int64(), "number of copies found", "documents"),
        field("weight", pa.int32(), "how often an epoch of training reads the document", "copies"),
        field("title", pa.string(), "title, personal data replaced"),
        field("text", pa.string(), "text after cuts, personal data replaced; null when dropped"),
        field("num_chars", pa.int64(), "length of this text", "code points"),
        field("num_bytes", pa.int64(), "length of this text", "bytes of UTF-8"),
        field("pii_counts", entries_of(pa.int32()), "replaced values by type", "occurrences"),
        field(
            "planted",
            pa.int32(),
            "copies of a planted identifier in the text, which no source has; the column is absent if plant.share is 0",
            "lines",
        ),
        *VERDICT,
    ]
)
"""One row for every survivor of deduplication. Source, split, offset and length locate its record; URL, title, licence
and meta are redacted."""
NOT_PLANTED = CLEAN.remove(CLEAN.get_field_index("planted"))
"""The columns of `clean` in a run whose recipe plants no identifiers."""

PERSONAL_DATA = pa.schema(
    [
        DOC_ID,
        field("column", pa.string(), "column of `clean` that has the replacement: text, title, url, licence or meta"),
        field("type", pa.string(), "type of the personal data, such as email"),
        field("start", pa.int32(), "start of the replacement in that column; null in `meta`", "code points"),
        field("end", pa.int32(), "end of the replacement in that column; null in `meta`", "code points"),
        field("language", pa.string(), "most probable language of the document; null: unknown"),
    ]
)
"""One row for every replacement of personal data in a kept document, in the order of `clean`. The table has no value,
no hash of a value and no length of one: offsets are those in the text after the replacement."""

Rows = Literal["record", "document", "survivor", "pair", "key", "other"]


@dataclass(frozen=True)
class Table:
    """A table of a run: what its rows and columns mean, and how a takedown removes documents from the table."""

    name: str
    meaning: str
    """What the table contains, in a few words."""
    rows: Rows
    """What a row describes. A row for a record (or gap), a measured document, or a survivor of deduplication is in the
    part of the same number as in `documents`. Other rows describe a pair of documents, a key, or something else."""
    schema: pa.Schema | None = None
    """The columns of the table's parts; None = the table has files of several kinds, or none that are Parquet."""
    ids: tuple[str, ...] = ("doc_id",)
    """Columns that name documents: a takedown removes the rows that name a removed document."""
    blank_keeps: tuple[str, ...] = ()
    """Columns that keep their values when a takedown blanks the row of a document; empty = the row is removed."""
    searchable: tuple[str, ...] = ()
    """Columns of a document that conditions of `penstock show` may name; `penstock trace` prints them as signals."""
    measured_again: bool = False
    """True if the table holds new values of columns that `documents` also has; `penstock show` then prints both."""

    @property
    def describes_documents(self) -> bool:
        """True if a row of the table describes one document or record."""
        return self.rows in ("record", "document", "survivor")

    @property
    def has_verdicts(self) -> bool:
        """True if the table has the columns of a verdict, VERDICT_COLUMNS."""
        return self.schema is not None and {*VERDICT_COLUMNS} <= {*self.schema.names}


TABLES: Mapping[str, Table] = {
    table.name: table
    for table in (
        Table(
            name="documents",
            meaning="Every record and gap of the inputs with its provenance, signals and first verdict",
            rows="record",
            schema=DOCUMENTS,
            blank_keeps=("doc_id", "source", "split", "offset", "length", "record_type", "snapshot"),
            searchable=tuple(name for name in DOCUMENTS.names if name != "signature"),
        ),
        Table("text", "The extracted text of every record, raw", "record", TEXT, blank_keeps=("doc_id",)),
        Table("comparisons", "The texts of a sample of the pages by two extractors, raw", "other", COMPARISONS),
        Table(
            name="templates",
            meaning="Lines that many pages of a host have, their cuts, and what is measured without them",
            rows="document",
            schema=TEMPLATES,
            searchable=("host_pages", "template_chars", "remainder_drop"),
            measured_again=True,
        ),
        Table(
            name="scores",
            meaning="Scores of models on the text of every measured document",
            rows="document",
            schema=SCORES,
            searchable=tuple(
                name for name in SCORES.names if name not in ("doc_id", "paragraphs", "paragraph_perplexity")
            ),
        ),
        Table(
            name="verdicts",
            meaning="The verdict on every measured document by the thresholds",
            rows="document",
            schema=VERDICTS,
            searchable=("perplexity_bucket",),
        ),
        Table("clusters", "The cluster of copies of every measured document", "document", CLUSTERS),
        Table("index", "Buckets and leaders by which later snapshots find copies", "key", ids=("order", "doc_id")),
        Table("dedup", "The survivor of every cluster, and the verdict on its copies", "document", DEDUP),
        Table("representatives", "Survivors of clusters and URLs for later snapshots", "key", ids=()),
        Table("audit", "Pairs of documents that the audit of deduplication compared", "pair", AUDIT, ids=("a", "b")),
        Table(
            name="paragraphs",
            meaning="Cuts of paragraphs by their perplexity and length",
            rows="document",
            schema=PARAGRAPHS,
            measured_again=True,
        ),
        Table(
            name="repeats",
            meaning="Cuts of repeated text, and the verdict on the remaining text",
            rows="document",
            schema=REPEATS,
            measured_again=True,
        ),
        Table(
            name="clean",
            meaning="The text of every survivor, personal data replaced",
            rows="survivor",
            schema=CLEAN,
            searchable=("planted",),
        ),
        Table("personal_data", "The type and place of every replacement, without values", "other", PERSONAL_DATA),
        Table("tokenizer", "Model file and contract of the tokenizer", "other", ids=()),
        Table(
            name="tokens",
            meaning="Token shards (Arrow IPC) with the document that every token belongs to",
            rows="other",
            ids=(),
        ),
    )
}
"""Every table of a run by name, each after the tables that it is made from."""

LATER_VERDICTS = tuple(name for name, table in TABLES.items() if table.has_verdicts and name != "documents")
"""Tables after `documents` whose verdicts decide which documents are kept, in the order in which they are applied."""
