"""Texts that a model cannot read, and words that its heads cannot see, give no roles."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch
from role_examples import make_view

from polyhead import Causal, MultiHeadAttention, models
from polyhead.inspection.roles import corpus
from polyhead.inspection.roles.corpus import Sentence
from polyhead.inspection.roles.find_roles import find_roles
from polyhead.inspection.roles.text_evidence import find_roles_in_text
from polyhead.inspection.roles.text_model import TextModel
from polyhead.models import Tokens

tokenizers = pytest.importorskip("tokenizers", reason="pip install 'polyhead[inspect]'")

KNOWN = ["the", "cat", "dog", "bird", "saw", "chased", "found", "a", "small", "big", "red", "old"]


class PreviousToken(torch.nn.Module):
    """Causal heads that attend to the previous token, or to the token itself at the first position."""

    def __init__(self, vocab):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab, 64)
        self.attention = MultiHeadAttention(64, 1, bias=False)

    def forward(self, ids):
        place = torch.nn.functional.one_hot(torch.arange(ids.shape[-1]), 64).float()
        with torch.no_grad():
            self.attention.q_proj.weight.copy_(100 * torch.eye(64).roll(-1, 0))
            self.attention.k_proj.weight.copy_(torch.eye(64))
        return self.attention(place.expand(len(ids), -1, -1), over=Causal())[0]


@pytest.fixture
def tokenizer(tmp_path):
    """A tokenizer that knows a dozen words."""
    vocab = {word: number for number, word in enumerate(("[UNK]", *KNOWN))}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    made.save(str(tmp_path / "tokenizer.json"))
    return models.Tokenizer(tmp_path / "tokenizer.json")


@pytest.fixture
def text_model(tokenizer):
    return TextModel.from_tokenizer(PreviousToken(20), tokenizer)


def write_lines(folder, lines):
    (folder / "lines.txt").write_text("\n".join(lines) + "\n")
    return folder / "lines.txt"


def test_unknown_sentences_give_no_roles(text_model):
    found = find_roles(text_model)
    assert found.cards == found.measured == []
    left_out, not_measured = found.notes
    assert left_out.startswith(
        "sentences: 259 of 259 texts were left out; more than 20% of their words are not in the model's vocabulary. Pass sentences in "
        "words that the model knows, one per line (--corpus F,"
    )
    assert not_measured == "Roles were not measured: the model can read none of the sentences."


def test_roles_on_a_plain_text_and_on_the_sentences_of_pairs(text_model, tmp_path):
    lines = [
        "the small cat saw a big bird",
        "a dog chased the old red bird",
        "zebras graze and unicorns sleep here",
    ] * 9
    found = find_roles(text_model, sentences=corpus.read_plain_text(write_lines(tmp_path, lines)))
    assert found.notes == [
        "sentences: 9 of 27 texts were left out; more than 20% of their words are not in the model's vocabulary."
    ]
    (card,) = found.cards
    assert (card.role, card.measured_on, card.cases) == ("previous token", "18 sentences", 18 * 6)
    pairs = [Sentence(tuple(line.split()), {"r": ((3, 2),)}) for line in lines[:2]] * 20
    own = find_roles(text_model, pairs=pairs)
    assert own.cards_of_role("previous token")[0].measured_on == "40 sentences of pairs"
    assert own.cards_of_role("r", measured=True)[0].measured_on == "40 sentences of pairs"


def test_unknown_pieces_of_a_tokenizer_of_transformers(tokenizer, tmp_path):
    transformers = pytest.importorskip("transformers")
    fast = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
    encode_words = TextModel.from_tokenizer(PreviousToken(20), fast).encode_words
    assert encode_words(["the", "zebra"]).unknown_share == 0.5
    # the unknown token of GPT-2 is the end of a text, and its bytes are all known
    made = tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0, "<|endoftext|>": 1}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<|endoftext|>")
    assert TextModel.from_tokenizer(PreviousToken(20), fast).encode_words(["a", "a"]).unknown_id is None


def test_causal_heads_have_no_card_for_words_ahead(text_model):
    sentence = Sentence(("the", "small", "cat", "saw", "a", "bird"), {"det": ((0, 2), (4, 5)), "obj": ((5, 3),)})
    found = find_roles(text_model, sentences=[sentence])
    directions = {card.direction for card in found.measured if card.direction}
    assert directions == {"noun → determiner", "object → verb"}
    assert "next token" not in {card.role for card in found.measured}


def test_a_query_with_a_single_key_does_not_count():
    n = 12
    weights = torch.tril(torch.ones(n, n), -1)
    weights[0, 0] = 1.0
    weights = weights / weights.sum(-1, keepdim=True)
    found = find_roles_in_text(make_view(weights[None], Causal()), Tokens.from_pieces([f"w{i}" for i in range(n)]))
    measured = {card.role: card for card in found.measured}
    # the first token attends to itself by necessity, the others never do
    assert measured["self"].score == pytest.approx(0, abs=1e-6) and measured["self"].cases == n - 1
    assert measured["self"].pair is None
    assert measured["first token"].pair[:2] == ("w1", "w0")


def test_pairs_of_pieces_are_plain_text():
    weights = torch.eye(6)[[0, 0, 1, 2, 3, 4]]
    text = Tokens.from_pieces(["Ġthe", "Ġcat", "s", "Ġran", "Ġa", "way"], words=["the", "cat", "s", "ran", "a", "way"])
    found = find_roles_in_text(make_view(weights[None]), text)
    (previous,) = (card for card in found.measured if card.role == "previous token")
    assert previous.pair[:2] == ("cat", "the")
