// Input: buttons, keyboard shortcuts, and the pointer on the heat map.

const toggleState = (key, a, b) => set({ [key]: state[key] === a ? b : a });
const KEYS = [
  ["w", "switch between weight and contribution", () => toggleState("measure", "weight", "share")],
  ["p", "switch between words and pieces", () => changeLevel({ level: state.level === "word" ? "piece" : "word" })],
  ["s", "hide or show special tokens", () => changeLevel({ hide: !state.hide })],
  ["c", "show maps or roles in the mosaic", () => record.cards.length && toggleState("paint", "weight", "role")],
  ["d", "switch between light and dark", () => toggleTheme()],
  ["/", "find a role or a head", () => $("search").focus()],
  ["e", "export", () => { $("export").open = !$("export").open; $("export").querySelector("button")?.focus(); }],
  ["?", "show or close this help", () => toggleHelp()],
];

// Change the level or hide tokens. Indices of items change: locked items are found again by their first piece.
function changeLevel(changes) {
  const layer = currentLayer(), previous = currentHead();
  const relocate = (pair) => {
    if (!pair) return null;
    const findItem = (list, side, i) => {
      if (i === null) return null;
      const after = items(layer, side, changes.level ?? state.level, changes.hide ?? state.hide), piece = list[i]?.pieces[0];
      const index = after.findIndex((item) => item.pieces.includes(piece));
      return index < 0 ? undefined : index;
    };
    const to = { row: findItem(previous.rows, "rows", pair.row), col: findItem(previous.cols, "columns", pair.col) };
    return to.row === undefined || to.col === undefined ? null : to;
  };
  set({ ...changes, hover: null, lock: relocate(state.lock), cell: relocate(state.cell) });
}

// Update the button groups, and disable those that do not apply.
function updateChoices() {
  for (const group of document.querySelectorAll(".choice")) {
    const key = group.dataset.key, buttons = [...group.querySelectorAll("button")];
    for (const button of buttons) {
      const on = state[key] === button.value;
      button.setAttribute("aria-checked", on);
      button.tabIndex = on ? 0 : -1;
      button.onclick = () => (key === "level" ? changeLevel({ level: button.value }) : set({ [key]: button.value }));
      button.onkeydown = (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        const next = buttons[(buttons.indexOf(button) + step + buttons.length) % buttons.length];
        next.click(); next.focus();
        event.stopPropagation();
      };
    }
  }
  const layer = currentLayer(), foldable = layer.display === "matrix" && canFold(layer, state.head);
  const hasText = layer.rows !== null && layer.display === "matrix";
  document.querySelector('[data-key="level"]').classList.toggle("off", !hasText || !foldable);
  document.querySelector('[data-key="level"]').inert = !hasText || !foldable;
  $("hide").disabled = !hasText || !foldable || !items(layer, "columns", "piece", false).some((item) => item.special);
  $("hide").setAttribute("aria-pressed", state.hide);
}

function toggleTheme() {
  document.documentElement.dataset.theme = isDark() ? "light" : "dark";
  set({ theme: state.theme + 1 });
}

function toggleHelp() {
  const box = $("keys");
  if (box.open) { box.close(); return; }
  const otherKeys = [["← ↑ ↓ →", "move in the mosaic, or in the text, the heat map or the image if it has the focus"], ["Enter", "show how a cell of the heat map is computed; lock a word or a patch"], ["+ − 0", "zoom the heat map of a long text; 0 shows all"], ["Escape", "release a locked word or patch, close an explanation"]];
  box.replaceChildren(
    el("form", { method: "dialog" }, el("button", { class: "icon", "aria-label": "Close" }, "×")),
    el("h2", {}, "What this page shows"),
    el("p", {}, record.image
      ? "A vision model splits an image into patches and has many attention heads. In each head, every patch distributes its attention over all patches and special tokens. These shares are the weights; those of one patch sum to 1."
      : "A model reads a text with many attention heads. In each head, every word distributes its attention over all words. These shares are the weights; those of one word sum to 1."),
    el("p", {}, "A large weight may have little effect: a head adds weight × vector to a word, and some vectors are close to zero. ", el("b", {}, "Contribution"), " is the norm of what is added, |weight × Wₒ v|, as a share of the row."),
    el("p", {}, "A head is named by its layer and its index, both counted from 0: ", el("b", {}, headName()), ` is head ${currentLayer().heads[state.head]} of layer ${currentLayer().number}. The colour of a frame is the role of the head, if it has one.`),
    el("h2", {}, "Keyboard shortcuts"),
    el("dl", {}, [...KEYS.map(([key, action]) => [key, action]), ...otherKeys].flatMap(([key, action]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, action)])));
  box.showModal();
}

function stepMosaic(key) {
  const index = tiles.findIndex((tile) => tile.layerIndex === state.layer && tile.head === state.head), selected = tiles[index];
  let next = null;
  if (key === "ArrowRight") next = tiles[index + 1];
  else if (key === "ArrowLeft") next = tiles[index - 1];
  else {
    const perRow = selected.perRow, down = key === "ArrowDown" ? 1 : -1, head = selected.head + down * perRow;
    next = tiles.find((tile) => tile.layerIndex === selected.layerIndex && tile.head === head) ?? tiles.find((tile) => tile.layerIndex === selected.layerIndex + down && tile.head === (layers.length > 1 ? Math.min(selected.head % perRow, tile.layer.heads.length - 1) : -1));
  }
  if (next) { selectHead(next.layerIndex, next.head); next.button.focus(); }
}

