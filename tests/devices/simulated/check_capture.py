"""`capture` on the simulated device: recording makes no wait of the host, and measures what the CPU measures."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing import assert_close

from benchmarks.simulated_device import count, host_of
from polyhead import Causal, MultiHeadAttention, capture
from polyhead.inspection import METRICS, rollout
from polyhead.inspection.analysis.ablation import ablate, importance

BATCH, TOKENS, WIDTH, HEADS = 2, 11, 24, 4


class Written(nn.Module):
    """Attention by SDPA, between projections."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        return x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class Own(nn.Module):
    """The layer of the library."""

    def __init__(self):
        super().__init__()
        self.attention = MultiHeadAttention(WIDTH, HEADS)

    def forward(self, x):
        return x + self.attention(x, over=Causal())[0]


class Torch(nn.Module):
    """torch's layer, with weights."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)

    def forward(self, x):
        return x + self.attention(x, x, x, need_weights=True)[0]


class Unrecorded(nn.Module):
    """Attention that is written out as products."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, -1)
        return (q @ k.transpose(-2, -1)).softmax(-1) @ v


LAYERS = {"sdpa": Written, "own": Own, "torch": Torch}


def model_and_input(kind, device):
    torch.manual_seed(0)
    model = nn.Sequential(kind(), kind()).eval().to(device)
    return model, torch.randn(BATCH, TOKENS, WIDTH).to(device)


def recorded(kind, device, metrics=None):
    model, x = model_and_input(kind, device)
    with torch.no_grad(), count() as plain:
        model(x)
    with torch.no_grad(), count() as counts, capture(model, metrics=metrics) as seen:
        model(x)
    return model, seen, (plain, counts)


@pytest.mark.parametrize("kind", LAYERS.values(), ids=LAYERS)
def test_recording_launches_and_waits_for_nothing(gpu, kind):
    _, seen, (plain, counts) = recorded(kind, gpu)
    assert (counts.waits, counts.uploads) == (0, 0)
    # torch's layer has a single kernel of its own unless it is recorded
    assert counts.launches == plain.launches or kind is Torch
    assert len(seen) == 2 and all(view.is_self_attention for view in seen.values())
    with torch.no_grad(), count() as counts:
        found = [view.contribution().received() for view in seen.values()]
        rollout(seen, 3)
    assert counts.waits == counts.uploads == 0
    for view, received in zip(recorded(kind, torch.device("cpu"))[1].values(), found, strict=True):
        assert_close(host_of(received), view.contribution().received().detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", LAYERS.values(), ids=LAYERS)
def test_metrics_stay_on_the_device(gpu, kind):
    metrics = [*METRICS, "diversity"]
    _, seen, (plain, counts) = recorded(kind, gpu, metrics)
    assert (counts.waits, counts.uploads) == (0, 0)
    # per layer
    assert (counts.launches - plain.launches) / 2 <= 180, counts.launched
    host = recorded(kind, torch.device("cpu"), metrics)[1]
    for a, b in zip(host.values(), seen.values(), strict=True):
        for (_, expected), (_, found) in zip(a._answers, b._answers, strict=True):
            for x, y in zip(
                torch.utils._pytree.tree_leaves(expected), torch.utils._pytree.tree_leaves(found), strict=True
            ):
                assert y.device == gpu
                if x.is_floating_point():
                    assert_close(host_of(y), x, atol=1e-5, rtol=1e-5)


def test_attention_that_is_not_recorded_is_noticed_without_a_wait(gpu):
    model, x = model_and_input(Unrecorded, gpu)
    with (
        torch.no_grad(),
        count() as counts,
        pytest.warns(UserWarning, match="2 attention calls not recorded"),
        capture(model) as seen,
    ):
        model(x)
    assert sum(seen.unrecorded.values()) == 2
    assert counts.waits == 0


def test_edits_are_made_on_the_device(gpu):
    model, x = model_and_input(Written, gpu)
    with torch.no_grad(), capture(model) as seen:
        before = model(x)
        seen["0"].edit(lambda out: out * 0)
        with count() as counts:
            after = model(x)
    assert counts.waits == 0 and not torch.equal(host_of(before), host_of(after))


def test_ablation_reads_all_losses_at_once(gpu):
    effects = []
    for device in (torch.device("cpu"), gpu):
        model, x = model_and_input(Written, device)
        loss = lambda model=model, x=x: model(x).square().mean()
        with count() as counts:
            effects.append(ablate(model, loss))
        assert counts.waits == (device == gpu)
        with count() as counts:
            scores = importance(model, loss)
        assert counts.waits == 0 and all(score.device == device for score in scores.values())
    assert effects[0].base == pytest.approx(effects[1].base, rel=1e-5)
    for a, b in zip(*(effect.without.values() for effect in effects), strict=True):
        assert_close(a, b, atol=1e-5, rtol=1e-3)
