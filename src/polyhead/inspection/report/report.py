"""The report: one page of HTML that shows what heads do, opens from disk and asks the network for nothing."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from typing import Any

import torch

from polyhead import _files
from polyhead._checks import WrongType, kind_of, shown
from polyhead.heads import Heads
from polyhead.inspection.report.image_layout import blank, coarse, embedded, entire, imaged
from polyhead.inspection.report.page_data import EDGES, Blobs, Layer, layer_of, layers_record, telling
from polyhead.inspection.roles.roles import Card
from polyhead.inspection.roles.word_attention import Text

Texts = Text | tuple[Text, Text]
# Words, or what a tokenizer gives: anything with pieces, word_of and words.
Readable = Any
# In the order in which they are joined: each uses what stands before it.
_SCRIPTS = (
    "data.js", "colour.js", "state.js", "words_and_pieces.js", "drawing_helpers.js", "mosaic.js", "sentence.js", "heatmap.js", "head_panel.js", "weight_explanation.js",
    "output_vectors.js", "graph.js", "image.js", "export.js", "input.js", "main.js",
)  # fmt: skip


class Page:
    """A page of HTML, whole in itself. At the end of a notebook's cell it shows itself, in a frame of its own."""

    def __init__(self, text: str) -> None:
        self.html = text

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the page whole or not at all: where it fails, an older file stays as it was.

        A symbolic link is followed. What is no regular file, such as a device, is refused.
        """
        # half a character, as of a file's name that is no text, is written as its number, which JSON reads
        _files.write_whole(path, self.html.encode(errors="backslashreplace"))

    def __repr__(self) -> str:
        return f"Page({len(self.html) / 1e6:.1f} MB; write(path) writes it, a notebook shows it)"

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts allow-downloads" title="Attention heads" '
            'style="width:100%;height:860px;border:1px solid #8884;border-radius:8px"></iframe>'
        )


@torch.no_grad()
def report(
    heads: Heads | Mapping[str, Heads],
    path: str | os.PathLike[str] | None = None,
    *,
    texts: Texts | Mapping[str, Texts] | None = None,
    title: str | None = None,
    finding: str | None = None,
    star: tuple[int, int] | None = None,
    cards: Iterable[Card] = (),
    notes: Iterable[str] = (),
    roles: Mapping[str, str] | None = None,
    batch: int = 0,
    image: Any = None,
    grid: Sequence[int] | None = None,
    at: int | Sequence[int] | None = None,
) -> Page:
    """A page that shows these heads, written to `path` where one is given.

    Args:
        heads: one view, or views by the names of their layers, in the layers' order.
        path: where the page goes.
        texts: what was read: a `Text`; a pair for cross-attention, that of the queries and that of the keys; or one of these by
            the names of the layers. Without it tokens, or nodes of a graph, are called by their numbers.
        title: what the page is called.
        finding: one plain sentence, shown above all.
        star: the layer and the head that are shown first.
        cards: what was found of heads.
        notes: what a reader has to know besides.
        roles: a sentence of explanation for each role.
        batch: which row of the batch is shown.
        image: what the model saw, as `Heads.plot` takes it: layers whose items are its points are laid over it, and have no texts.
            Without one, layers over a `Grid` of rows and columns that have no texts are drawn as maps on an empty sheet.
        grid: the points' rows and columns, for layers whose neighbourhood is no `Grid`: (14, 14) for 196 patches, before which
            special tokens such as [CLS] stand.
        at: the patch that is shown first, (row, column), or the number of a token; the one in the middle unless given. It counts the
            queries of the layer of `star`, or of the first layer that is laid over the image; the other layers show the same place.

    Raises:
        ValueError: where there is nothing to show, or where texts, image, star or cards do not fit the heads; and where something
            other than a regular file is at the path.
        OSError: where the path cannot be written; an older file stays as it was.
    """
    if path is not None:
        _files.target(path)
    if not isinstance(heads, (Heads, Mapping)):
        raise ValueError(
            f"heads: it is {type(heads).__name__}; it must be a Heads, or what capture records: "
            "with capture(model) as seen: model(x)"
        )
    for argument, words in (("title", title), ("finding", finding)):
        if words is not None and not isinstance(words, str):
            raise WrongType(f"{argument} must be a str, got {kind_of(words)}")
    named = {"attention": heads} if isinstance(heads, Heads) else dict(heads)
    if not named:
        raise ValueError("heads: it is empty; there is no attention to show")
    if image is None and grid is not None:
        raise ValueError("grid: it says where an image's patches are; pass image= too")
    layers = []
    for number, (name, view) in enumerate(named.items()):
        if not isinstance(view, Heads):
            raise ValueError(
                f"heads: {name!r} is {type(view).__name__}; it must be a Heads (capture without metrics gives them)"
            )
        given = texts.get(name) if isinstance(texts, Mapping) else texts
        over = imaged(view, grid) if image is not None or (given is None and entire(view)) else None
        if over is not None:
            if given is not None:
                raise ValueError(
                    f"texts: {name!r} is laid over the image, and its patches are called by row and column; leave texts out, or "
                    "pass them by the names of the other layers"
                )
            layers.append(layer_of(number, name, view, batch, over.texts(), over))
            continue
        layers.append(layer_of(number, name, view, batch, _fitting(name, view, given)))
    cards, notes = _listed("cards", cards, Card), _listed("notes", notes, str)
    picture = _image(image, at, star, layers, notes)
    known = {(layer.number, head) for layer in layers for head in layer.heads}
    if star is not None and star not in known:
        raise ValueError(f"star must be (layer, head) of one of {len(layers)} layers, got {shown(star)}")
    for card in cards:
        if (card.layer, card.head) not in known:
            raise ValueError(f"cards: there is no {card.name} among {len(layers)} layers")
    blobs = Blobs()
    first = [*([star] if star else []), *((card.layer, card.head) for card in cards)]
    records = layers_record(layers, first, blobs)
    if not first:
        ranks = {(r["number"], head): telling(r, head) for r in records for head in r["heads"]}
        first = [max(ranks, key=lambda pair: ranks[pair])]
    for record in records:
        if record.get("parallel"):
            notes.append(
                f"{record['name']}: edges that are there more than once are shown as one, of all their weight."
            )
        if record.get("edges", 0) > EDGES:
            notes.append(f"{record['name']}: the {EDGES:,} strongest of {record['edges']:,} edges were kept.")
    content = {
        "title": title or "Attention heads", "finding": finding, "star": first[0], "notes": notes,
        "roles": dict(roles or {}), "cards": [_card(card) for card in cards], "image": picture, **_named_texts(layers, records),
    }  # fmt: skip
    page = Page(_joined(content, blobs))
    if path is not None:
        page.write(path)
    return page


def _listed(name: str, given: Iterable[Any], kind: type) -> list[Any]:
    """What was given as a list of one kind of things."""
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise WrongType(f"{name} must be a list of {kind.__name__}, got {kind_of(given)}")
    each = list(given)
    for place, item in enumerate(each):
        if not isinstance(item, kind):
            raise WrongType(f"{name}[{place}] must be a {kind.__name__}, got {kind_of(item)}")
    return each


def _image(
    image: Any,
    at: int | Sequence[int] | None,
    star: tuple[int, int] | None,
    layers: list[Layer],
    notes: list[str],
) -> dict[str, Any] | None:
    """The image with the patch that is shown first; where patches are too many, the layers are made to show blocks of them."""
    over = [(len(layer.heads), layer.image) for layer in layers if layer.image is not None]
    if not over:
        if image is None and at is None:
            return None
        if image is None:
            raise ValueError("at: it is a patch of an image; pass image= too")
        raise ValueError(
            f"image: no layer has a grid of rows and columns; pass grid=(height, width). There are "
            f"{', '.join(f'{layer.name} {tuple(layer.view.shape)}' for layer in layers[:3])}"
        )
    block = coarse(over)
    if block > 1:
        notes.append(
            f"Patches are shown in blocks of {block} x {block}: all of them would not fit on a page. A block's weights are sums over the "
            "patches that are looked at, averaged over those that look."
        )
    for number, layer in enumerate(layers):
        if layer.image is not None and block > 1:
            shown = layer.image._replace(block=block)
            rows, columns = shown.texts()
            layers[number] = layer._replace(image=shown, rows=rows, columns=columns)
    starred = star[0] if star is not None and 0 <= star[0] < len(layers) else 0
    # the star's own layer where it is laid over the image, else the first that is
    of, first = min(
        ((n, layer.image) for n, layer in enumerate(layers) if layer.image is not None),
        key=lambda pair: pair[0] != starred,
    )
    sheet = blank(first) if image is None else embedded(image)
    return {**sheet, "first": first.first(at), "of": of}


def _fitting(name: str, view: Heads, given: Texts | None) -> tuple[Text | None, Text | None]:
    """The texts of a layer's queries and keys."""
    part = view._part
    queries, keys = len(part.numbers("queries")), len(part.numbers("keys"))
    if given is None:
        # one and the same nobody stands for one text, two for two
        return None, None
    if isinstance(given, tuple) and len(given) == 2 and not isinstance(given, Text) and not isinstance(given[0], str):
        rows, columns = (_text(part) for part in given)
    else:
        rows = columns = _text(given)
    if rows is columns and len(columns.pieces) == keys > queries:
        # with a cache the queries are the last keys
        begin = keys - queries
        rows = Text(rows.pieces[begin:], rows.word_of[begin:], rows.words)
    for text, number, what in ((rows, queries, "queries"), (columns, keys, "keys")):
        if len(text.pieces) != number:
            raise ValueError(f"texts: {name!r} has {number} {what}, but the text has {len(text.pieces)} pieces")
        if len(text.word_of) != number:
            raise ValueError(f"texts: {len(text.word_of)} pieces have a word, but there are {number}")
    return rows, columns


