// Export: the heat map, the mosaic and the arcs as SVG, the matrix as CSV.

function downloadFile(name, text, type) {
  const link = htmlElement("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const measureInFileName = () => (state.measure === "weight" ? "weights" : "contribution-shares");

function downloadSvg(name, drawing, width, height) {
  drawing.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
  drawing.setAttribute("width", width);
  drawing.setAttribute("height", height);
  drawing.setAttribute("font-family", "system-ui, sans-serif");
  drawing.prepend(svgElement("rect", { width, height, fill: themeColour("--panel") }));
  downloadFile(name, new XMLSerializer().serializeToString(drawing), "image/svg+xml");
}

// A matrix as rectangles, or as one image if there are more than 4,096.
function matrixToSvg(data, height, width, x, y, cw, ch) {
  if (height * width <= 4096) {
    return Array.from({ length: height * width }, (_, n) => svgElement("rect", { x: x + (n % width) * cw, y: y + Math.floor(n / width) * ch, width: cw, height: ch, fill: Number.isNaN(data[n]) ? "none" : weightColour(data[n]) }));
  }
  return [svgElement("image", { href: drawMatrix(data, height, width).toDataURL(), x, y, width: cw * width, height: ch * height, preserveAspectRatio: "none", style: "image-rendering:pixelated" })];
}

function exportHeadPicture() {
  const current = selectedHeadData(), drawing = svgElement("svg");
  if (current.layer.image) { exportOverlay(); return; }
  if (current.layer.kind === "graph") { exportNeighbourhood(); return; }
  const { cells, view } = plot, showNames = Math.max(cells.height, cells.width) <= 64 && cells.exact;
  const cell = showNames ? 30 : 480 / Math.max(cells.height, cells.width), left = showNames ? 110 : 50, top = showNames ? 110 : 50;
  drawing.append(svgElement("text", { x: 12, y: 24, "font-size": 15, "font-weight": 600, fill: themeColour("--ink") }, `${selectedHeadName()} ${measureName()}`, svgElement("tspan", { dx: 10, "font-size": 11, "font-weight": 400, fill: themeColour("--soft") }, "colour: square root of the value, 0 to 1")));
  drawing.append(...matrixToSvg(cells.data, cells.height, cells.width, left, top, cell, cell));
  if (showNames) {
    for (let r = 0; r < cells.height; r++) drawing.append(svgElement("text", { x: left - 8, y: top + (r + 0.66) * cell, "text-anchor": "end", "font-size": 12, fill: themeColour("--ink") }, makeWhitespaceVisible(current.rows[cells.r0 + r].label)));
    for (let c = 0; c < cells.width; c++) drawing.append(svgElement("text", { transform: `translate(${left + (c + 0.55) * cell},${top - 8}) rotate(-50)`, "font-size": 12, fill: themeColour("--ink") }, makeWhitespaceVisible(current.cols[cells.c0 + c].label)));
    cells.data.forEach((w, n) => { if (w >= 0.005) drawing.append(svgElement("text", { x: left + ((n % cells.width) + 0.5) * cell, y: top + (Math.floor(n / cells.width) + 0.64) * cell, "text-anchor": "middle", "font-size": 11, fill: readableTextColour(w) }, formatWeightShort(w))); });
  } else drawing.append(svgElement("text", { x: left, y: top - 8, "font-size": 12, fill: themeColour("--soft") }, `rows ${Math.floor(view.r0)}–${Math.ceil(view.r1) - 1}, columns ${Math.floor(view.c0)}–${Math.ceil(view.c1) - 1}`));
  downloadSvg(`${selectedHeadName()}-${measureInFileName()}.svg`, drawing, left + cells.width * cell + 60, top + cells.height * cell + 16);
}

function exportMosaic() {
  const drawing = svgElement("svg"), left = 60, width = 64 * Math.min(2, tileAspect), height = width / tileAspect, labels = new Map();
  for (const group of mosaicGroups) group.rows.forEach(({ layerIndex, label }, n) => labels.set(layerIndex, { label, group: n || mosaicGroups.length === 1 ? "" : group.label }));
  const addText = (x, y, size, colour, words, anchor = "start") => drawing.append(svgElement("text", { x, y, "font-size": size, fill: themeColour(colour), "text-anchor": anchor }, words));
  let y = 34, lastLayer = null, column = 0;
  for (const tile of tiles) {
    const { label, group } = labels.get(tile.layerIndex), isNewLayer = tile.layerIndex !== lastLayer;
    if (isNewLayer || column === tile.perRow) {
      if (lastLayer !== null) y += height + 8;
      if (isNewLayer && group) { addText(8, y + 12, 13, "--ink", group); y += 22; }
      if (isNewLayer) addText(8, y + height / 2 + 4, 13, "--ink", label);
      column = 0; lastLayer = tile.layerIndex;
    }
    const x = left + column * (width + 8), role = tile.cards[0]?.role;
    if (tile.layer.display !== "matrix") {
      const thumbnail = document.createElement("canvas");
      drawPictureTile(resizeAndClearCanvas(thumbnail, width, height), tile.layer, tile.head, width, height);
      drawing.append(svgElement("image", { href: thumbnail.toDataURL(), x, y, width, height }));
    }
    else if (tile.matrix) drawing.append(...matrixToSvg(tile.matrix.data, tile.matrix.height, tile.matrix.width, x, y, width / tile.matrix.width, height / tile.matrix.height));
    drawing.append(svgElement("rect", { x: x - 2, y: y - 2, width: width + 4, height: height + 4, rx: 3, fill: "none", stroke: role ? roleColour(role) : themeColour("--rule"), "stroke-width": role ? 3 : 1, "stroke-dasharray": role && roleLineStyle(role) !== "solid" ? (roleLineStyle(role) === "dashed" ? "8 5" : "2 4") : null }, svgElement("title", {}, `${tile.layer.headLabel(tile.head)} ${role ?? ""}`)));
    if (tile === tiles[column]) addText(x + width / 2, 22, 12, "--soft", `H${tile.layer.heads[tile.head]}`, "middle");
    column++;
  }
  downloadSvg(`heads-${measureInFileName()}.svg`, drawing, left + Math.max(...tiles.map((tile) => tile.perRow)) * (width + 8) + 8, y + height + 16);
}

function exportArcs() {
  if (!arcs) return;
  const stage = $("stage").getBoundingClientRect(), drawing = svgElement("svg"), base = arcs.getBoundingClientRect();
  const copy = arcs.cloneNode(true);
  const group = svgElement("g", { transform: `translate(${base.left - stage.left},${base.top - stage.top})`, "font-size": 12, fill: themeColour("--soft") });
  group.append(...copy.childNodes);
  drawing.append(group);
  for (const node of document.querySelectorAll("#stage .word")) {
    const name = node.querySelector("bdi"), box = name.getBoundingClientRect(), { fontSize, fontFamily } = getComputedStyle(name), size = parseFloat(fontSize);
    drawing.append(svgElement("text", { x: box.left + box.width / 2 - stage.left, y: box.top - stage.top + box.height / 2 + size * 0.34, "font-family": fontFamily, "text-anchor": "middle", "font-size": size, fill: node.classList.contains("special") ? themeColour("--faint") : themeColour("--ink") }, name.textContent));
  }
  downloadSvg(`${selectedHeadName()}-arcs.svg`, drawing, Math.ceil(stage.width), Math.ceil(stage.height) + 8);
}

const quoteCsv = (text) => `"${String(text).replaceAll('"', '""')}"`;

// Export the matrix; of a long text, the visible part.
function exportWeightsCsv() {
  const current = selectedHeadData();
  if (current.layer.kind === "graph") { exportEdgesCsv(); return; }
  const all = current.data || current.layer.image, range = all ? wholeMatrixView(current) : plot.view;
  const r0 = Math.floor(range.r0), r1 = Math.min(current.rows.length, Math.ceil(range.r1)), c0 = Math.floor(range.c0), c1 = Math.min(current.cols.length, Math.ceil(range.c1));
  const part = all ? "" : `-rows-${r0}-${r1 - 1}-columns-${c0}-${c1 - 1}`;
  if (!all && !plot.cells.exact) {
    const { data, height, width } = plot.cells;
    const lines = Array.from({ length: height }, (_, i) => Array.from(data.subarray(i * width, (i + 1) * width), roundForCsv).join());
    downloadFile(`${selectedHeadName()}-${measureInFileName()}-averaged.csv`, `${lines.join("\n")}\n`, "text/csv");
    return;
  }
  const lines = [["", ...current.cols.slice(c0, c1).map((item) => quoteCsv(item.label))].join()];
  for (let i = r0; i < r1; i++) lines.push([quoteCsv(current.rows[i].label), ...Array.from(weightsOfRow(current, i).subarray(c0, c1), roundForCsv)].join());
  downloadFile(`${selectedHeadName()}-${measureInFileName()}${part}.csv`, `${lines.join("\n")}\n`, "text/csv");
}

// pairs that are not allowed have no weight
const roundForCsv = (w) => (Number.isNaN(w) ? 0 : Number(w.toPrecision(8)));

function exportEdgesCsv() {
  const layer = selectedLayer(), all = layer.loaded.edges.length / 2, lines = ["source,destination,weight"];
  for (let e = 0; e < all; e++) lines.push([quoteCsv(nodeName(layer, "columns", layer.loaded.edges[e])), quoteCsv(nodeName(layer, "rows", layer.loaded.edges[all + e])), roundForCsv(layer.loaded.weights[state.head * all + e])].join());
  downloadFile(`${selectedHeadName()}-edges.csv`, `${lines.join("\n")}\n`, "text/csv");
}

function exportNeighbourhood() {
  const drawing = document.querySelector(".neighbourhood").cloneNode(true), size = Number(drawing.getAttribute("width"));
  drawing.querySelectorAll("text").forEach((text) => { text.setAttribute("fill", themeColour("--ink")); text.setAttribute("font-size", 13); });
  drawing.querySelectorAll(".self").forEach((node) => node.setAttribute("fill", themeColour("--accent")));
  downloadSvg(`${selectedHeadName()}-node-${state.node}.svg`, drawing, size, size);
}

function buildExportMenu() {
  const graph = layers.every((layer) => layer.kind === "graph"), image = layers.every((layer) => layer.image);
  const entries = [
    ["heat", graph ? "Neighbourhood, SVG" : image ? "Overlay, SVG" : "Heat map, SVG", exportHeadPicture], ["mosaic", "All heads, SVG", exportMosaic],
    graph || image ? null : ["arcs", "Sentence with arcs, SVG", exportArcs], ["csv", graph ? "Edges, CSV" : "Matrix, CSV", exportWeightsCsv],
  ].filter(Boolean);
  const menu = $("export");
  menu.querySelector("div").replaceChildren(...entries.map(([name, label, run]) => htmlElement("button", { "data-export": name, on: { click: () => { menu.open = false; run(); } } }, label)));
  document.addEventListener("pointerdown", (event) => { if (!menu.contains(event.target)) menu.open = false; });
}
