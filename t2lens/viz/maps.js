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
    this.grid = Object.fromEntries(Object.entries(data.grids).map(([k, v]) => [k, unpack(v)]));
    this.reads = Object.fromEntries(Object.entries(data.reads).map(([mode, r]) => {
      const start = [];
      r.columns.reduce((n, cols) => (start.push(n), n + cols.length), 0);
      return [mode, { ...r, start, values: unpack(r.values) }];
    }));
    this.sequence = Object.fromEntries(Object.entries(data.sequence).map(([site, v]) => [site, unpack(v)]));
  }
  value(key, row, pos) { return row < 1 || !this.grid[key] ? NaN : this.grid[key][(row - 1) * this.T + pos]; }
  // what the read at `row` (1.. = sites) takes: [{name, index, value, atoms}]
  read(mode, row, pos) {
    const r = this.reads[mode];
    if (!r || row < 1) return [];
    return r.columns[row - 1].map((index, k) => ({
      name: r.names[index], index, value: r.values[(r.start[row - 1] + k) * this.T + pos],
      atoms: (mode === "weights" && (this.holds[this.rows[row]] || {})[r.names[index]]) || [r.names[index]],
    }));
  }
  // the sequence read shown for a site: its own, or (for a site that only reads its own position) the nearest below
  lookAt(site) {
    for (let i = this.row.get(site); i > 0; i--) if (this.sequence[this.rows[i]]) return this.rows[i];
    return this.rows.find((name) => this.sequence[name]);
  }
  attention(site, q, k) { return k > q || !this.sequence[site] ? NaN : this.sequence[site][(q * (q + 1)) / 2 + k]; }
  // a site of another model: by name, else by relative depth and kind
  same(site, other) {
    if (this.row.has(site)) return site;
    const [layer, kind] = site.split("."), depth = Number(layer) / Math.max(1, other.layers - 1);
    const mine = Math.round(depth * (this.layers - 1));
    return this.row.has(`${mine}.${kind}`) ? `${mine}.${kind}` : this.row.has(`${mine}.attn`) ? `${mine}.attn` : "out";
  }
}

