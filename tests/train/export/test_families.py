"""Qwen 3, GPT-2 and BERT: folders of `transformers` compute the same here, folders of ours the same there."""

import json
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from schemas.errors import ConfigError, ContractError
from tests.support.model_oracle import TINY, small_model, some_ids
from train.export.families import FAMILIES, family_of
from train.model.shape import ModelShape, num_parameters
from train.model.transformer import build_model

pytest.importorskip("safetensors")
from safetensors.torch import load_file, save_file

from train.export.llama import export_llama, import_llama
from train.export.weights import StoredWeights

LEARNED = {
    **{"norm": "layernorm", "positions": "learned", "max_positions": 64, "bias": True, "num_kv_heads": 4},
    **{"activation": "gelu_tanh", "tie_embeddings": True},
}
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {"qk_norm": True, "rope_theta": 1e6, "norm_eps": 1e-6, "head_dim": 12},
    "gpt2": LEARNED,
    "bert": LEARNED
    | {"norm_position": "post", "activation": "gelu", "num_token_types": 2, "head_transform": True, "norm_eps": 1e-12},
}
CONFIGS: dict[str, dict[str, Any]] = {
    "qwen3": {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        **{"num_key_value_heads": 2, "head_dim": 12, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}},
        "tie_word_embeddings": False,
    },
    "gpt2": {"n_embd": 32, "n_inner": 48, "n_layer": 2, "n_head": 4, "n_positions": 64},
    "bert": {
        **{"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4},
        "max_position_embeddings": 64,
    },
}
"""The same shapes in the words of `transformers`."""


def shape_of(name: str) -> ModelShape:
    return TINY.model_copy(update=SHAPES[name])


def exported(name: str, folder: Path, **options: Any) -> Any:
    model = small_model(shape_of(name), causal=name != "bert")
    export_llama(dict(model.named_parameters()), model.shape, 64, None, folder, **options)
    return model


@pytest.mark.parametrize("name", SHAPES)
def test_there_and_back(name: str, tmp_path: Path) -> None:
    expected = dict(exported(name, tmp_path / "one").named_parameters())
    exported(name, tmp_path / "several", max_shard_bytes=9_000)
    assert len(list((tmp_path / "several").glob("*.safetensors"))) > 3
    for folder in ("one", "several"):
        shape, state = import_llama(tmp_path / folder)
        assert shape == shape_of(name)
        assert state.keys() == expected.keys()
        assert all(torch.equal(state[key], expected[key]) for key in expected)


