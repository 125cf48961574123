"""Pains of installation, guides and tokenizers: imports, examples, promises, and tokens that are not there."""

import argparse
import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from tokenizers import Tokenizer as HuggingFace
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

import penstock
from jobs.recipe import read_recipe
from pipeline.pii.stage import PII
from pipeline.pii.types import DEFAULT_TYPES
from pipeline.stages import steps_for
from pipeline.tokens.tokenizer import Tokenizer, TokenizerConfig, load_tokenizer, train_tokenizer
from schemas.errors import ContractError
from schemas.ids import canonical_json
from schemas.manifest import make_manifest
from schemas.tokens import open_dataset
from tests.docs.test_commands import PAGES, blocks, command_lines, complaint
from tests.pipeline.pii.test_national_ids import EXAMPLES
from tests.pipeline.pii.test_stage import FOUND
from tests.support.paths import ROOT
from tests.support.tiny_dataset import make_tiny_dataset

SAMPLE = [inspect.getsource(argparse), "Der schnelle braune Fuchs.\nLe cœur déçu.", "Съешь ещё этих французских булок"]
TRAINED = TokenizerConfig(vocab_size=700)
WITHOUT_GPU = """
import importlib, pkgutil, sys
for name in ("torch", "triton", "cupy", "cudf", "cuml", "rmm", "numba"):
    sys.modules[name] = None
import penstock, pipeline, schemas, jobs
modules = [m.name for top in (pipeline, schemas, jobs) for m in pkgutil.walk_packages(top.__path__, top.__name__ + ".")]
for name in modules:
    if not name.endswith("__main__"):
        importlib.import_module(name)
print(len(modules), penstock.extract("<p>A text of some words that is long enough to be kept.</p>").text)
"""


