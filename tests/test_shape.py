"""Tests of model shapes: exact parameter counts of published models, FLOPs and bytes by hand, well-formed choices."""

import pytest
import torch

from schemas.errors import ConfigError
from train.config import PlanConfig, TrainConfig
from train.model import Transformer, build_model
from train.shape import ModelShape, aspect, choose_shape, flops_per_token, memory_per_rank, num_parameters


def shape(vocab: int, layers: int, d: int, heads: int, kv: int, **more: object) -> ModelShape:
    settings = {"d_ffw": 4 * d, "tie_embeddings": False} | more
    return ModelShape(vocab_size=vocab, num_layers=layers, d_model=d, num_heads=heads, num_kv_heads=kv, **settings)


PUBLISHED = [
    # Llama 2 7B, Llama 3 8B, TinyLlama 1.1B and Llama 3.2 1B (tied), as their model cards count them.
    (shape(32000, 32, 4096, 32, 32, d_ffw=11008), 6_738_415_616),
    (shape(128256, 32, 4096, 32, 8, d_ffw=14336), 8_030_261_248),
    (shape(32000, 22, 2048, 32, 4, d_ffw=5632), 1_100_048_384),
    (shape(128256, 16, 2048, 32, 8, d_ffw=8192, tie_embeddings=True), 1_235_814_400),
]


@pytest.mark.parametrize(("published", "params"), PUBLISHED)
def test_published_models_have_the_published_number_of_parameters(published: ModelShape, params: int) -> None:
    assert num_parameters(published) == params
    matrices = 1 if published.tie_embeddings else 2
    assert num_parameters(published, embeddings=False) == params - matrices * published.vocab_size * published.d_model


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_the_torch_model_has_as_many(tied: bool, qk_norm: bool) -> None:
    small = shape(300, 3, 48, 6, 2, d_ffw=80, tie_embeddings=tied, qk_norm=qk_norm)
    assert sum(parameter.numel() for parameter in build_model(small).parameters()) == num_parameters(small)


def test_flops_by_hand() -> None:
    # Layer: wq, wo 2·64², wk, wv 2·64·32, SwiGLU 3·64·100 = 31,488 weights; two layers, head 500·64 = 32,000.
    small = shape(500, 2, 64, 4, 2, d_ffw=100)
    assert flops_per_token(small, 128, logits=False) == 6 * 2 * 31_488 + 12 * 2 * 64 * 128
    assert flops_per_token(small, 128) == 6 * (2 * 31_488 + 32_000) + 12 * 2 * 64 * 128
    # Attention is 12·32·4096·2048 of Llama 2 7B's FLOPs; the input embedding and the norms cost none.
    llama = PUBLISHED[0][0]
    assert flops_per_token(llama, 2048) == 6 * (6_738_415_616 - 32000 * 4096 - 65 * 4096) + 12 * 32 * 4096 * 2048


def test_memory_by_hand() -> None:
    small = shape(500, 2, 64, 4, 2, d_ffw=100)
    layer, rest = 31_488 + 128, 2 * 32_000 + 64
    train = TrainConfig(seq_len=128, micro_batch=4)
    need = memory_per_rank(small, train, world_size=4)
    assert need == {
        "states": 16 * (2 * layer + rest) // 4,
        "gathered": 4 * ((rest + 2 * layer) + (rest + layer)),
        "activations": 4 * 128 * 2 * 4 * (8 * 64 + 2 * 32 + 4 * 100),
        "logits": 4 * 128 * 500 * 12,
    }
    half = memory_per_rank(small, train.model_copy(update={"precision": "bf16"}), 4)
    assert (half["states"], half["activations"]) == (need["states"], need["activations"] // 2)
    assert half["logits"] == 4 * 128 * 500 * 10
    saving = memory_per_rank(small, train.model_copy(update={"activation_checkpointing": "full"}), 4)
    assert saving["activations"] == 4 * 128 * 4 * (2 * 64 + 8 * 64 + 2 * 32 + 4 * 100)
    deep = shape(500, 9, 64, 4, 2, d_ffw=100)
    kept = memory_per_rank(deep, train.model_copy(update={"reshard": False}), 4)["gathered"]
    assert kept - memory_per_rank(deep, train, 4)["gathered"] == 4 * 7 * layer


def bytes_saved_for_backward(num_layers: int) -> int:
    """What torch keeps between forward and backward pass for 4 sequences of 64, weights left out."""
    model = Transformer(shape(300, num_layers, 64, 4, 2, d_ffw=176, tie_embeddings=True))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: list[torch.Tensor] = []

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.zeros((4, 64), dtype=torch.int64)).sum()
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in kept}
    return sum(size for place, size in storages.items() if place not in weights)


