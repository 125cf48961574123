"""Settings of the n-gram trainer, with the meanings that lmplz gives them."""

from typing import Literal, Self

from pydantic import Field, model_validator

from schemas.config import Section, execution, location


class TrainLmConfig(Section):
    """How an n-gram model is counted, pruned and smoothed."""

    input: list[str] = location([])
    """Files of text, one sentence a line, words between spaces, plain or `.gz`; paths or patterns on any filesystem."""
    order: int = Field(5, ge=1, le=10)
    """Words in the longest n-gram; 5 as CCNet's models. kenlm reads orders 2 to 6."""
    prune: list[int] = Field(default_factory=list)
    """Per order, from 1 on: n-grams that occur so often or less are left out, their mass going to the back-off. Must
    not decrease; the last value holds for all further orders; empty: nothing is left out."""
    discount_fallback: list[float] | None = None
    """Discounts of the counts 1, 2 and 3+ for orders where the closed form fails (the last value is repeated); lmplz
    takes 0.5 1 1.5. None: a text on which the closed form fails is refused."""
    reserved_words: Literal["refuse", "skip"] = "refuse"
    """A text that holds `<s>`, `</s>` or `<unk>`: refuse it, or skip these words as if they were spaces."""
    interpolate_unigrams: bool = True
    """Whether unigrams share their discounted mass evenly with `<unk>`; else `<unk>` takes all of it, as in SRILM."""
    vocab_pad: int | None = Field(None, ge=1)
    """Size of the vocabulary over which that mass is shared, if it is smaller [words]; None: its own size."""
    limit_vocab: str | None = location(None)
    """A file of words between whitespace: n-grams with any other word are left out. None: every word may stay."""
    partitions: int | None = execution(None, ge=1)
    """Parts the n-grams are spread over; None: one for each 2 million tokens, and at least one a core."""
    chunk_tokens: int = execution(2_000_000, ge=1)
    """Tokens that one worker holds at a time: 2 million take about 0.5 GB."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if len(self.prune) > self.order:
            raise ValueError(f"prune: expected at most {self.order} thresholds, one per order, got {self.prune}")
        if any(value < 0 for value in self.prune) or self.prune != sorted(self.prune):
            raise ValueError(f"prune: expected thresholds >= 0 that do not decrease, got {self.prune}")
        fallback = self.discount_fallback
        if fallback is not None:
            if not 1 <= len(fallback) <= 3:
                raise ValueError(f"discount_fallback: expected 1 to 3 discounts, got {fallback}")
            if any(not 0 <= value <= count for count, value in enumerate(fallback, 1)):
                raise ValueError(f"discount_fallback: expected a discount of count i in [0, i], got {fallback}")
        if self.vocab_pad is not None and not self.interpolate_unigrams:
            raise ValueError("vocab_pad: expected to be used, got interpolate_unigrams = false. Leave one out.")
        return self

    def thresholds(self) -> list[int]:
        """The pruning threshold of every order."""
        given = self.prune or [0]
        return given + given[-1:] * (self.order - len(given))
