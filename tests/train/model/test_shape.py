"""Tests of model shapes: exact parameter counts of published models, FLOPs and bytes by hand, well-formed choices."""

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from schemas.errors import ConfigError
from train.config.plan import PlanConfig
from train.model.shape import ModelShape, aspect, choose_shape, flops_per_token, num_parameters, params_of_layer
from train.model.transformer import build_model


def shape(vocab: int, layers: int, d: int, heads: int, kv: int, **more: Any) -> ModelShape:
    settings = {"d_ffw": 4 * d, "tie_embeddings": False, "head_dim": d // heads} | more
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


def gpt(layers: int, d: int, heads: int, positions: int = 1024, **more: Any) -> ModelShape:
    kind = {"norm": "layernorm", "positions": "learned", "activation": "gelu_tanh", "bias": True}
    return shape(50257, layers, d, heads, heads, max_positions=positions, tie_embeddings=True, **kind, **more)


def bert(layers: int, d: int, heads: int) -> ModelShape:
    kind = {"norm": "layernorm", "norm_position": "post", "positions": "learned", "activation": "gelu", "bias": True}
    kind |= {"max_positions": 512, "num_token_types": 2, "head_transform": True}
    return shape(30522, layers, d, heads, heads, tie_embeddings=True, **kind)


@pytest.mark.parametrize(
    ("published", "params"),
    [
        # GPT-2 small to XL, and BERT base and large with the head of masked tokens, as `transformers` counts them.
        (gpt(12, 768, 12), 124_439_808),
        (gpt(24, 1024, 16), 354_823_168),
        (gpt(36, 1280, 20), 774_030_080),
        (gpt(48, 1600, 25), 1_557_611_200),
        (bert(12, 768, 12), 109_514_298),
        (bert(24, 1024, 16), 335_174_458),
    ],
)
def test_gpt2_and_bert_have_the_published_number_of_parameters(published: ModelShape, params: int) -> None:
    assert num_parameters(published) == params
    assert sum(parameter.numel() for parameter in build_model(published).parameters()) == params


@pytest.mark.parametrize(
    ("layers", "d", "heads", "head_dim", "millions"),
    [
        (12, 768, 12, 64, 125),
        (24, 1024, 16, 64, 350),
        (24, 1536, 16, 96, 760),
        (24, 2048, 16, 128, 1300),
        (32, 2560, 32, 80, 2700),
        (32, 4096, 32, 128, 6700),
        (40, 5140, 40, 128, 13_000),
        (96, 12288, 96, 128, 175_000),
    ],
)
def test_gpt3_has_the_sizes_of_its_paper(layers: int, d: int, heads: int, head_dim: int, millions: int) -> None:
    """Brown et al. 2020, arXiv 2005.14165, Table 2.1, but for the 24 heads of its 1.3B, which are wider than d_model.

    The paper rounds: 350M is 356M, and 1.3B is 1,316M.
    """
    assert num_parameters(gpt(layers, d, heads, 2048, head_dim=head_dim)) / 1e6 == pytest.approx(millions, rel=0.018)


TABLE_A9 = """
44,512,2048,64,8,8|57,576,2304,64,9,9|74,640,2560,64,10,10|90,640,2560,64,10,13|106,640,2560,64,10,16
117,768,3072,64,12,12|140,768,3072,64,12,15|163,768,3072,64,12,18|175,896,3584,64,14,14|196,896,3584,64,14,16
217,896,3584,64,14,18|251,1024,4096,64,16,16|278,1024,4096,64,16,18|306,1024,4096,64,16,20|425,1280,5120,128,10,18
489,1280,5120,128,10,21|509,1408,5632,128,11,18|552,1280,5120,128,10,24|587,1408,5632,128,11,21
632,1536,6144,128,12,19|664,1408,5632,128,11,24|724,1536,6144,128,12,22|816,1536,6144,128,12,25
893,1792,7168,128,14,20|1018,1792,7168,128,14,23|1143,1792,7168,128,14,26|1266,2048,8192,128,16,22
1424,2176,8704,128,17,22|1429,2048,8192,128,16,25|1593,2048,8192,128,16,28|1609,2176,8704,128,17,25
1731,2304,9216,128,18,24|1794,2176,8704,128,17,28|2007,2304,9216,128,18,28|2283,2304,9216,128,18,32
2298,2560,10240,128,20,26|2639,2560,10240,128,20,30|2980,2560,10240,128,20,34|3530,2688,10752,128,22,36
3802,2816,11264,128,22,36|4084,2944,11776,128,22,36|4516,3072,12288,128,24,36|6796,3584,14336,128,28,40
9293,4096,16384,128,32,42|11452,4352,17408,128,32,47|12295,4608,18432,128,36,44|12569,4608,18432,128,32,47
13735,4864,19456,128,32,47|14940,4992,19968,128,32,49|16183,5120,20480,128,40,47
"""
"""Hoffmann et al. 2022, arXiv 2203.15556, Table A9: parameters [M], d_model, ffw, width of a head, heads, layers."""


def chinchilla(d: int, ffw: int, head_dim: int, heads: int, layers: int) -> ModelShape:
    kind = {"activation": "gelu", "bias": True, "positions": "relative", "tie_embeddings": True}
    return shape(32000, layers, d, heads, heads, d_ffw=ffw, head_dim=head_dim, **kind)


def test_the_sizes_of_table_a9_are_reproduced() -> None:
    rows = [tuple(map(int, row.split(","))) for row in TABLE_A9.replace("\n", "|").strip("|").split("|")]
    assert len(rows) == 50
    chosen = [(printed, num_parameters(chinchilla(*sizes)) / 1e6) for printed, *sizes in rows]
    # The paper rounds most sizes and truncates the others.
    assert [printed for printed, size in chosen if printed not in (round(size), int(size))] == []
    assert [p for p, size in chosen if p != round(size)] == [552, 3530, 3802, 9293, 12295, 13735, 14940, 16183]


OPTIONS: list[dict[str, Any]] = [
    {"tie_embeddings": True},
    {"qk_norm": True},
    {"bias": True},
    {"activation": "gelu"},
    {"activation": "gelu", "bias": True, "qk_norm": True, "head_dim": 12},
    {"positions": "relative"},
    {"activation": "gelu", "bias": True, "positions": "relative", "tie_embeddings": True, "head_dim": 10},
    {"activation": "relu2", "residual_mixing": True, "value_embeddings": 1, "logit_softcap": 15.0},
]


@pytest.mark.parametrize("options", OPTIONS)
def test_the_torch_model_has_the_same_number_of_parameters(options: dict[str, Any]) -> None:
    small = shape(300, 3, 48, 6, 2, **({"d_ffw": 80} | options))
    model = build_model(small)
    assert sum(parameter.numel() for parameter in model.parameters()) == num_parameters(small)
    assert sum(parameter.numel() for parameter in model.blocks["1"].parameters()) == params_of_layer(small)


@pytest.mark.parametrize("options", [{}, *OPTIONS])
def test_torch_counts_the_same_flops(options: dict[str, Any]) -> None:
    small, tokens = shape(300, 2, 48, 6, 2, **({"d_ffw": 80} | options)), 128
    with torch.device("meta"):
        model, ids = build_model(small), torch.zeros((1, tokens), dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model(ids).sum().backward()
    assert counter.get_total_flops() / tokens == pytest.approx(flops_per_token(small, tokens), rel=0.01)


def test_flops_by_hand() -> None:
    # Layer: wq, wo 2·64², wk, wv 2·64·32, SwiGLU 3·64·100 = 31,488 weights; two layers, head 500·64 = 32,000.
    small = shape(500, 2, 64, 4, 2, d_ffw=100)
    assert flops_per_token(small, 128, logits=False) == 6 * 2 * 31_488 + 12 * 2 * 64 * 128
    assert flops_per_token(small, 128) == 6 * (2 * 31_488 + 32_000) + 12 * 2 * 64 * 128
    # Attention is 12·32·4096·2048 of Llama 2 7B's FLOPs; the input embedding and the norms cost none.
    llama = PUBLISHED[0][0]
    assert flops_per_token(llama, 2048) == 6 * (6_738_415_616 - 32000 * 4096 - 65 * 4096) + 12 * 32 * 4096 * 2048


def test_flops_of_windows_by_hand() -> None:
    """Layers 0, 1 and 3 of five have a window of 32; of 128 positions a query counts 32·(2 − 32/128) = 56 keys."""
    near = shape(500, 5, 64, 4, 2, d_ffw=100, window_pattern="SSL", window=32, value_embeddings=1)
    matrices = 5 * 31_488
    assert flops_per_token(near, 128, logits=False) == 6 * matrices + 12 * 64 * (3 * 56 + 2 * 128)
    assert flops_per_token(near, 32, logits=False) == 6 * matrices + 12 * 64 * 5 * 32  # nothing is beyond the window


def test_flops_of_the_options_by_hand() -> None:
    # Two matrices of 64·100; heads together 2·64 wide: q and out 2·64·128, k and v 2·64·64.
    wide = shape(500, 2, 64, 4, 2, d_ffw=100, activation="gelu", head_dim=32, bias=True)
    matrices = 2 * 64 * 128 + 2 * 64 * 64 + 2 * 64 * 100
    assert flops_per_token(wide, 128, logits=False) == 2 * (6 * matrices + 12 * 128 * 128)
    relative = wide.model_copy(update={"positions": "relative"})
    assert flops_per_token(relative, 128, logits=False) == 2 * (6 * matrices + 4 * 64 * 128 + 18 * 128 * 128)


@pytest.mark.parametrize("vocab_size", [512, 4096, 32000])
@pytest.mark.parametrize("num_params", [3e5, 1e6, 1e7, 1.24e8, 1e9, 7e9, 7e10])
def test_chosen_shapes_are_near_and_well_formed(vocab_size: int, num_params: float) -> None:
    chosen = choose_shape(num_params, vocab_size, PlanConfig())
    smallest = choose_shape(1, vocab_size, PlanConfig())
    if num_parameters(smallest) < num_params / 4:
        assert num_parameters(chosen) == pytest.approx(num_params, rel=0.12)
        assert 1 / 3 < chosen.d_model / chosen.num_layers / aspect(num_params) < 3
    assert chosen.head_dim * chosen.num_heads == chosen.d_model
    assert chosen.num_heads % chosen.num_kv_heads == 0
    assert chosen.head_dim in (16, 32, 64, 128)
    assert 2.4 < chosen.d_ffw / chosen.d_model < 3.1
    share = 2 * vocab_size * chosen.d_model / num_parameters(chosen.model_copy(update={"tie_embeddings": False}))
    assert chosen.tie_embeddings == pytest.approx(share > 0.2) or abs(share - 0.2) < 0.02


@pytest.mark.parametrize("num_params", [1.24e8, 2.14e8, 3.23e8, 3.5e8, 7.6e8, 1e9, 1.91e9, 2.7e9, 7e9])
@pytest.mark.parametrize("vocab_size", [32000, 50257, 128256])
def test_hidden_widths_are_whole_tiles_and_sizes_are_met(vocab_size: int, num_params: float) -> None:
    chosen = choose_shape(num_params, vocab_size, PlanConfig())
    if chosen.d_model >= 512:
        assert chosen.d_ffw % 256 == 0
        assert abs(chosen.d_ffw - 8 * chosen.d_model / 3) <= 128
    assert num_parameters(chosen) == pytest.approx(num_params, rel=0.02)
    assert 1 / 2 < chosen.d_model / chosen.num_layers / aspect(num_params) < 2


def test_narrow_models_have_hidden_widths_in_sixteens() -> None:
    assert [choose_shape(1e6, 512, PlanConfig(d_model=width)).d_ffw for width in (96, 256, 480)] == [256, 688, 1280]
    assert choose_shape(1e8, 32000, PlanConfig(d_model=512)).d_ffw == 1280  # of 1,280 and 1,536 that nearest to 1,365


@pytest.mark.parametrize(("num_params", "table"), [(57e6, 576 / 9), (1018e6, 1792 / 23), (16183e6, 5120 / 47)])
def test_aspect_follows_table_a9(num_params: float, table: float) -> None:
    assert aspect(num_params) == pytest.approx(table, rel=0.25)


def test_architecture_options_are_kept_and_sized() -> None:
    plan = PlanConfig(activation="gelu", bias=True, positions="relative", head_dim=48, tie_embeddings=True)
    chosen = choose_shape(1e8, 32000, plan)
    assert (chosen.activation, chosen.bias, chosen.positions, chosen.head_dim) == ("gelu", True, "relative", 48)
    assert chosen.d_ffw == 4 * chosen.d_model
    assert num_parameters(chosen) == pytest.approx(1e8, rel=0.1)
    stretched = choose_shape(1e8, 32000, PlanConfig(rope_scaling="llama3", rope_factor=8.0, rope_original=4096))
    assert (stretched.rope_scaling, stretched.rope_factor, stretched.rope_original) == ("llama3", 8.0, 4096)
    # Heads of their own width need not fill the stream: Table A9 has 22 heads of 128 in 2688.
    narrow = choose_shape(1e9, 32000, PlanConfig(d_model=2688, num_heads=22, num_kv_heads=22, head_dim=128))
    assert (narrow.query_width, narrow.key_width) == (2816, 2816)


def test_widths_are_multiples_of_the_given_heads() -> None:
    chosen = choose_shape(1e8, 32000, PlanConfig(num_heads=6))
    assert chosen.head_dim * 6 == chosen.d_model
    assert choose_shape(1e8, 32000, PlanConfig(num_kv_heads=7)).num_heads % 7 == 0


def test_overrides_are_kept() -> None:
    plan = PlanConfig(d_model=96, num_layers=3, num_heads=6, num_kv_heads=3, d_ffw=100, tie_embeddings=False)
    chosen = choose_shape(1e9, 1000, plan)
    assert chosen == shape(1000, 3, 96, 6, 3, d_ffw=100)
    only_width = choose_shape(5e6, 1000, PlanConfig(d_model=128))
    assert (only_width.d_model, only_width.num_heads) == (128, 4)
    assert num_parameters(only_width) == pytest.approx(5e6, rel=0.05)
    assert choose_shape(5e6, 1000, PlanConfig(num_layers=3, qk_norm=True)).qk_norm


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            {"d_model": 96, "num_heads": 5},
            r"expected an even d_model / num_heads, got 96 / 5\. Change plan\.num_heads\.",
        ),
        (
            {"d_model": 90, "num_heads": 6},
            r"expected an even d_model / num_heads, got 90 / 6\. Change plan\.num_heads\.",
        ),
        ({"d_model": 96, "num_heads": 6, "num_kv_heads": 4}, "num_kv_heads that divides num_heads 6, got 4"),
        (
            {"d_model": 96, "num_heads": 5, "num_kv_heads": 2},
            r"num_heads and num_kv_heads that divides num_heads 5, got 96 / 5 and 2\. "
            r"Change plan\.num_heads and plan\.num_kv_heads\.",
        ),
        ({"head_dim": 7, "d_model": 56}, "an even head_dim for rotary positions, got 7"),
        ({"num_heads": 40000}, "a d_model below 32768 that the heads divide, got none for num_heads = 40000"),
    ],
)
def test_overrides_that_make_no_shape_are_rejected(overrides: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        choose_shape(1e6, 1000, PlanConfig(**overrides))


@pytest.mark.parametrize(
    ("size", "heads", "kv_heads"), [(1e9, 14, 2), (3e9, 20, 4), (8e9, 32, 8), (70e9, 72, 8), (405e9, 144, 8)]
)
def test_a_tensor_axis_divides_the_heads(size: float, heads: int, kv_heads: int) -> None:
    """Of 72 heads a quarter is 18, which neither four nor eight GPUs can share."""
    shape = choose_shape(size, 128_256, PlanConfig())
    assert (shape.num_heads, shape.num_kv_heads) == (heads, kv_heads)
    assert shape.num_heads % shape.num_kv_heads == 0
