// Graphs: the neighbourhood of one node, for each head, with the weights of its edges.

// More neighbours than this cannot be told apart on a circle.
const AROUND = 24;

const nodeName = (of, side, i) => (of[side] === null ? `${i}` : record.texts[of[side]].pieces[i]);

// The edges of a node, found once a layer: where they begin in a list sorted by node.
function sorted(of, direction) {
  of.sides ??= {};
  if (of.sides[direction]) return of.sides[direction];
  const edges = of.got.edges, number = edges.length / 2, nodes = direction === "in" ? of.queries : of.keys;
  const end = direction === "in" ? number : 0, start = new Uint32Array(nodes + 1), order = new Uint32Array(number);
  for (let e = 0; e < number; e++) start[edges[end + e] + 1]++;
  for (let n = 0; n < nodes; n++) start[n + 1] += start[n];
  const fill = start.slice();
  for (let e = 0; e < number; e++) order[fill[edges[end + e]]++] = e;
  return (of.sides[direction] = { start, order });
}

function edgeValue(of, place, e) {
  const number = of.got.edges.length / 2, w = of.got.weights[place * number + e];
  return state.measure === "weight" ? w : w * of.moved(place, of.got.edges[e]);
}

// Edges of the node: who is at the other end, and with what weight in a head. Contributions are shares of what reaches a node.
function around(of, place, node = state.node, direction = state.direction) {
  const { start, order } = sorted(of, direction), number = of.got.edges.length / 2;
  const list = [];
  for (let n = start[node]; n < start[node + 1]; n++) {
    const e = order[n];
    list.push({ e, other: of.got.edges[direction === "in" ? e : number + e], w: edgeValue(of, place, e) });
  }
  if (state.measure === "share") for (const one of list) { const total = reaching(of, place, direction === "in" ? node : one.other); one.w = total > 0 ? one.w / total : 0; }
  return list;
}

function reaching(of, place, node) {
  const { start, order } = sorted(of, "in");
  let total = 0;
  for (let n = start[node]; n < start[node + 1]; n++) total += edgeValue(of, place, order[n]);
  return total;
}

// The neighbours that are drawn stand at the same places in every head: those that are strong in any, by number.
function places(of) {
  const key = `${of.number},${state.node},${state.direction},${state.measure}`;
  if (places.key === key) return places.kept;
  const strength = new Map();
  for (let place = 0; place < of.heads.length; place++) for (const { other, w } of around(of, place)) strength.set(other, Math.max(strength.get(other) ?? 0, Math.abs(w)));
  const kept = [...strength].sort((a, b) => b[1] - a[1]).slice(0, AROUND).map(([other]) => other).sort((a, b) => a - b);
  places.key = key;
  return (places.kept = { kept, all: strength.size });
}

function geometry(of, size, margin) {
  const { kept } = places(of), others = kept.filter((other) => other !== state.node || of.queries !== of.keys);
  const centre = size / 2, radius = size / 2 - margin, at = new Map();
  others.forEach((other, n) => {
    const angle = (2 * Math.PI * n) / others.length - Math.PI / 2 + (others.length === 2 ? Math.PI / 2 : 0);
    at.set(other, [centre + radius * Math.cos(angle), centre + radius * Math.sin(angle)]);
  });
  return { centre, at };
}

// The small drawing of a head in the mosaic.
function drawStar(pen, of, place, size) {
  const { centre, at } = geometry(of, size, Math.max(3, size * 0.12));
  for (const { other, w } of around(of, place).sort((a, b) => a.w - b.w)) {
    pen.strokeStyle = pen.fillStyle = colour(Math.max(0.03, Math.abs(w)));
    pen.lineWidth = 0.6 + (size / 14) * Math.abs(w);
    const to = at.get(other);
    if (to) { pen.beginPath(); pen.moveTo(centre, centre); pen.lineTo(...to); pen.stroke(); pen.beginPath(); pen.arc(...to, Math.max(1.2, size / 26), 0, 7); pen.fill(); }
    else if (other === state.node) { pen.beginPath(); pen.arc(centre, centre - size * 0.09, size * 0.09, 0, 7); pen.stroke(); }
  }
  pen.fillStyle = style("--accent");
  pen.beginPath(); pen.arc(centre, centre, Math.max(1.8, size / 18), 0, 7); pen.fill();
}

