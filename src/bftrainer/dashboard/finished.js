// Trainers that finished however long ago: searched by the controller, a page at a time.

import { get } from "./api.js";
import { say, many } from "./format.js";
import { showFinished } from "./tables.js";

const $ = (id) => document.getElementById(id);
const AFTER_MS = 250; // the user may still be typing

export class Finished {
  constructor(open) {
    this.open = open;
    this.timer = 0;
    this.forget();
    $("finished-fold").addEventListener("toggle", () => { if ($("finished-fold").open) this.ask(); });
    $("search").addEventListener("input", () => {
      clearTimeout(this.timer);
      this.timer = setTimeout(() => this.ask(), AFTER_MS);
    });
    $("more").addEventListener("click", () => { if ($("more").ariaDisabled !== "true") this.ask(this.before); });
  }

  begin(signal) {
    this.signal = signal;
    if ($("finished-fold").open) this.ask();
  }

  // Nothing of one user for the next.
  forget() {
    Object.assign(this, { rows: [], before: null, asked: 0, signal: null });
    clearTimeout(this.timer);
    $("search").value = "";
    $("finished").replaceChildren();
    say($("finished-words"), "");
    $("more").hidden = true;
  }

  // From the newest on, or those before a number. Of several questions the last one counts.
  async ask(before = null) {
    const { signal } = this;
    if (!signal) return;
    const asked = ++this.asked;
    $("more").ariaDisabled = "true";
    const search = $("search").value.trim();
    try {
      const query = new URLSearchParams({ search, limit: 50, ...(before === null ? {} : { before }) });
      const found = await get(`/v1/finished?${query}`, { signal });
      if (asked !== this.asked || signal.aborted) return;
      this.rows = before === null ? found.trainers : [...this.rows, ...found.trainers];
      this.before = found.before;
      showFinished($("finished"), this.rows, this.open);
      $("more").hidden = this.before === null;
      say($("finished-words"), this.rows.length ? `${many(this.rows.length, "trainer")}${this.before === null ? "" : ", and more"}` : search ? "No trainer found." : "None is finished.");
    } catch (problem) {
      if (asked === this.asked && !signal.aborted) say($("finished-words"), problem.message);
    } finally {
      if (asked === this.asked) $("more").ariaDisabled = "false";
    }
  }
}
