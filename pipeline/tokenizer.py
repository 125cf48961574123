"""The tokenizer: trained by SentencePiece so that every text comes back as it was, or a given model held to the same.

Reserved ids are control symbols: no text can produce them. Source of the algorithms: Kudo & Richardson 2018,
arXiv 1808.06226; byte fallback keeps any code point encodable.
"""

import hashlib
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt
import sentencepiece
from pydantic import Field

from schemas.config import Section, location
from schemas.errors import ConfigError
from schemas.tokens import RESERVED, TokenizerContract

Kind = Literal["sentencepiece", "huggingface"]
Ids = npt.NDArray[Any]
SPACE, ESCAPE = "\u2581", "\ue000"
ESCAPED = ((ESCAPE, ESCAPE + "\ue001"), (SPACE, ESCAPE + "\ue002"))
"""SentencePiece writes a space as U+2581, so a text's own U+2581 is written as a private pair, and so is the mark of it."""
LINE_CHARS = 4096
THREADS = 4
"""Threads of the training: the model's bytes depend on their number, so it is fixed."""
PROBES = (
    "Plain words, numbers 123,456.78 and (brackets).",
    "  two spaces  before, tabs\tand\n\nblank lines\n",
    "naïve café, Straße, Ελληνικά, Русский, العربية, हिन्दी, 中文字符, 日本語, 한국어",
    "emoji 👩‍👩‍👧 and \u2581 and \ue000 and e\u0301",
    "<s> </s> <pad> <mask> <|endoftext|> [CLS]",
)


class TokenizerConfig(Section):
    """The section `[tokenizer]` of a recipe."""

    model: str | None = location(None)
    """Path of a SentencePiece `.model` or a Hugging Face `tokenizer.json`; None: train one."""
    algorithm: Literal["bpe", "unigram"] = "bpe"
    """How a model is trained."""
    vocab_size: int = Field(32_000, ge=400)
    """Ids of a trained model, the 106 reserved and 256 byte ids included; at most 65,536 keeps tokens in 2 bytes."""
    sample_bytes: int = Field(100_000_000, ge=1)
    """Text to train on, about, chosen by hash of doc_id [bytes of UTF-8]."""
    character_coverage: float = Field(0.9995, gt=0, le=1)
    """Share of the sample's characters with a piece of their own; the rest are written as bytes."""
    split_digits: bool = True
    """Whether every digit is a piece of its own."""
    before: tuple[str, ...] = ("bos",)
    """Reserved tokens written before each document."""
    after: tuple[str, ...] = ("eos",)
    """Reserved tokens written after each document."""
    reserved: dict[str, str] = Field(default_factory=dict)
    """Tokens of a given model that serve as reserved ones, such as {eos = "<|endoftext|>"}; the rest get new ids."""
    allow_lossy: bool = False
    """Whether a given model may be used that does not give every text back."""


class Tokenizer(Protocol):
    """What the token stage and the tests need of either kind."""

    contract: TokenizerContract

    def encode(self, text: str) -> Ids: ...
    def encode_batch(self, texts: Sequence[str]) -> list[Ids]: ...
    def decode(self, ids: Sequence[int] | Ids) -> str: ...


def tokenizer_kind(path: str) -> Kind:
    """The kind of a model file, by its suffix."""
    return "huggingface" if path.endswith(".json") else "sentencepiece"


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig) -> bytes:
    """The bytes of a SentencePiece model trained on the texts in their order.

    Raises ConfigError if the sample is too small for the vocabulary.
    """
    model = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=training_lines(texts),
            model_writer=model,
            model_type=config.algorithm,
            vocab_size=config.vocab_size,
            character_coverage=config.character_coverage,
            normalization_rule_name="identity",
            remove_extra_whitespaces=False,
            add_dummy_prefix=False,
            byte_fallback=True,
            split_digits=config.split_digits,
            pad_id=0,
            bos_id=1,
            eos_id=2,
            unk_id=3,
            control_symbols=[f"<{name}>" for name in RESERVED[3:]],
            user_defined_symbols=["\n"],
            shuffle_input_sentence=False,
            input_sentence_size=0,
            max_sentence_length=1 << 20,
            num_threads=THREADS,
            minloglevel=2,
        )
    except RuntimeError as error:
        largest = re.search(r"<= (\d+)", str(error))
        hint = f"set it to at most {largest.group(1)}" if largest else f"SentencePiece says: {error}"
        raise ConfigError(
            f"tokenizer.vocab_size: promised {config.vocab_size} pieces, the sample does not hold them; {hint}, "
            "or give more text"
        ) from error
    return model.getvalue()


def training_lines(texts: Iterable[str]) -> Iterator[str]:
    """The lines of the texts, escaped; long ones are cut, empty ones left out."""
    for text in texts:
        for line in escape(text).split("\n"):
            for start in range(0, len(line), LINE_CHARS):
                yield line[start : start + LINE_CHARS]


