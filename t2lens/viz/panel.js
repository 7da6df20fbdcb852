// One model's half of the payload, with the look-ups that the drawing needs. One part of the module that maps.js describes.

// offsets of each read's columns in the flat values
const offsets = (columns) => columns.reduce((all, cols) => [...all, all[all.length - 1] + cols.length], [0]);
const SHARE = "an atom, with its share of the summed contribution norms";
// each contribution's share of the summed norms of its read; `wide`: positions in a row of values
function shares(norms, wide) {
  const values = Float32Array.from(norms.values);
  norms.columns.forEach((cols, r) => {
    for (let pos = 0; pos < wide; pos++) {
      const at = (k) => (norms.start[r] + k) * wide + pos;
      const sum = cols.reduce((total, _, k) => total + norms.values[at(k)], 0);
      cols.forEach((_, k) => (values[at(k)] = norms.values[at(k)] / sum));
    }
  });
  return { ...norms, values, what: SHARE };
}
// {mode: packed read} -> the same with values as numbers, and the shares
function openReads(packed, wide) {
  const reads = Object.fromEntries(
    Object.entries(packed).map(([mode, r]) => [mode, { ...r, start: offsets(r.columns), values: unpack(r.values) }]),
  );
  if (reads.contribution) reads.share = shares(reads.contribution, wide);
  return reads;
}

