"""The digests of every table and of the token dataset of a demo run, frozen: a change of the code's form keeps them.

`python -m tests.rules.test_frozen_digests RUN CRAWL` prints the file anew, for a change that is meant to change bytes.
"""

import hashlib
import json
import sys
from pathlib import Path

import pytest

from schemas.manifest import open_table, read_run
from schemas.storage import Store

FROZEN = Path(__file__).with_name("frozen_digests.json")


def digests_of(run: Store, crawl: Path) -> dict[str, dict[str, str]]:
    """SHA-256 of the crawl's files, and the digest of every table of the run."""
    files = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in sorted(crawl.glob("*.warc.gz"))}
    return {"crawl": files, "tables": {name: open_table(run, name)[1].digest for name in sorted(read_run(run).tables)}}


@pytest.mark.spark
def test_no_byte_of_any_table_has_changed(finished: Store, crawl: Path) -> None:
    frozen, now = json.loads(FROZEN.read_text()), digests_of(finished, crawl)
    if now["crawl"] != frozen["crawl"]:
        pytest.skip("the demo crawl is made of the documentation of other package versions than the frozen digests")
    assert now["tables"] == frozen["tables"]


if __name__ == "__main__":
    print(json.dumps(digests_of(Store(sys.argv[1]), Path(sys.argv[2])), indent=1))
