"""The columns of the index of Common Crawl, `cc-index/table/cc-main`, on which `source.where` may set conditions.

Older crawls lack some of them, such as `content_languages` before CC-MAIN-2018-34.
Source: https://github.com/commoncrawl/cc-index-table, cc-index-schema-flat.json.
"""

import pyarrow as pa

ARCHIVE, OFFSET, LENGTH = "warc_filename", "warc_record_offset", "warc_record_length"
"""Where a record is: path of its archive in the bucket, offset in it and length there [bytes]."""
_TEXTS = (
    "url_surtkey",
    "url",
    "url_host_name",
    "url_host_tld",
    "url_host_2nd_last_part",
    "url_host_3rd_last_part",
    "url_host_4th_last_part",
    "url_host_5th_last_part",
    "url_host_registry_suffix",
    "url_host_registered_domain",
    "url_host_private_suffix",
    "url_host_private_domain",
    "url_host_name_reversed",
    "url_protocol",
    "url_path",
    "url_query",
    "fetch_redirect",
    "content_digest",
    "content_mime_type",
    "content_mime_detected",
    "content_charset",
    "content_languages",
    "content_truncated",
    ARCHIVE,
    "warc_segment",
)
INDEX_SCHEMA = pa.schema(
    [
        *((name, pa.string()) for name in _TEXTS),
        ("url_port", pa.int32()),
        ("fetch_time", pa.timestamp("ms")),
        ("fetch_status", pa.int16()),
        (OFFSET, pa.int32()),
        (LENGTH, pa.int32()),
    ]
)
