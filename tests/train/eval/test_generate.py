"""Sampling: the same seed gives the same text, temperature 0 the most probable one, control tokens stay out."""

import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from pipeline.tokens.tokenizer import PROBE_TEXTS, Tokenizer, TokenizerConfig, load_tokenizer, train_tokenizer
from schemas.errors import ConfigError, ContractError
from schemas.ids import canonical_json, digest_of
from schemas.manifest import read_run, write_run
from schemas.storage import Store
from schemas.tokens import TokenizerContract, open_dataset
from tests.support.lineage_run import record_files
from tests.support.tiny_dataset import flip_byte, make_tiny_dataset
from train.eval import generate as module
from train.eval.generate import Codec, Sampler, encode_prompt, generate, open_codec
from train.pretrain.__main__ import main

RECIPE = {
    "plan": {"num_layers": 1, "d_model": 32, "num_heads": 2, "num_kv_heads": 1, "d_ffw": 48, "tie_embeddings": True},
    "train": {"seq_len": 16, "global_batch": 8, "steps": 40, "eval_every": 0},
    "optim": {"learning_rate": 1e-2},
    "checkpoint": {"every": 20},
}
CONTRACT = TokenizerContract(
    kind="huggingface",
    sha256="",
    vocab_size=6,
    reserved={"pad": 0, "bos": 1, "eos": 2},
    before=["bos"],
    after=["eos"],
)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Store:
    run = make_tiny_dataset(tmp_path_factory.mktemp("generate") / "run")
    write_run(run, read_run(run).model_copy(update={"recipe": RECIPE}))
    assert main([run.uri]) == 0
    return run


def test_same_seed_same_text(run: Store) -> None:
    prompt = "bebu bida"
    first = generate(run, prompt, 12, 1.0, 5)
    assert first == generate(run, prompt, 12, 1.0, 5)
    assert first != generate(run, prompt, 12, 1.0, 6)
    assert first.startswith(prompt + " ")
    assert len(first.split()) == 14


def test_no_tokens_is_the_prompt(run: Store) -> None:
    assert generate(run, "bebu bida", 0) == "bebu bida"


def test_temperature_zero_does_not_depend_on_the_seed_but_on_the_checkpoint(run: Store) -> None:
    assert generate(run, "bebu", 20, 0.0, 1) == generate(run, "bebu", 20, 0.0, 2)
    assert generate(run, "bebu", 20, 0.0) == generate(run, "bebu", 20, 0.0, step=40)
    assert generate(run, "bebu", 20, 0.0) != generate(run, "bebu", 20, 0.0, step=20)


def test_main(run: Store, capsys) -> None:
    assert module.main([run.uri, "--prompt", "bebu", "--tokens", "3", "--seed", "4"]) == 0
    assert capsys.readouterr().out == generate(run, "bebu", 3, 1.0, 4) + "\n"
    assert module.main([run.uri, "--step", "7"]) == 2
    assert "expected a checkpoint of step 7, got checkpoints of steps 20, 40. Name one" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("<eos> bebu", 1), "got control tokens: eos"),
        (("bebu <pad> <eos>", 1), "got control tokens: eos, pad"),
        (("bebu", -1), "got -1 and 1.0"),
        (("bebu", 1, -0.5), "got 1 and -0.5"),
        (("bebu", 1, math.nan), "got 1 and nan"),
        (("bebu", 1, math.inf), "got 1 and inf"),
    ],
)
def test_wrong_arguments(run: Store, arguments: tuple, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        generate(run, *arguments)


def test_a_run_without_checkpoint_and_another_tokenizer_are_refused(run: Store, tmp_path: Path) -> None:
    with pytest.raises(
        ContractError,
        match=r"expected a trained model, got a run without checkpoints\. Train one with `penstock train .*/new`",
    ):
        generate(make_tiny_dataset(tmp_path / "new"), "bebu", 1)
    other = make_tiny_dataset(tmp_path / "other", vocab_size=500)
    (tmp_path / "other/train").symlink_to(run.path("train"))
    with pytest.raises(ContractError, match="expected the dataset to have the tokenizer of the checkpoint"):
        generate(other, "bebu", 1)
    flip_byte(tmp_path / "new/tokenizer/v-0000000071a9/tokenizer.json")
    with pytest.raises(ContractError, match="expected SHA-256"):
        open_codec(open_dataset(Store(str(tmp_path / "new"))))


@pytest.fixture(scope="module")
def sentencepiece_run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Tokenizer]:
    """A dataset under the contract of a SentencePiece model; its tokens are never looked at."""
    folder = tmp_path_factory.mktemp("sentencepiece") / "run"
    texts = ["the old mill by the river turns and turns", "rivers of rain fill the reservoir above the mill"] * 20
    config = TokenizerConfig(vocab_size=400)
    data = train_tokenizer(texts, config)
    tokenizer = load_tokenizer(data, "sentencepiece", config)
    run = make_tiny_dataset(folder)
    contract = tokenizer.contract.model_dump(mode="json")
    for table, figure in (("tokenizer", "contract"), ("tokens", "tokenizer")):
        path = folder / table / "v-0000000071a9/manifest.json"
        manifest = json.loads(path.read_text())
        manifest["content"]["figures"][figure] = contract
        path.write_text(json.dumps(manifest))
    (folder / "tokenizer/v-0000000071a9/tokenizer.json").write_bytes(data)
    record_files(run, "tokenizer")
    return run, tokenizer


