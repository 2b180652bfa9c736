// Words and pieces: the items of the selected head, and the weights between them.

const itemAndHeadCache = new Map();

// The items of the rows or columns: pieces, or words and special tokens.
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
    const label = !text ? `${i}` : level === "word" && !special ? text.words[word] : text.pieces[i];
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

// The selected head: its items, and the weights between them, or null if the text is too long.
function selectedHeadData() {
  const layer = selectedLayer(), head = state.head;
  const key = ["now", layer.number, head, state.measure, state.level, state.hide].join();
  if (!itemAndHeadCache.has(key)) {
    for (const old of [...itemAndHeadCache.keys()].filter((name) => name.startsWith("now"))) itemAndHeadCache.delete(old);
    const foldable = canMergePieces(layer, head);
    const rows = listItems(layer, "rows", foldable ? state.level : "piece", foldable && state.hide);
    const cols = listItems(layer, "columns", foldable ? state.level : "piece", foldable && state.hide);
    const matrix = foldable ? layer.weightMatrix(head, state.measure) : null;
    itemAndHeadCache.set(key, { layer, head, rows, cols, data: matrix && mergePieceWeights(matrix, layer.keys, rows, cols) });
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

// The matrix of a head's tile: the weights between items if all are loaded, else the averaged map.
function tileMatrix(layer, head, measure = state.measure) {
  if (!layer.complete) return layer.averagedMap(head, measure);
  const rows = listItems(layer, "rows"), cols = listItems(layer, "columns");
  return { data: mergePieceWeights(layer.weightMatrix(head, measure), layer.keys, rows, cols), height: rows.length, width: cols.length };
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
