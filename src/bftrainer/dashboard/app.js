// The live page: log in, follow the status, keep tiles and tables up to date. `past.js` draws the past.

import { ask, follow, get, Refused, setToken, takeToken, token } from "./api.js";
import { Detail } from "./detail.js";
import { Finished } from "./finished.js";
import { amount, clock, NONE, percent, say, short, whole } from "./format.js";
import { Past } from "./past.js";
import { forget, showDecisions, showNodes, showTrainers, tiles } from "./tables.js";
import { addThemeSwitch } from "./theme.js";

const MOST_DECISIONS = 600;
const $ = (id) => document.getElementById(id);

// `older` is null until the user asks for decisions older than the newest.
const nothing = () => ({ status: null, insight: null, decisions: [], older: null, before: null, states: new Map(), lost: null });
let state = nothing();
let session = null;
const detail = new Detail($("detail"), $("confirm"));
const open = (id) => detail.open(id);
const past = new Past(open, showTiles);
const finished = new Finished(open);

// Whoever logs in next must see nothing of what the last user saw.
function clear() {
  session?.abort();
  session = null;
  state = nothing();
  past.forget();
  finished.forget();
  forget();
  for (const id of ["detail", "confirm"]) if ($(id).open) $(id).close();
  detail.empty();
  for (const id of ["where", "link", "news", "tiles", "notice", "nodes", "nodes-words", "trainers-words", "trainers", "decisions", "confirm-title"]) $(id).replaceChildren();
  for (const id of ["notice", "no-trainers", "no-decisions", "nodes-words", "older"]) $(id).hidden = true;
  $("board").classList.remove("stale");
  $("link").className = "pill";
}

function begin() {
  clear();
  $("login").hidden = true;
  $("board").hidden = false;
  $("leave").hidden = false;
  session = new AbortController();
  follow(heard, session.signal);
  finished.begin(session.signal);
  repeat((signal) => past.refresh(signal), () => past.every());
  repeat(refreshDecisions, () => 5);
  repeat(refreshInsight, () => (state.insight?.efficiency ? 20 : 4));
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
    state.lost ??= Date.now() / 1000;
    link("off", `${problem.status ? problem.message : "connection lost"}; nothing new since ${clock(state.lost)}, trying again`);
    $("board").classList.add("stale");
    return;
  }
  state.lost = null;
  $("board").classList.remove("stale");
  past.begun(status);
  state.status = status;
  link(status.paused ? "warn" : "live", status.paused ? "paused" : status.dry_run ? "dry run" : "live");
  say($("where"), `${status.pool.kind ?? "?"} pool · ${status.policy.objective}, ${status.policy.allocator}`);
  $("notice").hidden = !status.pool.problem;
  say($("notice"), status.pool.problem ? `The pool has a problem: ${short(status.pool.problem, 400)}` : "");
  showTiles();
  showTrainers($("trainers"), $("trainers-words"), status.trainers, open, status);
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

const BOUND = "U: the time in which a pool of constant size with the same node-hours would have made the same samples at no cost, as a share of the time it took. The bound is in the same unit. It can be above 100 %: a pool that is large while there is much to do and small when trainers have ended can do more than a constant one.";
const WORK = "What the trainers made, as a share of the best that the pool's nodes allowed at every instant to the trainers of that instant, if starting and rescaling cost nothing.";
const PREEMPTION = "Samples that were not made because nodes were taken: the pauses after that, and, for a trainer that had to stop, the whole time until it trained again, at its earlier rate. Giving nodes back for a pause of harvesting counts too. Samples computed twice do not.";
const RESCALING = "Samples that were not made in the pauses of rescales that were decided on, at the rate before each rescale.";

function showTiles() {
  const { status, insight } = state;
  const { pool } = past;
  if (!status) return;
  const { size, used, gpus, used_gpus: gpusUsed } = status.pool;
  const { totals } = status;
  const ready = insight && insight.efficiency !== null;
  const asOf = insight ? `as of ${clock(insight.computed, { seconds: false })}` : "";
  const since = insight ? `since ${clock(insight.since, { seconds: false, date: true })}, ${asOf}` : "";
  const why = insight?.why ? `${insight.why}, ${asOf}` : "being worked out";
  const lost = insight?.lost;
  tiles($("tiles"), [
    ["Nodes now", whole(size), size ? `${whole(size - used)} free` : "the pool is empty"],
    ["In use", whole(used), size ? `${percent(used / size)} of the pool` : NONE],
    ...(gpus ? [["GPUs in use", whole(gpusUsed), `of ${whole(gpus)}; ${amount(totals.gpu_seconds / 3600)} GPU-hours harvested`]] : []),
    ["Node-hours harvested", amount(totals.node_seconds / 3600), pool?.node_hours ? `${percent(pool.used_node_hours / pool.node_hours)} used in this window` : "since the beginning"],
    ["Samples", amount(totals.samples), totals.owner ? "by your trainers" : "since the beginning"],
    ["Work done", ready ? percent(insight.work_done, 1) : NONE, ready ? `of the best possible; ${since}` : why, WORK],
    ["Makespan ratio", ready ? percent(insight.efficiency, 1) : NONE, ready ? `of at most ${percent(insight.bound, 1)}; ${since}` : why, BOUND],
    ["Lost to preemption", lost ? amount(lost.preemption) : NONE, lost ? `samples, estimated, ${asOf}` : NONE, PREEMPTION],
    ["Lost to rescaling", lost ? amount(lost.rescale) : NONE, lost ? `samples, estimated, ${asOf}` : NONE, RESCALING],
  ]);
}

async function refreshInsight(signal) {
  state.insight = (await get("/v1/insight", { signal })).insight;
  showTiles();
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
  const all = held();
  showDecisions($("decisions"), all, open);
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
    if (state.older === null) return; // the list was reloaded in the meantime
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

addThemeSwitch($("theme"), () => {
  past.draw();
  if (detail.id) detail.refresh();
});

if (takeToken()) begin();
else end("");
addEventListener("hashchange", () => {
  const before = token();
  if (takeToken() && token() !== before) begin();
});
