"""Runs that begin from a checkpoint of another run or from a folder of Hugging Face, and runs with frozen weights."""

import json
import shutil
from contextlib import nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from jobs.cli import main
from jobs.verbs.takedown import describe_effects, effects_of
from pipeline.takedown.exports import describe_exports, exports_with
from schemas.errors import ConfigError, ContractError
from schemas.exports import read_receipts
from schemas.ids import digest_of, file_sha256
from schemas.origin import ModelOrigin, origin_of
from schemas.storage import Store
from schemas.takedown import Effects, TableChange, TrainedCheckpoint
from schemas.tokens import open_dataset
from tests.support.model_oracle import TINY, small_model
from tests.support.tiny_runs import (
    assert_equal_up_to_rounding,
    assert_same_bits,
    copied,
    cut_back,
    make_run,
    notes,
    state_at,
    train,
    trained,
)
from train.checkpoint.folder import list_checkpoints, shape_of
from train.checkpoint.initial import read_origin
from train.export.llama import export_checkpoint, export_llama
from train.model.transformer import initial_weight
from train.monitor.metrics import last_metrics
from train.parallel.devices import RunDevices
from train.parallel.ranks import open_ranks
from train.plan.layouts import plan_for_devices
from train.plan.make_plan import make_plan
from train.plan.plan import Plan, read_plan
from train.plan.text import print_plan

pytestmark = pytest.mark.dist

NO_SHAPE = dict.fromkeys(("num_layers", "d_model", "num_heads", "num_kv_heads", "d_ffw", "tie_embeddings"))
SHORT = {"train": {"steps": 4, "eval_every": 0}, "checkpoint": {"every": 2, "first": True, "keep": 9}}
BERT = {
    **{"norm": "layernorm", "norm_position": "post", "positions": "learned", "max_positions": 40, "bias": True},
    **{"activation": "gelu", "head_transform": True, "num_token_types": 2, "num_kv_heads": 4, "tie_embeddings": True},
    "qk_norm": False,
}


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of four steps on two ranks, with zero3."""
    return trained(make_run(tmp_path_factory.mktemp("old") / "run", SHORT), 2)


def new_run(folder: Path, weights: object, **sections: dict[str, object]) -> Path:
    changes = SHORT | {"plan": NO_SHAPE, "train": SHORT["train"] | {"init_from": str(weights), "seed": 5}}
    return make_run(folder, {name: changes.get(name, {}) | sections.get(name, {}) for name in {**changes, **sections}})


def plan_of(run: Path) -> Plan:
    return plan_for_devices(Store(str(run)), [], RunDevices("cpu", None, "", 1, 1))[0]


def weights_at(run: Path, step: int) -> dict[str, torch.Tensor]:
    return {name: value for name, value in state_at(run, step).items() if name.startswith("model.")}


@pytest.mark.parametrize(("ranks", "layout"), [(1, ""), (2, "layout.tensor=2"), (2, "layout.pipeline=2")])
def test_a_run_begins_from_a_checkpoint_in_any_layout(old: Path, tmp_path: Path, ranks: int, layout: str) -> None:
    options = [layout, "layout.micro_batch=2"] if "pipeline" in layout else [layout] if layout else []
    run = trained(new_run(tmp_path / "run", old), ranks, *options)
    before, after = weights_at(old, 4), weights_at(run, 0)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    assert not any(value.any() for name, value in state_at(run, 0).items() if name.startswith("average"))
    origin = origin_of(Store(str(run)))
    assert origin is not None
    assert (origin.path, origin.step, origin.dataset) == (str(old), 4, notes(old)[-1].identity.dataset)
    assert notes(run)[0].identity.settings["train.init_from"] == origin.digest
    if ranks == 1:
        receipts = [(own.destination, own.checkpoint) for own in read_receipts(Store(str(old)))]
        assert receipts == [(str(run), notes(old)[-1].name)]


def test_the_old_run_is_not_needed_to_resume(old: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = copied(old, tmp_path / "source")
    run = trained(new_run(tmp_path / "run", source, source={"paths": ["x"]}), 1)
    began = read_plan(Store(str(run))).origin
    shutil.rmtree(source)
    again = cut_back(copied(run, tmp_path / "again"), 2)
    assert main(["plan", str(again), "--quiet", "--set", "plan.world_sizes=[1]"]) == 0
    assert main(["train", str(again), "--dry-run"]) == 0
    # `penstock train` plans before it starts the ranks.
    assert make_plan(Store(str(again)), open_dataset(Store(str(again))), plan_of(again).settings).origin == began
    assert_same_bits(trained(again, 1, "train.log_every=5"), run)
    fresh = new_run(tmp_path / "fresh", source, source={"paths": ["x"]})
    assert main(["train", str(fresh), "--dry-run"]) == 2
    assert "train.init_from: expected a run with a checkpoint" in capsys.readouterr().err


def test_a_checkpoint_of_an_earlier_step_and_the_line_of_origins(old: Path, tmp_path: Path) -> None:
    first = trained(new_run(tmp_path / "first", old / "train/checkpoints/step-000002"), 1)
    assert weights_at(first, 0).keys() == weights_at(old, 2).keys()
    assert all(torch.equal(value, weights_at(first, 0)[name]) for name, value in weights_at(old, 2).items())
    second = plan_of(new_run(tmp_path / "second", first))
    assert second.origin is not None
    assert [(origin.path, origin.step) for origin in second.origin.line] == [(str(first), 4), (str(old), 2)]
    text = print_plan(second)
    assert f"step 4 of {first}" in " ".join(text.split())


def test_the_plan_refuses_what_contradicts_the_weights(old: Path, tmp_path: Path) -> None:
    for number, (sections, message) in enumerate(
        [
            ({"plan": {"d_model": 64}}, r"got plan.d_model = 64 in place of 48. Remove these settings"),
            ({"plan": {"params": "1M"}}, r"got plan.params = 1e\+06"),
            ({"train": {"init_from": str(tmp_path)}}, r"expected a run with a checkpoint, a checkpoint, or a folder"),
            ({"train": {"freeze": ["blocks.9"]}}, r"got 'blocks.9'. The nearest are blocks.1, blocks.0"),
            ({"train": {"freeze": ["*"]}}, r"got \*, which freeze all"),
        ]
    ):
        with pytest.raises(ConfigError, match=message):
            plan_of(new_run(tmp_path / str(number), old, **sections))


def test_a_recipe_sets_the_optimizer_and_not_the_shape_of_the_weights(old: Path, tmp_path: Path) -> None:
    run = new_run(tmp_path / "run", old, plan={"recipe": "modern"}, optim={})
    plan = plan_of(run)
    assert plan.shape == shape_of(list_checkpoints(Store(str(old)))[-1])
    assert (plan.settings.optim.optimizer, plan.settings.optim.muon_coefficients) == ("normuon", "jordan")


MUP = {"parametrization": "mup", "mup_base_width": 24, "qk_norm": False}
RATE = {"learning_rate": 0.01}


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with muP, twice as wide as its base, that measures its held-out loss at the end."""
    sections = SHORT | {"plan": MUP, "optim": RATE, "train": {"steps": 4, "eval_every": 4}}
    return trained(make_run(tmp_path_factory.mktemp("wide") / "run", sections), 1)


