"""The report: one HTML page that shows what heads do, opens from disk and loads nothing from the network."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from polyhead import _files
from polyhead._checks import WrongType, describe_type, short_repr
from polyhead.heads import Heads
from polyhead.inspection.measured_heads import MeasuredHeads
from polyhead.inspection.report.html_page import Page, build_html
from polyhead.inspection.report.image_layout import (
    coarsen_to_fit_page,
    encode_image_as_data_uri,
    find_image_layout,
    make_blank_image,
    shows_all_queries_and_keys,
)
from polyhead.inspection.report.page_data import (
    MAX_EDGES,
    ArrayBlobs,
    HeadIndex,
    JsonObject,
    PageLayer,
    layers_to_json,
    make_page_layer,
    score_head_interest,
)
from polyhead.inspection.roles.role_cards import Card
from polyhead.models import Tokens

Texts = Tokens | Sequence[str] | tuple[Tokens | Sequence[str], Tokens | Sequence[str]]


@torch.no_grad()
def report(
    heads: Heads | Mapping[str, Heads],
    path: str | os.PathLike[str] | None = None,
    *,
    texts: Texts | Mapping[str, Texts] | None = None,
    title: str | None = None,
    finding: str | None = None,
    initial_head: HeadIndex | None = None,
    cards: Iterable[Card] = (),
    notes: Iterable[str] = (),
    roles: Mapping[str, str] | None = None,
    batch: int = 0,
    image: Any = None,
    grid: Sequence[int] | None = None,
    at: int | Sequence[int] | None = None,
) -> Page:
    """Build a page that shows these heads, and write it to `path` if given.

    Args:
        heads: one view, or views by the names of their layers, in order.
        path: the file to write: completely or not at all.
        texts: `Tokens` or a list of words; a pair of these (queries, keys) for cross-attention; or a mapping from layers to them.
            By default tokens and nodes are numbered.
        title: the title of the page.
        finding: one sentence, shown at the top.
        initial_head: (layer, head) to select first.
        cards: roles of heads, as `find_roles` returns them.
        notes: further lines for the reader.
        roles: an explanation for each role.
        batch: the row of the batch to show.
        image: the model's input image, as `Heads.plot` takes it. Layers over its patches are drawn on it and must have no texts.
            Without it, layers over a two-dimensional `Grid` without texts are drawn on an empty background.
        grid: rows and columns of patches, such as (14, 14), for layers whose neighbourhood is not a `Grid`; surplus keys in
            front are special tokens.
        at: the patch to select first, (row, column), or the number of a token; by default the middle one. It refers to the layer of
            `initial_head`, or to the first layer on the image; the other layers show the same location.
    """
    if path is not None:
        _files.resolve_writable_path(path)
    measured = MeasuredHeads.wrap(heads, batch)
    _check_heads_and_titles(measured, title, finding)
    picture = _ImageArguments(image, grid, at)
    layers = picture.make_layers(measured, texts)
    cards, notes = _to_checked_list("cards", cards, Card), _to_checked_list("notes", notes, str)
    layers, shown_image = picture.fit_layers_on_page(layers, initial_head, notes)
    _check_heads_are_shown(layers, initial_head, cards)
    content, blobs = _build_page_data(layers, initial_head, cards, notes)
    content |= {
        "title": title or "Attention heads",
        "finding": finding,
        "roles": dict(roles or {}),
        "image": shown_image,
    }
    page = Page(build_html(content, blobs.texts))
    if path is not None:
        page.write(path)
    return page


def _check_heads_and_titles(measured: MeasuredHeads, title: object, finding: object) -> None:
    for argument, words in (("title", title), ("finding", finding)):
        if words is not None and not isinstance(words, str):
            raise WrongType(f"{argument} must be a str, got {describe_type(words)}")
    if not measured:
        raise ValueError("heads must have at least one layer, got an empty mapping; call the model inside capture")


def _check_heads_are_shown(layers: Sequence[PageLayer], initial_head: HeadIndex | None, cards: Sequence[Card]) -> None:
    """Raise if `initial_head` or a card names a head that is not shown."""
    known = {(layer.number, head) for layer in layers for head in layer.heads}
    if initial_head is not None and initial_head not in known:
        raise ValueError(
            f"initial_head must be (layer, head) of one of {len(layers)} layers, got {short_repr(initial_head)}"
        )
    for number, card in enumerate(cards):
        if (card.layer, card.head) not in known:
            raise ValueError(f"cards[{number}] must be about a head of the {len(layers)} layers, got {card.name}")


def _to_checked_list(name: str, items: Iterable[Any], kind: type) -> list[Any]:
    """A checked list of items of one type."""
    if isinstance(items, str) or not isinstance(items, Iterable):
        raise WrongType(f"{name} must be a list of {kind.__name__}, got {describe_type(items)}")
    items = list(items)
    for number, item in enumerate(items):
        if not isinstance(item, kind):
            raise WrongType(f"{name}[{number}] must be a {kind.__name__}, got {describe_type(item)}")
    return items


def _build_page_data(
    layers: Sequence[PageLayer], initial_head: HeadIndex | None, cards: Sequence[Card], notes: Sequence[str]
) -> tuple[JsonObject, ArrayBlobs]:
    """The part of the page's record that comes from the heads, and its arrays."""
    blobs = ArrayBlobs()
    first = [*([initial_head] if initial_head else []), *((card.layer, card.head) for card in cards)]
    records = layers_to_json(layers, first, blobs)
    if not first:
        ranks = {(r["number"], head): score_head_interest(r, head) for r in records for head in r["heads"]}
        first = [max(ranks, key=lambda pair: ranks[pair])]
    texts = _deduplicate_texts(layers, records)
    cards_shown = [{**card._asdict(), "name": card.name} for card in cards]
    notes = [*notes, *_make_edge_notes(records)]
    return {"initial_head": first[0], "notes": notes, "cards": cards_shown, "texts": texts, "layers": records}, blobs


