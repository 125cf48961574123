"""Fit the model of main text on pages with a text that people marked: labels, word odds, and trees in two passes.

A block's label is the share of its words that are in the marked text at its place. What the model learns about a page
from other pages (odds of words, scores of the first pass) comes from folds without its site, as it does in use.
"""

import json
import math
import re
import tempfile
from bisect import bisect
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from pipeline.extract.blocks import Floats
from pipeline.extract.features import PageBlocks, WordOdds, normal_word, words_of_block
from pipeline.extract.main_text import (
    MainTextModel,
    ParsedPage,
    feature_names,
    first_features,
    parse_page,
    second_features,
)
from pipeline.extract.trees import Trees
from pipeline.text.profiles import load_profiles

NUM_GRAM = 4
"""Number of words in a row that must agree, so that a word counts as found in the marked text."""
ANCHOR_WORDS = 8
"""Minimum number of words of a block that shows where in the marked text its neighbors are."""
MAX_ANCHORS = 200
"""Number of previous anchors that are tried as the one before an anchor."""
REACH = 400
"""Words of the marked text before the first and after the last anchor in which short blocks are searched."""
NEAR = 12
"""Maximum distance to an anchor of a block of one or two words [blocks]."""

MIN_TEXT_SITES, MIN_MARKUP_SITES = 5, 3
"""Minimum number of sites that have a word in a text or in the markup, so that it gets odds."""
PRIOR = 2.0
"""Sites that are added to those with a word, with the mean share of main text."""
MAX_LEXICON_WORDS = 30
"""Maximum number of words of a block whose words get odds."""
MAX_WEIGHT_WORDS = 150
"""Number of words from which the weight of a block does not grow."""
FIRST_TREES, SECOND_TREES = (120, 0.15), (150, 0.1)
"""Number of trees and learning rate of the two passes."""
DEPTH = 6

_IDEOGRAPHS = "\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
_WORD = re.compile(rf"[{_IDEOGRAPHS}]|[^\W_{_IDEOGRAPHS}]+")

WordShares = dict[str, tuple[float, float]]
"""Word → its weight in main text, and its weight in all blocks of a page."""


def words_of(text: str) -> list[str]:
    """Return the words of a text in lower case; each ideograph is a word."""
    return _WORD.findall(text.lower())


@dataclass(frozen=True)
class MarkedPage:
    """A page for training, and what people marked in it."""

    html: str
    """The decoded page."""
    site: str
    """Name of its site; the pages of a site are in one fold."""
    fold: int
    """Fold of the site."""
    text: str | None
    """The main text; None if there are only snippets."""
    with_: tuple[str, ...] = ()
    """Snippets of the main text; they count if `text` is None."""
    without: tuple[str, ...] = ()
    """Snippets of other text."""
    weight: float = 1.0
    """Weight of the page among all pages."""


# --------------------------------------------------------------------------------------------------------------- labels


