"""Tests of the plan: sized from the manifest's tokens, every figure with formula and source, contradictions refused."""

import dataclasses
import json
import math
import re
from pathlib import Path
from typing import Any

import pytest

from schemas.errors import ConfigError, ContractError
from schemas.paths import PLAN_NAME
from schemas.storage import Store
from schemas.tokens import Dataset, Shard, open_dataset
from tests.support.tiny_dataset import make_tiny_dataset
from train.config.settings import Settings, load_settings
from train.data.order import tokens_by_source
from train.data.packing import open_packings, write_packing
from train.model.shape import num_parameters
from train.optim.schedule import StageSchedule, learning_rate
from train.parallel.memory import memory_of_rank
from train.plan.advice import costly_padding
from train.plan.make_plan import make_plan, problems_without_data
from train.plan.plan import Plan, plan_digest, read_plan, read_settings, verify_plan, write_plan

UNIQUE = 168
"""Samples of 64 tokens in the tiny dataset: 128 of web, 40 of books."""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_tiny_dataset(tmp_path_factory.mktemp("run"))


def settings(**sections: dict[str, Any]) -> Settings:
    """These sections over sequences of 64 tokens."""
    return load_settings(sections | {"train": {"seq_len": 64} | sections.get("train", {})}, [], "test")


def planned(run: Store, **sections: dict[str, Any]) -> Plan:
    """The plan for the tiny dataset under these sections."""
    return make_plan(run, open_dataset(run), settings(**sections))


def of_size(run: Store, **tokens: int) -> Dataset:
    """A dataset that promises these many training tokens per source, in shards of at most 100 million."""
    streams = {}
    for source, total in tokens.items():
        sizes = [min(10**8, total - begin) for begin in range(0, total, 10**8)]
        streams[f"{source}/train"] = [
            Shard(f"{source}/train", number, "", "", size, 1, "", "") for number, size in enumerate(sizes)
        ]
    return dataclasses.replace(open_dataset(run), streams=streams, chunk_tokens=4096)


def values(plan: Plan) -> dict[str, float]:
    return {figure.name: figure.value for figure in plan.figures}


# ---------------------------------------------------------------------------------------------------------- the sizes


@pytest.mark.parametrize("total", [2 * 10**8, 2 * 10**9, 2 * 10**10, 6 * 10**11])
def test_a_large_dataset_is_read_about_once_at_twenty_tokens_per_parameter(run: Store, total: int) -> None:
    plan = make_plan(run, of_size(run, web=total), settings(train={"seq_len": 2048}))
    found = values(plan)
    assert found["tokens_per_parameter"] == pytest.approx(20, rel=0.01)
    assert found["epochs.web"] == pytest.approx(1, rel=0.1)
    assert plan.num_params == num_parameters(plan.shape) == pytest.approx(total / 20, rel=0.1)
    assert plan.steps * plan.global_batch * 2048 == found["tokens"] == plan.num_tokens
    assert found["flops"] == plan.flops_per_token * found["tokens"]
    assert found["flops"] > 6 * num_parameters(plan.shape, embeddings=False) * found["tokens"]
    assert plan.global_batch.bit_count() == 1
    # Kaplan's rule is stated below 1e10 parameters only.
    assert ("learning_rate.kaplan" in found) == (found["params_without_embeddings"] < 1e10)


def test_the_rules_meet_known_models(run: Store) -> None:
    """140B tokens ask for a 7B model like Llama's, with batch and learning rate of the DeepSeek rule."""
    plan = make_plan(run, of_size(run, web=140 * 10**9), settings(train={"seq_len": 4096}))
    shape = plan.shape
    assert (shape.d_model, shape.num_heads, shape.num_kv_heads, shape.head_dim) == (4096, 32, 8, 128)
    compute = values(plan)["compute"]
    assert plan.learning_rate == pytest.approx(0.3118 * compute**-0.125, rel=5e-3)
    assert values(plan)["batch_tokens"] == pytest.approx(0.2920 * compute**0.3271, rel=0.42)
    assert plan.warmup_steps == pytest.approx(plan.num_params / values(plan)["batch_tokens"], abs=1)


