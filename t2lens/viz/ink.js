// Colour, numbers, token glyphs and elements of the two-axis maps; one part of the module that maps.js describes.

// ---- colour: RAMPS is the table of t2lens.viz.colors, which payload.renderer_js puts before this part ----------------
function lut(hex) {
  const stop = (k) => [0, 2, 4].map((c) => parseInt(hex.slice(6 * k + c, 6 * k + c + 2), 16)),
    last = hex.length / 6 - 1;
  return Array.from({ length: 256 }, (_, i) => {
    const at = (i * last) / 255,
      k = Math.min(last - 1, Math.floor(at)),
      next = stop(k + 1);
    return stop(k).map((v, c) => Math.floor(v + (at - k) * (next[c] - v) + 0.5));
  });
}
const css = ([r, g, b]) => `rgb(${r},${g},${b})`;

// ---- numbers, tokens, elements ---------------------------------------------------------------------------------------
export function fmt(v, digits = 4) {
  if (v === undefined || Number.isNaN(v)) return "\u2013";
  if (!Number.isFinite(v)) return v > 0 ? "inf" : "-inf";
  if (v === 0) return "0";
  const a = Math.abs(v);
  if (a < 1e5 && a >= 1e-4) return String(Number(v.toPrecision(digits)));
  const [mantissa, exponent] = v.toExponential(digits - 1).split("e");
  return `${Number(mantissa)}e${Number(exponent)}`;
}

const UNSEEN = /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060\u2066-\u206f\ufeff]/gu;
export function glyphs(token) {
  // a token as one visible line: spaces, line ends and control characters get a sign of their own, marks that would
  // stand on the sign before them a circle; a joiner inside an emoji stays
  return (
    token
      .replace(/ /g, "\u00b7")
      .replace(/\n/g, "\u21b5")
      .replace(/\t/g, "\u21e5")
      .replace(UNSEEN, (c, at) =>
        c === "\u200d" && EMOJI_END.test(token.slice(0, at)) && EMOJI_START.test(token.slice(at + 1))
          ? c
          : "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"),
      )
      .replace(/^(?=\p{M})/u, "\u25cc") || "\u2205"
  );
}
const EMOJI_END = /\p{Extended_Pictographic}[\ufe0f\u{1f3fb}-\u{1f3ff}]*$/u,
  EMOJI_START = /^\p{Extended_Pictographic}/u;
// at most n signs as a reader counts them, so that neither an emoji nor a letter with its marks is cut
const SIGNS = typeof Intl.Segmenter === "function" ? new Intl.Segmenter() : null;
function clip(s, n) {
  if (s.length <= n) return s;
  const signs = SIGNS ? Array.from(SIGNS.segment(s), (o) => o.segment) : Array.from(s);
  return signs.length > n ? signs.slice(0, n - 1).join("") + "\u2026" : s;
}
// a word from right to left, fenced so that it does not turn the text around it
const isolated = (s) => (/[\u0590-\u08ff\ufb1d-\ufdff\ufe70-\ufefc]/.test(s) ? `\u2068${s}\u2069` : s);

function el(tag, cls, text, parent) {
  const node = document.createElement(tag);
  if (cls) node.className = cls;
  if (text !== undefined) node.textContent = text;
  if (parent) parent.append(node);
  return node;
}

function unpack(array) {
  if (!array) return null;
  const bytes = array.bytes || Uint8Array.from(atob(array.b64), (c) => c.charCodeAt(0));
  if (array.dtype === "f4") return new Float32Array(bytes.buffer);
  return Float32Array.from(new Uint16Array(bytes.buffer), (h) => {
    // f2: IEEE half precision
    const e = (h >> 10) & 31,
      m = h & 1023,
      sign = h >> 15 ? -1 : 1;
    return sign * (e === 31 ? (m ? NaN : Infinity) : e ? 2 ** (e - 15) * (1 + m / 1024) : 2 ** -14 * (m / 1024));
  });
}
