"""The notebook `examples/look_at_a_corpus.ipynb`, executed as a user would, in a folder with modules named as ours."""

from pathlib import Path

import pytest

from tests.support.paths import ROOT


@pytest.mark.spark
def test_every_cell_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    for name in ("train", "pipeline", "schemas", "jobs"):  # of the user; Spark's workers must import ours
        (tmp_path / f"{name}.py").write_text("raise RuntimeError('the file of the user')\n", encoding="utf-8")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")  # a kernel searches the folder of the notebook first, before ours
    notebook = nbformat.read(ROOT / "examples" / "look_at_a_corpus.ipynb", as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}})
    client.execute()
    printed = [output.get("text", "") for cell in notebook.cells for output in cell.get("outputs", ())]
    whatif = next(text for text in printed if " -> " in text).split()
    assert int(whatif[2]) < int(whatif[0])
    assert any("<EMAIL>" in text for text in printed)