// ---- the view: state, drawing, events --------------------------------------------------------------------------------
const ROOT = (x, hi) => Math.sign(x) * Math.sqrt(Math.min(1, Math.abs(x) / hi));  // the scale of every map of reads
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
  stop() { this.resize.disconnect(); this.dark.removeEventListener("change", this.redraw); clearTimeout(this.timer); }

  update(payload, onSelect) {
    this.onSelect = onSelect || (() => {});
    if (payload.rev === this.rev) { this.draw(); return; }
    Object.assign(this, { rev: payload.rev, payload, view: { ...payload.view } });
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
    this.panels.forEach((p, i) => {
      const area = el("section", "", undefined, this.sheet);
      area.style.gridArea = "ab"[i];
      const h = this.title(area, p, p.subtitle);
      const b = el("span", p.badge.ok ? "badge" : "badge bad", p.badge.text, h);
      b.title = p.badge.lines.join("\n");
      this.map(area, "grid", i);
    });
    const maps = el("div", "maps", undefined, this.sheet);
    for (const kind of ["depth", "sequence"]) this.panels.forEach((p, i) => {
      const area = el("section", "", undefined, maps);
      this.map(area, kind, i, this.title(area, { letter: p.letter, name: "" }, ""));
    });
    const keys = el("div", "keys", undefined, maps);
    this.keys = ["no such source, or no value", "masked: a later position", "exactly zero", "not a finite number", "above the range"].map((text) => {
      const s = el("span", "", undefined, keys), canvas = el("canvas", "", undefined, s);
      el("span", "", text, s);
      return canvas;
    });
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
    const box = el("label", "", label, parent), select = el("select", "", undefined, box);
    select.setAttribute("aria-label", label);
    for (const o of options) el("option", "", o.label, select).value = o.key;
    select.value = this.view[key];
    select.onchange = () => {
      this.view[key] = select.value;
      this.draw();
      this.onSelect("show", { quantity: this.view.quantity, depth: this.view.depth });
    };
  }
  bar(parent) {
    const box = el("div", "bar", undefined, parent);
    return { text: el("span", "", "", box), canvas: el("canvas", "", undefined, box) };
  }
  map(area, kind, i, h) {
    const frame = el("div", "map", undefined, area), base = el("canvas", "base", undefined, frame), over = el("canvas", "over", undefined, frame);
    const m = { kind, i, frame, base, over, h, why: el("p", "why", "", area) };
    base.dataset.map = `${kind}-${this.panels[i].letter}`;
    base.setAttribute("role", "application");
    if (kind === "grid") { base.tabIndex = 0; base.onkeydown = (e) => this.key(e, m); }
    base.onpointermove = (e) => this.point(m, this.hit(m, e), e);
    base.onpointerleave = () => this.point(m, null);
    base.onclick = (e) => { const at = this.hit(m, e); if (at) this.pick(m, at); };
    this.maps.push(m);
  }

  // ---- choosing
  get here() { return this.panels[this.view.panel]; }
  site(i) { const p = this.panels[i]; return p === this.here ? this.view.site : p.same(this.view.site, this.here); }
  clamp(i) { return Math.min(this.view.pos, this.panels[i].T - 1); }
  select(cell, later) {
    Object.assign(this.view, cell);
    this.draw();
    const { panel, pos, site } = this.view;
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
    const p = this.panels[m.i], row = p.row.get(this.site(m.i)), pos = this.clamp(m.i);
    const to = { ArrowLeft: [pos - 1, row], ArrowRight: [pos + 1, row], ArrowUp: [pos, row + 1], ArrowDown: [pos, row - 1],
      Home: [0, row], End: [p.T - 1, row], PageUp: [pos, p.rows.length - 1], PageDown: [pos, 1] }[e.key];
    if (!to) return;
    e.preventDefault();
    const c = Math.max(0, Math.min(p.T - 1, to[0])), r = Math.max(0, Math.min(p.rows.length - 1, to[1]));
    this.select({ panel: m.i, pos: c, site: p.rows[r] }, true);
    this.live.textContent = this.tell(c, p.rows[r], m.i).join(". ");
  }

  // ---- hover: one state, every map marks it; the maps themselves are not drawn again
  hit(m, e) {
    const g = m.geom, box = m.base.getBoundingClientRect();
    if (!g) return null;
    const c = Math.floor((e.clientX - box.left - g.x) / g.cw), k = Math.floor((e.clientY - box.top - g.y) / g.ch);
    if (c < 0 || k < 0 || c >= g.cols || k >= g.rows) return null;
    return { c, r: g.up ? g.rows - 1 - k : k };
  }
  point(m, at, e) {
    this.hover = at && { m, ...at };
    for (const other of this.maps) this.mark(other);
    this.tip.style.display = at ? "block" : "none";
    if (!at) return;
    const p = this.panels[m.i], lines = m.kind === "grid" ? this.tell(at.c, p.rows[at.r], m.i)
      : m.kind === "depth" ? this.tellDepth(m, at) : this.tellSequence(m, at);
    this.tip.textContent = lines.join("\n");
    const box = this.box.getBoundingClientRect(), w = this.tip.offsetWidth, h = this.tip.offsetHeight;
    const x = e.clientX - box.left, y = e.clientY - box.top;
    this.tip.style.left = `${Math.max(0, x + 14 + w > box.width ? x - w - 10 : x + 14)}px`;
    this.tip.style.top = `${y + 16 + h > box.height ? y - h - 10 : y + 16}px`;
  }
  exact(v) { return fmt(v, this.payload.precision === "f4" ? 7 : 3); }
  tell(pos, site, i) {
    const q = this.payload.quantities.find((o) => o.key === this.view.quantity), from = this.panels[i];
    const lines = [`${site}   position ${pos}   ${glyphs(from.tokens[pos])}`];
    this.panels.forEach((p, j) => {
      const here = j === i ? site : p.same(site, from), row = p.row.get(here);
      const v = pos < p.T ? p.value(q.key, row, pos) : NaN;
      const missing = site === "embed" ? "the embedding is written, not read" : p.absent[q.key] || (Number.isNaN(v) ? "no value" : "");
      lines.push(`${p.letter}${here === site ? "" : ` (${here})`}   ${q.label} ${Number.isNaN(v) ? missing : this.exact(v)}${Number.isNaN(v) ? "" : q.unit && ` ${q.unit}`}`);
      const chosen = this.site(j), row0 = p.row.get(chosen), t = this.clamp(j);
      if (pos === t && row < row0) for (const s of p.read(this.view.depth, row0, t))
        if (s.atoms.includes(here)) lines.push(`     ${chosen} reads ${s.name}: ${this.exact(s.value)}`);
      if (here === chosen && pos <= t && p.sequence[chosen]) lines.push(`     position ${t} reads position ${pos}: ${this.exact(p.attention(chosen, t, pos))}`);
    });
    return lines;
  }
  tellDepth(m, { c, r }) {
    const from = this.panels[m.i], site = from.rows[r + 1], name = from.reads[this.view.depth].names[c];
    const lines = [`${site} reads ${name}   at position ${this.clamp(m.i)}`];
    this.panels.forEach((p, j) => {
      const here = j === m.i ? site : p.same(site, from);
      const all = p.read(this.view.depth, p.row.get(here), this.clamp(j)), s = all.find((o) => o.name === name);
      const rank = s && all.filter((o) => Math.abs(o.value) > Math.abs(s.value)).length + 1;
      lines.push(s ? `${p.letter}   ${this.exact(s.value)}   (rank ${rank} of ${all.length})` : `${p.letter}   no such source`);
    });
    return lines;
  }
  tellSequence(m, { c, r }) {
    const from = this.panels[m.i], lines = [`query ${r} ${glyphs(from.tokens[r])}   key ${c} ${glyphs(from.tokens[c])}`];
    this.panels.forEach((p, j) => {
      const site = p.lookAt(this.site(j)), v = p.attention(site, r, c);
      lines.push(`${p.letter}   ${site}   ${c > r ? "masked: a later position" : this.exact(v)}`);
    });
    return lines;
  }

  // ---- drawing
  draw() {
    if (!this.panels) return;
    this.width = this.box.clientWidth;
    const style = getComputedStyle(this.box);
    const probe = (name) => { this.tip.style.color = `var(${name})`; const c = getComputedStyle(this.tip).color; this.tip.style.color = ""; return c; };
    this.colors = { paper: probe("--paper"), ink: probe("--ink"), mute: probe("--mute"), hair: probe("--hair") };
    this.font = style.fontFamily;
    const tmp = el("canvas").getContext("2d");
    tmp.fillStyle = this.colors.paper; tmp.fillRect(0, 0, 1, 1);
    const [r, g, b] = tmp.getImageData(0, 0, 1, 1).data, dark = r + g + b < 384;
    this.box.classList.toggle("dark", dark);
    if (dark !== this.isDark) {
      this.isDark = dark;
      this.lut = Object.fromEntries(Object.entries(RAMPS[dark ? "dark" : "light"]).map(([k, v]) => [k, lut(v)]));
    }
    this.quantity = this.payload.quantities.find((o) => o.key === this.view.quantity);
    this.mode = this.payload.depth.find((o) => o.key === this.view.depth);
    this.bars();
    this.legend();
    for (const m of this.maps) { this[m.kind](m); this.mark(m); }
    this.detail();
  }
  // LUT index of a value, or the name of the state that is not a number
  shade(v, lo, hi) { return Number.isFinite(v) ? Math.max(0, Math.min(255, Math.round((255 * (v - lo)) / (hi - lo || 1)))) : "nan"; }
  shadeRead(v) { const t = ROOT(v, this.mode.hi); return Number.isFinite(v) ? Math.round(this.mode.signed ? 127.5 * (t + 1) : 255 * Math.max(0, t)) : "nan"; }
  shadeWeight(v) { return Number.isFinite(v) ? Math.round(255 * ROOT(Math.max(0, v), this.payload.sequenceHi)) : "nan"; }
  get readLut() { return this.lut[this.mode.signed ? "both" : "warm"]; }

  fit(canvas, w, h) {
    const s = devicePixelRatio || 1, ctx = canvas.getContext("2d");
    canvas.width = Math.round(w * s); canvas.height = Math.round(h * s);
    canvas.style.width = `${w}px`; canvas.style.height = `${h}px`;
    ctx.setTransform(s, 0, 0, s, 0, 0);
    return ctx;
  }
  text(ctx, s, x, y, { align = "center", color = this.colors.mute, size = 10.5, weight = 400, turn = 0, halo = false } = {}) {
    ctx.save();
    ctx.font = `${weight} ${size}px ${this.font}`;
    ctx.textAlign = align; ctx.textBaseline = "middle"; ctx.fillStyle = color;
    ctx.translate(x, y); ctx.rotate(turn);
    if (halo) { ctx.strokeStyle = this.colors.paper; ctx.lineWidth = 3; ctx.lineJoin = "round"; ctx.strokeText(s, 0, 0); }
    ctx.fillText(s, 0, 0);
    ctx.restore();
  }
  hatch(ctx, x, y, w, h) {
    ctx.save();
    ctx.beginPath(); ctx.rect(x, y, w, h); ctx.clip();
    ctx.strokeStyle = this.colors.mute; ctx.lineWidth = 0.8; ctx.beginPath();
    for (let k = -h; k < w; k += 4) { ctx.moveTo(x + k, y + h); ctx.lineTo(x + k + h, y); }
    ctx.stroke(); ctx.restore();
  }
  mask(ctx, x, y, w, h, free = () => true) {
    ctx.save();
    ctx.fillStyle = this.colors.mute; ctx.globalAlpha = 0.5;
    for (let px = 2; px < w; px += 5) for (let py = 2; py < h; py += 5) if (free(px, py)) ctx.fillRect(Math.round(x + px), Math.round(y + py), 1, 1);
    ctx.restore();
  }

  // cells(c, r) -> LUT index | "nan" | null (nothing there); r counts from the bottom when g.up
  cells(ctx, g, table, cells, value) {
    const off = el("canvas"), img = new ImageData(g.cols, g.rows), px = new Uint32Array(img.data.buffer), odd = [];
    const packed = table.map(([r, gr, b]) => 0xff000000 | (b << 16) | (gr << 8) | r);
    for (let r = 0; r < g.rows; r++) for (let c = 0; c < g.cols; c++) {
      const k = cells(c, r);
      if (k === null) continue;
      if (k === "nan") odd.push([c, r]); else px[(g.up ? g.rows - 1 - r : r) * g.cols + c] = packed[k];
    }
    off.width = g.cols; off.height = g.rows;
    off.getContext("2d").putImageData(img, 0, 0);
    ctx.imageSmoothingEnabled = g.cw * devicePixelRatio < 1 || g.ch * devicePixelRatio < 1;
    ctx.drawImage(off, g.x, g.y, g.cols * g.cw, g.rows * g.ch);
    for (const [c, r] of odd) { const [x, y, w, h] = this.rect(g, c, r); this.hatch(ctx, x, y, w, h); }
    if (g.cw >= 7 && g.ch >= 7) {  // hairlines keep neighbours apart; a dot says "exactly zero"
      ctx.fillStyle = this.colors.paper;
      for (let c = 1; c < g.cols; c++) ctx.fillRect(Math.round(g.x + c * g.cw) - 0.5, g.y, 1, g.rows * g.ch);
      for (let r = 1; r < g.rows; r++) ctx.fillRect(g.x, Math.round(g.y + r * g.ch) - 0.5, g.cols * g.cw, 1);
      ctx.fillStyle = this.colors.mute;
      for (let r = 0; r < g.rows; r++) for (let c = 0; c < g.cols; c++) if (value(c, r) === 0) {
        const [x, y, w, h] = this.rect(g, c, r);
        ctx.fillRect(x + w / 2 - 1, y + h / 2 - 1, 2, 2);
      }
    }
    ctx.strokeStyle = this.colors.hair; ctx.lineWidth = 1;
    ctx.strokeRect(g.x - 0.5, g.y - 0.5, g.cols * g.cw + 1, g.rows * g.ch + 1);
  }
  rect(g, c, r) {
    const k = g.up ? g.rows - 1 - r : r, x = Math.round(g.x + c * g.cw), y = Math.round(g.y + k * g.ch);
    return [x, y, Math.round(g.x + (c + 1) * g.cw) - x, Math.round(g.y + (k + 1) * g.ch) - y];
  }
  // the token strip below an axis: level when the words fit, upright when not, thinned when many
  strip(p, cw, most = 12) {
    const ctx = el("canvas").getContext("2d"), words = p.tokens.map((t) => clip(glyphs(t), most));
    ctx.font = `600 10.5px ${this.font}`;
    const wide = Math.max(...words.map((w) => ctx.measureText(w).width)), level = wide <= cw - 4;
    return { words, level, wide, every: level ? 1 : Math.max(1, Math.ceil(11.5 / cw)), height: 17 + (level ? 13 : wide) };
  }
  positions(ctx, p, g, strip, chosen) {
    const step = STEPS.find((s) => s * g.cw >= 24) || 1000, y = g.y + g.rows * g.ch, at = (c) => g.x + (c + 0.5) * g.cw;
    const mine = { color: this.colors.ink, weight: 700 };
    strip.words.forEach((word, c) => {
      const near = c !== chosen && Math.abs(c - chosen) * g.cw;
      if (c === chosen || (c % step === 0 && near >= 18)) this.text(ctx, String(c), at(c), y + 8, { size: 9.5, ...(c === chosen && mine) });
      if (c !== chosen && (c % strip.every || (!strip.level && near < 11))) return;
      this.text(ctx, word, at(c), y + (strip.level ? 22 : 17), { align: strip.level ? "center" : "right",
        turn: strip.level ? 0 : -Math.PI / 2, ...(c === chosen && mine) });
    });
  }

  grid(m) {
    const p = this.panels[m.i], W = m.frame.clientWidth, rows = p.rows.length, q = this.quantity;
    const most = Math.max(...this.panels.map((o) => o.rows.length)), x = 46, cw = (W - x - 2) / p.T;
    const ch = (most * (most > 22 ? 13 : 16)) / rows, strip = this.strip(p, cw);  // same height in A and B: same relative depth
    const g = (m.geom = { x, y: 3, cw, ch, cols: p.T, rows, up: true }), H = g.y + rows * ch + strip.height + 4;
    const ctx = this.fit(m.base, W, H);
    this.fit(m.over, W, H);
    const absent = p.absent[q.key], empty = absent || !p.grid[q.key];
    const blank = p.rows.map((_, r) => r === 0 || empty || Array.from({ length: p.T }, (__, c) => p.value(q.key, r, c)).every(Number.isNaN));
    this.cells(ctx, g, this.lut[q.signed ? "both" : "cool"], (c, r) => (blank[r] ? null : this.shade(p.value(q.key, r, c), q.lo, q.hi)),
      (c, r) => (blank[r] ? NaN : p.value(q.key, r, c)));
    if (q.above) for (let r = 1; r < rows; r++) for (let c = 0; c < p.T; c++) if (p.value(q.key, r, c) > q.hi) this.corner(ctx, g, c, r);
    const site = this.site(m.i), row = p.row.get(site), pos = this.clamp(m.i);
    p.rows.forEach((name, r) => {
      const y = g.y + (rows - 1 - r + 0.5) * ch;
      this.text(ctx, name, x - 6, y, { align: "right", ...(r === row && { color: this.colors.ink, weight: 700 }) });
    });
    this.positions(ctx, p, g, strip, pos);
    if (empty) this.text(ctx, absent || "not in this trace", x + (p.T * cw) / 2, g.y + (rows * ch) / 2, { size: 13, halo: true });
    this.cross(ctx, g, p, row, pos);
    const own = p.sequence[site], mode = this.mode.label.toLowerCase();
    m.why.textContent = site === "embed" ? "embed is written, not read: it has no cross."
      : `Down: what ${site} reads in depth (${mode}). ` + (own ? `Left: where it looks in the sequence (mean of ${p.heads[site]} heads).`
        : `No arm to the left: ${site} reads only its own position.`);
    m.base.setAttribute("aria-label", `Model ${p.letter}, ${p.name}: map of ${q.label} by position and depth. ` +
      `Chosen: ${site} at position ${pos}, token ${glyphs(p.tokens[pos])}. Arrow keys move.`);
    Object.assign(m.base.dataset, { geom: JSON.stringify(g), site, pos });
  }
  corner(ctx, g, c, r) {
    const [x, y, w] = this.rect(g, c, r), s = Math.min(5, w);
    ctx.fillStyle = this.colors.paper; ctx.beginPath();
    ctx.moveTo(x + w - s, y); ctx.lineTo(x + w, y); ctx.lineTo(x + w, y + s); ctx.fill();
  }
  cross(ctx, g, p, row, pos) {
    const { ink, paper } = this.colors, mid = g.x + (pos + 0.5) * g.cw, w = Math.max(g.cw, 11), warm = this.lut.warm, notes = [];
    const frame = (x, y, a, b) => { ctx.lineWidth = 3; ctx.strokeStyle = paper; ctx.strokeRect(x, y, a, b); ctx.lineWidth = 1; ctx.strokeStyle = ink; ctx.strokeRect(x, y, a, b); };
    const level = (r) => g.y + (g.rows - 1 - r) * g.ch;
    if (p.sequence[p.rows[row]]) {
      frame(g.x - 0.5, level(row) - 0.5, (pos + 1) * g.cw + 1, g.ch + 1);
      const best = [];
      for (let k = 0; k <= pos; k++) {
        const v = p.attention(p.rows[row], pos, k), s = this.shadeWeight(v), [x, y, a, b] = this.rect(g, k, row);
        if (s === "nan") { ctx.fillStyle = paper; ctx.fillRect(x, y, a, b); this.hatch(ctx, x, y, a, b); continue; }
        ctx.fillStyle = css(warm[s]); ctx.fillRect(x, y, a, b);
        best.push([v, k]);
      }
      for (const [v, k] of best.sort((a, b) => b[0] - a[0]).slice(0, 3)) if (v >= 0.08 && k < pos)
        notes.push([v.toFixed(2), g.x + (k + 0.5) * g.cw, level(row) - 7, "center"]);
    }
    const reads = p.read(this.view.depth, row, pos), left = Math.round(mid - w / 2), side = pos * g.cw > g.cw * g.cols - 70 ? -1 : 1;
    let braces = 0;
    for (const s of reads) {
      const k = this.shadeRead(s.value), at = s.atoms.map((a) => p.row.get(a)).filter((r) => r !== undefined);
      if (!at.length) continue;
      const lo = Math.min(...at), hi = Math.max(...at), y = level(hi), h = (hi - lo + 1) * g.ch;
      const many = at.length > 1, x = many ? left + w + 3 + 0 * braces++ : left, a = many ? 6 : w;
      frame(x - 0.5, y + 0.5, a + 1, h - 1);
      if (k === "nan") this.hatch(ctx, x, y + 1, a, h - 2);
      else { ctx.fillStyle = css(this.readLut[k]); ctx.fillRect(x, y + 1, a, h - 2); }
      if (many) { ctx.fillStyle = ink; for (const e of [y + 0.5, y + h - 1.5]) ctx.fillRect(left + 1, e, w + 4, 1); }
      s.note = [fmt(s.value, 2), side > 0 ? x + a + 4 : left - 4, y + h / 2, side > 0 ? "left" : "right"];
    }
    reads.filter((s) => s.note).sort((a, b) => Math.abs(b.value) - Math.abs(a.value)).slice(0, 4).forEach((s) => notes.push(s.note));
    for (const [s, x, y, align] of notes) this.text(ctx, s, x, y, { align, size: 10, color: ink, weight: 600, halo: true });
  }

  depth(m) {
    const p = this.panels[m.i], pos = this.clamp(m.i), r0 = p.reads[this.view.depth], names = r0 ? r0.names : [], rows = p.rows.length - 1;
    const W = m.frame.clientWidth, x = 46, most = Math.max(...this.panels.map((o) => o.rows.length - 1));
    const cell = (Math.min(16, 240 / most) * most) / rows, cw = Math.min(26, (W - x - 2) / Math.max(1, names.length));
    const g = (m.geom = { x, y: 3, cw, ch: cell, cols: names.length, rows, up: true }), H = g.y + rows * cell + 52;
    const ctx = this.fit(m.base, W, H);
    this.fit(m.over, W, H);
    const table = p.rows.slice(1).map((_, r) => new Map(p.read(this.view.depth, r + 1, pos).map((s) => [s.index, s.value])));
    this.cells(ctx, g, this.readLut, (c, r) => (table[r].has(c) ? this.shadeRead(table[r].get(c)) : null), (c, r) => table[r].get(c));
    const row = p.row.get(this.site(m.i)), every = Math.ceil(10.5 / cell), step = Math.ceil(10 / cw);
    p.rows.slice(1).forEach((name, r) => (r + 1 === row || (r % every === 0 && Math.abs(r + 1 - row) * cell >= 10)) &&
      this.text(ctx, name, x - 6, g.y + (rows - 1 - r + 0.5) * cell, { align: "right", ...(r + 1 === row && { color: this.colors.ink, weight: 700 }) }));
    names.forEach((name, c) => c % step === 0 && this.text(ctx, name, x + (c + 0.5) * cw, g.y + rows * cell + 5, { align: "right", turn: -Math.PI / 2 }));
    m.h.sub.textContent = `depth reads at ${pos}, ${clip(glyphs(p.tokens[pos]), 14)}`;
    m.why.textContent = r0 ? `Row: a read. Column: ${r0.what}.` : "not in this trace";
    m.base.setAttribute("aria-label", `Model ${p.letter}: depth map of position ${pos}, ${this.mode.label}`);
    m.base.dataset.geom = JSON.stringify(g);
  }

  sequence(m) {
    const p = this.panels[m.i], site = this.site(m.i), at = p.lookAt(site), pos = this.clamp(m.i), W = m.frame.clientWidth;
    const words = this.strip(p, 3, 9), x = Math.min(58, Math.max(26, words.wide + 8)), size = Math.min(W - x - 2, 256), cell = size / p.T;
    const g = (m.geom = { x, y: 3, cw: cell, ch: cell, cols: p.T, rows: p.T, up: false });
    const strip = { ...words, every: Math.max(1, Math.ceil(11.5 / cell)) }, H = g.y + size + strip.height + 4;
    const ctx = this.fit(m.base, W, H);
    this.fit(m.over, W, H);
    m.h.sub.textContent = at ? `${at} looks back, mean of ${p.heads[at]} heads` : "";
    if (!at) { m.geom = null; m.why.textContent = "no sequence attention in this trace"; return; }
    this.mask(ctx, x, g.y, size, size, (px, py) => py < px - cell * 0.5);
    this.cells(ctx, g, this.lut.warm, (c, r) => (c > r ? null : this.shadeWeight(p.attention(at, r, c))), (c, r) => p.attention(at, r, c));
    this.positions(ctx, p, g, strip, pos);
    strip.words.forEach((word, r) => {
      if (r !== pos && (r % strip.every || Math.abs(r - pos) * cell < 11)) return;
      this.text(ctx, word, x - 5, g.y + (r + 0.5) * cell, { align: "right", ...(r === pos && { color: this.colors.ink, weight: 700 }) });
    });
    m.why.textContent = (at === site ? "" : `${site} reads only its own position; shown: ${at}. `) + `Row: query. Column: key.` +
      (cell * devicePixelRatio < 1 ? " Downsampled: a pixel averages several cells; hover is exact." : "");
    m.base.setAttribute("aria-label", `Model ${p.letter}: sequence map of ${at}`);
    m.base.dataset.geom = JSON.stringify(g);
  }

  // ---- marks above a map: the choice and the hovered cell, without drawing the map again
  mark(m) {
    const ctx = m.over.getContext("2d"), g = m.geom, p = this.panels[m.i], h = this.hover;
    ctx.clearRect(0, 0, m.over.width, m.over.height);
    if (!g) return;
    const box = (c, r, across, line) => {
      let [x, y, w, b] = this.rect(g, c, r);
      if (across) { x = g.x; w = g.cols * g.cw; }
      if (w < 8) { x -= (8 - w) / 2; w = 8; }
      if (b < 8) { y -= (8 - b) / 2; b = 8; }
      ctx.lineWidth = line + 2; ctx.strokeStyle = this.colors.paper; ctx.strokeRect(x, y, w, b);
      ctx.lineWidth = line; ctx.strokeStyle = this.colors.ink; ctx.strokeRect(x, y, w, b);
    };
    const site = this.site(m.i), row = p.row.get(site), pos = this.clamp(m.i), from = h && this.panels[h.m.i];
    if (m.kind === "grid") box(pos, row, false, 2);
    if (m.kind === "depth" && row > 0) box(0, row - 1, true, 1);
    if (m.kind === "sequence") box(0, pos, true, 1);
    if (!h) return;
    const own = (name) => p.row.get(p.same(name, from));
    if (h.m.kind === m.kind) {
      if (m.kind === "grid" && h.c < p.T) box(h.c, own(from.rows[h.r]), false, 1);
      if (m.kind === "sequence" && h.c < p.T && h.r < p.T) box(h.c, h.r, false, 1);
      const c = m.kind === "depth" ? (p.reads[this.view.depth]?.names ?? []).indexOf(from.reads[this.view.depth].names[h.c]) : -1;
      if (c >= 0) box(c, own(from.rows[h.r + 1]) - 1, false, 1);
    } else if (m.kind === "grid" && h.m.kind === "depth") {
      const read = own(from.rows[h.r + 1]), name = from.reads[this.view.depth].names[h.c], s = p.read(this.view.depth, read, pos).find((o) => o.name === name);
      box(pos, read, false, 1);
      for (const a of (s ? s.atoms : [])) if (p.row.has(a)) box(pos, p.row.get(a), false, 1);
    } else if (m.kind === "grid" && h.c < p.T && h.r < p.T) {
      box(h.c, p.row.get(p.lookAt(site)), false, 1); box(h.r, p.row.get(p.lookAt(site)), false, 1);
    } else if (m.kind === "sequence" && h.m.kind === "grid" && h.c <= pos) box(h.c, pos, false, 1);
    else if (m.kind === "depth" && h.m.kind === "grid" && row > 0) {
      const s = p.read(this.view.depth, row, pos).find((o) => o.atoms.includes(p.rows[own(from.rows[h.r])]));
      if (s && h.c === pos) box(s.index, row - 1, false, 1);
    }
  }

  legend() {
    const s = 13, draw = [() => {}, (c) => this.mask(c, 0, 0, s, s), (c) => { c.fillStyle = css(this.lut.warm[0]); c.fillRect(0, 0, s, s);
      c.fillStyle = this.colors.mute; c.fillRect(s / 2 - 1, s / 2 - 1, 2, 2); }, (c) => this.hatch(c, 0, 0, s, s), (c) => {
      c.fillStyle = css(this.lut.cool[255]); c.fillRect(0, 0, s, s); this.corner(c, { x: 0, y: 0, cw: s, ch: s, cols: 1, rows: 1 }, 0, 0); }];
    this.keys.forEach((canvas, i) => {
      const ctx = this.fit(canvas, s, s);
      draw[i](ctx);
      ctx.strokeStyle = this.colors.hair; ctx.strokeRect(0.5, 0.5, s - 1, s - 1);
    });
  }
  bars() {
    const draw = ({ text, canvas }, label, table, ticks, arrow) => {
      text.textContent = label;
      const W = 190, ctx = this.fit(canvas, W + 40, 25);
      for (let i = 0; i < W; i++) { ctx.fillStyle = css(table[Math.round((255 * i) / (W - 1))]); ctx.fillRect(20 + i, 0, 1, 9); }
      ctx.strokeStyle = this.colors.hair; ctx.strokeRect(19.5, 0.5, W + 1, 9);
      if (arrow) { ctx.fillStyle = css(table[255]); ctx.beginPath(); ctx.moveTo(22 + W, 0); ctx.lineTo(30 + W, 4.5); ctx.lineTo(22 + W, 9); ctx.fill(); }
      for (const [t, s] of ticks) { ctx.fillStyle = this.colors.mute; ctx.fillRect(20 + t * W - 0.5, 9, 1, 3); this.text(ctx, s, 20 + t * W, 19, { size: 10 }); }
    };
    const q = this.quantity, both = this.panels.length > 1 ? "one range for A and B" : "range of this trace", mid = (q.lo + q.hi) / 2;
    draw(this.cool, `${q.label}${q.unit ? ` (${q.unit})` : ""}: ${both}${q.above ? `; ${q.above} cells above it` : ""}`, this.lut[q.signed ? "both" : "cool"],
      [[0, fmt(q.lo, 3)], [0.5, fmt(mid, 3)], [1, fmt(q.hi, 3)]], q.above);
    const hi = this.mode.hi, half = [0, 0.05, 0.25, 1].map((f) => [f, f * hi]);
    draw(this.warm, `${this.mode.label}: ${both}, root scale`, this.readLut, this.mode.signed
      ? [[-1, -hi], [-0.25, -hi / 4], [0, 0], [0.25, hi / 4], [1, hi]].map(([f, v]) => [(ROOT(f, 1) + 1) / 2, fmt(v, 2)])
      : half.map(([f, v]) => [ROOT(f, 1), fmt(v, 2)]));
  }
}
