"""Every kind of convolution and pooling as attention with the same outputs and gradients, and back."""

from __future__ import annotations

import itertools
import pickle
from typing import Any

import pytest
import torch
from conv_cases import KINDS, MODES, SIZES, TOLERANCES, differences
from torch import nn

from polyhead import from_conv, to_conv
from polyhead._torch import native
from polyhead.nn import ConvolutionalAttention

KERNELS: tuple[tuple[tuple[int, ...], ...], ...] = (
    ((1,), (3,), (4,)),
    ((1, 1), (3, 3), (2, 4), (1, 5)),
    ((1, 1, 1), (3, 3, 3), (2, 1, 3)),
)


def table() -> list[tuple[Any, ...]]:
    """dimension x kernel x stride x dilation x groups x padding x mode x bias."""
    rows = []
    for axes, (number, kernels) in enumerate(zip((1, 2, 3), KERNELS, strict=True)):
        for kernel, stride, dilation, groups, padding, mode, bias in itertools.product(
            kernels, (1, 2), (1, 2), (1, 2, 4), (0, 1, "same"), MODES, (True, False)
        ):
            skipped = number == 3 and (dilation == 2 or groups == 2)
            # torch has no "same" with a stride; without padding all modes are equal; three axes have enough rows
            if (padding == "same" and stride > 1) or (padding == 0 and mode != "zeros") or skipped:
                continue
            rows.append((axes, kernel, stride, dilation, groups, padding, mode, bias))
    return rows


ROWS = table()


def make_conv(row: tuple[Any, ...], dtype: torch.dtype) -> Any:
    axes, kernel, stride, dilation, groups, padding, mode, bias = row
    return KINDS[axes](4, 8, kernel, stride, padding, dilation, groups, bias, mode, dtype=dtype)


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("axes", [0, 1, 2], ids=["1d", "2d", "3d"])
def test_every_convolution_equals_attention_and_round_trips(axes: int, dtype: torch.dtype):
    torch.manual_seed(axes)
    rows = [row for row in ROWS if row[0] == axes]
    wrong = []
    for row in rows:
        conv = make_conv(row, dtype)
        attention = from_conv(conv)
        x = torch.randn(2, 4, *SIZES[axes], dtype=dtype, requires_grad=True)
        difference = differences(conv, attention, x)
        back = to_conv(attention)
        same = repr(back) == repr(conv) and torch.equal(back.weight, conv.weight)
        same = same and (conv.bias is None or torch.equal(back.bias, conv.bias))
        if not max(difference) <= TOLERANCES[dtype] or not same:
            wrong.append((row, difference, same))
    assert not wrong


def test_the_table_has_at_least_300_distinct_rows():
    assert len(ROWS) >= 300
    assert len(set(ROWS)) == len(ROWS)


@pytest.mark.parametrize(
    "pool",
    [
        nn.AvgPool1d(3, 2, 1), nn.AvgPool2d(2), nn.AvgPool2d((3, 2), 2, (1, 0)), nn.AvgPool3d(2, padding=1),
        nn.AvgPool2d(3, 2, 1, count_include_pad=False), nn.AvgPool2d(3, 2, ceil_mode=True),
        nn.AvgPool2d(3, 2, 1, ceil_mode=True, count_include_pad=False), nn.AvgPool2d(3, 2, 1, divisor_override=4),
        nn.AvgPool2d(3, 3, 1, ceil_mode=True, divisor_override=4),
    ],
    ids=repr,
)  # fmt: skip
@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_average_pooling(pool: nn.Module, dtype: torch.dtype):
    axes = int(type(pool).__name__[-2])
    x = torch.randn(2, 3, *SIZES[axes - 1], dtype=dtype, requires_grad=True)
    assert max(differences(pool, from_conv(pool).to(dtype), x)) <= TOLERANCES[dtype]
    assert from_conv(pool).to(dtype)(x[0])[0].shape == pool(x[0]).shape


def test_exact_heads_use_the_offsets_kernel():
    assert from_conv(nn.Conv2d(2, 2, 3)).explain(torch.ones(1, 2, 5, 5)).kernel == "offsets"
    soft = "tiled" if native is None else "short"
    assert from_conv(nn.Conv2d(2, 2, 3), alpha=3.0).explain(torch.ones(1, 2, 5, 5)).kernel == soft


def test_each_head_attends_to_its_tap():
    conv = nn.Conv2d(3, 5, 3, padding=1)
    image = torch.randn(2, 3, 6, 7)
    _, heads = from_conv(conv)(image)
    assert heads.shape == (2, 9, 42, 42)
    weights = heads.weights.unflatten(-1, (6, 7)).unflatten(2, (6, 7))
    for head, (down, right) in enumerate(itertools.product((-1, 0, 1), repeat=2)):
        assert weights[0, head, 3, 4, 3 + down, 4 + right] == 1
    assert weights.sum((-1, -2)).amax() == 1
    # zero padding: no weight beyond the border
    assert weights[0, 0, 0, 0].sum() == 0
    assert heads.entropy().abs().max() == 0


def test_unbatched_images_and_any_image_size():
    conv = nn.Conv2d(3, 5, 3, padding=1, stride=2)
    attention = from_conv(conv)
    for shape in ((3, 8, 8), (1, 3, 1, 1), (4, 3, 5, 12), (0, 3, 5, 4)):
        x = torch.randn(shape)
        assert torch.allclose(attention(x)[0], conv(x), atol=1e-6)


