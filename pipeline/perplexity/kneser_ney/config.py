"""Settings of the n-gram trainer (section `[train_lm]`), with the same meanings as the options of lmplz."""

from typing import Literal, Self

from pydantic import Field, model_validator

from schemas.config import Section, execution, location


class TrainLmConfig(Section):
    """How n-grams are counted, pruned and smoothed."""

    input: list[str] = location([])
    """Text files with one sentence per line and spaces between words, plain or `.gz`; paths or patterns on any
    filesystem."""
    order: int = Field(5, ge=1, le=10)
    """Number of words in the longest n-gram; 5 as in CCNet's models. kenlm reads orders 2 to 6."""
    prune: list[int] = Field(default_factory=list)
    """Pruning threshold of each order, from 1 on: n-grams with at most this count are removed, and their probability
    mass goes to the back-off. Must not decrease. The last value applies to all higher orders. Empty = no pruning."""
    discount_fallback: list[float] | None = None
    """Discounts of the counts 1, 2 and 3+ for orders whose counts determine none by the closed form (the last value is
    repeated); lmplz uses 0.5 1 1.5. None = such a text is rejected."""
    reserved_words: Literal["refuse", "skip"] = "refuse"
    """Treatment of a text that contains `<s>`, `</s>` or `<unk>`: "refuse" rejects it, "skip" removes these words."""
    interpolate_unigrams: bool = True
    """True to distribute the discounted mass of unigrams evenly over all words and `<unk>`. False to give all of it to
    `<unk>`, as SRILM does."""
    vocab_pad: int | None = Field(None, ge=1)
    """Minimum number of words over which `interpolate_unigrams` distributes mass [words]; None = the vocabulary
    size."""
    limit_vocab: str | None = location(None)
    """A file of words separated by whitespace: n-grams with any other word are removed. None = no restriction."""
    partitions: int | None = execution(None, ge=1)
    """Number of parts over which the n-grams are partitioned; None = one per 2 million tokens, at least one per
    core."""
    chunk_tokens: int = execution(2_000_000, ge=1)
    """Number of tokens that a worker holds at once; 2 million take about 0.5 GB."""

    @model_validator(mode="after")
    def _agree(self) -> Self:
        if len(self.prune) > self.order:
            raise ValueError(
                f"prune: expected at most {self.order} thresholds, one per order, got {self.prune}. "
                f"Remove {len(self.prune) - self.order} of them from train_lm.prune."
            )
        if any(value < 0 for value in self.prune) or self.prune != sorted(self.prune):
            raise ValueError(
                f"prune: expected thresholds >= 0 that do not decrease, got {self.prune}. "
                "Set train_lm.prune to thresholds in ascending order, all at least 0."
            )
        fallback = self.discount_fallback
        if fallback is not None:
            if not 1 <= len(fallback) <= 3:
                raise ValueError(
                    f"discount_fallback: expected 1 to 3 discounts, got {fallback}. "
                    "Set train_lm.discount_fallback = [0.5, 1, 1.5]."
                )
            if any(not 0 <= value <= count for count, value in enumerate(fallback, 1)):
                raise ValueError(
                    "discount_fallback: expected discounts in [0, 1], [0, 2] and [0, 3] for counts 1, 2 and 3+, got "
                    f"{fallback}. "
                    "Set train_lm.discount_fallback = [0.5, 1, 1.5]."
                )
        if self.vocab_pad is not None and not self.interpolate_unigrams:
            raise ValueError(
                "vocab_pad: expected interpolate_unigrams = true, got false, which makes vocab_pad ineffective. "
                "Remove train_lm.vocab_pad, or set train_lm.interpolate_unigrams = true."
            )
        return self

    def thresholds(self) -> list[int]:
        """Return the pruning threshold of every order, from 1 on."""
        thresholds = self.prune or [0]
        return thresholds + thresholds[-1:] * (self.order - len(thresholds))
