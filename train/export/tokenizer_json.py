"""The `tokenizer.json` of an export: of a SentencePiece BPE model with equal ids for every text, or that of a dataset.

SentencePiece joins the pair of pieces whose joined piece has the highest score. So each way to divide a piece in two is
a merge, ranked by the score of the piece. Source: Sennrich et al. 2016, arXiv 1508.07909, and SentencePiece's `bpe`.
"""

from collections.abc import Iterator
from typing import Any

from schemas.logs import LOGGER
from schemas.tokens import ESCAPE, SPACE, TokenizerContract, remove_dropout

NORMAL, USER_DEFINED = 1, 4
"""Types of pieces in a SentencePiece model: learned ones, and symbols that are never joined with their neighbours."""


def problems_of(model: Any) -> list[str]:
    """Return why a SentencePiece model (a parsed ModelProto) has no equal `tokenizer.json`; empty if it has one."""
    trainer, normalizer = model.trainer_spec, model.normalizer_spec
    conditions = {
        "it is not of kind bpe": trainer.model_type != trainer.BPE,
        "it has no bytes for unknown characters": not trainer.byte_fallback,
        "it writes spaces after words": trainer.treat_whitespace_as_suffix,
        "it normalizes text": bool(normalizer.precompiled_charsmap) or normalizer.remove_extra_whitespaces,
        "it adds a space before a text": normalizer.add_dummy_prefix,
        "it does not escape spaces": not normalizer.escape_whitespaces,
    }
    return [problem for problem, applies in conditions.items() if applies]


def convert_sentencepiece(model: Any, contract: TokenizerContract) -> bytes:
    """Return the bytes of a `tokenizer.json` whose ids are those of the dataset. Call `problems_of` before.

    The escape sequences of the dataset for U+2581 are applied, so decoding returns every text unchanged. Reserved
    tokens are not recognized in a text; those before a document are added as in the dataset.
    """
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    pieces = [piece.piece for piece in model.pieces]
    merges = list(_merges(model))
    unknown = pieces[model.trainer_spec.unk_id]
    vocabulary = {piece: number for number, piece in enumerate(pieces)}
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, byte_fallback=True, fuse_unk=True)
    )
    # As `schemas.tokens.escape` and `unescape` do.
    escapes = [(ESCAPE, f"{ESCAPE}0"), (SPACE, f"{ESCAPE}1"), (" ", SPACE)]
    tokenizer.normalizer = normalizers.Sequence([normalizers.Replace(old, new) for old, new in escapes])
    own = [piece.piece.replace(SPACE, " ") for piece in model.pieces if piece.type == USER_DEFINED]
    if own:
        splits = [pre_tokenizers.Split(symbol, "isolated") for symbol in sorted(own, key=len, reverse=True)]
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence(splits)
    back = [decoders.Replace(f"{ESCAPE}1", SPACE), decoders.Replace(f"{ESCAPE}0", ESCAPE)]
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *back]
    )
    # A prompt is the beginning of a document, so the tokens after a document are not added.
    if contract.before:
        before = [pieces[contract.reserved[name]] for name in contract.before]
        special = [(piece, vocabulary[piece]) for piece in dict.fromkeys(before)]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=" ".join([*before, "$A"]), special_tokens=special
        )
    return str(tokenizer.to_str(pretty=False)).encode()


def _merges(model: Any) -> Iterator[tuple[str, str]]:
    """Yield the pairs of pieces that make a piece, best piece first."""
    numbers = {piece.piece: number for number, piece in enumerate(model.pieces) if piece.type == NORMAL}
    best_first = sorted(numbers, key=lambda piece: (-model.pieces[numbers[piece]].score, numbers[piece]))
    for piece in best_first:
        pairs = ((piece[:end], piece[end:]) for end in range(1, len(piece)))
        known = [pair for pair in pairs if pair[0] in numbers and pair[1] in numbers]
        yield from sorted(known, key=lambda pair: (numbers[pair[0]], numbers[pair[1]]))


def with_separators(data: bytes, contract: TokenizerContract) -> bytes:
    """Return a tokenizer.json of a dataset that adds to a text what begins documents, and nothing else.

    It is unchanged if it does so already, but the dropout of BPE is removed. Reserved tokens that its model does not
    have become special tokens. If their ids cannot be had, it is unchanged too, with a warning.
    """
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_buffer(data)
    if remove_dropout(tokenizer):  # training encodes without it
        data = str(tokenizer.to_str(pretty=False)).encode()
    tokenizer.no_padding()
    tokenizer.no_truncation()
    before = [contract.reserved[name] for name in contract.before]
    if tokenizer.encode("a").ids == [*before, *tokenizer.encode("a", add_special_tokens=False).ids]:
        return data
    if any(tokenizer.id_to_token(number) is None for number in before):
        named = {number: f"<{name}>" for name, number in sorted(contract.reserved.items(), key=lambda item: item[1])}
        new = {number: piece for number, piece in named.items() if tokenizer.id_to_token(number) is None}
        tokenizer.add_special_tokens([*new.values()])
        if any(tokenizer.token_to_id(piece) != number for number, piece in new.items()):
            LOGGER.warning(
                f"export: tokenizer.json does not begin texts with {', '.join(contract.before)}, as training does, "
                "because the tokenizer has no place for these tokens. Prepend their ids yourself."
            )
            return data
    pieces = [str(tokenizer.id_to_token(number)) for number in before]
    special = [*dict(zip(pieces, before, strict=True)).items()]
    tokenizer.post_processor = processors.TemplateProcessing(single=[*pieces, "$A"], special_tokens=special)
    return str(tokenizer.to_str(pretty=False)).encode()