def test_the_data_half_needs_no_package_of_a_gpu() -> None:
    """NeMo Curator: after an installation for CPUs as in the README, the first import failed in a module for GPUs.

    https://github.com/NVIDIA-NeMo/Curator/issues/736

    Every module of the data half is imported, and a page extracted, where torch and all packages of CUDA are missing.
    """
    done = subprocess.run([sys.executable, "-c", WITHOUT_GPU], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    number, text = done.stdout.strip().split(" ", 1)
    assert int(number) > 150
    assert text == "A text of some words that is long enough to be kept."


def test_the_documented_deduplication_is_a_list_of_commands_that_run() -> None:
    """NeMo Curator: the documented code for fuzzy deduplication failed as it was, while MinHash was set up.

    https://github.com/NVIDIA-NeMo/Curator/issues/1292

    Each command of the guide is known to the parser with its arguments. `tests/docs/test_commands.py` executes them in
    a run.
    """
    guide = "docs/guides/deduplication.md"
    commands = command_lines(PAGES[guide])
    assert len(commands) >= 3
    assert [why for line in commands if (why := complaint(line))] == []
    executed = [block for block in blocks() if block.page == guide and not block.needs]
    assert sum(len(block.commands) for block in executed) >= 2


def test_a_first_run_needs_no_parameter_that_the_documents_leave_out() -> None:
    """NeMo Curator: removal failed unless a block size was given that the quick start did not mention.

    https://github.com/NVIDIA-NeMo/Curator/issues/2092

    The recipe for a new corpus has one open setting, the input files. With it, every step is ready.
    """
    recipe = read_recipe("web", ['source.paths=["pages/*.warc.gz"]'])
    names = [step.name for step in steps_for(recipe) if step.is_used(recipe)]
    assert {"documents", "clusters", "dedup", "clean", "tokens"} <= set(names)
    lines = [line for page in ("README.md", "docs/quickstart.md") for line in command_lines(PAGES[page])]
    assert [why for line in lines if (why := complaint(line))] == []


def test_personal_data_is_replaced_as_the_pages_say() -> None:
    """NeMo Curator: a draft of its README described a stage for personal data. A reviewer noted that the current
    version had none.

    https://github.com/NVIDIA-NeMo/Curator/pull/1801

    The stage is in the default recipe, and replaces each planted value of all its types.
    """
    recipe = read_recipe("web", ['source.paths=["pages/*.warc.gz"]'])
    (clean,) = [step for step in steps_for(recipe) if step.name == "clean"]
    assert PII in clean.stages
    assert {kind for kind, _, _ in FOUND} | set(EXAMPLES) == set(DEFAULT_TYPES)
    assert f"{len(DEFAULT_TYPES)} types" in PAGES["docs/comparison.md"]
    left = [text for kind, text, expected in FOUND if penstock.redact(text, language="en") != expected]
    assert left == []


def test_a_tokenizer_is_trained_to_the_same_bytes() -> None:
    """marin: the project had no training of tokenizers, so an experiment with vocabulary sizes began with one.

    https://github.com/marin-community/marin/issues/9188

    A tokenizer is a step of a run. The same sample gives the same file, any text survives it, and reserved ids are
    free.
    """
    model = train_tokenizer(SAMPLE, TRAINED)
    assert train_tokenizer(iter(SAMPLE), TRAINED) == model
    tokenizer = load_tokenizer(model, "sentencepiece", TRAINED)
    for text in ("Ein Text <bos> mit\n\n  Lücken  ", "我能吞下玻璃", "\0\ufdd0"):
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text
        assert not set(ids.tolist()) & set(tokenizer.contract.reserved.values())


def with_own_start_token(folder: Path) -> Tokenizer:
    """Return a tokenizer of Hugging Face's library whose post-processor adds a start token itself."""
    model = HuggingFace(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = decoders.ByteLevel()
    special = ["<|start|>", "<|end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    model.train_from_iterator(SAMPLE, trainer)
    model.post_processor = processors.TemplateProcessing(
        single="<|start|> $A", special_tokens=[("<|start|>", model.token_to_id("<|start|>"))]
    )
    path = folder / "tokenizer.json"
    model.save(str(path))
    settings = {"model": str(path), "special": {"bos": "<|start|>", "eos": "<|end|>"}}
    return load_tokenizer(path, "huggingface", TokenizerConfig.model_validate(settings))


def test_the_start_of_a_document_does_not_depend_on_the_tokenizer(tmp_path: Path) -> None:
    """marin: with a new backend of the tokenizer, caches silently had no start token any more. It was noticed by higher
    losses.

    https://github.com/marin-community/marin/issues/5034

    The dataset's contract says what is before and after a document, and the writer adds it. A tokenizer adds nothing,
    whether its file asks for a start token or not.
    """
    own = load_tokenizer(train_tokenizer(SAMPLE, TRAINED), "sentencepiece", TRAINED)
    for tokenizer in (own, with_own_start_token(tmp_path)):
        contract = tokenizer.contract
        assert (contract.before, contract.after) == (["bos"], ["eos"])
        assert not set(tokenizer.encode("A text.").tolist()) & {contract.reserved["bos"], contract.reserved["eos"]}
        assert tokenizer.decode(tokenizer.encode("A text.")) == "A text."


def test_a_dataset_has_one_tokenizer(tmp_path: Path) -> None:
    """marin: a task asked that training with another tokenizer than the one of the tokens be an error.

    https://github.com/marin-community/marin/issues/301

    A tokenizer table with another model of the same size is refused when the dataset is opened.
    """
    run = make_tiny_dataset(tmp_path / "run")
    name = "tokenizer/v-0000000071a9/manifest.json"
    manifest = run.read_json(name)
    manifest["content"]["figures"]["contract"]["sha256"] = "0" * 64
    run.write_atomic(name, canonical_json(manifest))
    with pytest.raises(ContractError, match="tokenizer"):
        open_dataset(run)


def test_counts_that_were_never_taken_cannot_be_written() -> None:
    """marin: the tokenizer step read its counts under a wrong name, with 0 in place of an error, so losses were NaN.

    https://github.com/marin-community/marin/issues/2687

    A manifest states rows in, kept and dropped by reason. One that lacks a count, or does not balance, is not made.
    """
    content = {"table": "clean", "stages": {"pii": 1}, "config": {}, "inputs": [], "files": [], "figures": {}}
    run = {"paths": {}, "started": "", "wall_seconds": 0.0, "cpu_seconds": 0.0, "code_version": "test"}
    right = {"rows_in": 5, "rows_kept": 3, "dropped": {"pii/failed": 2}}
    assert make_manifest(content | {"counts": right}, run, "clean").content.counts.rows_kept == 3
    for wrong in ({"rows_in": 5}, right | {"rows_kept": 0}, right | {"dropped": {}}, {"num_rows": 5}):
        with pytest.raises(ContractError):
            make_manifest(content | {"counts": wrong}, run, "clean")
