"""Cards for the Hugging Face Hub: values by hand, the Hub's own parser, and hostile answers and data."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from pipeline.disclosure.answers import FactsFile, read_answers
from pipeline.disclosure.dataset_card import card_of_run
from pipeline.disclosure.fact import DisclosedFacts, Fact
from pipeline.disclosure.facts import collect
from pipeline.disclosure.hub import HubCard, language_codes, licence_entries, repository_of, size_category, yaml_value
from pipeline.disclosure.markdown import paragraph, table
from pipeline.disclosure.model_card import model_card
from pipeline.disclosure.publish import write_metadata
from pipeline.disclosure.table_facts import stage_rows
from schemas.consumption import CheckpointTraining, Consumption
from schemas.errors import ContractError
from schemas.manifest import open_table
from schemas.storage import Store
from schemas.tokens import open_dataset
from tests.pipeline.disclosure.facts_file import COMPLETE
from tests.pipeline.disclosure.test_facts import consumed_of
from tests.support.report_run import make_run
from tests.support.tiny_dataset import make_tiny_dataset

NOTHING = FactsFile("", {}, ("books", "web"))
HOSTILE = '---\nlicense: mit\n"\x1b[2J\u202e\ufffe😀 no: [x]({y}) |</script>\x85'
STAGE = {"first_step": 0, "num_steps": 7, "seq_len": 64, "global_batch": 8, "counts": {"web": 1}}
TRAINING = CheckpointTraining(
    {"num_layers": 2, "d_model": 64},
    354_624,
    {"train.objective": "causal", "optim.optimizer": "adamw", "optim.eps": 1e-8, "train.stages": [STAGE]},
    {"device": "cuda", "ranks": 8, "kernels": "torch 2.13.0, H100"},
    ((3, 6.5), (7, 2.0)),
    {".metadata": "2" * 64},
    "0.1.0",
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return make_run(tmp_path_factory.mktemp("run") / "run")


@pytest.fixture
def complete(tmp_path: Path) -> FactsFile:
    (tmp_path / "facts.toml").write_text(COMPLETE)
    return read_answers(str(tmp_path / "facts.toml"), ("books", "web"))


def trained(run: Store, training: CheckpointTraining | None = TRAINING) -> Consumption:
    return replace(consumed_of(run), training=training)


def facts_of(run: Store, answers: FactsFile, consumed: Consumption | None = None) -> DisclosedFacts:
    return collect(run, open_dataset(run), consumed or trained(run), answers, False)


def parts_of(card: HubCard) -> tuple[dict[str, Any], str]:
    """The metadata, by a strict parser of YAML, and the text."""
    begin, head, body = card.to_bytes().decode().split("---\n", 2)
    assert begin == ""
    return yaml.safe_load(head), body


def test_the_card_of_a_dataset_by_hand(run: Store, complete: FactsFile) -> None:
    card = card_of_run(facts_of(run, complete), complete)
    head, body = parts_of(card)
    clean = open_table(run, "clean")[1]
    assert (head["pretty_name"], head["license"]) == ("Example text", "cc-by-4.0")
    assert head["size_categories"] == ["n<1K"]
    assert card.missing == ()
    assert f"{clean.content.counts.rows_kept} documents of clean text" in body
    assert "| records of the inputs |  | 53 |\n| `extract/no_text` | 2 | 51 |" in body
    assert "| `email` | 6 |\n| `phone` | 3 |" in body
    assert "| web | 1,050 | 51.22% | 12 |" in body
    assert f"sha256:{clean.digest} https://example.org/data" in body
    assert f"`clean/{run.uri and open_table(run, 'clean')[0].uri.rpartition('/')[2]}/manifest.json`" in body


def test_the_card_of_a_model_by_hand(run: Store, complete: FactsFile) -> None:
    card = model_card(facts_of(run, complete), complete)
    head, body = parts_of(card)
    assert (head["license"], head["language"], head["pipeline_tag"]) == ("apache-2.0", ["en", "de"], "text-generation")
    ((result,),) = (index["results"] for index in head["model-index"])
    assert [(metric["type"], metric["value"]) for metric in result["metrics"]] == [
        ("loss", 2.0),
        ("perplexity", 7.3891),
    ]
    assert "base_model" not in head
    assert card.missing == ()
    for line in (
        "A language model of 354,624 parameters after 7 optimizer steps, which have read 2,050 tokens.",
        "| web | crawled | 1,050 | 51.22% | 12 | 2025-03 to 2026-01 |",
        "| English \\(en\\) | 1,900 | 92.68% |",
        "| `num_layers` | `2` |",
        '| `optim.optimizer` | `"adamw"` |',
        "| 0 | 7 | 64 | 8 |",
        "Hardware: 8 rank(s) on cuda, torch 2.13.0, H100.",
        "| 7 | 2.0000 | 7.39 |",
        "to continue text, not to give advice",
        "- English only",
    ):
        assert line in body, line


def test_documents_that_an_earlier_step_dropped_count_for_no_stage(run: Store) -> None:
    facts = facts_of(run, NOTHING)
    rows = {stage: int(dropped.replace(",", "")) for stage, _, _, dropped, _ in stage_rows(facts)}
    assert rows["dedup"] == 7
    assert sum(rows.values()) == sum(facts.value("dropped").values()) == facts.value("rows_in") - facts.value("clean")


def test_cards_name_repositories_of_the_hub_only(run: Store, complete: FactsFile) -> None:
    values = {
        **complete.values,
        "model.base_models": ("example/base-1", "a model of ours"),
        "dataset.link": "https://huggingface.co/datasets/example/text",
        "sources.books.link": "https://huggingface.co/datasets/example/books/tree/main",
    }
    answers = FactsFile("f", values, complete.sources)
    head, _ = parts_of(model_card(facts_of(run, answers), answers))
    assert head["base_model"] == ["example/base-1"]
    assert head["datasets"] == ["example/text"]


def test_a_masked_model_fills_masks(run: Store) -> None:
    settings = {**TRAINING.settings, "train.objective": "mlm"}
    consumed = trained(run, replace(TRAINING, settings=settings))
    head, _ = parts_of(model_card(facts_of(run, NOTHING, consumed), NOTHING))
    assert head["pipeline_tag"] == "fill-mask"


@pytest.mark.parametrize("loss", [float("inf"), float("nan"), 1e9])
def test_a_loss_that_is_no_number_is_no_metric(run: Store, loss: float) -> None:
    consumed = trained(run, replace(TRAINING, heldout=((7, loss),)))
    head, body = parts_of(model_card(facts_of(run, NOTHING, consumed), NOTHING))
    types = [metric["type"] for index in head.get("model-index", ()) for metric in index["results"][0]["metrics"]]
    assert types == (["loss"] if loss == 1e9 else [])
    assert "too large |" in body


def test_without_answers_cards_name_them_and_state_no_one(run: Store) -> None:
    facts = facts_of(run, NOTHING)
    assert card_of_run(facts, NOTHING).missing == (
        *("dataset.name", "dataset.licence", "dataset.link", "provider.name"),
    )
    assert model_card(facts, NOTHING).missing == (*("model.names", "model.licence", "model.uses", "provider.name"),)
    assert parts_of(model_card(facts, NOTHING))[0]["license"] == "unknown"


def test_a_run_of_tokens_only_has_the_card_of_a_model_but_not_of_a_dataset(tmp_path: Path) -> None:
    run = make_tiny_dataset(tmp_path / "run")
    facts = facts_of(run, NOTHING, replace(consumed_of(run), step=None))
    with pytest.raises(ContractError, match=r"expected a run with the table `clean`, got one without"):
        card_of_run(facts, NOTHING)
    body = parts_of(model_card(facts, NOTHING))[1]
    assert "No checkpoint exists yet." in body
    assert "what was replaced is not known here" in body


def test_hostile_values_stay_text(run: Store, complete: FactsFile) -> None:
    values = {key: (HOSTILE,) if isinstance(value, tuple) else HOSTILE for key, value in complete.values.items()}
    kinds = {key: value for key, value in complete.values.items() if key.endswith(".kind")}
    answers = FactsFile("f", values | kinds, complete.sources)
    consumed = trained(
        run, replace(TRAINING, settings={"train.seed": HOSTILE}, hardware={**TRAINING.hardware, "kernels": HOSTILE})
    )
    consumed.languages["web", HOSTILE] = 5
    facts = facts_of(run, answers, consumed)
    finding = {"filter": HOSTILE, "group": HOSTILE, "documents": 1, "rate": 0.1, "expected": 0.2, "adjusted_p": 0.01}
    more = {"bias": Fact({"compared": 1, "findings": [finding]}, ()), "funnel": Fact([[HOSTILE, 1]], ())}
    facts = replace(facts, facts={**facts.facts, **more, "clean_sources": Fact({HOSTILE: 1}, ())})
    for card in (card_of_run(facts, answers), model_card(facts, answers)):
        head, body = parts_of(card)
        assert head["license"] == "other"
        assert "😀" in head["license_name"]
        assert not {"\x1b", "\u202e", "\x85"} & {*body, *str(head)}
        assert "</script>" not in re.sub("`[^`\n]*`", "", body).replace("\\</script\\>", "")
        assert not any(line.startswith("---") for line in body.splitlines())


def test_the_parser_of_the_hub_reads_the_cards(run: Store, complete: FactsFile) -> None:
    hub = pytest.importorskip("huggingface_hub", reason="huggingface_hub is not installed")
    for answers in (complete, NOTHING, FactsFile("f", dict.fromkeys(complete.values, HOSTILE), complete.sources)):
        facts = facts_of(run, answers)
        dataset, model = card_of_run(facts, answers), model_card(facts, answers)
        read = hub.DatasetCard(dataset.to_bytes().decode(), ignore_metadata_errors=False)
        assert read.data.to_dict() == parts_of(dataset)[0]
        read = hub.ModelCard(model.to_bytes().decode(), ignore_metadata_errors=False)
        assert [result.metric_value for result in read.data.eval_results] == [2.0, 7.3891]
        assert read.data.license == parts_of(model)[0]["license"]


def test_cards_are_files_for_the_hub(run: Store, complete: FactsFile, tmp_path: Path) -> None:
    facts = facts_of(run, complete)
    for card in (card_of_run(facts, complete), model_card(facts, complete)):
        path = write_metadata(run, Store(str(tmp_path)), card)
        assert path.endswith("/README.md")
        assert Path(path).read_bytes() == card.to_bytes()
    assert write_metadata(run, None, card) == f"{run.uri}/summaries/{card.version[:12]}/model/README.md"


@pytest.mark.parametrize(
    ("licence", "expected"),
    [
        ("", {"license": "unknown"}),
        ("CC-BY-4.0", {"license": "cc-by-4.0"}),
        ("odc-by", {"license": "odc-by"}),
        ("Our Licence", {"license": "other", "license_name": "Our Licence"}),
        ("https://example.org/l", {"license": "other", "license_link": "https://example.org/l"}),
    ],
)
def test_licences_are_those_of_the_hub(licence: str, expected: dict[str, str]) -> None:
    assert licence_entries(licence) == expected


def test_languages_and_names() -> None:
    assert language_codes(["en", "zho", "no", "x", "EN1", "ähn", "", "zh_Hant"]) == ["en", "zho", "no"]
    assert yaml.safe_load(yaml_value(["no", "1e5", "2026-01-01", "~"])) == ["no", "1e5", "2026-01-01", "~"]
    assert repository_of("https://huggingface.co/datasets/a/b/") == "a/b"
    assert repository_of("https://huggingface.co/a/b") == ""
    assert size_category(1000) == "1K<n<10K"


@pytest.mark.parametrize(
    ("text", "expected"),
    [("--- x", "\\--- x"), ("12. x", "12\\. x"), ("= x", "\\= x"), ("a - b", "a - b"), ("# x", "\\# x")],
)
def test_a_paragraph_begins_no_block(text: str, expected: str) -> None:
    assert paragraph(text) == expected


def test_a_pipe_in_code_does_not_end_a_cell() -> None:
    assert table(("a",), [("`x | y`",), ("p \\| q",)]).splitlines()[2:] == ["| `x \\| y` |", "| p \\| q |"]
