// The text: short texts in large type with arcs between words, long texts as a paragraph with highlights.

// Font sizes in pixels: a text is on one line if it fits at the minimum size or above; else it is wrapped to a few lines.
const MIN_FONT_SIZE = 18, MAX_FONT_SIZE = 36, WRAPPED_FONT_SIZE = 21, MAX_LINES = 4;
let spans = { row: [], col: [] };
let highlightedWords = [];
let arcs = null;
// Positions of the words, measured once: measuring on every pointer move would force a layout each time.
let anchors = null;
// The items that the text was built from.
let builtRows = null, builtColumns = null;

function buildInputView() {
  const stage = $("stage"), current = selectedHeadData();
  highlightedWords = [];
  builtRows = builtColumns = null;
  if (current.layer.display !== "matrix") { (current.layer.image ? buildImageViewer : buildNodeChooser)(stage); return; }
  [builtRows, builtColumns] = [current.rows, current.cols];
  stage.className = current.layer.kind === "cross" ? "two" : "one";
  if (!buildTextLines(stage, current)) buildParagraphs(stage, current);
  highlightText();
}

function buildWordElement(item, index, side) {
  const node = htmlElement("span", { class: `word${item.special ? " special" : ""}`, "data-index": index, "data-side": side, tabindex: index ? "-1" : "0" },
    htmlElement("bdi", { dir: "auto" }, makeWhitespaceVisible(item.label)), htmlElement("small", { class: "weight", dir: "ltr" }));
  return node;
}

// Build the text on one line, as large as it fits, or on a few; return false if it needs more lines.
function buildTextLines(stage, current) {
  const cross = current.layer.kind === "cross";
  if (current.rows.length + current.cols.length > 160) return false;
  arcs = svgElement("svg", { class: "arcs", role: "img", "aria-label": "Arcs from each word to the words it attends to" });
  const buildWordGroup = (list, side) => htmlElement("div", { class: `words ${side}`, dir: textDirection(list), role: "group", "aria-label": "Words; arrow keys move, Enter locks" }, list.map((item, i) => buildWordElement(item, i, side)));
  const below = buildWordGroup(current.rows, "row"), above = cross ? buildWordGroup(current.cols, "col") : null;
  stage.replaceChildren(...[cross ? htmlElement("span", { class: "side" }, "keys") : null, above, arcs, below, cross ? htmlElement("span", { class: "side" }, "queries") : null].filter(Boolean));
  // the labels of the two sides are on the left
  const available = stage.clientWidth - (cross ? 68 : 8);
  let size = MAX_FONT_SIZE;
  for (const group of [below, above].filter(Boolean)) {
    group.style.fontSize = `${MAX_FONT_SIZE}px`;
    const neededWidth = [...group.children].reduce((sum, child) => sum + child.getBoundingClientRect().width, 0) + 0.36 * MAX_FONT_SIZE * group.children.length;
    size = Math.min(size, Math.floor((MAX_FONT_SIZE * available) / neededWidth));
  }
  if (size < MIN_FONT_SIZE && cross) return false;
  for (const group of [below, above].filter(Boolean)) group.style.fontSize = `${size < MIN_FONT_SIZE ? WRAPPED_FONT_SIZE : size}px`;
  spans = { row: [...below.children], col: [...(above ?? below).children] };
  stage.classList.toggle("wrapped", size < MIN_FONT_SIZE);
  const topCentre = (node) => [node.offsetLeft + node.offsetWidth / 2, node.offsetTop];
  anchors = { row: spans.row.map(topCentre), col: spans.col.map(topCentre), width: stage.clientWidth, height: stage.clientHeight };
  return new Set(anchors.row.map(([, y]) => y)).size <= MAX_LINES;
}

// Build the text as paragraphs, in blocks that the browser lays out only when they are visible.
function buildParagraphs(stage, current) {
  arcs = null;
  const buildBlocks = (list, side) => {
    const blocks = [];
    spans[side] = [];
    for (let begin = 0; begin < list.length; begin += 200) {
      const block = htmlElement("div", { class: "block", style: `contain-intrinsic-size:auto ${Math.ceil(Math.min(200, list.length - begin) / 14) * 26}px` });
      list.slice(begin, begin + 200).forEach((item, i) => {
        const node = htmlElement("span", { class: `word${item.special ? " special" : ""}`, "data-index": begin + i, "data-side": side, dir: "auto", tabindex: begin + i ? null : "0" }, makeWhitespaceVisible(item.label));
        spans[side].push(node);
        block.append(node, continuesWord(list, begin + i + 1) ? "" : " ");
      });
      blocks.push(block);
    }
    return htmlElement("div", { class: `reading ${side}`, dir: textDirection(list), role: "group", "aria-label": "The text; arrow keys move, Enter locks" }, blocks);
  };
  const parts = [buildBlocks(current.rows, "row")];
  if (current.layer.kind === "cross") parts.unshift(buildBlocks(current.cols, "col")); else spans.col = spans.row;
  stage.replaceChildren(...parts);
}

// The writing direction of most words.
function textDirection(list) {
  const words = list.filter((item) => !item.special);
  return words.filter((item) => /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/.test(item.label)).length > words.length / 2 ? "rtl" : "ltr";
}

