"""Which version of a table a run takes as complete: one that its manifest describes, whatever its folder is named."""

import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from jobs.recipe import read_recipe
from pipeline.engine.step import Step
from pipeline.perplexity.compile import compile_lm
from pipeline.prepare import Prepared, find_version, prepare, step_content, step_identity
from schemas.config import Recipe
from schemas.errors import ContractError
from schemas.manifest import FROM_INPUT, TableVersion, make_manifest, write_manifest
from schemas.storage import Store
from schemas.takedown import FIGURE, Descent
from tests.support.demo_run import RECIPE, SMALL
from tests.support.tiny_arpa import TINY, write_arpa

Inputs = dict[str, TableVersion]


@pytest.fixture
def prepared(tmp_path: Path) -> Prepared:
    (tmp_path / "pages.jsonl").write_text('{"text": "one"}\n')
    source = f'source.paths=["{tmp_path}/pages.jsonl"]'
    return prepare(read_recipe(str(RECIPE), [source, 'source.format="jsonl"', *SMALL]), None)


def step_of(prepared: Prepared, name: str) -> Step:
    return next(step for step in prepared.steps if step.name == name)


def commit(run: Store, prepared: Prepared, name: str, inputs: Inputs, **changed: Any) -> TableVersion:
    """Write a version of each table of a step under the name of the current one; `changed`: values of its manifest."""
    step = step_of(prepared, name)
    content = step_content(prepared, step)
    for block in ("stages", "models"):
        content[block] = content[block] | changed.get(block, {})
    for section, values in changed.get("config", {}).items():
        content["config"][section] = content["config"][section] | values
    digests = {read: table.manifest.digest for read, table in inputs.items()} | changed.get("digests", {})
    content["inputs"] = [{"name": read, "bytes": 1, "sha256": digest} for read, digest in digests.items()]
    files = {} if step.reads else {f"{FROM_INPUT}{split.key}": split.identity for split in prepared.splits}
    how = {"paths": {}, "started": "2026-01-01", "wall_seconds": 1.0, "cpu_seconds": 1.0, "code_version": "0.1.0"}
    how["lineage"] = files | changed.get("lineage", {})
    version, tables = f"v-{step_identity(prepared, step, inputs)[:12]}", {}
    for table in step.writes:
        block = {"table": table, **content, "files": [], "counts": {"rows_in": 3, "rows_kept": 3}}
        manifest = make_manifest(block | {"figures": changed.get("figures", {})}, how, table)
        tables[table] = TableVersion(run.child(f"{table}/{version}"), manifest)
        write_manifest(tables[table].folder, manifest)
    return tables[name]


def found(run: Store, prepared: Prepared, name: str, inputs: Inputs) -> Store | None:
    """Return the run that has the tables of a step complete."""
    return find_version(prepared, step_of(prepared, name), inputs, run)[1]


@pytest.mark.parametrize(
    ("section", "emptied"),
    [("toxicity", "wordlists = {}"), ("decontaminate", "evaluation_sets = {}")],
)
def test_a_source_without_the_lists_of_the_run_makes_other_tables(tmp_path: Path, section: str, emptied: str) -> None:
    (tmp_path / "items.jsonl").write_text(f'{{"text": "{" ".join(map(str, range(60)))}"}}\n')
    identities = []
    for name in ("web", "books"):
        (tmp_path / f"{name}.jsonl").write_text('{"text": "one"}\n')
    for own in ("", f"[source.{section}]\n{emptied}\n"):
        sources = [f'[[source]]\nname = "{name}"\npaths = ["{tmp_path}/{name}.jsonl"]\n' for name in ("web", "books")]
        sets = f'[decontaminate]\nevaluation_sets = {{ exam = "{tmp_path}/items.jsonl" }}\n'
        (tmp_path / "recipe.toml").write_text(f"{sources[0]}{sources[1]}{own}{sets}")
        run = prepare(read_recipe(str(tmp_path / "recipe.toml"), [f'models.cache="{tmp_path}"']), "documents")
        identities.append(step_identity(run, run.steps[0], {}))
        assert (f"source.books.{section}" in step_content(run, run.steps[0])["config"]) == bool(own)
    assert len({*identities}) == 2


def recipe_of_two(folder: Path, more: str, *overrides: str) -> Recipe:
    """The recipe of the sources web and books, each of one file, that ends with the lines `more`."""
    sources = ""
    for name in ("web", "books"):
        if not (folder / f"{name}.jsonl").exists():
            (folder / f"{name}.jsonl").write_text('{"text": "one"}\n')
        sources += f'[[source]]\nname = "{name}"\npaths = ["{folder}/{name}.jsonl"]\n'
    (folder / "recipe.toml").write_text(sources + more)
    return read_recipe(str(folder / "recipe.toml"), [f'models.cache="{folder}"', *overrides])


def test_a_source_with_the_same_limits_for_itself_has_other_verdicts(tmp_path: Path) -> None:
    """Its quantiles are those of its own documents, and the limits of the others no longer see these."""
    compile_lm(write_arpa(tmp_path / "en.arpa", TINY), str(tmp_path / "en.lm"), None, "en")
    limits = "[source.paragraphs]\nmax_quantile = 0.9\n"
    shared = (
        f'[perplexity]\nscorer = "ngram"\nmodels = {{ en = "{tmp_path}/en.lm" }}\n[paragraphs]\nmax_quantile = 0.9\n'
    )
    same: dict[str, bool] = {}
    runs = [prepare(recipe_of_two(tmp_path, own + shared), "paragraphs") for own in ("", limits)]
    for name in ("documents", "scores", "verdicts"):
        identities = {step_identity(run, step_of(run, name), {}) for run in runs}
        same[name] = len(identities) == 1
    assert same == {"documents": True, "scores": True, "verdicts": False}