def _make_edge_notes(records: Sequence[JsonObject]) -> list[str]:
    notes = []
    for record in records:
        if record.get("parallel"):
            notes.append(f"{record['name']}: parallel edges are shown as one, with the sum of their weights.")
        if record.get("edges", 0) > MAX_EDGES:
            notes.append(f"{record['name']}: the {MAX_EDGES:,} strongest of {record['edges']:,} edges were kept.")
    return notes


def _deduplicate_texts(layers: Sequence[PageLayer], records: Sequence[JsonObject]) -> list[JsonObject]:
    """All texts of the layers, each once; the records get the numbers of theirs."""
    texts: list[JsonObject] = []
    for layer, record in zip(layers, records, strict=True):
        for side, tokens in (("rows", layer.rows), ("columns", layer.columns)):
            text = None if tokens is None else _text_to_json(tokens)
            if text is not None and text not in texts:
                texts.append(text)
            record[side] = None if text is None else texts.index(text)
    return texts


def _text_to_json(tokens: Tokens) -> JsonObject:
    """A text; `labels` are its pieces as plain text, None if they are plain text already."""
    labels = None if tokens.labels == tokens.pieces else tokens.labels
    return {"pieces": tokens.pieces, "labels": labels, "word_of": tokens.word_of, "words": tokens.words}


