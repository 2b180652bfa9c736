"""The report: one HTML page that shows what heads do, opens from disk and loads nothing from the network."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from polyhead import _files
from polyhead._checks import WrongType, describe_type, short_repr
from polyhead.heads import Heads
from polyhead.heads.grid_view import GridArgument, read_grid_argument, suggest_grids
from polyhead.inspection.capture.capture import RECORDED_FUNCTIONS, Capture
from polyhead.inspection.measured_heads import MeasuredHeads
from polyhead.inspection.report.html_page import Page, build_html
from polyhead.inspection.report.image_layout import (
    ImageLayout,
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
from polyhead.inspection.report.page_texts import PageTexts, Texts
from polyhead.inspection.roles.role_cards import Card, FoundRoles
from polyhead.inspection.view_properties import count_batch_entries
from polyhead.models import Tokens


@torch.no_grad()
def report(
    heads: Heads | Mapping[str, Heads] | Sequence[Heads],
    path: str | os.PathLike[str] | None = None,
    *,
    texts: Texts | Mapping[str, Texts] | None = None,
    title: str | None = None,
    finding: str | None = None,
    initial_head: HeadIndex | None = None,
    cards: Iterable[Card] | FoundRoles = (),
    notes: Iterable[str] = (),
    roles: Mapping[str, str] | None = None,
    batch: int = 0,
    image: Any = None,
    grid: GridArgument | None = None,
    at: int | Sequence[int] | None = None,
) -> Page:
    """Build a page that shows these heads, and write it to `path` if given.

    Args:
        heads: one view, or views by the names of their layers, in order; a list names them "layer 0" and so on.
        path: the file to write: completely or not at all.
        texts: `Tokens`, a list of words, or the output of a fast tokenizer of transformers; a pair of these, (queries, keys) for
            cross-attention and (target, source) for an encoder-decoder, whose self-attentions get the one of their length; or a
            mapping from layers to them. By default tokens and nodes are numbered.
        title: the title of the page.
        finding: one sentence, shown at the top.
        initial_head: (layer, head) to select first.
        cards: roles of heads: what `find_roles` returns, or some of its cards.
        notes: further lines for the reader.
        roles: an explanation for each role.
        batch: the row of the batch to show.
        image: the model's input image, as `Heads.plot` takes it. Layers over its patches are drawn on it; texts are for the queries
            of cross-attention from words to patches. Without it, layers over a two-dimensional `Grid` without texts are drawn on
            an empty background.
        grid: rows and columns of patches, such as (14, 14), for layers whose neighbourhood is not a `Grid`; up to 16 surplus keys in
            front are special tokens. `Grid(14, 14, prefix=77)` for more of them.
        at: the patch to select first, (row, column), or the number of a token; by default the middle one. It refers to the layer of
            `initial_head`, or to the first layer on the image; the other layers show the same location.
    """
    if path is not None:
        _files.resolve_writable_path(path)
    measured = MeasuredHeads.wrap(heads, batch)
    _check_heads_and_titles(heads, title, finding)
    cards = cards.cards if isinstance(cards, FoundRoles) else cards
    cards, notes = _to_checked_list("cards", cards, Card), _to_checked_list("notes", notes, str)
    picture = _ImageArguments(image, grid, at)
    layers = picture.make_layers(measured, texts, notes)
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


def _check_heads_and_titles(heads: object, title: object, finding: object) -> None:
    for argument, words in (("title", title), ("finding", finding)):
        if words is not None and not isinstance(words, str):
            raise WrongType(f"{argument} must be a str, got {describe_type(words)}")
    if isinstance(heads, Capture) and not heads and heads.unrecorded:
        raise ValueError(f"heads must have at least one layer, got {heads!r}; {RECORDED_FUNCTIONS}")
    if isinstance(heads, (Mapping, Sequence)) and not heads:
        raise ValueError(
            "heads must have at least one layer, got an empty mapping or list; call the model inside capture"
        )


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
    grid: GridArgument | None
    at: int | Sequence[int] | None

    def make_layers(
        self, measured: MeasuredHeads, texts: Texts | Mapping[str, Texts] | None, notes: list[str]
    ) -> list[PageLayer]:
        """The layers of the page, each with its texts or its place on the image. Adds notes about rows of the batch."""
        if self.image is None and self.grid is not None:
            raise ValueError(f"grid must be None without an image, got {short_repr(self.grid)}; pass image= too")
        self._check_grid_is_used(measured)
        page_texts = PageTexts(texts, measured, measured.batch)
        windows = self._find_windows(measured)
        layers, unused = [], []
        for number, (name, layer) in enumerate(measured.layers.items()):
            layout = None if name in windows else self._find_layout(name, layer.heads, page_texts)
            if layout is not None and layout.words is None and page_texts.has_text(name):
                unused.append(name)
            names = layout.token_names() if layout is not None else page_texts.tokens(name, layer.heads)
            layers.append(make_page_layer(number, name, layer, measured.batch, names, layout))
        # a text may be for some layers, such as those from words to patches, but not for none
        if len(unused) == len(layers) or any(map(page_texts.is_named, unused)):
            raise _text_of_patches_error(next(filter(page_texts.is_named, unused), unused[0]))
        self._add_batch_notes(layers, windows, measured, notes)
        return layers

    def _check_grid_is_used(self, measured: MeasuredHeads) -> None:
        """Raise if `grid` contradicts the neighbourhoods of all layers."""
        own = [view.over.lattice.sizes if view.over.lattice is not None else None for view in measured.values()]
        if self.grid is not None and None not in own and read_grid_argument(self.grid)[0] not in own:
            raise ValueError(
                f"grid must be {own[0]}, the grid of the attention's keys, got {short_repr(self.grid)}; leave it out"
            )

    def _find_layout(self, name: str, view: Heads, texts: PageTexts) -> ImageLayout | None:
        """The place of a layer on the image; None for a layer that is not over patches."""
        if self.image is None and (texts.has_text(name) or not shows_all_queries_and_keys(view)):
            return None
        layout = find_image_layout(view, self.grid)
        if layout is None or not texts.has_text(name):
            return layout
        words = texts.words_of_queries(name, view)
        if words is not None:
            return layout.with_words(words)
        if view.over.lattice is None and texts.fits_both_axes(name, view):
            # a text that happens to have as many tokens as there are patches
            if texts.is_named(name):
                return None
            raise ValueError(
                f"texts must be a mapping by layer: {name!r} may be over the text or over the patches of the image, got one text; pass "
                f"texts={{{name!r}: …}}, or leave it out of the mapping"
            )
        return layout

    def _find_windows(self, measured: MeasuredHeads) -> dict[str, int]:
        """The layers whose batch has more rows than that of another layer, as windows of an image do; with the number of rows."""
        rows = {name: count_batch_entries(view) for name, view in measured.items()}
        if self.image is None or not rows:
            return {}
        return {
            name: number
            for name, number in rows.items()
            if number > min(rows.values()) and find_image_layout(measured[name], self.grid) is not None
        }

    def _add_batch_notes(
        self, layers: Sequence[PageLayer], windows: Mapping[str, int], measured: MeasuredHeads, notes: list[str]
    ) -> None:
        if windows:
            fewest = min(count_batch_entries(view) for view in measured.values())
            others = f" and {len(windows) - 3} more" if len(windows) > 3 else ""
            notes.append(
                f"Not drawn on the image: {', '.join(list(windows)[:3])}{others}. The batch has up to {max(windows.values())} rows there "
                f"and {fewest} elsewhere: its rows are windows or other parts of the image. Row {measured.batch} is shown."
            )
        on_image = [layer for layer in layers if layer.image is not None]
        rows = max((count_batch_entries(layer.measured.heads) for layer in on_image), default=1)
        if self.image is not None and rows > 1:
            notes.append(
                f"The image is drawn under row {measured.batch} of {rows} of the batch. If the rows are windows of the image, the "
                "weights are those of one window, not of the whole image."
            )

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
            keys = layers[0].query_and_key_counts[1]
            raise ValueError(
                f"image must have a layer over a grid of rows and columns, got {shapes}; {'' if layers[0].is_graph else suggest_grids(keys)}"
                "pass grid=(height, width)"
            )
        if self.at is not None:
            raise ValueError(f"at must be None without an image, got {short_repr(self.at)}; pass image= too")


def _text_of_patches_error(name: str) -> ValueError:
    return ValueError(
        f"texts must leave out {name!r}, which is drawn on the image: its patches are named by row and column; pass a mapping with the "
        "other layers, or the words of the queries of a cross-attention"
    )
