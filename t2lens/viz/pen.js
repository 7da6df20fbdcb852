// What every map is drawn with: colours, text, cells, token strip, colour bars. One part of the module that maps.js describes.

Object.assign(View.prototype, {
  draw() {
    cancelAnimationFrame(this.frame);
    this.frame = 0;
    for (const map of this.drawing()); // all of them, now
  },
  // in the frames to come, some maps in each: what arrives late never keeps the page from following the pointer
  drawSoon() {
    cancelAnimationFrame(this.frame);
    const maps = this.drawing(),
      some = () => {
        const until = performance.now() + 10;
        let done = false;
        while (!done && performance.now() < until) done = maps.next().done;
        this.frame = done ? 0 : requestAnimationFrame(some);
      };
    this.frame = requestAnimationFrame(some);
  },
  // what is still to be drawn, at once
  settle() {
    if (this.frame) this.draw();
  },
  // reads the colours of the page; gives them as one text
  themed() {
    const probe = (name) => {
      this.tip.style.color = `var(${name})`;
      const c = getComputedStyle(this.tip).color;
      this.tip.style.color = "";
      return c;
    };
    this.colors = { paper: probe("--paper"), ink: probe("--ink"), mute: probe("--mute"), hair: probe("--hair") };
    return Object.values(this.colors).join();
  },
  *drawing() {
    if (!this.panels) return;
    this.width = this.box.clientWidth;
    this.theme = this.themed();
    this.font = getComputedStyle(this.box).fontFamily;
    const tmp = el("canvas").getContext("2d");
    tmp.fillStyle = this.colors.paper;
    tmp.fillRect(0, 0, 1, 1);
    const [r, g, b] = tmp.getImageData(0, 0, 1, 1).data,
      dark = r + g + b < 384;
    this.box.classList.toggle("dark", dark);
    if (dark !== this.isDark) {
      this.isDark = dark;
      this.lut = Object.fromEntries(Object.entries(RAMPS[dark ? "dark" : "light"]).map(([k, v]) => [k, lut(v)]));
    }
    this.quantity = this.payload.quantities.find((o) => o.key === this.view.quantity);
    this.mode = this.payload.depth.find((o) => o.key === this.view.depth);
    for (const p of this.panels) {
      p.head = this.view.head;
      p.use(this.view.way);
    }
    const look = [this.rev, this.isDark, this.width, this.quantity.key, this.mode.key].join();
    if (look !== this.look) {
      this.look = look;
      this.bars();
      this.legend();
    }
    this.box.classList.toggle("difference", this.comparing);
    this.box.classList.toggle("long", this.comparing && this.panels[0].T * 7 > this.width / 3.4);
    this.rolloutRange();
    for (const m of this.maps) m.wide = m.area.clientWidth; // all read before any map is written
    for (const m of this.maps) {
      if (m.between && !this.comparing) continue;
      if (m.between) this.apartMap(m);
      else this[m.kind](m);
      m.marks = ""; // the layer above is empty now
      this.mark(m);
      yield m;
    }
    this.refill(() => {
      this.walkLine();
      this.detail();
    });
  },
  // LUT index of a value, or the name of the state that is not a number
  shade(v, { lo, hi, log }) {
    if (!Number.isFinite(v)) return "nan";
    const t = log ? Math.log(v / lo) / Math.log(hi / lo) : (v - lo) / (hi - lo || 1);
    return Math.max(0, Math.min(255, Math.round(255 * t)));
  },
  shadeRead(v) {
    const t = ROOT(v, this.mode.hi);
    return Number.isFinite(v) ? Math.round(this.mode.signed ? 127.5 * (t + 1) : 255 * Math.max(0, t)) : "nan";
  },
  shadeWeight(v) {
    return Number.isFinite(v) ? Math.round(255 * ROOT(Math.max(0, v), this.payload.sequenceHi)) : "nan";
  },

  fit(canvas, w, h) {
    const s = devicePixelRatio || 1,
      ctx = canvas.getContext("2d");
    canvas.width = Math.round(w * s);
    canvas.height = Math.round(h * s);
    canvas.style.width = `${w}px`;
    canvas.style.height = `${h}px`;
    ctx.setTransform(s, 0, 0, s, 0, 0);
    return ctx;
  },
  text(
    ctx,
    s,
    x,
    y,
    { align = "center", color = this.colors.mute, size = 10.5, weight = 400, turn = 0, halo = false } = {},
  ) {
    ctx.save();
    ctx.font = `${weight} ${size}px ${this.font}`;
    ctx.textAlign = align;
    ctx.direction = "ltr"; // a word from right to left stays in its place of the strip
    ctx.textBaseline = "middle";
    ctx.fillStyle = color;
    ctx.translate(x, y);
    ctx.rotate(turn);
    if (halo) {
      ctx.strokeStyle = this.colors.paper;
      ctx.lineWidth = 3;
      ctx.lineJoin = "round";
      ctx.strokeText(s, 0, 0);
    }
    ctx.fillText(s, 0, 0);
    ctx.restore();
  },
  // a sentence inside a map, on as many lines as it needs
  sentence(ctx, words, mid, y, room) {
    ctx.font = `13px ${this.font}`;
    const lines = [""];
    for (const word of words.split(" ")) {
      const longer = `${lines[lines.length - 1]} ${word}`.trim();
      if (ctx.measureText(longer).width > room - 16 && lines[lines.length - 1]) lines.push(word);
      else lines[lines.length - 1] = longer;
    }
    const w = Math.max(...lines.map((line) => ctx.measureText(line).width)) + 16,
      h = 17 * lines.length + 5;
    ctx.fillStyle = this.colors.paper;
    ctx.fillRect(mid - w / 2, y - h / 2, w, h);
    lines.forEach((line, k) => this.text(ctx, line, mid, y + 17 * (k - (lines.length - 1) / 2), { size: 13 }));
  },
  hatch(ctx, x, y, w, h) {
    w = Math.max(w, 2);
    h = Math.max(h, 2);
    ctx.save();
    ctx.beginPath();
    ctx.rect(x, y, w, h);
    ctx.clip();
    ctx.strokeStyle = this.colors.mute;
    ctx.lineWidth = 0.8;
    ctx.beginPath();
    for (let k = -h; k < w; k += 4) {
      ctx.moveTo(x + k, y + h);
      ctx.lineTo(x + k + h, y);
    }
    ctx.stroke();
    ctx.restore();
  },
  mask(ctx, x, y, w, h, free = () => true) {
    ctx.save();
    ctx.fillStyle = this.colors.mute;
    ctx.globalAlpha = 0.5;
    for (let px = 2; px < w; px += 5)
      for (let py = 2; py < h; py += 5) if (free(px, py)) ctx.fillRect(Math.round(x + px), Math.round(y + py), 1, 1);
    ctx.restore();
  },

  // how many cells one pixel of the screen must hold, across and up
  blocks(g) {
    const s = devicePixelRatio || 1,
      of = (size) => Math.max(1, Math.ceil(1 / (size * s) - 1e-6));
    return [of(g.cw), of(g.ch)];
  },
  // what is said where a pixel stands for several cells, or ""
  downsampled(g) {
    const [a, b] = this.blocks(g);
    return a * b === 1 ? "" : `Downsampled: a pixel shows the mean of ${a * b} cells; numbers under the pointer are exact.`;
  },
  // One pixel per cell, or per block of cells where they are smaller than the screen's, made once per `key` and scaled.
  // value(c, r): a number, or null where there is nothing; r counts from the bottom when g.up. shade: LUT index of a
  // number, or "nan".
  raster(m, g, slot, key, table, value, shade) {
    const [bx, by] = this.blocks(g),
      full = [this.rev, this.isDark, key, bx, by, g.cols, g.rows].join();
    if (m.slots[slot] && m.slots[slot].key === full) return m.slots[slot];
    const w = Math.ceil(g.cols / bx),
      h = Math.ceil(g.rows / by),
      image = el("canvas"),
      data = new ImageData(w, h),
      pixels = new Uint32Array(data.data.buffer),
      packed = table.map(([r, gr, b]) => 0xff000000 | (b << 16) | (gr << 8) | r),
      odd = [],
      zeros = [];
    for (let y = 0; y < h; y++)
      for (let x = 0; x < w; x++) {
        let sum = 0,
          n = 0;
        for (let k = y * by; k < Math.min(g.rows, (y + 1) * by); k++)
          for (let c = x * bx; c < Math.min(g.cols, (x + 1) * bx); c++) {
            const r = g.up ? g.rows - 1 - k : k,
              v = value(c, r);
            if (v === null) continue;
            if (!Number.isFinite(v)) odd.length < 4000 && odd.push([c, r]);
            else {
              sum += v;
              n++;
              if (v === 0) zeros.push([c, r]);
            }
          }
        if (n) pixels[y * w + x] = packed[shade(sum / n)];
      }
    image.width = w;
    image.height = h;
    image.getContext("2d").putImageData(data, 0, 0);
    return (m.slots[slot] = { key: full, image, odd, zeros, bx, by });
  },
  // the cells of a map; `g`: where, `slot`: under which name the picture is kept, `faint`: drawn to step back
  cells(ctx, m, key, table, value, shade, { g = m.geom, slot = "base", faint = false } = {}) {
    const { image, odd, zeros, bx, by } = this.raster(m, g, slot, key, table, value, shade);
    ctx.save();
    ctx.beginPath();
    ctx.rect(g.x, g.y, g.cols * g.cw, g.rows * g.ch);
    ctx.clip();
    ctx.globalAlpha = faint ? 0.25 : 1;
    ctx.imageSmoothingEnabled = false;
    ctx.drawImage(image, g.x, g.y, image.width * bx * g.cw, image.height * by * g.ch);
    for (const [c, r] of odd) this.hatch(ctx, ...this.rect(g, c, r));
    ctx.restore();
    if (g.cw >= 7 && g.ch >= 7) {
      // hairlines keep neighbours apart; a dot says "exactly zero"
      ctx.fillStyle = this.colors.paper;
      for (let c = 1; c < g.cols; c++) ctx.fillRect(Math.round(g.x + c * g.cw) - 0.5, g.y, 1, g.rows * g.ch);
      for (let r = 1; r < g.rows; r++) ctx.fillRect(g.x, Math.round(g.y + r * g.ch) - 0.5, g.cols * g.cw, 1);
      ctx.fillStyle = this.colors.mute;
      for (const [c, r] of faint ? [] : zeros) {
        const [x, y, w, h] = this.rect(g, c, r);
        ctx.fillRect(x + w / 2 - 1, y + h / 2 - 1, 2, 2);
      }
    }
    ctx.strokeStyle = this.colors.hair;
    ctx.lineWidth = 1;
    ctx.strokeRect(g.x - 0.5, g.y - 0.5, g.cols * g.cw + 1, g.rows * g.ch + 1);
  },
  rect(g, c, r) {
    const k = g.up ? g.rows - 1 - r : r,
      x = Math.round(g.x + c * g.cw),
      y = Math.round(g.y + k * g.ch);
    return [x, y, Math.round(g.x + (c + 1) * g.cw) - x, Math.round(g.y + (k + 1) * g.ch) - y];
  },
  // the token strip below an axis: level when the words fit, upright when not, thinned when many
  strip(p, cw, most = 12) {
    if (!p.strips || p.strips.font !== this.font) p.strips = { font: this.font };
    if (!p.strips[most]) {
      const ctx = el("canvas").getContext("2d"),
        words = p.tokens.map((t) => clip(glyphs(t), most));
      ctx.font = `600 10.5px ${this.font}`;
      const wide = Math.max(...[...new Set(words)].map((w) => ctx.measureText(w).width));
      p.strips[most] = { words, wide };
    }
    const { words, wide } = p.strips[most],
      level = wide <= cw - 4;
    return { words, level, wide, every: level ? 1 : Math.max(1, Math.ceil(11.5 / cw)), height: 17 + (level ? 13 : wide) };
  },
  positions(ctx, p, g, strip, chosen) {
    const room = 12 + 6 * String(p.T - 1).length,
      step = STEPS.find((s) => s * g.cw >= room) || 2000,
      y = g.y + g.rows * g.ch,
      at = (c) => g.x + (c + 0.5) * g.cw,
      right = g.x + g.cols * g.cw + 2, // of the canvas: no label leaves it
      digits = (c) => 2.8 * String(c).length + 1;
    const mine = { color: this.colors.ink, weight: 700 };
    const label = (word, c) => {
      const near = c !== chosen && chosen >= 0 && Math.abs(c - chosen) * g.cw,
        far = chosen < 0 || c === chosen;
      if (c === chosen || (c % step === 0 && (far || near >= room - 4)))
        this.text(ctx, String(c), Math.min(at(c), right - digits(c)), y + 8, { size: 9.5, ...(c === chosen && mine) });
      if (c !== chosen && (c % strip.every || (!strip.level && !far && near < 11))) return;
      this.text(ctx, word, strip.level ? at(c) : Math.min(at(c), right - 6), y + (strip.level ? 22 : 17), {
        align: strip.level ? "center" : "right",
        turn: strip.level ? 0 : -Math.PI / 2,
        ...(c === chosen && mine),
      });
    };
    for (let c = 0; c < p.T; c++)
      if (c === chosen || c % step === 0 || c % strip.every === 0) label(strip.words[c], c);
  },

  corner(ctx, g, c, r) {
    const [x, y, w] = this.rect(g, c, r),
      s = Math.min(5, w);
    ctx.fillStyle = this.colors.paper;
    ctx.beginPath();
    ctx.moveTo(x + w - s, y);
    ctx.lineTo(x + w, y);
    ctx.lineTo(x + w, y + s);
    ctx.fill();
  },
  legend() {
    const s = 13,
      draw = [
        () => {},
        (c) => this.mask(c, 0, 0, s, s),
        (c) => {
          c.fillStyle = css(this.lut.warm[0]);
          c.fillRect(0, 0, s, s);
          c.fillStyle = this.colors.mute;
          c.fillRect(s / 2 - 1, s / 2 - 1, 2, 2);
        },
        (c) => this.hatch(c, 0, 0, s, s),
        (c) => {
          c.fillStyle = css(this.lut.cool[255]);
          c.fillRect(0, 0, s, s);
          this.corner(c, { x: 0, y: 0, cw: s, ch: s, cols: 1, rows: 1 }, 0, 0);
        },
      ];
    this.keys.forEach((canvas, i) => {
      const ctx = this.fit(canvas, s, s);
      draw[i](ctx);
      ctx.strokeStyle = this.colors.hair;
      ctx.strokeRect(0.5, 0.5, s - 1, s - 1);
    });
  },
  colourBar({ text, canvas }, label, table, ticks, arrow = false) {
    text.textContent = label;
    const W = this.width < 1000 ? (this.crowded ? 92 : 108) : this.crowded ? 108 : 150,
      ctx = this.fit(canvas, W + 40, 25);
    for (let i = 0; i < W; i++) {
      ctx.fillStyle = css(table[Math.round((255 * i) / (W - 1))]);
      ctx.fillRect(20 + i, 0, 1, 9);
    }
    ctx.strokeStyle = this.colors.hair;
    ctx.strokeRect(19.5, 0.5, W + 1, 9);
    if (arrow) {
      ctx.fillStyle = css(table[255]);
      ctx.beginPath();
      ctx.moveTo(22 + W, 0);
      ctx.lineTo(30 + W, 4.5);
      ctx.lineTo(22 + W, 9);
      ctx.fill();
    }
    for (const [t, s] of ticks) {
      ctx.fillStyle = this.colors.mute;
      ctx.fillRect(20 + t * W - 0.5, 9, 1, 3);
      this.text(ctx, s, 20 + t * W, 19, { size: 10 });
    }
  },
  // ticks of a root scale from 0 to `top`, and of one from -top to top
  rootTicks: (top) => [0, 0.05, 0.25, 1].map((f) => [ROOT(f, 1), fmt(f * top, 2)]),
  bothTicks: (top) => [-1, -0.25, 0, 0.25, 1].map((f) => [(ROOT(f, 1) + 1) / 2, fmt(f * top, 2)]),
  bars() {
    const q = this.quantity,
      mid = q.log ? Math.sqrt(q.lo * q.hi) : (q.lo + q.hi) / 2,
      hi = this.mode.hi,
      name = `${q.label}${q.unit && ` (${q.unit})`}`;
    this.colourBar(
      this.cool,
      `${name}${q.log ? ", log scale" : ""}${q.above ? `; ${q.above} above` : ""}`,
      this.lut[q.signed ? "both" : "cool"],
      [
        [0, fmt(q.lo, 3)],
        [0.5, fmt(mid, 3)],
        [1, fmt(q.hi, 3)],
      ],
      q.above,
    );
    this.colourBar(
      this.warm,
      `${this.mode.label}, root scale`,
      this.readLut,
      this.mode.signed ? this.bothTicks(hi) : this.rootTicks(hi),
    );
    this.colourBar(
      this.back,
      "Sequence attention, root scale",
      this.lut.warm,
      this.rootTicks(this.payload.sequenceHi),
    );
  },
});
