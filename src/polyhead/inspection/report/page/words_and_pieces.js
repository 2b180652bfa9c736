// Words and pieces: the items of the selected head, and the weights between them.

const itemAndHeadCache = new Map();

// The items of the rows or columns. `level` is "word" (words and special tokens), "piece" (as in the vocabulary), or "plain" (pieces as
// plain text, where words are wanted but cannot be merged).
function listItems(layer, side, level = state.level, hide = state.hide) {
  const key = [layer[side], side === "rows" ? layer.queries : layer.keys, level, hide].join();
  if (!itemAndHeadCache.has(key)) itemAndHeadCache.set(key, groupPiecesIntoItems(layer, side, level, hide));
  return itemAndHeadCache.get(key);
}

function groupPiecesIntoItems(layer, side, level, hide) {
  const count = side === "rows" ? layer.queries : layer.keys;
  const text = layer[side] === null ? null : record.texts[layer[side]];
  const list = [], words = new Map();
  for (let i = 0; i < count; i++) {
    const word = text ? text.word_of[i] : i;
    const special = word === null;
    if (special && hide) continue;
    if (level === "word" && !special && words.has(word)) { words.get(word).pieces.push(i); continue; }
    const label = !text ? `${i}` : level === "piece" ? text.pieces[i] : level === "word" && !special && text.words[word] !== text.pieces[i] ? text.words[word] : (text.labels ?? text.pieces)[i];
    const item = { label, special, pieces: [i], word };
    if (!special) words.set(word, item);
    list.push(item);
  }
  return list;
}

// Attention between items: the sum over the pieces of a key, the mean over the pieces of a query (Clark 2019).
function mergePieceWeights(data, keys, rows, cols) {
  const out = new Float32Array(rows.length * cols.length);
  rows.forEach((row, i) => cols.forEach((col, j) => {
    let sum = 0;
    for (const a of row.pieces) for (const b of col.pieces) sum += data[a * keys + b];
    out[i * cols.length + j] = sum / row.pieces.length;
  }));
  return out;
}

// Whether words can be merged and tokens hidden: this needs all weights of the head.
const canMergePieces = (layer, head) => layer.display === "matrix" && (layer.complete || (layer.detailLevel(head) === "exact" && layer.queries * layer.keys <= MAX_MATRIX_SIZE));

// The level at which a head's items can be shown.
const itemLevel = (layer, head, level = state.level) => (canMergePieces(layer, head) ? level : pieceLevel(level));
// The level of pieces beside items of a level: plain text beside words.
const pieceLevel = (level = state.level) => (level === "word" ? "plain" : "piece");

// For each pair of items 1 if no piece of the row may attend to any piece of the column; null if all pairs are allowed.
function disallowedPairs(layer, head, rows, cols) {
  if (!layer.hasMask) return null;
  const mask = new Uint8Array(rows.length * cols.length), { reach } = layer.loaded;
  rows.forEach((row, i) => {
    // the pieces of an item are adjacent, so intervals of keys suffice
    const first = reach && Math.min(...row.pieces.map((a) => reach[a])), stop = reach && Math.max(...row.pieces.map((a) => reach[layer.queries + a]));
    for (let j = 0; j < cols.length; j++) {
      const { pieces } = cols[j], allowed = reach ? pieces[pieces.length - 1] >= first && pieces[0] < stop : row.pieces.some((a) => pieces.some((b) => layer.allows(head, a, b)));
      mask[i * cols.length + j] = allowed ? 0 : 1;
    }
  });
  return mask;
}

// Replace the weights of pairs that are not allowed by NaN, which is drawn as not allowed.
function markDisallowed(data, mask) {
  if (mask) for (let n = 0; n < data.length; n++) if (mask[n]) data[n] = NaN;
  return data;
}

// The selected head: its items, and the weights between them, or null if the text is too long.
function selectedHeadData() {
  const layer = selectedLayer(), head = state.head;
  const key = ["now", layer.number, head, state.measure, state.level, state.hide].join();
  if (!itemAndHeadCache.has(key)) {
    for (const old of [...itemAndHeadCache.keys()].filter((name) => name.startsWith("now"))) itemAndHeadCache.delete(old);
    const foldable = canMergePieces(layer, head);
    const rows = listItems(layer, "rows", itemLevel(layer, head), foldable && state.hide);
    const cols = listItems(layer, "columns", itemLevel(layer, head), foldable && state.hide);
    const matrix = foldable ? layer.weightMatrix(head, state.measure) : null;
    const disallowed = foldable ? disallowedPairs(layer, head, rows, cols) : null;
    itemAndHeadCache.set(key, { layer, head, rows, cols, disallowed, data: matrix && mergePieceWeights(matrix, layer.keys, rows, cols) });
  }
  return itemAndHeadCache.get(key);
}

// The weights of one item on all items of the selected head.
function weightsOfRow(current, i) {
  const { layer, head, rows, cols, data } = current;
  if (data) return data.subarray(i * cols.length, (i + 1) * cols.length);
  return layer.weightRow(head, rows[i].pieces[0], state.measure);
}

// The weight of a pair; null if only an average is known.
function weightOfPair(current, i, j) {
  if (current.data) return current.data[i * current.cols.length + j];
  if (current.layer.detailLevel(current.head) === "exact") return weightsOfRow(current, i)[j];
  const weight = weightsOfRow(current, i)[j];
  return weight > 0 ? weight : null;
}

// Whether a pair of items of the selected head is allowed.
const isAllowed = ({ layer, head, rows, cols, disallowed }, i, j) => (disallowed ? !disallowed[i * cols.length + j] : layer.allows(head, rows[i].pieces[0], cols[j].pieces[0]));

// Why a pair of items that is not allowed is not.
function describeDisallowed({ layer, rows, cols }, i, j) {
  const isAfter = cols[j].pieces[0] - (layer.keys - layer.queries) > rows[i].pieces[0] && !layer.attention.startsWith("cross");
  return isAfter ? "after the query" : `not allowed by ${layer.over}`;
}

// The matrix of a head's tile: the weights between items if all are loaded, else the averaged map.
function matrixOfMosaicTile(layer, head, measure = state.measure) {
  if (!layer.complete) return layer.averagedMap(head, measure);
  const rows = listItems(layer, "rows"), cols = listItems(layer, "columns");
  return { data: markDisallowed(mergePieceWeights(layer.weightMatrix(head, measure), layer.keys, rows, cols), disallowedPairs(layer, head, rows, cols)), height: rows.length, width: cols.length };
}

// The k largest entries of a row above `threshold`, as [index, weight], largest first.
function largestEntries(row, k, threshold = 0) {
  const best = [];
  for (let j = 0; j < row.length; j++) {
    const w = row[j];
    if (!(w > threshold) || (best.length === k && w <= best[k - 1][1])) continue;
    let position = best.length;
    while (position > 0 && best[position - 1][1] < w) position--;
    best.splice(position, 0, [j, w]);
    if (best.length > k) best.pop();
  }
  return best;
}