// The chosen head's neighbourhood, large, with names.
function drawNeighbourhood() {
  const of = layer();
  if (of.kind !== "graph") return;
  const side = state.direction === "in" ? "columns" : "rows", mine = state.direction === "in" ? "rows" : "columns";
  const width = Math.min($("plot").clientWidth, 520), size = Math.max(280, Math.min(width, innerHeight - 230)), { centre, at } = geometry(of, size, 60);
  const drawing = svg("svg", { viewBox: `0 0 ${size} ${size}`, width: size, height: size, class: "neighbourhood", role: "img", "aria-label": `Neighbours of ${nodeName(of, mine, state.node)} in ${headName()}` });
  const over = [];
  for (const { other, w } of around(of, state.head).sort((a, b) => a.w - b.w)) {
    const name = nodeName(of, side, other), to = at.get(other), strength = Math.abs(w);
    const events = (node) => {
      node.addEventListener("pointermove", (event) => tip(event, ...(state.direction === "in" ? [token(nodeName(of, mine, state.node)), " looks at ", token(name)] : [token(name), " looks at ", token(nodeName(of, mine, state.node))]), ": ", el("b", {}, number(w, 3))));
      node.addEventListener("pointerleave", (event) => tip(event));
      return node;
    };
    if (!to) {
      if (other === state.node) drawing.append(events(svg("circle", { cx: centre, cy: centre - 26, r: 20, fill: "none", stroke: colour(Math.max(0.04, strength)), "stroke-width": 1 + 9 * strength, class: "edge", "data-other": other })));
      continue;
    }
    const [x, y] = to;
    drawing.append(events(svg("line", { x1: centre, y1: centre, x2: x, y2: y, stroke: colour(Math.max(0.04, strength)), "stroke-width": 1 + 11 * strength, "stroke-linecap": "round", class: "edge", "data-other": other, "data-weight": w })));
    const away = Math.abs(x - centre) < size * 0.14 ? "middle" : x > centre ? "start" : "end";
    const dx = away === "middle" ? 0 : x > centre ? 11 : -11, dy = away === "middle" ? (y > centre ? 20 : -13) : 4;
    over.push(events(svg("circle", { cx: x, cy: y, r: 5 + 5 * strength, fill: colour(Math.max(0.1, strength)), class: "node", "data-node": other })));
    const label = svg("text", { x: x + dx, y: y + dy, "text-anchor": away, class: "node-name" }, clipped(shown(name), 12));
    if (strength >= 0.1) label.append(svg("tspan", { class: "node-number", x: x + dx, dy: away === "middle" && y < centre ? -15 : 14 }, brief(strength)));
    over.push(label);
  }
  over.push(svg("circle", { cx: centre, cy: centre, r: 9, class: "self" }), svg("text", { x: centre, y: centre + 27, "text-anchor": "middle", class: "node-name self-name" }, clipped(shown(nodeName(of, mine, state.node)), 18)));
  drawing.append(...over);
  drawing.addEventListener("click", (event) => { const node = event.target.dataset?.node; if (node !== undefined && of.queries === of.keys) set({ node: Number(node) }); });
  plot.box = null;
  $("plot").replaceChildren(drawing);
  const { kept, all } = places(of);
  $("map-name").replaceChildren(el("span", { class: "name" }, headName()), ` ${measureName()}`);
  $("map-hint").textContent = `${all > kept.length ? `The ${kept.length} strongest of ${all.toLocaleString("en")} neighbours` : `${all} neighbour${all === 1 ? "" : "s"}`}; a wide, strong line is a large ${measureName()}.`;
  $("readout").textContent = of.queries === of.keys ? "Click a neighbour to go there." : "";
}

const clipped = (text, most) => ([...text].length > most ? `${[...text].slice(0, most - 1).join("")}…` : text);

