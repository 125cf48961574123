"""Tests of compiled language models: back-off by definition and as in kenlm, equal bytes, and invalid files."""

import gzip
import json
import random
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from pipeline.perplexity import compile
from pipeline.perplexity import compile as arpa
from pipeline.perplexity.compile import compile_lm
from pipeline.perplexity.model import (
    EMPTY,
    ENTRY,
    EVEN,
    MAGIC,
    KenlmModel,
    LanguageModel,
    NgramTable,
    build_slots,
    keys_of,
    open_model,
    word_codes,
)
from schemas.errors import ConfigError, ContractError
from tests.support.tiny_arpa import TINY, log10_of, random_ngrams, write_arpa


def compiled(folder: Path, ngrams: dict, **settings) -> LanguageModel:
    source = write_arpa(folder / "lm.arpa", ngrams)
    compile_lm(source, str(folder / "lm.lm"), None, "en", **settings)
    return LanguageModel(str(folder / "lm.lm"))


def sentences_of(seed: int, number: int, words: int) -> list[list[str]]:
    """Return sentences over a few words, some long, some empty."""
    chain = random.Random(seed)
    return [[f"w{chain.randrange(words)}" for _ in range(chain.choice((0, 1, 2, 5, 9, 40)))] for _ in range(number)]


@pytest.mark.parametrize(
    ("sentence", "expected"),
    [
        # bo = back-off weight: p(a|<s>) + p(b|<s> a) + bo(a b) + p(</s>|b)
        ("a b", -0.25 - 0.0625 - 0.03125 - 0.1875),
        # bo(<s>) + p(b), then p(</s>|b)
        ("b", -0.5 - 0.75 - 0.1875),
        # p(a|<s>), then bo(<s> a) + bo(a) + p(</s>)
        ("a", -0.25 - 0.0625 - 0.25 - 1.0),
        # bo(<s>) + p(</s>)
        ("", -0.5 - 1.0),
        # p(a|<s>) + bo(<s> a) + bo(a) + p(<unk>), then p(</s>): an unknown word has no back-off weight
        ("a z", -0.25 - 0.0625 - 0.25 - 2.0 - 1.0),
        # a second a b has no sentence start before it: bo(b) + p(a), then p(b|a)
        ("a b a b", -0.25 - 0.0625 - 0.03125 - 0.125 - 0.5 - 0.375 - 0.03125 - 0.1875),
        # markers in a text are unknown words: bo(<s>) + p(<unk>) + p(<unk>) + p(</s>)
        ("<s> </s>", -0.5 - 2.0 - 2.0 - 1.0),
    ],
)
def test_back_off_by_hand(tmp_path: Path, sentence: str, expected: float) -> None:
    model = compiled(tmp_path, TINY)
    scores = model.score([sentence.split()])
    assert scores.log10.tolist() == [expected]
    assert scores.tokens.tolist() == [len(sentence.split()) + 1]


def test_scores_of_sentences_are_independent(tmp_path: Path) -> None:
    model = compiled(tmp_path, TINY)
    sentences = [["a", "b"], [], ["b"], ["a"], ["a", "b", "a", "b"]]
    alone = [model.score([sentence]).log10[0] for sentence in sentences]
    assert model.score(sentences).log10.tolist() == alone
    assert model.score([]).log10.tolist() == []


def test_text_is_scored_line_by_line_without_blank_lines(tmp_path: Path) -> None:
    model = compiled(tmp_path, TINY)
    scores = model.score_text("A B\n\n \t\nB\r")
    assert scores.tokens.tolist() == [3, 0, 0, 2]
    assert scores.log10.tolist() == [-0.53125, 0.0, 0.0, -1.4375]
    raw = compiled(tmp_path, TINY, normalisation="none")
    assert raw.score_text("A b \ud800").log10.tolist() == [log10_of(["A", "b", "?"], TINY)]


