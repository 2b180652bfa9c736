// From heads to output: the output of each head for one word, concatenated and mapped by W_O.

function drawVectors() {
  const box = $("vectors"), layer = currentLayer();
  box.hidden = !layer.complete || !layer.loaded.outputs;
  if (box.hidden) return;
  const current = currentHead(), rowIndex = (state.lock ?? state.hover)?.row ?? state.cell?.row ?? Math.max(0, current.rows.findIndex((item) => !item.special));
  const row = current.rows[rowIndex] ?? current.rows[0], i = row.pieces[0];
  const [heads, queries, dim] = layer.arrays.outputs.shape;
  const vectors = Array.from({ length: heads }, (_, h) => layer.loaded.outputs.subarray((h * queries + i) * dim, (h * queries + i + 1) * dim));
  const width = layer.arrays.output?.shape[1] ?? 0;
  const output = width ? layer.loaded.output.subarray(i * width, (i + 1) * width) : null;
  const limit = Math.max(...vectors.map((vector) => Math.max(...vector.map(Math.abs)))) || 1;
  const canvas = el("canvas", { role: "img", "aria-label": `The outputs of ${heads} heads for ${row.label}, concatenated${output ? " and mapped by W_O" : ""}` });
  box.replaceChildren(
    el("div", { class: "head" }, el("h2", { id: "vectors-name" }, "From heads to output, for ", token(row.pieces.length > 1 ? items(layer, "rows", "piece", false)[i].label : row.label)),
      el("span", { class: "hint" }, "Each head outputs one vector. They are concatenated", output ? ` and mapped by Wₒ to the layer’s ${width} features (without its bias).` : ". This layer has no Wₒ.")),
    canvas, el("p", { class: "hint legend" }, buildSwatch(-1), ` −${formatNumber(limit)}`, buildSwatch(0), " 0", buildSwatch(1), ` ${formatNumber(limit)} in a head’s vector`,
      output ? ` · ±${formatNumber(Math.max(...output.map(Math.abs)))} in the output` : "", " · the number under a head is the norm of its vector. Hover over another word to see its vectors."));
  paintVectors(canvas, layer, vectors, output, limit);
}

const buildSwatch = (x) => el("i", { class: "swatch", style: `background:${signedColour(x)}` });

function drawStrip(ctx, values, x, y, width, height, limit) {
  const w = width / values.length;
  for (let d = 0; d < values.length; d++) {
    ctx.fillStyle = signedColour(values[d] / limit);
    ctx.fillRect(x + d * w, y, Math.ceil(w * 2) / 2 + 0.5, height);
  }
}

function paintVectors(canvas, layer, vectors, output, limit) {
  const width = $("vectors").clientWidth - 36, heads = vectors.length, height = output ? 236 : 132;
  const ctx = prepareCanvas(canvas, width, height), soft = cssColour("--soft"), rule = cssColour("--rule");
  const side = width > 900 ? 92 : 64, available = width - side, gap = Math.min(14, (available / heads) * 0.16), boxWidth = (available - gap * (heads - 1)) / heads;
  const concatWidth = available * (output ? 0.82 : 0.9), left = side + (available - concatWidth) / 2, pieceWidth = concatWidth / heads;
  const text = (words, x, y, align = "center", fill = soft, font = SMALL_FONT) => { ctx.font = font; ctx.fillStyle = fill; ctx.textAlign = align; ctx.textBaseline = "middle"; ctx.fillText(words, x, y); };
  text("heads", 0, 33, "left"); text("concat", 0, 107, "left");
  vectors.forEach((values, h) => {
    const x = side + h * (boxWidth + gap), selected = h === state.head, to = left + h * pieceWidth;
    ctx.fillStyle = selected ? cssColour("--tint") : cssColour("--wash");
    ctx.beginPath(); ctx.moveTo(x, 46); ctx.lineTo(x + boxWidth, 46); ctx.lineTo(to + pieceWidth, 96); ctx.lineTo(to, 96); ctx.fill();
    drawStrip(ctx, values, x, 20, boxWidth, 26, limit);
    drawStrip(ctx, values, to, 96, pieceWidth, 22, limit);
    const length = Math.hypot(...values);
    const strong = selected ? cssColour("--accent") : soft;
    text(boxWidth > 24 ? `H${layer.heads[h]}` : `${layer.heads[h]}`, x + boxWidth / 2, 9, "center", strong, selected ? `bold ${SMALL_FONT}` : SMALL_FONT);
    if (boxWidth > 26) text(formatNumber(length), x + boxWidth / 2, 56, "center", strong);
    ctx.strokeStyle = selected ? cssColour("--accent") : rule;
    ctx.lineWidth = selected ? 2 : 1;
    ctx.strokeRect(x - 0.5, 19.5, boxWidth + 1, 27);
    ctx.strokeRect(to, 95.5, pieceWidth, 23);
  });
  if (!output) return;
  const cx = side + available / 2, outputLimit = Math.max(...output.map(Math.abs)) || 1;
  ctx.fillStyle = cssColour("--wash");
  ctx.beginPath(); ctx.moveTo(left, 119); ctx.lineTo(left + concatWidth, 119); ctx.lineTo(left + concatWidth, 202); ctx.lineTo(left, 202); ctx.fill();
  const dims = `${vectors.length * vectors[0].length} → ${output.length}`;
  ctx.fillStyle = cssColour("--panel"); ctx.strokeStyle = rule; ctx.lineWidth = 1;
  ctx.beginPath(); ctx.roundRect(cx - 86, 144, 172, 32, 8); ctx.fill(); ctx.stroke();
  text(`Wₒ   ${dims}`, cx, 160.5, "center", cssColour("--ink"), LABEL_FONT);
  drawArrow(ctx, cx, 121, 142); drawArrow(ctx, cx, 177, 199);
  text("output", 0, 214, "left");
  drawStrip(ctx, output, left, 203, concatWidth, 22, outputLimit);
  ctx.strokeStyle = rule; ctx.lineWidth = 1; ctx.strokeRect(left - 0.5, 202.5, concatWidth + 1, 23);
}

function drawArrow(ctx, x, from, to) {
  ctx.strokeStyle = ctx.fillStyle = cssColour("--soft"); ctx.lineWidth = 1.4;
  ctx.beginPath(); ctx.moveTo(x, from); ctx.lineTo(x, to - 3); ctx.stroke();
  ctx.beginPath(); ctx.moveTo(x - 4, to - 6); ctx.lineTo(x + 4, to - 6); ctx.lineTo(x, to); ctx.fill();
}

watch("layer head level hide theme hover lock cell", (keys) => {
  // the vectors depend on the row only, not on the column under the pointer
  if (keys.size === 1 && keys.has("hover") && drawVectors.row === highlighted()?.row) return;
  drawVectors.row = highlighted()?.row;
  drawVectors();
});
