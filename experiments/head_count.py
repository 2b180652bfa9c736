"""How many heads does a 3 x 3 convolution need, and how wide must they be? The error of the best h-head attention.

    python experiments/head_count.py

A layer of h heads whose weights do not depend on content is y_p = Σ_h W_h Σ_δ a_h(δ) x_(p+δ): it has the kernel Σ_h a_h ⊗ W_h. A
kernel K of 9 offsets, as a matrix of 9 rows with c_out · c_in numbers each, has to be the product A V: a column of A is a head's
weights, nine nonnegative numbers that sum to 1, and a row of V its W_h = W_O W_V.

How many heads. The error is at least the singular values of K beyond the first h (Eckart and Young 1936). This bound is reached
if and only if the span of the first h left singular vectors contains a vector u that is positive wherever they are not all zero:
then a basis b_i of it gives heads b_i + t u, for t large enough; and conversely the sum of heads that span it is such a vector. If
not, one more head is always enough, since the space with the vector of ones has one. (This is semi-nonnegative matrix
factorisation, Gillis and Kumar 2015.) So a kernel of rank r needs r or r + 1 heads. The share of random kernels for which
nonnegative weights cost nothing is the probability that 9 random points in h dimensions lie on one side of a plane,
Σ_(k<h) C(8, k) / 2⁸ (Wendel 1962).

How wide. With heads of head_dim features, W_h has at most that rank. One head per tap then loses the remaining singular values of
the taps; heads that mix taps lose less. Results are the best of several starts of Adam; errors are |K − A V| / |K|.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from common import add_shared, natural, progress, shown
from head_count_report import TAPS, picture, report
from torch import Tensor

from polyhead import MultiHeadAttention

OFFSETS = tuple(product((-1, 0, 1), repeat=2))
# singular values of A below this fraction are not used, since they would need large values
_SMALL = 1e-8


def kernels(channels: int, seed: int) -> dict[str, Tensor]:
    """Kernels by name, (taps, out, in)."""
    draw = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(*shape, dtype=torch.float64, generator=draw)
    # patterns over the nine offsets, each with its own matrix
    built = lambda patterns: torch.einsum("rk,roi->koi", patterns, normal(len(patterns), channels, channels))
    row = torch.tensor([1.0, 2.0, 1.0], dtype=torch.float64)
    slope = torch.tensor([-1.0, 0.0, 1.0], dtype=torch.float64)
    blur, across, down = (torch.outer(a, b).flatten() for a, b in ((row, row), (row, slope), (slope, row)))
    centre = F.one_hot(torch.tensor(TAPS // 2), TAPS).double()
    # separate channels, with the two Sobel filters in turn
    edges = torch.einsum("ck,co->koc", torch.stack((across, down)).repeat(channels, 1)[:channels], torch.eye(channels, dtype=torch.float64))  # fmt: skip
    own = torch.einsum("ck,co->koc", normal(channels, TAPS), torch.eye(channels, dtype=torch.float64))
    return {
        "dense": normal(TAPS, channels, channels),
        "blur": built(blur[None]),
        "blur and centre": built(torch.stack((blur, centre))),
        "three patterns": built(normal(3, TAPS)),
        "a slope": built(across[None]),
        "depthwise slopes": edges,
        "depthwise": own,
    }


def leftover(kernel: Tensor, heads: int) -> float:
    """The relative error of the best matrix of that rank: a lower bound for any such attention."""
    sizes = torch.linalg.svdvals(kernel.flatten(1))
    return float(sizes[heads:].norm() / sizes.norm())


def rank(kernel: Tensor) -> int:
    return int(torch.linalg.matrix_rank(kernel.flatten(1)))


def positive(vectors: Tensor) -> Tensor | None:
    """A vector in the span of these columns that is positive wherever they are not all zero, or None.

    There is no such vector if and only if some mean of the rows with nonnegative weights is zero (Gordan 1873); otherwise the
    products of the rows with the mean nearest to zero are positive. That mean uses independent rows, so trying all sets of rows
    finds it.
    """
    there = vectors.norm(dim=-1) > 1e-9
    rows = vectors[there]
    number = len(rows)
    sets = torch.tensor(list(product((0.0, 1.0), repeat=number))[1:], dtype=rows.dtype)
    sets = sets[sets.sum(-1) <= vectors.shape[1] + 1]
    # weights y of a set: the smallest mean, with sum one
    wide = torch.cat((rows, torch.ones(number, 1, dtype=rows.dtype)), 1).T
    target = F.one_hot(torch.tensor(wide.shape[0] - 1), wide.shape[0]).to(rows.dtype)
    y = torch.linalg.pinv(wide * sets[:, None, :], rtol=1e-10) @ target
    y = y[(y > -1e-9).all(-1)]
    missed = (y @ wide.T - target).norm(dim=-1)
    if missed.min() < 1e-7:
        return None
    return vectors @ (y[missed.argmin()] @ rows)


def one_signed(vectors: Tensor) -> bool:
    return positive(vectors) is not None


def first_vectors(kernel: Tensor, heads: int) -> Tensor:
    return torch.linalg.svd(kernel.flatten(1), full_matrices=False).U[:, :heads]


def needed(kernel: Tensor) -> int:
    """The number of heads that the kernel needs."""
    number = rank(kernel)
    return number if one_signed(first_vectors(kernel, number)) else number + 1


def built(kernel: Tensor) -> Tensor:
    """The weights (taps, heads) of the fewest heads that represent the kernel exactly: b_i + t u."""
    basis = first_vectors(kernel, rank(kernel))
    u = positive(basis)
    if u is None:
        u = torch.ones(TAPS, dtype=basis.dtype)
        basis = torch.linalg.qr(torch.cat((basis, u[:, None]), 1)).Q
    # no basis vector may point against u
    basis = basis * torch.where(basis.T @ u < 0, -1.0, 1.0)
    there = u > 0
    t = (-basis[there] / u[there, None]).amax().clamp(min=0)
    heads = (basis + t * u[:, None]).clamp(min=0)
    return heads / heads.sum(0)


def wendel(heads: int) -> float:
    """The share of random kernels for which nonnegative weights cost nothing."""
    return sum(math.comb(TAPS - 1, k) for k in range(heads)) / 2 ** (TAPS - 1)


def fitted(
    every: Sequence[Tensor],
    heads: int,
    *,
    starts: int,
    steps: int,
    seed: int,
    advance: Callable[[], None] | None = None,
) -> list[Tensor]:
    """For each kernel the weights (taps, heads) of the best heads found: softmax by Adam, with the best values for them."""
    draw = torch.Generator().manual_seed(seed)
    flat = torch.stack([kernel.flatten(1) / kernel.norm() for kernel in every])[:, None]
    logits = 3 * torch.randn(len(every), starts, TAPS, heads, dtype=flat.dtype, generator=draw)
    gram = flat @ flat.mT

    def lost() -> Tensor:
        a = logits.softmax(-2)
        kept = torch.linalg.solve(a.mT @ a + 1e-10 * torch.eye(heads, dtype=a.dtype), a.mT @ gram @ a)
        return (1 - kept.diagonal(dim1=-2, dim2=-1).sum(-1)).sum()

    _descend([logits], lost, steps, advance)
    weights = logits.detach().softmax(-2)
    errors = (flat - weights @ (torch.linalg.pinv(weights, rtol=_SMALL) @ flat)).norm(dim=(-2, -1))
    return [weights[place, int(of.argmin())] for place, of in enumerate(errors)]


def error(kernel: Tensor, weights: Tensor) -> float:
    """The relative error of heads with these weights and the best values."""
    return float((kernel - torch.einsum("kh,hoi->koi", weights, values(kernel, weights))).norm() / kernel.norm())


def values(kernel: Tensor, weights: Tensor) -> Tensor:
    """W_h of each head, (heads, out, in), by least squares."""
    return torch.einsum("hk,koi->hoi", torch.linalg.pinv(weights, rtol=_SMALL), kernel)


def layer_of(kernel: Tensor, weights: Tensor) -> MultiHeadAttention:
    """These heads as a layer whose weights do not depend on content."""
    _, out, channels = kernel.shape
    heads = weights.shape[1]
    layer = MultiHeadAttention(channels, heads, head_dim=1, value_dim=channels, d_out=out, bias=False).double()
    assert layer.q_proj is not None
    assert isinstance(layer.v_proj, torch.nn.Linear)
    assert layer.o_proj is not None
    with torch.no_grad():
        layer.q_proj.weight.zero_()
        layer.v_proj.weight.copy_(torch.eye(channels).repeat(heads, 1))
        # (out, heads · in)
        layer.o_proj.weight.copy_(values(kernel, weights).transpose(0, 1).flatten(1))
    return layer


def convolved(kernel: Tensor, image: Tensor) -> Tensor:
    """The convolution of an image (channels, height, width) with periodic borders, (items, out)."""
    # (out, in, 3, 3)
    taps = kernel.movedim(0, -1).unflatten(-1, (3, 3))
    return F.conv2d(F.pad(image[None], (1, 1, 1, 1), mode="circular"), taps)[0].flatten(1).mT


def attended(kernel: Tensor, weights: Tensor, image: Tensor) -> Tensor:
    """The same by the layer of these heads."""
    _, height, width = image.shape
    query = torch.arange(height * width)
    bias = image.new_full((weights.shape[1], height * width, height * width), -torch.inf)
    for (down, across), of_heads in zip(OFFSETS, weights.log(), strict=True):
        key = (query // width + down) % height * width + (query % width + across) % width
        bias[:, query, key] = of_heads[:, None]
    with torch.no_grad():
        output, _ = layer_of(kernel, weights)(image.flatten(1).mT, bias=bias)
    return output


def apart(kernel: Tensor, weights: Tensor, image: Tensor) -> float:
    """The relative difference of the layer from the convolution with its kernel, A V, on an image."""
    expected = convolved(torch.einsum("kh,hoi->koi", weights, values(kernel, weights)), image)
    return float((attended(kernel, weights, image) - expected).norm() / expected.norm())


def narrow(kernel: Tensor, heads: int, head_dim: int, *, starts: int, steps: int, seed: int) -> float:
    """The smallest error found for heads of this width: softmax and W_V by Adam, with the best W_O for them."""
    draw = torch.Generator().manual_seed(seed)
    normal = lambda *shape: torch.randn(starts, *shape, dtype=torch.float64, generator=draw)
    taps, _, channels = kernel.shape
    logits, maps = 3 * normal(taps, heads), normal(heads, head_dim, channels)
    # the first start is one head per tap, the others are random
    logits[0] = 6 * torch.eye(taps, heads)
    maps[0] = torch.linalg.svd(kernel).Vh[:heads, :head_dim]
    # (out, in · taps)
    wanted = (kernel / kernel.norm()).permute(1, 2, 0).flatten(1)

    def seen() -> Tensor:
        return torch.einsum("skh,shdi->shdik", logits.softmax(-2), maps).flatten(1, 2).flatten(-2)

    def lost() -> Tensor:
        given = seen()
        cross = wanted @ given.mT
        inner = given @ given.mT + 1e-9 * torch.eye(heads * head_dim, dtype=given.dtype)
        return (1 - (torch.linalg.solve(inner, cross.mT).mT * cross).sum((-2, -1))).sum()

    _descend([logits, maps], lost, steps)
    with torch.no_grad():
        given = seen()
        best = wanted @ torch.linalg.pinv(given, rtol=_SMALL)
        return float((wanted - best @ given).norm(dim=(-2, -1)).min())


def _descend(
    of: list[Tensor], loss: Callable[[], Tensor], steps: int, advance: Callable[[], None] | None = None
) -> None:
    """Adam with a cosine schedule."""
    for x in of:
        x.requires_grad_()
    adam = torch.optim.Adam(of, lr=0.1)
    slower = torch.optim.lr_scheduler.CosineAnnealingLR(adam, max(1, steps))
    for _ in range(steps):
        adam.zero_grad()
        torch.autograd.backward(loss())
        adam.step()
        slower.step()
        if advance is not None:
            advance()


def numbers(channels: int, heads: int, head_dim: int) -> int:
    """The number of free numbers of such heads: eight weights each, and a matrix of rank head_dim."""
    return heads * (TAPS - 1 + head_dim * (2 * channels - head_dim))


def count_heads(channels: int, starts: int, steps: int, draws: int, seed: int) -> dict[str, Any]:
    """The errors of every kernel for one to nine heads, and how often nonnegative weights cost a random kernel nothing."""
    every = kernels(channels, seed)
    draw = torch.Generator().manual_seed(seed)
    image = torch.randn(channels, 5, 6, dtype=torch.float64, generator=draw)
    rows: dict[str, Any] = {
        name: {
            "rank": rank(kernel), "needed": needed(kernel), "least": [leftover(kernel, h) for h in range(1, TAPS + 1)],
            "one-signed": [one_signed(first_vectors(kernel, min(h, rank(kernel)))) for h in range(1, TAPS + 1)],
            "built": error(kernel, built(kernel)), "found": [], "layer": [],
        }
        for name, kernel in every.items()
    }  # fmt: skip
    with progress() as bar:
        task = bar.add_task("heads", total=TAPS * steps)
        for heads in range(1, TAPS + 1):
            advance = lambda: bar.advance(task)
            best = fitted(list(every.values()), heads, starts=starts, steps=steps, seed=seed, advance=advance)
            for (name, kernel), weights in zip(every.items(), best, strict=True):
                rows[name]["found"].append(error(kernel, weights))
                rows[name]["layer"].append(apart(kernel, weights, image))
    costless = torch.zeros(TAPS)
    for _ in range(draws):
        kernel = torch.randn(TAPS, channels, channels, dtype=torch.float64, generator=draw)
        costless += torch.tensor([one_signed(first_vectors(kernel, h)) for h in range(1, TAPS + 1)])
    shares = {"expected": [wendel(h) for h in range(1, TAPS + 1)], "counted": (costless / max(1, draws)).tolist()}
    return {"kernels": rows, "draws": draws, "costless": shares}


def widen_heads(channels: int, starts: int, steps: int, seed: int) -> list[dict[str, Any]]:
    """The errors of the dense kernel with nine heads of width 1, 2, …; and with heads of the usual width, channels / heads."""
    kernel = kernels(channels, seed)["dense"]
    sizes = torch.linalg.svdvals(kernel)
    wanted = [(channels, 1), *((TAPS, head_dim) for head_dim in range(1, channels + 1))]
    rows = []
    with progress() as bar:
        for heads, head_dim in bar.track(wanted, description="widths"):
            one: dict[str, Any] = {"heads": heads, "head_dim": head_dim, "numbers": numbers(channels, heads, head_dim)}
            one["asked"] = kernel.numel()
            one["one a tap"] = float(sizes[:, head_dim:].norm() / sizes.norm()) if heads == TAPS else None
            one["found"] = narrow(kernel, heads, head_dim, starts=starts, steps=steps, seed=seed)
            rows.append(one)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """Fit, print the tables, draw the picture."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    add = parser.add_argument
    add("--channels", type=natural, default=8, help="channels of the image and of the output (default: %(default)s)")
    add("--starts", type=natural, default=12, help="starts per fit; the best counts (default: %(default)s)")
    add("--steps", type=natural, default=1000, help="steps of Adam (default: %(default)s)")
    add("--draws", type=natural, default=1000, help="number of random kernels (default: %(default)s)")
    add("--seed", type=int, default=0)
    add_shared(parser, "head_count.png")
    arguments = parser.parse_args(argv)

    def measure() -> dict[str, Any]:
        channels, starts, steps, seed = arguments.channels, arguments.starts, arguments.steps, arguments.seed
        return {
            "channels": channels,
            "heads": count_heads(channels, starts, steps, arguments.draws, seed),
            "widths": widen_heads(channels, starts, 2 * steps, seed),
        }

    return shown(arguments, measure, report, picture)


if __name__ == "__main__":
    sys.exit(main())
