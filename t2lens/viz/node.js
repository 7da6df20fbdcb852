// The panel of numbers beside the maps: the chosen node in every model. One part of the module that maps.js describes.

View.prototype.detail = function () {
  const pos0 = this.view.pos,
    first = this.here,
    box = this.node;
  box.textContent = "";
  const top = el("div", "top", undefined, box),
    line = el("div", "big", `${this.view.site} `, top);
  el("span", "sub", ` at position ${pos0} `, line);
  el("span", "tok", glyphs(first.tokens[pos0]), line);
  if (this.trail.length) {
    // where one came from: any of the last choices, or one step back
    const walk = el("div", "walk", undefined, top);
    this.trail.forEach((cell, k) => {
      if (k) el("span", "", " \u2192 ", walk);
      el("button", "", `${cell.site}@${cell.pos}`, walk).onclick = () => {
        this.trail = this.trail.slice(0, k);
        this.select(cell, true);
      };
    });
  }
  this.panels.forEach((p, i) => this.half(el("section", "", undefined, box), p, i));
  this.box.dataset.cell = JSON.stringify({ panel: this.view.panel, pos: pos0, site: this.view.site });
};

// a number with the decimals that give its column's largest value four digits, so that decimals align
const even = (v, column) => {
  const most = Math.max(...column.filter((x) => Number.isFinite(x)).map(Math.abs), 1e-12);
  return Number.isFinite(v) ? v.toFixed(Math.max(0, Math.min(7, 3 - Math.floor(Math.log10(most) + 1e-9)))) : fmt(v);
};

// a table of [label, go, shade, ...numbers]; `go` is the cell that the label leads to
View.prototype.table = function (parent, head, rows) {
  const table = el("table", "", undefined, parent),
    tr = el("tr", "", undefined, el("thead", "", undefined, table));
  for (const h of head) el("th", "", h, tr).scope = "col";
  const body = el("tbody", "", undefined, table);
  for (const [label, go, color, ...numbers] of rows) {
    const row = el("tr", "", undefined, body),
      cell = el("td", "", undefined, row);
    if (color) el("span", "sw", undefined, cell).style.background = color;
    if (go) el("button", "", label, cell).onclick = () => this.select(go);
    else el("span", "", label, cell);
    numbers.forEach((v, k) =>
      el(
        "td",
        "",
        typeof v === "string"
          ? v
          : v === undefined
            ? "\u2013"
            : even(
                v,
                rows.map((r) => r[k + 3]),
              ),
        row,
      ),
    );
  }
  return table;
};

View.prototype.half = function (parent, p, i) {
  const site = this.site(i),
    row = p.row.get(site),
    pos = this.clamp(i),
    most = 5;
  const h = this.title(parent, p, site === this.view.site ? "" : `shown: ${site}`);
  parent.dataset.node = p.letter;
  h.style.marginBottom = "3px";
  if (pos !== this.view.pos) el("p", "why", `has ${p.T} positions; shown: ${pos}`, parent);
  const here = this.payload.quantities.filter((q) => !p.why(q.key, row));
  this.table(
    parent,
    ["at this node", ""],
    here.map((q) => [q.label, null, null, `${fmt(p.value(q.key, row, pos))}${q.unit && ` ${q.unit}`}`]),
  ).dataset.table = "node";

  const to = (name) => (p.row.has(name) ? { panel: i, pos, site: name } : null);
  const by = (mode) => p.read(mode, row, pos).sort((a, b) => Math.abs(b.value) - Math.abs(a.value));
  const swatch = (mode, v) => {
    const m = this.payload.depth.find((o) => o.key === mode);
    const t = ROOT(v, m.hi);
    return Number.isFinite(v)
      ? css(this.lut[m.signed ? "both" : "warm"][Math.round(m.signed ? 127.5 * (t + 1) : 255 * Math.max(0, t))])
      : null;
  };
  const own = by("weights"),
    of = (mode) => new Map(by(mode).map((s) => [s.name, s.value])),
    [mix, norm, share] = ["mixing", "contribution", "share"].map(of);
  const more = (n) => (n > most ? `, ${most} of ${n}` : "");
  // sources that are atoms: one table. Where the weight is the coefficient, as in full Attention Residuals, say it once.
  const plain = own.length > 0 && own.every((s) => s.atoms.length === 1 && s.atoms[0] === s.name),
    same = plain && own.every((s) => mix.get(s.name) === s.value);
  const columns = [...(same ? [] : [["mix", mix]]), ["norm", norm], ...(plain && !same ? [] : [["share", share]])];
  const shown = columns.filter(([, values]) => values.size),
    numbers = (name) => shown.map(([, values]) => values.get(name));
  const span = ({ atoms }) => (atoms.length > 1 ? `${atoms[0]} \u2026 ${atoms[atoms.length - 1]}` : atoms[0]);
  if (own.length)
    this.table(
      parent,
      [`from depth${more(own.length)}`, "weight", ...(plain ? shown.map(([head]) => head) : ["holds"])],
      own
        .slice(0, most)
        .map((s) => [
          s.name,
          to(s.atoms[s.atoms.length - 1]),
          swatch("weights", s.value),
          s.value,
          ...(plain ? numbers(s.name) : [span(s)]),
        ]),
    ).dataset.table = "weights";
  if (!plain && norm.size) {
    const ranked = by("contribution");
    this.table(
      parent,
      [`atoms in the read${more(ranked.length)}`, ...shown.map(([head]) => head)],
      ranked.slice(0, most).map((s) => [s.name, to(s.name), swatch("share", share.get(s.name)), ...numbers(s.name)]),
    ).dataset.table = "atoms";
  }

  if (p.sequence[site]) {
    const keys = Array.from({ length: pos + 1 }, (_, k) => [p.attention(site, pos, k), k])
      .filter(([v]) => !Number.isNaN(v))
      .sort((a, b) => b[0] - a[0]);
    this.table(
      parent,
      [`from the sequence${more(keys.length)}`, "at", "weight"],
      keys
        .slice(0, most)
        .map(([v, k]) => [
          glyphs(p.tokens[k]),
          { panel: i, pos: k, site },
          css(this.lut.warm[this.shadeWeight(v)]),
          String(k),
          v,
        ]),
    ).dataset.table = "sequence";
  } else el("p", "why", `${site} reads no other position.`, parent);
  if (p.next && p.next[pos])
    this.table(
      parent,
      ["next token, at out", "prob."],
      p.next[pos].map(([token, log]) => [glyphs(token), null, null, log === null ? NaN : Math.exp(log)]),
    ).dataset.table = "next";
};

// ---- entries ---------------------------------------------------------------------------------------------------------
export function renderMaps(root, payload, onSelect) {
  if (!root.t2lens) {
    const style = el("style");
    style.textContent = CSS;
    root.append(style);
    root.t2lens = new View(root);
  }
  root.t2lens.update(payload, onSelect);
  return () => {
    if (root.t2lens) {
      root.t2lens.stop();
      root.t2lens.box.remove();
      delete root.t2lens;
    }
  };
}

export default function ({ parentElement, data, setStateValue }) {
  // `turn` makes every choice a new value, also the choice of a cell that was chosen in an earlier prompt
  return renderMaps(parentElement, data, (key, value) => setStateValue(key, { ...value, turn: Date.now() }));
}
