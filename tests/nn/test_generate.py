"""Generation by the encoder-decoder: step by step as all at once, sampling, stop tokens, and error messages."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformer_cases import START, STOP, VOCAB, transformer

from polyhead import Padding
from polyhead.nn import Transformer
from polyhead.nn.generate import Sampler


@torch.no_grad()
def test_generation_equals_teacher_forcing() -> None:
    model = transformer()
    source, lengths = torch.randint(3, VOCAB, (5, 7)), torch.tensor([7, 1, 4, 6, 3])
    written = model.generate(source, start=START, max_new_tokens=11, source_over=Padding(lengths))
    assert written.shape == (5, 11)
    target = torch.cat((torch.full((5, 1), START), written[:, :-1]), 1)
    logits = model(source, target, source_over=Padding(lengths))
    assert torch.equal(logits.argmax(-1), written)
    # the result does not depend on the rest of the batch
    alone = model.generate(source[2:3, :4], start=START, max_new_tokens=11)
    assert torch.equal(alone[0], written[2])


def test_memory_is_projected_once() -> None:
    model, calls = transformer(), []
    for each in model.decoder:
        each.cross_attn.k_proj.register_forward_hook(lambda *_: calls.append(1))
    model.generate(torch.randint(VOCAB, (2, 7)), start=START, max_new_tokens=9)
    assert len(calls) == 3


def test_stopped_rows_are_filled_with_the_stop_token() -> None:
    model = transformer()
    source = torch.randint(3, VOCAB, (6, 7))
    free = model.generate(source, start=START, max_new_tokens=9)
    stop = int(free[0, 3])
    ended = model.generate(source, start=START, stop=stop, max_new_tokens=9)
    for row, plain in zip(ended, free, strict=True):
        first = (plain == stop).nonzero()
        if len(first):
            assert torch.equal(row[: int(first[0]) + 1], plain[: int(first[0]) + 1])
            assert (row[int(first[0]) :] == stop).all()
        else:
            assert torch.equal(row, plain)
    only = model.generate(source[:1], start=START, stop=[stop, VOCAB - 1], max_new_tokens=9)
    assert only[0, -1] in (stop, VOCAB - 1) and only.shape[1] <= 4


def test_sampling_follows_temperature_top_k_and_top_p() -> None:
    model, source = transformer(), torch.randint(3, VOCAB, (1, 7)).expand(400, 7)
    greedy = model.generate(source[:1], start=START, max_new_tokens=1)

    def drawn(**options: object) -> torch.Tensor:
        generator = torch.Generator().manual_seed(0)
        return model.generate(source, start=START, max_new_tokens=1, generator=generator, **options)[:, 0]

    assert torch.equal(drawn(temperature=1.0), drawn(temperature=1.0))
    assert (drawn(temperature=1.0, top_k=1) == greedy).all()
    assert (drawn(temperature=1.0, top_p=1e-6) == greedy).all()
    assert (drawn(temperature=1.0, top_p=1e-300) == greedy).all()
    assert (drawn(temperature=1e-46) == greedy).all()
    assert len(drawn(temperature=5.0, top_k=3).unique()) == 3
    logits = model(source[:1], torch.tensor([[START]]))[0, 0] / 2.0
    order = logits.softmax(-1).sort(descending=True)
    allowed = order.indices[: int((order.values.cumsum(0) < 0.6).sum()) + 1]
    assert set(drawn(temperature=2.0, top_p=0.6).tolist()) == set(allowed.tolist())
    share = (drawn(temperature=2.0) == greedy[0, 0]).double().mean()
    torch.testing.assert_close(share, order.values[0].double(), atol=0.06, rtol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"source": torch.empty(2, 0, dtype=torch.long)}, r"source must have shape .*, got \(2, 0\)"),
        ({"source": torch.empty(0, 3, dtype=torch.long)}, r"source must have shape .*, got \(0, 3\)"),
        ({"source": torch.ones(3, dtype=torch.long)}, r"source must have shape .*, got \(3,\)"),
        ({"source": torch.ones(2, 3)}, r"source must be torch.int64 or torch.int32, got torch.float32"),
        ({"start": VOCAB}, r"start must be an integer in \[0, 22\], got 23"),
        ({"start": 1.5}, r"start must be an integer in \[0, 22\], got 1\.5"),
        ({"stop": -1}, r"stop must be an integer in \[0, 22\], got -1"),
        ({"stop": [1, 2.5]}, r"stop\[1\] must be an integer in \[0, 22\], got 2\.5"),
        ({"stop": True}, r"stop must be a list of integers in \[0, 22\], got True"),
        ({"max_new_tokens": 0}, r"max_new_tokens must be an integer in \[1, 2147483647\], got 0"),
        ({"max_new_tokens": True}, r"max_new_tokens must be an integer in \[1, 2147483647\], got True"),
        (
            {"temperature": -1.0},
            r"temperature must be a number in \[0, inf\), got -1\.0; 0 takes the most likely token",
        ),
        (
            {"temperature": float("nan")},
            r"temperature must be a number in \[0, inf\), got nan; 0 takes the most likely token",
        ),
        ({"top_k": 3}, "top_k, top_p need a temperature above 0, got 0; pass a temperature"),
        ({"top_k": 0, "temperature": 1.0}, r"top_k must be an integer in \[1, 2147483647\], got 0"),
        ({"top_k": True, "temperature": 1.0}, r"top_k must be an integer in \[1, 2147483647\], got True"),
        ({"top_p": 1.5, "temperature": 1.0}, r"top_p must be a number in \(0, 1\], got 1\.5"),
    ],
)
def test_invalid_requests_are_refused(arguments: dict, message: str) -> None:
    request = {"source": torch.ones(2, 3, dtype=torch.long), "start": START, "max_new_tokens": 4} | arguments
    with pytest.raises(ValueError, match=message):
        transformer().generate(**request)


def test_numpy_integers_are_accepted() -> None:
    model = Transformer(np.int64(VOCAB), d_model=12, num_heads=3, layers=np.int64(1)).eval()
    source = torch.ones(1, 3, dtype=torch.int32)
    written = model.generate(source, start=np.int64(START), stop=np.int64(STOP), max_new_tokens=np.int64(4))
    assert written.shape[1] <= 4


def test_failed_step_leaves_the_caches_unchanged() -> None:
    model = transformer()
    source, target = torch.randint(VOCAB, (2, 7)), torch.randint(VOCAB, (2, 5))
    with torch.no_grad():
        kept, caches = model.prepare_decoding(model.encode(source), 6)
        with pytest.raises(ValueError, match="lengths must be at most the number of keys, 7, got 9"):
            model.decode(target, kept, memory_over=Padding([9, 9]), caches=caches)
        assert [cache.length for cache in caches] == [0, 0, 0]
        hidden = model.decode(target, kept, caches=caches)
        torch.testing.assert_close(hidden, model.decode(target, model.encode(source)))
        with pytest.raises(ValueError, match="caches must have one entry for each of 3 layers, got 2"):
            model.decode(target, kept, caches=caches[:2])


def test_generation_under_autocast() -> None:
    model = transformer()
    with torch.autocast("cpu", torch.bfloat16):
        written = model.generate(torch.randint(VOCAB, (2, 7)), start=START, max_new_tokens=5)
    assert written.shape == (2, 5)


def test_tiny_temperature_is_greedy() -> None:
    model, source = transformer(), torch.randint(VOCAB, (4, 7))
    greedy = model.generate(source, start=START, max_new_tokens=5)
    for options in ({"temperature": 1e-38}, {"temperature": 1.0, "top_k": 1}):
        assert torch.equal(model.generate(source, start=START, max_new_tokens=5, **options), greedy)


def test_top_k_of_equal_logits_keeps_k_tokens() -> None:
    drawn = Sampler(1.0, top_k=2).sample(torch.tensor([[1.0, 1.0, 1.0, 0.0]]).expand(300, 4))
    assert len(drawn.unique()) == 2


def test_nan_logits_are_refused() -> None:
    logits = torch.tensor([[0.0, 1.0], [torch.nan, 1.0]])
    with pytest.raises(RuntimeError, match="nan"):
        Sampler(1.0).sample(logits)
