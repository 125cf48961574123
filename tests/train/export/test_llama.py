"""Llama folders: what is written computes the same in `transformers`, what it writes computes the same here."""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.errors import ConfigError, ContractError
from tests.support.model_oracle import TINY, small_model, some_ids
from train.model.shape import ModelShape
from train.model.transformer import build_model

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file

from train.export.llama import export_llama, import_llama

LLAMA3 = {"rope_scaling": "llama3", "rope_factor": 4.0, "rope_original": 32, "rope_theta": 500.0}
SHAPES = {
    "grouped": {},
    "tied": {"tie_embeddings": True, "num_kv_heads": 1},
    "bias": {"bias": True, "num_kv_heads": 4, "norm_eps": 1e-3},
    "own head_dim": {"head_dim": 12},
    "linear": {"rope_scaling": "linear", "rope_factor": 2.5},
    "llama3": LLAMA3,
}


def shape_of(name: str) -> ModelShape:
    return TINY.model_copy(update=SHAPES[name])


def exported(folder: Path, shape: ModelShape, **options: Any) -> tuple[Path, Any]:
    model = small_model(shape)
    export_llama(dict(model.named_parameters()), shape, 64, options.pop("tokenizer", None), folder, **options)
    return folder, model


@pytest.mark.parametrize("name", SHAPES)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    folder, model = exported(tmp_path / "llama", shape_of(name))
    shape, state = import_llama(folder)
    assert shape == shape_of(name).model_copy(update={} if name == "llama3" else {"rope_original": 8192})
    expected = dict(model.named_parameters())
    assert list(state) == list(expected)
    assert all(torch.equal(state[name], expected[name]) for name in expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["llama"]
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json",
        "generation_config.json",
        "model.safetensors",
    ]


@pytest.mark.parametrize("mask", [0o022, 0o077])
def test_all_files_have_the_mode_of_the_process(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        folder, _ = exported(tmp_path / "llama", TINY)
    finally:
        os.umask(before)
    assert {path.name: path.stat().st_mode & 0o777 for path in folder.iterdir()} == dict.fromkeys(
        ("config.json", "generation_config.json", "model.safetensors"), 0o666 & ~mask
    )


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder, model = exported(tmp_path / "llama", shape_of(name))
    theirs, report = transformers.LlamaForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = some_ids(2, 60)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_what_transformers_writes_computes_the_same_here(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    shape = shape_of(name)
    rope = {
        "rope_type": "default" if shape.rope_scaling == "none" else shape.rope_scaling,
        "rope_theta": shape.rope_theta,
    }
    if shape.rope_scaling != "none":
        rope["factor"] = shape.rope_factor
    if shape.rope_scaling == "llama3":
        rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    torch.manual_seed(0)
    theirs = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            **{"vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "num_key_value_heads": shape.num_kv_heads, "head_dim": shape.head_dim},
            **{"attention_bias": shape.bias, "mlp_bias": shape.bias, "rms_norm_eps": shape.norm_eps},
            **{"rope_parameters": rope, "tie_word_embeddings": shape.tie_embeddings, "initializer_range": 0.2},
        )
    )
    with torch.no_grad():
        for parameter in theirs.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
    theirs.save_pretrained(tmp_path)
    imported, state = import_llama(tmp_path)
    assert imported == shape
    model = build_model(imported).to_empty(device="cpu")
    model.load_state_dict(state)
    ids = some_ids(2, 60)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits.float(), rtol=0, atol=1e-5)


def test_large_models_are_written_in_shards(tmp_path: Path) -> None:
    folder, model = exported(tmp_path / "llama", TINY, max_shard_bytes=20_000)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    assert len(files) > 3
    assert sorted(set(index["weight_map"].values())) == files
    assert index["metadata"]["total_size"] == sum(p.nbytes for p in model.parameters())
    for file in files:
        held = load_file(folder / file)
        assert held.keys() == {name for name, place in index["weight_map"].items() if place == file}
        assert sum(value.nbytes for value in held.values()) <= 20_000 or len(held) == 1
    _, state = import_llama(folder)
    assert all(torch.equal(state[name], value) for name, value in model.named_parameters())


def test_the_format_of_the_numbers_stays(tmp_path: Path) -> None:
    state = {name: value.bfloat16() for name, value in small_model(TINY).named_parameters()}
    export_llama(state, TINY, 64, None, tmp_path / "llama")
    assert json.loads((tmp_path / "llama/config.json").read_text())["torch_dtype"] == "bfloat16"
    assert load_file(tmp_path / "llama/model.safetensors")["lm_head.weight"].dtype == torch.bfloat16
    assert import_llama(tmp_path / "llama")[1]["head.weight"].dtype == torch.float32