@pytest.mark.parametrize("plan", [{}, {"parametrization": "mup", "mup_base_width": 24}])
def test_a_run_that_begins_from_a_run_with_mup_has_its_factors(wide: Path, tmp_path: Path, plan: dict) -> None:
    # A rate so low that the model stays that of the old run: its held-out loss is the same.
    rate = {"learning_rate": 1e-12}
    run = new_run(tmp_path / "run", wide, plan=plan, optim=rate, train={"steps": 1, "eval_every": 1})
    shape = plan_of(run).shape
    assert shape == shape_of(list_checkpoints(Store(str(wide)))[-1])
    assert (shape.width_multiplier, shape.query_scale) == (2.0, pytest.approx(0.5**0.5))
    losses = [last_metrics(Store(str(path)), step).heldout_loss for path, step in ((wide, 4), (trained(run, 1), 1))]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


def test_settings_that_do_not_fit_weights_with_mup_are_refused(wide: Path, old: Path, tmp_path: Path) -> None:
    for number, (source, sections, message) in enumerate(
        [
            (
                wide,
                {"plan": {"parametrization": "mup", "mup_base_width": 16}},
                "got plan.mup_base_width = 16 in place of 24",
            ),
            (
                wide,
                {"plan": {"parametrization": "standard"}},
                'got plan.parametrization = "standard" in place of "mup"',
            ),
            (old, {"plan": {"parametrization": "mup"}}, 'got plan.parametrization = "mup" in place of "standard"'),
            (wide, {"optim": RATE | {"optimizer": "lamb"}}, "whose rates by width are known, got lamb"),
            (
                wide,
                {"optim": {"learning_rate": None}},
                "expected a learning rate that was found at the base width 24, got no law",
            ),
        ]
    ):
        with pytest.raises(ConfigError, match=message):
            plan_of(new_run(tmp_path / str(number), source, **sections))


def test_weights_of_another_model_than_the_transformer_are_refused(tmp_path: Path) -> None:
    moe = {"plan": {"model": "moe", "model_options": {"experts": 2}}, "train": {"steps": 1, "eval_every": 0}}
    experts = trained(make_run(tmp_path / "experts", moe), 1)
    with pytest.raises(
        ConfigError, match=r"expected weights of the transformer .* plan\.model = train\.model\.moe:build"
    ):
        plan_of(new_run(tmp_path / "run", experts))


