"""Manifolds: one table of them runs through the properties that optimizers and layers rely on."""

import copy
import itertools
import pickle

import geoopt
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polyhead import Euclidean, Manifold, Stiefel, optim

# heads, and the shape of a point; prime sizes, so that swapped axes cannot pass
LAYOUTS = {
    "plain": (None, (11, 3)),
    "batch": (None, (2, 3, 11, 3)),
    "square": (None, (7, 7)),
    "vectors": (None, (5, 13, 1)),
    "numbers": (None, (2, 1, 1)),
    "heads": (5, (15, 11)),
    "batch-of-heads": (2, (3, 14, 13)),
    "square-heads": (3, (15, 5)),
    "none": (None, (0, 11, 3)),
    "none-of-heads": (2, (0, 6, 5)),
}
RETRACTIONS, METRICS = ("polar", "cayley"), ("euclidean", "canonical")
CASES = [
    pytest.param(Stiefel(metric, retraction, heads), shape, id=f"{metric}-{retraction}-{name}")
    for metric, retraction, (name, (heads, shape)) in itertools.product(METRICS, RETRACTIONS, LAYOUTS.items())
] + [pytest.param(Euclidean(), shape, id=f"flat-{len(shape)}d") for shape in ((), (5,), (3, 7), (0, 2))]
table = pytest.mark.parametrize(("on", "shape"), CASES)
stiefel = pytest.mark.parametrize(("on", "shape"), [case for case in CASES if isinstance(case.values[0], Stiefel)])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
WITHIN = {torch.float32: 1e-6, torch.float64: 1e-13}


def matrices(on, x):
    """x with n and k as its last axes, by hand."""
    return x if on.heads is None else torch.stack([rows.mT for rows in x.chunk(on.heads, -2)], -3)


def off(on, x):
    """How far the columns are from orthonormal."""
    y = matrices(on, x).double()
    errors = (torch.einsum("...nk,...nl->...kl", y, y) - torch.eye(y.shape[-1], dtype=y.dtype)).abs()
    return errors.max().item() if errors.numel() else 0.0


def product(on, a, b):
    """The Euclidean inner products that correspond to those of the manifold."""
    return (matrices(on, a) * matrices(on, b)).sum((-2, -1)) if isinstance(on, Stiefel) else a * b


def point(on, shape, dtype=torch.float64):
    return on.random(*shape, dtype=dtype)


def vector(on, x):
    return on.tangent(x, torch.randn_like(x))


@table
@dtypes
def test_a_step_of_length_zero_stays(on, shape, dtype):
    x = point(on, shape, dtype)
    torch.testing.assert_close(on.retract(x, torch.zeros_like(x)), x, atol=WITHIN[dtype], rtol=0)


@table
def test_a_step_is_the_vector_to_first_order(on, shape):
    x, h = point(on, shape), 1e-5
    u = vector(on, x)
    slope = (on.retract(x, h * u) - on.retract(x, -h * u)) / (2 * h)
    torch.testing.assert_close(slope, u, atol=1e-8, rtol=1e-8)


def test_the_retraction_of_geoopts_canonical_metric_is_not_first_order():
    on, h = Stiefel("canonical"), 1e-5
    x = point(on, (11, 3))
    u, other = vector(on, x), geoopt.CanonicalStiefel()
    slope = (other.retr(x, h * u) - other.retr(x, -h * u)) / (2 * h)
    torch.testing.assert_close(slope, u + x @ x.mT @ u, atol=1e-8, rtol=0)
    assert (slope - u).norm() > 0.1 * u.norm()


@stiefel
@dtypes
def test_a_step_of_any_length_ends_on_the_manifold(on, shape, dtype):
    x = point(on, shape, dtype)
    for length in (1e-6, 1e-3, 0.1, 0.3, 1, 3, 10, 31, 100):
        y = on.retract(x, length * vector(on, x))
        assert y.shape == x.shape
        assert y.dtype == dtype
        assert off(on, y) <= WITHIN[dtype], length
        assert on.check(y) == (True, None), length


@pytest.mark.parametrize("retraction", RETRACTIONS)
@pytest.mark.parametrize("size", [(11, 3), (13, 7), (7, 7)], ids=str)
@dtypes
def test_steps_of_very_different_lengths_share_a_batch(retraction, size, dtype):
    on = Stiefel(retraction=retraction)
    x = point(on, (50, *size), dtype)
    lengths = torch.logspace(-8, 4, 50, dtype=dtype)[:, None, None]
    u = vector(on, x) * lengths
    y = on.retract(x, u)
    assert off(on, y) <= WITHIN[dtype]
    alone = torch.stack([on.retract(*pair) for pair in zip(x, u, strict=True)])
    # a longer step turns more by the rounding of its length
    assert ((y - alone).abs() <= 100 * WITHIN[dtype] * lengths.clamp(min=1)).all()


