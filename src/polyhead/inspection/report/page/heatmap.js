// The chosen head's map: numbers where they fit, names where they can be read, and down to single tokens by zooming.

const plot = { box: null, left: 0, top: 0, width: 0, height: 0, view: null, sizes: "", cells: null };
// Work that is done at once, in products of numbers: some 30 ms.
const WORK = 2.4e7;

function whole(now) { return { r0: 0, r1: now.rows.length, c0: 0, c1: now.cols.length }; }
const zoomable = (now) => Math.max(now.rows.length, now.cols.length) > 24;

function buildPlot() {
  plot.box = el("canvas", { tabindex: "0", role: "application", "aria-label": "Heat-map: rows look, columns are looked at. Arrow keys move, Enter explains, plus and minus zoom." });
  $("plot").replaceChildren(plot.box);
}

function drawHeat() {
  const now = current();
  if (now.of.drawn !== "matrix") return;
  if (!plot.box?.isConnected) { buildPlot(); plotEvents(); }
  // another head of the same text is seen through the same window
  const sizes = `${now.rows.length},${now.cols.length}`;
  if (plot.sizes !== sizes) { plot.view = whole(now); plot.sizes = sizes; }
  layoutPlot(now);
  plot.cells = cellsOf(now, plot.view);
  paintPlot(now);
  nameMap(now);
}

function layoutPlot(now) {
  const width = $("plot").clientWidth, view = plot.view;
  const pen = plot.box.getContext("2d");
  pen.font = LABEL;
  const names = (list, a, b) => Math.max(0, ...list.slice(Math.floor(a), Math.min(Math.ceil(b), Math.floor(a) + 80)).map((item) => pen.measureText(shown(item.label)).width));
  const down = view.r1 - view.r0, across = view.c1 - view.c0;
  // names need 11 pixels each
  const few = Math.max(down, across) * 11 <= Math.min(width - 60, 400);
  plot.left = few ? Math.min(104, Math.ceil(names(now.rows, view.r0, view.r1)) + 10) : 44;
  const tall = few ? Math.min(92, names(now.cols, view.c0, view.c1)) : 0;
  plot.slant = few && tall > 16;
  plot.top = few ? Math.ceil(plot.slant ? tall * 0.77 + 16 : 20) : 18;
  const spare = plot.slant ? Math.min(48, tall * 0.64) : 6;
  // so high that it ends on the first screen
  const above = $("plot").getBoundingClientRect().top + scrollY;
  const room = Math.max(260, Math.min(innerHeight - above - 56, 620)) - plot.top;
  if (zoomable(now)) {
    plot.width = width - plot.left - spare;
    plot.height = Math.min(room, plot.width);
    if (down === now.rows.length && across === now.cols.length) plot.height = Math.max(60, Math.min(room, (plot.width * down) / across));
  } else {
    const cell = Math.max(12, Math.min(46, (width - plot.left - spare) / across, room / down));
    plot.width = cell * across;
    plot.height = cell * down;
  }
  plot.full = width;
}

// The cells of a view: {data, height, width, r0, c0, step}, each `step` items wide; a cell sums its keys and averages its queries.
function cellsOf(now, view) {
  const r0 = Math.max(0, Math.floor(view.r0)), r1 = Math.min(now.rows.length, Math.ceil(view.r1));
  const c0 = Math.max(0, Math.floor(view.c0)), c1 = Math.min(now.cols.length, Math.ceil(view.c1));
  const dim = now.data ? 1 : now.of.heard.get(now.place)?.dim ?? 1;
  const exact = now.data || (now.of.known(now.place) === "exact" && (r1 - r0) * (c1 - c0) * dim <= WORK && (state.measure === "weight" || (r1 - r0) * now.cols.length * dim <= 4 * WORK));
  if (!exact) {
    const map = now.of.map(now.place, state.measure);
    return { ...map, r0: 0, c0: 0, down: now.rows.length / map.height, across: now.cols.length / map.width, exact: false };
  }
  const down = Math.max(1, Math.ceil((r1 - r0) / 480)), across = Math.max(1, Math.ceil((c1 - c0) / 480));
  const height = Math.ceil((r1 - r0) / down), width = Math.ceil((c1 - c0) / across);
  const data = new Float32Array(height * width), row = new Float32Array(c1 - c0);
  for (let i = r0; i < r1; i++) {
    let part;
    if (now.data) part = now.data.subarray(i * now.cols.length + c0, i * now.cols.length + c1);
    else if (state.measure === "weight") part = now.of.stretch(now.place, i, c0, c1, row);
    else part = now.of.row(now.place, i, "share").subarray(c0, c1);
    const line = Math.floor((i - r0) / down), among = Math.min(down, r1 - r0 - line * down);
    for (let j = 0; j < part.length; j++) data[line * width + Math.floor(j / across)] += part[j] / among;
  }
  return { data, height, width, r0, c0, down, across, exact: true };
}

const LABEL = '12px system-ui, -apple-system, "Segoe UI", sans-serif';
const TINY = '9.5px system-ui, -apple-system, "Segoe UI", sans-serif';
const SMALL = '10.5px system-ui, -apple-system, "Segoe UI", sans-serif';