// In place of the sentence: choose a node.
function buildChooser(stage) {
  const of = layer(), mine = state.direction === "in" ? "rows" : "columns", nodes = mine === "rows" ? of.queries : of.keys;
  stage.className = "chooser";
  const input = el("input", { type: "search", id: "node", list: "nodes", placeholder: "a name or a number", "aria-label": "Node", value: nodeName(of, mine, state.node) });
  const names = Array.from({ length: Math.min(nodes, 400) }, (_, i) => el("option", { value: nodeName(of, mine, i) }));
  const go = () => { const found = findNode(of, mine, nodes, input.value); input.classList.toggle("wrong", found === null); if (found !== null) set({ node: found }); };
  input.addEventListener("change", go);
  const move = (step) => set({ node: (state.node + step + nodes) % nodes });
  stage.replaceChildren(
    el("label", { for: "node" }, "Node"), el("button", { class: "icon", "aria-label": "the node before", on: { click: () => move(-1) } }, "‹"), input,
    el("button", { class: "icon", "aria-label": "the next node", on: { click: () => move(1) } }, "›"), el("datalist", { id: "nodes" }, names),
    el("div", { class: "choice", role: "radiogroup", "aria-label": "Direction", "data-key": "direction" },
      el("button", { role: "radio", value: "in" }, "looks at"), el("button", { role: "radio", value: "out" }, "is looked at by")),
    el("span", { class: "hint" }, `${of.queries.toLocaleString("en")} nodes, ${of.edges.toLocaleString("en")} edges`));
  choices();
  $("caption").replaceChildren(el("b", {}, headName()), ` ${cardsOf(of, state.head)[0]?.role ?? ""} `, el("span", { class: "hint" }, "The node in the middle shares its attention out among its neighbours, in each head in its own way."));
}

function findNode(of, side, nodes, text) {
  const wanted = text.trim().toLowerCase();
  let part = null;
  if (of[side] !== null) for (let i = 0; i < nodes; i++) {
    const name = nodeName(of, side, i).toLowerCase();
    if (name === wanted) return i;
    if (part === null && wanted && name.includes(wanted)) part = i;
  }
  const index = /^\d+$/.test(wanted) ? Number(wanted) : -1;
  return index >= 0 && index < nodes ? index : part;
}

// The strongest edges: of this node, and of the whole head.
function nodeParts(of, place) {
  const line = (from, to, w, go) => el("li", {}, el("button", { title: "Go there", on: { click: () => set({ node: go }) } }, token(clipped(from, 22)), " → ", token(clipped(to, 22))), el("b", {}, number(w, 3)));
  const mine = around(of, place).sort((a, b) => b.w - a.w).slice(0, 8), inward = state.direction === "in";
  const here = nodeName(of, inward ? "rows" : "columns", state.node);
  const list = mine.map(({ other, w }) => (inward ? line(here, nodeName(of, "columns", other), w, of.queries === of.keys ? other : state.node) : line(nodeName(of, "rows", other), here, w, of.queries === of.keys ? other : state.node)));
  const edges = of.got.edges, all = edges.length / 2, { start } = sorted(of, "in");
  // a node with one neighbour gives it everything: that says nothing
  const values = new Float32Array(all);
  for (let e = 0; e < all; e++) { const to = edges[all + e]; values[e] = start[to + 1] - start[to] > 1 && edges[e] !== to ? of.got.weights[place * all + e] : 0; }
  const best = strongest(values, 6).map(([e, w]) => line(nodeName(of, "rows", edges[all + e]), nodeName(of, "columns", edges[e]), w, inward ? edges[all + e] : edges[e]));
  return [el("h3", {}, "Its strongest edges"), list.length ? el("ol", { class: "edges" }, list) : el("p", { class: "norole" }, "This node has no edges here."),
    best.length ? el("h3", {}, "The head’s strongest edges, by weight") : null, best.length ? el("ol", { class: "edges" }, best) : null].filter(Boolean);
}

watch("layer head measure theme node direction", drawNeighbourhood);
watch("node direction", () => { if (layer().kind === "graph") buildSentence(); });
