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
  this.panels.forEach((p, i) => this.half(el("section", "", undefined, box), p, i));
  this.box.dataset.cell = JSON.stringify({ panel: this.view.panel, pos: pos0, site: this.view.site });
};

// a number with the decimals that give its column's largest value so many digits, so that decimals align
const even = (v, column, digits = 4) => {
  const most = Math.max(...column.filter((x) => Number.isFinite(x)).map(Math.abs), 1e-12);
  return Number.isFinite(v) ? v.toFixed(Math.max(0, Math.min(7, digits - 1 - Math.floor(Math.log10(most) + 1e-9)))) : fmt(v);
};

// a table of [label, go, shade, ...numbers]; `go`: the cell that the label leads to, or what happens; `sorted`: by which
// column
View.prototype.table = function (parent, head, rows, sorted) {
  const table = el("table", "", undefined, parent),
    tr = el("tr", "", undefined, el("thead", "", undefined, table));
  for (const h of head) {
    const th = el("th", "", h, tr);
    th.scope = "col";
    if (h === sorted) th.ariaSort = "descending";
  }
  const body = el("tbody", "", undefined, table);
  for (const [label, go, color, ...numbers] of rows) {
    const row = el("tr", "", undefined, body),
      cell = el("td", "", undefined, row);
    if (color) el("span", "sw", undefined, cell).style.background = color;
    const word = el(go ? "button" : "span", "", label, cell);
    word.title = label; // there may be no room for all of it
    if (go) word.setAttribute("aria-label", go.site ? `${label}: go to ${go.site} at position ${go.pos}` : `${label}: walk from its logit`);
    if (go) word.onclick = typeof go === "function" ? go : () => this.follow(go);
    numbers.forEach((v, k) =>
      el(
        "td",
        "",
        typeof v === "string"
          ? v
          : v === undefined || v === null
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

const TOP = 5; // rows of a ranking that are shown at first
const ALL = 200; // and at most
const QUANTITIES_SHOWN = 4;
// a table of ranked rows: the first of them, and a button for the rest; `make` makes one row
View.prototype.ranking = function (parent, name, label, head, ranked, sorted, make) {
  this.opened ??= new Set(); // stays so when the node moves
  const n = ranked.length,
    open = this.opened.has(name),
    few = n <= TOP + 1, // one row more takes no more room than its button
    shown = ranked.slice(0, open ? ALL : few ? n : TOP);
  this.table(parent, [`${label}${shown.length < n ? `, ${shown.length} of ${n}` : ""}`, ...head], shown.map(make), sorted).dataset.table =
    name;
  if (few) return;
  const button = el("button", "more", open ? `first ${TOP}` : n > ALL ? `first ${ALL} of ${n}` : `all ${n}`, parent);
  button.setAttribute("aria-expanded", String(open));
  button.setAttribute("aria-label", `${label}: show ${button.textContent}`);
  button.dataset.part = `more ${name}`;
  button.onclick = () => {
    if (open) this.opened.delete(name);
    else this.opened.add(name);
    this.refill(() => this.detail());
  };
};
View.prototype.quantityTable = function (parent, p, row, pos) {
  const here = this.payload.quantities.filter((q) => q.key !== this.view.quantity && !p.why(q.key, row));
  const line = (q) => [q.label, null, null, `${fmt(p.value(q.key, row, pos))}${q.unit && ` ${q.unit}`}`];
  const many = here.length > QUANTITIES_SHOWN + 2,
    first = many ? here.slice(0, QUANTITIES_SHOWN) : here;
  if (!here.length) return;
  const table = this.table(parent, ["also at this node", ""], first.map(line));
  table.dataset.table = "node";
  if (!many) return;
  const rest = el("details", "", undefined, parent);
  el("summary", "", `${here.length - first.length} more`, rest);
  rest.open = Boolean(this.unfolded);
  rest.ontoggle = () => (this.unfolded = rest.open); // stays so when the node moves
  this.table(rest, ["", ""], here.filter((q) => !first.includes(q)).map(line)).dataset.table = "more";
};

// the token whose logit the shares of the grid sum to
View.prototype.followed = function (parent, p, pos) {
  const token = p.follow && p.follow.tokens[pos];
  if (token === null || token === undefined) return;
  p.follow.open ??= { logit: unpack(p.follow.logit), bias: unpack(p.follow.bias) };
  const { logit, bias } = p.follow.open,
    rows = [
      ["logit", logit],
      ["of it from no write", bias],
    ].filter(([, values], i) => values && Number.isFinite(values[pos]) && (i === 0 || values[pos] !== 0));
  const table = this.table(
    parent,
    [`followed at out: ${isolated(glyphs(token))}`, ""],
    rows.map(([label, values]) => [label, null, null, fmt(values[pos])]),
  );
  table.dataset.table = "follow";
  table.title = p.follow.text;
};

// effect beside mass: what changes at `out` when one route into this read is taken away
View.prototype.effects = function (parent, p, site, pos) {
  const found = p.answer("effects", { pos, site });
  if (found || site === "embed") return found;
  const why = p.failed("effects", { pos, site });
  if (why) el("p", "why", `Effects: ${why}`, parent);
  else if (this.measuring === this.nodeKey()) el("p", "why", "measuring effects \u2026", parent);
  else if (this.served) {
    const button = el("button", "act", "measure effects", parent);
    button.title = "What the output at this position loses when one source is taken out of this read";
    button.onclick = () => {
      this.measuring = this.nodeKey();
      this.refill(() => this.detail());
      this.ask();
    };
  }
  return null;
};

View.prototype.half = function (parent, p, i) {
  const site = this.site(i),
    row = p.row.get(site),
    pos = this.at(i);
  const h = this.title(parent, p, site === this.view.site ? "" : `shown: ${site}`);
  parent.dataset.node = p.letter;
  h.style.marginBottom = "3px";
  if (pos < 0) {
    el("p", "why", this.alone(i), parent);
    return;
  }
  if (pos !== this.view.pos) el("p", "why", `beside it: position ${pos}, ${isolated(glyphs(p.tokens[pos]))}`, parent);
  this.coloured(parent, p, row, pos);

  const to = (name) => (p.row.has(name) ? { panel: i, pos, site: name } : null);
  const size = (v) => (Number.isFinite(v) ? Math.abs(v) : -1);
  const effects = site === "embed" ? null : p.answer("effects", { pos, site }),
    effect = (name) => (effects ? effects.values[name] : undefined),
    brief = (v) => {
      const shown = Number.isFinite(v) ? even(v, Object.values(effects.values), 3) : v; // there is room for four columns
      return v && !Number(shown) ? fmt(v, 1) : shown; // what is not zero is not shown as zero
    },
    tiny = (v) => Number.isFinite(v) && Math.abs(v) < (effects.floor || 0); // rounding
  const rankedBy = effects && this.rank === "effect",
    mode = this.view.depth;
  const swatch = (v) => (Number.isFinite(v) ? css(this.readLut[this.shadeRead(v)]) : null);
  const own = p.read("weights", row, pos),
    of = (key) => new Map(p.read(key, row, pos).map((s) => [s.name, s.value])),
    [weight, mix, norm, share] = ["weights", "mixing", "contribution", "share"].map(of);
  // sources that are atoms: one table. Where the weight is the coefficient, as in full Attention Residuals, say it once.
  const plain = own.length > 0 && own.every((s) => s.atoms.length === 1 && s.atoms[0] === s.name),
    same = plain && own.every((s) => mix.get(s.name) === s.value);
  const sizes = plain && !same ? (mode === "share" ? [["share", share]] : [["norm", norm]]) : [["norm", norm], ["share", share]];
  const shown = [...(same ? [] : [["mix", mix]]), ...sizes].filter(([, values]) => values.size),
    numbers = (name) => shown.map(([, values]) => values.get(name));
  const span = ({ atoms }) => (atoms.length > 1 ? `${atoms[0]} \u2026 ${atoms[atoms.length - 1]}` : atoms[0]);
  const has = (over) => effects && (effects.over === over || (plain && effects.over === "atom")),
    extra = (over) => (has(over) ? ["effect"] : []),
    plus = (over, name) => (has(over) ? [tiny(effect(name)) ? `< ${fmt(effects.floor, 1)}` : brief(effect(name))] : []);
  // sources go by what the maps show of them, where the table has it
  const by = (sources, over, columns, usual) => {
    const here = columns[mode],
      [sorted, values] = rankedBy && has(over) ? ["effect", { get: effect }] : here && here[1].size ? here : usual,
      ranked = sources.sort((a, b) => size(values.get(b.name)) - size(values.get(a.name)));
    return { sorted, ranked, shade: ({ name }) => (here ? swatch(here[1].get(name)) : null) };
  };
  const atoms = { mixing: [same ? "weight" : "mix", mix], contribution: ["norm", norm], share: ["share", share] },
    weights = { weights: ["weight", weight], ...(plain ? atoms : {}) };
  if (effects) this.rankChoice(parent);
  if (own.length) {
    const { ranked, sorted, shade } = by(own, "source", weights, weights.weights);
    const head = ["weight", ...(plain ? shown.map(([word]) => word) : ["holds"]), ...extra("source")];
    this.ranking(parent, "weights", "from depth", head, ranked, sorted, (s) => [
      s.name,
      to(s.atoms[s.atoms.length - 1]),
      shade(s),
      s.value,
      ...(plain ? numbers(s.name) : [span(s)]),
      ...plus("source", s.name),
    ]);
  }
  if (!plain && norm.size) {
    const over = has("atom") ? "atom" : "none",
      { ranked, sorted, shade } = by(p.read("contribution", row, pos), over, atoms, atoms.contribution);
    this.ranking(parent, "atoms", "atoms", [...shown.map(([word]) => word), ...extra(over)], ranked, sorted, (s) => [
      s.name,
      to(s.name),
      shade(s),
      ...numbers(s.name),
      ...plus(over, s.name),
    ]);
  }
  if (p.lean && site !== "embed" && !p.answer("column", { pos }))
    el("p", "why", `Reads from depth: ${this.waiting("column", i, { pos })}`, parent);
  if (effects) el("p", "why", [`Effect in ${effects.unit}.`, effects.note].filter(Boolean).join(" "), parent).dataset.note = "effects";
  else this.effects(parent, p, site, pos);

  if (p.looks(site) && !p.seen(site, pos))
    el("p", "why", `From the sequence: ${this.waiting("row", i, { site, pos, way: undefined })}`, parent);
  else if (p.looks(site)) {
    const keys = Array.from({ length: pos + 1 }, (_, k) => [p.attention(site, pos, k), k])
      .filter(([v]) => !Number.isNaN(v))
      .sort((a, b) => b[0] - a[0]);
    this.ranking(parent, "sequence", "from the sequence", ["at", "weight"], keys, "weight", ([v, k]) => [
      glyphs(p.tokens[k]),
      { panel: i, pos: k, site },
      css(this.lut.warm[this.shadeWeight(v)]),
      String(k),
      v,
    ]);
  } else el("p", "why", `${site} reads no other position.`, parent);
  const read = p.tops(row, pos),
    next = p.nextAt(pos),
    beside = el("div", read.length && next ? "duo" : "", undefined, parent); // what it would say here, and what comes
  if (read.length)
    this.table(
      beside,
      ["lens, here", "prob."],
      read.map(([token, probability]) => [glyphs(token), null, null, probability]),
    ).dataset.table = "lens";
  if (next)
    this.table(
      beside,
      ["next, at out", "prob."],
      next.map(([token, log]) => [
        glyphs(token),
        () => this.follow({ panel: i, pos, site: "out" }, token),
        null,
        log === null ? NaN : Math.exp(log),
      ]),
    ).dataset.table = "next";
  this.quantityTable(parent, p, row, pos);
  this.followed(parent, p, pos);
};

// the number behind the colour of the grid
View.prototype.coloured = function (parent, p, row, pos) {
  const q = this.quantity,
    why = p.why(q.key, row),
    line = el("p", "coloured", `${q.label}  `, parent);
  el("strong", "", why || `${fmt(p.value(q.key, row, pos))}${q.unit && ` ${q.unit}`}`, line);
};

// by what the sources of the tables are ranked
View.prototype.rankChoice = function (parent) {
  const box = el("div", "rank", "sources by ", parent);
  for (const key of ["mass", "effect"]) {
    const button = el("button", "", key === "mass" ? this.mode.label.toLowerCase() : key, box);
    button.setAttribute("aria-pressed", String((this.rank || "mass") === key));
    button.onclick = () => {
      this.rank = key;
      this.refill(() => this.detail());
    };
  }
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
  // text as bytes: not made anew, nor parsed, when a run has nothing new, as its first entry tells
  if (data instanceof Uint8Array) {
    const [, rev] = new TextDecoder().decode(data.subarray(0, 40)).match(/^{"rev":"(\w+)"/) || [],
      view = parentElement.t2lens;
    data = rev && view?.rev === rev ? view.payload : JSON.parse(new TextDecoder().decode(data));
  }
  // `turn` makes every choice a new value, also the choice of a cell that was chosen in an earlier prompt
  return renderMaps(parentElement, data, (key, value) => setStateValue(key, { ...value, turn: Date.now() }));
}
