"""A model of transformers on the `polyhead` backend, sharded by its own `tp_plan`, equals the unsharded one."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from polyhead import optim

pytest.importorskip("transformers.distributed.tensor_parallel")


def make_model():
    from transformers import LlamaConfig, LlamaForCausalLM

    from polyhead.interop import huggingface

    huggingface.register()
    torch.set_default_dtype(torch.float64)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": 52, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": False}
    return LlamaForCausalLM._from_config(LlamaConfig(**sizes, **heads), attn_implementation="polyhead")


def whole(x):
    return (x.full_tensor() if isinstance(x, DTensor) else x).detach()


def compare_with_plan():
    from transformers.distributed.tensor_parallel import apply_tensor_parallelism

    from polyhead.interop.huggingface import attention

    model, world = make_model(), dist.get_world_size()
    sharded = apply_tensor_parallelism(copy.deepcopy(model), init_device_mesh("cpu", (world,)))
    heads, run_call = [], attention.run_call

    def count_heads(call, *args):
        heads.append(call.q.shape[1])
        return run_call(call, *args)

    ids = torch.randint(52, (2, 7))
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1], [1] * 7])
    want = model(ids, attention_mask=mask, labels=ids)
    attention.run_call = count_heads
    try:
        got = sharded(ids, attention_mask=mask, labels=ids)
    finally:
        attention.run_call = run_call
    errors = {"logits": (whole(got.logits), want.logits.detach())}
    for result, owner in ((want, model), (got, sharded)):
        result.loss.backward()
        optim.AdamW(owner, lr=0.01).step()
    for (name, p), q in zip(sharded.named_parameters(), model.parameters(), strict=True):
        errors |= {f"gradient of {name}": (whole(p.grad), q.grad), name: (whole(p), q.detach())}
    options = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    tokens = [whole(owner.eval().generate(ids, **options)) for owner in (model, sharded)]
    largest = {name: float((a - b).abs().max()) for name, (a, b) in errors.items()}
    return heads, largest, torch.equal(*tokens)


def test_plan_of_transformers_equals_one_process(two_ranks):
    for heads, errors, same_tokens in two_ranks.run(compare_with_plan):
        assert heads == [4, 4]
        assert max(errors.values()) < 1e-12, errors
        assert same_tokens
