"""Multi30k, English to French: reading, word pieces, and batches of similar length."""

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
from polyhead.models import Tokens

SPLITS = ("train", "val", "test_2016_flickr")
START, STOP, UNKNOWN = range(3)
# the largest number of tokens of a translation; the longest in the training data has 59
LONGEST = 70


class Pairs(NamedTuple):
    """Sentences and their translations, as in the files."""

    source: list[str]
    target: list[str]


class Corpus(NamedTuple):
    """The three splits, and their tokenizer."""

    splits: dict[str, Pairs]
    tokenizer: Tokenizer
    digest: str
    """Hash of all sentences and pieces; it identifies the data."""

    def encoded(self, split: str) -> tuple[list[list[int]], list[list[int]]]:
        """The ids of sources and targets, each with its end token."""
        pairs = self.splits[split]
        return self.ids(pairs.source), self.ids(pairs.target)

    def ids(self, sentences: Sequence[str]) -> list[list[int]]:
        return [[*one.ids, STOP] for one in self.tokenizer.encode_batch(list(sentences))]

    def text(self, ids: Sequence[int]) -> str:
        """The text of ids, up to the end token."""
        ids = list(ids)
        return self.tokenizer.decode(ids[: ids.index(STOP)] if STOP in ids else ids)

    def words(self, ids: Sequence[int]) -> Tokens:
        """Pieces and their words; a word begins at a piece that begins with a space, or at punctuation."""
        pieces: list[str] = []
        words: list[str] = []
        word_of: list[int | None] = []
        for one in ids:
            piece = self.tokenizer.id_to_token(one) or ""
            shown = piece.replace("▁", "")
            if one in (START, STOP):
                word_of.append(None)
            else:
                # a space may be a separate piece
                if not words or piece.startswith("▁") or (words[-1] and not (words[-1] + shown).isalnum()):
                    words.append("")
                words[-1] += shown
                word_of.append(len(words) - 1)
            pieces.append(shown)
        return Tokens(torch.tensor(ids), tuple(pieces), tuple(word_of), tuple(words))


class Batch(NamedTuple):
    """Ids `(sentences, tokens)` of sources and targets, padded to the longest, and the number of real ones."""

    source: Tensor
    source_over: Padding
    target: Tensor
    target_over: Padding
    next: Tensor
    """The next target token after each real one, flat."""
    real: Tensor
    """Indices of the real target tokens among all, flat."""
    rows: list[int]
    """The numbers of the sentences."""


def read(folder: Path, cache: Path, pieces: int) -> Corpus:
    """Read the splits in `folder/multi30k-en-fr`, and the tokenizer: read from a folder, or trained now and saved there."""
    splits = {
        split: Pairs(*(_lines(folder, f"{split}.{language}.gz") for language in ("en", "fr"))) for split in SPLITS
    }
    for split, pairs in splits.items():
        if len(pairs.source) != len(pairs.target):
            raise common.DataError(
                f"{folder}: {split} has {len(pairs.source)} English and {len(pairs.target)} French sentences; the numbers must be equal"
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
        reason = f"{file} does not exist"
    except (OSError, EOFError, UnicodeDecodeError) as error:
        reason = f"{file} cannot be read: {error}"
    files = ", ".join(f"{split}.en.gz" for split in SPLITS)
    raise common.DataError(
        f"{reason}\nIt is part of task 1 of Multi30k, https://github.com/multi30k/dataset (data/task1/raw). The folder "
        f"multi30k-en-fr must contain {files} and the same with .fr.gz, one sentence per line. Pass the folder that "
        "contains multi30k-en-fr as --data."
    )


def learned(sentences: Sequence[str], pieces: int) -> Tokenizer:
    """Byte-pair encoding of both languages (Sennrich 2016); the first piece of a word includes the space before it."""
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
    """A batch of these sentences. Targets begin with a start token and have no end token."""
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
    """Sentence numbers in groups of similar length, with at most `tokens` padded tokens of sources or targets."""
    return _cut(
        sorted(range(len(sources)), key=lambda row: (len(targets[row]), len(sources[row]))), sources, targets, tokens
    )


def shuffled(
    sources: Sequence[list[int]], targets: Sequence[list[int]], tokens: int, draw: torch.Generator
) -> list[list[int]]:
    """The same in a new random order, with new random groups."""
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
