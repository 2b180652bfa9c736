// The mosaic: a small heat map of every head, framed in the colour of its role.

const tiles = [];
// Width of a tile's frame; the canvas of all tiles, and the veil above it.
let frameWidth = 2, mosaicCanvas = null, mosaicVeil = null;
const scratchCanvas = document.createElement("canvas");
const widestLayer = layers.reduce((a, b) => (b.heads.length > a.heads.length ? b : a));
const maxHeads = widestLayer.heads.length;

// Components of a module name that do not tell two stacks of layers apart.
const GENERIC_NAMES = new Set(["layer", "layers", "h", "block", "blocks", "model", "transformer", "module", "bert", "roberta"]);

// The stack that a layer belongs to, such as "decoder", its number in that stack (null if its name has none), and the kind of its attention.
function describeLayer(layer) {
  const parts = layer.name.split("."), at = parts.findIndex((part) => /^\d+$/.test(part));
  const stack = parts.slice(0, Math.max(0, at)).filter((part) => !GENERIC_NAMES.has(part)).join(".");
  const kind = layer.kind === "graph" ? "graph" : /^(self|cross)-/.test(layer.attention) ? layer.attention
    : /cross|encdec|enc_dec|encoder_attn|multihead_attn/i.test(layer.name) ? "cross-attention" : /self/i.test(layer.name) ? "self-attention" : "attention";
  return { stack, kind, number: at < 0 ? null : Number(parts[at]) };
}

// The layers of the mosaic from top to bottom, in groups such as "decoder, cross-attention", with the labels of their rows.
const mosaicGroups = (() => {
  const groups = new Map(), places = layers.map(describeLayer), stacks = new Set(places.map((place) => place.stack));
  // both numbers are shown if a layer's number in its stack is not its running number
  const showBoth = places.some((place, i) => place.number !== null && place.number !== layers[i].number);
  layers.forEach((layer, layerIndex) => {
    const { stack, kind, number } = places[layerIndex], label = [stacks.size > 1 ? stack : "", kind].filter(Boolean).join(", ");
    if (!groups.has(label)) groups.set(label, { label, rows: [] });
    groups.get(label).rows.push({ layer, layerIndex, label: showBoth && number !== null ? `${number} · L${layer.number}` : `L${layer.number}` });
  });
  return [...groups.values()];
})();

const TILE_GAP = 3, DENSE_GAP = 1, GROUP_HEIGHT = 18, MIN_TILE = 9;
// Tiles are as wide as their maps, where all of them are wide.
const tileAspect = record.image && layers.every((layer) => layer.image) ? Math.min(6, Math.max(1, record.image.width / record.image.height)) : layers.every(isWideLayer) ? 3 : 1;

