// The tables of the page. Rows are updated in place, so that focus and selection stay where they are.

import { colourOf, css } from "./draw.js";
import { amount, clock, etaWords, gpusText, gpuUse, make, many, metricText, NONE, percent, ranksText, say, short, span, whole } from "./format.js";

const MOST_ROWS = 300;
const MOST_NODES = 1000;
const OVER = ["done", "failed", "cancelled"];
const folded = new Map();
let latest = null;

// Nothing of one user for the next.
export function forget() {
  folded.clear();
  latest = null;
}

export function tiles(list, entries) {
  entries.forEach(([name, value, words, title], i) => {
    const tile = list.children[i] ?? list.appendChild(make("div", {}, make("dt"), make("dd", {}, make("span"), make("small"))));
    if (title) tile.title = title;
    say(tile.querySelector("dt"), name);
    say(tile.querySelector("span"), value);
    say(tile.querySelector("small"), words);
  });
  while (list.children.length > entries.length) list.lastElementChild.remove();
}

// Make a table body's rows those with these keys, in this order; each is made once and then updated.
function sync(body, items, keyOf, create, update) {
  const focused = body.contains(document.activeElement) ? document.activeElement : null;
  const wanted = new Map(items.map((item) => [keyOf(item), item]));
  // Those that are gone go first: otherwise all rows below them would move.
  for (const row of [...body.children]) if (!wanted.has(row.dataset.key)) row.remove();
  const known = new Map([...body.children].map((row) => [row.dataset.key, row]));
  let place = body.firstElementChild;
  for (const [key, item] of wanted) {
    let row = known.get(key);
    if (!row) {
      row = create(item);
      row.dataset.key = key;
    }
    update(row, item);
    if (row === place) place = place.nextElementSibling;
    else body.insertBefore(row, place);
  }
  // A row that moves loses the focus.
  if (focused?.isConnected && document.activeElement !== focused) focused.focus({ preventScroll: true });
}

export function metricsText(metrics) {
  // What is not finite comes first: the user should see it.
  const known = Object.entries(metrics ?? {}).sort(([, a], [, b]) => (b === null) - (a === null));
  return known.slice(0, 3).map(([name, value]) => metricText(name, value, 18)).join(", ") || NONE;
}

export function showTrainers(body, words, rows, open, { now, groups = [] }) {
  latest = { body, words, rows, open, now, etas: new Map(groups.map((one) => [one.group, one.eta])) };
  drawTrainers();
}

function drawTrainers() {
  const { body, words, rows, open } = latest;
  const order = [...rows].sort((a, b) => (OVER.includes(a.state) - OVER.includes(b.state)) || (OVER.includes(a.state) ? b.ended - a.ended : a.submitted - b.submitted));
  const groups = new Map();
  for (const row of order) if (row.group) groups.set(row.group, [...(groups.get(row.group) ?? []), row]);
  const items = [];
  const told = new Set();
  for (const row of order) {
    const members = row.group ? groups.get(row.group) : [];
    if (members.length < 2) {
      items.push({ row });
    } else if (!told.has(row.group)) {
      told.add(row.group);
      if (!folded.has(row.group)) folded.set(row.group, members.length > 6);
      items.push({ group: row.group, members });
      if (!folded.get(row.group)) items.push(...members.map((member) => ({ row: member, member: true })));
    }
  }
  sync(body, items.slice(0, MOST_ROWS), (item) => (item.group ? `g ${item.group}` : item.row.id),
    (item) => (item.group ? groupRow(item.group) : trainerRow(item.row, open)), update);
  const active = rows.filter((row) => !OVER.includes(row.state)).length;
  const left = Math.max(0, items.length - MOST_ROWS);
  say(words, `${active} active, ${rows.length - active} finished in the last hour${left ? `; ${left} rows are not shown` : ""}`);
}

function swatch(id) {
  const mark = make("i", { cls: "swatch" });
  mark.style.background = css(colourOf(Number(id.slice(1))));
  return mark;
}

// What a sweep chose for a trainer.
export function paramsText(params, most = Infinity) {
  const all = Object.entries(params ?? {});
  const told = all.slice(0, most).map(([name, value]) => `${short(name, 24)} ${short(typeof value === "string" ? value : JSON.stringify(value), 24)}`);
  return [...told, ...(all.length > most ? ["…"] : [])].join(", ");
}

