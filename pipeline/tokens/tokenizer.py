"""Tokenizers: a SentencePiece model trained on a sample of the text, or a model that the recipe names.

Both must meet one contract: decode(encode(text)) == text, and no text encodes to a reserved id. Therefore text is not
normalized, unknown characters are encoded as bytes, and reserved tokens are control symbols. The one character that
SentencePiece would change is escaped.
"""

import hashlib
import io
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from pydantic import Field, model_validator

from schemas.config import Section, location, suggest_name
from schemas.errors import ConfigError
from schemas.tokens import RESERVED, TokenizerContract, encode_exactly, escape, unescape

Kind = Literal["sentencepiece", "huggingface"]
Ids = npt.NDArray[np.unsignedinteger[Any]]
Encode = Callable[[str], Sequence[int] | npt.NDArray[np.int32]]
Decode = Callable[[list[int]], str]
LoadedModel = tuple[Encode, Decode, int, dict[str, int]]
"""A loaded model: its encode and decode functions, its number of ids, and the ids of its reserved tokens by name."""

LINE_CHARS = 2048
"""Maximum length of a line passed to the SentencePiece trainer, which ignores lines that are too long [characters]."""
CHUNK_CHARS = 1 << 14
"""Approximate length of the spans in which a long text is encoded, each ending after a newline [characters].

BPE was measured to be three times faster this way. A unigram model encodes the text as a whole, because its sums of
floats would differ."""
SENTENCEPIECE_TOKENS = ("pad", "bos", "eos", "unk")
"""Reserved tokens for which SentencePiece has separate settings (`pad_id`, `pad_piece`, ...)."""
THREADS = 4
"""Number of trainer threads. The model's bytes depend on it, so it is not a setting."""

PROBE_TEXTS = (
    *("", " ", "  two  spaces  ", "line\nbreak\r\n\n\ttab", "\0", "é e\u0301 ﬁ ½ Å № ＡＢ", "\ufeff\u200b\u00a0x"),
    *("中文，日本語、한국어 ไทย", "العربية हिन्दी עברית", "😀👩‍👩‍👧🇩🇪", "\u2581a \u2581", "\ufdd01 \ufffd⁇ <unk>"),
    *("``a'' “b” ‘c’ „d“ «e» – — … − × · •", "$ € £ ¥ § © ® ™ ° µ"),
    *("<s></s><pad><bos><mask><sentinel_0>[MASK]<|endoftext|><0x0A>", "a" * 300, "1234567890 3.14", "I 'm \U0010ffff"),
)  # fmt: skip
"""Texts that a tokenizer does not reproduce if it normalizes or drops characters, or if text can encode to its special
tokens."""

TRAIN_SETTINGS = frozenset({"algorithm", "vocab_size", "sample_bytes", "character_coverage", "split_digits"})
"""Settings that apply only if a model is trained, which is if `tokenizer.model` is not set."""
LOAD_SETTINGS = frozenset({"special", "allow_lossy"})
"""Settings that apply only to the model that `tokenizer.model` names."""


MIN_COVERAGE = 0.98
"""Smallest share of the characters that SentencePiece accepts as its coverage."""