@pytest.mark.parametrize("name", SHAPES)
def test_transformers_computes_the_same_logits(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    model = exported(name, tmp_path / "model")
    kind = getattr(transformers, FAMILIES[name].architecture)
    theirs, report = kind.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(report[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    ids = some_ids(2, 60)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs.eval()(ids).logits.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_what_transformers_writes_computes_the_same_here(name: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    kind = getattr(transformers, FAMILIES[name].architecture)
    config = kind.config_class(vocab_size=97, initializer_range=0.2, **CONFIGS[name])
    theirs = kind(config).eval()
    with torch.no_grad():
        for key, parameter in theirs.named_parameters():
            if parameter.ndim == 1:
                low = -0.5 if key.endswith("bias") else 0.5
                parameter.uniform_(low, low + 1)
    theirs.save_pretrained(tmp_path)
    shape, state = import_llama(tmp_path)
    assert shape == shape_of(name).model_copy(update={"norm_eps": shape.norm_eps})
    assert num_parameters(shape) == sum(parameter.numel() for parameter in theirs.parameters())
    model = build_model(shape, causal=name != "bert").to_empty(device="cpu")
    model.load_state_dict(state)
    ids = some_ids(2, 60)
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", SHAPES)
def test_a_region_of_a_parameter_is_read_alone(name: str, tmp_path: Path) -> None:
    weights = dict(exported(name, tmp_path / "model").named_parameters())
    with ExitStack() as stack:
        stored = StoredWeights(tmp_path / "model", stack)
        for key, whole in weights.items():
            region = tuple(slice(size // 3, size - size // 4) for size in whole.shape)
            assert torch.equal(stored.read(key, region), whole[region]), key


def test_published_files_have_other_names_and_more_tensors(tmp_path: Path) -> None:
    """GPT-2's without the prefix and with masks; BERT's with gamma, beta, a pooler and the tied matrix."""
    for name in ("gpt2", "bert"):
        expected = dict(exported(name, tmp_path / name).named_parameters())
        path = tmp_path / name / "model.safetensors"
        held = {key.removeprefix("transformer."): value for key, value in load_file(path).items()}
        held = {
            key.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta"): value
            for key, value in held.items()
        }
        held |= (
            {"h.0.attn.bias": torch.ones(64, 64), "h.1.attn.masked_bias": torch.ones(())}
            if name == "gpt2"
            else {
                "bert.pooler.dense.weight": torch.ones(32, 32),
                "cls.seq_relationship.bias": torch.ones(2),
                "cls.predictions.decoder.weight": held["bert.embeddings.word_embeddings.weight"].clone(),
                "cls.predictions.decoder.bias": held["cls.predictions.bias"].clone(),
                "bert.embeddings.position_ids": torch.arange(64),
            }
        )
        save_file(held, path)
        state = import_llama(tmp_path / name)[1]
        assert all(torch.equal(state[key], expected[key]) for key in expected)


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    exported("gpt2", tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"got pytorch_model.bin, which can run code .* Convert the weights"):
        import_llama(tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3", {"use_sliding_window": True}, "supported qwen3 model, got use_sliding_window = true"),
        ("qwen3", {"attention_bias": True}, "got attention_bias = true"),
        ("gpt2", {"activation_function": "relu"}, "got activation_function = relu"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "got scale_attn_by_inverse_layer_idx = true"),
        ("bert", {"position_embedding_type": "relative_key"}, "got position_embedding_type = relative_key"),
        ("bert", {"hidden_act": "relu"}, "got hidden_act = relu"),
        ("qwen3", {"is_causal": False}, "got is_causal = false"),
        ("gpt2", {"is_causal": False}, "got is_causal = false"),
        ("bert", {"is_causal": True}, "got is_causal = true"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "got layer_types = sliding_attention"),
        ("gpt2", {"quantization_config": {"quant_method": "fp8"}}, "got quantization_config"),
        (
            "qwen3",
            {"rope_parameters": {"rope_theta": 5.0}, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
            "got rope_parameters and rope_scaling that differ",
        ),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 5.0}}}, "got rope_parameters by kind of layer"),
    ],
)
def test_configurations_that_no_shape_can_hold(
    name: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    exported(name, tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ConfigError, match=message):
        import_llama(tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "copy", "own"),
    [
        ("gpt2", "lm_head.weight", "transformer.wte.weight"),
        ("bert", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
        ("bert", "cls.predictions.decoder.bias", "cls.predictions.bias"),
    ],
)
def test_a_tied_tensor_with_numbers_of_its_own_is_refused(name: str, copy: str, own: str, tmp_path: Path) -> None:
    exported(name, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    held = load_file(path)
    save_file(held | {copy: held[own].clone()}, path)
    import_llama(tmp_path / "model")
    changed = held[own].clone()
    changed[-1] += 1
    for other in (changed, changed[:-1], torch.ones(())):
        save_file(held | {copy: other.clone()}, path)
        with pytest.raises(ConfigError, match=f"expected {copy} with the numbers of {own}, because"):
            import_llama(tmp_path / "model")


@pytest.mark.parametrize(
    ("name", "first", "second"),
    [
        ("gpt2", "transformer.wte.weight", "wte.weight"),
        ("bert", "bert.embeddings.LayerNorm.weight", "bert.embeddings.LayerNorm.gamma"),
    ],
)
def test_two_tensors_for_one_parameter_are_refused(name: str, first: str, second: str, tmp_path: Path) -> None:
    exported(name, tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    held = load_file(path)
    save_file(held | {second: held[first] + 1}, path)
    with pytest.raises(ContractError, match=f"expected one tensor for {first}, got .* in model.safetensors and "):
        import_llama(tmp_path / "model")


def test_two_sets_of_weights_are_refused(tmp_path: Path) -> None:
    exported("gpt2", tmp_path / "model", max_shard_bytes=9_000)
    exported("gpt2", tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "model" / "model.safetensors")
    with pytest.raises(ConfigError, match=r"expected one set of weights, got model.safetensors and the files of "):
        import_llama(tmp_path / "model")


LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


@pytest.mark.parametrize(
    ("changes", "original"),
    [
        ({}, 64),
        ({"original_max_position_embeddings": 16}, 16),
        ({"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 32}}, 32),
    ],
)
def test_the_length_before_the_extension_is_that_of_transformers(
    changes: dict[str, Any], original: int, tmp_path: Path
) -> None:
    transformers = pytest.importorskip("transformers")
    model = exported("qwen3", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    own = {"rope_scaling": None, "rope_parameters": LLAMA3 | {"rope_theta": 10_000.0}, "max_position_embeddings": 64}
    path.write_text(json.dumps(json.loads(path.read_text()) | own | changes))
    shape, state = import_llama(tmp_path / "model")
    assert shape.rope_original == original
    model = build_model(shape).to_empty(device="cpu")
    model.load_state_dict(state)
    ids = some_ids(2, 60)
    theirs = transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "model").eval()
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits.float(), rtol=0, atol=1e-5)


@pytest.mark.parametrize(("gone", "message"), [("factor", "invalid key: 'factor'"), ("head_dim", "is not|and not")])
def test_a_missing_key_has_the_value_of_transformers_or_none(gone: str, message: str, tmp_path: Path) -> None:
    exported("qwen3", tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text()) | {"rope_scaling": {"rope_type": "linear", "factor": 2.0}}
    (config if gone in config else config["rope_scaling"]).pop(gone)
    path.write_text(json.dumps(config))
    with pytest.raises(ContractError, match=message):
        import_llama(tmp_path / "model")


def test_a_matrix_of_three_parts_that_has_another_size(tmp_path: Path) -> None:
    exported("gpt2", tmp_path / "model")
    path = tmp_path / "model" / "model.safetensors"
    held = load_file(path)
    held["transformer.h.0.attn.c_attn.weight"] = torch.zeros(32, 90)
    save_file(held, path)
    with pytest.raises(ContractError, match=r"blocks.0.attention.query.weight is \(30, 32\) and not \(32, 32\)"):
        import_llama(tmp_path / "model")


def test_families_are_told_apart_by_their_shapes() -> None:
    assert {name: family_of(shape_of(name)).model_type for name in SHAPES} == {name: name for name in SHAPES}
    assert family_of(TINY).model_type == "llama"


def test_a_width_that_the_heads_do_not_divide(tmp_path: Path) -> None:
    """LlamaConfig of `transformers` rejects it, whatever its head_dim is; that of Qwen 3 does not."""
    transformers = pytest.importorskip("transformers")
    uneven = {"num_heads": 6, "num_kv_heads": 2, "head_dim": 8}
    with pytest.raises(ConfigError, match="LlamaForCausalLM supports, got num_heads = 6, which does not divide d_mod"):
        export_llama({}, TINY.model_copy(update=uneven), 64, None, tmp_path / "llama")
    model = small_model(shape_of("qwen3").model_copy(update=uneven))
    export_llama(dict(model.named_parameters()), model.shape, 64, None, tmp_path / "qwen3")
    assert transformers.Qwen3ForCausalLM.from_pretrained(tmp_path / "qwen3").config.num_attention_heads == 6
