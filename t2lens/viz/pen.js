// What every map is drawn with: colours, text, cells, token strip, colour bars. One part of the module that maps.js describes.

Object.assign(View.prototype, {
  draw() {
    if (!this.panels) return;
    this.width = this.box.clientWidth;
    const style = getComputedStyle(this.box);
    const probe = (name) => {
      this.tip.style.color = `var(${name})`;
      const c = getComputedStyle(this.tip).color;
      this.tip.style.color = "";
      return c;
    };
    this.colors = { paper: probe("--paper"), ink: probe("--ink"), mute: probe("--mute"), hair: probe("--hair") };
    this.font = style.fontFamily;
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
    for (const m of this.maps) {
      this[m.kind](m);
      this.mark(m);
    }
    this.detail();
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
  hatch(ctx, x, y, w, h) {
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

  // One pixel per cell, made once per `key` and scaled. value(c, r): a number, or null where there is nothing; r counts
  // from the bottom when g.up. shade: LUT index of a number, or "nan".
  raster(m, key, table, value, shade) {
    if (m.raster && m.raster.key === key) return m.raster;
    const g = m.geom,
      image = el("canvas"),
      data = new ImageData(g.cols, g.rows),
      pixels = new Uint32Array(data.data.buffer),
      packed = table.map(([r, gr, b]) => 0xff000000 | (b << 16) | (gr << 8) | r);
    m.raster = { key, image, odd: [], zeros: [] };
    for (let r = 0; r < g.rows; r++)
      for (let c = 0; c < g.cols; c++) {
        const v = value(c, r);
        if (v === null) continue;
        const k = shade(v);
        if (k === "nan") m.raster.odd.push([c, r]);
        else pixels[(g.up ? g.rows - 1 - r : r) * g.cols + c] = packed[k];
        if (v === 0) m.raster.zeros.push([c, r]);
      }
    image.width = g.cols;
    image.height = g.rows;
    image.getContext("2d").putImageData(data, 0, 0);
    return m.raster;
  },
  cells(ctx, m, key, table, value, shade) {
    const g = m.geom,
      { image, odd, zeros } = this.raster(m, `${this.rev} ${this.isDark} ${key}`, table, value, shade);
    ctx.imageSmoothingEnabled = g.cw * devicePixelRatio < 1 || g.ch * devicePixelRatio < 1;
    ctx.drawImage(image, g.x, g.y, g.cols * g.cw, g.rows * g.ch);
    for (const [c, r] of odd) this.hatch(ctx, ...this.rect(g, c, r));
    if (g.cw >= 7 && g.ch >= 7) {
      // hairlines keep neighbours apart; a dot says "exactly zero"
      ctx.fillStyle = this.colors.paper;
      for (let c = 1; c < g.cols; c++) ctx.fillRect(Math.round(g.x + c * g.cw) - 0.5, g.y, 1, g.rows * g.ch);
      for (let r = 1; r < g.rows; r++) ctx.fillRect(g.x, Math.round(g.y + r * g.ch) - 0.5, g.cols * g.cw, 1);
      ctx.fillStyle = this.colors.mute;
      for (const [c, r] of zeros) {
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
    const ctx = el("canvas").getContext("2d"),
      words = p.tokens.map((t) => clip(glyphs(t), most));
    ctx.font = `600 10.5px ${this.font}`;
    const wide = Math.max(...words.map((w) => ctx.measureText(w).width)),
      level = wide <= cw - 4;
    return {
      words,
      level,
      wide,
      every: level ? 1 : Math.max(1, Math.ceil(11.5 / cw)),
      height: 17 + (level ? 13 : wide),
    };
  },
  positions(ctx, p, g, strip, chosen) {
    const step = STEPS.find((s) => s * g.cw >= 24) || 1000,
      y = g.y + g.rows * g.ch,
      at = (c) => g.x + (c + 0.5) * g.cw;
    const mine = { color: this.colors.ink, weight: 700 };
    strip.words.forEach((word, c) => {
      const near = c !== chosen && Math.abs(c - chosen) * g.cw;
      if (c === chosen || (c % step === 0 && near >= 18))
        this.text(ctx, String(c), at(c), y + 8, { size: 9.5, ...(c === chosen && mine) });
      if (c !== chosen && (c % strip.every || (!strip.level && near < 11))) return;
      this.text(ctx, word, at(c), y + (strip.level ? 22 : 17), {
        align: strip.level ? "center" : "right",
        turn: strip.level ? 0 : -Math.PI / 2,
        ...(c === chosen && mine),
      });
    });
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
  bars() {
    const draw = ({ text, canvas }, label, table, ticks, arrow) => {
      text.textContent = label;
      const W = this.width < 1000 ? 108 : 150,
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
    };
    const q = this.quantity,
      mid = q.log ? Math.sqrt(q.lo * q.hi) : (q.lo + q.hi) / 2,
      hi = this.mode.hi;
    const root = (top) => [0, 0.05, 0.25, 1].map((f) => [ROOT(f, 1), fmt(f * top, 2)]);
    const both = [-1, -0.25, 0, 0.25, 1].map((f) => [(ROOT(f, 1) + 1) / 2, fmt(f * hi, 2)]);
    draw(
      this.cool,
      `${q.label}${q.unit && ` (${q.unit})`}${q.log ? ", log scale" : ""}${q.above ? `; ${q.above} above` : ""}`,
      this.lut[q.signed ? "both" : "cool"],
      [
        [0, fmt(q.lo, 3)],
        [0.5, fmt(mid, 3)],
        [1, fmt(q.hi, 3)],
      ],
      q.above,
    );
    draw(this.warm, `${this.mode.label}, root scale`, this.readLut, this.mode.signed ? both : root(hi));
    draw(this.back, "Sequence attention, root scale", this.lut.warm, root(this.payload.sequenceHi));
  },
});
