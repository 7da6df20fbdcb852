// The three kinds of map, the cross of the chosen node, and the marks. One part of the module that maps.js describes.

Object.assign(View.prototype, {
  grid(m) {
    const p = this.panels[m.i],
      W = m.frame.clientWidth,
      rows = p.rows.length,
      q = this.quantity;
    const most = Math.max(...this.panels.map((o) => o.rows.length)),
      x = 46,
      cw = (W - x - 2) / p.T;
    const ch = (most * (most > 22 ? 13 : 16)) / rows,
      strip = this.strip(p, cw); // same height in A and B: same relative depth
    const g = (m.geom = { x, y: 3, cw, ch, cols: p.T, rows, up: true }),
      H = g.y + rows * ch + strip.height + 4;
    const ctx = this.fit(m.base, W, H);
    this.fit(m.over, W, H);
    const absent = p.absent[q.key],
      blank = p.rows.map((_, r) => p.why(q.key, r) !== "");
    const value = (c, r) => (blank[r] ? null : p.value(q.key, r, c));
    this.cells(ctx, m, q.key, this.lut[q.signed ? "both" : "cool"], value, (v) => this.shade(v, q));
    if (q.above)
      for (let r = 1; r < rows; r++)
        for (let c = 0; c < p.T; c++) if (p.value(q.key, r, c) > q.hi) this.corner(ctx, g, c, r);
    const site = this.site(m.i),
      row = p.row.get(site),
      pos = this.clamp(m.i);
    p.rows.forEach((name, r) => {
      const y = g.y + (rows - 1 - r + 0.5) * ch;
      this.text(ctx, name, x - 6, y, { align: "right", ...(r === row && { color: this.colors.ink, weight: 700 }) });
    });
    this.positions(ctx, p, g, strip, pos);
    this.cross(ctx, g, p, row, pos);
    if (absent) {
      // said where the cross leaves room
      const room = rows - 1 - row,
        mid = x + (p.T * cw) / 2,
        y = g.y + (room > 2 ? room / 2 : rows * 0.7) * ch;
      ctx.font = `13px ${this.font}`;
      const w = ctx.measureText(absent).width + 16;
      ctx.fillStyle = this.colors.paper;
      ctx.fillRect(mid - w / 2, y - 11, w, 22);
      this.text(ctx, absent, mid, y, { size: 13 });
    }
    const own = p.sequence[site],
      mode = this.mode.label.toLowerCase();
    m.why.textContent =
      site === "embed"
        ? "embed is written, not read: it has no cross."
        : `Down: what ${site} reads in depth (${mode}). ` +
          (own
            ? `Left: where it looks in the sequence (${p.headNote(site)}).`
            : `No arm to the left: ${site} reads only its own position.`);
    m.base.setAttribute(
      "aria-label",
      `Model ${p.letter}, ${p.name}: map of ${q.label} by position and depth. ` +
        `Chosen: ${site} at position ${pos}, token ${glyphs(p.tokens[pos])}. Arrow keys move.`,
    );
    Object.assign(m.base.dataset, { geom: JSON.stringify(g), site, pos });
  },
  cross(ctx, g, p, row, pos) {
    const { ink, paper } = this.colors,
      mid = g.x + (pos + 0.5) * g.cw,
      w = Math.max(g.cw, 11),
      warm = this.lut.warm,
      notes = [];
    const frame = (x, y, a, b) => {
      ctx.lineWidth = 3;
      ctx.strokeStyle = paper;
      ctx.strokeRect(x, y, a, b);
      ctx.lineWidth = 1;
      ctx.strokeStyle = ink;
      ctx.strokeRect(x, y, a, b);
    };
    const level = (r) => g.y + (g.rows - 1 - r) * g.ch;
    if (p.sequence[p.rows[row]]) {
      const first = Math.max(0, pos + 1 - (p.windows[p.rows[row]] || pos + 1)),
        best = [];
      frame(g.x + first * g.cw - 0.5, level(row) - 0.5, (pos + 1 - first) * g.cw + 1, g.ch + 1);
      for (let k = first; k <= pos; k++) {
        const v = p.attention(p.rows[row], pos, k),
          s = this.shadeWeight(v),
          [x, y, a, b] = this.rect(g, k, row);
        ctx.fillStyle = s === "nan" ? paper : css(warm[s]);
        ctx.fillRect(x, y, a, b);
        if (s === "nan") this.hatch(ctx, x, y, a, b);
        else best.push([v, k]);
      }
      for (const [v, k] of best.sort((a, b) => b[0] - a[0]).slice(0, 4))
        if (v >= 0.08 && k < pos)
          notes.push([v.toFixed(2), Math.max(g.x + 11, g.x + (k + 0.5) * g.cw), level(row) - 7, "center"]);
    }
    const reads = p.read(this.view.depth, row, pos),
      left = Math.round(mid - w / 2),
      side = pos * g.cw > g.cw * g.cols - 70 ? -1 : 1;
    const lanes = []; // brackets that overlap lie side by side
    const even = reads.length > 1 && reads.every((s) => s.value === reads[0].value);
    const spans = reads
      .map((s) => [s, s.atoms.map((a) => p.row.get(a)).filter((r) => r !== undefined)])
      .filter(([, at]) => at.length);
    const nested = spans.some(
      ([s, at]) => at.length > 1 && spans.some(([o, other]) => o !== s && other.length > 1 && at.includes(other[0])),
    );
    for (const [s, at] of spans.sort((a, b) => Math.max(...b[1]) - Math.max(...a[1]))) {
      const k = this.shadeRead(s.value),
        lo = Math.min(...at),
        hi = Math.max(...at),
        y = level(hi),
        h = (hi - lo + 1) * g.ch;
      const many = at.length > 1,
        free = lanes.findIndex((used) => used.every(([l, u]) => u < lo || hi < l)),
        lane = free < 0 ? lanes.length : free;
      if (many) (lanes[lane] = lanes[lane] || []).push([lo, hi]);
      const x = many ? (side > 0 ? left + w + 3 + 9 * lane : left - 9 - 9 * lane) : left,
        a = many ? 6 : w;
      frame(x - 0.5, y + 0.5, a + 1, h - 1);
      ctx.fillStyle = k === "nan" ? paper : css(this.readLut[k]);
      ctx.fillRect(x, y + 1, a, h - 2);
      if (k === "nan") this.hatch(ctx, x, y + 1, a, h - 2);
      if (many) {
        ctx.fillStyle = ink;
        for (const e of [y + 0.5, y + h - 1.5])
          ctx.fillRect(side > 0 ? left + 1 : x, e, side > 0 ? x - left : left + w - x, 1);
      }
      s.note = [
        fmt(s.value, 2),
        side > 0 ? x + a + 4 : x - 4,
        y + (nested ? g.ch : h) / 2,
        side > 0 ? "left" : "right",
      ];
    }
    const most = Math.max(...reads.map((s) => Math.abs(s.value)));
    const ranked = reads
      .filter((s) => s.note && Math.abs(s.value) >= 0.02 * most)
      .sort((a, b) => Math.abs(b.value) - Math.abs(a.value))
      .slice(0, even ? 1 : 4);
    if (even && ranked.length) ranked[0].note[0] += ` each (${reads.length})`;
    const near = (m, n) => m !== n && Math.abs(m[2] - n[2]) < 9 && Math.abs(m[1] - n[1]) < 26;
    const placed = [];
    for (const n of [...ranked.map((s) => s.note), ...notes]) if (!placed.some((m) => near(m, n))) placed.push(n);
    for (const [s, x, y, align] of placed)
      this.text(ctx, s, x, y, { align, size: 10, color: ink, weight: 600, halo: true });
  },

  depth(m) {
    const p = this.panels[m.i],
      pos = this.clamp(m.i),
      r0 = p.reads[this.view.depth],
      names = r0 ? r0.names : [],
      rows = p.rows.length - 1;
    const W = m.frame.clientWidth,
      x = 46,
      most = Math.max(...this.panels.map((o) => o.rows.length - 1));
    const cell = (Math.min(16, 240 / most) * most) / rows,
      cw = Math.min(26, (W - x - 2) / Math.max(1, names.length));
    const g = (m.geom = { x, y: 3, cw, ch: cell, cols: names.length, rows, up: true }),
      H = g.y + rows * cell + 52;
    const ctx = this.fit(m.base, W, H);
    this.fit(m.over, W, H);
    const table = p.rows
      .slice(1)
      .map((_, r) => new Map(p.read(this.view.depth, r + 1, pos).map((s) => [s.index, s.value])));
    const value = (c, r) => (table[r].has(c) ? table[r].get(c) : null);
    this.cells(ctx, m, `${this.mode.key} ${pos}`, this.readLut, value, (v) => this.shadeRead(v));
    const row = p.row.get(this.site(m.i)),
      every = Math.ceil(10.5 / cell),
      step = Math.ceil(10 / cw);
    p.rows.slice(1).forEach(
      (name, r) =>
        (r + 1 === row || (r % every === 0 && Math.abs(r + 1 - row) * cell >= 10)) &&
        this.text(ctx, name, x - 6, g.y + (rows - 1 - r + 0.5) * cell, {
          align: "right",
          ...(r + 1 === row && { color: this.colors.ink, weight: 700 }),
        }),
    );
    names.forEach(
      (name, c) =>
        c % step === 0 &&
        this.text(ctx, name, x + (c + 0.5) * cw, g.y + rows * cell + 5, { align: "right", turn: -Math.PI / 2 }),
    );
    m.h.sub.textContent = `depth reads at ${pos}, ${clip(glyphs(p.tokens[pos]), 14)}`;
    m.why.textContent = r0 ? `Row: a read. Column: ${r0.what}.` : "not in this trace";
    m.base.setAttribute("aria-label", `Model ${p.letter}: depth map of position ${pos}, ${this.mode.label}`);
    m.base.dataset.geom = JSON.stringify(g);
  },

  sequence(m) {
    const p = this.panels[m.i],
      site = this.site(m.i),
      at = p.lookAt(site),
      pos = this.clamp(m.i),
      W = m.frame.clientWidth;
    const words = this.strip(p, 3, 9),
      x = Math.min(58, Math.max(26, words.wide + 8)),
      size = Math.min(W - x - 2, 256),
      cell = size / p.T;
    const g = (m.geom = { x, y: 3, cw: cell, ch: cell, cols: p.T, rows: p.T, up: false });
    const strip = { ...words, every: Math.max(1, Math.ceil(11.5 / cell)) },
      H = g.y + size + strip.height + 4;
    const ctx = this.fit(m.base, W, H);
    this.fit(m.over, W, H);
    m.h.sub.textContent = at ? `${at} looks back, ${p.headNote(at)}` : "";
    if (!at) {
      m.geom = null;
      m.why.textContent = "no sequence attention in this trace";
      return;
    }
    this.mask(ctx, x, g.y, size, size, (px, py) => p.masked(at, Math.floor(py / cell), Math.floor(px / cell)));
    const value = (c, r) => (p.masked(at, r, c) ? null : p.attention(at, r, c));
    this.cells(ctx, m, `${at} ${p.one(at)}`, this.lut.warm, value, (v) => this.shadeWeight(v));
    this.positions(ctx, p, g, strip, pos);
    strip.words.forEach((word, r) => {
      if (r !== pos && (r % strip.every || Math.abs(r - pos) * cell < 11)) return;
      this.text(ctx, word, x - 5, g.y + (r + 0.5) * cell, {
        align: "right",
        ...(r === pos && { color: this.colors.ink, weight: 700 }),
      });
    });
    m.why.textContent =
      (at === site ? "" : `${site} reads only its own position; shown: ${at}. `) +
      `Row: query. Column: key.` +
      (cell * devicePixelRatio < 1 ? " Downsampled: a pixel averages several cells; hover is exact." : "");
    m.base.setAttribute("aria-label", `Model ${p.letter}: sequence map of ${at}`);
    m.base.dataset.geom = JSON.stringify(g);
  },

  // ---- marks above a map: the choice and the hovered cell, without drawing the map again
  mark(m) {
    const ctx = m.over.getContext("2d"),
      g = m.geom,
      p = this.panels[m.i],
      h = this.hover;
    ctx.clearRect(0, 0, m.over.width, m.over.height);
    if (!g) return;
    const box = (c, r, across, line) => {
      let [x, y, w, b] = this.rect(g, c, r);
      if (across) {
        x = g.x;
        w = g.cols * g.cw;
      }
      if (w < 8) {
        x -= (8 - w) / 2;
        w = 8;
      }
      if (b < 8) {
        y -= (8 - b) / 2;
        b = 8;
      }
      ctx.lineWidth = line + 2;
      ctx.strokeStyle = this.colors.paper;
      ctx.strokeRect(x, y, w, b);
      ctx.lineWidth = line;
      ctx.strokeStyle = this.colors.ink;
      ctx.strokeRect(x, y, w, b);
    };
    const site = this.site(m.i),
      row = p.row.get(site),
      pos = this.clamp(m.i),
      from = h && this.panels[h.m.i];
    if (m.kind === "grid") box(pos, row, false, 2);
    if (m.kind === "depth" && row > 0) box(0, row - 1, true, 1);
    if (m.kind === "sequence") box(0, pos, true, 1);
    if (!h) return;
    const own = (name) => p.row.get(p.same(name, from));
    if (h.m.kind === m.kind) {
      if (m.kind === "grid" && h.c < p.T) box(h.c, own(from.rows[h.r]), false, 1);
      if (m.kind === "sequence" && h.c < p.T && h.r < p.T) box(h.c, h.r, false, 1);
      const c =
        m.kind === "depth"
          ? (p.reads[this.view.depth]?.names ?? []).indexOf(from.reads[this.view.depth].names[h.c])
          : -1;
      if (c >= 0) box(c, own(from.rows[h.r + 1]) - 1, false, 1);
    } else if (m.kind === "grid" && h.m.kind === "depth") {
      const read = own(from.rows[h.r + 1]),
        name = from.reads[this.view.depth].names[h.c],
        s = p.read(this.view.depth, read, pos).find((o) => o.name === name);
      box(pos, read, false, 1);
      for (const a of s ? s.atoms : []) if (p.row.has(a)) box(pos, p.row.get(a), false, 1);
    } else if (m.kind === "grid" && h.c < p.T && h.r < p.T) {
      box(h.c, p.row.get(p.lookAt(site)), false, 1);
      box(h.r, p.row.get(p.lookAt(site)), false, 1);
    } else if (m.kind === "sequence" && h.m.kind === "grid" && h.c <= pos) box(h.c, pos, false, 1);
    else if (m.kind === "depth" && h.m.kind === "grid" && row > 0) {
      const s = p.read(this.view.depth, row, pos).find((o) => o.atoms.includes(p.rows[own(from.rows[h.r])]));
      if (s && h.c === pos) box(s.index, row - 1, false, 1);
    }
  },
});
