// How one weight is computed: query, key, dot product, scale, softmax; and the contribution that follows.

// The pair of pieces with the largest weight between two words.
function strongestPiecePair(current, cell) {
  const { layer, head, rows, cols } = current;
  let best = null;
  for (const i of rows[cell.row].pieces) {
    const row = layer.row(head, i, "weight");
    for (const j of cols[cell.col].pieces) if (!best || row[j] > best.w) best = { i, j, w: row[j], row };
  }
  return best;
}

function drawExplanation(box) {
  const current = currentHead(), { layer, head, rows, cols } = current, cell = state.cell;
  if (!rows[cell.row] || !cols[cell.col]) { queueMicrotask(() => set({ cell: null })); return; }
  const shownValue = pairWeight(current, cell.row, cell.col), pair = strongestPiecePair(current, cell);
  const back = el("button", { class: "back", title: "Back to the head (Escape)", on: { click: () => set({ cell: null }) } }, "‹ Back");
  const parts = [back, el("h2", { class: "how" }, "How ", token(rows[cell.row].label), " → ", token(cols[cell.col].label), " is computed")];
  if (rows[cell.row].pieces.length * cols[cell.col].pieces.length > 1) {
    const names = (side, i) => items(layer, side, "piece", false)[i].label;
    parts.push(el("p", { class: "hint" }, "Words with several pieces: this is the pair ", token(names("rows", pair.i)), " → ", token(names("columns", pair.j)),
      `. Between the words it is ${formatNumber(shownValue, 3)}: the sum over the pieces of the key, the mean over the pieces of the query.`));
  }
  parts.push(...(layer.detail(head) === "averaged"
    ? [el("p", { class: "norole" }, shownValue === null ? "Only an average is known: the page does not contain q and k of this head." : `Weight ${formatNumber(shownValue, 3)}; the page does not contain q and k of this head.`)]
    : buildSteps(layer, head, pair)));
  box.replaceChildren(...parts);
}

function buildSteps(layer, head, { i, j, w, row }) {
  const tensors = layer.tensors.get(head), list = [];
  const names = items(layer, "columns", "piece", false);
  if (tensors?.q) {
    const { q, k, dim } = tensors;
    const a = q.subarray(i * dim, (i + 1) * dim), b = k.subarray(j * dim, (j + 1) * dim), product = a.map((x, d) => x * b[d]);
    const limit = Math.max(...a.map(Math.abs), ...b.map(Math.abs)) || 1, dot = layer.dotProduct(head, i, j), score = dot * layer.scale;
    const bias = layer.plain ? 0 : (layer.loaded.scores?.[(head * layer.queries + i) * layer.keys + j] ?? score) - score;
    list.push(
      buildStep("q", "query of the word that attends", drawBars(a, limit)),
      buildStep("k", "key of the word attended to", drawBars(b, limit)),
      buildStep("q × k", "elementwise product", drawBars(product)),
      buildSum([["sum", dot], [`× ${Math.abs(layer.scale - dim ** -0.5) < 1e-6 ? `1/√${dim}` : "scale"}`, layer.scale], ...(Math.abs(bias) > 1e-6 ? [["+ position or bias", bias]] : []), ["= score", score + bias]], "score"),
    );
  } else list.push(el("p", { class: "hint" }, `This layer uses ${layer.score} scores, not a dot product of q and k. The softmax over the row is below.`));
  const length = row.length;
  list.push(buildStep("softmax", `e^score as a share of its row of ${length.toLocaleString("en")}`, drawRowBars(row, j, names)));
  const norm = layer.valueNorm(head, j), total = layer.contributionTotal(head, row);
  const normName = layer.has_w_o ? "|Wₒ v|" : "|v|";
  list.push(buildSum([["weight", w], [`× ${normName}`, norm], ["= contribution", w * norm]], "contribution"));
  list.push(el("p", { class: "hint" }, `${normName} is the norm of what a weight of 1 on this word would add. This pair is ${formatPercent(total > 0 ? (w * norm) / total : 0)} of what the head adds here.`));
  return list;
}

const buildStep = (name, help, ...content) => el("div", { class: "step" }, el("h3", {}, el("b", {}, name), ` ${help}`), ...content);

// A row of terms such as 0.562 × 1.83 = 1.03, each above its name; `mark` is the name of the row.
function buildSum(terms, mark) {
  return el("div", { class: "sum", "data-sum": mark }, terms.map(([name, value]) => {
    const sign = /^[×+=]/.test(name) ? name[0] : "";
    return el("span", { "data-value": value }, el("b", {}, sign ? `${sign} ` : "", Math.abs(value) >= 100 ? value.toFixed(1) : formatWeight(value)), el("small", {}, name.replace(/^[×+=] /, "")));
  }));
}

// One small bar per feature: up if positive, down if negative.
function drawBars(values, limit = Math.max(...values.map(Math.abs)) || 1) {
  const width = 300, height = 34, w = width / values.length, gap = values.length > 80 ? 0 : Math.min(1.5, w * 0.2);
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "bars", preserveAspectRatio: "none", role: "img", "aria-label": `${values.length} numbers from ${formatNumber(Math.min(...values))} to ${formatNumber(Math.max(...values))}` },
    svg("line", { x1: 0, x2: width, y1: height / 2, y2: height / 2, class: "axis" }),
    Array.from(values, (x, d) => {
      const size = Math.max(0.4, (Math.abs(x) / limit) * (height / 2 - 1));
      return svg("rect", { x: d * w, width: w - gap, y: x < 0 ? height / 2 : height / 2 - size, height: size, fill: signedColour(x < 0 ? -0.8 : 0.8) }, svg("title", {}, `feature ${d}: ${formatNumber(x, 3)}`));
    }));
}

// The weights of a row as bars: the strongest keys, with key j marked, and the sum of the others.
function drawRowBars(row, j, names) {
  const count = row.length <= 14 ? row.length : 10;
  let list = row.length <= 14 ? Array.from(row, (w, n) => [n, w]) : strongest(row, count);
  if (!list.some(([n]) => n === j)) list = [...list.slice(0, count - 1), [j, row[j]]];
  const total = row.reduce((a, b) => a + b, 0), bias = total - list.reduce((a, [, w]) => a + w, 0);
  const maximum = Math.max(...list.map(([, w]) => w), 1e-9);
  const buildLine = (label, w, mark) => el("div", { class: `share${mark ? " mark" : ""}`, "data-weight": w }, label,
    el("span", {}, el("i", { style: `width:${Math.max(0.5, (100 * Math.min(w, maximum)) / maximum)}%;background:${colour(Math.max(w, 0.02))}` })), el("b", {}, formatWeight(w)));
  return el("div", { class: "shares" }, list.map(([n, w]) => buildLine(token(names[n].label), w, n === j)),
    row.length > list.length ? buildLine(el("em", {}, `${(row.length - list.length).toLocaleString("en")} others`), Math.max(0, bias), false) : null);
}
