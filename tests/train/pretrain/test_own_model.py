"""A model of the user in a whole run: plan, guard, quarantine, trace, resume, and what reads its checkpoints."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.errors import ConfigError
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.support import poisoned_runs, tiny_runs
from tests.support.own_model import FUNCTION, PACKAGE, importable, install, source_of_page
from tests.support.poisoned_runs import POISON, WATCHING
from tests.support.tiny_runs import (
    assert_equal_up_to_rounding,
    assert_same_bits,
    copied,
    cut_back,
    events,
    metrics,
    notes,
    state_at,
)
from train.checkpoint.state import read_model
from train.eval.evaluate import evaluate
from train.eval.generate import generate
from train.export.llama import main as export_llama
from train.monitor.quarantine import read_quarantine
from train.plan.plan import read_plan
from train.trace import open_trace
from train.trace.consumed import consumption_of

pytestmark = pytest.mark.dist

SIZES = {"num_layers": 2, "d_model": 48, "d_ffw": 74, "tie_embeddings": True}
"""The model has a head of its own all the same."""
QUARANTINING = WATCHING | {"quarantine": True, "on_spike": "rewind"}
OWN = {"plan": SIZES | {"model": PACKAGE, "model_options": {"reach": 3}}}
MOE = {"plan": {"model": "moe", "model_options": {"experts": 4, "top_k": 1, "capacity_factor": 1.25}}}


def trained(run: Path, packages: Path, ranks: int, *overrides: str) -> Path:
    """Train a run whose model is in a folder of packages to the end, and return it."""
    during = [(importable, (str(packages),))]
    results = tiny_runs.train(run, ranks, *overrides, during=during)
    assert [item.code for item in results] == [0] * ranks, results[0].error + results[0].err
    return run


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("packages")
    install(folder, source_of_page())
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, packages: Path) -> Path:
    """A run of the model on two ranks, with a poisoned document that the guard quarantines."""
    run = poisoned_runs.make_run(tmp_path_factory.mktemp("own") / "run", QUARANTINING, **OWN)
    return trained(run, packages, 2)


def test_the_document_of_a_spike_is_quarantined_and_losses_are_by_source(run: Path) -> None:
    (event,) = events(run, "spike")
    assert event.documents[0].doc_id == POISON.hex()
    assert [line.doc_id for line in read_quarantine(Store(str(run)))] == [POISON.hex()]
    lines = metrics(run)
    assert {name for line in lines for name in line.losses} == {"web", "books"}
    assert lines[-1].loss < lines[0].loss - 1
    after = [part.step for part in open_trace(Store(str(run))).steps_of_document(POISON)[0].appearances]
    assert all(step < event.step for step in after)


def test_a_resumed_run_has_the_same_bits_and_another_layout_the_same_result(
    run: Path, packages: Path, tmp_path: Path
) -> None:
    again = cut_back(copied(run, tmp_path / "again"), 25)
    trained(again, packages, 2)
    assert_same_bits(run, again)
    alone = cut_back(copied(run, tmp_path / "alone"), 25)
    trained(alone, packages, 1, "layout.data=ddp", "layout.activation_checkpointing=full")
    assert_equal_up_to_rounding(run, alone)


def test_the_plan_has_what_was_counted_in_the_model(run: Path) -> None:
    store = Store(str(run))
    plan, note = read_plan(store), notes(run)[-1]
    state = state_at(run, note.step)
    assert plan.num_params == sum(value.numel() for name, value in state.items() if name.startswith("model."))
    assert plan.shape.model == note.identity.settings["shape.model"] == FUNCTION
    assert note.identity.settings["shape.options"] == {"reach": 3}
    named = {figure.name: figure.value for figure in plan.figures}
    assert named["params"] == named["active_params"] == plan.num_params
    vocabulary = plan.shape.vocab_size
    assert plan.flops_per_token == 6 * (48 * vocabulary + 2 * (3 * 48 * 74 + 74 * 48))
    assert named["memory.1.states"] == 8 * plan.num_params
    assert consumption_of(store, open_dataset(store)).training.num_params == plan.num_params


def test_the_checkpoint_is_read_by_what_reads_checkpoints(run: Path, packages: Path) -> None:
    with importable(str(packages)):
        text = generate(Store(str(run)), "bebu", 5, 0.0)
        (measured,) = evaluate([str(run)], [str(run)], 4, [], None)
    assert text.startswith("bebu ")
    assert 0 < measured.sources["web"].loss < 10


def test_export_is_refused_without_running_the_model(run: Path, tmp_path: Path, capsys: Any) -> None:
    assert export_llama([str(run), "--out", str(tmp_path / "out")]) == 2
    assert f"expected a transformer of Penstock, got plan.model = {FUNCTION}" in capsys.readouterr().err


def test_changed_code_is_refused_with_both_digests(run: Path, tmp_path: Path) -> None:
    changed = tmp_path / "changed"
    install(changed, source_of_page() + "\n# another version\n")
    resumed = cut_back(copied(run, tmp_path / "run"), 25)
    (result,) = tiny_runs.train(resumed, 1, during=[(importable, (str(changed),))])
    code = read_plan(Store(str(run))).shape.code
    assert f"expected code with SHA-256 {code}, got " in result.error
    with importable(str(changed)), pytest.raises(ConfigError, match=code):
        generate(Store(str(run)), "bebu", 1)
    # A new plan has the new code; then the checkpoint is refused.
    (resumed / "train/plan.json").unlink()
    (result,) = tiny_runs.train(resumed, 1, during=[(importable, (str(changed),))])
    assert "shape.code" in result.error
    assert code in result.error


def test_a_run_folder_runs_no_code_that_is_not_declared(run: Path, tmp_path: Path) -> None:
    hostile, trap = tmp_path / "hostile", tmp_path / "trap"
    install(hostile, f"open({str(trap)!r}, 'w').close()\n" + source_of_page(), declares=False)
    with importable(str(hostile)):
        for action in (
            lambda: generate(Store(str(run)), "bebu", 1),
            lambda: evaluate([str(run)], [str(run)], 1, [], None),
            lambda: read_model(Store(str(run)), notes(run)[-1], torch.device("cpu")),
        ):
            with pytest.raises(ConfigError, match="a function that an installed package declares as an entry point"):
                list(action() or ())
        resumed = cut_back(copied(run, tmp_path / "run"), 25)
        (result,) = tiny_runs.train(resumed, 1, during=[(importable, (str(hostile),))])
    assert "an installed package declares as an entry point of penstock.models, got short_memory" in result.error
    assert not trap.exists()


def test_a_mixture_of_experts_is_planned_by_active_parameters_and_read_in_any_layout(tmp_path: Path) -> None:
    run = tiny_runs.make_run(
        tmp_path / "run", MOE | {"train": {"steps": 6, "eval_every": 3}, "checkpoint": {"every": 3}}
    )
    tiny_runs.trained(run, 2, "layout.expert_parallel=true")
    plan, lines = read_plan(Store(str(run))), metrics(run)
    named = {figure.name: figure.value for figure in plan.figures}
    # Three of four experts are idle: gate, up and down of 48 x 74 in two layers.
    assert plan.num_params - plan.active_params == 2 * 3 * 3 * 48 * 74
    assert named["active_params"] == plan.active_params
    assert named["tokens_per_parameter"] == pytest.approx(plan.num_tokens / plan.active_params, rel=1e-3)
    figures = lines[-1].model
    assert set(figures) == {"load.0", "load.1", "dropped.0", "dropped.1", "dropped", "balance_loss", "router_z_loss"}
    assert 1 <= figures["load.0"] <= 4
    assert figures["dropped"] == figures["dropped.0"] + figures["dropped.1"]
    alone = cut_back(copied(run, tmp_path / "alone"), 3)
    tiny_runs.trained(alone, 1, "layout.data=ddp", "layout.expert_parallel=false")
    assert_equal_up_to_rounding(run, alone)
    resumed = cut_back(copied(run, tmp_path / "resumed"), 3)
    tiny_runs.trained(resumed, 2)
    assert_same_bits(run, resumed)


def test_a_wrong_model_is_refused_when_it_is_planned(tmp_path: Path) -> None:
    for number, (plan, message) in enumerate(
        (
            ({"model": "os:system"}, "expected one of moe, .* got os:system"),
            ({"model": "moe", "model_options": {"expert": 4}}, r"plan\.model_options: expected .* expert: Extra"),
            (
                {"model": "moe", "model_options": {"experts": 2, "top_k": 3}},
                "expected top_k of at most experts = 2, got 3",
            ),
        )
    ):
        run = tiny_runs.make_run(tmp_path / str(number), {"plan": plan})
        (result,) = tiny_runs.train(run, 1)
        assert re.search(message, result.error), result.error
