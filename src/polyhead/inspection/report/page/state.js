// Observable page state: `watch(keys, run)` calls `run` after `setState` has changed one of the keys.

const state = {
  layer: layers.findIndex((layer) => layer.number === record.initial_head[0]), head: 0,
  measure: "weight", level: "word", hide: false, paint: "weight",
  roles: new Set(), search: "",
  // {row, col}: the items under the pointer in the selected layer, either may be null; a lock replaces them
  hover: null, lock: null,
  // {row, col}: the pair that is explained
  cell: null,
  // on a graph or an image: the selected node or patch, and whether its keys (in) or its queries (out) are shown
  node: 0, direction: "in",
  theme: 0,
};
state.head = layers[state.layer].heads.indexOf(record.initial_head[1]);

const watchers = [];
const changed = new Set();

function watch(keys, run) { watchers.push({ keys: keys.split(" "), run }); }

function setState(changes) {
  const scheduled = changed.size > 0;
  for (const [key, value] of Object.entries(changes)) {
    if (state[key] !== value) { state[key] = value; changed.add(key); }
  }
  if (changed.size && !scheduled) queueMicrotask(runChangedWatchers);
}

function runChangedWatchers() {
  const keys = new Set(changed);
  changed.clear();
  for (const watcher of watchers) if (watcher.keys.some((key) => keys.has(key))) watcher.run(keys);
}

const selectedLayer = () => layers[state.layer];
const selectedHeadName = () => selectedLayer().headLabel(state.head);
const highlightedItems = () => state.lock ?? state.hover;

let lastSelection = 0;

// Select a head, after its arrays are loaded.
async function selectHead(layerIndex, head) {
  const request = ++lastSelection;
  await layers[layerIndex].loadHeadArrays(head);
  if (request !== lastSelection) return;
  const changes = { layer: layerIndex, head: head };
  if (layers[layerIndex].image) changes.node = findSamePatch(layers[layerIndex]);
  else if (layers[layerIndex].kind === "graph" && state.node >= layers[layerIndex].queries) changes.node = 0;
  if (!haveSameItems(layers[layerIndex], selectedLayer()) || canMergePieces(layers[layerIndex], head) !== canMergePieces(selectedLayer(), state.head)) Object.assign(changes, { hover: null, lock: null, cell: null });
  setState(changes);
}

// Whether two layers have the same items, so that highlighted items remain valid.
const haveSameItems = (a, b) => a.kind === b.kind && a.rows === b.rows && a.columns === b.columns && a.queries === b.queries && a.keys === b.keys;
