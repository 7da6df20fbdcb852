// The two-axis maps: one plain module, drawn the same in the app, in a notebook and in a static page.
//
//   renderMaps(root, payload, onSelect)   draws `payload` (see payload.py) into the element `root`;
//                                         onSelect("cell" | "show" | "ask", value) hears every choice and every question.
//   export default                        the entry that Streamlit's components call, with a payload as it is or as bytes.
//
// x is sequence position, y is depth (embed at the bottom, out on top). Cool colours are the chosen quantity; warm
// colours are always "what a node reads" (or, in the layer rollout, what feeds it), on a root scale; a difference has
// the scale of two colours. All text reaches the page through textContent or fillText, so that a token is never markup.

// ---- the view: state, frame, choosing --------------------------------------------------------------------------------
const ROOT = (x, hi) => Math.sign(x) * Math.sqrt(Math.min(1, Math.abs(x) / hi)); // the scale of every map of reads
const WAYS = { q: "queries", k: "keys", v: "values", r: "carried stream" };
const STEPS = [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000];
const LAYERS = { cross: "cross: what it reads", rollout: "rollout: all that feeds it" };
const COMPARE = { both: "A | B", difference: "A | B | B \u2212 A" };
const PAST = 64; // choices that Back can undo

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
    this.box.addEventListener("keydown", (e) => this.backKey(e));
    EXCHANGE.views.add(this);
  }
  stop() {
    EXCHANGE.views.delete(this);
    this.resize.disconnect();
    this.dark.removeEventListener("change", this.redraw);
    clearTimeout(this.timer);
    clearInterval(this.player?.timer);
    cancelAnimationFrame(this.frame);
  }

  update(payload, onSelect) {
    this.onSelect = onSelect || (() => {});
    this.served = Boolean(onSelect);
    if (payload.rev === this.rev) {
      if (this.theme !== this.themed()) this.draw(); // else a run that brings nothing new: all of it is drawn
      return;
    }
    clearInterval(this.player?.timer);
    clearTimeout(this.timer);
    const { trail = [], ...chosen } = payload.view,
      view = { layer: "cross", compare: "both", ...chosen };
    Object.assign(this, { rev: payload.rev, payload, view, trail, past: walked(trail), asked: "", how: "", ranges: new Map() });
    this.answers = new Answers();
    this.hover = null;
    this.panels = payload.panels.map((p, i) => new Panel(p, i, this.answers, { ...payload, served: this.served }));
    this.shift = (payload.alignment || {}).shift || 0;
    this.box.classList.toggle("one", this.panels.length === 1);
    this.receive(payload.answers || []);
    this.receive(EXCHANGE.waiting.get(this.rev) || []);
    EXCHANGE.waiting.delete(this.rev);
    this.build();
    this.draw();
    this.resize.observe(this.box);
    this.ask();
  }

  // ---- frame: everything but the canvases' contents
  build() {
    const { payload } = this;
    this.sheet.textContent = "";
    this.maps = [];
    this.selects = {};
    const head = el("div", "head", undefined, this.sheet);
    if (payload.hint) el("p", "hint", payload.hint, head);
    const list = (entries) => entries.map(([key, label]) => ({ key, label }));
    const pair = () => el("div", "pair", undefined, head); // a choice and the colours it is drawn in
    const first = pair();
    this.choice(first, "colour of the grid", "quantity", payload.quantities);
    this.cool = this.bar(first);
    const second = pair();
    this.choice(second, "reads from depth", "depth", payload.depth);
    this.warm = this.bar(second);
    const third = pair();
    const heads = Math.max(0, ...this.panels.flatMap((p) => Object.keys(this.served ? p.heads : p.patterns).map((s) => p.heads[s]))),
      maxima = heads > 1 || this.panels.some((p) => Object.keys(p.most).length);
    const which = ["mean", ...(maxima ? ["max"] : []), ...(heads > 1 ? Array(heads).keys() : [])].map(String);
    if (which.length > 1) this.choice(third, "attention head", "head", list(which.map((h) => [h, h])));
    const ways = [...new Set(this.panels.flatMap((p) => [...p.ways.keys()]))].filter((way) => way);
    this.crowded = ways.length > 1; // one choice more in the row
    this.box.classList.toggle("crowded", this.crowded);
    if (this.crowded) this.choice(third, "attention reads with its", "way", list(ways.map((key) => [key, WAYS[key] || key])));
    this.back = this.bar(third);
    const nav = el("div", "nav", undefined, this.sheet);
    this.buildWalk(nav);
    if (this.offersRollout()) this.choice(nav, "of the node, show", "layer", list(Object.entries(LAYERS)));
    else this.view.layer = "cross";
    this.fed = this.bar(nav);
    if (this.panels.length > 1) this.choice(nav, "panels", "compare", list(Object.entries(COMPARE)), this.apart());
    else this.view.compare = "both";
    this.buildPlayback(nav);
    const grids = el("div", "grids", undefined, this.sheet);
    this.panels.forEach((p, i) => {
      const area = el("section", "", undefined, grids);
      const h = this.title(area, p, "");
      const b = el("span", p.badge.ok ? "badge" : "badge bad", p.badge.text, h);
      b.title = p.badge.lines.join("\n");
      this.map(area, "grid", i, h);
    });
    this.between("grid", grids);
    const maps = el("div", "maps", undefined, this.sheet);
    for (const kind of ["depth", "sequence"]) {
      this.panels.forEach((p, i) => {
        const area = el("section", "", undefined, maps);
        this.map(area, kind, i, this.title(area, { letter: p.letter, name: "" }, ""));
      });
      this.between(kind, maps);
    }
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
    const notes = this.panels.length > 1 ? ["Every colour range is one range for A and B."] : [];
    const { alignment } = payload;
    if (this.panels.length > 1 && alignment && alignment.text) notes.push(alignment.text);
    for (const note of [...notes, ...payload.notes]) el("p", "note", note, maps);
    this.node = el("aside", "node", undefined, this.sheet);
    this.node.setAttribute("aria-label", "the chosen node");
  }
  title(area, p, sub) {
    const h = el("h3", "", undefined, area);
    el("span", "letter", p.letter, h);
    if (p.name) el("span", "name", p.name, h);
    h.sub = el("span", "sub", sub, h);
    return h;
  }
  // a select of view[key]; `closed`: why only the first option can be chosen, or ""
  choice(parent, label, key, options, closed = "") {
    const box = el("label", "", label, parent),
      select = el("select", "", undefined, box),
      groups = new Map();
    select.setAttribute("aria-label", label);
    this.selects[key] = select;
    options.forEach((o, k) => {
      if (o.group && !groups.has(o.group)) groups.set(o.group, el("optgroup", "", undefined, select)).get(o.group).label = o.group;
      const option = el("option", "", o.label, groups.get(o.group) || select);
      option.value = o.key;
      option.disabled = Boolean(closed && k);
      if (o.meaning) option.title = o.meaning;
    });
    if (closed) el("span", "closed", closed, box);
    if (closed || !options.some((o) => o.key === this.view[key])) this.view[key] = options[0].key;
    const explain = () => (select.title = (options.find((o) => o.key === this.view[key]) || {}).meaning || "");
    select.value = this.view[key];
    explain();
    select.onchange = () => {
      this.view[key] = select.value;
      explain();
      this.tip.style.display = "none"; // it tells of the quantity before
      this.draw();
      const { quantity, depth, head, way, layer, compare } = this.view;
      this.onSelect("show", { quantity, depth, head, way, layer, compare });
      this.ask();
    };
  }
  bar(parent) {
    const box = el("div", "bar", undefined, parent);
    return { box, text: el("span", "", "", box), canvas: el("canvas", "", undefined, box) };
  }
  map(area, kind, i, h, between = false) {
    const frame = el("div", "map", undefined, area),
      base = el("canvas", "base", undefined, frame),
      over = el("canvas", "over", undefined, frame);
    const m = { kind, i, area, frame, base, over, h, between, slots: {}, why: el("p", "why", "", area) };
    base.dataset.map = `${kind}-${between ? "difference" : this.panels[i].letter}`;
    base.setAttribute("role", "application");
    base.setAttribute("aria-roledescription", "map");
    base.tabIndex = 0;
    base.onkeydown = (e) => this.key(e, m);
    base.onblur = () => this.point(m, null);
    base.onpointermove = (e) => this.point(m, this.hit(m, e), [e.clientX, e.clientY]);
    base.onpointerleave = () => this.point(m, null);
    base.onclick = (e) => {
      const at = this.hit(m, e);
      if (at) this.pick(m, at);
    };
    this.maps.push(m);
    return m;
  }

  // ---- choosing
  get readLut() {
    return this.lut[this.mode.signed ? "both" : "warm"];
  }
  get here() {
    return this.panels[this.view.panel];
  }
  get comparing() {
    return this.view.compare === "difference";
  }
  site(i) {
    const p = this.panels[i];
    return p === this.here ? this.view.site : p.same(this.view.site, this.here);
  }
  // the position of panel j that stands beside `pos` of panel i, or -1
  beside(pos, i, j) {
    const at = i === j ? pos : j ? pos + this.shift : pos - this.shift;
    return at >= 0 && at < this.panels[j].T ? at : -1;
  }
  at(i) {
    return this.beside(this.view.pos, this.view.panel, i);
  }
  alone(i) {
    const { panel, pos } = this.view;
    return `No position of ${"AB"[i]} stands beside position ${pos} of ${"AB"[panel]}.`;
  }
  // how: "jump", "step" (to where the node before reads from), "key", "play", "back"
  select(cell, how = "jump", trail = []) {
    const { panel: p0, pos: t0, site: s0 } = this.view,
      before = { panel: p0, pos: t0, site: s0 };
    Object.assign(this.view, { panel: cell.panel, pos: cell.pos ?? t0, site: cell.site });
    const { panel, pos, site } = this.view;
    if (panel === p0 && pos === t0 && site === s0 && how !== "step" && how !== "back") return;
    const hint = this.sheet.querySelector(".hint");
    if (hint) hint.style.visibility = "hidden"; // it speaks of the node before; its place stays
    // a run of arrow keys, or of playback, is one choice to go back from
    if (how !== "back" && !(how === this.how && (how === "key" || how === "play")))
      this.past = [...this.past.slice(1 - PAST), { cell: before, trail: this.trail }];
    this.trail = trail.slice(-LONGEST);
    this.how = how;
    this.draw();
    clearTimeout(this.timer);
    if (how !== "play") this.timer = setTimeout(() => this.report(), how === "key" ? 180 : 0);
  }
  report() {
    const { panel, pos, site } = this.view;
    this.onSelect("cell", { panel, pos, site, ...(this.trail.length && { trail: this.trail }) });
    this.ask();
  }
  pick(m, { c, r }) {
    const p = this.panels[m.i],
      i = m.i,
      row = p.row.get(this.site(i)),
      pos = this.at(i);
    if (m.kind === "grid") return this.go({ panel: i, pos: c, site: p.rows[r] });
    if (m.kind === "depth") {
      const read = p.rows[r + 1],
        source = r + 1 === row && p.read(this.view.depth, row, pos).find((s) => s.index === c),
        atom = source && source.atoms[source.atoms.length - 1];
      return this.go({ panel: i, pos, site: p.row.has(atom) ? atom : read }); // in the chosen row a source is one to go to
    }
    const site = p.lookAt(this.site(i));
    if (m.line) r = pos; // the one row of a lean payload
    return this.go({ panel: i, pos: r === pos && site === this.site(i) && c < r ? c : r, site });
  }
  key(e, m) {
    if (e.altKey || e.ctrlKey || e.metaKey) return;
    if (m.kind !== "grid" || m.between) {
      this.cursor(e, m);
      return;
    }
    const p = this.panels[m.i],
      row = p.row.get(this.site(m.i)),
      pos = Math.max(0, this.at(m.i));
    if (e.key === "Enter" || e.key === " ") {
      e.preventDefault();
      this.descend(m.i, e.shiftKey);
      return;
    }
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
    this.pause();
    this.point(m, null);
    const c = Math.max(0, Math.min(p.T - 1, to[0])),
      r = Math.max(0, Math.min(p.rows.length - 1, to[1]));
    this.select({ panel: m.i, pos: c, site: p.rows[r] }, "key");
    this.live.textContent = this.tell(c, p.rows[r], m.i).join(". ");
  }
  // in the other maps the keys move a cursor, as the pointer does, and Enter chooses
  cursor(e, m) {
    const g = m.geom,
      now = this.hover && this.hover.m === m ? this.hover : null;
    if (!g) return;
    if (e.key === "Escape") this.point(m, null);
    if ((e.key === "Enter" || e.key === " ") && now) {
      e.preventDefault();
      this.pick(m, now);
      if (m.geom && now.c < m.geom.cols && now.r < m.geom.rows) this.pointAt(m, now);
    }
    const up = g.up ? 1 : -1,
      by = {
        ArrowLeft: [-1, 0],
        ArrowRight: [1, 0],
        ArrowUp: [0, up],
        ArrowDown: [0, -up],
        Home: [-1e9, 0],
        End: [1e9, 0],
        PageUp: [0, up * 1e9],
        PageDown: [0, -up * 1e9],
      }[e.key];
    if (!by) return;
    e.preventDefault();
    const start = now || this.chosenIn(m),
      inside = (v, n) => Math.max(0, Math.min(n - 1, v));
    const cell = now ? { c: start.c + by[0], r: start.r + by[1] } : start; // the first key only shows the cursor
    this.pointAt(m, { c: inside(cell.c, g.cols), r: inside(cell.r, g.rows) });
    this.live.textContent = this.tip.textContent.replaceAll("\n", ". ");
  }
  chosenIn(m) {
    const p = this.panels[m.i],
      row = p.row.get(this.site(m.i)),
      pos = Math.max(0, this.at(m.i));
    if (m.kind === "grid") return { c: pos, r: row };
    return m.kind === "depth" ? { c: 0, r: Math.max(0, row - 1) } : { c: pos, r: m.line ? 0 : pos };
  }
  pointAt(m, at) {
    const box = m.base.getBoundingClientRect(),
      [x, y, w, h] = this.rect(m.geom, at.c, at.r);
    this.point(m, at, [box.left + x + w, box.top + y + h]);
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
  point(m, at, from) {
    if (!at && (!this.hover || this.hover.m !== m)) return;
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
    const x = from[0] - box.left,
      y = from[1] - box.top;
    this.tip.style.left = `${Math.max(0, x + 14 + w > box.width ? x - w - 10 : x + 14)}px`;
    this.tip.style.top = `${y + 16 + h > box.height ? y - h - 10 : y + 16}px`;
  }
}