def test_activations_are_what_torch_saves() -> None:
    train = TrainConfig(seq_len=64, micro_batch=4)
    one, five = (
        memory_per_rank(shape(300, layers, 64, 4, 2, d_ffw=176, tie_embeddings=True), train, 1)["activations"]
        for layers in (1, 5)
    )
    assert bytes_saved_for_backward(5) - bytes_saved_for_backward(1) == pytest.approx(five - one, rel=0.01)


def test_states_shard_as_in_the_zero_paper() -> None:
    """7.5B parameters on 64 ranks: 1.9 GB each (Rajbhandari et al. 2020, figure 1)."""
    model = shape(32000, 32, 4352, 34, 34, d_ffw=12032)
    assert num_parameters(model) == pytest.approx(7.5e9, rel=0.05)
    states = memory_per_rank(model, TrainConfig(), 64)["states"]
    assert states / num_parameters(model) * 7.5e9 == pytest.approx(1.9e9, rel=0.02)


@pytest.mark.parametrize("vocab_size", [512, 4096, 32000])
@pytest.mark.parametrize("num_params", [3e5, 1e6, 1e7, 1.24e8, 1e9, 7e9, 7e10])
def test_chosen_shapes_are_near_and_well_formed(vocab_size: int, num_params: float) -> None:
    found = choose_shape(num_params, vocab_size, PlanConfig())
    smallest = choose_shape(1, vocab_size, PlanConfig())
    if num_parameters(smallest) < num_params / 4:
        assert num_parameters(found) == pytest.approx(num_params, rel=0.12)
        assert 1 / 3 < found.d_model / found.num_layers / aspect(num_params) < 3
    assert found.head_dim * found.num_heads == found.d_model
    assert found.num_heads % found.num_kv_heads == 0
    assert found.head_dim in (16, 32, 64, 128)
    assert 2.6 < found.d_ffw / found.d_model < 3.1
    share = 2 * vocab_size * found.d_model / num_parameters(found.model_copy(update={"tie_embeddings": False}))
    assert found.tie_embeddings == pytest.approx(share > 0.2) or abs(share - 0.2) < 0.02


@pytest.mark.parametrize(("num_params", "table"), [(57e6, 576 / 9), (1018e6, 1792 / 23), (16183e6, 5120 / 47)])
def test_aspect_follows_table_a9(num_params: float, table: float) -> None:
    assert aspect(num_params) == pytest.approx(table, rel=0.25)


def test_overrides_are_kept() -> None:
    plan = PlanConfig(d_model=96, num_layers=3, num_heads=6, num_kv_heads=3, d_ffw=100, tie_embeddings=False)
    found = choose_shape(1e9, 1000, plan)
    assert found == shape(1000, 3, 96, 6, 3, d_ffw=100)
    only_width = choose_shape(5e6, 1000, PlanConfig(d_model=128))
    assert (only_width.d_model, only_width.num_heads) == (128, 4)
    assert num_parameters(only_width) == pytest.approx(5e6, rel=0.05)
    assert choose_shape(5e6, 1000, PlanConfig(num_layers=3, qk_norm=True)).qk_norm


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"d_model": 96, "num_heads": 5}, "num_heads 5 into which d_model 96 goes in even parts"),
        ({"d_model": 90, "num_heads": 6}, "num_heads 6 into which d_model 90 goes in even parts"),
        ({"d_model": 96, "num_heads": 6, "num_kv_heads": 4}, "num_kv_heads 4 that divides num_heads 6"),
    ],
)
def test_overrides_that_make_no_shape_are_refused(overrides: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_shape(1e6, 1000, PlanConfig(**overrides))
