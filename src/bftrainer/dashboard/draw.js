// The pool over time and the nodes by trainer, each on one canvas, with the same time axis.
// The live page and the simulation report hand in the same data (dashboard/timeline.py).

import { clock, day, digits, make, percent, short, span } from "./format.js";

const FONT = "11px system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif";
const STEPS = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 345600, 604800];
const LANE = 13;

// The colour of a trainer hangs on its number alone: the same in every picture, and neighbours differ.
export function colourOf(place) {
  if (place < 0) return [128, 138, 152];
  const hue = (place * 137.508 + 75) % 360;
  // Greens look louder than other colours of the same numbers.
  const loud = hue > 60 && hue < 190 ? 0.75 : 1;
  return rgb(hue, loud * [0.56, 0.46, 0.64][place % 3], (loud < 1 ? 0.88 : 1) * [0.55, 0.62, 0.48][Math.floor(place / 3) % 3]);
}

function rgb(hue, saturation, light) {
  const a = saturation * Math.min(light, 1 - light);
  const part = (n) => {
    const k = (n + hue / 30) % 12;
    return Math.round(255 * (light - a * Math.max(-1, Math.min(k - 3, 9 - k, 1))));
  };
  return [part(0), part(8), part(4)];
}

export function css([r, g, b], alpha = 1) {
  return alpha === 1 ? `rgb(${r} ${g} ${b})` : `rgb(${r} ${g} ${b} / ${alpha})`;
}

function theme(canvas) {
  const style = getComputedStyle(canvas);
  const get = (name) => style.getPropertyValue(name).trim();
  return {
    ink: get("--ink"), soft: get("--soft"), rule: get("--rule"), free: get("--free"), pool: get("--pool"),
    used: get("--used"), paper: get("--card"), bad: get("--preemption"), rescale: get("--rescale"),
  };
}

function prepare(canvas, height) {
  const ratio = window.devicePixelRatio || 1;
  const width = Math.max(canvas.parentElement.clientWidth, 200);
  canvas.style.height = `${height}px`;
  const [w, h] = [Math.round(width * ratio), Math.round(height * ratio)];
  if (canvas.width !== w || canvas.height !== h) [canvas.width, canvas.height] = [w, h];
  const ctx = canvas.getContext("2d");
  ctx.setTransform(ratio, 0, 0, ratio, 0, 0);
  ctx.clearRect(0, 0, width, height);
  ctx.font = FONT;
  return { ctx, width, height, ratio };
}

function plotOf(width, top, bottom) {
  const left = width < 560 ? 44 : 104;
  return { left, right: width - 10, top, bottom, wide: width - 10 - left };
}

export function cellsFor(element) {
  return Math.max(60, Math.min(1200, Math.round(element.clientWidth - 60)));
}

function timeAxis(ctx, plot, start, end, colours, utc, labels) {
  const most = Math.max(2, Math.floor(plot.wide / 84));
  const step = STEPS.find((s) => (end - start) / s <= most) ?? Math.ceil((end - start) / most / 86400) * 86400;
  // Ticks are round in the zone that is shown, which is another one after summer time has begun or ended: walk and look.
  const shift = (t) => (utc ? 0 : -60 * new Date(t * 1000).getTimezoneOffset());
  const walk = Math.min(step, 1800);
  ctx.textAlign = "center";
  let before = "";
  for (let t = Math.ceil((start + shift(start)) / walk) * walk - shift(start); t <= end; t += walk) {
    if ((t + shift(t)) % step !== 0) continue;
    const x = Math.round(plot.left + ((t - start) / (end - start)) * plot.wide) + 0.5;
    line(ctx, x, plot.top, x, plot.bottom + (labels ? 4 : 0), colours.rule);
    if (!labels) continue;
    ctx.fillStyle = colours.soft;
    const date = day(t, utc);
    const text = step >= 86400 ? date : clock(t, { utc, seconds: step < 60 });
    ctx.fillText(text, Math.min(Math.max(x, plot.left + 12), plot.right - 12), plot.bottom + 16);
    if (step < 86400 && date !== before) ctx.fillText(date, Math.min(Math.max(x, plot.left + 12), plot.right - 12), plot.bottom + 29);
    before = date;
  }
}

