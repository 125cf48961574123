"""A run on an object store: everything that works on a local folder, against a real S3 server on this machine."""

import os
import pickle
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from unittest import mock
from urllib.request import Request, urlopen

import pyarrow.fs as pafs
import pytest

from jobs.cli import main
from jobs.recipe import read_recipe
from jobs.run_all import open_reused
from jobs.verbs.browse import open_run_of
from pipeline import run as running
from pipeline.browse.document import document_json
from pipeline.browse.limits import limits_answer, open_limits
from pipeline.browse.rows import Position
from pipeline.browse.sample import SampleProgress
from pipeline.browse.search import make_query, search
from pipeline.demo_crawl.build import build_demo_crawl
from pipeline.prepare import prepare
from pipeline.run import run_steps
from pipeline.sources.config import SourceConfig
from pipeline.sources.splits import find_splits
from pipeline.takedown.commit import read_pending
from schemas.errors import ConfigError
from schemas.manifest import open_table, read_run, write_run
from schemas.paths import PLAN_NAME
from schemas.storage import Store, describe_remote_error
from schemas.takedown import REMOVED_ID
from schemas.tokens import open_dataset
from schemas.versions import open_run
from tests.support.browse_run import make_browse_run
from tests.support.paths import ROOT
from tests.support.s3_server import environment, server
from tests.support.tiny_dataset import make_tiny_dataset
from tests.support.tiny_takedown import documents_of, opened, take_down

__all__ = ["server"]  # a fixture

RECIPE = ROOT / "jobs" / "recipes" / "demo.toml"
SMALL = [
    'language.languages=["en"]',
    "audit.documents=0",
    "tokenizer.vocab_size=1200",
    "tokens.shard_tokens=20000",
    "tokens.chunk_tokens=512",
    "tokens.heldout_share=0.1",
]
NAMES = ("documents", "text", "verdicts", "clusters", "dedup", "clean", "tokenizer", "tokens")
ODD = ("a b", "a+b", "a=b", "a%20b", "100%", "ä/ö.json", "a#b", "a?b", "x:y", "pages.json.gz")


class Killed(BaseException):
    """The process ends here."""


@contextmanager
def elsewhere(port: int) -> Iterator[None]:
    """Another port as the endpoint."""
    with mock.patch.dict(os.environ, environment(port)):
        yield


