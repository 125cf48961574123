"""The archive of Spark's classes, with which the JVM of a local run starts in less time: class data sharing of Java.

`python -m jobs.class_archive` runs a small demo crawl, and the JVM writes the classes that it has loaded to a file of
about 170 MB in `~/.cache/penstock/java`. `make setup` calls it. A JVM that the file does not fit, such as one of
another version, does not use it; so does one with a folder of settings (SPARK_CONF_DIR) on its class path.
"""

import os
import sys
import tempfile
from pathlib import Path

from jobs.run_all import run_recipe
from jobs.spark_session import WRITES_ARCHIVE, archive_file
from pipeline.demo_crawl.build import build_demo_crawl
from schemas.errors import ConfigError

MAGIC = 0xF00BABA8
"""First four bytes of an archive that is added to that of Java itself."""
PAGES = 100


def write_archive() -> Path:
    """Write the archive of this Java and Spark, and return its path. An older one is replaced.

    Raises ConfigError if there is no Java, or if it writes no archive that it can use.
    """
    file = archive_file()
    if file is None:
        raise ConfigError("java: expected a Java of version 17 or 21, got none. Install one, or set JAVA_HOME.")
    file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    with tempfile.TemporaryDirectory(dir=file.parent, prefix="new-") as name:
        folder = Path(name)
        build_demo_crawl(folder / "crawl", pages=PAGES, seed=1)
        written = folder / file.name
        settings = f'spark.settings={{"spark.driver.extraJavaOptions" = "{WRITES_ARCHIVE}{written}"}}'
        paths = f'source.paths=["{folder}/crawl/*.warc.gz"]'
        run_recipe("demo", str(folder / "run"), [paths, "tokenizer.vocab_size=600", settings])
        if not is_archive(written):
            raise ConfigError("java: expected an archive of its classes, got none. Runs work without it.")
        os.replace(written, file)
    return file


def is_archive(file: Path) -> bool:
    """Return True if a file is a complete archive. A JVM writes its first bytes last."""
    try:
        with file.open("rb") as stream:
            return int.from_bytes(stream.read(4), sys.byteorder) == MAGIC
    except FileNotFoundError:
        return False


if __name__ == "__main__":
    try:
        print(f"written: {write_archive()}")
    except ConfigError as error:
        sys.exit(f"penstock: {error}")
