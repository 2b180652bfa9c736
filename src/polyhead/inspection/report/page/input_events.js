// Input: buttons, keyboard shortcuts, and the pointer on the heat map.

const toggleState = (key, a, b) => setState({ [key]: state[key] === a ? b : a });
const KEYS = [
  ["w", "switch between weight and contribution", () => toggleState("measure", "weight", "share")],
  ["p", "switch between words and pieces", () => changeLevelOrHiding({ level: state.level === "word" ? "piece" : "word" })],
  ["s", "hide or show special tokens", () => changeLevelOrHiding({ hide: !state.hide })],
  ["c", "show maps or roles in the mosaic", () => record.cards.length && toggleState("paint", "weight", "role")],
  ["d", "switch between light and dark", () => toggleTheme()],
  ["/", "find a role or a head", () => $("search").focus()],
  ["e", "export", () => { $("export").open = !$("export").open; $("export").querySelector("button")?.focus(); }],
  ["?", "show or close this help", () => toggleHelp()],
];

// Change the level or hide tokens. Indices of items change: locked items are found again by their first piece.
function changeLevelOrHiding(changes) {
  const layer = selectedLayer(), previous = selectedHeadData();
  const findItemsAgain = (pair) => {
    if (!pair) return null;
    const findItem = (list, side, i) => {
      if (i === null) return null;
      const after = listItems(layer, side, itemLevel(layer, state.head, changes.level ?? state.level), canMergePieces(layer, state.head) && (changes.hide ?? state.hide)), piece = list[i]?.pieces[0];
      const index = after.findIndex((item) => item.pieces.includes(piece));
      return index < 0 ? undefined : index;
    };
    const to = { row: findItem(previous.rows, "rows", pair.row), col: findItem(previous.cols, "columns", pair.col) };
    return to.row === undefined || to.col === undefined ? null : to;
  };
  setState({ ...changes, hover: null, lock: findItemsAgain(state.lock), cell: findItemsAgain(state.cell) });
}

// Update the button groups, and disable those that do not apply.
function updateButtonGroups() {
  for (const group of document.querySelectorAll(".choice")) {
    const key = group.dataset.key, buttons = [...group.querySelectorAll("button")];
    for (const button of buttons) {
      const on = state[key] === button.value;
      button.setAttribute("aria-checked", on);
      button.tabIndex = on ? 0 : -1;
      button.onclick = () => (key === "level" ? changeLevelOrHiding({ level: button.value }) : setState({ [key]: button.value }));
      button.onkeydown = (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        const next = buttons[(buttons.indexOf(button) + step + buttons.length) % buttons.length];
        next.click(); next.focus();
        event.stopPropagation();
      };
    }
  }
  const layer = selectedLayer(), foldable = layer.display === "matrix" && canMergePieces(layer, state.head);
  const hasText = layer.rows !== null && layer.display === "matrix";
  document.querySelector('[data-key="level"]').classList.toggle("off", !hasText || !foldable);
  document.querySelector('[data-key="level"]').inert = !hasText || !foldable;
  $("hide").disabled = !hasText || !foldable || !listItems(layer, "columns", "piece", false).some((item) => item.special);
  $("hide").setAttribute("aria-pressed", state.hide);
}

function toggleTheme() {
  document.documentElement.dataset.theme = isDarkTheme() ? "light" : "dark";
  setState({ theme: state.theme + 1 });
}

