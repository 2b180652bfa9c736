"""Optimizers on DTensors: heads over ranks, FSDP2, and both, train as one process does; checkpoints go to other numbers of ranks."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor

from polyhead import Causal, MultiHeadAttention, Stiefel, optim
from polyhead.distributed import shard_heads
from polyhead.models import llama
from polyhead.nn import FeedForward, TransformerLayer

STEPS, TOLERANCE = 3, 1e-11

# how parameters are laid out on four ranks: copies of the batch, and ranks that share the heads
LAYOUTS = {"heads": (1, 4), "fsdp": (4, 1), "fsdp x heads": (2, 2)}

OPTIMIZERS = {
    "sgd, maximise": lambda model: optim.SGD(model, lr=0.1, maximize=True),
    "sgd with momentum": lambda model: optim.SGD(model, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adam": lambda model: optim.Adam(model, lr=0.01, weight_decay=0.1),
    "adamw with a scalar moment": lambda model: optim.AdamW(model, lr=0.01, second_moment="scalar"),
}

# manifold, heads, key heads, features per head, and in which layouts; those of FSDP cut matrices of the last one
MODELS = {
    "euclidean": ("euclidean", 8, 4, 3, ("heads", "fsdp", "fsdp x heads")),
    "stiefel": ("stiefel", 8, 4, 3, ("heads", "fsdp", "fsdp x heads")),
    "stiefel, canonical, by solving": (Stiefel("canonical", "cayley"), 8, 4, 3, ("heads",)),
    "stiefel, cut": ("stiefel", 6, 2, 5, ("fsdp", "fsdp x heads")),
}


def make_layer(model):
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    manifold, heads, kv_heads, dim, _ = MODELS[model]
    attention = MultiHeadAttention(20, heads, head_dim=dim, kv_heads=kv_heads, manifold=manifold, qk_norm=True)
    return TransformerLayer(attention, FeedForward(20, 8))


def distribute(model, layout):
    """Shard a model over all ranks; the number of this rank's share of a batch, and of how many."""
    data, heads = layout
    mesh = init_device_mesh("cpu", (data, heads), mesh_dim_names=("data", "heads"))
    if heads > 1:
        shard_heads(model, mesh["heads"])
    if data > 1:
        for layer in getattr(model, "layers", ()):
            fully_shard(layer, mesh=mesh["data"])
        fully_shard(model, mesh=mesh["data"])
    return mesh["data"].get_local_rank(), data


def whole(x):
    return x.detach().full_tensor() if isinstance(x, DTensor) else x.detach()


def largest_difference(model, reference):
    pairs = zip(model.parameters(), reference.parameters(), strict=True)
    return max(float((whole(a) - whole(b)).abs().max()) for a, b in pairs)


def layer_loss(layer, step, share, of):
    x = torch.randn(4, 6, 20, generator=torch.Generator().manual_seed(step)).chunk(of)[share]
    return (layer(x, over=Causal()) - 1).square().mean()


def train(model, optimizer, loss, steps, share=0, of=1, clip=None):
    for step in steps:
        optimizer.zero_grad()
        loss(model, step, share, of).backward()
        if clip is not None:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)
            assert float(whole(norm)) > clip
        optimizer.step()


def compare_training(model, layout):
    """Per optimizer, the largest difference of a parameter after some steps, and whether all are on their manifolds."""
    found = {}
    for name, make in OPTIMIZERS.items():
        reference, layer = make_layer(model), make_layer(model)
        start = copy.deepcopy(reference)
        train(reference, make(reference), layer_loss, range(STEPS))
        share, of = distribute(layer, LAYOUTS[layout])
        train(layer, make(layer), layer_loss, range(STEPS), share, of)
        moved = largest_difference(reference, start)
        found[name] = largest_difference(layer, reference), moved, optim.check(layer)[0]
    return found


@pytest.mark.parametrize(("model", "layout"), [(model, layout) for model, row in MODELS.items() for layout in row[-1]])
def test_optimizers_train_as_one_process_does(model, layout, four_ranks):
    for found in four_ranks.run(compare_training, model, layout):
        assert found.keys() == OPTIMIZERS.keys()
        for name, (error, moved, on_manifold) in found.items():
            assert error < TOLERANCE and moved > 1e-3 and on_manifold, (name, error, moved)


def make_llama():
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    return llama.Llama(llama.Config(32, 4, 2, 48, vocab=50, positions=16, kv_heads=2))


def llama_loss(model, step, share, of):
    ids = torch.randint(50, (4, 9), generator=torch.Generator().manual_seed(step)).chunk(of)[share]
    logits = model.logits(model(ids[:, :-1]))
    return nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


