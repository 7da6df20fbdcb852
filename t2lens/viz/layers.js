// What the server is asked, how its answers come in, and the layer that fills all of a node's past: the rollout.
// One part of the module that maps.js describes.

Object.assign(View.prototype, {
  // ---- answers
  receive(answers) {
    for (const answer of Array.isArray(answers) ? answers : []) {
      this.answers.add(answer);
      if (answer && answer.kind === "grid" && answer.values && this.panels[answer.panel])
        this.panels[answer.panel].fill(answer);
    }
  },
  take(answers) {
    this.receive(answers);
    this.measuring = "";
    this.ranges.clear(); // of differences: there may be more numbers now
    this.drawSoon();
    this.ask(); // what is still missing, if it was not asked
  },
  // what is shown and not there: all of it, because the server hears the last question only
  wants() {
    const { quantity, layer } = this.view,
      { later } = this.quantity,
      wants = [];
    for (const p of this.panels) {
      const node = { panel: p.i, pos: this.at(p.i), site: this.site(p.i), way: p.way },
        add = (kind, want) => this.answers.get(kind, want) || wants.push({ kind, ...want });
      const { panel, pos, site, way } = node;
      if (later && !p.grid[quantity] && !p.absent[quantity]) add("grid", { panel, way, quantity });
      if (pos < 0) continue;
      if (p.lean) add("column", { panel, pos });
      const looks = p.lookAt(site);
      if (looks && !p.whole(looks)) add("row", { panel, pos, site: looks });
      if (layer === "rollout" && site !== "embed") add("rollout", node);
      if (this.measuring === this.nodeKey() && site !== "embed") add("effects", node);
    }
    return wants;
  },
  nodeKey() {
    const { panel, pos, site, way } = this.view;
    return [panel, pos, site, way].join("|");
  },
  ask() {
    if (!this.served || this.player?.timer) return;
    const wants = this.wants(),
      asked = JSON.stringify(wants);
    this.box.setAttribute("aria-busy", String(wants.length > 0));
    if (!wants.length || asked === this.asked) return;
    this.asked = asked;
    this.onSelect("ask", { wants });
  },
  // why an answer is not there, in words
  waiting(kind, panel, want) {
    const failed = this.panels[panel].failed(kind, want);
    if (failed || !this.served) return failed || "not in this page";
    return this.player.timer ? "computed when playback stops" : "computing \u2026";
  },

  // ---- rollout: how much of the chosen node each earlier node feeds, over both axes
  offersRollout() {
    return this.served || (this.payload.answers || []).some((answer) => answer.kind === "rollout");
  },
  // the rollout of the chosen node in panel i: null while the layer is off, {numbers, ends} or {} while it is not there
  rollout(i) {
    if (this.view.layer !== "rollout") return null;
    const found = this.panels[i].answer("rollout", { pos: this.at(i), site: this.site(i) });
    if (found) found.numbers ??= unpack(found.values);
    return found || {};
  },
  // one range for the rollouts shown: their largest share, the chosen node's own 1 aside
  rolloutRange() {
    let top = 0;
    this.panels.forEach((p, i) => {
      const { numbers } = this.rollout(i) || {};
      if (!numbers) return;
      const own = p.row.get(this.site(i)) * p.T + this.at(i);
      for (let k = 0; k < numbers.length; k++) if (k !== own && numbers[k] > top) top = numbers[k];
    });
    this.fedTop = top || 1;
    this.fed.box.hidden = this.view.layer !== "rollout";
    if (this.view.layer === "rollout")
      this.colourBar(this.fed, "Share of the node, root scale", this.lut.warm, this.rootTicks(this.fedTop));
  },
  fedWords(i, fed) {
    const p = this.panels[i],
      site = this.site(i),
      pos = this.at(i);
    if (site === "embed") return "embed is written, not read: nothing feeds it.";
    if (!fed || !fed.numbers) {
      return `Rollout of ${site}@${pos}: ${this.waiting("rollout", i, { pos, site })}`;
    }
    return [`How much of ${site}@${pos} passes through each earlier node.`, ...(fed.ends || [])].join(" ");
  },
  quadrant(ctx, m, g, p, row, pos, { numbers }) {
    const low = { ...g, cols: pos + 1, rows: row + 1, y: g.y + (g.rows - 1 - row) * g.ch },
      own = (c, r) => c === pos && r === row;
    const value = (c, r) => {
      const v = own(c, r) ? NaN : numbers[r * p.T + c];
      return Number.isNaN(v) ? null : v;
    };
    const shade = (v) => Math.round(255 * ROOT(Math.max(0, v), this.fedTop));
    const key = [p.way, p.rows[row], pos, this.fedTop].join();
    this.cells(ctx, m, key, this.lut.warm, value, shade, { g: low, slot: "fed" });
    ctx.strokeStyle = this.colors.ink;
    ctx.lineWidth = 1;
    ctx.strokeRect(low.x - 0.5, low.y - 0.5, low.cols * low.cw + 1, low.rows * low.ch + 1);
    // the largest shares above the embeddings, in numbers, where there is room
    if (g.ch < 9) return;
    const best = [];
    for (let r = 0; r <= row; r++)
      for (let c = 0; c <= pos; c++) if (!own(c, r) && numbers[r * p.T + c] >= 0.1) best.push([numbers[r * p.T + c], c, r]);
    const placed = [];
    for (const [v, c, r] of best.sort((a, b) => b[0] - a[0])) {
      const x = Math.max(g.x + 11, g.x + (c + 0.5) * g.cw),
        y = g.y + (g.rows - 1 - r + 0.5) * g.ch;
      if (placed.some(([a, b]) => Math.abs(a - x) < 28 && Math.abs(b - y) < 11)) continue;
      placed.push([x, y]);
      this.text(ctx, v.toFixed(2), x, y, { size: 10, color: this.colors.ink, weight: 600, halo: true });
      if (placed.length === 6) break;
    }
  },
});
