"""Tokenizers beside an exported model: files and settings with which `transformers` cuts and begins texts alike."""

import gzip
import json
import random
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.tokens.tokenizer import TokenizerConfig, load_tokenizer, train_tokenizer
from schemas.errors import ConfigError
from schemas.tokens import RESERVED, TokenizerContract, escape, open_dataset
from tests.support.model_oracle import TINY, small_model
from tests.support.tiny_dataset import make_tiny_dataset

pytest.importorskip("safetensors")
from train.export.llama import TokenizerFile, export_llama, tokenizer_files


def exported(folder: Path, tokenizer: TokenizerFile) -> Path:
    """A model with the tokenizer's vocabulary, and the tokenizer, in a folder."""
    shape = TINY.model_copy(update={"vocab_size": tokenizer.contract.vocab_size})
    export_llama(dict(small_model(shape).named_parameters()), shape, 64, tokenizer, folder)
    return folder


def tiny_tokenizer(tmp_path: Path) -> TokenizerFile:
    dataset = open_dataset(make_tiny_dataset(tmp_path / "run", {"web": 5}))
    return TokenizerFile(dataset.tokenizer, dataset.tokenizer_folder.read_bytes(dataset.tokenizer_path))


def test_a_tokenizer_json_goes_along(tmp_path: Path) -> None:
    tokenizer = tiny_tokenizer(tmp_path)
    folder = exported(tmp_path / "llama", tokenizer)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"]) == ("<bos>", "<eos>")
    reserved = tokenizer.contract.reserved
    config = json.loads((folder / "config.json").read_text())
    assert [config[f"{name}_token_id"] for name in ("bos", "eos", "pad")] == [
        reserved[n] for n in ("bos", "eos", "pad")
    ]
    generation = json.loads((folder / "generation_config.json").read_text())
    assert set(generation["suppress_tokens"]) == set(reserved.values()) - {reserved["eos"]}
    transformers = pytest.importorskip("transformers")
    loaded = transformers.AutoTokenizer.from_pretrained(folder)
    from tokenizers import Tokenizer

    ours = Tokenizer.from_buffer(tokenizer.data)
    words = [word for word in ours.get_vocab() if not word.startswith("<")][:9]
    ids = ours.encode(" ".join(words), add_special_tokens=False).ids
    assert loaded(" ".join(words))["input_ids"] == [reserved["bos"], *ids]  # as documents begin in training
    assert loaded(" ".join(words), add_special_tokens=False)["input_ids"] == ids
    drawn = transformers.LlamaForCausalLM.from_pretrained(folder).generate(
        torch.tensor([[reserved["bos"], 200]]), max_new_tokens=20
    )
    assert not set(drawn[0, 1:].tolist()) & (set(reserved.values()) - {reserved["eos"]})


def with_model(tokenizer: TokenizerFile, change: Callable[[Any], object], **contract: Any) -> TokenizerFile:
    """Return a tokenizer with another tokenizer.json and contract."""
    from tokenizers import Tokenizer

    model = Tokenizer.from_buffer(tokenizer.data)
    change(model)
    data = str(model.to_str()).encode()
    return TokenizerFile(tokenizer.contract.model_copy(update=contract), data)


def ids_of(tokenizer: TokenizerFile, text: str) -> list[int]:
    """Return what the exported tokenizer.json makes of a text."""
    from tokenizers import Tokenizer

    ids: list[int] = Tokenizer.from_buffer(tokenizer_files(tokenizer, 64)["tokenizer.json"]).encode(text).ids
    return ids


def test_an_exported_tokenizer_begins_texts_as_training_does(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    from tokenizers import Tokenizer, processors

    tiny = tiny_tokenizer(tmp_path)
    reserved, words = tiny.contract.reserved, Tokenizer.from_buffer(tiny.data).decode([200, 201])
    wrapped = processors.TemplateProcessing(single="<bos> $A <eos>", special_tokens=[("<bos>", 1), ("<eos>", 2)])
    for change in (lambda model: None, lambda model: setattr(model, "post_processor", wrapped)):
        for before in ([], ["bos"], ["eos", "bos"]):
            ids = [reserved[name] for name in before]
            assert ids_of(with_model(tiny, change, before=before), words) == [*ids, 200, 201]
    plain = with_model(tiny, lambda model: None, before=[])
    assert tokenizer_files(plain, 64)["tokenizer.json"] == plain.data
    # Reserved ids after those of the model become special tokens with the names of the contract.
    model = json.loads(tiny.data)
    model["model"]["vocab"] = {f"x{n}" if n < 3 else piece: n for piece, n in model["model"]["vocab"].items()}
    moved = {"pad": 512, "bos": 513, "eos": 514}
    later = TokenizerFile(tiny.contract.model_copy(update={"reserved": reserved | moved}), json.dumps(model).encode())
    assert ids_of(later, words) == [513, 200, 201]
    settings = json.loads(tokenizer_files(later, 64)["tokenizer_config.json"])
    assert [settings[f"{name}_token"] for name in moved] == ["<pad>", "<bos>", "<eos>"]
    assert "does not begin texts" not in caplog.text
    taken = json.loads(later.data)
    taken["model"]["vocab"]["<bos>"] = taken["model"]["vocab"].pop("x0")
    assert ids_of(TokenizerFile(later.contract, json.dumps(taken).encode()), words) == [200, 201]
    assert "tokenizer.json does not begin texts with bos, as training does" in caplog.text


def sentencepiece_model(tmp_path: Path, algorithm: str, **options: object) -> TokenizerFile:
    import sentencepiece

    texts = [f"the quick brown fox {i} jumps, and the lazy dog sleeps {i * 7}\n" for i in range(400)]
    prefix = str(tmp_path / algorithm)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=prefix, vocab_size=480, model_type=algorithm, minloglevel=2,
        byte_fallback=True, normalization_rule_name="identity", remove_extra_whitespaces=False,
        **({"add_dummy_prefix": False} | options),
        control_symbols=[f"<{name}>" for name in RESERVED if name not in ("pad", "bos", "eos")], hard_vocab_limit=False,
        pad_id=0, bos_id=1, eos_id=2, unk_id=3, pad_piece="<pad>", bos_piece="<bos>", eos_piece="<eos>",
    )  # fmt: skip
    data = Path(f"{prefix}.model").read_bytes()
    processor = sentencepiece.SentencePieceProcessor(model_proto=data)
    reserved = {name: processor.piece_to_id(f"<{name}>") for name in RESERVED}
    size = processor.get_piece_size()
    contract = TokenizerContract(
        kind="sentencepiece", sha256="0" * 64, vocab_size=size, reserved=reserved, before=["bos"], after=["eos"]
    )
    return TokenizerFile(contract, data)


