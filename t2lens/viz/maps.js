// The two-axis maps: one plain module, drawn the same in the app, in a notebook and in a static page.
//
//   renderMaps(root, payload, onSelect)   draws `payload` (see payload.py) into the element `root`;
//                                         onSelect("cell" | "show", value) hears every choice.
//   export default                        the entry that Streamlit's components call.
//
// x is sequence position, y is depth (embed at the bottom, out on top). Cool colours are the chosen quantity; warm
// colours are always "what a node reads", on one root scale for every map of reads. All text reaches the page through
// textContent or fillText, so that a token is never markup.

// ---- one model's half of the payload, with the look-ups that the drawing needs ---------------------------------------
class Panel {
  constructor(data) {
    Object.assign(this, data);
    this.T = data.tokens.length;
    this.row = new Map(data.rows.map((name, i) => [name, i]));
    this.ways = new Map(Object.entries(data.ways).map(([way, v]) => [way, { packed: v }]));
    this.use("");
    this.sequence = Object.fromEntries(Object.entries(data.sequence).map(([site, v]) => [site, unpack(v)]));
    this.patterns = Object.fromEntries(Object.entries(data.patterns).map(([site, v]) => [site, unpack(v)]));
    this.head = "mean";
  }
  // show the reads of one way (queries, keys, ...): the first where this model has no such way
  use(name) {
    const way = this.ways.get(name) || this.ways.values().next().value;
    if (way.packed) {
      const { grids, missing, absent, reads, holds } = way.packed;
      Object.assign(way, { packed: null, missing, absent, holds });
      way.grid = Object.fromEntries(Object.entries(grids).map(([k, v]) => [k, unpack(v)]));
      way.reads = Object.fromEntries(
        Object.entries(reads).map(([mode, r]) => {
          const start = [];
          r.columns.reduce((n, cols) => (start.push(n), n + cols.length), 0);
          return [mode, { ...r, start, values: unpack(r.values) }];
        }),
      );
      if (way.reads.contribution) way.reads.share = this.share(way.reads.contribution);
    }
    const { grid, missing, absent, reads, holds } = way;
    Object.assign(this, { grid, missing, absent, reads, holds });
  }
  // each contribution's share of the summed norms of its read
  share(norms) {
    const values = Float32Array.from(norms.values);
    norms.columns.forEach((cols, r) => {
      for (let pos = 0; pos < this.T; pos++) {
        const at = (k) => (norms.start[r] + k) * this.T + pos;
        const sum = cols.reduce((total, _, k) => total + norms.values[at(k)], 0);
        cols.forEach((_, k) => (values[at(k)] = norms.values[at(k)] / sum));
      }
    });
    return { ...norms, values, what: "an atom, with its share of the summed contribution norms" };
  }
  value(key, row, pos) {
    return this.grid[key] ? this.grid[key][row * this.T + pos] : NaN;
  }
  why(key, row) {
    return this.absent[key] || (this.missing[key] || {})[this.rows[row]] || "";
  }
  // what the read at `row` (1.. = sites) takes: [{name, index, value, atoms}]
  read(mode, row, pos) {
    const r = this.reads[mode];
    if (!r || row < 1) return [];
    return r.columns[row - 1].map((index, k) => ({
      name: r.names[index],
      index,
      value: r.values[(r.start[row - 1] + k) * this.T + pos],
      atoms: (mode === "weights" && (this.holds[this.rows[row]] || {})[r.names[index]]) || [r.names[index]],
    }));
  }
  // the sequence read shown for a site: its own, or (for a site that only reads its own position) the nearest below
  lookAt(site) {
    for (let i = this.row.get(site); i > 0; i--) if (this.sequence[this.rows[i]]) return this.rows[i];
    return this.rows.find((name) => this.sequence[name]);
  }
  // the chosen head of a site, or null for the mean (also where the site has no such head)
  one(site) {
    return this.patterns[site] && this.head !== "mean" && Number(this.head) < this.heads[site]
      ? Number(this.head)
      : null;
  }
  attention(site, q, k) {
    if (!this.sequence[site] || this.masked(site, q, k)) return NaN;
    const h = this.one(site),
      at = (q * (q + 1)) / 2 + k;
    return h === null ? this.sequence[site][at] : this.patterns[site][(h * this.T * (this.T + 1)) / 2 + at];
  }
  // why query q cannot see key k, or ""
  masked(site, q, k) {
    const w = this.windows[site];
    return k > q ? "masked: a later position" : w && q - k >= w ? `masked: outside the window of ${w}` : "";
  }
  headNote(site) {
    const n = this.heads[site],
      h = this.one(site);
    return n === 1 ? "1 head" : h === null ? `mean of ${n} heads` : `head ${h} of 0\u2013${n - 1}`;
  }
  // a site of another model: by name in models of as many layers, else by relative depth and kind
  same(site, other) {
    if (this.row.has(site) && (other.layers === this.layers || !site.includes("."))) return site;
    const [layer, kind] = site.split("."),
      depth = Number(layer) / Math.max(1, other.layers - 1);
    const mine = Math.round(depth * (this.layers - 1));
    return this.row.has(`${mine}.${kind}`) ? `${mine}.${kind}` : this.row.has(`${mine}.attn`) ? `${mine}.attn` : "out";
  }
}