def test_sentencepiece_text_is_that_of_the_tokens_stage(sentencepiece_run: tuple[Store, Tokenizer]) -> None:
    run, tokenizer = sentencepiece_run
    codec = open_codec(open_dataset(run))
    for text in PROBE_TEXTS:
        assert codec.encode(text) == tokenizer.encode(text).tolist()
        assert codec.decode(codec.encode(text)) == text
    ids = encode_prompt("<s> <eos> mill", tokenizer.contract, codec)
    assert ids[0] == tokenizer.contract.reserved["bos"]
    assert tokenizer.contract.reserved["eos"] not in ids


HUGE = 1 << 39


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"shape.vocab_size": HUGE}, rf"expected the parameters of the model shape, got embedding.weight is .*{HUGE}"),
        (
            {"shape.num_layers": 10_000},
            "expected the parameters of the model shape, got blocks.1.attention_norm.weight",
        ),
        *(
            ({f"shape.{name}": value}, "expected the shape of a model, got other values")
            for name, values in {
                **{"d_ffw": (-5, 0), "d_model": (10**30,), "num_kv_heads": (0,), "rope_factor": (0, -2.0)},
                **{"norm_eps": (-1.0, "nan"), "rope_theta": ("inf", 0), "width_multiplier": (0,), "query_scale": (0,)},
            }.items()
            for value in values
        ),
        *(({"train.stages": [{"first_step": 0, "seq_len": length}]}, "expected training stages") for length in (0, -3)),
    ],
)
def test_an_absurd_shape_is_refused_before_anything_is_allocated(
    run: Store, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    copied = Store(str(shutil.copytree(run.root, tmp_path / "run")))
    Path(copied.path("train/plan.json")).unlink()  # which has the shape too
    for path in Path(copied.path("train/checkpoints")).glob("*/checkpoint.json"):
        fields = {name: value for name, value in json.loads(path.read_bytes()).items() if name != "digest"}
        fields["identity"]["settings"] |= changes
        path.write_bytes(canonical_json({"digest": digest_of(fields), **fields}))
    with pytest.raises(ContractError, match=message):
        generate(copied, "bebu", 2)


def test_prompt_begins_a_document() -> None:
    codec = Codec(encode=lambda text: [3 + len(word) for word in text.split()], decode=str)
    assert encode_prompt("a", CONTRACT, codec) == [1, 4]
    assert encode_prompt("", CONTRACT, codec) == [1]
    with pytest.raises(ConfigError, match="expected a prompt"):
        encode_prompt("", CONTRACT.model_copy(update={"before": []}), codec)


def test_sampler_draws_by_probability_and_bars_control_tokens() -> None:
    logits = torch.tensor([9.0, 9.0, 0.0, 0.0, 1.0, -torch.inf])
    sampler = Sampler(CONTRACT, 1.0, 0)
    drawn = [sampler.draw(logits) for _ in range(4000)]
    # exp(0), exp(0), exp(1) over 4.718: 0.212, 0.212, 0.576; the deviation of a share is below 0.008.
    assert [drawn.count(number) / 4000 for number in range(6)] == pytest.approx(
        [0, 0, 0.212, 0.212, 0.576, 0], abs=0.03
    )
    assert Sampler(CONTRACT, 0.0, 0).draw(logits) == 4
    # A model of others may have more rows than its tokenizer has ids.
    assert Sampler(CONTRACT, 0.0, 0).draw(torch.cat([logits, torch.tensor([50.0])])) == 4
    sharp = Sampler(CONTRACT, 0.05, 0)
    assert {sharp.draw(logits) for _ in range(100)} == {4}
    assert Sampler(CONTRACT, 1e-320, 0).draw(logits) == 4
    for wrong in (math.nan, math.inf):
        with pytest.raises(ContractError, match=f"got {wrong}, because the model has diverged"):
            sampler.draw(torch.where(torch.arange(6) == 5, wrong, logits))
    assert logits[0] == 9.0
