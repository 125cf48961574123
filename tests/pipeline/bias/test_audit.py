"""The known answer of the audit: a filter built to hit one dialect is found, a random one is not; and the limit."""

import hashlib
import random

import numpy as np
import pyarrow as pa
import pytest

from pipeline.bias.audit import GroupComparison, check_ratio, comparisons_of, judge
from pipeline.bias.count import COLUMNS, DROPPED, EVERYONE, REACHED, GroupCounter, rule_filters
from pipeline.bias.groups import BUILT_IN
from pipeline.bias.stage import GROUPS, BiasConfig, make_bias
from pipeline.bias.statistics import Rates
from schemas.errors import ContractError

AAE, SCOTS = "dialect/african_american_english", "dialect/scots"
MARKERS = {
    AAE: ("finna", "tryna", "he be", "she be", "y'all", "ain't no", "done told", "they finna"),
    SCOTS: ("aye", "cannae", "bairn", "hoose", "didnae", "auld", "whit", "dreich"),
    "": ("yes", "cannot", "child", "house", "told", "old", "what", "grey"),
}
DOCUMENTS = 600


def corpus(seed: int) -> list[dict[str, object]]:
    """Rows of documents of the stage: a third in each dialect, and a third in neither, of four lengths."""
    draws = random.Random(seed)
    measure = make_bias(BiasConfig(kinds=("identity", "dialect")), {GROUPS: str(BUILT_IN)})
    rows = []
    for number in range(DOCUMENTS):
        words = draws.sample(MARKERS[(AAE, SCOTS, "")[number % 3]], 4)
        words += draws.choices(("the mother", "her daughter", "a church", "the gospel", "river", "stone", "paper"), k=6)
        row = {"text": " and ".join(words), "language": "en", "source": "web", "number": number}
        measure(row)
        rows.append(row | {"num_chars": draws.choice((200, 700, 1500, 3000))})
    return rows


@pytest.fixture(scope="module")
def documents() -> list[dict[str, object]]:
    return corpus(1)


CONFIG = BiasConfig()


def audited(rows, dropped, config=CONFIG):
    """The findings of an audit of rules: `dropped` is a function of a row by the name of each rule."""
    kinds = (pa.list_(pa.string()), pa.string(), pa.string(), pa.int64())
    arrays = [pa.array([row[name] for row in rows], kind) for name, kind in zip(COLUMNS, kinds)]
    masks = {name: np.array([drops(row) for row in rows], bool) for name, drops in dropped.items()}
    counter = GroupCounter()
    counter.add(
        pa.RecordBatch.from_arrays(arrays, list(COLUMNS)), rule_filters("quality", np.ones(len(rows), bool), masks)
    )
    return judge(comparisons_of(counter.figures, config.min_documents), config)


def at_random(seed, share=0.2):
    def drops(row):
        digest = hashlib.sha256(f"{seed} {row['number']}".encode()).digest()
        return int.from_bytes(digest[:4], "big") < share * 2**32

    return drops


def test_the_corpus_has_its_groups(documents):
    for group in (AAE, SCOTS):
        assert sum(group in row[GROUPS] for row in documents) == DOCUMENTS // 3
    assert sum("identity/women" in row[GROUPS] for row in documents) > 30


def test_a_filter_that_hits_one_dialect_is_found(documents):
    """The rule drops texts with two of three words of one dialect, and one text in fifty of all others."""

    def hits(row):
        return "finna" in row["text"] or "he be" in row["text"] or at_random(3, 0.02)(row)

    findings = [one for one in audited(documents, {"words": hits}) if one.is_significant]
    worse = [one for one in findings if one.is_worse]
    assert [(one.comparison.filter, one.comparison.group) for one in worse] == [("quality/words", AAE)]
    rates = worse[0].comparison.rates
    assert rates.documents == DOCUMENTS // 3
    assert rates.dropped == sum(bool(hits(row)) for row in documents if AAE in row[GROUPS])
    assert rates.ratio_interval[0] > 10
    assert worse[0].adjusted < 1e-10