def test_a_small_dataset_is_repeated_up_to_the_limit(run: Store) -> None:
    for limit in (1.0, 2.5, 4.0):
        plan = planned(run, plan={"max_epochs": limit})
        found = values(plan)
        assert max(found["epochs.web"], found["epochs.books"]) <= limit
        assert (plan.steps + 1) * plan.global_batch > limit * UNIQUE
    assert found["unique_tokens"] == UNIQUE * 64
    assert found["wanted_params"] == 200_000
    assert found["tokens.web"] == sum(shard.num_tokens for shard in open_dataset(run).streams["web/train"])


def test_the_source_that_repeats_soonest_decides(run: Store) -> None:
    dataset = of_size(run, web=10**9, books=10**7)
    found = values(make_plan(run, dataset, settings(train={"seq_len": 2048, "weights": {"web": 1, "books": 1}})))
    assert 3.5 < found["epochs.books"] <= 4
    assert found["epochs.web"] == pytest.approx(found["epochs.books"] / 100, rel=1e-3)
    repeats = found["epochs.books"] - 1
    worth = 1e7 * (1 + 15.387756 * (1 - math.exp(-repeats / 15.387756)))
    assert found["worth_in_unique_tokens"] == pytest.approx(found["tokens"] / 2 + worth, rel=1e-3)


def test_the_loss_of_a_run_is_that_of_its_repeated_sources(run: Store) -> None:
    """One by one: of all 1.01 G tokens together the 80 M that are drawn would count as new."""
    dataset = of_size(run, web=10**9, books=10**7)
    train, sizes = {"seq_len": 2048, "weights": {"web": 1, "books": 1}}, {"params": 2e7}
    plan = make_plan(run, dataset, settings(plan=sizes, train=train))
    found = values(plan)
    worth = found["worth_in_unique_tokens"]
    # Of what is read, 40 M of web and all 10 M of books, U_N = 0.050987 * 50 M parameters are carried.
    carried = 0.050987 * (found["tokens"] / 2 + 1e7)
    params = carried * (1 + 5.309743 * (1 - math.exp(-(plan.num_params / carried - 1) / 5.309743)))
    loss = 1.869144 + 520.825 / params**0.3526596 + 1487.716 / worth**0.3526596
    assert found["expected_loss"] == pytest.approx(loss, rel=1e-3)
    (advice,) = (line for line in plan.advice if line.startswith("The run draws"))
    assert f"expected loss {found['expected_loss']:.3f}" in advice
    assert "books 4 times" in advice
    (formula,) = (figure.formula for figure in plan.figures if figure.name == "expected_loss")
    assert formula == "L(N', D') of this run, on C4"
    small = make_plan(run, of_size(run, web=10**9), settings(plan={"params": 6.5e6}, train={"seq_len": 2048}))
    (formula,) = (figure.formula for figure in small.figures if figure.name == "expected_loss")
    assert formula.endswith("on C4, a guess: its law was fitted to 7,000,000 to 9,000,000,000 parameters")


def test_no_loss_above_that_of_knowing_nothing_is_printed(run: Store) -> None:
    """ln V of 512 ids is 6.24 nats; the laws, extrapolated to a million parameters, give more."""
    small = make_plan(run, of_size(run, web=10**7), settings(plan={"params": 1e6}, train={"seq_len": 2048}))
    losses = [name for name in values(small) if re.fullmatch(r"size\..*\.loss|expected_loss", name)]
    assert not losses
    (sentence,) = (line for line in small.advice if "ln V" in line)
    said = re.fullmatch(
        r"Expected losses above ln V = 6\.2 are left out: the laws are for larger models, and give ([\d.]+) to "
        r"([\d.]+) nats here\.",
        sentence,
    )
    assert said is not None
    assert 6.2 < float(said[1]) < float(said[2])
    assert "expected loss" not in " ".join(small.advice)
    large = make_plan(run, of_size(run, web=10**10), settings(plan={"params": 1e8}, train={"seq_len": 2048}))
    assert values(large)["expected_loss"] < math.log(512)
    assert values(large)["size.hoffmann_approach_3.loss"] < math.log(512)
    assert not [line for line in large.advice if "ln V" in line]


