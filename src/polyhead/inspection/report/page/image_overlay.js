// Images: the attention of a patch, or the attention on it, drawn over the image: small for every head, large for the selected one.

const photo = { image: null, backdrops: {} };
// The layer in which a patch was last selected, and the patch: other layers show the same location.
const lastPatch = { layer: null, node: 0 };

async function loadInputImage() {
  photo.image = new Image();
  photo.image.src = record.image.src;
  await photo.image.decode();
}

// The image in grey with low contrast, so that overlays are visible; cached by theme and width.
function getGreyBackdrop(width) {
  const theme = isDarkTheme() ? "dark" : "light", height = Math.max(1, Math.round((width * record.image.height) / record.image.width));
  const key = `${theme} ${width}`;
  if (photo.backdrops[key]) return photo.backdrops[key];
  const canvas = document.createElement("canvas");
  canvas.width = width; canvas.height = height;
  const ctx = canvas.getContext("2d");
  ctx.imageSmoothingQuality = "high";
  if (record.image.blank) { ctx.fillStyle = themeColour("--wash"); ctx.fillRect(0, 0, width, height); return (photo.backdrops[key] = canvas); }
  ctx.drawImage(photo.image, 0, 0, width, height);
  const image = ctx.getImageData(0, 0, width, height), { data } = image, [low, high] = isDarkTheme() ? [18, 0.48] : [112, 0.56];
  for (let n = 0; n < data.length; n += 4) data[n] = data[n + 1] = data[n + 2] = low + high * (0.299 * data[n] + 0.587 * data[n + 1] + 0.114 * data[n + 2]);
  ctx.putImageData(image, 0, 0);
  return (photo.backdrops[key] = canvas);
}

// A logarithmic scale: uniform attention over n keys is 1/n, and most of the scale should lie between 1/n and 1.
const logScale = (w, n) => Math.min(1, Math.log1p(Math.max(0, w || 0) * n) / Math.log1p(n));

// Weak weights are a strong colour with a low alpha: a pale colour would look like the image.
const overlayColourIndex = (t) => Math.round(90 + 165 * t);
const overlayAlpha = (t) => 0.94 * Math.min(1, 1.6 * t) ** 1.1;

// Whether the attention on the selected patch is drawn, rather than the attention of it.
const showsIncoming = (layer) => state.direction === "out" && layer.kind === "self";
const gridSizes = (layer, side) => (side === "rows" ? layer.image.outputs : layer.image.sizes);

// The row and column of a query on the grid of the keys; null for a special token.
function gridPosition(layer, node) {
  const point = node - layer.image.special[0];
  if (point < 0) return null;
  const width = layer.image.outputs[1];
  return [Math.floor(point / width) * layer.image.stride[0], (point % width) * layer.image.stride[1]];
}

// The query of `layer` at the location of the selected patch; layers may have different patch sizes.
function findSamePatch(layer, source = selectedLayer().image ? { layer: selectedLayer(), node: state.node } : lastPatch) {
  const position = layer === source.layer ? null : gridPosition(source.layer, source.node), [down, across] = source.layer.image.sizes;
  return position ? queryAt(layer, (position[0] + 0.5) / down, (position[1] + 0.5) / across) : Math.min(source.node, layer.queries - 1);
}

// Whether queries are patches, not only words or a token that attend to patches.
const hasQueryPatches = (layer) => layer.queries > layer.image.special[0];

// The query at a location of the image, in fractions of its height and width.
function queryAt(layer, down, right) {
  const [height, width] = layer.image.outputs, indexOf = (fraction, axis, n) => Math.max(0, Math.min(n - 1, Math.floor(Math.floor(fraction * layer.image.sizes[axis]) / layer.image.stride[axis])));
  return height * width ? layer.image.special[0] + indexOf(down, 0, height) * width + indexOf(right, 1, width) : 0;
}

function keyAt(layer, down, right) {
  const [height, width] = layer.image.sizes, indexOf = (fraction, n) => Math.max(0, Math.min(n - 1, Math.floor(fraction * n)));
  return layer.image.special[1] + indexOf(down, height) * width + indexOf(right, width);
}

// The weights of a patch on all keys, or of all queries on it.
function overlayWeights(layer, head, node) {
  if (!showsIncoming(layer)) return layer.weightRow(head, node, state.measure);
  const column = new Float32Array(layer.queries);
  const totals = state.measure === "weight" ? null : contributionTotals(layer, head), norm = layer.valueNorm(head, node);
  for (let i = 0; i < layer.queries; i++) column[i] = layer.imageWeight(head, i, node) * (totals ? norm / (totals[i] || Infinity) : 1);
  return column;
}

