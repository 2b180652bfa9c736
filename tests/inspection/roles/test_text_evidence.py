"""Evidence from one text: positions, and one word for all."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from role_examples import make_card, make_view, one_key_per_query

from polyhead import Causal, Dot, MultiHeadAttention, Padding
from polyhead.heads import Heads, Origin
from polyhead.inspection.capture.capture import capture
from polyhead.inspection.roles.corpus import Sentence
from polyhead.inspection.roles.role_cards import FoundRoles
from polyhead.inspection.roles.text_evidence import add_text_evidence, find_roles_in_text
from polyhead.kernels.call import Call
from polyhead.models import Tokens


def test_positional_roles_of_constructed_heads():
    n = 40
    i = torch.arange(n)
    made = {
        "previous token": one_key_per_query(*(i - 1).clamp(min=0).tolist(), number=n),
        "next token": one_key_per_query(*(i + 1).clamp(max=n - 1).tolist(), number=n),
        "self": torch.eye(n),
        "first token": one_key_per_query(*[0] * n, number=n),
        "delimiter": one_key_per_query(*[n - 1] * n, number=n),
        "broad": torch.full((n, n), 1 / n),
        "local": torch.softmax(-(i[:, None] - i).abs() / 2, -1),
        "long range": one_key_per_query(*[n - 2 if j < n / 2 else 1 for j in range(n)], number=n),
    }
    text = Tokens.from_pieces(
        tuple(f"p{j}" for j in range(n)), (*range(n - 1), None), tuple(f"w{j}" for j in range(n - 1))
    )
    found = find_roles_in_text(make_view(torch.stack(list(made.values()))), text)
    for head, name in enumerate(made):
        assert [c.role for c in found.cards_of_head(0, head)][-1] == name
        assert found.cards_of_role(name)[0].head == head
    # only the head of the first token attends to one word
    assert [c.head for c in found.cards_of_role("one word for all")] == [3]
    assert found.cards_of_role("previous token")[0].pair == ("p1", "p0", pytest.approx(1.0, abs=1e-5))
    assert found.cards_of_role("delimiter")[0].pair[1] == "p39"
    assert all(c.measured_on == "this text" and c.low <= c.score + 1e-9 <= c.high + 2e-9 for c in found.measured)


def test_baselines_of_causal_heads_count_visible_keys():
    n = 30
    even = torch.tril(torch.ones(n, n))
    even = even / even.sum(-1, keepdim=True)
    found = find_roles_in_text(make_view(even[None], Causal()))
    measured = {c.role: c for c in found.measured}
    assert "next token" not in measured, "causal tokens cannot attend to the next one"
    for role in ("self", "previous token", "local", "long range"):
        assert measured[role].score == pytest.approx(measured[role].baseline, abs=1e-5)
    assert measured["broad"].score == pytest.approx(1, abs=1e-5)


def test_baselines_leave_out_padding():
    layer = MultiHeadAttention(8, 2)
    with torch.no_grad(), capture(layer) as seen:
        layer(torch.randn(3, 10, 8), over=Padding([10, 4, 7]))
    found = find_roles_in_text(seen, batch=1)
    (first,) = (c for c in found.measured if c.role == "first token" and c.head == 0)
    assert first.baseline == pytest.approx(1 / 4) and first.score > 0.1


def test_one_word_for_all_shows_no_grammar_pair():
    n = 12
    to_third = one_key_per_query(*[2 if j != 2 else 5 for j in range(n)], number=n)
    other = one_key_per_query(*[(j * 5 + 3) % n for j in range(n)], number=n)
    heads = make_view(torch.stack((to_third, other)))
    text = Tokens.from_pieces([f"w{j}" for j in range(n)])
    known = FoundRoles.from_cards(
        [make_card("subject-verb", 0.9, 0.3, 0.8, head=h, direction="subject → verb") for h in (0, 1)]
    )
    seen = add_text_evidence(known, heads, text)
    assert [c.role for c in seen.cards_of_head(0, 0)] == ["one word for all", "subject-verb"]
    one, grammar = seen.cards_of_head(0, 0)
    assert (one.score, one.cases, one.pair[1]) == (1.0, n - 1, "w2")
    assert grammar.pair is None
    assert [c.role for c in seen.cards_of_head(0, 1)] == ["subject-verb"]
    assert seen.cards_of_head(0, 1)[0].pair is None
    # with an annotated sentence, its subject-verb pair is shown
    sentence = Sentence(text.words, {"nsubj": ((4, 11), (0, 7))})
    assert add_text_evidence(known, heads, text, sentence=sentence).cards_of_head(0, 1)[0].pair == (
        "w4",
        "w11",
        pytest.approx(1.0, abs=1e-5),
    )
    with pytest.raises(ValueError, match="sentence must have the words of the text, got 'a'"):
        add_text_evidence(known, heads, text, sentence=Sentence(("a",), {}))


def test_cases_of_word_pieces_in_a_long_text():
    n = 3001
    q = torch.randn(2, n, 4)
    heads = Heads(Call(q, q, q, Causal(), Dot()), Origin(q, is_self_attention=True))
    text = Tokens.from_pieces(tuple("p" * n), tuple(j // 2 for j in range(n)), tuple(f"w{j}" for j in range(1501)))
    found = find_roles_in_text(heads, text)
    cases = {c.role: c.cases for c in found.measured}
    # the first words of a causal model have no other key
    assert cases["self"] <= 2 * 512 and 500 < cases["one word for all"] < 511


def test_positional_refuses_other_inputs():
    heads = make_view(torch.full((1, 4, 4), 0.25))
    with pytest.raises(
        ValueError, match="text must have as many pieces as a layer has tokens that attend to themselves, got 3 pieces"
    ):
        find_roles_in_text({"a": heads}, Tokens.from_pieces(["a", "b", "c"]))
    with pytest.raises(ValueError, match=r"batch must be an integer in \[0, 0\], got 1"):
        find_roles_in_text(heads, batch=1)
    layer = MultiHeadAttention(8, 2)
    with capture(layer, metrics=["entropy"]) as seen:
        layer(torch.randn(1, 5, 8))
    with pytest.raises(ValueError, match=r"heads\[.*\] must be a Heads, got HeadMetrics; capture without metrics="):
        find_roles_in_text(seen)
    # cross-attention has no positional roles
    assert find_roles_in_text(make_view(torch.full((1, 3, 5), 0.2))).measured == []