def test_a_random_filter_is_not_found(documents):
    """A thousand random filters: at most one audit in twenty has a false finding."""
    audits = [audited(documents, {"random": at_random(seed)}) for seed in range(1000)]
    assert {len(judged) for judged in audits} == {4}
    assert sum(any(one.is_significant for one in judged) for judged in audits) <= 50


def test_a_hit_is_found_among_many_rules_that_are_random(documents):
    rules = {f"random_{seed}": at_random(seed) for seed in range(30)}
    rules["words"] = lambda row: "finna" in row["text"]
    judged = audited(documents, rules)
    worse = [one.comparison for one in judged if one.is_significant and one.is_worse]
    assert (worse[0].filter, worse[0].group) == ("quality/words", AAE)
    assert {one.group for one in worse if one.filter != "quality"} == {AAE}


def test_groups_at_the_minimum_of_documents_and_filters_without_drops():
    def counts(number):
        reached = {"quality": {EVERYONE: {"s": 200}, "dialect/a": {"s": number}}}
        return {REACHED: reached, DROPPED: {"quality/x": {EVERYONE: {"s": 40}, "dialect/a": {"s": 10}}}}

    assert comparisons_of(counts(29), 30) == []
    (found,) = comparisons_of(counts(30), 30)
    assert (found.reached, found.rates.documents, found.rates.dropped) == (30, 30, 10)
    assert found.rates.expected == pytest.approx(30 / 170)
    nothing = counts(30) | {DROPPED: {"quality/x": {EVERYONE: {"t": 1}}}}
    nothing[REACHED]["quality"][EVERYONE]["t"] = 5
    assert comparisons_of(nothing, 30) == []
    assert comparisons_of({}, 30) == comparisons_of({REACHED: {}, DROPPED: {}}, 30) == []


def test_a_row_of_the_manifest_holds_a_comparison():
    comparison = GroupComparison("quality/x", AAE, 40, Rates(30, 10, 0.176470588, 170.0, 0.0123))
    assert GroupComparison.from_row(comparison.row) == comparison


def pair(rule, dropped, expected, p=1e-6, documents=100):
    return GroupComparison(f"quality/{rule}", AAE, documents, Rates(documents, dropped, expected, 1000.0, p))


@pytest.mark.parametrize(
    ("config", "stops"),
    [
        (BiasConfig(), False),
        (BiasConfig(max_ratio=3.0), False),  # 30 % against 10 %
        (BiasConfig(max_ratio=2.9), True),
        (BiasConfig(max_ratio=2.9, min_difference=0.199), True),
        (BiasConfig(max_ratio=2.9, min_difference=0.201), False),
        (BiasConfig(max_ratio=2.9, max_error=1e-6), True),
        (BiasConfig(max_ratio=2.9, max_error=0.9e-6), False),
    ],
)
def test_the_limit_stops_only_above_it(config, stops):
    comparisons = [pair("x", 30, 0.1, 0.5e-6), pair("y", 10, 0.1, 1.0)]
    if not stops:
        check_ratio("verdicts", comparisons, config)
        return
    with pytest.raises(ContractError) as error:
        check_ratio("verdicts", comparisons, config)
    text = str(error.value)
    assert f"got quality/x and {AAE}: 30.0% of 100 documents against 10.0% (ratio 3, adjusted p 1e-06)." in text
    assert text.endswith("Change the filter, or set bias.max_ratio.")


def test_the_limit_names_the_largest_ratio_and_counts_the_others():
    comparisons = [pair("x", 30, 0.1), pair("y", 30, 0.0), pair("z", 40, 0.1), pair("less", 1, 0.5)]
    with pytest.raises(
        ContractError, match=r"quality/y and .* \(ratio infinite, adjusted p 1e-06\), and 2 other pairs\."
    ):
        check_ratio("dedup", comparisons, BiasConfig(max_ratio=1.5))