// What a head adds to each query in total, computed once.
function contributionTotals(layer, head) {
  layer.totals ??= [];
  return (layer.totals[head] ??= Float32Array.from({ length: layer.queries }, (_, i) => layer.contributionTotal(head, layer.weightRow(head, i, "weight"))));
}

const overlayCanvas = document.createElement("canvas");

// Draw the backdrop, and the weights of one row above it.
function paintOverlay(ctx, layer, row, x, y, width, height) {
  const [down, across] = layer.image.sizes, first = layer.image.special[1], cells = new ImageData(across, down), colours = colourRamp();
  for (let n = 0; n < down * across; n++) {
    const t = logScale(row[first + n], layer.keys), c = colours[overlayColourIndex(t)];
    cells.data[4 * n] = c[0]; cells.data[4 * n + 1] = c[1]; cells.data[4 * n + 2] = c[2]; cells.data[4 * n + 3] = 255 * overlayAlpha(t);
  }
  overlayCanvas.width = across; overlayCanvas.height = down;
  overlayCanvas.getContext("2d").putImageData(cells, 0, 0);
  const ratio = Math.max(1, window.devicePixelRatio || 1);
  ctx.imageSmoothingEnabled = true;
  ctx.drawImage(getGreyBackdrop(Math.max(1, Math.round(width * ratio))), x, y, width, height);
  ctx.imageSmoothingEnabled = false;
  ctx.drawImage(overlayCanvas, x, y, width, height);
}

// The width and height of the image, scaled to fit a square or a box.
function fitImage(width, height = width) {
  const scale = Math.min(width / record.image.width, height / record.image.height);
  return [Math.max(1, Math.round(scale * record.image.width)), Math.max(1, Math.round(scale * record.image.height))];
}

// Draw the tile of a head in the mosaic.
function drawImageTile(ctx, layer, head, tileWidth, tileHeight) {
  // clip: the frame of a border patch would reach into the next tile
  ctx.beginPath(); ctx.rect(0, 0, tileWidth, tileHeight); ctx.clip();
  const [width, height] = fitImage(tileWidth, tileHeight), x = (tileWidth - width) / 2, y = (tileHeight - height) / 2, size = Math.max(width, height), node = findSamePatch(layer);
  paintOverlay(ctx, layer, overlayWeights(layer, head, node), x, y, width, height);
  const position = gridPosition(layer, node);
  if (!position || size < 18) return;
  const [down, across] = layer.image.sizes, side = Math.max(3, width / across);
  strokeFrame(ctx, x + ((position[1] + 0.5) * width) / across - side / 2, y + ((position[0] + 0.5) * height) / down - side / 2, side, side, size < 60 ? 1 : 1.5);
}

function strokeFrame(ctx, x, y, width, height, line) {
  ctx.strokeStyle = isDarkTheme() ? "#000" : "#fff"; ctx.lineWidth = line + 2; ctx.strokeRect(x, y, width, height);
  ctx.strokeStyle = themeColour("--accent"); ctx.lineWidth = line; ctx.strokeRect(x, y, width, height);
}

function framePatch(ctx, layer, node, width, height, line = 2) {
  const position = gridPosition(layer, node), [down, across] = layer.image.sizes;
  if (position) strokeFrame(ctx, (position[1] * width) / across, (position[0] * height) / down, width / across, height / down, line);
}

// With a stride, a layer has fewer queries than keys.
const isStrided = (layer) => layer.image.stride.some((n) => n > 1);
const itemNoun = (layer, side) => (layer.image.block > 1 ? "block" : !isStrided(layer) ? "patch" : side === "rows" ? "query" : "point");

function buildItemName(layer, side, i) {
  const name = record.texts[layer[side]].pieces[i];
  if (layer.image.special[side === "rows" ? 0 : 1] > i) return tokenElement(name);
  const location = side === "rows" && isStrided(layer) ? `, at point (${gridPosition(layer, i).map((n) => n * layer.image.block).join(", ")})` : "";
  return htmlElement("span", { class: "patch" }, `${itemNoun(layer, side)} (${name})${location}`);
}

// The selected query in a sentence, without its name.
const describeSelectedQuery = (layer) => (gridPosition(layer, state.node) ? `the framed ${itemNoun(layer, "rows")}` : "the selected token");