@stiefel
@pytest.mark.parametrize(("dtype", "within"), [(torch.bfloat16, 2e-2), (torch.float16, 3e-3)], ids=["bf16", "fp16"])
def test_16_bit_points_stay_within_their_rounding(on, shape, dtype, within):
    x = point(on, shape, dtype)
    assert x.dtype == dtype
    assert on.check(x) == (True, None)
    for _ in range(20):
        u = 0.1 * vector(on, x)
        wanted = on.retract(x.float(), u.float())
        x = on.retract(x, u)
        assert (x.dtype, u.dtype) == (dtype, dtype)
        torch.testing.assert_close(x.float(), wanted, atol=within, rtol=0)
        assert on.check(x) == (True, None)
        assert off(on, x) <= within


@stiefel
def test_strided_points_give_the_same_results(on, shape):
    x = point(on, shape)
    u, g = vector(on, x), torch.randn_like(x)
    turned = [t.mT.contiguous().mT for t in (x, u, g)]
    spread = [torch.stack((t, t), -1)[..., 0] for t in (x, u, g)]
    for y, v, h in (turned, spread):
        torch.testing.assert_close(on.retract(y, v), on.retract(x, u), atol=1e-13, rtol=0)
        torch.testing.assert_close(on.tangent(y, h), on.tangent(x, g), atol=1e-13, rtol=0)
        torch.testing.assert_close(on.gradient(y, h), on.gradient(x, g), atol=1e-13, rtol=0)
        torch.testing.assert_close(on.inner(y, v, v), on.inner(x, u, u), atol=1e-13, rtol=1e-13)
        torch.testing.assert_close(on.project(h), on.project(g), atol=1e-10, rtol=0)


@table
def test_arguments_are_not_changed(on, shape):
    x = point(on, shape)
    u, g = vector(on, x), torch.randn_like(x)
    given = [t.clone() for t in (x, u, g)]
    on.retract(x, u), on.tangent(x, g), on.gradient(x, g), on.inner(x, u, u), on.project(g), on.transport(x, x, u)
    on.check(x)
    assert all(torch.equal(a, b) for a, b in zip((x, u, g), given, strict=True))


