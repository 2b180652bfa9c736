// From heads to output, as textbooks draw it: each head's vector for one word, joined, through W_O.

function drawVectors() {
  const box = $("vectors"), of = layer();
  box.hidden = !of.whole || !of.got.outputs;
  if (box.hidden) return;
  const now = current(), at = (state.lock ?? state.hover)?.row ?? state.cell?.row ?? Math.max(0, now.rows.findIndex((item) => !item.special));
  const row = now.rows[at] ?? now.rows[0], i = row.pieces[0];
  const [heads, queries, dim] = of.arrays.outputs.shape;
  const vectors = Array.from({ length: heads }, (_, h) => of.got.outputs.subarray((h * queries + i) * dim, (h * queries + i + 1) * dim));
  const width = of.arrays.output?.shape[1] ?? 0;
  const output = width ? of.got.output.subarray(i * width, (i + 1) * width) : null;
  const most = Math.max(...vectors.map((one) => Math.max(...one.map(Math.abs)))) || 1;
  const sheet = el("canvas", { role: "img", "aria-label": `The vectors of ${heads} heads for ${row.label}, joined${output ? " and mapped by W_O" : ""}` });
  box.replaceChildren(
    el("div", { class: "head" }, el("h2", { id: "vectors-name" }, "From heads to output, for ", token(row.pieces.length > 1 ? items(of, "rows", "piece", false)[i].label : row.label)),
      el("span", { class: "hint" }, "Each head hands on one vector. They are joined end to end", output ? ` and mapped by Wₒ to the layer’s ${width} features (without its bias).` : ". This layer has no Wₒ.")),
    sheet, el("p", { class: "hint legend" }, swatch(-1), ` −${number(most)}`, swatch(0), " 0", swatch(1), ` ${number(most)} in a head’s vector`,
      output ? ` · ±${number(Math.max(...output.map(Math.abs)))} in the output` : "", " · the number under a head is its vector’s length. Point at another word to see its vectors."));
  paintVectors(sheet, of, vectors, output, most);
}

const swatch = (x) => el("i", { class: "swatch", style: `background:${signed(x)}` });

function strip(pen, values, x, y, width, height, most) {
  const w = width / values.length;
  for (let d = 0; d < values.length; d++) {
    pen.fillStyle = signed(values[d] / most);
    pen.fillRect(x + d * w, y, Math.ceil(w * 2) / 2 + 0.5, height);
  }
}

function paintVectors(sheet, of, vectors, output, most) {
  const width = $("vectors").clientWidth - 36, heads = vectors.length, tall = output ? 236 : 132;
  const pen = canvas(sheet, width, tall), soft = style("--soft"), rule = style("--rule");
  const side = width > 900 ? 92 : 64, room = width - side, gap = Math.min(14, (room / heads) * 0.16), each = (room - gap * (heads - 1)) / heads;
  const joined = room * (output ? 0.82 : 0.9), left = side + (room - joined) / 2, piece = joined / heads;
  const text = (words, x, y, align = "center", fill = soft, font = SMALL) => { pen.font = font; pen.fillStyle = fill; pen.textAlign = align; pen.textBaseline = "middle"; pen.fillText(words, x, y); };
  text("heads", 0, 33, "left"); text("concat", 0, 107, "left");
  vectors.forEach((values, h) => {
    const x = side + h * (each + gap), chosen = h === state.head, to = left + h * piece;
    pen.fillStyle = chosen ? style("--tint") : style("--wash");
    pen.beginPath(); pen.moveTo(x, 46); pen.lineTo(x + each, 46); pen.lineTo(to + piece, 96); pen.lineTo(to, 96); pen.fill();
    strip(pen, values, x, 20, each, 26, most);
    strip(pen, values, to, 96, piece, 22, most);
    const length = Math.hypot(...values);
    const strong = chosen ? style("--accent") : soft;
    text(each > 24 ? `H${of.heads[h]}` : `${of.heads[h]}`, x + each / 2, 9, "center", strong, chosen ? `bold ${SMALL}` : SMALL);
    if (each > 26) text(number(length), x + each / 2, 56, "center", strong);
    pen.strokeStyle = chosen ? style("--accent") : rule;
    pen.lineWidth = chosen ? 2 : 1;
    pen.strokeRect(x - 0.5, 19.5, each + 1, 27);
    pen.strokeRect(to, 95.5, piece, 23);
  });
  if (!output) return;
  const cx = side + room / 2, high = Math.max(...output.map(Math.abs)) || 1;
  pen.fillStyle = style("--wash");
  pen.beginPath(); pen.moveTo(left, 119); pen.lineTo(left + joined, 119); pen.lineTo(left + joined, 202); pen.lineTo(left, 202); pen.fill();
  const dims = `${vectors.length * vectors[0].length} → ${output.length}`;
  pen.fillStyle = style("--panel"); pen.strokeStyle = rule; pen.lineWidth = 1;
  pen.beginPath(); pen.roundRect(cx - 86, 144, 172, 32, 8); pen.fill(); pen.stroke();
  text(`Wₒ   ${dims}`, cx, 160.5, "center", style("--ink"), LABEL);
  arrow(pen, cx, 121, 142); arrow(pen, cx, 177, 199);
  text("output", 0, 214, "left");
  strip(pen, output, left, 203, joined, 22, high);
  pen.strokeStyle = rule; pen.lineWidth = 1; pen.strokeRect(left - 0.5, 202.5, joined + 1, 23);
}

function arrow(pen, x, from, to) {
  pen.strokeStyle = pen.fillStyle = style("--soft"); pen.lineWidth = 1.4;
  pen.beginPath(); pen.moveTo(x, from); pen.lineTo(x, to - 3); pen.stroke();
  pen.beginPath(); pen.moveTo(x - 4, to - 6); pen.lineTo(x + 4, to - 6); pen.lineTo(x, to); pen.fill();
}

watch("layer head level hide theme hover lock cell", (keys) => {
  // pointing inside the map changes columns too: the vectors follow the row alone
  if (keys.size === 1 && keys.has("hover") && drawVectors.row === pointed()?.row) return;
  drawVectors.row = pointed()?.row;
  drawVectors();
});
