"""A real run of hostile addresses, titles, texts and file names, and what every verb then prints of it.

No control character and no mark of direction reaches standard output or standard error, and no value of the data begins
a line of its own. A text keeps its lines, each after a bar. JSON stays JSON.
"""

import contextlib
import json
import random
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from jobs.cli import list_verbs, main
from jobs.recipe import recipe_sections
from jobs.verbs.browse import open_run_of
from pipeline.browse.server import BrowseServer
from pipeline.inspect.show import find_documents, parse_where
from pipeline.prepare import prepare
from pipeline.report.live import LiveServer
from pipeline.report.page import ReportOptions
from pipeline.run import run_steps
from schemas.manifest import read_run, write_run
from schemas.overrides import load_recipe
from schemas.storage import Store
from tests.support.tiny_archive import record

pytestmark = pytest.mark.spark

ESCAPES = "\x1b]0;PWNED\x07\x1b[2J\x9b31m\u202etxt\u2066\u200e\u061c\u2028\u2029\r\x08"
FORGED = "FORGED"
HOSTILE = f"{ESCAPES}\n{FORGED} document 00 kept"
"""Escape sequences of a terminal, marks of direction, separators of lines, and a line that looks like one of ours."""
ALLOWED = re.compile("[^\x00-\x09\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]*")
URL = f"https://hostile.example/{HOSTILE}"
PWNED_SHOWN = r"\x1b]0;PWNED\x07"
WITHOUT_DATA = {
    "calibrate": "measures the machine",
    "demo-crawl": "writes pages of its own",
    "fit-scaling": "reads a table of numbers",
    "links": "prints counts by cause",
    "robots": "prints counts by cause",
    "models": "prints the store of this machine",
    "settings": "prints the code's own settings",
    "train-importance": "prints counts",
    "train-toxicity": "prints figures of sets that the settings name",
    "train-lm": "prints the size of the model",
    "train-classifier": "prints scores",
    "derive-profiles": "prints names of languages",
    "ladder": "starts training runs, whose output is that of `train`",
    "ablate": "starts training runs, whose output is that of `train`",
    "mix": "reads ablations",
    "plant-test": "prints numbers and digests",
}
"""Verbs whose output holds no address, title or text of a document, with the reason."""


def page_of(number: int) -> str:
    rng = random.Random(number)
    nouns = ("harbour", "tower", "crew", "letter", "market", "signal", "garden", "river", "lamp", "bridge")
    words = ". ".join(
        f"The {rng.choice(nouns)} of the {rng.choice(nouns)} has {rng.randrange(10**6)} {rng.choice(nouns)}s"
        for _ in range(25)
    )
    return f"{words}. The ships wait in the bay, and the crew reads {HOSTILE} there."


def recipe_of(folder: Path, crawl: Path) -> str:
    paths = json.dumps([f"{folder}/rows*.jsonl"])
    archives = json.dumps([f"{min(crawl.glob('*.warc.gz'))}", f"{folder}/*.warc"])
    return f"""
[[source]]
name = "rows"
paths = {paths}
[source.quality]
rules = []
[[source]]
name = "web"
paths = {archives}
[language]
languages = []
min_score = 0.0
[tokenizer]
vocab_size = 600
[tokens]
shard_tokens = 16384
chunk_tokens = 128
heldout_share = 0.1
[train]
seq_len = 64
steps = 2
global_batch = 2
[plan]
num_layers = 1
d_model = 32
num_heads = 2
"""