def test_what_is_given_is_never_changed(run: Store) -> None:
    plan = planned(
        run,
        plan={"num_layers": 2, "d_model": 32, "num_heads": 2},
        train={"seq_len": 32, "global_batch": 5, "steps": 11},
        optim={"learning_rate": 0.002, "warmup_steps": 0},
    )
    assert (plan.global_batch, plan.steps, plan.learning_rate, plan.warmup_steps) == (5, 11, 0.002, 0)
    assert (plan.shape.num_layers, plan.shape.d_model, plan.shape.num_heads) == (2, 32, 2)
    sources = {figure.name: figure.source for figure in plan.figures}
    given = ("global_batch", "steps", "learning_rate", "warmup_steps", "num_layers", "d_model", "num_heads")
    assert {sources[name] for name in given} == {"recipe"}


# --------------------------------------------------------------------------------------------------------- the stages

STAGES = [
    {"tokens": 64 * 4 * 30},
    {"tokens": 32 * 8 * 20, "seq_len": 32, "global_batch": 8, "weights": {"web": 1, "books": 1}},
    {"learning_rate": 3e-4, "final_lr_share": 0.5},
]


def test_stages_follow_each_other(run: Store) -> None:
    plan = planned(
        run,
        train={"global_batch": 4, "steps": 90, "stages": STAGES},
        optim={"learning_rate": 2e-3, "warmup_steps": 6},
    )
    rows = [(s.first_step, s.num_steps, s.seq_len, s.global_batch) for s in plan.stages]
    assert rows == [(0, 30, 64, 4), (30, 20, 32, 8), (50, 40, 64, 4)]
    assert plan.stages[1].counts == {"books": 1, "web": 1}
    assert plan.stages[0].counts == plan.stages[2].counts == {"books": 5, "web": 16}
    assert (plan.steps, plan.seq_len, plan.global_batch) == (90, 64, 4)
    assert plan.num_tokens == values(plan)["tokens"] == 64 * 4 * 30 + 32 * 8 * 20 + 64 * 4 * 40
    assert plan.course.stages == (
        StageSchedule(1, 30),
        StageSchedule(31, 20),
        StageSchedule(51, 40, learning_rate=3e-4, schedule="linear", final_lr_share=0.5),
    )
    found = [learning_rate(step, plan.course, plan.settings.optim) for step in (3, 6, 51, 90)]
    assert found[:2] == [1e-3, 2e-3]
    assert found[2] == pytest.approx(3e-4, rel=0.05)
    assert found[3] == pytest.approx(1.5e-4)


def test_a_run_without_stages_is_one_and_goes_by_the_runs_schedule(run: Store) -> None:
    plan = planned(run, train={"global_batch": 4, "steps": 90})
    assert [(stage.first_step, stage.num_steps) for stage in plan.stages] == [(0, 90)]
    assert plan.course.stages == ()


def test_the_warm_up_is_a_tenth_of_a_short_run_by_its_first_batch(run: Store) -> None:
    assert planned(run, train={"global_batch": 4, "steps": 90}).warmup_steps == 9
    # 8,192 + 1,024 + 2,304 + 48 = 11,568 parameters are the tokens of 2.8 steps of 64 sequences of 64.
    small = {"num_layers": 1, "d_model": 16, "num_heads": 1, "num_kv_heads": 1, "d_ffw": 48, "tie_embeddings": True}
    train = {"steps": 400, "stages": [{"global_batch": 64}]}
    found = planned(run, plan=small | {"max_epochs": 200}, train=train)
    assert (found.num_params, found.warmup_steps) == (11_568, 3)


# ----------------------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(("steps", "fits"), [(168, True), (169, False)])
def test_more_passes_than_allowed_are_refused(run: Store, steps: int, fits: bool) -> None:
    """The 168 samples in 4 passes are 672, which are 168 steps of 4; sources are drawn by their sizes."""
    train = {"global_batch": 4, "steps": steps}
    if fits:
        assert planned(run, train=train).steps == steps
    else:
        with pytest.raises(
            ConfigError, match=r"4 passes over a source, got books 4\.025 times, web 4\.023 times\. Lower"
        ):
            planned(run, train=train)


