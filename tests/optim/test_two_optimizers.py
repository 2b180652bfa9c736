"""Two optimizers for one model: ours for the parameters on manifolds, torch's for the others."""

import datetime
import os
import subprocess
import sys

import torch
import torch.distributed as dist
import torch.multiprocessing
from manifold_models import model
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from polyhead import MultiHeadAttention, optim
from polyhead.nn import FeedForward, TransformerLayer

STEPS = 6


def make_block():
    # single precision is off the manifold by more than the rounding of double
    block = TransformerLayer(MultiHeadAttention(15, 3, manifold="stiefel"), FeedForward(15, 20)).double()
    block.self_attn.reset_parameters()
    return block


def make_optimizers(net):
    constrained, free = optim.split(net)
    return optim.Adam(constrained, lr=0.03), torch.optim.AdamW(free, lr=0.03, weight_decay=0.1)


def make_schedulers(optimizers):
    return [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS) for optimizer in optimizers]


def train(net, parts, steps, own=slice(None)):
    """Train on the items of each batch that are this process's own."""
    optimizers, schedulers = parts[:2], parts[2:]
    for number in steps:
        x = torch.randn(4, 7, 15, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
        for optimizer in optimizers:
            optimizer.zero_grad()
        (net(x[own]) - x[own].flip(-2)).square().mean().backward()
        for part in (*optimizers, *schedulers):
            part.step()


def work(rank, folder):
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2, timeout=datetime.timedelta(seconds=60)
    )
    torch.manual_seed(rank)
    own = slice(2 * rank, 2 * rank + 2)
    net = DistributedDataParallel(make_block())
    optimizers = make_optimizers(net)
    parts = [*optimizers, *make_schedulers(optimizers)]
    train(net, parts, range(STEPS // 2), own)
    if rank == 0:
        torch.save([part.state_dict() for part in (net.module, *parts)], f"{folder}/checkpoint.pt")
    train(net, parts, range(STEPS // 2, STEPS), own)
    dist.barrier()

    torch.manual_seed(rank + 7)
    again = DistributedDataParallel(make_block())
    optimizers = make_optimizers(again)
    parts = [*optimizers, *make_schedulers(optimizers)]
    saved = torch.load(f"{folder}/checkpoint.pt", weights_only=True)
    for part, state in zip((again.module, *parts), saved, strict=True):
        part.load_state_dict(state)
    train(again, parts, range(STEPS // 2, STEPS), own)
    assert optim.check(again) == (True, None)
    torch.save([net.module.state_dict(), again.module.state_dict()], f"{folder}/{rank}.pt")
    dist.destroy_process_group()


def test_two_processes_resume_both_optimizers(tmp_path):
    torch.multiprocessing.spawn(work, (str(tmp_path),), nprocs=2)
    ends = [end for rank in (0, 1) for end in torch.load(tmp_path / f"{rank}.pt", weights_only=True)]
    torch.manual_seed(0)
    alone = make_block()
    optimizers = make_optimizers(alone)
    train(alone, [*optimizers, *make_schedulers(optimizers)], range(STEPS))
    for name, parameter in alone.named_parameters():
        assert all(torch.equal(ends[0][name], end[name]) for end in ends[1:]), name
        torch.testing.assert_close(ends[0][name], parameter.detach(), atol=1e-9, rtol=0)


def test_split_gives_every_trainable_parameter_to_one_optimizer():
    net = model()
    constrained, free = optim.split(net)
    assert constrained + free == optim.groups(net)[1:] + optim.groups(net)[:1]
    assert {name for group in constrained for name, _ in group["params"]} == {
        *(f"0.{letter}_proj.weight" for letter in "qkv"), "1.v_proj.weight"
    }  # fmt: skip
    assert all(group.keys() == {"params"} for group in free)
    for name, parameter in net.named_parameters():
        parameter.requires_grad_("v_proj.weight" in name)
    assert [len(part) for part in optim.split(net)] == [2, 0]
    assert optim.split(nn.Linear(3, 2))[0] == []


def test_torch_saves_no_manifolds_of_the_free_group(tmp_path):
    """The checkpoint is read without pickle, in a process that never imports polyhead."""
    net = model()
    free, *constrained = optim.groups(net)
    optimizers = optim.Adam(constrained), torch.optim.AdamW([free])
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    for optimizer in optimizers:
        optimizer.step()
    torch.save([optimizer.state_dict() for optimizer in optimizers], tmp_path / "saved.pt")
    code = (
        f"import sys, torch\nours, theirs = torch.load({str(tmp_path / 'saved.pt')!r}, weights_only=True)\n"
        "assert 'polyhead' not in sys.modules and 'manifold' not in theirs['param_groups'][0]\n"
        "print([group['manifold'] for group in ours['param_groups']])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "['Stiefel(heads=6)', 'Stiefel(heads=1)']\n"