@pytest.mark.parametrize(
    ("changed", "difference"),
    [
        (
            {"config": {"language": {"min_score": 0.9999}}},
            r"language\.min_score 0\.\d+, got language\.min_score 0\.9999",
        ),
        ({"stages": {"extract": 99}}, r"stage extract \d+, got stage extract 99"),
        ({"models": {"language/language": "0" * 64}}, r"model language/language '[0-9a-f]{64}', got model .* '0{64}'"),
        ({"lineage": {"input:pages.jsonl": "16:1"}}, r"input:pages\.jsonl '16:\d{9,}', got input:pages\.jsonl '16:1'"),
        ({"lineage": {"input:more.jsonl": "16:1"}}, r"input:more\.jsonl None, got input:more\.jsonl '16:1'"),
    ],
    ids=["setting", "stage", "model", "file", "second file"],
)
def test_a_folder_with_the_content_of_another_version(
    tmp_path: Path, prepared: Prepared, changed: dict[str, Any], difference: str
) -> None:
    """Its name is that of the version; another one was moved or copied there."""
    own, other = Store(str(tmp_path / "own")), Store(str(tmp_path / "other"))
    commit(own, prepared, "documents", {})
    assert found(own, prepared, "documents", {}) is own
    place = commit(other, prepared, "documents", {}, **changed).folder.uri
    with pytest.raises(ContractError, match=rf"{place}: expected a version with {difference}\. Remove the folder, and"):
        found(other, prepared, "documents", {})


def test_the_first_differences_are_named(tmp_path: Path, prepared: Prepared) -> None:
    run, stages = Store(str(tmp_path / "run")), step_content(prepared, step_of(prepared, "documents"))["stages"]
    commit(run, prepared, "documents", {}, stages=dict.fromkeys(stages, 99))
    with pytest.raises(
        ContractError, match=rf" 99, stage \w+ 99 and {len(stages) - 3} more differences\. Remove the fol"
    ):
        found(run, prepared, "documents", {})


def test_a_version_that_was_made_from_another_input(tmp_path: Path, prepared: Prepared) -> None:
    run = Store(str(tmp_path / "run"))
    documents = commit(run, prepared, "documents", {})
    inputs = {"documents": documents}
    place = commit(run, prepared, "verdicts", inputs, digests={"documents": "0" * 64}).folder
    with pytest.raises(
        ContractError, match=rf"{place.uri}: expected a version with documents '{documents.manifest.digest}"
    ):
        found(run, prepared, "verdicts", inputs)
    place.delete("manifest.json")
    commit(run, prepared, "verdicts", inputs)
    assert found(run, prepared, "verdicts", inputs) is run


def test_tables_of_another_run_that_were_made_from_another_input_are_not_taken(
    tmp_path: Path, prepared: Prepared
) -> None:
    """The settings are the same, and other code wrote the table that they were made from."""
    run, other = Store(str(tmp_path / "run")), Store(str(tmp_path / "other"))
    documents = commit(run, prepared, "documents", {})
    inputs = {"documents": documents}
    reusing = Prepared(prepared.recipe, prepared.steps, prepared.splits, prepared.models, (other,))
    place = commit(other, prepared, "verdicts", inputs, digests={"documents": "0" * 64}).folder
    assert found(run, reusing, "verdicts", inputs) is None
    place.delete("manifest.json")
    commit(other, prepared, "verdicts", inputs)
    assert found(run, reusing, "verdicts", inputs) is other


def test_a_takedown_from_an_index_of_another_run_leaves_a_version_complete(tmp_path: Path, prepared: Prepared) -> None:
    """See `origin_digest`. A table of the run's own steps is another matter: documents are removed in its run only."""
    run, other = Store(str(tmp_path / "run")), Store(str(tmp_path / "other"))
    before = commit(run, prepared, "documents", {})
    digest = before.manifest.digest
    descent = Descent(id="0" * 12, parent=digest, origin=digest, positions="", mode="tombstones").model_dump()
    after = commit(other, prepared, "documents", {}, figures={FIGURE: descent})
    certificate = SimpleNamespace(tables={"documents": SimpleNamespace(before=digest)})
    for name in ("earlier-0/index", "documents"):
        shutil.rmtree(tmp_path / "run/verdicts", ignore_errors=True)
        commit(run, prepared, "verdicts", {name: before})
        with mock.patch("schemas.takedown.takedown_ancestry", return_value=[certificate]):
            if name == "documents":
                with pytest.raises(ContractError, match=f"that a takedown removed from {other.uri}, got one that was"):
                    found(run, prepared, "verdicts", {name: after})
            else:
                assert found(run, prepared, "verdicts", {name: after}) is run
        with (
            mock.patch("schemas.takedown.takedown_ancestry", return_value=[]),
            pytest.raises(ContractError, match=rf"a version with {name} '{after.manifest.digest}', got {name}"),
        ):
            found(run, prepared, "verdicts", {name: after})
