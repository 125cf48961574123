"""The card of a model for the Hugging Face Hub: what its checkpoint has read, how it was trained, and its limits.

Source: Mitchell et al. 2019, arXiv 1810.03993, for the sections. The facts are those of the other papers of a run.
"""

import json
import math
from collections.abc import Iterator
from typing import Any

from pipeline.disclosure.answers import GIVEN, FactsFile
from pipeline.disclosure.card_sections import (
    bias,
    known_limits,
    limits,
    origins,
    personal_data,
    rights,
    selection,
    toxicity,
)
from pipeline.disclosure.eu import language_name
from pipeline.disclosure.fact import DisclosedFacts
from pipeline.disclosure.hub import REPOSITORY, CardSection, HubCard, language_codes, licence_entries, repository_of
from pipeline.disclosure.markdown import code, escaped, paragraph, table
from pipeline.disclosure.publish import stated
from schemas.consumption import CheckpointTraining

NAME = "model-card"
ASKED = ("model.names", "model.licence", "model.uses", "provider.name")
"""Answers that it states."""
MAX_PERPLEXITY = 1e12
"""A larger perplexity is not stated: YAML would read its form as a text."""
SHOWN_LANGUAGES = 50
GENERATION, FILL_MASK = "text-generation", "fill-mask"
"""Tasks of the Hub; a model that was trained with train.objective = mlm fills masks."""
SETTINGS = (
    *("train.objective", "train.precision", "train.packing", "train.document_mask", "train.seed", "optim.optimizer"),
    *("optim.learning_rate", "optim.schedule", "optim.warmup_steps", "optim.weight_decay", "optim.beta1"),
    *("optim.beta2", "optim.clip_norm", "optim.z_loss"),
)
"""The settings of training that the card states, where the checkpoint has them."""


def model_card(facts: DisclosedFacts, answers: FactsFile) -> HubCard:
    """Return the card of the model of a run."""
    training: CheckpointTraining | None = facts.get("training")
    name = stated(answers, "model.names") or f"penstock-{facts.value('dataset')[:12]}"
    sections = (
        CardSection("Uses", _uses(answers)),
        CardSection("Training data", "\n\n".join(_data(facts, answers))),
        selection(facts),
        personal_data(facts),
        rights(facts),
        toxicity(facts),
        bias(facts),
        CardSection("Training", "\n\n".join(_training(facts, training))),
        CardSection("Evaluation", _evaluation(training)),
        limits([*_own_limits(answers), *known_limits(facts)]),
        CardSection("Digests", origins(facts)),
        CardSection("How to cite it", _citation(facts, answers, name)),
    )
    missing = tuple(key for key in ASKED if answers.of(key).state != GIVEN)
    head = dict(_head(facts, answers, training, name))
    return HubCard(NAME, head, escaped(name), _intro(facts, training), sections, missing, "model/README.md")


def _head(
    facts: DisclosedFacts, answers: FactsFile, training: CheckpointTraining | None, name: str
) -> Iterator[tuple[str, Any]]:
    yield from licence_entries(stated(answers, "model.licence")).items()
    if codes := language_codes(code for code, _ in facts.value("languages")):
        yield "language", codes
    task = FILL_MASK if training is not None and training.settings.get("train.objective") == "mlm" else GENERATION
    yield "pipeline_tag", task
    yield "tags", ["penstock", "pretrained"]
    base = answers.of("model.base_models")
    named = [text for text in base.value if REPOSITORY.fullmatch(text)] if base.state == GIVEN else []
    if named:
        yield "base_model", named
    links = [stated(answers, "dataset.link"), *(str(answers.of_source(s, "link").value) for s in answers.sources)]
    if datasets := sorted({repository_of(link) for link in links} - {""}):
        yield "datasets", datasets
    if metrics := _metrics(training):
        yield "metrics", [metric["type"] for metric in metrics]
        result = {
            "task": {"type": task},
            "dataset": {"type": "held-out", "name": f"Held-out documents of dataset {facts.value('dataset')[:12]}"},
            "metrics": metrics,
        }
        yield "model-index", [{"name": name, "results": [result]}]


def _metrics(training: CheckpointTraining | None) -> list[dict[str, Any]]:
    """Return the last held-out loss and its perplexity as metrics of the Hub; empty if it was not measured."""
    if training is None or not training.heldout:
        return []
    step, loss = training.heldout[-1]
    if not math.isfinite(loss):
        return []
    metrics = [{"type": "loss", "name": f"Cross-entropy per token at step {step}", "value": round(loss, 4)}]
    if loss < math.log(MAX_PERPLEXITY):
        metrics.append({"type": "perplexity", "name": f"Perplexity at step {step}", "value": round(math.exp(loss), 4)})
    return metrics


