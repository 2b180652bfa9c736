// The mosaic: every head as a small map, framed in the colour of its role.

const tiles = [];
// how wide a tile's frame is; what tiles are drawn on, what lies over them, and a sheet to draw with
let edge = 2, sheet = null, veil = null;
const scratch = document.createElement("canvas");
const widest = layers.reduce((a, b) => (b.heads.length > a.heads.length ? b : a));
const columns = widest.heads.length;

function buildMosaic() {
  const grid = $("grid");
  // a single layer of many heads takes several lines
  const across = layers.length === 1 ? Math.min(columns, columns > 4 ? Math.ceil(columns / Math.ceil(columns / 6)) : columns) : columns;
  const room = grid.clientWidth - 34, dense = room / across < 21;
  const size = dense ? Math.max(9, Math.floor(room / across) - 1) : Math.min(96, Math.floor(room / across) - 3);
  grid.style.setProperty("--tile", `${size}px`);
  grid.style.setProperty("--across", across);
  grid.classList.toggle("dense", dense);
  edge = dense ? 1 : 2;
  const top = el("div", { class: "line top", role: "row" }, el("span", { class: "name" }));
  if (layers.length > 1) for (let h = 0; h < across; h++) top.append(el("span", { class: "name", role: "columnheader" }, size >= 24 ? `H${widest.heads[h]}` : h % (dense ? 4 : 2) ? "" : `${widest.heads[h]}`));
  if (layers.length > 1) grid.append(top);
  layers.forEach((of, at) => {
    for (let begin = 0; begin < of.heads.length; begin += across) {
      const line = el("div", { class: "line", role: "row" }, el("span", { class: "name", role: "rowheader", title: of.name }, begin ? "" : `L${of.number}`));
      of.heads.slice(begin, begin + across).forEach((_, step) => line.append(buildTile(of, at, begin + step, across)));
      grid.append(line);
    }
  });
  sheet = el("canvas", { class: "sheet", "aria-hidden": "true" });
  veil = el("canvas", { class: "sheet", "aria-hidden": "true", hidden: true });
  const [width, height] = [grid.scrollWidth, grid.scrollHeight];
  grid.prepend(sheet, veil);
  canvas(sheet, width, height);
  canvas(veil, width, height);
  for (const one of tiles) Object.assign(one, { x: one.button.offsetLeft + edge, y: one.button.offsetTop + edge, inner: size - 2 * edge });
}

function buildTile(of, at, place, across) {
  const cards = cardsOf(of, place), role = cards[0]?.role;
  const button = el("button", {
    class: "tile", role: "gridcell", tabindex: "-1", "data-head": of.label(place),
    "aria-label": `${of.label(place)}${role ? `, ${cards.map((card) => card.role).join(", ")}` : ", no role"}`,
    style: `--role:${roleColour(role)};--line:${roleLine(role)}`,
    on: {
      click: () => choose(at, place),
      pointermove: (event) => tip(event, el("b", {}, of.label(place)), ` ${role ?? "no role found"}`),
      pointerleave: (event) => tip(event),
    },
  }, el("span", { class: "initials" }, role ? initials(role) : "·"));
  tiles.push({ of, at, place, across, cards, button });
  return button;
}

// A layer's maps are decoded and drawn one layer after another, the chosen one first.
async function paintMosaic() {
  const turn = (paintMosaic.turn = (paintMosaic.turn ?? 0) + 1);
  const order = layers.map((_, at) => at).sort((a, b) => (b === state.layer) - (a === state.layer));
  for (const at of order) {
    await layers[at].maps();
    if (turn !== paintMosaic.turn) return;
    for (const one of tiles) if (one.at === at) {
      one.shown = one.of.drawn === "matrix" ? tile(one.of, one.place) : null;
      one.known = true;
      paintTile(one);
    }
  }
  lightMosaic();
}

// All tiles lie on one sheet under their buttons: hundreds of sheets would be slow.
function paintTile(one) {
  if (!one.known) return;
  const pen = sheet.getContext("2d"), { x, y, inner } = one;
  pen.clearRect(x, y, inner, inner);
  pen.globalAlpha = one.dimmed ? 0.13 : 1;
  if (one.of.drawn !== "matrix") {
    pen.save();
    pen.translate(x, y);
    (one.of.image ? drawGlance : drawStar)(pen, one.of, one.place, inner);
    pen.restore();
  } else if (one.shown) {
    const { data, height, width } = one.shown;
    pen.imageSmoothingEnabled = height > inner;
    pen.imageSmoothingQuality = "high";
    pen.drawImage(picture(data, height, width, scratch), x, y, inner, inner);
  }
  pen.globalAlpha = 1;
}

