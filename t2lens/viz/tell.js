// What the tooltip and the live region say about one cell of a map. One part of the module that maps.js describes.

Object.assign(View.prototype, {
  exact(v) {
    if (this.payload.precision === "f4") return fmt(v, 7);
    return v && Math.abs(v) < 2 ** -14 ? "below 6.1e-5" : fmt(v, 3); // float16 keeps 3 digits down to 2 ** -14
  },
  // the last line of a tooltip while differences are shown; a, b: numbers of A and B, or undefined where there is none
  apartLine(a, b) {
    if (!this.comparing) return [];
    const d = b - a;
    return [`B \u2212 A   ${a === undefined || b === undefined ? "no partner" : this.exact(d)}`];
  },
  tell(pos, site, i) {
    const q = this.quantity,
      from = this.panels[i],
      values = [];
    const lines = [`${site}   position ${pos}   ${isolated(glyphs(from.tokens[pos]))}`];
    this.panels.forEach((p, j) => {
      const here = j === i ? site : p.same(site, from),
        row = p.row.get(here),
        at = this.beside(pos, i, j),
        v = at < 0 ? NaN : p.value(q.key, row, at),
        why = at < 0 ? "no such position" : p.why(q.key, row);
      if (!why && p.partner(site, from) === here) values[j] = v;
      const place = [here === site ? "" : here, at < 0 || at === pos ? "" : `position ${at}`].filter(Boolean).join(", ");
      lines.push(`${p.letter}${place && ` (${place})`}   ${q.label}: ${why || `${this.exact(v)}${q.unit && ` ${q.unit}`}`}`);
      if (!why && j === i && Number.isFinite(v)) {
        const line = p.grid[q.key].subarray(row * p.T, (row + 1) * p.T),
          there = line.filter(Number.isFinite);
        lines.push(`     rank ${there.reduce((n, o) => n + (o > v), 1)} of ${there.length} in its row`);
      }
      if (at < 0) return;
      const chosen = this.site(j),
        row0 = p.row.get(chosen),
        t = this.at(j);
      if (at === t && row < row0)
        for (const s of p.read(this.view.depth, row0, t))
          if (s.atoms.includes(here)) lines.push(`     ${chosen} reads ${s.name}: ${this.exact(s.value)}`);
      if (here === chosen && at <= t && p.looks(chosen) && p.seen(chosen, t))
        lines.push(
          `     position ${t} reads position ${at}: ${p.masked(chosen, t, at) || this.exact(p.attention(chosen, t, at))}`,
        );
      const fed = this.rollout(j);
      if (fed && fed.numbers && row <= row0 && at <= t)
        lines.push(`     share of ${chosen}@${t} that passes here: ${this.exact(fed.numbers[row * p.T + at])}`);
    });
    return [...lines, ...this.apartLine(values[0], values[1])];
  },
  tellDepth(m, { c, r }) {
    const from = this.panels[m.i],
      site = from.rows[r + 1],
      pos = this.at(m.i),
      name = from.table(this.view.depth, pos).names[c],
      values = [];
    const lines = [`${site} reads ${name}   at position ${pos}`];
    this.panels.forEach((p, j) => {
      const here = j === m.i ? site : p.same(site, from);
      const all = p.read(this.view.depth, p.row.get(here), this.at(j)),
        s = all.find((o) => o.name === name);
      const rank = s && all.filter((o) => Math.abs(o.value) > Math.abs(s.value)).length + 1;
      if (s && here === site) values[j] = s.value;
      const none = this.at(j) < 0 ? "no such position" : "no such source";
      lines.push(s ? `${p.letter}   ${this.exact(s.value)}   (rank ${rank} of ${all.length})` : `${p.letter}   ${none}`);
    });
    return [...lines, ...this.apartLine(values[0], values[1])];
  },
  tellSequence(m, { c, r }) {
    const from = this.panels[m.i],
      q = m.line ? this.at(m.i) : r,
      values = [],
      rank = [];
    const word = (pos) => isolated(glyphs(from.tokens[pos]));
    const lines = [`query ${q} ${word(q)}   key ${c} ${word(c)}`];
    this.panels.forEach((p, j) => {
      const site = p.lookAt(this.site(j)),
        [mine, key] = [q, c].map((pos) => this.beside(pos, m.i, j));
      const gone = mine < 0 || key < 0,
        v = site && !gone ? p.attention(site, mine, key) : NaN,
        why = !site ? "no sequence attention" : gone ? "no such position" : p.masked(site, mine, key);
      if (!why) values[j] = v;
      lines.push(`${p.letter}   ${site || ""}   ${why || this.exact(v)}`);
      if (j !== m.i || !Number.isFinite(v)) return;
      const there = Array.from({ length: mine + 1 }, (_, k) => p.attention(site, mine, k)).filter(Number.isFinite);
      rank.push(`     rank ${there.reduce((n, o) => n + (o > v), 1)} of ${there.length} in its row`);
    });
    return [...lines, ...rank, ...this.apartLine(values[0], values[1])];
  },
});
