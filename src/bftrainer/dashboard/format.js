// Numbers, times and spans as people read them. Shared by the live page and the simulation report.

export const NONE = "–";

export function amount(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return NONE;
  const size = Math.abs(value);
  if (size >= 1e15 || (size < 1e-4 && size > 0)) return Number(value.toPrecision(3)).toExponential().replace("e+", "e");
  for (const [least, unit] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (size >= least) return `${digits(value / (least === 1e4 ? 1e3 : least), 3)} ${unit}`;
  }
  return size < 100 ? digits(value, 3) : Math.round(value).toLocaleString("en-GB");
}

export function digits(value, most) {
  return Number(value).toLocaleString("en-GB", { maximumSignificantDigits: Math.max(1, most) });
}

export function whole(value) {
  return value === null || value === undefined ? NONE : Math.round(value).toLocaleString("en-GB");
}

export function percent(share, places = 0) {
  if (share === null || share === undefined || !Number.isFinite(share)) return NONE;
  return `${(100 * share).toFixed(places)} %`;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return NONE;
  const s = Math.max(0, seconds);
  if (s < 1) return `${Math.round(s * 1000)} ms`;
  if (s < 10) return `${s.toFixed(1)} s`;
  if (s < 90) return `${Math.round(s)} s`;
  if (s < 5400) return `${Math.round(s / 60)} min`;
  if (s < 172800) {
    const minutes = Math.round((s % 3600) / 60);
    return minutes && minutes < 60 && s < 36000 ? `${Math.floor(s / 3600)} h ${minutes} min` : `${Math.round(s / 3600)} h`;
  }
  return `${digits(s / 86400, 3)} d`;
}

// Times are Unix seconds; they are shown in the browser's zone unless `utc`.
export function clock(time, { utc = false, seconds = true, date = false } = {}) {
  if (time === null || time === undefined) return NONE;
  const asked = { hour: "2-digit", minute: "2-digit", hour12: false, ...(utc ? { timeZone: "UTC" } : {}) };
  if (seconds) asked.second = "2-digit";
  if (date) Object.assign(asked, { day: "numeric", month: "short" });
  return new Date(time * 1000).toLocaleString("en-GB", asked);
}

export function day(time, utc = false) {
  return new Date(time * 1000).toLocaleDateString("en-GB", { day: "numeric", month: "short", ...(utc ? { timeZone: "UTC" } : {}) });
}

export function short(name, most = 24) {
  if (name.length <= most) return name;
  const tail = Math.floor((most - 1) / 2);
  return `${name.slice(0, most - 1 - tail)}…${name.slice(-tail)}`;
}

// A metric as a trainer reported it. `null` is what JSON has for a number that is not finite.
export function metricText(name, value, most = 40) {
  return `${short(name, most)} ${value === null ? "not finite" : amount(value)}`;
}

// When something will be done, from now: the point, the interval that holds it with 80 % probability, and the deadline.
// Before there is a prediction, `rest` is the time that is left at the present rate.
export function etaWords(eta, now, rest = null) {
  if (!eta || eta.low === null) return { point: span(rest), interval: "", title: eta?.why ?? "" };
  const left = (time) => span(Math.max(0, time - now));
  const point = eta.point === null ? `> ${left(eta.low)}` : left(eta.point);
  const interval = eta.high === null ? `90 %: > ${left(eta.low)}` : `80 %: ${left(eta.low)} to ${left(eta.high)}`;
  const limit = eta.likely === null ? "" : `deadline ${clock(eta.deadline, { seconds: false, date: true })}: ${percent(eta.likely)}`;
  return { point, interval: [interval, limit].filter(Boolean).join("; "), title: `From ${many(eta.futures, "future")}, ${eta.basis}` };
}

// An element with text and children. Text is only ever set as text.
export function make(tag, { text, cls, ...more } = {}, ...children) {
  const found = document.createElement(tag);
  if (text !== undefined) found.textContent = text;
  if (cls) found.className = cls;
  for (const [name, value] of Object.entries(more)) {
    if (value !== null && value !== undefined) found.setAttribute(name, value);
  }
  found.append(...children);
  return found;
}

export function many(count, word) {
  return `${whole(count)} ${word}${Math.round(count) === 1 ? "" : "s"}`;
}

// GPUs in a few words, such as "4 × A100 80 GB" or "4 GPUs".
export function gpusText(gpus) {
  const kinds = new Map();
  for (const gpu of gpus ?? []) {
    const name = short((gpu.name ?? "").replace(/^(NVIDIA|AMD|Tesla|GeForce|Instinct)\s+/i, ""), 30);
    const kind = name && gpu.memory_mb && !/\d\s*GB/.test(name) ? `${name} ${Math.round(gpu.memory_mb / 1024)} GB` : name;
    kinds.set(kind, (kinds.get(kind) ?? 0) + 1);
  }
  return [...kinds].map(([kind, count]) => (kind ? `${count} × ${kind}` : many(count, "GPU"))).join(", ");
}

// Ranks and their devices, such as "4 ranks: 0, 1, 2, 3".
export function ranksText(ranks, most = 16) {
  if (!ranks?.length) return "";
  const devices = ranks.slice(0, most).map(({ device }) => short(device || "CPU", 14));
  return `${many(ranks.length, "rank")}: ${devices.join(", ")}${ranks.length > most ? ", …" : ""}`;
}

// How busy GPUs are, 0 to 1 (null: not known), and that with their memory as text.
export function gpuUse(gpus) {
  const known = (key) => (gpus ?? []).map((gpu) => gpu[key]).filter((value) => value !== null && value !== undefined);
  const total = (values) => values.reduce((sum, value) => sum + value, 0);
  const [busy, used, memory] = ["percent", "used_mb", "memory_mb"].map(known);
  const share = busy.length ? total(busy) / busy.length / 100 : null;
  const gb = (values) => Math.round(total(values) / 1024);
  const room = used.length ? [memory.length ? `${gb(used)} of ${gb(memory)} GB` : `${gb(used)} GB`] : [];
  return { share, text: [...(share === null ? [] : [percent(share)]), ...room].join(", ") };
}

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