function trainerRow(row, open) {
  const button = make("button", { cls: "link", type: "button" });
  button.addEventListener("click", () => open(row.id));
  return make("tr", {},
    make("th", { scope: "row" }, make("span", { cls: "name" }, swatch(row.id), make("span", {}, button, make("small")))),
    make("td", {}, make("span", { cls: "state" }), make("span", { cls: "reason" })),
    make("td", {}, make("span", { cls: "progress" }, make("progress", { max: 1 }), make("span"))),
    make("td", { cls: "n" }), make("td", { cls: "n" }), etaCell(), make("td", { cls: "metrics" }), make("td", { cls: "n" }));
}

function etaCell() {
  return make("td", { cls: "n eta" }, make("span"), make("small"));
}

function showEta(cell, eta, rest) {
  const words = etaWords(eta, latest.now, rest);
  say(cell.firstChild, words.point);
  say(cell.lastChild, words.interval);
  cell.title = words.title;
}

function groupRow(group) {
  const button = make("button", { cls: "link", type: "button" });
  button.addEventListener("click", () => {
    folded.set(group, !folded.get(group));
    drawTrainers();
  });
  return make("tr", { cls: "group" }, make("th", { scope: "row" }, button), make("td"),
    make("td", {}, make("span", { cls: "progress" }, make("progress", { max: 1 }), make("span"))),
    make("td", { cls: "n" }), make("td", { cls: "n" }), etaCell(), make("td"), make("td", { cls: "n" }));
}

function update(tr, item) {
  const cells = tr.children;
  if (item.group) {
    const { members } = item;
    const shut = folded.get(item.group);
    const button = tr.querySelector("button");
    say(button, `${shut ? "▸" : "▾"} ${item.group} (${members.length})`);
    button.setAttribute("aria-expanded", String(!shut));
    const states = new Map();
    for (const one of members) states.set(one.state, (states.get(one.state) ?? 0) + 1);
    say(cells[1], [...states].map(([state, count]) => `${count} ${state}`).join(", "));
    bar(cells[2], members.reduce((sum, one) => sum + (one.progress ?? 0), 0) / members.length);
    const sum = (key) => members.reduce((total, one) => total + (one[key] ?? 0), 0);
    say(cells[3], whole(members.reduce((total, one) => total + one.nodes.length, 0)));
    say(cells[4], sum("rate") ? amount(sum("rate")) : NONE);
    showEta(cells[5], latest.etas.get(item.group), null);
    say(cells[7], amount(sum("node_seconds") / 3600));
    cells[7].title = gpuHours(sum("gpu_seconds"));
    return;
  }
  const row = item.row;
  tr.classList.toggle("member", Boolean(item.member));
  say(tr.querySelector("button"), row.name);
  say(tr.querySelector("small"), [row.id, row.owner, paramsText(row.params, 4)].filter(Boolean).join(" · "));
  const state = tr.querySelector(".state");
  say(state, row.state);
  state.className = `state ${row.state}`;
  const reason = tr.querySelector(".reason");
  say(reason, OVER.includes(row.state) || row.state === "waiting" || row.state === "queued" ? short(row.reason ?? "", 120) : "");
  bar(cells[2], row.progress);
  const ranks = row.ranks > row.nodes.length ? `, ${many(row.ranks, "rank")}` : "";
  say(cells[3], row.nodes.length ? `${row.nodes.length} of ${row.max_nodes}${ranks}` : NONE);
  say(cells[4], row.rate ? amount(row.rate) : NONE);
  showEta(cells[5], OVER.includes(row.state) ? null : row.eta, row.eta_s);
  say(cells[6], metricsText(row.metrics));
  say(cells[7], amount(row.node_seconds / 3600));
  cells[7].title = gpuHours(row.gpu_seconds);
}

function gpuHours(seconds) {
  return seconds ? `${amount(seconds / 3600)} GPU-hours` : "";
}

function bar(cell, share) {
  const element = cell.querySelector("progress");
  if (share === null || share === undefined) element.removeAttribute("value");
  else element.value = share;
  element.hidden = share === null || share === undefined;
  say(cell.querySelector("span span"), share === null || share === undefined ? NONE : percent(share, share < 0.1 ? 1 : 0));
}

// Newest first: below a decision what trainers had lost before it, so that sizes add up from row to row.
function rowsOf(decision) {
  const changes = decision.changes.map((change) => ({ key: `${decision.seq} ${change.trainer}`, time: decision.time, change }));
  const lost = (decision.lost ?? []).map((change) => ({ key: `${decision.seq} ${change.trainer} lost`, time: change.time, change }));
  return [...changes, ...lost].map((item, i) => ({ ...item, decision, first: i === 0 || i === changes.length, told: i < changes.length }));
}