function line(ctx, x0, y0, x1, y1, colour) {
  ctx.strokeStyle = colour;
  ctx.lineWidth = 1;
  ctx.beginPath();
  ctx.moveTo(x0, y0);
  ctx.lineTo(x1, y1);
  ctx.stroke();
}

function valueTicks(high) {
  const raw = high / 4;
  const power = 10 ** Math.floor(Math.log10(Math.max(raw, 1e-9)));
  const step = Math.max(1, [1, 2, 5, 10].map((f) => f * power).find((s) => s >= raw * 0.999));
  return Array.from({ length: Math.floor(high / step + 1e-9) + 1 }, (_, i) => i * step);
}

// Pool size as a line, nodes in use as an area; bands go from the lowest to the highest of each cell.
export function drawPool(canvas, data, { utc = false, height = 150, labels = false } = {}) {
  const { ctx, width } = prepare(canvas, height);
  const colours = theme(canvas);
  const plot = plotOf(width, 10, height - (labels ? 34 : 8));
  const high = 1.06 * Math.max(1, ...data.pool.high, ...data.used.high);
  const y = (value) => plot.bottom - (value / high) * (plot.bottom - plot.top);
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  for (const tick of valueTicks(high)) {
    line(ctx, plot.left, Math.round(y(tick)) + 0.5, plot.right, Math.round(y(tick)) + 0.5, colours.rule);
    ctx.fillStyle = colours.soft;
    ctx.fillText(tick.toLocaleString("en-GB"), plot.left - 7, y(tick));
  }
  ctx.textBaseline = "alphabetic";
  timeAxis(ctx, plot, data.start, data.end, colours, utc, labels);
  const cell = plot.wide / data.cells;
  const steps = (values) => values.forEach((value, i) => {
    ctx.lineTo(plot.left + i * cell, y(value));
    ctx.lineTo(plot.left + (i + 1) * cell, y(value));
  });
  const area = (low, top, colour, alpha) => {
    ctx.beginPath();
    steps(top);
    for (let i = low.length - 1; i >= 0; i -= 1) {
      ctx.lineTo(plot.left + (i + 1) * cell, y(low[i]));
      ctx.lineTo(plot.left + i * cell, y(low[i]));
    }
    ctx.closePath();
    ctx.globalAlpha = alpha;
    ctx.fillStyle = colour;
    ctx.fill();
    ctx.globalAlpha = 1;
  };
  area(data.pool.low, data.pool.high, colours.pool, 0.18);
  area(data.used.mean.map(() => 0), data.used.mean, colours.used, 0.5);
  ctx.beginPath();
  steps(data.pool.mean);
  ctx.strokeStyle = colours.pool;
  ctx.lineWidth = 1.6;
  ctx.lineJoin = "round";
  ctx.stroke();
  return (px) => {
    const i = Math.floor((px - plot.left) / cell);
    if (i < 0 || i >= data.cells) return null;
    const at = data.start + ((i + 0.5) * (data.end - data.start)) / data.cells;
    const [size, used] = [data.pool.mean[i], data.used.mean[i]];
    const share = size > 0 ? `, ${percent(used / size)}` : "";
    return { lines: [clock(at, { utc, date: true }), `${digits(size, 4)} nodes`, `${digits(used, 4)} in use${share}`] };
  };
}