def test_a_sentencepiece_model_goes_along_with_an_equal_tokenizer_json(tmp_path: Path) -> None:
    import sentencepiece

    tokenizer = sentencepiece_model(tmp_path, "bpe")
    folder = exported(tmp_path / "llama", tokenizer)
    assert (folder / "tokenizer.model").read_bytes() == tokenizer.data
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings["tokenizer_class"], settings["unk_token"]) == ("PreTrainedTokenizerFast", "<unk>")
    loaded = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.data)
    for text in ("the quick fox", "  two  spaces ", "é中 12", "a</s><bos> x"):
        assert loaded(text)["input_ids"] == [1, *processor.encode(text)]
        assert loaded.decode(loaded(text)["input_ids"][1:]) == text


def test_a_model_that_adds_a_space_is_loaded_as_llama(tmp_path: Path) -> None:
    tokenizer = sentencepiece_model(tmp_path, "bpe", add_dummy_prefix=True)
    folder = exported(tmp_path / "llama", tokenizer)
    assert not (folder / "tokenizer.json").exists()
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings["tokenizer_class"], settings["add_prefix_space"]) == ("LlamaTokenizer", True)


@pytest.fixture(scope="module")
def texts(shared_data: Path) -> list[str]:
    """Real texts of three kinds, with the characters that tokenizers treat specially."""
    found = []
    for name in ("abc_news", "gutenberg", "speeches"):
        with gzip.open(shared_data / "text" / f"{name}.jsonl.gz", "rt", encoding="utf-8") as lines:
            found += [json.loads(line)["text"][:8000] for line in islice(lines, 20)]
    return found


def check_equal(tokenizer: TokenizerFile, texts: list[str]) -> None:
    """Assert that the tokenizer.json gives the ids of the SentencePiece model on escaped texts, and the texts back."""
    import sentencepiece
    from tokenizers import Tokenizer

    fast = Tokenizer.from_buffer(tokenizer_files(tokenizer, 64)["tokenizer.json"])
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.data)
    for text in texts:
        ids = fast.encode(text, add_special_tokens=False).ids
        assert ids == processor.encode(escape(text)), text[:80]
        assert fast.decode(ids, skip_special_tokens=False) == text
    assert fast.encode("the").ids == [tokenizer.contract.reserved["bos"], *processor.encode("the")]


ODD = [
    "",
    " ",
    "  a  b ",
    "\n\n a\n",
    "\u2581a \u2581",
    "\ufdd01 \ufdd0",
    "<s></s><bos>",
    "a" * 300,
    "é中🙂\U0010ffff\0\t",
]
ODD += ["aaaa bbb abababab " * 9, "1234567890 3.14", "\u00a0x\u200b", "\ufdd00\u2581"]


def test_ids_are_equal_on_odd_and_random_texts(tmp_path: Path) -> None:
    rng = random.Random(0)
    drawn = ["".join(rng.choices("aabcde  \nthequick\u2581\ufdd0é1", k=rng.randrange(60))) for _ in range(400)]
    check_equal(sentencepiece_model(tmp_path, "bpe", user_defined_symbols=["\n"]), [*ODD, *drawn])
    check_equal(sentencepiece_model(tmp_path, "bpe"), [*ODD, *drawn])


def test_ids_are_equal_on_real_text(texts: list[str], tmp_path: Path) -> None:
    data = train_tokenizer(texts[::2], TokenizerConfig(vocab_size=3000))
    contract = load_tokenizer(data, "sentencepiece", TokenizerConfig(vocab_size=3000)).contract
    check_equal(TokenizerFile(contract, data), texts)


def test_a_unigram_model_is_refused(tmp_path: Path) -> None:
    tokenizer = sentencepiece_model(tmp_path, "unigram")
    with pytest.raises(ConfigError, match="expected a SentencePiece model of kind bpe, got another"):
        exported(tmp_path / "llama", tokenizer)
    assert not (tmp_path / "llama").exists()