function paintPlot(now) {
  const { left, top, width, height, view, cells } = plot;
  const pen = canvas(plot.box, plot.full, top + height + 6);
  const cw = width / (view.c1 - view.c0), ch = height / (view.r1 - view.r0);
  plot.cw = cw; plot.ch = ch;
  Object.assign(plot.box.dataset, { left, top, cw, ch, r0: view.r0, c0: view.c0, exact: cells.exact });
  pen.save();
  pen.beginPath();
  pen.rect(left, top, width, height);
  pen.clip();
  const x = (c) => left + (c - view.c0) * cw, y = (r) => top + (r - view.r0) * ch;
  pen.imageSmoothingEnabled = cells.across * cw < 0.9;
  cells.sheet ??= picture(cells.data, cells.height, cells.width);
  pen.drawImage(cells.sheet, x(cells.c0), y(cells.r0), cells.width * cells.across * cw, cells.height * cells.down * ch);
  const single = cells.exact && cells.down === 1 && cells.across === 1;
  if (single && cw >= 9 && ch >= 9) grid(pen, view, x, y);
  if (single && cw >= 22 && ch >= 14) numbers(pen, cells, x, y, cw, ch);
  lightPlot(pen, now, x, y, cw, ch);
  pen.restore();
  pen.strokeStyle = style("--rule");
  pen.strokeRect(left - 0.5, top - 0.5, width + 1, height + 1);
  axisNames(pen, now, x, y, cw, ch);
}

function grid(pen, view, x, y) {
  pen.strokeStyle = style("--panel");
  pen.lineWidth = 1;
  pen.beginPath();
  for (let c = Math.ceil(view.c0); c <= view.c1; c++) { pen.moveTo(x(c), y(view.r0)); pen.lineTo(x(c), y(view.r1)); }
  for (let r = Math.ceil(view.r0); r <= view.r1; r++) { pen.moveTo(x(view.c0), y(r)); pen.lineTo(x(view.c1), y(r)); }
  pen.stroke();
}

function numbers(pen, cells, x, y, cw, ch) {
  pen.font = cw < 26 ? TINY : cw < 31 ? SMALL : LABEL;
  pen.textAlign = "center";
  pen.textBaseline = "middle";
  for (let i = 0; i < cells.height; i++) for (let j = 0; j < cells.width; j++) {
    const w = cells.data[i * cells.width + j];
    if (w < 0.005) continue;
    pen.fillStyle = ink(w);
    pen.globalAlpha = w < 0.05 ? 0.72 : 1;
    pen.fillText(brief(w), x(cells.c0 + j + 0.5), y(cells.r0 + i + 0.5) + 0.5);
  }
  pen.globalAlpha = 1;
}

// The row that is pointed at, and the pair that is explained.
function lightPlot(pen, now, x, y, cw, ch) {
  const at = pointed();
  if (at) {
    pen.fillStyle = style("--veil");
    if (at.row !== null) { pen.fillRect(0, 0, plot.full, y(at.row)); pen.fillRect(0, y(at.row) + Math.max(ch, 2), plot.full, 1e5); }
    else if (at.col !== null) { pen.fillRect(0, 0, x(at.col), 1e5); pen.fillRect(x(at.col) + Math.max(cw, 2), 0, 1e5, 1e5); }
  }
  pen.lineWidth = 2;
  pen.strokeStyle = style("--accent");
  if (at && at.row !== null && at.col !== null) pen.strokeRect(x(at.col) + 1, y(at.row) + 1, Math.max(3, cw - 2), Math.max(3, ch - 2));
  if (state.cell) { pen.strokeStyle = style("--mark"); pen.strokeRect(x(state.cell.col) + 1, y(state.cell.row) + 1, Math.max(3, cw - 2), Math.max(3, ch - 2)); }
}

function axisNames(pen, now, x, y, cw, ch) {
  const { view, left, top } = plot, at = pointed();
  const soft = style("--soft"), strong = style("--ink");
  pen.textBaseline = "middle";
  if (ch >= 11) {
    pen.font = ch < 14 ? SMALL : LABEL;
    for (let r = Math.ceil(view.r0 - 0.5); r < Math.min(now.rows.length, view.r1 + 0.4); r++) {
      pen.textAlign = "right";
      pen.fillStyle = at?.row === r ? strong : now.rows[r].special ? style("--faint") : soft;
      if (y(r + 0.5) > top && y(r + 0.5) < top + plot.height) pen.fillText(cut(pen, shown(now.rows[r].label), left - 9), left - 7, y(r + 0.5));
    }
  } else ticks(view.r0, view.r1, (r) => { pen.font = SMALL; pen.textAlign = "right"; pen.fillStyle = soft; pen.fillText(r.toLocaleString("en"), left - 6, y(r + 0.5)); });
  if (cw >= 11) {
    pen.font = cw < 14 ? SMALL : LABEL;
    for (let c = Math.ceil(view.c0 - 0.5); c < Math.min(now.cols.length, view.c1 + 0.4); c++) {
      if (x(c + 0.5) < left || x(c + 0.5) > left + plot.width) continue;
      pen.fillStyle = at?.col === c ? strong : now.cols[c].special ? style("--faint") : soft;
      pen.save();
      pen.translate(x(c + 0.5), top - 6);
      if (plot.slant) { pen.rotate(-0.88); pen.textAlign = "left"; } else { pen.textAlign = "center"; pen.translate(0, -4); }
      pen.fillText(cut(pen, shown(now.cols[c].label), plot.slant ? 92 : cw), 0, 0);
      pen.restore();
    }
  } else ticks(view.c0, view.c1, (c) => { pen.font = SMALL; pen.textAlign = "center"; pen.fillStyle = soft; pen.fillText(c.toLocaleString("en"), x(c + 0.5), top - 9); });
}

