"""Papers: arXiv packages and unarXive, real samples and made ones, and each reason why a paper is lost."""

import gzip
import io
import json
import random
import tracemalloc
from collections import Counter
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pipeline.engine.stage import Drop, Row, Split
from pipeline.sources.compression import NESTED_FACTOR
from pipeline.sources.config import SourceConfig
from pipeline.sources.papers.arxiv import open_arxiv
from pipeline.sources.papers.ids import identify
from pipeline.sources.papers.unarxive import restore_marks
from pipeline.sources.source import SOURCE, refetch
from pipeline.sources.splits import HashedStream, find_splits, open_stream
from tests.support.archives import package, tar

PAPER = (
    r"\documentclass{article}\title{A title}\author{A. Author}\newcommand{\R}{\mathbb{R}}"
    r"\begin{document}\begin{abstract}Short.\end{abstract}\input{body}\end{document}"
)


def rows_of(path: Path, format_name: str, **settings: Any) -> list[tuple[Row, Drop | None]]:
    config = SourceConfig.model_validate({"paths": [str(path)], "format": format_name} | settings)
    (split,) = find_splits(config)
    stream = open_stream(split)
    rows = list(SOURCE.open(split, stream, config))
    assert stream.finish()[1] == split.size
    for row, _ in rows:
        assert row["record_type"] == "gap" or refetch(split, row, config).changes == ()
    return rows


def rules(rows: list[tuple[Row, Drop | None]]) -> list[str | None]:
    return [drop.rule if drop else None for _, drop in rows]


@pytest.fixture(scope="module")
def samples(shared_data: Path) -> Path:
    folder = shared_data / "sources" / "arxiv"
    if not folder.exists():
        pytest.skip("no samples of papers")
    return folder


def test_real_packages(samples: Path) -> None:
    rows = rows_of(samples / "src_sample.tar", "arxiv")
    assert rules(rows) == [None, None, "no_main_file"]  # the third has only some chapters of a book
    assert sum(row["length"] for row, _ in rows) == (samples / "src_sample.tar").stat().st_size
    paper = rows[0][0]
    assert (paper["url"], paper["date"]) == ("https://arxiv.org/abs/1703.09710", datetime(2017, 3, 1, tzinfo=UTC))
    assert paper["title"].startswith("Fast and scalable Gaussian process modeling")
    assert json.loads(paper["meta"])["main_file"] == "ms.tex"
    assert "$\\mathcal{O}(N^3)$" in paper["text"]
    assert "\\begin{eqnarray}" in paper["text"]
    for row in (rows[0][0], rows[1][0]):
        assert all(
            sign not in row["text"]
            for sign in ("\\cite", "\\label", "\\section", "\\newcommand", "\\bibitem", "\\emph")
        )
        assert len(row["text"]) > 40_000


