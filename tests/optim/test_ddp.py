"""Training on two processes with torch's DistributedDataParallel: both end at the same points of the manifold."""

import datetime
import os

import torch
import torch.distributed as dist
import torch.multiprocessing
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from polyhead import MultiHeadAttention, optim

OPTIMIZERS = {
    "momentum": lambda params: optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: optim.Adam(params, lr=0.03),
    "adam-scalar": lambda params: optim.Adam(params, lr=0.03, second_moment="scalar"),
}


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = MultiHeadAttention(15, 3, manifold="stiefel")
        self.head = nn.Linear(15, 2)
        # single precision is off the manifold by more than the rounding of double
        self.double()
        self.attention.reset_parameters()

    def forward(self, x):
        return self.head(self.attention(x)[0]).mean(-2)


def data():
    """Five batches: inputs and targets."""
    generator = torch.Generator().manual_seed(7)
    return torch.randn(5, 4, 7, 15, generator=generator).double(), torch.randn(5, 4, 2, generator=generator).double()


def trained(model, make, own):
    """Five steps on the items of each batch that are this process's own."""
    optimizer = make(optim.groups(model))
    for x, target in zip(*data(), strict=True):
        optimizer.zero_grad()
        (model(x[own]) - target[own]).square().mean().backward()
        optimizer.step()
    return {name.removeprefix("module."): p.detach() for name, p in model.named_parameters()}


def work(rank, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    ends = {}
    for name, make in OPTIMIZERS.items():
        # they start apart, and DDP hands out what the first has
        torch.manual_seed(rank)
        model = DistributedDataParallel(Model())
        ends[name] = trained(model, make, slice(2 * rank, 2 * rank + 2))
        assert optim.check(model) == (True, None)
    torch.save(ends, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_equal_one_with_the_joined_batch(tmp_path):
    torch.multiprocessing.spawn(work, (str(tmp_path),), nprocs=2)
    first, second = (torch.load(tmp_path / f"{rank}.pt", weights_only=True) for rank in (0, 1))
    for name, make in OPTIMIZERS.items():
        torch.manual_seed(0)
        alone = trained(Model(), make, slice(None))
        assert first[name].keys() == second[name].keys() == alone.keys()
        for parameter, wanted in alone.items():
            assert torch.equal(first[name][parameter], second[name][parameter]), (name, parameter)
            torch.testing.assert_close(first[name][parameter], wanted, atol=1e-9, rtol=0)