// Whether item i belongs to the same word as the item before it.
const continuesWord = (list, i) => list[i] && list[i - 1] && !list[i].special && list[i].word === list[i - 1].word;

function highlightText() {
  const current = selectedHeadData();
  if (current.layer.display !== "matrix") return;
  for (const node of highlightedWords) { node.style.background = node.style.color = ""; node.classList.remove("active"); const label = node.querySelector(".weight"); if (label) label.textContent = ""; }
  highlightedWords = [];
  const target = highlightedItems();
  if (target && (target.row ?? target.col) !== null) highlightWords(current, target);
  if (arcs) drawArcs(current, target);
  updateCaption(current, target);
}

function highlightWords(current, target) {
  const isRow = target.row !== null && target.row < current.rows.length;
  const node = isRow ? spans.row[target.row] : spans.col[target.col];
  if (!node) return;
  const best = isRow ? largestEntries(weightsOfRow(current, target.row), 48, 0.002) : strongestQueriesOfKey(current, target.col);
  for (const [j, w] of best) {
    const other = (isRow ? spans.col : spans.row)[j];
    if (!other) continue;
    other.style.background = weightColour(w);
    other.style.color = readableTextColour(w);
    const label = other.querySelector(".weight");
    if (label && w >= 0.005) label.textContent = formatWeightShort(w);
    highlightedWords.push(other);
  }
  node.classList.add("active");
  highlightedWords.push(node);
}

// The queries that attend to an item; empty if the matrix is not known.
function strongestQueriesOfKey(current, j) {
  if (!current.data) return [];
  return largestEntries(Float32Array.from(current.rows, (_, i) => current.data[i * current.cols.length + j]), 48, 0.002);
}

const isTextWrapped = () => $("stage").classList.contains("wrapped");

// The arcs to draw: of the highlighted word its strongest arcs; else of each word the strongest, and others from 0.25.
function selectArcs(current, target) {
  const list = [];
  const addArc = (i, j, w) => list.push({ i, j, w });
  if (target && target.row !== null && target.row < current.rows.length) largestEntries(weightsOfRow(current, target.row), 14, 0.01).forEach(([j, w]) => addArc(target.row, j, w));
  else if (target && target.col !== null) strongestQueriesOfKey(current, target.col).slice(0, 20).forEach(([i, w]) => addArc(i, target.col, w));
  else current.rows.forEach((item, i) => {
    if (item.special) return;
    largestEntries(weightsOfRow(current, i), 3, 0.04).forEach(([j, w], n) => {
      // arcs to special tokens at the ends would cross all lines
      const through = isTextWrapped() && current.cols[j].special;
      if (!through && (n === 0 || w >= 0.25)) addArc(i, j, w);
    });
  });
  return list.sort((a, b) => a.w - b.w);
}

function drawArcs(current, target) {
  const cross = current.layer.kind === "cross", wrapped = isTextWrapped();
  const height = wrapped ? anchors.height : cross ? 84 : innerHeight < 820 ? 108 : 132;
  const arcAnchor = (side) => ([x, y]) => [x, wrapped ? y + 1 : cross && side === "col" ? 3 : height - 3];
  const list = selectArcs(current, target);
  const from = anchors.row.map(arcAnchor("row")), to = cross ? anchors.col.map(arcAnchor("col")) : from;
  const maxDistance = Math.max(60, ...list.map(({ i, j }) => Math.abs(from[i][0] - to[j][0])));
  const rise = wrapped ? 36 : height - 12;
  arcs.setAttribute("viewBox", `0 0 ${anchors.width} ${height}`);
  arcs.setAttribute("width", anchors.width);
  arcs.setAttribute("height", height);
  arcs.replaceChildren(...list.map(({ i, j, w }) => {
    const self = !cross && i === j, tint = weightColour(Math.max(0.16, w)), [x, y] = to[j];
    const d = self ? selfLoopPath(...from[i]) : taperedCurvePath(bezierCurve(from[i], to[j], cross ? null : rise * (0.2 + 0.8 * Math.min(1, Math.abs(from[i][0] - x) / maxDistance) ** 0.75)), w);
    const path = svgElement("path", { d, fill: self ? "none" : tint, stroke: self ? tint : "none", "stroke-width": self ? 1 + 2.6 * w : null, class: "arc" },
      svgElement("title", {}, `${current.rows[i].label} attends to ${current.cols[j].label}: ${formatNumber(w)}`));
    return svgElement("g", {}, path, self ? null : svgElement("circle", { cx: x, cy: y, r: 2 + 2.6 * w, fill: tint }));
  }));
}

// A Bézier curve between two anchors: an arch of height `rise`, or an S-curve between two lines of text if `rise` is null.
function bezierCurve([x0, y0], [x1, y1], rise) {
  const lift = rise === null ? [(y1 - y0) * 0.5, (y0 - y1) * 0.5] : [-rise * 1.33, -rise * 1.33];
  const cubicPolynomial = (a, b, c, d) => (t) => a * (1 - t) ** 3 + 3 * b * t * (1 - t) ** 2 + 3 * c * t * t * (1 - t) + d * t ** 3;
  return { x: cubicPolynomial(x0, x0, x1, x1), y: cubicPolynomial(y0, y0 + lift[0], y1 + lift[1], y1) };
}

