// One trainer in detail: its curve, what it reports, its pauses and its log. Charts are plotly's, loaded when first needed.

import { ask, get } from "./api.js";
import { colourOf, css } from "./draw.js";
import { amount, clock, day, make, many, NONE, percent, say, span, whole } from "./format.js";

const EVERY_MS = 3000;
const OVER = ["done", "failed", "cancelled"];

let plotly = null;

function loadPlotly() {
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

export class Detail {
  constructor(dialog, confirm) {
    this.dialog = dialog;
    this.confirm = confirm;
    this.id = null;
    this.timer = 0;
    this.shut = new AbortController();
    dialog.addEventListener("close", () => { if (!dialog.open) this.empty(); });
    dialog.addEventListener("click", (event) => { if (event.target === dialog) dialog.close(); });
    confirm.querySelector("#confirm-no").addEventListener("click", () => confirm.close());
    confirm.querySelector("#confirm-yes").addEventListener("click", () => this.cancel());
  }

  open(id) {
    this.empty();
    this.id = id;
    this.shut = new AbortController();
    this.build();
    if (!this.dialog.open) this.dialog.showModal();
    this.refresh();
  }

  // Nothing is asked, shown or kept any more. A plot of Plotly listens to the window until it is purged.
  empty() {
    clearTimeout(this.timer);
    this.shut.abort();
    this.id = null;
    this.library = null;
    for (const plot of this.dialog.querySelectorAll(".js-plotly-plot")) (window.Plotly ?? window.moduleName).purge(plot);
    this.dialog.replaceChildren();
  }

  build() {
    const close = make("button", { cls: "plain", type: "button", text: "Close" });
    close.addEventListener("click", () => this.dialog.close());
    this.stop = make("button", { cls: "danger", type: "button", text: "Cancel…", id: "cancel" });
    this.stop.hidden = true;
    this.stop.addEventListener("click", () => this.ask());
    this.title = make("h2", { id: "detail-title", text: this.id });
    this.state = make("span", { cls: "state" });
    this.mark = make("i", { cls: "swatch" });
    this.problem = make("p", { cls: "error", role: "alert" });
    this.facts = make("dl", { cls: "tiles" });
    this.curve = make("div", { cls: "plot" });
    this.metrics = make("div", { cls: "plot" });
    this.curveWords = make("p", { cls: "soft" });
    this.metricWords = make("p", { cls: "soft" });
    this.pauses = make("tbody");
    this.pauseWords = make("p", { cls: "soft" });
    this.workers = make("p", { cls: "soft" });
    this.log = make("pre", { tabindex: "0", "aria-label": "The end of its log" });
    this.error = make("pre", { tabindex: "0", "aria-label": "Why it failed" });
    this.errorPart = make("div", {}, make("h3", { text: "Why it failed" }), this.error);
    const head = ["Time", "Why", "Nodes", "Pause", "Forming", "Copying"].map((text, i) => make("th", { scope: "col", text, cls: i > 1 ? "n" : "" }));
    this.dialog.replaceChildren(
      make("div", { cls: "detail-head" }, this.mark, this.title, this.state, make("span", { cls: "push" }), this.stop, close),
      make("div", { cls: "detail-body" }, this.problem, this.facts, this.errorPart,
        make("div", { cls: "pair" },
          make("div", {}, make("h3", { text: "Samples per second by nodes" }), this.curve, this.curveWords),
          make("div", {}, make("h3", { text: "What it reports" }), this.metrics, this.metricWords)),
        make("h3", { text: "Rescales" }), this.pauseWords,
        make("div", { cls: "wide" }, this.pauseTable = make("table", {}, make("thead", {}, make("tr", {}, ...head)), this.pauses)),
        make("h3", { text: "Log" }), this.workers, this.log));
  }

  async refresh() {
    clearTimeout(this.timer);
    const { id, shut: { signal } } = this;
    if (!id) return;
    try {
      const [row, past] = await Promise.all([get(`/v1/trainers/${id}`, { signal }), get(`/v1/trainers/${id}/history`, { signal })]);
      if (signal.aborted) return;
      say(this.problem, "");
      this.show(row, past);
      await this.draw(row, past, signal);
      if (OVER.includes(row.state)) return;
    } catch (problem) {
      if (!signal.aborted) say(this.problem, problem.message);
    }
    if (!signal.aborted) this.timer = setTimeout(() => this.refresh(), EVERY_MS);
  }

  show(row, past) {
    this.name = row.name;
    this.mark.style.background = css(colourOf(Number(row.id.slice(1))));
    say(this.title, row.name);
    say(this.state, row.state);
    this.state.className = `state ${row.state}`;
    this.stop.hidden = OVER.includes(row.state);
    const facts = [
      ["Progress", percent(row.progress, 1), row.total ? `${amount(row.samples)} of ${amount(row.total)} samples` : `${amount(row.samples)} samples`],
      ["Nodes", row.nodes.length ? whole(row.nodes.length) : NONE, `${row.min_nodes} to ${row.max_nodes}`],
      ["Rate", row.rate ? `${amount(row.rate)}/s` : NONE, row.eta_s === null ? `step ${whole(row.step)}` : `${span(row.eta_s)} left`],
      ["Node-hours", amount(row.node_seconds / 3600), `epoch ${whole(row.epoch)}`],
      ["Rescales", whole(row.rescales), many(row.preemptions, "preemption")],
      ["Redone", amount(row.samples_redone), "samples, after a loss"],
      ["Submitted", clock(row.submitted, { seconds: false }), `${day(row.submitted)}, by ${row.owner}`],
    ];
    this.facts.replaceChildren(...facts.map(([name, value, words]) => make("div", {}, make("dt", { text: name }), make("dd", { text: value }, make("small", { text: words })))));
    this.errorPart.hidden = !(row.error || row.traceback);
    say(this.error, [row.error, row.traceback].filter(Boolean).join("\n\n"));
    const p = row.pauses;
    say(this.pauseWords, p.count ? `${whole(p.count)} in all; a pause of ${span(p.median_s)} on median. Growing costs ${span(row.up_s)}, shrinking ${span(row.down_s)}.` : "None yet.");
    this.pauseTable.hidden = !p.count;
    this.pauses.replaceChildren(...past.rescales.filter((one) => one.why !== "start").slice(0, 12).map((one) => make("tr", {},
      make("td", { text: clock(one.time, { date: true }) }), make("td", { text: one.why }),
      make("td", { cls: "n", text: `${one.world_before} → ${one.world}` }),
      ...["pause_s", "form_s", "sync_s"].map((key) => make("td", { cls: "n", text: span(one[key]) })))));
    say(this.workers, row.workers.length ? `${many(row.workers.length, "worker")}: ${row.workers.slice(0, 12).map((one) => `${one.node} ${one.state}`).join(", ")}${row.workers.length > 12 ? ", …" : ""}` : row.reason);
    const below = this.log.scrollTop + this.log.clientHeight >= this.log.scrollHeight - 8;
    say(this.log, row.log_tail.join("\n") || "It has printed nothing.");
    if (below) this.log.scrollTop = this.log.scrollHeight;
  }

  async draw(row, past, signal) {
    const sizes = Object.entries(row.curve.measured);
    say(this.curveWords, sizes.length ? `Measured: ${sizes.slice(0, 12).map(([size, rate]) => `${size}: ${amount(rate)}`).join(", ")}.` : "Nothing measured yet: the curve is a guess.");
    const names = [...new Set(past.points.flatMap((point) => Object.keys(point.metrics)))].slice(0, 8);
    say(this.metricWords, names.length ? `${past.points.length} moments kept. Now: ${Object.entries(row.metrics).slice(0, 8).map(([name, value]) => `${name} ${amount(value)}`).join(", ")}.` : "It has reported no metrics.");
    const draw = await (this.library ??= loadPlotly()); // what cannot be had is asked for again at the next opening
    if (signal.aborted) return;
    if (!draw) {
      this.curve.hidden = this.metrics.hidden = true;
      return;
    }
    this.metrics.hidden = !names.length;
    const style = getComputedStyle(this.dialog);
    const value = (name) => style.getPropertyValue(name).trim();
    const axis = { gridcolor: value("--rule"), zeroline: false, linecolor: value("--line"), automargin: true };
    const layout = {
      margin: { l: 46, r: 8, t: 8, b: 36 }, height: 250, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { color: value("--soft"), size: 11, family: "system-ui, sans-serif" }, legend: { orientation: "h", y: 1.14, x: 0 }, hovermode: "closest",
    };
    const config = { displaylogo: false, responsive: true, displayModeBar: false };
    const { curve } = row;
    const traces = [{ x: curve.nodes, y: curve.rates, name: "fit, in use", mode: "lines", line: { color: value("--pool"), width: 2 } }];
    if (curve.prior) traces.push({ x: curve.prior.nodes, y: curve.prior.rates, name: "prior", mode: "lines", line: { color: value("--soft"), dash: "dot" } });
    traces.push({ x: sizes.map(([size]) => Number(size)), y: sizes.map(([, rate]) => rate), name: "measured", mode: "markers", marker: { color: value("--orange"), size: 9 } });
    await draw.react(this.curve, traces, { ...layout, xaxis: { ...axis, title: { text: "nodes" }, rangemode: "tozero" }, yaxis: { ...axis, rangemode: "tozero" } }, config);
    if (!names.length || signal.aborted) return;
    const times = past.points.map((point) => new Date(point.time * 1000));
    // What differs by far in size gets the other axis, so that a loss of 2 does not flatten an accuracy of 0.9.
    const largest = names.map((name) => Math.max(...past.points.map((point) => Math.abs(point.metrics[name] ?? 0))));
    const other = largest.map((most) => most > 5 * Math.min(...largest.filter((m) => m > 0), Infinity));
    const lines = names.map((name, i) => ({ x: times, y: past.points.map((point) => point.metrics[name] ?? null), name, mode: past.points.length < 3 ? "markers" : "lines", connectgaps: true, yaxis: other[i] ? "y2" : "y" }));
    const second = other.includes(true) ? { yaxis2: { ...axis, type: "linear", overlaying: "y", side: "right", gridcolor: "rgba(0,0,0,0)" } } : {};
    await draw.react(this.metrics, lines, { ...layout, xaxis: { ...axis, type: "date" }, yaxis: { ...axis, type: "linear" }, ...second }, config);
  }

  ask() {
    say(this.confirm.querySelector("h2"), `Cancel ${this.name}?`);
    say(this.confirm.querySelector("#confirm-error"), "");
    this.confirm.querySelector("#confirm-yes").disabled = false;
    this.confirm.showModal();
    this.confirm.querySelector("#confirm-no").focus();
  }

  async cancel() {
    const yes = this.confirm.querySelector("#confirm-yes");
    yes.disabled = true;
    try {
      await ask(`/v1/trainers/${this.id}/cancel`, { method: "POST" });
      this.confirm.close();
      this.refresh();
    } catch (problem) {
      say(this.confirm.querySelector("#confirm-error"), problem.message);
      yes.disabled = false;
    }
  }
}