export function showDecisions(body, decisions, open) {
  sync(body, decisions.flatMap(rowsOf), ({ key }) => key, () => make("tr", {},
    make("td"), make("td", { cls: "n" }), make("td"), make("td", { cls: "n" }), make("td", { cls: "why" }), make("td", { cls: "n" }), make("td", { cls: "n" })),
  (tr, { decision, change, time, first, told }) => {
    const cells = tr.children;
    // The date is needed once a time is no longer today's; all else stays as it was decided.
    say(cells[0], first ? clock(time, { date: Date.now() / 1000 - time > 43200 }) : "");
    if (cells[4].textContent) return;
    tr.classList.toggle("inner", !first);
    tr.classList.toggle("lost", !told);
    cells[0].title = told ? `${clock(time, { date: true })}, decided in ${decision.ms} ms, horizon ${span(decision.horizon_s)}` : clock(time, { date: true });
    say(cells[1], first && told ? whole(decision.pool) : "");
    const button = make("button", { cls: "link", type: "button", text: short(change.name, 30) });
    button.addEventListener("click", () => open(change.trainer));
    cells[2].replaceChildren(button);
    const grows = change.after > change.before;
    const cls = !told ? "bad" : grows ? "up" : "down";
    cells[3].replaceChildren(make("span", { cls, text: `${change.before} → ${change.after} ${grows ? "▲" : "▼"}` }));
    say(cells[4], told ? reasonText(change) : lossText(change));
    say(cells[5], told ? amount(change.gain) : "");
    say(cells[6], told ? (change.cost ? amount(change.cost) : NONE) : "");
  });
}

function lossText({ nodes, before, after, min_nodes: least }) {
  const some = `${nodes.slice(0, 5).join(", ")}${nodes.length > 5 ? ` and ${nodes.length - 5} more` : ""}`;
  const stopped = after === 0 && before > nodes.length ? `; it needs at least ${least}, and stopped` : "";
  return `lost ${some}${stopped}`;
}

// The reason begins with the trainer's name, which has its own column.
function reasonText({ name, action, reason }) {
  const text = reason ?? action;
  return (text.startsWith(name) ? text.slice(name.length) : text).replace(/^[\s:,]+/, "") || action;
}

export function showFinished(body, rows, open) {
  sync(body, rows, (row) => row.id, (row) => {
    const button = make("button", { cls: "link", type: "button", text: row.name });
    button.addEventListener("click", () => open(row.id));
    const words = [row.id, row.owner, row.group].filter(Boolean).join(" · ");
    return make("tr", {}, make("th", { scope: "row" }, make("span", { cls: "name" }, swatch(row.id), make("span", {}, button, make("small", { text: words })))),
      make("td", {}, make("span", { cls: `state ${row.state}`, text: row.state }), make("span", { cls: "reason", text: short(row.reason, 120) })),
      make("td", { text: clock(row.ended, { seconds: false, date: true }) }), make("td", { cls: "n", text: amount(row.samples) }),
      make("td", { cls: "metrics", text: metricsText(row.metrics) }), make("td", { cls: "n", text: amount(row.node_seconds / 3600), title: gpuHours(row.gpu_seconds) || null }));
  }, () => {}); // what is finished stays as it is
}

export function showNodes(body, words, nodes) {
  const shown = nodes.slice(0, MOST_NODES);
  words.hidden = shown.length === nodes.length;
  say(words, `${whole(shown.length)} of ${whole(nodes.length)} nodes are listed`);
  body.parentElement.classList.toggle("without-gpus", !nodes.some((node) => node.gpus?.length || node.ranks?.length > 1));
  const cell = () => make("td", { cls: "gpu" });
  sync(body, shown, (node) => node.node, () => make("tr", {}, make("th", { scope: "row" }), make("td"), make("td"), cell(), cell(),
    make("td", { cls: "gpu" }, make("progress", { max: 1 }), make("span")), make("td")),
    (tr, node) => {
      const cells = tr.children;
      say(cells[0], node.node);
      say(cells[1], node.state);
      say(cells[2], node.trainer ?? (node.state === "assigned" ? "someone else" : NONE));
      say(cells[3], gpusText(node.gpus) || NONE);
      say(cells[4], ranksText(node.ranks) || NONE);
      const { share, text } = gpuUse(node.gpus);
      const gauge = cells[5].querySelector("progress");
      gauge.hidden = share === null;
      gauge.value = share ?? 0;
      say(cells[5].querySelector("span"), text || NONE);
      say(cells[6], clock(node.since, { date: true }));
    });
}
