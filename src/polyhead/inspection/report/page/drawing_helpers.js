// Helpers for drawing: elements, number formats, canvases, the tooltip.

const $ = (id) => document.getElementById(id);

// Create an HTML element. Children that are strings become text, never HTML.
function htmlElement(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (key === "on") for (const [event, run] of Object.entries(value)) node.addEventListener(event, run);
    else if (key === "style") node.style.cssText = value;
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function svgElement(name, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) if (value !== null && value !== undefined) node.setAttribute(key, value);
  node.append(...children.flat().filter(Boolean));
  return node;
}

// A token inside other text, with its own writing direction.
const tokenElement = (text) => htmlElement("bdi", { class: "token", dir: "auto" }, makeWhitespaceVisible(text));
// Make white space visible.
const makeWhitespaceVisible = (text) => (/^\s*$/.test(text) ? (text === "" ? "∅" : text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/\s/g, "␣")) : text);

const formatNumber = (x, digits = 2) => (x === null || x === undefined || Number.isNaN(x) ? "–" : x.toFixed(digits));
const formatPercent = (x) => (x === null || x === undefined ? "–" : x > 0 && x < 0.01 ? "< 1 %" : `${Math.round(100 * x)} %`);
// A weight with three digits, or in exponential notation if it is tiny.
const formatWeight = (w) => (w > 0 && w < 0.0005 ? w.toExponential(1) : formatNumber(w, 3));
// A weight in a small cell: .56
const formatWeightShort = (w) => (w >= 0.995 ? "1" : w < 0.005 ? "0" : w.toFixed(2).slice(1));
const measureName = () => (state.measure === "weight" ? "weight" : "contribution");

// Resize a canvas for the device's pixel ratio and clear it; return its context.
function resizeAndClearCanvas(node, width, height) {
  const ratio = Math.max(1, window.devicePixelRatio || 1);
  if (node.width !== Math.round(width * ratio) || node.height !== Math.round(height * ratio)) {
    node.width = Math.round(width * ratio); node.height = Math.round(height * ratio);
    node.style.width = `${width}px`; node.style.height = `${height}px`;
  }
  const ctx = node.getContext("2d");
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.clearRect(0, 0, width, height);
  return ctx;
}

// Draw a matrix on a canvas, one pixel per cell. NaN, a pair that is not allowed, is transparent.
function drawMatrix(data, height, width, canvas = document.createElement("canvas")) {
  const image = new ImageData(width, height), colours = colourRamp();
  for (let n = 0; n < height * width; n++) {
    const c = colours[colourRampIndex(data[n])];
    image.data[4 * n] = c[0]; image.data[4 * n + 1] = c[1]; image.data[4 * n + 2] = c[2]; image.data[4 * n + 3] = Number.isNaN(data[n]) ? 0 : 255;
  }
  canvas.width = width; canvas.height = height;
  canvas.getContext("2d").putImageData(image, 0, 0);
  return canvas;
}

// Fill a rectangle with hatching: what is below pairs that are not allowed.
function fillHatched(ctx, x, y, width, height) {
  const tile = document.createElement("canvas"), pen = tile.getContext("2d");
  tile.width = tile.height = 6;
  pen.fillStyle = themeColour("--wash");
  pen.fillRect(0, 0, 6, 6);
  pen.strokeStyle = themeColour("--rule");
  pen.beginPath(); pen.moveTo(-1, 7); pen.lineTo(7, -1); pen.moveTo(-1, 1); pen.lineTo(1, -1); pen.moveTo(5, 7); pen.lineTo(7, 5); pen.stroke();
  ctx.fillStyle = ctx.createPattern(tile, "repeat");
  ctx.fillRect(x, y, width, height);
}

// A colour of the style sheet. getComputedStyle may force a layout, so results are cached per theme.
const colourCache = {};
function themeColour(name) {
  const cache = (colourCache[document.documentElement.dataset.theme] ??= {});
  return (cache[name] ??= getComputedStyle(document.documentElement).getPropertyValue(name).trim());
}

// Show a tooltip beside the pointer; hide it if there is no content.
function showTooltip(event, ...content) {
  const box = $("tip");
  if (!content.length) { box.hidden = true; return; }
  box.replaceChildren(...content);
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  box.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
}
