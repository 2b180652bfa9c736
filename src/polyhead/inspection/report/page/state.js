// What is chosen and pointed at; whoever draws watches the parts that it depends on.

const state = {
  layer: layers.findIndex((layer) => layer.number === record.star[0]), head: 0,
  measure: "weight", level: "word", hide: false, paint: "weight",
  roles: new Set(), search: "",
  // {row, col}: items pointed at in the chosen layer, either may be null
  hover: null, lock: null,
  // {row, col}: the pair that is explained
  cell: null,
  // on a graph or an image: the node or patch looked at, and whether by whom it looks at or who looks at it
  node: 0, direction: "in",
  theme: 0,
};
state.head = layers[state.layer].heads.indexOf(record.star[1]);

const watchers = [];
const changed = new Set();

function watch(keys, run) { watchers.push({ keys: keys.split(" "), run }); }

function set(changes) {
  const planned = changed.size > 0;
  for (const [key, value] of Object.entries(changes)) {
    if (state[key] !== value) { state[key] = value; changed.add(key); }
  }
  if (changed.size && !planned) queueMicrotask(flush);
}

function flush() {
  const keys = new Set(changed);
  changed.clear();
  for (const watcher of watchers) if (watcher.keys.some((key) => keys.has(key))) watcher.run(keys);
}

const layer = () => layers[state.layer];
const headName = () => layer().label(state.head);
const pointed = () => state.lock ?? state.hover;

let asked = 0;

// Choose a head: its arrays are decoded first.
async function choose(at, place) {
  const turn = ++asked;
  await layers[at].hear(place);
  if (turn !== asked) return;
  const moves = { layer: at, head: place };
  if (layers[at].image) moves.node = spotOf(layers[at]);
  else if (layers[at].kind === "graph" && state.node >= layers[at].queries) moves.node = 0;
  if (!alike(layers[at], layer()) || foldable(layers[at], place) !== foldable(layer(), state.head)) Object.assign(moves, { hover: null, lock: null, cell: null });
  set(moves);
}

// Whether two layers read the same text, so that what is pointed at stays the same.
const alike = (a, b) => a.kind === b.kind && a.rows === b.rows && a.columns === b.columns && a.queries === b.queries && a.keys === b.keys;
