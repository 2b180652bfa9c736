// The record and its arrays. An array is decoded when it is first asked for.

const record = JSON.parse(document.getElementById("record").textContent);
const KINDS = { f4: Float32Array, f2: Uint16Array, u2: Uint16Array, u1: Uint8Array, u4: Uint32Array, i4: Int32Array };
const decoded = new Map();
let halves = null;

function fromHalf(bits) {
  const sign = bits & 0x8000 ? -1 : 1, power = (bits >> 10) & 31, rest = bits & 1023;
  if (power === 0) return sign * rest * 2 ** -24;
  return power === 31 ? (rest ? NaN : sign * Infinity) : sign * (1 + rest / 1024) * 2 ** (power - 15);
}

function widened(bits) {
  // a table of all 65,536 halves is quicker than the arithmetic
  halves ??= Float32Array.from({ length: 65536 }, (_, i) => fromHalf(i));
  const wide = new Float32Array(bits.length);
  for (let i = 0; i < bits.length; i++) wide[i] = halves[bits[i]];
  return wide;
}

async function decode(ref) {
  const text = atob(document.getElementById(`blob-${ref.blob}`).textContent);
  const bytes = new Uint8Array(text.length);
  for (let i = 0; i < text.length; i++) bytes[i] = text.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const data = new KINDS[ref.kind](await new Response(stream).arrayBuffer());
  return ref.kind === "f2" ? widened(data) : data;
}

function array(ref) {
  if (!decoded.has(ref.blob)) decoded.set(ref.blob, decode(ref));
  return decoded.get(ref.blob);
}

// Up to so many numbers the weights of a head are computed whole when it is chosen.
const MATRIX = 1 << 20;

class Layer {
  constructor(given) {
    Object.assign(this, given);
    this.got = {};
    this.heard = new Map();
    this.whole = "weights" in this.arrays && this.kind !== "graph";
    // what is drawn of it: a matrix, a neighbourhood, or an overlay on the image
    this.drawn = this.image ? "image" : this.kind === "graph" ? "graph" : "matrix";
  }

  label(place) { return `L${this.number}H${this.heads[place]}`; }

  // What the mosaic needs of all heads at once.
  async maps() {
    const names = this.whole || this.drawn !== "matrix" ? Object.keys(this.arrays) : ["moved", "weight map", "share map"];
    await Promise.all(names.filter((name) => this.arrays[name]).map(async (name) => { this.got[name] = await array(this.arrays[name]); }));
  }

  // What is known of one head: "whole" (its weights), "exact" (q, k and lse), or "averaged" (a map and the strongest pairs).
  known(place) {
    return this.whole || this.image ? "whole" : this.exact[this.heads[place]]?.q ? "exact" : "averaged";
  }

  async hear(place) {
    await this.maps();
    if (this.arrays.reach) this.got.reach ??= await array(this.arrays.reach);
    if (this.heard.has(place)) return;
    const refs = this.exact[this.heads[place]] ?? {};
    const head = {};
    for (const [name, ref] of Object.entries(refs)) {
      head[name] = await array(ref);
      head.dim = name === "q" ? ref.shape[1] : head.dim;
      // the widened copy is kept here; the decoded one would be a second
      decoded.delete(ref.blob);
    }
    this.heard.set(place, head);
    // of a long text only some heads stay in memory
    if (this.heard.size > 24) this.heard.delete(this.heard.keys().next().value);
  }

  moved(place, j) { return this.got.moved[place * this.keys + j]; }

  // The score of a pair, where it is a dot product.
  dot(place, i, j) {
    const { q, k, dim } = this.heard.get(place);
    let sum = 0;
    for (let d = 0; d < dim; d++) sum += q[i * dim + d] * k[j * dim + d];
    return sum;
  }

  // The weights of query i on the keys [from, to), into `out`.
  stretch(place, i, from, to, out) {
    out.fill(0);
    if (this.whole) {
      const begin = (place * this.queries + i) * this.keys;
      out.set(this.got.weights.subarray(begin + from, begin + to));
      return out;
    }
    if (this.image) {
      for (let j = from; j < to; j++) out[j - from] = this.seen(place, i, j);
      return out;
    }
    const head = this.heard.get(place);
    if (head?.q) {
      const { q, k, lse, dim } = head, at = i * dim;
      const first = Math.max(from, this.got.reach[i]), stop = Math.min(to, this.got.reach[this.queries + i]);
      for (let j = first; j < stop; j++) {
        let sum = 0;
        for (let d = 0, b = j * dim; d < dim; d++) sum += q[at + d] * k[b + d];
        out[j - from] = Math.min(1, Math.exp(sum * this.scale - lse[i]));
      }
    } else if (head?.top) {
      const number = head.top.length / this.queries;
      for (let n = i * number; n < (i + 1) * number; n++) {
        const j = head.keys[n] - from;
        if (j >= 0 && j < to - from) out[j] = head.top[n];
      }
    }
    return out;
  }

  // On an image: the weight of a pair. A byte is 255 times its square root.
  seen(place, i, j) {
    const all = this.got.seen, w = all[(place * this.queries + i) * this.keys + j];
    return all instanceof Uint8Array ? (w / 255) ** 2 : w;
  }

  // All of one query: its weights, or their shares of what the head moves.
  row(place, i, measure) {
    const row = this.stretch(place, i, 0, this.keys, new Float32Array(this.keys));
    if (measure === "share") this.shared(place, row, 0, this.total(place, row));
    return row;
  }

  total(place, row) {
    let total = 0;
    for (let j = 0; j < row.length; j++) total += row[j] * this.moved(place, j);
    return total;
  }

  shared(place, row, from, total) {
    for (let j = 0; j < row.length; j++) row[j] *= total > 0 ? this.moved(place, from + j) / total : 0;
  }

  // queries x keys, where they are few enough; else null.
  matrix(place, measure) {
    if (this.known(place) === "averaged" || this.queries * this.keys > MATRIX) return null;
    const all = new Float32Array(this.queries * this.keys);
    for (let i = 0; i < this.queries; i++) all.set(this.row(place, i, measure), i * this.keys);
    return all;
  }

  // The averaged map: a cell is the share of its queries' attention that falls on all its keys together.
  map(place, measure) {
    const [, height, width] = this.arrays[`${measure} map`].shape;
    const bytes = this.got[`${measure} map`], data = new Float32Array(height * width);
    for (let n = 0; n < data.length; n++) data[n] = (bytes[place * data.length + n] / 255) ** 2;
    return { data, height, width };
  }
}

const layers = record.layers.map((layer) => new Layer(layer));
const cardsOf = (layer, place) => record.cards.filter((card) => card.layer === layer.number && card.head === layer.heads[place]);
