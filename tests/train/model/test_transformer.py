"""The model against a reference implementation in float64, for every option, and its exact properties."""

import itertools
import math
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support.model_oracle import TINY, oracle_logits, small_model, some_ids
from train.data.rows import IGNORED
from train.model.loss import LossTally
from train.model.shape import ModelShape, num_parameters, parameter_sizes
from train.model.transformer import LayerSpan, Transformer, build_model, initial_weight

OPTIONS: dict[str, dict[str, Any]] = {
    "grouped": {},
    "one key head, tied": {"num_kv_heads": 1, "tie_embeddings": True},
    "all key heads, qk_norm": {"num_kv_heads": 4, "qk_norm": True, "rope_theta": 500.0, "norm_eps": 1e-3},
    "gelu": {"activation": "gelu"},
    "bias": {"bias": True},
    "gelu, bias, tied": {"activation": "gelu", "bias": True, "tie_embeddings": True},
    "narrow heads": {"head_dim": 6},
    "wide heads, qk_norm": {"head_dim": 12, "qk_norm": True, "bias": True},
    "relative": {"positions": "relative"},
    "relative, all key heads": {"positions": "relative", "num_kv_heads": 4, "head_dim": 10},
    "relative, bias, gelu, qk_norm": {"positions": "relative", "bias": True, "activation": "gelu", "qk_norm": True},
    "layernorm": {"norm": "layernorm"},
    "post-norm": {"norm_position": "post"},
    "GPT-2": {
        **{"norm": "layernorm", "positions": "learned", "max_positions": 17, "activation": "gelu_tanh"},
        **{"bias": True, "tie_embeddings": True, "num_kv_heads": 4},
    },
    "BERT": {
        **{"norm": "layernorm", "norm_position": "post", "positions": "learned", "max_positions": 17},
        **{"num_token_types": 2, "head_transform": True, "activation": "gelu", "bias": True, "tie_embeddings": True},
        **{"num_kv_heads": 4, "norm_eps": 1e-12},
    },
    "linear": {"rope_scaling": "linear", "rope_factor": 4.0},
    "llama3": {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original": 32},
    "relu2, bounded logits": {"activation": "relu2", "logit_softcap": 2.0},
    "value embeddings, mixing": {"num_layers": 4, "value_embeddings": 3, "residual_mixing": True, "bias": True},
}
WINDOWS: dict[str, dict[str, Any]] = {
    "windows": {"num_layers": 4, "window_pattern": "SSL", "window": 3},
    "modern": {
        **{"num_layers": 3, "window_pattern": "S", "window": 4, "qk_norm": True, "activation": "relu2"},
        **{"value_embeddings": 2, "residual_mixing": True, "logit_softcap": 5.0, "tie_embeddings": True},
    },
}
"""Options of causal models only."""
DOCUMENTS = torch.tensor([[0] * 4 + [1] * 7, [0] * 11, [0] + [1] * 9 + [2]], dtype=torch.int32)


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Use one thread: it is faster for tensors this small, above all when other processes use the cores."""
    number = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(number)


def shape_of(name: str) -> ModelShape:
    return TINY.model_copy(update=(OPTIONS | WINDOWS)[name])


@pytest.mark.parametrize(
    ("name", "causal"), [*((name, True) for name in OPTIONS | WINDOWS), *((name, False) for name in OPTIONS)]
)
def test_logits_and_gradients_equal_the_oracle(name: str, causal: bool) -> None:
    shape, ids = shape_of(name), some_ids()
    model = small_model(shape, causal=causal)
    weights = dict(model.named_parameters())
    for documents in (None, DOCUMENTS):
        actual, expected = model(ids, documents), oracle_logits(shape, weights, ids, causal, documents)
        assert actual.shape == (3, 11, shape.vocab_size)
        assert actual.dtype == torch.float32
        torch.testing.assert_close(actual.double(), expected, rtol=0, atol=4e-6)
        weighting = torch.randn(actual.shape, generator=torch.Generator().manual_seed(2))
        gradients = torch.autograd.grad((actual * weighting).sum(), list(weights.values()))
        references = torch.autograd.grad((expected * weighting).sum(), list(weights.values()))
        for parameter, gradient, reference in zip(weights, gradients, references):
            assert (gradient - reference).norm() <= 1e-5 * reference.norm() + 2e-6, parameter


def test_number_of_parameters_is_the_plans() -> None:
    choices = {
        "activation": ("swiglu", "relu2"),
        "value_embeddings": (0, 1, 2),
        "residual_mixing": (False, True),
        "bias": (False, True),
        "positions": ("rope", "relative", "learned"),
        "max_positions": (0,),
        "num_token_types": (0, 2),
        "norm": ("rmsnorm", "layernorm"),
        "norm_position": ("pre", "post"),
        "head_transform": (False, True),
        "qk_norm": (False, True),
        "tie_embeddings": (False, True),
        "num_kv_heads": (1, 4),
        "head_dim": (6, 8),
    }
    every = [*itertools.product(*choices.values())]
    sample = random.Random(0).sample(every, len(every) // 12)
    for first, second in itertools.combinations(range(len(choices)), 2):
        assert {(own[first], own[second]) for own in sample} == {(own[first], own[second]) for own in every}
    for values in sample:
        shape = TINY.model_copy(update=dict(zip(choices, values)))
        sizes = {name: tuple(parameter.shape) for name, parameter in build_model(shape).named_parameters()}
        assert sum(map(math.prod, sizes.values())) == num_parameters(shape)
        assert list(parameter_sizes(shape).items()) == list(sizes.items())


def losses_of(model: Transformer, ids: Tensor, targets: Tensor, steps: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.loss.scale = 1 / max(1, int((targets != IGNORED).sum()))
    losses = []
    for _ in range(steps):
        loss = model(ids, None, targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def initial_model(shape: ModelShape, causal: bool = True) -> Transformer:
    """Return a model as at the start of a run, with every gain and bias at its initial value."""
    model = build_model(shape, causal=causal).to_empty(device="cpu")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(initial_weight(name, parameter.shape, shape, 0))
    return model


@pytest.mark.parametrize("name", OPTIONS | WINDOWS)
def test_every_option_learns(name: str) -> None:
    ids = some_ids(8, 17)
    losses = losses_of(initial_model(shape_of(name)), ids[:, :-1], ids[:, 1:], 20)
    assert losses[0] == pytest.approx(math.log(97), abs=0.5)
    assert losses[-1] < 0.5 * losses[0]


def hidden_rows(step: int) -> tuple[Tensor, Tensor]:
    """Return rows of 8 ids with a masked token, id 96, whose target is the token after it."""
    ids = torch.randint(0, 8, (64, 6), generator=torch.Generator().manual_seed(step))
    targets = torch.full_like(ids, IGNORED)
    targets[:, 2] = ids[:, 3]
    ids[:, 2] = 96
    return ids, targets


@pytest.mark.parametrize("name", ["grouped", "relative"])
def test_a_masked_token_is_learned_from_both_sides(name: str) -> None:
    last = {}
    for causal in (True, False):
        model = initial_model(shape_of(name), causal)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        model.loss.scale = 1 / 64
        for step in range(60):
            ids, targets = hidden_rows(step)
            loss = model(ids, None, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        last[causal] = loss.item()
    # One of 8 tokens: the tokens before it contain no information about it.
    assert last[True] == pytest.approx(math.log(8), abs=0.3)
    assert last[False] < 0.5


def test_a_token_changes_only_what_comes_after_it() -> None:
    for name in ("grouped", "relative"):
        model, ids = small_model(shape_of(name)), some_ids()
        before = model(ids)
        ids[:, 6] = (ids[:, 6] + 1) % TINY.vocab_size
        after = model(ids)
        assert torch.equal(before[:, :6], after[:, :6])
        assert not torch.isclose(before[:, 6:], after[:, 6:]).all(-1).any()


def test_a_token_changes_everything_without_a_causal_mask() -> None:
    for name in ("grouped", "relative"):
        model, ids = small_model(shape_of(name), causal=False), some_ids()
        before = model(ids)
        ids[:, 6] = (ids[:, 6] + 1) % TINY.vocab_size
        assert not torch.isclose(before, model(ids)).all(-1).any()


# ------------------------------------------------------------------------------------------------- layers of a pipeline


@pytest.mark.parametrize("name", ["grouped", "one key head, tied", "relative"])
def test_spans_in_sequence_equal_the_whole_model(name: str) -> None:
    shape = shape_of(name).model_copy(update={"num_layers": 3})
    whole, ids = small_model(shape), some_ids()
    weights = dict(whole.named_parameters())
    x, names = ids, []
    for first, stop in ((0, 1), (1, 2), (2, 3)):
        part = build_model(shape, LayerSpan(first, stop, 3)).to_empty(device="cpu")
        own = {
            # The last stage has a copy of a tied matrix.
            key: weights["embedding.weight" if shape.tie_embeddings and key == "head.weight" else key].detach()
            for key, _ in part.named_parameters()
        }
        part.load_state_dict(own)
        assert (part.embedding is not None, part.head is not None) == (first == 0, stop == 3)
        names += [key for key in own if key in weights]
        x = part(x, DOCUMENTS)
    assert sorted(names) == sorted(weights)
    assert torch.equal(x, whole(ids, DOCUMENTS))


def test_a_span_returns_the_stream() -> None:
    part = build_model(TINY, LayerSpan(0, 1, 2)).to_empty(device="cpu")
    assert part(some_ids()).shape == (3, 11, 32)


# --------------------------------------------------------------------------------------------------- loss and recompute


@pytest.mark.parametrize("name", ["grouped", "one key head, tied"])
def test_the_loss_is_that_of_the_logits(name: str) -> None:
    model, ids = small_model(shape_of(name)), some_ids()
    targets = some_ids(seed=5)
    targets[0, :4] = IGNORED
    model.loss.scale, model.loss.tally = 0.5, LossTally.empty(3, torch.device("cpu"))
    logits = model(ids, DOCUMENTS)
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none")
    actual = model(ids, DOCUMENTS, targets, torch.tensor([0, 2, 2]))
    assert actual.shape == ()
    assert actual.item() == pytest.approx(0.5 * losses.sum().item(), rel=1e-6)
    by_row = losses.view(3, 11).sum(1)
    assert model.loss.tally.losses_S.tolist() == pytest.approx([by_row[0].item(), 0, (by_row[1] + by_row[2]).item()])
    parameters = list(model.parameters())
    references = torch.autograd.grad(0.5 * losses.sum(), parameters)
    for gradient, reference in zip(torch.autograd.grad(actual, parameters), references):
        torch.testing.assert_close(gradient, reference, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["grouped", "relative", "bias"])
def test_recomputation_changes_no_bit(name: str) -> None:
    gradients = []
    for recompute in ("none", "full", "selective"):
        model, ids = small_model(shape_of(name), recompute=recompute), some_ids()
        model(ids[:, :-1], DOCUMENTS[:, :-1], ids[:, 1:]).backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys() == gradients[2].keys()
    for other in gradients[1:]:
        assert all(torch.equal(gradients[0][name], other[name]) for name in other)


def test_layers_may_be_recomputed_one_by_one() -> None:
    model = build_model(TINY, recompute=lambda layer: ("none", "full")[layer])
    assert [block.recompute for block in model.blocks.values()] == ["none", "full"]


# ------------------------------------------------------------------------------------------------------ initial weights


def test_initial_weights_are_a_function_of_seed_and_name() -> None:
    size = torch.Size((400, 300))
    base = initial_weight("blocks.0.ffn.up.weight", size, TINY, 7)
    assert torch.equal(base, initial_weight("blocks.0.ffn.up.weight", size, TINY, 7))
    assert not torch.equal(base, initial_weight("blocks.0.ffn.up.weight", size, TINY, 8))
    assert not torch.equal(base, initial_weight("blocks.1.ffn.up.weight", size, TINY, 7))
    # sqrt(2 / (5 * 32)) = 0.1118; 120,000 samples give the deviation to 0.2 %.
    assert base.std().item() == pytest.approx(math.sqrt(2 / 160), rel=0.01)
    assert abs(base.mean().item()) < 0.002
    assert initial_weight("blocks.0.attention.relative.distance.weight", size, TINY, 7).std().item() == pytest.approx(
        math.sqrt(2 / 160), rel=0.01
    )


@pytest.mark.parametrize("name", ["blocks.1.ffn.down.weight", "blocks.0.attention.out.weight"])
def test_deeper_models_add_less_per_layer(name: str) -> None:
    size = torch.Size((400, 300))
    for layers in (2, 8):
        shape = TINY.model_copy(update={"num_layers": layers})
        expected = math.sqrt(2 / 160 / (2 * layers))
        assert initial_weight(name, size, shape, 7).std().item() == pytest.approx(expected, rel=0.01)


def test_gains_are_one_and_biases_zero() -> None:
    shape = TINY.model_copy(update={"positions": "relative", "bias": True, "qk_norm": True})
    for name, parameter in build_model(shape).named_parameters():
        if parameter.ndim == 1:
            expected = torch.ones if "norm" in name else torch.zeros
            assert torch.equal(initial_weight(name, parameter.shape, shape, 3), expected(parameter.shape)), name


def test_a_copy_of_a_tied_matrix_has_the_same_initial_values() -> None:
    size = torch.Size((97, 32))
    tied = TINY.model_copy(update={"tie_embeddings": True})
    both = [initial_weight(name, size, tied, 3) for name in ("embedding.weight", "head.weight")]
    assert torch.equal(*both)
    assert not torch.equal(*(initial_weight(name, size, TINY, 3) for name in ("embedding.weight", "head.weight")))


def test_the_residual_stream_grows_by_a_layers_share_at_any_depth() -> None:
    """The sum of all layers' outputs is as large in deep models as in shallow models."""
    added = []
    for layers in (2, 16):
        shape = TINY.model_copy(update={"num_layers": layers, "d_model": 64, "d_ffw": 256})
        model = build_model(shape, LayerSpan(0, layers, layers + 1)).to_empty(device="cpu")
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(initial_weight(name, parameter.shape, shape, 0))
            ids = some_ids(8, 32)
            added.append((model(ids) - model.embedding(ids)).std().item())
    assert added[1] == pytest.approx(added[0], rel=0.35)
