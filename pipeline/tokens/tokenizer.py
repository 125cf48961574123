"""Tokenizers: a SentencePiece model trained on a sample, or a given one, under a contract that text cannot break.

decode(encode(text)) == text, and no text encodes to a reserved id. So nothing is normalised, bytes stand in for unknown
characters, reserved tokens are control symbols, and the one character that SentencePiece would lose is escaped.
"""

import hashlib
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from schemas.config import Section, location, suggest_name
from schemas.errors import ConfigError
from schemas.tokens import RESERVED, TokenizerContract, escape, unescape

Kind = Literal["sentencepiece", "huggingface"]
Ids = npt.NDArray[np.unsignedinteger[Any]]
Encode = Callable[[str], Sequence[int] | npt.NDArray[np.int32]]
Decode = Callable[[list[int]], str]
LoadedModel = tuple[Encode, Decode, int, dict[str, int]]
"""Of a model: how to encode and decode, the number of its ids, and those that play reserved roles."""

LINE_CHARS = 2048
"""Longest line the trainer sees; it would leave out longer ones than its own limit [characters]."""
CHUNK_CHARS = 1 << 14
"""A long text is encoded in pieces of about this size, cut behind newlines: BPE is three times faster (measured), and a
unigram model, whose float sums would differ, is not cut [characters]."""
SENTENCEPIECE_TOKENS = ("pad", "bos", "eos", "unk")
"""Pieces for which SentencePiece has settings of their own."""
THREADS = 4
"""Threads of the trainer: the model's bytes depend on their number, so it is not a setting."""

PROBE_TEXTS = (
    *("", " ", "  two  spaces  ", "line\nbreak\r\n\n\ttab", "\0", "é e\u0301 ﬁ ½ Å № ＡＢ", "\ufeff\u200b\u00a0x"),
    *("中文，日本語、한국어 ไทย", "العربية हिन्दी עברית", "😀👩‍👩‍👧🇩🇪", "\u2581a \u2581", "\ufdd01 \ufffd⁇ <unk>"),
    *("<s></s><pad><bos><mask><sentinel_0>[MASK]<|endoftext|><0x0A>", "a" * 300, "1234567890 3.14", "I 'm \U0010ffff"),
)  # fmt: skip
"""Texts on which normalising, guessing or injectable tokenizers give themselves away."""

TRAIN_SETTINGS = frozenset({"algorithm", "vocab_size", "sample_bytes", "character_coverage", "split_digits"})
LOAD_SETTINGS = frozenset({"special", "allow_lossy"})
"""Settings that only matter without, and with, a given model."""


