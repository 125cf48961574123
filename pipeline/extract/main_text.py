"""The main text of a page: a trained model scores the blocks in two passes, and those that a reader would keep stay.

The first pass scores each block by its text, its place in the markup and its neighbors; the second also by the scores
of the first around it. The score is the share of the block's words that people would mark as main text. From the scores
follow the blocks to keep and an estimate of the F1 of the text.
"""

from dataclasses import dataclass
from datetime import date
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from resiliparse.parse.html import HTMLTree

from pipeline.extract.blocks import Blocks, Floats, cut_blocks
from pipeline.extract.exponents import mark_exponents, may_have_exponents
from pipeline.extract.features import (
    PageBlocks,
    PageFacts,
    Text,
    WordOdds,
    measure_blocks,
    names_of,
    score_columns,
    stacked,
)
from pipeline.extract.formulas import may_have_formulas, write_formulas
from pipeline.extract.metadata import PageMetadata, read_metadata
from pipeline.extract.tables import data_cells
from pipeline.extract.trees import Trees
from schemas.errors import ContractError

SHIPPED_MODEL = Path(__file__).with_name("main_text.npz")
"""The model that is part of the package; `main_text.json` beside it is its card."""
MODEL_FORMAT = 1
MIDDLE = 0.5
"""Score that is averaged with the score from which the expected F1 is highest. Half of a block's words is the best
limit for articles, the highest expected F1 for pages with uncertain blocks; their mean is good for all types."""


@dataclass(frozen=True, eq=False)
class MainTextModel:
    """A trained model of main text."""

    lexicon: WordOdds
    first: Trees
    """Trees of the first pass, on the features of `measure_blocks`."""
    second: Trees
    """Trees of the second pass, on the same features followed by those of `score_columns`."""
    names: tuple[str, ...]
    """Names of all features of the second pass, in their order."""

    def save(self, path: Path) -> None:
        """Write the model as an .npz file; the same model gives the same bytes."""
        arrays: dict[str, Any] = {
            "format": np.array(MODEL_FORMAT),
            "names": _packed(self.names),
            "stop_words": _packed(sorted(self.lexicon.stop_words)),
            **self.first.arrays("first"),
            **self.second.arrays("second"),
        }
        for kind, odds in (("text", self.lexicon.text), ("markup", self.lexicon.markup)):
            words = sorted(odds)
            arrays |= {f"{kind}_words": _packed(words)}
            arrays |= {f"{kind}_odds": np.array([odds[word] for word in words], np.float32)}
        np.savez_compressed(path, **arrays)


def _packed(words: "list[str] | tuple[str, ...]") -> npt.NDArray[np.uint8]:
    return np.frombuffer("\n".join(words).encode(), np.uint8)


def _unpacked(array: npt.NDArray[np.uint8]) -> list[str]:
    text = array.tobytes().decode()
    return text.split("\n") if text else []