@pytest.fixture
def silent_port() -> Iterator[int]:
    """A port at which nobody listens."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        yield held.getsockname()[1]


def upload(folder: Path, store: Store) -> None:
    """Copy a local folder to a store."""
    for path in folder.rglob("*"):
        if path.is_file():
            store.write_atomic(path.relative_to(folder).as_posix(), path.read_bytes())


# ----------------------------------------------------------------------------------------------------------- the store


def test_small_files_go_round_whatever_their_names(server: int) -> None:
    store = Store("s3://bucket/names")
    for number, name in enumerate(ODD):
        store.write_atomic(name, b"old")
        store.write_atomic(name, bytes([number]))
        assert (store.exists(name), store.size(name), store.read_bytes(name)) == (True, 1, bytes([number]))
    assert sorted(store.walk()) == sorted(ODD)
    with store.open_output("big.json.gz") as stream:
        stream.write(b"x" * (6 << 20))
    assert store.size("big.json.gz") == 6 << 20  # no name makes pyarrow compress
    for name in (*ODD, "big.json.gz", "missing"):
        store.delete(name)
    assert list(store.walk()) == []
    assert not store.exists("a b")


def test_a_write_that_fails_leaves_the_old_content(server: int) -> None:
    store = Store("s3://bucket/failed")
    store.write_atomic("run.json", b"{}")
    with pytest.raises(TypeError):
        store.write_atomic("run.json", "text")
    # Killed while the file is being opened, which for a large one is a request of its own
    opened_stream = store.fs.open_output_stream(store.path("other.json"))
    assert not store.exists("other.json")
    opened_stream.close()
    assert store.read_bytes("run.json") == b"{}"


@pytest.mark.parametrize(
    ("uri", "root"),
    [
        ("s3://bucket", "bucket"),
        ("s3://bucket/", "bucket"),
        ("s3://bucket/a b/", "bucket/a b"),
        ("s3://bucket/a%20b", "bucket/a b"),
        ("s3://bucket/ä", "bucket/ä"),
        ("s3://bucket/a+b=c", "bucket/a+b=c"),
        ("s3://bucket/a#b", "bucket/a#b"),
        ("s3://bucket/100%", "bucket/100%"),
        ("s3://bucket/[x]", "bucket/[x]"),
        ("s3://bucket/run?region=eu-west-1", "bucket/run"),
    ],
)
def test_places_as_people_write_them(server: int, uri: str, root: str) -> None:
    store = Store(uri)
    assert (store.root, store.is_local) == (root, False)
    child = store.child("x y%")
    assert child.root == f"{root}/x y%"
    for same in (Store(child.address), pickle.loads(pickle.dumps(child))):
        assert (same.root, same.uri, same.fs) == (child.root, child.uri, child.fs)
    assert child.child("../z").root == f"{root}/z"
    assert child.path("../../z") == os.path.normpath(f"{root}/../z")
    assert "?" not in child.uri


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("s3://", "expected a bucket after s3://, got none"),
        ("s3:///run", "expected a bucket after s3://, got none"),
        ("s3://key:secret@bucket/run", r"^s3://bucket/run: expected no secrets in a URI"),
        ("s3://bucket//run", "got // in it"),
        ("s3://bucket/a/../run", r"got /\.\./ in it"),
        ("s3://bucket/run?regoin=x", "s3://bucket/run: expected a URI .*'regoin'"),
        ("s3a://bucket/run", "s3a://bucket/run: expected a URI that pyarrow.fs can open .*Unrecognized"),
    ],
)
def test_places_that_are_none(server: int, uri: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        Store(uri)
    assert "secret@" not in str(caught.value)
    assert main(["report", uri]) == 2
    assert capsys.readouterr().err.startswith("penstock: ")


def test_sources_by_pattern_and_by_name(server: int) -> None:
    store = Store("s3://bucket/odd folder")
    store.write_atomic("ä b+c%=#.warc.gz", b"x")
    for path in ("s3://bucket/odd folder/*.warc.gz", "s3://bucket/odd%20folder/ä*.gz", f"{store.uri}/ä b+c%=#.warc.gz"):
        (split,) = find_splits(SourceConfig(paths=(path,)))
        assert (split.name, split.size) == ("ä b+c%=#.warc.gz", 1)
        assert Store(split.uri).root == "bucket/odd folder/ä b+c%=#.warc.gz"
    wrong = ("s3://none/x/*.gz", "s3://none/x.warc.gz", "s3://bucket/nothing/*", "s3://k:s@bucket/*", "s3:///x.warc")
    with pytest.raises(ConfigError, match="5 problem") as caught:
        find_splits(SourceConfig(paths=wrong))
    assert "NO_SUCH_BUCKET" in str(caught.value)


# ---------------------------------------------------------------------------------------------------- what goes wrong


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a verb says that is refused."""
    assert main(list(arguments)) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("penstock: "))
    return line


def test_a_missing_bucket_is_named_before_spark_starts(server: int, capsys: pytest.CaptureFixture[str]) -> None:
    recipe = ["run", str(RECIPE), "--out", "s3://none/run"]
    with mock.patch("jobs.run_all.spark_session", side_effect=AssertionError):
        assert "s3://none/run: expected a folder of a bucket, got no bucket none" in said(capsys, *recipe)
    with pytest.raises(OSError, match="NO_SUCH_BUCKET") as caught:
        Store("s3://none/run").write_atomic("run.json", b"{}")
    assert str(describe_remote_error(caught.value)).startswith(
        "s3://none/run/run.json: expected an object store that answers"
    )


def test_wrong_credentials_are_reported(server: int, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"url": f"http://127.0.0.1:{server}/moto-api/reset-auth", "headers": {"Content-Type": "text/plain"}}
    urlopen(Request(data=b"0", **asked)).close()  # from now on keys are looked at
    try:
        for arguments in (["verify", "s3://bucket/run"], ["run", str(RECIPE), "--out", "s3://bucket/run"]):
            assert "ACCESS_DENIED" in said(capsys, *arguments)
    finally:
        urlopen(Request(data=b"inf", **asked)).close()