def test_passes_are_counted_over_all_stages(run: Store) -> None:
    books = {"weights": {"web": 0, "books": 1}}
    # 40 samples of books in 4 passes are 160, which are 40 steps of 4.
    stages = [{"tokens": 64 * 4 * 30} | books, {"tokens": 64 * 4 * 10} | books]
    assert values(planned(run, train={"global_batch": 4, "stages": stages}))["epochs.books"] == 4
    stages[1]["tokens"] = 64 * 4 * 11
    with pytest.raises(ConfigError, match=r"train\.stages, .*4 passes over a source, got books 4\.1 times"):
        planned(run, train={"global_batch": 4, "stages": stages})


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"steps": 9, "stages": [{"tokens": 6400}]}, r"got 9 steps and 6400 tokens in train.stages\[0\]"),
        ({"weights": {"wbe": 1}}, r"'wbe' is no source \(did you mean 'web'\?\); 'books' is not named"),
        ({"weights": {"web": 1}}, "'books' is not named"),
        ({"stages": [{"tokens": 6400}, {"weights": {"web": 1}}]}, r"train.stages\[1\].*'books' is not named"),
        ({"seq_len": 48}, "48"),
        ({"steps": 10, "global_batch": 4, "stages": [{"tokens": 64 * 4 * 10}, {}]}, r"train.stages\[1\]: expected at"),
    ],
)
def test_settings_that_do_not_fit_are_refused(run: Store, train: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"(?s){message}"):
        planned(run, train=train)


# -------------------------------------------------------------------------------------------------------------- memory


def test_memory_is_that_of_a_gpu_for_every_number_of_ranks_that_the_layout_is_for(run: Store) -> None:
    # One rank is none of two that share every matrix, and three sequences are too few for four groups of ranks.
    layout = {"tensor": 2, "data": "zero2"}
    sections = {"plan": {"world_sizes": [1, 2, 4, 6, 8]}, "layout": layout, "train": {"global_batch": 3}}
    plan = planned(run, **sections)
    found = {name: value for name, value in values(plan).items() if name.startswith("memory.")}
    assert {name.split(".")[1] for name in found} == {"2", "4", "6"}
    for ranks in (2, 4, 6):
        need = memory_of_rank(plan.shape, plan.settings, ranks, 64, plan.global_batch, "cuda")
        parts = {name.split(".")[2]: size for name, size in found.items() if name.startswith(f"memory.{ranks}.")}
        assert parts == {name: size for name, size in need.at_peak.items() if size}
        assert found[f"memory.{ranks}"] == need.peak == sum(parts.values())


def test_memory_is_that_of_the_stage_that_needs_most(run: Store) -> None:
    train = {"global_batch": 8, "stages": [{"tokens": 64 * 8 * 9}, {"tokens": 128 * 8 * 9, "seq_len": 128}]}
    plan = planned(run, train=train, plan={"world_sizes": [2]})
    assert values(plan)["memory.2"] == memory_of_rank(plan.shape, plan.settings, 2, 128, 8, "cuda").peak


def test_a_layout_beyond_the_device_is_refused_with_the_parts(run: Store) -> None:
    train, plan = {"global_batch": 4}, {"world_sizes": [1, 4]}
    found = values(planned(run, plan=plan, train=train))
    limit = int(found["memory.4"])
    assert planned(run, plan=plan | {"device_memory": limit}, train=train).settings.plan.device_memory == limit
    with pytest.raises(ConfigError) as refused:
        planned(run, plan=plan | {"device_memory": limit - 1}, train=train)
    message = str(refused.value)
    assert f"plan.device_memory = {limit - 1:,} bytes on each rank, got {limit:,} on each of 4 ranks (" in message
    parts = re.search(r"\((weights.*?)\)\. Lower layout\.micro_batch", message)
    assert parts is not None
    sizes = dict(part.rsplit(" ", 1) for part in parts[1].split(", "))
    assert {name: int(size.replace(",", "")) for name, size in sizes.items()} == {
        name.split(".")[2]: size for name, size in found.items() if name.startswith("memory.4.")
    }