@pytest.mark.parametrize("order", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("prune", [0, 1])
def test_any_model_agrees_with_the_definition(tmp_path: Path, order: int, prune: int) -> None:
    ngrams = random_ngrams(sentences_of(1, 60, 6), order, [0, 0, prune, prune, prune])
    model = compiled(tmp_path, ngrams)
    assert model.header.closed == (True,) * (order - 1)
    assert sum(model.header.counts) == len(ngrams)
    held_out = sentences_of(2, 40, 7)
    expected = [log10_of(sentence, ngrams) for sentence in held_out]
    assert model.score(held_out).log10 == pytest.approx(expected, abs=1e-5)


def test_a_model_without_every_shorter_ngram_agrees_with_the_definition(tmp_path: Path) -> None:
    ngrams = random_ngrams(sentences_of(1, 60, 8), 4, [0, 0, 0, 0])
    chain = random.Random(3)
    ngrams = {words: values for words, values in ngrams.items() if len(words) in (1, 4) or chain.random() < 0.5}
    model = compiled(tmp_path, ngrams)
    assert model.header.closed == (True, False, False)
    held_out = sentences_of(2, 40, 9)
    expected = [log10_of(sentence, ngrams) for sentence in held_out]
    assert model.score(held_out).log10 == pytest.approx(expected, abs=1e-5)


def test_kenlm_agrees_where_the_end_of_an_ngram_is_missing(tmp_path: Path) -> None:
    ngrams = random_ngrams(sentences_of(1, 200, 30), 4, [0, 0, 0, 0])
    chain = random.Random(3)
    for n in (4, 3, 2):  # contexts are kept, as kenlm requires
        contexts = {words[:-1] for words in ngrams}
        removed = {words for words in ngrams if len(words) == n and words not in contexts and chain.random() < 0.5}
        ngrams = {words: values for words, values in ngrams.items() if words not in removed}
    ends = {words[1:] for words in ngrams if len(words) > 2}
    assert len(ends - ngrams.keys()) > 100
    model = compiled(tmp_path, ngrams)
    assert model.header.closed == (True, False, False)
    assert_kenlm_agrees(str(tmp_path / "lm.arpa"), model, sentences_of(2, 100, 32))


def test_a_missing_unknown_word_has_the_probability_of_kenlm(tmp_path: Path) -> None:
    model = compiled(tmp_path, {words: values for words, values in TINY.items() if words != ("<unk>",)})
    assert model.score([["z"]]).log10.tolist() == [-0.5 - 100 - 1]


# ------------------------------------------------------------------------------------------------------------- kenlm


def assert_kenlm_agrees(source: str, model: LanguageModel, sentences: list[list[str]]) -> None:
    kenlm = pytest.importorskip("kenlm")
    oracle = kenlm.Model(source)
    scores = model.score(sentences)
    # Its score() sums float32; on long sentences the error exceeds the tolerance.
    expected = [sum(word[0] for word in oracle.full_scores(" ".join(sentence))) for sentence in sentences]
    assert scores.log10 == pytest.approx(expected, abs=1e-4)
    short = [number for number, sentence in enumerate(sentences) if len(sentence) < 50]
    total = [oracle.score(" ".join(sentences[number])) for number in short]
    assert scores.log10[short] == pytest.approx(total, abs=1e-4)


@pytest.mark.parametrize("order", [2, 3, 4, 5])
def test_kenlm_agrees_on_real_words(tmp_path: Path, shared_data: Path, order: int) -> None:
    """Real sentences, random weights, pruned; a tenth of the sentences is held out and has many unknown words."""
    with gzip.open(shared_data / "text/brown.jsonl.gz", "rt") as stream:
        texts = [json.loads(line)["text"] for line in stream][:8]
    sentences = [line.split() for text in texts for line in text.splitlines() if line.split()]
    ngrams = random_ngrams(sentences[: -len(sentences) // 10], order, [0, 0, 1, 1, 2])
    model = compiled(tmp_path, ngrams)
    assert len(ngrams) > 10_000
    assert_kenlm_agrees(str(tmp_path / "lm.arpa"), model, [*sentences, [], ["neverseen"] * 7])


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("lmplz") is None, reason="lmplz is not on the PATH")
@pytest.mark.parametrize("options", [("2",), ("3", "--prune", "0", "1", "2"), ("5",), ("5", "--prune", "0", "0", "1")])
def test_kenlm_agrees_on_models_of_lmplz(tmp_path: Path, shared_data: Path, options: tuple[str, ...]) -> None:
    with gzip.open(shared_data / "text/abc_news.jsonl.gz", "rt") as stream:
        lines = [line for text in stream for line in json.loads(text)["text"].splitlines() if line.split()]
    source = tmp_path / "lm.arpa"
    command = ["lmplz", "-S", "200M", "-T", str(tmp_path), "--discount_fallback", "-o", *options]
    with source.open("wb") as sink:
        text = "\n".join(lines[::2]).encode()
        subprocess.run(command, input=text, stdout=sink, stderr=subprocess.DEVNULL, check=True)
    compile_lm(str(source), str(tmp_path / "lm.lm"), None, "en")
    assert_kenlm_agrees(str(source), LanguageModel(str(tmp_path / "lm.lm")), [line.split() for line in lines[1::2]])


def test_a_kenlm_model_has_the_same_interface(tmp_path: Path) -> None:
    pytest.importorskip("kenlm")
    ours = compiled(tmp_path, TINY)
    theirs = KenlmModel(str(tmp_path / "lm.arpa"), None)
    text = "A b\n\nb <s> z\n" + "a b " * 40
    assert theirs.score_text(text).tokens.tolist() == ours.score_text(text).tokens.tolist() == [3, 0, 4, 81]
    assert theirs.score_text(text).log10 == pytest.approx(ours.score_text(text).log10, abs=1e-4)


# ------------------------------------------------------------------------------------------------------------ the file


def test_equal_ngrams_give_equal_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ngrams = random_ngrams(sentences_of(1, 60, 12), 3, [0, 0, 0])
    compiled(tmp_path, ngrams)
    first = (tmp_path / "lm.lm").read_bytes()
    shuffled = list(ngrams.items())
    random.Random(4).shuffle(shuffled)
    monkeypatch.setattr(arpa, "BLOCK_LINES", 7)
    monkeypatch.setattr(compile, "ENTRIES_AT_ONCE", 50)
    source = Path(write_arpa(tmp_path / "other.arpa", dict(shuffled)))
    (tmp_path / "other.arpa.gz").write_bytes(gzip.compress(source.read_bytes().replace(b"\n", b"\r\n")))
    compile_lm(str(tmp_path / "other.arpa.gz"), str(tmp_path / "lm.lm"), None, "en")
    assert (tmp_path / "lm.lm").read_bytes() == first
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lm.arpa", "lm.lm", "other.arpa", "other.arpa.gz"]


def test_the_header_of_a_file(tmp_path: Path) -> None:
    model = compiled(tmp_path, TINY, percentiles={"30": 340.0, "60": 520.0})
    assert model.header.counts == (5, 3, 1)
    assert (model.header.language, model.header.normalisation) == ("en", "ccnet")
    assert model.header.percentiles == {"30": 340.0, "60": 520.0}
    data = (tmp_path / "lm.lm").read_bytes()
    assert data.startswith(MAGIC)
    assert {offset % 64 for _, _, offset in model.header.arrays.values()} == {0}


def test_a_model_file_contains_its_pieces(tmp_path: Path) -> None:
    import sentencepiece

    lines = ["the old mill by the river turns and turns", "rivers of rain fill the reservoir above the mill"] * 20
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_prefix=str(tmp_path / "sp"), vocab_size=30, minloglevel=2
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "sp.model"))
    pieces = [processor.encode(line, out_type=str) for line in lines]
    ngrams = random_ngrams(pieces, 3, [0, 0, 0])
    source = write_arpa(tmp_path / "lm.arpa", ngrams)
    compile_lm(source, str(tmp_path / "lm.lm"), str(tmp_path / "sp.model"), "en")
    (tmp_path / "sp.model").unlink()
    model = LanguageModel(str(tmp_path / "lm.lm"))
    scores = model.score_text("The rivers TURN, 12 \u2603")
    sentence = processor.encode("the rivers turn, 00 \u2603", out_type=str)
    assert scores.tokens.tolist() == [len(sentence) + 1]
    assert scores.log10 == pytest.approx([log10_of(sentence, ngrams)], abs=1e-5)
    (tmp_path / "sp.model").write_bytes(b"no model")
    with pytest.raises(ConfigError, match=r"sp\.model: expected a SentencePiece model"):
        compile_lm(source, str(tmp_path / "lm.lm"), str(tmp_path / "sp.model"), "en")
    with pytest.raises(ConfigError, match=r"none\.model: expected a SentencePiece model, got .*No such file"):
        compile_lm(source, str(tmp_path / "lm.lm"), str(tmp_path / "none.model"), "en")


