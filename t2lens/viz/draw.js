// The three kinds of map, the cross of the chosen node, and the marks. One part of the module that maps.js describes.

const CURSOR = "Arrow keys move a cursor, Enter goes there, Backspace goes back.";

Object.assign(View.prototype, {
  // where a grid of p lies in a frame: the same height in A, B and their difference, so the same relative depth
  place(m, p) {
    const most = Math.max(...this.panels.map((o) => o.rows.length)),
      rows = p.rows.length,
      x = this.gutter(p),
      cw = (m.wide - x - 2) / p.T,
      ch = (most * Math.min(16, Math.max(6, 460 / most))) / rows,
      strip = this.strip(p, cw);
    m.geom = { x, y: 14, cw, ch, cols: p.T, rows, up: true };
    return { g: m.geom, strip, H: 14 + rows * ch + strip.height + 4 };
  },
  // what the axes of a grid are
  axes(ctx, g) {
    const look = { align: "right", size: 9.5 };
    this.text(ctx, "depth \u2191", g.x - 6, 6, look);
    this.text(ctx, "position", g.x - 6, g.y + g.rows * g.ch + 8, look);
  },
  // room for the names of the sites
  gutter(p) {
    if (!p.gutter || p.gutter.font !== this.font) {
      const ctx = el("canvas").getContext("2d");
      ctx.font = `700 10.5px ${this.font}`;
      p.gutter = { font: this.font, wide: Math.ceil(Math.max(38, ...p.rows.map((name) => ctx.measureText(name).width))) };
    }
    return p.gutter.wide + 9;
  },
  rowNames(ctx, g, names, row) {
    const every = Math.ceil(10.5 / g.ch);
    names.forEach((name, r) => {
      if (r !== row && (r % every || (row >= 0 && Math.abs(r - row) * g.ch < 10))) return;
      const y = g.y + (g.rows - 1 - r + 0.5) * g.ch;
      this.text(ctx, name, g.x - 6, y, { align: "right", ...(r === row && { color: this.colors.ink, weight: 700 }) });
    });
  },
  grid(m) {
    const p = this.panels[m.i],
      q = this.quantity,
      { g, strip, H } = this.place(m, p),
      rows = g.rows;
    const ctx = this.fit(m.base, m.wide, H);
    this.fit(m.over, m.wide, H);
    const absent = p.absent[q.key] || (!p.grid[q.key] && p.why(q.key, 1)),
      blank = p.rows.map((_, r) => p.why(q.key, r) !== ""),
      fed = this.rollout(m.i),
      fills = fed && fed.numbers && this.at(m.i) >= 0;
    const value = (c, r) => (blank[r] ? null : p.value(q.key, r, c)),
      table = this.lut[q.signed ? "both" : "cool"];
    this.cells(ctx, m, `${q.key} ${p.way} ${Boolean(p.grid[q.key])}`, table, value, (v) => this.shade(v, q), { faint: fills });
    if (q.above && !fills && g.cw >= 3)
      for (let r = 1; r < rows; r++)
        for (let c = 0; c < p.T; c++) if (p.value(q.key, r, c) > q.hi) this.corner(ctx, g, c, r);
    const site = this.site(m.i),
      row = p.row.get(site),
      pos = this.at(m.i);
    this.rowNames(ctx, g, p.rows, row);
    this.positions(ctx, p, g, strip, pos);
    this.axes(ctx, g);
    if (fills) this.quadrant(ctx, m, g, p, row, pos, fed);
    else if (pos >= 0) this.cross(ctx, g, p, row, pos);
    if (absent) {
      // said where the cross leaves room
      const room = rows - 1 - row,
        y = g.y + (room > 2 ? room / 2 : rows * 0.7) * g.ch;
      this.sentence(ctx, absent, g.x + (p.T * g.cw) / 2, y, p.T * g.cw);
    }
    const own = p.looks(site),
      mode = this.mode.label.toLowerCase();
    const words =
      pos < 0
        ? this.alone(m.i)
        : this.view.layer === "rollout"
          ? this.fedWords(m.i, fed)
          : site === "embed"
            ? "embed is written, not read: it has no cross."
            : `Down: what ${site} reads in depth (${mode}). ` +
              (own
                ? `Left: where it looks in the sequence (${p.headNote(site)}).`
                : `No arm to the left: ${site} reads only its own position.`);
    const n = p.counted(q.key),
      without = rows * p.T - n,
      counted = n && `n = ${n} nodes${without ? `; the ${without} others have no such number and stay blank` : ""}.`;
    m.why.textContent = [words, counted, this.downsampled(g)].filter(Boolean).join(" ");
    m.base.setAttribute(
      "aria-label",
      `Model ${p.letter}, ${p.name}: map of ${q.label} by position and depth. ` +
        (pos < 0 ? "" : `Chosen: ${site} at position ${pos}, token ${glyphs(p.tokens[pos])}. `) +
        "Arrow keys move the chosen node, Enter goes down to what it reads most of, Shift and Enter to where it looks most, Backspace goes back.",
    );
    Object.assign(m.base.dataset, { geom: JSON.stringify(g), site, pos });
  },
  cross(ctx, g, p, row, pos) {
    const { ink, paper } = this.colors,
      mid = g.x + (pos + 0.5) * g.cw,
      // arms are narrower than their cells where there is room, so that what the cells themselves show stays in sight
      w = g.cw < 18 ? Math.max(g.cw, 11) : Math.round(0.56 * g.cw),
      tall = g.ch < 12 ? g.ch : Math.round(0.56 * g.ch),
      inset = Math.round((g.ch - tall) / 2),
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
    if (p.looks(p.rows[row]) && p.seen(p.rows[row], pos)) {
      const first = Math.max(0, pos + 1 - (p.windows[p.rows[row]] || pos + 1)),
        best = [];
      frame(g.x + first * g.cw - 0.5, level(row) + inset - 0.5, (pos + 1 - first) * g.cw + 1, tall + 1);
      // where several cells share a pixel, the arm shows the largest weight: a mean would hide a single key
      const [by] = this.blocks(g);
      for (let k = first; k <= pos; k += by) {
        let v = NaN;
        for (let j = k; j <= Math.min(pos, k + by - 1); j++) {
          const each = p.attention(p.rows[row], pos, j);
          if (Number.isFinite(each)) best.push([each, j]);
          if (!(v >= each) && (j === k || Number.isFinite(each))) v = each;
        }
        const s = this.shadeWeight(v),
          [x, , a] = this.rect(g, k, row),
          y = level(row) + inset;
        ctx.fillStyle = s === "nan" ? paper : css(warm[s]);
        ctx.fillRect(x, y, Math.max(a, Math.ceil(by * g.cw)), tall);
        if (s === "nan") this.hatch(ctx, x, y, a, tall);
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

  // where a depth map with these columns lies
  placeDepth(m, p, names) {
    const rows = p.rows.length - 1,
      x = this.gutter(p),
      most = Math.max(...this.panels.map((o) => o.rows.length - 1)),
      ch = (Math.min(16, Math.max(240, 3 * most) / most) * most) / rows,
      cw = Math.min(26, (m.wide - x - 2) / Math.max(1, names.length)),
      g = (m.geom = { x, y: 3, cw, ch, cols: names.length, rows, up: true });
    const tmp = el("canvas").getContext("2d");
    tmp.font = `10.5px ${this.font}`;
    const H = g.y + rows * ch + 9 + Math.max(43, ...names.map((name) => tmp.measureText(clip(name, 16)).width));
    const ctx = this.fit(m.base, m.wide, H);
    this.fit(m.over, m.wide, H);
    return { g, ctx };
  },
  depthLabels(ctx, g, p, names, row) {
    const step = Math.ceil(10.5 / g.cw);
    this.rowNames(ctx, g, p.rows.slice(1), row - 1);
    names.forEach(
      (name, c) =>
        c % step === 0 &&
        this.text(ctx, clip(name, 16), g.x + (c + 0.5) * g.cw, g.y + g.rows * g.ch + 5, { align: "right", turn: -Math.PI / 2 }),
    );
  },
  depth(m) {
    const p = this.panels[m.i],
      pos = this.at(m.i),
      r0 = p.table(this.view.depth, pos),
      names = r0 ? r0.names : [];
    const { g, ctx } = this.placeDepth(m, p, names);
    if (r0) {
      const table = r0.columns.map((columns, r) => new Map(columns.map((index, k) => [index, r0.number(r, k)])));
      const value = (c, r) => (table[r].has(c) ? table[r].get(c) : null);
      this.cells(ctx, m, `${this.mode.key} ${pos} ${p.way}`, this.readLut, value, (v) => this.shadeRead(v));
      this.depthLabels(ctx, g, p, names, p.row.get(this.site(m.i)));
    } else m.geom = null;
    m.h.sub.textContent = pos < 0 ? "depth reads" : `depth reads at ${pos}, ${isolated(clip(glyphs(p.tokens[pos]), 14))}`;
    m.why.textContent =
      pos < 0
        ? this.alone(m.i)
        : r0
          ? [`Row: a read. Column: ${r0.what}.`, this.downsampled(g)].filter(Boolean).join(" ")
          : p.lean && !p.answer("column", { pos })
            ? this.waiting("column", m.i, { pos })
            : "not in this trace";
    m.base.setAttribute("aria-label", `Model ${p.letter}: depth map of position ${pos}, ${this.mode.label}. ${CURSOR}`);
    m.base.dataset.geom = JSON.stringify(g);
  },

  // where a sequence map of p lies, square; a lean payload has one row of it
  placeSequence(m, p, line) {
    const words = this.strip(p, 3, 9),
      x = Math.min(58, Math.max(26, words.wide + 8)),
      size = line ? m.wide - x - 2 : Math.min(m.wide - x - 2, 256),
      cw = size / p.T,
      ch = line ? 18 : cw;
    const g = (m.geom = { x, y: 3, cw, ch, cols: p.T, rows: line ? 1 : p.T, up: false });
    const strip = { ...words, every: Math.max(1, Math.ceil(11.5 / cw)) },
      H = g.y + g.rows * ch + strip.height + 4;
    m.line = line;
    const ctx = this.fit(m.base, m.wide, H);
    this.fit(m.over, m.wide, H);
    return { g, ctx, strip };
  },
  queryNames(ctx, g, strip, pos) {
    strip.words.forEach((word, r) => {
      if (r !== pos && (r % strip.every || (pos >= 0 && Math.abs(r - pos) * g.ch < 11))) return;
      this.text(ctx, word, g.x - 5, g.y + (r + 0.5) * g.ch, {
        align: "right",
        ...(r === pos && { color: this.colors.ink, weight: 700 }),
      });
    });
  },
  sequence(m) {
    const p = this.panels[m.i],
      site = this.site(m.i),
      at = p.lookAt(site),
      pos = this.at(m.i),
      line = Boolean(at) && !p.whole(at);
    const { g, ctx, strip } = this.placeSequence(m, p, line);
    this.thumbnails(m, p, at);
    m.h.sub.textContent = at ? `${at} looks back, ${p.headNote(at)}` : "";
    if (!at || (line && !(pos >= 0 && p.lookRow(at, pos)))) {
      m.geom = null;
      m.why.textContent = !at
        ? "no sequence attention in this trace"
        : pos < 0
          ? this.alone(m.i)
          : this.waiting("row", m.i, { site: at, pos, way: undefined });
      return;
    }
    const query = (r) => (line ? pos : r);
    this.mask(ctx, g.x, g.y, g.cols * g.cw, g.rows * g.ch, (px, py) =>
      p.masked(at, query(Math.floor(py / g.ch)), Math.floor(px / g.cw)),
    );
    const value = (c, r) => (p.masked(at, query(r), c) ? null : p.attention(at, query(r), c));
    const key = `${at} ${p.one(at)} ${line && pos}`;
    this.cells(ctx, m, key, this.lut.warm, value, (v) => this.shadeWeight(v));
    this.positions(ctx, p, g, strip, pos);
    if (!line) this.queryNames(ctx, g, strip, pos);
    m.why.textContent = [
      at === site ? "" : `${site} reads only its own position; shown: ${at}.`,
      line ? `Of ${p.T} \u00d7 ${p.T} pairs the row of position ${pos} alone is here.` : "Row: query. Column: key.",
      this.downsampled(g),
    ]
      .filter(Boolean)
      .join(" ");
    m.base.setAttribute("aria-label", `Model ${p.letter}: sequence map of ${at}, ${p.headNote(at)}. ${CURSOR}`);
    m.base.dataset.geom = JSON.stringify(g);
  },

  // every head of a site, small: one is chosen by a click
  thumbnails(m, p, site) {
    const all = p.patterns[site],
      n = all && p.heads[site] > 1 && p.heads[site] <= 16 && p.T <= 256 ? p.heads[site] : 0,
      key = [n && site, this.rev, this.isDark].join();
    m.heads ??= el("div", "heads");
    if (!m.heads.isConnected) m.area.insertBefore(m.heads, m.why);
    if (m.heads.key !== key) {
      m.heads.key = key;
      m.heads.textContent = "";
      for (let h = 0; h < n; h++) {
        const button = el("button", "", undefined, m.heads),
          canvas = el("canvas", "", undefined, button),
          data = new ImageData(p.T, p.T);
        el("span", "", String(h), button);
        canvas.width = canvas.height = p.T;
        for (let r = 0; r < p.T; r++)
          for (let c = 0; c <= r; c++) {
            const k = this.shadeWeight(p.masked(site, r, c) ? NaN : all[(h * p.T * (p.T + 1)) / 2 + (r * (r + 1)) / 2 + c]);
            if (k !== "nan") data.data.set([...this.lut.warm[k], 255], 4 * (r * p.T + c));
          }
        canvas.getContext("2d").putImageData(data, 0, 0);
        button.setAttribute("aria-label", `head ${h} of ${p.letter}`);
        button.onclick = () => {
          const select = this.selects.head;
          select.value = select.value === String(h) ? "mean" : String(h);
          select.onchange();
        };
      }
    }
    [...m.heads.children].forEach((o, h) => o.setAttribute("aria-pressed", String(this.view.head === String(h))));
  },

  // ---- marks above a map: the choice and the hovered cell, without drawing the map again
  mark(m) {
    const marks = [],
      g = m.geom;
    if (g) this.marked(m, (...box) => marks.push(box));
    const now = JSON.stringify(marks);
    if (now === m.marks) return; // a canvas that is touched is sent to the screen again
    m.marks = now;
    const ctx = m.over.getContext("2d");
    ctx.clearRect(0, 0, m.over.width, m.over.height);
    for (const [c, r, across, line] of marks) {
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
    }
  },
  // box(column, row, whether across the map, width of the line) of everything that is marked in a map
  marked(m, box) {
    const p = this.panels[m.i],
      h = this.hover,
      site = this.site(m.i),
      row = p.row.get(site),
      pos = this.at(m.i),
      from = h && this.panels[h.m.i],
      line = (r) => (m.line ? 0 : r);
    if (m.kind === "grid" && pos >= 0) box(pos, row, false, 2);
    if (m.kind === "depth" && row > 0) box(0, row - 1, true, 1);
    if (m.kind === "sequence" && pos >= 0 && !m.line) box(0, pos, true, 1);
    if (!h) return;
    const own = (name) => p.row.get(p.same(name, from)),
      here = (c) => this.beside(c, h.m.i, m.i), // a position of the hovered map, in this one
      query = h.m.line ? this.at(h.m.i) : h.r,
      names = (o) => o.table(this.view.depth, this.at(o.i))?.names ?? [];
    if (h.m.kind === m.kind) {
      if (m.kind === "grid" && here(h.c) >= 0) box(here(h.c), own(from.rows[h.r]), false, 1);
      if (m.kind === "sequence" && here(h.c) >= 0 && here(query) >= 0 && (!m.line || here(query) === pos))
        box(here(h.c), line(here(query)), false, 1);
      const c = m.kind === "depth" ? names(p).indexOf(names(from)[h.c]) : -1;
      if (c >= 0) box(c, own(from.rows[h.r + 1]) - 1, false, 1);
    } else if (m.kind === "grid" && h.m.kind === "depth" && pos >= 0) {
      const read = own(from.rows[h.r + 1]),
        s = p.read(this.view.depth, read, pos).find((o) => o.name === names(from)[h.c]);
      box(pos, read, false, 1);
      for (const a of s ? s.atoms : []) if (p.row.has(a)) box(pos, p.row.get(a), false, 1);
    } else if (m.kind === "grid" && h.m.kind === "sequence") {
      const look = p.row.get(p.lookAt(site));
      for (const at of [here(h.c), here(query)]) if (at >= 0 && look !== undefined) box(at, look, false, 1);
    } else if (m.kind === "sequence" && h.m.kind === "grid" && pos >= 0) {
      const c = here(h.c);
      if (c >= 0 && c <= pos) box(c, line(pos), false, 1);
    } else if (m.kind === "depth" && h.m.kind === "grid" && row > 0 && here(h.c) === pos) {
      const s = p.read(this.view.depth, row, pos).find((o) => o.atoms.includes(p.rows[own(from.rows[h.r])]));
      if (s) box(s.index, row - 1, false, 1);
    }
  },
});