def test_a_limit_that_nothing_is_compared_with_is_refused(run: Store) -> None:
    plan = {"device_memory": 1 << 30, "world_sizes": [1, 3]}
    with pytest.raises(ConfigError, match=r"plan\.world_sizes: expected a number of ranks that works .*, got \[1, 3\]"):
        planned(run, plan=plan, layout={"tensor": 2})
    # Of those given it is the largest that the layout is for.
    sizes = {"device_memory": 1, "world_sizes": [2, 4, 5, 8]}
    with pytest.raises(ConfigError, match=r"on each of 4 ranks"):
        planned(run, plan=plan | sizes, layout={"tensor": 2}, train={"global_batch": 3})


# ------------------------------------------------------------------------------------------------------------- packing


def test_packed_rows_are_laid_out_when_the_run_is_planned(tmp_path: Path) -> None:
    run = make_tiny_dataset(tmp_path)
    plan = planned(run, train={"packing": "best_fit", "global_batch": 4, "steps": 40})
    (summary,) = tmp_path.glob("train/packing/*/packing.json")
    rows = {source["name"]: source["num_rows"] for source in json.loads(summary.read_text())["sources"]}
    packings = open_packings(run, open_dataset(run), plan.settings.train)
    assert packings is not None
    assert {name: index.group_begins[-1] for name, index in packings.items()} == rows
    assert plan.settings.train.pack_chunks == 64
    # Padding fills rows up, so there are more of them than the stream has sequences; passes are counted in rows.
    assert sum(rows.values()) > UNIQUE
    found = values(plan)
    assert found["unique_tokens"] == sum(rows.values()) * 64
    # 128 and 40 samples' tokens are laid out in as many rows as the index has.
    assert found["padding.web"] == pytest.approx(1 - 128 / rows["web"])
    assert found["padding.books"] == pytest.approx(1 - 40 / rows["books"])
    formula = next(figure.formula for figure in plan.figures if figure.name == "documents_cut.web")
    assert re.fullmatch(r"in more than one row, of 5\d; 5\d cut from the stream", formula)
    assert not any(name.startswith("padding.") for name in values(planned(run)))
    assert plan.order != planned(run, train={"global_batch": 4, "steps": 40}).order
    before = summary.stat().st_mtime_ns
    assert planned(run, train={"packing": "best_fit", "global_batch": 4, "steps": 40}) == plan
    assert summary.stat().st_mtime_ns == before


def test_a_plan_of_an_earlier_version_packs_each_chunk_by_itself(tmp_path: Path) -> None:
    run = make_tiny_dataset(tmp_path)
    dataset, train = open_dataset(run), {"packing": "best_fit", "global_batch": 4, "steps": 40}
    plan = planned(run, train=train | {"pack_chunks": 1})
    stored = json.loads(plan.model_dump_json())
    del stored["settings"]["train"]["pack_chunks"], stored["digest"]
    run.write_atomic("train/plan.json", json.dumps(stored).encode())
    earlier = read_plan(run)
    verify_plan(run, dataset, earlier)
    with pytest.raises(ContractError, match=r"expected steps = None, got 40\. Run `penstock plan` again"):
        verify_plan(run, dataset, earlier.model_copy(update={"figures": []}))
    assert "train.pack_chunks" not in {**earlier.settings.content(), **plan.settings.content()}
    assert read_settings(run, dataset, []).train.pack_chunks == 1
    assert read_settings(run, dataset, ["train.packing='best_fit'"]).for_device("cpu").train.pack_chunks == 64
    assert planned(run, train=train).settings.content()["train.pack_chunks"] == 64
    with pytest.raises(ConfigError, match="pack_chunks requires packing = best_fit"):
        settings(train={"pack_chunks": 2})