class TokenizerConfig(Section):
    """A tokenizer to train, or a given one, and where it puts separators."""

    model: str | None = location(None)
    """Path of a SentencePiece model or a Hugging Face `tokenizer.json`; None = train one on a sample of clean text."""
    algorithm: Literal["bpe", "unigram"] = "bpe"
    """What to train: byte-pair merges (Sennrich et al. 2016) or a unigram model (Kudo 2018, arXiv 1804.10959)."""
    vocab_size: int = Field(32_000, ge=400, le=1 << 20)
    """Ids of the trained model, the 106 reserved and unknown ones, 256 bytes and the newline included."""
    sample_bytes: int = Field(64 << 20, ge=1, le=1 << 30)
    """Most text the model is trained on [bytes of UTF-8]."""
    character_coverage: float = Field(0.9995, gt=0, le=1)
    """Share of the sample's characters that get an id; the rest is written as bytes. Default: SentencePiece's own."""
    split_digits: bool = True
    """Whether every digit is a token of its own (Llama: Touvron et al. 2023, arXiv 2302.13971, section 2.1)."""
    before: tuple[str, ...] = ("bos",)
    """Reserved tokens before each document."""
    after: tuple[str, ...] = ("eos",)
    """Reserved tokens after each document."""
    special: dict[str, str] = Field(default_factory=dict)
    """Tokens of the given model by the reserved role they play, such as {eos = "<|endoftext|>"}; roles without one get
    new ids behind the vocabulary."""
    allow_lossy: bool = False
    """Whether a given model may change text, as normalising ones do; its tokens then stand for other bytes."""

    @model_validator(mode="after")
    def _used(self) -> "TokenizerConfig":
        names = (*self.before, *self.after, *self.special)
        wrong = [f"{name!r}{suggest_name(name, RESERVED[:5])}" for name in names if name not in RESERVED]
        if wrong:
            raise ValueError(f"no such reserved token: {', '.join(wrong)}")
        ignored = sorted((LOAD_SETTINGS if self.model is None else TRAIN_SETTINGS) & self.model_fields_set)
        if ignored:
            without = "without" if self.model is None else "with"
            raise ValueError(f"{', '.join(ignored)} would be ignored {without} a given model")
        return self


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig) -> bytes:
    """The bytes of a SentencePiece model, the same for the same texts and settings.

    Raises ConfigError if the sample does not allow the vocabulary; an error of the iterator passes through.
    """
    import sentencepiece

    failed: list[Exception] = []

    def guarded() -> Iterator[str]:
        try:
            yield from training_lines(texts)
        except Exception as error:
            failed.append(error)
            raise

    model = io.BytesIO()
    options: dict[str, Any] = {
        "model_type": config.algorithm,
        "vocab_size": config.vocab_size,
        "character_coverage": config.character_coverage,
        "split_digits": config.split_digits,
        "normalization_rule_name": "identity",
        "remove_extra_whitespaces": False,
        "add_dummy_prefix": False,
        "byte_fallback": True,
        "max_sentence_length": 8 * LINE_CHARS,
        "num_threads": THREADS,
        "control_symbols": [f"<{name}>" for name in RESERVED if name not in SENTENCEPIECE_TOKENS],
        "user_defined_symbols": ["\n"],  # never merged, so that texts may be cut behind it
        "minloglevel": 2,
    }
    for number, name in enumerate(SENTENCEPIECE_TOKENS):
        options |= {f"{name}_id": number, f"{name}_piece": f"<{name}>"}
    try:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=guarded(), model_writer=model, **options)
    except RuntimeError as error:
        if failed:
            raise failed[0] from None
        raise _explained(str(error), config) from error
    return model.getvalue()


def training_lines(texts: Iterable[str]) -> Iterator[str]:
    """The lines of the texts as the trainer sees them: escaped, without newlines, long ones cut before a space."""
    for text in texts:
        for line in escape(text).split("\n"):
            start = 0
            while len(line) - start > LINE_CHARS:
                end = line.rfind(" ", start + 1, start + LINE_CHARS)
                end = end if end > 0 else start + LINE_CHARS
                yield line[start:end]
                start = end
            if start < len(line):
                yield line[start:]


def _explained(message: str, config: TokenizerConfig) -> ConfigError:
    """SentencePiece's complaint as advice."""
    where = f"tokenizer.vocab_size: expected {config.vocab_size} pieces, the sample"
    if limit := re.search(r"value <= (\d+)", message):
        return ConfigError(
            f"{where} has at most {limit[1]}; set vocab_size = {limit[1]} or less, or take a larger sample"
        )
    if needed := re.search(r"\d+ vs (\d+)", message):
        advice = "set a larger vocab_size or a smaller character_coverage"
        return ConfigError(f"{where}'s characters, bytes and reserved ids alone are {needed[1]}; {advice}")
    if "sentences_.empty()" in message:
        return ConfigError("tokenizer: expected text to train on, got none. Take a larger sample or give a model.")
    return ConfigError(f"tokenizer: SentencePiece could not train: {message.strip()}")


class Tokenizer:
    """A loaded model under its contract; both kinds look alike from outside."""

    def __init__(self, contract: TokenizerContract, encode: Encode, decode: Decode, cuttable: bool):
        self.contract = contract
        self._encode, self._decode, self._cuttable = encode, decode, cuttable
        self._reserved = np.array(sorted(contract.reserved.values()))

    def encode(self, text: str) -> Ids:
        """The ids of a text, without separators, in the contract's integer type."""
        if self._cuttable and len(text) > 2 * CHUNK_CHARS:
            return np.concatenate([self._ids(piece) for piece in cut_at_newlines(text)])
        return self._ids(text)

    def encode_batch(self, texts: Iterable[str]) -> list[Ids]:
        """The ids of each text."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text of some ids; reserved ones have none."""
        array = np.asarray(ids, np.int64)
        return self._decode(array[~np.isin(array, self._reserved)].tolist())

    def _ids(self, text: str) -> Ids:
        return np.asarray(self._encode(text)).astype(self.contract.dtype)


