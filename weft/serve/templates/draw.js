"use strict";
// Overlays: masks and objects over a picture, drawn on a canvas.

const LONGEST = 1400; // pixels of a canvas's longer side
const NAMED = 15; // objects that have their names beside them; more have outlines alone

/** The runs of COCO's compressed counts, as numbers. */
function runsOf(counts) {
  if (Array.isArray(counts)) return counts;
  const runs = [];
  for (let i = 0; i < counts.length;) {
    let value = 0, shift = 0, more = true;
    while (more) {
      const c = counts.charCodeAt(i++) - 48;
      value |= (c & 0x1f) << shift;
      more = (c & 0x20) !== 0;
      shift += 5;
      if (!more && c & 0x10) value |= -1 << shift;
    }
    if (runs.length > 2) value += runs[runs.length - 2];
    runs.push(value);
  }
  return runs;
}

/** A canvas with the shape of an object in one colour, its outline in full. */
function shapeOf(segmentation, colour, alpha) {
  const [height, width] = segmentation.size;
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(width, height);
  const inside = new Uint8Array(width * height); // down the columns, as the runs go
  let at = 0, on = 0;
  for (const run of runsOf(segmentation.counts)) {
    if (on) inside.fill(1, at, at + run);
    at += run;
    on = 1 - on;
  }
  const [r, g, b] = rgb(colour);
  for (let i = 0; i < inside.length; i++) {
    if (!inside[i]) continue;
    const x = Math.floor(i / height), y = i % height;
    const between = x > 0 && y > 0 && x < width - 1 && y < height - 1;
    const within = between && inside[i - 1] && inside[i + 1] && inside[i - height] && inside[i + height];
    pixels.data.set([r, g, b, within ? 255 * alpha * 0.8 : 255 * Math.min(1, 2 * alpha)], 4 * (y * width + x));
  }
  context.putImageData(pixels, 0, 0);
  return canvas;
}

function rgb(colour) {
  return [1, 3, 5].map(i => parseInt(colour.slice(i, i + 2), 16));
}

/** The class of each pixel, from a PNG whose colours are those of the classes. */
async function readMask(answer, model) {
  const image = new Image();
  image.src = "data:image/png;base64," + answer.mask;
  await image.decode();
  const [height, width] = answer.size;
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.drawImage(image, 0, 0);
  const pixels = context.getImageData(0, 0, width, height).data;
  const known = new Map(model.colours.map((colour, i) => [parseInt(colour.slice(1), 16), i]));
  const classes = new Uint8Array(width * height);
  for (let i = 0; i < classes.length; i++)
    classes[i] = known.get(pixels[4 * i] << 16 | pixels[4 * i + 1] << 8 | pixels[4 * i + 2]) ?? 0;
  return classes;
}

function maskCanvas(classes, size, model, shown, alpha) {
  const [height, width] = size;
  const canvas = Object.assign(document.createElement("canvas"), { width, height });
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(width, height);
  const table = model.colours.map((colour, i) => [...rgb(colour), shown.has(i) ? 255 * alpha : 0]);
  for (let i = 0; i < classes.length; i++) pixels.data.set(table[classes[i]], 4 * i);
  context.putImageData(pixels, 0, 0);
  return canvas;
}

/** Colours of objects: a class has its own; where there is one class only, objects take turns. */
function objectColour(object, number, model) {
  const turns = ["#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"];
  return model.classes.length > 1 ? model.colours[object.category_id - 1] : turns[number % turns.length];
}

/** Objects that are shown: classes that are switched on, and sure enough. */
function visibleObjects(answer, view) {
  return answer.objects.filter(one => view.shown.has(one.category_id - 1) && one.score >= view.score);
}

/** Draws a picture of that size, where the browser can show it, and the answer over it. */
function paint(canvas, picture, [height, width], answer, model, view) {
  const scale = Math.min(1, LONGEST / Math.max(width, height));
  const grow = Math.max(1, Math.floor(760 / Math.max(width, height))); // names need room on small pictures
  canvas.width = Math.max(1, Math.round(width * scale * grow));
  canvas.height = Math.max(1, Math.round(height * scale * grow));
  canvas.classList.toggle("pixels", Math.max(width, height) < 200);
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = Math.max(width, height) >= 200;
  context.clearRect(0, 0, canvas.width, canvas.height);
  if (picture) context.drawImage(picture, 0, 0, canvas.width, canvas.height);
  if (!answer) return;
  context.imageSmoothingEnabled = false;
  if (view.classes) {
    const mask = maskCanvas(view.classes, answer.size, model, view.shown, view.alpha);
    context.drawImage(mask, 0, 0, canvas.width, canvas.height);
  }
  if (answer.objects) paintObjects(context, answer, model, view, canvas.width / width);
}

function paintObjects(context, answer, model, view, scale) {
  const chosen = visibleObjects(answer, view), { width: across, height: down } = context.canvas;
  const line = Math.max(1.5, Math.min(across, down) / 260);
  const size = Math.max(11, Math.min(20, down / 34));
  for (const one of [...chosen].reverse()) { // the surest on top
    const colour = objectColour(one, answer.objects.indexOf(one), model);
    if (one.segmentation) context.drawImage(shapeOf(one.segmentation, colour, view.alpha), 0, 0, across, down);
    const [left, top, width, height] = one.bbox.map(v => v * scale);
    context.strokeStyle = colour;
    context.globalAlpha = 0.35 + 0.65 * view.alpha;
    context.lineWidth = line;
    if (!one.segmentation || chosen.length <= NAMED) context.strokeRect(left, top, width, height);
    if (chosen.length <= NAMED) {
      context.font = `600 ${size}px system-ui, sans-serif`;
      const text = `${one.category_name} ${Math.round(100 * one.score)}`;
      const wide = context.measureText(text).width + 8;
      const y = top >= size + 6 ? top - size - 6 : top;
      context.fillStyle = colour;
      context.fillRect(left - line / 2, y, wide, size + 6);
      const [r, g, b] = rgb(colour);
      context.fillStyle = 0.299 * r + 0.587 * g + 0.114 * b > 110 ? "#000" : "#fff";
      context.fillText(text, left - line / 2 + 4, y + size);
    }
    context.globalAlpha = 1;
  }
}
