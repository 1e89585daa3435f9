// Asking the controller: with the token in the header, never in an address.

const KEY = "bftrainer.token";
const ANSWER_MS = 30_000;
const QUIET_MS = 45_000; // three times as long as the controller is ever quiet in a stream
const FIRST_WAIT_MS = 500;
const LONGEST_WAIT_MS = 10_000;

export class Refused extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

// A link of `bftrainer demo` has the token after the #, which no server sees; it is taken out of the address at once.
export function takeToken() {
  const found = /^#token=([^&]+)/.exec(location.hash);
  if (found) {
    history.replaceState(null, "", location.pathname);
    try { setToken(decodeURIComponent(found[1])); } catch { setToken(found[1]); }
  }
  return token();
}

export function token() {
  return sessionStorage.getItem(KEY) ?? "";
}

export function setToken(value) {
  if (value) sessionStorage.setItem(KEY, value);
  else sessionStorage.removeItem(KEY);
}

// Until `signal`, and no longer than `most_ms` unless that is null.
export async function ask(path, { method = "GET", signal, given = token(), most_ms = ANSWER_MS } = {}) {
  if (!/^[\x21-\x7e]+$/.test(given)) throw new Refused(401, "this is not a token: it has characters that no token has");
  const ends = [signal, most_ms === null ? null : AbortSignal.timeout(most_ms)].filter(Boolean);
  const answer = await reached(fetch(path, { method, signal: AbortSignal.any(ends), cache: "no-store", headers: { Authorization: `Bearer ${given}` } }));
  if (!answer.ok) {
    const said = await answer.json().catch(() => ({}));
    throw new Refused(answer.status, said.error ?? `the controller answered ${answer.status}`);
  }
  return answer;
}

export async function get(path, more) {
  return reached((await ask(path, more)).json());
}

// What the network did, in words; it may also fail in the middle of an answer.
async function reached(doing) {
  try {
    return await doing;
  } catch (problem) {
    if (problem.name === "TimeoutError") throw new Refused(0, "the controller takes too long to answer");
    if (problem instanceof TypeError) throw new Refused(0, "the controller cannot be reached");
    throw problem;
  }
}

// The status whenever it changes, for as long as the page is open. `told` is called with (status) or (null, problem).
// A hidden page lets go of its stream: a browser opens six connections to a host, and other tabs need theirs.
export async function follow(told, signal) {
  let wait = FIRST_WAIT_MS;
  const well = (status) => {
    wait = FIRST_WAIT_MS;
    told(status, null);
  };
  while (!signal.aborted) {
    const problem = document.hidden ? null : await listen(well, signal);
    if (signal.aborted) return;
    if (problem) told(null, problem);
    if (problem?.status === 401) return;
    if (problem) await pause(wait, signal);
    else if (document.hidden) await pause(LONGEST_WAIT_MS, signal);
    wait = problem ? Math.min(wait * 2, LONGEST_WAIT_MS) : FIRST_WAIT_MS;
  }
}

// One connection. What ended it, or null if that was the page: hidden, or left.
async function listen(told, signal) {
  const stream = new AbortController();
  const ends = AbortSignal.any([signal, stream.signal]);
  document.addEventListener("visibilitychange", () => stream.abort(), { signal: ends });
  let silent = false;
  let timer = 0;
  const heard = () => {
    clearTimeout(timer);
    timer = setTimeout(() => {
      silent = true;
      stream.abort();
    }, QUIET_MS);
  };
  try {
    heard();
    const answer = await ask("/v1/stream", { signal: ends, most_ms: null });
    for await (const text of events(answer.body, heard)) {
      if (ends.aborted) break;
      told(JSON.parse(text));
    }
    return ends.aborted ? null : new Refused(0, "the controller ended the connection");
  } catch (problem) {
    if (silent) return new Refused(0, "the controller has gone silent");
    return ends.aborted ? null : problem;
  } finally {
    clearTimeout(timer);
    stream.abort();
  }
}

// A while; shorter when the page is seen again or left.
function pause(ms, signal) {
  const over = new AbortController();
  return new Promise((done) => {
    setTimeout(done, ms);
    document.addEventListener("visibilitychange", done, { signal: over.signal });
    signal.addEventListener("abort", done, { signal: over.signal });
  }).finally(() => over.abort());
}

async function* events(body, heard) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    heard();
    rest += value;
    let end = rest.indexOf("\n\n");
    while (end >= 0) {
      const data = rest.slice(0, end).split("\n").filter((line) => line.startsWith("data: "));
      if (data.length) yield data.map((line) => line.slice(6)).join("\n");
      rest = rest.slice(end + 2);
      end = rest.indexOf("\n\n");
    }
  }
}