def _text(given: Readable) -> Text:
    """A text as it was given: a `Text`, words, or a tokenizer's result."""
    if isinstance(given, Text):
        return given
    if all(hasattr(given, name) for name in ("pieces", "word_of", "words")):
        return Text(tuple(given.pieces), tuple(given.word_of), tuple(given.words))
    if isinstance(given, (list, tuple)) and all(isinstance(word, str) for word in given):
        return Text.of_words(given)
    raise ValueError(
        f"texts: it is {type(given).__name__}; it must be a Text, the result of a Polyhead tokenizer, a list of words, a pair "
        "of these for cross-attention, or a mapping from layers to them"
    )


def _card(card: Card) -> dict[str, Any]:
    return {**card._asdict(), "name": card.name}


def _named_texts(layers: list[Layer], records: list[dict[str, Any]]) -> dict[str, Any]:
    """The layers, each with the numbers of its texts, and the texts, each once."""
    texts: list[Text] = []
    for layer, record in zip(layers, records, strict=True):
        for side, text in (("rows", layer.rows), ("columns", layer.columns)):
            if text is not None and text not in texts:
                texts.append(text)
            record[side] = None if text is None else texts.index(text)
    return {"texts": [text._asdict() for text in texts], "layers": records}


def _joined(content: dict[str, Any], blobs: Blobs) -> str:
    """The page's parts and its data as one file."""
    part = lambda name: (files("polyhead.inspection.report") / "page" / name).read_text(encoding="utf-8")
    title = html.escape(content["title"])
    arrays = "\n".join(f'<script type="text/plain" id="blob-{i}">{text}</script>' for i, text in enumerate(blobs.texts))
    pieces = {
        "title": title, "style": part("style.css"), "script": "\n".join(part(name) for name in _SCRIPTS),
        "record": _inert(content), "arrays": arrays,
    }  # fmt: skip
    # in one walk, so that nothing that was put in is looked at again
    before, *rest = part("page.html").split("{{")
    return before + "".join(pieces[name] + after for name, after in (piece.split("}}", 1) for piece in rest))


def _inert(content: dict[str, Any]) -> str:
    """JSON that no text in it can break out of: nothing in it reads as a tag, a comment or the end of a line."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