function describeGrid(layer) {
  const { block } = layer.image, [queries, points] = [gridSizes(layer, "rows"), gridSizes(layer, "columns")].map((n) => n.join(" × "));
  const inBlocks = block > 1 ? ` blocks of ${block} × ${block}` : "";
  return isStrided(layer) ? `${queries}${inBlocks} queries, ${points}${inBlocks} points` : `${points}${inBlocks} patches`;
}

// Draw the overlay of the selected head, large.
function drawImageOverlay() {
  const layer = selectedLayer();
  if (!layer.image) return;
  let box = $("plot").querySelector(".picture");
  if (!box) {
    box = htmlElement("canvas", { class: "picture", tabindex: "0", role: "application", "aria-label": "Attention of the patch, over the image. Arrow keys move, Enter locks." });
    plot.canvas = null;
    $("plot").replaceChildren(box);
    bindImageEvents(box);
  }
  const offsetTop = $("plot").getBoundingClientRect().top + scrollY;
  const [width, height] = fitImage($("plot").clientWidth, Math.max(300, Math.min(innerHeight - offsetTop - 60, 640)));
  const row = overlayWeights(layer, state.head, state.node), ctx = resizeAndClearCanvas(box, width, height);
  paintOverlay(ctx, layer, row, 0, 0, width, height);
  framePatch(ctx, layer, state.node, width, height);
  Object.assign(box.dataset, { node: state.node, head: selectedHeadName() });
  const key = state.hover?.col;
  if (key != null && key >= layer.image.special[1]) {
    const n = key - layer.image.special[1], [down, across] = layer.image.sizes;
    ctx.strokeStyle = themeColour("--mark"); ctx.lineWidth = 1.5;
    ctx.strokeRect(((n % across) * width) / across, (Math.floor(n / across) * height) / down, width / across, height / down);
  }
  $("map-name").replaceChildren(htmlElement("span", { class: "name" }, selectedHeadName()), ` ${measureName()}`);
  const kind = itemNoun(layer, "columns"), targets = `${kind}${kind === "patch" ? "es" : "s"} in colour`, name = describeSelectedQuery(layer);
  $("map-hint").textContent = capitalise(showsIncoming(layer) ? `${targets} attend to ${name}.` : `${name} attends to ${targets}.`);
  updateImageCaption(layer, row);
}

function updateImageCaption(layer, row) {
  const out = showsIncoming(layer), verb = state.measure === "weight" ? (out ? " is attended to by " : " attends to ") : out ? " gives to " : " gets from ", key = state.hover?.col, best = largestEntries(row, 3, 0.001);
  const list = best.flatMap(([j, w], n) => [n ? ", " : "", buildItemName(layer, out ? "rows" : "columns", j), ` ${formatNumber(w)}`]);
  const special = out ? layer.image.special[0] : layer.image.special[1];
  let specialWeight = 0;
  for (let j = 0; j < special; j++) specialWeight += row[j];
  $("caption").replaceChildren(htmlElement("b", {}, selectedHeadName()), " ", buildItemName(layer, "rows", state.node), verb, ...(list.length ? list : ["nothing"]), ".",
    htmlElement("span", { class: "hint" }, layer.image.block > 1 ? " The weight of a block is the sum over the patches of the key block, the mean over the patches of the query block." : "", !hasQueryPatches(layer) ? " Hover over the image to read single weights." : state.lock ? " Locked; Escape releases it." : ` Hover over a ${itemNoun(layer, "rows")}; click to lock it.`));
  $("readout").replaceChildren(...(key == null
    ? [special && !out ? `On special tokens, which are not in the image: ${formatPercent(specialWeight)}.` : ""]
    : [buildItemName(layer, "rows", state.node), verb, buildItemName(layer, "columns", key), ": ", htmlElement("b", {}, formatWeight(row[key]))]));
}

