// Images: where a patch looks, or who looks at it, over the picture itself, small for every head and large for the chosen one.

const photo = { box: null, sheets: {} };
// the layer in which a patch was last looked at, and the patch; other layers show the same place
const spot = { of: null, node: 0 };

async function loadPhoto() {
  photo.box = new Image();
  photo.box.src = record.image.src;
  await photo.box.decode();
}

// The photograph without colours, so far towards the page's own that an overlay stands out, at some width; kept.
function backdrop(width) {
  const theme = dark() ? "dark" : "light", height = Math.max(1, Math.round((width * record.image.height) / record.image.width));
  const key = `${theme} ${width}`;
  if (photo.sheets[key]) return photo.sheets[key];
  const sheet = document.createElement("canvas");
  sheet.width = width; sheet.height = height;
  const pen = sheet.getContext("2d");
  pen.imageSmoothingQuality = "high";
  if (record.image.blank) { pen.fillStyle = style("--wash"); pen.fillRect(0, 0, width, height); return (photo.sheets[key] = sheet); }
  pen.drawImage(photo.box, 0, 0, width, height);
  const image = pen.getImageData(0, 0, width, height), { data } = image, [low, high] = dark() ? [18, 0.48] : [112, 0.56];
  for (let n = 0; n < data.length; n += 4) data[n] = data[n + 1] = data[n + 2] = low + high * (0.299 * data[n] + 0.587 * data[n + 1] + 0.114 * data[n + 2]);
  pen.putImageData(image, 0, 0);
  return (photo.sheets[key] = sheet);
}

// Of n keys an even share is 1/n, and most of the scale lies between that and 1: by the logarithm.
const tone = (w, n) => Math.min(1, Math.log1p(Math.max(0, w || 0) * n) / Math.log1p(n));

// A weak weight is a thin layer of a clear colour: a pale one would look like the photograph.
const hue = (t) => Math.round(90 + 165 * t);
const cover = (t) => 0.94 * Math.min(1, 1.6 * t) ** 1.1;

// Whether what is drawn are queries that look here, rather than keys that are looked at.
const outward = (of) => state.direction === "out" && of.kind === "self";
const acrossOf = (of, side) => (side === "rows" ? of.image.outputs : of.image.sizes);

// A patch's place among the keys; null for a special token.
function pointOf(of, node) {
  const number = node - of.image.special[0];
  if (number < 0) return null;
  const width = of.image.outputs[1];
  return [Math.floor(number / width) * of.image.stride[0], (number % width) * of.image.stride[1]];
}

// The patch that is looked at as one of another layer, whose patches may be larger.
function spotOf(of, from = layer().image ? { of: layer(), node: state.node } : spot) {
  const at = of === from.of ? null : pointOf(from.of, from.node), [down, across] = from.of.image.sizes;
  return at ? patchAt(of, (at[0] + 0.5) / down, (at[1] + 0.5) / across) : Math.min(from.node, of.queries - 1);
}

// The query at a place of the image, given as shares of its height and width.
function patchAt(of, down, right) {
  const [height, width] = of.image.outputs, step = (share, axis, n) => Math.max(0, Math.min(n - 1, Math.floor(Math.floor(share * of.image.sizes[axis]) / of.image.stride[axis])));
  return height * width ? of.image.special[0] + step(down, 0, height) * width + step(right, 1, width) : 0;
}

function keyAt(of, down, right) {
  const [height, width] = of.image.sizes, within = (share, n) => Math.max(0, Math.min(n - 1, Math.floor(share * n)));
  return of.image.special[1] + within(down, height) * width + within(right, width);
}

// What a patch gives to all keys, or what all queries give to it.
function glances(of, place, node) {
  if (!outward(of)) return of.row(place, node, state.measure);
  const column = new Float32Array(of.queries);
  const totals = state.measure === "weight" ? null : totalsOf(of, place), moved = of.moved(place, node);
  for (let i = 0; i < of.queries; i++) column[i] = of.seen(place, i, node) * (totals ? moved / (totals[i] || Infinity) : 1);
  return column;
}

