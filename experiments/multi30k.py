"""Multi30k, English to French: reading it, pieces of words, and batches of similar length."""

from __future__ import annotations

import gzip
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import common
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor

from polyhead import Padding
from polyhead.inspection.roles.word_attention import Text

SPLITS = ("train", "val", "test_2016_flickr")
START, STOP, UNKNOWN = range(3)
# of a translation's tokens, at most; the longest in the training data has 59
LONGEST = 70


class Pairs(NamedTuple):
    """Sentences and their translations, as they stand in the files."""

    source: list[str]
    target: list[str]


class Corpus(NamedTuple):
    """The three splits, and what turns their sentences into numbers."""

    splits: dict[str, Pairs]
    tokenizer: Tokenizer
    digest: str
    """Of all sentences and pieces: another one means other data."""

    def encoded(self, split: str) -> tuple[list[list[int]], list[list[int]]]:
        """The ids of sources and targets, each with its end."""
        pairs = self.splits[split]
        return self.ids(pairs.source), self.ids(pairs.target)

    def ids(self, sentences: Sequence[str]) -> list[list[int]]:
        return [[*one.ids, STOP] for one in self.tokenizer.encode_batch(list(sentences))]

    def text(self, ids: Sequence[int]) -> str:
        """The sentence of ids, up to its end."""
        ids = list(ids)
        return self.tokenizer.decode(ids[: ids.index(STOP)] if STOP in ids else ids)

    def words(self, ids: Sequence[int]) -> Text:
        """Pieces and the words they are part of; a word begins where a piece begins with a space, or at punctuation."""
        pieces: list[str] = []
        words: list[str] = []
        word_of: list[int | None] = []
        for one in ids:
            piece = self.tokenizer.id_to_token(one) or ""
            shown = piece.replace("▁", "")
            if one in (START, STOP):
                word_of.append(None)
            else:
                # a space may be a piece of its own
                if not words or piece.startswith("▁") or (words[-1] and not (words[-1] + shown).isalnum()):
                    words.append("")
                words[-1] += shown
                word_of.append(len(words) - 1)
            pieces.append(shown)
        return Text(tuple(pieces), tuple(word_of), tuple(words))


class Batch(NamedTuple):
    """Ids `(sentences, tokens)` of sources and targets, filled up to the longest, and how many of each are real."""

    source: Tensor
    source_over: Padding
    target: Tensor
    target_over: Padding
    next: Tensor
    """The target's token after each real one, flat."""
    real: Tensor
    """Where the real tokens of the targets are among all, flat."""
    rows: list[int]
    """Which sentences these are."""


def read(folder: Path, cache: Path, pieces: int) -> Corpus:
    """The splits in `folder/multi30k-en-fr`, and the pieces of words: as kept in a folder, or learned now and kept there."""
    splits = {
        split: Pairs(*(_lines(folder, f"{split}.{language}.gz") for language in ("en", "fr"))) for split in SPLITS
    }
    for split, pairs in splits.items():
        if len(pairs.source) != len(pairs.target):
            raise common.DataError(
                f"{folder}: {split} has {len(pairs.source)} English and {len(pairs.target)} French sentences; they must be pairs"
            )
    said = "\n".join(line for pairs in splits.values() for lines in pairs for line in lines)
    digest = hashlib.sha256(f"{pieces}\n{said}".encode()).hexdigest()[:12]
    file = cache / f"tokenizer-{digest}.json"
    if not file.exists():
        common.write_whole(file, learned([*splits["train"].source, *splits["train"].target], pieces).to_str().encode())
    return Corpus(splits, Tokenizer.from_file(str(file)), digest)


def _lines(folder: Path, name: str) -> list[str]:
    file = folder / "multi30k-en-fr" / name
    try:
        return gzip.decompress(file.read_bytes()).decode().splitlines()
    except FileNotFoundError:
        reason = f"there is no {file}"
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = f"{file} cannot be read: {error}"
    files = ", ".join(f"{split}.en.gz" for split in SPLITS)
    raise common.DataError(
        f"{reason}\nIt is part of task 1 of Multi30k, https://github.com/multi30k/dataset (data/task1/raw). The folder "
        f"multi30k-en-fr should hold {files} and the same with .fr.gz, one sentence a line. Pass the folder that "
        "multi30k-en-fr is in as --data."
    )


def learned(sentences: Sequence[str], pieces: int) -> Tokenizer:
    """Byte-pair encoding of both languages together (Sennrich 2016); a piece that begins a word begins with its space."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.NFC(), normalizers.Replace("  ", " "), normalizers.Strip()]
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=pieces, min_frequency=2, special_tokens=["<s>", "</s>", "<unk>"], show_progress=False
    )
    tokenizer.train_from_iterator(sentences, trainer)
    return tokenizer


def batch(sources: Sequence[list[int]], targets: Sequence[list[int]], rows: Sequence[int]) -> Batch:
    """These sentences side by side. The target begins with a start and lacks its end."""
    source, source_length = padded([sources[row] for row in rows])
    whole, length = padded([[START, *targets[row]] for row in rows])
    target, length = whole[:, :-1].contiguous(), length - 1
    real = (torch.arange(target.shape[1]) < length[:, None]).flatten().nonzero()[:, 0]
    following = whole[:, 1:].flatten()[real]
    return Batch(source, Padding(source_length), target, Padding(length), following, real, list(rows))


def padded(ids: Sequence[list[int]]) -> tuple[Tensor, Tensor]:
    longest = max(map(len, ids))
    return torch.tensor([one + [STOP] * (longest - len(one)) for one in ids]), torch.tensor([len(one) for one in ids])


def grouped(sources: Sequence[list[int]], targets: Sequence[list[int]], tokens: int) -> list[list[int]]:
    """Numbers of sentences in groups of similar length, of at most so many tokens of sources or targets, filled up."""
    return _cut(
        sorted(range(len(sources)), key=lambda row: (len(targets[row]), len(sources[row]))), sources, targets, tokens
    )


def shuffled(
    sources: Sequence[list[int]], targets: Sequence[list[int]], tokens: int, draw: torch.Generator
) -> list[list[int]]:
    """The same in an order drawn anew, of sentences whose neighbours are drawn anew too."""
    noise = torch.rand(len(sources), generator=draw).tolist()
    order = sorted(range(len(sources)), key=lambda row: (len(targets[row]), len(sources[row]) + 4 * noise[row]))
    groups = _cut(order, sources, targets, tokens)
    return [groups[place] for place in torch.randperm(len(groups), generator=draw).tolist()]


def _cut(
    order: Sequence[int], sources: Sequence[list[int]], targets: Sequence[list[int]], tokens: int
) -> list[list[int]]:
    groups: list[list[int]] = []
    longest = 0
    for row in order:
        longest = max(longest, len(sources[row]), len(targets[row]))
        if not groups or longest * (len(groups[-1]) + 1) > tokens:
            groups.append([])
            longest = max(len(sources[row]), len(targets[row]))
        groups[-1].append(row)
    return groups