function imageOf(data, colours) {
  const image = new ImageData(data.cells, data.nodes.length);
  const pixels = new Uint32Array(image.data.buffer);
  const pack = ([r, g, b]) => ((255 << 24) | (b << 16) | (g << 8) | r) >>> 0;
  const palette = [pack(parse(colours.free)), ...data.who.map((one) => pack(colourOf(one.place)))];
  data.runs.forEach((runs, row) => {
    const base = row * data.cells;
    for (let i = 0; i < runs.length; i += 3) {
      pixels.fill(palette[runs[i + 2]], base + runs[i], base + runs[i] + runs[i + 1]);
    }
  });
  const whole = document.createElement("canvas");
  [whole.width, whole.height] = [data.cells, data.nodes.length];
  whole.getContext("2d").putImageData(image, 0, 0);
  return whole;
}

function parse(colour) {
  const hex = /^#([0-9a-f]{2})([0-9a-f]{2})([0-9a-f]{2})$/i.exec(colour);
  return hex ? hex.slice(1).map((part) => parseInt(part, 16)) : [200, 200, 200];
}

export function ganttHeight(rows) {
  return Math.round(Math.min(Math.max(rows * 18, 36), 560)) + 2 * LANE + 44;
}

// A row for each node; above them a lane of preemptions and one of rescales.
export function drawGantt(canvas, data, { utc = false } = {}) {
  const { ctx, width, height } = prepare(canvas, ganttHeight(data.nodes.length));
  const colours = theme(canvas);
  const rows = data.nodes.length;
  const plot = plotOf(width, 2 * LANE + 6, height - 34);
  const rowHigh = (plot.bottom - plot.top) / Math.max(rows, 1);
  const cell = plot.wide / data.cells;
  timeAxis(ctx, { ...plot, top: 2 }, data.start, data.end, colours, utc, true);
  if (rows) {
    ctx.imageSmoothingEnabled = rowHigh * (window.devicePixelRatio || 1) < 1;
    ctx.drawImage(imageOf(data, colours), plot.left, plot.top, plot.wide, plot.bottom - plot.top);
  }
  if (rowHigh >= 5) {
    ctx.fillStyle = colours.paper;
    for (let i = 0; i <= rows; i += 1) ctx.fillRect(plot.left, plot.top + i * rowHigh - 1, plot.wide, rowHigh >= 10 ? 2 : 1);
  }
  ctx.textAlign = "right";
  ctx.textBaseline = "middle";
  ctx.fillStyle = colours.soft;
  const label = (name) => (plot.left > 60 ? short(name, 16) : name.length > 5 ? `…${name.slice(-4)}` : name);
  const every = Math.ceil(13 / rowHigh);
  for (let i = 0; i < rows; i += every) ctx.fillText(label(data.nodes[i]), plot.left - 7, plot.top + (i + 0.5) * rowHigh);
  lane(ctx, data.preemptions, 8, "▼", colours.bad, plot, cell);
  lane(ctx, data.rescales, 8 + LANE, "◆", colours.rescale, plot, cell);
  ctx.fillStyle = colours.bad;
  const size = Math.min(4.5, Math.max(1, rowHigh / 3));
  for (const [row, at] of data.taken) {
    const [x, y] = [plot.left + (at + 0.5) * cell, plot.top + (row + 0.5) * rowHigh];
    if (rowHigh < 5) {
      ctx.fillRect(x - 0.75, y - rowHigh / 2, 1.5, Math.max(rowHigh, 1));
    } else {
      ctx.beginPath();
      ctx.moveTo(x - size, y - size);
      ctx.lineTo(x + size, y - size);
      ctx.lineTo(x, y + size);
      ctx.fill();
    }
  }
  ctx.textBaseline = "alphabetic";
  return (px, py) => {
    const i = Math.floor((px - plot.left) / cell);
    if (i < 0 || i >= data.cells) return null;
    const lines = [clock(data.start + ((i + 0.5) * (data.end - data.start)) / data.cells, { utc, date: true })];
    if (py < plot.top) {
      const [taken, changed] = [near(data.preemptions, i, cell), near(data.rescales, i, cell)];
      return { lines: [...lines, `${taken} preempted`, `${changed} rescaled`] };
    }
    const row = Math.floor((py - plot.top) / rowHigh);
    if (row < 0 || row >= rows) return null;
    const found = runAt(data.runs[row], i);
    const who = found ? data.who[found[2] - 1] : null;
    const state = found === null ? "not in the pool" : found[2] === 0 ? "free" : who.name;
    const seconds = found ? (found[1] * (data.end - data.start)) / data.cells : 0;
    return { lines: [...lines, data.nodes[row], found ? `${short(state, 40)} for ${span(seconds)}` : state], id: who?.id ?? null };
  };
}

