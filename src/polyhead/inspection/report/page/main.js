// Start-up: build the static parts once, draw the rest, and bind the events.

document.documentElement.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", (event) => {
  document.documentElement.dataset.theme = event.matches ? "dark" : "light";
  setState({ theme: state.theme + 1 });
});

function drawAllViews() {
  for (const draw of [updateButtonGroups, updateMosaicSelection, drawColourScale, buildInputView, drawHeatmap, drawNeighbourhood, drawImageOverlay, drawHeadPanel, drawOutputVectors]) draw();
}

async function startPage() {
  $("title").textContent = record.title;
  $("finding").textContent = record.finding ?? "";
  $("finding").hidden = !record.finding;
  $("notes").replaceChildren(...record.notes.map((note) => htmlElement("p", { dir: "auto" }, note)), htmlElement("p", { class: "hint" }, "Made with Polyhead. All data is in this file; it makes no network requests."));
  // words and pieces differ only if a word has several pieces, or a piece that is spelled differently
  if (!record.texts.some((text) => text.labels || text.words.length + text.word_of.filter((word) => word === null).length < text.pieces.length || text.pieces.some((piece, i) => text.word_of[i] !== null && piece !== text.words[text.word_of[i]]))) document.querySelector('[data-key="level"]').hidden = true;
  if (layers.every((layer) => layer.display !== "matrix")) { document.querySelector('[data-key="level"]').hidden = true; $("hide").hidden = true; }
  const graph = layers.find((layer) => layer.kind === "graph");
  if (graph) { await graph.loadMosaicArrays(); state.node = pickInitialNode(graph); }
  document.body.classList.toggle("imaged", Boolean(record.image));
  document.body.classList.toggle("wide", layers.some(isWideLayer));
  if (record.image) { await loadInputImage(); selectInitialPatch(); }
  await selectedLayer().loadHeadArrays(state.head);
  buildRoleFilters();
  buildExportMenu();
  // the mosaic's room depends on the height of the input above it
  buildInputView();
  buildMosaic();
  drawAllViews();
  bindTextEvents();
  $("hide").onclick = () => changeLevelOrHiding({ hide: !state.hide });
  $("theme").onclick = toggleTheme;
  $("help").onclick = toggleHelp;
  $("search").oninput = (event) => setState({ search: event.target.value });
  document.addEventListener("keydown", handleKey);
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    clearTimeout(startPage.resizeTimer);
    startPage.resizeTimer = setTimeout(() => { tiles.length = 0; $("grid").replaceChildren(); buildInputView(); buildMosaic(); drawAllViews(); paintMosaic(); }, 120);
  });
  document.documentElement.dataset.ready = Math.round(performance.now());
  await paintMosaic();
  document.documentElement.dataset.painted = Math.round(performance.now());
}

// Select the record's first patch, an index in one layer, in the selected layer.
function selectInitialPatch() {
  Object.assign(lastPatch, { layer: layers[record.image.of], node: record.image.first });
  if (selectedLayer().image) state.node = findSamePatch(selectedLayer(), lastPatch);
}

// The node whose number of neighbours is closest to 12, by ratio.
function pickInitialNode(layer) {
  const { start: begin } = sortEdgesByNode(layer, "in");
  let best = 0, score = -1;
  for (let n = 0; n < layer.queries; n++) {
    const degree = begin[n + 1] - begin[n], value = degree > 12 ? 12 / degree : degree / 12;
    if (value > score) { score = value; best = n; }
  }
  return best;
}

startPage();
