// One trainer in detail: its curve, what it reports, its pauses and its log.

import { ask, get } from "./api.js";
import { colourOf, css } from "./draw.js";
import { amount, clock, day, make, many, metricText, NONE, percent, ranksText, say, span, whole } from "./format.js";
import { drawCurve, loadPlotly, Metrics, namesIn, purge } from "./plots.js";
import { paramsText } from "./tables.js";

const EVERY_MS = 3000;
const workerText = ({ node, state, ranks }) => `${node} ${state}${ranks?.length > 1 || ranks?.[0]?.device ? ` (${ranksText(ranks, 8)})` : ""}`;
const OVER = ["done", "failed", "cancelled"];

// When it will be done, by the clock.
function doneFact(eta) {
  const at = (time) => clock(time, { seconds: eta.high !== null && eta.high - eta.low < 600, date: time - eta.computed > 43200 });
  const interval = eta.high === null ? `90 %: after ${at(eta.low)}` : `80 %: ${at(eta.low)} to ${at(eta.high)}`;
  const limit = eta.likely === null ? "" : `; deadline ${clock(eta.deadline, { seconds: false, date: true })}: ${percent(eta.likely)}`;
  return ["Done at", eta.point === null ? NONE : at(eta.point), interval + limit];
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

  // Nothing is asked, shown or kept any more.
  empty() {
    clearTimeout(this.timer);
    this.shut.abort();
    this.id = null;
    this.library = null;
    purge(this.dialog);
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
    this.params = make("p");
    this.curve = make("div", { cls: "plot" });
    this.metrics = new Metrics();
    this.curveWords = make("p", { cls: "soft" });
    this.metricWords = make("p", { cls: "soft" });
    this.pauses = make("tbody");
    this.pauseWords = make("p", { cls: "soft" });
    this.startWords = make("p", { cls: "soft" });
    this.workers = make("p", { cls: "soft" });
    this.log = make("pre", { tabindex: "0", "aria-label": "The end of its log" });
    this.error = make("pre", { tabindex: "0", "aria-label": "Why it failed" });
    this.errorPart = make("div", {}, make("h3", { text: "Why it failed" }), this.error);
    this.errorPart.hidden = true;
    const head = ["Time", "Why", "Nodes", "Pause", "Forming", "Copying"].map((text, i) => make("th", { scope: "col", text, cls: i > 1 ? "n" : "" }));
    this.dialog.replaceChildren(
      make("div", { cls: "detail-head" }, this.mark, this.title, this.state, make("span", { cls: "push" }), this.stop, close),
      make("div", { cls: "detail-body" }, this.problem, this.facts, this.params, this.errorPart,
        make("div", { cls: "pair" },
          make("div", {}, make("h3", { text: "Samples per second by nodes" }), this.curve, this.curveWords),
          make("div", {}, make("h3", { text: "What it reports" }), this.metrics.element, this.metricWords)),
        make("h3", { text: "Rescales" }), this.pauseWords, this.startWords,
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
      ["Nodes", row.nodes.length ? whole(row.nodes.length) : NONE, `${row.min_nodes} to ${row.max_nodes}${row.ranks > row.nodes.length ? `; ${many(row.ranks, "rank")}` : ""}`],
      ["Rate", row.rate ? `${amount(row.rate)}/s` : NONE, row.eta_s === null ? `step ${whole(row.step)}` : `${span(row.eta_s)} left`],
      ...(row.eta && row.eta.low !== null && !OVER.includes(row.state) ? [doneFact(row.eta)] : []),
      ["Node-hours", amount(row.node_seconds / 3600), `${row.gpu_seconds ? `${amount(row.gpu_seconds / 3600)} GPU-hours; ` : ""}epoch ${whole(row.epoch)}`],
      ["Rescales", whole(row.rescales), many(row.preemptions, "preemption")],
      ["Redone", amount(row.samples_redone), "samples, after a loss"],
      ["Submitted", clock(row.submitted, { seconds: false }), `${day(row.submitted)}, by ${row.owner}`],
    ];
    this.facts.replaceChildren(...facts.map(([name, value, words]) => make("div", {}, make("dt", { text: name }), make("dd", { text: value }, make("small", { text: words })))));
    const params = paramsText(row.params);
    say(this.params, params ? `${row.group ? `${row.group}: ` : ""}${params}` : "");
    this.errorPart.hidden = !(row.error || row.traceback);
    say(this.error, [row.error, row.traceback].filter(Boolean).join("\n\n"));
    const p = row.pauses;
    const inParts = (parts) => parts.map(([name, seconds]) => `${name.replace("_", " ")} ${span(seconds)}`).join(", ");
    const pause = Object.entries(row.pause_parts ?? {});
    say(this.pauseWords, p.count ? `${whole(p.count)} in total; median pause ${span(p.median_s)}${pause.length ? ` (${inParts(pause)})` : ""}. Growing costs ${span(row.up_s)}, shrinking ${span(row.down_s)}.` : "None yet.");
    const parts = Object.entries(row.start_parts ?? {});
    const whole_s = parts.reduce((sum, [, seconds]) => sum + seconds, 0);
    say(this.startWords, parts.length ? `A new worker takes ${span(whole_s)} to its first step: ${inParts(parts)}.` : "");
    this.pauseTable.hidden = !p.count;
    this.pauses.replaceChildren(...past.rescales.filter((one) => one.why !== "start").slice(0, 12).map((one) => make("tr", {},
      make("td", { text: clock(one.time, { date: true }) }), make("td", { text: one.why }),
      make("td", { cls: "n", text: `${one.world_before} → ${one.world}` }),
      ...["pause_s", "form_s", "sync_s"].map((key) => make("td", { cls: "n", text: span(one[key]) })))));
    say(this.workers, row.workers.length ? `${many(row.workers.length, "worker")}: ${row.workers.slice(0, 12).map(workerText).join(", ")}${row.workers.length > 12 ? ", …" : ""}` : row.reason);
    const below = this.log.scrollTop + this.log.clientHeight >= this.log.scrollHeight - 8;
    say(this.log, row.log_tail.join("\n") || "It has printed nothing.");
    if (below) this.log.scrollTop = this.log.scrollHeight;
  }

  async draw(row, past, signal) {
    say(this.curveWords, curveText(row.curve));
    const now = Object.entries(row.metrics).slice(0, 8).map(([name, value]) => metricText(name, value));
    say(this.metricWords, now.length ? `${past.points.length} moments kept. Now: ${now.join(", ")}.` : "It has reported no metrics.");
    const draw = await (this.library ??= loadPlotly());
    if (signal.aborted) return;
    this.curve.hidden = !draw;
    if (draw) await drawCurve(draw, this.curve, row.curve);
    this.metrics.element.hidden = !namesIn(past.points).length;
    await this.metrics.draw(draw, past.points, signal);
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

// What the curve is made of: what this trainer measured, and how often trainers of its script stayed at which size.
function curveText(curve) {
  const few = (found, text) => Object.entries(found).slice(0, 12).map(([size, value]) => `${size}: ${text(value)}`).join(", ");
  const stays = curve.stays ?? {};
  const own = Object.keys(curve.measured).length ? `Measured: ${few(curve.measured, amount)}.` : "It has measured nothing yet.";
  if (Object.keys(stays).length) return `${own} Stays of all trainers of this script: ${few(stays, (count) => String(Math.round(count * 10) / 10))}.`;
  return curve.low ? `${own} The curve is the one that was given.` : `${own} The curve is a guess.`;
}
