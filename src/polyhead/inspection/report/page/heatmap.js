// The heat map of the selected head: with numbers and names where they fit, and zoom down to single tokens.

const plot = { canvas: null, left: 0, top: 0, width: 0, height: 0, view: null, sizes: "", cells: null };
// Maximum number of multiplications per drawing: about 30 ms.
const MAX_PRODUCTS = 2.4e7;

function wholeMatrixView(current) { return { r0: 0, r1: current.rows.length, c0: 0, c1: current.cols.length }; }
// Up to so many rows of a wide map all have a name.
const MAX_NAMED_ROWS = 40;
const canZoom = (current) => Math.max(current.rows.length, current.cols.length) > 24;

function buildHeatmap() {
  plot.canvas = htmlElement("canvas", { tabindex: "0", role: "application", "aria-label": "Heat map: rows are queries, columns are keys. Arrow keys move, Enter explains a cell, plus and minus zoom." });
  $("plot").replaceChildren(plot.canvas);
}

function drawHeatmap() {
  const current = selectedHeadData();
  if (current.layer.display !== "matrix") return;
  if (!plot.canvas?.isConnected) { buildHeatmap(); bindHeatmapEvents(); }
  // the zoom is kept for other heads of the same size
  const sizes = `${current.rows.length},${current.cols.length}`;
  if (plot.sizes !== sizes) { plot.view = wholeMatrixView(current); plot.sizes = sizes; }
  layOutHeatmap(current);
  plot.cells = computeHeatmapCells(current, plot.view);
  paintHeatmap(current);
  updateHeatmapTitle(current);
}

function layOutHeatmap(current) {
  const width = $("plot").clientWidth, view = plot.view;
  const ctx = plot.canvas.getContext("2d");
  ctx.font = LABEL_FONT;
  const widestLabel = (list, a, b) => Math.max(0, ...list.slice(Math.floor(a), Math.min(Math.ceil(b), Math.floor(a) + 80)).map((item) => ctx.measureText(makeWhitespaceVisible(item.label)).width));
  const down = view.r1 - view.r0, across = view.c1 - view.c0;
  // a name needs 11 pixels; few rows always have names
  const fewRows = current.rows.length <= MAX_NAMED_ROWS, showRowNames = fewRows || down * 11 <= 400, showColumnNames = across * 11 <= width - 60;
  plot.left = showRowNames ? Math.min(104, Math.ceil(widestLabel(current.rows, view.r0, view.r1)) + 10) : 44;
  const nameHeight = showColumnNames ? Math.min(92, widestLabel(current.cols, view.c0, view.c1)) : 0;
  plot.slantNames = showColumnNames && nameHeight > 16;
  plot.top = showColumnNames ? Math.ceil(plot.slantNames ? nameHeight * 0.77 + 16 : 20) : 18;
  const margin = plot.slantNames ? Math.min(48, nameHeight * 0.64) : 6;
  // the map should end above the fold
  const offsetTop = $("plot").getBoundingClientRect().top + scrollY;
  const available = Math.max(260, Math.min(innerHeight - offsetTop - 56, 620)) - plot.top;
  if (canZoom(current)) {
    plot.width = width - plot.left - margin;
    plot.height = Math.min(available, plot.width);
    // a square matrix stays square on a wide page
    if (!isWideLayer(current.layer)) plot.width = Math.min(plot.width, Math.max(360, (available * current.cols.length) / current.rows.length));
    if (fewRows && current.cols.length > current.rows.length) plot.height = Math.max(12 * current.rows.length, Math.min(available, Math.max(20 * current.rows.length, (plot.width * current.rows.length) / current.cols.length)));
    else if (down === current.rows.length && across === current.cols.length) plot.height = Math.max(60, Math.min(available, (plot.width * down) / across));
  } else {
    const cell = Math.max(12, Math.min(46, (width - plot.left - margin) / across, available / down));
    plot.width = cell * across;
    plot.height = cell * down;
  }
  plot.full = width;
}