// Build the image, the special tokens and the direction buttons, in place of the text.
function buildImageViewer(stage) {
  const layer = selectedLayer();
  if (!stage.querySelector(".photo")) {
    stage.className = "viewer";
    const box = htmlElement("canvas", { class: "picture photo", tabindex: "0", role: "application", "aria-label": "The image. Arrow keys move from patch to patch, Enter locks.", hidden: Boolean(record.image.blank) });
    stage.replaceChildren(box, htmlElement("div", { class: "beside" }));
    bindImageEvents(box);
  }
  const names = record.texts[layer.rows].pieces.slice(0, layer.image.special[0]), beside = stage.querySelector(".beside");
  beside.replaceChildren(
    names.length ? htmlElement("div", { class: "tokens", role: "group", "aria-label": "Special tokens" }, names.map((name, i) => htmlElement("button", { class: "toggle", "data-token": i, "aria-pressed": false, title: "Show the attention of this token", on: { click: () => setState({ node: i, lock: { row: i, col: null } }) } }, name))) : "",
    layer.kind === "self" ? htmlElement("div", { class: "choice", role: "radiogroup", "aria-label": "Direction", "data-key": "direction" },
      htmlElement("button", { role: "radio", value: "in" }, "attends to"), htmlElement("button", { role: "radio", value: "out" }, "is attended to by")) : "",
    htmlElement("span", { class: "hint" }, describeGrid(layer)));
  updateButtonGroups();
  drawInputImage();
}

function drawInputImage() {
  const layer = selectedLayer(), box = document.querySelector(".photo");
  if (!layer.image || !box) return;
  const widest = isWideLayer(layer) ? innerWidth * 0.56 : Math.min(280, innerWidth * 0.36);
  const [width, height] = fitImage(widest, innerHeight < 700 ? 120 : 156);
  const ctx = resizeAndClearCanvas(box, width, height);
  ctx.drawImage(photo.image, 0, 0, width, height);
  framePatch(ctx, layer, state.node, width, height);
  for (const button of document.querySelectorAll("[data-token]")) button.setAttribute("aria-pressed", Number(button.dataset.token) === state.node);
}

function bindImageEvents(box) {
  const relativePosition = (event) => { const rect = box.getBoundingClientRect(); return [(event.clientY - rect.top) / rect.height, (event.clientX - rect.left) / rect.width]; };
  box.addEventListener("pointermove", (event) => {
    const layer = selectedLayer();
    if (!layer.image) return;
    if (state.lock || !hasQueryPatches(layer)) { const col = keyAt(layer, ...relativePosition(event)); if (state.hover?.col !== col) setState({ hover: { row: state.node, col } }); }
    else setState({ node: queryAt(layer, ...relativePosition(event)) });
  });
  box.addEventListener("pointerleave", () => setState({ hover: null }));
  box.addEventListener("click", (event) => {
    const layer = selectedLayer();
    if (!layer.image) return;
    const node = hasQueryPatches(layer) ? queryAt(layer, ...relativePosition(event)) : state.node;
    setState({ node, hover: null, lock: state.lock?.row === node ? null : { row: node, col: null } });
  });
}

const togglePatchLock = () => setState({ lock: state.lock ? null : { row: state.node, col: null }, hover: null });

// Move to another patch by an arrow key; special tokens are before the first patch.
function movePatchByKey(key) {
  const layer = selectedLayer(), special = layer.image.special[0], width = layer.image.outputs[1], point = state.node - special;
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: width, ArrowUp: -width }[key];
  let next = state.node + step;
  if (point < 0) next = key === "ArrowDown" ? special : state.node + Math.sign(step);
  else if (point + step < 0) next = special - 1;
  if (next >= 0 && next < layer.queries) setState({ node: next, hover: null, lock: state.lock ? { row: next, col: null } : null });
}

const capitalise = (words) => words[0].toUpperCase() + words.slice(1);
const describeOffset = (down, right, what = "patch") => [down ? `${Math.abs(down)} ${down > 0 ? "down" : "up"}` : "", right ? `${Math.abs(right)} ${right > 0 ? "right" : "left"}` : ""].filter(Boolean).join(", ") || `the ${what} itself`;

// The mean attention distance of a head, and its most frequent offset.
function buildImageFacts(layer, head) {
  const { distance, offset_share, offset } = layer.stats, [down, right] = offset[head];
  // no patch attends to any patch
  if (distance[head] === null) return [];
  return [htmlElement("dt", {}, formatNumber(distance[head], 1)), htmlElement("dd", {}, "mean attention distance, in patches"),
    htmlElement("dt", {}, formatPercent(offset_share[head])), htmlElement("dd", {}, `of the ${isStrided(layer) ? "queries" : "patches"} have the same strongest offset${offset_share[head] < 0.2 ? "" : `: ${describeOffset(down, right)}`}`)];
}