def test_a_server_that_is_gone_is_reported_in_seconds(
    server: int, silent_port: int, capsys: pytest.CaptureFixture[str]
) -> None:
    started = time.monotonic()
    with elsewhere(silent_port):
        message = said(capsys, "verify", "s3://bucket/run")
    assert message.startswith("penstock: s3://bucket/run/run.json: expected an object store that answers, got NETWORK")
    assert time.monotonic() - started < 60


def test_an_error_of_a_worker_is_found_in_what_spark_says() -> None:
    text = (
        "[PYTHON_EXCEPTION] An exception was thrown\nOSError: When reading information for key 'run/it's/x' in bucket "
        "'b': AWS Error SLOW_DOWN during GetObject operation: Reduce (Request ID: 12)\n SQLSTATE: 38000"
    )
    message = str(describe_remote_error(RuntimeError(text)))
    assert message.startswith(
        "s3://b/run/it's/x: expected an object store that answers, got SLOW_DOWN during GetObject"
    )
    assert "Request ID" not in message
    assert "SQLSTATE" not in message
    assert str(describe_remote_error(OSError("google::cloud::Status(UNAVAILABLE: x"))).startswith("gs://: expected")
    assert describe_remote_error(OSError("No space left on device")) is None


# ----------------------------------------------------------------------------------------------------------- takedown


@contextmanager
def killed(after: int) -> Iterator[None]:
    """The process is killed before its `after`-th change of a run."""
    made: list[str] = []

    def counted(act):
        def acting(store: Store, name: str, *rest):
            if len(made) == after:
                raise Killed
            made.append(name)
            return act(store, name, *rest)

        return acting

    changes = ("write_atomic", "open_output", "delete")
    with mock.patch.multiple(Store, **{name: counted(getattr(Store, name)) for name in changes}):
        yield


@pytest.mark.parametrize("after", [pytest.param(3, marks=pytest.mark.slow), 12])
def test_a_takedown_that_is_killed_is_ended_by_the_next_call(server: int, tmp_path: Path, after: int) -> None:
    make_tiny_dataset(tmp_path / "run", {"web": 30, "books": 10})
    run = Store(f"s3://bucket/takedown {after}")
    upload(tmp_path / "run", run)
    document = documents_of(open_dataset(run))[8]["doc_id"]
    with killed(after), pytest.raises(Killed):
        take_down(run.uri, doc=[document.hex()])
    assert read_pending(run) is not None
    assert take_down(run.uri, doc=[document.hex()]) == 0
    assert read_pending(run) is None
    ids = [row["doc_id"] for row in documents_of(open_dataset(run))]
    assert document not in ids
    assert REMOVED_ID in ids
    (name,) = (name for name in run.walk() if name.startswith("takedowns/") and name.count("/") == 1)
    assert take_down(run.uri, check=name) == 0
    # as on a local disk
    assert take_down(tmp_path / "run", doc=[document.hex()]) == 0
    assert opened(tmp_path / "run").digest == open_dataset(run).digest


# ------------------------------------------------------------------------------------------------------------- a run