// The size of the tiles: as large as the width allows, and smaller if all rows then fit above the fold.
function layOutMosaic(grid, perRow, labelWidth) {
  const rows = mosaicGroups.flatMap((group) => group.rows).reduce((sum, { layer }) => sum + Math.ceil(layer.heads.length / perRow), 0);
  const others = (mosaicGroups.length > 1 ? mosaicGroups.length * GROUP_HEIGHT : 0) + (layers.length > 1 ? 18 : 0) + 8;
  // the colour scale below the mosaic is visible too; on a wide page the mosaic is below the map, one screen further down
  const roomBelow = innerHeight - (document.body.classList.contains("wide") ? 140 : grid.getBoundingClientRect().top + scrollY) - 46;
  const available = Math.max(document.body.classList.contains("imaged") ? 500 : 420, Math.min(900, roomBelow));
  const widthFor = (gap) => Math.floor((grid.clientWidth - 6 - labelWidth) / perRow) - gap, heightFor = (gap) => Math.floor((Math.max(260, roomBelow) - others) / rows) - gap;
  const sizeFor = (limit) => {
    const spacious = Math.min(widthFor(TILE_GAP), limit(TILE_GAP) * tileAspect), dense = spacious < 18 * tileAspect;
    const gap = dense ? DENSE_GAP : TILE_GAP, frames = dense ? 2 : 4;
    const width = dense ? Math.min(widthFor(gap), Math.floor(limit(gap) * tileAspect)) : Math.floor(spacious), height = Math.round((width - frames) / tileAspect) + frames;
    // low tiles of matrices use the width that is left
    return { width: tileAspect === 1 && !record.image ? Math.max(width, Math.min(widthFor(gap), 2 * height)) : width, height, dense };
  };
  grid.style.maxHeight = grid.style.overflowY = "";
  const unlimited = sizeFor(() => 96), fitting = sizeFor(heightFor);
  const isTall = ({ height, dense }) => rows * (height + (dense ? DENSE_GAP : TILE_GAP)) + others > available;
  if (!isTall(unlimited)) return unlimited;
  if (fitting.height >= MIN_TILE && fitting.width >= MIN_TILE) { grid.style.maxHeight = "none"; return fitting; }
  // the rows are scrolled: measure the width beside the scrollbar
  grid.style.maxHeight = `${available}px`;
  grid.style.overflowY = "scroll";
  const scrolled = sizeFor(() => 18 / tileAspect + 3);
  return { ...scrolled, width: Math.max(MIN_TILE, scrolled.width), height: Math.max(MIN_TILE, scrolled.height) };
}

function buildMosaic() {
  const grid = $("grid");
  // a single layer with many heads is wrapped
  const perRow = layers.length === 1 ? Math.min(maxHeads, maxHeads > 4 ? Math.ceil(maxHeads / Math.ceil(maxHeads / 6)) : maxHeads) : maxHeads;
  const longest = Math.max(...mosaicGroups.flatMap((group) => group.rows.map(({ label }) => label.length))), labelWidth = Math.max(28, 6 * longest + 6);
  const { width, height, dense } = layOutMosaic(grid, perRow, labelWidth);
  for (const [name, value] of Object.entries({ label: `${labelWidth - (dense ? DENSE_GAP : TILE_GAP)}px`, tile: `${width}px`, "tile-height": `${height}px`, across: perRow })) grid.style.setProperty(`--${name}`, value);
  grid.classList.toggle("dense", dense);
  frameWidth = dense ? 1 : 2;
  const header = htmlElement("div", { class: "line top", role: "row" }, htmlElement("span", { class: "name" }));
  const step = width >= 24 ? 1 : width >= 12 ? 2 : 4;
  if (layers.length > 1) for (let h = 0; h < perRow; h++) header.append(htmlElement("span", { class: "name", role: "columnheader" }, width >= 24 ? `H${widestLayer.heads[h]}` : h % step ? "" : `${widestLayer.heads[h]}`));
  if (layers.length > 1) grid.append(header);
  for (const group of mosaicGroups) {
    if (mosaicGroups.length > 1) grid.append(htmlElement("div", { class: "group" }, group.label));
    for (const { layer, layerIndex, label } of group.rows) for (let begin = 0; begin < layer.heads.length; begin += perRow) {
      const row = htmlElement("div", { class: "line", role: "row" }, htmlElement("span", { class: "name", role: "rowheader", title: layer.name }, begin ? "" : label));
      layer.heads.slice(begin, begin + perRow).forEach((_, step) => row.append(buildTile(layer, layerIndex, begin + step, perRow)));
      grid.append(row);
    }
  }
  mosaicCanvas = htmlElement("canvas", { class: "sheet", "aria-hidden": "true" });
  mosaicVeil = htmlElement("canvas", { class: "sheet", "aria-hidden": "true", hidden: true });
  const [fullWidth, fullHeight] = [grid.scrollWidth, grid.scrollHeight];
  grid.prepend(mosaicCanvas, mosaicVeil);
  resizeAndClearCanvas(mosaicCanvas, fullWidth, fullHeight);
  resizeAndClearCanvas(mosaicVeil, fullWidth, fullHeight);
  for (const tile of tiles) Object.assign(tile, { x: tile.button.offsetLeft + frameWidth, y: tile.button.offsetTop + frameWidth, width: width - 2 * frameWidth, height: height - 2 * frameWidth });
  scrollToSelectedTile();
}