def distribute_llama(layout):
    model = make_llama()
    share, of = distribute(model, layout)
    if of > 1:
        register_fsdp_forward_method(model, "logits")
    return model, share, of


def compare_llama(layout):
    reference = make_llama()
    train(reference, optim.AdamW(reference, lr=1e-2), llama_loss, range(STEPS), clip=0.1)
    model, share, of = distribute_llama(layout)
    train(model, optim.AdamW(model, lr=1e-2), llama_loss, range(STEPS), share, of, clip=0.1)
    return largest_difference(model, reference)


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_llama_trains_with_clipped_gradients(layout, four_ranks):
    errors = four_ranks.run(compare_llama, layout)
    assert max(errors) < TOLERANCE, errors


def load_train_save(layout, load, steps, save):
    """Continue the training of a checkpoint for some steps and write the next one; the parameters on this rank, whole."""
    torch.set_default_dtype(torch.float64)
    layer, rank = make_layer("stiefel"), (0, 1)
    if layout is not None:
        rank = distribute(layer, layout)
    optimizer = optim.AdamW(layer, lr=0.01, second_moment="scalar")
    if load is not None:
        # what is loaded must not be there already
        with torch.no_grad():
            for p in layer.parameters():
                p.mul_(-1)
        model_state, optimizer_state = get_state_dict(layer, optimizer)
        dcp.load({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=load)
        set_state_dict(layer, optimizer, model_state_dict=model_state, optim_state_dict=optimizer_state)
    train(layer, optimizer, layer_loss, steps, *rank)
    if save is not None:
        model_state, optimizer_state = get_state_dict(layer, optimizer)
        dcp.save({"model": model_state, "optimizer": optimizer_state}, checkpoint_id=save)
    state = get_model_state_dict(layer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: x.clone() for name, x in state.items()}


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled, unavailable or uninitialized")
def test_checkpoints_go_from_two_ranks_to_four_to_one(two_ranks, four_ranks, tmp_path):
    torch.manual_seed(0)
    before = torch.get_default_dtype()
    try:
        undisturbed = load_train_save(None, None, range(4), None)
        two_ranks.run(load_train_save, (1, 2), None, range(2), tmp_path / "two")
        four_ranks.run(load_train_save, (2, 2), tmp_path / "two", range(2, 3), tmp_path / "four")
        continued = load_train_save(None, tmp_path / "four", range(3, 4), None)
    finally:
        torch.set_default_dtype(before)
    assert continued.keys() == undisturbed.keys()
    for name, x in undisturbed.items():
        assert (continued[name] - x).abs().max() < TOLERANCE, name


def bad_steps():
    """What steps say, and whether parameters changed, where one rank has a bad number."""
    found = {}
    last = dist.get_rank() == dist.get_world_size() - 1
    for what in ("gradient", "manifold", "cut manifold"):
        layer = make_layer("stiefel, cut" if "cut" in what else "stiefel")
        share, of = distribute(layer, LAYOUTS["fsdp"])
        optimizer = optim.SGD(layer, lr=0.1)
        train(layer, optimizer, layer_loss, range(1), share, of)
        layer_loss(layer, 1, share, of).backward()
        weight = layer.get_parameter("self_attn.q_proj.weight")
        with torch.no_grad():
            if last and what == "gradient":
                weight.grad.to_local().fill_(torch.nan)
            elif last:
                weight.to_local().mul_(2)
        before = [p.detach().clone() for p in layer.parameters()]
        with pytest.raises(ValueError, match="must be") as caught:
            optimizer.step()
        pairs = zip(layer.parameters(), before, strict=True)
        unchanged = all(torch.equal(p.to_local(), old.to_local()) for p, old in pairs)
        on_manifold = optim.check(layer)[0]
        optim.project(layer)
        found[what] = str(caught.value), unchanged, on_manifold, optim.check(layer)[0]
    return found


def test_errors_are_raised_on_every_rank(four_ranks):
    *others, last = four_ranks.run(bad_steps)
    assert "q_proj.weight: the gradient must be finite, got NaN" in last["gradient"][0]
    assert "q_proj.weight must be on Stiefel(heads=2): the rows" in last["manifold"][0]
    for found in (*others, last):
        assert all(unchanged and projected for _, unchanged, _, projected in found.values())
        assert [on_manifold for _, _, on_manifold, _ in found.values()] == [True, False, False]
        assert "q_proj.weight must be on Stiefel(heads=6): the rows" in found["cut manifold"][0]
    for found in others:
        assert found["gradient"][0] == found["manifold"][0]
        assert "must be finite, and parameters on their manifolds, on every process" in found["gradient"][0]
