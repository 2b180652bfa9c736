// How one weight came about: query, key, their product, the scale, the softmax, and what the weight moves.

// Of words in pieces, the pair of pieces with the largest weight.
function piecePair(now, cell) {
  const { of, place, rows, cols } = now;
  let best = null;
  for (const i of rows[cell.row].pieces) {
    const row = of.row(place, i, "weight");
    for (const j of cols[cell.col].pieces) if (!best || row[j] > best.w) best = { i, j, w: row[j], row };
  }
  return best;
}

function drawHow(box) {
  const now = current(), { of, place, rows, cols } = now, cell = state.cell;
  if (!rows[cell.row] || !cols[cell.col]) { queueMicrotask(() => set({ cell: null })); return; }
  const shownValue = valueOf(now, cell.row, cell.col), pair = piecePair(now, cell);
  const back = el("button", { class: "back", title: "Back to the head (Escape)", on: { click: () => set({ cell: null }) } }, "‹ Back");
  const parts = [back, el("h2", { class: "how" }, "How ", token(rows[cell.row].label), " → ", token(cols[cell.col].label), " came about")];
  if (rows[cell.row].pieces.length * cols[cell.col].pieces.length > 1) {
    const names = (side, i) => items(of, side, "piece", false)[i].label;
    parts.push(el("p", { class: "hint" }, "Words of several pieces: this is the pair ", token(names("rows", pair.i)), " → ", token(names("columns", pair.j)),
      `. Between the words it is ${number(shownValue, 3)}: summed over the pieces looked at, averaged over those that look.`));
  }
  parts.push(...(of.known(place) === "averaged"
    ? [el("p", { class: "norole" }, shownValue === null ? "Only an average is known here: q and k of this head are not on the page." : `Weight ${number(shownValue, 3)}; q and k of this head are not on the page.`)]
    : steps(of, place, pair)));
  box.replaceChildren(...parts);
}

function steps(of, place, { i, j, w, row }) {
  const head = of.heard.get(place), list = [];
  const names = items(of, "columns", "piece", false);
  if (head?.q) {
    const { q, k, dim } = head;
    const a = q.subarray(i * dim, (i + 1) * dim), b = k.subarray(j * dim, (j + 1) * dim), product = a.map((x, d) => x * b[d]);
    const most = Math.max(...a.map(Math.abs), ...b.map(Math.abs)) || 1, dot = of.dot(place, i, j), score = dot * of.scale;
    const rest = of.plain ? 0 : (of.got.scores?.[(place * of.queries + i) * of.keys + j] ?? score) - score;
    list.push(
      step("q", "query: what the word looks for", bars(a, most)),
      step("k", "key: what the other word offers", bars(b, most)),
      step("q × k", "multiplied, feature by feature", bars(product)),
      sum([["sum", dot], [`× ${Math.abs(of.scale - dim ** -0.5) < 1e-6 ? `1/√${dim}` : "scale"}`, of.scale], ...(Math.abs(rest) > 1e-6 ? [["+ position or bias", rest]] : []), ["= score", score + rest]], "score"),
    );
  } else list.push(el("p", { class: "hint" }, `The score is ${of.score}’s, not a product of q and k; its softmax over the row is below.`));
  const others = row.length;
  list.push(step("softmax", `e^score, as a share of its row of ${others.toLocaleString("en")}`, rowBars(row, j, names)));
  const moved = of.moved(place, j), total = of.total(place, row);
  const length = of.joined ? "|Wₒ v|" : "|v|";
  list.push(sum([["weight", w], [`× ${length}`, moved], ["= moves", w * moved]], "moves"));
  list.push(el("p", { class: "hint" }, `${length} is the length of what a weight of 1 on this word would add. This pair brings ${percent(total > 0 ? (w * moved) / total : 0)} of what the head moves here.`));
  return list;
}

const step = (name, help, ...content) => el("div", { class: "step" }, el("h3", {}, el("b", {}, name), ` ${help}`), ...content);

// 0.562 × 1.83 = 1.03, each with its name below it; `mark` names what a reader may look for.
function sum(terms, mark) {
  return el("div", { class: "sum", "data-sum": mark }, terms.map(([name, value]) => {
    const sign = /^[×+=]/.test(name) ? name[0] : "";
    return el("span", { "data-value": value }, el("b", {}, sign ? `${sign} ` : "", Math.abs(value) >= 100 ? value.toFixed(1) : exactly(value)), el("small", {}, name.replace(/^[×+=] /, "")));
  }));
}

// A small bar for each feature, up for positive numbers and down for negative ones.
function bars(values, most = Math.max(...values.map(Math.abs)) || 1) {
  const width = 300, height = 34, w = width / values.length, gap = values.length > 80 ? 0 : Math.min(1.5, w * 0.2);
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, class: "bars", preserveAspectRatio: "none", role: "img", "aria-label": `${values.length} numbers from ${number(Math.min(...values))} to ${number(Math.max(...values))}` },
    svg("line", { x1: 0, x2: width, y1: height / 2, y2: height / 2, class: "axis" }),
    Array.from(values, (x, d) => {
      const size = Math.max(0.4, (Math.abs(x) / most) * (height / 2 - 1));
      return svg("rect", { x: d * w, width: w - gap, y: x < 0 ? height / 2 : height / 2 - size, height: size, fill: signed(x < 0 ? -0.8 : 0.8) }, svg("title", {}, `feature ${d}: ${number(x, 3)}`));
    }));
}

// The row's softmax: its strongest keys, this one marked, and the rest as one.
function rowBars(row, j, names) {
  const most = row.length <= 14 ? row.length : 10;
  let list = row.length <= 14 ? Array.from(row, (w, n) => [n, w]) : strongest(row, most);
  if (!list.some(([n]) => n === j)) list = [...list.slice(0, most - 1), [j, row[j]]];
  const total = row.reduce((a, b) => a + b, 0), rest = total - list.reduce((a, [, w]) => a + w, 0);
  const high = Math.max(...list.map(([, w]) => w), 1e-9);
  const line = (label, w, mark) => el("div", { class: `share${mark ? " mark" : ""}`, "data-weight": w }, label,
    el("span", {}, el("i", { style: `width:${Math.max(0.5, (100 * Math.min(w, high)) / high)}%;background:${colour(Math.max(w, 0.02))}` })), el("b", {}, exactly(w)));
  return el("div", { class: "shares" }, list.map(([n, w]) => line(token(names[n].label), w, n === j)),
    row.length > list.length ? line(el("em", {}, `${(row.length - list.length).toLocaleString("en")} others`), Math.max(0, rest), false) : null);
}
