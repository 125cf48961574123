"""Perplexity by a checkpoint: equal to a plain forward pass, in windows as stated, and alone as in a crowd."""

import math
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from pipeline.perplexity.stage import SCORED as EXPECTED_SCHEMA
from pipeline.perplexity.stage import TO_SCORE, PerplexityConfig, score_with_checkpoint
from pipeline.tokens.tokenizer import PROBE_TEXTS, Tokenizer
from schemas.manifest import read_run, write_run
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support.tiny_dataset import make_tiny_dataset
from tests.train.eval.test_generate import RECIPE, sentencepiece_run
from train.eval import score as module
from train.eval.generate import open_codec
from train.eval.score import (
    SCORED_SCHEMA,
    CheckpointScorer,
    batch_length,
    columns_of,
    open_offset_encoder,
    open_scorer,
    score_files,
    window_bounds,
)
from train.pretrain.__main__ import main

__all__ = ["sentencepiece_run"]

SEQ_LEN = RECIPE["train"]["seq_len"]
SHORT, LONG = "bebu bida", " ".join(["bebu bida bodu bebe"] * 12)
TEXT = "bebu bida\n\n  \nbodu bebe babe\nbebu"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    run = make_tiny_dataset(tmp_path_factory.mktemp("score") / "run")
    write_run(run, read_run(run).model_copy(update={"recipe": RECIPE}))
    assert main([run.uri]) == 0
    return run


@pytest.fixture(scope="module")
def scorer(run: Store) -> CheckpointScorer:
    return open_scorer(run.uri)


def direct_nats(scorer: CheckpointScorer, run: Store, text: str, seq_len: int = SEQ_LEN) -> list[float]:
    """The nats of every token of a text, its end included, each by a forward pass of its own over its window."""
    contract = open_dataset(run).tokenizer
    ids = [contract.reserved["bos"], *scorer._marked(text)[0], contract.reserved["eos"]]
    nats = []
    for target in range(1, len(ids)):
        start = 0
        while start + seq_len < target:
            start += (seq_len + 1) // 2
        with torch.no_grad():
            logits_V = scorer._model(torch.tensor([ids[start:target]]))[0, -1]
        nats.append(-float(torch.log_softmax(logits_V.double(), -1)[ids[target]]))
    return nats


@pytest.mark.parametrize("text", [SHORT, "bebu", LONG, "unseen words only", TEXT])
def test_equal_to_a_direct_forward_pass(scorer: CheckpointScorer, run: Store, text: str) -> None:
    nats = direct_nats(scorer, run, text)
    (scores,) = scorer.score([text])
    assert scores["perplexity_tokens"] == len(nats) == len(text.split()) + 1
    assert scores["perplexity"] == pytest.approx(math.exp(math.fsum(nats) / len(nats)), rel=1e-5)


def test_paragraphs(scorer: CheckpointScorer, run: Store) -> None:
    nats = direct_nats(scorer, run, TEXT)
    (scores,) = scorer.score([TEXT])
    assert [TEXT[span["start"] : span["end"]] for span in scores["paragraphs"]] == [
        "bebu bida",
        "bodu bebe babe",
        "bebu",
    ]
    expected = [math.exp(sum(nats[a:b]) / (b - a)) for a, b in ((0, 2), (2, 5), (5, 6))]
    assert scores["paragraph_perplexity"] == pytest.approx(expected, rel=1e-5)


def test_a_trained_model_knows_its_own_language(scorer: CheckpointScorer, run: Store) -> None:
    dataset = open_dataset(run)
    codec = open_codec(dataset)
    with dataset.folder.open_input(dataset.streams["web/heldout"][0].path) as stream:
        documents = pa.ipc.open_file(stream).read_all().column("tokens").to_pylist()
    own = [codec.decode(tokens[1:-1]) for tokens in documents]
    shuffled = [" ".join(sorted(text.split())) for text in own]
    for likely, unlikely in zip(scorer.score(own), scorer.score(shuffled)):
        # The uniform guess over 512 ids has perplexity 512.
        assert likely["perplexity"] < min(unlikely["perplexity"], 512)


