"""Tokenizers beside an exported model: the file as it is, and settings with which `transformers` cuts texts alike."""

import json
from pathlib import Path

import pytest
import torch

from schemas.errors import ConfigError
from schemas.tokens import RESERVED, TokenizerContract, open_dataset
from tests.support.model_oracle import TINY, small_model
from tests.support.tiny_dataset import make_tiny_dataset

pytest.importorskip("safetensors")
from train.export.llama import TokenizerFile, export_llama


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
    assert (folder / "tokenizer.json").read_bytes() == tokenizer.data
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
    assert loaded(" ".join(words))["input_ids"] == ours.encode(" ".join(words)).ids
    drawn = transformers.LlamaForCausalLM.from_pretrained(folder).generate(
        torch.tensor([[reserved["bos"], 200]]), max_new_tokens=20
    )
    assert not set(drawn[0, 1:].tolist()) & (set(reserved.values()) - {reserved["eos"]})


def sentencepiece_model(tmp_path: Path, algorithm: str) -> TokenizerFile:
    import sentencepiece

    texts = [f"the quick brown fox {i} jumps, and the lazy dog sleeps {i * 7}\n" for i in range(400)]
    prefix = str(tmp_path / algorithm)
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts), model_prefix=prefix, vocab_size=480, model_type=algorithm, minloglevel=2,
        byte_fallback=True, add_dummy_prefix=False, normalization_rule_name="identity", remove_extra_whitespaces=False,
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


def test_a_sentencepiece_model_goes_along(tmp_path: Path) -> None:
    import sentencepiece

    tokenizer = sentencepiece_model(tmp_path, "bpe")
    folder = exported(tmp_path / "llama", tokenizer)
    assert (folder / "tokenizer.model").read_bytes() == tokenizer.data
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    assert (settings["tokenizer_class"], settings["unk_token"], settings["add_prefix_space"]) == (
        "LlamaTokenizer",
        "<unk>",
        False,
    )
    loaded = pytest.importorskip("transformers").AutoTokenizer.from_pretrained(folder)
    processor = sentencepiece.SentencePieceProcessor(model_proto=tokenizer.data)
    for text in ("the quick fox", "  two  spaces ", "é中 12", "a</s><bos> x"):
        assert loaded(text)["input_ids"] == [1, *processor.encode(text)]
        assert loaded.decode(loaded(text)["input_ids"][1:]) == text


def test_a_unigram_model_is_refused(tmp_path: Path) -> None:
    tokenizer = sentencepiece_model(tmp_path, "unigram")
    with pytest.raises(ConfigError, match="expected a SentencePiece model of kind bpe, got another"):
        exported(tmp_path / "llama", tokenizer)
    assert not (tmp_path / "llama").exists()