// Scroll the mosaic, not the page, so that the selected head is visible.
function scrollToSelectedTile() {
  const grid = $("grid"), button = tiles.find((tile) => tile.layerIndex === state.layer && tile.head === state.head)?.button;
  if (!button) return;
  const margin = button.offsetHeight, top = button.offsetTop, bottom = top + button.offsetHeight;
  if (top - margin < grid.scrollTop) grid.scrollTop = top - margin;
  else if (bottom + margin > grid.scrollTop + grid.clientHeight) grid.scrollTop = bottom + margin - grid.clientHeight;
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
      tile.matrix = tile.layer.display === "matrix" ? matrixOfMosaicTile(tile.layer, tile.head) : null;
      tile.ready = true;
      paintTile(tile);
    }
  }
  highlightMosaic();
}

// All tiles share one canvas below their buttons: hundreds of canvases would be slow.
function paintTile(tile) {
  if (!tile.ready) return;
  const ctx = mosaicCanvas.getContext("2d"), { x, y } = tile;
  ctx.clearRect(x, y, tile.width, tile.height);
  ctx.globalAlpha = tile.dimmed ? 0.13 : 1;
  if (tile.layer.display !== "matrix") {
    ctx.save();
    ctx.translate(x, y);
    drawPictureTile(ctx, tile.layer, tile.head, tile.width, tile.height);
    ctx.restore();
  } else if (tile.matrix) {
    const { data, height, width } = tile.matrix;
    ctx.imageSmoothingEnabled = height > tile.height || width > tile.width;
    ctx.imageSmoothingQuality = "high";
    if (tile.layer.hasMask) { ctx.fillStyle = themeColour("--rule"); ctx.fillRect(x, y, tile.width, tile.height); }
    ctx.drawImage(drawMatrix(data, height, width, scratchCanvas), x, y, tile.width, tile.height);
  }
  ctx.globalAlpha = 1;
}

// Draw the tile of a head on an image or on a graph.
function drawPictureTile(ctx, layer, head, width, height) {
  if (layer.image) { drawImageTile(ctx, layer, head, width, height); return; }
  const size = Math.min(width, height);
  ctx.translate((width - size) / 2, (height - size) / 2);
  drawGraphTile(ctx, layer, head, size);
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
    const { x, y, width, height } = tile, { data, height: rows, width: columns } = tile.matrix;
    const rowSpan = cellSpanInPixels(target.row, current.rows, tile.layer.queries, rows, height, tile.layer.complete);
    const columnSpan = cellSpanInPixels(target.col, current.cols, tile.layer.keys, columns, width, tile.layer.complete);
    ctx.fillStyle = veilColour;
    ctx.fillRect(x, y, width, height);
    // a row of one or two pixels would be invisible: draw it at least five pixels high
    if (rowSpan) {
      const drawnHeight = Math.max(5, rowSpan.size), top = Math.max(0, Math.min(height - drawnHeight, rowSpan.from + (rowSpan.size - drawnHeight) / 2));
      ctx.drawImage(drawMatrix(data.subarray(rowSpan.cell * columns, (rowSpan.cell + 1) * columns), 1, columns, scratchCanvas), x, y + top, width, drawnHeight);
    } else if (columnSpan) ctx.clearRect(x + columnSpan.from, y, columnSpan.size, height);
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
watch("layer head", scrollToSelectedTile);
watch("measure level hide theme node direction", paintMosaic);
watch("hover lock layer", highlightMosaic);
watch("measure theme layer", drawColourScale);