def test_nothing_and_null(scorer: CheckpointScorer) -> None:
    empty = {"perplexity": None, "perplexity_tokens": 0, "paragraphs": [], "paragraph_perplexity": []}
    null = dict.fromkeys(empty)
    assert scorer.score(["", None, " \n "]) == [empty, null, empty]


def test_a_text_does_not_depend_on_the_others(scorer: CheckpointScorer) -> None:
    texts = [SHORT, LONG, TEXT, "bebu", LONG[:60], *(f"bebu {'bida ' * n}" for n in range(40))]
    crowd = scorer.score(texts)
    assert crowd == [scorer.score([text])[0] for text in texts]
    assert scorer.score(texts[::-1])[::-1] == crowd


@pytest.mark.parametrize(
    ("num_tokens", "first", "seq_len", "expected"),
    [
        (0, 1, 8, []),
        (1, 1, 8, []),
        (2, 1, 8, [(0, 1, 2)]),
        (9, 1, 8, [(0, 1, 9)]),
        (10, 1, 8, [(0, 1, 9), (4, 9, 10)]),
        (18, 1, 8, [(0, 1, 9), (4, 9, 13), (8, 13, 17), (12, 17, 18)]),
        (7, 1, 3, [(0, 1, 4), (2, 4, 6), (4, 6, 7)]),
        (4, 1, 1, [(0, 1, 2), (1, 2, 3), (2, 3, 4)]),
        (9, 5, 3, [(2, 5, 6), (4, 6, 8), (6, 8, 9)]),
    ],
)
def test_windows(num_tokens: int, first: int, seq_len: int, expected: list) -> None:
    windows = list(window_bounds(num_tokens, first, seq_len))
    assert windows == expected
    counted = [token for _, begin, end in windows for token in range(begin, end)]
    assert counted == list(range(first, num_tokens))
    assert all(start < begin and end - start <= seq_len + 1 for start, begin, end in windows)


@pytest.mark.parametrize(("length", "expected"), [(1, 16), (16, 16), (17, 32), (33, 64), (65, 100), (100, 100)])
def test_batch_length(length: int, expected: int) -> None:
    assert batch_length(length, 100) == expected
    assert batch_length(1, 4) == 4


def test_columns_by_hand() -> None:
    # Tokens of "ab\nc d": ab, newline, c, " d"; one beginning before them and one end after them.
    text, starts = "ab\nc d", [0, 2, 3, 4]
    nats = torch.tensor([0.0, 1.0, 3.0, 2.0, 4.0, 5.0]).double().numpy()
    scores = columns_of(text, starts, nats, (1, 1))
    assert scores["perplexity_tokens"] == 5
    assert scores["perplexity"] == pytest.approx(math.exp(15 / 5))
    assert scores["paragraphs"] == [{"start": 0, "end": 2}, {"start": 3, "end": 6}]
    assert scores["paragraph_perplexity"] == pytest.approx([math.exp(4 / 2), math.exp(6 / 2)])
    # Without a beginning the first token does not count.
    scores = columns_of(text, starts, nats[1:], (0, 1))
    assert scores["perplexity_tokens"] == 4
    assert scores["paragraph_perplexity"] == pytest.approx([math.exp(3), math.exp(3)])
    alone = columns_of("ab\nc d", starts[:3], torch.tensor([9.0, 9.0, 900.0]).double().numpy(), (0, 1))
    assert alone["paragraph_perplexity"][1] == pytest.approx(math.exp(88.0))


def test_places_of_sentencepiece_tokens(sentencepiece_run: tuple[Store, Tokenizer]) -> None:
    run, tokenizer = sentencepiece_run
    mark = open_offset_encoder(open_dataset(run))
    for text in (*PROBE_TEXTS, "a\u2581b \ufdd0\ncd"):
        ids, starts = mark(text)
        assert ids == tokenizer.encode(text).tolist()
        assert len(starts) == len(ids)
        assert starts == sorted(starts)
        assert all(0 <= start < len(text) for start in starts)
    ids, starts = mark("mill\n\u2581\u2581\nmill")
    newline = tokenizer.encode("\n").tolist()[-1]
    assert [start for number, start in zip(ids, starts) if number == newline] == [4, 7]


