"""Totals of keys over all parts: their number of occurrences, and the first of their documents in keep order.

A part sends one row for each of its keys, so the cost of the most frequent key grows with the number of parts and not
with its occurrences.
"""

import pyarrow as pa
from pyspark.sql import DataFrame, Window
from pyspark.sql import functions as F

TALLIES = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("part", pa.int32()),
        pa.field("count", pa.int64()),
        pa.field("first", pa.binary()),
    ]
)
TALLIES_DDL = "key binary, part int, count long, first binary"


def totals(tallies: DataFrame) -> DataFrame:
    """Return (key, part, count, first, total, best): every tally with its key's sum of counts and smallest `first`.

    `tallies` has the columns of TALLIES: `part` is the number of the part that counted, `first` sorts as bytes.
    """
    same_key = Window.partitionBy("key")
    return tallies.withColumns({"total": F.sum("count").over(same_key), "best": F.min("first").over(same_key)})
