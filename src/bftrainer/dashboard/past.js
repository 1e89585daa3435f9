// The picture of the past: which window of time it shows, and the pool and its nodes in it.

import { get, Refused } from "./api.js";
import { addTip, cellsFor, drawGantt, drawLegend, drawPool } from "./draw.js";
import { amount, clock, make, many, percent, say, span } from "./format.js";

const WINDOWS = [["5 min", 300], ["1 h", 3600], ["6 h", 21600], ["24 h", 86400], ["7 d", 604800]];
const $ = (id) => document.getElementById(id);
const GANTT = $("gantt").getAttribute("aria-label");
const tip = document.querySelector(".tip");

export class Past {
  // `open` shows a trainer; `changed` is called when there are other figures.
  constructor(open, changed) {
    this.changed = changed;
    this.signal = null;
    for (const [text, seconds] of WINDOWS) {
      const button = make("button", { cls: "plain", type: "button", text });
      button.addEventListener("click", () => this.go(() => this.choose(seconds)));
      $("windows").append(button);
    }
    $("earlier").addEventListener("click", () => this.go(() => this.move(-0.5)));
    $("later").addEventListener("click", () => this.go(() => this.move(0.5)));
    $("now").addEventListener("click", () => this.go(() => { this.end = null; }));
    addTip($("pool"), tip, () => this.hits.pool);
    addTip($("gantt"), tip, () => this.hits.gantt, open);
    let due = 0;
    new ResizeObserver(() => {
      cancelAnimationFrame(due);
      due = requestAnimationFrame(() => this.draw());
    }).observe($("pool").parentElement);
    this.forget();
  }

  // Nothing of one user for the next.
  forget() {
    Object.assign(this, { seconds: 3600, chosen: false, end: null, signal: null });
    this.wipe();
    for (const id of ["pool-words", "when"]) $(id).replaceChildren();
    this.show();
  }

  // Take the picture away, and what it shows.
  wipe() {
    Object.assign(this, { pool: null, nodes: null, hits: { pool: null, gantt: null } });
    $("legend").replaceChildren();
    for (const id of ["pool", "gantt"]) $(id).width = $(id).height = 0; // which also takes away what is drawn
    tip.hidden = true;
    tip.replaceChildren();
    delete $("gantt").dataset.runs;
    $("gantt").setAttribute("aria-label", GANTT);
  }

  // A run that has just begun would be a sliver of an hour.
  begun(status) {
    if (!this.chosen) this.choose(status.now - status.started < 240 ? 300 : 3600);
  }

  choose(seconds) {
    this.seconds = seconds;
    this.chosen = true;
    this.show();
  }

  move(windows) {
    const now = Date.now() / 1000;
    const end = (this.end ?? now) + windows * this.seconds;
    this.end = end < now ? Math.max(end, this.seconds) : null;
  }

  // Somebody wants to see another time: say that it is on its way, and fetch it.
  async go(choose) {
    const asked = performance.now();
    choose();
    this.chosen = true;
    this.show();
    if (!this.signal) return;
    this.words("loading …");
    $("chart").setAttribute("aria-busy", "true");
    const { signal } = this;
    try {
      if (await this.fetch(signal)) measured("asked-to-drawn", asked);
    } catch (problem) {
      if (!signal.aborted && problem.status !== 401) throw problem; // else the user has logged out, or must log in again
    }
  }

  // While a time of the past is shown there is nothing to look for: it stays as it was.
  async refresh(signal) {
    this.signal = signal;
    if (this.end === null || !this.pool) await this.fetch(signal);
  }

  every() {
    return Math.min(Math.max(2, this.seconds / 900), 60);
  }

  // Whether it could be drawn. If another window is chosen in the meantime, this one is no longer needed.
  async fetch(signal) {
    const { seconds, end } = this;
    const asked = `seconds=${seconds}&cells=${cellsFor($("chart"))}${end === null ? "" : `&end=${end.toFixed(3)}`}`;
    const stands = () => seconds === this.seconds && end === this.end && !signal.aborted;
    try {
      const [pool, nodes] = await Promise.all(["pool", "nodes"].map((what) => get(`/v1/history/${what}?${asked}`, { signal })));
      if (!stands()) return false;
      Object.assign(this, { pool, nodes });
    } catch (problem) {
      if (problem.status === 401 || !(problem instanceof Refused)) throw problem;
      if (stands()) this.failed(problem);
      return false;
    }
    $("chart").removeAttribute("aria-busy");
    this.draw();
    this.changed();
    return true;
  }

  // What was refused will be again: an older picture under the new button would be a lie. Where the controller is out
  // of reach, what is drawn stays, unless it is of another time.
  failed(problem) {
    if (problem.status || $("chart").ariaBusy === "true") {
      this.wipe();
      this.words(problem.message, true);
      this.changed();
    }
    $("chart").removeAttribute("aria-busy");
  }

  words(text, bad = false) {
    say($("pool-words"), text);
    $("pool-words").classList.toggle("error", bad);
  }

  show() {
    [...$("windows").children].forEach((button, i) => button.setAttribute("aria-pressed", String(WINDOWS[i][1] === this.seconds)));
    for (const id of ["later", "now"]) $(id).ariaDisabled = String(this.end === null);
    const from = (time) => clock(time, { date: true, seconds: this.seconds < 3600 });
    say($("when"), this.end === null ? "" : `${from(this.end - this.seconds)} to ${from(this.end)}, not live`);
  }

  draw() {
    const { pool, nodes } = this;
    if (!pool || !nodes || $("board").hidden) return;
    const began = performance.now();
    this.hits = { pool: drawPool($("pool"), pool), gantt: drawGantt($("gantt"), nodes) };
    drawLegend($("legend"), nodes);
    measured("draw", began);
    const rows = nodes.nodes.length < nodes.of_nodes ? `; ${nodes.nodes.length} of ${nodes.of_nodes} nodes are drawn` : "";
    const gpuHours = pool.gpu_hours ? ` (${amount(pool.gpu_hours)} GPU-hours)` : "";
    const words = `${amount(pool.node_hours)} node-hours${gpuHours}, ${percent(pool.used_node_hours / pool.node_hours)} used, ${many(pool.preemptions, "preemption")}, ${many(pool.rescales, "rescale")}${rows}`;
    this.words(pool.node_hours ? words : "no node was there");
    $("gantt").setAttribute("aria-label", `Which trainer was on which of ${nodes.of_nodes} nodes in ${span(this.seconds)}: ${words}`);
    $("gantt").dataset.runs = String(nodes.runs.reduce((sum, runs) => sum + runs.length / 3, 0));
  }
}

// How long it took, for the benchmark. Only the newest is kept: a browser never forgets one by itself.
function measured(name, start) {
  performance.clearMeasures(name);
  performance.measure(name, { start, end: performance.now() });
}