class Shapes(TorchDispatchMode):
    """Records the shape of every tensor that is made."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        made = function(*args, **(kwargs or {}))
        leaves = torch.utils._pytree.tree_leaves(made)
        self.seen.update(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor))
        return made


@pytest.mark.parametrize("heads", [None, 2])
@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("retraction", RETRACTIONS)
def test_no_matrix_of_n_times_n_is_made(metric, retraction, heads):
    on = Stiefel(metric, retraction, heads)
    with Shapes() as shapes:
        x = on.random(*((5, 401, 3) if heads is None else (6, 401)))
        u = vector(on, x)
        for length in (1e-3, 1, 100):
            on.transport(x, on.retract(x, length * u), on.gradient(x, u))
        on.inner(x, u, u), on.project(u), on.check(x)
        for make in (optim.SGD, optim.Adam, optim.AdamW):
            weight = torch.nn.Parameter(x.clone())
            weight.grad = u
            make([weight], manifold=on).step()
    assert any(401 in shape for shape in shapes.seen)
    assert not [shape for shape in shapes.seen if shape.count(401) > 1]


@table
def test_tangent_is_a_projection(on, shape):
    x = point(on, shape)
    u = torch.randn_like(x)
    along = on.tangent(x, u)
    torch.testing.assert_close(on.tangent(x, along), along, atol=1e-13, rtol=0)
    # what was taken away is orthogonal to every tangent vector
    rest, other = product(on, u - along, vector(on, x)), product(on, u - along, along)
    torch.testing.assert_close(rest, torch.zeros_like(rest), atol=1e-12, rtol=0)
    torch.testing.assert_close(other, torch.zeros_like(other), atol=1e-12, rtol=0)


@stiefel
def test_tangent_vectors_are_skew_and_none_is_normal(on, shape):
    x = point(on, shape)
    y, u = matrices(on, x), matrices(on, vector(on, x))
    inside = y.mT @ u
    torch.testing.assert_close(inside, -inside.mT, atol=1e-13, rtol=0)
    s = torch.randn(*y.shape[:-2], y.shape[-1], y.shape[-1], dtype=x.dtype)
    normal = y @ (s + s.mT)
    normal = normal if on.heads is None else normal.mT.flatten(-3, -2)
    torch.testing.assert_close(on.tangent(x, normal), torch.zeros_like(x), atol=1e-12, rtol=0)


@table
def test_transport_gives_a_tangent_vector(on, shape):
    x = point(on, shape)
    u = vector(on, x)
    y = on.retract(x, 0.3 * u)
    moved = on.transport(x, y, u)
    torch.testing.assert_close(on.tangent(y, moved), moved, atol=1e-13, rtol=0)
    torch.testing.assert_close(on.transport(x, x, u), u, atol=1e-13, rtol=0)


@table
def test_the_gradient_matches_the_metric(on, shape):
    """Its inner product with a tangent vector is the derivative along the vector."""
    x = point(on, shape)
    g, u = torch.randn_like(x), vector(on, x)
    gradient = on.gradient(x, g)
    torch.testing.assert_close(on.tangent(x, gradient), gradient, atol=1e-13, rtol=0)
    torch.testing.assert_close(on.inner(x, gradient, u), product(on, g, u), atol=1e-12, rtol=1e-12)


@table
def test_inner_products_are_symmetric_linear_and_positive(on, shape):
    x = point(on, shape)
    u, v, w = (vector(on, x) for _ in range(3))
    close = {"atol": 1e-12, "rtol": 1e-12}
    torch.testing.assert_close(on.inner(x, u, v), on.inner(x, v, u), **close)
    torch.testing.assert_close(on.inner(x, u + 2 * w, v), on.inner(x, u, v) + 2 * on.inner(x, w, v), **close)
    assert (on.inner(x, u, u) >= 0).all()
    # on 1 x 1 matrices, ±1, every tangent vector is zero
    if shape[-2:] != (1, 1):
        assert (on.inner(x, u, u) > 0).all()


@table
def test_inner_products_broadcast_with_their_points(on, shape):
    x = point(on, shape)
    u = vector(on, x)
    kept, bare = on.inner(x, u, u, keepdim=True), on.inner(x, u, u)
    assert kept.dim() == x.dim()
    spread = kept.expand(x.shape)
    if isinstance(on, Stiefel):
        spread = matrices(on, spread)
        assert torch.equal(spread, bare[..., None, None].expand(spread.shape))
    else:
        assert torch.equal(spread, bare)


@stiefel
@dtypes
def test_project_finds_the_nearest_point(on, shape, dtype):
    x = torch.randn(shape, dtype=dtype)
    y = on.project(x)
    assert off(on, y) <= 10 * WITHIN[dtype]
    torch.testing.assert_close(on.project(y), y, atol=10 * WITHIN[dtype], rtol=0)
    distance = product(on, x - y, x - y)
    near = (on.retract(y, length * vector(on, y)) for length in (0.01, 0.1, 1))
    for other in itertools.chain(near, (point(on, shape, dtype) for _ in range(20))):
        assert (product(on, x - other, x - other) >= distance - 100 * WITHIN[dtype]).all()


def test_euclidean_operations_are_trivial():
    on, x, u = Euclidean(), torch.randn(5, 3), torch.randn(5, 3)
    assert on.project(x) is x
    assert on.tangent(x, u) is on.gradient(x, u) is on.transport(x, u, u) is u
    assert torch.equal(on.retract(x, u), x + u)
    assert not on.constant_norm
    assert Stiefel().constant_norm


@pytest.mark.parametrize(("heads", "shape"), [(None, (20000, 3, 3)), (None, (20000, 5, 2)), (20000, (40000, 5))])
def test_random_points_have_haars_moments(heads, shape):
    x = matrices(Stiefel(heads=heads), Stiefel(heads=heads).random(*shape, dtype=torch.float64))
    n, k = x.shape[-2:]
    # five standard deviations of a mean over 20000
    within = 5 / 20000**0.5
    assert x.mean(0).abs().max() < within / n**0.5
    flat = x.flatten(1)
    moments = flat.T @ flat / 20000
    torch.testing.assert_close(moments, torch.eye(n * k, dtype=torch.float64) / n, atol=within / n**0.5, rtol=0)
    if n == k:
        assert torch.linalg.det(x).mean().abs() < within


def test_random_points_need_more_than_qr():
    """Householder's reflections leave a sign behind, which this statistic sees."""
    for n in (2, 3):
        raw = torch.linalg.qr(torch.randn(5000, n, n)).Q
        ours = Stiefel().random(5000, n, n)
        first, last = raw[:, 0, 0].mean().abs(), raw[:, -1, -1].mean().abs()
        assert min(first, last) > 0.3
        assert ours.mean(0).abs().max() < 0.05