@pytest.fixture(scope="module")
def recipe(crawl: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hostile")
    rows = [
        {"url": f"{URL}/{n}", "id": f"{n}{HOSTILE}", "title": HOSTILE, "text": page_of(n), "note": HOSTILE}
        for n in range(40)
    ]
    # A copy, so that deduplication has a document to name, and a file whose name attacks too.
    rows.append(rows[0] | {"url": f"{URL}/copy"})
    name = f"rows\x1b]0;PWNED\x07\u202e\n{FORGED}.jsonl"
    (folder / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    html = f"<title>{ESCAPES}</title><p>{page_of(99)}</p>".encode()
    block = b"HTTP/1.1 200 OK\r\nContent-Type: text/html; charset=\x1b]0;PWNED\x07\r\n\r\n" + html
    fields = {"WARC_Target_URI": "http://warc.example/\x1b]0;PWNED\x07\x1b[2J\u202e"}
    (folder / f"own{ESCAPES[:4]}.warc").write_bytes(record(block, **fields) + record(block, "metadata", **fields))
    file = folder / "recipe.toml"
    file.write_text(recipe_of(folder, crawl))
    return file


@pytest.fixture(scope="module")
def run(spark: Any, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """The run after two steps of training."""
    store = Store(str(tmp_path_factory.mktemp("run") / "run"))
    loaded = load_recipe(tomllib.loads(recipe.read_text()), [], recipe_sections(), "test")
    run_steps(spark, prepare(loaded, None), store, 2)
    assert main(["plan", store.root]) == 0
    assert main_in_process(["train", store.root]) == 0
    return store


def main_in_process(words: list[str]) -> int:
    """Call the command as a process, since `train` replaces it."""
    return subprocess.run([sys.executable, "-m", "jobs.cli", *words], check=False).returncode


def check(out: str, err: str, is_block: bool = False) -> None:
    """Check that nothing hostile was printed; `is_block`: the output is a text, which keeps its lines."""
    for text in (out, err):
        assert ALLOWED.fullmatch(text.replace("\n", "")), re.sub(ALLOWED, "", text.replace("\n", ""))
        # An error may quote an argument of several lines; they are indented.
        lines = text.split("\n") if text is err else map(str.lstrip, text.split("\n"))
        assert is_block or [line for line in lines if line.startswith(FORGED)] == []


def doc_id_of(run: Store, *, dropped: bool) -> str:
    rows = find_documents(run, parse_where("source = rows"), 100)
    return next(row["doc_id"].hex() for row in rows if (row["drop_stage"] == "dedup") == dropped)


def commands(run: str, recipe: str, out: str, kept: str, dropped: str) -> dict[str, list[list[str]]]:
    """The command lines by verb: each verb of the command line that reads a run, and errors that quote data."""
    return {
        "show": [
            ["show", run, "--where", "source = rows", "--text"],
            ["show", run, "--where", "source = rows", "--limit", "2", "--all"],
            ["show", run, "--where", "source = rows", "--limit", "2", "--json", "--text"],
            ["show", run, "--where", "source = web and record_type = metadata"],
            ["show", run, "--doc", dropped, "--text"],
            ["show", run, "--url", f"{URL}/3"],
            ["show", run, "--url", f"{URL}/none"],
            ["show", run, "--where", f"source = {HOSTILE}"],
            ["show", f"{run}/{HOSTILE}", "--doc", kept],
        ],
        "trace": [
            ["trace", run, "--doc", kept],
            ["trace", run, "--url", f"{URL}/3"],
            ["trace", run, "--step", "1", "--text"],
            ["trace", run, "--step", "1", "--json"],
            ["trace", run, "--doc", kept, "--json"],
            ["trace", run, "--contains", FORGED, "--refetch"],
            ["trace", run, "--domain", "hostile.example"],
        ],
        "summary": [
            ["summary", run, "--eu", "--ab2013", "--draft", "--out", f"{out}/papers"],
            ["summary", run, "--dataset-card", "--model-card", "--spdx", "--draft", "--out", f"{out}/cards"],
            ["summary", run, "--list", "domains"],
            ["summary", run, "--template"],
            ["summary", run, "--eu", "--facts", HOSTILE],
        ],
        "sign": [["sign", run, "--key", HOSTILE], ["sign", run, "--verify", "--public-key", HOSTILE]],
        "gc": [["gc", run, "--dry-run"]],
        "repair": [["repair", run, "--dry-run"]],
        "lineage": [["lineage", run, "--out", f"{out}/lineage.json", "--openlineage", f"{out}/events.jsonl"]],
        "whatif": [["whatif", run, "--set", "toxicity.max_words=0", "--json", f"{out}/whatif.json"]],
        "diff": [["diff", run, f"{run}-other", "--list", "3", "--json", f"{out}/diff.json"]],
        "takedown": [
            ["takedown", run, "--domain", "hostile.example", "--dry-run"],
            ["takedown", run, "--url", f"{URL}/3", "--dry-run"],
            ["takedown", run, "--url", HOSTILE, "--dry-run"],
        ],
        "prove": [
            ["prove", run, "--url", f"{URL}/3"],
            ["prove", run, "--url", HOSTILE],
            ["prove", run, "--doc", HOSTILE],
        ],
        "rights": [
            ["rights", run, "--domain", "hostile.example"],
            ["rights", run, "--domain", "hostile.example", "--json"],
            ["rights", run, "--domain", HOSTILE],
        ],
        "report": [["report", run], ["report", run, f"{run}-other", "--out", f"{out}/compare.html"]],
        "verify": [["verify", run]],
        "plan": [["plan", run], ["plan", run, "--set", f"plan.{HOSTILE}=1"]],
        "generate": [["generate", run, "--prompt", HOSTILE, "--tokens", "4"]],
        "evaluate": [["evaluate", run, "--on", run, "--sequences", "2", "--out", f"{out}/evaluated.json"]],
        "export": [
            ["export", run, "--format", "jsonl", "--compression", "none", "--out", f"{out}/lines"],
            ["export", run, "--format", "jsonl", "--out", f"{out}/none", "--where", f"source = {HOSTILE}"],
        ],
        "register": [["register", run, "--delta"], ["register", run, "--delta", "--table", HOSTILE]],
        "dvc": [["dvc", recipe, "--out", "run"], ["dvc", recipe, "--out", run]],
        "init": [["init", f"{out}/new.toml", "--source", f"{Path(recipe).parent}/*.jsonl"]],
        "run": [["run", recipe, "--out", run], ["run", f"{recipe}{HOSTILE}", "--out", run]],
        "stage": [["stage", "documents", recipe, "--out", run]],
        "train": [["train", run, "--dry-run"]],
        "browse": [["browse", f"{run}{HOSTILE}"]],
    }


TEXTS = {"generate", "init"}
"""Verbs that print a text as a block, or write one."""


@pytest.fixture(scope="module")
def other(spark: Any, run: Store, recipe: Path) -> None:
    """A run beside the first one that drops the hostile documents."""
    shutil.copytree(run.root, f"{run.root}-other")
    shutil.rmtree(f"{run.root}-other/train")
    copied = Store(f"{run.root}-other")
    kept = {name: version for name, version in read_run(copied).tables.items() if name not in ("tokenizer", "tokens")}
    write_run(copied, read_run(copied).model_copy(update={"tables": kept}))
    text = recipe.read_text() + "\n[quality]\nmin_words = 400\n"
    loaded = load_recipe(tomllib.loads(text.replace("rules = []", "min_words = 500")), [], recipe_sections(), "test")
    run_steps(spark, prepare(loaded, "clean"), Store(f"{run.root}-other"), 2)


def test_every_verb_is_tried() -> None:
    assert {*commands("", "", "", "", "")} | WITHOUT_DATA.keys() == {*list_verbs()}


@pytest.mark.parametrize("verb", [*commands("", "", "", "", "")])
def test_nothing_hostile_is_printed(
    verb: str,
    run: Store,
    other: None,
    recipe: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: Any,
) -> None:
    monkeypatch.chdir(tmp_path)
    kept, dropped = doc_id_of(run, dropped=False), doc_id_of(run, dropped=True)
    for words in commands(run.root, str(recipe), str(tmp_path), kept, dropped)[verb]:
        capfd.readouterr()
        with contextlib.suppress(SystemExit):
            main(words)
        out, err = capfd.readouterr()
        assert "Traceback" not in err, err
        assert out or err, words
        check(out, err, verb in TEXTS)
        if "--json" in words and words[0] in ("show", "trace"):
            values = [json.loads(line) for line in out.splitlines()] if verb == "show" else [json.loads(out)]
            assert "--step" in words or FORGED in json.dumps(values)
    for file in tmp_path.glob("*.json*"):
        text = file.read_text()
        check(text, "")
        assert text.isprintable() or "\n" in text


def test_the_verbs_print_the_planted_values(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    """Without this, the test above could pass because nothing of the documents is printed."""
    assert main(["show", run.root, "--where", "source = rows", "--limit", "2", "--text"]) == 0
    out = capsys.readouterr().out
    assert r"  url        https://hostile.example/\x1b]0;PWNED\x07\x1b[2J\x9b31m\u202etxt" in out
    assert rf"\r\x08\n{FORGED} document 00 kept/0" in out
    assert f"  | {FORGED} document 00 kept there." in out  # a text keeps its lines
    assert main(["show", run.root, "--where", "url contains warc.example", "--all"]) == 0
    assert r"http://warc.example/\x1b]0;PWNED\x07" in capsys.readouterr().out


@contextlib.contextmanager
def served(server: Any, serve: Any) -> Iterator[None]:
    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    yield
    server.shutdown() if hasattr(server, "shutdown") else server.close()
    thread.join()


def test_pages_show_escapes(run: Store) -> None:
    browsed = BrowseServer(open_run_of(run.root), 0)
    with served(browsed, browsed.serve_forever):
        for path in ("/api/run", "/api/documents?limit=50&source=rows", "/api/random?seed=1"):
            asked = urllib.request.Request(f"http://127.0.0.1:{browsed.server_port}{path}")
            asked.add_header("X-Penstock-Token", browsed.token)
            with urllib.request.urlopen(asked) as answer:
                check(answer.read().decode(), "")
    live = LiveServer(run, 0, ReportOptions())
    with served(live, live.serve), urllib.request.urlopen(live.address.replace("/?", "/state?")) as answer:
        check(answer.read().decode(), "")
    report = run.read_bytes("report.html").decode()
    assert PWNED_SHOWN in report
    check(report, "", is_block=True)
    assert read_run(run).tables