class TokenizerConfig(Section):
    """Settings of the tokenizer: a model to train or to load, and the separators before and after each document."""

    REPLACES: ClassVar = {"model": TRAIN_SETTINGS}

    model: str | None = location(None)
    """Path of a SentencePiece model or a Hugging Face `tokenizer.json`, or a run folder whose tokenizer is used; None =
    train one on a sample of clean text."""
    algorithm: Literal["bpe", "unigram"] = "bpe"
    """Algorithm to train: byte-pair encoding (Sennrich et al. 2016) or a unigram model (Kudo 2018, arXiv
    1804.10959)."""
    vocab_size: int = Field(32_000, ge=400, le=1 << 20)
    """Number of ids of the trained model, including the 106 reserved and unknown ids, 256 bytes and the newline."""
    sample_bytes: int = Field(64 << 20, ge=1, le=1 << 30)
    """Maximum amount of text that the model is trained on [bytes of UTF-8]."""
    character_coverage: float = Field(0.9995, ge=MIN_COVERAGE, le=1)
    """Share of the sample's characters that get an id; the rest is encoded as bytes. Default: SentencePiece's own.
    Unless it is set, it is lowered if `vocab_size` does not hold that many characters."""
    split_digits: bool = True
    """True to make every digit a separate token (Llama: Touvron et al. 2023, arXiv 2302.13971, section 2.1)."""
    before: tuple[str, ...] = ("bos",)
    """Names of the reserved tokens that are inserted before each document."""
    after: tuple[str, ...] = ("eos",)
    """Names of the reserved tokens that are inserted after each document."""
    special: dict[str, str] = Field(default_factory=dict)
    """The special token of `model` for each reserved name, such as {eos = "<|endoftext|>"}. Reserved names that are not
    listed get new ids after the vocabulary."""
    allow_lossy: bool = False
    """True to accept a `model` that does not reproduce every text, such as one that normalizes it."""

    @model_validator(mode="after")
    def _used(self) -> "TokenizerConfig":
        used = (*self.before, *self.after, *self.special)
        unknown = [f"{name!r}{suggest_name(name, RESERVED[:5])}" for name in used if name not in RESERVED]
        if unknown:
            raise ValueError(
                f"before, after, special: expected names of reserved tokens, got {', '.join(unknown)}. "
                f"Correct them in [tokenizer]; valid names are {', '.join(RESERVED[:5])}, ...."
            )
        ignored = sorted((LOAD_SETTINGS if self.model is None else TRAIN_SETTINGS) & self.model_fields_set)
        if ignored:
            names = ", ".join(ignored)
            if self.model is None:
                raise ValueError(f"{names} would be ignored, because tokenizer.model is not set. Set tokenizer.model.")
            raise ValueError(
                f"{names} would be ignored, because tokenizer.model is set. Remove {names} from [tokenizer], or "
                f"add {' '.join(f'--unset tokenizer.{name}' for name in ignored)}."
            )
        return self


class AlphabetTooLarge(ConfigError):
    """The vocabulary size is below the number of characters, bytes and reserved ids that a model must have."""

    def __init__(self, message: str, num_needed: int):
        super().__init__(message)
        self.num_needed = num_needed
        """Number of ids that the model must have, without any merge."""


MERGE_SHARE = 0.25
"""Share of the ids besides bytes and reserved ones that `fitting_coverage` leaves to merges of characters."""
MIN_CHARACTERS = 64
"""Minimum number of characters that `fitting_coverage` leaves in a vocabulary."""


class FittingAlphabet(NamedTuple):
    """The characters of a sample for which a vocabulary suffices."""

    share: float
    """Their share of the sample's characters."""
    num_lost: int
    """Number of characters that lose their id."""
    rare: frozenset[str]
    """All other characters of the sample."""


def fitting_coverage(texts: Iterable[str], config: TokenizerConfig, num_needed: int) -> FittingAlphabet | None:
    """Return the most frequent characters of a sample for which `vocab_size` suffices.

    `num_needed`: number of ids that all characters of `character_coverage` need, bytes and reserved ids included. None
    if even the most frequent characters do not fit.
    """
    counts = Counter(character for line in training_lines(texts) for character in line)
    frequent, total = sorted(counts.items(), key=lambda item: (-item[1], item[0])), counts.total()
    covered = list(accumulate(number for _, number in frequent))
    num_required = bisect_left(covered, config.character_coverage * total) + 1
    num_kept = int((1 - MERGE_SHARE) * (config.vocab_size - (num_needed - num_required)))
    if not MIN_CHARACTERS <= num_kept < num_required:
        return None
    rare = frozenset(character for character, _ in frequent[num_kept:])
    return FittingAlphabet(covered[num_kept - 1] / total, num_required - num_kept, rare)


