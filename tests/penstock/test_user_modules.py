"""Scripts of a user beside files with the names of Penstock's packages: both are imported, also by other processes."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from schemas.manifest import read_run, write_run
from schemas.tokens import open_dataset
from tests.support.paths import ROOT
from tests.support.tiny_dataset import make_tiny_dataset
from train.config.settings import load_settings
from train.plan.make_plan import make_plan
from train.plan.plan import write_plan

RECIPE = {
    "plan": {"num_layers": 1, "d_model": 16, "num_heads": 2},
    "train": {"seq_len": 64, "global_batch": 4, "steps": 3},
}
LOADER = """
    import torch
    from torch.utils.data import DataLoader

    loader = DataLoader(samples, batch_size=4, num_workers=1, multiprocessing_context={method!r})
    batches = list(loader)
    assert len(batches) == 3, len(batches)
    assert all(torch.equal(batches[1]["inputs"][i], samples[4 + i]["inputs"]) for i in range(4))
    print("3 batches")
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A planned run of 3 steps of 4 samples."""
    store = make_tiny_dataset(tmp_path_factory.mktemp("run"), {"web": 20})
    state = read_run(store).model_copy(update={"recipe": RECIPE})
    write_run(store, state)
    dataset = open_dataset(store)
    write_plan(store, make_plan(store, dataset, load_settings(RECIPE, [], "test")))
    return store.uri


def call(folder: Path, name: str, text: str) -> subprocess.CompletedProcess[str]:
    """Run a script in a folder of its own, as a user does: Python searches that folder first."""
    (folder / name).write_text(text, encoding="utf-8")
    outer = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    return subprocess.run(
        [sys.executable, str(folder / name)],
        cwd=folder,
        env=outer | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def successful(folder: Path, name: str, text: str) -> str:
    """Return what a script prints, which must end without an error."""
    done = call(folder, name, text)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(
    ("method", "is_late"),
    [("fork", False), ("spawn", False), ("spawn", True), pytest.param("fork", True, marks=pytest.mark.slow)],
)
def test_a_script_named_train_reads_samples(run: str, tmp_path: Path, method: str, is_late: bool) -> None:
    """`is_late`: the script imports penstock in a function, so that a spawned worker does not import it with it."""
    first, later = ("", "    import penstock\n") if is_late else ("import penstock\n\n", "")
    main = f"{first}if __name__ == '__main__':\n{later}    samples = penstock.open({run!r}).tokens.torch_dataset()\n"
    assert successful(tmp_path, "train.py", main + LOADER.format(method=method)) == "3 batches\n"


def test_the_other_functions_work_beside_files_of_all_names(run: str, tmp_path: Path) -> None:
    for name in ("schemas", "pipeline", "jobs", "train"):
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the file of the user')\n", encoding="utf-8")
    script = f"import penstock\nrun = penstock.open({run!r})\nprint(run.trace(step=1).step, run.tokens.num_tokens())\n"
    out = successful(
        tmp_path,
        "main.py",
        script + "print(penstock.signals('three short words', language='en')['gopher_num_words'])\n",
    )
    tokens = penstock.open(run).tokens.num_tokens()
    assert out.splitlines() == [f"1 {tokens}", "3"]


def test_a_module_that_was_imported_before_works_too(run: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("plan = 'my plan'\n\n\ndef step():\n    return plan\n", encoding="utf-8")
    script = (
        "import pickle\nimport train\nfrom train import step\nimport penstock\n"
        f"samples = penstock.open({run!r}).tokens.torch_dataset()\n"
        "assert (len(samples), step(), train.plan) == (12, 'my plan', 'my plan')\n"
        "assert pickle.loads(pickle.dumps(step)) is step\n"
        "import train as again\nprint(again.step())\n"
    )
    assert successful(tmp_path, "main.py", script) == "my plan\n"


def test_what_cannot_work_is_one_message(run: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("def step(): ...\n", encoding="utf-8")
    done = call(tmp_path, "main.py", "import penstock\nimport train\ntrain.step()\n")
    assert done.stderr.splitlines()[-1] == (
        "AttributeError: module 'train' has no attribute 'step'; it is a package of penstock. Rename your own "
        "train.py, or import it before penstock."
    )
    (tmp_path / "train.py").unlink()
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / "__init__.py").touch()
    done = call(tmp_path, "main.py", "import train\nimport penstock\n")
    assert done.stderr.splitlines()[-1] == (
        "ImportError: penstock: expected to import its own package `train`, got the package "
        f"{tmp_path}/train, imported before. Rename that folder."
    )
    assert successful(tmp_path, "main.py", f"import penstock\nprint(len(penstock.open({run!r}).tables))\n") == "2\n"
