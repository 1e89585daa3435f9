// The charts of one trainer, drawn by Plotly, which is loaded when first needed. Plotly reads tags in every text it is
// given, links among them: what users named is written beside its charts, never into them.

import { make, metricText, say } from "./format.js";

const MOST = 8;
const CONFIG = { displaylogo: false, responsive: true, displayModeBar: false };

let plotly = null;

// The library, or null where it cannot be had; then it is asked for again at the next opening.
export function loadPlotly() {
  plotly ??= new Promise((done) => {
    const script = make("script", { src: "/static/plotly.min.js" });
    script.addEventListener("load", () => done(window.Plotly ?? window.moduleName ?? null));
    script.addEventListener("error", () => {
      plotly = null;
      script.remove();
      done(null);
    });
    document.head.append(script);
  });
  return plotly;
}

// A plot of Plotly listens to the window until it is purged.
export function purge(element) {
  for (const plot of element.querySelectorAll(".js-plotly-plot")) (window.Plotly ?? window.moduleName).purge(plot);
}

function look(element) {
  const style = getComputedStyle(element);
  const value = (name) => style.getPropertyValue(name).trim();
  const axis = { gridcolor: value("--rule"), zeroline: false, linecolor: value("--line"), automargin: true };
  const font = { color: value("--soft"), size: 11, family: "system-ui, sans-serif" };
  const layout = { margin: { l: 46, r: 8, t: 8, b: 36 }, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)", font, hovermode: "closest" };
  return { value, axis, layout };
}

export async function drawCurve(draw, element, curve) {
  const { value, axis, layout } = look(element);
  const sizes = Object.entries(curve.measured);
  const traces = [{ x: curve.nodes, y: curve.rates, name: "fit, in use", mode: "lines", line: { color: value("--pool"), width: 2 } }];
  if (curve.low) {
    const edge = { x: curve.nodes, mode: "lines", line: { width: 0 }, hoverinfo: "skip" };
    traces.unshift({ ...edge, y: curve.low, showlegend: false }, { ...edge, y: curve.high, name: "80 %", fill: "tonexty", fillcolor: "rgba(120,140,170,0.25)" });
  }
  if (curve.prior) traces.push({ x: curve.prior.nodes, y: curve.prior.rates, name: "prior", mode: "lines", line: { color: value("--soft"), dash: "dot" } });
  traces.push({ x: sizes.map(([size]) => Number(size)), y: sizes.map(([, rate]) => rate), name: "measured", mode: "markers", marker: { color: value("--orange"), size: 9 } });
  await draw.react(element, traces, { ...layout, height: 250, legend: { orientation: "h", y: 1.14, x: 0 },
    xaxis: { ...axis, title: { text: "nodes" }, rangemode: "tozero" }, yaxis: { ...axis, rangemode: "tozero" } }, CONFIG);
}

// The names of all that was reported, in order.
export function namesIn(points) {
  return [...new Set(points.flatMap((point) => Object.keys(point.metrics)))].sort();
}

// One small chart for each metric, all with the same time axis: a perplexity of 500 must not flatten a loss of 2.
export class Metrics {
  constructor() {
    this.all = false;
    this.grid = make("div", { cls: "small-plots" });
    this.more = make("button", { cls: "plain", type: "button" });
    this.more.addEventListener("click", () => {
      this.all = !this.all;
      this.again?.();
    });
    this.more.hidden = true;
    this.element = make("div", {}, this.grid, this.more);
  }

  async draw(draw, points, signal) {
    this.again = () => this.draw(draw, points, signal);
    const names = namesIn(points);
    const shown = this.all ? names : names.slice(0, MOST);
    this.more.hidden = names.length <= MOST;
    say(this.more, this.all ? `Only the first ${MOST}` : `All ${names.length} metrics`);
    const known = new Map([...this.grid.children].map((part) => [part.dataset.name, part]));
    const parts = shown.map((name) => known.get(name) ?? this.part(name));
    for (const part of this.grid.children) if (!parts.includes(part)) purge(part);
    if (parts.length !== this.grid.children.length || parts.some((part, i) => part !== this.grid.children[i])) this.grid.replaceChildren(...parts);
    const times = points.map((point) => new Date(point.time * 1000));
    const range = times.length > 1 ? { range: [times[0], times.at(-1)] } : {};
    const seconds = times.length ? (times.at(-1) - times[0]) / 1000 : 0;
    // Short enough to stand upright below a small chart.
    const time = { type: "date", nticks: 3, tickangle: 0, tickformat: seconds < 600 ? "%H:%M:%S" : seconds < 86400 ? "%H:%M" : "%d %b" };
    for (const [i, name] of shown.entries()) {
      if (signal.aborted) return;
      const [head, plot] = parts[i].children;
      const values = points.map((point) => point.metrics[name]);
      const broken = values.filter((value) => value === null).length;
      say(head, `${metricText(name, values.findLast((value) => value !== undefined))}${broken ? `; ${broken} of ${points.length} moments not finite` : ""}`);
      head.classList.toggle("bad", broken > 0);
      if (!draw) continue;
      const { value, axis, layout } = look(plot);
      const line = { x: times, y: values.map((one) => one ?? null), mode: points.length < 3 ? "markers" : "lines", connectgaps: false,
        line: { color: value("--pool"), width: 1.6 }, hovertemplate: "%{y:.5~g} at %{x|%d %b %H:%M:%S}<extra></extra>" };
      await draw.react(plot, [line], { ...layout, height: 130, margin: { l: 46, r: 8, t: 6, b: 22 }, showlegend: false,
        xaxis: { ...axis, ...time, ...range }, yaxis: { ...axis, type: "linear", nticks: 4, exponentformat: "power" } }, CONFIG);
    }
  }

  part(name) {
    const part = make("div", {}, make("p", { cls: "soft", title: name }), make("div", { cls: "small-plot" }));
    part.dataset.name = name;
    return part;
  }
}