def _intro(facts: DisclosedFacts, training: CheckpointTraining | None) -> str:
    if training is None or facts.step is None:
        return "No checkpoint exists yet. The numbers are of the training data, each document counted once."
    return (
        f"A language model of {training.num_params:,} parameters after {facts.step:,} optimizer steps, which have read "
        f"{facts.value('consumed'):,} tokens. Trained with Penstock {escaped(training.code_version)}."
    )


def _uses(answers: FactsFile) -> str:
    return paragraph(stated(answers, "model.uses")) or "The provider has not stated intended uses."


def _data(facts: DisclosedFacts, answers: FactsFile) -> Iterator[str]:
    read, shares, documents = (facts.value(name) for name in ("sources", "shares", "documents_read"))
    months = facts.value("months")
    rows = [
        (
            escaped(source),
            escaped(answers.kind_of(source)) or "not given",
            f"{tokens:,}",
            f"{shares[source]:.2%}",
            f"{documents.get(source, 0):,}",
            " to ".join(months[source]) if source in months else "not known",
        )
        for source, tokens in read.items()
    ]
    yield (
        f"The token dataset {code(facts.value('dataset'))} has {facts.value('stored')['train']:,} training tokens and "
        f"{facts.value('stored')['heldout']:,} held-out tokens. Tokens that were read, by source:"
    )
    yield table(("source", "kind", "tokens", "share", "documents", "months of capture"), rows)
    found = facts.value("languages")
    total = sum(number for _, number in found)
    spoken = [(escaped(language_name(own)), f"{number:,}", f"{number / total:.2%}") for own, number in found if total]
    yield table(("language", "tokens", "share"), spoken[:SHOWN_LANGUAGES])
    if len(spoken) > SHOWN_LANGUAGES:
        yield f"{len(spoken) - SHOWN_LANGUAGES:,} other languages have fewer tokens."
    if facts.value("removed"):
        yield f"A takedown has since removed documents with {facts.value('removed'):,} of the tokens that were read."
    yield (
        f"The documents are of {facts.value('num_domains'):,} registrable domains; "
        "`penstock summary RUN --list domains` prints all of them."
    )


def _training(facts: DisclosedFacts, training: CheckpointTraining | None) -> Iterator[str]:
    if training is None:
        yield "No checkpoint exists yet."
        return
    shape = [(code(name), code(json.dumps(value))) for name, value in training.shape.items()]
    yield f"Architecture: a transformer of {training.num_params:,} parameters."
    yield table(("shape", "value"), shape)
    rows = [(code(name), code(json.dumps(training.settings[name]))) for name in SETTINGS if name in training.settings]
    yield table(("setting", "value"), rows)
    stages = [
        tuple(f"{stage[name]:,}" for name in ("first_step", "num_steps", "seq_len", "global_batch"))
        for stage in training.settings.get("train.stages", ())
    ]
    if stages:
        yield "Stages: sequences of `sequence length` tokens, `batch` of them in each step."
        yield table(("first step", "steps", "sequence length", "batch"), stages)
    hardware = training.hardware
    yield (
        f"Hardware: {hardware['ranks']:,} rank(s) on {escaped(str(hardware['device']))}, "
        f"{escaped(str(hardware['kernels']))}. Energy was not measured."
    )
    contract = facts.value("tokenizer")
    yield f"Tokenizer: {contract['kind']}, {contract['vocab_size']:,} tokens, SHA-256 {code(contract['sha256'])}."


def _evaluation(training: CheckpointTraining | None) -> str:
    if training is None or not training.heldout:
        return "No held-out loss was measured."
    rows = [
        (f"{step:,}", f"{loss:.4f}", f"{math.exp(loss):,.2f}" if loss < math.log(MAX_PERPLEXITY) else "too large")
        for step, loss in training.heldout[-SHOWN_LANGUAGES:]
    ]
    return (
        "Mean cross-entropy on documents that were held out of training, and its perplexity. No benchmark was run.\n\n"
        + table(("step", "loss [nats/token]", "perplexity"), rows)
    )


def _own_limits(answers: FactsFile) -> Iterator[str]:
    if text := stated(answers, "model.limits"):
        yield paragraph(text)
    yield "The model repeats what its data say: errors, opinions and stereotypes of web pages included."
    yield "It was trained to continue text, and not to follow instructions or to refuse."


def _citation(facts: DisclosedFacts, answers: FactsFile, name: str) -> str:
    provider = stated(answers, "provider.name") or "unknown provider"
    checkpoint = facts.origins.get("checkpoint")
    digest = checkpoint.digest if checkpoint else facts.value("dataset")
    what = "metadata of the checkpoint, which names the SHA-256 of each file" if checkpoint else "dataset"
    return f"{paragraph(f'{provider}: {name}')}, sha256:{digest}\n\nThe digest is that of the {what}."