// The outline of a curve that is thin at its start and thick at its end.
function taperedCurvePath({ x, y }, w) {
  const left = [], right = [], steps = 56, h = 0.01;
  for (let n = 0; n <= steps; n++) {
    const t = n / steps, dx = x(Math.min(1, t + h)) - x(Math.max(0, t - h)), dy = y(Math.min(1, t + h)) - y(Math.max(0, t - h));
    const length = Math.hypot(dx, dy) || 1, half = 0.5 + (0.3 + 3.4 * w) * t;
    left.push(`${(x(t) - (dy / length) * half).toFixed(1)},${(y(t) + (dx / length) * half).toFixed(1)}`);
    right.unshift(`${(x(t) + (dy / length) * half).toFixed(1)},${(y(t) - (dx / length) * half).toFixed(1)}`);
  }
  return `M${left.join("L")}L${right.join("L")}Z`;
}

const selfLoopPath = (x, y) => `M${x - 3},${y}C${x - 30},${y - 36} ${x + 30},${y - 36} ${x + 3},${y}`;

function updateCaption(current, target) {
  const measure = state.measure === "weight" ? "." : " of what the head adds to it.";
  const caption = $("caption"), role = cardsOfHead(current.layer, current.head)[0]?.role;
  const row = target && target.row !== null ? current.rows[target.row] : null;
  if (row) {
    const best = largestEntries(weightsOfRow(current, target.row), 3, 0.01);
    const list = best.flatMap(([j, w], n) => [n ? ", " : "", tokenElement(current.cols[j].label), ` ${formatNumber(w)}`]);
    caption.replaceChildren(htmlElement("b", {}, selectedHeadName()), " ", tokenElement(row.label), state.measure === "weight" ? " attends to " : " gets from ", ...(list.length ? [...list, measure] : [current.layer.detailLevel(current.head) === "averaged" ? "– only averages are known for this head." : "nothing."]),
      state.lock ? htmlElement("span", { class: "hint" }, " Locked; Escape releases it.") : htmlElement("span", { class: "hint" }, " Click to lock."));
    return;
  }
  const col = target && target.col !== null ? current.cols[target.col] : null;
  if (col) { caption.replaceChildren(htmlElement("b", {}, selectedHeadName()), " words that attend to ", tokenElement(col.label), "."); return; }
  caption.replaceChildren(htmlElement("b", {}, selectedHeadName()), role ? ` ${role}. ` : ". ",
    htmlElement("span", { class: "hint" }, arcs ? `Arcs run from a word (thin end) to the word it attends to most (thick end)${isTextWrapped() ? "; arcs to special tokens are hidden" : ""}. Hover over a word to see all its arcs.` : "Hover over a word to see what it attends to; click to lock it."));
}

// Scroll a long text to a word, without scrolling the page.
function scrollToWord(i) {
  const node = spans.row[i], box = node?.closest(".reading");
  if (!box) return;
  const block = node.parentElement;
  // a hidden block is not laid out yet: scroll to the block first
  box.scrollTop = block.offsetTop - box.offsetTop;
  box.scrollTop += node.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 2;
}

// Move the focus to another word by an arrow key.
function moveToWordByKey(node, key) {
  const { side, index } = node.dataset, back = getComputedStyle(node.parentElement).direction === "rtl" ? 1 : -1;
  const step = { ArrowLeft: back, ArrowRight: -back, ArrowUp: -1, ArrowDown: 1 }[key];
  const next = spans[side][Number(index) + step];
  if (!next) return;
  node.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function bindTextEvents() {
  const stage = $("stage");
  const wordUnderPointer = (event) => {
    const node = event.target.closest?.(".word");
    if (!node || selectedLayer().display !== "matrix") return null;
    const index = Number(node.dataset.index);
    return node.dataset.side === "row" ? { row: index, col: null } : { row: null, col: index };
  };
  const sameItem = (a, b) => a === b || (a && b && a.row === b.row && a.col === b.col);
  stage.addEventListener("pointerover", (event) => { if (selectedLayer().display !== "matrix") return; const to = wordUnderPointer(event); if (!sameItem(to, state.hover)) setState({ hover: to }); });
  stage.addEventListener("pointerleave", () => { if (selectedLayer().display === "matrix") setState({ hover: null }); });
  stage.addEventListener("focusin", (event) => { if (selectedLayer().display === "matrix" && event.target.matches(":focus-visible")) setState({ hover: wordUnderPointer(event) }); });
  stage.addEventListener("click", (event) => { const to = wordUnderPointer(event); if (to) setState({ lock: sameItem(to, state.lock) ? null : to }); });
}

watch("layer head measure level hide theme", () => {
  const current = selectedHeadData();
  if (current.layer.display !== "matrix" || builtRows !== current.rows || builtColumns !== current.cols) buildInputView(); else highlightText();
});
watch("hover lock", highlightText);