def test_padding_from_five_percent_on_is_advice_with_its_flops(tmp_path: Path) -> None:
    run = make_tiny_dataset(tmp_path)
    train = {"packing": "best_fit", "pack_chunks": 1, "global_batch": 4, "steps": 40}
    plan = planned(run, train=train)
    packed = write_packing(run, open_dataset(run), plan.settings.train)
    assert packed is not None
    of = {"web": 0.12, "books": 0.03}
    sources = [source.model_copy(update={"padding": of[source.name]}) for source in packed.sources]
    (line,) = costly_padding(plan, sources)
    drawn = tokens_by_source(plan.stages)
    share = (0.12 * drawn["web"] + 0.03 * drawn["books"]) / (160 * 64)
    lost = re.fullmatch(
        r"(\S+) % of the positions are padding \(web 12.0 %\): (\S+) of (\S+) FLOPs are lost. Raise "
        r"train.pack_chunks = 1, lower train.seq_len, or set train.packing = \"stream\".",
        line,
    )
    assert lost is not None
    assert float(lost[1]) == pytest.approx(100 * share, abs=0.05)
    assert float(lost[3]) == pytest.approx(plan.flops_per_token * 160 * 64, rel=0.01)
    assert float(lost[2]) == pytest.approx(share * float(lost[3]), rel=0.01)
    few = [source.model_copy(update={"padding": 0.049}) for source in packed.sources]
    assert (list(costly_padding(plan, few)), list(costly_padding(plan, []))) == ([], [])


# ---------------------------------------------------------------------------------------------- written, read, printed


def test_every_figure_says_where_it_comes_from(run: Store) -> None:
    plan = planned(run, train={"peak_flops": 1e12})
    for figure in plan.figures:
        assert figure.formula
        assert figure.source
    assert len({figure.name for figure in plan.figures}) == len(plan.figures)
    found = values(plan)
    assert found["seconds_at_peak"] == found["flops"] / 1e12
    for name in ("params", "steps", "warmup_steps", "global_batch", "learning_rate", "flops_per_token"):
        assert found[name] == getattr(plan, {"params": "num_params"}.get(name, name))


def test_a_plan_is_read_back_and_belongs_to_its_dataset(run: Store, tmp_path: Path) -> None:
    plan = planned(run)
    with pytest.raises(ContractError, match=r"got no train/plan\.json\. Make it with `penstock plan`"):
        read_plan(run)
    write_plan(run, plan)
    assert read_plan(run) == plan.model_copy(update={"digest": plan_digest(plan)})
    assert planned(run) == plan
    other = make_tiny_dataset(tmp_path, seed=1)
    write_plan(other, plan)
    with pytest.raises(ContractError, match=f"expected dataset {plan.dataset}, got {open_dataset(other).digest}"):
        read_plan(other)
    other.write_atomic(PLAN_NAME, b'{"dataset": "x"}')
    with pytest.raises(ContractError, match=r"(?s)plan.json: expected a plan, got .*tokenizer"):
        read_plan(other)


def test_a_plan_keeps_what_was_set_and_no_defaults(run: Store) -> None:
    """A default that is written out would be refused where it is not used, such as mask_share without a mask."""
    plan = planned(run, train={"steps": 30}, optim={"schedule": "wsd", "decay_share": 0.2}, layout={"data": "zero2"})
    write_plan(run, plan)
    assert run.read_json(PLAN_NAME)["settings"] == {
        "plan": {},
        "cluster": {},
        "train": {"seq_len": 64, "steps": 30},
        "optim": {"schedule": "wsd", "decay_share": 0.2},
        "layout": {"data": "zero2"},
        "checkpoint": {},
        "guard": {},
    }
    dataset = open_dataset(run)
    assert read_settings(run, dataset, []) == plan.settings
    changed = read_settings(run, dataset, ["train.objective=mlm", "train.mask_share=0.3", "layout.data=ddp"])
    assert (changed.train.mask_share, changed.train.steps, changed.layout.data) == (0.3, 30, "ddp")
    assert changed.optim == plan.settings.optim
    with pytest.raises(
        ConfigError,
        match=r"got plan\.d_model=64, which size the model or choose its layout\. Give them to `penstock plan`",
    ):
        read_settings(run, dataset, ["train.steps=3", "plan.d_model=64"])
    with pytest.raises(ConfigError, match="did you mean 'micro_batch'"):
        read_settings(run, dataset, ["layout.micro_bach=3"])


