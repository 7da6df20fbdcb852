// Colour, numbers, token glyphs and elements of the two-axis maps; one part of the module that maps.js describes.

// ---- colour: ramps through OKLab, in even steps of lightness; an anchor is [lightness, chroma, hue in degrees] -------------
const RAMPS = {
  light: {
    cool: [
      [0.975, 0.012, 170],
      [0.84, 0.065, 195],
      [0.68, 0.095, 225],
      [0.51, 0.115, 255],
      [0.32, 0.095, 278],
    ],
    warm: [
      [0.98, 0.012, 95],
      [0.88, 0.085, 82],
      [0.745, 0.15, 58],
      [0.58, 0.185, 38],
      [0.4, 0.14, 25],
    ],
    both: [
      [0.4, 0.13, 262],
      [0.69, 0.1, 245],
      [0.975, 0.004, 90],
      [0.72, 0.15, 55],
      [0.42, 0.15, 28],
    ],
  },
  dark: {
    cool: [
      [0.27, 0.02, 265],
      [0.41, 0.09, 268],
      [0.57, 0.11, 245],
      [0.74, 0.1, 205],
      [0.92, 0.06, 165],
    ],
    warm: [
      [0.27, 0.02, 40],
      [0.4, 0.1, 30],
      [0.57, 0.16, 42],
      [0.745, 0.15, 62],
      [0.93, 0.08, 95],
    ],
    both: [
      [0.8, 0.1, 235],
      [0.55, 0.12, 255],
      [0.27, 0.006, 90],
      [0.58, 0.15, 42],
      [0.85, 0.12, 75],
    ],
  },
};

function srgb([L, a, b]) {
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [
    4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s,
    -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s,
    -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s,
  ].map((u) => {
    const v = Math.min(1, Math.max(0, u));
    return Math.round(255 * (v <= 0.0031308 ? 12.92 * v : 1.055 * v ** (1 / 2.4) - 0.055));
  });
}

function lut(anchors) {
  const lab = anchors.map(([L, C, h]) => [L, C * Math.cos((h * Math.PI) / 180), C * Math.sin((h * Math.PI) / 180)]);
  return Array.from({ length: 256 }, (_, i) => {
    const t = (i / 255) * (anchors.length - 1),
      k = Math.min(anchors.length - 2, Math.floor(t)),
      f = t - k;
    return srgb(lab[k].map((v, j) => v + f * (lab[k + 1][j] - v)));
  });
}
const css = ([r, g, b]) => `rgb(${r},${g},${b})`;

// ---- numbers, tokens, elements ---------------------------------------------------------------------------------------
export function fmt(v, digits = 4) {
  if (v === undefined || Number.isNaN(v)) return "\u2013";
  if (!Number.isFinite(v)) return v > 0 ? "inf" : "-inf";
  if (v === 0) return "0";
  const a = Math.abs(v);
  return a >= 1e5 || a < 1e-4 ? v.toExponential(digits - 1) : String(Number(v.toPrecision(digits)));
}

export function glyphs(token) {
  // a token as one visible line: spaces, line ends and control characters get a sign of their own
  return (
    token
      .replace(/ /g, "\u00b7")
      .replace(/\n/g, "\u21b5")
      .replace(/\t/g, "\u21e5")
      .replace(
        /[\u0000-\u001f\u007f-\u009f\u200b-\u200f\u2028-\u202e\u2060\ufeff]/g,
        (c) => "\\u" + c.charCodeAt(0).toString(16).padStart(4, "0"),
      ) || "\u2205"
  );
}
const clip = (s, n) => (s.length > n ? s.slice(0, n - 1) + "\u2026" : s);

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