@pytest.mark.parametrize(
    ("update", "message"),
    [
        ({"positions": "relative"}, "got positions = relative. Use the checkpoint"),
        ({"activation": "gelu", "qk_norm": True}, "Qwen3ForCausalLM supports, got activation = gelu. Use the check"),
        ({"norm": "layernorm"}, "LlamaForCausalLM supports, got norm = layernorm. Use the checkpoint"),
        (
            {"value_embeddings": 2, "residual_mixing": True, "window_pattern": "SL", "window": 4, "logit_softcap": 9.0},
            "got value_embeddings = 2; residual_mixing = true; window = 4; logit_softcap = 9.0. Use the checkpoint",
        ),
    ],
)
def test_shapes_that_llama_has_not(update: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        exported(tmp_path / "llama", TINY.model_copy(update=update))
    assert not list(tmp_path.iterdir())


def test_a_folder_that_holds_something_is_refused(tmp_path: Path) -> None:
    (tmp_path / "llama").mkdir()
    exported(tmp_path / "llama", TINY)  # an empty one is as good as none
    with pytest.raises(ConfigError, match="llama: expected a new folder, got one with files in it"):
        exported(tmp_path / "llama", TINY)


def test_an_export_that_fails_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("train.export.weights.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        exported(tmp_path / "llama", TINY)
    assert not list(tmp_path.iterdir())


def test_weights_that_are_not_the_shapes(tmp_path: Path) -> None:
    state = dict(small_model(TINY).named_parameters())
    state["extra"], state["norm.weight"] = state.pop("head.weight"), torch.ones(31)
    message = r"head.weight is missing; extra is not one of its parameters; norm.weight is \(31,\) and not \(32,\)"
    with pytest.raises(ContractError, match=message):
        export_llama(state, TINY, 64, None, tmp_path / "llama")


def changed(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text()) | fields
        kept = {name: value for name, value in config.items() if value != "gone"}
        (folder / "config.json").write_text(json.dumps(kept))

    return change


def piped(name: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return change


def written(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


def indexed(place: object) -> Callable[[Path], None]:
    return written("model.safetensors.index.json", json.dumps({"weight_map": {"model.norm.weight": place}}))


def as_integers(folder: Path) -> None:
    held = load_file(folder / "model.safetensors")
    held["model.norm.weight"] = held["model.norm.weight"].view(torch.int32)
    save_file(held, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (changed(model_type="gemma", hidden_act="gelu"), "got model_type = gemma; hidden_act = gelu. Import"),
        (changed(rope_scaling={"type": "dynamic", "factor": 2.0}), "rope_type = dynamic"),
        (changed(rope_parameters={"rope_type": "yarn"}), "rope_type = yarn"),
        (
            changed(rope_scaling={"rope_type": "llama3", "low_freq_factor": 2.0, "high_freq_factor": 4.0}),
            r"low and high_freq_factor = \(2.0, 4.0\)",
        ),
        (changed(mlp_bias=True), "attention_bias and mlp_bias that differ"),
    ],
)
def test_llamas_that_no_shape_can_hold(change: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    folder, _ = exported(tmp_path / "llama", TINY)
    change(folder)
    with pytest.raises(ConfigError, match=message):
        import_llama(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda folder: (folder / "config.json").unlink(), "config.json: expected a file of at most"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors: expected a file, got none"),
        (piped("config.json"), "config.json: expected a file of at most"),
        (piped("model.safetensors"), "model.safetensors: expected a file, got none"),
        (piped("model.safetensors.index.json"), "index.json: expected a file of at most"),
        (written("config.json", "[" * 100_000), "config.json: expected a JSON file"),
        (written("config.json", "[]"), "config.json: expected a JSON object"),
        (written("config.json", '"x"'), "config.json: expected a JSON object"),
        (changed(rope_scaling=[1]), "missing or invalid key"),
        (changed(rope_parameters="x"), "missing or invalid key"),
        (changed(num_attention_heads="x", head_dim=None), "missing or invalid key"),
        (changed(num_attention_heads=0, head_dim=None), "missing or invalid key"),
        (written("model.safetensors.index.json", "[]"), "index.json: expected a JSON object"),
        (
            indexed("../outside.safetensors"),
            "files in the folder in `weight_map`, got '../outside.safetensors'",
        ),
        (indexed("/etc/passwd"), "got '/etc/passwd'"),
        (indexed(5), "names of files in the folder in `weight_map`, got 5"),
        (indexed([]), r"names of files in the folder in `weight_map`, got \[\]"),
        (as_integers, "expected model.norm.weight as floating-point numbers, got I32"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"no"), "expected a safetensors file"),
        (changed(hidden_size="gone"), "missing or invalid key: 'hidden_size'"),
        (changed(num_hidden_layers=3), "blocks.2.attention_norm.weight is missing.* and 4 more"),
        (changed(num_hidden_layers=1), "model.layers.1.input_layernorm.weight is not one of its parameters"),
    ],
)
def test_broken_folders(change: Callable[[Path], None], message: str, tmp_path: Path) -> None:
    folder, _ = exported(tmp_path / "llama", TINY)
    change(folder)
    with pytest.raises(ContractError, match=message):
        import_llama(folder)


def test_files_that_are_links_are_read(tmp_path: Path) -> None:
    """The cache of the Hub holds links to files beside the folder."""
    folder, model = exported(tmp_path / "llama", TINY)
    (folder / "model.safetensors").rename(tmp_path / "blob")
    (folder / "model.safetensors").symlink_to("../blob")
    assert import_llama(folder)[1].keys() == dict(model.named_parameters()).keys()


def test_what_old_versions_write_is_read(tmp_path: Path) -> None:
    shape = shape_of("tied").model_copy(update={"num_kv_heads": 4})
    folder, model = exported(tmp_path / "llama", shape)
    held = load_file(folder / "model.safetensors")
    held["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    held["lm_head.weight"] = held["model.embed_tokens.weight"].clone()
    save_file(held, folder / "model.safetensors")
    changed(num_key_value_heads="gone", head_dim="gone", rope_scaling={"type": "linear", "factor": 3.0})(folder)
    imported, state = import_llama(folder)
    assert imported == shape.model_copy(update={"rope_scaling": "linear", "rope_factor": 3.0})
    assert state.keys() == dict(model.named_parameters()).keys()