ARPA = (
    "\\data\\\nngram 1=3\nngram 2=1\n\n\\1-grams:\n-1\t<s>\t-1\n-1\t</s>\n-1\ta\n\n\\2-grams:\n-1\t<s> a\n\n\\end\\\n"
)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("\\data\\", "data", r"expected \\data\\, got 'data'"),
        ("ngram 2=1", "ngram 3=1", "expected `ngram 2=` and a number, got 'ngram 3=1'"),
        ("ngram 1=3", "ngram 1=2", r"expected \\2-grams:, got '-1\\ta'"),
        ("ngram 2=1", "ngram 2=9", r"expected 9 n-grams of order 2, got 'the end of the file'"),
        ("\\end\\", "", r"expected \\end\\, got 'the end of the file'"),
        ("-1\ta", "-1 a", "expected log10 probability, tab, words"),
        ("<s> a", "<s>  a", "for 2 words, got '-1\\\\t<s>  a'"),
        ("<s> a", "a", "for 2 words, got '-1\\\\ta'"),
        ("-1\ta", "0.5\ta", "at most 0, got '0.5\\\\ta'"),
        ("-1\ta", "nan\ta", "at most 0, got 'nan\\\\ta'"),
        ("-1\ta", "-1\ta\tinf", "at most 0, got '-1\\\\ta\\\\tinf'"),
        ("-1\ta", "one\ta", "expected numbers, got .*'one'"),
        ("<s> a", "<s> b", "expected a 1-gram for every word, got none for 'b'"),
        ("\ta", "\t</s>", "expected each 1-gram once, got 1 repeated 1-grams"),
        ("</s>", "b", r"expected <s> and </s>, got no </s>\. Train the model again with"),
        ("\ta", "\t\udcff", "expected UTF-8"),
    ],
)
def test_wrong_arpa_files(tmp_path: Path, old: str, new: str, message: str) -> None:
    (tmp_path / "lm.arpa").write_bytes(ARPA.replace(old, new, 1).encode("utf-8", "surrogateescape"))
    with pytest.raises(ContractError, match=message):
        compile_lm(str(tmp_path / "lm.arpa"), str(tmp_path / "lm.lm"), None, "en")
    assert [path.name for path in tmp_path.iterdir()] == ["lm.arpa"]