# ----------------------------------------------------------------------------------------------------------- the files


def write_texts(folder: Path) -> list[str]:
    """A Parquet and an Arrow file of texts."""
    rows = [{"doc_id": bytes([i]) * 16, "language": "en", "text": f"bebu {'bida ' * i}"} for i in range(5)]
    rows.append({"doc_id": bytes(16), "language": None, "text": None})
    table = pa.Table.from_pylist(rows, TO_SCORE)
    pq.write_table(table, folder / "a.parquet")
    with pa.ipc.new_file(str(folder / "b.arrow"), TO_SCORE) as writer:
        writer.write_table(table.slice(1, 3), max_chunksize=2)
    return [str(folder / "a.parquet"), str(folder / "b.arrow")]


def test_files(scorer: CheckpointScorer, tmp_path: Path) -> None:
    inputs = write_texts(tmp_path)
    assert score_files(scorer, inputs, str(tmp_path / "out.parquet")) == 9
    scores = pq.read_table(tmp_path / "out.parquet")
    assert scores.schema.names == SCORED_SCHEMA.names
    assert scores.cast(SCORED_SCHEMA).equals(scores.cast(EXPECTED_SCHEMA))
    assert scores.column("doc_id").to_pylist() == [bytes([i]) * 16 for i in (0, 1, 2, 3, 4, 0, 1, 2, 3)]
    assert scores.column("perplexity_tokens").to_pylist() == [2, 3, 4, 5, 6, None, 3, 4, 5]
    rows = scores.to_pylist()
    assert rows[6:9] == rows[1:4]
    assert rows[5] == {"doc_id": bytes(16)} | dict.fromkeys(scores.schema.names[1:])
    first = (tmp_path / "out.parquet").read_bytes()
    score_files(scorer, inputs, str(tmp_path / "again.parquet"))
    assert (tmp_path / "again.parquet").read_bytes() == first


def test_the_pipeline_calls_it_in_a_process_apart(run: Store, scorer: CheckpointScorer, tmp_path: Path) -> None:
    """One process for two files, by the folder of one checkpoint, gives what the scorer gives here."""
    inputs = write_texts(tmp_path)
    outputs = [str(tmp_path / "a.out"), str(tmp_path / "b.out")]
    config = PerplexityConfig(scorer=f"checkpoint:{run.uri}/train/checkpoints/step-000040")
    score_with_checkpoint(config, inputs, outputs)
    for source, output in zip(inputs, outputs):
        score_files(scorer, [source], str(tmp_path / "here.parquet"))
        assert pq.read_table(output).to_pylist() == pq.read_table(tmp_path / "here.parquet").to_pylist()


def test_wrong_arguments(run: Store, tmp_path: Path, capsys) -> None:
    inputs = write_texts(tmp_path)
    out = str(tmp_path / "out.parquet")
    pq.write_table(pa.table({"doc_id": [b"x"]}), tmp_path / "half.parquet")
    for arguments, message in (
        (["--checkpoint", run.uri, "--in", *inputs, inputs[0], "--out", out, out], "expected 1 or 3 files, got 2"),
        (["--checkpoint", f"{run.uri}/train/checkpoints/step-000007", "--in", *inputs, "--out", out], "of step 7"),
        (
            ["--checkpoint", run.uri, "--in", str(tmp_path / "none"), "--out", out],
            "expected a Parquet or Arrow file",
        ),
        (
            ["--checkpoint", run.uri, "--in", str(tmp_path / "half.parquet"), "--out", out],
            "got no text. Add the column",
        ),
    ):
        assert module.main(arguments) == 2
        assert message in capsys.readouterr().err