def test_the_head_of_a_record_is_that_of_its_main_file(tmp_path: Path) -> None:
    """The other files of a package, and the bytes of its compression, are not shown."""
    main = "% A comment.\r\n" + PAPER
    whole = package({"a.tex": "Chapter.", "main.tex": main, "body.tex": "Text."})
    papers = {
        "1703/1703.00001.gz": whole,
        "1703/1703.00002.gz": gzip.compress(main.encode()),
        "1703/1703.00003.pdf": b"%PDF-1",
    }
    papers["1703/1703.00004.gz"] = whole[: len(whole) // 2]
    (tmp_path / "a.tar").write_bytes(tar(papers))
    (tmp_path / "1703.00001.gz").write_bytes(whole)
    heads = []
    for name in ("a.tar", "1703.00001.gz"):
        config = SourceConfig(paths=(f"{tmp_path}/{name}",), format="arxiv")
        (split,) = find_splits(config)
        rows = SOURCE.open(split, open_stream(split), config)
        heads += [refetch(split, row, config).head for row, _ in rows]
    shown = main.replace("\r\n", "\n").encode()
    assert heads == [shown, shown, b"%PDF-1", b"", shown]


def test_real_papers_of_unarxive(samples: Path) -> None:
    rows = rows_of(samples / "unarxive.jsonl.gz", "unarxive")
    assert rules(rows) == [None] * 20
    assert Counter(row["licence"] for row, _ in rows).most_common(1)[0][0].startswith("http://creativecommons.org/")
    assert sum(row["text"].count("$") for row, _ in rows) > 10_000
    assert not any(mark in row["text"] for row, _ in rows for mark in ("{{formula", "{{cite", "NO_CAPTION"))
    assert all(row["url"].startswith("https://arxiv.org/abs/") and row["title"] and row["date"] for row, _ in rows)


@pytest.mark.parametrize(("name", "pack"), [("src.tar", bytes), ("src.tar.gz", gzip.compress)])
def test_a_tar_of_packages(tmp_path: Path, name: str, pack: Any) -> None:
    data = tar(
        {
            "2101/2101.00001.gz": package({"main.tex": PAPER, "body.tex": r"Let $x\in\R$.", "fig.pdf": b"%PDF"}),
            "2101/2101.00002.pdf": b"%PDF-1.4",
            "2101/2101.00003.gz": gzip.compress(rb"\documentclass{a}\begin{document}One file.\end{document}"),
            "2101/2101.00004.gz": package({"main.tex": PAPER, "body.tex": "x"})[:-40],
            "2101/2101.00005.gz": package({"paper.docx": b"PK\0\0"}),
            "2101/2101.00006.gz": gzip.compress(b"%PDF-1.4 a PDF file that is compressed"),
            "2101/2101.00007.gz": b"",
            "9901/hep-th9901001.gz": gzip.compress(rb"\magnification=1200 Old. \bye"),
            "../2101.00008.gz": gzip.compress(b"x"),
        }
    )
    (tmp_path / name).write_bytes(pack(data))
    rows = rows_of(tmp_path / name, "arxiv")
    assert rules(rows) == [
        None, "pdf_only", None, "truncated_record", "no_tex", "pdf_only", "empty_page", None, "unsafe_path",
    ]  # fmt: skip
    first, third, old = rows[0][0], rows[2][0], rows[7][0]
    assert (first["title"], first["text"]) == ("A title", "Short.\n\nLet $x\\in\\mathbb{R}$.")
    assert json.loads(first["meta"]) == {"authors": ["A. Author"], "main_file": "main.tex"}
    assert third["text"] == "One file."
    assert (old["url"], old["date"].year, old["text"]) == ("https://arxiv.org/abs/hep-th/9901001", 1999, "Old.")
    assert sum(row["length"] for row, _ in rows) == len(data)


def test_a_single_package(tmp_path: Path) -> None:
    path = tmp_path / "2101.00001.gz"
    path.write_bytes(package({"main.tex": PAPER, "body.tex": "x"}))
    ((row, drop),) = rows_of(path, "arxiv")
    assert (drop, row["url"], row["length"]) == (None, "https://arxiv.org/abs/2101.00001", path.stat().st_size)


def test_names_in_a_package_do_not_lead_out(tmp_path: Path) -> None:
    files = {"main.tex": PAPER.replace("body", "../../etc/passwd"), "../body.tex": "gone", "a/../../b.tex": "gone"}
    (tmp_path / "a.tar").write_bytes(tar({"2101.00001.gz": package(files)}))
    ((row, drop),) = rows_of(tmp_path / "a.tar", "arxiv")
    assert (drop, row["text"]) == (None, "Short.")
    assert json.loads(row["meta"])["inputs_left_out"] == {"outside": 1}


def test_a_gzip_bomb_is_refused(tmp_path: Path) -> None:
    bombs = {
        "2101.00001.gz": gzip.compress(b"\\a " * 10_000_000),
        "2101.00002.gz": package({"a.tex": b"\\a " * 10_000_000}),
    }
    (tmp_path / "a.tar").write_bytes(tar(bombs))
    assert rules(rows_of(tmp_path / "a.tar", "arxiv")) == ["package_too_large"] * 2


def test_options(tmp_path: Path) -> None:
    body = r"\section{S}A~\cite{k}.\begin{figure}\includegraphics{f}\caption{Cap}\end{figure}"
    (tmp_path / "a.tar").write_bytes(tar({"2101.00001.gz": package({"main.tex": PAPER, "body.tex": body})}))
    settings = {"arxiv": {"citations": "keep", "floats": "none", "headings": "markdown"}}
    ((row, _),) = rows_of(tmp_path / "a.tar", "arxiv", **settings)
    assert row["text"] == "Short.\n\n## S\n\nA [k]."


def test_damaged_packages_never_raise() -> None:
    source = random.Random(3)
    whole = tar(
        {"2101.00001.gz": package({"main.tex": PAPER * 20, "body.tex": "x" * 5000}), "2101.00002.gz": package({})}
    )
    config = SourceConfig(paths=("x",), format="arxiv")
    for _ in range(200):
        data = bytearray(whole)
        for _ in range(source.randrange(1, 6)):
            data[source.randrange(len(data))] = source.randrange(256)
        data = bytes(data[: source.randrange(len(data))])
        split = Split(0, "a.tar", "a.tar", len(data), "", "web", "arxiv")
        rows = list(SOURCE.open(split, io.BytesIO(data), config))
        assert sum(row["length"] for row, _ in rows) == len(data) or "bad_gzip" in rules(rows)


@pytest.mark.parametrize(
    ("name", "paper", "year"),
    [
        ("2301/2301.01234.gz", "2301.01234", 2023),
        ("0704.0001v2.gz", "0704.0001v2", 2007),
        ("math.AG0601001.gz", "math.AG/0601001", 2006),
        ("cs9301111.tar.gz", "cs/9301111", 1993),
        ("2313.01234.gz", "2313.01234", None),
        ("notes.gz", "notes", None),
    ],
)
def test_ids(name: str, paper: str, year: int | None) -> None:
    found, date = identify(name)
    assert (found, date.year if date else None) == (paper, year)


# unarXive


def test_marks_are_replaced() -> None:
    entries = {
        "f": {"type": "formula", "latex": "x^2"},
        "d": {"type": "formula", "latex": "\\begin{align}a\\end{align}"},
    }
    sources = {"c": {"bib_entry_raw": "A. Author,  2020"}}
    text = (
        "Let {{formula:f}} . As {{cite:c}}, (see {{cite:c}}; {{cite:none}}) {{formula:d}} -like REF {{formula:gone}}."
    )
    assert restore_marks(text, entries, sources, False, 100) == "Let $x^2$. As \\begin{align}a\\end{align}-like."
    kept = restore_marks("As {{cite:c}}, {{cite:none}}", entries, sources, True, 100)
    assert kept == "As [A. Author, 2020], [none]"


@pytest.mark.parametrize(
    ("line", "rule"),
    [
        ({"paper_id": "2101.00001", "body_text": [{"text": "x"}]}, None),
        ({"paper_id": "2101.00001", "body_text": "x"}, "no_text_field"),
        ({"paper_id": 7, "body_text": [7, {"text": 7}], "metadata": [], "abstract": {}}, "empty_page"),
        ([], "bad_line"),
    ],
)
def test_lines_of_other_shapes(tmp_path: Path, line: Any, rule: str | None) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(line))
    assert rules(rows_of(tmp_path / "a.jsonl", "unarxive")) == [rule]