// What a head moves into each query, summed once.
function totalsOf(of, place) {
  of.totals ??= [];
  return (of.totals[place] ??= Float32Array.from({ length: of.queries }, (_, i) => of.total(place, of.row(place, i, "weight"))));
}

const veilSheet = document.createElement("canvas");

// The backdrop with the weights of one row over it, in a box of a size.
function drawLook(pen, of, row, x, y, width, height) {
  const [down, across] = of.image.sizes, first = of.image.special[1], cells = new ImageData(across, down), colours = ramp();
  for (let n = 0; n < down * across; n++) {
    const t = tone(row[first + n], of.keys), c = colours[hue(t)];
    cells.data[4 * n] = c[0]; cells.data[4 * n + 1] = c[1]; cells.data[4 * n + 2] = c[2]; cells.data[4 * n + 3] = 255 * cover(t);
  }
  veilSheet.width = across; veilSheet.height = down;
  veilSheet.getContext("2d").putImageData(cells, 0, 0);
  const ratio = Math.max(1, window.devicePixelRatio || 1);
  pen.imageSmoothingEnabled = true;
  pen.drawImage(backdrop(Math.max(1, Math.round(width * ratio))), x, y, width, height);
  pen.imageSmoothingEnabled = false;
  pen.drawImage(veilSheet, x, y, width, height);
}

// Width and height of the image inside a square, or inside a box.
function fitted(width, height = width) {
  const scale = Math.min(width / record.image.width, height / record.image.height);
  return [Math.max(1, Math.round(scale * record.image.width)), Math.max(1, Math.round(scale * record.image.height))];
}

// The small drawing of a head in the mosaic.
function drawGlance(pen, of, place, size) {
  // the frame of a patch at the border would reach into the neighbour's tile
  pen.beginPath(); pen.rect(0, 0, size, size); pen.clip();
  const [width, height] = fitted(size), x = (size - width) / 2, y = (size - height) / 2, node = spotOf(of);
  drawLook(pen, of, glances(of, place, node), x, y, width, height);
  const at = pointOf(of, node);
  if (!at || size < 18) return;
  const [down, across] = of.image.sizes, side = Math.max(3, width / across);
  frame(pen, x + ((at[1] + 0.5) * width) / across - side / 2, y + ((at[0] + 0.5) * height) / down - side / 2, side, side, size < 60 ? 1 : 1.5);
}

function frame(pen, x, y, width, height, line) {
  pen.strokeStyle = dark() ? "#000" : "#fff"; pen.lineWidth = line + 2; pen.strokeRect(x, y, width, height);
  pen.strokeStyle = style("--accent"); pen.lineWidth = line; pen.strokeRect(x, y, width, height);
}

function framed(pen, of, node, width, height, line = 2) {
  const at = pointOf(of, node), [down, across] = of.image.sizes;
  if (at) frame(pen, (at[1] * width) / across, (at[0] * height) / down, width / across, height / down, line);
}

// Queries of a layer with a stride stand on fewer points than its keys.
const strided = (of) => of.image.stride.some((n) => n > 1);
const kindOf = (of, side) => (of.image.block > 1 ? "block" : !strided(of) ? "patch" : side === "rows" ? "query" : "point");

function patchName(of, side, i) {
  const name = record.texts[of[side]].pieces[i];
  if (of.image.special[side === "rows" ? 0 : 1] > i) return token(name);
  const stands = side === "rows" && strided(of) ? `, at point (${pointOf(of, i).map((n) => n * of.image.block).join(", ")})` : "";
  return el("span", { class: "patch" }, `${kindOf(of, side)} (${name})${stands}`);
}

// What is looked from, in a sentence that does not name it.
const chosenName = (of) => (pointOf(of, state.node) ? `the framed ${kindOf(of, "rows")}` : "the chosen token");

