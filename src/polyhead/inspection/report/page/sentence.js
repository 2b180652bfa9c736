// The text: large, with arcs from each word to where it looks; or, where it is long, to be read, with highlights.

// Sizes of type: what fits on one line at LEAST or more stands there; else it is set at FLOWING, on some lines.
const LEAST = 18, LARGEST = 36, FLOWING = 21, LINES_AT_MOST = 4;
let spans = { row: [], col: [] };
let lit = [];
let arcs = null;
// where words stand on the stage, measured once: asking the browser while pointing costs a layout each time
let feet = null;
// the items that the text was built of
let built = null, builtBeside = null;

function buildSentence() {
  const stage = $("stage"), now = current();
  lit = [];
  built = builtBeside = null;
  if (now.of.drawn !== "matrix") { (now.of.image ? buildPhoto : buildChooser)(stage); return; }
  [built, builtBeside] = [now.rows, now.cols];
  stage.className = now.of.kind === "cross" ? "two" : "one";
  if (!buildLines(stage, now)) buildReading(stage, now);
  lightSentence();
}

function word(item, index, side) {
  const node = el("span", { class: `word${item.special ? " special" : ""}`, "data-index": index, "data-side": side, tabindex: index ? "-1" : "0" },
    el("bdi", { dir: "auto" }, shown(item.label)), el("small", { class: "weight", dir: "ltr" }));
  return node;
}

// On one line, as large as fits, or on a few; false where that is not enough.
function buildLines(stage, now) {
  const cross = now.of.kind === "cross";
  if (now.rows.length + now.cols.length > 160) return false;
  arcs = svg("svg", { class: "arcs", role: "img", "aria-label": "Arcs from each word to the words it looks at" });
  const line = (list, side) => el("div", { class: `words ${side}`, dir: direction(list), role: "group", "aria-label": "Words; arrow keys move, Enter locks" }, list.map((item, i) => word(item, i, side)));
  const below = line(now.rows, "row"), above = cross ? line(now.cols, "col") : null;
  stage.replaceChildren(...[cross ? el("span", { class: "side" }, "looked at") : null, above, arcs, below, cross ? el("span", { class: "side" }, "looks") : null].filter(Boolean));
  // the names of the two sides stand at the left
  const room = stage.clientWidth - (cross ? 68 : 8);
  let size = LARGEST;
  for (const one of [below, above].filter(Boolean)) {
    one.style.fontSize = `${LARGEST}px`;
    const wanted = [...one.children].reduce((sum, child) => sum + child.getBoundingClientRect().width, 0) + 0.36 * LARGEST * one.children.length;
    size = Math.min(size, Math.floor((LARGEST * room) / wanted));
  }
  if (size < LEAST && cross) return false;
  for (const one of [below, above].filter(Boolean)) one.style.fontSize = `${size < LEAST ? FLOWING : size}px`;
  spans = { row: [...below.children], col: [...(above ?? below).children] };
  stage.classList.toggle("flowing", size < LEAST);
  const middle = (node) => [node.offsetLeft + node.offsetWidth / 2, node.offsetTop];
  feet = { row: spans.row.map(middle), col: spans.col.map(middle), width: stage.clientWidth, height: stage.clientHeight };
  return new Set(feet.row.map(([, y]) => y)).size <= LINES_AT_MOST;
}

// In lines, in blocks that the browser lays out only when they come into sight.
function buildReading(stage, now) {
  arcs = null;
  const page = (list, side) => {
    const blocks = [];
    spans[side] = [];
    for (let begin = 0; begin < list.length; begin += 200) {
      const block = el("div", { class: "block", style: `contain-intrinsic-size:auto ${Math.ceil(Math.min(200, list.length - begin) / 14) * 26}px` });
      list.slice(begin, begin + 200).forEach((item, i) => {
        const one = el("span", { class: `word${item.special ? " special" : ""}`, "data-index": begin + i, "data-side": side, dir: "auto", tabindex: begin + i ? null : "0" }, shown(item.label));
        spans[side].push(one);
        block.append(one, glued(list, begin + i + 1) ? "" : " ");
      });
      blocks.push(block);
    }
    return el("div", { class: `reading ${side}`, dir: direction(list), role: "group", "aria-label": "The text; arrow keys move, Enter locks" }, blocks);
  };
  const parts = [page(now.rows, "row")];
  if (now.of.kind === "cross") parts.unshift(page(now.cols, "col")); else spans.col = spans.row;
  stage.replaceChildren(...parts);
}