def test_a_long_formula_that_is_named_often(tmp_path: Path) -> None:
    """Ten billion characters are not made; the papers around are read."""
    bomb = {"body_text": [{"text": "{{formula:a}} " * 10_000}], "ref_entries": {"a": {"latex": "x" * 1_000_000}}}
    papers = [{"body_text": [{"text": "One."}]}, bomb, {"body_text": [{"text": "Two."}]}]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, papers)))
    tracemalloc.start()
    found = rules(rows_of(tmp_path / "a.jsonl", "unarxive"))
    most = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert found == [None, "page_too_large", None]
    assert most < 200 << 20


def test_a_made_paper(tmp_path: Path) -> None:
    paper = {
        "paper_id": "2101.00001",
        "metadata": {
            "title": "A\n title",
            "license": "http://l",
            "versions": [{"created": "2021-01-02"}],
            "authors": "A",
        },
        "abstract": {"text": "Short\n one."},
        "body_text": [
            {"section": "I", "sec_type": "section", "text": "One."},
            {"section": "I", "sec_type": "section", "text": "Two."},
            {"section": "J", "sec_type": "subsection", "text": "Three."},
        ],
        "ref_entries": {"t": {"type": "table", "caption": "Cap."}},
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(paper))
    ((row, _),) = rows_of(tmp_path / "a.jsonl", "unarxive")
    assert row["text"] == "Short one.\n\nI\n\nOne.\n\nTwo.\n\nJ\n\nThree.\n\nCap."
    assert (row["title"], row["licence"], row["date"].day) == ("A title", "http://l", 2)
    settings = {"unarxive": {"captions": False, "headings": "markdown"}}
    ((row, _),) = rows_of(tmp_path / "a.jsonl", "unarxive", **settings)
    assert row["text"] == "Short one.\n\n## I\n\nOne.\n\nTwo.\n\n### J\n\nThree."


def rules_of(stored: bytes) -> list[str]:
    split = Split(0, "a.tar", "a.tar", len(stored), "", "papers", "arxiv")
    rows = open_arxiv(split, HashedStream(io.BytesIO(stored)), SourceConfig(paths=("x",), format="arxiv"))
    return [drop.rule if drop else "kept" for _, drop in rows]


def test_packages_that_a_compressed_tar_repeats_are_not_unpacked() -> None:
    package = gzip.compress(b"\\documentclass{article}\\begin{document}Words of a paper.\\end{document}", mtime=0)
    tars = tar({f"2101/2101.{number:05}.gz": package for number in range(2_000)})
    stored = gzip.compress(tars)
    rules = rules_of(stored)
    assert {*rules} == {"kept", "decoded_too_large"}
    assert 0 < rules.count("kept") <= NESTED_FACTOR * len(stored) // len(package)
    assert {*rules_of(tars)} == {"kept"}


def test_packages_of_a_compressed_tar_are_unpacked() -> None:
    words = [
        gzip.compress(b"\\documentclass{article}\\begin{document}%x\\end{document}" % n, mtime=0) for n in range(500)
    ]
    members = {f"2101/2101.{number:05}.gz": package for number, package in enumerate(words)}
    assert {*rules_of(gzip.compress(tar(members)))} == {"kept"}
