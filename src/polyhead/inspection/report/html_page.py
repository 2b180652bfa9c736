"""A page as one HTML file: its parts, its scripts and its data."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from polyhead import _files

# In the order in which they are concatenated: each uses those before it.
_SCRIPT_FILES = (
    "page_data.js", "colour.js", "state.js", "words_and_pieces.js", "drawing_helpers.js", "mosaic.js", "sentence.js", "heatmap.js", "head_panel.js", "weight_explanation.js",
    "output_vectors.js", "graph.js", "image_overlay.js", "export.js", "input_events.js", "main.js",
)  # fmt: skip


class Page:
    """A self-contained HTML page. At the end of a notebook cell it displays itself in a frame."""

    def __init__(self, text: str) -> None:
        self.html = text

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write the page completely or not at all: if writing fails, an older file is left unchanged.

        A symbolic link is followed. Anything but a regular file, such as a device, is refused.
        """
        _files.write_atomically(path, self.html.encode(errors="backslashreplace"))

    def __repr__(self) -> str:
        return f"Page({len(self.html) / 1e6:.1f} MB; write(path) writes it, a notebook shows it)"

    def _repr_html_(self) -> str:
        return (
            f'<iframe srcdoc="{html.escape(self.html)}" sandbox="allow-scripts allow-downloads" title="Attention heads" '
            'style="width:100%;height:860px;border:1px solid #8884;border-radius:8px"></iframe>'
        )


def build_html(content: dict[str, Any], arrays: Sequence[str]) -> str:
    """The page's template with its style, scripts, record and arrays filled in."""
    read = lambda name: (files("polyhead.inspection.report") / "page" / name).read_text(encoding="utf-8")
    blobs = "\n".join(f'<script type="text/plain" id="blob-{i}">{text}</script>' for i, text in enumerate(arrays))
    pieces = {
        "title": html.escape(content["title"]), "style": read("style.css"),
        "script": "\n".join(read(name) for name in _SCRIPT_FILES), "record": _json_for_script_tag(content), "arrays": blobs,
    }  # fmt: skip
    # in one pass, so that inserted text is never searched for placeholders
    before, *rest = read("page.html").split("{{")
    page = before + "".join(pieces[name] + after for name, after in (piece.split("}}", 1) for piece in rest))
    # lone surrogates, as in file names that are not valid Unicode, become escapes, which JSON reads: UTF-8 has no code for them
    return page.encode(errors="backslashreplace").decode()


def _json_for_script_tag(content: dict[str, Any]) -> str:
    """JSON whose strings cannot end the script element: tags, comments and line separators are escaped."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text