def cut_at_newlines(text: str) -> list[str]:
    """The text in pieces of at least CHUNK_CHARS that end behind a newline, the last one excepted."""
    pieces, start = [], 0
    while start < len(text):
        end = text.find("\n", start + CHUNK_CHARS) + 1 or len(text)
        pieces.append(text[start:end])
        start = end
    return pieces


def tokenizer_kind(path: str) -> Kind:
    """Which library reads a model file, by its name."""
    return "huggingface" if path.endswith(".json") else "sentencepiece"


def load_tokenizer(model: bytes | str | Path, kind: Kind, config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of a model (its bytes or path). Raises ConfigError if the model breaks the contract."""
    data = model if isinstance(model, bytes) else Path(model).read_bytes()
    load = _load_huggingface if kind == "huggingface" else _load_sentencepiece
    encode, decode, size, found = load(data, config)
    reserved, end = {}, size
    for name in RESERVED:
        reserved[name] = found.get(name, end)
        end += name not in found
    digest, separators = hashlib.sha256(data).hexdigest(), {"before": list(config.before), "after": list(config.after)}
    contract = TokenizerContract(kind=kind, sha256=digest, vocab_size=end, reserved=reserved, **separators)
    cuttable = config.model is None and config.algorithm == "bpe"
    return _probed(Tokenizer(contract, encode, decode, cuttable), config)


def _load_sentencepiece(data: bytes, config: TokenizerConfig) -> LoadedModel:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_proto=data)
    own = {"pad": model.pad_id(), "bos": model.bos_id(), "eos": model.eos_id()}
    found = {name: number for name, number in own.items() if number >= 0}
    for name in RESERVED:
        piece = config.special.get(name, f"<{name}>")
        number = model.piece_to_id(piece)
        if model.is_control(number) and model.id_to_piece(number) == piece:
            found[name] = number
        elif name in config.special:
            raise ConfigError(f"tokenizer.special.{name}: the model has no control symbol {piece!r}; name another")

    def encode(text: str) -> Any:
        return model.encode_as_numpy(escape(text))

    return encode, lambda ids: unescape(model.decode(ids)), model.get_piece_size(), found


def _load_huggingface(data: bytes, config: TokenizerConfig) -> LoadedModel:
    import tokenizers

    model = tokenizers.Tokenizer.from_buffer(data)
    model.encode_special_tokens = True  # "</s>" in a text is text
    model.no_padding()
    model.no_truncation()
    found = {}
    for name, token in config.special.items():
        number = model.token_to_id(token)
        if number is None:
            raise ConfigError(f"tokenizer.special.{name}: the model has no token {token!r}; name one that it has")
        found[name] = number

    def encode(text: str) -> Any:
        return model.encode(text, add_special_tokens=False).ids

    return encode, lambda ids: model.decode(ids, skip_special_tokens=False), max(model.get_vocab().values()) + 1, found


def _probed(tokenizer: Tokenizer, config: TokenizerConfig) -> Tokenizer:
    """The tokenizer, if it holds its contract on texts that break most. Raises ConfigError with the first that does."""
    reserved = {number: name for name, number in tokenizer.contract.reserved.items()}
    for text in (*PROBE_TEXTS, *config.special.values()):
        ids = tokenizer.encode(text)
        injected = [reserved[number] for number in ids.tolist() if number in reserved]
        if injected:
            raise ConfigError(
                f"tokenizer.model: expected reserved ids that no text produces, got {injected[0]!r} for {text!r}. "
                "Name a special token of the model in tokenizer.special."
            )
        back = tokenizer.decode(ids)
        if back != text and not config.allow_lossy:
            raise ConfigError(
                f"tokenizer.model: expected decode(encode(x)) == x, got {back!r} for {text!r}. Give a byte-level "
                "model without normaliser, or set tokenizer.allow_lossy = true."
            )
    return tokenizer
