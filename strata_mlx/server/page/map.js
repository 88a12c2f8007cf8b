// Which experts are in memory: a row for each layer, a cell for each expert. What was just read lights up and fades.

import { find, write } from "./dom.js";
import { count } from "./format.js";

const FADE = 1200; // ms
const STEPS = 8; // shades of a cell that fades
const ABSENT = 0;
const RESIDENT = 1;
const GUTTER = 26; // px, for the numbers of the layers

const canvas = find("map");
const context = canvas.getContext("2d");
const still = matchMedia("(prefers-reduced-motion: reduce)");

let layers = 0;
let indices = []; // of the layers among all of the model's
let columns = 0;
let resident = new Uint8Array(0); // by layer and expert
let read = new Float64Array(0); // when it was, in ms since the page was opened, or -Infinity
let painted = new Uint8Array(0); // the level that each cell shows
let palette = [];
let cell = null; // {x, across, high, gapX, gapY} in pixels of the canvas
let frame = 0;

const channels = (hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));

const colours = () => {
  const style = getComputedStyle(document.documentElement);
  const of = (name) => channels(style.getPropertyValue(name).trim());
  const [absent, there, fresh] = ["--absent", "--resident", "--read"].map(of);
  const shades = Array.from({ length: STEPS + 1 }, (_, step) => there.map((from, i) => from + ((fresh[i] - from) * step) / STEPS));
  palette = [absent, ...shades].map((rgb) => `rgb(${rgb.map(Math.round).join(" ")})`);
};

const level = (at, now) => {
  if (!resident[at]) return ABSENT;
  const age = now - read[at];
  return age >= FADE ? RESIDENT : RESIDENT + Math.ceil(STEPS * (1 - Math.max(age, 0) / FADE));
};

const layout = () => {
  const ratio = devicePixelRatio;
  const width = canvas.clientWidth;
  if (!width || !columns) return false;
  const across = Math.max(1, (Math.round(width * ratio) - Math.round(GUTTER * ratio)) / columns);
  const high = Math.round(Math.min(16, Math.max(3, 230 / layers)) * ratio);
  canvas.width = Math.round(width * ratio);
  canvas.height = high * layers;
  canvas.style.height = `${canvas.height / ratio}px`;
  cell = { x: Math.round(GUTTER * ratio), across, high, gapX: across >= 4 ? 1 : 0, gapY: high >= 6 ? Math.round(ratio) : 0 };
  return true;
};

const paint = (at, shade) => {
  const column = at % columns;
  const x = cell.x + Math.floor(column * cell.across);
  const end = cell.x + Math.floor((column + 1) * cell.across); // whole pixels, so that no cell is blurred
  const y = Math.floor(at / columns) * cell.high;
  context.fillStyle = palette[shade];
  context.fillRect(x, y, end - x - cell.gapX, cell.high - cell.gapY);
  painted[at] = shade;
};

// All of it, after a change of size or colours.
const draw = () => {
  colours();
  if (!layout()) return;
  const style = getComputedStyle(canvas);
  context.fillStyle = getComputedStyle(canvas.closest(".card")).backgroundColor;
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.fillStyle = getComputedStyle(find("map-note")).color;
  context.font = `${11 * devicePixelRatio}px ${style.fontFamily}`;
  context.textAlign = "right";
  context.textBaseline = "middle";
  const every = Math.ceil((14 * devicePixelRatio) / cell.high);
  for (let layer = 0; layer < layers; layer += every) {
    const right = cell.x - 8 * devicePixelRatio;
    const middle = Math.max((layer + 0.5) * cell.high - cell.gapY / 2, 6 * devicePixelRatio);
    context.fillText(String(indices[layer]), right, middle);
  }
  const now = performance.now();
  for (let at = 0; at < resident.length; at += 1) paint(at, level(at, now));
};

const animate = () => {
  frame = 0;
  const now = performance.now();
  let fading = false;
  for (let at = 0; at < resident.length; at += 1) {
    const shade = level(at, now);
    if (shade !== painted[at] && cell) paint(at, shade);
    fading ||= shade > RESIDENT;
  }
  if (fading && !still.matches) frame = requestAnimationFrame(animate);
};

const bits = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));

// experts: as /v1/engine gives them.
export const showMap = (experts) => {
  const first = experts.layers !== layers || experts.count !== columns;
  if (first) {
    ({ layers, count: columns, indices } = experts);
    resident = new Uint8Array(layers * columns).fill(1);
    read = new Float64Array(layers * columns).fill(-Infinity);
    painted = new Uint8Array(layers * columns);
  }
  const now = performance.now();
  for (const streamed of experts.streamed) {
    const packed = bits(streamed.resident);
    const row = indices.indexOf(streamed.layer);
    for (let expert = 0; expert < columns; expert += 1) {
      const at = row * columns + expert;
      const is = (packed[expert >> 3] >> (expert & 7)) & 1;
      if (is && !resident[at] && !first) read[at] = now;
      resident[at] = is;
    }
  }
  if (first) draw();
  else if (!frame) animate();
  describe(experts);
};

const describe = (experts) => {
  let held = 0;
  for (const is of resident) held += is;
  const all = `${count(columns)} × ${count(layers)} experts`;
  const streams = experts.streamed.length > 0;
  const text = streams ? `${((100 * held) / resident.length).toFixed(0)} % of ${all} in memory` : `all ${all} in memory, nothing is read from disk`;
  write(find("map-note"), text);
  const most = Math.max(0, ...experts.streamed.map((layer) => layer.slots));
  write(find("map-alt"), streams ? `${count(held)} of ${count(resident.length)} experts are in memory; a layer has at most ${count(most)} slots for ${count(columns)} experts.` : `All ${all} are in memory.`);
  for (const name of ["read", "absent"]) find("map-legend").querySelector(`.${name}`).parentElement.hidden = !streams;
};

const point = (event) => {
  const tip = find("map-tip");
  const box = canvas.getBoundingClientRect();
  const expert = Math.floor(((event.clientX - box.left) * devicePixelRatio - cell.x) / cell.across);
  const layer = Math.floor(((event.clientY - box.top) * devicePixelRatio) / cell.high);
  tip.hidden = expert < 0 || expert >= columns || layer < 0 || layer >= layers;
  if (tip.hidden) return;
  const at = layer * columns + expert;
  write(tip, `layer ${indices[layer]}, expert ${expert}: ${resident[at] ? "in memory" : "on disk"}`);
  const x = event.clientX - box.left;
  tip.style.left = `${Math.min(Math.max(0, x - tip.offsetWidth / 2), box.width - tip.offsetWidth)}px`;
  tip.style.top = `${event.clientY - box.top + 18}px`;
};

export const startMap = () => {
  new ResizeObserver(draw).observe(canvas.parentElement);
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  canvas.addEventListener("pointermove", (event) => cell && point(event));
  canvas.addEventListener("pointerleave", () => {
    find("map-tip").hidden = true;
  });
};
