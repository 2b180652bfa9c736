// How one weight is computed: query, key, dot product, scale, softmax; and the contribution that follows.

// The pair of pieces with the largest weight between two words.
function strongestPiecePair(current, cell) {
  const { layer, head, rows, cols } = current;
  let best = null;
  for (const i of rows[cell.row].pieces) {
    const row = layer.weightRow(head, i, "weight");
    for (const j of cols[cell.col].pieces) if (!best || row[j] > best.w) best = { i, j, w: row[j], row };
  }
  return best;
}

function drawWeightExplanation(box) {
  const current = selectedHeadData(), { layer, head, rows, cols } = current, cell = state.cell;
  if (!rows[cell.row] || !cols[cell.col]) { queueMicrotask(() => setState({ cell: null })); return; }
  const shownValue = weightOfPair(current, cell.row, cell.col), pair = strongestPiecePair(current, cell);
  const back = htmlElement("button", { class: "back", title: "Back to the head (Escape)", on: { click: () => setState({ cell: null }) } }, "‹ Back");
  if (!isAllowed(current, cell.row, cell.col)) {
    box.replaceChildren(back, htmlElement("h2", { class: "how" }, tokenElement(rows[cell.row].label), " cannot attend to ", tokenElement(cols[cell.col].label)),
      htmlElement("p", { class: "norole" }, `This pair is masked: ${describeDisallowed(current, cell.row, cell.col)}.`));
    return;
  }
  const parts = [back, htmlElement("h2", { class: "how" }, "How much ", tokenElement(rows[cell.row].label), " attends to ", tokenElement(cols[cell.col].label))];
  if (rows[cell.row].pieces.length * cols[cell.col].pieces.length > 1) {
    const pieceLabel = (side, i) => listItems(layer, side, pieceLevel(), false)[i].label;
    parts.push(htmlElement("p", { class: "hint" }, "Words with several pieces: this is the pair ", tokenElement(pieceLabel("rows", pair.i)), ", which attends to ", tokenElement(pieceLabel("columns", pair.j)),
      `. Between the words it is ${formatNumber(shownValue, 3)}: the sum over the pieces of the key, the mean over the pieces of the query.`));
  }
  parts.push(...(layer.detailLevel(head) === "averaged"
    ? [htmlElement("p", { class: "norole" }, shownValue === null ? "Only an average is known: the page does not contain q and k of this head." : `Weight ${formatNumber(shownValue, 3)}; the page does not contain q and k of this head.`)]
    : buildExplanationSteps(layer, head, pair)));
  box.replaceChildren(...parts);
}

function buildExplanationSteps(layer, head, { i, j, w, row }) {
  const tensors = layer.tensors.get(head), list = [];
  const names = listItems(layer, "columns", pieceLevel(), false), allowed = Array.from(row, (_, n) => n).filter((n) => layer.allows(head, i, n));
  if (tensors?.q) {
    const { q, k, dim } = tensors;
    const a = q.subarray(i * dim, (i + 1) * dim), b = k.subarray(j * dim, (j + 1) * dim), product = a.map((x, d) => x * b[d]);
    const limit = Math.max(...a.map(Math.abs), ...b.map(Math.abs)) || 1, dot = layer.dotProduct(head, i, j), score = dot * layer.scale;
    const bias = layer.plain ? 0 : (layer.loaded.scores?.[(head * layer.queries + i) * layer.keys + j] ?? score) - score;
    list.push(
      buildExplanationStep("q", "query of the word that attends", drawVectorBars(a, limit)),
      buildExplanationStep("k", "key of the word attended to", drawVectorBars(b, limit)),
      buildExplanationStep("q × k", "elementwise product", drawVectorBars(product)),
      buildEquation([["sum", dot], [`× ${Math.abs(layer.scale - dim ** -0.5) < 1e-6 ? `1/√${dim}` : "scale"}`, layer.scale], ...(Math.abs(bias) > 1e-6 ? [["+ position or bias", bias]] : []), ["= score", score + bias]], "score"),
    );
  } else list.push(htmlElement("p", { class: "hint" }, `This layer uses ${layer.score} scores, not a dot product of q and k. The softmax over the row is below.`));
  list.push(buildExplanationStep("softmax", `e^score as a share of its row of ${allowed.length.toLocaleString("en")}`, drawSoftmaxRow(row, j, names, allowed)));
  const norm = layer.valueNorm(head, j), total = layer.contributionTotal(head, row);
  const normName = layer.has_w_o ? "|Wₒ v|" : "|v|";
  list.push(buildEquation([["weight", w], [`× ${normName}`, norm], ["= contribution", w * norm]], "contribution"));
  list.push(htmlElement("p", { class: "hint" }, `${normName} is the norm of what a weight of 1 on this word would add. This pair is ${formatPercent(total > 0 ? (w * norm) / total : 0)} of what the head adds here.`));
  return list;
}