// In every head: the row of the word that is pointed at stands out, or the column of the one that is looked at.
function lightMosaic() {
  const at = pointed(), now = at && layer().drawn === "matrix" ? current() : null;
  veil.hidden = !now;
  if (!now) return;
  const pen = canvas(veil, veil.clientWidth, veil.clientHeight), cover = style("--veil");
  pen.imageSmoothingEnabled = false;
  for (const one of tiles) {
    if (!one.shown || one.dimmed || !alike(one.of, layer())) continue;
    const { x, y, inner } = one, { data, height, width } = one.shown;
    const down = span(at.row, now.rows, one.of.queries, height, inner, one.of.whole);
    const along = span(at.col, now.cols, one.of.keys, width, inner, one.of.whole);
    pen.fillStyle = cover;
    pen.fillRect(x, y, inner, inner);
    // a row of a pixel or two would not be seen: it is drawn higher than it is
    if (down) {
      const high = Math.max(5, down.size), top = Math.max(0, Math.min(inner - high, down.from + (down.size - high) / 2));
      pen.drawImage(picture(data.subarray(down.cell * width, (down.cell + 1) * width), 1, width, scratch), x, y + top, inner, high);
    } else if (along) pen.clearRect(x + along.from, y, along.size, inner);
  }
}

// Where an item lies in a map of so many cells: the cell, and its place in pixels.
function span(index, list, total, cells, inner, whole) {
  if (index === null || index === undefined || !list[index]) return null;
  const cell = whole ? index : Math.floor((list[index].pieces[0] * cells) / total);
  return { cell, from: (cell / cells) * inner, size: Math.max(2, inner / cells) };
}

function markMosaic() {
  const words = state.search.trim().toLowerCase().split(/\s+/).filter(Boolean);
  for (const one of tiles) {
    const chosen = one.at === state.layer && one.place === state.head;
    one.button.setAttribute("aria-selected", chosen);
    one.button.tabIndex = chosen ? 0 : -1;
    const text = `${one.of.label(one.place)} ${one.of.name} ${one.cards.map((card) => card.role).join(" ") || "no role"}`.toLowerCase();
    const found = words.every((word) => text.includes(word)) && (!state.roles.size || one.cards.some((card) => state.roles.has(card.role)));
    one.button.classList.toggle("dimmed", !found);
    if (one.dimmed !== !found) { one.dimmed = !found; paintTile(one); }
  }
  const found = tiles.filter((one) => !one.button.classList.contains("dimmed")).length;
  $("mosaic-name").replaceChildren(found < tiles.length ? `${found} of ${tiles.length} heads` : `${tiles.length} head${tiles.length > 1 ? "s" : ""}`);
  $("grid").classList.toggle("roles", state.paint === "role");
}

function buildChips() {
  $("search").placeholder = `Find ${record.cards.length ? "a role or a head" : "a head"}, such as ${layers[layers.length - 1].label(0)}`;
  if (!record.cards.length) {
    if (!record.image) $("chips").append(el("p", { class: "hint" }, "No roles were looked for."));
    document.querySelector('[data-key="paint"]').hidden = true;
    return;
  }
  for (const role of ROLES) {
    const chip = el("button", {
      class: "chip", "aria-pressed": "false", style: `--role:${roleColour(role)};--line:${roleLine(role)}`,
      on: {
        click: () => {
          const roles = new Set(state.roles);
          if (!roles.delete(role)) roles.add(role);
          chip.setAttribute("aria-pressed", roles.has(role));
          set({ roles });
        },
        pointermove: (event) => tip(event, record.roles[role] ?? role),
        pointerleave: (event) => tip(event),
      },
    }, el("i"), role, el("small", {}, counted(role)));
    $("chips").append(chip);
  }
}

// The colour scale, the same for the mosaic, the map and the arcs.
function drawScale() {
  if (layer().image) { drawTones(); return; }
  const marks = [0, 0.01, 0.05, 0.1, 0.25, 0.5, 1];
  const stops = Array.from({ length: 17 }, (_, i) => `${colour((i / 16) ** 2)} ${(100 * i) / 16}%`);
  const graph = layer().kind === "graph";
  $("scale").replaceChildren(
    el("div", { class: "ramp", style: `background:linear-gradient(90deg,${stops.join()})`, role: "img", "aria-label": "Colours from 0 to 1, by the square root" }),
    el("div", { class: "marks" }, marks.map((w) => el("span", { style: `left:${100 * Math.sqrt(w)}%` }, w === 0 || w === 1 ? `${w}` : String(w).slice(1)))),
    el("p", { class: "hint" }, state.measure === "weight"
      ? (graph ? "Weight of an edge. " : "Weight: the share of a row’s attention that a column gets. ")
      : "Contribution: the share of what the head moves into a row that comes from a column. ", "One scale for all heads, by the square root."),
  );
}

watch("layer head search roles paint", markMosaic);
watch("measure level hide theme node direction", paintMosaic);
watch("hover lock layer", lightMosaic);
watch("measure theme layer", drawScale);