function toggleHelp() {
  const box = $("keys");
  if (box.open) { box.close(); return; }
  const otherKeys = [["← ↑ ↓ →", "move in the mosaic, or in the text, the heat map or the image if it has the focus"], ["Enter", "show how a cell of the heat map is computed; lock a word or a patch"], ["+ − 0", "zoom the heat map of a long text; 0 shows all"], ["Escape", "release a locked word or patch, close an explanation"]];
  box.replaceChildren(
    htmlElement("form", { method: "dialog" }, htmlElement("button", { class: "icon", "aria-label": "Close" }, "×")),
    htmlElement("h2", {}, "What this page shows"),
    htmlElement("p", {}, record.image
      ? "A vision model splits an image into patches and has many attention heads. In each head, every patch distributes its attention over all patches and special tokens. These shares are the weights; those of one patch sum to 1."
      : "A model reads a text with many attention heads. In each head, every word distributes its attention over all words. These shares are the weights; those of one word sum to 1."),
    htmlElement("p", {}, "A large weight may have little effect: a head adds weight × vector to a word, and some vectors are close to zero. ", htmlElement("b", {}, "Contribution"), " is the norm of what is added, |weight × Wₒ v|, as a share of the row."),
    htmlElement("p", {}, "A head is named by its layer and its index, both counted from 0: ", htmlElement("b", {}, selectedHeadName()), ` is head ${selectedLayer().heads[state.head]} of attention layer ${selectedLayer().number}, in the order in which the layers ran. Where the model numbers its layers differently, a row of the mosaic shows the model’s number first: “3 · L9”. The colour of a frame is the role of the head, if it has one.`),
    htmlElement("h2", {}, "Keyboard shortcuts"),
    htmlElement("dl", {}, [...KEYS.map(([key, action]) => [key, action]), ...otherKeys].flatMap(([key, action]) => [htmlElement("dt", {}, htmlElement("kbd", {}, key)), htmlElement("dd", {}, action)])));
  box.showModal();
}

function moveInMosaicByKey(key) {
  const index = tiles.findIndex((tile) => tile.layerIndex === state.layer && tile.head === state.head), selected = tiles[index];
  let next = null;
  if (key === "ArrowRight") next = tiles[index + 1];
  else if (key === "ArrowLeft") next = tiles[index - 1];
  else {
    const perRow = selected.perRow, down = key === "ArrowDown" ? 1 : -1, head = selected.head + down * perRow;
    const order = mosaicGroups.flatMap((group) => group.rows.map((row) => row.layerIndex)), nextLayer = order[order.indexOf(selected.layerIndex) + down];
    next = tiles.find((tile) => tile.layerIndex === selected.layerIndex && tile.head === head) ?? tiles.find((tile) => tile.layerIndex === nextLayer && tile.head === Math.min(selected.head % perRow, tile.layer.heads.length - 1));
  }
  if (next) { selectHead(next.layerIndex, next.head); next.button.focus({ preventScroll: true }); }
}

function moveInHeatmapByKey(event) {
  const current = selectedHeadData(), from = state.hover?.row != null && state.hover?.col != null ? state.hover : { row: Math.floor(plot.view.r0), col: Math.floor(plot.view.c0) - 1 };
  const [dr, dc] = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  if (event.shiftKey) { panHeatmap(dr * (plot.view.r1 - plot.view.r0) * 0.25, dc * (plot.view.c1 - plot.view.c0) * 0.25); return; }
  const to = { row: Math.max(0, Math.min(current.rows.length - 1, from.row + dr)), col: Math.max(0, Math.min(current.cols.length - 1, from.col + dc)) };
  panToCell(to);
  setState({ hover: to });
}

function handleKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  // the browser closes an open dialog on Escape
  if ($("keys").open && event.key !== "?") return;
  if (event.key === "Escape") {
    if (event.target.matches?.("input")) event.target.blur();
    if (event.target === $("search")) { $("search").value = ""; setState({ search: "" }); return; }
    if (state.lock) setState({ lock: null, hover: null }); else if (state.cell) setState({ cell: null });
    $("export").open = false;
    showTooltip(event);
    return;
  }
  if (event.target === $("search") && event.key === "Enter") {
    const first = tiles.find((tile) => !tile.dimmed);
    if (first) { setState({ cell: null }); selectHead(first.layerIndex, first.head); }
    return;
  }
  if (event.target.matches?.("input, dialog *")) return;
  if (event.key.startsWith("Arrow")) {
    if (event.target.matches("summary")) return;
    if (event.target.matches(".picture")) movePatchByKey(event.key); else if (event.target.matches(".word")) moveToWordByKey(event.target, event.key); else if (event.target === plot.canvas) moveInHeatmapByKey(event); else moveInMosaicByKey(event.key);
    event.preventDefault();
  } else if (event.target.matches(".word") && event.key === "Enter") event.target.click();
  else if (event.target.matches(".picture") && event.key === "Enter") togglePatchLock();
  else if (event.target === plot.canvas && event.key === "Enter" && state.hover?.col != null) setState({ cell: { ...state.hover } });
  else if (event.key === "+" || event.key === "=") zoomHeatmap(0.6);
  else if (event.key === "-") zoomHeatmap(1 / 0.6);
  else if (event.key === "0") { plot.view = wholeMatrixView(selectedHeadData()); if (selectedLayer().display === "matrix") drawHeatmap(); }
  else {
    const shortcut = KEYS.find(([key]) => key === event.key);
    if (shortcut) { shortcut[2](); event.preventDefault(); }
  }
}

// The cell under the pointer.
function cellUnderPointer(event) {
  const box = plot.canvas.getBoundingClientRect(), current = selectedHeadData();
  const row = Math.floor(plot.view.r0 + (event.clientY - box.top - plot.top) / plot.ch), col = Math.floor(plot.view.c0 + (event.clientX - box.left - plot.left) / plot.cw);
  const inside = row >= Math.floor(plot.view.r0) && row < Math.min(current.rows.length, plot.view.r1) && col >= Math.floor(plot.view.c0) && col < Math.min(current.cols.length, plot.view.c1);
  return inside ? { row, col } : null;
}

function bindHeatmapEvents() {
  const box = plot.canvas;
  let drag = null, lastDown = -1000, previousCell = null;
  box.addEventListener("pointermove", (event) => {
    if (drag && canZoom(selectedHeadData())) {
      const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
      if (drag.dragged || Math.hypot(dx, dy) > 4) {
        drag.dragged = true;
        panHeatmap((drag.y2 - event.clientY) / plot.ch, (drag.x2 - event.clientX) / plot.cw);
        drag.x2 = event.clientX; drag.y2 = event.clientY;
        return;
      }
    }
    const cell = cellUnderPointer(event);
    if (cell?.row !== state.hover?.row || cell?.col !== state.hover?.col) setState({ hover: cell });
    box.style.cursor = cell ? "pointer" : "";
  });
  box.addEventListener("pointerleave", () => setState({ hover: null }));
  box.addEventListener("pointerdown", (event) => {
    // the first click of a double-click explains a cell: remember the cell before it
    if (event.timeStamp - lastDown > 500) previousCell = state.cell;
    lastDown = event.timeStamp;
    drag = { x: event.clientX, y: event.clientY, x2: event.clientX, y2: event.clientY }; box.setPointerCapture(event.pointerId);
  });
  box.addEventListener("pointerup", (event) => {
    const cell = cellUnderPointer(event);
    if (drag && !drag.dragged && cell) { setState({ cell: cell }); scrollToWord(cell.row); }
    drag = null;
  });
  const relativePosition = (event) => { const b = box.getBoundingClientRect(); return [(event.clientX - b.left - plot.left) / plot.width, (event.clientY - b.top - plot.top) / plot.height]; };
  box.addEventListener("wheel", (event) => { if (!canZoom(selectedHeadData())) return; event.preventDefault(); zoomHeatmap(Math.exp(Math.max(-0.6, Math.min(0.6, event.deltaY * 0.002))), ...relativePosition(event)); }, { passive: false });
  box.addEventListener("dblclick", (event) => {
    if (!canZoom(selectedHeadData())) return;
    setState({ cell: previousCell });
    zoomHeatmap(event.shiftKey ? 3 : 1 / 3, ...relativePosition(event));
  });
}

watch("layer head measure level hide paint direction", updateButtonGroups);
