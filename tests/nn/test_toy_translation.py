"""The encoder-decoder learns to copy and to reverse from padded batches in seconds, and generates without errors."""

import pytest
import torch
import torch.nn.functional as F

from polyhead import Padding
from polyhead.nn import Transformer

START, STOP, WORDS, LONGEST = 0, 1, 12, 7


def sequences(count, draw):
    """Random sequences of random lengths, padded, and their lengths."""
    lengths = torch.randint(1, LONGEST + 1, (count,), generator=draw)
    words = torch.randint(2, 2 + WORDS, (count, LONGEST), generator=draw)
    return torch.where(torch.arange(LONGEST) < lengths[:, None], words, STOP), lengths


def targets(source, lengths, task):
    """The sequence or its reverse, and a stop token."""
    index = torch.arange(LONGEST).expand_as(source)
    if task == "reverse":
        index = torch.where(index < lengths[:, None], lengths[:, None] - 1 - index, index)
    return F.pad(source.gather(1, index), (0, 1), value=STOP)


@pytest.mark.parametrize("task", ["copy", "reverse"])
def test_learns_to_copy_and_reverse(task):
    torch.manual_seed(0)
    draw = torch.Generator().manual_seed(1)
    model = Transformer(2 + WORDS, d_model=64, num_heads=4, layers=1, d_feedforward=128, dropout=0.0)
    steps = 400
    optimizer = torch.optim.Adam(model.parameters(), betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps)
    for _ in range(steps):
        source, lengths = sequences(96, draw)
        target = targets(source, lengths, task)
        shifted = F.pad(target[:, :-1], (1, 0), value=START)
        logits = model(source, shifted, source_over=Padding(lengths), target_over=Padding(lengths + 1))
        real = torch.arange(LONGEST + 1) < lengths[:, None] + 1
        optimizer.zero_grad()
        F.cross_entropy(logits[real], target[real]).backward()
        optimizer.step()
        schedule.step()
    source, lengths = sequences(500, draw)
    model.eval()
    written = model.generate(source, start=START, stop=STOP, max_new_tokens=LONGEST + 1, source_over=Padding(lengths))
    assert torch.equal(written, targets(source, lengths, task))