// The cells of a view, each `down` x `across` items: sums over its keys, means over its queries.
function computeHeatmapCells(current, view) {
  const r0 = Math.max(0, Math.floor(view.r0)), r1 = Math.min(current.rows.length, Math.ceil(view.r1));
  const c0 = Math.max(0, Math.floor(view.c0)), c1 = Math.min(current.cols.length, Math.ceil(view.c1));
  const dim = current.data ? 1 : current.layer.tensors.get(current.head)?.dim ?? 1;
  const exact = current.data || (current.layer.detailLevel(current.head) === "exact" && (r1 - r0) * (c1 - c0) * dim <= MAX_PRODUCTS && (state.measure === "weight" || (r1 - r0) * current.cols.length * dim <= 4 * MAX_PRODUCTS));
  if (!exact) {
    const map = current.layer.averagedMap(current.head, state.measure);
    return { ...map, r0: 0, c0: 0, down: current.rows.length / map.height, across: current.cols.length / map.width, exact: false };
  }
  const down = Math.max(1, Math.ceil((r1 - r0) / 480)), across = Math.max(1, Math.ceil((c1 - c0) / Math.max(480, plot.width)));
  const height = Math.ceil((r1 - r0) / down), width = Math.ceil((c1 - c0) / across);
  const data = new Float32Array(height * width), row = new Float32Array(c1 - c0);
  for (let i = r0; i < r1; i++) {
    let weights;
    if (current.data) weights = current.data.subarray(i * current.cols.length + c0, i * current.cols.length + c1);
    else if (state.measure === "weight") weights = current.layer.fillWeights(current.head, i, c0, c1, row);
    else weights = current.layer.weightRow(current.head, i, "share").subarray(c0, c1);
    const cellRow = Math.floor((i - r0) / down), queryCount = Math.min(down, r1 - r0 - cellRow * down);
    for (let j = 0; j < weights.length; j++) data[cellRow * width + Math.floor(j / across)] += weights[j] / queryCount;
  }
  markDisallowed(data, disallowedCells(current, { r0, r1, c0, c1, down, across, height, width }));
  return { data, height, width, r0, c0, down, across, exact: true };
}

// For each cell 1 if it has no allowed pair; null if all have.
function disallowedCells(current, { r0, r1, c0, c1, down, across, height, width }) {
  if (!current.layer.hasMask) return null;
  const cells = new Uint8Array(height * width).fill(1);
  for (let i = r0; i < r1; i++) for (let j = c0; j < c1; j++) {
    const n = Math.floor((i - r0) / down) * width + Math.floor((j - c0) / across);
    if (cells[n] && isAllowed(current, i, j)) cells[n] = 0;
  }
  return cells;
}

const LABEL_FONT = '12px system-ui, -apple-system, "Segoe UI", sans-serif';
const TINY_FONT = '9.5px system-ui, -apple-system, "Segoe UI", sans-serif';
const SMALL_FONT = '10.5px system-ui, -apple-system, "Segoe UI", sans-serif';

function paintHeatmap(current) {
  const { left, top, width, height, view, cells } = plot;
  const ctx = resizeAndClearCanvas(plot.canvas, plot.full, top + height + 6);
  const cw = width / (view.c1 - view.c0), ch = height / (view.r1 - view.r0);
  plot.cw = cw; plot.ch = ch;
  Object.assign(plot.canvas.dataset, { left, top, cw, ch, r0: view.r0, c0: view.c0, exact: cells.exact });
  ctx.save();
  ctx.beginPath();
  ctx.rect(left, top, width, height);
  ctx.clip();
  const x = (c) => left + (c - view.c0) * cw, y = (r) => top + (r - view.r0) * ch;
  ctx.imageSmoothingEnabled = cells.across * cw < 0.9;
  if (current.layer.hasMask) fillHatched(ctx, left, top, width, height);
  cells.canvas ??= drawMatrix(cells.data, cells.height, cells.width);
  ctx.drawImage(cells.canvas, x(cells.c0), y(cells.r0), cells.width * cells.across * cw, cells.height * cells.down * ch);
  const single = cells.exact && cells.down === 1 && cells.across === 1;
  if (single && cw >= 9 && ch >= 9) drawGridLines(ctx, view, x, y);
  if (single && cw >= 22 && ch >= 14) drawCellNumbers(ctx, cells, x, y, cw, ch);
  drawHeatmapHighlight(ctx, current, x, y, cw, ch);
  ctx.restore();
  ctx.strokeStyle = themeColour("--rule");
  ctx.strokeRect(left - 0.5, top - 0.5, width + 1, height + 1);
  drawAxisLabels(ctx, current, x, y, cw, ch);
}

function drawGridLines(ctx, view, x, y) {
  ctx.strokeStyle = themeColour("--panel");
  ctx.lineWidth = 1;
  ctx.beginPath();
  for (let c = Math.ceil(view.c0); c <= view.c1; c++) { ctx.moveTo(x(c), y(view.r0)); ctx.lineTo(x(c), y(view.r1)); }
  for (let r = Math.ceil(view.r0); r <= view.r1; r++) { ctx.moveTo(x(view.c0), y(r)); ctx.lineTo(x(view.c1), y(r)); }
  ctx.stroke();
}

