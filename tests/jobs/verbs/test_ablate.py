"""Ablations: removed rules, reused tables, pairs of proxy runs, intervals computed by hand, and the answer."""

import argparse
import itertools
import math
import random
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from jobs.arguments import add_trust
from jobs.recipe import read_recipe, recipe_sections, stored_recipe
from jobs.verbs import ablate
from jobs.verbs import ablate as branch
from jobs.verbs.ablate import _left_out, branch_recipe, change_of, make_branch, same_dataset, steps_of
from jobs.verbs.proxies import ProxySize, check_pair, check_planned, default_size, plan_pairs, proxy_recipe
from pipeline.demo_crawl.build import build_demo_crawl
from pipeline.inspect.diff import KEPT, compare_runs, open_compared_run
from pipeline.inspect.without_rules import UNREACHABLE_LIMIT, leave_out_rules, rules_of
from pipeline.lineage.training import read_lineage
from pipeline.prepare import prepare, relative_path, run_folders, version_folders
from pipeline.quality.rules import RULES
from pipeline.quality.stage import checks
from pipeline.report.facts import collect_facts
from pipeline.report.losses import ablations
from pipeline.report.page import write_report
from pipeline.run import run_steps
from pipeline.stages import STEPS
from schemas.ablation import WITH, WITHOUT, Ablation, Comparison, DifferenceInterval, Measurement, SourceLoss
from schemas.config import Recipe
from schemas.errors import ConfigError, ContractError
from schemas.ids import doc_id
from schemas.manifest import RunFile, open_table, read_run, write_run
from schemas.overrides import load_recipe
from schemas.storage import Store
from schemas.tokens import open_dataset
from schemas.versions import attach_run
from tests.support.paths import ROOT
from tests.support.tiny_dataset import make_tiny_dataset, tiny_documents
from tests.support.tiny_runs import trained
from train.data.heldout import trained_copies
from train.eval.evaluate import evaluate
from train.eval.evaluate import main as evaluate_main
from train.eval.paired import (
    DECIDED,
    compare_sides,
    interval_of,
    seeds_for_half,
    summarize_comparisons,
    verdict,
    width_factor,
)
from train.monitor.metrics import read_train_manifest

RECIPE = ROOT / "jobs" / "recipes" / "demo.toml"
SOURCE = {"source": {"paths": ["x.warc.gz"]}}


def load(values: Any) -> Recipe:
    return load_recipe(values, [], recipe_sections(), "test")


def left(section: str, given: dict[str, Any], *words: str) -> dict[str, Any]:
    """What of a section's settings is set once the rules are left out; defaults are not."""
    values = load(SOURCE | {section: given}).to_json()
    made = leave_out_rules(values, words, load)
    load(made)
    return {key: value for key, value in made.get(section, {}).items() if key not in ("families", "cut_lines")}


# --------------------------------------------------------------------------------------------------------- what is left


DATATROVE = ["gopher_repetition", "gopher_quality", "c4", "fineweb"]
OTHERS = DATATROVE[:3]


@pytest.mark.parametrize(
    ("section", "given", "word", "expected"),
    [
        ("quality", {}, "quality.fineweb", {"rules": DATATROVE[:3]}),
        ("quality", {}, "quality", {"rules": []}),
        ("quality", {"rules": ["c4", "fineweb"]}, "quality.c4", {"rules": ["fineweb"]}),
        ("quality", {"min_words": 3, "max_short_lines": 1}, "quality.fineweb", {"min_words": 3, "rules": OTHERS}),
        ("quality", {}, "quality.gopher_short_doc", {"min_words": 0}),
        ("quality", {}, "quality.fineweb_short_lines", {"max_short_lines": UNREACHABLE_LIMIT}),
        (
            "quality",
            {"by_language": {"de": {"max_short_lines": 0.5, "min_words": 9}, "fr": {"max_short_lines": 0.4}}},
            "quality.fineweb_short_lines",
            {"by_language": {"de": {"min_words": 9}}, "max_short_lines": UNREACHABLE_LIMIT},
        ),
        ("language", {}, "language.language_not_wanted", {"languages": []}),
        ("language", {"min_score": 0.5}, "language.language_uncertain", {"min_score": 0.0}),
        ("language", {"min_language_share": 0.5}, "language.language_mixed", {}),
        ("toxicity", {}, "toxicity.toxic_word_share", {"max_word_share": None}),
        ("toxicity", {"max_words": 3}, "toxicity", {"max_word_share": None, "max_words": None}),
        ("dedup", {}, "dedup.near_duplicate", {"near": False}),
        ("dedup", {"bands": 20, "rows": 5}, "dedup.near_duplicate", {"near": False}),
        ("dedup", {}, "dedup.exact_duplicate", {"exact": "off"}),
        ("dedup", {"by_url": "newest"}, "dedup.same_url", {}),
        ("repeats", {"units": ["line"], "min_count": 3}, "repeats.line", {"units": []}),
        (
            "repeats",
            {"units": ["line", "sentences"], "sentences": 4, "min_count": 3},
            "repeats.sentences",
            {"units": ["line"], "min_count": 3},
        ),
        (
            "repeats",
            {"units": ["line", "substring"], "min_unit_chars": 4},
            "repeats.line",
            {"units": ["substring"]},
        ),
        (
            "decontaminate",
            {"evaluation_sets": {"q": "q.jsonl"}, "action": "cut", "max_pieces": 3},
            "decontaminate.contaminated",
            {"evaluation_sets": {"q": "q.jsonl"}, "action": "measure"},
        ),
        (
            "decontaminate",
            {"canaries": ["BENCHMARK"]},
            "decontaminate.canary",
            {"canaries": ["BENCHMARK"], "max_canaries": None},
        ),
        (
            "perplexity",
            {"scorer": "checkpoint:c", "max_perplexity": 900.0, "keep_buckets": ["head"]},
            "perplexity",
            {"scorer": "checkpoint:c"},
        ),
        ("paragraphs", {"min_chars": 9, "min_left_chars": 50}, "paragraphs.length", {}),
        ("templates", {"min_share": 0.3, "min_left_chars": 50}, "templates.lines", {}),
        (
            "paragraphs",
            {"min_chars": 9, "max_quantile": 0.9, "min_left_chars": 50},
            "paragraphs.perplexity",
            {"min_chars": 9, "min_left_chars": 50},
        ),
        ("paragraphs", {"min_chars": 9, "max_quantile": 0.9, "min_left_chars": 50}, "paragraphs", {}),
        (
            "classifier",
            {"models": {"edu": "m"}, "min_score": {"edu": 0.5}, "min_alpha": {"edu": 9.0}, "seed": 3},
            "classifier.classifier_sampled",
            {"models": {"edu": "m"}, "min_score": {"edu": 0.5}},
        ),
        (
            "importance",
            {"models": {"wiki": "m"}, "min_quantile": {"wiki": 0.5}},
            "importance.importance_quantile",
            {"models": {"wiki": "m"}},
        ),
    ],
)  # fmt: skip
def test_a_rule_is_left_out_by_the_settings_that_decide(
    section: str, given: dict[str, Any], word: str, expected: dict[str, Any]
) -> None:
    assert left(section, given, word) == expected