# ---------------------------------------------------------------------------------------- settings without effect

OWN = {"learning_rate": 1e-3, "global_batch": 4, "weights": {"web": 1, "books": 1}}
OWN_STAGES = [{"tokens": 2560, **OWN}, {"tokens": 2560, **OWN}]
SHAPE = {"num_layers": 2, "d_model": 32, "num_heads": 2}


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"train": {"stages": OWN_STAGES, "global_batch": 4}}, "train.global_batch: expected a stage without its own"),
        ({"train": {"stages": OWN_STAGES, "weights": {"web": 1, "books": 0}}}, "train.weights: expected a stage"),
        ({"train": {"stages": OWN_STAGES}, "optim": {"learning_rate": 0.1}}, "optim.learning_rate: expected a stage"),
        ({"train": {"stages": OWN_STAGES}, "optim": {"schedule": "wsd"}}, "without its own learning_rate"),
        ({"plan": {"rope_scaling": "linear"}}, "expected a plan.rope_factor above 1, got 1"),
        ({"plan": {"compute": 3e9, "inference_tokens": 1e6, **SHAPE}}, "expected a size that the plan chooses"),
    ],
)
def test_a_new_plan_has_no_setting_without_effect(run: Store, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)):
        planned(run, **sections)
    assert any(message in problem for problem in problems_without_data(settings(**sections)))


def test_settings_that_one_stage_uses_have_an_effect(run: Store) -> None:
    first, last = OWN_STAGES[0], {"tokens": 2560}
    sections = {"train": {"stages": [first, last], "global_batch": 8}, "optim": {"schedule": "wsd"}}
    assert [stage.global_batch for stage in planned(run, **sections).stages] == [4, 8]
    # The rate that muP requires is not replaced by those of stages.
    mup = {"plan": {"parametrization": "mup"}, "train": {"stages": OWN_STAGES}, "optim": {"learning_rate": 0.1}}
    assert planned(run, **mup).learning_rate == 0.1


@pytest.mark.parametrize(("steps", "says"), [(48, False), (5, True), (200, True)])
def test_steps_that_spend_another_budget_are_named(run: Store, steps: int, says: bool) -> None:
    params = planned(run, plan=SHAPE).num_params
    sizing = {**SHAPE, "min_params": 1000, "compute": 6 * params * 48 * 4 * 64, "max_epochs": 100}
    plan = planned(run, plan=sizing, train={"steps": steps, "global_batch": 4})
    sentences = [line for line in plan.advice if line.startswith("train.steps decides the number of training tokens")]
    spent = f"6ND of this run is {6.0 * params * steps * 4 * 64:.3g} FLOPs, that of the budget {sizing['compute']:.3g}"
    assert [spent in line for line in sentences] == [True] * says


def test_a_shape_below_the_smallest_size_is_refused(run: Store) -> None:
    assert planned(run, plan={**SHAPE, "min_params": 60_000}).num_params == 43_168
    assert planned(run, plan=SHAPE).num_params == 43_168  # below the default, which no setting asks for
    with pytest.raises(ConfigError, match=r"expected a model of at least 1,000,000 parameters, got 43,168"):
        planned(run, plan={**SHAPE, "min_params": 1_000_000})


@pytest.mark.parametrize(
    ("section", "name", "value"),
    [
        ("plan", "tokens_per_parameter", 1e300),
        ("plan", "tokens_per_parameter", 5e-324),
        ("plan", "max_epochs", 1e300),
        ("plan", "params", 5e-324),
        ("plan", "rope_original", 10**30),
        ("train", "pack_chunks", 10**30),
        ("train", "peak_flops", 1e-320),
    ],
)
def test_numbers_that_no_computation_can_hold_are_refused(section: str, name: str, value: float) -> None:
    others = {"rope_original": {"rope_scaling": "llama3"}, "pack_chunks": {"packing": "best_fit"}}
    with pytest.raises(ConfigError, match=rf"{section}\.{name}: Input should be"):
        settings(**{section: {name: value, **others.get(name, {})}})
