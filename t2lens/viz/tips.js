// Hover text, keyboard and clicks of the SVG pictures of t2lens: one function, for the app and for pages of their own.
//
//   pictureTips(box, svg, onPick)   box holds the <svg>; a mark with data-tip says it when hovered or reached with the
//                                   arrow keys; a mark that stands for a node of the maps (data-site, data-pos, ...) is
//                                   picked with a click or Enter: onPick({site, way, pos}), or null where nobody hears.
//
// A map of many cells is one image with data-cells (words, as JSON) and data-values (base64). All text goes through
// textContent, so that a token is never markup.

const TIP =
  "position:fixed;z-index:9;display:none;pointer-events:none;white-space:pre-line;max-width:340px;padding:5px 9px;" +
  "border:1px solid;border-radius:4px;font:12px/1.45 system-ui,-apple-system,'Segoe UI','Helvetica Neue',Arial,sans-serif;" +
  "font-variant-numeric:tabular-nums;overflow-wrap:anywhere;unicode-bidi:plaintext;box-shadow:0 2px 8px rgb(0 0 0/.15)";

function pictureTips(box, svg, onPick) {
  const tip = document.createElement("div"),
    ring = document.createElementNS("http://www.w3.org/2000/svg", "rect"),
    paper = svg.querySelector(".paper")?.getAttribute("fill") || "#ffffff",
    dark = parseInt(paper.slice(1, 3), 16) < 128,
    ink = dark ? "#e6e8eb" : "#1b1f24";
  let at = null; // {mark, row, column} reached with the keys
  tip.style.cssText = TIP;
  Object.assign(tip.style, { background: paper, color: ink, borderColor: dark ? "#40464d" : "#c9ccd0" });
  tip.setAttribute("role", "status");
  tip.setAttribute("aria-live", "polite");
  for (const [name, value] of Object.entries({ fill: "none", stroke: ink, "stroke-width": 1.6, "pointer-events": "none" }))
    ring.setAttribute(name, value);
  box.append(tip);
  svg.setAttribute("tabindex", "0");
  svg.style.outlineOffset = "2px";

  const cells = (image) => {
    if (!image.t2lens) {
      const words = JSON.parse(image.dataset.cells),
        bytes = Uint8Array.from(atob(image.dataset.values), (c) => c.charCodeAt(0)).buffer;
      image.t2lens = { words, values: words.dtype === "f4" ? new Float32Array(bytes) : new Float64Array(bytes) };
    }
    return image.t2lens;
  };
  const number = (v, dtype) => {
    if (Number.isNaN(v)) return "no value";
    if (dtype !== "f4") return String(v);
    for (let digits = 1; digits <= 9; digits++) if (Math.fround(Number(v.toPrecision(digits))) === v) return String(Number(v.toPrecision(digits)));
    return String(v);
  };
  const place = (image, x, y) => {
    const { words } = cells(image),
      r = image.getBoundingClientRect(),
      clamp = (v, n) => Math.min(n - 1, Math.max(0, Math.floor(v * n)));
    return { mark: image, row: clamp((y - r.top) / r.height, words.rows.length), column: clamp((x - r.left) / r.width, words.columns.length) };
  };
  const say = ({ mark, row, column }) => {
    if (mark.dataset.tip !== undefined) return mark.dataset.tip;
    const { words, values } = cells(mark),
      v = values[row * words.columns.length + column];
    return `${words.rows[row]}\n${words.columns[column]}\n${words.label}: ${number(v, words.dtype)} ${Number.isNaN(v) ? "" : words.unit}`.trim();
  };
  const node = ({ mark, row, column }) => {
    const found = mark.dataset.cells ? { ...cells(mark).words.columnNodes[column], ...cells(mark).words.rowNodes[row] } : { ...mark.dataset };
    delete found.tip;
    if (found.pos !== undefined) found.pos = Number(found.pos);
    return Object.keys(found).length ? found : null;
  };
  const frame = ({ mark, row, column }) => {
    const r = mark.getBoundingClientRect();
    if (row === undefined) return r;
    const { words } = cells(mark),
      w = r.width / words.columns.length,
      h = r.height / words.rows.length;
    return new DOMRect(r.left + column * w, r.top + row * h, w, h);
  };
  const show = (here, x, y) => {
    tip.textContent = say(here);
    tip.style.display = "block";
    const w = tip.offsetWidth,
      h = tip.offsetHeight;
    tip.style.left = `${Math.max(4, Math.min(x + 14, innerWidth - w - 8))}px`;
    tip.style.top = `${y + 18 + h > innerHeight ? Math.max(4, y - h - 12) : y + 18}px`;
    svg.style.cursor = onPick && node(here) ? "pointer" : "";
  };
  const hide = () => {
    tip.style.display = "none";
    ring.remove();
  };
  const under = (event) => {
    const mark = event.target.closest?.("[data-tip],[data-cells]");
    return !mark || !svg.contains(mark) ? null : mark.dataset.tip === undefined ? place(mark, event.clientX, event.clientY) : { mark };
  };
  const circle = (here) => {
    const r = frame(here),
      m = svg.getScreenCTM().inverse(),
      a = new DOMPoint(r.left, r.top).matrixTransform(m),
      b = new DOMPoint(r.right, r.bottom).matrixTransform(m);
    for (const [name, value] of Object.entries({ x: a.x - 1.5, y: a.y - 1.5, width: b.x - a.x + 3, height: b.y - a.y + 3 }))
      ring.setAttribute(name, value);
    svg.append(ring);
    show(here, r.right - 8, r.bottom - 12);
    at = here;
  };
  const pick = (here) => {
    const chosen = here && node(here);
    if (chosen && onPick) onPick(chosen);
  };
  svg.addEventListener("pointermove", (event) => {
    const here = under(event);
    ring.remove();
    if (here) show(here, event.clientX, event.clientY);
    else hide();
  });
  svg.addEventListener("pointerleave", hide);
  svg.addEventListener("blur", hide);
  svg.addEventListener("click", (event) => pick(under(event)));
  svg.addEventListener("keydown", (event) => {
    const step = { ArrowRight: [1, 0], ArrowLeft: [-1, 0], ArrowDown: [0, 1], ArrowUp: [0, -1] }[event.key];
    if (event.key === "Enter" && at) pick(at);
    if (event.key === "Escape") hide();
    if (!step) return;
    event.preventDefault();
    const [dx, dy] = step;
    if (at && at.row !== undefined) {
      const { words } = cells(at.mark),
        column = at.column + dx,
        row = at.row + dy;
      if (words.columns[column] !== undefined && words.rows[row] !== undefined) return circle({ mark: at.mark, row, column });
    }
    const marks = [...svg.querySelectorAll("[data-tip],[data-cells]")];
    const middle = (r) => [r.left + r.width / 2, r.top + r.height / 2];
    const from = at && svg.contains(at.mark) ? middle(frame(at)) : null;
    let best = marks[0],
      least = Infinity;
    for (const mark of from ? marks : []) {
      const [x, y] = middle(mark.getBoundingClientRect()),
        along = (x - from[0]) * dx + (y - from[1]) * dy,
        aside = Math.abs((x - from[0]) * dy) + Math.abs((y - from[1]) * dx);
      if (mark !== at.mark && along > 0.5 && along + 3 * aside < least) [best, least] = [mark, along + 3 * aside];
    }
    if (best && (!from || least < Infinity)) circle(best.dataset.tip === undefined ? { mark: best, row: 0, column: 0 } : { mark: best });
  });
}

export default function ({ parentElement, data, setStateValue }) {
  const box = parentElement.querySelector(".picture") || document.createElement("div");
  if (box.t2lens === data.svg) return undefined;
  box.t2lens = data.svg;
  box.className = "picture";
  const parsed = new DOMParser().parseFromString(data.svg, "image/svg+xml").documentElement,
    svg = document.importNode(parsed, true);
  Object.assign(svg.style, { display: "block", maxWidth: "100%", height: "auto", fontFamily: "var(--st-font)" });
  svg.querySelector(".paper")?.setAttribute("fill-opacity", "0"); // the page is the paper
  box.replaceChildren(svg);
  parentElement.append(box);
  // `turn` makes every click a new value, also one on the mark that was clicked before
  pictureTips(box, svg, (chosen) => setStateValue("pick", { ...chosen, turn: Date.now() }));
  return undefined;
}