def escape(text: str) -> str:
    """The text with U+2581 and the escape mark written as pairs; `unescape` reverses it."""
    for plain, pair in ESCAPED:
        if plain in text:
            text = text.replace(plain, pair)
    return text


def unescape(text: str) -> str:
    """The text that `escape` was given."""
    for plain, pair in reversed(ESCAPED):
        if pair in text:
            text = text.replace(pair, plain)
    return text


class SentencePiece:
    """A SentencePiece model: ours, or a given one whose missing reserved tokens get ids behind its vocabulary."""

    def __init__(self, data: bytes, config: TokenizerConfig):
        self._model = sentencepiece.SentencePieceProcessor(model_proto=data)
        size = self._model.vocab_size()
        found = {name: self._model.piece_to_id(f"<{name}>") for name in RESERVED}
        found |= {"pad": self._model.pad_id(), "bos": self._model.bos_id(), "eos": self._model.eos_id()}
        found |= {name: self._model.piece_to_id(piece) for name, piece in config.reserved.items()}
        usable = {name: number for name, number in found.items() if number >= 0 and self._model.is_control(number)}
        self.contract = _contract("sentencepiece", data, config, usable, size)

    def encode(self, text: str) -> Ids:
        """The ids of a text, no separators."""
        return np.asarray(self._model.encode(escape(text)), self.contract.dtype)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text, in one call; threads are left to Spark."""
        found = self._model.encode([escape(text) for text in texts], num_threads=1)
        return [np.asarray(ids, self.contract.dtype) for ids in found]

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text of ids; reserved ids give nothing."""
        size = self._model.vocab_size()
        return unescape(str(self._model.decode([int(i) for i in ids if i < size])))


class HuggingFace:
    """A Hugging Face tokenizer.json: special strings in a text are text, and reserved ids come behind the vocabulary."""

    def __init__(self, data: bytes, config: TokenizerConfig):
        import tokenizers

        self._model = tokenizers.Tokenizer.from_str(data.decode("utf-8"))
        self._model.encode_special_tokens = True
        self._model.no_truncation()
        self._model.no_padding()
        found = {name: self._model.token_to_id(piece) for name, piece in config.reserved.items()}
        usable = {name: number for name, number in found.items() if number is not None}
        self._size = self._model.get_vocab_size(with_added_tokens=True)
        self.contract = _contract("huggingface", data, config, usable, self._size)
        self._hidden = frozenset(self.contract.reserved.values())

    def encode(self, text: str) -> Ids:
        """The ids of a text, no separators."""
        return np.asarray(self._model.encode(text, add_special_tokens=False).ids, self.contract.dtype)

    def encode_batch(self, texts: Sequence[str]) -> list[Ids]:
        """The ids of each text."""
        found = self._model.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.asarray(item.ids, self.contract.dtype) for item in found]

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """The text of ids; reserved ids give nothing."""
        plain = [int(i) for i in ids if i < self._size and int(i) not in self._hidden]
        return str(self._model.decode(plain, skip_special_tokens=False))


def _contract(kind: Kind, data: bytes, config: TokenizerConfig, usable: dict[str, int], size: int) -> TokenizerContract:
    for field in ("before", "after"):
        if wrong := [name for name in getattr(config, field) if name not in RESERVED]:
            raise ConfigError(f"tokenizer.{field}: promised reserved tokens ({', '.join(RESERVED[:5])}), found {wrong}")
    if wrong := [name for name in config.reserved if name not in usable]:
        raise ConfigError(f"tokenizer.reserved: promised tokens of the model, found no special token for {wrong}")
    missing = [name for name in RESERVED if name not in usable]
    return TokenizerContract(
        kind=kind,
        sha256=hashlib.sha256(data).hexdigest(),
        vocab_size=size + len(missing),
        reserved={name: usable[name] if name in usable else size + missing.index(name) for name in RESERVED},
        before=list(config.before),
        after=list(config.after),
    )


def load_tokenizer(data: bytes, kind: Kind, config: TokenizerConfig) -> Tokenizer:
    """The tokenizer of a model file. Raises ConfigError if it cannot be read, or loses text and may not."""
    try:
        tokenizer: Tokenizer = (SentencePiece if kind == "sentencepiece" else HuggingFace)(data, config)
    except ConfigError:
        raise
    except Exception as error:
        raise ConfigError(f"tokenizer.model: promised a {kind} model, found {type(error).__name__}: {error}") from error
    for probe in () if config.allow_lossy else PROBES:
        back = tokenizer.decode(tokenizer.encode(probe))
        if back != probe:
            raise ConfigError(
                f"tokenizer.model: promised to give every text back, found {probe!r} come back as {back!r}; "
                "use another model or set tokenizer.allow_lossy"
            )
    return tokenizer
