"""The notebook `examples/look_at_a_corpus.ipynb`: its cells in this process, on the Spark session of all tests.

Under the marker `slow` it is executed as a user would, in a folder with modules named as ours.
"""

import json
import tempfile
from pathlib import Path

import pytest

from tests.support.paths import ROOT

NOTEBOOK = ROOT / "examples" / "look_at_a_corpus.ipynb"


def check_printed(printed: list[str]) -> None:
    """Compare what cells print with what their text promises."""
    whatif = next(text for text in printed if " -> " in text).split()
    assert int(whatif[2]) < int(whatif[0])
    assert any("<EMAIL>" in text for text in printed)


@pytest.mark.spark
def test_every_cell_runs(
    spark, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    names: dict[str, object] = {"__name__": "notebook"}
    printed = []
    for number, cell in enumerate(json.loads(NOTEBOOK.read_text(encoding="utf-8"))["cells"]):
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
            printed.append(capsys.readouterr().out)
    check_printed(printed)


@pytest.mark.spark
@pytest.mark.slow
def test_a_kernel_runs_it_beside_files_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    for name in ("train", "pipeline", "schemas", "jobs"):  # of the user; Spark's workers must import ours
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the file of the user')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # a kernel searches the folder of the notebook first, before ours
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    check_printed([output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())])