class Panel {
  constructor(data, i, answers, { lean = false, served }) {
    Object.assign(this, data);
    this.i = i;
    this.answers = answers;
    this.lean = Boolean(lean); // too long to be here whole
    this.served = served;
    this.T = data.tokens.length;
    this.row = new Map(data.rows.map((name, r) => [name, r]));
    this.ways = new Map(Object.entries(data.ways).map(([way, v]) => [way, { packed: v }]));
    this.sequence = Object.fromEntries(Object.entries(data.sequence).map(([site, v]) => [site, unpack(v)]));
    this.patterns = Object.fromEntries(Object.entries(data.patterns).map(([site, v]) => [site, unpack(v)]));
    this.most = Object.fromEntries(Object.entries(data.maxima || {}).map(([site, v]) => [site, unpack(v)])); // of any head
    this.head = "mean";
    this.use("");
  }
  // show the reads of one way (queries, keys, ...): the first where this model has no such way
  use(name) {
    const way = this.ways.get(name) || this.ways.values().next().value;
    this.way = this.ways.has(name) ? name : this.ways.keys().next().value;
    if (way.packed) {
      const { grids, missing, absent, reads, holds, lens } = way.packed;
      Object.assign(way, { packed: null, missing, absent, holds, lens, reads: openReads(reads, this.T) });
      way.grid = Object.fromEntries(Object.entries(grids).map(([k, v]) => [k, unpack(v)]));
    }
    const { grid, missing, absent, reads, holds, lens } = way;
    Object.assign(this, { grid, missing, absent, reads, holds, lens });
  }
  // take in a quantity that a lean payload left out
  fill({ way, quantity, values, missing }) {
    const name = this.way;
    if (!this.ways.has(way)) return;
    this.use(way);
    this.grid[quantity] = unpack(values);
    this.missing[quantity] = missing || {};
    this.use(name);
  }
  // how many nodes have a number of this quantity
  counted(key) {
    const n = (this.ways.get(this.way).counts ??= new Map());
    if (!n.has(this.grid[key])) n.set(this.grid[key], (this.grid[key] || []).reduce((sum, v) => sum + Number.isFinite(v), 0));
    return n.get(this.grid[key]);
  }
  value(key, row, pos) {
    return this.grid[key] ? this.grid[key][row * this.T + pos] : NaN;
  }
  why(key, row) {
    return (
      this.absent[key] ||
      (this.missing[key] || {})[this.rows[row]] ||
      (this.grid[key] ? "" : this.failed("grid", { quantity: key }) || (this.served ? "not here yet" : "not in this page"))
    );
  }
  // an answer about this panel, whose want has these parts
  answer(kind, want) {
    const found = this.answers.get(kind, { panel: this.i, way: this.way, ...want });
    return found && !found.why ? found : null;
  }
  failed(kind, want) {
    const found = this.answers.get(kind, { panel: this.i, way: this.way, ...want });
    return found ? found.why || "" : "";
  }
  // the reads of one mode at a position: {names, columns, what, number(read, k)}, or null
  table(mode, pos) {
    if (!this.lean) {
      const r = this.reads[mode];
      return r && pos >= 0 ? { ...r, number: (row, k) => r.values[(r.start[row] + k) * this.T + pos] } : null;
    }
    const found = this.answer("column", { pos });
    if (!found) return null;
    found.open ??= Object.fromEntries(Object.entries(found.ways).map(([way, { reads }]) => [way, openReads(reads, 1)]));
    const r = (found.open[this.way] || {})[mode];
    return r ? { ...r, number: (row, k) => r.values[r.start[row] + k] } : null;
  }
  // what the read at `row` (1.. = sites) takes: [{name, index, value, atoms}]
  read(mode, row, pos) {
    const r = row < 1 ? null : this.table(mode, pos);
    if (!r) return [];
    return r.columns[row - 1].map((index, k) => ({
      name: r.names[index],
      index,
      value: r.number(row - 1, k),
      atoms: (mode === "weights" && (this.holds[this.rows[row]] || {})[r.names[index]]) || [r.names[index]],
    }));
  }
  // what the lens reads at a row: [[token, probability]], or []
  tops(row, pos) {
    const found = this.lean ? (this.answer("column", { pos })?.ways[this.way] || {}).lens : this.lens;
    if (!found || row < 1) return [];
    found.open ??= { top: unpack(found.top), log: unpack(found.logprob) };
    const n = found.top.shape[found.top.shape.length - 1],
      start = ((row - 1) * (this.lean ? 1 : this.T) + (this.lean ? 0 : pos)) * n;
    return Array.from({ length: n }, (_, k) => [found.words[found.open.top[start + k]], Math.exp(found.open.log[start + k])]);
  }
  // the likeliest next tokens at out: [[token, log probability]], or null
  nextAt(pos) {
    return this.lean ? this.answer("column", { pos })?.next : this.next && this.next[pos];
  }
  // whether a site reads other positions
  looks(site) {
    return Boolean(this.sequence[site] || (this.lean && this.heads[site]));
  }
  // the sequence read shown for a site: its own, or (for a site that only reads its own position) the nearest below
  lookAt(site) {
    for (let i = this.row.get(site); i > 0; i--) if (this.looks(this.rows[i])) return this.rows[i];
    return this.rows.find((name) => this.looks(name));
  }
  // what of a site's heads is shown: its number, "max", or null for the mean (also where there is no such head)
  one(site) {
    const some = this.patterns[site] || (this.served && this.heads[site] > 1) || (this.most[site] && this.head === "max");
    if (!some || this.head === "mean") return null;
    return this.head === "max" ? "max" : Number(this.head) < this.heads[site] ? Number(this.head) : null;
  }
  attention(site, q, k) {
    if (!this.looks(site) || this.masked(site, q, k)) return NaN;
    const h = this.one(site),
      at = (q * (q + 1)) / 2 + k;
    if (this.whole(site)) {
      if (h === null) return this.sequence[site][at];
      return h === "max" ? this.largest(site)[at] : this.patterns[site][(h * this.T * (this.T + 1)) / 2 + at];
    }
    const row = this.lookRow(site, q);
    if (!row) return NaN;
    return h === null ? row.mean[k] : h === "max" ? row.max[k] : row.heads[h * (q + 1) + k];
  }
  // whether every row of what is shown of a site is here; else single rows are asked for
  whole(site) {
    const h = this.one(site);
    return Boolean(this.sequence[site] && (h === null || this.patterns[site] || (h === "max" && this.most[site])));
  }
  // whether row q of a site is here
  seen(site, q) {
    return this.whole(site) || Boolean(this.lookRow(site, q));
  }
  // one row of attention that came by itself, or null
  lookRow(site, q) {
    const found = this.answer("row", { site, pos: q, way: undefined });
    if (found) found.open ??= { mean: unpack(found.mean), max: unpack(found.max), heads: unpack(found.heads) };
    return found && found.open;
  }
  largest(site) {
    const all = this.patterns[site],
      n = (this.T * (this.T + 1)) / 2;
    if (!this.most[site]) {
      const most = all.slice(0, n);
      for (let at = n; at < all.length; at++) if (!(most[at % n] >= all[at])) most[at % n] = all[at];
      this.most[site] = most;
    }
    return this.most[site];
  }
  // why query q cannot see key k, or ""
  masked(site, q, k) {
    const w = this.windows[site];
    return k > q ? "masked: a later position" : w && q - k >= w ? `masked: outside the window of ${w}` : "";
  }
  headNote(site) {
    const n = this.heads[site],
      h = this.one(site);
    const of = this.meanOf[site.split(".")[1]];
    if (of > 1) return `mean of ${of} heads`;
    if (n === 1) return "1 head";
    return h === null ? `mean of ${n} heads` : h === "max" ? `largest of ${n} heads` : `head ${h} of 0\u2013${n - 1}`;
  }
  // a site of another model: by name in models of as many layers, else by relative depth and kind
  same(site, other) {
    if (this.row.has(site) && (other.layers === this.layers || !site.includes("."))) return site;
    const mine = this.level(site, other);
    return this.partner(site, other) ?? (this.row.has(`${mine}.attn`) ? `${mine}.attn` : "out");
  }
  level(site, other) {
    return Math.round((Number(site.split(".")[0]) / Math.max(1, other.layers - 1)) * (this.layers - 1));
  }
  // the same without a stand-in: null where this model has no site of that kind there
  partner(site, other) {
    const name =
      other.layers === this.layers || !site.includes(".")
        ? site
        : `${this.level(site, other)}.${site.split(".")[1]}`;
    return this.row.has(name) ? name : null;
  }
}