function gridName(of) {
  const { block } = of.image, [queries, points] = [acrossOf(of, "rows"), acrossOf(of, "columns")].map((n) => n.join(" × "));
  const inBlocks = block > 1 ? ` blocks of ${block} × ${block}` : "";
  return strided(of) ? `${queries}${inBlocks} queries, ${points}${inBlocks} points` : `${points}${inBlocks} patches`;
}

// The chosen head, large.
function drawOverlay() {
  const of = layer();
  if (!of.image) return;
  let box = $("plot").querySelector(".picture");
  if (!box) {
    box = el("canvas", { class: "picture", tabindex: "0", role: "application", "aria-label": "Where the patch looks, over the image. Arrow keys move, Enter locks." });
    plot.box = null;
    $("plot").replaceChildren(box);
    pictureEvents(box);
  }
  const above = $("plot").getBoundingClientRect().top + scrollY;
  const [width, height] = fitted($("plot").clientWidth, Math.max(300, Math.min(innerHeight - above - 60, 640)));
  const row = glances(of, state.head, state.node), pen = canvas(box, width, height);
  drawLook(pen, of, row, 0, 0, width, height);
  framed(pen, of, state.node, width, height);
  Object.assign(box.dataset, { node: state.node, head: headName() });
  const at = state.hover?.col;
  if (at != null && at >= of.image.special[1]) {
    const n = at - of.image.special[1], [down, across] = of.image.sizes;
    pen.strokeStyle = style("--mark"); pen.lineWidth = 1.5;
    pen.strokeRect(((n % across) * width) / across, (Math.floor(n / across) * height) / down, width / across, height / down);
  }
  $("map-name").replaceChildren(el("span", { class: "name" }, headName()), ` ${measureName()}`);
  const kind = kindOf(of, "columns"), things = `${kind}${kind === "patch" ? "es" : "s"} in colour`, name = chosenName(of);
  $("map-hint").textContent = capital(outward(of) ? `${things} look at ${name}.` : `${name} looks at ${things}.`);
  sayLook(of, row);
}

function sayLook(of, row) {
  const out = outward(of), gives = out === (state.measure === "share"), at = state.hover?.col, most = strongest(row, 3, 0.001);
  const list = most.flatMap(([j, w], n) => [n ? ", " : "", `${number(w)} ${gives ? "to" : "from"} `, patchName(of, out ? "rows" : "columns", j)]);
  const special = out ? of.image.special[0] : of.image.special[1];
  let rest = 0;
  for (let j = 0; j < special; j++) rest += row[j];
  $("caption").replaceChildren(el("b", {}, headName()), " ", patchName(of, "rows", state.node), gives ? " gives " : " gets ", ...(list.length ? list : ["nothing"]), ".",
    el("span", { class: "hint" }, of.image.block > 1 ? " These are sums over the patches of the block that is looked at, averaged over those of the one that looks." : "", state.lock ? " Locked; Escape lets go." : ` Point at a ${kindOf(of, "rows")}; click to lock it.`));
  $("readout").replaceChildren(...(at == null
    ? [special && !out ? `Special tokens, not in the picture: ${percent(rest)}.` : ""]
    : [patchName(of, "rows", state.node), out ? " ← " : " → ", patchName(of, "columns", at), ": ", el("b", {}, exactly(row[at]))]));
}

