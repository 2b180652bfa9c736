// Files: the map, the mosaic and the arcs as SVG, the matrix as CSV.

function save(name, text, type) {
  const link = el("a", { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  document.body.append(link);
  link.click();
  link.remove();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}

const fileMeasure = () => (state.measure === "weight" ? "weights" : "contribution-shares");

function saveSvg(name, drawing, width, height) {
  drawing.setAttribute("xmlns", "http://www.w3.org/2000/svg");
  drawing.setAttribute("viewBox", `0 0 ${width} ${height}`);
  drawing.setAttribute("width", width);
  drawing.setAttribute("height", height);
  drawing.setAttribute("font-family", "system-ui, sans-serif");
  drawing.prepend(svg("rect", { width, height, fill: style("--panel") }));
  save(name, new XMLSerializer().serializeToString(drawing), "image/svg+xml");
}

// A matrix as shapes, or as one picture where they would be too many.
function cellShapes(data, height, width, x, y, cw, ch) {
  if (height * width <= 4096) {
    return Array.from({ length: height * width }, (_, n) => svg("rect", { x: x + (n % width) * cw, y: y + Math.floor(n / width) * ch, width: cw, height: ch, fill: colour(data[n]) }));
  }
  return [svg("image", { href: picture(data, height, width).toDataURL(), x, y, width: cw * width, height: ch * height, preserveAspectRatio: "none", style: "image-rendering:pixelated" })];
}

function exportHeat() {
  const now = current(), drawing = svg("svg");
  if (now.of.image) { exportOverlay(); return; }
  if (now.of.kind === "graph") { exportNeighbourhood(); return; }
  const { cells, view } = plot, few = Math.max(cells.height, cells.width) <= 64 && cells.exact;
  const cell = few ? 30 : 480 / Math.max(cells.height, cells.width), left = few ? 110 : 50, top = few ? 110 : 50;
  drawing.append(svg("text", { x: 12, y: 24, "font-size": 15, "font-weight": 600, fill: style("--ink") }, `${headName()} ${measureName()}`, svg("tspan", { dx: 10, "font-size": 11, "font-weight": 400, fill: style("--soft") }, "colour: square root of 0 … 1")));
  drawing.append(...cellShapes(cells.data, cells.height, cells.width, left, top, cell, cell));
  if (few) {
    for (let r = 0; r < cells.height; r++) drawing.append(svg("text", { x: left - 8, y: top + (r + 0.66) * cell, "text-anchor": "end", "font-size": 12, fill: style("--ink") }, shown(now.rows[cells.r0 + r].label)));
    for (let c = 0; c < cells.width; c++) drawing.append(svg("text", { transform: `translate(${left + (c + 0.55) * cell},${top - 8}) rotate(-50)`, "font-size": 12, fill: style("--ink") }, shown(now.cols[cells.c0 + c].label)));
    cells.data.forEach((w, n) => { if (w >= 0.005) drawing.append(svg("text", { x: left + ((n % cells.width) + 0.5) * cell, y: top + (Math.floor(n / cells.width) + 0.64) * cell, "text-anchor": "middle", "font-size": 11, fill: ink(w) }, brief(w))); });
  } else drawing.append(svg("text", { x: left, y: top - 8, "font-size": 12, fill: style("--soft") }, `rows ${Math.floor(view.r0)}–${Math.ceil(view.r1) - 1}, columns ${Math.floor(view.c0)}–${Math.ceil(view.c1) - 1}`));
  saveSvg(`${headName()}-${fileMeasure()}.svg`, drawing, left + cells.width * cell + 60, top + cells.height * cell + 16);
}

function exportMosaic() {
  const drawing = svg("svg"), size = 64, step = 72, left = 44, top = 34;
  let line = -1, last = null, place = 0;
  for (const one of tiles) {
    if (one.at !== last || place === one.across) { line++; place = 0; last = one.at; drawing.append(svg("text", { x: 8, y: top + line * step + 36, "font-size": 13, fill: style("--ink") }, `L${one.of.number}`)); }
    const x = left + place * step, y = top + line * step, role = one.cards[0]?.role;
    if (one.of.drawn !== "matrix") {
      const star = document.createElement("canvas");
      (one.of.image ? drawGlance : drawStar)(canvas(star, size, size), one.of, one.place, size);
      drawing.append(svg("image", { href: star.toDataURL(), x, y, width: size, height: size }));
    }
    else if (one.shown) drawing.append(...cellShapes(one.shown.data, one.shown.height, one.shown.width, x, y, size / one.shown.width, size / one.shown.height));
    drawing.append(svg("rect", { x: x - 2, y: y - 2, width: size + 4, height: size + 4, rx: 3, fill: "none", stroke: role ? roleColour(role) : style("--rule"), "stroke-width": role ? 3 : 1, "stroke-dasharray": role && roleLine(role) !== "solid" ? (roleLine(role) === "dashed" ? "8 5" : "2 4") : null }, svg("title", {}, `${one.of.label(one.place)} ${role ?? ""}`)));
    if (line === 0) drawing.append(svg("text", { x: x + size / 2, y: 22, "text-anchor": "middle", "font-size": 12, fill: style("--soft") }, `H${one.of.heads[one.place]}`));
    place++;
  }
  saveSvg(`heads-${fileMeasure()}.svg`, drawing, left + Math.max(...tiles.map((one) => one.across)) * step + 8, top + (line + 1) * step + 8);
}

function exportArcs() {
  if (!arcs) return;
  const stage = $("stage").getBoundingClientRect(), drawing = svg("svg"), base = arcs.getBoundingClientRect();
  const drawn = arcs.cloneNode(true);
  const group = svg("g", { transform: `translate(${base.left - stage.left},${base.top - stage.top})`, "font-size": 12, fill: style("--soft") });
  group.append(...drawn.childNodes);
  drawing.append(group);
  for (const node of document.querySelectorAll("#stage .word")) {
    const name = node.querySelector("bdi"), box = name.getBoundingClientRect(), { fontSize, fontFamily } = getComputedStyle(name), size = parseFloat(fontSize);
    drawing.append(svg("text", { x: box.left + box.width / 2 - stage.left, y: box.top - stage.top + box.height / 2 + size * 0.34, "font-family": fontFamily, "text-anchor": "middle", "font-size": size, fill: node.classList.contains("special") ? style("--faint") : style("--ink") }, name.textContent));
  }
  saveSvg(`${headName()}-arcs.svg`, drawing, Math.ceil(stage.width), Math.ceil(stage.height) + 8);
}

const quoted = (text) => `"${String(text).replaceAll('"', '""')}"`;

// The matrix shown; of a text too long for that, the part in sight.
function exportCsv() {
  const now = current();
  if (now.of.kind === "graph") { exportEdges(); return; }
  const all = now.data || now.of.image, v = all ? whole(now) : plot.view;
  const r0 = Math.floor(v.r0), r1 = Math.min(now.rows.length, Math.ceil(v.r1)), c0 = Math.floor(v.c0), c1 = Math.min(now.cols.length, Math.ceil(v.c1));
  const part = all ? "" : `-rows-${r0}-${r1 - 1}-columns-${c0}-${c1 - 1}`;
  if (!all && !plot.cells.exact) {
    const { data, height, width } = plot.cells;
    const lines = Array.from({ length: height }, (_, i) => Array.from(data.subarray(i * width, (i + 1) * width), plain).join());
    save(`${headName()}-${fileMeasure()}-averaged.csv`, `${lines.join("\n")}\n`, "text/csv");
    return;
  }
  const lines = [["", ...now.cols.slice(c0, c1).map((item) => quoted(item.label))].join()];
  for (let i = r0; i < r1; i++) lines.push([quoted(now.rows[i].label), ...Array.from(rowOf(now, i).subarray(c0, c1), plain)].join());
  save(`${headName()}-${fileMeasure()}${part}.csv`, `${lines.join("\n")}\n`, "text/csv");
}

const plain = (w) => Number(w.toPrecision(8));

function exportEdges() {
  const of = layer(), all = of.got.edges.length / 2, lines = ["source,destination,weight"];
  for (let e = 0; e < all; e++) lines.push([quoted(nodeName(of, "columns", of.got.edges[e])), quoted(nodeName(of, "rows", of.got.edges[all + e])), plain(of.got.weights[state.head * all + e])].join());
  save(`${headName()}-edges.csv`, `${lines.join("\n")}\n`, "text/csv");
}

function exportNeighbourhood() {
  const drawing = document.querySelector(".neighbourhood").cloneNode(true), size = Number(drawing.getAttribute("width"));
  drawing.querySelectorAll("text").forEach((text) => { text.setAttribute("fill", style("--ink")); text.setAttribute("font-size", 13); });
  drawing.querySelectorAll(".self").forEach((node) => node.setAttribute("fill", style("--accent")));
  saveSvg(`${headName()}-node-${state.node}.svg`, drawing, size, size);
}

function buildExport() {
  const graph = layers.every((of) => of.kind === "graph"), image = layers.every((of) => of.image);
  const entries = [
    ["heat", graph ? "Neighbourhood, SVG" : image ? "Overlay, SVG" : "Heat-map, SVG", exportHeat], ["mosaic", "All heads, SVG", exportMosaic],
    graph || image ? null : ["arcs", "Sentence with arcs, SVG", exportArcs], ["csv", graph ? "Edges, CSV" : "Matrix, CSV", exportCsv],
  ].filter(Boolean);
  const menu = $("export");
  menu.querySelector("div").replaceChildren(...entries.map(([name, label, run]) => el("button", { "data-export": name, on: { click: () => { menu.open = false; run(); } } }, label)));
  document.addEventListener("pointerdown", (event) => { if (!menu.contains(event.target)) menu.open = false; });
}