def test_the_unchanged_arpa_file_is_valid(tmp_path: Path) -> None:
    (tmp_path / "lm.arpa").write_text(ARPA)
    assert compile_lm(str(tmp_path / "lm.arpa"), str(tmp_path / "lm.lm"), None, "en").counts == (3, 1)
    with pytest.raises(ConfigError, match=r"none\.arpa: expected an ARPA file"):
        compile_lm(str(tmp_path / "none.arpa"), str(tmp_path / "lm.lm"), None, "en")


def test_other_files_are_rejected(tmp_path: Path) -> None:
    compiled(tmp_path, TINY)
    whole = (tmp_path / "lm.lm").read_bytes()
    for size in (len(MAGIC), len(whole) // 2, len(whole) - 1):
        (tmp_path / "half.lm").write_bytes(whole[:size])
        with pytest.raises(ContractError, match=r"half\.lm: expected a complete language model"):
            LanguageModel(str(tmp_path / "half.lm"))
    (tmp_path / "else.lm").write_bytes(b"something else")
    with pytest.raises(ConfigError, match=r"else\.lm: expected a compiled language model, got another file"):
        open_model(str(tmp_path / "else.lm"), None)
    with pytest.raises(ConfigError, match=r"got an ARPA file\. Set perplexity\.models to the \.lm file"):
        open_model(str(tmp_path / "lm.arpa"), None)
    with pytest.raises(ConfigError, match=r"a language in perplexity\.pieces, got another file\. Remove the model's"):
        open_model(str(tmp_path / "lm.lm"), str(tmp_path / "sp.model"))
    (tmp_path / "lm.bin").write_bytes(b"mmap lm http://kheafield.com/code format version 5\n\0")
    with pytest.raises(ConfigError, match="expected the SentencePiece model of a KenLM binary, got none"):
        open_model(str(tmp_path / "lm.bin"), None)


def test_a_broken_kenlm_binary(tmp_path: Path) -> None:
    pytest.importorskip("kenlm")
    (tmp_path / "lm.bin").write_bytes(b"mmap lm http://kheafield.com/code format version 5\n\0")
    with pytest.raises(ConfigError, match="expected a model that kenlm reads"):
        open_model(str(tmp_path / "lm.bin"), None, alone=True)


# ----------------------------------------------------------------------------------------------------------- the table


@pytest.mark.parametrize("number", [0, 1, 2, 1000])
def test_table(number: int) -> None:
    entries = np.zeros(number, ENTRY)
    entries["key"] = np.sort(word_codes(f"w{i}" for i in range(number)) & EVEN)
    entries["probability"], entries["backoff"] = -np.arange(number), np.arange(number) / 8
    num_home_slots = max(1, number + number // 2)
    slots = np.concatenate(list(build_slots([entries[: number // 3], entries[number // 3 :]], num_home_slots)))
    table = NgramTable(num_home_slots, slots)
    assert slots[-2] == EMPTY
    found, values = table.find(entries["key"])
    assert found.tolist() == list(range(number))
    assert values[:, 0].tolist() == entries["probability"].tolist()
    assert values[:, 1].tolist() == entries["backoff"].tolist()
    others = word_codes(f"v{i}" for i in range(1000)) & EVEN
    assert table.find(others)[0].tolist() == []
    assert table.find(np.array([0, EVEN], np.uint64))[0].tolist() == []
    whole = np.concatenate(list(build_slots([entries], num_home_slots)))
    assert whole.tolist() == slots.tolist()


def test_keys_depend_on_the_order_of_words() -> None:
    codes = word_codes(("a", "b", "a", "b", "b", "a")).reshape(3, 2)
    first, second, reversed_key = keys_of(codes).tolist()
    assert first == second != reversed_key
    assert keys_of(codes)[0] % 2 == 0
