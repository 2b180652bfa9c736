// Colours: a scale for weights, a scale for signed numbers, and one colour per role.

// OKLCH to sRGB (Björn Ottosson): its lightness is perceptually uniform.
function oklchToRgb(L, C, degrees) {
  const a = C * Math.cos((degrees * Math.PI) / 180), b = C * Math.sin((degrees * Math.PI) / 180);
  const l = (L + 0.3963377774 * a + 0.2158037573 * b) ** 3;
  const m = (L - 0.1055613458 * a - 0.0638541728 * b) ** 3;
  const s = (L - 0.0894841775 * a - 1.291485548 * b) ** 3;
  return [4.0767416621 * l - 3.3077115913 * m + 0.2309699292 * s, -1.2684380046 * l + 2.6097574011 * m - 0.3413193965 * s, -0.0041960863 * l - 0.7034186147 * m + 1.707614701 * s]
    .map((x) => Math.round(255 * Math.min(1, Math.max(0, x <= 0.0031308 ? 12.92 * x : 1.055 * x ** (1 / 2.4) - 0.055))));
}

const isDarkTheme = () => document.documentElement.dataset.theme === "dark";
const RAMPS = {
  light: (t) => oklchToRgb(0.985 - 0.685 * t, 0.012 + 0.17 * Math.sin(Math.PI * Math.min(1, 0.1 + 0.72 * t)) * t ** 0.5, 225 + 60 * t),
  dark: (t) => oklchToRgb(0.235 + 0.7 * t, 0.015 + 0.15 * Math.sin(Math.PI * Math.min(1, 0.05 + 0.85 * t)), 285 - 165 * t ** 1.4),
};
const colourTables = {};

// 256 colours, indexed by the square root of a weight.
function colourRamp() {
  const name = isDarkTheme() ? "dark" : "light";
  return (colourTables[name] ??= Array.from({ length: 256 }, (_, i) => RAMPS[name](i / 255)));
}
const colourRampIndex = (w) => Math.round(255 * Math.sqrt(Math.min(1, Math.max(0, w || 0))));
const toCssRgb = (c) => `rgb(${c[0]},${c[1]},${c[2]})`;
const weightColour = (w) => toCssRgb(colourRamp()[colourRampIndex(w)]);

// A text colour that is readable on the colour of a weight.
function readableTextColour(w) {
  const [r, g, b] = colourRamp()[colourRampIndex(w)];
  return 0.2126 * (r / 255) ** 2.2 + 0.7152 * (g / 255) ** 2.2 + 0.0722 * (b / 255) ** 2.2 > 0.3 ? "#14161c" : "#fff";
}

// The colour of a number in [-1, 1]: blue if negative, orange if positive, which is safe for colour-blind readers.
function signedColour(x) {
  const name = isDarkTheme() ? "signed dark" : "signed light";
  colourTables[name] ??= Array.from({ length: 257 }, (_, i) => {
    const t = Math.abs(i - 128) / 128, negative = i < 128;
    return toCssRgb(isDarkTheme() ? oklchToRgb(0.26 + 0.52 * t ** 0.7, 0.01 + 0.14 * t ** 0.7, negative ? 245 : 58) : oklchToRgb(0.965 - 0.4 * t ** 0.7, 0.005 + 0.15 * t ** 0.7, negative ? 250 : 50));
  });
  return colourTables[name][Math.round(128 + 128 * Math.max(-1, Math.min(1, x)))];
}

// The palette of Okabe and Ito (2008). If there are more roles than colours, the line style distinguishes them.
const ROLE_COLOURS = ["#d55e00", "#009e73", "#56b4e9", "#cc79a7", "#e69f00", "#0072b2", "#a89b00", "#8a6d5a"];
const ROLE_LINES = ["solid", "dashed", "dotted", "double"];
// In the order of the table of roles, so that a role has the same colour on every page.
const ROLE_ORDER = [...new Set([...Object.keys(record.roles), ...record.cards.map((card) => card.role)])];
const ROLES = [...new Set(record.cards.map((card) => card.role))];
const countHeadsWithRole = (role) => new Set(record.cards.filter((card) => card.role === role).map((card) => card.name)).size;
ROLES.sort((a, b) => countHeadsWithRole(b) - countHeadsWithRole(a));
const roleColour = (role) => (role === undefined ? "transparent" : ROLE_COLOURS[ROLE_ORDER.indexOf(role) % ROLE_COLOURS.length]);
const roleLineStyle = (role) => ROLE_LINES[Math.floor(Math.max(0, ROLE_ORDER.indexOf(role)) / ROLE_COLOURS.length) % ROLE_LINES.length];
const roleInitials = (role) => {
  const words = role.split(/[\s/-]+/).filter((word) => word && !/^(for|of|the)$/.test(word));
  return words.length > 1 ? words.slice(0, 2).map((word) => word[0].toUpperCase()).join("") : role.slice(0, 1).toUpperCase() + role.slice(1, 2);
};
