// The start: what stands still is built once, what changes is drawn by whoever watches it.

document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => {
  document.documentElement.dataset.theme = event.matches ? "dark" : "light";
  set({ theme: state.theme + 1 });
});

function drawAll() {
  for (const draw of [choices, markMosaic, drawScale, buildSentence, drawHeat, drawNeighbourhood, drawOverlay, drawAbout, drawVectors]) draw();
}

async function start() {
  $("title").textContent = record.title;
  $("finding").textContent = record.finding ?? "";
  $("finding").hidden = !record.finding;
  $("notes").replaceChildren(...record.notes.map((note) => el("p", { dir: "auto" }, note)), el("p", { class: "hint" }, "Made with Polyhead. Everything is inside this file: it asks no network."));
  // a text in which no word has several pieces has one level only
  if (!record.texts.some((text) => text.words.length + text.word_of.filter((word) => word === null).length < text.pieces.length || text.pieces.some((piece, i) => text.word_of[i] !== null && piece !== text.words[text.word_of[i]]))) document.querySelector('[data-key="level"]').hidden = true;
  if (layers.every((of) => of.drawn !== "matrix")) { document.querySelector('[data-key="level"]').hidden = true; $("hide").hidden = true; }
  const graph = layers.find((of) => of.kind === "graph");
  if (graph) { await graph.maps(); state.node = telltale(graph); }
  document.body.classList.toggle("imaged", Boolean(record.image));
  if (record.image) { await loadPhoto(); showFirst(); }
  await layer().hear(state.head);
  buildMosaic();
  buildChips();
  buildExport();
  drawAll();
  sentenceEvents();
  $("hide").onclick = () => relevel({ hide: !state.hide });
  $("theme").onclick = turn;
  $("help").onclick = help;
  $("search").oninput = (event) => set({ search: event.target.value });
  document.addEventListener("keydown", onKey);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(start.later);
    start.later = setTimeout(() => { tiles.length = 0; $("grid").replaceChildren(); buildMosaic(); drawAll(); paintMosaic(); }, 120);
  });
  document.documentElement.dataset.ready = Math.round(performance.now());
  await paintMosaic();
  document.documentElement.dataset.painted = Math.round(performance.now());
}

// The patch that is shown first, which counts in one layer, in the chosen one.
function showFirst() {
  Object.assign(spot, { of: layers[record.image.of], node: record.image.first });
  if (layer().image) state.node = spotOf(layer(), spot);
}

// A node with some neighbours, but not too many to see.
function telltale(of) {
  const { start: begin } = sorted(of, "in");
  let best = 0, score = -1;
  for (let n = 0; n < of.queries; n++) {
    const degree = begin[n + 1] - begin[n], value = degree > 12 ? 12 / degree : degree / 12;
    if (value > score) { score = value; best = n; }
  }
  return best;
}

start();