function lane(ctx, marks, y, sign, colour, plot, cell) {
  ctx.fillStyle = colour;
  ctx.textAlign = "right";
  ctx.fillText(sign, plot.left - 7, y);
  ctx.textAlign = "center";
  let last = -1e9;
  for (const [at] of marks) {
    const x = plot.left + (at + 0.5) * cell;
    if (x - last >= 5) {
      ctx.fillText(sign, x, y);
      last = x;
    }
  }
}

function near(marks, i, cell) {
  const reach = Math.ceil(3 / cell);
  return marks.reduce((sum, [at, count]) => sum + (Math.abs(at - i) <= reach ? count : 0), 0);
}

function runAt(runs, i) {
  for (let at = 0; at < runs.length; at += 3) {
    if (runs[at] <= i && i < runs[at] + runs[at + 1]) return runs.slice(at, at + 3);
  }
  return null;
}

// Seconds that each trainer held nodes in the picture, largest first.
export function shares(data) {
  const held = new Map();
  for (const runs of data.runs) {
    for (let i = 0; i < runs.length; i += 3) held.set(runs[i + 2], (held.get(runs[i + 2]) ?? 0) + runs[i + 1]);
  }
  const second = (data.end - data.start) / data.cells;
  return [...held].map(([who, cells]) => ({ who, seconds: cells * second })).sort((a, b) => b.seconds - a.seconds);
}

export function drawLegend(list, data, longest = 12) {
  const found = shares(data).filter(({ who }) => who > 0);
  const entries = found.slice(0, longest).map(({ who }) => {
    const mark = make("i", { cls: "swatch" });
    mark.style.background = css(colourOf(data.who[who - 1].place));
    return make("li", {}, mark, short(data.who[who - 1].name, 28));
  });
  if (found.length > longest) entries.push(make("li", { text: `and ${found.length - longest} more` }));
  const sign = (text, cls, words) => make("li", {}, make("b", { text, cls }), words);
  entries.push(make("li", {}, make("i", { cls: "swatch free" }), "free"));
  // Thousands of marks on nodes would hide the nodes; the row above has all of them.
  const most = data.taken_every > 1 ? `preempted; on nodes 1 of ${data.taken_every} is marked` : "preempted";
  entries.push(sign("▼", "bad", most), sign("◆", "rescale", "rescaled"));
  list.replaceChildren(...entries);
}

// Show what is under the pointer.
export function addTip(canvas, tip, at, onClick) {
  const hit = (event) => {
    const box = canvas.getBoundingClientRect();
    return at()?.(event.clientX - box.left, event.clientY - box.top) ?? null;
  };
  canvas.addEventListener("pointermove", (event) => {
    const found = hit(event);
    tip.hidden = !found;
    if (!found) return;
    tip.replaceChildren(...found.lines.map((text) => make("div", { text })));
    const box = tip.offsetParent.getBoundingClientRect();
    const x = Math.min(event.clientX - box.left + 14, box.width - tip.offsetWidth - 4);
    tip.style.left = `${Math.max(0, x)}px`;
    tip.style.top = `${event.clientY - box.top + 16}px`;
    canvas.style.cursor = onClick && found.id ? "pointer" : "default";
  });
  canvas.addEventListener("pointerleave", () => { tip.hidden = true; });
  if (onClick) canvas.addEventListener("click", (event) => { const found = hit(event); if (found?.id) onClick(found.id); });
}