def labels_by_text(blocks: Sequence[Sequence[str]], marked: Sequence[str]) -> Floats:
    """Return the share of each block's words that are in the marked words at the block's place (blocks,)."""
    places: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for start in range(len(marked) - NUM_GRAM + 1):
        places[tuple(marked[start : start + NUM_GRAM])].append(start)
    shares = np.zeros(len(blocks), np.float32)
    anchors: list[tuple[int, int]] = []
    for number, words in enumerate(blocks):
        hits = [places.get(tuple(words[start : start + NUM_GRAM])) for start in range(len(words) - NUM_GRAM + 1)]
        covered = np.zeros(len(words) + 1, np.int64)
        for start, hit in enumerate(hits):
            if hit:
                covered[start] += 1
                covered[min(start + NUM_GRAM, len(words))] -= 1
        if len(words) >= NUM_GRAM:
            shares[number] = float((np.cumsum(covered[:-1]) > 0).mean())
        known = [hit for hit in hits if hit]
        if len(words) >= ANCHOR_WORDS and shares[number] >= 0.5 and known:
            anchors.append((number, known[len(known) // 2][0]))
    chain = _heaviest_chain(anchors, [len(words) for words in blocks])
    in_chain = {number for number, _ in chain}
    texts = {tuple(blocks[number]) for number in in_chain}
    for number, words in enumerate(blocks):
        if number in in_chain or not words:
            continue
        if len(words) >= ANCHOR_WORDS and shares[number] >= 0.5:
            if tuple(words) in texts:  # A copy, such as a teaser of the page's own text.
                shares[number] = 0
        else:
            shares[number] = _is_between(number, words, chain, marked, blocks)
    return shares


def _heaviest_chain(anchors: Sequence[tuple[int, int]], sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return the anchors (block, place in the marked text) in ascending order with the most words."""
    best: list[tuple[int, int]] = []
    for index, (block, place) in enumerate(anchors):
        weight, previous = sizes[block], -1
        for other in range(max(0, index - MAX_ANCHORS), index):
            if anchors[other][1] < place and best[other][0] + sizes[block] > weight:
                weight, previous = best[other][0] + sizes[block], other
        best.append((weight, previous))
    chain: list[tuple[int, int]] = []
    index = max(range(len(best)), key=lambda number: best[number][0], default=-1)
    while index >= 0:
        chain.append(anchors[index])
        index = best[index][1]
    return chain[::-1]


def _is_between(
    number: int,
    words: Sequence[str],
    chain: Sequence[tuple[int, int]],
    marked: Sequence[str],
    blocks: Sequence[Sequence[str]],
) -> float:
    """Return 1 if the words are in the marked text between the anchors around the block, else 0."""
    after = bisect([block for block, _ in chain], number)
    end = chain[after][1] + len(words) if after < len(chain) else len(marked)
    start = chain[after - 1][1] if after else (max(0, end - REACH) if chain else 0)
    if after == len(chain):
        end = min(len(marked), start + REACH + (len(blocks[chain[-1][0]]) if chain else 0))
    if len(words) <= 2 and min((abs(number - block) for block, _ in chain), default=NEAR + 1) > NEAR:
        return 0.0
    return float(f" {' '.join(words)} " in f" {' '.join(marked[start:end])} ")


def labels_by_snippets(blocks: Sequence[Sequence[str]], with_: Iterable[str], without: Iterable[str]) -> Floats:
    """Return 1 for blocks with a snippet of the main text, 0 for those with another snippet, else NaN (blocks,)."""
    wanted, unwanted = _padded(with_), _padded(without)
    labels = np.full(len(blocks), np.nan, np.float32)
    for number, words in enumerate(blocks):
        text = f" {' '.join(words)} "
        has_wanted, has_unwanted = (any(snippet in text for snippet in snippets) for snippets in (wanted, unwanted))
        if has_wanted != has_unwanted:
            labels[number] = float(has_wanted)
    return labels


def _padded(snippets: Iterable[str]) -> list[str]:
    """Return the words of each snippet that has any, with a space between them and at both ends."""
    return [f" {' '.join(words)} " for snippet in snippets if (words := words_of(snippet))]


# -------------------------------------------------------------------------------------------------------------- lexicon


@dataclass
class _Sites:
    """For each word, the sum over its sites of their share of main text, and the number of sites."""

    shares: dict[str, dict[str, list[float]]] = field(default_factory=dict)

    def add(self, site: str, counts: WordShares) -> None:
        """Add a page."""
        for word, (right, weight) in counts.items():
            if weight:
                entry = self.shares.setdefault(word, {}).setdefault(site, [0.0, 0.0])
                entry[0] += right / weight
                entry[1] += 1

    def odds(self, min_sites: int) -> dict[str, float]:
        """Return the log odds of each word of at least `min_sites` sites against those of all such words."""
        kept = {word: sites for word, sites in self.shares.items() if len(sites) >= min_sites}
        sums = {word: sum(right / pages for right, pages in sites.values()) for word, sites in kept.items()}
        num_sites = sum(map(len, kept.values()))
        prior = min(max(sum(sums.values()) / max(1, num_sites), 0.01), 0.99)
        base = math.log(prior / (1 - prior))
        return {
            word: math.log((sums[word] + PRIOR * prior) / (len(kept[word]) - sums[word] + PRIOR * (1 - prior))) - base
            for word in kept
        }


@dataclass(frozen=True, eq=False)
class LabelledPage:
    """A page with a label for each block; NaN = unknown."""

    page: MarkedPage
    parsed: ParsedPage
    labels: Floats
    num_words: npt.NDArray[np.int64]
    """Number of words of each block (blocks,)."""
    in_text: WordShares
    """Shares of the words of short texts."""
    in_markup: WordShares
    """Shares of the words of classes, ids and itemprops."""


def label_page(page: MarkedPage) -> LabelledPage:
    """Return a page with the labels of its blocks."""
    parsed = parse_page(page.html)
    blocks = [words_of(parsed.blocks.source(number)) for number in range(len(parsed.blocks))]
    if page.text is not None:
        labels = labels_by_text(blocks, words_of(page.text))
    else:
        labels = labels_by_snippets(blocks, page.with_, page.without)
    num_words = np.array([len(words) for words in blocks], np.int64)
    return LabelledPage(page, parsed, labels, num_words, *_word_shares(parsed, labels, num_words))


def _word_shares(parsed: ParsedPage, labels: Floats, num_words: npt.NDArray[np.int64]) -> tuple[WordShares, WordShares]:
    """Return the shares of the words in the short texts and in the markup of a page."""
    blocks = parsed.blocks
    in_text: WordShares = {}
    in_markup: WordShares = {}
    for number in np.flatnonzero(~np.isnan(labels)).tolist():
        label, size = float(labels[number]), int(num_words[number])
        own = int(blocks.own[number])
        weight = min(size, 100)
        for word in {*blocks.container(own).words, *blocks.container(int(blocks.parents[own])).words}:
            right, total = in_markup.get(word, (0.0, 0.0))
            in_markup[word] = (right + label * weight, total + weight)
        if size <= MAX_LEXICON_WORDS:
            for word in set(map(normal_word, words_of_block(blocks.source(number)))):
                right, total = in_text.get(word, (0.0, 0.0))
                in_text[word] = (right + label, total + 1)
    return in_text, in_markup


def fit_lexicon(pages: Iterable[LabelledPage]) -> WordOdds:
    """Return the log odds of the words in the texts and in the markup of labelled pages."""
    text, markup = _Sites(), _Sites()
    for page in pages:
        text.add(page.page.site, page.in_text)
        markup.add(page.page.site, page.in_markup)
    return WordOdds(text.odds(MIN_TEXT_SITES), markup.odds(MIN_MARKUP_SITES), stop_words())


def stop_words() -> frozenset[str]:
    """Return the stop words of all languages in lower case."""
    return frozenset(word.lower() for profile in load_profiles(None).values() for word in profile.stop_words)


# ---------------------------------------------------------------------------------------------------------------- trees


@dataclass(frozen=True, eq=False)
class _Example:
    """The features and labels of one page."""

    fold: int
    page: PageBlocks
    features: Floats
    labels: Floats
    weights: npt.NDArray[np.float64]


def fit_main_text(pages: Sequence[LabelledPage], report: Callable[[str], None] = lambda line: None) -> MainTextModel:
    """Return the model that is fitted on pages of at least two folds. Raises ImportError without catboost.

    `report` gets a line for each step.
    """
    folds = sorted({page.page.fold for page in pages})
    examples: list[_Example] = []
    for fold in folds:
        lexicon = fit_lexicon(page for page in pages if page.page.fold != fold)
        examples += [_example(page, lexicon) for page in pages if page.page.fold == fold and len(page.parsed.blocks)]
        report(f"features of fold {fold}")
    scores: list[Floats] = [np.zeros(0, np.float32)] * len(examples)
    for fold in folds:
        trees = _fit_trees([(one.features, one) for one in examples if one.fold != fold], *FIRST_TREES)
        for number, one in enumerate(examples):
            if one.fold == fold:
                scores[number] = np.clip(trees.predict(one.features), 0, 1)
        report(f"first pass without fold {fold}")
    first = _fit_trees([(one.features, one) for one in examples], *FIRST_TREES)
    report("first pass")
    second = _fit_trees(
        [(second_features(one.page, one.features, score), one) for one, score in zip(examples, scores)], *SECOND_TREES
    )
    report("second pass")
    return MainTextModel(fit_lexicon(pages), first, second, feature_names())


def _example(page: LabelledPage, lexicon: WordOdds) -> _Example:
    view, features = first_features(page.parsed.blocks, page.parsed.facts, lexicon)
    weights = np.minimum(page.num_words, MAX_WEIGHT_WORDS) ** 0.8 + 0.5
    weights[np.isnan(page.labels)] = 0
    total = weights.sum()
    return _Example(page.page.fold, view, features, page.labels, page.page.weight * weights / (total or 1))


def _fit_trees(pairs: Sequence[tuple[Floats, _Example]], num_trees: int, rate: float) -> Trees:
    from catboost import CatBoostRegressor, Pool

    labels = np.concatenate([one.labels for _, one in pairs])
    weights = np.concatenate([one.weights for _, one in pairs])
    used = ~np.isnan(labels) & (weights > 0)
    features = np.concatenate([matrix.T for matrix, _ in pairs])[used]
    model = CatBoostRegressor(
        iterations=num_trees,
        depth=DEPTH,
        learning_rate=rate,
        loss_function="RMSE",
        l2_leaf_reg=3,
        border_count=64,
        rsm=0.3,
        bootstrap_type="Bernoulli",
        subsample=0.7,
        random_seed=0,
        thread_count=1,  # The result depends on the number of threads.
        allow_writing_files=False,
        verbose=0,
    )
    model.fit(Pool(features, labels[used], weight=weights[used]))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.json"
        model.save_model(str(path), format="json")
        return trees_of(json.loads(path.read_text()))


def trees_of(model: Mapping[str, Any]) -> Trees:
    """Return the trees of a CatBoost model in its JSON format; trees with fewer levels than DEPTH are extended."""
    trees = model["oblivious_trees"]
    scale, bias = model["scale_and_bias"]
    numbers: dict[tuple[int, float], int] = {}
    levels = np.zeros((DEPTH, len(trees)), np.int16)
    leaves = np.zeros((len(trees), 1 << DEPTH), np.float32)
    for place, tree in enumerate(trees):
        splits = [(int(split["float_feature_index"]), float(split["border"])) for split in tree["splits"]]
        values = np.array(tree["leaf_values"], np.float64) * scale
        for level in range(DEPTH):
            split = splits[level] if level < len(splits) else splits[0]
            levels[level, place] = numbers.setdefault(split, len(numbers))
        leaves[place] = values[np.arange(1 << DEPTH) & ((1 << len(splits)) - 1)]
    features = np.array([feature for feature, _ in numbers], np.int16)
    bounds = np.array([bound for _, bound in numbers], np.float32)
    return Trees(features, bounds, levels, leaves, float(np.ravel(bias)[0]))