@lru_cache(maxsize=4)
def load_model(path: Path) -> MainTextModel:
    """Return the model of a file that `MainTextModel.save` wrote. Raises ContractError if it is no such file."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            found = int(arrays["format"])
            odds = {
                kind: dict(zip(_unpacked(arrays[f"{kind}_words"]), arrays[f"{kind}_odds"].tolist()))
                for kind in ("text", "markup")
            }
            lexicon = WordOdds(odds["text"], odds["markup"], frozenset(_unpacked(arrays["stop_words"])))
            names = tuple(_unpacked(arrays["names"]))
            model = MainTextModel(
                lexicon, Trees.from_arrays(arrays, "first"), Trees.from_arrays(arrays, "second"), names
            )
    except (OSError, ValueError, KeyError, EOFError) as error:
        raise ContractError(f"{path}: expected a model of main text, got {error}. Fit it again.") from error
    expected = feature_names()
    if found != MODEL_FORMAT or names != expected:
        raise ContractError(
            f"{path}: expected a model of format {MODEL_FORMAT} with the {len(expected)} features of this version, got "
            f"format {found} and {len(names)} features. Fit it again with this version."
        )
    return model


@dataclass(frozen=True, slots=True, eq=False)
class ParsedPage:
    """A page after it was parsed: its blocks, and what it declares about itself."""

    blocks: Blocks
    metadata: PageMetadata
    facts: PageFacts


def parse_page(html: str, url: str | None = None, fetched: date | None = None) -> ParsedPage:
    """Return a decoded page, parsed once.

    `url` and `fetched` (day of the record [UTC]) help to read its metadata. Raises HTMLParserException or UnicodeError
    if the parser refuses the page.
    """
    tree = HTMLTree.parse(html)
    metadata = read_metadata(tree, url, fetched, html)
    if may_have_formulas(html):
        write_formulas(tree)
    if may_have_exponents(html):
        mark_exponents(tree)
    blocks = cut_blocks(tree.body.html if tree.body is not None else "")
    facts = PageFacts(tree.title or "", metadata.types, metadata.open_graph_type or "")
    return ParsedPage(blocks, metadata, facts)


@dataclass(frozen=True, slots=True, eq=False)
class ScoredBlocks:
    """The blocks of a page with their scores."""

    blocks: Blocks
    words: Floats
    """Number of words of each block; each ideograph is a word (blocks,)."""
    scores: Floats
    """Expected share of each block's words that are main text, in 0..1 (blocks,)."""

    def kept(self) -> npt.NDArray[np.int64]:
        """Return the numbers of the blocks to keep, in ascending order; at least one if there is a block.

        A table with data is kept whole or not at all, by the mean score of its words: a row without some of its cells
        has its numbers in the wrong columns.
        """
        limit = (MIDDLE + self._best()[0]) / 2
        is_kept = self.scores >= limit
        for cells in data_cells(self.blocks, np.flatnonzero(is_kept).tolist()):
            words = self.words[cells]
            is_kept[cells] = float(words @ self.scores[cells]) >= limit * float(words.sum())
        kept = np.flatnonzero(is_kept)
        return kept if len(kept) or not len(self.scores) else np.flatnonzero(self.scores >= self.scores.max())

    def best(self, words: float) -> npt.NDArray[np.int64]:
        """Return the numbers of the blocks with the highest scores that have this many words, in ascending order.

        All blocks that have words if they have fewer; blocks without words are left out.
        """
        order = np.argsort(-self.scores, kind="stable")
        order = order[self.words[order] > 0]
        before = np.cumsum(self.words[order]) - self.words[order]
        return np.sort(order[before < words])

    def expected_f1(self) -> float:
        """Return the highest expected F1 of all choices by score, in 0..1; 0 for a page without text."""
        return self._best()[1]

    def _best(self) -> tuple[float, float]:
        """Return the least score to keep for which the expected F1 is highest, and this F1."""
        if not self.words.sum():
            return MIDDLE, 0.0
        scores = np.clip(self.scores, 0.01, 0.99)
        order = np.argsort(-scores, kind="stable")
        words, ranked = self.words[order].astype(np.float64), scores[order].astype(np.float64)
        right = np.cumsum(words * ranked)
        f1 = 2 * right / np.maximum(np.cumsum(words) + right[-1], 1e-9)
        best = int(np.argmax(f1))
        return float(ranked[best]), float(f1[best])


def score_blocks(blocks: Blocks, facts: PageFacts, model: MainTextModel) -> ScoredBlocks:
    """Return the blocks of a page with the scores of the model's second pass."""
    if not len(blocks):
        return ScoredBlocks(blocks, np.zeros(0, np.float32), np.zeros(0, np.float32))
    page, features = first_features(blocks, facts, model.lexicon)
    matrix = second_features(page, features, np.clip(model.first.predict(features), 0, 1))
    return ScoredBlocks(blocks, page.words, np.clip(model.second.predict(matrix), 0, 1))


def first_features(blocks: Blocks, facts: PageFacts, lexicon: WordOdds) -> tuple[PageBlocks, Floats]:
    """Return the page and the features of the first pass, (features, blocks). There must be at least one block."""
    text = Text(blocks.sources())
    page = PageBlocks(blocks, text.words, lexicon)
    return page, stacked(measure_blocks(page, text, facts, lexicon))


def second_features(page: PageBlocks, features: Floats, scores: Floats) -> Floats:
    """Return the features of the second pass, (features, blocks), from those of the first and its scores."""
    return np.concatenate([features, stacked(score_columns(page, scores))])


@lru_cache(maxsize=1)
def feature_names() -> tuple[str, ...]:
    """Return the names of the features of the second pass; the first pass has the first of them."""
    text = Text(["a"])
    lexicon = WordOdds({}, {}, frozenset())
    page = PageBlocks(cut_blocks("<body>a</body>"), text.words, lexicon)
    groups = measure_blocks(page, text, PageFacts(), lexicon)
    return names_of([*groups, *score_columns(page, np.zeros(1, np.float32))])