def train_tokenizer(texts: Iterable[str], config: TokenizerConfig, without: Collection[str] = ()) -> bytes:
    """Train a SentencePiece model and return the bytes of its file; the same texts and settings give the same bytes.

    `without`: characters that are left out of the texts, so that they are encoded as bytes. Raises AlphabetTooLarge if
    the vocabulary does not hold the characters of the texts, and another ConfigError if it is too large for them.
    Exceptions raised by `texts` are re-raised.
    """
    import sentencepiece

    errors: list[Exception] = []

    def guarded_lines() -> Iterator[str]:
        try:
            yield from (
                (line.translate(left_out) for line in training_lines(texts)) if without else training_lines(texts)
            )
        except Exception as error:
            errors.append(error)
            raise

    left_out = str.maketrans(dict.fromkeys(without))
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
        "user_defined_symbols": ["\n"],  # never merged, so that texts may be cut after it
        "minloglevel": 2,
    }
    for number, name in enumerate(SENTENCEPIECE_TOKENS):
        options |= {f"{name}_id": number, f"{name}_piece": f"<{name}>"}
    try:
        sentencepiece.SentencePieceTrainer.train(sentence_iterator=guarded_lines(), model_writer=model, **options)
    except RuntimeError as error:
        if errors:
            raise errors[0] from None
        raise _training_error(str(error), config) from error
    return model.getvalue()


def training_lines(texts: Iterable[str]) -> Iterator[str]:
    """Yield the lines of the texts for the trainer, escaped and without newlines.

    A line longer than LINE_CHARS is divided before a space if possible.
    """
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


def _training_error(message: str, config: TokenizerConfig) -> ConfigError:
    """Return a ConfigError that names the setting to change. `message` is the error of the SentencePiece trainer."""
    where = f"tokenizer.vocab_size: expected {config.vocab_size} pieces, got a sample of text"
    if limit := re.search(r"value <= (\d+)", message):
        return ConfigError(f"{where} that has at most {limit[1]}. Set tokenizer.vocab_size to at most {limit[1]}.")
    if needed := re.search(r"\d+ vs (\d+)", message):
        return AlphabetTooLarge(
            f"{where} whose characters, bytes and reserved ids alone are {needed[1]}. "
            f"Set tokenizer.vocab_size to at least {needed[1]}.",
            int(needed[1]),
        )
    if "sentences_.empty()" in message:
        return ConfigError("tokenizer: expected text to train on, got none. Increase tokenizer.sample_bytes.")
    return ConfigError(
        f"tokenizer: expected SentencePiece to train a model, got: {message.strip()}. "
        "Set tokenizer.model to the path of a trained model."
    )


class Tokenizer:
    """A loaded SentencePiece or Hugging Face model with the same methods for both, and its TokenizerContract."""

    def __init__(self, contract: TokenizerContract, encode: Encode, decode: Decode, cuttable: bool):
        self.contract = contract
        self._encode, self._decode, self._cuttable = encode, decode, cuttable
        self._reserved = np.array(sorted(contract.reserved.values()))

    def encode(self, text: str) -> Ids:
        """Return the token ids of a text, without separators, in the contract's integer type."""
        if self._cuttable and len(text) > 2 * CHUNK_CHARS:
            return np.concatenate([self._ids(span) for span in cut_at_newlines(text)])
        return self._ids(text)

    def encode_batch(self, texts: Iterable[str]) -> list[Ids]:
        """Return the token ids of each text, as `encode` does."""
        return [self.encode(text) for text in texts]

    def decode(self, ids: Sequence[int] | Ids) -> str:
        """Return the text that token ids represent; reserved ids are skipped."""
        array = np.asarray(ids, np.int64)
        return self._decode(array[~np.isin(array, self._reserved)].tolist())

    def _ids(self, text: str) -> Ids:
        return np.asarray(self._encode(text)).astype(self.contract.dtype)


def cut_at_newlines(text: str) -> list[str]:
    """Divide a text after newlines into spans longer than CHUNK_CHARS characters. Only the last span may be shorter.

    The spans together are the whole text.
    """
    spans, start = [], 0
    while start < len(text):
        end = text.find("\n", start + CHUNK_CHARS) + 1 or len(text)
        spans.append(text[start:end])
        start = end
    return spans


