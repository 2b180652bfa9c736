"""Find the roles of a model's heads on annotated sentences, and its induction heads on repeated random tokens."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch
from jaxtyping import Int
from torch import Tensor, nn

from polyhead._checks import WrongType, check_integer, check_integers, describe_type, is_integer
from polyhead.inspection.capture.capture import NO_ATTENTION_SEEN, Capture
from polyhead.inspection.progress import Progress, wrap_with_progress
from polyhead.inspection.roles.corpus import Sentence, load_shipped_sentences
from polyhead.inspection.roles.corpus_reading import (
    CorpusReading,
    HeadList,
    SpecialIdsBeforeAndAfter,
    iterate_weight_blocks,
    list_self_attention_heads,
)
from polyhead.inspection.roles.role_cards import FoundRoles, make_cards
from polyhead.inspection.roles.role_scores import ScoreSums
from polyhead.inspection.roles.role_table import ROLES, Role, make_role_of_own_pair
from polyhead.inspection.roles.text_model import RunModel, TextModel, evaluation_mode, record_heads

# Limits of `find_induction_heads`: ids to draw from; tokens per text, and texts.
_MAX_IDS, _MAX_DRAWN = 2**24, 2**20
# Random tokens that are read twice.
_REPEATED_TOKENS = 25
_RANDOM_TOKENS_NAME = "repeated random tokens"
NO_READABLE_SENTENCE = "Roles were not measured: the model can read none of the sentences."


def find_roles(
    model: TextModel,
    *,
    sentences: Sequence[Sentence] | None = None,
    pairs: Sequence[Sentence] = (),
    gap: Sequence[Sentence] = (),
    progress: Progress | None = None,
) -> FoundRoles:
    """Let a model read annotated sentences, and find the roles of its heads.

    Args:
        model: the model and its tokenizer: `TextModel.from_tokenizer(*models.load_default())`.
        sentences: measure positions, spread and grammar on these, `corpus.read_treebank(path)`, or only positions and spread,
            `corpus.read_plain_text(path)`; by default on those shipped. Sentences of which more than 20 % of the pieces are unknown to
            the tokenizer are left out.
        pairs: sentences with your own pairs, `corpus.read_own_pairs(path)`: each name is a role. If the model can read none of
            `sentences`, positions and spread are measured on these.
        gap: pronouns and two names, `corpus.read_gap(path)`.
        progress: wraps the list of batches, as `rich.progress.track` and `tqdm` do.

    Raises:
        ValueError: if there is nothing to read, or the model makes no attention call. If all pieces are unknown to the tokenizer, no
            role is found, and `notes` say so.
    """
    if not isinstance(model, TextModel):
        raise ValueError(
            f"model must be a TextModel, got {describe_type(model)}; TextModel.from_tokenizer(model, tokenizer) makes one"
        )
    sentences = load_shipped_sentences() if sentences is None else sentences
    of_names = lambda role: role.relation is not None and role.relation.among == "two names"
    grammar = [role for role in ROLES if role.relation is not None and not of_names(role)]
    corpora = (
        (sentences, grammar, "sentences"),
        (pairs, _make_roles_of_own_pairs(pairs), "pairs"),
        (gap, list(filter(of_names, ROLES)), "GAP"),
    )
    with torch.no_grad(), evaluation_mode(model.model):
        every = [CorpusReading(model, *corpus) for corpus in corpora if corpus[0]]
        readings = [reading for reading in every if reading.batches]
        if not readings:
            notes = [note for reading in every for note in reading.notes]
            if any(reading.unknown for reading in every):
                return FoundRoles.from_cards([], [*notes, NO_READABLE_SENTENCE])
            raise ValueError(" ".join(("sentences must have a text that the model can read, got none.", *notes)))
        readings[0].measures_positions = True
        for reading in readings:
            _read_all_batches(reading, progress)
        notes = [note for reading in every for note in reading.notes]
        induced = _score_induction_on_corpus_words(model, readings[0])
    if not readings[0].heads:
        raise ValueError(NO_ATTENTION_SEEN)
    return _combine_readings(readings, induced, notes)


def _make_roles_of_own_pairs(pairs: Sequence[Sentence]) -> list[Role]:
    names = list(dict.fromkeys(name for sentence in pairs for name in sentence.pairs))
    taken = sorted({role.name for role in ROLES} & set(names))
    if taken:
        raise ValueError(f"pairs must have names that are not roles already, got {', '.join(taken)}; rename them")
    return [make_role_of_own_pair(name) for name in names]


def _read_all_batches(reading: CorpusReading, progress: Progress | None) -> None:
    for batch in wrap_with_progress(reading.batches, progress):
        reading.read_batch(batch)


def _score_induction_on_corpus_words(model: TextModel, reading: CorpusReading) -> ScoreSums | None:
    """The sums of induction scores on the words of a corpus; None if the model reads too few tokens, or too few different ones."""
    around, vocabulary = reading.special_ids_before_and_after, reading.vocabulary()
    room = (model.positions or 2**31) - sum(map(len, around))
    length = min(_REPEATED_TOKENS, room // 2)
    if min(length, len(vocabulary)) < 2:
        return None
    return _score_induction(model.record_heads, vocabulary, around, length, 4)[1]


def _combine_readings(readings: Sequence[CorpusReading], induced: ScoreSums | None, notes: Iterable[str]) -> FoundRoles:
    """The cards of all readings; their intervals hold for all comparisons together."""
    first = readings[0]
    family = sum(reading.count_comparisons() for reading in readings) + len(first.heads)
    cards = make_cards(first.heads, first.position_sums, family, first.measured_on)
    if induced is not None:
        cards += make_cards(first.heads, {"induction": induced}, family, _RANDOM_TOKENS_NAME)
    for reading in readings:
        cards += reading.make_pair_cards(family)
    return FoundRoles.from_cards(cards, notes)


def find_induction_heads(
    model: nn.Module,
    ids: Sequence[int] | int,
    *,
    run: RunModel | None = None,
    length: int = _REPEATED_TOKENS,
    rows: int = 8,
) -> FoundRoles:
    """Find the induction heads of a model (Olsson 2022): it reads random tokens twice.

    The score is the mean weight from a token's second occurrence on the token after its first one. The baseline is the weight at the
    same positions in tokens that do not repeat: a head that attends to a fixed offset is not an induction head.

    Args:
        model: any model that `capture` records, called on ids (batch, tokens).
        ids: the ids to draw from; an integer n means 0 to n - 1.
        run: calls the model, if the model itself does not take ids.
        length: how many tokens are drawn; twice as many are read.
        rows: how many texts are read.
    """
    if not isinstance(model, nn.Module):
        raise WrongType(
            f"model must be a torch.nn.Module, got {describe_type(model)}{'; pass its .model' if hasattr(model, 'model') else ''}"
        )
    if run is not None and not callable(run):
        raise WrongType(f"run must be a function of ids, got {describe_type(run)}")
    vocabulary = (
        torch.arange(check_integer("ids", ids, 1, _MAX_IDS))
        if is_integer(ids)
        else torch.tensor(check_integers("ids", ids, 0))
    )
    if not len(vocabulary):
        raise ValueError("ids must be 1 or more to draw from, got none")
    length, rows = check_integer("length", length, 2, _MAX_DRAWN), check_integer("rows", rows, 1, _MAX_DRAWN)

    def record(drawn: Tensor) -> Capture:
        try:
            return record_heads(model, run, drawn)
        except (RuntimeError, TypeError, IndexError, ValueError) as error:
            raise ValueError(
                f"model must take ids of shape {tuple(drawn.shape)} up to {int(drawn.max())}, got {describe_type(model)}, which raised: "
                f"{error!s:.300}; pass other ids, a smaller length, or run="
            ) from error

    with torch.no_grad(), evaluation_mode(model):
        heads, sums = _score_induction(record, vocabulary, ((), ()), length, rows)
    if not heads:
        raise ValueError(
            f"model must make attention calls that `capture` records, got {describe_type(model)}: {NO_ATTENTION_SEEN}"
        )
    return FoundRoles.from_cards(make_cards(heads, {"induction": sums}, len(heads), _RANDOM_TOKENS_NAME))


def _score_induction(
    record: Callable[[Tensor], Capture],
    vocabulary: Int[Tensor, " ids"],
    around: SpecialIdsBeforeAndAfter,
    length: int,
    rows: int,
) -> tuple[HeadList, ScoreSums]:
    """Sums of the weight from each repeated token to the token after its first occurrence.

    The baseline is the weight at the same positions in unrepeated text.
    """
    generator = torch.Generator().manual_seed(0)
    # no token twice if there are enough, so that the previous occurrence is unique
    bag = vocabulary.repeat(-(-length // len(vocabulary)))
    draw = lambda: torch.stack([bag[torch.randperm(len(bag), generator=generator)[:length]] for _ in range(rows)])
    first, other = draw(), draw()
    before, after = (torch.tensor(ids, dtype=torch.long).expand(rows, -1) for ids in around)
    query = before.shape[1] + length + torch.arange(length - 1)
    sums = []
    for second in (first, other):
        ids = torch.cat((before, first, second, after), 1)
        seen = record(ids)
        masses = [block.weights[:, :, query, query - length + 1] for block in iterate_weight_blocks(seen, ids.shape[1])]
        sums.append(torch.cat([mass.double().sum((0, 2)) for mass in masses]) if masses else torch.zeros(0))
    cases = torch.full_like(sums[0], rows * (length - 1), dtype=torch.long)
    heads = list_self_attention_heads(seen, ids.shape[1])
    return heads, ScoreSums(sums[0], cases.double(), sums[1], cases)
