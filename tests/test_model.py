"""The model against a NumPy forward pass written from the papers, and the properties that must hold exactly."""

import math

import numpy as np
import pytest
import torch

from train.model import IGNORED, Transformer, build_model, initial_weight, rotate, rotation_table, token_losses
from train.parallel import set_initial_weights
from train.shape import ModelShape, num_parameters

TINY = ModelShape(vocab_size=97, num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, d_ffw=48, tie_embeddings=False)
SHAPES = [
    TINY,
    TINY.model_copy(update={"tie_embeddings": True, "num_kv_heads": 1}),
    TINY.model_copy(update={"qk_norm": True, "num_kv_heads": 4, "rope_theta": 500.0, "norm_eps": 1e-3}),
]


def make(shape: ModelShape, seed: int = 0, recompute: bool = False) -> Transformer:
    model = build_model(shape, recompute).to_empty(device="cpu")
    set_initial_weights(model, seed)
    # Gains of 1 would hide a norm that is left out.
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5, generator=generator)
    return model


def some_ids(rows: int = 3, length: int = 11) -> torch.Tensor:
    return torch.randint(0, TINY.vocab_size, (rows, length), generator=torch.Generator().manual_seed(1))


def numpy_logits(model: Transformer, ids: np.ndarray) -> np.ndarray:
    """The same model in float64, one head and one position at a time where that is plainest."""
    shape, weight = model.shape, {name: value.detach().double().numpy() for name, value in model.named_parameters()}

    def norm(x: np.ndarray, gain: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + shape.norm_eps) * gain

    def turn(x: np.ndarray) -> np.ndarray:
        half = shape.head_dim // 2
        out = np.empty_like(x)
        for position in range(len(x)):
            for pair in range(half):
                angle = position * shape.rope_theta ** (-2 * pair / shape.head_dim)
                z = (x[position, pair] + 1j * x[position, half + pair]) * np.exp(1j * angle)
                out[position, pair], out[position, half + pair] = z.real, z.imag
        return out

    def attention(x: np.ndarray, at: str) -> np.ndarray:
        heads = []
        for head in range(shape.num_heads):
            group = head * shape.num_kv_heads // shape.num_heads
            rows, columns = slice(head * shape.head_dim, (head + 1) * shape.head_dim), group * shape.head_dim
            columns = slice(columns, columns + shape.head_dim)
            q, k = x @ weight[f"{at}.query.weight"][rows].T, x @ weight[f"{at}.key.weight"][columns].T
            if shape.qk_norm:
                q, k = norm(q, weight[f"{at}.query_norm.weight"]), norm(k, weight[f"{at}.key_norm.weight"])
            scores = turn(q) @ turn(k).T / math.sqrt(shape.head_dim)
            scores[np.triu_indices(len(x), 1)] = -np.inf
            scores = np.exp(scores - scores.max(-1, keepdims=True))
            heads.append(scores / scores.sum(-1, keepdims=True) @ (x @ weight[f"{at}.value.weight"][columns].T))
        return np.concatenate(heads, -1) @ weight[f"{at}.out.weight"].T

    out = []
    for row in ids:
        x = weight["embedding.weight"][row]
        for layer in range(shape.num_layers):
            at = f"blocks.{layer}"
            x = x + attention(norm(x, weight[f"{at}.attention_norm.weight"]), f"{at}.attention")
            y = norm(x, weight[f"{at}.ffn_norm.weight"])
            gate = y @ weight[f"{at}.ffn.gate.weight"].T
            up = y @ weight[f"{at}.ffn.up.weight"].T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ weight[f"{at}.ffn.down.weight"].T
        head = weight["embedding.weight"] if shape.tie_embeddings else weight["head.weight"]
        out.append(norm(x, weight["norm.weight"]) @ head.T)
    return np.stack(out)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_a_forward_pass_in_numpy(shape: ModelShape) -> None:
    model, ids = make(shape), some_ids()
    found = model(ids).detach()
    assert found.shape == (3, 11, shape.vocab_size)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.double().numpy(), numpy_logits(model, ids.numpy()), rtol=0, atol=2e-6)