// ---- the view: state, drawing, events --------------------------------------------------------------------------------
const ROOT = (x, hi) => Math.sign(x) * Math.sqrt(Math.min(1, Math.abs(x) / hi)); // the scale of every map of reads
const WAYS = { q: "queries", k: "keys", v: "values", r: "carried stream" };
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500];

class View {
  constructor(root) {
    this.box = el("div", "t2l", undefined, root);
    this.sheet = el("div", "sheet", undefined, this.box);
    this.tip = el("div", "tip", undefined, this.box);
    this.live = el("div", "live", undefined, this.box);
    this.live.setAttribute("aria-live", "polite");
    this.maps = [];
    this.hover = null;
    this.resize = new ResizeObserver(() => this.box.clientWidth !== this.width && this.draw());
    this.dark = matchMedia("(prefers-color-scheme: dark)");
    this.redraw = () => this.draw();
    this.dark.addEventListener("change", this.redraw);
  }
  stop() {
    this.resize.disconnect();
    this.dark.removeEventListener("change", this.redraw);
    clearTimeout(this.timer);
  }

  update(payload, onSelect) {
    this.onSelect = onSelect || (() => {});
    if (payload.rev === this.rev) {
      this.draw();
      return;
    }
    Object.assign(this, { rev: payload.rev, payload, view: { ...payload.view }, trail: [] });
    this.panels = payload.panels.map((p) => new Panel(p));
    this.box.classList.toggle("one", this.panels.length === 1);
    this.build();
    this.draw();
    this.resize.observe(this.box);
  }