// The mean weight by offset from the patch, over all patches: the taps of a head that acts like a convolution.
function meanWeightByOffset(layer, head) {
  const [down, across] = layer.image.sizes, reach = Math.min(6, Math.max(down, across) - 1), side = 2 * reach + 1, sums = new Float32Array(side * side);
  for (let i = layer.image.special[0]; i < layer.queries; i++) {
    const row = layer.weightRow(head, i, state.measure), [y, x] = gridPosition(layer, i);
    for (let r = Math.max(0, y - reach); r <= Math.min(down - 1, y + reach); r++) for (let c = Math.max(0, x - reach); c <= Math.min(across - 1, x + reach); c++)
      sums[(r - y + reach) * side + c - x + reach] += row[layer.image.special[1] + r * across + c] / (layer.queries - layer.image.special[0]);
  }
  return { sums, side, reach };
}

function buildOffsetMap(layer, head) {
  const { sums, side, reach } = meanWeightByOffset(layer, head), cell = Math.floor(188 / side), size = cell * side, colours = colourRamp();
  const box = htmlElement("canvas", { class: "taps", role: "img", "aria-label": `Mean ${measureName()} by the offset of the key from the patch` }), ctx = resizeAndClearCanvas(box, size, size);
  sums.forEach((w, n) => { ctx.fillStyle = toCssRgb(colours[Math.round(255 * logScale(w, layer.keys))]); ctx.fillRect((n % side) * cell, Math.floor(n / side) * cell, cell - 1, cell - 1); });
  strokeFrame(ctx, reach * cell, reach * cell, cell - 1, cell - 1, 1.5);
  box.addEventListener("pointermove", (event) => {
    const c = Math.min(side - 1, Math.floor(event.offsetX / cell)), r = Math.min(side - 1, Math.floor(event.offsetY / cell));
    // in patches, like the strongest offset, even if blocks are shown
    const offset = [r - reach, c - reach].map((n) => n * layer.image.block);
    showTooltip(event, `${describeOffset(...offset, itemNoun(layer, "rows"))}${layer.image.block > 1 && offset.some(Boolean) ? ", in patches" : ""}: `, htmlElement("b", {}, formatWeight(sums[r * side + c])));
  });
  box.addEventListener("pointerleave", (event) => showTooltip(event));
  const { block } = layer.image;
  return [htmlElement("h3", {}, `Around a ${itemNoun(layer, "rows")}: mean ${measureName()}${block > 1 ? `; a cell is a block of ${block} × ${block} patches` : ""}`), box];
}

// The colour scale of overlays: transparent at 0.
function drawOverlayColourScale() {
  const n = selectedLayer().keys, marks = [0, 0.01, 0.05, 0.1, 0.25, 1].filter((w) => !w || w >= 1 / n), colours = colourRamp();
  const stops = Array.from({ length: 17 }, (_, i) => `rgb(${colours[overlayColourIndex(i / 16)].join(" ")} / ${overlayAlpha(i / 16)}) ${(100 * i) / 16}%`);
  $("scale").replaceChildren(
    htmlElement("div", { class: "ramp", style: `background:linear-gradient(90deg,${stops.join()}), ${isDarkTheme() ? "#4a4a4a" : "#c4c4c4"}`, role: "img", "aria-label": "Colour scale from 0 to 1, logarithmic" }),
    htmlElement("div", { class: "marks" }, marks.map((w) => htmlElement("span", { style: `left:${100 * logScale(w, n)}%` }, w === 0 || w === 1 ? `${w}` : String(w).slice(1)))),
    htmlElement("p", { class: "hint" }, state.measure === "weight" ? `Weight: the share of ${describeSelectedQuery(selectedLayer())}’s attention. ` : `Contribution: the share of what the head adds to ${describeSelectedQuery(selectedLayer())}. `, "One logarithmic scale for all heads."));
}

function exportOverlay() {
  const [width, height] = fitImage(640), canvas = document.createElement("canvas"), ctx = resizeAndClearCanvas(canvas, width, height);
  paintOverlay(ctx, selectedLayer(), overlayWeights(selectedLayer(), state.head, state.node), 0, 0, width, height);
  framePatch(ctx, selectedLayer(), state.node, width, height);
  downloadSvg(`${selectedHeadName()}-from-${state.node}.svg`, svgElement("svg", {}, svgElement("image", { href: canvas.toDataURL(), width, height })), width, height);
}

watch("layer head measure theme node direction hover lock", drawImageOverlay);
watch("node theme", drawInputImage);
watch("node", () => { if (selectedLayer().image) drawOverlayColourScale(); });
watch("node layer", () => { if (selectedLayer().image) Object.assign(lastPatch, { layer: selectedLayer(), node: state.node }); });