class _ImageArguments(NamedTuple):
    """What `report` was told about an image; all None for texts and graphs."""

    image: Any
    grid: Sequence[int] | None
    at: int | Sequence[int] | None

    def make_layers(self, measured: MeasuredHeads, texts: Texts | Mapping[str, Texts] | None) -> list[PageLayer]:
        """The layers of the page, each with its texts or its place on the image."""
        if self.image is None and self.grid is not None:
            raise ValueError(f"grid must be None without an image, got {short_repr(self.grid)}; pass image= too")
        layers = []
        for number, (name, layer) in enumerate(measured.layers.items()):
            text = texts.get(name) if isinstance(texts, Mapping) else texts
            on_image = self.image is not None or (text is None and shows_all_queries_and_keys(layer.heads))
            layout = find_image_layout(layer.heads, self.grid) if on_image else None
            if layout is not None and text is not None:
                raise ValueError(
                    f"texts must leave out {name!r}, which is drawn on the image: its patches are named by row and column; pass a "
                    "mapping with the other layers"
                )
            names = layout.token_names() if layout is not None else _query_and_key_tokens(name, layer.heads, text)
            layers.append(make_page_layer(number, name, layer, measured.batch, names, layout))
        return layers

    def fit_layers_on_page(
        self, layers: list[PageLayer], initial_head: HeadIndex | None, notes: list[str]
    ) -> tuple[list[PageLayer], JsonObject | None]:
        """The layers in blocks of patches that fit on a page, and the image as the page knows it. Adds a note about blocks."""
        layouts = {layer.name: layer.image for layer in layers if layer.image is not None}
        if not layouts:
            self._check_no_image_arguments(layers)
            return layers, None
        layouts = coarsen_to_fit_page(layouts, {layer.name: len(layer.heads) for layer in layers})
        block = next(iter(layouts.values())).block
        if block > 1:
            notes.append(
                f"Patches are shown in blocks of {block} x {block} to fit on a page. The weight of a block is summed over its keys and "
                "averaged over its queries."
            )
            layers = [layer.with_layout(layouts.get(layer.name)) for layer in layers]
        # the layer of `initial_head` if it is on the image, else the first one that is
        placed = [layer for layer in layers if layer.image is not None]
        first = next(
            (layer for layer in placed if initial_head is not None and layer.number == initial_head[0]), placed[0]
        )
        layout = layouts[first.name]
        shown_image = make_blank_image(layout) if self.image is None else encode_image_as_data_uri(self.image)
        return layers, {**shown_image, "first": layout.find_initial_query(self.at), "of": first.number}

    def _check_no_image_arguments(self, layers: Sequence[PageLayer]) -> None:
        """Raise if there is an image, or a patch of one, and no layer to draw on it."""
        if self.image is not None:
            shapes = ", ".join(f"{layer.name} {tuple(layer.view.shape)}" for layer in layers[:3])
            raise ValueError(
                f"image must have a layer over a grid of rows and columns, got {shapes}; pass grid=(height, width)"
            )
        if self.at is not None:
            raise ValueError(f"at must be None without an image, got {short_repr(self.at)}; pass image= too")


def _query_and_key_tokens(name: str, view: Heads, texts: Texts | None) -> tuple[Tokens | None, Tokens | None]:
    """The tokens of a layer's queries and keys; (None, None) if rows and columns share one unnamed text."""
    queries, keys = len(view.part.indices("queries")), len(view.part.indices("keys"))
    if texts is None:
        return None, None
    if isinstance(texts, tuple) and len(texts) == 2 and not isinstance(texts[0], str):
        rows, columns = (_as_tokens(text) for text in texts)
    else:
        rows = columns = _as_tokens(texts)
    if rows is columns and len(columns) == keys > queries:
        # with a cache, the queries are the last keys
        begin = keys - queries
        rows = Tokens.from_pieces(rows.pieces[begin:], rows.word_of[begin:], rows.words)
    for text, number, axis in ((rows, queries, "queries"), (columns, keys, "keys")):
        if len(text) != number:
            raise ValueError(f"texts of {name!r} must have {number} pieces, one per {_SINGULAR[axis]}, got {len(text)}")
        if len(text.word_of) != number:
            raise ValueError(f"texts must have a word_of of {number} entries, one per piece, got {len(text.word_of)}")
    return rows, columns


_SINGULAR = {"queries": "query", "keys": "key"}


def _as_tokens(text: Any) -> Tokens:
    if isinstance(text, Tokens):
        return text
    if isinstance(text, (list, tuple)) and all(isinstance(word, str) for word in text):
        return Tokens.from_pieces(text)
    raise ValueError(
        "texts must be Tokens, as a tokenizer returns them, a list of words, a pair of these for cross-attention, or a mapping from "
        f"layers to them, got {type(text).__name__}"
    )