@pytest.mark.parametrize("shape", SHAPES)
def test_number_of_parameters_is_the_plans(shape: ModelShape) -> None:
    assert sum(parameter.numel() for parameter in build_model(shape).parameters()) == num_parameters(shape)


def test_a_token_changes_only_what_comes_after_it() -> None:
    model, ids = make(TINY), some_ids()
    before = model(ids)
    ids[:, 6] = (ids[:, 6] + 1) % TINY.vocab_size
    after = model(ids)
    assert torch.equal(before[:, :6], after[:, :6])
    assert not torch.isclose(before[:, 6:], after[:, 6:]).all(-1).any()


def test_rotation_depends_on_the_distance_alone() -> None:
    cos, sin = rotation_table(9, TINY, torch.device("cpu"))
    assert cos.shape == sin.shape == (9, 1, 4)
    # theta = 10000, head width 8: the second frequency is 10000^(-2/8) = 0.1.
    assert [cos[3, 0, 0].item(), sin[3, 0, 1].item()] == pytest.approx([math.cos(3), math.sin(0.3)], rel=1e-6)
    q, k = torch.randn(2, 8, generator=torch.Generator().manual_seed(3))
    table = rotation_table(9, TINY, torch.device("cpu"))
    everywhere = [rotate(x.expand(1, 9, 1, 8), table)[0, :, 0] for x in (q, k)]
    products = everywhere[0] @ everywhere[1].T
    for distance in range(-8, 9):
        assert torch.diagonal(products, distance).std(unbiased=False) < 1e-5
    assert products[0].std() > 0.1


def test_initial_weights_are_a_function_of_seed_and_name() -> None:
    size = torch.Size((400, 300))
    base = initial_weight("blocks.0.ffn.up.weight", size, TINY, 7)
    assert torch.equal(base, initial_weight("blocks.0.ffn.up.weight", size, TINY, 7))
    assert not torch.equal(base, initial_weight("blocks.0.ffn.up.weight", size, TINY, 8))
    assert not torch.equal(base, initial_weight("blocks.1.ffn.up.weight", size, TINY, 7))
    # sqrt(2 / (5 * 32)) = 0.1118; 120,000 samples give the deviation to 0.2 %.
    assert base.std().item() == pytest.approx(math.sqrt(2 / 160), rel=0.01)
    assert abs(base.mean().item()) < 0.002
    for name in ("blocks.1.ffn.down.weight", "blocks.0.attention.out.weight"):
        assert initial_weight(name, size, TINY, 7).std().item() == pytest.approx(math.sqrt(2 / 160 / 4), rel=0.01)
    assert torch.equal(initial_weight("norm.weight", torch.Size((32,)), TINY, 7), torch.ones(32))


def test_the_first_loss_is_near_a_uniform_guess() -> None:
    model = build_model(TINY).to_empty(device="cpu")
    set_initial_weights(model, 0)
    ids = some_ids(16, 33)
    loss = token_losses(model(ids[:, :-1]), ids[:, 1:]).mean().item()
    assert math.log(97) < loss < math.log(97) + 0.5


def test_recomputation_changes_no_bit() -> None:
    gradients = []
    for recompute in (False, True):
        model, ids = make(TINY, recompute=recompute), some_ids()
        token_losses(model(ids[:, :-1]), ids[:, 1:]).sum().backward()
        gradients.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert gradients[0].keys() == gradients[1].keys()
    assert all(torch.equal(gradients[0][name], gradients[1][name]) for name in gradients[0])


def test_token_losses() -> None:
    logits = torch.tensor([[[0.0, 0.0, 0.0, 0.0], [math.log(2), 0.0, 0.0, 0.0], [9.0, 0.0, 0.0, 0.0]]])
    losses = token_losses(logits, torch.tensor([[2, 0, IGNORED]]))
    assert losses.tolist() == pytest.approx([math.log(4), math.log(5 / 2), 0.0])
