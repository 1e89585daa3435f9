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

export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