def test_rules_are_left_out_together_and_what_is_measured_stays() -> None:
    assert left("quality", {}, "quality.fineweb", "quality.c4") == {"rules": DATATROVE[:2]}
    values = load(SOURCE | {"quality": {"rules": ["c4", "boilerplate"]}}).to_json()
    made = load(leave_out_rules(values, ["quality.boilerplate"], load))
    assert made["quality"].content() == load(values)["quality"].content()  # or the documents would be read again


def test_the_one_rule_drops_nothing_any_more_and_the_others_do_as_before() -> None:
    before = load(SOURCE)
    after = load(leave_out_rules(before.to_json(), ["quality.gopher_stop_words"], load))
    found = [checks(recipe["quality"], {}, {}) for recipe in (before, after)]
    for old, new in zip(*found, strict=True):
        if old.reason == "gopher_stop_words":
            assert old.limits.keys() == new.limits.keys()
            assert set(new.limits.values()) == {0}
        else:
            assert (new.reason, new.limits) == (old.reason, old.limits)


def test_a_rule_that_is_off_is_no_rule_of_the_recipe() -> None:
    values = load(SOURCE).to_json()
    assert "quality.fineweb_short_lines" in rules_of(load(values))
    made = leave_out_rules(values, ["quality.fineweb_short_lines"], load)
    assert "quality.fineweb_short_lines" not in rules_of(load(made))
    for dialect, sets in RULES.items():  # a limit that two rules share would switch both off
        settings = [rule.setting for rules in sets.values() for rule in rules]
        assert len(settings) == len(set(settings)), dialect


def test_rules_that_there_are_not_are_answered_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"rule of the recipe, got 'quality\.finweb' \(did you mean 'quality\."):
        left("quality", {}, "quality.finweb")
    with pytest.raises(ConfigError, match=r"(?s)the recipe's rules as.*toxicity: toxic_word_share\n  dedup: exact_dup"):
        left("quality", {}, "zebra")
    with pytest.raises(ConfigError, match="expected every rule once, got it 2 times"):
        left("quality", {}, "quality.c4", "quality.c4")
    with pytest.raises(ConfigError, match="expected at least one method, got exact = 'off' and near = false"):
        left("dedup", {}, "dedup")