function cut(pen, text, room) {
  if (pen.measureText(text).width <= room) return text;
  const letters = [...text];
  while (letters.length > 1 && pen.measureText(`${letters.join("")}…`).width > room) letters.pop();
  return `${letters.join("")}…`;
}

function ticks(from, to, draw) {
  const rough = (to - from) / 6, size = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, [1, 2, 5, 10].map((m) => m * size).find((s) => s >= rough));
  for (let n = Math.ceil(from / step) * step; n < to; n += step) draw(n);
}

function nameMap(now) {
  $("map-name").replaceChildren(el("span", { class: "name" }, headName()), ` ${measureName()}`);
  const known = now.of.known(now.place), all = plot.view.r1 - plot.view.r0 >= now.rows.length;
  const text = !zoomable(now) ? "A row looks, a column is looked at. Click a cell to see how it came about."
    : known === "averaged" ? `Averaged only: ${plot.cells.height} × ${plot.cells.width} cells, and each row’s strongest pairs on pointing.`
    : plot.cells.exact ? (all ? "Exact. Wheel or + zooms, click explains a cell." : "Exact. Drag moves, 0 shows all, click explains a cell.")
    : `Averaged over ${Math.round(plot.cells.down)} × ${Math.round(plot.cells.across)} tokens. Wheel or double-click zooms to exact weights.`;
  $("map-hint").textContent = text;
  readOut(now);
}

function readOut(now) {
  const at = state.hover?.col !== null && state.hover?.row !== null ? state.hover : null;
  const box = $("readout");
  if (!at || !now.rows[at.row] || !now.cols[at.col]) {
    const first = now.of.columns !== null && items(now.of, "columns", "piece", false).some((item) => item.special);
    const share = now.of.stats[state.measure]?.special?.[now.place];
    box.replaceChildren(first ? `Special tokens take ${percent(share)} of ${state.measure === "weight" ? "the words’ weight" : "what this head moves into the words"}${state.hide ? "; they are hidden, and the rest is not rescaled." : "."}` : "");
    return;
  }
  const w = valueOf(now, at.row, at.col), many = now.rows.length > 24;
  const place = (item, i) => [token(item.label), many ? el("small", {}, ` ${i.toLocaleString("en")}`) : ""];
  box.replaceChildren(...place(now.rows[at.row], at.row), " → ", ...place(now.cols[at.col], at.col), ": ",
    el("b", {}, w === null ? `averaged ${number(near(now, at.row, at.col), 3)}` : exactly(w)));
}

function near(now, i, j) {
  const map = now.of.map(now.place, state.measure);
  return map.data[Math.floor((i * map.height) / now.rows.length) * map.width + Math.floor((j * map.width) / now.cols.length)];
}

function lightHeat() {
  const now = current();
  if (now.of.drawn !== "matrix" || !plot.cells) return;
  paintPlot(now);
  readOut(now);
}

function zoom(by, cx = 0.5, cy = 0.5) {
  const now = current(), v = plot.view;
  if (now.of.drawn !== "matrix" || !zoomable(now)) return;
  const scale = (a, b, at, total) => {
    const size = Math.min(total, Math.max(Math.min(8, total), (b - a) * by)), from = Math.max(0, Math.min(total - size, a + (b - a - size) * at));
    return [from, from + size];
  };
  const [r0, r1] = scale(v.r0, v.r1, cy, now.rows.length), [c0, c1] = scale(v.c0, v.c1, cx, now.cols.length);
  plot.view = { r0, r1, c0, c1 };
  drawHeat();
}

function pan(dr, dc) {
  const now = current(), v = plot.view;
  const move = (a, b, by, total) => { const step = Math.max(-a, Math.min(total - b, by)); return [a + step, b + step]; };
  const [r0, r1] = move(v.r0, v.r1, dr, now.rows.length), [c0, c1] = move(v.c0, v.c1, dc, now.cols.length);
  plot.view = { r0, r1, c0, c1 };
  drawHeat();
}

// Bring an item pair into sight.
function reveal(at) {
  const v = plot.view;
  if (at.row < v.r0 || at.row >= v.r1 || at.col < v.c0 || at.col >= v.c1) pan(at.row - (v.r0 + v.r1) / 2, at.col - (v.c0 + v.c1) / 2);
}

watch("layer head measure level hide theme", drawHeat);
watch("hover lock cell", lightHeat);