const buildExplanationStep = (name, help, ...content) => htmlElement("div", { class: "step" }, htmlElement("h3", {}, htmlElement("b", {}, name), ` ${help}`), ...content);

// A row of terms such as 0.562 × 1.83 = 1.03, each above its name; `mark` is the name of the row.
function buildEquation(terms, mark) {
  return htmlElement("div", { class: "sum", "data-sum": mark }, terms.map(([name, value]) => {
    const sign = /^[×+=]/.test(name) ? name[0] : "";
    return htmlElement("span", { "data-value": value }, htmlElement("b", {}, sign ? `${sign} ` : "", Math.abs(value) >= 100 ? value.toFixed(1) : formatWeight(value)), htmlElement("small", {}, name.replace(/^[×+=] /, "")));
  }));
}

// One small bar per feature: up if positive, down if negative.
function drawVectorBars(values, limit = Math.max(...values.map(Math.abs)) || 1) {
  const width = 300, height = 34, w = width / values.length, gap = values.length > 80 ? 0 : Math.min(1.5, w * 0.2);
  return svgElement("svg", { viewBox: `0 0 ${width} ${height}`, class: "bars", preserveAspectRatio: "none", role: "img", "aria-label": `${values.length} numbers from ${formatNumber(Math.min(...values))} to ${formatNumber(Math.max(...values))}` },
    svgElement("line", { x1: 0, x2: width, y1: height / 2, y2: height / 2, class: "axis" }),
    Array.from(values, (x, d) => {
      const size = Math.max(0.4, (Math.abs(x) / limit) * (height / 2 - 1));
      return svgElement("rect", { x: d * w, width: w - gap, y: x < 0 ? height / 2 : height / 2 - size, height: size, fill: signedColour(x < 0 ? -0.8 : 0.8) }, svgElement("title", {}, `feature ${d}: ${formatNumber(x, 3)}`));
    }));
}

// The weights of a row as bars: the strongest of the allowed keys, with key j marked, and the sum of the others.
function drawSoftmaxRow(row, j, names, allowed) {
  const count = allowed.length <= 14 ? allowed.length : 10;
  let list = allowed.length <= 14 ? allowed.map((n) => [n, row[n]]) : largestEntries(row, count);
  if (!list.some(([n]) => n === j)) list = [...list.slice(0, count - 1), [j, row[j]]];
  const total = row.reduce((a, b) => a + b, 0), bias = total - list.reduce((a, [, w]) => a + w, 0);
  const maximum = Math.max(...list.map(([, w]) => w), 1e-9);
  const buildShareLine = (label, w, mark) => htmlElement("div", { class: `share${mark ? " mark" : ""}`, "data-weight": w }, label,
    htmlElement("span", {}, htmlElement("i", { style: `width:${Math.max(0.5, (100 * Math.min(w, maximum)) / maximum)}%;background:${weightColour(Math.max(w, 0.02))}` })), htmlElement("b", {}, formatWeight(w)));
  return htmlElement("div", { class: "shares" }, list.map(([n, w]) => buildShareLine(tokenElement(names[n].label), w, n === j)),
    allowed.length > list.length ? buildShareLine(htmlElement("em", {}, `${(allowed.length - list.length).toLocaleString("en")} others`), Math.max(0, bias), false) : null);
}
