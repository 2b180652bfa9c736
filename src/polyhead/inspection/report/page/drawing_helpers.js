// Small tools for drawing: elements, numbers, a tooltip.

const $ = (id) => document.getElementById(id);

// An element; text goes in as text, never as HTML.
function el(name, given = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(given)) {
    if (key === "on") for (const [event, run] of Object.entries(value)) node.addEventListener(event, run);
    else if (key === "style") node.style.cssText = value;
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(key, value === true ? "" : value);
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

function svg(name, given = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(given)) if (value !== null && value !== undefined) node.setAttribute(key, value);
  node.append(...children.flat().filter(Boolean));
  return node;
}

// A token among other text: its direction is its own affair.
const token = (text) => el("bdi", { class: "token", dir: "auto" }, shown(text));
// white space can be a token too
const shown = (text) => (/^\s*$/.test(text) ? (text === "" ? "∅" : text.replace(/\n/g, "⏎").replace(/\t/g, "⇥").replace(/\s/g, "␣")) : text);

const number = (x, digits = 2) => (x === null || x === undefined || Number.isNaN(x) ? "–" : x.toFixed(digits));
const percent = (x) => (x === null || x === undefined ? "–" : x > 0 && x < 0.01 ? "< 1 %" : `${Math.round(100 * x)} %`);
// a weight to be read exactly
const exactly = (w) => (w > 0 && w < 0.0005 ? w.toExponential(1) : number(w, 3));
// a weight in a small cell: .56
const brief = (w) => (w >= 0.995 ? "1" : w < 0.005 ? "0" : w.toFixed(2).slice(1));
const measureName = () => (state.measure === "weight" ? "weight" : "contribution");

function canvas(node, width, height) {
  const ratio = Math.max(1, window.devicePixelRatio || 1);
  if (node.width !== Math.round(width * ratio) || node.height !== Math.round(height * ratio)) {
    node.width = Math.round(width * ratio); node.height = Math.round(height * ratio);
    node.style.width = `${width}px`; node.style.height = `${height}px`;
  }
  const pen = node.getContext("2d");
  pen.setTransform(ratio, 0, 0, ratio, 0, 0);
  pen.clearRect(0, 0, width, height);
  return pen;
}

// A matrix as a picture, a pixel a cell, on a sheet of its own or on a given one.
function picture(data, height, width, sheet = document.createElement("canvas")) {
  const image = new ImageData(width, height), colours = ramp();
  for (let n = 0; n < height * width; n++) {
    const c = colours[level(data[n])];
    image.data[4 * n] = c[0]; image.data[4 * n + 1] = c[1]; image.data[4 * n + 2] = c[2]; image.data[4 * n + 3] = 255;
  }
  sheet.width = width; sheet.height = height;
  sheet.getContext("2d").putImageData(image, 0, 0);
  return sheet;
}

// A colour of the style sheet. Asking the browser costs a layout, so it is asked once a theme.
const styles = {};
function style(name) {
  const known = (styles[document.documentElement.dataset.theme] ??= {});
  return (known[name] ??= getComputedStyle(document.documentElement).getPropertyValue(name).trim());
}

function tip(event, ...content) {
  const box = $("tip");
  if (!content.length) { box.hidden = true; return; }
  box.replaceChildren(...content);
  box.hidden = false;
  const { width, height } = box.getBoundingClientRect();
  box.style.left = `${Math.max(4, Math.min(event.clientX + 14, innerWidth - width - 8))}px`;
  box.style.top = `${event.clientY + 18 + height > innerHeight ? event.clientY - height - 10 : event.clientY + 18}px`;
}