// A text runs the way most of its words do.
function direction(list) {
  const words = list.filter((item) => !item.special);
  return words.filter((item) => /[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/.test(item.label)).length > words.length / 2 ? "rtl" : "ltr";
}

// Pieces of one word stand together.
const glued = (list, i) => list[i] && list[i - 1] && !list[i].special && list[i].word === list[i - 1].word;

function lightSentence() {
  const now = current();
  if (now.of.drawn !== "matrix") return;
  for (const one of lit) { one.style.background = one.style.color = ""; one.classList.remove("looking"); const small = one.querySelector(".weight"); if (small) small.textContent = ""; }
  lit = [];
  const at = pointed();
  if (at && (at.row ?? at.col) !== null) lightWords(now, at);
  if (arcs) drawArcs(now, at);
  drawCaption(now, at);
}

function lightWords(now, at) {
  const row = at.row !== null && at.row < now.rows.length;
  const one = row ? spans.row[at.row] : spans.col[at.col];
  if (!one) return;
  const best = row ? strongest(rowOf(now, at.row), 48, 0.002) : columnOf(now, at.col);
  for (const [j, w] of best) {
    const other = (row ? spans.col : spans.row)[j];
    if (!other) continue;
    other.style.background = colour(w);
    other.style.color = ink(w);
    const small = other.querySelector(".weight");
    if (small && w >= 0.005) small.textContent = brief(w);
    lit.push(other);
  }
  one.classList.add("looking");
  lit.push(one);
}

// Who looks at an item: known only where there is a matrix.
function columnOf(now, j) {
  if (!now.data) return [];
  return strongest(Float32Array.from(now.rows, (_, i) => now.data[i * now.cols.length + j]), 48, 0.002);
}

const flowing = () => $("stage").classList.contains("flowing");

// Which arcs are drawn: all of a word that is pointed at; else of each word the strongest, and whatever is strong.
function chosenArcs(now, at) {
  const list = [];
  const add = (i, j, w) => list.push({ i, j, w });
  if (at && at.row !== null && at.row < now.rows.length) strongest(rowOf(now, at.row), 14, 0.01).forEach(([j, w]) => add(at.row, j, w));
  else if (at && at.col !== null) columnOf(now, at.col).slice(0, 20).forEach(([i, w]) => add(i, at.col, w));
  else now.rows.forEach((item, i) => {
    if (item.special) return;
    strongest(rowOf(now, i), 3, 0.04).forEach(([j, w], n) => {
      // across several lines, arcs to the ends of the text would run through all of it
      const through = flowing() && now.cols[j].special;
      if (!through && (n === 0 || w >= 0.25)) add(i, j, w);
    });
  });
  return list.sort((a, b) => a.w - b.w);
}

function drawArcs(now, at) {
  const cross = now.of.kind === "cross", flows = flowing();
  const height = flows ? feet.height : cross ? 84 : innerHeight < 820 ? 108 : 132;
  const foot = (side) => ([x, y]) => [x, flows ? y + 1 : cross && side === "col" ? 3 : height - 3];
  const list = chosenArcs(now, at);
  const from = feet.row.map(foot("row")), to = cross ? feet.col.map(foot("col")) : from;
  const far = Math.max(60, ...list.map(({ i, j }) => Math.abs(from[i][0] - to[j][0])));
  const rise = flows ? 36 : height - 12;
  arcs.setAttribute("viewBox", `0 0 ${feet.width} ${height}`);
  arcs.setAttribute("width", feet.width);
  arcs.setAttribute("height", height);
  arcs.replaceChildren(...list.map(({ i, j, w }) => {
    const self = !cross && i === j, tint = colour(Math.max(0.16, w)), [x, y] = to[j];
    const d = self ? loop(...from[i]) : tapered(curve(from[i], to[j], cross ? null : rise * (0.2 + 0.8 * Math.min(1, Math.abs(from[i][0] - x) / far) ** 0.75)), w);
    const path = svg("path", { d, fill: self ? "none" : tint, stroke: self ? tint : "none", "stroke-width": self ? 1 + 2.6 * w : null, class: "arc" },
      svg("title", {}, `${now.rows[i].label} → ${now.cols[j].label}: ${number(w)}`));
    return svg("g", {}, path, self ? null : svg("circle", { cx: x, cy: y, r: 2 + 2.6 * w, fill: tint }));
  }));
}

// A Bézier curve between two feet: over their heads, or, between two lines of text, from one to the other (rise: null).
function curve([x0, y0], [x1, y1], rise) {
  const lift = rise === null ? [(y1 - y0) * 0.5, (y0 - y1) * 0.5] : [-rise * 1.33, -rise * 1.33];
  const mix = (a, b, c, d) => (t) => a * (1 - t) ** 3 + 3 * b * t * (1 - t) ** 2 + 3 * c * t * t * (1 - t) + d * t ** 3;
  return { x: mix(x0, x0, x1, x1), y: mix(y0, y0 + lift[0], y1 + lift[1], y1) };
}

// An outline from thin, where the curve starts, to thick, where it ends.
function tapered({ x, y }, w) {
  const left = [], right = [], steps = 56, h = 0.01;
  for (let n = 0; n <= steps; n++) {
    const t = n / steps, dx = x(Math.min(1, t + h)) - x(Math.max(0, t - h)), dy = y(Math.min(1, t + h)) - y(Math.max(0, t - h));
    const length = Math.hypot(dx, dy) || 1, half = 0.5 + (0.3 + 3.4 * w) * t;
    left.push(`${(x(t) - (dy / length) * half).toFixed(1)},${(y(t) + (dx / length) * half).toFixed(1)}`);
    right.unshift(`${(x(t) + (dy / length) * half).toFixed(1)},${(y(t) - (dx / length) * half).toFixed(1)}`);
  }
  return `M${left.join("L")}L${right.join("L")}Z`;
}

const loop = (x, y) => `M${x - 3},${y}C${x - 30},${y - 36} ${x + 30},${y - 36} ${x + 3},${y}`;

function drawCaption(now, at) {
  const measure = state.measure === "weight" ? "of its attention" : "as shares of what the head moves into it";
  const caption = $("caption"), role = cardsOf(now.of, now.place)[0]?.role;
  const row = at && at.row !== null ? now.rows[at.row] : null;
  if (row) {
    const best = strongest(rowOf(now, at.row), 3, 0.01);
    const list = best.flatMap(([j, w], n) => [n ? ", " : "", token(now.cols[j].label), ` ${number(w)}`]);
    caption.replaceChildren(el("b", {}, headName()), " ", token(row.label), state.measure === "weight" ? " gives " : " gets from ", ...(list.length ? [...list, ` ${measure}.`] : [now.of.known(now.place) === "averaged" ? "– only averages of this head are known." : "nothing."]),
      state.lock ? el("span", { class: "hint" }, " Locked; Escape lets go.") : el("span", { class: "hint" }, " Click to lock."));
    return;
  }
  const col = at && at.col !== null ? now.cols[at.col] : null;
  if (col) { caption.replaceChildren(el("b", {}, headName()), " who looks at ", token(col.label), "."); return; }
  caption.replaceChildren(el("b", {}, headName()), role ? ` ${role}. ` : ". ",
    el("span", { class: "hint" }, arcs ? `Arcs start thin at the word that looks and end thick at the word it looks at most${flowing() ? "; those to special tokens are left out" : ""}. Point at a word to see all.` : "Point at a word to see where it looks; click to lock it."));
}

// Bring a word of a long text into sight, without moving the page.
function showWord(i) {
  const node = spans.row[i], box = node?.closest(".reading");
  if (!box) return;
  const block = node.parentElement;
  // what is out of sight has no place yet: its block is brought in first
  box.scrollTop = block.offsetTop - box.offsetTop;
  box.scrollTop += node.getBoundingClientRect().top - box.getBoundingClientRect().top - box.clientHeight / 2;
}

// From word to word by keys.
function stepWord(node, key) {
  const { side, index } = node.dataset, back = getComputedStyle(node.parentElement).direction === "rtl" ? 1 : -1;
  const step = { ArrowLeft: back, ArrowRight: -back, ArrowUp: -1, ArrowDown: 1 }[key];
  const next = spans[side][Number(index) + step];
  if (!next) return;
  node.tabIndex = -1;
  next.tabIndex = 0;
  next.focus();
}

function sentenceEvents() {
  const stage = $("stage");
  const at = (event) => {
    const node = event.target.closest?.(".word");
    if (!node || layer().drawn !== "matrix") return null;
    const index = Number(node.dataset.index);
    return node.dataset.side === "row" ? { row: index, col: null } : { row: null, col: index };
  };
  const same = (a, b) => a === b || (a && b && a.row === b.row && a.col === b.col);
  stage.addEventListener("pointerover", (event) => { if (layer().drawn !== "matrix") return; const to = at(event); if (!same(to, state.hover)) set({ hover: to }); });
  stage.addEventListener("pointerleave", () => { if (layer().drawn === "matrix") set({ hover: null }); });
  stage.addEventListener("focusin", (event) => { if (layer().drawn === "matrix" && event.target.matches(":focus-visible")) set({ hover: at(event) }); });
  stage.addEventListener("click", (event) => { const to = at(event); if (to) set({ lock: same(to, state.lock) ? null : to }); });
}

watch("layer head measure level hide theme", () => {
  const now = current();
  if (now.of.drawn !== "matrix" || built !== now.rows || builtBeside !== now.cols) buildSentence(); else lightSentence();
});
watch("hover lock", lightSentence);