  // ---- frame: everything but the canvases' contents
  build() {
    const { payload } = this;
    this.sheet.textContent = "";
    this.maps = [];
    const head = el("div", "head", undefined, this.sheet);
    if (payload.hint) el("p", "hint", payload.hint, head);
    this.choice(head, "colour of the grid", "quantity", payload.quantities);
    this.cool = this.bar(head);
    this.choice(head, "reads from depth", "depth", payload.depth);
    this.warm = this.bar(head);
    const heads = Math.max(0, ...this.panels.flatMap((p) => Object.keys(p.patterns).map((site) => p.heads[site])));
    if (heads > 1)
      this.choice(
        head,
        "attention head",
        "head",
        ["mean", ...Array(heads).keys()].map((h) => ({ key: String(h), label: String(h) })),
      );
    const ways = [...new Set(this.panels.flatMap((p) => [...p.ways.keys()]))].filter((way) => way);
    if (ways.length > 1)
      this.choice(
        head,
        "attention reads with its",
        "way",
        ways.map((key) => ({ key, label: WAYS[key] || key })),
      );
    this.back = this.bar(head);
    this.panels.forEach((p, i) => {
      const area = el("section", "", undefined, this.sheet);
      area.style.gridArea = "ab"[i];
      const h = this.title(area, p, p.subtitle);
      const b = el("span", p.badge.ok ? "badge" : "badge bad", p.badge.text, h);
      b.title = p.badge.lines.join("\n");
      this.map(area, "grid", i);
    });
    const maps = el("div", "maps", undefined, this.sheet);
    for (const kind of ["depth", "sequence"])
      this.panels.forEach((p, i) => {
        const area = el("section", "", undefined, maps);
        this.map(area, kind, i, this.title(area, { letter: p.letter, name: "" }, ""));
      });
    const keys = el("div", "keys", undefined, maps);
    this.keys = [
      "no such source, or no value",
      "masked: later, or outside the window",
      "exactly zero",
      "not a finite number",
      "above the range",
    ].map((text) => {
      const s = el("span", "", undefined, keys),
        canvas = el("canvas", "", undefined, s);
      el("span", "", text, s);
      return canvas;
    });
    if (this.panels.length > 1) el("p", "note", "Every colour range is one range for A and B.", maps);
    for (const note of payload.notes) el("p", "note", note, maps);
    this.node = el("aside", "node", undefined, this.sheet);
  }
  title(area, p, sub) {
    const h = el("h3", "", undefined, area);
    el("span", "letter", p.letter, h);
    if (p.name) el("span", "", p.name, h);
    h.sub = el("span", "sub", sub, h);
    return h;
  }
  choice(parent, label, key, options) {
    const box = el("label", "", label, parent),
      select = el("select", "", undefined, box);
    select.setAttribute("aria-label", label);
    for (const o of options) el("option", "", o.label, select).value = o.key;
    if (!options.some((o) => o.key === this.view[key])) this.view[key] = options[0].key;
    select.value = this.view[key];
    select.onchange = () => {
      this.view[key] = select.value;
      this.tip.style.display = "none"; // it tells of the quantity before
      this.draw();
      const { quantity, depth, head, way } = this.view;
      this.onSelect("show", { quantity, depth, head, way });
    };
  }
  bar(parent) {
    const box = el("div", "bar", undefined, parent);
    return { text: el("span", "", "", box), canvas: el("canvas", "", undefined, box) };
  }
  map(area, kind, i, h) {
    const frame = el("div", "map", undefined, area),
      base = el("canvas", "base", undefined, frame),
      over = el("canvas", "over", undefined, frame);
    const m = { kind, i, frame, base, over, h, why: el("p", "why", "", area) };
    base.dataset.map = `${kind}-${this.panels[i].letter}`;
    base.setAttribute("role", kind === "grid" ? "application" : "img");
    if (kind === "grid") {
      base.tabIndex = 0;
      base.onkeydown = (e) => this.key(e, m);
    }
    base.onpointermove = (e) => this.point(m, this.hit(m, e), e);
    base.onpointerleave = () => this.point(m, null);
    base.onclick = (e) => {
      const at = this.hit(m, e);
      if (at) this.pick(m, at);
    };
    this.maps.push(m);
  }

