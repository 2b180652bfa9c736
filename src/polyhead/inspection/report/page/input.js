// Hands: buttons, keys, and the pointer on the map.

const flip = (key, a, b) => set({ [key]: state[key] === a ? b : a });
const KEYS = [
  ["w", "weight or contribution", () => flip("measure", "weight", "share")],
  ["p", "words or pieces", () => relevel({ level: state.level === "word" ? "piece" : "word" })],
  ["s", "hide special tokens", () => relevel({ hide: !state.hide })],
  ["c", "colour the mosaic by map or by role", () => record.cards.length && flip("paint", "weight", "role")],
  ["d", "light or dark", () => turn()],
  ["/", "find a role or a head", () => $("search").focus()],
  ["e", "export", () => { $("export").open = !$("export").open; $("export").querySelector("button")?.focus(); }],
  ["?", "these keys", () => help()],
];

// Words and pieces have other numbers: what is pointed at is found again by its piece.
function relevel(changes) {
  const of = layer(), before = current();
  const again = (at) => {
    if (!at) return null;
    const find = (list, side, i) => {
      if (i === null) return null;
      const after = items(of, side, changes.level ?? state.level, changes.hide ?? state.hide), piece = list[i]?.pieces[0];
      const found = after.findIndex((item) => item.pieces.includes(piece));
      return found < 0 ? undefined : found;
    };
    const to = { row: find(before.rows, "rows", at.row), col: find(before.cols, "columns", at.col) };
    return to.row === undefined || to.col === undefined ? null : to;
  };
  set({ ...changes, hover: null, lock: again(state.lock), cell: again(state.cell) });
}

// Groups of buttons of which one is chosen.
function choices() {
  for (const group of document.querySelectorAll(".choice")) {
    const key = group.dataset.key, buttons = [...group.querySelectorAll("button")];
    for (const button of buttons) {
      const on = state[key] === button.value;
      button.setAttribute("aria-checked", on);
      button.tabIndex = on ? 0 : -1;
      button.onclick = () => (key === "level" ? relevel({ level: button.value }) : set({ [key]: button.value }));
      button.onkeydown = (event) => {
        const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!step) return;
        const next = buttons[(buttons.indexOf(button) + step + buttons.length) % buttons.length];
        next.click(); next.focus();
        event.stopPropagation();
      };
    }
  }
  const of = layer(), can = of.drawn === "matrix" && foldable(of, state.head);
  const words = of.rows !== null && of.drawn === "matrix";
  document.querySelector('[data-key="level"]').classList.toggle("off", !words || !can);
  document.querySelector('[data-key="level"]').inert = !words || !can;
  $("hide").disabled = !words || !can || !items(of, "columns", "piece", false).some((item) => item.special);
  $("hide").setAttribute("aria-pressed", state.hide);
}

function turn() {
  document.documentElement.dataset.theme = dark() ? "light" : "dark";
  set({ theme: state.theme + 1 });
}

function help() {
  const box = $("keys");
  if (box.open) { box.close(); return; }
  const more = [["← ↑ ↓ →", "move in the mosaic; in the text, the map or the image where it has the focus"], ["Enter", "on a cell of the map: how it came about; on a word or a patch: lock it"], ["+ − 0", "zoom the map of a long text; 0 shows all"], ["Escape", "let go of a locked word, close an explanation"]];
  box.replaceChildren(
    el("form", { method: "dialog" }, el("button", { class: "icon", "aria-label": "Close" }, "×")),
    el("h2", {}, "What this page shows"),
    el("p", {}, record.image
      ? "A model sees an image as patches, with many attention heads at once. In each head every patch shares out one unit of attention among all patches and special tokens: these shares are the weights, and a patch’s shares add up to 1."
      : "A model reads a text with many attention heads at once. In each head every word shares out one unit of attention among all words: these shares are the weights, and a word’s shares add up to 1."),
    el("p", {}, "A large weight need not do much: what is added to a word is weight × vector, and some vectors are next to nothing. ", el("b", {}, "Contribution"), " counts the length of what is moved, |weight × Wₒ v|, as a share of the row."),
    el("p", {}, "A head is called by its layer and its number, both from 0: ", el("b", {}, headName()), ` is head ${layer().heads[state.head]} of layer ${layer().number}. A frame’s colour is the head’s role, where a test found one.`),
    el("h2", {}, "Keys"),
    el("dl", {}, [...KEYS.map(([key, what]) => [key, what]), ...more].flatMap(([key, what]) => [el("dt", {}, el("kbd", {}, key)), el("dd", {}, what)])));
  box.showModal();
}

function stepMosaic(key) {
  const index = tiles.findIndex((one) => one.at === state.layer && one.place === state.head), here = tiles[index];
  let to = null;
  if (key === "ArrowRight") to = tiles[index + 1];
  else if (key === "ArrowLeft") to = tiles[index - 1];
  else {
    const across = here.across, down = key === "ArrowDown" ? 1 : -1, place = here.place + down * across;
    to = tiles.find((one) => one.at === here.at && one.place === place) ?? tiles.find((one) => one.at === here.at + down && one.place === (layers.length > 1 ? Math.min(here.place % across, one.of.heads.length - 1) : -1));
  }
  if (to) { choose(to.at, to.place); to.button.focus(); }
}

