// The live page: log in, follow the status, draw the past, keep the tables up to date.

import { ask, follow, get, Refused, setToken, takeToken, token } from "./api.js";
import { Detail } from "./detail.js";
import { addTip, cellsFor, drawGantt, drawLegend, drawPool } from "./draw.js";
import { amount, clock, make, many, NONE, percent, say, span, whole } from "./format.js";
import { forget, showDecisions, showNodes, showTrainers, tiles } from "./tables.js";
import { addThemeSwitch } from "./theme.js";

const WINDOWS = [["5 min", 300], ["1 h", 3600], ["6 h", 21600], ["24 h", 86400], ["7 d", 604800]];
const MOST_DECISIONS = 600;
const $ = (id) => document.getElementById(id);
const GANTT = $("gantt").getAttribute("aria-label");

// `older` is null until somebody asks for older decisions than the newest.
const nothing = () => ({ seconds: 3600, chosen: false, status: null, pool: null, nodes: null, insight: null, decisions: [], older: null, before: null, states: new Map() });
let state = nothing();
let session = null;
let hits = { pool: null, gantt: null };
const tip = document.querySelector(".tip");
const detail = new Detail($("detail"), $("confirm"));
const open = (id) => detail.open(id);

// Whoever logs in next must see nothing of what the last user saw.
function clear() {
  session?.abort();
  session = null;
  state = nothing();
  hits = { pool: null, gantt: null };
  forget();
  for (const id of ["detail", "confirm"]) if ($(id).open) $(id).close();
  detail.empty();
  for (const id of ["where", "link", "news", "tiles", "pool-words", "legend", "nodes", "nodes-words", "trainers-words", "trainers", "decisions", "confirm-title"]) $(id).replaceChildren();
  for (const id of ["no-trainers", "no-decisions", "nodes-words", "older"]) $(id).hidden = true;
  for (const id of ["pool", "gantt"]) $(id).width = $(id).height = 0; // which also takes away what is drawn
  tip.hidden = true;
  tip.replaceChildren();
  delete $("gantt").dataset.runs;
  $("gantt").setAttribute("aria-label", GANTT);
  $("link").className = "pill";
}

function begin() {
  clear();
  $("login").hidden = true;
  $("board").hidden = false;
  $("leave").hidden = false;
  session = new AbortController();
  follow(heard, session.signal);
  repeat(refreshHistory, () => Math.min(Math.max(2, state.seconds / 900), 60));
  repeat(refreshDecisions, () => 5);
  repeat(refreshInsight, () => (state.insight ? 20 : 4));
  repeat(refreshNodes, () => 3);
}

function end(message) {
  clear();
  setToken("");
  $("board").hidden = true;
  $("leave").hidden = true;
  $("login").hidden = false;
  say($("login-error"), message);
  $("token").value = "";
  $("token").focus();
}

// Again and again while the page is seen.
async function repeat(what, everySeconds) {
  const { signal } = session;
  while (!signal.aborted) {
    if (!document.hidden) {
      try {
        await what(signal);
      } catch (problem) {
        if (signal.aborted) return;
        if (problem.status === 401) return;
        if (!(problem instanceof Refused)) console.error(problem);
      }
    }
    await new Promise((done) => setTimeout(done, 1000 * everySeconds()));
  }
}

function heard(status, problem) {
  if (problem) {
    if (problem.status === 401) return end(problem.message);
    link("off", problem.status ? problem.message : "connection lost, trying again");
    return;
  }
  // A run that has just begun would be a sliver of an hour.
  if (!state.chosen) choose(status.now - status.started < 240 ? 300 : 3600);
  state.status = status;
  link(status.paused ? "warn" : "live", status.paused ? "paused" : status.dry_run ? "dry run" : "live");
  say($("where"), `${status.pool.kind ?? "?"} pool · ${status.policy.objective}, ${status.policy.allocator}`);
  showTiles();
  showTrainers($("trainers"), $("trainers-words"), status.trainers, open);
  $("no-trainers").hidden = status.trainers.length > 0;
  announce(status.trainers);
}

