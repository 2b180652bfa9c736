// The record and its arrays. An array is decoded on first use.

const record = JSON.parse(document.getElementById("record").textContent);
const ARRAY_TYPES = { f4: Float32Array, f2: Uint16Array, u2: Uint16Array, u1: Uint8Array, u4: Uint32Array, i4: Int32Array };
const arrayCache = new Map();
let halfPrecisionTable = null;

function halfToFloat(bits) {
  const sign = bits & 0x8000 ? -1 : 1, power = (bits >> 10) & 31, fraction = bits & 1023;
  if (power === 0) return sign * fraction * 2 ** -24;
  return power === 31 ? (fraction ? NaN : sign * Infinity) : sign * (1 + fraction / 1024) * 2 ** (power - 15);
}

function halvesToFloat32(bits) {
  // a table of all 65,536 half-precision numbers is faster than the arithmetic
  halfPrecisionTable ??= Float32Array.from({ length: 65536 }, (_, i) => halfToFloat(i));
  const wide = new Float32Array(bits.length);
  for (let i = 0; i < bits.length; i++) wide[i] = halfPrecisionTable[bits[i]];
  return wide;
}

async function decodeArray(ref) {
  const text = atob(document.getElementById(`blob-${ref.blob}`).textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const data = new ARRAY_TYPES[ref.kind](await new Response(stream).arrayBuffer());
  return ref.kind === "f2" ? halvesToFloat32(data) : data;
}

function loadArray(ref) {
  if (!arrayCache.has(ref.blob)) arrayCache.set(ref.blob, decodeArray(ref));
  return arrayCache.get(ref.blob);
}

// Maximum size of a weight matrix that is computed when a head is selected.
const MAX_MATRIX_SIZE = 1 << 20;

class Layer {
  constructor(fields) {
    Object.assign(this, fields);
    this.loaded = {};
    this.tensors = new Map();
    this.complete = "weights" in this.arrays && this.kind !== "graph";
    // how it is drawn: as a heat map, a neighbourhood, or an overlay on the image
    this.display = this.image ? "image" : this.kind === "graph" ? "graph" : "matrix";
  }

  headLabel(head) { return `L${this.number}H${this.heads[head]}`; }

  // Load the arrays that the mosaic needs, for all heads.
  async loadMosaicArrays() {
    const names = this.complete || this.display !== "matrix" ? Object.keys(this.arrays) : ["contribution_norms", "weight map", "share map", "reach"];
    await Promise.all(names.filter((name) => this.arrays[name]).map(async (name) => { this.loaded[name] = await loadArray(this.arrays[name]); }));
  }

  // The data of one head: "complete" (all weights), "exact" (q, k and lse), or "averaged" (a map and the strongest pairs).
  detailLevel(head) {
    return this.complete || this.image ? "complete" : this.exact[this.heads[head]]?.q ? "exact" : "averaged";
  }

  // Load the arrays of one head.
  async loadHeadArrays(head) {
    await this.loadMosaicArrays();
    if (this.tensors.has(head)) return;
    const refs = this.exact[this.heads[head]] ?? {};
    const tensors = {};
    for (const [name, ref] of Object.entries(refs)) {
      tensors[name] = await loadArray(ref);
      tensors.dim = name === "q" ? ref.shape[1] : tensors.dim;
      // `tensors` holds the array: drop it from the cache
      arrayCache.delete(ref.blob);
    }
    this.tensors.set(head, tensors);
    // of long texts only the last 24 heads stay in memory
    if (this.tensors.size > 24) this.tensors.delete(this.tensors.keys().next().value);
  }

  // Whether query i may attend to key j; true if this is not known.
  allows(head, i, j) {
    const { reach, scores } = this.loaded;
    if (reach) return j >= reach[i] && j < reach[this.queries + i];
    return !scores || scores[(head * this.queries + i) * this.keys + j] > -Infinity;
  }

  // Whether some pair is known not to be allowed.
  get hasMask() {
    const { reach, scores } = this.loaded, { queries, keys } = this;
    this.mask ??= reach ? reach.some((bound, n) => (n < queries ? bound > 0 : bound < keys)) : Boolean(scores?.some((score) => score === -Infinity));
    return this.mask;
  }

  // Whether some query may attend to the key `by` positions after its own.
  allowsOffset(head, by) {
    for (let i = 0, j = this.keys - this.queries + by; i < this.queries; i++, j++) if (j >= 0 && j < this.keys && this.allows(head, i, j)) return true;
    return false;
  }

  // The norm of what a weight of 1 on key j adds to the output.
  valueNorm(head, j) { return this.loaded.contribution_norms[head * this.keys + j]; }

  // The dot product of query i and key j, without the scale.
  dotProduct(head, i, j) {
    const { q, k, dim } = this.tensors.get(head);
    let sum = 0;
    for (let d = 0; d < dim; d++) sum += q[i * dim + d] * k[j * dim + d];
    return sum;
  }

  // Write the weights of query i on the keys [from, to) to `out`.
  fillWeights(head, i, from, to, out) {
    out.fill(0);
    if (this.complete) {
      const begin = (head * this.queries + i) * this.keys;
      out.set(this.loaded.weights.subarray(begin + from, begin + to));
      return out;
    }
    if (this.image) {
      for (let j = from; j < to; j++) out[j - from] = this.imageWeight(head, i, j);
      return out;
    }
    const tensors = this.tensors.get(head);
    if (tensors?.q) {
      const { q, k, lse, dim } = tensors, at = i * dim;
      const first = Math.max(from, this.loaded.reach[i]), stop = Math.min(to, this.loaded.reach[this.queries + i]);
      for (let j = first; j < stop; j++) {
        let sum = 0;
        for (let d = 0, b = j * dim; d < dim; d++) sum += q[at + d] * k[b + d];
        out[j - from] = Math.min(1, Math.exp(sum * this.scale - lse[i]));
      }
    } else if (tensors?.top) {
      const count = tensors.top.length / this.queries;
      for (let n = i * count; n < (i + 1) * count; n++) {
        const j = tensors.keys[n] - from;
        if (j >= 0 && j < to - from) out[j] = tensors.top[n];
      }
    }
    return out;
  }

  // The weight of a pair on an image. Bytes store 255 times the square root.
  imageWeight(head, i, j) {
    const all = this.loaded.seen, w = all[(head * this.queries + i) * this.keys + j];
    return all instanceof Uint8Array ? (w / 255) ** 2 : w;
  }

  // The weights of one query on all keys, or their shares of its contribution.
  weightRow(head, i, measure) {
    const row = this.fillWeights(head, i, 0, this.keys, new Float32Array(this.keys));
    if (measure === "share") this.scaleToShares(head, row, 0, this.contributionTotal(head, row));
    return row;
  }

  contributionTotal(head, row) {
    let total = 0;
    for (let j = 0; j < row.length; j++) total += row[j] * this.valueNorm(head, j);
    return total;
  }

  scaleToShares(head, row, from, total) {
    for (let j = 0; j < row.length; j++) row[j] *= total > 0 ? this.valueNorm(head, from + j) / total : 0;
  }

  // The weights (queries x keys); null if they are too many or only averages are known.
  weightMatrix(head, measure) {
    if (this.detailLevel(head) === "averaged" || this.queries * this.keys > MAX_MATRIX_SIZE) return null;
    const all = new Float32Array(this.queries * this.keys);
    for (let i = 0; i < this.queries; i++) all.set(this.weightRow(head, i, measure), i * this.keys);
    return all;
  }

  // The averaged map: a cell is the mean over its queries of the attention summed over its keys.
  averagedMap(head, measure) {
    const [, height, width] = this.arrays[`${measure} map`].shape;
    const bytes = this.loaded[`${measure} map`], data = new Float32Array(height * width);
    for (let n = 0; n < data.length; n++) data[n] = (bytes[head * data.length + n] / 255) ** 2;
    const allowed = this.allowedMapCells(height, width);
    if (allowed) for (let n = 0; n < data.length; n++) if (!allowed[n]) data[n] = NaN;
    return { data, height, width };
  }

  // For each cell of a map whether it has an allowed pair; null if all have.
  allowedMapCells(height, width) {
    if (!this.hasMask || !this.loaded.reach) return null;
    if (this.mapCells?.length === height * width) return this.mapCells;
    const { queries, keys, loaded: { reach } } = this, cells = new Uint8Array(height * width);
    for (let i = 0; i < queries; i++) {
      const at = Math.floor((i * height) / queries) * width, first = reach[i], stop = reach[queries + i];
      if (stop > first) cells.fill(1, at + Math.floor((first * width) / keys), at + Math.floor(((stop - 1) * width) / keys) + 1);
    }
    return (this.mapCells = cells);
  }
}

const layers = record.layers.map((layer) => new Layer(layer));

// Whether a map has many more columns than rows, as in speech recognition: it needs the width of the page.
const isWideLayer = (layer) => (layer.image ? record.image.width >= 2 * record.image.height : layer.display === "matrix" && layer.keys > 48 && layer.keys >= 3 * layer.queries);
const cardsOfHead = (layer, head) => record.cards.filter((card) => card.layer === layer.number && card.head === layer.heads[head]);