@pytest.mark.parametrize(
    ("words", "overrides", "message"),
    [
        ([], [], "expected --without SECTION.RULE or --set of a data setting, got neither"),
        ([], ["train.seq_len=64"], "got neither"),
        (["quality.c4"], ["tokenizer.vocab_size=500"], "expected one tokenizer for both datasets"),
        (["quality.c4"], ["train.seed=3"], "expected no override of the seed, which ablate chooses, got one"),
        (["quality.c4"], ["guard.patience=3"], "expected proxy runs that all end after the same step"),
    ],
)
def test_changes_that_say_nothing_or_too_much_are_refused(words: list[str], overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        change_of(words, overrides)


def test_the_folder_is_named_by_what_makes_the_dataset_another_one() -> None:
    assert (
        change_of(["quality.c4", "dedup.near_duplicate"], ["train.seq_len=64"]).name
        == "dedup.near_duplicate+quality.c4"
    )
    assert change_of([], ["quality.min_words=9"]).name == "quality.min_words=9"
    odd = change_of(["quality.c4"], ["quality.by_language={de={min_words=1}}"])
    assert odd.name.startswith("quality.c4-")
    assert odd.name != change_of(["quality.c4"], ["quality.by_language={de={min_words=2}}"]).name
    assert odd.training == ()


def test_steps_are_made_again_from_the_first_that_a_change_touches() -> None:
    before = load(SOURCE)

    def again(word: str) -> list[str]:
        after = load(leave_out_rules(before.to_json(), [word], load))
        return [name for name, made in steps_of(before, after) if made]

    assert again("quality.c4") == ["verdicts", "dedup", "audit", "clean", "tokenizer", "tokens"]
    assert again("dedup.near_duplicate")[0] == "clusters"
    assert again("language.language_uncertain")[0] == "documents"
    assert [name for name, made in steps_of(before, before) if made] == []


def test_what_a_takedown_replaced_is_replaced_for_branches_too(tmp_path: Path) -> None:
    run, folder = Store(str(tmp_path / "run")), Store(str(tmp_path / "run/ablations/x"))
    write_run(folder, RunFile(tables={"documents": "../../../documents/v-0000000001d0", "tokens": "v-0000000000e0"}))
    run.write_atomic("documents/v-0000000001d0/takedown.json", b'{"to": "v-new"}')
    homes = run_folders(folder)
    assert [home.uri for home in homes] == [folder.uri, run.uri]
    places = [version_folders(home, STEPS[0], "v-0000000001d0")["documents"].uri for home in homes]
    assert places == [f"{folder.uri}/documents/v-0000000001d0", f"{run.uri}/documents/v-new"]
    assert relative_path(folder, "documents", Store(places[1])) == "../../../documents/v-new"
    assert relative_path(folder, "documents", Store(places[0])) == "v-0000000001d0"


# ----------------------------------------------------------------------------------------------------------- intervals


def test_intervals_by_hand() -> None:
    found = interval_of([1.0, 2.0, 3.0])  # mean 2, deviation 1; t of 2 degrees at 97.5 % is 4.302653
    assert found.mean == 2.0
    assert found.half_width == pytest.approx(4.302653 / math.sqrt(3), abs=1e-6)
    assert found.low == pytest.approx(2 - 2.484138, abs=1e-6)
    assert interval_of([0.5, 0.5]) == DifferenceInterval(mean=0.5, half_width=0.0)
    assert interval_of([0.5]) == DifferenceInterval(mean=0.5, half_width=None)
    assert interval_of([1.0, 2.0], share=0.5).half_width == pytest.approx(0.5)  # t of 1 degree at 75 % is 1
    # 12.706205 / sqrt(2) = 8.984644; the next is 4.302653 / sqrt(3) = 2.484138
    assert width_factor(2) == pytest.approx(8.984644, abs=1e-6)
    assert seeds_for_half(2) == 1
    # Half of 2.484138 is 1.242069: four seeds have 3.182446 / 2 = 1.591223, five 2.776445 / sqrt(5) = 1.241664.
    assert seeds_for_half(3) == 2
    assert seeds_for_half(900) is None


@pytest.mark.parametrize(
    ("differences", "expected"),
    [
        ([0.010, 0.011, 0.012], "worth it"),
        ([-0.010, -0.011, -0.012], "not worth it"),
        (
            [0.010, 0.020, 0.060],
            "cannot be decided with 3 seeds (interval -0.0357 to +0.0957); 2 more seeds would be needed",
        ),
        ([0.010], "cannot be decided with 1 seed"),
        ([0.0, 0.0], "no difference: each of 2 pairs is equal"),
        ([0.1, 0.1], "worth it"),
    ],
)
def test_an_interval_says_whether_it_is_worth_it(differences: list[float], expected: str) -> None:
    assert verdict(interval_of(differences), len(differences)).startswith(expected)


def test_seeds_are_compared_in_pairs_over_all_and_by_source() -> None:
    def measured(web: float, books: float) -> list[Measurement]:
        sources = {
            "web": SourceLoss(nats=300 * web, targets=300, bytes=900.0),
            "books": SourceLoss(nats=100 * books, targets=100, bytes=400.0),
        }
        facts = {"documents": 9, "left_out": 0, "left_out_targets": 0}
        return [Measurement(run="r", checkpoint="c", trained_on="t", on="o", sources=sources, **facts)]

    losses = {(WITH, 1): measured(4.0, 5.0), (WITHOUT, 1): measured(4.2, 4.8)}
    losses |= {(WITH, 2): measured(4.5, 5.0), (WITHOUT, 2): measured(4.8, 4.9)}
    whole, books, web = compare_sides([WITH], [1, 2], losses)
    assert [(one.on, one.source) for one in (whole, books, web)] == [(WITH, ""), (WITH, "books"), (WITH, "web")]
    # Over all: (300 x 0.2 - 100 x 0.2) / 400 = 0.1 and (300 x 0.3 - 100 x 0.1) / 400 = 0.2.
    assert [b - a for a, b in whole.losses] == [pytest.approx(0.1), pytest.approx(0.2)]
    assert whole.nats.mean == pytest.approx(0.15)
    assert whole.nats.half_width == pytest.approx(8.984644 * math.sqrt(0.005), abs=1e-6)
    assert books.nats.mean == pytest.approx(-0.15)
    assert web.nats.mean == pytest.approx(0.25)
    # Bits of web: 0.25 nats x 300 targets over ln 2 and 900 bytes.
    assert web.bits is not None
    assert web.bits.mean == pytest.approx(0.25 * 300 / (math.log(2) * 900))
    answer = summarize_comparisons([whole, books, web])
    assert answer.startswith(
        "Held out of the dataset with the rules: cannot be decided with 2 seeds (interval -0.4853 to"
    )
    assert answer.endswith("; 1 more seed would be needed for half the width (mean +0.1500 nats/token).")
    for one in losses.values():
        one[0] = one[0].model_copy(update={"sources": {}})
    with pytest.raises(ContractError, match="'with': expected documents that no proxy run is trained on"):
        compare_sides([WITH], [1, 2], losses)


def pairs_of(differences: list[float], left_out: int = 0) -> dict[tuple[str, int], list[Measurement]]:
    """What two sides lost on one set with these differences by seed."""
    facts = {"documents": 9, "left_out": left_out, "left_out_targets": 0}
    return {
        (side, seed): [
            Measurement(
                **{"run": "r", "checkpoint": "c", "trained_on": "t", "on": "o"},
                sources={"web": SourceLoss(nats=100 * (4 + lost), targets=100, bytes=300.0)},
                **facts,
            )
        ]
        for seed, difference in enumerate(differences, start=1)
        for side, lost in ((WITH, 0.0), (WITHOUT, difference))
    }


def together(**sets: list[float]) -> str:
    """The answer about several sets, by the differences on each."""
    found = [one for name, several in sets.items() for one in compare_sides([name], [1, 2, 3], pairs_of(several))]
    return summarize_comparisons(found)


def test_the_answer_says_what_many_comparisons_at_once_mean() -> None:
    sure, none = [0.010, 0.011, 0.012], [-0.010, 0.020, 0.060]
    sentence = together(here=sure, there=none)
    assert "Each of 2 intervals holds by itself at 95%" in sentence
    assert sentence.endswith("beyond zero: 1 do, and 1 would if all 2 were to hold at once (97.5% each).")
    # Mean 0.0105, deviation 0.003: half widths 4.302653 and 6.205347 (t of 2 degrees at 97.5 and 98.75 %) by sqrt(3).
    barely = [0.0075, 0.0105, 0.0135]
    assert interval_of(barely).low == pytest.approx(0.0105 - 0.003 * 4.302653 / math.sqrt(3), abs=1e-8)
    assert interval_of(barely, 0.975).low == pytest.approx(0.0105 - 0.003 * 6.205347 / math.sqrt(3), abs=1e-8)
    assert "beyond zero: 2 do, and 1 would if" in together(here=sure, there=barely)
    assert "by itself" not in together(here=none, there=none)  # where nothing is claimed
    assert "by itself" not in together(here=sure)  # and of one alone


def test_what_is_left_out_is_said_of_every_set() -> None:
    asked = [(WITH, 0), (WITHOUT, 2), ("there", 3)]
    found = Ablation.model_construct(
        comparisons=[Comparison.model_construct(on=name) for name, _ in asked for _ in range(2)],
        measurements=[pairs_of([0.1], left_out)[WITH, 1][0] for _ in range(2) for _, left_out in asked],
    )
    assert [line.partition(" documents")[0] for line in _left_out(found)] == [
        "held out of the dataset without them: 2 of 9",
        "held out of there: 3 of 9",
    ]


def test_each_side_is_favoured_unless_all_say_the_same() -> None:
    sure, none = [0.010, 0.011, 0.012], [-0.010, 0.020, 0.060]
    assert "favoured" in together(with_=sure, without=none)
    assert "favoured" in together(with_=sure, without=[-one for one in sure])
    assert "favoured" not in together(with_=sure, without=sure)
    assert "favoured" not in together(with_=none, without=none)


def test_sizes_of_proxies_where_none_is_asked_for() -> None:
    assert default_size(ProxySize(3, None, None, ()), 1e6) == (200_000, 1e6)
    assert default_size(ProxySize(3, None, None, ()), 1e8) == (5e6, 1e8)
    assert default_size(ProxySize(3, None, None, ()), 1e12) == (1e7, 2e8)
    assert default_size(ProxySize(3, 1e5, None, ()), 1e12) == (1e5, 2e6)
    assert default_size(ProxySize(3, None, 5000, ()), 1e6) == (200_000, 5000)
    big = {"plan": {"usd": 5, "activation": "gelu"}, "train": {"steps": 9, "seq_len": 64}, "layout": {"tensor": 2}}
    big |= {"guard": {"patience": 3, "min_improvement": 0.1, "grad_sigmas": 6.0}}  # none ends before the others
    found = proxy_recipe(big | {"source": {"paths": ["x"]}, "cluster": {"gpus": 8}})
    kept = {"plan": {"activation": "gelu"}, "train": {"seq_len": 64}, "layout": {}, "cluster": {}}
    kept |= {"guard": {"grad_sigmas": 6.0}}
    assert found == kept | {"source": {"paths": ["x"]}}
    fitted = {"plan": {"law": "own", "law_file": "law.json", "qk_norm": True}, "source": {"paths": ["x"]}}
    assert load_recipe(proxy_recipe(fitted), [], recipe_sections(), "run.json").to_json()["plan"] == {"qk_norm": True}


# ------------------------------------------------------------------------------------------- pairs that were trained


TRAINING = {
    "plan": {"min_params": 1000},
    "train": {"seq_len": 32, "window_shards": 1},
}
ASKED = (
    *("plan.num_layers=1", "plan.d_model=32", "plan.num_heads=2", "plan.d_ffw=64", "plan.tie_embeddings=true"),
    *("train.global_batch=8", "optim.learning_rate=1e-2", "optim.warmup_steps=5"),
)
SEQUENCES = 200


def noisy(source: str, number: int, contract: Any, seed: int, suffix: str) -> Iterator[dict[str, Any]]:
    """The documents of the tiny dataset, and twice as many of words drawn alike."""
    yield from tiny_documents(source, number // 3, contract, seed, suffix)
    first = len(contract.reserved)
    for row in tiny_documents(source, number - number // 3, contract, seed, suffix):
        place = row["offset"] + 10_000_000
        drawn = random.Random(f"noise {source} {place}")
        words = [drawn.randrange(first, contract.vocab_size) for _ in row["tokens"][2:]]
        own = {"offset": place, "doc_id": doc_id(source, row["split"], place)}
        yield row | own | {"cluster": own["doc_id"], "tokens": [row["tokens"][0], *words, row["tokens"][-1]]}


@pytest.fixture(scope="module")
def sides(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Store]:
    """A dataset of learnable text, and the same one with two thirds of noise, as without a filter."""
    folder = tmp_path_factory.mktemp("sides")
    made = {WITH: make_tiny_dataset(folder / "with", {"web": 90, "books": 60})}
    made[WITHOUT] = make_tiny_dataset(folder / "without", {"web": 270, "books": 180}, documents=noisy)
    for run in made.values():
        write_run(run, RunFile(tables=read_run(run).tables, recipe=SOURCE | TRAINING))
    return made


@pytest.fixture(scope="module")
def losses(sides: dict[str, Store], tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Any]:
    """Three pairs, trained, and three proxies more on the filtered side; what each lost on both sides' held-out."""
    folder = Store(str(tmp_path_factory.mktemp("proxies")))
    pairs = plan_pairs(sides, folder, ProxySize(6, None, None, ASKED))
    plans = [proxy.plan for pair in pairs for proxy in pair.proxies.values()]
    assert len({(plan.num_params, plan.steps, plan.num_tokens, plan.learning_rate) for plan in plans}) == 1
    assert len({plan.order for plan in plans}) == 12
    assert plans[0].num_tokens <= sum(open_dataset(sides[WITH]).num_tokens().values())
    named = {(side, pair.seed): proxy.run for pair in pairs for side, proxy in pair.proxies.items()}
    named = {key: run for key, run in named.items() if key[0] == WITH or key[1] <= 3}
    for run in named.values():
        trained(Path(run.uri), 1)
    on = [run.uri for run in sides.values()]
    found = evaluate([run.uri for run in named.values()], on, SEQUENCES, (), None)
    return {key: [next(found), next(found)] for key in named}


@pytest.mark.dist
def test_a_filter_that_keeps_noise_out_is_worth_it(losses: dict[tuple[str, int], Any]) -> None:
    found = compare_sides([WITH, WITHOUT], [1, 2, 3], losses)
    whole = found[0]
    assert (whole.on, whole.source, whole.answer) == (WITH, "", "worth it")
    assert whole.nats.mean > 0.1
    assert {one.answer for one in found if one.on == WITH} == {"worth it"}
    assert "Held out of the dataset with the rules: worth it (+" in summarize_comparisons(found)
    (one,) = {(one.documents, one.left_out) for key, several in losses.items() for one in several[:1]}
    assert one[1] < one[0] == 15


@pytest.mark.dist
def test_the_same_dataset_with_other_seeds_makes_no_difference(losses: dict[tuple[str, int], Any]) -> None:
    """Of all ways to make three pairs of six proxies on one dataset, few decide, whichever seeds are good ones.

    On average it is one in twenty. In 20,000 draws of six normal numbers it was never more than 16 of the 120 ways;
    intervals of 1.96 standard errors, too narrow for three pairs, decide 23 of them.
    """
    ways = [way for way in itertools.permutations(range(1, 7)) if way[0] < way[2] < way[4]]
    assert len(ways) == 120
    decided: Counter[tuple[str, str]] = Counter()
    for way in ways:
        pairs = {((WITH, WITHOUT)[place % 2], 1 + place // 2): losses[WITH, seed] for place, seed in enumerate(way)}
        found = compare_sides([WITH, WITHOUT], [1, 2, 3], pairs)
        answers = {(one.on, one.source): one.answer for one in found}
        decided.update(key for key, answer in answers.items() if answer in DECIDED)
        undecided = [answer for answer in answers.values() if answer not in DECIDED]
        assert all(answer.startswith("cannot be decided with 3 seeds") for answer in undecided)
    assert len(answers) == 6
    assert max(decided.values(), default=0) <= 16


@pytest.mark.dist
def test_proxies_that_are_not_alike_are_no_pair(sides: dict[str, Store], tmp_path: Path) -> None:
    (pair,) = plan_pairs(sides, Store(str(tmp_path)), ProxySize(1, None, 3000, ASKED))
    plan = pair.proxies[WITH].plan
    assert plan.num_tokens == pytest.approx(3000, rel=0.05)
    with pytest.raises(ContractError, match=r"expected proxy runs with equal learning rate, got 0\.01 and 0\.5"):
        check_pair([plan, plan.model_copy(update={"learning_rate": 0.5})])
    with pytest.raises(ConfigError, match=r"got one with other settings. Delete the folder"):
        plan_pairs(sides, Store(str(tmp_path)), ProxySize(1, None, 6000, ASKED))


def test_the_size_that_is_chosen_counts_the_recipe_of_the_plan(tmp_path: Path) -> None:
    """With its vectors for queries and keys, which a recipe sets after the file is read."""
    run = make_tiny_dataset(tmp_path / "run")
    write_run(run, RunFile(tables=read_run(run).tables, recipe=SOURCE | TRAINING))
    (pair,) = plan_pairs({WITH: run, WITHOUT: run}, Store(str(tmp_path)), ProxySize(1, None, 3000, ASKED[-3:-2]))
    plan = pair.proxies[WITH].plan
    assert plan.shape.qk_norm
    assert plan.settings.plan.params == plan.num_params


def test_what_no_proxy_can_be_planned_with_is_refused_before_the_data_is_made(tmp_path: Path) -> None:
    run = make_tiny_dataset(tmp_path / "run")
    size = ProxySize(1, None, 3000, ASKED[-3:-2])

    def check(changes: dict[str, dict[str, Any]]) -> None:
        recipe = SOURCE | {name: TRAINING.get(name, {}) | changes.get(name, {}) for name in TRAINING | changes}
        write_run(run, RunFile(tables=read_run(run).tables, recipe=recipe))
        check_planned(run, size)

    check({})
    with pytest.raises(ConfigError, match=r"train\.freeze: expected the beginning of the name of a parameter"):
        check({"train": {"freeze": ["blocks.20"]}})
    with pytest.raises(ConfigError, match=r"plan\.parametrization = mup: expected a learning rate that was found"):
        check({"plan": {"parametrization": "mup"}})
    # With muP the rate of a run is that of every width, so its proxies have it.
    rated = {"plan": {"parametrization": "mup"}, "optim": {"learning_rate": 0.003, "warmup_steps": 9}}
    check(rated)
    assert proxy_recipe(rated)["optim"] == {"learning_rate": 0.003}


# ------------------------------------------------------------------------------------ the other dataset, on real Spark


SMALL = (
    *("tokenizer.vocab_size=1000", "tokens.shard_tokens=20000", "tokens.chunk_tokens=256", "tokens.heldout_share=0.1"),
    *("dedup.finish_edges=100", 'language.languages=["en"]', "train.seq_len=64"),
)
WORD = "quality.gopher_quality"


@pytest.fixture(scope="module")
def run(spark: Any, tmp_path_factory: pytest.TempPathFactory) -> Store:
    """A finished run on a small crawl."""
    crawl, store = tmp_path_factory.mktemp("crawl"), Store(str(tmp_path_factory.mktemp("ablated") / "run"))
    build_demo_crawl(crawl, pages=100, seed=9)
    first = min(crawl.glob("*.warc.gz"))  # one of four is enough, and a quarter of the time
    recipe = read_recipe(str(RECIPE), [f'source.paths=["{first}"]', *SMALL])
    run_steps(spark, prepare(recipe, None), store, 2)
    return store


@pytest.fixture
def same_session(spark: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Branches are made in the session of the tests, which continues."""
    monkeypatch.setattr(branch, "spark_session", lambda *settings: nullcontext(spark))


def made_in(folder: Store) -> set[str]:
    """Tables that a run folder holds versions of."""
    return {path.partition("/")[0] for path in folder.walk() if path.endswith("/manifest.json")}


@pytest.mark.spark
def test_what_a_change_does_not_touch_is_taken_from_the_run(run: Store, same_session: None) -> None:
    files = sorted(run.walk())
    change = change_of([WORD], [])
    folder, recipe = branch.branch_folder(run, change), branch_recipe(run, change)
    make_branch(run, folder, recipe)
    assert made_in(folder) == {"verdicts", "dedup", "representatives", "audit", "clean", "tokenizer", "tokens"}
    assert sorted(path for path in run.walk() if not path.startswith("ablations/")) == files
    tables = read_run(folder).tables
    for name in ("documents", "text", "clusters", "index"):
        assert tables[name] == f"../../../{name}/{read_run(run).tables[name]}"
    assert "/" not in tables["verdicts"]
    assert [home.uri for home in run_folders(folder)] == [folder.uri, run.uri]
    # Again: nothing is made a second time.
    started = {name: open_table(folder, name)[1].run.started for name in tables}
    files = sorted(folder.walk())
    make_branch(run, folder, recipe)
    assert sorted(folder.walk()) == files
    assert {name: open_table(folder, name)[1].run.started for name in tables} == started


@pytest.mark.spark
def test_a_branch_is_a_run_like_any_other(run: Store, same_session: None) -> None:
    change = change_of([WORD], [])
    folder = branch.branch_folder(run, change)
    make_branch(run, folder, branch_recipe(run, change))
    ours, theirs = open_dataset(run), open_dataset(folder)
    assert ours.tokenizer == theirs.tokenizer
    assert not same_dataset(ours.manifest, theirs.manifest)
    found = compare_runs(open_compared_run(run), open_compared_run(folder), 0)
    dropped = open_table(run, "verdicts")[1].content.counts.dropped
    rules = [name for name in dropped if name.startswith("quality/gopher_") and dropped[name]]
    into = {rule: count for (_, rule), count in found.moved(out=False).items()}
    assert into
    assert set(into) <= {*rules, "dedup/exact_duplicate", "dedup/near_duplicate"}
    assert not [key for key in found.documents if key[1] == KEPT and not key[2].startswith("dedup/")]
    assert collect_facts(folder).stale == []
    found = read_lineage(folder)
    assert found.breaks == ()
    assert "The chain is broken" not in Path(write_report(folder, None)).read_text()
    assert stored_recipe(folder, [])["quality"].model_dump()["rules"] == ("gopher_repetition", "c4", "fineweb")


@pytest.mark.spark
def test_a_rule_that_dropped_nothing_leaves_the_dataset_as_it_is(
    run: Store, same_session: None, capsys: pytest.CaptureFixture[str]
) -> None:
    dropped = open_table(run, "verdicts")[1].content.counts.dropped
    rules = rules_of(stored_recipe(run, []))
    idle = next(rule for rule in rules if dropped.get(rule.replace(".", "/")) == 0)
    assert ablate.ablate_command(arguments(run, without=[idle])) == 0
    assert "both datasets have the same files; nothing is trained" in capsys.readouterr().out
    assert not run.exists(f"ablations/{idle}/proxies")


@pytest.mark.spark
def test_documents_whose_copies_the_other_side_trains_on_are_left_out(run: Store, same_session: None) -> None:
    change = change_of(["dedup.near_duplicate"], [])
    folder = branch.branch_folder(run, change)
    make_branch(run, folder, branch_recipe(run, change))
    assert "clusters" in made_in(folder)
    runs, datasets = [run, folder], [open_dataset(run), open_dataset(folder)]
    clusters = members(run)  # the other run's are parts of them
    placed = [split_of(dataset) for dataset in datasets]
    expected = {
        document
        for document, alike in clusters.items()
        if any(places.get(other) == "train" for other in alike for places in placed)
    }
    assert 0 < len(expected) < len(clusters)
    assert trained_copies(runs, datasets, clusters) == expected
    # A copy that the run dropped and the branch trains on speaks against the one that stays.
    copies = {document for document in expected if not any(document in places for places in placed[:1])}
    assert copies & {document for document, split in placed[1].items() if split == "train"}
    assert trained_copies([run, run], [datasets[0], datasets[0]], clusters) == set()


def members(run: Store) -> dict[bytes, set[bytes]]:
    """All documents of the cluster that a document belongs to."""
    folder, manifest = open_table(run, "clusters")
    rows = [row for path in manifest.paths_of() for row in pq.read_table(folder.path(path)).to_pylist()]
    found: dict[bytes, set[bytes]] = {}
    for row in rows:
        found.setdefault(row["cluster"], set()).add(row["doc_id"])
    return {row["doc_id"]: found[row["cluster"]] for row in rows}


def split_of(dataset: Any) -> dict[bytes, str]:
    """train or heldout, of every document of a dataset."""
    return {
        doc_id: stream.rpartition("/")[2]
        for stream, shards in dataset.streams.items()
        for shard in shards
        for doc_id in pa.ipc.open_file(dataset.folder.open_input(shard.docs_path)).read_all()["doc_id"].to_pylist()
    }


def arguments(run: Store, **given: Any) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    ablate.add_ablate_arguments(parser)
    add_trust(parser)
    found = parser.parse_args([])
    return argparse.Namespace(**{**vars(found), "run": run.uri, **given})


@pytest.mark.spark
def test_a_dry_run_prints_reused_tables_and_the_cost(run: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert ablate.ablate_command(arguments(run, without=["quality.c4"], dry_run=True, seeds=2)) == 0
    printed = capsys.readouterr().out
    assert "reused     documents, clusters\ncomputed   verdicts, dedup, audit, clean, tokenizer, tokens\n" in printed
    assert "proxy runs 4, each about 200,000 parameters and at most " in printed
    assert not run.exists("ablations/quality.c4")
    for name, value in (("seeds", 0), ("tokens", 0), ("sequences", 0), ("params", 0.5)):
        with pytest.raises(ConfigError, match=f"--{name}: expected at least 1, got {value:g}"):
            ablate.ablate_command(arguments(run, without=["quality.c4"], **{name: value}))
    with pytest.raises(ConfigError, match="expected a run on a local disk"):
        ablate.ablate_command(argparse.Namespace(run="mock:///bucket/run"))


@pytest.mark.spark
def test_what_would_fail_at_the_end_is_refused_at_the_beginning(run: Store, tmp_path: Path) -> None:
    def refused(kind: type[Exception], message: str, *overrides: str, **given: Any) -> None:
        asked = {"without": ["quality.c4"], "dry_run": True, "overrides": list(overrides)} | given
        with pytest.raises(kind, match=message):
            ablate.ablate_command(arguments(given.get("of", run), **asked))

    spans = ("train.objective=span", "train.document_mask=false")
    refused(ConfigError, "expected train.objective = causal or mlm, got span", *spans)
    refused(ConfigError, "optim.schedule = plateau: expected held-out losses", "optim.schedule=plateau")
    refused(
        ConfigError, "the run: expected a source with held-out text for a row of 131072 tokens", "train.seq_len=131072"
    )
    taken = "--on with: expected the path of a run, got a name that ablate gives to a dataset of its own"
    refused(ConfigError, taken, on=["with"])
    other = make_tiny_dataset(tmp_path / "other")
    refused(ContractError, f"{other.uri}: expected the tokenizer contract of the run .*, got another", on=[other.uri])
    refused(ConfigError, f"{tmp_path}/none: expected a run folder, got no such folder", on=[f"{tmp_path}/none"])
    # A run on the dataset of another one has no clusters, by which copies are found.
    attached = Store(str(tmp_path / "attached"))
    attach_run(attached, run, ("tokens", "tokenizer"))
    refused(ConfigError, f"no clusters and no dedup. Ablate {run.uri}, whose dataset", of=attached)
    assert not attached.exists("ablations")


@pytest.mark.spark
def test_copies_that_another_run_knows_of_are_left_out(run: Store, same_session: None) -> None:
    """Both sides cut the same clusters alike, so only text that is held out elsewhere can have a copy among them."""
    other, change = run.child("../other"), change_of(["dedup.near_duplicate"], ["tokens.seed=7"])
    make_branch(run, other, branch_recipe(run, change))
    datasets, placed = [open_dataset(run)] * 2, split_of(open_dataset(run))
    held = set(split_of(open_dataset(other)))  # a few are held out; the clusters are the same for all
    alike = [members(one) for one in (run, other)]
    expected = {
        document
        for document in held
        if any(placed.get(copy) == "train" for one in alike for copy in one.get(document, ()))
    }
    assert {document for document in expected if document not in placed}  # copies that the run itself dropped
    assert trained_copies([run, run, other], datasets, held) == expected
    assert trained_copies([run, run], datasets, held) == set()


@pytest.mark.spark
@pytest.mark.dist
def test_from_a_rule_to_the_answer_in_the_report(
    run: Store, same_session: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What jobs start in processes of their own runs here, on the ranks of the pool: torch loads for seconds.
    monkeypatch.setattr("jobs.verbs.proxies.train_proxy", trained_here)
    monkeypatch.setattr("jobs.verbs.proxies.subprocess.run", evaluated_here)
    asked = (*ASKED, "train.steps=4")
    given = {"without": [WORD], "overrides": list(asked), "seeds": 2, "sequences": 50}
    assert ablate.ablate_command(arguments(run, **given)) == 0
    printed = capsys.readouterr().out
    assert "proxy run 4/4  without-seed-2" in printed
    assert "2 pairs of proxy runs: " in printed
    shown = ablations(run, open_dataset(run).digest)
    (one,) = shown.shown
    assert (one.result.left_out, one.is_current, shown.unreadable) == ((WORD,), True, ())
    assert one.result.answer in printed
    assert [row.held_out for row in one.rows if row.source == "all"] == ["with the rules", "without the rules"]
    assert all(row.low <= row.mean <= row.high for row in one.rows)
    assert one.result.settings["quality.rules"][1] == ["gopher_repetition", "c4", "fineweb"]
    page = Path(write_report(run, None)).read_text()
    assert f"<h3>Without <code>{WORD}</code></h3>" in page
    assert page.count('class="plot interval"') == len(one.rows)
    # Again: all proxy runs are complete, and the answer is the same.
    assert ablate.ablate_command(arguments(run, **given)) == 0
    again = capsys.readouterr().out
    assert "proxy runs 4 of 4 are complete" in again
    assert one.result.answer in again
    # What is no result is named, and a result on another dataset is marked as such.
    run.write_atomic("ablations/broken/result.json", b'{"version": 1}')
    found = ablations(run, "0" * 64)
    assert [shown.is_current for shown in found.shown] == [False]
    assert "ablations/broken/result.json: expected a valid result of an ablation, got" in found.unreadable[0]
    assert "expected a valid result of an ablation, got" in Path(write_report(run, None)).read_text()


def trained_here(proxy: Any) -> Any:
    if not proxy.done:
        trained(Path(proxy.run.uri), 1)
    return read_train_manifest(proxy.run)


def evaluated_here(command: list[str], **options: Any) -> Any:
    assert command[1:3] == ["-m", "train.eval.evaluate"]
    return argparse.Namespace(returncode=evaluate_main(command[3:]), stderr="")


def test_no_ablation_is_made_through_a_link(tmp_path: Path) -> None:
    run = make_tiny_dataset(tmp_path / "run")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "run/ablations").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ContractError, match="run/ablations: expected a folder of the run to write to"):
        make_branch(run, run.child("ablations/x"), Recipe({}))
    assert not [*(tmp_path / "elsewhere").iterdir()]


def test_a_source_that_is_left_out_is_in_no_setting() -> None:
    values = {
        "source": [{"name": "web", "paths": ["a"]}, {"name": "books", "paths": ["b"]}],
        "dedup": {"source_ranks": ["books", "web"]},
        "train": {"weights": {"web": 1, "books": 2}, "stages": [{"tokens": 9, "weights": {"web": 1, "books": 3}}, {}]},
    }
    left = leave_out_rules(values, ["source.books"], lambda raw: load_recipe(raw, [], recipe_sections(), "a recipe"))
    assert left["source"] == [{"name": "web", "paths": ["a"]}]
    assert left["dedup"] == {"source_ranks": ["web"]}
    assert left["train"] == {"weights": {"web": 1}, "stages": [{"tokens": 9, "weights": {"web": 1}}, {}]}
