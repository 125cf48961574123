"""Without `penstock[pii]` every stage can be imported; only a recipe that replaces personal data needs its packages."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.demo_run import RECIPE
from tests.support.paths import ROOT

CODE = """
import sys
sys.modules.update(dict.fromkeys({blocked!r}))
from pipeline.stages import STEPS
from jobs.recipe import read_recipe
from pipeline.pii.stage import Redactor
from pipeline.prepare import prepare
from schemas.errors import ConfigError

recipe = read_recipe({recipe!r}, ['source.paths=["{source}"]', {setting!r}])
clean = next(step for step in STEPS if step.name == "clean")
try:
    clean.external_inputs(recipe, [])
    print(Redactor(recipe["pii"].types).redact("call a@example.com, 415-555-0139", "en")[0])
except ConfigError:
    try:
        prepare(recipe, "clean")
    except ConfigError as error:
        print(error)
"""


def printed(folder: Path, setting: str, *blocked: str) -> str:
    """What a process prints that cannot import some packages: a text without personal data, or why a run cannot start.

    No process starts Spark: `prepare` has no session.
    """
    pytest.importorskip("pyspark")
    source = folder / "texts.jsonl"
    source.write_text('{"text": "a text"}\n')
    code = CODE.format(blocked=blocked, recipe=str(RECIPE), source=source, setting=setting)
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("package", "module", "setting"),
    [
        ("phonenumbers", "phonenumbers", 'pii.types=["phone"]'),
        ("presidio-analyzer", "presidio_analyzer", 'pii.types=["email"]'),
        ("spacy", "spacy", 'pii.ner_models={en="names.whl"}'),
    ],
)
def test_a_missing_package_is_named_before_spark_starts(
    tmp_path: Path, package: str, module: str, setting: str
) -> None:
    expected = f"pii: expected the package {package} to be installed, got none. Run `pip install penstock[pii]`."
    assert printed(tmp_path, setting, module) == expected


@pytest.mark.parametrize(
    ("setting", "text"),
    [
        ("pii.types=[]", "call a@example.com, 415-555-0139"),
        ('pii.types=["phone"]', "call a@example.com, <PHONE>"),
    ],
)
def test_packages_of_types_that_are_not_chosen_may_be_missing(tmp_path: Path, setting: str, text: str) -> None:
    blocked = ["presidio_analyzer", "spacy", *(["phonenumbers"] if setting == "pii.types=[]" else [])]
    assert printed(tmp_path, setting, *blocked) == text