function stepHeat(event) {
  const current = currentHead(), from = state.hover?.row != null && state.hover?.col != null ? state.hover : { row: Math.floor(plot.view.r0), col: Math.floor(plot.view.c0) - 1 };
  const [dr, dc] = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  if (event.shiftKey) { pan(dr * (plot.view.r1 - plot.view.r0) * 0.25, dc * (plot.view.c1 - plot.view.c0) * 0.25); return; }
  const to = { row: Math.max(0, Math.min(current.rows.length - 1, from.row + dr)), col: Math.max(0, Math.min(current.cols.length - 1, from.col + dc)) };
  reveal(to);
  set({ hover: to });
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  // the browser closes an open dialog on Escape
  if ($("keys").open && event.key !== "?") return;
  if (event.key === "Escape") {
    if (event.target.matches?.("input")) event.target.blur();
    if (event.target === $("search")) { $("search").value = ""; set({ search: "" }); return; }
    if (state.lock) set({ lock: null, hover: null }); else if (state.cell) set({ cell: null });
    $("export").open = false;
    showTip(event);
    return;
  }
  if (event.target === $("search") && event.key === "Enter") {
    const first = tiles.find((tile) => !tile.dimmed);
    if (first) { set({ cell: null }); selectHead(first.layerIndex, first.head); }
    return;
  }
  if (event.target.matches?.("input, dialog *")) return;
  if (event.key.startsWith("Arrow")) {
    if (event.target.matches("summary")) return;
    if (event.target.matches(".picture")) stepPatch(event.key); else if (event.target.matches(".word")) stepWord(event.target, event.key); else if (event.target === plot.canvas) stepHeat(event); else stepMosaic(event.key);
    event.preventDefault();
  } else if (event.target.matches(".word") && event.key === "Enter") event.target.click();
  else if (event.target.matches(".picture") && event.key === "Enter") toggleLock();
  else if (event.target === plot.canvas && event.key === "Enter" && state.hover?.col != null) set({ cell: { ...state.hover } });
  else if (event.key === "+" || event.key === "=") zoom(0.6);
  else if (event.key === "-") zoom(1 / 0.6);
  else if (event.key === "0") { plot.view = fullView(currentHead()); if (currentLayer().display === "matrix") drawHeat(); }
  else {
    const shortcut = KEYS.find(([key]) => key === event.key);
    if (shortcut) { shortcut[2](); event.preventDefault(); }
  }
}

// The cell under the pointer.
function cellAt(event) {
  const box = plot.canvas.getBoundingClientRect(), current = currentHead();
  const row = Math.floor(plot.view.r0 + (event.clientY - box.top - plot.top) / plot.ch), col = Math.floor(plot.view.c0 + (event.clientX - box.left - plot.left) / plot.cw);
  const inside = row >= Math.floor(plot.view.r0) && row < Math.min(current.rows.length, plot.view.r1) && col >= Math.floor(plot.view.c0) && col < Math.min(current.cols.length, plot.view.c1);
  return inside ? { row, col } : null;
}

function bindPlotEvents() {
  const box = plot.canvas;
  let drag = null, lastDown = -1000, previousCell = null;
  box.addEventListener("pointermove", (event) => {
    if (drag && canZoom(currentHead())) {
      const dx = event.clientX - drag.x, dy = event.clientY - drag.y;
      if (drag.dragged || Math.hypot(dx, dy) > 4) {
        drag.dragged = true;
        pan((drag.y2 - event.clientY) / plot.ch, (drag.x2 - event.clientX) / plot.cw);
        drag.x2 = event.clientX; drag.y2 = event.clientY;
        return;
      }
    }
    const cell = cellAt(event);
    if (cell?.row !== state.hover?.row || cell?.col !== state.hover?.col) set({ hover: cell });
    box.style.cursor = cell ? "pointer" : "";
  });
  box.addEventListener("pointerleave", () => set({ hover: null }));
  box.addEventListener("pointerdown", (event) => {
    // the first click of a double-click explains a cell: remember the cell before it
    if (event.timeStamp - lastDown > 500) previousCell = state.cell;
    lastDown = event.timeStamp;
    drag = { x: event.clientX, y: event.clientY, x2: event.clientX, y2: event.clientY }; box.setPointerCapture(event.pointerId);
  });
  box.addEventListener("pointerup", (event) => {
    const cell = cellAt(event);
    if (drag && !drag.dragged && cell) { set({ cell: cell }); showWord(cell.row); }
    drag = null;
  });
  const relativePosition = (event) => { const b = box.getBoundingClientRect(); return [(event.clientX - b.left - plot.left) / plot.width, (event.clientY - b.top - plot.top) / plot.height]; };
  box.addEventListener("wheel", (event) => { if (!canZoom(currentHead())) return; event.preventDefault(); zoom(Math.exp(Math.max(-0.6, Math.min(0.6, event.deltaY * 0.002))), ...relativePosition(event)); }, { passive: false });
  box.addEventListener("dblclick", (event) => {
    if (!canZoom(currentHead())) return;
    set({ cell: previousCell });
    zoom(event.shiftKey ? 3 : 1 / 3, ...relativePosition(event));
  });
}

watch("layer head measure level hide paint direction", updateChoices);
