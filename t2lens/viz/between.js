// The maps of the difference B - A, on the coordinates of A. One part of the module that maps.js describes.
//
// A cell of A has a partner where B has the site (at the same relative depth where the depths differ, of the same kind)
// and a position beside it (payload.alignment); else it is blank. Each map has a symmetric range of its own.

const MINUS = "B \u2212 A";

Object.assign(View.prototype, {
  // why there is no difference at all, or ""
  apart() {
    const { alignment } = this.payload,
      [a, b] = this.panels;
    if (alignment && alignment.rule === "none") return alignment.text || "A and B share no position.";
    const shared = Math.min(a.T, b.T - this.shift) - Math.max(0, -this.shift);
    return shared > 0 ? "" : "No position of A stands beside one of B.";
  },
  between(kind, parent) {
    if (this.panels.length < 2) return;
    const area = el("section", "between", undefined, parent),
      m = this.map(area, kind, 0, this.title(area, { letter: MINUS, name: "" }, ""), true);
    m.bar = this.bar(area);
    area.insertBefore(m.bar.box, m.why); // below, so that the three maps of a row stand level
  },
  apartMap(m) {
    const [a, b] = this.panels,
      found = this[`${m.kind}Apart`](m, a, b);
    m.frame.hidden = m.bar.box.hidden = typeof found === "string";
    if (typeof found !== "string") return;
    m.geom = null;
    m.why.textContent = found; // in place of the map
    delete m.base.dataset.geom;
  },
  // how sites of A meet sites of B, in words
  pairing(a, b) {
    if (a.layers === b.layers) return "";
    const site = `${a.layers - 1}.mlp`,
      from = [`${Math.floor(a.layers / 2)}.mlp`, `${Math.floor(a.layers / 2)}.attn`, site].find((s) => b.partner(s, a));
    return `Sites meet at the same relative depth${from ? ` (${from} of A, ${b.partner(from, a)} of B)` : ""}.`;
  },
  // the largest |difference|, found once per `key`
  range(key, numbers) {
    if (!this.ranges.has(key)) {
      let top = 0;
      for (const d of numbers()) if (Number.isFinite(d) && Math.abs(d) > top) top = Math.abs(d);
      if (this.ranges.size > 64) this.ranges.delete(this.ranges.keys().next().value);
      this.ranges.set(key, top || 1);
    }
    return this.ranges.get(key);
  },
  apartScale(m, words, top) {
    this.colourBar(m.bar, `${MINUS}: ${words}, root scale`, this.lut.both, this.bothTicks(top));
    return (v) => Math.round(127.5 * (ROOT(v, top) + 1));
  },

  gridApart(m, a, b) {
    const q = this.quantity;
    for (const p of [a, b]) {
      if (p.absent[q.key]) return `No difference: in ${p.letter}, ${p.absent[q.key]}.`;
      if (!p.grid[q.key]) return this.waiting("grid", p.i, { quantity: q.key });
    }
    const { g, strip, H } = this.place(m, a),
      ctx = this.fit(m.base, m.wide, H);
    this.fit(m.over, m.wide, H);
    const rows = a.rows.map((site) => b.row.get(b.partner(site, a))),
      blank = rows.map((row, r) => row === undefined || a.why(q.key, r) !== "" || b.why(q.key, row) !== "");
    const value = (c, r) => {
      const at = this.beside(c, 0, 1);
      return blank[r] || at < 0 ? null : b.value(q.key, rows[r], at) - a.value(q.key, r, c);
    };
    const key = `${q.key} ${a.way} ${b.way}`;
    const top = this.range(`grid ${key}`, () => gridOf(g, value));
    const shade = this.apartScale(m, `${q.label}${q.unit && ` (${q.unit})`}`, top);
    this.cells(ctx, m, key, this.lut.both, value, shade);
    this.rowNames(ctx, g, a.rows, a.row.get(this.site(0)));
    this.positions(ctx, a, g, strip, this.at(0));
    this.axes(ctx, g);
    const alone = a.tokens.filter((_, c) => this.beside(c, 0, 1) < 0).length;
    m.why.textContent = [
      this.pairing(a, b),
      this.shift ? `Position p of A beside p ${this.shift < 0 ? "\u2212" : "+"} ${Math.abs(this.shift)} of B.` : "",
      alone ? `${alone} position${alone > 1 ? "s" : ""} of A ha${alone > 1 ? "ve" : "s"} no partner.` : "",
      rows.some((row) => row === undefined) ? "Rows without a partner are blank." : "",
      this.downsampled(g),
    ]
      .filter(Boolean)
      .join(" ");
    m.base.setAttribute("aria-label", `Difference B minus A of ${q.label}, by position and depth of A`);
    m.base.dataset.geom = JSON.stringify(g);
  },

  depthApart(m, a, b) {
    const mode = this.view.depth,
      here = this.at(0),
      pos = this.at(1);
    m.h.sub.textContent = "depth reads";
    if (here < 0 || pos < 0) return this.alone(here < 0 ? 0 : 1);
    const [ra, rb] = [a.table(mode, here), b.table(mode, pos)];
    for (const [p, r, at] of [
      [a, ra, here],
      [b, rb, pos],
    ])
      if (!r)
        return p.lean && !p.answer("column", { pos: at })
          ? this.waiting("column", p.i, { pos: at })
          : `No difference: ${p.letter} has no ${this.mode.label.toLowerCase()}.`;
    if (a.layers !== b.layers) return "No difference: A and B differ in depth, so the same source stands at other depths.";
    const index = new Map(rb.names.map((name, k) => [name, k]));
    if (!ra.names.some((name) => name !== "embed" && index.has(name)))
      return "No difference: the sources of A and B have different names; the mixing matrix compares them by atom.";
    const numbers = (p, r) =>
      new Map(p.rows.slice(1).map((site, row) => [site, new Map(r.columns[row].map((c, k) => [c, r.number(row, k)]))]));
    const [na, nb] = [numbers(a, ra), numbers(b, rb)],
      { g, ctx } = this.placeDepth(m, a, ra.names);
    const value = (c, r) => {
      const site = a.rows[r + 1],
        x = na.get(site).get(c),
        y = (nb.get(site) || new Map()).get(index.get(ra.names[c]));
      return x === undefined || y === undefined ? null : y - x;
    };
    // over every position where they are all here, so that the colours stay when the node moves
    const every = !a.lean && !b.lean;
    const top = this.range(`depth ${mode} ${a.way} ${b.way} ${every ? "" : here}`, () =>
      every ? this.depthDifferences(a, b, mode) : gridOf(g, value),
    );
    const shade = this.apartScale(m, this.mode.label, top);
    this.cells(ctx, m, `${mode} ${here} ${a.way} ${b.way}`, this.lut.both, value, shade);
    this.depthLabels(ctx, g, a, ra.names, a.row.get(this.site(0)));
    m.h.sub.textContent = pos === here ? `depth reads at ${here}` : `depth reads at ${here} of A, ${pos} of B`;
    m.why.textContent = [
      `Sources that ${every ? "" : "at this position "}only one of them has are blank.`,
      this.downsampled(g),
    ]
      .filter(Boolean)
      .join(" ");
    m.base.setAttribute("aria-label", `Difference B minus A: depth map of position ${here}, ${this.mode.label}`);
    m.base.dataset.geom = JSON.stringify(g);
  },
  *depthDifferences(a, b, mode) {
    const [ra, rb] = [a.reads[mode], b.reads[mode]],
      index = new Map(rb.names.map((name, k) => [name, k]));
    for (let r = 0; r < ra.columns.length; r++) {
      const row = b.row.get(a.rows[r + 1]);
      if (!row) continue;
      for (let k = 0; k < ra.columns[r].length; k++) {
        const other = rb.columns[row - 1].indexOf(index.get(ra.names[ra.columns[r][k]]));
        if (other < 0) continue;
        for (let c = 0; c < a.T; c++) {
          const at = this.beside(c, 0, 1);
          if (at >= 0) yield rb.values[(rb.start[row - 1] + other) * b.T + at] - ra.values[(ra.start[r] + k) * a.T + c];
        }
      }
    }
  },

  sequenceApart(m, a, b) {
    const site = a.lookAt(this.site(0)),
      other = b.lookAt(this.site(1)),
      line = Boolean(site && other) && !(a.whole(site) && b.whole(other)),
      here = this.at(0),
      pos = this.at(1);
    m.h.sub.textContent = "";
    if (!site || !other) return `No difference: ${site ? "B" : "A"} has no sequence attention in this trace.`;
    if (b.partner(site, a) !== other) return `No difference: A shows ${site} and B ${other}, which are not the same site.`;
    m.h.sub.textContent = site === other ? `${site} looks back` : `${site} of A, ${other} of B`;
    if (line) {
      if (here < 0 || pos < 0) return this.alone(here < 0 ? 0 : 1);
      for (const [p, s, at] of [
        [a, site, here],
        [b, other, pos],
      ])
        if (!p.seen(s, at)) return this.waiting("row", p.i, { site: s, pos: at, way: undefined });
    }
    const { g, ctx, strip } = this.placeSequence(m, a, line),
      query = (r) => (line ? here : r);
    const value = (c, r) => {
      const q = query(r),
        [mine, key] = [this.beside(q, 0, 1), this.beside(c, 0, 1)];
      if (mine < 0 || key < 0 || a.masked(site, q, c) || b.masked(other, mine, key)) return null;
      return b.attention(other, mine, key) - a.attention(site, q, c);
    };
    this.mask(ctx, g.x, g.y, g.cols * g.cw, g.rows * g.ch, (px, py) =>
      a.masked(site, query(Math.floor(py / g.ch)), Math.floor(px / g.cw)),
    );
    const key = `${site} ${other} ${a.one(site)} ${b.one(other)} ${line && here}`,
      top = this.range(`sequence ${key}`, () => gridOf(g, value)),
      shade = this.apartScale(m, "Sequence attention", top);
    this.cells(ctx, m, key, this.lut.both, value, shade);
    this.positions(ctx, a, g, strip, here);
    if (!line) this.queryNames(ctx, g, strip, here);
    const note = a.headNote(site) === b.headNote(other) ? a.headNote(site) : `A: ${a.headNote(site)}, B: ${b.headNote(other)}`;
    m.why.textContent = [`${line ? `The row of position ${here}` : "Row: query. Column: key"}, ${note}.`, this.downsampled(g)]
      .filter(Boolean)
      .join(" ");
    m.base.setAttribute("aria-label", `Difference B minus A: sequence map of ${site}`);
    m.base.dataset.geom = JSON.stringify(g);
  },
});

function* gridOf(g, value) {
  for (let r = 0; r < g.rows; r++) for (let c = 0; c < g.cols; c++) yield value(c, r) ?? NaN;
}