def tokenizer_kind(path: str) -> Kind:
    """Return the library that loads a model file: Hugging Face if its name ends in `.json`, else SentencePiece."""
    return "huggingface" if path.endswith(".json") else "sentencepiece"


def load_tokenizer(model: bytes | str | Path, kind: Kind, config: TokenizerConfig) -> Tokenizer:
    """Load a tokenizer model, given by its bytes or its path. Raises ConfigError if it does not meet the contract."""
    data = model if isinstance(model, bytes) else Path(model).read_bytes()
    load = _load_huggingface if kind == "huggingface" else _load_sentencepiece
    encode, decode, size, existing = load(data, config)
    reserved, end = {}, size
    for name in RESERVED:
        reserved[name] = existing.get(name, end)
        end += name not in existing
    digest, separators = hashlib.sha256(data).hexdigest(), {"before": list(config.before), "after": list(config.after)}
    contract = TokenizerContract(kind=kind, sha256=digest, vocab_size=end, reserved=reserved, **separators)
    cuttable = config.model is None and config.algorithm == "bpe"
    tokenizer = Tokenizer(contract, encode, decode, cuttable)
    _check_contract(tokenizer, config)
    return tokenizer


def _load_sentencepiece(data: bytes, config: TokenizerConfig) -> LoadedModel:
    import sentencepiece

    model = sentencepiece.SentencePieceProcessor(model_proto=data)
    builtin_ids = {"pad": model.pad_id(), "bos": model.bos_id(), "eos": model.eos_id()}
    reserved = {name: number for name, number in builtin_ids.items() if number >= 0}
    for name in RESERVED:
        piece = config.special.get(name, f"<{name}>")
        number = model.piece_to_id(piece)
        if model.is_control(number) and model.id_to_piece(number) == piece:
            reserved[name] = number
        elif name in config.special:
            raise ConfigError(
                f"tokenizer.special.{name}: expected a control symbol of the model, got {piece!r}. "
                f"Set tokenizer.special.{name} to a control symbol that the model has."
            )

    def encode(text: str) -> Any:
        return model.encode_as_numpy(escape(text))

    return encode, lambda ids: unescape(model.decode(ids)), model.get_piece_size(), reserved


def _load_huggingface(data: bytes, config: TokenizerConfig) -> LoadedModel:
    import tokenizers

    model = tokenizers.Tokenizer.from_buffer(data)
    encode_exactly(model)
    model.no_padding()
    model.no_truncation()
    reserved = {}
    for name, token in config.special.items():
        number = model.token_to_id(token)
        if number is None:
            raise ConfigError(
                f"tokenizer.special.{name}: expected a token of the model, got {token!r}. "
                f"Set tokenizer.special.{name} to a special token that the model has."
            )
        reserved[name] = number

    def encode(text: str) -> Any:
        return model.encode(text, add_special_tokens=False).ids

    return (
        encode,
        lambda ids: model.decode(ids, skip_special_tokens=False),
        max(model.get_vocab().values()) + 1,
        reserved,
    )


def _check_contract(tokenizer: Tokenizer, config: TokenizerConfig) -> None:
    """Encode and decode PROBE_TEXTS and the special tokens of `config`.

    Raises ConfigError if a text gives a reserved id. Raises ConfigError also if a decoded text differs from the
    original, unless `allow_lossy` is set.
    """
    reserved = {number: name for name, number in tokenizer.contract.reserved.items()}
    for text in (*PROBE_TEXTS, *config.special.values()):
        ids = tokenizer.encode(text)
        injected = [reserved[number] for number in ids.tolist() if number in reserved]
        if injected:
            raise ConfigError(
                f"tokenizer.model: expected no reserved ids in encoded text, got the id of {injected[0]!r} for "
                f"{text!r}. Set tokenizer.special.{injected[0]} to another special token of the model."
            )
        decoded = tokenizer.decode(ids)
        if decoded != text and not config.allow_lossy:
            raise ConfigError(
                f"tokenizer.model: expected decode(encode(x)) == x, got {decoded!r} for {text!r}. "
                "Set tokenizer.allow_lossy = true to accept a model that changes text."
            )