def test_learned_positions_are_enough_for_held_out_rows(tmp_path: Path) -> None:
    """They have train.seq_len tokens, however short the rows of all stages are."""
    plan = {"positions": "learned", "max_positions": 16, "qk_norm": False}
    train = {"steps": 2, "seq_len": 32, "stages": [{"seq_len": 16}]}
    for eval_every in (0, 1):
        run = make_run(tmp_path / str(eval_every), SHORT | {"plan": plan, "train": train | {"eval_every": eval_every}})
        if not eval_every:
            assert plan_of(run).stages[0].seq_len == 16
            continue
        with pytest.raises(ConfigError, match=r"at most plan\.max_positions = 16 tokens, got 32"):
            plan_of(run)


def test_weights_that_changed_since_the_plan_are_refused(old: Path, tmp_path: Path) -> None:
    source = copied(old, tmp_path / "old")
    run = new_run(tmp_path / "run", source)
    plan = plan_of(run)
    shutil.rmtree(source / "train/checkpoints/step-000004")
    weights = {f"model.{name}": value.clone() for name, value in small_model(plan.shape).state_dict().items()}
    with (
        open_ranks() as ranks,
        pytest.raises(ContractError, match=r"expected the checkpoint of the plan, \w{12}, got no file"),
    ):
        read_origin(plan.origin, (plan.shape, 0), ranks, weights)


def test_a_takedown_names_the_runs_that_began_from_a_checkpoint_and_the_origins_of_a_run(
    old: Path, tmp_path: Path
) -> None:
    run = trained(new_run(tmp_path / "run", old), 1)
    store, dataset = Store(str(old)), open_dataset(Store(str(old)))
    seen = TrainedCheckpoint(checkpoint=notes(old)[-1].name, step=4, dataset=dataset.digest, saw=True)
    change = TableChange(
        before=dataset.digest, after="a" * 64, version_before="b", version_after="a", rows=1, rewritten=[], shared=0
    )
    (receipt,) = [
        own
        for own in exports_with(store, {"tokens": change}, Effects(steps=[2], models=[seen]))
        if own.destination == str(run)
    ]
    (line,) = describe_exports(store, [receipt])
    assert line == (
        f"run {run}: its training began from train/checkpoints/step-000004, which was trained on them; delete its "
        "checkpoints"
    )
    clean = Effects(steps=[], models=[seen.model_copy(update={"saw": False})])
    assert receipt.id not in [own.id for own in exports_with(store, {"tokens": change}, clean)]
    effects = effects_of(Store(str(run)), frozenset())
    assert effects.origins == [f"step 4 of {old} ({origin_of(Store(str(run))).digest[:12]})"]
    assert any(f"began from step 4 of {old}" in text for text in describe_effects(effects))


@pytest.mark.parametrize("kind", ["qwen3", "llama", "bert"])
def test_a_run_begins_from_a_folder_of_hugging_face(old: Path, tmp_path: Path, kind: str) -> None:
    source, sections = old, {"train": {"objective": "mlm"}} if kind == "bert" else {}
    if kind != "qwen3":
        changes = {"plan": BERT if kind == "bert" else {"qk_norm": False}}
        changes["train"] = SHORT["train"] | sections.get("train", {})
        source = trained(make_run(tmp_path / kind, SHORT | changes), 1)
    folder = tmp_path / "model"
    export_checkpoint(Store(str(source)), folder, 4)
    run = trained(new_run(tmp_path / "run", folder, **sections), 2)
    before, after = weights_at(source, 4), weights_at(run, 0)
    assert before.keys() == after.keys()
    assert [name for name in before if not torch.equal(before[name], after[name])] == []
    origin = read_plan(Store(str(run))).origin
    assert origin is not None
    assert (origin.format, sorted(origin.files)) == (kind, ["config.json", "model.safetensors"])