function drawCellNumbers(ctx, cells, x, y, cw, ch) {
  ctx.font = cw < 26 ? TINY_FONT : cw < 31 ? SMALL_FONT : LABEL_FONT;
  ctx.textAlign = "center";
  ctx.textBaseline = "middle";
  for (let i = 0; i < cells.height; i++) for (let j = 0; j < cells.width; j++) {
    const w = cells.data[i * cells.width + j];
    if (!(w >= 0.005)) continue;
    ctx.fillStyle = readableTextColour(w);
    ctx.globalAlpha = w < 0.05 ? 0.72 : 1;
    ctx.fillText(formatWeightShort(w), x(cells.c0 + j + 0.5), y(cells.r0 + i + 0.5) + 0.5);
  }
  ctx.globalAlpha = 1;
}

// Mark the highlighted row or column, and the explained cell.
function drawHeatmapHighlight(ctx, current, x, y, cw, ch) {
  const target = highlightedItems();
  if (target) {
    ctx.fillStyle = themeColour("--veil");
    if (target.row !== null) { ctx.fillRect(0, 0, plot.full, y(target.row)); ctx.fillRect(0, y(target.row) + Math.max(ch, 2), plot.full, 1e5); }
    else if (target.col !== null) { ctx.fillRect(0, 0, x(target.col), 1e5); ctx.fillRect(x(target.col) + Math.max(cw, 2), 0, 1e5, 1e5); }
  }
  ctx.lineWidth = 2;
  ctx.strokeStyle = themeColour("--accent");
  if (target && target.row !== null && target.col !== null) ctx.strokeRect(x(target.col) + 1, y(target.row) + 1, Math.max(3, cw - 2), Math.max(3, ch - 2));
  if (state.cell) { ctx.strokeStyle = themeColour("--mark"); ctx.strokeRect(x(state.cell.col) + 1, y(state.cell.row) + 1, Math.max(3, cw - 2), Math.max(3, ch - 2)); }
}

function drawAxisLabels(ctx, current, x, y, cw, ch) {
  const { view, left, top } = plot, target = highlightedItems();
  const soft = themeColour("--soft"), strong = themeColour("--ink");
  ctx.textBaseline = "middle";
  if (ch >= 11) {
    ctx.font = ch < 14 ? SMALL_FONT : LABEL_FONT;
    for (let r = Math.ceil(view.r0 - 0.5); r < Math.min(current.rows.length, view.r1 + 0.4); r++) {
      ctx.textAlign = "right";
      ctx.fillStyle = target?.row === r ? strong : current.rows[r].special ? themeColour("--faint") : soft;
      if (y(r + 0.5) > top && y(r + 0.5) < top + plot.height) ctx.fillText(truncateToWidth(ctx, makeWhitespaceVisible(current.rows[r].label), left - 9), left - 7, y(r + 0.5));
    }
  } else drawTicks(view.r0, view.r1, (r) => { ctx.font = SMALL_FONT; ctx.textAlign = "right"; ctx.fillStyle = soft; ctx.fillText(r.toLocaleString("en"), left - 6, y(r + 0.5)); });
  if (cw >= 11) {
    ctx.font = cw < 14 ? SMALL_FONT : LABEL_FONT;
    for (let c = Math.ceil(view.c0 - 0.5); c < Math.min(current.cols.length, view.c1 + 0.4); c++) {
      if (x(c + 0.5) < left || x(c + 0.5) > left + plot.width) continue;
      ctx.fillStyle = target?.col === c ? strong : current.cols[c].special ? themeColour("--faint") : soft;
      ctx.save();
      ctx.translate(x(c + 0.5), top - 6);
      if (plot.slantNames) { ctx.rotate(-0.88); ctx.textAlign = "left"; } else { ctx.textAlign = "center"; ctx.translate(0, -4); }
      ctx.fillText(truncateToWidth(ctx, makeWhitespaceVisible(current.cols[c].label), plot.slantNames ? 92 : cw), 0, 0);
      ctx.restore();
    }
  } else drawTicks(view.c0, view.c1, (c) => { ctx.font = SMALL_FONT; ctx.textAlign = "center"; ctx.fillStyle = soft; ctx.fillText(c.toLocaleString("en"), x(c + 0.5), top - 9); });
}

function truncateToWidth(ctx, text, maxWidth) {
  if (ctx.measureText(text).width <= maxWidth) return text;
  const letters = [...text];
  while (letters.length > 1 && ctx.measureText(`${letters.join("")}…`).width > maxWidth) letters.pop();
  return `${letters.join("")}…`;
}

function drawTicks(from, to, draw) {
  const rough = (to - from) / 6, size = 10 ** Math.floor(Math.log10(rough));
  const step = Math.max(1, [1, 2, 5, 10].map((m) => m * size).find((s) => s >= rough));
  for (let n = Math.ceil(from / step) * step; n < to; n += step) draw(n);
}