// In place of the sentence: the photograph, special tokens, and which way to look.
function buildPhoto(stage) {
  const of = layer();
  if (!stage.querySelector(".photo")) {
    stage.className = "viewer";
    const box = el("canvas", { class: "picture photo", tabindex: "0", role: "application", "aria-label": "The image. Arrow keys move from patch to patch, Enter locks.", hidden: Boolean(record.image.blank) });
    stage.replaceChildren(box, el("div", { class: "beside" }));
    pictureEvents(box);
  }
  const names = record.texts[of.rows].pieces.slice(0, of.image.special[0]), beside = stage.querySelector(".beside");
  beside.replaceChildren(
    names.length ? el("div", { class: "tokens", role: "group", "aria-label": "Special tokens" }, names.map((name, i) => el("button", { class: "toggle", "data-token": i, "aria-pressed": false, title: "Where this token looks", on: { click: () => set({ node: i, lock: { row: i, col: null } }) } }, name))) : "",
    of.kind === "self" ? el("div", { class: "choice", role: "radiogroup", "aria-label": "Direction", "data-key": "direction" },
      el("button", { role: "radio", value: "in" }, "looks at"), el("button", { role: "radio", value: "out" }, "is looked at by")) : "",
    el("span", { class: "hint" }, gridName(of)));
  choices();
  drawPhoto();
}

function drawPhoto() {
  const of = layer(), box = document.querySelector(".photo");
  if (!of.image || !box) return;
  const [width, height] = fitted(Math.min(280, innerWidth * 0.36), innerHeight < 700 ? 120 : 156);
  const pen = canvas(box, width, height);
  pen.drawImage(photo.box, 0, 0, width, height);
  framed(pen, of, state.node, width, height);
  for (const button of document.querySelectorAll("[data-token]")) button.setAttribute("aria-pressed", Number(button.dataset.token) === state.node);
}

function pictureEvents(box) {
  const share = (event) => { const at = box.getBoundingClientRect(); return [(event.clientY - at.top) / at.height, (event.clientX - at.left) / at.width]; };
  box.addEventListener("pointermove", (event) => {
    const of = layer();
    if (!of.image) return;
    if (state.lock) { const col = keyAt(of, ...share(event)); if (state.hover?.col !== col) set({ hover: { row: state.node, col } }); }
    else set({ node: patchAt(of, ...share(event)) });
  });
  box.addEventListener("pointerleave", () => set({ hover: null }));
  box.addEventListener("click", (event) => {
    const of = layer();
    if (!of.image) return;
    const node = patchAt(of, ...share(event));
    set({ node, hover: null, lock: state.lock?.row === node ? null : { row: node, col: null } });
  });
}

const lockPatch = () => set({ lock: state.lock ? null : { row: state.node, col: null }, hover: null });

// From patch to patch by keys; special tokens stand before the first.
function stepPatch(key) {
  const of = layer(), special = of.image.special[0], width = of.image.outputs[1], number = state.node - special;
  const by = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: width, ArrowUp: -width }[key];
  let to = state.node + by;
  if (number < 0) to = key === "ArrowDown" ? special : state.node + Math.sign(by);
  else if (number + by < 0) to = special - 1;
  if (to >= 0 && to < of.queries) set({ node: to, hover: null, lock: state.lock ? { row: to, col: null } : null });
}

const capital = (words) => words[0].toUpperCase() + words.slice(1);
const offsetName = (down, right, what = "patch") => [down ? `${Math.abs(down)} ${down > 0 ? "down" : "up"}` : "", right ? `${Math.abs(right)} ${right > 0 ? "right" : "left"}` : ""].filter(Boolean).join(", ") || `the ${what} itself`;

// How far a head looks, and whether always to one side.
function aimed(of, place) {
  const { distance, fixed, offset } = of.stats, [down, right] = offset[place];
  // no patch looks at any
  if (distance[place] === null) return [];
  return [el("dt", {}, number(distance[place], 1)), el("dd", {}, "patches away on average"),
    el("dt", {}, percent(fixed[place])), el("dd", {}, `of the ${strided(of) ? "queries" : "patches"} look most at one and the same offset${fixed[place] < 0.2 ? "" : `: ${offsetName(down, right)}`}`)];
}

