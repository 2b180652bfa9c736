// Graphs: the neighbourhood of one node in each head, with the weights of its edges.

// Maximum number of neighbours on the circle.
const MAX_NEIGHBOURS = 24;

const nodeName = (layer, side, i) => (layer[side] === null ? `${i}` : record.texts[layer[side]].pieces[i]);

// The edges sorted by node, once per layer: the first edge of each node, and the order of the edges.
function sortEdgesByNode(layer, direction) {
  layer.sides ??= {};
  if (layer.sides[direction]) return layer.sides[direction];
  const edges = layer.loaded.edges, count = edges.length / 2, nodes = direction === "in" ? layer.queries : layer.keys;
  const end = direction === "in" ? count : 0, start = new Uint32Array(nodes + 1), order = new Uint32Array(count);
  for (let e = 0; e < count; e++) start[edges[end + e] + 1]++;
  for (let n = 0; n < nodes; n++) start[n + 1] += start[n];
  const fill = start.slice();
  for (let e = 0; e < count; e++) order[fill[edges[end + e]]++] = e;
  return (layer.sides[direction] = { start, order });
}

function edgeValue(layer, head, e) {
  const count = layer.loaded.edges.length / 2, w = layer.loaded.weights[head * count + e];
  return state.measure === "weight" ? w : w * layer.valueNorm(head, layer.loaded.edges[e]);
}

// The edges of a node in a head: the other node and the weight. Contributions are shares of all that a node receives.
function edgesOfNode(layer, head, node = state.node, direction = state.direction) {
  const { start, order } = sortEdgesByNode(layer, direction), count = layer.loaded.edges.length / 2;
  const list = [];
  for (let n = start[node]; n < start[node + 1]; n++) {
    const e = order[n];
    list.push({ e, other: layer.loaded.edges[direction === "in" ? e : count + e], w: edgeValue(layer, head, e) });
  }
  if (state.measure === "share") for (const edge of list) { const total = incomingContributionTotal(layer, head, direction === "in" ? node : edge.other); edge.w = total > 0 ? edge.w / total : 0; }
  return list;
}

function incomingContributionTotal(layer, head, node) {
  const { start, order } = sortEdgesByNode(layer, "in");
  let total = 0;
  for (let n = start[node]; n < start[node + 1]; n++) total += edgeValue(layer, head, order[n]);
  return total;
}

// The neighbours to draw, by index: those with the largest weight in any head, so that all heads draw the same ones.
function selectNeighboursToDraw(layer) {
  const key = `${layer.number},${state.node},${state.direction},${state.measure}`;
  if (selectNeighboursToDraw.key === key) return selectNeighboursToDraw.result;
  const strength = new Map();
  for (let head = 0; head < layer.heads.length; head++) for (const { other, w } of edgesOfNode(layer, head)) strength.set(other, Math.max(strength.get(other) ?? 0, Math.abs(w)));
  const neighbours = [...strength].sort((a, b) => b[1] - a[1]).slice(0, MAX_NEIGHBOURS).map(([other]) => other).sort((a, b) => a - b);
  selectNeighboursToDraw.key = key;
  return (selectNeighboursToDraw.result = { neighbours, all: strength.size });
}

function layOutNeighbours(layer, size, margin) {
  const { neighbours } = selectNeighboursToDraw(layer), others = neighbours.filter((other) => other !== state.node || layer.queries !== layer.keys);
  const centre = size / 2, radius = size / 2 - margin, positions = new Map();
  others.forEach((other, n) => {
    const angle = (2 * Math.PI * n) / others.length - Math.PI / 2 + (others.length === 2 ? Math.PI / 2 : 0);
    positions.set(other, [centre + radius * Math.cos(angle), centre + radius * Math.sin(angle)]);
  });
  return { centre, positions };
}

// Draw the tile of a head in the mosaic.
function drawGraphTile(ctx, layer, head, size) {
  const { centre, positions } = layOutNeighbours(layer, size, Math.max(3, size * 0.12));
  for (const { other, w } of edgesOfNode(layer, head).sort((a, b) => a.w - b.w)) {
    ctx.strokeStyle = ctx.fillStyle = weightColour(Math.max(0.03, Math.abs(w)));
    ctx.lineWidth = 0.6 + (size / 14) * Math.abs(w);
    const position = positions.get(other);
    if (position) { ctx.beginPath(); ctx.moveTo(centre, centre); ctx.lineTo(...position); ctx.stroke(); ctx.beginPath(); ctx.arc(...position, Math.max(1.2, size / 26), 0, 7); ctx.fill(); }
    else if (other === state.node) { ctx.beginPath(); ctx.arc(centre, centre - size * 0.09, size * 0.09, 0, 7); ctx.stroke(); }
  }
  ctx.fillStyle = themeColour("--accent");
  ctx.beginPath(); ctx.arc(centre, centre, Math.max(1.8, size / 18), 0, 7); ctx.fill();
}