function updateHeatmapTitle(current) {
  $("map-name").replaceChildren(htmlElement("span", { class: "name" }, selectedHeadName()), ` ${measureName()}`);
  const detail = current.layer.detailLevel(current.head), isFull = plot.view.r1 - plot.view.r0 >= current.rows.length;
  const text = !canZoom(current) ? "Rows are queries, columns are keys. Click a cell to see how it is computed."
    : detail === "averaged" ? `Averaged only: ${plot.cells.height} × ${plot.cells.width} cells. Hover over a row for its strongest pairs.`
    : plot.cells.exact ? (isFull ? "Exact weights. Scroll or press + to zoom; click a cell to see how it is computed." : "Exact weights. Drag to move, press 0 to show all; click a cell to see how it is computed.")
    : `Averaged over ${Math.round(plot.cells.down)} × ${Math.round(plot.cells.across)} tokens. Scroll or double-click to zoom to exact weights.`;
  $("map-hint").textContent = current.layer.hasMask ? `${text} Hatched: cannot be attended to.` : text;
  updateCellReadout(current);
}

function updateCellReadout(current) {
  const cell = state.hover?.col !== null && state.hover?.row !== null ? state.hover : null;
  const box = $("readout");
  if (!cell || !current.rows[cell.row] || !current.cols[cell.col]) {
    const hasSpecial = current.layer.columns !== null && listItems(current.layer, "columns", "piece", false).some((item) => item.special);
    const share = current.layer.stats[state.measure]?.special?.[current.head];
    box.replaceChildren(hasSpecial ? `Special tokens take ${formatPercent(share)} of ${state.measure === "weight" ? "the words’ weight" : "what this head adds to the words"}${state.hide ? "; they are hidden, and the other weights are not rescaled." : "."}` : "");
    return;
  }
  const w = weightOfPair(current, cell.row, cell.col), showIndices = current.rows.length > 24;
  const describeItem = (item, i) => [tokenElement(item.label), showIndices ? htmlElement("small", {}, ` ${i.toLocaleString("en")}`) : ""];
  const names = [describeItem(current.rows[cell.row], cell.row), describeItem(current.cols[cell.col], cell.col)];
  if (!isAllowed(current, cell.row, cell.col)) { box.replaceChildren(...names[0], " cannot attend to ", ...names[1], `: ${describeDisallowed(current, cell.row, cell.col)}.`); return; }
  box.replaceChildren(...names[0], " attends to ", ...names[1], ": ",
    htmlElement("b", {}, w === null ? `averaged ${formatNumber(averagedWeight(current, cell.row, cell.col), 3)}` : formatWeight(w)));
}

// The cell of the averaged map that contains a pair.
function averagedWeight(current, i, j) {
  const map = current.layer.averagedMap(current.head, state.measure);
  return map.data[Math.floor((i * map.height) / current.rows.length) * map.width + Math.floor((j * map.width) / current.cols.length)];
}

function updateHeatmapHighlight() {
  const current = selectedHeadData();
  if (current.layer.display !== "matrix" || !plot.cells) return;
  paintHeatmap(current);
  updateCellReadout(current);
}

function zoomHeatmap(by, cx = 0.5, cy = 0.5) {
  const current = selectedHeadData(), v = plot.view;
  if (current.layer.display !== "matrix" || !canZoom(current)) return;
  const zoomAxis = (a, b, centre, total) => {
    // a short side is always shown as a whole
    if (total <= 24) return [0, total];
    const size = Math.min(total, Math.max(Math.min(8, total), (b - a) * by)), from = Math.max(0, Math.min(total - size, a + (b - a - size) * centre));
    return [from, from + size];
  };
  const [r0, r1] = zoomAxis(v.r0, v.r1, cy, current.rows.length), [c0, c1] = zoomAxis(v.c0, v.c1, cx, current.cols.length);
  plot.view = { r0, r1, c0, c1 };
  drawHeatmap();
}

function panHeatmap(dr, dc) {
  const current = selectedHeadData(), v = plot.view;
  const panAxis = (a, b, by, total) => { const step = Math.max(-a, Math.min(total - b, by)); return [a + step, b + step]; };
  const [r0, r1] = panAxis(v.r0, v.r1, dr, current.rows.length), [c0, c1] = panAxis(v.c0, v.c1, dc, current.cols.length);
  plot.view = { r0, r1, c0, c1 };
  drawHeatmap();
}

// Move the view so that it contains a cell.
function panToCell(cell) {
  const v = plot.view;
  if (cell.row < v.r0 || cell.row >= v.r1 || cell.col < v.c0 || cell.col >= v.c1) panHeatmap(cell.row - (v.r0 + v.r1) / 2, cell.col - (v.c0 + v.c1) / 2);
}

watch("layer head measure level hide theme", drawHeatmap);
watch("hover lock cell", updateHeatmapHighlight);