function stepHeat(event) {
  const now = current(), at = state.hover?.row != null && state.hover?.col != null ? state.hover : { row: Math.floor(plot.view.r0), col: Math.floor(plot.view.c0) - 1 };
  const [dr, dc] = { ArrowRight: [0, 1], ArrowLeft: [0, -1], ArrowDown: [1, 0], ArrowUp: [-1, 0] }[event.key];
  if (event.shiftKey) { pan(dr * (plot.view.r1 - plot.view.r0) * 0.25, dc * (plot.view.c1 - plot.view.c0) * 0.25); return; }
  const to = { row: Math.max(0, Math.min(now.rows.length - 1, at.row + dr)), col: Math.max(0, Math.min(now.cols.length - 1, at.col + dc)) };
  reveal(to);
  set({ hover: to });
}

function onKey(event) {
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  // an open dialog closes itself
  if ($("keys").open && event.key !== "?") return;
  if (event.key === "Escape") {
    if (event.target.matches?.("input")) event.target.blur();
    if (event.target === $("search")) { $("search").value = ""; set({ search: "" }); return; }
    if (state.lock) set({ lock: null, hover: null }); else if (state.cell) set({ cell: null });
    $("export").open = false;
    tip(event);
    return;
  }
  if (event.target === $("search") && event.key === "Enter") {
    const first = tiles.find((one) => !one.dimmed);
    if (first) { set({ cell: null }); choose(first.at, first.place); }
    return;
  }
  if (event.target.matches?.("input, dialog *")) return;
  if (event.key.startsWith("Arrow")) {
    if (event.target.matches("summary")) return;
    if (event.target.matches(".picture")) stepPatch(event.key); else if (event.target.matches(".word")) stepWord(event.target, event.key); else if (event.target === plot.box) stepHeat(event); else stepMosaic(event.key);
    event.preventDefault();
  } else if (event.target.matches(".word") && event.key === "Enter") event.target.click();
  else if (event.target.matches(".picture") && event.key === "Enter") lockPatch();
  else if (event.target === plot.box && event.key === "Enter" && state.hover?.col != null) set({ cell: { ...state.hover } });
  else if (event.key === "+" || event.key === "=") zoom(0.6);
  else if (event.key === "-") zoom(1 / 0.6);
  else if (event.key === "0") { plot.view = whole(current()); if (layer().drawn === "matrix") drawHeat(); }
  else {
    const found = KEYS.find(([key]) => key === event.key);
    if (found) { found[2](); event.preventDefault(); }
  }
}

// The pair under the pointer.
function cellAt(event) {
  const box = plot.box.getBoundingClientRect(), now = current();
  const row = Math.floor(plot.view.r0 + (event.clientY - box.top - plot.top) / plot.ch), col = Math.floor(plot.view.c0 + (event.clientX - box.left - plot.left) / plot.cw);
  const inside = row >= Math.floor(plot.view.r0) && row < Math.min(now.rows.length, plot.view.r1) && col >= Math.floor(plot.view.c0) && col < Math.min(now.cols.length, plot.view.c1);
  return inside ? { row, col } : null;
}

function plotEvents() {
  const box = plot.box;
  let held = null, last = -1000, before = null;
  box.addEventListener("pointermove", (event) => {
    if (held && zoomable(current())) {
      const dx = event.clientX - held.x, dy = event.clientY - held.y;
      if (held.dragged || Math.hypot(dx, dy) > 4) {
        held.dragged = true;
        pan((held.y2 - event.clientY) / plot.ch, (held.x2 - event.clientX) / plot.cw);
        held.x2 = event.clientX; held.y2 = event.clientY;
        return;
      }
    }
    const at = cellAt(event);
    if (at?.row !== state.hover?.row || at?.col !== state.hover?.col) set({ hover: at });
    box.style.cursor = at ? "pointer" : "";
  });
  box.addEventListener("pointerleave", () => set({ hover: null }));
  box.addEventListener("pointerdown", (event) => {
    // the first click of two explains a cell, and should not
    if (event.timeStamp - last > 500) before = state.cell;
    last = event.timeStamp;
    held = { x: event.clientX, y: event.clientY, x2: event.clientX, y2: event.clientY }; box.setPointerCapture(event.pointerId);
  });
  box.addEventListener("pointerup", (event) => {
    const at = cellAt(event);
    if (held && !held.dragged && at) { set({ cell: at }); showWord(at.row); }
    held = null;
  });
  const share = (event) => { const b = box.getBoundingClientRect(); return [(event.clientX - b.left - plot.left) / plot.width, (event.clientY - b.top - plot.top) / plot.height]; };
  box.addEventListener("wheel", (event) => { if (!zoomable(current())) return; event.preventDefault(); zoom(Math.exp(Math.max(-0.6, Math.min(0.6, event.deltaY * 0.002))), ...share(event)); }, { passive: false });
  box.addEventListener("dblclick", (event) => {
    if (!zoomable(current())) return;
    set({ cell: before });
    zoom(event.shiftKey ? 3 : 1 / 3, ...share(event));
  });
}

watch("layer head measure level hide paint direction", choices);