def test_a_dataset_is_verified_planned_and_traced(
    server: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make_tiny_dataset(tmp_path / "run")
    upload(tmp_path / "run", run := Store("s3://bucket/tiny"))
    recipe = {"source": {"paths": ["x"]}, "train": {"seq_len": 64}}
    write_run(run, read_run(run).model_copy(update={"recipe": recipe}))
    for arguments in (
        ["verify", run.uri],
        ["plan", run.uri, "--quiet"],
        ["plan", "s3://bucket/beside it", "--dataset", run.uri, "--quiet"],
    ):
        assert main(arguments) == 0
    assert run.exists(PLAN_NAME)
    outputs = []
    for uri in (run.uri, "s3://bucket/beside it"):
        capsys.readouterr()
        assert main(["trace", uri, "--step", "1", "--text", "--brief"]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != ""
    before = {*run.walk()}
    assert "train.cache_dir: expected a folder on a local disk" in said(capsys, "train", run.uri)
    assert {*run.walk()} == before


@pytest.fixture(scope="module")
def crawl(server: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A crawl on the local disk, which lies at s3://bucket/the crawl too."""
    folder = tmp_path_factory.mktemp("crawl")
    build_demo_crawl(folder, pages=100, seed=3)
    upload(folder, Store("s3://bucket/the crawl"))
    return folder


@pytest.fixture(scope="module")
def workers(server: int, spark) -> Iterator[object]:
    """The session; its workers know the server, whenever it was started."""
    given = spark.sparkContext.environment
    with mock.patch.dict(given, environment(server)):
        yield spark


def run_it(spark, source: str, out: str, until: str | None = None) -> Store:
    recipe = read_recipe(str(RECIPE), [f'source.paths=["{source}"]', *SMALL])
    run_steps(spark, prepare(recipe, until), Store(out), 2)
    return Store(out)


def killed_and_run_again(spark, source: str, out: str, until: str | None = None) -> Store:
    """A run that was killed when all parts of its first table were complete, and run again: it resumes from those."""
    with mock.patch.object(running, "commit", side_effect=Killed), pytest.raises(Killed):
        run_it(spark, source, out, until)
    parts = parts_of_tables(Store(out))
    assert parts
    run = run_it(spark, source, out, until)
    assert parts_of_tables(run) == parts
    return run


def parts_of_tables(run: Store) -> set[str]:
    """The files of the two tables that the first step writes."""
    return {name for name in run.walk() if name.startswith(("documents/", "text/")) and ".parquet" in name}


def test_a_run_is_browsed_as_on_a_local_disk(server: int, tmp_path: Path) -> None:
    store = make_browse_run(tmp_path / "run")
    pafs.copy_files(str(tmp_path / "run"), "bucket/browsed", destination_filesystem=Store("s3://bucket").fs)
    answers = []
    for address in (store.uri, "s3://bucket/browsed"):
        run = open_run_of(address)
        page = search(run, make_query(run, {"contains": "javascript"}), Position(0, 0), 9)
        shown = document_json(run, bytes.fromhex(page.rows[0]["doc"]), None, "javascript")
        tried = limits_answer(open_limits(run, 99, SampleProgress()), ["quality.min_words=0"])
        answers.append((page, shown | {"commands": None}, tried["totals"], tried["newly_kept"]))
    assert answers[0] == answers[1]
    assert len(answers[0][0].rows) == 1


@pytest.mark.spark
def test_one_step_resumes_and_writes_what_it_writes_on_a_local_disk(
    workers, crawl: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, out = "s3://bucket/the crawl/demo-000.warc.gz", "s3://bucket/first step"
    run = killed_and_run_again(workers, source, out, "documents")
    local = run_it(workers, str(crawl / "demo-000.warc.gz"), str(tmp_path / "run"), "documents")
    for name in ("documents", "text"):
        assert open_table(run, name)[1].digest == open_table(local, name)[1].digest
    assert open_table(run, "documents")[1].content.counts.rows_kept > 20
    capsys.readouterr()
    written = {*run.walk()}
    run_it(workers, source, out, "documents")
    assert " is complete (" in capsys.readouterr().err
    assert {*run.walk()} == written


@pytest.fixture(scope="module")
def finished(workers, crawl: Path) -> Store:
    """A run on S3 of files on S3, killed when all parts of its first table stood, and run again."""
    return killed_and_run_again(workers, "s3://bucket/the crawl/*.warc.gz", "s3://bucket/run")


@pytest.mark.spark
@pytest.mark.slow
def test_the_same_dataset_as_on_a_local_disk(finished: Store, workers, crawl: Path, tmp_path: Path) -> None:
    local = run_it(workers, f"{crawl}/*.warc.gz", str(tmp_path / "run"))
    digests = [{name: open_table(run, name)[1].digest for name in NAMES} for run in (finished, local)]
    assert digests[0] == digests[1]
    assert sum(open_dataset(finished).num_tokens().values()) > 10_000


@pytest.mark.spark
@pytest.mark.slow
def test_again_does_nothing(finished: Store, workers, capsys: pytest.CaptureFixture[str]) -> None:
    before = {name: finished.fs.get_file_info(finished.path(name)).mtime for name in finished.walk()}
    run_it(workers, "s3://bucket/the crawl/*.warc.gz", finished.uri)
    made = set(re.findall(r"^(\w+) +is complete", capsys.readouterr().err, re.MULTILINE))
    assert made == {*NAMES} - {"text"}
    after = {name: finished.fs.get_file_info(finished.path(name)).mtime for name in finished.walk()}
    assert before.keys() == after.keys()
    assert {name for name in after if after[name] != before[name]} <= {"run.json", "progress.json"}


@pytest.mark.spark
@pytest.mark.slow
def test_a_new_run_shares_the_unchanged_tables_of_another(finished: Store, workers) -> None:
    recipe = read_recipe(str(RECIPE), ['source.paths=["s3://bucket/the crawl/*.warc.gz"]', *SMALL, "tokens.seed=9"])
    new = Store("s3://bucket/others/new")
    run_steps(workers, replace(prepare(recipe, None), reuse=(open_reused(finished.uri, new),)), new, 2)
    tables = read_run(new).tables
    assert {name for name, version in tables.items() if not version.startswith("../../../run/")} == {"tokens"}
    assert {path.partition("/")[0] for path in new.walk()} == {"run.json", "progress.json", "tokens"}
    counts = [open_table(run, "tokens")[1].content.counts.rows_kept for run in (new, finished)]
    assert counts[0] == counts[1] > 50
    assert open_dataset(new).digest != open_dataset(finished).digest


@pytest.mark.spark
@pytest.mark.slow
def test_every_verb_that_reads_reads_it(finished: Store, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run, digest = finished.uri, open_dataset(finished).digest

    def tells(*arguments: str) -> str:
        assert main(list(arguments)) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    assert "were read now, 0 were verified before" in tells("verify", run)
    assert "0 were read now" in tells("verify", run)
    assert finished.exists("report.html") is False
    assert f"report: {run}/report.html" in tells("report", run)
    assert finished.size("report.html") > 100_000
    assert digest[:12] in tells("lineage", run, "--out", str(tmp_path / "lineage.json"))
    assert "equal: the digests are the same" in tells("diff", run, f"{run}@{digest[:12]}")
    assert "1 document(s)" in tells("show", run, "--where", "drop_stage is null", "--limit", "1", "--text")
    assert "documents" in tells("export", run, "--format", "megatron", "--out", str(tmp_path / "megatron"))
    tells("plan", run, "--quiet")
    assert finished.exists(PLAN_NAME)
    step = tells("trace", run, "--step", "1", "--text")
    url = next(word for word in step.split() if word.startswith(("http://", "https://")))
    assert "the same record" in tells("trace", run, "--url", url, "--refetch")
    # another run on the same dataset, beside it
    tells("plan", "s3://bucket/next run", "--dataset", run, "--quiet")
    assert read_run(Store("s3://bucket/next run")).tables["tokens"].startswith("../../run/tokens/v-")
    assert tells("trace", "s3://bucket/next run", "--step", "1", "--text") == step
    assert "train.cache_dir: expected a folder on a local disk" in said(capsys, "train", run, "--dry-run")
    assert f"expected a run folder on a mounted filesystem, got {run}" in said(capsys, "ladder", run)
    assert "expected a run on a local disk" in said(capsys, "ablate", run, "--without", "quality.fineweb")
    assert not any(name.startswith("train/checkpoints") for name in finished.walk())


@pytest.mark.spark
@pytest.mark.slow
def test_a_takedown_of_a_whole_run(finished: Store, capsys: pytest.CaptureFixture[str]) -> None:
    run, before = finished.uri, open_dataset(finished)
    document = documents_of(before)[5]["doc_id"].hex()
    standing = {*finished.walk()}
    assert main(["takedown", run, "--near", document, "--dry-run"]) == 0
    assert {*finished.walk()} == standing
    assert main(["takedown", run, "--near", document, "--keep-old"]) == 0
    name = next(name for name in finished.walk() if name.startswith("takedowns/") and name.count("/") == 1)
    assert open_run(f"{run}@{before.digest[:12]}").uri == run
    assert main(["takedown", run, "--check", name]) == 1
    assert "expected no old file" in capsys.readouterr().out
    assert main(["takedown", run, "--drop-old"]) == 0
    capsys.readouterr()
    main(["takedown", run, "--check", name])  # pages of the demo crawl quote each other, and it says so
    assert "expected no old file" not in capsys.readouterr().out
    assert main(["verify", run]) == 0
    assert open_dataset(finished).digest != before.digest
