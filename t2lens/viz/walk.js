// The walk from a node to where it reads from, the way back, and playback. One part of the module that maps.js describes.

const SPEEDS = [1, 2, 4, 8, 16]; // nodes a second
const LONGEST = 24; // nodes of a walk, the last ones: a link keeps as many
// what Back can undo of a walk that one did not walk oneself
const walked = (trail) =>
  trail.flatMap(({ panel, pos, site, word }, k) => (word === undefined ? [{ cell: { panel, pos, site }, trail: trail.slice(0, k) }] : []));
const AXES = { depth: ["up", "up the depth"], sequence: ["along", "along the sequence"] };

Object.assign(View.prototype, {
  buildWalk(nav) {
    this.backButton = el("button", "back", "\u2190 Back", nav);
    this.backButton.onclick = () => this.goBack();
    this.backButton.title = "Backspace, or Alt and the left arrow";
    this.crumbs = el("div", "walk", undefined, nav);
    this.crumbs.setAttribute("role", "navigation");
    this.crumbs.setAttribute("aria-label", "walk to the origins of a node");
  },
  buildPlayback(nav) {
    this.player ??= { axis: "depth", speed: 4, timer: 0 };
    this.player.timer = 0;
    const play = el("div", "play", undefined, nav),
      still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    play.setAttribute("role", "group");
    play.setAttribute("aria-label", "playback");
    const button = (sign, label, act) => {
      const b = el("button", "", undefined, play);
      el("i", `sign ${sign}`, undefined, b);
      b.title = label;
      b.setAttribute("aria-label", label);
      b.onclick = act;
      return b;
    };
    const step = (by) => () => {
      this.pause();
      this.advance(by);
      this.stepped();
    };
    button("before", "previous node", step(-1));
    // nothing moves by itself for those who ask for less motion
    this.playButton = still ? null : button("go", "play", () => (this.player.timer ? this.pause() : this.start()));
    button("after", "next node", step(1));
    const pace = el("select", "", undefined, play);
    pace.title = still ? "direction of playback" : "direction of playback, and its nodes per second";
    pace.setAttribute("aria-label", pace.title);
    for (const [axis, [short, long]] of Object.entries(AXES)) {
      const group = still ? pace : el("optgroup", "", undefined, pace);
      if (!still) group.label = long;
      for (const speed of still ? [this.player.speed] : SPEEDS)
        el("option", "", still ? long : `${short} ${speed}/s`, group).value = `${axis} ${speed}`;
    }
    pace.value = `${this.player.axis} ${this.player.speed}`;
    pace.onchange = () => {
      const [axis, speed] = pace.value.split(" ");
      Object.assign(this.player, { axis, speed: Number(speed) });
      if (this.player.timer) this.start();
    };
  },
  // the node `by` steps further along the axis of playback, or null at the end
  next(by) {
    const { panel, pos, site } = this.view,
      p = this.here;
    if (this.player.axis === "sequence") return pos + by >= 0 && pos + by < p.T ? { panel, pos: pos + by, site } : null;
    const row = p.row.get(site) + by;
    return row >= 0 && row < p.rows.length ? { panel, pos, site: p.rows[row] } : null;
  },
  advance(by) {
    const cell = this.next(by);
    if (cell) this.select(cell, "play");
    return Boolean(cell);
  },
  start() {
    clearInterval(this.player.timer);
    const { panel, pos, site } = this.view;
    if (!this.next(1)) // at the end: from the start again
      this.select(this.player.axis === "depth" ? { panel, pos, site: "embed" } : { panel, pos: 0, site }, "play");
    this.player.timer = setInterval(() => this.advance(1) || this.pause(), 1000 / this.player.speed);
    this.playLabel(true);
  },
  // stop, and only now tell the server where one is
  pause() {
    if (!this.player.timer) return;
    clearInterval(this.player.timer);
    this.player.timer = 0;
    this.playLabel(false);
    this.report();
  },
  stepped() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.report(), 180);
    const { pos, site, panel } = this.view;
    this.live.textContent = this.tell(pos, site, panel).join(". ");
  },
  playLabel(on) {
    if (!this.playButton) return;
    this.playButton.title = on ? "pause" : "play";
    this.playButton.firstChild.className = `sign ${on ? "halt" : "go"}`;
    this.playButton.setAttribute("aria-label", this.playButton.title);
  },

  // ---- the walk: a choice in the cross of the node (or in its rollout) is a step to an origin, any other a jump
  go(cell) {
    this.pause();
    const { panel } = cell,
      from = { panel, pos: this.at(panel), site: this.site(panel) };
    if (this.feeds(cell, from)) this.select(cell, "step", [...this.trail, from]);
    else this.select(cell);
  },
  feeds({ panel, pos, site }, from) {
    const p = this.panels[panel],
      row = p.row.get(from.site);
    if (from.pos < 0 || (pos === from.pos && site === from.site)) return false;
    const fed = this.rollout(panel);
    if (fed && fed.numbers && pos <= from.pos && p.row.get(site) <= row)
      return fed.numbers[p.row.get(site) * p.T + pos] > 0;
    if (pos === from.pos) return p.read(this.view.depth, row, pos).some((s) => s.atoms.includes(site));
    return site === from.site && p.looks(site) && pos < from.pos && !p.masked(site, from.pos, pos);
  },
  // from a table of the node panel: always a step; `word`: the next token whose logit one comes from
  follow(cell, word) {
    this.pause();
    const { panel } = cell,
      from = { panel, pos: this.at(panel), site: this.site(panel) };
    if (word === undefined && cell.pos === from.pos && cell.site === from.site) return;
    this.select(cell, "step", word === undefined ? [...this.trail, from] : [{ ...cell, word }]);
  },
  // with the keyboard: to the source that the node reads most of, or (`back`) to the position it looks at most
  descend(i, back) {
    const p = this.panels[i],
      site = this.site(i),
      pos = this.at(i);
    if (pos < 0) return;
    const size = (v) => (Number.isFinite(v) ? Math.abs(v) : -1);
    const places = back
      ? Array.from({ length: p.looks(site) && p.seen(site, pos) ? pos : 0 }, (_, k) => [p.attention(site, pos, k), k, site])
      : p.read(this.view.depth, p.row.get(site), pos).map((s) => [s.value, pos, s.atoms[s.atoms.length - 1]]);
    const best = places.filter(([v, , name]) => size(v) > 0 && p.row.has(name)).sort((a, b) => size(b[0]) - size(a[0]))[0];
    if (best) this.follow({ panel: i, pos: best[1], site: best[2] });
    const nothing = `${site} at position ${pos} reads ${back ? "no other position" : "nothing below"}.`;
    this.live.textContent = best ? this.tell(best[1], best[2], i).join(". ") : nothing;
  },
  goBack() {
    this.pause();
    const last = this.past.pop();
    if (last) this.select(last.cell, "back", last.trail);
  },
  backKey(e) {
    const back = e.key === "Backspace" || (e.key === "ArrowLeft" && e.altKey);
    if (!back || !this.past.length || e.target.tagName === "SELECT" || e.target.tagName === "INPUT") return;
    e.preventDefault(); // of the browser's own way back
    this.goBack();
    const { pos, site, panel } = this.view;
    this.live.textContent = `back at ${this.tell(pos, site, panel).join(". ")}`;
  },
  // make buttons anew without losing the keyboard's place: on the same button, or else on the node where one is
  refill(make) {
    const root = this.box.getRootNode(),
      held = root.activeElement,
      inside = held && (this.crumbs.contains(held) || this.node.contains(held));
    // the same words may stand in A and in B, and in several tables of each
    const name = (o) =>
      [o.closest("[data-node]")?.dataset.node, o.closest("[data-table]")?.dataset.table, o.dataset.part || o.textContent].join("|");
    const before = inside && name(held);
    make();
    if (!inside || held.isConnected) return;
    const again = [...this.node.querySelectorAll("button, summary")].find((o) => name(o) === before);
    (again || this.crumbs.querySelector("strong")).focus({ preventScroll: true });
  },
  walkLine() {
    const { panel, pos, site } = this.view,
      letter = (cell) => (this.trail.some((o) => o.panel !== panel) ? `${"AB"[cell.panel]}:` : "");
    this.backButton.disabled = !this.past.length;
    this.crumbs.textContent = "";
    this.trail.forEach((cell, k) => {
      const name = cell.word === undefined ? `${letter(cell)}${cell.site}@${cell.pos}` : `next token ${isolated(glyphs(cell.word))}`,
        crumb = el("button", "", name, this.crumbs);
      crumb.onclick = () => {
        this.pause();
        this.select(cell, "step", this.trail.slice(0, k + (cell.word === undefined ? 0 : 1)));
      };
      el("span", "", " \u2190 ", this.crumbs);
    });
    const here = el("strong", "", `${letter(this.view)}${site}@${pos}`, this.crumbs);
    here.setAttribute("aria-current", "location");
    here.tabIndex = -1;
    this.crumbs.scrollLeft = 1e6; // the end of a long walk stays in sight
  },
});