// The mean over all patches, by where the key stands from the patch: the taps of a head that is like a convolution.
function surroundings(of, place) {
  const [down, across] = of.image.sizes, reach = Math.min(6, Math.max(down, across) - 1), side = 2 * reach + 1, sums = new Float32Array(side * side);
  for (let i = of.image.special[0]; i < of.queries; i++) {
    const row = of.row(place, i, state.measure), [y, x] = pointOf(of, i);
    for (let r = Math.max(0, y - reach); r <= Math.min(down - 1, y + reach); r++) for (let c = Math.max(0, x - reach); c <= Math.min(across - 1, x + reach); c++)
      sums[(r - y + reach) * side + c - x + reach] += row[of.image.special[1] + r * across + c] / (of.queries - of.image.special[0]);
  }
  return { sums, side, reach };
}

function drawSurroundings(of, place) {
  const { sums, side, reach } = surroundings(of, place), cell = Math.floor(188 / side), size = cell * side, colours = ramp();
  const box = el("canvas", { class: "taps", role: "img", "aria-label": `The mean ${measureName()} by where the key stands from the patch` }), pen = canvas(box, size, size);
  sums.forEach((w, n) => { pen.fillStyle = rgb(colours[Math.round(255 * tone(w, of.keys))]); pen.fillRect((n % side) * cell, Math.floor(n / side) * cell, cell - 1, cell - 1); });
  frame(pen, reach * cell, reach * cell, cell - 1, cell - 1, 1.5);
  box.addEventListener("pointermove", (event) => {
    const c = Math.min(side - 1, Math.floor(event.offsetX / cell)), r = Math.min(side - 1, Math.floor(event.offsetY / cell));
    // in patches, as the strongest offset is, also where blocks of them are shown
    const at = [r - reach, c - reach].map((n) => n * of.image.block);
    tip(event, `${offsetName(...at, kindOf(of, "rows"))}${of.image.block > 1 && at.some(Boolean) ? ", in patches" : ""}: `, el("b", {}, exactly(sums[r * side + c])));
  });
  box.addEventListener("pointerleave", (event) => tip(event));
  const { block } = of.image;
  return [el("h3", {}, `Around a ${kindOf(of, "rows")}: mean ${measureName()}${block > 1 ? `; a field is a block of ${block} × ${block} patches` : ""}`), box];
}

// The scale of overlays: transparent at 0.
function drawTones() {
  const n = layer().keys, marks = [0, 0.01, 0.05, 0.1, 0.25, 1].filter((w) => !w || w >= 1 / n), colours = ramp();
  const stops = Array.from({ length: 17 }, (_, i) => `rgb(${colours[hue(i / 16)].join(" ")} / ${cover(i / 16)}) ${(100 * i) / 16}%`);
  $("scale").replaceChildren(
    el("div", { class: "ramp", style: `background:linear-gradient(90deg,${stops.join()}), ${dark() ? "#4a4a4a" : "#c4c4c4"}`, role: "img", "aria-label": "Colours from 0 to 1, by the logarithm" }),
    el("div", { class: "marks" }, marks.map((w) => el("span", { style: `left:${100 * tone(w, n)}%` }, w === 0 || w === 1 ? `${w}` : String(w).slice(1)))),
    el("p", { class: "hint" }, state.measure === "weight" ? `Weight: the share of ${chosenName(layer())}’s attention. ` : `Contribution: the share of what the head moves into ${chosenName(layer())}. `, "One scale for all heads, by the logarithm."));
}

function exportOverlay() {
  const [width, height] = fitted(640), sheet = document.createElement("canvas"), pen = canvas(sheet, width, height);
  drawLook(pen, layer(), glances(layer(), state.head, state.node), 0, 0, width, height);
  framed(pen, layer(), state.node, width, height);
  saveSvg(`${headName()}-from-${state.node}.svg`, svg("svg", {}, svg("image", { href: sheet.toDataURL(), width, height })), width, height);
}

watch("layer head measure theme node direction hover lock", drawOverlay);
watch("node theme", drawPhoto);
watch("node", () => { if (layer().image) drawTones(); });
watch("node layer", () => { if (layer().image) Object.assign(spot, { of: layer(), node: state.node }); });
