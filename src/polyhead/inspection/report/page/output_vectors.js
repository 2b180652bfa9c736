// From heads to output: the output of each head for one word, concatenated and mapped by W_O.

function drawOutputVectors() {
  const box = $("vectors"), layer = selectedLayer();
  box.hidden = !layer.complete || !layer.loaded.outputs;
  if (box.hidden) return;
  const current = selectedHeadData(), rowIndex = (state.lock ?? state.hover)?.row ?? state.cell?.row ?? Math.max(0, current.rows.findIndex((item) => !item.special));
  const row = current.rows[rowIndex] ?? current.rows[0], i = row.pieces[0];
  const [heads, queries, dim] = layer.arrays.outputs.shape;
  const vectors = Array.from({ length: heads }, (_, h) => layer.loaded.outputs.subarray((h * queries + i) * dim, (h * queries + i + 1) * dim));
  const width = layer.arrays.output?.shape[1] ?? 0;
  const output = width ? layer.loaded.output.subarray(i * width, (i + 1) * width) : null;
  const limit = Math.max(...vectors.map((vector) => Math.max(...vector.map(Math.abs)))) || 1;
  const canvas = htmlElement("canvas", { role: "img", "aria-label": `The outputs of ${heads} heads for ${row.label}, concatenated${output ? " and mapped by W_O" : ""}` });
  box.replaceChildren(
    htmlElement("div", { class: "head" }, htmlElement("h2", { id: "vectors-name" }, "From heads to output, for ", tokenElement(row.pieces.length > 1 ? listItems(layer, "rows", pieceLevel(), false)[i].label : row.label)),
      htmlElement("span", { class: "hint" }, "Each head outputs one vector. They are concatenated", output ? ` and mapped by Wₒ to the layer’s ${width} features (without its bias).` : ". This layer has no Wₒ.")),
    canvas, htmlElement("p", { class: "hint legend" }, buildSwatch(-1), ` −${formatNumber(limit)}`, buildSwatch(0), " 0", buildSwatch(1), ` ${formatNumber(limit)} in a head’s vector`,
      output ? ` · ±${formatNumber(Math.max(...output.map(Math.abs)))} in the output` : "", " · the number under a head is the norm of its vector. Hover over another word to see its vectors."));
  paintOutputVectors(canvas, layer, vectors, output, limit);
}

const buildSwatch = (x) => htmlElement("i", { class: "swatch", style: `background:${signedColour(x)}` });

function drawVectorStrip(ctx, values, x, y, width, height, limit) {
  const w = width / values.length;
  for (let d = 0; d < values.length; d++) {
    ctx.fillStyle = signedColour(values[d] / limit);
    ctx.fillRect(x + d * w, y, Math.ceil(w * 2) / 2 + 0.5, height);
  }
}

function paintOutputVectors(canvas, layer, vectors, output, limit) {
  const width = $("vectors").clientWidth - 36, heads = vectors.length, height = output ? 236 : 132;
  const ctx = resizeAndClearCanvas(canvas, width, height), soft = themeColour("--soft"), rule = themeColour("--rule");
  const side = width > 900 ? 92 : 64, available = width - side, gap = Math.min(14, (available / heads) * 0.16), boxWidth = (available - gap * (heads - 1)) / heads;
  const concatWidth = available * (output ? 0.82 : 0.9), left = side + (available - concatWidth) / 2, pieceWidth = concatWidth / heads;
  const drawText = (words, x, y, align = "center", fill = soft, font = SMALL_FONT) => { ctx.font = font; ctx.fillStyle = fill; ctx.textAlign = align; ctx.textBaseline = "middle"; ctx.fillText(words, x, y); };
  drawText("heads", 0, 33, "left"); drawText("concat", 0, 107, "left");
  vectors.forEach((values, h) => {
    const x = side + h * (boxWidth + gap), selected = h === state.head, to = left + h * pieceWidth;
    ctx.fillStyle = selected ? themeColour("--tint") : themeColour("--wash");
    ctx.beginPath(); ctx.moveTo(x, 46); ctx.lineTo(x + boxWidth, 46); ctx.lineTo(to + pieceWidth, 96); ctx.lineTo(to, 96); ctx.fill();
    drawVectorStrip(ctx, values, x, 20, boxWidth, 26, limit);
    drawVectorStrip(ctx, values, to, 96, pieceWidth, 22, limit);
    const length = Math.hypot(...values);
    const strong = selected ? themeColour("--accent") : soft;
    drawText(boxWidth > 24 ? `H${layer.heads[h]}` : `${layer.heads[h]}`, x + boxWidth / 2, 9, "center", strong, selected ? `bold ${SMALL_FONT}` : SMALL_FONT);
    if (boxWidth > 26) drawText(formatNumber(length), x + boxWidth / 2, 56, "center", strong);
    ctx.strokeStyle = selected ? themeColour("--accent") : rule;
    ctx.lineWidth = selected ? 2 : 1;
    ctx.strokeRect(x - 0.5, 19.5, boxWidth + 1, 27);
    ctx.strokeRect(to, 95.5, pieceWidth, 23);
  });
  if (!output) return;
  const cx = side + available / 2, outputLimit = Math.max(...output.map(Math.abs)) || 1;
  ctx.fillStyle = themeColour("--wash");
  ctx.beginPath(); ctx.moveTo(left, 119); ctx.lineTo(left + concatWidth, 119); ctx.lineTo(left + concatWidth, 202); ctx.lineTo(left, 202); ctx.fill();
  const dims = `${vectors.length * vectors[0].length} → ${output.length}`;
  ctx.fillStyle = themeColour("--panel"); ctx.strokeStyle = rule; ctx.lineWidth = 1;
  ctx.beginPath(); ctx.roundRect(cx - 86, 144, 172, 32, 8); ctx.fill(); ctx.stroke();
  drawText(`Wₒ   ${dims}`, cx, 160.5, "center", themeColour("--ink"), LABEL_FONT);
  drawDownArrow(ctx, cx, 121, 142); drawDownArrow(ctx, cx, 177, 199);
  drawText("output", 0, 214, "left");
  drawVectorStrip(ctx, output, left, 203, concatWidth, 22, outputLimit);
  ctx.strokeStyle = rule; ctx.lineWidth = 1; ctx.strokeRect(left - 0.5, 202.5, concatWidth + 1, 23);
}

function drawDownArrow(ctx, x, from, to) {
  ctx.strokeStyle = ctx.fillStyle = themeColour("--soft"); ctx.lineWidth = 1.4;
  ctx.beginPath(); ctx.moveTo(x, from); ctx.lineTo(x, to - 3); ctx.stroke();
  ctx.beginPath(); ctx.moveTo(x - 4, to - 6); ctx.lineTo(x + 4, to - 6); ctx.lineTo(x, to); ctx.fill();
}

watch("layer head level hide theme hover lock cell", (keys) => {
  // the vectors depend on the row only, not on the column under the pointer
  if (keys.size === 1 && keys.has("hover") && drawOutputVectors.row === highlightedItems()?.row) return;
  drawOutputVectors.row = highlightedItems()?.row;
  drawOutputVectors();
});
