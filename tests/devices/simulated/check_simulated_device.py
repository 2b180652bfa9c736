"""The simulated device itself: it computes what the CPU computes, counts launches and waits, and refuses mixed devices."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.simulated_device import count, count_as_one_launch, host_of

OPERATIONS = {
    "sum of a product": lambda x, y: (x @ y.mT).sum(-1),
    "views in place": lambda x, y: x.clone().transpose(0, 1)[1:].mul_(2).contiguous() + y.transpose(0, 1)[1:],
    "softmax": lambda x, y: (x - y).softmax(-1),
    "gather": lambda x, y: x.gather(-1, y.argsort(-1)),
    "scatter": lambda x, y: torch.zeros_like(x).index_add(1, torch.arange(x.shape[1], device=x.device).flip(0), x * y),
    "index": lambda x, y: x[:, torch.arange(x.shape[1], device=x.device) // 2] * y,
    "linear": lambda x, y: F.linear(x, y[0], y[0, :, 0]),
    "layer norm": lambda x, y: F.layer_norm(x, x.shape[-1:], y[0, 0], y[0, 1]),
    "concatenation": lambda x, y: torch.cat((x, y, x), 1).unflatten(1, (3, -1)).flip(1),
    "where": lambda x, y: torch.where(x > 0, y, x).masked_fill(y > 1, 0.0),
    "fused attention": lambda x, y: F.scaled_dot_product_attention(*(z.unflatten(-1, (3, -1)).transpose(1, 2) for z in (x, y, x))),
    "causal grouped attention": lambda x, y: F.scaled_dot_product_attention(
        x.unflatten(-1, (6, -1)).transpose(1, 2), *(y.unflatten(-1, (6, -1)).transpose(1, 2)[:, :2],) * 2, is_causal=True, enable_gqa=True
    ),
    "autograd function": lambda x, y: _Cubed.apply(x) * y,
}  # fmt: skip


class _Cubed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx, grad):
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


def inputs(device):
    torch.manual_seed(3)
    return [torch.randn(2, 5, 12).to(device).requires_grad_() for _ in range(2)]


@pytest.mark.parametrize("name", OPERATIONS)
def test_values_and_gradients_are_those_of_the_cpu(gpu, name):
    results = []
    for device in (torch.device("cpu"), gpu):
        x = inputs(device)
        with count() as counts:
            y = OPERATIONS[name](*x)
            y.square().sum().backward()
        assert y.device == device and x[0].grad.device == device
        assert (counts.launches > 0) == (device == gpu)
        assert counts.waits == counts.uploads == 0
        results.append((y, *(z.grad for z in x if z.grad is not None)))
    for host, device in zip(*results, strict=True):
        torch.testing.assert_close(host_of(device), host_of(host))


def test_the_tensors_are_ordinary_ones(gpu):
    x = torch.ones(3, 4, device=gpu)
    assert type(x) is torch.Tensor and x.device == gpu and not x.is_cpu
    assert x.mT.untyped_storage().data_ptr() == x.untyped_storage().data_ptr()
    x[1].zero_()
    assert host_of(x).tolist() == [[1.0] * 4, [0.0] * 4, [1.0] * 4]
    assert type(nn.Linear(3, 3).to(gpu).weight) is nn.Parameter


WAITS = {
    "item": lambda x: x.sum().item(),
    "bool": lambda x: bool((x > 0).any()),
    "int": lambda x: int(x[0, 0]),
    "tolist": lambda x: x.tolist(),
    "cpu": lambda x: x.cpu(),
    "copy": lambda x: torch.empty(3, 4).copy_(x),
    "nonzero": lambda x: x.nonzero(),
    "bool index": lambda x: x[x > 0],
    "bool index, written": lambda x: x.index_put_((x > 0,), x.sum()),
    "unique": lambda x: x.unique(),
    "masked_select": lambda x: x.masked_select(x > 0),
    "repeat_interleave": lambda x: torch.repeat_interleave(x[0].long()),
    "equal": lambda x: torch.equal(x, x),
    "allclose": lambda x: torch.allclose(x, x),
    "bincount": lambda x: x[0].long().bincount(),
    "isin, sorted": lambda x: torch.isin(x, torch.arange(100.0, device=x.device)),
    "multinomial": lambda x: x.multinomial(1),
}


@pytest.mark.parametrize("name", WAITS)
def test_waits_are_counted(gpu, name):
    x = torch.arange(1.0, 13).reshape(3, 4).to(gpu)
    with count() as counts:
        WAITS[name](x)
    assert counts.waits > 0, counts


UPLOADS = {
    "to": lambda device: torch.ones(3).to(device),
    "tensor": lambda device: torch.tensor([1, 2], device=device),
    "copy": lambda device: torch.empty(3, device=device).copy_(torch.ones(3)),
}


@pytest.mark.parametrize("name", UPLOADS)
def test_copies_from_the_host_are_counted_apart(gpu, name):
    with count() as counts:
        UPLOADS[name](gpu)
    assert (counts.uploads, counts.waits) == (1, 0)


FREE = {
    "views": lambda x: (x.T, x[1:], x.view(-1), x.unsqueeze(0).expand(2, 3, 4), x.unfold(1, 2, 1), x.diagonal(), x.detach(), x.split(2)),
    "shapes": lambda x: (x.shape, x.stride(), x.dtype, x.device, x.numel()),
    "memory": lambda x: (torch.empty_like(x), x.new_empty(3), torch.empty_strided((2, 2), (1, 2), device=x.device)),
}  # fmt: skip


@pytest.mark.parametrize("name", FREE)
def test_views_and_memory_cost_nothing(gpu, name):
    x = torch.ones(3, 4, device=gpu)
    with count() as counts:
        FREE[name](x)
    assert (counts.launches, counts.waits, counts.uploads) == (0, 0, 0)


LAUNCHES = {
    "product": (lambda x: x @ x.T, 1),
    "linear": (lambda x: F.linear(x, x, x[:, 0]), 1),
    "softmax": (lambda x: x.softmax(-1), 1),
    "zeros": (lambda x: torch.zeros(3, device=x.device), 1),
    "arange": (lambda x: torch.arange(3, device=x.device), 1),
    "full": (lambda x: torch.full((3,), 2.0, device=x.device), 1),
    "copy": (lambda x: x.T.contiguous(), 1),
    "two": (lambda x: (x + 1) * x, 2),
    "attention": (lambda x: F.scaled_dot_product_attention(*(x[None, None],) * 3), 1),
    "assertion": (lambda x: torch._assert_async(x.any(), "some must be nonzero"), 2),
    "one fused kernel": (count_as_one_launch("fused", lambda x: (x + 1) * x), 1),
}


@pytest.mark.parametrize("name", LAUNCHES)
def test_launches_are_counted(gpu, name):
    function, expected = LAUNCHES[name]
    x = torch.ones(3, 3, device=gpu)
    with count() as counts:
        function(x)
    assert (counts.launches, counts.waits, counts.uploads) == (expected, 0, 0), dict(counts.launched)


MIXED = {
    "sum": lambda x, y: x + y,
    "sum, the other way": lambda x, y: y + x,
    "product": lambda x, y: x @ y,
    "where": lambda x, y: torch.where(x > 0, x, y),
    "concatenation": lambda x, y: torch.cat((x, y)),
    "index_select": lambda x, y: x.index_select(0, y[0].long()),
    "in place on the host": lambda x, y: y.add_(x),
    "attention": lambda x, y: F.scaled_dot_product_attention(x[None, None], y[None, None], x[None, None]),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixed_devices_are_refused(gpu, name):
    with pytest.raises(RuntimeError, match=r"same device|device"):
        MIXED[name](torch.ones(3, 3, device=gpu), torch.ones(3, 3))


def test_a_single_number_of_the_host_may_be_mixed_in(gpu):
    x = torch.ones(3, device=gpu) * torch.tensor(2.0)
    assert host_of(x).tolist() == [2.0] * 3
    with pytest.raises(TypeError, match="device type tensor to numpy"):
        x.numpy()


def test_an_assertion_fails_on_the_device(gpu):
    with pytest.raises(RuntimeError, match="must hold"):
        torch._assert_async(torch.zeros(1, device=gpu), "this must hold")


def test_an_operator_without_a_device_body_is_refused(gpu):
    import polyhead  # noqa: F401 - registers its operators

    q, rows = torch.ones(1, 1, 4, 8, device=gpu), torch.zeros(1, 4, dtype=torch.long, device=gpu)
    with pytest.raises(NotImplementedError, match="Could not run 'polyhead::short'"):
        torch.ops.polyhead.short(q, q, q, rows, rows, None, None, None, 1.0, 0.0)