function link(kind, text) {
  $("link").className = `pill ${kind}`;
  say($("link"), text);
}

function announce(rows) {
  const news = [];
  for (const row of rows) {
    const before = state.states.get(row.id);
    if (before && before !== row.state && row.state !== "rescaling") news.push(`${row.name} is ${row.state}`);
    if (row.state !== "rescaling" || !before) state.states.set(row.id, row.state);
  }
  if (news.length) say($("news"), news.slice(0, 5).join(", "));
}

function showTiles() {
  const { status, pool, insight } = state;
  if (!status) return;
  const { size, used } = status.pool;
  const { totals } = status;
  const ready = insight && insight.efficiency !== null;
  const since = insight ? `since ${clock(insight.since, { seconds: false, date: true })}, as of ${clock(insight.computed, { seconds: false })}` : "";
  const lost = insight?.lost;
  tiles($("tiles"), [
    ["Nodes now", whole(size), size ? `${whole(size - used)} free` : "the pool is empty"],
    ["In use", whole(used), size ? `${percent(used / size)} of the pool` : NONE],
    ["Node-hours harvested", amount(totals.node_seconds / 3600), pool ? `${percent(pool.used_node_hours / pool.node_hours)} used in this window` : "since the beginning"],
    ["Samples", amount(totals.samples), "by the trainers below"],
    ["Efficiency", ready ? percent(insight.efficiency, 1) : NONE, ready ? `of at most ${percent(insight.bound, 1)}; ${since}` : insight?.why || "being worked out"],
    ["Lost to preemption", lost ? amount(lost.preemption) : NONE, lost ? "samples, estimated from the pauses" : NONE],
    ["Lost to rescaling", lost ? amount(lost.rescale) : NONE, lost ? "samples, estimated from the pauses" : NONE],
  ]);
}

async function refreshInsight(signal) {
  state.insight = (await get("/v1/insight", { signal })).insight;
  showTiles();
}

async function refreshHistory(signal) {
  const { seconds } = state;
  const asked = `seconds=${seconds}&cells=${cellsFor($("pool").parentElement)}`;
  const [pool, nodes] = await Promise.all([get(`/v1/history/pool?${asked}`, { signal }), get(`/v1/history/nodes?${asked}`, { signal })]);
  if (seconds !== state.seconds) return; // another window was chosen meanwhile
  Object.assign(state, { pool, nodes });
  drawPast();
  showTiles();
}

// How long it took, for the benchmark. Only the newest is kept: a browser never forgets one by itself.
function measured(name, start) {
  performance.clearMeasures(name);
  performance.measure(name, { start, end: performance.now() });
}

function drawPast() {
  const { pool, nodes } = state;
  if (!pool || !nodes || $("board").hidden) return;
  const began = performance.now();
  hits = { pool: drawPool($("pool"), pool), gantt: drawGantt($("gantt"), nodes) };
  drawLegend($("legend"), nodes);
  measured("draw", began);
  const rows = nodes.nodes.length < nodes.of_nodes ? `; ${nodes.nodes.length} of ${nodes.of_nodes} nodes are drawn` : "";
  const words = `${amount(pool.node_hours)} node-hours, ${percent(pool.used_node_hours / pool.node_hours)} used, ${many(pool.preemptions, "preemption")}, ${many(pool.rescales, "rescale")}${rows}`;
  say($("pool-words"), words);
  $("gantt").setAttribute("aria-label", `Which trainer was on which of ${nodes.of_nodes} nodes in ${span(state.seconds)}: ${words}`);
  $("gantt").dataset.runs = String(nodes.runs.reduce((sum, runs) => sum + runs.length / 3, 0));
}