// Draw the neighbourhood in the selected head, large, with names.
function drawNeighbourhood() {
  const layer = selectedLayer();
  if (layer.kind !== "graph") return;
  const otherSide = state.direction === "in" ? "columns" : "rows", ownSide = state.direction === "in" ? "rows" : "columns";
  const width = Math.min($("plot").clientWidth, 520), size = Math.max(280, Math.min(width, innerHeight - 230)), { centre, positions } = layOutNeighbours(layer, size, 60);
  const drawing = svgElement("svg", { viewBox: `0 0 ${size} ${size}`, width: size, height: size, class: "neighbourhood", role: "img", "aria-label": `Neighbours of ${nodeName(layer, ownSide, state.node)} in ${selectedHeadName()}` });
  const foreground = [];
  for (const { other, w } of edgesOfNode(layer, state.head).sort((a, b) => a.w - b.w)) {
    const name = nodeName(layer, otherSide, other), position = positions.get(other), strength = Math.abs(w);
    const addTooltip = (node) => {
      node.addEventListener("pointermove", (event) => showTooltip(event, ...(state.direction === "in" ? [tokenElement(nodeName(layer, ownSide, state.node)), " attends to ", tokenElement(name)] : [tokenElement(name), " attends to ", tokenElement(nodeName(layer, ownSide, state.node))]), ": ", htmlElement("b", {}, formatNumber(w, 3))));
      node.addEventListener("pointerleave", (event) => showTooltip(event));
      return node;
    };
    if (!position) {
      if (other === state.node) drawing.append(addTooltip(svgElement("circle", { cx: centre, cy: centre - 26, r: 20, fill: "none", stroke: weightColour(Math.max(0.04, strength)), "stroke-width": 1 + 9 * strength, class: "edge", "data-other": other })));
      continue;
    }
    const [x, y] = position;
    drawing.append(addTooltip(svgElement("line", { x1: centre, y1: centre, x2: x, y2: y, stroke: weightColour(Math.max(0.04, strength)), "stroke-width": 1 + 11 * strength, "stroke-linecap": "round", class: "edge", "data-other": other, "data-weight": w })));
    // an arrowhead in the middle of the line points to the destination
    const sign = state.direction === "in" ? -1 : 1, length = Math.hypot(x - centre, y - centre) || 1, tip = 6 + 6 * strength;
    const [ux, uy] = [(sign * (x - centre)) / length, (sign * (y - centre)) / length], [mx, my] = [(x + centre) / 2, (y + centre) / 2];
    drawing.append(svgElement("path", { d: `M${mx + ux * tip},${my + uy * tip}L${mx - ux * tip - uy * tip},${my - uy * tip + ux * tip}L${mx - ux * tip + uy * tip},${my - uy * tip - ux * tip}Z`, fill: weightColour(Math.max(0.1, strength)), class: "arrow", "data-source": state.direction === "in" ? other : state.node, "data-destination": state.direction === "in" ? state.node : other }));
    const anchor = Math.abs(x - centre) < size * 0.14 ? "middle" : x > centre ? "start" : "end";
    const dx = anchor === "middle" ? 0 : x > centre ? 11 : -11, dy = anchor === "middle" ? (y > centre ? 20 : -13) : 4;
    foreground.push(addTooltip(svgElement("circle", { cx: x, cy: y, r: 5 + 5 * strength, fill: weightColour(Math.max(0.1, strength)), class: "node", "data-node": other })));
    const label = svgElement("text", { x: x + dx, y: y + dy, "text-anchor": anchor, class: "node-name" }, truncateText(makeWhitespaceVisible(name), 12));
    if (strength >= 0.1) label.append(svgElement("tspan", { class: "node-number", x: x + dx, dy: anchor === "middle" && y < centre ? -15 : 14 }, formatWeightShort(strength)));
    foreground.push(label);
  }
  foreground.push(svgElement("circle", { cx: centre, cy: centre, r: 9, class: "self" }), svgElement("text", { x: centre, y: centre + 27, "text-anchor": "middle", class: "node-name self-name" }, truncateText(makeWhitespaceVisible(nodeName(layer, ownSide, state.node)), 18)));
  drawing.append(...foreground);
  drawing.addEventListener("click", (event) => { const node = event.target.dataset?.node; if (node !== undefined && layer.queries === layer.keys) setState({ node: Number(node) }); });
  plot.canvas = null;
  $("plot").replaceChildren(drawing);
  const { neighbours, all } = selectNeighboursToDraw(layer);
  $("map-name").replaceChildren(htmlElement("span", { class: "name" }, selectedHeadName()), ` ${measureName()}`);
  $("map-hint").textContent = `${all > neighbours.length ? `The ${neighbours.length} strongest of ${all.toLocaleString("en")} neighbours` : `${all} neighbour${all === 1 ? "" : "s"}`}; the width and colour of a line show its ${measureName()}, and its arrow points from the source to the destination, which attends to the source.`;
  $("readout").textContent = layer.queries === layer.keys ? "Click a neighbour to select it." : "";
}

