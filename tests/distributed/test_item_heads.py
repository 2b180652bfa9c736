"""The view of heads whose items lie on several ranks: gathered, reduced, and refused where a rank has only a part."""

import pytest
import torch

from polyhead import ALiBi, Causal, MultiHeadAttention, Padding, RelativeBias, Rotary, Window, from_mask_mod
from polyhead.distributed import gather, mean_mass, received, shard_items

LENGTH = 29
CASES = {
    "causal": (Causal(), {"sink": "learned"}),
    "window, rotary": (Causal() & Window(5), {"position": Rotary(), "kv_heads": 2}),
    "padding, alibi": (Padding(torch.tensor([29, 13])), {"position": ALiBi(4)}),
    "prefix": (Causal() | Padding([3, 20]), {"position": ALiBi(4)}),
    "mask_mod": (~Window(2) & from_mask_mod(lambda b, h, q, k: (q + b + k * h) % 3 > 0), {}),
    "relative bias": (Window(6), {"position": RelativeBias(4, buckets=8, max_distance=20)}),
}


def run_layer(name):
    over, options = CASES[name]
    torch.manual_seed(0)
    layer = MultiHeadAttention(16, 4, **options).double()
    x = torch.randn(2, LENGTH, 16, dtype=torch.float64)
    shard = shard_items(over, LENGTH)
    return layer(x, over=over), layer(shard.take(x), over=shard), shard


def compare_gathered(name):
    (want_out, want), (out, heads), shard = run_layer(name)
    whole = gather(heads)
    marked = torch.arange(LENGTH) % 3 == 0
    errors = [
        (shard.gather(out) - want_out).abs().max(),
        (whole.weights - want.weights).abs().max(),
        (whole.entropy() - want.entropy()).abs().max(),
        (whole.outputs - want.outputs).abs().max(),
        (received(heads) - want.received()).abs().max(),
        *(
            (mean_mass(heads, on) - want.mass(on).mean(-1)).abs().max()
            for on in ("self", "previous", "first", 2, marked)
        ),
    ]
    return max(float(error) for error in errors)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
def test_whole_view_and_sums_equal_one_process(name, ranks, request):
    assert max(request.getfixturevalue(ranks).run(compare_gathered, name)) < 1e-12


def read_weights_of_a_part():
    _, (_, heads), _ = run_layer("causal")
    assert heads.outputs.shape[-2] < LENGTH
    messages = []
    for read in (lambda: heads.weights, heads.entropy, heads.received, lambda: heads[0, 0]):
        with pytest.raises(ValueError) as error:
            read()
        messages.append(str(error.value))
    return messages


def test_a_part_is_not_shown_as_the_whole(two_ranks):
    for messages in two_ranks.run(read_weights_of_a_part):
        assert all("polyhead.distributed.gather(heads)" in message for message in messages)