async function refreshDecisions(signal) {
  const { decisions: newest, before } = await get("/v1/decisions?limit=40", { signal });
  // Nothing in common with what is shown: there may be others in between, which "Older" would never find.
  if (newest.length && !newest.some(among(held()))) state.older = null;
  if (state.older === null) {
    state.before = before;
  } else {
    // What was new before is old now; keep what was asked for further down.
    const oldest = newest.at(-1)?.seq ?? Infinity;
    state.older = held().filter((one) => one.seq < oldest).slice(0, MOST_DECISIONS - newest.length);
  }
  state.decisions = newest;
  drawDecisions();
}

function held() {
  return [...state.decisions, ...(state.older ?? [])];
}

function among(decisions) {
  const known = new Set(decisions.map((one) => one.seq));
  return (one) => known.has(one.seq);
}

function drawDecisions() {
  const names = new Map((state.status?.trainers ?? []).map((row) => [row.id, row.name]));
  const all = held();
  showDecisions($("decisions"), all, (change) => names.get(change.trainer) ?? /^\S+/.exec(change.reason ?? "")?.[0]?.replace(/[:,]$/, "") ?? change.trainer, open);
  $("no-decisions").hidden = all.length > 0;
  $("older").hidden = state.before === null || all.length >= MOST_DECISIONS;
}

async function refreshNodes(signal) {
  if ($("nodes-fold").open) showNodes($("nodes"), $("nodes-words"), (await get("/v1/nodes", { signal })).nodes);
}

$("older").addEventListener("click", async ({ currentTarget: button }) => {
  // A second press would ask for the same again. `disabled` would take the focus away from who presses with the keyboard.
  if (!session || button.ariaDisabled === "true") return;
  const { signal } = session;
  button.ariaDisabled = "true";
  state.older ??= []; // from now on what is no longer among the newest is kept
  try {
    const found = await get(`/v1/decisions?limit=40&before=${state.before}`, { signal });
    if (state.older === null) return; // it was begun anew meanwhile
    const known = among(held());
    state.older.push(...found.decisions.filter((one) => !known(one)));
    state.before = found.before;
    drawDecisions();
  } catch (problem) {
    if (!signal.aborted) link("off", problem.message);
  } finally {
    button.ariaDisabled = "false";
  }
});

$("nodes-fold").addEventListener("toggle", () => { if (session) refreshNodes(session.signal).catch(() => {}); });

function choose(seconds) {
  state.seconds = seconds;
  state.chosen = true;
  WINDOWS.forEach(([, other], i) => $("windows").children[i].setAttribute("aria-pressed", String(other === seconds)));
}

for (const [text, seconds] of WINDOWS) {
  const button = make("button", { cls: "plain", type: "button", text, "aria-pressed": String(seconds === state.seconds) });
  button.addEventListener("click", () => {
    choose(seconds);
    const asked = performance.now();
    if (session) refreshHistory(session.signal).then(() => measured("asked-to-drawn", asked)).catch((problem) => { if (problem.name !== "AbortError") link("off", problem.message); });
  });
  $("windows").append(button);
}

$("login-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  const given = $("token").value.trim();
  say($("login-error"), "");
  try {
    await ask("/v1/status", { given });
  } catch (problem) {
    say($("login-error"), problem.message);
    $("token").select();
    return;
  }
  setToken(given);
  $("token").value = "";
  begin();
});
$("leave").addEventListener("click", () => end(""));

addTip($("pool"), tip, () => hits.pool);
addTip($("gantt"), tip, () => hits.gantt, open);
addThemeSwitch($("theme"), () => {
  drawPast();
  if (detail.id) detail.refresh();
});
let due = 0;
new ResizeObserver(() => {
  cancelAnimationFrame(due);
  due = requestAnimationFrame(drawPast);
}).observe($("pool").parentElement);

if (takeToken()) begin();
else end("");
addEventListener("hashchange", () => {
  const before = token();
  if (takeToken() && token() !== before) begin();
});