const truncateText = (text, limit) => ([...text].length > limit ? `${[...text].slice(0, limit - 1).join("")}…` : text);

// Build the node chooser, in place of the text.
function buildNodeChooser(stage) {
  const layer = selectedLayer(), side = state.direction === "in" ? "rows" : "columns", nodes = side === "rows" ? layer.queries : layer.keys;
  stage.className = "chooser";
  const input = htmlElement("input", { type: "search", id: "node", list: "nodes", placeholder: "name or index", "aria-label": "Node", value: nodeName(layer, side, state.node) });
  const names = Array.from({ length: Math.min(nodes, 400) }, (_, i) => htmlElement("option", { value: nodeName(layer, side, i) }));
  const selectTypedNode = () => { const found = findNode(layer, side, nodes, input.value); input.classList.toggle("wrong", found === null); if (found !== null) setState({ node: found }); };
  input.addEventListener("change", selectTypedNode);
  const stepNode = (step) => setState({ node: (state.node + step + nodes) % nodes });
  stage.replaceChildren(
    htmlElement("label", { for: "node" }, "Node"), htmlElement("button", { class: "icon", "aria-label": "Previous node", on: { click: () => stepNode(-1) } }, "‹"), input,
    htmlElement("button", { class: "icon", "aria-label": "Next node", on: { click: () => stepNode(1) } }, "›"), htmlElement("datalist", { id: "nodes" }, names),
    htmlElement("div", { class: "choice", role: "radiogroup", "aria-label": "Direction", "data-key": "direction" },
      htmlElement("button", { role: "radio", value: "in" }, "attends to"), htmlElement("button", { role: "radio", value: "out" }, "is attended to by")),
    htmlElement("span", { class: "hint" }, `${layer.queries.toLocaleString("en")} nodes, ${layer.edges.toLocaleString("en")} edges`));
  updateButtonGroups();
  $("caption").replaceChildren(htmlElement("b", {}, selectedHeadName()), ` ${cardsOfHead(layer, state.head)[0]?.role ?? ""} `, htmlElement("span", { class: "hint" }, "The node in the centre distributes its attention over its neighbours, differently in each head."));
}

function findNode(layer, side, nodes, text) {
  const query = text.trim().toLowerCase();
  let partialMatch = null;
  if (layer[side] !== null) for (let i = 0; i < nodes; i++) {
    const name = nodeName(layer, side, i).toLowerCase();
    if (name === query) return i;
    if (partialMatch === null && query && name.includes(query)) partialMatch = i;
  }
  const index = /^\d+$/.test(query) ? Number(query) : -1;
  return index >= 0 && index < nodes ? index : partialMatch;
}

// Lists of the strongest edges: of this node, and of the whole head.
function buildEdgeLists(layer, head) {
  // source → destination, as in an edge list: the destination attends to the source
  const buildEdgeLine = (source, destination, w, target) => htmlElement("li", {}, htmlElement("button", { title: "Select this node", on: { click: () => setState({ node: target }) } }, tokenElement(truncateText(source, 22)), " → ", tokenElement(truncateText(destination, 22))), htmlElement("b", {}, formatNumber(w, 3)));
  const ownEdges = edgesOfNode(layer, head).sort((a, b) => b.w - a.w).slice(0, 8), incoming = state.direction === "in";
  const ownName = nodeName(layer, incoming ? "rows" : "columns", state.node);
  const list = ownEdges.map(({ other, w }) => (incoming ? buildEdgeLine(nodeName(layer, "columns", other), ownName, w, layer.queries === layer.keys ? other : state.node) : buildEdgeLine(ownName, nodeName(layer, "rows", other), w, layer.queries === layer.keys ? other : state.node)));
  const edges = layer.loaded.edges, all = edges.length / 2, { start } = sortEdgesByNode(layer, "in");
  // the only edge of a node always has weight 1: it is not informative
  const values = new Float32Array(all);
  for (let e = 0; e < all; e++) { const to = edges[all + e]; values[e] = start[to + 1] - start[to] > 1 && edges[e] !== to ? layer.loaded.weights[head * all + e] : 0; }
  const best = largestEntries(values, 6).map(([e, w]) => buildEdgeLine(nodeName(layer, "columns", edges[e]), nodeName(layer, "rows", edges[all + e]), w, incoming ? edges[all + e] : edges[e]));
  const convention = htmlElement("p", { class: "hint" }, "Source → destination: the destination attends to the source.");
  return [htmlElement("h3", {}, "Strongest edges of the node"), convention, list.length ? htmlElement("ol", { class: "edges" }, list) : htmlElement("p", { class: "norole" }, "This node has no edges in this direction."),
    best.length ? htmlElement("h3", {}, "Strongest edges of the head, by weight") : null, best.length ? htmlElement("ol", { class: "edges" }, best) : null].filter(Boolean);
}

watch("layer head measure theme node direction", drawNeighbourhood);
watch("node direction", () => { if (selectedLayer().kind === "graph") buildInputView(); });