def test_a_folder_with_another_tokenizer_is_refused(old: Path, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    export_checkpoint(Store(str(old)), folder, 4)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    words = tokenizer["model"]["vocab"]
    one, other = list(words)[-2:]
    words[one], words[other] = words[other], words[one]
    path.write_text(json.dumps(tokenizer))
    with pytest.raises(ConfigError, match=r"in which 2 of \d+ ids have other pieces \(51\d is '\w+' and not '\w+', 51"):
        plan_of(new_run(tmp_path / "run", folder))
    path.unlink()
    with pytest.raises(ConfigError, match=r"expected tokenizer.json or tokenizer.model beside the weights, got none"):
        plan_of(new_run(tmp_path / "none", folder))


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"normalizer": {"type": "Lowercase"}}, ConfigError, "divides texts in another way, by its normalizer. Make"),
        ({"pre_tokenizer": {"type": "Digits", "individual_digits": True}}, ConfigError, "way, by its pre_tokenizer. "),
        ({"truncation": None, "padding": None, "version": "1.0"}, None, ""),
        # What the library makes of it is a panic, which is no Exception.
        ({"normalizer": {"type": "Precompiled", "precompiled_charsmap": "YWJj"}}, ContractError, "cannot be read"),
    ],
)
def test_a_tokenizer_with_the_same_pieces_divides_texts_alike(
    old: Path, tmp_path: Path, changes: dict[str, Any], error: type[Exception] | None, message: str
) -> None:
    folder = tmp_path / "model"
    export_checkpoint(Store(str(old)), folder, 4)
    path = folder / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(error, match=message) if error else nullcontext():
        plan_of(new_run(tmp_path / "run", folder))


def test_ids_without_weights_get_rows_of_a_new_model(tmp_path: Path) -> None:
    shape = TINY.model_copy(update={"vocab_size": 90})
    model = small_model(shape)
    export_llama(dict(model.named_parameters()), shape, 64, None, tmp_path / "model")
    old = dict(model.named_parameters())
    files = {name: file_sha256(tmp_path / "model" / name) for name in ("config.json", "model.safetensors")}
    origin = ModelOrigin(
        path=str(tmp_path / "model"), format="llama", digest=digest_of(files), files=files, vocab_size=90
    )
    weights = {f"model.{name}": torch.zeros_like(value) for name, value in small_model(TINY).named_parameters()}
    with open_ranks() as ranks:
        read_origin(origin, (TINY, 3), ranks, weights)
    for name in ("embedding.weight", "head.weight"):
        read = weights[f"model.{name}"]
        assert torch.equal(read[:90], old[name])
        assert torch.equal(read[90:], initial_weight(name, read.shape, TINY, 3)[90:])
    assert torch.equal(weights["model.norm.weight"], old["norm.weight"])


FROZEN = {"freeze": ["embedding", "blocks.0", "blocks.*.ffn_norm"]}


@cache
def frozen_alone(folder: str) -> Path:
    return trained(
        make_run(Path(folder), SHORT | {"train": SHORT["train"] | FROZEN, "optim": {"optimizer": "muon"}}), 1
    )


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (2, ("layout.data=ddp",)),
        (2, ("layout.data=zero1",)),
        (4, ("layout.tensor=2",)),
        (2, ("layout.pipeline=2", "layout.micro_batch=2", 'train.freeze=["blocks.0"]')),
    ],
)
def test_frozen_parameters_keep_their_bits_in_every_layout(
    tmp_path_factory: pytest.TempPathFactory, tmp_path: Path, ranks: int, options: tuple[str, ...]
) -> None:
    sections = SHORT | {"train": SHORT["train"] | FROZEN, "optim": {"optimizer": "muon"}}
    run = trained(make_run(tmp_path / "run", sections), ranks, *options)
    first, last = state_at(run, 0), state_at(run, 4)
    frozen = {name for name in weights_at(run, 0) if name.startswith("model.blocks.0.")}
    if "pipeline" not in options[0]:
        frozen |= {"model.embedding.weight", "model.blocks.1.ffn_norm.weight"}
        assert_equal_up_to_rounding(run, frozen_alone(str(tmp_path_factory.getbasetemp() / "frozen")))
    changed = {name for name in weights_at(run, 0) if not torch.equal(first[name], last[name])}
    assert changed == weights_at(run, 0).keys() - frozen
    states = {name.partition(".")[2] for name in last if not name.startswith("model.")}
    assert states == {name.removeprefix("model.") for name in changed}


def test_a_frozen_run_resumes_with_the_same_bits(tmp_path: Path) -> None:
    sections = SHORT | {"train": SHORT["train"] | FROZEN}
    run = trained(make_run(tmp_path / "run", sections), 1)
    assert_same_bits(trained(cut_back(copied(run, tmp_path / "resumed"), 2), 1), run)
    other = [item.error for item in train(copied(run, tmp_path / "other"), 1, "train.freeze=[]", "train.steps=6")]
    assert "train.freeze: expected ['embedding', 'blocks.0', 'blocks.*.ffn_norm'], got None" in other[0]


def test_a_stage_without_parameters_to_train_is_refused(tmp_path: Path) -> None:
    sections = SHORT | {"train": SHORT["train"] | {"freeze": ["embedding", "blocks.0"]}}
    run = make_run(tmp_path / "run", sections)
    errors = [item.error for item in train(run, 2, "layout.pipeline=2", "layout.micro_batch=2")]
    assert "expected parameters to train in each of 2 pipeline stages, got none in stage 0" in errors[0]