@pytest.mark.parametrize("place", [(0, 0), (-1, -1), (1, 0)])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_every_entry_of_a_random_basis_of_space_is_uniform(place, k):
    """Archimedes: a coordinate of a point on the sphere is uniform. Kolmogorov's distance at 1 in 1000."""
    x = Stiefel().random(8000, 3, k, dtype=torch.float64)[:, place[0], place[1]].sort().values
    assert ((x + 1) / 2 - torch.linspace(0, 1, 8000, dtype=torch.float64)).abs().max() < 1.95 / 8000**0.5


@table
def test_a_generator_is_reproducible_and_leaves_the_global_one_alone(on, shape):
    state = torch.get_rng_state()
    first, second = (on.random(*shape, generator=torch.Generator().manual_seed(3)) for _ in range(2))
    assert torch.equal(first, second)
    assert first.dtype == torch.get_default_dtype()
    assert torch.equal(torch.get_rng_state(), state)
    assert on.random(*shape, device="meta").shape == shape


OFF = [
    (Stiefel(), torch.eye(3)[:2], r"got 3 in 2 dimensions, shape \(2, 3\);.*Stiefel\(heads=1\)"),
    (Stiefel(heads=2), torch.zeros(6, 2), r"as many orthonormal vectors as dimensions, got 3 in 2 dimensions, shape \(6, 2\)$"),
    (Stiefel(heads=5), torch.zeros(6, 7), r"x must have a multiple of 5 rows, one block per head, got shape \(6, 7\)"),
    (Stiefel(), torch.ones(3), r"x must have two axes or more, got shape \(3,\)"),
    (Stiefel(), torch.tensor(1.0), r"x must have two axes or more, got shape \(\)"),
    (Stiefel(), torch.full((5, 2), torch.nan), "it must be finite, got NaN or inf"),
    (Stiefel(), torch.eye(5, 2).fill_diagonal_(torch.inf), "it must be finite, got NaN or inf"),
    (Stiefel(), torch.eye(5, 2).long(), "x must be real and floating-point, got torch.int64"),
    (Stiefel(), torch.eye(5, 2).to(torch.complex64), "x must be real and floating-point, got torch.complex64"),
    (Stiefel(), 2 * torch.eye(5, 2), r"off the identity by 3,.*; Stiefel\(\)\.project\(x\) is the nearest point"),
    (Stiefel(), torch.stack((torch.eye(5, 2), torch.ones(5, 2))), "columns of matrix 1 of 2 .* off the identity by 5,"),
    (Stiefel("canonical", heads=2), torch.zeros(4, 5), r"Stiefel\(metric='canonical', heads=2\)\.project\(x\)"),
    (Euclidean(), torch.tensor([0.0, torch.inf]), "it must be finite, got NaN or inf"),
]  # fmt: skip


@pytest.mark.parametrize(("on", "x", "words"), OFF)
def test_check_says_why_a_tensor_is_off_the_manifold(on, x, words):
    ok, reason = on.check(x)
    assert ok is False
    with pytest.raises(ValueError, match=words):
        raise ValueError(reason)


@table
@dtypes
def test_check_detects_a_thousandth_and_ignores_rounding(on, shape, dtype):
    x = point(on, shape, dtype)
    assert on.check(x) == (True, None)
    assert on.check(x * 1.001)[0] is (not x.numel() or isinstance(on, Euclidean))


BAD = [
    ({"metric": "flat"}, "metric must be 'euclidean' or 'canonical', got 'flat'"),
    ({"retraction": "qr"}, "retraction must be 'polar' or 'cayley', got 'qr'"),
    ({"heads": 0}, r"heads must be an integer in \[1, 1048576\], got 0"),
    ({"heads": 2.0}, r"heads must be an integer in \[1, 1048576\], got 2\.0"),
    ({"heads": True}, r"heads must be an integer in \[1, 1048576\], got True"),
]


@pytest.mark.parametrize(("options", "words"), BAD)
def test_invalid_options_are_refused(options, words):
    with pytest.raises(ValueError, match=words):
        Stiefel(**options)


def test_manifolds_are_values():
    on = Stiefel("canonical", "cayley", 3)
    for other in (copy.deepcopy(on), pickle.loads(pickle.dumps(on)), eval(repr(on))):
        assert other == on
        assert hash(other) == hash(on)
        assert isinstance(other, Manifold)
    assert repr(Stiefel()) == "Stiefel()"
    assert repr(on) == "Stiefel(metric='canonical', retraction='cayley', heads=3)"
    assert len({Stiefel(), Stiefel("euclidean"), Stiefel(heads=1), Euclidean(), Euclidean()}) == 3