def test_low_rank_taps_through_w_v():
    torch.manual_seed(0)
    conv = nn.Conv2d(8, 6, 3, padding=1).double()
    with torch.no_grad():
        # taps of rank 2
        conv.weight.copy_(torch.einsum("otxy,ti->oixy", torch.randn(6, 2, 3, 3).double(), torch.randn(2, 8).double()))
    attention = from_conv(conv, head_dim=2)
    x = torch.randn(2, 8, 5, 5, dtype=torch.float64, requires_grad=True)
    assert max(differences(conv, attention, x)) < 1e-12
    assert attention.attention.value_dim == 2
    assert torch.allclose(to_conv(attention).weight, conv.weight, atol=1e-13)
    assert max(differences(conv, from_conv(conv, head_dim=11), x)) < 1e-12
    with pytest.raises(ValueError, match=r"head_dim must be at least 2, the rank of the tap at \(-1, -1\), got 1"):
        from_conv(conv, head_dim=1)
    # the usual width of a head, d_model / heads, is too narrow for a dense convolution
    dense = nn.Conv2d(18, 18, 3)
    with pytest.raises(ValueError, match=r"head_dim must be at least 18, the rank of the tap at \(0, 0\), got 2"):
        from_conv(dense, head_dim=18 // 9)


def test_frozen_weights_stay_frozen_and_all_parameters_are_used():
    conv = nn.Conv2d(3, 4, 3).requires_grad_(False)
    assert not any(p.requires_grad for p in from_conv(conv).parameters())
    assert not any(p.requires_grad for p in from_conv(conv, alpha=3.0).parameters())
    conv.weight.requires_grad_()
    attention = from_conv(conv)
    attention(torch.randn(1, 3, 5, 5))[0].sum().backward()
    # DistributedDataParallel needs a gradient of every trainable parameter
    assert all(p.grad is not None for p in attention.parameters() if p.requires_grad)
    assert sum(p.numel() for p in attention.parameters()) == sum(p.numel() for p in conv.parameters())
    assert not list(from_conv(nn.AvgPool2d(2)).parameters())


def test_exact_conversion_does_not_advance_the_generator():
    conv = nn.Conv2d(3, 4, 3)
    torch.manual_seed(3)
    wanted = torch.rand(1)
    torch.manual_seed(3)
    from_conv(conv)
    assert torch.equal(torch.rand(1), wanted)


def test_pooling_accepts_the_dtypes_of_torch():
    for pool in (nn.AvgPool2d([3, 2], [2, 1]), nn.AvgPool2d(2, padding=1, count_include_pad=False)):
        attention = from_conv(pool)
        for dtype in (torch.float64, torch.bfloat16):
            x = torch.randn(2, 3, 6, 6).to(dtype)
            assert torch.allclose(attention(x)[0], pool(x), atol=1e-2 if dtype == torch.bfloat16 else 1e-12)
        with torch.autocast("cpu"):
            assert attention(torch.randn(2, 3, 6, 6))[0].dtype == torch.float32


def test_half_precision_default_device_and_meta_device():
    conv = nn.Conv2d(4, 4, 3).to(torch.bfloat16)
    assert from_conv(conv, head_dim=4).attention.v_proj.weight.dtype == torch.bfloat16
    from_conv(conv, alpha=5.0).certificate(torch.randn(1, 4, 5, 5).bfloat16())
    plain = nn.Conv2d(2, 3, 3, stride=2)
    x = torch.randn(1, 2, 7, 7)
    with torch.device("meta"):
        attention = from_conv(plain)
        assert torch.allclose(attention(x)[0], plain(x), atol=1e-6)
    abstract = from_conv(nn.Conv2d(2, 3, 3, device="meta"), head_dim=2)
    assert abstract.attention.o_proj.weight.is_meta


def test_output_has_the_memory_format_of_a_convolution():
    conv = nn.Conv2d(3, 4, 3, padding=1)
    x = torch.randn(2, 3, 6, 5)
    assert from_conv(conv)(x)[0].is_contiguous()
    inside = x.contiguous(memory_format=torch.channels_last)
    assert from_conv(conv)(inside)[0].is_contiguous(memory_format=torch.channels_last)
    assert torch.allclose(from_conv(conv)(inside)[0], conv(x), atol=1e-6)


def test_tensors_made_under_a_transform_are_not_cached():
    attention = from_conv(nn.Conv2d(3, 4, 3, padding=1))
    x = torch.randn(1, 3, 9, 11)
    torch.func.grad(lambda image: attention(image)[0].sum())(x)
    pickle.dumps(attention.neighbourhood((9, 11)))
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True):
        attention(x)
    assert type(attention(x)[0]) is torch.Tensor
    with torch.inference_mode():
        attention(torch.randn(1, 3, 12, 13))
    y = attention(torch.randn(1, 3, 12, 13, requires_grad=True))[0]
    y.sum().backward()


def test_compiles_for_several_image_sizes():
    conv = nn.Conv2d(3, 4, 3, padding=1)
    attention = from_conv(conv).eval()
    compiled = torch.compile(lambda image: attention(image)[0], fullgraph=True, backend="aot_eager")
    for sizes in ((5, 6), (7, 8), (4, 9)):
        x = torch.randn(1, 3, *sizes)
        assert torch.allclose(compiled(x), conv(x), atol=1e-6)


def test_compiles_loads_state_dicts_and_takes_bfloat16(tmp_path):
    conv = nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect")
    attention = from_conv(conv).eval()
    x = torch.randn(2, 3, 6, 5)
    compiled = torch.compile(lambda image: attention(image)[0], fullgraph=True, backend="aot_eager")
    assert torch.allclose(compiled(x), conv(x), atol=1e-6)
    other = from_conv(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"))
    other.load_state_dict(attention.state_dict())
    assert torch.equal(other(x)[0], attention(x)[0])
    assert isinstance(other, ConvolutionalAttention) and "kernel=3 x 3" in repr(other)
    half = from_conv(conv.to(torch.bfloat16))
    assert half(x.bfloat16())[0].dtype == torch.bfloat16
