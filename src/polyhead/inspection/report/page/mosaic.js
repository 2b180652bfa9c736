// The mosaic: a small heat map of every head, framed in the colour of its role.

const tiles = [];
// Width of a tile's frame; the canvas of all tiles, and the veil above it.
let frameWidth = 2, mosaicCanvas = null, mosaicVeil = null;
const scratchCanvas = document.createElement("canvas");
const widestLayer = layers.reduce((a, b) => (b.heads.length > a.heads.length ? b : a));
const maxHeads = widestLayer.heads.length;

function buildMosaic() {
  const grid = $("grid");
  // a single layer with many heads is wrapped
  const perRow = layers.length === 1 ? Math.min(maxHeads, maxHeads > 4 ? Math.ceil(maxHeads / Math.ceil(maxHeads / 6)) : maxHeads) : maxHeads;
  const available = grid.clientWidth - 34, dense = available / perRow < 21;
  const size = dense ? Math.max(9, Math.floor(available / perRow) - 1) : Math.min(96, Math.floor(available / perRow) - 3);
  grid.style.setProperty("--tile", `${size}px`);
  grid.style.setProperty("--across", perRow);
  grid.classList.toggle("dense", dense);
  frameWidth = dense ? 1 : 2;
  const header = htmlElement("div", { class: "line top", role: "row" }, htmlElement("span", { class: "name" }));
  if (layers.length > 1) for (let h = 0; h < perRow; h++) header.append(htmlElement("span", { class: "name", role: "columnheader" }, size >= 24 ? `H${widestLayer.heads[h]}` : h % (dense ? 4 : 2) ? "" : `${widestLayer.heads[h]}`));
  if (layers.length > 1) grid.append(header);
  layers.forEach((layer, layerIndex) => {
    for (let begin = 0; begin < layer.heads.length; begin += perRow) {
      const row = htmlElement("div", { class: "line", role: "row" }, htmlElement("span", { class: "name", role: "rowheader", title: layer.name }, begin ? "" : `L${layer.number}`));
      layer.heads.slice(begin, begin + perRow).forEach((_, step) => row.append(buildTile(layer, layerIndex, begin + step, perRow)));
      grid.append(row);
    }
  });
  mosaicCanvas = htmlElement("canvas", { class: "sheet", "aria-hidden": "true" });
  mosaicVeil = htmlElement("canvas", { class: "sheet", "aria-hidden": "true", hidden: true });
  const [width, height] = [grid.scrollWidth, grid.scrollHeight];
  grid.prepend(mosaicCanvas, mosaicVeil);
  resizeAndClearCanvas(mosaicCanvas, width, height);
  resizeAndClearCanvas(mosaicVeil, width, height);
  for (const tile of tiles) Object.assign(tile, { x: tile.button.offsetLeft + frameWidth, y: tile.button.offsetTop + frameWidth, inner: size - 2 * frameWidth });
}

function buildTile(layer, layerIndex, head, perRow) {
  const cards = cardsOfHead(layer, head), role = cards[0]?.role;
  const button = htmlElement("button", {
    class: "tile", role: "gridcell", tabindex: "-1", "data-head": layer.headLabel(head),
    "aria-label": `${layer.headLabel(head)}${role ? `, ${cards.map((card) => card.role).join(", ")}` : ", no role"}`,
    style: `--role:${roleColour(role)};--line:${roleLineStyle(role)}`,
    on: {
      click: () => selectHead(layerIndex, head),
      pointermove: (event) => showTooltip(event, htmlElement("b", {}, layer.headLabel(head)), ` ${role ?? "no role"}`),
      pointerleave: (event) => showTooltip(event),
    },
  }, htmlElement("span", { class: "initials" }, role ? roleInitials(role) : "·"));
  tiles.push({ layer, layerIndex, head, perRow, cards, button });
  return button;
}

// Load and draw the tiles layer by layer, the selected layer first.
async function paintMosaic() {
  const generation = (paintMosaic.generation = (paintMosaic.generation ?? 0) + 1);
  const order = layers.map((_, layerIndex) => layerIndex).sort((a, b) => (b === state.layer) - (a === state.layer));
  for (const layerIndex of order) {
    await layers[layerIndex].loadMosaicArrays();
    if (generation !== paintMosaic.generation) return;
    for (const tile of tiles) if (tile.layerIndex === layerIndex) {
      tile.matrix = tile.layer.display === "matrix" ? tileMatrix(tile.layer, tile.head) : null;
      tile.ready = true;
      paintTile(tile);
    }
  }
  highlightMosaic();
}

// All tiles share one canvas below their buttons: hundreds of canvases would be slow.
function paintTile(tile) {
  if (!tile.ready) return;
  const ctx = mosaicCanvas.getContext("2d"), { x, y, inner } = tile;
  ctx.clearRect(x, y, inner, inner);
  ctx.globalAlpha = tile.dimmed ? 0.13 : 1;
  if (tile.layer.display !== "matrix") {
    ctx.save();
    ctx.translate(x, y);
    (tile.layer.image ? drawImageTile : drawGraphTile)(ctx, tile.layer, tile.head, inner);
    ctx.restore();
  } else if (tile.matrix) {
    const { data, height, width } = tile.matrix;
    ctx.imageSmoothingEnabled = height > inner;
    ctx.imageSmoothingQuality = "high";
    ctx.drawImage(drawMatrix(data, height, width, scratchCanvas), x, y, inner, inner);
  }
  ctx.globalAlpha = 1;
}

