"""Whole models whose tokens lie on several ranks equal one process: values, loss and gradients."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from polyhead import Causal, Padding, Segments
from polyhead.distributed import shard_heads, shard_items
from polyhead.models import bert, gpt, llama

LENGTH, VOCAB = 30, 61


def make_model(name):
    torch.manual_seed(0)
    if name == "bert":
        config = bert.Config(
            24, 4, 2, 48, vocab=VOCAB, positions=40, dropout=0.0, attention_dropout=0.2, masked_lm=True
        )
        model = bert.Bert(config)
    elif name == "gpt":
        model = gpt.Gpt(
            gpt.Config(24, 4, 2, vocab=VOCAB, positions=40, dropout=0.0, embedding_dropout=0.0, attention_dropout=0.2)
        )
    else:
        window = 7 if name == "mistral" else None
        config = llama.Config(32, 4, 4, 48, vocab=VOCAB, positions=40, kv_heads=2, window=window, attention_dropout=0.2)
        model = llama.Llama(config)
    return model.double()


def documents():
    return Segments(torch.arange(LENGTH) // 11)


OVERS = {
    "none": lambda: None,
    "documents": documents,
    "padding": lambda: Padding(torch.tensor([LENGTH, 17])),
    "left padding": lambda: Padding(torch.arange(LENGTH) >= torch.tensor([[0], [6]])),
}


def data():
    generator = torch.Generator().manual_seed(4)
    ids = torch.randint(VOCAB, (2, LENGTH), generator=generator)
    # labels are shifted before they are sharded: the next token may lie on another rank
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    return ids, labels


def loss_sum(model, ids, labels, over):
    torch.manual_seed(7)
    logits = model.logits(model(ids, over=over))
    return logits, F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")


def compare(name, over_name, order, mesh_shape=None):
    over, (ids, labels) = OVERS[over_name](), data()
    model = make_model(name)
    want, loss = loss_sum(model, ids, labels, over)
    loss.backward()
    gradients = {key: p.grad.clone() for key, p in model.named_parameters() if p.grad is not None}
    sharded = make_model(name)
    mesh = None
    if mesh_shape is not None:
        both = init_device_mesh("cpu", mesh_shape, mesh_dim_names=("items", "heads"))
        shard_heads(sharded, both["heads"])
        mesh = both["items"]
    shard = shard_items(over, LENGTH, mesh, order=order)
    got, own_loss = loss_sum(sharded, shard.take(ids, dim=-1), shard.take(labels, dim=-1), shard)
    own_loss.backward()
    errors = [float((got - shard.take(want)).abs().max())]
    for key, parameter in sharded.named_parameters():
        if key not in gradients:
            continue
        gradient = parameter.grad
        gradient = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        # every token is on one rank: gradients of shared parameters sum over the ranks of the items
        dist.all_reduce(gradient, group=shard.group)
        errors.append(float((gradient - gradients[key]).abs().max() / gradients[key].abs().max().clamp(min=1)))
    return max(errors)


@pytest.mark.parametrize("over", OVERS)
@pytest.mark.parametrize("name", ["bert", "gpt", "llama", "mistral"])
def test_model_equals_one_process(name, over, two_ranks):
    assert max(two_ranks.run(compare, name, over, "zigzag")) < 1e-12


def test_four_layers_of_llama_on_items_by_heads(four_ranks):
    assert max(four_ranks.run(compare, "llama", "documents", "zigzag", (2, 2))) < 1e-12


def call_with_too_many_tokens():
    model = make_model("gpt")
    shard = shard_items(Causal(), 50)
    with pytest.raises(ValueError, match="at most the 40 positions of the model") as error:
        model(torch.zeros(1, len(shard.item_indices[0]), dtype=torch.long), over=shard)
    with pytest.raises(ValueError, match="cache and KeyValues must be left out"):
        model(torch.zeros(1, 15, dtype=torch.long), over=shard_items(None, LENGTH), caches=model.caches(1, 40))
    return str(error.value)


def test_bad_calls_of_models(two_ranks):
    two_ranks.run(call_with_too_many_tokens)
