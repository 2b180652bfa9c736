// Words and pieces: what the rows and columns of the chosen head are called, and its weights between them.

const memo = new Map();

// The items of a side: pieces, or words and the special tokens between them.
function items(of, side, level = state.level, hide = state.hide) {
  const key = [of[side], side === "rows" ? of.queries : of.keys, level, hide].join();
  if (!memo.has(key)) memo.set(key, grouped(of, side, level, hide));
  return memo.get(key);
}

function grouped(of, side, level, hide) {
  const number = side === "rows" ? of.queries : of.keys;
  const text = of[side] === null ? null : record.texts[of[side]];
  const list = [], words = new Map();
  for (let i = 0; i < number; i++) {
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

// Attention between items: the sum over a key's pieces, the mean over a query's (Clark 2019).
function folded(data, keys, rows, cols) {
  const out = new Float32Array(rows.length * cols.length);
  rows.forEach((row, i) => cols.forEach((col, j) => {
    let sum = 0;
    for (const a of row.pieces) for (const b of col.pieces) sum += data[a * keys + b];
    out[i * cols.length + j] = sum / row.pieces.length;
  }));
  return out;
}

// Words can be joined and tokens hidden wherever all weights of a head are at hand.
const foldable = (of, place) => of.drawn === "matrix" && (of.whole || (of.known(place) === "exact" && of.queries * of.keys <= MATRIX));

// The chosen head as it is shown: its items, and its matrix unless it is too long for one.
function current() {
  const of = layer(), place = state.head;
  const key = ["now", of.number, place, state.measure, state.level, state.hide].join();
  if (!memo.has(key)) {
    for (const old of [...memo.keys()].filter((name) => name.startsWith("now"))) memo.delete(old);
    const can = foldable(of, place);
    const rows = items(of, "rows", can ? state.level : "piece", can && state.hide);
    const cols = items(of, "columns", can ? state.level : "piece", can && state.hide);
    const all = can ? of.matrix(place, state.measure) : null;
    memo.set(key, { of, place, rows, cols, data: all && folded(all, of.keys, rows, cols) });
  }
  return memo.get(key);
}

// The weights of one item on all items of the chosen head.
function rowOf(now, i) {
  const { of, place, rows, cols, data } = now;
  if (data) return data.subarray(i * cols.length, (i + 1) * cols.length);
  return of.row(place, rows[i].pieces[0], state.measure);
}

// The weight of a pair, or null where only an average is known.
function valueOf(now, i, j) {
  if (now.data) return now.data[i * now.cols.length + j];
  if (now.of.known(now.place) === "exact") return rowOf(now, i)[j];
  const found = rowOf(now, i)[j];
  return found > 0 ? found : null;
}

// Any head's matrix for the mosaic: at the level shown where all weights are there, else its map.
function tile(of, place, measure = state.measure) {
  if (!of.whole) return of.map(place, measure);
  const rows = items(of, "rows"), cols = items(of, "columns");
  return { data: folded(of.matrix(place, measure), of.keys, rows, cols), height: rows.length, width: cols.length };
}

// The largest k of a row, strongest first.
function strongest(row, k, least = 0) {
  const best = [];
  for (let j = 0; j < row.length; j++) {
    const w = row[j];
    if (!(w > least) || (best.length === k && w <= best[k - 1][1])) continue;
    let at = best.length;
    while (at > 0 && best[at - 1][1] < w) at--;
    best.splice(at, 0, [j, w]);
    if (best.length > k) best.pop();
  }
  return best;
}