// Highlight the row or the column of the pointed word in every tile.
function highlightMosaic() {
  const target = highlightedItems(), current = target && selectedLayer().display === "matrix" ? selectedHeadData() : null;
  mosaicVeil.hidden = !current;
  if (!current) return;
  const ctx = resizeAndClearCanvas(mosaicVeil, mosaicVeil.clientWidth, mosaicVeil.clientHeight), veilColour = themeColour("--veil");
  ctx.imageSmoothingEnabled = false;
  for (const tile of tiles) {
    if (!tile.matrix || tile.dimmed || !haveSameItems(tile.layer, selectedLayer())) continue;
    const { x, y, inner } = tile, { data, height: rows, width: columns } = tile.matrix;
    const rowSpan = cellSpanInPixels(target.row, current.rows, tile.layer.queries, rows, inner, tile.layer.complete);
    const columnSpan = cellSpanInPixels(target.col, current.cols, tile.layer.keys, columns, inner, tile.layer.complete);
    ctx.fillStyle = veilColour;
    ctx.fillRect(x, y, inner, inner);
    // a row of one or two pixels would be invisible: draw it at least five pixels high
    if (rowSpan) {
      const drawnHeight = Math.max(5, rowSpan.size), top = Math.max(0, Math.min(inner - drawnHeight, rowSpan.from + (rowSpan.size - drawnHeight) / 2));
      ctx.drawImage(drawMatrix(data.subarray(rowSpan.cell * columns, (rowSpan.cell + 1) * columns), 1, columns, scratchCanvas), x, y + top, inner, drawnHeight);
    } else if (columnSpan) ctx.clearRect(x + columnSpan.from, y, columnSpan.size, inner);
  }
}

// The cell of a tile that contains an item, with its offset and size in pixels.
function cellSpanInPixels(index, list, total, cells, inner, isComplete) {
  if (index === null || index === undefined || !list[index]) return null;
  const cell = isComplete ? index : Math.floor((list[index].pieces[0] * cells) / total);
  return { cell, from: (cell / cells) * inner, size: Math.max(2, inner / cells) };
}

function updateMosaicSelection() {
  const terms = state.search.trim().toLowerCase().split(/\s+/).filter(Boolean);
  for (const tile of tiles) {
    const selected = tile.layerIndex === state.layer && tile.head === state.head;
    tile.button.setAttribute("aria-selected", selected);
    tile.button.tabIndex = selected ? 0 : -1;
    const text = `${tile.layer.headLabel(tile.head)} ${tile.layer.name} ${tile.cards.map((card) => card.role).join(" ") || "no role"}`.toLowerCase();
    const found = terms.every((word) => text.includes(word)) && (!state.roles.size || tile.cards.some((card) => state.roles.has(card.role)));
    tile.button.classList.toggle("dimmed", !found);
    if (tile.dimmed !== !found) { tile.dimmed = !found; paintTile(tile); }
  }
  const found = tiles.filter((tile) => !tile.button.classList.contains("dimmed")).length;
  $("mosaic-name").replaceChildren(found < tiles.length ? `${found} of ${tiles.length} heads` : `${tiles.length} head${tiles.length > 1 ? "s" : ""}`);
  $("grid").classList.toggle("roles", state.paint === "role");
}

function buildRoleFilters() {
  $("search").placeholder = `Find ${record.cards.length ? "a role or a head" : "a head"}, such as ${layers[layers.length - 1].headLabel(0)}`;
  if (!record.cards.length) {
    if (!record.image) $("chips").append(htmlElement("p", { class: "hint" }, "Roles were not measured."));
    document.querySelector('[data-key="paint"]').hidden = true;
    return;
  }
  for (const role of ROLES) {
    const chip = htmlElement("button", {
      class: "chip", "aria-pressed": "false", style: `--role:${roleColour(role)};--line:${roleLineStyle(role)}`,
      on: {
        click: () => {
          const roles = new Set(state.roles);
          if (!roles.delete(role)) roles.add(role);
          chip.setAttribute("aria-pressed", roles.has(role));
          setState({ roles });
        },
        pointermove: (event) => showTooltip(event, record.roles[role] ?? role),
        pointerleave: (event) => showTooltip(event),
      },
    }, htmlElement("i"), role, htmlElement("small", {}, countHeadsWithRole(role)));
    $("chips").append(chip);
  }
}

// The colour scale, shared by the mosaic, the heat map and the arcs.
function drawColourScale() {
  if (selectedLayer().image) { drawOverlayColourScale(); return; }
  const marks = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 1];
  const stops = Array.from({ length: 17 }, (_, i) => `${weightColour((i / 16) ** 2)} ${(100 * i) / 16}%`);
  const graph = selectedLayer().kind === "graph";
  $("scale").replaceChildren(
    htmlElement("div", { class: "ramp", style: `background:linear-gradient(90deg,${stops.join()})`, role: "img", "aria-label": "Colour scale from 0 to 1, square root" }),
    htmlElement("div", { class: "marks" }, marks.map((w) => htmlElement("span", { style: `left:${100 * Math.sqrt(w)}%` }, w === 0 || w === 1 ? `${w}` : String(w).slice(1)))),
    htmlElement("p", { class: "hint" }, state.measure === "weight"
      ? (graph ? "Weight of an edge. " : "Weight: the share of a query’s (row’s) attention on a key (column). ")
      : "Contribution: the share of the head’s output at a query (row) that comes from a key (column). ", "One square-root scale for all heads."),
  );
}

watch("layer head search roles paint", updateMosaicSelection);
watch("measure level hide theme node direction", paintMosaic);
watch("hover lock layer", highlightMosaic);
watch("measure theme layer", drawColourScale);