  // ---- choosing
  get readLut() {
    return this.lut[this.mode.signed ? "both" : "warm"];
  }
  get here() {
    return this.panels[this.view.panel];
  }
  site(i) {
    const p = this.panels[i];
    return p === this.here ? this.view.site : p.same(this.view.site, this.here);
  }
  clamp(i) {
    return Math.min(this.view.pos, this.panels[i].T - 1);
  }
  select(cell, later) {
    const { panel: p0, pos: t0, site: s0 } = this.view;
    Object.assign(this.view, cell);
    const { panel, pos, site } = this.view;
    if (panel === p0 && pos === t0 && site === s0) return;
    const hint = this.sheet.querySelector(".hint");
    if (hint) hint.style.visibility = "hidden"; // it speaks of the node before; its place stays
    if (!later) this.trail = [...this.trail.slice(-3), { panel: p0, pos: t0, site: s0 }];
    this.draw();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.onSelect("cell", { panel, pos, site }), later ? 180 : 0);
  }
  pick(m, { c, r }) {
    const p = this.panels[m.i];
    if (m.kind === "grid") this.select({ panel: m.i, pos: c, site: p.rows[r] });
    else if (m.kind === "depth") this.select({ panel: m.i, site: p.rows[r + 1] });
    else this.select({ panel: m.i, pos: r, site: p.lookAt(this.site(m.i)) });
  }
  key(e, m) {
    const p = this.panels[m.i],
      row = p.row.get(this.site(m.i)),
      pos = this.clamp(m.i);
    const to = {
      ArrowLeft: [pos - 1, row],
      ArrowRight: [pos + 1, row],
      ArrowUp: [pos, row + 1],
      ArrowDown: [pos, row - 1],
      Home: [0, row],
      End: [p.T - 1, row],
      PageUp: [pos, p.rows.length - 1],
      PageDown: [pos, 1],
    }[e.key];
    if (!to) return;
    e.preventDefault();
    this.tip.style.display = "none";
    const c = Math.max(0, Math.min(p.T - 1, to[0])),
      r = Math.max(0, Math.min(p.rows.length - 1, to[1]));
    this.select({ panel: m.i, pos: c, site: p.rows[r] }, true);
    this.live.textContent = this.tell(c, p.rows[r], m.i).join(". ");
  }

  // ---- hover: one state, every map marks it; the maps themselves are not drawn again
  hit(m, e) {
    const g = m.geom,
      box = m.base.getBoundingClientRect();
    if (!g) return null;
    const c = Math.floor((e.clientX - box.left - g.x) / g.cw),
      k = Math.floor((e.clientY - box.top - g.y) / g.ch);
    if (c < 0 || k < 0 || c >= g.cols || k >= g.rows) return null;
    return { c, r: g.up ? g.rows - 1 - k : k };
  }
  point(m, at, e) {
    this.hover = at && { m, ...at };
    for (const other of this.maps) this.mark(other);
    this.tip.style.display = at ? "block" : "none";
    if (!at) return;
    const p = this.panels[m.i],
      lines =
        m.kind === "grid"
          ? this.tell(at.c, p.rows[at.r], m.i)
          : m.kind === "depth"
            ? this.tellDepth(m, at)
            : this.tellSequence(m, at);
    this.tip.textContent = lines.join("\n");
    const box = this.box.getBoundingClientRect(),
      w = this.tip.offsetWidth,
      h = this.tip.offsetHeight;
    const x = e.clientX - box.left,
      y = e.clientY - box.top;
    this.tip.style.left = `${Math.max(0, x + 14 + w > box.width ? x - w - 10 : x + 14)}px`;
    this.tip.style.top = `${y + 16 + h > box.height ? y - h - 10 : y + 16}px`;
  }
  exact(v) {
    if (this.payload.precision === "f4") return fmt(v, 7);
    return v && Math.abs(v) < 2 ** -14 ? "below 6.1e-5" : fmt(v, 3); // float16 keeps 3 digits down to 2 ** -14
  }
  tell(pos, site, i) {
    const q = this.payload.quantities.find((o) => o.key === this.view.quantity),
      from = this.panels[i];
    const lines = [`${site}   position ${pos}   ${glyphs(from.tokens[pos])}`];
    this.panels.forEach((p, j) => {
      const here = j === i ? site : p.same(site, from),
        row = p.row.get(here);
      const v = pos < p.T ? p.value(q.key, row, pos) : NaN;
      lines.push(
        `${p.letter}${here === site ? "" : ` (${here})`}   ${q.label}: ` +
          (pos >= p.T ? "no such position" : p.why(q.key, row) || `${this.exact(v)}${q.unit && ` ${q.unit}`}`),
      );
      const chosen = this.site(j),
        row0 = p.row.get(chosen),
        t = this.clamp(j);
      if (pos === t && row < row0)
        for (const s of p.read(this.view.depth, row0, t))
          if (s.atoms.includes(here)) lines.push(`     ${chosen} reads ${s.name}: ${this.exact(s.value)}`);
      if (here === chosen && pos <= t && p.sequence[chosen])
        lines.push(
          `     position ${t} reads position ${pos}: ${p.masked(chosen, t, pos) || this.exact(p.attention(chosen, t, pos))}`,
        );
    });
    return lines;
  }
  tellDepth(m, { c, r }) {
    const from = this.panels[m.i],
      site = from.rows[r + 1],
      name = from.reads[this.view.depth].names[c];
    const lines = [`${site} reads ${name}   at position ${this.clamp(m.i)}`];
    this.panels.forEach((p, j) => {
      const here = j === m.i ? site : p.same(site, from);
      const all = p.read(this.view.depth, p.row.get(here), this.clamp(j)),
        s = all.find((o) => o.name === name);
      const rank = s && all.filter((o) => Math.abs(o.value) > Math.abs(s.value)).length + 1;
      lines.push(
        s ? `${p.letter}   ${this.exact(s.value)}   (rank ${rank} of ${all.length})` : `${p.letter}   no such source`,
      );
    });
    return lines;
  }
  tellSequence(m, { c, r }) {
    const from = this.panels[m.i],
      lines = [`query ${r} ${glyphs(from.tokens[r])}   key ${c} ${glyphs(from.tokens[c])}`];
    this.panels.forEach((p, j) => {
      const site = p.lookAt(this.site(j)),
        v = p.attention(site, r, c);
      lines.push(`${p.letter}   ${site}   ${p.masked(site, r, c) || this.exact(v)}`);
    });
    return lines;
  }
}
