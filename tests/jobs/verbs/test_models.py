"""`penstock train-importance` on files: the model, and the counts that it prints."""

import json
from pathlib import Path

import pytest

from jobs.cli import main


def test_train_importance_prints_what_it_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("books", "the ship left the harbour on day"), ("pages", "log in to read page")):
        lines = [json.dumps({"text": f"{text} {number}"}) for number in range(40)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    corpora = {"target": "books", "raw": "pages"}
    settings = [f'train_importance.{part}={{files=["{tmp_path}/{name}.jsonl"]}}' for part, name in corpora.items()]
    overrides = [word for setting in [*settings, f"models.cache={tmp_path}/store"] for word in ("--set", setting)]
    assert main(["train-importance", "--out", str(tmp_path / "models"), *overrides]) == 0
    counted = json.loads(capsys.readouterr().out)
    assert {name: (count["documents"], count["words"]) for name, count in counted.items()} == {
        "target": (40, 320),
        "raw": (40, 240),
    }
    assert (tmp_path / "models" / "target.arrow").is_file()
