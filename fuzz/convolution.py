"""`from_conv` against torch's convolutions and poolings: outputs, gradients of the image, and `to_conv`."""

from __future__ import annotations

import dataclasses
import warnings
from random import Random
from typing import Any

import numpy as np
import torch
from torch import nn

from fuzz.case import Case as BaseCase
from fuzz.case import Mismatch
from fuzz.compare import error_ratio
from fuzz.run import Report
from fuzz.tensors import numbers
from polyhead import from_conv, to_conv


@dataclasses.dataclass(frozen=True, repr=False)
class Case(BaseCase):
    """One convolution or average pooling, and an image."""

    batch: int | None = None
    channels: int = 1
    sizes: tuple[int, ...] = (1,)
    kernel: tuple[int, ...] = (1,)
    stride: tuple[int, ...] = (1,)
    dilation: tuple[int, ...] = (1,)
    padding: tuple[int, ...] = (0,)
    same: bool = False
    mode: str = "zeros"
    groups: int = 1
    # output channels per group; 0 is a pooling
    out: int = 1
    counted: bool = True
    ceil: bool = False
    bias: bool = False
    dtype: str = "float64"
    channels_last: bool = False


def draw(random: Random) -> Case:
    """Draw a configuration whose image is large enough."""
    axes = random.choices((1, 2, 3), (3, 5, 1))[0]
    pooling = random.random() < 0.2
    each = lambda choices: tuple(random.choice(choices) for _ in range(axes))
    kernel = each((1, 2, 3, 3, 5) if axes < 3 else (1, 2, 3))
    dilation = (1,) * axes if pooling else each((1, 1, 1, 2, 3))
    same = not pooling and random.random() < 0.15
    padding = tuple(random.randint(0, n // 2) if pooling else random.choice((0, 0, 1, 2)) for n in kernel)
    mode = "zeros" if pooling else random.choice(("zeros", "zeros", "replicate", "circular", "reflect"))
    # the extent of a window, and the least size for "reflect" and "circular"
    least = [
        max(step * (n - 1) + 1 + (1 if same else 0), pad + 1)
        for n, step, pad in zip(kernel, dilation, padding, strict=True)
    ]
    if same:
        least = [max(n, step * (wide - 1) + 1) for n, step, wide in zip(least, dilation, kernel, strict=True)]
    groups = random.choice((1, 1, 1, 2, 3))
    return Case(
        seed=random.randrange(100_000), batch=random.choice((None, 1, 2)), channels=groups * random.choice((1, 2, 3)),
        sizes=tuple(n + random.randint(0, 5 if axes < 3 else 2) for n in least), kernel=kernel,
        stride=(1,) * axes if same else each((1, 1, 2, 3)), dilation=dilation, padding=(0,) * axes if same else padding, same=same,
        mode=mode, groups=1 if pooling else groups, out=0 if pooling else random.choice((1, 2, 3)),
        counted=random.random() < 0.5, ceil=pooling and random.random() < 0.3, bias=random.random() < 0.5,
        dtype=random.choice(("float64", "float64", "float32")), channels_last=axes == 2 and random.random() < 0.2,
    )  # fmt: skip


def check(case: Case) -> Report:
    """Compare the attention with the convolution; raise `Mismatch` if they differ."""
    torch.set_num_threads(1)
    torch.manual_seed(case.seed)
    rng = np.random.default_rng(case.seed)
    dtype = {"float64": torch.float64, "float32": torch.float32}[case.dtype]
    conv = _module(case).to(dtype)
    shape = (case.channels, *case.sizes) if case.batch is None else (case.batch, case.channels, *case.sizes)
    image = numbers("normal", shape, rng, dtype)
    if case.channels_last and image.dim() == 4:
        image = image.contiguous(memory_format=torch.channels_last)
    try:
        attention = from_conv(conv)
    except ValueError as error:
        if "its windows count the padding" in str(error):
            return Report(frozenset({"refused"}))
        raise
    mine, theirs = image.clone().requires_grad_(), image.double().requires_grad_()
    got, _ = attention(mine)
    wide = _module(case).double()
    wide.load_state_dict(conv.state_dict())
    with warnings.catch_warnings():
        # torch warns about even kernels
        warnings.simplefilter("ignore")
        expected = wide(theirs)
    grad_output = numbers("normal", expected.shape, rng, dtype)
    got.backward(grad_output)
    expected.backward(grad_output.double())
    # sums of at most a few hundred products of numbers near 1
    off = lambda x: torch.full_like(
        x, 64 * torch.finfo(dtype).eps * (1 + float(x.detach().abs().max() if x.numel() else 0))
    )
    max_error = error_ratio("from_conv", "output", got, expected.detach(), off(expected))
    assert theirs.grad is not None
    max_error = max(max_error, error_ratio("from_conv", "gradient of image", mine.grad, theirs.grad, off(theirs.grad)))
    if case.out:
        _check_back(to_conv(attention), conv)
    return Report(frozenset({"from_conv"}), max_error)


def _module(case: Case) -> nn.Module:
    place = len(case.kernel) - 1
    # typed as Any: kernels are tuples of one, two or three numbers
    convolution: Any = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[place]
    pooling: Any = (nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d)[place]
    made: nn.Module
    if case.out == 0:
        made = pooling(case.kernel, case.stride, case.padding, ceil_mode=case.ceil, count_include_pad=case.counted)
    else:
        made = convolution(
            case.channels, case.groups * case.out, case.kernel, case.stride, "same" if case.same else case.padding,
            case.dilation, case.groups, case.bias, case.mode,
        )  # fmt: skip
    return made


def _check_back(back: nn.Module, conv: nn.Module) -> None:
    """Check that `to_conv` returns the numbers of the convolution."""
    for name, tensor in conv.state_dict().items():
        if not torch.equal(back.state_dict()[name], tensor):
            raise Mismatch("to_conv", name, "it differs from the convolution")
