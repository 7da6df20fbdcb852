// Drawing of the two-axis maps on canvases; one part of the module that maps.js describes.

Object.assign(View.prototype, {
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
    for (const p of this.panels) p.head = this.view.head;
    this.bars();
    this.legend();
    for (const m of this.maps) { this[m.kind](m); this.mark(m); }
    this.detail();
  },
  // LUT index of a value, or the name of the state that is not a number
  shade(v, lo, hi) { return Number.isFinite(v) ? Math.max(0, Math.min(255, Math.round((255 * (v - lo)) / (hi - lo || 1)))) : "nan"; },
  shadeRead(v) { const t = ROOT(v, this.mode.hi); return Number.isFinite(v) ? Math.round(this.mode.signed ? 127.5 * (t + 1) : 255 * Math.max(0, t)) : "nan"; },
  shadeWeight(v) { return Number.isFinite(v) ? Math.round(255 * ROOT(Math.max(0, v), this.payload.sequenceHi)) : "nan"; },

  fit(canvas, w, h) {
    const s = devicePixelRatio || 1, ctx = canvas.getContext("2d");
    canvas.width = Math.round(w * s); canvas.height = Math.round(h * s);
    canvas.style.width = `${w}px`; canvas.style.height = `${h}px`;
    ctx.setTransform(s, 0, 0, s, 0, 0);
    return ctx;
  },
  text(ctx, s, x, y, { align = "center", color = this.colors.mute, size = 10.5, weight = 400, turn = 0, halo = false } = {}) {
    ctx.save();
    ctx.font = `${weight} ${size}px ${this.font}`;
    ctx.textAlign = align; ctx.textBaseline = "middle"; ctx.fillStyle = color;
    ctx.translate(x, y); ctx.rotate(turn);
    if (halo) { ctx.strokeStyle = this.colors.paper; ctx.lineWidth = 3; ctx.lineJoin = "round"; ctx.strokeText(s, 0, 0); }
    ctx.fillText(s, 0, 0);
    ctx.restore();
  },
  hatch(ctx, x, y, w, h) {
    ctx.save();
    ctx.beginPath(); ctx.rect(x, y, w, h); ctx.clip();
    ctx.strokeStyle = this.colors.mute; ctx.lineWidth = 0.8; ctx.beginPath();
    for (let k = -h; k < w; k += 4) { ctx.moveTo(x + k, y + h); ctx.lineTo(x + k + h, y); }
    ctx.stroke(); ctx.restore();
  },
  mask(ctx, x, y, w, h, free = () => true) {
    ctx.save();
    ctx.fillStyle = this.colors.mute; ctx.globalAlpha = 0.5;
    for (let px = 2; px < w; px += 5) for (let py = 2; py < h; py += 5) if (free(px, py)) ctx.fillRect(Math.round(x + px), Math.round(y + py), 1, 1);
    ctx.restore();
  },

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
  },
  rect(g, c, r) {
    const k = g.up ? g.rows - 1 - r : r, x = Math.round(g.x + c * g.cw), y = Math.round(g.y + k * g.ch);
    return [x, y, Math.round(g.x + (c + 1) * g.cw) - x, Math.round(g.y + (k + 1) * g.ch) - y];
  },
  // the token strip below an axis: level when the words fit, upright when not, thinned when many
  strip(p, cw, most = 12) {
    const ctx = el("canvas").getContext("2d"), words = p.tokens.map((t) => clip(glyphs(t), most));
    ctx.font = `600 10.5px ${this.font}`;
    const wide = Math.max(...words.map((w) => ctx.measureText(w).width)), level = wide <= cw - 4;
    return { words, level, wide, every: level ? 1 : Math.max(1, Math.ceil(11.5 / cw)), height: 17 + (level ? 13 : wide) };
  },
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
  },

  grid(m) {
    const p = this.panels[m.i], W = m.frame.clientWidth, rows = p.rows.length, q = this.quantity;
    const most = Math.max(...this.panels.map((o) => o.rows.length)), x = 46, cw = (W - x - 2) / p.T;
    const ch = (most * (most > 22 ? 13 : 16)) / rows, strip = this.strip(p, cw);  // same height in A and B: same relative depth
    const g = (m.geom = { x, y: 3, cw, ch, cols: p.T, rows, up: true }), H = g.y + rows * ch + strip.height + 4;
    const ctx = this.fit(m.base, W, H);
    this.fit(m.over, W, H);
    const absent = p.absent[q.key], blank = p.rows.map((_, r) => p.why(q.key, r) !== "");
    this.cells(ctx, g, this.lut[q.signed ? "both" : "cool"], (c, r) => (blank[r] ? null : this.shade(p.value(q.key, r, c), q.lo, q.hi)),
      (c, r) => (blank[r] ? NaN : p.value(q.key, r, c)));
    if (q.above) for (let r = 1; r < rows; r++) for (let c = 0; c < p.T; c++) if (p.value(q.key, r, c) > q.hi) this.corner(ctx, g, c, r);
    const site = this.site(m.i), row = p.row.get(site), pos = this.clamp(m.i);
    p.rows.forEach((name, r) => {
      const y = g.y + (rows - 1 - r + 0.5) * ch;
      this.text(ctx, name, x - 6, y, { align: "right", ...(r === row && { color: this.colors.ink, weight: 700 }) });
    });
    this.positions(ctx, p, g, strip, pos);
    this.cross(ctx, g, p, row, pos);
    this.cross(ctx, g, p, row, pos);
    if (absent) {  // said where the cross leaves room
      const room = rows - 1 - row, mid = x + (p.T * cw) / 2, y = g.y + (room > 2 ? room / 2 : rows * 0.7) * ch;
      ctx.font = `13px ${this.font}`;
      const w = ctx.measureText(absent).width + 16;
      ctx.fillStyle = this.colors.paper;
      ctx.fillRect(mid - w / 2, y - 11, w, 22);
      this.text(ctx, absent, mid, y, { size: 13 });
    }
    const own = p.sequence[site], mode = this.mode.label.toLowerCase();
    m.why.textContent = site === "embed" ? "embed is written, not read: it has no cross."
      : `Down: what ${site} reads in depth (${mode}). ` + (own ? `Left: where it looks in the sequence (${p.headNote(site)}).`
        : `No arm to the left: ${site} reads only its own position.`);
    m.base.setAttribute("aria-label", `Model ${p.letter}, ${p.name}: map of ${q.label} by position and depth. ` +
      `Chosen: ${site} at position ${pos}, token ${glyphs(p.tokens[pos])}. Arrow keys move.`);
    Object.assign(m.base.dataset, { geom: JSON.stringify(g), site, pos });
  },
  corner(ctx, g, c, r) {
    const [x, y, w] = this.rect(g, c, r), s = Math.min(5, w);
    ctx.fillStyle = this.colors.paper; ctx.beginPath();
    ctx.moveTo(x + w - s, y); ctx.lineTo(x + w, y); ctx.lineTo(x + w, y + s); ctx.fill();
  },
  cross(ctx, g, p, row, pos) {
    const { ink, paper } = this.colors, mid = g.x + (pos + 0.5) * g.cw, w = Math.max(g.cw, 11), warm = this.lut.warm, notes = [];
    const frame = (x, y, a, b) => { ctx.lineWidth = 3; ctx.strokeStyle = paper; ctx.strokeRect(x, y, a, b); ctx.lineWidth = 1; ctx.strokeStyle = ink; ctx.strokeRect(x, y, a, b); };
    const level = (r) => g.y + (g.rows - 1 - r) * g.ch;
    if (p.sequence[p.rows[row]]) {
      const first = Math.max(0, pos + 1 - (p.windows[p.rows[row]] || pos + 1)), best = [];
      frame(g.x + first * g.cw - 0.5, level(row) - 0.5, (pos + 1 - first) * g.cw + 1, g.ch + 1);
      for (let k = first; k <= pos; k++) {
        const v = p.attention(p.rows[row], pos, k), s = this.shadeWeight(v), [x, y, a, b] = this.rect(g, k, row);
        if (s === "nan") { ctx.fillStyle = paper; ctx.fillRect(x, y, a, b); this.hatch(ctx, x, y, a, b); continue; }
        ctx.fillStyle = css(warm[s]); ctx.fillRect(x, y, a, b);
        best.push([v, k]);
      }
      for (const [v, k] of best.sort((a, b) => b[0] - a[0]).slice(0, 4)) if (v >= 0.08 && k < pos)
        notes.push([v.toFixed(2), Math.max(g.x + 11, g.x + (k + 0.5) * g.cw), level(row) - 7, "center"]);
    }
    const reads = p.read(this.view.depth, row, pos), left = Math.round(mid - w / 2), side = pos * g.cw > g.cw * g.cols - 70 ? -1 : 1;
    const lanes = [];  // brackets that overlap lie side by side
    const even = reads.length > 1 && reads.every((s) => s.value === reads[0].value);
    const spans = reads.map((s) => [s, s.atoms.map((a) => p.row.get(a)).filter((r) => r !== undefined)]).filter(([, at]) => at.length);
    const nested = spans.some(([s, at]) => at.length > 1 && spans.some(([o, other]) => o !== s && other.length > 1 && at.includes(other[0])));
    for (const [s, at] of spans.sort((a, b) => Math.max(...b[1]) - Math.max(...a[1]))) {
      const k = this.shadeRead(s.value), lo = Math.min(...at), hi = Math.max(...at), y = level(hi), h = (hi - lo + 1) * g.ch;
      const many = at.length > 1, free = lanes.findIndex((used) => used.every(([l, u]) => u < lo || hi < l)), lane = free < 0 ? lanes.length : free;
      if (many) (lanes[lane] = lanes[lane] || []).push([lo, hi]);
      const x = many ? (side > 0 ? left + w + 3 + 9 * lane : left - 9 - 9 * lane) : left, a = many ? 6 : w;
      frame(x - 0.5, y + 0.5, a + 1, h - 1);
      if (k === "nan") this.hatch(ctx, x, y + 1, a, h - 2);
      else { ctx.fillStyle = css(this.readLut[k]); ctx.fillRect(x, y + 1, a, h - 2); }
      if (many) { ctx.fillStyle = ink; for (const e of [y + 0.5, y + h - 1.5]) ctx.fillRect(side > 0 ? left + 1 : x, e, side > 0 ? x - left : left + w - x, 1); }
      s.note = [fmt(s.value, 2), side > 0 ? x + a + 4 : x - 4, y + (nested ? g.ch : h) / 2, side > 0 ? "left" : "right"];
    }
    const ranked = reads.filter((s) => s.note).sort((a, b) => Math.abs(b.value) - Math.abs(a.value)).slice(0, even ? 1 : 4);
    if (even && ranked.length) ranked[0].note[0] += ` each (${reads.length})`;
    const near = (m, n) => m !== n && Math.abs(m[2] - n[2]) < 9 && Math.abs(m[1] - n[1]) < 26;
    const placed = [];
    for (const n of [...ranked.map((s) => s.note), ...notes]) if (!placed.some((m) => near(m, n))) placed.push(n);
    for (const [s, x, y, align] of placed) this.text(ctx, s, x, y, { align, size: 10, color: ink, weight: 600, halo: true });
  },

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
  },

  sequence(m) {
    const p = this.panels[m.i], site = this.site(m.i), at = p.lookAt(site), pos = this.clamp(m.i), W = m.frame.clientWidth;
    const words = this.strip(p, 3, 9), x = Math.min(58, Math.max(26, words.wide + 8)), size = Math.min(W - x - 2, 256), cell = size / p.T;
    const g = (m.geom = { x, y: 3, cw: cell, ch: cell, cols: p.T, rows: p.T, up: false });
    const strip = { ...words, every: Math.max(1, Math.ceil(11.5 / cell)) }, H = g.y + size + strip.height + 4;
    const ctx = this.fit(m.base, W, H);
    this.fit(m.over, W, H);
    m.h.sub.textContent = at ? `${at} looks back, ${p.headNote(at)}` : "";
    if (!at) { m.geom = null; m.why.textContent = "no sequence attention in this trace"; return; }
    this.mask(ctx, x, g.y, size, size, (px, py) => p.masked(at, Math.floor(py / cell), Math.floor(px / cell)));
    this.cells(ctx, g, this.lut.warm, (c, r) => (p.masked(at, r, c) ? null : this.shadeWeight(p.attention(at, r, c))), (c, r) => p.attention(at, r, c));
    this.positions(ctx, p, g, strip, pos);
    strip.words.forEach((word, r) => {
      if (r !== pos && (r % strip.every || Math.abs(r - pos) * cell < 11)) return;
      this.text(ctx, word, x - 5, g.y + (r + 0.5) * cell, { align: "right", ...(r === pos && { color: this.colors.ink, weight: 700 }) });
    });
    m.why.textContent = (at === site ? "" : `${site} reads only its own position; shown: ${at}. `) + `Row: query. Column: key.` +
      (cell * devicePixelRatio < 1 ? " Downsampled: a pixel averages several cells; hover is exact." : "");
    m.base.setAttribute("aria-label", `Model ${p.letter}: sequence map of ${at}`);
    m.base.dataset.geom = JSON.stringify(g);
  },

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
  },

  legend() {
    const s = 13, draw = [() => {}, (c) => this.mask(c, 0, 0, s, s), (c) => { c.fillStyle = css(this.lut.warm[0]); c.fillRect(0, 0, s, s);
      c.fillStyle = this.colors.mute; c.fillRect(s / 2 - 1, s / 2 - 1, 2, 2); }, (c) => this.hatch(c, 0, 0, s, s), (c) => {
      c.fillStyle = css(this.lut.cool[255]); c.fillRect(0, 0, s, s); this.corner(c, { x: 0, y: 0, cw: s, ch: s, cols: 1, rows: 1 }, 0, 0); }];
    this.keys.forEach((canvas, i) => {
      const ctx = this.fit(canvas, s, s);
      draw[i](ctx);
      ctx.strokeStyle = this.colors.hair; ctx.strokeRect(0.5, 0.5, s - 1, s - 1);
    });
  },
  bars() {
    const draw = ({ text, canvas }, label, table, ticks, arrow) => {
      text.textContent = label;
      const W = this.width < 1000 ? 108 : 150, ctx = this.fit(canvas, W + 40, 25);
      for (let i = 0; i < W; i++) { ctx.fillStyle = css(table[Math.round((255 * i) / (W - 1))]); ctx.fillRect(20 + i, 0, 1, 9); }
      ctx.strokeStyle = this.colors.hair; ctx.strokeRect(19.5, 0.5, W + 1, 9);
      if (arrow) { ctx.fillStyle = css(table[255]); ctx.beginPath(); ctx.moveTo(22 + W, 0); ctx.lineTo(30 + W, 4.5); ctx.lineTo(22 + W, 9); ctx.fill(); }
      for (const [t, s] of ticks) { ctx.fillStyle = this.colors.mute; ctx.fillRect(20 + t * W - 0.5, 9, 1, 3); this.text(ctx, s, 20 + t * W, 19, { size: 10 }); }
    };
    const q = this.quantity, mid = (q.lo + q.hi) / 2, hi = this.mode.hi;
    const root = (top) => [0, 0.05, 0.25, 1].map((f) => [ROOT(f, 1), fmt(f * top, 2)]);
    const both = [-1, -0.25, 0, 0.25, 1].map((f) => [(ROOT(f, 1) + 1) / 2, fmt(f * hi, 2)]);
    draw(this.cool, `${q.label}${q.unit && ` (${q.unit})`}${q.above ? `; ${q.above} above` : ""}`, this.lut[q.signed ? "both" : "cool"],
      [[0, fmt(q.lo, 3)], [0.5, fmt(mid, 3)], [1, fmt(q.hi, 3)]], q.above);
    draw(this.warm, `${this.mode.label}, root scale`, this.readLut, this.mode.signed ? both : root(hi));
    draw(this.back, "Sequence attention, root scale", this.lut.warm, root(this.payload.sequenceHi));
  },
});
